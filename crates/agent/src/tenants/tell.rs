//! Events on pods that left their shares.
use cleave_api::gpunode::FindingStatus;
use cleave_api::names::AGENT_MANAGER;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;

use crate::metrics::Metrics;

/// Longest event note that the API server takes, with room.
const NOTE: usize = 1000;

/// What a pod is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodEvent {
    /// Its namespace.
    pub(crate) namespace: String,
    /// Its name.
    pub(crate) pod: String,
    /// Its UID.
    pub(crate) uid: String,
    /// One word.
    pub(crate) reason: String,
    /// A sentence.
    pub(crate) note: String,
}

impl PodEvent {
    pub(crate) fn of(finding: FindingStatus) -> Self {
        let FindingStatus { kind, namespace, pod, uid, message, .. } = finding;
        Self { namespace, pod, uid, reason: kind, note: message }
    }
}

/// Writes events on pods, for ever. They are a courtesy: one that cannot be written is not tried for ever.
pub(crate) async fn write(client: Client, node: String, mut events: mpsc::Receiver<PodEvent>, metrics: Metrics) {
    let recorder = Recorder::new(client, Reporter { controller: AGENT_MANAGER.into(), instance: Some(node) });
    while let Some(PodEvent { namespace, pod, uid, reason, note }) = events.recv().await {
        let regarding = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            namespace: Some(namespace),
            name: Some(pod),
            uid: Some(uid),
            ..ObjectReference::default()
        };
        let note = note.chars().take(NOTE).collect();
        let event =
            Event { type_: EventType::Warning, reason, note: Some(note), action: "Watch".into(), secondary: None };
        if let Err(error) = recorder.publish(&event, &regarding).await {
            metrics.error("api-event");
            tracing::warn!(error = &error as &dyn std::error::Error, "writing an event of a pod failed");
        }
    }
}
