//! Tests the agent as a process on simulated GPUs that are faulty, hang, or are cordoned.
use cleave_api::GpuNodeStatus;
use cleave_api::gpunode::{GpuSpec, MigInstanceSpec, MigPartition, Partition, Whole};

use crate::machine::{
    MPS_RESOURCE, Machine, TIMESLICE_RESOURCE, container_devices, mps_spec, pod, share_ids, spec, timeslice_spec,
};

const MIG_3G_RESOURCE: &str = "nvidia.com/mig-3g.40gb";

/// Returns whether all healthy slices of a resource belong to this device.
fn only_this_device_is_healthy(seen: &cleave_kubelet::fake::FakeKubeletState, resource: &str, device: &str) -> bool {
    seen.endpoints[resource].healthy_ids().iter().all(|id| id.starts_with(device))
}

fn health_reason(status: &GpuNodeStatus, gpu: usize) -> &str {
    &status.gpus[gpu].health.reason
}

fn condition<'a>(status: &'a GpuNodeStatus, type_: &str) -> (&'a str, &'a str) {
    let found = status.conditions.iter().find(|condition| condition.type_ == type_).unwrap();
    (&found.status, &found.reason)
}

/// Triggers a read of the GPUs with an XID that does not affect the health of a GPU.
fn trigger_gpu_read(machine: &Machine) {
    machine.simgpu(&["xid", "0", "63"]);
}

#[tokio::test]
async fn a_fault_that_needs_a_reset_remains_after_a_restart_of_the_agent_and_ends_with_the_reset() {
    let mut machine =
        Machine::start(&["2xH200"], |gpus| vec![timeslice_spec(&gpus[0], 4), timeslice_spec(&gpus[1], 4)]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 8).await;
    machine.simgpu(&["xid", "1", "119"]);
    let seen = machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    assert!(only_this_device_is_healthy(&seen, TIMESLICE_RESOURCE, &machine.uuids[0]));
    let status = machine.wait_for_status("the XID", |status| health_reason(status, 1) == "ResetRequired").await;
    let health = &status.gpus[1].health;
    assert_eq!((health.class.as_str(), health.healthy, health.since.is_some()), ("NeedsReset", false, true));
    assert!(health.message.contains("XID 119 (GSP RPC timeout)"), "{}", health.message);
    assert_eq!(condition(&status, "GpusHealthy"), ("False", "GpuUnhealthy"));
    machine
        .wait_until("the checkpoint is written", || {
            std::fs::read_to_string(machine.path("state/agent.json")).ok()?.contains("\"xid\":119").then_some(())
        })
        .await;

    machine.kill_agent();
    machine.wait_for_view("the stream ends", |seen| !seen.endpoints[TIMESLICE_RESOURCE].connected).await;
    std::fs::remove_file(machine.path("spec/status.json")).unwrap();
    machine.start_agent(&[]);
    let status =
        machine.wait_for_status("NVML answered", |status| condition(status, "GpusHealthy").1 != "Starting").await;
    assert_eq!(health_reason(&status, 1), "ResetRequired", "a restart of the agent does not clear the fault");
    let seen = machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    assert!(only_this_device_is_healthy(&seen, TIMESLICE_RESOURCE, &machine.uuids[0]));

    machine.simgpu(&["lose", "1"]);
    trigger_gpu_read(&machine);
    machine.wait_for_status("lost", |status| status.gpus[1].health.class == "Lost").await;
    machine.simgpu(&["reset", "1", "--from-outside"]);
    trigger_gpu_read(&machine);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 8).await;
    let status = machine.wait_for_status("healthy", |status| status.gpus[1].health.healthy).await;
    assert_eq!(condition(&status, "GpusHealthy"), ("True", "Healthy"));
    machine
        .wait_until("the Events are published", || (machine.events() == ["GpuUnhealthy", "Recovered"]).then_some(()))
        .await;
}

