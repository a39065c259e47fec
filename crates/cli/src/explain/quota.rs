//! Describes the quotas of one pod's namespace.
//!
//! The sentences repeat the spec and the reported status of the quotas, and the pod's capacity
//! label. The verdict contains the reason why a pod waits.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use cleave_api::gpuquota::{QuotaMode, QuotaUnit};
use cleave_api::names::{CAPACITY_IN_QUOTA, CAPACITY_LABEL, CAPACITY_OVER_QUOTA};
use cleave_operator::pods::PodObject;
use kube::ResourceExt as _;

use super::live::LiveCluster;
use crate::quotas::report::Quota;

/// Returns one text for each quota of the pod's namespace, or one text if the namespace has no
/// quota. Returns none if the user can list no quotas, or if the pod has ended or requests no
/// device.
pub(super) fn quota_sentences(live: &LiveCluster, pod: &PodObject) -> Vec<String> {
    if live.quotas.is_empty() || pod.has_ended() || pod.device_requests().is_empty() {
        return Vec::new();
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let objects = live.cluster.namespaces.iter();
    let mut labels =
        objects.filter(|object| object.metadata.name.as_deref() == Some(namespace)).map(|object| object.labels());
    let labels = labels.next_back().cloned().unwrap_or_default();
    let class = pod.metadata.labels.as_ref().and_then(|labels| labels.get(CAPACITY_LABEL)).map(String::as_str);
    let own: Vec<&Quota> = live.quotas.iter().filter(|quota| selects_namespace(quota, namespace, &labels)).collect();
    if own.is_empty() {
        return vec![format!(
            "No quota applies to namespace {namespace}. Its pods borrow, unless the namespace is exempt."
        )];
    }
    own.into_iter().map(|quota| quota_sentence(quota, class)).collect()
}

fn selects_namespace(quota: &Quota, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
    let wanted = &quota.namespace_labels;
    quota.namespaces.iter().any(|name| name == namespace)
        || (!wanted.is_empty() && wanted.iter().all(|(key, value)| labels.get(key) == Some(value)))
}

fn quota_sentence(quota: &Quota, class: Option<&str>) -> String {
    let unit = if quota.unit == QuotaUnit::Gpus { " GPUs" } else { "" };
    let (name, min) = (&quota.name, &quota.min);
    let used = if quota.used.is_empty() { "an unknown amount" } else { &quota.used };
    let mut text = match class {
        Some(CAPACITY_IN_QUOTA) => format!("Within the guarantee of {name}: {used} of {min}{unit} used."),
        Some(CAPACITY_OVER_QUOTA) => format!("Borrows: {name} uses {used} and is guaranteed {min}{unit}."),
        _ => format!("{name} uses {used} and is guaranteed {min}{unit}."),
    };
    if let Some(max) = &quota.max {
        let _ = write!(text, " Its maximum is {max}.");
    }
    if quota.mode == QuotaMode::Count {
        text.push_str(" The quota only counts usage (mode Count).");
    }
    if quota.ready.status == "False" {
        let _ = write!(text, " The quota is not ready: {}.", quota.ready.message.trim_end_matches('.'));
    }
    text
}
