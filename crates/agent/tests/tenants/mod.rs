//! Tests that the agent reports tenants that exceed their limits on simulated GPUs. The processes
//! are real. The agent reads their cgroups from files that the tests write to a directory that
//! replaces `/proc`.
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Child;

use cleave_api::gpunode::{FindingStatus, GpuSpec};
use cleave_api::sharingpolicy::{ComputeMode, Enforcement};
use cleave_kubelet::proto::v1beta1::ContainerAllocateResponse;
use serde_json::{Value, json};

use crate::machine::{MPS_RESOURCE, Machine, container_devices, kill_child, mps_spec};

/// Name and UID of each pod, and the letter that is repeated to form the ID of its container.
const PODS: [(&str, &str, char); 2] =
    [("p", "11111111-2222-4333-8444-555555555555", 'a'), ("q", "99999999-2222-4333-8444-555555555555", 'b')];

/// A node with two pods. Each pod has one share of 1,000 MiB, and each GPU has ten shares.
struct NodeWithTenants {
    machine: Machine,
    /// The agent's response to `Allocate` for each pod.
    responses: Vec<ContainerAllocateResponse>,
    programs: Vec<Child>,
}

impl Drop for NodeWithTenants {
    fn drop(&mut self) {
        for program in &mut self.programs {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

fn container_id(letter: char) -> String {
    letter.to_string().repeat(64)
}

fn shares_spec(uuid: &str, enforcement: Enforcement) -> GpuSpec {
    let mut spec = mps_spec(uuid, 10);
    if let Some(mps) = &mut spec.partition.mps {
        // Permit programs that use the GPU outside MPS. The tests check that the agent reports
        // them.
        mps.compute_mode = ComputeMode::Default;
    }
    GpuSpec { enforcement, ..spec }
}

impl NodeWithTenants {
    /// Starts a node with both pods on one GPU.
    async fn new(enforcement: Enforcement) -> Self {
        Self::with_gpus(1, enforcement).await
    }

    /// Starts a node with one or two GPUs. With two GPUs, each pod has a share of a different GPU.
    async fn with_gpus(gpus: usize, enforcement: Enforcement) -> Self {
        let mut machine = Machine::new(&[&format!("{gpus}xH200")]);
        machine.set_spec("first", machine.uuids.iter().map(|gpu| shares_spec(gpu, enforcement)).collect());
        let pods: Vec<Value> = PODS.iter().map(|(name, uid, letter)| pod(name, uid, *letter)).collect();
        machine.set_pods(&pods);
        let proc = machine.path("proc");
        fs::create_dir(&proc).unwrap();
        machine.start_mps_host();
        machine.start_agent(&["--proc", proc.to_str().unwrap()]);
        machine.wait_for_healthy(MPS_RESOURCE, 10 * gpus).await;
        for gpu in &machine.uuids {
            let daemon = machine.wait_until("the MPS server runs", || {
                let daemon = machine.mps_host_status()?.daemons.remove(gpu)?;
                Some([daemon.pid?, daemon.server_pid?])
            });
            for pid in daemon.await {
                symlink(format!("/proc/{pid}"), proc.join(pid.to_string())).unwrap();
            }
        }
        let ids: Vec<String> = (0..2).map(|pod| format!("{}::{pod}", machine.uuids[pod % gpus])).collect();
        let rows: Vec<_> = PODS
            .iter()
            .zip(&ids)
            .map(|((pod, _, _), id)| container_devices(pod, MPS_RESOURCE, std::slice::from_ref(id)))
            .collect();
        machine.pods.set_devices(&rows);
        let mut responses = Vec::new();
        for id in &ids {
            responses.push(machine.kubelet.allocate(MPS_RESOURCE, &[id]).await.unwrap());
            machine.kubelet.pre_start(MPS_RESOURCE, &[id]).await.unwrap();
        }
        Self { machine, responses, programs: Vec::new() }
    }

    /// Starts a program in a pod's container. Returns its PID.
    fn start_program(&mut self, pod: usize, envs: &[(&str, &str)], arguments: &[&str]) -> u32 {
        let program = self.machine.start_client(&self.responses[pod], envs, arguments);
        let pid = program.id();
        self.programs.push(program);
        let directory = self.machine.path("proc").join(pid.to_string());
        fs::create_dir(&directory).unwrap();
        let (_, uid, letter) = PODS[pod];
        // A program can create cgroups with any name below its container's cgroup, for example one
        // that looks like another pod's. The agent must ignore such a name.
        let cgroup = format!(
            "0::/kubepods/burstable/pod{uid}/{}/kubepods/pod{}/{}\n",
            container_id(letter),
            PODS[1 - pod].1,
            container_id('f')
        );
        fs::write(directory.join("cgroup"), cgroup).unwrap();
        symlink(format!("/proc/{pid}/stat"), directory.join("stat")).unwrap();
        pid
    }

    /// Waits until the agent's status contains a finding of this kind. Returns the finding.
    async fn wait_for_finding(&self, kind: &str) -> FindingStatus {
        let has = |finding: &FindingStatus| finding.kind == kind;
        let status = self.machine.wait_for_status(kind, |status| status.findings.iter().any(has)).await;
        status.findings.into_iter().find(has).unwrap()
    }

    async fn wait_until_no_findings(&self) {
        self.machine.wait_for_status("no findings", |status| status.findings.is_empty()).await;
    }

    /// Returns the pod and the reason of each Event that the agent published on a pod.
    fn pod_events(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let lines = fs::read_to_string(self.container_spec_path("pod-events.jsonl")).unwrap_or_default();
        lines
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap())
            .map(|event| (text(&event["pod"]), text(&event["reason"])))
            .collect()
    }

    fn container_spec_path(&self, name: &str) -> PathBuf {
        self.machine.path("spec").join(name)
    }

    async fn wait_for_exit(&mut self, index: usize) -> Option<i32> {
        let program = &mut self.programs[index];
        self.machine.wait_until("the program exits", || program.try_wait().unwrap()).await.code()
    }
}

fn pod(name: &str, uid: &str, letter: char) -> Value {
    let container_id = format!("containerd://{}", container_id(letter));
    json!({
        "metadata": {"name": name, "namespace": "ns", "uid": uid},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {MPS_RESOURCE: "1"}}}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "c", "containerID": container_id}]},
    })
}

