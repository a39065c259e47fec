//! GPUs that fail, each in its way, and GPUs that an administrator keeps pods from: the agent as a process, on simulated GPUs.
use cleave_api::GpuNodeStatus;
use cleave_api::gpunode::{GpuSpec, MigInstanceSpec, MigPartition, Partition, Whole};

use crate::machine::{MPS, Machine, SLICED, held, ids, mps, pod, sliced, spec};

const THREE: &str = "nvidia.com/mig-3g.40gb";

/// The healthy slices of a resource are of this device alone.
fn only_of(seen: &cleave_kubelet::fake::Seen, resource: &str, device: &str) -> bool {
    seen.endpoints[resource].healthy().iter().all(|id| id.starts_with(device))
}

fn reason(status: &GpuNodeStatus, gpu: usize) -> &str {
    &status.gpus[gpu].health.reason
}

fn condition<'a>(status: &'a GpuNodeStatus, type_: &str) -> (&'a str, &'a str) {
    let found = status.conditions.iter().find(|condition| condition.type_ == type_).unwrap();
    (&found.status, &found.reason)
}

/// Lets the agent look at its GPUs by an XID that says nothing of them.
fn nudge(machine: &Machine) {
    machine.simgpu(&["xid", "0", "63"]);
}

#[tokio::test]
async fn what_needs_a_reset_outlives_the_agent_and_ends_with_the_reset() {
    let mut machine = Machine::running(&["2xH200"], |gpus| vec![sliced(&gpus[0], 4), sliced(&gpus[1], 4)]);
    machine.healthy(SLICED, 8).await;
    machine.simgpu(&["xid", "1", "119"]);
    let seen = machine.healthy(SLICED, 4).await;
    assert!(only_of(&seen, SLICED, &machine.uuids[0]));
    let status = machine.status("the XID", |status| reason(status, 1) == "ResetRequired").await;
    let health = &status.gpus[1].health;
    assert_eq!((health.class.as_str(), health.healthy, health.since.is_some()), ("NeedsReset", false, true));
    assert!(health.message.contains("XID 119 (GSP RPC timeout)"), "{}", health.message);
    assert_eq!(condition(&status, "GpusHealthy"), ("False", "GpuUnhealthy"));
    machine
        .until("the checkpoint", || {
            std::fs::read_to_string(machine.path("state/agent.json")).ok()?.contains("\"xid\":119").then_some(())
        })
        .await;

    machine.kill_agent();
    machine.seen("the end of the stream", |seen| !seen.endpoints[SLICED].connected).await;
    std::fs::remove_file(machine.path("spec/status.json")).unwrap();
    machine.start_agent(&[]);
    let status = machine.status("NVML answered", |status| condition(status, "GpusHealthy").1 != "Starting").await;
    assert_eq!(reason(&status, 1), "ResetRequired", "a restart heals nothing");
    let seen = machine.healthy(SLICED, 4).await;
    assert!(only_of(&seen, SLICED, &machine.uuids[0]));

    machine.simgpu(&["lose", "1"]);
    nudge(&machine);
    machine.status("lost", |status| status.gpus[1].health.class == "Lost").await;
    machine.simgpu(&["reset", "1"]);
    nudge(&machine);
    machine.healthy(SLICED, 8).await;
    let status = machine.status("healthy", |status| status.gpus[1].health.healthy).await;
    assert_eq!(condition(&status, "GpusHealthy"), ("True", "Healthy"));
    machine.until("the events", || (machine.events() == ["GpuUnhealthy", "Recovered"]).then_some(())).await;
}

#[tokio::test]
async fn an_administrators_word_ends_what_was_found_and_not_what_comes_after() {
    let machine = Machine::running(&["H200"], |gpus| vec![sliced(&gpus[0], 4)]);
    machine.healthy(SLICED, 4).await;
    machine.simgpu(&["xid", "0", "48"]);
    machine.healthy(SLICED, 0).await;
    let status = machine.status("the XID", |status| status.gpus[0].health.last.is_some()).await;
    let cleared = status.gpus[0].health.last.clone();
    machine.want("cleared", vec![GpuSpec { cleared: cleared.clone(), ..sliced(&machine.uuids[0], 4) }]);
    machine.healthy(SLICED, 4).await;
    machine.simgpu(&["xid", "0", "48"]);
    machine.healthy(SLICED, 0).await;
}

