//! Converts the state of the cluster to the planner's input, and tracks the progress of GPU
//! changes. Pure.
//!
//! | a GPU that … | is planned with |
//! |---|---|
//! | is partitioned on demand and up to date | its slices. It may be repartitioned. |
//! | is being repartitioned | its desired slices. Other GPUs of its node are not repartitioned. |
//! | waits for pods that use slices to remove | its slices. It may be repartitioned around them. |
//! | did not reach its partition in time | its slices. It remains unchanged during a backoff. |
//! | is cordoned, quiesced or unhealthy, or whose agent is not ready | nothing. |
//! | is not partitioned on demand | its slices. It is never repartitioned. |
//!
//! If the kubelet does not list the devices of a bound pod yet, the slices in use are unknown.
//! Until the kubelet lists these devices, every GPU to which they may belong keeps its slices.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::gpunode::{GpuNodeSpec, GpuSpec, GpuStatus, Partition, StepStatus};
use cleave_api::names::{
    HEALTH_MPS_UNAVAILABLE, RESOURCE_GPU, STEP_FAILED, STEP_REFUSED, STEP_USERS_UNKNOWN, STEP_WAITING, is_served,
};
use cleave_plan::Quantity;
use cleave_plan::device::{MIG_PREFIX, Mode, SHARED_SUFFIX, sized_slice_gib};
use cleave_plan::mig::Profile;
use cleave_plan::scheduling;
use cleave_plan::snapshot::{Gpu, MigSharing, Node as PlanNode, SliceGroup, Snapshot};

use crate::pods::{Claimant, Sum};
use crate::policies::partition;
use crate::policies::plan::{OnDemandGpu, Plan};
use crate::policies::validate::{InstanceShare, ShareSize};
use crate::read::{Node, Observed};

/// Maximum time for a node to reach its desired state, unless the policy sets `dynamic.timeout`.
pub const DEFAULT_APPLY_DEADLINE: Duration = Duration::from_secs(30);
/// Minimum deadline, even if `dynamic.timeout` is shorter. The creation of one MIG instance can
/// take about a second.
const MIN_APPLY_DEADLINE: Duration = Duration::from_secs(5);
/// How long a GPU remains unchanged after it failed to reach a partition: the first and the maximum
/// backoff.
const FAILURE_BACKOFF: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(600));

/// Maximum time that a watch may lag behind a write. If the spec still differs after this time,
/// another writer changed it.
const MAX_WATCH_LAG: Duration = Duration::from_secs(10);

/// Identifies a GPU by its node's name and its UUID.
pub type GpuKey = (String, String);

/// Progress of a GPU towards its desired partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuProgress {
    /// The GPU has the partition.
    Reached,
    /// The agent is repartitioning the GPU.
    Changing,
    /// Pods use slices that must be removed first.
    Blocked,
    /// The change failed, or the agent refused the change. Contains the agent's message.
    Failed(String),
}

/// State that the operator keeps between passes. Times are durations since the process started.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// GPUs being repartitioned, with the partition and the start time.
    changing: BTreeMap<GpuKey, (Partition, Duration)>,
    /// Nodes whose agent has not read its spec yet. Each value is the spec's generation and the
    /// time of the first unread spec.
    unread: BTreeMap<String, (Option<i64>, Duration)>,
    /// GPUs that failed to reach a partition.
    failures: BTreeMap<GpuKey, PartitionFailure>,
    /// The node of each pod in the last plan.
    pub placements: BTreeMap<String, String>,
    /// Written specs that the watch may not have delivered yet, each with the previous generation
    /// and the time of the write.
    written: BTreeMap<String, (Option<i64>, GpuNodeSpec, Duration)>,
}

/// A failure to reach a partition.
#[derive(Debug, Clone, PartialEq)]
struct PartitionFailure {
    /// The partition that the GPU did not reach.
    partition: Partition,
    /// The agent's message.
    message: String,
    /// Number of consecutive failures.
    times: u32,
    /// When the next attempt is allowed.
    until: Duration,
}

