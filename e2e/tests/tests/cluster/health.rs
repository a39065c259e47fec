//! GPUs that fail, and GPUs that an administrator keeps pods from: what goes, what stays, and what
//! brings them back.
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, Faults, GPUNODES, Scope, hold_until, kubectl, output, process, run, signal, text, wait_until,
};
use serde_json::{Value, json};

use crate::chart::Setting;
use crate::{GPUS, HOLD, NODE, SHARES, allocations, daemon_pids, offers, other_than_ten, ten_shares, undisturbed};

/// `agent.suspectQuietSeconds` in e2e/values.yaml.
const QUIET: Duration = Duration::from_secs(20);

/// The command line, as an administrator has it.
pub(crate) fn cleave() -> String {
    // As e2e/lib.sh has it.
    let profile = match std::env::var("CLEAVE_PROFILE").as_deref() {
        Ok("dev") => "debug".to_owned(),
        Ok(profile) => profile.to_owned(),
        Err(_) => "release".to_owned(),
    };
    format!("{}/../../target/{profile}/cleave", env!("CARGO_MANIFEST_DIR"))
}

/// [`NODE`]'s GPUs are what they were, whatever the test made of them.
pub(crate) struct Mended<'a> {
    cluster: &'a Cluster,
    pub(crate) faults: Faults<'a>,
}

impl<'a> Mended<'a> {
    pub(crate) fn new(cluster: &'a Cluster) -> Self {
        Self { cluster, faults: Faults::on(NODE) }
    }
}

impl Drop for Mended<'_> {
    fn drop(&mut self) {
        let nothing = json!({"metadata": {"annotations": {"cleave.dev/cordon": null}}});
        let _ = self.cluster.patch(&format!("{GPUNODES}/{NODE}"), &nothing);
        for gpu in 0..GPUS {
            let gpu = gpu.to_string();
            for set in ["remap-failed=off", "remap-pending=off", "recovery=none"] {
                let _ = self.faults.simgpu(&["set", &gpu, set]);
            }
            let _ = self.faults.simgpu(&["restore", &gpu]);
        }
        for gpu in 0..GPUS {
            let _ = run(&cleave(), &["uncordon", NODE, &gpu.to_string()]);
        }
    }
}

/// What the node says of a GPU.
pub(crate) fn gpu(cluster: &Cluster, index: u64) -> Result<Value> {
    let node = cluster.gpunode(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    gpus.into_iter().find(|gpu| gpu["index"] == index).with_context(|| format!("{NODE} tells of no GPU {index}"))
}

pub(crate) fn health(cluster: &Cluster, index: u64, class: &str) -> Result<()> {
    wait_until(&format!("GPU {index} is {class}"), || {
        let health = gpu(cluster, index)?["health"].clone();
        ensure!(text(&health["class"]) == class, "{health}");
        Ok(true)
    })
}

/// A pod gets its shares, and not of that GPU.
fn runs_elsewhere(cluster: &Cluster, scope: &Scope, name: &str, sick: u64) -> Result<()> {
    scope.pod_on(NODE, name, &json!({SHARES: 10}), HOLD)?;
    scope.running(name)?;
    let sick = text(&gpu(cluster, sick)?["uuid"]);
    let seen = scope.seen(name)?;
    ensure!(text(&seen["uuid"]) != sick, "{name} was given the GPU that gives nothing");
    scope.delete_pod(name, 0)
}

#[test]
fn each_class_of_xid_takes_what_it_should_and_comes_back_as_it_should() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "xids")?;
    let mended = Mended::new(&cluster);
    scope.pod_on(NODE, "stays", &json!({SHARES: 2}), HOLD)?;
    scope.running("stays")?;
    let before = undisturbed(&cluster, &scope, "stays")?;

    // A program's own: no share goes. What follows is only told after it.
    mended.faults.simgpu(&["xid", "0", "31"])?;
    mended.faults.simgpu(&["xid", "1", "999"])?;
    offers(&cluster, SHARES, 10 * (GPUS - 1))?;
    health(&cluster, 1, "Suspect")?;
    let said = text(&gpu(&cluster, 1)?["health"]["message"]);
    ensure!(said.contains(&format!("after {} s without another", QUIET.as_secs())), "{said}");
    health(&cluster, 0, "")?;
    // Each further one makes the quiet time begin anew.
    mended.faults.simgpu(&["xid", "1", "999"])?;
    runs_elsewhere(&cluster, &scope, "beside-suspect", 1)?;

    let quiet = Instant::now();
    mended.faults.simgpu(&["xid", "1", "999"])?;
    mended.faults.simgpu(&["xid", "2", "48"])?;
    offers(&cluster, SHARES, 10 * (GPUS - 2))?;
    health(&cluster, 2, "NeedsReset")?;
    runs_elsewhere(&cluster, &scope, "beside-sick", 2)?;

    // By a quiet time, and an answer after it.
    health(&cluster, 1, "")?;
    ensure!(quiet.elapsed() >= QUIET, "GPU 1 was healthy again after {:?}", quiet.elapsed());
    offers(&cluster, SHARES, 10 * (GPUS - 1))?;
    health(&cluster, 2, "NeedsReset")?;
    ensure!(before == undisturbed(&cluster, &scope, "stays")?, "a running pod was disturbed");
    Ok(())
}

