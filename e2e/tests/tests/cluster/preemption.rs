//! Tests preemption: for a pod of higher priority, the operator evicts pods of lower priority from
//! one GPU, and does not violate disruption budgets.
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Scope, pod, text, wait_until};
use serde_json::{Value, json};

use crate::gate::{SLEEP_FOREVER_SCRIPT, is_gated, wait_for_allocation_on_one_gpu, wait_for_event};
use crate::{GPUS_PER_NODE, NODE, SHARES_RESOURCE, container_and_restarts, ten_shares};

/// Two priority classes, `e2e-high` and `e2e-patient`. Dropping this value deletes both classes.
struct PriorityClasses<'a>(&'a Cluster);

const PRIORITY_CLASSES_PATH: &str = "/apis/scheduling.k8s.io/v1/priorityclasses";

impl<'a> PriorityClasses<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let priorities = Self(cluster);
        priorities.delete()?;
        for (name, policy) in [("e2e-high", "PreemptLowerPriority"), ("e2e-patient", "Never")] {
            let class = json!({"metadata": {"name": name}, "value": 1000, "preemptionPolicy": policy});
            cluster.create(PRIORITY_CLASSES_PATH, &class)?;
        }
        Ok(priorities)
    }

    fn delete(&self) -> Result<()> {
        ["e2e-high", "e2e-patient"]
            .iter()
            .try_for_each(|name| self.0.delete(&format!("{PRIORITY_CLASSES_PATH}/{name}"), None))
    }
}

impl Drop for PriorityClasses<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.delete() {
            let _ = writeln!(std::io::stderr(), "failed to delete the PriorityClasses: {error:#}");
        }
    }
}

#[test]
fn a_pod_of_higher_priority_preempts_on_one_gpu_and_respects_disruption_budgets() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _priorities = PriorityClasses::new(&cluster)?;
    let scope = ten_shares(&cluster, "preempt")?;
    let ns = &scope.namespace;
    let pods = format!("/api/v1/namespaces/{ns}/pods");
    for index in 0..GPUS_PER_NODE {
        let mut pod = pod(&format!("seven-{index}"), &json!({SHARES_RESOURCE: 7}), SLEEP_FOREVER_SCRIPT);
        if index > 0 {
            pod["metadata"]["labels"] = json!({"keep": "me"});
        }
        cluster.create(&pods, &pod)?;
        // Among pods of equal priority, the operator first evicts the youngest pod. Wait, because
        // the pods with a budget must be younger than the pod without a budget, and creation times
        // are in whole seconds.
        std::thread::sleep(Duration::from_millis(1100));
    }
    cluster.create(
        &format!("/apis/policy/v1/namespaces/{ns}/poddisruptionbudgets"),
        &json!({"metadata": {"name": "keep"}, "spec": {"minAvailable": GPUS_PER_NODE - 1, "selector": {"matchLabels": {"keep": "me"}}}}),
    )?;
    let before: Vec<(String, u64)> = (0..GPUS_PER_NODE)
        .map(|index| {
            let name = format!("seven-{index}");
            scope.wait_until_running(&name)?;
            wait_for_allocation_on_one_gpu(&cluster, &scope, &name, 7)?;
            container_and_restarts(&cluster, &scope, &name)
        })
        .collect::<Result<_>>()?;
    wait_until("the PodDisruptionBudget counts its pods", || {
        let budget = cluster.get(&format!("/apis/policy/v1/namespaces/{ns}/poddisruptionbudgets/keep"))?;
        Ok(budget["status"]["currentHealthy"] == GPUS_PER_NODE - 1)
    })?;
    let with = |name: &str, class: &str| {
        let mut pod = pod(name, &json!({SHARES_RESOURCE: 6}), SLEEP_FOREVER_SCRIPT);
        pod["spec"]["priorityClassName"] = json!(class);
        pod
    };
    // A pod with the preemption policy `Never` waits, although it has a higher priority.
    cluster.create(&pods, &with("patient", "e2e-patient"))?;
    wait_for_event(&scope, "patient", "the emptiest has 3")?;
    cluster.delete(&scope.pod_path("patient"), Some(0))?;
    cluster.create(&pods, &with("high", "e2e-high"))?;
    scope.wait_until_running("high")?;
    // Wait, because the node reports the free shares before the API server deletes the pod.
    wait_until("the pod without a budget no longer exists", || {
        Ok(cluster.find(&scope.pod_path("seven-0"))?.is_none())
    })?;
    for (index, before) in before.iter().enumerate().skip(1) {
        ensure!(
            container_and_restarts(&cluster, &scope, &format!("seven-{index}"))? == *before,
            "seven-{index} was disturbed"
        );
    }
    wait_for_event(&scope, "seven-0", "Preempted")
}

/// Returns a pod on [`NODE`] that requests `shares` shares and `milli` thousandths of a CPU.
fn pod_with_cpu(name: &str, shares: u64, milli: u64) -> Value {
    let mut pod = pod(name, &json!({SHARES_RESOURCE: shares}), SLEEP_FOREVER_SCRIPT);
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
    pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": format!("{milli}m")});
    pod
}

fn create_pod(scope: &Scope, pod: &Value) -> Result<()> {
    scope.cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), pod).map(drop)
}

fn pod_with_high_priority(mut pod: Value) -> Value {
    pod["spec"]["priorityClassName"] = json!("e2e-high");
    pod
}

