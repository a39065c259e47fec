//! What passes over the `control` sockets and over the socket that they bring, as it was observed
//! on driver 580.
//!
//! | direction | message |
//! |---|---|
//! | daemon → client | `OUTBHELL\0`, on connect |
//! | client → daemon | `OUTBCRED\0`, with `SCM_CREDENTIALS` |
//! | client → daemon | 4 bytes, little-endian: 2 = a CUDA client, 4 = an administrator |
//! | daemon → client | `OUTBCUFD\0`, with `SCM_RIGHTS`: a socket to the server |
//! | server → client, on that socket | 4 times `OUTBCUFD\0` with a descriptor, then 1 byte 0 |
//! | client → server | `OUTBCRED\0` with `SCM_CREDENTIALS`; 4 bytes: 0 = a process, 1 = a context; 4 bytes: 0xff, or 0 |
//! | server → client | 4 bytes, a `CUresult` |
//! | client → daemon | the same 4 bytes, then close |
//! | administrator → daemon, after 4 | for each command 8 bytes length, the text with newline and NUL; then 8 bytes 0 |
//! | daemon → administrator | for each line 4 bytes 0 and the line in one packet; after the 8 bytes 0, 8 bytes 1; then close |
//!
//! The daemon does all this for one visitor after the other, and the server for one client, without
//! any deadline.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use crate::seqpacket::{Connection, Credentials, Packet};

/// The daemon's greeting.
pub const HELLO: &[u8; 9] = b"OUTBHELL\0";
/// What another driver's daemon might say. Tool and CUDA library come with the driver and know it;
/// a door for driver 580 does not.
pub const OTHER_HELLO: &[u8; 9] = b"OUTBHEL2\0";
/// The client's credentials come with it.
pub const CREDENTIALS: &[u8; 9] = b"OUTBCRED\0";
/// A descriptor comes with it.
pub const DESCRIPTOR: &[u8; 9] = b"OUTBCUFD\0";
/// Says that a CUDA client knocks.
pub const KIND_CLIENT: u32 = 2;
/// Says that an administrator's command follows.
pub const KIND_ADMINISTRATOR: u32 = 4;
/// Ends an administrator's commands.
pub const END_OF_COMMANDS: [u8; 8] = [0; 8];
/// Ends the daemon's replies.
pub const END_OF_REPLIES: [u8; 8] = 1_u64.to_le_bytes();

/// Descriptors that a client gets from the server.
const DESCRIPTORS: usize = 4;
/// The longest administrator's command.
pub const LONGEST_COMMAND: usize = 4096;
/// The longest line of a reply.
const LONGEST_LINE: usize = 64 * 1024;

/// What a connection turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visitor {
    /// A CUDA program that wants a socket to the server.
    Client(Credentials),
    /// Someone with commands.
    Administrator(Credentials),
}

/// What a client introduces to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// Itself, first of all: its limits bind now.
    Process,
    /// A context of its own.
    Context,
}

impl Subject {
    /// The two words that say it.
    pub fn words(self) -> [[u8; 4]; 2] {
        match self {
            Self::Process => [0_u32.to_le_bytes(), 0xff_u32.to_le_bytes()],
            Self::Context => [1_u32.to_le_bytes(), 0_u32.to_le_bytes()],
        }
    }
}

