//! Churn and chaos for a given time, and what of the promises was broken meanwhile, or is left
//! behind.
//!
//! `make soak MINUTES=30 SEED=1` brings up a cluster of two nodes with four GPUs each and runs
//! this. The same seed makes the same choices; what they meet depends on timing.
mod chaos;
mod promises;
mod traces;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cleave_e2e::{Cluster, PATIENCE, Random, Scope, text, wait_for, wait_until};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::chaos::Chaos;
use crate::promises::{Look, Seen};
use crate::traces::Traces;

/// Its GPUs have ten shares each.
const SHARED: &str = "node1";
/// Its GPUs are cut as pods ask for it.
const CUT: &str = "node2";
const SHARES: &str = "nvidia.com/gpu-mps";
const WHOLE: &str = "nvidia.com/gpu";
const UNITS: usize = 10;
/// Pods that live at once: the kubelet takes 110, and as many sandboxes are all that two cores can
/// do.
const CROWD: usize = 40;
/// Holds what it got, and is hurt by nothing that happens to MPS.
const STAY: &str = "exec sleep 1000000";
/// A client of MPS: it may fail when its daemon or server is killed, and never otherwise.
const CLIENT: &str = "exec cleave-client --hold forever";

/// One of some things.
pub(crate) fn pick<'a, T>(random: &mut Random, of: &'a [T]) -> Option<&'a T> {
    of.get(usize::try_from(random.below(of.len() as u64)).unwrap_or_default())
}

fn number(name: &str, default: u64) -> Result<u64> {
    std::env::var(name).map_or(Ok(default), |text| text.parse().with_context(|| format!("{name}={text}")))
}

fn main() -> Result<()> {
    let minutes = number("MINUTES", 5)?;
    let seed = number("SEED", 1)?;
    ensure!(seed > 0, "SEED=0 gives no numbers");
    let mut random = Random::seeded(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "soak")?;
    policies(&scope)?;
    settled(&scope)?;
    let before = Traces::of_nodes()?;
    println!("soak: {minutes} minutes, seed {seed}");

    let mut seen = Seen::default();
    let (mut chaos, mut blows) = (Chaos::default(), Vec::new());
    let mut memory = vec![traces::memory()?];
    let end = Instant::now() + Duration::from_secs(60 * minutes);
    let mut told = Instant::now();
    while Instant::now() < end {
        churn(&scope, &mut random, &mut seen)?;
        seen.look(&Look::at(&scope)?);
        if random.below(6) == 0 {
            // Whom the kubelet admits just now it may refuse for good: that is measured elsewhere,
            // and told in docs/explanation/placement.md.
            if calm(&scope, &mut seen)? {
                let since = Timestamp::now();
                let victim = chaos.strike(&cluster, &mut random)?;
                blows.push(format!("{since} to {}: {} on {}", Timestamp::now(), victim.what, victim.node));
                seen.struck(&victim, since);
                seen.look(&Look::at(&scope)?);
            }
        }
        if told.elapsed() > Duration::from_secs(60) {
            told = Instant::now();
            memory.push(traces::memory()?);
            println!("{}; {}", seen.summary(), chaos.summary());
        }
        if !seen.broken.is_empty() {
            bail!(
                "{:#?}\nthe last blows: {:#?}\nthe agents: {}",
                seen.broken,
                blows.iter().rev().take(8).collect::<Vec<_>>(),
                agents(&cluster)?
            );
        }
    }
    Chaos::heal()?;

    for pod in scope.pods()? {
        cluster.delete(&scope.pod_path(&text(&pod["metadata"]["name"])), Some(0))?;
    }
    wait_until("all pods are gone", || Ok(scope.pods()?.is_empty()))?;
    settled(&scope).context("slices are lost")?;
    // What a container runtime that was killed has left, the kubelet sweeps away within a minute or
    // two.
    let mut left = Vec::new();
    let _ = wait_for("nothing is left", 2 * PATIENCE, || {
        left = traces::left(&before, &Traces::of_nodes()?);
        Ok(left.is_empty().then_some(()))
    });
    memory.push(traces::memory()?);
    println!("{}; {}", seen.summary(), chaos.summary());
    println!("resident KiB, at first, in the middle, at the end: {}", traces::course(&memory));
    let grown = traces::grown(&memory);
    println!(
        "soak: {minutes} minutes, seed {seed}: {} promises broken, {} things left behind, {} programs grown",
        seen.broken.len(),
        left.len(),
        grown.len()
    );
    ensure!(seen.broken.is_empty(), "{:#?}", seen.broken);
    ensure!(left.is_empty(), "left behind: {left:#?}");
    ensure!(grown.is_empty(), "grown: {grown:#?}");
    Ok(())
}

