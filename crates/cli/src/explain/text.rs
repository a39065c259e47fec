//! An explanation as text.
use std::cmp::Reverse;
use std::fmt::Write as _;

use super::report::{DeviceView, Explanation, GpuView, NodeView};
use crate::status::NO_GPU_NODES;
use crate::table::Table;

/// Maximum number of nodes in the table.
const MOST_SHOWN: usize = 16;

/// Renders an explanation as text.
pub fn render(explanation: &Explanation) -> String {
    let mut text = summary(explanation);
    if !explanation.holds.is_empty() {
        text.push('\n');
        text.push_str(&holds_table(explanation));
    }
    text.push('\n');
    text.push_str(&node_table(explanation));
    let hidden = explanation.nodes.len().saturating_sub(MOST_SHOWN);
    if hidden > 0 {
        let _ = writeln!(text, "{hidden} more nodes with GPUs have no more room than these. Use -o json to see all.");
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
    let asks: Vec<String> = explanation.asks.iter().map(|part| format!("{} {}", part.units, part.resource)).collect();
    let requests = match asks.len() {
        0 => "nothing that Cleave serves".to_owned(),
        1 => asks.join(", ") + " of one GPU",
        _ => asks.join(", ") + ", each of one GPU",
    };
    let gates = if explanation.gates.is_empty() { "none".to_owned() } else { explanation.gates.join(", ") };
    let mut text = String::new();
    for (heading, value) in [
        ("Pod:", &explanation.pod),
        ("Requests:", &requests),
        ("Priority:", &explanation.priority.to_string()),
        ("Gates:", &gates),
        ("Verdict:", &explanation.verdict.message),
    ] {
        let _ = writeln!(text, "{heading:<11}{value}");
    }
    text
}

/// Allocations and reservations.
fn holds_table(explanation: &Explanation) -> String {
    let mut table = Table::new(&["AMOUNT", "RESOURCE", "NODE", "GPU", "DEVICE", "CONTAINER"]);
    for held in &explanation.holds {
        let (units, gpu) = (held.units.to_string(), held.gpu.map(|gpu| gpu.to_string()).unwrap_or_default());
        let container = held.container.as_deref().unwrap_or("(reserved)");
        table.row(&[&units, &held.resource, &held.node, &gpu, &held.device, container]);
    }
    table.render()
}

/// The nodes closest to holding the pod, at most as many as are shown, by name.
fn closest(explanation: &Explanation) -> Vec<&NodeView> {
    let requested = |device: &&DeviceView| explanation.asks.iter().any(|part| part.resource == device.resource);
    let free = |node: &NodeView| {
        node.gpus.iter().flat_map(|gpu| &gpu.devices).filter(requested).map(|device| device.free).max()
    };
    let own = |node: &NodeView| explanation.holds.iter().any(|held| held.node == node.name);
    let mut nodes: Vec<&NodeView> = explanation.nodes.iter().collect();
    nodes.sort_by_key(|node| (!own(node), node.refusal.is_some(), Reverse(free(node))));
    nodes.truncate(MOST_SHOWN);
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    nodes
}

fn node_table(explanation: &Explanation) -> String {
    if explanation.nodes.is_empty() {
        return NO_GPU_NODES.to_owned();
    }
    let mut table = Table::new(&["NODE", "GPU", "MODE", "RESOURCE", "TOTAL", "USED", "RESERVED", "FREE", "NOTE"]);
    for node in closest(explanation) {
        if let Some(refusal) = &node.refusal {
            table.row(&[&node.name, "", "", "", "", "", "", "", refusal]);
        }
        for gpu in &node.gpus {
            add_gpu(&mut table, &node.name, gpu);
        }
    }
    table.render()
}

/// Adds a row for each resource of a GPU, or one if it offers none.
fn add_gpu(table: &mut Table, node: &str, gpu: &GpuView) {
    let index = gpu.index.to_string();
    if gpu.devices.is_empty() {
        let note = gpu.unable.as_deref().unwrap_or("offers nothing");
        table.row(&[node, &index, &gpu.mode, "", "", "", "", "", note]);
    }
    for device in &gpu.devices {
        let numbers = [device.total, device.used, device.held, device.free].map(|number| number.to_string());
        let [total, used, reserved, free] = &numbers;
        table.row(&[node, &index, &gpu.mode, &device.resource, total, used, reserved, free, &device.note]);
    }
}
