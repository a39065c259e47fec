//! Names that Cleave and its users share: resources, labels, annotations, field managers, condition types and reasons.

/// API group of the custom resources, and prefix of labels and annotations.
pub const GROUP: &str = "cleave.dev";
/// Shares of one GPU under MPS, unless a policy's `resourceName` says otherwise.
pub const RESOURCE_MPS: &str = "nvidia.com/gpu-mps";
/// Time-sliced replicas, unless a policy's `resourceName` says otherwise.
pub const RESOURCE_TIMESLICE: &str = "nvidia.com/gpu-timeslice";
/// Whole GPUs.
pub const RESOURCE_GPU: &str = "nvidia.com/gpu";
/// Prefix of MIG instances' names: `nvidia.com/mig-1g.10gb`.
pub const RESOURCE_MIG_PREFIX: &str = "nvidia.com/mig-";
/// The scheduling gate that pods asking for placed resources carry.
pub const GATE: &str = "cleave.dev/placement";

/// The operator's field manager, on `GpuNode.spec` and `SharingPolicy.status`.
pub const OPERATOR_MANAGER: &str = "cleave-operator";
/// The agent's field manager, on `GpuNode.status`.
pub const AGENT_MANAGER: &str = "cleave-agent";

/// Condition of a `GpuNode`: the node matches its spec.
pub const CONDITION_APPLIED: &str = "Applied";
/// Condition of a `GpuNode` and a `SharingPolicy`: everything is in order.
pub const CONDITION_READY: &str = "Ready";
/// Condition of a `SharingPolicy`: its fields mean something on the GPUs that it selects.
pub const CONDITION_ACCEPTED: &str = "Accepted";
/// Condition of a `SharingPolicy`: a more specific or older policy took GPUs from it.
pub const CONDITION_CONFLICT: &str = "Conflict";
