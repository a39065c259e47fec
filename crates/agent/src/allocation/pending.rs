//! Tracks for which containers the kubelet has not called `Allocate` yet, and the device of each
//! container's reservation. Pure: the time is an argument.
//!
//! The module combines three sources, because no single source is complete. The API server lists
//! the pods that are bound to the node, with the reservations in their annotations. `Allocate`
//! calls name a size but no pod. The kubelet's list names the container of each slice, but appears
//! later and omits init containers. The agent attributes a call to a pending container that
//! requests the same number of slices. Containers with a reservation on the allocated device come
//! first. If the kubelet then lists the slices for another container, the two containers have
//! swapped reservations.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_kubelet::ContainerDevices;

use crate::gpu::layout::parse_slice_id;

/// Maximum time from an `Allocate` call until the kubelet lists the pod of the call.
const MAX_LIST_DELAY: Duration = Duration::from_secs(2);
/// Maximum number of answered `Allocate` calls that the agent stores before it knows their pods.
/// Between a pod's admission and the watch's report of the pod, a node admits far fewer pods.
const MAX_UNMATCHED_CALLS: usize = 128;

/// A pod that is bound to this node and requests slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundPod {
    /// UID of the pod.
    pub uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Whether the pod is being deleted. If so, the kubelet may never call `Allocate` for the pod.
    pub terminating: bool,
    /// Whether the kubelet has admitted the pod. If so, the kubelet has called `Allocate` for every
    /// container.
    pub admitted: bool,
    /// The requests of the pod's containers, in the order of the kubelet's `Allocate` calls.
    pub requests: Vec<ContainerRequest>,
}

/// The request of one container for one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest {
    /// Name of the container.
    pub container: String,
    /// Name of the extended resource.
    pub resource: String,
    /// Number of slices, which is also the size of the kubelet's `Allocate` call.
    pub units: u32,
    /// Index of the pod's placement group. All slices of one group must be on one device.
    pub group: usize,
    /// Number of the group's slices that this container and the pod's earlier containers need in
    /// total.
    pub needed: u32,
    /// The device on which the group has a reservation. `None` if the group has no reservation.
    pub reserved_on: Option<String>,
}

/// The part of a reservation that is not yet allocated to a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenReservation<'a> {
    /// UUID of the GPU or MIG device.
    pub device: &'a str,
    /// Number of slices that are not allocated yet.
    pub units: u32,
    /// Numbers of slices of the expected `Allocate` calls, one for each container.
    pub sizes: Vec<u32>,
}

/// Progress of a container's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestState {
    /// The kubelet has not called `Allocate` for the request.
    Pending,
    /// The agent answered an `Allocate` call at this time, and assumes that the call was for this
    /// request.
    Answered(Instant),
    /// The kubelet lists the container or a later container of its pod, or has admitted the pod.
    Listed,
}

#[derive(Debug, Clone)]
struct PendingRequest {
    wanted: ContainerRequest,
    /// Device of the reservation that this request will use. After a swap, this is a reservation
    /// that the operator created for another request.
    reservation: Option<String>,
    state: RequestState,
    /// Device of the allocated slices, if known.
    allocated_on: Option<String>,
}

#[derive(Debug, Clone)]
struct PendingPod {
    namespace: String,
    name: String,
    terminating: bool,
    admitted: bool,
    /// Number of the pod in the order of the API server's reports. The kubelet receives pods in the
    /// same order, and admits them one by one.
    order: u64,
    /// Time at which the API server reported the pod. A list requested before this time may contain
    /// an earlier pod with the same name.
    known_since: Instant,
    requests: Vec<PendingRequest>,
}

/// An answered `Allocate` call for which the agent knows no pod.
#[derive(Debug, Clone)]
struct UnmatchedAllocation {
    resource: String,
    units: u32,
    device: String,
    at: Instant,
}

/// State of the watch that reports pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum PodWatchState {
    /// No watch exists, so no request waits for a pod.
    #[default]
    Disabled,
    /// The watch works, or has not failed yet.
    Working,
    /// The watch fails.
    Failing,
    /// The watch fails, and a request timed out while it waited for its pod.
    Unreliable,
}

