//! One start of a resource's device plugin server: its socket, its connections and its `ListAndWatch` streams.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status};

use crate::directory::SocketId;
use crate::proto::v1beta1 as wire;
use crate::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::resource::{DeviceList, Options, PreferredRequest, Refusal, Resource, list_response};

/// Connections at once, per resource. The kubelet has one; the rest is slack for people with a gRPC tool, and a bound on descriptors.
const MAX_CONNECTIONS: usize = 64;

/// Longest request. The longest that the kubelet sends is `GetPreferredAllocation` with every free id: 1 MiB holds 20,000 of them.
const MAX_REQUEST: usize = 1 << 20;

/// Between attempts to accept after an error such as "too many open files".
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// A resource as it is served now; replaced in place when the agent hands in another for the same name.
pub(crate) type Served = watch::Receiver<Arc<dyn Resource>>;

/// What the streams of a session should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Streams {
    /// Send each change.
    Open,
    /// End at once. The kubelet takes the devices for unhealthy, and keeps the resource for five minutes.
    End,
    /// Send an empty list and end: the resource is gone for good, and its capacity is 0 at once.
    Farewell,
}

/// A running server. Dropping it takes its connections down.
pub(crate) struct Session {
    path: PathBuf,
    socket: SocketId,
    options: Options,
    accepted: mpsc::Sender<io::Result<Connection>>,
    acceptor: AbortOnDropHandle<()>,
    task: AbortOnDropHandle<()>,
    slots: Arc<Semaphore>,
    connections: TaskTracker,
    cut: CancellationToken,
    orders: watch::Sender<Streams>,
    open: watch::Receiver<usize>,
    _cut_on_drop: DropGuard,
}

