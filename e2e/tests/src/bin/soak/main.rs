//! Creates and deletes pods and causes failures of components for a given time, and checks Cleave's
//! promises during the whole time. At the end, the soak checks that no objects of deleted pods
//! remain on the nodes, and that no program's memory has grown by more than 4 MiB or exceeds its
//! goal.
//!
//! `make soak MINUTES=30 SEED=1` starts a cluster of two nodes with four GPUs each and runs this
//! program. The seed determines the random numbers, but the choices and their effects also depend
//! on timing.
mod chaos;
mod common;
mod promises;
mod resources;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cleave_e2e::{Cluster, Random, Scope, WAIT_TIMEOUT, text, wait_for, wait_until};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::chaos::Chaos;
use crate::common::{DYNAMIC_NODE, SHARES_NODE, SHARES_PER_GPU, SHARES_RESOURCE};
use crate::promises::{Observation, Tracker};
use crate::resources::ObjectCounts;

/// Resource of whole GPUs.
const WHOLE_GPUS_RESOURCE: &str = "nvidia.com/gpu";
/// If at least this number of pods exists, the soak creates no more pods. The kubelet accepts 110
/// pods, but two cores cannot run that many sandboxes.
const MAX_PODS: usize = 40;
/// Script of a pod that keeps its allocation without using MPS, so that MPS failures do not affect
/// the pod.
const SLEEP_FOREVER_SCRIPT: &str = "exec sleep 1000000";
/// Script of a CUDA client. A client with shares may fail only if its MPS host, MPS daemon or MPS
/// server is killed.
const HOLD_CLIENT_SCRIPT: &str = "exec cleave-client --hold forever";

/// Reads a number from an environment variable.
fn read_number(name: &str, default: u64) -> Result<u64> {
    std::env::var(name).map_or(Ok(default), |text| text.parse().with_context(|| format!("{name}={text}")))
}

fn main() -> Result<()> {
    let minutes = read_number("MINUTES", 5)?;
    let seed = read_number("SEED", 1)?;
    ensure!(seed > 0, "SEED must not be 0");
    let mut random = Random::seeded(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "soak")?;
    create_policies(&scope)?;
    wait_until_settled(&scope)?;
    let before = ObjectCounts::count_on_nodes()?;
    println!("soak: {minutes} minutes, seed {seed}");

    let mut tracker = Tracker::default();
    let (mut chaos, mut disruptions) = (Chaos::default(), Vec::new());
    let mut memory = vec![resources::measure_memory()?];
    let end = Instant::now() + Duration::from_secs(60 * minutes);
    let mut reported = Instant::now();
    while Instant::now() < end {
        create_and_delete_pods(&scope, &mut random, &mut tracker)?;
        tracker.observe(&Observation::read(&scope)?);
        if random.random_below(6) == 0 {
            // Wait before the disruption, because a kubelet may permanently reject pods that arrive
            // during a disruption. The cluster tests measure these rejections, and
            // docs/explanation/placement.md describes them.
            if wait_until_no_pod_is_in_transit(&scope, &mut tracker)? {
                let since = Timestamp::now();
                let disruption = chaos.disrupt(&cluster, &mut random)?;
                let (what, node) = (&disruption.what, &disruption.node);
                disruptions.push(format!("{since} to {}: {what} on {node}", Timestamp::now()));
                tracker.record_disruption(&disruption, since);
                tracker.observe(&Observation::read(&scope)?);
            }
        }
        if reported.elapsed() > Duration::from_secs(60) {
            reported = Instant::now();
            memory.push(resources::measure_memory()?);
            println!("{}; {}", tracker.summary(), chaos.summary());
        }
        if !tracker.violations.is_empty() {
            bail!(
                "{:#?}\nlast disruptions: {:#?}\nlogs of the agents: {}",
                tracker.violations,
                disruptions.iter().rev().take(8).collect::<Vec<_>>(),
                agent_logs(&cluster)?
            );
        }
    }
    Chaos::repair()?;

    for pod in scope.pods()? {
        cluster.delete(&scope.pod_path(&text(&pod["metadata"]["name"])), Some(0))?;
    }
    wait_until("no pod exists", || Ok(scope.pods()?.is_empty()))?;
    wait_until_settled(&scope).context("slices were lost")?;
    // Wait, because the kubelet needs up to two minutes to clean up after a killed container
    // runtime.
    let mut left = Vec::new();
    let _ = wait_for("nothing remains", 2 * WAIT_TIMEOUT, || {
        left = resources::remaining_objects(&before, &ObjectCounts::count_on_nodes()?);
        Ok(left.is_empty().then_some(()))
    });
    memory.push(resources::measure_memory()?);
    println!("{}; {}", tracker.summary(), chaos.summary());
    println!("resident KiB at the start, in the middle, at the end: {}", resources::format_memory_over_time(&memory));
    let grown = resources::grown_programs(&memory);
    let above = resources::programs_above_goal(&memory);
    println!(
        "soak: {minutes} minutes, seed {seed}: {} broken promises, {} kinds of leftovers, {} programs with growing memory, {} above their goal",
        tracker.violations.len(),
        left.len(),
        grown.len(),
        above.len()
    );
    ensure!(tracker.violations.is_empty(), "{:#?}", tracker.violations);
    ensure!(left.is_empty(), "leftovers on the nodes: {left:#?}");
    ensure!(grown.is_empty(), "programs with growing memory: {grown:#?}");
    ensure!(above.is_empty(), "programs above their memory goal: {above:#?}");
    Ok(())
}

