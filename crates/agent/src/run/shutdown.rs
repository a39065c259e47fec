//! Follows graceful shutdowns of the node, by the file in which the kubelet records them.
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;

use crate::args::AgentArgs;
use crate::files::look_as_it_changes;
use crate::termination::shutdown::{Periods, ShutdownStart};

/// The kubelet's record, in its own directory.
const NOTE: &str = "graceful_node_shutdown_state";
/// Pause between reads where inotify does not work.
const LOOK: Duration = Duration::from_secs(1);

/// Follows shutdowns of the node if the settings of the kubelet are known; returns otherwise.
pub(super) async fn watch(args: &AgentArgs, periods: Periods, note: watch::Sender<Option<Instant>>) {
    // Without settings nothing follows from a shutdown: the kubelet terminates no pods then.
    if !periods.is_empty() {
        let kubelet = args.host_root.join(args.kubelet_dir.strip_prefix("/").unwrap_or(&args.kubelet_dir));
        follow(kubelet, args.proc.clone(), periods, note).await;
    }
}

/// For how long the node has been up.
fn uptime(proc: &Path) -> Option<Duration> {
    let text = std::fs::read_to_string(proc.join("uptime")).ok()?;
    Duration::try_from_secs_f64(text.split_whitespace().next()?.parse().ok()?).ok()
}

/// Follows the kubelet's record, forever.
async fn follow(kubelet: PathBuf, proc: PathBuf, periods: Periods, began: watch::Sender<Option<Instant>>) {
    let mut last: Option<ShutdownStart> = None;
    let look = || {
        let up = uptime(&proc).unwrap_or_default();
        let note = std::fs::read(kubelet.join(NOTE)).unwrap_or_default();
        last = ShutdownStart::read(note, last.take(), (Instant::now(), Timestamp::now()), up, &periods);
        let since = last.as_ref().map(|begun| begun.at);
        began.send_if_modified(|began| {
            // What it was first taken for stays: clocks differ by a little each time.
            let turned = began.is_some() != since.is_some();
            if turned {
                tracing::info!(shuts_down = since.is_some(), "the kubelet's record of a shutdown changed");
                *began = since;
            }
            turned
        });
    };
    let unwatched = |error| {
        tracing::debug!(%error, path = %kubelet.display(), "failed to watch the kubelet's directory; polling it instead");
    };
    look_as_it_changes(&kubelet, LOOK, look, unwatched).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::termination::shutdown::tests::periods;

    #[tokio::test]
    async fn the_kubelets_note_is_seen_as_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let (kubelet, proc) = (folder.path().join("kubelet"), folder.path().join("proc"));
        std::fs::create_dir_all(&kubelet).unwrap();
        std::fs::create_dir_all(&proc).unwrap();
        std::fs::write(proc.join("uptime"), "86400.25 100.00\n").unwrap();
        let (sender, mut began) = watch::channel(None);
        tokio::spawn(follow(kubelet.clone(), proc, periods(), sender));
        let write = |end: &str| {
            let note = format!(r#"{{"startTime":"{}","endTime":"{end}"}}"#, Timestamp::now());
            std::fs::write(kubelet.join(".tmp"), note).unwrap();
            std::fs::rename(kubelet.join(".tmp"), kubelet.join(NOTE)).unwrap();
        };
        let deadline = Duration::from_secs(60);
        write("0001-01-01T00:00:00Z");
        tokio::time::timeout(deadline, began.wait_for(Option::is_some)).await.unwrap().unwrap();
        write("9000-01-01T00:00:00Z");
        tokio::time::timeout(deadline, began.wait_for(Option::is_none)).await.unwrap().unwrap();
    }
}
