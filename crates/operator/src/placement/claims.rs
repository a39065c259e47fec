//! Keeps the ledger's claims in sync with the pods: reservations of released pods, and allocations
//! of bound pods.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_plan::ledger::{Claim, Ledger, Moment, NodeFacts, Place};

use super::cluster::{ReconcileTime, is_released_and_unbound};
use super::facts::annotated_reservations;
use super::pod_tracker::PodTracker;
use super::replicas::ReplicaIndex;
use crate::pods::{PodObject, full_name};

/// Time after which a reservation is renewed or expires.
pub(super) const RESERVATION_TIME: Duration = Duration::from_secs(300);
/// Maximum number of renewals of a reservation. After an hour, the operator assumes that no
/// scheduler will bind the pod.
pub(super) const MAX_RENEWALS: u32 = 11;
/// How long the ledger keeps the claim of an ended or deleted pod if the agent never reported the
/// pod's allocation. A pod that is deleted without a grace period may still use its shares.
pub(super) const UNREPORTED_CLAIM_TIME: Duration = Duration::from_secs(5);
/// How long the listed units of an ended or deleted pod count as about to be free. After that, the
/// units count as used until the node reports otherwise. The kubelet may be unable to stop the
/// pod's programs, and other pods must not wait for these units.
pub(super) const LISTED_TIME: Duration = Duration::from_secs(60);

/// State of the pods that have claims in the ledger, by pod name.
#[derive(Debug, Default)]
pub(super) struct PodClaims {
    /// UIDs of the pods with a claim.
    uids: BTreeMap<Arc<str>, Arc<str>>,
    /// Pods with a claim, by their controller.
    replicas: ReplicaIndex,
    /// Pods whose node reported all their allocations. The claims of these pods end as soon as the
    /// pods end or are deleted.
    allocated: BTreeSet<Arc<str>>,
    /// UIDs of pods whose reservation expired. The operator ignores such a pod's annotation, even
    /// if the annotation states a later expiry.
    expired: BTreeMap<String, String>,
    /// Number of renewals of each reservation, by the pod's UID.
    renewals: BTreeMap<String, u32>,
    /// Ended or deleted pods that may still use shares, each with the time at which its claim ends.
    lingering: BTreeMap<String, Duration>,
    /// Pods that ended or were deleted less than [`LISTED_TIME`] ago, by name and node, each with
    /// the time of its end. A new pod may have the same name.
    ended: BTreeMap<String, BTreeMap<String, Duration>>,
    /// When the ledger was built. Pods that are not in `ended` count as ended at this time.
    built: Duration,
    /// Nodes on which claims have ended since the last call of [`Self::take_freed_nodes`].
    freed: BTreeSet<String>,
}

impl PodClaims {
    /// Builds the ledger from the nodes' devices, and from the nodes and annotations of pods.
    pub(super) fn rebuild(
        &mut self,
        nodes: BTreeMap<String, NodeFacts>,
        tracker: &PodTracker,
        now: ReconcileTime,
    ) -> Ledger {
        self.uids.clear();
        self.replicas = ReplicaIndex::default();
        self.ended.clear();
        self.built = now.up;
        let claims = tracker.living_pods().filter(|pod| pod.requests_gpus()).filter_map(|pod| {
            let place = placement_of(pod, now)?;
            let name: Arc<str> = Arc::from(full_name(&pod.metadata));
            self.add(Arc::clone(&name), pod);
            Some((name, new_claim(pod, place)))
        });
        Ledger::rebuild_from(nodes, claims)
    }

    /// Returns the UID of a pod with a claim.
    pub(super) fn uid(&self, name: &str) -> Option<&str> {
        self.uids.get(name).map(AsRef::as_ref)
    }

    /// Returns whether a claim is of this pod, and not of an earlier pod of the same name.
    pub(super) fn is_of(&self, name: &str, pod: &PodObject) -> bool {
        pod.metadata.uid.is_some() && self.uid(name) == pod.metadata.uid.as_deref()
    }

    /// Returns the pods with a claim, by their controller.
    pub(super) fn replicas(&self) -> &ReplicaIndex {
        &self.replicas
    }

    /// Records a pod that received a claim.
    pub(super) fn add(&mut self, name: Arc<str>, pod: &PodObject) {
        self.replicas.add(&name, pod.controller_id);
        self.uids.insert(name, pod.metadata.uid.clone().unwrap_or_default());
    }

    /// Ends the claim of a pod. Returns whether the pod had a claim.
    pub(super) fn end_claim(&mut self, ledger: Option<&mut Ledger>, name: &str) -> bool {
        self.uids.remove(name);
        self.replicas.remove(name);
        let Some(claim) = ledger.and_then(|ledger| ledger.remove_claim(name)) else { return false };
        self.freed.extend(claim_nodes(&claim.place));
        true
    }

