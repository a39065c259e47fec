//! Remembers quotas that can no longer be read.
//!
//! A later version of Cleave may write a quota with a value that this version does not know. A
//! quota that cannot be read is not an absent quota: without its guarantee, the operator would
//! evict the team's pods. Therefore the last version that could be read stays in effect.
use std::collections::BTreeMap;
use std::sync::Arc;

use cleave_api::GpuQuota;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DeserializeGuard;

use super::cluster::Cluster;

/// The last readable versions of the cluster's quotas.
#[derive(Debug, Default)]
pub(super) struct QuotaObjects {
    readable: BTreeMap<String, Arc<DeserializeGuard<GpuQuota>>>,
    /// Quotas that cannot be read now, by UID.
    malformed: BTreeMap<String, MalformedQuota>,
}

/// A quota that cannot be read.
#[derive(Debug, Clone)]
pub(super) struct MalformedQuota {
    pub(super) metadata: ObjectMeta,
    /// Why the quota cannot be read.
    pub(super) error: String,
    /// Since when, in seconds since the Unix epoch.
    pub(super) since: u64,
    /// Whether an earlier version is in effect. Otherwise, the operator does not know what the
    /// quota guarantees.
    pub(super) is_known: bool,
}

impl QuotaObjects {
    /// Updates the versions. Returns whether the spec of a quota has changed. `now` is in seconds
    /// since the Unix epoch.
    pub(super) fn update(&mut self, quotas: &[Arc<DeserializeGuard<GpuQuota>>], now: u64) -> bool {
        let before = std::mem::take(&mut self.readable);
        let mut malformed = BTreeMap::new();
        for object in quotas {
            match &object.0 {
                Ok(quota) => drop(self.readable.insert(uid(&quota.metadata), Arc::clone(object))),
                Err(invalid) => {
                    let uid = uid(&invalid.metadata);
                    let known = before.get(&uid).cloned();
                    let is_known = known.is_some();
                    self.readable.extend(known.map(|known| (uid.clone(), known)));
                    let since = self.malformed.get(&uid).map_or(now, |before| before.since);
                    let (metadata, error) = (invalid.metadata.clone(), invalid.error.clone());
                    malformed.insert(uid, MalformedQuota { metadata, error, since, is_known });
                }
            }
        }
        let has_changed = self.malformed.keys().ne(malformed.keys())
            || before.len() != self.readable.len()
            || before.iter().any(|(uid, quota)| self.readable.get(uid).is_none_or(|now| !has_same_spec(quota, now)));
        self.malformed = malformed;
        has_changed
    }

    /// Returns the quotas that cannot be read.
    pub(super) fn malformed(&self) -> impl Iterator<Item = &MalformedQuota> {
        self.malformed.values()
    }

    /// Returns whether a quota cannot be read, and no earlier version is known.
    pub(super) fn are_unknown(&self) -> bool {
        self.malformed.values().any(|quota| !quota.is_known)
    }

    /// Returns the cluster with the last readable version of each quota. Returns `None` if all
    /// quotas can be read.
    pub(super) fn last_readable(&self, cluster: &Cluster) -> Option<Cluster> {
        let substitute = |object: &Arc<DeserializeGuard<GpuQuota>>| match &object.0 {
            Ok(_) => Arc::clone(object),
            Err(invalid) => self.readable.get(&uid(&invalid.metadata)).unwrap_or(object).clone(),
        };
        let quotas = || cluster.quotas.iter().map(substitute).collect();
        (!self.malformed.is_empty()).then(|| Cluster { quotas: quotas(), ..cluster.clone() })
    }
}

/// Returns what identifies a quota: its UID, or its name in tests.
fn uid(metadata: &ObjectMeta) -> String {
    metadata.uid.clone().or_else(|| metadata.name.clone()).unwrap_or_default()
}

fn has_same_spec(one: &DeserializeGuard<GpuQuota>, other: &DeserializeGuard<GpuQuota>) -> bool {
    matches!((&one.0, &other.0), (Ok(one), Ok(other)) if one.spec == other.spec)
}
