//! What is known of the GPUs: what NVML said of each last, and how each is
//! ([`crate::gpu::health`]). Pure: the time is an argument.
//!
//! GPUs answer one by one ([`crate::run::hardware`]), and [`HardwareTracker`] merges the answers. A
//! GPU is unreachable when its own call fails or misses its deadline, or when the driver's does; in
//! the second case all are, and each is again what its own answer says as soon as the driver
//! answers. Which GPU is at which of NVML's indices is known from the answers since NVML's list
//! last changed: no GPU counts as missing before every index has answered or failed.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_api::cordon::whole_seconds;
use cleave_api::gpunode::Health;
use cleave_gpu::nvml::{Census, Gpu, NvmlError, Observation, Process, Vitals};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::clock::{Clock, Stamp};
use crate::gpu::health::{History, QUIET, Record, reason};
use crate::gpu::xid::Class;

/// The driver and its GPUs as they are known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hardware {
    /// The driver.
    pub driver: Driver,
    /// GPUs by UUID, those that NVML lists no more included.
    pub gpus: BTreeMap<String, KnownGpu>,
    /// Indices at which NVML lists a GPU that has never said which it is, and why not.
    pub unnamed: BTreeMap<u32, String>,
}

/// What is known of the driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Driver {
    /// NVML has not answered yet.
    #[default]
    Unknown,
    /// There is none, or it does not answer: why, in words.
    Missing(String),
    /// Its version.
    Present(String),
}

impl Driver {
    /// Its version, where there is one that answers.
    pub fn version(&self) -> Option<&str> {
        match self {
            Self::Present(version) => Some(version),
            Self::Unknown | Self::Missing(_) => None,
        }
    }
}

/// A GPU and how it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownGpu {
    /// As NVML described it when it last did.
    pub gpu: Gpu,
    /// Whether it can serve.
    pub health: Health,
    /// MIG devices of it that cannot, though it can.
    pub instances: BTreeMap<String, Health>,
    /// NVML has described it to this process, and not only to one before.
    pub observed: bool,
    /// Processes on it, those in its MIG instances included, as NVML last said.
    pub processes: Vec<Process>,
}

impl Hardware {
    /// GPUs in NVML's order.
    pub fn by_index(&self) -> Vec<&KnownGpu> {
        let mut gpus: Vec<&KnownGpu> = self.gpus.values().collect();
        gpus.sort_by(|a, b| (a.gpu.index, &a.gpu.uuid).cmp(&(b.gpu.index, &b.gpu.uuid)));
        gpus
    }

    /// The GPU that a GPU or MIG device is of.
    pub fn gpu_of(&self, device: &str) -> Option<&KnownGpu> {
        self.gpus.get(device).or_else(|| {
            self.gpus.values().find(|known| {
                known.gpu.mig.iter().flat_map(|mig| &mig.instances).any(|instance| instance.uuid == device)
            })
        })
    }
}

/// Gathers what becomes [`Hardware`].
#[derive(Debug)]
pub struct HardwareTracker {
    clock: Clock,
    /// How long a suspect GPU must show nothing further.
    quiet: Duration,
    driver: Driver,
    /// The driver does not answer: no GPU can be asked.
    down: Option<Lost>,
    gpus: BTreeMap<String, Entry>,
    /// What is at each of NVML's indices.
    slots: Vec<Slot>,
    /// The GPUs are those of an earlier boot: what NVML does not list was taken out of the machine.
    earlier_boot: bool,
    /// Up to when, by administrators' words, what was found wrong with GPUs is over.
    cleared: BTreeMap<String, Time>,
}

#[derive(Debug)]
struct Entry {
    gpu: Gpu,
    observed: bool,
    processes: Vec<Process>,
    /// Why NVML cannot ask it.
    lost: Option<Lost>,
    history: History,
}

