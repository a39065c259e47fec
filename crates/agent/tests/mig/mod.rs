//! Tests the agent as a process on simulated GPUs that are partitioned by MIG.
use std::fs;
use std::process::Child;

use cleave_api::gpunode::{
    GpuNodeStatus, GpuSpec, MigInstanceSpec, MigPartition, MpsPartition, Partition, TimeSlicedPartition, Whole,
};
use cleave_kubelet::fake::FakeKubeletState;
use serde_json::Value;

use crate::machine::{
    MPS_RESOURCE, Machine, TIMESLICE_RESOURCE, WHOLE_GPU_RESOURCE, container_devices, kill_child, mps_spec, spec,
    timeslice_spec,
};

const MIG_3G_RESOURCE: &str = "nvidia.com/mig-3g.40gb";
const MIG_2G_RESOURCE: &str = "nvidia.com/mig-2g.20gb";
const MIG_1G_RESOURCE: &str = "nvidia.com/mig-1g.10gb";

/// How the agent serves an instance.
#[derive(Clone, Copy)]
enum InstanceMode {
    Whole,
    Shares(u32),
    Replicas(u32),
}

/// Returns the spec of a GPU with these MIG instances. Each instance has a profile, a first memory
/// slice and a mode.
fn mig_spec(gpu: &str, instances: &[(&str, u32, InstanceMode)]) -> GpuSpec {
    let none = MigPartition::default();
    let instance = |&(profile, start, served_as): &(&str, u32, InstanceMode)| MigInstanceSpec {
        profile: profile.into(),
        start,
        partition: match served_as {
            InstanceMode::Whole => {
                MigPartition { whole: Some(Whole { resource: format!("nvidia.com/mig-{profile}") }), ..none.clone() }
            }
            InstanceMode::Shares(units) => {
                let shares: MpsPartition = mps_spec(gpu, units).partition.mps.unwrap();
                MigPartition { mps: Some(shares), ..none.clone() }
            }
            InstanceMode::Replicas(replicas) => {
                let replicas: TimeSlicedPartition = timeslice_spec(gpu, replicas).partition.time_slicing.unwrap();
                MigPartition { time_slicing: Some(replicas), ..none.clone() }
            }
        },
    };
    let mig = Some(instances.iter().map(instance).collect());
    spec(gpu, Partition { mig, ..Partition::default() })
}

impl Machine {
    /// Returns the first memory slice of each GPU instance in the driver, and its UUID if it has a
    /// compute instance.
    fn instances(&self, gpu: usize) -> Vec<(u64, Option<String>)> {
        let shown: Value = serde_json::from_str(&self.simgpu(&["show", "--output", "json"])).unwrap();
        let uuid = |instance: &Value| Some(instance["compute"].get(0)?["uuid"].as_str()?.to_owned());
        let instances = shown["gpus"][gpu]["instances"].as_array().unwrap();
        let mut found: Vec<_> =
            instances.iter().map(|gi| (gi["placement"]["start"].as_u64().unwrap(), uuid(gi))).collect();
        found.sort();
        found
    }

    async fn wait_until_applied(&self, plan: &str) -> GpuNodeStatus {
        self.wait_for_status(plan, |status| status.plan_id == plan).await
    }

    /// Waits for a status with a step whose message contains `what`, and returns the status.
    async fn wait_for_message(&self, what: &str) -> GpuNodeStatus {
        self.wait_for_status(what, |status| status.steps.iter().any(|step| step.message.contains(what))).await
    }
}

/// Returns the ids of a resource's healthy devices, according to the kubelet.
fn healthy_ids(seen: &FakeKubeletState, resource: &str) -> Vec<String> {
    seen.endpoints[resource].healthy_ids().iter().map(ToString::to_string).collect()
}

/// A program outside Kubernetes that uses a device. Dropping the value kills the program.
struct ProgramOutsideKubernetes(Child);

impl Drop for ProgramOutsideKubernetes {
    fn drop(&mut self) {
        kill_child(&mut self.0);
    }
}

