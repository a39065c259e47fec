//! Runs the process of one device: starts it, talks to it, and restarts it with increasing delays.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use rustix::process::Signal;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::view::{ProcessProblem, ProcessView};
use crate::mps::channel::{self, FromDevice, MessageReader, ToDevice};
use crate::mps::compute_mode;
use crate::mps::context::HostContext;
use crate::mps::daemon::backoff::Backoff;
use crate::mps::daemon::lifecycle::stop_earlier_daemon;
use crate::mps::error::NotReady;
use crate::mps::process::{Child, ChildExit, PidFd};
use crate::mps::wire::{Desired, MpsHostStatus, Reply, Request};

/// Interval at which the MPS host checks whether a process answers.
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a message after which a process counts as hanging.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);
/// Time without a message after which a process without clients is killed.
const HANG_DEADLINE: Duration = Duration::from_secs(30);
/// Time limit for a process to stop its daemon and to exit. Shorter than the grace period of the
/// pod, so that time remains to end what a killed process leaves.
const STOP_DEADLINE: Duration = Duration::from_secs(20);

/// A request, and where its reply belongs.
type QueuedRequest = (Request, oneshot::Sender<Reply>);

/// The process of one device.
pub(super) struct DeviceProcess {
    pub(super) device: String,
    context: Rc<HostContext>,
    /// Arguments of this process. The process of the device gets the same arguments.
    arguments: Vec<OsString>,
    view: RefCell<ProcessView>,
    part: watch::Sender<Desired>,
    /// Requests to the running process.
    requests: RefCell<Option<mpsc::UnboundedSender<QueuedRequest>>>,
}

/// How a process ended.
enum ProcessEnd {
    /// Nothing was left to do.
    Retired,
    /// The MPS host is stopping.
    Stopped,
    /// The process failed.
    Failed(String),
}

impl DeviceProcess {
    pub(super) fn new(device: &str, context: Rc<HostContext>, arguments: Vec<OsString>) -> Rc<Self> {
        Rc::new(Self {
            device: device.to_owned(),
            context,
            arguments,
            view: RefCell::new(ProcessView::new()),
            part: watch::Sender::new(Desired::default()),
            requests: RefCell::default(),
        })
    }

    /// Sets the device's part of the desired state.
    pub(super) fn set_part(&self, part: &Desired) {
        if self.view.borrow_mut().set_part(part.clone()) {
            self.part.send_replace(part.clone());
        }
    }

    /// Returns whether the MPS host may report the desired file as applied.
    pub(super) fn accept_desired_file(&self) -> bool {
        self.view.borrow_mut().accept_desired_file()
    }

    /// Adds the device to the status of the MPS host.
    pub(super) fn add_to(&self, status: &mut MpsHostStatus) {
        self.view.borrow().add_to(status, &self.device);
    }

    /// Keeps the process running. Returns when nothing is left to do, or when the MPS host stops.
    pub(super) async fn supervise(self: Rc<Self>) {
        let mut backoff = Backoff::default();
        loop {
            let start = Instant::now();
            let end = self.run_once().await;
            *self.requests.borrow_mut() = None;
            match end {
                ProcessEnd::Stopped => return,
                ProcessEnd::Retired => {
                    self.view.borrow_mut().record_end();
                    self.context.notify_status_change();
                    if self.view.borrow().is_undesired() {
                        return;
                    }
                }
                ProcessEnd::Failed(message) => {
                    let delay = backoff.record_failure(start.elapsed());
                    tracing::error!(device = self.device, message, ?delay, "the process of a device failed");
                    let problem = ProcessProblem { state: backoff.state(), message };
                    self.view.borrow_mut().record_failure(problem, &self.device);
                    self.context.notify_status_change();
                    tokio::select! {
                        () = self.context.stopping.cancelled() => return self.clean_up().await,
                        () = sleep(delay) => {}
                    }
                }
            }
        }
    }

    /// Runs the process once, until it has exited.
    async fn run_once(&self) -> ProcessEnd {
        let (child, ours) = match self.start() {
            Ok(started) => started,
            Err(error) => return ProcessEnd::Failed(format!("failed to start the process of this device: {error}")),
        };
        let (reader, writer) = ours.into_split();
        let (sender, requests) = mpsc::unbounded_channel();
        *self.requests.borrow_mut() = Some(sender);
        let replies = RefCell::new(BTreeMap::new());
        let is_done = tokio::select! {
            // Each branch ends the use of the connection, so none has to be cancel-safe.
            exit = child.wait_for_exit() => return ProcessEnd::Failed(describe_exit(&child, exit)),
            is_done = self.receive_messages(reader, &child, &replies) => is_done,
            () = self.send_messages(writer, requests, &replies) => false,
            () = self.context.stopping.cancelled() => false,
        };
        let exit = self.stop(&child).await;
        if self.context.stopping.is_cancelled() {
            // A process that has not finished its own clean-up leaves the earlier daemon.
            if matches!(exit, ChildExit::Status(0)) && self.view.borrow().is_cleaned_up() {
                self.view.borrow_mut().record_end();
            } else {
                self.clean_up().await;
            }
            ProcessEnd::Stopped
        } else if matches!(exit, ChildExit::Status(0)) && is_done {
            ProcessEnd::Retired
        } else {
            ProcessEnd::Failed(describe_exit(&child, exit))
        }
    }

