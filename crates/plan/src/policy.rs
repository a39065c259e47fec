//! The values of planning that apply to every GPU.
use serde::{Deserialize, Serialize};

/// What holds for all GPUs that do not say otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Policy {
    /// MPS shares of a GPU; without a number no shares are cut.
    pub units: Option<u32>,
    /// Time-sliced replicas of a GPU; without a number none are made.
    pub replicas: Option<u32>,
    /// Steps that the exact search may take on each small part of the cluster, and sixteen times
    /// that in all. The limit is a number of steps and not a time, so that the same input gives the
    /// same plan on every machine.
    pub search_steps: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self { units: None, replicas: None, search_steps: 5000 }
    }
}