#[tokio::test]
async fn a_gpu_is_partitioned_by_mig_repartitioned_around_a_pod_and_made_whole_again() {
    let machine = Machine::start(&["H100-80", "H100-80"], |_| vec![]);
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 2).await;
    let gpu = machine.uuids[0].clone();
    let first = [
        ("3g.40gb", 4, InstanceMode::Whole),
        ("2g.20gb", 2, InstanceMode::Shares(4)),
        ("1g.10gb", 0, InstanceMode::Replicas(3)),
    ];
    machine.set_spec("partitioned", vec![mig_spec(&gpu, &first)]);
    let status = machine.wait_until_applied("partitioned").await;
    assert_eq!(status.gpus[0].mode, "Mig");
    let starts: Vec<_> = status.gpus[0].slices.iter().map(|slice| (slice.resource.as_str(), slice.start)).collect();
    assert!(
        starts.contains(&(MIG_3G_RESOURCE, Some(4)))
            && starts.contains(&(MPS_RESOURCE, Some(2)))
            && starts.contains(&(TIMESLICE_RESOURCE, Some(0)))
    );
    let three = healthy_ids(&machine.wait_for_healthy(MIG_3G_RESOURCE, 1).await, MIG_3G_RESOURCE);
    let shares = healthy_ids(&machine.wait_for_healthy(MPS_RESOURCE, 4).await, MPS_RESOURCE);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 3).await;
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 1).await;

    let given = machine.kubelet.allocate(MIG_3G_RESOURCE, &[&three[0]]).await.unwrap();
    let device = three[0].split("::").next().unwrap();
    assert_eq!(given.envs["NVIDIA_VISIBLE_DEVICES"], device);
    let seen = machine.run_client(&given, &[]);
    assert_eq!(
        (seen["uuid"].as_str(), seen["sms"].as_u64(), seen["viaMps"].as_bool()),
        (Some(device), Some(60), Some(false))
    );
    let two = [shares[0].as_str(), shares[1].as_str()];
    let given = machine.kubelet.allocate(MPS_RESOURCE, &two).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &two).await.unwrap();
    let seen = machine.run_client(&given, &[]);
    assert_eq!(
        (seen["viaMps"].as_bool(), seen["sms"].as_u64(), seen["limitMiB"].as_u64()),
        (Some(true), Some(16), Some(5000)),
        "{seen}"
    );

    // A pod uses the 3g instance. The agent must replace all other instances.
    machine.pods.set_devices(&[container_devices("train", MIG_3G_RESOURCE, &three)]);
    let before = machine.wait_for_healthy(MIG_3G_RESOURCE, 1).await;
    let kept = machine.instances(0).into_iter().find(|(start, _)| *start == 4).unwrap();
    machine.set_spec(
        "again",
        vec![mig_spec(
            &gpu,
            &[
                ("3g.40gb", 4, InstanceMode::Whole),
                ("1g.10gb", 0, InstanceMode::Whole),
                ("1g.10gb", 1, InstanceMode::Whole),
            ],
        )],
    );
    let after = machine.wait_for_healthy(MIG_1G_RESOURCE, 2).await;
    machine.wait_until_applied("again").await;
    assert!(machine.instances(0).contains(&kept), "the instance was not replaced");
    for (resource, stream) in [(MIG_3G_RESOURCE, "the GPU's stream"), (WHOLE_GPU_RESOURCE, "the other GPU's stream")] {
        let lists = |seen: &FakeKubeletState| {
            let registrations = seen.registrations.iter().filter(|one| one.request.resource_name == resource);
            (seen.endpoints[resource].lists, registrations.count())
        };
        assert_eq!(lists(&after), lists(&before), "{stream} sent no list");
    }
    machine.wait_until("the daemon exits", || machine.mps_host_status()?.daemons.is_empty().then_some(())).await;

    // The pod still uses the 3g instance, so the change must wait, and its step must name the pod.
    machine.set_spec("whole", vec![]);
    machine.wait_for_message("in use by ns/train").await;
    machine.wait_until("the free instances are destroyed", || (machine.instances(0).len() == 1).then_some(())).await;
    assert!(machine.instances(0).contains(&kept));
    machine.pods.set_devices(&[]);
    machine.wait_until_applied("whole").await;
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 2).await;
    let show = machine.simgpu(&["show"]);
    assert!(!show.contains("Exclusive"), "{show}");
    assert!(machine.events().iter().all(|reason| reason == "MigChanged"), "{:?}", machine.events());
}

