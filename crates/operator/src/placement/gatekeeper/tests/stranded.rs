//! Nothing that passes by itself decides for good, and a released pod that no node takes gets
//! another chance.
use super::*;
use crate::placement::stranded::{GONE_AFTER, Recreation};

const ZONE: &str = "topology.kubernetes.io/zone";

/// Seconds after which a pod that nothing can hold is released.
const LONG: u64 = PATIENCE.as_secs();

/// What happens to a cluster, and what ends it.
type Change = fn(&mut World);

fn of_node(world: &mut World, how: impl FnOnce(&mut Value)) {
    world.change(|world| &mut world.nodes, "n1", how);
}

fn taint(world: &mut World, key: &str) {
    of_node(world, |node| node["spec"]["taints"] = json!([{"key": key, "effect": "NoSchedule"}]));
}

fn not_ready(world: &mut World) {
    taint(world, "node.kubernetes.io/not-ready");
}

fn untaint(world: &mut World) {
    of_node(world, |node| node["spec"]["taints"] = json!([]));
}

#[test]
fn what_passes_by_itself_keeps_a_pod_at_the_gate_however_long_it_takes() {
    let cases: [(&str, Change, Change); 5] = [
        (
            "cordoned",
            |world| of_node(world, |node| node["spec"]["unschedulable"] = json!(true)),
            |world| of_node(world, |node| node["spec"]["unschedulable"] = json!(false)),
        ),
        ("taint node.kubernetes.io/not-ready", not_ready, untaint),
        (
            "taint node.kubernetes.io/memory-pressure",
            |world| taint(world, "node.kubernetes.io/memory-pressure"),
            untaint,
        ),
        ("taint cleave.dev/unhealthy", |world| taint(world, "cleave.dev/unhealthy"), untaint),
        (
            "not enough CPU, memory or another resource",
            |world| of_node(world, |node| node["status"]["allocatable"]["pods"] = json!("0")),
            |world| of_node(world, |node| node["status"]["allocatable"]["pods"] = json!("9")),
        ),
    ];
    for (why, begins, ends) in cases {
        let mut world = World::default().node("n1", &[0]).pod("a", 2);
        begins(&mut world);
        let mut keeper = Gatekeeper::default();
        for second in [0, 3, LONG, 10 * LONG] {
            let turn = look(&mut keeper, &world, second);
            assert_eq!(opened(&turn), [], "{why}");
            let message = &turn.waiting["team/a"].message;
            assert_eq!(*message, format!("No eligible GPU node: 1 of 1: {why} (n1)"));
        }
        ends(&mut world);
        assert_eq!(opened(&look(&mut keeper, &world, 10 * LONG + 1)), [("team/a", "held")], "{why}");
    }
}

#[test]
fn a_policy_or_a_gpu_node_that_is_away_for_less_than_minutes_releases_nobody() {
    // The kubelet goes on offering the shares for a moment.
    let cases: [(&str, Change); 2] = [
        ("the policy", |world| {
            world.change(|world| &mut world.gpu_nodes, "n1", |node| node["status"]["gpus"][0]["slices"] = json!([]));
        }),
        ("the GpuNode", |world| drop(world.gpu_nodes.remove("n1"))),
    ];
    for (what, goes) in cases {
        let mut world = World::default().node("n1", &[0]).pod("a", 2);
        let before = world.gpu_nodes.clone();
        goes(&mut world);
        let mut keeper = Gatekeeper::default();
        for second in [0, 3, LONG - 1] {
            assert_eq!(opened(&look(&mut keeper, &world, second)), [], "{what}");
        }
        world.version += 1;
        world.gpu_nodes = before;
        world.change(|world| &mut world.gpu_nodes, "n1", |_| ());
        assert_eq!(opened(&look(&mut keeper, &world, LONG)), [("team/a", "held")], "{what}");
    }
}

