//! What a pod asks for, from its containers: the kubelet gives each container units of its own, but those of an init container again to
//! the ones that come after it.
use std::collections::BTreeMap;

use super::{Ask, Units};

/// When a container runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Before the others, and to its end: what it had is given to those that come after it.
    Init,
    /// An init container with `restartPolicy: Always`: it keeps what it has.
    Sidecar,
    /// An ordinary container.
    Main,
}

/// One container of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// When it runs.
    pub kind: Kind,
    /// Units of each resource, by its limits.
    pub limits: BTreeMap<String, u32>,
}

/// Units that must be on one device.
#[derive(Debug, Clone, Copy)]
struct Group {
    units: u32,
    /// Of these, those of init containers that have ended.
    reusable: u32,
}

/// What a pod asks for: one ask for each part that has to be on one device. Containers in the kubelet's order: init containers and
/// sidecars as written, then the others.
///
/// A container takes what ended init containers had first, and units of one container are on one device; so an init container of 2 and a
/// container of 5 are one ask of 5, and an init container of 5 before containers of 3 and 4 is one ask of 7.
pub fn asks(containers: &[Container]) -> Vec<Ask> {
    let mut groups: BTreeMap<&str, Vec<Group>> = BTreeMap::new();
    for Container { kind, limits } in containers {
        for (resource, &units) in limits.iter().filter(|(_, units)| **units > 0) {
            let groups = groups.entry(resource).or_default();
            match groups.iter_mut().find(|group| group.reusable > 0) {
                Some(group) => {
                    let reused = units.min(group.reusable);
                    group.units = group.units.saturating_add(units - reused);
                    group.reusable =
                        if *kind == Kind::Init { group.reusable.max(units) } else { group.reusable - reused };
                }
                None => groups.push(Group { units, reusable: if *kind == Kind::Init { units } else { 0 } }),
            }
        }
    }
    let ask =
        |resource: &str, group: &Group| Some(Ask { resource: resource.to_owned(), units: Units::new(group.units)? });
    groups.iter().flat_map(|(resource, groups)| groups.iter().filter_map(|group| ask(resource, group))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(containers: &[(Kind, u32)]) -> Vec<u32> {
        let limits = |units| BTreeMap::from([("r".to_owned(), units)]);
        let containers: Vec<Container> =
            containers.iter().map(|&(kind, units)| Container { kind, limits: limits(units) }).collect();
        asks(&containers).iter().map(|ask| ask.units.get()).collect()
    }

    #[test]
    fn each_container_has_units_of_its_own_but_reuses_those_of_init_containers() {
        use Kind::{Init, Main, Sidecar};
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
            assert_eq!(sizes(&containers), expected, "{containers:?}");
        }
    }

    #[test]
    fn resources_are_apart() {
        let container = |kind, limits: &[(&str, u32)]| Container {
            kind,
            limits: limits.iter().map(|(resource, units)| ((*resource).to_owned(), *units)).collect(),
        };
        let asks = asks(&[
            container(Kind::Init, &[("b", 4)]),
            container(Kind::Main, &[("a", 1), ("b", 2)]),
            container(Kind::Main, &[("a", 2)]),
        ]);
        let asks: Vec<(&str, u32)> = asks.iter().map(|ask| (ask.resource.as_str(), ask.units.get())).collect();
        assert_eq!(asks, [("a", 1), ("a", 2), ("b", 4)]);
    }
}
