//! Events of GPUs' health. Pure.
use std::collections::BTreeMap;

use cleave_api::gpunode::Health;
use cleave_api::names::HEALTH_SUSPECT;

use crate::event::{NodeEvent, recovered, warning};
use crate::gpu::hardware::Hardware;

/// What was told of each GPU and MIG device that is not as it should be: a change is worth one
/// event, and a restart none.
#[derive(Debug, Clone, Default)]
pub struct Told(BTreeMap<String, Degree>);

/// How bad it is, for telling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Degree {
    /// It serves, and should be reset some time.
    Pending,
    /// It may come back by itself.
    Passing,
    /// It needs somebody.
    Lasting,
}

impl Told {
    /// What an agent before this one has told.
    pub fn before(hardware: &Hardware) -> Self {
        Self(degrees(hardware).map(|(device, degree, _)| (device, degree)).collect())
    }

    /// What is to be told now.
    pub fn news(&mut self, hardware: &Hardware) -> Vec<NodeEvent> {
        let (mut found, mut now) = (Vec::new(), BTreeMap::new());
        for (device, degree, health) in degrees(hardware) {
            if self.0.get(&device).is_none_or(|told| *told < degree) {
                let reason = if degree == Degree::Pending { "GpuResetPending" } else { "GpuUnhealthy" };
                found.push(warning(reason, format!("GPU {device}: {}", health.message)));
            }
            now.insert(device, degree);
        }
        // One that is better and not well yet is told when it is worse again.
        for device in self.0.keys().filter(|device| !now.contains_key(*device)) {
            found.push(recovered(format!("GPU {device} is healthy again")));
        }
        self.0 = now;
        found
    }
}

/// GPUs and MIG devices that are not as they should be.
fn degrees(hardware: &Hardware) -> impl Iterator<Item = (String, Degree, &Health)> {
    let whole = hardware.gpus.iter().map(|(uuid, known)| (uuid, &known.health));
    let instances = hardware.gpus.values().flat_map(|known| &known.instances);
    whole.chain(instances).filter_map(|(device, health)| {
        let degree = match (health.healthy, health.class.as_str()) {
            (true, _) if health.reason.is_empty() => return None,
            (true, _) => Degree::Pending,
            (false, HEALTH_SUSPECT) => Degree::Passing,
            (false, _) => Degree::Lasting,
        };
        Some((device.clone(), degree, health))
    })
}
