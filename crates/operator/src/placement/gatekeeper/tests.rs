use std::sync::Arc;

use cleave_api::names::GATE;
use cleave_plan::affinity::HOSTNAME;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::turn::Opening;
use super::*;
use crate::rollout::Hosts;

mod stranded;

use stranded::refuse;

const MPS: &str = "nvidia.com/gpu-mps";

fn of<T: serde::de::DeserializeOwned>(value: Value) -> T {
    let text = value.to_string();
    serde_json::from_value(value).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// A cluster as it is, from which watches tell; every change of an object raises its version.
#[derive(Debug, Clone, Default)]
struct World {
    version: u64,
    nodes: BTreeMap<String, Value>,
    gpu_nodes: BTreeMap<String, Value>,
    agents: BTreeMap<String, Value>,
    pods: BTreeMap<String, Value>,
    /// MPS hosts' pods, where they are to be replaced.
    hosts: Option<BTreeMap<String, Value>>,
    volume_claims: Vec<Value>,
    volumes: Vec<Value>,
    namespaces: Vec<Value>,
}

impl World {
    fn raise(&mut self, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        object
    }

    /// A node whose GPUs have ten shares each, of which so many are used by pods that nobody here
    /// knows.
    fn node(mut self, name: &str, used: &[u32]) -> Self {
        let node = json!({"metadata": {"name": name, "uid": name, "labels": {HOSTNAME: name}},
            "status": {"allocatable": {"cpu": "8", "pods": "110", MPS: (used.len() * 10).to_string()}}});
        let node = self.raise(node);
        self.nodes.insert(name.into(), node);
        let gpus: Vec<Value> = used
            .iter()
            .enumerate()
            .map(|(index, used)| {
                json!({"uuid": format!("{name}-GPU-{index}"), "index": index, "model": "H100", "memoryMib": 81559, "sms": 132, "mode": "Mps",
                    "health": {"healthy": true}, "allocations": [],
                    "slices": [{"device": format!("{name}-GPU-{index}"), "resource": MPS, "total": 10, "inUse": used, "unhealthy": 0}]})
            })
            .collect();
        let object = json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name}, "spec": {},
            "status": {"agentVersion": "1", "gpus": gpus}});
        let object = self.raise(object);
        self.gpu_nodes.insert(name.into(), object);
        let agent = json!({"metadata": {"name": format!("agent-{name}")}, "spec": {"nodeName": name},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        let agent = self.raise(agent);
        self.agents.insert(name.into(), agent);
        self
    }

    /// A node's MPS host, of the first revision or the second.
    fn host(mut self, node: &str, hash: &str) -> Self {
        let mut host = revision(hash, 0);
        let named = json!({"name": format!("host-{node}"), "namespace": "system", "uid": format!("{hash}-{node}")});
        host["metadata"].as_object_mut().unwrap().extend(named.as_object().unwrap().clone());
        host["spec"] = json!({"nodeName": node});
        host["status"] = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        self.hosts.get_or_insert_default().insert(node.into(), host);
        self
    }

    /// A pod at the gate that asks for shares.
    fn pod(self, name: &str, shares: u32) -> Self {
        self.pod_with(name, shares, json!({}))
    }

    fn pod_with(mut self, name: &str, shares: u32, mut spec: Value) -> Self {
        let mut pod = json!({"metadata": {"name": name, "namespace": "team", "uid": format!("{name}-{}", self.version)},
            "spec": {"schedulingGates": [{"name": GATE}],
                "containers": [{"name": "main", "resources": {"limits": {MPS: shares.to_string()}}}]}});
        pod["spec"].as_object_mut().unwrap().append(spec.as_object_mut().unwrap());
        let pod = self.raise(pod);
        self.pods.insert(format!("team/{name}"), pod);
        self
    }

    fn change(&mut self, of: fn(&mut Self) -> &mut BTreeMap<String, Value>, name: &str, how: impl FnOnce(&mut Value)) {
        let mut object = of(self)[name].clone();
        how(&mut object);
        let object = self.raise(object);
        of(self).insert(name.into(), object);
    }

    fn told(&self) -> Cluster {
        let pod = |value: &Value| {
            let mut pod: PodObject = of(value.clone());
            pod.trim();
            Arc::new(pod)
        };
        Cluster {
            pods: self.pods.values().map(pod).collect(),
            nodes: self.nodes.values().map(|node| Arc::new(of(node.clone()))).collect(),
            gpu_nodes: self.gpu_nodes.values().map(|object| Arc::new(of(object.clone()))).collect(),
            agents: self.agents.values().map(|agent| Arc::new(of(agent.clone()))).collect(),
            hosts: self.hosts.as_ref().map(|hosts| Hosts {
                pods: hosts.values().map(|host| Arc::new(of(host.clone()))).collect(),
                revisions: [("old", 1), ("new", 2)].map(|(hash, number)| Arc::new(of(revision(hash, number)))).into(),
            }),
            volume_claims: self.volume_claims.iter().map(|claim| Arc::new(of(claim.clone()))).collect(),
            volumes: self.volumes.iter().map(|volume| Arc::new(of(volume.clone()))).collect(),
            namespaces: self.namespaces.iter().map(|namespace| Arc::new(of(namespace.clone()))).collect(),
        }
    }

    /// What the watch of pods tells, when it has told this: an object is made anew only where it
    /// has changed.
    fn told_since(&self, before: &[Arc<PodObject>]) -> Vec<Arc<PodObject>> {
        let same = |pod: &Arc<PodObject>| {
            let id = |pod: &PodObject| (pod.name_any(), pod.resource_version());
            before.iter().find(|known| id(known) == id(pod)).cloned()
        };
        self.told().pods.into_iter().map(|pod| same(&pod).unwrap_or(pod)).collect()
    }

    /// As the API server would: all or nothing.
    fn patch(&mut self, opening: &Opening) -> bool {
        let Some(mut pod) = self.pods.get(&opening.pod).cloned() else { return false };
        for operation in opening.patch.as_array().unwrap() {
            let path = operation["path"].as_str().unwrap();
            let (parent, last) = path.rsplit_once('/').unwrap();
            let last = last.replace("~1", "/");
            match operation["op"].as_str().unwrap() {
                "test" if pod.pointer(path) != Some(&operation["value"]) => return false,
                "test" => {}
                "remove" => drop(pod.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(&last).unwrap()),
                _ => match pod.pointer_mut(parent).unwrap_or_else(|| panic!("no {parent}")) {
                    Value::Array(list) => list.push(operation["value"].clone()),
                    parent => parent[last.as_str()] = operation["value"].clone(),
                },
            }
        }
        let pod = self.raise(pod);
        self.pods.insert(opening.pod.clone(), pod);
        true
    }

    fn units(pod: &Value) -> u32 {
        pod["spec"]["containers"][0]["resources"]["limits"][MPS].as_str().unwrap().parse().unwrap()
    }

    fn placement(pod: &Value) -> Option<Placement> {
        Placement::parse(pod["metadata"]["annotations"][cleave_api::placement::ANNOTATION].as_str()?).ok()
    }
}