/// Known containers for which the kubelet has not called `Allocate` yet.
#[derive(Debug, Clone, Default)]
pub struct PendingAllocations {
    watch: PodWatchState,
    pods: BTreeMap<String, PendingPod>,
    pods_seen: u64,
    unmatched: Vec<UnmatchedAllocation>,
}

/// UID of a pod and index of one of its requests.
type RequestKey = (String, usize);

impl PendingAllocations {
    /// Creates an empty set of containers, to which a watch on the API server adds pods.
    pub fn with_watch() -> Self {
        Self { watch: PodWatchState::Working, ..Self::default() }
    }

    /// Records whether the watch on the API server works.
    pub fn set_watch_working(&mut self, working: bool) {
        self.watch = match (self.watch, working) {
            (PodWatchState::Disabled, _) => PodWatchState::Disabled,
            (_, true) => PodWatchState::Working,
            (PodWatchState::Unreliable, false) => PodWatchState::Unreliable,
            (_, false) => PodWatchState::Failing,
        };
    }

    /// Records that a request timed out because the API server did not report its pod.
    pub fn record_wait_timeout(&mut self) {
        if self.watch == PodWatchState::Failing {
            self.watch = PodWatchState::Unreliable;
        }
    }

    /// Returns whether a known pod has a pending request for this number of slices. Also returns
    /// true if the watch is disabled or unreliable, because the agent may never learn of the pod.
    pub fn expects_request(&self, resource: &str, units: u32) -> bool {
        let wanted =
            |request: &PendingRequest| request.matches(resource, units) && request.state == RequestState::Pending;
        matches!(self.watch, PodWatchState::Disabled | PodWatchState::Unreliable)
            || self.pods.values().flat_map(|pod| &pod.requests).any(wanted)
    }

