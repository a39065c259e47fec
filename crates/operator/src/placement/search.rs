//! Searches for placements of pods at the gate, within one reconcile.
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::names::RESOURCE_GPU;
use cleave_api::placement::Placement;
use cleave_plan::Quantity;
use cleave_plan::constraints::{Conflict, NodeChecker};
use cleave_plan::ledger::{ChoiceCriteria, Chooser, DeviceRequest, Fits, Ledger, PendingPod, PreemptionNode, Tightest};
use cleave_plan::snapshot::{Node as PlanNode, NodeSelectorTerm, Pod as PlanPod, Requirement, Toleration};

use super::actions::{Destination, Release, ReleaseReason};
use super::claims::PodClaims;
use super::cluster::{ReconcileInput, to_plan_pod};
use super::constraints::{ConstraintKey, Constraints, check_rules};
use super::free_resources::{FreeResources, Requester};
use super::handover;
use super::learning;
use super::nodes::{NodeChecks, Nodes, ResourceProvider};
use super::other_nodes::{AgentLabels, without_requirement};
use super::patch;
use super::pod_tracker::PodTracker;
use super::quota_pass::QuotaTurn;
use super::quotas::QuotaWorlds;
use super::replicas::{KnownReplicas, ReplicaSearch};
use super::verdict::{AutoscalerNeed, Verdict};
use crate::pods::PodObject;
use crate::policies::demand::WaitingPod;

/// Maximum number of nodes that a pod is released to if the operator does not evaluate all rules of
/// the pod. The scheduler may refuse some of these nodes.
const MAX_RELEASE_NODES: usize = 4;

/// A pod at the gate.
pub(super) struct Candidate<'a> {
    /// The pod, as `namespace/name`.
    pub(super) name: String,
    pub(super) pod: &'a PodObject,
    pub(super) plan_pod: PlanPod,
    /// The pod's sorted requests, except those that another plugin serves.
    pub(super) device_requests: Vec<DeviceRequest>,
    /// Nodes to which the scheduler did not bind pods of the same controller. The search tries
    /// other nodes first.
    avoided: Option<&'a BTreeSet<String>>,
    /// Whether Cleave serves at least one of the requested resources.
    offered: bool,
    /// Whether kubelets report all requested resources on `NotReady` nodes, or on nodes on which
    /// Cleave runs but does not serve the resources.
    unclear: bool,
    /// A requested resource that Cleave may serve on a node whose `GpuNode` is missing.
    missing: Option<String>,
    /// Whether the pod requests more whole GPUs than any node has.
    too_many_gpus: bool,
}

impl<'a> Candidate<'a> {
    pub(super) fn new(name: String, pod: &'a PodObject, nodes: &Nodes, avoided: Option<&'a BTreeSet<String>>) -> Self {
        let mut device_requests = pod.device_requests_up_to(|resource| nodes.too_many_units(resource));
        device_requests.sort();
        let mut providers: BTreeMap<String, ResourceProvider> = BTreeMap::new();
        for request in &device_requests {
            if !providers.contains_key(&request.resource) {
                providers.insert(request.resource.clone(), nodes.provider(&request.resource));
            }
        }
        providers.retain(|_, provider| *provider != ResourceProvider::Another);
        device_requests.retain(|request| providers.contains_key(&request.resource));
        let unclear = providers
            .values()
            .all(|provider| matches!(provider, ResourceProvider::Unclear | ResourceProvider::Outdated));
        let offered = providers.values().any(|provider| *provider == ResourceProvider::Cleave);
        let missing = providers.into_iter().find(|(_, provider)| *provider == ResourceProvider::Missing);
        let missing = missing.map(|(resource, _)| resource);
        let whole_gpus = device_requests.iter().filter(|request| request.resource == RESOURCE_GPU).count();
        let too_many_gpus = whole_gpus > nodes.max_gpus();
        let plan_pod = to_plan_pod(pod);
        Self { name, pod, plan_pod, device_requests, avoided, offered, unclear, missing, too_many_gpus }
    }

