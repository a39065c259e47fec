//! What the operator notes on a pod when it lets it through: which units are held for it, and
//! where.
//!
//! The note goes into the same patch that takes the gate away, so that there is no moment at which
//! a pod is let through and nothing says so: it is the ledger's only record, and the node's agent
//! follows it when the kubelet asks.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The annotation, with a [`Placement`] as JSON. Only the operator may write it: an admission
/// policy sees to it.
pub const ANNOTATION: &str = "cleave.dev/placement";

/// Units that are held for a pod until it has been given them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Until when, in seconds of the Unix epoch, if it is not bound by then.
    pub until: u64,
    /// On each node that the pod may go to: one entry for each part of its request that has to be
    /// on one device, in the order of `cleave_plan::ledger::asks`.
    pub nodes: BTreeMap<String, Vec<Held>>,
}

/// Units of one device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Held {
    /// The extended resource.
    pub resource: String,
    /// How many.
    pub units: u32,
    /// UUID of the GPU or MIG device.
    pub device: String,
}

impl Placement {
    /// As a pod's annotation says.
    ///
    /// # Errors
    /// It is not what the operator writes: it then says nothing.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// The annotation's text.
    ///
    /// # Errors
    /// Never for what can be made here.
    pub fn text(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let held = Held { resource: "nvidia.com/gpu-mps".to_owned(), units: 3, device: "GPU-1".to_owned() };
        let placement = Placement { until: 9, nodes: BTreeMap::from([("n1".to_owned(), vec![held])]) };
        let text = placement.text().unwrap();
        assert_eq!(
            text,
            r#"{"until":9,"nodes":{"n1":[{"resource":"nvidia.com/gpu-mps","units":3,"device":"GPU-1"}]}}"#
        );
        assert_eq!(Placement::parse(&text).unwrap(), placement);
        assert!(Placement::parse("{}").is_err() && Placement::parse("").is_err());
    }
}
