//! Disrupts one component of the cluster at a time: kills or pauses the component, or causes its
//! calls to fail or hang.
use std::time::Duration;

use anyhow::{Context, Result};
use cleave_e2e::{
    AGENT_SUPERVISOR, Cluster, Random, SYSTEM_NAMESPACE, find_pid, on_node, run_launcher, signal_component,
    signal_program, text, wait_until,
};

use crate::common::{Counts, DYNAMIC_NODE, SHARES_NODE, format_counts, pick_random};

/// A disruption that the soak carried out.
pub(crate) struct Disruption {
    /// Kind of disruption, from [`DISRUPTION_KINDS`].
    pub(crate) what: &'static str,
    /// Name of the disrupted node. For a component of the whole cluster, the name of either node.
    pub(crate) node: &'static str,
    /// Whether the disruption can cause the node's MPS clients to fail.
    pub(crate) breaks_clients: bool,
}

/// Carries out disruptions and counts them. Dropping this value ends the injected faults and makes
/// the agents' directories writable.
#[derive(Debug, Default)]
pub(crate) struct Chaos {
    done: Counts,
}

/// The kinds of disruption, and whether each kind can cause the node's MPS clients to fail.
const DISRUPTION_KINDS: [(&str, bool); 16] = [
    ("agent", false),
    ("agent's container", false),
    ("operator", false),
    ("kubelet", false),
    ("containerd", false),
    ("API server", false),
    ("API server stopped", false),
    ("etcd stopped", false),
    ("scheduler", false),
    ("MPS host", true),
    ("MPS daemon", true),
    ("MPS server", true),
    ("NVML hangs", false),
    ("NVML fails", false),
    ("full disk", false),
    ("agent stopped", false),
];

impl Chaos {
    /// Carries out a random disruption, and waits until a killed component runs again.
    pub(crate) fn disrupt(&mut self, cluster: &Cluster, random: &mut Random) -> Result<Disruption> {
        let node = *pick_random(random, &[SHARES_NODE, DYNAMIC_NODE]).context("no node")?;
        let &(what, breaks_clients) = pick_random(random, &DISRUPTION_KINDS).context("no disruption")?;
        run_disruption(cluster, random, what, node).with_context(|| format!("{what} on {node}"))?;
        *self.done.entry(what).or_default() += 1;
        Ok(Disruption { what, node, breaks_clients })
    }

    /// Ends the injected faults, and makes the agents' directories writable.
    pub(crate) fn repair() -> Result<()> {
        for node in [SHARES_NODE, DYNAMIC_NODE] {
            run_simgpu(node, &["clear"])?;
            on_node(node, &["chattr", "-i", "/var/lib/cleave"])?;
        }
        Ok(())
    }

    /// Formats the number of disruptions so far of each kind.
    pub(crate) fn summary(&self) -> String {
        format!("disrupted: {}", format_counts(&self.done))
    }
}

impl Drop for Chaos {
    fn drop(&mut self) {
        if let Err(error) = Self::repair() {
            eprintln!("failed to repair the cluster: {error:#}");
        }
    }
}

/// Runs `simgpu` on a node to inject faults into the simulated GPUs.
fn run_simgpu(node: &str, args: &[&str]) -> Result<String> {
    let mut command = vec!["/opt/simgpu/bin/simgpu"];
    command.extend_from_slice(args);
    on_node(node, &command)
}

