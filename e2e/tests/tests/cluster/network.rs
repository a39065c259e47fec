//! Tests the chart's network policies on a cluster whose network enforces them: which pods can read
//! metrics, and to which addresses Cleave can connect. Cleave must work with the policies.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, SYSTEM_NAMESPACE, Scope, on_node, text, wait_for_pid, wait_until};
use serde_json::{Value, json};

use crate::chart::ChartSetting;
use crate::restarts::{component_pod, is_ready};
use crate::{GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, ten_shares, wait_until_advertised};

/// The port on which the agent and the operator serve `/metrics`.
const METRICS_PORT: &str = "8080";
/// Script of a server on port 8081 that accepts every connection and then closes the connection.
const LISTEN_ON_8081_SCRIPT: &str = "exec busybox nc -ll -p 8081 -e true";

fn pod_address(pod: &Value) -> Result<String> {
    let address = text(&pod["status"]["podIP"]);
    ensure!(!address.is_empty(), "the pod has no address: {}", pod["status"]);
    Ok(address)
}

/// Returns a shell command that prints `yes` if it could connect to an address, and `no` otherwise.
fn connect_command(address: &str, port: &str) -> String {
    // Send a request, so that a server that does not use HTTP also answers and closes the
    // connection.
    format!(
        "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | busybox nc -w 2 {address} {port} >/dev/null 2>&1 && echo yes || echo no"
    )
}

/// Returns whether a pod of the scope's namespace can connect to an address.
fn can_connect(scope: &Scope, pod: &str, address: &str, port: &str) -> Result<bool> {
    Ok(scope.exec_in_pod(pod, &["sh", "-c", &connect_command(address, port)])?.trim() == "yes")
}

/// Returns whether a program of Cleave on [`NODE`] can connect to an address from the network
/// namespace of its pod.
fn can_program_connect(program: &str, address: &str, port: &str) -> Result<bool> {
    let pid = wait_for_pid(NODE, program)?;
    let printed =
        on_node(NODE, &["nsenter", &format!("--net=/proc/{pid}/ns/net"), "sh", "-c", &connect_command(address, port)])?;
    Ok(printed.trim() == "yes")
}

/// Creates a namespace with a pod `caller`, in which tests run commands. If `labelled` is true, the
/// namespace has the label that permits its pods to read metrics.
fn scope_for_caller<'a>(cluster: &'a Cluster, name: &str, labelled: bool) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    if labelled {
        let label = json!({"metadata": {"labels": {"metrics": "enabled"}}});
        cluster.patch(&format!("/api/v1/namespaces/{}", scope.namespace), &label)?;
    }
    scope.create_pod_on_node("node2", "caller", &json!({}), "exec sleep 1000000")?;
    scope.wait_until_running("caller")?;
    Ok(scope)
}

/// Waits until all of Cleave's pods are ready.
fn wait_until_all_ready(cluster: &Cluster) -> Result<()> {
    wait_until("all of Cleave's pods are ready", || {
        let pods = cluster.list(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"))?;
        Ok(pods.iter().all(is_ready))
    })
}

#[test]
fn only_labelled_namespaces_can_read_metrics_and_cleave_connects_only_to_the_api_server() -> Result<()> {
    let cluster = Cluster::connect()?;
    let stranger = scope_for_caller(&cluster, "network-stranger", false)?;
    let reader = scope_for_caller(&cluster, "network-reader", true)?;
    // No network policy protects this server.
    stranger.create_pod_on_node("node2", "listener", &json!({}), LISTEN_ON_8081_SCRIPT)?;
    let listener = pod_address(&stranger.wait_until_running("listener")?)?;
    wait_until("the listener accepts connections", || can_connect(&reader, "caller", &listener, "8081"))?;

    for component in ["agent", "operator"] {
        let metrics = pod_address(&component_pod(&cluster, component)?)?;
        wait_until(&format!("the {component}'s metrics can be read"), || {
            can_connect(&reader, "caller", &metrics, METRICS_PORT)
        })?;
        wait_until(&format!("other namespaces cannot reach the {component}"), || {
            Ok(!can_connect(&stranger, "caller", &metrics, METRICS_PORT)?)
        })?;
    }
    let service = cluster.get("/api/v1/namespaces/default/services/kubernetes")?;
    let api = text(&service["spec"]["clusterIP"]);
    ensure!(!api.is_empty(), "the API server has no address: {}", service["spec"]);
    wait_until("the agent reaches the API server", || can_program_connect("cleave-agent", &api, "443"))?;
    ensure!(!can_program_connect("cleave-mps-host", &api, "443")?, "the MPS host can reach the API server");
    for program in ["cleave-agent", "cleave-mps-host"] {
        ensure!(!can_program_connect(program, &listener, "8081")?, "{program} can reach a pod");
    }
    let host = wait_for_pid(NODE, "cleave-mps-host")?;
    let listens = on_node(NODE, &["cat", &format!("/proc/{host}/net/tcp"), &format!("/proc/{host}/net/tcp6")])?;
    // The state 0A means LISTEN.
    let open: Vec<&str> = listens.lines().filter(|line| line.split_whitespace().nth(3) == Some("0A")).collect();
    ensure!(open.is_empty(), "the MPS host listens on ports: {open:?}");
    wait_until_all_ready(&cluster)?;
    drop((stranger, reader));
    // The kubelet must still allocate shares to pods.
    let scope = ten_shares(&cluster, "network")?;
    scope.create_pod("two", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    ensure!(scope.client_report("two")?["sms"] == 26, "the client reports {}", scope.client_report("two")?);
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)
}

/// Shows that the policies cause the failed connections in the other test: without the policies,
/// the connections of this test succeed.
#[test]
fn without_the_policies_every_namespace_reads_metrics_and_the_agent_connects_anywhere() -> Result<()> {
    let cluster = Cluster::connect()?;
    let stranger = scope_for_caller(&cluster, "network-open", false)?;
    stranger.create_pod_on_node("node2", "listener", &json!({}), LISTEN_ON_8081_SCRIPT)?;
    let listener = pod_address(&stranger.wait_until_running("listener")?)?;
    let without = ChartSetting::change("networkPolicy.enabled", false)?;
    let metrics = pod_address(&component_pod(&cluster, "agent").context("no agent")?)?;
    wait_until("every namespace can read the agent's metrics", || {
        can_connect(&stranger, "caller", &metrics, METRICS_PORT)
    })?;
    wait_until("the agent can reach every pod", || can_program_connect("cleave-agent", &listener, "8081"))?;
    drop(without);
    wait_until("other namespaces cannot reach the agent", || {
        Ok(!can_connect(&stranger, "caller", &metrics, METRICS_PORT)?)
    })
}