/// What the `DaemonSet` of MPS hosts owns.
fn revision(hash: &str, number: i64) -> Value {
    let owner =
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "hosts", "uid": "set", "controller": true});
    json!({"metadata": {"labels": {"controller-revision-hash": hash}, "ownerReferences": [owner]}, "revision": number})
}

/// The nodes whose MPS hosts are to be deleted.
fn replaced(turn: &Turn) -> Vec<&str> {
    turn.rollout.iter().flat_map(|step| &step.replace).map(|one| one.node.as_str()).collect()
}

fn at(seconds: u64) -> Now {
    Now { up: Duration::from_secs(seconds), epoch: 1_000_000 + seconds }
}

fn look(keeper: &mut Gatekeeper, world: &World, seconds: u64) -> Turn {
    keeper.look(&world.told(), &BTreeMap::new(), at(seconds))
}

fn opened(turn: &Turn) -> Vec<(&str, &'static str)> {
    turn.openings.iter().map(|opening| (opening.pod.as_str(), opening.why.as_str())).collect()
}

fn held(opening: &Opening) -> Placement {
    match &opening.why {
        Why::Held(placement) => placement.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pod_that_fits_is_released_to_its_node_with_an_annotation_of_its_reservation() {
    let mut world = World::default().node("n1", &[8, 5, 0]).pod("a", 3);
    let turn = look(&mut Gatekeeper::default(), &world, 0);
    assert_eq!(opened(&turn), [("team/a", "held")]);
    assert!(world.patch(&turn.openings[0]));
    let pod = &world.pods["team/a"];
    assert_eq!(pod["spec"].get("schedulingGates"), None);
    let terms =
        &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    assert_eq!(*terms, json!([{"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": ["n1"]}]}]));
    let expected = ReservedUnits { resource: MPS.into(), units: 3, device: "n1-GPU-1".into() };
    assert_eq!(
        World::placement(pod).unwrap().nodes,
        BTreeMap::from([("n1".to_owned(), vec![expected])]),
        "where it is tightest"
    );
}

#[test]
fn free_shares_of_several_gpus_are_no_room_until_one_gpu_has_enough() {
    let mut world = World::default().node("n1", &[7, 7]).pod("five", 5).pod("three", 3);
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    assert_eq!(opened(&turn), [("team/three", "held")], "who fits does not wait for who does not");
    assert!(turn.waiting["team/five"].message.contains("no device has 5 nvidia.com/gpu-mps free"), "{turn:?}");
    world.change(|world| &mut world.gpu_nodes, "n1", |node| node["status"]["gpus"][1]["slices"][0]["inUse"] = json!(4));
    assert_eq!(opened(&look(&mut keeper, &world, 1)), [("team/five", "held")]);
}

#[test]
fn what_is_held_for_one_is_not_held_for_another_whatever_the_watches_have_told() {
    let world = World::default().node("n1", &[4]).pod("a", 4).pod("b", 4);
    let mut keeper = Gatekeeper::default();
    assert_eq!(opened(&look(&mut keeper, &world, 0)), [("team/a", "held")]);
    let turn = look(&mut keeper, &world, 1);
    assert_eq!(opened(&turn), [], "the watch has not told that a was let through");
    assert!(turn.waiting.contains_key("team/b"));
    keeper.failed("team/a");
    assert_eq!(opened(&look(&mut keeper, &world, 2)), [("team/a", "held")], "it could not be written");
}

