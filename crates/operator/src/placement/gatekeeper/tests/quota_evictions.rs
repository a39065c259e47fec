//! Tests which pods are evicted by the rules of quotas, and which are not.
use std::collections::BTreeMap;

use cleave_api::names::CAPACITY_LABEL;
use serde_json::{Value, json};

use super::quotas::{Case, Ending};
use super::world::{at, released};
use crate::evict::EvictionResult;
use crate::policies::demand::Reason;

/// A day after the first second of a case.
const A_DAY_LATER: &str = "1970-01-13T13:46:40Z";

/// Adds a disruption budget for all pods of a namespace.
pub(super) fn add_budget(case: &mut Case, namespace: &str, allowed: u32) {
    let budget = json!({"metadata": {"name": namespace, "namespace": namespace, "generation": 1},
        "spec": {"selector": {}},
        "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 2, "expectedPods": 2, "observedGeneration": 1}});
    case.world.budgets.insert(namespace.to_owned(), budget);
}

#[test]
fn pods_that_no_eviction_helps_do_not_keep_others_from_evictions() {
    let names: Vec<String> = (0..12).map(|at| format!("q{at:02}")).collect();
    let quotas: Vec<(&str, Value)> = names.iter().map(|name| (name.as_str(), json!({}))).collect();
    let mut case = Case::new(1, &quotas).running(&[(("low", "q11", 10, 0), 0)]);
    for name in &names[..11] {
        case.add((&format!("hopeless-{name}"), name, 10, 0), None);
    }
    // The quota of the pod `high` has the highest share, so the turn of `high` is the last.
    let case = case.waiting(&[("high", "q11", 10, 100)]).until_rest();
    assert_eq!(case.evicted, [("Priority".to_owned(), "high".to_owned(), "low".to_owned())]);
}

#[test]
fn a_borrower_without_a_quota_has_a_label() {
    let mut case =
        Case::new(1, &[("a", json!({"min": 5}))]).running(&[(("x1", "-", 2, 0), 0)]).waiting(&[("x2", "-", 2, 0)]);
    let actions = case.step();
    assert_eq!(case.world.pods["other/x2"]["metadata"]["labels"][CAPACITY_LABEL], "over-quota");
    let reports = case.keeper.quota_reports(&case.world.cluster(), &actions.waiting, at(case.seconds));
    let labels: Vec<_> = reports.labels.iter().map(|label| (label.pod.as_str(), label.value)).collect();
    assert_eq!(labels, [("other/x1", Some("over-quota")), ("other/x2", Some("over-quota"))]);
}

#[test]
fn a_protected_borrower_is_deleted_after_some_time_and_a_refused_deletion_is_delayed() {
    let mut case = Case::new(1, &[("a", json!({"min": 5}))])
        .with_budget_patience(3)
        .running(&[(("x1", "-", 10, 0), 0)])
        .waiting(&[("a1", "a", 5, 0)]);
    add_budget(&mut case, "other", 0);
    case.reality.report_on(&mut case.world, 1);
    let start = case.seconds;
    let cluster = case.world.cluster();
    let mut decide = |second: u64| case.keeper.reconcile(&cluster, &BTreeMap::new(), at(start + second));
    for second in 0..3 {
        let actions = decide(second);
        assert!(actions.evictions.is_empty(), "after {second} s");
        assert_eq!(actions.waiting["a/a1"].reason, Reason::Protected);
    }
    let deletion = (3..6).find_map(|second| decide(second).evictions.pop()).unwrap();
    assert!(deletion.pod == "other/x1" && deletion.quota.as_ref().unwrap().force);
    let up = at(start + 6).up;
    case.keeper.record_eviction(&deletion, &EvictionResult::Refused("a policy denied it".to_owned()), up);
    for second in 6..12 {
        let actions = case.keeper.reconcile(&cluster, &BTreeMap::new(), at(start + second));
        assert!(actions.evictions.is_empty(), "after {second} s");
    }
}

/// Otherwise each change of the leader would give the budget its full time again.
#[test]
fn a_new_leader_continues_the_time_of_a_disruption_budget() {
    let case = |recorded: Option<u64>| {
        let mut case = Case::new(1, &[("a", json!({"min": 5}))])
            .with_budget_patience(60)
            .running(&[(("x1", "-", 10, 0), 0)])
            .waiting(&[("a1", "a", 5, 0)]);
        add_budget(&mut case, "other", 0);
        let note = |pod: &mut Value| {
            pod["metadata"]["annotations"] = json!({"cleave.dev/protected-since": recorded.unwrap().to_string()});
        };
        if recorded.is_some() {
            case.world.change(|world| &mut world.pods, "a/a1", note);
        }
        case.seconds += 50;
        let actions = case.step();
        (actions.protected.first().map(|one| one.since), actions.requeue, actions.evictions.len())
    };
    let now = 1_000_053;
    let (since, _, evictions) = case(None);
    assert_eq!((since, evictions), (Some(now), 0), "the time is recorded");
    assert_eq!(case(Some(now - 40)).0, None, "nothing changes");
    assert_eq!(case(Some(now - 40)).2, 0);
    // The waiting pod was created 51 s ago: the record is not of this pod.
    assert_eq!((case(Some(1)).0, case(Some(1)).2), (None, 0));
    assert_eq!(case(Some(now + 900)).0, Some(now), "a record of the future is corrected");
}

/// A Deployment may replace running pods, or the owner may change the gang of the pods.
#[test]
fn the_time_of_a_disruption_budget_does_not_start_again_when_a_victim_is_replaced() {
    for gang in [false, true] {
        let mut case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({}))])
            .with_budget_patience(10)
            .running(&[(("b1", "b", 5, 0), 0), (("b2", "b", 5, 0), 0)])
            .waiting(&[("a1", "a", 5, 0), ("a2", "a", 5, 0)]);
        if gang {
            case = case.gang("a", "train", 2, &["a1", "a2"]);
        } else {
            case.end("a/a1");
            case.end("a/a2");
            case = case.waiting(&[("a1", "a", 10, 0)]);
        }
        add_budget(&mut case, "b", 0);
        let start = case.seconds;
        while case.seconds < start + 9 {
            let actions = case.step();
            assert!(actions.evictions.is_empty() && actions.waiting["a/a1"].reason == Reason::Protected);
        }
        case.end("b/b2");
        case.add(("b4", "b", 5, 0), Some(0));
        case.step();
        case.step();
        let evicted: Vec<&str> = case.evicted.iter().map(|(.., pod)| pod.as_str()).collect();
        assert_eq!(evicted, ["b1", "b4"], "gang: {gang}");
    }
}

