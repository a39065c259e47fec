//! Much of everything, and what is much too long: others go on, and who comes next starts.
use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use cleave_e2e::{pod, text, wait_until};
use serde_json::{Value, json};

use super::programs::{NEIGHBOUR, said, within};
use super::requests::FORGED;
use super::{Attempt, Expected, Ground, Outcome};
use crate::gate_admission::label;
use crate::restarts::{part, ready};
use crate::{NODE, SHARES};

/// Where connections to the agent's port come from.
const FROM: &str = "hostile";
const CONNECTIONS: usize = 200;
const EVENTS: usize = 300;
const PODS: usize = 60;
/// As many as the JSON Patch that lets the pod through will have operations.
const TERMS: usize = 1000;
/// The longest name that the API server takes.
const LONGEST: usize = 253;
const ONCE: &str = "exec cleave-client --once";
/// The annotation that the operator believes, and the agent.
const NOTE: &str = "cleave.dev/placement";

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "two hundred connections to the agent's metrics, and silence",
        expected: Expected::NoEffect,
        tried: connections,
    },
    Attempt {
        name: "a resource of Cleave's prefix that nobody serves",
        expected: Expected::NoEffect,
        tried: |ground| {
            ground.tenant.create(&ground.pods(), &pod("nobody", &json!({"nvidia.com/gpu-free": 1}), ONCE))?;
            crate::gate::told(&ground.scope, "nobody", "NoGpuFits")?;
            let placed = ground.scope.cluster.get(&ground.scope.pod_path("nobody"))?;
            ensure!(placed["spec"]["nodeName"].is_null(), "{placed}");
            Ok(Outcome::NoEffect("it is told that no node has it, and is bound to none".to_owned()))
        },
    },
    Attempt {
        name: "a forged placement with paths, where the namespace has the exception",
        expected: Expected::NoEffect,
        tried: |ground| noted(ground, "note-paths", FORGED),
    },
    Attempt {
        name: "a placement of two hundred thousand letters, where the namespace has the exception",
        expected: Expected::NoEffect,
        tried: |ground| noted(ground, "note-letters", &"{".repeat(200_000)),
    },
    Attempt { name: "a pod with a thousand node selector terms", expected: Expected::NoEffect, tried: terms },
    Attempt { name: "a pod with the longest name that there can be", expected: Expected::NoEffect, tried: longest },
    Attempt { name: "three hundred Events, in Cleave's words", expected: Expected::NoEffect, tried: events },
    Attempt { name: "sixty pods of a whole GPU's shares at once", expected: Expected::NoEffect, tried: pods },
];

/// That another pod of one share starts, and has its limits.
fn newcomer(ground: &Ground<'_>, name: &str, besides: &str) -> Result<Outcome> {
    ground.scope.pod(name, &json!({SHARES: 1}), ONCE)?;
    runs(ground, name, besides)
}

/// That a pod of one share runs to its end, with its limits.
fn runs(ground: &Ground<'_>, name: &str, besides: &str) -> Result<Outcome> {
    let (phase, log) = ground.scope.finished(name)?;
    ensure!(phase == "Succeeded", "{name} is {phase}: {log}");
    match within(ground, 1, &log, 1)? {
        Outcome::NoEffect(saw) => Ok(Outcome::NoEffect(format!("{besides}; {name} runs: {saw}"))),
        other => Ok(other),
    }
}

/// Connections that say nothing, and stay for as long as somebody has the other end of their
/// standard input.
fn connections(ground: &Ground<'_>) -> Result<Outcome> {
    let agent = part(ground.scope.cluster, "agent")?;
    let address = text(&agent["status"]["podIP"]);
    let asked = format!("{{ printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n'; sleep 1; }} | timeout 20 nc {address} 8080");
    // Else the chart's NetworkPolicy keeps it out, as `network` shows.
    let let_in = json!({"metadata": {"labels": {"metrics": "enabled"}}});
    ground.scope.cluster.patch(&format!("/api/v1/namespaces/{}", ground.scope.namespace), &let_in)?;
    wait_until("the agent's port is reached", || {
        let answer = said(ground, FROM, &asked)?;
        ensure!(answer.contains("200 OK"), "{answer}");
        Ok(true)
    })?;
    let flood = format!(
        "mkfifo /tmp/silence; sleep 20 >/tmp/silence 2>&1 </dev/null &
        for i in $(seq {CONNECTIONS}); do nc {address} 8080 </tmp/silence >/dev/null 2>&1 & done"
    );
    said(ground, FROM, &flood)?;
    let established = format!("netstat -tn | grep -c '{address}:8080 .*ESTABLISHED'");
    wait_until("as many connections are open", || {
        let open = said(ground, FROM, &established)?;
        let count: usize = open.lines().next().unwrap_or_default().trim().parse().unwrap_or(0);
        ensure!(count >= CONNECTIONS, "{count} are");
        Ok(true)
    })?;
    let answer = said(ground, FROM, &asked)?;
    ensure!(answer.contains("200 OK"), "the agent does not answer others: {answer}");
    let outcome = newcomer(ground, "after-connections", "the agent answers")?;
    ensure!(ready(&part(ground.scope.cluster, "agent")?), "the agent is not ready");
    Ok(outcome)
}

