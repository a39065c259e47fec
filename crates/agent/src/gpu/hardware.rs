//! The GPUs of the node: NVML's last answer for each GPU, and the GPU's health
//! ([`crate::gpu::health`]). Pure: the time is an argument.
//!
//! GPUs answer one by one ([`crate::run::hardware`]), and [`HardwareTracker`] merges the answers. A
//! GPU is unreachable when its own call fails or misses its deadline. If a call to the driver
//! fails, all GPUs are unavailable. Once the driver answers, the last answer of each GPU is valid
//! again. The tracker maps NVML's indices to GPUs, based only on answers since NVML's list last
//! changed. The tracker marks no GPU as missing before the GPU at every index has answered or
//! failed.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_api::cordon::whole_seconds;
use cleave_api::gpunode::Health;
use cleave_gpu::nvml::{DriverInfo, Gpu, GpuObservation, GpuVitals, NvmlError, Process};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::clock::{Clock, EventTime};
use crate::gpu::health::{DEFAULT_QUIET_PERIOD, HealthHistory, HealthRecord, reason};
use crate::gpu::xid::FaultClass;

/// The driver and the GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hardware {
    /// State of the driver.
    pub driver: DriverState,
    /// GPUs by UUID, including those that NVML no longer lists.
    pub gpus: BTreeMap<String, KnownGpu>,
    /// Errors by index, of listed GPUs that have never reported their UUID.
    pub unnamed: BTreeMap<u32, String>,
}

/// State of the driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DriverState {
    /// NVML has not answered yet.
    #[default]
    Unknown,
    /// No driver is installed, or the driver does not answer, with this error.
    Missing(String),
    /// The driver answers and has this version.
    Present(String),
}

impl DriverState {
    /// Returns the driver's version, if the driver answers.
    pub fn version(&self) -> Option<&str> {
        match self {
            Self::Present(version) => Some(version),
            Self::Unknown | Self::Missing(_) => None,
        }
    }
}

/// A GPU and its health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownGpu {
    /// The GPU's last description from NVML.
    pub gpu: Gpu,
    /// Health of the GPU.
    pub health: Health,
    /// Health of each MIG device that cannot serve although its GPU can, by UUID.
    pub instances: BTreeMap<String, Health>,
    /// Whether NVML has described the GPU to this process. If not, the description is from the
    /// checkpoint.
    pub observed: bool,
    /// Processes on the GPU and in its MIG instances, as NVML last listed them.
    pub processes: Vec<Process>,
}

impl Hardware {
    /// Returns the GPUs in NVML's order.
    pub fn by_index(&self) -> Vec<&KnownGpu> {
        let mut gpus: Vec<&KnownGpu> = self.gpus.values().collect();
        gpus.sort_by(|a, b| (a.gpu.index, &a.gpu.uuid).cmp(&(b.gpu.index, &b.gpu.uuid)));
        gpus
    }

    /// Returns the GPU with this UUID, or the GPU of the MIG device with this UUID.
    pub fn gpu_of(&self, device: &str) -> Option<&KnownGpu> {
        self.gpus.get(device).or_else(|| {
            self.gpus.values().find(|known| {
                known.gpu.mig.iter().flat_map(|mig| &mig.instances).any(|instance| instance.uuid == device)
            })
        })
    }
}

/// Merges NVML's answers and events into [`Hardware`].
#[derive(Debug)]
pub struct HardwareTracker {
    clock: Clock,
    /// Quiet period of a suspect GPU.
    quiet: Duration,
    driver: DriverState,
    /// Why the driver does not answer. `None` if it answers. Without the driver, no GPU can be
    /// queried.
    driver_error: Option<LossCause>,
    gpus: BTreeMap<String, TrackedGpu>,
    /// The GPU at each of NVML's indices.
    slots: Vec<GpuSlot>,
    /// Whether the GPUs are from an earlier boot. If so, a GPU that NVML does not list was removed
    /// from the node.
    earlier_boot: bool,
    /// The time up to which an administrator cleared a GPU's faults, by UUID.
    cleared: BTreeMap<String, Time>,
}

/// A GPU with its history.
#[derive(Debug)]
struct TrackedGpu {
    gpu: Gpu,
    observed: bool,
    processes: Vec<Process>,
    /// Why NVML cannot query the GPU. `None` if NVML answers.
    lost: Option<LossCause>,
    history: HealthHistory,
}

