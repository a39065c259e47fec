//! The operator in the histories: a gatekeeper with lagging watches and with writes that may fail.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::names::CONDITION_PLACED;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::super::world::{TestCluster, at, from_json};
use super::pods::Owner;
use super::scheduler::{list, node_of, text};
use super::simulation::{EPOCH_SECONDS, Simulation};
use crate::catch_up::Versions;
use crate::evict::EvictionResult;
use crate::placement::actions::{Actions, Eviction, Release, ReleaseReason};
use crate::placement::cluster::Cluster;
use crate::placement::gatekeeper::Gatekeeper;
use crate::placement::patch;
use crate::pods::PodObject;

/// Delay between a failed write and the next reconcile, as in `run`.
const RETRY_DELAY_SECONDS: u64 = 1;

/// The objects of one kind, as a watch last reported them.
#[derive(Debug)]
struct Watch<T>(BTreeMap<String, (u64, Arc<T>)>);

impl<T: DeserializeOwned> Watch<T> {
    fn report(&mut self, objects: &BTreeMap<String, Value>, keep: impl Fn(&mut T)) {
        self.0.retain(|name, _| objects.contains_key(name));
        for (name, object) in objects {
            let version = text(object, "/metadata/resourceVersion").parse().unwrap();
            if self.0.get(name).is_none_or(|(known, _)| *known != version) {
                let mut parsed: T = from_json(object.clone());
                keep(&mut parsed);
                self.0.insert(name.clone(), (version, Arc::new(parsed)));
            }
        }
    }

    fn objects(&self) -> Vec<Arc<T>> {
        self.0.values().map(|(_, object)| Arc::clone(object)).collect()
    }
}

impl<T> Default for Watch<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

/// One kind of watched objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Pods,
    Nodes,
    GpuNodes,
    /// Agents, policies, volumes and disruption budgets.
    Others,
}

/// All kinds of watched objects.
pub(super) const KINDS: [Kind; 4] = [Kind::Pods, Kind::Nodes, Kind::GpuNodes, Kind::Others];

/// How the API server answers the writes of one reconcile.
#[derive(Debug, Clone, Copy)]
pub(super) enum WriteResponses {
    /// All writes succeed.
    Good,
    /// Some writes fail, and some answers are lost. The number decides which.
    Faulty(u64),
}

/// How the API server answers one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteResponse {
    Done,
    /// The write is not applied.
    Failed,
    /// The write is applied, but its answer is lost.
    Lost,
    /// The request is lost.
    LostRequest,
}

impl WriteResponses {
    fn next(&mut self) -> WriteResponse {
        let Self::Faulty(seed) = self else { return WriteResponse::Done };
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        match *seed >> 61 {
            0 => WriteResponse::Failed,
            1 => WriteResponse::Lost,
            2 => WriteResponse::LostRequest,
            _ => WriteResponse::Done,
        }
    }
}

/// One replica of the operator: the real gatekeeper, with stores that lag behind the API server.
pub(super) struct Operator {
    keeper: Gatekeeper,
    cluster: Cluster,
    pods: Watch<PodObject>,
    nodes: Watch<crate::read::NodeObject>,
    gpu_nodes: Watch<kube::core::DeserializeGuard<cleave_api::GpuNode>>,
    policies: Watch<kube::core::DeserializeGuard<cleave_api::SharingPolicy>>,
    agents: Watch<crate::read::AgentPod>,
    budgets: Watch<crate::read::BudgetObject>,
    /// The resource version that each watch has reached.
    stored: Versions,
    /// The resource versions that a new leader needs.
    required: Versions,
    /// UIDs of pods with an unanswered release.
    unanswered: BTreeSet<String>,
    /// When each kind was last reported.
    reported_at: [u64; KINDS.len()],
    /// When the next reconcile is due.
    pub(super) due: Option<u64>,
    /// The result of the last reconcile.
    pub(super) last: Actions,
}

