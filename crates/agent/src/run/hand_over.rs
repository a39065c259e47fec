//! Waits for the lock of the node's state, and hands over to another agent. The decisions are in
//! [`crate::hand_over`].
//!
//! The agents of a node coordinate through these files in the state directory. The kernel releases
//! the lock of a file when the process that holds it ends.
//!
//! - The serving agent locks the directory itself.
//! - The agent that requests a hand-over locks `successor`, which contains the agent's id.
//! - Every waiting agent has a shared lock on `waiting`.
//! - `hand-over.json` contains the [`HandOverRecord`]. Only the serving agent writes this file.
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cleave_kubelet::PluginServerState;
use rustix::fs::FlockOperation;
use tokio::sync::watch;

use super::http::{Heartbeat, StandbyEndpoints, not_ready_reason};
use crate::args::AgentArgs;
use crate::checkpoint::{CheckpointStore, StateLock};
use crate::files::write_json_atomically;
use crate::hand_over::{
    HandOverRecord, LOCK_ERROR_TIMEOUT, Probation, ServiceStart, StandbyDecision, judge_probation, may_take_lock,
};

/// Interval between attempts to lock the state directory.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between checks of the files that other agents write or lock.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The files through which the agents of a node coordinate.
#[derive(Debug, Clone)]
struct HandOverFiles {
    directory: PathBuf,
}

impl HandOverFiles {
    fn file_path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Reads the record. Returns an empty record if the file does not exist or cannot be read.
    fn load(&self) -> HandOverRecord {
        let record = match std::fs::read(self.file_path("hand-over.json")) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return HandOverRecord::default(),
            Err(error) => Err(error),
        };
        record.unwrap_or_else(|error| {
            tracing::warn!(%error, "failed to read the record of hand-overs");
            HandOverRecord::default()
        })
    }

    fn save(&self, record: &HandOverRecord) -> io::Result<()> {
        write_json_atomically(&self.file_path("hand-over.json"), record)
    }

    /// Requests a hand-over from the serving agent. Dropping the returned file ends the request.
    /// Returns `None` while another agent requests a hand-over.
    fn request_hand_over(&self, id: &str) -> io::Result<Option<File>> {
        let mut file = open(&self.file_path("successor"))?;
        if !try_flock(&file, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(None);
        }
        file.set_len(0)?;
        file.write_all(id.as_bytes())?;
        Ok(Some(file))
    }

    /// Returns the id of the agent that requests a hand-over, if any.
    fn requesting_agent(&self) -> io::Result<Option<String>> {
        let mut file = match File::open(self.file_path("successor")) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if try_flock(&file, FlockOperation::NonBlockingLockShared)? {
            return Ok(None);
        }
        let mut id = String::new();
        file.rewind()?;
        file.read_to_string(&mut id)?;
        // The file is empty if the agent has not written its id yet.
        Ok(Some(id).filter(|id| !id.is_empty()))
    }

    /// Marks this agent as waiting until the returned file is dropped. Returns `None` if the file
    /// is locked for the moment, so that the caller must retry.
    fn mark_waiting(&self) -> io::Result<Option<File>> {
        let file = open(&self.file_path("waiting"))?;
        Ok(try_flock(&file, FlockOperation::NonBlockingLockShared)?.then_some(file))
    }

    /// Returns whether at least one agent waits.
    fn is_awaited(&self) -> io::Result<bool> {
        try_flock(&open(&self.file_path("waiting"))?, FlockOperation::NonBlockingLockExclusive).map(|free| !free)
    }
}

fn open(path: &Path) -> io::Result<File> {
    File::options().create(true).truncate(false).read(true).write(true).open(path)
}

/// Tries to lock a file. Returns false while another process has a conflicting lock.
fn try_flock(file: &File, operation: FlockOperation) -> io::Result<bool> {
    match rustix::fs::flock(file, operation) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns the id of this agent: the UID of its pod. Outside of a pod, the id consists of the PID
/// and the start time of the process, which [`restart_as_standby`] does not change.
fn agent_id(args: &AgentArgs) -> String {
    args.pod_uid.clone().unwrap_or_else(|| {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // The start time is field 22. Skip the name in parentheses, because it may contain spaces.
        let start = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)).unwrap_or_default();
        format!("process-{}-{start}", std::process::id())
    })
}

/// The agent that serves.
pub(super) struct ServingAgent {
    pub(super) lock: StateLock,
    pub(super) start: ServiceStart,
    pub(super) watch: SuccessorWatch,
}

/// State of an agent that waits for the lock.
struct WaitingAgent {
    files: HandOverFiles,
    id: String,
    since: Instant,
    endpoints: StandbyEndpoints,
    last_poll: Option<Instant>,
    standby: StandbyDecision,
    /// Locked while this agent requests a hand-over.
    request: Option<File>,
    /// Locked while this agent waits.
    presence: Option<File>,
}