/// The planner's input, and the state of its nodes and GPUs.
#[derive(Debug, Clone, Default)]
pub struct PlannerInput {
    /// The planner's input.
    pub snapshot: Snapshot,
    /// GPUs partitioned on demand that may be repartitioned now.
    pub repartitionable: BTreeSet<GpuKey>,
    /// Nodes on which a repartitioning is in progress.
    pub changing: BTreeSet<String>,
    /// Nodes excluded from the plan, each with the reason.
    pub excluded_nodes: BTreeMap<String, String>,
    /// GPUs that are excluded from the plan or remain unchanged after a failure, each with the
    /// reason.
    pub excluded_gpus: BTreeMap<GpuKey, String>,
    /// Time until the next deadline.
    pub next: Option<Duration>,
}

/// Returns the progress of a GPU towards its spec.
pub fn gpu_progress(node: &Node, spec: &GpuSpec, gpu: &GpuStatus) -> GpuProgress {
    if partition::has_partition(&spec.partition, gpu) {
        return GpuProgress::Reached;
    }
    if !agent_has_read_spec(node) {
        return GpuProgress::Changing;
    }
    // The agent retries. Pods do not wait for the retry, because other GPUs may have free units.
    if let Some(step) = steps_of(node, gpu).find(|step| matches!(step.result.as_str(), STEP_FAILED | STEP_REFUSED)) {
        return GpuProgress::Failed(step.message.clone());
    }
    if waits_for_kubelet(node, gpu) {
        return GpuProgress::Changing;
    }
    let waits = steps_of(node, gpu).any(|step| step.result == STEP_WAITING);
    let blocked = waits && !contains_all_slices_in_use(&spec.partition, gpu);
    if blocked { GpuProgress::Blocked } else { GpuProgress::Changing }
}

/// Returns the steps that the agent reports for a GPU.
fn steps_of<'a>(node: &'a Node, gpu: &'a GpuStatus) -> impl Iterator<Item = &'a StepStatus> {
    let status = node.object().and_then(|object| object.status.as_ref());
    status.into_iter().flat_map(|status| &status.steps).filter(|step| step.gpu == gpu.uuid)
}

/// Returns whether the agent changes the GPU only once the kubelet has listed all pods.
fn waits_for_kubelet(node: &Node, gpu: &GpuStatus) -> bool {
    steps_of(node, gpu).any(|step| step.result == STEP_WAITING && step.reason == STEP_USERS_UNKNOWN)
}

/// Returns the maximum time for a node to reach its desired state.
fn apply_deadline(plan: &Plan, node: &str) -> Duration {
    let timeout = plan.demand.get(node).into_iter().flatten().find_map(|(_, by_demand)| by_demand.batch_rules.timeout);
    timeout.unwrap_or(DEFAULT_APPLY_DEADLINE).max(MIN_APPLY_DEADLINE)
}

/// Returns the agent's message about the pods that block a GPU's change, with a leading colon.
/// Returns "" if the agent reports no message.
fn blocking_pods_message(node: &Node, gpu: &GpuStatus) -> String {
    let step = steps_of(node, gpu).find(|step| step.result == STEP_WAITING && !step.message.is_empty());
    step.map(|step| format!(": {}", step.message)).unwrap_or_default()
}

/// Returns whether the partition contains all slices in use. In this case, no pod blocks the
/// change.
fn contains_all_slices_in_use(partition: &Partition, gpu: &GpuStatus) -> bool {
    let all = |slices: &[SliceGroup]| {
        let mut counts: BTreeMap<(Option<u32>, String), u32> = BTreeMap::new();
        for slice in slices {
            *counts.entry((slice.placement, slice.resource.clone())).or_default() += slice.count;
        }
        counts
    };
    // Without slices in use, `desired_slices` returns only the slices of the partition.
    let idle = GpuStatus { slices: Vec::new(), ..gpu.clone() };
    let wanted = all(&partition::desired_slices(partition, &idle));
    let in_use: Vec<SliceGroup> = partition::served_slices(gpu).into_iter().filter(|slice| slice.in_use).collect();
    all(&in_use).iter().all(|(key, count)| wanted.get(key).is_some_and(|wanted| wanted >= count))
}

/// Returns whether the agent has read the latest spec.
pub(crate) fn agent_has_read_spec(node: &Node) -> bool {
    let Some(object) = node.object() else { return false };
    let observed = object.status.as_ref().map_or(0, |status| status.observed_generation);
    object.metadata.generation.is_none_or(|generation| observed >= generation)
}

impl History {
    /// Records that a spec was written. `generation` is the object's generation before the write.
    pub fn record_write(&mut self, node: &str, generation: Option<i64>, spec: &GpuNodeSpec, now: Duration) {
        self.written.insert(node.to_owned(), (generation, spec.clone(), now));
    }

