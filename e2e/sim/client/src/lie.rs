//! Violates the MPS handshake, for tests of daemons and doors.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use serde_json::json;
use sim_mps::handshake::{
    self, CREDENTIALS_PACKET, ClientSockets, IntroductionSubject, KIND_ADMINISTRATOR, KIND_CLIENT,
};
use sim_mps::seqpacket::{Connection, Credentials};

use crate::output::print_json_line;

/// A violation of the handshake ("lie").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeViolation {
    /// Sends this number of bytes of `OUTBCRED` and the kind, and nothing more.
    Stall(usize),
    /// Sends an unknown kind, or the kind of an administrator.
    Kind(u32),
    /// Sends a kind of two bytes.
    ShortKind,
    /// Sends 128 KiB instead of `OUTBCRED`.
    Huge,
    /// Sends 64 meaningless bytes.
    Garbage,
    /// Sends `OUTBCRED` twice.
    Twice,
    /// Sends a file descriptor with `OUTBCRED`.
    Descriptors,
    /// Claims the PID of another process, which the kernel allows for root.
    Pid(i32),
    /// Claims root's user id and group id.
    Root,
    /// Sends a valid introduction. After that, neither reads nor closes the connection.
    Unread,
    /// Sends an administrator's command after the client kind.
    AdministratorAfterClient,
    /// Announces a command of 2^60 bytes.
    LongCommand,
    /// Opens this number of connections and sends nothing on them.
    Flood(usize),
    /// Sends this number of the three introduction words to the server, and then closes all
    /// sockets.
    Vanish(usize),
    /// Sends this number of the three introduction words to the server, and nothing more.
    Mute(usize),
    /// Shuts a socket down after this step of the handshake with the server. Step 0 is the start,
    /// and in step 1 the client receives the descriptors. In steps 2 to 4, the client sends the
    /// three introduction words. In step 5, the client receives the answer, but does not send the
    /// last packet to the daemon.
    Shutdown(SocketPart, u32),
    /// Does not send the last packet of the handshake to the daemon.
    NoLastWord,
    /// Sends this value as the last packet of the handshake to the daemon.
    LastWord(u32),
    /// Sends `OUTBCRED` and exits. A child process keeps the connection. The child sends the kind
    /// after this process has exited and its parent has read the exit status.
    Orphan,
    /// Completes this number of handshakes and keeps the connections open without using them.
    Enter(usize),
}

/// The socket, or the direction of a socket, to shut down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketPart {
    /// Both directions of the socket to the server.
    Both,
    /// Reading from the server.
    Reading,
    /// Writing to the server.
    Writing,
    /// The socket to the daemon.
    Daemon,
    /// The first of the server's descriptors.
    Channel,
}

/// The values of `--lie`, for error messages.
pub(crate) const VIOLATION_SYNTAX: &str = "stall=BYTES, kind=K, short-kind, huge, garbage, twice, descriptors, pid=PID, root, unread, \
                         administrator-after-client, long-command, flood=N, vanish=WORDS, mute=WORDS, shutdown, \
                         shutdown=STEP, shutdown-reading=STEP, shutdown-writing=STEP, shutdown-daemon=STEP, \
                         shutdown-channel=STEP, no-last-word, last-word=N, orphan, enter=N";

