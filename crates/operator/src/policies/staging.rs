//! Withholds a changed policy from nodes whose wave has not begun. Pure: callers pass in the time.
//!
//! A node whose wave has not begun keeps its entries in `GpuNode.spec`. So the specs themselves
//! record which nodes a change has reached, and a new leader can continue. These changes apply
//! immediately:
//!
//! - GPUs without an entry in the spec, such as those of new nodes;
//! - GPUs that receive their first policy, unless the policy is paused;
//! - GPUs that policies no longer select, which become whole;
//! - GPUs that are partitioned on demand.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::gpunode::{GpuNodeSpec, GpuSpec, GpuStatus, Health, MpsStatus, Partition};
use cleave_api::names::{HEALTH_MPS_UNAVAILABLE, STEP_FAILED, STEP_IN_USE, STEP_REFUSED, STEP_WAITING, daemon_state};

use crate::policies::partition::has_partition;
use crate::policies::plan::{Plan, plan_id};
use crate::policies::snapshot::{DEFAULT_APPLY_DEADLINE, agent_has_read_spec};
use crate::policies::validate::RolloutRules;
use crate::policies::waves::{self, NodeState, NodeView, Phase, RolloutProgress};
use crate::read::{Node, Observed};

/// How long a failure must last before it is reported. Agents retry failed steps, and an MPS daemon
/// is briefly unavailable while its settings change. Until the failure is reported or ends, no
/// further node changes.
pub const FAILURE_TIME: Duration = Duration::from_secs(10);

/// How long a node must serve the newest partition before it proves the change. A daemon that exits
/// soon after its start is briefly Active.
pub const PROOF_TIME: Duration = Duration::from_secs(10);

/// Taints of a node whose kubelet has stopped reporting.
const UNREACHABLE_TAINTS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// The name of a policy and the name of a node.
type PolicyAndNode = (String, String);

/// Partitions of a policy's GPUs on a node, by UUID.
type Partitions = BTreeMap<String, Partition>;

/// A node's failure to reach or to serve its partitions.
#[derive(Debug, Clone)]
struct NodeFailure {
    /// The partitions that the node failed to reach or to serve.
    partitions: Partitions,
    /// When the node first failed.
    since: Duration,
    /// The reason.
    why: String,
}

/// The period for which a node has served the partitions in its spec.
#[derive(Debug, Clone)]
struct ServingPeriod {
    /// The partitions in the spec.
    partitions: Partitions,
    /// The MPS daemons of these GPUs, each with its device, its PID, and the number of restarts. A
    /// daemon may restart between two passes.
    daemons: Vec<(String, Option<u32>, u32)>,
    /// When the node began to serve without interruption. `None` while the node does not serve.
    since: Option<Duration>,
    /// Whether the node served for [`PROOF_TIME`] before the current change began. The change does
    /// not cause later failures of this node.
    precedes: bool,
}

/// A change of a policy's partitions. The change begins when a GPU of the policy gets another
/// newest partition. The change ends when it is complete, or when another change begins.
#[derive(Debug, Clone, Default)]
struct PolicyChange {
    /// The newest partitions, by node, until the change is complete.
    partitions: BTreeMap<String, Partitions>,
    /// Nodes that the change affects, until the change is complete. Other nodes may have the newest
    /// partition, but do not prove the change.
    affected: BTreeMap<String, AffectedNode>,
    /// Whether a former leader may have begun the change.
    is_inherited: bool,
    /// Whether the previous change was incomplete. Nodes of the previous change may have the newest
    /// partition.
    follows_incomplete: bool,
}

/// A node that a change affects.
#[derive(Debug, Clone, Default)]
struct AffectedNode {
    /// UUIDs of the GPUs whose partition changes.
    gpus: BTreeSet<String>,
    /// Whether the node or these GPUs have been cordoned since the node began to change.
    cordoned: bool,
}

/// UUIDs of a policy's GPUs on a node.
#[derive(Debug, Default)]
struct GpuUuidsByState {
    /// GPUs whose newest partition the node's spec does not have.
    staged: BTreeSet<String>,
    /// GPUs that wait for pods.
    waiting: BTreeSet<String>,
    /// GPUs that serve the partition in the spec.
    serving: BTreeSet<String>,
}