    /// Creates a candidate from a pod that was released to nodes of another device plugin, with the
    /// affinity from before its release.
    pub(super) fn from_other_nodes(pod: &'a PodObject, nodes: &Nodes, labels: &AgentLabels) -> Self {
        let mut candidate = Self::new(crate::pods::full_name(&pod.metadata), pod, nodes, None);
        candidate.plan_pod.affinity = without_requirement(&candidate.plan_pod.affinity, labels);
        candidate
    }

    /// Returns the reason in the plan for GPUs that are partitioned on demand. Returns `None` if
    /// the pod requests more GPUs than a node has, because the plan does not consider this case.
    pub(super) fn planned_wait<'w>(&self, demand: Option<&'w WaitingPod>) -> Option<&'w WaitingPod> {
        demand.filter(|_| !self.too_many_gpus)
    }

    /// Returns whether kubelets report the requested resources and no agent does. Either an agent
    /// is starting, another plugin serves the resources, or the kubelet's report is old.
    pub(super) fn awaits_agent(&self) -> bool {
        self.unclear || self.missing.is_some()
    }

    /// Returns the explanation for the pod's owner, and whether the pod may become placeable.
    /// `demand` is set if a GPU may be repartitioned for the pod.
    pub(super) fn explain(&self, verdict: Verdict, demand: Option<&WaitingPod>) -> (String, bool) {
        let (message, may_pass) = verdict.explain(&self.device_requests, self.planned_wait(demand));
        match &self.missing {
            Some(resource) if !may_pass => {
                (format!("A node advertises {resource}, but its GpuNode or the status of its GpuNode is missing"), true)
            }
            _ => (message, may_pass),
        }
    }

    /// Creates a candidate from a pod that was released as unschedulable, with the affinity from
    /// before its release.
    pub(super) fn from_unschedulable(pod: &'a PodObject, nodes: &Nodes) -> Self {
        let mut candidate = Self::new(crate::pods::full_name(&pod.metadata), pod, nodes, None);
        candidate.plan_pod.affinity = patch::without_larger_gpus(&candidate.plan_pod.affinity);
        candidate
    }

    /// Returns the pod for the restoration of nominations.
    pub(super) fn for_handover(&self) -> handover::HandoverCandidate<'_> {
        handover::HandoverCandidate { name: &self.name, pod: self.pod, device_requests: &self.device_requests }
    }

    /// Returns the pod's request to the ledger.
    pub(super) fn pending_pod(&self) -> PendingPod<'_> {
        PendingPod { pod: &self.name, priority: self.plan_pod.priority, device_requests: &self.device_requests }
    }

    /// Returns the pod's request for CPU, memory and other resources. With `uses_now`, the pod does
    /// not wait for more resources.
    fn requester<'l>(&self, ledger: &'l Ledger, uses_now: bool) -> Requester<'_, 'l> {
        let PlanPod { priority, requests, .. } = &self.plan_pod;
        Requester { name: &self.name, priority: *priority, requests, ledger, uses_now }
    }

    /// Returns the action that releases the pod.
    pub(super) fn release(&self, reason: ReleaseReason, destination: Destination<'_>, waited: Duration) -> Release {
        let uid = self.pod.uid().unwrap_or_default();
        let patch = patch::release_patch(self.pod, &reason, destination);
        let reported = self.pod.is_reported_unschedulable();
        Release { pod: self.name.clone(), uid, reason, reported, waited, patch }
    }

    /// Returns the action that releases the pod to the nodes of its reservation.
    /// `label` is the value of the pod's capacity label (in quota or over quota).
    pub(super) fn release_reserved(
        &self,
        placement: Placement,
        nodes: &Nodes,
        (waited, label): (Duration, Option<&'static str>),
    ) -> Release {
        let hostnames = placement.nodes.keys().filter_map(|node| nodes.hostname(node)).collect();
        let mut release = self.release(ReleaseReason::Reserved(placement), Destination::Hostnames(hostnames), waited);
        if let Some(label) = label {
            patch::add_label(&mut release.patch, self.pod, label);
        }
        release
    }

    /// Returns the action that releases the pod to nodes of another device plugin, which meet the
    /// requirement.
    pub(super) fn release_to_other_nodes(&self, requirement: Requirement, waited: Duration) -> Release {
        self.release(ReleaseReason::OtherPlugin, Destination::Matching(requirement), waited)
    }

    /// Returns a release without a reservation, because the pod was unplaceable for too long.
    pub(super) fn release_unplaceable(&self, need: AutoscalerNeed, message: String, waited: Duration) -> Release {
        if self.unclear {
            // The pod has waited longer than a kubelet's report can stay outdated. So another
            // plugin serves the resources on nodes where Cleave runs.
            return self.release(ReleaseReason::NotServed, Destination::Anywhere, waited);
        }
        // Without a reservation, the pod could fail on any node that serves the resource, including
        // nodes that the pod may not use now. If no node serves the resource, any new node may
        // serve the pod.
        let needs_larger = self.offered || need == AutoscalerNeed::LargerGpu;
        let destination =
            if needs_larger { Destination::LargerGpus(&self.device_requests) } else { Destination::Anywhere };
        self.release(ReleaseReason::Unschedulable(message), destination, waited)
    }

    /// Returns the properties that determine the nodes on which the pod may run, regardless of
    /// other pods.
    pub(super) fn node_key(&self) -> NodeKey<'_> {
        (&self.plan_pod.node_selector, self.plan_pod.affinity.as_slice(), self.plan_pod.tolerations.as_slice())
    }
}

