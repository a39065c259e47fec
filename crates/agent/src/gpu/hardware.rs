//! Tracks the GPUs of the node: NVML's last answer for each GPU, and the GPU's health
//! ([`crate::gpu::health`]). Pure: the time is an argument.
//!
//! NVML answers for each GPU separately ([`crate::run::hardware`]), and [`HardwareTracker`] merges
//! the answers. A GPU is unreachable when the call for the GPU fails or misses its deadline. If a
//! call to the driver fails, all GPUs are unreachable. Once the driver answers again, the last
//! answer for each GPU is valid again, unless the driver was unloaded. The tracker maps NVML's
//! indices to GPUs, based on answers since NVML's list last changed. If the call for an index fails
//! first, the tracker uses the GPU that last had this index. The tracker marks a GPU as missing
//! only after the call for every index has answered or failed. A missing GPU remains known, also
//! after a reboot, until an administrator runs `cleave forget`.
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
    /// Errors of listed GPUs whose UUID NVML has never reported, by NVML's index.
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
    /// Health of each MIG device that cannot serve although its GPU can, by UUID of the MIG device.
    pub instances: BTreeMap<String, Health>,
    /// Whether NVML has described the GPU since this process started. If not, the description is
    /// from the checkpoint.
    pub observed: bool,
    /// Processes on the GPU and in its MIG instances, as NVML last listed them.
    pub processes: Vec<Process>,
    /// Whether NVML no longer lists the GPU.
    pub missing: bool,
}

impl Hardware {
    /// Returns the number of GPUs that the node should have. This number includes missing GPUs
    /// until an administrator forgets them, and listed GPUs with an unknown UUID.
    pub fn expected_gpus(&self) -> usize {
        self.gpus.len() + self.unnamed.len()
    }

    /// Returns the GPUs that NVML no longer lists, in the order of their last indices.
    pub fn missing_gpus(&self) -> Vec<&Gpu> {
        self.gpus_by_index().into_iter().filter(|known| known.missing).map(|known| &known.gpu).collect()
    }

    /// Returns the GPUs in the order of their last NVML indices.
    pub fn gpus_by_index(&self) -> Vec<&KnownGpu> {
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
    /// Time without errors after which a suspect GPU can become healthy.
    quiet: Duration,
    driver: DriverState,
    /// Why the driver does not answer. `None` if the driver answers, or before its first answer.
    /// Without the driver, NVML can query no GPU.
    driver_error: Option<LossCause>,
    gpus: BTreeMap<String, TrackedGpu>,
    /// The GPU at each of NVML's indices.
    slots: Vec<GpuSlot>,
    /// Whether the restored GPUs are from an earlier boot. The faults of an earlier boot have
    /// ended.
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
    /// Why NVML cannot query the GPU. `None` if NVML answers for the GPU.
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
    /// A GPU whose UUID NVML has never reported, with the error of the last call.
    Unnamed(String),
}

/// Health message of a GPU that NVML no longer lists.
const MISSING_GPU_MESSAGE: &str =
    "NVML no longer lists the GPU. Repair or replace the GPU. If the GPU was removed for good, run `cleave forget`";

/// Why NVML cannot query a GPU or the driver.
#[derive(Debug, Clone)]
struct LossCause {
    reason: &'static str,
    message: String,
    since: Time,
    /// Whether only a reset can restore the GPU, because the GPU fell off the bus, NVML no longer
    /// lists the GPU, or its driver was unloaded. A driver that hangs proves none of these causes.
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

    fn mark_missing(&mut self, since: Time) {
        self.mark_lost(reason::GPU_MISSING, MISSING_GPU_MESSAGE.into(), since, true);
    }

