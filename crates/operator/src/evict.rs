//! Evicts pods through the Eviction API, which respects disruption budgets, and deletes pods.
use std::time::Duration;

use kube::Client;
use kube::core::Status;

use crate::write::WRITE_TIMEOUT;

/// The result of one eviction request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvictionResult {
    /// The API server accepted the eviction, and the pod terminates.
    Done,
    /// A disruption budget allows no eviction now. Contains the API server's message.
    Protected(String),
    /// The pod no longer exists, has another UID, or has changed since the `resourceVersion` of the
    /// request.
    NotFound,
    /// The API server refuses to evict the pod. For example, two disruption budgets select the pod,
    /// or an admission webhook denies the request. Contains the API server's message.
    Refused(String),
    /// The API server limits the number of requests. Contains the time after which to retry. The
    /// response does not show whether the pod can be evicted.
    Throttled(Duration),
    /// The API server did not answer, or answered with another error. Contains the reason.
    Failed(String),
}

impl EvictionResult {
    /// Returns the value of the `result` label in metrics.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Done => "evicted",
            Self::Protected(_) => "protected",
            Self::NotFound => "not_found",
            Self::Refused(_) => "refused",
            Self::Throttled(_) => "throttled",
            Self::Failed(_) => "failed",
        }
    }
}

/// The cause in the API server's response when a disruption budget refuses an eviction.
const BUDGET_CAUSE: &str = "DisruptionBudget";

/// Grace period and time limit of an eviction or a deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvictionOptions {
    /// Grace period in seconds. `None` means the pod's own grace period.
    pub grace: Option<u32>,
    /// Time limit of the request.
    pub timeout: Duration,
}

/// Evicts the pod `namespace/name` if its UID and `resourceVersion` are unchanged. For example, a
/// pod that the scheduler has bound since this version is not evicted.
pub(crate) async fn evict_unchanged(client: &Client, pod: &str, uid: &str, version: &str) -> EvictionResult {
    let preconditions = serde_json::json!({"uid": uid, "resourceVersion": version});
    send_eviction(client, pod, serde_json::json!({"preconditions": preconditions}), WRITE_TIMEOUT).await
}

/// Evicts the pod `namespace/name` with its own grace period, if its UID is unchanged.
pub(crate) async fn evict(client: &Client, pod: &str, uid: &str) -> EvictionResult {
    evict_with(client, pod, uid, EvictionOptions { grace: None, timeout: WRITE_TIMEOUT }).await
}

/// Evicts the pod `namespace/name`, if its UID is unchanged.
///
/// Pass a client with `Config::default_retry` off. Otherwise the client itself repeats an eviction
/// that a disruption budget refuses (HTTP 429).
pub async fn evict_with(client: &Client, pod: &str, uid: &str, options: EvictionOptions) -> EvictionResult {
    let mut delete = serde_json::json!({"preconditions": {"uid": uid}});
    if let Some(grace) = options.grace {
        delete["gracePeriodSeconds"] = grace.into();
    }
    send_eviction(client, pod, delete, options.timeout).await
}

/// Deletes the pod `namespace/name`, if its UID is unchanged. Disruption budgets do not prevent the
/// deletion.
pub(crate) async fn delete(client: &Client, pod: &str, uid: &str, options: EvictionOptions) -> EvictionResult {
    let Some((namespace, name)) = pod.split_once('/') else { return EvictionResult::NotFound };
    let mut body = serde_json::json!({"preconditions": {"uid": uid}});
    if let Some(grace) = options.grace {
        body["gracePeriodSeconds"] = grace.into();
    }
    let request = http::Request::delete(format!("/api/v1/namespaces/{namespace}/pods/{name}"));
    send_request(client, request, &body, options.timeout).await
}

async fn send_eviction(client: &Client, pod: &str, delete: serde_json::Value, timeout: Duration) -> EvictionResult {
    let Some((namespace, name)) = pod.split_once('/') else { return EvictionResult::NotFound };
    let body = serde_json::json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": namespace, "name": name},
        "deleteOptions": delete,
    });
    let request = http::Request::post(format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction"));
    send_request(client, request, &body, timeout).await
}

async fn send_request(
    client: &Client,
    request: http::request::Builder,
    body: &serde_json::Value,
    timeout: Duration,
) -> EvictionResult {
    let request = request.header(http::header::CONTENT_TYPE, "application/json").body(body.to_string().into_bytes());
    let request = match request {
        Ok(request) => request,
        Err(error) => return EvictionResult::Failed(error.to_string()),
    };
    match tokio::time::timeout(timeout, client.request_text(request)).await {
        Ok(Ok(_)) => EvictionResult::Done,
        Ok(Err(kube::Error::Api(status))) => result_of_status(&status),
        Ok(Err(error)) => EvictionResult::Failed(error.to_string()),
        Err(_) => EvictionResult::Failed(format!("the API server did not answer within {} s", timeout.as_secs())),
    }
}

/// Converts the status with which the API server refuses a request.
fn result_of_status(status: &Status) -> EvictionResult {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    match status.code {
        404 | 409 => EvictionResult::NotFound,
        429 if causes.clone().any(|cause| cause.reason == BUDGET_CAUSE) => {
            EvictionResult::Protected(status.message.clone())
        }
        429 => {
            let after = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
            EvictionResult::Throttled(Duration::from_secs(after.max(1).into()))
        }
        // After the status 500, the API server may have evicted the pod, for example if the
        // storage did not answer it in time.
        400..=499 => EvictionResult::Refused(status.message.clone()),
        _ => EvictionResult::Failed(status.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn eviction_result(code: u16, details: Value) -> EvictionResult {
        let mut status = json!({"kind": "Status", "status": "Failure", "message": "why", "code": code});
        status["details"] = details;
        result_of_status(&serde_json::from_value(status).unwrap())
    }

    #[test]
    fn a_disruption_budget_and_throttling_are_distinguished_by_the_cause() {
        let budget = json!({"retryAfterSeconds": 10, "causes": [{"reason": "DisruptionBudget", "message": "needs 2"}]});
        assert_eq!(eviction_result(429, budget), EvictionResult::Protected("why".to_owned()));
        assert_eq!(
            eviction_result(429, json!({"retryAfterSeconds": 7})),
            EvictionResult::Throttled(Duration::from_secs(7))
        );
        // API Priority and Fairness answers with plain text, and the client converts the text to a
        // status.
        let plain = Status::failure("Too many requests", "Failed to parse error data").with_code(429);
        assert_eq!(result_of_status(&plain), EvictionResult::Throttled(Duration::from_secs(1)));
    }

    #[test]
    fn eviction_answers_are_distinguished_by_their_status_code() {
        for (code, expected) in
            [(403, "refused"), (422, "refused"), (500, "failed"), (503, "failed"), (404, "not_found")]
        {
            assert_eq!(eviction_result(code, json!({})).as_str(), expected, "{code}");
        }
    }
}
