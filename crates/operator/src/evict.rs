//! Evictions by the API that obeys disruption budgets.
use std::time::Duration;

use kube::Client;

/// How long one may take; see [`crate::leader::CLAIM`].
const WRITE: Duration = Duration::from_secs(5);

/// How an eviction ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Evicted {
    /// It leaves.
    Done,
    /// A disruption budget has none left, in the API server's words.
    Protected(String),
    /// It is gone already, or another pod has its name.
    Gone,
    /// Anything else, in words.
    Failed(String),
}

impl Evicted {
    /// As metrics name it.
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Done => "evicted",
            Self::Protected(_) => "protected",
            Self::Gone => "gone",
            Self::Failed(_) => "failed",
        }
    }
}

/// Evicts a pod, `namespace/name`, if that still has this UID.
pub(crate) async fn evict(client: &Client, pod: &str, uid: &str) -> Evicted {
    let Some((namespace, name)) = pod.split_once('/') else { return Evicted::Gone };
    let body = serde_json::json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"namespace": namespace, "name": name},
        "deleteOptions": {"preconditions": {"uid": uid}}});
    let request = http::Request::post(format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into_bytes());
    let request = match request {
        Ok(request) => request,
        Err(error) => return Evicted::Failed(error.to_string()),
    };
    match tokio::time::timeout(WRITE, client.request_text(request)).await {
        Ok(Ok(_)) => Evicted::Done,
        Ok(Err(kube::Error::Api(status))) if status.code == 429 => Evicted::Protected(status.message.clone()),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Evicted::Gone,
        Ok(Err(error)) => Evicted::Failed(error.to_string()),
        Err(_) => Evicted::Failed(format!("the API server did not answer within {} s", WRITE.as_secs())),
    }
}
