//! Names that Cleave shares with its users: resources, labels, annotations, field managers,
//! condition types and reasons.

use cleave_plan::device::SHARED_SUFFIX;

/// API group of the custom resources, and prefix of labels and annotations.
pub const API_GROUP: &str = "cleave.dev";
/// Resource of MPS shares of one GPU, unless a policy sets `resourceName`.
pub const RESOURCE_MPS: &str = "nvidia.com/gpu-mps";
/// Resource of time-sliced replicas, unless a policy sets `resourceName`.
pub const RESOURCE_TIMESLICE: &str = "nvidia.com/gpu-timeslice";
/// Resource of time-sliced replicas in NVIDIA's device plugin with `renameByDefault`.
pub const RESOURCE_SHARED: &str = "nvidia.com/gpu.shared";
/// Prefix of the resources of shares, replicas and sized slices, such as `nvidia.com/gpu-mps` and
/// `nvidia.com/gpu-10gb`.
pub const RESOURCE_SHARES_PREFIX: &str = "nvidia.com/gpu-";
/// Resource of whole GPUs.
pub const RESOURCE_GPU: &str = "nvidia.com/gpu";
/// Prefix of the resources of MIG instances: `nvidia.com/mig-1g.10gb`.
pub const RESOURCE_MIG_PREFIX: &str = "nvidia.com/mig-";
/// The placement gate: the scheduling gate of pods that request GPUs.
pub const GATE: &str = "cleave.dev/placement";
/// Label of a namespace that exempts its pods from admission rules or quotas. The value of the
/// label is one or more words, separated by dots.
pub const ALLOW_LABEL: &str = "cleave.dev/allow";
/// Word of [`ALLOW_LABEL`]: pods receive no placement gate.
pub const ALLOW_PLACEMENT: &str = "placement";
/// Word of [`ALLOW_LABEL`]: containers with shares receive no `preStop` hook.
pub const ALLOW_PRE_STOP: &str = "pre-stop";
/// Annotation of a pod that declines a `preStop` hook. The annotation's value is
/// [`PRE_STOP_NONE`].
pub const PRE_STOP_ANNOTATION: &str = "cleave.dev/pre-stop";
/// Value of [`PRE_STOP_ANNOTATION`].
pub const PRE_STOP_NONE: &str = "none";
/// Annotation of a pod that overrides `replicaPlacement` of the GPUs' policies: `Spread` or `Pack`.
/// Other values have no effect.
pub const REPLICA_PLACEMENT_ANNOTATION: &str = "cleave.dev/replica-placement";
/// Annotation of a pod that runs only within its quota's guarantee. The annotation's value is
/// [`BORROW_NEVER`].
pub const BORROW_ANNOTATION: &str = "cleave.dev/borrow";
/// Value of [`BORROW_ANNOTATION`].
pub const BORROW_NEVER: &str = "Never";
/// Annotation of a pod with the name of its gang. Pods of a namespace with the same gang name are
/// released and evicted together.
pub const GANG_ANNOTATION: &str = "cleave.dev/gang";
/// Annotation of a pod with the size of its gang. No pod of a gang is released before this number
/// of pods can be released.
pub const GANG_SIZE_ANNOTATION: &str = "cleave.dev/gang-size";
/// Label that names a pod's group for Kueue.
pub const KUEUE_GROUP_LABEL: &str = "kueue.x-k8s.io/pod-group-name";
/// Annotation with the number of pods in a pod's group for Kueue.
pub const KUEUE_GROUP_COUNT_ANNOTATION: &str = "kueue.x-k8s.io/pod-group-total-count";
/// Labels of pods that Kueue admits: plain pods, and pods of jobs.
pub const KUEUE_LABELS: [&str; 2] = ["kueue.x-k8s.io/managed", "kueue.x-k8s.io/podset"];
/// Label that names a pod's `PodGroup` for the coscheduling plugin.
pub const POD_GROUP_LABEL: &str = "scheduling.x-k8s.io/pod-group";
/// Annotation of a waiting pod for which other pods are evicted: the units that are kept for the
/// waiting pod, as a [`crate::placement::Placement`]. If the leader of the operator changes, the
/// next leader keeps these units and evicts no further pods.
pub const NOMINATION_ANNOTATION: &str = "cleave.dev/nomination";
/// Annotation of a waiting pod within the guarantee, while disruption budgets block the evictions
/// that the pod needs: since when, in seconds since the Unix epoch. After a change of the
/// operator's leader, the time for which budgets may block the evictions does not restart.
pub const PROTECTED_SINCE_ANNOTATION: &str = "cleave.dev/protected-since";
/// Label of a running pod that quotas count: whether the pod is within its quota's guarantee. The
/// operator writes the label, but bases no decision on it.
pub const CAPACITY_LABEL: &str = "cleave.dev/capacity";
/// Value of [`CAPACITY_LABEL`]: the pod is within its quota's guarantee.
pub const CAPACITY_IN_QUOTA: &str = "in-quota";
/// Value of [`CAPACITY_LABEL`]: the pod borrows.
pub const CAPACITY_OVER_QUOTA: &str = "over-quota";
/// Word of [`ALLOW_LABEL`]: quotas neither delay nor evict pods of the namespace.
pub const ALLOW_QUOTA: &str = "quota";
/// Word of [`ALLOW_LABEL`]: no admission rule applies. This word must be the only word of the
/// label.
pub const ALLOW_ALL: &str = "all";

