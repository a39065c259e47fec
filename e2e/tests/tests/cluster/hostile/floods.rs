//! Lists attempts to overload Cleave: floods of connections, Events and pods, and very long values.
//! In each case, running pods must continue to run and the next pod must start.
use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use cleave_e2e::{pod, text, wait_until};
use serde_json::{Value, json};

use super::programs::{NEIGHBOUR_POD, check_limits, run_script};
use super::requests::FORGED_PLACEMENT;
use super::{Attempt, ExpectedOutcome, Outcome, TestBed};
use crate::gate_admission::set_exceptions;
use crate::restarts::{component_pod, is_ready};
use crate::{NODE, SHARES_RESOURCE};

/// The pod that opens many connections to the agent's port.
const FLOODING_POD: &str = "hostile";
const FLOOD_CONNECTION_COUNT: usize = 200;
const FLOOD_EVENT_COUNT: usize = 300;
const FLOOD_POD_COUNT: usize = 60;
/// Number of node selector terms. The JSON Patch that releases the pod has one operation for each
/// term.
const SELECTOR_TERM_COUNT: usize = 1000;
/// Maximum length of a name that the API server accepts.
const MAX_NAME_LENGTH: usize = 253;
const RUN_ONCE_SCRIPT: &str = "exec cleave-client --once";
/// The annotation in which the operator records reservations.
const PLACEMENT_ANNOTATION: &str = "cleave.dev/placement";

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "two hundred silent connections to the agent's metrics from a permitted namespace",
        expected: ExpectedOutcome::NoEffect,
        run: open_silent_connections,
    },
    Attempt {
        name: "a resource with Cleave's prefix that no node serves",
        expected: ExpectedOutcome::NoEffect,
        run: |bed| {
            bed.tenant.create(&bed.pods_path(), &pod("nobody", &json!({"nvidia.com/gpu-free": 1}), RUN_ONCE_SCRIPT))?;
            crate::gate::wait_for_event(&bed.scope, "nobody", "NoGpuFits")?;
            let placed = bed.scope.cluster.get(&bed.scope.pod_path("nobody"))?;
            ensure!(placed["spec"]["nodeName"].is_null(), "{placed}");
            Ok(Outcome::NoEffect("an Event reports that no node has the resource, and the pod is not bound".to_owned()))
        },
    },
    Attempt {
        name: "a forged placement with paths, where the namespace has the exception",
        expected: ExpectedOutcome::NoEffect,
        run: |bed| create_pod_with_forged_placement(bed, "note-paths", FORGED_PLACEMENT),
    },
    Attempt {
        name: "a placement of two hundred thousand letters, where the namespace has the exception",
        expected: ExpectedOutcome::NoEffect,
        run: |bed| create_pod_with_forged_placement(bed, "note-letters", &"{".repeat(200_000)),
    },
    Attempt {
        name: "a pod with a thousand node selector terms",
        expected: ExpectedOutcome::NoEffect,
        run: create_pod_with_many_terms,
    },
    Attempt {
        name: "a pod with the longest possible name",
        expected: ExpectedOutcome::NoEffect,
        run: create_pod_with_longest_name,
    },
    Attempt {
        name: "three hundred Events with Cleave's reasons",
        expected: ExpectedOutcome::NoEffect,
        run: create_forged_events,
    },
    Attempt {
        name: "sixty pods at the same time, each with all shares of a GPU",
        expected: ExpectedOutcome::NoEffect,
        run: create_too_many_pods,
    },
];

/// Creates another pod with one share, and checks that the pod runs with the limits of the share.
/// The description of the outcome starts with `outcome_prefix`.
fn check_that_new_pod_runs(bed: &TestBed<'_>, name: &str, outcome_prefix: &str) -> Result<Outcome> {
    bed.scope.create_pod(name, &json!({SHARES_RESOURCE: 1}), RUN_ONCE_SCRIPT)?;
    check_that_pod_runs(bed, name, outcome_prefix)
}

