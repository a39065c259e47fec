//! Counts the open files of this process, and raises their limit.
use std::io;

use rustix::process::{Resource, Rlimit};

/// Soft limit of open files that Cleave's programs set. Container runtimes often set a soft limit
/// of only 1,024.
const WANTED_OPEN_FILES: u64 = 65_536;

/// The number of open files of this process, and their limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Number of open files.
    pub open: u64,
    /// Maximum number of open files. `None` means unlimited.
    pub limit: Option<u64>,
}

/// Raises the soft limit of open files to `WANTED_OPEN_FILES`, or to the hard limit if that is
/// lower. A failure is only logged, because the program also works with the current limit.
pub fn raise_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let Some(current) = limit.current else { return };
    let wanted = limit.maximum.unwrap_or(u64::MAX).min(WANTED_OPEN_FILES);
    if current >= wanted {
        return;
    }
    let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
    match rustix::process::setrlimit(Resource::Nofile, raised) {
        Ok(()) => tracing::debug!(from = current, to = wanted, "raised the limit of open files"),
        Err(error) => tracing::warn!(%error, current, "failed to raise the limit of open files"),
    }
}

/// Returns the number of open files and their limit.
///
/// # Errors
/// Returns an error if `/proc/self/fd` cannot be read.
pub fn usage() -> io::Result<Usage> {
    // Do not count the descriptor that is open only for this listing.
    let open = std::fs::read_dir("/proc/self/fd")?.count().saturating_sub(1);
    let limit = rustix::process::getrlimit(Resource::Nofile).current;
    Ok(Usage { open: u64::try_from(open).unwrap_or(u64::MAX), limit })
}
