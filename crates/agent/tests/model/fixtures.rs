//! Fixtures for the unit tests and the model tests.
#![allow(dead_code, reason = "unit tests and model tests use different parts")]
use std::collections::BTreeMap;
use std::time::Instant;

use cleave_agent::allocation::Allocation;
use cleave_agent::node::Node;
use cleave_api::gpunode::{GpuSpec, MigInstanceSpec, MigPartition, MpsPartition, MpsSlices, Partition, Whole};
use cleave_api::names::mig_resource;
use cleave_api::sharingpolicy::{ComputeMode, MpsEnforcement};
use cleave_gpu::nvml::{DriverInfo, Gpu, GpuObservation, NvmlError, Process};
use cleave_kubelet::ContainerDevices;
use cleave_plan::mps::{Threads, memory_limit, thread_percentage};
use cleave_plan::units::{Mebibytes, Percent, Sms};

pub(crate) const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

pub(crate) fn gpu(uuid: &str, index: u32) -> Gpu {
    Gpu {
        uuid: uuid.into(),
        index,
        minor: index,
        model: "NVIDIA H200".into(),
        memory: Mebibytes(143_155),
        sms: Sms(132),
        pci: format!("0000:{index:02x}:00.0"),
        numa: Some(index / 4),
        compute_capability: (9, 0),
        mig: None,
    }
}

/// Returns the spec of a GPU with MIG instances. Each instance has a profile, a first memory slice
/// and a number of shares (0 for a whole instance).
pub(crate) fn mig_spec(uuid: &str, instances: &[(&str, u32, u32)]) -> GpuSpec {
    let instance = |&(profile, start, units): &(&str, u32, u32)| MigInstanceSpec {
        profile: profile.into(),
        start,
        partition: match units {
            0 => MigPartition { whole: Some(Whole { resource: mig_resource(profile) }), ..MigPartition::default() },
            units => MigPartition { mps: Some(mps_partition(units)), ..MigPartition::default() },
        },
    };
    let mig = Some(instances.iter().map(instance).collect());
    GpuSpec { partition: Partition { mig, ..Partition::default() }, ..mps_spec(uuid, 1) }
}

pub(crate) fn mps_spec(uuid: &str, units: u32) -> GpuSpec {
    GpuSpec {
        uuid: uuid.into(),
        partition: Partition { mps: Some(mps_partition(units)), ..Partition::default() },
        ..GpuSpec::default()
    }
}

pub(crate) fn mps_partition(units: u32) -> MpsPartition {
    MpsPartition {
        multi_user: true,
        compute_mode: ComputeMode::ExclusiveProcess,
        enforcement: MpsEnforcement::Hard,
        slices: vec![MpsSlices {
            resource: "nvidia.com/gpu-mps".into(),
            count: units,
            first: 0,
            memory_mib: (1..=units).map(|k| memory_limit(k, units, Mebibytes(143_155)).0).collect(),
            threads: (1..=units)
                .filter_map(|k| thread_percentage(k, units, Threads::Burst))
                .map(Percent::get)
                .collect(),
            max_clients: None,
        }],
    }
}

pub(crate) fn container_devices(pod: &str, ids: &[&str]) -> ContainerDevices {
    ContainerDevices {
        namespace: "ns".into(),
        pod: pod.into(),
        container: "c".into(),
        resource: MPS_RESOURCE.into(),
        ids: ids.iter().map(|&id| id.to_owned()).collect(),
    }
}

pub(crate) fn allocation(ids: &[&str]) -> Allocation {
    Allocation {
        resource: MPS_RESOURCE.into(),
        ids: ids.iter().map(|&id| id.to_owned()).collect(),
        devices: vec!["GPU-a".into()],
        mps: None,
    }
}

/// NVML's answers about the driver and all GPUs at one moment.
#[derive(Debug)]
pub(crate) struct Inventory {
    pub(crate) driver: String,
    pub(crate) gpus: BTreeMap<u32, Result<Gpu, NvmlError>>,
    pub(crate) processes: BTreeMap<String, Vec<Process>>,
}

impl Inventory {
    /// Returns the answers in the order in which the agent receives them: the driver's answer
    /// first.
    pub(crate) fn answers(self) -> (DriverInfo, impl Iterator<Item = (u32, Result<GpuObservation, NvmlError>)>) {
        let Self { driver, gpus, mut processes } = self;
        let count = gpus.last_key_value().map_or(0, |(last, _)| last + 1);
        let of = move |gpu: Gpu| GpuObservation { processes: processes.remove(&gpu.uuid).unwrap_or_default(), gpu };
        let mut of = Box::new(of);
        (DriverInfo { driver, count }, gpus.into_iter().map(move |(index, gpu)| (index, gpu.map(&mut of))))
    }
}

/// Passes NVML's answers to the agent. The agent sent the queries at `requested_at`.
pub(crate) fn record_answer(node: &mut Node, answer: Result<Inventory, NvmlError>, requested_at: Instant) {
    match answer {
        Ok(inventory) => {
            let (driver_info, gpus) = inventory.answers();
            node.record_driver_info(Ok(driver_info), requested_at);
            gpus.for_each(|(index, answer)| node.record_gpu(index, answer, requested_at));
        }
        Err(error) => node.record_driver_info(Err(error), requested_at),
    }
}
