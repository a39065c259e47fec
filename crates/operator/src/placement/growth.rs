//! Decides which pods at the gate are reported to cluster autoscalers. Pure: callers pass in the
//! time.
//!
//! Karpenter and the Cluster Autoscaler add nodes for pods whose condition `PodScheduled` is
//! `False` with the reason `Unschedulable`. These autoscalers do not read `spec.schedulingGates`.
//! The API server gives gated pods the reason `SchedulingGated`, and the scheduler never examines
//! them. So the operator writes `Unschedulable` for a pod that needs another node. When another
//! node would no longer help, the operator writes `SchedulingGated` again. The pod remains at the
//! gate. If an autoscaler adds a node, the pod gets a reservation.
//!
//! | a pod at the gate | is reported |
//! |---|---|
//! | finds too few free units, and no preemption, repartitioning or returning unit will serve it | after [`FULL_AFTER`] |
//! | is in a gang of which a pod finds too few free units | like this pod |
//! | fits no node of the cluster, but a policy allows its request | after [`NO_NODE_AFTER`] |
//! | requests more than one GPU has | never |
//! | waits for a preemption, a repartitioning, an MPS host or the agent of a node | not now |
//! | fits a node whose agent is not ready, or a GPU that is being repartitioned | if that lasts ([`returning`](super::returning)) |
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::SharingPolicy;
use cleave_api::names::{RESOURCE_GPU, is_served, mig_resource};
use cleave_plan::ledger::DeviceRequest;
use cleave_plan::mps::MAX_CLIENTS;
use cleave_plan::snapshot::Pod as PlanPod;
use kube::ResourceExt;
use kube::core::DeserializeGuard;

use super::actions::{Actions, AutoscalerReport};
use super::search::{Candidate, NodeKey};
use super::verdict::PreemptionProspect;
use super::verdict::{AutoscalerNeed, PermanentObstacle, Verdict};
use crate::pods::PodObject;
use crate::policies::demand::{Reason, WaitingPod};
use crate::policies::validate::{
    InstanceShare, MpsShare, ReplicaRules, ShareSize, SharingMode, shared_instance_resource, validate,
};

/// How long a pod must find no free units before it is reported. Other pods may end and free units.
pub(super) const FULL_AFTER: Duration = Duration::from_secs(10);
/// How long a pod must fit no node before it is reported. A `GpuNode` may be absent for some time,
/// for example while agents start.
pub(super) const NO_NODE_AFTER: Duration = Duration::from_secs(30);
/// How long a pod that is too large for every GPU is not reported again. If an autoscaler added a
/// node for the pod, the node did not help, and the autoscaler must not add another node.
const TOO_LARGE_BACKOFF: Duration = Duration::from_secs(3600);
/// How long a pod must be too large before it counts as too large. A GPU may temporarily have fewer
/// units, for example while its policy changes.
pub(super) const TOO_LARGE_AFTER: Duration = Duration::from_secs(30);
/// Maximum time for which evictions for a pod are delayed because the pod is about to get units
/// without evictions.
pub(super) const MAX_PREEMPTION_PAUSE: Duration = Duration::from_secs(60);
/// Delay before the operator repeats a report that the watch has not delivered.
const WRITE_AGAIN_AFTER: Duration = Duration::from_secs(10);
/// Maximum number of reports in one reconcile.
const MAX_REPORTS: usize = 64;
/// Delay before the next reconcile if there are more reports.
const NEXT_REPORTS_DELAY: Duration = Duration::from_millis(50);

/// Whether the policies allow a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PolicySupport {
    /// No policy allows the resource.
    Nothing,
    /// A policy allows the resource, but too few units of one device.
    TooFew,
    /// A policy allows enough units of one device.
    Enough,
}

/// The units of GPUs that the policies allow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct AllowedUnits {
    /// The maximum number of units of one device, by resource.
    units: BTreeMap<String, u32>,
    /// Whether a policy partitions GPUs on demand. Such a policy may allow any resource and size.
    any: bool,
}