/// The GPU at one of NVML's indices.
#[derive(Debug, Clone, PartialEq, Eq)]
enum GpuSlot {
    /// NVML has not answered for this index since its list last changed.
    Unknown,
    /// The GPU with this UUID.
    Gpu(String),
    /// A GPU that has never reported its UUID, with the error.
    Unnamed(String),
}

/// Why a GPU or the driver cannot be queried.
#[derive(Debug, Clone)]
struct LossCause {
    reason: &'static str,
    message: String,
    since: Time,
    /// Whether only a reset restores the GPU, because it fell off the bus or its driver was
    /// unloaded. A hanging driver proves neither.
    permanent: bool,
}

impl GpuSlot {
    fn uuid(&self) -> Option<&String> {
        match self {
            Self::Gpu(uuid) => Some(uuid),
            Self::Unknown | Self::Unnamed(_) => None,
        }
    }
}

impl TrackedGpu {
    fn new(gpu: Gpu, observed: bool, processes: Vec<Process>) -> Self {
        Self { gpu, observed, processes, lost: None, history: HealthHistory::default() }
    }

    fn mark_lost(&mut self, reason: &'static str, message: String, since: Time, permanent: bool) {
        let before = self.lost.take();
        let (since, was_permanent) = before.map_or((since, false), |lost| (lost.since, lost.permanent));
        self.lost = Some(LossCause { reason, message, since, permanent: permanent || was_permanent });
    }
}

impl HardwareTracker {
    /// Restores the GPUs of a checkpoint. The GPUs count as healthy until NVML reports otherwise,
    /// because pods may start before NVML has answered.
    pub fn restore(gpus: Vec<Gpu>, same_boot: bool, clock: Clock) -> Self {
        let entry = |gpu: Gpu| (gpu.uuid.clone(), TrackedGpu::new(gpu, false, Vec::new()));
        let gpus = gpus.into_iter().map(entry).collect();
        Self {
            clock,
            quiet: DEFAULT_QUIET_PERIOD,
            driver: DriverState::Unknown,
            driver_error: None,
            gpus,
            slots: Vec::new(),
            earlier_boot: !same_boot,
            cleared: BTreeMap::new(),
        }
    }

    /// Sets the quiet period of suspect GPUs. The default is [`DEFAULT_QUIET_PERIOD`].
    pub fn set_quiet_period(&mut self, quiet: Duration) {
        self.quiet = quiet;
        self.gpus.values_mut().for_each(|entry| entry.history.quiet = quiet);
    }

    /// Restores recorded faults, unless the node has rebooted. A reboot ends all recorded faults.
    #[must_use]
    pub fn with_health_records(mut self, records: BTreeMap<String, HealthRecord>, now: Instant) -> Self {
        for (uuid, record) in records.into_iter().filter(|_| !self.earlier_boot) {
            if let Some(entry) = self.gpus.get_mut(&uuid) {
                entry.history = HealthHistory::restore(record, now);
                entry.history.quiet = self.quiet;
            }
        }
        self
    }

    /// Sets the time of day at `now` to `wall`.
    pub fn set_time(&mut self, now: Instant, wall: Timestamp) {
        self.clock = Clock::new(now, wall);
    }

    /// Records the driver's answer to a query at `requested_at`.
    pub fn record_driver_info(&mut self, answer: Result<DriverInfo, NvmlError>, requested_at: Instant) {
        let since = self.wall_time(requested_at);
        match answer {
            Ok(DriverInfo { driver, count }) => {
                self.driver = DriverState::Present(driver);
                self.driver_error = None;
                if usize::try_from(count) != Ok(self.slots.len()) {
                    self.slots = (0..count).map(|_| GpuSlot::Unknown).collect();
                }
                self.mark_missing(&since);
            }
            Err(error) => {
                let message = error_chain(&error);
                if matches!(error, NvmlError::NoDriver) {
                    for entry in self.gpus.values_mut() {
                        entry.mark_lost(reason::DRIVER_UNAVAILABLE, message.clone(), since.clone(), true);
                    }
                }
                let since = self.driver_error.take().map_or(since, |error| error.since);
                self.driver = DriverState::Missing(message.clone());
                self.driver_error =
                    Some(LossCause { reason: reason::DRIVER_UNAVAILABLE, message, since, permanent: false });
            }
        }
    }