#[test]
fn a_resource_that_another_plugin_serves_where_cleave_runs_is_not_waited_for_for_ever() {
    let mig = json!({"containers": [{"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}]});
    let mut world = World::default().node("n1", &[0]).pod_with("a", 1, mig);
    of_node(&mut world, |node| node["status"]["allocatable"]["nvidia.com/mig-1g.10gb"] = json!("7"));
    let mut keeper = Gatekeeper::default();
    assert_eq!(opened(&look(&mut keeper, &world, 0)), []);
    assert_eq!(opened(&look(&mut keeper, &world, LONG)), [("team/a", "not_ours")]);
}

/// A cluster of nodes in zones: names with their zones.
fn zones(nodes: &[(&str, &str)]) -> World {
    let mut world = World::default();
    for (name, zone) in nodes {
        world = world.node(name, &[0]);
        world.change(|world| &mut world.nodes, name, |node| node["metadata"]["labels"][ZONE] = json!(zone));
    }
    world
}

/// A replica of `web`, with a field of its spec.
fn replica(world: World, name: &str, spec: Value) -> World {
    let mut world = world.pod_with(name, 2, spec);
    world.change(
        |world| &mut world.pods,
        &format!("team/{name}"),
        |pod| {
            pod["metadata"]["labels"] = json!({"app": "web"});
            pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "set", "controller": true}]);
        },
    );
    world
}

fn nodes_of(turn: &Turn) -> Vec<Vec<String>> {
    turn.openings.iter().map(|opening| held(opening).nodes.into_keys().collect()).collect()
}

#[test]
fn replicas_that_must_not_share_a_node_are_released_to_nodes_of_their_own_in_one_look() {
    let apart = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": HOSTNAME}]}}});
    let names = ["n1", "n2", "n3", "n4", "n5", "n6"];
    let mut world = names.iter().fold(World::default(), |world, name| world.node(name, &[0]));
    for at in 0..7 {
        world = replica(world, &format!("r{at}"), apart.clone());
    }
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    let nodes: BTreeSet<String> = nodes_of(&turn).into_iter().flatten().collect();
    assert_eq!((turn.openings.len(), nodes.len()), (6, 6), "{turn:?}");
    let message = &turn.waiting["team/r6"].message;
    assert!(message.contains("6 of 6: a pod there matches the pod's anti-affinity"), "{message}");
    // The watch tells of them, still unbound: nobody is forgotten.
    turn.openings.iter().for_each(|opening| assert!(world.patch(opening)));
    assert_eq!(opened(&look(&mut keeper, &world, 1)), []);
    assert_eq!(opened(&look(&mut Gatekeeper::default(), &world, 2)), [], "nor by an operator that takes over");
    // Another pod's anti-affinity keeps a pod away that has none itself.
    let world = world.pod("plain", 2);
    let mut alike = world.clone();
    alike.change(|world| &mut world.pods, "team/plain", |pod| pod["metadata"]["labels"] = json!({"app": "web"}));
    assert_eq!(opened(&look(&mut Gatekeeper::default(), &alike, 3)), []);
    assert_eq!(opened(&look(&mut Gatekeeper::default(), &world, 3)), [("team/plain", "held")]);
}

#[test]
fn replicas_are_spread_over_zones_as_they_ask_for_it() {
    let spread = json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "web"}}}]});
    let all = [("a1", "a"), ("a2", "a"), ("b1", "b"), ("c1", "c")];
    let mut world = zones(&all);
    for at in 0..6 {
        world = replica(world, &format!("r{at}"), spread.clone());
    }
    let turn = look(&mut Gatekeeper::default(), &world, 0);
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for node in nodes_of(&turn).into_iter().flatten() {
        *counts.entry(all.iter().find(|(name, _)| *name == node).unwrap().1).or_default() += 1;
    }
    assert_eq!(counts, BTreeMap::from([("a", 2), ("b", 2), ("c", 2)]));
}

