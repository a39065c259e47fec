//! Whether a GPU, or one of its MIG instances, can serve: what was found wrong with it, and what it
//! takes until that is over. Pure: the time is an argument.
//!
//! ```text
//!  XID of a program ───────────────▶ told, nothing changes
//!  XID that makes it suspect, ─────▶ Suspect ── quiet time, then a full answer of NVML ──▶ healthy
//!  uncorrected ECC errors           │   └────────────────────────────────────┐
//!  XID that needs a reset ─────────▶ NeedsReset ── proof of a reset, ─────────┴─ administrator's word ──▶ healthy
//!  NVML does not answer ───────────▶ Lost ── NVML answers ──▶ what it was before; lost and found is a proof of a reset
//! ```
//!
//! Time alone heals nothing, and neither does a restart of the agent: what was found is in the
//! checkpoint. Proof of a reset is another boot of the node; a GPU that fell off the bus, or whose
//! driver was unloaded, and is back; counters that start at 0 again; and a driver that wanted a
//! reset and wants nothing any more. Some things are wrong for as long as NVML says so, and are
//! kept nowhere.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_api::cordon::whole_seconds;
use cleave_api::gpunode::Health;
use cleave_gpu::nvml::{NvmlError, Recovery, Vitals};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};

use crate::clock::Stamp;
use crate::gpu::xid::{Class, classify, describe};

/// How long a suspect GPU must show nothing further before it can be healthy again, unless
/// `--suspect-quiet` says otherwise.
///
/// Long enough for a GPU that fails under every load to show it again, short enough that one
/// accident does not cost an hour.
pub const QUIET: Duration = Duration::from_secs(60);

/// Reasons of a GPU's health; [`cleave_api::gpunode::Health::reason`].
pub mod reason {
    /// An XID made it suspect.
    pub const XID: &str = "XidError";
    /// Uncorrected memory errors made it suspect.
    pub const ECC: &str = "EccErrors";
    /// NVML says that it is lost, or fails to ask it.
    pub const LOST: &str = "GpuLost";
    /// NVML did not answer for it in time.
    pub const UNREACHABLE: &str = "GpuUnreachable";
    /// The driver does not answer for any GPU.
    pub const DRIVER: &str = "DriverUnavailable";
    /// It needs a reset.
    pub const RESET: &str = "ResetRequired";
    /// Its memory could not be mended.
    pub const REMAP_FAILED: &str = "RowRemapFailed";
    /// Healthy: a reset would mend what does not hinder it.
    pub const RESET_PENDING: &str = "ResetPending";

    /// Of a GPU that NVML could not ask.
    pub const fn of(error: &super::NvmlError) -> &'static str {
        use super::NvmlError;
        match error {
            NvmlError::Hung(_) => UNREACHABLE,
            NvmlError::NoLibrary(_) | NvmlError::NoDriver => DRIVER,
            _ => LOST,
        }
    }
}

/// What was found wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Cause {
    /// An XID.
    Xid(u64),
    /// So many further uncorrected memory errors.
    EccErrors(u64),
}

/// Something that was found wrong, until it is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// What has to happen.
    pub class: Class,
    /// What it is; the last, where there were several.
    pub cause: Cause,
    /// The MIG device that it is of alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// When it was first found.
    pub since: Time,
    /// When it was last found.
    pub last: Time,
}

/// What the next agent has to know of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// What was found and is not over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// Uncorrected memory errors since the last reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected: Option<u64>,
    /// The driver has wanted a reset since when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset_wanted: Option<Time>,
    /// It was lost in such a way that it can come back by a reset alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
}

