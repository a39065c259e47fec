//! Replaces a GPU's current MIG instances with the desired ones, one change at a time. Pure.
//!
//! The agent computes the remaining changes each time from NVML's report. An agent that restarts
//! between two changes therefore continues with the next change. When an agent exits, only
//! [`MigProgress`] is lost: the record of the completed changes, and of the number of attempts at
//! each failed change.
use std::fmt;
use std::time::{Duration, Instant};

use cleave_api::gpunode::{MigInstanceSpec, Partition, StepStatus};
use cleave_api::names::{STEP_DONE, STEP_FAILED, STEP_IN_USE, STEP_USERS_UNKNOWN, STEP_WAITING};
use cleave_gpu::nvml::{Gpu, MigInstance, MigProfile, MigState, Process};

/// Maximum number of attempts at a failing change. After the last attempt, the agent retries only
/// when the spec or the GPU changes. Attempts to turn on the MIG mode of a GPU in use are an
/// exception (`MODE_RETRY_DELAY`).
pub const MAX_CHANGE_ATTEMPTS: u32 = 5;
/// Delay after the first failed attempt. Each further failure doubles the delay.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(500);
/// Maximum delay between attempts while programs use the instance or the GPU.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);
/// Delay between attempts to turn MIG mode on, after the GPU was in use at [`MAX_CHANGE_ATTEMPTS`]
/// attempts. Between attempts, the GPU serves its previous layout.
const MODE_RETRY_DELAY: Duration = Duration::from_secs(600);
/// Maximum number of processes that a message names.
const MAX_NAMED_PROCESSES: usize = 8;

/// A single change of a GPU's MIG mode or instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigChange {
    /// Destroys a GPU instance and its compute instances.
    Destroy(MigInstance),
    /// Turns MIG mode on or off.
    Mode(bool),
    /// Creates a GPU instance with one compute instance that spans the GPU instance.
    Create {
        /// Profile name without the `MIG ` prefix.
        profile: String,
        /// First memory slice of the instance's placement.
        start: u32,
    },
}

impl fmt::Display for MigChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Destroy(MigInstance { profile, start, .. }) => write!(f, "destroy MIG instance {profile} at {start}"),
            Self::Mode(true) => f.write_str("turn MIG mode on"),
            Self::Mode(false) => f.write_str("turn MIG mode off"),
            Self::Create { profile, start } => write!(f, "create MIG instance {profile} at {start}"),
        }
    }
}

/// The desired MIG state of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigTarget<'a> {
    /// Keep the current state, because no spec names this GPU.
    Keep,
    /// MIG mode off.
    Off,
    /// MIG mode on, with exactly these instances.
    On(&'a [MigInstanceSpec]),
}

/// Returns the changes that lead to the target, removals first. The changes keep existing instances
/// that match the target, even if another program created the instances.
///
/// # Errors
/// Returns a clause that states why this GPU can never reach the target.
pub fn needed_changes(gpu: &Gpu, target: MigTarget<'_>) -> Result<Vec<MigChange>, String> {
    let Some(mig) = &gpu.mig else {
        return match target {
            MigTarget::On(_) => Err(format!("{} does not support MIG", gpu.model)),
            MigTarget::Keep | MigTarget::Off => Ok(Vec::new()),
        };
    };
    let there: &[MigInstance] = if mig.enabled { &mig.instances } else { &[] };
    match target {
        MigTarget::Keep => Ok(Vec::new()),
        MigTarget::Off => {
            let mut all: Vec<MigChange> = there.iter().cloned().map(MigChange::Destroy).collect();
            all.extend((mig.enabled || mig.pending == Some(true)).then_some(MigChange::Mode(false)));
            Ok(all)
        }
        MigTarget::On(wanted) => {
            check_placements(mig, wanted)?;
            let is = |found: &MigInstance, spec: &MigInstanceSpec| {
                found.profile == spec.profile && found.start == spec.start
            };
            // An instance without a UUID has no compute instance, because its creation was
            // interrupted.
            let stays = |found: &MigInstance| !found.uuid.is_empty() && wanted.iter().any(|spec| is(found, spec));
            let mut all: Vec<MigChange> =
                there.iter().filter(|found| !stays(found)).cloned().map(MigChange::Destroy).collect();
            all.extend((!mig.enabled).then_some(MigChange::Mode(true)));
            let missing = wanted.iter().filter(|spec| !there.iter().any(|found| stays(found) && is(found, spec)));
            all.extend(missing.map(|spec| MigChange::Create { profile: spec.profile.clone(), start: spec.start }));
            Ok(all)
        }
    }
}

