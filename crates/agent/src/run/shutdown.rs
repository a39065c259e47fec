//! Detects graceful shutdowns of the node through the kubelet's record of them.
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;

use crate::args::AgentArgs;
use crate::files::watch_directory;
use crate::termination::shutdown::{ShutdownPeriods, ShutdownStart};

/// Name of the record in the kubelet's directory.
const SHUTDOWN_RECORD_FILE: &str = "graceful_node_shutdown_state";
/// Interval between reads of the record while inotify does not work.
const SHUTDOWN_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Follows shutdowns of the node. Returns at once if `periods` is empty, because the kubelet's
/// settings are unknown.
pub(super) async fn watch_shutdowns(
    args: &AgentArgs,
    periods: ShutdownPeriods,
    record: watch::Sender<Option<Instant>>,
) {
    // Without these settings, the agent cannot know when the kubelet terminates pods during a
    // shutdown.
    if !periods.is_empty() {
        let kubelet = args.host_root.join(args.kubelet_dir.strip_prefix("/").unwrap_or(&args.kubelet_dir));
        follow_shutdown_record(kubelet, args.proc.clone(), periods, record).await;
    }
}

/// Returns the time since the last boot of the node.
fn uptime(proc: &Path) -> Option<Duration> {
    let text = std::fs::read_to_string(proc.join("uptime")).ok()?;
    Duration::try_from_secs_f64(text.split_whitespace().next()?.parse().ok()?).ok()
}

/// Sends the start of the shutdown in the kubelet's record to `began`. Never returns.
async fn follow_shutdown_record(
    kubelet: PathBuf,
    proc: PathBuf,
    periods: ShutdownPeriods,
    began: watch::Sender<Option<Instant>>,
) {
    let mut last: Option<ShutdownStart> = None;
    let read = || {
        let uptime = uptime(&proc).unwrap_or_default();
        let record = std::fs::read(kubelet.join(SHUTDOWN_RECORD_FILE)).unwrap_or_default();
        last = ShutdownStart::interpret(record, last.take(), (Instant::now(), Timestamp::now()), uptime, &periods);
        let since = last.as_ref().map(|start| start.at);
        began.send_if_modified(|began| {
            // Keep the first computed time, because the computed time differs slightly with each
            // read.
            let changed = began.is_some() != since.is_some();
            if changed {
                tracing::info!(shuts_down = since.is_some(), "the kubelet's shutdown record changed");
                *began = since;
            }
            changed
        });
    };
    let unwatched = |error| {
        tracing::debug!(%error, path = %kubelet.display(), "failed to watch the kubelet's directory; polling it instead");
    };
    watch_directory(&kubelet, SHUTDOWN_POLL_INTERVAL, read, unwatched).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::termination::shutdown::tests::periods;

    #[tokio::test]
    async fn changes_of_the_kubelets_record_are_detected() {
        let directory = tempfile::tempdir().unwrap();
        let (kubelet, proc) = (directory.path().join("kubelet"), directory.path().join("proc"));
        std::fs::create_dir_all(&kubelet).unwrap();
        std::fs::create_dir_all(&proc).unwrap();
        std::fs::write(proc.join("uptime"), "86400.25 100.00\n").unwrap();
        let (sender, mut began) = watch::channel(None);
        tokio::spawn(follow_shutdown_record(kubelet.clone(), proc, periods(), sender));
        let write = |end: &str| {
            let record = format!(r#"{{"startTime":"{}","endTime":"{end}"}}"#, Timestamp::now());
            std::fs::write(kubelet.join(".tmp"), record).unwrap();
            std::fs::rename(kubelet.join(".tmp"), kubelet.join(SHUTDOWN_RECORD_FILE)).unwrap();
        };
        let deadline = Duration::from_secs(60);
        write("0001-01-01T00:00:00Z");
        tokio::time::timeout(deadline, began.wait_for(Option::is_some)).await.unwrap().unwrap();
        write("9000-01-01T00:00:00Z");
        tokio::time::timeout(deadline, began.wait_for(Option::is_none)).await.unwrap().unwrap();
    }
}