    /// Records the answer of the GPU at an index to a query at `requested_at`.
    pub fn record_answer(&mut self, index: u32, answer: Result<GpuObservation, NvmlError>, requested_at: Instant) {
        let since = self.wall_time(requested_at);
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        // NVML no longer lists a GPU at this index.
        let Some(before) = self.slots.get(at).cloned() else { return };
        let elsewhere = |slots: &[GpuSlot], uuid: &str| {
            slots.iter().enumerate().any(|(other, slot)| other != at && *slot == GpuSlot::Gpu(uuid.to_owned()))
        };
        let now = match answer {
            Ok(GpuObservation { gpu, processes }) => {
                let uuid = gpu.uuid.clone();
                let moved = matches!(&before, GpuSlot::Gpu(was) if *was != uuid) || elsewhere(&self.slots, &uuid);
                if moved {
                    self.slots.fill(GpuSlot::Unknown);
                }
                self.record_gpu(gpu, processes);
                if let Some(TrackedGpu { gpu, history, .. }) = self.gpus.get_mut(&uuid) {
                    let devices = gpu.mig.iter().flat_map(|mig| &mig.instances);
                    let devices: Vec<&str> = devices.map(|instance| instance.uuid.as_str()).collect();
                    history.record_answer(requested_at, &devices);
                }
                GpuSlot::Gpu(uuid)
            }
            Err(error) => {
                let remembered = || {
                    let there = self.gpus.values().filter(|entry| entry.gpu.index == index);
                    there.map(|entry| entry.gpu.uuid.clone()).find(|uuid| !elsewhere(&self.slots, uuid))
                };
                let uuid = match before {
                    GpuSlot::Gpu(uuid) => Some(uuid),
                    GpuSlot::Unknown | GpuSlot::Unnamed(_) => remembered(),
                };
                let message = error_chain(&error);
                match uuid {
                    Some(uuid) => {
                        if let Some(entry) = self.gpus.get_mut(&uuid) {
                            let permanent = matches!(error, NvmlError::Lost { .. } | NvmlError::NoDriver);
                            entry.mark_lost(reason::for_error(&error), message, since.clone(), permanent);
                        }
                        GpuSlot::Gpu(uuid)
                    }
                    // The agent cannot serve the GPU, because its UUID is unknown.
                    None => GpuSlot::Unnamed(message),
                }
            }
        };
        if let Some(slot) = self.slots.get_mut(at) {
            *slot = now;
        }
        self.mark_missing(&since);
    }

    /// Returns whether the driver, and every GPU that it lists, has answered or failed at least
    /// once.
    pub fn is_complete(&self) -> bool {
        match self.driver {
            DriverState::Unknown => false,
            DriverState::Missing(_) => true,
            DriverState::Present(_) => !self.slots.contains(&GpuSlot::Unknown),
        }
    }

    /// Marks the GPUs without an index as missing, once the GPU at every index has answered or
    /// failed.
    fn mark_missing(&mut self, since: &Time) {
        if !matches!(self.driver, DriverState::Present(_)) || !self.is_complete() {
            return;
        }
        let listed: Vec<&String> = self.slots.iter().filter_map(GpuSlot::uuid).collect();
        let answers = |uuid: &String| self.gpus.get(uuid).is_some_and(|entry| entry.observed && entry.lost.is_none());
        let all_answer = listed.len() == self.slots.len() && listed.iter().all(|uuid| answers(uuid));
        let missing: Vec<String> = self.gpus.keys().filter(|uuid| !listed.contains(uuid)).cloned().collect();
        let removed = std::mem::take(&mut self.earlier_boot) && all_answer;
        for uuid in missing {
            if removed {
                self.gpus.remove(&uuid);
            } else if let Some(entry) = self.gpus.get_mut(&uuid) {
                entry.mark_lost(reason::GPU_LOST, "NVML no longer lists the GPU".into(), since.clone(), true);
            }
        }
    }

    /// Returns the wall-clock time of a monotonic time.
    fn wall_time(&self, requested_at: Instant) -> Time {
        whole_seconds(self.clock.event_time(requested_at).wall)
    }

    /// Records NVML's description of a GPU.
    pub fn record_gpu(&mut self, gpu: Gpu, processes: Vec<Process>) {
        match self.gpus.get_mut(&gpu.uuid) {
            Some(entry) => {
                // The GPU was lost and answers again, so it was reset. The reset ended its faults.
                if entry.lost.take().is_some_and(|lost| lost.permanent) {
                    entry.history.record_reset();
                }
                (entry.gpu, entry.observed, entry.processes) = (gpu, true, processes);
            }
            None => {
                let uuid = gpu.uuid.clone();
                let mut entry = TrackedGpu::new(gpu, true, processes);
                entry.history.quiet = self.quiet;
                self.gpus.insert(uuid, entry);
            }
        }
    }

