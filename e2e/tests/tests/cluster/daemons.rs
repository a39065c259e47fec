//! Tests failures of MPS daemons. Clients and pods must wait for the restarted daemon, no client
//! may run without limits, no pod may be refused, and the node must report the failure.
use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, Faults, SYSTEM_NAMESPACE, Scope, WAIT_TIMEOUT, on_node, text, wait_for, wait_until, wait_without_violation,
};
use serde_json::{Value, json};

use crate::restarts::{component_pod, is_ready};
use crate::{
    GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, allocations, daemon_pids, ten_shares,
    wait_until_advertised,
};

#[test]
fn a_killed_daemon_restarts_with_its_limits_and_clients_wait_for_it() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "daemon")?;
    scope.create_pod("two", &json!({SHARES_RESOURCE: 2}), "sleep infinity")?;
    scope.wait_until_running("two")?;
    wait_until("the node reports the allocation", || Ok(!allocations(&cluster, &scope, "two")?.is_empty()))?;
    let device = text(&allocations(&cluster, &scope, "two")?[0]["device"]);
    let (_, daemon) = daemon_pids(&cluster)?.into_iter().find(|(of, _)| *of == device).context("no daemon for it")?;
    let events_before = mps_event_versions(&cluster, &device)?;
    // The daemon cannot start until this fault is cleared, so new clients have to wait.
    let faults = Faults::on_node(NODE);
    faults.simgpu(&["fail", "mps:start", "--gpu", &device])?;
    on_node(NODE, &["kill", "-9", &daemon.to_string()])?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    scope.exec_in_pod("two", &["sh", "-c", "cleave-client --once >/report 2>&1 & echo started"])?;
    wait_until("the client waits at the door", || {
        ensure!(scope.exec_in_pod("two", &["cat", "/report"])?.is_empty(), "the client ran without a daemon");
        is_client_waiting()
    })?;
    drop(faults);
    wait_until("the client runs", || Ok(!scope.exec_in_pod("two", &["cat", "/report"])?.trim().is_empty()))?;
    let report: serde_json::Value = serde_json::from_str(scope.exec_in_pod("two", &["cat", "/report"])?.trim())?;
    ensure!(report["viaMps"] == true && report["sms"] == 26, "the client reports {report}");
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    wait_until("an Event reports that the daemon does not serve", || {
        Ok(mps_event_versions(&cluster, &device)?.difference(&events_before).next().is_some())
    })?;
    scope.create_pod("next", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    ensure!(scope.client_report("next")?["sms"] == 12);
    Ok(())
}

/// Returns the resource versions of the Events about the MPS daemon of a device. If an Event is
/// repeated, its version changes.
fn mps_event_versions(cluster: &Cluster, device: &str) -> Result<BTreeSet<String>> {
    let events = cluster.list("/api/v1/events")?;
    let of_device = events
        .iter()
        .filter(|event| text(&event["reason"]).starts_with("Mps") && text(&event["message"]).contains(device));
    Ok(of_device.map(|event| text(&event["metadata"]["resourceVersion"])).collect())
}

/// Returns whether a client waits at a door (the socket through which a pod's clients reach MPS).
fn is_client_waiting() -> Result<bool> {
    let status = mps_host_status()?;
    Ok(status["allocations"].as_object().is_some_and(|all| all.values().any(|door| door["waiting"].as_u64() > Some(0))))
}

/// Reads the status file of the MPS host on [`NODE`].
fn mps_host_status() -> Result<Value> {
    Ok(serde_json::from_str(&on_node(NODE, &["cat", "/run/cleave/mps/status.json"])?)?)
}

/// Reads one field of the status of each MPS daemon on [`NODE`]. Returns each value with the
/// daemon's device.
fn read_daemon_fields(field: &str) -> Result<Vec<(String, Value)>> {
    let daemons = mps_host_status()?["daemons"].as_object().cloned().unwrap_or_default();
    Ok(daemons.into_iter().map(|(device, daemon)| (device, daemon[field].clone())).collect())
}

