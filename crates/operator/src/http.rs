//! `/metrics`, `/healthz` and `/readyz`.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::leader::Claim;
use crate::metrics::Metrics;

/// What the endpoints tell of.
#[derive(Clone)]
pub(crate) struct Health {
    /// All watches have listed once.
    pub(crate) listed: Arc<AtomicBool>,
    /// It is known who leads.
    pub(crate) claim: Claim,
    /// What is counted.
    pub(crate) metrics: Metrics,
    /// What is counted, to be written out.
    pub(crate) registry: Arc<Registry>,
}

/// Serves until `stop`.
pub(crate) async fn serve(listener: TcpListener, health: Health, stop: CancellationToken) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics))
        // Answering is being alive: the pass runs on the same threads, and the process ends with any of its tasks.
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .with_state(health);
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

async fn readyz(State(health): State<Health>) -> Response {
    match readiness(health.listed.load(Ordering::Acquire), health.claim.is_known()) {
        Ok(()) => (StatusCode::OK, "ok\n").into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

/// Ready is to know the cluster, and to lead or to stand by.
fn readiness(listed: bool, known: bool) -> Result<(), &'static str> {
    match (listed, known) {
        (false, _) => Err("the cluster's objects are not all listed yet"),
        (true, false) => Err("the lease has not been read yet"),
        (true, true) => Ok(()),
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
    fn ready_is_to_know_the_cluster_and_who_leads() {
        assert!(readiness(false, true).is_err());
        assert!(readiness(true, false).is_err());
        assert!(readiness(true, true).is_ok());
    }
}
