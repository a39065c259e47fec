//! Limits the time of writes to the API server, and publishes Events.
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, Recorder};

use crate::leader::LeaseGuard;

/// Time limit of one write. The lease outlasts its [`LeaseGuard`](crate::leader::LeaseGuard) by the
/// same time. So a write that starts while the guard is valid ends before another process can
/// acquire the lease.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of writes that one task has in flight.
pub(crate) const MAX_IN_FLIGHT: usize = 16;

/// Returns the result of a write, or `None` if the API server did not answer within
/// [`WRITE_TIMEOUT`].
pub(crate) async fn with_timeout<T>(write: impl Future<Output = T>) -> Option<T> {
    let written = tokio::time::timeout(WRITE_TIMEOUT, write).await;
    if written.is_err() {
        tracing::warn!(seconds = WRITE_TIMEOUT.as_secs(), "write timed out");
    }
    written.ok()
}

/// Publishes Events, several at a time, so that many Events do not delay the next pass. Stops when
/// this process may no longer write.
pub(crate) async fn publish_all(recorder: &Recorder, claim: &LeaseGuard, events: Vec<(ObjectReference, Event)>) {
    let writes = futures::stream::iter(events);
    writes
        .for_each_concurrent(MAX_IN_FLIGHT, |(regarding, event)| async move {
            if claim.is_current() {
                publish(recorder, &event, &regarding).await;
            }
        })
        .await;
}

/// Publishes an Event without retries. Logs an error, but not a timeout.
pub(crate) async fn publish(recorder: &Recorder, event: &Event, regarding: &ObjectReference) {
    let published = tokio::time::timeout(WRITE_TIMEOUT, recorder.publish(event, regarding)).await;
    if let Ok(Err(error)) = published {
        tracing::warn!(error = &error as &dyn std::error::Error, "failed to publish an Event");
    }
}
