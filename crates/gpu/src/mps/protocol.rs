//! The MPS control protocol (v2, as driver 580 speaks it): what passes over `control` and `control_privileged`, as bytes and text.
//!
//! Nothing here does I/O. On connect the daemon sends [`HELLO`]; the other side answers [`CREDENTIALS`] with `SCM_CREDENTIALS`, then its
//! [`Kind`]. A client is sent [`DESCRIPTOR`] with a socket to the server, talks to the server, and ends with 4 bytes, the `CUresult` of that.
//! An administrator sends [`commands`] and reads replies until [`END_OF_REPLIES`]; each line of output is a packet of its own.
use std::fmt;

/// The daemon's greeting.
pub(crate) const HELLO: &[u8] = b"OUTBHELL\0";
/// Comes with the sender's credentials.
pub(crate) const CREDENTIALS: &[u8] = b"OUTBCRED\0";
/// Comes with a descriptor.
pub(crate) const DESCRIPTOR: &[u8] = b"OUTBCUFD\0";
/// Ends the replies to an administrator.
pub(crate) const END_OF_REPLIES: [u8; 8] = 1_u64.to_le_bytes();
/// Ends an administrator's commands.
const END_OF_COMMANDS: [u8; 8] = 0_u64.to_le_bytes();
/// `CUDA_SUCCESS`: the last word of a client whose connection to the server stands.
pub(crate) const DONE: [u8; 4] = 0_u32.to_le_bytes();
/// No packet of the protocol is longer.
pub(crate) const LONGEST: usize = 8 * 1024;

/// What a new client says to the server, on the socket that came with [`DESCRIPTOR`]; credentials go with the first.
///
/// The server takes in one client at a time and waits for these without a deadline; where they never come, because the client died in
/// between, driver 580's server takes in no client ever again. Saying them in the client's place heals it, whichever of them it had said.
pub(crate) const INTRODUCTION: [&[u8]; 3] = [CREDENTIALS, &0_u32.to_le_bytes(), &0xff_u32.to_le_bytes()];

/// Who connects to `control`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A CUDA program.
    Client,
    /// Somebody with commands.
    Administrator,
    /// Something that this protocol does not know.
    Unknown,
}

impl Kind {
    /// What the packet after the credentials says.
    pub fn parse(packet: &[u8]) -> Self {
        match <[u8; 4]>::try_from(packet).map(u32::from_le_bytes) {
            Ok(2) => Self::Client,
            Ok(4) => Self::Administrator,
            _ => Self::Unknown,
        }
    }

    /// The packet that says it.
    pub fn packet(self) -> [u8; 4] {
        let word: u32 = match self {
            Self::Client => 2,
            Self::Administrator => 4,
            Self::Unknown => 0,
        };
        word.to_le_bytes()
    }
}