#[tokio::test]
async fn clearing_faults_clears_earlier_faults_but_not_later_faults() {
    let machine = Machine::start(&["H200"], |gpus| vec![timeslice_spec(&gpus[0], 4)]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    machine.simgpu(&["xid", "0", "48"]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 0).await;
    let status = machine.wait_for_status("the XID", |status| status.gpus[0].health.last.is_some()).await;
    let cleared = status.gpus[0].health.last.clone();
    machine.set_spec("cleared", vec![GpuSpec { cleared: cleared.clone(), ..timeslice_spec(&machine.uuids[0], 4) }]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    machine.simgpu(&["xid", "0", "48"]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 0).await;
}

#[tokio::test]
async fn problems_that_the_driver_reports_end_when_the_driver_no_longer_reports_them() {
    let machine = Machine::start(&["2xH200"], |gpus| vec![timeslice_spec(&gpus[0], 4), timeslice_spec(&gpus[1], 4)]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 8).await;
    for (fault, end, expected) in [
        ("remap-failed=on", "remap-failed=off", "RowRemapFailed"),
        ("recovery=reset", "recovery=none", "ResetRequired"),
        ("recovery=reboot", "recovery=none", "ResetRequired"),
    ] {
        machine.simgpu(&["set", "1", fault]);
        trigger_gpu_read(&machine);
        let seen = machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
        assert!(only_this_device_is_healthy(&seen, TIMESLICE_RESOURCE, &machine.uuids[0]), "{fault}");
        machine
            .wait_for_status(fault, |status| {
                health_reason(status, 1) == expected && health_reason(status, 0).is_empty()
            })
            .await;
        machine.simgpu(&["set", "1", end]);
        trigger_gpu_read(&machine);
        machine.wait_for_healthy(TIMESLICE_RESOURCE, 8).await;
    }
    for pending in ["remap-pending=on", "recovery=drain-and-reset"] {
        machine.simgpu(&["set", "1", pending]);
        trigger_gpu_read(&machine);
        let status = machine.wait_for_status(pending, |status| health_reason(status, 1) == "ResetPending").await;
        assert!(status.gpus[1].health.healthy, "the GPU serves slices");
        assert_eq!(condition(&status, "GpusHealthy"), ("True", "ResetPending"));
        machine.wait_for_healthy(TIMESLICE_RESOURCE, 8).await;
        machine.simgpu(&["reset", "1", "--from-outside"]);
        trigger_gpu_read(&machine);
        machine.wait_for_status("reset", |status| health_reason(status, 1).is_empty()).await;
    }
    // Errors before the agent's first read do not count, so add errors until the agent reports one.
    machine
        .wait_until("memory errors", || {
            machine.simgpu(&["ecc", "1", "--uncorrected", "1"]);
            trigger_gpu_read(&machine);
            let text = std::fs::read(machine.path("spec/status.json")).ok()?;
            let status: GpuNodeStatus = serde_json::from_slice(&text).ok()?;
            (health_reason(&status, 1) == "EccErrors").then_some(())
        })
        .await;
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    machine.simgpu(&["reset", "1", "--from-outside"]);
    trigger_gpu_read(&machine);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 8).await;
}

#[tokio::test]
async fn an_xid_of_a_mig_instance_affects_only_that_instance() {
    let machine = Machine::start(&["H100-80"], |gpus| {
        let instance = |start| MigInstanceSpec {
            profile: "3g.40gb".into(),
            start,
            partition: MigPartition {
                whole: Some(Whole { resource: MIG_3G_RESOURCE.into() }),
                ..MigPartition::default()
            },
        };
        let mig = Some(vec![instance(0), instance(4)]);
        vec![spec(&gpus[0], Partition { mig, ..Partition::default() })]
    });
    machine.wait_for_healthy(MIG_3G_RESOURCE, 2).await;
    let status = machine
        .wait_for_status("both", |status| status.gpus[0].mig.as_ref().is_some_and(|mig| mig.instances.len() == 2))
        .await;
    let [faulty, healthy] = [0, 1].map(|at| status.gpus[0].mig.as_ref().unwrap().instances[at].clone());
    machine.simgpu(&["xid", "0", "94", "--instance", &format!("{},0", faulty.gpu_instance)]);
    let seen = machine.wait_for_healthy(MIG_3G_RESOURCE, 1).await;
    assert!(only_this_device_is_healthy(&seen, MIG_3G_RESOURCE, &healthy.uuid));
    let status = machine
        .wait_for_status("the instance is reported", |status| {
            status.gpus[0].mig.iter().flat_map(|mig| &mig.instances).any(|instance| instance.health.is_some())
        })
        .await;
    assert!(status.gpus[0].health.healthy);
    assert_eq!(condition(&status, "GpusHealthy"), ("False", "GpuUnhealthy"));
    machine.simgpu(&["xid", "0", "95", "--instance", &format!("{},0", faulty.gpu_instance)]);
    machine.wait_for_healthy(MIG_3G_RESOURCE, 0).await;
}

#[tokio::test]
async fn a_cordoned_gpu_serves_only_shares_in_use_and_pods_that_were_released_earlier() {
    let mut machine = Machine::new(&["2xH200"]);
    let [first, second] = [0, 1].map(|gpu| machine.uuids[gpu].clone());
    let set_cordoned = |machine: &Machine, plan: &str, cordoned| {
        machine.set_spec(plan, vec![GpuSpec { cordoned, ..mps_spec(&first, 4) }, mps_spec(&second, 4)]);
    };
    set_cordoned(&machine, "open", false);
    machine.set_pods(&[]);
    machine.start_mps_host();
    machine.start_agent(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
    let used = share_ids(&first, [2]);
    machine.kubelet.allocate(MPS_RESOURCE, &[&used[0]]).await.unwrap();
    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, &used)]);
    let daemon = machine.mps_host_status().unwrap().daemons[&first].pid;

    set_cordoned(&machine, "cordoned", true);
    let seen = machine.wait_for_healthy(MPS_RESOURCE, 5).await;
    assert_eq!(seen.endpoints[MPS_RESOURCE].devices.len(), 8, "all shares stay listed");
    assert!(
        seen.endpoints[MPS_RESOURCE].healthy_ids().iter().any(|id| **id == *used[0]),
        "a share in use stays healthy"
    );
    machine
        .wait_for_status("applied", |status| status.plan_id == "cordoned" && status.gpus[0].slices[0].unhealthy == 3)
        .await;

    machine.kill_agent();
    machine.wait_for_view("the stream ends", |seen| !seen.endpoints[MPS_RESOURCE].connected).await;
    machine.start_agent(&[]);
    machine.wait_for_view("the new stream", |seen| seen.endpoints[MPS_RESOURCE].connected).await;
    machine.wait_for_healthy(MPS_RESOURCE, 5).await;

    // The operator released this pod before the GPU was cordoned. The pod has a reservation of two
    // shares of the GPU.
    machine.set_pods(&[pod("late", 2, &first)]);
    machine.wait_for_healthy(MPS_RESOURCE, 7).await;
    machine.set_pods(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, 5).await;
    machine.pods.set_devices(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    assert_eq!(machine.mps_host_status().unwrap().daemons[&first].pid, daemon, "the MPS daemon was not restarted");
    set_cordoned(&machine, "no longer cordoned", false);
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
}

