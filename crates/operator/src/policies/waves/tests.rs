//! Tests which nodes change in each situation.
#![allow(clippy::needless_pass_by_value, reason = "each function takes a view and returns a changed one")]

use super::*;
use crate::policies::validate::MaxUnavailable;

const RULES: RolloutRules =
    RolloutRules { max_unavailable: MaxUnavailable::Nodes(2), paused: false, on_failure: OnFailure::Stop };

/// No node begins to change.
const NONE: [usize; 0] = [];

/// Returns a node that has changed and serves the newest partition.
fn updated() -> NodeView {
    NodeView {
        newest: true,
        state: State::Serving,
        failing: false,
        between: false,
        serves: true,
        steady: true,
        in_use: false,
        agent_ready: true,
        affected: true,
        may_be_canary: false,
        cordoned: false,
        withdrawn: false,
        excused: false,
    }
}

/// Returns a node that served the newest partition before the change.
fn kept() -> NodeView {
    NodeView { affected: false, ..updated() }
}

/// Returns an unused node that serves an older partition.
fn old() -> NodeView {
    NodeView { newest: false, ..updated() }
}

fn with_state(state: State, view: NodeView) -> NodeView {
    NodeView { serves: false, state, ..view }
}

fn changing(view: NodeView) -> NodeView {
    with_state(State::Changing, view)
}

/// Returns an unused node that has no older partition either.
fn between() -> NodeView {
    NodeView { between: true, ..changing(old()) }
}

fn waiting(view: NodeView) -> NodeView {
    with_state(State::WaitingForPods, view)
}

fn failed(view: NodeView) -> NodeView {
    with_state(State::Failed("why".to_owned()), view)
}

fn in_use(view: NodeView) -> NodeView {
    NodeView { in_use: true, ..view }
}

fn excused(view: NodeView) -> NodeView {
    NodeView { excused: true, ..view }
}

fn cordoned(view: NodeView) -> NodeView {
    NodeView { cordoned: true, ..view }
}

fn decide_for(rules: RolloutRules, views: &[NodeView]) -> RolloutProgress {
    let nodes = views.iter().enumerate().map(|(at, view)| (format!("n{at}"), view.clone())).collect();
    decide(rules, &nodes)
}

/// Returns the numbers of the nodes that begin to change.
fn begins(rules: RolloutRules, views: &[NodeView]) -> Vec<usize> {
    let progress = decide_for(rules, views);
    let old = views.iter().enumerate().filter(|(_, view)| !view.newest);
    old.map(|(at, _)| at).filter(|at| !progress.pending.contains(&format!("n{at}"))).collect()
}

#[test]
fn the_first_wave_is_one_node() {
    assert_eq!(begins(RULES, &[old(), old(), old(), old()]), [0]);
    assert_eq!(begins(RULES, &[changing(updated()), old(), old()]), NONE, "the canary has not finished");
    assert_eq!(decide_for(RULES, &[old(), old()]).phase, Phase::RollingOut);
}

#[test]
fn a_node_that_has_served_only_for_a_moment_proves_nothing() {
    let young = || NodeView { steady: false, ..updated() };
    assert_eq!(begins(RULES, &[young(), old(), old(), failed(old())]), NONE, "the canary may still fail");
    assert_eq!(begins(RULES, &[young(), updated(), old(), old()]), [2, 3]);
    let kept = NodeView { affected: false, ..young() };
    assert_eq!(begins(RULES, &[kept, old(), old()]), [1], "it is no canary");
    let withdrawn = |view: NodeView| NodeView { withdrawn: true, ..cordoned(excused(view)) };
    assert_eq!(begins(RULES, &[withdrawn(young()), old(), old()]), [1], "a person has cordoned the canary");
    assert_eq!(begins(RULES, &[withdrawn(changing(updated())), cordoned(old()), cordoned(old())]), [1]);
}

#[test]
fn cordoned_and_failed_nodes_change_one_at_a_time_until_one_serves() {
    let young = || NodeView { steady: false, ..updated() };
    for unfit in [excused, cordoned, |view| excused(failed(view))] {
        assert_eq!(begins(RULES, &[unfit(old()), unfit(old()), unfit(old())]), [0]);
        for canary in [changing(updated()), young(), excused(failed(updated())), with_state(State::Serving, updated())]
        {
            assert_eq!(begins(RULES, &[unfit(canary.clone()), unfit(old()), unfit(old())]), NONE, "{canary:?}");
        }
        assert_eq!(begins(RULES, &[unfit(old()), old()]), [1], "a node that can serve is the canary");
    }
    let stuck = cordoned(with_state(State::Serving, updated()));
    assert_eq!(
        begins(RULES, &[stuck.clone(), cordoned(old()), old()]),
        [2],
        "a node that can serve replaces the canary"
    );
    let progress = decide_for(RULES, &[stuck, cordoned(old())]);
    assert_eq!((progress.phase, progress.cordoned), (Phase::RollingOut, BTreeSet::from(["n0".to_owned()])));
}

