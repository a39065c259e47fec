//! Runs one process for each device, and combines the processes into one interface for the agent:
//! the desired file, the status file and the requests.
//!
//! ```text
//! desired.json ─▶ Supervisor ─▶ DeviceProcess, one per device ─▶ process of the device
//! status.json  ◀──┘      ▲         └▶ ProcessView (pure)             (reconciler, daemon, doors)
//! host.sock ─────────────┘
//! ```
//!
//! Nothing here waits for one process before it serves the others.
mod process;
mod view;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::future::pending;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};

use self::process::DeviceProcess;
use super::compute_mode;
use super::context::HostContext;
use super::error::{DesiredError, NotReady};
use super::files::replace_file;
use super::wire::{Desired, FILE_FORMAT_VERSION, MpsHostStatus, Reply, Request};

/// Delay before the MPS host retries to write the status.
const STATUS_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Time during which the MPS host combines changes into one status.
const STATUS_WRITE_DELAY: Duration = Duration::from_millis(5);
/// Additional time for the answer of a process that has waited until the deadline of a request.
const ANSWER_GRACE: Duration = Duration::from_millis(500);

/// The processes of this node's devices.
pub(crate) struct Supervisor {
    context: Rc<HostContext>,
    /// Arguments of this process.
    arguments: Vec<OsString>,
    desired: RefCell<Desired>,
    /// Hash of the last valid desired file.
    hash: RefCell<String>,
    /// Hash of the desired file that all answering processes have applied.
    applied: RefCell<String>,
    desired_error: RefCell<Option<DesiredError>>,
    processes: RefCell<BTreeMap<String, SupervisedProcess>>,
}

/// A device's process and the task that keeps it running. [`Supervisor::stop`] removes the task and
/// waits for it.
struct SupervisedProcess {
    process: Rc<DeviceProcess>,
    task: Option<JoinHandle<()>>,
}

impl SupervisedProcess {
    fn has_ended(&self) -> bool {
        self.task.as_ref().is_some_and(JoinHandle::is_finished)
    }
}

impl Supervisor {
    pub(crate) fn new(context: Rc<HostContext>, arguments: Vec<OsString>) -> Rc<Self> {
        Rc::new(Self {
            context,
            arguments,
            desired: RefCell::new(Desired { version: FILE_FORMAT_VERSION, ..Desired::default() }),
            hash: RefCell::default(),
            applied: RefCell::default(),
            desired_error: RefCell::default(),
            processes: RefCell::default(),
        })
    }

    /// Reads the desired file and applies it. An invalid file changes only the status.
    pub(crate) fn apply_desired_file(&self) {
        let path = self.context.paths.desired();
        let read = match std::fs::read(&path) {
            // The agent has not written the first file yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.hash.borrow().is_empty() => return,
            Err(source) => Err(DesiredError::Read { path, source }),
            Ok(bytes) => Desired::parse(&bytes).map_err(DesiredError::from),
        };
        let error = match read {
            Ok(desired) => {
                self.apply_desired(desired);
                None
            }
            Err(error) => Some(error),
        };
        let text = error.as_ref().map(ToString::to_string);
        let before = std::mem::replace(&mut *self.desired_error.borrow_mut(), error);
        if let Some(error) = text.filter(|text| before.is_none_or(|before| before.to_string() != *text)) {
            tracing::error!(error, "failed to apply the desired file");
        }
        self.context.notify_status_change();
    }

    /// Retries to read the desired file after a failure. A read fails, for example, if this process
    /// has no free descriptor. The retry is necessary because the file may not change again.
    pub(crate) fn retry_failed_read(&self) {
        if matches!(*self.desired_error.borrow(), Some(DesiredError::Read { .. })) {
            self.apply_desired_file();
        }
    }

    /// Gives each process its part of the desired state.
    fn apply_desired(&self, new: Desired) {
        let mut parts = split_by_device(&new);
        *self.hash.borrow_mut() = new.hash();
        *self.desired.borrow_mut() = new;
        let before: Vec<String> = self.processes.borrow().keys().cloned().collect();
        for device in before {
            parts.entry(device).or_insert_with(empty_part);
        }
        for (device, part) in parts {
            self.process(&device).set_part(&part);
        }
    }

