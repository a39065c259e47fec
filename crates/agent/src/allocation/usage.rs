//! Tracks the slices in use and the pods that use them. The sources are the kubelet's PodResources
//! list and the allocations that the kubelet does not list yet. Pure.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_kubelet::{AllocatedDevices, ContainerDevices};

use crate::allocation::Allocation;
use crate::gpu::layout::device_of_id;

/// Text that stands for the unknown pod of an allocation that PodResources does not list.
const UNLISTED_USER: &str = "a pod that is being admitted";

/// Allocations by id. The kubelet does not announce the end of an allocation. The agent infers the
/// end from the PodResources list. An allocation that was never listed has a grace period.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allocations {
    by_id: BTreeMap<String, TrackedAllocation>,
    slices: SliceCounts,
}

/// Number of allocations of each slice, by resource and id. Slices without an allocation have no
/// entry. Several allocations can contain the same slice until the agent knows which of the
/// allocations have ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct SliceCounts(BTreeMap<String, BTreeMap<String, usize>>);

impl SliceCounts {
    /// Counts the slices of a new allocation.
    fn add(&mut self, allocation: &Allocation) {
        let of_resource = self.0.entry(allocation.resource.clone()).or_default();
        for id in &allocation.ids {
            match of_resource.get_mut(id) {
                Some(count) => *count += 1,
                None => drop(of_resource.insert(id.clone(), 1)),
            }
        }
    }

    /// Subtracts the slices of an ended allocation. The caller must have added the allocation
    /// before.
    fn remove(&mut self, allocation: &Allocation) {
        let Some(of_resource) = self.0.get_mut(&allocation.resource) else { return };
        for id in &allocation.ids {
            match of_resource.get_mut(id) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(of_resource.remove(id)),
            }
        }
        if of_resource.is_empty() {
            self.0.remove(&allocation.resource);
        }
    }
}

/// An allocation that has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TrackedAllocation {
    allocation: Arc<Allocation>,
    /// Time of the last allocation of the slices.
    at: Instant,
    /// Whether the kubelet has listed the allocation. A listed allocation ends when the kubelet no
    /// longer lists it.
    seen: bool,
}

impl Allocations {
    /// Restores the allocations of a checkpoint. The grace period of each allocation restarts,
    /// because the agent's downtime is unknown.
    pub fn restore(allocations: impl IntoIterator<Item = impl Into<Arc<Allocation>>>, now: Instant) -> Self {
        let mut restored = Self::default();
        for allocation in allocations {
            restored.insert(allocation, now);
        }
        restored
    }

    /// Adds an allocation. If the allocation already exists, its grace period restarts.
    pub fn insert(&mut self, allocation: impl Into<Arc<Allocation>>, now: Instant) {
        let allocation = allocation.into();
        let entry = TrackedAllocation { allocation: Arc::clone(&allocation), at: now, seen: false };
        if let Some(replaced) = self.by_id.insert(allocation.id(), entry) {
            self.slices.remove(&replaced.allocation);
        }
        self.slices.add(&allocation);
    }

    /// Returns the allocation with this id.
    pub fn get(&self, id: &str) -> Option<&Arc<Allocation>> {
        self.by_id.get(id).map(|entry| &entry.allocation)
    }

