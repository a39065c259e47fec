//! `cleave status`: nodes, GPUs, policies, and who holds what, as the custom resources say.
//!
//! It only reads, and only `GpuNode`s and `SharingPolicy`s: what the agents and the operator have written is all there is to see.
use std::collections::BTreeMap;
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use cleave_api::gpunode::{AllocationStatus, GpuNode, GpuStatus};
use cleave_api::names::{CONDITION_APPLIED, CONDITION_GPUS_HEALTHY, CONDITION_READY};
use cleave_api::sharingpolicy::SharingPolicy;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::DeserializeGuard;
use kube::{Api, Client, Config, ResourceExt};
use serde::Serialize;

/// Shows nodes, GPUs, policies, and which pod holds what with which limits. `kubectl cleave status` too, where this program is linked as
/// `kubectl-cleave`.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    /// How it is shown.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
    /// This node only.
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// The kubeconfig's context.
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// The kubeconfig; else that of KUBECONFIG, of the home directory, or the pod's own account.
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
}

/// How the status is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Tables.
    Table,
    /// Tables with everything.
    Wide,
    /// One JSON object.
    Json,
}

/// Reads the cluster and prints its status.
pub(crate) async fn run(args: StatusArgs) -> Result<()> {
    let StatusArgs { output, node, context, kubeconfig } = args;
    // An error says that one is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = connect(context, kubeconfig).await.context("finding the API server")?;
    let all = ListParams::default();
    let nodes = Api::<DeserializeGuard<GpuNode>>::all(client.clone()).list(&all).await.context("listing GpuNodes")?;
    let policies =
        Api::<DeserializeGuard<SharingPolicy>>::all(client).list(&all).await.context("listing SharingPolicies")?;
    let report = Report::new(nodes.items, policies.items, node.as_deref());
    if let (Some(node), true) = (node, report.nodes.is_empty()) {
        bail!("there is no GpuNode {node}: kubectl get gpunodes lists those that there are");
    }
    let text = match output {
        Output::Table => render(&report, false),
        Output::Wide => render(&report, true),
        Output::Json => serde_json::to_string_pretty(&report).context("writing JSON")? + "\n",
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        // Whoever reads it has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("writing to standard output"),
    }
}

/// The API server that kubectl talks to, or the pod's own.
pub(crate) async fn connect(context: Option<String>, kubeconfig: Option<PathBuf>) -> Result<Client> {
    Ok(Client::try_from(configure(context, kubeconfig).await?)?)
}

/// Where that is, and who is asking.
pub(crate) async fn configure(context: Option<String>, kubeconfig: Option<PathBuf>) -> Result<Config> {
    let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
    Ok(match kubeconfig {
        Some(path) => Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &options).await?,
        None if options.context.is_some() => Config::from_kubeconfig(&options).await?,
        None => Config::infer().await?,
    })
}

/// What is shown: the form of `-o json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Report {
    nodes: Vec<Node>,
    policies: Vec<Policy>,
    allocations: Vec<Allocation>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    name: String,
    driver: String,
    agent_version: String,
    ready: Verdict,
    applied: Verdict,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpus_healthy: Option<Verdict>,
    gpus: Vec<Gpu>,
}

