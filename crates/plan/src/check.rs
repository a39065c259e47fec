//! Verifies plans. The check shares no arithmetic with the planner. It uses only the snapshot, the
//! plan, and the built-in MIG profiles of GPUs that report none.
//!
//! Tests check every plan, and the operator checks each plan before it applies the plan. Never
//! apply a plan with a violation.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::device::{self, Mode};
use crate::mig::{Profile, built_in};
use crate::mps::MAX_CLIENTS;
use crate::planner::{GpuPlan, Placement, Plan, PlannedSlices};
use crate::scheduling::{NodeConstraints, PODS_RESOURCE, UNLIMITED_BY_DEFAULT};
use crate::snapshot::{Gpu, Node, Pod, SliceGroup, Snapshot};

/// A rule that a plan violates.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// UUID of the GPU, or name of the pod or node. `plan` for the plan as a whole.
    pub at: String,
    /// The violated rule.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.what)
    }
}

/// Returns all violations of a plan for a snapshot. Apply the plan only if the list is empty.
pub fn check(snapshot: &Snapshot, plan: &Plan) -> Vec<Violation> {
    let mut checker = PlanChecker { found: Vec::new(), taken_whole: BTreeSet::new() };
    checker.check_gpus(snapshot, plan);
    checker.check_pods(snapshot, plan);
    checker.found
}

/// Returns whether all requested sizes fit into the bins at the same time, each size in one bin.
/// Returns true if the steps run out, because the result is then unknown.
fn can_fit_into_bins(wanted: &[u64], free: &mut [u64], steps: &mut u32) -> bool {
    let Some((first, rest)) = wanted.split_first() else { return true };
    for at in 0..free.len() {
        let Some(left) = steps.checked_sub(1) else { return true };
        *steps = left;
        if free[..at].contains(&free[at]) {
            continue;
        }
        let Some(less) = free[at].checked_sub(*first) else { continue };
        let before = std::mem::replace(&mut free[at], less);
        let fits = can_fit_into_bins(rest, free, steps);
        free[at] = before;
        if fits {
            return true;
        }
    }
    false
}

struct PlanChecker {
    found: Vec<Violation>,
    /// GPUs that are allocated to one pod as a whole.
    taken_whole: BTreeSet<(String, String)>,
}

/// Placement, resource and profile of a slice.
type SliceKey<'a> = (Option<u32>, &'a str, Option<&'a str>);

/// A node, one of its GPUs, and a resource.
type ResourceKey<'a> = (&'a str, &'a str, &'a str);

/// Counts equal slices.
fn count_slices(slices: &[SliceGroup], is_counted: impl Fn(&SliceGroup) -> bool) -> BTreeMap<SliceKey<'_>, u64> {
    let mut all = BTreeMap::new();
    for slice in slices.iter().filter(|slice| is_counted(slice) && slice.count > 0) {
        *all.entry((slice.placement, slice.resource.as_str(), slice.profile.as_deref())).or_default() +=
            u64::from(slice.count);
    }
    all
}

impl PlanChecker {
    fn record_violation(&mut self, at: &str, what: impl Into<String>) {
        self.found.push(Violation { at: at.to_owned(), what: what.into() });
    }