    /// Returns the process of this device. Starts the process unless it is running.
    fn process(&self, device: &str) -> Rc<DeviceProcess> {
        if let Some(supervised) = self.processes.borrow().get(device)
            && !supervised.has_ended()
        {
            return Rc::clone(&supervised.process);
        }
        let process = DeviceProcess::new(device, Rc::clone(&self.context), self.arguments.clone());
        let task = Some(tokio::task::spawn_local(Rc::clone(&process).supervise()));
        let supervised = SupervisedProcess { process: Rc::clone(&process), task };
        self.processes.borrow_mut().insert(device.to_owned(), supervised);
        process
    }

    /// Forgets the processes that have ended because nothing was left to do, and removes their
    /// daemons' pipe directories.
    pub(crate) fn forget_ended_processes(&self) {
        self.processes.borrow_mut().retain(|device, supervised| {
            let has_ended = supervised.has_ended();
            if has_ended {
                self.remove_pipe_directory(device);
            }
            !has_ended
        });
    }

    fn remove_pipe_directory(&self, device: &str) {
        let path = self.context.paths.pipe(device);
        match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "failed to remove the pipe directory of an MPS daemon");
            }
            _ => {}
        }
    }

    /// Cleans up after an earlier MPS host. Removes doors that are not desired. Starts a process
    /// for each device that is not desired and of which a daemon or a compute mode may be left. The
    /// process ends what is left. Call this function before the first status is written: the agent
    /// treats a GPU without a daemon as free.
    pub(crate) fn clean_up(&self) {
        let allocations = std::fs::read_dir(self.context.paths.allocations()).into_iter().flatten().flatten();
        for id in allocations.filter_map(|entry| entry.file_name().into_string().ok()) {
            let is_desired = self.desired.borrow().allocations.contains_key(&id);
            if !is_desired && std::fs::remove_file(self.context.paths.door(&id)).is_ok() {
                tracing::info!(allocation = id, "removed door of an earlier MPS host");
            }
        }
        let directory = self.context.paths.mps_host_dir();
        let mut devices: BTreeSet<String> = compute_mode::devices_with_record(&directory).into_iter().collect();
        let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        let pipes = entries.filter(|entry| entry.file_type().is_ok_and(|found| found.is_dir()));
        devices.extend(pipes.filter_map(|entry| entry.file_name().into_string().ok()));
        for device in devices {
            if !self.processes.borrow().contains_key(&device) {
                self.process(&device).set_part(&empty_part());
            }
        }
    }

    /// Stops all processes concurrently. Each process has its own deadlines.
    pub(crate) async fn stop(&self) {
        self.context.stopping.cancel();
        self.context.notify_status_change();
        let tasks: Vec<(String, JoinHandle<()>)> = {
            let mut processes = self.processes.borrow_mut();
            let task = |(device, one): (&String, &mut SupervisedProcess)| Some((device.clone(), one.task.take()?));
            processes.iter_mut().filter_map(task).collect()
        };
        for (device, task) in tasks {
            if let Err(error) = task.await {
                tracing::error!(device, %error, "failed to supervise the process of a device");
            }
        }
    }

    /// Returns the current status. An MPS host that is stopping reports only daemons that are no
    /// longer desired: the agent must not treat their GPUs as free before the daemons have exited.
    fn status(&self) -> MpsHostStatus {
        let mut status = MpsHostStatus {
            version: FILE_FORMAT_VERSION,
            pid: std::process::id(),
            desired: String::new(),
            error: self.desired_error.borrow().as_ref().map(ToString::to_string),
            ..MpsHostStatus::default()
        };
        let is_stopping = self.context.stopping.is_cancelled();
        let mut all_applied = !is_stopping;
        for supervised in self.processes.borrow().values().filter(|one| !one.has_ended()) {
            all_applied &= supervised.process.accept_desired_file();
        }
        if all_applied {
            self.applied.borrow_mut().clone_from(&self.hash.borrow());
        }
        for supervised in self.processes.borrow().values() {
            supervised.process.add_to(&mut status);
        }
        status.desired.clone_from(&self.applied.borrow());
        if is_stopping {
            status.daemons.retain(|device, _| !self.desired.borrow().daemons.contains_key(device));
            status.allocations.clear();
        }
        status
    }

    /// Writes the status whenever it changes, forever.
    pub(crate) async fn write_status_changes(self: Rc<Self>) {
        let mut changes = self.context.subscribe_to_status_changes();
        let mut written = None;
        loop {
            let status = self.status();
            if written.as_ref() != Some(&status) {
                written = self.write_status(&status).then_some(status);
            }
            let retry = async {
                // Retry: the agent reads only the file, and the status may not change again.
                match &written {
                    Some(_) => pending().await,
                    None => sleep(STATUS_RETRY_DELAY).await,
                }
            };
            tokio::select! {
                // Cancel-safe: a change that was not received remains marked as new.
                changed = changes.changed() => if changed.is_err() {
                    return;
                },
                () = retry => {}
            }
            sleep(STATUS_WRITE_DELAY).await;
            changes.mark_unchanged();
        }
    }

    /// Writes the status of an MPS host that has stopped.
    pub(crate) fn write_stopped_status(&self) {
        let error = Some("the MPS host has stopped".to_owned());
        self.write_status(&MpsHostStatus { pid: 0, error, ..self.status() });
    }

    /// Replaces the status file. Returns whether the write succeeded.
    fn write_status(&self, status: &MpsHostStatus) -> bool {
        let path = self.context.paths.status();
        let written = serde_json::to_vec(status).map_err(io::Error::other).and_then(|text| replace_file(&path, &text));
        if let Err(error) = &written {
            tracing::error!(path = %path.display(), %error, "failed to write status");
        }
        written.is_ok()
    }

    /// Answers a request of the agent.
    pub(crate) async fn answer_request(&self, request: Request) -> Reply {
        let answer = match request {
            Request::Status => Ok(Reply::Status(self.status())),
            Request::Await { allocation, timeout_ms } => {
                self.wait_until_ready(&allocation, Duration::from_millis(timeout_ms)).await
            }
            Request::Terminate { device, pid } => self.terminate(device, pid).await,
        };
        answer.unwrap_or_else(|reason| Reply::Error { message: reason.to_string() })
    }

    async fn terminate(&self, device: String, pid: u32) -> Result<Reply, NotReady> {
        let process = self.processes.borrow().get(&device).map(|supervised| Rc::clone(&supervised.process));
        let problem = || "no MPS daemon is running".to_owned();
        let process = process.ok_or_else(|| NotReady::Process { device: device.clone(), problem: problem() })?;
        process.request(Request::Terminate { device, pid }).await
    }

    /// Waits until the allocation's door would admit clients, even if the process of its device is
    /// restarted meanwhile.
    async fn wait_until_ready(&self, allocation: &str, within: Duration) -> Result<Reply, NotReady> {
        let mut changes = self.context.subscribe_to_status_changes();
        let until = Instant::now() + within;
        loop {
            let reason = match self.find_process(allocation) {
                Ok(process) => {
                    let left = until.saturating_duration_since(Instant::now()).as_millis();
                    let timeout_ms = u64::try_from(left).unwrap_or(u64::MAX);
                    let request = Request::Await { allocation: allocation.to_owned(), timeout_ms };
                    match timeout_at(until + ANSWER_GRACE, process.request(request)).await {
                        Ok(Ok(reply)) => return Ok(reply),
                        Ok(Err(reason)) => reason,
                        Err(_) => {
                            let problem = "the process of this device did not answer in time".to_owned();
                            return Err(NotReady::Process { device: process.device.clone(), problem });
                        }
                    }
                }
                Err(reason) => reason,
            };
            match timeout_at(until, changes.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Err(reason),
            }
        }
    }

    /// Returns the process that serves the allocation's door.
    fn find_process(&self, allocation: &str) -> Result<Rc<DeviceProcess>, NotReady> {
        let device = self.desired.borrow().allocations.get(allocation).map(|found| found.device.clone());
        let processes = self.processes.borrow();
        if let Some(supervised) = device.and_then(|device| processes.get(&device)) {
            return Ok(Rc::clone(&supervised.process));
        }
        let allocation = allocation.to_owned();
        Err(match self.desired_error.borrow().as_ref() {
            Some(error) => NotReady::DesiredFailed { allocation, error: error.to_string() },
            None => NotReady::Unknown(allocation),
        })
    }
}

/// Returns the part of each device that has a daemon or an allocation.
fn split_by_device(desired: &Desired) -> BTreeMap<String, Desired> {
    let mut parts: BTreeMap<String, Desired> = BTreeMap::new();
    for (device, daemon) in &desired.daemons {
        parts.entry(device.clone()).or_insert_with(empty_part).daemons.insert(device.clone(), daemon.clone());
    }
    for (id, allocation) in &desired.allocations {
        let part = parts.entry(allocation.device.clone()).or_insert_with(empty_part);
        part.allocations.insert(id.clone(), allocation.clone());
    }
    parts
}

fn empty_part() -> Desired {
    Desired { version: FILE_FORMAT_VERSION, ..Desired::default() }
}
