//! The MPS control protocol, version 2 as driver 580 speaks it. Pure: packets and texts, no I/O.
//!
//! When a peer connects, the daemon sends [`HELLO_PACKET`]. The peer answers with
//! [`CREDENTIALS_PACKET`] and `SCM_CREDENTIALS`, then sends its [`PeerKind`]. A client receives
//! [`DESCRIPTOR_PACKET`] with a socket to the server, introduces itself there, and finally sends
//! the daemon 4 bytes: the resulting `CUresult`. An administrator sends [`command_packets`] and
//! reads replies until [`END_OF_REPLIES`]. Each line of output is one packet.
use std::fmt;

use super::text::shorten;

/// The daemon's greeting.
pub(crate) const HELLO_PACKET: &[u8] = b"OUTBHELL\0";
/// Packet that carries the sender's credentials.
pub(crate) const CREDENTIALS_PACKET: &[u8] = b"OUTBCRED\0";
/// Packet that carries a descriptor.
pub(crate) const DESCRIPTOR_PACKET: &[u8] = b"OUTBCUFD\0";
/// Packet that ends the replies to an administrator.
pub(crate) const END_OF_REPLIES: [u8; 8] = 1_u64.to_le_bytes();
/// Packet that ends an administrator's commands.
const END_OF_COMMANDS: [u8; 8] = 0_u64.to_le_bytes();
/// `CUDA_SUCCESS`: the last packet of a client that has connected to the server.
pub(crate) const CLIENT_CONNECTED_PACKET: [u8; 4] = 0_u32.to_le_bytes();
/// Maximum size of a packet of the protocol, in bytes.
pub(crate) const MAX_PACKET_BYTES: usize = 8 * 1024;

/// The packets that introduce a new client to the server, on the socket that came with
/// [`DESCRIPTOR_PACKET`]. The first packet carries credentials.
///
/// The server accepts one client at a time and waits for these packets without a deadline. If the
/// client exits before it has sent them, driver 580's server never accepts a client again. Sending
/// all packets on the client's behalf recovers the server, even if the client had sent some of
/// them.
pub(crate) const INTRODUCTION_PACKETS: [&[u8]; 3] = [CREDENTIALS_PACKET, &0_u32.to_le_bytes(), &0xff_u32.to_le_bytes()];

/// The kind of peer that connects to `control`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerKind {
    /// A CUDA program.
    Client,
    /// An administrator, who sends commands.
    Administrator,
    /// Neither a client nor an administrator.
    Unknown,
}

impl PeerKind {
    /// Parses the packet that follows the credentials.
    pub fn parse(packet: &[u8]) -> Self {
        match <[u8; 4]>::try_from(packet).map(u32::from_le_bytes) {
            Ok(2) => Self::Client,
            Ok(4) => Self::Administrator,
            _ => Self::Unknown,
        }
    }

    /// Returns the packet that announces this kind.
    pub fn packet(self) -> [u8; 4] {
        let word: u32 = match self {
            Self::Client => 2,
            Self::Administrator => 4,
            Self::Unknown => 0,
        };
        word.to_le_bytes()
    }
}

