//! Tests GPUs that are quiesced before a reset, and nodes that are quiesced before a driver
//! upgrade. The simulated driver refuses the reset or the upgrade while a program of Cleave has a
//! GPU open.
use anyhow::{Context as _, Result, ensure};
use cleave_e2e::{Cluster, Faults, GPU_NODES_PATH, Scope, run_program, text, wait_until};
use serde_json::{Value, json};

use crate::health::cleave_path;
use crate::{HOLD_CLIENT_SCRIPT, SHARES_RESOURCE, container_and_restarts};

/// The node of these tests, which few other tests use, and the number of its simulated GPUs.
const NODE: &str = "node2";
const GPU_COUNT: u64 = 2;
/// The label with which the GPU Operator starts and stops the device plugin on a node.
const DEPLOY_LABEL: &str = "nvidia.com/gpu.deploy.device-plugin";

/// Dropping this value loads the driver of [`NODE`] and reverts the label, the cordon and the
/// quiesce.
struct ServiceGuard<'a> {
    cluster: &'a Cluster,
    simulator: Faults<'a>,
}

impl<'a> ServiceGuard<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        Self { cluster, simulator: Faults::on_node(NODE) }
    }

    /// Checks that the simulated driver refuses a `simgpu` command, with an error that contains
    /// `why`.
    fn check_refused(&self, args: &[&str], why: &str) -> Result<()> {
        match self.simulator.simgpu(args) {
            Ok(_) => anyhow::bail!("simgpu {args:?} succeeded"),
            Err(error) => ensure!(format!("{error:#}").contains(why), "simgpu {args:?}: {error:#}"),
        }
        Ok(())
    }
}

impl Drop for ServiceGuard<'_> {
    fn drop(&mut self) {
        let _ = self.simulator.simgpu(&["driver", "--present", "true"]);
        let no_label = json!({"metadata": {"labels": {DEPLOY_LABEL: null}}});
        let _ = self.cluster.patch(&format!("/api/v1/nodes/{NODE}"), &no_label);
        let annotations = json!({"cleave.dev/cordon": null, "cleave.dev/quiesce": null});
        let in_service = json!({"metadata": {"annotations": annotations}});
        let _ = self.cluster.patch(&format!("{GPU_NODES_PATH}/{NODE}"), &in_service);
    }
}

/// Creates a namespace, and a policy that divides each GPU of [`NODE`] into ten shares.
fn ten_shares_of_node<'a>(cluster: &'a Cluster, name: &str) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    let selector = json!({"kubernetes.io/hostname": NODE});
    scope.create_policy("quiesce", &json!({"nodeSelector": selector, "mode": "Mps", "mps": {"units": 10}}))?;
    wait_until_advertised(cluster, 10 * GPU_COUNT)?;
    Ok(scope)
}

/// Waits until [`NODE`] advertises exactly this count of shares as allocatable.
fn wait_until_advertised(cluster: &Cluster, count: u64) -> Result<()> {
    wait_until(&format!("{NODE} advertises {count} shares"), || {
        let advertised = cluster.allocatable(NODE, SHARES_RESOURCE)?;
        ensure!(advertised == count, "the node advertises {advertised}");
        Ok(true)
    })
}

