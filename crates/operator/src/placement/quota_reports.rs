//! Builds the reports about quotas: statuses, metrics, and the capacity label of pods.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::names::{CAPACITY_IN_QUOTA, CAPACITY_LABEL, CAPACITY_OVER_QUOTA, KUEUE_LABELS};
use cleave_api::{GpuQuota, GpuQuotaSpec, GpuQuotaStatus};
use cleave_plan::ledger::{Ledger, Moment};
use cleave_plan::quota::{Book, Class, Owner, Place, Pod, PodId, Quota, Unit, World};
use jiff::Timestamp;

use super::cluster::Cluster;
use super::nodes::Nodes;
use super::pod_tracker::PodTracker;
use super::quota_objects::{MalformedQuota, QuotaObjects};
use super::quotas::{Decided, PoolWorld, QuotaSettings, QuotaWorlds, quotas_of};
use crate::pods::{PodObject, full_name};
use crate::policies::demand::WaitingPod;
use crate::quotas::status::{self, KueuePods, PoolView};
use crate::quotas::usage::{Limits, QuotaUsage};
use crate::quotas::validate::{Problem, Quotas, Unnamed};

/// The reports about quotas.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct QuotaReports {
    /// Statuses that differ from those in the cluster, by quota.
    pub(crate) statuses: Vec<(String, GpuQuotaStatus)>,
    /// The use of each valid quota, by name.
    pub(crate) usages: BTreeMap<String, QuotaUsage>,
    /// Names of the quotas that cannot be read.
    pub(crate) malformed: BTreeSet<String>,
    /// Pods whose label differs from their class.
    pub(crate) labels: Vec<CapacityLabel>,
}

/// A pod whose capacity label changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CapacityLabel {
    /// The pod, as `namespace/name`.
    pub(crate) pod: String,
    pub(crate) uid: String,
    /// The new value. `None` removes the label.
    pub(crate) value: Option<&'static str>,
}

/// Returns the value of the capacity label for a pod of this class.
pub(super) const fn label_of(class: Class) -> &'static str {
    match class {
        Class::In => CAPACITY_IN_QUOTA,
        Class::Over => CAPACITY_OVER_QUOTA,
    }
}

/// Returns the reports about quotas. `waits` contains each pod's reason to wait at the gate. If the
/// cluster has no quota, the reports only remove the labels of earlier quotas.
pub(super) fn build_reports<'a>(
    (cluster, nodes): (&Cluster, &Nodes),
    (tracker, ledger): (&PodTracker, &Ledger),
    waiting: impl Iterator<Item = (&'a str, &'a PodObject)>,
    decided: Decided<'_>,
    (settings, now): (&QuotaSettings, u64),
    (waits, objects): (&BTreeMap<String, WaitingPod>, &QuotaObjects),
) -> QuotaReports {
    if cluster.quotas.is_empty() {
        return QuotaReports { labels: wrong_labels(tracker, &BTreeMap::new()), ..QuotaReports::default() };
    }
    let quotas = quotas_of(cluster, nodes, settings.unnamed);
    let worlds = QuotaWorlds::new((cluster, nodes), (tracker, ledger), waiting, decided, (settings, now));
    let pools: Vec<&PoolWorld> = worlds.iter().flat_map(|worlds| &worlds.pools).collect();
    let views: Vec<PoolView<'_>> = pools
        .iter()
        .zip(&quotas.pools)
        .map(|(pool, of)| PoolView { world: &pool.world, book: Book::new(&pool.world, Moment(now)), unit: of.unit })
        .collect();
    let time = timestamp(now);
    let namespaces = cluster.namespaces.iter().filter_map(|object| object.metadata.name.as_deref());
    let namespaces: BTreeSet<&str> = namespaces.collect();
    let kueue = kueue_pods(tracker, &quotas);
    let malformed: BTreeMap<&str, &MalformedQuota> =
        objects.malformed().filter_map(|quota| Some((quota.metadata.name.as_deref()?, quota))).collect();
    let unknown: Vec<GpuQuota> =
        malformed.values().filter(|quota| !quota.is_known).map(|quota| placeholder(quota)).collect();
    let names = malformed.keys().map(|name| (*name).to_owned()).collect();
    let mut reports = QuotaReports { malformed: names, ..QuotaReports::default() };
    for quota in cluster.quotas.iter().filter_map(|object| object.0.as_ref().ok()).chain(&unknown) {
        let Some(name) = quota.metadata.name.as_deref() else { continue };
        let problem = malformed.get(name).map(|quota| {
            let problem = if quota.is_known { Problem::Malformed } else { Problem::Unknown };
            problem(quota.error.clone())
        });
        // The present status of a malformed quota is not known. A constant time keeps equal
        // statuses equal.
        let time = malformed.get(name).map_or(time, |quota| timestamp(quota.since));
        let view = views.iter().find(|view| view.world.quotas.contains_key(name));
        let named = quota.spec.namespaces.iter().flatten().map(String::as_str);
        let absent: Vec<&str> = named.filter(|name| !namespaces.contains(name)).collect();
        let is_oldest = quotas.pools.iter().any(|pool| pool.oldest() == name);
        let shows_unnamed = is_oldest && quotas.unnamed() == Unnamed::Borrow;
        let (status, waiting) = status::status(
            quota,
            (view, problem.as_ref().or(quotas.problems.get(name))),
            (&absent, kueue.get(name)),
            (waits, shows_unnamed),
            time,
        );
        if let Some(usage) = view.and_then(|view| quota_usage(quota, view, &waiting)) {
            reports.usages.insert(name.to_owned(), usage);
        }
        if quota.status.as_ref() != Some(&status) {
            reports.statuses.push((name.to_owned(), status));
        }
    }
    if !objects.are_unknown() {
        let classes = if settings.without_labels { BTreeMap::new() } else { classes(&views) };
        reports.labels = wrong_labels(tracker, &classes);
    }
    reports
}

