//! Tests that running pods are not disturbed when a component of Cleave or the kubelet is
//! restarted, upgraded or killed.
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    AGENT_SUPERVISOR, Cluster, SYSTEM_NAMESPACE, Scope, find_pid, kubectl, on_node, run_launcher, run_program,
    signal_program, text, wait_until, wait_without_violation,
};
use serde_json::{Value, json};

use crate::{
    GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, container_and_restarts, daemon_pids, ten_shares,
    wait_until_advertised,
};

/// The state that must not change: the containers of two pods with seven shares in total, and the
/// PIDs of the MPS daemons.
struct RunningState {
    pods: Vec<(String, u64)>,
    daemons: Vec<(String, u64)>,
}

const POD_NAMES: [&str; 2] = ["two", "five"];
const SHARES_IN_USE: u64 = 7;

/// Creates the pods, waits until they run, and returns their state.
fn start_pods(cluster: &Cluster, scope: &Scope) -> Result<RunningState> {
    for (name, shares) in POD_NAMES.into_iter().zip([2, 5]) {
        scope.create_pod(name, &json!({SHARES_RESOURCE: shares}), HOLD_CLIENT_SCRIPT)?;
    }
    POD_NAMES.iter().try_for_each(|name| scope.wait_until_running(name).map(drop))?;
    POD_NAMES.iter().try_for_each(|name| scope.client_report(name).map(drop))?;
    Ok(RunningState { pods: container_restarts(cluster, scope)?, daemons: daemon_pids(cluster)? })
}

/// Returns the container id and the number of restarts of each pod.
fn container_restarts(cluster: &Cluster, scope: &Scope) -> Result<Vec<(String, u64)>> {
    POD_NAMES.iter().map(|name| container_and_restarts(cluster, scope, name)).collect()
}

impl RunningState {
    /// Checks that the containers and the daemons have not changed, that the daemons still run, and
    /// that a new pod starts.
    fn check_unchanged(&self, cluster: &Cluster, scope: &Scope) -> Result<()> {
        ensure!(self.pods == container_restarts(cluster, scope)?, "a running pod was disturbed");
        wait_until("the node reports its daemons", || Ok(!daemon_pids(cluster)?.is_empty()))?;
        ensure!(self.daemons == daemon_pids(cluster)?, "an MPS daemon was restarted");
        for (device, pid) in &self.daemons {
            on_node(NODE, &["test", "-d", &format!("/proc/{pid}")])
                .with_context(|| format!("the daemon of {device} has exited"))?;
        }
        wait_until_advertised(cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
        scope.create_pod("new", &json!({SHARES_RESOURCE: 3}), HOLD_CLIENT_SCRIPT)?;
        scope.wait_until_running("new")?;
        ensure!(scope.client_report("new")?["sms"] == 38, "the new pod has other limits");
        Ok(())
    }
}

/// Returns a check for [`wait_without_violation`]. The check reports a violation if the node
/// advertises fewer shares than are in use.
fn check_for_fewer_shares_than_in_use(cluster: &Cluster) -> impl FnMut() -> Result<Option<String>> + '_ {
    || {
        let advertised = cluster.allocatable(NODE, SHARES_RESOURCE)?;
        Ok((advertised < SHARES_IN_USE)
            .then(|| format!("{advertised} shares were advertised while {SHARES_IN_USE} were in use")))
    }
}

/// Returns the name of the operator's pod that holds the lease.
pub(crate) fn leader_identity(cluster: &Cluster) -> Result<String> {
    let lease =
        cluster.get(&format!("/apis/coordination.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/leases/cleave-operator"))?;
    Ok(text(&lease["spec"]["holderIdentity"]))
}

/// Finds the pod of a component of Cleave: the leading operator's pod, or the component's pod on
/// [`NODE`].
pub(crate) fn component_pod(cluster: &Cluster, component: &str) -> Result<Value> {
    let pods = cluster.list(&format!(
        "/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?labelSelector=app.kubernetes.io/component={component}"
    ))?;
    let leader = if component == "operator" { Some(leader_identity(cluster)?) } else { None };
    let is_meant = |pod: &&Value| match &leader {
        Some(leader) => text(&pod["metadata"]["name"]) == *leader,
        None => pod["spec"]["nodeName"] == NODE,
    };
    pods.iter()
        .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null())
        .find(is_meant)
        .cloned()
        .with_context(|| format!("no {component} pod"))
}

