//! Decides which nodes a changed policy reaches now. Pure.
//!
//! The first node to change is the canary. The other nodes follow in waves, once a changed node has
//! served the newest partition for some time:
//!
//! - A canary that can never serve, such as one with cordoned GPUs, also holds back all nodes that
//!   are cordoned or failed. A node that can serve replaces this canary. If an administrator
//!   cordons a canary after its change began, the canary holds back no node.
//! - At most `maxUnavailable` nodes are repartitioned at a time.
//! - Nodes whose GPUs are in use wait for their pods after their spec is written. These nodes count
//!   separately, so they do not delay unused nodes.
//! - If a node fails, no further node changes except failed nodes that are repaired, unless
//!   `onFailure: Continue` is set. The failure is reported only if it lasts.
//! - If a node has served the newest partition for some time, nodes that are still between older
//!   partitions, or that failed to reach one, change immediately. These nodes serve nothing that
//!   the change could interrupt. So when an administrator reverts a policy, the operator repairs
//!   the broken nodes first.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::sharingpolicy::OnFailure;

use crate::policies::validate::RolloutRules;

/// State of a policy's GPUs on one node, relative to the partition in the node's spec.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeState {
    /// The GPUs serve the partition.
    Serving,
    /// Some GPUs wait because pods use slices that must be removed. The other GPUs serve the
    /// partition.
    WaitingForPods,
    /// GPUs are being repartitioned.
    Changing,
    /// A GPU did not reach the partition, or its MPS daemon does not serve. Contains the reason.
    Failed(String),
}

/// A node with GPUs of a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a node")]
pub struct NodeView {
    /// Whether the node's spec has the newest partition of the policy.
    pub has_newest: bool,
    /// State relative to the partition in the spec.
    pub state: NodeState,
    /// Whether a GPU or its MPS daemon fails now. The state becomes [`NodeState::Failed`] only if
    /// the failure lasts.
    pub failing: bool,
    /// Whether a changing GPU no longer serves its older partition.
    pub is_between_partitions: bool,
    /// Whether at least one GPU serves the partition in the spec. If the current change has reached
    /// the node, only GPUs that the change affects count.
    pub has_serving_gpu: bool,
    /// Whether the node has served the partition in its spec for a minimum time.
    pub is_steady: bool,
    /// Whether pods use a changing GPU.
    pub in_use: bool,
    /// Whether the node's agent is ready. Other nodes cannot change.
    pub agent_ready: bool,
    /// Whether the current change affects the node. Other nodes had the newest partition before the
    /// change, or are new.
    pub affected: bool,
    /// Whether the node may have changed just before the operator knew of the change.
    pub may_be_canary: bool,
    /// Whether the node, or each of its GPUs that the current change affects, is cordoned.
    pub cordoned: bool,
    /// Whether the current change reached the node before an administrator cordoned it.
    pub withdrawn: bool,
    /// Whether the node is cordoned, or failed or was lost before the change. Such a node does not
    /// stop the rollout, and does not count as unavailable.
    pub excused: bool,
}

/// Progress of a change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Phase {
    /// All nodes have the newest partition. The affected nodes that serve have served for some
    /// time.
    #[default]
    Complete,
    /// Nodes are changing or pending.
    RollingOut,
    /// The policy is paused, and nodes are pending.
    Paused,
    /// Nodes failed, and other nodes are pending.
    Stopped,
}

/// Which nodes a change has reached, for the policy's status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RolloutProgress {
    /// Whether the change continues.
    pub phase: Phase,
    /// Number of nodes that serve the newest partition.
    pub updated: usize,
    /// Nodes that are being repartitioned to the newest partition.
    pub changing: BTreeSet<String>,
    /// Nodes that wait for pods.
    pub waiting: BTreeSet<String>,
    /// Nodes that failed to reach the newest partition, each with the reason.
    pub failed: BTreeMap<String, String>,
    /// Nodes that keep an older partition until their wave begins.
    pub pending: BTreeSet<String>,
    /// Changed nodes that have not served long enough. Other fields also count these nodes.
    pub unsteady: BTreeSet<String>,
    /// Cordoned nodes that changed, do not serve, and prevent changes of other nodes. Other fields
    /// also count these nodes.
    pub cordoned: BTreeSet<String>,
}

