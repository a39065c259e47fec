//! MIG: from the instances that a GPU has to those that it shall have, one change at a time. Pure.
//!
//! What is to be done follows each time anew from what NVML says is there, so that an agent that
//! was killed between two changes goes on with the next. Only what a [`Trial`] remembers is lost
//! with it: how often a change has failed.
use std::fmt;
use std::time::{Duration, Instant};

use cleave_api::gpunode::{MigInstanceSpec, Partition, StepStatus};
use cleave_api::names::{STEP_DONE, STEP_FAILED, STEP_IN_USE, STEP_WAITING};
use cleave_gpu::nvml::{Gpu, Mig, MigInstance, MigProfile, Process};

/// How often a change is tried that fails, until the spec or the GPU is another.
pub const ATTEMPTS: u32 = 5;
/// The pause after the first failure; each one doubles it.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest pause between looks at something that is in use.
const LONGEST: Duration = Duration::from_secs(30);
/// Most processes that a sentence names.
const NAMED: usize = 8;

/// One change of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Destroys a GPU instance, and what is in it.
    Destroy(MigInstance),
    /// Turns MIG mode on or off.
    Mode(bool),
    /// Makes a GPU instance, with one compute instance over all of it.
    Create {
        /// Profile name without prefix.
        profile: String,
        /// First memory slice.
        start: u32,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Destroy(MigInstance { profile, start, .. }) => write!(f, "destroy MIG instance {profile} at {start}"),
            Self::Mode(true) => f.write_str("turn MIG mode on"),
            Self::Mode(false) => f.write_str("turn MIG mode off"),
            Self::Create { profile, start } => write!(f, "create MIG instance {profile} at {start}"),
        }
    }
}

/// What MIG of a GPU shall be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target<'a> {
    /// As it is: nobody says anything else.
    TerminationWatch,
    /// Off.
    Off,
    /// On, with just these instances.
    On(&'a [MigInstanceSpec]),
}

/// What has to change, removals first. A GPU that is as it shall be has nothing to change, whoever
/// made its instances.
///
/// # Errors
/// A sentence, where the target can never be.
pub fn changes(gpu: &Gpu, target: Target<'_>) -> Result<Vec<Change>, String> {
    let Some(mig) = &gpu.mig else {
        return match target {
            Target::On(_) => Err(format!("{} has no MIG", gpu.model)),
            Target::TerminationWatch | Target::Off => Ok(Vec::new()),
        };
    };
    let there: &[MigInstance] = if mig.enabled { &mig.instances } else { &[] };
    match target {
        Target::TerminationWatch => Ok(Vec::new()),
        Target::Off => {
            let mut all: Vec<Change> = there.iter().cloned().map(Change::Destroy).collect();
            all.extend((mig.enabled || mig.pending == Some(true)).then_some(Change::Mode(false)));
            Ok(all)
        }
        Target::On(wanted) => {
            possible(mig, wanted)?;
            let is = |found: &MigInstance, spec: &MigInstanceSpec| {
                found.profile == spec.profile && found.start == spec.start
            };
            // One without a compute instance is what a creation left that was cut off.
            let stays = |found: &MigInstance| !found.uuid.is_empty() && wanted.iter().any(|spec| is(found, spec));
            let mut all: Vec<Change> =
                there.iter().filter(|found| !stays(found)).cloned().map(Change::Destroy).collect();
            all.extend((!mig.enabled).then_some(Change::Mode(true)));
            let missing = wanted.iter().filter(|spec| !there.iter().any(|found| stays(found) && is(found, spec)));
            all.extend(missing.map(|spec| Change::Create { profile: spec.profile.clone(), start: spec.start }));
            Ok(all)
        }
    }
}

