//! Tests that an invalid sharing policy is refused with an explanation, and that a valid policy is
//! applied without a restart of Cleave.
use anyhow::{Result, ensure};
use cleave_e2e::{Cluster, POLICIES_PATH, Refused, Scope, text, wait_until, wait_without_violation};
use serde_json::{Value, json};

use crate::{
    GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, container_and_restarts, daemon_pids,
    gpus_without_ten_shares, ten_shares, wait_until_advertised,
};

/// Reads the status, the reason and the message of a policy's condition. Returns `None` if the
/// condition is absent.
fn read_condition(cluster: &Cluster, policy: &str, kind: &str) -> Result<Option<(String, String, String)>> {
    let policy = cluster.get(&format!("{POLICIES_PATH}/{policy}"))?;
    let conditions = policy["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == kind);
    Ok(found.map(|found| (text(&found["status"]), text(&found["reason"]), text(&found["message"]))))
}

#[test]
fn units_change_on_idle_gpus_without_a_restart() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "resize")?;
    let before = daemon_pids(&cluster)?;
    let pods = cleave_pods(&cluster)?;
    ensure!(before.len() == 4, "daemons: {before:?}");
    cluster.patch(&format!("{POLICIES_PATH}/ten-shares"), &json!({"spec": {"mps": {"units": 5}}}))?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 5 * GPUS_PER_NODE)?;
    ensure!(pods == cleave_pods(&cluster)?, "a pod of Cleave was restarted");
    scope.create_pod("one", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    let report = scope.client_report("one")?;
    ensure!(report["sms"] == 26, "with one of five shares reports {report}");
    ensure!(before == daemon_pids(&cluster)?, "the MPS daemons were restarted");
    Ok(())
}

/// Returns the UID and the restart count of each of Cleave's pods. Omits terminating pods, because
/// they may disappear at any time.
pub(crate) fn cleave_pods(cluster: &Cluster) -> Result<Vec<(String, u64)>> {
    let pods = cluster.list("/api/v1/namespaces/cleave-system/pods")?;
    let staying = pods.iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(staying
        .map(|pod| {
            let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(u64::MAX);
            (text(&pod["metadata"]["uid"]), restarts)
        })
        .collect())
}

#[test]
fn units_do_not_change_under_a_running_pod_and_the_policy_names_the_pod() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "inuse")?;
    scope.create_pod("holder", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("holder")?;
    let before = container_and_restarts(&cluster, &scope, "holder")?;
    cluster.patch(&format!("{POLICIES_PATH}/ten-shares"), &json!({"spec": {"mps": {"units": 5}}}))?;
    // The three idle GPUs change. The GPU in use keeps its ten shares.
    wait_until_advertised(&cluster, SHARES_RESOURCE, 5 * (GPUS_PER_NODE - 1) + 10)?;
    wait_until("the policy names the pod that it waits for", || {
        let Some((status, reason, message)) = read_condition(&cluster, "ten-shares", "Ready")? else {
            return Ok(false);
        };
        ensure!(message.contains(&format!("{}/holder", scope.namespace)), "{status} {reason}: {message}");
        Ok(status == "False")
    })?;
    ensure!(before == container_and_restarts(&cluster, &scope, "holder")?, "the running pod was disturbed");
    scope.delete_pod("holder", 0)?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 5 * GPUS_PER_NODE)?;
    wait_until("the policy is Ready", || {
        Ok(read_condition(&cluster, "ten-shares", "Ready")?.is_some_and(|(status, ..)| status == "True"))
    })
}

#[test]
fn one_node_serves_whole_gpus_shares_and_replicas_at_the_same_time() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "modes")?;
    let on = |indices: Value, rest: Value| {
        let mut spec = json!({"nodeSelector": {"kubernetes.io/hostname": NODE}, "gpus": {"indices": indices}});
        spec.as_object_mut().into_iter().for_each(|spec| spec.extend(rest.as_object().cloned().unwrap_or_default()));
        spec
    };
    scope.create_policy(
        "shares",
        &on(json!([0, 1]), json!({"mode": "Mps", "mps": {"units": 4, "threads": "Strict"}})),
    )?;
    scope.create_policy("turns", &on(json!([2]), json!({"mode": "TimeSlicing", "timeSlicing": {"replicas": 6}})))?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 8)?;
    wait_until_advertised(&cluster, "nvidia.com/gpu-timeslice", 6)?;
    wait_until_advertised(&cluster, "nvidia.com/gpu", 1)?;
    let pods = [("mps", SHARES_RESOURCE), ("turn", "nvidia.com/gpu-timeslice"), ("whole", "nvidia.com/gpu")];
    for (name, resource) in pods {
        scope.create_pod_on_node(NODE, name, &json!({resource: 1}), HOLD_CLIENT_SCRIPT)?;
    }
    let mut gpus = Vec::new();
    for (name, _) in pods {
        scope.wait_until_running(name)?;
        let report = scope.client_report(name)?;
        ensure!(report["viaMps"] == (name == "mps"), "{name} reports {report}");
        ensure!(report["sms"] == if name == "mps" { 32 } else { 132 }, "{name} reports {report}");
        gpus.push(text(&report["uuid"]));
    }
    gpus.dedup();
    ensure!(gpus.len() == 3, "two pods are on one GPU: {gpus:?}");
    Ok(())
}