impl WaitingAgent {
    /// Reads the record every [`POLL_INTERVAL`]. Requests a hand-over if
    /// [`HandOverRecord::decide_standby`] decides that this agent should serve.
    fn poll(&mut self) {
        if self.last_poll.is_none_or(|last_poll| last_poll.elapsed() >= POLL_INTERVAL) {
            self.last_poll = Some(Instant::now());
            self.standby = self.files.load().decide_standby(&self.id, self.since.elapsed());
            self.endpoints.record_heartbeat(self.standby.ready);
        }
        let report = |error: io::Error| tracing::warn!(%error, "failed to request a hand-over; retrying");
        if self.presence.is_none() {
            self.presence = self.files.mark_waiting().map_err(report).ok().flatten();
        }
        if !self.standby.requests_hand_over {
            self.request = None;
        } else if self.request.is_none() {
            self.request = self.files.request_hand_over(&self.id).map_err(report).ok().flatten();
        }
    }
}

/// Waits for the lock of the state directory, so that only one agent of the node serves. During an
/// upgrade, or by mistake, two agents may run. If both served, each would write the MPS host's
/// desired file without the other's allocations, and so close the doors of running pods.
///
/// # Errors
/// Returns an error if attempts to lock the directory fail for [`LOCK_ERROR_TIMEOUT`]. An agent
/// without the lock must not serve, because a second agent could also serve.
pub(super) async fn wait_for_lock(store: &CheckpointStore, args: &AgentArgs) -> anyhow::Result<ServingAgent> {
    let files = HandOverFiles { directory: args.state_dir.clone() };
    let id = agent_id(args);
    let mut waiting: Option<WaitingAgent> = None;
    let mut failing: Option<Instant> = None;
    let begun = Instant::now();
    let lock = loop {
        let requests_hand_over = waiting.as_ref().is_some_and(|waiting| waiting.request.is_some());
        let another_requests =
            !requests_hand_over && files.requesting_agent().is_ok_and(|requesting| requesting.is_some());
        match if may_take_lock(another_requests, begun.elapsed()) { store.try_lock() } else { Ok(None) } {
            Ok(Some(lock)) => break lock,
            Ok(None) => {
                failing = None;
                let wait = || {
                    tracing::warn!("waiting for another agent of this node to exit");
                    WaitingAgent {
                        files: files.clone(),
                        id: id.clone(),
                        since: begun,
                        endpoints: StandbyEndpoints::start(args.metrics_addr),
                        last_poll: None,
                        standby: StandbyDecision { requests_hand_over: false, ready: false },
                        request: None,
                        presence: None,
                    }
                };
                waiting.get_or_insert_with(wait).poll();
            }
            // Keep waiting after an error, because another agent may serve.
            Err(error) => {
                if failing.is_none() {
                    tracing::error!(%error, "failed to lock the checkpoint's directory; retrying");
                }
                let since = *failing.get_or_insert_with(Instant::now);
                if since.elapsed() >= LOCK_ERROR_TIMEOUT {
                    return Err(anyhow::Error::new(error).context(format!(
                        "failed to lock {}, so another agent of this node could also serve",
                        args.state_dir.display()
                    )));
                }
            }
        }
        tokio::time::sleep(LOCK_RETRY_INTERVAL).await;
    };
    let mut record = files.load();
    let start = record.start_serving(&id);
    let ServiceStart { probation, returns_ready } = start;
    tracing::info!(agent = id, probation, returns_ready, "this agent serves the node");
    // Save the record before this agent's request ends, so that a standby sees at once which agent
    // is newer.
    if let Err(error) = files.save(&record) {
        tracing::error!(%error, "failed to write the record of hand-overs; retrying");
    }
    if let Some(WaitingAgent { endpoints, .. }) = waiting {
        endpoints.stop().await;
    }
    let limit = Duration::from_secs(args.probation);
    let watch = SuccessorWatch { files, id, saved: None, record, began: Instant::now(), limit, refused: None };
    Ok(ServingAgent { lock, start, watch })
}

/// Watches for hand-over requests, and records whether this agent is ready.
pub(super) struct SuccessorWatch {
    files: HandOverFiles,
    id: String,
    record: HandOverRecord,
    /// The content of the file, if known.
    saved: Option<HandOverRecord>,
    /// Time at which this agent started to serve.
    began: Instant,
    /// Maximum duration of a probation.
    limit: Duration,
    /// Id of the agent whose current request this agent has refused. `None` if there is no such
    /// request.
    refused: Option<String>,
}