    /// Replaces specs in `observed` with specs that were written later, if the watch lags. A plan
    /// based on the older spec could write a different spec to a node that is already changing.
    pub fn restore_writes(&mut self, observed: &mut Observed, now: Duration) {
        self.written.retain(|name, (before, spec, at)| {
            let Some(shared) = observed.nodes.get_mut(name).and_then(|node| node.gpu_node.as_mut()) else {
                return false;
            };
            let Ok(object) = &shared.0 else { return false };
            let lags =
                before.is_some() && object.metadata.generation <= *before && now.saturating_sub(*at) < MAX_WATCH_LAG;
            if lags
                && object.spec != *spec
                && let Ok(object) = &mut Arc::make_mut(shared).0
            {
                object.spec = spec.clone();
                // Mark the status as older than this spec.
                object.metadata.generation = before.map(|before| before.saturating_add(1));
            }
            lags
        });
    }

    /// Updates the history from the state of the cluster. Returns the progress of each GPU.
    fn update(&mut self, observed: &Observed, plan: &Plan, now: Duration) -> BTreeMap<GpuKey, GpuProgress> {
        let mut all = BTreeMap::new();
        for (name, node) in &observed.nodes {
            let Some(object) = node.object() else { continue };
            let generation = object.metadata.generation;
            if agent_has_read_spec(node) {
                self.unread.remove(name);
            } else if self.unread.get(name).is_none_or(|(of, _)| *of != generation) {
                // The deadline counts from the first spec that the agent has not read.
                let since = self.unread.get(name).map_or(now, |(_, since)| *since);
                self.unread.insert(name.clone(), (generation, since));
            }
            for gpu in node.reported().unwrap_or_default() {
                let Some(spec) = object.spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid) else { continue };
                let at = (name.clone(), gpu.uuid.clone());
                let mut progress = gpu_progress(node, spec, gpu);
                if progress == GpuProgress::Changing {
                    // While the agent waits for the kubelet, the deadline does not count. The agent
                    // limits this wait.
                    let is_new = self.changing.get(&at).is_none_or(|(partition, _)| *partition != spec.partition);
                    if is_new || waits_for_kubelet(node, gpu) {
                        self.changing.insert(at.clone(), (spec.partition.clone(), now));
                    }
                    let since = self.changing.get(&at).map_or(now, |(_, since)| *since);
                    let deadline = apply_deadline(plan, name);
                    if agent_has_read_spec(node) && now.saturating_sub(since) >= deadline {
                        let why = blocking_pods_message(node, gpu);
                        progress = GpuProgress::Failed(format!(
                            "the agent did not finish within {} s{why}",
                            deadline.as_secs()
                        ));
                    }
                }
                match &progress {
                    GpuProgress::Changing => {}
                    // Keep the start time. Otherwise the deadline of a late GPU would restart
                    // without a change of its desired partition.
                    GpuProgress::Failed(message) => self.record_failure(&at, &spec.partition, message, now),
                    GpuProgress::Reached | GpuProgress::Blocked => {
                        self.changing.remove(&at);
                        // The GPU reached the partition after a failure.
                        if self.failures.get(&at).is_some_and(|failure| failure.partition == spec.partition) {
                            self.failures.remove(&at);
                        }
                    }
                }
                all.insert(at, progress);
            }
        }
        let known = |at: &GpuKey| all.contains_key(at);
        self.changing.retain(|at, _| known(at));
        // Old failures do not lengthen the next backoff.
        self.failures.retain(|at, failure| known(at) && now < failure.until.saturating_add(FAILURE_BACKOFF.1));
        self.unread.retain(|name, _| observed.nodes.contains_key(name));
        let waiting: BTreeSet<&str> = observed.pods.iter().map(|claimant| claimant.pod.name.as_str()).collect();
        self.placements.retain(|pod, _| waiting.contains(pod.as_str()));
        all
    }

    /// Records a failure. The backoff doubles with each consecutive failure.
    fn record_failure(&mut self, at: &GpuKey, partition: &Partition, message: &str, now: Duration) {
        let before = self.failures.get(at);
        if before.is_some_and(|failure| failure.partition == *partition && now < failure.until) {
            return;
        }
        let times = before.map_or(1, |failure| failure.times.saturating_add(1));
        let backoff = FAILURE_BACKOFF.0.saturating_mul(1 << (times - 1).min(8)).min(FAILURE_BACKOFF.1);
        let failure = PartitionFailure {
            partition: partition.clone(),
            message: message.to_owned(),
            times,
            until: now.saturating_add(backoff),
        };
        self.failures.insert(at.clone(), failure);
    }
}