impl FromStr for HandshakeViolation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let number = || value.and_then(|value| value.parse().ok());
        let shutdown = |half| {
            let step = value.and_then(|value| value.parse().ok()).filter(|step| *step <= 5)?;
            (half != SocketPart::Channel || step > 0).then_some(Self::Shutdown(half, step))
        };
        let lie = match (name, value) {
            ("stall", Some(_)) => number().map(Self::Stall),
            ("kind", Some(value)) => value.parse().ok().map(Self::Kind),
            ("short-kind", None) => Some(Self::ShortKind),
            ("huge", None) => Some(Self::Huge),
            ("garbage", None) => Some(Self::Garbage),
            ("twice", None) => Some(Self::Twice),
            ("descriptors", None) => Some(Self::Descriptors),
            ("pid", Some(value)) => value.parse().ok().map(Self::Pid),
            ("root", None) => Some(Self::Root),
            ("unread", None) => Some(Self::Unread),
            ("administrator-after-client", None) => Some(Self::AdministratorAfterClient),
            ("long-command", None) => Some(Self::LongCommand),
            ("flood", Some(_)) => number().map(Self::Flood),
            ("vanish", Some(_)) => number().map(Self::Vanish),
            ("mute", Some(_)) => number().map(Self::Mute),
            ("shutdown", None) => Some(Self::Shutdown(SocketPart::Both, 1)),
            ("shutdown", Some(_)) => shutdown(SocketPart::Both),
            ("shutdown-reading", Some(_)) => shutdown(SocketPart::Reading),
            ("shutdown-writing", Some(_)) => shutdown(SocketPart::Writing),
            ("shutdown-daemon", Some(_)) => shutdown(SocketPart::Daemon),
            ("shutdown-channel", Some(_)) => shutdown(SocketPart::Channel),
            ("no-last-word", None) => Some(Self::NoLastWord),
            ("last-word", Some(value)) => value.parse().ok().map(Self::LastWord),
            ("orphan", None) => Some(Self::Orphan),
            ("enter", Some(_)) => number().map(Self::Enter),
            _ => None,
        };
        lie.ok_or_else(|| format!("{text:?} is none of: {VIOLATION_SYNTAX}"))
    }
}

/// Performs a violation at the socket `control`, and waits up to `patience` until the peer closes.
/// Then prints `{"lie":…,"outcome":"closed"|"open"|"refused","packets":…}`. `refused` means that
/// the kernel refused the message. For `enter=N`, `packets` is the number of completed handshakes.
pub(crate) fn run(control: &Path, lie: HandshakeViolation, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    let report = |outcome: &str, packets: usize| {
        print_json_line(&json!({ "lie": format!("{lie:?}"), "outcome": outcome, "packets": packets }));
    };
    if let HandshakeViolation::Vanish(_)
    | HandshakeViolation::Mute(_)
    | HandshakeViolation::Shutdown(..)
    | HandshakeViolation::NoLastWord
    | HandshakeViolation::LastWord(_) = lie
    {
        let Ok(sockets) = handshake::connect_to_server(control) else {
            report("closed", 0);
            return Ok(());
        };
        let open = violate_server_handshake(sockets, lie)?;
        let waited = open.first().map_or(Ok((true, 0)), |connection| read_until_closed(connection, deadline))?;
        report(if waited.0 { "closed" } else { "open" }, waited.1);
        return Ok(());
    }
    if let HandshakeViolation::Enter(count) = lie {
        let enter = || {
            handshake::connect_to_server(control)
                .and_then(|sockets| sockets.introduce_to_server(IntroductionSubject::Process))
        };
        let open: Vec<_> = (0..count).map_while(|_| enter().ok()).collect();
        let closed = open.first().map_or(Ok((true, 0)), |(_, server)| read_until_closed(server, deadline))?.0;
        report(if closed { "closed" } else { "open" }, open.len());
        return Ok(());
    }
    if lie == HandshakeViolation::Orphan {
        complete_handshake_in_child(&Connection::connect(control)?)?;
        report("open", 0);
        return Ok(());
    }
    let connections = (0..if let HandshakeViolation::Flood(count) = lie { count } else { 1 })
        .map(|_| Connection::connect(control))
        .collect::<io::Result<Vec<_>>>()?;
    let (mut outcome, mut packets) = ("closed", 0);
    for connection in &connections {
        match perform_violation(connection, lie) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => outcome = "refused",
            // An error means that the peer closed before the end of the introduction.
            _ => {
                if lie == HandshakeViolation::Unread {
                    while !connection.is_closed() && Instant::now() < deadline {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    outcome = if connection.is_closed() { outcome } else { "open" };
                } else {
                    let (closed, read) = read_until_closed(connection, deadline)?;
                    packets += read;
                    outcome = if closed { outcome } else { "open" };
                }
            }
        }
    }
    report(outcome, packets);
    Ok(())
}

