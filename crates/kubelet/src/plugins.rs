//! Serves resources and keeps them registered. One task watches the directory, and one task serves
//! each resource.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::directory::{
    Directory, DirectoryChange, DirectoryError, DirectoryLock, DirectoryWatch, PollIntervals, SocketId,
    generate_socket_name,
};
use crate::registration::{
    PluginObservation, RegisterError, RegistrationCause, RegistrationStep, next_registration_step, probe_own_socket,
    register,
};
use crate::resource::{Resource, ResourceName};
use crate::server::{CurrentResource, Session, StreamMode};

/// The resources to serve, by name.
type DesiredResources = BTreeMap<ResourceName, Arc<dyn Resource>>;

/// Configuration of a [`PluginServer`]: the kubelet's directory, delays and deadlines.
#[derive(Clone, Debug)]
pub struct PluginServerConfig {
    /// The kubelet's device plugin directory, an absolute path; see
    /// [`DEVICE_PLUGIN_DIRECTORY`](crate::DEVICE_PLUGIN_DIRECTORY).
    pub directory: PathBuf,
    /// Delays and deadlines.
    pub timings: PluginTimings,
}

impl PluginServerConfig {
    /// Returns a configuration with default timings.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), timings: PluginTimings::default() }
    }
}

/// Delays between attempts: each delay is twice the previous one, up to a maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// Delay after the first failure.
    pub first: Duration,
    /// Maximum delay.
    pub cap: Duration,
}

impl Backoff {
    /// Returns the delay after a failure, given the number of earlier failures.
    pub fn delay(self, failures: u32) -> Duration {
        let factor = 2_u32.saturating_pow(failures);
        self.first.saturating_mul(factor).min(self.cap)
    }
}

/// Delays and deadlines.
#[derive(Clone, Copy, Debug)]
pub struct PluginTimings {
    /// Delay between attempts to connect to a `kubelet.sock` without a listener. The kubelet
    /// listens shortly after it binds the socket, so the first delay is short.
    pub dial: Backoff,
    /// Delay after a registration that the kubelet refused or did not answer, and after a failure
    /// to serve. The maximum is less than 2 s, because pods wait for the resource.
    pub register: Backoff,
    /// Deadline for the kubelet's answer to a registration. The kubelet itself allows 10 s for
    /// connecting to the plugin.
    pub register_deadline: Duration,
    /// Delay before a registered plugin without a stream registers again. The delay doubles while
    /// the kubelet opens no stream.
    pub stream: Backoff,
    /// Maximum time to wait for the kubelet to disconnect after its stream ended.
    pub hang_up: Duration,
    /// Delay between a disconnection by the kubelet and the next registration with the same
    /// kubelet. Up to Kubernetes 1.36, a kubelet marks the resource's devices unhealthy after it
    /// disconnects, even if a new client already serves them.
    pub settle: Duration,
    /// Delay between attempts to lock the directory.
    pub lock: Duration,
    /// Interval between checks of a directory that inotify watches, in case an event was lost.
    pub poll_watched: Duration,
    /// Interval between checks of a directory without inotify.
    pub poll_unwatched: Duration,
}

impl Default for PluginTimings {
    fn default() -> Self {
        Self {
            dial: Backoff { first: Duration::from_millis(1), cap: Duration::from_millis(500) },
            register: Backoff { first: Duration::from_millis(100), cap: Duration::from_millis(1500) },
            register_deadline: Duration::from_secs(15),
            stream: Backoff { first: Duration::from_secs(2), cap: Duration::from_secs(30) },
            hang_up: Duration::from_secs(1),
            settle: Duration::from_millis(50),
            lock: Duration::from_millis(200),
            poll_watched: Duration::from_secs(10),
            poll_unwatched: Duration::from_millis(500),
        }
    }
}

/// The state of all plugins, for readiness and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PluginServerState {
    /// State of the directory.
    pub directory: DirectoryState,
    /// State of each resource, including removed resources that still have a stream.
    pub resources: BTreeMap<ResourceName, ResourceState>,
}

