//! The relay serves the agent's device plugins to the kubelet, and continues while the agent is
//! absent.
//!
//! As soon as a resource's stream ends, the kubelet regards the resource's devices as unhealthy and
//! rejects new pods that request them. Therefore the streams are served by the relay, a process
//! that continues during restarts and upgrades of the agent. To the agent, the relay is a kubelet:
//! it has a directory with a `kubelet.sock`, accepts registrations and opens streams. To the
//! kubelet, the relay is the device plugin.
//!
//! While the agent is absent, the kubelet keeps the last device lists, and the relay holds the
//! kubelet's calls until the agent has registered again. [`RelayTimings`] limits both.
//!
//! ```text
//!          disconnects                  absent for too long
//! Present ─────────────▶ Absent: calls wait ───────────────▶ Lost: calls fail, devices Unhealthy
//!    ▲                      │ registers                       │ registers
//!    └──────────────────────┴─────────────────────────────────┘
//! ```

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use crate::connections::Connections;
use crate::directory::{Directory, DirectoryChange, DirectoryError, DirectoryWatch, KUBELET_SOCKET, PollIntervals};
use crate::plugins::{DirectoryState, PluginServer, PluginServerConfig, ResourcePhase};
use crate::proto::DEVICE_PLUGIN_VERSION;
use crate::proto::v1beta1 as wire;
use crate::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::proto::v1beta1::registration_server::{Registration, RegistrationServer};
use crate::registration::unix_endpoint;
use crate::resource::{
    ContainerResponse, DeviceList, PluginOptions, PreferredRequest, Refusal, Resource, ResourceName, parse_list,
};
use crate::supervisor::supervisor_runs;

/// Maximum size of a message from the agent, in bytes. A list of 20,000 devices fits in this size.
const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// Name of a new `kubelet.sock` before it replaces the old socket.
const NEW_SOCKET_NAME: &str = "kubelet.new";

/// Interval between checks whether a supervisor of the absent agent still runs.
const SUPERVISOR_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Configuration of the relay.
#[derive(Clone, Debug)]
pub struct RelayConfig {
    /// The kubelet's directory.
    pub kubelet: PluginServerConfig,
    /// The agent's device plugin directory. The relay creates it.
    pub agent_directory: PathBuf,
    /// Delays and deadlines.
    pub timings: RelayTimings,
}

/// Delays and deadlines of the relay.
#[derive(Clone, Copy, Debug)]
pub struct RelayTimings {
    /// Deadline for the first answers of a plugin that registers.
    pub connect: Duration,
    /// Deadline for the kubelet to open the stream of a resource that registers. After the
    /// deadline, the agent registers again. This deadline is shorter than the agent's own deadline.
    pub stream: Duration,
    /// Maximum time for an answer of the connected agent to a call for the admission of a pod. The
    /// agent answers within milliseconds, or within 2 s if it waits for the pod. An agent that has
    /// not answered after this time hangs, and would not answer later either. The kubelet has no
    /// deadline of its own for these calls. It admits pods one by one, so a held call delays all
    /// pods of the node.
    pub answer: Duration,
    /// Time without the agent after which the agent counts as lost: the relay reports the agent's
    /// devices as unhealthy, and refuses calls for admissions. The kubelet permanently rejects a
    /// pod whose call is refused, and a pod that requests unhealthy devices.
    ///
    /// While the relay holds a call, the kubelet restarts no container and admits no other pod. If
    /// the agent's container has ended, the kubelet therefore starts the next agent only after the
    /// call. A longer wait would not help the held pod, and would delay the next agent. The wait
    /// helps only if the kubelet is already starting the container of the next agent.
    pub absent: Duration,
    /// Like `absent`, but while a supervisor of the agent runs. The next agent then starts without
    /// the kubelet, so a longer wait helps the held pod. The agent restarts within a tenth of a
    /// second on an idle node. The rest of this time is for nodes that starve their processes of
    /// CPU or disk. A supervisor whose agent crashes repeatedly exits after 20 restarts.
    pub supervised: Duration,
    /// Maximum time for which the relay holds a call of `PreStartContainer`. This call delays only
    /// one container, which the kubelet starts again later. This maximum is longer than the agent's
    /// deadline of 25 s, and shorter than the kubelet's deadline of 30 s.
    pub start: Duration,
    /// Time without the agent after which the relay removes the agent's resources, as a kubelet
    /// does.
    pub removed: Duration,
}

