//! Reasons of the Events and conditions that Cleave writes, except the conditions of `GpuQuota`s:
//! what each means, and what to do.
//!
//! The documentation tool generates the reference page of Events from these tables. A test of the
//! documentation searches the code for reasons that these tables lack.

/// A reason, as `kubectl describe` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reason {
    /// Name of the reason.
    pub name: &'static str,
    /// What happened.
    pub meaning: &'static str,
    /// What to do. Empty if no action is necessary.
    pub action: &'static str,
}

const fn reason(name: &'static str, meaning: &'static str, action: &'static str) -> Reason {
    Reason { name, meaning, action }
}

/// Events of pods that the operator publishes.
pub const POD_EVENTS_OF_OPERATOR: &[Reason] = &[
    reason(
        "NoGpu",
        "The pod waits, because no GPU can serve it now, or because a quota or a gang delays it.",
        "Run `cleave explain pod`, or wait.",
    ),
    reason(
        "NoGpuFits",
        "The pod fits on no GPU of the cluster, even an unused one. The pod was released as unschedulable.",
        "Request fewer shares in one container, or change the policy.",
    ),
    reason(
        "Stranded",
        "No node accepts the released pod.",
        "None if a controller recreates it. Otherwise delete and recreate the pod.",
    ),
    reason("GpuRepartitioning", "A GPU is being repartitioned for the pod.", "Wait."),
    reason(
        "Reclaimed",
        "The pod borrows GPUs, and is evicted for a pod within its quota's guarantee or for a quota that borrows less.",
        "None if a controller recreates it. To avoid such evictions, stay within the `min` of the namespace's `GpuQuota`.",
    ),
    reason("Preempted", "The pod is evicted for a pod of higher priority.", "None if a controller recreates it."),
    reason(
        "EvictedOutsideShare",
        "The pod exceeded its limits and is evicted, because the policy sets `enforcement: Evict`.",
        "Keep the pod within its limits, or request more shares.",
    ),
    reason(
        "EvictionProtected",
        "The pod exceeded its limits, and a disruption budget protects it from eviction.",
        "Delete the pod, or change the budget.",
    ),
];

/// Events of pods that agents publish.
pub const POD_EVENTS_OF_AGENT: &[Reason] = &[
    reason(
        "MemoryExceeded",
        "A container uses more GPU memory than its shares allow.",
        "Use less memory, or request more shares.",
    ),
    reason(
        "OutsideMps",
        "A process of the pod uses a shared GPU outside MPS.",
        "Do not change or remove `CUDA_MPS_PIPE_DIRECTORY` in the pod.",
    ),
    reason("NoShare", "A process of the pod uses a GPU on which the pod has no shares.", "Request shares."),
    reason(
        "CausedGpuFault",
        "The pod's program was killed while its kernels ran, which broke programs of other pods.",
        "Stop programs before you delete their pods.",
    ),
    reason(
        "NamedInGpuFault",
        "The MPS server's log names the pod's program in a fault. The log often names a neighbour of the pod that caused the fault.",
        "Check the program for errors.",
    ),
    reason("BrokenByGpuFault", "A fault of a neighbour's program broke the pod's program.", "Restart the program."),
    reason(
        "TerminatedInGpuFault",
        "The MPS host stopped the pod's program (SIGTERM, then SIGKILL) because the program kept the GPU's MPS server in state FAULT.",
        "Make the program exit after a CUDA error.",
    ),
];

