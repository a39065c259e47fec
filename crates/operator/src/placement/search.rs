//! Searches for placements of pods at the gate, within one reconcile.
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::Quantity;
use cleave_plan::constraints::NodeChecker;
use cleave_plan::ledger::{DeviceRequest, Fits, Ledger, PendingPod, Tightest};
use cleave_plan::snapshot::{Node as PlanNode, NodeSelectorTerm, Pod as PlanPod, Toleration};
use kube::ResourceExt;

use super::actions::{Destination, Release, ReleaseReason};
use super::cluster::{Input, plan_pod};
use super::constraints::{ConstraintKey, Constraints, check};
use super::free_resources::FreeResources;
use super::nodes::{NodeChecks, Nodes, Provider};
use super::patch;
use super::pod_tracker::PodTracker;
use super::verdict::{Need, Verdict};
use crate::pods::PodObject;

/// Maximum number of nodes that a pod is released to if the operator does not evaluate all rules of
/// the pod. The scheduler may refuse some of these nodes.
const MAX_RELEASE_NODES: usize = 4;

/// A pod at the gate.
pub(super) struct Candidate<'a> {
    /// The pod, as `namespace/name`.
    pub(super) name: String,
    pub(super) pod: &'a PodObject,
    pub(super) plan_pod: PlanPod,
    /// The pod's requests, sorted, without requests that another plugin serves.
    pub(super) device_requests: Vec<DeviceRequest>,
    /// Nodes to which the scheduler did not bind pods of the same controller. The search tries
    /// other nodes first.
    avoided: Option<&'a BTreeSet<String>>,
    /// Whether Cleave serves at least one of the requested resources.
    offered: bool,
    /// Whether kubelets report all requested resources on nodes where Cleave runs, although Cleave
    /// does not serve the resources on these nodes.
    pub(super) unclear: bool,
}

impl<'a> Candidate<'a> {
    pub(super) fn new(name: String, pod: &'a PodObject, nodes: &Nodes, avoided: Option<&'a BTreeSet<String>>) -> Self {
        let mut device_requests = pod.device_requests();
        device_requests.retain(|request| nodes.provider(&request.resource) != Provider::Another);
        device_requests.sort();
        let unclear = device_requests.iter().all(|request| nodes.provider(&request.resource) == Provider::Unclear);
        let offered = device_requests.iter().any(|request| nodes.provider(&request.resource) == Provider::Cleave);
        Self { name, pod, plan_pod: plan_pod(pod), device_requests, avoided, offered, unclear }
    }

    /// Creates a candidate from a pod that was released as unschedulable, with the affinity from
    /// before its release.
    pub(super) fn unschedulable(pod: &'a PodObject, nodes: &Nodes) -> Self {
        let mut candidate = Self::new(crate::pods::full_name(&pod.metadata), pod, nodes, None);
        candidate.plan_pod.affinity = patch::without_larger_gpus(&candidate.plan_pod.affinity);
        candidate
    }

    /// The pod's request to the ledger.
    pub(super) fn pending_pod(&self) -> PendingPod<'_> {
        PendingPod { pod: &self.name, priority: self.plan_pod.priority, device_requests: &self.device_requests }
    }

    /// Returns the action that releases the pod.
    pub(super) fn release(&self, reason: ReleaseReason, destination: Destination<'_>, waited: Duration) -> Release {
        let uid = self.pod.uid().unwrap_or_default();
        let patch = patch::release(self.pod, &reason, destination);
        let reported = self.pod.is_reported_unschedulable();
        Release { pod: self.name.clone(), uid, reason, reported, waited, patch }
    }

    /// Returns a release without a reservation, because the pod was unplaceable for too long.
    pub(super) fn release_unplaceable(&self, need: Need, message: String, waited: Duration) -> Release {
        if self.unclear {
            // The pod has waited longer than any kubelet's report stays outdated. So another plugin
            // serves the resources on nodes where Cleave runs.
            return self.release(ReleaseReason::NotServed, Destination::Anywhere, waited);
        }
        // Without a reservation, the pod would fail on any node that offers the resource, including
        // nodes that the pod may not use now. If no node offers the resource, any node that is
        // added may serve the pod.
        let needs_larger = self.offered || need == Need::LargerGpu;
        let destination =
            if needs_larger { Destination::LargerGpus(&self.device_requests) } else { Destination::Anywhere };
        self.release(ReleaseReason::Unschedulable(message), destination, waited)
    }

    fn node_key(&self) -> NodeKey<'_> {
        (&self.plan_pod.node_selector, self.plan_pod.affinity.as_slice(), self.plan_pod.tolerations.as_slice())
    }
}

/// Node selector, affinity and tolerations, which decide on which nodes a pod may run.
type NodeKey<'a> = (&'a BTreeMap<String, String>, &'a [NodeSelectorTerm], &'a [Toleration]);

/// All properties of a pod that decide whether the pod is placeable.
type SearchKey<'a> = (&'a [DeviceRequest], i32, &'a BTreeMap<String, Quantity>, NodeKey<'a>, Option<ConstraintKey<'a>>);

