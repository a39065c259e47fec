//! Holds a changed policy back from nodes whose wave has not begun. Pure: callers pass in the time.
//!
//! A node that is held back keeps its entries in `GpuNode.spec`. So the specs themselves store
//! which nodes a change has reached, and a new leader continues. These changes are not held back:
//!
//! - GPUs without an entry in the spec, such as those of new nodes;
//! - GPUs without a policy that receive their first one, unless the policy is paused;
//! - GPUs that no policy selects any more: they become whole;
//! - GPUs that are partitioned on demand.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::gpunode::{GpuNodeSpec, GpuSpec, GpuStatus, Health, MpsStatus, Partition};
use cleave_api::names::{HEALTH_MPS_UNAVAILABLE, STEP_FAILED, STEP_IN_USE, STEP_REFUSED, STEP_WAITING, daemon_state};

use crate::policies::partition::has_partition;
use crate::policies::plan::{Plan, plan_id};
use crate::policies::snapshot::{DEFAULT_APPLY_DEADLINE, agent_has_read_spec};
use crate::policies::validate::RolloutRules;
use crate::policies::waves::{self, NodeView, Phase, State};
use crate::read::{Node, Observed};

/// Time for which a failure must last before it is reported. Agents retry failed steps, and an MPS
/// daemon is briefly unavailable while its settings change. Until then, no further node changes.
pub const FAILURE_TIME: Duration = Duration::from_secs(10);

/// Taints of a node whose kubelet does not report.
const UNREACHABLE: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// Names a policy and a node.
type PolicyAndNode = (String, String);

/// Partitions of a policy's GPUs on a node, by UUID.
type Partitions = BTreeMap<String, Partition>;

/// A failure of a node.
#[derive(Debug, Clone)]
struct Failure {
    /// The partitions that the node failed to reach or to serve.
    partitions: Partitions,
    /// When the node failed first.
    since: Duration,
    /// The reason.
    why: String,
}

/// What the operator remembers about failures. Times are durations since the process started.
///
/// A new leader starts with an empty memory. It reports failures after [`FAILURE_TIME`] again, and
/// a node that failed before the change then stops the rollout. During this time, no node changes.
/// The next wave of a new leader is one node, because it does not know which nodes have changed.
#[derive(Debug, Clone, Default)]
pub struct Staging {
    /// Nodes that failed and have not served since.
    failing: BTreeMap<PolicyAndNode, Failure>,
    /// Changing nodes whose agent does not report: the generation that it has read, and since when.
    silent: BTreeMap<PolicyAndNode, (i64, Duration)>,
    /// Nodes that failed or were lost with an older partition, until they serve.
    failed_before: BTreeSet<PolicyAndNode>,
    /// Nodes that the current change of their policy affects, with the newest partitions, until the
    /// change is complete. Other nodes may have the newest partition, but do not prove the change.
    affected: BTreeMap<PolicyAndNode, Partitions>,
}

impl Staging {
    /// Restores the present entries of nodes whose wave has not begun, and records the progress of
    /// each policy. Returns the time until the next decision, even if nothing changes.
    pub fn hold_back(&mut self, plan: &mut Plan, observed: &Observed, now: Duration) -> Option<Duration> {
        let mut next = None;
        let mut seen = BTreeSet::new();
        let mut held: Vec<(String, String, bool)> = Vec::new();
        let policies = plan.policies.iter().filter(|(_, report)| report.demand.is_none());
        let mut all_progress = BTreeMap::new();
        for (policy, report) in policies {
            let names: BTreeSet<&str> = report.following.iter().map(|at| at.node.as_str()).collect();
            let mut views = BTreeMap::new();
            for name in names {
                let (Some(node), Some(desired)) = (observed.nodes.get(name), plan.nodes.get(name)) else { continue };
                let Some(view) = view(policy, report.rollout, node, desired) else { continue };
                views.insert(name.to_owned(), view);
            }
            let rolls_out = views.values().any(|view| !view.newest) || self.is_rolling_out(policy);
            for (name, view) in &mut views {
                let (Some(node), Some(desired)) = (observed.nodes.get(name), plan.nodes.get(name)) else { continue };
                let key = (policy.clone(), name.clone());
                self.update_affected(&key, view, desired);
                self.update_lost(&key, view, loss(policy, node, desired), rolls_out);
                let failure = self.update(&key, view, node, now);
                let deadline = self.update_silent(&key, view, node, now);
                next = [next, failure, deadline].into_iter().flatten().min();
                seen.insert(key);
            }
            let progress = waves::decide(report.rollout, &views);
            if progress.phase == Phase::Complete {
                self.affected.retain(|(of, _), _| of != policy);
            }
            held.extend(progress.pending.iter().map(|node| (node.clone(), policy.clone(), report.rollout.paused)));
            all_progress.insert(policy.clone(), progress);
        }
        for (policy, progress) in all_progress {
            if let Some(report) = plan.policies.get_mut(&policy) {
                report.progress = progress;
            }
        }
        for (node, policy, paused) in held {
            let current = observed.nodes.get(&node).and_then(Node::object).map(|object| &object.spec);
            if let (Some(current), Some(desired)) = (current, plan.nodes.get_mut(&node)) {
                restore(&policy, paused, current, desired);
            }
        }
        self.failing.retain(|key, _| seen.contains(key));
        self.silent.retain(|key, _| seen.contains(key));
        self.failed_before.retain(|key| seen.contains(key));
        self.affected.retain(|key, _| seen.contains(key));
        next
    }