impl Record {
    /// There is nothing to know.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What is known of the health of one GPU.
#[derive(Debug, Clone)]
pub struct History {
    /// How long it must show nothing further when it is suspect.
    pub quiet: Duration,
    findings: Vec<Open>,
    uncorrected: Option<u64>,
    reset_wanted: Option<Time>,
    remap_failed: Option<Time>,
    vitals: Vitals,
    /// It was lost before this process started.
    was_lost: bool,
}

impl Default for History {
    /// Of a GPU of which nothing is known yet.
    fn default() -> Self {
        Self {
            quiet: QUIET,
            findings: Vec::new(),
            uncorrected: None,
            reset_wanted: None,
            remap_failed: None,
            vitals: Vitals::default(),
            was_lost: false,
        }
    }
}

#[derive(Debug, Clone)]
struct Open {
    finding: Finding,
    /// From when it has been quiet, for all that this process knows.
    quiet: Instant,
}

impl History {
    /// As the last agent left it, in the same boot: another boot is a reset. The quiet time starts
    /// anew, since nobody has listened.
    pub fn remembering(record: Record, now: Instant) -> Self {
        let Record { findings, uncorrected, reset_wanted, lost } = record;
        let findings = findings.into_iter().map(|finding| Open { finding, quiet: now }).collect();
        Self { findings, uncorrected, reset_wanted, was_lost: lost, ..Self::default() }
    }

    /// For the next agent. `lost`: it is, in such a way that it can come back by a reset alone.
    pub fn record(&self, lost: bool) -> Record {
        Record {
            findings: self.findings.iter().map(|open| open.finding.clone()).collect(),
            uncorrected: self.uncorrected.filter(|count| *count > 0),
            reset_wanted: self.reset_wanted.clone(),
            lost: lost || self.was_lost,
        }
    }

    /// An XID; `instance` is the MIG device that it is of, if of one. Says what it says of the GPU.
    pub fn xid(&mut self, xid: u64, instance: Option<&str>, ignored: &[u64], at: Stamp) -> Class {
        let class = classify(xid, ignored);
        if class != Class::Application {
            self.find(class, Cause::Xid(xid), instance, at);
        }
        class
    }

    /// NVML has described the GPU in full, asked at `asked`, with these MIG devices.
    pub fn answered(&mut self, asked: Instant, devices: &[&str]) {
        if std::mem::take(&mut self.was_lost) {
            self.was_reset();
        }
        let long = self.quiet;
        self.findings.retain(|Open { finding, quiet }| {
            let quiet = asked.checked_duration_since(*quiet).is_some_and(|quiet| quiet >= long);
            // What was wrong with an instance ends with it.
            let gone = finding.instance.as_deref().is_some_and(|instance| !devices.contains(&instance));
            finding.class != Class::Suspect || !(quiet || gone)
        });
    }

    /// What the driver says of it.
    pub fn vitals(&mut self, vitals: Vitals, at: Stamp) {
        if let Some(count) = vitals.uncorrected {
            match self.uncorrected.replace(count) {
                Some(before) if count < before => self.was_reset(),
                Some(before) if count > before => {
                    self.find(Class::Suspect, Cause::EccErrors(count - before), None, at);
                }
                _ => {}
            }
        }
        match vitals.recovery {
            Some(Recovery::Reset | Recovery::Reboot) => {
                self.reset_wanted.get_or_insert_with(|| whole_seconds(at.wall));
            }
            Some(Recovery::Nothing) if self.reset_wanted.is_some() => self.was_reset(),
            Some(Recovery::Nothing | Recovery::Drain) | None => {}
        }
        if vitals.remap_failed == Some(true) {
            self.remap_failed.get_or_insert_with(|| whole_seconds(at.wall));
        } else {
            self.remap_failed = None;
        }
        self.vitals = vitals;
    }

    /// There is proof of a reset: what was found before is over.
    pub fn was_reset(&mut self) {
        self.findings.clear();
        self.reset_wanted = None;
    }

    /// An administrator says that what was found up to this time is over.
    pub fn cleared(&mut self, until: &Time) {
        self.findings.retain(|open| open.finding.last > *until);
    }