/// Field manager of the operator, for example for `GpuNode.spec` and `SharingPolicy.status`.
pub const OPERATOR_FIELD_MANAGER: &str = "cleave-operator";
/// Field manager of the agent, for `GpuNode.status`.
pub const AGENT_FIELD_MANAGER: &str = "cleave-agent";

/// Condition of a `GpuNode`: the node matches its spec.
pub const CONDITION_APPLIED: &str = "Applied";
/// Condition of a `GpuNode`, a `SharingPolicy` and a `GpuQuota`: no problem is known.
pub const CONDITION_READY: &str = "Ready";
/// Condition of a `GpuQuota`: healthy GPUs suffice for all guarantees, and no pod within the
/// guarantee waits for GPUs.
pub const CONDITION_GUARANTEED: &str = "Guaranteed";
/// Condition of a `GpuQuota`: the operator delays and evicts pods as the quota requires.
pub const CONDITION_ENFORCED: &str = "Enforced";
/// Reason of the condition `Enforced` if Kueue admits pods of the quota too.
pub const REASON_ALSO_KUEUE: &str = "AlsoKueue";
/// Condition of a `GpuNode`: every GPU can serve slices.
pub const CONDITION_GPUS_HEALTHY: &str = "GpusHealthy";
/// Condition of a `GpuNode`: the driver lists every GPU that the node is known to have.
pub const CONDITION_GPUS_PRESENT: &str = "GpusPresent";
/// Condition of a `GpuNode` with MPS daemons: doors enforce the limits of all shares.
pub const CONDITION_LIMITS_ENFORCED: &str = "LimitsEnforced";
/// Annotation of a `GpuNode` with its cordoned GPUs, in the format of [`crate::cordon::Cordons`].
pub const CORDON_ANNOTATION: &str = "cleave.dev/cordon";
/// Annotation of a `GpuNode` with GPUs to quiesce for a reset or a change of the driver, in the
/// format of [`crate::cordon::Cordons`].
pub const QUIESCE_ANNOTATION: &str = "cleave.dev/quiesce";
/// Prefix of node labels. NVIDIA's GPU Operator sets these labels to start and pause programs that
/// use GPUs.
pub const GPU_DEPLOY_LABEL_PREFIX: &str = "nvidia.com/gpu.deploy.";
/// Value of a label with [`GPU_DEPLOY_LABEL_PREFIX`] while the GPU Operator's driver manager
/// replaces the node's driver.
pub const PAUSED_FOR_DRIVER_UPGRADE: &str = "paused-for-driver-upgrade";
/// Value of a label with [`GPU_DEPLOY_LABEL_PREFIX`] while the GPU Operator's MIG manager changes
/// the MIG mode of the node's GPUs.
pub const PAUSED_FOR_MIG_CHANGE: &str = "paused-for-mig-change";
/// Annotation of a `GpuNode` with GPUs whose recorded faults are cleared, in the format of
/// [`crate::cordon::GpuTimes`].
pub const CLEARED_ANNOTATION: &str = "cleave.dev/cleared";
/// Annotation of a `GpuNode` with missing GPUs to forget, in the format of
/// [`crate::cordon::GpuTimes`].
pub const FORGOTTEN_ANNOTATION: &str = "cleave.dev/forgotten";
/// Taint of a node that has enough free units for a waiting pod, but not on a single GPU. The
/// operator sets the taint only if it is configured to do so.
pub const FRAGMENTED_TAINT: &str = "cleave.dev/fragmented";
/// Taint of a node that cannot serve any pod. The operator sets the taint only if it is configured
/// to do so.
pub const UNHEALTHY_TAINT: &str = "cleave.dev/unhealthy";
/// Health class of a GPU that becomes healthy when NVML answers and no further fault occurs for
/// some time. The health classes are values of [`crate::gpunode::Health::class`].
pub const HEALTH_SUSPECT: &str = "Suspect";
/// Health class of a GPU that must be reset.
pub const HEALTH_NEEDS_RESET: &str = "NeedsReset";
/// Health class of a GPU for which NVML does not answer, that NVML reports as lost, or that NVML no
/// longer lists.
pub const HEALTH_LOST: &str = "Lost";
/// Health reason of a GPU that the node had and that NVML no longer lists.
pub const HEALTH_GPU_MISSING: &str = "GpuMissing";
/// Health reason of a GPU whose MPS daemon does not serve clients.
pub const HEALTH_MPS_UNAVAILABLE: &str = "MpsUnavailable";
/// Mode of a GPU that is not shared, in [`crate::gpunode::GpuStatus::mode`].
pub const MODE_WHOLE: &str = "Whole";
/// Mode of a GPU that serves slices under MPS: shares or sized slices.
pub const MODE_MPS: &str = "Mps";
/// Mode of a GPU that serves time-sliced replicas.
pub const MODE_TIMESLICING: &str = "TimeSlicing";
/// Mode of a GPU that is divided into MIG instances.
pub const MODE_MIG: &str = "Mig";

