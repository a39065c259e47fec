//! Renders the report of `cleave status` as tables.
use super::report::{Allocation, Gpu, StatusReport};
use crate::condition::ConditionValue;
use crate::quotas::render_short;
use crate::table::Table;

/// The text for a cluster without `GpuNode`s.
pub(crate) const NO_GPU_NODES: &str = "No GpuNodes. The operator creates one for each node that runs an agent.\n";

/// Renders tables of GPUs, policies, quotas and allocations, followed by problems. `wide` adds
/// columns.
pub fn render(report: &StatusReport, wide: bool) -> String {
    let mut tables = vec![gpu_table(report, wide), policy_table(report, wide)];
    if !report.quotas.is_empty() {
        tables.push(render_short(&report.quotas));
    }
    tables.push(allocation_table(report, wide));
    let mut text = tables.join("\n");
    let remarks = problem_lines(report);
    if !remarks.is_empty() {
        text.push('\n');
        text.push_str(&remarks.join("\n"));
        text.push('\n');
    }
    text
}

fn gpu_table(report: &StatusReport, wide: bool) -> String {
    if report.nodes.is_empty() {
        return NO_GPU_NODES.to_owned();
    }
    let mut table = Table::new(&["NODE", "GPU", "MODEL", "MODE", "RESOURCE", "IN USE", "FREE", "HEALTH"])
        .with_wide_columns(wide, &["MEMORY MIB", "SMS", "POLICY", "MPS", "DOOR", "UUID"]);
    for node in &report.nodes {
        if node.gpus.is_empty() {
            let why = if node.ready.reason.is_empty() { &node.ready.status } else { &node.ready.reason };
            table.add_wide_row(&[&node.name, "-", "-", "-", "-", "-", "-", why], &["-"; 6]);
        }
        for gpu in &node.gpus {
            add_gpu_rows(&mut table, &node.name, gpu);
        }
    }
    table.render()
}

/// Adds a row for each resource of a GPU, or one row if the GPU has no resources.
fn add_gpu_rows(table: &mut Table, node: &str, gpu: &Gpu) {
    let health = health_text(gpu);
    let (index, memory, sms) = (gpu.index.to_string(), gpu.memory_mib.to_string(), gpu.sms.to_string());
    let policy = gpu.policy.as_deref().unwrap_or_default();
    let states = join_distinct(gpu.mps.iter().map(|daemon| daemon.state.as_str()).collect());
    let doors = join_distinct(gpu.mps.iter().map(|daemon| daemon.door.as_str()).collect());
    let wide = [memory.as_str(), &sms, policy, &states, &doors, &gpu.uuid];
    if gpu.slices.is_empty() {
        table.add_wide_row(&[node, &index, &gpu.model, &gpu.mode, "", "", "", &health], &wide);
    }
    for slices in &gpu.slices {
        let (in_use, free) = (slices.in_use.to_string(), slices.free.to_string());
        table.add_wide_row(&[node, &index, &gpu.model, &gpu.mode, &slices.resource, &in_use, &free, &health], &wide);
    }
}

/// Returns the health of a GPU, and whether it is cordoned.
fn health_text(gpu: &Gpu) -> String {
    let health = match (gpu.healthy, gpu.reason.is_empty()) {
        (true, _) => "Healthy",
        (false, true) => "Unhealthy",
        (false, false) => &gpu.reason,
    };
    if gpu.cordoned.is_some() { format!("{health},Cordoned") } else { health.to_owned() }
}

fn policy_table(report: &StatusReport, wide: bool) -> String {
    if report.policies.is_empty() {
        return "No SharingPolicies. Cleave divides no GPU.\n".to_owned();
    }
    let mut table = Table::new(&["POLICY", "MODE", "GPUS", "NODES", "IN USE", "TOTAL", "READY", "REASON"])
        .with_wide_columns(wide, &["MESSAGE"]);
    for policy in &report.policies {
        let numbers = [policy.gpus, policy.nodes, policy.in_use, policy.total].map(|number| number.to_string());
        let [gpus, nodes, in_use, total] = &numbers;
        let ConditionValue { status, reason, message } = &policy.ready;
        table.add_wide_row(&[&policy.name, &policy.mode, gpus, nodes, in_use, total, status, reason], &[message]);
    }
    table.render()
}

fn allocation_table(report: &StatusReport, wide: bool) -> String {
    if report.allocations.is_empty() {
        return "No pod uses a GPU.\n".to_owned();
    }
    let mut table = Table::new(&["POD", "NODE", "GPU", "RESOURCE", "SHARES", "SMS", "MIB", "CLIENTS"])
        .with_wide_columns(wide, &["USABLE MIB", "CONTAINER", "THREADS %", "DEVICE", "IDS"]);
    for allocation in &report.allocations {
        add_allocation_row(&mut table, allocation);
    }
    table.render()
}

fn add_allocation_row(table: &mut Table, allocation: &Allocation) {
    let optional = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    let (gpu, shares, clients) =
        (allocation.gpu.to_string(), allocation.shares.to_string(), allocation.clients.to_string());
    let (sms, memory) = (optional(allocation.sms.map(u64::from)), optional(allocation.memory_mib));
    let (usable, threads) = (optional(allocation.usable_mib), optional(allocation.threads.map(u64::from)));
    let prefix = format!("{}::", allocation.device);
    let ids: Vec<&str> = allocation.ids.iter().map(|id| id.strip_prefix(&prefix).unwrap_or(id)).collect();
    table.add_wide_row(
        &[&allocation.pod, &allocation.node, &gpu, &allocation.resource, &shares, &sms, &memory, &clients],
        &[&usable, &allocation.container, &threads, &allocation.device, &ids.join(",")],
    );
}

/// Returns the problems, one line each.
fn problem_lines(report: &StatusReport) -> Vec<String> {
    let mut remarks = Vec::new();
    for node in &report.nodes {
        let not_true = |verdict: &&ConditionValue| verdict.status != "True";
        // GpusHealthy can have a message even if it is True, for example if a GPU should be reset
        // at a convenient time.
        for verdict in [&node.ready, &node.applied].into_iter().filter(not_true).chain(&node.gpus_healthy) {
            let remark = format!("node {}: {}: {}", node.name, verdict.reason, verdict.message);
            if !verdict.message.is_empty() && !remarks.contains(&remark) {
                remarks.push(remark);
            }
        }
        for gpu in &node.gpus {
            if let Some(reason) = gpu.cordoned.as_ref().filter(|reason| !reason.is_empty()) {
                remarks.push(format!("node {}: GPU {} is cordoned: {reason}", node.name, gpu.index));
            }
        }
    }
    for policy in &report.policies {
        if policy.ready.status != "True" && !policy.ready.message.is_empty() {
            remarks.push(format!("policy {}: {}: {}", policy.name, policy.ready.reason, policy.ready.message));
        }
        if let Some(conflict) = &policy.conflict {
            remarks.push(format!("policy {}: {conflict}", policy.name));
        }
    }
    remarks
}

/// Sorts the words, removes duplicates, and joins them with commas.
fn join_distinct(mut words: Vec<&str>) -> String {
    words.sort_unstable();
    words.dedup();
    words.join(",")
}