#[test]
fn a_pod_whose_patch_is_always_refused_takes_room_from_nobody_and_is_told_why() {
    let world = World::default().node("n1", &[4]).pod("a", 4).pod("b", 4);
    let mut keeper = Gatekeeper::default();
    let mut second = 0;
    // The pod may have changed meanwhile: that is no reason to let it wait.
    for _ in 0..REFUSALS {
        assert_eq!(opened(&look(&mut keeper, &world, second)), [("team/a", "held")]);
        keeper.refused("team/a", "metadata.annotations: Too long", at(second).up);
    }
    let turn = look(&mut keeper, &world, second);
    assert_eq!(opened(&turn), [("team/b", "held")]);
    let waits = &turn.waiting["team/a"];
    assert_eq!(waits.reason, Reason::Malformed);
    assert!(waits.message.ends_with("let it through: metadata.annotations: Too long"), "{}", waits.message);
    assert_eq!(turn.next, Some(LEFT_ALONE));
    keeper.failed("team/b");
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let pause = look(&mut keeper, &world, second).next.unwrap();
        keeper.failed("team/b");
        pauses.push(pause.as_secs());
        second += pause.as_secs();
        assert_eq!(opened(&look(&mut keeper, &world, second)), [("team/a", "held")], "it is tried again");
        keeper.refused("team/a", "no", at(second).up);
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
}

#[test]
fn the_most_important_and_then_the_oldest_come_first() {
    let created = |minute: u32| json!(format!("2026-01-01T00:{minute:02}:00Z"));
    let mut world = World::default().node("n1", &[0]).pod("young", 10).pod("old", 10).pod_with(
        "important",
        10,
        json!({"priority": 7}),
    );
    for (name, minute) in [("young", 9), ("old", 1), ("important", 10)] {
        world.change(
            |world| &mut world.pods,
            &format!("team/{name}"),
            |pod| pod["metadata"]["creationTimestamp"] = created(minute),
        );
    }
    for expected in ["important", "old", "young"] {
        let turn = look(&mut Gatekeeper::default(), &world, 0);
        assert_eq!(opened(&turn), [(format!("team/{expected}").as_str(), "held")]);
        world.pods.remove(&format!("team/{expected}"));
    }
}

