//! Runs the daemon and the doors of a device as the agent desires, and reports their state.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::compute_mode;
use super::context::HostContext;
use super::daemon::Device;
use super::daemon::lifecycle::stop_earlier_daemon;
use super::diff::{self, DesiredChanges};
use super::door::Door;
use super::error::{NotReady, TerminateError};
use super::protocol::TerminateResult;
use super::wire::{Allocation, Desired, FILE_FORMAT_VERSION, MpsHostStatus, Reply, Request};

/// Interval at which a failed search for processes of an earlier daemon is repeated.
const SEARCH_RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// The daemon and the doors of a device.
pub(crate) struct Reconciler {
    context: Rc<HostContext>,
    desired: RefCell<Desired>,
    /// Hash of the desired state that was most recently applied.
    applied: RefCell<String>,
    devices: RefCell<BTreeMap<String, SupervisedDevice>>,
    doors: RefCell<BTreeMap<String, Rc<Door>>>,
    /// Doors that could not be opened or restored.
    door_errors: RefCell<BTreeMap<String, io::Error>>,
}

/// A device and the task that supervises its daemon. [`Reconciler::stop`] removes the task and
/// waits for it.
struct SupervisedDevice {
    device: Rc<Device>,
    task: Option<JoinHandle<()>>,
}

impl Reconciler {
    pub(crate) fn new(context: Rc<HostContext>) -> Self {
        Self {
            context,
            desired: RefCell::new(Desired { version: FILE_FORMAT_VERSION, ..Desired::default() }),
            applied: RefCell::default(),
            devices: RefCell::default(),
            doors: RefCell::default(),
            door_errors: RefCell::default(),
        }
    }

    /// Retries to open doors that could not be opened, for example because this process had no free
    /// descriptor.
    pub(crate) fn retry_failed_doors(&self) {
        let failed: Vec<String> = self.door_errors.borrow().keys().cloned().collect();
        for id in failed {
            let allocation = self.desired.borrow().allocations.get(&id).cloned();
            if let Some(allocation) = allocation {
                self.open_door_or_set_limits(&id, &allocation);
                self.context.notify_status_change();
            }
        }
    }

    /// Starts, stops and changes daemons and doors as the new desired state requires.
    pub(crate) fn apply_desired(&self, new: Desired) {
        let changes = diff::desired_changes_between(&self.desired.borrow(), &new);
        let hash = new.hash();
        if changes != DesiredChanges::default() {
            let DesiredChanges { close, stop, run, open, limit } = &changes;
            tracing::info!(desired = hash, ?close, ?stop, ?run, ?open, ?limit, "applying the desired state");
        }
        for id in &changes.close {
            self.door_errors.borrow_mut().remove(id);
            if let Some(door) = self.doors.borrow_mut().remove(id) {
                door.close();
            }
        }
        for device in &changes.stop {
            if let Some(supervised) = self.devices.borrow().get(device) {
                supervised.device.set_desired_daemon(None);
            }
        }
        for device in &changes.run {
            self.supervised_device(device).set_desired_daemon(new.daemons.get(device).cloned());
        }
        for id in changes.open.iter().chain(&changes.limit) {
            if let Some(allocation) = new.allocations.get(id) {
                self.open_door_or_set_limits(id, allocation);
            }
        }
        *self.desired.borrow_mut() = new;
        *self.applied.borrow_mut() = hash;
    }

    fn open_door_or_set_limits(&self, id: &str, allocation: &Allocation) {
        let open = self.doors.borrow().get(id).cloned();
        if let Some(door) = open {
            door.set_limits(allocation);
            return;
        }
        let device = self.supervised_device(&allocation.device);
        match Door::open(id, allocation, device, &self.context) {
            Ok(door) => {
                self.forget_door_error(id);
                self.doors.borrow_mut().insert(id.to_owned(), door);
            }
            Err(error) => self.record_door_error(id, error),
        }
    }

    /// Records that a door does not listen at its socket.
    fn record_door_error(&self, id: &str, error: io::Error) {
        let text = error.to_string();
        let before = self.door_errors.borrow_mut().insert(id.to_owned(), error);
        if before.is_none_or(|before| before.to_string() != text) {
            tracing::error!(allocation = id, error = text, "failed to open door");
            self.context.notify_status_change();
        }
    }

    /// Records that a door listens at its socket.
    fn forget_door_error(&self, id: &str) {
        if self.door_errors.borrow_mut().remove(id).is_some() {
            self.context.notify_status_change();
        }
    }

    /// Returns the device with this name. Starts the task that supervises the device's daemon
    /// unless that task is running. A door may exist before its daemon is desired.
    fn supervised_device(&self, name: &str) -> Rc<Device> {
        if let Some(supervised) = self.devices.borrow().get(name)
            && supervised.task.as_ref().is_some_and(|task| !task.is_finished())
        {
            return Rc::clone(&supervised.device);
        }
        let device = Device::new(name, Rc::clone(&self.context));
        let task = Some(tokio::task::spawn_local(Rc::clone(&device).supervise()));
        self.devices.borrow_mut().insert(name.to_owned(), SupervisedDevice { device: Rc::clone(&device), task });
        device
    }

