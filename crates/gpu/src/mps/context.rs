//! State that all parts of the MPS host share. The state does not depend on devices or doors.
use std::ffi::OsString;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::drivers::DriverEvidence;
use super::process::Children;
use super::selinux::ContainerLabel;
use super::wire::Paths;

/// The programs and files that the MPS host uses.
#[derive(Debug)]
pub(crate) struct HostOptions {
    /// Path of `nvidia-cuda-mps-control`.
    pub(crate) mps_control: PathBuf,
    /// `LD_LIBRARY_PATH` for the MPS control daemon.
    pub(crate) library_path: Option<OsString>,
    /// Program and first arguments of the process that sets a compute mode.
    pub(crate) compute_mode: Vec<OsString>,
    /// File with the version of the loaded driver.
    pub(crate) driver_version_file: PathBuf,
}

/// State that all parts of the MPS host share.
#[derive(Debug)]
pub(crate) struct HostContext {
    pub(crate) paths: Paths,
    pub(crate) options: HostOptions,
    pub(crate) children: Rc<Children>,
    /// Cancelled when the MPS host stops. Daemons then quit even if they have clients.
    pub(crate) stopping: CancellationToken,
    /// Limits the connections to all doors, so that free descriptors remain to admit each client.
    pub(crate) connections: Arc<Semaphore>,
    /// Limits the connections from all doors to servers. Each connection uses two descriptors.
    pub(crate) server_connections: Arc<Semaphore>,
    /// Labels files that containers use, on nodes with SELinux.
    pub(crate) label: ContainerLabel,
    status_changes: watch::Sender<u64>,
}

impl HostContext {
    /// Creates the shared state. `max_descriptors` is the number of descriptors that this process
    /// may open.
    pub(crate) fn new(paths: Paths, options: HostOptions, children: Rc<Children>, max_descriptors: usize) -> Self {
        Self {
            paths,
            options,
            children,
            stopping: CancellationToken::new(),
            connections: Arc::new(Semaphore::new(max_descriptors / 6)),
            server_connections: Arc::new(Semaphore::new(max_descriptors / 6)),
            label: ContainerLabel::detect(),
            status_changes: watch::Sender::new(0),
        }
    }

    /// Returns whether the MPS of the loaded driver was measured. A driver can be replaced while
    /// the MPS host runs, but not while a daemon uses it.
    pub(crate) fn read_driver_evidence(&self) -> DriverEvidence {
        let path = &self.options.driver_version_file;
        match std::fs::read_to_string(path) {
            Ok(version) => DriverEvidence::of_version(version.trim()),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "failed to read the driver's version");
                DriverEvidence::Assumed
            }
        }
    }

    /// Notifies subscribers that the content of the status has changed.
    pub(crate) fn notify_status_change(&self) {
        self.status_changes.send_modify(|changes| *changes = changes.wrapping_add(1));
    }

    /// Subscribes to [`HostContext::notify_status_change`].
    pub(crate) fn subscribe_to_status_changes(&self) -> watch::Receiver<u64> {
        self.status_changes.subscribe()
    }
}