/// Checks that NVML lists the wanted profiles with the wanted placements, and that no two
/// placements overlap.
fn check_placements(mig: &MigState, wanted: &[MigInstanceSpec]) -> Result<(), String> {
    // Some drivers list profiles only while MIG mode is on.
    if mig.profiles.is_empty() && !mig.enabled {
        return Ok(());
    }
    let mut placed: Vec<(&MigInstanceSpec, u32)> = Vec::new();
    for spec in wanted {
        let MigInstanceSpec { profile: name, start, .. } = spec;
        let Some(profile) = mig.profiles.iter().find(|profile| profile.name == *name) else {
            return Err(format!("this GPU has no MIG profile {name}"));
        };
        if !profile.starts.contains(start) {
            return Err(format!(
                "a MIG instance {name} cannot start at memory slice {start}: NVML allows only {:?}",
                profile.starts
            ));
        }
        let overlapping =
            |(other, size): &&(&MigInstanceSpec, u32)| placements_overlap((*start, profile.size), (other.start, *size));
        if let Some((other, _)) = placed.iter().find(overlapping) {
            return Err(format!("MIG instances {} at {} and {name} at {start} overlap", other.profile, other.start));
        }
        placed.push((spec, profile.size));
    }
    Ok(())
}

/// Returns whether two placements overlap. A placement is a first memory slice and a number of
/// memory slices.
fn placements_overlap(one: (u32, u32), other: (u32, u32)) -> bool {
    one.0 < other.0.saturating_add(other.1) && other.0 < one.0.saturating_add(one.1)
}

/// The next step of a GPU towards its target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextStep {
    /// No change remains, or the remaining changes cannot start yet.
    Nothing,
    /// Start this change, because no known condition prevents the change.
    Do(MigChange),
    /// The next change, and why it waits.
    Wait(MigChange, WaitCause),
}

/// Why a change of MIG mode or of a MIG instance waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitCause {
    /// The users of the slices are not known.
    Users(SliceUsers),
    /// An MPS daemon has not exited, for this reason.
    Daemon(String),
}

impl WaitCause {
    /// Returns the reason and the message of the waiting step.
    fn reason_and_message(&self) -> (&'static str, String) {
        match self {
            Self::Users(SliceUsers::KubeletSettling) => (
                STEP_USERS_UNKNOWN,
                "the kubelet started recently and may not have listed all pods that use slices".to_owned(),
            ),
            Self::Users(_) => ("", "the kubelet has not reported which slices are in use".to_owned()),
            Self::Daemon(why) => ("", why.clone()),
        }
    }
}

/// Whether the agent knows which pods use slices. While some users are unknown, the agent must not
/// remove instances or change MIG mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceUsers {
    /// All users are known.
    Known,
    /// The kubelet started recently, so its list may be incomplete.
    KubeletSettling,
    /// The kubelet has not answered the last request.
    Unknown,
}

/// Returns the first change that can start now, or else the first change that waits for a daemon or
/// for the kubelet's list of pods.
///
/// `served` returns whether the kubelet can allocate slices of a device. `daemon_exited` returns an
/// error with the reason while the device's MPS daemon has not exited.
pub fn next_step<'a>(
    changes: impl IntoIterator<Item = &'a MigChange>,
    gpu: &Gpu,
    users: SliceUsers,
    served: impl Fn(&str) -> bool,
    daemon_exited: impl Fn(&str) -> Result<(), String>,
) -> NextStep {
    let enabled = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
    let there: &[MigInstance] = gpu.mig.as_ref().map_or(&[], |mig| &mig.instances);
    let mut waits = NextStep::Nothing;
    for change in changes {
        let blocked = match change {
            MigChange::Destroy(instance) if served(&instance.uuid) => continue,
            MigChange::Mode(true) if served(&gpu.uuid) => continue,
            MigChange::Destroy(_) | MigChange::Mode(_) if users != SliceUsers::Known => Err(WaitCause::Users(users)),
            MigChange::Destroy(instance) => daemon_exited(&instance.uuid).map_err(WaitCause::Daemon),
            MigChange::Mode(true) => daemon_exited(&gpu.uuid).map_err(WaitCause::Daemon),
            MigChange::Mode(false) if enabled && !there.is_empty() => continue,
            MigChange::Mode(false) => Ok(()),
            MigChange::Create { profile, start } => {
                let size = profile_slices(gpu, profile);
                let taken = there.iter().any(|found| {
                    placements_overlap((*start, size), (found.start, self::profile_slices(gpu, &found.profile)))
                });
                if !enabled || taken {
                    continue;
                }
                Ok(())
            }
        };
        match blocked {
            Ok(()) => return NextStep::Do(change.clone()),
            Err(why) if waits == NextStep::Nothing => waits = NextStep::Wait(change.clone(), why),
            Err(_) => {}
        }
    }
    waits
}

