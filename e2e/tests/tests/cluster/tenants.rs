//! Who uses more memory than its shares, or computes outside MPS, is found, told, and evicted where
//! the policy says so; a neighbour is not accused. The stand-in MPS lets limits escape as the real
//! one does.
use anyhow::{Result, ensure};
use cleave_e2e::{Cluster, PATIENCE, Scope, text, wait_for, wait_until};
use serde_json::{Value, json};

use crate::restarts::agent_says;
use crate::{GPUS, HOLD, NODE, SHARES, offers};

/// What is free of a limit that MPS does not understand: all of it.
const ESCAPE: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=junk exec cleave-client --allocate 20000 --hold forever";
/// A program that does not find its door runs as if there were no MPS.
const OUTSIDE: &str = "CUDA_MPS_PIPE_DIRECTORY=/nowhere exec cleave-client --hold forever";

/// Ten shares of each GPU, of about 8 GiB; computing outside MPS is not kept from by the compute
/// mode.
fn watched<'a>(cluster: &'a Cluster, name: &str, enforcement: &str) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    let spec = json!({
        "nodeSelector": {"kubernetes.io/hostname": NODE}, "mode": "Mps", "enforcement": enforcement,
        "mps": {"units": 10, "threads": "Strict", "computeMode": "Default"},
    });
    scope.policy("watched", &spec)?;
    offers(cluster, SHARES, 10 * GPUS)?;
    Ok(scope)
}

/// The pod's word on whether it keeps to its shares: status and reason.
fn within(cluster: &Cluster, scope: &Scope, pod: &str) -> Result<Option<(String, String)>> {
    let Some(pod) = cluster.find(&scope.pod_path(pod))? else { return Ok(None) };
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let ours = conditions.iter().find(|condition| condition["type"] == "cleave.dev/WithinShare");
    Ok(ours.map(|condition| (text(&condition["status"]), text(&condition["reason"]))))
}

/// Events of a pod with this reason.
fn events(cluster: &Cluster, scope: &Scope, pod: &str, reason: &str) -> Result<Vec<Value>> {
    let all = cluster.list(&format!("/apis/events.k8s.io/v1/namespaces/{}/events", scope.namespace))?;
    let of_pod = |event: &&Value| {
        let regarding = &event["regarding"];
        regarding["kind"] == "Pod" && regarding["name"] == pod && event["reason"] == reason
    };
    Ok(all.iter().filter(of_pod).cloned().collect())
}

/// Bytes of a series of a pod's container.
fn series(text: &str, metric: &str, scope: &Scope, pod: &str) -> Option<f64> {
    let labels = format!("namespace=\"{}\",pod=\"{pod}\",container=\"main\"", scope.namespace);
    let line = text.lines().find(|line| line.starts_with(&format!("{metric}{{")) && line.contains(&labels))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

/// Waits until a pod's condition and an Event say what it did.
pub(crate) fn found(cluster: &Cluster, scope: &Scope, pod: &str, kind: &str) -> Result<()> {
    wait_until(&format!("{pod} is told {kind}"), || {
        let condition = within(cluster, scope, pod)?;
        ensure!(condition == Some(("False".to_owned(), kind.to_owned())), "its condition is {condition:?}");
        Ok(true)
    })?;
    wait_until(&format!("an event tells {pod} of {kind}"), || Ok(!events(cluster, scope, pod, kind)?.is_empty()))
}

#[test]
fn a_pod_that_escapes_its_memory_limit_is_told_and_its_neighbour_is_not() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = watched(&cluster, "tenants-memory", "Report")?;
    scope.pod("neighbour", &json!({SHARES: 1}), HOLD)?;
    scope.running("neighbour")?;
    scope.pod("escape", &json!({SHARES: 1}), ESCAPE)?;
    found(&cluster, &scope, "escape", "MemoryExceeded")?;
    let told = events(&cluster, &scope, "escape", "MemoryExceeded")?;
    let note = text(&told[0]["note"]);
    ensure!(note.contains("MiB") && note.contains("ask for more shares"), "it is told {note:?}");
    let figures = wait_for("the metrics of both", PATIENCE, || {
        let text = agent_says(&cluster, "metrics")?;
        let of = |pod| {
            let memory = series(&text, "cleave_tenant_memory_bytes", &scope, pod)?;
            Some((memory, series(&text, "cleave_tenant_memory_limit_bytes", &scope, pod)?))
        };
        Ok(of("escape").zip(of("neighbour")))
    })?;
    let ((escaped, limit), (kept, other)) = figures;
    ensure!(escaped > limit && kept < other, "escape {escaped} of {limit}, neighbour {kept} of {other}");
    ensure!(within(&cluster, &scope, "neighbour")?.is_none(), "the neighbour is accused");
    ensure!(events(&cluster, &scope, "neighbour", "MemoryExceeded")?.is_empty(), "the neighbour is accused");
    ensure!(cluster.find(&scope.pod_path("escape"))?.is_some(), "it was only to be told");

    // Over is over: the program ends, the pod's next one keeps to its share, and the pod says so.
    scope.delete_pod("escape", 0)?;
    let first = "CUDA_MPS_PIPE_DIRECTORY=/nowhere cleave-client --hold forever & echo $! >/pid; wait";
    scope.pod("outside", &json!({SHARES: 1}), &format!("{first}; {HOLD}"))?;
    found(&cluster, &scope, "outside", "OutsideMps")?;
    scope.exec("outside", &["sh", "-c", "kill $(cat /pid)"])?;
    wait_until("the pod says that it keeps to its share again", || {
        let condition = within(&cluster, &scope, "outside")?;
        ensure!(condition == Some(("True".to_owned(), "WithinShare".to_owned())), "its condition is {condition:?}");
        Ok(true)
    })?;
    wait_until("the series go with the pod", || {
        Ok(series(&agent_says(&cluster, "metrics")?, "cleave_tenant_memory_bytes", &scope, "escape").is_none())
    })
}

#[test]
fn where_the_policy_says_so_who_left_its_share_is_evicted() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = watched(&cluster, "tenants-evict", "Evict")?;
    scope.pod("neighbour", &json!({SHARES: 1}), HOLD)?;
    scope.running("neighbour")?;
    for (pod, script) in [("escape", ESCAPE), ("outside", OUTSIDE)] {
        scope.pod(pod, &json!({SHARES: 1}), script)?;
        wait_until(&format!("{pod} is evicted"), || Ok(cluster.find(&scope.pod_path(pod))?.is_none()))?;
        wait_until(&format!("an event says why {pod} was"), || {
            Ok(!events(&cluster, &scope, pod, "EvictedOutsideShare")?.is_empty())
        })?;
    }
    scope.running("neighbour")?;
    ensure!(within(&cluster, &scope, "neighbour")?.is_none(), "the neighbour is accused");
    wait_until("nothing of them is left in the status", || {
        let node = cluster.gpunode(NODE)?;
        Ok(node["status"]["findings"].as_array().is_none_or(Vec::is_empty))
    })
}