impl Operator {
    pub(super) fn new(simulation: &Simulation, reports: bool) -> Self {
        let mut operator = Self {
            keeper: Gatekeeper::default().with_settling_delay().with_reports(reports),
            cluster: Cluster::default(),
            pods: Watch::default(),
            nodes: Watch::default(),
            gpu_nodes: Watch::default(),
            policies: Watch::default(),
            agents: Watch::default(),
            budgets: Watch::default(),
            stored: Versions::default(),
            required: Versions::default(),
            unanswered: BTreeSet::new(),
            reported_at: [0; KINDS.len()],
            due: Some(0),
            last: Actions::default(),
        };
        operator.report_all(simulation);
        operator
    }

    /// Reports all changes of one kind.
    pub(super) fn report(&mut self, simulation: &Simulation, kind: Kind) {
        let api = &simulation.api;
        self.reported_at[kind as usize] = simulation.now;
        match kind {
            Kind::Pods => {
                self.pods.report(&api.pods, PodObject::trim);
                (self.cluster.pods, self.stored.pods) = (self.pods.objects(), api.version);
            }
            Kind::Nodes => {
                self.nodes.report(&api.nodes, |_| ());
                (self.cluster.nodes, self.stored.nodes) = (self.nodes.objects(), api.version);
            }
            Kind::GpuNodes => {
                self.gpu_nodes.report(&api.gpu_nodes, |_| ());
                (self.cluster.gpu_nodes, self.stored.gpu_nodes) = (self.gpu_nodes.objects(), api.version);
            }
            Kind::Others => {
                self.policies.report(&api.policies, |_| ());
                self.agents.report(&api.agents, |_| ());
                self.budgets.report(&api.budgets, |_| ());
                self.cluster.policies = self.policies.objects();
                self.cluster.agents = self.agents.objects();
                self.cluster.budgets = self.budgets.objects();
                self.cluster.volume_claims =
                    api.volume_claims.iter().map(|one| Arc::new(from_json(one.clone()))).collect();
                self.cluster.volumes = api.volumes.iter().map(|one| Arc::new(from_json(one.clone()))).collect();
                self.cluster.namespaces = api.namespaces.iter().map(|one| Arc::new(from_json(one.clone()))).collect();
            }
        }
    }

    pub(super) fn report_all(&mut self, simulation: &Simulation) {
        KINDS.iter().for_each(|kind| self.report(simulation, *kind));
    }

    /// Reports the kinds whose watch would otherwise exceed the maximum staleness.
    pub(super) fn report_stale(&mut self, simulation: &Simulation) {
        for kind in KINDS {
            if self.reported_at[kind as usize] + 30 <= simulation.now {
                self.report(simulation, kind);
            }
        }
    }

    /// Restarts the operator. Its watches list all objects.
    pub(super) fn restart(&mut self, simulation: &Simulation) {
        self.keeper.reset();
        self.report_all(simulation);
        self.due = Some(simulation.now);
    }

    /// Simulates that another process acquires the lease. The new leader's watches lag, and the new
    /// leader waits for them.
    pub(super) fn fail_over(&mut self, simulation: &Simulation) {
        self.keeper.reset();
        let version = simulation.api.version;
        self.required = Versions { pods: version, nodes: version, gpu_nodes: version };
        self.due = Some(simulation.now);
    }