/// Environment variable that disables the memory limit of a program, because MPS ignores a value
/// that it cannot parse.
const UNLIMITED_MEMORY_ENV: (&str, &str) = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "junk");
/// Environment variable that makes a program use the GPU outside MPS, because no MPS daemon uses
/// this directory.
const OUTSIDE_MPS_ENV: (&str, &str) = ("CUDA_MPS_PIPE_DIRECTORY", "/nowhere");

#[tokio::test]
async fn a_container_over_its_memory_limit_is_reported_and_its_neighbour_is_not() {
    let mut node = NodeWithTenants::new(Enforcement::Report).await;
    node.start_program(1, &[], &["--allocate", "700", "--hold", "forever"]);
    let pid = node.start_program(0, &[UNLIMITED_MEMORY_ENV], &["--allocate", "5000", "--hold", "forever"]);
    let finding = node.wait_for_finding("MemoryExceeded").await;
    assert_eq!(
        (finding.namespace.as_str(), finding.pod.as_str(), finding.uid.as_str(), finding.container.as_str()),
        ("ns", "p", PODS[0].1, "c")
    );
    assert_eq!((finding.pid, finding.gpu.as_str()), (Some(pid), node.machine.uuids[0].as_str()));
    assert!(finding.message.contains("MiB") && finding.since.is_some(), "{finding:?}");
    node.machine.wait_until("the pod's Event is published", || (!node.pod_events().is_empty()).then_some(())).await;
    assert_eq!(node.pod_events(), [("ns/p".to_owned(), "MemoryExceeded".to_owned())]);
    node.machine
        .wait_until("the node's Event is published", || (node.machine.events() == ["MemoryExceeded"]).then_some(()))
        .await;
    let status = node.machine.wait_for_status("findings", |status| !status.findings.is_empty()).await;
    assert_eq!(status.findings.len(), 1, "the neighbour is within its limits: {:?}", status.findings);
    assert!(node.programs[1].try_wait().unwrap().is_none(), "the finding is only reported");
    kill_child(&mut node.programs[1]);
    node.wait_until_no_findings().await;
}

#[tokio::test]
async fn a_program_outside_mps_is_reported_even_if_its_container_has_a_share() {
    let mut node = NodeWithTenants::new(Enforcement::Report).await;
    node.start_program(1, &[], &["--hold", "forever"]);
    let pid = node.start_program(0, &[OUTSIDE_MPS_ENV], &["--hold", "forever"]);
    let finding = node.wait_for_finding("OutsideMps").await;
    assert_eq!((finding.pod.as_str(), finding.pid), ("p", Some(pid)));
    // The program may also cause a finding about memory, because nothing enforces its limit outside
    // MPS.
    let all = node.machine.wait_for_status("findings", |status| !status.findings.is_empty()).await.findings;
    assert!(all.iter().all(|finding| finding.pod == "p"), "{all:?}");
}

