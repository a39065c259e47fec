//! Creates and locks the run directory, replaces files in it, and watches the desired file.
use std::io::{self, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;
use tokio::time::sleep;

use super::error::HostError;
use super::seqpacket::{MAX_SOCKET_PATH_BYTES, async_fd};
use super::wire::Paths;

/// Creates the run directory. Returns a lock on the MPS host's directory below the run directory.
/// Only one MPS host at a time can hold this lock.
///
/// # Errors
/// Returns [`HostError`] if the path is too long, another MPS host has the lock, or a directory
/// cannot be created.
pub(crate) fn prepare_run_directory(paths: &Paths) -> Result<OwnedFd, HostError> {
    let longest = paths.door(&"f".repeat(32)).with_extension("new");
    let length = longest.as_os_str().len();
    if length > MAX_SOCKET_PATH_BYTES {
        return Err(HostError::PathTooLong { run: paths.run().to_owned(), door: longest, length });
    }
    for (path, mode) in [(paths.run().to_owned(), 0o755), (paths.allocations(), 0o755), (paths.mps_host_dir(), 0o700)] {
        let created = std::fs::DirBuilder::new().recursive(true).mode(mode).create(&path);
        created.map_err(|source| HostError::Prepare { path: path.clone(), source })?;
    }
    let path = paths.mps_host_dir();
    let failed = |source| HostError::Prepare { path: path.clone(), source };
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).map_err(failed)?;
    let directory = std::fs::File::open(&path).map_err(failed)?;
    match rustix::fs::flock(&directory, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(directory.into()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(HostError::Taken(path)),
        Err(error) => Err(failed(error.into())),
    }
}

/// Replaces a file. Readers see either the old or the new content, never a mixture.
pub(crate) fn replace_file(path: &Path, text: &[u8]) -> io::Result<()> {
    let building = path.with_extension("new");
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&building)?;
    file.write_all(text)?;
    file.sync_all()?;
    std::fs::rename(&building, path)
}

/// Interval between checks of the desired file while inotify does not work.
const DESIRED_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Watches the desired file with inotify. Polls the file while inotify does not work, for example
/// because the node has no free inotify instance.
pub(crate) struct DesiredWatch {
    path: PathBuf,
    open: fn(&Path) -> io::Result<AsyncFd<OwnedFd>>,
    events: Option<AsyncFd<OwnedFd>>,
    /// The version of the file at the last check without inotify.
    seen: Option<FileVersion>,
}

/// Identifies one version of a file by device, inode and time of modification. A replaced file has
/// another inode.
#[derive(Debug, PartialEq, Eq)]
struct FileVersion(u64, u64, Option<SystemTime>);

impl DesiredWatch {
    /// Watches the desired file.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self::with_opener(path, watch_directory)
    }

    fn with_opener(path: PathBuf, open: fn(&Path) -> io::Result<AsyncFd<OwnedFd>>) -> Self {
        let mut watch = Self { path, open, events: None, seen: None };
        match watch.start_watch() {
            Ok(events) => watch.events = Some(events),
            Err(error) => watch.report_failure(&error),
        }
        watch
    }

    fn start_watch(&self) -> io::Result<AsyncFd<OwnedFd>> {
        (self.open)(self.path.parent().unwrap_or(Path::new(".")))
    }

    fn report_failure(&self, error: &io::Error) {
        tracing::warn!(path = %self.path.display(), %error, "failed to watch the desired file with inotify; polling it");
    }

    /// Returns once the desired file has been written, or may have been written. Cancel-safe.
    pub(crate) async fn wait_until_written(&mut self) {
        if let Some(events) = &self.events {
            match wait_for_event(events).await {
                Ok(()) => return,
                Err(error) => self.report_failure(&error),
            }
            self.events = None;
        }
        loop {
            let found = find_file_version(&self.path);
            if found != self.seen {
                self.seen = found;
                return;
            }
            sleep(DESIRED_POLL_INTERVAL).await;
            if let Ok(events) = self.start_watch() {
                tracing::info!(path = %self.path.display(), "watching the desired file with inotify again");
                self.events = Some(events);
                // The file may have been written just before the watch began.
                return;
            }
        }
    }
}

fn find_file_version(path: &Path) -> Option<FileVersion> {
    let found = std::fs::metadata(path).ok()?;
    Some(FileVersion(found.dev(), found.ino(), found.modified().ok()))
}

fn watch_directory(directory: &Path) -> io::Result<AsyncFd<OwnedFd>> {
    let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(&fd, directory, inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::CLOSE_WRITE)?;
    async_fd(fd)
}

/// Returns once the desired file has been written, or the kernel has dropped events.
async fn wait_for_event(events: &AsyncFd<OwnedFd>) -> io::Result<()> {
    loop {
        let mut ready = events.readable().await?;
        let mut space = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(events.get_ref(), &mut space);
        let mut written = false;
        loop {
            match events.next() {
                Ok(event) => {
                    let dropped = event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW);
                    written |= dropped || event.file_name().is_some_and(|name| name.to_bytes() == b"desired.json");
                }
                Err(rustix::io::Errno::AGAIN) => break ready.clear_ready(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if written {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::timeout;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    thread_local! {
        static INSTANCES_EXHAUSTED: Cell<bool> = const { Cell::new(true) };
    }

    fn open_unless_exhausted(directory: &Path) -> io::Result<AsyncFd<OwnedFd>> {
        if INSTANCES_EXHAUSTED.get() { Err(rustix::io::Errno::MFILE.into()) } else { watch_directory(directory) }
    }

    #[tokio::test]
    async fn the_desired_file_is_polled_while_no_inotify_instance_is_free() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("desired.json");
        let mut watch = DesiredWatch::with_opener(path.clone(), open_unless_exhausted);
        for text in ["first", "second"] {
            replace_file(&path, text.as_bytes()).unwrap();
            timeout(TEST_TIMEOUT, watch.wait_until_written()).await.unwrap();
            assert!(watch.events.is_none());
        }
        INSTANCES_EXHAUSTED.set(false);
        timeout(TEST_TIMEOUT, watch.wait_until_written()).await.unwrap();
        assert!(watch.events.is_some(), "inotify is used again");
        replace_file(&path, b"third").unwrap();
        timeout(TEST_TIMEOUT, watch.wait_until_written()).await.unwrap();
    }
}