#[test]
fn an_invalid_policy_is_refused_with_a_reason() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "wrong")?;
    let wrong = [
        (json!({"mode": "Mps", "mps": {"units": 0}}), "48"),
        (json!({"mode": "Mps", "mps": {"units": 49}}), "48"),
        (json!({"mode": "Mps", "mps": {"units": 4, "unitMemory": "4Gi"}}), "unitMemory"),
        (json!({"mode": "Mps"}), "mps.units"),
        (json!({"mode": "Mps", "nodeSelector": {}, "mps": {"units": 4}}), "nodeSelector is empty"),
        (json!({"mode": "TimeSlicing"}), "timeSlicing.replicas"),
        (json!({"mode": "Sometimes"}), "Sometimes"),
        (json!({"mode": "Mps", "mps": {"units": 4, "unitMemory": "4.5Gi"}}), "unitMemory"),
    ];
    for (spec, says) in wrong {
        let refused = scope.create_policy("wrong", &spec);
        let Err(error) = refused else { anyhow::bail!("accepted: {spec}") };
        let refused = error.downcast_ref::<Refused>().map(|refused| refused.message.clone()).unwrap_or_default();
        ensure!(refused.contains(says), "{spec} is refused with {refused:?}, which does not contain {says:?}");
    }
    Ok(())
}

#[test]
fn a_policy_that_selects_no_gpu_is_not_accepted_and_changes_nothing() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "nothing")?;
    scope.create_policy("unknown", &json!({"gpus": {"models": ["RTX 9999"]}, "mode": "Mps", "mps": {"units": 2}}))?;
    wait_until("the policy reports that no GPU has that model", || {
        Ok(read_condition(&cluster, "unknown", "Accepted")?
            .is_some_and(|(status, _, message)| status == "False" && message.contains("RTX 9999")))
    })?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)
}

#[test]
fn of_two_policies_on_a_gpu_the_more_specific_wins_and_the_other_reports_a_conflict() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "conflict")?;
    scope.create_policy(
        "first-gpu",
        &json!({"nodeSelector": {"kubernetes.io/hostname": NODE}, "gpus": {"indices": [0]}, "mode": "TimeSlicing", "timeSlicing": {"replicas": 3}}),
    )?;
    wait_until_advertised(&cluster, "nvidia.com/gpu-timeslice", 3)?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    wait_until("the wider policy names the one that overrides it", || {
        Ok(read_condition(&cluster, "ten-shares", "Conflict")?
            .is_some_and(|(status, _, message)| status == "True" && message.contains("first-gpu")))
    })?;
    cluster.delete(&format!("{POLICIES_PATH}/first-gpu"), None)?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)
}

#[test]
fn without_a_policy_gpus_are_advertised_as_whole_gpus() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "whole")?;
    cluster.delete(&format!("{POLICIES_PATH}/ten-shares"), None)?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 0)?;
    wait_until_advertised(&cluster, "nvidia.com/gpu", GPUS_PER_NODE)?;
    scope.create_pod_on_node(NODE, "whole", &json!({"nvidia.com/gpu": 2}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("whole")?;
    let report = scope.client_report("whole")?;
    ensure!(report["viaMps"] == false && report["sms"] == 132, "the client reports {report}");
    Ok(())
}

#[test]
fn a_change_of_one_gpu_does_not_affect_other_gpus() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "flap")?;
    scope.create_policy(
        "last-gpu",
        &json!({"nodeSelector": {"kubernetes.io/hostname": NODE}, "gpus": {"indices": [3]}, "mode": "Mps", "mps": {"units": 20}}),
    )?;
    // Check the `GpuNode`, which shows the devices shortly after the agent has sent the devices to
    // the kubelet. The kubelet updates the Node later.
    wait_without_violation(
        "the last GPU has twenty shares",
        || Ok(cluster.allocatable(NODE, SHARES_RESOURCE)? == 50),
        || {
            let others = gpus_without_ten_shares(&cluster, |gpu| gpu["index"] != 3)?;
            Ok((!others.is_empty()).then(|| others.join(", ")))
        },
    )
}

