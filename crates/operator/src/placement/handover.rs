//! Restores the nominations for which an earlier leader of the operator evicted pods.
//!
//! Before the operator evicts pods by the rules of quotas, it writes the nomination to an
//! annotation of the waiting pod. The next leader nominates the pod for the same units. Otherwise
//! the next leader could evict more pods for the same pod while the first victims terminate.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::placement::{EvictedGang, Placement, ReservedUnits};
use cleave_plan::ledger::{DeviceRequest, Holders, Ledger, Nomination, PendingPod, Preemption};

use crate::pods::PodObject;

/// Returns the nomination for the annotation of the waiting pod. `evicts` are the gangs that are
/// evicted for the pod. `until` is the time at which the nomination expires, in seconds since the
/// Unix epoch.
pub(super) fn annotated_nomination(found: &Preemption, evicts: Vec<EvictedGang>, until: u64) -> Placement {
    let units = found.takes.iter().map(|take| ReservedUnits {
        resource: take.resource.clone(),
        units: take.units.get(),
        device: take.device.clone(),
    });
    let nodes = BTreeMap::from([(found.node.clone(), units.collect())]);
    Placement { until, nodes, evicts, ..Placement::default() }
}

/// A waiting pod.
pub(super) struct HandoverCandidate<'a> {
    pub(super) name: &'a str,
    pub(super) pod: &'a PodObject,
    pub(super) device_requests: &'a [DeviceRequest],
}

/// Nominates the pods that an earlier leader had nominated, if their units are free or about to be
/// free. `waiting` is in order of priority. `now` is in seconds since the Unix epoch.
pub(super) fn restore_nominations<'a>(
    ledger: &mut Ledger,
    waiting: impl Iterator<Item = HandoverCandidate<'a>>,
    holders: impl FnOnce() -> Holders<'a>,
    now: u64,
) {
    let is_valid =
        |waiting: &HandoverCandidate<'_>| waiting.pod.nomination.as_ref().is_some_and(|room| room.until > now);
    let mut waiting = waiting.filter(is_valid).peekable();
    if waiting.peek().is_none() {
        return;
    }
    let mut ending = holders();
    ending.pods.values_mut().for_each(|pods| pods.retain(|_, holder| holder.ending));
    for HandoverCandidate { name, pod, device_requests } in waiting {
        let Some((node, units)) = pod.nomination.as_ref().and_then(|room| room.nodes.first_key_value()) else {
            continue;
        };
        let priority = pod.spec.priority.unwrap_or(0);
        let pending = PendingPod { pod: name, priority, device_requests };
        // Other devices may be kept for other pods, and the pod may cost too much there.
        let is_noted =
            |found: &Preemption| found.takes.iter().all(|take| units.iter().any(|units| units.device == take.device));
        let (node, none) = ([node.as_str()], BTreeSet::new());
        let found = ledger.preempt_legally(pending, node, (&ending, &none), Some(&is_noted));
        if let Some(Preemption { node, takes, .. }) = found.filter(|found| found.victims.is_empty()) {
            // Ignore errors: the ledger refuses only nominations for pods with a claim, and waiting
            // pods have no claim.
            let _ = ledger.nominate(name, Nomination { priority, node, takes });
        }
    }
}