    fn find(&mut self, class: Class, cause: Cause, instance: Option<&str>, at: Stamp) {
        // What needs a reset needs one of the GPU.
        let instance = instance.filter(|_| class == Class::Suspect);
        let time = whole_seconds(at.wall);
        let same = |open: &&mut Open| (open.finding.class, open.finding.instance.as_deref()) == (class, instance);
        match self.findings.iter_mut().find(same) {
            Some(open) => {
                // A clock that was set back does not make it end before it began.
                let last = time.max(open.finding.last.clone());
                (open.finding.cause, open.finding.last, open.quiet) = (cause, last, at.now);
            }
            None => {
                let instance = instance.map(str::to_owned);
                let finding = Finding { class, cause, instance, since: time.clone(), last: time };
                self.findings.push(Open { finding, quiet: at.now });
            }
        }
    }

    /// Whether the GPU can serve, as far as this is known.
    pub fn health(&self) -> Health {
        if self.was_lost {
            return Health {
                healthy: false,
                class: Class::Lost.as_str().into(),
                reason: reason::LOST.into(),
                message: "it was lost, and NVML has not answered again yet".into(),
                ..Health::default()
            };
        }
        let worst = self.findings.iter().map(|open| &open.finding).filter(|finding| finding.instance.is_none());
        let worst = worst.max_by_key(|finding| finding.class);
        if let Some(since) = &self.remap_failed {
            let message = "a row of its memory could not be remapped: it has to be replaced".to_owned();
            return live(reason::REMAP_FAILED, message, since);
        }
        if let Some(finding) = worst.filter(|finding| finding.class == Class::NeedsReset) {
            return self.told(finding);
        }
        if let Some(since) = &self.reset_wanted {
            let wants = match self.vitals.recovery {
                Some(Recovery::Reboot) => "a restart of the node",
                _ => "a reset of it",
            };
            return live(reason::RESET, format!("the driver wants {wants}: drain it first"), since);
        }
        match worst {
            Some(finding) => self.told(finding),
            None if self.vitals.remap_pending == Some(true) || self.vitals.recovery == Some(Recovery::Drain) => {
                Health {
                    healthy: true,
                    reason: reason::RESET_PENDING.into(),
                    message:
                        "parts of its memory are set aside at the next reset: drain it and reset it when convenient"
                            .into(),
                    ..Health::default()
                }
            }
            None => Health { healthy: true, ..Health::default() },
        }
    }

    /// What is wrong with single MIG devices, by UUID.
    pub fn instances(&self) -> BTreeMap<String, Health> {
        let findings = self.findings.iter().map(|open| &open.finding);
        findings.filter_map(|finding| Some((finding.instance.clone()?, self.told(finding)))).collect()
    }

