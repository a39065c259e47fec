//! Targets for input from MPS daemons and their clients, and for messages between the agent and the
//! MPS host.
use cleave_gpu::mps::log::{LogEvent, parse_log_line};
use cleave_gpu::mps::protocol::{
    Command, PeerKind, ReplyPacket, command_packets, is_answer_with_memory_limit, is_answer_with_percentage,
    parse_pids, parse_server_state, parse_terminate_result,
};
use cleave_gpu::mps::wire::{Desired, Paths, Reply as HostReply, Request};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{agent, fixtures};
use crate::mutate::InputShape;
use crate::{ReadResult, Target, assert_printable};

pub(super) const CONTROL_PACKET: Target = Target {
    name: "control_packet",
    what: "packets of an MPS control daemon, and of a client at a door",
    shape: InputShape::Bytes,
    words: &[
        "\0\0\0\0",
        "ACTIVE",
        "INITIALIZING",
        "FAULT",
        "not found",
        "402 579",
        "100.0",
        "4096M",
        "23G",
        "0",
        "201",
        "OUTBHELL\0",
        "\u{2}\0\0\0",
        "\u{4}\0\0\0",
        "\u{1}\0\0\0\0\0\0\0",
    ],
    samples: || {
        let texts = [
            "402\n579 580",
            "ACTIVE",
            "FAULT",
            "INITIALIZING",
            "Server 9 not found",
            "100.0",
            "512M",
            "23G",
            "",
            "0",
            "201",
        ];
        let mut samples: Vec<Vec<u8>> =
            texts.iter().map(|text| [b"\0\0\0\0", text.as_bytes(), b"\0"].concat()).collect();
        samples.extend([PeerKind::Client, PeerKind::Administrator].map(|kind| kind.packet().to_vec()));
        samples.push(1_u64.to_le_bytes().to_vec());
        samples
    },
    inputs: 20_000,
    run: read_control_packet,
};

fn read_control_packet(packet: &[u8]) -> ReadResult {
    let kind = PeerKind::parse(packet);
    if kind != PeerKind::Unknown {
        assert_eq!(kind.packet().as_slice(), packet);
        return ReadResult::Read;
    }
    check_command_encoding(packet);
    match ReplyPacket::parse(packet) {
        None => ReadResult::Refused,
        Some(ReplyPacket::End) => ReadResult::Read,
        Some(ReplyPacket::Text(text)) => {
            assert!(!text.contains('\0') && text.len() <= 3 * packet.len());
            check_answer_parsers(&text);
            ReadResult::Read
        }
    }
}

/// Passes an answer to every answer parser, and checks the results.
fn check_answer_parsers(text: &str) {
    if let Ok(read) = parse_pids(text) {
        let written: Vec<String> = read.iter().map(u32::to_string).collect();
        assert_eq!(parse_pids(&written.join("\n")).as_deref(), Ok(read.as_slice()));
    }
    for error in [parse_pids(text).err(), parse_server_state(text).err(), parse_terminate_result(text).err()]
        .into_iter()
        .flatten()
    {
        assert_printable(&error.to_string());
    }
    let percents: Vec<u8> = (0..=255).filter(|&percent| is_answer_with_percentage(text, percent)).collect();
    assert!(percents.len() <= 1, "{text:?} is {percents:?} %");
    assert!(
        !(is_answer_with_memory_limit(text, None) && is_answer_with_memory_limit(text, Some(0))),
        "{text:?} is both a limit and no limit"
    );
}

/// Checks that commands with numbers from the packet are encoded correctly.
fn check_command_encoding(packet: &[u8]) {
    let mut words = packet.chunks(4).map(|word| word.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)));
    let (server, other) = (words.next().unwrap_or(0), words.next().unwrap_or(0));
    let percent = packet.first().copied().unwrap_or(0);
    for command in [
        Command::ServerList,
        Command::ServerStatus(server),
        Command::StartServer { uid: other },
        Command::ShutdownServer { server, force: other % 2 == 0 },
        Command::SetThreads { server, percent },
        Command::SetMemory { server, mib: (other > 0).then_some(u64::from(other) << 20) },
        Command::Terminate { server, client: other },
        Command::Quit { seconds: other },
    ] {
        let [length, text, end] = command_packets(&command);
        assert_eq!(length, u64::try_from(text.len()).unwrap_or(0).to_le_bytes(), "{command}");
        assert_eq!(text, format!("{command}\n\0").into_bytes());
        assert_eq!(text.iter().filter(|byte| matches!(**byte, b'\n' | 0)).count(), 2, "{command} is not one line");
        assert_eq!(end, [0; 8]);
    }
}

