//! Checks for other software that manages the same GPUs, and for the driver's location.
use super::super::facts::{DaemonSet, Node};
use super::super::platform::{DriverLocation, Platform, RuntimeClassUse};
use super::super::report::{FindingReason, Report};
use super::nodes::{is_eks_auto, join_node_names, serves_gpus};
use super::view::{View, can_run, items, runs_cleave_agent};

/// The role of a `DaemonSet` on GPU nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Advertises GPUs to the kubelet, or controls MPS for a device plugin.
    Plugin,
    /// Allocates GPUs through dynamic resource allocation.
    Dra,
    /// Changes MIG modes.
    MigManager,
    /// Runs the driver.
    Driver,
}

/// A known product, and the rule that recognizes its `DaemonSet`.
struct Product {
    role: Role,
    name: &'static str,
    /// How an administrator excludes the software from a node.
    action: &'static str,
    /// Whether a `DaemonSet` belongs to the software.
    recognizes: fn(&DaemonSet) -> bool,
}

/// The name of NVIDIA's `RuntimeClass`.
const RUNTIME_CLASS: &str = "nvidia";
/// Prefix of the labels in the node selectors of the GPU Operator's `DaemonSets`.
const GPU_OPERATOR_LABEL_PREFIX: &str = "nvidia.com/gpu.deploy.";
/// Custom resource definitions of software that manages GPUs: the definition, the software, and the
/// action for the administrator.
const RIVAL_DEFINITIONS: [(&str, &str, &str); 3] = [
    (
        "clusterpolicies.nvidia.com",
        "NVIDIA's GPU Operator",
        "Set devicePlugin.enabled and migManager.enabled to false in the GPU Operator's chart or ClusterPolicy.",
    ),
    ("elasticquotas.nos.nebuly.com", "Nos", "Do not let Nos partition GPUs of nodes that Cleave will manage."),
    (
        "computedomains.resource.nvidia.com",
        "NVIDIA's DRA driver",
        "Install it with resources.gpus.enabled=false. It may still provide ComputeDomains.",
    ),
];
/// The container of NVIDIA's DRA driver that allocates GPUs. The driver's other container allocates
/// `ComputeDomain`s.
const DRA_GPU_CONTAINER: &str = "gpus";

