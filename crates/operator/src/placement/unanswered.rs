//! Tracks releases that the API server may or may not have applied.
//!
//! A timeout or a lost connection does not show whether the pod was released. If the pod was
//! released, it may be bound before the watch reports the release. So the pod keeps its
//! reservation, and the same patch is retried. The patch applies only to one version of the pod, so
//! it cannot apply twice.
use std::collections::{BTreeMap, BTreeSet};

use cleave_plan::ledger::Ledger;

use super::actions::{Release, ReleaseReason};
use super::cluster::ReconcileTime;
use super::patch;
use crate::pods::PodObject;

/// Seconds before the end of a reservation in which its release is not retried. The watch must
/// report a release before the reservation ends.
pub(super) const RETRY_MARGIN_SECONDS: u64 = 60;

/// Releases without an answer, by the pod's name. Each pod has a claim in the ledger.
#[derive(Debug, Default)]
pub(super) struct UnansweredReleases(BTreeMap<String, Release>);

impl UnansweredReleases {
    /// Records a release. Its patch must be the patch that was sent.
    pub(super) fn record(&mut self, release: Release) {
        self.0.insert(release.pod.clone(), release);
    }

    /// Returns whether the release of the pod has no answer.
    pub(super) fn contains(&self, pod: &str) -> bool {
        self.0.contains_key(pod)
    }

    /// Forgets the release of a pod.
    pub(super) fn remove(&mut self, pod: &str) {
        self.0.remove(pod);
    }

    /// Forgets the releases of all pods that are not in `present`.
    pub(super) fn retain(&mut self, present: &BTreeSet<String>) {
        self.0.retain(|name, _| present.contains(name));
    }

    /// Returns whether a pod at the gate shows that its release was not and will not be applied.
    /// The pod shows this if it is newer than the version that the patch applies to.
    pub(super) fn is_refuted_by(&self, name: &str, pod: &PodObject) -> bool {
        let number = |version: Option<&str>| version.and_then(|version| version.parse::<u64>().ok());
        let sent = self.0.get(name).and_then(|release| number(patch::resource_version(&release.patch)));
        sent.is_some_and(|sent| number(pod.metadata.resource_version.as_deref()).is_some_and(|seen| seen > sent))
    }

    /// Returns the releases to retry.
    pub(super) fn releases_to_retry(&self, ledger: &Ledger, now: ReconcileTime) -> impl Iterator<Item = Release> {
        let in_time = move |release: &&Release| match &release.reason {
            ReleaseReason::Reserved(placement) => placement.until > now.epoch.saturating_add(RETRY_MARGIN_SECONDS),
            _ => true,
        };
        self.0.values().filter(|release| ledger.claim(&release.pod).is_some()).filter(in_time).cloned()
    }
}