pub(super) const LOG_LINE: Target = Target {
    name: "log_line",
    what: "lines that the MPS daemon and its server print",
    shape: InputShape::Bytes,
    words: &[
        "[2026-11-21 10:38:36.269 Server   402] ",
        "[",
        "]",
        "Control",
        "Server",
        "Other",
        "NEW SERVER ",
        ": Ready",
        " exited with status ",
        "Client {PID: ",
        ", Context: ",
        ", Context ID: ",
        "} connected",
        "} exiting",
        "fatal GPU error",
        "Client process ",
        " disconnected",
        "Server failed to recevie command with status 806, assuming client {PID: ",
        "CUDA MPS Control binary version: ",
        "Cmd:",
    ],
    samples: Vec::new,
    inputs: 12_000,
    run: read_log,
};

fn read_log(bytes: &[u8]) -> ReadResult {
    let text = String::from_utf8_lossy(bytes);
    let mut seen = ReadResult::Refused;
    for line in text.lines() {
        let read = parse_log_line(line);
        assert!(line.contains(read.text) && line.contains(read.source));
        let named = match read.event {
            LogEvent::ServerReady(pid)
            | LogEvent::ServerExited { server: pid, .. }
            | LogEvent::Fault { client: Some(pid) }
            | LogEvent::ClientConnected(pid)
            | LogEvent::ClientDisconnected(pid)
            | LogEvent::ClientLost(pid)
            | LogEvent::Version(pid) => Some(pid),
            LogEvent::Fault { client: None } | LogEvent::Chatter | LogEvent::Routine | LogEvent::Other => None,
        };
        for pid in named.into_iter().chain(read.pid) {
            assert!(line.contains(&pid.to_string()), "{line:?} does not name {pid}");
        }
        // Format the log line that the daemon writes for these values.
        let again = format!("[2026-11-21 10:38:36.269 {} {}] {}", read.source, read.pid.unwrap_or(0), read.text);
        if !read.source.is_empty() && read.pid.is_some() {
            assert_eq!(parse_log_line(&again), read, "{again:?}");
        }
        if read.event != LogEvent::Other {
            seen = ReadResult::Read;
        }
    }
    seen
}

pub(super) const DESIRED: Target = Target {
    name: "desired",
    what: "the file with the desired state of the MPS host, which the agent writes",
    shape: InputShape::Json,
    words: &[
        "version",
        "daemons",
        "allocations",
        "GPU-",
        "MIG-",
        "threads",
        "memoryMib",
        "maxClients",
        "exclusive",
        "../x",
        "00ff",
    ],
    samples: || vec![fixtures::encode_sample(&agent::sample_actions().desired)],
    inputs: 12_000,
    run: read_desired,
};

fn read_desired(bytes: &[u8]) -> ReadResult {
    match Desired::parse(bytes) {
        Err(error) => {
            assert_printable(&error.to_string());
            ReadResult::Refused
        }
        Ok(desired) => {
            let again = Desired::parse(&fixtures::to_json(&desired));
            assert_eq!(again.as_ref(), Ok(&desired));
            assert_eq!(again.map(|again| again.hash()), Ok(desired.hash()));
            let paths = Paths::new("/run/cleave");
            for id in desired.allocations.keys() {
                assert_eq!(paths.allocation(id).parent(), Some(paths.allocations().as_path()), "{id:?}");
                assert!(paths.door(id).components().all(|part| part != std::path::Component::ParentDir));
            }
            for device in desired.daemons.keys() {
                assert_eq!(paths.pipe(device).parent(), Some(paths.mps_host_dir().as_path()), "{device:?}");
            }
            ReadResult::Read
        }
    }
}

pub(super) const HOST_MESSAGE: Target = Target {
    name: "host_message",
    what: "requests to the MPS host's socket, and its answers",
    shape: InputShape::Json,
    words: &[
        "op",
        "result",
        "await",
        "terminate",
        "status",
        "done",
        "noContext",
        "error",
        "timeoutMs",
        "pid",
        "message",
    ],
    samples: || {
        let status = fixtures::mps_host_status(&agent::sample_actions().desired);
        let requests = [
            Request::Await { allocation: "00ff".into(), timeout_ms: 25_000 },
            Request::Terminate { device: fixtures::gpu_uuid(0), pid: 579 },
            Request::Status,
        ];
        let replies = [
            HostReply::Done,
            HostReply::NoContext,
            HostReply::Error { message: "why".into() },
            HostReply::Status(status),
        ];
        requests.iter().map(fixtures::encode_sample).chain(replies.iter().map(fixtures::encode_sample)).collect()
    },
    inputs: 6_000,
    run: |bytes| match (check_round_trip::<Request>(bytes), check_round_trip::<HostReply>(bytes)) {
        (ReadResult::Refused, ReadResult::Refused) => ReadResult::Refused,
        _ => ReadResult::Read,
    },
};

/// Checks that encoding and decoding a message returns the same message.
pub(super) fn check_round_trip<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(
    bytes: &[u8],
) -> ReadResult {
    let Ok(read) = serde_json::from_slice::<T>(bytes) else { return ReadResult::Refused };
    let again = serde_json::from_slice::<T>(&fixtures::to_json(&read)).map_err(|error| error.to_string());
    assert_eq!(again.as_ref(), Ok(&read));
    ReadResult::Read
}