/// Searches for placements within one reconcile. The search stores which pods are not placeable,
/// because replicas of a workload have the same result.
pub(super) struct PlacementSearch<'a> {
    nodes: &'a Nodes,
    free: RefCell<FreeResources<'a>>,
    constraints: Constraints<'a>,
    eligible: RefCell<BTreeMap<NodeKey<'a>, Vec<&'a str>>>,
    without_place: BTreeMap<SearchKey<'a>, Verdict>,
}

impl<'a> PlacementSearch<'a> {
    pub(super) fn new(input: &Input<'a>, nodes: &'a Nodes, tracker: &'a PodTracker, ledger: &Ledger) -> Self {
        Self {
            nodes,
            free: RefCell::new(FreeResources::new(nodes, tracker, ledger, input.unsettled)),
            constraints: Constraints::new(input.cluster, nodes, (input.living, input.unsettled), ledger),
            eligible: RefCell::default(),
            without_place: BTreeMap::new(),
        }
    }

    /// Finds a placement for a pod.
    ///
    /// # Errors
    /// Why the pod is not placeable.
    pub(super) fn find(&mut self, ledger: &Ledger, candidate: &'a Candidate<'a>) -> Result<Fits, Verdict> {
        let Candidate { name, pod, plan_pod, device_requests, .. } = candidate;
        let constraint_key = self.constraints.key(pod);
        let has_unbound_volume = constraint_key.as_ref().is_some_and(|(.., volumes)| volumes.unbound);
        let key =
            (device_requests.as_slice(), plan_pod.priority, &plan_pod.requests, candidate.node_key(), constraint_key);
        if let Some(known) = self.without_place.get(&key).filter(|_| !ledger.nominations().contains_key(name)) {
            return Err(known.clone());
        }
        let checker =
            key.4.as_ref().and_then(|constraint_key| self.constraints.evaluate_rules(constraint_key, plan_pod));
        let most = if pod.spec.particular || has_unbound_volume { MAX_RELEASE_NODES } else { 1 };
        let has_room = |node: &str| self.has_room(node, candidate);
        let allows = |node: &str| self.allows(node, checker.as_ref());
        let avoids = |node: &str| candidate.avoided.is_some_and(|avoided| avoided.contains(node));
        // Most pods are placeable, so the search usually ends before it has checked every node.
        let may_use = |node: &str| !avoids(node) && self.nodes.admits(node, plan_pod) && allows(node) && has_room(node);
        if let Some(fits) = ledger.fit_tightest(candidate.pending_pod(), most, may_use) {
            return Ok(fits);
        }
        let eligible = self.eligible(candidate);
        let with_room = || eligible.iter().copied().filter(|node| allows(node) && has_room(node));
        if candidate.avoided.is_some()
            && let Ok(fits) =
                ledger.fit_for(candidate.pending_pod(), with_room().filter(|node| !avoids(node)), most, &Tightest)
        {
            return Ok(fits);
        }
        let verdict = match ledger.fit_for(candidate.pending_pod(), with_room(), most, &Tightest) {
            Ok(fits) => return Ok(fits),
            Err(why) => {
                let conflict = |node: &PlanNode| check(checker.as_ref(), node);
                let checks = NodeChecks { conflict: &conflict, has_room: &has_room };
                self.nodes.diagnose(ledger, candidate.pending_pod(), plan_pod, &checks, &why)
            }
        };
        drop(checker);
        self.without_place.insert(key, verdict.clone());
        Err(verdict)
    }

    /// Records a pod's reservation, so that the search for later pods of this reconcile respects
    /// it.
    pub(super) fn reserve(&mut self, candidate: &'a Candidate<'a>, fits: &Fits) {
        fits.iter().for_each(|fit| self.free.borrow_mut().subtract(fit.node(), &candidate.plan_pod.requests));
        self.constraints.add_reserved(candidate.pod, fits.iter().map(|fit| fit.node().to_owned()).collect());
    }

    /// The nodes on which selector, affinity and taints allow the pod.
    pub(super) fn eligible(&self, candidate: &'a Candidate<'a>) -> Vec<&'a str> {
        let mut known = self.eligible.borrow_mut();
        known.entry(candidate.node_key()).or_insert_with(|| self.nodes.eligible(&candidate.plan_pod)).clone()
    }

    /// Eligible nodes that other rules allow and that have CPU, memory and a pod slot for the pod.
    pub(super) fn nodes_with_room(&self, candidate: &'a Candidate<'a>) -> Vec<&'a str> {
        let key = self.constraints.key(candidate.pod);
        let checker = key.as_ref().and_then(|key| self.constraints.evaluate_rules(key, &candidate.plan_pod));
        let mut nodes = self.eligible(candidate);
        nodes.retain(|node| self.allows(node, checker.as_ref()) && self.has_room(node, candidate));
        nodes
    }

    fn has_room(&self, node: &str, candidate: &Candidate<'_>) -> bool {
        self.free.borrow_mut().has_room(node, &candidate.plan_pod.requests)
    }

    fn allows(&self, node: &str, checker: Option<&NodeChecker<'_>>) -> bool {
        self.nodes.0.get(node).is_some_and(|state| check(checker, &state.node).is_ok())
    }
}
