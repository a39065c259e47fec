//! Talks to one MPS control daemon: commands over `control_privileged`, and a client's handshake over `control`.
//!
//! The daemon serves one connection at a time and waits for it without a deadline: whoever opens one here says all that it has to say at
//! once, and nothing of it depends on anybody else.
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::process::{Children, Exit};
use super::protocol::{self, Command, Kind, Reply, Unexpected};
use super::seqpacket::{Credentials, Socket};

/// The daemon answers in well under a millisecond, also while its server is in FAULT: this long without an answer, and it hangs.
pub(crate) const ANSWER: Duration = Duration::from_secs(2);
/// More output than this is not an answer to anything that is asked here.
const LONGEST_OUTPUT: usize = 256 * 1024;

/// Why a daemon gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    #[error("the MPS control daemon did not answer `{what}` within {}s", .after.as_secs_f32())]
    Hung { what: String, after: Duration },
    #[error("cannot talk to the MPS control daemon")]
    Io(#[from] io::Error),
    #[error("the MPS control daemon closed the connection")]
    Closed,
    #[error("the MPS control daemon speaks another protocol than driver 580's")]
    Unknown,
    #[error("the client whose credentials were to be passed on is gone")]
    ClientGone,
    #[error(transparent)]
    Unexpected(#[from] Unexpected),
}

/// Asks for one command and returns what it printed, a line for each packet.
pub(crate) async fn ask(pipe: &Path, command: &Command, deadline: Duration) -> Result<String, ControlError> {
    ask_over(&pipe.join("control_privileged"), command, deadline).await
}

/// The same over a socket that need not be the privileged one.
pub(crate) async fn ask_over(socket: &Path, command: &Command, deadline: Duration) -> Result<String, ControlError> {
    within(deadline, &command.to_string(), async {
        let socket = Socket::connect(socket).await?;
        greeted(&socket).await?;
        socket.send_credentials(protocol::CREDENTIALS, Credentials::own()).await?;
        socket.send(&Kind::Administrator.packet()).await?;
        for packet in protocol::commands(command) {
            socket.send(&packet).await?;
        }
        let mut output = String::new();
        loop {
            let packet = socket.recv().await?.ok_or(ControlError::Closed)?;
            match Reply::parse(&packet.data).ok_or(ControlError::Unknown)? {
                Reply::End => return Ok(output),
                Reply::Text(_) if output.len() > LONGEST_OUTPUT => return Err(ControlError::Unknown),
                Reply::Text(text) => {
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

/// Whether the daemon greets as it is known to: then one can speak to it, and the door for its clients.
pub(crate) async fn is_known(pipe: &Path) -> Result<bool, ControlError> {
    within(ANSWER, "hello", async {
        let socket = connect(pipe, "control").await?;
        match greeted(&socket).await {
            Ok(()) => Ok(true),
            Err(ControlError::Unknown) => Ok(false),
            Err(error) => Err(error),
        }
    })
    .await
}

/// Asks by the driver's own command line tool, which speaks whatever its daemon speaks.
pub(crate) async fn ask_by_tool(
    children: &Children,
    mut tool: std::process::Command,
    command: &Command,
    deadline: Duration,
) -> Result<String, ControlError> {
    let (child, mut output) = children.spawn(&mut tool, format!("{command}\n").as_bytes())?;
    let answer = within(deadline, &command.to_string(), async {
        let mut text = Vec::new();
        (&mut output).take(LONGEST_OUTPUT as u64).read_to_end(&mut text).await?;
        let text = String::from_utf8_lossy(&text).into_owned();
        match child.exited().await {
            Exit::Status(0) => Ok(text),
            exit => Err(Unexpected::new(&format!("({exit}) {}", text.trim())).into()),
        }
    })
    .await;
    child.kill();
    answer
}

/// A client that the daemon has given a socket to the server, and waits for.
pub(crate) struct Introduced {
    /// The socket to the server.
    pub(crate) server: OwnedFd,
    /// The daemon, which waits for the last word about it.
    pub(crate) daemon: Waiting,
}

/// A daemon that serves nobody else until it is told what came of a client's connection to the server.
pub(crate) struct Waiting(Socket);

impl Waiting {
    /// Tells it.
    pub(crate) async fn finish(self, word: &[u8]) {
        // A daemon that is gone is noticed elsewhere.
        let _ = timeout(ANSWER, self.0.send(word)).await;
    }
}

/// Introduces a client to the daemon in its place, as `who`.
pub(crate) async fn introduce(pipe: &Path, who: Credentials) -> Result<Introduced, ControlError> {
    within(ANSWER, "a client's handshake", async {
        let daemon = connect(pipe, "control").await?;
        greeted(&daemon).await?;
        daemon.send_credentials(protocol::CREDENTIALS, who).await.map_err(|error| {
            // The kernel passes on only credentials of somebody who lives.
            if gone(&error) { ControlError::ClientGone } else { error.into() }
        })?;
        daemon.send(&Kind::Client.packet()).await?;
        let packet = daemon.recv_descriptor().await?.ok_or(ControlError::Closed)?;
        match packet.descriptor {
            Some(server) if packet.data == protocol::DESCRIPTOR => Ok(Introduced { server, daemon: Waiting(daemon) }),
            // This process has no descriptor free.
            None if packet.data == protocol::DESCRIPTOR => Err(io::Error::from(rustix::io::Errno::MFILE).into()),
            _ => Err(ControlError::Unknown),
        }
    })
    .await
}

fn gone(error: &io::Error) -> bool {
    [rustix::io::Errno::SRCH, rustix::io::Errno::PERM]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

async fn connect(pipe: &Path, socket: &str) -> Result<Socket, ControlError> {
    Ok(Socket::connect(&pipe.join(socket)).await?)
}

async fn greeted(socket: &Socket) -> Result<(), ControlError> {
    let hello = socket.recv().await?.ok_or(ControlError::Closed)?;
    if hello.data == protocol::HELLO { Ok(()) } else { Err(ControlError::Unknown) }
}

async fn within<T>(
    after: Duration,
    what: &str,
    work: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, ControlError> {
    timeout(after, work).await.unwrap_or_else(|_| Err(ControlError::Hung { what: what.to_owned(), after }))
}
