//! Determines the state of one pod.
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_api::gpunode::GpuStatus;
use cleave_api::names::GATE;
use cleave_operator::dry_run;
use cleave_operator::placement::{Gatekeeper, ReleaseReason, UNSCHEDULABLE_AFTER};
use cleave_operator::pods::{PodObject, claimant, full_name};
use cleave_plan::ledger::{DeviceRequest, Ledger};
use cleave_plan::snapshot::Pod as PlanPod;

use super::live::{LiveCluster, run_placement_gate};
use super::quota::quota_sentences;
use super::report::{Assignment, Explanation, PodState, PodVerdict, RequestedUnits};

/// A pod, and the state of the cluster that explains the pod's state.
pub(super) struct PodContext<'a> {
    pub(super) live: &'a LiveCluster,
    /// Allocations and reservations, except those of pods that still have the placement gate.
    pub(super) ledger: &'a Ledger,
    pub(super) pod: &'a PodObject,
    /// `namespace/name` of the pod.
    pub(super) name: &'a str,
    /// The requests of the pod. One device must have all units of a request.
    pub(super) device_requests: &'a [DeviceRequest],
}

/// Explains the state of the pod `namespace/name`. Returns `None` if the cluster has no such pod.
pub fn explain_pod(live: &LiveCluster, name: &str) -> Option<Explanation> {
    let pod = live.cluster.pods.iter().find(|pod| full_name(&pod.metadata) == name)?;
    let device_requests = pod.device_requests();
    let mut others = Gatekeeper::default();
    run_placement_gate(&mut others, &live.without_gated_pods(), &BTreeMap::new(), Duration::ZERO, live.now);
    let empty = Ledger::default();
    let ledger = others.ledger().unwrap_or(&empty);
    let view = PodContext { live, ledger, pod, name, device_requests: &device_requests };
    let verdict = view.verdict();
    let assignments = view.assignments();
    let nodes = view.node_views(&assignments, verdict.state);
    let help = if verdict.state.runs_only_after_a_change() { view.suggestions(&nodes) } else { Vec::new() };
    Some(Explanation {
        pod: name.to_owned(),
        priority: pod.spec.priority.unwrap_or(0),
        gates: pod.spec.scheduling_gates.iter().map(|gate| gate.name.clone()).collect(),
        requests: device_requests
            .iter()
            .map(|request| RequestedUnits { resource: request.resource.clone(), units: request.units.get() })
            .collect(),
        assignments,
        quotas: quota_sentences(live, pod),
        verdict,
        other_nodes: live.cluster.nodes.len().saturating_sub(nodes.len()),
        nodes,
        help,
    })
}

fn new_verdict(state: PodState, message: impl Into<String>) -> PodVerdict {
    PodVerdict { state, message: message.into() }
}