/// Result of a step of the spec: the node matches the step.
pub const STEP_DONE: &str = "Done";
/// Result of a step: the step waits, for example until no pod uses slices that the step would
/// remove.
pub const STEP_WAITING: &str = "Waiting";
/// Reason of a step with result [`STEP_WAITING`]: pods or processes use slices that the step would
/// remove.
pub const STEP_IN_USE: &str = "InUse";
/// Reason of a step with result [`STEP_WAITING`]: the kubelet started recently, so it may not have
/// listed all pods that use slices of the GPU.
pub const STEP_USERS_UNKNOWN: &str = "UsersUnknown";
/// Result of a step: the node cannot apply the step.
pub const STEP_REFUSED: &str = "Refused";
/// Result of a step: the agent tried to apply the step and failed.
pub const STEP_FAILED: &str = "Failed";

/// Condition of a pod, written by the operator: the pod is within its limits. If the condition is
/// false, its reason is one of [`finding`].
pub const CONDITION_WITHIN_SHARE: &str = "cleave.dev/WithinShare";
/// Reason of [`CONDITION_WITHIN_SHARE`] when the pod is within its limits again.
pub const WITHIN_SHARE_REASON: &str = "WithinShare";

/// Condition of a pod, written by the operator: `False` if the pod is stranded and has no
/// controller that replaces it.
pub const CONDITION_PLACED: &str = "cleave.dev/Placed";
/// Annotation of a pod that the operator released although the pod fits on no GPU of the cluster.
pub const UNSCHEDULABLE_ANNOTATION: &str = "cleave.dev/unschedulable";
/// Annotation of a pod that the operator released to nodes on which another device plugin serves
/// the requested resource.
pub const OTHER_NODES_ANNOTATION: &str = "cleave.dev/other-nodes";
/// Annotation of the operator's own pod: when the pod last acquired the lease. The operator waits
/// until its watch of pods delivers this write.
pub const LEADING_SINCE_ANNOTATION: &str = "cleave.dev/leading-since";
/// Prefix of node labels such as `largest.cleave.dev/gpu-mps`. The value is the number of units of
/// this resource on the node's largest GPU. If a pod fits on no GPU of the cluster, the operator
/// releases it with a requirement on this label. An autoscaler then adds only nodes on which the
/// pod fits.
pub const LARGEST_GPU_LABEL_PREFIX: &str = "largest.cleave.dev/";

