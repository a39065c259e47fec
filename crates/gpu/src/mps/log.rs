//! Parses the lines that an MPS control daemon and its server print. Pure.

/// The event that a line reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogEvent {
    /// `NEW SERVER 9: Ready`.
    ServerReady(u32),
    /// `Server 9 exited with status 1`.
    ServerExited {
        /// PID of the server.
        server: u32,
        /// Exit status that the daemon prints.
        status: i32,
    },
    /// `Client {PID: 9, Context: 1} encountered a fatal GPU error.`, or another line of the server
    /// about such an error.
    Fault {
        /// PID of the client, if the line names one.
        client: Option<u32>,
    },
    /// `Client {PID: 9, Context ID: 0} connected`.
    ClientConnected(u32),
    /// `Client process 9 disconnected`.
    ClientDisconnected(u32),
    /// `Server failed to recevie command with status 806, assuming client {PID: 9, Context ID: 1}
    /// exit`: the client exited without closing this context. Context 0 stands for the process
    /// itself: for this context, the driver prints the same line whenever a client exits. That line
    /// is [`LogEvent::Routine`].
    ClientLost(u32),
    /// `CUDA MPS Control binary version: 13000`.
    Version(u32),
    /// An administrator's connection, or an answer to an administrator. The MPS host's own commands
    /// cause many such lines.
    Chatter,
    /// A client connects or exits, or its limits are set.
    Routine,
    /// Any other line.
    Other,
}

/// A parsed line: `[2026-11-21 10:38:36.269 Control   402] text`.
#[derive(Debug, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// `Control`, `Server` or `Other`. Empty for a line without the prefix.
    pub source: &'a str,
    /// PID of the process that wrote the line.
    pub pid: Option<u32>,
    /// The text after the prefix, or the trimmed line if it has no prefix.
    pub text: &'a str,
    /// The event that the text reports.
    pub event: LogEvent,
}

/// Parses one line. Accepts any text.
pub fn parse_log_line(line: &str) -> LogLine<'_> {
    let (source, pid, text) = split_prefix(line).unwrap_or(("", None, line.trim()));
    LogLine { source, pid, text, event: parse_event(text) }
}

/// Splits a line into its source, the source's PID, and the text. Returns `None` if the line does
/// not have the format of a log line.
fn split_prefix(line: &str) -> Option<(&str, Option<u32>, &str)> {
    let (inside, text) = line.trim().strip_prefix('[')?.split_once(']')?;
    let mut words = inside.split_whitespace().skip(2);
    let source = words.next()?;
    Some((source, words.next().and_then(|pid| pid.parse().ok()), text.trim()))
}

/// Returns the event that a text reports.
fn parse_event(text: &str) -> LogEvent {
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
        number(client).map(LogEvent::ClientDisconnected)
    } else if let Some((client, context)) = parse_lost_context(text) {
        Some(if context == 0 { LogEvent::Routine } else { LogEvent::ClientLost(client) })
    } else if let Some(version) = between("CUDA MPS Control binary version: ", "") {
        number(version).map(LogEvent::Version)
    } else if is_administrator_output(text) {
        Some(LogEvent::Chatter)
    } else if is_routine_client_event(text) {
        Some(LogEvent::Routine)
    } else {
        None
    };
    parsed.unwrap_or(LogEvent::Other)
}

/// Returns the client and context of a line about a lost client, or `None` for any other line.
/// "recevie" is the driver's spelling.
fn parse_lost_context(text: &str) -> Option<(u32, u32)> {
    let (_, client) = text.strip_prefix("Server failed to rec")?.split_once("assuming client {PID: ")?;
    let (pid, rest) = client.split_once(',')?;
    let context = rest.trim_start().strip_prefix("Context")?.trim_start_matches(" ID").strip_prefix(": ")?;
    Some((pid.parse().ok()?, context.split('}').next()?.parse().ok()?))
}

fn is_administrator_output(text: &str) -> bool {
    ["Accepting connection...", "NEW UI", "UI closed", "User did not send valid credentials", ""].contains(&text)
        || text.starts_with("Cmd:")
        // The daemon also prints its answers.
        || text.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'G' | b'M'))
        || ["ACTIVE", "INITIALIZING", "FAULT"].contains(&text)
}

fn is_routine_client_event(text: &str) -> bool {
    [
        "NEW CLIENT ",
        "Received new client request",
        "Creating worker thread for client",
        "Device pinned memory limit for device",
        // "recevie" is the driver's spelling.
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
    fn known_lines_parse_to_their_events() {
        let parse_event = |text: &str| parse_log_line(&format!("[2026-11-21 10:38:36.269 Server   402] {text}")).event;
        assert_eq!(parse_event("NEW SERVER 423: Ready"), LogEvent::ServerReady(423));
        assert_eq!(parse_event("Server 423 exited with status 0"), LogEvent::ServerExited { server: 423, status: 0 });
        assert_eq!(parse_event("Client {PID: 436, Context ID: 0} connected"), LogEvent::ClientConnected(436));
        assert_eq!(parse_event("Client process 436 disconnected"), LogEvent::ClientDisconnected(436));
        assert_eq!(
            parse_event("Client {PID: 579, Context: 1} encountered a fatal GPU error."),
            LogEvent::Fault { client: Some(579) }
        );
        assert_eq!(parse_event("Server is handling a fatal GPU error."), LogEvent::Fault { client: None });
        let lost = |context| {
            parse_event(&format!(
                "Server failed to recevie command with status 806, assuming client {{PID: 814, {context}}} exit"
            ))
        };
        assert_eq!(lost("Context ID: 1"), LogEvent::ClientLost(814));
        assert_eq!(lost("Context: 2"), LogEvent::ClientLost(814));
        assert_eq!(lost("Context ID: 0"), LogEvent::Routine, "printed whenever a client exits");
        assert_eq!(lost("what"), LogEvent::Routine);
        assert_eq!(parse_event("CUDA MPS Control binary version: 13000"), LogEvent::Version(13000));
        for chatter in ["Cmd:get_server_list", "NEW UI", "100.0", "8G", "423", "ACTIVE"] {
            assert_eq!(parse_event(chatter), LogEvent::Chatter, "{chatter}");
        }
        for routine in [
            "NEW CLIENT 436 from user 0: Server already exists",
            "Client {PID: 436, Context ID: 2} exiting. Number of active client contexts is 1.",
            "Device NVIDIA H200 (uuid GPU-3da61522-b946-8b5e-d0da-5debfa49f742) is associated",
        ] {
            assert_eq!(parse_event(routine), LogEvent::Routine, "{routine}");
        }
        assert_eq!(parse_event("Server has started"), LogEvent::Other);
        let line = parse_log_line("[2026-11-21 10:38:36.269 Control   402] NEW UI");
        assert_eq!((line.source, line.pid, line.text), ("Control", Some(402), "NEW UI"));
        assert_eq!(parse_log_line("An instance of this daemon is already running").source, "");
    }

    proptest! {
        #[test]
        fn arbitrary_text_parses(text: String) {
            let line = parse_log_line(&text);
            prop_assert!(text.contains(line.text));
        }

        #[test]
        fn a_line_that_is_cut_anywhere_parses(cut in 0_usize..90) {
            let line = "[2026-11-21 10:38:36.269 Server   402] Client {PID: 579, Context: 1} encountered a fatal GPU error.";
            let _ = parse_log_line(line.get(..cut).unwrap_or(line));
        }
    }
}
