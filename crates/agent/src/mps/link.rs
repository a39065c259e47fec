//! The way to the MPS host: the desired file, its status, and requests
//! ([`cleave_gpu::mps::wire`]).
use std::fs;
use std::io;
use std::time::Duration;

use cleave_gpu::mps::wire::{Desired, Paths, Reply, Request};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use super::{View, parse_status};
use crate::files::{watch_directory, write_atomically};

/// Between looks for an MPS host that is not there.
const LOOK: Duration = Duration::from_millis(250);
/// Between looks at the status where inotify cannot be had.
const LOOK_UNWATCHED: Duration = Duration::from_millis(500);
/// Between attempts of a request, while the MPS host is away.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// Longest status and longest reply: 64 GPUs with 48 clients each are below 1 MiB.
const MOST: u64 = 4 << 20;

/// Files and socket of the MPS host.
#[derive(Debug, Clone)]
pub struct Link {
    paths: Paths,
}

impl Link {
    /// Below the run directory.
    pub fn new(paths: Paths) -> Self {
        Self { paths }
    }

    /// Where things are.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// What an agent before this one wanted; nothing where that cannot be read.
    pub fn last_desired(&self) -> Option<Desired> {
        let bytes = fs::read(self.paths.desired()).ok()?;
        match Desired::parse(&bytes) {
            Ok(desired) => Some(desired),
            Err(error) => {
                tracing::warn!(%error, "the last desired file of the MPS host is no help");
                None
            }
        }
    }

    /// Writes what shall run.
    pub fn write_desired(&self, desired: &Desired) -> io::Result<()> {
        fs::create_dir_all(self.paths.mps())?;
        write_atomically(&self.paths.desired(), &serde_json::to_vec(desired)?)
    }

