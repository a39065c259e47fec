use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// Returns the record of a node on which `old` serves.
fn record_while_old_serves(ready: bool) -> HandOverRecord {
    let mut record = HandOverRecord::default();
    assert_eq!(record.start_serving("old"), ServiceStart { returns_ready: false, probation: false });
    record.set_ready("old", ready);
    record
}

/// Returns the record after `old` has handed over to `new`. The agent `new` serves on probation.
fn record_while_new_serves() -> HandOverRecord {
    let mut record = record_while_old_serves(true);
    record.hand_over_to("new");
    assert!(record.start_serving("new").probation);
    record
}

#[test]
fn a_new_agent_requests_a_hand_over_and_the_old_agent_grants_it_at_once() {
    let record = record_while_old_serves(true);
    assert_eq!(record.decide_standby("new", MINUTE), StandbyDecision { requests_hand_over: true, ready: false });
    assert!(record.should_hand_over("old", "new", Duration::ZERO, false));
    assert!(!record.should_hand_over("old", "new", MINUTE, true), "no hand-over during a change of a GPU");
}

#[test]
fn after_a_hand_over_the_old_agent_stays_ready_and_requests_no_hand_over() {
    let mut record = record_while_old_serves(true);
    record.hand_over_to("new");
    assert_eq!(record.decide_standby("old", SECOND), StandbyDecision { requests_hand_over: false, ready: true });
    assert_eq!(record.decide_standby("new", SECOND), StandbyDecision { requests_hand_over: true, ready: false });
    let record = record_while_new_serves();
    assert_eq!(record.decide_standby("old", SECOND), StandbyDecision { requests_hand_over: false, ready: true });
    assert!(!record.should_hand_over("new", "old", 60 * MINUTE, false));
    let mut unready = record_while_old_serves(false);
    unready.hand_over_to("new");
    assert_eq!(unready.decide_standby("old", SECOND), StandbyDecision { requests_hand_over: false, ready: false });
}

#[test]
fn only_an_agent_that_follows_a_ready_agent_is_on_probation() {
    assert!(record_while_new_serves().is_on_probation());
    let mut record = record_while_old_serves(false);
    record.hand_over_to("new");
    assert!(!record.start_serving("new").probation);
    // The old agent was killed and therefore did not hand over.
    assert!(record_while_old_serves(true).start_serving("new").probation);
    // A restart does not end the probation, but readiness does.
    let mut record = record_while_new_serves();
    assert!(record.start_serving("new").probation);
    record.set_ready("new", true);
    assert!(!record.start_serving("new").probation);
}

#[test]
fn an_agent_on_probation_fails_only_if_another_agent_waits() {
    let judge = |ready, seconds, awaited| judge_probation(ready, seconds * SECOND, MINUTE, awaited);
    assert_eq!(judge(false, 59, true), Probation::Open);
    assert_eq!(judge(false, 60, true), Probation::Failed);
    assert_eq!(judge(false, 600, false), Probation::Open);
    assert_eq!(judge(true, 600, true), Probation::Passed);
}

#[test]
fn each_failure_of_the_new_agent_delays_the_next_hand_over_longer() {
    let mut record = record_while_new_serves();
    for minutes in [1, 2, 4, 8, 16, 32, 60, 60] {
        assert_eq!(record.start_serving("old"), ServiceStart { returns_ready: true, probation: false });
        assert_eq!(record.decide_standby("new", MINUTE), StandbyDecision { requests_hand_over: true, ready: false });
        let delay = minutes * MINUTE;
        assert!(!record.should_hand_over("old", "new", delay.saturating_sub(SECOND), false), "{minutes} min");
        assert!(record.should_hand_over("old", "new", delay, false), "{minutes} min");
        assert!(record.should_hand_over("old", "third", Duration::ZERO, false), "another agent has not failed");
        record.hand_over_to("new");
        assert!(record.start_serving("new").probation);
    }
}

#[test]
fn a_successor_that_never_takes_the_lock_has_failed() {
    let mut record = record_while_old_serves(true);
    record.hand_over_to("new");
    assert!(record.start_serving("old").returns_ready);
    assert!(!record.should_hand_over("old", "new", 59 * SECOND, false));
}

#[test]
fn a_standby_leaves_a_free_lock_to_the_requesting_agent_for_a_limited_time() {
    assert!(may_take_lock(false, Duration::ZERO));
    assert!(!may_take_lock(true, CLAIM_TIMEOUT.saturating_sub(SECOND)));
    assert!(may_take_lock(true, CLAIM_TIMEOUT));
}

#[test]
fn a_new_agent_becomes_ready_beside_an_agent_that_does_not_support_hand_overs() {
    let record = HandOverRecord::default();
    assert_eq!(record.decide_standby("new", SECOND), StandbyDecision { requests_hand_over: true, ready: false });
    assert_eq!(record.decide_standby("new", CLAIM_TIMEOUT), StandbyDecision { requests_hand_over: true, ready: true });
}

#[test]
fn a_saved_record_is_read_back_and_fields_may_be_missing() {
    let record = record_while_new_serves();
    assert_eq!(serde_json::from_slice::<HandOverRecord>(&serde_json::to_vec(&record).unwrap()).unwrap(), record);
    assert!(serde_json::from_str::<HandOverRecord>(r#"{"later": 1}"#).unwrap().is_empty());
}

proptest! {
    /// The order in which agents take the lock does not matter. At most one of two agents requests
    /// a hand-over, the record remains small, and no agent hands over to an older agent.
    #[test]
    fn two_agents_never_request_hand_overs_from_each_other(takers in prop::collection::vec((0..20_u8, any::<bool>()), 1..100)) {
        let mut record = HandOverRecord::default();
        for (taker, ready) in takers {
            let taker = taker.to_string();
            record.start_serving(&taker);
            record.set_ready(&taker, ready);
            prop_assert!(record.agents.len() <= MAX_KNOWN_AGENTS);
            for other in record.agents.iter().map(|known_agent| known_agent.id.clone()).filter(|other| *other != taker) {
                let there = record.should_hand_over(&taker, &other, MAX_RETRY_DELAY, false);
                let mut next = record.clone();
                next.start_serving(&other);
                let back = next.should_hand_over(&other, &taker, MAX_RETRY_DELAY, false);
                prop_assert!(!(there && back), "{taker} and {other} request each other: {record:?}");
                prop_assert_eq!(there, record.decide_standby(&other, MINUTE).requests_hand_over && !record.probation);
            }
        }
    }
}
