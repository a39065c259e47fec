//! Determines the health of a GPU and its MIG instances from recorded faults. Pure: the time is an
//! argument.
//!
//! ```text
//!  event                          class          ends with
//!  XID of a program ────────────▶ (reported) ──▶ nothing to end
//!  other or unknown XID, ───────▶ Suspect ─────▶ a quiet period, then a full answer of NVML;
//!  uncorrected ECC errors                        or proof of a reset; or an administrator
//!  XID that needs a reset ──────▶ NeedsReset ──▶ proof of a reset; or an administrator
//!  NVML does not answer ────────▶ Lost ────────▶ NVML answers: the earlier class applies; if
//!                                                only a reset restores the GPU, this is proof
//! ```
//!
//! Neither time alone nor a restart of the agent ends a recorded fault, because the checkpoint
//! keeps these faults. A problem that NVML reports, such as a failed remapping, is not recorded and
//! ends when NVML no longer reports it.
//!
//! Each of these is proof of a reset:
//! - The node was rebooted.
//! - NVML answers again for a GPU that fell off the bus or was missing, or after the driver was
//!   unloaded.
//! - The count of uncorrected memory errors decreased.
//! - The driver requested a reset and no longer requests one.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_api::cordon::whole_seconds;
use cleave_api::gpunode::Health;
use cleave_gpu::nvml::{GpuVitals, NvmlError, RecoveryAction};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};

use crate::clock::EventTime;
use crate::gpu::xid::{FaultClass, classify_xid, describe_xid};

/// Default quiet period: the time without further errors after which a suspect GPU can become
/// healthy again. `--suspect-quiet` overrides this value.
///
/// A GPU that fails under any load probably fails again within this time. A longer period would
/// only keep the GPU out of service longer after a single error.
pub const DEFAULT_QUIET_PERIOD: Duration = Duration::from_secs(60);

/// Values of [`cleave_api::gpunode::Health::reason`] for GPUs.
pub mod reason {
    /// The GPU is suspect because of an XID.
    pub const XID_ERROR: &str = "XidError";
    /// The GPU is suspect because of uncorrected memory errors.
    pub const ECC_ERRORS: &str = "EccErrors";
    /// NVML reports the GPU as lost, or a call for the GPU fails.
    pub const GPU_LOST: &str = "GpuLost";
    /// NVML no longer lists the GPU.
    pub const GPU_MISSING: &str = cleave_api::names::HEALTH_GPU_MISSING;
    /// NVML did not answer for the GPU in time.
    pub const GPU_UNREACHABLE: &str = "GpuUnreachable";
    /// The driver does not answer for any GPU.
    pub const DRIVER_UNAVAILABLE: &str = "DriverUnavailable";
    /// The GPU needs a reset.
    pub const RESET_REQUIRED: &str = "ResetRequired";
    /// The GPU is quiesced for a reset or for a change of the driver.
    pub const QUIESCED: &str = "Quiesced";
    /// The GPU failed to remap a row of its memory.
    pub const ROW_REMAP_FAILED: &str = "RowRemapFailed";
    /// The GPU is healthy. A reset would complete a pending memory repair.
    pub const RESET_PENDING: &str = "ResetPending";

    /// Returns the reason for a GPU that NVML could not query.
    pub const fn for_error(error: &super::NvmlError) -> &'static str {
        use super::NvmlError;
        match error {
            NvmlError::Hung(_) => GPU_UNREACHABLE,
            NvmlError::NoLibrary(_) | NvmlError::NoDriver => DRIVER_UNAVAILABLE,
            _ => GPU_LOST,
        }
    }
}

/// Cause of a recorded fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FaultCause {
    /// An error with this XID.
    Xid(u64),
    /// New uncorrected memory errors, with their number.
    EccErrors(u64),
}

/// A fault that has not ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedFault {
    /// Class of the fault. The class determines what ends the fault.
    pub class: FaultClass,
    /// Cause of the last error of this fault.
    pub cause: FaultCause,
    /// UUID of the only MIG device that the fault affects. `None` if the fault affects the whole
    /// GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Time of the first error.
    pub since: Time,
    /// Time of the last error.
    pub last: Time,
}

