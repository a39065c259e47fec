//! Writes the operator's own conditions of pods.
use jiff::Timestamp;
use kube::Client;
use serde_json::json;

use crate::pods::PodCondition;
use crate::write::WRITE_TIMEOUT;

/// Writes a condition of the pod `namespace/name` if its UID is unchanged. Returns true if no retry
/// is necessary. `status_changed` is true if the condition's status changes, and not only its
/// reason or message.
pub(crate) async fn write(
    client: &Client,
    (pod, uid): (&str, &str),
    condition: &PodCondition,
    status_changed: bool,
) -> bool {
    let Some((namespace, name)) = pod.split_once('/') else { return true };
    let mut entry = json!({
        "type": condition.type_, "status": condition.status, "reason": condition.reason, "message": condition.message,
    });
    if status_changed {
        let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
        entry["lastTransitionTime"] = json!(now.to_string());
    }
    let patch = json!({"metadata": {"uid": uid}, "status": {"conditions": [entry]}});
    let request =
        http::Request::patch(format!("/api/v1/namespaces/{namespace}/pods/{name}/status?fieldManager=cleave-operator"))
            // The API server merges conditions by type, so the kubelet's conditions are kept.
            .header(http::header::CONTENT_TYPE, "application/strategic-merge-patch+json")
            .body(patch.to_string().into_bytes());
    let request = match request {
        Ok(request) => request,
        Err(error) => {
            tracing::error!(pod, error = &error as &dyn std::error::Error, "failed to build a request");
            return true;
        }
    };
    match tokio::time::timeout(WRITE_TIMEOUT, client.request_text(request)).await {
        Ok(Ok(_)) => {
            tracing::info!(
                pod,
                status = condition.status,
                reason = condition.reason,
                message = condition.message,
                "wrote a pod condition"
            );
            true
        }
        // The pod was deleted, or a new pod has the same name.
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409 | 422) => {
            tracing::debug!(
                pod,
                code = status.code,
                message = status.message,
                "skipped a pod condition: the pod changed or no longer exists"
            );
            true
        }
        Ok(Err(error)) => {
            tracing::warn!(pod, error = &error as &dyn std::error::Error, "failed to write a pod condition");
            false
        }
        Err(_) => {
            tracing::warn!(pod, "failed to write a pod condition: the API server did not answer");
            false
        }
    }
}