/// What is at one of NVML's indices.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Slot {
    /// It has not answered since the list last changed.
    Unknown,
    /// This GPU, by UUID.
    Gpu(String),
    /// A GPU that has never said which it is, and why not.
    Unnamed(String),
}

#[derive(Debug, Clone)]
struct Lost {
    reason: &'static str,
    message: String,
    since: Time,
    /// It can come back by a reset alone: it fell off the bus, or its driver was unloaded. A driver
    /// that hangs proves nothing.
    for_good: bool,
}

impl Slot {
    fn uuid(&self) -> Option<&String> {
        match self {
            Self::Gpu(uuid) => Some(uuid),
            Self::Unknown | Self::Unnamed(_) => None,
        }
    }
}

impl Entry {
    fn new(gpu: Gpu, observed: bool, processes: Vec<Process>) -> Self {
        Self { gpu, observed, processes, lost: None, history: History::default() }
    }

    fn lose(&mut self, reason: &'static str, message: String, since: Time, for_good: bool) {
        let before = self.lost.take();
        let (since, was_for_good) = before.map_or((since, false), |lost| (lost.since, lost.for_good));
        self.lost = Some(Lost { reason, message, since, for_good: for_good || was_for_good });
    }
}

impl HardwareTracker {
    /// Starts with the GPUs of a checkpoint, which count as healthy until NVML says otherwise: pods
    /// may start before it has answered.
    pub fn remembering(gpus: Vec<Gpu>, same_boot: bool, clock: Clock) -> Self {
        let entry = |gpu: Gpu| (gpu.uuid.clone(), Entry::new(gpu, false, Vec::new()));
        let gpus = gpus.into_iter().map(entry).collect();
        Self {
            clock,
            quiet: QUIET,
            driver: Driver::Unknown,
            down: None,
            gpus,
            slots: Vec::new(),
            earlier_boot: !same_boot,
            cleared: BTreeMap::new(),
        }
    }

    /// How long a suspect GPU must show nothing further before it can be healthy again; [`QUIET`]
    /// unless this is said.
    pub fn quiet_for(&mut self, quiet: Duration) {
        self.quiet = quiet;
        self.gpus.values_mut().for_each(|entry| entry.history.quiet = quiet);
    }

    /// Takes over what was found wrong with them, unless another boot has ended it.
    #[must_use]
    pub fn recalling(mut self, records: BTreeMap<String, Record>, now: Instant) -> Self {
        for (uuid, record) in records.into_iter().filter(|_| !self.earlier_boot) {
            if let Some(entry) = self.gpus.get_mut(&uuid) {
                entry.history = History::remembering(record, now);
                entry.history.quiet = self.quiet;
            }
        }
        self
    }

    /// It is `wall` at `now`.
    pub fn set_time(&mut self, now: Instant, wall: Timestamp) {
        self.clock = Clock::new(now, wall);
    }

    /// Takes in what the driver answered, asked at `asked`.
    pub fn census(&mut self, answer: Result<Census, NvmlError>, asked: Instant) {
        let since = self.since(asked);
        match answer {
            Ok(Census { driver, count }) => {
                self.driver = Driver::Present(driver);
                self.down = None;
                if usize::try_from(count) != Ok(self.slots.len()) {
                    self.slots = (0..count).map(|_| Slot::Unknown).collect();
                }
                self.settle(&since);
            }
            Err(error) => {
                let message = chain(&error);
                if matches!(error, NvmlError::NoDriver) {
                    for entry in self.gpus.values_mut() {
                        entry.lose(reason::DRIVER, message.clone(), since.clone(), true);
                    }
                }
                let since = self.down.take().map_or(since, |down| down.since);
                self.driver = Driver::Missing(message.clone());
                self.down = Some(Lost { reason: reason::DRIVER, message, since, for_good: false });
            }
        }
    }