#[test]
fn a_change_is_complete_after_the_last_node_has_served_for_some_time() {
    let young = || NodeView { steady: false, ..updated() };
    let progress = decide_for(RULES, &[updated(), young()]);
    assert_eq!((progress.phase, progress.updated), (Phase::RollingOut, 2));
    assert_eq!(progress.unsteady, BTreeSet::from(["n1".to_owned()]));
    let kept = NodeView { affected: false, ..young() };
    for last in [updated(), kept, cordoned(with_state(State::Serving, young()))] {
        assert_eq!(decide_for(RULES, &[updated(), last.clone()]).phase, Phase::Complete, "{last:?}");
    }
}

#[test]
fn a_node_that_may_be_the_canary_of_an_unknown_change_must_serve_for_some_time() {
    let kept = || NodeView { affected: false, may_be_canary: true, ..updated() };
    let young = NodeView { steady: false, ..kept() };
    assert_eq!(begins(RULES, &[young.clone(), old(), old()]), NONE);
    assert_eq!(decide_for(RULES, &[young, old()]).unsteady, BTreeSet::from(["n0".to_owned()]));
    assert_eq!(begins(RULES, &[kept(), old(), old()]), [1], "it proves nothing, because the change is unknown");
}

#[test]
fn nodes_that_the_change_does_not_affect_prove_only_repairs() {
    assert_eq!(begins(RULES, &[kept(), old(), old(), old()]), [1], "the canary");
    assert_eq!(begins(RULES, &[kept(), changing(updated()), old(), old()]), NONE);
    assert_eq!(begins(RULES, &[kept(), updated(), old(), old()]), [2, 3]);
    assert_eq!(begins(RULES, &[kept(), failed(old()), between(), old(), old()]), [1, 2]);
}

#[test]
fn after_the_canary_the_limit_applies() {
    assert_eq!(begins(RULES, &[updated(), old(), old(), old()]), [1, 2]);
    assert_eq!(begins(RULES, &[updated(), changing(updated()), old(), old()]), [2]);
    assert_eq!(begins(RULES, &[updated(), changing(updated()), changing(updated()), old()]), NONE);
    let all = RolloutRules { max_unavailable: MaxUnavailable::Percent(100), ..RULES };
    assert_eq!(begins(all, &[updated(), old(), old(), old()]), [1, 2, 3]);
    let quarter = RolloutRules { max_unavailable: MaxUnavailable::Percent(25), ..RULES };
    assert_eq!(begins(quarter, &[updated(), old(), old(), old(), old()]), [1, 2], "25% of 5 is rounded up");
}

#[test]
fn unused_nodes_change_first_and_do_not_wait_for_pods() {
    assert_eq!(begins(RULES, &[in_use(old()), old(), old()]), [1], "the canary");
    assert_eq!(begins(RULES, &[in_use(old()), in_use(old())]), [0], "no node is unused");
    let canary_waits = [waiting(updated()), in_use(old()), in_use(old())];
    assert_eq!(begins(RULES, &canary_waits), NONE, "one canary at a time");
    assert_eq!(begins(RULES, &[waiting(updated()), in_use(old()), old()]), [2], "a node became unused");
    let waits = [updated(), waiting(updated()), waiting(updated()), in_use(old()), old()];
    assert_eq!(begins(RULES, &waits), [4], "as many nodes wait as may, and the unused one changes");
    assert_eq!(begins(RULES, &[updated(), waiting(updated()), in_use(old()), in_use(old())]), [2]);
}

#[test]
fn a_partly_changed_node_that_waits_for_pods_is_a_canary_that_works() {
    let partly = NodeView { serves: true, ..waiting(updated()) };
    assert_eq!(begins(RULES, &[partly, old(), old(), old()]), [1, 2]);
}

