//! The node's own `GpuNode` as it is read from the API server.
use cleave_api::GpuNodeSpec;

/// The node's `GpuNode`, as the API server has it.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Object {
    /// Not heard of yet.
    #[default]
    Unknown,
    /// There is none: the operator makes it.
    Missing,
    /// It is not what the definition says.
    Malformed(String),
    /// Its spec, and the generation of that.
    Present(i64, GpuNodeSpec),
}