#[test]
fn a_restart_of_the_agent_heals_no_gpu_and_an_administrator_does() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "heals")?;
    let mended = Mended::new(&cluster);
    mended.faults.simgpu(&["xid", "3", "119"])?;
    offers(&cluster, SHARES, 10 * (GPUS - 1))?;
    health(&cluster, 3, "NeedsReset")?;
    let old = process(NODE, "cleave-agent")?;
    signal(NODE, "cleave-agent", "KILL")?;
    wait_until("another agent", || Ok(process(NODE, "cleave-agent").is_ok_and(|pid| pid != old)))?;
    // Something that only the new one can have told.
    mended.faults.simgpu(&["xid", "1", "48"])?;
    health(&cluster, 1, "NeedsReset")?;
    health(&cluster, 3, "NeedsReset")?;
    offers(&cluster, SHARES, 10 * (GPUS - 2))?;
    run(&cleave(), &["uncordon", NODE, "3"])?;
    offers(&cluster, SHARES, 10 * (GPUS - 1))?;
    health(&cluster, 1, "NeedsReset")?;
    run(&cleave(), &["uncordon", NODE, "1"])?;
    offers(&cluster, SHARES, 10 * GPUS)?;
    drop(scope);
    Ok(())
}

#[test]
fn one_lost_gpu_fails_no_pod_on_another_and_comes_back_by_itself() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "lost")?;
    let mended = Mended::new(&cluster);
    mended.faults.simgpu(&["lose", "1"])?;
    mended.faults.simgpu(&["xid", "1", "79"])?;
    for (at, shares) in [10, 1, 5, 3].into_iter().enumerate() {
        let name = format!("p{at}");
        scope.pod_on(NODE, &name, &json!({SHARES: shares}), HOLD)?;
        // Fails at once where the pod does.
        scope.running(&name)?;
    }
    health(&cluster, 1, "Lost")?;
    mended.faults.simgpu(&["restore", "1"])?;
    health(&cluster, 1, "")?;
    offers(&cluster, SHARES, 10 * GPUS)?;
    Ok(())
}

/// How long the others are watched while a GPU hangs: past the deadline that NVML has for an
/// answer, and over looks at each GPU after it.
const HANGS: Duration = Duration::from_secs(40);