/// Checks that a pod with one share succeeds and has the limits of the share.
fn check_that_pod_runs(bed: &TestBed<'_>, name: &str, outcome_prefix: &str) -> Result<Outcome> {
    let (phase, log) = bed.scope.wait_until_finished(name)?;
    ensure!(phase == "Succeeded", "{name} is {phase}: {log}");
    match check_limits(bed, 1, &log, 1)? {
        Outcome::NoEffect(limits) => Ok(Outcome::NoEffect(format!("{outcome_prefix}; {name} runs: {limits}"))),
        other => Ok(other),
    }
}

/// Opens more connections than the agent keeps open, and sends nothing on them. The agent must
/// close these connections and still answer other requests.
fn open_silent_connections(bed: &TestBed<'_>) -> Result<Outcome> {
    let agent = component_pod(bed.scope.cluster, "agent")?;
    let address = text(&agent["status"]["podIP"]);
    let request = format!("{{ printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n'; sleep 1; }} | timeout 20 nc {address} 8080");
    // Without the label, the chart's NetworkPolicy blocks the connections. See the module
    // `network`.
    let label = json!({"metadata": {"labels": {"metrics": "enabled"}}});
    bed.scope.cluster.patch(&format!("/api/v1/namespaces/{}", bed.scope.namespace), &label)?;
    wait_until("the agent's port can be reached", || {
        let answer = run_script(bed, FLOODING_POD, &request)?;
        ensure!(answer.contains("200 OK"), "{answer}");
        Ok(true)
    })?;
    let flood = format!(
        "mkfifo /tmp/silence; sleep 600 >/tmp/silence 2>&1 </dev/null &
        for i in $(seq {FLOOD_CONNECTION_COUNT}); do
          {{ nc {address} 8080 </tmp/silence; echo closed >>/tmp/closed; }} >/dev/null 2>&1 &
        done"
    );
    run_script(bed, FLOODING_POD, &flood)?;
    // Retry, because the agent may close the connection of one request when many other connections
    // are opened.
    wait_until("the agent answers another request", || {
        let answer = run_script(bed, FLOODING_POD, &request)?;
        ensure!(answer.contains("200 OK"), "{answer}");
        Ok(true)
    })?;
    wait_until("the agent has closed all silent connections", || {
        let closed = run_script(bed, FLOODING_POD, "wc -l </tmp/closed")?;
        let count: usize = closed.lines().next().unwrap_or_default().trim().parse().unwrap_or(0);
        ensure!(count >= FLOOD_CONNECTION_COUNT, "{count} are closed");
        Ok(true)
    })?;
    let outcome = check_that_new_pod_runs(bed, "after-connections", "the agent answers")?;
    wait_until("the agent is ready", || component_pod(bed.scope.cluster, "agent").map(|pod| is_ready(&pod)))?;
    Ok(outcome)
}

/// Creates a pod with a forged annotation. The operator must release the pod with a reservation
/// that replaces the forged value.
fn create_pod_with_forged_placement(bed: &TestBed<'_>, name: &str, value: &str) -> Result<Outcome> {
    let mut object = pod(name, &json!({SHARES_RESOURCE: 1}), RUN_ONCE_SCRIPT);
    object["metadata"]["annotations"] = json!({PLACEMENT_ANNOTATION: value});
    set_exceptions(&bed.scope, "annotations")?;
    // The API server applies the label after a short delay.
    wait_until("the namespace has the exception", || bed.tenant.create(&bed.pods_path(), &object).map(|_| true))?;
    let outcome = check_that_pod_runs(bed, name, "the operator wrote the pod's annotation")?;
    let now = text(&bed.scope.cluster.get(&bed.scope.pod_path(name))?["metadata"]["annotations"][PLACEMENT_ANNOTATION]);
    ensure!(now != value && now.contains("\"device\":\"GPU-"), "the pod's annotation is {now:.200}");
    set_exceptions(&bed.scope, "")?;
    Ok(outcome)
}