    /// Takes in what the GPU at an index answered, asked at `asked`.
    pub fn answer(&mut self, index: u32, answer: Result<Observation, NvmlError>, asked: Instant) {
        let since = self.since(asked);
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        // NVML lists none there any more.
        let Some(before) = self.slots.get(at).cloned() else { return };
        let elsewhere = |slots: &[Slot], uuid: &str| {
            slots.iter().enumerate().any(|(other, slot)| other != at && *slot == Slot::Gpu(uuid.to_owned()))
        };
        let now = match answer {
            Ok(Observation { gpu, processes }) => {
                let uuid = gpu.uuid.clone();
                let moved = matches!(&before, Slot::Gpu(was) if *was != uuid) || elsewhere(&self.slots, &uuid);
                if moved {
                    self.slots.fill(Slot::Unknown);
                }
                self.see(gpu, processes);
                if let Some(Entry { gpu, history, .. }) = self.gpus.get_mut(&uuid) {
                    let devices = gpu.mig.iter().flat_map(|mig| &mig.instances);
                    let devices: Vec<&str> = devices.map(|instance| instance.uuid.as_str()).collect();
                    history.answered(asked, &devices);
                }
                Slot::Gpu(uuid)
            }
            Err(error) => {
                let remembered = || {
                    let there = self.gpus.values().filter(|entry| entry.gpu.index == index);
                    there.map(|entry| entry.gpu.uuid.clone()).find(|uuid| !elsewhere(&self.slots, uuid))
                };
                let uuid = match before {
                    Slot::Gpu(uuid) => Some(uuid),
                    Slot::Unknown | Slot::Unnamed(_) => remembered(),
                };
                let message = chain(&error);
                match uuid {
                    Some(uuid) => {
                        if let Some(entry) = self.gpus.get_mut(&uuid) {
                            let for_good = matches!(error, NvmlError::Lost { .. } | NvmlError::NoDriver);
                            entry.lose(reason::of(&error), message, since.clone(), for_good);
                        }
                        Slot::Gpu(uuid)
                    }
                    // Nothing is served of it.
                    None => Slot::Unnamed(message),
                }
            }
        };
        if let Some(slot) = self.slots.get_mut(at) {
            *slot = now;
        }
        self.settle(&since);
    }

    /// Whether all there is to hear was heard at least once: of the driver, and of each GPU or that
    /// it does not answer.
    pub fn is_complete(&self) -> bool {
        match self.driver {
            Driver::Unknown => false,
            Driver::Missing(_) => true,
            Driver::Present(_) => !self.slots.contains(&Slot::Unknown),
        }
    }

    /// Once every index has answered or failed, a GPU that is at none of them is not listed.
    fn settle(&mut self, since: &Time) {
        if !matches!(self.driver, Driver::Present(_)) || !self.is_complete() {
            return;
        }
        let listed: Vec<&String> = self.slots.iter().filter_map(Slot::uuid).collect();
        let answers = |uuid: &String| self.gpus.get(uuid).is_some_and(|entry| entry.observed && entry.lost.is_none());
        let all_answer = listed.len() == self.slots.len() && listed.iter().all(|uuid| answers(uuid));
        let missing: Vec<String> = self.gpus.keys().filter(|uuid| !listed.contains(uuid)).cloned().collect();
        let taken_out = std::mem::take(&mut self.earlier_boot) && all_answer;
        for uuid in missing {
            if taken_out {
                self.gpus.remove(&uuid);
            } else if let Some(entry) = self.gpus.get_mut(&uuid) {
                entry.lose(reason::LOST, "NVML does not list it any more".into(), since.clone(), true);
            }
        }
    }

    fn since(&self, asked: Instant) -> Time {
        whole_seconds(self.clock.stamp(asked).wall)
    }

