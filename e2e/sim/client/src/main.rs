//! A stand-in CUDA program over the simulated MPS.

mod cuda;
mod devices;
mod lie;
mod work;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
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

use lie::Lie;
use work::Span;

/// Set for the processes of `--processes`.
const CHILD_ENV: &str = "CLEAVE_CLIENT_CHILD";

const ABOUT: &str = r#"A stand-in CUDA program over the simulated GPUs and MPS.

It decides like the CUDA library: where `control` in CUDA_MPS_PIPE_DIRECTORY (default /tmp/nvidia-mps) accepts a
connection, it is an MPS client, and waits as long as it is made to; else it is a plain CUDA program, with all SMs and
all memory, which EXCLUSIVE_PROCESS refuses where another process holds the GPU.

It prints one line, {"sms":…,"freeMiB":…,"totalMiB":…,"viaMps":…,"uuid":…,"pid":…,"limitMiB":…}, and then does what
its flags say, in this order: --read-line, --allocate, --fault or --busy, --hold. Without flags it exits.

A CUDA error prints {"error":700,"name":"CUDA_ERROR_ILLEGAL_ADDRESS"}; the exit status is the code modulo 256 (700 is 188,
806 is 38, 808 is 40, 810 is 42), 1 where that is 0. A signal ends it at once, as it ends any program that does not handle
it, and its MPS server finds a client gone that did not say goodbye.

Its GPUs are those of NVIDIA_VISIBLE_DEVICES; where that is unset or `void`, those whose /dev/nvidia<n> exist; where there
is neither, all if CUDA_VISIBLE_DEVICES is set, else none. Of these CUDA_VISIBLE_DEVICES chooses; the first is used."#;

/// The command line.
// Each flag is one of its own.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Parser)]
#[command(version, about = "A stand-in CUDA program over the simulated GPUs and MPS", long_about = ABOUT)]
pub(crate) struct Arguments {
    /// Print the line and exit: the default, said aloud
    #[arg(long, conflicts_with_all = ["hold", "busy", "busy_forever", "fault"])]
    once: bool,

    /// Allocate memory, a line for each
    #[arg(long, value_name = "MIB", value_delimiter = ',')]
    allocate: Vec<u64>,

    /// Length of the kernels of --busy and --fault; without it they only wait
    #[arg(long, value_name = "MS")]
    kernel_ms: Option<f64>,

    /// Run kernels for so many seconds, or "forever": a line as they begin, {"launched":true,…},
    /// and one as they end
    #[arg(long, value_name = "SECONDS")]
    busy: Option<Span>,

    /// Run kernels until a signal
    #[arg(long, conflicts_with = "busy")]
    busy_forever: bool,

    /// Keep the context for so many seconds, or "forever"
    #[arg(long, value_name = "SECONDS")]
    hold: Option<Span>,

    /// Access memory illegally after so many seconds of --kernel-ms
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "0", require_equals = true)]
    fault: Option<Seconds>,

    /// After a CUDA error live on for so many seconds, or "forever", as a program that ignores
    /// errors
    #[arg(long, value_name = "SECONDS")]
    linger: Option<Span>,

    /// Wait for a line on standard input before doing anything
    #[arg(long)]
    read_line: bool,

    /// Handle SIGTERM and SIGINT: let the kernel in flight finish, say goodbye, exit with 0
    #[arg(long)]
    handle_sigterm: bool,

    /// Contexts to create; the first is used
    #[arg(long, value_name = "N", default_value_t = 1)]
    contexts: usize,

    /// Run so many processes alike; the exit status is the first that is not 0
    #[arg(long, value_name = "N", default_value_t = 1)]
    processes: usize,

    /// Send an administrator's command in place of being a CUDA program, and print
    /// {"command":…,"reply":…}; no reply is null and exit status 1
    #[arg(long, value_name = "COMMAND", conflicts_with = "lie")]
    admin: Option<String>,

    /// Break the handshake in place of being a CUDA program, wait for the other side to close (at
    /// most --hold, 10 seconds), and print
    /// {"lie":…,"outcome":"closed"|"open"|"refused","packets":…}. One of: stall=BYTES, kind=K,
    /// short-kind, huge, garbage, twice, descriptors, pid=PID, root, unread,
    /// administrator-after-client, long-command, flood=N, vanish=WORDS, mute=WORDS, shutdown,
    /// shutdown=STEP, shutdown-reading=STEP, shutdown-writing=STEP, shutdown-daemon=STEP,
    /// shutdown-channel=STEP, no-last-word, last-word=N, enter=N
    #[arg(long, value_name = "LIE", verbatim_doc_comment)]
    lie: Option<Lie>,

    /// The socket of --admin and --lie, in place of `control` in the pipe directory
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// A number of seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seconds(Duration);

impl std::str::FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        seconds.map(Self).ok_or_else(|| format!("{text:?} is not a number of seconds"))
    }
}

fn main() -> anyhow::Result<ExitCode> {
    // Cargo builds only a package's own programs for its tests: they link this one to these names.
    match std::env::args_os().next().as_deref().map(Path::new).and_then(Path::file_name).and_then(OsStr::to_str) {
        Some("nvidia-cuda-mps-control") => return Ok(sim_mps::tool::main()),
        Some("nvidia-cuda-mps-server") => return Ok(sim_mps::server::main()),
        _ => {}
    }
    let arguments = Arguments::parse();
    if std::env::var_os(CHILD_ENV).is_some() {
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
        let reply = handshake::ask(&control, command).with_context(|| format!("cannot ask {}", control.display()))?;
        work::print(&json!({ "command": command, "reply": reply }));
        return Ok(if reply.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if let Some(lie) = arguments.lie {
        let patience = if let Some(Span::For(hold)) = arguments.hold { hold } else { Duration::from_secs(10) };
        lie::run(&control, lie, patience).with_context(|| format!("cannot lie to {}", control.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.processes > 1 && std::env::var_os(CHILD_ENV).is_none() {
        return processes(arguments.processes, &terminated);
    }
    Ok(ExitCode::from(work::run(&arguments, &terminated)))
}

/// Runs this program so many times side by side.
fn processes(count: usize, terminated: &AtomicBool) -> anyhow::Result<ExitCode> {
    let own = std::env::current_exe()?;
    let mut children = (0..count)
        .map(|_| Command::new(&own).args(std::env::args_os().skip(1)).env(CHILD_ENV, "1").spawn())
        .collect::<Result<Vec<Child>, _>>()?;
    let mut told = false;
    let mut status = ExitCode::SUCCESS;
    let mut failed = false;
    while !children.is_empty() {
        if terminated.load(Ordering::Relaxed) && !std::mem::replace(&mut told, true) {
            for child in &children {
                // One that has ended meanwhile needs no signal.
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