/// A condition.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Verdict {
    status: String,
    reason: String,
    message: String,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Gpu {
    index: u32,
    uuid: String,
    model: String,
    memory_mib: u64,
    sms: u32,
    mode: String,
    policy: Option<String>,
    healthy: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    class: String,
    reason: String,
    message: String,
    /// Why it is cordoned, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    cordoned: Option<String>,
    slices: Vec<Slices>,
    mps: Vec<Daemon>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Slices {
    resource: String,
    total: u32,
    in_use: u32,
    free: u32,
    unhealthy: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Daemon {
    device: String,
    state: String,
    pid: Option<u32>,
    door: String,
    restarts: u32,
    message: String,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Policy {
    name: String,
    mode: String,
    gpus: u32,
    nodes: u32,
    total: u32,
    in_use: u32,
    ready: Verdict,
    conflict: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Allocation {
    pod: String,
    container: String,
    node: String,
    gpu: u32,
    device: String,
    resource: String,
    shares: usize,
    threads: Option<u8>,
    sms: Option<u32>,
    memory_mib: Option<u64>,
    /// What of it a program can allocate, beside its CUDA context; none where that is not known.
    usable_mib: Option<u64>,
    clients: u32,
    ids: Vec<String>,
}

impl Report {
    /// What the objects say, of one node or all. A malformed object is shown as such and hides no other.
    pub(crate) fn new(
        nodes: Vec<DeserializeGuard<GpuNode>>,
        policies: Vec<DeserializeGuard<SharingPolicy>>,
        only: Option<&str>,
    ) -> Self {
        let mut report = Self { nodes: Vec::new(), policies: Vec::new(), allocations: Vec::new() };
        for node in nodes.into_iter().filter(|node| only.is_none_or(|only| node.name_any() == only)) {
            report.add(node);
        }
        report.policies = policies.into_iter().map(Policy::new).collect();
        report.nodes.sort_by(|a, b| a.name.cmp(&b.name));
        report.policies.sort_by(|a, b| a.name.cmp(&b.name));
        report.allocations.sort_by(|a, b| (&a.pod, &a.container, &a.device).cmp(&(&b.pod, &b.container, &b.device)));
        report
    }

    fn add(&mut self, node: DeserializeGuard<GpuNode>) {
        let name = node.name_any();
        let object = match node.0 {
            Ok(object) => object,
            Err(invalid) => {
                let malformed = Verdict::new("False", "Malformed", &invalid.error);
                self.nodes.push(Node {
                    name,
                    driver: String::new(),
                    agent_version: String::new(),
                    ready: malformed.clone(),
                    applied: malformed,
                    gpus_healthy: None,
                    gpus: Vec::new(),
                });
                return;
            }
        };
        let cordons = crate::cordon::cordons(&object);
        let policies: BTreeMap<&str, &String> =
            object.spec.gpus.iter().filter_map(|gpu| Some((gpu.uuid.as_str(), gpu.policy.as_ref()?))).collect();
        let status = object.status.unwrap_or_default();
        let verdict = |type_| {
            let found = status.conditions.iter().find(|condition| condition.type_ == type_);
            found.map_or_else(
                || Verdict::new("Unknown", "NotReported", "no agent has reported yet"),
                |found| Verdict::new(&found.status, &found.reason, &found.message),
            )
        };
        let (ready, applied) = (verdict(CONDITION_READY), verdict(CONDITION_APPLIED));
        // An agent of before does not tell it.
        let told = status.conditions.iter().any(|condition| condition.type_ == CONDITION_GPUS_HEALTHY);
        let gpus_healthy = told.then(|| verdict(CONDITION_GPUS_HEALTHY));
        for gpu in &status.gpus {
            self.allocations.extend(gpu.allocations.iter().map(|held| Allocation::new(&name, gpu, held)));
        }
        let gpus = status.gpus.into_iter().map(|gpu| {
            let policy = policies.get(gpu.uuid.as_str()).map(|&policy| policy.clone());
            let cordoned = cordons.0.get(&gpu.uuid).cloned();
            Gpu { cordoned, ..Gpu::new(gpu, policy) }
        });
        let gpus = gpus.collect();
        self.nodes.push(Node {
            name,
            driver: status.driver,
            agent_version: status.agent_version,
            ready,
            applied,
            gpus_healthy,
            gpus,
        });
    }
}

impl Verdict {
    fn new(status: &str, reason: &str, message: &str) -> Self {
        Self { status: status.to_owned(), reason: reason.to_owned(), message: message.to_owned() }
    }
}

impl Gpu {
    fn new(gpu: GpuStatus, policy: Option<String>) -> Self {
        let mut by_resource: BTreeMap<String, Slices> = BTreeMap::new();
        for slice in gpu.slices {
            let sum = by_resource.entry(slice.resource.clone()).or_insert_with(|| Slices {
                resource: slice.resource,
                total: 0,
                in_use: 0,
                free: 0,
                unhealthy: 0,
            });
            sum.total = sum.total.saturating_add(slice.total);
            sum.in_use = sum.in_use.saturating_add(slice.in_use);
            sum.unhealthy = sum.unhealthy.saturating_add(slice.unhealthy);
            sum.free = sum.total.saturating_sub(sum.in_use).saturating_sub(sum.unhealthy);
        }
        let mps = gpu.mps.into_iter().map(|daemon| Daemon {
            device: daemon.device,
            state: daemon.state,
            pid: daemon.pid,
            door: daemon.door,
            restarts: daemon.restarts,
            message: daemon.message,
        });
        Self {
            index: gpu.index,
            uuid: gpu.uuid,
            model: gpu.model,
            memory_mib: gpu.memory_mib,
            sms: gpu.sms,
            mode: gpu.mode,
            policy,
            healthy: gpu.health.healthy,
            class: gpu.health.class,
            cordoned: None,
            reason: gpu.health.reason,
            message: gpu.health.message,
            slices: by_resource.into_values().collect(),
            mps: mps.collect(),
        }
    }
}

impl Policy {
    fn new(policy: DeserializeGuard<SharingPolicy>) -> Self {
        let name = policy.name_any();
        match policy.0 {
            Ok(object) => {
                let status = object.status.unwrap_or_default();
                let ready = status.conditions.iter().find(|condition| condition.type_ == CONDITION_READY);
                let conflict = status.conditions.iter().find(|condition| {
                    condition.type_ == cleave_api::names::CONDITION_CONFLICT && condition.status == "True"
                });
                Self {
                    name,
                    mode: format!("{:?}", object.spec.mode),
                    gpus: status.gpus,
                    nodes: status.nodes,
                    total: status.total,
                    in_use: status.in_use,
                    ready: ready.map_or_else(
                        || Verdict::new("Unknown", "NotReported", "the operator has not looked at it yet"),
                        |found| Verdict::new(&found.status, &found.reason, &found.message),
                    ),
                    conflict: conflict.map(|condition| condition.message.clone()),
                }
            }
            Err(invalid) => Self {
                name,
                mode: String::new(),
                gpus: 0,
                nodes: 0,
                total: 0,
                in_use: 0,
                ready: Verdict::new("False", "Malformed", &invalid.error),
                conflict: None,
            },
        }
    }
}

impl Allocation {
    fn new(node: &str, gpu: &GpuStatus, held: &AllocationStatus) -> Self {
        Self {
            pod: held.pod.clone(),
            container: held.container.clone(),
            node: node.to_owned(),
            gpu: gpu.index,
            device: held.device.clone(),
            resource: held.resource.clone(),
            shares: held.ids.len(),
            threads: held.threads,
            sms: held.sms,
            memory_mib: held.memory_mib,
            usable_mib: held.memory_mib.zip(held.context_mib).map(|(limit, context)| limit.saturating_sub(context)),
            clients: held.clients,
            ids: held.ids.clone(),
        }
    }
}

/// The report as tables, and below them what needs a person's eye.
pub(crate) fn render(report: &Report, wide: bool) -> String {
    let tables = [gpu_table(report, wide), policy_table(report, wide), allocation_table(report, wide)];
    let mut text = tables.join("\n");
    let remarks = remarks(report);
    if !remarks.is_empty() {
        text.push('\n');
        text.push_str(&remarks.join("\n"));
        text.push('\n');
    }
    text
}

fn gpu_table(report: &Report, wide: bool) -> String {
    if report.nodes.is_empty() {
        return "No GpuNode: the operator makes one for each node that an agent runs on.\n".to_owned();
    }
    let mut table = Table::new(&["NODE", "GPU", "MODEL", "MODE", "RESOURCE", "IN USE", "FREE", "HEALTH"], wide);
    table.further(&["MEMORY MIB", "SMS", "POLICY", "MPS", "DOOR", "UUID"]);
    for node in &report.nodes {
        if node.gpus.is_empty() {
            let none = if node.ready.reason.is_empty() { &node.ready.status } else { &node.ready.reason };
            table.row(&[&node.name, "-", "-", "-", "-", "-", "-", none], &["-"; 6]);
        }
        for gpu in &node.gpus {
            let health = match (gpu.healthy, gpu.reason.is_empty()) {
                (true, _) => "Healthy",
                (false, true) => "Unhealthy",
                (false, false) => &gpu.reason,
            };
            let health = if gpu.cordoned.is_some() { format!("{health},Cordoned") } else { health.to_owned() };
            let health = health.as_str();
            let states: Vec<String> = gpu.mps.iter().map(|daemon| daemon.state.clone()).collect();
            let doors: Vec<String> = gpu.mps.iter().map(|daemon| daemon.door.clone()).collect();
            let (index, memory, sms) = (gpu.index.to_string(), gpu.memory_mib.to_string(), gpu.sms.to_string());
            let policy = gpu.policy.as_deref().unwrap_or_default();
            let (states, doors) = (distinct(states), distinct(doors));
            let further = [memory.as_str(), &sms, policy, &states, &doors, &gpu.uuid];
            let start = [node.name.as_str(), &index, &gpu.model, &gpu.mode];
            if gpu.slices.is_empty() {
                let [name, index, model, mode] = start;
                table.row(&[name, index, model, mode, "", "", "", health], &further);
            }
            for slices in &gpu.slices {
                let [name, index, model, mode] = start;
                let (in_use, free) = (slices.in_use.to_string(), slices.free.to_string());
                table.row(&[name, index, model, mode, &slices.resource, &in_use, &free, health], &further);
            }
        }
    }
    table.render()
}

fn policy_table(report: &Report, wide: bool) -> String {
    if report.policies.is_empty() {
        return "No SharingPolicy: every GPU is whole.\n".to_owned();
    }
    let mut table = Table::new(&["POLICY", "MODE", "GPUS", "NODES", "IN USE", "TOTAL", "READY", "REASON"], wide);
    table.further(&["MESSAGE"]);
    for policy in &report.policies {
        let numbers = [policy.gpus, policy.nodes, policy.in_use, policy.total].map(|number| number.to_string());
        let [gpus, nodes, in_use, total] = &numbers;
        let Verdict { status, reason, message } = &policy.ready;
        table.row(&[&policy.name, &policy.mode, gpus, nodes, in_use, total, status, reason], &[message]);
    }
    table.render()
}

fn allocation_table(report: &Report, wide: bool) -> String {
    if report.allocations.is_empty() {
        return "No pod holds a GPU or a part of one.\n".to_owned();
    }
    let mut table = Table::new(&["POD", "NODE", "GPU", "RESOURCE", "SHARES", "SMS", "MIB", "CLIENTS"], wide);
    table.further(&["USABLE MIB", "CONTAINER", "THREADS %", "DEVICE", "IDS"]);
    for held in &report.allocations {
        let optional = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
        let (gpu, shares, clients) = (held.gpu.to_string(), held.shares.to_string(), held.clients.to_string());
        let (sms, memory) = (optional(held.sms.map(u64::from)), optional(held.memory_mib));
        let (usable, threads) = (optional(held.usable_mib), optional(held.threads.map(u64::from)));
        let prefix = format!("{}::", held.device);
        let ids: Vec<&str> = held.ids.iter().map(|id| id.strip_prefix(&prefix).unwrap_or(id)).collect();
        table.row(
            &[&held.pod, &held.node, &gpu, &held.resource, &shares, &sms, &memory, &clients],
            &[&usable, &held.container, &threads, &held.device, &ids.join(",")],
        );
    }
    table.render()
}

/// What is not as it should be, in words.
fn remarks(report: &Report) -> Vec<String> {
    let mut remarks = Vec::new();
    for node in &report.nodes {
        let untrue = |verdict: &&Verdict| verdict.status != "True";
        // One that is true has something to say too: a GPU that should be reset some time.
        for verdict in [&node.ready, &node.applied].into_iter().filter(untrue).chain(&node.gpus_healthy) {
            let told = format!("node {}: {}: {}", node.name, verdict.reason, verdict.message);
            if !verdict.message.is_empty() && !remarks.contains(&told) {
                remarks.push(told);
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

fn distinct(mut words: Vec<String>) -> String {
    words.sort();
    words.dedup();
    words.join(",")
}

/// Columns as wide as their widest cell, three spaces between them, as `kubectl` does.
pub(crate) struct Table {
    wide: bool,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(head: &[&str], wide: bool) -> Self {
        Self { wide, rows: vec![head.iter().map(|&cell| cell.to_owned()).collect()] }
    }

    /// Heads of the columns that only the wide form has.
    fn further(&mut self, head: &[&str]) {
        if self.wide
            && let Some(first) = self.rows.first_mut()
        {
            first.extend(head.iter().map(|&cell| cell.to_owned()));
        }
    }

    pub(crate) fn row(&mut self, cells: &[&str], further: &[&str]) {
        let further = if self.wide { further } else { &[] };
        let cell = |&cell: &&str| if cell.is_empty() { "-".to_owned() } else { cell.to_owned() };
        self.rows.push(cells.iter().chain(further).map(cell).collect());
    }

    pub(crate) fn render(&self) -> String {
        let mut widths: Vec<usize> = Vec::new();
        for row in &self.rows {
            widths.resize(widths.len().max(row.len()), 0);
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        for row in &self.rows {
            let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
            text.push_str(cells.join("   ").trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use kube::api::ObjectList;

    use super::*;

    /// A cluster in which there is something of everything.
    fn report(only: Option<&str>) -> Report {
        let nodes: ObjectList<DeserializeGuard<GpuNode>> =
            serde_saphyr::from_str(include_str!("../tests/status/gpunodes.yaml")).unwrap();
        let policies: ObjectList<DeserializeGuard<SharingPolicy>> =
            serde_saphyr::from_str(include_str!("../tests/status/sharingpolicies.yaml")).unwrap();
        Report::new(nodes.items, policies.items, only)
    }

    /// Compares with a committed file; `UPDATE_EXPECTED=1 cargo test -p cleave` writes it.
    fn expect(name: &str, actual: &str) {
        let path = format!("{}/tests/status/{name}", env!("CARGO_MANIFEST_DIR"));
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            std::fs::write(&path, actual).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap();
        assert!(expected == actual, "{path} says\n{expected}\nand it is\n{actual}");
    }

    #[test]
    fn tables_are_as_committed() {
        expect("table.txt", &render(&report(None), false));
        expect("wide.txt", &render(&report(None), true));
    }

    #[test]
    fn json_is_as_committed() {
        expect("report.json", &(serde_json::to_string_pretty(&report(None)).unwrap() + "\n"));
    }

    #[test]
    fn one_node_is_shown_alone() {
        let one = report(Some("node2"));
        assert_eq!(one.nodes.len(), 1);
        assert!(one.allocations.iter().all(|held| held.node == "node2"));
        assert!(report(Some("nowhere")).nodes.is_empty());
    }

    #[test]
    fn nothing_is_said_in_words() {
        let text = render(&Report::new(Vec::new(), Vec::new(), None), false);
        assert_eq!(
            text,
            "No GpuNode: the operator makes one for each node that an agent runs on.\n\n\
             No SharingPolicy: every GPU is whole.\n\nNo pod holds a GPU or a part of one.\n"
        );
    }
}
