//! Writes the files that the MPS host, container runtimes and the next agent read.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cleave_gpu::mps::wire::Desired;
use tokio::sync::watch;

use crate::args::{AgentArgs, DeviceListStrategy};
use crate::cdi;
use crate::checkpoint::{Checkpoint, CheckpointStore};
use crate::metrics::Metrics;
use crate::mps::link::HostLink;

/// Delay between attempts to write.
const WRITE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Contents of the files.
#[derive(Default, PartialEq)]
pub(super) struct FileContents {
    pub(super) desired: Desired,
    pub(super) checkpoint: Checkpoint,
    pub(super) nodes: BTreeMap<String, Vec<String>>,
    /// Whether to remove the directories of allocations that no longer exist. False until the
    /// allocations are known.
    pub(super) sweep: bool,
}

/// Writes the files on a separate thread, because a disk may be slow. Retries failed
/// writes.
pub(super) async fn write_files(
    args: Arc<AgentArgs>,
    store: CheckpointStore,
    link: HostLink,
    mut wanted: watch::Receiver<Arc<FileContents>>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let mut done = Arc::<FileContents>::default();
    loop {
        let next = Arc::clone(&wanted.borrow_and_update());
        let (args, store, link, before) = (Arc::clone(&args), store.clone(), link.clone(), Arc::clone(&done));
        let written =
            tokio::task::spawn_blocking(move || write_once(&args, &store, &link, &before, &next).map(|()| next));
        match written.await.context("the writer failed")? {
            Ok(written) => done = written,
            Err(error) => {
                metrics.count_error("files");
                tracing::error!(%error, "failed to write files; retrying");
                tokio::time::sleep(WRITE_RETRY_DELAY).await;
                continue;
            }
        }
        if wanted.changed().await.is_err() {
            return Ok(());
        }
    }
}

fn write_once(
    args: &AgentArgs,
    store: &CheckpointStore,
    link: &HostLink,
    before: &FileContents,
    next: &FileContents,
) -> std::io::Result<()> {
    // Write the checkpoint first. Otherwise, if this agent is killed between the writes, the next
    // agent closes the door of a new allocation. A failed write must not prevent the second write:
    // a full disk must not keep a door closed.
    let saved = if next.checkpoint == before.checkpoint { Ok(()) } else { store.save(&next.checkpoint) };
    if next.desired != before.desired {
        link.write_desired(&next.desired)?;
    }
    saved?;
    if next.sweep {
        link.remove_allocation_directories_except(|id| next.desired.allocations.contains_key(id));
    }
    if args.device_list_strategy == DeviceListStrategy::Cdi && next.nodes != before.nodes {
        cdi::write_cdi_specification(args, &next.nodes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cleave_gpu::mps::wire::Paths;

    use super::*;
    use crate::args::tests::parse_args;

    #[test]
    fn the_checkpoint_is_written_first_and_a_full_disk_keeps_no_door_closed() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let args = parse_args(&[]).unwrap();
        let next = FileContents {
            desired: Desired { version: cleave_gpu::mps::wire::FILE_FORMAT_VERSION, ..Desired::default() },
            checkpoint: Checkpoint { generation: 1, ..Checkpoint::default() },
            ..FileContents::default()
        };
        // A file with the name of the directory makes writes to the directory fail.
        std::fs::write(path("broken"), "").unwrap();
        let write = |state: &str, run: &str| {
            let (store, link) = (CheckpointStore::new(&path(state)), HostLink::new(Paths::new(path(run))));
            let done = write_once(&args, &store, &link, &FileContents::default(), &next);
            (done.is_ok(), path(state).join("agent.json").exists(), link.last_desired().is_some())
        };
        assert_eq!(write("state", "broken"), (false, true, false));
        assert_eq!(write("broken", "run"), (false, false, true));
        assert_eq!(write("state", "run"), (true, true, true));
    }
}
