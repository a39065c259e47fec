//! The GPUs as far as they are known: what NVML said last, what it says no more, and how each is ([`crate::health`]). Pure: the time is an
//! argument.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_api::cordon::whole_seconds;
use cleave_api::gpunode::Health;
use cleave_gpu::nvml::{Gpu, Inventory, NvmlError, Process, Vitals};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::health::{Clock, History, QUIET, Record, Stamp, reason};
use crate::xid::Class;

/// The driver and its GPUs as they are known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hardware {
    /// The driver.
    pub driver: Driver,
    /// GPUs by UUID, those that NVML lists no more included.
    pub gpus: BTreeMap<String, KnownGpu>,
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
pub struct Book {
    clock: Clock,
    /// How long a suspect GPU must show nothing further.
    quiet: Duration,
    driver: Driver,
    gpus: BTreeMap<String, Entry>,
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

#[derive(Debug)]
struct Lost {
    reason: &'static str,
    message: String,
    since: Time,
    /// It can come back by a reset alone: it fell off the bus, or its driver was unloaded. A driver that hangs proves nothing.
    for_good: bool,
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

impl Book {
    /// Starts with the GPUs of a checkpoint, which count as healthy until NVML says otherwise: pods may start before it has answered.
    pub fn remembering(gpus: Vec<Gpu>, same_boot: bool, clock: Clock) -> Self {
        let entry = |gpu: Gpu| (gpu.uuid.clone(), Entry::new(gpu, false, Vec::new()));
        let gpus = gpus.into_iter().map(entry).collect();
        Self { clock, quiet: QUIET, driver: Driver::Unknown, gpus, earlier_boot: !same_boot, cleared: BTreeMap::new() }
    }

    /// How long a suspect GPU must show nothing further before it can be healthy again; [`QUIET`] unless this is said.
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
    pub fn tell_time(&mut self, now: Instant, wall: Timestamp) {
        self.clock = Clock::new(now, wall);
    }

    /// Takes in what NVML answered, asked at `asked`.
    pub fn observe(&mut self, answer: Result<Inventory, NvmlError>, asked: Instant) {
        let since = whole_seconds(self.clock.stamp(asked).wall);
        let inventory = match answer {
            Ok(inventory) => inventory,
            Err(error) => {
                let message = chain(&error);
                for entry in self.gpus.values_mut() {
                    let unloaded = matches!(error, NvmlError::NoDriver);
                    entry.lose("DriverUnavailable", message.clone(), since.clone(), unloaded);
                }
                self.driver = Driver::Missing(message);
                return;
            }
        };
        let Inventory { driver, gpus, mut processes } = inventory;
        self.driver = Driver::Present(driver);
        let seen: Vec<String> = gpus.values().flatten().map(|gpu| gpu.uuid.clone()).collect();
        if std::mem::take(&mut self.earlier_boot) && gpus.values().all(Result::is_ok) {
            self.gpus.retain(|uuid, _| seen.contains(uuid));
        }
        for (uuid, entry) in &mut self.gpus {
            if !seen.contains(uuid) {
                let why = gpus.get(&entry.gpu.index).and_then(|gpu| gpu.as_ref().err());
                let for_good = why.is_none_or(|error| matches!(error, NvmlError::Lost { .. }));
                let message = why.map_or_else(|| "NVML does not list it any more".into(), |error| chain(error));
                entry.lose(reason::LOST, message, since.clone(), for_good);
            }
        }
        for (index, result) in gpus {
            match result {
                Ok(gpu) => {
                    let processes = processes.remove(&gpu.uuid).unwrap_or_default();
                    let uuid = gpu.uuid.clone();
                    self.see(gpu, processes);
                    if let Some(Entry { gpu, history, .. }) = self.gpus.get_mut(&uuid) {
                        let devices = gpu.mig.iter().flat_map(|mig| &mig.instances);
                        let devices: Vec<&str> = devices.map(|instance| instance.uuid.as_str()).collect();
                        history.answered(asked, &devices);
                    }
                }
                // One that was never seen has no UUID, and nothing is served of it.
                Err(error) => tracing::debug!(index, error = &error as &dyn std::error::Error, "a GPU does not answer"),
            }
        }
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

    /// Takes in what the driver says of GPUs' memory and needs, asked at `asked`.
    pub fn vitals(&mut self, vitals: BTreeMap<String, Vitals>, asked: Instant) {
        for (uuid, vitals) in vitals {
            let at = self.stamp(&uuid, asked);
            if let Some(entry) = self.gpus.get_mut(&uuid) {
                entry.history.vitals(vitals, at);
            }
        }
    }

    /// What it is when something is found wrong with a GPU. An administrator's word is about what was found before it, by the time of day as it was then,
    /// and that may have been set back since: what is found now comes after it all the same.
    fn stamp(&self, uuid: &str, now: Instant) -> Stamp {
        let Stamp { now, wall } = self.clock.stamp(now);
        let after = self.cleared.get(uuid).and_then(|word| word.0.checked_add(SignedDuration::from_secs(1)).ok());
        Stamp { now, wall: after.map_or(wall, |after| after.max(wall)) }
    }

    /// An administrator says that what was found wrong with a GPU up to a time is over. To be told again of what an agent before this one was told before
    /// anything is found.
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
            return crate::xid::classify(xid, ignored);
        };
        let instances = gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.instances);
        let of = instances.filter(|instance| Some(instance.gpu_instance) == gpu_instance);
        let device = of.map(|instance| instance.uuid.as_str()).find(|uuid| !uuid.is_empty());
        history.xid(xid, device, ignored, at)
    }

