//! Explains to each pod's owner why the pod is placed on its node, or why it is not placed.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use crate::assignment::{Assignment, ChangeRule, Location};
use crate::device::WHOLE_GPU_RESOURCE;
use crate::model::{Model, NodeModel, PodGroup, as_u32};
use crate::partition::{GpuDemand, ResourceKind};
use crate::snapshot::Snapshot;
use crate::states::{StateId, States};

/// Explanation of a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanReport {
    /// Pods in order of arrival.
    pub pods: Vec<PodReport>,
    /// Nodes and GPUs that are excluded from the plan or not repartitioned, although no policy
    /// requires that.
    pub nodes: Vec<NodeReport>,
}

/// Explanation for one pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodReport {
    /// Name of the pod.
    pub pod: String,
    /// Whether the pod is placed.
    pub placed: bool,
    /// Why the pod is placed on its node, or why it is not placed.
    pub reason: String,
}

/// A node or GPU that is excluded from the plan or not repartitioned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// Name of the node.
    pub node: String,
    /// UUID of the GPU. `None` if the whole node is excluded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Why the node or GPU is excluded or not repartitioned.
    pub reason: String,
}

/// Maximum number of reasons in one pod's explanation. Each reason covers one or more nodes.
const MAX_REASONS_PER_POD: usize = 6;

/// A finished plan and its inputs.
pub(crate) struct PlanContext<'r, 'a> {
    pub(crate) model: &'r Model<'a>,
    pub(crate) snapshot: &'r Snapshot,
    /// The assignment without the pending pods.
    pub(crate) empty: &'r Assignment,
    /// The assignment with the pending pods.
    pub(crate) assignment: &'r Assignment,
}

impl PlanContext<'_, '_> {
    fn priority(&self, pod: u32) -> i32 {
        self.snapshot.pods.get(pod as usize).map_or(i32::MIN, |pod| pod.priority)
    }
}

pub(crate) fn create_report(cluster: &PlanContext<'_, '_>, states: &mut States) -> PlanReport {
    let &PlanContext { model, snapshot, assignment, .. } = cluster;
    let mut report = PlanReport::default();
    // Compute the reason once for each group: all pods of a group have the same reason.
    let mut waiting: BTreeMap<u32, String> = BTreeMap::new();
    for (index, pod) in snapshot.pods.iter().enumerate() {
        let location = assignment.locations.get(index).and_then(Option::as_ref);
        let group = model.group_of.get(index).copied().flatten();
        let reason = match (location, group) {
            (Some(location), _) => placed_reason(model, states, assignment, as_u32(index), location),
            (None, Some(group)) => {
                waiting.entry(group).or_insert_with(|| unplaced_reason(cluster, states, group)).clone()
            }
            (None, None) => {
                let wrong = model
                    .unplannable_pods
                    .get(&as_u32(index))
                    .map_or("the pod's requests are not valid", String::as_str);
                format!("The pod cannot be planned: {wrong}.")
            }
        };
        report.pods.push(PodReport { pod: pod.name.clone(), placed: location.is_some(), reason });
    }
    for node in &model.nodes {
        let name = || node.node.name.clone();
        if let Some(reason) = &node.exclusion {
            report.nodes.push(NodeReport { node: name(), gpu: None, reason: reason.clone() });
            continue;
        }
        for gpu in node.gpus.clone().filter_map(|gpu| model.gpu(gpu)) {
            if let Some(reason) = &gpu.note {
                report.nodes.push(NodeReport { node: name(), gpu: Some(gpu.gpu.uuid.clone()), reason: reason.clone() });
            }
        }
    }
    report
}

fn placed_reason(model: &Model<'_>, states: &States, assignment: &Assignment, pod: u32, location: &Location) -> String {
    let name = model.node(location.node).map_or("", |node| node.node.name.as_str());
    let units = crate::assignment::group_of_pod(model, pod).map_or(&[][..], |group| group.units.as_slice());
    let mut takes: BTreeMap<(u32, &str), u32> = BTreeMap::new();
    for (unit, &gpu) in units.iter().zip(&location.gpus) {
        if let Some(demand) = states.demand(*unit) {
            *takes.entry((gpu, model.resource(demand.resource))).or_default() += demand.units;
        }
    }
    if takes.is_empty() {
        return format!("{name} has room. The pod requests no GPU.");
    }
    let mut text = format!("On {name},");
    for (at, ((gpu, resource), count)) in takes.iter().enumerate() {
        let index = model.gpu(*gpu).map_or(0, |gpu| gpu.gpu.index);
        let state = assignment.gpus.get(*gpu as usize).copied().unwrap_or(StateId::MAX);
        let _ = write!(text, "{} GPU {index}", if at == 0 { "" } else { "," });
        let _ = match (*resource == WHOLE_GPU_RESOURCE, states.summary(state).changed) {
            (true, true) => write!(text, ", which becomes whole again"),
            (true, false) => write!(text, ", which is free"),
            (false, true) => write!(text, " provides {count} {resource} after repartitioning"),
            (false, false) => write!(text, " has {count} {resource} free"),
        };
    }
    text.push('.');
    text
}

