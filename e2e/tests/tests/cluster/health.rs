//! Tests GPUs that fail and GPUs that an administrator cordons: which shares become unhealthy,
//! which pods continue to run, and what makes the GPU schedulable again.
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, Faults, GPU_NODES_PATH, Scope, find_pid, kubectl, program_output, run_program, signal_program, text,
    wait_until, wait_without_violation,
};
use serde_json::{Value, json};

use crate::chart::ChartSetting;
use crate::restarts::wait_until_agent_serves;
use crate::{
    GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, allocations, container_and_restarts, daemon_pids,
    gpus_without_ten_shares, ten_shares, wait_until_advertised,
};

/// Time without an XID error after which a suspect GPU is healthy again:
/// `agent.suspectQuietSeconds` in e2e/values.yaml.
const QUIET_TIME: Duration = Duration::from_secs(20);

/// Returns the path of the `cleave` command.
pub(crate) fn cleave_path() -> String {
    // Use the same build profile as e2e/lib.sh.
    let profile = match std::env::var("CLEAVE_PROFILE").as_deref() {
        Ok("dev") => "debug".to_owned(),
        Ok(profile) => profile.to_owned(),
        Err(_) => "release".to_owned(),
    };
    format!("{}/../../target/{profile}/cleave", env!("CARGO_MANIFEST_DIR"))
}

/// Repairs and uncordons all GPUs of [`NODE`] when dropped.
pub(crate) struct RepairGuard<'a> {
    cluster: &'a Cluster,
    pub(crate) faults: Faults<'a>,
}

impl<'a> RepairGuard<'a> {
    pub(crate) fn new(cluster: &'a Cluster) -> Self {
        Self { cluster, faults: Faults::on_node(NODE) }
    }
}

impl Drop for RepairGuard<'_> {
    fn drop(&mut self) {
        let nothing = json!({"metadata": {"annotations": {"cleave.dev/cordon": null}}});
        let _ = self.cluster.patch(&format!("{GPU_NODES_PATH}/{NODE}"), &nothing);
        for gpu in 0..GPUS_PER_NODE {
            let gpu = gpu.to_string();
            for set in ["remap-failed=off", "remap-pending=off", "recovery=none"] {
                let _ = self.faults.simgpu(&["set", &gpu, set]);
            }
            let _ = self.faults.simgpu(&["restore", &gpu]);
        }
        for gpu in 0..GPUS_PER_NODE {
            let _ = run_program(&cleave_path(), &["uncordon", NODE, &gpu.to_string()]);
        }
    }
}

/// Reads the status of a GPU of [`NODE`].
pub(crate) fn gpu_status(cluster: &Cluster, index: u64) -> Result<Value> {
    let node = cluster.gpu_node(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    gpus.into_iter().find(|gpu| gpu["index"] == index).with_context(|| format!("{NODE} reports no GPU {index}"))
}

/// Waits until a GPU has this health class. An empty class means that the GPU is healthy.
pub(crate) fn wait_for_health(cluster: &Cluster, index: u64, class: &str) -> Result<()> {
    wait_until(&format!("GPU {index} has health class {class:?}"), || {
        let health = gpu_status(cluster, index)?["health"].clone();
        ensure!(text(&health["class"]) == class, "{health}");
        Ok(true)
    })
}

/// Creates a pod with ten shares, and checks that the pod runs on a GPU other than `unhealthy`.
fn check_runs_elsewhere(cluster: &Cluster, scope: &Scope, name: &str, unhealthy: u64) -> Result<()> {
    scope.create_pod_on_node(NODE, name, &json!({SHARES_RESOURCE: 10}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running(name)?;
    let unhealthy = text(&gpu_status(cluster, unhealthy)?["uuid"]);
    let report = scope.client_report(name)?;
    ensure!(text(&report["uuid"]) != unhealthy, "{name} is on the unhealthy GPU");
    scope.delete_pod(name, 0)
}

#[test]
fn xids_of_each_class_withdraw_shares_and_recover_as_documented() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "xids")?;
    let repair = RepairGuard::new(&cluster);
    scope.create_pod_on_node(NODE, "stays", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("stays")?;
    let before = container_and_restarts(&cluster, &scope, "stays")?;

    // XID 31 is an error of an application, so all shares remain healthy. The agent handles XID
    // errors in order, so the effect of the second error shows that the agent has also handled the
    // first error.
    repair.faults.simgpu(&["xid", "0", "31"])?;
    repair.faults.simgpu(&["xid", "1", "999"])?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    wait_for_health(&cluster, 1, "Suspect")?;
    let message = text(&gpu_status(&cluster, 1)?["health"]["message"]);
    ensure!(message.contains(&format!("after {} s without another", QUIET_TIME.as_secs())), "{message}");
    wait_for_health(&cluster, 0, "")?;
    // Each additional XID error restarts the quiet time.
    repair.faults.simgpu(&["xid", "1", "999"])?;
    check_runs_elsewhere(&cluster, &scope, "beside-suspect", 1)?;

    let quiet = Instant::now();
    repair.faults.simgpu(&["xid", "1", "999"])?;
    repair.faults.simgpu(&["xid", "2", "48"])?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 2))?;
    wait_for_health(&cluster, 2, "NeedsReset")?;
    check_runs_elsewhere(&cluster, &scope, "beside-unhealthy", 2)?;

    // GPU 1 recovers after the quiet time, if NVML answers.
    wait_for_health(&cluster, 1, "")?;
    ensure!(quiet.elapsed() >= QUIET_TIME, "GPU 1 was healthy again after {:?}", quiet.elapsed());
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    wait_for_health(&cluster, 2, "NeedsReset")?;
    ensure!(before == container_and_restarts(&cluster, &scope, "stays")?, "a running pod was disturbed");
    Ok(())
}