impl PolicyChange {
    /// Returns whether a node's newest partitions belong to a later change. A GPU that joins the
    /// policy with a partition of this change extends this change.
    fn has_successor(
        &self,
        policy: &str,
        paused: bool,
        name: &str,
        current: &GpuNodeSpec,
        desired: &GpuNodeSpec,
    ) -> bool {
        let known = self.partitions.get(name);
        policy_gpus(policy, Some(desired)).any(|gpu| match known.and_then(|known| known.get(&gpu.uuid)) {
            Some(known) => *known != gpu.partition,
            None => {
                let present = current.gpus.iter().find(|current| current.uuid == gpu.uuid);
                present.is_some_and(|present| is_staged(present, gpu, paused)) && !self.contains(&gpu.partition)
            }
        })
    }

    /// Returns whether the change is incomplete and other GPUs get this partition.
    fn contains(&self, partition: &Partition) -> bool {
        !self.affected.is_empty() && self.partitions.values().flat_map(BTreeMap::values).any(|of| of == partition)
    }

    /// Returns whether the change affects a node and its GPUs keep their newest partitions.
    fn still_applies(&self, policy: &str, name: &str, desired: &GpuNodeSpec) -> bool {
        let known = self.partitions.get(name);
        let differs =
            |gpu: &GpuSpec| known.and_then(|known| known.get(&gpu.uuid)).is_some_and(|of| *of != gpu.partition);
        self.affected.contains_key(name) && !policy_gpus(policy, Some(desired)).any(differs)
    }
}

/// State of changes and failures that the operator keeps between passes. Times are durations since
/// the process started.
///
/// A new leader starts without this state. The new leader reports failures only after
/// [`FAILURE_TIME`], and a node that failed before the change then stops the rollout. During this
/// time, no node changes. The next wave of a new leader is one node, because the leader does not
/// know which nodes have changed.
#[derive(Debug, Clone, Default)]
pub struct Staging {
    /// Nodes that failed and have not served since.
    failing: BTreeMap<PolicyAndNode, NodeFailure>,
    /// Changing nodes whose agent does not report. Each value is the last generation that the agent
    /// read, and the time at which the agent stopped reporting.
    not_reporting: BTreeMap<PolicyAndNode, (i64, Duration)>,
    /// Nodes that failed or were lost with an older partition, or were lost outside a rollout,
    /// until they serve.
    failed_before: BTreeSet<PolicyAndNode>,
    /// The periods for which nodes have served the partitions in their specs.
    services: BTreeMap<PolicyAndNode, ServingPeriod>,
    /// The last change of each policy.
    changes: BTreeMap<String, PolicyChange>,
}

