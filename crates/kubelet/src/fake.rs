//! A fake kubelet on real Unix sockets, for tests and benchmarks.
//!
//! The fake kubelet behaves on the wire like `pkg/kubelet/cm/devicemanager` of Kubernetes 1.36,
//! including its race condition: the resource name alone identifies a client. Therefore the end of
//! an old stream removes the resource's current client.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use crate::connections::Connections;
use crate::directory::KUBELET_SOCKET;
use crate::pods::{AllocatableDevices, ContainerDevices};
use crate::proto::podresources as pods;
use crate::proto::podresources::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};
use crate::proto::v1beta1 as wire;
use crate::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::proto::v1beta1::registration_server::{Registration, RegistrationServer};

/// Deadline for connecting to a plugin that registers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A device plugin directory with a fake kubelet. A test can restart the kubelet, make it refuse
/// registrations, and call plugins over the kubelet's connections.
pub struct FakeKubelet {
    directory: PathBuf,
    shared: Arc<SharedState>,
    running: Option<RunningServer>,
}

/// A registration that the kubelet received.
#[derive(Clone, Debug)]
pub struct ReceivedRegistration {
    /// Time at which the request arrived.
    pub at: Instant,
    /// The request, as the plugin sent it.
    pub request: wire::RegisterRequest,
    /// Whether the kubelet accepted the request. `None` while the kubelet connects to the plugin or
    /// hangs.
    pub accepted: Option<bool>,
}

/// The kubelet's view of a resource.
#[derive(Clone, Debug, Default)]
pub struct Endpoint {
    /// Whether a client is connected. Without a client, all devices count as unhealthy.
    pub connected: bool,
    /// Name of the last registered socket.
    pub socket: String,
    /// Options that the kubelet read at the last registration.
    pub options: wire::DevicePluginOptions,
    /// The last list of devices.
    pub devices: Vec<wire::Device>,
    /// Size of the last list in bytes, without gRPC's frame header of 5 bytes.
    pub message_bytes: usize,
    /// Number of lists received since the fake kubelet was created.
    pub lists: usize,
    /// Time at which the first list after the last registration arrived.
    pub listed: Option<Instant>,
    /// Number of clients that the kubelet disconnected.
    pub disconnected: usize,
}

impl Endpoint {
    /// Returns the ids of the devices that the kubelet can allocate.
    pub fn healthy_ids(&self) -> Vec<&str> {
        let devices = self.devices.iter().filter(|device| self.connected && device.health == "Healthy");
        devices.map(|device| device.id.as_str()).collect()
    }
}

/// The observable state of a fake kubelet.
#[derive(Clone, Debug, Default)]
pub struct FakeKubeletState {
    /// All registrations in order, across restarts.
    pub registrations: Vec<ReceivedRegistration>,
    /// Resources by name.
    pub endpoints: BTreeMap<String, Endpoint>,
}

/// The tasks and connections of a running fake kubelet. Dropping this value stops the kubelet.
struct RunningServer {
    _connections: Connections,
    _listener: AbortOnDropHandle<()>,
    _server: AbortOnDropHandle<()>,
}

/// The state that survives a restart of the kubelet.
struct SharedState {
    directory: PathBuf,
    seen: watch::Sender<FakeKubeletState>,
    faults: Mutex<InjectedFaults>,
    clients: Mutex<ConnectedPlugins>,
}

/// The connected plugins.
#[derive(Default)]
struct ConnectedPlugins {
    next: u64,
    by_name: BTreeMap<String, ConnectedPlugin>,
    streams: JoinSet<()>,
}

/// A connected plugin.
struct ConnectedPlugin {
    number: u64,
    channel: DevicePluginClient<Channel>,
    stream: Option<tokio::task::AbortHandle>,
}