#[tokio::test]
async fn a_client_that_uses_the_door_of_another_pod_is_reported_as_without_a_share() {
    let mut node = NodeWithTenants::new(Enforcement::Report).await;
    let row = container_devices("q", MPS_RESOURCE, &[format!("{}::1", node.machine.uuids[0])]);
    // Pod p no longer has a share. The program of pod p uses the door of pod q.
    node.machine.pods.set_devices(&[row]);
    node.machine
        .wait_until("the pod's share is removed", || {
            (node.machine.read_desired_file()?.allocations.len() == 1).then_some(())
        })
        .await;
    node.responses[0] = node.responses[1].clone();
    let pid = node.start_program(0, &[], &["--hold", "forever"]);
    let finding = node.wait_for_finding("NoShare").await;
    assert_eq!((finding.pod.as_str(), finding.pid), ("p", Some(pid)));
}

#[tokio::test]
async fn with_evict_a_client_over_its_limit_is_terminated_and_reported_until_its_pod_is_removed() {
    let mut node = NodeWithTenants::new(Enforcement::Evict).await;
    node.start_program(1, &[], &["--hold", "forever"]);
    node.start_program(0, &[UNLIMITED_MEMORY_ENV], &["--allocate", "5000", "--hold", "forever"]);
    node.wait_for_finding("MemoryExceeded").await;
    // The program exits with its CUDA error modulo 256. CUDA_ERROR_MPS_CLIENT_TERMINATED is 810.
    assert_eq!(node.wait_for_exit(1).await, Some(42));
    assert!(node.programs[0].try_wait().unwrap().is_none(), "the neighbour continues");
    assert_eq!(node.wait_for_finding("MemoryExceeded").await.pod, "p");
    let (name, uid, letter) = PODS[1];
    node.machine.set_pods(&[pod(name, uid, letter)]);
    node.wait_until_no_findings().await;
}

#[tokio::test]
async fn while_the_driver_hangs_no_tenant_is_reported() {
    let mut node = NodeWithTenants::new(Enforcement::Evict).await;
    node.machine.simgpu(&["hang", "nvmlDeviceGetMPSComputeRunningProcesses", "--seconds", "3600"]);
    node.start_program(0, &[UNLIMITED_MEMORY_ENV], &["--allocate", "5000", "--hold", "forever"]);
    let log = node.machine.path("agent.log");
    let logged = || fs::read_to_string(&log).ok()?.contains("tenants of the GPU are not checked").then_some(());
    node.machine.wait_until("the watch gives up", logged).await;
    assert!(node.machine.wait_for_status("a status", |_| true).await.findings.is_empty());
    assert!(node.programs[0].try_wait().unwrap().is_none());
    node.machine.simgpu(&["clear"]);
    node.wait_for_finding("MemoryExceeded").await;
    assert_eq!(node.wait_for_exit(0).await, Some(42));
}

#[tokio::test]
async fn tenants_of_other_gpus_are_checked_while_one_gpu_hangs() {
    let mut node = NodeWithTenants::with_gpus(2, Enforcement::Report).await;
    node.machine.simgpu(&["hang", "nvmlDeviceGetMPSComputeRunningProcesses", "--gpu", "1"]);
    node.start_program(1, &[UNLIMITED_MEMORY_ENV], &["--allocate", "5000", "--hold", "forever"]);
    let log = node.machine.path("agent.log");
    let logged = || fs::read_to_string(&log).ok()?.contains("tenants of the GPU are not checked").then_some(());
    node.machine.wait_until("the watch gives up on that GPU", logged).await;
    node.start_program(0, &[UNLIMITED_MEMORY_ENV], &["--allocate", "5000", "--hold", "forever"]);
    assert_eq!(node.wait_for_finding("MemoryExceeded").await.pod, "p");
    let all = node.machine.wait_for_status("findings", |status| !status.findings.is_empty()).await.findings;
    assert_eq!(all.len(), 1, "the other GPU gives no samples: {all:?}");
    node.machine.simgpu(&["clear"]);
    node.machine.wait_for_status("both findings are reported", |status| status.findings.len() == 2).await;
}
