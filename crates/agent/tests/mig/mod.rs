//! GPUs that are cut by MIG: the agent as a process, on simulated GPUs.
use std::fs;
use std::process::Child;

use cleave_api::gpunode::{
    GpuNodeStatus, GpuSpec, MigInstanceSpec, MigPartition, MpsPartition, Partition, TimeSlicedPartition, Whole,
};
use cleave_kubelet::fake::Seen;
use serde_json::Value;

use crate::machine::{MPS, Machine, SLICED, WHOLE, held, kill_child, mps, sliced, spec};

const THREE: &str = "nvidia.com/mig-3g.40gb";
const TWO: &str = "nvidia.com/mig-2g.20gb";
const ONE: &str = "nvidia.com/mig-1g.10gb";

/// How an instance is served.
#[derive(Clone, Copy)]
enum As {
    Whole,
    Shares(u32),
    Turns(u32),
}

fn cut(gpu: &str, instances: &[(&str, u32, As)]) -> GpuSpec {
    let none = MigPartition::default();
    let instance = |&(profile, start, way): &(&str, u32, As)| MigInstanceSpec {
        profile: profile.into(),
        start,
        partition: match way {
            As::Whole => {
                MigPartition { whole: Some(Whole { resource: format!("nvidia.com/mig-{profile}") }), ..none.clone() }
            }
            As::Shares(units) => {
                let shares: MpsPartition = mps(gpu, units).partition.mps.unwrap();
                MigPartition { mps: Some(shares), ..none.clone() }
            }
            As::Turns(replicas) => {
                let turns: TimeSlicedPartition = sliced(gpu, replicas).partition.time_slicing.unwrap();
                MigPartition { time_slicing: Some(turns), ..none.clone() }
            }
        },
    };
    let mig = Some(instances.iter().map(instance).collect());
    spec(gpu, Partition { mig, ..Partition::default() })
}

impl Machine {
    /// The instances of a GPU as the driver has them: first slice, and UUID where there is a
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

    async fn applied(&self, plan: &str) -> GpuNodeStatus {
        self.status(plan, |status| status.plan_id == plan).await
    }

    async fn message(&self, what: &str) -> GpuNodeStatus {
        self.status(what, |status| status.steps.iter().any(|step| step.message.contains(what))).await
    }
}

fn healthy(seen: &Seen, resource: &str) -> Vec<String> {
    seen.endpoints[resource].healthy().iter().map(ToString::to_string).collect()
}

/// A program that knows nothing of Kubernetes.
struct Holder(Child);

impl Drop for Holder {
    fn drop(&mut self) {
        kill_child(&mut self.0);
    }
}

