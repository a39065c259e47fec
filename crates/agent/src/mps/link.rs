//! The agent's connection to the MPS host: the desired file, the status file and the request socket
//! ([`cleave_gpu::mps::wire`]).
use std::fs;
use std::io;
use std::time::Duration;

use cleave_gpu::mps::wire::{Desired, Paths, Reply, Request};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout_at};

use super::{HostView, parse_status};
use crate::files::{watch_directory, write_json_atomically};

/// Interval between attempts to connect to the MPS host.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(250);
/// Interval between reads of the status file while inotify or a read fails.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Delay before a failed request is sent again.
const REQUEST_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum size of a status file or a reply. The status of 64 GPUs with 48 clients each needs less
/// than 1 MiB.
const MAX_MESSAGE_BYTES: u64 = 4 << 20;

/// Reads and writes the MPS host's files, and sends requests to its socket.
#[derive(Debug, Clone)]
pub struct HostLink {
    paths: Paths,
}

impl HostLink {
    /// Creates a link that uses `paths`. Does not connect.
    pub fn new(paths: Paths) -> Self {
        Self { paths }
    }

    /// Returns the paths of the files and the socket.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Reads the desired file that an earlier agent wrote. Returns `None` if the file cannot be
    /// read or parsed.
    pub fn last_desired(&self) -> Option<Desired> {
        let bytes = fs::read(self.paths.desired()).ok()?;
        match Desired::parse(&bytes) {
            Ok(desired) => Some(desired),
            Err(error) => {
                tracing::warn!(%error, "ignoring the MPS host's desired file");
                None
            }
        }
    }

    /// Writes the desired file.
    ///
    /// # Errors
    /// Returns an error if the directory or the file cannot be written.
    pub fn write_desired(&self, desired: &Desired) -> io::Result<()> {
        fs::create_dir_all(self.paths.mps_host_dir())?;
        write_json_atomically(&self.paths.desired(), desired)
    }

