//! Names that Cleave and its users share: resources, labels, annotations, field managers, condition
//! types and reasons.

use cleave_plan::device::SHARED_SUFFIX;

/// API group of the custom resources, and prefix of labels and annotations.
pub const GROUP: &str = "cleave.dev";
/// Shares of one GPU under MPS, unless a policy's `resourceName` says otherwise.
pub const RESOURCE_MPS: &str = "nvidia.com/gpu-mps";
/// Time-sliced replicas, unless a policy's `resourceName` says otherwise.
pub const RESOURCE_TIMESLICE: &str = "nvidia.com/gpu-timeslice";
/// Time-sliced replicas as NVIDIA's plugin names them where asked to rename.
pub const RESOURCE_SHARED: &str = "nvidia.com/gpu.shared";
/// Prefix of shares' names: `nvidia.com/gpu-mps`, `nvidia.com/gpu-10gb`.
pub const RESOURCE_SHARES_PREFIX: &str = "nvidia.com/gpu-";
/// Whole GPUs.
pub const RESOURCE_GPU: &str = "nvidia.com/gpu";
/// Prefix of MIG instances' names: `nvidia.com/mig-1g.10gb`.
pub const RESOURCE_MIG_PREFIX: &str = "nvidia.com/mig-";
/// The scheduling gate that pods asking for placed resources carry.
pub const GATE: &str = "cleave.dev/placement";
/// The label of a namespace with exceptions to what is refused and gated: a word, or several with
/// dots between them.
pub const ALLOW_LABEL: &str = "cleave.dev/allow";
/// Word of [`ALLOW_LABEL`]: pods go to the scheduler without a gate.
pub const ALLOW_PLACEMENT: &str = "placement";
/// Word of [`ALLOW_LABEL`]: containers with shares get no `preStop` hook.
pub const ALLOW_PRE_STOP: &str = "pre-stop";
/// Annotation by which a pod declines a `preStop` hook: [`PRE_STOP_NONE`].
pub const PRE_STOP: &str = "cleave.dev/pre-stop";
/// Value of [`PRE_STOP`].
pub const PRE_STOP_NONE: &str = "none";
/// Value of [`ALLOW_LABEL`], alone: nothing is looked at.
pub const ALLOW_ALL: &str = "all";

/// The operator's field manager, on `GpuNode.spec` and `SharingPolicy.status`.
pub const OPERATOR_MANAGER: &str = "cleave-operator";
/// The agent's field manager, on `GpuNode.status`.
pub const AGENT_MANAGER: &str = "cleave-agent";

/// Condition of a `GpuNode`: the node matches its spec.
pub const CONDITION_APPLIED: &str = "Applied";
/// Condition of a `GpuNode` and a `SharingPolicy`: everything is in order.
pub const CONDITION_READY: &str = "Ready";
/// Condition of a `GpuNode`: every GPU can serve.
pub const CONDITION_GPUS_HEALTHY: &str = "GpusHealthy";
/// Annotation of a `GpuNode`: its cordoned GPUs; [`crate::cordon::Cordons`].
pub const CORDON_ANNOTATION: &str = "cleave.dev/cordon";
/// Annotation of a `GpuNode`: GPUs whose trouble up to a time an administrator says is over;
/// [`crate::cordon::Cleared`].
pub const CLEARED_ANNOTATION: &str = "cleave.dev/cleared";
/// Taint of nodes that can serve nobody, where the operator is asked for it.
pub const UNHEALTHY_TAINT: &str = "cleave.dev/unhealthy";
/// Class of a GPU that is healthy again after a quiet time and an answer;
/// [`crate::gpunode::Health::class`].
pub const HEALTH_SUSPECT: &str = "Suspect";
/// Class of a GPU that has to be reset.
pub const HEALTH_NEEDS_RESET: &str = "NeedsReset";
/// Class of a GPU that NVML cannot ask.
pub const HEALTH_LOST: &str = "Lost";
/// Reason of an unhealthy GPU whose MPS daemon does not serve.
pub const HEALTH_MPS_UNAVAILABLE: &str = "MpsUnavailable";
/// Mode of a GPU that serves nothing shared; [`crate::gpunode::GpuStatus::mode`].
pub const MODE_WHOLE: &str = "Whole";
/// Mode of a GPU that serves MPS shares.
pub const MODE_MPS: &str = "Mps";
/// Mode of a GPU that serves time-sliced replicas.
pub const MODE_TIMESLICING: &str = "TimeSlicing";
/// Mode of a GPU that is cut into MIG instances.
pub const MODE_MIG: &str = "Mig";