#[test]
fn a_pod_that_terminates_late_does_not_keep_its_room_from_a_guarantee() {
    let mut case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0)])
        .waiting(&[("a1", "a", 10, 0)]);
    case.world.terminate("b/b1", A_DAY_LATER);
    let set = |pod: &mut Value| pod["spec"]["terminationGracePeriodSeconds"] = json!(86400);
    case.world.change(|world| &mut world.pods, "b/b1", set);
    case.ending = Ending::Terminating;
    let actions = case.step();
    let graces: Vec<_> =
        actions.evictions.iter().map(|one| (one.pod.as_str(), one.quota.as_ref().unwrap().grace)).collect();
    assert_eq!(graces, [("b/b1", Some(300))], "its grace period is shortened");
}

#[test]
fn a_pod_that_terminates_soon_is_not_evicted_again() {
    let mut case = Case::new(2, &[("a", json!({"min": 10})), ("b", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0), (("b2", "b", 10, 0), 1)])
        .waiting(&[("a1", "a", 10, 0)]);
    case.world.terminate("b/b1", "1970-01-12T13:48:40Z");
    assert!(case.step().evictions.is_empty());
}

/// An agent restarts during an upgrade of its `DaemonSet`.
#[test]
fn nobody_is_evicted_while_the_agent_of_a_node_with_room_is_briefly_not_ready() {
    for gang in [false, true] {
        let mut case = Case::new(1, &[("a", json!({"min": 10})), ("b", json!({}))])
            .running(&[(("b1", "b", 10, 0), 0)])
            .waiting(&[("a1", "a", 5, 0), ("a2", "a", 5, 0)]);
        if gang {
            case = case.gang("a", "train", 2, &["a1", "a2"]);
        }
        case.world = case.world.node("n2", &[0]);
        let ready = |case: &mut Case, status: &str| {
            let set = |agent: &mut Value| agent["status"]["conditions"][0]["status"] = json!(status);
            case.world.change(|world| &mut world.agents, "n2", set);
        };
        ready(&mut case, "False");
        for _ in 0..3 {
            assert!(case.step().evictions.is_empty(), "gang: {gang}");
        }
        ready(&mut case, "True");
        assert_eq!(released(&case.step()), [("a/a1", "reserved"), ("a/a2", "reserved")]);
    }
}

