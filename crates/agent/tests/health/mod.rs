//! GPUs that fail, each in its way, and GPUs that an administrator keeps pods from: the agent as a
//! process, on simulated GPUs.
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

/// All four GPUs of a node have ten shares.
fn forty(gpus: &[String]) -> Vec<GpuSpec> {
    gpus.iter().map(|gpu| mps(gpu, 10)).collect()
}

#[tokio::test]
async fn a_gpu_that_hangs_is_unreachable_alone_and_delays_nothing_that_others_say() {
    let machine = Machine::running(&["4xH200"], forty);
    machine.healthy(MPS, 40).await;
    machine.simgpu(&["hang", "nvmlDeviceGetMemoryInfo*", "--gpu", "3"]);
    nudge(&machine);
    // Before the deadline of the one that hangs is over, another one's answer is in.
    machine.simgpu(&["set", "2", "remap-failed=on"]);
    nudge(&machine);
    let seen = |status: &GpuNodeStatus| reason(status, 2) == "RowRemapFailed";
    let status = machine.status("the second look at GPU 2", seen).await;
    assert!(status.gpus[3].health.healthy, "its answer waited for GPU 3");
    machine.simgpu(&["set", "2", "remap-failed=off"]);
    nudge(&machine);

    let unreachable = |status: &GpuNodeStatus| reason(status, 3) == "GpuUnreachable" && status.gpus[2].health.healthy;
    let status = machine.status("GPU 3 is unreachable", unreachable).await;
    let health = &status.gpus[3].health;
    assert_eq!((health.class.as_str(), health.message.as_str()), ("Lost", "NVML did not answer for 20 s"));
    assert_eq!(condition(&status, "GpusHealthy"), ("False", "GpuUnhealthy"));
    let seen = machine.healthy(MPS, 30).await;
    assert!(!seen.endpoints[MPS].healthy().iter().any(|id| id.starts_with(machine.uuids[3].as_str())));
    let share = ids(&machine.uuids[0], [0]);
    machine.kubelet.allocate(MPS, &[&share[0]]).await.unwrap();
    machine.kubelet.pre_start(MPS, &[&share[0]]).await.unwrap();

    // XIDs and memory of the others are seen as before.
    machine.simgpu(&["xid", "1", "48"]);
    machine.simgpu(&["set", "2", "remap-failed=on"]);
    let both = |status: &GpuNodeStatus| reason(status, 1) == "ResetRequired" && reason(status, 2) == "RowRemapFailed";
    let status = machine.status("what others say", both).await;
    assert_eq!((reason(&status, 0), reason(&status, 3)), ("", "GpuUnreachable"));

    machine.simgpu(&["clear"]);
    machine.status("GPU 3 has recovered", |status| status.gpus[3].health.healthy).await;
    let seen = machine.healthy(MPS, 20).await;
    assert_eq!(seen.endpoints[MPS].devices.len(), 40);
}

#[tokio::test]
async fn a_gpu_that_hangs_before_it_was_ever_described_keeps_no_other_from_being_served() {
    let mut machine = Machine::new(&["4xH200"]);
    machine.simgpu(&["hang", "nvmlDeviceGetMemoryInfo*", "--gpu", "3"]);
    machine.want("first", forty(&machine.uuids));
    machine.start_host();
    machine.start_agent(&[]);
    machine.healthy(MPS, 30).await;
    let reported = |status: &GpuNodeStatus| condition(status, "GpusHealthy") == ("False", "GpuUnhealthy");
    let status = machine.status("the GPU is reported", reported).await;
    let found = status.conditions.iter().find(|condition| condition.type_ == "GpusHealthy").unwrap();
    assert_eq!((found.message.as_str(), status.gpus.len()), ("GPU 3: NVML did not answer for 20 s", 3));
    machine.simgpu(&["clear"]);
    machine.healthy(MPS, 40).await;
    machine.status("all are healthy", |status| condition(status, "GpusHealthy") == ("True", "Healthy")).await;
}

#[tokio::test]
async fn a_gpu_whose_events_cannot_be_asked_for_keeps_no_others_from_being_heard() {
    let mut machine = Machine::new(&["2xH200"]);
    machine.simgpu(&["hang", "nvmlDeviceRegisterEvents", "--gpu", "0"]);
    machine.want("first", vec![sliced(&machine.uuids[0], 4), sliced(&machine.uuids[1], 4)]);
    machine.start_agent(&[]);
    machine.healthy(SLICED, 8).await;
    // Events of before the driver was asked for them are nobody's: there are more until one is
    // heard.
    let heard = || {
        machine.simgpu(&["xid", "1", "48"]);
        let status: GpuNodeStatus =
            serde_json::from_slice(&std::fs::read(machine.path("spec/status.json")).ok()?).ok()?;
        (reason(&status, 1) == "ResetRequired").then_some(())
    };
    machine.until("an XID of the other GPU", heard).await;
    machine.healthy(SLICED, 4).await;
}
