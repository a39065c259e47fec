//! Finds nodes on which another device plugin serves GPUs, in clusters where Cleave serves the same
//! resources on other nodes.
//!
//! A pod that fits on no node of Cleave is released to such nodes if one of them has enough free
//! resources. The pod gets no reservation, because the other plugin would ignore the reservation. A
//! label requirement excludes the pod from Cleave's nodes. Agents run only on nodes with the labels
//! of the chart's `nodes.nodeSelector`. So a node that lacks one of these labels never becomes a
//! node of Cleave.
use std::collections::BTreeMap;

use cleave_plan::scheduling;
use cleave_plan::snapshot::{Node as PlanNode, NodeSelectorTerm, Operator, Pod as PlanPod, Requirement};

use super::amounts::{self, FreeAmounts};
use super::cluster::{is_released_and_unbound, to_plan_pod};
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use crate::pods::PodObject;

/// Labels that every node with an agent has.
pub(super) type AgentLabels = BTreeMap<String, String>;

/// Free resources of the nodes on which another device plugin serves GPUs, within one reconcile.
pub(super) struct OtherNodes<'a>(Vec<OtherNode<'a>>);

struct OtherNode<'a> {
    node: &'a PlanNode,
    /// Free resources including GPUs, in thousandths.
    free: FreeAmounts<'a>,
    /// Label that all of Cleave's nodes have and this node lacks.
    label: (&'a str, &'a str),
}

impl<'a> OtherNodes<'a> {
    /// Computes the free resources. Pods in `unsettled` that were released to these nodes but are
    /// not bound count as bound.
    pub(super) fn new(
        nodes: &'a Nodes,
        tracker: &PodTracker,
        labels: &'a AgentLabels,
        unsettled: &[&PodObject],
    ) -> Self {
        let others: Vec<_> = nodes.0.values().filter(|state| state.has_another_plugin()).collect();
        if others.is_empty() {
            return Self(Vec::new());
        }
        // A node that had an agent before the labels changed may lack a label.
        let is_reliable = |(key, value): &(&String, &String)| {
            let has_label = |node: &PlanNode| node.labels.get(*key) == Some(*value);
            nodes.0.values().filter(|state| state.may_be_managed()).all(|state| has_label(&state.node))
        };
        let reliable: Vec<(&String, &String)> = labels.iter().filter(is_reliable).collect();
        let other = |state: &'a super::nodes::NodeState| {
            let (key, value) = reliable.iter().find(|(key, value)| state.node.labels.get(*key) != Some(*value))?;
            Some(OtherNode { node: &state.node, free: state.free_resources_with_gpus(tracker), label: (key, value) })
        };
        let mut found = Self(others.into_iter().filter_map(other).collect());
        for pod in unsettled.iter().filter(|pod| pod.to_other_nodes && is_released_and_unbound(pod)) {
            found.place_pod(&to_plan_pod(pod));
        }
        found
    }

    /// Finds a node with enough free resources for the pod, and subtracts the pod's requests.
    /// Returns a requirement that excludes the pod from all of Cleave's nodes. Returns `None` if no
    /// node allows the pod and has enough free resources.
    pub(super) fn place_pod(&mut self, pod: &PlanPod) -> Option<Requirement> {
        let has_room = |other: &&mut OtherNode<'_>| {
            amounts::has_room_for_pod(&other.free, amounts::requested_with_gpus(&pod.requests))
        };
        let mut others = self.0.iter_mut();
        let other = others.find(|other| has_room(other) && scheduling::admit(pod, other.node).is_ok())?;
        amounts::subtract(&mut other.free, &pod.requests);
        let (key, value) = other.label;
        Some(Requirement { key: key.to_owned(), operator: Operator::NotIn, values: vec![value.to_owned()] })
    }
}

/// Returns the affinity terms of a pod that was released to other nodes, without the requirement
/// that its release appended.
pub(super) fn without_requirement(terms: &[NodeSelectorTerm], labels: &AgentLabels) -> Vec<NodeSelectorTerm> {
    let is_appended = |requirement: &Requirement| {
        let [value] = requirement.values.as_slice() else { return false };
        requirement.operator == Operator::NotIn && labels.get(&requirement.key) == Some(value)
    };
    let mut terms = terms.to_vec();
    for term in &mut terms {
        drop(term.match_expressions.pop_if(|last| is_appended(last)));
    }
    // If the only term has no other requirement, the release added the whole term.
    if matches!(terms.as_slice(), [term] if term.match_expressions.is_empty() && term.match_fields.is_empty()) {
        terms.clear();
    }
    terms
}