/// Returns the specs of GPUs with ten shares each.
fn ten_share_specs(gpus: &[String]) -> Vec<GpuSpec> {
    gpus.iter().map(|gpu| mps_spec(gpu, 10)).collect()
}

#[tokio::test]
async fn a_gpu_that_hangs_is_unreachable_and_delays_no_reports_about_other_gpus() {
    let machine = Machine::start(&["4xH200"], ten_share_specs);
    machine.wait_for_healthy(MPS_RESOURCE, 40).await;
    machine.simgpu(&["hang", "nvmlDeviceGetMemoryInfo*", "--gpu", "3"]);
    trigger_gpu_read(&machine);
    // The answer for GPU 2 must arrive before the deadline of GPU 3 has passed.
    machine.simgpu(&["set", "2", "remap-failed=on"]);
    trigger_gpu_read(&machine);
    let seen = |status: &GpuNodeStatus| health_reason(status, 2) == "RowRemapFailed";
    let status = machine.wait_for_status("the second read of GPU 2", seen).await;
    assert!(status.gpus[3].health.healthy, "the answer for GPU 2 does not depend on GPU 3");
    machine.simgpu(&["set", "2", "remap-failed=off"]);
    trigger_gpu_read(&machine);

    let unreachable =
        |status: &GpuNodeStatus| health_reason(status, 3) == "GpuUnreachable" && status.gpus[2].health.healthy;
    let status = machine.wait_for_status("GPU 3 is unreachable", unreachable).await;
    let health = &status.gpus[3].health;
    assert_eq!((health.class.as_str(), health.message.as_str()), ("Lost", "NVML did not answer for 20 s"));
    assert_eq!(condition(&status, "GpusHealthy"), ("False", "GpuUnhealthy"));
    let seen = machine.wait_for_healthy(MPS_RESOURCE, 30).await;
    assert!(!seen.endpoints[MPS_RESOURCE].healthy_ids().iter().any(|id| id.starts_with(machine.uuids[3].as_str())));
    let share = share_ids(&machine.uuids[0], [0]);
    machine.kubelet.allocate(MPS_RESOURCE, &[&share[0]]).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &[&share[0]]).await.unwrap();

    // The agent still reports XIDs and failed remappings of other GPUs.
    machine.simgpu(&["xid", "1", "48"]);
    machine.simgpu(&["set", "2", "remap-failed=on"]);
    let both = |status: &GpuNodeStatus| {
        health_reason(status, 1) == "ResetRequired" && health_reason(status, 2) == "RowRemapFailed"
    };
    let status = machine.wait_for_status("the faults of other GPUs", both).await;
    assert_eq!((health_reason(&status, 0), health_reason(&status, 3)), ("", "GpuUnreachable"));

    machine.simgpu(&["clear"]);
    machine.wait_for_status("GPU 3 has recovered", |status| status.gpus[3].health.healthy).await;
    let seen = machine.wait_for_healthy(MPS_RESOURCE, 20).await;
    assert_eq!(seen.endpoints[MPS_RESOURCE].devices.len(), 40);
}

