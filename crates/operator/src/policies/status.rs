//! What a policy amounts to, told in its status; and an event where that turned.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::SharingPolicy;
use cleave_api::gpunode::{GpuStatus, MigPartition, MpsPartition, Partition, StepStatus, TimeSlicedPartition, Whole};
use cleave_api::names::{
    CONDITION_ACCEPTED, CONDITION_CONFLICT, CONDITION_READY, OPERATOR_MANAGER, STEP_DONE, STEP_FAILED, STEP_REFUSED,
    STEP_WAITING, reason,
};
use cleave_api::sharingpolicy::SharingPolicyStatus;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::events::{Event, EventType};
use serde_json::json;

use crate::policies::plan::{GpuRef, Invalid, Plan, Report};
use crate::read::{Node, Observed};

/// How many names a sentence lists before it says how many more there are.
const LISTED: usize = 8;

/// How the agent's sentence begins when pods hold what would go.
const IN_USE: &str = "in use";

/// A policy's status could not be written.
#[derive(Debug, thiserror::Error)]
#[error("the status of SharingPolicy {policy} could not be written")]
pub struct Error {
    /// The policy.
    pub policy: String,
    /// What the API server, or the way there, said.
    #[source]
    pub source: kube::Error,
}

/// A status to be written, and the events that say what turned.
#[derive(Debug, Clone, PartialEq)]
pub struct Update {
    /// The policy.
    pub policy: String,
    /// Its resource version.
    pub from: Option<String>,
    /// Its status.
    pub status: SharingPolicyStatus,
    /// Conditions that turned: status or reason differ from what was told before.
    pub turned: Vec<Condition>,
}

/// Statuses that this process has written, by policy.
pub type Told = BTreeMap<String, Telling>;

/// A status that this process has written.
#[derive(Debug, Clone, PartialEq)]
pub struct Telling {
    /// The policy's resource version before.
    pub from: Option<String>,
    /// The status.
    pub status: SharingPolicyStatus,
}

/// The statuses that differ from what the policies say already. Pure: `now` is for conditions that
/// turn.
pub fn updates(plan: &Plan, observed: &Observed, told: &Told, now: Timestamp) -> Vec<Update> {
    let differs = |(name, report): (&String, &Report)| {
        let telling = told.get(name);
        let (meta, old) = match observed.policies.get(name)? {
            // The watch may not have brought back what was written: nothing is to be told twice.
            Ok(policy) => match telling.filter(|telling| telling.from == policy.metadata.resource_version) {
                Some(telling) => (&policy.metadata, Some(telling.status.clone())),
                None => (&policy.metadata, policy.status.clone()),
            },
            // What its status says cannot be read either: it is told once by each process.
            Err(invalid) => (&invalid.metadata, telling.map(|telling| telling.status.clone())),
        };
        let generation = meta.generation;
        let status = evaluate(report, observed, plan, generation.unwrap_or_default(), old.as_ref(), now);
        if old.as_ref() == Some(&status) {
            return None;
        }
        let before = old.map(|old| old.conditions).unwrap_or_default();
        let same = |new: &Condition| {
            before.iter().any(|old| old.type_ == new.type_ && old.status == new.status && old.reason == new.reason)
        };
        let turned = status.conditions.iter().filter(|condition| !same(condition)).cloned().collect();
        Some(Update { policy: name.clone(), from: meta.resource_version.clone(), status, turned })
    };
    plan.policies.iter().filter_map(differs).collect()
}

/// Writes a status. The policy that the API server answers with may be malformed (that is one of
/// the things to be told) and is not looked at.
pub async fn write(api: &Api<DeserializeGuard<SharingPolicy>>, update: &Update) -> Result<(), Error> {
    let body = json!({
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "SharingPolicy",
        "metadata": {"name": update.policy},
        "status": update.status,
    });
    let params = PatchParams::apply(OPERATOR_MANAGER).force();
    let written = api.patch_status(&update.policy, &params, &Patch::Apply(body)).await;
    written.map(drop).map_err(|source| Error { policy: update.policy.clone(), source })
}

