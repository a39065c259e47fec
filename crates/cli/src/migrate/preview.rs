//! Determines what each pod of the input would get from Cleave. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_plan::constraints::Labels;
use serde::Serialize;

use super::input::Node;
use super::pods::{Container, Workload};
use super::policies::{Counterpart, GroupCounterparts, Plan, Unit};
use super::sources::gke;
use super::sources::hami::{self, HamiResources};
use super::sources::plugin::{GPU, MIG_PREFIX};

/// Prefix of the Nos resources that only Nos's quotas count.
const NOS_PREFIX: &str = "nos.nebuly.com/";

/// The preview of a pod that requests GPU resources.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct PodPreview {
    /// Kind, namespace and name.
    pub(super) pod: String,
    /// The result for each request.
    pub(super) requests: Vec<RequestPreview>,
    /// Other changes that the pod needs, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) notes: Vec<String>,
}

/// The preview of one container's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct RequestPreview {
    /// Name of the container.
    pub(super) container: String,
    /// The current request.
    pub(super) was: String,
    /// The results for the nodes on which the pod may run. Nodes with equal results have one entry.
    pub(super) becomes: Vec<RequestResult>,
}

/// The result for a request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct RequestResult {
    /// The request to Cleave. `None` if there is no counterpart.
    pub(super) now: Option<String>,
    /// What the container gets, or why there is no counterpart.
    pub(super) text: String,
    /// The nodes to which the result applies. Empty for all nodes on which the pod may run.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) nodes: String,
}

impl RequestResult {
    fn new(now: String, text: impl Into<String>) -> Self {
        Self { now: Some(now), text: text.into(), nodes: String::new() }
    }

    fn without_counterpart(text: impl Into<String>) -> Self {
        Self { now: None, text: text.into(), nodes: String::new() }
    }
}

/// Returns what each pod that requests GPU resources gets, in the order of the input. Pods of one
/// controller with equal previews have one entry.
pub(super) fn preview(workloads: &[Workload], nodes: &[Node], plan: &Plan) -> Vec<PodPreview> {
    let names = plan.groups.iter().find_map(|group| group.hami.as_ref());
    let mut previews: Vec<PodPreview> = Vec::new();
    for workload in workloads {
        let groups = groups_for_workload(workload, nodes, &plan.groups);
        let requests: Vec<RequestPreview> =
            workload.containers().flat_map(|container| container_preview(container, &groups)).collect();
        if requests.is_empty() {
            continue;
        }
        let entry = PodPreview { pod: workload.what.clone(), requests, notes: pod_notes(workload, names.is_some()) };
        if !previews.contains(&entry) {
            previews.push(entry);
        }
    }
    previews
}

/// Returns the groups of nodes on which a pod may run. For a pod on a node of the input, returns
/// the node's group. For any other pod, excludes the groups whose labels do not match the pod's
/// node selector. Ignores labels of the selector that no group has.
fn groups_for_workload<'a>(
    workload: &Workload,
    nodes: &[Node],
    groups: &'a [GroupCounterparts],
) -> Vec<&'a GroupCounterparts> {
    let node = workload.spec.node_name.as_ref().and_then(|name| nodes.iter().find(|node| node.name == *name));
    if let Some(node) = node {
        let contained = |labels: &Labels| labels.iter().all(|(key, value)| node.labels.get(key) == Some(value));
        return groups
            .iter()
            .filter(|group| contained(&group.labels))
            .max_by_key(|group| group.labels.len())
            .into_iter()
            .collect();
    }
    let known: BTreeSet<&String> = groups.iter().flat_map(|group| group.labels.keys()).collect();
    let selector = &workload.spec.node_selector;
    let selected: Vec<(&String, &String)> = selector.iter().filter(|(key, _)| known.contains(key)).collect();
    groups.iter().filter(|group| selected.iter().all(|(key, value)| group.labels.get(*key) == Some(*value))).collect()
}

fn container_preview(container: &Container, groups: &[&GroupCounterparts]) -> Vec<RequestPreview> {
    let requests = container.requests();
    let mut previews: BTreeMap<String, Vec<(String, RequestResult)>> = BTreeMap::new();
    let mut add = |was: String, group: Option<&GroupCounterparts>, becomes: RequestResult| {
        let nodes = group.map(|group| group.nodes.clone()).unwrap_or_default();
        previews.entry(was).or_default().push((nodes, becomes));
    };
    let (of_hami, others): (Vec<&&GroupCounterparts>, Vec<&&GroupCounterparts>) = groups
        .iter()
        .partition(|group| group.hami.as_ref().is_some_and(|names| requests.contains_key(names.count.as_str())));
    for group in &of_hami {
        if let Some(names) = &group.hami {
            add(hami_request(&requests, names), Some(group), hami_result(&requests, names, group));
        }
    }
    let handled = |name: &str| {
        let of = |names: &HamiResources| {
            [&names.count, &names.memory, &names.percentage, &names.cores].iter().any(|own| *own == name)
        };
        others.is_empty() && of_hami.iter().any(|group| group.hami.as_ref().is_some_and(of))
    };
    for (&name, &amount) in requests.iter().filter(|(name, _)| !handled(name)) {
        let was = format!("{name}: {amount}");
        let mut found = false;
        for group in &others {
            for counterpart in &group.counterparts {
                if let Some(now) = new_name(counterpart, name) {
                    found = true;
                    add(was.clone(), Some(group), request_result(counterpart, &now, amount));
                }
            }
        }
        if !found {
            add(was, None, result_without_counterpart(name, amount, groups.is_empty()));
        }
    }
    let name = &container.name;
    let request = |(was, all): (String, Vec<(String, RequestResult)>)| RequestPreview {
        container: name.clone(),
        was,
        becomes: merge_equal_results(&all),
    };
    previews.into_iter().map(request).collect()
}