#[tokio::test]
async fn a_gpu_that_hangs_before_the_first_answer_does_not_block_other_gpus() {
    let mut machine = Machine::new(&["4xH200"]);
    machine.simgpu(&["hang", "nvmlDeviceGetMemoryInfo*", "--gpu", "3"]);
    machine.set_spec("first", ten_share_specs(&machine.uuids));
    machine.start_mps_host();
    machine.start_agent(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, 30).await;
    let reported = |status: &GpuNodeStatus| condition(status, "GpusHealthy") == ("False", "GpuUnhealthy");
    let status = machine.wait_for_status("the GPU is reported", reported).await;
    let healthy = status.conditions.iter().find(|condition| condition.type_ == "GpusHealthy").unwrap();
    assert_eq!((healthy.message.as_str(), status.gpus.len()), ("GPU 3: NVML did not answer for 20 s", 3));
    machine.simgpu(&["clear"]);
    machine.wait_for_healthy(MPS_RESOURCE, 40).await;
    machine
        .wait_for_status("all GPUs are healthy", |status| condition(status, "GpusHealthy") == ("True", "Healthy"))
        .await;
}

#[tokio::test]
async fn a_gpu_that_hangs_during_the_registration_of_events_does_not_block_events_of_other_gpus() {
    let mut machine = Machine::new(&["2xH200"]);
    machine.simgpu(&["hang", "nvmlDeviceRegisterEvents", "--gpu", "0"]);
    machine.set_spec("first", vec![timeslice_spec(&machine.uuids[0], 4), timeslice_spec(&machine.uuids[1], 4)]);
    machine.start_agent(&[]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 8).await;
    // The driver reports no events that precede the registration, so send XIDs until the agent
    // reports one.
    let reported = || {
        machine.simgpu(&["xid", "1", "48"]);
        let status: GpuNodeStatus =
            serde_json::from_slice(&std::fs::read(machine.path("spec/status.json")).ok()?).ok()?;
        (health_reason(&status, 1) == "ResetRequired").then_some(())
    };
    machine.wait_until("an XID of the other GPU", reported).await;
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
}

