//! Evicts pods through the API that respects disruption budgets.
use std::time::Duration;

use kube::Client;

use crate::write::WRITE_TIMEOUT;

/// The result of one eviction request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Evicted {
    /// The API server accepted the eviction, and the pod terminates.
    Done,
    /// A disruption budget allows no eviction now. Contains the API server's message.
    Protected(String),
    /// The pod no longer exists. A new pod may have the same name.
    NotFound,
    /// The request failed. Contains the reason.
    Failed(String),
}

impl Evicted {
    /// Value of the `result` label in metrics.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Done => "evicted",
            Self::Protected(_) => "protected",
            Self::NotFound => "not_found",
            Self::Failed(_) => "failed",
        }
    }
}

/// Options of an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Grace period in seconds. `None` means the pod's own grace period.
    pub grace: Option<u32>,
    /// Time limit of the request.
    pub timeout: Duration,
}

/// Evicts the pod `namespace/name` if its UID and `resourceVersion` are unchanged. A pod that was
/// bound after this version is not evicted.
pub(crate) async fn evict_unchanged(client: &Client, pod: &str, uid: &str, version: &str) -> Evicted {
    let preconditions = serde_json::json!({"uid": uid, "resourceVersion": version});
    send(client, pod, serde_json::json!({"preconditions": preconditions}), WRITE_TIMEOUT).await
}

/// Evicts the pod `namespace/name` with its own grace period, if its UID is unchanged.
pub(crate) async fn evict(client: &Client, pod: &str, uid: &str) -> Evicted {
    evict_with(client, pod, uid, Options { grace: None, timeout: WRITE_TIMEOUT }).await
}

/// Evicts the pod `namespace/name`, if its UID is unchanged.
///
/// Pass a client with `Config::default_retry` off. A client that retries requests on its own
/// repeats an eviction that a disruption budget refuses (HTTP 429).
pub async fn evict_with(client: &Client, pod: &str, uid: &str, options: Options) -> Evicted {
    let mut delete = serde_json::json!({"preconditions": {"uid": uid}});
    if let Some(grace) = options.grace {
        delete["gracePeriodSeconds"] = grace.into();
    }
    send(client, pod, delete, options.timeout).await
}

async fn send(client: &Client, pod: &str, delete: serde_json::Value, timeout: Duration) -> Evicted {
    let Some((namespace, name)) = pod.split_once('/') else { return Evicted::NotFound };
    let body = serde_json::json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": namespace, "name": name},
        "deleteOptions": delete,
    });
    let request = http::Request::post(format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into_bytes());
    let request = match request {
        Ok(request) => request,
        Err(error) => return Evicted::Failed(error.to_string()),
    };
    match tokio::time::timeout(timeout, client.request_text(request)).await {
        Ok(Ok(_)) => Evicted::Done,
        Ok(Err(kube::Error::Api(status))) if status.code == 429 => Evicted::Protected(status.message.clone()),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Evicted::NotFound,
        Ok(Err(error)) => Evicted::Failed(error.to_string()),
        Err(_) => Evicted::Failed(format!("the API server did not answer within {} s", timeout.as_secs())),
    }
}