    /// Takes in what NVML says of one GPU.
    pub fn see(&mut self, gpu: Gpu, processes: Vec<Process>) {
        match self.gpus.get_mut(&gpu.uuid) {
            Some(entry) => {
                // Lost and back: it was reset, and what it had is over.
                if entry.lost.take().is_some_and(|lost| lost.for_good) {
                    entry.history.was_reset();
                }
                (entry.gpu, entry.observed, entry.processes) = (gpu, true, processes);
            }
            None => {
                let uuid = gpu.uuid.clone();
                let mut entry = Entry::new(gpu, true, processes);
                entry.history.quiet = self.quiet;
                self.gpus.insert(uuid, entry);
            }
        }
    }

    /// Takes in what the driver says of a GPU's memory and needs, asked at `asked`.
    pub fn vitals(&mut self, uuid: &str, vitals: Vitals, asked: Instant) {
        let at = self.stamp(uuid, asked);
        if let Some(entry) = self.gpus.get_mut(uuid) {
            entry.history.vitals(vitals, at);
        }
    }

    /// What it is when something is found wrong with a GPU. An administrator's word is about what
    /// was found before it, by the time of day as it was then, and that may have been set back
    /// since: what is found now comes after it all the same.
    fn stamp(&self, uuid: &str, now: Instant) -> Stamp {
        let Stamp { now, wall } = self.clock.stamp(now);
        let after = self.cleared.get(uuid).and_then(|word| word.0.checked_add(SignedDuration::from_secs(1)).ok());
        Stamp { now, wall: after.map_or(wall, |after| after.max(wall)) }
    }

    /// An administrator says that what was found wrong with a GPU up to a time is over. To be told
    /// again of what an agent before this one was told before anything is found.
    pub fn cleared(&mut self, uuid: &str, until: &Time) {
        if self.cleared.get(uuid).is_none_or(|before| before < until) {
            self.cleared.insert(uuid.to_owned(), until.clone());
        }
        if let Some(entry) = self.gpus.get_mut(uuid) {
            entry.history.cleared(until);
        }
    }

    /// What the next agent has to know of GPUs of which there is something to know.
    pub fn records(&self) -> BTreeMap<String, Record> {
        let record = |entry: &Entry| entry.history.record(entry.lost.as_ref().is_some_and(|lost| lost.for_good));
        let records = self.gpus.iter().map(|(uuid, entry)| (uuid.clone(), record(entry)));
        records.filter(|(_, record)| !record.is_empty()).collect()
    }

    /// A GPU as it was described last.
    pub fn known(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.get(uuid).map(|entry| &entry.gpu)
    }

    /// Takes in an XID, and says what it says of the GPU.
    pub fn xid(&mut self, uuid: &str, xid: u64, gpu_instance: Option<u32>, ignored: &[u64], now: Instant) -> Class {
        let at = self.stamp(uuid, now);
        let Some(Entry { gpu, history, .. }) = self.gpus.get_mut(uuid) else {
            return crate::gpu::xid::classify(xid, ignored);
        };
        let instances = gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.instances);
        let of = instances.filter(|instance| Some(instance.gpu_instance) == gpu_instance);
        let device = of.map(|instance| instance.uuid.as_str()).find(|uuid| !uuid.is_empty());
        history.xid(xid, device, ignored, at)
    }

    /// What is known now.
    pub fn hardware(&self) -> Hardware {
        let known = |Entry { gpu, observed, processes, lost, history }: &Entry| {
            let health = self.down.as_ref().or(lost.as_ref()).map_or_else(|| history.health(), Lost::health);
            let (gpu, processes) = (gpu.clone(), processes.clone());
            KnownGpu { gpu, health, instances: history.instances(), observed: *observed, processes }
        };
        let unnamed = |(index, slot): (u32, &Slot)| match slot {
            Slot::Unnamed(why) if self.down.is_none() => Some((index, why.clone())),
            Slot::Unnamed(_) | Slot::Unknown | Slot::Gpu(_) => None,
        };
        Hardware {
            driver: self.driver.clone(),
            gpus: self.gpus.iter().map(|(uuid, entry)| (uuid.clone(), known(entry))).collect(),
            unnamed: (0..).zip(&self.slots).filter_map(unnamed).collect(),
        }
    }
}

