//! MPS hosts and the revisions of their `DaemonSet`, as the watches last reported them.
use std::collections::BTreeMap;
use std::sync::Arc;

use futures::FutureExt as _;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::runtime::reflector::Store;
use kube::{Resource, ResourceExt};
use serde::Deserialize;

use crate::read::{self, AgentPod, AgentStore};

/// Label that names the revision of a `DaemonSet`'s pod. `ControllerRevision`s have the same label.
pub(super) const REVISION_HASH_LABEL: &str = "controller-revision-hash";

/// The fields of a `DaemonSet`'s revision that the operator reads.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "ControllerRevision")]
pub struct Revision {
    /// Labels and owner.
    pub metadata: ObjectMeta,
    /// Number of the revision. The newest revision has the highest number, even if an old template
    /// was restored.
    #[serde(default)]
    pub revision: i64,
}

/// MPS hosts and revisions, as the watches last reported them.
#[derive(Debug, Clone, Default)]
pub struct MpsHosts {
    /// The pods of MPS hosts.
    pub pods: Vec<Arc<AgentPod>>,
    /// Revisions of the MPS hosts' `DaemonSet` and of the agents' `DaemonSet`.
    pub revisions: Vec<Arc<Revision>>,
}

/// The stores that [`MpsHosts`] are read from.
#[derive(Clone)]
pub(crate) struct MpsHostStores {
    pub(crate) pods: AgentStore,
    pub(crate) revisions: Store<Revision>,
    /// The namespace of the pods and revisions.
    pub(crate) namespace: String,
}

impl MpsHostStores {
    /// Returns the stored objects. Returns `None` until both watches have listed their objects. The
    /// placement controller does not wait for these lists.
    pub(crate) fn state(&self) -> Option<MpsHosts> {
        let listed = matches!(self.pods.wait_until_ready().now_or_never(), Some(Ok(())))
            && matches!(self.revisions.wait_until_ready().now_or_never(), Some(Ok(())));
        listed.then(|| MpsHosts { pods: self.pods.state(), revisions: self.revisions.state() })
    }
}

/// The newest revision of each `DaemonSet`, by the UID of the `DaemonSet`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NewestRevisions(BTreeMap<String, (i64, String)>);

impl NewestRevisions {
    /// Finds the newest revision of each `DaemonSet`. Ignores revisions that lack an owner or the
    /// label.
    pub(crate) fn of<'a>(revisions: impl IntoIterator<Item = &'a Revision>) -> Self {
        let mut newest: BTreeMap<String, (i64, String)> = BTreeMap::new();
        for Revision { metadata, revision } in revisions {
            let (Some(owner), Some(hash)) = (controller(metadata), revision_hash(metadata)) else { continue };
            let entry = newest.entry(owner.uid.clone()).or_insert_with(|| (*revision, hash.to_owned()));
            if entry.0 < *revision {
                *entry = (*revision, hash.to_owned());
            }
        }
        Self(newest)
    }

    /// Returns whether a pod of this `DaemonSet` and revision is outdated. Pods of an unknown
    /// `DaemonSet` are never outdated.
    pub(crate) fn is_outdated(&self, set: &str, hash: &str) -> bool {
        self.0.get(set).is_some_and(|(_, newest)| newest != hash)
    }

    /// Returns whether a pod is outdated.
    pub(crate) fn is_outdated_pod(&self, pod: &AgentPod) -> bool {
        let set = controller(&pod.metadata).map_or("", |owner| &owner.uid);
        self.is_outdated(set, revision_hash(&pod.metadata).unwrap_or_default())
    }
}

fn controller(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true) && owner.kind == "DaemonSet")
}

fn revision_hash(metadata: &ObjectMeta) -> Option<&str> {
    metadata.labels.as_ref()?.get(REVISION_HASH_LABEL).map(String::as_str)
}

/// A node's MPS host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MpsHost {
    /// The MPS host's pod, as `namespace/name`.
    pub pod: String,
    /// The pod's UID.
    pub uid: String,
    /// Hash that names the revision of the pod.
    pub hash: String,
    /// Name and UID of the MPS host's `DaemonSet`.
    pub daemon_set: (String, String),
    /// Whether the MPS host's `DaemonSet` has a newer revision.
    pub outdated: bool,
    /// Whether the pod is ready.
    pub ready: bool,
    /// Whether the pod is being deleted.
    pub terminating: bool,
}

impl MpsHost {
    fn of(pod: &AgentPod, newest: &NewestRevisions) -> Self {
        let daemon_set =
            controller(&pod.metadata).map(|owner| (owner.name.clone(), owner.uid.clone())).unwrap_or_default();
        let hash = revision_hash(&pod.metadata).unwrap_or_default().to_owned();
        Self {
            pod: format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            outdated: newest.is_outdated_pod(pod),
            ready: read::is_ready(pod),
            terminating: pod.metadata.deletion_timestamp.is_some(),
            hash,
            daemon_set,
        }
    }
}

/// Returns the MPS hosts by node. If a node has two MPS hosts and one is being deleted, the map
/// contains the other MPS host.
pub(crate) fn mps_hosts_by_node<'a>(hosts: &'a MpsHosts, newest: &NewestRevisions) -> BTreeMap<&'a str, MpsHost> {
    let mut found: BTreeMap<&str, MpsHost> = BTreeMap::new();
    for pod in &hosts.pods {
        let Some(node) = pod.spec.node_name.as_deref() else { continue };
        let host = MpsHost::of(pod, newest);
        if found.get(node).is_none_or(|known| (known.terminating, &known.pod) > (host.terminating, &host.pod)) {
            found.insert(node, host);
        }
    }
    found
}

pub(super) fn daemon_set_reference(host: &MpsHost) -> ObjectReference {
    ObjectReference {
        api_version: Some("apps/v1".to_owned()),
        kind: Some("DaemonSet".to_owned()),
        namespace: host.pod.split_once('/').map(|(namespace, _)| namespace.to_owned()),
        name: Some(host.daemon_set.0.clone()),
        uid: Some(host.daemon_set.1.clone()),
        ..ObjectReference::default()
    }
}