/// Sends a request for a path to the HTTP server of the agent on [`NODE`], and returns the
/// response.
pub(crate) fn query_agent(cluster: &Cluster, path: &str) -> Result<String> {
    let name = text(&component_pod(cluster, "agent")?["metadata"]["name"]);
    kubectl(&["get", "--raw", &format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{name}:8080/proxy/{path}")])
}

/// Waits until the agent on [`NODE`] serves. Sends a request to the agent, because the readiness
/// that Kubernetes reports may be that of an earlier process.
pub(crate) fn wait_until_agent_serves(cluster: &Cluster) -> Result<()> {
    wait_until("the agent serves", || query_agent(cluster, "readyz").map(|_| true))
}

/// Returns the restart count of a pod's container.
fn restart_count(pod: &Value) -> u64 {
    pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0)
}

/// Returns whether a pod's container is ready.
pub(crate) fn is_ready(pod: &Value) -> bool {
    pod["status"]["containerStatuses"][0]["ready"] == true
}

#[test]
fn a_killed_kubelet_disturbs_no_pod() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "kubelet")?;
    let running = start_pods(&cluster, &scope)?;
    run_launcher(&["kill", &format!("kubelet@{NODE}")])?;
    run_launcher(&["start", &format!("kubelet@{NODE}")])?;
    running.check_unchanged(&cluster, &scope)
}

/// Returns a check for [`wait_without_violation`]. The check reports a violation if the node does
/// not advertise all of its shares. The kubelet relay must serve the shares even while no agent
/// runs.
fn check_for_missing_shares(cluster: &Cluster) -> impl FnMut() -> Result<Option<String>> + '_ {
    || {
        let advertised = cluster.allocatable(NODE, SHARES_RESOURCE)?;
        Ok((advertised != 10 * GPUS_PER_NODE).then(|| format!("{advertised} shares were advertised")))
    }
}

#[test]
fn a_killed_agent_restarts_at_once_and_its_shares_stay_advertised() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "agent")?;
    let running = start_pods(&cluster, &scope)?;
    let before = restart_count(&component_pod(&cluster, "agent")?);
    let supervisor = find_pid(NODE, AGENT_SUPERVISOR)?;
    for _ in 0..3 {
        let old = find_pid(NODE, "cleave-agent")?;
        signal_program(NODE, "cleave-agent", "KILL")?;
        wait_without_violation(
            "the agent is ready",
            || {
                let another = find_pid(NODE, "cleave-agent").is_ok_and(|pid| pid != old);
                let all = cluster.allocatable(NODE, SHARES_RESOURCE)? == 10 * GPUS_PER_NODE;
                Ok(all && another && component_pod(&cluster, "agent").is_ok_and(|pod| is_ready(&pod)))
            },
            check_for_missing_shares(&cluster),
        )?;
    }
    wait_until_agent_serves(&cluster)?;
    running.check_unchanged(&cluster, &scope)?;
    ensure!(find_pid(NODE, AGENT_SUPERVISOR)? == supervisor, "the supervisor was restarted");
    ensure!(restart_count(&component_pod(&cluster, "agent")?) == before, "the container was restarted");
    Ok(())
}

/// The stopped supervisor of the agent on [`NODE`]. Dropping this value continues the supervisor.
struct StoppedSupervisor;

impl StoppedSupervisor {
    fn stop() -> Result<Self> {
        let stopped = Self;
        signal_program(NODE, AGENT_SUPERVISOR, "STOP")?;
        Ok(stopped)
    }
}

impl Drop for StoppedSupervisor {
    fn drop(&mut self) {
        if let Err(error) = signal_program(NODE, AGENT_SUPERVISOR, "CONT") {
            let _ = writeln!(std::io::stderr(), "failed to continue the supervisor: {error:#}");
        }
    }
}

