//! The time of day is set under Cleave's programs, an hour ahead, an hour back and right again,
//! while the machine's clock and everybody else's stay as they are.
//!
//! The programs ask through `libsim_clock.so` (e2e/sim/clock), which is in the image of the local
//! cluster. An hour is as far back as can be gone: the API server's certificate is good from an
//! hour before the cluster was made.
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, SYSTEM, Scope, given_out_wrongly, kubectl, on_node, pod, process, run, staying, text, wait_until,
};
use serde_json::{Value, json};

use crate::gate::is_gated;
use crate::health::{Mended, cleave, gpu, health};
use crate::restarts::{part, ready};
use crate::{GPUS, HOLD, NODE, SHARES, allocations, daemon_pids, offers, ten_shares, undisturbed};

const LIBRARY: &str = "/usr/lib/libsim_clock.so";
const PARTS: [&str; 3] = ["daemonset/cleave-agent", "daemonset/cleave-mps-host", "deployment/cleave-operator"];
const HOUR: i64 = 3600;
/// It is not ended by SIGTERM: its grace is its own.
const DEAF: &str = "trap '' TERM; exec cleave-client --hold forever";

/// Cleave's programs ask the clock that the test sets, until the value goes.
struct Clocks<'a> {
    cluster: &'a Cluster,
}

impl<'a> Clocks<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let clocks = Self { cluster };
        clocks.environment(&format!("LD_PRELOAD={LIBRARY}"))?;
        for (node, pid) in clocks.processes()? {
            on_node(&node, &["grep", "-q", LIBRARY, &format!("/proc/{pid}/maps")])
                .with_context(|| format!("process {pid} of {node} asks the machine's clock"))?;
        }
        Ok(clocks)
    }

    /// Changes the environment of all programs, and waits until they have it.
    fn environment(&self, change: &str) -> Result<()> {
        for part in PARTS {
            kubectl(&["-n", SYSTEM, "set", "env", part, change])?;
        }
        // It is replaced when it is deleted, and not before: all MPS daemons go with it.
        kubectl(&["-n", SYSTEM, "delete", "pod", "-l", "app.kubernetes.io/component=mps-host", "--wait"])?;
        for part in [PARTS[0], PARTS[2]] {
            kubectl(&["-n", SYSTEM, "rollout", "status", part, "--timeout=120s"])?;
        }
        wait_until("all of Cleave is ready", || {
            let pods = self.cluster.list(&format!("/api/v1/namespaces/{SYSTEM}/pods"))?;
            let fine = |pod: &Value| pod["metadata"]["deletionTimestamp"].is_null() && ready(pod);
            Ok(pods.len() == 2 * self.cluster.nodes()?.len() + 1 && pods.iter().all(fine))
        })
    }

    /// Nodes and pids of the programs.
    fn processes(&self) -> Result<Vec<(String, String)>> {
        let mut all = Vec::new();
        for node in self.cluster.nodes()? {
            for program in ["cleave-agent", "cleave-mps-host"] {
                all.push((node.clone(), process(&node, program)?));
            }
        }
        let node = text(&part(self.cluster, "operator")?["spec"]["nodeName"]);
        all.push((node.clone(), process(&node, "cleave")?));
        Ok(all)
    }

    /// Sets the time of day of all programs to so many seconds from what it is.
    fn set(&self, seconds: i64) -> Result<()> {
        for (node, pid) in self.processes()? {
            // In place of what is there at once: half a number would be another time.
            let write = "printf '%s' \"$1\" >\"$0.new\" && mv \"$0.new\" \"$0\"";
            let file = format!("/proc/{pid}/root/dev/shm/sim-clock");
            on_node(&node, &["sh", "-c", write, &file, &seconds.to_string()])?;
        }
        Ok(())
    }
}

impl Drop for Clocks<'_> {
    fn drop(&mut self) {
        // The file goes with the pods.
        if let Err(error) = self.environment("LD_PRELOAD-") {
            let _ = writeln!(std::io::stderr(), "Cleave still asks the clock that tests set: {error:#}");
        }
    }
}

/// Who leads, and how often that turned.
fn leases(cluster: &Cluster) -> Result<Vec<Value>> {
    let leases = cluster.list(&format!("/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases"))?;
    let of = |lease: &Value| {
        let spec = &lease["spec"];
        json!([lease["metadata"]["name"], spec["holderIdentity"], spec["leaseTransitions"]])
    };
    Ok(leases.iter().map(of).collect())
}

fn restarts(cluster: &Cluster) -> Result<Vec<Value>> {
    let pods = cluster.list(&format!("/api/v1/namespaces/{SYSTEM}/pods"))?;
    Ok(pods
        .iter()
        .map(|pod| json!([pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]]))
        .collect())
}

/// What must be the same whatever time it is.
fn all_that_stays(clocks: &Clocks, scope: &Scope, pods: &[&str]) -> Result<Value> {
    let cluster = scope.cluster;
    let pods: Vec<_> = pods.iter().map(|name| undisturbed(cluster, scope, name)).collect::<Result<_>>()?;
    Ok(json!([pods, daemon_pids(cluster)?, leases(cluster)?, restarts(cluster)?, clocks.processes()?]))
}

fn clients(scope: &Scope, name: &str) -> Result<u64> {
    Ok(allocations(scope.cluster, scope, name)?.iter().filter_map(|held| held["clients"].as_u64()).sum())
}

