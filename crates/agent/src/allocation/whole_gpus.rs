//! Chooses whole GPUs by the links between the GPUs. Pure.
use std::collections::BTreeMap;

use cleave_plan::topology::Topology;

use super::allocate::{ChoiceRequest, ResourceView};
use crate::gpu::layout::{PoolKind, parse_slice_id};

/// Chooses the whole GPUs for a request ([`Topology::choose`]). The container gets the GPUs with
/// the best links, and well-linked groups of GPUs remain free. The choice always contains
/// `must_include`.
///
/// Returns `None` if links cannot determine the choice: an available slice is not a whole GPU, the
/// topology contains fewer than two of the available devices, or an id in `must_include` is not
/// available. A topology contains no MIG instances.
pub fn choose_linked_gpus(
    view: &ResourceView<'_>,
    request: &ChoiceRequest<'_>,
    topology: &Topology,
) -> Option<Vec<String>> {
    let mut ids: BTreeMap<&str, &String> = BTreeMap::new();
    for id in request.available {
        // Ignore ids of devices that the agent does not serve.
        let Some(pool) = view.pool_of_slice(id) else { continue };
        if pool.kind != PoolKind::Whole {
            return None;
        }
        ids.insert(&pool.device, id);
    }
    if topology.gpus().iter().filter(|gpu| ids.contains_key(gpu.as_str())).count() < 2 {
        return None;
    }
    let required = request.must_include.iter().map(|id| parse_slice_id(id).map(|(device, _)| device));
    let required: Vec<&str> = required.collect::<Option<_>>()?;
    if required.iter().any(|device| !ids.contains_key(device)) {
        return None;
    }
    let available: Vec<&str> = ids.keys().copied().collect();
    let chosen = topology.choose(&available, &required, request.size);
    Some(chosen.into_iter().filter_map(|device| ids.get(device).map(|id| (*id).clone())).collect())
}

#[cfg(test)]
mod tests {
    use cleave_plan::topology::{GpuLink, PciePath};

    use super::*;
    use crate::allocation::allocate::choose_preferred;
    use crate::gpu::layout::Pool;

    const WHOLE_GPU_RESOURCE: &str = "nvidia.com/gpu";

    fn pool(device: &str, kind: PoolKind) -> Pool {
        Pool { device: device.into(), resource: WHOLE_GPU_RESOURCE.into(), first: 0, count: 1, kind }
    }

    /// Returns the topology of four GPUs. NVLink connects A with D, and B with C.
    fn topology() -> Topology {
        let nvlinks = |one: usize, other: usize| if one + other == 3 { 2 } else { 0 };
        Topology::new(["A", "B", "C", "D"].map(String::from).to_vec(), |one, other| GpuLink {
            pcie: PciePath::SameNumaNode,
            nvlinks: nvlinks(one, other),
        })
    }

    fn ids(text: &str) -> Vec<String> {
        text.split_whitespace().map(|device| format!("{device}::0")).collect()
    }

    /// Returns the UUIDs of the chosen GPUs, or `None` if the links do not determine a choice.
    fn choose(pools: &[Pool], available: &str, must: &str, size: usize) -> Option<String> {
        let (available, must) = (ids(available), ids(must));
        let view = ResourceView { resource: WHOLE_GPU_RESOURCE, pools, reserved: &[] };
        let request = ChoiceRequest { available: &available, must_include: &must, size };
        let chosen = choose_linked_gpus(&view, &request, &topology())?;
        Some(chosen.iter().map(|id| id.trim_end_matches("::0")).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn the_gpus_with_the_best_links_are_chosen() {
        let pools = ["A", "B", "C", "D"].map(|device| pool(device, PoolKind::Whole));
        let by_uuid = choose_preferred(
            &ResourceView { resource: WHOLE_GPU_RESOURCE, pools: &pools, reserved: &[] },
            &ChoiceRequest { available: &ids("A B C"), must_include: &[], size: 2 },
        );
        assert_eq!(by_uuid, ids("A B"), "without links");
        assert_eq!(choose(&pools, "C B A", "", 2).as_deref(), Some("B C"));
        assert_eq!(choose(&pools, "A B C D", "D", 2).as_deref(), Some("A D"));
        assert_eq!(choose(&pools, "A B C D", "A B", 2).as_deref(), Some("A B"), "required");
        assert_eq!(choose(&pools, "A B C", "", 1).as_deref(), Some("A"), "B and C stay together");
        assert_eq!(choose(&pools, "A x C", "", 2).as_deref(), Some("A C"), "an unknown id is ignored");
    }

    #[test]
    fn links_do_not_determine_the_choice_of_other_devices() {
        let whole = || PoolKind::Whole;
        let pools = [pool("A", whole()), pool("B", PoolKind::TimeSliced), pool("C", whole())];
        assert_eq!(choose(&pools, "A B C", "", 2), None, "replicas");
        assert_eq!(choose(&pools, "A C", "", 1).as_deref(), Some("A"));
        let pools = [pool("MIG-1", whole()), pool("MIG-2", whole()), pool("C", whole())];
        assert_eq!(choose(&pools, "MIG-1 MIG-2 C", "", 2), None, "fewer than two GPUs with links");
        let pools = [pool("A", whole()), pool("B", whole())];
        assert_eq!(choose(&pools, "A B", "C", 1), None, "a required GPU that is not available");
    }
}