/// Node selector, affinity and tolerations, which determine the nodes on which a pod may run.
pub(super) type NodeKey<'a> = (&'a BTreeMap<String, String>, &'a [NodeSelectorTerm], &'a [Toleration]);

/// All properties of a pod that determine whether the pod is placeable.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SearchKey<'a> {
    device_requests: &'a [DeviceRequest],
    priority: i32,
    requests: &'a BTreeMap<String, Quantity>,
    nodes: NodeKey<'a>,
    rules: Option<ConstraintKey<'a>>,
    /// The number of the pool, the number of the quota, and whether the pod is within the quota's
    /// guarantee.
    quota: Option<(usize, usize, bool)>,
}

impl SearchKey<'_> {
    /// Returns whether rules about other pods or volumes restrict the pod.
    pub(super) fn has_rules(&self) -> bool {
        self.rules.is_some()
    }

    /// Returns whether one of the pod's claims has no volume yet.
    pub(super) fn has_unbound_volume(&self) -> bool {
        self.rules.as_ref().is_some_and(|(.., volumes)| volumes.unbound)
    }
}

/// The properties of the pods of a gang that determine whether the gang is placeable, each with the
/// number of consecutive pods that have it.
pub(super) type GangKey<'a> = Vec<(SearchKey<'a>, usize)>;

/// An attempt to place all pods of a gang.
struct Attempt<'a> {
    /// Pods that are not placeable beside the pods that the attempt has placed.
    without_place: BTreeMap<SearchKey<'a>, Verdict>,
    /// The pods that the attempt has placed, and their nodes.
    placed: Vec<(&'a Candidate<'a>, Vec<String>)>,
    /// The number of reserved pods before the attempt.
    reserved: usize,
    /// The replicas that were known before the attempt.
    replicas: KnownReplicas,
}

/// Searches for placements within one reconcile. The search stores which pods are not placeable,
/// because replicas of a workload have the same result.
pub(super) struct PlacementSearch<'a> {
    nodes: &'a Nodes,
    claims: &'a PodClaims,
    free: RefCell<FreeResources<'a>>,
    constraints: Constraints<'a>,
    chooser: RefCell<&'a mut Chooser>,
    replicas: RefCell<ReplicaSearch<'a>>,
    eligible: RefCell<BTreeMap<NodeKey<'a>, Vec<&'a str>>>,
    without_place: BTreeMap<SearchKey<'a>, Verdict>,
    /// Gangs that are not placeable: the position of a pod that is not placeable beside the others.
    gangs_without_place: BTreeMap<GangKey<'a>, (usize, Verdict)>,
    /// The current attempt to place a gang.
    attempt: Option<Attempt<'a>>,
    /// Whether the ledger withholds devices where the current pod costs too much.
    is_narrowed: bool,
    /// Pools of GPUs with quotas, if quotas are enforced.
    worlds: Option<&'a QuotaWorlds>,
    /// The turn of the current pod, if the rules of quotas apply to the pod.
    turn: Option<QuotaTurn>,
    up: Duration,
}

