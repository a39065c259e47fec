//! Manages the kubelet's device plugin directory: Cleave's sockets, the identity of `kubelet.sock`,
//! the lock of the serving process, and notification of changes.

use std::fs::File;
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchMask};
use rustix::fs::FlockOperation;

use crate::resource::ResourceName;

/// Directory in which the kubelet expects device plugins.
pub const DEVICE_PLUGIN_DIRECTORY: &str = "/var/lib/kubelet/device-plugins";

/// Name of the kubelet's socket in the directory.
pub(crate) const KUBELET_SOCKET: &str = "kubelet.sock";

/// Prefix of Cleave's sockets. Files without this prefix belong to other programs.
const SOCKET_PREFIX: &str = "cleave-";
const SOCKET_SUFFIX: &str = ".sock";

/// Maximum length of a socket's path in bytes: `sockaddr_un.sun_path` has 108 bytes and ends with a
/// zero byte.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Maximum time to connect to a socket of an earlier process. A socket that does not refuse the
/// connection in this time counts as in use.
const SOCKET_PROBE_TIMEOUT: Duration = Duration::from_millis(200);

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The path is too long for the address of a Unix socket.
    #[error(
        "{directory} is too long: the path of a socket in this directory has {length} bytes, and the maximum is {MAX_SOCKET_PATH_BYTES}; choose a shorter path"
    )]
    TooLong {
        /// Path of the directory.
        directory: PathBuf,
        /// Length in bytes of the path of a socket in the directory.
        length: usize,
    },
    /// The path is relative or not UTF-8.
    #[error("the path {0:?} of the device plugin directory is not absolute, or not UTF-8")]
    Path(PathBuf),
    /// The directory could not be opened.
    #[error("failed to open the device plugin directory {directory}")]
    Open {
        /// Path of the directory.
        directory: PathBuf,
        /// Cause of the failure.
        #[source]
        source: io::Error,
    },
    /// Locking the directory failed.
    #[error("failed to lock the device plugin directory {directory}")]
    Lock {
        /// Path of the directory.
        directory: PathBuf,
        /// Cause of the failure.
        #[source]
        source: io::Error,
    },
}

/// A directory whose path is absolute, valid UTF-8 and short enough for socket addresses.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    path: PathBuf,
}

impl Directory {
    pub(crate) fn new(path: &Path) -> Result<Self, DirectoryError> {
        if !path.is_absolute() || path.to_str().is_none() {
            return Err(DirectoryError::Path(path.to_owned()));
        }
        // All names that `generate_socket_name` returns have the same length.
        let longest = path.join(format!("{SOCKET_PREFIX}{:08x}-{:08x}{SOCKET_SUFFIX}", 0, 0));
        let length = longest.as_os_str().as_bytes().len();
        if length > MAX_SOCKET_PATH_BYTES {
            return Err(DirectoryError::TooLong { directory: path.to_owned(), length });
        }
        Ok(Self { path: path.to_owned() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn kubelet_socket(&self) -> PathBuf {
        self.path.join(KUBELET_SOCKET)
    }

    /// Returns the identity of the current `kubelet.sock`, if the socket exists.
    pub(crate) fn kubelet_socket_id(&self) -> Option<SocketId> {
        SocketId::of(&self.kubelet_socket())
    }

    /// Locks the directory for this process, unless another process has the lock. The kernel
    /// releases the lock when the process ends.
    pub(crate) fn try_lock(&self) -> Result<Option<DirectoryLock>, DirectoryError> {
        let directory = || self.path.clone();
        let file = File::open(&self.path).map_err(|source| DirectoryError::Open { directory: directory(), source })?;
        let opened = file.metadata().map_err(|source| DirectoryError::Open { directory: directory(), source })?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(DirectoryLock { id: (opened.dev(), opened.ino()), _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(source) => Err(DirectoryError::Lock { directory: directory(), source: source.into() }),
        }
    }

    /// Removes the sockets of earlier processes if no process listens on them. The caller must have
    /// the lock.
    pub(crate) async fn remove_stale_sockets(&self) {
        let entries = match std::fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::warn!(directory = %self.path.display(), %error, "failed to list sockets of earlier plugin processes");
                return;
            }
        };
        for entry in entries.flatten() {
            let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
            if !is_socket || !entry.file_name().to_str().is_some_and(is_cleave_socket_name) {
                continue;
            }
            let path = entry.path();
            let probe = tokio::time::timeout(SOCKET_PROBE_TIMEOUT, tokio::net::UnixStream::connect(&path)).await;
            // Only a refused connection proves that no process listens. Any other error can mean
            // that the queue of a listening process is full, or that permission is missing.
            if matches!(&probe, Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused) {
                match std::fs::remove_file(&path) {
                    Ok(()) => tracing::info!(socket = %path.display(), "removed a socket of an earlier plugin process"),
                    Err(error) => {
                        tracing::warn!(socket = %path.display(), %error, "failed to remove a socket of an earlier plugin process");
                    }
                }
            }
        }
    }
}

/// The lock of the directory. Dropping this value releases the lock.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    /// Device and inode of the locked directory. The path may now refer to another directory.
    id: (u64, u64),
    _file: File,
}

impl DirectoryLock {
    /// Returns whether the path still names the locked directory.
    pub(crate) fn is_still_at(&self, directory: &Directory) -> bool {
        std::fs::metadata(&directory.path).is_ok_and(|now| (now.dev(), now.ino()) == self.id)
    }
}

/// The identity of a socket file, which distinguishes the file from later sockets at the same path.
///
/// The inode does not suffice, because ext4 reuses inodes. The modification time of a socket file
/// is the time at which a process bound the socket. Renaming or linking the file does not change
/// that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SocketId {
    device: u64,
    inode: u64,
    bound: (i64, i64),
}