/// A command of version 2 of the MPS control shell. `Display` writes exactly one line: every
/// argument is a number, so no input can add another command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Lists the PIDs of the servers.
    ServerList,
    /// Requests the state of the server with this PID.
    ServerStatus(u32),
    /// Starts a server.
    StartServer {
        /// UID of the server's user. With `-multiuser-server`, 0 means all users.
        uid: u32,
    },
    /// Shuts a server down.
    ShutdownServer {
        /// PID of the server.
        server: u32,
        /// Whether to shut the server down even if it has clients.
        force: bool,
    },
    /// Sets the active thread percentage of clients that connect from now on.
    SetThreads {
        /// PID of the server.
        server: u32,
        /// Percentage, 1 to 100.
        percent: u8,
    },
    /// Sets the memory limit of clients that connect from now on.
    SetMemory {
        /// PID of the server.
        server: u32,
        /// Limit in MiB. `None` removes the limit.
        mib: Option<u64>,
    },
    /// Reads the limit set by [`Command::SetMemory`].
    GetMemory {
        /// PID of the server.
        server: u32,
    },
    /// Sets the active thread percentage of servers that start from now on.
    SetDefaultThreads(u8),
    /// Sets the memory limit, in MiB, of servers that start from now on.
    SetDefaultMemory(u64),
    /// Reads the percentage set by [`Command::SetDefaultThreads`].
    GetDefaultThreads,
    /// Reads the limit set by [`Command::SetDefaultMemory`].
    GetDefaultMemory,
    /// Lists the PIDs of a server's clients.
    Clients(u32),
    /// Terminates a client's contexts.
    Terminate {
        /// PID of the server.
        server: u32,
        /// PID of the client.
        client: u32,
    },
    /// Stops the daemon.
    Quit {
        /// Time for clients to exit, in seconds.
        seconds: u32,
    },
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Always device 0: a daemon sees only the device for which it was started.
        match self {
            Self::ServerList => write!(f, "get_server_list"),
            Self::ServerStatus(server) => write!(f, "get_server_status {server}"),
            Self::StartServer { uid } => write!(f, "start_server -uid {uid}"),
            Self::ShutdownServer { server, force: false } => write!(f, "shutdown_server {server}"),
            Self::ShutdownServer { server, force: true } => write!(f, "shutdown_server {server} -f"),
            Self::SetThreads { server, percent } => write!(f, "set_active_thread_percentage {server} {percent}"),
            // Only 0 removes a limit.
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

/// Returns the packets of one command. An administrator sends them after its [`PeerKind`].
pub fn command_packets(command: &Command) -> [Vec<u8>; 3] {
    let text = format!("{command}\n\0").into_bytes();
    let length = u64::try_from(text.len()).unwrap_or(u64::MAX).to_le_bytes();
    [length.to_vec(), text, END_OF_COMMANDS.to_vec()]
}

/// One packet of the reply to an administrator.
#[derive(Debug, PartialEq, Eq)]
pub enum ReplyPacket {
    /// A line of output.
    Text(String),
    /// The reply is complete.
    End,
}

impl ReplyPacket {
    /// Parses a packet. Returns `None` if the packet does not belong to this protocol.
    pub fn parse(packet: &[u8]) -> Option<Self> {
        if packet == END_OF_REPLIES {
            return Some(Self::End);
        }
        let text = packet.strip_prefix(&0_u32.to_le_bytes())?;
        let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
        Some(Self::Text(String::from_utf8_lossy(text).into_owned()))
    }
}

/// An answer of the daemon that does not match the command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the MPS control daemon sent an unexpected answer: {0:?}")]
pub struct UnexpectedAnswer(String);

impl UnexpectedAnswer {
    /// Keeps only the beginning of a long answer: the status that contains the answer must fit into
    /// a Kubernetes object.
    pub(crate) fn new(answer: &str) -> Self {
        Self(shorten(answer))
    }
}

/// Parses the list of servers, or of a server's clients.
///
/// # Errors
/// Returns [`UnexpectedAnswer`] if a word is not a PID.
pub fn parse_pids(output: &str) -> Result<Vec<u32>, UnexpectedAnswer> {
    let pids: Result<Vec<u32>, _> = output.split_whitespace().map(str::parse).collect();
    pids.map_err(|_| UnexpectedAnswer::new(output))
}

/// State of an MPS server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerState {
    /// The server is starting.
    Initializing,
    /// The server admits clients.
    Active,
    /// The server admits no client until the clients that a fatal error broke have exited.
    Fault,
    /// No such server exists.
    Gone,
}

/// Parses the answer to `get_server_status`.
///
/// # Errors
/// Returns [`UnexpectedAnswer`] if the answer is not a known state.
pub fn parse_server_state(output: &str) -> Result<ServerState, UnexpectedAnswer> {
    match output.trim() {
        "INITIALIZING" => Ok(ServerState::Initializing),
        "ACTIVE" => Ok(ServerState::Active),
        "FAULT" => Ok(ServerState::Fault),
        other if is_server_not_found(other) => Ok(ServerState::Gone),
        other => Err(UnexpectedAnswer::new(other)),
    }
}

/// Returns whether the answer to a command reports that its server does not exist.
pub(crate) fn is_server_not_found(output: &str) -> bool {
    output.contains("not found")
}

/// Returns whether `output` of `set_` or `get_…active_thread_percentage` is `percent`.
pub fn is_answer_with_percentage(output: &str, percent: u8) -> bool {
    output.trim().parse::<f64>().is_ok_and(|printed| (printed - f64::from(percent)).abs() < 0.05)
}

/// Returns whether `output` of `get_…device_pinned_mem_limit` is `mib`.
///
/// The daemon prints whole MiB below 1 GiB, and GiB rounded down above. The daemon prints nothing
/// if there is no limit.
pub fn is_answer_with_memory_limit(output: &str, mib: Option<u64>) -> bool {
    let output = output.trim();
    let Some(mib) = mib else { return output.is_empty() };
    let number = |unit: char| output.strip_suffix(unit).and_then(|number| number.parse::<u64>().ok());
    match (number('M'), number('G')) {
        (Some(printed), _) => printed == mib,
        (_, Some(printed)) => printed == mib / 1024,
        _ => false,
    }
}

/// Result of `terminate_client`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TerminateResult {
    /// The client's contexts were terminated.
    Done,
    /// The client has no context (`CUDA_ERROR_INVALID_CONTEXT`): not yet, or no longer.
    NoContext,
}

