//! From what was observed to what is planned with. Pure.
//!
//! | a GPU that … | is planned with as |
//! |---|---|
//! | follows a policy by demand and is as its spec says | its slices; it may be cut |
//! | is becoming what its spec says | what it will be; nothing of its node is cut until then |
//! | waits for pods, which hold what would go | its slices as they are; it may be cut around them |
//! | could not be cut as it was told, or not in time | its slices as they are; it is left alone for a while |
//! | is cordoned, not healthy, or of a node whose agent does not answer | nothing |
//! | follows another policy, or none | its slices; a whole one can be given, and none is cut |
//!
//! Slices of pods that are bound and that the kubelet does not list yet are in use, though nobody
//! knows which: until that is known, what they could be stays as it is.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::gpunode::{GpuNodeSpec, GpuSpec, GpuStatus, Partition};
use cleave_api::names::{RESOURCE_GPU, STEP_FAILED, STEP_REFUSED, STEP_WAITING, is_served};
use cleave_plan::Quantity;
use cleave_plan::device::{MIG_PREFIX, Mode, SHARED_SUFFIX, sized};
use cleave_plan::mig::Profile;
use cleave_plan::snapshot::{Gpu, MigSharing, Node as PlanNode, Slice, Snapshot};

use crate::pods::{Claimant, Sum};
use crate::policies::partition;
use crate::policies::plan::{ByDemand, Plan};
use crate::policies::validate::{InstanceShare, ShareSize};
use crate::read::{Node, Observed};

/// How long a node may take to become what it was told, unless its policy says otherwise
/// (`dynamic.timeout`).
pub const DEADLINE: Duration = Duration::from_secs(30);
/// A deadline below this is no deadline: making a MIG instance alone takes a second.
const LEAST_DEADLINE: Duration = Duration::from_secs(5);
/// How long a GPU is left alone that could not be cut as it was told, at first and at most.
const LEFT_ALONE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(600));

/// How long the watch may lag behind what was written. Afterwards somebody else has put the object
/// back.
const LAG: Duration = Duration::from_secs(10);

/// The agent's word for a GPU whose MPS daemon does not serve.
const MPS_UNAVAILABLE: &str = "MpsUnavailable";

/// A GPU of a node.
pub type At = (String, String);

/// How far a GPU is with what it was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// It is so.
    Reached,
    /// It is being done.
    Changing,
    /// Pods hold what would go.
    Blocked,
    /// It went wrong, or was refused, in the agent's words.
    Failed(String),
}

/// What the operator remembers from one look at the cluster to the next. Times are since the
/// process started.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    /// Since when a GPU has been becoming what it was told.
    changing: BTreeMap<At, (Partition, Duration)>,
    /// Since when a node has not read what was written to it, by generation.
    unheard: BTreeMap<String, (Option<i64>, Duration)>,
    /// GPUs that could not be cut as they were told.
    failures: BTreeMap<At, Failure>,
    /// Where pods were placed last.
    pub placements: BTreeMap<String, String>,
    /// What was written and the watch may not have brought back, with the generation before and
    /// when.
    written: BTreeMap<String, (Option<i64>, GpuNodeSpec, Duration)>,
}

/// A GPU could not be cut as it was told.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// What it was told.
    partition: Partition,
    /// Why not, in the agent's words.
    pub message: String,
    /// How often in a row.
    pub times: u32,
    /// Until when it is left alone.
    until: Duration,
}

/// A snapshot, and what is to be known about its parts.
#[derive(Debug, Clone, Default)]
pub struct Built {
    /// What is planned with.
    pub snapshot: Snapshot,
    /// GPUs that follow demand and may be cut now.
    pub open: BTreeSet<At>,
    /// Nodes of which something is still being changed.
    pub changing: BTreeSet<String>,
    /// Nodes that take no part, and why.
    pub silent: BTreeMap<String, String>,
    /// GPUs that take no part, or are left alone, and why.
    pub stuck: BTreeMap<At, String>,
    /// When the next deadline ends, from now.
    pub next: Option<Duration>,
}