impl<'a> PlacementSearch<'a> {
    pub(super) fn new(
        input: &ReconcileInput<'a>,
        (nodes, tracker, claims): (&'a Nodes, &'a PodTracker, &'a PodClaims),
        ledger: &Ledger,
        chooser: &'a mut Chooser,
    ) -> Self {
        learning::update_cpu(chooser, nodes, tracker, ledger, input.unsettled);
        learning::update_score(chooser, input.unsettled);
        Self {
            chooser: RefCell::new(chooser),
            replicas: RefCell::new(ReplicaSearch::new(claims.replicas(), nodes, &input.cluster.policies)),
            nodes,
            claims,
            free: RefCell::new(FreeResources::new((nodes, tracker), ledger, input.unsettled, input.now.epoch)),
            constraints: Constraints::new(input.cluster, nodes, (tracker, input.unsettled), ledger),
            eligible: RefCell::default(),
            without_place: BTreeMap::new(),
            gangs_without_place: BTreeMap::new(),
            attempt: None,
            is_narrowed: false,
            worlds: None,
            turn: None,
            up: input.now.up,
        }
    }

    /// Makes the search respect quotas. With quotas, call [`Self::set_turn`] before each search.
    pub(super) fn with_quotas(self, worlds: Option<&'a QuotaWorlds>) -> Self {
        Self { worlds, ..self }
    }

    /// Limits later searches to the pool of a turn. While quotas are enforced, `None` means the
    /// nodes that are in no pool with an enforced quota.
    pub(super) fn set_turn(&mut self, turn: Option<QuotaTurn>) {
        self.turn = turn;
    }

    /// Finds a placement for a pod.
    ///
    /// # Errors
    /// Returns why the pod is not placeable.
    pub(super) fn find(&mut self, ledger: &Ledger, candidate: &'a Candidate<'a>) -> Result<Fits, Verdict> {
        let Candidate { name, pod, plan_pod, .. } = candidate;
        let key = self.key(candidate);
        let of_attempt = self.attempt.as_ref().map(|attempt| &attempt.without_place);
        let known = self.without_place.get(&key).or_else(|| of_attempt?.get(&key));
        if let Some(known) = known.filter(|_| !self.is_narrowed && !ledger.nominations().contains_key(name)) {
            return Err(known.clone());
        }
        let checker =
            key.rules.as_ref().and_then(|constraint_key| self.constraints.evaluate_rules(constraint_key, plan_pod));
        let is_evaluated = !pod.spec.particular && !pod.spec.rules.are_too_many() && !key.has_unbound_volume();
        let most = if is_evaluated { 1 } else { MAX_RELEASE_NODES };
        let shortage = |node: &str| self.free.borrow_mut().shortage(node, candidate.requester(ledger, true));
        let has_room = |node: &str| shortage(node).is_none();
        // This pod has no node and so no allocations. The allocations of an earlier pod with the
        // same name would count as allocations of this pod, and end the pod's reservation.
        let waits_for_predecessor = Cell::new(false);
        let is_free_of_predecessor = |node: &str| {
            let lists = ledger.has_allocations(node, name);
            waits_for_predecessor.set(waits_for_predecessor.get() || lists);
            !lists
        };
        let allows = |node: &str| self.allows(node, checker.as_ref()) && is_free_of_predecessor(node);
        let avoids = |node: &str| candidate.avoided.is_some_and(|avoided| avoided.contains(node));
        // Most pods are placeable, so the search usually ends before it has checked every node.
        let may_use = |node: &str| !avoids(node) && self.nodes.admits(node, plan_pod) && allows(node) && has_room(node);
        let mut replicas = self.replicas.borrow_mut();
        let siblings = replicas.siblings_of(pod, ledger);
        let beside = ChoiceCriteria { cpu: learning::cpu_millis(&plan_pod.requests), siblings };
        let chosen = ledger.choose(candidate.pending_pod(), beside, &mut self.chooser.borrow_mut(), most, may_use);
        if let Some(fits) = chosen {
            return Ok(fits);
        }
        let eligible = self.eligible_nodes(candidate);
        let with_room = || eligible.iter().copied().filter(|node| allows(node) && has_room(node));
        // The search does not rank requests for several parts of GPUs. For such requests, the
        // search only avoids the nodes of replicas.
        let apart = || with_room().filter(|node| !avoids(node) && siblings.has_none_on(node));
        if candidate.device_requests.len() > 1
            && let Ok(fits) = ledger.fit_for(candidate.pending_pod(), apart(), most, &Tightest)
        {
            return Ok(fits);
        }
        if candidate.avoided.is_some()
            && let Ok(fits) =
                ledger.fit_for(candidate.pending_pod(), with_room().filter(|node| !avoids(node)), most, &Tightest)
        {
            return Ok(fits);
        }
        let verdict = match ledger.fit_for(candidate.pending_pod(), with_room(), most, &Tightest) {
            Ok(fits) => return Ok(fits),
            Err(why) => {
                let conflict = |node: &PlanNode| {
                    check_rules(checker.as_ref(), node)?;
                    if is_free_of_predecessor(&node.name) { Ok(()) } else { Err(Conflict::Predecessor) }
                };
                let checks = NodeChecks { conflict: &conflict, shortage: &shortage };
                self.nodes.explain_unplaceable(ledger, candidate.pending_pod(), plan_pod, &checks, &why)
            }
        };
        drop(checker);
        if !waits_for_predecessor.get() && !self.is_narrowed {
            // Without the pods that the attempt has placed, the pod may be placeable.
            let known = self.attempt.as_mut().map_or(&mut self.without_place, |attempt| &mut attempt.without_place);
            known.insert(key, verdict.clone());
        }
        Err(verdict)
    }

    /// Like [`Self::find`], while the ledger withholds devices that the pod could use at a higher
    /// cost. The results of this search and of other searches do not apply to each other.
    pub(super) fn find_on_cheap_devices(&mut self, ledger: &Ledger, candidate: &'a Candidate<'a>) -> Option<Fits> {
        self.is_narrowed = true;
        let found = self.find(ledger, candidate);
        self.is_narrowed = false;
        found.ok()
    }

    /// Returns the properties of a gang that determine whether it is placeable. Returns `None` if
    /// units are nominated for a pod of the gang, because other gangs do not get these.
    pub(super) fn gang_key(&self, ledger: &Ledger, gang: &[&'a Candidate<'a>]) -> Option<GangKey<'a>> {
        let mut keys = GangKey::new();
        for &one in gang {
            if ledger.nominations().contains_key(&one.name) {
                return None;
            }
            let key = self.key(one);
            match keys.last_mut() {
                Some((last, count)) if *last == key => *count += 1,
                _ => keys.push((key, 1)),
            }
        }
        Some(keys)
    }