/// The products that preflight recognizes. The first match wins, so special cases come first. A
/// label in the node selector identifies the GPU Operator's `DaemonSets` more reliably than their
/// names.
static PRODUCTS: [Product; 12] = [
    Product {
        role: Role::Driver,
        name: "NVIDIA's driver container",
        action: "",
        recognizes: |set| {
            selects_label(set, "nvidia.com/gpu.deploy.driver")
                || is_named(set, "nvidia-driver-daemonset")
                || uses_image(set, "nvidia/driver:")
        },
    },
    Product {
        role: Role::MigManager,
        name: "NVIDIA's MIG manager",
        action: "Label the nodes nvidia.com/gpu.deploy.mig-manager=false, or set agent.migMode to Never.",
        recognizes: |set| {
            selects_label(set, "nvidia.com/gpu.deploy.mig-manager")
                || is_named(set, "nvidia-mig-manager")
                || uses_image(set, "k8s-mig-manager")
        },
    },
    Product {
        role: Role::Dra,
        name: "NVIDIA's DRA driver",
        action: "Exclude the nodes from the driver's kubelet plugin, or install the driver with resources.gpus.enabled=false.",
        recognizes: |set| is_named(set, "nvidia-dra-driver") || uses_image(set, "k8s-dra-driver-gpu"),
    },
    Product {
        role: Role::Plugin,
        name: "the device plugin of HAMi",
        action: "Remove the label gpu=on from the nodes, or uninstall HAMi.",
        recognizes: |set| is_named(set, "hami-device-plugin") || uses_image(set, "projecthami/"),
    },
    Product {
        role: Role::Plugin,
        name: "Nos",
        action: "Remove the label nos.nebuly.com/gpu-partitioning from the nodes, or uninstall Nos.",
        recognizes: |set| uses_image(set, "nebuly") || is_named(set, "nos-mig-agent") || is_named(set, "nos-gpu-agent"),
    },
    Product {
        role: Role::Plugin,
        name: "the device plugin of Volcano",
        action: "Exclude the nodes with a node selector in the plugin's DaemonSet.",
        recognizes: |set| is_named(set, "volcano-device-plugin") || uses_image(set, "volcano-vgpu-device-plugin"),
    },
    Product {
        role: Role::Plugin,
        name: "the GPU share plugin of Alibaba Cloud",
        action: "Remove the label gpushare=true from the nodes.",
        recognizes: |set| is_named(set, "gpushare-device-plugin") || uses_image(set, "gpushare-plugin"),
    },
    Product {
        role: Role::Plugin,
        name: "GKE's device plugin",
        action: "Create the node pool with the label gke-no-default-nvidia-gpu-device-plugin=true and with \
                 gpu-driver-version=disabled. Then install the driver by Google's DaemonSet nvidia-driver-installer: \
                 nvidia-driver-installer/cos/daemonset-preloaded.yaml for Container-Optimized OS, or \
                 nvidia-driver-installer/ubuntu/daemonset-preloaded.yaml for Ubuntu, of the repository \
                 GoogleCloudPlatform/container-engine-accelerators.",
        recognizes: |set| set.metadata.namespace == "kube-system" && is_named(set, "nvidia-gpu-device-plugin"),
    },
    Product {
        role: Role::Plugin,
        name: "the device plugin of NVIDIA's GPU Operator",
        action: "Label the nodes nvidia.com/gpu.deploy.device-plugin=false. To disable the plugin on all nodes, set \
                 devicePlugin.enabled=false in the GPU Operator's chart.",
        recognizes: |set| selects_label(set, "nvidia.com/gpu.deploy.device-plugin"),
    },
    Product {
        role: Role::Plugin,
        name: "the MPS control daemon of NVIDIA's device plugin",
        action: "Remove MPS from the configuration of NVIDIA's device plugin.",
        recognizes: |set| is_named(set, "mps-control-daemon"),
    },
    Product {
        role: Role::Plugin,
        name: "NVIDIA's device plugin",
        action: "Delete the plugin's DaemonSet, or exclude the nodes with a node affinity in the DaemonSet.",
        recognizes: |set| {
            (is_named(set, "nvidia-device-plugin") || uses_image(set, "k8s-device-plugin"))
                && !is_feature_discovery(set)
        },
    },
    Product {
        role: Role::Plugin,
        name: "a device plugin for NVIDIA GPUs",
        action: "Delete the plugin's DaemonSet, or exclude the nodes with a node affinity in the DaemonSet.",
        recognizes: |set| is_named(set, "nvidia-gpu-device-plugin") || is_named(set, "gpu-device-plugin-nvidia"),
    },
];

fn is_named(set: &DaemonSet, part: &str) -> bool {
    set.metadata.name.contains(part)
}

fn uses_image(set: &DaemonSet, image: &str) -> bool {
    set.spec.template.spec.containers.iter().any(|container| container.image.contains(image))
}

fn selects_label(set: &DaemonSet, label: &str) -> bool {
    set.spec.template.spec.node_selector.contains_key(label)
}

/// Returns whether the `DaemonSet` is GPU feature discovery, which uses the image of the device
/// plugin.
fn is_feature_discovery(set: &DaemonSet) -> bool {
    let command = |command: &String| command.contains("feature-discovery");
    is_named(set, "feature-discovery")
        || set.spec.template.spec.containers.iter().any(|container| container.command.iter().any(command))
}

/// A recognized `DaemonSet` and the GPU nodes on which it runs.
struct RecognizedDaemonSet<'a> {
    daemon_set: &'a DaemonSet,
    product: &'static Product,
    /// The GPU nodes on which the `DaemonSet` runs.
    nodes: Vec<&'a Node>,
}

/// Adds the findings about other software.
pub(super) fn check(view: &View<'_>, report: &mut Report) {
    let found: Vec<RecognizedDaemonSet<'_>> = view.daemon_sets.iter().filter_map(|set| recognize(view, set)).collect();
    check_plugins(view, &found, report);
    check_definitions(view, &found, report);
    check_dra(&found, report);
    check_mig_manager(&found, report);
    check_driver(view, &found, report);
}

/// Recognizes a `DaemonSet`, and finds the GPU nodes on which it runs. Returns `None` for a
/// `DaemonSet` of Cleave or of an unknown product.
fn recognize<'a>(view: &View<'a>, set: &'a DaemonSet) -> Option<RecognizedDaemonSet<'a>> {
    if runs_cleave_agent(set) {
        return None;
    }
    let product = PRODUCTS.iter().find(|product| (product.recognizes)(set))?;
    let nodes = view.gpu_nodes.iter().filter(|node| can_run(&set.spec.template.spec, node)).copied().collect();
    Some(RecognizedDaemonSet { daemon_set: set, product, nodes })
}

