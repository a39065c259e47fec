//! One session of a resource's device plugin server: its socket, its connections and its
//! `ListAndWatch` streams.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use crate::connections::Connections;
use crate::directory::SocketId;
use crate::proto::v1beta1 as wire;
use crate::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::resource::{DeviceList, PluginOptions, PreferredRequest, Resource, list_response};

/// Maximum size of a request in bytes. The kubelet's largest request is `GetPreferredAllocation`,
/// which lists every free id. 20,000 ids fit in 1 MiB.
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// Maximum time to wait for calls in progress when no stream is open.
const IDLE_CONNECTION_GRACE: Duration = Duration::from_millis(50);

/// The current resource. The value changes when a resource with the same name replaces this
/// resource.
pub(crate) type CurrentResource = watch::Receiver<Arc<dyn Resource>>;

/// Behaviour of a session's `ListAndWatch` streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamMode {
    /// Send each change.
    Open,
    /// End immediately. The kubelet regards the devices as unhealthy, and keeps the resource for
    /// five minutes.
    End,
    /// Send an empty list and end: the resource is removed. Its capacity immediately becomes 0.
    EndWithEmptyList,
}

/// A running server. Dropping this value closes the server's connections.
pub(crate) struct Session {
    path: PathBuf,
    socket: SocketId,
    options: PluginOptions,
    connections: Connections,
    listener: AbortOnDropHandle<()>,
    orders: watch::Sender<StreamMode>,
    open: watch::Receiver<usize>,
    _server: AbortOnDropHandle<()>,
}

