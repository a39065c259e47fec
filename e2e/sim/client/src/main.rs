//! Simulates a CUDA program that uses the simulated MPS. Tests start this program as a tenant's
//! program.

mod arguments;
mod cuda;
mod devices;
mod lie;
mod output;
mod work;

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use rustix::process::{Pid, Signal};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use sim_mps::handshake;

use arguments::{Arguments, StepDuration};

/// The environment variable that marks the child processes of `--processes`.
const CHILD_PROCESS_ENV: &str = "CLEAVE_CLIENT_CHILD";

fn main() -> anyhow::Result<ExitCode> {
    // For the tests of a package, Cargo builds only the package's own programs. The tests therefore
    // create links to this program with the names of NVIDIA's programs.
    match std::env::args_os().next().as_deref().map(Path::new).and_then(Path::file_name).and_then(OsStr::to_str) {
        Some("nvidia-cuda-mps-control") => return Ok(sim_mps::tool::main()),
        Some("nvidia-cuda-mps-server") => return Ok(sim_mps::server::main()),
        _ => {}
    }
    let arguments = Arguments::parse();
    if std::env::var_os(CHILD_PROCESS_ENV).is_some() {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    }
    let terminated = Arc::new(AtomicBool::new(false));
    if arguments.handle_sigterm {
        for signal in [SIGTERM, SIGINT] {
            signal_hook::flag::register(signal, Arc::clone(&terminated))?;
        }
    }
    let control = arguments.socket.clone().unwrap_or_else(|| sim_mps::tool::pipe_directory().join("control"));
    if let Some(command) = &arguments.admin {
        let reply = handshake::send_command(&control, command)
            .with_context(|| format!("failed to send a command to {}", control.display()))?;
        output::print_json_line(&json!({ "command": command, "reply": reply }));
        return Ok(if reply.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if let Some(lie) = arguments.lie {
        let patience = if let Some(StepDuration::For(hold)) = arguments.hold { hold } else { Duration::from_secs(10) };
        lie::run(&control, lie, patience).with_context(|| format!("failed to connect to {}", control.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.processes > 1 && std::env::var_os(CHILD_PROCESS_ENV).is_none() {
        return run_processes(arguments.processes, &terminated);
    }
    Ok(ExitCode::from(work::run(&arguments, &terminated)))
}

/// Runs this program in `count` parallel processes.
fn run_processes(count: usize, terminated: &AtomicBool) -> anyhow::Result<ExitCode> {
    let own = std::env::current_exe()?;
    let mut children = (0..count)
        .map(|_| Command::new(&own).args(std::env::args_os().skip(1)).env(CHILD_PROCESS_ENV, "1").spawn())
        .collect::<Result<Vec<Child>, _>>()?;
    let mut signalled = false;
    let mut status = ExitCode::SUCCESS;
    let mut failed = false;
    while !children.is_empty() {
        if terminated.load(Ordering::Relaxed) && !std::mem::replace(&mut signalled, true) {
            for child in &children {
                // Ignore errors, because the process may have exited.
                let _ =
                    Pid::from_raw(child.id().try_into()?).map(|pid| rustix::process::kill_process(pid, Signal::TERM));
            }
        }
        let mut running = Vec::new();
        for mut child in children {
            match child.try_wait()? {
                Some(ended) if !ended.success() && !std::mem::replace(&mut failed, true) => {
                    status = ExitCode::from(ended.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
                }
                Some(_) => {}
                None => running.push(child),
            }
        }
        children = running;
        thread::sleep(Duration::from_millis(10));
    }
    Ok(status)
}
