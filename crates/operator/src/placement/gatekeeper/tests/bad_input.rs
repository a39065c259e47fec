//! Tests unusual and hostile objects. A pass over these objects is short, each message has a
//! limited length, and no other pod is delayed.
use std::time::{Duration, Instant};

use cleave_plan::affinity::HOSTNAME;
use serde_json::{Value, json};

use super::world::{MPS_RESOURCE, TestCluster, reconcile, released, requesting, reservation};
use crate::placement::actions::Actions;
use crate::placement::gatekeeper::{Gatekeeper, MAX_RELEASES, UNSCHEDULABLE_AFTER};
use crate::placement::stranded::StrandedActions;

/// Time limit of one pass in a debug build on a busy machine. The limit detects work that grows
/// exponentially or with the square of the input.
const PASS_LIMIT: Duration = Duration::from_secs(20);
/// Maximum length of a message. An Event's note has at most 1,000 bytes.
const MAX_MESSAGE_BYTES: usize = 1000;

/// Reconciles, and checks the duration and the length of each message.
fn reconcile_within_limits(keeper: &mut Gatekeeper, world: &TestCluster, seconds: u64) -> Actions {
    let begun = Instant::now();
    let actions = reconcile(keeper, world, seconds);
    let took = begun.elapsed();
    assert!(took < PASS_LIMIT, "the pass took {took:?}");
    for (pod, waiting) in &actions.waiting {
        assert!(waiting.message.len() <= MAX_MESSAGE_BYTES, "{pod}: {} bytes", waiting.message.len());
    }
    actions
}

/// Returns a spec with `count` containers. Each container requests `shares` shares.
fn containers(count: u32, shares: u32) -> Value {
    let container =
        |index| json!({"name": format!("c{index}"), "resources": {"limits": {MPS_RESOURCE: shares.to_string()}}});
    json!({"containers": (0..count).map(container).collect::<Vec<_>>()})
}

#[test]
fn a_pod_with_twenty_containers_fits_or_waits_and_delays_no_other_pod() {
    // Three containers of three shares fit on a GPU, so twenty containers need seven GPUs.
    let world = TestCluster::default().node("n1", &[0; 7]).node("n2", &[0; 6]);
    let fits = world.clone().pod_with("twenty", 3, containers(20, 3));
    let actions = reconcile_within_limits(&mut Gatekeeper::default(), &fits, 0);
    assert_eq!(released(&actions), [("team/twenty", "reserved")]);
    // Two containers of four shares fit on a GPU, so twenty containers fit on no node. Some GPUs
    // are partly used, so that the search has many cases.
    let world = TestCluster::default().node("n1", &[0, 1, 2, 3, 4, 5, 6]).node("n2", &[6, 5, 4, 3, 2, 1, 0]);
    let world = world.pod_with("twenty", 4, containers(20, 4)).pod("other", 1);
    let actions = reconcile_within_limits(&mut Gatekeeper::default(), &world, 0);
    assert_eq!(released(&actions), [("team/other", "reserved")]);
    assert!(actions.waiting.contains_key("team/twenty"), "{actions:?}");
}

#[test]
fn a_pod_with_three_hundred_topology_terms_is_released_and_delays_no_other_pod() {
    let labels = json!({"matchLabels": {"app": "web"}});
    let spread: Vec<Value> = (0..300)
        .map(|index| json!({"topologyKey": format!("zone-{index}"), "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": labels}))
        .collect();
    let apart: Vec<Value> =
        (0..300).map(|index| json!({"topologyKey": format!("zone-{index}"), "labelSelector": labels})).collect();
    let apart = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}});
    let mut world = TestCluster::default();
    for index in 0..20 {
        world = world.node(&format!("n{index}"), &[0]);
    }
    let world = world
        .pod_with("spread", 1, json!({"topologySpreadConstraints": spread}))
        .pod_with("apart", 1, json!({"affinity": apart}))
        .pod("other", 1);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile_within_limits(&mut keeper, &world, 0);
    let mut all = released(&actions);
    all.sort_unstable();
    assert_eq!(all, [("team/apart", "reserved"), ("team/other", "reserved"), ("team/spread", "reserved")]);
    // The operator does not evaluate 300 terms, so it releases the pod to several nodes, and the
    // scheduler chooses a node.
    let nodes_of = |pod: &str| {
        let release = actions.releases.iter().find(|release| release.pod == pod).unwrap();
        reservation(release).nodes.len()
    };
    assert_eq!((nodes_of("team/spread"), nodes_of("team/apart"), nodes_of("team/other")), (4, 4, 1));
}

#[test]
fn an_annotation_of_250_kib_is_not_stored_and_does_not_prevent_the_release() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("large", 1).pod("other", 1);
    let long = "x".repeat(250 << 10);
    let annotations =
        json!({"example.com/notes": long, cleave_api::placement::PLACEMENT_ANNOTATION: format!("{{{long}")});
    world.change(|world| &mut world.pods, "team/large", |pod| pod["metadata"]["annotations"] = annotations);
    let kept = world.cluster().pods;
    assert!(kept.iter().all(|pod| format!("{pod:?}").len() < 10_000), "the operator keeps the annotation");
    let actions = reconcile_within_limits(&mut Gatekeeper::default(), &world, 0);
    assert_eq!(released(&actions).len(), 2);
    assert!(actions.releases.iter().all(|release| release.patch.to_string().len() < 1000), "the patch repeats it");
    assert!(actions.releases.iter().all(|release| world.apply_release(release)));
    assert!(TestCluster::placement(&world.pods["team/large"]).is_some());
}

