//! Reports the state of each policy in its status, and publishes an Event for each condition that
//! changes.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::SharingPolicy;
use cleave_api::gpunode::{GpuStatus, MigPartition, MpsPartition, Partition, StepStatus, TimeSlicedPartition, Whole};
use cleave_api::names::{
    CONDITION_ACCEPTED, CONDITION_CONFLICT, CONDITION_READY, CONDITION_ROLLED_OUT, OPERATOR_FIELD_MANAGER, STEP_DONE,
    STEP_FAILED, STEP_IN_USE, STEP_REFUSED, STEP_WAITING, daemon_state, reason,
};
use cleave_api::sharingpolicy::{RolloutStatus, SharingPolicyStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::events::{Event, EventType};
use serde_json::json;

use crate::policies::plan::{GpuRef, Plan, PolicyError, PolicyReport};
use crate::policies::staging::PROOF_TIME;
use crate::policies::waves::{Phase, RolloutProgress};
use crate::read::{Node, Observed};

/// Maximum number of items in a list of a message. A longer list ends with the number of omitted
/// items.
const MAX_LISTED_ITEMS: usize = 8;

/// A policy's status could not be written.
#[derive(Debug, thiserror::Error)]
#[error("failed to write the status of SharingPolicy {policy}")]
pub struct Error {
    /// Name of the policy.
    pub policy: String,
    /// Error of the request.
    #[source]
    pub source: kube::Error,
}

/// A status to write, and the conditions to publish Events for.
#[derive(Debug, Clone, PartialEq)]
pub struct StatusUpdate {
    /// Name of the policy.
    pub policy: String,
    /// The policy's `resourceVersion` before the write.
    pub from: Option<String>,
    /// The new status.
    pub status: SharingPolicyStatus,
    /// Conditions whose status or reason changed.
    pub changed: Vec<Condition>,
}

/// Statuses that this process has written, by policy.
pub type WrittenStatuses = BTreeMap<String, WrittenStatus>;

/// A status that this process has written.
#[derive(Debug, Clone, PartialEq)]
pub struct WrittenStatus {
    /// The policy's `resourceVersion` before the write.
    pub from: Option<String>,
    /// The written status.
    pub status: SharingPolicyStatus,
}

/// Returns the statuses that differ from those in the policies. Pure: `now` is the transition time
/// of conditions that change.
pub fn updates(plan: &Plan, observed: &Observed, written: &WrittenStatuses, now: Timestamp) -> Vec<StatusUpdate> {
    let differs = |(name, report): (&String, &PolicyReport)| {
        let last = written.get(name);
        let (meta, old) = match observed.policies.get(name)? {
            // If the watch has not delivered the last write yet, compare with the written status.
            // Otherwise the operator would write the same status twice.
            Ok(policy) => match last.filter(|last| last.from == policy.metadata.resource_version) {
                Some(last) => (&policy.metadata, Some(last.status.clone())),
                None => (&policy.metadata, policy.status.clone()),
            },
            // The status of a malformed policy cannot be read, so each process writes the status
            // once.
            Err(invalid) => (&invalid.metadata, last.map(|last| last.status.clone())),
        };
        let generation = meta.generation;
        let status = policy_status(report, observed, plan, generation.unwrap_or_default(), old.as_ref(), now);
        if old.as_ref() == Some(&status) {
            return None;
        }
        let before = old.map(|old| old.conditions).unwrap_or_default();
        let same = |new: &Condition| {
            before.iter().any(|old| old.type_ == new.type_ && old.status == new.status && old.reason == new.reason)
        };
        let changed = status.conditions.iter().filter(|condition| !same(condition)).cloned().collect();
        Some(StatusUpdate { policy: name.clone(), from: meta.resource_version.clone(), status, changed })
    };
    plan.policies.iter().filter_map(differs).collect()
}

/// Writes a status. Ignores the object in the response, because it may be malformed.
///
/// # Errors
/// Returns an error if the API server refuses the write or cannot be reached.
pub async fn write(api: &Api<DeserializeGuard<SharingPolicy>>, update: &StatusUpdate) -> Result<(), Error> {
    let body = json!({
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "SharingPolicy",
        "metadata": {"name": update.policy},
        "status": update.status,
    });
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
    let written = api.patch_status(&update.policy, &params, &Patch::Apply(body)).await;
    written.map(drop).map_err(|source| Error { policy: update.policy.clone(), source })
}

/// Returns the Event for a changed condition. Returns `None` if the change needs no Event.
pub fn condition_event(changed: &Condition) -> Option<Event> {
    let good = match changed.type_.as_str() {
        CONDITION_CONFLICT => changed.status == "False",
        _ => changed.status == "True",
    };
    // Among conditions that improve, only Ready causes an Event, because users wait for it.
    if good && changed.type_ != CONDITION_READY {
        return None;
    }
    // Other conditions also report these reasons, or the reasons apply only briefly.
    let reported_elsewhere = match changed.reason.as_str() {
        reason::MALFORMED | reason::INVALID => changed.type_ != CONDITION_ACCEPTED,
        reason::OVERRIDDEN => changed.type_ != CONDITION_CONFLICT,
        reason::ROLLOUT_STOPPED => changed.type_ != CONDITION_ROLLED_OUT,
        reason::APPLYING | reason::ROLLING_OUT | reason::ROLLOUT_PAUSED => true,
        _ => false,
    };
    if reported_elsewhere {
        return None;
    }
    Some(Event {
        type_: if good { EventType::Normal } else { EventType::Warning },
        reason: changed.reason.clone(),
        note: Some(shorten(&changed.message, 1000)),
        action: "Plan".to_owned(),
        secondary: None,
    })
}

/// Computes a policy's status.
fn policy_status(
    report: &PolicyReport,
    observed: &Observed,
    plan: &Plan,
    generation: i64,
    old: Option<&SharingPolicyStatus>,
    now: Timestamp,
) -> SharingPolicyStatus {
    let mut total = 0_u32;
    let mut in_use = 0_u32;
    for gpu in report.following.iter().filter_map(|at| gpu_status(observed, at)) {
        for slice in &gpu.slices {
            total = total.saturating_add(slice.total);
            in_use = in_use.saturating_add(slice.in_use);
        }
    }
    let nodes: BTreeSet<&str> = report.following.iter().map(|at| at.node.as_str()).collect();
    let verdicts = [
        (CONDITION_ACCEPTED, accepted_verdict(report)),
        (CONDITION_READY, ready_verdict(report, observed, plan)),
        (CONDITION_CONFLICT, conflict_verdict(report)),
        (CONDITION_ROLLED_OUT, rolled_out_verdict(report)),
    ];
    let condition = |(type_, verdict): (&str, ConditionVerdict)| {
        let before = old.and_then(|old| old.conditions.iter().find(|condition| condition.type_ == type_));
        let status = if verdict.holds { "True" } else { "False" };
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: verdict.reason.to_owned(),
            message: verdict.message,
            observed_generation: Some(generation),
            // As in Kubernetes, the transition time is the time at which `status` changed. A
            // changed message does not change the time.
            last_transition_time: before
                .filter(|before| before.status == status)
                .map_or(Time(now), |before| before.last_transition_time.clone()),
        }
    };
    SharingPolicyStatus {
        observed_generation: generation,
        gpus: saturating_u32(report.following.len()),
        nodes: saturating_u32(nodes.len()),
        total,
        in_use,
        wanted: report.wanted,
        rollout: rollout_status(&report.progress),
        conditions: verdicts.into_iter().map(condition).collect(),
    }
}