/// Merges equal results. Names the nodes of each result if the results differ.
fn merge_equal_results(all: &[(String, RequestResult)]) -> Vec<RequestResult> {
    let distinct: BTreeSet<&RequestResult> = all.iter().map(|(_, becomes)| becomes).collect();
    if distinct.len() == 1 {
        return distinct.into_iter().cloned().collect();
    }
    let with_nodes = distinct.into_iter().map(|becomes| {
        let nodes: BTreeSet<&str> =
            all.iter().filter(|(_, other)| other == becomes).map(|(nodes, _)| nodes.as_str()).collect();
        RequestResult { nodes: nodes.into_iter().collect::<Vec<_>>().join("; "), ..becomes.clone() }
    });
    with_nodes.collect()
}

/// Returns the new name of the resource `name`, or `None` if `counterpart` replaces another
/// resource.
fn new_name(counterpart: &Counterpart, name: &str) -> Option<String> {
    match (counterpart.was.strip_suffix('*'), counterpart.now.strip_suffix('*')) {
        (Some(was), Some(now)) => name.strip_prefix(was).map(|rest| format!("{now}{rest}")),
        _ => (counterpart.was == name).then(|| counterpart.now.clone()),
    }
}

/// Returns the result for a request.
fn request_result(counterpart: &Counterpart, now: &str, amount: u64) -> RequestResult {
    let request = format!("{now}: {amount}");
    let text = match counterpart.unit {
        Unit::Gpu => format!("{} for this container alone.", format_count(amount, "whole GPU")),
        Unit::Instance => format!("{} for this container alone.", format_count(amount, "MIG instance")),
        Unit::Share(count) => match describe_shares(amount, count, "GPU") {
            Ok(text) => text,
            Err(text) => return RequestResult::without_counterpart(text),
        },
        Unit::InstanceShare(count) => match describe_shares(amount, count, "MIG instance") {
            Ok(text) => text,
            Err(text) => return RequestResult::without_counterpart(text),
        },
        Unit::Replica(count) => describe_replicas(amount, count, "GPU"),
        Unit::InstanceReplica(count) => describe_replicas(amount, count, "MIG instance"),
        Unit::Sized => match now.strip_prefix("nvidia.com/gpu-").and_then(|size| size.strip_suffix("gb")) {
            Some(size) if size.parse::<u64>().is_ok() => {
                format!("{size} GiB of one GPU and the same part of its SMs, created for the pod.")
            }
            _ => return RequestResult::without_counterpart("No policy serves this resource."),
        },
    };
    let refused = if counterpart.refuses_above_one && amount > 1 {
        " The current device plugin refuses requests above 1."
    } else {
        ""
    };
    RequestResult::new(request, format!("{text}{refused}"))
}

/// Describes shares. Returns the reason as an error if a device has fewer shares than the request.
fn describe_shares(amount: u64, count: u32, device: &str) -> Result<String, String> {
    if amount > u64::from(count) {
        return Err(format!("A {device} has {count} shares, and all shares of a container are of one {device}."));
    }
    Ok(format!(
        "{amount} of the {count} shares of one {device}: {amount}/{count} of its memory, and at most {amount}/{count} of its \
         SMs."
    ))
}

fn describe_replicas(amount: u64, count: u32, device: &str) -> String {
    if amount == 1 {
        return format!("A whole {device} in turns with up to {} other replicas, without limits.", count - 1);
    }
    format!(
        "{amount} of the {count} replicas of one {device} if possible. More replicas give no more time or memory than 1 replica."
    )
}

