//! Tests sudden changes of the clock. The tests change the time that Cleave's programs read, except
//! the kubelet relay: by up to one hour ahead or behind, and then to the correct time. The
//! machine's clock does not change.
//!
//! The programs read the time through `libsim_clock.so` (e2e/sim/clock), which is in the image of
//! the local cluster. The clock can be at most one hour behind, because the API server's
//! certificate becomes valid one hour before the creation of the cluster.
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, SYSTEM_NAMESPACE, Scope, allocation_errors, find_pid, kubectl, live_pods, on_node, pod, run_program, text,
    wait_until,
};
use serde_json::{Value, json};

use crate::chart::ChartSetting;
use crate::gate::is_gated;
use crate::health::{RepairGuard, cleave_path, gpu_status, wait_for_health};
use crate::restarts::{component_pod, is_ready};
use crate::{
    GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, allocations, container_and_restarts, daemon_pids,
    ten_shares, wait_until_advertised,
};

const CLOCK_LIBRARY_PATH: &str = "/usr/lib/libsim_clock.so";
/// Cleave's workloads, except the kubelet relay.
const WORKLOADS: [&str; 3] = ["daemonset/cleave-agent", "daemonset/cleave-mps-host", "deployment/cleave-operator"];
const HOUR_SECONDS: i64 = 3600;
/// Script of a client that ignores SIGTERM, so that the client runs until the end of its grace
/// period.
const IGNORE_SIGTERM_SCRIPT: &str = "trap '' TERM; exec cleave-client --hold forever";

/// Sets the clock that Cleave's programs read. When this value is dropped, the programs read the
/// machine's clock again.
struct Clocks<'a> {
    cluster: &'a Cluster,
    /// Reduces the operator to one replica, because the tests find a process by its node, and two
    /// operators may run on one node. Restored after the clock.
    _operators: ChartSetting,
}

impl<'a> Clocks<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let clocks = Self { cluster, _operators: ChartSetting::change("operator.replicas", 1)? };
        clocks.change_environment(&format!("LD_PRELOAD={CLOCK_LIBRARY_PATH}"))?;
        for (node, pid) in clocks.processes()? {
            on_node(&node, &["grep", "-q", CLOCK_LIBRARY_PATH, &format!("/proc/{pid}/maps")])
                .with_context(|| format!("process {pid} of {node} reads the machine's clock"))?;
        }
        Ok(clocks)
    }

    /// Changes the environment of the programs of [`WORKLOADS`], and waits until the programs have
    /// restarted with the changed environment.
    fn change_environment(&self, change: &str) -> Result<()> {
        for workload in WORKLOADS {
            kubectl(&["-n", SYSTEM_NAMESPACE, "set", "env", workload, change])?;
        }
        // The update strategy is OnDelete, so delete the MPS hosts. The MPS daemons exit together
        // with their MPS hosts.
        kubectl(&["-n", SYSTEM_NAMESPACE, "delete", "pod", "-l", "app.kubernetes.io/component=mps-host", "--wait"])?;
        for workload in [WORKLOADS[0], WORKLOADS[2]] {
            kubectl(&["-n", SYSTEM_NAMESPACE, "rollout", "status", workload, "--timeout=120s"])?;
        }
        wait_until("all of Cleave's pods are ready and the operator leads", || {
            let pods = self.cluster.list(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"))?;
            let is_settled = |pod: &Value| pod["metadata"]["deletionTimestamp"].is_null() && is_ready(pod);
            let settled = pods.len() == 3 * self.cluster.nodes()?.len() + 1 && pods.iter().all(is_settled);
            // Check the revision, because the DaemonSet's controller may have recreated a pod from
            // the earlier template.
            let hosts =
                self.cluster.get(&format!("/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/daemonsets/cleave-mps-host"))?;
            let (status, nodes) = (&hosts["status"], self.cluster.nodes()?.len());
            let is_current = status["observedGeneration"] == hosts["metadata"]["generation"]
                && status["updatedNumberScheduled"].as_u64() == u64::try_from(nodes).ok();
            // An operator that is not the leader is also ready. This operator acquires the lease at
            // most 2 s after the earlier leader has released the lease, or 17 s after the earlier
            // leader was killed.
            Ok(settled && is_current && component_pod(self.cluster, "operator").map(|_| true)?)
        })
    }

    /// Returns the node and PID of each program of [`WORKLOADS`].
    fn processes(&self) -> Result<Vec<(String, String)>> {
        let mut all = Vec::new();
        for node in self.cluster.nodes()? {
            for program in ["cleave-agent", "cleave-mps-host"] {
                all.push((node.clone(), find_pid(&node, program)?));
            }
        }
        let node = text(&component_pod(self.cluster, "operator")?["spec"]["nodeName"]);
        all.push((node.clone(), find_pid(&node, "cleave")?));
        Ok(all)
    }

    /// Sets the clock of the programs of [`WORKLOADS`] to this number of seconds ahead of the
    /// correct time.
    fn set_offset(&self, seconds: i64) -> Result<()> {
        for (node, pid) in self.processes()? {
            // Write the file atomically, because a program that reads an incomplete number would
            // use a wrong time.
            let write = "printf '%s' \"$1\" >\"$0.new\" && mv \"$0.new\" \"$0\"";
            let file = format!("/proc/{pid}/root/dev/shm/sim-clock");
            on_node(&node, &["sh", "-c", write, &file, &seconds.to_string()])?;
        }
        Ok(())
    }
}