/// How far a GPU is with what its spec says.
pub fn progress(node: &Node, spec: &GpuSpec, gpu: &GpuStatus) -> Progress {
    if partition::is_reached(&spec.partition, gpu) {
        return Progress::Reached;
    }
    if !has_read(node) {
        return Progress::Changing;
    }
    let steps = node.object().and_then(|object| object.status.as_ref()).map_or(&[][..], |status| &status.steps);
    let of_gpu = || steps.iter().filter(|step| step.gpu == gpu.uuid);
    // The agent tries again itself for a while. Pods need not wait for that: they may find room
    // elsewhere.
    if let Some(step) = of_gpu().find(|step| matches!(step.result.as_str(), STEP_FAILED | STEP_REFUSED)) {
        return Progress::Failed(step.message.clone());
    }
    let blocked = of_gpu().any(|step| step.result == STEP_WAITING) && !has_place_for_all_in_use(&spec.partition, gpu);
    if blocked { Progress::Blocked } else { Progress::Changing }
}

/// How long a node may take to become what it was told.
fn deadline(plan: &Plan, node: &str) -> Duration {
    let timeout = plan.demand.get(node).into_iter().flatten().find_map(|(_, by_demand)| by_demand.gathering.timeout);
    timeout.unwrap_or(DEADLINE).max(LEAST_DEADLINE)
}

/// What a GPU says that it waits for.
fn waits_for(node: &Node, gpu: &GpuStatus) -> String {
    let steps = node.object().and_then(|object| object.status.as_ref()).map_or(&[][..], |status| &status.steps);
    let step =
        steps.iter().find(|step| step.gpu == gpu.uuid && step.result == STEP_WAITING && !step.message.is_empty());
    step.map(|step| format!(": {}", step.message)).unwrap_or_default()
}

/// Whether all that is in use has its place in what the GPU shall be: then no pod is in the way.
fn has_place_for_all_in_use(partition: &Partition, gpu: &GpuStatus) -> bool {
    let all = |slices: &[Slice]| {
        let mut counts: BTreeMap<(Option<u32>, String), u32> = BTreeMap::new();
        for slice in slices {
            *counts.entry((slice.placement, slice.resource.clone())).or_default() += slice.count;
        }
        counts
    };
    // Nothing is in use in an empty status, so `desired` is what the spec says alone.
    let idle = GpuStatus { slices: Vec::new(), ..gpu.clone() };
    let wanted = all(&partition::desired(partition, &idle));
    let held: Vec<Slice> = partition::served(gpu).into_iter().filter(|slice| slice.in_use).collect();
    all(&held).iter().all(|(key, count)| wanted.get(key).is_some_and(|wanted| wanted >= count))
}

/// Whether the status is of the spec that is there.
fn has_read(node: &Node) -> bool {
    let Some(object) = node.object() else { return false };
    let observed = object.status.as_ref().map_or(0, |status| status.observed_generation);
    object.metadata.generation.is_none_or(|generation| observed >= generation)
}

impl Memory {
    /// A node was told something. Its object had this generation before.
    pub fn wrote(&mut self, node: &str, generation: Option<i64>, spec: &GpuNodeSpec, now: Duration) {
        self.written.insert(node.to_owned(), (generation, spec.clone(), now));
    }

    /// Puts what was written into what the watches have told, where they lag: a plan made of what
    /// was before would tell a node something else while it does the first.
    pub fn recall(&mut self, observed: &mut Observed, now: Duration) {
        self.written.retain(|name, (before, spec, at)| {
            let Some(shared) = observed.nodes.get_mut(name).and_then(|node| node.gpu_node.as_mut()) else {
                return false;
            };
            let Ok(object) = &shared.0 else { return false };
            let lags = before.is_some() && object.metadata.generation <= *before && now.saturating_sub(*at) < LAG;
            if lags
                && object.spec != *spec
                && let Ok(object) = &mut Arc::make_mut(shared).0
            {
                object.spec = spec.clone();
                // What the status is of is older than this.
                object.metadata.generation = before.map(|before| before.saturating_add(1));
            }
            lags
        });
    }