#[tokio::test]
async fn what_the_driver_says_of_memory_and_wants_is_believed_as_long_as_it_says_it() {
    let machine = Machine::running(&["2xH200"], |gpus| vec![sliced(&gpus[0], 4), sliced(&gpus[1], 4)]);
    machine.healthy(SLICED, 8).await;
    for (fault, end, says) in [
        ("remap-failed=on", "remap-failed=off", "RowRemapFailed"),
        ("recovery=reset", "recovery=none", "ResetRequired"),
        ("recovery=reboot", "recovery=none", "ResetRequired"),
    ] {
        machine.simgpu(&["set", "1", fault]);
        nudge(&machine);
        let seen = machine.healthy(SLICED, 4).await;
        assert!(only_of(&seen, SLICED, &machine.uuids[0]), "{fault}");
        machine.status(fault, |status| reason(status, 1) == says && reason(status, 0).is_empty()).await;
        machine.simgpu(&["set", "1", end]);
        nudge(&machine);
        machine.healthy(SLICED, 8).await;
    }
    for pending in ["remap-pending=on", "recovery=drain-and-reset"] {
        machine.simgpu(&["set", "1", pending]);
        nudge(&machine);
        let status = machine.status(pending, |status| reason(status, 1) == "ResetPending").await;
        assert!(status.gpus[1].health.healthy, "it serves");
        assert_eq!(condition(&status, "GpusHealthy"), ("True", "ResetPending"));
        machine.healthy(SLICED, 8).await;
        machine.simgpu(&["reset", "1"]);
        nudge(&machine);
        machine.status("reset", |status| reason(status, 1).is_empty()).await;
    }
    // Errors of before the first look are not new ones: there are more until some are.
    machine
        .until("memory errors", || {
            machine.simgpu(&["ecc", "1", "--uncorrected", "1"]);
            nudge(&machine);
            let text = std::fs::read(machine.path("spec/status.json")).ok()?;
            let status: GpuNodeStatus = serde_json::from_slice(&text).ok()?;
            (reason(&status, 1) == "EccErrors").then_some(())
        })
        .await;
    machine.healthy(SLICED, 4).await;
    machine.simgpu(&["reset", "1"]);
    nudge(&machine);
    machine.healthy(SLICED, 8).await;
}

#[tokio::test]
async fn an_xid_of_one_mig_instance_takes_that_instance_alone() {
    let machine = Machine::running(&["H100-80"], |gpus| {
        let instance = |start| MigInstanceSpec {
            profile: "3g.40gb".into(),
            start,
            partition: MigPartition { whole: Some(Whole { resource: THREE.into() }), ..MigPartition::default() },
        };
        let mig = Some(vec![instance(0), instance(4)]);
        vec![spec(&gpus[0], Partition { mig, ..Partition::default() })]
    });
    machine.healthy(THREE, 2).await;
    let status =
        machine.status("both", |status| status.gpus[0].mig.as_ref().is_some_and(|mig| mig.instances.len() == 2)).await;
    let [sick, well] = [0, 1].map(|at| status.gpus[0].mig.as_ref().unwrap().instances[at].clone());
    machine.simgpu(&["xid", "0", "94", "--instance", &format!("{},0", sick.gpu_instance)]);
    let seen = machine.healthy(THREE, 1).await;
    assert!(only_of(&seen, THREE, &well.uuid));
    let status = machine
        .status("the instance", |status| {
            status.gpus[0].mig.iter().flat_map(|mig| &mig.instances).any(|instance| instance.health.is_some())
        })
        .await;
    assert!(status.gpus[0].health.healthy);
    assert_eq!(condition(&status, "GpusHealthy"), ("False", "GpuUnhealthy"));
    machine.simgpu(&["xid", "0", "95", "--instance", &format!("{},0", sick.gpu_instance)]);
    machine.healthy(THREE, 0).await;
}

#[tokio::test]
async fn a_cordoned_gpu_keeps_what_is_in_use_and_what_is_on_its_way_and_gives_nothing_else() {
    let mut machine = Machine::new(&["2xH200"]);
    let [first, second] = [0, 1].map(|gpu| machine.uuids[gpu].clone());
    let want = |machine: &Machine, plan: &str, cordoned| {
        machine.want(plan, vec![GpuSpec { cordoned, ..mps(&first, 4) }, mps(&second, 4)]);
    };
    want(&machine, "open", false);
    machine.pods_are(&[]);
    machine.start_host();
    machine.start_agent(&[]);
    machine.healthy(MPS, 8).await;
    let used = ids(&first, [2]);
    machine.kubelet.allocate(MPS, &[&used[0]]).await.unwrap();
    machine.pods.hold(&[held("p", MPS, &used)]);
    let daemon = machine.host_status().unwrap().daemons[&first].pid;

    want(&machine, "cordoned", true);
    let seen = machine.healthy(MPS, 5).await;
    assert_eq!(seen.endpoints[MPS].devices.len(), 8, "they are there still");
    assert!(seen.endpoints[MPS].healthy().iter().any(|id| **id == *used[0]), "what is in use is not touched");
    machine.status("applied", |status| status.plan_id == "cordoned" && status.gpus[0].slices[0].unhealthy == 3).await;

    machine.kill_agent();
    machine.seen("the end of the stream", |seen| !seen.endpoints[MPS].connected).await;
    machine.start_agent(&[]);
    machine.seen("the new stream", |seen| seen.endpoints[MPS].connected).await;
    machine.healthy(MPS, 5).await;

    // One that was let through before waits for two there.
    machine.pods_are(&[pod("late", 2, &first)]);
    machine.healthy(MPS, 7).await;
    machine.pods_are(&[]);
    machine.healthy(MPS, 5).await;
    machine.pods.hold(&[]);
    machine.healthy(MPS, 4).await;
    assert_eq!(machine.host_status().unwrap().daemons[&first].pid, daemon, "its daemon was not touched");
    want(&machine, "open again", false);
    machine.healthy(MPS, 8).await;
}