impl Drop for Clocks<'_> {
    fn drop(&mut self) {
        // The file with the offset is deleted together with the pods.
        if let Err(error) = self.change_environment("LD_PRELOAD-") {
            let _ = writeln!(std::io::stderr(), "failed to restore the clock of Cleave's programs: {error:#}");
        }
    }
}

/// Returns the holder of each lease, and how often the holder has changed.
fn lease_holders(cluster: &Cluster) -> Result<Vec<Value>> {
    let leases = cluster.list(&format!("/apis/coordination.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/leases"))?;
    let of = |lease: &Value| {
        let spec = &lease["spec"];
        json!([lease["metadata"]["name"], spec["holderIdentity"], spec["leaseTransitions"]])
    };
    Ok(leases.iter().map(of).collect())
}

/// Returns the UID and restart count of each of Cleave's pods.
fn restart_counts(cluster: &Cluster) -> Result<Vec<Value>> {
    let pods = cluster.list(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"))?;
    Ok(pods
        .iter()
        .map(|pod| json!([pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]]))
        .collect())
}

/// Returns the state that a change of the clock must not change.
fn invariant_state(clocks: &Clocks, scope: &Scope, pods: &[&str]) -> Result<Value> {
    let cluster = scope.cluster;
    let pods: Vec<_> = pods.iter().map(|name| container_and_restarts(cluster, scope, name)).collect::<Result<_>>()?;
    Ok(json!([pods, daemon_pids(cluster)?, lease_holders(cluster)?, restart_counts(cluster)?, clocks.processes()?]))
}

/// Returns the number of MPS clients that the node reports for a pod.
fn count_clients(scope: &Scope, name: &str) -> Result<u64> {
    Ok(allocations(scope.cluster, scope, name)?.iter().filter_map(|held| held["clients"].as_u64()).sum())
}

/// Checks that a pod is still gated.
fn check_gated(scope: &Scope, name: &str) -> Result<()> {
    let pod = scope.cluster.get(&scope.pod_path(name))?;
    ensure!(is_gated(&pod), "{name} was released although all shares are reserved: {}", pod["spec"]);
    Ok(())
}

