//! Computes a pod's requests from its containers. The kubelet allocates separate units to each
//! container, except that later containers reuse the units of init containers.
use std::collections::BTreeMap;

use super::request::{DeviceRequest, Units};

/// When a container runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerKind {
    /// Runs to completion before later containers start. Later containers reuse its units.
    Init,
    /// An init container with `restartPolicy: Always`. No other container reuses its units.
    Sidecar,
    /// An ordinary container.
    Main,
}

/// One container of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// When the container runs.
    pub kind: ContainerKind,
    /// Units of each resource, from the container's limits.
    pub limits: BTreeMap<String, u32>,
}

/// Units that must be on one device.
#[derive(Debug, Clone, Copy)]
struct UnitGroup {
    units: u32,
    /// Units of completed init containers, which can be reused.
    reusable: u32,
}

/// The units of one request that one container uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestPart {
    /// Index of the container in the pod.
    pub container: usize,
    /// Name of the extended resource.
    pub resource: String,
    /// Units that the container requests, including reused units.
    pub units: Units,
    /// Index into [`device_requests`] of the request that the units belong to.
    pub request: usize,
    /// Units of the request that this container and the previous containers need together. For the
    /// last container of the request, this is the whole request.
    pub needed: Units,
}

/// Returns the requests of a pod: one request for each group of units that must be on one device.
/// Pass containers in the kubelet's order: init containers and sidecars in the order of the spec,
/// then the other containers.
///
/// A container first uses the units of completed init containers, and all units of one container
/// are on one device. For example, an init container with 2 units and a container with 5 are one
/// request for 5 units. An init container with 5 units before containers with 3 and 4 is one
/// request for 7.
pub fn device_requests(containers: &[Container]) -> Vec<DeviceRequest> {
    let request = |resource: &str, group: &UnitGroup| {
        Some(DeviceRequest { resource: resource.to_owned(), units: Units::new(group.units)? })
    };
    group_units(containers, |_, _, _, _| {})
        .iter()
        .flat_map(|(resource, groups)| groups.iter().filter_map(|group| request(resource, group)))
        .collect()
}

/// Returns the request that the units of each container belong to, in the order of the containers.
pub fn request_parts(containers: &[Container]) -> Vec<RequestPart> {
    let mut found = Vec::new();
    let groups = group_units(containers, |container, resource, group, needed| {
        found.push((container, resource.to_owned(), group, needed));
    });
    let first = |resource: &str| groups.range(..resource).map(|(_, groups)| groups.len()).sum::<usize>();
    let part = |(container, resource, group, needed): (usize, String, usize, u32)| {
        let units = containers.get(container)?.limits.get(&resource)?;
        let request = first(&resource) + group;
        Some(RequestPart { container, request, units: Units::new(*units)?, needed: Units::new(needed)?, resource })
    };
    found.into_iter().filter_map(part).collect()
}