#[tokio::test]
async fn a_gpu_is_cut_shared_inside_its_instances_cut_again_around_a_pod_and_comes_back_whole() {
    let machine = Machine::running(&["H100-80", "H100-80"], |_| vec![]);
    machine.healthy(WHOLE, 2).await;
    let gpu = machine.uuids[0].clone();
    let first = [("3g.40gb", 4, As::Whole), ("2g.20gb", 2, As::Shares(4)), ("1g.10gb", 0, As::Turns(3))];
    machine.want("cut", vec![cut(&gpu, &first)]);
    let status = machine.applied("cut").await;
    assert_eq!(status.gpus[0].mode, "Mig");
    let starts: Vec<_> = status.gpus[0].slices.iter().map(|slice| (slice.resource.as_str(), slice.start)).collect();
    assert!(
        starts.contains(&(THREE, Some(4))) && starts.contains(&(MPS, Some(2))) && starts.contains(&(SLICED, Some(0)))
    );
    let three = healthy(&machine.healthy(THREE, 1).await, THREE);
    let shares = healthy(&machine.healthy(MPS, 4).await, MPS);
    machine.healthy(SLICED, 3).await;
    machine.healthy(WHOLE, 1).await;

    let given = machine.kubelet.allocate(THREE, &[&three[0]]).await.unwrap();
    let device = three[0].split("::").next().unwrap();
    assert_eq!(given.envs["NVIDIA_VISIBLE_DEVICES"], device);
    let seen = machine.client(&given, &[]);
    assert_eq!(
        (seen["uuid"].as_str(), seen["sms"].as_u64(), seen["viaMps"].as_bool()),
        (Some(device), Some(60), Some(false))
    );
    let two = [shares[0].as_str(), shares[1].as_str()];
    let given = machine.kubelet.allocate(MPS, &two).await.unwrap();
    machine.kubelet.pre_start(MPS, &two).await.unwrap();
    let seen = machine.client(&given, &[]);
    assert_eq!(
        (seen["viaMps"].as_bool(), seen["sms"].as_u64(), seen["limitMiB"].as_u64()),
        (Some(true), Some(16), Some(5000)),
        "{seen}"
    );

    // The 3g is held, all else is made anew around it.
    machine.pods.hold(&[held("train", THREE, &three)]);
    let before = machine.healthy(THREE, 1).await;
    let kept = machine.instances(0).into_iter().find(|(start, _)| *start == 4).unwrap();
    machine.want(
        "again",
        vec![cut(&gpu, &[("3g.40gb", 4, As::Whole), ("1g.10gb", 0, As::Whole), ("1g.10gb", 1, As::Whole)])],
    );
    let after = machine.healthy(ONE, 2).await;
    machine.applied("again").await;
    assert!(machine.instances(0).contains(&kept), "not made anew");
    let lists = |seen: &Seen, resource: &str| {
        (
            seen.endpoints[resource].lists,
            seen.registrations.iter().filter(|r| r.request.resource_name == resource).count(),
        )
    };
    assert_eq!(lists(&after, THREE), lists(&before, THREE), "its stream has said nothing");
    assert_eq!(lists(&after, WHOLE), lists(&before, WHOLE), "nor has the other GPU's");
    machine.until("the end of the daemon", || machine.host_status()?.daemons.is_empty().then_some(())).await;

    // What would take it away waits for its pod, and says so.
    machine.want("whole", vec![]);
    machine.message("in use by ns/train").await;
    machine.until("the free ones go", || (machine.instances(0).len() == 1).then_some(())).await;
    assert!(machine.instances(0).contains(&kept));
    machine.pods.hold(&[]);
    machine.applied("whole").await;
    machine.healthy(WHOLE, 2).await;
    let show = machine.simgpu(&["show"]);
    assert!(!show.contains("Exclusive"), "{show}");
    assert!(machine.events().iter().all(|reason| reason == "MigChanged"), "{:?}", machine.events());
}

#[tokio::test]
async fn what_nvml_refuses_is_rolled_back_told_in_its_words_and_holds_no_other_gpu_up() {
    let machine = Machine::running(&["2xH100-80"], |_| vec![]);
    machine.healthy(WHOLE, 2).await;
    let call = "nvmlGpuInstanceCreateComputeInstance";
    machine.simgpu(&["fail", call, "--gpu", "0", "--code", "INSUFFICIENT_RESOURCES"]);
    let wanted = |start| machine.uuids.iter().map(|gpu| cut(gpu, &[("2g.20gb", start, As::Whole)])).collect::<Vec<_>>();
    machine.want("first", wanted(0));
    machine.healthy(TWO, 1).await;
    let status = machine.message("failed 5 times, and will not be tried again until the spec or the GPU changes").await;
    let failed = status.steps.iter().find(|step| step.result == "Failed").unwrap();
    assert_eq!(
        (failed.gpu.as_str(), failed.action.as_str()),
        (machine.uuids[0].as_str(), "create MIG instance 2g.20gb at 0")
    );
    assert!(failed.message.contains(call), "{failed:?}");
    assert_eq!((machine.instances(0).len(), machine.instances(1).len()), (0, 1), "nothing is left of it");
    assert!(machine.events().contains(&"MigFailed".to_owned()));
    machine.simgpu(&["clear"]);
    machine.want("second", wanted(2));
    machine.applied("second").await;
    machine.healthy(TWO, 2).await;
    // Refused once, it is tried again.
    machine.simgpu(&["fail", "nvmlDeviceCreateGpuInstanceWithPlacement", "--gpu", "0", "--count", "1"]);
    machine.want("third", wanted(4));
    machine.applied("third").await;
}

