//! Deletes the pod of an MPS host, so that its `DaemonSet` creates the next.
use http::Request;
use kube::api::ListParams;
use kube::{Api, Client};

use super::decide::Replacement;
use super::hosts::{Host, Newest, Revision, Watched};
use crate::write::WRITE;

/// How a deletion ended.
#[derive(Debug)]
pub(crate) enum Deleted {
    /// It ends.
    Done,
    /// It is gone, or another pod has its name, or it is not outdated any more.
    NotAnyMore,
    /// Anything else.
    Failed(kube::Error),
    /// No answer in time.
    Silence,
}

impl Deleted {
    /// As metrics name it.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Done => "replaced",
            Self::NotAnyMore => "gone",
            Self::Failed(_) | Self::Silence => "failed",
        }
    }
}

/// Deletes the pod of a host, if that is the one that was seen and is outdated.
pub(crate) async fn replace(client: &Client, watched: &Watched, replacement: &Replacement) -> Deleted {
    match tokio::time::timeout(WRITE, delete(client, watched, &replacement.host)).await {
        Ok(Ok(true)) => Deleted::Done,
        Ok(Ok(false)) => Deleted::NotAnyMore,
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Deleted::NotAnyMore,
        Ok(Err(error)) => Deleted::Failed(error),
        Err(_) => Deleted::Silence,
    }
}

async fn delete(client: &Client, watched: &Watched, host: &Host) -> Result<bool, kube::Error> {
    // The watch of revisions may lag behind that of pods, and a pod of a revision that it has not
    // told yet is a new one. A list is not older than what was read before.
    let revisions: Api<Revision> = Api::namespaced(client.clone(), &watched.namespace);
    let listed = revisions.list(&ListParams::default()).await?;
    if !Newest::of(&listed.items).is_outdated(&host.set.1, &host.hash) {
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
