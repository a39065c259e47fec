//! Checks the API server, the platform and the priority classes.
use super::super::facts::{MajorMinor, Node, ReadResult};
use super::super::platform::Platform;
use super::super::report::{FindingReason, Report, join_names};
use super::nodes::join_node_names;
use super::view::{View, items};

/// The oldest Kubernetes version that the chart accepts.
pub(in super::super) const OLDEST_SUPPORTED: MajorMinor = MajorMinor(1, 34);
/// The newest Kubernetes version with which the cluster tests ran.
pub(in super::super) const NEWEST_TESTED: MajorMinor = MajorMinor(1, 37);
/// The first Kubernetes version in which `MutatingAdmissionPolicies` are enabled by default.
const FIRST_VERSION_WITH_MUTATING_POLICIES: MajorMinor = MajorMinor(1, 36);
/// Default priority classes of Cleave's pods. The `DaemonSets` use the first class, and the
/// operator uses the second class.
pub(in super::super) const SYSTEM_PRIORITY_CLASSES: [&str; 2] = ["system-node-critical", "system-cluster-critical"];

/// Adds the findings about the cluster as a whole.
pub(super) fn check(view: &View<'_>, report: &mut Report) {
    check_completeness(view, report);
    check_version(view, report);
    check_platform(view, report);
    check_priority_classes(view, report);
    if view.has_agents {
        report.add_info(
            FindingReason::AlreadyInstalled,
            "Cleave's agents are installed in this cluster.",
            "To upgrade, run `helm upgrade`. Install only one release in a cluster.",
        );
    }
}

/// Reports each part of the cluster that could not be read.
fn check_completeness(view: &View<'_>, report: &mut Report) {
    let facts = view.facts;
    let error = |known: Option<&String>, what: &str, skipped: &str, report: &mut Report| {
        if let Some(error) = known {
            let action = format!("Grant the right to list {what}, or add the file, and run preflight again.");
            report.add_warning(FindingReason::NotChecked, format!("Not checked: {skipped}. {what}: {error}"), action);
        }
    };
    error(facts.server.as_ref().err(), "version", "whether Cleave supports the version of Kubernetes", report);
    error(facts.admission.as_ref().err(), "API resources", "whether admission policies are available", report);
    error(read_error(&facts.nodes), "nodes", "the platform, GPUs, container runtimes, kernels and taints", report);
    error(read_error(&facts.daemon_sets), "daemonsets", "other device plugins and the driver's location", report);
    error(read_error(&facts.runtime_classes), "runtimeclasses", "the RuntimeClass of NVIDIA's runtime", report);
    error(read_error(&facts.quotas), "resourcequotas", "whether quotas allow Cleave's pods", report);
    error(read_error(&facts.limit_ranges), "limitranges", "default limits of the namespace", report);
    error(read_error(&facts.namespaces), "namespaces", "Pod Security and service meshes", report);
    error(read_error(&facts.priority_classes), "priorityclasses", "the priority classes of Cleave's pods", report);
    error(read_error(&facts.definitions), "customresourcedefinitions", "installed software that manages GPUs", report);
    error(read_error(&facts.mutating_webhooks), "mutatingwebhookconfigurations", "mutating webhooks", report);
    error(read_error(&facts.validating_webhooks), "validatingwebhookconfigurations", "validating webhooks", report);
}

fn read_error<T>(known: &ReadResult<Vec<T>>) -> Option<&String> {
    known.as_ref().err()
}

