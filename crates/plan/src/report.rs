//! Why each pod is where it is, or why nowhere, in words for its owner.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use crate::board::{Board, Rule, Spot};
use crate::cut::{Demand, Kind};
use crate::mig::Mask;
use crate::model::{Group, Model, NodeModel, as_u32};
use crate::scheduling::Refused;
use crate::snapshot::Snapshot;
use crate::states::{StateId, States};

/// Reasons for a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// By pod, in order of arrival.
    pub pods: Vec<PodReport>,
    /// Nodes and GPUs that are left out of the plan or kept as they are, though nobody asked for that.
    pub nodes: Vec<NodeReport>,
}

/// What became of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodReport {
    /// The pod.
    pub pod: String,
    /// It has a place.
    pub placed: bool,
    /// Why it is there, or why nowhere.
    pub reason: String,
}

/// What takes no part in the plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// The node.
    pub node: String,
    /// UUID of the GPU; none where it is the whole node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Why.
    pub reason: String,
}

pub(crate) fn report(
    model: &Model<'_>,
    snapshot: &Snapshot,
    states: &mut States,
    empty: &Board,
    board: &Board,
) -> Report {
    let mut report = Report::default();
    // Pods of one group wait for one reason.
    let mut waiting: BTreeMap<u32, String> = BTreeMap::new();
    for (index, pod) in snapshot.pods.iter().enumerate() {
        let spot = board.at.get(index).and_then(Option::as_ref);
        let group = model.group_of.get(index).copied().flatten();
        let reason = match (spot, group) {
            (Some(spot), _) => placed(model, states, board, as_u32(index), spot),
            (None, Some(group)) => {
                waiting.entry(group).or_insert_with(|| unplaced(model, states, empty, group)).clone()
            }
            (None, None) => {
                let wrong = model.bad_pods.get(&as_u32(index)).map_or("it cannot be planned for", String::as_str);
                format!("No plan is made for it: {wrong}.")
            }
        };
        report.pods.push(PodReport { pod: pod.name.clone(), placed: spot.is_some(), reason });
    }
    for node in &model.nodes {
        let name = || node.node.name.clone();
        if let Some(reason) = &node.left_out {
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

fn placed(model: &Model<'_>, states: &States, board: &Board, pod: u32, spot: &Spot) -> String {
    let name = model.node(spot.node).map_or("", |node| node.node.name.as_str());
    let units = crate::board::group(model, pod).map_or(&[][..], |group| group.units.as_slice());
    let mut takes: BTreeMap<(u32, &str), u32> = BTreeMap::new();
    for (unit, &gpu) in units.iter().zip(&spot.gpus) {
        if let Some(demand) = states.demand(*unit) {
            *takes.entry((gpu, model.resource(demand.resource))).or_default() += demand.units;
        }
    }
    if takes.is_empty() {
        return format!("{name} has room for it; it asks for no GPU.");
    }
    let mut text = format!("On {name}");
    for (at, ((gpu, resource), count)) in takes.iter().enumerate() {
        let index = model.gpu(*gpu).map_or(0, |gpu| gpu.gpu.index);
        let state = board.gpus.get(*gpu as usize).copied().unwrap_or(StateId::MAX);
        let how = if states.summary(state).changed { "is cut anew to give" } else { "has free" };
        let _ = write!(text, "{} GPU {index} {how} {count} {resource}", if at == 0 { "" } else { "," });
    }
    text.push('.');
    text
}

fn unplaced(model: &Model<'_>, states: &mut States, empty: &Board, id: u32) -> String {
    let Some(group) = model.groups.get(id as usize) else { return String::new() };
    if model.nodes.is_empty() {
        return "There are no nodes.".to_owned();
    }
    let mut by_reason: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (node, index) in model.nodes.iter().zip(0..) {
        let reason = obstacle(model, states, empty, id, group, node, index);
        by_reason.entry(reason).or_default().push(&node.node.name);
    }
    let mut reasons: Vec<(String, Vec<&str>)> = by_reason.into_iter().collect();
    reasons.sort_by_key(|(_, nodes)| std::cmp::Reverse(nodes.len()));
    let all = model.nodes.len();
    let texts: Vec<String> = reasons
        .into_iter()
        .map(|(reason, nodes)| match nodes.as_slice() {
            few if few.len() <= 3 => format!("{}: {reason}", few.join(", ")),
            many => format!("{} of {all} nodes: {reason}", many.len()),
        })
        .collect();
    format!("No node can take it. {}.", texts.join("; "))
}

/// What keeps a pod of a group from a node.
fn obstacle(
    model: &Model<'_>,
    states: &mut States,
    empty: &Board,
    id: u32,
    group: &Group<'_>,
    node: &NodeModel<'_>,
    index: u32,
) -> String {
    if let Some(reason) = &node.left_out {
        return format!("left out of the plan, {reason}");
    }
    match group.constraints.admit(node.node) {
        Err(Refused::Selector(label)) => return format!("it does not have the label {label} that the pod selects"),
        Err(Refused::Affinity) => return "it does not match the pod's node affinity".to_owned(),
        Err(Refused::Taint(taint)) => return format!("the pod does not tolerate its taint {taint}"),
        Err(Refused::Cordoned) => return "it is cordoned".to_owned(),
        Ok(()) => {}
    }
    for (dimension, need) in &group.needs {
        let free = empty.free(index).get(usize::from(*dimension)).copied().unwrap_or(0);
        let name = model.dimensions.get(usize::from(*dimension)).copied().unwrap_or_default();
        if free < *need {
            return format!("too little {name}: {} wanted, {} free", amount(*need), amount(free));
        }
    }
    let mut demands: Vec<Demand> = group.units.iter().filter_map(|unit| states.demand(*unit).copied()).collect();
    let count = demands.len();
    demands.dedup();
    for demand in &demands {
        let resource = model.resource(demand.resource);
        let classes = || node.gpus.clone().filter_map(|gpu| states.class(model.gpu(gpu)?.class));
        if !classes().any(|class| class.weight(demand).is_some()) {
            let known = node.gpus.clone().filter_map(|gpu| model.gpu(gpu)?.note.as_ref());
            let why = known.map(|note| format!(" ({note})")).next().unwrap_or_default();
            return format!("no GPU of it can be cut into {resource}{why}");
        }
        if let Kind::Sized(gib) = demand.kind {
            let largest = classes().map(|class| class.memory).max().unwrap_or(0);
            if gib.saturating_mul(1024) > largest {
                return format!("{resource} is {} MiB, its largest GPU has {largest} MiB", gib.saturating_mul(1024));
            }
        }
        let most = |units: u32| classes().any(|class| class.pack(&[Demand { units, ..*demand }]).is_some());
        if demand.kind == Kind::Shares && !most(demand.units) {
            let most = (1..demand.units.min(Mask::BITS * 2)).rev().find(|&units| most(units)).unwrap_or(0);
            return format!("{} {resource} of one GPU are wanted, and none has more than {most} free", demand.units);
        }
    }
    if empty.offer(model, states, id, index, Rule::Any, &mut Vec::new()).is_none() {
        let (many, what) = (count > 1, demands.first().map_or("", |demand| model.resource(demand.resource)));
        let what = if many && demands.len() == 1 { format!("{count} {what}") } else { what.to_owned() };
        return if demands.iter().all(|demand| demand.kind == Kind::Whole) {
            format!("fewer than {count} GPUs of it are wholly unused")
        } else {
            format!("what is in use leaves no room for {what}")
        };
    }
    "its room goes to pods that have a higher priority, are more, or came first".to_owned()
}

/// Thousandths as a number.
fn amount(milli: u64) -> String {
    if milli.is_multiple_of(1000) { (milli / 1000).to_string() } else { format!("{milli}m") }
}