/// The event that tells of a condition that turned; none for what is as anybody expects.
pub fn event(turned: &Condition) -> Option<Event> {
    let good = match turned.type_.as_str() {
        CONDITION_CONFLICT => turned.status == "False",
        _ => turned.status == "True",
    };
    // Of good news only the one that a person waits for: the GPUs are as the policy says.
    if good && turned.type_ != CONDITION_READY {
        return None;
    }
    // Ready repeats what the other two say; the passing states in between are the status's matter.
    let told_elsewhere =
        [reason::MALFORMED, reason::INVALID, reason::APPLYING, reason::OVERRIDDEN].contains(&turned.reason.as_str());
    if turned.type_ == CONDITION_READY && told_elsewhere {
        return None;
    }
    Some(Event {
        type_: if good { EventType::Normal } else { EventType::Warning },
        reason: turned.reason.clone(),
        note: Some(shorten(&turned.message, 1000)),
        action: "Plan".to_owned(),
        secondary: None,
    })
}

/// A policy's status.
fn evaluate(
    report: &Report,
    observed: &Observed,
    plan: &Plan,
    generation: i64,
    old: Option<&SharingPolicyStatus>,
    now: Timestamp,
) -> SharingPolicyStatus {
    let mut total = 0_u32;
    let mut in_use = 0_u32;
    for gpu in report.follow.iter().filter_map(|at| gpu_status(observed, at)) {
        for slice in &gpu.slices {
            total = total.saturating_add(slice.total);
            in_use = in_use.saturating_add(slice.in_use);
        }
    }
    let nodes: BTreeSet<&str> = report.follow.iter().map(|at| at.node.as_str()).collect();
    let told = [
        (CONDITION_ACCEPTED, accepted(report)),
        (CONDITION_READY, ready(report, observed, plan)),
        (CONDITION_CONFLICT, conflict(report)),
    ];
    let condition = |(type_, verdict): (&str, Verdict)| {
        let before = old.and_then(|old| old.conditions.iter().find(|condition| condition.type_ == type_));
        let status = if verdict.holds { "True" } else { "False" };
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: verdict.reason.to_owned(),
            message: verdict.message,
            observed_generation: Some(generation),
            // Kubernetes' rule: the time at which `status` turned, not at which the sentence
            // changed.
            last_transition_time: before
                .filter(|before| before.status == status)
                .map_or(Time(now), |before| before.last_transition_time.clone()),
        }
    };
    SharingPolicyStatus {
        observed_generation: generation,
        gpus: count(report.follow.len()),
        nodes: count(nodes.len()),
        total,
        in_use,
        wanted: report.wanted,
        conditions: told.into_iter().map(condition).collect(),
    }
}

/// What a condition says, without its times.
#[derive(Debug)]
struct Verdict {
    holds: bool,
    reason: &'static str,
    message: String,
}

impl Verdict {
    fn yes(reason: &'static str, message: impl Into<String>) -> Self {
        Self { holds: true, reason, message: message.into() }
    }

    fn no(reason: &'static str, message: impl Into<String>) -> Self {
        Self { holds: false, reason, message: message.into() }
    }
}

/// Whether the policy's fields mean something on the GPUs that it selects.
fn accepted(report: &Report) -> Verdict {
    match &report.invalid {
        Some(Invalid::Malformed(error)) => {
            return Verdict::no(
                reason::MALFORMED,
                format!("it could not be read, and is left out: {}", shorten(error, 400)),
            );
        }
        Some(Invalid::Refused(error)) => {
            return Verdict::no(
                reason::INVALID,
                format!("{error}; it is left out, and GPUs that followed it stay as they are"),
            );
        }
        None => {}
    }
    // Nodes that have not reported may have what is missing.
    if report.silent.is_empty() && !report.models.is_empty() && matches_nothing(report) {
        let known = report.models.iter().map(|(model, gpus)| format!("{model} ({gpus})"));
        let known = listed(known.collect());
        if !report.unknown_models.is_empty() {
            return Verdict::no(
                reason::UNKNOWN_MODEL,
                format!("no GPU of the selected nodes is {}; they have {known}", either(&report.unknown_models)),
            );
        }
        if !report.unknown_uuids.is_empty() {
            return Verdict::no(
                reason::UNKNOWN_GPU,
                format!("no selected node has {}; they have {known}", either(&report.unknown_uuids)),
            );
        }
        return Verdict::no(
            reason::NO_GPU_MATCHES,
            format!("no GPU is in all lists of gpus; the selected nodes have {known}"),
        );
    }
    if report.follow.is_empty()
        && let Some((_, cannot)) = report.cannot.first()
    {
        return Verdict::no(cannot.reason(), unservable(report));
    }
    Verdict::yes(reason::ACCEPTED, "")
}

