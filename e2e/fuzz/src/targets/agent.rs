//! Targets for the agent's input: its checkpoint, the spec of its `GpuNode`, the status of the MPS
//! host, pods and `/proc`.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_agent::allocation::pending::PendingAllocations;
use cleave_agent::allocation::table::AllocationTable;
use cleave_agent::allocation::{Allocation, MpsLimits};
use cleave_agent::cgroup::{parse_owner, parse_pod_uids};
use cleave_agent::checkpoint::Checkpoint;
use cleave_agent::mps::{HostView, parse_status};
use cleave_agent::node::{Actions, Node};
use cleave_agent::object::GpuNodeState;
use cleave_agent::pods::PodObject;
use cleave_agent::tenants::process::parse_stat;
use cleave_agent::termination::pods::TerminatingPods;
use cleave_agent::termination::shutdown::{Shutdown, ShutdownPeriod, ShutdownPeriods, elapsed_in_shutdown};
use cleave_api::GpuNodeSpec;
use cleave_gpu::mps::wire::Desired;
use cleave_gpu::nvml::{DriverInfo, GpuObservation};
use cleave_kubelet::ContainerDevices;
use cleave_operator::pods as operator;
use serde_json::{Value, json};

use super::{fixtures, objects};
use crate::mutate::InputShape;
use crate::{ReadResult, Target, assert_printable};

/// Time for which the agent keeps an allocation that the kubelet does not list.
const GRACE_PERIOD: Duration = Duration::from_secs(10);

/// Returns the spec that the operator writes for the first node of the sample cluster.
pub(super) fn sample_spec() -> GpuNodeSpec {
    let changes = objects::read_cluster(&fixtures::cluster()).map(|observed| objects::plan_cluster(&observed).changes);
    changes.unwrap_or_default().into_iter().next().map(|change| change.spec).unwrap_or_default()
}

/// Returns the agent's actions for [`sample_spec`], with two allocations.
pub(super) fn sample_actions() -> Actions {
    let allocation = |resource: &str, gpu: u32| Allocation {
        resource: resource.to_owned(),
        ids: vec![format!("{}::0", fixtures::gpu_uuid(gpu)), format!("{}::1", fixtures::gpu_uuid(gpu))],
        devices: vec![fixtures::gpu_uuid(gpu)],
        mps: None,
    };
    let first = run_agent(None, GpuNodeState::Present(3, sample_spec()), HostView::default());
    let mut checkpoint = first.checkpoint;
    checkpoint.allocations.push(Arc::new(allocation("nvidia.com/gpu.shared", 2)));
    let mps = Some(MpsLimits { threads: Some(20), memory_mib: Some(16_000), max_clients: Some(4) });
    checkpoint.allocations.push(Arc::new(Allocation { mps, ..allocation("nvidia.com/gpu-mps", 0) }));
    run_agent(Some(checkpoint), GpuNodeState::Present(3, sample_spec()), HostView::default())
}