/// A condition without its times.
#[derive(Debug)]
struct ConditionVerdict {
    holds: bool,
    reason: &'static str,
    message: String,
}

impl ConditionVerdict {
    fn true_with(reason: &'static str, message: impl Into<String>) -> Self {
        Self { holds: true, reason, message: message.into() }
    }

    fn false_with(reason: &'static str, message: impl Into<String>) -> Self {
        Self { holds: false, reason, message: message.into() }
    }
}

/// Returns whether the policy is valid and applies to the GPUs that it selects.
fn accepted_verdict(report: &PolicyReport) -> ConditionVerdict {
    match &report.invalid {
        Some(PolicyError::Malformed(error)) => {
            return ConditionVerdict::false_with(
                reason::MALFORMED,
                format!("the policy is malformed and is ignored: {}", shorten(error, 400)),
            );
        }
        Some(PolicyError::Refused(error)) => {
            return ConditionVerdict::false_with(
                reason::INVALID,
                format!("{error}; the policy is ignored, and its GPUs keep their partition"),
            );
        }
        None => {}
    }
    // Nodes that have not reported yet may have the missing GPUs.
    if report.unreported.is_empty() && !report.models.is_empty() && has_no_matching_gpu(report) {
        let known = report.models.iter().map(|(model, gpus)| format!("{model} ({gpus})"));
        let known = join_names(known.collect());
        if !report.unknown_models.is_empty() {
            return ConditionVerdict::false_with(
                reason::UNKNOWN_MODEL,
                format!(
                    "no GPU of the selected nodes is {}; the selected nodes have {known}",
                    join_alternatives(&report.unknown_models)
                ),
            );
        }
        if !report.unknown_uuids.is_empty() {
            return ConditionVerdict::false_with(
                reason::UNKNOWN_GPU,
                format!(
                    "no selected node has a GPU with UUID {}; the selected nodes have {known}",
                    join_alternatives(&report.unknown_uuids)
                ),
            );
        }
        return ConditionVerdict::false_with(
            reason::NO_GPU_MATCHES,
            format!("no GPU matches all lists in spec.gpus; the selected nodes have {known}"),
        );
    }
    if report.following.is_empty()
        && let Some((_, cannot)) = report.unsupported.first()
    {
        return ConditionVerdict::false_with(cannot.reason(), unsupported_message(report));
    }
    ConditionVerdict::true_with(reason::ACCEPTED, "")
}

