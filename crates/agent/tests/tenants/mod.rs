//! Tenants that leave their shares, as the agent finds them on simulated GPUs. Processes are real;
//! only the cgroups that `/proc` would tell of them in pods are files.
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Child;

use cleave_api::gpunode::{FindingStatus, GpuSpec};
use cleave_api::sharingpolicy::{ComputeMode, Enforcement};
use cleave_kubelet::proto::v1beta1::ContainerAllocateResponse;
use serde_json::{Value, json};

use crate::machine::{MPS, Machine, held, kill_child, mps};

/// UIDs of the pods, and ids of their containers.
const PODS: [(&str, &str, char); 2] =
    [("p", "11111111-2222-4333-8444-555555555555", 'a'), ("q", "99999999-2222-4333-8444-555555555555", 'b')];

/// A node with two pods, each with one of ten shares of 1,000 MiB of a GPU.
struct Node {
    machine: Machine,
    given: Vec<ContainerAllocateResponse>,
    programs: Vec<Child>,
}

impl Drop for Node {
    fn drop(&mut self) {
        for program in &mut self.programs {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

fn container(letter: char) -> String {
    letter.to_string().repeat(64)
}

fn shares(uuid: &str, enforcement: Enforcement) -> GpuSpec {
    let mut spec = mps(uuid, 10);
    if let Some(mps) = &mut spec.partition.mps {
        // What is to be found must be possible.
        mps.compute_mode = ComputeMode::Default;
    }
    GpuSpec { enforcement, ..spec }
}

impl Node {
    /// Both pods are on one GPU.
    async fn new(enforcement: Enforcement) -> Self {
        Self::with(1, enforcement).await
    }

    /// The pods are on so many GPUs.
    async fn with(gpus: usize, enforcement: Enforcement) -> Self {
        let mut machine = Machine::new(&[&format!("{gpus}xH200")]);
        machine.want("first", machine.uuids.iter().map(|gpu| shares(gpu, enforcement)).collect());
        let pods: Vec<Value> = PODS.iter().map(|(name, uid, letter)| pod(name, uid, *letter)).collect();
        machine.pods_are(&pods);
        let proc = machine.path("proc");
        fs::create_dir(&proc).unwrap();
        machine.start_host();
        machine.start_agent(&["--proc", proc.to_str().unwrap()]);
        machine.healthy(MPS, 10 * gpus).await;
        for gpu in &machine.uuids {
            let daemon = machine.until("the server", || {
                let daemon = machine.host_status()?.daemons.remove(gpu)?;
                Some([daemon.pid?, daemon.server_pid?])
            });
            for pid in daemon.await {
                symlink(format!("/proc/{pid}"), proc.join(pid.to_string())).unwrap();
            }
        }
        let ids: Vec<String> = (0..2).map(|pod| format!("{}::{pod}", machine.uuids[pod % gpus])).collect();
        let rows: Vec<_> =
            PODS.iter().zip(&ids).map(|((pod, _, _), id)| held(pod, MPS, std::slice::from_ref(id))).collect();
        machine.pods.hold(&rows);
        let mut given = Vec::new();
        for id in &ids {
            given.push(machine.kubelet.allocate(MPS, &[id]).await.unwrap());
            machine.kubelet.pre_start(MPS, &[id]).await.unwrap();
        }
        Self { machine, given, programs: Vec::new() }
    }

    /// A program of a pod's container; its pid.
    fn start(&mut self, pod: usize, envs: &[(&str, &str)], arguments: &[&str]) -> u32 {
        let program = self.machine.start_client(&self.given[pod], envs, arguments);
        let pid = program.id();
        self.programs.push(program);
        let folder = self.machine.path("proc").join(pid.to_string());
        fs::create_dir(&folder).unwrap();
        let (_, uid, letter) = PODS[pod];
        // Below its container a program may call itself what it likes.
        let cgroup = format!(
            "0::/kubepods/burstable/pod{uid}/{}/kubepods/pod{}/{}\n",
            container(letter),
            PODS[1 - pod].1,
            container('f')
        );
        fs::write(folder.join("cgroup"), cgroup).unwrap();
        symlink(format!("/proc/{pid}/stat"), folder.join("stat")).unwrap();
        pid
    }

    async fn finding(&self, kind: &str) -> FindingStatus {
        let has = |finding: &FindingStatus| finding.kind == kind;
        let status = self.machine.status(kind, |status| status.findings.iter().any(has)).await;
        status.findings.into_iter().find(has).unwrap()
    }

    async fn nothing_found(&self) {
        self.machine.status("no findings", |status| status.findings.is_empty()).await;
    }

    fn pod_events(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let lines = fs::read_to_string(self.spec("pod-events.jsonl")).unwrap_or_default();
        lines
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap())
            .map(|event| (text(&event["pod"]), text(&event["reason"])))
            .collect()
    }

    fn spec(&self, name: &str) -> PathBuf {
        self.machine.path("spec").join(name)
    }

    async fn exit_status(&mut self, index: usize) -> Option<i32> {
        let program = &mut self.programs[index];
        self.machine.until("the program's end", || program.try_wait().unwrap()).await.code()
    }
}

fn pod(name: &str, uid: &str, letter: char) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "ns", "uid": uid},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {MPS: "1"}}}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "c", "containerID": format!("containerd://{}", container(letter))}]},
    })
}

const ESCAPE: (&str, &str) = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "junk");
const OUTSIDE: (&str, &str) = ("CUDA_MPS_PIPE_DIRECTORY", "/nowhere");