    /// Creates the directory of an allocation. The directory already exists if the same slices were
    /// allocated before.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be created.
    pub fn create_allocation_directory(&self, id: &str) -> io::Result<()> {
        let directory = self.paths.allocation(id);
        match fs::create_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir_all(&directory),
            result => result,
        }
    }

    /// Removes the directories of all allocations for which `keep` is false. The caller must ensure
    /// that the MPS host serves no door in these directories.
    pub fn remove_allocation_directories_except(&self, keep: impl Fn(&str) -> bool) {
        let Ok(entries) = fs::read_dir(self.paths.allocations()) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|id| !keep(id)) {
                // Remove the content too, because the directory may contain the socket of a closed
                // door.
                let path = entry.path();
                if let Err(error) = fs::remove_dir_all(&path) {
                    tracing::warn!(%error, path = %path.display(), "failed to remove the directory of an ended allocation");
                }
            }
        }
    }

    /// Reads the state of the MPS host once. Blocks only briefly, for a connection to a local
    /// socket and a read of a file.
    pub fn read_view(&self) -> HostView {
        let alive = std::os::unix::net::UnixStream::connect(self.paths.socket()).is_ok();
        let unread =
            |error: io::Error| HostView { alive, error: Some(self.describe_read_error(&error)), ..HostView::default() };
        self.read_status(alive).unwrap_or_else(unread)
    }

    fn describe_read_error(&self, error: &io::Error) -> String {
        format!("{}: {error}", self.paths.status().display())
    }

    /// Returns the MPS host's state from the status file. Fails only if the file exists but cannot
    /// be read.
    fn read_status(&self, alive: bool) -> io::Result<HostView> {
        let path = self.paths.status();
        let bytes = match fs::metadata(&path)
            .and_then(|meta| if meta.len() > MAX_MESSAGE_BYTES { Ok(Vec::new()) } else { fs::read(&path) })
        {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(HostView { alive, ..HostView::default() });
            }
            Err(error) => return Err(error),
        };
        Ok(match parse_status(&bytes) {
            Ok(status) => HostView { alive, error: status.error.clone(), status },
            Err(error) => {
                HostView { alive, error: Some(format!("{}: {error}", path.display())), ..HostView::default() }
            }
        })
    }

    /// Publishes the state of the MPS host, and never returns. Watches the status file through
    /// inotify, and the process through an open connection.
    pub async fn follow_mps_host(&self, view: &watch::Sender<HostView>) {
        if let Err(error) = fs::create_dir_all(self.paths.mps_host_dir()) {
            tracing::error!(%error, path = %self.paths.mps_host_dir().display(), "failed to create the MPS host's directory");
        }
        let unread = Notify::new();
        tokio::join!(self.follow_status(view, &unread), self.retry_reads(view, &unread), self.follow_process(view));
    }

    async fn follow_status(&self, view: &watch::Sender<HostView>, unread: &Notify) {
        let unwatched = |error| tracing::warn!(%error, "failed to watch the MPS host's status; polling it instead");
        // Any change in the directory causes a read, but `refresh_view` publishes only changes.
        let refresh = || self.refresh_view(view, unread);
        watch_directory(&self.paths.mps_host_dir(), STATUS_POLL_INTERVAL, refresh, unwatched).await;
    }

    /// Repeats failed reads of the status file, because inotify may report no further change.
    async fn retry_reads(&self, view: &watch::Sender<HostView>, unread: &Notify) {
        loop {
            unread.notified().await;
            sleep(STATUS_POLL_INTERVAL).await;
            self.refresh_view(view, unread);
        }
    }

    /// Reads the MPS host's status file, and publishes a change. Keeps the last status if the file
    /// cannot be read, for example because the agent has no free file descriptor.
    fn refresh_view(&self, view: &watch::Sender<HostView>, unread: &Notify) {
        let before = view.borrow().clone();
        let next = match self.read_status(before.alive) {
            Ok(next) => next,
            Err(error) => {
                unread.notify_one();
                let error = Some(self.describe_read_error(&error));
                if error != before.error {
                    tracing::warn!(error, "failed to read the MPS host's status; the last status applies");
                }
                HostView { error, ..before }
            }
        };
        view.send_if_modified(|view| std::mem::replace(view, next.clone()) != next);
    }

    async fn follow_process(&self, view: &watch::Sender<HostView>) {
        let set = |alive| {
            view.send_if_modified(|view| std::mem::replace(&mut view.alive, alive) != alive);
        };
        loop {
            match UnixStream::connect(self.paths.socket()).await {
                Ok(mut stream) => {
                    set(true);
                    // The MPS host sends nothing without a request, so this read returns only when
                    // the MPS host exits or closes an idle connection.
                    let _ = stream.read(&mut [0; 1]).await;
                    drop(stream);
                    if UnixStream::connect(self.paths.socket())
                        .await
                        .is_err_and(|error| !is_resource_exhaustion(&error))
                    {
                        set(false);
                    }
                }
                // A resource shortage in the agent's process is no sign that the MPS host has
                // stopped.
                Err(error) if is_resource_exhaustion(&error) => {
                    tracing::warn!(%error, "failed to connect to the MPS host; the last reported state applies");
                }
                Err(_) => set(false),
            }
            sleep(RECONNECT_INTERVAL).await;
        }
    }

    /// Sends a request and returns the reply. Repeats a failed request until `deadline` has passed,
    /// because the MPS host may be restarting.
    ///
    /// # Errors
    /// Returns a clause with the reason if no reply arrives within `deadline`.
    pub async fn request(&self, request: &Request, deadline: Duration) -> Result<Reply, String> {
        let until = Instant::now() + deadline;
        loop {
            let why = match timeout_at(until, self.request_once(request)).await {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(error)) => error.to_string(),
                Err(_) => {
                    let seconds = deadline.as_secs_f64();
                    return Err(format!("the MPS host of this node did not answer within {seconds:.1} s"));
                }
            };
            if Instant::now() + REQUEST_RETRY_INTERVAL >= until {
                return Err(format!("the MPS host of this node does not answer: {why}"));
            }
            sleep(REQUEST_RETRY_INTERVAL).await;
        }
    }

    async fn request_once(&self, request: &Request) -> io::Result<Reply> {
        let mut stream = UnixStream::connect(self.paths.socket()).await?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let mut reply = Vec::new();
        BufReader::new(stream.take(MAX_MESSAGE_BYTES)).read_until(b'\n', &mut reply).await?;
        if reply.is_empty() {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        serde_json::from_slice(&reply).map_err(io::Error::other)
    }
}