/// Returns whether the policy matches no GPU at all.
fn has_no_matching_gpu(report: &PolicyReport) -> bool {
    report.following.is_empty() && report.unsupported.is_empty() && report.overridden.is_empty()
}

/// Returns whether GPUs that this policy selects follow another policy.
fn conflict_verdict(report: &PolicyReport) -> ConditionVerdict {
    if report.overridden.is_empty() {
        return ConditionVerdict::false_with(reason::NO_CONFLICT, "");
    }
    let taken = report.overridden.iter().map(|(policy, gpus)| format!("{policy} has {}", gpu_list(gpus)));
    ConditionVerdict::true_with(
        reason::OVERRIDDEN,
        format!(
            "more specific or older policies apply to GPUs that this policy also selects: {}",
            join_names(taken.collect())
        ),
    )
}

/// Returns whether the newest partition has reached all nodes.
fn rolled_out_verdict(report: &PolicyReport) -> ConditionVerdict {
    if report.invalid.is_some() {
        return ConditionVerdict::false_with(reason::INVALID, "the policy is invalid; see the condition Accepted");
    }
    let sentence = || shorten(&rollout_sentence(&report.progress), 2000);
    match report.progress.phase {
        Phase::Complete => ConditionVerdict::true_with(reason::ROLLED_OUT, ""),
        Phase::RollingOut => ConditionVerdict::false_with(reason::ROLLING_OUT, sentence()),
        Phase::Paused => ConditionVerdict::false_with(
            reason::ROLLOUT_PAUSED,
            format!("the rollout is paused: {}. Set rollout.paused to false to continue", sentence()),
        ),
        Phase::Stopped => ConditionVerdict::false_with(
            reason::ROLLOUT_STOPPED,
            format!(
                "the rollout stopped, because nodes failed: {}. Repair or cordon the failed nodes, or revert the policy",
                sentence()
            ),
        ),
    }
}