#[test]
fn a_pod_goes_where_its_volume_is_and_nowhere_else() {
    let mounts = json!({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]});
    let nodes = ["n1", "n2", "n3", "n4", "n5", "n6"];
    let mut world = nodes.iter().fold(World::default(), |world, name| world.node(name, &[0]));
    world.volume_claims =
        vec![json!({"metadata": {"name": "data", "namespace": "team"}, "spec": {"volumeName": "pv"}})];
    world.volumes =
        vec![json!({"metadata": {"name": "pv"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": ["n6"]}]}]}}}})];
    let turn = look(&mut Gatekeeper::default(), &world.clone().pod_with("a", 2, mounts.clone()), 0);
    assert_eq!(nodes_of(&turn), [["n6"]]);
    // A volume without requirements can be anywhere: one node is enough.
    world.volumes = vec![json!({"metadata": {"name": "pv"}, "spec": {}})];
    let turn = look(&mut Gatekeeper::default(), &world.pod_with("a", 2, mounts), 0);
    assert_eq!(nodes_of(&turn)[0].len(), 1);
}

/// A replica, or a pod without a controller, that was released to n1 and is not bound.
fn released(owned: bool) -> (World, Gatekeeper) {
    let world = World::default().node("n1", &[0]);
    let mut world = if owned { replica(world, "a", json!({})) } else { world.pod("a", 2) };
    let mut keeper = Gatekeeper::default();
    assert!(world.patch(&look(&mut keeper, &world, 0).openings[0]));
    let turn = look(&mut keeper, &world, 1);
    assert_eq!((&turn.rescue.recreate, &turn.rescue.advise), (&vec![], &vec![]), "the scheduler has its time");
    (world, keeper)
}

#[test]
fn a_released_pod_that_no_node_takes_any_more_is_recreated() {
    let full: Change = |world| of_node(world, |node| node["status"]["allocatable"]["pods"] = json!("0"));
    let cases: [(&str, Change, Duration); 4] = [
        ("gone: n1.", |world| drop(world.nodes.remove("n1")), GONE_AFTER),
        ("n1: it is cordoned.", |world| of_node(world, |node| node["spec"]["unschedulable"] = json!(true)), PATIENCE),
        ("n1: the pod does not tolerate its taint node.kubernetes.io/not-ready.", not_ready, PATIENCE),
        ("n1: not enough CPU, memory or another resource.", full, PATIENCE),
    ];
    for (why, happens, after) in cases {
        let (mut world, mut keeper) = released(true);
        happens(&mut world);
        let turn = look(&mut keeper, &world, 2);
        assert_eq!((&turn.rescue.recreate, turn.next), (&vec![], Some(after)), "{why}");
        let turn = look(&mut keeper, &world, 2 + after.as_secs());
        let [Recreation { pod, uid, version, message }] = turn.rescue.recreate.as_slice() else {
            panic!("{why}: {turn:?}")
        };
        let meta = &world.pods["team/a"]["metadata"];
        assert_eq!((pod.as_str(), uid.as_str()), ("team/a", meta["uid"].as_str().unwrap()));
        assert_eq!(version, meta["resourceVersion"].as_str().unwrap(), "one that is bound meanwhile stays");
        assert!(message.contains(why) && message.contains("ReplicaSet web re-creates it"), "{message}");
    }
}

/// The scheduler says that it finds no node for a pod.
pub(super) fn refuse(world: &mut World, pod: &str) {
    world.change(
        |world| &mut world.pods,
        pod,
        |pod| {
            pod["status"]["conditions"] =
                json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]);
        },
    );
}

#[test]
fn a_reservation_is_renewed_while_the_scheduler_has_not_refused_the_pod() {
    // The scheduler is down, or a volume is being made: nothing is lost by waiting.
    let (mut world, mut keeper) = released(true);
    for times in 1..4 {
        let turn = look(&mut keeper, &world, times * HOLD.as_secs());
        assert_eq!(turn.rescue.recreate, [], "after {times}");
        assert!(keeper.ledger().unwrap().claim("team/a").is_some());
    }
    let turn = look(&mut Gatekeeper::default(), &world, 4 * HOLD.as_secs());
    assert_eq!(turn.rescue.recreate, [], "nor by an operator that starts then");
    // Its room is kept from others.
    let full = world.clone().pod("b", 9);
    assert_eq!(opened(&look(&mut keeper, &full, 4 * HOLD.as_secs())), []);
    refuse(&mut world, "team/a");
    assert_eq!(look(&mut keeper, &world, 5 * HOLD.as_secs()).rescue.recreate.len(), 1, "it was refused");
}

#[test]
fn a_pod_whose_reservation_ends_is_recreated_or_told_what_to_do() {
    let (mut world, mut keeper) = released(true);
    refuse(&mut world, "team/a");
    assert_eq!(look(&mut keeper, &world, HOLD.as_secs() - 1).rescue.recreate, [], "its time is not over");
    assert_eq!(look(&mut keeper, &world, HOLD.as_secs()).rescue.recreate.len(), 1);
    assert_eq!(
        look(&mut Gatekeeper::default(), &world, HOLD.as_secs()).rescue.recreate.len(),
        1,
        "also by a new operator"
    );
    let (mut world, mut keeper) = released(false);
    refuse(&mut world, "team/a");
    let rescue = look(&mut keeper, &world, HOLD.as_secs()).rescue;
    assert_eq!(rescue.recreate, [], "nobody would make it again");
    let message = rescue.advise[0].message.as_deref().unwrap();
    assert!(
        message.contains("did not bind this pod to n1") && message.contains("delete it and create it again"),
        "{message}"
    );
    // The scheduler binds it after all: what was said is over.
    world.change(
        |world| &mut world.pods,
        "team/a",
        |pod| {
            pod["spec"]["nodeName"] = json!("n1");
            pod["status"]["conditions"] = json!([{"type": CONDITION_PLACED, "status": "False"}]);
        },
    );
    let rescue = look(&mut keeper, &world, HOLD.as_secs() + 1).rescue;
    assert_eq!(rescue.advise.iter().map(|one| &one.message).collect::<Vec<_>>(), [&None]);
}

#[test]
fn a_pod_for_which_the_scheduler_makes_room_on_its_node_is_not_stranded() {
    let (mut world, mut keeper) = released(true);
    of_node(&mut world, |node| node["status"]["allocatable"]["pods"] = json!("0"));
    world.change(|world| &mut world.pods, "team/a", |pod| pod["status"]["nominatedNodeName"] = json!("n1"));
    refuse(&mut world, "team/a");
    look(&mut keeper, &world, 2);
    assert_eq!(look(&mut keeper, &world, LONG + 60).rescue.recreate, []);
    assert_eq!(look(&mut keeper, &world, HOLD.as_secs() + 60).rescue.recreate, [], "nor when its time is over");
}

#[test]
fn a_pod_that_was_released_as_unschedulable_is_recreated_once_it_could_wait_for_room() {
    let mut world = replica(World::default().node("n1", &[10]), "a", json!({"nodeSelector": {"gen": "9"}}));
    let mut keeper = Gatekeeper::default();
    look(&mut keeper, &world, 0);
    let turn = look(&mut keeper, &world, LONG);
    assert_eq!(opened(&turn), [("team/a", "never")]);
    assert!(world.patch(&turn.openings[0]));
    let affinity = world.pods["team/a"]["spec"]["affinity"].to_string();
    assert!(
        affinity.contains("largest.cleave.dev/gpu-mps"),
        "once n1 has the label it must not go there unheld: {affinity}"
    );
    assert_eq!(look(&mut keeper, &world, LONG + 100).rescue, Rescue::default(), "nothing has changed");
    // The GPU is full, and low priority may keep the pod waiting for long: at the gate it has its
    // turn.
    of_node(&mut world, |node| node["metadata"]["labels"]["gen"] = json!("9"));
    look(&mut keeper, &world, 2 * LONG);
    let rescue = look(&mut keeper, &world, 2 * LONG + GONE_AFTER.as_secs()).rescue;
    assert!(rescue.recreate[0].message.contains("released as unschedulable, and GPUs could hold it now"), "{rescue:?}");
}

#[test]
fn a_pod_for_what_no_node_offers_is_released_to_whichever_node_is_added() {
    let mut world = World::default().pod("a", 2);
    let mut keeper = Gatekeeper::default();
    assert_eq!(opened(&look(&mut keeper, &world, 0)), []);
    let turn = look(&mut keeper, &world, LONG);
    assert_eq!(opened(&turn), [("team/a", "never")]);
    assert!(world.patch(&turn.openings[0]));
    let pod = &world.pods["team/a"];
    assert_eq!(
        (pod["spec"].get("affinity"), &pod["metadata"]["annotations"]),
        (None, &json!({"cleave.dev/unschedulable": "true"}))
    );
}

#[test]
fn a_job_whose_node_goes_away_after_its_reservation_ended_is_recreated() {
    let (mut world, mut keeper) = released(true);
    world.change(|world| &mut world.pods, "team/a", |pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("Job"));
    refuse(&mut world, "team/a");
    look(&mut keeper, &world, 1);
    let rescue = look(&mut keeper, &world, HOLD.as_secs()).rescue;
    assert_eq!(
        (rescue.recreate.len(), rescue.advise.len()),
        (0, 1),
        "it would count a failure, and the node may take it yet"
    );
    world.nodes.remove("n1");
    look(&mut keeper, &world, HOLD.as_secs() + 1);
    let rescue = look(&mut keeper, &world, HOLD.as_secs() + 30).rescue;
    assert_eq!(rescue.recreate.len(), 1, "{rescue:?}");
}

#[test]
fn what_keeps_a_node_from_a_pod_at_the_moment_when_its_reservation_ends_strands_nobody() {
    let (mut world, mut keeper) = released(false);
    not_ready(&mut world);
    let rescue = look(&mut keeper, &world, HOLD.as_secs()).rescue;
    assert_eq!((rescue.recreate, rescue.advise), (vec![], vec![]));
    untaint(&mut world);
    look(&mut keeper, &world, HOLD.as_secs() + 1);
    assert!(keeper.ledger().unwrap().claim("team/a").is_some(), "its shares are still reserved");
}

#[test]
fn a_pod_that_nobody_looks_at_holds_shares_for_an_hour_and_not_for_ever() {
    let (world, mut keeper) = released(true);
    let mut hours = 1..20;
    let gone = hours.find(|times| !look(&mut keeper, &world, times * HOLD.as_secs()).rescue.recreate.is_empty());
    assert_eq!(gone, Some(u64::from(MOST_RENEWALS) + 1));
}

#[test]
fn a_pod_that_its_volume_keeps_from_gpus_is_not_recreated_for_room_that_it_cannot_use() {
    let mounts = json!({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]});
    let mut world = replica(World::default().node("n1", &[0]), "a", mounts);
    world.volume_claims =
        vec![json!({"metadata": {"name": "data", "namespace": "team"}, "spec": {"volumeName": "pv"}})];
    world.volumes =
        vec![json!({"metadata": {"name": "pv"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": ["elsewhere"]}]}]}}}})];
    let mut keeper = Gatekeeper::default();
    look(&mut keeper, &world, 0);
    let turn = look(&mut keeper, &world, LONG);
    assert_eq!(opened(&turn), [("team/a", "never")]);
    assert!(world.patch(&turn.openings[0]));
    for second in [2, 3, 10] {
        assert_eq!(look(&mut keeper, &world, second * LONG).rescue.recreate, []);
    }
}

#[test]
fn a_replica_sees_one_that_was_released_before_the_watch_tells_of_it() {
    let apart = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": HOSTNAME}]}}});
    let world = replica(World::default().node("n1", &[0]).node("n2", &[0]), "r0", apart.clone());
    let mut keeper = Gatekeeper::default();
    let first = nodes_of(&look(&mut keeper, &world, 0));
    // Its patch is written, and the watch still shows it at the gate.
    let world = replica(world, "r1", apart);
    let second = nodes_of(&look(&mut keeper, &world, 1));
    assert_eq!(second.len(), 1);
    assert_ne!(first, second);
}

#[test]
fn what_the_scheduler_does_not_bind_to_a_node_is_tried_on_another() {
    let mut world = replica(World::default().node("n1", &[2]).node("n2", &[0]), "a", json!({}));
    let mut keeper = Gatekeeper::default();
    let turn = look(&mut keeper, &world, 0);
    assert_eq!(nodes_of(&turn), [["n1"]], "the tightest");
    assert!(world.patch(&turn.openings[0]));
    refuse(&mut world, "team/a");
    look(&mut keeper, &world, 1);
    assert_eq!(look(&mut keeper, &world, HOLD.as_secs()).rescue.recreate.len(), 1);
    world.pods.clear();
    let world = replica(world, "again", json!({}));
    assert_eq!(nodes_of(&look(&mut keeper, &world, HOLD.as_secs() + 1)), [["n2"]]);
}
