//! A client that does not keep to the handshake, for tests of whoever stands at the door.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use serde_json::json;
use sim_mps::handshake::{self, CREDENTIALS, Entrance, KIND_ADMINISTRATOR, KIND_CLIENT, Subject};
use sim_mps::seqpacket::{Connection, Credentials};

use crate::work;

/// What it does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lie {
    /// Says so many bytes of `OUTBCRED` and kind, then nothing.
    Stall(usize),
    /// Names a kind that does not exist, or another's.
    Kind(u32),
    /// Sends a kind of two bytes.
    ShortKind,
    /// Sends 128 KiB in place of `OUTBCRED`.
    Huge,
    /// Sends 64 bytes that mean nothing.
    Garbage,
    /// Sends `OUTBCRED` twice.
    Twice,
    /// Sends descriptors along with `OUTBCRED`.
    Descriptors,
    /// Claims another's pid: the kernel lets root do so.
    Pid(i32),
    /// Claims root's uid.
    Root,
    /// Says all that is right, and never takes the answer nor leaves.
    Unread,
    /// Says after the kind of a client what an administrator says.
    AdministratorAfterClient,
    /// Announces a command of 2^60 bytes.
    LongCommand,
    /// Opens so many connections, and says nothing on any.
    Flood(usize),
    /// Is let in by the daemon, says so many of the three words to the server, and is gone.
    Vanish(usize),
    /// The same, but stays, and says nothing more.
    Mute(usize),
    /// Is let in by the daemon, and after so many steps shuts a socket down: 0 before it takes
    /// anything from the server, 1 when it has taken all, 2 to 4 when it has said one to three
    /// words, 5 when it has the answer, before the last word to the daemon.
    Shutdown(Half, u32),
    /// Is let in by the server, and does not tell the daemon.
    NoLastWord,
    /// Is let in by the server, and tells the daemon this.
    LastWord(u32),
    /// Is let in by daemon and server so many times, and then neither says anything nor leaves.
    Enter(usize),
}

/// What of its sockets it shuts down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// The one to the server.
    Both,
    /// What the server says.
    Reading,
    /// What it says to the server.
    Writing,
    /// The one to the daemon.
    Daemon,
    /// The first of the descriptors that the server gives.
    Channel,
}

/// The lies, as the help lists them.
pub(crate) const NAMES: &str = "stall=BYTES, kind=K, short-kind, huge, garbage, twice, descriptors, pid=PID, root, unread, \
                         administrator-after-client, long-command, flood=N, vanish=WORDS, mute=WORDS, shutdown, \
                         shutdown=STEP, shutdown-reading=STEP, shutdown-writing=STEP, shutdown-daemon=STEP, \
                         shutdown-channel=STEP, no-last-word, last-word=N, enter=N";

impl FromStr for Lie {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let number = || value.and_then(|value| value.parse().ok());
        let shutdown = |half| {
            let step = value.and_then(|value| value.parse().ok()).filter(|step| *step <= 5)?;
            (half != Half::Channel || step > 0).then_some(Self::Shutdown(half, step))
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
            ("shutdown", None) => Some(Self::Shutdown(Half::Both, 1)),
            ("shutdown", Some(_)) => shutdown(Half::Both),
            ("shutdown-reading", Some(_)) => shutdown(Half::Reading),
            ("shutdown-writing", Some(_)) => shutdown(Half::Writing),
            ("shutdown-daemon", Some(_)) => shutdown(Half::Daemon),
            ("shutdown-channel", Some(_)) => shutdown(Half::Channel),
            ("no-last-word", None) => Some(Self::NoLastWord),
            ("last-word", Some(value)) => value.parse().ok().map(Self::LastWord),
            ("enter", Some(_)) => number().map(Self::Enter),
            _ => None,
        };
        lie.ok_or_else(|| format!("{text:?} is none of: {NAMES}"))
    }
}

