//! A fatal GPU error breaks every program on the GPU: each pod is told, whoever does not leave is
//! ended, and the GPU serves again.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Scope, text, wait_for, wait_until};
use serde_json::{Value, json};

use crate::{HOLD, NODE, SHARES, offers};

/// Ignores SIGTERM, and the error.
const DEAF: &str = "trap '' TERM; exec cleave-client --hold forever --linger forever";

/// What an event of this reason on a pod says.
fn told(scope: &Scope, pod: &str, reason: &str) -> Result<String> {
    let uid = text(&scope.cluster.get(&scope.pod_path(pod))?["metadata"]["uid"]);
    wait_for(&format!("{pod} is told of {reason}"), cleave_e2e::PATIENCE, || {
        let events = scope.cluster.list(&format!("/api/v1/namespaces/{}/events", scope.namespace))?;
        let is = |event: &&Value| text(&event["reason"]) == reason && text(&event["involvedObject"]["uid"]) == uid;
        Ok(events.iter().find(is).map(|event| text(&event["message"])))
    })
}

#[test]
fn an_illegal_access_is_told_to_all_that_it_hit_and_who_stays_is_ended() -> Result<()> {
    let cluster = Cluster::connect()?;
    let other = Scope::new(&cluster, "fault-far")?;
    let scope = Scope::new(&cluster, "fault")?;
    // One GPU, so that all are on it.
    scope.policy(
        "one-gpu",
        &json!({"nodeSelector": {"kubernetes.io/hostname": NODE}, "gpus": {"indices": [0]}, "mode": "Mps", "mps": {"units": 10, "threads": "Strict"}}),
    )?;
    offers(&cluster, SHARES, 10)?;
    scope.pod("near", &json!({SHARES: 2}), HOLD)?;
    other.pod("far", &json!({SHARES: 3}), DEAF)?;
    scope.seen("near")?;
    other.seen("far")?;
    scope.pod("culprit", &json!({SHARES: 1}), "exec cleave-client --kernel-ms 1 --fault")?;
    for (of, pod) in [(&scope, "culprit"), (&scope, "near"), (&other, "far")] {
        let (phase, log) = of.finished(pod)?;
        ensure!(phase == "Failed" && log.contains("\"error\":700"), "{pod} is {phase} and says {log}");
    }
    let far = cluster.get(&other.pod_path("far"))?;
    let exit = far["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"].as_u64();
    ensure!(exit == Some(137), "it was not killed: {}", far["status"]);
    // Healthy again, and what is left of the three is nobody's limit.
    offers(&cluster, SHARES, 10)?;
    scope.pod("next", &json!({SHARES: 5}), HOLD)?;
    ensure!(scope.seen("next")?["sms"] == 66);

    let caused = told(&scope, "culprit", "NamedInGpuFault")?;
    ensure!(caused.contains("fatal GPU error"), "{caused}");
    let near = told(&scope, "near", "BrokenByGpuFault")?;
    ensure!(near.contains("pod culprit"), "its namespace's own: {near}");
    let far = told(&other, "far", "BrokenByGpuFault")?;
    ensure!(far.contains("another pod") && !far.contains("culprit") && !far.contains("near"), "another's: {far}");
    told(&other, "far", "EndedInGpuFault")?;
    wait_until("the node's own objects name them all", || {
        let events = cluster.list("/api/v1/namespaces/default/events")?;
        let event = events
            .iter()
            .filter(|event| text(&event["reason"]) == "GpuFault" && text(&event["involvedObject"]["kind"]) == "GpuNode")
            .map(|event| text(&event["message"]))
            .find(|message| message.contains(&format!("{}/culprit", scope.namespace)))
            .context("no such event")?;
        Ok(event.contains(&format!("{}/near", scope.namespace)) && event.contains(&format!("{}/far", other.namespace)))
    })?;
    // The policy goes with the first of the namespaces, and waits for whoever holds shares.
    other.delete_pod("far", 0)
}
