use serde::Deserialize;

use super::text::render;
use super::*;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Objects {
    nodes: Vec<NodeObject>,
    agents: Vec<AgentPod>,
    gpu_nodes: Vec<DeserializeGuard<GpuNode>>,
    policies: Vec<DeserializeGuard<SharingPolicy>>,
    pods: Vec<PodObject>,
}

fn live() -> Live {
    let all: Objects = serde_saphyr::from_str(include_str!("../../tests/explain/cluster.yaml")).unwrap();
    Live::new(all.pods, all.nodes, all.gpu_nodes, all.agents, all.policies, 1000)
}

fn of(name: &str) -> Explanation {
    explain(&live(), &format!("demo/{name}")).unwrap()
}

/// Compares with a committed file; `UPDATE_EXPECTED=1 cargo test -p cleave` writes it.
fn expect(name: &str, actual: &str) {
    let path = format!("{}/tests/explain/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_EXPECTED").is_some() {
        std::fs::write(&path, actual).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    assert!(expected == actual, "{path} says\n{expected}\nand it is\n{actual}");
}

#[test]
fn what_is_said_is_as_committed() {
    for name in ["five", "twelve", "two", "replica", "picky", "queued", "soon", "a", "plain", "done"] {
        expect(&format!("{name}.txt"), &render(&of(name)));
    }
    expect("five.json", &(serde_json::to_string_pretty(&of("five")).unwrap() + "\n"));
}

#[test]
fn each_pod_is_told_what_becomes_of_it() {
    for (name, state) in [
        ("a", State::Bound),
        ("soon", State::Held),
        ("two", State::Fits),
        ("five", State::Waits),
        ("twelve", State::Never),
        ("replica", State::Never),
        ("picky", State::Never),
        ("queued", State::OtherGate),
        ("plain", State::NotOurs),
        ("done", State::Ended),
    ] {
        assert_eq!(of(name).verdict.state, state, "{name}");
    }
    assert_eq!(explain(&live(), "demo/nobody"), None);
}

#[test]
fn who_would_have_to_leave_is_told_by_one_gpu() {
    let help = of("five").help;
    // Three are free on each of two GPUs; what is held for another is not to be had.
    assert_eq!(help[0], "It would fit on GPU 0 of node1 if these were gone: demo/a (of lower priority).");
    assert!(help.iter().any(|line| line.starts_with("node2 has room, but")), "{help:?}");
}

#[test]
fn what_others_may_get_later_is_not_held_now() {
    // demo/two would get room on node1, but has not got it.
    let room = |name: &str| of(name).nodes[0].gpus.iter().map(|gpu| gpu.devices[0].held).collect::<Vec<u32>>();
    assert_eq!((room("five"), room("two"), room("soon")), (vec![0, 4], vec![0, 4], vec![0, 4]));
}

#[test]
fn of_many_nodes_those_are_shown_that_come_closest() {
    let mut told = of("five");
    let far = told.nodes[0].clone();
    told.nodes.extend((0..40).map(|number| NodeView { name: format!("z{number:02}"), ..far.clone() }));
    told.nodes[30].gpus[0].devices[0].free = 9;
    let text = render(&told);
    assert!(text.contains(&told.nodes[30].name), "{text}");
    assert!(text.contains("\n28 more nodes with GPUs, with no more room than these"), "{text}");
    assert!(!text.contains("node2   0"), "that it cannot go to is further away: {text}");
}

#[test]
fn a_name_is_told_from_what_is_none() {
    assert_eq!(pod_name("team/p", None).unwrap(), "team/p");
    assert_eq!(pod_name("p", None).unwrap(), "default/p");
    assert_eq!(pod_name("p", Some("team")).unwrap(), "team/p");
    assert_eq!(pod_name("team/p", Some("team")).unwrap(), "team/p");
    for (pod, namespace) in [("team/p", Some("other")), ("", None), ("team/", None), ("/p", None), ("a/b/c", None)] {
        assert!(pod_name(pod, namespace).is_err(), "{pod} {namespace:?}");
    }
}
