//! Detects the platform of a node and the location of its driver.
use super::facts::Node;

/// A Kubernetes distribution with its operating system. Two platforms differ in their values file
/// or in their kubelet directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Platform {
    Gke,
    EksAl2023,
    EksBottlerocket,
    Aks,
    OpenShift,
    Talos,
    K3s,
    Rke2,
    K0s,
    MicroK8s,
    /// An unmodified kubelet, as kubeadm and Kubespray install it.
    Kubeadm,
}

/// Whether Cleave's pods use the `RuntimeClass` of NVIDIA's runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RuntimeClassUse {
    /// NVIDIA's runtime is the default runtime, or no runtime provides the driver.
    Never,
    /// An administrator decides whether NVIDIA's runtime is the default. The `RuntimeClass` exists
    /// if the runtime is not the default.
    IfFound,
    /// NVIDIA's runtime is not the default runtime.
    Always,
}

impl Platform {
    /// All platforms.
    #[cfg(test)]
    pub(super) const ALL: [Self; 11] = [
        Self::Gke,
        Self::EksAl2023,
        Self::EksBottlerocket,
        Self::Aks,
        Self::OpenShift,
        Self::Talos,
        Self::K3s,
        Self::Rke2,
        Self::K0s,
        Self::MicroK8s,
        Self::Kubeadm,
    ];

    /// Returns the platform's name in reports.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Gke => "GKE",
            Self::EksAl2023 => "EKS with Amazon Linux 2023",
            Self::EksBottlerocket => "EKS with Bottlerocket",
            Self::Aks => "AKS",
            Self::OpenShift => "OpenShift",
            Self::Talos => "Talos",
            Self::K3s => "k3s",
            Self::Rke2 => "RKE2",
            Self::K0s => "k0s",
            Self::MicroK8s => "MicroK8s",
            Self::Kubeadm => "unmodified kubelet (kubeadm or Kubespray)",
        }
    }

    /// Returns the name of the chart's values file for the platform, without its extension. Returns
    /// `None` if the chart has no such file.
    pub(super) const fn values_file(self) -> Option<&'static str> {
        match self {
            Self::Gke => Some("gke"),
            Self::EksAl2023 => Some("eks-al2023"),
            Self::EksBottlerocket => Some("eks-bottlerocket"),
            Self::Aks => Some("aks"),
            Self::OpenShift => Some("openshift"),
            Self::Talos => Some("talos"),
            Self::K3s => Some("k3s"),
            Self::Rke2 => Some("rke2"),
            Self::Kubeadm => Some("kubeadm"),
            Self::K0s | Self::MicroK8s => None,
        }
    }

    /// Returns the kubelet's directory, if the platform does not use the default directory.
    pub(super) const fn kubelet_directory(self) -> Option<&'static str> {
        match self {
            Self::K0s => Some("/var/lib/k0s/kubelet"),
            Self::MicroK8s => Some("/var/snap/microk8s/common/var/lib/kubelet"),
            _ => None,
        }
    }

    /// Returns whether Cleave's pods use the `RuntimeClass` of NVIDIA's runtime, on nodes without
    /// NVIDIA's GPU Operator.
    pub(super) const fn runtime_class(self) -> RuntimeClassUse {
        match self {
            Self::Gke | Self::EksAl2023 | Self::EksBottlerocket | Self::Aks => RuntimeClassUse::Never,
            Self::K0s | Self::MicroK8s | Self::Kubeadm => RuntimeClassUse::IfFound,
            Self::OpenShift | Self::Talos | Self::K3s | Self::Rke2 => RuntimeClassUse::Always,
        }
    }

    /// Returns the path of containerd's configuration, if the platform creates the `RuntimeClass`
    /// of NVIDIA's runtime on every cluster. On such a platform, only this file shows whether a
    /// node has the runtime.
    pub(super) const fn containerd_configuration(self) -> Option<&'static str> {
        match self {
            Self::K3s => Some("/var/lib/rancher/k3s/agent/etc/containerd/config.toml"),
            Self::Rke2 => Some("/var/lib/rancher/rke2/agent/etc/containerd/config.toml"),
            _ => None,
        }
    }

    /// Detects the platform of a node from its labels, operating system and kubelet version. Checks
    /// `OpenShift` and Talos, which run on every cloud, before the clouds. Returns `None` if
    /// nothing identifies a platform.
    pub(super) fn of(node: &Node) -> Option<Self> {
        let info = &node.status.node_info;
        let (os, kubelet) = (info.os_image.as_str(), info.kubelet_version.as_str());
        let has_label = |name: &str| node.metadata.labels.contains_key(name);
        let is_eks = kubelet.contains("-eks-") || has_label("eks.amazonaws.com/nodegroup");
        if has_label("node.openshift.io/os_id") || os.starts_with("Red Hat Enterprise Linux CoreOS") {
            Some(Self::OpenShift)
        } else if os.starts_with("Talos") {
            Some(Self::Talos)
        } else if kubelet.contains("-gke.") || has_label("cloud.google.com/gke-nodepool") {
            Some(Self::Gke)
        } else if os.starts_with("Bottlerocket") && is_eks {
            Some(Self::EksBottlerocket)
        } else if os.starts_with("Amazon Linux 2023") && is_eks {
            Some(Self::EksAl2023)
        } else if has_label("kubernetes.azure.com/cluster") || has_label("kubernetes.azure.com/agentpool") {
            Some(Self::Aks)
        } else if kubelet.contains("+rke2") {
            Some(Self::Rke2)
        } else if kubelet.contains("+k3s") {
            Some(Self::K3s)
        } else if kubelet.contains("+k0s") {
            Some(Self::K0s)
        } else if has_label("microk8s.io/cluster") {
            Some(Self::MicroK8s)
        } else {
            let upstream = kubelet.strip_prefix('v').is_some_and(|version| {
                version.split('.').count() == 3 && version.chars().all(|sign| sign.is_ascii_digit() || sign == '.')
            });
            upstream.then_some(Self::Kubeadm)
        }
    }
}