#[test]
fn a_gate_of_somebody_else_is_waited_for() {
    let queued = json!({"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}, {"name": GATE}]});
    let mut world = World::default().node("n1", &[0]).pod_with("a", 1, queued);
    let mut keeper = Gatekeeper::default();
    assert_eq!(look(&mut keeper, &world, 0), Turn::default());
    world.change(|world| &mut world.pods, "team/a", |pod| pod["spec"]["schedulingGates"] = json!([{"name": GATE}]));
    assert_eq!(opened(&look(&mut keeper, &world, 1)), [("team/a", "held")]);
}

#[test]
fn what_no_gpu_can_hold_is_released_after_minutes_to_larger_gpus_and_no_node_is_named() {
    let mut world = World::default().node("n1", &[0, 0]).pod("a", 11);
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    assert_eq!((opened(&turn), turn.next), (vec![], Some(PATIENCE)), "a policy may just have been applied");
    assert_eq!(opened(&look(&mut keeper, &world, PATIENCE.as_secs() - 1)), []);
    let turn = look(&mut keeper, &world, PATIENCE.as_secs());
    assert_eq!(opened(&turn), [("team/a", "never")]);
    assert!(matches!(&turn.openings[0].why, Why::Never(why) if why.contains("the largest has 10")), "{turn:?}");
    assert!(world.patch(&turn.openings[0]));
    let spec = &world.pods["team/a"]["spec"];
    let terms =
        &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let larger = json!({"key": "largest.cleave.dev/gpu-mps", "operator": "Gt", "values": ["10"]});
    assert_eq!(terms[0]["matchExpressions"], json!([larger]));
    assert_eq!(World::placement(&world.pods["team/a"]), None);
}

#[test]
fn a_pod_for_which_gpus_are_cut_waits_for_that() {
    let ten = json!({"containers": [{"resources": {"limits": {"nvidia.com/gpu-10gb": "1"}}}]});
    let world = World::default().node("n1", &[0]).pod_with("a", 1, ten);
    let mut keeper = Gatekeeper::default();
    let told = |reason| BTreeMap::from([("team/a".to_owned(), Waiting { reason, message: "cut for it".into() })]);
    for second in [0, 10] {
        let turn = keeper.look(&world.told(), &told(Reason::Repartitioning), at(second));
        assert_eq!((opened(&turn), turn.waiting["team/a"].message.as_str()), (vec![], "cut for it"));
    }
    keeper.look(&world.told(), &told(Reason::Malformed), at(11));
    let later = at(11 + PATIENCE.as_secs());
    assert_eq!(opened(&keeper.look(&world.told(), &told(Reason::Malformed), later)), [("team/a", "never")]);
}

#[test]
fn what_is_not_ours_waits_for_nobody() {
    let mig = json!({"containers": [{"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}]});
    let plain = json!({"containers": [{"resources": {"limits": {"cpu": "1"}}}]});
    let mut world = World::default().node("n1", &[0]).pod_with("mig", 1, mig).pod_with("plain", 1, plain);
    world.nodes.insert(
        "other".into(),
        json!({"metadata": {"name": "other", "resourceVersion": "1"},
        "status": {"allocatable": {"nvidia.com/mig-1g.10gb": "7"}}}),
    );
    let turn = look(&mut Gatekeeper::default(), &world, 0);
    assert_eq!(opened(&turn), [("team/mig", "not_ours"), ("team/plain", "not_ours")]);
    assert!(world.patch(&turn.openings[0]));
    assert_eq!(world.pods["team/mig"]["spec"].get("affinity"), None);
}

#[test]
fn every_term_of_the_pods_own_affinity_is_narrowed() {
    let own = json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}, {}]);
    let affinity = json!({"affinity": {"nodeAffinity":
        {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": own}}}});
    let mut world = World::default().node("n1", &[0]).pod_with("a", 1, affinity);
    let turn = look(&mut Gatekeeper::default(), &world, 0);
    assert!(world.patch(&turn.openings[0]));
    let spec = &world.pods["team/a"]["spec"];
    let terms =
        &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let ours = json!({"key": HOSTNAME, "operator": "In", "values": ["n1"]});
    assert_eq!((&terms[0]["matchExpressions"][1], &terms[1]["matchExpressions"][0]), (&ours, &ours));
    assert_eq!(terms[2], json!({}), "a term that matches nothing stays so");
}

#[test]
fn a_node_that_cannot_run_the_pod_has_no_room_for_it() {
    let busy = json!({"containers": [{"resources": {"requests": {"cpu": "6"}, "limits": {MPS: "2"}}}]});
    let world = |other: Value| {
        World::default()
            .node("n1", &[0])
            .pod_with("bound", 1, json!({"nodeName": "n1", "schedulingGates": [], "containers": [{"resources": {"requests": {"cpu": "4"}}}]}))
            .pod_with("a", 2, other)
    };
    let turn = look(&mut Gatekeeper::default(), &world(busy), 0);
    let message = &turn.waiting["team/a"].message;
    assert_eq!(message, "No eligible GPU node: 1 of 1: not enough CPU, memory or another resource (n1)");
    let elsewhere = world(json!({"nodeSelector": {"zone": "b"}}));
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &elsewhere, 0);
    let message = &turn.waiting["team/a"].message;
    assert_eq!(message, "No eligible GPU node: 1 of 1: no label zone=b, which the pod selects (n1)");
    assert_eq!(
        opened(&look(&mut keeper, &elsewhere, PATIENCE.as_secs())),
        [("team/a", "never")],
        "no node may be used"
    );
}

#[test]
fn a_gpu_that_cannot_serve_now_is_waited_for() {
    type Break = fn(&mut World);
    let cases: [Break; 5] = [
        |world| {
            world.change(
                |world| &mut world.agents,
                "n1",
                |pod| pod["status"]["conditions"][0]["status"] = json!("False"),
            );
        },
        |world| {
            world.change(
                |world| &mut world.gpu_nodes,
                "n1",
                |node| node["status"]["gpus"][0]["health"] = json!({"healthy": false}),
            );
        },
        |world| {
            world.change(
                |world| &mut world.gpu_nodes,
                "n1",
                |node| node["metadata"]["annotations"] = json!({"cleave.dev/cordon": "n1-GPU-0=new fan"}),
            );
        },
        |world| {
            world.change(
                |world| &mut world.gpu_nodes,
                "n1",
                |node| node["status"]["gpus"][0]["slices"][0]["unhealthy"] = json!(10),
            );
        },
        |world| {
            world.change(
                |world| &mut world.gpu_nodes,
                "n1",
                |node| {
                    node["spec"] = json!({"planId": "p", "gpus": [{"uuid": "n1-GPU-0", "enforcement": "Report",
                    "partition": {"whole": {"resource": "nvidia.com/gpu"}}}]});
                },
            );
        },
    ];
    for (case, break_it) in cases.into_iter().enumerate() {
        let mut world = World::default().node("n1", &[0]).pod("a", 2);
        break_it(&mut world);
        let mut keeper = Gatekeeper::default();
        for second in [0, 5] {
            let turn = look(&mut keeper, &world, second);
            assert_eq!((opened(&turn), turn.waiting.len()), (vec![], 1), "case {case}");
        }
    }
}

#[test]
fn a_pod_whose_volume_is_nowhere_yet_gets_a_choice_and_room_is_held_on_all() {
    let volume = json!({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]});
    let mut world = World::default().node("n1", &[0]).node("n2", &[0]).pod_with("a", 6, volume);
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    assert_eq!(held(&turn.openings[0]).nodes.keys().collect::<Vec<_>>(), ["n1", "n2"]);
    assert!(world.patch(&turn.openings[0]));
    let mut world = world.pod("b", 6);
    assert_eq!(opened(&look(&mut keeper, &world, 1)), []);
    world.change(|world| &mut world.pods, "team/a", |pod| pod["spec"]["nodeName"] = json!("n2"));
    let turn = look(&mut keeper, &world, 2);
    assert_eq!(
        held(&turn.openings[0]).nodes.keys().collect::<Vec<_>>(),
        ["n1"],
        "bound to the other, it gives back the one"
    );
}

#[test]
fn a_pod_that_finds_no_node_in_time_holds_nothing_any_more() {
    let mut world = World::default().node("n1", &[0]).pod("a", 6);
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    assert!(world.patch(&turn.openings[0]));
    refuse(&mut world, "team/a");
    let world = world.pod("b", 6);
    let turn = look(&mut keeper, &world, 1);
    assert_eq!((opened(&turn), turn.next), (vec![], Some(HOLD.checked_sub(Duration::from_secs(1)).unwrap())));
    assert_eq!(opened(&look(&mut keeper, &world, HOLD.as_secs())), [("team/b", "held")]);
}

#[test]
fn what_an_operator_has_noted_whose_clock_was_ahead_is_held_no_longer_than_anything_else() {
    let mut world = World::default().node("n1", &[0]).pod("a", 6);
    let ahead = Now { epoch: at(3_600).epoch, ..at(0) };
    let turn = Gatekeeper::default().look(&world.told(), &BTreeMap::new(), ahead);
    assert!(world.patch(&turn.openings[0]));
    refuse(&mut world, "team/a");
    let world = world.pod("b", 6);
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    assert_eq!((opened(&turn), turn.next), (vec![], Some(HOLD)));
    assert_eq!(opened(&look(&mut keeper, &world, HOLD.as_secs())), [("team/b", "held")]);
    look(&mut keeper, &world, HOLD.as_secs() + 1);
    assert!(keeper.ledger().unwrap().claim("team/a").is_none(), "it is not believed again");
}

#[test]
fn what_a_pod_may_hold_that_is_deleted_before_its_node_told_of_it_is_kept_for_a_while() {
    let mut world = World::default().node("n1", &[0]).pod("a", 6);
    let mut keeper = Gatekeeper::default();
    assert!(world.patch(&look(&mut keeper, &world, 0).openings[0]));
    world.change(|world| &mut world.pods, "team/a", |pod| pod["spec"]["nodeName"] = json!("n1"));
    look(&mut keeper, &world, 1);
    world.pods.clear();
    let world = world.pod("b", 6);
    let turn = look(&mut keeper, &world, 2);
    assert_eq!((opened(&turn), turn.next), (vec![], Some(LINGER)));
    assert_eq!(opened(&look(&mut keeper, &world, 2 + LINGER.as_secs())), [("team/b", "held")]);
}

#[test]
fn a_pod_of_the_same_name_is_another_pod() {
    let mut world = World::default().node("n1", &[0]).pod("a", 6);
    let mut keeper = Gatekeeper::default();
    assert!(world.patch(&look(&mut keeper, &world, 0).openings[0]));
    world.pods.clear();
    let world = world.pod("a", 8);
    assert_eq!(opened(&look(&mut keeper, &world, 1)), [("team/a", "held")]);
}

#[test]
fn who_is_more_important_gets_room_from_who_is_less_and_nobody_takes_it_meanwhile() {
    let mut world = World::default().node("n1", &[0, 0]);
    let mut reality = Reality::default();
    for (name, units, device, priority) in [("low", 7, 0, 1), ("other", 9, 1, 5), ("small", 3, 0, 3)] {
        world = world.pod_with(name, units, json!({"nodeName": "n1", "schedulingGates": [], "priority": priority}));
        reality.given.insert(format!("team/{name}"), (format!("n1-GPU-{device}"), units));
    }
    reality.report(&mut world);
    let mut world = world.pod_with("high", 6, json!({"priority": 9}));
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    let evicted: Vec<(&str, &str)> = turn.evictions.iter().map(|out| (out.pod.as_str(), out.by.as_str())).collect();
    assert_eq!((evicted, opened(&turn)), (vec![("team/low", "team/high")], vec![]), "the least important, on one GPU");
    let told = world.pods["team/low"]["metadata"]["uid"].as_str().unwrap();
    assert_eq!(turn.evictions[0].uid, told);
    world.change(
        |world| &mut world.pods,
        "team/low",
        |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"),
    );
    assert_eq!(look(&mut keeper, &world, 1).evictions, [], "it is on its way out");
    world.pods.remove("team/low");
    reality.given.remove("team/low");
    reality.report(&mut world);
    let world = world.pod_with("newcomer", 6, json!({"priority": 2}));
    let turn = look(&mut keeper, &world, 2);
    assert_eq!(
        (opened(&turn), turn.waiting.len()),
        (vec![("team/high", "held")], 1),
        "the room is kept for whom it was made"
    );
}

#[test]
fn nobody_leaves_for_a_pod_that_waits_its_turn_or_one_that_is_not_more_important() {
    for (spec, why) in
        [(json!({"priority": 9, "preemptionPolicy": "Never"}), "it must not"), (json!({"priority": 1}), "as important")]
    {
        let mut world = World::default().node("n1", &[0, 0]).pod_with(
            "low",
            7,
            json!({"nodeName": "n1", "schedulingGates": [], "priority": 1}),
        );
        let mut reality = Reality::default();
        reality.given.insert("team/low".into(), ("n1-GPU-0".into(), 7));
        reality.given.insert("kube-system/other".into(), ("n1-GPU-1".into(), 7));
        reality.report(&mut world);
        let turn = look(&mut Gatekeeper::default(), &world.pod_with("a", 6, spec), 0);
        assert_eq!((turn.evictions, turn.waiting.len()), (vec![], 1), "{why}");
    }
}

/// Two pods on a GPU each, one of whom has to leave for a third.
fn high_behind_two() -> (World, Reality) {
    let mut world = World::default().node("n1", &[0, 0]);
    let mut reality = Reality::default();
    for (name, device) in [("first", 0), ("second", 1)] {
        world = world.pod_with(name, 7, json!({"nodeName": "n1", "schedulingGates": [], "priority": 1}));
        reality.given.insert(format!("team/{name}"), (format!("n1-GPU-{device}"), 7));
    }
    reality.report(&mut world);
    (world.pod_with("high", 6, json!({"priority": 9})), reality)
}

#[test]
fn who_a_budget_protects_leaves_only_where_nobody_else_does() {
    let (world, _) = high_behind_two();
    let mut keeper = Gatekeeper::default();
    let first = look(&mut keeper, &world, 0).evictions[0].pod.clone();
    keeper.protect(&first, Duration::ZERO);
    let second = look(&mut keeper, &world, 1).evictions[0].pod.clone();
    assert_ne!(first, second);
    keeper.protect(&second, Duration::from_secs(1));
    let protected = look(&mut keeper, &world, 2);
    assert_eq!((protected.evictions, protected.next), (vec![], Some(Duration::from_secs(28))), "not again and again");
    let again = look(&mut keeper, &world, 30);
    assert_eq!(again.evictions[0].pod, first, "it is asked again though nothing has changed");
}

#[test]
fn nobody_leaves_for_what_a_pod_that_is_gone_gives_back() {
    let (mut world, mut reality) = high_behind_two();
    let mut keeper = Gatekeeper::default();
    let first = look(&mut keeper, &world, 0).evictions[0].pod.clone();
    // Its node's agent has not told it yet.
    world.pods.remove(&first);
    let turn = look(&mut keeper, &world, 1);
    assert_eq!((turn.evictions, turn.waiting.len()), (vec![], 1));
    reality.given.remove(&first);
    reality.report(&mut world);
    assert_eq!(opened(&look(&mut keeper, &world, 2)), [("team/high", "held")]);
}

#[derive(Debug, Clone)]
enum Step {
    Create(u32),
    /// The gatekeeper looks; of the pods let through so many can be written.
    Look(usize),
    /// The watches of pods and of `GpuNode`s catch up.
    TellPods,
    TellNodes,
    /// A node's agent tells who holds what.
    Report,
    /// The scheduler binds one, by the sum of what is free.
    Bind(usize),
    /// The kubelet takes one up.
    Serve(usize),
    Delete(usize),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u32..=10).prop_map(Step::Create),
        4 => (0_usize..8).prop_map(Step::Look),
        3 => Just(Step::TellPods),
        2 => Just(Step::TellNodes),
        2 => Just(Step::Report),
        4 => any::<usize>().prop_map(Step::Bind),
        4 => any::<usize>().prop_map(Step::Serve),
        2 => any::<usize>().prop_map(Step::Delete),
        1 => Just(Step::Restart),
    ]
}

const NODES: [&str; 2] = ["n1", "n2"];
const GPUS: usize = 2;

/// What really is: who was given which device. Who is deleted without grace holds it for a while.
#[derive(Debug, Default)]
struct Reality {
    given: BTreeMap<String, (String, u32)>,
    ending: BTreeMap<String, usize>,
}

impl Reality {
    fn free(&self, device: &str) -> u32 {
        10 - self.given.values().filter(|(held, _)| held == device).map(|(_, units)| units).sum::<u32>()
    }

    fn report(&self, world: &mut World) {
        for node in world.gpu_nodes.keys().cloned().collect::<Vec<_>>() {
            let gpus: Vec<(String, u32)> = (0..GPUS)
                .map(|index| format!("{node}-GPU-{index}"))
                .map(|gpu| (gpu.clone(), 10 - self.free(&gpu)))
                .collect();
            world.change(|world| &mut world.gpu_nodes, &node, |object| {
                for (index, (gpu, used)) in gpus.iter().enumerate() {
                    let status = &mut object["status"]["gpus"][index];
                    status["slices"][0]["inUse"] = json!(used);
                    let of_gpu = self.given.iter().filter(|(_, (device, _))| device == gpu);
                    status["allocations"] = of_gpu
                        .map(|(pod, (device, units))| {
                            let ids: Vec<String> = (0..*units).map(|unit| format!("{device}::{unit}")).collect();
                            json!({"pod": pod, "container": "main", "resource": MPS, "device": device, "ids": ids, "clients": 0})
                        })
                        .collect();
                }
            });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// However far the watches lag, whatever fails to be written, whoever is restarted: no pod that
    /// was let through comes to a node without its units on the device that its note names.
    ///
    /// And who goes through changed pods alone comes to the same as who goes through all of them
    /// each time.
    #[test]
    fn no_released_pod_fails_at_the_kubelet(steps in proptest::collection::vec(step(), 1..80)) {
        let mut world = World::default().node("n1", &[0; GPUS]).node("n2", &[0; GPUS]);
        let mut reality = Reality::default();
        let (mut told, mut keeper, mut names) = (world.told(), Gatekeeper::default(), 0_u32);
        let mut thorough = Gatekeeper::default();
        for (second, step) in steps.into_iter().enumerate() {
            let Reality { given, ending } = &mut reality;
            given.retain(|name, _| ending.get(name).is_none_or(|end| *end > second));
            match step {
                Step::Create(units) => {
                    names += 1;
                    world = world.pod(&format!("p{names}"), units);
                }
                Step::Look(written) => {
                    let turn = keeper.look(&told, &BTreeMap::new(), at(second as u64));
                    let anew = Cluster { pods: told.pods.iter().map(|pod| Arc::new((**pod).clone())).collect(), ..told.clone() };
                    prop_assert_eq!(&turn, &thorough.look(&anew, &BTreeMap::new(), at(second as u64)));
                    prop_assert_eq!(keeper.ledger(), thorough.ledger());
                    for (index, opening) in turn.openings.iter().enumerate() {
                        if index >= written || !world.patch(opening) {
                            keeper.failed(&opening.pod);
                            thorough.failed(&opening.pod);
                        }
                    }
                }
                Step::TellPods => told.pods = world.told_since(&told.pods),
                Step::TellNodes => told.gpu_nodes = world.told().gpu_nodes,
                Step::Report => reality.report(&mut world),
                Step::Bind(which) => {
                    let waiting: Vec<String> = world.pods.iter()
                        .filter(|(_, pod)| pod["spec"].get("schedulingGates").is_none() && pod["spec"].get("nodeName").is_none())
                        .map(|(name, _)| name.clone()).collect();
                    if waiting.is_empty() { continue }
                    let name = waiting[which % waiting.len()].clone();
                    let Some(placement) = World::placement(&world.pods[&name]) else { continue };
                    let node = placement.nodes.keys().next().unwrap().clone();
                    world.change(|world| &mut world.pods, &name, |pod| pod["spec"]["nodeName"] = json!(node));
                }
                Step::Serve(which) => {
                    let bound: Vec<String> = world.pods.iter()
                        .filter(|(name, pod)| pod["spec"].get("nodeName").is_some() && !reality.given.contains_key(*name))
                        .map(|(name, _)| name.clone()).collect();
                    if bound.is_empty() { continue }
                    let name = bound[which % bound.len()].clone();
                    let pod = &world.pods[&name];
                    let (units, placement) = (World::units(pod), World::placement(pod).unwrap());
                    let device = placement.nodes[pod["spec"]["nodeName"].as_str().unwrap()][0].device.clone();
                    prop_assert!(reality.free(&device) >= units, "{name} wants {units} of {device}: {reality:?}");
                    reality.given.insert(name, (device, units));
                }
                Step::Delete(which) => {
                    if world.pods.is_empty() { continue }
                    let name = world.pods.keys().nth(which % world.pods.len()).unwrap().clone();
                    world.pods.remove(&name);
                    reality.ending.insert(name, second + 4);
                }
                Step::Restart => {
                    // Who starts lists everything anew.
                    keeper.reset();
                    thorough.reset();
                    told = world.told();
                }
            }
        }
    }

    /// In the end all that can run does: when nothing changes any more, who waits fits no device.
    #[test]
    fn who_fits_does_not_wait(sizes in proptest::collection::vec(1_u32..=10, 1..20)) {
        let mut world = World::default().node("n1", &[0; GPUS]).node("n2", &[0; GPUS]);
        for (index, units) in sizes.iter().enumerate() {
            world = world.pod(&format!("p{index}"), *units);
        }
        let (mut keeper, mut reality) = (Gatekeeper::default(), Reality::default());
        for second in 0..4 {
            let turn = look(&mut keeper, &world, second);
            for opening in &turn.openings {
                prop_assert!(world.patch(opening));
                let placement = held(opening);
                let (node, held) = placement.nodes.first_key_value().unwrap();
                world.change(|world| &mut world.pods, &opening.pod, |pod| pod["spec"]["nodeName"] = json!(node));
                reality.given.insert(opening.pod.clone(), (held[0].device.clone(), held[0].units));
            }
            reality.report(&mut world);
        }
        let most = NODES.iter().flat_map(|node| (0..GPUS).map(move |index| format!("{node}-GPU-{index}")))
            .map(|gpu| reality.free(&gpu)).max().unwrap();
        for (name, pod) in &world.pods {
            prop_assert!(reality.given.contains_key(name) || World::units(pod) > most, "{name} could run: {reality:?}");
        }
    }
}

#[test]
fn nothing_is_held_where_an_mps_host_is_replaced_from_the_look_on_that_finds_the_node_idle() {
    let mut world = World::default().node("n1", &[0, 0]).host("n1", "old").pod("a", 2);
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    assert_eq!((opened(&turn), replaced(&turn)), (vec![], vec![]));
    let message = &turn.waiting["team/a"].message;
    assert!(message.ends_with("; the MPS host of n1 is being replaced or is not ready"), "{message}");
    assert_eq!(turn.next, Some(Duration::from_secs(2)));
    let turn = look(&mut keeper, &world, 2);
    assert_eq!((opened(&turn), replaced(&turn)), (vec![], vec!["n1"]));
    let step = turn.rollout.unwrap();
    keeper.rollout.replaced(&step.replace[0], at(2).up);
    world.hosts = Some(BTreeMap::new());
    assert_eq!(opened(&look(&mut keeper, &world, 10)), [], "it is gone");
    // Whoever leads next sees as much.
    assert_eq!(opened(&look(&mut Gatekeeper::default(), &world, 11)), []);
    world = world.host("n1", "new");
    let turn = look(&mut keeper, &world, 12);
    assert_eq!((opened(&turn), replaced(&turn)), (vec![("team/a", "held")], vec![]), "the next serves");
}

#[test]
fn an_mps_host_stays_while_room_is_held_for_a_pod_or_a_pod_is_there_and_others_get_shares_beside_it() {
    let mut world = World::default().node("n1", &[0]).pod("a", 2);
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    assert!(world.patch(&turn.openings[0]));
    world = world.host("n1", "old");
    let stays = |keeper: &mut Gatekeeper, world: &World, second: u64| {
        let turn = look(keeper, world, second);
        assert_eq!(replaced(&turn), [""; 0]);
        assert!(!keeper.rollout.withholds("n1"), "{turn:?}");
        turn.rollout.unwrap().waiting["n1"].clone()
    };
    assert_eq!(stays(&mut keeper, &world, 1), "team/a has a reservation");
    world.change(|world| &mut world.pods, "team/a", |pod| pod["spec"]["nodeName"] = json!("n1"));
    assert_eq!(stays(&mut keeper, &world, 10), "team/a has a reservation", "its node has not told of it");
    assert_eq!(stays(&mut Gatekeeper::default(), &world, 11), "team/a has a reservation", "nor to who leads next");
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let gpu = &mut node["status"]["gpus"][0];
            gpu["slices"][0]["inUse"] = json!(2);
            gpu["allocations"] = json!([{"pod": "team/a", "container": "main", "resource": MPS, "device": "n1-GPU-0", "ids": ["0", "1"]}]);
        },
    );
    assert_eq!(stays(&mut keeper, &world, 20), "team/a has 2 nvidia.com/gpu-mps");
    world = world.pod("b", 8);
    assert_eq!(opened(&look(&mut keeper, &world, 30)), [("team/b", "held")]);
    // All are gone.
    world.pods.clear();
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let gpu = &mut node["status"]["gpus"][0];
            (gpu["slices"][0]["inUse"], gpu["allocations"]) = (json!(0), json!([]));
        },
    );
    look(&mut keeper, &world, 40);
    look(&mut keeper, &world, 50);
    assert_eq!(replaced(&look(&mut keeper, &world, 60)), ["n1"]);
}

#[test]
fn an_mps_host_is_replaced_on_a_node_whose_gpus_are_cordoned_or_shared_in_turns() {
    let cordoned = json!({"cleave.dev/cordon": "n1-GPU-0,n1-GPU-1=until its MPS host is new"});
    let mut world =
        World::default().node("n1", &[0, 0]).node("n2", &[0]).host("n1", "old").host("n2", "new").pod("a", 2);
    world.change(|world| &mut world.gpu_nodes, "n1", |node| node["metadata"]["annotations"] = cordoned);
    let mut keeper = Gatekeeper::default();
    assert_eq!(opened(&look(&mut keeper, &world, 0)), [("team/a", "held")], "there is another node");
    assert_eq!(replaced(&look(&mut keeper, &world, 2)), ["n1"]);
    // Turns end with no MPS host.
    let turns = "nvidia.com/gpu-timeslice";
    let mut world = World::default().node("n1", &[0]).host("n1", "old");
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            let gpu = &mut node["status"]["gpus"][0];
            gpu["slices"] = json!([{"device": "n1-GPU-0", "resource": turns, "total": 4, "inUse": 3, "unhealthy": 0}]);
        },
    );
    let one = json!({"containers": [{"resources": {"limits": {turns: "1"}}}]});
    world = world.pod_with("t", 1, one);
    let mut keeper = Gatekeeper::default();
    assert_eq!(opened(&look(&mut keeper, &world, 0)), [("team/t", "held")], "nothing but MPS is kept back");
    assert_eq!(replaced(&look(&mut keeper, &world, 2)), ["n1"]);
}