/// Returns how many nodes serve the newest partition, and the names of the other nodes.
fn rollout_sentence(progress: &RolloutProgress) -> String {
    let RolloutProgress { phase: _, updated, changing, waiting, failed, pending, unsteady, cordoned } = progress;
    let mut parts: Vec<String> = Vec::new();
    if !failed.is_empty() {
        let failed = failed.iter().map(|(node, why)| format!("{node} failed ({why})"));
        parts.push(join_names(failed.collect()));
    }
    parts.push(format!("{updated} of {} nodes serve the newest partition", progress.nodes()));
    let unsteady_for = format!("have served for less than {} s", PROOF_TIME.as_secs());
    let lists = [
        (changing, "repartitioning"),
        (waiting, "waiting for pods"),
        (pending, "pending"),
        (unsteady, &unsteady_for),
        (cordoned, "hold back the other nodes until they are uncordoned and serve"),
    ];
    for (nodes, what) in lists {
        if !nodes.is_empty() {
            parts.push(format!("{what}: {}", join_names(nodes.iter().cloned().collect())));
        }
    }
    parts.join("; ")
}

fn rollout_status(progress: &RolloutProgress) -> RolloutStatus {
    let RolloutProgress { phase: _, updated, changing, waiting, failed, pending, unsteady: _, cordoned: _ } = progress;
    RolloutStatus {
        updated: saturating_u32(*updated),
        changing: saturating_u32(changing.len() + waiting.len()),
        failed: saturating_u32(failed.len()),
        pending: saturating_u32(pending.len()),
    }
}

/// Returns whether the GPUs are partitioned as the policy specifies.
fn ready_verdict(report: &PolicyReport, observed: &Observed, plan: &Plan) -> ConditionVerdict {
    match &report.invalid {
        Some(PolicyError::Malformed(_)) => {
            return ConditionVerdict::false_with(reason::MALFORMED, "the policy is malformed");
        }
        Some(PolicyError::Refused(_)) => {
            return ConditionVerdict::false_with(reason::INVALID, "the policy is invalid; see the condition Accepted");
        }
        None => {}
    }
    if report.nodes.is_empty() {
        return ConditionVerdict::false_with(reason::NO_NODE_MATCHES, "no node matches spec.nodeSelector");
    }
    if report.following.is_empty() && report.unsupported.is_empty() {
        return no_gpu_verdict(report);
    }
    let mut problems = gpu_problems(report, observed, plan);
    if !report.unsupported.is_empty() {
        problems.entry(GpuProblem::Unsupported).or_default().push(unsupported_message(report));
    }
    if !report.unknown_uuids.is_empty() && report.unreported.is_empty() {
        let message = format!("no selected node has a GPU with UUID {}", join_alternatives(&report.unknown_uuids));
        problems.entry(GpuProblem::UnknownGpu).or_default().push(message);
    }
    if !report.unreported.is_empty() {
        let nodes = join_names(report.unreported.iter().cloned().collect());
        let message = format!("no agent has reported the GPUs of {nodes}");
        problems.entry(GpuProblem::AgentNotReady).or_default().push(message);
    }
    if !report.progress.pending.is_empty() {
        let problem = match report.progress.phase {
            Phase::Paused => GpuProblem::RolloutPaused,
            Phase::Stopped => GpuProblem::RolloutStopped,
            Phase::Complete | Phase::RollingOut => GpuProblem::RollingOut,
        };
        let nodes = join_names(report.progress.pending.iter().cloned().collect());
        problems.entry(problem).or_default().push(format!("nodes keep an older partition: {nodes}"));
    }
    for (what, why) in &report.excluded {
        problems.entry(GpuProblem::Excluded).or_default().push(format!("{what} is excluded from plans: {why}"));
    }
    let Some(first) = problems.keys().next().copied() else {
        let how =
            if report.demand.is_some() { "partitioned as pods request it" } else { "shared as the policy specifies" };
        return ConditionVerdict::true_with(reason::READY, format!("{} {how}", subject_and_verb(&report.following)));
    };
    let reason = match (first, report.unsupported.first()) {
        (GpuProblem::Unsupported, Some((_, cannot))) => cannot.reason(),
        _ => first.reason(),
    };
    let sentences = problems.into_values().flat_map(join_sentences).collect::<Vec<_>>();
    ConditionVerdict::false_with(reason, shorten(&sentences.join("; "), 2000))
}