impl PodContext<'_> {
    fn verdict(&self) -> PodVerdict {
        let pod = self.pod;
        if self.pod.has_ended() {
            return new_verdict(PodState::Ended, format!("The pod has ended: {}.", pod.status.phase));
        }
        let deleted = pod.metadata.deletion_timestamp.is_some();
        if let Some(node) = pod.node() {
            let deleted = if deleted {
                " The pod is being deleted, and its GPUs stay allocated until its containers exit."
            } else {
                ""
            };
            return new_verdict(PodState::Bound, format!("The pod is on node {node}.{deleted}"));
        }
        if deleted {
            return new_verdict(PodState::Ended, "The pod is being deleted. It has no node.");
        }
        let gates = pod.spec.scheduling_gates.iter().map(|gate| gate.name.as_str());
        let others: Vec<&str> = gates.filter(|&gate| gate != GATE).collect();
        if !others.is_empty() {
            let others = others.join(", ");
            let message = format!(
                "The pod waits for {others}. Cleave places the pod when the placement gate is the only remaining gate."
            );
            return new_verdict(PodState::OtherGate, message);
        }
        if pod.spec.scheduling_gates.is_empty() { self.released_verdict() } else { self.gated_verdict() }
    }

    /// Returns the verdict on a pod whose only gate is the placement gate.
    fn gated_verdict(&self) -> PodVerdict {
        let demand = dry_run::dry_run(&self.live.observed).map(|run| run.outcome.waiting).unwrap_or_default();
        let mut keeper = Gatekeeper::default();
        let mut decide = |up| run_placement_gate(&mut keeper, &self.live.cluster, &demand, up, self.live.now);
        let mut decisions = decide(Duration::ZERO);
        if !decisions.released.contains_key(self.name) {
            // The gatekeeper delays the release of a pod that fits nowhere: a new policy may not be
            // applied yet.
            decisions = decide(UNSCHEDULABLE_AFTER);
        }
        match decisions.released.get(self.name) {
            Some(ReleaseReason::Reserved(placement)) => {
                let nodes: Vec<&str> = placement.nodes.keys().map(String::as_str).collect();
                let nodes = nodes.join(", ");
                new_verdict(PodState::Fits, format!("There is room on {nodes}. The operator will release the pod."))
            }
            Some(ReleaseReason::OtherPlugin) => new_verdict(
                PodState::Fits,
                "Another device plugin's nodes have room. The operator will release the pod to them.",
            ),
            Some(ReleaseReason::NotServed) => new_verdict(
                PodState::NotManaged,
                "The pod requests nothing that Cleave serves. The operator will release it.",
            ),
            Some(ReleaseReason::Unschedulable(message)) => {
                new_verdict(PodState::Never, format!("The pod fits on no GPU: {}.", without_full_stop(message)))
            }
            None => {
                let message = decisions.waiting.get(self.name).map_or("no GPU has room now", String::as_str);
                new_verdict(PodState::Waiting, format!("The pod waits: {}.", without_full_stop(message)))
            }
        }
    }

    /// Returns the verdict on a pod that has no gate and no node.
    fn released_verdict(&self) -> PodVerdict {
        match self.pod.placement.as_ref() {
            Some(placement) if self.has_reservation() => {
                let nodes: Vec<&str> = placement.nodes.keys().map(String::as_str).collect();
                let nodes = nodes.join(", ");
                let message = match placement.until.checked_sub(self.live.now) {
                    Some(left @ 1..) => format!(
                        "The pod has a reservation on {nodes} for another {left} s and waits for the scheduler."
                    ),
                    // The annotation still contains the first expiry.
                    _ => format!("The pod has a renewed reservation on {nodes} and waits for the scheduler."),
                };
                new_verdict(PodState::Reserved, message)
            }
            Some(_) => new_verdict(
                PodState::Scheduler,
                "The reservation expired before the scheduler bound the pod. The scheduler continues without a reservation.",
            ),
            None if self.device_requests.is_empty() => {
                new_verdict(PodState::NotManaged, "The pod requests nothing that Cleave serves.")
            }
            None => new_verdict(
                PodState::Scheduler,
                "The pod waits for the scheduler. It has no placement gate and no reservation.",
            ),
        }
    }

    /// Returns whether the operator keeps the reservation of a released pod. The operator renews an
    /// expired reservation a limited number of times, unless the scheduler refused the pod. A
    /// renewal does not change the annotation.
    fn has_reservation(&self) -> bool {
        self.ledger.claim(self.name).is_some()
    }

    /// Returns the allocations of the pod, or its reservation.
    fn assignments(&self) -> Vec<Assignment> {
        let allocations = self.allocations();
        if allocations.is_empty() && !self.pod.has_ended() { self.reservation() } else { allocations }
    }

    fn allocations(&self) -> Vec<Assignment> {
        let allocations =
            self.gpus().flat_map(|(node, gpu)| gpu.allocations.iter().map(move |allocation| (node, gpu, allocation)));
        let own = allocations.filter(|(_, _, allocation)| allocation.pod == self.name);
        own.map(|(node, gpu, allocation)| Assignment {
            node: node.to_owned(),
            gpu: Some(gpu.index),
            device: allocation.device.clone(),
            resource: allocation.resource.clone(),
            units: u32::try_from(allocation.ids.len()).unwrap_or(u32::MAX),
            container: Some(allocation.container.clone()),
        })
        .collect()
    }

    fn reservation(&self) -> Vec<Assignment> {
        let mut indices: BTreeMap<(&str, &str), u32> = BTreeMap::new();
        for (node, gpu) in self.gpus() {
            indices.insert((node, &gpu.uuid), gpu.index);
            indices.extend(gpu.slices.iter().map(|slice| ((node, slice.device.as_str()), gpu.index)));
        }
        let mut assignments = Vec::new();
        let Some(placement) = self.pod.placement.as_ref() else { return assignments };
        // The reservations of an unbound pod are valid while the operator keeps them. After the pod
        // is bound, only the reservation on its node is valid.
        let valid = |node: &str| self.pod.node().map_or(self.has_reservation(), |bound| bound == node);
        for (node, reserved) in placement.nodes.iter().filter(|(node, _)| valid(node)) {
            assignments.extend(reserved.iter().map(|reserved| Assignment {
                node: node.clone(),
                gpu: indices.get(&(node.as_str(), reserved.device.as_str())).copied(),
                device: reserved.device.clone(),
                resource: reserved.resource.clone(),
                units: reserved.units,
                container: None,
            }));
        }
        assignments
    }

    /// Returns the GPUs that agents report, with their nodes.
    pub(super) fn gpus(&self) -> impl Iterator<Item = (&str, &GpuStatus)> {
        let nodes = self.live.observed.nodes.iter();
        nodes.flat_map(|(name, node)| node.reported().unwrap_or_default().iter().map(move |gpu| (name.as_str(), gpu)))
    }

    /// Returns the input of planning for the pod.
    pub(super) fn planning_pod(&self) -> PlanPod {
        let plain = || PlanPod { requests: self.pod.spec.requests.clone(), ..PlanPod::default() };
        claimant(self.pod).map_or_else(plain, |claimant| claimant.pod)
    }
}

/// Returns a message without its full stop, so that a sentence can contain the message.
fn without_full_stop(message: &str) -> &str {
    message.trim_end().trim_end_matches('.')
}