/// Parses a quantity of CPU. Returns thousandths of a CPU.
fn parse_millicores(quantity: &Value) -> Result<u64> {
    let quantity = text(quantity);
    match quantity.strip_suffix('m') {
        Some(milli) => milli.parse().context("milli"),
        None if quantity.is_empty() => Ok(0),
        None => Ok(quantity.parse::<u64>().with_context(|| quantity.clone())? * 1000),
    }
}

/// Returns how many thousandths of a CPU of [`NODE`] no pod requests.
fn free_cpu(cluster: &Cluster) -> Result<u64> {
    let node = cluster.get(&format!("/api/v1/nodes/{NODE}"))?;
    let mut free = parse_millicores(&node["status"]["allocatable"]["cpu"])?;
    for pod in cluster.list(&format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{NODE}"))? {
        for container in pod["spec"]["containers"].as_array().into_iter().flatten() {
            free = free.saturating_sub(parse_millicores(&container["resources"]["requests"]["cpu"])?);
        }
    }
    Ok(free)
}

#[test]
fn a_pod_preempts_on_a_node_with_too_little_free_cpu() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _priorities = PriorityClasses::new(&cluster)?;
    let scope = ten_shares(&cluster, "preempt-cpu")?;
    let free = free_cpu(&cluster)?;
    create_pod(&scope, &pod_with_cpu("low", 1, free * 3 / 4))?;
    scope.wait_until_running("low")?;
    wait_for_allocation_on_one_gpu(&cluster, &scope, "low", 1)?;
    create_pod(&scope, &pod_with_high_priority(pod_with_cpu("high", 1, free / 2)))?;
    scope.wait_until_running("high")?;
    // Accept a pod that is being deleted, because a pod exists for a short time after its
    // containers have exited.
    let low = cluster.find(&scope.pod_path("low"))?;
    let is_evicted = low.is_none_or(|low| !low["metadata"]["deletionTimestamp"].is_null());
    ensure!(is_evicted, "both pods fit, so the test proves nothing");
    wait_for_event(&scope, "low", "Preempted")
}

#[test]
fn eight_waiting_pods_that_no_eviction_helps_do_not_block_the_ninth() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _priorities = PriorityClasses::new(&cluster)?;
    let scope = ten_shares(&cluster, "preempt-turns")?;
    let free = free_cpu(&cluster)?;
    // The operator cannot evict this pod, because the waiting pods have the same priority. The pod
    // requests half of the free CPU.
    let mut fixed = pod_with_high_priority(pod_with_cpu("fixed", 1, free / 2));
    fixed["metadata"]["labels"] = json!({"app": "fixed"});
    create_pod(&scope, &fixed)?;
    create_pod(&scope, &pod_with_cpu("low", 1, free / 4))?;
    for name in ["fixed", "low"] {
        scope.wait_until_running(name)?;
        wait_for_allocation_on_one_gpu(&cluster, &scope, name, 1)?;
    }
    // Each pod requests a different amount, so that the operator needs a separate search for each
    // pod.
    for index in 0..8 {
        let name = format!("hopeless-{index}");
        create_pod(&scope, &pod_with_high_priority(pod_with_cpu(&name, 1, free * 3 / 4 + 50 + index)))?;
        wait_for_event(&scope, &name, "does not have enough CPU")?;
    }
    create_pod(&scope, &pod_with_high_priority(pod_with_cpu("ninth", 1, free * 3 / 8)))?;
    scope.wait_until_running("ninth")?;
    for index in 0..8 {
        let waiting = cluster.get(&scope.pod_path(&format!("hopeless-{index}")))?;
        ensure!(is_gated(&waiting), "{}", waiting["status"]);
    }
    Ok(())
}

#[test]
fn a_pod_with_two_disruption_budgets_does_not_block_preemption() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _priorities = PriorityClasses::new(&cluster)?;
    let scope = ten_shares(&cluster, "preempt-budgets")?;
    let budgets = format!("/apis/policy/v1/namespaces/{}/poddisruptionbudgets", scope.namespace);
    for name in ["one", "two"] {
        let spec = json!({"minAvailable": 1, "selector": {"matchLabels": {"app": "twice"}}});
        cluster.create(&budgets, &json!({"metadata": {"name": name}, "spec": spec}))?;
    }
    for index in 0..GPUS_PER_NODE {
        let mut pod = pod(&format!("seven-{index}"), &json!({SHARES_RESOURCE: 7}), SLEEP_FOREVER_SCRIPT);
        if index > 0 {
            pod["metadata"]["labels"] = json!({"app": "twice"});
        }
        create_pod(&scope, &pod)?;
        // Among pods of equal priority, the operator first evicts the youngest pod. Wait, because
        // creation times are in whole seconds. Only the first pod has no budget.
        std::thread::sleep(Duration::from_millis(1100));
    }
    for index in 0..GPUS_PER_NODE {
        let name = format!("seven-{index}");
        scope.wait_until_running(&name)?;
        wait_for_allocation_on_one_gpu(&cluster, &scope, &name, 7)?;
    }
    create_pod(&scope, &pod_with_high_priority(pod("high", &json!({SHARES_RESOURCE: 6}), SLEEP_FOREVER_SCRIPT)))?;
    scope.wait_until_running("high")?;
    // Wait, because the node reports the free shares before the API server deletes the pod.
    wait_until("the pod without a budget no longer exists", || {
        Ok(cluster.find(&scope.pod_path("seven-0"))?.is_none())
    })?;
    for index in 1..GPUS_PER_NODE {
        ensure!(cluster.find(&scope.pod_path(&format!("seven-{index}")))?.is_some(), "seven-{index} was evicted");
    }
    Ok(())
}
