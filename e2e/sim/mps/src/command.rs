//! Parses administrators' commands, as in the v2 shell of driver 580.

use std::time::Duration;

use crate::limits;

/// An administrator's command.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Prints the PIDs of the servers, one per line.
    GetServerList,
    /// Prints the status of a server: INITIALIZING, ACTIVE or FAULT.
    GetServerStatus(u32),
    /// Starts a server for a user id.
    StartServer(u32),
    /// Stops a server. Without `force`, waits until the server has no clients.
    ShutdownServer {
        /// The server's PID.
        server: u32,
        /// Whether to stop the server without waiting.
        force: bool,
    },
    /// Prints the PIDs of a server's clients, one per line.
    GetClientList(u32),
    /// Prints the devices and the PIDs of their clients, for one server or for all servers.
    GetDeviceClientList(Option<u32>),
    /// Prints a table of clients, for one PID or for all clients.
    Ps(Option<u32>),
    /// Destroys a client's contexts. Other clients continue.
    TerminateClient {
        /// The server's PID.
        server: u32,
        /// The client's PID.
        client: u32,
    },
    /// Prints the thread percentage for servers that start later.
    GetDefaultThreads,
    /// Sets the thread percentage for servers that start later. An invalid value has no effect.
    SetDefaultThreads(Option<f64>),
    /// Prints the thread percentage for the next clients of a server.
    GetThreads(u32),
    /// Sets the thread percentage for the next clients of a server. An invalid value has no effect.
    SetThreads(u32, Option<f64>),
    /// Prints the memory limit of a device for servers that start later.
    GetDefaultMemory(String),
    /// Sets the memory limit of a device for servers that start later.
    SetDefaultMemory(String, String),
    /// Prints the memory limit of a device for the next clients of a server.
    GetMemory(u32, String),
    /// Sets the memory limit of a device for the next clients of a server.
    SetMemory(u32, String, String),
    /// Prints the client priority for servers that start later.
    GetDefaultPriority,
    /// Sets the client priority for servers that start later.
    SetDefaultPriority(u8),
    /// Stops the servers and the daemon. Before that, the daemon waits until no clients remain, or
    /// until the given time has passed.
    Quit(Option<Duration>),
    /// Prints the list of commands.
    Help,
}

/// Why a line is not a valid command. The daemon sends this error to the administrator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandError {
    /// The command does not exist.
    Unknown(String),
    /// The command has the wrong arguments. The value is the usage of the command.
    Usage(&'static str),
}

impl std::fmt::Display for CommandError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown(name) => write!(f, "Unknown command \"{name}\""),
            Self::Usage(usage) => write!(f, "Usage: {usage}"),
        }
    }
}

/// The list of all commands and their arguments, except `help`.
pub const COMMAND_HELP: &str = "get_server_list
get_server_status <PID>
start_server -uid <user id>
shutdown_server <PID> [-f]
get_client_list <PID>
get_device_client_list [<PID>]
ps [-p PID]
terminate_client <server PID> <client PID>
get_default_active_thread_percentage
set_default_active_thread_percentage <percentage>
get_active_thread_percentage <PID>
set_active_thread_percentage <PID> <percentage>
get_default_device_pinned_mem_limit <dev>
set_default_device_pinned_mem_limit <dev> <value>
get_device_pinned_mem_limit <PID> <dev>
set_device_pinned_mem_limit <PID> <dev> <value>
get_default_client_priority
set_default_client_priority <priority>
quit [-t TIMEOUT]
";