impl PluginServerState {
    /// Returns whether this process has locked the directory, and the kubelet has an open stream of
    /// every resource that is not ending.
    pub fn is_ready(&self) -> bool {
        let has_it =
            |resource: &ResourceState| matches!(resource.phase, ResourcePhase::Streaming | ResourcePhase::Ending);
        self.directory == DirectoryState::Held && self.resources.values().all(has_it)
    }
}

/// State of the device plugin directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DirectoryState {
    /// The directory has not been opened yet.
    #[default]
    Opening,
    /// Another process has locked the directory. This process waits for the lock.
    HeldByAnother,
    /// This process has locked the directory.
    Held,
    /// Opening or locking the directory failed. The value is the error and its causes.
    Failed(String),
}

/// The state of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceState {
    /// Phase of the resource.
    pub phase: ResourcePhase,
    /// Name of the resource's socket in the directory.
    pub socket: Option<String>,
    /// Number of open `ListAndWatch` streams.
    pub streams: usize,
    /// Number of registrations that the kubelet accepted.
    pub registrations: u64,
    /// Number of failures to serve or register the resource, or to recreate its socket.
    pub failures: u64,
    /// Number of registrations that the plugin repeated because the kubelet opened no stream, or
    /// ended its stream without restarting.
    pub streamless: u64,
    /// The last error and its causes. A successful registration, and recreating the socket, clear
    /// the field.
    pub error: Option<String>,
}

/// Phase of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ResourcePhase {
    /// The resource has no socket that answers. For example, no `kubelet.sock` exists.
    #[default]
    WaitingForKubelet,
    /// The resource's socket answers.
    Serving,
    /// The kubelet accepted the registration, and has no open stream of the devices.
    Registered,
    /// The kubelet has an open stream of the devices.
    Streaming,
    /// The resource was removed or the server is stopping, and the resource's connections are
    /// ending.
    Ending,
}

/// Serves resources to the kubelet until this value is dropped.
pub struct PluginServer {
    wanted: watch::Sender<DesiredResources>,
    run: watch::Sender<TaskCommand>,
    state: watch::Receiver<PluginServerState>,
    manager: AbortOnDropHandle<()>,
}

/// A command to a task: serve, or end for one of two reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskCommand {
    Serve,
    /// End, because the resource was removed.
    Remove,
    /// End, because this process ends or the directory was replaced. Another task or process will
    /// serve the resource.
    Shutdown,
}

impl PluginServer {
    /// Starts the server without resources. Must be called within a tokio runtime with I/O and
    /// time.
    ///
    /// The server retries after temporary problems, such as another serving process or a missing
    /// directory. The server's state reports these problems.
    ///
    /// # Errors
    /// Returns [`DirectoryError`] if the path of the directory is invalid.
    pub fn start(config: &PluginServerConfig) -> Result<Self, DirectoryError> {
        let directory = Directory::new(&config.directory)?;
        let (wanted, wants) = watch::channel(DesiredResources::new());
        let (run, runs) = watch::channel(TaskCommand::Serve);
        let (state, states) = watch::channel(PluginServerState::default());
        let manager = PluginManager { directory, timings: config.timings, wanted: wants, run: runs, state };
        Ok(Self { wanted, run, state: states, manager: AbortOnDropHandle::new(tokio::spawn(manager.run())) })
    }

    /// Replaces the set of resources. Registers each new resource, and ends the stream of each
    /// removed resource. A new resource with the name of a served resource replaces that resource
    /// in the open stream. If its options differ, the plugin registers again.
    pub fn set(&self, resources: BTreeMap<ResourceName, Arc<dyn Resource>>) {
        self.wanted.send_replace(resources);
    }

    /// Returns a receiver of the state.
    pub fn state(&self) -> watch::Receiver<PluginServerState> {
        self.state.clone()
    }

