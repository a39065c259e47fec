//! Planning settings that apply to every GPU.
use serde::{Deserialize, Serialize};

/// Search limit, and default values for the GPUs whose snapshot omits these values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Policy {
    /// Number of MPS shares of a GPU. `None` means no shares.
    pub units: Option<u32>,
    /// Number of time-sliced replicas of a GPU. `None` means no replicas.
    pub replicas: Option<u32>,
    /// Maximum number of steps of one exact search of a small part of the cluster. All parts
    /// together may use sixteen times as many steps. The limit is a number of steps and not a time,
    /// so that equal inputs produce equal plans on every machine.
    pub search_steps: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self { units: None, replicas: None, search_steps: 5000 }
    }
}
