//! Tests quiesced GPUs. No process of Cleave uses a quiesced GPU, so an administrator can reset it.
//! If all GPUs of a node are quiesced, the administrator can also unload the driver. Like the real
//! driver, the simulated driver regards a process with an open NVML session as a user of the GPUs.
use cleave_api::gpunode::{GpuNodeStatus, GpuSpec};

use crate::machine::{MPS_RESOURCE, Machine, container_devices, mps_spec, share_ids};

fn to_quiesced(spec: GpuSpec) -> GpuSpec {
    GpuSpec { quiesced: true, cordoned: true, ..spec }
}

fn is_quiesced(status: &GpuNodeStatus, index: usize) -> bool {
    status.gpus[index].quiesce.as_ref().is_some_and(|quiesce| quiesce.quiesced)
}

/// Runs a `simgpu` command that must fail. Returns its error text.
fn simgpu_error(machine: &Machine, arguments: &[&str]) -> String {
    let output = machine.command("simgpu").args(arguments).output().unwrap();
    assert!(!output.status.success(), "simgpu {arguments:?} succeeded");
    String::from_utf8(output.stderr).unwrap()
}

#[tokio::test]
async fn a_quiesced_gpu_can_be_reset_while_another_one_serves() {
    let machine = Machine::start(&["2xH200"], |gpus| vec![mps_spec(&gpus[0], 4), mps_spec(&gpus[1], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
    assert!(simgpu_error(&machine, &["reset", "1"]).contains("in use"));
    let specs = |one| vec![mps_spec(&machine.uuids[0], 4), one];
    machine.set_spec("quiesce", specs(to_quiesced(mps_spec(&machine.uuids[1], 4))));
    let status = machine.wait_for_status("quiesced", |status| is_quiesced(status, 1)).await;
    assert!(status.gpus[0].health.healthy && status.gpus[0].quiesce.is_none());
    assert_eq!(status.gpus[1].health.reason, "Quiesced");
    machine.simgpu(&["reset", "1"]);
    // The four shares of the other GPU are still Healthy.
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    machine.set_spec("resume", specs(mps_spec(&machine.uuids[1], 4)));
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
    machine.wait_until("the Events", || (machine.events() == ["GpuQuiesced", "GpuResumed"]).then_some(())).await;
}

#[tokio::test]
async fn a_quiesce_waits_for_pods_and_survives_a_restart_of_the_agent() {
    let mut machine = Machine::start(&["H200"], |gpus| vec![mps_spec(&gpus[0], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    let ids = share_ids(&machine.uuids[0], 0..4);
    machine.kubelet.allocate(MPS_RESOURCE, &[&ids[0]]).await.unwrap();
    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, &ids[..1])]);
    machine.wait_for_status("the pod", |status| !status.gpus[0].allocations.is_empty()).await;
    machine.set_spec("quiesce", vec![to_quiesced(mps_spec(&machine.uuids[0], 4))]);
    let waits = |status: &GpuNodeStatus| {
        status.gpus[0].quiesce.as_ref().is_some_and(|quiesce| quiesce.message.contains("in use by ns/p"))
    };
    let status = machine.wait_for_status("the quiesce waits for the pod", waits).await;
    assert_eq!(status.gpus[0].mps[0].state, "Active", "the pod's daemon runs");
    machine.pods.set_devices(&[]);
    machine.wait_for_status("quiesced", |status| is_quiesced(status, 0)).await;

    machine.kill_agent();
    std::fs::remove_file(machine.path("spec/status.json")).unwrap();
    machine.start_agent(&[]);
    machine.wait_for_status("still quiesced", |status| is_quiesced(status, 0)).await;
    machine.simgpu(&["unload"]);
    machine.simgpu(&["driver", "--present", "true", "--version", "590.1"]);
    machine.set_spec("resume", vec![mps_spec(&machine.uuids[0], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    machine.wait_for_status("the new driver", |status| status.driver == "590.1").await;
}

#[tokio::test]
async fn a_sensor_that_hangs_on_one_gpu_does_not_keep_another_one_from_being_quiesced() {
    let mut machine = Machine::start(&["2xH200"], |gpus| vec![mps_spec(&gpus[0], 4), mps_spec(&gpus[1], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
    machine.simgpu(&["hang", "nvmlDeviceGetPowerUsage", "--gpu", "0"]);
    let uuid = format!("uuid=\"{}\"", machine.uuids[0]);
    // Reading a metric is a scrape, which makes the agent query the sensors.
    let hangs = || (machine.metric("cleave_gpu_up", &[&uuid]) == Some(0.0)).then_some(());
    machine.wait_until("the sensor hangs", hangs).await;

    machine.set_spec("quiesce", vec![mps_spec(&machine.uuids[0], 4), to_quiesced(mps_spec(&machine.uuids[1], 4))]);
    machine.wait_for_status("quiesced", |status| is_quiesced(status, 1)).await;
    machine.simgpu(&["reset", "1"]);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    let share = share_ids(&machine.uuids[0], [0]);
    machine.kubelet.allocate(MPS_RESOURCE, &[&share[0]]).await.unwrap();
    assert!(machine.agent_is_running(), "the agent was not restarted");
    machine.simgpu(&["clear"]);
    machine.set_spec("resume", vec![mps_spec(&machine.uuids[0], 4), mps_spec(&machine.uuids[1], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
}

#[tokio::test]
async fn a_driver_that_hangs_in_its_initialization_blocks_neither_the_main_loop_nor_a_quiesce() {
    let mut machine = Machine::start(&["H200"], |gpus| vec![mps_spec(&gpus[0], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    machine.kill_agent();
    machine.simgpu(&["hang", "nvmlInit*"]);
    std::fs::remove_file(machine.path("spec/status.json")).unwrap();
    machine.start_agent(&[]);
    let served = |status: &GpuNodeStatus| status.plan_id.is_empty() && status.gpus[0].slices[0].total == 4;
    machine.wait_for_status("the agent serves the state of the checkpoint", served).await;
    machine.set_spec("quiesce", vec![to_quiesced(mps_spec(&machine.uuids[0], 4))]);
    machine.wait_for_status("quiesced", |status| is_quiesced(status, 0)).await;
    machine.simgpu(&["clear"]);
    machine.set_spec("resume", vec![mps_spec(&machine.uuids[0], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
}
