//! What passes over the `control` sockets, as it was observed on driver 580.
//!
//! | direction | message |
//! |---|---|
//! | daemon → client | `OUTBHELL\0`, on connect |
//! | client → daemon | `OUTBCRED\0`, with SCM_CREDENTIALS |
//! | client → daemon | 4 bytes, little-endian: 2 = a CUDA client, 4 = an administrator |
//! | daemon → client | `OUTBCUFD\0`, with SCM_RIGHTS: a socket to the server |
//! | client → daemon | 4 bytes 0, then close |
//! | administrator → daemon, after 4 | 8 bytes length, the text with newline and NUL, 8 bytes 0 |
//! | daemon → administrator | 4 bytes 0 and the text in one packet, then 8 bytes 1, then close |

use std::io;
use std::path::Path;

use crate::seqpacket::{Connection, Credentials, Packet};

/// The daemon's greeting.
pub const HELLO: &[u8; 9] = b"OUTBHELL\0";
/// The client's credentials come with it.
pub const CREDENTIALS: &[u8; 9] = b"OUTBCRED\0";
/// A socket to the server comes with it.
pub const DESCRIPTOR: &[u8; 9] = b"OUTBCUFD\0";
/// Says that a CUDA client knocks.
pub const KIND_CLIENT: u32 = 2;
/// Says that an administrator's command follows.
pub const KIND_ADMINISTRATOR: u32 = 4;
/// The client's last word before it closes.
pub const DONE: [u8; 4] = [0; 4];
/// Ends an administrator's commands.
pub const END_OF_COMMANDS: [u8; 8] = [0; 8];
/// Ends the daemon's replies.
pub const END_OF_REPLIES: [u8; 8] = 1_u64.to_le_bytes();

/// The longest administrator's command.
pub const LONGEST_COMMAND: usize = 4096;
/// The longest reply; a longer one comes in several packets.
const LONGEST_REPLY: usize = 32 * 1024;

/// What a connection turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visitor {
    /// A CUDA program that wants a socket to the server.
    Client(Credentials),
    /// Someone with commands.
    Administrator(Credentials),
}

/// Why a handshake came to nothing, seen from the daemon.
#[derive(Debug)]
pub enum Refusal {
    /// It closed before it said anything: each client's first connection does.
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
    match <[u8; 4]>::try_from(kind.data.as_slice()).map(u32::from_le_bytes) {
        Ok(KIND_CLIENT) => Ok(Visitor::Client(credentials)),
        Ok(KIND_ADMINISTRATOR) => Ok(Visitor::Administrator(credentials)),
        Ok(_) => Err(Refusal::Malformed("unknown kind")),
        Err(_) => Err(Refusal::Malformed("a kind of other than 4 bytes")),
    }
}

/// The daemon's side of one administrator's command; `None` when there are no more.
pub fn next_command(connection: &Connection) -> Result<Option<String>, Refusal> {
    let Some(length) = connection.recv(64)? else { return Ok(None) };
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

/// The daemon's side: the answer to one command.
pub fn reply(connection: &Connection, text: &str) -> io::Result<()> {
    for part in text.as_bytes().chunks(LONGEST_REPLY) {
        let mut packet = vec![0; 4];
        packet.extend_from_slice(part);
        connection.send(&packet)?;
    }
    connection.send(&END_OF_REPLIES)
}

/// Whether there is a daemon: connects and closes at once, as the CUDA library does first.
pub fn probe(control: &Path) -> io::Result<()> {
    Connection::connect(control).map(drop)
}

/// The client's side up to the kind. `None`: the daemon closed, or is none that this protocol knows.
pub fn introduce(control: &Path, kind: u32) -> io::Result<Option<Connection>> {
    let connection = Connection::connect(control)?;
    match connection.recv(64)? {
        Some(hello) if hello.data == HELLO => {}
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

/// The client's side: a socket to the server, however long the daemon makes it wait. `None`: the daemon closed.
pub fn knock(control: &Path) -> io::Result<Option<Connection>> {
    let Some(connection) = introduce(control, KIND_CLIENT)? else { return Ok(None) };
    let Some(packet) = connection.recv_fd(64)? else { return Ok(None) };
    if packet.data != DESCRIPTOR {
        return Ok(None);
    }
    // The socket to the server is here: a daemon that is gone before the last word changes nothing.
    let _ = connection.send(&DONE);
    Ok(packet.fd.map(Connection::from_fd))
}

/// The administrator's side: one command and its answer. `None`: the daemon closed without one.
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
    let mut answer = Vec::new();
    while let Some(packet) = connection.recv(4 + LONGEST_REPLY)? {
        if packet.data == END_OF_REPLIES {
            return Ok(Some(String::from_utf8_lossy(&answer).into_owned()));
        }
        answer.extend_from_slice(packet.data.get(4..).unwrap_or_default());
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

/// Whether the peer went away, as opposed to a failure here.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::thread;

    use super::*;
    use crate::seqpacket::Listener;

    #[test]
    fn a_client_is_given_the_socket_that_the_daemon_sends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let listener = Listener::bind(&path, 0o666).unwrap();
        let daemon = thread::spawn(move || {
            assert!(matches!(greet(&listener.accept().unwrap(), HELLO), Err(Refusal::Closed)));
            let connection = listener.accept().unwrap();
            let visitor = greet(&connection, HELLO).unwrap();
            let (client, server) = Connection::pair().unwrap();
            connection.send_fd(DESCRIPTOR, client.as_fd()).unwrap();
            assert_eq!(connection.recv(64).unwrap().unwrap().data, DONE);
            server.send(b"hello").unwrap();
            visitor
        });
        probe(&path).unwrap();
        let server = knock(&path).unwrap().unwrap();
        assert_eq!(server.recv(64).unwrap().unwrap().data, b"hello");
        assert_eq!(daemon.join().unwrap(), Visitor::Client(own_credentials()));
    }

    #[test]
    fn a_command_and_its_answer_survive_the_framing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let listener = Listener::bind(&path, 0o666).unwrap();
        let long = "a line\n".repeat(20_000);
        let answer = long.clone();
        let daemon = thread::spawn(move || {
            let connection = listener.accept().unwrap();
            assert_eq!(greet(&connection, HELLO).unwrap(), Visitor::Administrator(own_credentials()));
            assert_eq!(next_command(&connection).unwrap().as_deref(), Some("get_server_list"));
            reply(&connection, &answer).unwrap();
            assert_eq!(next_command(&connection).unwrap(), None);
        });
        assert_eq!(ask(&path, "get_server_list").unwrap(), Some(long));
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
