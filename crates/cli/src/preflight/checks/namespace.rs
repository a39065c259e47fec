//! Checks the namespace of the release: Pod Security, quotas and service meshes.
use cleave_plan::Quantity;

use super::super::facts::{LimitRange, NamedObject, ResourceQuota};
use super::super::platform::Platform;
use super::super::report::{FindingReason, Level, Report, format_count};
use super::cluster::SYSTEM_PRIORITY_CLASSES;
use super::view::{View, items};

/// The label that sets the Pod Security Standard of a namespace.
const POD_SECURITY_LABEL: &str = "pod-security.kubernetes.io/enforce";
/// The scope of a quota that selects pods by their priority class.
const PRIORITY_CLASS_SCOPE: &str = "PriorityClass";
/// Number of the chart's `DaemonSets`: the agents, the MPS hosts and the kubelet relays.
const DAEMON_SET_COUNT: u64 = 3;
/// Default number of the operator's replicas.
const DEFAULT_OPERATOR_REPLICAS: u64 = 2;

/// Adds the findings about the namespace.
pub(super) fn check(view: &View<'_>, report: &mut Report) {
    if view.facts.namespaces.is_ok() {
        check_pod_security(view, report);
        check_mesh(view, report);
    }
    if view.facts.quotas.is_ok() {
        check_quotas(view, report);
    }
}

/// Returns the namespace of the release, if it exists.
pub(super) fn namespace<'a>(view: &View<'a>) -> Option<&'a NamedObject> {
    items(&view.facts.namespaces).iter().find(|namespace| namespace.metadata.name == view.target.namespace)
}

/// Checks that Pod Security allows privileged pods.
fn check_pod_security(view: &View<'_>, report: &mut Report) {
    let name = &view.target.namespace;
    let action = format!("Run `kubectl label namespace {name} {POD_SECURITY_LABEL}=privileged`.");
    let found = namespace(view);
    if found.is_none() {
        report.add_info(
            FindingReason::NamespaceMissing,
            format!("The namespace {name} does not exist yet."),
            format!("Run `kubectl create namespace {name}`."),
        );
    }
    match found.and_then(|namespace| namespace.metadata.labels.get(POD_SECURITY_LABEL)).map(String::as_str) {
        Some("privileged") => {}
        Some(standard) => report.add_error(
            FindingReason::PodSecurityTooStrict,
            format!(
                "The namespace {name} enforces the Pod Security Standard {standard}. This standard refuses the agent and the MPS host, which are privileged."
            ),
            action,
        ),
        // Talos enforces `baseline` in namespaces without the label.
        None if view.platforms.contains(&Platform::Talos) => report.add_error(
            FindingReason::PodSecurityTooStrict,
            format!(
                "The namespace {name} has no Pod Security label, and Talos then enforces the standard baseline. This standard refuses the agent and the MPS host, which are privileged."
            ),
            action,
        ),
        None => report.add_info(
            FindingReason::PodSecurityNotSet,
            format!(
                "The namespace {name} has no Pod Security label. The API server's default applies, which is usually \
                 privileged."
            ),
            action,
        ),
    }
}

/// Reports a service mesh that adds sidecars to Cleave's pods.
fn check_mesh(view: &View<'_>, report: &mut Report) {
    let Some(namespace) = namespace(view) else { return };
    let (labels, annotations) = (&namespace.metadata.labels, &namespace.metadata.annotations);
    let is = |values: &std::collections::BTreeMap<String, String>, key: &str, expected: &str| {
        values.get(key).is_some_and(|value| value == expected)
    };
    let istio = is(labels, "istio-injection", "enabled")
        || labels.contains_key("istio.io/rev") && !is(labels, "istio-injection", "disabled");
    let mesh = if istio {
        Some(("Istio", "istio-injection=disabled"))
    } else if is(annotations, "linkerd.io/inject", "enabled") {
        Some(("Linkerd", "linkerd.io/inject=disabled (an annotation)"))
    } else if is(labels, "kuma.io/sidecar-injection", "enabled") {
        Some(("Kuma", "kuma.io/sidecar-injection=disabled"))
    } else {
        None
    };
    if let Some((mesh, setting)) = mesh {
        report.add_warning(
            FindingReason::MeshInjection,
            format!(
                "{mesh} adds sidecars to the pods of the namespace {}. Cleave's pods connect only to the API server, \
                 and the webhook's TLS would end at the sidecar.",
                namespace.metadata.name
            ),
            format!("Set {setting} on the namespace."),
        );
    }
}