    /// Returns why no gang with these properties is placeable, if that is known: the position of a
    /// pod that is not placeable beside the others, and its verdict.
    pub(super) fn gang_without_place(&self, key: &GangKey<'a>) -> Option<(usize, Verdict)> {
        self.gangs_without_place.get(key).cloned()
    }

    /// Starts an attempt to place the pods of a gang. The cost depends on the gang alone, not on
    /// the number of nodes: a tenant can create thousands of gangs of which only a part fits.
    pub(super) fn begin_gang(&mut self, gang: &[&'a Candidate<'a>]) {
        self.attempt = Some(Attempt {
            without_place: BTreeMap::new(),
            placed: Vec::new(),
            reserved: self.constraints.reserved_pods(),
            replicas: self.replicas.borrow().known_about(gang.iter().map(|one| one.pod)),
        });
    }

    /// Ends an attempt that has placed all pods.
    pub(super) fn keep_gang(&mut self) {
        self.attempt = None;
    }

    /// Removes the reservations of an attempt. The ledger must no longer contain them. Records that
    /// gangs with this key are not placeable.
    pub(super) fn undo_gang(&mut self, ledger: &mut Ledger, key: Option<GangKey<'a>>, why: (usize, Verdict)) {
        let Some(Attempt { placed, reserved, replicas, .. }) = self.attempt.take() else { return };
        for (one, nodes) in placed {
            nodes.iter().for_each(|node| self.free.get_mut().add(node, &one.plan_pod.requests));
        }
        self.constraints.truncate_reserved(reserved);
        self.replicas.get_mut().restore(replicas);
        ledger.synchronize(self.chooser.get_mut());
        self.gangs_without_place.extend(key.map(|key| (key, why)));
    }