impl Staging {
    /// Restores the current entries of nodes whose wave has not begun, and records the progress of
    /// each policy. Returns the time until the next decision, even if nothing changes.
    pub fn withhold_changes(&mut self, plan: &mut Plan, observed: &Observed, now: Duration) -> Option<Duration> {
        let mut next = None;
        let mut seen = BTreeSet::new();
        let mut held: Vec<(String, String, bool)> = Vec::new();
        let policies = plan.policies.iter().filter(|(_, report)| report.demand.is_none());
        let mut all_progress = BTreeMap::new();
        for (policy, report) in policies {
            let names: BTreeSet<&str> = report.following.iter().map(|at| at.node.as_str()).collect();
            let (mut views, mut gpu_sets) = (BTreeMap::new(), BTreeMap::new());
            for name in names {
                let (Some(node), Some(desired)) = (observed.nodes.get(name), plan.nodes.get(name)) else { continue };
                let Some((view, gpus)) = node_view(policy, report.rollout, node, desired) else { continue };
                views.insert(name.to_owned(), view);
                gpu_sets.insert(name.to_owned(), gpus);
            }
            let nodes = |name: &String| Some((observed.nodes.get(name)?, plan.nodes.get(name)?));
            let present =
                views.keys().filter_map(|name| nodes(name).map(|(node, desired)| (name.as_str(), node, desired)));
            self.begin_change(policy, report.rollout.paused, present, now);
            let rolls_out = views.values().any(|view| !view.has_newest) || self.is_rolling_out(policy);
            if !rolls_out {
                self.record_serving_before_change(policy, &BTreeSet::new(), now);
            }
            for (name, view) in &mut views {
                let (Some((node, desired)), Some(gpus)) = (nodes(name), gpu_sets.get(name)) else { continue };
                let key = (policy.clone(), name.clone());
                self.update_affected(&key, view, gpus, (node, desired));
                let loss = loss_reason(policy, node, desired);
                let proof = self.update_service(&key, view, (node, desired), loss.is_none(), now);
                self.update_loss(&key, view, loss, rolls_out);
                let precedes = self.services.get(&key).is_some_and(|service| service.precedes);
                if precedes && !rolls_out {
                    self.hide_outage(&key, view);
                }
                let failure = self.update_failure(&key, view, node, now);
                let deadline = self.update_missing_report(&key, view, node, now);
                view.excused |= precedes && view.has_newest && view.failing;
                next = [next, proof, failure, deadline].into_iter().flatten().min();
                seen.insert(key);
            }
            let progress = waves::decide(report.rollout, &views);
            self.record_change(policy, &progress, plan, observed);
            held.extend(progress.pending.iter().map(|node| (node.clone(), policy.clone(), report.rollout.paused)));
            all_progress.insert(policy.clone(), progress);
        }
        self.changes.retain(|policy, _| all_progress.contains_key(policy));
        for (policy, progress) in all_progress {
            if let Some(report) = plan.policies.get_mut(&policy) {
                report.progress = progress;
            }
        }
        for (node, policy, paused) in held {
            let current = observed.nodes.get(&node).and_then(Node::object).map(|object| &object.spec);
            if let (Some(current), Some(desired)) = (current, plan.nodes.get_mut(&node)) {
                restore_entries(&policy, paused, current, desired);
            }
        }
        self.failing.retain(|key, _| seen.contains(key));
        self.not_reporting.retain(|key, _| seen.contains(key));
        self.failed_before.retain(|key| seen.contains(key));
        self.services.retain(|key, _| seen.contains(key));
        next
    }

    /// Begins a new change if the newest partitions of a policy's nodes do not belong to the last
    /// change.
    fn begin_change<'a>(
        &mut self,
        policy: &str,
        paused: bool,
        nodes: impl Iterator<Item = (&'a str, &'a Node, &'a GpuNodeSpec)>,
        now: Duration,
    ) {
        let Some(change) = self.changes.get_mut(policy) else {
            self.changes.insert(policy.to_owned(), PolicyChange { is_inherited: true, ..PolicyChange::default() });
            return;
        };
        let (mut is_followed, mut remaining) = (false, BTreeSet::new());
        for (name, node, desired) in nodes {
            let Some(object) = node.object() else { continue };
            is_followed |= change.has_successor(policy, paused, name, &object.spec, desired);
            if change.still_applies(policy, name, desired) {
                remaining.insert(name);
            }
        }
        if is_followed {
            *change = PolicyChange { follows_incomplete: !change.affected.is_empty(), ..PolicyChange::default() };
            self.record_serving_before_change(policy, &remaining, now);
        }
    }

    /// Records the newest partitions of a change, until the change is complete.
    fn record_change(&mut self, policy: &str, progress: &RolloutProgress, plan: &Plan, observed: &Observed) {
        let Some(change) = self.changes.get_mut(policy) else { return };
        if progress.phase == Phase::Complete {
            *change = PolicyChange::default();
            return;
        }
        change.partitions.retain(|name, _| observed.nodes.contains_key(name));
        change.affected.retain(|name, _| observed.nodes.contains_key(name));
        for (name, desired) in plan.nodes.iter().filter(|(name, _)| observed.nodes.contains_key(*name)) {
            for gpu in policy_gpus(policy, Some(desired)) {
                if change.partitions.get(name).is_none_or(|known| !known.contains_key(&gpu.uuid)) {
                    let known = change.partitions.entry(name.clone()).or_default();
                    known.insert(gpu.uuid.clone(), gpu.partition.clone());
                }
            }
        }
    }