/// Builds the planner's input.
pub fn build(observed: &Observed, plan: &Plan, history: &mut History, now: Duration) -> PlannerInput {
    let progress = history.update(observed, plan, now);
    let mut input = PlannerInput::default();
    let mut on_node: BTreeMap<&str, Vec<&Claimant>> = BTreeMap::new();
    for claimant in &observed.pods {
        match &claimant.node {
            Some(node) => on_node.entry(node).or_default().push(claimant),
            None => {
                let planned_node = history.placements.get(&claimant.pod.name).cloned();
                input.snapshot.pods.push(cleave_plan::snapshot::Pod { planned_node, ..claimant.pod.clone() });
            }
        }
    }
    for (name, node) in &observed.nodes {
        let Some(gpus) = node.reported() else {
            if node.agent.is_some() {
                let exclusion = Some("the agent has not reported the node's GPUs".to_owned());
                input.snapshot.nodes.push(PlanNode { name: name.clone(), exclusion, ..PlanNode::default() });
            }
            continue;
        };
        let pods = on_node.get(name.as_str()).map_or(&[][..], Vec::as_slice);
        let builder = NodeBuilder { name, node, plan, history, progress: &progress, now };
        builder.add_node(gpus, pods, &mut input);
    }
    input
}

/// Builds the planner's input for one node.
struct NodeBuilder<'a> {
    name: &'a str,
    node: &'a Node,
    plan: &'a Plan,
    history: &'a History,
    progress: &'a BTreeMap<GpuKey, GpuProgress>,
    now: Duration,
}