#[test]
fn one_hanging_gpu_is_unreachable_alone_and_comes_back_by_itself() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "hangs")?;
    let mended = Mended::new(&cluster);
    scope.pod_on(NODE, "stays", &json!({SHARES: 2}), HOLD)?;
    scope.running("stays")?;
    let before = undisturbed(&cluster, &scope, "stays")?;
    let uuid = text(&gpu(&cluster, 3)?["uuid"]);

    mended.faults.simgpu(&["hang", "nvmlDeviceGetMemoryInfo*", "--gpu", "3"])?;
    let begun = Instant::now();
    // What must hold at every moment of it.
    let broken = || {
        let offered = cluster.allocatable(NODE, SHARES)?;
        if offered < 10 * (GPUS - 1) {
            return Ok(Some(format!("{NODE} offers {offered} {SHARES}")));
        }
        let others = other_than_ten(&cluster, |gpu| gpu["index"] != 3)?;
        Ok((!others.is_empty()).then(|| format!("other GPUs: {others:?}")))
    };
    let unreachable = || {
        let health = gpu(&cluster, 3)?["health"].clone();
        Ok(text(&health["reason"]) == "GpuUnreachable" && text(&health["class"]) == "Lost")
    };
    hold_until("GPU 3 is unreachable", unreachable, broken)?;
    let said = text(&gpu(&cluster, 3)?["health"]["message"]);
    ensure!(said.contains("NVML did not answer for"), "{said}");
    offers(&cluster, SHARES, 10 * (GPUS - 1))?;

    scope.pod_on(NODE, "new", &json!({SHARES: 5}), HOLD)?;
    // Fails at once where the pod does.
    scope.running("new")?;
    ensure!(text(&scope.seen("new")?["uuid"]) != uuid, "the new pod was given shares of the GPU that hangs");
    hold_until("the hang has lasted", || Ok(begun.elapsed() >= HANGS && unreachable()?), broken)?;
    // XIDs of the others still arrive.
    mended.faults.simgpu(&["xid", "2", "48"])?;
    health(&cluster, 2, "NeedsReset")?;
    run(&cleave(), &["uncordon", NODE, "2"])?;
    offers(&cluster, SHARES, 10 * (GPUS - 1))?;

    mended.faults.simgpu(&["clear"])?;
    health(&cluster, 3, "")?;
    offers(&cluster, SHARES, 10 * GPUS)?;
    ensure!(before == undisturbed(&cluster, &scope, "stays")?, "a running pod was disturbed");
    Ok(())
}

#[test]
fn a_cordoned_gpu_takes_no_new_pod_a_drain_empties_it_and_uncordon_brings_it_back() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "cordon")?;
    let _mended = Mended::new(&cluster);
    scope.pod_on(NODE, "holder", &json!({SHARES: 3}), HOLD)?;
    scope.running("holder")?;
    wait_until("the node tells who holds the shares", || Ok(!allocations(&cluster, &scope, "holder")?.is_empty()))?;
    let device = text(&allocations(&cluster, &scope, "holder")?[0]["device"]);
    let before = undisturbed(&cluster, &scope, "holder")?;
    let daemons = daemon_pids(&cluster)?;

    let said = run(&cleave(), &["cordon", NODE, &device, "--reason", "new fan"])?;
    ensure!(said.contains("is cordoned"), "{said}");
    ensure!(run(&cleave(), &["cordon", NODE, &device])?.contains("already"));
    // What runs there is still counted.
    offers(&cluster, SHARES, 10 * (GPUS - 1) + 3)?;
    let index = gpu_index(&cluster, &device)?;
    for name in ["one", "two"] {
        runs_elsewhere(&cluster, &scope, name, index)?;
    }
    ensure!(before == undisturbed(&cluster, &scope, "holder")?, "a running pod was disturbed");
    ensure!(daemons == daemon_pids(&cluster)?, "a daemon was started again");
    let status = run(&cleave(), &["status"])?;
    ensure!(status.contains("Healthy,Cordoned") && status.contains("is cordoned: new fan"), "{status}");
    // More than there is room for without it: one waits, and is told why.
    for name in ["a", "b", "c"] {
        scope.pod_on(NODE, name, &json!({SHARES: 10}), HOLD)?;
        scope.running(name)?;
    }
    scope.pod_on(NODE, "d", &json!({SHARES: 5}), HOLD)?;
    let told = run(&cleave(), &["explain", "pod", &format!("{}/d", scope.namespace)])?;
    ensure!(told.contains("cordoned: new fan"), "{told}");

    let refused = output(&cleave(), &["drain", NODE, &device])?;
    ensure!(!refused.status.success(), "a pod that nothing makes anew was evicted");
    let drained = run(&cleave(), &["drain", NODE, &device, "--force", "--grace", "1", "--timeout", "80"])?;
    ensure!(drained.contains("is free"), "{drained}");
    ensure!(gpu(&cluster, index)?["allocations"] == json!([]), "it is not free");
    wait_until("the evicted pod is gone", || {
        let pod = cluster.find(&scope.pod_path("holder"))?;
        Ok(pod.is_none_or(|pod| matches!(text(&pod["status"]["phase"]).as_str(), "Failed" | "Succeeded")))
    })?;
    run(&cleave(), &["uncordon", NODE, &device])?;
    offers(&cluster, SHARES, 10 * GPUS)?;
    let unknown = output(&cleave(), &["cordon", NODE, "77"])?;
    let told = String::from_utf8_lossy(&unknown.stderr).into_owned();
    ensure!(!unknown.status.success() && told.contains("has no GPU \"77\""), "{told}");
    Ok(())
}