/// A command of the v2 shell. Displayed, it is one line: nothing that came from outside can add another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Pids of the servers.
    ServerList,
    /// How a server is, by pid.
    ServerStatus(u32),
    /// Starts a server.
    StartServer {
        /// For clients of this uid; 0 is for all where the daemon has a server for several.
        uid: u32,
    },
    /// Ends a server.
    ShutdownServer {
        /// Its pid.
        server: u32,
        /// With clients.
        force: bool,
    },
    /// The active thread percentage of clients that connect from now on.
    SetThreads {
        /// The server's pid.
        server: u32,
        /// 1 to 100.
        percent: u8,
    },
    /// The memory limit of clients that connect from now on.
    SetMemory {
        /// The server's pid.
        server: u32,
        /// MiB; none is no limit.
        mib: Option<u64>,
    },
    /// What [`Command::SetMemory`] set.
    GetMemory {
        /// The server's pid.
        server: u32,
    },
    /// The active thread percentage of servers to come.
    SetDefaultThreads(u8),
    /// The memory limit of servers to come, MiB.
    SetDefaultMemory(u64),
    /// What [`Command::SetDefaultThreads`] set.
    GetDefaultThreads,
    /// What [`Command::SetDefaultMemory`] set.
    GetDefaultMemory,
    /// Pids of a server's clients.
    Clients(u32),
    /// Ends a client's contexts.
    Terminate {
        /// The server's pid.
        server: u32,
        /// The client's pid.
        client: u32,
    },
    /// Ends the daemon.
    Quit {
        /// How long clients may take to leave.
        seconds: u32,
    },
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Device 0: a daemon sees the one device that it was started for.
        match self {
            Self::ServerList => write!(f, "get_server_list"),
            Self::ServerStatus(server) => write!(f, "get_server_status {server}"),
            Self::StartServer { uid } => write!(f, "start_server -uid {uid}"),
            Self::ShutdownServer { server, force: false } => write!(f, "shutdown_server {server}"),
            Self::ShutdownServer { server, force: true } => write!(f, "shutdown_server {server} -f"),
            Self::SetThreads { server, percent } => write!(f, "set_active_thread_percentage {server} {percent}"),
            // Only 0 takes a limit away again.
            Self::SetMemory { server, mib: None } => write!(f, "set_device_pinned_mem_limit {server} 0 0"),
            Self::SetMemory { server, mib: Some(mib) } => write!(f, "set_device_pinned_mem_limit {server} 0 {mib}M"),
            Self::GetMemory { server } => write!(f, "get_device_pinned_mem_limit {server} 0"),
            Self::SetDefaultThreads(percent) => write!(f, "set_default_active_thread_percentage {percent}"),
            Self::SetDefaultMemory(mib) => write!(f, "set_default_device_pinned_mem_limit 0 {mib}M"),
            Self::GetDefaultThreads => write!(f, "get_default_active_thread_percentage"),
            Self::GetDefaultMemory => write!(f, "get_default_device_pinned_mem_limit 0"),
            Self::Clients(server) => write!(f, "get_client_list {server}"),
            Self::Terminate { server, client } => write!(f, "terminate_client {server} {client}"),
            Self::Quit { seconds } => write!(f, "quit -t {seconds}"),
        }
    }
}

/// The packets that ask for a command, after the kind.
pub fn commands(command: &Command) -> [Vec<u8>; 3] {
    let text = format!("{command}\n\0").into_bytes();
    let length = u64::try_from(text.len()).unwrap_or(u64::MAX).to_le_bytes();
    [length.to_vec(), text, END_OF_COMMANDS.to_vec()]
}

/// One packet of a reply.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// Output.
    Text(String),
    /// There is no more.
    End,
}

impl Reply {
    /// `None`: not of this protocol.
    pub fn parse(packet: &[u8]) -> Option<Self> {
        if packet == END_OF_REPLIES {
            return Some(Self::End);
        }
        let text = packet.strip_prefix(&0_u32.to_le_bytes())?;
        let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
        Some(Self::Text(String::from_utf8_lossy(text).into_owned()))
    }
}

/// What the daemon printed where something else was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the MPS control daemon answered {0:?}")]
pub struct Unexpected(String);

impl Unexpected {
    /// Of a long answer the beginning: this is told in a status, which has to fit into an object of the API server.
    pub(crate) fn new(answer: &str) -> Self {
        Self(super::beginning(answer))
    }
}

/// A list of pids: of servers, or of a server's clients.
pub fn pids(output: &str) -> Result<Vec<u32>, Unexpected> {
    let pids: Result<Vec<u32>, _> = output.split_whitespace().map(str::parse).collect();
    pids.map_err(|_| Unexpected::new(output))
}

/// `get_server_status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerState {
    /// It starts.
    Initializing,
    /// It serves.
    Active,
    /// It lets nobody in until those whom a fatal error hit have exited.
    Fault,
    /// There is no such server.
    Gone,
}

/// Reads the answer to `get_server_status`.
pub fn server_state(output: &str) -> Result<ServerState, Unexpected> {
    match output.trim() {
        "INITIALIZING" => Ok(ServerState::Initializing),
        "ACTIVE" => Ok(ServerState::Active),
        "FAULT" => Ok(ServerState::Fault),
        other if is_not_found(other) => Ok(ServerState::Gone),
        other => Err(Unexpected::new(other)),
    }
}

/// Whether a command about a server says that there is none.
pub(crate) fn is_not_found(output: &str) -> bool {
    output.contains("not found")
}

/// Whether the percentage that is now in force, as `set_` and `get_…active_thread_percentage` print it, is `percent`.
pub fn is_percentage(output: &str, percent: u8) -> bool {
    output.trim().parse::<f64>().is_ok_and(|printed| (printed - f64::from(percent)).abs() < 0.05)
}