    /// Reconciles, and applies the gatekeeper's decisions.
    ///
    /// # Errors
    /// Returns an error if a decision breaks a rule.
    pub(super) fn reconcile(&mut self, simulation: &mut Simulation, mut answers: WriteResponses) -> Result<(), String> {
        if !self.stored.has_reached(self.required) {
            return Ok(());
        }
        let actions = self.keeper.reconcile(&self.cluster, &BTreeMap::new(), at(simulation.now));
        // The operator sends an unanswered release again, unchanged.
        let new = actions.releases.iter().filter(|release| !self.unanswered.contains(&release.uid));
        new.into_iter().try_for_each(|release| self.check_release(release))?;
        let mut complete = true;
        for release in &actions.releases {
            complete &= self.release(simulation, release, answers.next());
        }
        complete &= self.evict(simulation, &actions.evictions, &mut answers);
        complete &= actions.stranded.recreate.is_empty() && actions.stranded.placed_reports.is_empty();
        self.apply_stranded_actions(simulation, &actions, &mut answers);
        for report in &actions.reports {
            let reason = if report.message.is_some() { "Unschedulable" } else { "SchedulingGated" };
            let target = (report.pod.as_str(), report.uid.as_str(), Some(report.version.as_str()));
            if !write_condition(simulation, target, ("PodScheduled", "False", reason), answers.next()) {
                self.keeper.record_failed_report(&report.uid);
                complete = false;
            }
        }
        let retry = (!complete).then_some(simulation.now + RETRY_DELAY_SECONDS);
        let requeue =
            actions.requeue.map(|delay| simulation.now + delay.as_secs() + u64::from(delay.subsec_nanos() > 0));
        let more = actions.more.then_some(simulation.now);
        self.due = [retry, requeue, more].into_iter().flatten().min();
        self.last = actions;
        self.record_dropped_reservations(simulation)
    }

    /// Checks that a release names only nodes and devices that the operator sees.
    fn check_release(&self, release: &Release) -> Result<(), String> {
        let ReleaseReason::Reserved(placement) = &release.reason else { return Ok(()) };
        for (node, parts) in &placement.nodes {
            let object = self.gpu_nodes.0.get(node).map(|(_, object)| object);
            let status = object.and_then(|object| object.0.as_ref().ok()?.status.as_ref());
            let slices = status.into_iter().flat_map(|status| &status.gpus).flat_map(|gpu| &gpu.slices);
            let devices: Vec<&str> = slices.map(|slice| slice.device.as_str()).collect();
            let known = parts.iter().all(|part| devices.contains(&part.device.as_str()));
            if !known || !self.nodes.0.contains_key(node) {
                return Err(format!("{} is released to {placement:?}, but {node} has {devices:?}", release.pod));
            }
        }
        Ok(())
    }

    /// Sends the patch of a release. Returns false if a retry is necessary.
    fn release(&mut self, simulation: &mut Simulation, release: &Release, answer: WriteResponse) -> bool {
        let mut release = release.clone();
        if release.reported {
            let version = patch::resource_version(&release.patch).unwrap().to_owned();
            let target = (release.pod.as_str(), release.uid.as_str(), Some(version.as_str()));
            let condition = ("PodScheduled", "False", "SchedulingGated");
            let is_same = has_version(simulation, target);
            if !is_same || !write_condition(simulation, target, condition, answer) {
                self.keeper.record_failed_release(&release.pod);
                return false;
            }
            let written = text(&simulation.api.pods[&release.pod], "/metadata/resourceVersion").to_owned();
            release.patch = patch::with_resource_version(&release.patch, written);
            release.reported = false;
        }
        let applied =
            matches!(answer, WriteResponse::Done | WriteResponse::Lost) && simulation.api.apply_release(&release);
        let reason = &release.reason;
        simulation.log(|| format!("release of {} ({reason:?}): {answer:?}, applied: {applied}", release.pod));
        if applied {
            simulation.released_at.insert(release.uid.clone(), simulation.now);
        }
        match answer {
            WriteResponse::Done if applied => self.keeper.record_release(&release.pod),
            WriteResponse::Done if simulation.uid(&release.pod).is_some() => {
                self.keeper.record_refused_release(
                    &release.pod,
                    "the test failed",
                    Duration::from_secs(simulation.now),
                );
            }
            WriteResponse::Done => {
                self.keeper.record_missing_pod(&release.pod, &release.uid, Duration::from_secs(simulation.now));
                return true;
            }
            WriteResponse::Failed => self.keeper.record_failed_release(&release.pod),
            WriteResponse::Lost | WriteResponse::LostRequest => {
                self.unanswered.insert(release.uid.clone());
                self.keeper.record_unanswered_release(release);
            }
        }
        answer == WriteResponse::Done && applied
    }

