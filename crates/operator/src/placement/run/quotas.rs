//! Writes the placement controller's reports about quotas, and the annotations that the next leader
//! reads.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cleave_api::names::{NOMINATION_ANNOTATION, PROTECTED_SINCE_ANNOTATION};
use futures::{FutureExt as _, StreamExt as _};

use super::PlacementController;
use crate::metrics::KindLabel;
use crate::placement::actions::{Actions, NominationRecord, ProtectedPod};
use crate::placement::cluster::{Cluster, ReconcileTime};
use crate::placement::quota_reports::QuotaReports;
use crate::placement::quota_writer::QuotaChanges;
use crate::pod_metadata::patch_metadata;
use crate::write::MAX_IN_FLIGHT;

/// Minimum time between two reports about quotas.
const QUOTA_STATUS_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum time between two reports about quotas, even if no change wakes the controller.
const QUOTA_REFRESH_INTERVAL: Duration = Duration::from_secs(30);

impl PlacementController {
    /// Returns whether quotas are listed, or the cluster does not have the resource. Without the
    /// quotas, a pod could exceed its quota's maximum, and priorities would apply across teams.
    pub(super) fn are_quotas_listed(&self) -> bool {
        let stores = &self.context.stores;
        stores.has_no_quotas.load(Ordering::Acquire)
            || stores.quotas.wait_until_ready().now_or_never().is_some_and(|listed| listed.is_ok())
    }

    /// Sends the GPU controller the pods for which no GPU need be partitioned, if this set has
    /// changed.
    pub(super) fn send_unplanned(&self, actions: &Actions) {
        let modified = self.unplanned.send_if_modified(|sent| {
            let mut unplanned = actions.unplanned.clone();
            if actions.more {
                // The reconcile did not examine all pods.
                let is_released = |pod: &str| actions.releases.iter().any(|release| release.pod == pod);
                let others = sent.iter().filter(|pod| !actions.waiting.contains_key(*pod) && !is_released(pod));
                unplanned.extend(others.cloned());
            }
            let modified = **sent != unplanned;
            if modified {
                *sent = Arc::new(unplanned);
            }
            modified
        });
        if modified {
            self.wakes.passes.notify_one();
        }
    }

    /// Sends the statuses of quotas and the labels of pods that changed to the task that writes
    /// them, and updates the metrics of quotas. Returns the time until the next report is due.
    pub(super) fn report_quotas(
        &mut self,
        cluster: &Cluster,
        actions: &Actions,
        now: ReconcileTime,
    ) -> Option<Duration> {
        if cluster.quotas.is_empty() && !self.reports_quotas {
            return None;
        }
        let left = self.next_quota_reports.saturating_sub(now.up);
        if !left.is_zero() {
            return Some(left);
        }
        self.next_quota_reports = now.up.saturating_add(QUOTA_STATUS_INTERVAL);
        let reports = self.keeper.quota_reports(cluster, &actions.waiting, now);
        self.context.metrics.quotas.set_gauges(&reports.usages);
        let malformed = i64::try_from(reports.malformed.len()).unwrap_or(i64::MAX);
        self.context.metrics.malformed.get_or_create(&KindLabel { kind: "GpuQuota" }).set(malformed);
        self.reports_quotas = !cluster.quotas.is_empty() || !reports.labels.is_empty();
        let QuotaReports { statuses, labels, malformed, .. } = reports;
        self.quota_changes.send_replace(QuotaChanges { statuses, labels, malformed });
        self.reports_quotas.then_some(QUOTA_REFRESH_INTERVAL)
    }

    /// Writes the nominations to the nominated pods. Returns the preemptors for which no pod may be
    /// evicted, because a write failed.
    pub(super) async fn write_nominations<'k>(&self, kept: &'k [NominationRecord]) -> BTreeSet<&'k str> {
        let annotations = kept.iter().map(|NominationRecord { pod, uid, preemptor, room }| {
            (preemptor.as_str(), (pod.as_str(), uid.as_str()), room.to_text().unwrap_or_default())
        });
        let results = self.annotate(NOMINATION_ANNOTATION, annotations).await;
        results.into_iter().filter(|(_, is_written)| !is_written).map(|(preemptor, _)| preemptor).collect()
    }

    /// Writes to waiting pods when disruption budgets began to block evictions for these pods. A
    /// failed write is repeated, because a later reconcile decides the same.
    pub(super) async fn write_protected(&self, protected: &[ProtectedPod]) {
        if protected.is_empty() || !self.context.claim.is_current() {
            return;
        }
        let annotations = protected
            .iter()
            .map(|ProtectedPod { pod, uid, since }| ((), (pod.as_str(), uid.as_str()), since.to_string()));
        self.annotate(PROTECTED_SINCE_ANNOTATION, annotations).await;
    }

    /// Writes an annotation of several pods. Each of `values` is a key of the caller, the pod's
    /// name and UID, and the annotation's value. Returns for each key whether its annotation was
    /// written, or its pod no longer exists.
    async fn annotate<'p, K>(
        &self,
        annotation: &str,
        values: impl Iterator<Item = (K, (&'p str, &'p str), String)>,
    ) -> Vec<(K, bool)> {
        let client = &self.context.client;
        let writes: Vec<_> = values
            .map(|(key, pod, value)| async move {
                let metadata = serde_json::json!({"annotations": {annotation: value}});
                (key, patch_metadata(client, pod, metadata).await)
            })
            .collect();
        futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await
    }
}