    /// Checks each GPU, and that the plan has each GPU of the snapshot exactly once. A GPU may be
    /// in the plan several times if no entry changes it.
    fn check_gpus(&mut self, snapshot: &Snapshot, plan: &Plan) {
        let mut planned: BTreeMap<(&str, &str), Vec<&GpuPlan>> = BTreeMap::new();
        for gpu in &plan.gpus {
            planned.entry((&gpu.node, &gpu.uuid)).or_default().push(gpu);
        }
        let mut observed = BTreeSet::new();
        for node in &snapshot.nodes {
            for gpu in &node.gpus {
                let key = (node.name.as_str(), gpu.uuid.as_str());
                let twice = !observed.insert(key);
                match planned.get(&key).map(Vec::as_slice) {
                    Some([plan]) => self.check_gpu(node, gpu, plan),
                    Some(_) if twice => {}
                    Some(many) if many.iter().all(|plan| !plan.changed) => {}
                    Some(_) => self.record_violation(
                        &gpu.uuid,
                        "the GPU is in the plan more than once, and one entry changes the GPU",
                    ),
                    None => self.record_violation(&gpu.uuid, "the GPU is not in the plan"),
                }
            }
        }
        for (node, uuid) in planned.keys().filter(|key| !observed.contains(*key)) {
            self.record_violation(uuid, format!("node {node} has no such GPU"));
        }
        if plan.changed != plan.gpus.iter().any(|gpu| gpu.changed) {
            self.record_violation("plan", "`changed` does not match the GPUs");
        }
    }

    /// Checks the planned slices of a GPU.
    fn check_gpu(&mut self, node: &Node, gpu: &Gpu, plan: &GpuPlan) {
        let at = gpu.uuid.as_str();
        let everything = |_: &SliceGroup| true;
        let changed = count_slices(&gpu.slices, everything) != count_slices(&plan.slices, everything);
        if changed != plan.changed {
            self.record_violation(at, "`changed` does not match the slices");
        }
        if count_slices(&gpu.slices, |slice| slice.in_use) != count_slices(&plan.slices, |slice| slice.in_use) {
            self.record_violation(at, "the planned slices in use differ from the GPU's current slices in use");
        }
        if !changed {
            return;
        }
        if gpu.fixed || gpu.exclusion.is_some() || node.exclusion.is_some() || gpu.mode == Mode::Unknown {
            self.record_violation(at, "the plan changes the GPU, but the snapshot forbids changes");
        }
        let known = built_in(&gpu.model, gpu.memory.as_mebibytes().unwrap_or(0)).unwrap_or_default();
        let profiles = gpu.profiles.as_ref().unwrap_or(&known);
        let (mut mig, mut mps, mut replica_slices) = (Vec::new(), Vec::new(), Vec::new());
        for slice in &plan.slices {
            let resource = slice.resource.as_str();
            if slice.placement.is_some() || resource.starts_with(device::MIG_PREFIX) {
                mig.push(slice);
            } else if resource == device::REPLICAS_RESOURCE
                || gpu.mode == Mode::TimeSlicing && device::sized_slice_gib(resource).is_none()
            {
                replica_slices.push(slice);
            } else if resource == device::WHOLE_GPU_RESOURCE {
                self.record_violation(
                    at,
                    "the plan lists a slice for a whole GPU, which must have an empty list of slices",
                );
            } else {
                mps.push(slice);
            }
        }
        if [&mig, &mps, &replica_slices].iter().filter(|slices| !slices.is_empty()).count() > 1 {
            self.record_violation(at, "the GPU has two kinds of partition at the same time");
        }
        for (slices, mode) in [(&mig, Mode::Mig), (&mps, Mode::Mps), (&replica_slices, Mode::TimeSlicing)] {
            if !slices.is_empty() && gpu.mode != mode && gpu.mode != Mode::Auto {
                self.record_violation(
                    at,
                    format!("the GPU's mode is {:?}, and the plan partitions it for {mode:?}", gpu.mode),
                );
            }
        }
        self.check_mig(at, gpu, profiles, &mig);
        self.check_mps(at, gpu, &mps);
        let replicas: u64 = replica_slices.iter().map(|slice| u64::from(slice.count)).sum();
        if let Some(most) = gpu.replicas.filter(|&most| replicas > u64::from(most)) {
            self.record_violation(at, format!("the GPU has {replicas} replicas, more than the maximum of {most}"));
        }
    }

