//! Asks the kubelet who holds what, and notices that it starts.
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_kubelet::{KubeletCheckpoint, PluginsState, PodResources};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::input::Input;
use crate::args::AgentArgs;
use crate::gpu::hardware::error_chain;
use crate::metrics::Metrics;

/// How long the kubelet usually takes to list a pod after an allocation.
pub(super) const LISTED: Duration = Duration::from_millis(300);
/// How long the kubelet usually takes to write its checkpoint after a list was sent again. Doubles
/// until it has.
const WRITTEN: Duration = Duration::from_millis(20);
/// Deadline for the kubelet's list.
const LIST_DEADLINE: Duration = Duration::from_secs(5);

/// Device, inode and time of the socket that the kubelet listens on. Each start of the kubelet
/// creates another.
type SocketId = (u64, u64, i64, i64);

fn bound_at(socket: &Path) -> Option<SocketId> {
    let found = std::fs::symlink_metadata(socket).ok()?;
    Some((found.dev(), found.ino(), found.mtime(), found.mtime_nsec()))
}

/// Which start of the kubelet answered last.
#[derive(Debug, Default)]
struct Bound {
    seen: Option<SocketId>,
    /// It was another than before, and that was not reported yet.
    news: bool,
}

impl Bound {
    /// Records the socket as it is now, if there is one. Returns whether a kubelet has started
    /// since this was last reported. The first one does not count.
    fn is_another(&mut self, now: Option<SocketId>) -> bool {
        let Some(now) = now else { return false };
        self.news |= self.seen.replace(now).is_some_and(|before| before != now);
        self.news
    }
}

/// When to ask the kubelet which containers hold what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Listing {
    /// Pause between two requests.
    pub(super) every: Duration,
    /// Counts allocations: after each, the kubelet is asked soon.
    pub(super) given: u64,
    /// Counts lists that were sent again for its checkpoint: after each, the kubelet is asked at
    /// once.
    pub(super) renewed: u64,
}

/// Asks the kubelet which containers hold what, forever.
pub(super) async fn list(
    args: Arc<AgentArgs>,
    inputs: mpsc::Sender<Input>,
    mut listing: watch::Receiver<Listing>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let socket = args.pod_resources_socket.as_path();
    let pods = PodResources::new(socket, LIST_DEADLINE)?;
    let mut checkpoint = KubeletCheckpoint::of(&args.device_plugin_dir);
    let mut kubelet = Bound::default();
    let (mut renewed, mut written) = (0, WRITTEN);
    loop {
        let asked = Instant::now();
        kubelet.is_another(bound_at(socket));
        let answer = pods.list().await.map_err(|error| {
            metrics.error("pod-resources");
            error_chain(&error)
        });
        let on_disk = checkpoint.devices().await.unwrap_or_else(|error| {
            metrics.error("kubelet-checkpoint");
            tracing::warn!(%error, "failed to read the kubelet's checkpoint; a restarted kubelet may take other slices for allocated");
            None
        });
        // A kubelet that has just started lists nothing at first, and registers our plugins only
        // later. The main loop must know before it believes the list.
        if kubelet.is_another(bound_at(socket)) {
            kubelet.news = false;
            if inputs.send(Input::KubeletStarted).await.is_err() {
                return Ok(());
            }
        }
        if inputs.send(Input::Held(answer, asked, on_disk)).await.is_err() {
            return Ok(());
        }
        let Listing { every, renewed: so_far, .. } = *listing.borrow_and_update();
        let mut given = false;
        if so_far == renewed {
            tokio::select! {
                // Cancel-safe: a change that is not taken is seen by the next call.
                _ = listing.changed() => given = true,
                () = tokio::time::sleep(every) => {}
            }
        }
        let before = std::mem::replace(&mut renewed, listing.borrow().renewed);
        if renewed == before {
            written = WRITTEN;
            if given {
                tokio::time::sleep(LISTED).await;
            }
        } else {
            tokio::time::sleep(written).await;
            written = (written * 2).min(every);
        }
    }
}

/// Notices restarts of the kubelet: it registers plugins again, and does not know its pods yet.
pub(super) async fn watch_starts(
    mut states: watch::Receiver<PluginsState>,
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
        // The main loop has stopped it, and ends the agent by its own end.
        std::future::pending::<()>().await;
    }
    anyhow::bail!("the device plugins' manager has ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubelet_that_made_its_socket_anew_has_started_and_the_first_has_not() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("kubelet.sock");
        let mut kubelet = Bound::default();
        assert!(!kubelet.is_another(bound_at(&socket)), "there is none");
        let bind = || drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        bind();
        assert!(!kubelet.is_another(bound_at(&socket)), "the first");
        assert!(!kubelet.is_another(bound_at(&socket)), "the same");
        // Kept, so that the next has another inode.
        std::fs::rename(&socket, folder.path().join("old")).unwrap();
        assert!(!kubelet.is_another(bound_at(&socket)), "it is away");
        bind();
        assert!(kubelet.is_another(bound_at(&socket)));
        assert!(kubelet.is_another(bound_at(&socket)), "until it was told");
        kubelet.news = false;
        assert!(!kubelet.is_another(bound_at(&socket)));
    }
}