    /// Returns whether a change of a policy was incomplete at the last decision.
    fn is_rolling_out(&self, policy: &str) -> bool {
        let first = self.affected.range((policy.to_owned(), String::new())..).next();
        first.is_some_and(|((of, _), _)| of == policy)
    }

    /// Updates whether the current change affects a node. A node that waits for pods is affected
    /// too: the former leader began it.
    fn update_affected(&mut self, key: &PolicyAndNode, view: &mut NodeView, desired: &GpuNodeSpec) {
        let is_same = |known: &Partitions| {
            let mut gpus = desired.gpus.iter().filter(|gpu| gpu.policy.as_ref() == Some(&key.0));
            gpus.clone().count() == known.len() && gpus.all(|gpu| known.get(&gpu.uuid) == Some(&gpu.partition))
        };
        let is_known = self.affected.get(key).is_some_and(is_same);
        view.affected = is_known || !view.newest || view.state == State::WaitingForPods;
        if !view.affected {
            self.affected.remove(key);
        } else if !is_known {
            self.affected.insert(key.clone(), partitions(&key.0, Some(desired)));
        }
    }

    /// Applies the loss of a node or of a GPU to a view. A loss without a rollout is no failure of
    /// a rollout, and a loss that precedes the change is excused.
    fn update_lost(&mut self, key: &PolicyAndNode, view: &mut NodeView, loss: Option<String>, rolls_out: bool) {
        match loss {
            Some(_) if !view.newest || !rolls_out => _ = self.failed_before.insert(key.clone()),
            Some(_) if matches!(view.state, State::Failed(_)) => {}
            Some(why) => view.state = State::Failed(why),
            None if view.state == State::Serving => _ = self.failed_before.remove(key),
            None => {}
        }
    }

    /// Applies what is remembered to a view. Returns the time until a failure counts. A failure
    /// lasts until the policy's GPUs serve, wait for pods, or get other partitions.
    fn update(&mut self, key: &PolicyAndNode, view: &mut NodeView, node: &Node, now: Duration) -> Option<Duration> {
        let mut left = None;
        let partitions = || partitions(&key.0, node.object().map(|object| &object.spec));
        let before = self.failing.remove(key).filter(|before| before.partitions == partitions());
        let failure = match (&view.state, before) {
            (State::Failed(why), before) => {
                let since = before.map_or(now, |before| before.since);
                Some(Failure { partitions: partitions(), since, why: why.clone() })
            }
            (State::Changing, before) => before,
            (State::Serving | State::WaitingForPods, _) => None,
        };
        if let Some(failure) = failure {
            view.failing = true;
            left = Some(FAILURE_TIME.saturating_sub(now.saturating_sub(failure.since))).filter(|left| !left.is_zero());
            view.state = if left.is_some() { State::Changing } else { State::Failed(failure.why.clone()) };
            if left.is_none() && !view.newest {
                self.failed_before.insert(key.clone());
            }
            self.failing.insert(key.clone(), failure);
        }
        view.excused |= self.failed_before.contains(key);
        left
    }

    /// Lets a changed node fail if its agent does not report until the deadline. Returns the time
    /// until then.
    fn update_silent(
        &mut self,
        key: &PolicyAndNode,
        view: &mut NodeView,
        node: &Node,
        now: Duration,
    ) -> Option<Duration> {
        let reports = agent_has_read_spec(node) && view.agent_ready;
        if !view.newest || view.state != State::Changing || reports {
            self.silent.remove(key);
            return None;
        }
        let read = node.object()?.status.as_ref()?.observed_generation;
        let since = match self.silent.get(key) {
            Some((of, since)) if *of == read => *since,
            _ => now,
        };
        self.silent.insert(key.clone(), (read, since));
        let left = DEFAULT_APPLY_DEADLINE.saturating_sub(now.saturating_sub(since));
        if left.is_zero() {
            let why = format!("the agent has not reported the change within {} s", DEFAULT_APPLY_DEADLINE.as_secs());
            (view.state, view.failing) = (State::Failed(why), true);
        }
        Some(left).filter(|left| !left.is_zero())
    }
}

/// Returns the partitions of a policy's GPUs in the spec of a node.
fn partitions(policy: &str, spec: Option<&GpuNodeSpec>) -> Partitions {
    let gpus = spec.iter().flat_map(|spec| &spec.gpus).filter(|gpu| gpu.policy.as_deref() == Some(policy));
    gpus.map(|gpu| (gpu.uuid.clone(), gpu.partition.clone())).collect()
}

/// Returns whether a GPU's change belongs to a wave.
fn is_staged(current: &GpuSpec, desired: &GpuSpec, paused: bool) -> bool {
    current.partition != desired.partition && (current.policy.is_some() || paused)
}

