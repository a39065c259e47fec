//! The loop that all controllers share: wait for a change, then reconcile.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::FutureExt as _;
use kube::Client;
use kube::runtime::events::Recorder;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::leader::LeaseGuard;
use crate::metrics::Metrics;
use crate::read::Stores;

/// The client and state that all controllers share. Clones refer to the same state.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) stores: Stores,
    /// Whether this process may write.
    pub(crate) claim: LeaseGuard,
    pub(crate) metrics: Metrics,
    pub(crate) recorder: Recorder,
    /// Set once the watches have listed all objects.
    pub(crate) listed: Arc<AtomicBool>,
    pub(crate) stop: CancellationToken,
}

/// When a reconcile was triggered, and whether a burst of changes triggered it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trigger {
    /// When the controller saw the first change. Without a change, when the reconcile begins.
    pub(crate) seen: Instant,
    /// Whether more changes followed within the batch window.
    pub(crate) more: bool,
}

/// A controller that reads the stores and writes to the API server.
pub(crate) trait Controller {
    /// Returns how long to wait for further changes after the first one, so that one reconcile
    /// handles a burst.
    fn batch_window(&mut self) -> Duration;

    /// Reconciles once. Returns the delay before the next reconcile if nothing changes.
    fn reconcile(&mut self, trigger: Trigger) -> impl Future<Output = Option<Duration>> + Send;
}

/// Runs a controller until `stop` is cancelled. The controller reconciles after each `wake`, when
/// this process gains or loses the permission to write, and after the delay that the last reconcile
/// returned.
///
/// A reconcile is never interrupted. The controller must check the lease guard before each write.
///
/// # Errors
/// Returns an error if a watch stops before all objects are listed.
pub(crate) async fn run(mut controller: impl Controller, context: Context, wake: Arc<Notify>) -> Result<()> {
    let Context { stores, mut claim, listed, stop, .. } = context;
    tokio::select! {
        () = stop.cancelled() => return Ok(()),
        ready = stores.wait_until_ready() => ready.context("failed to list the cluster's objects")?,
    }
    if !listed.swap(true, Ordering::AcqRel) {
        tracing::info!("listed all objects");
    }
    let mut requeue: Option<Duration> = None;
    loop {
        let mut trigger = None;
        // Cancel-safe: `notified` keeps its permit when dropped, and `changed` reads a watch
        // channel. The other branches wait for a token and a timer.
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = wake.notified() => {
                let seen = Instant::now();
                tokio::time::sleep(controller.batch_window()).await;
                // The stores already contain the changes that arrived within the window.
                let more = wake.notified().now_or_never().is_some();
                trigger = Some(Trigger { seen, more });
            }
            () = claim.changed() => {}
            () = async { tokio::time::sleep(requeue.unwrap_or_default()).await }, if requeue.is_some() => {}
        }
        let trigger = trigger.unwrap_or_else(|| Trigger { seen: Instant::now(), more: false });
        requeue = controller.reconcile(trigger).await;
    }
}