/// Begins the introduction. A child process completes the introduction after this process has
/// exited, and keeps the connection until the peer closes it.
fn complete_handshake_in_child(connection: &Connection) -> io::Result<()> {
    connection.send_credentials(CREDENTIALS_PACKET, handshake::own_credentials())?;
    let kind: String = KIND_CLIENT.to_le_bytes().iter().map(|byte| format!("\\{byte:03o}")).collect();
    let parent = std::process::id();
    let script = format!("while [ -d /proc/{parent} ]; do sleep 0.01; done; printf '{kind}' >&0; exec cat >/dev/null");
    let mut child = Command::new("/bin/sh");
    child.args(["-c", &script]).stdin(Stdio::from(connection.as_fd().try_clone_to_owned()?));
    child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(drop)
}

/// Violates the handshake with the server. Returns the connections to keep open. The first is the
/// connection to the daemon.
fn violate_server_handshake(sockets: ClientSockets, lie: HandshakeViolation) -> io::Result<Vec<Connection>> {
    if let HandshakeViolation::Shutdown(half, 0) = lie {
        shut_down(half, &sockets, None)?;
        let ClientSockets { daemon, server } = sockets;
        return Ok(vec![daemon, server]);
    }
    // Keep the descriptors open until the violation ends.
    let channel = sockets.receive_channel().map_err(|_| io::ErrorKind::ConnectionReset)?;
    let ClientSockets { daemon, server } = &sockets;
    let [first, second] = IntroductionSubject::Process.introduction_words();
    let say = |words: usize| -> io::Result<()> {
        for word in 0..words.min(3) {
            match word {
                0 => server.send_credentials(CREDENTIALS_PACKET, handshake::own_credentials())?,
                1 => server.send(&first)?,
                _ => server.send(&second)?,
            }
        }
        Ok(())
    };
    match lie {
        HandshakeViolation::Vanish(words) => {
            say(words)?;
            return Ok(Vec::new());
        }
        HandshakeViolation::Mute(words) => say(words)?,
        HandshakeViolation::Shutdown(half, step) => {
            say(usize::try_from(step).unwrap_or(usize::MAX) - 1)?;
            if step == 5 {
                server.recv(64)?;
            }
            shut_down(half, &sockets, Some(&channel))?;
        }
        HandshakeViolation::LastWord(word) => {
            say(3)?;
            server.recv(64)?;
            daemon.send(&word.to_le_bytes())?;
        }
        _ => {
            say(3)?;
            server.recv(64)?;
        }
    }
    let ClientSockets { daemon, server } = sockets;
    Ok(vec![daemon, server, channel])
}

fn shut_down(half: SocketPart, sockets: &ClientSockets, channel: Option<&Connection>) -> io::Result<()> {
    let (socket, how) = match half {
        SocketPart::Both => (&sockets.server, Shutdown::Both),
        SocketPart::Reading => (&sockets.server, Shutdown::Read),
        SocketPart::Writing => (&sockets.server, Shutdown::Write),
        SocketPart::Daemon => (&sockets.daemon, Shutdown::Both),
        SocketPart::Channel => (channel.unwrap_or(&sockets.server), Shutdown::Both),
    };
    Ok(rustix::net::shutdown(socket, how)?)
}

