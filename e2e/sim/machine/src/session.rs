//! Records open NVML sessions. The driver counts sessions as users of a GPU and of the driver's
//! modules.
//!
//! A session locks a file under `sessions/` for the driver, and another file for each GPU that NVML
//! has initialized. The kernel releases the lock when the process ends for any reason.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, flock};

use crate::error::Error;
use crate::process::PidRef;
use crate::store::{Machine, io_error, open_shared};

const SESSIONS_DIRECTORY: &str = "sessions";
/// The subdirectory for sessions that use the driver.
const DRIVER_SESSIONS_DIRECTORY: &str = "driver";

/// One use of the driver or of a GPU. The use ends when this value is dropped.
#[derive(Debug)]
pub struct SessionLease {
    path: PathBuf,
    lock: File,
}

impl Machine {
    /// Records that this process has opened the GPU with this UUID, or the driver for `None`.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be written.
    pub fn open_session(&self, gpu: Option<&str>) -> Result<SessionLease, Error> {
        static LAST_SESSION_NUMBER: AtomicU64 = AtomicU64::new(0);
        let directory = self.sessions_of(gpu);
        create_shared_directory(&self.path(SESSIONS_DIRECTORY))?;
        create_shared_directory(&directory)?;
        let path = directory.join(format!("{}{}", own_prefix(), LAST_SESSION_NUMBER.fetch_add(1, Ordering::Relaxed)));
        let lock = open_shared(&path, false).map_err(io_error("create", &path))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|e| io_error("lock", &path)(e.into()))?;
        Ok(SessionLease { path, lock })
    }

    /// Returns the number of open NVML sessions of the GPU with this UUID, or of the driver for
    /// `None`. If `others` is true, omits the sessions of this process.
    #[must_use]
    pub fn open_sessions(&self, gpu: Option<&str>, others: bool) -> usize {
        let entries = fs::read_dir(self.sessions_of(gpu)).into_iter().flatten().flatten();
        let own = own_prefix();
        let counted = entries.filter(|entry| !others || !entry.file_name().to_string_lossy().starts_with(&own));
        let is_open = |path: PathBuf| {
            let locked = |file: File| flock(&file, FlockOperation::NonBlockingLockShared).is_err();
            let open = File::open(&path).is_ok_and(locked);
            if !open {
                // Ignore errors, because a file that remains has no effect.
                let _ = fs::remove_file(&path);
            }
            open
        };
        counted.filter(|entry| is_open(entry.path())).count()
    }

    fn sessions_of(&self, gpu: Option<&str>) -> PathBuf {
        self.path(SESSIONS_DIRECTORY).join(gpu.unwrap_or(DRIVER_SESSIONS_DIRECTORY))
    }
}

impl Drop for SessionLease {
    fn drop(&mut self) {
        // Unlock explicitly: a forked child inherits the lock, so closing the file is not enough.
        let _ = flock(&self.lock, FlockOperation::Unlock);
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns the name prefix of this process's session files.
fn own_prefix() -> String {
    let PidRef { pid, namespace, start } = PidRef::of_this_process();
    format!("{namespace}-{pid}-{start}-")
}

/// Creates a directory to which all users may write.
fn create_shared_directory(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::PermissionsExt as _;
    if path.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(path).map_err(io_error("create", path))?;
    // Ignore errors, because another user may have created the directory at the same time.
    let _ = fs::set_permissions(path, fs::Permissions::from_mode(0o777));
    Ok(())
}
