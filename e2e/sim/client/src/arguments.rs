//! The command line of the simulated CUDA program.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;

use crate::lie::HandshakeViolation;

const ABOUT: &str = r#"A simulated CUDA program for the simulated GPUs and MPS.

Like the CUDA library, the program connects to `control` in CUDA_MPS_PIPE_DIRECTORY (default /tmp/nvidia-mps). If an MPS
daemon listens there, the program is an MPS client, and waits for the answer without a deadline. Otherwise the program is a
plain CUDA program with all SMs and all memory, which fails on an EXCLUSIVE_PROCESS GPU that another process uses.

The program prints one line, {"sms":…,"freeMiB":…,"totalMiB":…,"viaMps":…,"uuid":…,"pid":…,"limitMiB":…}, and then performs
the actions of its flags, in this order: --read-line, --allocate, --fault or --busy, --hold. Without flags, the program exits.

A CUDA error prints {"error":700,"name":"CUDA_ERROR_ILLEGAL_ADDRESS"}. The exit status is the code modulo 256 (700 is 188,
806 is 38, 808 is 40, 810 is 42), or 1 if the remainder is 0. By default, a signal kills the program immediately, and its MPS
server detects that the client disconnected without closing its contexts.

The GPUs of the program are those of NVIDIA_VISIBLE_DEVICES. If this variable is unset or `void`, they are the GPUs whose
/dev/nvidia<n> exists. If none exists, the program has all GPUs if NVIDIA_VISIBLE_DEVICES is unset and CUDA_VISIBLE_DEVICES
is set, and otherwise no GPU. CUDA_VISIBLE_DEVICES selects among the GPUs, and the program uses the first."#;

/// The command line arguments of the program.
// The flags are independent of each other, so an enum cannot replace them.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Parser)]
#[command(version, about = "A simulated CUDA program for the simulated GPUs and MPS", long_about = ABOUT)]
pub(crate) struct Arguments {
    /// Print the first line and exit (the default)
    #[arg(long, conflicts_with_all = ["hold", "busy", "busy_forever", "fault"])]
    pub(crate) once: bool,

    /// Allocate memory, and print a line for each allocation
    #[arg(long, value_name = "MIB", value_delimiter = ',')]
    pub(crate) allocate: Vec<u64>,

    /// Length of the kernels of --busy and --fault, in milliseconds. Without this option, --busy
    /// and --fault only wait
    #[arg(long, value_name = "MS")]
    pub(crate) kernel_ms: Option<f64>,

    /// Run kernels for this number of seconds, or "forever". With --kernel-ms, prints
    /// {"launched":true,…} at the start, and {"iterations":…,…} at the end
    #[arg(long, value_name = "SECONDS")]
    pub(crate) busy: Option<StepDuration>,

    /// Run kernels until a signal arrives
    #[arg(long, conflicts_with = "busy")]
    pub(crate) busy_forever: bool,

    /// Keep the context for this number of seconds, or "forever"
    #[arg(long, value_name = "SECONDS")]
    pub(crate) hold: Option<StepDuration>,

    /// Access memory illegally after running kernels for this number of seconds
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "0", require_equals = true)]
    pub(crate) fault: Option<DurationInSeconds>,

    /// After a CUDA error, continue for this number of seconds, or "forever", like a program that
    /// ignores errors
    #[arg(long, value_name = "SECONDS")]
    pub(crate) linger: Option<StepDuration>,

    /// Wait for a line on standard input after the first line of output
    #[arg(long)]
    pub(crate) read_line: bool,

    /// Handle SIGTERM and SIGINT: finish the running kernel, close the contexts, exit with 0
    #[arg(long)]
    pub(crate) handle_sigterm: bool,

    /// Number of contexts to create. The program uses the first context
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) contexts: usize,

    /// Number of identical processes. The exit status is the first process status that is not 0
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) processes: usize,

    /// Send an administrator's command instead, and print {"command":…,"reply":…}. Without a reply,
    /// prints null and exits with status 1
    #[arg(long, value_name = "COMMAND", conflicts_with = "lie")]
    pub(crate) admin: Option<String>,

    /// Violate the handshake instead, wait for the peer to close (at most --hold, default 10
    /// seconds), and print
    /// {"lie":…,"outcome":"closed"|"open"|"refused","packets":…}. One of: stall=BYTES, kind=K,
    /// short-kind, huge, garbage, twice, descriptors, pid=PID, root, unread,
    /// administrator-after-client, long-command, flood=N, vanish=WORDS, mute=WORDS, shutdown,
    /// shutdown=STEP, shutdown-reading=STEP, shutdown-writing=STEP, shutdown-daemon=STEP,
    /// shutdown-channel=STEP, no-last-word, last-word=N, orphan, enter=N
    #[arg(long, value_name = "LIE", verbatim_doc_comment)]
    pub(crate) lie: Option<HandshakeViolation>,

    /// The socket of --admin and --lie, instead of `control` in the pipe directory
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

/// A number of seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DurationInSeconds(pub(crate) Duration);

impl std::str::FromStr for DurationInSeconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        seconds.map(Self).ok_or_else(|| format!("{text:?} is not a number of seconds"))
    }
}

/// How long a step of the program lasts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum StepDuration {
    /// The step ends after this time.
    For(Duration),
    /// The step ends when a signal arrives.
    Forever,
}

impl std::str::FromStr for StepDuration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "forever" {
            return Ok(Self::Forever);
        }
        let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        seconds.map(Self::For).ok_or_else(|| format!("{text:?} is neither a number of seconds nor \"forever\""))
    }
}

impl StepDuration {
    /// Returns whether the duration has passed since `since`.
    pub(crate) fn is_over(self, since: Instant) -> bool {
        match self {
            Self::For(span) => since.elapsed() >= span,
            Self::Forever => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_duration_is_a_number_of_seconds_or_forever() {
        assert_eq!("1.5".parse(), Ok(StepDuration::For(Duration::from_millis(1500))));
        assert_eq!("forever".parse(), Ok(StepDuration::Forever));
        assert!("-1".parse::<StepDuration>().is_err());
        assert!("soon".parse::<StepDuration>().is_err());
    }
}