#[tokio::test]
async fn a_removed_gpu_remains_in_the_status_until_an_administrator_forgets_it() {
    let mut machine = Machine::start(&["3xH200"], ten_share_specs);
    machine.wait_for_healthy(MPS_RESOURCE, 30).await;
    machine.reboot();
    machine.kubelet.restart().unwrap();
    machine.simgpu(&["remove", "1"]);
    machine.start_mps_host();
    machine.start_agent(&[]);
    let missing = |status: &GpuNodeStatus| {
        condition(status, "GpusPresent") == ("False", "GpuMissing") && condition(status, "Applied").0 == "True"
    };
    let status = machine.wait_for_status("the GPU is missing", missing).await;
    let lost = status.gpus.iter().find(|gpu| gpu.uuid == machine.uuids[1]).unwrap();
    assert_eq!((lost.health.class.as_str(), lost.health.reason.as_str()), ("Lost", "GpuMissing"));
    assert_eq!((status.gpus.len(), status.expected_gpus), (3, 3));
    let message = &status.conditions.iter().find(|condition| condition.type_ == "GpusPresent").unwrap().message;
    assert!(message.starts_with("NVML lists 2 of 3 GPUs"), "{message}");
    machine.wait_for_healthy(MPS_RESOURCE, 20).await;
    let metrics = || {
        (
            machine.metric_without_labels("cleave_agent_expected_gpus"),
            machine.metric_without_labels("cleave_agent_missing_gpus"),
        )
    };
    machine.wait_until("the metrics", || (metrics() == (Some(3.0), Some(1.0))).then_some(())).await;
    machine.wait_until("the Event", || machine.events().contains(&"GpuMissing".to_owned()).then_some(())).await;

    // A restarted agent remembers when NVML stopped listing the GPU.
    let since = lost.health.since.clone();
    machine.kill_agent();
    std::fs::remove_file(machine.path("spec/status.json")).unwrap();
    machine.start_agent(&[]);
    let status = machine.wait_for_status("the GPU is still missing", missing).await;
    assert_eq!(status.gpus.iter().find(|gpu| gpu.uuid == machine.uuids[1]).unwrap().health.since, since);

    let mut specs = ten_share_specs(&machine.uuids);
    specs[1].forgotten = since;
    machine.set_spec("forgotten", specs);
    let forgotten = |status: &GpuNodeStatus| {
        status.gpus.len() == 2 && status.expected_gpus == 2 && condition(status, "GpusPresent").0 == "True"
    };
    machine.wait_for_status("the GPU is forgotten", forgotten).await;
    let unlisted = |seen: &cleave_kubelet::fake::FakeKubeletState| {
        let endpoint = &seen.endpoints[MPS_RESOURCE];
        (endpoint.devices.len(), endpoint.healthy_ids().len()) == (20, 20)
    };
    machine.wait_for_view("the forgotten GPU's shares are no longer listed", unlisted).await;
    machine.wait_until("the Event", || machine.events().contains(&"GpuForgotten".to_owned()).then_some(())).await;

    machine.simgpu(&["restore", "1"]);
    trigger_gpu_read(&machine);
    machine.wait_for_healthy(MPS_RESOURCE, 30).await;
}