    /// Looks at the cluster: what each GPU has been doing since when, and what has gone wrong.
    fn look(&mut self, observed: &Observed, plan: &Plan, now: Duration) -> BTreeMap<At, Progress> {
        let mut all = BTreeMap::new();
        for (name, node) in &observed.nodes {
            let Some(object) = node.object() else { continue };
            let generation = object.metadata.generation;
            if has_read(node) {
                self.unheard.remove(name);
            } else if self.unheard.get(name).is_none_or(|(of, _)| *of != generation) {
                // What was not read before it was written anew has been waited for since then.
                let since = self.unheard.get(name).map_or(now, |(_, since)| *since);
                self.unheard.insert(name.clone(), (generation, since));
            }
            for gpu in node.reported().unwrap_or_default() {
                let Some(spec) = object.spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid) else { continue };
                let at = (name.clone(), gpu.uuid.clone());
                let mut progress = progress(node, spec, gpu);
                if progress == Progress::Changing {
                    if self.changing.get(&at).is_none_or(|(partition, _)| *partition != spec.partition) {
                        self.changing.insert(at.clone(), (spec.partition.clone(), now));
                    }
                    let since = self.changing.get(&at).map_or(now, |(_, since)| *since);
                    let deadline = deadline(plan, name);
                    if has_read(node) && now.saturating_sub(since) >= deadline {
                        let why = waits_for(node, gpu);
                        progress = Progress::Failed(format!("it was not done within {} s{why}", deadline.as_secs()));
                    }
                }
                match &progress {
                    Progress::Changing => {}
                    // Since when it has been changing is kept: one that is told nothing else is
                    // late for good, and not anew each time.
                    Progress::Failed(message) => self.fail(&at, &spec.partition, message, now),
                    Progress::Reached | Progress::Blocked => {
                        self.changing.remove(&at);
                        // What failed has been done after all.
                        if self.failures.get(&at).is_some_and(|failure| failure.partition == spec.partition) {
                            self.failures.remove(&at);
                        }
                    }
                }
                all.insert(at, progress);
            }
        }
        let known = |at: &At| all.contains_key(at);
        self.changing.retain(|at, _| known(at));
        // What went wrong long ago counts no more when the next attempt fails.
        self.failures.retain(|at, failure| known(at) && now < failure.until.saturating_add(LEFT_ALONE.1));
        self.unheard.retain(|name, _| observed.nodes.contains_key(name));
        let waiting: BTreeSet<&str> = observed.pods.iter().map(|claimant| claimant.pod.name.as_str()).collect();
        self.placements.retain(|pod, _| waiting.contains(pod.as_str()));
        all
    }

    /// Twice as long for each time that the next attempt fails too.
    fn fail(&mut self, at: &At, partition: &Partition, message: &str, now: Duration) {
        let before = self.failures.get(at);
        if before.is_some_and(|failure| failure.partition == *partition && now < failure.until) {
            return;
        }
        let times = before.map_or(1, |failure| failure.times.saturating_add(1));
        let pause = LEFT_ALONE.0.saturating_mul(1 << (times - 1).min(8)).min(LEFT_ALONE.1);
        let failure = Failure {
            partition: partition.clone(),
            message: message.to_owned(),
            times,
            until: now.saturating_add(pause),
        };
        self.failures.insert(at.clone(), failure);
    }

    /// GPUs that could not be cut as they were told, and why.
    pub fn failures(&self) -> &BTreeMap<At, Failure> {
        &self.failures
    }
}