#[test]
fn a_restart_of_the_agent_keeps_faults_and_uncordon_clears_them() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "heals")?;
    let repair = RepairGuard::new(&cluster);
    repair.faults.simgpu(&["xid", "3", "119"])?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    wait_for_health(&cluster, 3, "NeedsReset")?;
    let old = find_pid(NODE, "cleave-agent")?;
    signal_program(NODE, "cleave-agent", "KILL")?;
    wait_until("another agent runs", || Ok(find_pid(NODE, "cleave-agent").is_ok_and(|pid| pid != old)))?;
    // The agent registers for NVML's events before it is ready. NVML does not report XID errors
    // from before the registration.
    wait_until_agent_serves(&cluster)?;
    repair.faults.simgpu(&["xid", "1", "48"])?;
    wait_for_health(&cluster, 1, "NeedsReset")?;
    wait_for_health(&cluster, 3, "NeedsReset")?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 2))?;
    run_program(&cleave_path(), &["uncordon", NODE, "3"])?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    wait_for_health(&cluster, 1, "NeedsReset")?;
    run_program(&cleave_path(), &["uncordon", NODE, "1"])?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    drop(scope);
    Ok(())
}

#[test]
fn one_lost_gpu_fails_no_pod_on_another_gpu_and_recovers_by_itself() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "lost")?;
    let repair = RepairGuard::new(&cluster);
    repair.faults.simgpu(&["lose", "1"])?;
    repair.faults.simgpu(&["xid", "1", "79"])?;
    wait_for_health(&cluster, 1, "Lost")?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    for (at, shares) in [10, 1, 5, 3].into_iter().enumerate() {
        let name = format!("p{at}");
        scope.create_pod_on_node(NODE, &name, &json!({SHARES_RESOURCE: shares}), HOLD_CLIENT_SCRIPT)?;
        // This wait fails if the pod fails.
        scope.wait_until_running(&name)?;
    }
    wait_for_health(&cluster, 1, "Lost")?;
    repair.faults.simgpu(&["restore", "1"])?;
    wait_for_health(&cluster, 1, "")?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    Ok(())
}