/// Returns the number of memory slices of an instance with this profile. A profile that NVML does
/// not list counts as the whole GPU, so the agent creates no instance beside it.
fn profile_slices(gpu: &Gpu, profile: &str) -> u32 {
    let profiles: &[MigProfile] = gpu.mig.as_ref().map_or(&[], |mig| &mig.profiles);
    profiles.iter().find(|known| known.name == profile).map_or(u32::MAX, |known| known.size)
}

/// Returns text like `in use by processes outside of Kubernetes (PID 12, 13)`.
pub fn in_use_message(processes: &[&Process]) -> String {
    let pids: Vec<String> = processes.iter().take(MAX_NAMED_PROCESSES).map(|process| process.pid.to_string()).collect();
    let more = if processes.len() > MAX_NAMED_PROCESSES {
        format!(" and {} more", processes.len() - MAX_NAMED_PROCESSES)
    } else {
        String::new()
    };
    format!("in use by processes outside of Kubernetes (PID {}{more})", pids.join(", "))
}

/// Result of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChangeOutcome {
    /// The change succeeded.
    Done,
    /// The instance or the GPU is in use, for this reason. The agent changed nothing.
    Busy(String),
    /// MIG mode changes with the next reset of the GPU. An administrator must reset the GPU.
    AfterReset,
    /// The driver has not answered for this duration, but may still answer.
    Slow(Duration),
    /// NVML returned this error. Partial changes were undone.
    Failed(String),
}

/// Progress of one GPU's changes towards one target.
#[derive(Debug)]
pub struct MigProgress {
    /// The partition from the spec that the changes lead to.
    wanted: Option<Partition>,
    /// State of the GPU after the last change, if known. If the current state differs, another
    /// program has changed the GPU.
    last_state: Option<MigChangeState>,
    in_progress: Option<MigChange>,
    done: Vec<StepStatus>,
    /// Number of entries at the end of `done` that no Event has reported yet.
    unreported: usize,
    attempts: Vec<FailedChange>,
    waits: Option<StepStatus>,
}

/// A change that did not succeed.
#[derive(Debug)]
struct FailedChange {
    change: MigChange,
    failures: u32,
    busy_checks: u32,
    /// The time of the next attempt. `None` if the agent does not retry the change.
    not_before: Option<Instant>,
    step: StepStatus,
}

/// The part of a GPU's state that the result of a MIG change depends on. The agent retries a failed
/// change if this state has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MigChangeState {
    is_healthy: bool,
    is_enabled: Option<bool>,
    pending: Option<bool>,
    instances: Vec<MigInstance>,
}

impl MigChangeState {
    fn new(gpu: &Gpu, is_healthy: bool) -> Self {
        let mig = gpu.mig.as_ref();
        Self {
            is_healthy,
            is_enabled: mig.map(|mig| mig.enabled),
            pending: mig.and_then(|mig| mig.pending),
            instances: mig.map(|mig| mig.instances.clone()).unwrap_or_default(),
        }
    }
}

impl MigProgress {
    /// Creates the progress towards a target, without any changes.
    pub fn new(wanted: Option<&Partition>) -> Self {
        Self {
            wanted: wanted.cloned(),
            last_state: None,
            in_progress: None,
            done: Vec::new(),
            unreported: 0,
            attempts: Vec::new(),
            waits: None,
        }
    }