/// Whether NVML has these profiles at these places, and no two in one.
fn possible(mig: &Mig, wanted: &[MigInstanceSpec]) -> Result<(), String> {
    // A driver may say profiles only with MIG mode on.
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
            return Err(format!("a MIG instance {name} cannot be at {start}: NVML has {:?}", profile.starts));
        }
        let meets = |(other, size): &&(&MigInstanceSpec, u32)| overlap((*start, profile.size), (other.start, *size));
        if let Some((other, _)) = placed.iter().find(meets) {
            return Err(format!("MIG instances {} at {} and {name} at {start} overlap", other.profile, other.start));
        }
        placed.push((spec, profile.size));
    }
    Ok(())
}

/// Whether two places, each first slice and size, share a slice.
fn overlap(one: (u32, u32), other: (u32, u32)) -> bool {
    one.0 < other.0.saturating_add(other.1) && other.0 < one.0.saturating_add(one.1)
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Nothing, or nothing yet: slices are being withdrawn.
    Nothing,
    /// This, which nothing hinders as far as is known.
    Do(Change),
    /// Something has to end first.
    Wait(Change, String),
}

/// The first of the changes that can be made now.
///
/// `known`: who holds what is known, so that something may be taken away. `served`: whether slices
/// of a device are told to the kubelet. `gone`: whether its MPS daemon is no more, else why.
pub fn next<'a>(
    changes: impl IntoIterator<Item = &'a Change>,
    gpu: &Gpu,
    known: bool,
    served: impl Fn(&str) -> bool,
    gone: impl Fn(&str) -> Result<(), String>,
) -> Next {
    let enabled = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
    let there: &[MigInstance] = gpu.mig.as_ref().map_or(&[], |mig| &mig.instances);
    let mut waits = Next::Nothing;
    for change in changes {
        let hindered = match change {
            Change::Destroy(_) | Change::Mode(_) if !known => continue,
            Change::Destroy(instance) if served(&instance.uuid) => continue,
            Change::Destroy(instance) => gone(&instance.uuid),
            Change::Mode(true) if served(&gpu.uuid) => continue,
            Change::Mode(true) => gone(&gpu.uuid),
            Change::Mode(false) if enabled && !there.is_empty() => continue,
            Change::Mode(false) => Ok(()),
            Change::Create { profile, start } => {
                let size = size(gpu, profile);
                let taken =
                    there.iter().any(|found| overlap((*start, size), (found.start, self::size(gpu, &found.profile))));
                if !enabled || taken {
                    continue;
                }
                Ok(())
            }
        };
        match hindered {
            Ok(()) => return Next::Do(change.clone()),
            Err(why) if waits == Next::Nothing => waits = Next::Wait(change.clone(), why),
            Err(_) => {}
        }
    }
    waits
}

/// Memory slices of a profile's instances; one that NVML does not list takes the whole GPU, so that
/// nothing is made beside it.
fn size(gpu: &Gpu, profile: &str) -> u32 {
    let profiles: &[MigProfile] = gpu.mig.as_ref().map_or(&[], |mig| &mig.profiles);
    profiles.iter().find(|known| known.name == profile).map_or(u32::MAX, |known| known.size)
}

/// `in use by the processes 12, 13, which no pod is known for`.
pub fn in_use_by(processes: &[&Process]) -> String {
    let pids: Vec<String> = processes.iter().take(NAMED).map(|process| process.pid.to_string()).collect();
    let more = if processes.len() > NAMED { format!(" and {} more", processes.len() - NAMED) } else { String::new() };
    format!("in use by processes outside of Kubernetes (pid {}{more})", pids.join(", "))
}

/// How a change ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// As wanted.
    Done,
    /// Something uses what would go: nothing was done.
    Busy(String),
    /// MIG mode changes with the next reset of the GPU, which a person must do.
    AfterReset,
    /// The driver has not answered for so long; it may yet.
    Slow(Duration),
    /// It went wrong, in NVML's words; what was half done is undone.
    Failed(String),
}