fn perform_violation(connection: &Connection, lie: HandshakeViolation) -> io::Result<()> {
    let own = handshake::own_credentials();
    let introduce = |credentials: Credentials, kind: u32| {
        connection.send_credentials(CREDENTIALS_PACKET, credentials)?;
        connection.send(&kind.to_le_bytes())
    };
    match lie {
        HandshakeViolation::Flood(_) | HandshakeViolation::Stall(0) => Ok(()),
        HandshakeViolation::Stall(bytes) => {
            connection.send_credentials(&CREDENTIALS_PACKET[..bytes.min(CREDENTIALS_PACKET.len())], own)?;
            let kind = KIND_CLIENT.to_le_bytes();
            match bytes.saturating_sub(CREDENTIALS_PACKET.len()).min(kind.len()) {
                0 => Ok(()),
                rest => connection.send(&kind[..rest]),
            }
        }
        HandshakeViolation::Kind(kind) => introduce(own, kind),
        HandshakeViolation::ShortKind => {
            connection.send_credentials(CREDENTIALS_PACKET, own)?;
            connection.send(&[2, 0])
        }
        HandshakeViolation::Huge => connection.send_credentials(&vec![b'O'; 128 << 10], own),
        HandshakeViolation::Garbage => connection.send_credentials(&[0xa5; 64], own),
        HandshakeViolation::Twice => {
            connection.send_credentials(CREDENTIALS_PACKET, own)?;
            introduce(own, KIND_CLIENT)
        }
        HandshakeViolation::Descriptors => {
            let file = File::open("/dev/null")?;
            connection.send_fd(CREDENTIALS_PACKET, file.as_fd())?;
            connection.send(&KIND_CLIENT.to_le_bytes())
        }
        HandshakeViolation::Pid(pid) => introduce(Credentials { pid, ..own }, KIND_CLIENT),
        HandshakeViolation::Root => introduce(Credentials { uid: 0, gid: 0, ..own }, KIND_CLIENT),
        // For these violations, the daemon receives a valid introduction.
        HandshakeViolation::Unread
        | HandshakeViolation::Vanish(_)
        | HandshakeViolation::Mute(_)
        | HandshakeViolation::Shutdown(..)
        | HandshakeViolation::NoLastWord
        | HandshakeViolation::LastWord(_)
        | HandshakeViolation::Orphan
        | HandshakeViolation::Enter(_) => introduce(own, KIND_CLIENT),
        HandshakeViolation::AdministratorAfterClient => {
            introduce(own, KIND_CLIENT)?;
            let text = b"set_default_active_thread_percentage 100\n\0";
            connection.send(&u64::try_from(text.len()).unwrap_or_default().to_le_bytes())?;
            connection.send(text)
        }
        HandshakeViolation::LongCommand => {
            introduce(own, KIND_ADMINISTRATOR)?;
            connection.send(&(1_u64 << 60).to_le_bytes())
        }
    }
}

/// Reads until the peer closes or until `deadline`. Returns whether the peer closed, and the number
/// of received packets.
fn read_until_closed(connection: &Connection, deadline: Instant) -> io::Result<(bool, usize)> {
    let mut packets = 0;
    loop {
        match connection.recv_until(4096, deadline) {
            Ok(Some(_)) => packets += 1,
            Ok(None) => return Ok((true, packets)),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok((false, packets)),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn violations_are_parsed_by_name() {
        assert_eq!("stall=9".parse(), Ok(HandshakeViolation::Stall(9)));
        assert_eq!("kind=7".parse(), Ok(HandshakeViolation::Kind(7)));
        assert_eq!("huge".parse(), Ok(HandshakeViolation::Huge));
        assert_eq!("enter=64".parse(), Ok(HandshakeViolation::Enter(64)));
        assert_eq!("shutdown".parse(), Ok(HandshakeViolation::Shutdown(SocketPart::Both, 1)));
        assert_eq!("shutdown-writing=4".parse(), Ok(HandshakeViolation::Shutdown(SocketPart::Writing, 4)));
        for text in ["stall", "stall=x", "huge=1", "shutdown=6", "shutdown-channel=0", "", "truth"] {
            assert!(text.parse::<HandshakeViolation>().is_err(), "{text}");
        }
    }
}