    /// Starts the process. Its standard input is the connection to this process.
    fn start(&self) -> io::Result<(Child, UnixStream)> {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(&self.arguments).args(["--device", &self.device, "--parent", &std::process::id().to_string()]);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        let child = self.context.children.start_process(&mut command)?;
        Ok((child, UnixStream::from_std(ours)?))
    }

    /// Handles the messages of the process until the process should end. Returns true if nothing is
    /// left to do. Returns false if the process hangs and has no clients, or if the connection has
    /// ended.
    async fn receive_messages(
        &self,
        reader: OwnedReadHalf,
        child: &Child,
        replies: &RefCell<BTreeMap<u64, oneshot::Sender<Reply>>>,
    ) -> bool {
        let mut reader = MessageReader::new(reader);
        let mut last = Instant::now();
        loop {
            let message = match timeout(ANSWER_DEADLINE, reader.receive()).await {
                Ok(Ok(Some(message))) => message,
                Ok(Ok(None)) => return false,
                Ok(Err(error)) => {
                    tracing::error!(device = self.device, %error, "failed to read a message of a device's process");
                    return false;
                }
                Err(_) => {
                    let silence = last.elapsed();
                    self.record_silence(child.pid, silence);
                    if silence >= HANG_DEADLINE && !self.has_clients() {
                        tracing::error!(
                            device = self.device,
                            pid = child.pid,
                            "killing a hanging process without clients"
                        );
                        return false;
                    }
                    continue;
                }
            };
            last = Instant::now();
            match message {
                FromDevice::Status(status) => {
                    self.view.borrow_mut().record_status(status);
                    self.context.notify_status_change();
                }
                FromDevice::Reply(number, reply) => {
                    if let Some(sender) = replies.borrow_mut().remove(&number) {
                        // Fails if the agent no longer waits for the reply.
                        drop(sender.send(reply));
                    }
                }
                FromDevice::Pong => {}
            }
            if self.view.borrow_mut().record_answer() {
                tracing::info!(device = self.device, pid = child.pid, "the process of a device answers again");
                self.context.notify_status_change();
            }
            // Check after each message: the process sends no status if a change of its part is
            // withdrawn.
            if self.view.borrow().is_done() {
                return true;
            }
        }
    }

    fn record_silence(&self, pid: u32, silence: Duration) {
        let is_first = silence < ANSWER_DEADLINE * 2;
        if self.view.borrow_mut().record_problem(ProcessProblem::no_answer(pid, ANSWER_DEADLINE)) {
            if is_first {
                tracing::error!(device = self.device, pid, "the process of a device does not answer");
            }
            self.context.notify_status_change();
        }
    }

    /// Returns whether a client of the last status still runs.
    fn has_clients(&self) -> bool {
        let clients: Vec<u32> = self.view.borrow().clients(&self.device).collect();
        // If a pidfd cannot be opened, the client may run.
        clients
            .into_iter()
            .any(|pid| PidFd::open(pid).map_or(true, |client| client.is_some_and(|one| !one.has_exited())))
    }