impl Lost {
    fn health(&self) -> Health {
        Health {
            healthy: false,
            class: Class::Lost.as_str().into(),
            reason: self.reason.into(),
            message: self.message.clone(),
            since: Some(self.since.clone()),
            last: None,
        }
    }
}

/// An error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
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
        fn observe(&mut self, answer: Result<Inventory, NvmlError>, asked: Instant) {
            match answer {
                Ok(inventory) => {
                    let (census, gpus) = inventory.answers();
                    self.census(Ok(census), asked);
                    gpus.for_each(|(index, answer)| self.answer(index, answer, asked));
                }
                Err(error) => self.census(Err(error), asked),
            }
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "an answer, as NVML gives it")]
    fn seen(uuid: &str, index: u32) -> Result<Observation, NvmlError> {
        Ok(Observation { gpu: gpu(uuid, index), processes: Vec::new() })
    }

    fn hung() -> Result<Observation, NvmlError> {
        Err(NvmlError::Hung(Duration::from_secs(20)))
    }

    fn census(tracker: &mut HardwareTracker, count: u32, now: Instant) {
        tracker.census(Ok(Census { driver: "580.159".into(), count }), now);
    }

    fn sick(tracker: &HardwareTracker) -> Vec<String> {
        let hardware = tracker.hardware();
        hardware.gpus.into_iter().filter(|(_, known)| !known.health.healthy).map(|(uuid, _)| uuid).collect()
    }

    #[expect(clippy::unnecessary_wraps, reason = "an answer, as NVML gives it")]
    fn inventory(gpus: Vec<(u32, Result<Gpu, NvmlError>)>) -> Result<Inventory, NvmlError> {
        let gpus = gpus.into_iter().collect();
        Ok(Inventory { driver: "580.159".into(), gpus, processes: BTreeMap::new() })
    }

    fn both() -> Result<Inventory, NvmlError> {
        inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-b", 1)))])
    }

    fn tracker(gpus: Vec<Gpu>, same_boot: bool) -> HardwareTracker {
        HardwareTracker::remembering(gpus, same_boot, Clock::new(Instant::now(), Timestamp::UNIX_EPOCH))
    }

    fn two() -> HardwareTracker {
        tracker(vec![gpu("GPU-a", 0), gpu("GPU-b", 1)], true)
    }

    #[test]
    fn a_gpu_that_hangs_is_unreachable_alone_others_answer_meanwhile_and_it_recovers_by_itself() {
        let now = Instant::now();
        let mut tracker = two();
        tracker.observe(both(), now);
        tracker.answer(1, hung(), now);
        assert_eq!((sick(&tracker), reason_of(&tracker, "GPU-b")), (vec!["GPU-b".to_owned()], "GpuUnreachable".into()));
        let health = tracker.hardware().gpus["GPU-b"].health.clone();
        assert_eq!((health.class.as_str(), health.message.as_str()), ("Lost", "NVML did not answer for 20 s"));
        let process = Process { pid: 7, memory: None, mps: false, gpu_instance: None };
        let answer = Observation { gpu: gpu("GPU-a", 0), processes: vec![process] };
        tracker.answer(0, Ok(answer), now);
        census(&mut tracker, 2, now);
        let hardware = tracker.hardware();
        assert_eq!(hardware.gpus["GPU-a"].processes.len(), 1, "what the other one says is taken in");
        assert_eq!((sick(&tracker), hardware.driver.version()), (vec!["GPU-b".to_owned()], Some("580.159")));
        tracker.answer(1, seen("GPU-b", 1), now);
        assert!(sick(&tracker).is_empty());
    }

    #[test]
    fn a_gpu_that_hangs_from_the_start_is_known_by_its_index_and_others_are_served() {
        let now = Instant::now();
        let mut tracker = tracker(vec![], true);
        census(&mut tracker, 2, now);
        tracker.answer(0, seen("GPU-a", 0), now);
        assert_eq!((tracker.hardware().gpus.len(), tracker.is_complete()), (1, false));
        tracker.answer(1, hung(), now);
        assert!(tracker.is_complete());
        let hardware = tracker.hardware();
        assert!(hardware.gpus["GPU-a"].health.healthy);
        assert_eq!(hardware.unnamed, BTreeMap::from([(1, "NVML did not answer for 20 s".to_owned())]));
        tracker.answer(1, seen("GPU-b", 1), now);
        assert_eq!((tracker.hardware().gpus.len(), tracker.hardware().unnamed.len()), (2, 0));
    }

    #[test]
    fn one_of_the_checkpoint_that_hangs_from_the_start_is_unreachable_and_not_forgotten() {
        let now = Instant::now();
        for same_boot in [true, false] {
            let mut tracker = tracker(vec![gpu("GPU-a", 0), gpu("GPU-b", 1)], same_boot);
            census(&mut tracker, 2, now);
            tracker.answer(1, hung(), now);
            tracker.answer(0, seen("GPU-a", 0), now);
            assert_eq!(
                (sick(&tracker), reason_of(&tracker, "GPU-b")),
                (vec!["GPU-b".to_owned()], "GpuUnreachable".into())
            );
            assert!(tracker.hardware().unnamed.is_empty());
        }
    }

    #[test]
    fn a_driver_that_fails_takes_all_and_each_is_then_what_its_own_answer_says() {
        let now = Instant::now();
        let mut tracker = two();
        tracker.observe(both(), now);
        tracker.answer(1, hung(), now);
        tracker.census(Err(NvmlError::Hung(Duration::from_secs(20))), now);
        // One that answers all the same may not be served by a driver that does not.
        tracker.answer(0, seen("GPU-a", 0), now);
        assert_eq!(sick(&tracker), ["GPU-a", "GPU-b"]);
        assert_eq!(reason_of(&tracker, "GPU-a"), "DriverUnavailable");
        census(&mut tracker, 2, now);
        assert_eq!((sick(&tracker), reason_of(&tracker, "GPU-b")), (vec!["GPU-b".to_owned()], "GpuUnreachable".into()));
    }

    #[test]
    fn gpus_that_change_places_are_not_missing_between_two_answers() {
        let now = Instant::now();
        let mut tracker = two();
        tracker.observe(both(), now);
        tracker.xid("GPU-a", 48, None, &[], now);
        tracker.answer(0, seen("GPU-b", 0), now);
        assert_eq!(sick(&tracker), ["GPU-a"]);
        tracker.answer(1, seen("GPU-a", 1), now);
        assert_eq!(reason_of(&tracker, "GPU-a"), "ResetRequired", "no reset was seen");
        // A list that is shorter says which GPU is gone once all that are left have answered.
        census(&mut tracker, 1, now);
        assert_eq!(reason_of(&tracker, "GPU-a"), "ResetRequired");
        tracker.answer(1, hung(), now);
        tracker.answer(0, seen("GPU-a", 0), now);
        assert_eq!((sick(&tracker).len(), reason_of(&tracker, "GPU-b")), (2, "GpuLost".into()));
    }

    fn reason_of(tracker: &HardwareTracker, uuid: &str) -> String {
        tracker.hardware().gpus[uuid].health.reason.clone()
    }

    #[test]
    fn one_lost_gpu_is_one_lost_gpu_and_comes_back() {
        let now = Instant::now();
        let mut tracker = two();
        tracker.observe(both(), now);
        tracker.xid("GPU-b", 79, None, &[], now);
        tracker.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(NvmlError::Lost { call: "x" }))]), now);
        let hardware = tracker.hardware();
        assert!(hardware.gpus["GPU-a"].health.healthy);
        assert_eq!(
            (reason_of(&tracker, "GPU-b").as_str(), hardware.gpus["GPU-b"].health.class.as_str()),
            ("GpuLost", "Lost")
        );
        assert_eq!(hardware.by_index()[1].gpu.model, "NVIDIA H200", "still described");
        tracker.observe(both(), now);
        assert!(tracker.hardware().gpus["GPU-b"].health.healthy, "a reset ends the XID too");
    }

    #[test]
    fn a_driver_that_hangs_or_a_call_that_fails_is_no_reset_and_one_that_was_unloaded_is() {
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
            let mut tracker = two();
            tracker.xid("GPU-b", 119, None, &[], now);
            tracker.observe(answer, now);
            // What proves it is not forgotten for what does not.
            tracker.observe(Err(NvmlError::Hung(Duration::from_secs(20))), now);
            tracker.observe(both(), now);
            assert_eq!(tracker.hardware().gpus["GPU-b"].health.healthy, heals, "{what}");
        }
    }

    #[test]
    fn a_gpu_that_vanishes_from_the_list_is_lost_not_forgotten() {
        let now = Instant::now();
        let mut tracker = tracker(vec![], true);
        tracker.observe(both(), now);
        tracker.observe(inventory(vec![(0, Ok(gpu("GPU-b", 0)))]), now);
        assert_eq!(reason_of(&tracker, "GPU-a"), "GpuLost");
        assert_eq!(tracker.hardware().gpus["GPU-b"].gpu.index, 0);
    }

    #[test]
    fn what_was_found_is_known_to_the_next_agent_unless_the_node_was_started_again() {
        let now = Instant::now();
        let mut before = two();
        before.xid("GPU-a", 48, None, &[], now);
        before.xid("GPU-none", 48, None, &[], now);
        let records = before.records();
        assert_eq!(records.keys().collect::<Vec<_>>(), ["GPU-a"]);
        let later = now + 100 * QUIET;
        let mut after = two().recalling(records.clone(), later);
        after.observe(both(), later);
        assert_eq!(reason_of(&after, "GPU-a"), "ResetRequired", "a restart is no reset");
        let mut rebooted = tracker(vec![gpu("GPU-a", 0)], false).recalling(records, later);
        rebooted.observe(both(), later);
        assert!(rebooted.hardware().gpus["GPU-a"].health.healthy);
    }

    #[test]
    fn the_quiet_time_that_was_asked_for_counts_for_gpus_of_the_checkpoint_and_for_new_ones() {
        let (now, quiet) = (Instant::now(), Duration::from_secs(7));
        let mut before = two();
        before.xid("GPU-a", 999, None, &[], now);
        for early in [true, false] {
            let mut tracker = two();
            if early {
                tracker.quiet_for(quiet);
            }
            let mut tracker = tracker.recalling(before.records(), now);
            if !early {
                tracker.quiet_for(quiet);
            }
            let gpus = ["GPU-a", "GPU-new"];
            tracker.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-new", 1)))]), now);
            tracker.xid("GPU-new", 999, None, &[], now);
            let healthy = |tracker: &HardwareTracker| gpus.map(|uuid| tracker.hardware().gpus[uuid].health.healthy);
            let again = |tracker: &mut HardwareTracker, after: Duration| {
                let gpus = gpus.iter().zip(0..).map(|(uuid, index)| (index, Ok(gpu(uuid, index)))).collect();
                tracker.observe(inventory(gpus), now + after);
            };
            again(&mut tracker, quiet.saturating_sub(Duration::from_millis(1)));
            assert_eq!(healthy(&tracker), [false, false]);
            let said = tracker.hardware().gpus["GPU-new"].health.message.clone();
            assert!(said.contains("after 7 s without another"), "{said}");
            again(&mut tracker, quiet);
            assert_eq!(healthy(&tracker), [true, true]);
        }
    }

    #[test]
    fn one_that_is_lost_while_the_agent_ends_and_reset_before_it_starts_is_healthy() {
        let now = Instant::now();
        let mut before = two();
        before.xid("GPU-b", 79, None, &[], now);
        before.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(NvmlError::Lost { call: "x" }))]), now);
        let mut after = two().recalling(before.records(), now);
        assert!(!after.hardware().gpus["GPU-b"].health.healthy);
        after.observe(both(), now);
        assert!(after.hardware().gpus["GPU-b"].health.healthy);
        assert!(after.records().is_empty());
    }

    #[test]
    fn a_driver_that_goes_takes_every_gpu_and_a_driver_that_comes_brings_them() {
        let now = Instant::now();
        let mut tracker = tracker(vec![gpu("GPU-a", 0)], true);
        assert!(tracker.hardware().gpus["GPU-a"].health.healthy, "the checkpoint is believed until NVML answers");
        tracker.observe(Err(NvmlError::NoDriver), now);
        assert_eq!(reason_of(&tracker, "GPU-a"), "DriverUnavailable");
        assert_eq!(tracker.hardware().driver, Driver::Missing("the NVIDIA driver is not loaded".into()));
        tracker.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0)))]), now);
        assert!(tracker.hardware().gpus["GPU-a"].health.healthy);
    }

    #[test]
    fn after_a_reboot_a_gpu_that_is_not_there_was_taken_out() {
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
    fn what_is_found_after_an_administrators_word_is_not_over_by_it_though_the_clock_was_set_back() {
        let now = Instant::now();
        let word = whole_seconds(Timestamp::from_second(3_600).unwrap());
        let mut ahead = two();
        ahead.set_time(now, word.0);
        ahead.xid("GPU-a", 48, None, &[], now);
        ahead.cleared("GPU-a", &word);
        assert!(ahead.hardware().gpus["GPU-a"].health.healthy);
        // The time is what it really is; the same agent, and the next one, which knows the word by
        // its checkpoint.
        let mut next = two().recalling(ahead.records(), now);
        next.cleared("GPU-a", &word);
        for mut tracker in [ahead, next] {
            tracker.set_time(now, Timestamp::UNIX_EPOCH);
            tracker.xid("GPU-a", 48, None, &[], now);
            tracker.xid("GPU-b", 48, None, &[], now);
            // It is told with each change of the spec.
            tracker.cleared("GPU-a", &word);
            let health = tracker.hardware().gpus["GPU-a"].health.clone();
            assert_eq!(health.reason, "ResetRequired");
            let last = health.last.unwrap();
            assert!(last > word, "{last:?}: an administrator could not end it");
            assert_eq!(tracker.hardware().gpus["GPU-b"].health.last.as_ref().unwrap().0, Timestamp::UNIX_EPOCH);
            tracker.cleared("GPU-a", &last);
            assert!(tracker.hardware().gpus["GPU-a"].health.healthy);
        }
    }

    proptest! {
        #[test]
        fn what_happens_to_one_gpu_never_changes_the_health_of_another(
            events in proptest::collection::vec((prop_oneof![Just(13_u64), Just(48), Just(79), Just(94), Just(500)], 0_u32..5, 0_u64..200, 0_u64..5), 0..20),
        ) {
            let mut now = Instant::now();
            let mut tracker = two();
            tracker.observe(both(), now);
            tracker.vitals("GPU-a", Vitals { uncorrected: Some(0), ..Vitals::default() }, now);
            for (xid, what, wait, errors) in events {
                now += Duration::from_secs(wait);
                match what {
                    0 => { tracker.xid("GPU-b", xid, Some(1), &[], now); }
                    1 => tracker.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(NvmlError::Lost { call: "x" }))]), now),
                    2 => tracker.observe(both(), now),
                    3 => tracker.answer(1, hung(), now),
                    _ => tracker.vitals("GPU-b", Vitals { uncorrected: Some(errors), remap_failed: Some(errors == 4), ..Vitals::default() }, now),
                }
                prop_assert_eq!(&tracker.hardware().gpus["GPU-a"].health, &Health { healthy: true, ..Health::default() });
            }
        }
    }
}