/// What is planned with now.
pub fn build(observed: &Observed, plan: &Plan, memory: &mut Memory, now: Duration) -> Built {
    let progress = memory.look(observed, plan, now);
    let mut built = Built::default();
    let mut on_node: BTreeMap<&str, Vec<&Claimant>> = BTreeMap::new();
    for claimant in &observed.pods {
        match &claimant.node {
            Some(node) => on_node.entry(node).or_default().push(claimant),
            None => {
                let planned_node = memory.placements.get(&claimant.pod.name).cloned();
                built.snapshot.pods.push(cleave_plan::snapshot::Pod { planned_node, ..claimant.pod.clone() });
            }
        }
    }
    for (name, node) in &observed.nodes {
        let Some(gpus) = node.reported() else {
            if node.agent.is_some() {
                let left_out = Some("its agent has not told what it has".to_owned());
                built.snapshot.nodes.push(PlanNode { name: name.clone(), left_out, ..PlanNode::default() });
            }
            continue;
        };
        let pods = on_node.get(name.as_str()).map_or(&[][..], Vec::as_slice);
        let look = Look { name, node, plan, memory, progress: &progress, now };
        look.add(gpus, pods, &mut built);
    }
    built
}

/// One node as it is looked at.
struct Look<'a> {
    name: &'a str,
    node: &'a Node,
    plan: &'a Plan,
    memory: &'a Memory,
    progress: &'a BTreeMap<At, Progress>,
    now: Duration,
}