impl Default for RelayTimings {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            stream: Duration::from_secs(10),
            answer: Duration::from_secs(10),
            absent: Duration::from_secs(10),
            supervised: Duration::from_secs(30),
            start: Duration::from_secs(28),
            removed: Duration::from_secs(360),
        }
    }
}

impl RelayTimings {
    /// Returns the limits of a call for the admission of a pod. The total is the longest absence
    /// and one answer, so that an agent that returns at the last moment can still answer, and an
    /// agent that disconnects again and again does not block the kubelet.
    fn admission_limits(&self) -> CallLimits {
        CallLimits { answer: self.answer, total: self.supervised + self.answer, awaits_lost_agent: false }
    }

    /// Returns the limits of a call of `PreStartContainer`.
    fn start_limits(&self) -> CallLimits {
        CallLimits { answer: self.start, total: self.start, awaits_lost_agent: true }
    }
}

/// How long a call of the kubelet may take.
#[derive(Clone, Copy, Debug)]
struct CallLimits {
    /// Maximum time for one answer of the agent.
    answer: Duration,
    /// Maximum time of the call. Calls that begin during one absence share this time, so that
    /// together they do not block the kubelet for longer than one call.
    total: Duration,
    /// Whether the call waits for an agent that counts as lost.
    awaits_lost_agent: bool,
}

/// Why the relay cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// A directory cannot be used.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The agent's directory, or the socket in that directory, cannot be created.
    #[error("failed to serve the agent in {directory}")]
    Serve {
        /// Path of the directory.
        directory: PathBuf,
        /// Cause of the failure.
        #[source]
        source: io::Error,
    },
}

/// Relays the agent's resources to the kubelet until `stop` completes.
///
/// # Errors
/// Returns [`RelayError`] if a directory cannot be used.
pub async fn run_relay(config: RelayConfig, stop: impl Future<Output = ()>) -> Result<(), RelayError> {
    let RelayConfig { kubelet, agent_directory, timings } = config;
    let directory = Directory::new(&agent_directory)?;
    let watched = Directory::new(&kubelet.directory)?;
    let serve_error = |source| RelayError::Serve { directory: agent_directory.clone(), source };
    std::fs::create_dir_all(directory.path()).map_err(serve_error)?;
    // Only root may register.
    std::fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).map_err(serve_error)?;
    let plugins = PluginServer::start(&kubelet)?;
    let relay = Arc::new(Relay { directory, timings, plugins, endpoints: Mutex::default() });
    let intervals = PollIntervals { watched: kubelet.timings.poll_watched, unwatched: kubelet.timings.poll_unwatched };
    tokio::pin!(stop);
    // Wait for the lock: a second relay must not replace the first relay's socket, because the
    // agent is registered with the first relay.
    let mut states = relay.plugins.state();
    let first = async {
        let held = states.wait_for(|state| state.directory == DirectoryState::Held);
        held.await.map(drop)
    };
    tokio::select! {
        () = &mut stop => {
            relay.plugins.stop().await;
            return Ok(());
        }
        _ = first => {}
    }
    let mut server = Some(relay.serve_registrations().map_err(serve_error)?);
    let mut kubelet = watched.kubelet_socket_id();
    'directory: loop {
        let mut changes = DirectoryWatch::start(&watched, intervals);
        loop {
            // If the kubelet's socket has changed, serve at a new socket, which shows the agent
            // that the kubelet has restarted.
            let now = watched.kubelet_socket_id();
            if now != kubelet {
                match relay.serve_registrations() {
                    Ok(next) => (server, kubelet) = (Some(next), now),
                    Err(error) => {
                        tracing::error!(%error, "failed to serve the agent at a new socket; retrying");
                        tokio::time::sleep(intervals.unwatched).await;
                        continue;
                    }
                }
            }
            while watched.kubelet_socket_id() == kubelet {
                tokio::select! {
                    () = &mut stop => break 'directory,
                    change = changes.changed() => if change == DirectoryChange::Gone {
                        tokio::time::sleep(intervals.unwatched).await;
                        continue 'directory;
                    },
                }
            }
        }
    }
    // End the streams through a reference: `Arc::into_inner` would require that the tasks of all
    // endpoints have ended.
    relay.plugins.stop().await;
    drop(server);
    Ok(())
}

/// A resource that the agent has registered.
struct Endpoint {
    resource: Arc<RelayedResource>,
    /// Distinguishes this registration from later registrations.
    number: u64,
    /// Name of the agent's socket.
    socket: String,
    /// Reads the agent's stream.
    _follower: Option<AbortOnDropHandle<()>>,
}

