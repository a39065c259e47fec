//! Reasons why a pod's rules about other pods, its volumes or an earlier pod exclude a node.
use super::selector::MAX_REQUIREMENTS;

/// Why a pod cannot run on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Conflict {
    /// No pod in the node's domain matches the pod's affinity.
    PodAffinity {
        /// Node label that defines the domain.
        topology_key: String,
    },
    /// A pod in the node's domain matches the pod's anti-affinity.
    PodAntiAffinity {
        /// Node label that defines the domain.
        topology_key: String,
    },
    /// A pod in the node's domain has anti-affinity to the pod. The message does not name the other
    /// pod, because it may belong to another tenant.
    AntiAffinityOf {
        /// Node label that defines the domain.
        topology_key: String,
    },
    /// The pod would exceed the maximum skew of its spread constraint.
    Spread {
        /// Node label that defines the domain.
        topology_key: String,
        /// Maximum difference from the domain with the fewest pods.
        max_skew: i32,
    },
    /// The node does not have a topology label that the pod's affinity or spread constraints need.
    NoTopologyKey {
        /// The missing label.
        topology_key: String,
    },
    /// Another pod uses a host port of the pod.
    HostPort(u16),
    /// The node still lists allocations of an earlier pod with the same name.
    Predecessor,
    /// A volume of the pod cannot be used from the node.
    Volume,
    /// The pod's rules exceed [`MAX_REQUIREMENTS`] comparisons.
    TooManyRules,
}

impl Conflict {
    /// Returns whether the conflict can end when other pods are created or terminate.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::PodAffinity { .. }
            | Self::PodAntiAffinity { .. }
            | Self::AntiAffinityOf { .. }
            | Self::Spread { .. }
            | Self::HostPort(_)
            | Self::Predecessor => true,
            Self::NoTopologyKey { .. } | Self::Volume | Self::TooManyRules => false,
        }
    }
}

impl std::fmt::Display for Conflict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PodAffinity { topology_key } => {
                write!(f, "no pod in the node's topology domain ({topology_key}) matches the pod's affinity")
            }
            Self::PodAntiAffinity { topology_key } => {
                write!(f, "a pod in the node's topology domain ({topology_key}) matches the pod's anti-affinity")
            }
            Self::AntiAffinityOf { topology_key } => {
                write!(f, "a pod in the node's topology domain ({topology_key}) has anti-affinity to this pod")
            }
            Self::Spread { topology_key, max_skew } => {
                write!(
                    f,
                    "the pod would exceed the maximum skew of {max_skew} in the node's topology domain ({topology_key})"
                )
            }
            Self::NoTopologyKey { topology_key } => {
                write!(f, "the topology label {topology_key}, which the pod's rules need, is missing")
            }
            Self::HostPort(port) => write!(f, "a pod on the node uses host port {port}"),
            Self::Predecessor => f.write_str("an earlier pod with this pod's name may still use GPUs of the node"),
            Self::Volume => f.write_str("the node affinity of one of the pod's volumes does not match"),
            Self::TooManyRules => {
                write!(
                    f,
                    "the pod's affinity, spread constraints and host ports exceed {MAX_REQUIREMENTS} requirements"
                )
            }
        }
    }
}