impl AllowedUnits {
    /// Returns the units that these policies allow. Malformed and invalid policies allow no units.
    pub(super) fn of_policies<'a>(policies: impl Iterator<Item = &'a DeserializeGuard<SharingPolicy>>) -> Self {
        let mut allowed = Self::default();
        for policy in policies.filter_map(|policy| policy.0.as_ref().ok()) {
            if let Ok(valid) = validate(&policy.name_any(), None, &policy.spec) {
                allowed.add_mode(&valid.share);
            }
        }
        allowed
    }

    fn add_mode(&mut self, share: &SharingMode) {
        match share {
            SharingMode::Whole => self.add_units(RESOURCE_GPU.to_owned(), 1),
            SharingMode::Mps(mps) => self.add_units(mps.resource().to_owned(), max_shares(mps)),
            SharingMode::TimeSlicing(slicing) => self.add_units(slicing.resource().to_owned(), slicing.replicas),
            SharingMode::Mig { layout, each } => {
                for profile in layout {
                    match each {
                        InstanceShare::Whole => self.add_units(mig_resource(profile), 1),
                        InstanceShare::Mps(mps) => {
                            self.add_units(shared_instance_resource(profile, mps.resource.as_deref()), max_shares(mps));
                        }
                        InstanceShare::TimeSlicing(ReplicaRules { replicas, resource, .. }) => {
                            self.add_units(shared_instance_resource(profile, resource.as_deref()), *replicas);
                        }
                    }
                }
            }
            SharingMode::Demand(_) => self.any = true,
        }
    }

    fn add_units(&mut self, resource: String, units: u32) {
        let most = self.units.entry(resource).or_default();
        *most = units.max(*most);
    }

    /// Returns the lowest support that the policies have for one of these requests.
    fn least_support(&self, requests: &[DeviceRequest]) -> PolicySupport {
        let support = |request: &DeviceRequest| match self.units.get(&request.resource) {
            Some(units) if *units >= request.units.get() => PolicySupport::Enough,
            _ if self.any && is_served(&request.resource) => PolicySupport::Enough,
            Some(_) => PolicySupport::TooFew,
            None => PolicySupport::Nothing,
        };
        requests.iter().map(support).min().unwrap_or(PolicySupport::Nothing)
    }

    /// Returns the need of a pod that is not placeable and will not get units of the cluster's
    /// GPUs.
    fn need(&self, requests: &[DeviceRequest], impossible: Option<PermanentObstacle>) -> AutoscalerNeed {
        match (impossible, self.least_support(requests)) {
            (None, _) => AutoscalerNeed::Node(FULL_AFTER),
            (Some(PermanentObstacle::TooLarge), _) | (Some(_), PolicySupport::TooFew) => AutoscalerNeed::LargerGpu,
            (Some(PermanentObstacle::Excluded | PermanentObstacle::NotServed), PolicySupport::Enough) => {
                AutoscalerNeed::Node(NO_NODE_AFTER)
            }
            (Some(PermanentObstacle::Excluded | PermanentObstacle::NotServed), PolicySupport::Nothing) => {
                AutoscalerNeed::Nothing
            }
        }
    }
}

/// The inputs, apart from the verdict, that determine the need of a pod that is not placeable.
pub(super) struct NeedInputs<'a> {
    pub(super) offers: &'a AllowedUnits,
    /// Why the pod waits, according to the plan for GPUs that are partitioned on demand.
    pub(super) demand: Option<&'a WaitingPod>,
    /// Whether preemption frees units for the pod.
    pub(super) preemption: PreemptionProspect,
    /// Which MPS hosts are being replaced on nodes that the pod may use. Empty if no MPS host
    /// is being replaced.
    pub(super) withheld: String,
    /// Whether the pod fits units that are about to return. See [`super::returning`].
    pub(super) returns: bool,
}

impl<'a> NeedInputs<'a> {
    /// Returns the inputs before the search for preemption victims.
    pub(super) const fn new(
        offers: &'a AllowedUnits,
        demand: Option<&'a WaitingPod>,
        withheld: String,
        returns: bool,
    ) -> Self {
        Self { offers, demand, preemption: PreemptionProspect::Unknown, withheld, returns }
    }

    /// Returns whether the pod is about to get units without evictions.
    pub(super) fn gets_units_without_evictions(&self, candidate: &Candidate<'_>) -> bool {
        let planned = |waiting: &WaitingPod| {
            matches!(waiting.reason, Reason::Repartitioning | Reason::Scheduler | Reason::NodeChanging)
        };
        self.returns || !self.withheld.is_empty() || candidate.planned_wait(self.demand).is_some_and(planned)
    }
}

/// Why a pod that is not placeable waits.
pub(super) struct PlacementOutlook {
    pub(super) need: AutoscalerNeed,
    /// The explanation for the owner of the pod.
    pub(super) message: String,
    /// Whether the pod may become placeable while it waits at the gate.
    pub(super) may_pass: bool,
}