impl RolloutProgress {
    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        let Self { phase: _, updated, changing, waiting, failed, pending, unsteady: _, cordoned: _ } = self;
        updated + changing.len() + waiting.len() + failed.len() + pending.len()
    }
}

/// Decides which of a policy's nodes change now. The other nodes keep their partition and are
/// [`RolloutProgress::pending`].
pub fn decide(rules: RolloutRules, nodes: &BTreeMap<String, NodeView>) -> RolloutProgress {
    let failed = |view: &NodeView| view.has_newest && !view.excused && matches!(view.state, NodeState::Failed(_));
    let stopped = rules.on_failure == OnFailure::Stop && nodes.values().any(failed);
    // A new failure also holds back nodes, because a new leader does not know how old a failure is.
    let failing = |view: &NodeView| view.has_newest && !view.excused && view.failing;
    let held = stopped || rules.on_failure == OnFailure::Stop && nodes.values().any(failing);
    let proven = nodes.values().any(proves_change);
    let mut begin = BTreeSet::new();
    if !rules.paused {
        begin.extend(broken_nodes(nodes, proven, held));
        if !held {
            begin.extend(next_wave(rules, nodes));
        }
    }
    let mut progress = RolloutProgress::default();
    let is_proven = is_proven_by_affected_node(nodes);
    for (name, view) in nodes {
        let name = name.clone();
        let hold = if is_proven { None } else { withheld_by(rules, view) };
        if is_unsteady(view) || hold == Some(WithheldNodes::All) && is_serving(view) {
            progress.unsteady.insert(name.clone());
        } else if hold == Some(WithheldNodes::Unfit) && view.cordoned {
            progress.cordoned.insert(name.clone());
        }
        match &view.state {
            _ if !view.has_newest && !begin.contains(name.as_str()) => _ = progress.pending.insert(name),
            _ if !view.has_newest => _ = progress.changing.insert(name),
            NodeState::Serving => progress.updated += 1,
            NodeState::WaitingForPods => _ = progress.waiting.insert(name),
            NodeState::Changing => _ = progress.changing.insert(name),
            NodeState::Failed(why) => _ = progress.failed.insert(name, why.clone()),
        }
    }
    progress.phase = match () {
        () if progress.updated == nodes.len() && !nodes.values().any(is_unsteady) => Phase::Complete,
        () if progress.pending.is_empty() => Phase::RollingOut,
        () if rules.paused => Phase::Paused,
        () if stopped => Phase::Stopped,
        () => Phase::RollingOut,
    };
    progress
}

/// Returns whether a node serves the partition in its spec now.
pub fn is_serving(view: &NodeView) -> bool {
    view.has_serving_gpu && matches!(view.state, NodeState::Serving | NodeState::WaitingForPods)
}

/// Returns whether a node shows that the newest partition works.
fn proves_change(view: &NodeView) -> bool {
    view.has_newest && view.is_steady && is_serving(view)
}

/// Returns whether a node that the change has reached serves, but has not served long enough.
fn is_unsteady(view: &NodeView) -> bool {
    view.has_newest && view.affected && !view.is_steady && is_serving(view)
}

/// Returns whether a node that the change affects proves the change. Unaffected nodes may differ
/// from pending nodes.
fn is_proven_by_affected_node(nodes: &BTreeMap<String, NodeView>) -> bool {
    nodes.values().any(|view| view.affected && proves_change(view))
}

fn ready_pending_nodes(nodes: &BTreeMap<String, NodeView>) -> impl Iterator<Item = (&str, &NodeView)> {
    let may_begin = |(_, view): &(&String, &NodeView)| !view.has_newest && view.agent_ready;
    nodes.iter().filter(may_begin).map(|(name, view)| (name.as_str(), view))
}

