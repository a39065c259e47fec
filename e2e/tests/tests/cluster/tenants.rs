//! Tests tenants that use more memory than their shares permit, or that compute outside MPS. Cleave
//! must set a condition, write an Event, and evict the pod if the policy requires eviction.
//! Neighbours are not affected. Programs can bypass the limits of the simulated MPS in the same
//! ways as the limits of the real MPS.
use anyhow::{Result, ensure};
use cleave_e2e::{Cluster, Scope, WAIT_TIMEOUT, text, wait_for, wait_until};
use serde_json::{Value, json};

use crate::restarts::query_agent;
use crate::{GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, wait_until_advertised};

/// Script that sets a memory limit that MPS cannot parse, so that the program can use all of the
/// memory.
const ESCAPE_MEMORY_LIMIT_SCRIPT: &str =
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=junk exec cleave-client --allocate 20000 --hold forever";
/// Script of a program that does not find its pod's door, and therefore runs without MPS.
const RUN_OUTSIDE_MPS_SCRIPT: &str = "CUDA_MPS_PIPE_DIRECTORY=/nowhere exec cleave-client --hold forever";

/// Creates a namespace, and a policy that divides each GPU into ten shares of about 8 GiB each. The
/// policy's compute mode permits programs outside MPS.
fn scope_with_enforcement<'a>(cluster: &'a Cluster, name: &str, enforcement: &str) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    let spec = json!({
        "nodeSelector": {"kubernetes.io/hostname": NODE}, "mode": "Mps", "enforcement": enforcement,
        "mps": {"units": 10, "threads": "Strict", "computeMode": "Default"},
    });
    scope.create_policy("watched", &spec)?;
    wait_until_advertised(cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    Ok(scope)
}

/// Returns the status and the reason of a pod's condition `cleave.dev/WithinShare`.
fn within_share_condition(cluster: &Cluster, scope: &Scope, pod: &str) -> Result<Option<(String, String)>> {
    let Some(pod) = cluster.find(&scope.pod_path(pod))? else { return Ok(None) };
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let ours = conditions.iter().find(|condition| condition["type"] == "cleave.dev/WithinShare");
    Ok(ours.map(|condition| (text(&condition["status"]), text(&condition["reason"]))))
}

/// Returns the Events about a pod with this reason.
fn events_with_reason(cluster: &Cluster, scope: &Scope, pod: &str, reason: &str) -> Result<Vec<Value>> {
    let all = cluster.list(&format!("/apis/events.k8s.io/v1/namespaces/{}/events", scope.namespace))?;
    let of_pod = |event: &&Value| {
        let regarding = &event["regarding"];
        regarding["kind"] == "Pod" && regarding["name"] == pod && event["reason"] == reason
    };
    Ok(all.iter().filter(of_pod).cloned().collect())
}