/// Whether no GPU at all is meant.
fn matches_nothing(report: &Report) -> bool {
    report.follow.is_empty() && report.cannot.is_empty() && report.lost.is_empty()
}

/// Whether another policy has GPUs that this one means.
fn conflict(report: &Report) -> Verdict {
    if report.lost.is_empty() {
        return Verdict::no(reason::NO_CONFLICT, "");
    }
    let told = report.lost.iter().map(|(policy, gpus)| format!("{policy} has {}", gpu_list(gpus)));
    Verdict::yes(
        reason::OVERRIDDEN,
        format!("more specific or older policies have GPUs that this one selects too: {}", listed(told.collect())),
    )
}

/// Whether the GPUs are shared as the policy says.
fn ready(report: &Report, observed: &Observed, plan: &Plan) -> Verdict {
    match &report.invalid {
        Some(Invalid::Malformed(_)) => return Verdict::no(reason::MALFORMED, "the policy could not be read"),
        Some(Invalid::Refused(_)) => return Verdict::no(reason::INVALID, "the policy's fields mean nothing together"),
        None => {}
    }
    if report.nodes.is_empty() {
        return Verdict::no(reason::NO_NODE_MATCHES, "no node has all labels of nodeSelector");
    }
    if report.follow.is_empty() && report.cannot.is_empty() {
        return nothing_to_share(report);
    }
    let mut troubles = troubles(report, observed, plan);
    if !report.cannot.is_empty() {
        troubles.entry(Trouble::Cannot).or_default().push(unservable(report));
    }
    if !report.unknown_uuids.is_empty() && report.silent.is_empty() {
        let message = format!("no selected node has {}", either(&report.unknown_uuids));
        troubles.entry(Trouble::UnknownGpu).or_default().push(message);
    }
    if !report.silent.is_empty() {
        let silent = listed(report.silent.iter().cloned().collect());
        let message = format!("no agent has reported the GPUs of {silent}");
        troubles.entry(Trouble::AgentAway).or_default().push(message);
    }
    for (what, why) in &report.left_out {
        troubles.entry(Trouble::LeftOut).or_default().push(format!("{what} is left out of plans: {why}"));
    }
    let Some(first) = troubles.keys().next().copied() else {
        let how = if report.demand.is_some() { "cut as pods ask for it" } else { "shared as the policy says" };
        return Verdict::yes(reason::READY, format!("{} {how}", are(&report.follow)));
    };
    let reason = match (first, report.cannot.first()) {
        (Trouble::Cannot, Some((_, cannot))) => cannot.reason(),
        _ => first.reason(),
    };
    let sentences = troubles.into_values().flat_map(summed).collect::<Vec<_>>();
    Verdict::no(reason, shorten(&sentences.join("; "), 2000))
}

/// Why a policy that is fine has no GPU.
fn nothing_to_share(report: &Report) -> Verdict {
    if !report.silent.is_empty() {
        let silent = listed(report.silent.iter().cloned().collect());
        return Verdict::no(reason::AGENT_NOT_REPORTING, format!("no agent has reported the GPUs of {silent}"));
    }
    if report.without_agent == report.nodes {
        let nodes = listed(report.nodes.iter().cloned().collect());
        return Verdict::no(
            reason::AGENT_NOT_REPORTING,
            format!("no agent of Cleave runs on the selected nodes: {nodes}"),
        );
    }
    if !report.lost.is_empty() {
        let policies = listed(report.lost.keys().cloned().collect());
        return Verdict::no(reason::OVERRIDDEN, format!("all GPUs that it selects follow other policies: {policies}"));
    }
    if report.models.is_empty() {
        let nodes = report.nodes.difference(&report.without_agent).cloned().collect();
        return Verdict::no(
            reason::NO_GPU,
            format!("the selected nodes have no GPU that the driver shows: {}", listed(nodes)),
        );
    }
    Verdict::no(reason::NO_GPU_MATCHES, "no GPU of the selected nodes is one that gpus means")
}