#[test]
fn mps_hosts_are_looked_at_now_and_then_and_no_change_is_missed() {
    let mut world = World::default().node("n1", &[0]).host("n1", "new");
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    assert_eq!((turn.rollout.is_some(), turn.next), (true, None));
    world = world.host("n1", "old");
    let half = Now { up: Duration::from_millis(500), epoch: 1_000_000 };
    let turn = keeper.look(&world.told(), &BTreeMap::new(), half);
    assert_eq!((turn.rollout.is_some(), turn.next), (false, Some(Duration::from_millis(500))));
    assert_eq!(look(&mut keeper, &world, 1).rollout.unwrap().outdated, 1);
}

#[test]
fn a_nodes_agent_is_upgraded_before_its_mps_host() {
    let mut world = World::default().node("n1", &[0]).host("n1", "old");
    let of_revision = |hash: &str| {
        let metadata = revision(hash, 0)["metadata"].clone();
        move |agent: &mut Value| {
            agent["metadata"].as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
        }
    };
    world.change(|world| &mut world.agents, "n1", of_revision("old"));
    let mut keeper = Gatekeeper::default();
    for second in [0, 10] {
        let step = look(&mut keeper, &world, second).rollout.unwrap();
        assert_eq!((step.replace.len(), step.waiting["n1"].as_str()), (0, "its agent is upgraded first"));
    }
    world.change(|world| &mut world.agents, "n1", of_revision("new"));
    look(&mut keeper, &world, 20);
    assert_eq!(replaced(&look(&mut keeper, &world, 22)), ["n1"]);
}