    /// What is known now.
    pub fn hardware(&self) -> Hardware {
        let known = |Entry { gpu, observed, processes, lost, history }: &Entry| {
            let health = match lost {
                Some(Lost { reason, message, since, .. }) => Health {
                    healthy: false,
                    class: Class::Lost.as_str().into(),
                    reason: (*reason).into(),
                    message: message.clone(),
                    since: Some(since.clone()),
                    last: None,
                },
                None => history.health(),
            };
            let (gpu, processes) = (gpu.clone(), processes.clone());
            KnownGpu { gpu, health, instances: history.instances(), observed: *observed, processes }
        };
        Hardware {
            driver: self.driver.clone(),
            gpus: self.gpus.iter().map(|(uuid, entry)| (uuid.clone(), known(entry))).collect(),
        }
    }
}

/// An error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::tests::gpu;

    #[expect(clippy::unnecessary_wraps, reason = "an answer, as NVML gives it")]
    fn inventory(gpus: Vec<(u32, Result<Gpu, NvmlError>)>) -> Result<Inventory, NvmlError> {
        let gpus = gpus.into_iter().collect();
        Ok(Inventory { driver: "580.159".into(), gpus, processes: BTreeMap::new() })
    }

    fn both() -> Result<Inventory, NvmlError> {
        inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-b", 1)))])
    }

    fn book(gpus: Vec<Gpu>, same_boot: bool) -> Book {
        Book::remembering(gpus, same_boot, Clock::new(Instant::now(), Timestamp::UNIX_EPOCH))
    }

    fn two() -> Book {
        book(vec![gpu("GPU-a", 0), gpu("GPU-b", 1)], true)
    }

    fn reason_of(book: &Book, uuid: &str) -> String {
        book.hardware().gpus[uuid].health.reason.clone()
    }

    #[test]
    fn one_lost_gpu_is_one_lost_gpu_and_comes_back() {
        let now = Instant::now();
        let mut book = two();
        book.observe(both(), now);
        book.xid("GPU-b", 79, None, &[], now);
        book.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(NvmlError::Lost { call: "x" }))]), now);
        let hardware = book.hardware();
        assert!(hardware.gpus["GPU-a"].health.healthy);
        assert_eq!(
            (reason_of(&book, "GPU-b").as_str(), hardware.gpus["GPU-b"].health.class.as_str()),
            ("GpuLost", "Lost")
        );
        assert_eq!(hardware.by_index()[1].gpu.model, "NVIDIA H200", "still described");
        book.observe(both(), now);
        assert!(book.hardware().gpus["GPU-b"].health.healthy, "a reset ends the XID too");
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
            let mut book = two();
            book.xid("GPU-b", 119, None, &[], now);
            book.observe(answer, now);
            // What proves it is not forgotten for what does not.
            book.observe(Err(NvmlError::Hung(Duration::from_secs(20))), now);
            book.observe(both(), now);
            assert_eq!(book.hardware().gpus["GPU-b"].health.healthy, heals, "{what}");
        }
    }

    #[test]
    fn a_gpu_that_vanishes_from_the_list_is_lost_not_forgotten() {
        let now = Instant::now();
        let mut book = book(vec![], true);
        book.observe(both(), now);
        book.observe(inventory(vec![(0, Ok(gpu("GPU-b", 0)))]), now);
        assert_eq!(reason_of(&book, "GPU-a"), "GpuLost");
        assert_eq!(book.hardware().gpus["GPU-b"].gpu.index, 0);
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
        let mut rebooted = book(vec![gpu("GPU-a", 0)], false).recalling(records, later);
        rebooted.observe(both(), later);
        assert!(rebooted.hardware().gpus["GPU-a"].health.healthy);
    }

    #[test]
    fn the_quiet_time_that_was_asked_for_counts_for_gpus_of_the_checkpoint_and_for_new_ones() {
        let (now, quiet) = (Instant::now(), Duration::from_secs(7));
        let mut before = two();
        before.xid("GPU-a", 999, None, &[], now);
        for early in [true, false] {
            let mut book = two();
            if early {
                book.quiet_for(quiet);
            }
            let mut book = book.recalling(before.records(), now);
            if !early {
                book.quiet_for(quiet);
            }
            let gpus = ["GPU-a", "GPU-new"];
            book.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-new", 1)))]), now);
            book.xid("GPU-new", 999, None, &[], now);
            let healthy = |book: &Book| gpus.map(|uuid| book.hardware().gpus[uuid].health.healthy);
            let again = |book: &mut Book, after: Duration| {
                let gpus = gpus.iter().zip(0..).map(|(uuid, index)| (index, Ok(gpu(uuid, index)))).collect();
                book.observe(inventory(gpus), now + after);
            };
            again(&mut book, quiet.saturating_sub(Duration::from_millis(1)));
            assert_eq!(healthy(&book), [false, false]);
            let said = book.hardware().gpus["GPU-new"].health.message.clone();
            assert!(said.contains("after 7 s without another"), "{said}");
            again(&mut book, quiet);
            assert_eq!(healthy(&book), [true, true]);
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
        let mut book = book(vec![gpu("GPU-a", 0)], true);
        assert!(book.hardware().gpus["GPU-a"].health.healthy, "the checkpoint is believed until NVML answers");
        book.observe(Err(NvmlError::NoDriver), now);
        assert_eq!(reason_of(&book, "GPU-a"), "DriverUnavailable");
        assert_eq!(book.hardware().driver, Driver::Missing("the NVIDIA driver is not loaded".into()));
        book.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0)))]), now);
        assert!(book.hardware().gpus["GPU-a"].health.healthy);
    }

    #[test]
    fn after_a_reboot_a_gpu_that_is_not_there_was_taken_out() {
        let listed = || inventory(vec![(0, Ok(gpu("GPU-a", 0)))]);
        let checkpoint = || vec![gpu("GPU-a", 0), gpu("GPU-b", 1)];
        let mut rebooted = book(checkpoint(), false);
        rebooted.observe(listed(), Instant::now());
        assert_eq!(rebooted.hardware().gpus.len(), 1);
        let mut same = book(checkpoint(), true);
        same.observe(listed(), Instant::now());
        assert_eq!(reason_of(&same, "GPU-b"), "GpuLost");
    }

    #[test]
    fn what_is_found_after_an_administrators_word_is_not_over_by_it_though_the_clock_was_set_back() {
        let now = Instant::now();
        let word = whole_seconds(Timestamp::from_second(3_600).unwrap());
        let mut ahead = two();
        ahead.tell_time(now, word.0);
        ahead.xid("GPU-a", 48, None, &[], now);
        ahead.cleared("GPU-a", &word);
        assert!(ahead.hardware().gpus["GPU-a"].health.healthy);
        // The time is what it really is; the same agent, and the next one, which knows the word by its checkpoint.
        let mut next = two().recalling(ahead.records(), now);
        next.cleared("GPU-a", &word);
        for mut book in [ahead, next] {
            book.tell_time(now, Timestamp::UNIX_EPOCH);
            book.xid("GPU-a", 48, None, &[], now);
            book.xid("GPU-b", 48, None, &[], now);
            // It is told with each change of the spec.
            book.cleared("GPU-a", &word);
            let health = book.hardware().gpus["GPU-a"].health.clone();
            assert_eq!(health.reason, "ResetRequired");
            let last = health.last.unwrap();
            assert!(last > word, "{last:?}: an administrator could not end it");
            assert_eq!(book.hardware().gpus["GPU-b"].health.last.as_ref().unwrap().0, Timestamp::UNIX_EPOCH);
            book.cleared("GPU-a", &last);
            assert!(book.hardware().gpus["GPU-a"].health.healthy);
        }
    }

    proptest! {
        #[test]
        fn what_happens_to_one_gpu_never_changes_the_health_of_another(
            events in proptest::collection::vec((prop_oneof![Just(13_u64), Just(48), Just(79), Just(94), Just(500)], 0_u32..4, 0_u64..200, 0_u64..5), 0..20),
        ) {
            let mut now = Instant::now();
            let mut book = two();
            book.observe(both(), now);
            book.vitals(BTreeMap::from([("GPU-a".to_owned(), Vitals { uncorrected: Some(0), ..Vitals::default() })]), now);
            for (xid, what, wait, errors) in events {
                now += Duration::from_secs(wait);
                match what {
                    0 => { book.xid("GPU-b", xid, Some(1), &[], now); }
                    1 => book.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(NvmlError::Lost { call: "x" }))]), now),
                    2 => book.observe(both(), now),
                    _ => book.vitals(BTreeMap::from([("GPU-b".to_owned(), Vitals { uncorrected: Some(errors), remap_failed: Some(errors == 4), ..Vitals::default() })]), now),
                }
                prop_assert_eq!(&book.hardware().gpus["GPU-a"].health, &Health { healthy: true, ..Health::default() });
            }
        }
    }
}