    fn told(&self, Finding { class, cause, instance: _, since, last }: &Finding) -> Health {
        let what = match cause {
            Cause::Xid(xid) => describe(*xid),
            Cause::EccErrors(1) => "an uncorrected memory error".to_owned(),
            Cause::EccErrors(count) => format!("{count} uncorrected memory errors"),
        };
        let (reason, until) = match (class, cause) {
            (Class::NeedsReset, _) => {
                (reason::RESET, "it needs a reset: drain it, then reset it or restart the node".to_owned())
            }
            (_, cause) => {
                let reason = if matches!(cause, Cause::Xid(_)) { reason::XID } else { reason::ECC };
                (reason, format!("healthy again when it answers after {} s without another", self.quiet.as_secs()))
            }
        };
        Health {
            healthy: false,
            class: class.as_str().into(),
            reason: reason.into(),
            message: format!("{what}; {until}"),
            since: Some(since.clone()),
            last: Some(last.clone()),
        }
    }
}

fn live(reason: &str, message: String, since: &Time) -> Health {
    Health {
        healthy: false,
        class: Class::NeedsReset.as_str().into(),
        reason: reason.into(),
        message,
        since: Some(since.clone()),
        last: None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use k8s_openapi::jiff::Timestamp;
    use proptest::prelude::*;

    use super::*;
    use crate::clock::Clock;

    fn stamp(now: Instant) -> Stamp {
        Stamp { now, wall: Timestamp::UNIX_EPOCH }
    }

    fn class(history: &History) -> String {
        history.health().class
    }

    fn counted(uncorrected: u64) -> Vitals {
        Vitals { uncorrected: Some(uncorrected), ..Vitals::default() }
    }

    fn wanting(recovery: Recovery) -> Vitals {
        Vitals { recovery: Some(recovery), ..Vitals::default() }
    }

    #[test]
    fn a_suspect_is_healthy_after_a_quiet_time_and_an_answer_and_not_by_one_of_them() {
        let start = Instant::now();
        let mut history = History::default();
        assert_eq!(history.xid(999, None, &[], stamp(start)), Class::Suspect);
        history.answered(start + QUIET.saturating_sub(Duration::from_millis(1)), &[]);
        assert_eq!(class(&history), "Suspect", "it answers, too early");
        history.xid(999, None, &[], stamp(start + QUIET / 2));
        history.answered(start + QUIET, &[]);
        assert_eq!(class(&history), "Suspect", "the second starts the time anew");
        // Nothing changes as time passes: somebody has to ask.
        history.answered(start + QUIET / 2 + QUIET, &[]);
        assert!(history.health().healthy);
    }

    #[test]
    fn what_needs_a_reset_waits_for_proof_of_one() {
        let (start, later) = (Instant::now(), Instant::now() + 1000 * QUIET);
        let sick = || {
            let mut history = History::default();
            history.vitals(counted(3), stamp(start));
            history.xid(48, None, &[], stamp(start));
            history.xid(999, None, &[], stamp(start));
            history
        };
        let mut history = sick();
        history.answered(later, &[]);
        history.vitals(counted(3), stamp(later));
        history.vitals(wanting(Recovery::Nothing), stamp(later));
        assert_eq!(class(&history), "NeedsReset");
        assert!(history.health().message.contains("XID 48 (double-bit ECC error)"));

        let mut counters = history.clone();
        counters.vitals(counted(0), stamp(later));
        assert!(counters.health().healthy, "its counters start anew");
        let mut driver = history.clone();
        driver.vitals(wanting(Recovery::Reset), stamp(later));
        assert_eq!(class(&driver), "NeedsReset");
        driver.vitals(wanting(Recovery::Nothing), stamp(later));
        assert!(driver.health().healthy, "the driver wanted one, and wants none");
        let mut lost = History::remembering(history.record(true), later);
        assert_eq!(class(&lost), "Lost");
        lost.answered(later, &[]);
        assert!(lost.health().healthy, "lost and found");
        let mut person = history.clone();
        person.cleared(&whole_seconds(Timestamp::from_second(-1).unwrap()));
        assert_eq!(class(&person), "NeedsReset", "that was about something before");
        person.cleared(&whole_seconds(Timestamp::UNIX_EPOCH));
        assert!(person.health().healthy, "an administrator's word");
    }

    #[test]
    fn a_restart_heals_nothing_and_starts_the_quiet_time_anew() {
        let start = Instant::now();
        for xid in [79, 999] {
            let mut before = History::default();
            before.xid(xid, None, &[], stamp(start));
            let json = serde_json::to_string(&before.record(false)).unwrap();
            let mut after = History::remembering(serde_json::from_str(&json).unwrap(), start + QUIET);
            assert_eq!(after.health(), before.health());
            after.answered(start + QUIET, &[]);
            assert!(!after.health().healthy, "XID {xid}");
        }
    }

    #[test]
    fn memory_errors_count_from_where_they_were_and_across_a_restart() {
        let start = Instant::now();
        let mut history = History::default();
        history.vitals(counted(7), stamp(start));
        assert!(history.health().healthy, "they are of before");
        let mut history = History::remembering(history.record(false), start);
        history.vitals(counted(9), stamp(start));
        let health = history.health();
        assert_eq!((health.class.as_str(), health.reason.as_str()), ("Suspect", "EccErrors"));
        assert!(health.message.starts_with("2 uncorrected memory errors"), "{}", health.message);
        history.vitals(Vitals::default(), stamp(start));
        assert_eq!(class(&history), "Suspect", "a driver that does not say it proves nothing");
    }

    #[test]
    fn rows_that_cannot_be_remapped_are_the_end_and_those_that_will_be_are_told() {
        let start = stamp(Instant::now());
        let mut history = History::default();
        history.vitals(Vitals { remap_pending: Some(true), ..Vitals::default() }, start);
        let health = history.health();
        assert!(health.healthy && health.reason == "ResetPending" && health.message.contains("drain it"), "{health:?}");
        history.vitals(Vitals { remap_failed: Some(true), ..Vitals::default() }, start);
        assert_eq!((class(&history).as_str(), history.health().reason.as_str()), ("NeedsReset", "RowRemapFailed"));
        history.cleared(&whole_seconds(Timestamp::MAX));
        history.was_reset();
        assert_eq!(history.health().reason, "RowRemapFailed", "as long as NVML says it");
        history.vitals(Vitals::default(), start);
        assert!(history.health().healthy);
    }

    #[test]
    fn what_is_of_one_instance_takes_that_one_and_ends_with_it() {
        let start = Instant::now();
        let mut history = History::default();
        history.xid(94, Some("MIG-a"), &[], stamp(start));
        assert!(history.health().healthy);
        assert_eq!(history.instances().into_keys().collect::<Vec<_>>(), ["MIG-a"]);
        history.answered(start, &["MIG-a", "MIG-b"]);
        assert_eq!(history.instances().len(), 1);
        history.answered(start, &["MIG-b"]);
        assert!(history.instances().is_empty());
        history.xid(95, Some("MIG-b"), &[], stamp(start));
        assert_eq!(class(&history), "NeedsReset", "a reset is of the whole GPU");
        assert!(history.instances().is_empty());
    }

    #[test]
    fn what_is_found_again_after_the_clock_was_set_back_does_not_end_before_it_began() {
        let start = Instant::now();
        let mut history = History::default();
        history.xid(48, None, &[], Stamp { now: start, wall: Timestamp::from_second(3_600).unwrap() });
        history.xid(79, None, &[], stamp(start + QUIET));
        let health = history.health();
        assert_eq!(health.since, health.last);
        assert!(health.message.contains("79"), "{}", health.message);
    }

    #[test]
    fn a_clock_tells_the_time_of_day() {
        let start = Instant::now();
        let clock = Clock::new(start, Timestamp::UNIX_EPOCH);
        assert_eq!(clock.stamp(start + QUIET).wall.as_second(), 60);
        assert_eq!(clock.stamp(start).wall.as_second(), 0);
    }

    /// Something that happens to a GPU, in the order in which a driver could say it.
    #[derive(Debug, Clone)]
    enum Step {
        Xid(u64, bool),
        Answer,
        Errors(u64),
        Wait(u64),
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (prop_oneof![Just(13), Just(48), Just(79), Just(94), Just(500)], any::<bool>())
                .prop_map(|(xid, instance)| Step::Xid(xid, instance)),
            Just(Step::Answer),
            (0_u64..3).prop_map(Step::Errors),
            (0_u64..300).prop_map(Step::Wait),
            Just(Step::Restart),
        ]
    }

    proptest! {
        #[test]
        fn what_needs_a_reset_never_heals_by_time_answers_or_restarts(before in proptest::collection::vec(step(), 0..12), after in proptest::collection::vec(step(), 0..30)) {
            let mut now = Instant::now();
            let mut history = History::default();
            let mut count = 0;
            for step in before.into_iter().chain([Step::Xid(79, true)]).chain(after) {
                match step {
                    Step::Xid(xid, instance) => { history.xid(xid, instance.then_some("MIG-a"), &[], stamp(now)); }
                    Step::Answer => history.answered(now, &["MIG-a"]),
                    Step::Errors(more) => { count += more; history.vitals(counted(count), stamp(now)); }
                    Step::Wait(seconds) => now += Duration::from_secs(seconds),
                    Step::Restart => history = History::remembering(history.record(false), now),
                }
                prop_assert!(history.findings.len() <= 4, "bounded");
            }
            prop_assert_eq!(class(&history), "NeedsReset");
            history.was_reset();
            prop_assert!(history.health().healthy && history.instances().is_empty());
        }
    }
}