fn unplaced_reason(cluster: &PlanContext<'_, '_>, states: &mut States, group_id: u32) -> String {
    let model = cluster.model;
    let Some(group) = model.groups.get(group_id as usize) else { return String::new() };
    if model.nodes.is_empty() {
        return "The cluster has no nodes.".to_owned();
    }
    let mut by_reason: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (node, index) in model.nodes.iter().zip(0..) {
        let reason = placement_obstacle(cluster, states, group_id, group, node, index);
        by_reason.entry(reason).or_default().push(&node.node.name);
    }
    // List the most frequent reason first. Among equally frequent reasons, list the reason of the
    // first node first.
    let mut reasons: Vec<(String, Vec<&str>)> = by_reason.into_iter().collect();
    reasons.sort_by(|(_, a), (_, b)| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
    let shown = reasons.len().min(MAX_REASONS_PER_POD);
    let more: usize = reasons.iter().skip(shown).map(|(_, nodes)| nodes.len()).sum();
    let mut texts: Vec<String> = reasons
        .into_iter()
        .take(shown)
        .map(|(reason, nodes)| match nodes.as_slice() {
            few if few.len() <= 3 => format!("{}: {reason}", few.join(", ")),
            many => format!("{} of {} nodes: {reason}", many.len(), model.nodes.len()),
        })
        .collect();
    if more > 0 {
        let nodes = if more == 1 { "node" } else { "nodes" };
        texts.push(format!("{more} more {nodes}: other reasons"));
    }
    format!("No node can run the pod. {}.", texts.join("; "))
}

/// Returns why pods of a group cannot be placed on a node.
fn placement_obstacle(
    cluster: &PlanContext<'_, '_>,
    states: &mut States,
    group_id: u32,
    group: &PodGroup<'_>,
    node: &NodeModel<'_>,
    index: u32,
) -> String {
    let &PlanContext { model, empty, .. } = cluster;
    if let Some(reason) = &node.exclusion {
        return format!("excluded from the plan: {reason}");
    }
    if let Err(refused) = group.constraints.admit(node.node) {
        return refused.to_string();
    }
    for (dimension, need) in &group.needs {
        let free = empty.free(index).get(usize::from(*dimension)).copied().unwrap_or(0);
        let name = model.dimensions.get(usize::from(*dimension)).copied().unwrap_or_default();
        if free < *need {
            return format!("not enough {name}: {} requested, {} free", format_amount(*need), format_amount(free));
        }
    }
    let mut demands: Vec<GpuDemand> = group.units.iter().filter_map(|unit| states.demand(*unit).copied()).collect();
    let count = demands.len();
    demands.dedup();
    for demand in &demands {
        let resource = model.resource(demand.resource);
        let classes = || node.gpus.clone().filter_map(|gpu| states.class(model.gpu(gpu)?.class));
        if !classes().any(|class| class.weight(demand).is_some()) {
            let known = node.gpus.clone().filter_map(|gpu| model.gpu(gpu)?.note.as_ref());
            let why = known.map(|note| format!(" ({note})")).next().unwrap_or_default();
            return format!("no GPU can be partitioned into {resource}{why}");
        }
        if let ResourceKind::Sized(gib) = demand.kind {
            let largest = classes().map(|class| class.memory).max().unwrap_or(0);
            if gib.saturating_mul(1024) > largest {
                return format!(
                    "{resource} needs {} MiB, and the largest GPU has {largest} MiB",
                    gib.saturating_mul(1024)
                );
            }
        }
        let most = |units: u32| classes().any(|class| class.pack(&[GpuDemand { units, ..*demand }]).is_some());
        if demand.kind == ResourceKind::Shares && !most(demand.units) {
            let most = (1..demand.units.min(64)).rev().find(|&units| most(units)).unwrap_or(0);
            return format!(
                "the pod requests {} {resource} of one GPU, and no GPU has more than {most} free",
                demand.units
            );
        }
    }
    if empty.find_location(model, states, group_id, index, ChangeRule::Any, &mut Vec::new()).is_none() {
        let (many, what) = (count > 1, demands.first().map_or("", |demand| model.resource(demand.resource)));
        let what = if many && demands.len() == 1 { format!("{count} {what}") } else { what.to_owned() };
        return if demands.iter().all(|demand| demand.kind == ResourceKind::Whole) {
            match count {
                1 => "no GPU is unused".to_owned(),
                _ => format!("fewer than {count} GPUs are unused"),
            }
        } else {
            format!("slices in use leave no room for {what}")
        };
    }
    competing_pods(cluster, group, index)
}

/// Names the pods that prevent a pod of the group from fitting on the node.
fn competing_pods(cluster: &PlanContext<'_, '_>, group: &PodGroup<'_>, node: u32) -> String {
    let on = cluster.assignment.pods.get(node as usize).map_or(&[][..], Vec::as_slice);
    let mut higher: Vec<u32> = on.iter().copied().filter(|&pod| cluster.priority(pod) > group.priority).collect();
    let what = if higher.is_empty() {
        "other pods are placed instead, to place as many pods as possible"
    } else {
        "pods of higher priority are placed instead"
    };
    if higher.is_empty() {
        higher = on.iter().copied().filter(|&pod| cluster.priority(pod) == group.priority).collect();
    }
    higher.sort_unstable();
    let name = |&pod: &u32| cluster.snapshot.pods.get(pod as usize).map_or("", |pod| pod.name.as_str());
    let named: Vec<&str> = higher.iter().take(3).map(name).collect();
    let more = higher.len() - named.len();
    match (named.is_empty(), more) {
        (true, _) => "other pods are placed instead".to_owned(),
        (false, 0) => format!("{what} ({})", named.join(", ")),
        (false, more) => format!("{what} ({} and {more} more)", named.join(", ")),
    }
}

/// Formats thousandths as a quantity, such as `2` or `1500m`.
fn format_amount(milli: u64) -> String {
    if milli.is_multiple_of(1000) { (milli / 1000).to_string() } else { format!("{milli}m") }
}