/// The part of a GPU's history that the checkpoint keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthRecord {
    /// Faults that have not ended.
    #[serde(default, rename = "findings", skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<RecordedFault>,
    /// The driver's count of uncorrected memory errors since the last reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected: Option<u64>,
    /// Time at which the driver first requested a reset. `None` if the driver requests no reset
    /// now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset_wanted: Option<Time>,
    /// Whether the GPU was lost and only a reset can restore it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// Time at which NVML stopped listing the GPU, also if that was before a reboot. `None` if NVML
    /// lists the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_since: Option<Time>,
}

impl HealthRecord {
    /// Returns whether the record contains nothing that the checkpoint must keep.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The faults of one GPU and its last error counters, from which its health follows.
#[derive(Debug, Clone)]
pub struct HealthHistory {
    /// Time without errors after which a suspect GPU can become healthy.
    pub quiet: Duration,
    faults: Vec<TrackedFault>,
    uncorrected: Option<u64>,
    reset_wanted: Option<Time>,
    remap_failed: Option<Time>,
    vitals: GpuVitals,
    /// Whether the GPU was lost before this process started, and NVML has not yet answered for it.
    was_lost: bool,
}

impl Default for HealthHistory {
    /// Returns the history of a GPU without recorded faults.
    fn default() -> Self {
        Self {
            quiet: DEFAULT_QUIET_PERIOD,
            faults: Vec::new(),
            uncorrected: None,
            reset_wanted: None,
            remap_failed: None,
            vitals: GpuVitals::default(),
            was_lost: false,
        }
    }
}

/// A fault, and the start of its quiet period.
#[derive(Debug, Clone)]
struct TrackedFault {
    recorded: RecordedFault,
    /// Start of the quiet period. A restored fault has the start of this process.
    quiet: Instant,
}

impl HealthHistory {
    /// Restores the record of an earlier agent in the same boot. Quiet periods restart, because no
    /// agent observed errors while the agent was down.
    pub fn restore(record: HealthRecord, now: Instant) -> Self {
        let HealthRecord { faults, uncorrected, reset_wanted, lost, missing_since: _ } = record;
        let faults = faults.into_iter().map(|recorded| TrackedFault { recorded, quiet: now }).collect();
        Self { faults, uncorrected, reset_wanted, was_lost: lost, ..Self::default() }
    }

    /// Returns the record for the checkpoint. `lost` states whether the GPU is lost now and only a
    /// reset can restore it. `missing_since` is the time at which NVML stopped listing the GPU.
    pub fn to_record(&self, lost: bool, missing_since: Option<Time>) -> HealthRecord {
        HealthRecord {
            faults: self.faults.iter().map(|fault| fault.recorded.clone()).collect(),
            uncorrected: self.uncorrected.filter(|count| *count > 0),
            reset_wanted: self.reset_wanted.clone(),
            lost: lost || self.was_lost,
            missing_since,
        }
    }

    /// Records an XID and returns its class. `instance` is the UUID of the only MIG device that the
    /// XID affects, if any.
    pub fn record_xid(&mut self, xid: u64, instance: Option<&str>, ignored: &[u64], at: EventTime) -> FaultClass {
        let class = classify_xid(xid, ignored);
        if class != FaultClass::Application {
            self.record_fault(class, FaultCause::Xid(xid), instance, at);
        }
        class
    }

    /// Records NVML's full answer to a query that the agent sent at `requested_at`. `devices`
    /// contains the UUIDs of the GPU's MIG devices.
    pub fn record_answer(&mut self, requested_at: Instant, devices: &[&str]) {
        if std::mem::take(&mut self.was_lost) {
            self.record_reset();
        }
        let long = self.quiet;
        self.faults.retain(|TrackedFault { recorded, quiet }| {
            let quiet = requested_at.checked_duration_since(*quiet).is_some_and(|quiet| quiet >= long);
            // A suspect fault of an instance also ends when the instance no longer exists.
            let gone = recorded.instance.as_deref().is_some_and(|instance| !devices.contains(&instance));
            recorded.class != FaultClass::Suspect || !(quiet || gone)
        });
    }