/// Returns the number of shares of the first GPU in the spec of each node's `GpuNode`, in the order
/// of `nodes`.
fn shares_in_specs(cluster: &Cluster, nodes: &[String]) -> Result<Vec<Value>> {
    let shares = |node: &String| {
        let gpus = cluster.gpu_node(node)?["spec"]["gpus"].as_array().cloned().unwrap_or_default();
        Ok(gpus.first().map_or(Value::Null, |gpu| gpu["partition"]["mps"]["slices"][0]["count"].clone()))
    };
    nodes.iter().map(shares).collect()
}

/// Waits until a policy has this reason in its condition `RolledOut`, and these counts in its
/// status.
fn wait_for_rollout(cluster: &Cluster, policy: &str, reason: &str, counts: &Value) -> Result<()> {
    wait_until(&format!("{policy} reports {reason} and {counts}"), || {
        let object = cluster.get(&format!("{POLICIES_PATH}/{policy}"))?;
        let Some((_, found, message)) = read_condition(cluster, policy, "RolledOut")? else { return Ok(false) };
        let rollout = &object["status"]["rollout"];
        ensure!(found == reason && rollout == counts, "{found}: {message}; {rollout}");
        Ok(object["status"]["observedGeneration"] == object["metadata"]["generation"])
    })
}

#[test]
fn a_changed_policy_reaches_one_node_after_another_and_can_be_paused_and_changed_back() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "waves")?;
    let mut nodes = cluster.nodes()?;
    nodes.sort();
    ensure!(nodes.len() == 2, "nodes: {nodes:?}");
    let path = format!("{POLICIES_PATH}/staged");
    let counts = |updated: u32, changing: u32, pending: u32| json!({"updated": updated, "changing": changing, "failed": 0, "pending": pending});
    scope.create_policy("staged", &json!({"mode": "Mps", "mps": {"units": 5}, "rollout": {"maxUnavailable": 1}}))?;
    wait_for_rollout(&cluster, "staged", "RolledOut", &counts(2, 0, 0))?;
    for node in &nodes {
        let pod = format!("on-{node}");
        scope.create_pod_on_node(node, &pod, &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
        scope.wait_until_running(&pod)?;
    }
    wait_until("each node reports its pod", || {
        let in_use = |node: &String| {
            let gpus = cluster.gpu_node(node)?["status"]["gpus"].as_array().cloned().unwrap_or_default();
            Ok(gpus.iter().any(|gpu| gpu["slices"][0]["inUse"] == 1))
        };
        Ok(nodes.iter().map(in_use).collect::<Result<Vec<bool>>>()?.into_iter().all(|reported| reported))
    })?;
    let unchanged = cluster.gpu_node(&nodes[1])?["metadata"]["generation"].clone();

    cluster.patch(&path, &json!({"spec": {"mps": {"units": 10}, "rollout": {"paused": true}}}))?;
    wait_for_rollout(&cluster, "staged", "RolloutPaused", &counts(0, 0, 2))?;
    ensure!(shares_in_specs(&cluster, &nodes)? == [json!(5), json!(5)], "a paused policy changed a node");

    // Pods use both nodes, so the first node waits until its pod ends, and the second node waits
    // until the first node has changed.
    cluster.patch(&path, &json!({"spec": {"rollout": {"paused": false}}}))?;
    wait_for_rollout(&cluster, "staged", "RollingOut", &counts(0, 1, 1))?;
    ensure!(shares_in_specs(&cluster, &nodes)? == [json!(10), json!(5)], "not one node changed");

    cluster.patch(&path, &json!({"spec": {"mps": {"units": 5}}}))?;
    wait_for_rollout(&cluster, "staged", "RolledOut", &counts(2, 0, 0))?;
    ensure!(shares_in_specs(&cluster, &nodes)? == [json!(5), json!(5)], "the change was not undone");
    let generation = cluster.gpu_node(&nodes[1])?["metadata"]["generation"].clone();
    ensure!(generation == unchanged, "the node that never changed was written: {generation}, not {unchanged}");

    cluster.patch(&path, &json!({"spec": {"mps": {"units": 10}}}))?;
    wait_for_rollout(&cluster, "staged", "RollingOut", &counts(0, 1, 1))?;
    scope.delete_pod(&format!("on-{}", nodes[0]), 0)?;
    wait_for_rollout(&cluster, "staged", "RollingOut", &counts(1, 1, 0))?;
    scope.delete_pod(&format!("on-{}", nodes[1]), 0)?;
    wait_for_rollout(&cluster, "staged", "RolledOut", &counts(2, 0, 0))?;
    ensure!(shares_in_specs(&cluster, &nodes)? == [json!(10), json!(10)], "a node kept its partition");
    Ok(())
}
