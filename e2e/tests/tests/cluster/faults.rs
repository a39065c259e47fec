//! Tests a fatal GPU error, which breaks every program on the GPU. Each pod must receive an Event,
//! the agent must kill programs that do not exit, and new pods must then run on the GPU.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Scope, text, wait_for, wait_until};
use serde_json::{Value, json};

use crate::{HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, wait_until_advertised};

/// Script of a program that ignores SIGTERM and CUDA errors.
const IGNORE_SIGTERM_AND_ERRORS_SCRIPT: &str = "trap '' TERM; exec cleave-client --hold forever --linger forever";

/// Waits for an Event about a pod with this reason, and returns the message of the Event.
fn event_message(scope: &Scope, pod: &str, reason: &str) -> Result<String> {
    let uid = text(&scope.cluster.get(&scope.pod_path(pod))?["metadata"]["uid"]);
    wait_for(&format!("{pod} has an Event {reason}"), cleave_e2e::WAIT_TIMEOUT, || {
        let events = scope.cluster.list(&format!("/api/v1/namespaces/{}/events", scope.namespace))?;
        let is = |event: &&Value| text(&event["reason"]) == reason && text(&event["involvedObject"]["uid"]) == uid;
        Ok(events.iter().find(is).map(|event| text(&event["message"])))
    })
}

#[test]
fn an_illegal_access_is_reported_on_each_affected_pod_and_programs_that_do_not_exit_are_stopped() -> Result<()> {
    let cluster = Cluster::connect()?;
    let other = Scope::new(&cluster, "fault-far")?;
    let scope = Scope::new(&cluster, "fault")?;
    // Divide only one GPU into shares, so that all pods are on this GPU.
    scope.create_policy(
        "one-gpu",
        &json!({"nodeSelector": {"kubernetes.io/hostname": NODE}, "gpus": {"indices": [0]}, "mode": "Mps", "mps": {"units": 10, "threads": "Strict"}}),
    )?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10)?;
    scope.create_pod("near", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    other.create_pod("far", &json!({SHARES_RESOURCE: 3}), IGNORE_SIGTERM_AND_ERRORS_SCRIPT)?;
    scope.client_report("near")?;
    other.client_report("far")?;
    scope.create_pod("culprit", &json!({SHARES_RESOURCE: 1}), "exec cleave-client --kernel-ms 1 --fault")?;
    for (of, pod) in [(&scope, "culprit"), (&scope, "near"), (&other, "far")] {
        let (phase, log) = of.wait_until_finished(pod)?;
        ensure!(phase == "Failed" && log.contains("\"error\":700"), "{pod} is {phase} and logged {log}");
    }
    let far = cluster.get(&other.pod_path("far"))?;
    let exit = far["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"].as_u64();
    ensure!(exit == Some(137), "the container was not killed: {}", far["status"]);
    // All shares must be healthy, and the next pod must have the limits of its share.
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10)?;
    scope.create_pod("next", &json!({SHARES_RESOURCE: 5}), HOLD_CLIENT_SCRIPT)?;
    ensure!(scope.client_report("next")?["sms"] == 66);

    let caused = event_message(&scope, "culprit", "NamedInGpuFault")?;
    ensure!(caused.contains("fatal GPU error"), "{caused}");
    let near = event_message(&scope, "near", "BrokenByGpuFault")?;
    ensure!(near.contains("pod culprit"), "the Event does not name the pod of the same namespace: {near}");
    let far = event_message(&other, "far", "BrokenByGpuFault")?;
    ensure!(
        far.contains("another pod") && !far.contains("culprit") && !far.contains("near"),
        "the Event names a pod of another namespace: {far}"
    );
    event_message(&other, "far", "TerminatedInGpuFault")?;
    wait_until("an Event of the GpuNode names all pods", || {
        let events = cluster.list("/api/v1/namespaces/default/events")?;
        let event = events
            .iter()
            .filter(|event| text(&event["reason"]) == "GpuFault" && text(&event["involvedObject"]["kind"]) == "GpuNode")
            .map(|event| text(&event["message"]))
            .find(|message| message.contains(&format!("{}/culprit", scope.namespace)))
            .context("no GpuFault Event names the culprit")?;
        Ok(event.contains(&format!("{}/near", scope.namespace)) && event.contains(&format!("{}/far", other.namespace)))
    })?;
    // Delete this pod here, because dropping `scope` deletes the policy, and then waits until all
    // GPUs are whole.
    other.delete_pod("far", 0)
}