/// Returns the pending nodes that do not serve an older partition, once a node proves the newest
/// partition. If a node fails, returns only failed nodes.
fn broken_nodes(nodes: &BTreeMap<String, NodeView>, proven: bool, held: bool) -> impl Iterator<Item = &str> {
    let is_broken = move |view: &NodeView| match view.state {
        NodeState::Failed(_) => true,
        NodeState::WaitingForPods => !held,
        // If the node still has its older partition, a daemon is restarting and the node will soon
        // serve again.
        NodeState::Changing => view.is_between_partitions && !held,
        NodeState::Serving => false,
    };
    ready_pending_nodes(nodes).filter(move |(_, view)| proven && is_broken(view)).map(|(name, _)| name)
}

/// Returns the nodes of the next wave. A wave is one node, until a node that the change affects
/// proves the change.
fn next_wave(rules: RolloutRules, nodes: &BTreeMap<String, NodeView>) -> BTreeSet<&str> {
    if !is_proven_by_affected_node(nodes) {
        return next_canary(rules, nodes).into_iter().collect();
    }
    let limit = rules.max_unavailable.of(nodes.len());
    let count = |state: &NodeState| nodes.values().filter(|view| !view.excused && view.state == *state).count();
    let (mut changing, mut waiting) = (count(&NodeState::Changing), count(&NodeState::WaitingForPods));
    let mut candidates: Vec<(&str, &NodeView)> =
        ready_pending_nodes(nodes).filter(|(_, view)| view.state == NodeState::Serving).collect();
    candidates.sort_by_key(|(name, view)| (is_unfit(view), view.in_use, *name));
    let mut begin = BTreeSet::new();
    for (name, view) in candidates {
        if changing >= limit || view.in_use && waiting >= limit {
            continue;
        }
        changing += 1;
        waiting += usize::from(view.in_use);
        begin.insert(name);
    }
    begin
}

/// Which pending nodes a changed node holds back until the change is proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WithheldNodes {
    /// All nodes, because the changed node may serve soon.
    All,
    /// Nodes in use, because the changed node waits for its pods.
    InUse,
    /// Nodes that are unlikely to serve, because the changed node does not serve.
    Unfit,
}

/// Returns which pending nodes a node holds back until the change is proven.
fn withheld_by(rules: RolloutRules, view: &NodeView) -> Option<WithheldNodes> {
    let is_canary = view.affected && !view.withdrawn;
    match view.state {
        _ if !view.has_newest => None,
        _ if is_serving(view) => (!view.is_steady && (is_canary || view.may_be_canary)).then_some(WithheldNodes::All),
        NodeState::Changing => (is_canary || !view.excused).then_some(WithheldNodes::All),
        NodeState::WaitingForPods => (is_canary || !view.excused).then_some(WithheldNodes::InUse),
        NodeState::Serving => is_canary.then_some(WithheldNodes::Unfit),
        // Depending on `onFailure`, a failure that is not excused stops all nodes or no node.
        NodeState::Failed(_) => {
            (is_canary && view.excused && rules.on_failure == OnFailure::Stop).then_some(WithheldNodes::Unfit)
        }
    }
}

/// Returns whether a pending node is unlikely to prove the change.
const fn is_unfit(view: &NodeView) -> bool {
    view.excused || view.cordoned || matches!(view.state, NodeState::Failed(_))
}

/// Returns the next node to change while the change is not proven. This node does not wait for an
/// older change on itself, because that change may never finish.
fn next_canary(rules: RolloutRules, nodes: &BTreeMap<String, NodeView>) -> Option<&str> {
    let holds: Vec<WithheldNodes> = nodes.values().filter_map(|view| withheld_by(rules, view)).collect();
    let is_held = |view: &NodeView| {
        holds.iter().any(|hold| match hold {
            WithheldNodes::All => true,
            WithheldNodes::InUse => view.in_use,
            WithheldNodes::Unfit => is_unfit(view),
        })
    };
    let candidates = ready_pending_nodes(nodes).filter(|(_, view)| !is_held(view));
    candidates.min_by_key(|(name, view)| (is_unfit(view), view.in_use, *name)).map(|(name, _)| name)
}

#[cfg(test)]
mod tests;