impl NodeBuilder<'_> {
    // long: handles each reason to exclude a GPU from planning
    fn add_node(&self, gpus: &[GpuStatus], pods: &[&Claimant], input: &mut PlannerInput) {
        let demand = self.plan.demand.get(self.name);
        let deadline = apply_deadline(self.plan, self.name);
        let exclusion = self.exclusion(deadline, input);
        if let Some(reason) = &exclusion {
            input.excluded_nodes.insert(self.name.to_owned(), reason.clone());
        }
        let mut changing = exclusion.is_none() && self.history.unread.contains_key(self.name);
        for gpu in gpus.iter().filter(|_| exclusion.is_none()) {
            let at = (self.name.to_owned(), gpu.uuid.clone());
            if let (Some(GpuProgress::Changing), Some((_, since))) =
                (self.progress.get(&at), self.history.changing.get(&at))
            {
                cap_next_pass(input, since.saturating_add(deadline), self.now);
                changing = true;
            }
        }
        if changing {
            input.changing.insert(self.name.to_owned());
        }
        let cordons = self.node.cordons();
        let mut all: Vec<Gpu> = Vec::with_capacity(gpus.len());
        for gpu in gpus {
            let by_demand = demand.and_then(|demand| demand.get(&gpu.uuid));
            let at = (self.name.to_owned(), gpu.uuid.clone());
            let mut planned = self.build_gpu(gpu, by_demand);
            // A daemon that starts or stops because of a change is part of the change.
            let starting =
                self.progress.get(&at) == Some(&GpuProgress::Changing) && gpu.health.reason == HEALTH_MPS_UNAVAILABLE;
            if !gpu.health.healthy && !starting {
                let why = if gpu.health.message.is_empty() { &gpu.health.reason } else { &gpu.health.message };
                planned.exclusion = Some(format!("unhealthy: {why}"));
            }
            if let Some(reason) = cordons.0.get(&gpu.uuid) {
                let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
                planned.exclusion = Some(format!("cordoned{why}"));
            }
            let quiesced = self.node.is_quiesced(&gpu.uuid);
            planned.exclusion = if quiesced { Some("quiesced".into()) } else { planned.exclusion };
            if by_demand.is_some() {
                let failure = self.history.failures.get(&at);
                if let Some(reason) = &planned.exclusion {
                    input.excluded_gpus.insert(at.clone(), reason.clone());
                } else if let Some(failure) = failure.filter(|failure| self.now < failure.until) {
                    cap_next_pass(input, failure.until, self.now);
                    input
                        .excluded_gpus
                        .insert(at.clone(), format!("the last repartitioning failed: {}", failure.message));
                    pin_slices(&mut planned);
                    // The GPU is pinned, so its current slices become its desired partition.
                    if !changing && exclusion.is_none() {
                        input.repartitionable.insert(at);
                    }
                } else if changing || partition::has_unknown_ids(gpu) {
                    pin_slices(&mut planned);
                } else if exclusion.is_none() {
                    input.repartitionable.insert(at);
                }
            }
            all.push(planned);
        }
        self.mark_unlisted_in_use(gpus, pods, &mut all, input);
        let mut requested = Sum::default();
        for claimant in pods {
            for (name, quantity) in claimant.pod.requests.iter().filter(|(name, _)| !is_served(name)) {
                requested.add_one(name, quantity);
            }
        }
        requested.add_one(scheduling::PODS_RESOURCE, &Quantity::whole(pods.len() as u64));
        input.snapshot.nodes.push(PlanNode {
            name: self.name.to_owned(),
            labels: self.node.labels.clone(),
            taints: self.node.taints.clone(),
            unschedulable: self.node.unschedulable,
            allocatable: self.node.allocatable.clone(),
            requested: requested.into_quantities(),
            gpus: all,
            exclusion,
        });
    }

    /// Returns why the node is excluded. Returns `None` if the node is not excluded.
    fn exclusion(&self, deadline: Duration, input: &mut PlannerInput) -> Option<String> {
        match self.node.agent {
            None => return Some("no Cleave agent runs on the node".to_owned()),
            Some(agent) if !agent.ready => return Some("the agent is not ready".to_owned()),
            Some(_) => {}
        }
        let (_, since) = self.history.unread.get(self.name)?;
        if self.now.saturating_sub(*since) < deadline {
            cap_next_pass(input, since.saturating_add(deadline), self.now);
            return None;
        }
        Some(format!("the agent did not read the GpuNode spec within {} s", deadline.as_secs()))
    }

    fn build_gpu(&self, gpu: &GpuStatus, by_demand: Option<&OnDemandGpu>) -> Gpu {
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
        let Some(OnDemandGpu { demand, .. }) = by_demand else {
            self.add_fixed_slices(gpu, &mut planned);
            return planned;
        };
        planned.mode = demand.mode;
        planned.units = partition::share_count(demand, gpu);
        planned.replicas = demand.time_slicing.as_ref().map(|slicing| slicing.replicas);
        planned.mig_sharing = match &demand.each {
            InstanceShare::Whole => None,
            InstanceShare::Mps(share) => {
                let units = if let ShareSize::Units(units) = share.size { units } else { 1 };
                Some(MigSharing { units, resource_name: share.resource.clone() })
            }
            InstanceShare::TimeSlicing(slicing) => {
                Some(MigSharing { units: slicing.replicas, resource_name: slicing.resource.clone() })
            }
        };
        let changing = self.progress.get(&(self.name.to_owned(), gpu.uuid.clone())) == Some(&GpuProgress::Changing);
        planned.slices = match spec.filter(|_| changing) {
            Some(spec) => partition::desired_slices(&spec.partition, gpu),
            None => partition::observed_slices(gpu, Some(&demand.each)),
        };
        planned
    }

    /// Converts a GPU that is not partitioned on demand. Pods can use its current or desired
    /// slices.
    fn add_fixed_slices(&self, gpu: &GpuStatus, planned: &mut Gpu) {
        let wanted =
            self.plan.nodes.get(self.name).and_then(|spec| spec.gpus.iter().find(|spec| spec.uuid == gpu.uuid));
        planned.slices = match wanted {
            Some(spec) if self.is_changing_to(spec) => partition::desired_slices(&spec.partition, gpu),
            _ => partition::observed_slices(gpu, None),
        };
        let named = planned.slices.iter().map(|slice| slice.resource.as_str());
        let shares: BTreeSet<&str> = named.filter(|name| is_share_resource(name)).collect();
        // The planner knows the default names. Pass only a name that a policy sets.
        planned.resource_name = shares.first().map(|&name| name.to_owned());
        if let Some(slice) = planned.slices.iter().find(|slice| slice.profile.is_some()) {
            planned.mig_sharing =
                Some(MigSharing { units: slice.count.max(1), resource_name: Some(slice.resource.clone()) });
        }
        pin_slices(planned);
    }

    /// Returns whether the GPU does not have this partition yet.
    fn is_changing_to(&self, wanted: &GpuSpec) -> bool {
        let current =
            self.node.object().and_then(|object| object.spec.gpus.iter().find(|spec| spec.uuid == wanted.uuid));
        let at = (self.name.to_owned(), wanted.uuid.clone());
        current.is_none_or(|current| current.partition != wanted.partition)
            || self.progress.get(&at) == Some(&GpuProgress::Changing)
    }

    /// Marks slices as in use for bound pods whose devices the kubelet does not list yet.
    fn mark_unlisted_in_use(&self, gpus: &[GpuStatus], pods: &[&Claimant], all: &mut [Gpu], input: &mut PlannerInput) {
        for claimant in pods {
            for (resource, count) in claimant.gpu_requests() {
                let listed = |gpu: &GpuStatus| {
                    let of_pod = gpu
                        .allocations
                        .iter()
                        .filter(|allocation| allocation.pod == claimant.pod.name && allocation.resource == resource);
                    of_pod.map(|allocation| allocation.ids.len() as u64).sum::<u64>()
                };
                let missing = count.saturating_sub(gpus.iter().map(listed).sum());
                if missing == 0 {
                    continue;
                }
                let together = is_share_resource(resource) || resource.ends_with(SHARED_SUFFIX);
                let mut offers = false;
                for gpu in all.iter_mut().filter(|gpu| has_free_unit(gpu, resource)) {
                    offers = true;
                    pin_slices(gpu);
                    input.repartitionable.remove(&(self.name.to_owned(), gpu.uuid.clone()));
                }
                if offers {
                    let each = if together { missing } else { 1 };
                    (0..missing / each)
                        .for_each(|_| mark_free_in_use(all, resource, u32::try_from(each).unwrap_or(u32::MAX)));
                }
            }
        }
    }
}

