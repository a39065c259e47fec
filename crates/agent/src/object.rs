//! The node's own `GpuNode`, as read from the API server.
use cleave_api::GpuNodeSpec;

/// State of the node's `GpuNode` on the API server.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum GpuNodeState {
    /// The API server has not answered yet.
    #[default]
    Unknown,
    /// The object does not exist. The operator creates it.
    Missing,
    /// The object does not match its CRD, for this reason.
    Malformed(String),
    /// The object exists, with this generation and spec.
    Present(i64, GpuNodeSpec),
}
