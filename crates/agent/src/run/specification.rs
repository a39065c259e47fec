//! Writes the CDI specification for the container runtime.
//!
//! This task is separate from [`super::files`], because NVIDIA's container toolkit may be slow or
//! hang, and must not delay the MPS host's files.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::watch;

use super::files::FileContents;
use crate::args::AgentArgs;
use crate::cdi::{self, DriverEdits};
use crate::metrics::Metrics;
use crate::toolkit;

/// Delay before a failed write is retried.
const WRITE_RETRY_DELAY: Duration = Duration::from_secs(2);

/// Writes the specification whenever the device nodes change. Retries failed writes.
pub(super) async fn write_specification(
    args: Arc<AgentArgs>,
    mut wanted: watch::Receiver<Arc<FileContents>>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let mut written = BTreeMap::new();
    let mut driver = directory_edits(&args);
    let mut reported = None;
    loop {
        let next = Arc::clone(&wanted.borrow_and_update());
        if next.nodes != written {
            match write_specification_once(&args, &next, &mut driver).await {
                Ok(()) => {
                    written.clone_from(&next.nodes);
                    reported = None;
                }
                Err(error) => {
                    metrics.count_error("cdi");
                    // Log each error only once, because a node without a toolkit would repeat the
                    // error every two seconds.
                    let message = format!("{error:#}");
                    if reported.as_ref() != Some(&message) {
                        tracing::error!(error = message, "failed to write the CDI specification; retrying");
                        reported = Some(message);
                    }
                    tokio::time::sleep(WRITE_RETRY_DELAY).await;
                    continue;
                }
            }
        }
        if wanted.changed().await.is_err() {
            return Ok(());
        }
    }
}

/// Returns the edits that mount the driver directory of the host. Returns `None` without
/// `--driver-root`.
fn directory_edits(args: &AgentArgs) -> Option<DriverEdits> {
    let host = args.driver_root.as_deref()?;
    Some(DriverEdits::from_directory(host, &args.container_driver_root))
}

/// Writes the specification. Without a driver directory, the toolkit lists the driver's files. If
/// the toolkit has answered before, its earlier answer is used first, so that containers with a new
/// device do not wait for the toolkit.
async fn write_specification_once(
    args: &Arc<AgentArgs>,
    next: &Arc<FileContents>,
    driver: &mut Option<DriverEdits>,
) -> anyhow::Result<()> {
    if let Some(known) = driver {
        write_with_edits(args, next, known.clone()).await?;
    }
    if args.driver_root.is_some() {
        return Ok(());
    }
    let found = toolkit::driver_edits(args).await?;
    if driver.as_ref() != Some(&found) {
        tracing::info!("NVIDIA's container toolkit listed the driver's files");
        write_with_edits(args, next, found.clone()).await?;
        *driver = Some(found);
    }
    Ok(())
}

async fn write_with_edits(args: &Arc<AgentArgs>, next: &Arc<FileContents>, driver: DriverEdits) -> anyhow::Result<()> {
    let (args, next) = (Arc::clone(args), Arc::clone(next));
    let writer = move || cdi::write_cdi_specification(&args, &next.nodes, &driver);
    tokio::task::spawn_blocking(writer).await.context("the writer failed")??;
    Ok(())
}