fn with_role<'f, 'a>(
    found: &'f [RecognizedDaemonSet<'a>],
    role: Role,
) -> impl Iterator<Item = &'f RecognizedDaemonSet<'a>> {
    found.iter().filter(move |found| found.product.role == role)
}

/// Reports other device plugins. Two plugins on a node must not advertise the same GPUs.
fn check_plugins(view: &View<'_>, found: &[RecognizedDaemonSet<'_>], report: &mut Report) {
    for plugin in with_role(found, Role::Plugin) {
        let (set, name) = (plugin.daemon_set.metadata.full_name(), plugin.product.name);
        if plugin.nodes.is_empty() {
            report.add_info(
                FindingReason::RivalPluginElsewhere,
                format!("DaemonSet {set} is {name}. It runs on no GPU node that Cleave will manage."),
                "",
            );
        } else {
            report.add_error(
                FindingReason::RivalPlugin,
                format!(
                    "DaemonSet {set} is {name}, and runs on {}. Two plugins must not advertise the same GPUs.",
                    join_node_names(plugin.nodes.iter().copied())
                ),
                format!(
                    "{} To move one node at a time, choose the nodes for Cleave with --node-selector.",
                    plugin.product.action
                ),
            );
        }
    }
    let explained = |node: &Node| {
        let plugins = with_role(found, Role::Plugin).chain(with_role(found, Role::Dra));
        plugins.flat_map(|plugin| &plugin.nodes).any(|other| other.metadata.name == node.metadata.name)
    };
    if view.facts.daemon_sets.is_err() || view.has_agents {
        return;
    }
    let served: Vec<&Node> =
        view.gpu_nodes.iter().filter(|node| serves_gpus(node) && !explained(node)).copied().collect();
    if !served.is_empty() {
        let auto = served.iter().any(|node| is_eks_auto(node));
        let bottlerocket = served.iter().any(|node| Platform::of(node) == Some(Platform::EksBottlerocket));
        let action = if auto {
            "EKS Auto Mode runs its own device plugin. Use nodes that EKS Auto Mode does not manage."
        } else if bottlerocket {
            "Set settings.kubelet-device-plugins.nvidia.enabled to false in the user data. Bottlerocket 1.63 is the \
             first version with this setting."
        } else {
            "Find the program that registered with the kubelet, and stop it. If a plugin was just removed, wait \
             until the kubelet no longer reports its resources."
        };
        report.add_error(
            FindingReason::GpusServedByOthers,
            format!("A device plugin that is not a known DaemonSet serves GPUs on {}.", join_node_names(served)),
            action,
        );
    }
}

/// Reports installed software, unless a known device plugin, DRA driver or MIG manager runs on the
/// GPU nodes. The software may start a device plugin later.
fn check_definitions(view: &View<'_>, found: &[RecognizedDaemonSet<'_>], report: &mut Report) {
    let runs_plugins = found.iter().any(|found| {
        matches!(found.product.role, Role::Plugin | Role::Dra | Role::MigManager) && !found.nodes.is_empty()
    });
    let exists = |name: &str| items(&view.facts.definitions).iter().any(|one| one.metadata.name == name);
    for (definition, software, action) in RIVAL_DEFINITIONS {
        if !runs_plugins && exists(definition) {
            report.add_info(
                FindingReason::OtherSoftwareInstalled,
                format!("{software} is installed: the custom resource definition {definition} exists."),
                action,
            );
        }
    }
}

/// Reports NVIDIA's DRA driver, if it allocates GPUs.
fn check_dra(found: &[RecognizedDaemonSet<'_>], report: &mut Report) {
    let allocates = |found: &&RecognizedDaemonSet<'_>| {
        found.daemon_set.spec.template.spec.containers.iter().any(|container| container.name == DRA_GPU_CONTAINER)
    };
    for driver in with_role(found, Role::Dra).filter(allocates).filter(|driver| !driver.nodes.is_empty()) {
        report.add_error(
            FindingReason::DraDriver,
            format!(
                "DaemonSet {} is NVIDIA's DRA driver, and allocates GPUs on {}. It does not know which GPUs Cleave \
                 allocates.",
                driver.daemon_set.metadata.full_name(),
                join_node_names(driver.nodes.iter().copied())
            ),
            driver.product.action,
        );
    }
}

