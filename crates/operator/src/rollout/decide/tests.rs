use std::sync::Arc;

use cleave_api::GpuNode;
use cleave_api::gpunode::{GpuNodeStatus, GpuStatus};
use http::{Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::read::AgentPod;
use crate::rollout::hosts::{
    MpsHostStores, MpsHosts, NewestRevisions, REVISION_HASH_LABEL, Revision, mps_hosts_by_node,
};
use crate::rollout::replace::replace;
use crate::rollout::view::MpsState;

const OLD_HASH: &str = "old";
const NEW_HASH: &str = "new";

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn from_json<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn revision(set: &str, hash: &str, number: i64) -> Revision {
    let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "hosts", "uid": set, "controller": true});
    from_json(
        json!({"metadata": {"labels": {REVISION_HASH_LABEL: hash}, "ownerReferences": [owner]}, "revision": number}),
    )
}

/// Returns a pod of the `DaemonSet` with the UID `s`.
fn pod(name: &str, node: &str, hash: &str, terminating: bool) -> Arc<AgentPod> {
    let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "hosts", "uid": "s", "controller": true});
    let mut pod = json!({"metadata": {"name": name, "namespace": "system", "uid": format!("{name}-uid"), "labels": {REVISION_HASH_LABEL: hash}, "ownerReferences": [owner]},
        "spec": {"nodeName": node}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    if terminating {
        pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
    }
    Arc::new(from_json(pod))
}

#[test]
fn the_newest_revision_has_the_highest_number() {
    let all = [revision("s", "a", 3), revision("s", "b", 2), revision("other", "c", 9), Revision::default()];
    let newest = NewestRevisions::of(&all);
    assert!(newest.is_outdated("s", "b") && !newest.is_outdated("s", "a"));
    assert!(newest.is_outdated("s", ""), "a pod without a revision");
    assert!(!newest.is_outdated("unknown", "b") && !NewestRevisions::default().is_outdated("s", "b"));
}

#[test]
fn a_terminating_mps_host_is_ignored_if_the_node_has_another_mps_host() {
    let hosts = MpsHosts {
        pods: vec![pod("z", "n", NEW_HASH, false), pod("a", "n", OLD_HASH, true), pod("b", "m", OLD_HASH, true)],
        revisions: vec![Arc::new(revision("s", OLD_HASH, 1)), Arc::new(revision("s", NEW_HASH, 2))],
    };
    let found = mps_hosts_by_node(&hosts, &NewestRevisions::of(hosts.revisions.iter().map(AsRef::as_ref)));
    let n = &found["n"];
    assert_eq!(
        (n.pod.as_str(), n.uid.as_str(), n.outdated, n.ready, n.terminating),
        ("system/z", "z-uid", false, true, false)
    );
    assert_eq!(n.daemon_set, ("hosts".to_owned(), "s".to_owned()));
    let m = &found["m"];
    assert!(m.outdated && m.terminating && !m.ready);
}

/// Returns a node with one GPU that has this spec and status.
fn gpu_node(spec: Value, gpu: &Value) -> GpuNode {
    let mut whole = json!({"uuid": "G", "index": 0, "model": "H100", "memoryMib": 1, "sms": 1, "mode": "Mps", "health": {"healthy": true},
        "slices": [{"device": "G", "resource": "nvidia.com/gpu-mps", "total": 10, "inUse": 0, "unhealthy": 0}],
        "mps": [{"device": "G", "state": "Active"}]});
    whole.as_object_mut().unwrap().extend(gpu.as_object().unwrap().clone());
    let gpus: Vec<GpuStatus> = vec![from_json(whole)];
    let mut node = GpuNode::new("n", from_json(spec));
    node.metadata.generation = Some(4);
    let status = GpuNodeStatus { agent_version: "1".into(), observed_generation: 4, gpus, ..GpuNodeStatus::default() };
    node.status = Some(status);
    node
}

fn allocations(resource: &str) -> Value {
    json!([{"pod": "team/p", "container": "main", "resource": resource, "device": "G", "ids": ["G::0"]}])
}

#[test]
fn a_node_is_idle_only_if_its_agent_reports_no_shares_in_use() {
    let user = |node: &GpuNode, ready| MpsState::of(node, ready).user;
    let idle = gpu_node(json!({}), &json!({}));
    assert_eq!(user(&idle, true), None);
    assert_eq!(user(&idle, false).unwrap(), "the agent is not ready");
    let mut stale = idle.clone();
    stale.metadata.generation = Some(5);
    assert_eq!(user(&stale, true).unwrap(), "the agent has not read the GpuNode spec");
    let unreported = GpuNode { status: None, ..idle };
    assert!(user(&unreported, true).is_some());
    let busy = gpu_node(json!({}), &json!({"allocations": allocations("nvidia.com/gpu-mps")}));
    assert_eq!(user(&busy, true).unwrap(), "team/p has 1 nvidia.com/gpu-mps");
    let slices = json!([{"device": "G", "resource": "nvidia.com/gpu-mps", "total": 10, "inUse": 10, "unhealthy": 0}]);
    let unknown = gpu_node(json!({}), &json!({"slices": slices}));
    assert!(user(&unknown, true).unwrap().starts_with("10 nvidia.com/gpu-mps"), "it is unknown which pods use them");
    for other in ["nvidia.com/gpu", "nvidia.com/gpu-timeslice", "nvidia.com/mig-1g.10gb"] {
        assert_eq!(user(&gpu_node(json!({}), &json!({"allocations": allocations(other)})), true), None, "{other}");
    }
}

#[test]
fn renamed_time_sliced_replicas_are_not_mps_shares() {
    let sliced = json!({"gpus": [{"uuid": "G", "partition": {"timeSlicing": {"resource": "nvidia.com/gpu-gold", "replicas": 4}}}]});
    let time_sliced =
        json!({"allocations": allocations("nvidia.com/gpu-gold"), "mode": "TimeSlicing", "slices": [], "mps": []});
    let mps = MpsState::of(&gpu_node(sliced.clone(), &time_sliced), true);
    assert_eq!(
        (
            mps.user.as_deref(),
            mps.may_be_mps_resource("nvidia.com/gpu-gold"),
            mps.may_be_mps_resource("nvidia.com/gpu-mps")
        ),
        (None, false, true)
    );
    assert!(
        MpsState::of(&gpu_node(json!({}), &time_sliced), true).user.is_some(),
        "a resource that the spec does not mention counts as shares"
    );
    // The GPU still serves shares with this resource name, because pods use them.
    let slices = json!([{"device": "G", "resource": "nvidia.com/gpu-gold", "total": 4, "inUse": 1, "unhealthy": 0}]);
    let still = json!({"allocations": allocations("nvidia.com/gpu-gold"), "slices": slices});
    assert!(MpsState::of(&gpu_node(sliced, &still), true).user.is_some());
}

#[test]
fn a_daemon_that_does_not_serve_is_reported_unless_the_gpu_is_the_cause() {
    let daemon_problem = |gpu: Value| MpsState::of(&gpu_node(json!({}), &gpu), true).daemon_problem;
    assert_eq!(daemon_problem(json!({})), None);
    assert_eq!(daemon_problem(json!({"mps": []})), None, "a whole GPU has no daemon");
    let backs_off = json!({"mps": [{"device": "G", "state": "BackOff", "message": "no such file"}]});
    assert_eq!(daemon_problem(backs_off.clone()).unwrap(), "the MPS daemon of G is BackOff: no such file");
    assert_eq!(
        daemon_problem(json!({"mps": [{"device": "G", "state": ""}]})).unwrap(),
        "the MPS daemon of G is absent"
    );
    let mut lost = backs_off;
    lost["health"] = json!({"healthy": false, "class": "Lost"});
    assert_eq!(daemon_problem(lost), None);
}

/// A small cluster in which all MPS hosts are outdated.
#[derive(Debug, Default)]
struct TestCluster {
    nodes: BTreeMap<String, MpsHostView>,
    rollout: Rollout,
    up: Duration,
}

impl TestCluster {
    fn with_nodes(count: usize) -> Self {
        let mut world = Self { up: seconds(100), ..Self::default() };
        for at in 0..count {
            let view =
                MpsHostView { host: Some(mps_host(&format!("n{at:02}"), "1", true, true)), ..MpsHostView::default() };
            world.nodes.insert(format!("n{at:02}"), view);
        }
        world
    }

    fn view_of(&mut self, name: &str) -> &mut MpsHostView {
        self.nodes.get_mut(name).unwrap()
    }

    fn update(&mut self) -> RolloutStep {
        self.rollout.update(&self.nodes, self.up)
    }

    /// Advances the time and returns the nodes whose MPS hosts the operator deletes.
    fn nodes_to_replace_after(&mut self, time: Duration) -> Vec<String> {
        self.up += time;
        self.update().replace.into_iter().map(|one| one.node).collect()
    }

    /// Deletes the MPS hosts that the operator selects. The watch reports the deletions.
    fn delete_selected_mps_hosts(&mut self) -> Vec<String> {
        let step = self.update();
        for one in &step.replace {
            self.rollout.record_replacement(one, self.up);
            self.view_of(&one.node).host = None;
        }
        step.replace.into_iter().map(|one| one.node).collect()
    }

    /// Waits until the serving MPS hosts count as steady and the closed nodes have been idle long
    /// enough. Then deletes the MPS hosts that the operator selects, and returns their nodes.
    fn replace_next_mps_host(&mut self) -> Vec<String> {
        self.update();
        self.up += STEADY_TIME;
        self.update();
        self.up += IDLE_TIME;
        self.delete_selected_mps_hosts()
    }
}

fn mps_host(node: &str, generation: &str, outdated: bool, ready: bool) -> MpsHost {
    MpsHost {
        pod: format!("system/{node}-{generation}"),
        uid: format!("{node}-{generation}"),
        hash: if outdated { OLD_HASH } else { NEW_HASH }.into(),
        daemon_set: ("hosts".into(), "s".into()),
        outdated,
        ready,
        terminating: false,
    }
}

#[test]
fn shares_of_idle_nodes_are_withheld_and_their_mps_hosts_replaced_one_by_one() {
    let mut world = TestCluster::with_nodes(2);
    let step = world.update();
    assert_eq!((step.replace.len(), step.outdated, step.next), (0, 2, Some(IDLE_TIME)));
    assert!(world.rollout.is_withheld("n00") && !world.rollout.is_withheld("n01"));
    assert!(
        world.nodes_to_replace_after(seconds(IDLE_TIME.as_secs() - 1)).is_empty(),
        "not before the node has settled"
    );
    world.up += seconds(1);
    assert_eq!(world.delete_selected_mps_hosts(), ["n00"]);
    for (state, withheld) in [
        (None, true),
        (Some(mps_host("n00", "2", false, false)), true),
        // The agent reports daemons that do not serve.
        (Some(mps_host("n00", "2", false, true)), false),
    ] {
        world.view_of("n00").host = state;
        world.view_of("n00").daemon_problem = Some("its daemon is Starting".into());
        assert!(world.nodes_to_replace_after(seconds(1)).is_empty());
        assert!(!world.rollout.is_withheld("n01"), "the second node waits until the first serves");
        assert_eq!(world.rollout.is_withheld("n00"), withheld);
    }
    world.view_of("n00").daemon_problem = None;
    assert_eq!(world.replace_next_mps_host(), ["n01"]);
    world.view_of("n01").host = Some(mps_host("n01", "2", false, true));
    assert_eq!(world.update().next, Some(STEADY_TIME));
    world.up += STEADY_TIME;
    let step = world.update();
    assert_eq!((step, world.rollout.outages.len(), world.rollout.deleted.len()), (RolloutStep::default(), 0, 0));
}

#[test]
fn an_mps_host_in_use_is_kept_even_if_its_use_starts_while_shares_are_withheld() {
    let mut world = TestCluster::with_nodes(1);
    world.view_of("n00").busy = Some("team/p has 2 nvidia.com/gpu-mps".into());
    let step = world.update();
    assert_eq!(step.waiting["n00"], "team/p has 2 nvidia.com/gpu-mps");
    assert!(world.nodes_to_replace_after(seconds(3600)).is_empty() && !world.rollout.is_withheld("n00"));
    world.view_of("n00").busy = None;
    world.update();
    assert!(world.rollout.is_withheld("n00"));
    world.view_of("n00").busy = Some("a pod without a gate".into());
    assert!(world.nodes_to_replace_after(IDLE_TIME).is_empty() && !world.rollout.is_withheld("n00"));
    world.view_of("n00").busy = None;
    assert!(world.nodes_to_replace_after(IDLE_TIME).is_empty(), "the wait restarts");
    assert_eq!(world.nodes_to_replace_after(IDLE_TIME), ["n00"]);
}

#[test]
fn no_mps_host_is_deleted_twice_and_its_successor_is_kept() {
    let mut world = TestCluster::with_nodes(1);
    world.update();
    world.up += IDLE_TIME;
    let step = world.update();
    world.rollout.record_replacement(&step.replace[0], world.up);
    // The watch has not reported the deletion.
    assert!(world.nodes_to_replace_after(seconds(10)).is_empty() && world.rollout.is_withheld("n00"));
    world.view_of("n00").host.as_mut().unwrap().terminating = true;
    assert!(world.nodes_to_replace_after(seconds(10)).is_empty() && world.rollout.is_withheld("n00"));
    world.view_of("n00").host = Some(mps_host("n00", "2", false, true));
    assert!(world.nodes_to_replace_after(seconds(10)).is_empty() && !world.rollout.is_withheld("n00"));
    // Another MPS host replaces the first one while the node is closed.
    let mut world = TestCluster::with_nodes(1);
    world.update();
    world.view_of("n00").host = Some(mps_host("n00", "2", true, true));
    assert!(world.nodes_to_replace_after(IDLE_TIME).is_empty(), "the wait restarts for the new MPS host");
}

#[test]
fn an_mps_host_that_does_not_serve_in_time_stops_replacement_until_it_serves_or_its_daemon_set_changes() {
    let mut world = TestCluster::with_nodes(3);
    assert_eq!(world.replace_next_mps_host(), ["n00"]);
    world.view_of("n00").host = Some(mps_host("n00", "2", false, false));
    assert!(
        world.nodes_to_replace_after(seconds(START_TIMEOUT.as_secs() - 1)).is_empty()
            && world.rollout.is_withheld("n00")
    );
    world.up += seconds(1);
    let step = world.update();
    let (message, set) = step.stop_report.unwrap();
    assert!(step.stopped && message.contains("node n00: system/n00-2 is not ready"), "{message}");
    assert_eq!(
        (set.kind.as_deref(), set.name.as_deref(), set.namespace.as_deref()),
        (Some("DaemonSet"), Some("hosts"), Some("system"))
    );
    assert!(!world.rollout.is_withheld("n00"), "from here on, the agent's report decides which shares are free");
    world.up += seconds(1);
    let again = world.update();
    assert!(again.stopped && again.stop_report.is_none() && again.replace.is_empty(), "it is reported once");
    assert!(world.nodes_to_replace_after(seconds(3600)).is_empty() && !world.rollout.is_withheld("n01"));
    // The MPS host eventually serves.
    let mut served = TestCluster { nodes: world.nodes.clone(), rollout: world.rollout.clone(), up: world.up };
    served.view_of("n00").host.as_mut().unwrap().ready = true;
    assert_eq!(served.replace_next_mps_host(), ["n01"]);
    // Alternatively, another release follows the bad one. MPS hosts that serve are replaced first.
    world.view_of("n00").host = Some(mps_host("n00", "2", true, false));
    assert_eq!(world.replace_next_mps_host(), ["n01"]);
    world.view_of("n01").host = Some(mps_host("n01", "3", false, true));
    assert_eq!(world.replace_next_mps_host(), ["n02"]);
    world.view_of("n02").host = Some(mps_host("n02", "3", false, true));
    assert_eq!(world.replace_next_mps_host(), ["n00"]);
}

#[test]
fn an_mps_host_that_crashes_in_a_loop_does_not_count_as_serving() {
    let mut world = TestCluster::with_nodes(3);
    assert_eq!(world.replace_next_mps_host(), ["n00"]);
    world.up += seconds(1);
    let began = world.up;
    let mut second = 0;
    while !world.update().stopped {
        world.up += seconds(1);
        second += 1;
        world.view_of("n00").host = Some(mps_host("n00", "2", false, second % 20 < STEADY_TIME.as_secs()));
        assert!(world.update().replace.is_empty() && !world.rollout.is_withheld("n01"), "{second}");
        assert!(world.up < began + START_TIMEOUT + seconds(20));
    }
    // In a larger cluster, another node may already be closed. The operator reopens it.
    let mut world = TestCluster::with_nodes(20);
    world.view_of("n00").host = Some(mps_host("n00", "2", false, true));
    world.update();
    assert!(world.rollout.is_withheld("n01") && world.rollout.is_withheld("n02"));
    world.view_of("n00").host = None;
    world.update();
    assert!(!world.rollout.is_withheld("n01"), "no MPS host of the new release has served yet");
}

#[test]
fn daemons_that_do_not_start_stop_replacement_and_withhold_nothing() {
    let mut world = TestCluster::with_nodes(2);
    assert_eq!(world.replace_next_mps_host(), ["n00"]);
    let view = world.view_of("n00");
    (view.host, view.daemon_problem) =
        (Some(mps_host("n00", "2", false, true)), Some("the MPS daemon of G is BackOff".into()));
    assert!(world.nodes_to_replace_after(seconds(1)).is_empty() && !world.rollout.is_withheld("n00"));
    assert!(world.nodes_to_replace_after(START_TIMEOUT).is_empty() && world.update().stopped);
}

#[test]
fn the_next_leader_continues_from_the_state_of_the_cluster() {
    let mut world = TestCluster::with_nodes(3);
    assert_eq!(world.replace_next_mps_host(), ["n00"]);
    let mut terminating = mps_host("n00", "1", true, false);
    terminating.terminating = true;
    for state in [Some(terminating), None, Some(mps_host("n00", "2", false, false))] {
        world.view_of("n00").host = state;
        world.rollout = Rollout::default();
        assert!(
            world.nodes_to_replace_after(IDLE_TIME).is_empty() && world.nodes_to_replace_after(IDLE_TIME).is_empty()
        );
        assert!(world.rollout.is_withheld("n00") && !world.rollout.is_withheld("n01"));
    }
    world.view_of("n00").host = Some(mps_host("n00", "2", false, true));
    world.rollout = Rollout::default();
    assert_eq!(world.replace_next_mps_host(), ["n01"]);
}

#[test]
fn unreachable_and_cordoned_nodes_do_not_stop_replacement() {
    let mut world = TestCluster::with_nodes(3);
    // One node has been down for days.
    world.view_of("n02").host.as_mut().unwrap().ready = false;
    (world.view_of("n02").host.as_mut().unwrap().outdated, world.view_of("n02").excused) = (false, true);
    world.update();
    world.up += START_TIMEOUT;
    assert!(!world.update().stopped);
    world.view_of("n00").excused = true;
    assert_eq!(world.nodes_to_replace_after(IDLE_TIME), ["n00"]);
    assert_eq!(world.delete_selected_mps_hosts(), ["n00"]);
    assert!(
        world.nodes_to_replace_after(IDLE_TIME).is_empty() && world.nodes_to_replace_after(IDLE_TIME).is_empty(),
        "an excused node that is being replaced still counts"
    );
    world.up += START_TIMEOUT;
    assert_eq!(
        world.replace_next_mps_host(),
        ["n01"],
        "an excused node that does not recover does not stop the others"
    );
}

#[test]
fn several_of_many_mps_hosts_are_replaced_at_a_time_after_one_has_served() {
    let mut world = TestCluster::with_nodes(25);
    assert_eq!(world.replace_next_mps_host(), ["n00"]);
    world.view_of("n00").host = Some(mps_host("n00", "2", false, true));
    assert_eq!(world.replace_next_mps_host(), ["n01", "n02"]);
    world.view_of("n01").host = Some(mps_host("n01", "2", false, true));
    assert_eq!(world.replace_next_mps_host(), ["n03"]);
    // One of two replaced MPS hosts serves, and the other MPS host does not.
    world.view_of("n02").host = Some(mps_host("n02", "2", false, false));
    world.view_of("n03").host = Some(mps_host("n03", "2", false, true));
    world.up += START_TIMEOUT;
    assert!(world.update().stopped);
    assert!(
        world.replace_next_mps_host().is_empty() && !world.rollout.is_withheld("n04"),
        "although one more could be replaced"
    );
}

#[test]
fn a_refused_deletion_withholds_nothing_and_is_retried_later() {
    let mut world = TestCluster::with_nodes(1);
    world.update();
    world.up += IDLE_TIME;
    assert_eq!(world.update().replace.len(), 1);
    world.rollout.record_refusal("n00", world.up);
    let step = world.update();
    assert_eq!((step.replace.len(), step.next, world.rollout.is_withheld("n00")), (0, Some(REFUSAL_BACKOFF), false));
    world.up += REFUSAL_BACKOFF;
    assert_eq!(world.replace_next_mps_host(), ["n00"]);
}

proptest! {
    /// Pods are created and deleted, MPS hosts start slowly, and the operator restarts. No MPS host
    /// is deleted while MPS is used on its node. At most one MPS host is down, and all MPS hosts
    /// are eventually replaced.
    #[test]
    fn all_mps_hosts_are_replaced_without_disturbing_pods(count in 1_usize..5, moves in proptest::collection::vec((0_usize..5, 0_u8..8), 0..200)) {
        let mut world = TestCluster::with_nodes(count);
        let names: Vec<String> = world.nodes.keys().cloned().collect();
        let calm = (0..count * 100).map(|at| (at, 6 + u8::from(at % 2 == 0)));
        let ends = names.iter().enumerate().map(|(at, _)| (at, 1_u8));
        for (at, what) in moves.into_iter().chain(ends).chain(calm) {
            let name = names[at % count].clone();
            let withheld = world.rollout.is_withheld(&name);
            let view = world.nodes.get_mut(&name).unwrap();
            match what {
                // The gatekeeper reserves no shares on a node whose shares are withheld.
                0 if !withheld && view.host.as_ref().is_some_and(|host| host.ready && !host.terminating) => view.busy = Some("a pod".into()),
                1 => view.busy = None,
                2 => world.rollout = Rollout::default(),
                _ => {
                    let next = match view.host.take() {
                        None => Some(mps_host(&name, "2", false, false)),
                        Some(host) if host.terminating => None,
                        Some(host) if !host.outdated => Some(MpsHost { ready: true, ..host }),
                        other => other,
                    };
                    view.host = next;
                }
            }
            world.up += seconds(1);
            let step = world.update();
            for one in &step.replace {
                prop_assert!(world.nodes[&one.node].busy.is_none() && one.host.outdated);
                world.rollout.record_replacement(one, world.up);
                let host = world.nodes.get_mut(&one.node).and_then(|view| view.host.as_mut()).unwrap();
                prop_assert!(!host.terminating, "it was deleted before");
                (host.terminating, host.ready) = (true, false);
            }
            let down = world.nodes.values().filter(|view| view.host.as_ref().is_none_or(|host| !host.ready)).count();
            prop_assert!(down <= 1, "{:?}", world.nodes);
        }
        let is_replaced = |view: &MpsHostView| view.host.as_ref().is_some_and(|host| !host.outdated && host.ready);
        prop_assert!(world.nodes.values().all(is_replaced), "{:?}", world.nodes);
    }
}

/// Replaces an MPS host while the API server returns these answers. Returns the requests and the
/// result.
async fn replace_with_answers(answers: &[(StatusCode, Value)]) -> (Vec<String>, &'static str) {
    let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let client = Client::new(service, "default");
    let watched = MpsHostStores {
        pods: kube::runtime::reflector::store().0,
        revisions: kube::runtime::reflector::store().0,
        namespace: "system".into(),
    };
    let replacement = Replacement { node: "n00".into(), host: mps_host("n00", "1", true, true) };
    let serve = async {
        let mut requests = Vec::new();
        for (status, answer) in answers {
            let (request, reply) = server.next_request().await.unwrap();
            let (parts, body) = request.into_parts();
            let body = String::from_utf8(body.collect_bytes().await.unwrap().to_vec()).unwrap();
            requests.push(format!("{} {} {body}", parts.method, parts.uri).trim().to_owned());
            reply.send_response(
                Response::builder().status(status).body(Body::from(answer.to_string().into_bytes())).unwrap(),
            );
        }
        requests
    };
    let (deleted, requests) = tokio::join!(replace(&client, &watched, &replacement), serve);
    (requests, deleted.as_str())
}

#[tokio::test]
async fn an_mps_host_is_deleted_by_uid_and_only_if_the_api_server_confirms_that_it_is_outdated() {
    let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "hosts", "uid": "s", "controller": true});
    let listed = |numbers: [i64; 2]| {
        let item = |(hash, number): (&str, i64)| json!({"metadata": {"name": hash, "labels": {REVISION_HASH_LABEL: hash}, "ownerReferences": [owner]}, "revision": number});
        let items: Vec<Value> = [OLD_HASH, NEW_HASH].into_iter().zip(numbers).map(item).collect();
        json!({"apiVersion": "apps/v1", "kind": "ControllerRevisionList", "metadata": {}, "items": items})
    };
    let refusal = |code: u16| json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "No", "code": code});
    let (list, delete) = (
        "GET /apis/apps/v1/namespaces/system/controllerrevisions?",
        r#"DELETE /api/v1/namespaces/system/pods/n00-1 {"apiVersion":"v1","kind":"DeleteOptions","preconditions":{"uid":"n00-1"}}"#,
    );
    let done = replace_with_answers(&[(StatusCode::OK, listed([1, 2])), (StatusCode::OK, json!({}))]).await;
    assert_eq!(done, (vec![list.to_owned(), delete.to_owned()], "replaced"));
    // The DaemonSet was rolled back after the decision, so the pod has the newest revision again.
    assert_eq!(replace_with_answers(&[(StatusCode::OK, listed([3, 2]))]).await, (vec![list.to_owned()], "skipped"));
    for (code, end) in [(409, "skipped"), (404, "skipped"), (403, "failed"), (500, "failed")] {
        let status = StatusCode::from_u16(code).unwrap();
        assert_eq!(
            replace_with_answers(&[(StatusCode::OK, listed([1, 2])), (status, refusal(code))]).await.1,
            end,
            "{code}"
        );
    }
    assert_eq!(replace_with_answers(&[(StatusCode::FORBIDDEN, refusal(403))]).await.1, "failed");
}