/// How strictly the doors of an MPS daemon enforce limits: values of `status.gpus[].mps[].door`.
pub mod door {
    /// The doors enforce the limits of each allocation.
    pub const HARD: &str = "Hard";
    /// The handshake of the driver is unknown, and the policy accepts advisory limits.
    pub const ADVISORY: &str = "Advisory";
    /// The handshake of the driver is unknown, or the daemon's replies to clients are unexpected.
    /// New clients cannot use the daemon.
    pub const UNKNOWN: &str = "Unknown";
}

/// States of MPS daemons: values of [`crate::gpunode::MpsStatus::state`]. An empty state means that
/// the agent has no status of the daemon.
pub mod daemon_state {
    /// The daemon has started, but its limits are not confirmed yet. Doors admit no client.
    pub const STARTING: &str = "Starting";
    /// The daemon serves clients, and its limits are in force.
    pub const ACTIVE: &str = "Active";
    /// The MPS server is in state FAULT until the clients that the fault broke have exited.
    pub const FAULT: &str = "Fault";
    /// The daemon restarts because it exited or hung, its server exited or hung, or its settings
    /// changed.
    pub const RESTARTING: &str = "Restarting";
    /// The daemon failed repeatedly. Delays between restarts increase up to a maximum.
    pub const BACK_OFF: &str = "BackOff";
    /// The daemon is no longer desired. The daemon quits once its clients have exited.
    pub const STOPPING: &str = "Stopping";
}

/// Ways in which a tenant exceeds its limits: kinds of [`crate::gpunode::FindingStatus`].
pub mod finding {
    /// A container's processes use more of a GPU's memory than its shares allow.
    pub const MEMORY_EXCEEDED: &str = "MemoryExceeded";
    /// A process uses a shared GPU without being a client of the GPU's MPS daemon.
    pub const OUTSIDE_MPS: &str = "OutsideMps";
    /// A client of an MPS daemon belongs to a pod that has no share of the daemon's device.
    pub const NO_SHARE: &str = "NoShare";
}

/// Label of Cleave's own pods that names their component. The chart sets the label.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";
/// Value of [`COMPONENT_LABEL`] on the agents' pods.
pub const COMPONENT_AGENT: &str = "agent";

/// Condition of a `SharingPolicy`: the policy's fields are valid for the GPUs that it selects.
pub const CONDITION_ACCEPTED: &str = "Accepted";
/// Condition of a `SharingPolicy`: a more specific or older policy overrides it on some GPUs.
pub const CONDITION_CONFLICT: &str = "Conflict";
/// Condition of a `SharingPolicy`: all of its nodes serve the newest partition.
pub const CONDITION_ROLLED_OUT: &str = "RolledOut";

/// Returns whether Cleave can serve the resource with this name.
pub fn is_served(resource: &str) -> bool {
    resource == RESOURCE_GPU
        || resource == RESOURCE_SHARED
        || resource.starts_with(RESOURCE_SHARES_PREFIX)
        || resource.starts_with(RESOURCE_MIG_PREFIX)
}

/// Returns whether pods that request this resource share GPUs. Returns true for every resource that
/// Cleave serves, except whole GPUs. The chart's admission policies use the same rule.
pub fn is_shared(resource: &str) -> bool {
    is_served(resource) && resource != RESOURCE_GPU
}

/// Returns whether MPS shares can have this resource name. A policy can use some of these names for
/// time-slicing. The chart's admission policies use the same rule.
pub fn is_mps(resource: &str) -> bool {
    let of_instance = resource.starts_with(RESOURCE_MIG_PREFIX) && resource.ends_with(SHARED_SUFFIX);
    resource.starts_with(RESOURCE_SHARES_PREFIX) && resource != RESOURCE_TIMESLICE || of_instance
}