/// Lies to `control`, waits until the other side closes, at most so long, and prints what became of
/// it: `{"lie":…,"outcome":"closed"|"open"|"refused","packets":…}`; `refused` is the kernel's word.
/// The packets of `enter=N` are the times that it was let in.
pub(crate) fn run(control: &Path, lie: Lie, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    let report = |outcome: &str, packets: usize| {
        work::print(&json!({ "lie": format!("{lie:?}"), "outcome": outcome, "packets": packets }));
    };
    if let Lie::Vanish(_) | Lie::Mute(_) | Lie::Shutdown(..) | Lie::NoLastWord | Lie::LastWord(_) = lie {
        let Ok(entrance) = handshake::knock(control) else {
            report("closed", 0);
            return Ok(());
        };
        let held = tell_server(entrance, lie)?;
        let waited = held.first().map_or(Ok((true, 0)), |connection| drain(connection, deadline))?;
        report(if waited.0 { "closed" } else { "open" }, waited.1);
        return Ok(());
    }
    if let Lie::Enter(count) = lie {
        let enter = || handshake::knock(control).and_then(|entrance| entrance.enter(Subject::Process));
        let held: Vec<_> = (0..count).map_while(|_| enter().ok()).collect();
        let closed = held.first().map_or(Ok((true, 0)), |(_, server)| drain(server, deadline))?.0;
        report(if closed { "closed" } else { "open" }, held.len());
        return Ok(());
    }
    let connections = (0..if let Lie::Flood(count) = lie { count } else { 1 })
        .map(|_| Connection::connect(control))
        .collect::<io::Result<Vec<_>>>()?;
    let (mut outcome, mut packets) = ("closed", 0);
    for connection in &connections {
        match tell(connection, lie) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => outcome = "refused",
            // It closed before all was said.
            _ => {
                if lie == Lie::Unread {
                    while !connection.is_closed() && Instant::now() < deadline {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    outcome = if connection.is_closed() { outcome } else { "open" };
                } else {
                    let (closed, read) = drain(connection, deadline)?;
                    packets += read;
                    outcome = if closed { outcome } else { "open" };
                }
            }
        }
    }
    report(outcome, packets);
    Ok(())
}

/// Lies to the server: what is to be kept open, the daemon first.
fn tell_server(entrance: Entrance, lie: Lie) -> io::Result<Vec<Connection>> {
    if let Lie::Shutdown(half, 0) = lie {
        shut(half, &entrance, None)?;
        let Entrance { daemon, server } = entrance;
        return Ok(vec![daemon, server]);
    }
    // The server's descriptors would end with this process; taken, they end with the lie.
    let channel = entrance.channel().map_err(|_| io::ErrorKind::ConnectionReset)?;
    let Entrance { daemon, server } = &entrance;
    let [first, second] = Subject::Process.words();
    let say = |words: usize| -> io::Result<()> {
        for word in 0..words.min(3) {
            match word {
                0 => server.send_credentials(CREDENTIALS, handshake::own_credentials())?,
                1 => server.send(&first)?,
                _ => server.send(&second)?,
            }
        }
        Ok(())
    };
    match lie {
        Lie::Vanish(words) => {
            say(words)?;
            return Ok(Vec::new());
        }
        Lie::Mute(words) => say(words)?,
        Lie::Shutdown(half, step) => {
            say(usize::try_from(step).unwrap_or(usize::MAX) - 1)?;
            if step == 5 {
                server.recv(64)?;
            }
            shut(half, &entrance, Some(&channel))?;
        }
        Lie::LastWord(word) => {
            say(3)?;
            server.recv(64)?;
            daemon.send(&word.to_le_bytes())?;
        }
        _ => {
            say(3)?;
            server.recv(64)?;
        }
    }
    let Entrance { daemon, server } = entrance;
    Ok(vec![daemon, server, channel])
}

