//! Writes the files that the MPS host and the next agent read.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cleave_gpu::mps::wire::Desired;
use tokio::sync::watch;

use crate::checkpoint::{Checkpoint, CheckpointStore};
use crate::metrics::Metrics;
use crate::mps::link::HostLink;

/// Delay before a failed write is retried.
const WRITE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Contents of the files.
#[derive(Default, PartialEq)]
pub(super) struct FileContents {
    pub(super) desired: Desired,
    pub(super) checkpoint: Checkpoint,
    /// Paths of device nodes by UUID of the device, for the CDI specification.
    pub(super) nodes: BTreeMap<String, Vec<String>>,
    /// Whether to remove the directories of allocations that no longer exist. The value is false
    /// until the allocations are known.
    pub(super) sweep: bool,
}

/// The last written contents of each file. A field is `None` if the last write of its file failed,
/// because the file's content is then unknown.
struct WrittenContents {
    checkpoint: Option<Arc<FileContents>>,
    desired: Option<Arc<FileContents>>,
}

impl Default for WrittenContents {
    fn default() -> Self {
        let none = Some(Arc::<FileContents>::default());
        Self { checkpoint: none.clone(), desired: none }
    }
}

/// Writes the files on a separate thread, because a disk may be slow. Retries failed writes.
/// Publishes the contents after both files are written.
pub(super) async fn write_files(
    store: CheckpointStore,
    link: HostLink,
    mut wanted: watch::Receiver<Arc<FileContents>>,
    complete: watch::Sender<Arc<FileContents>>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let mut written = WrittenContents::default();
    loop {
        let next = Arc::clone(&wanted.borrow_and_update());
        let (store, link, contents) = (store.clone(), link.clone(), Arc::clone(&next));
        let writer = tokio::task::spawn_blocking(move || {
            let result = write_files_once(&store, &link, &mut written, &contents);
            (written, result)
        });
        let result;
        (written, result) = writer.await.context("the writer failed")?;
        if let Err(error) = result {
            metrics.count_error("files");
            tracing::error!(%error, "failed to write files; retrying");
            tokio::time::sleep(WRITE_RETRY_DELAY).await;
            continue;
        }
        complete.send_replace(next);
        if wanted.changed().await.is_err() {
            return Ok(());
        }
    }
}

fn write_files_once(
    store: &CheckpointStore,
    link: &HostLink,
    written: &mut WrittenContents,
    next: &Arc<FileContents>,
) -> std::io::Result<()> {
    // Write the checkpoint first. If this agent wrote the MPS host's file first and were killed
    // between the writes, the next agent would close the door of a new allocation. A failure of the
    // first write must not prevent the second write, because a full disk must not keep a door
    // closed.
    let is_saved = |before: &FileContents| next.checkpoint == before.checkpoint;
    let saved = write_if_changed(&mut written.checkpoint, next, is_saved, || store.save(&next.checkpoint));
    let is_desired = |before: &FileContents| next.desired == before.desired;
    write_if_changed(&mut written.desired, next, is_desired, || link.write_desired(&next.desired))?;
    saved?;
    if next.sweep {
        link.remove_allocation_directories_except(|id| next.desired.allocations.contains_key(id));
    }
    Ok(())
}

/// Writes a file unless its last written content is the same.
fn write_if_changed(
    written: &mut Option<Arc<FileContents>>,
    next: &Arc<FileContents>,
    is_same: impl Fn(&FileContents) -> bool,
    write: impl FnOnce() -> std::io::Result<()>,
) -> std::io::Result<()> {
    if !written.take().is_some_and(|before| is_same(&before)) {
        write()?;
    }
    *written = Some(Arc::clone(next));
    Ok(())
}

#[cfg(test)]
mod tests {
    use cleave_gpu::mps::wire::{DaemonSettings, Paths};

    use super::*;

    #[test]
    fn a_failed_write_of_either_file_does_not_prevent_the_write_of_the_other_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let next = Arc::new(FileContents {
            desired: Desired { version: cleave_gpu::mps::wire::FILE_FORMAT_VERSION, ..Desired::default() },
            checkpoint: Checkpoint { generation: 1, ..Checkpoint::default() },
            ..FileContents::default()
        });
        // Create a file at the path of the directory, so that writes to the directory fail.
        std::fs::write(path("broken"), "").unwrap();
        let write = |state: &str, run: &str| {
            let (store, link) = (CheckpointStore::new(&path(state)), HostLink::new(Paths::new(path(run))));
            let done = write_files_once(&store, &link, &mut WrittenContents::default(), &next);
            (done.is_ok(), path(state).join("agent.json").exists(), link.last_desired().is_some())
        };
        assert_eq!(write("state", "broken"), (false, true, false));
        assert_eq!(write("broken", "run"), (false, false, true));
        assert_eq!(write("state", "run"), (true, true, true));
    }

    #[test]
    fn after_a_failed_write_of_one_file_both_files_get_the_next_contents() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let settings = DaemonSettings {
            multi_user: false,
            exclusive: false,
            default_threads: None,
            default_memory_mib: None,
            accept_advisory: false,
        };
        let contents = |generation: i64| {
            let desired = Desired {
                version: cleave_gpu::mps::wire::FILE_FORMAT_VERSION,
                daemons: [(format!("GPU-{generation}"), settings.clone())].into(),
                ..Desired::default()
            };
            let checkpoint = Checkpoint { generation, ..Checkpoint::default() };
            Arc::new(FileContents { desired, checkpoint, ..FileContents::default() })
        };
        let (store, link) = (CheckpointStore::new(&path("state")), HostLink::new(Paths::new(path("run"))));
        let mut written = WrittenContents::default();
        let first = contents(1);
        write_files_once(&store, &link, &mut written, &first).unwrap();
        // Create a file at the path of the directory, so that writes to the directory fail.
        std::fs::rename(path("state"), path("moved")).unwrap();
        std::fs::write(path("state"), "").unwrap();
        write_files_once(&store, &link, &mut written, &contents(2)).unwrap_err();
        assert_eq!(link.last_desired(), Some(contents(2).desired.clone()));
        std::fs::remove_file(path("state")).unwrap();
        std::fs::rename(path("moved"), path("state")).unwrap();
        write_files_once(&store, &link, &mut written, &first).unwrap();
        assert_eq!(link.last_desired(), Some(first.desired.clone()), "the first contents are written again");
    }
}