#[derive(Default)]
struct Endpoints {
    next: u64,
    by_name: BTreeMap<ResourceName, Endpoint>,
}

struct Relay {
    directory: Directory,
    timings: RelayTimings,
    plugins: PluginServer,
    endpoints: Mutex<Endpoints>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running registration server. Dropping this value ends the server.
struct RunningServer {
    _connections: Connections,
    _listener: AbortOnDropHandle<()>,
    _server: AbortOnDropHandle<()>,
}

impl Relay {
    /// Serves registrations on a new `kubelet.sock` in the agent's directory.
    fn serve_registrations(self: &Arc<Self>) -> io::Result<RunningServer> {
        // Bind the new socket at a temporary path and rename it, so that the old socket works until
        // then.
        let path = self.directory.path().join(KUBELET_SOCKET);
        let new = self.directory.path().join(NEW_SOCKET_NAME);
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let (connections, incoming) = Connections::new();
        let listener = UnixListener::bind(&new)?;
        std::fs::rename(&new, &path)?;
        let listener = connections.accept_from(listener);
        let service = RegistrationServer::new(RegistrationService(Arc::clone(self)));
        let server = tonic::transport::Server::builder().serve_with_incoming(service, incoming);
        Ok(RunningServer {
            _connections: connections,
            _listener: listener,
            _server: AbortOnDropHandle::new(tokio::spawn(async move {
                if let Err(error) = server.await {
                    tracing::error!(error = &error as &dyn std::error::Error, "registration server failed");
                }
            })),
        })
    }

    /// Connects to a plugin of the agent, unless the plugin is already connected. Serves the
    /// plugin's resource to the kubelet, and waits until the kubelet opens its stream.
    async fn accept_registration(self: &Arc<Self>, request: wire::RegisterRequest) -> Result<(), Status> {
        if request.version != DEVICE_PLUGIN_VERSION {
            return Err(Status::invalid_argument(format!("unsupported version {:?}", request.version)));
        }
        let name =
            ResourceName::parse(&request.resource_name).map_err(|error| Status::invalid_argument(error.to_string()))?;
        if Path::new(&request.endpoint).file_name() != Some(OsStr::new(&request.endpoint)) {
            return Err(Status::invalid_argument("the endpoint is not the name of a socket in the directory"));
        }
        if !self.is_connected(&name, &request.endpoint) {
            let path = self.directory.path().join(&request.endpoint);
            let connected = tokio::time::timeout(self.timings.connect, connect_to_agent(&path)).await;
            let connected = connected.map_err(|_| Status::deadline_exceeded("the plugin did not answer"))??;
            self.replace_resource(&name, request.endpoint, connected);
        }
        self.wait_until_streaming(&name).await
    }

    /// Returns whether the relay has an open stream from this socket.
    fn is_connected(&self, name: &ResourceName, socket: &str) -> bool {
        let endpoints = lock(&self.endpoints);
        endpoints
            .by_name
            .get(name)
            .is_some_and(|endpoint| endpoint.socket == socket && endpoint.resource.agent.borrow().client().is_some())
    }

    /// Serves a resource with this connection. If the resource is already served with the same
    /// options, the kubelet's stream continues.
    fn replace_resource(self: &Arc<Self>, name: &ResourceName, socket: String, connected: PluginConnection) {
        let PluginConnection { client, options, devices, stream } = connected;
        let mut endpoints = lock(&self.endpoints);
        let number = endpoints.next;
        endpoints.next += 1;
        let earlier = endpoints.by_name.remove(name).map(|endpoint| endpoint.resource);
        let resource = match earlier {
            Some(resource) if resource.options == options => resource,
            earlier => Arc::new(RelayedResource {
                name: name.clone(),
                options,
                devices: watch::Sender::new(Arc::clone(&devices)),
                // Share the connection state, so that calls waiting at the replaced resource use
                // the new connection.
                agent: earlier.map_or_else(Arc::default, |resource| Arc::clone(&resource.agent)),
                timings: self.timings,
            }),
        };
        resource.devices.send_replace(devices);
        resource.agent.send_replace(AgentState::Present(AgentClient { number, client }));
        let follower =
            tokio::spawn(Arc::clone(self).forward_device_lists(name.clone(), number, Arc::clone(&resource), stream));
        let endpoint = Endpoint { resource, number, socket, _follower: Some(AbortOnDropHandle::new(follower)) };
        endpoints.by_name.insert(name.clone(), endpoint);
        self.publish_resources(&endpoints);
        tracing::info!(resource = %name, "the agent registered a resource");
    }

