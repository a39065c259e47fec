//! The CUDA program that shows what the driver does: somebody else's, run as a process.
//!
//! It prints a line of JSON when it has a context, `{"sms": 26, "freeMiB": 8069}`, or `{"error": 2}` with the driver API's code, and ends.
//! With `--allocate MIB` it allocates that much after its line and prints a line more, an error again or anything else. With `--read-line`
//! it waits for a line on its standard input, or the end of that, before it does.
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use super::judge::{Allocated, Sight};

/// A context takes a tenth of a second, and much longer where the driver initialises the GPU first.
const LINE: Duration = Duration::from_secs(30);
/// A program that has said all ends.
const END: Duration = Duration::from_secs(10);

/// How programs are started.
#[derive(Debug, Clone)]
pub(super) struct Program {
    /// The program and its first arguments.
    pub(super) words: Vec<OsString>,
    pub(super) library_path: Option<OsString>,
    pub(super) device: String,
}

/// Where a program finds MPS, and what it asks of it.
#[derive(Debug, Clone, Default)]
pub(super) struct Start {
    pub(super) pipe: PathBuf,
    pub(super) environment: BTreeMap<&'static str, String>,
    /// Another user than this process's.
    pub(super) uid: Option<u32>,
    /// Wait for a line first.
    pub(super) waits: bool,
    pub(super) allocate_mib: Option<u64>,
}

/// Why a program said nothing that could be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Trouble {
    /// It cannot be run: nothing is known of the driver.
    #[error("the CUDA program {0}")]
    Program(String),
    /// CUDA refused it.
    #[error("the program gets error {0}")]
    Cuda(i64),
    /// It waits for CUDA.
    #[error("the program has said nothing for {} s", LINE.as_secs())]
    Silent,
}

/// A line of the program.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    error: Option<i64>,
    sms: Option<u32>,
    #[serde(rename = "freeMiB")]
    free_mib: Option<u64>,
}

/// A program with a context.
pub(super) struct Running {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    pub(super) pid: u32,
    pub(super) sight: Sight,
}

impl Program {
    /// Starts it, and returns when it has a context.
    pub(super) async fn start(&self, start: &Start) -> Result<Running, Trouble> {
        let cannot = |what: &str| Trouble::Program(what.to_owned());
        let (program, arguments) = self.words.split_first().ok_or_else(|| cannot("is not named"))?;
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
        let mut child = command.spawn().map_err(|error| cannot(&format!("cannot be started: {error}")))?;
        let (Some(output), Some(pid)) = (child.stdout.take(), child.id()) else { return Err(cannot("has no output")) };
        let mut running = Running {
            input: child.stdin.take(),
            lines: BufReader::new(output).lines(),
            child,
            pid,
            sight: Sight { sms: 0, free_mib: 0 },
        };
        let line = running.line().await?;
        let (Some(sms), Some(free_mib)) = (line.sms, line.free_mib) else {
            return Err(cannot("does not say `sms` and `freeMiB`"));
        };
        running.sight = Sight { sms, free_mib };
        Ok(running)
    }

    /// What it sees; it has ended by then.
    pub(super) async fn sight(&self, start: &Start) -> Result<Sight, Trouble> {
        let running = self.start(start).await?;
        let sight = running.sight;
        running.end().await;
        Ok(sight)
    }

    /// What allocating so much comes to.
    pub(super) async fn allocate(&self, pipe: &Path, mib: u64) -> Result<Allocated, Trouble> {
        let start = Start { pipe: pipe.to_owned(), allocate_mib: Some(mib), ..Start::default() };
        let mut running = self.start(&start).await?;
        let allocated = running.allocated().await?;
        running.end().await;
        Ok(allocated)
    }
}

impl Running {
    async fn line(&mut self) -> Result<Line, Trouble> {
        let cannot = |what: String| Err(Trouble::Program(what));
        match timeout(LINE, self.lines.next_line()).await {
            Err(_) => Err(Trouble::Silent),
            Ok(Err(error)) => cannot(format!("says nothing that can be read: {error}")),
            Ok(Ok(None)) => cannot("ends without a word".to_owned()),
            Ok(Ok(Some(line))) => match serde_json::from_str::<Line>(&line) {
                Ok(Line { error: Some(code), .. }) => Err(Trouble::Cuda(code)),
                Ok(line) => Ok(line),
                Err(_) => cannot(format!("says {:?}", crate::mps::beginning(&line))),
            },
        }
    }

    /// What its allocation came to.
    async fn allocated(&mut self) -> Result<Allocated, Trouble> {
        match self.line().await {
            Ok(_) => Ok(Ok(())),
            Err(Trouble::Cuda(code)) => Ok(Err(code)),
            Err(trouble) => Err(trouble),
        }
    }

    /// Lets it allocate what it was told to, after it has waited.
    pub(super) async fn go_on(&mut self) -> Result<Allocated, Trouble> {
        if let Some(mut input) = self.input.take() {
            // One that has ended says so by its lines.
            let _ = input.write_all(b"\n").await;
        }
        self.allocated().await
    }

    /// Lets it end, and waits for that.
    pub(super) async fn end(mut self) {
        drop(self.input.take());
        if timeout(END, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}