    /// Evicts victims, as `run` does. Returns false if a retry is necessary.
    fn evict(&mut self, simulation: &mut Simulation, evictions: &[Eviction], answers: &mut WriteResponses) -> bool {
        let mut unsuccessful: Vec<&str> = Vec::new();
        for eviction in evictions {
            if unsuccessful.contains(&eviction.preemptor.as_str()) {
                continue;
            }
            simulation.log(|| format!("preemption of {} for {}", eviction.pod, eviction.preemptor));
            let owner = controller_uid(simulation, &eviction.pod);
            let result = evict(simulation, (&eviction.pod, &eviction.uid, None), answers.next());
            if result == EvictionResult::Done {
                *simulation.recreations.entry(owner).or_default() += 1;
            }
            self.keeper.record_eviction(eviction, &result, Duration::from_secs(simulation.now));
            if !matches!(result, EvictionResult::Done | EvictionResult::NotFound) {
                unsuccessful.push(&eviction.preemptor);
            }
        }
        unsuccessful.is_empty()
    }

    /// Evicts stranded pods, and writes the condition of stranded pods that no controller
    /// recreates.
    fn apply_stranded_actions(&mut self, simulation: &mut Simulation, actions: &Actions, answers: &mut WriteResponses) {
        for one in &actions.stranded.recreate {
            let owner = controller_uid(simulation, &one.pod);
            simulation.log(|| format!("eviction of {}: {}", one.pod, one.message));
            match evict(simulation, (&one.pod, &one.uid, Some(&one.version)), answers.next()) {
                EvictionResult::Done => *simulation.recreations.entry(owner).or_default() += 1,
                EvictionResult::NotFound => {}
                _ => self.keeper.record_failed_eviction(&one.uid, Duration::from_secs(simulation.now)),
            }
        }
        for one in &actions.stranded.placed_reports {
            simulation.log(|| format!("report for {}: {:?}", one.pod, one.message));
            let status = if one.message.is_some() { ("False", "Stranded") } else { ("True", "Bound") };
            let condition = (CONDITION_PLACED, status.0, status.1);
            if !write_condition(simulation, (&one.pod, &one.uid, None), condition, answers.next()) {
                self.keeper.record_failed_placed_report(&one.uid);
            }
        }
    }

    /// Records the pods whose reservation the operator has dropped.
    fn record_dropped_reservations(&self, simulation: &mut Simulation) -> Result<(), String> {
        for pod in self.pods.0.values().map(|(_, pod)| pod) {
            let released = pod.node().is_none() && pod.spec.scheduling_gates.is_empty();
            let Some(placement) = pod.placement.as_ref().filter(|_| released) else { continue };
            let name = crate::pods::full_name(&pod.metadata);
            let uid = pod.uid().unwrap_or_default();
            let has_claim = self.keeper.ledger().is_some_and(|ledger| ledger.claim(&name).is_some());
            if !has_claim && pod.metadata.deletion_timestamp.is_none() {
                if placement.until > EPOCH_SECONDS + simulation.now {
                    return Err(format!("{name} lost its reservation before {}", placement.until - EPOCH_SECONDS));
                }
                if simulation.dropped.insert(uid) {
                    simulation.log(|| format!("the reservation of {name} has ended"));
                }
            }
        }
        Ok(())
    }
}

/// A pod as `namespace/name`, its UID, and its `resourceVersion`.
type VersionedPod<'a> = (&'a str, &'a str, Option<&'a str>);