impl SocketId {
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let found = std::fs::symlink_metadata(path).ok()?;
        found.file_type().is_socket().then(|| Self {
            device: found.dev(),
            inode: found.ino(),
            bound: (found.mtime(), found.mtime_nsec()),
        })
    }
}

/// Creates a socket name with a random part, so that it differs from the names of earlier
/// processes. Since Kubernetes 1.37, the kubelet distinguishes streams by the path of their socket.
pub(crate) fn generate_socket_name(resource: &ResourceName) -> String {
    let mut hasher = DefaultHasher::new();
    hasher.write(resource.as_str().as_bytes());
    let resource = hasher.finish() >> 32;
    // Do not use the PID: PIDs repeat in containers. The system seeds the random number, so each
    // process uses a different name.
    let nonce = RandomState::new().build_hasher().finish() >> 32;
    format!("{SOCKET_PREFIX}{resource:08x}-{nonce:08x}{SOCKET_SUFFIX}")
}

fn is_cleave_socket_name(name: &str) -> bool {
    let hex = |part: &str| part.len() == 8 && part.bytes().all(|b| b.is_ascii_hexdigit());
    name.strip_prefix(SOCKET_PREFIX)
        .and_then(|rest| rest.strip_suffix(SOCKET_SUFFIX))
        .and_then(|rest| rest.split_once('-'))
        .is_some_and(|(resource, nonce)| hex(resource) && hex(nonce))
}

/// A change of the device plugin directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirectoryChange {
    /// The kubelet's socket or one of Cleave's sockets may have been created or removed.
    Sockets,
    /// The directory was removed, moved or unmounted.
    Gone,
}

/// Reports changes of the device plugin directory.
///
/// Create the watch before reading the directory, so that no change is missed.
pub(crate) struct DirectoryWatch {
    events: Option<EventStream<[u8; 1024]>>,
    /// Timer for polls in addition to events. inotify can be unavailable (`max_user_instances`),
    /// and events can be lost.
    poll: tokio::time::Interval,
}

impl DirectoryWatch {
    pub(crate) fn start(directory: &Directory, intervals: PollIntervals) -> Self {
        let events = match open_watch(directory.path()) {
            Ok(events) => Some(events),
            Err(error) => {
                tracing::warn!(
                    directory = %directory.path().display(), %error, every = ?intervals.unwatched,
                    "failed to watch the device plugin directory with inotify; polling it"
                );
                None
            }
        };
        let every = if events.is_some() { intervals.watched } else { intervals.unwatched };
        let mut poll = tokio::time::interval(every);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        Self { events, poll }
    }

