//! Requests the kubelet's PodResources list, and detects restarts of the kubelet.
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_kubelet::{KubeletCheckpoint, PluginServerState, PodResources};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::input::Input;
use crate::args::AgentArgs;
use crate::gpu::hardware::error_chain;
use crate::metrics::Metrics;

/// Usual delay until the kubelet lists the pod of a new allocation.
pub(super) const USUAL_LIST_DELAY: Duration = Duration::from_millis(300);
/// Usual delay until the kubelet writes its checkpoint after the agent has resent a device list.
/// The agent waits twice as long after each further attempt.
const USUAL_CHECKPOINT_DELAY: Duration = Duration::from_millis(20);
/// Deadline for a PodResources request.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// Device, inode and modification time (seconds and nanoseconds) of the kubelet's socket. Each
/// start of the kubelet creates a new socket.
type SocketId = (u64, u64, i64, i64);

fn socket_id(socket: &Path) -> Option<SocketId> {
    let found = std::fs::symlink_metadata(socket).ok()?;
    Some((found.dev(), found.ino(), found.mtime(), found.mtime_nsec()))
}

/// Detects restarts of the kubelet by changes of its socket.
#[derive(Debug, Default)]
struct SocketTracker {
    seen: Option<SocketId>,
    /// Whether the kubelet has restarted, and the main loop has not received a report of the
    /// restart yet.
    unreported: bool,
}

impl SocketTracker {
    /// Records the current socket, if it exists. Returns whether a restart is still unreported. The
    /// first start of the kubelet does not count as a restart.
    fn has_restarted(&mut self, now: Option<SocketId>) -> bool {
        let Some(now) = now else { return false };
        self.unreported |= self.seen.replace(now).is_some_and(|before| before != now);
        self.unreported
    }
}

/// Determines when the agent requests the PodResources list.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListSchedule {
    /// Time between two requests.
    pub(super) interval: Duration,
    /// Number of bursts of allocations. Each burst triggers an early request.
    pub(super) allocated: u64,
    /// Number of times that the agent resent device lists, so that the kubelet writes its
    /// checkpoint. When this number increases, the task requests the list soon after the kubelet
    /// should have written its checkpoint.
    pub(super) resent: u64,
}

/// Requests the PodResources list repeatedly, until the main loop has ended.
pub(super) async fn list_allocations(
    args: Arc<AgentArgs>,
    inputs: mpsc::Sender<Input>,
    mut listing: watch::Receiver<ListSchedule>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let socket = args.pod_resources_socket.as_path();
    let pods = PodResources::new(socket, LIST_TIMEOUT)?;
    let mut checkpoint = KubeletCheckpoint::in_directory(&args.device_plugin_dir);
    let mut kubelet = SocketTracker::default();
    let (mut resent, mut checkpoint_delay) = (0, USUAL_CHECKPOINT_DELAY);
    loop {
        let requested_at = Instant::now();
        kubelet.has_restarted(socket_id(socket));
        let answer = pods.list().await.map_err(|error| {
            metrics.count_error("pod-resources");
            error_chain(&error)
        });
        let kubelet_checkpoint = checkpoint.devices().await.unwrap_or_else(|error| {
            metrics.count_error("kubelet-checkpoint");
            tracing::warn!(%error, "failed to read the kubelet's checkpoint");
            None
        });
        // A restarted kubelet lists no pods at first, and accepts registrations of plugins only
        // later. Report the restart before the list, because the main loop must interpret the list
        // as incomplete.
        if kubelet.has_restarted(socket_id(socket)) {
            kubelet.unreported = false;
            if inputs.send(Input::KubeletStarted).await.is_err() {
                return Ok(());
            }
        }
        if inputs.send(Input::PodResources(answer, requested_at, kubelet_checkpoint)).await.is_err() {
            return Ok(());
        }
        let ListSchedule { interval, resent: so_far, .. } = *listing.borrow_and_update();
        let mut allocated = false;
        if so_far == resent {
            tokio::select! {
                // Cancel-safe: the next call returns a missed change.
                _ = listing.changed() => allocated = true,
                () = tokio::time::sleep(interval) => {}
            }
        }
        let before = std::mem::replace(&mut resent, listing.borrow().resent);
        if resent == before {
            checkpoint_delay = USUAL_CHECKPOINT_DELAY;
            if allocated {
                tokio::time::sleep(USUAL_LIST_DELAY).await;
            }
        } else {
            tokio::time::sleep(checkpoint_delay).await;
            checkpoint_delay = (checkpoint_delay * 2).min(interval);
        }
    }
}

/// Detects starts of the kubelet by registrations of plugins.
pub(super) async fn watch_restarts(
    mut states: watch::Receiver<PluginServerState>,
    inputs: mpsc::Sender<Input>,
    stopping: CancellationToken,
) -> anyhow::Result<()> {
    let mut seen: u64 = 0;
    while states.changed().await.is_ok() {
        let most =
            states.borrow_and_update().resources.values().map(|state| state.registrations).max().unwrap_or_default();
        if most > seen {
            seen = most;
            if inputs.send(Input::KubeletStarted).await.is_err() {
                break;
            }
        }
    }
    if stopping.is_cancelled() {
        // The main loop has stopped the plugins and is about to end the agent.
        std::future::pending::<()>().await;
    }
    anyhow::bail!("the device plugin manager has stopped")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubelet_with_a_new_socket_has_restarted() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("kubelet.sock");
        let mut kubelet = SocketTracker::default();
        assert!(!kubelet.has_restarted(socket_id(&socket)), "there is no socket");
        let bind = || drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        bind();
        assert!(!kubelet.has_restarted(socket_id(&socket)), "the first start");
        assert!(!kubelet.has_restarted(socket_id(&socket)), "no restart");
        // Keep the old socket, so that the new socket has another inode.
        std::fs::rename(&socket, directory.path().join("old")).unwrap();
        assert!(!kubelet.has_restarted(socket_id(&socket)), "there is no socket");
        bind();
        assert!(kubelet.has_restarted(socket_id(&socket)));
        assert!(kubelet.has_restarted(socket_id(&socket)), "not reported yet");
        kubelet.unreported = false;
        assert!(!kubelet.has_restarted(socket_id(&socket)));
    }
}