    /// Returns the time at which NVML stopped listing the GPU. Returns `None` if NVML lists the
    /// GPU.
    fn missing_since(&self) -> Option<&Time> {
        self.lost.as_ref().filter(|lost| lost.reason == reason::GPU_MISSING).map(|lost| &lost.since)
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

    /// Restores recorded faults, unless the node has rebooted. A reboot ends all recorded faults. A
    /// missing GPU remains missing until NVML lists it.
    #[must_use]
    pub fn with_health_records(mut self, records: BTreeMap<String, HealthRecord>, now: Instant) -> Self {
        for (uuid, mut record) in records {
            let Some(entry) = self.gpus.get_mut(&uuid) else { continue };
            if let Some(since) = record.missing_since.take() {
                entry.mark_missing(since);
            }
            if !self.earlier_boot {
                entry.history = HealthHistory::restore(record, now);
                entry.history.quiet = self.quiet;
            }
        }
        self
    }

    /// Forgets a GPU if it has been missing since `until` or earlier. Returns whether the GPU was
    /// forgotten.
    pub fn forget_gpu(&mut self, uuid: &str, until: &Time) -> bool {
        let is_missing = |entry: &TrackedGpu| entry.missing_since().is_some_and(|since| since <= until);
        let forgets = self.gpus.get(uuid).is_some_and(is_missing);
        if forgets {
            self.gpus.remove(uuid);
        }
        forgets
    }

    /// Sets the time of day at `now` to `wall`.
    pub fn set_time(&mut self, now: Instant, wall: Timestamp) {
        self.clock = Clock::new(now, wall);
    }

    /// Records the driver's answer to a query that the agent sent at `requested_at`.
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

    /// Records NVML's answer for the GPU at an index. The agent sent the query at `requested_at`.
    pub fn record_answer(&mut self, index: u32, answer: Result<GpuObservation, NvmlError>, requested_at: Instant) {
        let since = self.wall_time(requested_at);
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        // Ignore the answer if NVML no longer lists a GPU at this index.
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
                    // Skip missing GPUs, because another GPU may have their index now.
                    let there = self.gpus.values().filter(|entry| entry.gpu.index == index);
                    let there = there.filter(|entry| entry.missing_since().is_none());
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

    /// Returns whether the driver and every GPU that it lists have answered or failed at least once
    /// since the list last changed.
    pub fn is_complete(&self) -> bool {
        match self.driver {
            DriverState::Unknown => false,
            DriverState::Missing(_) => true,
            DriverState::Present(_) => !self.slots.contains(&GpuSlot::Unknown),
        }
    }

    /// Marks the GPUs without an index as missing, if the call for every index has answered or
    /// failed.
    fn mark_missing(&mut self, since: &Time) {
        if !matches!(self.driver, DriverState::Present(_)) || !self.is_complete() {
            return;
        }
        let listed: Vec<&String> = self.slots.iter().filter_map(GpuSlot::uuid).collect();
        for (_, entry) in self.gpus.iter_mut().filter(|(uuid, _)| !listed.contains(uuid)) {
            entry.mark_missing(since.clone());
        }
    }

    /// Returns the time of day of an instant, in whole seconds.
    fn wall_time(&self, requested_at: Instant) -> Time {
        whole_seconds(self.clock.event_time(requested_at).wall)
    }

    /// Records NVML's description of a GPU and the GPU's processes.
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

    /// Returns the time to record for a new fault. An administrator clears faults up to a time of
    /// day. A new fault must have a later time, even if the clock was set back.
    fn fault_time(&self, uuid: &str, now: Instant) -> EventTime {
        let EventTime { now, wall } = self.clock.event_time(now);
        let after = self.cleared.get(uuid).and_then(|cleared| cleared.0.checked_add(SignedDuration::from_secs(1)).ok());
        EventTime { now, wall: after.map_or(wall, |after| after.max(wall)) }
    }

    /// Clears the faults up to `until`, because an administrator requested it. After a restart of
    /// the agent, call this method before you record a new fault.
    pub fn clear_faults(&mut self, uuid: &str, until: &Time) {
        if self.cleared.get(uuid).is_none_or(|before| before < until) {
            self.cleared.insert(uuid.to_owned(), until.clone());
        }
        if let Some(entry) = self.gpus.get_mut(uuid) {
            entry.history.clear_faults(until);
        }
    }

    /// Returns the health records that are not empty, by UUID of the GPU, for the checkpoint.
    pub fn health_records(&self) -> BTreeMap<String, HealthRecord> {
        let record = |entry: &TrackedGpu| {
            let lost = entry.lost.as_ref().is_some_and(|lost| lost.permanent);
            entry.history.to_record(lost, entry.missing_since().cloned())
        };
        let records = self.gpus.iter().map(|(uuid, entry)| (uuid.clone(), record(entry)));
        records.filter(|(_, record)| !record.is_empty()).collect()
    }

    /// Returns NVML's last description of a GPU.
    pub fn known_gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.get(uuid).map(|entry| &entry.gpu)
    }

    /// Records an XID of a GPU and returns the class of the fault.
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
            return crate::gpu::xid::classify_xid(xid, ignored);
        };
        let instances = gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.instances);
        let of = instances.filter(|instance| Some(instance.gpu_instance) == gpu_instance);
        let device = of.map(|instance| instance.uuid.as_str()).find(|uuid| !uuid.is_empty());
        history.record_xid(xid, device, ignored, at)
    }

    /// Returns the current state of the driver and the GPUs.
    pub fn hardware(&self) -> Hardware {
        let known = |entry: &TrackedGpu| {
            let missing = entry.missing_since().is_some();
            let TrackedGpu { gpu, observed, processes, lost, history } = entry;
            let health =
                self.driver_error.as_ref().or(lost.as_ref()).map_or_else(|| history.health(), LossCause::health);
            let (gpu, processes) = (gpu.clone(), processes.clone());
            KnownGpu { gpu, health, instances: history.instance_health(), observed: *observed, processes, missing }
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
    /// Returns the health of a GPU that NVML cannot query.
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
pub(crate) mod tests;