    /// Passes the current resources to the plugin server.
    fn publish_resources(&self, endpoints: &Endpoints) {
        let resource = |endpoint: &Endpoint| Arc::clone(&endpoint.resource) as Arc<dyn Resource>;
        self.plugins.set(endpoints.by_name.iter().map(|(name, endpoint)| (name.clone(), resource(endpoint))).collect());
    }

    async fn wait_until_streaming(&self, name: &ResourceName) -> Result<(), Status> {
        let mut states = self.plugins.state();
        let streams =
            states.wait_for(|state| state.resources.get(name).is_some_and(|one| one.phase == ResourcePhase::Streaming));
        match tokio::time::timeout(self.timings.stream, streams).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(Status::unavailable("the relay is stopping")),
            Err(_) => Err(Status::unavailable(format!(
                "the kubelet did not call ListAndWatch for {} within {} s",
                name.as_str(),
                self.timings.stream.as_secs_f64()
            ))),
        }
    }

    /// Forwards the agent's device lists until the stream ends. Later records that the agent is
    /// lost, and finally removes the resource, unless the agent registers again. Removes the
    /// resource immediately if the last list was empty.
    async fn forward_device_lists(
        self: Arc<Self>,
        name: ResourceName,
        number: u64,
        resource: Arc<RelayedResource>,
        mut stream: Streaming<wire::ListAndWatchResponse>,
    ) {
        loop {
            let list = match stream.message().await {
                Ok(Some(list)) => parse_list(list),
                Ok(None) | Err(_) => break,
            };
            match list {
                Ok(list) => {
                    resource.devices.send_replace(Arc::new(list));
                }
                Err(error) => {
                    tracing::error!(resource = %name, %error, "ignored a device list of the agent");
                }
            }
        }
        // Drop the stream: an undropped stream would keep the connection open, and the agent would
        // wait for the disconnection.
        drop(stream);
        resource.disconnect(number);
        // An agent that removes a resource ends its stream with an empty list.
        let ended = Instant::now();
        if !resource.devices.borrow().is_empty() {
            tracing::warn!(resource = %name, "the agent is absent; its devices remain available");
            self.wait_until_lost(ended).await;
            self.record_loss(&name, number);
            tokio::time::sleep_until(ended + self.timings.removed).await;
        }
        self.remove_resource(&name, number);
    }

    /// Waits until an agent that disconnected at `ended` counts as lost: after
    /// [`RelayTimings::absent`], or after [`RelayTimings::supervised`] if a supervisor runs until
    /// then.
    async fn wait_until_lost(&self, ended: Instant) {
        let RelayTimings { absent, supervised, .. } = self.timings;
        tokio::time::sleep_until(ended + absent).await;
        let end = ended + supervised;
        while Instant::now() < end && supervisor_runs(self.directory.path()) {
            tokio::time::sleep_until(end.min(Instant::now() + SUPERVISOR_POLL_INTERVAL)).await;
        }
    }

    /// Records that the agent of a resource is lost, unless the resource has been registered again:
    /// fails held calls, and reports the devices as unhealthy.
    fn record_loss(&self, name: &ResourceName, number: u64) {
        let endpoints = lock(&self.endpoints);
        if let Some(Endpoint { resource, .. }) = endpoints.by_name.get(name).filter(|one| one.number == number) {
            tracing::warn!(resource = %name, "the agent is still absent; its devices are unhealthy");
            resource.agent.send_if_modified(AgentState::lose);
            resource.devices.send_modify(|list| *list = Arc::new(mark_all_unhealthy(list)));
        }
    }

    /// Removes a resource, unless it has been registered again.
    fn remove_resource(&self, name: &ResourceName, number: u64) {
        let mut endpoints = lock(&self.endpoints);
        if endpoints.by_name.get(name).is_some_and(|endpoint| endpoint.number == number) {
            tracing::info!(resource = %name, "removed a resource");
            // Publish the change before dropping the handle: the drop aborts the calling task.
            let removed = endpoints.by_name.remove(name);
            self.publish_resources(&endpoints);
            drop(removed);
        }
    }
}

/// Returns the list with every device marked unhealthy.
fn mark_all_unhealthy(list: &DeviceList) -> DeviceList {
    list.iter().cloned().map(|device| crate::resource::Device { healthy: false, ..device }).collect()
}

