//! What every write to the API server has in common: a time limit, and Events that nobody waits
//! for.
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, Recorder};

/// How long one write may take. A claim ends this long before the lease does
/// ([`crate::leader::CLAIM`], [`crate::leader::LEASE`]), so a write that starts under a claim ends
/// before another process may lead.
pub(crate) const WRITE: Duration = Duration::from_secs(5);

/// The result of a write, or `None` if the API server did not answer within [`WRITE`].
pub(crate) async fn within<T>(write: impl Future<Output = T>) -> Option<T> {
    let written = tokio::time::timeout(WRITE, write).await;
    if written.is_err() {
        tracing::warn!("the API server did not answer a write within {} s", WRITE.as_secs());
    }
    written.ok()
}

/// Publishes an Event. One that cannot be written is logged and not retried: Events are a courtesy.
pub(crate) async fn publish(recorder: &Recorder, event: &Event, regarding: &ObjectReference) {
    let published = tokio::time::timeout(WRITE, recorder.publish(event, regarding)).await;
    if let Ok(Err(error)) = published {
        tracing::warn!(error = &error as &dyn std::error::Error, "no event");
    }
}
