//! The node's own `GpuNode`, as read from the API server.
use cleave_api::GpuNodeSpec;

/// State of the node's `GpuNode` on the API server.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Object {
    /// The API server has not answered yet.
    #[default]
    Unknown,
    /// It does not exist. The operator creates it.
    Missing,
    /// It does not match its CRD, for this reason.
    Malformed(String),
    /// Its generation and spec.
    Present(i64, GpuNodeSpec),
}
