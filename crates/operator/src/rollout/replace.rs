//! Deletes the pod of an MPS host, so that its `DaemonSet` creates a new one.
use http::Request;
use kube::api::ListParams;
use kube::{Api, Client};

use super::decide::Replacement;
use super::hosts::{MpsHost, MpsHostStores, NewestRevisions, Revision};
use crate::write::WRITE_TIMEOUT;

/// The result of a deletion.
#[derive(Debug)]
pub(crate) enum DeletionResult {
    /// The pod terminates.
    Done,
    /// The pod no longer exists or is no longer outdated. A new pod may have the same name.
    Skipped,
    /// The request failed.
    Failed(kube::Error),
    /// The API server did not answer in time.
    Timeout,
}

impl DeletionResult {
    /// Returns the value of the `result` label in metrics.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Done => "replaced",
            Self::Skipped => "skipped",
            Self::Failed(_) | Self::Timeout => "failed",
        }
    }
}

/// Deletes the pod of an MPS host if the pod's UID is unchanged and the pod is outdated.
pub(crate) async fn replace(client: &Client, watched: &MpsHostStores, replacement: &Replacement) -> DeletionResult {
    match tokio::time::timeout(WRITE_TIMEOUT, delete(client, watched, &replacement.host)).await {
        Ok(Ok(true)) => DeletionResult::Done,
        Ok(Ok(false)) => DeletionResult::Skipped,
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => DeletionResult::Skipped,
        Ok(Err(error)) => DeletionResult::Failed(error),
        Err(_) => DeletionResult::Timeout,
    }
}

async fn delete(client: &Client, watched: &MpsHostStores, host: &MpsHost) -> Result<bool, kube::Error> {
    // The watch of revisions may lag behind the watch of pods, so a pod of an unreported revision
    // would seem outdated. List the revisions instead: a list is at least as new as the objects
    // that the watches returned.
    let revisions: Api<Revision> = Api::namespaced(client.clone(), &watched.namespace);
    let listed = revisions.list(&ListParams::default()).await?;
    if !NewestRevisions::of(&listed.items).is_outdated(&host.daemon_set.1, &host.hash) {
        return Ok(false);
    }
    let Some((namespace, name)) = host.pod.split_once('/') else { return Ok(false) };
    let options = serde_json::json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": host.uid}});
    let request = Request::delete(format!("/api/v1/namespaces/{namespace}/pods/{name}"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(options.to_string().into_bytes())
        .map_err(kube::Error::HttpError)?;
    client.request_text(request).await.map(|_| true)
}
