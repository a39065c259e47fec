//! Targets for input from the kubelet: requests to a device plugin, the list of allocations, and
//! the kubelet's checkpoint.
use std::collections::BTreeSet;
use std::fmt::Debug;

use cleave_agent::allocation::allocate::{ResourceView, choose_preferred, grant_allocation};
use cleave_agent::allocation::allocation_id;
use cleave_agent::allocation::pending::OpenReservation;
use cleave_agent::gpu::layout::{Pool, PoolKind};
use cleave_kubelet::proto::podresources as pods;
use cleave_kubelet::proto::v1beta1 as plugin;
use cleave_kubelet::{PreferredRequest, container_devices, parse_allocated_devices};
use prost::Message;

use super::fixtures;
use crate::mutate::InputShape;
use crate::{ReadResult, Target, assert_printable};

const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

/// Decodes a message. Checks that encoding and decoding the message again returns the same message.
fn decode_message<T: Message + Default + PartialEq + Debug>(bytes: &[u8]) -> Option<T> {
    let read = T::decode(bytes).ok()?;
    assert_eq!(T::decode(read.encode_to_vec().as_slice()).as_ref(), Ok(&read));
    Some(read)
}

fn sample_pools() -> Vec<Pool> {
    let mps = |count: u8| PoolKind::Mps {
        memory_mib: (1..=u64::from(count)).map(|k| k * 8000).collect(),
        threads: (1..=count).map(|k| 100 / count * k).collect(),
        max_clients: None,
    };
    let pool = |gpu: u32, first, kind| Pool {
        device: fixtures::gpu_uuid(gpu),
        resource: MPS_RESOURCE.to_owned(),
        first,
        count: 10,
        kind,
    };
    vec![
        pool(0, 0, mps(10)),
        pool(1, 7, mps(10)),
        pool(2, 0, PoolKind::TimeSliced),
        pool(3, u32::MAX - 10, PoolKind::Whole),
    ]
}

fn slice_ids(gpu: u32, numbers: std::ops::Range<u32>) -> Vec<String> {
    numbers.map(|number| format!("{}::{number}", fixtures::gpu_uuid(gpu))).collect()
}

pub(super) const DEVICE_PLUGIN: Target = Target {
    name: "device_plugin",
    what: "GetPreferredAllocation, Allocate and PreStartContainer of the kubelet",
    shape: InputShape::Bytes,
    words: &["::", "::0", "::07", "GPU-", "\n\u{2}", "\u{12}", "\u{18}\u{3}", "\u{18}", "\u{7f}"],
    samples: || {
        let preferred = |available: Vec<String>, must: Vec<String>, size| {
            let request = plugin::ContainerPreferredAllocationRequest {
                available_device_i_ds: available,
                must_include_device_i_ds: must,
                allocation_size: size,
            };
            plugin::PreferredAllocationRequest { container_requests: vec![request] }.encode_to_vec()
        };
        let allocate = |ids| {
            plugin::AllocateRequest { container_requests: vec![plugin::ContainerAllocateRequest { devices_ids: ids }] }
                .encode_to_vec()
        };
        vec![
            preferred([slice_ids(0, 0..4), slice_ids(1, 7..10)].concat(), slice_ids(1, 8..9), 3),
            preferred([slice_ids(0, 0..4), slice_ids(1, 7..10)].concat(), Vec::new(), 2),
            preferred(slice_ids(2, 0..3), Vec::new(), 1),
            allocate(slice_ids(0, 0..3)),
            allocate(slice_ids(2, 0..2)),
            allocate([slice_ids(0, 0..1), slice_ids(1, 7..8)].concat()),
            plugin::PreStartContainerRequest { devices_ids: slice_ids(0, 0..2) }.encode_to_vec(),
        ]
    },
    inputs: 30_000,
    run: call_device_plugin,
};

fn call_device_plugin(bytes: &[u8]) -> ReadResult {
    let pools = sample_pools();
    let device = fixtures::gpu_uuid(1);
    let reserved = [OpenReservation { device: &device, units: 2, sizes: vec![2] }];
    let view = ResourceView { resource: MPS_RESOURCE, pools: &pools, reserved: &reserved };
    let mut seen = ReadResult::Refused;
    if let Some(request) = decode_message::<plugin::PreferredAllocationRequest>(bytes) {
        for container in &request.container_requests {
            match PreferredRequest::try_from(container) {
                Err(refusal) => assert_printable(&refusal.to_string()),
                Ok(request) => {
                    let chosen = choose_preferred(&view, &(&request).into());
                    let once: BTreeSet<&String> = chosen.iter().collect();
                    assert!(once.len() == chosen.len() && chosen.len() <= request.size, "{chosen:?}");
                    let offered = |id: &String| request.available.contains(id) || request.must_include.contains(id);
                    assert!(chosen.iter().all(offered), "{chosen:?}");
                    assert!(request.must_include.iter().all(|id| chosen.contains(id)), "{chosen:?}");
                    seen = ReadResult::Read;
                }
            }
        }
    }
    let allocate = decode_message::<plugin::AllocateRequest>(bytes).unwrap_or_default();
    let start = decode_message::<plugin::PreStartContainerRequest>(bytes).unwrap_or_default();
    let lists = allocate.container_requests.iter().map(|container| &container.devices_ids);
    for ids in lists.chain([&start.devices_ids]) {
        match grant_allocation(&view, ids) {
            Err(denied) => assert_printable(&denied.to_string()),
            Ok(allocation) => {
                let (asked, given): (BTreeSet<&String>, BTreeSet<&String>) =
                    (ids.iter().collect(), allocation.ids.iter().collect());
                assert!(asked == given && ids.len() == allocation.ids.len(), "{allocation:?}");
                assert!(allocation.mps.is_none() || allocation.devices.len() == 1, "{allocation:?}");
                assert_eq!(allocation.id(), allocation_id(MPS_RESOURCE, ids));
                seen = ReadResult::Read;
            }
        }
    }
    seen
}