impl Look<'_> {
    fn add(&self, gpus: &[GpuStatus], pods: &[&Claimant], built: &mut Built) {
        let demand = self.plan.demand.get(self.name);
        let deadline = deadline(self.plan, self.name);
        let left_out = self.silent(deadline, built);
        if let Some(reason) = &left_out {
            built.silent.insert(self.name.to_owned(), reason.clone());
        }
        let mut changing = left_out.is_none() && self.memory.unheard.contains_key(self.name);
        for gpu in gpus.iter().filter(|_| left_out.is_none()) {
            let at = (self.name.to_owned(), gpu.uuid.clone());
            if let (Some(Progress::Changing), Some((_, since))) =
                (self.progress.get(&at), self.memory.changing.get(&at))
            {
                wake(built, since.saturating_add(deadline), self.now);
                changing = true;
            }
        }
        if changing {
            built.changing.insert(self.name.to_owned());
        }
        let cordons = self.node.cordons();
        let mut all: Vec<Gpu> = Vec::with_capacity(gpus.len());
        for gpu in gpus {
            let by_demand = demand.and_then(|demand| demand.get(&gpu.uuid));
            let at = (self.name.to_owned(), gpu.uuid.clone());
            let mut planned = self.gpu(gpu, by_demand);
            // A daemon that is being started or ended for a change is part of the change.
            let becoming = self.progress.get(&at) == Some(&Progress::Changing) && gpu.health.reason == MPS_UNAVAILABLE;
            if !gpu.health.healthy && !becoming {
                let why = if gpu.health.message.is_empty() { &gpu.health.reason } else { &gpu.health.message };
                planned.left_out = Some(format!("it is not healthy: {why}"));
            }
            if let Some(reason) = cordons.0.get(&gpu.uuid) {
                let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
                planned.left_out = Some(format!("it is cordoned{why}"));
            }
            if by_demand.is_some() {
                let failure = self.memory.failures.get(&at);
                if let Some(reason) = &planned.left_out {
                    built.stuck.insert(at.clone(), reason.clone());
                } else if let Some(failure) = failure.filter(|failure| self.now < failure.until) {
                    wake(built, failure.until, self.now);
                    built.stuck.insert(at.clone(), format!("it could not be cut: {}", failure.message));
                    pin(&mut planned);
                    // It shall be what it is.
                    if !changing && left_out.is_none() {
                        built.open.insert(at);
                    }
                } else if changing || partition::has_unknown_ids(gpu) {
                    pin(&mut planned);
                } else if left_out.is_none() {
                    built.open.insert(at);
                }
            }
            all.push(planned);
        }
        self.count_the_bound(gpus, pods, &mut all, built);
        let mut requested = Sum::default();
        for claimant in pods {
            for (name, quantity) in claimant.pod.requests.iter().filter(|(name, _)| !is_served(name)) {
                requested.add_one(name, quantity);
            }
        }
        requested.add_one("pods", &Quantity::whole(pods.len() as u64));
        built.snapshot.nodes.push(PlanNode {
            name: self.name.to_owned(),
            labels: self.node.labels.clone(),
            taints: self.node.taints.clone(),
            unschedulable: self.node.unschedulable,
            allocatable: self.node.allocatable.clone(),
            requested: requested.into_quantities(),
            gpus: all,
            left_out,
        });
    }

    /// Why a node takes no part.
    fn silent(&self, deadline: Duration, built: &mut Built) -> Option<String> {
        match self.node.agent {
            None => return Some("no agent of Cleave runs on it".to_owned()),
            Some(agent) if !agent.ready => return Some("its agent is not ready".to_owned()),
            Some(_) => {}
        }
        let (_, since) = self.memory.unheard.get(self.name)?;
        if self.now.saturating_sub(*since) < deadline {
            wake(built, since.saturating_add(deadline), self.now);
            return None;
        }
        Some(format!("its agent has not read what was written to it within {} s", deadline.as_secs()))
    }

    fn gpu(&self, gpu: &GpuStatus, by_demand: Option<&ByDemand>) -> Gpu {
        let spec = self.node.object().and_then(|object| object.spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid));
        let profile = |profile: &cleave_api::gpunode::MigProfileStatus| Profile {
            name: profile.name.clone(),
            memory_mib: profile.memory_mib,
            sms: profile.sms,
            size: profile.size,
            starts: profile.starts.clone(),
            count: None,
        };
        let mut planned = Gpu {
            uuid: gpu.uuid.clone(),
            index: gpu.index,
            model: gpu.model.clone(),
            memory: Quantity::mebibytes(gpu.memory_mib),
            profiles: Some(gpu.mig.iter().flat_map(|mig| &mig.profiles).map(profile).collect()),
            ..Gpu::default()
        };
        let Some(ByDemand { demand, .. }) = by_demand else {
            self.fixed(gpu, &mut planned);
            return planned;
        };
        planned.mode = demand.mode;
        planned.units = partition::units(demand, gpu);
        planned.replicas = demand.turns.as_ref().map(|turns| turns.replicas);
        planned.mig_sharing = match &demand.each {
            InstanceShare::Whole => None,
            InstanceShare::Mps(share) => {
                let units = if let ShareSize::Units(units) = share.size { units } else { 1 };
                Some(MigSharing { units, resource_name: share.resource.clone() })
            }
            InstanceShare::TimeSlicing(turns) => {
                Some(MigSharing { units: turns.replicas, resource_name: turns.resource.clone() })
            }
        };
        let changing = self.progress.get(&(self.name.to_owned(), gpu.uuid.clone())) == Some(&Progress::Changing);
        planned.slices = match spec.filter(|_| changing) {
            Some(spec) => partition::desired(&spec.partition, gpu),
            None => partition::observed(gpu, Some(&demand.each)),
        };
        planned
    }

    /// A GPU that no pod changes: what it has, or will have, can be given.
    fn fixed(&self, gpu: &GpuStatus, planned: &mut Gpu) {
        let wanted =
            self.plan.nodes.get(self.name).and_then(|spec| spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid));
        planned.slices = match wanted {
            Some(spec) if self.is_becoming(spec) => partition::desired(&spec.partition, gpu),
            _ => partition::observed(gpu, None),
        };
        let named = planned.slices.iter().map(|slice| slice.resource.as_str());
        let shares: BTreeSet<&str> = named.filter(|name| is_shares(name)).collect();
        // Only what a policy renames must be told: the planner would not know such a name.
        planned.resource_name = shares.first().map(|&name| name.to_owned());
        if let Some(slice) = planned.slices.iter().find(|slice| slice.profile.is_some()) {
            planned.mig_sharing =
                Some(MigSharing { units: slice.count.max(1), resource_name: Some(slice.resource.clone()) });
        }
        pin(planned);
    }

    /// Whether a GPU is told to be this, or is about to be told.
    fn is_becoming(&self, wanted: &GpuSpec) -> bool {
        let told = self.node.object().and_then(|object| object.spec.gpus.iter().find(|spec| spec.uuid == wanted.uuid));
        let at = (self.name.to_owned(), wanted.uuid.clone());
        told.is_none_or(|told| told.partition != wanted.partition)
            || self.progress.get(&at) == Some(&Progress::Changing)
    }

    /// Takes what bound pods hold that the kubelet does not list yet.
    fn count_the_bound(&self, gpus: &[GpuStatus], pods: &[&Claimant], all: &mut [Gpu], built: &mut Built) {
        for claimant in pods {
            for (resource, count) in claimant.of_gpus() {
                let listed = |gpu: &GpuStatus| {
                    let of_pod = gpu
                        .allocations
                        .iter()
                        .filter(|held| held.pod == claimant.pod.name && held.resource == resource);
                    of_pod.map(|held| held.ids.len() as u64).sum::<u64>()
                };
                let missing = count.saturating_sub(gpus.iter().map(listed).sum());
                if missing == 0 {
                    continue;
                }
                let together = is_shares(resource) || resource.ends_with(SHARED_SUFFIX);
                let mut offers = false;
                for gpu in all.iter_mut().filter(|gpu| has(gpu, resource)) {
                    offers = true;
                    pin(gpu);
                    built.open.remove(&(self.name.to_owned(), gpu.uuid.clone()));
                }
                if offers {
                    let each = if together { missing } else { 1 };
                    (0..missing / each).for_each(|_| hold(all, resource, u32::try_from(each).unwrap_or(u32::MAX)));
                }
            }
        }
    }
}

