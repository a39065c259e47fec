//! MPS daemons that die: clients and pods wait for the next, no client runs unlimited, no pod is
//! refused, and the node tells.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Faults, PATIENCE, SYSTEM, Scope, hold_until, on_node, text, wait_for, wait_until};
use serde_json::{Value, json};

use crate::restarts::{part, ready};
use crate::{GPUS, HOLD, NODE, SHARES, allocations, daemon_pids, offers, ten_shares};

#[test]
fn a_killed_daemon_comes_back_with_its_limits_and_clients_wait_for_it() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "daemon")?;
    scope.pod("two", &json!({SHARES: 2}), "sleep infinity")?;
    scope.running("two")?;
    wait_until("the node tells who holds the shares", || Ok(!allocations(&cluster, &scope, "two")?.is_empty()))?;
    let device = text(&allocations(&cluster, &scope, "two")?[0]["device"]);
    let (_, daemon) = daemon_pids(&cluster)?.into_iter().find(|(of, _)| *of == device).context("no daemon for it")?;
    // The daemon cannot come back until this is cleared: what starts meanwhile has to wait.
    let faults = Faults::on(NODE);
    faults.simgpu(&["fail", "mps:start", "--gpu", &device])?;
    on_node(NODE, &["kill", "-9", &daemon.to_string()])?;
    offers(&cluster, SHARES, 10 * (GPUS - 1))?;
    scope.exec("two", &["sh", "-c", "cleave-client --once >/seen 2>&1 & echo started"])?;
    wait_until("the client waits at the door", || {
        ensure!(scope.exec("two", &["cat", "/seen"])?.is_empty(), "it ran without a daemon");
        waiting()
    })?;
    drop(faults);
    wait_until("the client runs", || Ok(!scope.exec("two", &["cat", "/seen"])?.trim().is_empty()))?;
    let seen: serde_json::Value = serde_json::from_str(scope.exec("two", &["cat", "/seen"])?.trim())?;
    ensure!(seen["viaMps"] == true && seen["sms"] == 26, "it sees {seen}");
    offers(&cluster, SHARES, 10 * GPUS)?;
    wait_until("an Event says it", || {
        let events = cluster.list("/api/v1/events")?;
        Ok(events
            .iter()
            .any(|event| text(&event["reason"]).starts_with("Mps") && text(&event["message"]).contains(&device)))
    })?;
    scope.pod("next", &json!({SHARES: 1}), HOLD)?;
    ensure!(scope.seen("next")?["sms"] == 12);
    Ok(())
}

/// Whether a client waits at a door.
fn waiting() -> Result<bool> {
    let status = host_status()?;
    Ok(status["allocations"].as_object().is_some_and(|all| all.values().any(|door| door["waiting"].as_u64() > Some(0))))
}

/// What the MPS host of [`NODE`] says.
fn host_status() -> Result<Value> {
    Ok(serde_json::from_str(&on_node(NODE, &["cat", "/run/cleave/mps/status.json"])?)?)
}

/// A field of all daemons of [`NODE`], by device.
fn of_daemons(field: &str) -> Result<Vec<(String, Value)>> {
    let daemons = host_status()?["daemons"].as_object().cloned().unwrap_or_default();
    Ok(daemons.into_iter().map(|(device, daemon)| (device, daemon[field].clone())).collect())
}

/// Pods that come just now, by name.
fn come(scope: &Scope) -> Result<Vec<String>> {
    let names: Vec<String> = (0..6).map(|number| format!("comes-{number}")).collect();
    names.iter().try_for_each(|name| scope.pod_on(NODE, name, &json!({SHARES: 1}), HOLD).map(drop))?;
    Ok(names)
}

/// The first pod that has failed, and why.
fn failed(scope: &Scope) -> Result<Option<String>> {
    let pods = scope.pods()?;
    let failed = pods.iter().find(|pod| pod["status"]["phase"] == "Failed");
    Ok(failed.map(|pod| format!("{} failed: {}", text(&pod["metadata"]["name"]), pod["status"])))
}

/// They all run, each within its share; then they go.
fn all_run(scope: &Scope, names: &[String]) -> Result<()> {
    for name in names {
        scope.running(name)?;
        let seen = scope.seen(name)?;
        ensure!(seen["viaMps"] == true && seen["sms"] == 12, "{name} sees {seen}");
    }
    names.iter().try_for_each(|name| scope.delete_pod(name, 0))
}

#[test]
fn pods_that_come_while_daemons_or_servers_are_started_again_wait_and_none_is_refused() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "away")?;
    for (field, late) in [("pid", "mps:start"), ("serverPid", "mps:server")] {
        // A server that a pod of before has left open is just being replaced.
        let before = wait_for(&format!("each daemon has a {field}"), PATIENCE, || {
            let of = of_daemons(field)?;
            Ok((of.len() as u64 == GPUS && of.iter().all(|(_, pid)| pid.is_u64())).then_some(of))
        })?;
        let faults = Faults::on(NODE);
        faults.simgpu(&["hang", late, "--seconds", "2"])?;
        let pids: Vec<String> = before.iter().map(|(_, pid)| pid.to_string()).collect();
        let mut kill = vec!["sh", "-c", "kill -9 \"$@\"; true", "sh"];
        kill.extend(pids.iter().map(String::as_str));
        on_node(NODE, &kill)?;
        let names = come(&scope)?;
        hold_until(
            &format!("all serve again with another {field}"),
            || {
                let now = of_daemons(field)?;
                let other = |device: usize| now[device].1.is_u64() && now[device] != before[device];
                let others = now.len() == before.len() && (0..now.len()).all(other);
                Ok(others && of_daemons("state")?.iter().all(|(_, state)| state == "Active"))
            },
            || {
                let gpus = cluster.gpunode(NODE)?["status"]["gpus"].as_array().cloned().unwrap_or_default();
                let slices = gpus.iter().flat_map(|gpu| gpu["slices"].as_array().cloned().unwrap_or_default());
                let unhealthy: u64 = slices.filter_map(|slice| slice["unhealthy"].as_u64()).sum();
                let told = (unhealthy > 0).then(|| format!("{unhealthy} shares were told as unhealthy"));
                Ok(told.or(failed(&scope)?))
            },
        )?;
        all_run(&scope, &names)?;
        drop(faults);
    }
    Ok(())
}

#[test]
fn pods_that_come_while_the_mps_hosts_pod_is_replaced_wait_and_none_is_refused() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "replaced")?;
    let name = |pod: &Value| text(&pod["metadata"]["name"]);
    let old = name(&part(&cluster, "mps-host")?);
    cluster.delete(&format!("/api/v1/namespaces/{SYSTEM}/pods/{old}"), None)?;
    let names = come(&scope)?;
    hold_until(
        "another MPS host is there",
        || Ok(part(&cluster, "mps-host").is_ok_and(|pod| name(&pod) != old && ready(&pod))),
        || failed(&scope),
    )?;
    all_run(&scope, &names)
}