/// Groups the units of the containers by device. For each container and resource, calls `belongs`
/// with the index of the container, the resource, the index of its group, and the units that the
/// group needs so far.
fn group_units(
    containers: &[Container],
    mut belongs: impl FnMut(usize, &str, usize, u32),
) -> BTreeMap<&str, Vec<UnitGroup>> {
    let mut groups: BTreeMap<&str, Vec<UnitGroup>> = BTreeMap::new();
    for (number, Container { kind, limits }) in containers.iter().enumerate() {
        for (resource, &units) in limits.iter().filter(|(_, units)| **units > 0) {
            let groups = groups.entry(resource).or_default();
            let index = groups.iter().position(|group| group.reusable > 0).unwrap_or_else(|| {
                groups.push(UnitGroup { units: 0, reusable: 0 });
                groups.len() - 1
            });
            let group = &mut groups[index];
            let reused = units.min(group.reusable);
            group.units = group.units.saturating_add(units - reused);
            group.reusable =
                if *kind == ContainerKind::Init { group.reusable.max(units) } else { group.reusable - reused };
            belongs(number, resource, index, group.units);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request_sizes(containers: &[(ContainerKind, u32)]) -> Vec<u32> {
        let limits = |units| BTreeMap::from([("r".to_owned(), units)]);
        let containers: Vec<Container> =
            containers.iter().map(|&(kind, units)| Container { kind, limits: limits(units) }).collect();
        device_requests(&containers).iter().map(|request| request.units.get()).collect()
    }

    #[test]
    fn containers_have_separate_units_but_reuse_those_of_init_containers() {
        use ContainerKind::{Init, Main, Sidecar};
        for (containers, expected) in [
            (vec![(Main, 3)], vec![3]),
            (vec![(Main, 3), (Main, 2)], vec![3, 2]),
            (vec![(Main, 0)], vec![]),
            (vec![(Init, 2), (Main, 5)], vec![5]),
            (vec![(Init, 5), (Main, 2)], vec![5]),
            (vec![(Init, 5), (Main, 2), (Main, 3)], vec![5]),
            (vec![(Init, 5), (Main, 3), (Main, 4)], vec![7]),
            (vec![(Init, 2), (Init, 5), (Main, 1)], vec![5]),
            (vec![(Init, 3), (Main, 3), (Main, 4)], vec![3, 4]),
            (vec![(Sidecar, 1), (Init, 5), (Main, 2)], vec![1, 5]),
            (vec![(Init, 5), (Sidecar, 1), (Main, 4)], vec![5]),
            (vec![(Init, 2), (Sidecar, 2), (Init, 3), (Main, 1)], vec![2, 3]),
            (vec![(Init, u32::MAX), (Main, u32::MAX), (Main, 1)], vec![u32::MAX, 1]),
        ] {
            assert_eq!(request_sizes(&containers), expected, "{containers:?}");
        }
    }

    #[test]
    fn each_part_names_its_request_and_the_units_needed_so_far() {
        use ContainerKind::{Init, Main, Sidecar};
        for (containers, expected) in [
            (vec![(Main, 3), (Main, 2)], vec![(0, 0, 3), (1, 1, 2)]),
            (vec![(Init, 2), (Main, 5)], vec![(0, 0, 2), (1, 0, 5)]),
            (vec![(Init, 5), (Main, 3), (Main, 4)], vec![(0, 0, 5), (1, 0, 5), (2, 0, 7)]),
            (vec![(Init, 3), (Main, 3), (Main, 0), (Main, 4)], vec![(0, 0, 3), (1, 0, 3), (3, 1, 4)]),
            (vec![(Sidecar, 1), (Init, 5), (Main, 2)], vec![(0, 0, 1), (1, 1, 5), (2, 1, 5)]),
        ] {
            let limits = |units| BTreeMap::from([("r".to_owned(), units)]);
            let made: Vec<Container> =
                containers.iter().map(|&(kind, units)| Container { kind, limits: limits(units) }).collect();
            let parts: Vec<(usize, usize, u32)> =
                request_parts(&made).iter().map(|part| (part.container, part.request, part.needed.get())).collect();
            assert_eq!(parts, expected, "{containers:?}");
        }
    }

    proptest! {
        #[test]
        fn parts_add_up_to_their_request(
            wanted in prop::collection::vec((0_u8..3, prop::collection::btree_map("[ab]", 0_u32..6, 0..3)), 0..8),
        ) {
            let kinds = [ContainerKind::Init, ContainerKind::Sidecar, ContainerKind::Main];
            let containers: Vec<Container> = wanted
                .into_iter()
                .map(|(kind, limits)| Container { kind: kinds[usize::from(kind)], limits })
                .collect();
            let (device_requests, parts) = (device_requests(&containers), request_parts(&containers));
            let wanting = containers.iter().flat_map(|container| container.limits.values()).filter(|units| **units > 0);
            prop_assert_eq!(parts.len(), wanting.count());
            for (index, request) in device_requests.iter().enumerate() {
                let last = parts.iter().rfind(|part| part.request == index);
                prop_assert_eq!(last.map(|part| (part.resource.clone(), part.needed)), Some((request.resource.clone(), request.units)));
            }
            prop_assert!(parts.iter().all(|part| part.request < device_requests.len() && part.units <= part.needed));
        }
    }

    #[test]
    fn units_of_different_resources_are_separate() {
        let container = |kind, limits: &[(&str, u32)]| Container {
            kind,
            limits: limits.iter().map(|(resource, units)| ((*resource).to_owned(), *units)).collect(),
        };
        let device_requests = device_requests(&[
            container(ContainerKind::Init, &[("b", 4)]),
            container(ContainerKind::Main, &[("a", 1), ("b", 2)]),
            container(ContainerKind::Main, &[("a", 2)]),
        ]);
        let device_requests: Vec<(&str, u32)> =
            device_requests.iter().map(|request| (request.resource.as_str(), request.units.get())).collect();
        assert_eq!(device_requests, [("a", 1), ("a", 2), ("b", 4)]);
    }
}