#[tokio::test]
async fn a_creation_that_nvml_refuses_is_rolled_back_and_reported_and_blocks_no_other_gpu() {
    let machine = Machine::start(&["2xH100-80"], |_| vec![]);
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 2).await;
    let call = "nvmlGpuInstanceCreateComputeInstance";
    machine.simgpu(&["fail", call, "--gpu", "0", "--code", "INSUFFICIENT_RESOURCES"]);
    let wanted = |start| {
        machine.uuids.iter().map(|gpu| mig_spec(gpu, &[("2g.20gb", start, InstanceMode::Whole)])).collect::<Vec<_>>()
    };
    machine.set_spec("first", wanted(0));
    machine.wait_for_healthy(MIG_2G_RESOURCE, 1).await;
    let status =
        machine.wait_for_message("failed 5 times; the agent does not retry until the spec or the GPU changes").await;
    let failed = status.steps.iter().find(|step| step.result == "Failed").unwrap();
    assert_eq!(
        (failed.gpu.as_str(), failed.action.as_str()),
        (machine.uuids[0].as_str(), "create MIG instance 2g.20gb at 0")
    );
    assert!(failed.message.contains(call), "{failed:?}");
    assert_eq!((machine.instances(0).len(), machine.instances(1).len()), (0, 1), "the failed instance is rolled back");
    assert!(machine.events().contains(&"MigFailed".to_owned()));
    machine.simgpu(&["clear"]);
    machine.set_spec("second", wanted(2));
    machine.wait_until_applied("second").await;
    machine.wait_for_healthy(MIG_2G_RESOURCE, 2).await;
    // NVML refuses a creation once, and the agent repeats the creation.
    machine.simgpu(&["fail", "nvmlDeviceCreateGpuInstanceWithPlacement", "--gpu", "0", "--count", "1"]);
    machine.set_spec("third", wanted(4));
    machine.wait_until_applied("third").await;
}