#[tokio::test]
async fn a_creation_that_hangs_holds_up_its_own_gpu_alone() {
    let machine = Machine::running(&["3xH100-80"], |gpus| vec![sliced(&gpus[2], 4)]);
    machine.healthy(SLICED, 4).await;
    machine.simgpu(&["hang", "nvmlDeviceCreateGpuInstanceWithPlacement", "--gpu", "0"]);
    let of = |gpu: usize| cut(&machine.uuids[gpu], &[("1g.10gb", 3, As::Whole)]);
    machine.want("cut", vec![of(0), of(1), sliced(&machine.uuids[2], 4)]);
    let made = healthy(&machine.healthy(ONE, 1).await, ONE);
    machine.kubelet.allocate(ONE, &[&made[0]]).await.unwrap();
    machine.kubelet.allocate(SLICED, &[&format!("{}::1", machine.uuids[2])]).await.unwrap();
    machine.message("the driver has not answered").await;
    machine.want(
        "other",
        vec![
            of(0),
            cut(&machine.uuids[1], &[("1g.10gb", 3, As::Whole), ("1g.10gb", 4, As::Whole)]),
            sliced(&machine.uuids[2], 4),
        ],
    );
    machine.healthy(ONE, 2).await;
    machine.simgpu(&["clear"]);
    machine.applied("other").await;
    machine.healthy(ONE, 3).await;
}

#[tokio::test]
async fn a_program_outside_of_kubernetes_keeps_its_instance() {
    let machine = Machine::running(&["H100-80"], |gpus| vec![cut(&gpus[0], &[("1g.10gb", 0, As::Whole)])]);
    machine.applied("first").await;
    let uuid = machine.instances(0)[0].1.clone().unwrap();
    let holder = Holder(machine.holder(&uuid));
    machine
        .until("the program", || machine.simgpu(&["processes"]).contains(&holder.0.id().to_string()).then_some(()))
        .await;
    machine.want("second", vec![cut(&machine.uuids[0], &[("2g.20gb", 0, As::Whole)])]);
    machine.message(&format!("in use by processes outside of Kubernetes (pid {})", holder.0.id())).await;
    assert_eq!(machine.instances(0), [(0, Some(uuid))]);
    drop(holder);
    machine.applied("second").await;
}

#[tokio::test]
async fn mig_mode_that_needs_a_reset_waits_for_a_person() {
    let mut machine = Machine::new(&["A100-80"]);
    machine.simgpu(&["set", "0", "mig-needs-reset=on"]);
    machine.want("first", vec![cut(&machine.uuids[0], &[("1g.10gb", 0, As::Whole)])]);
    machine.start_host();
    machine.start_agent(&[]);
    let status = machine.message("reset it (nvidia-smi --gpu-reset), or restart the node").await;
    assert_eq!(status.steps.iter().find(|step| step.action == "turn MIG mode on").unwrap().result, "Waiting");
    assert_eq!(status.gpus[0].mig.as_ref().unwrap().pending, Some(true));
    machine.simgpu(&["reset", "0"]);
    machine.applied("first").await;
    machine.healthy(ONE, 1).await;
}