/// Checks that quotas of the namespace allow Cleave's pods.
fn check_quotas(view: &View<'_>, report: &mut Report) {
    let name = &view.target.namespace;
    let quotas: Vec<&ResourceQuota> =
        items(&view.facts.quotas).iter().filter(|quota| quota.metadata.namespace == *name).collect();
    let limit_ranges: Vec<&LimitRange> =
        items(&view.facts.limit_ranges).iter().filter(|range| range.metadata.namespace == *name).collect();
    for quota in &quotas {
        check_required_limits(quota, &limit_ranges, report);
        if !view.has_agents {
            check_pod_count(view, quota, report);
        }
    }
    let covers = |class: &str| quotas.iter().any(|quota| selects_priority_class(quota, class));
    let is_gke = view.platforms.contains(&Platform::Gke);
    if is_gke && name != "kube-system" && !SYSTEM_PRIORITY_CLASSES.into_iter().all(covers) {
        report.set_chart_value("priorityClass.quota", true);
        report.add_info(
            FindingReason::PriorityQuotaMissing,
            format!(
                "GKE admits the priority classes of Cleave's pods only in namespaces with a ResourceQuota that selects these classes. The namespace {name} has no such quota. The chart creates the quota if priorityClass.quota is true."
            ),
            "",
        );
    }
}

/// Returns whether a quota applies to Cleave's pods of a priority class. Cleave's pods have
/// resource requests and no deadline.
fn quota_applies(quota: &ResourceQuota, class: &str) -> bool {
    let scope = |scope: &str| matches!(scope, "NotTerminating" | "NotBestEffort" | PRIORITY_CLASS_SCOPE);
    quota.spec.scopes.iter().all(|name| scope(name))
        && quota.spec.scope_selector.match_expressions.iter().all(|requirement| {
            let listed = requirement.values.iter().any(|value| value == class);
            match (requirement.scope_name.as_str(), requirement.operator.as_str()) {
                (PRIORITY_CLASS_SCOPE, "In") => listed,
                (PRIORITY_CLASS_SCOPE, "NotIn") => !listed,
                (PRIORITY_CLASS_SCOPE, "DoesNotExist") => false,
                (name, _) => scope(name),
            }
        })
}

/// Returns whether a quota selects a priority class by name.
fn selects_priority_class(quota: &ResourceQuota, class: &str) -> bool {
    let named =
        |scope_name: &str, values: &[String]| scope_name == PRIORITY_CLASS_SCOPE && values.iter().any(|v| v == class);
    let mut requirements = quota.spec.scope_selector.match_expressions.iter();
    quota_applies(quota, class) && requirements.any(|one| one.operator == "In" && named(&one.scope_name, &one.values))
}

/// Reports a quota that requires limits that some of Cleave's containers do not set. With such a
/// quota, the API server refuses the pods unless a `LimitRange` sets default limits.
fn check_required_limits(quota: &ResourceQuota, limit_ranges: &[&LimitRange], report: &mut Report) {
    if !SYSTEM_PRIORITY_CLASSES.into_iter().any(|class| quota_applies(quota, class)) {
        return;
    }
    let has_default = |resource: &str| {
        limit_ranges.iter().flat_map(|range| &range.spec.limits).any(|item| item.default.contains_key(resource))
    };
    for resource in ["cpu", "memory"] {
        let limit = format!("limits.{resource}");
        if quota.spec.hard.contains_key(&limit) && !has_default(resource) {
            report.add_error(
                FindingReason::QuotaRefusesPods,
                format!(
                    "ResourceQuota {} limits {limit}, so it refuses pods without a limit of {resource}. The MPS host has no such limit.",
                    quota.metadata.full_name()
                ),
                format!("Remove {limit} from the quota, or create a LimitRange with a default limit of {resource}."),
            );
        }
    }
}

/// Reports a quota that allows too few pods.
fn check_pod_count(view: &View<'_>, quota: &ResourceQuota, report: &mut Report) {
    let [node_class, operator_class] = SYSTEM_PRIORITY_CLASSES;
    let nodes = u64::try_from(view.gpu_nodes.len()).unwrap_or(u64::MAX).max(1);
    let daemons = if quota_applies(quota, node_class) { nodes.saturating_mul(DAEMON_SET_COUNT) } else { 0 };
    let operators = if quota_applies(quota, operator_class) { DEFAULT_OPERATOR_REPLICAS } else { 0 };
    let needed = daemons.saturating_add(operators);
    for resource in ["pods", "count/pods"] {
        let Some(hard) = quota.spec.hard.get(resource).and_then(Quantity::count) else { continue };
        let used = quota.status.used.get(resource).and_then(Quantity::count).unwrap_or(0);
        let room = hard.saturating_sub(used);
        if needed <= room {
            continue;
        }
        let (level, reason) = match room {
            0 => (Level::Error, FindingReason::QuotaRefusesPods),
            _ => (Level::Warning, FindingReason::QuotaTooSmall),
        };
        let message = format!(
            "ResourceQuota {} has room for {}. Cleave needs {needed} for {}.",
            quota.metadata.full_name(),
            format_count(usize::try_from(room).unwrap_or(usize::MAX), "pod"),
            format_count(view.gpu_nodes.len(), "GPU node"),
        );
        report.add(
            level,
            reason,
            message,
            format!("Raise spec.hard.{resource} of the ResourceQuota by at least {}.", needed.saturating_sub(room)),
        );
    }
}