#[test]
fn a_failed_node_stops_the_others() {
    let views = [failed(updated()), updated(), old()];
    let progress = decide_for(RULES, &views);
    assert_eq!((progress.phase, progress.updated), (Phase::Stopped, 1));
    assert_eq!(progress.failed, BTreeMap::from([("n0".to_owned(), "why".to_owned())]));
    assert_eq!(begins(RULES, &views), NONE);
    let onward = RolloutRules { on_failure: OnFailure::Continue, ..RULES };
    assert_eq!(begins(onward, &views), [2]);
    assert_eq!(begins(onward, &[failed(updated()), old(), old()]), [1], "still one canary at a time");
    assert_eq!(begins(RULES, &[excused(failed(updated())), updated(), old()]), [2], "it is cordoned");
    let last = decide_for(RULES, &[failed(updated()), updated()]);
    assert_eq!(last.phase, Phase::RollingOut, "no node is left to stop");
}

#[test]
fn a_young_failure_holds_the_others_back() {
    let failing = |view: NodeView| NodeView { failing: true, ..changing(view) };
    let views = [failing(updated()), updated(), old(), between(), failed(old())];
    assert_eq!(begins(RULES, &views), [4], "only repairs continue");
    assert_eq!(decide_for(RULES, &views).phase, Phase::RollingOut);
    let onward = RolloutRules { on_failure: OnFailure::Continue, ..RULES };
    assert_eq!(begins(onward, &[failing(updated()), updated(), old(), old()]), [2]);
    assert_eq!(begins(RULES, &[excused(failing(updated())), updated(), old()]), [2]);
    assert_eq!(begins(RULES, &[updated(), failing(old()), old()]), [2], "an older change fails");
}

#[test]
fn a_paused_policy_changes_no_node() {
    let paused = RolloutRules { paused: true, ..RULES };
    for views in [vec![old(), old()], vec![updated(), old()], vec![updated(), failed(old())]] {
        assert_eq!(begins(paused, &views), NONE, "{views:?}");
        assert_eq!(decide_for(paused, &views).phase, Phase::Paused);
    }
    assert_eq!(decide_for(paused, &[updated()]).phase, Phase::Complete);
}

#[test]
fn a_policy_that_is_changed_back_repairs_nodes_at_once() {
    let one = RolloutRules { max_unavailable: MaxUnavailable::Nodes(1), ..RULES };
    // n0 kept the partition to which the policy was changed back. The other nodes were already
    // being repartitioned.
    let views = [updated(), failed(old()), failed(old()), between(), between()];
    assert_eq!(begins(one, &views), [1, 2, 3, 4]);
    let also_served = [updated(), failed(old()), old(), old()];
    assert_eq!(begins(one, &also_served), [1, 2], "nodes that serve an older partition follow in waves");
    let stopped = [updated(), failed(updated()), failed(old()), between(), old()];
    assert_eq!(begins(one, &stopped), [2], "only repairs continue");
    let restarting = [updated(), changing(old()), changing(old()), old(), old()];
    assert_eq!(begins(one, &restarting), NONE, "they serve an older partition soon");
    assert_eq!(begins(RULES, &[updated(), changing(old()), old(), old()]), [2]);
}

#[test]
fn an_unproven_change_does_not_wait_for_an_older_one_that_never_finishes() {
    assert_eq!(begins(RULES, &[changing(old()), changing(old()), changing(old())]), [0]);
    assert_eq!(begins(RULES, &[failed(old()), old()]), [1], "a failed node is the last canary");
    assert_eq!(begins(RULES, &[failed(old())]), [0]);
    assert_eq!(begins(RULES, &[excused(old()), in_use(old())]), [1], "a failure of the node would reveal nothing");
}

#[test]
fn nodes_without_a_ready_agent_stay_pending() {
    let away = NodeView { agent_ready: false, ..old() };
    assert_eq!(begins(RULES, &[away.clone(), old()]), [1]);
    assert_eq!(begins(RULES, &[updated(), away]), NONE);
}

#[test]
fn excused_nodes_do_not_count_as_unavailable() {
    assert_eq!(begins(RULES, &[updated(), excused(changing(updated())), changing(updated()), old()]), [3]);
}

/// Every rollout ends, never exceeds its limit, and begins with one node.
#[test]
fn rollouts_of_any_size_end_within_their_limit() {
    for (count, limit) in (1..12).flat_map(|count| (1..6).map(move |limit| (count, limit))) {
        let rules = RolloutRules { max_unavailable: MaxUnavailable::Nodes(limit), ..RULES };
        let mut views = vec![old(); count];
        for wave in 0.. {
            let begun = begins(rules, &views);
            if decide_for(rules, &views).phase == Phase::Complete {
                break;
            }
            assert!(!begun.is_empty() && begun.len() <= limit, "wave {wave} of {count} by {limit}: {begun:?}");
            assert!(wave > 0 || begun.len() == 1, "the canary");
            for at in begun {
                views[at] = updated();
            }
        }
    }
}