    /// Removes and returns the nodes on which claims have ended since the last call.
    pub(super) fn take_freed_nodes(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.freed)
    }

    /// Ends the claim of an earlier pod of the same name. Returns false if the earlier pod may
    /// still use shares that its node has not reported. In this case, the claim lasts for up to
    /// [`UNREPORTED_CLAIM_TIME`], and the new pod remains at the gate.
    pub(super) fn end_predecessor_claim(
        &mut self,
        ledger: &mut Ledger,
        name: &str,
        pod: &PodObject,
        up: Duration,
    ) -> bool {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        if self.uids.get(name).is_none_or(|known| **known == *uid) {
            return true;
        }
        self.record_end_of_claim(ledger, name, up);
        let until = self.lingering.remove(name).unwrap_or(up.saturating_add(UNREPORTED_CLAIM_TIME));
        let is_unreported = ledger.claim(name).is_some() && !self.is_reported(ledger, name);
        if pod.node().is_none() && pod.waits_at_gate() && is_unreported && up < until {
            self.lingering.insert(name.to_owned(), until);
            return false;
        }
        self.end_claim(Some(ledger), name);
        self.allocated.remove(name);
        true
    }

    /// Returns whether the node of a pod with a claim has reported all allocations of the pod.
    fn is_reported(&self, ledger: &Ledger, name: &str) -> bool {
        // A released pod may have been bound since the watch last reported it.
        let is_bound = ledger.claim(name).is_some_and(|claim| matches!(claim.place, Place::Bound(_)));
        self.allocated.contains(name) || is_bound && !ledger.awaits_allocation(name)
    }

    /// Records that a pod is bound to a node. Returns true if the node has reported all allocations
    /// of the pod and the pod is not terminating. In this case, the pod needs no further checks.
    pub(super) fn record_binding(&mut self, ledger: &mut Ledger, name: &str, pod: &PodObject, node: &str) -> bool {
        let terminating = pod.metadata.deletion_timestamp.is_some();
        if terminating && self.allocated.contains(name) {
            // The node's report now shows which shares the pod still uses.
            self.end_claim(Some(ledger), name);
            return false;
        }
        match ledger.claim(name).map(|claim| matches!(&claim.place, Place::Bound(to) if to == node)) {
            None => {
                self.add_claim(ledger, name, pod, Place::Bound(node.to_owned()));
            }
            Some(false) => {
                self.freed.extend(ledger.claim(name).into_iter().flat_map(|claim| claim_nodes(&claim.place)));
                ledger.bind(name, node, &pod.device_requests());
                self.add(Arc::from(name), pod);
            }
            Some(true) => {}
        }
        if !self.allocated.contains(name) && !ledger.awaits_allocation(name) {
            let shared = self.uids.get_key_value(name).map(|(name, _)| Arc::clone(name));
            self.allocated.insert(shared.unwrap_or_else(|| Arc::from(name)));
        }
        !terminating && self.allocated.contains(name)
    }

    /// Restores the reservation of a released pod from its annotation, unless it has expired.
    pub(super) fn restore_reservation(&mut self, ledger: &mut Ledger, name: &str, pod: &PodObject, now: ReconcileTime) {
        let uid = pod.uid().unwrap_or_default();
        if ledger.claim(name).is_none()
            && self.expired.get(name) != Some(&uid)
            && let Some(place @ Place::OneOf { .. }) = placement_of(pod, now)
        {
            self.add_claim(ledger, name, pod, place);
        }
    }

    fn add_claim(&mut self, ledger: &mut Ledger, name: &str, pod: &PodObject, place: Place) {
        let name: Arc<str> = Arc::from(name);
        ledger.add_claim(Arc::clone(&name), new_claim(pod, place));
        self.add(name, pod);
    }

    /// Ends the claims of pods that ended or were deleted. `maybe_deleted` contains the candidates,
    /// and `present` the pods that still exist. If the allocation of such a pod was not reported,
    /// its claim remains until the report arrives, for at most [`UNREPORTED_CLAIM_TIME`].
    pub(super) fn remove_ended_pods(
        &mut self,
        ledger: &mut Ledger,
        present: &BTreeSet<String>,
        mut maybe_deleted: BTreeSet<String>,
        up: Duration,
    ) {
        self.lingering.retain(|name, _| !present.contains(name));
        maybe_deleted.extend(self.lingering.keys().cloned());
        maybe_deleted.retain(|name| !present.contains(name));
        for name in &maybe_deleted {
            if ledger.claim(name).is_none() {
                self.lingering.remove(name);
                continue;
            }
            self.record_end_of_claim(ledger, name, up);
            let until = *self.lingering.entry(name.clone()).or_insert(up.saturating_add(UNREPORTED_CLAIM_TIME));
            if self.is_reported(ledger, name) || until <= up {
                self.end_claim(Some(ledger), name);
                self.lingering.remove(name);
            }
        }
        for name in maybe_deleted {
            self.allocated.remove(name.as_str());
            self.expired.remove(&name);
        }
    }

    /// Records pods that ended or were deleted, each with its name and its node. Forgets pods that
    /// ended [`LISTED_TIME`] ago.
    pub(super) fn record_ended_pods(&mut self, ended: impl IntoIterator<Item = (String, String)>, up: Duration) {
        self.ended.retain(|_, nodes| {
            nodes.retain(|_, ended| up < ended.saturating_add(LISTED_TIME));
            !nodes.is_empty()
        });
        for (name, node) in ended {
            self.ended.entry(name).or_default().insert(node, up);
        }
    }

    /// Records that a pod with a claim ended or was deleted. The pod may have been bound to a node
    /// of its reservation since the watch last reported it.
    fn record_end_of_claim(&mut self, ledger: &Ledger, name: &str, up: Duration) {
        let nodes = ledger.claim(name).into_iter().flat_map(|claim| claim_nodes(&claim.place));
        for node in nodes {
            self.ended.entry(name.to_owned()).or_default().entry(node).or_insert(up);
        }
    }

    /// Returns whether units that the node still lists for an ended or deleted pod count as about
    /// to be free. After [`LISTED_TIME`], these units count as used.
    pub(super) fn is_ending(&self, node: &str, name: &str, up: Duration) -> bool {
        let ended = self.ended.get(name).and_then(|nodes| nodes.get(node)).copied().unwrap_or(self.built);
        up < ended.saturating_add(LISTED_TIME)
    }

    /// Ends the expired reservations of pods that the scheduler has reported as unschedulable and
    /// not nominated, and of pods that are no longer released.
    ///
    /// Renews other expired reservations, at most [`MAX_RENEWALS`] times. The scheduler may be slow
    /// or may wait for a volume, or a temporary obstacle on the node may end. [`super::stranded`]
    /// limits the total time.
    pub(super) fn expire_reservations(&mut self, ledger: &mut Ledger, unsettled: &[&PodObject], now: ReconcileTime) {
        let mut due: BTreeSet<String> = ledger.pods_with_expired_claims(Moment(now.epoch)).into_iter().collect();
        for pod in unsettled.iter().filter(|pod| is_released_and_unbound(pod)) {
            let name = full_name(&pod.metadata);
            if !due.remove(&name) {
                continue;
            }
            let uid = pod.uid().unwrap_or_default();
            let nominated = pod.status.nominated_node_name.as_deref().is_some_and(|node| !node.is_empty());
            let renewals = self.renewals.entry(uid.clone()).or_default();
            if *renewals < MAX_RENEWALS && (nominated || !pod.is_reported_unschedulable()) {
                *renewals += 1;
                ledger.extend_claim(&name, expiry(now));
                continue;
            }
            tracing::warn!(pod = name, "reservation expired before the pod was bound");
            self.end_claim(Some(ledger), &name);
            self.expired.insert(name, uid);
        }
        // These pods ended or were deleted, or the watch has not reported their release yet.
        for pod in due {
            self.end_claim(Some(ledger), &pod);
        }
    }

    /// Removes the renewal counts of all pods except released pods that are still not bound.
    pub(super) fn drop_renewals(&mut self, unsettled: &[&PodObject]) {
        let unbound: BTreeSet<&str> = unsettled
            .iter()
            .filter(|pod| is_released_and_unbound(pod))
            .filter_map(|pod| pod.metadata.uid.as_deref())
            .collect();
        self.renewals.retain(|uid, _| unbound.contains(uid.as_str()));
    }

    /// Returns the ended or deleted pods whose claims end within [`UNREPORTED_CLAIM_TIME`].
    pub(super) fn lingering_pods(&self) -> impl Iterator<Item = &str> {
        self.lingering.keys().map(String::as_str)
    }

    /// Returns the time until each lingering claim ends, at least 1 ms.
    pub(super) fn lingering_claim_expiries(&self, up: Duration) -> impl Iterator<Item = Duration> + '_ {
        self.lingering.values().map(move |until| until.saturating_sub(up).max(Duration::from_millis(1)))
    }
}

