//! Tests of the tracker.
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
        (unhealthy_uuids(&tracker), health_reason(&tracker, "GPU-b")),
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
            (unhealthy_uuids(&tracker), health_reason(&tracker, "GPU-b")),
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
    // A GPU cannot be used while the driver does not answer, even if NVML answers for the GPU.
    tracker.record_answer(0, observation("GPU-a", 0), now);
    assert_eq!(unhealthy_uuids(&tracker), ["GPU-a", "GPU-b"]);
    assert_eq!(health_reason(&tracker, "GPU-a"), "DriverUnavailable");
    record_driver_answer(&mut tracker, 2, now);
    assert_eq!(
        (unhealthy_uuids(&tracker), health_reason(&tracker, "GPU-b")),
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
    assert_eq!(health_reason(&tracker, "GPU-a"), "ResetRequired", "there was no reset");
    // The driver now lists one GPU fewer. The tracker identifies the missing GPU after the calls
    // for all remaining indices have answered or failed.
    record_driver_answer(&mut tracker, 1, now);
    assert_eq!(health_reason(&tracker, "GPU-a"), "ResetRequired");
    tracker.record_answer(1, hung_gpu_answer(), now);
    tracker.record_answer(0, observation("GPU-a", 0), now);
    assert_eq!((unhealthy_uuids(&tracker).len(), health_reason(&tracker, "GPU-b")), (2, "GpuMissing".into()));
}

fn health_reason(tracker: &HardwareTracker, uuid: &str) -> String {
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
        (health_reason(&tracker, "GPU-b").as_str(), hardware.gpus["GPU-b"].health.class.as_str()),
        ("GpuLost", "Lost")
    );
    assert_eq!(hardware.gpus_by_index()[1].gpu.model, "NVIDIA H200", "still described");
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
        // A driver that hangs does not prove that a GPU is lost, and does not cancel earlier proof.
        tracker.observe(Err(NvmlError::Hung(Duration::from_secs(20))), now);
        tracker.observe(two_gpus(), now);
        assert_eq!(tracker.hardware().gpus["GPU-b"].health.healthy, heals, "{what}");
    }
}

#[test]
fn a_gpu_that_nvml_no_longer_lists_is_missing() {
    let now = Instant::now();
    let mut tracker = tracker(vec![], true);
    tracker.observe(two_gpus(), now);
    tracker.observe(inventory(vec![(0, Ok(gpu("GPU-b", 0)))]), now);
    assert_eq!(health_reason(&tracker, "GPU-a"), "GpuMissing");
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
    assert_eq!(health_reason(&after, "GPU-a"), "ResetRequired", "an agent restart is no reset");
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
fn a_lost_gpu_that_is_reset_while_no_agent_runs_is_healthy() {
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
    assert_eq!(health_reason(&tracker, "GPU-a"), "DriverUnavailable");
    assert_eq!(tracker.hardware().driver, DriverState::Missing("the NVIDIA driver is not loaded".into()));
    tracker.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0)))]), now);
    assert!(tracker.hardware().gpus["GPU-a"].health.healthy);
}

/// Returns NVML's answer after the removal of `GPU-b`.
fn without_second_gpu() -> Result<Inventory, NvmlError> {
    inventory(vec![(0, Ok(gpu("GPU-a", 0)))])
}

/// Returns a tracker that is restored from the checkpoint of the given tracker.
fn restored_tracker(before: &HardwareTracker, same_boot: bool, now: Instant) -> HardwareTracker {
    let gpus = before.hardware().gpus_by_index().into_iter().map(|known| known.gpu.clone()).collect();
    tracker(gpus, same_boot).with_health_records(before.health_records(), now)
}