/// Returns why a valid policy has no GPU.
fn no_gpu_verdict(report: &PolicyReport) -> ConditionVerdict {
    if !report.unreported.is_empty() {
        let nodes = join_names(report.unreported.iter().cloned().collect());
        return ConditionVerdict::false_with(
            reason::AGENT_NOT_REPORTING,
            format!("no agent has reported the GPUs of {nodes}"),
        );
    }
    if report.without_agent == report.nodes {
        let nodes = join_names(report.nodes.iter().cloned().collect());
        return ConditionVerdict::false_with(
            reason::AGENT_NOT_REPORTING,
            format!("no Cleave agent runs on the selected nodes: {nodes}"),
        );
    }
    if !report.overridden.is_empty() {
        let policies = join_names(report.overridden.keys().cloned().collect());
        return ConditionVerdict::false_with(
            reason::OVERRIDDEN,
            format!("all GPUs that the policy selects follow other policies: {policies}"),
        );
    }
    if report.models.is_empty() {
        let nodes = report.nodes.difference(&report.without_agent).cloned().collect();
        return ConditionVerdict::false_with(
            reason::NO_GPU,
            format!("the driver reports no GPU on the selected nodes: {}", join_names(nodes)),
        );
    }
    ConditionVerdict::false_with(reason::NO_GPU_MATCHES, "no GPU of the selected nodes matches spec.gpus")
}

/// Reasons why a GPU is not ready, ordered by importance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum GpuProblem {
    Failed,
    Refused,
    Unsupported,
    UnknownGpu,
    Unhealthy,
    AgentNotReady,
    Excluded,
    Waiting,
    RolloutStopped,
    RolloutPaused,
    RollingOut,
    Applying,
}

impl GpuProblem {
    fn reason(self) -> &'static str {
        match self {
            Self::Failed => reason::APPLY_FAILED,
            Self::Refused => reason::APPLY_REFUSED,
            Self::Unsupported => reason::GPU_TOO_SMALL,
            Self::UnknownGpu => reason::UNKNOWN_GPU,
            Self::Unhealthy => reason::GPU_UNHEALTHY,
            Self::AgentNotReady => reason::AGENT_NOT_REPORTING,
            Self::Excluded => reason::EXCLUDED,
            Self::Waiting => reason::WAITING_FOR_PODS,
            Self::RolloutStopped => reason::ROLLOUT_STOPPED,
            Self::RolloutPaused => reason::ROLLOUT_PAUSED,
            Self::RollingOut => reason::ROLLING_OUT,
            Self::Applying => reason::APPLYING,
        }
    }
}

/// Returns sentences about the GPUs of a policy that are not ready.
fn gpu_problems(report: &PolicyReport, observed: &Observed, plan: &Plan) -> BTreeMap<GpuProblem, Vec<String>> {
    let mut problems: BTreeMap<GpuProblem, Vec<String>> = BTreeMap::new();
    for at in &report.following {
        let Some(node) = observed.nodes.get(&at.node) else { continue };
        if let Some((problem, sentence)) = gpu_problem(at, node, plan) {
            problems.entry(problem).or_default().push(sentence);
        }
    }
    problems
}

fn gpu_problem(at: &GpuRef, node: &Node, plan: &Plan) -> Option<(GpuProblem, String)> {
    let object = node.object()?;
    let status = object.status.as_ref()?;
    let gpu = status.gpus.iter().find(|gpu| gpu.uuid == at.uuid)?;
    if !node.agent.is_some_and(|agent| agent.ready) {
        return Some((GpuProblem::AgentNotReady, format!("the agent of {} is not ready", at.node)));
    }
    let step = status.steps.iter().find(|step| step.gpu == at.uuid && step.result != STEP_DONE);
    let current = object.metadata.generation.is_none_or(|generation| status.observed_generation >= generation)
        && plan.nodes.get(&at.node).is_none_or(|desired| desired == &object.spec);
    if !current {
        return Some((GpuProblem::Applying, format!("the agent of {} has not received the new spec yet", at.node)));
    }
    if status.plan_id != object.spec.plan_id {
        if let Some(step) = step {
            return Some(step_problem(at, gpu, step));
        }
        let desired = object.spec.gpus.iter().find(|spec| spec.uuid == at.uuid);
        if !desired.is_none_or(|desired| has_slices_of(&desired.partition, gpu)) {
            return Some((GpuProblem::Applying, format!("{} is being repartitioned", gpu_name(at))));
        }
    }
    if !gpu.health.healthy {
        let why = if gpu.health.message.is_empty() { &gpu.health.reason } else { &gpu.health.message };
        return Some((GpuProblem::Unhealthy, format!("{} is unhealthy: {why}", gpu_name(at))));
    }
    // A restarting daemon usually serves again within a few seconds. Otherwise the GPU's health
    // reports the failure.
    let serves =
        |state: &str| matches!(state, daemon_state::ACTIVE | daemon_state::STARTING | daemon_state::RESTARTING | "");
    if let Some(daemon) = gpu.mps.iter().find(|daemon| !serves(&daemon.state)) {
        let why = if daemon.message.is_empty() { String::new() } else { format!(": {}", daemon.message) };
        return Some((
            GpuProblem::Unhealthy,
            format!("the MPS daemon of {} is in state {}{why}", gpu_name(at), daemon.state),
        ));
    }
    None
}