fn gpu_index(cluster: &Cluster, uuid: &str) -> Result<u64> {
    let node = cluster.gpunode(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let found = gpus.iter().find(|gpu| text(&gpu["uuid"]) == uuid).and_then(|gpu| gpu["index"].as_u64());
    found.with_context(|| format!("{NODE} tells of no GPU {uuid}"))
}

/// Nodes are tainted, until this goes.
struct Tainting(#[expect(dead_code, reason = "held until it goes")] Setting);

impl Tainting {
    fn on() -> Result<Self> {
        Ok(Self(Setting::of("operator.taintUnhealthyNodes", true)?))
    }
}

impl Drop for Tainting {
    fn drop(&mut self) {
        // While the operator still may take it away, others' tests should not find it.
        let _ = kubectl(&["taint", "node", NODE, "cleave.dev/unhealthy-"]);
    }
}

fn taints(cluster: &Cluster) -> Result<Vec<String>> {
    let node = cluster.get(&format!("/api/v1/nodes/{NODE}"))?;
    let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
    Ok(taints.iter().map(|taint| format!("{}:{}", text(&taint["key"]), text(&taint["effect"]))).collect())
}

#[test]
fn a_node_whose_gpus_are_all_out_is_tainted_where_that_is_asked_for_and_others_taints_stay() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _scope = ten_shares(&cluster, "taints")?;
    let other = ["taint", "node", NODE, "e2e.cleave.dev/other=x:PreferNoSchedule", "--overwrite"];
    let tainting = Tainting::on()?;
    let mended = Mended::new(&cluster);
    kubectl(&other)?;
    for index in 0..GPUS {
        ensure!(taints(&cluster)? == ["e2e.cleave.dev/other:PreferNoSchedule"], "{:?}", taints(&cluster)?);
        mended.faults.simgpu(&["xid", &index.to_string(), "48"])?;
        health(&cluster, index, "NeedsReset")?;
    }
    wait_until("the node is tainted", || {
        Ok(taints(&cluster)? == ["e2e.cleave.dev/other:PreferNoSchedule", "cleave.dev/unhealthy:NoSchedule"])
    })?;
    run(&cleave(), &["uncordon", NODE, "0"])?;
    health(&cluster, 0, "")?;
    wait_until("the node is not tainted", || Ok(taints(&cluster)? == ["e2e.cleave.dev/other:PreferNoSchedule"]))?;
    kubectl(&["taint", "node", NODE, "e2e.cleave.dev/other-"])?;
    drop(mended);
    drop(tainting);
    offers(&cluster, SHARES, 10 * GPUS)
}