    /// Sends the desired state, requests and pings. Returns when the connection has ended.
    async fn send_messages(
        &self,
        mut writer: OwnedWriteHalf,
        mut requests: mpsc::UnboundedReceiver<QueuedRequest>,
        replies: &RefCell<BTreeMap<u64, oneshot::Sender<Reply>>>,
    ) {
        let mut part = self.part.subscribe();
        part.mark_changed();
        let mut pings = interval(PING_INTERVAL);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut number = 0;
        loop {
            let message = tokio::select! {
                // Cancel-safe: changes, requests and ticks remain queued.
                biased;
                changed = part.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    ToDevice::Desired(part.borrow_and_update().clone())
                }
                request = requests.recv() => {
                    let Some((request, sender)) = request else { return };
                    number += 1;
                    replies.borrow_mut().insert(number, sender);
                    ToDevice::Request(number, request)
                }
                _ = pings.tick() => {
                    replies.borrow_mut().retain(|_, sender| !sender.is_closed());
                    ToDevice::Ping
                }
            };
            if let Err(error) = channel::send(&mut writer, &message).await {
                tracing::debug!(device = self.device, %error, "the process of a device has closed the connection");
                return;
            }
        }
    }

    /// Stops the process and returns how it exited. Kills the process if it does not answer.
    async fn stop(&self, child: &Child) -> ChildExit {
        if self.view.borrow().problem().is_none() {
            child.signal(Signal::TERM);
            if let Ok(exit) = timeout(STOP_DEADLINE, child.wait_for_exit()).await {
                return exit;
            }
            tracing::error!(device = self.device, pid = child.pid, "killing a device's process, which did not stop");
        }
        child.kill();
        child.wait_for_exit().await
    }

    /// Ends what a process has left, while the MPS host stops.
    async fn clean_up(&self) {
        match stop_earlier_daemon(&self.device, &self.context.paths.pipe(&self.device)).await {
            Ok(()) => self.view.borrow_mut().record_end(),
            Err(error) => {
                tracing::error!(device = self.device, %error, "failed to search for processes of the MPS daemon");
            }
        }
        if let Err(error) = compute_mode::restore_compute_mode(&self.context, &self.device).await {
            tracing::error!(device = self.device, %error, "failed to restore compute mode");
        }
    }

    fn check_answers(&self) -> Result<(), NotReady> {
        let view = self.view.borrow();
        let Some(problem) = view.problem() else { return Ok(()) };
        Err(NotReady::Process { device: self.device.clone(), problem: problem.message.clone() })
    }

    /// Sends a request of the agent to the process, and waits for the reply.
    ///
    /// # Errors
    /// Returns [`NotReady::Process`] if the process exits or does not answer.
    pub(super) async fn request(&self, request: Request) -> Result<Reply, NotReady> {
        let failed = |problem: &str| NotReady::Process { device: self.device.clone(), problem: problem.to_owned() };
        let mut changes = self.context.subscribe_to_status_changes();
        let (sender, mut reply) = oneshot::channel();
        self.check_answers()?;
        // Send nothing to a process that hangs: it would execute the request much later.
        let queued = self.requests.borrow().as_ref().is_some_and(|requests| requests.send((request, sender)).is_ok());
        if !queued {
            return Err(failed("the process of this device is starting"));
        }
        loop {
            self.check_answers()?;
            tokio::select! {
                // Cancel-safe: the reply and changes remain queued.
                reply = &mut reply => return reply.map_err(|_| failed("the process of this device has exited")),
                _ = changes.changed() => {}
            }
        }
    }
}

fn describe_exit(child: &Child, exit: ChildExit) -> String {
    format!("process {} of the MPS host, which supervised this device, exited with {exit}", child.pid)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::mps::channel::DeviceStatus;
    use crate::mps::context::HostOptions;
    use crate::mps::process::Children;
    use crate::mps::wire::{DaemonSettings, FILE_FORMAT_VERSION, Paths};

    /// Returns a process that was not started. Nothing reaps children, because other tests wait for
    /// theirs.
    fn test_process() -> Rc<DeviceProcess> {
        let options = HostOptions {
            mps_control: PathBuf::new(),
            library_path: None,
            compute_mode: Vec::new(),
            driver_version_file: PathBuf::new(),
        };
        let context = HostContext::new(Paths::new("/nonexistent"), options, Rc::new(Children::default()), 64);
        DeviceProcess::new("GPU-a", Rc::new(context), Vec::new())
    }

    #[tokio::test]
    async fn a_process_without_work_ends_although_a_change_was_withdrawn_before_it_was_sent() {
        let process = test_process();
        let empty = Desired { version: FILE_FORMAT_VERSION, ..Desired::default() };
        let settings = DaemonSettings {
            multi_user: true,
            exclusive: false,
            default_threads: None,
            default_memory_mib: None,
            accept_advisory: false,
        };
        let with_daemon = Desired { daemons: BTreeMap::from([("GPU-a".to_owned(), settings)]), ..empty.clone() };
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut writer, replies) = (theirs.into_split().1, RefCell::default());
        let child = process.context.children.start_process(Command::new("true").stdin(Stdio::null())).unwrap();
        let host = MpsHostStatus { desired: empty.hash(), ..MpsHostStatus::default() };
        process.set_part(&with_daemon);
        channel::send(&mut writer, &FromDevice::Status(DeviceStatus { host, cleaned_up: true })).await.unwrap();
        let mut is_done = std::pin::pin!(process.receive_messages(ours.into_split().0, &child, &replies));
        let has_received_status = async {
            while !process.view.borrow().is_cleaned_up() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            _ = &mut is_done => panic!("a daemon is desired"),
            () = has_received_status => {}
        }
        process.set_part(&empty);
        channel::send(&mut writer, &FromDevice::Pong).await.unwrap();
        assert_eq!(timeout(ANSWER_DEADLINE, is_done).await, Ok(true));
    }
}
