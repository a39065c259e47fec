//! Tests that unusual pods, hundreds of pods that cannot run, and an unusual node do not delay
//! other pods. Unit tests of the gatekeeper test the same cases with more objects.
use std::io::Write as _;

use anyhow::{Result, ensure};
use cleave_e2e::{Cluster, POLICIES_PATH, Scope, pod, text, wait_until};
use serde_json::{Value, json};

use crate::gate::{SLEEP_FOREVER_SCRIPT, is_gated, wait_for_event};
use crate::stranded::{advertises_shares, check_runs_soon, node_path};
use crate::{GPUS_PER_NODE, NODE, SHARES_RESOURCE, ten_shares};

const WAITING_POD_COUNT: usize = 500;
const HOSTNAME_LABEL: &str = "kubernetes.io/hostname";

/// Creates [`WAITING_POD_COUNT`] pods that select [`NODE`]. Each pod requests `shares` shares.
fn create_many_pods(scope: &Scope, shares: u32) -> Result<()> {
    for index in 0..WAITING_POD_COUNT {
        scope.create_pod_on_node(
            NODE,
            &format!("many-{index}"),
            &json!({SHARES_RESOURCE: shares}),
            SLEEP_FOREVER_SCRIPT,
        )?;
    }
    Ok(())
}

/// Creates a pod with one share on [`NODE`], and checks that the pod runs soon.
fn check_new_pod_runs(scope: &Scope, name: &str) -> Result<()> {
    scope.create_pod_on_node(NODE, name, &json!({SHARES_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT)?;
    check_runs_soon(scope, name)
}

#[test]
fn a_pod_with_twenty_containers_300_topology_terms_or_a_long_annotation_runs() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "unusual")?;
    let pods = format!("/api/v1/namespaces/{}/pods", scope.namespace);
    let mut twenty = pod("twenty", &json!({SHARES_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT);
    let main = twenty["spec"]["containers"][0].take();
    let container = |index: usize| {
        let mut container = main.clone();
        container["name"] = json!(format!("c{index}"));
        container
    };
    twenty["spec"]["containers"] = (0..20).map(container).collect();
    let mut terms = pod("terms", &json!({SHARES_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT);
    let apart = |index: usize| json!({"topologyKey": format!("zone-{index}"), "labelSelector": {"matchLabels": {"app": "none"}}});
    let apart: Vec<Value> = (0..300).map(apart).collect();
    terms["spec"]["affinity"] = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}});
    let mut long = pod("long", &json!({SHARES_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT);
    long["metadata"]["annotations"] = json!({"example.com/notes": "x".repeat(250 << 10)});
    for pod in [&twenty, &terms, &long] {
        cluster.create(&pods, pod)?;
    }
    check_new_pod_runs(&scope, "other")?;
    for name in ["twenty", "terms", "long"] {
        scope.wait_until_running(name)?;
    }
    Ok(())
}

#[test]
fn five_hundred_pods_that_can_never_run_do_not_delay_other_pods() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "never-many")?;
    create_many_pods(&scope, 11)?;
    check_new_pod_runs(&scope, "first")?;
    wait_for_event(&scope, "many-0", "the largest has 10")?;
    // The operator releases all of these pods as unschedulable. The size of the patch that releases
    // a pod does not depend on the number of nodes.
    let last = format!("many-{}", WAITING_POD_COUNT - 1);
    wait_until("the last of them is released", || Ok(!is_gated(&cluster.get(&scope.pod_path(&last))?)))?;
    wait_until("the scheduler has examined the last of them", || {
        let pod = cluster.get(&scope.pod_path(&last))?;
        let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        Ok(conditions.iter().any(|condition| condition["reason"] == "Unschedulable"))
    })?;
    check_new_pod_runs(&scope, "second")?;
    let released = cluster.get(&scope.pod_path(&last))?;
    let affinity = released["spec"]["affinity"].to_string();
    ensure!(affinity.len() < 1000 && !affinity.contains("NotIn"), "{affinity}");
    ensure!(released["spec"]["nodeName"].is_null(), "{}", released["status"]);
    Ok(())
}

#[test]
fn a_policy_that_is_deleted_while_five_hundred_pods_wait_delays_no_other_pod() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "policy-many")?;
    let spec = cluster.get(&format!("{POLICIES_PATH}/ten-shares"))?["spec"].clone();
    for index in 0..GPUS_PER_NODE {
        let name = format!("full-{index}");
        scope.create_pod_on_node(NODE, &name, &json!({SHARES_RESOURCE: 10}), SLEEP_FOREVER_SCRIPT)?;
        scope.wait_until_running(&name)?;
    }
    create_many_pods(&scope, 10)?;
    cluster.delete(&format!("{POLICIES_PATH}/ten-shares"), None)?;
    // After the pod `full-0` is deleted, its GPU becomes a whole GPU again, although hundreds of
    // pods wait for shares.
    scope.create_pod_on_node(NODE, "whole", &json!({"nvidia.com/gpu": 1}), SLEEP_FOREVER_SCRIPT)?;
    wait_until("the operator has planned without the policy", || {
        let gpus = cluster.gpu_node(NODE)?["spec"]["gpus"].as_array().cloned().unwrap_or_default();
        Ok(gpus.iter().all(|gpu| gpu["partition"]["mps"].is_null()))
    })?;
    scope.delete_pod("full-0", 0)?;
    scope.wait_until_running("whole")?;
    scope.create_policy("ten-shares", &spec)?;
    scope.delete_pod("whole", 0)?;
    wait_until("one of the pods that waited runs", || {
        let pods = scope.pods()?;
        let many: Vec<&Value> = pods.iter().filter(|pod| text(&pod["metadata"]["name"]).starts_with("many-")).collect();
        let failed = many.iter().find(|pod| pod["status"]["phase"] == "Failed");
        ensure!(failed.is_none(), "{failed:?}");
        Ok(many.iter().any(|pod| pod["status"]["phase"] == "Running"))
    })
}

/// A hostname label that differs from the node's name. Dropping this value restores the label.
struct ChangedHostname<'a>(&'a Cluster, &'a str);

impl ChangedHostname<'_> {
    fn set(&self, hostname: &str) -> Result<()> {
        self.0.patch(&node_path(self.1), &json!({"metadata": {"labels": {HOSTNAME_LABEL: hostname}}})).map(drop)
    }
}

impl Drop for ChangedHostname<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.set(self.1) {
            let _ = writeln!(std::io::stderr(), "{} keeps its other hostname: {error:#}", self.1);
        }
    }
}

#[test]
fn a_node_whose_hostname_label_differs_from_its_name_serves_pods() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "hostname")?;
    scope.create_policy("ten-shares", &json!({"mode": "Mps", "mps": {"units": 10}}))?;
    wait_until("node2 advertises shares", || advertises_shares(&cluster, "node2"))?;
    let hostname = ChangedHostname(&cluster, "node2");
    hostname.set("ip-10-0-0-2")?;
    scope.create_pod_on_node("ip-10-0-0-2", "runs", &json!({SHARES_RESOURCE: 2}), SLEEP_FOREVER_SCRIPT)?;
    let runs = scope.wait_until_running("runs")?;
    ensure!(runs["spec"]["nodeName"] == "node2", "it runs on {}", runs["spec"]["nodeName"]);
    Ok(())
}