    /// Cleans up after an earlier process of a device that has no daemon now: ends what is left of
    /// the earlier daemon, and restores the compute mode.
    pub(crate) async fn clean_up(&self, device: &str) {
        while let Err(error) = stop_earlier_daemon(device, &self.context.paths.pipe(device)).await {
            tracing::error!(device, %error, "failed to search for processes of an earlier MPS daemon; retrying");
            sleep(SEARCH_RETRY_INTERVAL).await;
        }
        if let Err(error) = compute_mode::restore_compute_mode(&self.context, device).await {
            tracing::error!(device, %error, "failed to restore a compute mode that an earlier MPS host changed");
        }
    }

    /// Restores door sockets that were removed, and drops devices that have neither a daemon nor a
    /// door.
    pub(crate) fn restore_sockets_and_drop_unused_devices(&self) {
        for (id, door) in self.doors.borrow().iter() {
            match door.restore_socket() {
                Ok(()) => self.forget_door_error(id),
                Err(error) => self.record_door_error(id, error),
            }
        }
        self.devices.borrow_mut().retain(|name, SupervisedDevice { device, task }| {
            let is_used =
                device.is_desired_or_stopping() || self.doors.borrow().values().any(|door| door.is_on_device(name));
            if !is_used && let Some(task) = task {
                task.abort();
            }
            is_used
        });
    }

    /// Closes all doors and stops all daemons concurrently. Each daemon has its own deadlines.
    pub(crate) async fn stop(&self) {
        for door in std::mem::take(&mut *self.doors.borrow_mut()).values() {
            door.close();
        }
        self.context.stopping.cancel();
        let tasks: Vec<(String, JoinHandle<()>)> = {
            let mut devices = self.devices.borrow_mut();
            let task =
                |(name, supervised): (&String, &mut SupervisedDevice)| Some((name.clone(), supervised.task.take()?));
            devices.iter_mut().filter_map(task).collect()
        };
        for (device, task) in tasks {
            if let Err(error) = task.await {
                tracing::error!(device, %error, "failed to supervise MPS daemon");
            }
        }
        self.devices.borrow_mut().clear();
    }

    /// Returns the current status. Lists each daemon until it has exited, even while this process
    /// stops.
    pub(crate) fn status(&self) -> MpsHostStatus {
        MpsHostStatus {
            version: FILE_FORMAT_VERSION,
            pid: std::process::id(),
            desired: self.applied.borrow().clone(),
            daemons: self
                .devices
                .borrow()
                .iter()
                .filter(|(_, supervised)| supervised.device.is_desired_or_stopping())
                .map(|(name, supervised)| (name.clone(), supervised.device.status()))
                .collect(),
            allocations: self.doors.borrow().iter().map(|(id, door)| (id.clone(), door.status())).collect(),
            error: None,
            door_errors: self.door_errors_by_device(),
        }
    }

    /// Returns why doors could not be opened or restored, by device.
    fn door_errors_by_device(&self) -> BTreeMap<String, String> {
        let desired = self.desired.borrow();
        let mut by_device: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (id, error) in &*self.door_errors.borrow() {
            if let Some(allocation) = desired.allocations.get(id) {
                let error = open_door_error(id, error).to_string();
                by_device.entry(allocation.device.clone()).or_default().push(error);
            }
        }
        by_device.into_iter().map(|(device, errors)| (device, errors.join("; "))).collect()
    }

    /// Answers a request of the agent.
    pub(crate) async fn answer_request(&self, request: Request) -> Reply {
        match request {
            Request::Status => Reply::Status(self.status()),
            Request::Await { allocation, timeout_ms } => {
                match timeout(Duration::from_millis(timeout_ms), self.wait_until_ready(&allocation)).await {
                    Ok(()) => Reply::Done,
                    Err(_) => match self.check_door_admits_clients(&allocation) {
                        // The allocation became ready after the time limit.
                        Ok(()) => Reply::Done,
                        Err(reason) => Reply::Error { message: reason.to_string() },
                    },
                }
            }
            Request::Terminate { device, pid } => match self.terminate(&device, pid).await {
                Ok(TerminateResult::Done) => Reply::Done,
                Ok(TerminateResult::NoContext) => Reply::NoContext,
                Err(error) => Reply::Error { message: error.to_string() },
            },
        }
    }

    /// Terminates a client's contexts through MPS.
    async fn terminate(&self, device: &str, pid: u32) -> Result<TerminateResult, TerminateError> {
        let supervised = self.devices.borrow().get(device).map(|supervised| Rc::clone(&supervised.device));
        supervised.ok_or_else(|| TerminateError::NoDaemon(device.to_owned()))?.terminate(pid).await
    }

    /// Waits until the allocation's door would admit clients.
    async fn wait_until_ready(&self, allocation: &str) {
        let mut changes = self.context.subscribe_to_status_changes();
        while self.check_door_admits_clients(allocation).is_err() && changes.changed().await.is_ok() {}
    }

    /// Checks whether the allocation's door would admit clients now.
    fn check_door_admits_clients(&self, allocation: &str) -> Result<(), NotReady> {
        if let Some(error) = self.door_errors.borrow().get(allocation) {
            return Err(open_door_error(allocation, error));
        }
        if let Some(door) = self.doors.borrow().get(allocation) {
            return door.check_door_admits_clients();
        }
        Err(NotReady::Unknown(allocation.to_owned()))
    }
}

fn open_door_error(allocation: &str, error: &io::Error) -> NotReady {
    NotReady::DoorFailed { allocation: allocation.to_owned(), error: error.to_string() }
}