fn format_count(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// Returns the result for a request that has no counterpart in any group.
fn result_without_counterpart(name: &str, amount: u64, no_group: bool) -> RequestResult {
    if no_group && name == GPU {
        let text =
            format!("{} for this container alone: no policy selects the nodes.", format_count(amount, "whole GPU"));
        return RequestResult::new(format!("{name}: {amount}"), text);
    }
    if no_group && name.starts_with(MIG_PREFIX) && !name.ends_with(".shared") {
        let text = "Cleave serves instances that exist already. No policy selects the nodes.";
        return RequestResult::new(format!("{name}: {amount}"), text);
    }
    if name.starts_with(NOS_PREFIX) {
        return RequestResult::without_counterpart("Only Nos's quotas count this resource. Remove it.");
    }
    RequestResult::without_counterpart("None of the policies serves this resource.")
}

/// Describes a container's request to HAMi. Such a request can consist of several resources.
fn hami_request(requests: &BTreeMap<&str, u64>, names: &HamiResources) -> String {
    let all = [&names.count, &names.memory, &names.percentage, &names.cores];
    let parts = all.iter().filter_map(|name| requests.get(name.as_str()).map(|amount| format!("{name}: {amount}")));
    parts.collect::<Vec<_>>().join(", ")
}

/// Returns the result for a request to HAMi.
fn hami_result(requests: &BTreeMap<&str, u64>, names: &HamiResources, group: &GroupCounterparts) -> RequestResult {
    const MEBIBYTES_PER_GIBIBYTE: u64 = 1024;
    let get = |name: &String| requests.get(name.as_str()).copied();
    let count = get(&names.count).unwrap_or_default();
    let sliced = group.counterparts.iter().any(|counterpart| counterpart.unit == Unit::Sized);
    match (get(&names.memory), get(&names.percentage)) {
        _ if !sliced => RequestResult::without_counterpart(
            "The node's policy creates MIG instances. Request one that is large enough: nvidia.com/mig-<profile>: 1.",
        ),
        (None, None | Some(100)) => RequestResult::new(
            format!("{GPU}: {count}"),
            format!("{} for this container alone.", format_count(count, "whole GPU")),
        ),
        (Some(_), _) | (_, Some(_)) if count > 1 => RequestResult::without_counterpart(
            "Cleave allocates shares of only one GPU to a container. Split the container, or request whole GPUs.",
        ),
        (Some(memory), _) => {
            let gibibytes = memory.div_ceil(MEBIBYTES_PER_GIBIBYTE).max(1);
            let cores = get(&names.cores).map(|cores| format!(" {} {cores} has no counterpart.", names.cores));
            RequestResult::new(
                format!("nvidia.com/gpu-{gibibytes}gb: 1"),
                format!(
                    "{gibibytes} GiB of one GPU, rounded up from {memory} MiB. The SMs are in proportion to the memory.{}",
                    cores.unwrap_or_default()
                ),
            )
        }
        (None, Some(percentage)) => RequestResult::without_counterpart(format!(
            "{percentage} % depends on the model of the GPU. Request nvidia.com/gpu-<G>gb: 1 with G in GiB, or give these \
             nodes a policy with equal shares."
        )),
    }
}

/// Returns other changes that the pod needs, one sentence each.
fn pod_notes(workload: &Workload, from_hami: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let spec = &workload.spec;
    match spec.scheduler_name.as_str() {
        "" | "default-scheduler" => {}
        hami::SCHEDULER_NAME => notes.push("Remove schedulerName: hami-scheduler.".to_owned()),
        "nos-scheduler" | "scheduler" => notes.push(format!("Remove schedulerName: {}.", spec.scheduler_name)),
        other => notes.push(format!("The pod keeps the scheduler {other}, which must respect scheduling gates.")),
    }
    for label in [gke::STRATEGY_LABEL, gke::CLIENTS_LABEL, gke::PARTITION_LABEL] {
        if spec.node_selector.contains_key(label) {
            notes.push(format!("Remove {label} from nodeSelector: new node pools do not have it."));
        }
    }
    let variables: BTreeSet<&str> = workload
        .containers()
        .flat_map(|container| &container.env)
        .map(|variable| variable.name.as_str())
        .filter(|name| *name == "NVIDIA_VISIBLE_DEVICES" || name.starts_with("CUDA_MPS_"))
        .collect();
    if !variables.is_empty() {
        let names: Vec<&str> = variables.into_iter().collect();
        notes.push(format!(
            "Remove the environment variables {}: admission refuses them in containers with shares.",
            names.join(", ")
        ));
    }
    if spec.host_ipc {
        notes.push("hostIPC is not needed for shares under MPS.".to_owned());
    }
    for (key, value) in &workload.annotations {
        match key.as_str() {
            "hami.io/gpu-scheduler-policy" | "hami.io/node-scheduler-policy" => {
                let word = if value == "binpack" { "Pack" } else { "Spread" };
                notes.push(format!("Replace the annotation {key} by cleave.dev/replica-placement: {word}."));
            }
            "nvidia.com/use-gputype"
            | "nvidia.com/nouse-gputype"
            | "nvidia.com/use-gpuuuid"
            | "nvidia.com/nouse-gpuuuid" => {
                notes.push(format!("The annotation {key} has no counterpart. Select nodes by a label."));
            }
            "nvidia.com/vgpu-mode" if from_hami => {
                notes.push(format!("The annotation {key} has no effect: the requested resource decides."));
            }
            _ => {}
        }
    }
    notes.dedup();
    notes
}