/// The next time to look is not later than this.
fn wake(built: &mut Built, at: Duration, now: Duration) {
    let from_now = at.saturating_sub(now);
    built.next = Some(built.next.map_or(from_now, |next| next.min(from_now)));
}

/// A GPU keeps what it has. One that has nothing, or is used whole, is a whole GPU, and can be
/// given as such.
fn pin(gpu: &mut Gpu) {
    if gpu.slices.iter().all(|slice| slice.resource == RESOURCE_GPU) {
        gpu.mode = Mode::Whole;
    } else {
        gpu.fixed = true;
    }
}

/// Whether a resource is one of shares or replicas of whole GPUs.
fn is_shares(resource: &str) -> bool {
    resource != RESOURCE_GPU && !resource.starts_with(MIG_PREFIX) && sized(resource).is_none()
}

/// Whether a GPU has, or is, a free one.
fn has(gpu: &Gpu, resource: &str) -> bool {
    if resource == RESOURCE_GPU {
        return gpu.slices.is_empty();
    }
    gpu.slices.iter().any(|slice| slice.resource == resource && !slice.in_use)
}

/// Takes so many of one resource, on one device: where they leave least.
fn hold(gpus: &mut [Gpu], resource: &str, count: u32) {
    if resource == RESOURCE_GPU {
        if let Some(gpu) = gpus.iter_mut().filter(|gpu| has(gpu, resource)).min_by_key(|gpu| gpu.index) {
            gpu.slices.push(Slice {
                placement: None,
                resource: resource.to_owned(),
                in_use: true,
                count: 1,
                profile: None,
                pod: None,
            });
        }
        return;
    }
    let mut places: Vec<(u32, usize, usize)> = Vec::new();
    for (at, gpu) in gpus.iter().enumerate() {
        let fits = |slice: &Slice| slice.resource == resource && !slice.in_use && slice.count >= count;
        places.extend(
            gpu.slices.iter().enumerate().filter(|(_, slice)| fits(slice)).map(|(on, slice)| (slice.count, at, on)),
        );
    }
    let Some(&(_, at, on)) = places.iter().min() else { return };
    let Some(gpu) = gpus.get_mut(at) else { return };
    let Some(slice) = gpu.slices.get_mut(on) else { return };
    slice.count -= count;
    let held = Slice { in_use: true, count, ..slice.clone() };
    gpu.slices.push(held);
    gpu.slices.retain(|slice| slice.count > 0);
}
