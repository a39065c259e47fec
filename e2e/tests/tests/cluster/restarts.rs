//! Restarting, upgrading or killing any part of Cleave, or the kubelet, disturbs no running pod.
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, SYSTEM, Scope, hold_until, kubectl, launcher, on_node, process, run, signal, text, wait_until,
};
use serde_json::{Value, json};

use crate::{GPUS, HOLD, NODE, SHARES, daemon_pids, offers, ten_shares, undisturbed};

/// Two pods that hold seven shares, and what must not change about them.
struct Running {
    pods: Vec<(String, u64)>,
    daemons: Vec<(String, u64)>,
}

const PODS: [&str; 2] = ["two", "five"];
const HELD: u64 = 7;

fn running(cluster: &Cluster, scope: &Scope) -> Result<Running> {
    for (name, shares) in PODS.into_iter().zip([2, 5]) {
        scope.pod(name, &json!({SHARES: shares}), HOLD)?;
    }
    PODS.iter().try_for_each(|name| scope.running(name).map(drop))?;
    PODS.iter().try_for_each(|name| scope.seen(name).map(drop))?;
    Ok(Running { pods: pods(cluster, scope)?, daemons: daemon_pids(cluster)? })
}

fn pods(cluster: &Cluster, scope: &Scope) -> Result<Vec<(String, u64)>> {
    PODS.iter().map(|name| undisturbed(cluster, scope, name)).collect()
}

impl Running {
    /// The same containers, the same daemons (which are real processes still), and room for new
    /// pods.
    fn still(&self, cluster: &Cluster, scope: &Scope) -> Result<()> {
        ensure!(self.pods == pods(cluster, scope)?, "a running pod was disturbed");
        wait_until("the node tells its daemons again", || Ok(!daemon_pids(cluster)?.is_empty()))?;
        ensure!(self.daemons == daemon_pids(cluster)?, "an MPS daemon was started again");
        for (device, pid) in &self.daemons {
            on_node(NODE, &["test", "-d", &format!("/proc/{pid}")])
                .with_context(|| format!("the daemon of {device} is gone"))?;
        }
        offers(cluster, SHARES, 10 * GPUS)?;
        scope.pod("new", &json!({SHARES: 3}), HOLD)?;
        scope.running("new")?;
        ensure!(scope.seen("new")?["sms"] == 38, "the new pod has other limits");
        Ok(())
    }
}

/// Fails when the node offers fewer shares than are held.
fn never_below(cluster: &Cluster) -> impl FnMut() -> Result<Option<String>> + '_ {
    || {
        let offered = cluster.allocatable(NODE, SHARES)?;
        Ok((offered < HELD).then(|| format!("{offered} shares were offered while {HELD} were held")))
    }
}

/// The pod of one of Cleave's parts; on [`NODE`] where there is one on each node.
pub(crate) fn part(cluster: &Cluster, component: &str) -> Result<Value> {
    let pods = cluster
        .list(&format!("/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/component={component}"))?;
    let on_node = |pod: &&Value| component == "operator" || pod["spec"]["nodeName"] == NODE;
    pods.iter()
        .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null())
        .find(on_node)
        .cloned()
        .with_context(|| format!("no {component} pod"))
}

/// What the agent of [`NODE`] answers at a path.
pub(crate) fn agent_says(cluster: &Cluster, path: &str) -> Result<String> {
    let name = text(&part(cluster, "agent")?["metadata"]["name"]);
    kubectl(&["get", "--raw", &format!("/api/v1/namespaces/{SYSTEM}/pods/{name}:8080/proxy/{path}")])
}

fn restarts(pod: &Value) -> u64 {
    pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0)
}

pub(crate) fn ready(pod: &Value) -> bool {
    pod["status"]["containerStatuses"][0]["ready"] == true
}

#[test]
fn the_kubelet_is_killed_and_comes_back() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "kubelet")?;
    let running = running(&cluster, &scope)?;
    launcher(&["kill", &format!("kubelet@{NODE}")])?;
    launcher(&["start", &format!("kubelet@{NODE}")])?;
    running.still(&cluster, &scope)
}