    /// Ends all streams and releases the directory. Waits at most twice [`PluginTimings::hang_up`]
    /// for the kubelet to disconnect.
    pub async fn shutdown(self) {
        self.run.send_replace(TaskCommand::Shutdown);
        if let Err(error) = self.manager.await {
            tracing::error!(%error, "device plugin manager failed");
        }
    }

    /// Does the same as [`shutdown`](Self::shutdown), for callers that have only a reference.
    pub async fn stop(&self) {
        self.run.send_replace(TaskCommand::Shutdown);
        // The manager drops the sender of the state when it ends.
        let mut states = self.state.clone();
        while states.changed().await.is_ok() {}
    }
}

/// Formats an error and its causes in one line.
fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

/// The task that starts and ends the task of each resource.
struct PluginManager {
    directory: Directory,
    timings: PluginTimings,
    wanted: watch::Receiver<DesiredResources>,
    run: watch::Receiver<TaskCommand>,
    state: watch::Sender<PluginServerState>,
}

/// Waits until a command ends the task. Cancel-safe, because `wait_for` is.
async fn wait_until_stopped(run: &mut watch::Receiver<TaskCommand>) {
    // An error means that the sender was dropped. In this case, the task must also end.
    let _ = run.wait_for(|run| *run != TaskCommand::Serve).await;
}

impl PluginManager {
    async fn run(mut self) {
        while let Some(lock) = self.acquire_lock().await {
            self.serve_until_shutdown(&lock).await;
            if *self.run.borrow() != TaskCommand::Serve {
                break;
            }
            tracing::warn!(directory = %self.directory.path().display(), "device plugin directory was replaced; restarting in the new directory");
        }
    }

    fn publish(&self, now: DirectoryState) {
        self.state.send_if_modified(|state| {
            let changed = state.directory != now;
            if changed {
                match &now {
                    DirectoryState::HeldByAnother => {
                        tracing::warn!("another process uses the device plugin directory; waiting for it to exit");
                    }
                    DirectoryState::Failed(error) => {
                        tracing::error!(%error, "failed to use the device plugin directory");
                    }
                    DirectoryState::Held | DirectoryState::Opening => {
                        tracing::debug!(state = ?now, "device plugin directory changed state");
                    }
                }
                state.directory = now;
            }
            changed
        });
    }

    /// Waits until this process has locked the directory. Returns `None` on shutdown.
    async fn acquire_lock(&mut self) -> Option<DirectoryLock> {
        loop {
            match self.directory.try_lock() {
                Ok(Some(lock)) => {
                    self.publish(DirectoryState::Held);
                    return Some(lock);
                }
                Ok(None) => self.publish(DirectoryState::HeldByAnother),
                Err(error) => self.publish(DirectoryState::Failed(error_chain(&error))),
            }
            tokio::select! {
                () = wait_until_stopped(&mut self.run) => return None,
                () = tokio::time::sleep(self.timings.lock) => {}
            }
        }
    }

    /// Serves resources until shutdown, or until the path no longer refers to the locked directory.
    async fn serve_until_shutdown(&mut self, lock: &DirectoryLock) {
        let PluginTimings { poll_watched, poll_unwatched, .. } = self.timings;
        let mut directory =
            DirectoryWatch::start(&self.directory, PollIntervals { watched: poll_watched, unwatched: poll_unwatched });
        self.directory.remove_stale_sockets().await;
        let mut tasks = ResourceTasks {
            directory: self.directory.clone(),
            timings: self.timings,
            state: self.state.clone(),
            directory_changes: watch::channel(()).0,
            set: JoinSet::new(),
            names: HashMap::new(),
            running: BTreeMap::new(),
        };
        self.wanted.mark_changed();
        // Restart a failed task only after a delay: a task that always fails must not use a whole
        // core.
        let mut restart_at: Option<Instant> = None;
        loop {
            let pause = async {
                match restart_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            // All branches are cancel-safe, as their documentation says.
            let reconcile = tokio::select! {
                () = wait_until_stopped(&mut self.run) => break,
                changed = self.wanted.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    true
                }
                event = directory.changed() => {
                    if event == DirectoryChange::Gone || !lock.is_still_at(&self.directory) {
                        break;
                    }
                    tasks.directory_changes.send_replace(());
                    false
                }
                Some(end) = tasks.set.join_next_with_id() => {
                    let orderly = tasks.remove_ended(end);
                    if !orderly {
                        restart_at = Some(Instant::now() + self.timings.register.cap);
                    }
                    orderly
                }
                () = pause => {
                    restart_at = None;
                    true
                }
            };
            if reconcile {
                tasks.reconcile(&self.wanted.borrow_and_update());
            }
        }
        tasks.shutdown().await;
    }
}

