//! Serves HTTP/1 on a TCP port with bounded resources.
//!
//! A peer may connect and send nothing, or send a request slowly. Each connection therefore has a
//! deadline for the headers of each request, and the number of connections is limited. If all
//! connections are in use, a new connection replaces the oldest one. The oldest connection is
//! usually idle or slow, because the server answers requests within milliseconds. The server
//! therefore answers the kubelet's probes even if thousands of silent peers connect.
//!
//! Peers may also connect faster than the server answers. After each accepted connection, the
//! server therefore lets the tasks of all open connections run. So a connection with a received
//! request gets its answer before a new connection can replace the connection.
use std::collections::VecDeque;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Maximum time for which the server completes requests after `stop` is cancelled.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// Delay before the server accepts connections again after a failure.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Limits on the connections of one port.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of connections.
    pub connections: usize,
    /// Time limit for the headers of a request. If a connection is used for several requests, the
    /// time limit includes the idle time before each of them.
    pub headers: Duration,
}

impl Default for Limits {
    /// Returns limits for a port for metrics and probes, to which few peers connect.
    fn default() -> Self {
        Self { connections: 64, headers: Duration::from_secs(10) }
    }
}

/// Serves requests until `stop` is cancelled. Then completes requests in progress, for at most one
/// second.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits, stop: CancellationToken) {
    let ending = GracefulShutdown::new();
    let mut connections: VecDeque<AbortOnDropHandle<()>> = VecDeque::new();
    let mut has_failed = false;
    loop {
        // `accept` is cancel-safe: a connection that it has not returned remains in the kernel's
        // queue.
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        connections.retain(|connection| !connection.is_finished());
        match accepted {
            Ok((stream, _)) => {
                has_failed = false;
                while connections.len() >= limits.connections.max(1) {
                    connections.pop_front();
                }
                let served = serve_connection(stream, router.clone(), limits.headers, ending.watcher());
                connections.push_back(AbortOnDropHandle::new(tokio::spawn(served)));
                // Let the tasks of open connections answer received requests before a new
                // connection replaces an old one.
                yield_now().await;
            }
            Err(error) => {
                if !std::mem::replace(&mut has_failed, true) {
                    tracing::warn!(error = &error as &dyn std::error::Error, "failed to accept a connection");
                }
                // Close the oldest connection, because the usual cause is that the process has too
                // many open files.
                connections.pop_front();
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
    drop(listener);
    if timeout(SHUTDOWN_TIMEOUT, ending.shutdown()).await.is_err() {
        tracing::debug!("closed connections before all requests were answered");
    }
}

/// Serves HTTP/1 on one connection until the connection closes. `headers` is a time limit as in
/// [`Limits::headers`].
pub async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    headers: Duration,
    watcher: Watcher,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(headers);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(error = &error as &dyn std::error::Error, "an HTTP connection failed");
    }
}