/// Passes these inputs to the agent's model, and returns the model's last actions.
///
/// Checks after each step that the MPS host, the API server and the next agent accept the agent's
/// output. Makes fewer checks if the checkpoint has GPUs that NVML does not list. Such GPUs count
/// as lost and keep their layout, so the model may contain the same MIG instance twice. The next
/// agent would refuse a checkpoint with a duplicate instance.
fn run_agent(checkpoint: Option<Checkpoint>, object: GpuNodeState, view: HostView) -> Actions {
    let listed: BTreeSet<String> = (0..fixtures::GPUS_PER_NODE).map(fixtures::gpu_uuid).collect();
    let contradicts = |known: &Checkpoint| {
        let served = known.layouts.keys().chain(known.gpus.iter().map(|gpu| &gpu.uuid));
        served.into_iter().any(|uuid| !listed.contains(uuid))
    };
    let is_consistent = !checkpoint.as_ref().is_some_and(contradicts);
    let start = Instant::now();
    let (mut node, allocations) = Node::start("boot".to_owned(), GRACE_PERIOD, checkpoint, None, start);
    let held: Vec<ContainerDevices> = allocations.iter().map(|(_, allocation)| container_devices(allocation)).collect();
    let mut table =
        AllocationTable { pending: PendingAllocations::with_watch(), allocations, ..AllocationTable::default() };
    // Before the first result from NVML, the agent relies on the checkpoint.
    check_actions(&node.reconcile(&mut table, start), true);
    node.record_gpu_node(object);
    node.record_mps_view(view);
    node.record_driver_info(Ok(DriverInfo { driver: "580.82.07".to_owned(), count: fixtures::GPUS_PER_NODE }), start);
    for gpu in fixtures::gpus() {
        node.record_gpu(gpu.index, Ok(GpuObservation { gpu, processes: Vec::new() }), start);
    }
    node.record_pod_resources(Ok(held.clone()), start, &mut table.allocations);
    check_actions(&node.reconcile(&mut table, start), is_consistent);
    let later = start + Duration::from_secs(60);
    node.record_pod_resources(Ok(held), later, &mut table.allocations);
    let actions = node.reconcile(&mut table, later);
    check_actions(&actions, is_consistent);
    actions
}

/// Returns the kubelet's list entry for an allocation.
fn container_devices(allocation: &Allocation) -> ContainerDevices {
    ContainerDevices {
        namespace: "team".to_owned(),
        pod: "pod".to_owned(),
        container: "main".to_owned(),
        resource: allocation.resource.clone(),
        ids: allocation.ids.clone(),
    }
}

/// Checks that the MPS host and the API server accept the agent's output. If `is_consistent` is
/// true, also checks the agent's checkpoint and device lists. An inconsistent checkpoint as input
/// can make both invalid.
fn check_actions(actions: &Actions, is_consistent: bool) {
    let read = Desired::parse(&fixtures::to_json(&actions.desired));
    assert_eq!(read.as_ref(), Ok(&actions.desired), "the MPS host failed to read the desired state");
    if is_consistent {
        encode_checkpoint(&actions.checkpoint);
    }
    for (resource, devices) in actions.lists.iter().filter(|_| is_consistent) {
        let mut ids: Vec<&str> = devices.iter().map(|device| device.id.as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), devices.len(), "{resource} has a duplicate id");
    }
    for condition in &actions.status.conditions {
        assert!(
            condition.message.len() <= 32 << 10,
            "the API server refuses a message of {} bytes",
            condition.message.len()
        );
    }
}

/// Encodes a checkpoint, and checks that the next agent can read it.
fn encode_checkpoint(checkpoint: &Checkpoint) -> Vec<u8> {
    let again = Checkpoint::decode(&checkpoint.encode()).map_err(|error| error.to_string());
    assert_eq!(again.as_ref(), Ok(checkpoint), "the next agent failed to read the checkpoint");
    checkpoint.encode()
}

pub(super) const CHECKPOINT: Target = Target {
    name: "checkpoint",
    what: "the agent's checkpoint, damaged or of another version",
    shape: InputShape::Json,
    words: &[
        "version",
        "boot",
        "spec",
        "gpus",
        "layouts",
        "allocations",
        "pools",
        "daemons",
        "first",
        "count",
        "Mps",
        "Whole",
        "MIG-x",
        "nvidia.com/gpu",
    ],
    samples: || [sample_actions().checkpoint, Checkpoint::default()].map(|one| encode_checkpoint(&one)).to_vec(),
    inputs: 1_000,
    run: |bytes| match Checkpoint::decode(bytes) {
        Err(error) => {
            assert_printable(&error.to_string());
            ReadResult::Refused
        }
        Ok(checkpoint) => {
            encode_checkpoint(&checkpoint);
            run_agent(Some(checkpoint), GpuNodeState::Unknown, HostView::default());
            ReadResult::Read
        }
    },
};