/// Returns the claim of a pod.
fn new_claim(pod: &PodObject, place: Place) -> Claim {
    Claim { device_requests: pod.device_requests(), place, annotated: annotated_reservations(pod) }
}

/// Returns the nodes of a claim.
pub(super) fn claim_nodes(place: &Place) -> Vec<String> {
    match place {
        Place::OneOf { nodes, .. } => nodes.iter().cloned().collect(),
        Place::Bound(node) => vec![node.clone()],
    }
}

/// Returns the expiry of a reservation that is created or renewed now.
pub(super) fn expiry(now: ReconcileTime) -> Moment {
    Moment(now.epoch.saturating_add(RESERVATION_TIME.as_secs()))
}

/// Returns the node that a pod is bound to, or the nodes of the reservation in the pod's
/// annotation. Returns `None` if the pod is gated, or if it has no annotation.
fn placement_of(pod: &PodObject, now: ReconcileTime) -> Option<Place> {
    if let Some(node) = pod.node() {
        return Some(Place::Bound(node.to_owned()));
    }
    if !pod.spec.scheduling_gates.is_empty() {
        return None;
    }
    let placement = pod.placement.as_ref()?;
    // The operator that wrote the annotation may have had a different clock, or may have renewed
    // the reservation. Therefore the restored reservation lasts no longer than a new one. A
    // reservation that has already expired ends in this reconcile.
    let expires = Moment(placement.until.clamp(now.epoch, expiry(now).0));
    Some(Place::OneOf { nodes: placement.nodes.keys().cloned().collect(), expires })
}