/// The tasks of all resources.
struct ResourceTasks {
    directory: Directory,
    timings: PluginTimings,
    state: watch::Sender<PluginServerState>,
    directory_changes: watch::Sender<()>,
    set: JoinSet<()>,
    names: HashMap<Id, ResourceName>,
    running: BTreeMap<ResourceName, TaskHandle>,
}

/// The manager's handle to the task of one resource.
struct TaskHandle {
    resource: watch::Sender<Arc<dyn Resource>>,
    run: watch::Sender<TaskCommand>,
}

impl ResourceTasks {
    /// Starts the tasks of new resources, and ends the tasks of removed resources.
    fn reconcile(&mut self, wanted: &DesiredResources) {
        for (name, task) in &self.running {
            if !wanted.contains_key(name) {
                task.run.send_if_modified(|run| std::mem::replace(run, TaskCommand::Remove) != TaskCommand::Remove);
            }
        }
        for (name, resource) in wanted {
            if let Some(task) = self.running.get(name) {
                // The task of a removed resource may still be ending. The manager restarts the task
                // after its end.
                task.resource.send_if_modified(|served| {
                    let replaced = !Arc::ptr_eq(served, resource);
                    *served = Arc::clone(resource);
                    replaced
                });
                continue;
            }
            let (resource, served) = watch::channel(Arc::clone(resource));
            let (run, runs) = watch::channel(TaskCommand::Serve);
            self.state.send_modify(|state| {
                state.resources.insert(name.clone(), ResourceState::default());
            });
            let plugin = Plugin {
                name: name.clone(),
                directory: self.directory.clone(),
                timings: self.timings,
                served,
                run: runs,
                directory_changes: self.directory_changes.subscribe(),
                state: self.state.clone(),
            };
            let id = self.set.spawn(plugin.run()).id();
            self.names.insert(id, name.clone());
            self.running.insert(name.clone(), TaskHandle { resource, run });
        }
    }

    /// Removes an ended task. Returns whether the task ended without an error.
    fn remove_ended(&mut self, end: Result<(Id, ()), JoinError>) -> bool {
        let (id, failure) = match end {
            Ok((id, ())) => (id, None),
            Err(error) => (error.id(), Some(error)),
        };
        let Some(name) = self.names.remove(&id) else { return true };
        self.running.remove(&name);
        self.state.send_modify(|state| {
            state.resources.remove(&name);
        });
        if let Some(error) = failure {
            tracing::error!(resource = %name, %error, "device plugin task failed; restarting it");
            return false;
        }
        true
    }

    async fn shutdown(mut self) {
        for task in self.running.values() {
            task.run.send_replace(TaskCommand::Shutdown);
        }
        while let Some(end) = self.set.join_next_with_id().await {
            self.remove_ended(end);
        }
    }
}

/// The task that serves one resource.
struct Plugin {
    name: ResourceName,
    directory: Directory,
    timings: PluginTimings,
    served: CurrentResource,
    run: watch::Receiver<TaskCommand>,
    /// Changes when the directory has changed.
    directory_changes: watch::Receiver<()>,
    state: watch::Sender<PluginServerState>,
}