    /// Checks the planned MIG instances of a GPU and their positions.
    fn check_mig(&mut self, at: &str, gpu: &Gpu, profiles: &[Profile], slices: &[&SliceGroup]) {
        let mut instances: BTreeMap<(u32, String), u64> = BTreeMap::new();
        for slice in slices {
            let Some(place) = slice.placement else {
                self.record_violation(at, format!("{} has no placement", slice.resource));
                continue;
            };
            let resource = slice.profile.as_deref().map_or_else(|| slice.resource.clone(), device::mig_resource);
            let shared = slice.profile.is_some() || resource.ends_with(device::SHARED_SUFFIX);
            let name = resource.trim_end_matches(device::SHARED_SUFFIX).to_owned();
            let count = instances.entry((place, name)).or_default();
            *count += u64::from(slice.count);
            let most = if shared { gpu.mig_sharing.as_ref().map_or(0, |sharing| u64::from(sharing.units)) } else { 1 };
            if *count > most && !slice.in_use {
                let text = format!(
                    "{} at memory slice {place}: {count} exist, more than the maximum of {most}",
                    slice.resource
                );
                self.record_violation(at, text);
            }
        }
        let (mut taken, mut extra, mut counts) = (BTreeSet::new(), 0, BTreeMap::new());
        for (place, name) in instances.keys() {
            let Some(profile) = profiles.iter().find(|profile| device::mig_resource(&profile.name) == *name) else {
                self.record_violation(at, format!("the GPU does not support the profile {name}"));
                continue;
            };
            if !profile.starts.contains(place) {
                self.record_violation(at, format!("{name} cannot start at memory slice {place}"));
            }
            if (*place..place.saturating_add(profile.size).min(4096)).any(|slice| !taken.insert(slice)) {
                self.record_violation(at, format!("{name} at memory slice {place} overlaps another instance"));
            }
            extra += u32::from(profile.name.contains("+me"));
            let count: &mut u32 = counts.entry(name).or_default();
            *count += 1;
            if profile.count.is_some_and(|most| *count > most) {
                self.record_violation(at, format!("the GPU has more {name} than it supports"));
            }
        }
        if extra > 1 {
            self.record_violation(at, "two instances have the extra media engines");
        }
    }

    /// Checks that MPS slices do not exceed the GPU's memory, its maximum number of shares, or the
    /// maximum number of MPS clients.
    fn check_mps(&mut self, at: &str, gpu: &Gpu, slices: &[&SliceGroup]) {
        let (mut sized, mut shares) = (0_u64, 0_u64);
        for slice in slices {
            let count = u64::from(slice.count);
            match device::sized_slice_gib(&slice.resource) {
                Some(gib) => sized = sized.saturating_add(gib.saturating_mul(1024).saturating_mul(count)),
                None => shares += count,
            }
        }
        let memory = gpu.memory.as_mebibytes().unwrap_or(0);
        let units = u64::from(gpu.units.unwrap_or(MAX_CLIENTS));
        if shares > units {
            self.record_violation(at, format!("{shares} shares exceed the GPU's maximum of {units}"));
        }
        let needed = u128::from(sized) * u128::from(units) + u128::from(shares) * u128::from(memory);
        let of = if gpu.units.is_some() { needed } else { u128::from(sized) * u128::from(units) };
        if of > u128::from(memory) * u128::from(units) {
            self.record_violation(
                at,
                format!("{sized} MiB of slices and {shares} shares exceed the GPU's {memory} MiB"),
            );
        }
        let clients: u64 = slices.iter().map(|slice| u64::from(slice.count)).sum();
        if clients > u64::from(MAX_CLIENTS) {
            self.record_violation(
                at,
                format!("the GPU has {clients} slices, and an MPS server serves at most {MAX_CLIENTS} clients"),
            );
        }
    }

