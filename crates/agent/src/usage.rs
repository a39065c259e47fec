//! Who holds which slices: the kubelet's PodResources, and allocations so young that it does not list them yet. Pure.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_kubelet::HeldDevices;

use crate::allocate::Allocation;
use crate::layout::parse_id;

/// Who an allocation belongs to that PodResources does not list.
const ADMITTED: &str = "a pod that is being admitted";

/// Allocations by id, with when they were last given out. The kubelet never says that one is over: PodResources does, after a grace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allocations(BTreeMap<String, Given>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Given {
    allocation: Allocation,
    at: Instant,
}

impl Allocations {
    /// Those of a checkpoint: their grace starts anew, since how long this process was away says nothing about pods.
    pub fn remembering(allocations: impl IntoIterator<Item = Allocation>, now: Instant) -> Self {
        Self(allocations.into_iter().map(|allocation| (allocation.id(), Given { allocation, at: now })).collect())
    }

    /// Gives one out, or again.
    pub fn give(&mut self, allocation: Allocation, now: Instant) {
        self.0.insert(allocation.id(), Given { allocation, at: now });
    }

    /// By id.
    pub fn get(&self, id: &str) -> Option<&Allocation> {
        self.0.get(id).map(|given| &given.allocation)
    }

    /// All, by id.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Allocation)> {
        self.0.iter().map(|(id, given)| (id, &given.allocation))
    }

    /// Takes in what the kubelet lists, asked at `asked`: what it does not list and is past its grace goes, and is returned.
    ///
    /// An allocation stays while any container holds one of its slices: an init container's is not listed, and its slices go on to the
    /// containers of its pod.
    pub fn collect(&mut self, held: &[HeldDevices], asked: Instant, grace: Duration) -> Vec<Allocation> {
        let used: BTreeSet<(&str, &str)> =
            held.iter().flat_map(|row| row.ids.iter().map(move |id| (row.resource.as_str(), id.as_str()))).collect();
        let mut gone = Vec::new();
        self.0.retain(|_, Given { allocation, at }| {
            let listed = allocation.ids.iter().any(|id| used.contains(&(allocation.resource.as_str(), id.as_str())));
            let keep = listed || asked.saturating_duration_since(*at) < grace;
            if !keep {
                gone.push(allocation.clone());
            }
            keep
        });
        gone
    }
}

/// The slices in use, with their holders.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage(BTreeMap<(String, String), BTreeSet<String>>);

impl Usage {
    /// From what the kubelet lists and what was given out.
    pub fn new(held: &[HeldDevices], allocations: &Allocations) -> Self {
        let mut usage: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
        for row in held {
            for id in &row.ids {
                let holder = format!("{}/{}", row.namespace, row.pod);
                usage.entry((row.resource.clone(), id.clone())).or_default().insert(holder);
            }
        }
        for (_, allocation) in allocations.iter() {
            for id in &allocation.ids {
                let holders = usage.entry((allocation.resource.clone(), id.clone())).or_default();
                if holders.is_empty() {
                    holders.insert(ADMITTED.into());
                }
            }
        }
        Self(usage)
    }

    /// The slices in use of these devices, as resource, id and holders.
    pub fn of<'a>(
        &'a self,
        devices: &'a BTreeSet<&str>,
    ) -> impl Iterator<Item = (&'a str, &'a str, &'a BTreeSet<String>)> {
        self.0
            .iter()
            .filter(|((_, id), _)| parse_id(id).is_some_and(|(device, _)| devices.contains(device)))
            .map(|((resource, id), holders)| (resource.as_str(), id.as_str(), holders))
    }

    /// Whether anything is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const MPS: &str = "nvidia.com/gpu-mps";
    const GRACE: Duration = Duration::from_secs(30);

    pub(crate) fn held(pod: &str, ids: &[&str]) -> HeldDevices {
        HeldDevices {
            namespace: "ns".into(),
            pod: pod.into(),
            container: "c".into(),
            resource: MPS.into(),
            ids: ids.iter().map(|&id| id.to_owned()).collect(),
        }
    }

    pub(crate) fn allocation(ids: &[&str]) -> Allocation {
        Allocation {
            resource: MPS.into(),
            ids: ids.iter().map(|&id| id.to_owned()).collect(),
            devices: vec!["GPU-a".into()],
            mps: None,
        }
    }

    #[test]
    fn an_allocation_goes_when_no_pod_holds_it_and_its_grace_is_over() {
        let start = Instant::now();
        let mut allocations = Allocations::default();
        allocations.give(allocation(&["GPU-a::0"]), start);
        allocations.give(allocation(&["GPU-a::1"]), start);
        assert!(allocations.collect(&[], start + GRACE / 2, GRACE).is_empty(), "being admitted");
        let gone = allocations.collect(&[held("p", &["GPU-a::1"])], start + GRACE, GRACE);
        assert_eq!(gone, [allocation(&["GPU-a::0"])]);
        assert_eq!(allocations.iter().count(), 1);
        let gone = allocations.collect(&[], start + GRACE, GRACE);
        assert_eq!(gone, [allocation(&["GPU-a::1"])]);
    }

    #[test]
    fn giving_it_out_again_starts_the_grace_again() {
        let start = Instant::now();
        let mut allocations = Allocations::default();
        allocations.give(allocation(&["GPU-a::0"]), start);
        allocations.give(allocation(&["GPU-a::0"]), start + GRACE / 2);
        assert!(allocations.collect(&[], start + GRACE, GRACE).is_empty());
    }

    #[test]
    fn an_init_containers_allocation_stays_while_its_pod_holds_a_part_of_it() {
        let start = Instant::now();
        let mut allocations = Allocations::remembering([allocation(&["GPU-a::0", "GPU-a::1"])], start);
        assert!(allocations.collect(&[held("p", &["GPU-a::1"])], start + GRACE * 2, GRACE).is_empty());
        assert_eq!(allocations.collect(&[held("p", &["GPU-b::1"])], start + GRACE * 2, GRACE).len(), 1);
    }

    #[test]
    fn usage_names_the_pods_of_a_device() {
        let mut allocations = Allocations::default();
        allocations.give(allocation(&["GPU-a::0"]), Instant::now());
        allocations.give(allocation(&["GPU-a::1"]), Instant::now());
        let usage = Usage::new(&[held("p", &["GPU-a::1", "GPU-b::0"])], &allocations);
        let found: Vec<_> =
            usage.of(&BTreeSet::from(["GPU-a"])).map(|(_, id, holders)| (id.to_owned(), holders.clone())).collect();
        let set = |holder: &str| BTreeSet::from([holder.to_owned()]);
        assert_eq!(found, [("GPU-a::0".to_owned(), set(ADMITTED)), ("GPU-a::1".to_owned(), set("ns/p"))]);
    }
}
