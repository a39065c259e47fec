//! Describes a small cluster in the formats of Cleave's components. Most samples come from this
//! cluster.
use std::fmt::Debug;

use cleave_api::gpunode::{GpuStatus, Health, MigStatus, SliceStatus};
use cleave_gpu::mps::wire::{
    AllocationStatus, Client, DaemonState, DaemonStatus, Desired, Enforcement, FILE_FORMAT_VERSION, Fault,
    MpsHostStatus,
};
use cleave_gpu::nvml::{Gpu, MigInstance, MigProfile, MigState};
use cleave_plan::mig::built_in;
use cleave_plan::units::{Mebibytes, Sms};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Product name of the GPUs.
pub(super) const GPU_MODEL: &str = "NVIDIA H100 80GB HBM3";
/// Memory of each GPU, in MiB.
pub(super) const GPU_MEMORY_MIB: u64 = 81_079;
/// Number of GPUs per node.
pub(super) const GPUS_PER_NODE: u32 = 5;

/// Encodes a value as JSON. If the encoding fails, returns an empty sample, which no target can
/// read.
pub(super) fn to_json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// Encodes a value as a sample, and checks that decoding returns the same value.
pub(super) fn encode_sample<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T) -> Vec<u8> {
    let written = to_json(value);
    let read = serde_json::from_slice::<T>(&written).map_err(|error| error.to_string());
    assert_eq!(read.as_ref(), Ok(value));
    written
}

/// Returns the UUID of a GPU.
pub(super) fn gpu_uuid(index: u32) -> String {
    format!("GPU-3da61522-b946-8b5e-d0da-{index:012x}")
}

/// Returns the GPUs of a node, as the NVML module reports them. The last GPU has two MIG instances.
pub(super) fn gpus() -> Vec<Gpu> {
    // Keep only two profiles, so that mutations also change other fields.
    let profiles: Vec<MigProfile> = built_in(GPU_MODEL, GPU_MEMORY_MIB)
        .unwrap_or_default()
        .into_iter()
        .filter(|profile| ["1g.10gb", "3g.40gb"].contains(&profile.name.as_str()))
        .zip(0..)
        .map(|(profile, id)| MigProfile {
            id,
            slices: profile.name.bytes().next().map_or(1, |digit| u32::from(digit.saturating_sub(b'0'))),
            name: profile.name,
            memory: Mebibytes(profile.memory_mib),
            sms: Sms(profile.sms),
            size: profile.size,
            starts: profile.starts,
        })
        .collect();
    let instance = |number: u32, start| MigInstance {
        uuid: format!("MIG-3da61522-b946-8b5e-d0da-{number:012x}"),
        profile: "3g.40gb".to_owned(),
        start,
        gpu_instance: number,
        compute_instance: Some(0),
    };
    let gpu = |index: u32| Gpu {
        uuid: gpu_uuid(index),
        index,
        minor: index,
        model: GPU_MODEL.to_owned(),
        memory: Mebibytes(GPU_MEMORY_MIB),
        sms: Sms(132),
        pci: format!("0000:{index:02x}:00.0"),
        numa: Some(index / 4),
        compute_capability: (9, 0),
        mig: Some(MigState {
            enabled: index + 1 == GPUS_PER_NODE,
            pending: None,
            profiles: profiles.clone(),
            instances: if index + 1 == GPUS_PER_NODE { vec![instance(1, 0), instance(2, 4)] } else { Vec::new() },
        }),
    };
    (0..GPUS_PER_NODE).map(gpu).collect()
}

/// Returns the status of an MPS host that has applied the whole desired state.
pub(super) fn mps_host_status(desired: &Desired) -> MpsHostStatus {
    let client = Client { pid: 579, allocation: desired.allocations.keys().next().cloned() };
    let daemon = |device: &String| {
        let status = DaemonStatus {
            state: DaemonState::Active,
            pid: Some(401),
            server_pid: Some(402),
            restarts: 1,
            enforcement: Enforcement::Hard,
            holds_clients: false,
            replies_unproven: false,
            message: String::new(),
            clients: vec![client.clone()],
            fault: Some(Fault { number: 1, culprit: Some(client.clone()), over: true, ..Fault::default() }),
        };
        (device.clone(), status)
    };
    let door = |id: &String| (id.clone(), AllocationStatus { admitted: 3, refused: 1, waiting: 0 });
    MpsHostStatus {
        version: FILE_FORMAT_VERSION,
        pid: 400,
        desired: desired.hash(),
        daemons: desired.daemons.keys().map(daemon).collect(),
        allocations: desired.allocations.keys().map(door).collect(),
        error: None,
        door_errors: std::collections::BTreeMap::new(),
    }
}

/// Returns a pod that requests slices. `more` contains additional fields, with keys of the form
/// `SECTION/FIELD`.
pub(super) fn pod(name: &str, resource: &str, count: u32, more: &Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": format!("6f1d2c3b-4a59-4e68-8f77-{:012x}", name.len()),
            "creationTimestamp": "2026-11-21T10:38:36Z",
            "annotations": {},
        },
        "spec": {
            "priority": 10,
            "nodeSelector": {"pool": "a"},
            "terminationGracePeriodSeconds": 30,
            "schedulingGates": [{"name": "cleave.dev/placement"}],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "containers": [{
                "name": "main",
                "resources": {"requests": {"cpu": "500m"}, "limits": {(resource): count.to_string(), "memory": "1.5Gi"}},
                "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
            }],
            "initContainers": [{"name": "side", "restartPolicy": "Always", "resources": {"limits": {"cpu": 1}}}],
            "overhead": {"memory": "64Mi"},
        },
        "status": {"phase": "Pending"},
    });
    if let (Some(fields), Some(more)) = (pod.as_object_mut(), more.as_object()) {
        for (pointer, value) in more {
            match pointer.split_once('/') {
                Some((section, field)) => {
                    if let Some(section) = fields.get_mut(section).and_then(Value::as_object_mut) {
                        section.insert(field.to_owned(), value.clone());
                    }
                }
                None => drop(fields.insert(pointer.clone(), value.clone())),
            }
        }
    }
    pod
}

