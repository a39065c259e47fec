//! Writes the placement controller's reports about quotas, and the annotations that the next leader
//! reads.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cleave_api::names::{CAPACITY_LABEL, NOMINATION_ANNOTATION, PROTECTED_SINCE_ANNOTATION};
use cleave_api::{GpuQuota, GpuQuotaStatus};
use futures::{FutureExt as _, StreamExt as _};
use kube::Api;
use kube::api::{Patch, PatchParams};

use super::PlacementController;
use crate::placement::actions::{Actions, NominationRecord, ProtectedPod};
use crate::placement::cluster::{Cluster, ReconcileTime};
use crate::placement::quota_reports::CapacityLabel;
use crate::pod_metadata::patch_metadata;
use crate::quotas::status::merge_patch;
use crate::write::{MAX_IN_FLIGHT, WRITE_TIMEOUT};

/// Maximum number of labels written each time that quotas are reported.
const MAX_LABELS: usize = 20;
/// Minimum time between two changes of the label of one pod.
const LABEL_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum time between two reports about quotas.
const QUOTA_STATUS_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum time between two reports about quotas, even if no change wakes the controller.
const QUOTA_REFRESH_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of statuses written each time that quotas are reported. Releases wait for these
/// writes.
const MAX_STATUSES: usize = 50;
/// Delay before a status that could not be written is written again.
const STATUS_RETRY_DELAY: Duration = Duration::from_secs(5);

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

    /// Writes the statuses of quotas and the labels of pods that changed, and updates the metrics
    /// of quotas. Returns the time until the next reports are due. Returns `None` if no reports are
    /// due, or if this process no longer leads.
    pub(super) async fn report_quotas(
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
        let reports = self.keeper.quota_reports(cluster, &actions.waiting, now);
        self.context.metrics.quotas.set_gauges(&reports.usages);
        self.reports_quotas = !cluster.quotas.is_empty() || !reports.labels.is_empty();
        self.quota_retries.retain(|_, until| now.up < *until);
        let due = reports.statuses.iter().filter(|(name, _)| !self.quota_retries.contains_key(name));
        let due: Vec<&(String, GpuQuotaStatus)> = due.take(MAX_STATUSES).collect();
        if !self.context.claim.is_current() {
            return None;
        }
        let writes: Vec<_> = due.iter().map(|(name, status)| self.write_quota_status(cluster, name, status)).collect();
        let results: Vec<(&str, bool)> = futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await;
        let failed = results.iter().filter(|(_, written)| !written).map(|(name, _)| (*name).to_owned());
        self.quota_retries.extend(failed.map(|name| (name, now.up.saturating_add(STATUS_RETRY_DELAY))));
        let mut is_complete = results.len() == reports.statuses.len() && self.quota_retries.is_empty();
        self.labelled.retain(|_, at| now.up < at.saturating_add(LABEL_INTERVAL));
        let due = reports.labels.iter().filter(|label| !self.labelled.contains_key(&label.uid));
        let due: Vec<&CapacityLabel> = due.take(MAX_LABELS).collect();
        is_complete &= due.len() == reports.labels.len();
        let client = &self.context.client;
        let writes: Vec<_> = due
            .iter()
            .map(|label| {
                let metadata = serde_json::json!({"labels": {CAPACITY_LABEL: label.value}});
                patch_metadata(client, (&label.pod, &label.uid), metadata)
            })
            .collect();
        if self.context.claim.is_current() {
            let _: Vec<bool> = futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await;
            self.labelled.extend(due.iter().map(|label| (label.uid.clone(), now.up)));
        }
        // The interval starts after the writes, so that writes take only a part of the time.
        let up = self.started.elapsed().max(now.up);
        self.next_quota_reports = up.saturating_add(QUOTA_STATUS_INTERVAL);
        let next = if is_complete { QUOTA_REFRESH_INTERVAL } else { QUOTA_STATUS_INTERVAL };
        self.reports_quotas.then_some(next)
    }

    /// Writes the status of a quota. Returns the quota's name, and whether the status was written
    /// or the quota no longer exists.
    async fn write_quota_status<'n>(
        &self,
        cluster: &Cluster,
        name: &'n str,
        status: &GpuQuotaStatus,
    ) -> (&'n str, bool) {
        let known = cluster.quotas.iter().filter_map(|object| object.0.as_ref().ok());
        let before = known.into_iter().find(|quota| quota.metadata.name.as_deref() == Some(name));
        let patch = Patch::Merge(merge_patch(before.and_then(|quota| quota.status.as_ref()), status));
        let quotas = Api::<GpuQuota>::all(self.context.client.clone());
        let params = PatchParams::default();
        let written = quotas.patch_status(name, &params, &patch);
        let is_written = match tokio::time::timeout(WRITE_TIMEOUT, written).await {
            Ok(Ok(_)) => true,
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => true,
            Ok(Err(error)) => {
                tracing::warn!(
                    quota = name,
                    error = &error as &dyn std::error::Error,
                    "failed to write the status of a quota"
                );
                false
            }
            Err(_) => {
                tracing::warn!(quota = name, "failed to write the status of a quota: no answer");
                false
            }
        };
        (name, is_written)
    }

    /// Writes the nominations to the nominated pods. Returns the preemptors for which no pod may be
    /// evicted, because a write failed.
    pub(super) async fn write_nominations<'k>(&self, kept: &'k [NominationRecord]) -> BTreeSet<&'k str> {
        let client = &self.context.client;
        let writes: Vec<_> = kept
            .iter()
            .map(|NominationRecord { pod, uid, preemptor, room }| async move {
                let text = room.to_text().unwrap_or_default();
                let metadata = serde_json::json!({"annotations": {NOMINATION_ANNOTATION: text}});
                (preemptor.as_str(), patch_metadata(client, (pod, uid), metadata).await)
            })
            .collect();
        let results: Vec<(&str, bool)> = futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await;
        results.into_iter().filter(|(_, written)| !written).map(|(preemptor, _)| preemptor).collect()
    }

    /// Writes to waiting pods when disruption budgets began to block evictions for these pods. A
    /// failed write is repeated, because a later reconcile decides the same.
    pub(super) async fn write_protected(&self, protected: &[ProtectedPod]) {
        if protected.is_empty() || !self.context.claim.is_current() {
            return;
        }
        let client = &self.context.client;
        let writes: Vec<_> = protected
            .iter()
            .map(|ProtectedPod { pod, uid, since }| {
                let metadata = serde_json::json!({"annotations": {PROTECTED_SINCE_ANNOTATION: since.to_string()}});
                patch_metadata(client, (pod, uid), metadata)
            })
            .collect();
        let _: Vec<bool> = futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await;
    }
}
