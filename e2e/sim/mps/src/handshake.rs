//! Implements the handshake on the `control` sockets and on the sockets that the daemon passes on,
//! as observed on driver 580.
//!
//! 1. daemon to client, on connect: `OUTBHELL\0`
//! 2. client to daemon: `OUTBCRED\0` with `SCM_CREDENTIALS`
//! 3. client to daemon: 4 bytes, little-endian: 2 for a CUDA client, 4 for an administrator
//! 4. daemon to client: `OUTBCUFD\0` with `SCM_RIGHTS`, a socket to the server
//! 5. server to client, on that socket: four times `OUTBCUFD\0` with a descriptor, then 1 byte 0
//! 6. client to server: `OUTBCRED\0` with `SCM_CREDENTIALS`, then 4 bytes (0 for a process, 1 for a
//!    context), then 4 bytes (0xff for a process, 0 for a context)
//! 7. server to client: 4 bytes, a `CUresult`
//! 8. client to daemon: the same 4 bytes, then close
//!
//! After step 3, the protocol of an administrator is different:
//!
//! 1. administrator to daemon, for each command: 8 bytes with the length, then the text with
//!    newline and NUL; after the last command 8 bytes 0
//! 2. daemon to administrator, for each line: 4 bytes 0 and the line in one packet; after the 8
//!    bytes 0, 8 bytes 1, then close
//!
//! The daemon serves one peer at a time. The server performs the handshake with one client at a
//! time. Both wait without deadlines.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use crate::seqpacket::{Connection, Credentials, Packet};

/// The daemon's greeting.
pub const HELLO_PACKET: &[u8; 9] = b"OUTBHELL\0";
/// A different greeting, as of another driver's daemon. The simulated tool and CUDA library accept
/// it. A door for driver 580 does not.
pub const HELLO_PACKET_OF_OTHER_DRIVER: &[u8; 9] = b"OUTBHEL2\0";
/// A different reply to a client, as of another driver's daemon. Doors do not accept this reply.
pub const REPLY_PACKET_OF_OTHER_DRIVER: &[u8; 9] = b"OUTBCUF2\0";
/// The packet that carries the client's credentials.
pub const CREDENTIALS_PACKET: &[u8; 9] = b"OUTBCRED\0";
/// The packet that carries a descriptor.
pub const DESCRIPTOR_PACKET: &[u8; 9] = b"OUTBCUFD\0";
/// The kind of a CUDA client.
pub const KIND_CLIENT: u32 = 2;
/// The kind of an administrator.
pub const KIND_ADMINISTRATOR: u32 = 4;
/// The packet that ends an administrator's commands.
pub const END_OF_COMMANDS: [u8; 8] = [0; 8];
/// The packet that ends the daemon's replies.
pub const END_OF_REPLIES: [u8; 8] = 1_u64.to_le_bytes();

/// Number of descriptors that the server sends to a client.
const MAX_DESCRIPTORS: usize = 4;
/// Maximum length of an administrator's command, in bytes.
pub const MAX_COMMAND_BYTES: usize = 4096;
/// Maximum length of a line of an answer, in bytes.
const MAX_LINE_BYTES: usize = 64 * 1024;

/// The peer of a connection, after its introduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IntroducedPeer {
    /// A CUDA program that requests a socket to the server.
    Client(Credentials),
    /// An administrator, who sends commands.
    Administrator(Credentials),
}

/// The subject of an introduction to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IntroductionSubject {
    /// The process. A process introduces itself before its contexts, and this first introduction
    /// determines its limits.
    Process,
    /// A context of the process.
    Context,
}

impl IntroductionSubject {
    /// Returns the two 4-byte words that introduce the subject to the server.
    pub fn introduction_words(self) -> [[u8; 4]; 2] {
        match self {
            Self::Process => [0_u32.to_le_bytes(), 0xff_u32.to_le_bytes()],
            Self::Context => [1_u32.to_le_bytes(), 0_u32.to_le_bytes()],
        }
    }
}