    /// Checks that each pod has one result, and that placed pods can run on their nodes.
    fn check_pods(&mut self, snapshot: &Snapshot, plan: &Plan) {
        let mut answers: BTreeMap<&str, usize> = BTreeMap::new();
        for name in plan.placements.iter().map(|one| &one.pod).chain(plan.unplaced.iter().map(|one| &one.pod)) {
            *answers.entry(name).or_default() += 1;
        }
        let mut pods: BTreeMap<&str, (usize, &Pod)> = BTreeMap::new();
        for pod in &snapshot.pods {
            pods.entry(&pod.name).or_insert((0, pod)).0 += 1;
        }
        for (name, (count, _)) in &pods {
            if answers.get(name).copied().unwrap_or(0) != *count {
                self.record_violation(name, "the pod must be listed exactly once, as placed or unplaced");
            }
        }
        for name in answers.keys().filter(|name| !pods.contains_key(*name)) {
            self.record_violation(name, "the snapshot has no such pod");
        }
        for unplaced in plan.unplaced.iter().filter(|unplaced| unplaced.reason.is_empty()) {
            self.record_violation(&unplaced.pod, "the reason is empty");
        }

        // Slices that are free in the plan. Each checked pod reduces the number of free slices.
        let mut free: BTreeMap<ResourceKey<'_>, u64> = BTreeMap::new();
        let mut slices_of: BTreeMap<(&str, &str), &GpuPlan> = BTreeMap::new();
        for gpu in &plan.gpus {
            slices_of.insert((&gpu.node, &gpu.uuid), gpu);
            for slice in gpu.slices.iter().filter(|slice| !slice.in_use) {
                *free.entry((&gpu.node, &gpu.uuid, &slice.resource)).or_default() += u64::from(slice.count);
            }
        }
        self.check_shares_of_instances(plan);
        let nodes: BTreeMap<&str, &Node> = snapshot.nodes.iter().map(|node| (node.name.as_str(), node)).collect();
        let mut used: BTreeMap<(&str, &str), u64> = BTreeMap::new();
        for placement in &plan.placements {
            let Some((_, pod)) = pods.get(placement.pod.as_str()) else { continue };
            let Some(node) = nodes.get(placement.node.as_str()) else {
                self.record_violation(&pod.name, format!("the snapshot has no node {}", placement.node));
                continue;
            };
            if node.exclusion.is_some() || NodeConstraints::of_pod(pod).admit(node).is_err() {
                self.record_violation(&pod.name, format!("the pod cannot run on node {}", node.name));
            }
            for (name, request) in &pod.requests {
                *used.entry((&node.name, name)).or_default() += request.milli().unwrap_or(u64::MAX);
            }
            *used.entry((&node.name, PODS_RESOURCE)).or_default() += 1000;
            self.check_placement(pod, placement, &slices_of, &mut free);
        }
        for ((node, resource), amount) in used {
            let Some(node) = nodes.get(node) else { continue };
            let limited = !UNLIMITED_BY_DEFAULT.contains(&resource);
            let of_gpus = plan.placements.iter().flat_map(|one| &one.takes).any(|take| take.resource == resource);
            let Some(all) = node
                .allocatable
                .get(resource)
                .map(|all| all.milli().unwrap_or(0))
                .or((limited && !of_gpus).then_some(0))
            else {
                continue;
            };
            let before = node.requested.get(resource).and_then(super::Quantity::milli).unwrap_or(0);
            if !of_gpus && amount.saturating_add(before) > all {
                self.record_violation(&node.name, format!("the node's pods request more {resource} than the node has"));
            }
        }
    }

