//! Implements the command line of `nvidia-cuda-mps-control`.

use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::daemon::{self, DaemonConfig};
use crate::handshake;
use crate::limits::ClientSettings;

/// The default of `CUDA_MPS_PIPE_DIRECTORY`.
pub const DEFAULT_MPS_PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";
/// The default of `CUDA_MPS_LOG_DIRECTORY`.
const DEFAULT_MPS_LOG_DIRECTORY: &str = "/var/log/nvidia-mps";

const HELP_TEXT: &str = "\
Simulated MPS control daemon for the simulated machine ($SIMGPU_STATE, /var/lib/simgpu).

Usage: nvidia-cuda-mps-control -d|-f [-multiuser-server]    start the daemon in the background or foreground
       nvidia-cuda-mps-control [COMMAND...]                 send a command, or one per line of standard input
       nvidia-cuda-mps-control -v                           print the version

Commands: get_server_list, help and others (see `nvidia-cuda-mps-control help`).

Environment of daemon and commands:
  CUDA_MPS_PIPE_DIRECTORY            directory of the sockets (/tmp/nvidia-mps)
Environment of the daemon:
  CUDA_MPS_LOG_DIRECTORY             log directory of -d (/var/log/nvidia-mps); -f logs to standard output
  CUDA_VISIBLE_DEVICES               GPUs or MIG devices to serve, by UUID or index
  CUDA_MPS_ACTIVE_THREAD_PERCENTAGE  default thread percentage
  CUDA_MPS_PINNED_DEVICE_MEM_LIMIT   default memory limits, such as 0=8G
  SIM_MPS_SERVER_START_MS            start time of a server (150)
  SIM_MPS_BREAK                      whether a client killed with a kernel in flight breaks its neighbours:
                                     measured (by the kernel's length), always, never
  SIM_MPS_SEED                       which of twelve exits with kernels of 1 to 100 ms breaks the neighbours

Tests inject faults through the simulated machine: `simgpu fail` and `simgpu hang` with mps:start, mps:handshake,
mps:reply, mps:client, mps:server, mps:heal, mps:command:<name> or mps:close:<name>.
";

/// The action that the arguments request.
#[derive(Debug, PartialEq, Eq)]
enum RequestedAction {
    Daemon { background: bool, multi_user: bool },
    Version,
    Help,
    Commands(Option<String>),
    Invalid(String),
}

/// Runs the program.
pub fn main() -> ExitCode {
    let arguments: Vec<String> =
        std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect();
    match parse_arguments(&arguments) {
        RequestedAction::Help => print(HELP_TEXT),
        RequestedAction::Version => print("CUDA MPS Control binary version: 13000\n"),
        RequestedAction::Invalid(what) => {
            eprintln!("{what}\n\n{HELP_TEXT}");
            ExitCode::FAILURE
        }
        RequestedAction::Daemon { background, multi_user } => {
            let config = daemon_config_from_environment(multi_user);
            let outcome =
                if background { daemon::start_in_background(config) } else { daemon::run_in_foreground(config) };
            outcome.unwrap_or_else(|error| {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            })
        }
        RequestedAction::Commands(Some(command)) => send_commands([Ok(command)]),
        RequestedAction::Commands(None) => send_commands(io::stdin().lock().lines()),
    }
}

fn parse_arguments(arguments: &[String]) -> RequestedAction {
    let (mut daemon, mut multi_user) = (None, false);
    let mut command: Vec<&str> = Vec::new();
    for argument in arguments {
        match argument.as_str() {
            // The options of a command follow its name.
            word if !command.is_empty() => command.push(word),
            "-d" => daemon = Some(true),
            "-f" => daemon = Some(false),
            "-M" | "-multiuser-server" | "--multiuser-server" => multi_user = true,
            "-v" => return RequestedAction::Version,
            "-h" | "--help" => return RequestedAction::Help,
            option if option.starts_with('-') => return RequestedAction::Invalid(format!("unknown option {option}")),
            word => command.push(word),
        }
    }
    match daemon {
        Some(background) if command.is_empty() => RequestedAction::Daemon { background, multi_user },
        Some(_) => RequestedAction::Invalid("-d and -f accept no command".to_owned()),
        None if multi_user => RequestedAction::Invalid("-multiuser-server requires -d or -f".to_owned()),
        None => RequestedAction::Commands((!command.is_empty()).then(|| command.join(" "))),
    }
}

fn daemon_config_from_environment(multi_user: bool) -> DaemonConfig {
    let text = |name| std::env::var(name).ok();
    DaemonConfig {
        pipe_directory: pipe_directory(),
        log_directory: directory_from_environment("CUDA_MPS_LOG_DIRECTORY", DEFAULT_MPS_LOG_DIRECTORY),
        visible: text("CUDA_VISIBLE_DEVICES"),
        multi_user,
        defaults: ClientSettings::from_environment(
            text("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").as_deref(),
            text("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").as_deref(),
        ),
    }
}

/// Returns the pipe directory from `CUDA_MPS_PIPE_DIRECTORY`, or the default.
pub fn pipe_directory() -> PathBuf {
    directory_from_environment("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_MPS_PIPE_DIRECTORY)
}

fn directory_from_environment(variable: &str, default: &str) -> PathBuf {
    std::env::var_os(variable).filter(|value| !value.is_empty()).map_or_else(|| PathBuf::from(default), PathBuf::from)
}

/// Sends each command over a separate connection, and prints the answers.
fn send_commands(commands: impl IntoIterator<Item = io::Result<String>>) -> ExitCode {
    for command in commands {
        let Ok(command) = command else { break };
        if command.trim().is_empty() {
            continue;
        }
        match send_command(&pipe_directory(), &command) {
            Ok(Some(answer)) => {
                print(&answer);
            }
            // The daemon closed the connection before the end of its answer, for example because of
            // an injected `mps:close`.
            Ok(None) => {
                eprintln!("The MPS control daemon closed the connection");
                return ExitCode::FAILURE;
            }
            Err(error) => {
                eprintln!("Cannot find MPS control daemon process: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// Sends a command over `control_privileged`, or over `control` if this process cannot access
/// `control_privileged`.
fn send_command(directory: &Path, command: &str) -> io::Result<Option<String>> {
    match handshake::send_command(&directory.join("control_privileged"), command) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            handshake::send_command(&directory.join("control"), command)
        }
        other => other,
    }
}

fn print(text: &str) -> ExitCode {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> RequestedAction {
        parse_arguments(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_request_a_daemon_or_a_command() {
        assert_eq!(parse_line("-f -multiuser-server"), RequestedAction::Daemon { background: false, multi_user: true });
        assert_eq!(parse_line("-d"), RequestedAction::Daemon { background: true, multi_user: false });
        assert_eq!(parse_line(""), RequestedAction::Commands(None));
        assert_eq!(
            parse_line("shutdown_server 17 -f"),
            RequestedAction::Commands(Some("shutdown_server 17 -f".into()))
        );
        assert!(matches!(parse_line("-d get_server_list"), RequestedAction::Invalid(_)));
        assert!(matches!(parse_line("-multiuser-server"), RequestedAction::Invalid(_)));
        assert!(matches!(parse_line("-x"), RequestedAction::Invalid(_)));
    }
}