/// What came of the changes of one GPU so far, for one target.
#[derive(Debug)]
pub struct Trial {
    /// The spec's part that it is about.
    wanted: Option<Partition>,
    /// The GPU as the last change left it, where that is known: whatever is otherwise was done by
    /// somebody else.
    seen: Option<Seen>,
    /// The change that is being made.
    acting: Option<Change>,
    done: Vec<StepStatus>,
    /// How many of these no event has told yet.
    untold: usize,
    tries: Vec<Try>,
    waits: Option<StepStatus>,
}

/// A change that did not succeed.
#[derive(Debug)]
struct Try {
    change: Change,
    failures: u32,
    looks: u32,
    /// When it may be tried again, if at all.
    not_before: Option<Instant>,
    step: StepStatus,
}

/// What tells a GPU from what it was: health, MIG mode now and pending, instances.
type Seen = (bool, Option<(bool, Option<bool>, Vec<MigInstance>)>);

fn seen(gpu: &Gpu, healthy: bool) -> Seen {
    (healthy, gpu.mig.as_ref().map(|mig| (mig.enabled, mig.pending, mig.instances.clone())))
}

impl Trial {
    /// Of a target that nothing was done for yet.
    pub fn new(wanted: Option<&Partition>) -> Self {
        Self {
            wanted: wanted.cloned(),
            seen: None,
            acting: None,
            done: Vec::new(),
            untold: 0,
            tries: Vec::new(),
            waits: None,
        }
    }

    /// Takes in the target and the GPU as they are now: where one is another, what failed may be
    /// tried again.
    pub fn review(&mut self, wanted: Option<&Partition>, gpu: &Gpu, healthy: bool) {
        if self.wanted.as_ref() != wanted {
            *self = Self { acting: self.acting.take(), ..Self::new(wanted) };
        }
        if self.acting.is_some() {
            return;
        }
        let now = seen(gpu, healthy);
        if self.seen.as_ref().is_some_and(|before| *before != now) {
            self.tries.clear();
        }
        self.seen = Some(now);
    }

    /// Whether a change may be tried now: none while another is being made, and not one that has
    /// just failed.
    pub fn may(&self, change: &Change, now: Instant) -> bool {
        let tried = self.tries.iter().find(|tried| tried.change == *change);
        self.acting.is_none() && tried.is_none_or(|tried| tried.not_before.is_some_and(|then| then <= now))
    }

    /// How long until something may be tried again.
    pub fn pause(&self, now: Instant) -> Option<Duration> {
        if self.acting.is_some() {
            return None;
        }
        self.tries.iter().filter_map(|tried| Some(tried.not_before?.saturating_duration_since(now))).min()
    }

    /// Takes in what is left to do, and what that waits for.
    pub fn plans(&mut self, gpu: &str, left: &[Change], next: &Next) {
        self.tries.retain(|tried| self.acting.is_some() || left.contains(&tried.change));
        self.waits = match next {
            Next::Wait(change, why) => Some(step(gpu, change, STEP_WAITING, why.clone())),
            Next::Nothing | Next::Do(_) => None,
        };
        if let Next::Do(change) = next {
            self.acting = Some(change.clone());
        }
    }

    /// Whether a device is about to go, or to be another: it must not be given out, whatever is
    /// wanted by now.
    pub fn takes(&self, gpu: &str, device: &str) -> bool {
        match &self.acting {
            Some(Change::Destroy(instance)) => instance.uuid == device,
            Some(Change::Mode(true)) => gpu == device,
            Some(Change::Mode(false) | Change::Create { .. }) | None => false,
        }
    }

    /// Whether a change is being made.
    pub fn is_acting(&self) -> bool {
        self.acting.is_some()
    }