#[test]
fn a_pod_waits_for_an_agent_whose_supervisor_restarts_it_late() -> Result<()> {
    // Longer than the relay waits for an agent without a supervisor, and shorter than it waits for
    // an agent with a supervisor.
    const ABSENCE: Duration = Duration::from_secs(15);
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "late")?;
    let running = start_pods(&cluster, &scope)?;
    let stopped = StoppedSupervisor::stop()?;
    signal_program(NODE, "cleave-agent", "KILL")?;
    let since = Instant::now();
    scope.create_pod("waiting", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    let mut missing = check_for_missing_shares(&cluster);
    wait_without_violation(
        "the agent is absent for long enough",
        || Ok(since.elapsed() >= ABSENCE),
        || {
            let pod = cluster.get(&scope.pod_path("waiting"))?;
            if pod["status"]["phase"] == "Failed" { Ok(Some(text(&pod["status"]["message"]))) } else { missing() }
        },
    )?;
    let pod = cluster.get(&scope.pod_path("waiting"))?;
    ensure!(pod["spec"]["nodeName"] == NODE, "the pod did not reach the kubelet while the agent was absent");
    drop(stopped);
    scope.wait_until_running("waiting")?;
    running.check_unchanged(&cluster, &scope)
}

/// A second agent on [`NODE`]. Two agents run at the same time during an upgrade, or for a longer
/// time if the configuration is wrong. Dropping this value deletes the second agent.
struct SecondAgent<'a> {
    cluster: &'a Cluster,
    path: String,
}

impl<'a> SecondAgent<'a> {
    fn start(cluster: &'a Cluster) -> Result<Self> {
        let pods = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods");
        // Omit the labels of the DaemonSet's pods, because the DaemonSet would delete an additional
        // pod with these labels.
        let spec = component_pod(cluster, "agent")?["spec"].take();
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "second-agent"}, "spec": spec});
        let second = Self { cluster, path: format!("{pods}/second-agent") };
        cluster.create(&pods, &pod)?;
        Ok(second)
    }

    fn is_ready(&self) -> Result<bool> {
        Ok(is_ready(&self.cluster.get(&self.path)?))
    }

    fn has_logged(&self, words: &str) -> bool {
        self.cluster.read(&format!("{}/log", self.path)).is_ok_and(|log| log.contains(words))
    }
}

impl Drop for SecondAgent<'_> {
    fn drop(&mut self) {
        let gone = self.cluster.delete(&self.path, None);
        let is_gone = || Ok(self.cluster.find(&self.path)?.is_none());
        if let Err(error) = gone.and_then(|()| wait_until("the second agent no longer exists", is_gone)) {
            let _ = writeln!(std::io::stderr(), "failed to delete the second agent: {error:#}");
        }
    }
}

#[test]
fn a_second_agent_on_a_node_takes_over_and_the_first_serves_again_after_its_deletion() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "two-agents")?;
    let running = start_pods(&cluster, &scope)?;
    let first = component_pod(&cluster, "agent")?;
    let is_first_ready = || {
        let agent = component_pod(&cluster, "agent")?;
        Ok::<_, anyhow::Error>(agent["metadata"]["uid"] == first["metadata"]["uid"] && is_ready(&agent))
    };
    let second = SecondAgent::start(&cluster)?;
    wait_without_violation(
        "the second agent serves",
        || Ok(second.has_logged("this agent serves the node") && second.is_ready()?),
        check_for_missing_shares(&cluster),
    )?;
    ensure!(is_first_ready()?, "Kubernetes would delete an old agent that is not ready");
    running.check_unchanged(&cluster, &scope)?;
    drop(second);
    scope.create_pod("last", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    wait_without_violation(
        "a pod runs on the node of the first agent",
        || Ok(cluster.get(&scope.pod_path("last"))?["status"]["phase"] == "Running"),
        check_for_missing_shares(&cluster),
    )?;
    ensure!(is_first_ready()?, "the first agent does not serve again");
    wait_until_agent_serves(&cluster)?;
    ensure!(running.pods == container_restarts(&cluster, &scope)?, "a running pod was disturbed");
    Ok(())
}

