//! Tests nodes with eight GPUs, of which one is bad. The other seven GPUs must serve without
//! interruption.
use std::collections::BTreeSet;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use cleave_api::GpuNodeStatus;
use cleave_kubelet::ContainerDevices;
use cleave_kubelet::fake::FakeKubeletState;
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::machine::{MPS_RESOURCE, Machine, container_devices, kill_child, mps_spec, share_ids};

const GPU_COUNT: usize = 8;
const SHARES_PER_GPU: u32 = 10;
/// Index of the bad GPU. Good GPUs have lower and higher indices.
const BAD_GPU: usize = 3;
/// Index of the bad GPU, as an argument of `simgpu`.
const BAD_GPU_ARGUMENT: &str = "3";
/// Arguments with which the agent waits only 2 s for NVML's answer about a GPU.
const WITH_SHORT_TIMEOUT: [&str; 2] = ["--gpu-timeout", "2"];
/// Number of pods that the test starts on each good GPU while one GPU is bad.
const NEW_PODS_PER_GPU: u32 = 3;

/// A node with seven good GPUs, a program that computes on each of them, and a watch of their
/// shares.
struct SevenGpus {
    machine: Machine,
    good: Vec<String>,
    programs: Vec<Child>,
    /// The kubelet's list of the devices that the programs use.
    rows: Vec<ContainerDevices>,
    watching: JoinHandle<()>,
    gaps: Arc<Mutex<BTreeSet<String>>>,
}

/// Returns a node with eight GPUs, on which neither the agent nor the MPS host runs.
fn eight_gpu_node() -> Machine {
    let machine = Machine::new(&["8xH200"]);
    machine.set_spec("first", machine.uuids.iter().map(|gpu| mps_spec(gpu, SHARES_PER_GPU)).collect());
    machine
}

/// Triggers a read of all GPUs with an XID that does not affect the health of a GPU. Without the
/// XID, the agent reads the GPUs only every ten seconds.
fn trigger_gpu_reads(machine: &Machine) {
    machine.simgpu(&["xid", "0", "63"]);
}

fn good_gpus(machine: &Machine) -> Vec<String> {
    machine.uuids.iter().enumerate().filter(|(index, _)| *index != BAD_GPU).map(|(_, uuid)| uuid.clone()).collect()
}

/// Returns the GPUs that do not have all of their shares listed as Healthy.
fn gpus_with_unhealthy_shares<'a>(seen: &FakeKubeletState, gpus: &'a [String]) -> Vec<&'a String> {
    let healthy = seen.endpoints.get(MPS_RESOURCE).map(|endpoint| endpoint.healthy_ids()).unwrap_or_default();
    let count = |gpu: &String| healthy.iter().filter(|id| id.starts_with(gpu.as_str())).count();
    gpus.iter().filter(|gpu| count(gpu) != SHARES_PER_GPU as usize).collect()
}

impl SevenGpus {
    /// Waits until the good GPUs serve, starts a program on each of them, and watches their shares.
    async fn start(machine: Machine) -> Self {
        let good = good_gpus(&machine);
        machine.wait_for_view("seven GPUs serve", |seen| gpus_with_unhealthy_shares(seen, &good).is_empty()).await;
        let (mut programs, mut rows) = (Vec::new(), Vec::new());
        for gpu in &good {
            let ids = share_ids(gpu, [0, 1]);
            let texts: Vec<&str> = ids.iter().map(String::as_str).collect();
            let given = machine.kubelet.allocate(MPS_RESOURCE, &texts).await.unwrap();
            rows.push(container_devices(gpu, MPS_RESOURCE, &ids));
            machine.pods.set_devices(&rows);
            machine.kubelet.pre_start(MPS_RESOURCE, &texts).await.unwrap();
            let mut command = machine.container_command(&given);
            programs
                .push(command.args(["--kernel-ms", "5", "--busy", "forever"]).stdout(Stdio::null()).spawn().unwrap());
        }
        let gaps = Arc::new(Mutex::new(BTreeSet::new()));
        let (mut state, found, gpus) = (machine.kubelet.state(), Arc::clone(&gaps), good.clone());
        let watching = tokio::spawn(async move {
            loop {
                let missing: Vec<String> =
                    gpus_with_unhealthy_shares(&state.borrow_and_update(), &gpus).into_iter().cloned().collect();
                found.lock().unwrap().extend(missing);
                if state.changed().await.is_err() {
                    return;
                }
            }
        });
        Self { machine, good, programs, rows, watching, gaps }
    }