#[tokio::test]
async fn a_container_over_its_memory_is_found_and_told_and_its_neighbour_is_not() {
    let mut node = Node::new(Enforcement::Report).await;
    node.start(1, &[], &["--allocate", "700", "--hold", "forever"]);
    let pid = node.start(0, &[ESCAPE], &["--allocate", "5000", "--hold", "forever"]);
    let found = node.finding("MemoryExceeded").await;
    assert_eq!(
        (found.namespace.as_str(), found.pod.as_str(), found.uid.as_str(), found.container.as_str()),
        ("ns", "p", PODS[0].1, "c")
    );
    assert_eq!((found.pid, found.gpu.as_str()), (Some(pid), node.machine.uuids[0].as_str()));
    assert!(found.message.contains("MiB") && found.since.is_some(), "{found:?}");
    node.machine.until("the pod's event", || (!node.pod_events().is_empty()).then_some(())).await;
    assert_eq!(node.pod_events(), [("ns/p".to_owned(), "MemoryExceeded".to_owned())]);
    node.machine.until("the node's event", || (node.machine.events() == ["MemoryExceeded"]).then_some(())).await;
    let status = node.machine.status("findings", |status| !status.findings.is_empty()).await;
    assert_eq!(status.findings.len(), 1, "the neighbour keeps to its share: {:?}", status.findings);
    assert!(node.programs[1].try_wait().unwrap().is_none(), "it is only told");
    kill_child(&mut node.programs[1]);
    node.nothing_found().await;
}

#[tokio::test]
async fn a_program_outside_of_mps_is_found_though_its_container_has_a_share() {
    let mut node = Node::new(Enforcement::Report).await;
    node.start(1, &[], &["--hold", "forever"]);
    let pid = node.start(0, &[OUTSIDE], &["--hold", "forever"]);
    let found = node.finding("OutsideMps").await;
    assert_eq!((found.pod.as_str(), found.pid), ("p", Some(pid)));
    // All of a GPU is more than a share.
    let all = node.machine.status("findings", |status| !status.findings.is_empty()).await.findings;
    assert!(all.iter().all(|finding| finding.pod == "p"), "{all:?}");
}

#[tokio::test]
async fn a_client_by_another_pods_door_has_no_share_where_its_pod_has_none() {
    let mut node = Node::new(Enforcement::Report).await;
    let row = held("q", MPS, &[format!("{}::1", node.machine.uuids[0])]);
    // The pod has left its share, or never had it; what it came in by is the other's.
    node.machine.pods.hold(&[row]);
    node.machine.until("the end of its share", || (node.machine.desired()?.allocations.len() == 1).then_some(())).await;
    node.given[0] = node.given[1].clone();
    let pid = node.start(0, &[], &["--hold", "forever"]);
    let found = node.finding("NoShare").await;
    assert_eq!((found.pod.as_str(), found.pid), ("p", Some(pid)));
}

#[tokio::test]
async fn under_evict_what_left_its_share_is_ended_by_mps_and_told_until_its_pod_is_gone() {
    let mut node = Node::new(Enforcement::Evict).await;
    node.start(1, &[], &["--hold", "forever"]);
    node.start(0, &[ESCAPE], &["--allocate", "5000", "--hold", "forever"]);
    node.finding("MemoryExceeded").await;
    // CUDA_ERROR_MPS_CLIENT_TERMINATED: 810 % 256.
    assert_eq!(node.exit_status(1).await, Some(42));
    assert!(node.programs[0].try_wait().unwrap().is_none(), "the neighbour goes on");
    assert_eq!(node.finding("MemoryExceeded").await.pod, "p");
    let (name, uid, letter) = PODS[1];
    node.machine.pods_are(&[pod(name, uid, letter)]);
    node.nothing_found().await;
}

#[tokio::test]
async fn a_driver_that_hangs_accuses_nobody_and_is_asked_again_when_it_is_back() {
    let mut node = Node::new(Enforcement::Evict).await;
    node.machine.simgpu(&["hang", "nvmlDeviceGetMPSComputeRunningProcesses", "--seconds", "3600"]);
    node.start(0, &[ESCAPE], &["--allocate", "5000", "--hold", "forever"]);
    let log = node.machine.path("agent.log");
    let says = || fs::read_to_string(&log).ok()?.contains("nothing is known of tenants").then_some(());
    node.machine.until("the watch gives up", says).await;
    assert!(node.machine.status("a status", |_| true).await.findings.is_empty());
    assert!(node.programs[0].try_wait().unwrap().is_none());
    node.machine.simgpu(&["clear"]);
    node.finding("MemoryExceeded").await;
    assert_eq!(node.exit_status(0).await, Some(42));
}

#[tokio::test]
async fn tenants_of_other_gpus_are_watched_while_one_gpu_hangs() {
    let mut node = Node::with(2, Enforcement::Report).await;
    node.machine.simgpu(&["hang", "nvmlDeviceGetMPSComputeRunningProcesses", "--gpu", "1"]);
    node.start(1, &[ESCAPE], &["--allocate", "5000", "--hold", "forever"]);
    let log = node.machine.path("agent.log");
    let says = || fs::read_to_string(&log).ok()?.contains("nothing is known of tenants").then_some(());
    node.machine.until("the watch gives up on that GPU", says).await;
    node.start(0, &[ESCAPE], &["--allocate", "5000", "--hold", "forever"]);
    assert_eq!(node.finding("MemoryExceeded").await.pod, "p");
    let all = node.machine.status("findings", |status| !status.findings.is_empty()).await.findings;
    assert_eq!(all.len(), 1, "nothing is known of the other: {all:?}");
    node.machine.simgpu(&["clear"]);
    node.machine.status("both are found", |status| status.findings.len() == 2).await;
}
