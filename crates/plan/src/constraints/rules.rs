//! The rules of a pod: affinity, anti-affinity, spread constraints and host ports.
use serde::Deserialize;

use super::selector::{LabelSelector, Labels, MAX_REQUIREMENTS};

/// The rules of a pod about other pods. Node selector, node affinity and tolerations are in
/// [`Subject`](super::Subject).
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Rules {
    /// Required affinity to pods.
    pub affinity: Vec<PodAffinityTerm>,
    /// Required anti-affinity to pods.
    pub anti_affinity: Vec<PodAffinityTerm>,
    /// Topology spread constraints. Only constraints with `DoNotSchedule` refuse a node.
    pub spread: Vec<SpreadConstraint>,
    /// Host ports of all containers, including sidecars.
    pub ports: Vec<HostPort>,
}

impl Rules {
    /// Returns whether the pod has no rules about other pods.
    pub fn is_empty(&self) -> bool {
        let Self { affinity, anti_affinity, spread, ports } = self;
        affinity.is_empty() && anti_affinity.is_empty() && spread.is_empty() && ports.is_empty()
    }

    /// Returns whether a pod with these rules can exclude other pods from nodes. Pass such a pod to
    /// [`NodeChecker::new`](super::NodeChecker::new) in `repelling`.
    pub fn repels(&self) -> bool {
        !self.anti_affinity.is_empty() || !self.ports.is_empty()
    }

    /// Returns whether the rules exceed [`MAX_REQUIREMENTS`].
    pub fn are_too_many(&self) -> bool {
        let terms = self.affinity.iter().chain(&self.anti_affinity).map(PodAffinityTerm::max_comparisons);
        let spread = self.spread.iter().filter(|one| one.is_hard()).map(SpreadConstraint::max_comparisons);
        terms.chain(spread).fold(self.ports.len(), usize::saturating_add) > MAX_REQUIREMENTS
    }
}

/// One required `PodAffinityTerm`. The term selects pods. These pods must or must not be in the
/// topology domain of the subject.
///
/// `matchLabelKeys` and `mismatchLabelKeys` are not read, because the API server merges them into
/// `labelSelector` when it creates the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodAffinityTerm {
    /// Labels of the pods. `None` selects no pods, and an empty selector selects all pods.
    pub label_selector: Option<LabelSelector>,
    /// Names of the namespaces where the term selects pods.
    pub namespaces: Vec<String>,
    /// Labels of further namespaces where the term selects pods. An empty selector selects all
    /// namespaces. If both `namespaces` and this selector are omitted, only pods of the term's own
    /// namespace are selected.
    pub namespace_selector: Option<LabelSelector>,
    /// Node label that defines the topology domains: nodes with the same value are one domain.
    pub topology_key: String,
}

/// Whether a term selects a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TermMatch {
    No,
    /// The result depends on unknown labels of a namespace.
    Perhaps,
    Yes,
}

impl PodAffinityTerm {
    /// Returns whether the term selects a pod with these labels. `own` is the namespace of the pod
    /// that has the term.
    pub(super) fn selects<'n>(
        &self,
        own: &str,
        labels: &Labels,
        namespace: &str,
        namespaces: &impl Fn(&str) -> Option<&'n Labels>,
    ) -> TermMatch {
        if !self.label_selector.as_ref().is_some_and(|selector| selector.matches(labels)) {
            return TermMatch::No;
        }
        let listed = match (self.namespaces.as_slice(), &self.namespace_selector) {
            ([], None) => own == namespace,
            (names, _) => names.iter().any(|name| name == namespace),
        };
        match &self.namespace_selector {
            _ if listed => TermMatch::Yes,
            None => TermMatch::No,
            Some(selector) if selector.is_empty() => TermMatch::Yes,
            Some(selector) => match namespaces(namespace) {
                None => TermMatch::Perhaps,
                Some(labels) if selector.matches(labels) => TermMatch::Yes,
                Some(_) => TermMatch::No,
            },
        }
    }

    /// Returns whether the term may select a pod of `namespace` with these labels. `own` is the
    /// namespace of the pod that has the term. Does not read the namespace's labels: returns true
    /// if the result depends on them.
    pub fn may_select(&self, own: &str, namespace: &str, labels: &Labels) -> bool {
        self.selects(own, labels, namespace, &|_| None) != TermMatch::No
    }

    /// Returns the maximum number of comparisons that [`Self::selects`] makes.
    pub(super) fn max_comparisons(&self) -> usize {
        let selectors = self.label_selector.iter().chain(&self.namespace_selector);
        1 + self.namespaces.len() + selectors.map(LabelSelector::max_comparisons).sum::<usize>()
    }
}

