//! Runs the CUDA program that shows how the driver behaves. The doctor's user provides the program.
//!
//! Once the program has a context, it prints a line of JSON: `{"sms": 26, "freeMiB": 8069}`, or
//! `{"error": 2}` with the error code of the CUDA driver API. With `--allocate MIB` the program
//! then allocates MIB MiB and prints a second line: an error, or any other line on success. With
//! `--read-line`, the program waits before the allocation for a line on its standard input, or for
//! the end of the input. After these steps, the program exits.
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use super::observed::{AllocationResult, GpuView};
use crate::mps::text::shorten;

/// Time limit for a line of output. The creation of a context takes about 0.1 s, or much longer if
/// the driver first initializes the GPU.
const OUTPUT_LINE_DEADLINE: Duration = Duration::from_secs(30);
/// Time limit for a program to exit after its last line.
const PROGRAM_EXIT_DEADLINE: Duration = Duration::from_secs(10);

/// The CUDA program and the settings of all its runs.
#[derive(Debug, Clone)]
pub(super) struct Program {
    /// The program and its first arguments.
    pub(super) words: Vec<OsString>,
    pub(super) library_path: Option<OsString>,
    pub(super) device: String,
}

/// Options of one run.
#[derive(Debug, Clone, Default)]
pub(super) struct ProgramRunOptions {
    /// `CUDA_MPS_PIPE_DIRECTORY`.
    pub(super) pipe: PathBuf,
    pub(super) environment: BTreeMap<&'static str, String>,
    /// UID and GID to run the program as. Default: this process's user and group.
    pub(super) uid: Option<u32>,
    /// Whether the program waits for a line before it allocates.
    pub(super) waits: bool,
    pub(super) allocate_mib: Option<u64>,
}

/// Why a program returned no usable result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ProgramError {
    /// The program itself does not work. The driver is not the cause.
    #[error("the CUDA program {0}")]
    Broken(String),
    /// A CUDA call failed.
    #[error("the program failed with CUDA error {0}")]
    Cuda(i64),
    /// The program printed no line before the deadline. Usually, the program still waits for CUDA.
    #[error("the CUDA program printed no line for {} s: it probably still waits for CUDA", OUTPUT_LINE_DEADLINE.as_secs())]
    Timeout,
}

/// A line that the program printed.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OutputLine {
    error: Option<i64>,
    sms: Option<u32>,
    #[serde(rename = "freeMiB")]
    free_mib: Option<u64>,
}

/// A running program with a context.
pub(super) struct RunningProgram {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    pub(super) pid: u32,
    pub(super) view: GpuView,
}

impl Program {
    /// Starts the program and waits until it has a context.
    ///
    /// # Errors
    /// Returns [`ProgramError`] if the program does not start, fails or prints no view of the GPU.
    pub(super) async fn start(&self, start: &ProgramRunOptions) -> Result<RunningProgram, ProgramError> {
        let broken = |what: &str| ProgramError::Broken(what.to_owned());
        let (program, arguments) = self.words.split_first().ok_or_else(|| broken("is not named"))?;
        let mut command = Command::new(program);
        command.args(arguments);
        if start.waits {
            command.arg("--read-line");
        }
        if let Some(mib) = start.allocate_mib {
            command.args(["--allocate", &mib.to_string()]);
        }
        command
            .env("CUDA_MPS_PIPE_DIRECTORY", &start.pipe)
            .env("CUDA_VISIBLE_DEVICES", &self.device)
            .env_remove("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
            .env_remove("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
            .envs(&start.environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        if let Some(path) = &self.library_path {
            command.env("LD_LIBRARY_PATH", path);
        }
        if let Some(uid) = start.uid {
            command.uid(uid).gid(uid);
        }
        let mut child = command.spawn().map_err(|error| broken(&format!("does not start: {error}")))?;
        let (Some(output), Some(pid)) = (child.stdout.take(), child.id()) else { return Err(broken("has no output")) };
        let mut running = RunningProgram {
            input: child.stdin.take(),
            lines: BufReader::new(output).lines(),
            child,
            pid,
            view: GpuView { sms: 0, free_mib: 0 },
        };
        let line = running.read_line().await?;
        let (Some(sms), Some(free_mib)) = (line.sms, line.free_mib) else {
            return Err(broken("does not print `sms` and `freeMiB`"));
        };
        running.view = GpuView { sms, free_mib };
        Ok(running)
    }

    /// Runs the program until it exits. Returns its view of the GPU.
    ///
    /// # Errors
    /// Returns the errors of [`start`](Self::start).
    pub(super) async fn run_and_view(&self, start: &ProgramRunOptions) -> Result<GpuView, ProgramError> {
        let running = self.start(start).await?;
        let view = running.view;
        running.finish().await;
        Ok(view)
    }

    /// Runs the program with an allocation. Returns the result of the allocation.
    ///
    /// # Errors
    /// Returns the errors of [`start`](Self::start). A refused allocation is a result, not an
    /// error.
    pub(super) async fn allocate(&self, pipe: &Path, mib: u64) -> Result<AllocationResult, ProgramError> {
        let start =
            ProgramRunOptions { pipe: pipe.to_owned(), allocate_mib: Some(mib), ..ProgramRunOptions::default() };
        let mut running = self.start(&start).await?;
        let allocated = running.read_allocation_result().await?;
        running.finish().await;
        Ok(allocated)
    }
}

impl RunningProgram {
    /// Reads the program's next line within [`OUTPUT_LINE_DEADLINE`].
    async fn read_line(&mut self) -> Result<OutputLine, ProgramError> {
        let broken = |what: String| Err(ProgramError::Broken(what));
        match timeout(OUTPUT_LINE_DEADLINE, self.lines.next_line()).await {
            Err(_) => Err(ProgramError::Timeout),
            Ok(Err(error)) => broken(format!("prints unreadable output: {error}")),
            Ok(Ok(None)) => broken("exits without output".to_owned()),
            Ok(Ok(Some(line))) => match serde_json::from_str::<OutputLine>(&line) {
                Ok(OutputLine { error: Some(code), .. }) => Err(ProgramError::Cuda(code)),
                Ok(line) => Ok(line),
                Err(_) => broken(format!("prints {:?}", shorten(&line))),
            },
        }
    }

    /// Reads the line that the program prints after the allocation. A refused allocation is a
    /// result, not an error.
    async fn read_allocation_result(&mut self) -> Result<AllocationResult, ProgramError> {
        match self.read_line().await {
            Ok(_) => Ok(Ok(())),
            Err(ProgramError::Cuda(code)) => Ok(Err(code)),
            Err(error) => Err(error),
        }
    }

    /// Sends a line to a waiting program, which then allocates. Returns the result of the
    /// allocation.
    pub(super) async fn resume(&mut self) -> Result<AllocationResult, ProgramError> {
        if let Some(mut input) = self.input.take() {
            // Ignore errors: if the program has exited, reading its output fails.
            let _ = input.write_all(b"\n").await;
        }
        self.read_allocation_result().await
    }

    /// Makes the program exit, and waits for its exit.
    pub(super) async fn finish(mut self) {
        drop(self.input.take());
        if timeout(PROGRAM_EXIT_DEADLINE, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}