/// Reads the last lines of the agents' logs.
fn agent_logs(cluster: &Cluster) -> Result<String> {
    let pods = "/api/v1/namespaces/cleave-system/pods";
    let agents = cluster.list(&format!("{pods}?labelSelector=app.kubernetes.io%2Fcomponent%3Dagent"))?;
    let log = |pod: &Value| {
        let (name, node) = (text(&pod["metadata"]["name"]), text(&pod["spec"]["nodeName"]));
        let lines = cluster.read(&format!("{pods}/{name}/log?tailLines=400&timestamps=true"));
        format!("{node}\n{}\n", lines.unwrap_or_else(|error| format!("{error:#}")))
    };
    Ok(agents.iter().map(log).collect())
}

/// Creates a policy for each node.
fn create_policies(scope: &Scope) -> Result<()> {
    scope.create_policy(
        "soak-shares",
        &json!({"nodeSelector": {"kubernetes.io/hostname": SHARES_NODE}, "mode": "Mps", "mps": {"units": SHARES_PER_GPU, "threads": "Strict"}}),
    )?;
    scope.create_policy(
        "soak-dynamic",
        &json!({"nodeSelector": {"kubernetes.io/hostname": DYNAMIC_NODE}, "mode": "Auto"}),
    )?;
    Ok(())
}

/// Waits until [`SHARES_NODE`] advertises all of its shares, and until both nodes have applied
/// their plans and all GPUs are healthy and have no allocations.
fn wait_until_settled(scope: &Scope) -> Result<()> {
    let cluster = scope.cluster;
    wait_until("all shares are advertised and both nodes have settled", || {
        let gpus = |node: &str| -> Result<u64> {
            Ok(cluster.gpu_node(node)?["status"]["gpus"].as_array().map_or(0, Vec::len) as u64)
        };
        let (all, advertised) =
            (SHARES_PER_GPU as u64 * gpus(SHARES_NODE)?, cluster.allocatable(SHARES_NODE, SHARES_RESOURCE)?);
        ensure!(all > 0 && advertised == all, "{SHARES_NODE} advertises {advertised} of {all} shares");
        for node in [SHARES_NODE, DYNAMIC_NODE] {
            let object = cluster.gpu_node(node)?;
            for gpu in object["status"]["gpus"].as_array().into_iter().flatten() {
                ensure!(gpu["health"]["healthy"] == true, "{node}: {}", gpu["health"]);
                let allocations = gpu["allocations"].as_array().map_or(0, Vec::len);
                ensure!(allocations == 0, "{node}: {} has the allocations {}", gpu["uuid"], gpu["allocations"]);
            }
            ensure!(object["status"]["planId"] == object["spec"]["planId"], "{node} has not applied its plan yet");
        }
        Ok(true)
    })
}

/// Creates one to six pods unless [`MAX_PODS`] exist, and deletes some of the earlier pods.
fn create_and_delete_pods(scope: &Scope, random: &mut Random, tracker: &mut Tracker) -> Result<()> {
    let living = scope.pods()?;
    for _ in 0..=random.random_below(6) {
        if living.len() >= MAX_PODS {
            break;
        }
        let name = format!("p{}", tracker.created);
        let (node, limits): (_, Value) = match random.random_below(10) {
            0 => (DYNAMIC_NODE, json!({"nvidia.com/mig-1g.5gb": 1})),
            1 => (DYNAMIC_NODE, json!({"nvidia.com/mig-3g.20gb": 1})),
            2 => (DYNAMIC_NODE, json!({"nvidia.com/gpu-10gb": 1})),
            3 => (DYNAMIC_NODE, json!({WHOLE_GPUS_RESOURCE: 1})),
            _ => (SHARES_NODE, json!({SHARES_RESOURCE: 1 + random.random_below(SHARES_PER_GPU as u64)})),
        };
        let script = if random.random_below(5) == 0 { HOLD_CLIENT_SCRIPT } else { SLEEP_FOREVER_SCRIPT };
        scope.create_pod_on_node(node, &name, &limits, script)?;
        tracker.record_created_pod(&name, node, limits[WHOLE_GPUS_RESOURCE].is_null(), script == HOLD_CLIENT_SCRIPT);
    }
    for pod in &living {
        let name = text(&pod["metadata"]["name"]);
        let odds = match text(&pod["status"]["phase"]).as_str() {
            "Running" => 5,
            "Failed" | "Succeeded" => 1,
            _ => 40,
        };
        if random.random_below(odds) == 0 {
            tracker.record_deleted_pod(&name);
            scope.cluster.delete(&scope.pod_path(&name), Some(u32::try_from(random.random_below(2))?))?;
        }
    }
    Ok(())
}

/// Waits up to 5 s until no pod is in transit to a node. Returns false on timeout.
fn wait_until_no_pod_is_in_transit(scope: &Scope, tracker: &mut Tracker) -> Result<bool> {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let observation = Observation::read(scope)?;
        tracker.observe(&observation);
        if !observation.has_pod_in_transit() {
            return Ok(true);
        }
        if Instant::now() > until {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