#[test]
fn a_killed_container_of_the_agent_disturbs_no_pod() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "container")?;
    // Replace the pod first, because the kubelet waits longer before each restart of a container,
    // and other tests have restarted this container.
    let uid = |pod: &Value| text(&pod["metadata"]["uid"]);
    let old = component_pod(&cluster, "agent")?;
    cluster.delete(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{}", text(&old["metadata"]["name"])), None)?;
    wait_until("another agent", || {
        Ok(component_pod(&cluster, "agent").is_ok_and(|pod| uid(&pod) != uid(&old) && is_ready(&pod)))
    })?;
    let running = start_pods(&cluster, &scope)?;
    let before = restart_count(&component_pod(&cluster, "agent")?);
    signal_program(NODE, AGENT_SUPERVISOR, "KILL")?;
    wait_without_violation(
        "the agent is ready",
        || component_pod(&cluster, "agent").map(|pod| restart_count(&pod) > before && is_ready(&pod)),
        check_for_missing_shares(&cluster),
    )?;
    running.check_unchanged(&cluster, &scope)
}

#[test]
fn a_killed_operator_disturbs_no_pod() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "operator")?;
    let running = start_pods(&cluster, &scope)?;
    let old = text(&component_pod(&cluster, "operator")?["metadata"]["name"]);
    cluster.delete(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{old}"), Some(0))?;
    wait_without_violation(
        "another operator leads",
        || {
            Ok(component_pod(&cluster, "operator")
                .is_ok_and(|pod| text(&pod["metadata"]["name"]) != old && is_ready(&pod)))
        },
        check_for_fewer_shares_than_in_use(&cluster),
    )?;
    running.check_unchanged(&cluster, &scope)
}

#[test]
fn an_upgrade_of_the_chart_disturbs_no_pod() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "upgrade")?;
    let running = start_pods(&cluster, &scope)?;
    let host = text(&component_pod(&cluster, "mps-host")?["metadata"]["uid"]);
    let relay = text(&component_pod(&cluster, "kubelet-relay")?["metadata"]["uid"]);
    let old = text(&component_pod(&cluster, "agent")?["metadata"]["uid"]);
    // With `mpsHost.upgrade=Never`, the upgrade does not change the DaemonSet. Otherwise `--wait`
    // would wait until no pod uses MPS.
    let helm = |tag: &str, upgrade: &str| {
        let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/cleave");
        run_program(
            "helm",
            &[
                "upgrade",
                "cleave",
                chart,
                "-n",
                SYSTEM_NAMESPACE,
                "--reuse-values",
                "--set",
                &format!("image.tag={tag},mpsHost.upgrade={upgrade}"),
                "--wait",
                "--timeout",
                "3m",
            ],
        )
    };
    helm("next", "Never")?;
    let upgraded = component_pod(&cluster, "agent")?;
    ensure!(text(&upgraded["metadata"]["uid"]) != old, "the agent was not upgraded");
    ensure!(text(&upgraded["spec"]["containers"][0]["image"]).ends_with(":next"), "{}", upgraded["spec"]);
    ensure!(
        text(&component_pod(&cluster, "mps-host")?["metadata"]["uid"]) == host,
        "the MPS host was replaced under running clients"
    );
    ensure!(
        text(&component_pod(&cluster, "kubelet-relay")?["metadata"]["uid"]) == relay,
        "the kubelet relay was replaced"
    );
    let sets = cluster.list(&format!(
        "/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/daemonsets?labelSelector=app.kubernetes.io/component+in+(mps-host,kubelet-relay)"
    ))?;
    ensure!(
        sets.len() == 2
            && sets
                .iter()
                .all(|set| set["status"]["updatedNumberScheduled"] == set["status"]["desiredNumberScheduled"]),
        "a DaemonSet never becomes up to date"
    );
    let checked = running.check_unchanged(&cluster, &scope);
    helm("dev", "WhenIdle")?;
    checked
}

#[test]
fn kubectl_get_prints_modes_and_gpu_models() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _scope = ten_shares(&cluster, "columns")?;
    let printed = kubectl(&["get", "sharingpolicies,gpunodes"])?;
    for word in ["ten-shares", "Mps", NODE, "H100"] {
        ensure!(printed.contains(word), "{word:?} is missing in:\n{printed}");
    }
    Ok(())
}