pub(super) const POD_RESOURCES: Target = Target {
    name: "pod_resources",
    what: "the kubelet's list of allocations",
    shape: InputShape::Bytes,
    words: &["nvidia.com/gpu-mps", "GPU-", "::0", "\n", "\u{12}", "\u{1a}", "\u{22}", "\u{7f}"],
    samples: || {
        let devices = |resource: &str, device_ids| pods::ContainerDevices {
            resource_name: resource.to_owned(),
            device_ids,
            topology: Some(pods::TopologyInfo { nodes: vec![pods::NumaNode { id: 1 }] }),
        };
        let container = pods::ContainerResources {
            name: "main".to_owned(),
            devices: vec![
                devices(MPS_RESOURCE, slice_ids(0, 0..3)),
                devices("other/device", slice_ids(1, 0..1)),
                devices(MPS_RESOURCE, slice_ids(0, 3..4)),
            ],
            ..pods::ContainerResources::default()
        };
        let pod =
            pods::PodResources { name: "pod".to_owned(), namespace: "team".to_owned(), containers: vec![container; 2] };
        vec![
            pods::ListPodResourcesResponse { pod_resources: vec![pod; 2] }.encode_to_vec(),
            pods::AllocatableResourcesResponse {
                devices: vec![devices(MPS_RESOURCE, slice_ids(0, 0..9))],
                ..Default::default()
            }
            .encode_to_vec(),
        ]
    },
    inputs: 40_000,
    run: |bytes| {
        decode_message::<pods::AllocatableResourcesResponse>(bytes);
        let Some(answer) = decode_message::<pods::ListPodResourcesResponse>(bytes) else { return ReadResult::Refused };
        let all = answer.pod_resources.iter().flat_map(|pod| &pod.containers).flat_map(|container| &container.devices);
        let listed: usize = all.map(|devices| devices.device_ids.len()).sum();
        let rows = container_devices(answer);
        assert_eq!(rows.iter().map(|row| row.ids.len()).sum::<usize>(), listed, "an id is missing");
        assert!(rows.iter().all(|row| row.ids.is_sorted()));
        ReadResult::Read
    },
};

pub(super) const KUBELET_CHECKPOINT: Target = Target {
    name: "kubelet_checkpoint",
    what: "the checkpoint of the kubelet's device manager",
    shape: InputShape::Json,
    words: &["nvidia.com/gpu-mps", "PodDeviceEntries", "DeviceIDs", "-1", "GPU-a::0"],
    samples: || {
        let entry = |container: &str, ids: &serde_json::Value| serde_json::json!({"PodUID": "2f9a", "ContainerName": container, "ResourceName": MPS_RESOURCE, "DeviceIDs": ids, "AllocResp": "CgA="});
        let file = |entries: serde_json::Value| {
            let data = serde_json::json!({"PodDeviceEntries": entries, "RegisteredDevices": {MPS_RESOURCE: slice_ids(0, 0..10)}});
            serde_json::json!({"Data": data, "Checksum": 2_049_411_213}).to_string().into_bytes()
        };
        let (one, two) = (
            serde_json::json!({"-1": slice_ids(0, 0..3)}),
            serde_json::json!({"0": slice_ids(1, 0..1), "1": slice_ids(1, 1..2)}),
        );
        vec![file(serde_json::json!([entry("main", &one), entry("beside", &two)])), file(serde_json::Value::Null)]
    },
    inputs: 10_000,
    run: |bytes| match parse_allocated_devices(bytes) {
        Err(error) => {
            assert_printable(&error.to_string());
            ReadResult::Refused
        }
        Ok(devices) => {
            // `serde_json` limits the depth of a `Value`, but not the depth of fields that the
            // reader skips. This comparison can therefore fail to parse the input.
            let Ok(file) = serde_json::from_slice::<serde_json::Value>(bytes) else { return ReadResult::Read };
            let entries = file["Data"]["PodDeviceEntries"].as_array().cloned().unwrap_or_default();
            let of = |entry: &serde_json::Value| {
                let nodes = entry["DeviceIDs"].as_object().cloned().unwrap_or_default();
                let ids = nodes.values().flat_map(|ids| ids.as_array().cloned().unwrap_or_default());
                ids.map(|id| (entry["ResourceName"].clone(), id)).collect::<Vec<_>>()
            };
            let all: Vec<_> = entries.iter().flat_map(of).collect();
            assert!(all.iter().all(|(resource, id)| {
                resource
                    .as_str()
                    .zip(id.as_str())
                    .is_some_and(|(resource, id)| devices.contains(&(resource.to_owned(), id.to_owned())))
            }));
            ReadResult::Read
        }
    },
};