    /// Makes the folder of an allocation. It is there already when the same slices are given out
    /// again.
    pub fn make_folder(&self, id: &str) -> io::Result<()> {
        let folder = self.paths.allocation(id);
        match fs::create_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir_all(&folder),
            result => result,
        }
    }

    /// Removes the folders of allocations for which `keep` is false, where no door is open in them.
    pub fn sweep_folders(&self, keep: impl Fn(&str) -> bool) {
        let Ok(entries) = fs::read_dir(self.paths.allocations()) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|id| !keep(id)) {
                // A socket that is left belongs to a door that nobody serves any more.
                if let Err(error) = fs::remove_dir_all(entry.path()) {
                    tracing::warn!(%error, path = %entry.path().display(), "cannot remove the folder of an allocation that is over");
                }
            }
        }
    }

    /// One look, without waiting: a unix socket's connect and a file's read come back at once.
    pub fn look(&self) -> View {
        let alive = std::os::unix::net::UnixStream::connect(self.paths.socket()).is_ok();
        self.read_status(alive)
    }

    fn read_status(&self, alive: bool) -> View {
        let path = self.paths.status();
        let bytes = match fs::metadata(&path)
            .and_then(|meta| if meta.len() > MOST { Ok(Vec::new()) } else { fs::read(&path) })
        {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return View { alive, ..View::default() },
            Err(error) => {
                return View { alive, error: Some(format!("{}: {error}", path.display())), ..View::default() };
            }
        };
        match parse_status(&bytes) {
            Ok(status) => View { alive, error: status.error.clone(), status },
            Err(error) => View { alive, error: Some(format!("{}: {error}", path.display())), ..View::default() },
        }
    }

    /// Follows the MPS host for ever: its status as inotify tells, its life by a connection that is
    /// held.
    pub async fn follow(&self, view: &watch::Sender<View>) {
        if let Err(error) = fs::create_dir_all(self.paths.mps()) {
            tracing::error!(%error, path = %self.paths.mps().display(), "cannot make the MPS host's directory");
        }
        tokio::join!(self.follow_status(view), self.follow_life(view));
    }

    async fn follow_status(&self, view: &watch::Sender<View>) {
        let unwatched = |error| tracing::warn!(%error, "cannot watch the MPS host's status; looking at it instead");
        // Any change in the folder is a reason to look; an unchanged view is not sent on.
        watch_directory(&self.paths.mps(), LOOK_UNWATCHED, || self.refresh(view), unwatched).await;
    }

    fn refresh(&self, view: &watch::Sender<View>) {
        let next = self.read_status(view.borrow().alive);
        view.send_if_modified(|view| std::mem::replace(view, next.clone()) != next);
    }

    async fn follow_life(&self, view: &watch::Sender<View>) {
        let set = |alive| {
            view.send_if_modified(|view| std::mem::replace(&mut view.alive, alive) != alive);
        };
        loop {
            match UnixStream::connect(self.paths.socket()).await {
                Ok(mut stream) => {
                    set(true);
                    // It has nothing to say unasked: this ends with the process, or when it tires
                    // of the connection.
                    let _ = stream.read(&mut [0; 1]).await;
                    if UnixStream::connect(self.paths.socket()).await.is_err() {
                        set(false);
                    }
                }
                Err(_) => set(false),
            }
            sleep(LOOK).await;
        }
    }

    /// Asks until it is answered or the deadline is over; an MPS host that is away may come back.
    pub async fn ask(&self, request: &Request, deadline: Duration) -> Result<Reply, String> {
        let until = Instant::now() + deadline;
        loop {
            let why = match timeout_at(until, self.ask_once(request)).await {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(error)) => error.to_string(),
                Err(_) => return Err(format!("the MPS host did not answer within {deadline:?}")),
            };
            if Instant::now() + ASK_AGAIN >= until {
                return Err(format!("the MPS host of this node does not answer: {why}"));
            }
            sleep(ASK_AGAIN).await;
        }
    }

    async fn ask_once(&self, request: &Request) -> io::Result<Reply> {
        let mut stream = UnixStream::connect(self.paths.socket()).await?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let mut answer = Vec::new();
        BufReader::new(stream.take(MOST)).read_until(b'\n', &mut answer).await?;
        if answer.is_empty() {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        serde_json::from_slice(&answer).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cleave_gpu::mps::wire::{DaemonState, DaemonStatus, Enforcement, Status, VERSION};
    use tokio::net::UnixListener;
    use tokio::time::timeout;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn status(device: &str, state: DaemonState) -> Status {
        let daemon = DaemonStatus {
            state,
            pid: Some(7),
            server_pid: None,
            restarts: 0,
            enforcement: Enforcement::Hard,
            message: String::new(),
            clients: Vec::new(),
            fault: None,
        };
        Status { version: VERSION, daemons: BTreeMap::from([(device.to_owned(), daemon)]), ..Status::default() }
    }

    fn link() -> (tempfile::TempDir, Link) {
        let folder = tempfile::tempdir().unwrap();
        let link = Link::new(Paths::new(folder.path()));
        (folder, link)
    }

    fn write_status(link: &Link, bytes: &[u8]) {
        fs::create_dir_all(link.paths.mps()).unwrap();
        write_atomically(&link.paths.status(), bytes).unwrap();
    }

    #[test]
    fn a_status_that_cannot_be_read_is_an_error_and_no_daemon_is_active_by_it() {
        let (_folder, link) = link();
        assert_eq!(link.look(), View::default());
        for (bytes, says) in
            [(&b"{"[..], "EOF"), (br#"{"version":2}"#, "newer MPS host"), (b"[]", "invalid"), (b"\xff", "")]
        {
            write_status(&link, bytes);
            let view = link.look();
            assert!(view.status.daemons.is_empty());
            assert!(view.error.as_ref().is_some_and(|error| error.contains(says)), "{view:?}");
        }
    }

    #[tokio::test]
    async fn the_host_is_followed_through_its_status_its_end_and_its_return() {
        let (_folder, link) = link();
        let (sender, mut view) = watch::channel(View::default());
        let follower = link.clone();
        let task = tokio::spawn(async move { follower.follow(&sender).await });
        let mut until = async |what: &str, condition: fn(&View) -> bool| {
            timeout(PATIENCE, view.wait_for(condition)).await.expect(what).expect(what).clone()
        };
        fs::create_dir_all(link.paths.mps()).unwrap();
        let listener = UnixListener::bind(link.paths.socket()).unwrap();
        let held = listener.accept().await.unwrap();
        until("alive", |view| view.alive).await;
        write_status(&link, &serde_json::to_vec(&status("GPU-a", DaemonState::Active)).unwrap());
        until("active", |view| view.status.daemons.contains_key("GPU-a")).await;
        drop((listener, held));
        let gone = until("gone", |view| !view.alive).await;
        assert!(gone.status.daemons.contains_key("GPU-a"), "its last word stays");
        fs::remove_file(link.paths.socket()).unwrap();
        let _listener = UnixListener::bind(link.paths.socket()).unwrap();
        until("back", |view| view.alive).await;
        fs::remove_dir_all(link.paths.mps()).unwrap();
        write_status(&link, &serde_json::to_vec(&status("GPU-b", DaemonState::Active)).unwrap());
        until("a new folder", |view| view.status.daemons.contains_key("GPU-b")).await;
        task.abort();
    }

    #[tokio::test]
    async fn a_request_waits_for_a_host_that_is_away_and_gives_up_at_its_deadline() {
        let (_folder, link) = link();
        fs::create_dir_all(link.paths.mps()).unwrap();
        let request = Request::Await { allocation: "00".into(), timeout_ms: 1 };
        let refused = link.ask(&request, Duration::from_millis(1)).await.unwrap_err();
        assert!(refused.contains("does not answer"), "{refused}");
        let asking = link.ask(&request, PATIENCE);
        let answering = async {
            let listener = UnixListener::bind(link.paths.socket()).unwrap();
            // One that breaks off, one that lies, and one that answers.
            for answer in [&b""[..], b"{\"result\":\"what\"}\n", b"{\"result\":\"done\"}\n"] {
                let (mut stream, _) = listener.accept().await.unwrap();
                BufReader::new(&mut stream).read_until(b'\n', &mut Vec::new()).await.unwrap();
                stream.write_all(answer).await.unwrap();
            }
        };
        let (reply, ()) = tokio::join!(asking, answering);
        assert_eq!(reply, Ok(Reply::Done));
    }

    #[test]
    fn folders_of_allocations_come_and_go() {
        let (_folder, link) = link();
        link.make_folder("00").unwrap();
        link.make_folder("00").unwrap();
        link.make_folder("01").unwrap();
        fs::write(link.paths.door("01"), "").unwrap();
        link.sweep_folders(|id| id == "00");
        assert!(link.paths.allocation("00").is_dir());
        assert!(!link.paths.allocation("01").exists());
    }
}
