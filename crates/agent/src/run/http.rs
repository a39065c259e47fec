//! Serves `/metrics`, `/healthz` and `/readyz`.
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use cleave_gpu::nvml::Library;
use cleave_kubelet::{DirectoryState, PluginServerState};
use cleave_serve::http::Limits;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::gpu_readings::GpuSensors;
use crate::metrics::Metrics;

/// Maximum age of the main loop's heartbeat while `/healthz` reports the agent as alive. The main
/// loop usually reconciles at least every 5 s.
const MAX_HEARTBEAT_AGE: Duration = Duration::from_secs(60);

/// Heartbeat that the main loop sends after each reconciliation.
#[derive(Debug, Clone)]
pub(super) struct Heartbeat {
    /// Time of the main loop's last reconciliation.
    pub(super) reconciled: Instant,
    /// Why the agent is not ready. `None` if the agent is ready.
    pub(super) not_ready: Option<String>,
    /// Whether a change of a GPU is in progress.
    pub(super) changing: bool,
}

/// The sources of the state that the HTTP endpoints report.
#[derive(Debug)]
struct ProbeState {
    metrics: Metrics,
    /// `None` while this agent is a standby, because the serving agent queries the GPUs.
    sensors: Option<Arc<GpuSensors>>,
    heartbeat: watch::Receiver<Heartbeat>,
    plugins: watch::Receiver<PluginServerState>,
    /// Time until which the agent reports that it is ready, regardless of its state.
    ready_until: Option<Instant>,
}

/// Serves HTTP requests, and returns only on an error. Reports the sensors of GPUs if the caller
/// passes a library. Until `ready_until`, reports that the agent is ready, regardless of its state.
pub(super) async fn serve_endpoints(
    addr: SocketAddr,
    (metrics, library): (Metrics, Option<Library>),
    heartbeat: watch::Receiver<Heartbeat>,
    plugins: watch::Receiver<PluginServerState>,
    ready_until: Option<Instant>,
) -> anyhow::Result<()> {
    let listener = cleave_serve::tcp::listen(addr).with_context(|| format!("failed to serve metrics at {addr}"))?;
    let sensors = library.map(|library| Arc::new(GpuSensors::new(library, metrics.clone())));
    let router = Router::new()
        .route("/metrics", get(metrics_text))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(Arc::new(ProbeState { metrics, sensors, heartbeat, plugins, ready_until }));
    cleave_serve::http::serve(listener, router, Limits::default(), CancellationToken::new()).await;
    Ok(())
}

/// The endpoints of a standby: an agent that waits while another agent of its node serves.
pub(super) struct StandbyEndpoints {
    heartbeat: watch::Sender<Heartbeat>,
    server: AbortOnDropHandle<()>,
}

impl StandbyEndpoints {
    pub(super) fn start(addr: SocketAddr) -> Self {
        let (heartbeat, heartbeats) = watch::channel(standby_heartbeat(false));
        let none = PluginServerState { directory: DirectoryState::Held, ..PluginServerState::default() };
        let server = serve_endpoints(addr, (Metrics::new(), None), heartbeats, watch::channel(none).1, None);
        let server = tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::warn!(error = format!("{error:#}"), "failed to serve the endpoints of a standby agent");
            }
        });
        Self { heartbeat, server: AbortOnDropHandle::new(server) }
    }

    /// Records that the agent still waits, and whether it counts as ready.
    pub(super) fn record_heartbeat(&self, ready: bool) {
        self.heartbeat.send_replace(standby_heartbeat(ready));
    }

    /// Stops the endpoints, so that the serving agent's endpoints can use the same address.
    pub(super) async fn stop(self) {
        self.server.abort();
        // Ignore the error, which only reports the cancellation.
        let _ = self.server.await;
    }
}

async fn metrics_text(State(probes): State<Arc<ProbeState>>) -> impl IntoResponse {
    if let Some(sensors) = &probes.sensors {
        sensors.refresh().await;
    }
    match probes.metrics.encode() {
        Ok(text) => {
            ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn standby_heartbeat(ready: bool) -> Heartbeat {
    let not_ready = (!ready).then(|| "another agent of this node serves".to_owned());
    Heartbeat { reconciled: Instant::now(), not_ready, changing: false }
}

async fn healthz(State(probes): State<Arc<ProbeState>>) -> (StatusCode, &'static str) {
    if probes.heartbeat.borrow().reconciled.elapsed() < MAX_HEARTBEAT_AGE {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the main loop is blocked\n")
    }
}

async fn readyz(State(probes): State<Arc<ProbeState>>) -> (StatusCode, String) {
    let why = not_ready_reason(&probes.heartbeat.borrow(), &probes.plugins.borrow());
    match why.filter(|_| probes.ready_until.is_none_or(|until| until <= Instant::now())) {
        None => (StatusCode::OK, "ok\n".into()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

/// Returns a reason why the agent is not ready. Returns `None` if the agent is ready.
pub(super) fn not_ready_reason(heartbeat: &Heartbeat, plugins: &PluginServerState) -> Option<String> {
    if let Some(why) = &heartbeat.not_ready {
        return Some(why.clone());
    }
    if plugins.is_ready() {
        return None;
    }
    let waiting = plugins.resources.iter().find(|(_, state)| state.phase != cleave_kubelet::ResourcePhase::Streaming);
    Some(match waiting {
        Some((name, state)) => {
            format!("{name}: {:?}{}", state.phase, state.error.as_ref().map(|e| format!(": {e}")).unwrap_or_default())
        }
        None => format!("the device plugin directory: {:?}", plugins.directory),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cleave_kubelet::{ResourceName, ResourcePhase, ResourceState};

    use super::*;

    #[test]
    fn the_agent_is_ready_when_the_lists_of_all_resources_are_streamed() {
        let ready = Heartbeat { reconciled: Instant::now(), not_ready: None, changing: false };
        let resource = |phase| {
            let name = ResourceName::parse("nvidia.com/gpu").unwrap();
            BTreeMap::from([(name, ResourceState { phase, error: Some("refused".into()), ..ResourceState::default() })])
        };
        let state = |phase| PluginServerState { directory: DirectoryState::Held, resources: resource(phase) };
        assert_eq!(not_ready_reason(&ready, &state(ResourcePhase::Streaming)), None);
        assert_eq!(
            not_ready_reason(&ready, &state(ResourcePhase::Registered)).unwrap(),
            "nvidia.com/gpu: Registered: refused"
        );
        let held = PluginServerState { directory: DirectoryState::HeldByAnother, resources: BTreeMap::new() };
        assert_eq!(not_ready_reason(&ready, &held).unwrap(), "the device plugin directory: HeldByAnother");
        let waiting = Heartbeat { not_ready: Some("NVML has not answered yet".into()), ..ready };
        assert_eq!(not_ready_reason(&waiting, &state(ResourcePhase::Streaming)).unwrap(), "NVML has not answered yet");
    }
}