    /// Records the error counters and recovery action that the driver reports.
    pub fn record_vitals(&mut self, vitals: GpuVitals, at: EventTime) {
        if let Some(count) = vitals.uncorrected {
            match self.uncorrected.replace(count) {
                Some(before) if count < before => self.record_reset(),
                Some(before) if count > before => {
                    self.record_fault(FaultClass::Suspect, FaultCause::EccErrors(count - before), None, at);
                }
                _ => {}
            }
        }
        match vitals.recovery {
            Some(RecoveryAction::Reset | RecoveryAction::Reboot) => {
                self.reset_wanted.get_or_insert_with(|| whole_seconds(at.wall));
            }
            Some(RecoveryAction::Nothing) if self.reset_wanted.is_some() => self.record_reset(),
            Some(RecoveryAction::Nothing | RecoveryAction::Drain) | None => {}
        }
        if vitals.remap_failed == Some(true) {
            self.remap_failed.get_or_insert_with(|| whole_seconds(at.wall));
        } else {
            self.remap_failed = None;
        }
        self.vitals = vitals;
    }

    /// Records proof of a reset, which ends all faults.
    pub fn record_reset(&mut self) {
        self.faults.clear();
        self.reset_wanted = None;
    }

    /// Clears the faults up to `until`, because an administrator requested it.
    pub fn clear_faults(&mut self, until: &Time) {
        self.faults.retain(|fault| fault.recorded.last > *until);
    }

    fn record_fault(&mut self, class: FaultClass, cause: FaultCause, instance: Option<&str>, at: EventTime) {
        // A fault that needs a reset affects all instances, because only the whole GPU can be
        // reset.
        let instance = instance.filter(|_| class == FaultClass::Suspect);
        let time = whole_seconds(at.wall);
        let same =
            |fault: &&mut TrackedFault| (fault.recorded.class, fault.recorded.instance.as_deref()) == (class, instance);
        match self.faults.iter_mut().find(same) {
            Some(fault) => {
                // The time of the last error must not decrease, even if the clock was set back.
                let last = time.max(fault.recorded.last.clone());
                (fault.recorded.cause, fault.recorded.last, fault.quiet) = (cause, last, at.now);
            }
            None => {
                let instance = instance.map(str::to_owned);
                let recorded = RecordedFault { class, cause, instance, since: time.clone(), last: time };
                self.faults.push(TrackedFault { recorded, quiet: at.now });
            }
        }
    }

    /// Returns the health of the GPU according to its history.
    pub fn health(&self) -> Health {
        if self.was_lost {
            return Health {
                healthy: false,
                class: FaultClass::Lost.as_str().into(),
                reason: reason::GPU_LOST.into(),
                message: "the GPU was lost, and NVML has not answered for the GPU since then".into(),
                ..Health::default()
            };
        }
        let worst = self.faults.iter().map(|fault| &fault.recorded).filter(|recorded| recorded.instance.is_none());
        let worst = worst.max_by_key(|recorded| recorded.class);
        if let Some(since) = &self.remap_failed {
            let message = "a row of the GPU's memory could not be remapped: replace the GPU".to_owned();
            return reset_needed_health(reason::ROW_REMAP_FAILED, message, since);
        }
        if let Some(recorded) = worst.filter(|recorded| recorded.class == FaultClass::NeedsReset) {
            return self.fault_health(recorded);
        }
        if let Some(since) = &self.reset_wanted {
            let action = match self.vitals.recovery {
                Some(RecoveryAction::Reboot) => "a reboot of the node",
                _ => "a reset of the GPU",
            };
            return reset_needed_health(
                reason::RESET_REQUIRED,
                format!("the driver requests {action}: drain the GPU first"),
                since,
            );
        }
        match worst {
            Some(recorded) => self.fault_health(recorded),
            None if self.vitals.remap_pending == Some(true) || self.vitals.recovery == Some(RecoveryAction::Drain) => {
                Health {
                    healthy: true,
                    reason: reason::RESET_PENDING.into(),
                    message: "the GPU needs a reset to repair memory rows: drain it, then reset it when convenient"
                        .into(),
                    ..Health::default()
                }
            }
            None => Health { healthy: true, ..Health::default() },
        }
    }