/// How a session ended.
enum SessionEnd {
    /// The task must end.
    Stop,
    /// Start a new session.
    Restart,
}

impl Plugin {
    fn publish(&self, change: impl FnOnce(&mut ResourceState)) {
        self.state.send_if_modified(|state| {
            let Some(shown) = state.resources.get_mut(&self.name) else { return false };
            let before = shown.clone();
            change(shown);
            *shown != before
        });
    }

    /// Records a failure, and logs it if it differs from the recorded failure.
    fn record_failure(&self, what: &'static str, error: &dyn std::error::Error) {
        let text = error_chain(error);
        let mut is_new = false;
        self.publish(|state| {
            is_new = state.error.as_ref() != Some(&text);
            state.failures += 1;
            state.error = Some(text.clone());
        });
        if is_new {
            tracing::warn!(resource = %self.name, error = text, "{what}; retrying");
        }
    }

    fn is_stopping(&self) -> bool {
        *self.run.borrow() != TaskCommand::Serve || self.run.has_changed().is_err()
    }

    async fn run(mut self) {
        let mut failures = 0;
        // Number of sessions since the last stream that ended because the kubelet had no open
        // stream.
        let mut streamless = 0;
        while let Some(kubelet) = self.wait_for_kubelet_socket().await {
            // Use a new socket name for each session: since Kubernetes 1.37, the kubelet
            // distinguishes streams by the path of their socket.
            let path = self.directory.path().join(generate_socket_name(&self.name));
            let started = Session::start(path, self.served.clone());
            let mut session = match started {
                Ok(session) => session,
                Err(error) => {
                    self.record_failure("failed to serve a device plugin", &error);
                    let delay = self.timings.register.delay(failures);
                    failures += 1;
                    self.wait_or_stop(delay).await;
                    continue;
                }
            };
            failures = 0;
            let outcome = self.run_session(&mut session, kubelet, &mut streamless).await;
            self.publish(|state| {
                state.phase = if matches!(outcome, SessionEnd::Stop) {
                    ResourcePhase::Ending
                } else {
                    ResourcePhase::WaitingForKubelet
                };
                state.socket = None;
                state.streams = 0;
            });
            let streams =
                if *self.run.borrow() == TaskCommand::Remove { StreamMode::EndWithEmptyList } else { StreamMode::End };
            session.close(streams, self.timings.hang_up).await;
            match outcome {
                SessionEnd::Stop => return,
                SessionEnd::Restart => self.wait_for_cleanup(kubelet).await,
            }
        }
    }

    /// Waits for a `kubelet.sock`. Returns `None` if the task must end.
    async fn wait_for_kubelet_socket(&mut self) -> Option<SocketId> {
        loop {
            self.directory_changes.mark_unchanged();
            if self.is_stopping() {
                return None;
            }
            if let Some(kubelet) = self.directory.kubelet_socket_id() {
                return Some(kubelet);
            }
            self.publish(|state| state.phase = ResourcePhase::WaitingForKubelet);
            // Both branches are cancel-safe: `changed` marks a value as seen only when it returns.
            tokio::select! {
                () = wait_until_stopped(&mut self.run) => return None,
                changed = self.directory_changes.changed() => changed.ok()?,
            }
        }
    }

    /// Waits for this delay, or until the task must end.
    async fn wait_or_stop(&mut self, delay: Duration) {
        tokio::select! {
            () = wait_until_stopped(&mut self.run) => {}
            () = tokio::time::sleep(delay) => {}
        }
    }

