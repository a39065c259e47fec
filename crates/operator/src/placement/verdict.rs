//! Explains why a pod at the gate is not placeable, and whether it may become placeable.
use std::time::Duration;

use cleave_api::names::{RESOURCE_GPU, RESOURCE_MIG_PREFIX};
use cleave_plan::affinity::HOSTNAME;
use cleave_plan::device::sized_slice_gib;
use cleave_plan::ledger::DeviceRequest;

use crate::policies::demand::{Reason, WaitingPod};

/// Maximum number of nodes that a message names for each reason.
const MAX_NAMED_NODES: usize = 3;

/// Why the scheduler may refuse a node although one of its GPUs has enough free units.
pub(super) const TOO_FEW_UNITS_IN_SUM: &str =
    "too few free units in the scheduler's sum, which includes pods on faulted GPUs and pods that terminate";

/// Whether preemption frees units for a waiting pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PreemptionProspect {
    /// The pod is nominated: its victims are evicted or terminate.
    Nominated,
    /// Only evictions of pods that disruption budgets protect would free enough units.
    Protected,
    /// No preemption helps, or the pod may not preempt others.
    Impossible,
    /// This reconcile did not search: it is not this pod's turn, preemption is paused, or the pod
    /// is about to get units without evictions. An existing report to cluster autoscalers remains.
    Unknown,
}

/// Why a pod is not placeable.
#[derive(Debug, Clone)]
pub(super) enum Verdict {
    /// The pod is not placeable now, but may be later. Contains the explanation.
    Waits(String),
    /// The pod is not placeable until nodes, GPUs or policies change.
    Never { message: String, impossible: PermanentObstacle },
}

/// Why a pod fits no GPU of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PermanentObstacle {
    /// The pod may not use any node with GPUs.
    Excluded,
    /// The nodes that the pod may use do not serve the requested resources.
    NotServed,
    /// The nodes that the pod may use serve the resources, but no GPU is large enough, or no node
    /// has enough GPUs.
    TooLarge,
}

impl Verdict {
    /// Returns why the pod fits no GPU. Returns `None` if the pod may fit a GPU later.
    pub(super) fn permanent_obstacle(&self) -> Option<PermanentObstacle> {
        match self {
            Self::Waits(_) => None,
            Self::Never { impossible, .. } => Some(*impossible),
        }
    }

    /// Returns the explanation for the pod's owner, and whether the pod may become placeable.
    /// `demand` is set if a GPU may be repartitioned for the pod.
    pub(super) fn explain(self, device_requests: &[DeviceRequest], demand: Option<&WaitingPod>) -> (String, bool) {
        let is_partitioned = |DeviceRequest { resource, .. }: &DeviceRequest| {
            sized_slice_gib(resource).is_some() || resource.starts_with(RESOURCE_MIG_PREFIX) || resource == RESOURCE_GPU
        };
        match (self, demand) {
            // Pending pods determine which resources exist, so Cleave may create a missing resource
            // for the pod.
            (Self::Never { impossible, .. }, Some(waiting))
                if waiting.reason != Reason::Malformed
                    && (impossible == PermanentObstacle::NotServed || device_requests.iter().any(is_partitioned)) =>
            {
                (waiting.message.clone(), true)
            }
            (Self::Never { message, .. }, _) => (message, false),
            (Self::Waits(message), _) => (message, true),
        }
    }
}

/// The node that a cluster autoscaler must add for a pod at the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AutoscalerNeed {
    /// Another node, if the pod still needs one after this time.
    Node(Duration),
    /// A node with larger GPUs than the cluster has or the policies allow.
    LargerGpu,
    /// No node: the pod is about to get units without another node, or another node would not help.
    Nothing,
}

/// Why a pod cannot use a node with GPUs, regardless of free units.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Exclusion {
    /// The node has no hostname label. The operator narrows pods to a node by this label.
    NoHostname,
    /// The node is cordoned.
    Cordoned,
    /// The node lacks this label of the pod's node selector: `key=value`.
    Selector(String),
    /// The node does not match the pod's required node affinity.
    Affinity,
    /// The pod does not tolerate the node's taint with this key.
    Taint(String),
    /// A rule between pods or a volume excludes the node. Contains the explanation.
    Conflict(String),
    /// The node does not have enough CPU, memory, pod slots or another resource.
    Full,
    /// The scheduler would count too few free units on the node.
    TooFewUnitsInSum,
}

impl Exclusion {
    /// Describes the nodes that are excluded for this reason, as a clause: `1 node (n1) is
    /// cordoned`.
    pub(super) fn describe(&self, nodes: &[&str]) -> String {
        let more = if nodes.len() > MAX_NAMED_NODES { ", ..." } else { "" };
        let names = nodes.iter().take(MAX_NAMED_NODES).copied().collect::<Vec<_>>().join(", ");
        let (noun, are, have, do_not) =
            if nodes.len() == 1 { ("node", "is", "has", "does not") } else { ("nodes", "are", "have", "do not") };
        let subject = format!("{} {noun} ({names}{more})", nodes.len());
        match self {
            Self::NoHostname => format!("{subject} {do_not} have the label {HOSTNAME}"),
            Self::Cordoned => format!("{subject} {are} cordoned"),
            Self::Selector(label) => format!("{subject} {do_not} have the label {label} that the pod selects"),
            Self::Affinity => format!("{subject} {do_not} match the pod's node affinity"),
            Self::Taint(key) => format!("{subject} {have} the taint {key}, which the pod does not tolerate"),
            Self::Conflict(why) => format!("{subject} {are} excluded: {why}"),
            Self::Full => format!("{subject} {do_not} have enough CPU, memory or another resource"),
            Self::TooFewUnitsInSum => format!("{subject} {have} {TOO_FEW_UNITS_IN_SUM}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exclusion_names_at_most_three_nodes() {
        assert_eq!(Exclusion::Cordoned.describe(&["n1"]), "1 node (n1) is cordoned");
        assert_eq!(
            Exclusion::Affinity.describe(&["a", "b", "c", "d"]),
            "4 nodes (a, b, c, ...) do not match the pod's node affinity"
        );
        assert_eq!(
            Exclusion::Taint("k".to_owned()).describe(&["a", "b"]),
            "2 nodes (a, b) have the taint k, which the pod does not tolerate"
        );
    }
}
