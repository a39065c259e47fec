//! A fatal GPU error: the kubelet, the pods and the node hear of it, and the shares come back.
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Instant;

use serde_json::Value;

use crate::machine::{MPS, Machine, held, ids, mps, pod};

/// A program of a pod that holds these shares, once it has its context.
async fn program(machine: &Machine, ids: &[String], arguments: &[&str]) -> Child {
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let given = machine.kubelet.allocate(MPS, &ids).await.unwrap();
    machine.kubelet.pre_start(MPS, &ids).await.unwrap();
    let mut child = machine.program(&given).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("\"viaMps\":true"), "{line}");
    child
}

fn told(machine: &Machine) -> Vec<(Option<String>, String)> {
    let text = fs::read_to_string(machine.path("spec/events.jsonl")).unwrap_or_default();
    let text_of = |value: &Value| value.as_str().map(str::to_owned);
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut told: Vec<_> = lines.filter_map(|line| Some((text_of(&line["pod"]), text_of(&line["reason"])?))).collect();
    told.sort();
    told
}

#[tokio::test]
async fn a_fault_is_told_to_each_pod_that_it_hit_and_the_shares_come_back_with_the_end_of_the_last() {
    let mut machine = Machine::new(&["H200"]);
    let gpu = machine.uuids[0].clone();
    machine.want("first", vec![mps(&gpu, 10)]);
    machine.pods_are(&[pod("bad", 1, &gpu), pod("near", 2, &gpu)]);
    machine.start_host();
    machine.start_agent(&[]);
    machine.healthy(MPS, 10).await;
    let (bad, near) = (ids(&gpu, [0]), ids(&gpu, [1, 2]));
    machine.pods.hold(&[held("bad", MPS, &bad), held("near", MPS, &near)]);
    let mut stays = program(&machine, &near, &["--hold", "forever", "--linger", "forever"]).await;
    let mut culprit = program(&machine, &bad, &["--kernel-ms", "1", "--fault"]).await;
    culprit.wait().unwrap();
    machine.healthy(MPS, 0).await;
    let left = tokio::task::spawn_blocking(move || {
        stays.wait().unwrap();
        Instant::now()
    });
    let left = left.await.unwrap();
    machine.healthy(MPS, 10).await;
    println!("healthy {:?} after the last client had left", left.elapsed());
    let pod = |name: &str, reason: &str| (Some(format!("ns/{name}")), reason.to_owned());
    let node = |reason: &str| (None, reason.to_owned());
    let expected = [
        node("GpuFault"),
        node("MpsUnavailable"),
        node("Recovered"),
        pod("bad", "NamedInGpuFault"),
        pod("near", "BrokenByGpuFault"),
        pod("near", "EndedInGpuFault"),
    ];
    machine.until("all is told", || (told(&machine).len() >= expected.len()).then_some(())).await;
    assert_eq!(told(&machine), expected);
}