#[test]
fn at_the_maximum_no_more_pods_leave_than_needed() {
    Case::new(2, &[("a", json!({"min": 0, "max": 10}))])
        .running(&[(("x", "a", 4, 0), 0), (("y", "a", 1, 0), 0), (("z", "a", 5, 10), 0)])
        .waiting(&[("high", "a", 3, 20)])
        .expect(&[("Priority", "high", "x")], &["high", "y", "z"]);
}

#[test]
fn a_budget_limits_the_sum_of_a_gang_and_other_victims() {
    let mut case = Case::new(2, &[("a", json!({"min": 10})), ("b", json!({}))])
        .running(&[(("g1", "b", 5, 0), 0), (("p", "b", 5, 0), 0), (("g2", "b", 10, 0), 1)])
        .gang("b", "train", 2, &["g1", "g2"])
        .waiting(&[("a1", "a", 10, 0)]);
    add_budget(&mut case, "b", 2);
    let actions = case.step();
    let victims: Vec<&str> = actions.evictions.iter().map(|one| one.pod.as_str()).collect();
    assert!(victims.is_empty() || victims == ["b/g1", "b/g2"], "the budget allows two evictions: {victims:?}");
}

#[test]
fn pods_on_a_node_whose_report_is_missing_still_count() {
    let mut case = Case::new(1, &[("a", json!({"min": 8, "max": 8})), ("b", json!({}))])
        .running(&[(("a1", "a", 8, 0), 0)])
        .waiting(&[("a2", "a", 1, 0)]);
    case.world = case.world.node("n2", &[0]);
    assert!(case.step().releases.is_empty(), "the quota is at its maximum");
    let lost = case.world.gpu_nodes.remove("n1").unwrap();
    let actions = case.step();
    assert!(actions.releases.is_empty() && actions.evictions.is_empty(), "{actions:?}");
    case.world.gpu_nodes.insert("n1".to_owned(), lost);
    assert!(case.step().releases.is_empty());
}

#[test]
fn a_pod_of_two_gpus_is_not_within_a_guarantee_of_one_cell() {
    let cells = json!({"min": 10, "guarantee": "Cells"});
    let mut case = Case::new(2, &[("a", cells), ("b", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0), (("b2", "b", 10, 0), 1)])
        .waiting(&[("a1", "a", 10, 0)]);
    let limits = json!({"limits": {super::world::MPS_RESOURCE: "10"}});
    let set = |pod: &mut Value| {
        pod["spec"]["containers"] = json!([{"name": "one", "resources": limits}, {"name": "two", "resources": limits}]);
    };
    case.world.change(|world| &mut world.pods, "a/a1", set);
    assert!(case.step().evictions.is_empty(), "one GPU is guaranteed, and the pod needs two");
}

/// A pod that does not borrow has waited for its guarantee, so it is not evicted for the guarantee
/// of another quota.
#[test]
fn a_pod_that_does_not_borrow_is_not_pushed_out_of_its_guarantee() {
    let mut case = Case::new(2, &[("a", json!({"min": 5})), ("b", json!({"min": 5}))])
        .running(&[(("a1", "a", 5, 0), 0), (("a2", "a", 5, 10), 0), (("b1", "b", 10, 0), 1)])
        .waiting(&[("b2", "b", 5, 0)]);
    let never = |pod: &mut Value| pod["metadata"]["annotations"] = json!({"cleave.dev/borrow": "Never"});
    case.world.change(|world| &mut world.pods, "a/a1", never);
    case.end("b/b1");
    case.world = case.world.pod_with("full", 10, json!({"nodeName": "n1", "schedulingGates": [], "priority": 0}));
    case.reality.given.insert("team/full".to_owned(), ("n1-GPU-1".to_owned(), 10));
    case.world.namespaces.push(json!({"metadata": {"name": "team", "labels": {"cleave.dev/allow": "quota"}}}));
    case.step();
    assert_eq!(case.evicted, [("Reclaim".to_owned(), "b2".to_owned(), "a2".to_owned())]);
}