/// What keeps a GPU from being as its policy says; the order is that in which they are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Trouble {
    Failed,
    Refused,
    Cannot,
    UnknownGpu,
    Unhealthy,
    AgentAway,
    LeftOut,
    Waiting,
    Applying,
}

impl Trouble {
    fn reason(self) -> &'static str {
        match self {
            Self::Failed => reason::APPLY_FAILED,
            Self::Refused => reason::APPLY_REFUSED,
            Self::Cannot => reason::GPU_TOO_SMALL,
            Self::UnknownGpu => reason::UNKNOWN_GPU,
            Self::Unhealthy => reason::GPU_UNHEALTHY,
            Self::AgentAway => reason::AGENT_NOT_REPORTING,
            Self::LeftOut => reason::LEFT_OUT,
            Self::Waiting => reason::WAITING_FOR_PODS,
            Self::Applying => reason::APPLYING,
        }
    }
}

/// What keeps the GPUs that follow a policy from being as it says, in sentences.
fn troubles(report: &Report, observed: &Observed, plan: &Plan) -> BTreeMap<Trouble, Vec<String>> {
    let mut troubles: BTreeMap<Trouble, Vec<String>> = BTreeMap::new();
    for at in &report.follow {
        let Some(node) = observed.nodes.get(&at.node) else { continue };
        if let Some((trouble, sentence)) = trouble(at, node, plan) {
            troubles.entry(trouble).or_default().push(sentence);
        }
    }
    troubles
}

fn trouble(at: &GpuRef, node: &Node, plan: &Plan) -> Option<(Trouble, String)> {
    let object = node.object()?;
    let status = object.status.as_ref()?;
    let gpu = status.gpus.iter().find(|gpu| gpu.uuid == at.uuid)?;
    if !node.agent.is_some_and(|agent| agent.ready) {
        return Some((Trouble::AgentAway, format!("the agent of {} is not ready", at.node)));
    }
    let step = status.steps.iter().find(|step| step.gpu == at.uuid && step.result != STEP_DONE);
    let current = object.metadata.generation.is_none_or(|generation| status.observed_generation >= generation)
        && plan.nodes.get(&at.node).is_none_or(|desired| desired == &object.spec);
    if !current {
        return Some((Trouble::Applying, format!("{} is being told", at.node)));
    }
    if status.plan_id != object.spec.plan_id {
        if let Some(step) = step {
            return Some(step_trouble(at, gpu, step));
        }
        let desired = object.spec.gpus.iter().find(|spec| spec.uuid == at.uuid);
        if !desired.is_none_or(|desired| is_served(&desired.partition, gpu)) {
            return Some((Trouble::Applying, format!("{} is being cut", name(at))));
        }
    }
    if !gpu.health.healthy {
        let why = if gpu.health.message.is_empty() { &gpu.health.reason } else { &gpu.health.message };
        return Some((Trouble::Unhealthy, format!("{} is not healthy: {why}", name(at))));
    }
    // One that is being started again is away for a moment; where it is longer the GPU's health
    // says so.
    let serves = |state: &str| matches!(state, "Active" | "Starting" | "Restarting" | "");
    if let Some(daemon) = gpu.mps.iter().find(|daemon| !serves(&daemon.state)) {
        let why = if daemon.message.is_empty() { String::new() } else { format!(": {}", daemon.message) };
        return Some((Trouble::Unhealthy, format!("the MPS daemon of {} is in state {}{why}", name(at), daemon.state)));
    }
    None
}