    /// Starts pods on all good GPUs in several rounds. Checks that each pod gets its GPU.
    async fn assert_new_pods_run(&self, what: &str) {
        for round in 0..NEW_PODS_PER_GPU {
            // List the pods of a round only while they run. The agent removes the allocations of
            // pods that the kubelet no longer lists.
            let mut rows = self.rows.clone();
            let mut pods = Vec::new();
            for gpu in &self.good {
                let ids = share_ids(gpu, [2 + round]);
                let given = self.machine.kubelet.allocate(MPS_RESOURCE, &[&ids[0]]).await.unwrap();
                rows.push(container_devices(&format!("new-{gpu}"), MPS_RESOURCE, &ids));
                self.machine.pods.set_devices(&rows);
                self.machine.kubelet.pre_start(MPS_RESOURCE, &[&ids[0]]).await.unwrap();
                let program = self.machine.container_command(&given).stdout(Stdio::piped()).spawn().unwrap();
                pods.push((gpu, program));
            }
            for (gpu, program) in pods {
                let output = String::from_utf8(program.wait_with_output().unwrap().stdout).unwrap();
                let seen: Value = serde_json::from_str(output.lines().next().unwrap_or_default()).unwrap_or_default();
                assert_eq!(seen["uuid"].as_str(), Some(gpu.as_str()), "{what}, round {round}: {seen}");
            }
        }
    }

    async fn wait_for_bad_gpu_reason(&self, reason: &str) {
        let bad = self.machine.uuids[BAD_GPU].clone();
        let is = |status: &GpuNodeStatus| {
            status.gpus.iter().any(|gpu| gpu.uuid == bad && gpu.health.reason == reason && !gpu.health.healthy)
        };
        self.machine.wait_for_status(&format!("the bad GPU is {reason}"), is).await;
        let none = |seen: &FakeKubeletState| {
            seen.endpoints[MPS_RESOURCE].healthy_ids().iter().all(|id| !id.starts_with(bad.as_str()))
        };
        self.machine.wait_for_view("the bad GPU's shares are Unhealthy", none).await;
    }

    /// Checks that no good GPU had Unhealthy shares, and that all programs still run.
    async fn assert_uninterrupted(mut self) -> Machine {
        for program in &mut self.programs {
            assert_eq!(program.try_wait().unwrap(), None, "a program on a good GPU has ended");
            kill_child(program);
        }
        self.watching.abort();
        let _ = self.watching.await;
        assert_eq!(*self.gaps.lock().unwrap(), BTreeSet::new(), "GPUs with Unhealthy shares");
        self.machine
    }
}