/// A connection to a plugin of the agent.
struct PluginConnection {
    client: DevicePluginClient<Channel>,
    options: PluginOptions,
    devices: Arc<DeviceList>,
    stream: Streaming<wire::ListAndWatchResponse>,
}

/// Makes the kubelet's first calls: reads the options, opens the stream, and reads the first list.
async fn connect_to_agent(socket: &Path) -> Result<PluginConnection, Status> {
    let endpoint = socket.to_str().and_then(unix_endpoint);
    let endpoint = endpoint.ok_or_else(|| {
        Status::invalid_argument(format!("the path {} cannot be used as a socket address", socket.display()))
    })?;
    let channel = endpoint.connect().await.map_err(|error| Status::from_error(Box::new(error)))?;
    let mut client = DevicePluginClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let options = client.get_device_plugin_options(wire::Empty {}).await?.into_inner();
    let mut stream = client.list_and_watch(wire::Empty {}).await?.into_inner();
    let first = stream.message().await?.ok_or_else(|| Status::unavailable("the stream ended without a list"))?;
    let devices = parse_list(first).map_err(|error| Status::invalid_argument(error.to_string()))?;
    let options =
        PluginOptions { pre_start: options.pre_start_required, preferred: options.get_preferred_allocation_available };
    Ok(PluginConnection { client, options, devices: Arc::new(devices), stream })
}

struct RegistrationService(Arc<Relay>);

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<wire::RegisterRequest>) -> Result<Response<wire::Empty>, Status> {
        // Use a separate task, so that a registration completes even if the agent disconnects.
        let (relay, request) = (Arc::clone(&self.0), request.into_inner());
        let accepted = tokio::spawn(async move { relay.accept_registration(request).await }).await;
        accepted.map_err(|error| Status::internal(error.to_string()))??;
        Ok(Response::new(wire::Empty {}))
    }
}

/// A client of the agent's plugin, for one registration.
#[derive(Clone)]
struct AgentClient {
    number: u64,
    client: DevicePluginClient<Channel>,
}

/// Whether the agent's plugin of a resource is connected.
#[derive(Clone)]
enum AgentState {
    Present(AgentClient),
    /// The agent may return soon, so calls wait for it.
    Absent {
        since: Instant,
    },
    /// The agent has been absent for too long.
    Lost {
        since: Instant,
    },
}

impl AgentState {
    fn client(&self) -> Option<&AgentClient> {
        match self {
            Self::Present(client) => Some(client),
            Self::Absent { .. } | Self::Lost { .. } => None,
        }
    }

    /// Returns the beginning of the absence, if the agent is not connected.
    fn absent_since(&self) -> Option<Instant> {
        match self {
            Self::Present(_) => None,
            Self::Absent { since } | Self::Lost { since } => Some(*since),
        }
    }

    /// Records that an absent agent is lost. Returns whether the state changed.
    fn lose(&mut self) -> bool {
        let Self::Absent { since } = *self else { return false };
        *self = Self::Lost { since };
        true
    }
}

impl Default for AgentState {
    fn default() -> Self {
        Self::Absent { since: Instant::now() }
    }
}

/// A resource that forwards the kubelet's calls to the agent.
struct RelayedResource {
    name: ResourceName,
    options: PluginOptions,
    devices: watch::Sender<Arc<DeviceList>>,
    agent: Arc<watch::Sender<AgentState>>,
    timings: RelayTimings,
}

impl RelayedResource {
    /// Records that a client no longer works, unless a newer client exists.
    fn disconnect(&self, number: u64) {
        self.agent.send_if_modified(|agent| {
            let outdated = agent.client().is_some_and(|client| client.number == number);
            if outdated {
                *agent = AgentState::default();
            }
            outdated
        });
    }

