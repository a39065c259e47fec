//! Creates and locks the run directory, replaces files in it, and watches the desired file.
use std::io::{self, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;

use super::error::HostError;
use super::seqpacket::{MAX_SOCKET_PATH_BYTES, async_fd};
use super::wire::Paths;

/// Creates the run directory. Returns the lock, which only one MPS host can acquire.
pub(crate) fn prepare_run_directory(paths: &Paths) -> Result<OwnedFd, HostError> {
    let longest = paths.door(&"f".repeat(32)).with_extension("new");
    let length = longest.as_os_str().len();
    if length > MAX_SOCKET_PATH_BYTES {
        return Err(HostError::PathTooLong { run: paths.run().to_owned(), door: longest, length });
    }
    for (path, mode) in [(paths.run().to_owned(), 0o755), (paths.allocations(), 0o755), (paths.mps(), 0o700)] {
        let created = std::fs::DirBuilder::new().recursive(true).mode(mode).create(&path);
        created.map_err(|source| HostError::Prepare { path: path.clone(), source })?;
    }
    let path = paths.mps();
    let failed = |source| HostError::Prepare { path: path.clone(), source };
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).map_err(failed)?;
    let directory = std::fs::File::open(&path).map_err(failed)?;
    match rustix::fs::flock(&directory, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(directory.into()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(HostError::Taken(path)),
        Err(error) => Err(failed(error.into())),
    }
}

/// Replaces a file. Readers see either the old content or the new content, never a part.
pub(crate) fn replace_file(path: &Path, text: &[u8]) -> io::Result<()> {
    let building = path.with_extension("new");
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&building)?;
    file.write_all(text)?;
    file.sync_all()?;
    std::fs::rename(&building, path)
}

/// Watches the desired file by inotify.
pub(crate) struct DesiredWatch(AsyncFd<OwnedFd>);

impl DesiredWatch {
    /// Watches the directory that contains the desired file.
    pub(crate) fn new(directory: &Path) -> io::Result<Self> {
        let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        inotify::add_watch(&fd, directory, inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::CLOSE_WRITE)?;
        async_fd(fd).map(Self)
    }

    /// Returns once the desired file was written, or the kernel has dropped events.
    pub(crate) async fn wait_until_written(&mut self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut space = [MaybeUninit::uninit(); 4096];
            let mut events = inotify::Reader::new(self.0.get_ref(), &mut space);
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
}