    /// Returns all allocations, by id.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Arc<Allocation>)> {
        self.by_id.iter().map(|(id, entry)| (id, &entry.allocation))
    }

    /// Returns each allocated slice once, as resource and id. The time is proportional to the
    /// number of slices, not to the number of allocations.
    pub fn slices(&self) -> impl Iterator<Item = (&String, &String)> {
        self.slices.0.iter().flat_map(|(resource, ids)| ids.keys().map(move |id| (resource, id)))
    }

    /// Removes the allocations that have ended according to a PodResources list requested at
    /// `requested_at`. An allocation has ended if the kubelet listed it before but not now, or did
    /// not list it within `grace`.
    ///
    /// The function keeps an allocation while `busy` reports clients for it. The function also
    /// keeps an allocation while the kubelet's checkpoint contains one of the allocation's slices,
    /// because a kubelet that restarted now would count that slice as allocated.
    ///
    /// The function also keeps an allocation while the list contains any of the allocation's
    /// slices. PodResources omits init containers. The kubelet allocates an init container's slices
    /// again to the pod's other containers.
    pub fn remove_ended(
        &mut self,
        listed: &[ContainerDevices],
        requested_at: Instant,
        grace: Duration,
        busy: impl Fn(&str) -> bool,
        kubelet_checkpoint: &AllocatedDevices,
    ) -> RemovalResult {
        self.mark_listed(listed);
        let used = listed_slices(listed);
        let mut removed = RemovalResult::default();
        let Self { by_id, slices } = self;
        by_id.retain(|id, TrackedAllocation { allocation, at, seen }| {
            let young = !*seen && requested_at.saturating_duration_since(*at) < grace;
            if is_listed(allocation, &used) || *at > requested_at || young || busy(id) {
                return true;
            }
            let slice = |id: &String| (allocation.resource.clone(), id.clone());
            let keep = allocation.ids.iter().any(|id| kubelet_checkpoint.contains(&slice(id)));
            if keep {
                removed.in_kubelet_checkpoint.insert(allocation.resource.clone());
            } else {
                slices.remove(allocation);
                removed.ended.push(Allocation::clone(allocation));
            }
            keep
        });
        removed
    }

    /// Marks the listed allocations. Removes no allocation, because the list may be incomplete.
    pub fn mark_listed(&mut self, listed: &[ContainerDevices]) {
        let used = listed_slices(listed);
        for entry in self.by_id.values_mut() {
            entry.seen |= is_listed(&entry.allocation, &used);
        }
    }
}

/// Result of [`Allocations::remove_ended`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemovalResult {
    /// Allocations that have ended and were removed.
    pub ended: Vec<Allocation>,
    /// Resources of allocations that remain only because the kubelet's checkpoint contains them.
    pub in_kubelet_checkpoint: BTreeSet<String>,
}

/// Returns the listed slices, as resource and id.
fn listed_slices(listed: &[ContainerDevices]) -> BTreeSet<(&str, &str)> {
    listed.iter().flat_map(|row| row.ids.iter().map(move |id| (row.resource.as_str(), id.as_str()))).collect()
}

fn is_listed(allocation: &Allocation, used: &BTreeSet<(&str, &str)>) -> bool {
    allocation.ids.iter().any(|id| used.contains(&(allocation.resource.as_str(), id.as_str())))
}

/// The slices in use, each with the pods that use it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SliceUsage(BTreeMap<(String, String), BTreeSet<String>>);

impl SliceUsage {
    /// Combines the kubelet's PodResources list and the agent's allocations.
    pub fn new(listed: &[ContainerDevices], allocations: &Allocations) -> Self {
        let mut usage: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
        for row in listed {
            for id in &row.ids {
                let user = format!("{}/{}", row.namespace, row.pod);
                usage.entry((row.resource.clone(), id.clone())).or_default().insert(user);
            }
        }
        for (resource, id) in allocations.slices() {
            let users = usage.entry((resource.clone(), id.clone())).or_default();
            if users.is_empty() {
                users.insert(UNLISTED_USER.into());
            }
        }
        Self(usage)
    }