/// Checks the version and the admission policies of the API server.
fn check_version(view: &View<'_>, report: &mut Report) {
    let version = view.facts.server.as_ref().ok().and_then(|server| MajorMinor::parse(server.text()));
    if let (Ok(server), None) = (&view.facts.server, version) {
        let message = format!("Not checked: the version of Kubernetes. {:?} is not a version.", server.text());
        report.add_warning(FindingReason::NotChecked, message, "");
    }
    if let Some(version) = version.filter(|version| *version < OLDEST_SUPPORTED) {
        report.add_error(
            FindingReason::KubernetesTooOld,
            format!("The API server is Kubernetes {version}. Cleave needs {OLDEST_SUPPORTED} or newer."),
            format!("Upgrade the cluster to Kubernetes {OLDEST_SUPPORTED} or newer."),
        );
    }
    if let Some(version) = version.filter(|version| *version > NEWEST_TESTED) {
        report.add_warning(
            FindingReason::KubernetesUntested,
            format!("The API server is Kubernetes {version}. Cleave was tested up to {NEWEST_TESTED}."),
            "Try Cleave in a test cluster of this version first.",
        );
    }
    let Ok(admission) = &view.facts.admission else { return };
    let has = |name: &str| admission.resources.iter().any(|resource| resource.name == name);
    if !has("validatingadmissionpolicies") {
        report.add_error(
            FindingReason::AdmissionPoliciesMissing,
            "The API server does not serve ValidatingAdmissionPolicies of admissionregistration.k8s.io/v1, \
             so the chart cannot be installed.",
            "Remove --runtime-config settings that turn the API off.",
        );
    }
    if version.is_some_and(|version| version >= FIRST_VERSION_WITH_MUTATING_POLICIES)
        && !has("mutatingadmissionpolicies")
    {
        report.set_chart_value("admission.gate", "webhook");
        report.add_warning(
            FindingReason::MutatingPoliciesMissing,
            "The API server does not serve MutatingAdmissionPolicies of admissionregistration.k8s.io/v1, \
             which the chart uses from Kubernetes 1.36.",
            "Set admission.gate to webhook, or turn the API on.",
        );
    }
}

/// Reports the platform, and selects its values file.
fn check_platform(view: &View<'_>, report: &mut Report) {
    if view.facts.nodes.is_err() {
        return;
    }
    if let Some(platform) = view.platform() {
        let message = match platform {
            Platform::Kubeadm => "The nodes run an unmodified kubelet, as with kubeadm or Kubespray.".to_owned(),
            platform => format!("The platform is {}.", platform.name()),
        };
        report.add_info(FindingReason::PlatformDetected, message, "");
        report.values_files.extend(platform.values_file().map(|name| format!("platforms/{name}.yaml")));
        if let Some(directory) = platform.kubelet_directory() {
            report.set_chart_value("paths.kubelet", directory);
        }
    } else if view.platforms.is_empty() {
        report.add_warning(
            FindingReason::PlatformUnknown,
            "The nodes' labels, operating systems and kubelet versions match no known platform.",
            "Choose the driver's location and the device list strategy yourself. See docs/how-to/install.md.",
        );
    } else {
        let names = join_names(view.platforms.iter().map(|platform| platform.name()));
        report.add_warning(
            FindingReason::PlatformsMixed,
            format!("The GPU nodes belong to several platforms: {names}. One Helm release can serve only one of these platforms."),
            "Choose the nodes of one platform with --node-selector, and run preflight again.",
        );
    }
    check_autopilot(view, report);
}

/// Reports nodes of GKE Autopilot. The names of such nodes start with `gk3-`, and nothing else
/// identifies them. A Standard cluster may also have nodes of Autopilot.
fn check_autopilot(view: &View<'_>, report: &mut Report) {
    let autopilot = |node: &&&Node| Platform::of(node) == Some(Platform::Gke) && node.metadata.name.starts_with("gk3-");
    if !view.nodes.is_empty() && view.nodes.iter().all(|node| autopilot(&node)) {
        report.add_error(
            FindingReason::PrivilegedPodsRefused,
            "The cluster is a GKE Autopilot cluster. Autopilot refuses Cleave's privileged pods.",
            "Use a GKE Standard cluster.",
        );
        return;
    }
    let refusing: Vec<&Node> = view.gpu_nodes.iter().filter(autopilot).copied().collect();
    if !refusing.is_empty() {
        report.add_warning(
            FindingReason::PrivilegedPodsRefused,
            format!(
                "The names of {} start with gk3-, so GKE Autopilot may manage these nodes. Autopilot refuses Cleave's \
                 privileged pods.",
                join_node_names(refusing)
            ),
            "Use nodes of a Standard node pool.",
        );
    }
}

/// Checks that the priority classes of Cleave's pods exist.
fn check_priority_classes(view: &View<'_>, report: &mut Report) {
    if view.facts.priority_classes.is_err() {
        return;
    }
    let exists = |name: &str| items(&view.facts.priority_classes).iter().any(|class| class.metadata.name == name);
    let missing: Vec<&str> = SYSTEM_PRIORITY_CLASSES.into_iter().filter(|name| !exists(name)).collect();
    if !missing.is_empty() {
        report.add_error(
            FindingReason::PriorityClassMissing,
            format!("Priority classes do not exist: {}. Pods that name them are refused.", join_names(missing)),
            "Set nodes.priorityClassName and operator.priorityClassName to classes that exist.",
        );
    }
}