/// Returns the UID of a pod's controller. Empty without a controller.
fn controller_uid(simulation: &Simulation, pod: &str) -> String {
    simulation.api.pods.get(pod).map_or_else(String::new, |pod| text(pod, "/metadata/ownerReferences/0/uid").to_owned())
}

/// Returns whether the API server has this version of the pod.
fn has_version(simulation: &Simulation, (pod, uid, version): VersionedPod<'_>) -> bool {
    simulation.api.pods.get(pod).is_some_and(|pod| {
        text(pod, "/metadata/uid") == uid
            && version.is_none_or(|version| text(pod, "/metadata/resourceVersion") == version)
    })
}

/// Writes a condition of a pod: type, status and reason. Returns false if the write failed.
fn write_condition(
    simulation: &mut Simulation,
    target: VersionedPod<'_>,
    (kind, status, reason): (&str, &str, &str),
    answer: WriteResponse,
) -> bool {
    if matches!(answer, WriteResponse::Done | WriteResponse::Lost) && has_version(simulation, target) {
        simulation.set_condition(target.0, kind, status, reason);
    }
    answer == WriteResponse::Done
}

/// Evicts a pod as the API server does.
fn evict(simulation: &mut Simulation, target: VersionedPod<'_>, answer: WriteResponse) -> EvictionResult {
    if matches!(answer, WriteResponse::Failed | WriteResponse::LostRequest) {
        return EvictionResult::Failed("lost".to_owned());
    }
    if !has_version(simulation, target) {
        return EvictionResult::NotFound;
    }
    let pod = &simulation.api.pods[target.0];
    // Budgets do not protect pods that do not run.
    if pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null() {
        let app = &pod["metadata"]["labels"];
        let budgets =
            simulation.api.budgets.iter().filter(|(_, budget)| budget["spec"]["selector"]["matchLabels"] == *app);
        let budgets: Vec<(String, i64)> = budgets
            .map(|(name, budget)| (name.clone(), budget["status"]["disruptionsAllowed"].as_i64().unwrap()))
            .collect();
        match budgets.as_slice() {
            [] => {}
            [(_, 0)] => return EvictionResult::Protected("no disruption allowed".to_owned()),
            [(name, allowed)] => {
                let left = allowed - 1;
                simulation.api.change(
                    |api| &mut api.budgets,
                    name,
                    |budget| budget["status"]["disruptionsAllowed"] = left.into(),
                );
            }
            _ => return EvictionResult::Refused("several budgets".to_owned()),
        }
    }
    simulation.delete(target.0, false, 3);
    if answer == WriteResponse::Lost { EvictionResult::Failed("lost".to_owned()) } else { EvictionResult::Done }
}

/// Returns whether this owner recreates evicted pods, so that the operator evicts its stranded
/// pods.
pub(super) fn is_replaced(owner: Owner) -> bool {
    matches!(owner, Owner::ReplicaSet | Owner::StatefulSet)
}

/// Returns whether the condition of a pod states that the pod is stranded.
pub(super) fn has_stranded_condition(pod: &Value) -> bool {
    list(pod, "/status/conditions").iter().any(|one| one["type"] == CONDITION_PLACED && one["status"] == "False")
}

/// Returns the reserved units of a released pod that has no allocation yet, each with its device.
/// Excludes dropped reservations, and devices whose units pods without a reservation received.
pub(super) fn units_reserved_for(simulation: &Simulation, pod: &Value) -> Vec<(String, u32)> {
    let uid = text(pod, "/metadata/uid");
    if simulation.allocations.contains_key(uid) || simulation.dropped.contains(uid) {
        return Vec::new();
    }
    let Some(placement) = TestCluster::placement(pod) else { return Vec::new() };
    let nodes = placement.nodes.into_iter().filter(|(node, _)| node_of(pod).is_none_or(|bound| bound == node));
    let parts = nodes.flat_map(|(_, parts)| parts).filter(|part| !simulation.is_disturbed(uid, &part.device));
    parts.map(|part| (part.device, part.units)).collect()
}
