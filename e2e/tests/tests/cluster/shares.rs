//! Tests that a pod with `nvidia.com/gpu-mps: N` receives N shares of one GPU and the limits of N
//! shares, and that a tenant cannot increase the limits or administer MPS.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, pod, text, wait_until};
use cleave_plan::mps::{self, Threads};
use cleave_plan::units::{Mebibytes, Sms};
use serde_json::json;

use crate::gate::wait_for_event;
use crate::{HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, SMS_PER_GPU, allocations, ten_shares};

/// Upper bound of the memory of a CUDA context, in MiB. The free memory that a client reports is
/// its limit minus the memory of its context.
const MAX_CONTEXT_MIB: u64 = 600;

/// Returns the limits of `shares` of ten shares of a GPU with `total` MiB of memory.
pub(crate) fn limits_of_shares(shares: u32, total: u64) -> (Sms, Mebibytes) {
    let threads = mps::thread_percentage(shares, 10, Threads::Strict);
    (mps::usable_sms(threads, Sms(SMS_PER_GPU)), mps::memory_limit(shares, 10, Mebibytes(total)))
}

#[test]
fn each_pod_sees_its_shares_of_one_gpu() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "shares")?;
    let total =
        cluster.gpu_node(NODE)?["status"]["gpus"][0]["memoryMib"].as_u64().context("no memory in the status")?;
    let sizes = [1, 2, 3, 5];
    for shares in sizes {
        scope.create_pod(&format!("p{shares}"), &json!({SHARES_RESOURCE: shares}), HOLD_CLIENT_SCRIPT)?;
    }
    for shares in sizes {
        let name = format!("p{shares}");
        scope.wait_until_running(&name)?;
        let report = scope.client_report(&name)?;
        let (sms, memory) = limits_of_shares(shares, total);
        ensure!(report["viaMps"] == true && report["sms"] == sms.0, "{name} reports {report}, expected {sms}");
        let free = report["freeMiB"].as_u64().context("no freeMiB")?;
        ensure!(
            free <= memory.0 && free + MAX_CONTEXT_MIB >= memory.0,
            "{name} reports {free} MiB, expected {memory} less a context"
        );
        wait_until(&format!("the node reports the allocation of {name}"), || {
            Ok(!allocations(&cluster, &scope, &name)?.is_empty())
        })?;
        let allocated = allocations(&cluster, &scope, &name)?;
        ensure!(allocated.len() == 1, "{name} is on several GPUs: {allocated:?}");
        let ids = allocated[0]["ids"].as_array().map_or(0, Vec::len);
        ensure!(
            ids == shares as usize && allocated[0]["sms"] == sms.0 && allocated[0]["memoryMib"] == memory.0,
            "{name} has the allocation {}",
            allocated[0]
        );
        ensure!(
            text(&report["uuid"]) == text(&allocated[0]["device"]),
            "the GPU that {name} reports is not the GPU of its shares"
        );
    }
    Ok(())
}

#[test]
fn a_tenant_sees_only_its_door_and_cannot_administer_or_raise_its_limits() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "door")?;
    scope.create_pod("three", &json!({SHARES_RESOURCE: 3}), "sleep infinity")?;
    scope.wait_until_running("three")?;
    let shell = |script: &str| scope.exec_in_pod("three", &["sh", "-c", script]);
    let listed = shell("ls -A \"$CUDA_MPS_PIPE_DIRECTORY\"")?;
    ensure!(listed.trim() == "control", "the directory has {listed:?}");
    let write = shell("touch \"$CUDA_MPS_PIPE_DIRECTORY\"/x 2>&1 || true")?;
    ensure!(write.contains("Read-only"), "the directory is writable: {write:?}");
    for command in ["set_default_active_thread_percentage 100", "get_server_list", "terminate_client 1 1", "quit"] {
        let refused = shell(&format!("cleave-client --admin '{command}'"));
        ensure!(refused.is_err(), "{command} was answered: {refused:?}");
    }
    let (sms, memory) = limits_of_shares(3, 1 << 40);
    let raised =
        shell("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1000G cleave-client --once")?;
    let raised: serde_json::Value = serde_json::from_str(raised.trim())?;
    ensure!(raised["sms"] == sms.0, "with raised limits the client reports {raised}");
    ensure!(
        raised["freeMiB"].as_u64().is_some_and(|free| free < memory.0),
        "with raised limits the client reports {raised}"
    );
    let lowered: serde_json::Value =
        serde_json::from_str(shell("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10 cleave-client --once")?.trim())?;
    ensure!(lowered["sms"] == limits_of_shares(1, 1).0.0, "with lowered limits the client reports {lowered}");
    // The daemons must still serve after these attempts.
    let after: serde_json::Value = serde_json::from_str(shell("cleave-client --once")?.trim())?;
    ensure!(after["sms"] == sms.0 && after["viaMps"] == true, "afterwards the client reports {after}");
    Ok(())
}

#[test]
fn a_user_other_than_root_can_use_shares() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "users")?;
    let mut plain = pod("plain", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT);
    plain["spec"]["securityContext"] = json!({"runAsUser": 1000, "runAsGroup": 1000});
    scope.create_pod("root", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &plain)?;
    ensure!(scope.client_report("root")?["sms"] == limits_of_shares(1, 1).0.0);
    let report = scope.client_report("plain")?;
    ensure!(
        report["sms"] == limits_of_shares(2, 1).0.0 && report["viaMps"] == true,
        "as uid 1000 the client reports {report}"
    );
    Ok(())
}

#[test]
fn all_shares_of_a_node_can_be_used_and_reused() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "full")?;
    for index in 0..8 {
        scope.create_pod(&format!("five-{index}"), &json!({SHARES_RESOURCE: 5}), HOLD_CLIENT_SCRIPT)?;
    }
    for index in 0..8 {
        scope.wait_until_running(&format!("five-{index}"))?;
    }
    scope.create_pod("late", &json!({SHARES_RESOURCE: 5}), HOLD_CLIENT_SCRIPT)?;
    wait_for_event(&scope, "late", "no device has 5 nvidia.com/gpu-mps free")?;
    scope.delete_pod("five-3", 0)?;
    scope.wait_until_running("late")?;
    ensure!(scope.client_report("late")?["sms"] == limits_of_shares(5, 1).0.0);
    for name in scope.pods()?.iter().map(|pod| text(&pod["metadata"]["name"])) {
        wait_until(&format!("the node reports the allocation of {name}"), || {
            Ok(!allocations(&cluster, &scope, &name)?.is_empty())
        })?;
        ensure!(allocations(&cluster, &scope, &name)?.len() == 1, "{name} is on several GPUs");
    }
    Ok(())
}

#[test]
fn the_node_refuses_a_pod_that_bypassed_the_gate_and_fits_no_gpu() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "toomany")?;
    let bypass = json!({"metadata": {"labels": {"cleave.dev/allow": "placement"}}});
    cluster.patch(&format!("/api/v1/namespaces/{}", scope.namespace), &bypass)?;
    wait_until("pods of the namespace are not gated", || {
        let pod = scope.create_pod("eleven", &json!({SHARES_RESOURCE: 11}), HOLD_CLIENT_SCRIPT)?;
        let gated = pod["spec"]["schedulingGates"].is_array();
        if gated {
            scope.delete_pod("eleven", 0)?;
        }
        Ok(!gated)
    })?;
    wait_until("the pod's status contains the reason for the rejection", || {
        let status = cluster.get(&scope.pod_path("eleven"))?["status"].clone();
        Ok(text(&status["reason"]) == "UnexpectedAdmissionError" && text(&status["message"]).contains("no single GPU"))
    })
}