/// Creates a pod with a thousand node selector terms.
fn create_pod_with_many_terms(bed: &TestBed<'_>) -> Result<Outcome> {
    // Each term selects two nodes, so that the operator must change every term.
    let term = |index| {
        let values = json!([NODE, format!("elsewhere-{index}")]);
        json!({"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": values}]})
    };
    let terms: Vec<Value> = (0..SELECTOR_TERM_COUNT).map(term).collect();
    let mut object = pod("terms", &json!({SHARES_RESOURCE: 1}), RUN_ONCE_SCRIPT);
    object["spec"]["affinity"] =
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
    bed.tenant.create(&bed.pods_path(), &object)?;
    check_that_pod_runs(bed, "terms", "it is released")
}

/// Creates a pod with the longest possible name, and waits until the pod is bound. The kubelet may
/// fail to run the pod, because the name of its log directory would be too long.
fn create_pod_with_longest_name(bed: &TestBed<'_>) -> Result<Outcome> {
    let name = "x".repeat(MAX_NAME_LENGTH);
    bed.tenant.create(&bed.pods_path(), &pod(&name, &json!({SHARES_RESOURCE: 1}), "exec sleep infinity"))?;
    let path = bed.scope.pod_path(&name);
    wait_until("the pod is released and bound", || {
        Ok(text(&bed.scope.cluster.get(&path)?["spec"]["nodeName"]) == NODE)
    })?;
    let outcome = check_that_new_pod_runs(bed, "after-longest", "it is released")?;
    bed.scope.delete_pod(&name, 0)?;
    Ok(outcome)
}

/// Creates Events that look like Cleave's Events.
fn create_forged_events(bed: &TestBed<'_>) -> Result<Outcome> {
    let ns = &bed.scope.namespace;
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "flood-"}, "type": "Warning",
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": ns, "name": NEIGHBOUR_POD},
        "reason": "EvictedOutsideShare", "message": "it is evicted: ".repeat(60),
        "source": {"component": "cleave-operator"},
    });
    for _ in 0..FLOOD_EVENT_COUNT {
        bed.tenant.create(&format!("/api/v1/namespaces/{ns}/events"), &event)?;
    }
    check_that_new_pod_runs(bed, "after-events", "the neighbour stays")
}

/// Creates more pods than fit on the GPUs, and then a pod that fits.
fn create_too_many_pods(bed: &TestBed<'_>) -> Result<Outcome> {
    let name = |index: usize| format!("flood-{index}");
    for index in 0..FLOOD_POD_COUNT {
        bed.tenant
            .create(&bed.pods_path(), &pod(&name(index), &json!({SHARES_RESOURCE: 10}), "exec sleep infinity"))?;
    }
    let outcome = check_that_new_pod_runs(bed, "after-pods", "the kubelet rejected no pod")?;
    let flood: BTreeSet<String> = (0..FLOOD_POD_COUNT).map(name).collect();
    let (mut there, mut bound) = (0, 0);
    for pod in bed.scope.pods()?.iter().filter(|pod| flood.contains(&text(&pod["metadata"]["name"]))) {
        ensure!(text(&pod["status"]["phase"]) != "Failed", "the kubelet rejected a pod: {}", pod["status"]);
        there += 1;
        bound += usize::from(pod["spec"]["nodeName"].is_string());
    }
    // Each pod needs a whole GPU. At most two pods fit, because other pods use some of the shares
    // of the other two GPUs.
    ensure!(there == FLOOD_POD_COUNT && bound <= 2, "{there} of {FLOOD_POD_COUNT} pods exist, and {bound} are bound");
    for name in flood {
        bed.scope.cluster.delete(&bed.scope.pod_path(&name), Some(0))?;
    }
    Ok(outcome)
}
