//! MPS daemons that die: clients wait at the door, none runs unlimited, and the node tells.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Faults, on_node, text, wait_until};
use serde_json::json;

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
    let status: serde_json::Value = serde_json::from_str(&on_node(NODE, &["cat", "/run/cleave/mps/status.json"])?)?;
    Ok(status["allocations"].as_object().is_some_and(|all| all.values().any(|door| door["waiting"].as_u64() > Some(0))))
}