/// A note of the owner's own making: it is let through by what the operator finds, which takes its
/// place.
fn noted(ground: &Ground<'_>, name: &str, note: &str) -> Result<Outcome> {
    let mut object = pod(name, &json!({SHARES: 1}), ONCE);
    object["metadata"]["annotations"] = json!({NOTE: note});
    label(&ground.scope, "annotations")?;
    // The API server learns of the label a moment later.
    wait_until("the namespace has the exception", || ground.tenant.create(&ground.pods(), &object).map(|_| true))?;
    let outcome = runs(ground, name, "its note is the operator's own")?;
    let now = text(&ground.scope.cluster.get(&ground.scope.pod_path(name))?["metadata"]["annotations"][NOTE]);
    ensure!(now != note && now.contains("\"device\":\"GPU-"), "its note is {now:.200}");
    label(&ground.scope, "")?;
    Ok(outcome)
}

fn terms(ground: &Ground<'_>) -> Result<Outcome> {
    // Not yet narrowed to one node: each term is to be changed.
    let term = |index| {
        let values = json!([NODE, format!("elsewhere-{index}")]);
        json!({"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": values}]})
    };
    let terms: Vec<Value> = (0..TERMS).map(term).collect();
    let mut object = pod("terms", &json!({SHARES: 1}), ONCE);
    object["spec"]["affinity"] =
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
    ground.tenant.create(&ground.pods(), &object)?;
    runs(ground, "terms", "it is let through")
}

/// Whether its node can run it is the kubelet's matter: a folder of its logs has the name.
fn longest(ground: &Ground<'_>) -> Result<Outcome> {
    let name = "x".repeat(LONGEST);
    ground.tenant.create(&ground.pods(), &pod(&name, &json!({SHARES: 1}), "exec sleep infinity"))?;
    let path = ground.scope.pod_path(&name);
    wait_until("it is let through and bound", || {
        Ok(text(&ground.scope.cluster.get(&path)?["spec"]["nodeName"]) == NODE)
    })?;
    let outcome = newcomer(ground, "after-longest", "it is let through")?;
    ground.scope.delete_pod(&name, 0)?;
    Ok(outcome)
}

fn events(ground: &Ground<'_>) -> Result<Outcome> {
    let ns = &ground.scope.namespace;
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "flood-"}, "type": "Warning",
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": ns, "name": NEIGHBOUR},
        "reason": "EvictedOutsideShare", "message": "it is evicted: ".repeat(60),
        "source": {"component": "cleave-operator"},
    });
    for _ in 0..EVENTS {
        ground.tenant.create(&format!("/api/v1/namespaces/{ns}/events"), &event)?;
    }
    newcomer(ground, "after-events", "the neighbour stays")
}

/// More than there is room for, before others that there is room for.
fn pods(ground: &Ground<'_>) -> Result<Outcome> {
    let name = |index: usize| format!("flood-{index}");
    for index in 0..PODS {
        ground.tenant.create(&ground.pods(), &pod(&name(index), &json!({SHARES: 10}), "exec sleep infinity"))?;
    }
    let outcome = newcomer(ground, "after-pods", "no pod was refused")?;
    let flood: BTreeSet<String> = (0..PODS).map(name).collect();
    let (mut there, mut bound) = (0, 0);
    for pod in ground.scope.pods()?.iter().filter(|pod| flood.contains(&text(&pod["metadata"]["name"]))) {
        ensure!(text(&pod["status"]["phase"]) != "Failed", "it was refused: {}", pod["status"]);
        there += 1;
        bound += usize::from(pod["spec"]["nodeName"].is_string());
    }
    // The other two GPUs have pods with fewer shares.
    ensure!(there == PODS && bound <= 2, "{there} of {PODS} are there, and {bound} are bound");
    for name in flood {
        ground.scope.cluster.delete(&ground.scope.pod_path(&name), Some(0))?;
    }
    Ok(outcome)
}