pub(super) const NODE_SPEC: Target = Target {
    name: "node_spec",
    what: "GpuNode.spec, as the agent reads it",
    shape: InputShape::Json,
    words: &[
        "planId",
        "gpus",
        "uuid",
        "partition",
        "whole",
        "mps",
        "timeSlicing",
        "mig",
        "slices",
        "resource",
        "replicas",
        "first",
        "3g.40gb",
        "nvidia.com/gpu",
    ],
    samples: || vec![fixtures::encode_sample(&sample_spec())],
    inputs: 700,
    run: |bytes| match serde_json::from_slice::<GpuNodeSpec>(bytes) {
        Err(error) => {
            run_agent(None, GpuNodeState::Malformed(error.to_string()), HostView::default());
            ReadResult::Refused
        }
        Ok(spec) => {
            run_agent(None, GpuNodeState::Present(1, spec), HostView::default());
            ReadResult::Read
        }
    },
};

pub(super) const MPS_STATUS: Target = Target {
    name: "mps_status",
    what: "the MPS host's status file, as the agent reads it",
    shape: InputShape::Json,
    words: &[
        "version", "daemons", "state", "Active", "Fault", "BackOff", "Stopping", "Hard", "Advisory", "clients",
        "culprit", "fault",
    ],
    samples: || vec![fixtures::encode_sample(&fixtures::mps_host_status(&sample_actions().desired))],
    inputs: 700,
    run: |bytes| match parse_status(bytes) {
        Err(error) => {
            assert_printable(&error);
            ReadResult::Refused
        }
        Ok(status) => {
            let again = parse_status(&fixtures::to_json(&status));
            assert_eq!(again.as_ref(), Ok(&status));
            run_agent(None, GpuNodeState::Present(1, sample_spec()), HostView { alive: true, status, error: None });
            ReadResult::Read
        }
    },
};

pub(super) const SHUTDOWN_NOTE: Target = Target {
    name: "shutdown_note",
    what: "the kubelet's record of a node shutdown",
    shape: InputShape::Json,
    words: &["startTime", "endTime", "0001-01-01T00:00:00Z", "2026-11-21T10:38:36.123456789+01:00"],
    samples: || {
        let start = "2026-11-21T10:38:36.123456789+01:00";
        vec![json!({"startTime": start, "endTime": "0001-01-01T00:00:00Z"}).to_string().into_bytes()]
    },
    inputs: 10_000,
    run: |bytes| {
        let Ok(now) = "2026-11-21T09:38:40Z".parse() else { return ReadResult::Refused };
        let periods = ShutdownPeriods::new(vec![ShutdownPeriod { priority: 0, seconds: 20 }]);
        let up = Duration::from_secs(60);
        let lasts = elapsed_in_shutdown(bytes, now, up, &periods);
        assert!(lasts.is_none_or(|lasts| lasts < up), "{lasts:?}");
        if lasts.is_some() { ReadResult::Read } else { ReadResult::Refused }
    },
};

