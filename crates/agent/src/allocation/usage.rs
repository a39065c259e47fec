//! Who holds which slices: the kubelet's PodResources, and allocations so young that it does not
//! list them yet. Pure.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_kubelet::{AllocatedDevices, HeldDevices};

use crate::allocation::Allocation;
use crate::gpu::layout::parse_id;

/// Who an allocation belongs to that PodResources does not list.
const ADMITTED: &str = "a pod that is being admitted";

/// Allocations by id, with when they were last given out. The kubelet never says that one is over:
/// PodResources does, after a grace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allocations(BTreeMap<String, Given>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Given {
    allocation: Allocation,
    at: Instant,
    /// The kubelet has listed it: that it does not any more means something at once.
    listed: bool,
}

impl Allocations {
    /// Those of a checkpoint: their grace starts anew, since how long this process was away says
    /// nothing about pods.
    pub fn remembering(allocations: impl IntoIterator<Item = Allocation>, now: Instant) -> Self {
        Self(
            allocations
                .into_iter()
                .map(|allocation| (allocation.id(), Given { allocation, at: now, listed: false }))
                .collect(),
        )
    }

    /// Gives one out, or again.
    pub fn give(&mut self, allocation: Allocation, now: Instant) {
        self.0.insert(allocation.id(), Given { allocation, at: now, listed: false });
    }

    /// By id.
    pub fn get(&self, id: &str) -> Option<&Allocation> {
        self.0.get(id).map(|given| &given.allocation)
    }

    /// All, by id.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Allocation)> {
        self.0.iter().map(|(id, given)| (id, &given.allocation))
    }

    /// Takes in what the kubelet lists, asked at `asked`: what it listed before and does not any
    /// more goes, and what it never listed in its grace; both are told. What has clients, by
    /// `busy`, stays, and so does what a kubelet that started now would take for allocated, by
    /// `remembered`.
    ///
    /// An allocation stays while any container holds one of its slices: an init container's is not
    /// listed, and its slices go on to the containers of its pod.
    pub fn collect(
        &mut self,
        held: &[HeldDevices],
        asked: Instant,
        grace: Duration,
        busy: impl Fn(&str) -> bool,
        remembered: &AllocatedDevices,
    ) -> Collected {
        self.mark(held);
        let used = used(held);
        let mut collected = Collected::default();
        self.0.retain(|id, Given { allocation, at, listed }| {
            let young = !*listed && asked.saturating_duration_since(*at) < grace;
            if is_listed(allocation, &used) || *at > asked || young || busy(id) {
                return true;
            }
            let slice = |id: &String| (allocation.resource.clone(), id.clone());
            let keep = allocation.ids.iter().any(|id| remembered.contains(&slice(id)));
            if keep {
                collected.remembered.insert(allocation.resource.clone());
            } else {
                collected.over.push(allocation.clone());
            }
            keep
        });
        collected
    }

    /// Takes in what the kubelet lists, where that something is missing means nothing.
    pub fn mark(&mut self, held: &[HeldDevices]) {
        let used = used(held);
        for given in self.0.values_mut() {
            given.listed |= is_listed(&given.allocation, &used);
        }
    }
}

/// What came of allocations that the kubelet does not list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Those that are over.
    pub over: Vec<Allocation>,
    /// Resources of those that would be, did the kubelet's checkpoint not have them.
    pub remembered: BTreeSet<String>,
}

/// Slices that the kubelet lists, by resource and id.
fn used(held: &[HeldDevices]) -> BTreeSet<(&str, &str)> {
    held.iter().flat_map(|row| row.ids.iter().map(move |id| (row.resource.as_str(), id.as_str()))).collect()
}