impl Session {
    /// Binds a new socket at `path` and answers there.
    pub(crate) fn start(path: PathBuf, mut served: Served) -> io::Result<Self> {
        let options = served.borrow_and_update().options();
        let (accepted, incoming) = mpsc::channel(4);
        let (orders, order) = watch::channel(Streams::Open);
        let (count, open) = watch::channel(0);
        let connections = TaskTracker::new();
        let cut = CancellationToken::new();
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let (acceptor, socket) = accept_at(&path, &accepted, &slots, &connections, &cut)?;
        let service =
            DevicePluginServer::new(Service { served, order, open: count }).max_decoding_message_size(MAX_REQUEST);
        let shown = path.clone();
        let task = AbortOnDropHandle::new(tokio::spawn(async move {
            // Without tonic's graceful shutdown, which waits for streams that never end by themselves: `end` closes them first.
            let end =
                tonic::transport::Server::builder().serve_with_incoming(service, ReceiverStream::new(incoming)).await;
            if let Err(error) = end {
                tracing::error!(socket = %shown.display(), error = &error as &dyn std::error::Error, "device plugin server ended");
            }
        }));
        Ok(Self {
            path,
            socket,
            options,
            accepted,
            acceptor,
            task,
            slots,
            connections,
            _cut_on_drop: cut.clone().drop_guard(),
            cut,
            orders,
            open,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The options that the kubelet was told, or will be.
    pub(crate) fn options(&self) -> Options {
        self.options
    }

    /// How many `ListAndWatch` streams are open.
    pub(crate) fn open_streams(&self) -> watch::Receiver<usize> {
        self.open.clone()
    }

    /// Whether the socket still lies where it was bound.
    pub(crate) fn is_reachable(&self) -> bool {
        SocketId::of(&self.path) == Some(self.socket)
    }

    /// Binds the socket again at the same path after somebody deleted it. Open connections and streams stay as they are.
    pub(crate) fn rebind(&mut self) -> io::Result<()> {
        (self.acceptor, self.socket) =
            accept_at(&self.path, &self.accepted, &self.slots, &self.connections, &self.cut)?;
        Ok(())
    }

    /// Ends the streams, waits until the kubelet hung up, and takes the socket away. After `patience` it hangs up itself.
    ///
    /// The wait matters: up to Kubernetes 1.36 a stream that ends after the next registration takes the new client down with it.
    pub(crate) async fn end(self, streams: Streams, patience: Duration) {
        self.acceptor.abort();
        if self.is_reachable() {
            let _ = std::fs::remove_file(&self.path);
        }
        self.orders.send_replace(streams);
        self.connections.close();
        if tokio::time::timeout(patience, self.connections.wait()).await.is_err() {
            tracing::debug!(socket = %self.path.display(), connections = self.connections.len(), "peers did not hang up");
        }
        self.cut.cancel();
        self.task.abort();
        if tokio::time::timeout(patience, self.connections.wait()).await.is_err() {
            tracing::warn!(socket = %self.path.display(), connections = self.connections.len(), "connections did not end");
        }
    }
}

fn accept_at(
    path: &Path,
    accepted: &mpsc::Sender<io::Result<Connection>>,
    slots: &Arc<Semaphore>,
    connections: &TaskTracker,
    cut: &CancellationToken,
) -> io::Result<(AbortOnDropHandle<()>, SocketId)> {
    let listener = UnixListener::bind(path)?;
    let socket = SocketId::of(path)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the socket vanished while it was bound"))?;
    let (accepted, slots, connections, cut) = (accepted.clone(), Arc::clone(slots), connections.clone(), cut.clone());
    let shown = path.to_owned();
    let acceptor = async move {
        loop {
            let io = match listener.accept().await {
                Ok((io, _)) => io,
                Err(error) => {
                    tracing::warn!(socket = %shown.display(), %error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
                tracing::warn!(socket = %shown.display(), limit = MAX_CONNECTIONS, "too many connections; closed a new one");
                continue;
            };
            let connection = Connection {
                io,
                cut: Box::pin(cut.clone().cancelled_owned()),
                _tracked: connections.token(),
                _slot: slot,
            };
            if accepted.send(Ok(connection)).await.is_err() {
                return;
            }
        }
    };
    Ok((AbortOnDropHandle::new(tokio::spawn(acceptor)), socket))
}

/// An accepted connection that is counted, and that reads as ended once the session cut it.
struct Connection {
    io: UnixStream,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _tracked: tokio_util::task::task_tracker::TaskTrackerToken,
    _slot: tokio::sync::OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.cut.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        if self.cut.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        Pin::new(&mut self.io).poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.cut.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        Pin::new(&mut self.io).poll_write_vectored(cx, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

struct Service {
    served: Served,
    order: watch::Receiver<Streams>,
    open: watch::Sender<usize>,
}

impl Service {
    fn resource(&self) -> Arc<dyn Resource> {
        Arc::clone(&self.served.borrow())
    }
}

#[tonic::async_trait]
impl DevicePlugin for Service {
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
        let feed = Feed {
            served,
            devices: Some(devices),
            order: self.order.clone(),
            sent: None,
            _open: Open::new(&self.open),
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
        let container_responses = request
            .get_ref()
            .container_requests
            .iter()
            .map(|container| {
                let device_i_ds = resource.preferred(&preferred_request(container)?)?;
                Ok(wire::ContainerPreferredAllocationResponse { device_i_ds })
            })
            .collect::<Result<_, Refusal>>()?;
        Ok(Response::new(wire::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<wire::AllocateRequest>,
    ) -> Result<Response<wire::AllocateResponse>, Status> {
        let resource = self.resource();
        let container_responses = request
            .get_ref()
            .container_requests
            .iter()
            .map(|container| resource.allocate(&container.devices_ids).map(Into::into))
            .collect::<Result<_, Refusal>>()?;
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

impl From<Options> for wire::DevicePluginOptions {
    fn from(Options { pre_start, preferred }: Options) -> Self {
        Self { pre_start_required: pre_start, get_preferred_allocation_available: preferred }
    }
}

/// Numbers that cannot be right are refused here; whether the ids are known, and which to take, is the resource's business.
fn preferred_request(wire: &wire::ContainerPreferredAllocationRequest) -> Result<PreferredRequest<'_>, Refusal> {
    let (available, must_include) = (&wire.available_device_i_ds, &wire.must_include_device_i_ds);
    let Ok(size) = usize::try_from(wire.allocation_size) else {
        return Err(Refusal::Invalid(format!("{} devices asked for", wire.allocation_size)));
    };
    if size > available.len() {
        return Err(Refusal::Invalid(format!("{size} devices asked for out of {} available", available.len())));
    }
    if must_include.len() > size {
        return Err(Refusal::Invalid(format!("{size} devices asked for that include {}", must_include.len())));
    }
    Ok(PreferredRequest { available, must_include, size })
}

/// What one `ListAndWatch` stream sends. Each stream has its own, so that two see every change.
struct Feed {
    served: Served,
    /// None once its sender is gone: the last list stays in force.
    devices: Option<watch::Receiver<Arc<DeviceList>>>,
    order: watch::Receiver<Streams>,
    sent: Option<Arc<DeviceList>>,
    _open: Open,
}

impl Feed {
    async fn next(&mut self) -> Option<Arc<DeviceList>> {
        loop {
            let order = *self.order.borrow_and_update();
            let is_empty = |list: &Arc<DeviceList>| list.is_empty();
            match order {
                Streams::End => return None,
                Streams::Farewell if self.sent.as_ref().is_some_and(is_empty) => return None,
                Streams::Farewell => {
                    let nothing = Arc::new(DeviceList::new());
                    self.sent = Some(Arc::clone(&nothing));
                    return Some(nothing);
                }
                Streams::Open => {}
            }
            if let Some(devices) = &mut self.devices {
                let now = Arc::clone(&devices.borrow_and_update());
                if self.sent.as_ref() != Some(&now) {
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
            // All three are cancel-safe: `changed` marks a value as seen only when it returns.
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

/// Counts an open stream for as long as it lives.
struct Open(watch::Sender<usize>);

impl Open {
    fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|open| *open += 1);
        Self(count.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}