fn shut(half: Half, entrance: &Entrance, channel: Option<&Connection>) -> io::Result<()> {
    let (socket, how) = match half {
        Half::Both => (&entrance.server, Shutdown::Both),
        Half::Reading => (&entrance.server, Shutdown::Read),
        Half::Writing => (&entrance.server, Shutdown::Write),
        Half::Daemon => (&entrance.daemon, Shutdown::Both),
        Half::Channel => (channel.unwrap_or(&entrance.server), Shutdown::Both),
    };
    Ok(rustix::net::shutdown(socket, how)?)
}

fn tell(connection: &Connection, lie: Lie) -> io::Result<()> {
    let own = handshake::own_credentials();
    let introduce = |credentials: Credentials, kind: u32| {
        connection.send_credentials(CREDENTIALS, credentials)?;
        connection.send(&kind.to_le_bytes())
    };
    match lie {
        Lie::Flood(_) | Lie::Stall(0) => Ok(()),
        Lie::Stall(bytes) => {
            connection.send_credentials(&CREDENTIALS[..bytes.min(CREDENTIALS.len())], own)?;
            let kind = KIND_CLIENT.to_le_bytes();
            match bytes.saturating_sub(CREDENTIALS.len()).min(kind.len()) {
                0 => Ok(()),
                rest => connection.send(&kind[..rest]),
            }
        }
        Lie::Kind(kind) => introduce(own, kind),
        Lie::ShortKind => {
            connection.send_credentials(CREDENTIALS, own)?;
            connection.send(&[2, 0])
        }
        Lie::Huge => connection.send_credentials(&vec![b'O'; 128 << 10], own),
        Lie::Garbage => connection.send_credentials(&[0xa5; 64], own),
        Lie::Twice => {
            connection.send_credentials(CREDENTIALS, own)?;
            introduce(own, KIND_CLIENT)
        }
        Lie::Descriptors => {
            let file = File::open("/dev/null")?;
            connection.send_fd(CREDENTIALS, file.as_fd())?;
            connection.send(&KIND_CLIENT.to_le_bytes())
        }
        Lie::Pid(pid) => introduce(Credentials { pid, ..own }, KIND_CLIENT),
        Lie::Root => introduce(Credentials { uid: 0, gid: 0, ..own }, KIND_CLIENT),
        // Those that tell the server lies have told the daemon the truth.
        Lie::Unread
        | Lie::Vanish(_)
        | Lie::Mute(_)
        | Lie::Shutdown(..)
        | Lie::NoLastWord
        | Lie::LastWord(_)
        | Lie::Enter(_) => introduce(own, KIND_CLIENT),
        Lie::AdministratorAfterClient => {
            introduce(own, KIND_CLIENT)?;
            let text = b"set_default_active_thread_percentage 100\n\0";
            connection.send(&u64::try_from(text.len()).unwrap_or_default().to_le_bytes())?;
            connection.send(text)
        }
        Lie::LongCommand => {
            introduce(own, KIND_ADMINISTRATOR)?;
            connection.send(&(1_u64 << 60).to_le_bytes())
        }
    }
}

/// Reads until the other side closes or the time is over: whether it closed, and the packets read.
fn drain(connection: &Connection, deadline: Instant) -> io::Result<(bool, usize)> {
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
    fn lies_are_read_by_name() {
        assert_eq!("stall=9".parse(), Ok(Lie::Stall(9)));
        assert_eq!("kind=7".parse(), Ok(Lie::Kind(7)));
        assert_eq!("huge".parse(), Ok(Lie::Huge));
        assert_eq!("enter=64".parse(), Ok(Lie::Enter(64)));
        assert_eq!("shutdown".parse(), Ok(Lie::Shutdown(Half::Both, 1)));
        assert_eq!("shutdown-writing=4".parse(), Ok(Lie::Shutdown(Half::Writing, 4)));
        for text in ["stall", "stall=x", "huge=1", "shutdown=6", "shutdown-channel=0", "", "truth"] {
            assert!(text.parse::<Lie>().is_err(), "{text}");
        }
    }
}
