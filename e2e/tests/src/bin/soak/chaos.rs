//! What goes wrong, one thing at a time.
use std::time::Duration;

use anyhow::{Context, Result};
use cleave_e2e::{Cluster, Random, SYSTEM, launcher, on_node, process, signal, signal_component, text, wait_until};

use crate::{CUT, Count, SHARED, listed, pick};

/// What was struck.
pub(crate) struct Victim {
    /// What was done.
    pub(crate) what: &'static str,
    /// The node.
    pub(crate) node: &'static str,
    /// The node whose clients of MPS may fail for it.
    pub(crate) mps_of: Option<&'static str>,
}

/// What was done so far.
#[derive(Debug, Default)]
pub(crate) struct Chaos {
    done: Count,
}

/// What can happen, and whether it ends the node's clients of MPS.
const BLOWS: [(&str, bool); 16] = [
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
    /// Strikes once, and waits until what was struck is back.
    pub(crate) fn strike(&mut self, cluster: &Cluster, random: &mut Random) -> Result<Victim> {
        let node = *pick(random, &[SHARED, CUT]).context("no node")?;
        let &(what, ends_clients) = pick(random, &BLOWS).context("nothing to do")?;
        blow(cluster, random, what, node).with_context(|| format!("{what} on {node}"))?;
        *self.done.entry(what).or_default() += 1;
        Ok(Victim { what, node, mps_of: ends_clients.then_some(node) })
    }

    /// Takes away what is still wrong.
    pub(crate) fn heal() -> Result<()> {
        for node in [SHARED, CUT] {
            simgpu(node, &["clear"])?;
            on_node(node, &["chattr", "-i", "/var/lib/cleave"])?;
        }
        Ok(())
    }

    pub(crate) fn summary(&self) -> String {
        format!("struck: {}", listed(&self.done))
    }
}

impl Drop for Chaos {
    fn drop(&mut self) {
        if let Err(error) = Self::heal() {
            eprintln!("what was broken could not be healed: {error:#}");
        }
    }
}

fn simgpu(node: &str, args: &[&str]) -> Result<String> {
    let mut command = vec!["/opt/simgpu/bin/simgpu"];
    command.extend_from_slice(args);
    on_node(node, &command)
}

fn blow(cluster: &Cluster, random: &mut Random, what: &str, node: &'static str) -> Result<()> {
    match what {
        "agent" => {
            let old = process(node, "cleave-agent")?;
            signal(node, "cleave-agent", "KILL")?;
            wait_until("another agent runs", || Ok(process(node, "cleave-agent")? != old))?;
            ready(cluster, node, "agent")
        }
        "agent's container" => {
            signal(node, "cleave-supervise", "KILL")?;
            // The kubelet starts a container that was killed often after minutes; a new pod at
            // once.
            renewed(cluster, node, "agent")
        }
        "MPS host" => {
            signal(node, "cleave-mps-host", "KILL")?;
            renewed(cluster, node, "mps-host")?;
            ready(cluster, node, "agent")
        }
        "operator" => renewed(cluster, node, "operator"),
        "kubelet" | "containerd" => {
            let component = format!("{what}@{node}");
            launcher(&["kill", &component])?;
            launcher(&["start", &component])?;
            ready(cluster, node, "agent")
        }
        "API server" | "scheduler" => {
            let component = if what == "scheduler" { what } else { "apiserver" };
            launcher(&["kill", component])?;
            launcher(&["start", component]).map(drop)
        }
        "MPS daemon" | "MPS server" => mps(cluster, random, what, node),
        // No answers, late answers, and answers by 5xx.
        "API server stopped" => stopped("apiserver", random),
        "etcd stopped" => stopped("etcd", random),
        "NVML hangs" => simgpu(node, &["hang", "nvmlDevice*", "--seconds", "3", "--count", "3"]).map(drop),
        "NVML fails" => simgpu(node, &["fail", "nvmlDevice*", "--code", "UNKNOWN", "--count", "3"]).map(drop),
        // What cannot be written is tried again until it can.
        "full disk" => {
            on_node(node, &["chattr", "+i", "/var/lib/cleave"])?;
            std::thread::sleep(Duration::from_secs(random.below(4)));
            on_node(node, &["chattr", "-i", "/var/lib/cleave"]).map(drop)
        }
        _ => {
            signal(node, "cleave-agent", "STOP")?;
            std::thread::sleep(Duration::from_secs(random.below(4)));
            signal(node, "cleave-agent", "CONT")
        }
    }
}

/// Stops a process of the cluster for some seconds.
fn stopped(component: &str, random: &mut Random) -> Result<()> {
    signal_component(component, "STOP")?;
    std::thread::sleep(Duration::from_secs(1 + random.below(8)));
    signal_component(component, "CONT")
}

/// Kills one of a node's MPS processes, where there is one.
fn mps(cluster: &Cluster, random: &mut Random, what: &str, node: &str) -> Result<()> {
    let program = if what == "MPS daemon" { "nvidia-cuda-mps-control" } else { "nvidia-cuda-mps-server" };
    let pids = on_node(node, &["sh", "-c", "pidof \"$0\" || true", program])?;
    let pids: Vec<&str> = pids.split_whitespace().collect();
    let Some(pid) = pick(random, &pids) else { return Ok(()) };
    // It may have ended by itself meanwhile.
    let _ = on_node(node, &["kill", "-9", pid]);
    wait_until("it is gone", || Ok(on_node(node, &["test", "-e", &format!("/proc/{pid}/exe")]).is_err()))?;
    wait_until("all of the node's MPS daemons serve", || {
        let object = cluster.gpunode(node)?;
        let gpus = object["status"]["gpus"].as_array().cloned().unwrap_or_default();
        let daemons: Vec<_> = gpus.iter().flat_map(|gpu| gpu["mps"].as_array().cloned().unwrap_or_default()).collect();
        Ok(daemons.iter().all(|daemon| {
            daemon["state"] == "Active" && daemon["pid"].as_u64().map(|pid| pid.to_string()).as_deref() != Some(*pid)
        }))
    })
}

fn parts(cluster: &Cluster, node: &str, component: &str) -> Result<Vec<serde_json::Value>> {
    let path = format!("/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/component={component}");
    let of_node = |pod: &serde_json::Value| component == "operator" || pod["spec"]["nodeName"] == node;
    Ok(cluster.list(&path)?.into_iter().filter(of_node).collect())
}

/// Replaces the pods of a part of Cleave, and waits until the new ones are ready.
fn renewed(cluster: &Cluster, node: &str, component: &str) -> Result<()> {
    for pod in parts(cluster, node, component)? {
        cluster.delete(&format!("/api/v1/namespaces/{SYSTEM}/pods/{}", text(&pod["metadata"]["name"])), Some(0))?;
    }
    ready(cluster, node, component)
}

fn ready(cluster: &Cluster, node: &str, component: &str) -> Result<()> {
    wait_until(&format!("the {component} of {node} is ready"), || {
        let parts = parts(cluster, node, component)?;
        let is_ready = |pod: &serde_json::Value| {
            pod["metadata"]["deletionTimestamp"].is_null() && pod["status"]["containerStatuses"][0]["ready"] == true
        };
        Ok(!parts.is_empty() && parts.iter().all(is_ready))
    })
}
