//! Reports changes of the health of GPUs as Events. Pure.
use std::collections::BTreeMap;

use cleave_api::gpunode::Health;
use cleave_api::names::HEALTH_SUSPECT;
use cleave_gpu::nvml::Gpu;

use crate::event::{NodeEvent, device_recovery, device_warning};
use crate::gpu::hardware::Hardware;
use crate::gpu::health::reason;

/// The severity of each GPU and MIG device with a problem. The agent publishes an Event when a
/// problem begins, when its severity increases, and when the problem ends. A restart of the agent
/// causes no Event.
#[derive(Debug, Clone, Default)]
pub struct ReportedHealth(BTreeMap<String, Severity>);

/// Severity of a GPU's problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    /// The GPU serves, but an administrator should reset the GPU when convenient.
    Pending,
    /// The GPU may recover by itself.
    Transient,
    /// The GPU may not recover without an administrator.
    Permanent,
    /// NVML no longer lists the GPU.
    Missing,
}

impl ReportedHealth {
    /// Creates the state after a restart of the agent. All current problems count as reported,
    /// because an earlier agent reported them.
    pub fn after_restart(hardware: &Hardware) -> Self {
        Self(severities(hardware).map(|(device, severity, _)| (device, severity)).collect())
    }

    /// Removes a GPU and its MIG devices after an administrator has forgotten the GPU. The removal
    /// does not count as a recovery.
    pub fn forget_gpu(&mut self, gpu: &Gpu) {
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| &instance.uuid);
        for device in instances.chain([&gpu.uuid]) {
            self.0.remove(device);
        }
    }

    /// Updates the severities and returns the resulting Events.
    pub fn update(&mut self, hardware: &Hardware) -> Vec<NodeEvent> {
        let (mut found, mut now) = (Vec::new(), BTreeMap::new());
        for (device, severity, health) in severities(hardware) {
            if self.0.get(&device).is_none_or(|reported| *reported < severity) {
                let reason = match severity {
                    Severity::Pending => "GpuResetPending",
                    Severity::Transient | Severity::Permanent => "GpuUnhealthy",
                    Severity::Missing => "GpuMissing",
                };
                found.push(device_warning(reason, &device, format!("GPU {device}: {}", health.message)));
            }
            now.insert(device, severity);
        }
        // A decrease of the severity causes no Event, but a later increase causes one.
        for device in self.0.keys().filter(|device| !now.contains_key(*device)) {
            found.push(device_recovery(device, format!("GPU {device} is healthy again")));
        }
        self.0 = now;
        found
    }
}

/// Returns the GPUs and MIG devices with a problem, and the severity of each.
fn severities(hardware: &Hardware) -> impl Iterator<Item = (String, Severity, &Health)> {
    let whole = hardware.gpus.iter().map(|(uuid, known)| (uuid, &known.health));
    let instances = hardware.gpus.values().flat_map(|known| &known.instances);
    whole.chain(instances).filter_map(|(device, health)| {
        let severity = match (health.healthy, health.class.as_str()) {
            (true, _) if health.reason.is_empty() => return None,
            (true, _) => Severity::Pending,
            (false, _) if health.reason == reason::GPU_MISSING => Severity::Missing,
            (false, HEALTH_SUSPECT) => Severity::Transient,
            (false, _) => Severity::Permanent,
        };
        Some((device.clone(), severity, health))
    })
}