/// Returns the maximum number of shares of one GPU. If the policy states a share's memory, the
/// number depends on the GPU, and the policy may apply to GPUs of any size.
fn max_shares(mps: &MpsShare) -> u32 {
    match mps.size {
        ShareSize::Units(units) => units,
        ShareSize::Memory(_) => MAX_CLIENTS,
    }
}

/// Pods that are reported, and that may use the same nodes.
#[derive(Debug)]
pub(super) struct ReportedPods {
    /// One of the pods. All of them have the same node selector, affinity and tolerations.
    pub(super) pod: PlanPod,
    /// The smallest request among these pods, by resource.
    pub(super) smallest: BTreeMap<String, u64>,
}

/// The need of each pod at the gate, and the last report about the pod.
#[derive(Debug)]
pub(super) struct AutoscalerReports {
    enabled: bool,
    /// Pods at the gate, by UID.
    pods: BTreeMap<String, UnplaceablePod>,
    /// The pods that are reported.
    reported: Vec<ReportedPods>,
}

/// A pod at the gate that was not placeable. Times are durations since the process started.
#[derive(Debug, Default)]
struct UnplaceablePod {
    /// When the pod is reported, if it needs a node.
    due: Option<Duration>,
    /// When the pod became too large.
    too_large_since: Option<Duration>,
    /// When the pod was last too large for at least [`TOO_LARGE_AFTER`].
    too_large: Option<Duration>,
    /// When the pod was first about to get units without evictions.
    room_since: Option<Duration>,
    /// Whether the last write reported the pod, and the time of the write.
    written: Option<(bool, Duration)>,
}

impl AutoscalerReports {
    /// Creates the reports without pods. If `enabled` is false, no pod is reported, and earlier
    /// reports are withdrawn.
    pub(super) const fn new(enabled: bool) -> Self {
        Self { enabled, pods: BTreeMap::new(), reported: Vec::new() }
    }

    /// Returns whether reports are enabled.
    pub(super) const fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Returns the pods that must be reported.
    pub(super) fn reported(&self) -> &[ReportedPods] {
        &self.reported
    }

    /// Returns how long to delay evictions for the pod, because the pod is about to get units
    /// without evictions. Returns `None` if there is no delay.
    pub(super) fn preemption_pause(
        &mut self,
        candidate: &Candidate<'_>,
        circumstances: &NeedInputs<'_>,
        up: Duration,
    ) -> Option<Duration> {
        let waiter = self.pods.entry(candidate.pod.uid().unwrap_or_default()).or_default();
        let makes_room = circumstances.gets_units_without_evictions(candidate);
        waiter.room_since = makes_room.then(|| waiter.room_since.unwrap_or(up));
        let pause = waiter.room_since?.saturating_add(MAX_PREEMPTION_PAUSE).saturating_sub(up);
        (!pause.is_zero()).then_some(pause)
    }

    /// Records that the operator itself delays the pod. Another node would not help.
    pub(super) fn record_delayed(&mut self, pod: &PodObject, up: Duration) {
        self.record_need(&pod.uid().unwrap_or_default(), AutoscalerNeed::Nothing, true, up);
    }

    /// Determines and records the need of a pod that is not placeable.
    pub(super) fn examine(
        &mut self,
        candidate: &Candidate<'_>,
        verdict: Verdict,
        circumstances: &NeedInputs<'_>,
        up: Duration,
    ) -> PlacementOutlook {
        let NeedInputs { offers, demand, preemption, withheld, .. } = circumstances;
        let gets_room =
            *preemption == PreemptionProspect::Nominated || circumstances.gets_units_without_evictions(candidate);
        let need = if gets_room || candidate.awaits_agent() {
            AutoscalerNeed::Nothing
        } else {
            offers.need(&candidate.device_requests, verdict.permanent_obstacle())
        };
        let reported = candidate.pod.is_reported_unschedulable();
        // A search for preemption victims may show that the pod needs no new node. Do not withdraw
        // an existing report while the pod waits for another search.
        let is_decided = *preemption != PreemptionProspect::Unknown || reported;
        let uid = candidate.pod.uid().unwrap_or_default();
        self.record_need(&uid, need, is_decided, up);
        if verdict.permanent_obstacle().is_none() {
            self.forget_too_large(&uid);
        }
        let (message, may_pass) = candidate.explain(verdict, *demand);
        // An autoscaler may add a node for the pod while the pod waits at the gate.
        let may_pass = may_pass || self.enabled && matches!(need, AutoscalerNeed::Node(_));
        PlacementOutlook { need, message: message + withheld, may_pass }
    }

