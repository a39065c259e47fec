//! The fuzz targets.
mod agent;
mod dra;
mod fixtures;
mod kubelet;
mod mps;
mod objects;
mod plan;
mod texts;

use crate::Target;

/// Returns all targets, grouped by the code that they test.
pub fn all_targets() -> &'static [Target] {
    &[
        mps::CONTROL_PACKET,
        mps::LOG_LINE,
        mps::DESIRED,
        mps::HOST_MESSAGE,
        agent::CHECKPOINT,
        agent::NODE_SPEC,
        agent::MPS_STATUS,
        agent::SHUTDOWN_NOTE,
        agent::PODS,
        agent::PROC_FILES,
        kubelet::DEVICE_PLUGIN,
        kubelet::POD_RESOURCES,
        kubelet::KUBELET_CHECKPOINT,
        plan::SNAPSHOT,
        dra::CLAIM,
        objects::POLICY,
        objects::CLUSTER,
        objects::ADMISSION_REVIEW,
        texts::PLACEMENT,
        texts::CORDON_ANNOTATIONS,
        texts::QUANTITY,
        texts::RESOURCE_AND_DEVICE_NAMES,
    ]
}

/// Finds a target by name.
pub fn target_named(name: &str) -> Option<&'static Target> {
    all_targets().iter().find(|target| target.name == name)
}
