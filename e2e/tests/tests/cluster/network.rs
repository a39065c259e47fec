//! The policies of the network in the chart, on a network that enforces them: who reads metrics,
//! whom Cleave speaks to, and that it works all the same.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, SYSTEM, Scope, on_node, process, text, wait_until};
use serde_json::{Value, json};

use crate::chart::Setting;
use crate::restarts::{part, ready};
use crate::{GPUS, HOLD, NODE, SHARES, offers, ten_shares};

/// Port of `/metrics`.
const METRICS: &str = "8080";
/// Answers everybody, by closing.
const LISTEN: &str = "exec busybox nc -ll -p 8081 -e true";

fn address(pod: &Value) -> Result<String> {
    let address = text(&pod["status"]["podIP"]);
    ensure!(!address.is_empty(), "it has no address: {}", pod["status"]);
    Ok(address)
}

/// A shell's word on whether a connection can be had.
fn connects(address: &str, port: &str) -> String {
    // Whoever answers, in whatever protocol, closes it then.
    format!(
        "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | busybox nc -w 2 {address} {port} >/dev/null 2>&1 && echo yes || echo no"
    )
}

/// Whether a pod of the scope reaches an address.
fn reaches(scope: &Scope, pod: &str, address: &str, port: &str) -> Result<bool> {
    Ok(scope.exec(pod, &["sh", "-c", &connects(address, port)])?.trim() == "yes")
}

/// Whether a program of Cleave's on [`NODE`] reaches an address, from its pod's network.
fn cleave_reaches(program: &str, address: &str, port: &str) -> Result<bool> {
    let pid = process(NODE, program)?;
    let said = on_node(NODE, &["nsenter", &format!("--net=/proc/{pid}/ns/net"), "sh", "-c", &connects(address, port)])?;
    Ok(said.trim() == "yes")
}

/// A pod that can be told to connect, in a namespace of its own.
fn caller<'a>(cluster: &'a Cluster, name: &str, labelled: bool) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    if labelled {
        let label = json!({"metadata": {"labels": {"metrics": "enabled"}}});
        cluster.patch(&format!("/api/v1/namespaces/{}", scope.namespace), &label)?;
    }
    scope.pod_on("node2", "caller", &json!({}), "exec sleep 1000000")?;
    scope.running("caller")?;
    Ok(scope)
}

/// All of Cleave's pods, and that each is ready.
fn all_ready(cluster: &Cluster) -> Result<()> {
    wait_until("all of Cleave is ready", || {
        let pods = cluster.list(&format!("/api/v1/namespaces/{SYSTEM}/pods"))?;
        Ok(pods.iter().all(ready))
    })
}

#[test]
fn metrics_are_read_from_namespaces_that_have_the_label_and_cleave_speaks_to_the_api_server_alone() -> Result<()> {
    let cluster = Cluster::connect()?;
    let stranger = caller(&cluster, "network-stranger", false)?;
    let reader = caller(&cluster, "network-reader", true)?;
    // Somebody to talk to, whom no policy protects.
    stranger.pod_on("node2", "listener", &json!({}), LISTEN)?;
    let listener = address(&stranger.running("listener")?)?;
    wait_until("the listener listens", || reaches(&reader, "caller", &listener, "8081"))?;

    for component in ["agent", "operator"] {
        let metrics = address(&part(&cluster, component)?)?;
        wait_until(&format!("the {component}'s metrics can be read"), || {
            reaches(&reader, "caller", &metrics, METRICS)
        })?;
        wait_until(&format!("the {component} does not answer others"), || {
            Ok(!reaches(&stranger, "caller", &metrics, METRICS)?)
        })?;
    }
    let service = cluster.get("/api/v1/namespaces/default/services/kubernetes")?;
    let api = text(&service["spec"]["clusterIP"]);
    ensure!(!api.is_empty(), "the API server has no address: {}", service["spec"]);
    ensure!(cleave_reaches("cleave-agent", &api, "443")?, "the agent does not reach the API server");
    ensure!(!cleave_reaches("cleave-mps-host", &api, "443")?, "the MPS host reaches the API server");
    for program in ["cleave-agent", "cleave-mps-host"] {
        ensure!(!cleave_reaches(program, &listener, "8081")?, "{program} reaches a pod");
    }
    let host = process(NODE, "cleave-mps-host")?;
    let listens = on_node(NODE, &["cat", &format!("/proc/{host}/net/tcp"), &format!("/proc/{host}/net/tcp6")])?;
    // 0A is LISTEN.
    let open: Vec<&str> = listens.lines().filter(|line| line.split_whitespace().nth(3) == Some("0A")).collect();
    ensure!(open.is_empty(), "the MPS host has open ports: {open:?}");
    all_ready(&cluster)?;
    drop((stranger, reader));
    // And it does its work.
    let scope = ten_shares(&cluster, "network")?;
    scope.pod("two", &json!({SHARES: 2}), HOLD)?;
    ensure!(scope.seen("two")?["sms"] == 26, "it sees {}", scope.seen("two")?);
    offers(&cluster, SHARES, 10 * GPUS)
}

/// What the other test shows is the policies' doing.
#[test]
fn without_the_policies_anybody_reads_metrics_and_the_agent_reaches_anybody() -> Result<()> {
    let cluster = Cluster::connect()?;
    let stranger = caller(&cluster, "network-open", false)?;
    stranger.pod_on("node2", "listener", &json!({}), LISTEN)?;
    let listener = address(&stranger.running("listener")?)?;
    let without = Setting::of("networkPolicy.enabled", false)?;
    let metrics = address(&part(&cluster, "agent").context("no agent")?)?;
    wait_until("anybody reads the agent's metrics", || reaches(&stranger, "caller", &metrics, METRICS))?;
    wait_until("the agent reaches anybody", || cleave_reaches("cleave-agent", &listener, "8081"))?;
    drop(without);
    wait_until("the agent does not answer others", || Ok(!reaches(&stranger, "caller", &metrics, METRICS)?))
}