#[test]
fn ten_thousand_pods_that_can_never_run_delay_no_pod_that_can_run() {
    let mut world = TestCluster::default();
    for index in 0..10 {
        world = world.node(&format!("n{index}"), &[0; 8]);
    }
    // These pods come first, because their priority is higher than the priority of the pod that can
    // run.
    for index in 0..10_000 {
        world = world.pod_with(&format!("never-{index:05}"), 11, json!({"priority": 1000}));
    }
    let world = world.pod("runs", 3);
    let mut keeper = Gatekeeper::default();
    let first = reconcile_within_limits(&mut keeper, &world, 0);
    assert_eq!(released(&first), [("team/runs", "reserved")]);
    assert_eq!(first.waiting.len(), 10_000, "each pod's Event and condition state why it waits");
    // The operator releases these pods in groups, so a pod that can run waits for at most one
    // group.
    let mut world = world;
    assert!(world.apply_release(&first.releases[0]));
    world = world.pod("later", 3);
    let after = UNSCHEDULABLE_AFTER.as_secs();
    let actions = reconcile_within_limits(&mut keeper, &world, after);
    assert!(actions.releases.len() <= MAX_RELEASES, "{} releases", actions.releases.len());
    assert!(actions.releases.iter().all(|release| release.patch.to_string().len() < 1000), "no patch grows");
    for release in &actions.releases {
        assert!(world.apply_release(release));
    }
    let mut passes = 1;
    while world.pods["team/later"]["spec"].get("schedulingGates").is_some() {
        let actions = reconcile_within_limits(&mut keeper, &world, after);
        actions.releases.iter().for_each(|release| assert!(world.apply_release(release)));
        passes += 1;
        assert!(passes <= 2, "a pod that can run waits for pods that cannot run");
    }
}

#[test]
fn pods_are_narrowed_to_a_node_by_its_hostname_label_even_if_its_name_differs() {
    let mut world = TestCluster::default().node("n1", &[0]).pod("a", 2);
    world.change(|world| &mut world.nodes, "n1", |node| node["metadata"]["labels"][HOSTNAME] = json!("ip-10-0-0-1"));
    let mut keeper = Gatekeeper::default();
    let actions = reconcile_within_limits(&mut keeper, &world, 0);
    assert!(world.apply_release(&actions.releases[0]));
    let pod = &world.pods["team/a"];
    let terms = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
    let expected = json!([{"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": ["ip-10-0-0-1"]}]}]);
    assert_eq!(pod.pointer(terms), Some(&expected), "the scheduler reads the label");
    let placement = TestCluster::placement(pod).unwrap();
    assert_eq!(placement.nodes.into_keys().collect::<Vec<_>>(), ["n1"], "the agent reads the node's name");
    // The next leader finds the same reservation, so the pod is not stranded and its shares count
    // as used.
    let world = world.pod("b", 9);
    let actions = reconcile_within_limits(&mut Gatekeeper::default(), &world, 60);
    assert_eq!((released(&actions), &actions.stranded), (vec![], &StrandedActions::default()));
}

#[test]
fn deleting_a_policy_while_five_hundred_pods_wait_releases_none_of_them() {
    let mut world = TestCluster::default().node("n1", &[0, 0]).policy(10);
    for index in 0..500 {
        world = world.pod(&format!("p{index:03}"), 10);
    }
    let mut keeper = Gatekeeper::default();
    let actions = reconcile_within_limits(&mut keeper, &world, 0);
    assert_eq!(released(&actions).len(), 2);
    actions.releases.iter().for_each(|release| assert!(world.apply_release(release)));
    let before = world.clone();
    world.policies.clear();
    world.change(
        |world| &mut world.nodes,
        "n1",
        |node| {
            node["status"]["allocatable"] = json!({"cpu": "8", "pods": "110", "nvidia.com/gpu": "2"});
        },
    );
    world.change(
        |world| &mut world.gpu_nodes,
        "n1",
        |node| {
            for gpu in node["status"]["gpus"].as_array_mut().unwrap() {
                gpu["mode"] = json!("Whole");
                (gpu["slices"][0]["resource"], gpu["slices"][0]["total"]) = (json!("nvidia.com/gpu"), json!(1));
            }
        },
    );
    let with_whole = world.clone().pod_with("whole", 1, requesting("nvidia.com/gpu", 1));
    for second in [1, UNSCHEDULABLE_AFTER.as_secs() - 1] {
        let actions = reconcile_within_limits(&mut keeper, &with_whole, second);
        assert!(actions.waiting.len() >= 498, "{}", actions.waiting.len());
        assert!(actions.releases.iter().all(|release| release.pod == "team/whole"), "{:?}", released(&actions));
    }
    // When the operator applies the writes again, the released pods keep their reservations.
    let mut again = before;
    again.version = with_whole.version + 1;
    let actions = reconcile_within_limits(&mut keeper, &again, UNSCHEDULABLE_AFTER.as_secs());
    assert_eq!(released(&actions), []);
}

#[test]
fn leftover_gpu_nodes_of_absent_nodes_are_not_used() {
    let mut world = TestCluster::default().node("n1", &[0]);
    for index in 0..2000 {
        world = world.node(&format!("old-{index}"), &[0]);
    }
    for index in 0..2000 {
        let name = format!("old-{index}");
        world.nodes.remove(&name);
        world.agents.remove(&name);
    }
    let world = world.pod("fits", 7).pod("waits", 7).pod("never", 11);
    let mut keeper = Gatekeeper::default();
    let actions = reconcile_within_limits(&mut keeper, &world, 0);
    assert_eq!(released(&actions), [("team/fits", "reserved")]);
    let message = &actions.waiting["team/waits"].message;
    assert!(message.contains("the emptiest has 3") && !message.contains("old-"), "{message}");
    let message = &actions.waiting["team/never"].message;
    assert!(message.contains("the largest has 10"), "{message}");
}
