//! The annotation that the operator writes on a pod when it releases the pod with a reservation.
//! The annotation records which units are reserved for the pod, and where.
//!
//! The same patch removes the placement gate, so no pod with a reservation is released without the
//! annotation. The annotation is the only persistent record of a reservation. The node's agent
//! follows the reservation when the kubelet allocates devices.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Annotation of a pod with its [`Placement`] as JSON. An admission policy refuses the annotation
/// from all writers except the operator.
pub const PLACEMENT_ANNOTATION: &str = "cleave.dev/placement";

/// Units that are reserved for a pod until the kubelet allocates units to the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placement {
    /// Time at which the reservation expires if the pod is not bound, in seconds since the Unix
    /// epoch.
    pub until: u64,
    /// The pod's reservations on each node where it may run. A node's list has one entry for each
    /// part of the request that must be on one device, in the order of
    /// `cleave_plan::ledger::device_requests`.
    pub nodes: BTreeMap<String, Vec<ReservedUnits>>,
    /// The gang of the pod when it was released. Later changes of the pod's annotations and labels
    /// do not change which pods are evicted with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<ReleasedGang>,
    /// Whether the pod was released only within its quota's guarantee. Later changes of the pod's
    /// annotation `cleave.dev/borrow` do not change its importance.
    #[serde(default, rename = "neverBorrows", skip_serializing_if = "std::ops::Not::not")]
    pub never_borrows: bool,
    /// The gangs that are evicted for the pod. Only the nomination of a waiting pod has any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicts: Vec<EvictedGang>,
}

/// A gang that is evicted for a waiting pod. If the leader of the operator changes before all pods
/// of the gang are evicted, the next leader evicts the others.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EvictedGang {
    /// Namespace of the pods.
    pub namespace: String,
    /// Name of the gang.
    pub name: String,
    /// When the gang was released, in seconds since the Unix epoch.
    pub since: u64,
    /// Number of pods of the gang that are evicted.
    pub pods: usize,
    /// Why the gang is evicted, as in metrics.
    pub kind: String,
    /// Quota of the gang. `None` if its namespace has no quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Quota of the waiting pod. `None` if its namespace has no quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Whether the API server evicted some of the pods, but not all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub begun: bool,
    /// Whether the pods are deleted although disruption budgets protect them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// The gang of a released pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ReleasedGang {
    /// Name of the gang.
    pub name: String,
    /// Number of pods that were released together. A pod that later replaces one of them records
    /// the same number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<usize>,
    /// When the pods were released, in seconds since the Unix epoch. A pod that later replaces one
    /// of them records the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
}

/// Reserved units of one device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ReservedUnits {
    /// Name of the extended resource.
    pub resource: String,
    /// Number of units.
    pub units: u32,
    /// UUID of the GPU or MIG device.
    pub device: String,
}

impl Placement {
    /// Reads a pod's annotation.
    ///
    /// # Errors
    /// Returns an error if the text is not a [`Placement`]. The pod then has no reservation.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Formats the annotation as text.
    ///
    /// # Errors
    /// Returns an error if serialization fails, which cannot happen for values of this type.
    pub fn to_text(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_placement_can_be_read_back() {
        let reserved =
            ReservedUnits { resource: "nvidia.com/gpu-mps".to_owned(), units: 3, device: "GPU-1".to_owned() };
        let nodes = BTreeMap::from([("n1".to_owned(), vec![reserved])]);
        let mut placement = Placement { until: 9, nodes, ..Placement::default() };
        let text = placement.to_text().unwrap();
        assert_eq!(
            text,
            r#"{"until":9,"nodes":{"n1":[{"resource":"nvidia.com/gpu-mps","units":3,"device":"GPU-1"}]}}"#
        );
        assert_eq!(Placement::parse(&text).unwrap(), placement);
        placement.gang = Some(ReleasedGang { name: "train".to_owned(), size: Some(4), since: Some(7) });
        let text = placement.to_text().unwrap();
        assert!(text.ends_with(r#","gang":{"name":"train","size":4,"since":7}}"#), "{text}");
        assert_eq!(Placement::parse(&text).unwrap(), placement);
        placement.never_borrows = true;
        let text = placement.to_text().unwrap();
        assert!(text.ends_with(r#","since":7},"neverBorrows":true}"#), "{text}");
        assert_eq!(Placement::parse(&text).unwrap(), placement);
        let evicted = EvictedGang {
            namespace: "team".to_owned(),
            name: "train".to_owned(),
            since: 7,
            pods: 4,
            kind: "Reclaim".to_owned(),
            from: Some("b".to_owned()),
            to: None,
            begun: false,
            force: false,
        };
        placement.evicts = vec![evicted];
        let text = placement.to_text().unwrap();
        assert!(text.contains(r#""evicts":[{"namespace":"team","name":"train","since":7,"pods":4,"#), "{text}");
        assert_eq!(Placement::parse(&text).unwrap(), placement);
        placement.evicts[0].begun = true;
        let text = placement.to_text().unwrap();
        assert!(text.ends_with(r#","from":"b","begun":true}]}"#), "{text}");
        assert_eq!(Placement::parse(&text).unwrap(), placement);
        assert!(Placement::parse("{}").is_err() && Placement::parse("").is_err());
    }
}