pub(super) const PODS: Target = Target {
    name: "pods",
    what: "pods, as agent and operator read them",
    shape: InputShape::Json,
    words: &[
        "nvidia.com/gpu",
        "nvidia.com/gpu-mps",
        "nvidia.com/gpu-10gb",
        "nvidia.com/mig-1g.10gb",
        "cleave.dev/placement",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "2026-11-21T10:38:36Z",
        "seconds",
        "Always",
        "limits",
        "overhead",
        "9223372036854775807",
    ],
    samples: || {
        let leaving = json!({
            "metadata/deletionTimestamp": "2026-11-21T10:38:36Z", "metadata/deletionGracePeriodSeconds": 30,
            "status/containerStatuses": [{"name": "main", "containerID": "containerd://0123456789ab"}], "status/startTime": "2026-11-21T10:38:36Z",
        });
        let mut pods = fixtures::cluster().get("pods").and_then(Value::as_array).cloned().unwrap_or_default();
        pods.push(fixtures::pod("leaving", "nvidia.com/gpu-mps", 2, &leaving));
        pods.iter().map(fixtures::to_json).collect()
    },
    inputs: 4_000,
    run: |bytes| {
        let mut seen = ReadResult::Refused;
        if let Ok(pod) = serde_json::from_slice::<PodObject>(bytes) {
            let (mut pending, mut terminating) = (PendingAllocations::with_watch(), TerminatingPods::default());
            let now = Instant::now();
            let mut shutdown = Shutdown::new(ShutdownPeriods::new(vec![ShutdownPeriod { priority: 0, seconds: 20 }]));
            shutdown.retain_listed(&BTreeSet::new());
            shutdown.set_start(Some(now));
            // First process the pod without its deletion. The deletion is then new, and the full
            // grace period remains.
            let staying = serde_json::from_slice::<Value>(bytes).ok().and_then(|mut pod| {
                pod.pointer_mut("/metadata")?.as_object_mut()?.remove("deletionTimestamp")?;
                serde_json::from_value::<PodObject>(pod).ok()
            });
            for pod in [staying.as_ref(), Some(&pod), Some(&pod)].into_iter().flatten() {
                pod.record_termination("n1", &mut terminating, &mut shutdown);
                shutdown.update(&mut terminating, now);
                pod.uid_and_names();
                if let Some(bound) = pod.bound_pod("n1") {
                    assert!(!bound.requests.is_empty());
                    pending.update_pod(bound, now);
                }
            }
            pending.open_reservations("nvidia.com/gpu-mps");
            seen = ReadResult::Read;
        }
        if let Ok(mut pod) = serde_json::from_slice::<operator::PodObject>(bytes) {
            pod.trim();
            if let Some(claimant) = operator::claimant(&pod) {
                assert_eq!(operator::claimant(&pod), Some(claimant));
            }
            seen = ReadResult::Read;
        }
        seen
    },
};

pub(super) const PROC_FILES: Target = Target {
    name: "proc",
    what: "a process's cgroup and stat files; a tenant controls its name and the cgroups below its container's",
    shape: InputShape::Bytes,
    words: &[
        "0::/",
        "kubepods",
        "/pod",
        ".slice",
        "-pod",
        "kubepods-burstable-pod",
        "cri-containerd-",
        ".scope",
        ":",
        " (deleted)",
        "..",
        "\n",
        "6f1d2c3b-4a59-4e68-8f77-0123456789ab",
        "6f1d2c3b_4a59_4e68_8f77_0123456789ab",
        "0123456789abcdef0123456789abcdef",
        ") R ",
    ],
    samples: || vec![b"42 (a b) c) S 7 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1 1\n".to_vec()],
    inputs: 20_000,
    run: |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let stat = parse_stat(&text);
        if let Some((parent, start)) = stat {
            assert!(text.contains(&parent.to_string()) && text.contains(&start.to_string()));
        }
        let found = parse_owner(&text);
        if let Some(owner) = &found {
            assert!(matches!(owner.pod.len(), 32 | 36), "{owner:?}");
            assert!(
                text.contains(&owner.pod) || text.contains(&owner.pod.replace('-', "_")) || text.contains('_'),
                "{owner:?}"
            );
            assert!(owner.container.as_ref().is_none_or(|id| text.contains(id)), "{owner:?}");
            assert_eq!(parse_pod_uids(&text).first(), Some(&owner.pod), "{text:?}");
            if text.lines().count() == 1 && owner.container.is_some() {
                // A tenant can create a cgroup with any name below the cgroup of its container.
                let lie =
                    format!("{}/kubepods/pod00000000-1111-4222-8333-444444444444/ffffffffffffffff", text.trim_end());
                assert_eq!(
                    super::agent::parse_owner(&lie).as_ref().map(|other| &other.pod),
                    Some(&owner.pod),
                    "{lie:?}"
                );
            }
        }
        if stat.is_some() || found.is_some() { ReadResult::Read } else { ReadResult::Refused }
    },
};