/// Returns a policy for the GPUs with these indices.
pub(super) fn policy(name: &str, indices: &[u32], spec: &Value) -> Value {
    let mut policy = json!({
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "SharingPolicy",
        "metadata": {"name": name, "uid": "u", "creationTimestamp": "2026-11-21T10:38:36Z"},
        "spec": {"gpus": {"indices": indices, "models": ["H100"]}},
    });
    if let (Some(fields), Some(more)) = (policy.pointer_mut("/spec").and_then(Value::as_object_mut), spec.as_object()) {
        fields.extend(more.clone());
    }
    policy
}

/// Returns policies for all sharing modes except `Whole`.
pub(super) fn policies() -> Vec<Value> {
    vec![
        policy(
            "shares",
            &[0],
            &json!({"mode": "Mps", "mps": {"units": 10, "threads": "Strict", "clients": {"max": 4, "split": true}}, "nodeSelector": {"pool": "a"}}),
        ),
        policy(
            "sizes",
            &[1],
            &json!({"mode": "Mps", "mps": {"sizes": "Dynamic"}, "dynamic": {"batchIdle": "10s", "batchTimeout": "60s"}}),
        ),
        policy(
            "turns",
            &[2],
            &json!({"mode": "TimeSlicing", "timeSlicing": {"replicas": 4, "interval": "Short"}, "resourceName": "nvidia.com/gpu.shared", "enforcement": "Evict"}),
        ),
        policy("auto", &[3], &json!({"mode": "Auto", "mps": {"unitMemory": "10Gi"}, "timeSlicing": {"replicas": 4}})),
        policy(
            "cut",
            &[4],
            &json!({"mode": "Mig", "mig": {"layout": ["3g.40gb", "3g.40gb"], "sharing": {"mps": {"units": 4}}}}),
        ),
    ]
}

/// Returns a cluster of two nodes with the GPUs of [`gpus`], without MIG instances. The cluster
/// consists of lists of objects that the operator watches.
pub(super) fn cluster() -> Value {
    let profiles: Vec<Value> = built_in(GPU_MODEL, GPU_MEMORY_MIB)
        .unwrap_or_default()
        .into_iter()
        .map(|known| json!({"name": known.name, "memoryMib": known.memory_mib, "sms": known.sms, "size": known.size, "starts": known.starts}))
        .collect();
    let gpu = |index: u32| GpuStatus {
        uuid: gpu_uuid(index),
        index,
        model: GPU_MODEL.to_owned(),
        memory_mib: GPU_MEMORY_MIB,
        sms: 132,
        mode: "Whole".to_owned(),
        mig: Some(MigStatus::default()),
        health: Health { healthy: true, ..Health::default() },
        slices: vec![SliceStatus {
            device: gpu_uuid(index),
            resource: "nvidia.com/gpu".to_owned(),
            total: 1,
            ..SliceStatus::default()
        }],
        ..GpuStatus::default()
    };
    let node = |name: &str| {
        json!({
            "metadata": {"name": name, "uid": name, "labels": {"pool": "a", "kubernetes.io/hostname": name}},
            "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"cpu": "32", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "5"}},
        })
    };
    let gpu_node = |name: &str| {
        json!({
            "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode",
            "metadata": {"name": name, "annotations": {"cleave.dev/cordon": format!("{}=fan", gpu_uuid(7))}},
            "spec": {"planId": "p", "gpus": []},
            "status": {
                "observedGeneration": 1, "agentVersion": "0.1.0",
                "models": [{"model": GPU_MODEL, "migProfiles": profiles}], "gpus": (0..GPUS_PER_NODE).map(gpu).collect::<Vec<_>>(),
            },
        })
    };
    let agent = |node: &str| json!({"metadata": {"name": format!("agent-{node}")}, "spec": {"nodeName": node}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    let held = r#"{"until":9,"nodes":{"n1":[{"resource":"nvidia.com/gpu-mps","units":2,"device":"GPU-3da61522-b946-8b5e-d0da-000000000000"}]}}"#;
    let names = ["n1", "n2"];
    json!({
        "nodes": names.map(node),
        "agents": names.map(agent),
        "gpuNodes": names.map(gpu_node),
        "policies": policies(),
        "pods": [
            pod("a", "nvidia.com/gpu-mps", 3, &json!({})),
            pod("bb", "nvidia.com/gpu-20gb", 1, &json!({})),
            pod("ccc", "nvidia.com/gpu.shared", 1, &json!({"spec/affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a", "b"]}]}]}}}})),
            pod("dddd", "nvidia.com/mig-1g.10gb", 2, &json!({})),
            pod("eeeee", "nvidia.com/gpu", 1, &json!({"spec/nodeName": "n2", "status/phase": "Running"})),
            pod("ffffff", "nvidia.com/gpu-mps", 2, &json!({"spec/nodeName": "n1", "spec/schedulingGates": [], "metadata/annotations": {"cleave.dev/placement": held}})),
        ],
    })
}