#[tokio::test]
async fn an_agent_that_is_killed_in_a_change_is_followed_by_one_that_ends_it() {
    let mut machine = Machine::running(&["H100-80"], |gpus| vec![cut(&gpus[0], &[("1g.10gb", 6, As::Whole)])]);
    let used = healthy(&machine.healthy(ONE, 1).await, ONE);
    machine.applied("first").await;
    let given = machine.kubelet.allocate(ONE, &[&used[0]]).await.unwrap();
    machine.pods.hold(&[held("p", ONE, &used)]);
    machine.status("the pod", |status| status.gpus.iter().any(|gpu| !gpu.allocations.is_empty())).await;
    let kept = machine.instances(0)[0].clone();
    let gpu = machine.uuids[0].clone();
    let cuts: [&[(&str, u32, As)]; 2] = [
        &[("1g.10gb", 6, As::Whole), ("2g.20gb", 0, As::Shares(2)), ("2g.20gb", 4, As::Whole)],
        &[("1g.10gb", 6, As::Whole), ("1g.20gb", 4, As::Whole), ("3g.40gb", 0, As::Shares(2))],
    ];
    let calls = [
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlComputeInstanceDestroy",
        "nvmlGpuInstanceDestroy",
    ];
    machine.want("0", vec![cut(&gpu, cuts[1])]);
    machine.applied("0").await;
    for (round, call) in calls.into_iter().enumerate() {
        let plan = format!("{}", round + 1);
        // In the first call of its kind, a change is half made.
        machine.simgpu(&["hang", call, "--count", "1"]);
        machine.want(&plan, vec![cut(&gpu, cuts[round % 2])]);
        machine
            .until(call, || {
                let shown: Value = serde_json::from_str(&machine.simgpu(&["show", "--output", "json"])).unwrap();
                (shown["faults"][0]["remaining"].as_u64() == Some(0)).then_some(())
            })
            .await;
        machine.kill_agent();
        machine.simgpu(&["clear"]);
        assert!(machine.instances(0).contains(&kept), "{call}");
        if call == "nvmlGpuInstanceCreateComputeInstance" || call == "nvmlGpuInstanceDestroy" {
            assert!(machine.instances(0).iter().any(|(_, uuid)| uuid.is_none()), "{call}: one is half there");
        }
        machine.start_agent(&[]);
        machine.applied(&plan).await;
        assert!(machine.instances(0).contains(&kept) && machine.instances(0).len() == 3, "{call}");
        machine.healthy(MPS, 2).await;
        assert_eq!(machine.client(&given, &[])["uuid"].as_str(), kept.1.as_deref(), "{call}");
    }
}

#[tokio::test]
async fn a_new_instance_is_handed_over_with_its_capabilities_by_device_nodes_and_by_cdi() {
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
    // NVML calls the instance of 3g at 4 number 2.
    touch("proc/driver/nvidia/capabilities/gpu0/mig/gi2/access", "DeviceFileMinor: 21\nDeviceFileMode: 292\n");
    touch("proc/driver/nvidia/capabilities/gpu0/mig/gi2/ci0/access", "DeviceFileMinor: 22\nDeviceFileMode: 292\n");
    machine.want("first", vec![cut(&machine.uuids[0], &[("3g.40gb", 4, As::Whole)])]);
    machine.start_host();
    let expected = [
        "/dev/nvidia-caps/nvidia-cap21",
        "/dev/nvidia-caps/nvidia-cap22",
        "/dev/nvidia-uvm",
        "/dev/nvidia0",
        "/dev/nvidiactl",
    ];
    for strategy in ["device-nodes", "cdi"] {
        let cdi = machine.path("cdi");
        let (root, folder) = (root.to_str().unwrap(), cdi.to_str().unwrap());
        machine.start_agent(&["--device-list-strategy", strategy, "--host-root", root, "--cdi-dir", folder]);
        machine.seen(strategy, |seen| seen.endpoints.get(THREE).is_some_and(|endpoint| endpoint.connected)).await;
        let ids = healthy(&machine.healthy(THREE, 1).await, THREE);
        let uuid = ids[0].split("::").next().unwrap();
        let given = machine.kubelet.allocate(THREE, &[&ids[0]]).await.unwrap();
        machine.kubelet.pre_start(THREE, &[&ids[0]]).await.unwrap();
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
        machine.seen("the end", |seen| !seen.endpoints[THREE].connected).await;
    }
}
