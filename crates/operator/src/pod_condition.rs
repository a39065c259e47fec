//! Writes conditions of pods.
use jiff::Timestamp;
use kube::Client;
use serde::Deserialize;
use serde_json::json;

use crate::pods::PodCondition;
use crate::write::WRITE_TIMEOUT;

/// The pod whose condition is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConditionTarget<'a> {
    /// The pod, as `namespace/name`.
    pub(crate) pod: &'a str,
    /// UID of the pod. A write fails if another pod has the same name.
    pub(crate) uid: &'a str,
    /// The `resourceVersion` that the pod must have. `None` for any.
    pub(crate) version: Option<&'a str>,
}

/// The result of writing a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WriteResult {
    /// The condition was written. Contains the pod's new `resourceVersion`.
    Done(String),
    /// The pod has changed or was replaced. Nothing was written.
    Obsolete,
    /// The pod no longer exists.
    Missing,
    /// The write failed. A retry may succeed.
    Failed,
}

/// Writes a condition of the pod `namespace/name` if its UID is unchanged. Returns true if no retry
/// is necessary. `status_changed` is true if the condition's status changes, and not only its
/// reason or message.
pub(crate) async fn write(
    client: &Client,
    (pod, uid): (&str, &str),
    condition: &PodCondition,
    status_changed: bool,
) -> bool {
    write_to(client, ConditionTarget { pod, uid, version: None }, condition, status_changed).await
        != WriteResult::Failed
}

/// Writes a condition of a pod. `status_changed` is true if the condition's status changes, and not
/// only its reason or message.
pub(crate) async fn write_to(
    client: &Client,
    ConditionTarget { pod, uid, version }: ConditionTarget<'_>,
    condition: &PodCondition,
    status_changed: bool,
) -> WriteResult {
    let Some((namespace, name)) = pod.split_once('/') else { return WriteResult::Obsolete };
    let mut entry = json!({
        "type": condition.type_, "status": condition.status, "reason": condition.reason, "message": condition.message,
    });
    if status_changed {
        let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
        entry["lastTransitionTime"] = json!(now.to_string());
    }
    let mut patch = json!({"metadata": {"uid": uid}, "status": {"conditions": [entry]}});
    if let Some(version) = version {
        patch["metadata"]["resourceVersion"] = json!(version);
    }
    let request =
        http::Request::patch(format!("/api/v1/namespaces/{namespace}/pods/{name}/status?fieldManager=cleave-operator"))
            // The API server merges conditions by type, so the kubelet's conditions are kept.
            .header(http::header::CONTENT_TYPE, "application/strategic-merge-patch+json")
            .body(patch.to_string().into_bytes());
    let request = match request {
        Ok(request) => request,
        Err(error) => {
            tracing::error!(
                pod,
                error = &error as &dyn std::error::Error,
                "failed to build the request that writes a pod condition"
            );
            return WriteResult::Obsolete;
        }
    };
    match tokio::time::timeout(WRITE_TIMEOUT, client.request_text(request)).await {
        Ok(Ok(answer)) => {
            tracing::info!(
                pod,
                status = condition.status,
                reason = condition.reason,
                message = condition.message,
                "wrote a pod condition"
            );
            WriteResult::Done(resource_version(&answer))
        }
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
            tracing::debug!(pod, message = status.message, "skipped a pod condition: the pod no longer exists");
            WriteResult::Missing
        }
        // The pod has changed, or a new pod has the same name.
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 409 | 422) => {
            tracing::debug!(
                pod,
                code = status.code,
                message = status.message,
                "skipped a pod condition: the pod changed"
            );
            WriteResult::Obsolete
        }
        Ok(Err(error)) => {
            tracing::warn!(pod, error = &error as &dyn std::error::Error, "failed to write a pod condition");
            WriteResult::Failed
        }
        Err(_) => {
            tracing::warn!(pod, "failed to write a pod condition: the API server did not answer");
            WriteResult::Failed
        }
    }
}

/// Returns the `resourceVersion` in an answer of the API server, or "" if the answer has none.
fn resource_version(answer: &str) -> String {
    #[derive(Default, Deserialize)]
    #[serde(rename_all = "camelCase", default)]
    struct Meta {
        resource_version: String,
    }
    #[derive(Deserialize)]
    struct Answer {
        metadata: Meta,
    }
    serde_json::from_str(answer).map(|answer: Answer| answer.metadata.resource_version).unwrap_or_default()
}