/// Why a handshake failed, as seen by the daemon or the server.
#[derive(Debug)]
pub enum HandshakeFailure {
    /// The peer closed the connection early. The CUDA library does so with its first connection.
    Closed,
    /// The peer violated the protocol.
    Malformed(&'static str),
    /// The socket failed.
    Io(io::Error),
}

impl From<io::Error> for HandshakeFailure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Performs the first steps of the daemon's side: sends the greeting, and reads the peer's
/// credentials and kind.
///
/// # Errors
/// Returns [`HandshakeFailure`] if the peer closes the connection or violates the protocol, or if
/// the socket fails.
pub fn read_peer_kind(connection: &Connection, hello: &[u8]) -> Result<IntroducedPeer, HandshakeFailure> {
    connection.send(hello).map_err(|_| HandshakeFailure::Closed)?;
    let first = connection.recv_credentials(64)?.ok_or(HandshakeFailure::Closed)?;
    if first.data != CREDENTIALS_PACKET || first.truncated {
        return Err(HandshakeFailure::Malformed("not OUTBCRED"));
    }
    let credentials = first.credentials.ok_or(HandshakeFailure::Malformed("no credentials"))?;
    let kind = connection.recv(64)?.ok_or(HandshakeFailure::Closed)?;
    match packet_to_u32(&kind) {
        Some(KIND_CLIENT) => Ok(IntroducedPeer::Client(credentials)),
        Some(KIND_ADMINISTRATOR) => Ok(IntroducedPeer::Administrator(credentials)),
        Some(_) => Err(HandshakeFailure::Malformed("unknown kind")),
        None => Err(HandshakeFailure::Malformed("the kind does not have 4 bytes")),
    }
}

/// Performs the daemon's side: reads an administrator's next command. Returns `None` after the last
/// command.
///
/// # Errors
/// Returns [`HandshakeFailure`] if the peer closes the connection or violates the protocol, or if
/// the socket fails.
pub fn next_command(connection: &Connection) -> Result<Option<String>, HandshakeFailure> {
    let length = connection.recv(64)?.ok_or(HandshakeFailure::Closed)?;
    let length = <[u8; 8]>::try_from(length.data.as_slice())
        .map_err(|_| HandshakeFailure::Malformed("the length does not have 8 bytes"))?;
    let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length == 0 {
        return Ok(None);
    }
    if length > MAX_COMMAND_BYTES {
        return Err(HandshakeFailure::Malformed("the command is too long"));
    }
    let Packet { data, truncated, .. } = connection.recv(MAX_COMMAND_BYTES)?.ok_or(HandshakeFailure::Closed)?;
    if truncated || data.len() != length {
        return Err(HandshakeFailure::Malformed("the command does not have the announced length"));
    }
    let text = data.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(Some(String::from_utf8_lossy(text).trim().to_owned()))
}

/// Performs the daemon's side: sends one line of an answer.
///
/// # Errors
/// Returns an error if the packet cannot be sent.
pub fn send_answer_line(connection: &Connection, line: &str) -> io::Result<()> {
    connection.send(&[&[0; 4], line.as_bytes()].concat())
}

/// Performs the server's side: sends the descriptors to a client, and reads the client's
/// introduction. The first descriptor is `channel`.
///
/// Reads all three packets of the introduction before checking them, as the real server does.
///
/// # Errors
/// Returns [`HandshakeFailure`] if the client closes the connection or violates the protocol, or if
/// an operation on a file or socket fails.
pub fn receive_introduction(
    connection: &Connection,
    channel: &Connection,
) -> Result<(IntroductionSubject, Credentials), HandshakeFailure> {
    let other = File::open("/dev/null")?;
    for number in 0..MAX_DESCRIPTORS {
        let fd = if number == 0 { channel.as_fd() } else { other.as_fd() };
        connection.send_fd(DESCRIPTOR_PACKET, fd).map_err(|_| HandshakeFailure::Closed)?;
    }
    connection.send(&[0]).map_err(|_| HandshakeFailure::Closed)?;
    let first = connection.recv_credentials(64)?.ok_or(HandshakeFailure::Closed)?;
    let subject = connection.recv(64)?.ok_or(HandshakeFailure::Closed)?;
    connection.recv(64)?.ok_or(HandshakeFailure::Closed)?;
    let credentials = first.credentials.filter(|_| first.data == CREDENTIALS_PACKET);
    let subject = match packet_to_u32(&subject) {
        Some(0) => Some(IntroductionSubject::Process),
        Some(1) => Some(IntroductionSubject::Context),
        _ => None,
    };
    subject.zip(credentials).ok_or(HandshakeFailure::Malformed("the introduction is invalid"))
}

/// Checks whether a daemon is listening: connects and closes the connection immediately, as the
/// CUDA library does first.
///
/// # Errors
/// Returns an error if no daemon listens at the socket.
pub fn probe_daemon(control: &Path) -> io::Result<()> {
    Connection::connect(control).map(drop)
}

/// Performs the first steps of the client's side: reads the greeting, and sends credentials and the
/// kind. Returns `None` if the daemon closes the connection or uses another protocol.
///
/// # Errors
/// Returns an error if no daemon listens at the socket, or if the socket fails.
pub fn introduce_to_daemon(control: &Path, kind: u32) -> io::Result<Option<Connection>> {
    let connection = Connection::connect(control)?;
    match connection.recv(64)? {
        Some(hello) if hello.data == HELLO_PACKET || hello.data == HELLO_PACKET_OF_OTHER_DRIVER => {}
        _ => return Ok(None),
    }
    let sent = connection
        .send_credentials(CREDENTIALS_PACKET, own_credentials())
        .and_then(|()| connection.send(&kind.to_le_bytes()));
    match sent {
        Ok(()) => Ok(Some(connection)),
        Err(error) if is_closed_error(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A client's connections during the handshake.
#[derive(Debug)]
pub struct ClientSockets {
    /// The connection to the daemon. The daemon waits for the last packet of the handshake.
    pub daemon: Connection,
    /// The socket to the server. The client keeps this socket open until the client exits.
    pub server: Connection,
}

/// Why a client could not connect.
#[derive(Debug)]
pub enum ConnectError {
    /// No daemon exists, or the daemon refused the client. The CUDA library treats neither case as
    /// an error.
    ByDaemon,
    /// The server exited during the handshake.
    ByServer,
    /// The server refused the client with a `CUresult`.
    Refused(i32),
}

/// Performs the client's side until the client has received the socket to the server. Waits without
/// a deadline.
///
/// # Errors
/// Returns [`ConnectError::ByDaemon`] if no daemon exists or the daemon refuses the client.
pub fn connect_to_server(control: &Path) -> Result<ClientSockets, ConnectError> {
    let daemon = introduce_to_daemon(control, KIND_CLIENT).ok().flatten().ok_or(ConnectError::ByDaemon)?;
    let packet = daemon.recv_fd(64).ok().flatten().filter(|packet| packet.data == DESCRIPTOR_PACKET);
    let server = packet.and_then(|packet| packet.fd).ok_or(ConnectError::ByDaemon)?;
    Ok(ClientSockets { daemon, server: Connection::from_fd(server) })
}

impl ClientSockets {
    /// Receives the server's descriptors, and returns the first descriptor: the channel between
    /// client and server.
    ///
    /// # Errors
    /// Returns [`ConnectError::ByServer`] if the server exits before it has sent all descriptors.
    pub fn receive_channel(&self) -> Result<Connection, ConnectError> {
        // Turn off credentials, because they would use the buffer space of the descriptors.
        rustix::net::sockopt::set_socket_passcred(&self.server, false).map_err(|_| ConnectError::ByServer)?;
        let mut channel = None;
        for _ in 0..MAX_DESCRIPTORS {
            let packet = self.server.recv_fd(64).ok().flatten().ok_or(ConnectError::ByServer)?;
            let fd = packet.fd.ok_or(ConnectError::ByServer)?;
            channel.get_or_insert(Connection::from_fd(fd));
        }
        self.server.recv(64).ok().flatten().ok_or(ConnectError::ByServer)?;
        channel.ok_or(ConnectError::ByServer)
    }

    /// Performs the remaining steps of the client's side: introduces `subject` to the server, reads
    /// the answer, and sends the same answer to the daemon as the last packet. Returns the channel
    /// to the server and the socket of the handshake.
    ///
    /// # Errors
    /// Returns [`ConnectError`] if the server exits or refuses the client.
    pub fn introduce_to_server(self, subject: IntroductionSubject) -> Result<(Connection, Connection), ConnectError> {
        self.introduce_to_server_as(subject, own_credentials())
    }

    /// Like [`introduce_to_server`](Self::introduce_to_server), but with the credentials of another
    /// process. The caller must be root.
    ///
    /// # Errors
    /// Returns the errors of [`introduce_to_server`](Self::introduce_to_server).
    pub fn introduce_to_server_as(
        self,
        subject: IntroductionSubject,
        who: Credentials,
    ) -> Result<(Connection, Connection), ConnectError> {
        let channel = self.receive_channel()?;
        let [first, second] = subject.introduction_words();
        let sent = self
            .server
            .send_credentials(CREDENTIALS_PACKET, who)
            .and_then(|()| self.server.send(&first))
            .and_then(|()| self.server.send(&second));
        sent.map_err(|_| ConnectError::ByServer)?;
        let answer = self.server.recv(64).ok().flatten().ok_or(ConnectError::ByServer)?;
        let result =
            packet_to_u32(&answer).and_then(|result| i32::try_from(result).ok()).ok_or(ConnectError::ByServer)?;
        // Ignore errors, because the daemon may have closed the connection, but the server has
        // already decided.
        let _ = self.daemon.send(&answer.data);
        if result == 0 { Ok((channel, self.server)) } else { Err(ConnectError::Refused(result)) }
    }
}

/// Performs the administrator's side: sends one command, and returns the lines of the answer.
/// Returns `None` if the daemon closes the connection without an answer.
///
/// # Errors
/// Returns an error if no daemon listens at the socket, or if the socket fails.
pub fn send_command(control: &Path, command: &str) -> io::Result<Option<String>> {
    let Some(connection) = introduce_to_daemon(control, KIND_ADMINISTRATOR)? else { return Ok(None) };
    let text = format!("{}\n\0", command.trim());
    let length = u64::try_from(text.len()).unwrap_or(u64::MAX).to_le_bytes();
    for packet in [length.as_slice(), text.as_bytes(), END_OF_COMMANDS.as_slice()] {
        match connection.send(packet) {
            // Continue to read: the daemon may have sent the answer before it closed the
            // connection.
            Err(error) if is_closed_error(&error) => break,
            other => other?,
        }
    }
    let mut answer = String::new();
    while let Some(packet) = connection.recv(4 + MAX_LINE_BYTES)? {
        if packet.data == END_OF_REPLIES {
            return Ok(Some(answer));
        }
        answer.push_str(&String::from_utf8_lossy(packet.data.get(4..).unwrap_or_default()));
        answer.push('\n');
    }
    Ok(None)
}

/// Returns this process's credentials, as its own namespaces identify it.
pub fn own_credentials() -> Credentials {
    Credentials {
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
    }
}

fn packet_to_u32(packet: &Packet) -> Option<u32> {
    <[u8; 4]>::try_from(packet.data.as_slice()).ok().map(u32::from_le_bytes)
}

/// Returns whether the error means that the peer has closed the connection.
fn is_closed_error(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::seqpacket::Listener;

    #[test]
    fn daemon_and_server_accept_a_client() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let listener = Listener::bind(&path, 0o666).unwrap();
        let daemon = thread::spawn(move || {
            assert!(matches!(read_peer_kind(&listener.accept().unwrap(), HELLO_PACKET), Err(HandshakeFailure::Closed)));
            let connection = listener.accept().unwrap();
            let visitor = read_peer_kind(&connection, HELLO_PACKET).unwrap();
            let (client, server) = Connection::pair().unwrap();
            server.enable_credentials().unwrap();
            connection.send_fd(DESCRIPTOR_PACKET, client.as_fd()).unwrap();
            let (channel, theirs) = Connection::pair().unwrap();
            let (subject, credentials) = receive_introduction(&server, &theirs).unwrap();
            assert_eq!((subject, IntroducedPeer::Client(credentials)), (IntroductionSubject::Context, visitor));
            server.send(&0_u32.to_le_bytes()).unwrap();
            assert_eq!(connection.recv(64).unwrap().unwrap().data, [0; 4]);
            channel.send(b"hello").unwrap();
            visitor
        });
        probe_daemon(&path).unwrap();
        let (channel, _server) =
            connect_to_server(&path).unwrap().introduce_to_server(IntroductionSubject::Context).unwrap();
        assert_eq!(channel.recv(64).unwrap().unwrap().data, b"hello");
        assert_eq!(daemon.join().unwrap(), IntroducedPeer::Client(own_credentials()));
    }

    #[test]
    fn commands_and_answers_are_framed_and_parsed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let listener = Listener::bind(&path, 0o666).unwrap();
        let daemon = thread::spawn(move || {
            let connection = listener.accept().unwrap();
            assert_eq!(
                read_peer_kind(&connection, HELLO_PACKET).unwrap(),
                IntroducedPeer::Administrator(own_credentials())
            );
            assert_eq!(next_command(&connection).unwrap().as_deref(), Some("get_server_list"));
            send_answer_line(&connection, "17").unwrap();
            send_answer_line(&connection, "").unwrap();
            send_answer_line(&connection, &"x".repeat(40_000)).unwrap();
            assert_eq!(next_command(&connection).unwrap(), None);
            connection.send(&END_OF_REPLIES).unwrap();
        });
        assert_eq!(send_command(&path, "get_server_list").unwrap(), Some(format!("17\n\n{}\n", "x".repeat(40_000))));
        daemon.join().unwrap();
    }

    #[test]
    fn protocol_violations_are_refused() {
        let greeted = |packets: &[&[u8]]| {
            let (client, daemon) = Connection::pair().unwrap();
            daemon.enable_credentials().unwrap();
            for packet in packets {
                client.send(packet).unwrap();
            }
            read_peer_kind(&daemon, HELLO_PACKET)
        };
        assert!(matches!(greeted(&[b"OUTBCRED"]), Err(HandshakeFailure::Malformed(_))));
        assert!(matches!(greeted(&[&[7; 1000]]), Err(HandshakeFailure::Malformed(_))));
        assert!(matches!(greeted(&[CREDENTIALS_PACKET, &[2; 8]]), Err(HandshakeFailure::Malformed(_))));
        assert!(matches!(greeted(&[CREDENTIALS_PACKET, &3_u32.to_le_bytes()]), Err(HandshakeFailure::Malformed(_))));
        assert!(matches!(greeted(&[CREDENTIALS_PACKET, &KIND_CLIENT.to_le_bytes()]), Ok(IntroducedPeer::Client(_))));
    }

    #[test]
    fn a_complete_introduction_after_a_partial_one_ends_the_servers_wait() {
        for said in 0..3 {
            let (client, server) = Connection::pair().unwrap();
            server.enable_credentials().unwrap();
            let (channel, _theirs) = Connection::pair().unwrap();
            let [first, second] = IntroductionSubject::Process.introduction_words();
            let words: [&[u8]; 3] = [CREDENTIALS_PACKET, &first, &second];
            for packet in words[..said].iter().chain(&words) {
                client.send(packet).unwrap();
            }
            let received = receive_introduction(&server, &channel);
            assert!(
                received.is_ok() || said > 0 && matches!(received, Err(HandshakeFailure::Malformed(_))),
                "{said}: {received:?}"
            );
        }
    }

    #[test]
    fn a_command_without_the_announced_length_is_refused() {
        let cases: [(u64, &[u8]); 3] = [(3, b"quit\n\0"), (1 << 40, b"quit\n\0"), (4097, &[b'a'; 4097])];
        for (length, text) in cases {
            let (client, daemon) = Connection::pair().unwrap();
            client.send(&length.to_le_bytes()).unwrap();
            client.send(text).unwrap();
            assert!(matches!(next_command(&daemon), Err(HandshakeFailure::Malformed(_))), "{length}");
        }
    }
}