    /// Records which nodes of a policy served before the next change. The partitions of `changed`
    /// nodes are those of the last change, which may cause later failures.
    fn record_serving_before_change(&mut self, policy: &str, changed: &BTreeSet<&str>, now: Duration) {
        let of_policy = self.services.range_mut((policy.to_owned(), String::new())..);
        let of_policy = of_policy.take_while(|((of, _), _)| of == policy);
        for (_, service) in of_policy.filter(|((_, name), _)| !changed.contains(name.as_str())) {
            service.precedes |= service.since.is_some_and(|since| now.saturating_sub(since) >= PROOF_TIME);
        }
    }

    /// Returns whether a change of a policy was incomplete at the last decision.
    fn is_rolling_out(&self, policy: &str) -> bool {
        self.changes.get(policy).is_some_and(|change| !change.affected.is_empty())
    }

    /// Updates whether the current change affects a node, and which of the node's GPUs prove the
    /// change. A node that waits for pods is also affected if a former leader may have begun the
    /// change.
    fn update_affected(
        &mut self,
        (policy, name): &PolicyAndNode,
        view: &mut NodeView,
        gpus: &GpuUuidsByState,
        (node, desired): (&Node, &GpuNodeSpec),
    ) {
        let Some(change) = self.changes.get_mut(policy) else { return };
        if !view.has_newest || change.is_inherited && view.state == NodeState::WaitingForPods {
            let changing = if view.has_newest { &gpus.waiting } else { &gpus.staged };
            change.affected.entry(name.clone()).or_default().gpus.extend(changing.iter().cloned());
        }
        if let Some(affected) = change.affected.get_mut(name) {
            affected.gpus.retain(|uuid| policy_gpus(policy, Some(desired)).any(|gpu| gpu.uuid == *uuid));
        }
        let Some(affected) = change.affected.get_mut(name).filter(|affected| !affected.gpus.is_empty()) else {
            change.affected.remove(name);
            view.may_be_canary = view.has_newest && (change.is_inherited || change.follows_incomplete);
            return;
        };
        let mut changing = policy_gpus(policy, Some(desired)).filter(|gpu| affected.gpus.contains(&gpu.uuid));
        view.affected = true;
        view.cordoned = node.unschedulable || changing.all(|gpu| gpu.cordoned);
        if view.has_newest {
            view.has_serving_gpu = !affected.gpus.is_disjoint(&gpus.serving);
        }
        if !view.has_newest || !view.cordoned {
            affected.cordoned = view.cordoned;
        }
        view.withdrawn = view.cordoned && !affected.cordoned;
    }

    /// Updates the time at which a node began to serve the partitions in its spec without
    /// interruption. Returns the time until the node has served for [`PROOF_TIME`].
    fn update_service(
        &mut self,
        key: &PolicyAndNode,
        view: &mut NodeView,
        (node, desired): (&Node, &GpuNodeSpec),
        is_present: bool,
        now: Duration,
    ) -> Option<Duration> {
        let current = || current_entries(&key.0, node, desired);
        let is_same = |service: &ServingPeriod| {
            current().all(|entry| service.partitions.get(&entry.uuid) == Some(&entry.partition))
        };
        if !self.services.get(key).is_some_and(is_same) {
            self.services.remove(key);
        }
        if !is_present || !waves::is_serving(view) {
            if let Some(service) = self.services.get_mut(key) {
                service.since = None;
            }
            return None;
        }
        let new = || ServingPeriod {
            partitions: current().map(|entry| (entry.uuid.clone(), entry.partition.clone())).collect(),
            daemons: Vec::new(),
            since: None,
            precedes: false,
        };
        let service = self.services.entry(key.clone()).or_insert_with(new);
        let known = service.daemons.iter().map(|(device, pid, restarts)| (device.as_str(), *pid, *restarts));
        if !known.eq(current_daemons(&service.partitions, node)) {
            let daemons = current_daemons(&service.partitions, node);
            let daemons = daemons.map(|(device, pid, restarts)| (device.to_owned(), pid, restarts)).collect();
            (service.daemons, service.since) = (daemons, None);
        }
        let since = *service.since.get_or_insert(now);
        let left = PROOF_TIME.saturating_sub(now.saturating_sub(since));
        view.is_steady = left.is_zero();
        Some(left).filter(|left| !left.is_zero())
    }

