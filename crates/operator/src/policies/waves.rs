//! Decides which nodes a changed policy reaches now. Pure.
//!
//! The first node to change is the canary. The others follow in waves, once a node that changed has
//! served the newest partition for some time:
//!
//! - At most `maxUnavailable` nodes are repartitioned at a time.
//! - Nodes whose GPUs are in use wait for their pods after their spec is written. They count
//!   separately, so they do not keep unused nodes from changing.
//! - If a node fails, no further node changes, unless `onFailure: Continue` is set. The failure is
//!   reported only if it lasts.
//! - If a node has served the newest partition for some time, nodes that are still between older
//!   partitions, or that failed to reach one, change at once. They serve nothing that the change
//!   could end. So a policy that is changed back first repairs the nodes that it broke.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::sharingpolicy::OnFailure;

use crate::policies::validate::RolloutRules;

/// State of a policy's GPUs on one node, relative to the partition in the node's spec.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// The GPUs serve the partition.
    Serving,
    /// GPUs wait for pods that use slices to remove. The other GPUs serve the partition.
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
    pub newest: bool,
    /// State relative to the partition in the spec.
    pub state: State,
    /// Whether a GPU or its MPS daemon fails now. [`State::Failed`] only follows if that lasts.
    pub failing: bool,
    /// Whether a GPU that changes does not have the older partition either.
    pub between: bool,
    /// Whether at least one GPU serves the partition in the spec.
    pub serves: bool,
    /// Whether the node has served the partition in its spec for a minimum time.
    pub steady: bool,
    /// Whether pods use a GPU that changes.
    pub in_use: bool,
    /// Whether the node's agent is ready. Other nodes cannot change.
    pub agent_ready: bool,
    /// Whether the current change affects the node. Other nodes had the newest partition before the
    /// change, or are new.
    pub affected: bool,
    /// Whether the node is cordoned, or failed or was lost before the change. Such a node does not
    /// stop the rollout, and does not count as unavailable.
    pub excused: bool,
}

/// How far a change has reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Phase {
    /// All nodes serve the newest partition.
    #[default]
    Complete,
    /// Nodes are changing or pending.
    RollingOut,
    /// The policy is paused, and nodes are pending.
    Paused,
    /// Nodes failed, and others are pending.
    Stopped,
}

/// Which nodes a change has reached, for the policy's status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
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
}

impl Progress {
    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        let Self { phase: _, updated, changing, waiting, failed, pending } = self;
        updated + changing.len() + waiting.len() + failed.len() + pending.len()
    }
}

/// Decides which of a policy's nodes change now. The others keep their partition: they are
/// [`Progress::pending`].
pub fn decide(rules: RolloutRules, nodes: &BTreeMap<String, NodeView>) -> Progress {
    let failed = |view: &NodeView| view.newest && !view.excused && matches!(view.state, State::Failed(_));
    let stopped = rules.on_failure == OnFailure::Stop && nodes.values().any(failed);
    // A new failure also holds nodes back: a new leader does not know how old a failure is.
    let failing = |view: &NodeView| view.newest && !view.excused && view.failing;
    let held = stopped || rules.on_failure == OnFailure::Stop && nodes.values().any(failing);
    let proven = nodes.values().any(proves);
    let mut begin = BTreeSet::new();
    if !rules.paused {
        begin.extend(broken(nodes, proven, held));
        if !held {
            begin.extend(wave(rules, nodes));
        }
    }
    let mut progress = Progress::default();
    for (name, view) in nodes {
        let name = name.clone();
        match &view.state {
            _ if !view.newest && !begin.contains(name.as_str()) => _ = progress.pending.insert(name),
            _ if !view.newest => _ = progress.changing.insert(name),
            State::Serving => progress.updated += 1,
            State::WaitingForPods => _ = progress.waiting.insert(name),
            State::Changing => _ = progress.changing.insert(name),
            State::Failed(why) => _ = progress.failed.insert(name, why.clone()),
        }
    }
    progress.phase = match () {
        () if progress.updated == nodes.len() => Phase::Complete,
        () if progress.pending.is_empty() => Phase::RollingOut,
        () if rules.paused => Phase::Paused,
        () if stopped => Phase::Stopped,
        () => Phase::RollingOut,
    };
    progress
}

/// Returns whether a node serves the partition in its spec now.
pub fn is_serving(view: &NodeView) -> bool {
    view.serves && matches!(view.state, State::Serving | State::WaitingForPods)
}

/// Returns whether a node shows that the newest partition works.
fn proves(view: &NodeView) -> bool {
    view.newest && view.steady && is_serving(view)
}

fn pending(nodes: &BTreeMap<String, NodeView>) -> impl Iterator<Item = (&str, &NodeView)> {
    let may_begin = |(_, view): &(&String, &NodeView)| !view.newest && view.agent_ready;
    nodes.iter().filter(may_begin).map(|(name, view)| (name.as_str(), view))
}

/// Returns the pending nodes that do not serve an older partition. If a node fails, only failed
/// nodes follow.
fn broken(nodes: &BTreeMap<String, NodeView>, proven: bool, held: bool) -> impl Iterator<Item = &str> {
    let is_broken = move |view: &NodeView| match view.state {
        State::Failed(_) => true,
        State::WaitingForPods => !held,
        // Otherwise, a daemon restarts: the node serves its older partition soon.
        State::Changing => view.between && !held,
        State::Serving => false,
    };
    pending(nodes).filter(move |(_, view)| proven && is_broken(view)).map(|(name, _)| name)
}

/// Returns the nodes of the next wave. The first wave is one node, until a node that the change
/// affects proves it: pending nodes may differ from the nodes that never changed.
fn wave(rules: RolloutRules, nodes: &BTreeMap<String, NodeView>) -> BTreeSet<&str> {
    let proven = nodes.values().any(|view| view.affected && proves(view));
    let limit = if proven { rules.max_unavailable.of(nodes.len()) } else { 1 };
    // A canary replaces an older change that never finishes, so it does not wait for that change.
    let count = |state: &State| {
        let counts = |view: &&NodeView| !view.excused && (view.newest || proven) && view.state == *state;
        nodes.values().filter(counts).count()
    };
    let (mut changing, mut waiting) = (count(&State::Changing), count(&State::WaitingForPods));
    if !proven {
        // A canary that serves must do so for some time before another node follows.
        let is_canary = |view: &&NodeView| view.affected && view.newest && !view.excused && is_serving(view);
        changing += nodes.values().filter(is_canary).count();
    }
    let mut candidates: Vec<(&str, &NodeView)> =
        pending(nodes).filter(|(_, view)| !proven || view.state == State::Serving).collect();
    // A node that failed before the change would reveal little about the change.
    candidates.sort_by_key(|(name, view)| (view.excused || matches!(view.state, State::Failed(_)), view.in_use, *name));
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

#[cfg(test)]
mod tests;