    /// Waits for [`PluginTimings::settle`], so that the disconnected kubelet can clean up the old
    /// stream. Returns early if another kubelet starts. A new kubelet can admit pods as early as 12
    /// ms after it starts to listen, and rejects pods that request unregistered resources.
    async fn wait_for_cleanup(&mut self, kubelet: SocketId) {
        let settled = tokio::time::Instant::now() + self.timings.settle;
        self.directory_changes.mark_unchanged();
        while self.directory.kubelet_socket_id() == Some(kubelet) && !self.is_stopping() {
            // The socket of a killed kubelet remains until the next kubelet removes it. The next
            // kubelet removes Cleave's socket before its predecessor's socket.
            tokio::select! {
                () = wait_until_stopped(&mut self.run) => return,
                () = tokio::time::sleep_until(settled) => return,
                changed = self.directory_changes.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Registers a session and supervises it until it ends.
    async fn run_session(&mut self, session: &mut Session, kubelet: SocketId, streamless: &mut u32) -> SessionEnd {
        if let Err(error) = probe_own_socket(session.path()).await {
            self.record_failure("Cleave's device plugin socket does not answer", &error);
            self.wait_or_stop(self.timings.register.cap).await;
            return SessionEnd::Restart;
        }
        let socket = session.path().file_name().map(|name| name.to_string_lossy().into_owned());
        self.publish(|state| {
            state.phase = ResourcePhase::Serving;
            state.socket = socket;
        });
        if let Some(outcome) = self.register_with_retries(session, kubelet).await {
            return outcome;
        }
        self.supervise_session(session, kubelet, streamless).await
    }

    /// Registers the session, and retries after failures. Returns `None` after a success.
    async fn register_with_retries(&mut self, session: &Session, kubelet: SocketId) -> Option<SessionEnd> {
        let (mut dials, mut refusals) = (0, 0);
        loop {
            self.directory_changes.mark_unchanged();
            if self.is_stopping() {
                return Some(SessionEnd::Stop);
            }
            if self.directory.kubelet_socket_id() != Some(kubelet) || !session.is_reachable() {
                return Some(SessionEnd::Restart);
            }
            let deadline = self.timings.register_deadline;
            let attempt = register(&self.directory, session.path(), &self.name, session.options(), deadline);
            // Dropping an attempt closes its connection, and the kubelet tolerates that. The other
            // futures only wait, so they are cancel-safe.
            let registered = tokio::select! {
                registered = attempt => registered,
                () = wait_until_stopped(&mut self.run) => continue,
                () = wait_until_registration_outdated(
                    &mut self.directory_changes,
                    &self.directory,
                    kubelet,
                    session,
                ) => continue,
            };
            let error = match registered {
                Ok(()) => {
                    self.publish(|state| {
                        state.phase = state.phase.max(ResourcePhase::Registered);
                        state.registrations += 1;
                        state.error = None;
                    });
                    tracing::info!(resource = %self.name, socket = %session.path().display(), "registered with the kubelet");
                    return None;
                }
                Err(error) => error,
            };
            let delay = if let RegisterError::Unanswered(_) = error {
                let delay = self.timings.dial.delay(dials);
                dials += 1;
                // Do not record early failures: the kubelet may not listen yet.
                if delay >= self.timings.register.first {
                    self.record_failure("failed to reach the kubelet", &error);
                }
                delay
            } else {
                let delay = self.timings.register.delay(refusals);
                refusals += 1;
                self.record_failure("failed to register with the kubelet", &error);
                delay
            };
            tokio::select! {
                () = wait_until_stopped(&mut self.run) => {}
                _ = self.directory_changes.changed() => {}
                () = tokio::time::sleep(delay) => {}
            }
        }
    }

    /// Supervises a registered session until the task must end or a new session must register.
    async fn supervise_session(
        &mut self,
        session: &mut Session,
        kubelet: SocketId,
        streamless: &mut u32,
    ) -> SessionEnd {
        let mut open = session.open_streams();
        let mut since = Instant::now();
        let mut was_open = false;
        loop {
            self.directory_changes.mark_unchanged();
            if self.is_stopping() {
                return SessionEnd::Stop;
            }
            let streams = *open.borrow_and_update();
            if streams > 0 {
                *streamless = 0;
            } else if was_open {
                since = Instant::now();
            }
            was_open = streams > 0;
            self.publish(|state| {
                state.streams = streams;
                state.phase = if streams > 0 { ResourcePhase::Streaming } else { ResourcePhase::Registered };
            });
            let options = self.served.borrow_and_update().options();
            let seen = PluginObservation {
                registered_with: kubelet,
                kubelet: self.directory.kubelet_socket_id(),
                reachable: session.is_reachable(),
                options_changed: options != session.options(),
                streamless_for: (streams == 0).then(|| since.elapsed()),
            };
            let mut check_again = None;
            match next_registration_step(&seen, self.timings.stream.delay(*streamless)) {
                RegistrationStep::Keep => {}
                RegistrationStep::CheckAgain(after) => check_again = Some(after),
                RegistrationStep::Rebind => match session.rebind() {
                    Ok(()) => {
                        tracing::warn!(resource = %self.name, socket = %session.path().display(), "recreated Cleave's deleted device plugin socket");
                        self.publish(|state| state.error = None);
                    }
                    Err(error) => {
                        self.record_failure("failed to recreate Cleave's device plugin socket", &error);
                        check_again = Some(self.timings.register.cap);
                    }
                },
                RegistrationStep::Register(cause) => {
                    if cause == RegistrationCause::NoStream {
                        *streamless = streamless.saturating_add(1);
                        self.publish(|state| state.streamless += 1);
                        tracing::warn!(resource = %self.name, "the kubelet does not watch Cleave's devices; registering again");
                    } else {
                        tracing::info!(resource = %self.name, ?cause, "registering again");
                    }
                    return SessionEnd::Restart;
                }
            }
            let timer = async {
                match check_again {
                    Some(after) => tokio::time::sleep(after).await,
                    None => std::future::pending().await,
                }
            };
            // Cancel-safe: each future only triggers another check.
            tokio::select! {
                () = wait_until_stopped(&mut self.run) => {}
                _ = self.directory_changes.changed() => {}
                _ = open.changed() => {}
                replaced = self.served.changed() => {
                    if replaced.is_err() {
                        return SessionEnd::Stop;
                    }
                }
                () = timer => {}
            }
        }
    }
}

/// Waits until a change of the directory makes the current registration attempt outdated.
async fn wait_until_registration_outdated(
    changes: &mut watch::Receiver<()>,
    directory: &Directory,
    kubelet: SocketId,
    session: &Session,
) {
    while changes.changed().await.is_ok() {
        if directory.kubelet_socket_id() != Some(kubelet) || !session.is_reachable() {
            return;
        }
    }
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_cap() {
        let backoff = Backoff { first: Duration::from_millis(100), cap: Duration::from_millis(1500) };
        let delays: Vec<_> = [0, 1, 2, 3, 4, 40, u32::MAX].map(|failures| backoff.delay(failures).as_millis()).into();
        assert_eq!(delays, [100, 200, 400, 800, 1500, 1500, 1500]);
    }

    #[test]
    fn a_refused_registration_is_retried_within_2_s() {
        assert!(PluginTimings::default().register.cap < Duration::from_secs(2));
    }

    #[test]
    fn the_server_is_ready_when_the_kubelet_streams_every_resource() {
        let name = |name: &str| ResourceName::parse(name).expect("a name");
        let streaming = ResourceState { phase: ResourcePhase::Streaming, ..ResourceState::default() };
        let mut state = PluginServerState { directory: DirectoryState::Held, ..PluginServerState::default() };
        state.resources.insert(name("a/b"), streaming.clone());
        assert!(state.is_ready());
        state.resources.insert(name("a/c"), ResourceState { phase: ResourcePhase::Registered, ..streaming.clone() });
        assert!(!state.is_ready());
        state.resources.insert(name("a/c"), streaming);
        state.directory = DirectoryState::HeldByAnother;
        assert!(!state.is_ready());
    }
}