/// Whether a memory limit, as `get_…device_pinned_mem_limit` prints it, is `mib`.
///
/// The daemon prints whole MiB below 1 GiB, and above it GiB rounded down; no limit is no output.
pub fn is_memory(output: &str, mib: Option<u64>) -> bool {
    let output = output.trim();
    let Some(mib) = mib else { return output.is_empty() };
    let number = |unit: char| output.strip_suffix(unit).and_then(|number| number.parse::<u64>().ok());
    match (number('M'), number('G')) {
        (Some(printed), _) => printed == mib,
        (_, Some(printed)) => printed == mib / 1024,
        _ => false,
    }
}

/// What `terminate_client` came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Terminated {
    /// The client's contexts are gone.
    Done,
    /// It has none (`CUDA_ERROR_INVALID_CONTEXT`): not yet, or not any more.
    NoContext,
}

/// Reads the answer to `terminate_client`.
pub fn terminated(output: &str) -> Result<Terminated, Unexpected> {
    match output.lines().last().map(str::trim) {
        Some("0") => Ok(Terminated::Done),
        Some("201") => Ok(Terminated::NoContext),
        _ => Err(Unexpected::new(output)),
    }
}

/// What a line that the daemon or its server prints says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogEvent {
    /// `NEW SERVER 9: Ready`.
    ServerReady(u32),
    /// `Server 9 exited with status 1`.
    ServerExited {
        /// Its pid.
        server: u32,
        /// As the daemon prints it.
        status: i32,
    },
    /// `Client {PID: 9, Context: 1} encountered a fatal GPU error.`, or the server says that it handles one.
    Fault {
        /// The client's pid, where the line names one.
        client: Option<u32>,
    },
    /// `Client {PID: 9, Context ID: 0} connected`.
    ClientConnected(u32),
    /// `Client process 9 disconnected`.
    ClientGone(u32),
    /// `Server failed to recevie command with status 806, assuming client {PID: 9, Context ID: 1} exit`: a context is gone that was not
    /// closed. Of context 0, which is the process itself, the driver says so at each end.
    ClientLost(u32),
    /// `CUDA MPS Control binary version: 13000`.
    Version(u32),
    /// Somebody asked the daemon something: the supervisor itself does, often.
    Chatter,
    /// A client comes or goes, or its limits are set.
    Routine,
    /// Anything else.
    Other,
}

/// A line of the daemon's output: `[2026-11-21 10:38:36.269 Control   402] text`.
#[derive(Debug, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// `Control`, `Server` or `Other`; empty for a line without the prefix.
    pub source: &'a str,
    /// Who wrote it.
    pub pid: Option<u32>,
    /// What it says.
    pub text: &'a str,
    /// What that means here.
    pub event: LogEvent,
}

/// Reads one line; every line is one.
pub fn log_line(line: &str) -> LogLine<'_> {
    let (source, pid, text) = prefix(line).unwrap_or(("", None, line.trim()));
    LogLine { source, pid, text, event: event(text) }
}

fn prefix(line: &str) -> Option<(&str, Option<u32>, &str)> {
    let (inside, text) = line.trim().strip_prefix('[')?.split_once(']')?;
    let mut words = inside.split_whitespace().skip(2);
    let source = words.next()?;
    Some((source, words.next().and_then(|pid| pid.parse().ok()), text.trim()))
}

fn event(text: &str) -> LogEvent {
    let number = |text: &str| text.parse().ok();
    let pid_of =
        |text: &str| text.strip_prefix("Client {PID: ").and_then(|rest| number(rest.split([',', '}']).next()?));
    let between = |before: &str, after: &str| text.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
    let parsed = if let Some(server) = between("NEW SERVER ", ": Ready") {
        number(server).map(LogEvent::ServerReady)
    } else if let Some((server, status)) =
        between("Server ", "").and_then(|rest| rest.split_once(" exited with status "))
    {
        number(server).and_then(|server| Some(LogEvent::ServerExited { server, status: status.parse().ok()? }))
    } else if text.contains("fatal GPU error") {
        Some(LogEvent::Fault { client: pid_of(text) })
    } else if text.starts_with("Client {") && text.ends_with("} connected") {
        pid_of(text).map(LogEvent::ClientConnected)
    } else if let Some(client) = between("Client process ", " disconnected") {
        number(client).map(LogEvent::ClientGone)
    } else if let Some((client, context)) = lost_context(text) {
        Some(if context == 0 { LogEvent::Routine } else { LogEvent::ClientLost(client) })
    } else if let Some(version) = between("CUDA MPS Control binary version: ", "") {
        number(version).map(LogEvent::Version)
    } else if is_chatter(text) {
        Some(LogEvent::Chatter)
    } else if is_routine(text) {
        Some(LogEvent::Routine)
    } else {
        None
    };
    parsed.unwrap_or(LogEvent::Other)
}