#[tokio::test]
async fn a_hanging_creation_blocks_only_its_own_gpu() {
    let machine = Machine::start(&["3xH100-80"], |gpus| vec![timeslice_spec(&gpus[2], 4)]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    machine.simgpu(&["hang", "nvmlDeviceCreateGpuInstanceWithPlacement", "--gpu", "0"]);
    let with_instance = |gpu: usize| mig_spec(&machine.uuids[gpu], &[("1g.10gb", 3, InstanceMode::Whole)]);
    machine.set_spec("partitioned", vec![with_instance(0), with_instance(1), timeslice_spec(&machine.uuids[2], 4)]);
    let created = healthy_ids(&machine.wait_for_healthy(MIG_1G_RESOURCE, 1).await, MIG_1G_RESOURCE);
    machine.kubelet.allocate(MIG_1G_RESOURCE, &[&created[0]]).await.unwrap();
    machine.kubelet.allocate(TIMESLICE_RESOURCE, &[&format!("{}::1", machine.uuids[2])]).await.unwrap();
    machine.wait_for_message("the driver has not answered").await;
    machine.set_spec(
        "other",
        vec![
            with_instance(0),
            mig_spec(&machine.uuids[1], &[("1g.10gb", 3, InstanceMode::Whole), ("1g.10gb", 4, InstanceMode::Whole)]),
            timeslice_spec(&machine.uuids[2], 4),
        ],
    );
    machine.wait_for_healthy(MIG_1G_RESOURCE, 2).await;
    machine.simgpu(&["clear"]);
    machine.wait_until_applied("other").await;
    machine.wait_for_healthy(MIG_1G_RESOURCE, 3).await;
}

#[tokio::test]
async fn an_instance_that_a_program_outside_kubernetes_uses_is_kept() {
    let machine = Machine::start(&["H100-80"], |gpus| vec![mig_spec(&gpus[0], &[("1g.10gb", 0, InstanceMode::Whole)])]);
    machine.wait_until_applied("first").await;
    let uuid = machine.instances(0)[0].1.clone().unwrap();
    let program = ProgramOutsideKubernetes(machine.start_program_outside_pods(&uuid));
    machine
        .wait_until("the program runs", || {
            machine.simgpu(&["processes"]).contains(&program.0.id().to_string()).then_some(())
        })
        .await;
    machine.set_spec("second", vec![mig_spec(&machine.uuids[0], &[("2g.20gb", 0, InstanceMode::Whole)])]);
    machine.wait_for_message(&format!("in use by processes outside of Kubernetes (PID {})", program.0.id())).await;
    assert_eq!(machine.instances(0), [(0, Some(uuid))]);
    drop(program);
    machine.wait_until_applied("second").await;
}

#[tokio::test]
async fn the_mig_mode_of_an_ampere_gpu_changes_although_the_agent_watches_the_gpu() {
    let machine = Machine::start(&["A100-80"], |gpus| vec![mig_spec(&gpus[0], &[("1g.10gb", 0, InstanceMode::Whole)])]);
    machine.wait_until_applied("first").await;
    machine.wait_for_healthy(MIG_1G_RESOURCE, 1).await;
}

#[tokio::test]
async fn a_gpu_whose_mig_mode_cannot_be_enabled_serves_its_old_slices_again() {
    let machine = Machine::start(&["H100-80"], |gpus| vec![mps_spec(&gpus[0], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    machine.simgpu(&["fail", "nvmlDeviceSetMigMode", "--code", "UNKNOWN"]);
    machine.set_spec("mig", vec![mig_spec(&machine.uuids[0], &[("1g.10gb", 0, InstanceMode::Whole)])]);
    machine.wait_for_healthy(MPS_RESOURCE, 0).await;
    machine.wait_for_message("does not retry until the spec or the GPU changes").await;
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    machine.simgpu(&["clear"]);
    machine.set_spec("other", vec![mig_spec(&machine.uuids[0], &[("2g.20gb", 0, InstanceMode::Whole)])]);
    machine.wait_for_healthy(MIG_2G_RESOURCE, 1).await;
    machine.wait_until_applied("other").await;
}

#[tokio::test]
async fn a_mig_mode_that_needs_a_reset_waits_for_an_administrator() {
    let mut machine = Machine::new(&["A100-80"]);
    machine.simgpu(&["set", "0", "mig-needs-reset=on"]);
    machine.set_spec("first", vec![mig_spec(&machine.uuids[0], &[("1g.10gb", 0, InstanceMode::Whole)])]);
    machine.start_mps_host();
    machine.start_agent(&[]);
    let status = machine.wait_for_message("reset the GPU (nvidia-smi --gpu-reset), or reboot the node").await;
    assert_eq!(status.steps.iter().find(|step| step.action == "turn MIG mode on").unwrap().result, "Waiting");
    assert_eq!(status.gpus[0].mig.as_ref().unwrap().pending, Some(true));
    let wanted = mig_spec(&machine.uuids[0], &[("1g.10gb", 0, InstanceMode::Whole)]);
    machine.set_spec("quiesce", vec![GpuSpec { quiesced: true, ..wanted.clone() }]);
    let done = |status: &GpuNodeStatus| status.gpus[0].quiesce.as_ref().is_some_and(|quiesce| quiesce.quiesced);
    machine.wait_for_status("quiesced", done).await;
    machine.simgpu(&["reset", "0"]);
    machine.set_spec("first", vec![wanted]);
    machine.wait_until_applied("first").await;
    machine.wait_for_healthy(MIG_1G_RESOURCE, 1).await;
}

#[tokio::test]
async fn a_restarted_agent_completes_the_change_of_the_killed_agent() {
    let mut machine =
        Machine::start(&["H100-80"], |gpus| vec![mig_spec(&gpus[0], &[("1g.10gb", 6, InstanceMode::Whole)])]);
    let used = healthy_ids(&machine.wait_for_healthy(MIG_1G_RESOURCE, 1).await, MIG_1G_RESOURCE);
    machine.wait_until_applied("first").await;
    let given = machine.kubelet.allocate(MIG_1G_RESOURCE, &[&used[0]]).await.unwrap();
    machine.pods.set_devices(&[container_devices("p", MIG_1G_RESOURCE, &used)]);
    machine.wait_for_status("the pod", |status| status.gpus.iter().any(|gpu| !gpu.allocations.is_empty())).await;
    let kept = machine.instances(0)[0].clone();
    let gpu = machine.uuids[0].clone();
    let partitions: [&[(&str, u32, InstanceMode)]; 2] = [
        &[
            ("1g.10gb", 6, InstanceMode::Whole),
            ("2g.20gb", 0, InstanceMode::Shares(2)),
            ("2g.20gb", 4, InstanceMode::Whole),
        ],
        &[
            ("1g.10gb", 6, InstanceMode::Whole),
            ("1g.20gb", 4, InstanceMode::Whole),
            ("3g.40gb", 0, InstanceMode::Shares(2)),
        ],
    ];
    let calls = [
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlComputeInstanceDestroy",
        "nvmlGpuInstanceDestroy",
    ];
    machine.set_spec("0", vec![mig_spec(&gpu, partitions[1])]);
    machine.wait_until_applied("0").await;
    for (round, call) in calls.into_iter().enumerate() {
        let plan = format!("{}", round + 1);
        // Kill the agent while the first call of this kind hangs.
        machine.simgpu(&["hang", call, "--count", "1"]);
        machine.set_spec(&plan, vec![mig_spec(&gpu, partitions[round % 2])]);
        machine
            .wait_until(call, || {
                let shown: Value = serde_json::from_str(&machine.simgpu(&["show", "--output", "json"])).unwrap();
                (shown["faults"][0]["remaining"].as_u64() == Some(0)).then_some(())
            })
            .await;
        machine.kill_agent();
        machine.simgpu(&["clear"]);
        assert!(machine.instances(0).contains(&kept), "{call}");
        if call == "nvmlGpuInstanceCreateComputeInstance" || call == "nvmlGpuInstanceDestroy" {
            assert!(machine.instances(0).iter().any(|(_, uuid)| uuid.is_none()), "{call}: one instance is incomplete");
        }
        machine.start_agent(&[]);
        machine.wait_until_applied(&plan).await;
        assert!(machine.instances(0).contains(&kept) && machine.instances(0).len() == 3, "{call}");
        machine.wait_for_healthy(MPS_RESOURCE, 2).await;
        assert_eq!(machine.run_client(&given, &[])["uuid"].as_str(), kept.1.as_deref(), "{call}");
    }
}

#[tokio::test]
async fn a_container_gets_the_capability_devices_of_its_instance_by_device_nodes_and_by_cdi() {
    let mut machine = Machine::new(&["H100-80"]);
    let root = machine.path("root");
    let touch = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    for node in ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia-caps/nvidia-cap21", "nvidia-caps/nvidia-cap22"] {
        touch(&format!("dev/{node}"), "");
    }
    // In NVML, the 3g instance at memory slice 4 has the id 2.
    touch("proc/driver/nvidia/capabilities/gpu0/mig/gi2/access", "DeviceFileMinor: 21\nDeviceFileMode: 292\n");
    touch("proc/driver/nvidia/capabilities/gpu0/mig/gi2/ci0/access", "DeviceFileMinor: 22\nDeviceFileMode: 292\n");
    machine.set_spec("first", vec![mig_spec(&machine.uuids[0], &[("3g.40gb", 4, InstanceMode::Whole)])]);
    machine.start_mps_host();
    let expected = [
        "/dev/nvidia-caps/nvidia-cap21",
        "/dev/nvidia-caps/nvidia-cap22",
        "/dev/nvidia-uvm",
        "/dev/nvidia0",
        "/dev/nvidiactl",
    ];
    for strategy in ["device-nodes", "cdi"] {
        let cdi = machine.path("cdi");
        let (root, cdi_dir) = (root.to_str().unwrap(), cdi.to_str().unwrap());
        let driver = ["--driver-root", "/opt/nvidia"];
        let given = ["--device-list-strategy", strategy, "--host-root", root, "--cdi-dir", cdi_dir];
        machine.start_agent(&[given.as_slice(), &driver].concat());
        machine
            .wait_for_view(strategy, |seen| {
                seen.endpoints.get(MIG_3G_RESOURCE).is_some_and(|endpoint| endpoint.connected)
            })
            .await;
        let ids = healthy_ids(&machine.wait_for_healthy(MIG_3G_RESOURCE, 1).await, MIG_3G_RESOURCE);
        let uuid = ids[0].split("::").next().unwrap();
        let given = machine.kubelet.allocate(MIG_3G_RESOURCE, &[&ids[0]]).await.unwrap();
        machine.kubelet.pre_start(MIG_3G_RESOURCE, &[&ids[0]]).await.unwrap();
        assert_eq!(given.envs["NVIDIA_VISIBLE_DEVICES"], "void");
        if strategy == "cdi" {
            let names: Vec<&str> = given.cdi_devices.iter().map(|device| device.name.as_str()).collect();
            assert_eq!(names, [format!("cleave.dev/gpu={uuid}")]);
            let text = fs::read(cdi.join("cleave.dev-gpu.json")).unwrap();
            let spec: Value = serde_json::from_slice(&text).unwrap();
            let device = spec["devices"].as_array().unwrap().iter().find(|device| device["name"] == uuid).unwrap();
            let mut paths: Vec<&str> = device["containerEdits"]["deviceNodes"]
                .as_array()
                .unwrap()
                .iter()
                .map(|node| node["path"].as_str().unwrap())
                .collect();
            paths.sort_unstable();
            assert_eq!(paths, expected);
        } else {
            let paths: Vec<&str> = given.devices.iter().map(|device| device.host_path.as_str()).collect();
            assert_eq!(paths, expected);
        }
        machine.kill_agent();
        machine.wait_for_view("the end", |seen| !seen.endpoints[MIG_3G_RESOURCE].connected).await;
    }
}