    /// Checks that a pod's shares of MIG instances can belong to one instance. The plan does not
    /// name the instance, so the check requires only that a possible instance exists.
    fn check_shares_of_instances(&mut self, plan: &Plan) {
        let mut taken: BTreeMap<ResourceKey<'_>, Vec<u64>> = BTreeMap::new();
        for placement in &plan.placements {
            for take in &placement.takes {
                taken.entry((&placement.node, &take.gpu, &take.resource)).or_default().push(u64::from(take.count));
            }
        }
        for ((node, uuid, resource), mut wanted) in taken {
            let Some(gpu) = plan.gpus.iter().find(|gpu| gpu.node == node && gpu.uuid == uuid) else { continue };
            let mut free: BTreeMap<u32, u64> = BTreeMap::new();
            for slice in gpu.slices.iter().filter(|slice| slice.resource == resource && !slice.in_use) {
                if let Some(place) = slice.placement {
                    *free.entry(place).or_default() += u64::from(slice.count);
                }
            }
            let slices_of_their_own =
                resource.starts_with(device::MIG_PREFIX) && !resource.ends_with(device::SHARED_SUFFIX);
            if free.is_empty() || slices_of_their_own {
                continue;
            }
            wanted.sort_unstable_by(|a, b| b.cmp(a));
            let mut free: Vec<u64> = free.into_values().collect();
            if !can_fit_into_bins(&wanted, &mut free, &mut 10_000) {
                self.record_violation(
                    uuid,
                    format!("no assignment places the {resource} of each pod on one MIG instance"),
                );
            }
        }
    }

    /// Checks that the slices of a placed pod exist and satisfy its requests.
    fn check_placement<'p>(
        &mut self,
        pod: &Pod,
        placement: &'p Placement,
        plans: &BTreeMap<(&str, &str), &GpuPlan>,
        free: &mut BTreeMap<ResourceKey<'p>, u64>,
    ) {
        let mut got: BTreeMap<&str, u64> = BTreeMap::new();
        for PlannedSlices { gpu, resource, count } in &placement.takes {
            let Some(plan) = plans.get(&(placement.node.as_str(), gpu.as_str())) else {
                self.record_violation(&pod.name, format!("GPU {gpu} is not on node {}", placement.node));
                continue;
            };
            *got.entry(resource).or_default() += u64::from(*count);
            if resource == device::WHOLE_GPU_RESOURCE && plan.slices.is_empty() {
                if *count != 1 || !self.taken_whole.insert((placement.node.clone(), gpu.clone())) {
                    self.record_violation(&pod.name, format!("GPU {gpu} is allocated more than once"));
                }
                continue;
            }
            let left = free.get_mut(&(placement.node.as_str(), gpu.as_str(), resource.as_str()));
            match left.map(|left| (left.checked_sub(u64::from(*count)), left)) {
                Some((Some(rest), left)) => *left = rest,
                _ => self.record_violation(&pod.name, format!("GPU {gpu} has too few free {resource}")),
            }
            // Resources other than whole GPUs, sized slices and MIG instances are shares or
            // replicas. All units of one such resource that a pod requests must be on one GPU.
            let slice = resource.starts_with(device::MIG_PREFIX) && !resource.ends_with(device::SHARED_SUFFIX);
            let shares =
                !slice && resource != device::WHOLE_GPU_RESOURCE && device::sized_slice_gib(resource).is_none();
            if shares && placement.takes.iter().any(|other| other.resource == *resource && other.gpu != *gpu) {
                self.record_violation(&pod.name, format!("the pod's {resource} are on two GPUs"));
            }
        }
        for (name, request) in &pod.requests {
            let wanted = request.count().unwrap_or(u64::MAX);
            let is_gpu = name == device::WHOLE_GPU_RESOURCE
                || name.starts_with(device::MIG_PREFIX)
                || device::sized_slice_gib(name).is_some()
                || [device::SHARES_RESOURCE, device::REPLICAS_RESOURCE].contains(&name.as_str());
            if (is_gpu || got.contains_key(name.as_str())) && got.remove(name.as_str()).unwrap_or(0) != wanted {
                self.record_violation(
                    &pod.name,
                    format!("the pod does not receive the {wanted} {name} that it requests"),
                );
            }
        }
        for resource in got.keys() {
            self.record_violation(&pod.name, format!("the pod receives {resource}, which it does not request"));
        }
    }
}