/// The client and the context that the server has lost. The spelling is the driver's.
fn lost_context(text: &str) -> Option<(u32, u32)> {
    let (_, client) = text.strip_prefix("Server failed to rec")?.split_once("assuming client {PID: ")?;
    let (pid, rest) = client.split_once(',')?;
    let context = rest.trim_start().strip_prefix("Context")?.trim_start_matches(" ID").strip_prefix(": ")?;
    Some((pid.parse().ok()?, context.split('}').next()?.parse().ok()?))
}

fn is_chatter(text: &str) -> bool {
    ["Accepting connection...", "NEW UI", "UI closed", "User did not send valid credentials", ""].contains(&text)
        || text.starts_with("Cmd:")
        // The answer to a command is printed as well.
        || text.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'G' | b'M'))
        || ["ACTIVE", "INITIALIZING", "FAULT"].contains(&text)
}

fn is_routine(text: &str) -> bool {
    [
        "NEW CLIENT ",
        "Received new client request",
        "Creating worker thread for client",
        "Device pinned memory limit for device",
        // The words of the driver.
        "Server failed to recevie command with status 806, assuming client",
        "Status of client",
    ]
    .iter()
    .any(|start| text.starts_with(start))
        || (text.starts_with("Client {") && text.contains("} exiting"))
        || (text.starts_with("Device ") && text.ends_with(" is associated"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_command_is_framed_as_the_command_line_tool_frames_it() {
        let [length, text, end] = commands(&Command::ServerList);
        assert_eq!(length, [0x11, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(text, b"get_server_list\n\0");
        assert_eq!(end, [0; 8]);
    }

    #[test]
    fn replies_end_with_a_one() {
        assert_eq!(Reply::parse(b"\0\0\0\x00100.0"), Some(Reply::Text("100.0".into())));
        assert_eq!(Reply::parse(&[1, 0, 0, 0, 0, 0, 0, 0]), Some(Reply::End));
        assert_eq!(Reply::parse(b"OUTB"), None);
        assert_eq!(Reply::parse(b""), None);
    }

    #[test]
    fn the_kinds_are_told_apart() {
        assert_eq!(Kind::parse(&[2, 0, 0, 0]), Kind::Client);
        assert_eq!(Kind::parse(&[4, 0, 0, 0]), Kind::Administrator);
        for packet in [&[3, 0, 0, 0][..], &[2, 0, 0], &[2, 0, 0, 0, 0], &[]] {
            assert_eq!(Kind::parse(packet), Kind::Unknown);
        }
    }

    #[test]
    fn a_limit_is_read_back_as_the_daemon_prints_it() {
        // As measured: set to, printed.
        for (mib, printed) in [(512, "512M"), (100, "100M"), (1024, "1G"), (1536, "1G"), (7678, "7G"), (10239, "9G")] {
            assert!(is_memory(printed, Some(mib)), "{mib} {printed}");
        }
        assert!(is_memory("", None));
        assert!(!is_memory("", Some(512)));
        assert!(!is_memory("8G", None));
        assert!(!is_memory("8G", Some(7678)));
        assert!(is_percentage("20.0", 20) && is_percentage("100.0", 100));
        assert!(!is_percentage("33.5", 33) && !is_percentage("", 20) && !is_percentage("Server 9 not found", 9));
    }

    #[test]
    fn states_and_lists_are_read_strictly() {
        assert_eq!(server_state("FAULT"), Ok(ServerState::Fault));
        assert_eq!(server_state("Server 999999 not found"), Ok(ServerState::Gone));
        assert!(server_state("").is_err());
        assert_eq!(pids(""), Ok(vec![]));
        assert_eq!(pids("579\n580"), Ok(vec![579, 580]));
        assert!(pids("Server 9 not found").is_err());
        assert_eq!(terminated("0"), Ok(Terminated::Done));
        assert_eq!(terminated("201\n"), Ok(Terminated::NoContext));
        assert!(terminated("Invalid process 999999!\n1").is_err());
        assert!(terminated("").is_err());
    }

    #[test]
    fn the_lines_that_matter_are_understood() {
        let event = |text: &str| log_line(&format!("[2026-11-21 10:38:36.269 Server   402] {text}")).event;
        assert_eq!(event("NEW SERVER 423: Ready"), LogEvent::ServerReady(423));
        assert_eq!(event("Server 423 exited with status 0"), LogEvent::ServerExited { server: 423, status: 0 });
        assert_eq!(event("Client {PID: 436, Context ID: 0} connected"), LogEvent::ClientConnected(436));
        assert_eq!(event("Client process 436 disconnected"), LogEvent::ClientGone(436));
        assert_eq!(
            event("Client {PID: 579, Context: 1} encountered a fatal GPU error."),
            LogEvent::Fault { client: Some(579) }
        );
        assert_eq!(event("Server is handling a fatal GPU error."), LogEvent::Fault { client: None });
        let lost = |context| {
            event(&format!(
                "Server failed to recevie command with status 806, assuming client {{PID: 814, {context}}} exit"
            ))
        };
        assert_eq!(lost("Context ID: 1"), LogEvent::ClientLost(814));
        assert_eq!(lost("Context: 2"), LogEvent::ClientLost(814));
        assert_eq!(lost("Context ID: 0"), LogEvent::Routine, "as at the end of every program");
        assert_eq!(lost("what"), LogEvent::Routine);
        assert_eq!(event("CUDA MPS Control binary version: 13000"), LogEvent::Version(13000));
        for chatter in ["Cmd:get_server_list", "NEW UI", "100.0", "8G", "423", "ACTIVE"] {
            assert_eq!(event(chatter), LogEvent::Chatter, "{chatter}");
        }
        for routine in [
            "NEW CLIENT 436 from user 0: Server already exists",
            "Client {PID: 436, Context ID: 2} exiting. Number of active client contexts is 1.",
            "Device NVIDIA H200 (uuid GPU-3da61522-b946-8b5e-d0da-5debfa49f742) is associated",
        ] {
            assert_eq!(event(routine), LogEvent::Routine, "{routine}");
        }
        assert_eq!(event("Server has started"), LogEvent::Other);
        let line = log_line("[2026-11-21 10:38:36.269 Control   402] NEW UI");
        assert_eq!((line.source, line.pid, line.text), ("Control", Some(402), "NEW UI"));
        assert_eq!(log_line("An instance of this daemon is already running").source, "");
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_told_in_short() {
        let long = "\u{fffd}".repeat(100_000);
        for error in [pids(&long).unwrap_err(), server_state(&long).unwrap_err(), terminated(&long).unwrap_err()] {
            let told = error.to_string();
            assert!(told.len() < 1000 && told.ends_with("\u{fffd}…\""), "{told}");
        }
        assert_eq!(pids("no").unwrap_err().to_string(), "the MPS control daemon answered \"no\"");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_break_a_parser(bytes: Vec<u8>, text: String) {
            let _ = Reply::parse(&bytes);
            let _ = Kind::parse(&bytes);
            let _ = (pids(&text), server_state(&text), terminated(&text));
            let _ = (is_percentage(&text, 20), is_memory(&text, Some(1)));
            let _ = log_line(&text);
            let _ = log_line(&String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn a_line_cut_anywhere_is_still_a_line(cut in 0_usize..90) {
            let line = "[2026-11-21 10:38:36.269 Server   402] Client {PID: 579, Context: 1} encountered a fatal GPU error.";
            let _ = log_line(line.get(..cut).unwrap_or(line));
        }

        #[test]
        fn a_command_is_one_line(server: u32, percent: u8, mib: u64) {
            for command in [
                Command::SetThreads { server, percent },
                Command::SetMemory { server, mib: Some(mib) },
                Command::Terminate { server, client: server },
                Command::ShutdownServer { server, force: true },
            ] {
                let [length, text, _] = commands(&command);
                prop_assert_eq!(length, u64::try_from(text.len()).unwrap().to_le_bytes());
                prop_assert_eq!(text.iter().filter(|&&byte| byte == b'\n' || byte == 0).count(), 2);
            }
        }
    }
}