#[test]
fn a_missing_gpu_remains_known_after_reboots_until_nvml_lists_it() {
    let now = Instant::now();
    for same_boot in [true, false] {
        let mut first = tracker(vec![gpu("GPU-a", 0), gpu("GPU-b", 1)], same_boot);
        first.observe(without_second_gpu(), now);
        let hardware = first.hardware();
        assert_eq!(health_reason(&first, "GPU-b"), "GpuMissing");
        assert_eq!((hardware.expected_gpus(), hardware.missing_gpus().len()), (2, 1));
        // The next agents know the missing GPU before NVML answers.
        let mut next = restored_tracker(&restored_tracker(&first, false, now), same_boot, now);
        assert_eq!(health_reason(&next, "GPU-b"), "GpuMissing");
        assert!(next.hardware().gpus["GPU-a"].health.healthy);
        next.observe(without_second_gpu(), now);
        assert_eq!((health_reason(&next, "GPU-b"), next.hardware().expected_gpus()), ("GpuMissing".into(), 2));
        next.observe(two_gpus(), now);
        assert!(unhealthy_uuids(&next).is_empty() && next.hardware().missing_gpus().is_empty());
        assert!(next.health_records().is_empty());
    }
}

#[test]
fn only_a_gpu_that_was_missing_at_the_time_of_the_request_is_forgotten() {
    let now = Instant::now();
    let at = |second| Time(Timestamp::from_second(second).unwrap());
    let mut tracker = two_gpu_tracker();
    tracker.observe(two_gpus(), now);
    assert!(!tracker.forget_gpu("GPU-b", &at(1000)), "NVML lists it");
    tracker.record_answer(1, Err(NvmlError::Lost { call: "x" }), now);
    assert!(!tracker.forget_gpu("GPU-b", &at(1000)), "NVML lists it");
    tracker.observe(two_gpus(), now);
    tracker.set_time(now, at(500).0);
    tracker.observe(without_second_gpu(), now);
    assert!(!tracker.forget_gpu("GPU-b", &at(499)), "the request is about an earlier absence");
    let mut rebooted = restored_tracker(&tracker, false, now + Duration::from_secs(100));
    for tracker in [&mut tracker, &mut rebooted] {
        assert!(tracker.forget_gpu("GPU-b", &at(500)));
        assert!(!tracker.forget_gpu("GPU-b", &at(500)));
        tracker.observe(without_second_gpu(), now);
        assert_eq!((tracker.hardware().expected_gpus(), unhealthy_uuids(tracker).len()), (1, 0));
        // When NVML lists the GPU again, it is a new GPU. The old request does not apply to a later
        // absence.
        tracker.set_time(now, at(600).0);
        tracker.observe(two_gpus(), now);
        tracker.observe(without_second_gpu(), now);
        assert!(!tracker.forget_gpu("GPU-b", &at(500)));
        assert_eq!(health_reason(tracker, "GPU-b"), "GpuMissing");
    }
}

#[test]
fn a_gpu_that_hangs_is_not_mistaken_for_a_missing_gpu_with_the_same_index() {
    let now = Instant::now();
    let mut tracker = two_gpu_tracker();
    tracker.observe(two_gpus(), now);
    // `GPU-a` is missing, and `GPU-b` has the index of `GPU-a`.
    tracker.observe(inventory(vec![(0, Ok(gpu("GPU-b", 0)))]), now);
    let mut next = restored_tracker(&tracker, false, now);
    record_driver_answer(&mut next, 1, now);
    next.record_answer(0, hung_gpu_answer(), now);
    assert_eq!(
        (health_reason(&next, "GPU-a"), health_reason(&next, "GPU-b")),
        ("GpuMissing".into(), "GpuUnreachable".into())
    );
}

#[test]
fn clearing_faults_does_not_clear_later_faults_if_the_clock_was_set_back() {
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
        assert!(last > cleared, "{last:?}: an administrator could not clear the new fault");
        assert_eq!(tracker.hardware().gpus["GPU-b"].health.last.as_ref().unwrap().0, Timestamp::UNIX_EPOCH);
        tracker.clear_faults("GPU-a", &last);
        assert!(tracker.hardware().gpus["GPU-a"].health.healthy);
    }
}

proptest! {
    #[test]
    fn events_of_one_gpu_never_change_the_health_of_another_gpu(
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
