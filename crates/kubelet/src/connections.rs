//! Manages connections to Unix sockets: limits the number of connections, counts them, and closes
//! them together.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};
use tokio_util::task::task_tracker::TaskTrackerToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tonic::transport::server::Connected;

/// Maximum number of connections to one server, such as the server of one resource. The kubelet
/// uses one connection to that server. Administrators can use the other connections with a gRPC
/// client. The limit bounds the number of open files.
const MAX_CONNECTIONS: usize = 64;

/// Delay after a failure to accept a connection, such as "too many open files".
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The connections of one server. Dropping this value closes the connections.
pub(crate) struct Connections {
    accepted: mpsc::Sender<io::Result<Connection>>,
    slots: Arc<Semaphore>,
    tracker: TaskTracker,
    cut: CancellationToken,
    _cut_on_drop: DropGuard,
}

/// Stream of accepted connections.
pub(crate) type Incoming = ReceiverStream<io::Result<Connection>>;

impl Connections {
    pub(crate) fn new() -> (Self, Incoming) {
        let (accepted, incoming) = mpsc::channel(4);
        let cut = CancellationToken::new();
        let connections = Self {
            accepted,
            slots: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            tracker: TaskTracker::new(),
            _cut_on_drop: cut.clone().drop_guard(),
            cut,
        };
        (connections, ReceiverStream::new(incoming))
    }

    /// Accepts connections from this listener until the caller drops the returned handle. Other
    /// listeners continue.
    pub(crate) fn accept_from(&self, listener: UnixListener) -> AbortOnDropHandle<()> {
        let (accepted, slots) = (self.accepted.clone(), Arc::clone(&self.slots));
        let (tracker, cut) = (self.tracker.clone(), self.cut.clone());
        AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                let io = match listener.accept().await {
                    Ok((io, _)) => io,
                    Err(error) => {
                        tracing::warn!(%error, "failed to accept a connection");
                        tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                        continue;
                    }
                };
                let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
                    tracing::warn!(limit = MAX_CONNECTIONS, "closed a connection because too many are open");
                    continue;
                };
                let cut = Box::pin(cut.clone().cancelled_owned());
                let connection = Connection { io, cut, _tracked: tracker.token(), _slot: slot };
                if accepted.send(Ok(connection)).await.is_err() {
                    return;
                }
            }
        }))
    }

    /// Waits up to `grace` for the peers to disconnect, then disconnects the remaining peers and
    /// waits up to `grace` again.
    pub(crate) async fn close(self, grace: Duration) {
        self.tracker.close();
        if tokio::time::timeout(grace, self.tracker.wait()).await.is_ok() {
            return;
        }
        tracing::debug!(connections = self.tracker.len(), "peers did not disconnect");
        self.cut.cancel();
        if tokio::time::timeout(grace, self.tracker.wait()).await.is_err() {
            tracing::warn!(connections = self.tracker.len(), "connections did not end");
        }
    }
}

/// A counted connection. Pending reads and writes end when the server disconnects the peer.
pub(crate) struct Connection {
    io: UnixStream,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _tracked: TaskTrackerToken,
    _slot: OwnedSemaphorePermit,
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