#[test]
fn clock_jumps_lose_no_share_reservation_or_grace_period_and_restart_nothing() -> Result<()> {
    const GRACE_SECONDS: u32 = 10;
    let cluster = Cluster::connect()?;
    let clocks = Clocks::new(&cluster)?;
    let scope = ten_shares(&cluster, "clocks")?;
    // Each pod is on a different GPU, so one GPU remains free.
    let full = ["a", "b", "c"];
    for name in full {
        scope.create_pod_on_node(
            NODE,
            name,
            &json!({SHARES_RESOURCE: if name == "a" { 8 } else { 10 }}),
            HOLD_CLIENT_SCRIPT,
        )?;
        scope.wait_until_running(name)?;
        scope.client_report(name)?;
    }
    // The operator releases this pod, but its PersistentVolumeClaim does not exist, so the
    // scheduler finds no node. The pod's reservation lasts for minutes.
    let mut reserved = pod("reserved", &json!({SHARES_RESOURCE: 10}), HOLD_CLIENT_SCRIPT);
    reserved["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
    reserved["spec"]["volumes"] = json!([{"name": "nobody", "persistentVolumeClaim": {"claimName": "nobody"}}]);
    cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &reserved)?;
    wait_until("the pod is released", || {
        Ok(cluster.get(&scope.pod_path("reserved"))?["spec"]["schedulingGates"].as_array().is_none_or(Vec::is_empty))
    })?;
    scope.create_pod_on_node(NODE, "next", &json!({SHARES_RESOURCE: 10}), HOLD_CLIENT_SCRIPT)?;
    let before = invariant_state(&clocks, &scope, &full)?;

    for (at, off) in [HOUR_SECONDS, -HOUR_SECONDS, 0].into_iter().enumerate() {
        let leaving = format!("leaving-{at}");
        let mut object = pod(&leaving, &json!({SHARES_RESOURCE: 1}), IGNORE_SIGTERM_SCRIPT);
        object["spec"]["terminationGracePeriodSeconds"] = json!(GRACE_SECONDS);
        object["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
        cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        scope.wait_until_running(&leaving)?;
        wait_until(&format!("{leaving} has a client"), || Ok(count_clients(&scope, &leaving)? == 1))?;
        let deleted = Instant::now();
        cluster.delete(&scope.pod_path(&leaving), Some(GRACE_SECONDS))?;
        clocks.set_offset(off)?;
        wait_until("the pod's client is terminated", || Ok(count_clients(&scope, &leaving)? == 0))?;
        let took = deleted.elapsed();
        ensure!(
            took >= Duration::from_secs(6),
            "{leaving} got {took:?} of its grace of {GRACE_SECONDS} s while the clock is off by {off} s"
        );
        wait_until(&format!("{leaving} no longer exists"), || Ok(cluster.find(&scope.pod_path(&leaving))?.is_none()))?;
        // A new pod that is released and runs shows that the operator and the agent still work
        // after the change of the clock.
        let probe = format!("probe-{at}");
        scope.create_pod_on_node(NODE, &probe, &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
        scope.wait_until_running(&probe)?;
        ensure!(scope.client_report(&probe)?["sms"] == 26, "{probe} has other limits");
        check_gated(&scope, "next")?;
        let errors = allocation_errors(&cluster.gpu_node(NODE)?, &live_pods(&scope.pods()?), Some(10));
        ensure!(errors.is_empty(), "off by {off} s: {errors:#?}");
        scope.delete_pod(&probe, 0)?;
        let now = invariant_state(&clocks, &scope, &full)?;
        ensure!(now == before, "off by {off} s: the state changed from\n{before}\nto\n{now}");
    }
    scope.delete_pod("reserved", 0)?;
    scope.wait_until_running("next")?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)
}

#[test]
fn a_fault_after_an_uncordon_lasts_although_the_clock_was_set_back() -> Result<()> {
    let cluster = Cluster::connect()?;
    let clocks = Clocks::new(&cluster)?;
    let scope = ten_shares(&cluster, "clocks-health")?;
    let repair = RepairGuard::new(&cluster);
    clocks.set_offset(HOUR_SECONDS)?;
    repair.faults.simgpu(&["xid", "3", "48"])?;
    wait_for_health(&cluster, 3, "NeedsReset")?;
    let ahead = text(&gpu_status(&cluster, 3)?["health"]["last"]);
    run_program(&cleave_path(), &["uncordon", NODE, "3"])?;
    wait_for_health(&cluster, 3, "")?;
    clocks.set_offset(0)?;
    repair.faults.simgpu(&["xid", "3", "48"])?;
    repair.faults.simgpu(&["xid", "2", "48"])?;
    wait_for_health(&cluster, 3, "NeedsReset")?;
    wait_for_health(&cluster, 2, "NeedsReset")?;
    let now = text(&gpu_status(&cluster, 2)?["health"]["last"]);
    ensure!(now < ahead, "the clock was not set back: it was {ahead} and is {now}");
    // One object contains both uncordon requests, so uncordoning GPU 2 also repeats the request for
    // GPU 3.
    run_program(&cleave_path(), &["uncordon", NODE, "2"])?;
    wait_for_health(&cluster, 2, "")?;
    wait_for_health(&cluster, 3, "NeedsReset")?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    run_program(&cleave_path(), &["uncordon", NODE, "3"])?;
    wait_for_health(&cluster, 3, "")?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    drop(scope);
    Ok(())
}