    /// Takes in how a change ended, and the GPU after it; gives the warning that this is worth, if
    /// any.
    pub fn ended(
        &mut self,
        gpu: &str,
        change: &Change,
        outcome: &Outcome,
        after: Option<(&Gpu, bool)>,
        now: Instant,
    ) -> Option<String> {
        self.acting = matches!(outcome, Outcome::Slow(_)).then(|| change.clone());
        self.seen = after.map(|(gpu, healthy)| seen(gpu, healthy));
        let at = self.tries.iter().position(|tried| tried.change == *change);
        let (mut failures, mut looks) =
            at.map(|at| self.tries.remove(at)).map_or((0, 0), |tried| (tried.failures, tried.looks));
        let (result, why, pause, told) = match outcome {
            Outcome::Done => {
                // What it takes up no more may be what others lacked; not so what a failure left.
                if matches!(change, Change::Destroy(instance) if !instance.uuid.is_empty()) {
                    self.tries.clear();
                }
                self.done.push(step(gpu, change, STEP_DONE, String::new()));
                self.untold += 1;
                return None;
            }
            Outcome::Busy(why) => {
                let pause = Duration::from_secs(1).saturating_mul(1 << looks.min(8)).min(LONGEST);
                looks += 1;
                (STEP_WAITING, why.clone(), Some(pause), looks == 1)
            }
            Outcome::AfterReset => (
                STEP_WAITING,
                "MIG mode changes with the next reset of this GPU, which the driver cannot do while it runs: end what uses the GPU and reset it (nvidia-smi --gpu-reset), or restart the node".to_owned(),
                None,
                true,
            ),
            Outcome::Slow(since) => {
                (STEP_FAILED, format!("the driver has not answered for {} s", since.as_secs()), None, true)
            }
            Outcome::Failed(why) => {
                failures += 1;
                let last = failures >= ATTEMPTS;
                let pause = PAUSE.saturating_mul(1 << (failures - 1).min(16));
                let then = match failures {
                    _ if last => format!("tried {failures} times, and not again until the spec or the GPU changes"),
                    1 => "trying again".to_owned(),
                    _ => format!("tried {failures} times, trying again"),
                };
                (STEP_FAILED, format!("{why}; {then}"), (!last).then_some(pause), failures == 1 || last)
            }
        };
        let not_before = pause.and_then(|pause| now.checked_add(pause));
        let warning = told.then(|| format!("GPU {gpu}: {change}: {why}"));
        let reason = if matches!(outcome, Outcome::Busy(_)) { STEP_IN_USE } else { "" };
        self.tries.push(Try {
            change: change.clone(),
            failures,
            looks,
            not_before,
            step: StepStatus { reason: reason.into(), ..step(gpu, change, result, why) },
        });
        warning
    }

    /// What was done since this was last asked, once nothing is left to do.
    pub fn told(&mut self, left: &[Change]) -> Option<String> {
        if !left.is_empty() || self.untold == 0 {
            return None;
        }
        let untold = std::mem::take(&mut self.untold);
        let actions = self.done.iter().rev().take(untold).rev().map(|step| step.action.as_str());
        Some(actions.collect::<Vec<_>>().join(", "))
    }

    /// What was done, and what is in the way.
    pub fn steps(&self) -> impl Iterator<Item = &StepStatus> {
        self.done.iter().chain(self.tries.iter().map(|tried| &tried.step)).chain(&self.waits)
    }
}

fn step(gpu: &str, change: &Change, result: &str, message: String) -> StepStatus {
    let (gpu, action, result) = (gpu.to_owned(), change.to_string(), result.to_owned());
    StepStatus { gpu, action, result, message, ..StepStatus::default() }
}

/// A change that is to be made now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The GPU.
    pub gpu: String,
    /// What.
    pub change: Change,
}

/// How an order ended, or that it has not yet.
#[derive(Debug)]
pub struct Ended {
    /// What was to be done.
    pub order: Order,
    /// How it ended.
    pub outcome: Outcome,
    /// The GPU afterwards, and the processes on it, where NVML says so.
    pub after: Option<(Gpu, Vec<Process>)>,
    /// When NVML had said that.
    pub at: Instant,
}