/// What the agents said last.
fn agents(cluster: &Cluster) -> Result<String> {
    let pods = "/api/v1/namespaces/cleave-system/pods";
    let agents = cluster.list(&format!("{pods}?labelSelector=app.kubernetes.io%2Fcomponent%3Dagent"))?;
    let log = |pod: &Value| {
        let (name, node) = (text(&pod["metadata"]["name"]), text(&pod["spec"]["nodeName"]));
        let said = cluster.read(&format!("{pods}/{name}/log?tailLines=400&timestamps=true"));
        format!("{node}\n{}\n", said.unwrap_or_else(|error| format!("{error:#}")))
    };
    Ok(agents.iter().map(log).collect())
}

fn policies(scope: &Scope) -> Result<()> {
    scope.policy(
        "soak-shares",
        &json!({"nodeSelector": {"kubernetes.io/hostname": SHARED}, "mode": "Mps", "mps": {"units": UNITS, "threads": "Strict"}}),
    )?;
    scope.policy("soak-cut", &json!({"nodeSelector": {"kubernetes.io/hostname": CUT}, "mode": "Auto"}))?;
    Ok(())
}

/// Waits until the nodes offer all that they have, as without any pod.
fn settled(scope: &Scope) -> Result<()> {
    let cluster = scope.cluster;
    wait_until("all slices are there", || {
        let gpus = |node: &str| -> Result<u64> {
            Ok(cluster.gpunode(node)?["status"]["gpus"].as_array().map_or(0, Vec::len) as u64)
        };
        let (all, offered) = (UNITS as u64 * gpus(SHARED)?, cluster.allocatable(SHARED, SHARES)?);
        ensure!(all > 0 && offered == all, "{SHARED} offers {offered} of {all} shares");
        for node in [SHARED, CUT] {
            let object = cluster.gpunode(node)?;
            for gpu in object["status"]["gpus"].as_array().into_iter().flatten() {
                ensure!(gpu["health"]["healthy"] == true, "{node}: {}", gpu["health"]);
                let held = gpu["allocations"].as_array().map_or(0, Vec::len);
                ensure!(held == 0, "{node}: {} is held by {}", gpu["uuid"], gpu["allocations"]);
            }
            ensure!(object["status"]["planId"] == object["spec"]["planId"], "{node} is not as planned yet");
        }
        Ok(true)
    })
}

/// A burst of pods comes, and some go.
fn churn(scope: &Scope, random: &mut Random, seen: &mut Seen) -> Result<()> {
    let living = scope.pods()?;
    for _ in 0..=random.below(6) {
        if living.len() >= CROWD {
            break;
        }
        let name = format!("p{}", seen.created);
        let (node, limits): (_, Value) = match random.below(10) {
            0 => (CUT, json!({"nvidia.com/mig-1g.5gb": 1})),
            1 => (CUT, json!({"nvidia.com/mig-3g.20gb": 1})),
            2 => (CUT, json!({"nvidia.com/gpu-10gb": 1})),
            3 => (CUT, json!({WHOLE: 1})),
            _ => (SHARED, json!({SHARES: 1 + random.below(UNITS as u64)})),
        };
        let script = if random.below(5) == 0 { CLIENT } else { STAY };
        scope.pod_on(node, &name, &limits, script)?;
        seen.made(&name, node, limits[WHOLE].is_null(), script == CLIENT);
    }
    for pod in &living {
        let name = text(&pod["metadata"]["name"]);
        let odds = match text(&pod["status"]["phase"]).as_str() {
            "Running" => 5,
            "Failed" | "Succeeded" => 1,
            _ => 40,
        };
        if random.below(odds) == 0 {
            seen.unmade(&name);
            scope.cluster.delete(&scope.pod_path(&name), Some(u32::try_from(random.below(2))?))?;
        }
    }
    Ok(())
}

/// Whether no pod is on its way to a node, within a few seconds.
fn calm(scope: &Scope, seen: &mut Seen) -> Result<bool> {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let look = Look::at(scope)?;
        seen.look(&look);
        if !look.is_anybody_on_the_way() {
            return Ok(true);
        }
        if Instant::now() > until {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Pods of each kind of fate, for the summary.
pub(crate) type Count = BTreeMap<&'static str, u64>;

pub(crate) fn listed(count: &Count) -> String {
    let all: Vec<String> = count.iter().map(|(what, times)| format!("{what} {times}")).collect();
    if all.is_empty() { "nothing".into() } else { all.join(", ") }
}