/// Why a handshake came to nothing, seen from the daemon or the server.
#[derive(Debug)]
pub enum Refusal {
    /// It closed before it had said everything: each client's first connection does.
    Closed,
    /// It said something that is not the protocol.
    Malformed(&'static str),
    /// The socket failed.
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The daemon's side up to the kind: greets and finds out who is there.
pub fn greet(connection: &Connection, hello: &[u8]) -> Result<Visitor, Refusal> {
    connection.send(hello).map_err(|_| Refusal::Closed)?;
    let first = connection.recv_credentials(64)?.ok_or(Refusal::Closed)?;
    if first.data != CREDENTIALS || first.truncated {
        return Err(Refusal::Malformed("not OUTBCRED"));
    }
    let credentials = first.credentials.ok_or(Refusal::Malformed("no credentials"))?;
    let kind = connection.recv(64)?.ok_or(Refusal::Closed)?;
    match word(&kind) {
        Some(KIND_CLIENT) => Ok(Visitor::Client(credentials)),
        Some(KIND_ADMINISTRATOR) => Ok(Visitor::Administrator(credentials)),
        Some(_) => Err(Refusal::Malformed("unknown kind")),
        None => Err(Refusal::Malformed("a kind of other than 4 bytes")),
    }
}

/// The daemon's side of one administrator's command; `None` when there are no more.
pub fn next_command(connection: &Connection) -> Result<Option<String>, Refusal> {
    let length = connection.recv(64)?.ok_or(Refusal::Closed)?;
    let length = <[u8; 8]>::try_from(length.data.as_slice())
        .map_err(|_| Refusal::Malformed("a length of other than 8 bytes"))?;
    let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length == 0 {
        return Ok(None);
    }
    if length > LONGEST_COMMAND {
        return Err(Refusal::Malformed("a command that is too long"));
    }
    let Packet { data, truncated, .. } = connection.recv(LONGEST_COMMAND)?.ok_or(Refusal::Closed)?;
    if truncated || data.len() != length {
        return Err(Refusal::Malformed("a command that is not as long as was said"));
    }
    let text = data.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(Some(String::from_utf8_lossy(text).trim().to_owned()))
}

/// The daemon's side: one line of an answer.
pub fn reply(connection: &Connection, line: &str) -> io::Result<()> {
    connection.send(&[&[0; 4], line.as_bytes()].concat())
}

/// The server's side: gives a client its descriptors, of which the first is `channel`, and hears
/// who it is.
///
/// Three packets are taken for the three words whatever they are, and refused afterwards if they
/// are not.
pub fn receive(connection: &Connection, channel: &Connection) -> Result<(Subject, Credentials), Refusal> {
    let other = File::open("/dev/null")?;
    for number in 0..DESCRIPTORS {
        let fd = if number == 0 { channel.as_fd() } else { other.as_fd() };
        connection.send_fd(DESCRIPTOR, fd).map_err(|_| Refusal::Closed)?;
    }
    connection.send(&[0]).map_err(|_| Refusal::Closed)?;
    let first = connection.recv_credentials(64)?.ok_or(Refusal::Closed)?;
    let subject = connection.recv(64)?.ok_or(Refusal::Closed)?;
    connection.recv(64)?.ok_or(Refusal::Closed)?;
    let credentials = first.credentials.filter(|_| first.data == CREDENTIALS);
    let subject = match word(&subject) {
        Some(0) => Some(Subject::Process),
        Some(1) => Some(Subject::Context),
        _ => None,
    };
    subject.zip(credentials).ok_or(Refusal::Malformed("not the words of a client"))
}

/// Whether there is a daemon: connects and closes at once, as the CUDA library does first.
pub fn probe(control: &Path) -> io::Result<()> {
    Connection::connect(control).map(drop)
}

/// The client's side up to the kind. `None`: the daemon closed, or is none that this protocol
/// knows.
pub fn introduce(control: &Path, kind: u32) -> io::Result<Option<Connection>> {
    let connection = Connection::connect(control)?;
    match connection.recv(64)? {
        Some(hello) if hello.data == HELLO || hello.data == OTHER_HELLO => {}
        _ => return Ok(None),
    }
    let sent =
        connection.send_credentials(CREDENTIALS, own_credentials()).and_then(|()| connection.send(&kind.to_le_bytes()));
    match sent {
        Ok(()) => Ok(Some(connection)),
        Err(error) if is_end(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A client at the server, as far as the handshake goes.
#[derive(Debug)]
pub struct Entrance {
    /// The daemon, which waits for the last word.
    pub daemon: Connection,
    /// The socket to the server. A client keeps it for as long as it lives.
    pub server: Connection,
}

/// Why a client was not let in.
#[derive(Debug)]
pub enum Closed {
    /// There is no daemon, or none that lets it in: to the CUDA library that is no error.
    ByDaemon,
    /// The server died on the way.
    ByServer,
    /// The server refused it: a `CUresult`.
    Refused(i32),
}

/// The client's side up to the socket to the server, however long the daemon makes it wait.
pub fn knock(control: &Path) -> Result<Entrance, Closed> {
    let daemon = introduce(control, KIND_CLIENT).ok().flatten().ok_or(Closed::ByDaemon)?;
    let packet = daemon.recv_fd(64).ok().flatten().filter(|packet| packet.data == DESCRIPTOR);
    let server = packet.and_then(|packet| packet.fd).ok_or(Closed::ByDaemon)?;
    Ok(Entrance { daemon, server: Connection::from_fd(server) })
}

impl Entrance {
    /// The descriptors that the server gives: the first is what client and server talk over.
    pub fn channel(&self) -> Result<Connection, Closed> {
        // It attests the server to the client: credentials would take the room of descriptors.
        rustix::net::sockopt::set_socket_passcred(&self.server, false).map_err(|_| Closed::ByServer)?;
        let mut channel = None;
        for _ in 0..DESCRIPTORS {
            let packet = self.server.recv_fd(64).ok().flatten().ok_or(Closed::ByServer)?;
            let fd = packet.fd.ok_or(Closed::ByServer)?;
            channel.get_or_insert(Connection::from_fd(fd));
        }
        self.server.recv(64).ok().flatten().ok_or(Closed::ByServer)?;
        channel.ok_or(Closed::ByServer)
    }

    /// The rest of the client's side: tells the server, hears its answer, and passes it on to the
    /// daemon as the last word. The channel to the server and the socket that came before it.
    pub fn enter(self, subject: Subject) -> Result<(Connection, Connection), Closed> {
        self.enter_as(subject, own_credentials())
    }

    /// The same as another process: root may say that it is.
    pub fn enter_as(self, subject: Subject, who: Credentials) -> Result<(Connection, Connection), Closed> {
        let channel = self.channel()?;
        let [first, second] = subject.words();
        let said = self
            .server
            .send_credentials(CREDENTIALS, who)
            .and_then(|()| self.server.send(&first))
            .and_then(|()| self.server.send(&second));
        said.map_err(|_| Closed::ByServer)?;
        let answer = self.server.recv(64).ok().flatten().ok_or(Closed::ByServer)?;
        let result = word(&answer).and_then(|result| i32::try_from(result).ok()).ok_or(Closed::ByServer)?;
        // The server has decided: a daemon that is gone before the last word changes nothing.
        let _ = self.daemon.send(&answer.data);
        if result == 0 { Ok((channel, self.server)) } else { Err(Closed::Refused(result)) }
    }
}

/// The administrator's side: one command and the lines of its answer. `None`: the daemon closed
/// without one.
pub fn ask(control: &Path, command: &str) -> io::Result<Option<String>> {
    let Some(connection) = introduce(control, KIND_ADMINISTRATOR)? else { return Ok(None) };
    let text = format!("{}\n\0", command.trim());
    let length = u64::try_from(text.len()).unwrap_or(u64::MAX).to_le_bytes();
    for packet in [length.as_slice(), text.as_bytes(), END_OF_COMMANDS.as_slice()] {
        match connection.send(packet) {
            // What it already answered can still be read.
            Err(error) if is_end(&error) => break,
            other => other?,
        }
    }
    let mut answer = String::new();
    while let Some(packet) = connection.recv(4 + LONGEST_LINE)? {
        if packet.data == END_OF_REPLIES {
            return Ok(Some(answer));
        }
        answer.push_str(&String::from_utf8_lossy(packet.data.get(4..).unwrap_or_default()));
        answer.push('\n');
    }
    Ok(None)
}

/// This process's credentials, as it sees them itself.
pub fn own_credentials() -> Credentials {
    Credentials {
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
    }
}

fn word(packet: &Packet) -> Option<u32> {
    <[u8; 4]>::try_from(packet.data.as_slice()).ok().map(u32::from_le_bytes)
}

/// Whether the peer went away, as opposed to a failure here.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::seqpacket::Listener;

    #[test]
    fn a_client_is_let_in_by_daemon_and_server() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let listener = Listener::bind(&path, 0o666).unwrap();
        let daemon = thread::spawn(move || {
            assert!(matches!(greet(&listener.accept().unwrap(), HELLO), Err(Refusal::Closed)));
            let connection = listener.accept().unwrap();
            let visitor = greet(&connection, HELLO).unwrap();
            let (client, server) = Connection::pair().unwrap();
            server.attest().unwrap();
            connection.send_fd(DESCRIPTOR, client.as_fd()).unwrap();
            let (channel, theirs) = Connection::pair().unwrap();
            let (subject, credentials) = receive(&server, &theirs).unwrap();
            assert_eq!((subject, Visitor::Client(credentials)), (Subject::Context, visitor));
            server.send(&0_u32.to_le_bytes()).unwrap();
            assert_eq!(connection.recv(64).unwrap().unwrap().data, [0; 4]);
            channel.send(b"hello").unwrap();
            visitor
        });
        probe(&path).unwrap();
        let (channel, _server) = knock(&path).unwrap().enter(Subject::Context).unwrap();
        assert_eq!(channel.recv(64).unwrap().unwrap().data, b"hello");
        assert_eq!(daemon.join().unwrap(), Visitor::Client(own_credentials()));
    }

    #[test]
    fn commands_and_their_answers_survive_the_framing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let listener = Listener::bind(&path, 0o666).unwrap();
        let daemon = thread::spawn(move || {
            let connection = listener.accept().unwrap();
            assert_eq!(greet(&connection, HELLO).unwrap(), Visitor::Administrator(own_credentials()));
            assert_eq!(next_command(&connection).unwrap().as_deref(), Some("get_server_list"));
            reply(&connection, "17").unwrap();
            reply(&connection, "").unwrap();
            reply(&connection, &"x".repeat(40_000)).unwrap();
            assert_eq!(next_command(&connection).unwrap(), None);
            connection.send(&END_OF_REPLIES).unwrap();
        });
        assert_eq!(ask(&path, "get_server_list").unwrap(), Some(format!("17\n\n{}\n", "x".repeat(40_000))));
        daemon.join().unwrap();
    }

    #[test]
    fn what_is_not_the_protocol_is_refused() {
        let greeted = |packets: &[&[u8]]| {
            let (client, daemon) = Connection::pair().unwrap();
            daemon.attest().unwrap();
            for packet in packets {
                client.send(packet).unwrap();
            }
            greet(&daemon, HELLO)
        };
        assert!(matches!(greeted(&[b"OUTBCRED"]), Err(Refusal::Malformed(_))));
        assert!(matches!(greeted(&[&[7; 1000]]), Err(Refusal::Malformed(_))));
        assert!(matches!(greeted(&[CREDENTIALS, &[2; 8]]), Err(Refusal::Malformed(_))));
        assert!(matches!(greeted(&[CREDENTIALS, &3_u32.to_le_bytes()]), Err(Refusal::Malformed(_))));
        assert!(matches!(greeted(&[CREDENTIALS, &KIND_CLIENT.to_le_bytes()]), Ok(Visitor::Client(_))));
    }

    #[test]
    fn words_said_again_in_a_clients_place_end_the_servers_wait_whatever_it_had_said() {
        for said in 0..3 {
            let (client, server) = Connection::pair().unwrap();
            server.attest().unwrap();
            let (channel, _theirs) = Connection::pair().unwrap();
            let [first, second] = Subject::Process.words();
            let words: [&[u8]; 3] = [CREDENTIALS, &first, &second];
            for packet in words[..said].iter().chain(&words) {
                client.send(packet).unwrap();
            }
            let heard = receive(&server, &channel);
            assert!(heard.is_ok() || said > 0 && matches!(heard, Err(Refusal::Malformed(_))), "{said}: {heard:?}");
        }
    }

    #[test]
    fn a_command_of_another_length_than_was_said_is_refused() {
        let cases: [(u64, &[u8]); 3] = [(3, b"quit\n\0"), (1 << 40, b"quit\n\0"), (4097, &[b'a'; 4097])];
        for (length, text) in cases {
            let (client, daemon) = Connection::pair().unwrap();
            client.send(&length.to_le_bytes()).unwrap();
            client.send(text).unwrap();
            assert!(matches!(next_command(&daemon), Err(Refusal::Malformed(_))), "{length}");
        }
    }
}