/// While the agent is away the kubelet has none of its devices, and says so if it is asked just
/// then; its next word, a second later, takes that back. Fails when some are missing, or all for
/// longer.
fn none_for_a_moment_at_most(cluster: &Cluster) -> impl FnMut() -> Result<Option<String>> + '_ {
    const MOMENT: Duration = Duration::from_secs(3);
    let mut none_since = None;
    move || {
        let offered = cluster.allocatable(NODE, SHARES)?;
        if offered != 0 {
            none_since = None;
        }
        let since = *none_since.get_or_insert_with(Instant::now);
        let broken = if offered == 0 { since.elapsed() > MOMENT } else { offered < HELD };
        Ok(broken.then(|| format!("{offered} shares were offered while {HELD} were held")))
    }
}

#[test]
fn a_killed_agent_is_back_at_once_and_its_shares_with_it() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "agent")?;
    let running = running(&cluster, &scope)?;
    let before = restarts(&part(&cluster, "agent")?);
    let supervisor = process(NODE, "cleave-supervise")?;
    for _ in 0..3 {
        let old = process(NODE, "cleave-agent")?;
        signal(NODE, "cleave-agent", "KILL")?;
        hold_until(
            "the agent is back",
            || {
                let another = process(NODE, "cleave-agent").is_ok_and(|pid| pid != old);
                let all = cluster.allocatable(NODE, SHARES)? == 10 * GPUS;
                Ok(all && another && part(&cluster, "agent").is_ok_and(|pod| ready(&pod)))
            },
            none_for_a_moment_at_most(&cluster),
        )?;
    }
    running.still(&cluster, &scope)?;
    ensure!(process(NODE, "cleave-supervise")? == supervisor, "the supervisor is another");
    ensure!(restarts(&part(&cluster, "agent")?) == before, "the container was started again");
    Ok(())
}

/// Another agent on [`NODE`], as an upgrade has for a moment and a mistake for long, until this
/// goes.
struct SecondAgent<'a> {
    cluster: &'a Cluster,
    path: String,
}

impl<'a> SecondAgent<'a> {
    fn start(cluster: &'a Cluster) -> Result<Self> {
        let pods = format!("/api/v1/namespaces/{SYSTEM}/pods");
        // Without the labels by which the DaemonSet knows its pods.
        let spec = part(cluster, "agent")?["spec"].take();
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "second-agent"}, "spec": spec});
        let second = Self { cluster, path: format!("{pods}/second-agent") };
        cluster.create(&pods, &pod)?;
        Ok(second)
    }

    fn is_ready(&self) -> Result<bool> {
        Ok(ready(&self.cluster.get(&self.path)?))
    }

    fn says(&self, words: &str) -> bool {
        self.cluster.read(&format!("{}/log", self.path)).is_ok_and(|log| log.contains(words))
    }
}

impl Drop for SecondAgent<'_> {
    fn drop(&mut self) {
        let gone = self.cluster.delete(&self.path, None);
        let is_gone = || Ok(self.cluster.find(&self.path)?.is_none());
        if let Err(error) = gone.and_then(|()| wait_until("the second agent is gone", is_gone)) {
            let _ = writeln!(std::io::stderr(), "there are two agents still: {error:#}");
        }
    }
}

#[test]
fn of_two_agents_on_a_node_one_waits_for_the_end_of_the_other_and_takes_over() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "two-agents")?;
    let running = running(&cluster, &scope)?;
    let first = part(&cluster, "agent")?;
    let second = SecondAgent::start(&cluster)?;
    hold_until(
        "the second agent says that it waits",
        || Ok(second.says("waiting for another agent of this node to exit")),
        never_below(&cluster),
    )?;
    running.still(&cluster, &scope)?;
    ensure!(!second.is_ready()?, "two agents are ready");
    cluster.delete(&format!("/api/v1/namespaces/{SYSTEM}/pods/{}", text(&first["metadata"]["name"])), None)?;
    hold_until("the second has taken over", || second.is_ready(), none_for_a_moment_at_most(&cluster))?;
    offers(&cluster, SHARES, 10 * GPUS)?;
    drop(second);
    wait_until("the third has taken over", || Ok(part(&cluster, "agent").is_ok_and(|pod| ready(&pod))))?;
    offers(&cluster, SHARES, 10 * GPUS)?;
    ensure!(running.pods == pods(&cluster, &scope)?, "a running pod was disturbed");
    scope.pod("last", &json!({SHARES: 1}), HOLD)?;
    scope.running("last").map(drop)
}

