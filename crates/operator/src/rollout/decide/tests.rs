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
use crate::rollout::hosts::{HASH, Hosts, Newest, Revision, Watched, by_node};
use crate::rollout::replace::replace;
use crate::rollout::view::Mps;

const OLD: &str = "old";
const NEW: &str = "new";

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn of<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn revision(set: &str, hash: &str, number: i64) -> Revision {
    let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "hosts", "uid": set, "controller": true});
    of(json!({"metadata": {"labels": {HASH: hash}, "ownerReferences": [owner]}, "revision": number}))
}

/// A pod of the set `s`.
fn pod(name: &str, node: &str, hash: &str, leaving: bool) -> Arc<AgentPod> {
    let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "hosts", "uid": "s", "controller": true});
    let mut pod = json!({"metadata": {"name": name, "namespace": "system", "uid": format!("{name}-uid"), "labels": {HASH: hash}, "ownerReferences": [owner]},
        "spec": {"nodeName": node}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    if leaving {
        pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
    }
    Arc::new(of(pod))
}

#[test]
fn the_newest_revision_is_the_one_with_the_highest_number_though_it_was_there_before() {
    let all = [revision("s", "a", 3), revision("s", "b", 2), revision("other", "c", 9), Revision::default()];
    let newest = Newest::of(&all);
    assert!(newest.is_outdated("s", "b") && !newest.is_outdated("s", "a"));
    assert!(newest.is_outdated("s", ""), "a pod of before there were revisions");
    assert!(!newest.is_outdated("unknown", "b") && !Newest::default().is_outdated("s", "b"));
}

#[test]
fn of_two_hosts_of_a_node_the_one_that_stays_is_its_host() {
    let hosts = Hosts {
        pods: vec![pod("z", "n", NEW, false), pod("a", "n", OLD, true), pod("b", "m", OLD, true)],
        revisions: vec![Arc::new(revision("s", OLD, 1)), Arc::new(revision("s", NEW, 2))],
    };
    let found = by_node(&hosts, &Newest::of(hosts.revisions.iter().map(AsRef::as_ref)));
    let n = &found["n"];
    assert_eq!(
        (n.pod.as_str(), n.uid.as_str(), n.outdated, n.ready, n.leaving),
        ("system/z", "z-uid", false, true, false)
    );
    assert_eq!(n.set, ("hosts".to_owned(), "s".to_owned()));
    let m = &found["m"];
    assert!(m.outdated && m.leaving && !m.ready);
}

/// A node with one GPU, of which this is told.
fn gpu_node(spec: Value, gpu: &Value) -> GpuNode {
    let mut whole = json!({"uuid": "G", "index": 0, "model": "H100", "memoryMib": 1, "sms": 1, "mode": "Mps", "health": {"healthy": true},
        "slices": [{"device": "G", "resource": "nvidia.com/gpu-mps", "total": 10, "inUse": 0, "unhealthy": 0}],
        "mps": [{"device": "G", "state": "Active"}]});
    whole.as_object_mut().unwrap().extend(gpu.as_object().unwrap().clone());
    let gpus: Vec<GpuStatus> = vec![of(whole)];
    let mut node = GpuNode::new("n", of(spec));
    node.metadata.generation = Some(4);
    let status = GpuNodeStatus { agent_version: "1".into(), observed_generation: 4, gpus, ..GpuNodeStatus::default() };
    node.status = Some(status);
    node
}

fn held(resource: &str) -> Value {
    json!([{"pod": "team/p", "container": "main", "resource": resource, "device": "G", "ids": ["G::0"]}])
}

#[test]
fn a_node_is_idle_only_where_its_agent_says_that_nobody_has_shares() {
    let user = |node: &GpuNode, ready| Mps::of(node, ready).user;
    let idle = gpu_node(json!({}), &json!({}));
    assert_eq!(user(&idle, true), None);
    assert_eq!(user(&idle, false).unwrap(), "its agent is not ready");
    let mut unheard = idle.clone();
    unheard.metadata.generation = Some(5);
    assert_eq!(user(&unheard, true).unwrap(), "its agent has not read what was written to it");
    let silent = GpuNode { status: None, ..idle };
    assert!(user(&silent, true).is_some());
    let busy = gpu_node(json!({}), &json!({"allocations": held("nvidia.com/gpu-mps")}));
    assert_eq!(user(&busy, true).unwrap(), "team/p holds 1 of nvidia.com/gpu-mps");
    let slices = json!([{"device": "G", "resource": "nvidia.com/gpu-mps", "total": 10, "inUse": 10, "unhealthy": 0}]);
    let unknown = gpu_node(json!({}), &json!({"slices": slices}));
    assert!(user(&unknown, true).unwrap().starts_with("10 of nvidia.com/gpu-mps"), "nobody can say who has them");
    for other in ["nvidia.com/gpu", "nvidia.com/gpu-timeslice", "nvidia.com/mig-1g.10gb"] {
        assert_eq!(user(&gpu_node(json!({}), &json!({"allocations": held(other)})), true), None, "{other}");
    }
}

#[test]
fn turns_by_another_name_are_no_shares_unless_shares_have_that_name_too() {
    let sliced = json!({"gpus": [{"uuid": "G", "partition": {"timeSlicing": {"resource": "nvidia.com/gpu-gold", "replicas": 4}}}]});
    let turns = json!({"allocations": held("nvidia.com/gpu-gold"), "mode": "TimeSlicing", "slices": [], "mps": []});
    let mps = Mps::of(&gpu_node(sliced.clone(), &turns), true);
    assert_eq!(
        (mps.user.as_deref(), mps.serves("nvidia.com/gpu-gold"), mps.serves("nvidia.com/gpu-mps")),
        (None, false, true)
    );
    assert!(
        Mps::of(&gpu_node(json!({}), &turns), true).user.is_some(),
        "what the spec does not say is believed to be shares"
    );
    // The GPU is still served as shares of that name: pods hold them.
    let slices = json!([{"device": "G", "resource": "nvidia.com/gpu-gold", "total": 4, "inUse": 1, "unhealthy": 0}]);
    let still = json!({"allocations": held("nvidia.com/gpu-gold"), "slices": slices});
    assert!(Mps::of(&gpu_node(sliced, &still), true).user.is_some());
}

#[test]
fn a_daemon_that_does_not_serve_is_told_unless_it_is_the_gpu_that_does_not() {
    let trouble = |gpu: Value| Mps::of(&gpu_node(json!({}), &gpu), true).trouble;
    assert_eq!(trouble(json!({})), None);
    assert_eq!(trouble(json!({"mps": []})), None, "a whole GPU has none");
    let backs_off = json!({"mps": [{"device": "G", "state": "BackOff", "message": "no such file"}]});
    assert_eq!(trouble(backs_off.clone()).unwrap(), "the MPS daemon of G is BackOff: no such file");
    assert_eq!(trouble(json!({"mps": [{"device": "G", "state": ""}]})).unwrap(), "the MPS daemon of G is not there");
    let mut lost = backs_off;
    lost["health"] = json!({"healthy": false, "class": "Lost"});
    assert_eq!(trouble(lost), None);
}

/// A cluster of nodes whose hosts are outdated, in small.
#[derive(Debug, Default)]
struct World {
    nodes: BTreeMap<String, View>,
    rollout: Rollout,
    up: Duration,
}

impl World {
    fn of(count: usize) -> Self {
        let mut world = Self { up: secs(100), ..Self::default() };
        for at in 0..count {
            let view = View { host: Some(host(&format!("n{at:02}"), "1", true, true)), ..View::default() };
            world.nodes.insert(format!("n{at:02}"), view);
        }
        world
    }

    fn at(&mut self, name: &str) -> &mut View {
        self.nodes.get_mut(name).unwrap()
    }

    fn look(&mut self) -> Step {
        self.rollout.look(&self.nodes, self.up)
    }

    /// The nodes whose hosts are to be deleted after a while.
    fn after(&mut self, time: Duration) -> Vec<String> {
        self.up += time;
        self.look().replace.into_iter().map(|one| one.node).collect()
    }

    /// What is to be deleted is, and the watch tells of it.
    fn delete(&mut self) -> Vec<String> {
        let step = self.look();
        for one in &step.replace {
            self.rollout.replaced(one, self.up);
            self.at(&one.node).host = None;
        }
        step.replace.into_iter().map(|one| one.node).collect()
    }

    /// Waits until what serves has served for long enough, closes a node, waits, and deletes its
    /// host.
    fn replace(&mut self) -> Vec<String> {
        self.look();
        self.up += STEADY;
        self.look();
        self.up += SETTLE;
        self.delete()
    }
}

fn host(node: &str, generation: &str, outdated: bool, ready: bool) -> Host {
    Host {
        pod: format!("system/{node}-{generation}"),
        uid: format!("{node}-{generation}"),
        hash: if outdated { OLD } else { NEW }.into(),
        set: ("hosts".into(), "s".into()),
        outdated,
        ready,
        leaving: false,
    }
}

#[test]
fn idle_nodes_are_closed_and_their_hosts_replaced_one_after_the_other() {
    let mut world = World::of(2);
    let step = world.look();
    assert_eq!((step.replace.len(), step.outdated, step.next), (0, 2, Some(SETTLE)));
    assert!(world.rollout.withholds("n00") && !world.rollout.withholds("n01"));
    assert!(world.after(secs(SETTLE.as_secs() - 1)).is_empty(), "not before it has been so for a while");
    world.up += secs(1);
    assert_eq!(world.delete(), ["n00"]);
    for (state, withheld) in [
        (None, true),
        (Some(host("n00", "2", false, false)), true),
        // Its daemons are the agent's to tell.
        (Some(host("n00", "2", false, true)), false),
    ] {
        world.at("n00").host = state;
        world.at("n00").trouble = Some("its daemon is Starting".into());
        assert!(world.after(secs(1)).is_empty());
        assert!(!world.rollout.withholds("n01"), "the other waits for the first to serve");
        assert_eq!(world.rollout.withholds("n00"), withheld);
    }
    world.at("n00").trouble = None;
    assert_eq!(world.replace(), ["n01"]);
    world.at("n01").host = Some(host("n01", "2", false, true));
    assert_eq!(world.look().next, Some(STEADY));
    world.up += STEADY;
    let step = world.look();
    assert_eq!((step, world.rollout.away.len(), world.rollout.asked.len()), (Step::default(), 0, 0));
}

#[test]
fn a_node_in_use_stays_and_so_does_one_that_comes_into_use_while_it_is_closed() {
    let mut world = World::of(1);
    world.at("n00").busy = Some("team/p holds 2 of nvidia.com/gpu-mps".into());
    let step = world.look();
    assert_eq!(step.waiting["n00"], "team/p holds 2 of nvidia.com/gpu-mps");
    assert!(world.after(secs(3600)).is_empty() && !world.rollout.withholds("n00"));
    world.at("n00").busy = None;
    world.look();
    assert!(world.rollout.withholds("n00"));
    world.at("n00").busy = Some("a pod without a gate".into());
    assert!(world.after(SETTLE).is_empty() && !world.rollout.withholds("n00"));
    world.at("n00").busy = None;
    assert!(world.after(SETTLE).is_empty(), "it starts anew");
    assert_eq!(world.after(SETTLE), ["n00"]);
}

#[test]
fn no_host_is_deleted_twice_and_its_successor_not_at_all() {
    let mut world = World::of(1);
    world.look();
    world.up += SETTLE;
    let step = world.look();
    world.rollout.replaced(&step.replace[0], world.up);
    // The watch has not told it.
    assert!(world.after(secs(10)).is_empty() && world.rollout.withholds("n00"));
    world.at("n00").host.as_mut().unwrap().leaving = true;
    assert!(world.after(secs(10)).is_empty() && world.rollout.withholds("n00"));
    world.at("n00").host = Some(host("n00", "2", false, true));
    assert!(world.after(secs(10)).is_empty() && !world.rollout.withholds("n00"));
    // Another has its name's place while it is closed.
    let mut world = World::of(1);
    world.look();
    world.at("n00").host = Some(host("n00", "2", true, true));
    assert!(world.after(SETTLE).is_empty(), "it is another, and closed anew");
}

#[test]
fn a_host_that_does_not_serve_in_time_stops_it_all_until_it_does_or_the_set_is_changed() {
    let mut world = World::of(3);
    assert_eq!(world.replace(), ["n00"]);
    world.at("n00").host = Some(host("n00", "2", false, false));
    assert!(world.after(secs(PATIENCE.as_secs() - 1)).is_empty() && world.rollout.withholds("n00"));
    world.up += secs(1);
    let step = world.look();
    let (message, set) = step.news.unwrap();
    assert!(step.stopped && message.contains("node n00: system/n00-2 is not ready"), "{message}");
    assert_eq!(
        (set.kind.as_deref(), set.name.as_deref(), set.namespace.as_deref()),
        (Some("DaemonSet"), Some("hosts"), Some("system"))
    );
    assert!(!world.rollout.withholds("n00"), "from here on its agent says what can be given");
    world.up += secs(1);
    let again = world.look();
    assert!(again.stopped && again.news.is_none() && again.replace.is_empty(), "told once");
    assert!(world.after(secs(3600)).is_empty() && !world.rollout.withholds("n01"));
    // It serves after all.
    let mut served = World { nodes: world.nodes.clone(), rollout: world.rollout.clone(), up: world.up };
    served.at("n00").host.as_mut().unwrap().ready = true;
    assert_eq!(served.replace(), ["n01"]);
    // Or the bad release is followed by another: those that serve come first.
    world.at("n00").host = Some(host("n00", "2", true, false));
    assert_eq!(world.replace(), ["n01"]);
    world.at("n01").host = Some(host("n01", "3", false, true));
    assert_eq!(world.replace(), ["n02"]);
    world.at("n02").host = Some(host("n02", "3", false, true));
    assert_eq!(world.replace(), ["n00"]);
}

#[test]
fn a_host_that_starts_and_ends_again_and_again_serves_in_no_moment() {
    let mut world = World::of(3);
    assert_eq!(world.replace(), ["n00"]);
    world.up += secs(1);
    let began = world.up;
    let mut second = 0;
    while !world.look().stopped {
        world.up += secs(1);
        second += 1;
        world.at("n00").host = Some(host("n00", "2", false, second % 20 < STEADY.as_secs()));
        assert!(world.look().replace.is_empty() && !world.rollout.withholds("n01"), "{second}");
        assert!(world.up < began + PATIENCE + secs(20));
    }
    // Of a larger cluster one more may be closed already, and stays for now.
    let mut world = World::of(20);
    world.at("n00").host = Some(host("n00", "2", false, true));
    world.look();
    assert!(world.rollout.withholds("n01") && world.rollout.withholds("n02"));
    world.at("n00").host = None;
    world.look();
    assert!(!world.rollout.withholds("n01"), "nobody has shown that the release serves");
}

#[test]
fn daemons_that_do_not_come_up_stop_it_too_and_keep_nothing_from_pods() {
    let mut world = World::of(2);
    assert_eq!(world.replace(), ["n00"]);
    let view = world.at("n00");
    (view.host, view.trouble) = (Some(host("n00", "2", false, true)), Some("the MPS daemon of G is BackOff".into()));
    assert!(world.after(secs(1)).is_empty() && !world.rollout.withholds("n00"));
    assert!(world.after(PATIENCE).is_empty() && world.look().stopped);
}

#[test]
fn who_leads_next_goes_on_from_what_is_there() {
    let mut world = World::of(3);
    assert_eq!(world.replace(), ["n00"]);
    let mut leaving = host("n00", "1", true, false);
    leaving.leaving = true;
    for state in [Some(leaving), None, Some(host("n00", "2", false, false))] {
        world.at("n00").host = state;
        world.rollout = Rollout::default();
        assert!(world.after(SETTLE).is_empty() && world.after(SETTLE).is_empty());
        assert!(world.rollout.withholds("n00") && !world.rollout.withholds("n01"));
    }
    world.at("n00").host = Some(host("n00", "2", false, true));
    world.rollout = Rollout::default();
    assert_eq!(world.replace(), ["n01"]);
}

#[test]
fn nodes_that_are_out_of_service_stop_nobody_and_are_not_replaced_at_once_either() {
    let mut world = World::of(3);
    // One is gone for days.
    world.at("n02").host.as_mut().unwrap().ready = false;
    (world.at("n02").host.as_mut().unwrap().outdated, world.at("n02").excused) = (false, true);
    world.look();
    world.up += PATIENCE;
    assert!(!world.look().stopped);
    world.at("n00").excused = true;
    assert_eq!(world.after(SETTLE), ["n00"]);
    assert_eq!(world.delete(), ["n00"]);
    assert!(world.after(SETTLE).is_empty() && world.after(SETTLE).is_empty(), "one is on its way, whoever excuses it");
    world.up += PATIENCE;
    assert_eq!(world.replace(), ["n01"], "it did not come back, and nobody expects it");
}

#[test]
fn of_many_hosts_several_go_at_once_when_one_has_shown_that_the_release_serves() {
    let mut world = World::of(25);
    assert_eq!(world.replace(), ["n00"]);
    world.at("n00").host = Some(host("n00", "2", false, true));
    assert_eq!(world.replace(), ["n01", "n02"]);
    world.at("n01").host = Some(host("n01", "2", false, true));
    assert_eq!(world.replace(), ["n03"]);
    // Two are on their way; one comes and the other does not.
    world.at("n02").host = Some(host("n02", "2", false, false));
    world.at("n03").host = Some(host("n03", "2", false, true));
    world.up += PATIENCE;
    assert!(world.look().stopped);
    assert!(world.replace().is_empty() && !world.rollout.withholds("n04"), "though another might go");
}

#[test]
fn what_the_api_server_refuses_keeps_nothing_from_pods_and_is_tried_again_later() {
    let mut world = World::of(1);
    world.look();
    world.up += SETTLE;
    assert_eq!(world.look().replace.len(), 1);
    world.rollout.refused("n00", world.up);
    let step = world.look();
    assert_eq!((step.replace.len(), step.next, world.rollout.withholds("n00")), (0, Some(REFUSED), false));
    world.up += REFUSED;
    assert_eq!(world.replace(), ["n00"]);
}

proptest! {
    /// Pods come and go, hosts take their time, the operator is replaced: never is a host deleted
    /// where somebody uses MPS, never are two down, and in the end all are new.
    #[test]
    fn whatever_comes_and_goes_nobody_is_hit_and_all_are_replaced(count in 1_usize..5, moves in proptest::collection::vec((0_usize..5, 0_u8..8), 0..200)) {
        let mut world = World::of(count);
        let names: Vec<String> = world.nodes.keys().cloned().collect();
        let calm = (0..count * 100).map(|at| (at, 6 + u8::from(at % 2 == 0)));
        let ends = names.iter().enumerate().map(|(at, _)| (at, 1_u8));
        for (at, what) in moves.into_iter().chain(ends).chain(calm) {
            let name = names[at % count].clone();
            let withheld = world.rollout.withholds(&name);
            let view = world.nodes.get_mut(&name).unwrap();
            match what {
                // Nothing is held where nothing may be.
                0 if !withheld && view.host.as_ref().is_some_and(|host| host.ready && !host.leaving) => view.busy = Some("a pod".into()),
                1 => view.busy = None,
                2 => world.rollout = Rollout::default(),
                _ => {
                    let next = match view.host.take() {
                        None => Some(host(&name, "2", false, false)),
                        Some(host) if host.leaving => None,
                        Some(host) if !host.outdated => Some(Host { ready: true, ..host }),
                        other => other,
                    };
                    view.host = next;
                }
            }
            world.up += secs(1);
            let step = world.look();
            for one in &step.replace {
                prop_assert!(world.nodes[&one.node].busy.is_none() && one.host.outdated);
                world.rollout.replaced(one, world.up);
                let host = world.nodes.get_mut(&one.node).and_then(|view| view.host.as_mut()).unwrap();
                prop_assert!(!host.leaving, "it was told before");
                (host.leaving, host.ready) = (true, false);
            }
            let down = world.nodes.values().filter(|view| view.host.as_ref().is_none_or(|host| !host.ready)).count();
            prop_assert!(down <= 1, "{:?}", world.nodes);
        }
        let new = |view: &View| view.host.as_ref().is_some_and(|host| !host.outdated && host.ready);
        prop_assert!(world.nodes.values().all(new), "{:?}", world.nodes);
    }
}

/// What is asked of the API server to replace a host, when it answers like this; and how that ends.
async fn asked(answers: &[(StatusCode, Value)]) -> (Vec<String>, &'static str) {
    let (service, mut server) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let client = Client::new(service, "default");
    let watched = Watched {
        pods: kube::runtime::reflector::store().0,
        revisions: kube::runtime::reflector::store().0,
        namespace: "system".into(),
    };
    let replacement = Replacement { node: "n00".into(), host: host("n00", "1", true, true) };
    let serve = async {
        let mut asked = Vec::new();
        for (status, answer) in answers {
            let (request, reply) = server.next_request().await.unwrap();
            let (parts, body) = request.into_parts();
            let body = String::from_utf8(body.collect_bytes().await.unwrap().to_vec()).unwrap();
            asked.push(format!("{} {} {body}", parts.method, parts.uri).trim().to_owned());
            reply.send_response(
                Response::builder().status(status).body(Body::from(answer.to_string().into_bytes())).unwrap(),
            );
        }
        asked
    };
    let (deleted, asked) = tokio::join!(replace(&client, &watched, &replacement), serve);
    (asked, deleted.as_str())
}

#[tokio::test]
async fn a_host_is_deleted_by_its_uid_and_only_if_it_is_outdated_by_what_the_api_server_says_then() {
    let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "hosts", "uid": "s", "controller": true});
    let listed = |numbers: [i64; 2]| {
        let item = |(hash, number): (&str, i64)| json!({"metadata": {"name": hash, "labels": {HASH: hash}, "ownerReferences": [owner]}, "revision": number});
        let items: Vec<Value> = [OLD, NEW].into_iter().zip(numbers).map(item).collect();
        json!({"apiVersion": "apps/v1", "kind": "ControllerRevisionList", "metadata": {}, "items": items})
    };
    let refused = |code: u16| json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "No", "code": code});
    let (list, delete) = (
        "GET /apis/apps/v1/namespaces/system/controllerrevisions?",
        r#"DELETE /api/v1/namespaces/system/pods/n00-1 {"apiVersion":"v1","kind":"DeleteOptions","preconditions":{"uid":"n00-1"}}"#,
    );
    let done = asked(&[(StatusCode::OK, listed([1, 2])), (StatusCode::OK, json!({}))]).await;
    assert_eq!(done, (vec![list.to_owned(), delete.to_owned()], "replaced"));
    // The set was put back meanwhile: the pod is of the newest again.
    assert_eq!(asked(&[(StatusCode::OK, listed([3, 2]))]).await, (vec![list.to_owned()], "gone"));
    for (code, end) in [(409, "gone"), (404, "gone"), (403, "failed"), (500, "failed")] {
        let status = StatusCode::from_u16(code).unwrap();
        assert_eq!(asked(&[(StatusCode::OK, listed([1, 2])), (status, refused(code))]).await.1, end, "{code}");
    }
    assert_eq!(asked(&[(StatusCode::FORBIDDEN, refused(403))]).await.1, "failed");
}
