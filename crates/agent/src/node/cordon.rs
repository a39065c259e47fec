//! Which free slices a cordoned GPU keeps back. Pure.
//!
//! Those in use stay as they are, so that a node never offers fewer than run on it; and so many
//! stay open as are held for pods that are bound to this node and that the kubelet has not asked
//! for yet: it would refuse those for good.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::GpuNodeSpec;

use crate::allocation::pending::PendingAllocations;
use crate::allocation::usage::Usage;
use crate::gpu::layout::{Layout, parse_id};

/// Slices to be told as Unhealthy, by resource and id. `usage` is none while nobody can say what is
/// in use: then none is.
pub fn closed(
    spec: Option<&GpuNodeSpec>,
    layouts: &BTreeMap<String, Layout>,
    usage: Option<&Usage>,
    pending: &PendingAllocations,
) -> BTreeSet<(String, String)> {
    let (Some(spec), Some(usage)) = (spec, usage) else { return BTreeSet::new() };
    let mut closed = BTreeSet::new();
    for gpu in spec.gpus.iter().filter(|gpu| gpu.cordoned) {
        for pool in layouts.get(&gpu.uuid).iter().flat_map(|layout| &layout.pools) {
            let device = BTreeSet::from([pool.device.as_str()]);
            let used: BTreeSet<&str> = usage
                .of(&device)
                .filter(|(resource, id, _)| {
                    *resource == pool.resource
                        && parse_id(id).is_some_and(|(device, number)| pool.holds(device, number))
                })
                .map(|(_, id, _)| id)
                .collect();
            let kept = pending.kept(&pool.resource);
            let kept: u32 = kept.iter().filter(|kept| kept.device == pool.device).map(|kept| kept.units).sum();
            let free = pool.ids().filter(|id| !used.contains(id.as_str()));
            closed.extend(free.skip(kept as usize).map(|id| (pool.resource.clone(), id)));
        }
    }
    closed
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::allocation::pending::{Bound, Want};
    use crate::allocation::usage::Allocations;
    use crate::allocation::usage::tests::held;
    use crate::gpu::layout::tests::{gpu, mps_spec};
    use crate::gpu::layout::wanted;

    const MPS: &str = "nvidia.com/gpu-mps";

    fn closed_of(cordoned: bool, usage: Option<&Usage>, pending: &PendingAllocations) -> Vec<String> {
        let specs: Vec<_> = ["GPU-a", "GPU-b"].map(|uuid| mps_spec(uuid, 4)).into();
        let layout = |index: usize| wanted(Some(&specs[index]), &gpu(&specs[index].uuid, 0), false).unwrap().layout;
        let layouts = BTreeMap::from([("GPU-a".to_owned(), layout(0)), ("GPU-b".to_owned(), layout(1))]);
        let mut spec = GpuNodeSpec { plan_id: "p".into(), gpus: specs };
        spec.gpus[0].cordoned = cordoned;
        closed(Some(&spec), &layouts, usage, pending).into_iter().map(|(_, id)| id).collect()
    }

    #[test]
    fn free_slices_of_a_cordoned_gpu_are_kept_back_and_no_others() {
        let usage = Usage::new(&[held("p", &["GPU-a::1", "GPU-b::0"])], &Allocations::default());
        let none = PendingAllocations::default();
        assert_eq!(closed_of(true, Some(&usage), &none), ["GPU-a::0", "GPU-a::2", "GPU-a::3"]);
        assert!(closed_of(false, Some(&usage), &none).is_empty());
        assert!(closed_of(true, None, &none).is_empty(), "nobody knows what is in use");
    }

    #[test]
    fn what_is_held_for_a_pod_on_its_way_stays_open() {
        let usage = Usage::new(&[held("p", &["GPU-a::1"])], &Allocations::default());
        let mut pending = PendingAllocations::watched();
        let want = Want {
            container: "c".into(),
            resource: MPS.into(),
            units: 2,
            ask: 0,
            needed: 2,
            held: Some("GPU-a".into()),
        };
        let (uid, namespace, name) = ("u".into(), "ns".into(), "next".into());
        let bound = Bound { uid, namespace, name, leaving: false, admitted: false, wants: vec![want] };
        pending.pod(bound, Instant::now());
        assert_eq!(closed_of(true, Some(&usage), &pending), ["GPU-a::3"]);
    }
}
