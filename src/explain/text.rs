//! An explanation in words.
use std::cmp::Reverse;
use std::fmt::Write as _;

use super::{DeviceView, Explanation, NodeView};
use crate::status::Table;

/// Nodes that the table shows.
const MOST_SHOWN: usize = 16;

/// The explanation in words.
pub(super) fn render(told: &Explanation) -> String {
    let mut text = String::new();
    let list = |all: &[String], none: &str| if all.is_empty() { none.to_owned() } else { all.join(", ") };
    let asks: Vec<String> = told.asks.iter().map(|part| format!("{} {}", part.units, part.resource)).collect();
    let each = if told.asks.len() > 1 {
        ", each of one GPU"
    } else if told.asks.is_empty() {
        ""
    } else {
        " of one GPU"
    };
    for (head, words) in [
        ("Pod:", told.pod.clone()),
        ("Asks for:", list(&asks, "nothing that Cleave serves") + each),
        ("Priority:", told.priority.to_string()),
        ("Gates:", list(&told.gates, "none")),
        ("Verdict:", told.verdict.message.clone()),
    ] {
        let _ = writeln!(text, "{head:<11}{words}");
    }
    if !told.holds.is_empty() {
        let mut table = Table::new(&["HOLDS", "RESOURCE", "NODE", "GPU", "DEVICE", "CONTAINER"], false);
        for held in &told.holds {
            let (units, gpu) = (held.units.to_string(), held.gpu.map(|gpu| gpu.to_string()).unwrap_or_default());
            let container = held.container.as_deref().unwrap_or("not given to one yet");
            table.row(&[&units, &held.resource, &held.node, &gpu, &held.device, container], &[]);
        }
        text.push('\n');
        text.push_str(&table.render());
    }
    text.push('\n');
    text.push_str(&node_table(told));
    let left_out = told.nodes.len().saturating_sub(MOST_SHOWN);
    if left_out > 0 {
        let _ = writeln!(text, "{left_out} more nodes with GPUs, with no more room than these: -o json has all.");
    }
    if told.other_nodes > 0 {
        let nodes = if told.other_nodes == 1 { "1 node".to_owned() } else { format!("{} nodes", told.other_nodes) };
        let _ = writeln!(text, "{nodes} without GPUs of Cleave.");
    }
    if !told.help.is_empty() {
        text.push_str("\nWhat would help:\n");
        for line in &told.help {
            let _ = writeln!(text, "  - {line}");
        }
    }
    text
}

/// The nodes that come closest to taking the pod, as many as are shown, by name.
fn closest(told: &Explanation) -> Vec<&NodeView> {
    let asked = |device: &&DeviceView| told.asks.iter().any(|part| part.resource == device.resource);
    let free =
        |node: &NodeView| node.gpus.iter().flat_map(|gpu| &gpu.devices).filter(asked).map(|device| device.free).max();
    let mine = |node: &NodeView| told.holds.iter().any(|held| held.node == node.name);
    let mut nodes: Vec<&NodeView> = told.nodes.iter().collect();
    nodes.sort_by_key(|node| (!mine(node), node.refusal.is_some(), Reverse(free(node))));
    nodes.truncate(MOST_SHOWN);
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    nodes
}

fn node_table(told: &Explanation) -> String {
    if told.nodes.is_empty() {
        return "No GpuNode: the operator makes one for each node that an agent runs on.\n".to_owned();
    }
    let mut table = Table::new(&["NODE", "GPU", "MODE", "RESOURCE", "TOTAL", "USED", "HELD", "FREE", "NOTE"], false);
    for node in closest(told) {
        if let Some(refusal) = &node.refusal {
            table.row(&[&node.name, "", "", "", "", "", "", "", refusal], &[]);
        }
        for gpu in &node.gpus {
            let index = gpu.index.to_string();
            let start = [node.name.as_str(), &index, &gpu.mode];
            let [name, index, mode] = start;
            if gpu.devices.is_empty() {
                table.row(
                    &[name, index, mode, "", "", "", "", "", gpu.unable.as_deref().unwrap_or("offers nothing")],
                    &[],
                );
            }
            for device in &gpu.devices {
                let numbers = [device.total, device.used, device.held, device.free].map(|number| number.to_string());
                let [total, used, held, free] = &numbers;
                table.row(&[name, index, mode, &device.resource, total, used, held, free, &device.note], &[]);
            }
        }
    }
    table.render()
}