/// Reports NVIDIA's MIG manager. The suggested values leave MIG mode to the MIG manager.
fn check_mig_manager(found: &[RecognizedDaemonSet<'_>], report: &mut Report) {
    for manager in with_role(found, Role::MigManager).filter(|manager| !manager.nodes.is_empty()) {
        report.set_chart_value("agent.migMode", "Never");
        report.add_warning(
            FindingReason::MigManager,
            format!(
                "DaemonSet {} is NVIDIA's MIG manager, and runs on {}. Both the MIG manager and Cleave's agents would change MIG mode.",
                manager.daemon_set.metadata.full_name(),
                join_node_names(manager.nodes.iter().copied())
            ),
            manager.product.action,
        );
    }
}

/// Reports the driver's location, and the `RuntimeClass` that gives Cleave's pods the driver.
fn check_driver(view: &View<'_>, found: &[RecognizedDaemonSet<'_>], report: &mut Report) {
    if view.gpu_nodes.is_empty() {
        return;
    }
    let in_container = with_role(found, Role::Driver).any(|driver| !driver.nodes.is_empty());
    let driver_location = DriverLocation::of(view.platform(), in_container);
    report.add_info(FindingReason::DriverLayout, driver_location.describe(), "");
    let has_operator = view.daemon_sets.iter().any(|set| {
        let selector = &set.spec.template.spec.node_selector;
        selector.keys().any(|label| label.starts_with(GPU_OPERATOR_LABEL_PREFIX))
            && view.gpu_nodes.iter().any(|node| can_run(&set.spec.template.spec, node))
    });
    let uses_operator = has_operator || in_container;
    if uses_operator {
        report.values_files.push("platforms/gpu-operator.yaml".to_owned());
    }
    check_runtime_class(view, uses_operator, report);
}

/// Sets `driver.runtimeClassName` if the platform uses the `RuntimeClass` and the `RuntimeClass`
/// exists. Reports a missing `RuntimeClass` if the platform requires it. The values file of the GPU
/// Operator requires the `RuntimeClass` on every platform.
fn check_runtime_class(view: &View<'_>, uses_operator: bool, report: &mut Report) {
    if view.facts.runtime_classes.is_err() {
        return;
    }
    let of_platforms = view.platforms.iter().map(|platform| platform.runtime_class()).max();
    let usage = if uses_operator { RuntimeClassUse::Always } else { of_platforms.unwrap_or(RuntimeClassUse::IfFound) };
    let exists = items(&view.facts.runtime_classes).iter().any(|class| class.metadata.name == RUNTIME_CLASS);
    match (usage, exists) {
        (RuntimeClassUse::Never, _) | (RuntimeClassUse::IfFound, false) => {}
        (RuntimeClassUse::IfFound | RuntimeClassUse::Always, true) => {
            report.set_chart_value("driver.runtimeClassName", RUNTIME_CLASS);
            report_runtime_class(view, report);
        }
        (RuntimeClassUse::Always, false) => report.add_error(
            FindingReason::RuntimeClassMissing,
            "The RuntimeClass nvidia does not exist. On this platform, Cleave's pods get the driver through this RuntimeClass.",
            "Install NVIDIA's container toolkit on the nodes, and create a RuntimeClass nvidia with handler nvidia.",
        ),
    }
}

/// Reports the `RuntimeClass` that Cleave's pods will use, and whether this `RuntimeClass` proves
/// that nodes have NVIDIA's runtime.
fn report_runtime_class(view: &View<'_>, report: &mut Report) {
    const POD_ADVICE: &str = "With agent.deviceListStrategy Envvar, add runtimeClassName: nvidia to pods that request GPUs, \
                        unless NVIDIA's runtime is the default runtime.";
    let mut bundled = false;
    for platform in &view.platforms {
        let Some(file) = platform.containerd_configuration() else { continue };
        bundled = true;
        let name = platform.name();
        report.add_warning(
            FindingReason::RuntimeHandlerUnknown,
            format!(
                "The RuntimeClass nvidia exists, but {name} creates it on every cluster. If a node lacks NVIDIA's \
                 container toolkit, Cleave's pods cannot start there."
            ),
            format!(
                "Run `grep nvidia {file}` on each GPU node. If it prints nothing, install NVIDIA's container toolkit on \
                 the node, and restart {name}. {POD_ADVICE}"
            ),
        );
    }
    if !bundled {
        report.add_info(
            FindingReason::RuntimeClassFound,
            "The RuntimeClass nvidia exists. Cleave's pods will use it to get the driver.",
            POD_ADVICE,
        );
    }
}