/// Events that agents publish on their Node and its `GpuNode`.
pub const NODE_EVENTS_OF_AGENT: &[Reason] = &[
    reason("GpuUnhealthy", "A GPU cannot serve slices.", "See [Handle failing GPUs](../how-to/failing-gpus.md)."),
    reason(
        "GpuMissing",
        "The node had a GPU that NVML no longer lists.",
        "Repair or replace the GPU. If it was removed for good, run `cleave forget`.",
    ),
    reason("GpuForgotten", "An administrator ran `cleave forget` for a missing GPU.", ""),
    reason("GpuResetPending", "A GPU works, but needs a reset.", "Drain the GPU and reset it when convenient."),
    reason("Recovered", "A GPU or its MPS daemon serves slices again.", ""),
    reason("MpsUnavailable", "An MPS daemon does not accept clients.", "Read the logs of the node's MPS host."),
    reason(
        "GpuFault",
        "A fatal error broke the clients of a GPU. The message names the pods.",
        "See [Faults](../explanation/faults.md).",
    ),
    reason(
        "ClientNotTerminated",
        "A client of a terminating pod was not terminated in time.",
        "See [Termination](../explanation/termination.md).",
    ),
    reason(
        "SharesSplit",
        "The kubelet requested shares of several GPUs for one container. The agent refused the request.",
        "Recreate the pod.",
    ),
    reason(
        "GpuQuiesced",
        "No Cleave process uses the GPU. While a GPU is quiesced, the node's other GPUs are not monitored.",
        "Reset the GPU or change the driver, then run `cleave uncordon`.",
    ),
    reason("GpuResumed", "The quiesce of a GPU has ended.", ""),
    reason("MigChanged", "MIG mode was changed, or MIG instances were created or destroyed.", ""),
    reason(
        "MigFailed",
        "A change of MIG mode or of a MIG instance failed or waits.",
        "Read the message. The agent attempts a failing change up to five times.",
    ),
    reason(
        "MemoryExceeded",
        "A container of a pod on the node uses more GPU memory than its shares allow. The pod has the same Event.",
        "",
    ),
    reason(
        "OutsideMps",
        "A process on the node uses a shared GPU outside MPS. If the process belongs to a pod, the pod has the same Event.",
        "End the process.",
    ),
    reason(
        "NoShare",
        "A process of a pod on the node uses a GPU on which the pod has no shares. The pod has the same Event.",
        "",
    ),
];

/// Events that the operator publishes on nodes.
pub const NODE_EVENTS_OF_OPERATOR: &[Reason] = &[
    reason("GpuNodeExcluded", "Plans exclude the node.", "Read the message."),
    reason("GpuNodeIncluded", "Plans include the node again.", ""),
    reason("GpuExcluded", "Plans exclude one GPU of the node from repartitioning.", "Read the message."),
];

/// Events that the operator publishes on the `DaemonSet` of the MPS hosts.
pub const DAEMONSET_EVENTS: &[Reason] = &[
    reason("MpsHostReplaced", "The MPS host of an idle node was replaced.", ""),
    reason(
        "MpsHostUpgradeStopped",
        "A new MPS host is not working, so the replacement of MPS hosts has stopped.",
        "Repair the MPS host, or run `helm rollback`.",
    ),
];