    /// Returns the reservations of one resource that are not allocated yet, in the order in which
    /// the kubelet will call `Allocate`. Omits terminating pods.
    pub fn open_reservations(&self, resource: &str) -> Vec<OpenReservation<'_>> {
        let mut staying: Vec<&PendingPod> = self.pods.values().filter(|pod| !pod.terminating).collect();
        staying.sort_by_key(|pod| pod.admission_order());
        staying.into_iter().flat_map(|pod| pod.open_reservations(resource)).collect()
    }

    /// Returns the UID of the known pod with this name.
    pub fn pod_uid(&self, namespace: &str, name: &str) -> Option<&str> {
        let is = |pod: &PendingPod| (pod.namespace.as_str(), pod.name.as_str()) == (namespace, name);
        self.pods.iter().find(|(_, pod)| is(pod)).map(|(uid, _)| uid.as_str())
    }

    /// Adds or updates a pod that the API server reports.
    pub fn update_pod(&mut self, bound: BoundPod, now: Instant) {
        let BoundPod { uid, namespace, name, terminating, admitted, requests } = bound;
        let requests = requests.into_iter().map(|wanted| PendingRequest {
            reservation: wanted.reserved_on.clone(),
            wanted,
            state: RequestState::Pending,
            allocated_on: None,
        });
        self.pods_seen += 1;
        let latest = PendingPod {
            namespace,
            name,
            terminating,
            admitted,
            order: self.pods_seen,
            known_since: now,
            requests: requests.collect(),
        };
        let pod = self.pods.entry(uid.clone()).or_insert_with(|| latest.clone());
        (pod.terminating, pod.admitted) = (latest.terminating, latest.admitted);
        for (request, PendingRequest { wanted, reservation, .. }) in pod.requests.iter_mut().zip(latest.requests) {
            if request.wanted.reserved_on != wanted.reserved_on && request.state == RequestState::Pending {
                request.reservation = reservation;
            }
            request.wanted = wanted;
        }
        for index in 0..pod.requests.len() {
            let key = (uid.clone(), index);
            self.match_earlier_answer(&key);
            if admitted {
                self.mark_admitted(&key);
            }
        }
        self.swap_reservations();
    }

    /// Removes a pod that was deleted or has completed.
    pub fn remove_pod(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Removes every pod whose UID is not in `uids`.
    pub fn retain_pods(&mut self, uids: &BTreeSet<String>) {
        self.pods.retain(|uid, _| uids.contains(uid));
    }

    /// Records that an `Allocate` call received `units` slices of a device.
    pub fn record_allocate_answer(&mut self, resource: &str, units: u32, device: &str, now: Instant) {
        if self.watch == PodWatchState::Disabled {
            return;
        }
        let fit = |pod: &PendingPod, request: &PendingRequest| {
            let same = request.reservation.as_deref() == Some(device);
            (!same, pod.terminating, request.reservation.is_some(), pod.admission_order())
        };
        let wanted =
            self.find_requests(|_, request| request.matches(resource, units) && request.state == RequestState::Pending);
        let best = wanted.min_by_key(|(_, pod, request)| fit(pod, request)).map(|(key, _, _)| key);
        if let Some(request) = best.and_then(|key| self.request_mut(&key)) {
            (request.state, request.allocated_on) = (RequestState::Answered(now), Some(device.to_owned()));
            self.swap_reservations();
            return;
        }
        if self.unmatched.len() == MAX_UNMATCHED_CALLS {
            self.unmatched.remove(0);
        }
        self.unmatched.push(UnmatchedAllocation {
            resource: resource.to_owned(),
            units,
            device: device.to_owned(),
            at: now,
        });
    }

    /// Records the PodResources list that the agent requested at `requested_at`.
    pub fn record_pod_resources_list(&mut self, rows: &[ContainerDevices], requested_at: Instant) {
        for row in rows {
            let Some((device, _)) = row.ids.first().and_then(|id| parse_slice_id(id)) else { continue };
            let of_row = self.find_requests(|pod, request| {
                (pod.namespace.as_str(), pod.name.as_str()) == (row.namespace.as_str(), row.pod.as_str())
                    && (request.wanted.container.as_str(), request.wanted.resource.as_str())
                        == (row.container.as_str(), row.resource.as_str())
                    && pod.known_since <= requested_at
            });
            let found: Vec<RequestKey> = of_row.map(|(key, _, _)| key).collect();
            for key in found {
                self.mark_listed(&key, device);
            }
        }
        for pod in self.pods.values_mut().filter(|pod| !pod.admitted) {
            if pod.requests.iter().any(|request| request.state == RequestState::Listed) {
                continue;
            }
            // The kubelet does not list this pod, so the answered call was for another pod, which
            // may no longer exist.
            for request in &mut pod.requests {
                if matches!(request.state, RequestState::Answered(at) if at + MAX_LIST_DELAY < requested_at) {
                    (request.state, request.allocated_on) = (RequestState::Pending, None);
                }
            }
        }
        self.unmatched.retain(|answer| answer.at + MAX_LIST_DELAY >= requested_at);
        self.swap_reservations();
    }

    /// Marks a request as listed on a device. Also marks the earlier requests of its pod as listed,
    /// because the kubelet calls `Allocate` for containers in order.
    fn mark_listed(&mut self, key: &RequestKey, device: &str) {
        let (uid, last) = key;
        let Some(pod) = self.pods.get(uid) else { return };
        let Some(group) = pod.requests.get(*last).map(|request| request.wanted.group) else { return };
        for index in 0..=*last {
            let key = (uid.clone(), index);
            let Some(request) = self.request_mut(&key) else { continue };
            let here = (request.wanted.group == group).then(|| device.to_owned());
            if request.state == RequestState::Listed && (here.is_none() || request.allocated_on == here) {
                continue;
            }
            let PendingRequest { wanted, allocated_on, .. } = request.clone();
            (request.state, request.allocated_on) =
                (RequestState::Listed, here.clone().or(request.allocated_on.take()));
            if here.is_some() && allocated_on == here {
                continue;
            }
            // The agent attributed this request's `Allocate` call to another request. Exchange the
            // devices of the two requests.
            let taken = |other: &RequestKey, request: &PendingRequest| {
                let open = matches!(request.state, RequestState::Answered(_))
                    && request.matches(&wanted.resource, wanted.units);
                open && *other != key && request.allocated_on == here
            };
            let other =
                self.all_requests().find(|(other, _, request)| taken(other, request)).map(|(other, _, _)| other);
            if let Some(other) = other.and_then(|other| self.request_mut(&other)) {
                if allocated_on.is_none() {
                    other.state = RequestState::Pending;
                }
                other.allocated_on = allocated_on;
            } else if let Some(here) = &here {
                let this = |answer: &UnmatchedAllocation| {
                    answer.resource == wanted.resource && answer.units == wanted.units && answer.device == *here
                };
                if let Some(index) = self.unmatched.iter().position(this) {
                    self.unmatched.remove(index);
                }
            }
        }
    }

    /// Marks a request of an admitted pod as listed. If the request was still pending, the agent
    /// may have attributed its `Allocate` call to another request. That request becomes pending
    /// again.
    fn mark_admitted(&mut self, key: &RequestKey) {
        let Some(request) = self.request_mut(key) else { return };
        let was = std::mem::replace(&mut request.state, RequestState::Listed);
        let PendingRequest { wanted, reservation, .. } = request.clone();
        if was != RequestState::Pending {
            return;
        }
        let taken = |pod: &PendingPod, request: &PendingRequest| {
            request.matches(&wanted.resource, wanted.units)
                && matches!(request.state, RequestState::Answered(_))
                && !pod.admitted
        };
        let others = self.find_requests(taken);
        let other = others.min_by_key(|(_, _, other)| other.allocated_on != reservation).map(|(key, _, _)| key);
        let Some(other) = other.and_then(|other| self.request_mut(&other)) else { return };
        other.state = RequestState::Pending;
        let allocated_on = other.allocated_on.take();
        if let Some(request) = self.request_mut(key) {
            request.allocated_on = allocated_on;
        }
    }

    /// Attributes an earlier `Allocate` call to a request of a newly reported pod.
    fn match_earlier_answer(&mut self, key: &RequestKey) {
        let Some(PendingRequest { wanted, reservation, state: RequestState::Pending, .. }) =
            self.request_mut(key).cloned()
        else {
            return;
        };
        let of_size = self.unmatched.iter().enumerate();
        let of_size = of_size.filter(|(_, answer)| answer.resource == wanted.resource && answer.units == wanted.units);
        let best =
            of_size.min_by_key(|(_, answer)| Some(&answer.device) != reservation.as_ref()).map(|(index, _)| index);
        let Some(UnmatchedAllocation { device, at, .. }) = best.map(|index| self.unmatched.remove(index)) else {
            return;
        };
        if let Some(request) = self.request_mut(key) {
            (request.state, request.allocated_on) = (RequestState::Answered(at), Some(device));
        }
    }

    /// Exchanges the reservations of two requests if one was allocated on the device of the other's
    /// reservation, and the other was also allocated elsewhere or is still pending.
    fn swap_reservations(&mut self) {
        let elsewhere = |request: &PendingRequest| {
            request.state != RequestState::Pending
                && request.allocated_on.is_some()
                && request.allocated_on != request.reservation
        };
        // First swap pairs of allocated requests, then pairs of an allocated and a pending request.
        for waiting in [false, true] {
            let misplaced: Vec<RequestKey> =
                self.find_requests(|_, request| elsewhere(request)).map(|(key, _, _)| key).collect();
            for key in misplaced {
                let Some(PendingRequest { wanted, reservation: Some(reservation), allocated_on, .. }) =
                    self.request_mut(&key).filter(|request| elsewhere(request)).cloned()
                else {
                    continue;
                };
                let has_reservation = |request: &PendingRequest| {
                    let right = if waiting { request.state == RequestState::Pending } else { elsewhere(request) };
                    right && request.matches(&wanted.resource, wanted.units) && request.reservation == allocated_on
                };
                let other = self.find_requests(|_, request| has_reservation(request)).map(|(key, _, _)| key).next();
                let Some(other) = other.and_then(|other| self.request_mut(&other)) else { continue };
                other.reservation = Some(reservation);
                if let Some(request) = self.request_mut(&key) {
                    request.reservation = allocated_on;
                }
            }
        }
        // A listed request no longer needs its reservation. Later pods have their own reservations.
        for request in self.pods.values_mut().flat_map(|pod| &mut pod.requests) {
            if request.state == RequestState::Listed && request.allocated_on.is_some() {
                request.reservation.clone_from(&request.allocated_on);
            }
        }
    }

    /// Returns all requests, with their pods.
    fn all_requests(&self) -> impl Iterator<Item = (RequestKey, &PendingPod, &PendingRequest)> {
        self.pods.iter().flat_map(|(uid, pod)| {
            pod.requests.iter().enumerate().map(move |(index, request)| ((uid.clone(), index), pod, request))
        })
    }

    fn find_requests<'a>(
        &'a self,
        which: impl Fn(&PendingPod, &PendingRequest) -> bool + 'a,
    ) -> impl Iterator<Item = (RequestKey, &'a PendingPod, &'a PendingRequest)> {
        self.all_requests().filter(move |(_, pod, request)| which(pod, request))
    }

    /// Returns the request with this key.
    fn request_mut(&mut self, (uid, index): &RequestKey) -> Option<&mut PendingRequest> {
        self.pods.get_mut(uid)?.requests.get_mut(*index)
    }
}