/// Whether the kubelet is told what a partition says, by resource.
fn is_served(partition: &Partition, gpu: &GpuStatus) -> bool {
    let mut desired: BTreeMap<&str, u32> = BTreeMap::new();
    let Partition { whole, mps, time_slicing, mig } = partition;
    let mut parts: Vec<(Option<&Whole>, Option<&MpsPartition>, Option<&TimeSlicedPartition>)> =
        vec![(whole.as_ref(), mps.as_ref(), time_slicing.as_ref())];
    for instance in mig.iter().flatten() {
        let MigPartition { whole, mps, time_slicing } = &instance.partition;
        parts.push((whole.as_ref(), mps.as_ref(), time_slicing.as_ref()));
    }
    for (whole, mps, time_slicing) in parts {
        if let Some(whole) = whole {
            *desired.entry(&whole.resource).or_default() += 1;
        }
        for slices in mps.iter().flat_map(|mps| &mps.slices) {
            *desired.entry(&slices.resource).or_default() += slices.count;
        }
        if let Some(slicing) = time_slicing {
            *desired.entry(&slicing.resource).or_default() += slicing.replicas;
        }
    }
    let mut served: BTreeMap<&str, u32> = BTreeMap::new();
    for slice in gpu.slices.iter().filter(|slice| slice.total > 0) {
        *served.entry(&slice.resource).or_default() += slice.total;
    }
    desired == served
}

fn step_trouble(at: &GpuRef, gpu: &GpuStatus, step: &StepStatus) -> (Trouble, String) {
    let why = if step.message.is_empty() { &step.action } else { &step.message };
    match step.result.as_str() {
        STEP_WAITING => {
            let pods: BTreeSet<&str> = gpu.allocations.iter().map(|allocation| allocation.pod.as_str()).collect();
            let named = why.starts_with(IN_USE) || pods.iter().any(|pod| why.contains(pod));
            if named {
                // The agent names those alone that hold what would go.
                (Trouble::Waiting, format!("{} waits: {why}", name(at)))
            } else if step.message.is_empty() && !pods.is_empty() {
                let pods = listed(pods.into_iter().map(str::to_owned).collect());
                (Trouble::Waiting, format!("{} waits: {IN_USE} by {pods}", name(at)))
            } else {
                (Trouble::Applying, format!("{} waits: {why}", name(at)))
            }
        }
        STEP_REFUSED => (Trouble::Refused, format!("{}: {why}", name(at))),
        STEP_FAILED => (Trouble::Failed, format!("{}: {why}", name(at))),
        _ => (Trouble::Applying, format!("{} is being cut: {why}", name(at))),
    }
}

/// The GPUs that a policy cannot be followed on, and why.
fn unservable(report: &Report) -> String {
    let told: BTreeSet<String> = report.cannot.iter().map(|(at, cannot)| format!("{}: {cannot}", name(at))).collect();
    listed_by(told.into_iter().collect(), "; ")
}

/// The same sentence of several GPUs once, and no more than [`LISTED`] of a sort.
fn summed(sentences: Vec<String>) -> Vec<String> {
    let distinct: BTreeSet<String> = sentences.into_iter().collect();
    vec![listed_by(distinct.into_iter().collect(), "; ")]
}

fn name(at: &GpuRef) -> String {
    format!("GPU {} of {}", at.index, at.node)
}

/// `GPU 0 of node1`, or `4 GPUs of node1, node2`.
fn gpu_list(gpus: &[GpuRef]) -> String {
    match gpus {
        [one] => name(one),
        many => {
            let nodes: BTreeSet<&str> = many.iter().map(|at| at.node.as_str()).collect();
            format!("{} GPUs of {}", many.len(), listed(nodes.into_iter().map(str::to_owned).collect()))
        }
    }
}

fn are(gpus: &[GpuRef]) -> String {
    format!("{} {}", gpu_list(gpus), if gpus.len() == 1 { "is" } else { "are" })
}

fn listed(names: Vec<String>) -> String {
    listed_by(names, ", ")
}

fn listed_by(mut names: Vec<String>, between: &str) -> String {
    let more = names.len().saturating_sub(LISTED);
    names.truncate(LISTED);
    let shown = names.join(between);
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

fn either(names: &[String]) -> String {
    listed_by(names.to_vec(), " or ")
}

/// The text, not longer than `most` bytes.
pub(crate) fn shorten(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let end = (0..=most.saturating_sub('…'.len_utf8())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{}…", text.get(..end).unwrap_or_default())
}

fn gpu_status<'a>(observed: &'a Observed, at: &GpuRef) -> Option<&'a GpuStatus> {
    observed.nodes.get(&at.node)?.reported()?.iter().find(|gpu| gpu.uuid == at.uuid)
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