    /// Waits for the next relevant change or the next poll. Cancel-safe, because it waits only for
    /// events and polls, and a canceled wait loses neither.
    pub(crate) async fn changed(&mut self) -> DirectoryChange {
        loop {
            let Some(events) = &mut self.events else {
                self.poll.tick().await;
                return DirectoryChange::Sockets;
            };
            let event = tokio::select! {
                event = events.next() => event,
                _ = self.poll.tick() => return DirectoryChange::Sockets,
            };
            match event {
                Some(Ok(event)) => {
                    if event.mask.intersects(
                        EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::UNMOUNT | EventMask::IGNORED,
                    ) {
                        return DirectoryChange::Gone;
                    }
                    if event.mask.contains(EventMask::Q_OVERFLOW) {
                        return DirectoryChange::Sockets;
                    }
                    // Ignore other files: the kubelet writes its checkpoint into this directory for
                    // each pod.
                    let is_watched = |name: &std::ffi::OsStr| {
                        name == KUBELET_SOCKET || name.to_str().is_some_and(is_cleave_socket_name)
                    };
                    if event.name.as_deref().is_some_and(is_watched) {
                        return DirectoryChange::Sockets;
                    }
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, "failed to read inotify events; polling the device plugin directory");
                    self.events = None;
                }
                None => self.events = None,
            }
        }
    }
}

/// Intervals between polls of the directory, with and without inotify.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PollIntervals {
    pub(crate) watched: Duration,
    pub(crate) unwatched: Duration,
}

fn open_watch(path: &Path) -> io::Result<EventStream<[u8; 1024]>> {
    let inotify = Inotify::init()?;
    inotify.watches().add(
        path,
        WatchMask::CREATE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR,
    )?;
    inotify.into_event_stream([0; 1024])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_path_that_is_too_long_is_refused_with_its_length() {
        let name = generate_socket_name(&ResourceName::parse("nvidia.com/gpu-mps").expect("a name"));
        let fits = format!("/{}", "d".repeat(MAX_SOCKET_PATH_BYTES - name.len() - 2));
        assert!(Directory::new(Path::new(&fits)).is_ok());
        let error = Directory::new(Path::new(&format!("{fits}d"))).expect_err("one byte too long");
        assert!(error.to_string().contains("108 bytes"), "{error}");
    }

    #[test]
    fn a_relative_directory_is_refused() {
        assert!(matches!(Directory::new(Path::new("device-plugins")), Err(DirectoryError::Path(_))));
    }

    #[test]
    fn socket_names_are_unique_and_have_cleaves_prefix_and_the_same_length() {
        let long = format!("{}.example.com/{}", "a".repeat(63), "b".repeat(63));
        let resource = ResourceName::parse(&long).expect("a name");
        let (first, second) = (generate_socket_name(&resource), generate_socket_name(&resource));
        assert_ne!(first, second);
        for name in [&first, &second, &generate_socket_name(&ResourceName::parse("a/b").expect("a name"))] {
            assert!(is_cleave_socket_name(name), "{name}");
            assert_eq!(name.len(), first.len());
        }
    }

    #[test]
    fn other_file_names_are_not_names_of_cleave_sockets() {
        for name in [
            "kubelet.sock",
            "nvidia-gpu.sock",
            "cleave-.sock",
            "cleave-0123456-01234567.sock",
            "cleave-01234567-0123456g.sock",
        ] {
            assert!(!is_cleave_socket_name(name), "{name}");
        }
    }

    #[test]
    fn a_rebound_socket_has_a_different_identity() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("bind"));
        let first = SocketId::of(&path).expect("a socket");
        std::fs::rename(&path, directory.path().join("t")).expect("rename");
        assert_eq!(SocketId::of(&path), None);
        std::fs::rename(directory.path().join("t"), &path).expect("rename");
        assert_eq!(SocketId::of(&path), Some(first), "renaming keeps the identity");
        // Keep the old file, so that the new file has a different inode.
        std::fs::rename(&path, directory.path().join("t")).expect("rename");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("bind"));
        assert_ne!(SocketId::of(&path), Some(first));
    }
}