impl PendingRequest {
    /// Returns whether the request is for `units` slices of a resource.
    fn matches(&self, resource: &str, units: u32) -> bool {
        self.wanted.units == units && self.wanted.resource == resource
    }
}

impl PendingPod {
    /// Returns a key that sorts pods in the order in which the kubelet admits them. Pods that the
    /// kubelet has begun to admit come first.
    fn admission_order(&self) -> (bool, u64) {
        (!self.requests.iter().any(|request| request.state != RequestState::Pending), self.order)
    }

    /// Returns the unallocated parts of the reservations of the pod's groups.
    fn open_reservations(&self, resource: &str) -> impl Iterator<Item = OpenReservation<'_>> {
        let groups: BTreeSet<usize> = self
            .requests
            .iter()
            .filter(|request| request.wanted.resource == resource)
            .map(|request| request.wanted.group)
            .collect();
        groups.into_iter().filter_map(|group| {
            let requests = || self.requests.iter().filter(move |request| request.wanted.group == group);
            let wanted = || requests().filter(|request| request.state == RequestState::Pending);
            let whole = requests().map(|request| request.wanted.needed).max()?;
            let allocated_on = requests()
                .filter(|request| request.state != RequestState::Pending)
                .map(|request| request.wanted.needed)
                .max();
            let device = wanted().next_back()?.reservation.as_deref()?;
            let units = whole.saturating_sub(allocated_on.unwrap_or(0));
            Some(OpenReservation { device, units, sizes: wanted().map(|request| request.wanted.units).collect() })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

    /// Returns a pod with one container for each request. Each container has its own reservation on
    /// the given device, or no reservation if the device is empty.
    fn bound_pod(name: &str, requests: &[(u32, &str)]) -> BoundPod {
        let wanted = |(index, &(units, device)): (usize, &(u32, &str))| ContainerRequest {
            container: format!("c{index}"),
            resource: MPS_RESOURCE.into(),
            units,
            group: index,
            needed: units,
            reserved_on: (!device.is_empty()).then(|| device.to_owned()),
        };
        BoundPod {
            uid: format!("uid-{name}"),
            namespace: "ns".into(),
            name: name.into(),
            terminating: false,
            admitted: false,
            requests: requests.iter().enumerate().map(wanted).collect(),
        }
    }

    fn container_devices(pod: &str, container: &str, device: &str, units: u32) -> ContainerDevices {
        ContainerDevices {
            namespace: "ns".into(),
            pod: pod.into(),
            container: container.into(),
            resource: MPS_RESOURCE.into(),
            ids: (0..units).map(|unit| format!("{device}::{unit}")).collect(),
        }
    }

    fn reserved_units(pending: &PendingAllocations) -> Vec<(&str, u32, Vec<u32>)> {
        pending
            .open_reservations(MPS_RESOURCE)
            .into_iter()
            .map(|reserved| (reserved.device, reserved.units, reserved.sizes))
            .collect()
    }

    fn pending_pods(pods: &[BoundPod], now: Instant) -> PendingAllocations {
        let mut pending = PendingAllocations::with_watch();
        pods.iter().for_each(|pod| pending.update_pod(pod.clone(), now));
        pending
    }

    #[test]
    fn a_reservation_remains_until_its_slices_are_allocated() {
        let now = Instant::now();
        let mut pending = pending_pods(&[bound_pod("a", &[(3, "A"), (2, "B")])], now);
        assert_eq!(reserved_units(&pending), [("A", 3, vec![3]), ("B", 2, vec![2])]);
        assert!(
            pending.expects_request(MPS_RESOURCE, 3)
                && !pending.expects_request(MPS_RESOURCE, 4)
                && !pending.expects_request("other", 3)
        );
        assert!(pending.open_reservations("other").is_empty());
        pending.record_allocate_answer(MPS_RESOURCE, 3, "A", now);
        assert_eq!(reserved_units(&pending), [("B", 2, vec![2])]);
        assert!(!pending.expects_request(MPS_RESOURCE, 3), "the reservation is used");
        pending.record_pod_resources_list(&[container_devices("a", "c0", "A", 3)], now);
        assert!(!pending.expects_request(MPS_RESOURCE, 3));
        pending.remove_pod("uid-a");
        assert!(reserved_units(&pending).is_empty());
    }

    #[test]
    fn a_call_is_attributed_by_device_and_the_kubelets_list_corrects_it() {
        let now = Instant::now();
        let mut pending = pending_pods(&[bound_pod("a", &[(3, "A")]), bound_pod("b", &[(3, "B")])], now);
        pending.record_allocate_answer(MPS_RESOURCE, 3, "B", now);
        assert_eq!(reserved_units(&pending), [("A", 3, vec![3])]);
        pending.record_pod_resources_list(&[container_devices("a", "c0", "B", 3)], now);
        assert_eq!(reserved_units(&pending), [("A", 3, vec![3])], "the pods have swapped reservations");
        let mut admitted = bound_pod("a", &[(3, "A")]);
        admitted.admitted = true;
        pending.update_pod(admitted, now);
        pending.remove_pod("uid-a");
        assert_eq!(reserved_units(&pending), [("A", 3, vec![3])], "the reservation is b's now");
        pending.record_allocate_answer(MPS_RESOURCE, 3, "A", now);
        assert!(!pending.expects_request(MPS_RESOURCE, 3));
    }

    #[test]
    fn a_pod_listed_on_another_pods_device_swaps_reservations_with_that_pod() {
        let now = Instant::now();
        let mut pending = pending_pods(&[bound_pod("a", &[(3, "A")]), bound_pod("b", &[(3, "B")])], now);
        pending.record_pod_resources_list(&[container_devices("a", "c0", "B", 3)], now);
        assert_eq!(reserved_units(&pending), [("A", 3, vec![3])], "another agent answered the call");
    }

    #[test]
    fn an_allocate_call_is_forgotten_if_the_kubelet_never_lists_it() {
        let now = Instant::now();
        let mut pending = pending_pods(&[bound_pod("a", &[(3, "A")])], now);
        pending.record_allocate_answer(MPS_RESOURCE, 3, "A", now);
        pending.record_pod_resources_list(&[], now + MAX_LIST_DELAY);
        assert!(!pending.expects_request(MPS_RESOURCE, 3), "it may not be listed yet");
        pending.record_pod_resources_list(&[], now + 2 * MAX_LIST_DELAY);
        assert_eq!(reserved_units(&pending), [("A", 3, vec![3])]);
    }

    #[test]
    fn an_allocate_call_is_attributed_to_a_pod_that_is_reported_later() {
        let now = Instant::now();
        let mut pending = PendingAllocations::with_watch();
        pending.record_allocate_answer(MPS_RESOURCE, 3, "B", now);
        pending.update_pod(bound_pod("a", &[(3, "A")]), now);
        assert!(!pending.expects_request(MPS_RESOURCE, 3), "the call for the pod was answered already");
        pending.update_pod(bound_pod("b", &[(3, "B")]), now);
        assert!(pending.expects_request(MPS_RESOURCE, 3));
        // The reservation on A remains, regardless of which pod made the call.
        assert_eq!(reserved_units(&pending), [("A", 3, vec![3])]);
        let mut late = PendingAllocations::with_watch();
        late.record_allocate_answer(MPS_RESOURCE, 3, "A", now);
        late.record_pod_resources_list(&[], now + 2 * MAX_LIST_DELAY);
        late.update_pod(bound_pod("a", &[(3, "A")]), now + 2 * MAX_LIST_DELAY);
        assert!(late.expects_request(MPS_RESOURCE, 3), "the forgotten call was for another pod");
    }

    #[test]
    fn admitted_and_terminating_pods_have_no_reservation() {
        let now = Instant::now();
        let admitted = BoundPod { admitted: true, ..bound_pod("a", &[(3, "A")]) };
        let terminating = BoundPod { terminating: true, ..bound_pod("b", &[(4, "B")]) };
        let pending = pending_pods(&[admitted, terminating], now);
        assert!(reserved_units(&pending).is_empty());
        assert!(!pending.expects_request(MPS_RESOURCE, 3));
        assert!(pending.expects_request(MPS_RESOURCE, 4), "the kubelet may still call Allocate for the pod");
    }

    #[test]
    fn init_containers_share_their_groups_device_and_are_listed_with_a_later_container() {
        let now = Instant::now();
        let wanted = |container: &str, units, needed| ContainerRequest {
            container: container.into(),
            resource: MPS_RESOURCE.into(),
            units,
            group: 0,
            needed,
            reserved_on: Some("A".into()),
        };
        let pod = BoundPod { requests: vec![wanted("init", 2, 2), wanted("main", 5, 5)], ..bound_pod("a", &[]) };
        let mut pending = pending_pods(std::slice::from_ref(&pod), now);
        assert_eq!(reserved_units(&pending), [("A", 5, vec![2, 5])]);
        pending.record_allocate_answer(MPS_RESOURCE, 2, "A", now);
        assert_eq!(reserved_units(&pending), [("A", 3, vec![5])]);
        let mut restarted = pending_pods(&[pod], now);
        restarted.record_pod_resources_list(&[container_devices("a", "main", "A", 5)], now);
        assert!(!restarted.expects_request(MPS_RESOURCE, 2) && reserved_units(&restarted).is_empty());
    }

    #[test]
    fn a_list_requested_before_the_pod_was_reported_is_ignored_for_the_pod() {
        let now = Instant::now();
        let mut pending = pending_pods(&[bound_pod("a", &[(3, "A")])], now + MAX_LIST_DELAY);
        pending.record_pod_resources_list(&[container_devices("a", "c0", "B", 3)], now);
        assert_eq!(reserved_units(&pending), [("A", 3, vec![3])]);
    }

    #[test]
    fn a_changed_reservation_replaces_the_old_one_and_missing_pods_are_removed() {
        let now = Instant::now();
        let mut pending = pending_pods(&[bound_pod("a", &[(3, "A")]), bound_pod("b", &[(1, "")])], now);
        pending.update_pod(bound_pod("a", &[(3, "B")]), now);
        assert_eq!(reserved_units(&pending), [("B", 3, vec![3])]);
        assert!(pending.expects_request(MPS_RESOURCE, 1), "known, without a reservation");
        pending.retain_pods(&BTreeSet::from(["uid-b".to_owned()]));
        assert!(reserved_units(&pending).is_empty() && pending.expects_request(MPS_RESOURCE, 1));
    }

    #[test]
    fn no_request_waits_if_no_watch_reports_pods() {
        let mut pending = PendingAllocations::default();
        assert!(pending.expects_request(MPS_RESOURCE, 1));
        pending.set_watch_working(true);
        assert!(pending.expects_request(MPS_RESOURCE, 1), "there is no API server");
        let mut pending = PendingAllocations::with_watch();
        assert!(!pending.expects_request(MPS_RESOURCE, 1));
        pending.record_wait_timeout();
        assert!(!pending.expects_request(MPS_RESOURCE, 1), "the next pod may be reported in time");
        pending.set_watch_working(false);
        assert!(!pending.expects_request(MPS_RESOURCE, 1), "the watch may recover in time");
        pending.record_wait_timeout();
        assert!(pending.expects_request(MPS_RESOURCE, 1), "the watch did not recover");
        pending.set_watch_working(true);
        assert!(!pending.expects_request(MPS_RESOURCE, 1));
    }
}