/// Reasons of a `SharingPolicy`'s conditions.
pub const POLICY_CONDITIONS: &[Reason] = &[
    reason("Accepted", "The fields are valid for the selected GPUs.", ""),
    reason("Ready", "The GPUs are shared as the policy specifies.", ""),
    reason("NoConflict", "No other policy applies to GPUs that this policy selects.", ""),
    reason("Malformed", "The object does not match its CRD.", "Correct the policy."),
    reason("Invalid", "A field is missing or invalid, or fields contradict each other.", "Correct the policy."),
    reason("NoNodeMatches", "No node has the labels of `nodeSelector`.", "Correct `nodeSelector`, or label nodes."),
    reason("NoGpu", "The selected nodes have no GPU.", "Correct `nodeSelector`."),
    reason("NoGpuMatches", "The selected nodes have GPUs, but `gpus` selects none of them.", "Correct `gpus`."),
    reason("UnknownModel", "No selected node has a GPU of the specified model.", "Correct `gpus.models`."),
    reason("UnknownGpu", "No selected node has a GPU with the specified UUID.", "Correct `gpus.uuids`."),
    reason("GpuTooSmall", "One share does not fit on the GPU.", "Use smaller or fewer shares."),
    reason("MigNotSupported", "The GPU does not support MIG.", "Set a different mode, or select other GPUs."),
    reason("LayoutNotPossible", "The MIG layout does not fit on the GPU.", "Change `mig.layout`."),
    reason(
        "Overridden",
        "More specific or older policies apply to GPUs that the policy selects.",
        "Change one of the policies.",
    ),
    reason("AgentNotReporting", "No agent has reported the node's GPUs.", "Check the agent's pod on the node."),
    reason("Applying", "The node's GPUs are being repartitioned.", "Wait."),
    reason(
        "WaitingForPods",
        "Pods use slices that would change. The message names the pods.",
        "Wait until the pods end, or drain the GPU.",
    ),
    reason("ApplyRefused", "The agent refused the change.", "Read the message."),
    reason("ApplyFailed", "The change failed on the node.", "Read the message."),
    reason("Excluded", "Plans exclude a node or a GPU.", "Read the message."),
    reason("RolledOut", "`RolledOut` is True: all nodes serve the newest partition.", ""),
    reason("RollingOut", "Nodes are being repartitioned, or wait for their wave.", "Wait."),
    reason(
        "RolloutPaused",
        "The rollout is paused, so nodes keep an older partition.",
        "Set `rollout.paused: false` to continue.",
    ),
    reason(
        "RolloutStopped",
        "Nodes failed to apply the change, so the other nodes keep their partition.",
        "Repair or cordon the nodes that the message names, or change the policy back.",
    ),
    reason(
        "GpuUnhealthy",
        "The GPU or its MPS daemon cannot serve slices.",
        "See [Handle failing GPUs](../how-to/failing-gpus.md).",
    ),
];

/// Reasons of a `GpuNode`'s conditions.
pub const NODE_CONDITIONS: &[Reason] = &[
    reason("Serving", "`Ready` is True: every GPU serves slices, and every MPS daemon accepts clients.", ""),
    reason("Applied", "`Applied` is True: the node matches its spec.", ""),
    reason("Healthy", "`GpusHealthy` is True: every GPU can serve slices.", ""),
    reason("AllPresent", "`GpusPresent` is True: NVML lists every GPU that the node should have.", ""),
    reason(
        "GpuMissing",
        "`GpusPresent` is False: the node had GPUs that NVML no longer lists.",
        "Repair or replace the GPUs. If they were removed for good, run `cleave forget`.",
    ),
    reason("DoorsEnforce", "`LimitsEnforced` is True: doors enforce the limits of all shares.", ""),
    reason(
        "UnknownHandshake",
        "The driver's MPS handshake is unknown, or the MPS daemon sends unexpected replies, so limits cannot be enforced. The shares are Unhealthy.",
        "Run `cleave doctor`. Install a driver whose handshake is known, or set `mps.enforcement: Advisory`.",
    ),
    reason(
        "AdvisoryLimits",
        "The driver's MPS handshake is unknown. The policy accepts limits that pods can change.",
        "Install a measured driver.",
    ),
    reason("Starting", "NVML has not answered yet.", "Wait."),
    reason("NoDriver", "The driver is missing or does not answer.", "Set `driver.nvmlLibrary` or `driver.path`."),
    reason("NoGpu", "The driver reports no GPU.", ""),
    reason("GpuUnhealthy", "GPUs cannot serve slices.", "See [Handle failing GPUs](../how-to/failing-gpus.md)."),
    reason("ResetPending", "`GpusHealthy` is True. A GPU works, but needs a reset.", "Reset the GPU when convenient."),
    reason("MpsUnavailable", "MPS daemons cannot accept clients.", "Read the logs of the node's MPS host."),
    reason(
        "Waiting",
        "A change is in progress, has failed, or waits, for example for pods that use slices.",
        "Read the message. If pods use the slices, wait until the pods end, or drain the GPU.",
    ),
    reason("Refused", "The spec cannot be applied.", "Read the message."),
    reason("NoSpec", "The agent has not read a spec.", "Check that the operator runs."),
    reason(
        "Malformed",
        "The object does not match its CRD.",
        "Check that the CRDs and the agent have the same version.",
    ),
];