/// Returns whether a call failed because this process or the node has no free file descriptors,
/// memory or buffers.
fn is_resource_exhaustion(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let resources = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];
    resources.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cleave_gpu::mps::wire::{DaemonState, DaemonStatus, Enforcement, FILE_FORMAT_VERSION, MpsHostStatus};
    use rustix::fs::{CWD, RenameFlags};
    use tokio::net::UnixListener;
    use tokio::time::timeout;

    use super::*;
    use crate::files::write_atomically;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    fn mps_host_status(device: &str, state: DaemonState) -> MpsHostStatus {
        let daemon = DaemonStatus {
            state,
            pid: Some(7),
            server_pid: None,
            restarts: 0,
            enforcement: Enforcement::Hard,
            holds_clients: false,
            replies_unproven: false,
            message: String::new(),
            clients: Vec::new(),
            fault: None,
        };
        MpsHostStatus {
            version: FILE_FORMAT_VERSION,
            daemons: BTreeMap::from([(device.to_owned(), daemon)]),
            ..MpsHostStatus::default()
        }
    }

    fn test_link() -> (tempfile::TempDir, HostLink) {
        let directory = tempfile::tempdir().unwrap();
        let link = HostLink::new(Paths::new(directory.path()));
        (directory, link)
    }

    fn write_status(link: &HostLink, bytes: &[u8]) {
        fs::create_dir_all(link.paths.mps_host_dir()).unwrap();
        write_atomically(&link.paths.status(), bytes).unwrap();
    }

    #[test]
    fn an_unreadable_status_is_an_error_and_lists_no_daemons() {
        let (_directory, link) = test_link();
        assert_eq!(link.read_view(), HostView::default());
        for (bytes, expected) in
            [(&b"{"[..], "EOF"), (br#"{"version":2}"#, "newer MPS host"), (b"[]", "invalid"), (b"\xff", "")]
        {
            write_status(&link, bytes);
            let view = link.read_view();
            assert!(view.status.daemons.is_empty());
            assert!(view.error.as_ref().is_some_and(|error| error.contains(expected)), "{view:?}");
        }
    }

    #[tokio::test]
    async fn the_last_status_applies_until_the_file_can_be_read_again() {
        let (_directory, link) = test_link();
        let (sender, mut view) = watch::channel(HostView::default());
        let follower = link.clone();
        let task = tokio::spawn(async move { follower.follow_mps_host(&sender).await });
        write_status(&link, &serde_json::to_vec(&mps_host_status("GPU-a", DaemonState::Active)).unwrap());
        let mut until = async |what: &str, condition: fn(&HostView) -> bool| {
            timeout(TEST_TIMEOUT, view.wait_for(condition)).await.expect(what).expect(what).clone()
        };
        until("active", |view| view.status.daemons.contains_key("GPU-a")).await;
        // A directory cannot be read as a file, not even by root.
        let directory = link.paths.mps_host_dir().join("directory");
        fs::create_dir(&directory).unwrap();
        let exchange = || {
            let (from, to, flags) = (&directory, link.paths.status(), RenameFlags::EXCHANGE);
            rustix::fs::renameat_with(CWD, from, CWD, &to, flags).unwrap();
        };
        exchange();
        let unread = until("an error", |view| view.error.is_some()).await;
        assert!(unread.status.daemons.contains_key("GPU-a"), "the last status applies: {unread:?}");
        exchange();
        let read = until("no error", |view| view.error.is_none()).await;
        assert!(read.status.daemons.contains_key("GPU-a"));
        task.abort();
    }

    #[tokio::test]
    async fn the_view_follows_the_mps_hosts_status_exit_and_restart() {
        let (_directory, link) = test_link();
        let (sender, mut view) = watch::channel(HostView::default());
        let follower = link.clone();
        let task = tokio::spawn(async move { follower.follow_mps_host(&sender).await });
        let mut until = async |what: &str, condition: fn(&HostView) -> bool| {
            timeout(TEST_TIMEOUT, view.wait_for(condition)).await.expect(what).expect(what).clone()
        };
        fs::create_dir_all(link.paths.mps_host_dir()).unwrap();
        let listener = UnixListener::bind(link.paths.socket()).unwrap();
        let connection = listener.accept().await.unwrap();
        until("alive", |view| view.alive).await;
        write_status(&link, &serde_json::to_vec(&mps_host_status("GPU-a", DaemonState::Active)).unwrap());
        until("active", |view| view.status.daemons.contains_key("GPU-a")).await;
        drop((listener, connection));
        let gone = until("gone", |view| !view.alive).await;
        assert!(gone.status.daemons.contains_key("GPU-a"), "its last status stays");
        fs::remove_file(link.paths.socket()).unwrap();
        let _listener = UnixListener::bind(link.paths.socket()).unwrap();
        until("alive again", |view| view.alive).await;
        fs::remove_dir_all(link.paths.mps_host_dir()).unwrap();
        write_status(&link, &serde_json::to_vec(&mps_host_status("GPU-b", DaemonState::Active)).unwrap());
        until("a new directory", |view| view.status.daemons.contains_key("GPU-b")).await;
        task.abort();
    }

    #[tokio::test]
    async fn a_request_is_repeated_until_its_deadline() {
        let (_directory, link) = test_link();
        fs::create_dir_all(link.paths.mps_host_dir()).unwrap();
        let request = Request::Await { allocation: "00".into(), timeout_ms: 1 };
        let failed = link.request(&request, Duration::from_millis(1)).await.unwrap_err();
        assert!(failed.contains("does not answer"), "{failed}");
        let asking = link.request(&request, TEST_TIMEOUT);
        let answering = async {
            let listener = UnixListener::bind(link.paths.socket()).unwrap();
            // The server closes the first connection, sends an invalid reply on the second, and
            // sends a valid reply on the third.
            for reply in [&b""[..], b"{\"result\":\"what\"}\n", b"{\"result\":\"done\"}\n"] {
                let (mut stream, _) = listener.accept().await.unwrap();
                BufReader::new(&mut stream).read_until(b'\n', &mut Vec::new()).await.unwrap();
                stream.write_all(reply).await.unwrap();
            }
        };
        let (reply, ()) = tokio::join!(asking, answering);
        assert_eq!(reply, Ok(Reply::Done));
    }

    #[test]
    fn directories_of_allocations_are_created_and_removed() {
        let (_directory, link) = test_link();
        link.create_allocation_directory("00").unwrap();
        link.create_allocation_directory("00").unwrap();
        link.create_allocation_directory("01").unwrap();
        fs::write(link.paths.door("01"), "").unwrap();
        link.remove_allocation_directories_except(|id| id == "00");
        assert!(link.paths.allocation("00").is_dir());
        assert!(!link.paths.allocation("01").exists());
    }
}