    /// Returns the health of the MIG devices that have faults of their own, by UUID.
    pub fn instance_health(&self) -> BTreeMap<String, Health> {
        let faults = self.faults.iter().map(|fault| &fault.recorded);
        faults.filter_map(|recorded| Some((recorded.instance.clone()?, self.fault_health(recorded)))).collect()
    }

    /// Returns the health that follows from a recorded fault.
    fn fault_health(&self, RecordedFault { class, cause, instance: _, since, last }: &RecordedFault) -> Health {
        let what = match cause {
            FaultCause::Xid(xid) => describe_xid(*xid),
            FaultCause::EccErrors(1) => "an uncorrected memory error".to_owned(),
            FaultCause::EccErrors(count) => format!("{count} uncorrected memory errors"),
        };
        let (reason, until) = match (class, cause) {
            (FaultClass::NeedsReset, _) => {
                (reason::RESET_REQUIRED, "the GPU needs a reset: drain it, then reset it or reboot the node".to_owned())
            }
            (_, cause) => {
                let reason = if matches!(cause, FaultCause::Xid(_)) { reason::XID_ERROR } else { reason::ECC_ERRORS };
                (
                    reason,
                    format!(
                        "the GPU is healthy again once NVML answers after {} s without another error",
                        self.quiet.as_secs()
                    ),
                )
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

/// Returns the health of a GPU that needs a reset for as long as NVML reports this reason.
fn reset_needed_health(reason: &str, message: String, since: &Time) -> Health {
    Health {
        healthy: false,
        class: FaultClass::NeedsReset.as_str().into(),
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

    fn event_time(now: Instant) -> EventTime {
        EventTime { now, wall: Timestamp::UNIX_EPOCH }
    }

    fn health_class(history: &HealthHistory) -> String {
        history.health().class
    }

    fn vitals_with_errors(uncorrected: u64) -> GpuVitals {
        GpuVitals { uncorrected: Some(uncorrected), ..GpuVitals::default() }
    }

    fn vitals_with_recovery(recovery: RecoveryAction) -> GpuVitals {
        GpuVitals { recovery: Some(recovery), ..GpuVitals::default() }
    }

    #[test]
    fn a_suspect_gpu_needs_both_a_quiet_period_and_an_answer_to_be_healthy() {
        let start = Instant::now();
        let mut history = HealthHistory::default();
        assert_eq!(history.record_xid(999, None, &[], event_time(start)), FaultClass::Suspect);
        history.record_answer(start + DEFAULT_QUIET_PERIOD.saturating_sub(Duration::from_millis(1)), &[]);
        assert_eq!(health_class(&history), "Suspect", "the answer came too early");
        history.record_xid(999, None, &[], event_time(start + DEFAULT_QUIET_PERIOD / 2));
        history.record_answer(start + DEFAULT_QUIET_PERIOD, &[]);
        assert_eq!(health_class(&history), "Suspect", "the second XID restarts the quiet period");
        // Time alone does not end a fault: NVML must also answer.
        history.record_answer(start + DEFAULT_QUIET_PERIOD / 2 + DEFAULT_QUIET_PERIOD, &[]);
        assert!(history.health().healthy);
    }

    #[test]
    fn a_gpu_that_needs_a_reset_is_unhealthy_until_there_is_proof_of_a_reset() {
        let (start, later) = (Instant::now(), Instant::now() + 1000 * DEFAULT_QUIET_PERIOD);
        let faulty = || {
            let mut history = HealthHistory::default();
            history.record_vitals(vitals_with_errors(3), event_time(start));
            history.record_xid(48, None, &[], event_time(start));
            history.record_xid(999, None, &[], event_time(start));
            history
        };
        let mut history = faulty();
        history.record_answer(later, &[]);
        history.record_vitals(vitals_with_errors(3), event_time(later));
        history.record_vitals(vitals_with_recovery(RecoveryAction::Nothing), event_time(later));
        assert_eq!(health_class(&history), "NeedsReset");
        assert!(history.health().message.contains("XID 48 (double-bit ECC error)"));

        let mut counters = history.clone();
        counters.record_vitals(vitals_with_errors(0), event_time(later));
        assert!(counters.health().healthy, "the counters of the reset GPU start at 0 again");
        let mut driver = history.clone();
        driver.record_vitals(vitals_with_recovery(RecoveryAction::Reset), event_time(later));
        assert_eq!(health_class(&driver), "NeedsReset");
        driver.record_vitals(vitals_with_recovery(RecoveryAction::Nothing), event_time(later));
        assert!(driver.health().healthy, "the driver no longer requests a reset");
        let mut lost = HealthHistory::restore(history.to_record(true, None), later);
        assert_eq!(health_class(&lost), "Lost");
        lost.record_answer(later, &[]);
        assert!(lost.health().healthy, "lost and back");
        let mut person = history.clone();
        person.clear_faults(&whole_seconds(Timestamp::from_second(-1).unwrap()));
        assert_eq!(health_class(&person), "NeedsReset", "an earlier fault was cleared");
        person.clear_faults(&whole_seconds(Timestamp::UNIX_EPOCH));
        assert!(person.health().healthy, "an administrator cleared it");
    }

    #[test]
    fn a_restart_of_the_agent_ends_no_fault_and_restarts_the_quiet_period() {
        let start = Instant::now();
        for xid in [79, 999] {
            let mut before = HealthHistory::default();
            before.record_xid(xid, None, &[], event_time(start));
            let json = serde_json::to_string(&before.to_record(false, None)).unwrap();
            let mut after = HealthHistory::restore(serde_json::from_str(&json).unwrap(), start + DEFAULT_QUIET_PERIOD);
            assert_eq!(after.health(), before.health());
            after.record_answer(start + DEFAULT_QUIET_PERIOD, &[]);
            assert!(!after.health().healthy, "XID {xid}");
        }
    }

    #[test]
    fn only_new_memory_errors_count_even_across_a_restart() {
        let start = Instant::now();
        let mut history = HealthHistory::default();
        history.record_vitals(vitals_with_errors(7), event_time(start));
        assert!(history.health().healthy, "those are old errors");
        let mut history = HealthHistory::restore(history.to_record(false, None), start);
        history.record_vitals(vitals_with_errors(9), event_time(start));
        let health = history.health();
        assert_eq!((health.class.as_str(), health.reason.as_str()), ("Suspect", "EccErrors"));
        assert!(health.message.starts_with("2 uncorrected memory errors"), "{}", health.message);
        history.record_vitals(GpuVitals::default(), event_time(start));
        assert_eq!(health_class(&history), "Suspect", "no counter is no proof");
    }

    #[test]
    fn a_failed_remapping_needs_a_reset_and_a_pending_remapping_is_reported() {
        let start = event_time(Instant::now());
        let mut history = HealthHistory::default();
        history.record_vitals(GpuVitals { remap_pending: Some(true), ..GpuVitals::default() }, start);
        let health = history.health();
        assert!(
            health.healthy && health.reason == "ResetPending" && health.message.contains("drain it, then reset it"),
            "{health:?}"
        );
        history.record_vitals(GpuVitals { remap_failed: Some(true), ..GpuVitals::default() }, start);
        assert_eq!(
            (health_class(&history).as_str(), history.health().reason.as_str()),
            ("NeedsReset", "RowRemapFailed")
        );
        history.clear_faults(&whole_seconds(Timestamp::MAX));
        history.record_reset();
        assert_eq!(history.health().reason, "RowRemapFailed", "while NVML reports it");
        history.record_vitals(GpuVitals::default(), start);
        assert!(history.health().healthy);
    }

    #[test]
    fn a_fault_of_a_mig_instance_affects_only_that_instance_and_ends_with_it() {
        let start = Instant::now();
        let mut history = HealthHistory::default();
        history.record_xid(94, Some("MIG-a"), &[], event_time(start));
        assert!(history.health().healthy);
        assert_eq!(history.instance_health().into_keys().collect::<Vec<_>>(), ["MIG-a"]);
        history.record_answer(start, &["MIG-a", "MIG-b"]);
        assert_eq!(history.instance_health().len(), 1);
        history.record_answer(start, &["MIG-b"]);
        assert!(history.instance_health().is_empty());
        history.record_xid(95, Some("MIG-b"), &[], event_time(start));
        assert_eq!(health_class(&history), "NeedsReset", "a reset affects the whole GPU");
        assert!(history.instance_health().is_empty());
    }

    #[test]
    fn the_last_error_of_a_fault_is_not_before_the_first_if_the_clock_was_set_back() {
        let start = Instant::now();
        let mut history = HealthHistory::default();
        history.record_xid(48, None, &[], EventTime { now: start, wall: Timestamp::from_second(3_600).unwrap() });
        history.record_xid(79, None, &[], event_time(start + DEFAULT_QUIET_PERIOD));
        let health = history.health();
        assert_eq!(health.since, health.last);
        assert!(health.message.contains("79"), "{}", health.message);
    }

    #[test]
    fn a_clock_converts_instants_to_the_time_of_day() {
        let start = Instant::now();
        let clock = Clock::new(start, Timestamp::UNIX_EPOCH);
        assert_eq!(clock.event_time(start + DEFAULT_QUIET_PERIOD).wall.as_second(), 60);
        assert_eq!(clock.event_time(start).wall.as_second(), 0);
    }

    /// An event that can affect the health of a GPU.
    #[derive(Debug, Clone)]
    enum HealthEvent {
        Xid(u64, bool),
        Answer,
        Errors(u64),
        Wait(u64),
        Restart,
    }

    fn health_event() -> impl Strategy<Value = HealthEvent> {
        prop_oneof![
            (prop_oneof![Just(13), Just(48), Just(79), Just(94), Just(500)], any::<bool>())
                .prop_map(|(xid, instance)| HealthEvent::Xid(xid, instance)),
            Just(HealthEvent::Answer),
            (0_u64..3).prop_map(HealthEvent::Errors),
            (0_u64..300).prop_map(HealthEvent::Wait),
            Just(HealthEvent::Restart),
        ]
    }

    proptest! {
        #[test]
        fn time_answers_and_restarts_never_end_the_need_for_a_reset(before in proptest::collection::vec(health_event(), 0..12), after in proptest::collection::vec(health_event(), 0..30)) {
            let mut now = Instant::now();
            let mut history = HealthHistory::default();
            let mut count = 0;
            for step in before.into_iter().chain([HealthEvent::Xid(79, true)]).chain(after) {
                match step {
                    HealthEvent::Xid(xid, instance) => { history.record_xid(xid, instance.then_some("MIG-a"), &[], event_time(now)); }
                    HealthEvent::Answer => history.record_answer(now, &["MIG-a"]),
                    HealthEvent::Errors(more) => { count += more; history.record_vitals(vitals_with_errors(count), event_time(now)); }
                    HealthEvent::Wait(seconds) => now += Duration::from_secs(seconds),
                    HealthEvent::Restart => history = HealthHistory::restore(history.to_record(false, None), now),
                }
                prop_assert!(history.faults.len() <= 4, "bounded");
            }
            prop_assert_eq!(health_class(&history), "NeedsReset");
            history.record_reset();
            prop_assert!(history.health().healthy && history.instance_health().is_empty());
        }
    }
}