/// Reasons of a pod's conditions.
pub const POD_CONDITIONS: &[Reason] = &[
    reason(
        "MemoryExceeded",
        "`cleave.dev/WithinShare` is False: a container uses more memory than its shares allow.",
        "Use less memory, or request more shares.",
    ),
    reason(
        "OutsideMps",
        "`cleave.dev/WithinShare` is False: a process computes on a shared GPU and is not an MPS client.",
        "Do not change or remove `CUDA_MPS_PIPE_DIRECTORY` in the pod.",
    ),
    reason(
        "NoShare",
        "`cleave.dev/WithinShare` is False: an MPS client belongs to a pod without shares of the GPU.",
        "Request shares.",
    ),
    reason("WithinShare", "`cleave.dev/WithinShare` is True: the violation has ended.", ""),
    reason(
        "Stranded",
        "`cleave.dev/Placed` is False: no node accepts the released pod, and no controller recreates it.",
        "Delete and recreate the pod.",
    ),
    reason("Bound", "`cleave.dev/Placed` is True: the pod is bound to a node.", ""),
];

/// Reasons of a `GpuQuota`'s conditions.
pub const QUOTA_CONDITIONS: &[Reason] = &[
    reason("Valid", "`Ready` is True: the quota's fields are valid.", ""),
    reason(
        "Invalid",
        "`Ready` is False: a field of the quota is not valid. The message names the field.",
        "Correct the field.",
    ),
    reason(
        "Malformed",
        "`Ready` is False: the operator cannot read the quota. The last version that the operator could read remains in effect.",
        "Correct the quota, or upgrade the CRDs.",
    ),
    reason(
        "NamespaceTaken",
        "`Ready` is False: another quota of the same GPUs, which is older or names the namespace, counts it.",
        "Name each namespace in one quota only.",
    ),
    reason(
        "ModelTaken",
        "`Ready` is False: GPUs of a model count for an older quota.",
        "Change the models of one of the quotas.",
    ),
    reason(
        "PoolOverlaps",
        "`Ready` is False: the quota's models and those of an older quota overlap, but are not the same.",
        "Use the same models, or models that no other quota names.",
    ),
    reason(
        "UnitDiffers",
        "`Ready` is False: an older quota of the same GPUs counts in another unit.",
        "Use the same unit in all quotas of these GPUs.",
    ),
    reason("NotReady", "`Guaranteed` and `Enforced` are False: the quota is not valid.", "See the condition `Ready`."),
    reason("Kept", "`Guaranteed` is True: no pod within the guarantee waits.", ""),
    reason(
        "Overcommitted",
        "`Guaranteed` is False: the quotas of these GPUs guarantee more than the healthy GPUs.",
        "Lower `min`, or add or repair GPUs.",
    ),
    reason(
        "Reclaiming",
        "`Guaranteed` is False: pods within the guarantee wait until evicted or terminating pods have ended.",
        "Wait.",
    ),
    reason(
        "Protected",
        "`Guaranteed` is False: pods within the guarantee wait for borrowers that disruption budgets protect.",
        "Wait for `quotas.budgetPatienceSeconds`, or change the budgets.",
    ),
    reason(
        "Fragmented",
        "`Guaranteed` is False: no single GPU can be freed for the waiting pods.",
        "Set `guarantee: Cells` to prevent such waits.",
    ),
    reason("Enforced", "`Enforced` is True.", ""),
    reason(
        "AlsoKueue",
        "`Enforced` is True, and Kueue admits pods of the quota too. Both limits apply.",
        "Set `mode: Count` if only Kueue should limit these pods.",
    ),
    reason("Counting", "`Enforced` is False: with `mode: Count`, the quota neither delays nor evicts pods.", ""),
];

/// All tables of reasons in this module.
pub const ALL_REASONS: [&[Reason]; 9] = [
    POD_EVENTS_OF_OPERATOR,
    POD_EVENTS_OF_AGENT,
    NODE_EVENTS_OF_AGENT,
    NODE_EVENTS_OF_OPERATOR,
    DAEMONSET_EVENTS,
    POLICY_CONDITIONS,
    NODE_CONDITIONS,
    POD_CONDITIONS,
    QUOTA_CONDITIONS,
];