    /// Makes a node that does not serve count as serving. The node has served the newest partition,
    /// and no change is in progress, so no change caused the outage.
    fn hide_outage(&mut self, key: &PolicyAndNode, view: &mut NodeView) {
        if matches!(view.state, NodeState::Failed(_)) {
            self.failed_before.insert(key.clone());
        }
        if matches!(view.state, NodeState::Failed(_) | NodeState::Changing) {
            view.state = NodeState::Serving;
        }
    }

    /// Applies the loss of a node or of a GPU to a view. A loss outside a rollout is not a rollout
    /// failure, and a loss before the change is excused.
    fn update_loss(&mut self, key: &PolicyAndNode, view: &mut NodeView, loss: Option<String>, rolls_out: bool) {
        match loss {
            Some(_) if !view.has_newest || !rolls_out => _ = self.failed_before.insert(key.clone()),
            Some(_) if matches!(view.state, NodeState::Failed(_)) => {}
            Some(why) => view.state = NodeState::Failed(why),
            None if view.state == NodeState::Serving => _ = self.failed_before.remove(key),
            None => {}
        }
    }

    /// Applies the recorded failures of a node to its view. Returns the time until a failure has
    /// lasted for [`FAILURE_TIME`]. A failure lasts until the policy's GPUs serve, wait for pods,
    /// or get other partitions.
    fn update_failure(
        &mut self,
        key: &PolicyAndNode,
        view: &mut NodeView,
        node: &Node,
        now: Duration,
    ) -> Option<Duration> {
        let mut left = None;
        let partitions = || policy_partitions(&key.0, node.object().map(|object| &object.spec));
        let before = self.failing.remove(key).filter(|before| before.partitions == partitions());
        let failure = match (&view.state, before) {
            (NodeState::Failed(why), before) => {
                let since = before.map_or(now, |before| before.since);
                Some(NodeFailure { partitions: partitions(), since, why: why.clone() })
            }
            (NodeState::Changing, before) => before,
            (NodeState::Serving | NodeState::WaitingForPods, _) => None,
        };
        if let Some(failure) = failure {
            view.failing = true;
            left = Some(FAILURE_TIME.saturating_sub(now.saturating_sub(failure.since))).filter(|left| !left.is_zero());
            view.state = if left.is_some() { NodeState::Changing } else { NodeState::Failed(failure.why.clone()) };
            if left.is_none() && !view.has_newest {
                self.failed_before.insert(key.clone());
            }
            self.failing.insert(key.clone(), failure);
        }
        view.excused |= self.failed_before.contains(key);
        left
    }

    /// Marks a changed node as failed if its agent does not report before the deadline. Returns the
    /// time until the deadline.
    fn update_missing_report(
        &mut self,
        key: &PolicyAndNode,
        view: &mut NodeView,
        node: &Node,
        now: Duration,
    ) -> Option<Duration> {
        let reports = agent_has_read_spec(node) && view.agent_ready;
        if !view.has_newest || view.state != NodeState::Changing || reports {
            self.not_reporting.remove(key);
            return None;
        }
        let read = node.object()?.status.as_ref()?.observed_generation;
        let since = match self.not_reporting.get(key) {
            Some((of, since)) if *of == read => *since,
            _ => now,
        };
        self.not_reporting.insert(key.clone(), (read, since));
        let left = DEFAULT_APPLY_DEADLINE.saturating_sub(now.saturating_sub(since));
        if left.is_zero() {
            let why = format!("the agent has not reported the change within {} s", DEFAULT_APPLY_DEADLINE.as_secs());
            (view.state, view.failing) = (NodeState::Failed(why), true);
        }
        Some(left).filter(|left| !left.is_zero())
    }
}

/// Returns a policy's GPUs in the spec of a node.
fn policy_gpus<'a>(policy: &str, spec: Option<&'a GpuNodeSpec>) -> impl Iterator<Item = &'a GpuSpec> {
    spec.into_iter().flat_map(|spec| &spec.gpus).filter(move |gpu| gpu.policy.as_deref() == Some(policy))
}