/// Faults that a test has set.
#[derive(Clone, Copy, Default)]
struct InjectedFaults {
    refuse: usize,
    hang: bool,
    no_stream: usize,
    disconnect_delay: Duration,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeKubelet {
    /// Removes all sockets in the directory, as a starting kubelet does, and serves there.
    ///
    /// # Errors
    /// Returns an error if an old socket cannot be removed or the new socket cannot be bound.
    pub fn start_in(directory: &Path) -> io::Result<Self> {
        let shared = Arc::new(SharedState {
            directory: directory.to_owned(),
            seen: watch::Sender::new(FakeKubeletState::default()),
            faults: Mutex::default(),
            clients: Mutex::default(),
        });
        let mut kubelet = Self { directory: directory.to_owned(), shared, running: None };
        kubelet.start()?;
        Ok(kubelet)
    }

    /// Starts the kubelet after [`stop`](Self::stop). Returns the time at which the new
    /// `kubelet.sock` was created.
    ///
    /// # Errors
    /// Returns an error if an old socket cannot be removed or the new socket cannot be bound.
    pub fn start(&mut self) -> io::Result<Instant> {
        self.clean_directory()?;
        let bound = bind_socket(&self.directory.join(KUBELET_SOCKET))?;
        let at = Instant::now();
        self.listen(bound)?;
        Ok(at)
    }

    /// Starts the kubelet like [`start`](Self::start), but waits between binding `kubelet.sock` and
    /// listening, as on a slow machine.
    ///
    /// # Errors
    /// Returns the errors of [`start`](Self::start).
    pub async fn start_with_listen_delay(&mut self, delay: Duration) -> io::Result<()> {
        self.clean_directory()?;
        let bound = bind_socket(&self.directory.join(KUBELET_SOCKET))?;
        tokio::time::sleep(delay).await;
        self.listen(bound)
    }

    /// Stops the kubelet as `SIGKILL` would: its connections end, and `kubelet.sock` remains.
    pub fn stop(&mut self) {
        self.running = None;
        let mut clients = lock(&self.shared.clients);
        let names: Vec<_> = std::mem::take(&mut clients.by_name).into_keys().collect();
        clients.streams.abort_all();
        drop(clients);
        self.shared.seen.send_modify(|seen| {
            for name in names {
                if let Some(endpoint) = seen.endpoints.get_mut(&name) {
                    endpoint.connected = false;
                }
            }
        });
    }

    /// Stops and starts the kubelet. Returns the time at which the new `kubelet.sock` was created.
    ///
    /// # Errors
    /// Returns the errors of [`start`](Self::start).
    pub fn restart(&mut self) -> io::Result<Instant> {
        self.stop();
        self.start()
    }

    /// Removes every socket in the directory, as the kubelet's `CleanupPluginDirectory` does.
    /// Ignores missing entries, because a plugin can replace its socket at the same time.
    fn clean_directory(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.directory)? {
            let entry = entry?;
            let removed = match entry.file_type() {
                Ok(kind) if kind.is_socket() => std::fs::remove_file(entry.path()),
                found => found.map(drop),
            };
            match removed {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn listen(&mut self, bound: rustix::fd::OwnedFd) -> io::Result<()> {
        rustix::net::listen(&bound, 128)?;
        let listener = std::os::unix::net::UnixListener::from(bound);
        let (connections, incoming) = Connections::new();
        let listener = connections.accept_from(UnixListener::from_std(listener)?);
        let service = RegistrationServer::new(RegistrationService(Arc::clone(&self.shared)));
        let server = tonic::transport::Server::builder().serve_with_incoming(service, incoming);
        self.running = Some(RunningServer {
            _connections: connections,
            _listener: listener,
            _server: AbortOnDropHandle::new(tokio::spawn(async move {
                let _ = server.await;
            })),
        });
        Ok(())
    }

    /// Returns the path of the device plugin directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns a receiver of the observable state.
    pub fn state(&self) -> watch::Receiver<FakeKubeletState> {
        self.shared.seen.subscribe()
    }

    /// Waits until the condition is met, and returns the observable state. Returns `None` if the
    /// condition is not met before the timeout.
    pub async fn wait_for(
        &self,
        within: Duration,
        condition: impl FnMut(&FakeKubeletState) -> bool,
    ) -> Option<FakeKubeletState> {
        let mut seen = self.state();
        let found = tokio::time::timeout(within, seen.wait_for(condition)).await;
        found.ok()?.ok().map(|seen| seen.clone())
    }

    /// Makes the kubelet refuse the next `times` registrations.
    pub fn refuse_registrations(&self, times: usize) {
        lock(&self.shared.faults).refuse = times;
    }

    /// Sets whether the kubelet hangs. A hanging kubelet answers no registrations.
    pub fn set_hanging(&self, hang: bool) {
        lock(&self.shared.faults).hang = hang;
    }

    /// Makes the kubelet open no stream after the next `times` registrations that it accepts.
    pub fn open_no_stream(&self, times: usize) {
        lock(&self.shared.faults).no_stream = times;
    }

    /// Sets the delay between the end of a stream and the disconnection of its client. A long delay
    /// makes the kubelet's race condition more likely.
    pub fn delay_disconnections(&self, delay: Duration) {
        lock(&self.shared.faults).disconnect_delay = delay;
    }

    /// Ends a resource's stream without stopping the kubelet.
    pub fn drop_stream(&self, resource: &str) {
        let mut clients = lock(&self.shared.clients);
        let Some(client) = clients.by_name.remove(resource) else { return };
        if let Some(stream) = client.stream {
            stream.abort();
        }
        drop(clients);
        self.shared.record_disconnection(resource);
    }

    /// Returns a client of a resource's plugin, or `None` if no plugin is connected. The client
    /// uses the connection that the kubelet opened at the registration.
    pub fn client(&self, resource: &str) -> Option<DevicePluginClient<Channel>> {
        lock(&self.shared.clients).by_name.get(resource).map(|client| client.channel.clone())
    }

    /// Calls `Allocate` for one container, as the kubelet does.
    ///
    /// # Errors
    /// Returns `NotFound` if no plugin is connected for the resource, the plugin's status if the
    /// plugin refuses, and `Internal` if the answer is not for exactly one container.
    pub async fn allocate(&self, resource: &str, ids: &[&str]) -> Result<wire::ContainerAllocateResponse, Status> {
        let mut client = self.client(resource).ok_or_else(|| Status::not_found("endpoint stopped"))?;
        let container = wire::ContainerAllocateRequest { devices_ids: ids.iter().map(ToString::to_string).collect() };
        let answer = client.allocate(wire::AllocateRequest { container_requests: vec![container] }).await?;
        let mut responses = answer.into_inner().container_responses;
        match (responses.pop(), responses.is_empty()) {
            (Some(response), true) => Ok(response),
            _ => Err(Status::internal("the request was for one container, but the response is not for exactly one")),
        }
    }

    /// Calls `GetPreferredAllocation` for one container, as the kubelet does.
    ///
    /// # Errors
    /// Returns the errors of [`allocate`](Self::allocate).
    pub async fn preferred_allocation(
        &self,
        resource: &str,
        available: &[&str],
        must_include: &[&str],
        size: i32,
    ) -> Result<Vec<String>, Status> {
        let mut client = self.client(resource).ok_or_else(|| Status::not_found("endpoint stopped"))?;
        let texts = |ids: &[&str]| ids.iter().map(ToString::to_string).collect();
        let container = wire::ContainerPreferredAllocationRequest {
            available_device_i_ds: texts(available),
            must_include_device_i_ds: texts(must_include),
            allocation_size: size,
        };
        let request = wire::PreferredAllocationRequest { container_requests: vec![container] };
        let mut responses = client.get_preferred_allocation(request).await?.into_inner().container_responses;
        match (responses.pop(), responses.is_empty()) {
            (Some(response), true) => Ok(response.device_i_ds),
            _ => Err(Status::internal("the request was for one container, but the response is not for exactly one")),
        }
    }

    /// Calls `PreStartContainer`, as the kubelet does.
    ///
    /// # Errors
    /// Returns `NotFound` if no plugin is connected for the resource, and the plugin's status if
    /// the plugin refuses.
    pub async fn pre_start(&self, resource: &str, ids: &[&str]) -> Result<(), Status> {
        let mut client = self.client(resource).ok_or_else(|| Status::not_found("endpoint stopped"))?;
        let devices_ids = ids.iter().map(ToString::to_string).collect();
        client.pre_start_container(wire::PreStartContainerRequest { devices_ids }).await.map(drop)
    }
}

fn bind_socket(path: &Path) -> io::Result<rustix::fd::OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

struct RegistrationService(Arc<SharedState>);

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<wire::RegisterRequest>) -> Result<Response<wire::Empty>, Status> {
        let at = Instant::now();
        let request = request.into_inner();
        let mut number = 0;
        self.0.seen.send_modify(|seen| {
            number = seen.registrations.len();
            seen.registrations.push(ReceivedRegistration { at, request: request.clone(), accepted: None });
        });
        let result = self.0.connect_to_plugin(request).await;
        self.0.seen.send_modify(|seen| seen.registrations[number].accepted = Some(result.is_ok()));
        result.map(|()| Response::new(wire::Empty {}))
    }
}

impl SharedState {
    /// Connects to a plugin that registers.
    async fn connect_to_plugin(self: &Arc<Self>, request: wire::RegisterRequest) -> Result<(), Status> {
        let (refuse, hang) = {
            let mut faults = lock(&self.faults);
            let refuse = faults.refuse > 0;
            faults.refuse = faults.refuse.saturating_sub(1);
            (refuse, faults.hang)
        };
        if hang {
            std::future::pending::<()>().await;
        }
        if refuse {
            return Err(Status::unknown("refused by the test"));
        }
        if request.version != crate::proto::DEVICE_PLUGIN_VERSION {
            return Err(Status::unknown(format!("unsupported version {:?}", request.version)));
        }
        if crate::ResourceName::parse(&request.resource_name).is_err() {
            return Err(Status::unknown(format!("the ResourceName {:?} is invalid", request.resource_name)));
        }
        let path = self.directory.join(&request.endpoint);
        let dial = async {
            let endpoint = path.to_str().and_then(crate::registration::unix_endpoint).ok_or("a bad path".to_owned())?;
            let channel = endpoint.connect().await.map_err(|error| format!("{error:?}"))?;
            let mut client = DevicePluginClient::new(channel).max_decoding_message_size(16 << 20);
            let options =
                client.get_device_plugin_options(wire::Empty {}).await.map_err(|status| status.to_string())?;
            Ok::<_, String>((client, options.into_inner()))
        };
        let (client, options) = tokio::time::timeout(CONNECT_TIMEOUT, dial)
            .await
            .map_err(|_| Status::unknown("failed to dial device plugin: context deadline exceeded"))?
            .map_err(|error| Status::unknown(format!("failed to dial device plugin: {error}")))?;
        let number = {
            let mut clients = lock(&self.clients);
            let number = clients.next;
            clients.next += 1;
            let client = ConnectedPlugin { number, channel: client.clone(), stream: None };
            clients.by_name.insert(request.resource_name.clone(), client);
            number
        };
        self.seen.send_modify(|seen| {
            let endpoint = seen.endpoints.entry(request.resource_name.clone()).or_default();
            (endpoint.connected, endpoint.socket, endpoint.options) = (true, request.endpoint, options);
            endpoint.listed = None;
        });
        let no_stream = {
            let mut faults = lock(&self.faults);
            let no_stream = faults.no_stream > 0;
            faults.no_stream = faults.no_stream.saturating_sub(1);
            no_stream
        };
        if !no_stream {
            let mut clients = lock(&self.clients);
            let stream =
                clients.streams.spawn(Arc::clone(self).receive_device_lists(request.resource_name.clone(), client));
            if let Some(current) = clients.by_name.get_mut(&request.resource_name).filter(|c| c.number == number) {
                current.stream = Some(stream);
            }
        }
        Ok(())
    }