/// Returns the value of a metric, in bytes, for a pod's container.
fn metric_value(text: &str, metric: &str, scope: &Scope, pod: &str) -> Option<f64> {
    let labels = format!("namespace=\"{}\",pod=\"{pod}\",container=\"main\"", scope.namespace);
    let line = text.lines().find(|line| line.starts_with(&format!("{metric}{{")) && line.contains(&labels))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

/// Waits until a pod has the condition for this finding, and until an Event reports the finding.
pub(crate) fn wait_for_condition_and_event(cluster: &Cluster, scope: &Scope, pod: &str, kind: &str) -> Result<()> {
    wait_until(&format!("{pod} has the condition {kind}"), || {
        let condition = within_share_condition(cluster, scope, pod)?;
        ensure!(condition == Some(("False".to_owned(), kind.to_owned())), "the pod's condition is {condition:?}");
        Ok(true)
    })?;
    wait_until(&format!("{pod} has an Event {kind}"), || Ok(!events_with_reason(cluster, scope, pod, kind)?.is_empty()))
}

#[test]
fn a_pod_that_escapes_its_memory_limit_is_reported_and_its_neighbour_is_not() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = scope_with_enforcement(&cluster, "tenants-memory", "Report")?;
    scope.create_pod("neighbour", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("neighbour")?;
    scope.create_pod("escape", &json!({SHARES_RESOURCE: 1}), ESCAPE_MEMORY_LIMIT_SCRIPT)?;
    wait_for_condition_and_event(&cluster, &scope, "escape", "MemoryExceeded")?;
    let reported = events_with_reason(&cluster, &scope, "escape", "MemoryExceeded")?;
    let note = text(&reported[0]["note"]);
    ensure!(note.contains("MiB") && note.contains("request more shares"), "the Event has the note {note:?}");
    let figures = wait_for("the metrics have both pods", WAIT_TIMEOUT, || {
        let text = query_agent(&cluster, "metrics")?;
        let of = |pod| {
            let memory = metric_value(&text, "cleave_tenant_memory_bytes", &scope, pod)?;
            Some((memory, metric_value(&text, "cleave_tenant_memory_limit_bytes", &scope, pod)?))
        };
        Ok(of("escape").zip(of("neighbour")))
    })?;
    let ((escaped, limit), (kept, other)) = figures;
    ensure!(escaped > limit && kept < other, "escape {escaped} of {limit}, neighbour {kept} of {other}");
    ensure!(within_share_condition(&cluster, &scope, "neighbour")?.is_none(), "the neighbour has a finding");
    ensure!(
        events_with_reason(&cluster, &scope, "neighbour", "MemoryExceeded")?.is_empty(),
        "the neighbour has a finding"
    );
    ensure!(cluster.find(&scope.pod_path("escape"))?.is_some(), "the pod was evicted although the policy sets Report");

    // The agent must clear the finding: the program exits, the pod's next program remains within
    // the share, and the condition changes.
    scope.delete_pod("escape", 0)?;
    let first = "CUDA_MPS_PIPE_DIRECTORY=/nowhere cleave-client --hold forever & echo $! >/pid; wait";
    scope.create_pod("outside", &json!({SHARES_RESOURCE: 1}), &format!("{first}; {HOLD_CLIENT_SCRIPT}"))?;
    wait_for_condition_and_event(&cluster, &scope, "outside", "OutsideMps")?;
    scope.exec_in_pod("outside", &["sh", "-c", "kill $(cat /pid)"])?;
    wait_until("the condition reports that the pod is within its share", || {
        let condition = within_share_condition(&cluster, &scope, "outside")?;
        ensure!(
            condition == Some(("True".to_owned(), "WithinShare".to_owned())),
            "the pod's condition is {condition:?}"
        );
        Ok(true)
    })?;
    wait_until("the metrics do not contain the deleted pod", || {
        Ok(metric_value(&query_agent(&cluster, "metrics")?, "cleave_tenant_memory_bytes", &scope, "escape").is_none())
    })
}

#[test]
fn a_pod_that_exceeds_its_share_is_evicted_if_the_policy_sets_evict() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = scope_with_enforcement(&cluster, "tenants-evict", "Evict")?;
    scope.create_pod("neighbour", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("neighbour")?;
    for (pod, script) in [("escape", ESCAPE_MEMORY_LIMIT_SCRIPT), ("outside", RUN_OUTSIDE_MPS_SCRIPT)] {
        scope.create_pod(pod, &json!({SHARES_RESOURCE: 1}), script)?;
        wait_until(&format!("{pod} is evicted"), || Ok(cluster.find(&scope.pod_path(pod))?.is_none()))?;
        wait_until(&format!("an Event contains the reason for the eviction of {pod}"), || {
            Ok(!events_with_reason(&cluster, &scope, pod, "EvictedOutsideShare")?.is_empty())
        })?;
    }
    scope.wait_until_running("neighbour")?;
    ensure!(within_share_condition(&cluster, &scope, "neighbour")?.is_none(), "the neighbour has a finding");
    wait_until("the status has no finding", || {
        let node = cluster.gpu_node(NODE)?;
        Ok(node["status"]["findings"].as_array().is_none_or(Vec::is_empty))
    })
}