fn waits_at_the_gate(scope: &Scope, name: &str) -> Result<()> {
    let pod = scope.cluster.get(&scope.pod_path(name))?;
    ensure!(is_gated(&pod), "{name} was let through to room that is held: {}", pod["spec"]);
    Ok(())
}

#[test]
fn no_jump_of_the_clock_loses_a_share_a_hold_or_a_grace_or_restarts_anything() -> Result<()> {
    const GRACE: u32 = 10;
    let cluster = Cluster::connect()?;
    let clocks = Clocks::new(&cluster)?;
    let scope = ten_shares(&cluster, "clocks")?;
    // GPUs of their own, so that one is left.
    let full = ["a", "b", "c"];
    for name in full {
        scope.pod_on(NODE, name, &json!({SHARES: if name == "a" { 8 } else { 10 }}), HOLD)?;
        scope.running(name)?;
        scope.seen(name)?;
    }
    // Released, and the scheduler finds no node for it: its volume does not exist. Its reservation
    // lasts for minutes.
    let mut held = pod("held", &json!({SHARES: 10}), HOLD);
    held["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
    held["spec"]["volumes"] = json!([{"name": "nobody", "persistentVolumeClaim": {"claimName": "nobody"}}]);
    cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &held)?;
    wait_until("it is let through", || {
        Ok(cluster.get(&scope.pod_path("held"))?["spec"]["schedulingGates"].as_array().is_none_or(Vec::is_empty))
    })?;
    scope.pod_on(NODE, "next", &json!({SHARES: 10}), HOLD)?;
    let before = all_that_stays(&clocks, &scope, &full)?;

    for (at, off) in [HOUR, 0, -HOUR, 0].into_iter().enumerate() {
        let leaving = format!("leaving-{at}");
        let mut object = pod(&leaving, &json!({SHARES: 1}), DEAF);
        object["spec"]["terminationGracePeriodSeconds"] = json!(GRACE);
        object["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
        cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        scope.running(&leaving)?;
        wait_until(&format!("{leaving} has a client"), || Ok(clients(&scope, &leaving)? == 1))?;
        let deleted = Instant::now();
        cluster.delete(&scope.pod_path(&leaving), Some(GRACE))?;
        clocks.set(off)?;
        wait_until("its client is ended", || Ok(clients(&scope, &leaving)? == 0))?;
        let took = deleted.elapsed();
        ensure!(
            took >= Duration::from_secs(6),
            "{leaving} had {took:?} of {GRACE} s where the clock is off by {off} s"
        );
        wait_until(&format!("{leaving} is gone"), || Ok(cluster.find(&scope.pod_path(&leaving))?.is_none()))?;
        // One that comes, is let through and served: operator and agent have looked since.
        let probe = format!("probe-{at}");
        scope.pod_on(NODE, &probe, &json!({SHARES: 2}), HOLD)?;
        scope.running(&probe)?;
        ensure!(scope.seen(&probe)?["sms"] == 26, "{probe} has other limits");
        waits_at_the_gate(&scope, "next")?;
        let wrong = given_out_wrongly(&cluster.gpunode(NODE)?, &staying(&scope.pods()?), Some(10));
        ensure!(wrong.is_empty(), "off by {off} s: {wrong:#?}");
        scope.delete_pod(&probe, 0)?;
        let now = all_that_stays(&clocks, &scope, &full)?;
        ensure!(now == before, "off by {off} s: it was\n{before}\nand is\n{now}");
    }
    scope.delete_pod("held", 0)?;
    scope.running("next")?;
    offers(&cluster, SHARES, 10 * GPUS)
}

#[test]
fn what_is_found_after_an_administrators_word_lasts_though_the_clock_was_set_back() -> Result<()> {
    let cluster = Cluster::connect()?;
    let clocks = Clocks::new(&cluster)?;
    let scope = ten_shares(&cluster, "clocks-health")?;
    let mended = Mended::new(&cluster);
    clocks.set(HOUR)?;
    mended.faults.simgpu(&["xid", "3", "48"])?;
    health(&cluster, 3, "NeedsReset")?;
    let ahead = text(&gpu(&cluster, 3)?["health"]["last"]);
    run(&cleave(), &["uncordon", NODE, "3"])?;
    health(&cluster, 3, "")?;
    clocks.set(0)?;
    mended.faults.simgpu(&["xid", "3", "48"])?;
    mended.faults.simgpu(&["xid", "2", "48"])?;
    health(&cluster, 3, "NeedsReset")?;
    health(&cluster, 2, "NeedsReset")?;
    let now = text(&gpu(&cluster, 2)?["health"]["last"]);
    ensure!(now < ahead, "the clock was not set back: it was {ahead}, and is {now}");
    // The word on another GPU comes with the one on this.
    run(&cleave(), &["uncordon", NODE, "2"])?;
    health(&cluster, 2, "")?;
    health(&cluster, 3, "NeedsReset")?;
    offers(&cluster, SHARES, 10 * (GPUS - 1))?;
    run(&cleave(), &["uncordon", NODE, "3"])?;
    health(&cluster, 3, "")?;
    offers(&cluster, SHARES, 10 * GPUS)?;
    drop(scope);
    Ok(())
}
