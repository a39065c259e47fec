//! Tests that the agent reports a fatal GPU error to the kubelet, and in Events on the pods and the
//! node. Also tests that the shares become healthy again.
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Instant;

use serde_json::Value;

use crate::machine::{MPS_RESOURCE, Machine, container_devices, mps_spec, pod, share_ids};

/// Starts a program as in a container with these shares, and waits until the program has a context.
async fn start_program(machine: &Machine, ids: &[String], arguments: &[&str]) -> Child {
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let response = machine.kubelet.allocate(MPS_RESOURCE, &ids).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &ids).await.unwrap();
    let mut child = machine.container_command(&response).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("\"viaMps\":true"), "{line}");
    child
}

/// Returns the pod and the reason of each Event, sorted. The pod is `None` for Events about the
/// node.
fn pod_events(machine: &Machine) -> Vec<(Option<String>, String)> {
    let text = fs::read_to_string(machine.path("spec/events.jsonl")).unwrap_or_default();
    let text_of = |value: &Value| value.as_str().map(str::to_owned);
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut events: Vec<_> =
        lines.filter_map(|line| Some((text_of(&line["pod"]), text_of(&line["reason"])?))).collect();
    events.sort();
    events
}

#[tokio::test]
async fn a_fault_is_reported_on_each_affected_pod_and_shares_recover_when_the_last_client_ends() {
    let mut machine = Machine::new(&["H200"]);
    let gpu = machine.uuids[0].clone();
    machine.set_spec("first", vec![mps_spec(&gpu, 10)]);
    machine.set_pods(&[pod("bad", 1, &gpu), pod("near", 2, &gpu)]);
    machine.start_mps_host();
    machine.start_agent(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    let (bad, near) = (share_ids(&gpu, [0]), share_ids(&gpu, [1, 2]));
    machine
        .pods
        .set_devices(&[container_devices("bad", MPS_RESOURCE, &bad), container_devices("near", MPS_RESOURCE, &near)]);
    let mut neighbour = start_program(&machine, &near, &["--hold", "forever", "--linger", "forever"]).await;
    let mut culprit = start_program(&machine, &bad, &["--kernel-ms", "1", "--fault"]).await;
    culprit.wait().unwrap();
    machine.wait_for_healthy(MPS_RESOURCE, 0).await;
    let ended = tokio::task::spawn_blocking(move || {
        neighbour.wait().unwrap();
        Instant::now()
    });
    let ended = ended.await.unwrap();
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    println!("healthy {:?} after the last client had ended", ended.elapsed());
    let pod = |name: &str, reason: &str| (Some(format!("ns/{name}")), reason.to_owned());
    let node = |reason: &str| (None, reason.to_owned());
    let expected = [
        node("GpuFault"),
        node("MpsUnavailable"),
        node("Recovered"),
        pod("bad", "NamedInGpuFault"),
        pod("near", "BrokenByGpuFault"),
        pod("near", "TerminatedInGpuFault"),
    ];
    machine
        .wait_until("all Events are published", || (pod_events(&machine).len() >= expected.len()).then_some(()))
        .await;
    assert_eq!(pod_events(&machine), expected);
}
