//! Counts XIDs and faults of GPUs and MIG devices. When a device is removed, its series are removed
//! too.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::gpus::DeviceLabels;
use crate::gpu::xid::FaultClass;

/// Maximum number of early counts. The agent drops further counts, which occur only if no status
/// ever lists the devices.
const MAX_EARLY_COUNTS: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct XidLabels {
    gpu: String,
    uuid: String,
    xid: u64,
    class: &'static str,
}

impl XidLabels {
    fn new(DeviceLabels { gpu, uuid }: DeviceLabels, xid: u64, class: FaultClass) -> Self {
        Self { gpu, uuid, xid, class: class.as_str() }
    }
}

/// Counters of XIDs and faults by device.
#[derive(Debug, Clone, Default)]
pub(super) struct DeviceCounters {
    xids: Family<XidLabels, Counter>,
    faults: Family<DeviceLabels, Counter>,
    state: Arc<Mutex<CounterState>>,
}

/// The known devices, and the labels that have series.
#[derive(Debug, Default)]
struct CounterState {
    /// Labels of the node's devices, by UUID.
    devices: BTreeMap<String, DeviceLabels>,
    xids: BTreeSet<XidLabels>,
    faults: BTreeSet<DeviceLabels>,
    /// Counts of devices whose index is unknown, because no status lists them yet.
    early: Vec<EarlyCount>,
}

#[derive(Debug)]
enum EarlyCount {
    Xid { uuid: String, xid: u64, class: FaultClass },
    Faults { device: String, count: u64 },
}

impl EarlyCount {
    fn device(&self) -> &str {
        match self {
            Self::Xid { uuid, .. } => uuid,
            Self::Faults { device, .. } => device,
        }
    }
}

impl DeviceCounters {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("xids", "XIDs, by device, number and health class", self.xids.clone());
        let faults = "Fatal GPU errors that broke all MPS clients of a device";
        registry.register("mps_faults", faults, self.faults.clone());
    }

    /// Counts an XID of a GPU.
    pub(super) fn count_xid(&self, uuid: &str, xid: u64, class: FaultClass) {
        self.apply_count(&mut self.lock_state(), EarlyCount::Xid { uuid: uuid.to_owned(), xid, class });
    }

    /// Counts fatal GPU errors that broke all MPS clients of a device.
    pub(super) fn count_faults(&self, device: &str, count: u64) {
        self.apply_count(&mut self.lock_state(), EarlyCount::Faults { device: device.to_owned(), count });
    }

    /// Replaces the node's devices. Removes the series of removed devices, and adds the early
    /// counts of devices that are now known.
    pub(super) fn set_devices(&self, devices: &BTreeMap<String, DeviceLabels>) {
        let mut state = self.lock_state();
        state.devices.clone_from(devices);
        let is_current = |gpu: &str, uuid: &str| devices.get(uuid).is_some_and(|label| label.gpu == gpu);
        state.xids.retain(|label| {
            let keep = is_current(&label.gpu, &label.uuid);
            if !keep {
                self.xids.remove(label);
            }
            keep
        });
        state.faults.retain(|label| {
            let keep = is_current(&label.gpu, &label.uuid);
            if !keep {
                self.faults.remove(label);
            }
            keep
        });
        for early in std::mem::take(&mut state.early) {
            self.apply_count(&mut state, early);
        }
    }

    /// Counts `count` if the index of its device is known, and otherwise stores `count` until the index is known.
    fn apply_count(&self, state: &mut CounterState, count: EarlyCount) {
        let Some(label) = state.devices.get(count.device()).cloned() else {
            if state.early.len() < MAX_EARLY_COUNTS {
                state.early.push(count);
            }
            return;
        };
        match count {
            EarlyCount::Xid { xid, class, .. } => {
                let label = XidLabels::new(label, xid, class);
                self.xids.get_or_create(&label).inc();
                state.xids.insert(label);
            }
            EarlyCount::Faults { count, .. } => {
                self.faults.get_or_create(&label).inc_by(count);
                state.faults.insert(label);
            }
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, CounterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use cleave_api::gpunode::{GpuNodeStatus, GpuStatus};

    use crate::gpu::xid::FaultClass;
    use crate::metrics::Metrics;

    #[test]
    fn xids_and_faults_have_the_index_of_their_gpu_and_are_removed_with_the_gpu() {
        let metrics = Metrics::new();
        let set_gpus = |gpus: &[(u32, &str)]| {
            let gpu = |(index, uuid): &(u32, &str)| GpuStatus {
                index: *index,
                uuid: (*uuid).to_owned(),
                ..GpuStatus::default()
            };
            metrics
                .set_node_status(&GpuNodeStatus { gpus: gpus.iter().map(gpu).collect(), ..GpuNodeStatus::default() });
        };
        let series = || {
            let text = metrics.encode().unwrap();
            let is = |line: &&str| {
                line.starts_with("cleave_agent_xids_total{") || line.starts_with("cleave_agent_mps_faults_total{")
            };
            let mut found: Vec<String> = text.lines().filter(is).map(str::to_owned).collect();
            found.sort();
            found
        };
        // The first XID can arrive before NVML has described the GPU.
        metrics.count_xid("GPU-a", 48, FaultClass::NeedsReset);
        metrics.count_faults("GPU-a", 2);
        assert!(series().is_empty(), "{:?}", series());
        set_gpus(&[(3, "GPU-a"), (4, "GPU-b")]);
        metrics.count_xid("GPU-a", 48, FaultClass::NeedsReset);
        let of = |index: u32| {
            [
                format!("cleave_agent_mps_faults_total{{gpu=\"{index}\",uuid=\"GPU-a\"}} 2"),
                format!("cleave_agent_xids_total{{gpu=\"{index}\",uuid=\"GPU-a\",xid=\"48\",class=\"NeedsReset\"}} 2"),
            ]
        };
        assert_eq!(series(), of(3));
        set_gpus(&[(3, "GPU-a")]);
        assert_eq!(series(), of(3), "another GPU was removed");
        set_gpus(&[(4, "GPU-b")]);
        assert!(series().is_empty(), "{:?}", series());
    }
}