impl Command {
    /// Parses a line that an administrator sent.
    ///
    /// # Errors
    /// Returns [`CommandError`] if the command is unknown or has the wrong arguments.
    pub fn parse(line: &str) -> Result<Self, CommandError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, arguments) = words.split_first().ok_or_else(|| CommandError::Unknown(String::new()))?;
        let usage = COMMAND_HELP.lines().find(|usage| usage.split(' ').next() == Some(name));
        let Some(usage) = usage else {
            return if *name == "help" { Ok(Self::Help) } else { Err(CommandError::Unknown((*name).to_owned())) };
        };
        Self::parse_arguments(name, arguments).ok_or(CommandError::Usage(usage))
    }

    fn parse_arguments(name: &str, arguments: &[&str]) -> Option<Self> {
        Some(match (name, arguments) {
            ("get_server_list", []) => Self::GetServerList,
            ("get_server_status", [server]) => Self::GetServerStatus(server.parse().ok()?),
            ("start_server", ["-uid", uid]) => Self::StartServer(uid.parse().ok()?),
            ("shutdown_server", [server]) => Self::ShutdownServer { server: server.parse().ok()?, force: false },
            ("shutdown_server", [server, "-f"] | ["-f", server]) => {
                Self::ShutdownServer { server: server.parse().ok()?, force: true }
            }
            ("get_client_list", [server]) => Self::GetClientList(server.parse().ok()?),
            ("get_device_client_list", []) => Self::GetDeviceClientList(None),
            ("get_device_client_list", [server]) => Self::GetDeviceClientList(Some(server.parse().ok()?)),
            ("ps", []) => Self::Ps(None),
            ("ps", ["-p", pid]) => Self::Ps(Some(pid.parse().ok()?)),
            ("terminate_client", [server, client]) => {
                Self::TerminateClient { server: server.parse().ok()?, client: client.parse().ok()? }
            }
            ("get_default_active_thread_percentage", []) => Self::GetDefaultThreads,
            ("set_default_active_thread_percentage", [value]) => {
                Self::SetDefaultThreads(limits::parse_percentage(value))
            }
            ("get_active_thread_percentage", [server]) => Self::GetThreads(server.parse().ok()?),
            ("set_active_thread_percentage", [server, value]) => {
                Self::SetThreads(server.parse().ok()?, limits::parse_percentage(value))
            }
            ("get_default_device_pinned_mem_limit", [device]) => Self::GetDefaultMemory((*device).to_owned()),
            ("set_default_device_pinned_mem_limit", [device, value]) => {
                limits::parse_bytes(value)?;
                Self::SetDefaultMemory((*device).to_owned(), (*value).to_owned())
            }
            ("get_device_pinned_mem_limit", [server, device]) => {
                Self::GetMemory(server.parse().ok()?, (*device).to_owned())
            }
            ("set_device_pinned_mem_limit", [server, device, value]) => {
                limits::parse_bytes(value)?;
                Self::SetMemory(server.parse().ok()?, (*device).to_owned(), (*value).to_owned())
            }
            ("get_default_client_priority", []) => Self::GetDefaultPriority,
            ("set_default_client_priority", [value]) => {
                Self::SetDefaultPriority(value.parse().ok().filter(|priority| *priority <= 1)?)
            }
            ("quit", []) => Self::Quit(None),
            ("quit", ["-t", seconds]) => Self::Quit(Some(Duration::from_secs(seconds.parse().ok()?))),
            _ => return None,
        })
    }

    /// Returns whether only `control_privileged` accepts the command.
    pub fn is_privileged(&self) -> bool {
        !matches!(
            self,
            Self::GetServerList
                | Self::GetServerStatus(_)
                | Self::GetClientList(_)
                | Self::GetDeviceClientList(_)
                | Self::Ps(_)
                | Self::GetDefaultThreads
                | Self::GetThreads(_)
                | Self::GetDefaultMemory(_)
                | Self::GetMemory(..)
                | Self::GetDefaultPriority
                | Self::Help
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_parsed_with_their_arguments() {
        let cases = [
            ("get_server_list", Command::GetServerList),
            ("start_server -uid 1000", Command::StartServer(1000)),
            ("shutdown_server 17 -f", Command::ShutdownServer { server: 17, force: true }),
            ("terminate_client 17 23", Command::TerminateClient { server: 17, client: 23 }),
            ("  set_active_thread_percentage  17 12.5 ", Command::SetThreads(17, Some(12.5))),
            ("set_active_thread_percentage 17 x", Command::SetThreads(17, None)),
            ("set_device_pinned_mem_limit 17 0 8G", Command::SetMemory(17, "0".into(), "8G".into())),
            ("ps -p 5", Command::Ps(Some(5))),
            ("quit -t 3", Command::Quit(Some(Duration::from_secs(3)))),
        ];
        for (line, command) in cases {
            assert_eq!(Command::parse(line), Ok(command), "{line}");
        }
    }

    #[test]
    fn an_invalid_command_is_reported() {
        assert_eq!(Command::parse(""), Err(CommandError::Unknown(String::new())));
        assert_eq!(Command::parse("lspart"), Err(CommandError::Unknown("lspart".into())));
        for line in ["get_server_status", "get_server_status abc", "set_default_active_thread_percentage", "quit now"] {
            assert!(matches!(Command::parse(line), Err(CommandError::Usage(_))), "{line}");
        }
    }

    #[test]
    fn commands_that_change_something_are_privileged() {
        let changing = [
            "start_server -uid 0",
            "shutdown_server 1",
            "terminate_client 1 2",
            "set_default_active_thread_percentage 50",
            "set_active_thread_percentage 1 50",
            "set_default_device_pinned_mem_limit 0 8G",
            "set_device_pinned_mem_limit 1 0 8G",
            "set_default_client_priority 1",
            "quit",
        ];
        let reading = [
            "get_server_list",
            "get_server_status 1",
            "get_client_list 1",
            "get_device_client_list",
            "ps",
            "get_default_active_thread_percentage",
            "get_active_thread_percentage 1",
            "get_default_device_pinned_mem_limit 0",
            "get_device_pinned_mem_limit 1 0",
            "get_default_client_priority",
        ];
        assert_eq!(
            changing.len() + reading.len(),
            COMMAND_HELP.lines().count(),
            "every command is in one of the lists"
        );
        assert!(changing.iter().all(|line| Command::parse(line).unwrap().is_privileged()));
        assert!(reading.iter().all(|line| !Command::parse(line).unwrap().is_privileged()));
    }
}
