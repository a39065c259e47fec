//! Communicates with one MPS control daemon: commands over `control_privileged`, client handshakes
//! over `control`.
//!
//! The daemon serves one connection at a time and waits for its peer without a deadline. Each
//! function therefore sends all its packets at once and does not wait for another process in
//! between.
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::process::{ChildExit, Children};
use super::protocol::{self, Command, PeerKind, ReplyPacket, UnexpectedAnswer};
use super::seqpacket::{Credentials, Socket};

/// Time limit for a daemon's answer. The MPS host treats a daemon that misses this limit twice in a
/// row as hung. A daemon answers even while its server is in FAULT.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(2);
/// The command that stops a daemon and allows its clients 3 seconds to exit.
pub(crate) const QUIT_COMMAND: Command = Command::Quit { seconds: 3 };
/// Time limit for the daemon to answer [`QUIT_COMMAND`].
pub(crate) const QUIT_DEADLINE: Duration = Duration::from_secs(3).saturating_add(ANSWER_DEADLINE);
/// Maximum size of an answer, in bytes. Answers to the commands that Cleave sends are shorter.
const MAX_ANSWER_BYTES: usize = 256 * 1024;

/// Why a daemon returned no usable answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    #[error("the MPS control daemon did not answer `{what}` within {} s", .after.as_secs_f32())]
    Timeout { what: String, after: Duration },
    #[error("failed to reach the MPS control daemon: {0}")]
    Io(#[from] io::Error),
    #[error("the MPS control daemon closed the connection")]
    Closed,
    #[error("the MPS control daemon uses an unknown protocol, not the protocol of driver 580")]
    UnknownProtocol,
    #[error("the client exited before the MPS host forwarded the client's credentials")]
    ClientExited,
    #[error(transparent)]
    UnexpectedAnswer(#[from] UnexpectedAnswer),
}

/// Sends one command over the privileged socket. Returns its output, one line per packet.
///
/// # Errors
/// Returns [`ControlError`] if the daemon does not answer within `deadline` or the socket fails.
pub(crate) async fn send_command(pipe: &Path, command: &Command, deadline: Duration) -> Result<String, ControlError> {
    send_command_to_socket(&pipe.join("control_privileged"), command, deadline).await
}

/// Sends one command over any control socket.
///
/// # Errors
/// Returns the errors of [`send_command`].
pub(crate) async fn send_command_to_socket(
    socket: &Path,
    command: &Command,
    deadline: Duration,
) -> Result<String, ControlError> {
    with_deadline(deadline, &command.to_string(), async {
        let socket = Socket::connect(socket).await?;
        receive_hello(&socket).await?;
        socket.send_credentials(protocol::CREDENTIALS_PACKET, Credentials::of_this_process()).await?;
        socket.send(&PeerKind::Administrator.packet()).await?;
        for packet in protocol::command_packets(command) {
            socket.send(&packet).await?;
        }
        let mut output = String::new();
        loop {
            let packet = socket.recv().await?.ok_or(ControlError::Closed)?;
            match ReplyPacket::parse(&packet.data).ok_or(ControlError::UnknownProtocol)? {
                ReplyPacket::End => return Ok(output),
                ReplyPacket::Text(_) if output.len() > MAX_ANSWER_BYTES => return Err(ControlError::UnknownProtocol),
                ReplyPacket::Text(text) => {
                    if !output.is_empty() {
                        output.push('\n');
                    }
                    output.push_str(&text);
                }
            }
        }
    })
    .await
}

/// Returns whether the daemon sends the known greeting. Without this greeting, Cleave can neither
/// use the daemon's sockets nor enforce limits with doors.
pub(crate) async fn has_known_greeting(pipe: &Path) -> Result<bool, ControlError> {
    with_deadline(ANSWER_DEADLINE, "hello", async {
        let socket = Socket::connect(&pipe.join("control")).await?;
        match receive_hello(&socket).await {
            Ok(()) => Ok(true),
            Err(ControlError::UnknownProtocol) => Ok(false),
            Err(error) => Err(error),
        }
    })
    .await
}

/// Sends one command through the driver's own command-line tool, which supports every protocol of
/// its daemon.
///
/// # Errors
/// Returns [`ControlError`] if the tool does not start, fails or does not exit within `deadline`.
pub(crate) async fn send_command_by_tool(
    children: &Children,
    mut tool: std::process::Command,
    command: &Command,
    deadline: Duration,
) -> Result<String, ControlError> {
    let (child, mut output) = children.spawn(&mut tool, format!("{command}\n").as_bytes())?;
    let answer = with_deadline(deadline, &command.to_string(), async {
        let mut text = Vec::new();
        (&mut output).take(MAX_ANSWER_BYTES as u64).read_to_end(&mut text).await?;
        let text = String::from_utf8_lossy(&text).into_owned();
        match child.wait_for_exit().await {
            ChildExit::Status(0) => Ok(text),
            exit => Err(UnexpectedAnswer::new(&format!("({exit}) {}", text.trim())).into()),
        }
    })
    .await;
    child.kill();
    answer
}

/// A client that the daemon has accepted. The daemon is waiting for the result of the client's
/// handshake.
pub(crate) struct AcceptedClient {
    /// The client's socket to the server.
    pub(crate) server: OwnedFd,
    /// The connection to the daemon.
    pub(crate) daemon: PendingHandshake,
}

/// A connection to a daemon that waits for the result of this client's handshake with the server.
/// Until the result arrives, the daemon serves no other client.
pub(crate) struct PendingHandshake(Socket);

impl PendingHandshake {
    /// Sends the handshake's result, a `CUresult`, to the daemon.
    pub(crate) async fn finish(self, result: &[u8]) {
        // Ignore errors: the next probe detects a daemon that has exited.
        let _ = timeout(ANSWER_DEADLINE, self.0.send(result)).await;
    }
}

/// Introduces a client to the daemon with the credentials `who`.
///
/// # Errors
/// Returns [`ControlError`] if the client has exited, or the daemon does not accept it in time.
pub(crate) async fn introduce_client(pipe: &Path, who: Credentials) -> Result<AcceptedClient, ControlError> {
    with_deadline(ANSWER_DEADLINE, "a client's handshake", async {
        let daemon = Socket::connect(&pipe.join("control")).await?;
        receive_hello(&daemon).await?;
        daemon.send_credentials(protocol::CREDENTIALS_PACKET, who).await.map_err(|error| {
            // The kernel accepts only credentials of a living process, so the client has exited.
            if is_process_not_found_error(&error) { ControlError::ClientExited } else { error.into() }
        })?;
        daemon.send(&PeerKind::Client.packet()).await?;
        let packet = daemon.recv_descriptor().await?.ok_or(ControlError::Closed)?;
        match packet.descriptor {
            Some(server) if packet.data == protocol::DESCRIPTOR_PACKET => {
                Ok(AcceptedClient { server, daemon: PendingHandshake(daemon) })
            }
            // The kernel drops a received descriptor if this process cannot open another one.
            None if packet.data == protocol::DESCRIPTOR_PACKET => Err(io::Error::from(rustix::io::Errno::MFILE).into()),
            _ => Err(ControlError::UnknownProtocol),
        }
    })
    .await
}

fn is_process_not_found_error(error: &io::Error) -> bool {
    [rustix::io::Errno::SRCH, rustix::io::Errno::PERM]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

async fn receive_hello(socket: &Socket) -> Result<(), ControlError> {
    let hello = socket.recv().await?.ok_or(ControlError::Closed)?;
    if hello.data == protocol::HELLO_PACKET { Ok(()) } else { Err(ControlError::UnknownProtocol) }
}

/// Limits the time of an operation. `what` names the operation in the error.
async fn with_deadline<T>(
    after: Duration,
    what: &str,
    work: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, ControlError> {
    timeout(after, work).await.unwrap_or_else(|_| Err(ControlError::Timeout { what: what.to_owned(), after }))
}