/// One `TopologySpreadConstraint`: how evenly the selected pods are spread over topology domains.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SpreadConstraint {
    /// Maximum difference between the number of selected pods in a domain and the number in the
    /// domain with the fewest.
    pub max_skew: i32,
    /// Node label that defines the topology domains: nodes with the same value are one domain.
    pub topology_key: String,
    /// Whether the scheduler refuses a node that violates the constraint, or only prefers other
    /// nodes.
    pub when_unsatisfiable: WhenUnsatisfiable,
    /// Labels of the selected pods in the pod's own namespace. `None` selects no pods.
    pub label_selector: Option<LabelSelector>,
    /// Minimum number of domains. If fewer domains exist, the lowest number of pods counts as 0.
    /// The default is 1.
    pub min_domains: Option<i32>,
    /// Whether only nodes that match the pod's node selector and node affinity are domains. The
    /// default is yes.
    pub node_affinity_policy: Option<NodePolicy>,
    /// Whether the domains contain only nodes with taints that the pod tolerates. The default is
    /// no.
    pub node_taints_policy: Option<NodePolicy>,
    /// Labels that selected pods must have in common with the pod. Labels that the pod does not
    /// have are ignored.
    pub match_label_keys: Vec<String>,
}

/// How the scheduler treats a node that violates a spread constraint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub enum WhenUnsatisfiable {
    /// The pod cannot run on the node.
    #[default]
    DoNotSchedule,
    /// The scheduler prefers other nodes, but does not refuse the node.
    ScheduleAnyway,
    /// An action that this version does not support. Like the scheduler, the checker does not
    /// refuse the node.
    #[serde(other)]
    Unknown,
}

/// Whether a spread constraint ignores nodes that the pod cannot run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub enum NodePolicy {
    /// The checker ignores nodes that the pod cannot run on.
    Honor,
    /// The checker counts nodes that the pod cannot run on.
    Ignore,
    /// A policy that this version does not support. Like the scheduler, the checker counts nodes
    /// that the pod cannot run on.
    #[serde(other)]
    Unknown,
}

impl SpreadConstraint {
    /// Returns whether the constraint can refuse a node.
    pub fn is_hard(&self) -> bool {
        self.when_unsatisfiable == WhenUnsatisfiable::DoNotSchedule
    }

    /// Returns the maximum number of comparisons for deciding whether a pod is selected.
    pub(super) fn max_comparisons(&self) -> usize {
        1 + self.match_label_keys.len() + self.label_selector.as_ref().map_or(0, LabelSelector::max_comparisons)
    }

    pub(super) fn honors_affinity(&self) -> bool {
        self.node_affinity_policy.unwrap_or(NodePolicy::Honor) == NodePolicy::Honor
    }

    pub(super) fn honors_taints(&self) -> bool {
        self.node_taints_policy == Some(NodePolicy::Honor)
    }
}

/// A port of the node that a container uses. Two pods with conflicting ports cannot run on one
/// node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HostPort {
    /// Address of the node that the port is bound to. An empty text means `0.0.0.0`, every address.
    pub ip: String,
    /// `TCP`, `UDP` or `SCTP`. An empty text means `TCP`.
    pub protocol: String,
    /// Port number. 0 means no port and conflicts with nothing.
    pub port: u16,
}

/// Address that means every address of a node. kube-scheduler does not treat IPv6's `::` in this
/// way.
const EVERY_ADDRESS: &str = "0.0.0.0";

impl HostPort {
    /// Returns whether both ports are bound to the same address, or one of them to every address.
    /// Two ports conflict if this function returns true and their [sockets](Self::socket) are
    /// equal.
    pub(super) fn shares_address_with(&self, other: &Self) -> bool {
        let every = self.address() == EVERY_ADDRESS || other.address() == EVERY_ADDRESS;
        every || self.address() == other.address()
    }

    fn address(&self) -> &str {
        if self.ip.is_empty() { EVERY_ADDRESS } else { &self.ip }
    }

    /// Returns the protocol and port.
    pub(super) fn socket(&self) -> (&str, u16) {
        (if self.protocol.is_empty() { "TCP" } else { &self.protocol }, self.port)
    }
}