#[tokio::test]
async fn seven_gpus_serve_without_interruption_while_the_eighth_hangs_is_lost_and_repeats_xids() {
    let mut machine = eight_gpu_node();
    machine.start_mps_host();
    machine.start_agent(&WITH_SHORT_TIMEOUT);
    let seven = SevenGpus::start(machine).await;
    let simgpu = |arguments: &[&str]| drop(seven.machine.simgpu(arguments));

    simgpu(&["hang", "nvmlDevice*", "--gpu", BAD_GPU_ARGUMENT]);
    seven.assert_new_pods_run("one GPU hangs").await;
    seven.wait_for_bad_gpu_reason("GpuUnreachable").await;
    seven.assert_new_pods_run("one GPU has hung").await;
    simgpu(&["clear"]);
    let all = |seen: &FakeKubeletState| gpus_with_unhealthy_shares(seen, &seven.machine.uuids).is_empty();
    seven.machine.wait_for_view("the GPU has recovered", all).await;

    simgpu(&["lose", BAD_GPU_ARGUMENT]);
    simgpu(&["xid", BAD_GPU_ARGUMENT, "79"]);
    seven.wait_for_bad_gpu_reason("GpuLost").await;
    seven.assert_new_pods_run("one GPU is lost").await;
    simgpu(&["restore", BAD_GPU_ARGUMENT]);
    trigger_gpu_reads(&seven.machine);
    seven.machine.wait_for_view("the GPU has recovered", all).await;

    let looping = async {
        for _ in 0..200 {
            simgpu(&["xid", BAD_GPU_ARGUMENT, "48"]);
            tokio::task::yield_now().await;
        }
    };
    tokio::join!(looping, seven.assert_new_pods_run("one GPU repeats XIDs"));
    seven.wait_for_bad_gpu_reason("ResetRequired").await;
    seven.assert_uninterrupted().await;
}

#[tokio::test]
async fn seven_gpus_serve_while_nvml_cannot_describe_the_eighth_from_the_start() {
    let mut machine = eight_gpu_node();
    machine.simgpu(&["fail", "nvmlDeviceGetName", "--gpu", BAD_GPU_ARGUMENT]);
    machine.start_mps_host();
    machine.start_agent(&[]);
    let seven = SevenGpus::start(machine).await;
    seven.assert_new_pods_run("one GPU cannot be described").await;
    let reported = |status: &GpuNodeStatus| {
        status.conditions.iter().any(|condition| {
            (condition.type_.as_str(), condition.reason.as_str()) == ("GpusHealthy", "GpuUnhealthy")
                && condition.message.contains("GPU 3")
        })
    };
    let status = seven.machine.wait_for_status("the GPU is reported by its index", reported).await;
    let [row] = &status.unidentified_gpus[..] else { panic!("{:?}", status.unidentified_gpus) };
    assert_eq!((row.index, row.message.is_empty(), status.expected_gpus), (3, false, 8));
    let machine = seven.assert_uninterrupted().await;
    machine.simgpu(&["clear"]);
    trigger_gpu_reads(&machine);
    machine.wait_for_healthy(MPS_RESOURCE, GPU_COUNT * SHARES_PER_GPU as usize).await;
}

#[tokio::test]
async fn seven_gpus_serve_after_a_reboot_without_the_eighth_gpu() {
    let mut machine = eight_gpu_node();
    machine.start_mps_host();
    machine.start_agent(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, GPU_COUNT * SHARES_PER_GPU as usize).await;
    machine.reboot();
    machine.kubelet.restart().unwrap();
    machine.simgpu(&["remove", BAD_GPU_ARGUMENT]);
    machine.start_mps_host();
    machine.start_agent(&[]);
    let seven = SevenGpus::start(machine).await;
    seven.assert_new_pods_run("one GPU is gone after a reboot").await;
    let machine = seven.assert_uninterrupted().await;
    let reported = |status: &GpuNodeStatus| {
        let is = |type_: &str, reason: &str| {
            status.conditions.iter().any(|condition| {
                (condition.type_.as_str(), condition.status.as_str(), condition.reason.as_str())
                    == (type_, "False", reason)
            })
        };
        is("GpusHealthy", "GpuUnhealthy") && is("GpusPresent", "GpuMissing")
    };
    let status = machine.wait_for_status("the missing GPU is reported", reported).await;
    assert_eq!((status.gpus.len(), status.expected_gpus), (GPU_COUNT, 8));
    assert!(status.gpus.iter().any(|gpu| gpu.uuid == machine.uuids[BAD_GPU] && gpu.health.reason == "GpuMissing"));
}