/// Returns the partitions of a policy's GPUs in the spec of a node.
fn policy_partitions(policy: &str, spec: Option<&GpuNodeSpec>) -> Partitions {
    policy_gpus(policy, spec).map(|gpu| (gpu.uuid.clone(), gpu.partition.clone())).collect()
}

/// Returns the entries in a node's spec for the GPUs that will follow a policy.
fn current_entries<'a>(policy: &str, node: &'a Node, desired: &'a GpuNodeSpec) -> impl Iterator<Item = &'a GpuSpec> {
    let present = node.object().map_or(&[][..], |object| &object.spec.gpus);
    policy_gpus(policy, Some(desired)).filter_map(|desired| present.iter().find(|present| present.uuid == desired.uuid))
}

/// Returns the MPS daemons of these GPUs, each as its device, its PID, and the number of restarts.
fn current_daemons<'a>(partitions: &Partitions, node: &'a Node) -> impl Iterator<Item = (&'a str, Option<u32>, u32)> {
    let gpus = node.reported().unwrap_or_default().iter().filter(|gpu| partitions.contains_key(&gpu.uuid));
    gpus.flat_map(|gpu| &gpu.mps).map(|daemon| (daemon.device.as_str(), daemon.pid, daemon.restarts))
}

/// Returns whether a GPU's change belongs to a wave.
fn is_staged(current: &GpuSpec, desired: &GpuSpec, paused: bool) -> bool {
    current.partition != desired.partition && (current.policy.is_some() || paused)
}

/// Describes the GPUs of a policy on a node. Returns `None` if the node's spec contains none of the
/// GPUs.
fn node_view(
    policy: &str,
    rules: RolloutRules,
    node: &Node,
    desired: &GpuNodeSpec,
) -> Option<(NodeView, GpuUuidsByState)> {
    let object = node.object()?;
    let mut view = NodeView {
        has_newest: true,
        state: NodeState::Serving,
        failing: false,
        is_between_partitions: false,
        has_serving_gpu: false,
        is_steady: false,
        in_use: false,
        agent_ready: node.agent.is_some_and(|agent| agent.ready),
        affected: false,
        may_be_canary: false,
        cordoned: false,
        withdrawn: false,
        excused: node.unschedulable,
    };
    let (mut any, mut gpus) = (false, GpuUuidsByState::default());
    for desired in desired.gpus.iter().filter(|desired| desired.policy.as_deref() == Some(policy)) {
        let Some(current) = object.spec.gpus.iter().find(|current| current.uuid == desired.uuid) else { continue };
        let Some(gpu) = node.reported()?.iter().find(|gpu| gpu.uuid == desired.uuid) else { continue };
        any = true;
        let staged = is_staged(current, desired, rules.paused);
        view.has_newest &= !staged;
        let has_partition = has_partition(&current.partition, gpu);
        view.is_between_partitions |= staged && !has_partition;
        view.in_use |= staged && gpu.slices.iter().any(|slice| slice.in_use > 0);
        let state = if desired.cordoned || !gpu.health.class.is_empty() {
            // A cordoned GPU is excused. [`loss_reason`] handles a faulted GPU.
            None
        } else if staged || current.partition == desired.partition {
            // If a staged GPU has its partition, the unread spec was written for another GPU.
            gpu_state(node, current, gpu, agent_has_read_spec(node) || staged && has_partition)
        } else {
            Some(NodeState::Changing)
        };
        let sets = [
            (&mut gpus.staged, staged),
            (&mut gpus.waiting, state == Some(NodeState::WaitingForPods)),
            (&mut gpus.serving, state == Some(NodeState::Serving)),
        ];
        sets.into_iter().filter(|(_, belongs)| *belongs).for_each(|(set, _)| _ = set.insert(gpu.uuid.clone()));
        view.has_serving_gpu |= state == Some(NodeState::Serving);
        view.state = view.state.max(state.unwrap_or(NodeState::Serving));
    }
    any.then_some((view, gpus))
}