/// Creates a pod on [`NODE`], waits until the pod runs, and returns the UUID of its GPU.
fn run_pod(scope: &Scope, name: &str, shares: u64) -> Result<String> {
    scope.create_pod_on_node(NODE, name, &json!({SHARES_RESOURCE: shares}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running(name)?;
    Ok(text(&scope.client_report(name)?["uuid"]))
}

fn gpu_statuses(cluster: &Cluster) -> Result<Vec<Value>> {
    Ok(cluster.gpu_node(NODE)?["status"]["gpus"].as_array().cloned().unwrap_or_default())
}

#[test]
fn a_quiesced_gpu_is_reset_while_pods_run_and_start_on_the_other_gpu() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares_of_node(&cluster, "reset")?;
    let service = ServiceGuard::new(&cluster);
    let kept = run_pod(&scope, "stays", 3)?;
    let before = container_and_restarts(&cluster, &scope, "stays")?;
    // Only the other GPU has ten free shares, so the pod runs on that GPU.
    let gpu = run_pod(&scope, "leaves", 10)?;
    ensure!(gpu != kept, "both pods are on GPU {gpu}");
    let drain = |options: &[&str]| {
        let command = ["drain", NODE, &gpu, "--force", "--grace", "1", "--timeout", "80"];
        run_program(&cleave_path(), &[&command, options].concat())
    };
    service.check_refused(&["reset", &gpu], "in use")?;
    // Wait, because the agent reports an allocation only after the pod has started.
    wait_until("the node reports the pod that leaves", || {
        let gpus = gpu_statuses(&cluster)?;
        Ok(gpus.iter().any(|status| status["uuid"] == *gpu && status["allocations"] != json!([])))
    })?;
    drain(&[])?;
    service.check_refused(&["reset", &gpu], "in use")?;
    let printed = drain(&["--quiesce"])?;
    ensure!(printed.contains("quiesced: its MPS daemons have exited"), "{printed}");
    service.simulator.simgpu(&["reset", &gpu])?;

    wait_until_advertised(&cluster, 10)?;
    ensure!(run_pod(&scope, "new", 5)? == kept, "the new pod is on the quiesced GPU");
    ensure!(before == container_and_restarts(&cluster, &scope, "stays")?, "a running pod was disturbed");
    let status = gpu_statuses(&cluster)?.into_iter().find(|status| status["uuid"] == *gpu);
    let quiesce = status.context("the quiesced GPU is not reported")?["quiesce"].clone();
    ensure!(quiesce["quiesced"] == true, "the new pod ended the quiesce: {quiesce}");

    run_program(&cleave_path(), &["uncordon", NODE, &gpu])?;
    wait_until_advertised(&cluster, 10 * GPU_COUNT)?;
    ensure!(run_pod(&scope, "returns", 10)? == gpu, "the new pod is on the other GPU");
    ensure!(before == container_and_restarts(&cluster, &scope, "stays")?, "a running pod was disturbed");
    Ok(())
}

/// Reloads the driver of a quiesced node, ends the quiesce with `resume`, and checks that pods run
/// again.
fn check_driver_reload(service: &ServiceGuard, scope: &Scope, resume: impl FnOnce() -> Result<()>) -> Result<()> {
    service.simulator.simgpu(&["unload"])?;
    service.simulator.simgpu(&["driver", "--present", "true"])?;
    wait_until_advertised(service.cluster, 0)?;
    resume()?;
    wait_until_advertised(service.cluster, 10 * GPU_COUNT)?;
    let gpus = [run_pod(scope, "first", 10)?, run_pod(scope, "second", 10)?];
    ensure!(gpus[0] != gpus[1], "both pods are on GPU {}", gpus[0]);
    Ok(())
}

#[test]
fn the_label_of_the_driver_manager_quiesces_a_node_for_a_driver_reload() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares_of_node(&cluster, "reload")?;
    let service = ServiceGuard::new(&cluster);
    let label = |value: &str| {
        let labels = json!({"metadata": {"labels": {DEPLOY_LABEL: value}}});
        cluster.patch(&format!("/api/v1/nodes/{NODE}"), &labels)
    };
    label("true")?;
    service.check_refused(&["unload"], "in use")?;
    label("paused-for-driver-upgrade")?;
    wait_until("all GPUs are quiesced", || {
        Ok(gpu_statuses(&cluster)?.iter().all(|gpu| gpu["quiesce"]["quiesced"] == true))
    })?;
    check_driver_reload(&service, &scope, || label("true").map(drop))
}

#[test]
fn a_drained_node_is_quiesced_for_a_driver_reload() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares_of_node(&cluster, "drain")?;
    let service = ServiceGuard::new(&cluster);
    run_pod(&scope, "leaves", 2)?;
    service.check_refused(&["unload"], "in use")?;
    let options = ["--quiesce", "--force", "--grace", "1", "--timeout", "80"];
    let printed = run_program(&cleave_path(), &[&["drain", NODE], &options[..]].concat())?;
    ensure!(printed.matches("quiesced: its MPS daemons have exited").count() == 2, "{printed}");
    check_driver_reload(&service, &scope, || run_program(&cleave_path(), &["uncordon", NODE]).map(drop))
}