fn is_listed(allocation: &Allocation, used: &BTreeSet<(&str, &str)>) -> bool {
    allocation.ids.iter().any(|id| used.contains(&(allocation.resource.as_str(), id.as_str())))
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

    /// The slices in use of these devices, as resource, id and holders. An id may be a device's
    /// own: other plugins name their devices so.
    pub fn of<'a>(
        &'a self,
        devices: &'a BTreeSet<&str>,
    ) -> impl Iterator<Item = (&'a str, &'a str, &'a BTreeSet<String>)> {
        self.0
            .iter()
            .filter(|((_, id), _)| devices.contains(parse_id(id).map_or(id.as_str(), |(device, _)| device)))
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
    pub(crate) use crate::fixtures::{MPS, allocation, held};

    const GRACE: Duration = Duration::from_secs(30);

    fn nobody(_: &str) -> bool {
        false
    }

    fn none() -> AllocatedDevices {
        AllocatedDevices::new()
    }

    #[test]
    fn one_that_a_kubelet_that_starts_would_take_for_allocated_is_not_over() {
        let start = Instant::now();
        let mut allocations = Allocations::default();
        for ids in [["GPU-a::0", "GPU-a::1"], ["GPU-a::2", "GPU-a::3"]] {
            allocations.give(allocation(&ids), start);
        }
        allocations.mark(&[held("p", &["GPU-a::0", "GPU-a::1"]), held("q", &["GPU-a::2", "GPU-a::3"])]);
        let on_disk = AllocatedDevices::from([(MPS.to_owned(), "GPU-a::1".to_owned())]);
        let collected = allocations.collect(&[], start, GRACE, nobody, &on_disk);
        assert_eq!(collected.over, [allocation(&["GPU-a::2", "GPU-a::3"])]);
        assert_eq!(collected.remembered, BTreeSet::from([MPS.to_owned()]));
        let other = AllocatedDevices::from([("example.com/gpu".to_owned(), "GPU-a::1".to_owned())]);
        let collected = allocations.collect(&[], start, GRACE, nobody, &other);
        assert_eq!((collected.over.len(), collected.remembered.len()), (1, 0), "another's device of that name");
    }

    #[test]
    fn one_that_was_never_listed_has_its_grace_and_one_that_was_goes_at_once() {
        let start = Instant::now();
        let soon = start + GRACE / 2;
        let mut allocations = Allocations::default();
        allocations.give(allocation(&["GPU-a::0"]), start);
        allocations.give(allocation(&["GPU-a::1"]), start);
        let listed = [held("p", &["GPU-a::1"])];
        assert!(allocations.collect(&listed, soon, GRACE, nobody, &none()).over.is_empty(), "being admitted");
        assert_eq!(allocations.collect(&[], soon, GRACE, nobody, &none()).over, [allocation(&["GPU-a::1"])]);
        assert_eq!(allocations.collect(&[], start + GRACE, GRACE, nobody, &none()).over, [allocation(&["GPU-a::0"])]);
    }

    #[test]
    fn given_out_again_it_is_young_again_and_an_older_list_says_nothing_of_it() {
        let start = Instant::now();
        let mut allocations = Allocations::default();
        allocations.give(allocation(&["GPU-a::0"]), start);
        allocations.mark(&[held("p", &["GPU-a::0"])]);
        allocations.give(allocation(&["GPU-a::0"]), start + GRACE);
        assert!(allocations.collect(&[], start + GRACE / 2, Duration::ZERO, nobody, &none()).over.is_empty());
        assert!(allocations.collect(&[], start + GRACE, GRACE, nobody, &none()).over.is_empty());
    }

    #[test]
    fn one_with_clients_stays_whatever_the_kubelet_lists() {
        let start = Instant::now();
        let mut allocations = Allocations::remembering([allocation(&["GPU-a::0"])], start);
        assert!(
            allocations
                .collect(&[], start + 2 * GRACE, GRACE, |id| *id == allocation(&["GPU-a::0"]).id(), &none())
                .over
                .is_empty()
        );
        assert_eq!(allocations.collect(&[], start + 2 * GRACE, GRACE, nobody, &none()).over.len(), 1);
    }

    #[test]
    fn an_init_containers_allocation_stays_while_its_pod_holds_a_part_of_it() {
        let start = Instant::now();
        let mut allocations = Allocations::remembering([allocation(&["GPU-a::0", "GPU-a::1"])], start);
        let later = start + GRACE * 2;
        assert!(allocations.collect(&[held("p", &["GPU-a::1"])], later, GRACE, nobody, &none()).over.is_empty());
        assert_eq!(allocations.collect(&[held("p", &["GPU-b::1"])], later, GRACE, nobody, &none()).over.len(), 1);
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