/// Returns an object for the report about a quota of which nothing but the metadata is known.
fn placeholder(quota: &MalformedQuota) -> GpuQuota {
    GpuQuota { metadata: quota.metadata.clone(), spec: GpuQuotaSpec::default(), status: None }
}

fn timestamp(seconds: u64) -> Timestamp {
    Timestamp::from_second(i64::try_from(seconds).unwrap_or(0)).unwrap_or_default()
}

fn quota_usage(quota: &GpuQuota, view: &PoolView<'_>, waiting: &status::WaitingPods) -> Option<QuotaUsage> {
    let name = quota.metadata.name.as_deref()?;
    let limits = view.world.quotas.get(name)?;
    Some(QuotaUsage {
        usage: view.book.usage(name)?,
        limits: Limits { min: limits.min().0, max: limits.max().map(|max| max.0) },
        waiting: waiting.reasons.clone(),
        waiting_amount: waiting.amount.0,
        unmet_amount: waiting.unmet().0,
        one: match view.unit {
            Unit::Gpus => cleave_plan::quota::GPU.0,
            Unit::Memory => 1024,
        },
    })
}

/// Returns the pods of each quota that Kueue admitted.
fn kueue_pods(tracker: &PodTracker, quotas: &Quotas) -> BTreeMap<String, KueuePods> {
    let mut pods: BTreeMap<String, KueuePods> = BTreeMap::new();
    let is_admitted = |pod: &&PodObject| KUEUE_LABELS.iter().any(|label| pod.labels().contains_key(*label));
    for pod in tracker.living_pods().filter(|pod| pod.requests_gpus()).filter(is_admitted) {
        for pool in 0..quotas.pools.len() {
            let Owner::Quota(quota) = quotas.owner(pool, pod.namespace()) else { continue };
            let (of_quota, name) = (pods.entry(quota).or_default(), full_name(&pod.metadata));
            if of_quota.count == 0 || name < of_quota.first {
                of_quota.first = name;
            }
            of_quota.count += 1;
        }
    }
    pods
}

/// Returns the classes of the pods that are released or run in pools with an enforced quota, by
/// name. Pods without a quota borrow. Pods of exempt namespaces, and pods of quotas that only
/// count, have no class.
fn classes<'v>(views: &'v [PoolView<'_>]) -> BTreeMap<&'v str, Class> {
    let mut classes = BTreeMap::new();
    for view in views.iter().filter(|view| view.world.quotas.values().any(Quota::is_enforced)) {
        for (at, pod) in view.world.pods.iter().enumerate() {
            let is_counted = matches!(pod.place, Place::Running { .. }) && has_label(view.world, pod);
            if let Some(class) = is_counted.then(|| view.book.class(PodId(at))).flatten() {
                classes.insert(pod.name.as_str(), class);
            }
        }
    }
    classes
}

/// Returns whether the label of a pod in a pool with an enforced quota shows the pod's class.
pub(super) fn has_label(world: &World, pod: &Pod) -> bool {
    match &pod.owner {
        Owner::Quota(name) => world.quotas.get(name).is_some_and(Quota::is_enforced),
        Owner::Unnamed => true,
        Owner::Outside => false,
    }
}

/// Returns the pods whose label is not that of their class. Pods without a class have no label.
fn wrong_labels(tracker: &PodTracker, classes: &BTreeMap<&str, Class>) -> Vec<CapacityLabel> {
    let mut labels = Vec::new();
    for pod in tracker.living_pods().filter(|pod| pod.requests_gpus() && pod.metadata.deletion_timestamp.is_none()) {
        let written = pod.labels().get(CAPACITY_LABEL).map(String::as_str);
        if classes.is_empty() && written.is_none() {
            continue;
        }
        let name = full_name(&pod.metadata);
        let value = classes.get(name.as_str()).map(|class| label_of(*class));
        if written != value {
            labels.push(CapacityLabel { uid: pod.uid().unwrap_or_default(), pod: name, value });
        }
    }
    labels.sort_by(|one, other| one.pod.cmp(&other.pod));
    labels
}
