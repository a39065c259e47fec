//! Serves `/metrics`, `/healthz` and `/readyz`.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use cleave_serve::http::Limits;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::admission::certificate::CertificateReceiver;
use crate::leader::LeaseGuard;
use crate::metrics::Metrics;

/// The state that the endpoints report.
#[derive(Clone)]
pub(crate) struct Health {
    /// Set once every watch has listed its objects.
    pub(crate) listed: Arc<AtomicBool>,
    /// Whether the lease has been read, and whether this process holds it.
    pub(crate) claim: LeaseGuard,
    /// The operator's metrics.
    pub(crate) metrics: Metrics,
    /// The registry that `/metrics` encodes.
    pub(crate) registry: Arc<Registry>,
    /// The webhook's certificate. `None` if the webhook is disabled.
    pub(crate) certified: Option<CertificateReceiver>,
}

/// Serves requests until `stop` is cancelled.
pub(crate) async fn serve(listener: TcpListener, health: Health, stop: CancellationToken) {
    let router = Router::new()
        .route("/metrics", get(metrics))
        // The threads that run the passes also answer requests, and the process exits when any of
        // its tasks ends. Therefore a response shows that the operator's tasks still run.
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .with_state(health);
    cleave_serve::http::serve(listener, router, Limits::default(), stop).await;
}

async fn readyz(State(health): State<Health>) -> Response {
    let certified = health.certified.is_none_or(|served| served.borrow().is_some());
    match readiness(health.listed.load(Ordering::Acquire), health.claim.is_known(), certified) {
        Ok(()) => (StatusCode::OK, "ok\n").into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

/// Checks that every watch has listed its objects, the lease has been read, and an enabled webhook
/// has a certificate.
fn readiness(listed: bool, known: bool, certified: bool) -> Result<(), &'static str> {
    match (listed, known, certified) {
        (false, ..) => Err("the cluster's objects are not listed yet"),
        (true, false, _) => Err("the lease has not been read yet"),
        (true, true, false) => Err("the webhook has no certificate yet"),
        (true, true, true) => Ok(()),
    }
}

async fn metrics(State(health): State<Health>) -> Response {
    health.metrics.refresh(health.claim.is_current());
    let mut text = String::new();
    match encode(&mut text, &health.registry) {
        Ok(()) => {
            let kind = [(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")];
            (kind, text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::readiness;

    #[test]
    fn readiness_requires_listed_objects_a_read_lease_and_a_certificate() {
        assert!(readiness(false, true, true).is_err());
        assert!(readiness(true, false, true).is_err());
        assert!(readiness(true, true, false).is_err());
        assert!(readiness(true, true, true).is_ok());
    }
}
