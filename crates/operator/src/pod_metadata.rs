//! Writes labels and annotations of pods.
use kube::Client;
use serde_json::Value;

use crate::write::WRITE_TIMEOUT;

/// Merges labels or annotations into the metadata of the pod `namespace/name` if its UID is
/// unchanged. Returns true if no retry is necessary: the metadata was written, or the pod no longer
/// exists.
pub(crate) async fn patch_metadata(client: &Client, (pod, uid): (&str, &str), mut metadata: Value) -> bool {
    let Some((namespace, name)) = pod.split_once('/') else { return false };
    metadata["uid"] = uid.into();
    let body = serde_json::json!({"metadata": metadata}).to_string().into_bytes();
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}?fieldManager=cleave-operator");
    let request =
        http::Request::patch(path).header(http::header::CONTENT_TYPE, "application/merge-patch+json").body(body);
    let request = match request {
        Ok(request) => request,
        Err(error) => {
            tracing::error!(
                pod,
                error = &error as &dyn std::error::Error,
                "failed to build the request that writes the metadata of a pod"
            );
            return false;
        }
    };
    match tokio::time::timeout(WRITE_TIMEOUT, client.request_text(request)).await {
        Ok(Ok(_)) => true,
        // The pod no longer exists, or a new pod has the same name.
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
            tracing::debug!(pod, message = status.message, "skipped the metadata of a pod: it no longer exists");
            true
        }
        Ok(Err(error)) => {
            tracing::warn!(pod, error = &error as &dyn std::error::Error, "failed to write the metadata of a pod");
            false
        }
        Err(_) => {
            tracing::warn!(pod, "failed to write the metadata of a pod: the API server did not answer");
            false
        }
    }
}