#[test]
fn a_gpu_that_is_taken_out_is_missing_until_an_administrator_forgets_it() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "forget")?;
    let repair = RepairGuard::new(&cluster);
    let uuid = text(&gpu_status(&cluster, 2)?["uuid"]);
    let forget = || run_program(&cleave_path(), &["forget", NODE, &uuid]);
    let refused = format!("{:#}", forget().err().context("a listed GPU was forgotten")?);
    ensure!(refused.contains("is not missing"), "{refused}");

    repair.faults.simgpu(&["remove", "2"])?;
    let present = || -> Result<Value> {
        let node = cluster.gpu_node(NODE)?;
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.into_iter().find(|condition| condition["type"] == "GpusPresent").context("no condition GpusPresent")
    };
    wait_until("the GPU is missing", || {
        let present = present()?;
        ensure!(present["status"] == "False" && present["reason"] == "GpuMissing", "{present}");
        Ok(true)
    })?;
    let gpus = || -> Result<Vec<Value>> {
        Ok(cluster.gpu_node(NODE)?["status"]["gpus"].as_array().cloned().unwrap_or_default())
    };
    let row = gpus()?.into_iter().find(|gpu| gpu["uuid"] == *uuid).context("the missing GPU has no row")?;
    ensure!(row["health"]["reason"] == "GpuMissing", "{}", row["health"]);
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    scope.create_pod_on_node(NODE, "beside-missing", &json!({SHARES_RESOURCE: 10}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("beside-missing")?;

    let printed = forget()?;
    ensure!(printed.contains("is forgotten"), "{printed}");
    wait_until("all GPUs are present", || Ok(present()?["status"] == "True"))?;
    ensure!(gpus()?.iter().all(|gpu: &Value| gpu["uuid"] != *uuid), "the forgotten GPU has a row");
    repair.faults.simgpu(&["restore", "2"])?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    Ok(())
}

/// Time for which one GPU hangs while the test watches the other GPUs. This time is longer than the
/// deadline of NVML calls, and the agent checks the GPUs' health several times after the deadline.
const HANG_DURATION: Duration = Duration::from_secs(40);

#[test]
fn only_a_hanging_gpu_is_unreachable_and_it_recovers_by_itself() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "hangs")?;
    let repair = RepairGuard::new(&cluster);
    scope.create_pod_on_node(NODE, "stays", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("stays")?;
    let before = container_and_restarts(&cluster, &scope, "stays")?;
    let uuid = text(&gpu_status(&cluster, 3)?["uuid"]);

    repair.faults.simgpu(&["hang", "nvmlDeviceGetMemoryInfo*", "--gpu", "3"])?;
    let begun = Instant::now();
    // The test checks this condition repeatedly while the GPU hangs.
    let violation = || {
        let advertised = cluster.allocatable(NODE, SHARES_RESOURCE)?;
        if advertised < 10 * (GPUS_PER_NODE - 1) {
            return Ok(Some(format!("{NODE} advertises {advertised} {SHARES_RESOURCE}")));
        }
        let others = gpus_without_ten_shares(&cluster, |gpu| gpu["index"] != 3)?;
        Ok((!others.is_empty()).then(|| format!("other GPUs: {others:?}")))
    };
    let unreachable = || {
        let health = gpu_status(&cluster, 3)?["health"].clone();
        Ok(text(&health["reason"]) == "GpuUnreachable" && text(&health["class"]) == "Lost")
    };
    wait_without_violation("GPU 3 is unreachable", unreachable, violation)?;
    let message = text(&gpu_status(&cluster, 3)?["health"]["message"]);
    ensure!(message.contains("NVML did not answer for"), "{message}");
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;

    scope.create_pod_on_node(NODE, "new", &json!({SHARES_RESOURCE: 5}), HOLD_CLIENT_SCRIPT)?;
    // This wait fails if the pod fails.
    scope.wait_until_running("new")?;
    ensure!(text(&scope.client_report("new")?["uuid"]) != uuid, "the new pod is on the GPU that hangs");
    wait_without_violation(
        "the hang has lasted",
        || Ok(begun.elapsed() >= HANG_DURATION && unreachable()?),
        violation,
    )?;
    // The agent must still receive XID errors of other GPUs.
    repair.faults.simgpu(&["xid", "2", "48"])?;
    wait_for_health(&cluster, 2, "NeedsReset")?;
    run_program(&cleave_path(), &["uncordon", NODE, "2"])?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;

    repair.faults.simgpu(&["clear"])?;
    wait_for_health(&cluster, 3, "")?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    ensure!(before == container_and_restarts(&cluster, &scope, "stays")?, "a running pod was disturbed");
    Ok(())
}