/// Carries out one kind of disruption, and waits until a killed component runs again.
fn run_disruption(cluster: &Cluster, random: &mut Random, what: &str, node: &'static str) -> Result<()> {
    match what {
        "agent" => {
            let old = find_pid(node, "cleave-agent")?;
            signal_program(node, "cleave-agent", "KILL")?;
            wait_until("the agent was restarted", || Ok(find_pid(node, "cleave-agent")? != old))?;
            wait_until_ready(cluster, node, "agent")
        }
        "agent's container" => {
            signal_program(node, AGENT_SUPERVISOR, "KILL")?;
            // The kubelet delays the restart of a container by minutes if the container was killed
            // often, but starts a new pod immediately.
            replace_pods(cluster, node, "agent")
        }
        "MPS host" => {
            signal_program(node, "cleave-mps-host", "KILL")?;
            replace_pods(cluster, node, "mps-host")?;
            wait_until_ready(cluster, node, "agent")
        }
        "operator" => replace_pods(cluster, node, "operator"),
        "kubelet" | "containerd" => {
            let component = format!("{what}@{node}");
            run_launcher(&["kill", &component])?;
            run_launcher(&["start", &component])?;
            wait_until_ready(cluster, node, "agent")
        }
        "API server" | "scheduler" => {
            let component = if what == "scheduler" { what } else { "apiserver" };
            run_launcher(&["kill", component])?;
            run_launcher(&["start", component]).map(drop)
        }
        "MPS daemon" | "MPS server" => kill_mps(cluster, random, what, node),
        // While the API server or etcd is stopped, requests receive no response, a late response,
        // or a response with status 5xx.
        "API server stopped" => stop_briefly("apiserver", random),
        "etcd stopped" => stop_briefly("etcd", random),
        "NVML hangs" => run_simgpu(node, &["hang", "nvmlDevice*", "--seconds", "3", "--count", "3"]).map(drop),
        "NVML fails" => run_simgpu(node, &["fail", "nvmlDevice*", "--code", "UNKNOWN", "--count", "3"]).map(drop),
        // An immutable directory refuses new files, as a full disk does. The agent must retry.
        "full disk" => {
            on_node(node, &["chattr", "+i", "/var/lib/cleave"])?;
            std::thread::sleep(Duration::from_secs(random.random_below(4)));
            on_node(node, &["chattr", "-i", "/var/lib/cleave"]).map(drop)
        }
        _ => {
            signal_program(node, "cleave-agent", "STOP")?;
            std::thread::sleep(Duration::from_secs(random.random_below(4)));
            signal_program(node, "cleave-agent", "CONT")
        }
    }
}

/// Pauses a component of the cluster for 1 to 8 s.
fn stop_briefly(component: &str, random: &mut Random) -> Result<()> {
    signal_component(component, "STOP")?;
    std::thread::sleep(Duration::from_secs(1 + random.random_below(8)));
    signal_component(component, "CONT")
}

/// Kills one MPS daemon or MPS server of a node, if such a process runs, and waits until all
/// daemons serve.
fn kill_mps(cluster: &Cluster, random: &mut Random, what: &str, node: &str) -> Result<()> {
    let program = if what == "MPS daemon" { "nvidia-cuda-mps-control" } else { "nvidia-cuda-mps-server" };
    let pids = on_node(node, &["sh", "-c", "pidof \"$0\" || true", program])?;
    let pids: Vec<&str> = pids.split_whitespace().collect();
    let Some(pid) = pick_random(random, &pids) else { return Ok(()) };
    // Ignore errors, because the process may have exited since its PID was read.
    let _ = on_node(node, &["kill", "-9", pid]);
    wait_until("the killed process has exited", || {
        Ok(on_node(node, &["test", "-e", &format!("/proc/{pid}/exe")]).is_err())
    })?;
    wait_until("all MPS daemons of the node serve", || {
        let object = cluster.gpu_node(node)?;
        let gpus = object["status"]["gpus"].as_array().cloned().unwrap_or_default();
        let daemons: Vec<_> = gpus.iter().flat_map(|gpu| gpu["mps"].as_array().cloned().unwrap_or_default()).collect();
        Ok(daemons.iter().all(|daemon| {
            daemon["state"] == "Active" && daemon["pid"].as_u64().map(|pid| pid.to_string()).as_deref() != Some(*pid)
        }))
    })
}

/// Lists the pods of a component. For the operator, lists all pods. For other components, lists
/// only the pods on the node.
fn component_pods(cluster: &Cluster, node: &str, component: &str) -> Result<Vec<serde_json::Value>> {
    let path =
        format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?labelSelector=app.kubernetes.io/component={component}");
    let is_on_node = |pod: &serde_json::Value| component == "operator" || pod["spec"]["nodeName"] == node;
    Ok(cluster.list(&path)?.into_iter().filter(is_on_node).collect())
}

/// Deletes the pods of a component with grace period 0, and waits until the replacements are ready.
fn replace_pods(cluster: &Cluster, node: &str, component: &str) -> Result<()> {
    for pod in component_pods(cluster, node, component)? {
        cluster.delete(
            &format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{}", text(&pod["metadata"]["name"])),
            Some(0),
        )?;
    }
    wait_until_ready(cluster, node, component)
}

/// Waits until all pods of a component are ready.
fn wait_until_ready(cluster: &Cluster, node: &str, component: &str) -> Result<()> {
    wait_until(&format!("the {component} of {node} is ready"), || {
        let pods = component_pods(cluster, node, component)?;
        let is_ready = |pod: &serde_json::Value| {
            pod["metadata"]["deletionTimestamp"].is_null() && pod["status"]["containerStatuses"][0]["ready"] == true
        };
        Ok(!pods.is_empty() && pods.iter().all(is_ready))
    })
}
