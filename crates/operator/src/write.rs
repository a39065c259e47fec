//! Limits the time of writes to the API server, and publishes Events.
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, Recorder};

/// Time limit of one write. A [`LeaseGuard`](crate::leader::LeaseGuard) expires this long before
/// its lease. So a write that starts while the guard is valid ends before another process can lead.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the result of a write, or `None` if the API server did not answer within
/// [`WRITE_TIMEOUT`].
pub(crate) async fn with_timeout<T>(write: impl Future<Output = T>) -> Option<T> {
    let written = tokio::time::timeout(WRITE_TIMEOUT, write).await;
    if written.is_err() {
        tracing::warn!(seconds = WRITE_TIMEOUT.as_secs(), "write timed out");
    }
    written.ok()
}

/// Publishes an Event. Logs an error, but not a timeout. Retries neither.
pub(crate) async fn publish(recorder: &Recorder, event: &Event, regarding: &ObjectReference) {
    let published = tokio::time::timeout(WRITE_TIMEOUT, recorder.publish(event, regarding)).await;
    if let Ok(Err(error)) = published {
        tracing::warn!(error = &error as &dyn std::error::Error, "failed to publish an Event");
    }
}