#[test]
fn a_cordoned_gpu_gets_no_new_pod_a_drain_empties_it_and_uncordon_makes_it_schedulable() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "cordon")?;
    let _repair = RepairGuard::new(&cluster);
    scope.create_pod_on_node(NODE, "holder", &json!({SHARES_RESOURCE: 3}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("holder")?;
    wait_until("the node reports the allocation", || Ok(!allocations(&cluster, &scope, "holder")?.is_empty()))?;
    let device = text(&allocations(&cluster, &scope, "holder")?[0]["device"]);
    let before = container_and_restarts(&cluster, &scope, "holder")?;
    let daemons = daemon_pids(&cluster)?;

    let printed = run_program(&cleave_path(), &["cordon", NODE, &device, "--reason", "new fan"])?;
    ensure!(printed.contains("is cordoned"), "{printed}");
    ensure!(run_program(&cleave_path(), &["cordon", NODE, &device])?.contains("already"));
    // Shares in use on the cordoned GPU must still count as allocatable.
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1) + 3)?;
    let index = gpu_index(&cluster, &device)?;
    for name in ["one", "two"] {
        check_runs_elsewhere(&cluster, &scope, name, index)?;
    }
    ensure!(before == container_and_restarts(&cluster, &scope, "holder")?, "a running pod was disturbed");
    ensure!(daemons == daemon_pids(&cluster)?, "an MPS daemon was restarted");
    let status = run_program(&cleave_path(), &["status"])?;
    ensure!(status.contains("Healthy,Cordoned") && status.contains("is cordoned: new fan"), "{status}");
    // The four pods request more shares than the other GPUs have. One pod must wait, and `explain`
    // must report the reason.
    for name in ["a", "b", "c"] {
        scope.create_pod_on_node(NODE, name, &json!({SHARES_RESOURCE: 10}), HOLD_CLIENT_SCRIPT)?;
        scope.wait_until_running(name)?;
    }
    scope.create_pod_on_node(NODE, "d", &json!({SHARES_RESOURCE: 5}), HOLD_CLIENT_SCRIPT)?;
    let explained = run_program(&cleave_path(), &["explain", "pod", &format!("{}/d", scope.namespace)])?;
    ensure!(explained.contains("cordoned: new fan"), "{explained}");

    let refused = program_output(&cleave_path(), &["drain", NODE, &device])?;
    ensure!(!refused.status.success(), "a pod without a controller was evicted");
    let drained = run_program(&cleave_path(), &["drain", NODE, &device, "--force", "--grace", "1", "--timeout", "80"])?;
    ensure!(drained.contains("is free"), "{drained}");
    ensure!(gpu_status(&cluster, index)?["allocations"] == json!([]), "the drained GPU has allocations");
    wait_until("the evicted pod no longer exists", || {
        let pod = cluster.find(&scope.pod_path("holder"))?;
        Ok(pod.is_none_or(|pod| matches!(text(&pod["status"]["phase"]).as_str(), "Failed" | "Succeeded")))
    })?;
    run_program(&cleave_path(), &["uncordon", NODE, &device])?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    let unknown = program_output(&cleave_path(), &["cordon", NODE, "77"])?;
    let stderr = String::from_utf8_lossy(&unknown.stderr).into_owned();
    ensure!(!unknown.status.success() && stderr.contains("has no GPU \"77\""), "{stderr}");
    Ok(())
}

fn gpu_index(cluster: &Cluster, uuid: &str) -> Result<u64> {
    let node = cluster.gpu_node(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let found = gpus.iter().find(|gpu| text(&gpu["uuid"]) == uuid).and_then(|gpu| gpu["index"].as_u64());
    found.with_context(|| format!("{NODE} reports no GPU {uuid}"))
}

/// Configures the operator to taint nodes on which all GPUs are unhealthy. Dropping this value
/// reverts the configuration and removes the taint.
struct TaintUnhealthyNodes(#[expect(dead_code, reason = "dropped with this value")] ChartSetting);

impl TaintUnhealthyNodes {
    fn enable() -> Result<Self> {
        Ok(Self(ChartSetting::change("operator.taintUnhealthyNodes", true)?))
    }
}

impl Drop for TaintUnhealthyNodes {
    fn drop(&mut self) {
        // Remove the taint here, because the operator might remove it only after the next test has
        // started.
        let _ = kubectl(&["taint", "node", NODE, "cleave.dev/unhealthy-"]);
    }
}

fn read_taints(cluster: &Cluster) -> Result<Vec<String>> {
    let node = cluster.get(&format!("/api/v1/nodes/{NODE}"))?;
    let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
    Ok(taints.iter().map(|taint| format!("{}:{}", text(&taint["key"]), text(&taint["effect"]))).collect())
}

#[test]
fn a_node_without_a_healthy_gpu_is_tainted_if_enabled_and_other_taints_stay() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _scope = ten_shares(&cluster, "taints")?;
    let other = ["taint", "node", NODE, "e2e.cleave.dev/other=x:PreferNoSchedule", "--overwrite"];
    let tainting = TaintUnhealthyNodes::enable()?;
    let repair = RepairGuard::new(&cluster);
    kubectl(&other)?;
    for index in 0..GPUS_PER_NODE {
        ensure!(read_taints(&cluster)? == ["e2e.cleave.dev/other:PreferNoSchedule"], "{:?}", read_taints(&cluster)?);
        repair.faults.simgpu(&["xid", &index.to_string(), "48"])?;
        wait_for_health(&cluster, index, "NeedsReset")?;
    }
    wait_until("the node is tainted", || {
        Ok(read_taints(&cluster)? == ["e2e.cleave.dev/other:PreferNoSchedule", "cleave.dev/unhealthy:NoSchedule"])
    })?;
    run_program(&cleave_path(), &["uncordon", NODE, "0"])?;
    wait_for_health(&cluster, 0, "")?;
    wait_until("the node is not tainted", || Ok(read_taints(&cluster)? == ["e2e.cleave.dev/other:PreferNoSchedule"]))?;
    kubectl(&["taint", "node", NODE, "e2e.cleave.dev/other-"])?;
    drop(repair);
    drop(tainting);
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)
}
