//! Answers the agent's requests on the MPS host's socket, which only root can reach.
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::error::HostError;
use super::supervisor::Supervisor;
use super::wire::{Reply, Request};

/// Maximum number of connections that are served at the same time.
const MAX_AGENT_CONNECTIONS: usize = 64;
/// Maximum size of a request in bytes. A request is one line.
const MAX_REQUEST_BYTES: u64 = 64 * 1024;
/// Time without a request after which a connection is closed.
const IDLE_CONNECTION_TIMEOUT: Duration = Duration::from_secs(300);
/// Time limit for the peer to accept a reply.
const REPLY_DEADLINE: Duration = Duration::from_secs(5);
/// Time limit for the answer to a probe. Shorter than the timeout of the pod's probe.
const PROBE_DEADLINE: Duration = Duration::from_secs(3);
/// Delay after a failed `accept`.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Creates the socket and replaces the socket of an earlier MPS host.
pub(crate) fn listen(path: &Path) -> Result<UnixListener, HostError> {
    let failed = |source| HostError::Prepare { path: path.to_owned(), source };
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// Requests the status from the MPS host at this socket.
pub(crate) async fn probe_host(path: &Path) -> Result<(), HostError> {
    let exchange = async {
        let mut stream = UnixStream::connect(path).await?;
        let mut request = serde_json::to_vec(&Request::Status).map_err(io::Error::other)?;
        request.push(b'\n');
        stream.write_all(&request).await?;
        let mut answer = Vec::new();
        BufReader::new(stream).read_until(b'\n', &mut answer).await?;
        match serde_json::from_slice(&answer).map_err(io::Error::other)? {
            Reply::Status(_) => Ok(()),
            other => Err(io::Error::other(format!("unexpected answer: {other:?}"))),
        }
    };
    let answered = timeout(PROBE_DEADLINE, exchange).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    answered.map_err(|source| HostError::NoAnswer { path: path.to_owned(), source })
}

/// Serves all connections, forever.
pub(crate) async fn serve(supervisor: Rc<Supervisor>, listener: UnixListener) {
    let connections = Arc::new(Semaphore::new(MAX_AGENT_CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let supervisor = Rc::clone(&supervisor);
                tokio::task::spawn_local(async move {
                    if let Err(error) = serve_connection(&supervisor, stream).await {
                        tracing::debug!(%error, "connection to the MPS host's socket failed");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection to the MPS host's socket");
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

async fn serve_connection(supervisor: &Supervisor, stream: UnixStream) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut limited = (&mut reader).take(MAX_REQUEST_BYTES);
        match timeout(IDLE_CONNECTION_TIMEOUT, limited.read_until(b'\n', &mut line)).await {
            Ok(Ok(0)) | Err(_) => return Ok(()),
            Ok(read) => read?,
        };
        let is_complete = line.ends_with(b"\n");
        let reply = match serde_json::from_slice(&line) {
            Ok(request) if is_complete => supervisor.answer_request(request).await,
            Ok(_) => Reply::Error { message: "the request does not end with a newline".to_owned() },
            Err(error) => Reply::Error { message: format!("invalid request: {error}") },
        };
        let mut text = serde_json::to_vec(&reply).map_err(io::Error::other)?;
        text.push(b'\n');
        timeout(REPLY_DEADLINE, writer.write_all(&text)).await.map_err(|_| io::ErrorKind::TimedOut)??;
        if !is_complete {
            // The line is too long or has no end. Close the connection, so that the remainder of
            // the line is not parsed as another request.
            return Ok(());
        }
    }
}