/// Returns the extended resource of MIG instances of a profile. As in NVIDIA's device plugin, `+`
/// becomes a dot.
pub fn mig_resource(profile: &str) -> String {
    format!("{RESOURCE_MIG_PREFIX}{}", profile.replace('+', "."))
}

/// Reasons in the conditions of a `SharingPolicy`.
pub mod reason {
    /// `Accepted` is true: the fields are valid.
    pub const ACCEPTED: &str = "Accepted";
    /// `Ready` is true: the GPUs are shared as the policy specifies.
    pub const READY: &str = "Ready";
    /// `Conflict` is false: no other policy overrides this one.
    pub const NO_CONFLICT: &str = "NoConflict";
    /// `Conflict` is true, or `Ready` is false: other policies override this one on its GPUs.
    pub const OVERRIDDEN: &str = "Overridden";
    /// The object does not match its CRD.
    pub const MALFORMED: &str = "Malformed";
    /// The combination of fields is not valid.
    pub const INVALID: &str = "Invalid";
    /// No node has the selected labels.
    pub const NO_NODE_MATCHES: &str = "NoNodeMatches";
    /// The selected nodes have no GPU.
    pub const NO_GPU: &str = "NoGpu";
    /// The selected nodes have GPUs, but the policy selects none of them.
    pub const NO_GPU_MATCHES: &str = "NoGpuMatches";
    /// No GPU of the selected nodes has the specified model.
    pub const UNKNOWN_MODEL: &str = "UnknownModel";
    /// No selected node has the specified GPU.
    pub const UNKNOWN_GPU: &str = "UnknownGpu";
    /// Not even one share fits on the GPU.
    pub const GPU_TOO_SMALL: &str = "GpuTooSmall";
    /// The GPU does not support MIG.
    pub const MIG_NOT_SUPPORTED: &str = "MigNotSupported";
    /// The GPU cannot have the MIG layout.
    pub const LAYOUT_NOT_POSSIBLE: &str = "LayoutNotPossible";
    /// A node or GPU is excluded from plans: it is unreachable, or it failed to apply its
    /// partition.
    pub const EXCLUDED: &str = "Excluded";
    /// No agent reports the state of the node.
    pub const AGENT_NOT_REPORTING: &str = "AgentNotReporting";
    /// The node has not applied its spec yet.
    pub const APPLYING: &str = "Applying";
    /// Pods use slices that the policy would remove.
    pub const WAITING_FOR_PODS: &str = "WaitingForPods";
    /// The agent refuses the spec.
    pub const APPLY_REFUSED: &str = "ApplyRefused";
    /// The agent tried to apply the spec and failed.
    pub const APPLY_FAILED: &str = "ApplyFailed";
    /// `RolledOut` is true: all nodes serve the newest partition.
    pub const ROLLED_OUT: &str = "RolledOut";
    /// Nodes are being repartitioned, or wait for their wave.
    pub const ROLLING_OUT: &str = "RollingOut";
    /// The rollout is paused.
    pub const ROLLOUT_PAUSED: &str = "RolloutPaused";
    /// The rollout stopped, because nodes failed to apply the change.
    pub const ROLLOUT_STOPPED: &str = "RolloutStopped";
    /// The GPU or its MPS daemon cannot serve slices.
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
    fn only_names_of_gpu_resources_are_served() {
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
    fn mps_shares_are_recognized_by_their_names() {
        for mps in [RESOURCE_MPS, "nvidia.com/gpu-10gb", "nvidia.com/gpu-gold", "nvidia.com/mig-1g.10gb.shared"] {
            assert!(is_mps(mps), "{mps}");
        }
        for other in [RESOURCE_GPU, RESOURCE_TIMESLICE, RESOURCE_SHARED, "nvidia.com/mig-1g.10gb", "cpu", "a/gpu-mps"] {
            assert!(!is_mps(other), "{other}");
        }
    }
}