/// Result of a step: the node is as this step wants it.
pub const STEP_DONE: &str = "Done";
/// Result of a step: pods hold what it would take away.
pub const STEP_WAITING: &str = "Waiting";
/// Reason of a step with result [`STEP_WAITING`]: pods or processes use what it would remove.
pub const STEP_IN_USE: &str = "InUse";
/// Result of a step: it cannot be done at all.
pub const STEP_REFUSED: &str = "Refused";
/// Result of a step: it was tried and went wrong.
pub const STEP_FAILED: &str = "Failed";

/// Condition of a pod, written by the operator: it keeps to the shares that it holds. Its reason is
/// one of [`finding`].
pub const CONDITION_WITHIN_SHARE: &str = "cleave.dev/WithinShare";
/// Reason of [`CONDITION_WITHIN_SHARE`] when it is true again.
pub const WITHIN_SHARE: &str = "WithinShare";

/// Condition of a pod, written by the operator: `False` when the pod was released to nodes that no
/// longer take it and nothing re-creates it.
pub const CONDITION_PLACED: &str = "cleave.dev/Placed";
/// Annotation of a pod that the operator released although no GPU of the cluster could hold it.
pub const UNSCHEDULABLE_ANNOTATION: &str = "cleave.dev/unschedulable";
/// Prefix of node labels that say how many units of a resource the largest GPU of a node has:
/// `largest.cleave.dev/gpu-mps`. A pod that no GPU of the cluster can hold is released with a
/// requirement on it, so that an autoscaler adds only nodes that can hold the pod.
pub const LARGEST_PREFIX: &str = "largest.cleave.dev/";

/// What a tenant can do that leaves its share; kinds of [`crate::gpunode::FindingStatus`].
pub mod finding {
    /// A container's processes use more of a GPU's memory than its shares allow.
    pub const MEMORY_EXCEEDED: &str = "MemoryExceeded";
    /// A process computes on a shared GPU and is no client of its MPS daemon.
    pub const OUTSIDE_MPS: &str = "OutsideMps";
    /// A client of an MPS daemon is of a pod that holds no share there.
    pub const NO_SHARE: &str = "NoShare";
}

/// Label of Cleave's own pods: which of the three they are, as the chart writes it.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";
/// Value of [`COMPONENT_LABEL`] on the agents' pods.
pub const COMPONENT_AGENT: &str = "agent";

/// Condition of a `SharingPolicy`: its fields mean something on the GPUs that it selects.
pub const CONDITION_ACCEPTED: &str = "Accepted";
/// Condition of a `SharingPolicy`: a more specific or older policy took GPUs from it.
pub const CONDITION_CONFLICT: &str = "Conflict";

/// Whether a resource is one that Cleave can serve, by its name.
pub fn is_served(resource: &str) -> bool {
    resource == RESOURCE_GPU
        || resource == RESOURCE_SHARED
        || resource.starts_with(RESOURCE_SHARES_PREFIX)
        || resource.starts_with(RESOURCE_MIG_PREFIX)
}

/// Whether a resource is one that pods share GPUs by, by its name: all that is served but whole
/// GPUs. The admission policies in the chart have the same.
pub fn is_shared(resource: &str) -> bool {
    is_served(resource) && resource != RESOURCE_GPU
}

/// Whether a resource may be shares under MPS, by its name; a policy may make turns of some. The
/// admission policies in the chart have the same.
pub fn is_mps(resource: &str) -> bool {
    let of_instance = resource.starts_with(RESOURCE_MIG_PREFIX) && resource.ends_with(SHARED_SUFFIX);
    resource.starts_with(RESOURCE_SHARES_PREFIX) && resource != RESOURCE_TIMESLICE || of_instance
}