impl SuccessorWatch {
    /// Sends the id of each agent to hand over to. Never returns without an error.
    ///
    /// # Errors
    /// Returns an error if this agent took over from a ready agent and is not ready in time while
    /// another agent waits.
    pub(super) async fn run(
        mut self,
        heartbeat: watch::Receiver<Heartbeat>,
        plugins: watch::Receiver<PluginServerState>,
        successor: watch::Sender<Option<String>>,
    ) -> anyhow::Result<()> {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let not_ready = not_ready_reason(&heartbeat.borrow(), &plugins.borrow());
            let changing = heartbeat.borrow().changing;
            self.check_probation(not_ready.as_deref())?;
            self.record.set_ready(&self.id, not_ready.is_none());
            if let Some(next) = self.next_agent(changing) {
                let mut record = self.record.clone();
                record.hand_over_to(&next);
                match self.files.save(&record) {
                    Ok(()) => {
                        self.saved = Some(record);
                        successor.send_replace(Some(next));
                        continue;
                    }
                    Err(error) => tracing::error!(%error, "failed to write the record of hand-overs; retrying"),
                }
            }
            if self.saved.as_ref() != Some(&self.record) && self.files.save(&self.record).is_ok() {
                self.saved = Some(self.record.clone());
            }
        }
    }

    fn check_probation(&self, not_ready: Option<&str>) -> anyhow::Result<()> {
        if !self.record.is_on_probation() {
            return Ok(());
        }
        let awaited = self.files.is_awaited().unwrap_or(false);
        match judge_probation(not_ready.is_none(), self.began.elapsed(), self.limit, awaited) {
            Probation::Passed => tracing::info!("ready after taking over from another agent"),
            Probation::Open => {}
            Probation::Failed => anyhow::bail!(
                "not ready within {} s after the hand-over, so the earlier agent serves again: {}",
                self.limit.as_secs(),
                not_ready.unwrap_or_default()
            ),
        }
        Ok(())
    }

    /// Returns the id of the agent that this agent must hand over to now, if any.
    fn next_agent(&mut self, changing: bool) -> Option<String> {
        let requesting = self.files.requesting_agent().unwrap_or_else(|error| {
            tracing::warn!(%error, "failed to read the hand-over request");
            None
        });
        let (next, refused): (Option<String>, Option<String>) = match requesting {
            Some(requesting) if self.record.should_hand_over(&self.id, &requesting, self.began.elapsed(), changing) => {
                (Some(requesting), None)
            }
            requesting => (None, requesting),
        };
        if let Some(requesting) = refused.as_ref().filter(|_| refused != self.refused) {
            tracing::info!(
                requesting,
                failures = self.record.count_failures(requesting),
                changing,
                "does not hand over yet"
            );
        }
        self.refused = refused;
        next
    }
}

/// Releases the lock, and replaces this process with the same program and the same arguments. If
/// the record names a successor, the new program waits as a standby. Returns only on an error.
///
/// The PID remains the same, so the supervisor does not notice the replacement. Threads that hang
/// in the driver end with the old program. The lock is released even if a thread cannot end.
pub(super) fn restart_as_standby(lock: StateLock) -> io::Error {
    let mut arguments = std::env::args_os();
    // Do not use the program's path, because an upgrade may have replaced the file.
    let mut command = Command::new("/proc/self/exe");
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    command.args(arguments);
    drop(lock);
    command.exec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_agent_at_a_time_requests_a_hand_over() {
        let directory = tempfile::tempdir().unwrap();
        let files = HandOverFiles { directory: directory.path().to_owned() };
        assert_eq!(files.requesting_agent().unwrap(), None);
        let request = files.request_hand_over("a-longer-name").unwrap().unwrap();
        assert_eq!(files.requesting_agent().unwrap().as_deref(), Some("a-longer-name"));
        assert!(files.request_hand_over("other").unwrap().is_none());
        drop(request);
        assert_eq!(files.requesting_agent().unwrap(), None);
        let _request = files.request_hand_over("other").unwrap().unwrap();
        assert_eq!(files.requesting_agent().unwrap().as_deref(), Some("other"));
    }

    #[test]
    fn an_agent_detects_whether_other_agents_wait() {
        let directory = tempfile::tempdir().unwrap();
        let files = HandOverFiles { directory: directory.path().to_owned() };
        assert!(!files.is_awaited().unwrap());
        let waiting = [files.mark_waiting().unwrap().unwrap(), files.mark_waiting().unwrap().unwrap()];
        assert!(files.is_awaited().unwrap());
        drop(waiting);
        assert!(!files.is_awaited().unwrap());
    }

    #[test]
    fn a_damaged_record_counts_as_absent() {
        let directory = tempfile::tempdir().unwrap();
        let files = HandOverFiles { directory: directory.path().to_owned() };
        assert!(files.load().is_empty());
        std::fs::write(directory.path().join("hand-over.json"), "{").unwrap();
        assert!(files.load().is_empty());
        let mut record = HandOverRecord::default();
        record.start_serving("a");
        files.save(&record).unwrap();
        assert_eq!(files.load(), record);
    }
}