/// Ensures that the next pass runs no later than at `at`.
fn cap_next_pass(input: &mut PlannerInput, at: Duration, now: Duration) {
    let from_now = at.saturating_sub(now);
    input.next = Some(input.next.map_or(from_now, |next| next.min(from_now)));
}

/// Forces the planner to keep a GPU's slices. A GPU that has no slices or is used as a whole is
/// planned as a whole GPU.
fn pin_slices(gpu: &mut Gpu) {
    if gpu.slices.iter().all(|slice| slice.resource == RESOURCE_GPU) {
        gpu.mode = Mode::Whole;
    } else {
        gpu.fixed = true;
    }
}

/// Returns whether a resource names shares or replicas of whole GPUs.
fn is_share_resource(resource: &str) -> bool {
    resource != RESOURCE_GPU && !resource.starts_with(MIG_PREFIX) && sized_slice_gib(resource).is_none()
}

/// Returns whether a GPU has a free unit of the resource, or is a free whole GPU.
fn has_free_unit(gpu: &Gpu, resource: &str) -> bool {
    if resource == RESOURCE_GPU {
        return gpu.slices.is_empty();
    }
    gpu.slices.iter().any(|slice| slice.resource == resource && !slice.in_use)
}

/// Marks `count` units of a resource on one device as in use. Chooses the device with the fewest
/// free units that suffice.
fn mark_free_in_use(gpus: &mut [Gpu], resource: &str, count: u32) {
    if resource == RESOURCE_GPU {
        if let Some(gpu) = gpus.iter_mut().filter(|gpu| has_free_unit(gpu, resource)).min_by_key(|gpu| gpu.index) {
            gpu.slices.push(SliceGroup {
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
        let fits = |slice: &SliceGroup| slice.resource == resource && !slice.in_use && slice.count >= count;
        places.extend(
            gpu.slices.iter().enumerate().filter(|(_, slice)| fits(slice)).map(|(on, slice)| (slice.count, at, on)),
        );
    }
    let Some(&(_, at, on)) = places.iter().min() else { return };
    let Some(gpu) = gpus.get_mut(at) else { return };
    let Some(slice) = gpu.slices.get_mut(on) else { return };
    slice.count -= count;
    let used = SliceGroup { in_use: true, count, ..slice.clone() };
    gpu.slices.push(used);
    gpu.slices.retain(|slice| slice.count > 0);
}