    /// Records the plugin's device lists until the stream ends.
    async fn receive_device_lists(self: Arc<Self>, resource: String, mut client: DevicePluginClient<Channel>) {
        if let Ok(stream) = client.list_and_watch(wire::Empty {}).await {
            let mut stream = stream.into_inner();
            while let Ok(Some(list)) = stream.message().await {
                let at = Instant::now();
                self.seen.send_modify(|seen| {
                    let endpoint = seen.endpoints.entry(resource.clone()).or_default();
                    endpoint.message_bytes = prost::Message::encoded_len(&list);
                    endpoint.devices = list.devices;
                    endpoint.lists += 1;
                    endpoint.listed = endpoint.listed.or(Some(at));
                });
            }
        }
        let delay = lock(&self.faults).disconnect_delay;
        tokio::time::sleep(delay).await;
        // Like a kubelet up to version 1.36, the fake identifies the client by the resource name
        // alone. The order is also the kubelet's: the client disconnects, and then the endpoint
        // stops.
        drop(lock(&self.clients).by_name.remove(&resource));
        drop(client);
        self.record_disconnection(&resource);
    }

    fn record_disconnection(&self, resource: &str) {
        self.seen.send_modify(|seen| {
            if let Some(endpoint) = seen.endpoints.get_mut(resource) {
                endpoint.connected = false;
                endpoint.disconnected += 1;
            }
        });
    }
}

/// A fake of the kubelet's PodResources API.
pub struct FakePodResources {
    shared: Arc<SharedLists>,
    _running: RunningServer,
}

#[derive(Default)]
struct SharedLists {
    list: Mutex<pods::ListPodResourcesResponse>,
    allocatable: Mutex<pods::AllocatableResourcesResponse>,
    hang: std::sync::atomic::AtomicBool,
}

impl FakePodResources {
    /// Removes an existing socket at this path, binds a new socket and serves the API.
    ///
    /// # Errors
    /// Returns an error if the existing socket cannot be removed or the new socket cannot be bound.
    pub fn start(socket: &Path) -> io::Result<Self> {
        if std::fs::symlink_metadata(socket).is_ok_and(|found| found.file_type().is_socket()) {
            std::fs::remove_file(socket)?;
        }
        let shared = Arc::new(SharedLists::default());
        let (connections, incoming) = Connections::new();
        let listener = connections.accept_from(UnixListener::bind(socket)?);
        let service = PodResourcesListerServer::new(PodResourcesService(Arc::clone(&shared)));
        let server = tonic::transport::Server::builder().serve_with_incoming(service, incoming);
        let server = AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = server.await;
        }));
        Ok(Self { shared, _running: RunningServer { _connections: connections, _listener: listener, _server: server } })
    }

    /// Sets the devices that are allocated to containers.
    pub fn set_devices(&self, rows: &[ContainerDevices]) {
        let pod_resources = rows.iter().map(|row| pods::PodResources {
            name: row.pod.clone(),
            namespace: row.namespace.clone(),
            containers: vec![pods::ContainerResources {
                name: row.container.clone(),
                devices: vec![pods::ContainerDevices {
                    resource_name: row.resource.clone(),
                    device_ids: row.ids.clone(),
                    topology: None,
                }],
                ..Default::default()
            }],
        });
        lock(&self.shared.list).pod_resources = pod_resources.collect();
    }

    /// Sets the devices that can be allocated.
    pub fn set_allocatable(&self, rows: &[AllocatableDevices]) {
        let devices = rows.iter().map(|row| pods::ContainerDevices {
            resource_name: row.resource.clone(),
            device_ids: row.ids.clone(),
            topology: Some(pods::TopologyInfo { nodes: row.numa.iter().map(|&id| pods::NumaNode { id }).collect() }),
        });
        lock(&self.shared.allocatable).devices = devices.collect();
    }

    /// Sets whether the kubelet hangs. A hanging kubelet answers no `List` or
    /// `GetAllocatableResources` call.
    pub fn set_hanging(&self, hang: bool) {
        self.shared.hang.store(hang, std::sync::atomic::Ordering::SeqCst);
    }
}

struct PodResourcesService(Arc<SharedLists>);

impl PodResourcesService {
    async fn wait_while_hanging(&self) {
        if self.0.hang.load(std::sync::atomic::Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }
}

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(
        &self,
        _: Request<pods::ListPodResourcesRequest>,
    ) -> Result<Response<pods::ListPodResourcesResponse>, Status> {
        self.wait_while_hanging().await;
        Ok(Response::new(lock(&self.0.list).clone()))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<pods::AllocatableResourcesRequest>,
    ) -> Result<Response<pods::AllocatableResourcesResponse>, Status> {
        self.wait_while_hanging().await;
        Ok(Response::new(lock(&self.0.allocatable).clone()))
    }

    async fn get(
        &self,
        request: Request<pods::GetPodResourcesRequest>,
    ) -> Result<Response<pods::GetPodResourcesResponse>, Status> {
        let wanted = request.into_inner();
        let list = lock(&self.0.list);
        let found =
            list.pod_resources.iter().find(|p| p.name == wanted.pod_name && p.namespace == wanted.pod_namespace);
        let found = found.ok_or_else(|| Status::not_found("no such pod"))?;
        Ok(Response::new(pods::GetPodResourcesResponse { pod_resources: Some(found.clone()) }))
    }
}
