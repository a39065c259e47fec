//! Renders an explanation as text.
use std::cmp::Reverse;
use std::fmt::Write as _;

use super::report::{DeviceView, Explanation, GpuView, NodeView};
use crate::status::NO_GPU_NODES;
use crate::table::Table;

/// Maximum number of nodes in the table.
const MAX_NODE_ROWS: usize = 16;

/// Renders an explanation as text.
pub fn render(explanation: &Explanation) -> String {
    let mut text = summary(explanation);
    if !explanation.assignments.is_empty() {
        text.push('\n');
        text.push_str(&assignment_table(explanation));
    }
    text.push('\n');
    text.push_str(&node_table(explanation));
    let hidden = explanation.nodes.len().saturating_sub(MAX_NODE_ROWS);
    match hidden {
        0 => {}
        1 => text.push_str("1 other node with GPUs is not shown. Use -o json to see all.\n"),
        more => drop(writeln!(text, "{more} other nodes with GPUs are not shown. Use -o json to see all.")),
    }
    match explanation.other_nodes {
        0 => {}
        1 => text.push_str("1 other node has no GPUs managed by Cleave.\n"),
        more => drop(writeln!(text, "{more} other nodes have no GPUs managed by Cleave.")),
    }
    if !explanation.help.is_empty() {
        text.push_str("\nWhat would help:\n");
        for line in &explanation.help {
            let _ = writeln!(text, "  - {line}");
        }
    }
    text
}

fn summary(explanation: &Explanation) -> String {
    let requests: Vec<String> =
        explanation.requests.iter().map(|part| format!("{} {}", part.units, part.resource)).collect();
    let summary = match requests.len() {
        0 => "nothing that Cleave serves".to_owned(),
        1 => requests.join(", ") + " of one GPU",
        _ => requests.join(", ") + ", each of one GPU",
    };
    let gates = if explanation.gates.is_empty() { "none".to_owned() } else { explanation.gates.join(", ") };
    let mut text = String::new();
    for (heading, value) in [
        ("Pod:", &explanation.pod),
        ("Requests:", &summary),
        ("Priority:", &explanation.priority.to_string()),
        ("Gates:", &gates),
        ("Verdict:", &explanation.verdict.message),
    ] {
        let _ = writeln!(text, "{heading:<11}{value}");
    }
    for sentence in &explanation.quotas {
        let _ = writeln!(text, "{:<11}{sentence}", "Quota:");
    }
    text
}

/// Renders the allocations and reservations as a table.
fn assignment_table(explanation: &Explanation) -> String {
    let mut table = Table::new(&["AMOUNT", "RESOURCE", "NODE", "GPU", "DEVICE", "CONTAINER"]);
    for assignment in &explanation.assignments {
        let (units, gpu) =
            (assignment.units.to_string(), assignment.gpu.map(|gpu| gpu.to_string()).unwrap_or_default());
        let container = assignment.container.as_deref().unwrap_or("(reserved)");
        table.add_row(&[&units, &assignment.resource, &assignment.node, &gpu, &assignment.device, container]);
    }
    table.render()
}

/// Returns at most [`MAX_NODE_ROWS`] nodes on which the pod fits best, sorted by name.
fn best_nodes(explanation: &Explanation) -> Vec<&NodeView> {
    let requested = |device: &&DeviceView| explanation.requests.iter().any(|part| part.resource == device.resource);
    let free = |node: &NodeView| {
        node.gpus.iter().flat_map(|gpu| &gpu.devices).filter(requested).map(|device| device.free).max()
    };
    let own = |node: &NodeView| explanation.assignments.iter().any(|assignment| assignment.node == node.name);
    let mut nodes: Vec<&NodeView> = explanation.nodes.iter().collect();
    nodes.sort_by_key(|node| (!own(node), node.refusal.is_some(), Reverse(free(node))));
    nodes.truncate(MAX_NODE_ROWS);
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    nodes
}

fn node_table(explanation: &Explanation) -> String {
    if explanation.nodes.is_empty() {
        return NO_GPU_NODES.to_owned();
    }
    let mut table = Table::new(&["NODE", "GPU", "MODE", "RESOURCE", "TOTAL", "USED", "RESERVED", "FREE", "NOTE"]);
    for node in best_nodes(explanation) {
        if let Some(refusal) = &node.refusal {
            table.add_row(&[&node.name, "", "", "", "", "", "", "", refusal]);
        }
        for gpu in &node.gpus {
            add_gpu_rows(&mut table, &node.name, gpu);
        }
    }
    table.render()
}

/// Adds a row for each resource of a GPU, or one row if the GPU has no resources.
fn add_gpu_rows(table: &mut Table, node: &str, gpu: &GpuView) {
    let index = gpu.index.to_string();
    if gpu.devices.is_empty() {
        let note = gpu.unavailable.as_deref().unwrap_or("no resources");
        table.add_row(&[node, &index, &gpu.mode, "", "", "", "", "", note]);
    }
    for device in &gpu.devices {
        let numbers = [device.total, device.used, device.reserved, device.free].map(|number| number.to_string());
        let [total, used, reserved, free] = &numbers;
        table.add_row(&[node, &index, &gpu.mode, &device.resource, total, used, reserved, free, &device.note]);
    }
}