/// The location of the NVIDIA driver on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DriverLocation {
    /// NVIDIA's GPU Operator runs the driver in a container.
    OperatorContainer,
    /// GKE installs the driver in a host directory.
    GkeDirectory,
    /// System extensions of Talos contain the driver.
    TalosExtension,
    /// The image of Bottlerocket contains the driver.
    BottlerocketImage,
    /// Preflight assumes that the driver is in the host's usual directories.
    Host,
}

impl DriverLocation {
    /// Returns the driver's location on a platform. `in_container` states whether the GPU
    /// Operator's driver container runs on the GPU nodes.
    pub(super) const fn of(platform: Option<Platform>, in_container: bool) -> Self {
        match platform {
            _ if in_container => Self::OperatorContainer,
            Some(Platform::Gke) => Self::GkeDirectory,
            Some(Platform::Talos) => Self::TalosExtension,
            Some(Platform::EksBottlerocket) => Self::BottlerocketImage,
            _ => Self::Host,
        }
    }

    /// Describes the location.
    pub(super) const fn describe(self) -> &'static str {
        match self {
            Self::OperatorContainer => {
                "NVIDIA's GPU Operator runs the driver in a container. On the host, the driver is at /run/nvidia/driver."
            }
            Self::GkeDirectory => "GKE installs the driver in the host directory /home/kubernetes/bin/nvidia.",
            Self::TalosExtension => {
                "System extensions of Talos install the driver below /usr/local. \
                 The image of the node must contain these extensions."
            }
            Self::BottlerocketImage => {
                "The driver is in the image of Bottlerocket's NVIDIA variants. The default runtime of these variants gives containers the driver."
            }
            Self::Host => {
                "Nothing indicates a special location of the driver, so it should be in the host's usual directories."
            }
        }
    }
}