#[test]
fn the_agents_container_is_killed_and_comes_back() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "container")?;
    // Of one whose container was started again before, as by other tests, the kubelet waits longer
    // each time.
    let uid = |pod: &Value| text(&pod["metadata"]["uid"]);
    let old = part(&cluster, "agent")?;
    cluster.delete(&format!("/api/v1/namespaces/{SYSTEM}/pods/{}", text(&old["metadata"]["name"])), None)?;
    wait_until("another agent", || Ok(part(&cluster, "agent").is_ok_and(|pod| uid(&pod) != uid(&old) && ready(&pod))))?;
    let running = running(&cluster, &scope)?;
    let before = restarts(&part(&cluster, "agent")?);
    signal(NODE, "cleave-supervise", "KILL")?;
    hold_until(
        "the agent is back",
        || part(&cluster, "agent").map(|pod| restarts(&pod) > before && ready(&pod)),
        never_below_once_offered(&cluster),
    )?;
    running.still(&cluster, &scope)
}

/// While the agent's container is down the kubelet tells its devices as unhealthy, which is the
/// kubelet's doing: allocatable falls to nothing and comes back whole. What must not be seen is
/// some of them.
fn never_below_once_offered(cluster: &Cluster) -> impl FnMut() -> Result<Option<String>> + '_ {
    || {
        let offered = cluster.allocatable(NODE, SHARES)?;
        Ok((offered != 0 && offered < HELD).then(|| format!("{offered} shares were offered while {HELD} were held")))
    }
}

#[test]
fn the_operator_is_killed_and_comes_back() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "operator")?;
    let running = running(&cluster, &scope)?;
    let old = text(&part(&cluster, "operator")?["metadata"]["name"]);
    cluster.delete(&format!("/api/v1/namespaces/{SYSTEM}/pods/{old}"), Some(0))?;
    hold_until(
        "the operator is back",
        || Ok(part(&cluster, "operator").is_ok_and(|pod| text(&pod["metadata"]["name"]) != old && ready(&pod))),
        never_below(&cluster),
    )?;
    running.still(&cluster, &scope)
}

#[test]
fn the_chart_is_upgraded_to_a_new_image() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "upgrade")?;
    let running = running(&cluster, &scope)?;
    let host = text(&part(&cluster, "mps-host")?["metadata"]["uid"]);
    let old = text(&part(&cluster, "agent")?["metadata"]["uid"]);
    // With the DaemonSet left as it is, --wait has something to come to while pods use MPS.
    let helm = |tag: &str, upgrade: &str| {
        let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/cleave");
        let values = concat!(env!("CARGO_MANIFEST_DIR"), "/../values.yaml");
        run(
            "helm",
            &[
                "upgrade",
                "cleave",
                chart,
                "-n",
                SYSTEM,
                "--values",
                values,
                "--set",
                &format!("image.tag={tag},mpsHost.upgrade={upgrade}"),
                "--wait",
                "--timeout",
                "3m",
            ],
        )
    };
    helm("next", "Never")?;
    let upgraded = part(&cluster, "agent")?;
    ensure!(text(&upgraded["metadata"]["uid"]) != old, "the agent was not upgraded");
    ensure!(text(&upgraded["spec"]["containers"][0]["image"]).ends_with(":next"), "{}", upgraded["spec"]);
    ensure!(
        text(&part(&cluster, "mps-host")?["metadata"]["uid"]) == host,
        "the MPS host was replaced under running clients"
    );
    let parts = cluster.list(&format!(
        "/apis/apps/v1/namespaces/{SYSTEM}/daemonsets?labelSelector=app.kubernetes.io/component=mps-host"
    ))?;
    ensure!(
        parts.iter().all(|set| set["status"]["updatedNumberScheduled"] == set["status"]["desiredNumberScheduled"]),
        "who waits for the MPS host to be up to date waits for ever"
    );
    let checked = running.still(&cluster, &scope);
    helm("dev", "WhenIdle")?;
    checked
}

#[test]
fn kubectl_reads_well() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _scope = ten_shares(&cluster, "columns")?;
    let printed = kubectl(&["get", "sharingpolicies,gpunodes"])?;
    for word in ["ten-shares", "Mps", NODE, "H100"] {
        ensure!(printed.contains(word), "{word:?} is missing in\n{printed}");
    }
    Ok(())
}