    /// Returns the slices of these devices that are in use, as resource, id and users.
    pub fn slices_of_devices<'a>(
        &'a self,
        devices: &'a BTreeSet<&str>,
    ) -> impl Iterator<Item = (&'a str, &'a str, &'a BTreeSet<String>)> {
        self.0
            .iter()
            .filter(|((_, id), _)| devices.contains(device_of_id(id)))
            .map(|((resource, id), users)| (resource.as_str(), id.as_str(), users))
    }

    /// Returns whether this slice is in use.
    pub fn contains(&self, resource: &str, id: &str) -> bool {
        self.0.keys().any(|(of_resource, of_id)| of_resource == resource && of_id == id)
    }

    /// Returns whether no slice is in use.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) use crate::fixtures::{MPS_RESOURCE, allocation, container_devices};

    const ALLOCATION_GRACE: Duration = Duration::from_secs(30);

    fn has_no_clients(_: &str) -> bool {
        false
    }

    fn no_allocated_devices() -> AllocatedDevices {
        AllocatedDevices::new()
    }

    #[test]
    fn an_allocation_in_the_kubelets_checkpoint_has_not_ended() {
        let start = Instant::now();
        let mut allocations = Allocations::default();
        for ids in [["GPU-a::0", "GPU-a::1"], ["GPU-a::2", "GPU-a::3"]] {
            allocations.insert(allocation(&ids), start);
        }
        allocations.mark_listed(&[
            container_devices("p", &["GPU-a::0", "GPU-a::1"]),
            container_devices("q", &["GPU-a::2", "GPU-a::3"]),
        ]);
        let kubelet_checkpoint = AllocatedDevices::from([(MPS_RESOURCE.to_owned(), "GPU-a::1".to_owned())]);
        let removed = allocations.remove_ended(&[], start, ALLOCATION_GRACE, has_no_clients, &kubelet_checkpoint);
        assert_eq!(removed.ended, [allocation(&["GPU-a::2", "GPU-a::3"])]);
        assert_eq!(removed.in_kubelet_checkpoint, BTreeSet::from([MPS_RESOURCE.to_owned()]));
        let other = AllocatedDevices::from([("example.com/gpu".to_owned(), "GPU-a::1".to_owned())]);
        let removed = allocations.remove_ended(&[], start, ALLOCATION_GRACE, has_no_clients, &other);
        assert_eq!((removed.ended.len(), removed.in_kubelet_checkpoint.len()), (1, 0), "a device of another resource");
    }

    #[test]
    fn an_allocation_that_was_never_listed_has_a_grace_period_and_one_no_longer_listed_ends_at_once() {
        let start = Instant::now();
        let soon = start + ALLOCATION_GRACE / 2;
        let mut allocations = Allocations::default();
        allocations.insert(allocation(&["GPU-a::0"]), start);
        allocations.insert(allocation(&["GPU-a::1"]), start);
        let listed = [container_devices("p", &["GPU-a::1"])];
        assert!(
            allocations
                .remove_ended(&listed, soon, ALLOCATION_GRACE, has_no_clients, &no_allocated_devices())
                .ended
                .is_empty(),
            "being admitted"
        );
        assert_eq!(
            allocations.remove_ended(&[], soon, ALLOCATION_GRACE, has_no_clients, &no_allocated_devices()).ended,
            [allocation(&["GPU-a::1"])]
        );
        assert_eq!(
            allocations
                .remove_ended(&[], start + ALLOCATION_GRACE, ALLOCATION_GRACE, has_no_clients, &no_allocated_devices())
                .ended,
            [allocation(&["GPU-a::0"])]
        );
    }

    #[test]
    fn a_repeated_allocation_restarts_the_grace_period_and_older_lists_are_ignored() {
        let start = Instant::now();
        let mut allocations = Allocations::default();
        allocations.insert(allocation(&["GPU-a::0"]), start);
        allocations.mark_listed(&[container_devices("p", &["GPU-a::0"])]);
        allocations.insert(allocation(&["GPU-a::0"]), start + ALLOCATION_GRACE);
        assert!(
            allocations
                .remove_ended(
                    &[],
                    start + ALLOCATION_GRACE / 2,
                    Duration::ZERO,
                    has_no_clients,
                    &no_allocated_devices()
                )
                .ended
                .is_empty()
        );
        assert!(
            allocations
                .remove_ended(&[], start + ALLOCATION_GRACE, ALLOCATION_GRACE, has_no_clients, &no_allocated_devices())
                .ended
                .is_empty()
        );
    }

    #[test]
    fn an_allocation_with_clients_is_kept_even_if_the_kubelet_does_not_list_it() {
        let start = Instant::now();
        let mut allocations = Allocations::restore([allocation(&["GPU-a::0"])], start);
        assert!(
            allocations
                .remove_ended(
                    &[],
                    start + 2 * ALLOCATION_GRACE,
                    ALLOCATION_GRACE,
                    |id| *id == allocation(&["GPU-a::0"]).id(),
                    &no_allocated_devices()
                )
                .ended
                .is_empty()
        );
        assert_eq!(
            allocations
                .remove_ended(
                    &[],
                    start + 2 * ALLOCATION_GRACE,
                    ALLOCATION_GRACE,
                    has_no_clients,
                    &no_allocated_devices()
                )
                .ended
                .len(),
            1
        );
    }

    #[test]
    fn an_init_containers_allocation_is_kept_while_its_pod_uses_part_of_it() {
        let start = Instant::now();
        let mut allocations = Allocations::restore([allocation(&["GPU-a::0", "GPU-a::1"])], start);
        let later = start + ALLOCATION_GRACE * 2;
        assert!(
            allocations
                .remove_ended(
                    &[container_devices("p", &["GPU-a::1"])],
                    later,
                    ALLOCATION_GRACE,
                    has_no_clients,
                    &no_allocated_devices()
                )
                .ended
                .is_empty()
        );
        assert_eq!(
            allocations
                .remove_ended(
                    &[container_devices("p", &["GPU-b::1"])],
                    later,
                    ALLOCATION_GRACE,
                    has_no_clients,
                    &no_allocated_devices()
                )
                .ended
                .len(),
            1
        );
    }

    #[test]
    fn slice_usage_contains_the_pods_that_use_a_device() {
        let mut allocations = Allocations::default();
        allocations.insert(allocation(&["GPU-a::0"]), Instant::now());
        allocations.insert(allocation(&["GPU-a::1"]), Instant::now());
        let usage = SliceUsage::new(&[container_devices("p", &["GPU-a::1", "GPU-b::0"])], &allocations);
        let found: Vec<_> = usage
            .slices_of_devices(&BTreeSet::from(["GPU-a"]))
            .map(|(_, id, users)| (id.to_owned(), users.clone()))
            .collect();
        let set = |user: &str| BTreeSet::from([user.to_owned()]);
        assert_eq!(found, [("GPU-a::0".to_owned(), set(UNLISTED_USER)), ("GPU-a::1".to_owned(), set("ns/p"))]);
    }

    /// A slice may belong to ended allocations and to the latest allocation at the same time.
    #[test]
    fn a_slice_is_in_use_until_all_of_its_allocations_have_ended() {
        let start = Instant::now();
        let mut allocations = Allocations::default();
        for ids in [["GPU-a::0", "GPU-a::1"], ["GPU-a::1", "GPU-a::2"], ["GPU-a::0", "GPU-a::1"]] {
            allocations.insert(allocation(&ids), start);
        }
        let slices = |allocations: &Allocations| -> Vec<String> {
            let all: BTreeSet<&String> = allocations.iter().flat_map(|(_, allocation)| &allocation.ids).collect();
            let slices: Vec<String> = allocations.slices().map(|(_, id)| id.clone()).collect();
            assert!(slices.iter().eq(all), "{slices:?}");
            slices
        };
        assert_eq!(slices(&allocations), ["GPU-a::0", "GPU-a::1", "GPU-a::2"]);
        let first = allocation(&["GPU-a::0", "GPU-a::1"]).id();
        let is_first = |id: &str| id == first;
        allocations.remove_ended(&[], start, Duration::ZERO, is_first, &no_allocated_devices());
        assert_eq!(slices(&allocations), ["GPU-a::0", "GPU-a::1"]);
        allocations.remove_ended(&[], start, Duration::ZERO, has_no_clients, &no_allocated_devices());
        assert_eq!(allocations, Allocations::default());
    }
}