    /// Updates the target and the state of the GPU. If the target or the state has changed, the
    /// agent may retry failed changes.
    pub fn update(&mut self, wanted: Option<&Partition>, gpu: &Gpu, healthy: bool) {
        if self.wanted.as_ref() != wanted {
            *self = Self { in_progress: self.in_progress.take(), ..Self::new(wanted) };
        }
        if self.in_progress.is_some() {
            return;
        }
        let now = MigChangeState::new(gpu, healthy);
        if self.last_state.as_ref().is_some_and(|before| *before != now) {
            self.attempts.clear();
        }
        self.last_state = Some(now);
    }

    /// Returns whether a change can start now: no change is in progress, and the retry delay of
    /// this change has passed.
    pub fn can_start(&self, change: &MigChange, now: Instant) -> bool {
        let attempt = self.attempts.iter().find(|attempt| attempt.change == *change);
        self.in_progress.is_none() && attempt.is_none_or(|attempt| attempt.not_before.is_some_and(|then| then <= now))
    }

    /// Returns the time until the next retry, if one is scheduled.
    pub fn next_retry(&self, now: Instant) -> Option<Duration> {
        if self.in_progress.is_some() {
            return None;
        }
        self.attempts.iter().filter_map(|attempt| Some(attempt.not_before?.saturating_duration_since(now))).min()
    }

    /// Records the remaining changes and the next step. If the next step is to start a change, that
    /// change is then in progress.
    pub fn record_plan(&mut self, gpu: &str, left: &[MigChange], next: &NextStep) {
        self.attempts.retain(|attempt| self.in_progress.is_some() || left.contains(&attempt.change));
        self.waits = match next {
            NextStep::Wait(change, cause) => {
                let (reason, message) = cause.reason_and_message();
                let step = step_status(gpu, change, STEP_WAITING, message);
                Some(StepStatus { reason: reason.to_owned(), ..step })
            }
            NextStep::Nothing | NextStep::Do(_) => None,
        };
        if let NextStep::Do(change) = next {
            self.in_progress = Some(change.clone());
        }
    }

    /// Returns whether the change in progress removes or replaces a device. The agent must not
    /// allocate such a device, even if the spec includes the device again.
    pub fn is_removing(&self, gpu: &str, device: &str) -> bool {
        match &self.in_progress {
            Some(MigChange::Destroy(instance)) => instance.uuid == device,
            Some(MigChange::Mode(true)) => gpu == device,
            Some(MigChange::Mode(false) | MigChange::Create { .. }) | None => false,
        }
    }

    /// Returns whether the attempts to turn MIG mode on have failed and no retry is due. The GPU
    /// can then serve its previous layout.
    pub fn has_failed_to_enable(&self, now: Instant) -> bool {
        let waits = |attempt: &FailedChange| attempt.not_before.is_none_or(|then| then > now);
        self.in_progress.is_none()
            && self.attempts.iter().any(|attempt| {
                let is_final = attempt.failures >= MAX_CHANGE_ATTEMPTS || attempt.busy_checks >= MAX_CHANGE_ATTEMPTS;
                attempt.change == MigChange::Mode(true) && is_final && waits(attempt)
            })
    }

    /// Returns whether a change is in progress.
    pub fn is_in_progress(&self) -> bool {
        self.in_progress.is_some()
    }