    /// Calls the agent. Waits while the agent is absent, and repeats the call if the agent
    /// disconnects before it answers.
    async fn call_agent<A, F>(
        &self,
        limits: CallLimits,
        call: impl Fn(DevicePluginClient<Channel>) -> F,
    ) -> Result<A, Refusal>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let CallLimits { answer, total, awaits_lost_agent } = limits;
        let mut agents = self.agent.subscribe();
        let begun = self.agent.borrow().absent_since().unwrap_or_else(Instant::now);
        let end = begun + total;
        loop {
            let is_settled = |agent: &AgentState| match agent {
                AgentState::Absent { .. } => false,
                AgentState::Lost { .. } => !awaits_lost_agent,
                AgentState::Present(_) => true,
            };
            let agent = agents.wait_for(is_settled);
            let agent = tokio::time::timeout_at(end, agent).await.ok().and_then(Result::ok);
            let Some(AgentClient { number, client }) = agent.and_then(|agent| agent.client().cloned()) else {
                return Err(self.refuse_for_absence());
            };
            let asked = Instant::now();
            match tokio::time::timeout_at(end.min(asked + answer), call(client)).await {
                Ok(Ok(answer)) => return Ok(answer.into_inner()),
                // A status with a source was created in this process, and means that the connection
                // failed.
                Ok(Err(status)) if std::error::Error::source(&status).is_some() => self.disconnect(number),
                Ok(Err(status)) => return Err(status.into()),
                Err(_) => return Err(self.refuse(&format!("did not answer within {} s", whole_seconds(asked)))),
            }
        }
    }

    /// Returns the refusal of a call because the agent is absent.
    fn refuse_for_absence(&self) -> Refusal {
        let since = self.agent.borrow().absent_since().unwrap_or_else(Instant::now);
        self.refuse(&format!("has been absent for {} s", whole_seconds(since)))
    }

    /// Returns the refusal of a call because the agent did not answer. The kubelet copies the
    /// message into the pod's status: "Allocate failed due to MESSAGE, which is unexpected".
    fn refuse(&self, why: &str) -> Refusal {
        tracing::warn!(resource = %self.name, why, "refused a call of the kubelet");
        Refusal::NotReady(format!("{}: Cleave's agent on this node {why}", self.name))
    }
}

/// Returns the time since `start` in seconds, rounded.
fn whole_seconds(start: Instant) -> u64 {
    (start.elapsed() + Duration::from_millis(500)).as_secs()
}

impl Resource for RelayedResource {
    fn devices(&self) -> watch::Receiver<Arc<DeviceList>> {
        self.devices.subscribe()
    }

    fn options(&self) -> PluginOptions {
        self.options
    }

    fn preferred_devices<'a>(&'a self, request: PreferredRequest<'a>) -> BoxFuture<'a, Result<Vec<String>, Refusal>> {
        Box::pin(async move {
            let container = wire::ContainerPreferredAllocationRequest {
                available_device_i_ds: request.available.to_vec(),
                must_include_device_i_ds: request.must_include.to_vec(),
                allocation_size: i32::try_from(request.size).unwrap_or(i32::MAX),
            };
            let request = wire::PreferredAllocationRequest { container_requests: vec![container] };
            let answer = self
                .call_agent(self.timings.admission_limits(), |mut client| {
                    let request = request.clone();
                    async move { client.get_preferred_allocation(request).await }
                })
                .await?;
            single_response(answer.container_responses).map(|response| response.device_i_ds)
        })
    }

    fn allocate<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<ContainerResponse, Refusal>> {
        Box::pin(async move {
            let container = wire::ContainerAllocateRequest { devices_ids: ids.to_vec() };
            let request = wire::AllocateRequest { container_requests: vec![container] };
            let answer = self
                .call_agent(self.timings.admission_limits(), |mut client| {
                    let request = request.clone();
                    async move { client.allocate(request).await }
                })
                .await?;
            single_response(answer.container_responses).map(ContainerResponse::from)
        })
    }

    fn pre_start<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let request = wire::PreStartContainerRequest { devices_ids: ids.to_vec() };
            self.call_agent(self.timings.start_limits(), |mut client| {
                let request = request.clone();
                async move { client.pre_start_container(request).await }
            })
            .await
            .map(drop)
        })
    }
}

/// Returns the response in the agent's answer to a call for one container. Fails unless the answer
/// has exactly one response.
fn single_response<T>(mut responses: Vec<T>) -> Result<T, Refusal> {
    match (responses.pop(), responses.is_empty()) {
        (Some(response), true) => Ok(response),
        _ => Err(Refusal::NotReady("the agent's answer is not for one container".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_limits_fit_the_deadlines_of_the_agent_and_the_kubelet() {
        let timings = RelayTimings::default();
        assert!(timings.answer > Duration::from_secs(2), "the agent may wait 2 s for a pod");
        assert!(timings.absent < timings.supervised && timings.supervised < timings.removed);
        let total = timings.admission_limits().total;
        assert!(total <= Duration::from_secs(40), "the kubelet admits no other pod during this time");
        let start = timings.start_limits().total;
        assert!(start > Duration::from_secs(25) && start < Duration::from_secs(30));
    }
}