    /// Records a GPU's error counters and recovery action from a query at `requested_at`.
    pub fn record_vitals(&mut self, uuid: &str, vitals: GpuVitals, requested_at: Instant) {
        let at = self.fault_time(uuid, requested_at);
        if let Some(entry) = self.gpus.get_mut(uuid) {
            entry.history.record_vitals(vitals, at);
        }
    }

    /// Returns the time of a new fault. An administrator clears faults up to a time of day. A
    /// new fault must be later than that time, even if the clock was set back.
    fn fault_time(&self, uuid: &str, now: Instant) -> EventTime {
        let EventTime { now, wall } = self.clock.event_time(now);
        let after = self.cleared.get(uuid).and_then(|cleared| cleared.0.checked_add(SignedDuration::from_secs(1)).ok());
        EventTime { now, wall: after.map_or(wall, |after| after.max(wall)) }
    }

    /// Ends the faults up to `until`, because an administrator cleared them. After a restart, call
    /// this method before you record a new fault.
    pub fn clear_faults(&mut self, uuid: &str, until: &Time) {
        if self.cleared.get(uuid).is_none_or(|before| before < until) {
            self.cleared.insert(uuid.to_owned(), until.clone());
        }
        if let Some(entry) = self.gpus.get_mut(uuid) {
            entry.history.clear_faults(until);
        }
    }

    /// Returns the records that are not empty, by UUID of the GPU, for the checkpoint.
    pub fn health_records(&self) -> BTreeMap<String, HealthRecord> {
        let record =
            |entry: &TrackedGpu| entry.history.to_record(entry.lost.as_ref().is_some_and(|lost| lost.permanent));
        let records = self.gpus.iter().map(|(uuid, entry)| (uuid.clone(), record(entry)));
        records.filter(|(_, record)| !record.is_empty()).collect()
    }

    /// Returns NVML's last description of a GPU.
    pub fn known_gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.get(uuid).map(|entry| &entry.gpu)
    }

    /// Records an XID and returns its class.
    pub fn record_xid(
        &mut self,
        uuid: &str,
        xid: u64,
        gpu_instance: Option<u32>,
        ignored: &[u64],
        now: Instant,
    ) -> FaultClass {
        let at = self.fault_time(uuid, now);
        let Some(TrackedGpu { gpu, history, .. }) = self.gpus.get_mut(uuid) else {
            return crate::gpu::xid::classify(xid, ignored);
        };
        let instances = gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.instances);
        let of = instances.filter(|instance| Some(instance.gpu_instance) == gpu_instance);
        let device = of.map(|instance| instance.uuid.as_str()).find(|uuid| !uuid.is_empty());
        history.record_xid(xid, device, ignored, at)
    }

    /// Returns the current state of the driver and the GPUs.
    pub fn hardware(&self) -> Hardware {
        let known = |TrackedGpu { gpu, observed, processes, lost, history }: &TrackedGpu| {
            let health =
                self.driver_error.as_ref().or(lost.as_ref()).map_or_else(|| history.health(), LossCause::health);
            let (gpu, processes) = (gpu.clone(), processes.clone());
            KnownGpu { gpu, health, instances: history.instance_health(), observed: *observed, processes }
        };
        let unnamed = |(index, slot): (u32, &GpuSlot)| match slot {
            GpuSlot::Unnamed(why) if self.driver_error.is_none() => Some((index, why.clone())),
            GpuSlot::Unnamed(_) | GpuSlot::Unknown | GpuSlot::Gpu(_) => None,
        };
        Hardware {
            driver: self.driver.clone(),
            gpus: self.gpus.iter().map(|(uuid, entry)| (uuid.clone(), known(entry))).collect(),
            unnamed: (0..).zip(&self.slots).filter_map(unnamed).collect(),
        }
    }
}

impl LossCause {
    /// Returns the health of a lost GPU.
    fn health(&self) -> Health {
        Health {
            healthy: false,
            class: FaultClass::Lost.as_str().into(),
            reason: self.reason.into(),
            message: self.message.clone(),
            since: Some(self.since.clone()),
            last: None,
        }
    }
}

