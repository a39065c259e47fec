//! Releases of gangs: all pods of a gang are released, although each has a patch of its own.
//!
//! The API server may not apply one of the patches, for example because a controller has changed
//! the pod. The other pods of the gang are released nevertheless. So the pod keeps its reservation,
//! and the next reconcile releases it with a patch for its new version. Otherwise another pod could
//! use the units, and a part of the gang would run alone.
//!
//! The reservation is not renewed. If the API server refuses all patches until 60 s before the
//! reservation expires, the pod waits at the gate like the replacement of a lost pod.
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_api::placement::Placement;
use cleave_plan::ledger::Ledger;

use super::actions::{Actions, Release, ReleaseReason};
use super::claims::PodClaims;
use super::cluster::ReconcileTime;
use super::nodes::Nodes;
use super::queue::Queue;
use super::search::Candidate;
use super::unanswered::RETRY_MARGIN_SECONDS;
use crate::pods::{PodObject, full_name};

/// The release of a pod of a gang that the API server has not applied yet.
#[derive(Debug)]
struct GangRelease {
    uid: String,
    placement: Placement,
    /// Value of the label that shows whether a quota guarantees the pod's GPUs.
    label: Option<&'static str>,
    /// Whether the API server did not apply the last patch.
    has_failed: bool,
}

/// Releases of pods of gangs, by the pod's name. Each pod has a claim in the ledger.
#[derive(Debug, Default)]
pub(super) struct GangReleases(BTreeMap<String, GangRelease>);

impl GangReleases {
    /// Records that a pod of a gang is released. `label` is the value of its capacity label.
    pub(super) fn record(&mut self, release: &Release, label: Option<&'static str>) {
        if let ReleaseReason::Reserved(placement) = &release.reason {
            let (uid, placement) = (release.uid.clone(), placement.clone());
            self.0.insert(release.pod.clone(), GangRelease { uid, placement, label, has_failed: false });
        }
    }

    /// Records that the API server did not apply the release of a pod. Returns whether the pod
    /// keeps its reservation, because it is part of a gang.
    pub(super) fn record_failure(&mut self, pod: &str) -> bool {
        let release = self.0.get_mut(pod);
        release.map(|release| release.has_failed = true).is_some()
    }

    /// Forgets the release of a pod: it was applied, or the pod no longer exists.
    pub(super) fn remove(&mut self, pod: &str) {
        self.0.remove(pod);
    }

    /// Returns the releases to retry, for the current versions of the pods. Forgets the releases of
    /// pods that are no longer at the gate, and of pods without a claim. Reports why the release of
    /// a pod is delayed.
    pub(super) fn releases_to_retry(
        &mut self,
        (ledger, claims): (&mut Ledger, &mut PodClaims),
        unsettled: &[&PodObject],
        (nodes, queue): (&Nodes, &Queue),
        actions: &mut Actions,
        now: ReconcileTime,
    ) -> Vec<Release> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let gated: BTreeMap<String, &PodObject> =
            unsettled.iter().filter(|pod| pod.waits_at_gate()).map(|pod| (full_name(&pod.metadata), *pod)).collect();
        let is_same = |name: &String, release: &GangRelease| {
            gated.get(name).is_some_and(|pod| pod.metadata.uid.as_deref() == Some(release.uid.as_str()))
        };
        self.0.retain(|name, release| is_same(name, release) && ledger.claim(name).is_some());
        let is_late = |release: &GangRelease| release.placement.until <= now.epoch.saturating_add(RETRY_MARGIN_SECONDS);
        let late: Vec<String> = self
            .0
            .iter()
            .filter(|(_, release)| release.has_failed && is_late(release))
            .map(|(name, _)| name.clone())
            .collect();
        for name in late {
            self.0.remove(&name);
            claims.end_claim(Some(ledger), &name);
            actions.requeue_in(Duration::ZERO);
        }
        let mut releases = Vec::new();
        for (name, release) in self.0.iter_mut().filter(|(_, release)| release.has_failed) {
            let Some(pod) = gated.get(name) else { continue };
            if queue.delays_release(name, now.up, actions) {
                continue;
            }
            release.has_failed = false;
            let (waited, placement) = (queue.waiting_time(name, now.up), release.placement.clone());
            let candidate = Candidate::new(name.clone(), pod, nodes, None);
            releases.push(candidate.release_reserved(placement, nodes, (waited, release.label)));
        }
        releases
    }
}