impl Session {
    /// Binds a new socket at `path` and serves there.
    pub(crate) fn start(path: PathBuf, mut served: CurrentResource) -> io::Result<Self> {
        let options = served.borrow_and_update().options();
        let (orders, order) = watch::channel(StreamMode::Open);
        let (count, open) = watch::channel(0);
        let (connections, incoming) = Connections::new();
        let (listener, socket) = listen_at(&path, &connections)?;
        let service = DevicePluginServer::new(PluginService { served, order, open: count })
            .max_decoding_message_size(MAX_REQUEST_BYTES);
        let shown = path.clone();
        let task = tokio::spawn(async move {
            // Do not use tonic's graceful shutdown: it waits for open streams, and they never end
            // by themselves. `Session::close` ends the streams.
            let end = tonic::transport::Server::builder().serve_with_incoming(service, incoming).await;
            if let Err(error) = end {
                tracing::error!(socket = %shown.display(), error = &error as &dyn std::error::Error, "device plugin server failed");
            }
        });
        let task = AbortOnDropHandle::new(task);
        Ok(Self { path, socket, options, connections, listener, orders, open, _server: task })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the options that the registration sends to the kubelet.
    pub(crate) fn options(&self) -> PluginOptions {
        self.options
    }

    /// Returns a receiver of the number of open `ListAndWatch` streams.
    pub(crate) fn open_streams(&self) -> watch::Receiver<usize> {
        self.open.clone()
    }

    /// Returns whether Cleave's socket still exists at its path.
    pub(crate) fn is_reachable(&self) -> bool {
        SocketId::of(&self.path) == Some(self.socket)
    }

    /// Binds the socket at its path again after the socket was deleted. Open connections and
    /// streams continue.
    pub(crate) fn rebind(&mut self) -> io::Result<()> {
        (self.listener, self.socket) = listen_at(&self.path, &self.connections)?;
        Ok(())
    }

    /// Removes the socket, ends the streams, and waits until the kubelet disconnects. If the
    /// kubelet is still connected after `grace`, the server disconnects it. Without an open stream,
    /// the wait is at most [`IDLE_CONNECTION_GRACE`].
    ///
    /// The wait is necessary: up to Kubernetes 1.36, a stream that ends after the next registration
    /// also disconnects the new client.
    pub(crate) async fn close(self, streams: StreamMode, grace: Duration) {
        self.listener.abort();
        if self.is_reachable() {
            let _ = std::fs::remove_file(&self.path);
        }
        self.orders.send_replace(streams);
        // Without a stream, the kubelet has no reason to disconnect. Wait only for calls in
        // progress.
        let grace = if *self.open.borrow() > 0 { grace } else { grace.min(IDLE_CONNECTION_GRACE) };
        self.connections.close(grace).await;
    }
}

fn listen_at(path: &Path, connections: &Connections) -> io::Result<(AbortOnDropHandle<()>, SocketId)> {
    let listener = UnixListener::bind(path)?;
    let socket = SocketId::of(path)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the socket disappeared while it was bound"))?;
    Ok((connections.accept_from(listener), socket))
}

/// The gRPC service of one resource.
struct PluginService {
    served: CurrentResource,
    order: watch::Receiver<StreamMode>,
    open: watch::Sender<usize>,
}

impl PluginService {
    fn resource(&self) -> Arc<dyn Resource> {
        Arc::clone(&self.served.borrow())
    }
}

#[tonic::async_trait]
impl DevicePlugin for PluginService {
    async fn get_device_plugin_options(
        &self,
        _: Request<wire::Empty>,
    ) -> Result<Response<wire::DevicePluginOptions>, Status> {
        Ok(Response::new(self.resource().options().into()))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<wire::Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut served = self.served.clone();
        let devices = served.borrow_and_update().devices();
        let feed = DeviceListFeed {
            served,
            devices: Some(devices),
            order: self.order.clone(),
            sent: None,
            _open: OpenStream::new(&self.open),
        };
        Ok(Response::new(Box::pin(futures::stream::unfold(feed, |mut feed| async move {
            let list = feed.next().await?;
            Some((Ok(list_response(&list)), feed))
        }))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<wire::PreferredAllocationRequest>,
    ) -> Result<Response<wire::PreferredAllocationResponse>, Status> {
        let resource = self.resource();
        let mut container_responses = Vec::with_capacity(request.get_ref().container_requests.len());
        for container in &request.get_ref().container_requests {
            let request = PreferredRequest::try_from(container)?;
            let device_i_ds = resource.preferred_devices(request).await?;
            container_responses.push(wire::ContainerPreferredAllocationResponse { device_i_ds });
        }
        Ok(Response::new(wire::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<wire::AllocateRequest>,
    ) -> Result<Response<wire::AllocateResponse>, Status> {
        let resource = self.resource();
        let mut container_responses = Vec::with_capacity(request.get_ref().container_requests.len());
        for container in &request.get_ref().container_requests {
            container_responses.push(resource.allocate(&container.devices_ids).await?.into());
        }
        Ok(Response::new(wire::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<wire::PreStartContainerRequest>,
    ) -> Result<Response<wire::PreStartContainerResponse>, Status> {
        self.resource().pre_start(&request.get_ref().devices_ids).await?;
        Ok(Response::new(wire::PreStartContainerResponse {}))
    }
}

impl From<PluginOptions> for wire::DevicePluginOptions {
    fn from(PluginOptions { pre_start, preferred }: PluginOptions) -> Self {
        Self { pre_start_required: pre_start, get_preferred_allocation_available: preferred }
    }
}

/// The source of the lists of one `ListAndWatch` stream. Each stream has its own feed, so all
/// streams send the newest list.
struct DeviceListFeed {
    served: CurrentResource,
    /// `None` after the sender was dropped. The last list remains valid.
    devices: Option<watch::Receiver<Arc<DeviceList>>>,
    order: watch::Receiver<StreamMode>,
    sent: Option<Arc<DeviceList>>,
    _open: OpenStream,
}

impl DeviceListFeed {
    async fn next(&mut self) -> Option<Arc<DeviceList>> {
        loop {
            let order = *self.order.borrow_and_update();
            let is_empty = |list: &Arc<DeviceList>| list.is_empty();
            match order {
                StreamMode::End => return None,
                StreamMode::EndWithEmptyList if self.sent.as_ref().is_some_and(is_empty) => return None,
                StreamMode::EndWithEmptyList => {
                    let nothing = Arc::new(DeviceList::new());
                    self.sent = Some(Arc::clone(&nothing));
                    return Some(nothing);
                }
                StreamMode::Open => {}
            }
            if let Some(devices) = &mut self.devices {
                let now = Arc::clone(&devices.borrow_and_update());
                // Compare the pointers, not the contents: a resource publishes an equal list to
                // make the kubelet write its checkpoint.
                if !self.sent.as_ref().is_some_and(|sent| Arc::ptr_eq(sent, &now)) {
                    self.sent = Some(Arc::clone(&now));
                    return Some(now);
                }
            }
            let devices = &mut self.devices;
            let devices_changed = async {
                match devices {
                    Some(devices) => devices.changed().await,
                    None => std::future::pending().await,
                }
            };
            // All branches are cancel-safe: `changed` marks a value as seen only when it returns.
            tokio::select! {
                changed = self.order.changed() => changed.ok()?,
                replaced = self.served.changed() => {
                    replaced.ok()?;
                    self.devices = Some(self.served.borrow_and_update().devices());
                }
                changed = devices_changed => {
                    if changed.is_err() {
                        self.devices = None;
                    }
                }
            }
        }
    }
}

/// Counts a stream as open until this value is dropped.
struct OpenStream(watch::Sender<usize>);

impl OpenStream {
    fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|open| *open += 1);
        Self(count.clone())
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}