/// Returns why a node or a GPU of a policy cannot serve any partition. Ignores the faults of
/// cordoned GPUs. Ignores that a cordoned node is not ready.
fn loss_reason(policy: &str, node: &Node, desired: &GpuNodeSpec) -> Option<String> {
    let follows = |entry: &GpuSpec| entry.policy.as_deref() == Some(policy) && !entry.cordoned;
    let judged = |gpu: &GpuStatus| desired.gpus.iter().any(|entry| entry.uuid == gpu.uuid && follows(entry));
    let faulted = |gpu: &&GpuStatus| !gpu.health.class.is_empty() && judged(gpu);
    if let Some(gpu) = node.reported()?.iter().find(faulted) {
        let Health { class, message, .. } = &gpu.health;
        return Some(format!("GPU {}: {}", gpu.index, if message.is_empty() { class } else { message }));
    }
    let unreachable = node.taints.iter().any(|taint| UNREACHABLE_TAINTS.contains(&taint.key.as_str()));
    (unreachable && !node.unschedulable).then(|| "the node is not ready".to_owned())
}

/// Returns the state of a GPU relative to its spec. Returns `None` if the node has no status.
fn gpu_state(node: &Node, spec: &GpuSpec, gpu: &GpuStatus, has_read: bool) -> Option<NodeState> {
    let object = node.object()?;
    let status = object.status.as_ref()?;
    if !has_read {
        return Some(NodeState::Changing);
    }
    let failure = |why: &str| NodeState::Failed(format!("GPU {}: {why}", gpu.index));
    if let Some(step) = status.steps.iter().find(|step| step.gpu == gpu.uuid && step.result == STEP_FAILED) {
        return Some(failure(if step.message.is_empty() { &step.action } else { &step.message }));
    }
    if let Some(step) = status.steps.iter().find(|step| step.gpu == gpu.uuid && step.result == STEP_REFUSED) {
        return Some(failure(if step.message.is_empty() { &step.action } else { &step.message }));
    }
    if !gpu.health.healthy && gpu.health.reason == HEALTH_MPS_UNAVAILABLE {
        return Some(failure(&gpu.health.message));
    }
    if let Some(step) = status.steps.iter().find(|step| step.gpu == gpu.uuid && step.result == STEP_WAITING) {
        return Some(if step.reason == STEP_IN_USE { NodeState::WaitingForPods } else { NodeState::Changing });
    }
    let applied = status.plan_id == object.spec.plan_id || has_partition(&spec.partition, gpu);
    let serves = gpu.mps.iter().all(|daemon| daemon_serves(daemon, gpu));
    Some(if applied && serves { NodeState::Serving } else { NodeState::Changing })
}

/// Returns whether an MPS daemon serves. Before the agent changes the slices of a device, it lists
/// all of them as Unhealthy, until the MPS host has applied the daemon's settings. While the slices
/// are Unhealthy, the reported state may be that of the daemon with the older settings.
fn daemon_serves(daemon: &MpsStatus, gpu: &GpuStatus) -> bool {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let is_faulted =
        instances.filter(|instance| instance.uuid == daemon.device).any(|instance| instance.health.is_some());
    let mut slices = gpu.slices.iter().filter(|slices| slices.device == daemon.device && slices.total > 0);
    daemon.state == daemon_state::ACTIVE && (is_faulted || slices.all(|slices| slices.unhealthy < slices.total))
}

/// Restores the current entries of a policy's GPUs that a wave would change.
fn restore_entries(policy: &str, paused: bool, current: &GpuNodeSpec, desired: &mut GpuNodeSpec) {
    for entry in desired.gpus.iter_mut().filter(|entry| entry.policy.as_deref() == Some(policy)) {
        let present = current.gpus.iter().find(|present| present.uuid == entry.uuid);
        if let Some(present) = present.filter(|present| is_staged(present, entry, paused)) {
            // Administrators' annotations apply immediately.
            let GpuSpec { cordoned, quiesced, cleared, forgotten, .. } = entry.clone();
            *entry = GpuSpec { cordoned, quiesced, cleared, forgotten, ..present.clone() };
        }
    }
    desired.plan_id = plan_id(&desired.gpus);
}
