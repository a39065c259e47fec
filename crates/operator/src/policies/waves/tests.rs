//! Tests which nodes change in each situation.
#![allow(clippy::needless_pass_by_value, reason = "each function takes a view and returns a changed one")]

use super::*;
use crate::policies::validate::MaxUnavailable;

const RULES: RolloutRules =
    RolloutRules { max_unavailable: MaxUnavailable::Nodes(2), paused: false, on_failure: OnFailure::Stop };

/// The expected result if no node begins to change.
const NO_NODES: [usize; 0] = [];

/// Returns a node that has changed and serves the newest partition.
fn updated_node() -> NodeView {
    NodeView {
        has_newest: true,
        state: NodeState::Serving,
        failing: false,
        is_between_partitions: false,
        has_serving_gpu: true,
        is_steady: true,
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
fn unaffected_node() -> NodeView {
    NodeView { affected: false, ..updated_node() }
}

/// Returns an unused node that serves an older partition.
fn older_node() -> NodeView {
    NodeView { has_newest: false, ..updated_node() }
}

fn with_state(state: NodeState, view: NodeView) -> NodeView {
    NodeView { has_serving_gpu: false, state, ..view }
}

fn changing_node(view: NodeView) -> NodeView {
    with_state(NodeState::Changing, view)
}

/// Returns an unused node that no longer serves its older partition.
fn node_between_partitions() -> NodeView {
    NodeView { is_between_partitions: true, ..changing_node(older_node()) }
}

fn waiting_node(view: NodeView) -> NodeView {
    with_state(NodeState::WaitingForPods, view)
}

fn failed_node(view: NodeView) -> NodeView {
    with_state(NodeState::Failed("why".to_owned()), view)
}

fn node_in_use(view: NodeView) -> NodeView {
    NodeView { in_use: true, ..view }
}

fn excused_node(view: NodeView) -> NodeView {
    NodeView { excused: true, ..view }
}

fn cordoned_node(view: NodeView) -> NodeView {
    NodeView { cordoned: true, ..view }
}

fn decide_for(rules: RolloutRules, views: &[NodeView]) -> RolloutProgress {
    let nodes = views.iter().enumerate().map(|(at, view)| (format!("n{at}"), view.clone())).collect();
    decide(rules, &nodes)
}

/// Returns the numbers of the nodes that begin to change.
fn nodes_that_begin(rules: RolloutRules, views: &[NodeView]) -> Vec<usize> {
    let progress = decide_for(rules, views);
    let old = views.iter().enumerate().filter(|(_, view)| !view.has_newest);
    old.map(|(at, _)| at).filter(|at| !progress.pending.contains(&format!("n{at}"))).collect()
}

#[test]
fn the_first_wave_is_one_node() {
    assert_eq!(nodes_that_begin(RULES, &[older_node(), older_node(), older_node(), older_node()]), [0]);
    assert_eq!(
        nodes_that_begin(RULES, &[changing_node(updated_node()), older_node(), older_node()]),
        NO_NODES,
        "the canary has not finished"
    );
    assert_eq!(decide_for(RULES, &[older_node(), older_node()]).phase, Phase::RollingOut);
}

#[test]
fn a_node_that_served_only_briefly_does_not_prove_the_change() {
    let young = || NodeView { is_steady: false, ..updated_node() };
    assert_eq!(
        nodes_that_begin(RULES, &[young(), older_node(), older_node(), failed_node(older_node())]),
        NO_NODES,
        "the canary may still fail"
    );
    assert_eq!(nodes_that_begin(RULES, &[young(), updated_node(), older_node(), older_node()]), [2, 3]);
    let kept = NodeView { affected: false, ..young() };
    assert_eq!(nodes_that_begin(RULES, &[kept, older_node(), older_node()]), [1], "this node is not a canary");
    let withdrawn = |view: NodeView| NodeView { withdrawn: true, ..cordoned_node(excused_node(view)) };
    assert_eq!(
        nodes_that_begin(RULES, &[withdrawn(young()), older_node(), older_node()]),
        [1],
        "an administrator cordoned the canary"
    );
    assert_eq!(
        nodes_that_begin(
            RULES,
            &[withdrawn(changing_node(updated_node())), cordoned_node(older_node()), cordoned_node(older_node())]
        ),
        [1]
    );
}

#[test]
fn cordoned_and_failed_nodes_change_one_at_a_time_until_one_serves() {
    let young = || NodeView { is_steady: false, ..updated_node() };
    for unfit in [excused_node, cordoned_node, |view| excused_node(failed_node(view))] {
        assert_eq!(nodes_that_begin(RULES, &[unfit(older_node()), unfit(older_node()), unfit(older_node())]), [0]);
        for canary in [
            changing_node(updated_node()),
            young(),
            excused_node(failed_node(updated_node())),
            with_state(NodeState::Serving, updated_node()),
        ] {
            assert_eq!(
                nodes_that_begin(RULES, &[unfit(canary.clone()), unfit(older_node()), unfit(older_node())]),
                NO_NODES,
                "{canary:?}"
            );
        }
        assert_eq!(
            nodes_that_begin(RULES, &[unfit(older_node()), older_node()]),
            [1],
            "a node that can serve is the canary"
        );
    }
    let stuck = cordoned_node(with_state(NodeState::Serving, updated_node()));
    assert_eq!(
        nodes_that_begin(RULES, &[stuck.clone(), cordoned_node(older_node()), older_node()]),
        [2],
        "a node that can serve replaces the canary"
    );
    let progress = decide_for(RULES, &[stuck, cordoned_node(older_node())]);
    assert_eq!((progress.phase, progress.cordoned), (Phase::RollingOut, BTreeSet::from(["n0".to_owned()])));
}

#[test]
fn a_change_is_complete_once_the_last_node_is_steady() {
    let young = || NodeView { is_steady: false, ..updated_node() };
    let progress = decide_for(RULES, &[updated_node(), young()]);
    assert_eq!((progress.phase, progress.updated), (Phase::RollingOut, 2));
    assert_eq!(progress.unsteady, BTreeSet::from(["n1".to_owned()]));
    let kept = NodeView { affected: false, ..young() };
    for last in [updated_node(), kept, cordoned_node(with_state(NodeState::Serving, young()))] {
        assert_eq!(decide_for(RULES, &[updated_node(), last.clone()]).phase, Phase::Complete, "{last:?}");
    }
}

#[test]
fn a_node_that_may_be_the_canary_of_an_unknown_change_must_become_steady() {
    let possible_canary = || NodeView { affected: false, may_be_canary: true, ..updated_node() };
    let young = NodeView { is_steady: false, ..possible_canary() };
    assert_eq!(nodes_that_begin(RULES, &[young.clone(), older_node(), older_node()]), NO_NODES);
    assert_eq!(decide_for(RULES, &[young, older_node()]).unsteady, BTreeSet::from(["n0".to_owned()]));
    assert_eq!(
        nodes_that_begin(RULES, &[possible_canary(), older_node(), older_node()]),
        [1],
        "the node does not prove an unknown change"
    );
}

#[test]
fn nodes_that_the_change_does_not_affect_prove_only_repairs() {
    assert_eq!(
        nodes_that_begin(RULES, &[unaffected_node(), older_node(), older_node(), older_node()]),
        [1],
        "the canary"
    );
    assert_eq!(
        nodes_that_begin(RULES, &[unaffected_node(), changing_node(updated_node()), older_node(), older_node()]),
        NO_NODES
    );
    assert_eq!(nodes_that_begin(RULES, &[unaffected_node(), updated_node(), older_node(), older_node()]), [2, 3]);
    assert_eq!(
        nodes_that_begin(
            RULES,
            &[unaffected_node(), failed_node(older_node()), node_between_partitions(), older_node(), older_node()]
        ),
        [1, 2]
    );
}

#[test]
fn after_the_canary_the_number_of_changing_nodes_is_limited() {
    assert_eq!(nodes_that_begin(RULES, &[updated_node(), older_node(), older_node(), older_node()]), [1, 2]);
    assert_eq!(
        nodes_that_begin(RULES, &[updated_node(), changing_node(updated_node()), older_node(), older_node()]),
        [2]
    );
    assert_eq!(
        nodes_that_begin(
            RULES,
            &[updated_node(), changing_node(updated_node()), changing_node(updated_node()), older_node()]
        ),
        NO_NODES
    );
    let all = RolloutRules { max_unavailable: MaxUnavailable::Percent(100), ..RULES };
    assert_eq!(nodes_that_begin(all, &[updated_node(), older_node(), older_node(), older_node()]), [1, 2, 3]);
    let quarter = RolloutRules { max_unavailable: MaxUnavailable::Percent(25), ..RULES };
    assert_eq!(
        nodes_that_begin(quarter, &[updated_node(), older_node(), older_node(), older_node(), older_node()]),
        [1, 2],
        "25% of 5 is rounded up"
    );
}

#[test]
fn unused_nodes_change_first_and_do_not_wait_for_pods() {
    assert_eq!(nodes_that_begin(RULES, &[node_in_use(older_node()), older_node(), older_node()]), [1], "the canary");
    assert_eq!(
        nodes_that_begin(RULES, &[node_in_use(older_node()), node_in_use(older_node())]),
        [0],
        "no node is unused"
    );
    let canary_waits = [waiting_node(updated_node()), node_in_use(older_node()), node_in_use(older_node())];
    assert_eq!(nodes_that_begin(RULES, &canary_waits), NO_NODES, "one canary at a time");
    assert_eq!(
        nodes_that_begin(RULES, &[waiting_node(updated_node()), node_in_use(older_node()), older_node()]),
        [2],
        "a node became unused"
    );
    let waits = [
        updated_node(),
        waiting_node(updated_node()),
        waiting_node(updated_node()),
        node_in_use(older_node()),
        older_node(),
    ];
    assert_eq!(nodes_that_begin(RULES, &waits), [4], "no further node may wait, so only the unused node changes");
    assert_eq!(
        nodes_that_begin(
            RULES,
            &[updated_node(), waiting_node(updated_node()), node_in_use(older_node()), node_in_use(older_node())]
        ),
        [2]
    );
}

#[test]
fn a_partly_changed_node_that_waits_for_pods_can_prove_the_change() {
    let partly = NodeView { has_serving_gpu: true, ..waiting_node(updated_node()) };
    assert_eq!(nodes_that_begin(RULES, &[partly, older_node(), older_node(), older_node()]), [1, 2]);
}

#[test]
fn a_failed_node_stops_other_nodes() {
    let views = [failed_node(updated_node()), updated_node(), older_node()];
    let progress = decide_for(RULES, &views);
    assert_eq!((progress.phase, progress.updated), (Phase::Stopped, 1));
    assert_eq!(progress.failed, BTreeMap::from([("n0".to_owned(), "why".to_owned())]));
    assert_eq!(nodes_that_begin(RULES, &views), NO_NODES);
    let onward = RolloutRules { on_failure: OnFailure::Continue, ..RULES };
    assert_eq!(nodes_that_begin(onward, &views), [2]);
    assert_eq!(
        nodes_that_begin(onward, &[failed_node(updated_node()), older_node(), older_node()]),
        [1],
        "still one canary at a time"
    );
    assert_eq!(
        nodes_that_begin(RULES, &[excused_node(failed_node(updated_node())), updated_node(), older_node()]),
        [2],
        "it is cordoned"
    );
    let last = decide_for(RULES, &[failed_node(updated_node()), updated_node()]);
    assert_eq!(last.phase, Phase::RollingOut, "no node is left to stop");
}

#[test]
fn a_recent_failure_holds_back_other_nodes() {
    let failing = |view: NodeView| NodeView { failing: true, ..changing_node(view) };
    let views =
        [failing(updated_node()), updated_node(), older_node(), node_between_partitions(), failed_node(older_node())];
    assert_eq!(nodes_that_begin(RULES, &views), [4], "only repairs continue");
    assert_eq!(decide_for(RULES, &views).phase, Phase::RollingOut);
    let onward = RolloutRules { on_failure: OnFailure::Continue, ..RULES };
    assert_eq!(nodes_that_begin(onward, &[failing(updated_node()), updated_node(), older_node(), older_node()]), [2]);
    assert_eq!(nodes_that_begin(RULES, &[excused_node(failing(updated_node())), updated_node(), older_node()]), [2]);
    assert_eq!(
        nodes_that_begin(RULES, &[updated_node(), failing(older_node()), older_node()]),
        [2],
        "an older change fails"
    );
}

#[test]
fn a_paused_policy_changes_no_node() {
    let paused = RolloutRules { paused: true, ..RULES };
    for views in [
        vec![older_node(), older_node()],
        vec![updated_node(), older_node()],
        vec![updated_node(), failed_node(older_node())],
    ] {
        assert_eq!(nodes_that_begin(paused, &views), NO_NODES, "{views:?}");
        assert_eq!(decide_for(paused, &views).phase, Phase::Paused);
    }
    assert_eq!(decide_for(paused, &[updated_node()]).phase, Phase::Complete);
}

#[test]
fn a_reverted_policy_repairs_broken_nodes_immediately() {
    let one = RolloutRules { max_unavailable: MaxUnavailable::Nodes(1), ..RULES };
    // n0 kept the partition that the policy has again. The other nodes were already being
    // repartitioned.
    let views = [
        updated_node(),
        failed_node(older_node()),
        failed_node(older_node()),
        node_between_partitions(),
        node_between_partitions(),
    ];
    assert_eq!(nodes_that_begin(one, &views), [1, 2, 3, 4]);
    let also_served = [updated_node(), failed_node(older_node()), older_node(), older_node()];
    assert_eq!(nodes_that_begin(one, &also_served), [1, 2], "nodes that serve an older partition follow in waves");
    let stopped = [
        updated_node(),
        failed_node(updated_node()),
        failed_node(older_node()),
        node_between_partitions(),
        older_node(),
    ];
    assert_eq!(nodes_that_begin(one, &stopped), [2], "only repairs continue");
    let restarting =
        [updated_node(), changing_node(older_node()), changing_node(older_node()), older_node(), older_node()];
    assert_eq!(nodes_that_begin(one, &restarting), NO_NODES, "they will soon serve an older partition");
    assert_eq!(
        nodes_that_begin(RULES, &[updated_node(), changing_node(older_node()), older_node(), older_node()]),
        [2]
    );
}

#[test]
fn an_unproven_change_does_not_wait_for_an_older_change_that_never_finishes() {
    assert_eq!(
        nodes_that_begin(
            RULES,
            &[changing_node(older_node()), changing_node(older_node()), changing_node(older_node())]
        ),
        [0]
    );
    assert_eq!(
        nodes_that_begin(RULES, &[failed_node(older_node()), older_node()]),
        [1],
        "a failed node is the last canary"
    );
    assert_eq!(nodes_that_begin(RULES, &[failed_node(older_node())]), [0]);
    assert_eq!(
        nodes_that_begin(RULES, &[excused_node(older_node()), node_in_use(older_node())]),
        [1],
        "a failure of this node would not show whether the change works"
    );
}

#[test]
fn nodes_without_a_ready_agent_remain_pending() {
    let away = NodeView { agent_ready: false, ..older_node() };
    assert_eq!(nodes_that_begin(RULES, &[away.clone(), older_node()]), [1]);
    assert_eq!(nodes_that_begin(RULES, &[updated_node(), away]), NO_NODES);
}

#[test]
fn excused_nodes_do_not_count_as_unavailable() {
    assert_eq!(
        nodes_that_begin(
            RULES,
            &[updated_node(), excused_node(changing_node(updated_node())), changing_node(updated_node()), older_node()]
        ),
        [3]
    );
}

/// Checks that every rollout ends, never exceeds its limit, and begins with one node.
#[test]
fn rollouts_of_any_size_end_and_respect_their_limit() {
    for (count, limit) in (1..12).flat_map(|count| (1..6).map(move |limit| (count, limit))) {
        let rules = RolloutRules { max_unavailable: MaxUnavailable::Nodes(limit), ..RULES };
        let mut views = vec![older_node(); count];
        for wave in 0.. {
            let begun = nodes_that_begin(rules, &views);
            if decide_for(rules, &views).phase == Phase::Complete {
                break;
            }
            assert!(!begun.is_empty() && begun.len() <= limit, "wave {wave} of {count} by {limit}: {begun:?}");
            assert!(wave > 0 || begun.len() == 1, "the canary");
            for at in begun {
                views[at] = updated_node();
            }
        }
    }
}