    /// Records the result of a change and the state of the GPU after the change. Returns the note
    /// of a warning Event if the result requires an Event.
    pub fn record_outcome(
        &mut self,
        gpu: &str,
        change: &MigChange,
        outcome: &ChangeOutcome,
        after: Option<(&Gpu, bool)>,
        now: Instant,
    ) -> Option<String> {
        self.in_progress = matches!(outcome, ChangeOutcome::Slow(_)).then(|| change.clone());
        self.last_state = after.map(|(gpu, healthy)| MigChangeState::new(gpu, healthy));
        let at = self.attempts.iter().position(|attempt| attempt.change == *change);
        let (mut failures, mut busy_checks) =
            at.map(|at| self.attempts.remove(at)).map_or((0, 0), |attempt| (attempt.failures, attempt.busy_checks));
        let (result, why, pause, is_news) = match outcome {
            ChangeOutcome::Done => {
                // Earlier changes may have failed because the memory slices that are free now were
                // in use. An instance without a UUID is a remainder of a failed change, so its
                // removal is no reason to retry.
                if matches!(change, MigChange::Destroy(instance) if !instance.uuid.is_empty()) {
                    self.attempts.clear();
                }
                self.done.push(step_status(gpu, change, STEP_DONE, String::new()));
                self.unreported += 1;
                return None;
            }
            ChangeOutcome::Busy(why) => {
                // Limit the attempts to turn MIG mode on, because the agent stops serving the GPU's
                // slices before each attempt.
                let is_last = busy_checks + 1 >= MAX_CHANGE_ATTEMPTS && *change == MigChange::Mode(true);
                let pause = Duration::from_secs(1).saturating_mul(1 << busy_checks.min(8)).min(MAX_RETRY_DELAY);
                let pause = if is_last { MODE_RETRY_DELAY } else { pause };
                busy_checks += 1;
                (STEP_WAITING, why.clone(), Some(pause), busy_checks == 1)
            }
            ChangeOutcome::AfterReset => (
                STEP_WAITING,
                "MIG mode changes with the next reset of this GPU, and the driver cannot reset a GPU in use: stop all programs on the GPU and reset the GPU (nvidia-smi --gpu-reset), or reboot the node".to_owned(),
                None,
                true,
            ),
            ChangeOutcome::Slow(since) => {
                let seconds = since.as_secs();
                let message = format!(
                    "the driver has not answered for {seconds} s. The agent waits for the answer, and changes nothing else on this GPU. If the driver does not recover, reboot the node"
                );
                (STEP_FAILED, message, None, true)
            }
            ChangeOutcome::Failed(why) => {
                failures += 1;
                let last = failures >= MAX_CHANGE_ATTEMPTS;
                let pause = FIRST_RETRY_DELAY.saturating_mul(1 << (failures - 1).min(16));
                let then = match failures {
                    _ if last => format!("failed {failures} times; the agent does not retry until the spec or the GPU changes"),
                    1 => "the agent retries".to_owned(),
                    _ => format!("failed {failures} times; the agent retries"),
                };
                (STEP_FAILED, format!("{why}; {then}"), (!last).then_some(pause), failures == 1 || last)
            }
        };
        let not_before = pause.and_then(|pause| now.checked_add(pause));
        let warning = is_news.then(|| format!("GPU {gpu}: cannot {change}: {why}"));
        let reason = if matches!(outcome, ChangeOutcome::Busy(_)) { STEP_IN_USE } else { "" };
        self.attempts.push(FailedChange {
            change: change.clone(),
            failures,
            busy_checks,
            not_before,
            step: StepStatus { reason: reason.into(), ..step_status(gpu, change, result, why) },
        });
        warning
    }

    /// Returns the completed changes that no Event has reported, as text, and marks them as
    /// reported. Returns `None` while changes remain, or if Events have reported every change.
    pub fn take_completed(&mut self, left: &[MigChange]) -> Option<String> {
        if !left.is_empty() || self.unreported == 0 {
            return None;
        }
        let unreported = std::mem::take(&mut self.unreported);
        let actions = self.done.iter().rev().take(unreported).rev().map(|step| step.action.as_str());
        Some(actions.collect::<Vec<_>>().join(", "))
    }

    /// Returns the steps for the status: completed changes, failed changes, and the change that
    /// waits.
    pub fn steps(&self) -> impl Iterator<Item = &StepStatus> {
        self.done.iter().chain(self.attempts.iter().map(|attempt| &attempt.step)).chain(&self.waits)
    }
}

/// Returns the status of a step that performs a change.
fn step_status(gpu: &str, change: &MigChange, result: &str, message: String) -> StepStatus {
    let (gpu, action, result) = (gpu.to_owned(), change.to_string(), result.to_owned());
    StepStatus { gpu, action, result, message, ..StepStatus::default() }
}

/// An order to perform a change now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigOrder {
    /// UUID of the GPU.
    pub gpu: String,
    /// Change of MIG mode or MIG instances.
    pub change: MigChange,
}

/// Result of a MIG order, or a report that the driver has not answered yet.
#[derive(Debug)]
pub struct MigOrderResult {
    /// The order that this result belongs to.
    pub order: MigOrder,
    /// Result of the order.
    pub outcome: ChangeOutcome,
    /// The GPU and its processes after the change, if NVML reported them.
    pub after: Option<(Gpu, Vec<Process>)>,
    /// Time at which the result was complete, after NVML's report in `after`.
    pub at: Instant,
}