/// Describes the GPUs of a policy on a node. Returns `None` if the node's spec has none of them.
fn view(policy: &str, rules: RolloutRules, node: &Node, desired: &GpuNodeSpec) -> Option<NodeView> {
    let object = node.object()?;
    let mut view = NodeView {
        newest: true,
        state: State::Serving,
        failing: false,
        between: false,
        serves: false,
        in_use: false,
        agent_ready: node.agent.is_some_and(|agent| agent.ready),
        affected: false,
        excused: node.unschedulable,
    };
    let mut any = false;
    for desired in desired.gpus.iter().filter(|desired| desired.policy.as_deref() == Some(policy)) {
        let Some(current) = object.spec.gpus.iter().find(|current| current.uuid == desired.uuid) else { continue };
        let Some(gpu) = node.reported()?.iter().find(|gpu| gpu.uuid == desired.uuid) else { continue };
        any = true;
        let staged = is_staged(current, desired, rules.paused);
        view.newest &= !staged;
        let has_partition = has_partition(&current.partition, gpu);
        view.between |= staged && !has_partition;
        view.in_use |= staged && gpu.slices.iter().any(|slice| slice.in_use > 0);
        let state = if desired.cordoned || !gpu.health.class.is_empty() {
            // A cordoned GPU is excused. `loss` judges a faulted one.
            None
        } else if staged || current.partition == desired.partition {
            // An unread spec of a staged GPU that has its partition is a write for another GPU.
            gpu_state(node, current, gpu, agent_has_read_spec(node) || staged && has_partition)
        } else {
            Some(State::Changing)
        };
        view.serves |= state == Some(State::Serving);
        view.state = view.state.max(state.unwrap_or(State::Serving));
    }
    any.then_some(view)
}

/// Returns why a node or a GPU of a policy cannot serve any partition. Administrators excuse nodes
/// and GPUs with a cordon.
fn loss(policy: &str, node: &Node, desired: &GpuNodeSpec) -> Option<String> {
    let follows = |entry: &GpuSpec| entry.policy.as_deref() == Some(policy) && !entry.cordoned;
    let judged = |gpu: &GpuStatus| desired.gpus.iter().any(|entry| entry.uuid == gpu.uuid && follows(entry));
    let faulted = |gpu: &&GpuStatus| !gpu.health.class.is_empty() && judged(gpu);
    if let Some(gpu) = node.reported()?.iter().find(faulted) {
        let Health { class, message, .. } = &gpu.health;
        return Some(format!("GPU {}: {}", gpu.index, if message.is_empty() { class } else { message }));
    }
    let unreachable = node.taints.iter().any(|taint| UNREACHABLE.contains(&taint.key.as_str()));
    (unreachable && !node.unschedulable).then(|| "the node is not ready".to_owned())
}

/// Returns the state of a GPU relative to its spec. Returns `None` if the node has no status.
fn gpu_state(node: &Node, spec: &GpuSpec, gpu: &GpuStatus, has_read: bool) -> Option<State> {
    let object = node.object()?;
    let status = object.status.as_ref()?;
    if !has_read {
        return Some(State::Changing);
    }
    let failure = |why: &str| State::Failed(format!("GPU {}: {why}", gpu.index));
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
        return Some(if step.reason == STEP_IN_USE { State::WaitingForPods } else { State::Changing });
    }
    let applied = status.plan_id == object.spec.plan_id || has_partition(&spec.partition, gpu);
    let serves = gpu.mps.iter().all(|daemon| daemon_serves(daemon, gpu));
    Some(if applied && serves { State::Serving } else { State::Changing })
}

/// Returns whether an MPS daemon serves. The agent lists all slices of a device as Unhealthy before
/// it changes them, and until the MPS host has applied their daemon's settings. While the slices
/// are Unhealthy, the daemon's state may still be that of the daemon with the older settings.
fn daemon_serves(daemon: &MpsStatus, gpu: &GpuStatus) -> bool {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let is_faulted =
        instances.filter(|instance| instance.uuid == daemon.device).any(|instance| instance.health.is_some());
    let mut slices = gpu.slices.iter().filter(|slices| slices.device == daemon.device && slices.total > 0);
    daemon.state == daemon_state::ACTIVE && (is_faulted || slices.all(|slices| slices.unhealthy < slices.total))
}

/// Restores the present entries of a policy's GPUs that a wave would change.
fn restore(policy: &str, paused: bool, current: &GpuNodeSpec, desired: &mut GpuNodeSpec) {
    for entry in desired.gpus.iter_mut().filter(|entry| entry.policy.as_deref() == Some(policy)) {
        let present = current.gpus.iter().find(|present| present.uuid == entry.uuid);
        if let Some(present) = present.filter(|present| is_staged(present, entry, paused)) {
            // Administrators' annotations apply at once.
            let (cordoned, cleared) = (entry.cordoned, entry.cleared.clone());
            *entry = GpuSpec { cordoned, cleared, ..present.clone() };
        }
    }
    desired.plan_id = plan_id(&desired.gpus);
}
