//! The GPUs of a node as a pool of devices.
use std::collections::BTreeMap;

use cleave_plan::mig::ProfileTable;

use crate::counters::CounterModel;
use crate::devices::{OfferedDevice, offered_devices, usable_profiles};
use crate::gpu::Gpu;
use crate::names::{GpuUuid, NodeName};

/// The GPUs of a node that DRA offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    pub(crate) node: NodeName,
    /// GPUs in ascending order of their UUIDs, so that a GPU keeps its place when others change.
    pub(crate) gpus: Vec<OfferedGpu>,
    /// Index of the GPU and index of its device, by name of the device.
    by_name: BTreeMap<String, (usize, usize)>,
}

/// A GPU with its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OfferedGpu {
    pub(crate) gpu: Gpu,
    pub(crate) table: ProfileTable,
    pub(crate) devices: Vec<OfferedDevice>,
    /// The counters, if the GPU's devices exclude one another.
    pub(crate) counters: Option<CounterModel>,
}

/// Devices that a GPU does not offer, although its [`Offer`](crate::Offer) contains them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("GPU {gpu}: {reason}")]
pub struct Refusal {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Why the GPU does not offer the devices.
    pub reason: String,
}

impl Pool {
    /// Computes the devices of a node. A GPU with invalid parts offers its other devices.
    pub fn new(node: NodeName, mut gpus: Vec<Gpu>) -> (Self, Vec<Refusal>) {
        gpus.sort_by(|a, b| a.uuid.cmp(&b.uuid));
        let mut pool = Self { node, gpus: Vec::with_capacity(gpus.len()), by_name: BTreeMap::new() };
        let mut refusals = Vec::new();
        for gpu in gpus {
            let uuid = gpu.uuid.clone();
            let mut refuse = |reason: String| refusals.push(Refusal { gpu: uuid.clone(), reason });
            let twin = pool.gpus.iter().find(|other| other.gpu.uuid.device_name() == gpu.uuid.device_name());
            if let Some(twin) = twin {
                refuse(format!("the UUID of GPU {} has the same first eight digits", twin.gpu.uuid));
                continue;
            }
            let offered = OfferedGpu::new(gpu, &mut refuse);
            let at = pool.gpus.len();
            let names = offered.devices.iter().enumerate();
            pool.by_name.extend(names.map(|(index, device)| (device.name.clone(), (at, index))));
            pool.gpus.push(offered);
        }
        (pool, refusals)
    }

    /// Returns the node of the pool.
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// Returns the names of all devices of the pool.
    pub fn device_names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    pub(crate) fn device(&self, name: &str) -> Option<(&OfferedGpu, &OfferedDevice)> {
        let &(gpu, device) = self.by_name.get(name)?;
        let gpu = self.gpus.get(gpu)?;
        Some((gpu, gpu.devices.get(device)?))
    }

    pub(crate) fn gpu(&self, uuid: &GpuUuid) -> Option<&OfferedGpu> {
        self.gpus.iter().find(|offered| offered.gpu.uuid == *uuid)
    }
}

impl OfferedGpu {
    fn new(gpu: Gpu, refuse: &mut impl FnMut(String)) -> Self {
        let (profiles, mut reasons) = usable_profiles(&gpu.profiles);
        let table = ProfileTable::new(&profiles).unwrap_or_else(|error| {
            reasons.push(error.to_string());
            ProfileTable::default()
        });
        if gpu.offer.mig.is_some() {
            reasons.into_iter().for_each(&mut *refuse);
        }
        let (mut devices, reasons) = offered_devices(&gpu, &table);
        reasons.into_iter().for_each(&mut *refuse);
        if !exclude_one_another(&devices, &table) {
            return Self { gpu, table, devices, counters: None };
        }
        let is_mig = |device: &OfferedDevice| device.kind.placement().is_some();
        let mut counters = devices.iter().any(is_mig).then(|| CounterModel::new(&table)).flatten();
        if counters.is_none() && devices.iter().any(is_mig) {
            refuse("the GPU's MIG profiles need more shared counters than Kubernetes allows".to_owned());
            devices.retain(|device| !is_mig(device));
        }
        // Without MIG devices, one counter suffices.
        counters = counters.or_else(|| CounterModel::new(&ProfileTable::default()));
        Self { gpu, table, devices, counters }
    }
}

/// Returns whether some of the devices cannot be in use at the same time.
fn exclude_one_another(devices: &[OfferedDevice], table: &ProfileTable) -> bool {
    let placements: Option<Vec<(&str, u8)>> = devices
        .iter()
        .map(|device| device.kind.placement().map(|placement| (placement.profile(), placement.start())))
        .collect();
    match placements {
        Some(placements) => !table.can_coexist(placements),
        None => devices.len() > 1,
    }
}