    /// Records a pod's reservation, so that the search for later pods of this reconcile respects
    /// it.
    pub(super) fn reserve(&mut self, ledger: &mut Ledger, candidate: &'a Candidate<'a>, fits: &Fits) {
        let chooser = self.chooser.get_mut();
        ledger.synchronize(chooser);
        for fit in fits.iter() {
            self.free.borrow_mut().subtract(fit.node(), &candidate.plan_pod.requests);
            chooser.subtract_cpu(fit.node(), learning::cpu_millis(&candidate.plan_pod.requests));
            let devices = fit.reservations().iter().map(|take| take.device.as_str());
            self.replicas.get_mut().reserve(candidate.pod, fit.node(), devices);
        }
        let nodes: Vec<String> = fits.iter().map(|fit| fit.node().to_owned()).collect();
        if let Some(attempt) = &mut self.attempt {
            attempt.placed.push((candidate, nodes.clone()));
        }
        self.constraints.add_reserved(candidate.pod, nodes);
    }

    /// Returns the nodes on which selector, affinity and taints allow the pod.
    pub(super) fn eligible_nodes(&self, candidate: &'a Candidate<'a>) -> Vec<&'a str> {
        let mut known = self.eligible.borrow_mut();
        known.entry(candidate.node_key()).or_insert_with(|| self.nodes.eligible_nodes(&candidate.plan_pod)).clone()
    }

    /// Returns the nodes on which preemption may help the pod: eligible nodes that other rules
    /// allow and that `is_searched` accepts. For each node, returns the CPU, memory and other
    /// resources that it lacks. Also returns the units that it lacks in the scheduler's sum because
    /// of faulted GPUs.
    pub(super) fn preemption_nodes(
        &self,
        ledger: &Ledger,
        candidate: &'a Candidate<'a>,
        is_searched: impl Fn(&str) -> bool,
    ) -> Vec<PreemptionNode<'a>> {
        self.nodes_with_missing(ledger, candidate, |node, checker| is_searched(node) && self.allows(node, checker))
    }

    /// Like [`Self::preemption_nodes`], but returns all eligible nodes that rules between pods and
    /// volumes allow, regardless of quotas.
    pub(super) fn nodes_allowed_by_rules(
        &self,
        ledger: &Ledger,
        candidate: &'a Candidate<'a>,
    ) -> Vec<PreemptionNode<'a>> {
        self.nodes_with_missing(ledger, candidate, |node, checker| self.follows_rules(node, checker))
    }

    fn nodes_with_missing(
        &self,
        ledger: &Ledger,
        candidate: &'a Candidate<'a>,
        may_use: impl Fn(&str, Option<&NodeChecker<'_>>) -> bool,
    ) -> Vec<PreemptionNode<'a>> {
        let key = self.constraints.key(candidate.pod);
        let checker = key.as_ref().and_then(|key| self.constraints.evaluate_rules(key, &candidate.plan_pod));
        let mut free = self.free.borrow_mut();
        let nodes = self.eligible_nodes(candidate).into_iter();
        let nodes = nodes.filter(|node| may_use(node, checker.as_ref()));
        let nodes = nodes.filter(|node| self.will_be_free_of_predecessor(ledger, node, &candidate.name));
        nodes
            .filter_map(|name| {
                let requester = candidate.requester(ledger, false);
                let mut missing = free.missing_resources(name, requester)?;
                missing.extend(free.units_missing_by_faults(name, requester));
                Some(PreemptionNode { name, missing })
            })
            .collect()
    }

    /// Returns those of the given nodes that the rules of pods and volumes allow, and that have
    /// enough CPU, memory and other resources for the pod.
    pub(super) fn nodes_with_room<'n>(
        &self,
        ledger: &Ledger,
        candidate: &'a Candidate<'a>,
        nodes: impl Iterator<Item = &'n str>,
    ) -> Vec<&'n str> {
        let key = self.constraints.key(candidate.pod);
        let checker = key.as_ref().and_then(|key| self.constraints.evaluate_rules(key, &candidate.plan_pod));
        let nodes = nodes.filter(|node| self.has_room(ledger, node, candidate) && self.allows(node, checker.as_ref()));
        nodes.filter(|node| self.will_be_free_of_predecessor(ledger, node, &candidate.name)).collect()
    }

    /// Nominates a pod for a node, so that the search for later pods of this reconcile keeps its
    /// CPU, memory and other resources free.
    pub(super) fn nominate(&mut self, candidate: &'a Candidate<'a>, node: &str) {
        let PlanPod { priority, requests, .. } = &candidate.plan_pod;
        self.free.borrow_mut().nominate(candidate.name.clone(), *priority, requests, node);
    }

    /// Returns the pods that a search by priority alone must not evict, because quotas decide about
    /// these pods.
    pub(super) fn pods_of_quotas(&self) -> BTreeSet<String> {
        self.worlds.filter(|_| self.turn.is_none()).map(QuotaWorlds::pods_beside_others).unwrap_or_default()
    }

    /// Ends the nomination of a pod.
    pub(super) fn withdraw_nomination(&mut self, pod: &str, node: &str) {
        self.free.borrow_mut().withdraw_nomination(pod, node);
    }

    /// Returns the properties of a pod that determine whether it is placeable, or can become
    /// placeable by preemption.
    pub(super) fn key(&self, candidate: &'a Candidate<'a>) -> SearchKey<'a> {
        SearchKey {
            device_requests: &candidate.device_requests,
            priority: candidate.plan_pod.priority,
            requests: &candidate.plan_pod.requests,
            nodes: candidate.node_key(),
            rules: self.constraints.key(candidate.pod),
            quota: self.turn.map(|turn| (turn.member.pool, turn.rank.quota, turn.rank.is_within)),
        }
    }

    /// Returns whether a node lists no allocations of an earlier pod with this name, or will soon
    /// list none. Until then, [`Self::find`] does not place the pod on the node.
    fn will_be_free_of_predecessor(&self, ledger: &Ledger, node: &str, pod: &str) -> bool {
        !ledger.has_allocations(node, pod) || self.claims.is_ending(node, pod, self.up)
    }

    /// Returns whether an earlier pod with the same name excludes the pod from one of these nodes.
    /// In this case, the result of a search does not apply to otherwise equal pods.
    pub(super) fn has_lasting_predecessor<'n>(
        &self,
        ledger: &Ledger,
        candidate: &Candidate<'_>,
        mut nodes: impl Iterator<Item = &'n str>,
    ) -> bool {
        nodes.any(|node| !self.will_be_free_of_predecessor(ledger, node, &candidate.name))
    }

    fn has_room(&self, ledger: &Ledger, node: &str, candidate: &Candidate<'_>) -> bool {
        self.free.borrow_mut().has_room(node, candidate.requester(ledger, false))
    }

    fn allows(&self, node: &str, checker: Option<&NodeChecker<'_>>) -> bool {
        let in_pool = match (self.worlds, self.turn) {
            (Some(worlds), Some(turn)) => worlds.has_node(turn.member.pool, node),
            (Some(worlds), None) => worlds.has_others(node),
            (None, _) => true,
        };
        in_pool && self.follows_rules(node, checker)
    }

    fn follows_rules(&self, node: &str, checker: Option<&NodeChecker<'_>>) -> bool {
        self.nodes.0.get(node).is_some_and(|state| check_rules(checker, &state.node).is_ok())
    }
}