    /// Records the need of a pod. A need for a node that is not decided yet does not make a report
    /// due.
    fn record_need(&mut self, uid: &str, need: AutoscalerNeed, is_decided: bool, up: Duration) {
        let waiter = self.pods.entry(uid.to_owned()).or_default();
        // The pod was too large until now.
        if waiter.too_large_since.is_some_and(|since| since.saturating_add(TOO_LARGE_AFTER) <= up) {
            waiter.too_large = Some(up);
        }
        let since = waiter.too_large_since.take();
        match need {
            AutoscalerNeed::Node(_) if !is_decided => {}
            AutoscalerNeed::Node(patience) => waiter.due = waiter.due.or(Some(up.saturating_add(patience))),
            AutoscalerNeed::LargerGpu => (waiter.due, waiter.too_large_since) = (None, since.or(Some(up))),
            AutoscalerNeed::Nothing => waiter.due = None,
        }
    }

    /// Records that a GPU of the cluster is large enough for the pod.
    fn forget_too_large(&mut self, uid: &str) {
        if let Some(waiter) = self.pods.get_mut(uid) {
            waiter.too_large = None;
        }
    }

    /// Records that a report could not be written. A later reconcile retries the write.
    pub(super) fn record_failed_write(&mut self, uid: &str) {
        if let Some(waiter) = self.pods.get_mut(uid) {
            waiter.written = None;
        }
    }

    /// Adds the reports about the pods that remain at the gate. Forgets all other pods.
    pub(super) fn add_reports(&mut self, candidates: &[Candidate<'_>], up: Duration, actions: &mut Actions) {
        let mut before = std::mem::take(&mut self.pods);
        let mut groups: BTreeMap<NodeKey<'_>, ReportedPods> = BTreeMap::new();
        let released: BTreeSet<String> = actions.releases.iter().map(|release| release.uid.clone()).collect();
        for candidate in candidates {
            let uid = candidate.pod.uid().unwrap_or_default();
            let Some(mut waiter) = before.remove(&uid).filter(|_| !released.contains(&uid)) else { continue };
            let reported = candidate.pod.is_reported_unschedulable();
            let wanted = self.enabled && waiter.is_report_due(reported, up);
            if wanted {
                actions.reported += 1;
                let new = || ReportedPods { pod: candidate.plan_pod.clone(), smallest: BTreeMap::new() };
                groups.entry(candidate.node_key()).or_insert_with(new).add_pod(&candidate.device_requests);
            }
            if let Some(due) = waiter.due.filter(|due| self.enabled && up < *due && !wanted) {
                actions.requeue_in(due.saturating_sub(up));
            }
            if wanted == reported {
                waiter.written = None;
            } else if let Some(again) = waiter.earliest_rewrite(wanted).filter(|again| up < *again) {
                actions.requeue_in(again.saturating_sub(up));
            } else if actions.reports.len() >= MAX_REPORTS {
                actions.requeue_in(NEXT_REPORTS_DELAY);
            } else {
                waiter.written = Some((wanted, up));
                let message = actions.waiting.get(&candidate.name).map(|waiting| waiting.message.as_str());
                actions.reports.push(AutoscalerReport {
                    pod: candidate.name.clone(),
                    uid: uid.clone(),
                    version: candidate.pod.resource_version().unwrap_or_default(),
                    message: wanted.then(|| message.unwrap_or_default().to_owned()),
                });
            }
            self.pods.insert(uid, waiter);
        }
        self.reported = groups.into_values().collect();
    }
}

impl ReportedPods {
    fn add_pod(&mut self, requests: &[DeviceRequest]) {
        let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
        for request in requests {
            *sums.entry(&request.resource).or_default() += u64::from(request.units.get());
        }
        for (resource, units) in sums {
            let smallest = self.smallest.entry(resource.to_owned()).or_insert(units);
            *smallest = units.min(*smallest);
        }
    }
}

impl UnplaceablePod {
    /// Returns whether the pod must be reported. After a change of the leader, an existing report
    /// remains even before the new leader has waited.
    fn is_report_due(&self, reported: bool, up: Duration) -> bool {
        let futile = self.too_large.is_some_and(|at| up < at.saturating_add(TOO_LARGE_BACKOFF));
        !futile && self.due.is_some_and(|due| due <= up || reported)
    }

    /// Returns the earliest time to write the same report again. Returns `None` if the last report
    /// differs or does not exist.
    fn earliest_rewrite(&self, wanted: bool) -> Option<Duration> {
        let (written, at) = self.written?;
        (written == wanted).then(|| at.saturating_add(WRITE_AGAIN_AFTER))
    }
}