/// Returns whether the kubelet lists the slices of a partition. Compares totals by resource.
fn has_slices_of(partition: &Partition, gpu: &GpuStatus) -> bool {
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

fn step_problem(at: &GpuRef, gpu: &GpuStatus, step: &StepStatus) -> (GpuProblem, String) {
    let why = if step.message.is_empty() { &step.action } else { &step.message };
    match step.result.as_str() {
        STEP_WAITING if step.reason == STEP_IN_USE => {
            let pods: BTreeSet<&str> = gpu.allocations.iter().map(|allocation| allocation.pod.as_str()).collect();
            let why = if step.message.is_empty() {
                format!("in use by {}", join_names(pods.into_iter().map(str::to_owned).collect()))
            } else {
                step.message.clone()
            };
            (GpuProblem::Waiting, format!("{} waits: {why}", gpu_name(at)))
        }
        STEP_WAITING => (GpuProblem::Applying, format!("{} waits: {why}", gpu_name(at))),
        STEP_REFUSED => (GpuProblem::Refused, format!("{}: {why}", gpu_name(at))),
        STEP_FAILED => (GpuProblem::Failed, format!("{}: {why}", gpu_name(at))),
        _ => (GpuProblem::Applying, format!("{} is being repartitioned: {why}", gpu_name(at))),
    }
}

/// Returns the GPUs that do not support their policy, each with the reason.
fn unsupported_message(report: &PolicyReport) -> String {
    let sentences: BTreeSet<String> =
        report.unsupported.iter().map(|(at, cannot)| format!("{}: {cannot}", gpu_name(at))).collect();
    join_items(sentences.into_iter().collect(), "; ")
}

/// Joins the distinct sentences into one sentence. Lists at most [`MAX_LISTED_ITEMS`] sentences.
fn join_sentences(sentences: Vec<String>) -> Vec<String> {
    let distinct: BTreeSet<String> = sentences.into_iter().collect();
    vec![join_items(distinct.into_iter().collect(), "; ")]
}

fn gpu_name(at: &GpuRef) -> String {
    format!("GPU {} of {}", at.index, at.node)
}

/// Formats a list of GPUs: `GPU 0 of node1`, or `4 GPUs of node1, node2`.
fn gpu_list(gpus: &[GpuRef]) -> String {
    match gpus {
        [one] => gpu_name(one),
        many => {
            let nodes: BTreeSet<&str> = many.iter().map(|at| at.node.as_str()).collect();
            format!("{} GPUs of {}", many.len(), join_names(nodes.into_iter().map(str::to_owned).collect()))
        }
    }
}

fn subject_and_verb(gpus: &[GpuRef]) -> String {
    format!("{} {}", gpu_list(gpus), if gpus.len() == 1 { "is" } else { "are" })
}

fn join_names(names: Vec<String>) -> String {
    join_items(names, ", ")
}

fn join_items(mut names: Vec<String>, between: &str) -> String {
    let more = names.len().saturating_sub(MAX_LISTED_ITEMS);
    names.truncate(MAX_LISTED_ITEMS);
    let shown = names.join(between);
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

fn join_alternatives(names: &[String]) -> String {
    join_items(names.to_vec(), " or ")
}

/// Shortens a text to at most `most` bytes.
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

fn saturating_u32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