/// Creates six pods with shares, and returns their names.
fn create_pods(scope: &Scope) -> Result<Vec<String>> {
    let names: Vec<String> = (0..6).map(|number| format!("comes-{number}")).collect();
    names.iter().try_for_each(|name| {
        scope.create_pod_on_node(NODE, name, &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT).map(drop)
    })?;
    Ok(names)
}

/// Describes the state of a failed pod. Returns `None` if no pod has failed.
fn describe_failed_pod(scope: &Scope) -> Result<Option<String>> {
    let pods = scope.pods()?;
    let failed = pods.iter().find(|pod| pod["status"]["phase"] == "Failed");
    Ok(failed.map(|pod| format!("{} failed: {}", text(&pod["metadata"]["name"]), pod["status"])))
}

/// Checks that all pods run with the limits of their shares, and deletes the pods.
fn check_limits_and_delete(scope: &Scope, names: &[String]) -> Result<()> {
    for name in names {
        scope.wait_until_running(name)?;
        let report = scope.client_report(name)?;
        ensure!(report["viaMps"] == true && report["sms"] == 12, "{name} reports {report}");
    }
    names.iter().try_for_each(|name| scope.delete_pod(name, 0))
}

#[test]
fn pods_created_while_daemons_or_servers_restart_wait_and_are_not_refused() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "away")?;
    for (field, late) in [("pid", "mps:start"), ("serverPid", "mps:server")] {
        // The daemon may still be replacing the MPS server of an earlier pod.
        let before = wait_for(&format!("each daemon has a {field}"), WAIT_TIMEOUT, || {
            let pids = read_daemon_fields(field)?;
            Ok((pids.len() as u64 == GPUS_PER_NODE && pids.iter().all(|(_, pid)| pid.is_u64())).then_some(pids))
        })?;
        let faults = Faults::on_node(NODE);
        faults.simgpu(&["hang", late, "--seconds", "1"])?;
        let pids: Vec<String> = before.iter().map(|(_, pid)| pid.to_string()).collect();
        let mut kill = vec!["sh", "-c", "kill -9 \"$@\"; true", "sh"];
        kill.extend(pids.iter().map(String::as_str));
        on_node(NODE, &kill)?;
        let names = create_pods(&scope)?;
        wait_without_violation(
            &format!("all daemons serve with another {field}"),
            || {
                let now = read_daemon_fields(field)?;
                let other = |device: usize| now[device].1.is_u64() && now[device] != before[device];
                let others = now.len() == before.len() && (0..now.len()).all(other);
                Ok(others && read_daemon_fields("state")?.iter().all(|(_, state)| state == "Active"))
            },
            || {
                let gpus = cluster.gpu_node(NODE)?["status"]["gpus"].as_array().cloned().unwrap_or_default();
                let slices = gpus.iter().flat_map(|gpu| gpu["slices"].as_array().cloned().unwrap_or_default());
                let unhealthy: u64 = slices.filter_map(|slice| slice["unhealthy"].as_u64()).sum();
                let violation = (unhealthy > 0).then(|| format!("{unhealthy} shares were reported as unhealthy"));
                Ok(violation.or(describe_failed_pod(&scope)?))
            },
        )?;
        check_limits_and_delete(&scope, &names)?;
        drop(faults);
    }
    Ok(())
}

#[test]
fn pods_created_while_the_mps_host_is_replaced_wait_and_are_not_refused() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "replaced")?;
    let name = |pod: &Value| text(&pod["metadata"]["name"]);
    let old = name(&component_pod(&cluster, "mps-host")?);
    cluster.delete(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{old}"), None)?;
    let names = create_pods(&scope)?;
    wait_without_violation(
        "the new MPS host is ready",
        || Ok(component_pod(&cluster, "mps-host").is_ok_and(|pod| name(&pod) != old && is_ready(&pod))),
        || describe_failed_pod(&scope),
    )?;
    check_limits_and_delete(&scope, &names)
}