/// Parses the answer to `terminate_client`.
///
/// # Errors
/// Returns [`UnexpectedAnswer`] if the last line is neither 0 nor 201.
pub fn parse_terminate_result(output: &str) -> Result<TerminateResult, UnexpectedAnswer> {
    match output.lines().last().map(str::trim) {
        Some("0") => Ok(TerminateResult::Done),
        Some("201") => Ok(TerminateResult::NoContext),
        _ => Err(UnexpectedAnswer::new(output)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn commands_have_the_packets_of_the_command_line_tool() {
        let [length, text, end] = command_packets(&Command::ServerList);
        assert_eq!(length, [0x11, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(text, b"get_server_list\n\0");
        assert_eq!(end, [0; 8]);
    }

    #[test]
    fn replies_parse_and_end_with_a_one() {
        assert_eq!(ReplyPacket::parse(b"\0\0\0\x00100.0"), Some(ReplyPacket::Text("100.0".into())));
        assert_eq!(ReplyPacket::parse(&[1, 0, 0, 0, 0, 0, 0, 0]), Some(ReplyPacket::End));
        assert_eq!(ReplyPacket::parse(b"OUTB"), None);
        assert_eq!(ReplyPacket::parse(b""), None);
    }

    #[test]
    fn kinds_parse_and_other_packets_are_unknown() {
        assert_eq!(PeerKind::parse(&[2, 0, 0, 0]), PeerKind::Client);
        assert_eq!(PeerKind::parse(&[4, 0, 0, 0]), PeerKind::Administrator);
        for packet in [&[3, 0, 0, 0][..], &[2, 0, 0], &[2, 0, 0, 0, 0], &[]] {
            assert_eq!(PeerKind::parse(packet), PeerKind::Unknown);
        }
    }

    #[test]
    fn limits_match_the_output_of_the_daemon() {
        // Measured pairs of a limit and the output of the daemon.
        for (mib, printed) in [(512, "512M"), (100, "100M"), (1024, "1G"), (1536, "1G"), (7678, "7G"), (10239, "9G")] {
            assert!(is_answer_with_memory_limit(printed, Some(mib)), "{mib} {printed}");
        }
        assert!(is_answer_with_memory_limit("", None));
        assert!(!is_answer_with_memory_limit("", Some(512)));
        assert!(!is_answer_with_memory_limit("8G", None));
        assert!(!is_answer_with_memory_limit("8G", Some(7678)));
        assert!(is_answer_with_percentage("20.0", 20) && is_answer_with_percentage("100.0", 100));
        assert!(
            !is_answer_with_percentage("33.5", 33)
                && !is_answer_with_percentage("", 20)
                && !is_answer_with_percentage("Server 9 not found", 9)
        );
    }

    #[test]
    fn unexpected_answers_are_errors() {
        assert_eq!(parse_server_state("FAULT"), Ok(ServerState::Fault));
        assert_eq!(parse_server_state("Server 999999 not found"), Ok(ServerState::Gone));
        assert!(parse_server_state("").is_err());
        assert_eq!(parse_pids(""), Ok(vec![]));
        assert_eq!(parse_pids("579\n580"), Ok(vec![579, 580]));
        assert!(parse_pids("Server 9 not found").is_err());
        assert_eq!(parse_terminate_result("0"), Ok(TerminateResult::Done));
        assert_eq!(parse_terminate_result("201\n"), Ok(TerminateResult::NoContext));
        assert!(parse_terminate_result("Invalid process 999999!\n1").is_err());
        assert!(parse_terminate_result("").is_err());
    }

    #[test]
    fn an_unexpected_answer_is_shortened_in_its_error() {
        let long = "\u{fffd}".repeat(100_000);
        for error in [
            parse_pids(&long).unwrap_err(),
            parse_server_state(&long).unwrap_err(),
            parse_terminate_result(&long).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.len() < 1000 && text.ends_with("\u{fffd}…\""), "{text}");
        }
        assert_eq!(
            parse_pids("no").unwrap_err().to_string(),
            "the MPS control daemon sent an unexpected answer: \"no\""
        );
    }

    proptest! {
        #[test]
        fn parsers_never_panic(bytes: Vec<u8>, text: String) {
            let _ = ReplyPacket::parse(&bytes);
            let _ = PeerKind::parse(&bytes);
            let _ = (parse_pids(&text), parse_server_state(&text), parse_terminate_result(&text));
            let _ = (is_answer_with_percentage(&text, 20), is_answer_with_memory_limit(&text, Some(1)));
        }

        #[test]
        fn a_command_is_one_line(server: u32, percent: u8, mib: u64) {
            for command in [
                Command::SetThreads { server, percent },
                Command::SetMemory { server, mib: Some(mib) },
                Command::Terminate { server, client: server },
                Command::ShutdownServer { server, force: true },
            ] {
                let [length, text, _] = command_packets(&command);
                prop_assert_eq!(length, u64::try_from(text.len()).unwrap().to_le_bytes());
                prop_assert_eq!(text.iter().filter(|&&byte| byte == b'\n' || byte == 0).count(), 2);
            }
        }
    }
}
