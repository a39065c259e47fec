//! Selects the free slices of cordoned and quiesced GPUs that the agent lists as Unhealthy. Pure.
//!
//! Slices in use remain listed as Healthy, so that a node never advertises fewer slices than are in
//! use. Slices with a reservation for a pod on this node remain Healthy until the kubelet calls
//! `Allocate` for the pod. If a reserved slice were Unhealthy, the kubelet could reject the pod
//! permanently.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNodeSpec;

use crate::allocation::pending::PendingAllocations;
use crate::allocation::usage::SliceUsage;
use crate::gpu::layout::{Layout, parse_slice_id};

/// Returns the slices to list as Unhealthy, as resource and id. Returns an empty set while `spec`
/// or `usage` is unknown.
pub fn withheld_slices(
    spec: Option<&GpuNodeSpec>,
    layouts: &BTreeMap<String, Layout>,
    usage: Option<&SliceUsage>,
    pending: &PendingAllocations,
) -> BTreeSet<(String, String)> {
    let (Some(spec), Some(usage)) = (spec, usage) else { return BTreeSet::new() };
    let mut withheld = BTreeSet::new();
    for gpu in spec.gpus.iter().filter(|gpu| gpu.cordoned || gpu.quiesced) {
        for pool in layouts.get(&gpu.uuid).iter().flat_map(|layout| &layout.pools) {
            let device = BTreeSet::from([pool.device.as_str()]);
            let used: BTreeSet<&str> = usage
                .slices_of_devices(&device)
                .filter(|(resource, id, _)| {
                    *resource == pool.resource
                        && parse_slice_id(id).is_some_and(|(device, number)| pool.contains(device, number))
                })
                .map(|(_, id, _)| id)
                .collect();
            let reserved = pending.open_reservations(&pool.resource);
            let reserved: u32 =
                reserved.iter().filter(|reserved| reserved.device == pool.device).map(|reserved| reserved.units).sum();
            let free = pool.ids().filter(|id| !used.contains(id.as_str()));
            withheld.extend(free.skip(reserved as usize).map(|id| (pool.resource.clone(), id)));
        }
    }
    withheld
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::allocation::pending::{BoundPod, ContainerRequest};
    use crate::allocation::usage::Allocations;
    use crate::allocation::usage::tests::container_devices;
    use crate::gpu::layout::target_layout;
    use crate::gpu::layout::tests::{gpu, mps_spec};

    const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

    fn withheld_of_gpu(cordoned: bool, usage: Option<&SliceUsage>, pending: &PendingAllocations) -> Vec<String> {
        let specs: Vec<_> = ["GPU-a", "GPU-b"].map(|uuid| mps_spec(uuid, 4)).into();
        let layout =
            |index: usize| target_layout(Some(&specs[index]), &gpu(&specs[index].uuid, 0), false).unwrap().layout;
        let layouts = BTreeMap::from([("GPU-a".to_owned(), layout(0)), ("GPU-b".to_owned(), layout(1))]);
        let mut spec = GpuNodeSpec { plan_id: "p".into(), gpus: specs };
        spec.gpus[0].cordoned = cordoned;
        withheld_slices(Some(&spec), &layouts, usage, pending).into_iter().map(|(_, id)| id).collect()
    }

    #[test]
    fn only_free_slices_of_a_cordoned_gpu_are_withheld() {
        let usage = SliceUsage::new(&[container_devices("p", &["GPU-a::1", "GPU-b::0"])], &Allocations::default());
        let none = PendingAllocations::default();
        assert_eq!(withheld_of_gpu(true, Some(&usage), &none), ["GPU-a::0", "GPU-a::2", "GPU-a::3"]);
        assert!(withheld_of_gpu(false, Some(&usage), &none).is_empty());
        assert!(withheld_of_gpu(true, None, &none).is_empty(), "usage is unknown");
    }

    #[test]
    fn slices_reserved_for_a_bound_pod_are_not_withheld() {
        let usage = SliceUsage::new(&[container_devices("p", &["GPU-a::1"])], &Allocations::default());
        let mut pending = PendingAllocations::with_watch();
        let want = ContainerRequest {
            container: "c".into(),
            resource: MPS_RESOURCE.into(),
            units: 2,
            group: 0,
            needed: 2,
            reserved_on: Some("GPU-a".into()),
        };
        let (uid, namespace, name) = ("u".into(), "ns".into(), "next".into());
        let bound = BoundPod { uid, namespace, name, terminating: false, admitted: false, requests: vec![want] };
        pending.update_pod(bound, Instant::now());
        assert_eq!(withheld_of_gpu(true, Some(&usage), &pending), ["GPU-a::3"]);
    }
}