/// Joins an error and its causes into one line.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    pub(crate) use crate::fixtures::Inventory;
    use crate::fixtures::gpu;

    impl HardwareTracker {
        fn observe(&mut self, answer: Result<Inventory, NvmlError>, requested_at: Instant) {
            match answer {
                Ok(inventory) => {
                    let (record_driver_info, gpus) = inventory.answers();
                    self.record_driver_info(Ok(record_driver_info), requested_at);
                    gpus.for_each(|(index, answer)| self.record_answer(index, answer, requested_at));
                }
                Err(error) => self.record_driver_info(Err(error), requested_at),
            }
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "the type of an NVML answer")]
    fn observation(uuid: &str, index: u32) -> Result<GpuObservation, NvmlError> {
        Ok(GpuObservation { gpu: gpu(uuid, index), processes: Vec::new() })
    }

    fn hung_gpu_answer() -> Result<GpuObservation, NvmlError> {
        Err(NvmlError::Hung(Duration::from_secs(20)))
    }

    fn record_driver_answer(tracker: &mut HardwareTracker, count: u32, now: Instant) {
        tracker.record_driver_info(Ok(DriverInfo { driver: "580.159".into(), count }), now);
    }

    fn unhealthy_uuids(tracker: &HardwareTracker) -> Vec<String> {
        let hardware = tracker.hardware();
        hardware.gpus.into_iter().filter(|(_, known)| !known.health.healthy).map(|(uuid, _)| uuid).collect()
    }

    #[expect(clippy::unnecessary_wraps, reason = "the type of an NVML answer")]
    fn inventory(gpus: Vec<(u32, Result<Gpu, NvmlError>)>) -> Result<Inventory, NvmlError> {
        let gpus = gpus.into_iter().collect();
        Ok(Inventory { driver: "580.159".into(), gpus, processes: BTreeMap::new() })
    }

    fn two_gpus() -> Result<Inventory, NvmlError> {
        inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-b", 1)))])
    }

    fn tracker(gpus: Vec<Gpu>, same_boot: bool) -> HardwareTracker {
        HardwareTracker::restore(gpus, same_boot, Clock::new(Instant::now(), Timestamp::UNIX_EPOCH))
    }

    fn two_gpu_tracker() -> HardwareTracker {
        tracker(vec![gpu("GPU-a", 0), gpu("GPU-b", 1)], true)
    }

    #[test]
    fn a_hanging_gpu_is_unreachable_until_it_answers_and_others_are_unaffected() {
        let now = Instant::now();
        let mut tracker = two_gpu_tracker();
        tracker.observe(two_gpus(), now);
        tracker.record_answer(1, hung_gpu_answer(), now);
        assert_eq!(
            (unhealthy_uuids(&tracker), reason_of(&tracker, "GPU-b")),
            (vec!["GPU-b".to_owned()], "GpuUnreachable".into())
        );
        let health = tracker.hardware().gpus["GPU-b"].health.clone();
        assert_eq!((health.class.as_str(), health.message.as_str()), ("Lost", "NVML did not answer for 20 s"));
        let process = Process { pid: 7, memory: None, mps: false, gpu_instance: None };
        let answer = GpuObservation { gpu: gpu("GPU-a", 0), processes: vec![process] };
        tracker.record_answer(0, Ok(answer), now);
        record_driver_answer(&mut tracker, 2, now);
        let hardware = tracker.hardware();
        assert_eq!(hardware.gpus["GPU-a"].processes.len(), 1, "the other GPU's answer is recorded");
        assert_eq!((unhealthy_uuids(&tracker), hardware.driver.version()), (vec!["GPU-b".to_owned()], Some("580.159")));
        tracker.record_answer(1, observation("GPU-b", 1), now);
        assert!(unhealthy_uuids(&tracker).is_empty());
    }

    #[test]
    fn a_gpu_that_hangs_from_the_start_is_known_by_index_and_others_serve() {
        let now = Instant::now();
        let mut tracker = tracker(vec![], true);
        record_driver_answer(&mut tracker, 2, now);
        tracker.record_answer(0, observation("GPU-a", 0), now);
        assert_eq!((tracker.hardware().gpus.len(), tracker.is_complete()), (1, false));
        tracker.record_answer(1, hung_gpu_answer(), now);
        assert!(tracker.is_complete());
        let hardware = tracker.hardware();
        assert!(hardware.gpus["GPU-a"].health.healthy);
        assert_eq!(hardware.unnamed, BTreeMap::from([(1, "NVML did not answer for 20 s".to_owned())]));
        tracker.record_answer(1, observation("GPU-b", 1), now);
        assert_eq!((tracker.hardware().gpus.len(), tracker.hardware().unnamed.len()), (2, 0));
    }

    #[test]
    fn a_checkpointed_gpu_that_hangs_from_the_start_is_unreachable() {
        let now = Instant::now();
        for same_boot in [true, false] {
            let mut tracker = tracker(vec![gpu("GPU-a", 0), gpu("GPU-b", 1)], same_boot);
            record_driver_answer(&mut tracker, 2, now);
            tracker.record_answer(1, hung_gpu_answer(), now);
            tracker.record_answer(0, observation("GPU-a", 0), now);
            assert_eq!(
                (unhealthy_uuids(&tracker), reason_of(&tracker, "GPU-b")),
                (vec!["GPU-b".to_owned()], "GpuUnreachable".into())
            );
            assert!(tracker.hardware().unnamed.is_empty());
        }
    }

    #[test]
    fn a_failing_driver_affects_all_gpus_until_it_answers() {
        let now = Instant::now();
        let mut tracker = two_gpu_tracker();
        tracker.observe(two_gpus(), now);
        tracker.record_answer(1, hung_gpu_answer(), now);
        tracker.record_driver_info(Err(NvmlError::Hung(Duration::from_secs(20))), now);
        // A GPU that answers is unusable while its driver does not answer.
        tracker.record_answer(0, observation("GPU-a", 0), now);
        assert_eq!(unhealthy_uuids(&tracker), ["GPU-a", "GPU-b"]);
        assert_eq!(reason_of(&tracker, "GPU-a"), "DriverUnavailable");
        record_driver_answer(&mut tracker, 2, now);
        assert_eq!(
            (unhealthy_uuids(&tracker), reason_of(&tracker, "GPU-b")),
            (vec!["GPU-b".to_owned()], "GpuUnreachable".into())
        );
    }

    #[test]
    fn gpus_that_swap_indices_are_not_missing_in_between() {
        let now = Instant::now();
        let mut tracker = two_gpu_tracker();
        tracker.observe(two_gpus(), now);
        tracker.record_xid("GPU-a", 48, None, &[], now);
        tracker.record_answer(0, observation("GPU-b", 0), now);
        assert_eq!(unhealthy_uuids(&tracker), ["GPU-a"]);
        tracker.record_answer(1, observation("GPU-a", 1), now);
        assert_eq!(reason_of(&tracker, "GPU-a"), "ResetRequired", "there was no reset");
        // The driver now lists one GPU fewer. The tracker identifies the missing GPU once all
        // remaining indices have answered or failed.
        record_driver_answer(&mut tracker, 1, now);
        assert_eq!(reason_of(&tracker, "GPU-a"), "ResetRequired");
        tracker.record_answer(1, hung_gpu_answer(), now);
        tracker.record_answer(0, observation("GPU-a", 0), now);
        assert_eq!((unhealthy_uuids(&tracker).len(), reason_of(&tracker, "GPU-b")), (2, "GpuLost".into()));
    }

    fn reason_of(tracker: &HardwareTracker, uuid: &str) -> String {
        tracker.hardware().gpus[uuid].health.reason.clone()
    }

    #[test]
    fn a_lost_gpu_does_not_affect_others_and_recovers() {
        let now = Instant::now();
        let mut tracker = two_gpu_tracker();
        tracker.observe(two_gpus(), now);
        tracker.record_xid("GPU-b", 79, None, &[], now);
        tracker.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(NvmlError::Lost { call: "x" }))]), now);
        let hardware = tracker.hardware();
        assert!(hardware.gpus["GPU-a"].health.healthy);
        assert_eq!(
            (reason_of(&tracker, "GPU-b").as_str(), hardware.gpus["GPU-b"].health.class.as_str()),
            ("GpuLost", "Lost")
        );
        assert_eq!(hardware.by_index()[1].gpu.model, "NVIDIA H200", "still described");
        tracker.observe(two_gpus(), now);
        assert!(tracker.hardware().gpus["GPU-b"].health.healthy, "a reset also ends the fault of the XID");
    }

    #[test]
    fn an_unloaded_driver_proves_a_reset_but_a_hanging_driver_does_not() {
        let now = Instant::now();
        let failing = |error| inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(error))]);
        for (answer, heals) in [
            (Err(NvmlError::Hung(Duration::from_secs(20))), false),
            (failing(NvmlError::InUse { call: "x" }), false),
            (failing(NvmlError::Lost { call: "x" }), true),
            (inventory(vec![(0, Ok(gpu("GPU-a", 0)))]), true),
            (Err(NvmlError::NoDriver), true),
        ] {
            let what = format!("{answer:?}");
            let mut tracker = two_gpu_tracker();
            tracker.record_xid("GPU-b", 119, None, &[], now);
            tracker.observe(answer, now);
            // A hanging driver neither proves that a GPU is lost, nor cancels earlier proof.
            tracker.observe(Err(NvmlError::Hung(Duration::from_secs(20))), now);
            tracker.observe(two_gpus(), now);
            assert_eq!(tracker.hardware().gpus["GPU-b"].health.healthy, heals, "{what}");
        }
    }

    #[test]
    fn a_gpu_that_vanishes_from_the_list_is_lost() {
        let now = Instant::now();
        let mut tracker = tracker(vec![], true);
        tracker.observe(two_gpus(), now);
        tracker.observe(inventory(vec![(0, Ok(gpu("GPU-b", 0)))]), now);
        assert_eq!(reason_of(&tracker, "GPU-a"), "GpuLost");
        assert_eq!(tracker.hardware().gpus["GPU-b"].gpu.index, 0);
    }

    #[test]
    fn recorded_faults_outlive_the_agent_but_not_a_reboot() {
        let now = Instant::now();
        let mut before = two_gpu_tracker();
        before.record_xid("GPU-a", 48, None, &[], now);
        before.record_xid("GPU-none", 48, None, &[], now);
        let records = before.health_records();
        assert_eq!(records.keys().collect::<Vec<_>>(), ["GPU-a"]);
        let later = now + 100 * DEFAULT_QUIET_PERIOD;
        let mut after = two_gpu_tracker().with_health_records(records.clone(), later);
        after.observe(two_gpus(), later);
        assert_eq!(reason_of(&after, "GPU-a"), "ResetRequired", "an agent restart is no reset");
        let mut rebooted = tracker(vec![gpu("GPU-a", 0)], false).with_health_records(records, later);
        rebooted.observe(two_gpus(), later);
        assert!(rebooted.hardware().gpus["GPU-a"].health.healthy);
    }

    #[test]
    fn the_quiet_period_applies_to_checkpointed_and_new_gpus() {
        let (now, quiet) = (Instant::now(), Duration::from_secs(7));
        let mut before = two_gpu_tracker();
        before.record_xid("GPU-a", 999, None, &[], now);
        for early in [true, false] {
            let mut tracker = two_gpu_tracker();
            if early {
                tracker.set_quiet_period(quiet);
            }
            let mut tracker = tracker.with_health_records(before.health_records(), now);
            if !early {
                tracker.set_quiet_period(quiet);
            }
            let gpus = ["GPU-a", "GPU-new"];
            tracker.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-new", 1)))]), now);
            tracker.record_xid("GPU-new", 999, None, &[], now);
            let healthy = |tracker: &HardwareTracker| gpus.map(|uuid| tracker.hardware().gpus[uuid].health.healthy);
            let again = |tracker: &mut HardwareTracker, after: Duration| {
                let gpus = gpus.iter().zip(0..).map(|(uuid, index)| (index, Ok(gpu(uuid, index)))).collect();
                tracker.observe(inventory(gpus), now + after);
            };
            again(&mut tracker, quiet.saturating_sub(Duration::from_millis(1)));
            assert_eq!(healthy(&tracker), [false, false]);
            let message = tracker.hardware().gpus["GPU-new"].health.message.clone();
            assert!(message.contains("after 7 s without another"), "{message}");
            again(&mut tracker, quiet);
            assert_eq!(healthy(&tracker), [true, true]);
        }
    }

    #[test]
    fn a_lost_gpu_that_is_reset_between_two_agents_is_healthy() {
        let now = Instant::now();
        let mut before = two_gpu_tracker();
        before.record_xid("GPU-b", 79, None, &[], now);
        before.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(NvmlError::Lost { call: "x" }))]), now);
        let mut after = two_gpu_tracker().with_health_records(before.health_records(), now);
        assert!(!after.hardware().gpus["GPU-b"].health.healthy);
        after.observe(two_gpus(), now);
        assert!(after.hardware().gpus["GPU-b"].health.healthy);
        assert!(after.health_records().is_empty());
    }

    #[test]
    fn gpus_are_unavailable_while_the_driver_is_unloaded() {
        let now = Instant::now();
        let mut tracker = tracker(vec![gpu("GPU-a", 0)], true);
        assert!(tracker.hardware().gpus["GPU-a"].health.healthy, "the checkpoint counts until NVML answers");
        tracker.observe(Err(NvmlError::NoDriver), now);
        assert_eq!(reason_of(&tracker, "GPU-a"), "DriverUnavailable");
        assert_eq!(tracker.hardware().driver, DriverState::Missing("the NVIDIA driver is not loaded".into()));
        tracker.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0)))]), now);
        assert!(tracker.hardware().gpus["GPU-a"].health.healthy);
    }

    #[test]
    fn a_gpu_that_is_missing_after_a_reboot_is_forgotten() {
        let listed = || inventory(vec![(0, Ok(gpu("GPU-a", 0)))]);
        let checkpoint = || vec![gpu("GPU-a", 0), gpu("GPU-b", 1)];
        let mut rebooted = tracker(checkpoint(), false);
        rebooted.observe(listed(), Instant::now());
        assert_eq!(rebooted.hardware().gpus.len(), 1);
        let mut same = tracker(checkpoint(), true);
        same.observe(listed(), Instant::now());
        assert_eq!(reason_of(&same, "GPU-b"), "GpuLost");
    }

    #[test]
    fn clearing_faults_does_not_end_later_ones_if_the_clock_was_set_back() {
        let now = Instant::now();
        let cleared = whole_seconds(Timestamp::from_second(3_600).unwrap());
        let mut ahead = two_gpu_tracker();
        ahead.set_time(now, cleared.0);
        ahead.record_xid("GPU-a", 48, None, &[], now);
        ahead.clear_faults("GPU-a", &cleared);
        assert!(ahead.hardware().gpus["GPU-a"].health.healthy);
        // An administrator corrects the clock while the same agent runs, or before the next agent
        // starts. The next agent reads the cleared time from the checkpoint.
        let mut next = two_gpu_tracker().with_health_records(ahead.health_records(), now);
        next.clear_faults("GPU-a", &cleared);
        for mut tracker in [ahead, next] {
            tracker.set_time(now, Timestamp::UNIX_EPOCH);
            tracker.record_xid("GPU-a", 48, None, &[], now);
            tracker.record_xid("GPU-b", 48, None, &[], now);
            // Each change of the spec repeats the cleared time.
            tracker.clear_faults("GPU-a", &cleared);
            let health = tracker.hardware().gpus["GPU-a"].health.clone();
            assert_eq!(health.reason, "ResetRequired");
            let last = health.last.unwrap();
            assert!(last > cleared, "{last:?}: an administrator could not clear it");
            assert_eq!(tracker.hardware().gpus["GPU-b"].health.last.as_ref().unwrap().0, Timestamp::UNIX_EPOCH);
            tracker.clear_faults("GPU-a", &last);
            assert!(tracker.hardware().gpus["GPU-a"].health.healthy);
        }
    }

    proptest! {
        #[test]
        fn events_of_one_gpu_never_change_the_health_of_another(
            events in proptest::collection::vec((prop_oneof![Just(13_u64), Just(48), Just(79), Just(94), Just(500)], 0_u32..5, 0_u64..200, 0_u64..5), 0..20),
        ) {
            let mut now = Instant::now();
            let mut tracker = two_gpu_tracker();
            tracker.observe(two_gpus(), now);
            tracker.record_vitals("GPU-a", GpuVitals { uncorrected: Some(0), ..GpuVitals::default() }, now);
            for (xid, what, wait, errors) in events {
                now += Duration::from_secs(wait);
                match what {
                    0 => { tracker.record_xid("GPU-b", xid, Some(1), &[], now); }
                    1 => tracker.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(NvmlError::Lost { call: "x" }))]), now),
                    2 => tracker.observe(two_gpus(), now),
                    3 => tracker.record_answer(1, hung_gpu_answer(), now),
                    _ => tracker.record_vitals("GPU-b", GpuVitals { uncorrected: Some(errors), remap_failed: Some(errors == 4), ..GpuVitals::default() }, now),
                }
                prop_assert_eq!(&tracker.hardware().gpus["GPU-a"].health, &Health { healthy: true, ..Health::default() });
            }
        }
    }
}