/// The extended resource of MIG instances of a profile, named as NVIDIA's plugin names it: `+`
/// becomes a dot.
pub fn mig_resource(profile: &str) -> String {
    format!("{RESOURCE_MIG_PREFIX}{}", profile.replace('+', "."))
}

/// Reasons of a `SharingPolicy`'s conditions.
pub mod reason {
    /// Accepted: the fields mean something.
    pub const ACCEPTED: &str = "Accepted";
    /// Ready: the GPUs are shared as the policy says.
    pub const READY: &str = "Ready";
    /// Not Conflict: no GPU is selected by another policy that wins.
    pub const NO_CONFLICT: &str = "NoConflict";
    /// Conflict, or not Ready: other policies have its GPUs.
    pub const OVERRIDDEN: &str = "Overridden";
    /// The object is not what the definition says.
    pub const MALFORMED: &str = "Malformed";
    /// The fields mean nothing together.
    pub const INVALID: &str = "Invalid";
    /// No node has the labels.
    pub const NO_NODE_MATCHES: &str = "NoNodeMatches";
    /// The selected nodes have no GPU.
    pub const NO_GPU: &str = "NoGpu";
    /// The selected nodes have GPUs, and none is meant.
    pub const NO_GPU_MATCHES: &str = "NoGpuMatches";
    /// No GPU of the selected nodes is of the model.
    pub const UNKNOWN_MODEL: &str = "UnknownModel";
    /// No selected node has the GPU.
    pub const UNKNOWN_GPU: &str = "UnknownGpu";
    /// Not even one share fits.
    pub const GPU_TOO_SMALL: &str = "GpuTooSmall";
    /// The GPU cannot do MIG.
    pub const MIG_NOT_SUPPORTED: &str = "MigNotSupported";
    /// The MIG layout cannot be had on the GPU.
    pub const LAYOUT_NOT_POSSIBLE: &str = "LayoutNotPossible";
    /// A node or GPU takes no part in plans: it does not answer, or could not be cut as it was
    /// told.
    pub const LEFT_OUT: &str = "LeftOut";
    /// No agent says what the node has, or is.
    pub const AGENT_NOT_REPORTING: &str = "AgentNotReporting";
    /// The node has not done it yet.
    pub const APPLYING: &str = "Applying";
    /// Pods hold what would be taken away.
    pub const WAITING_FOR_PODS: &str = "WaitingForPods";
    /// The agent refuses it.
    pub const APPLY_REFUSED: &str = "ApplyRefused";
    /// The agent tried and failed.
    pub const APPLY_FAILED: &str = "ApplyFailed";
    /// The GPU or its MPS daemon cannot serve.
    pub const GPU_UNHEALTHY: &str = "GpuUnhealthy";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mig_resources_are_named_as_nvidia_names_them() {
        assert_eq!(mig_resource("1g.10gb"), "nvidia.com/mig-1g.10gb");
        assert_eq!(mig_resource("1g.10gb+me"), "nvidia.com/mig-1g.10gb.me");
    }

    #[test]
    fn only_names_that_pods_are_placed_for_are_served() {
        for served in [
            RESOURCE_GPU,
            RESOURCE_MPS,
            RESOURCE_TIMESLICE,
            RESOURCE_SHARED,
            "nvidia.com/mig-1g.5gb",
            "nvidia.com/gpu-10gb",
        ] {
            assert!(is_served(served), "{served}");
            assert_eq!(is_shared(served), served != RESOURCE_GPU, "{served}");
        }
        for other in ["nvidia.com/gpumps", "amd.com/gpu", "nvidia.com/gpu.shared2", "cpu", ""] {
            assert!(!is_served(other) && !is_shared(other), "{other}");
        }
    }

    #[test]
    fn shares_under_mps_are_told_by_their_names() {
        for mps in [RESOURCE_MPS, "nvidia.com/gpu-10gb", "nvidia.com/gpu-gold", "nvidia.com/mig-1g.10gb.shared"] {
            assert!(is_mps(mps), "{mps}");
        }
        for other in [RESOURCE_GPU, RESOURCE_TIMESLICE, RESOURCE_SHARED, "nvidia.com/mig-1g.10gb", "cpu", "a/gpu-mps"] {
            assert!(!is_mps(other), "{other}");
        }
    }
}
