//! Sets and restores a GPU's compute mode in a child process, which keeps NVML out of the MPS
//! host's memory.
//!
//! A file beside the pipe directory records the previous mode. If this MPS host cannot restore the
//! mode, the next MPS host restores it.
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::ValueEnum;
use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::context::HostContext;
use super::error::ComputeModeError;
use super::files::replace_file;
use super::process::ChildExit;
use super::text::shorten;
use crate::nvml;

/// Time limit of the child process that sets a compute mode.
const CHILD_PROCESS_DEADLINE: Duration = Duration::from_secs(20);
/// Maximum number of bytes read from the child process's output.
const MAX_CHILD_OUTPUT_BYTES: u64 = 64 * 1024;
const COMPUTE_MODE_RECORD_EXTENSION: &str = ".compute-mode";

/// A compute mode, as the child process receives and prints it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SettableComputeMode {
    Default,
    ExclusiveProcess,
    Prohibited,
}

impl SettableComputeMode {
    fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::ExclusiveProcess => "exclusive-process",
            Self::Prohibited => "prohibited",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Default, Self::ExclusiveProcess, Self::Prohibited].into_iter().find(|mode| mode.name() == text.trim())
    }
}

impl fmt::Display for SettableComputeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<SettableComputeMode> for nvml::ComputeMode {
    fn from(mode: SettableComputeMode) -> Self {
        match mode {
            SettableComputeMode::Default => Self::Default,
            SettableComputeMode::ExclusiveProcess => Self::ExclusiveProcess,
            SettableComputeMode::Prohibited => Self::Prohibited,
        }
    }
}

impl From<nvml::ComputeMode> for SettableComputeMode {
    fn from(mode: nvml::ComputeMode) -> Self {
        match mode {
            nvml::ComputeMode::Default => Self::Default,
            nvml::ComputeMode::ExclusiveProcess => Self::ExclusiveProcess,
            nvml::ComputeMode::Prohibited => Self::Prohibited,
        }
    }
}

/// The file that records a device's compute mode before the change.
struct ComputeModeRecord(PathBuf);

impl ComputeModeRecord {
    fn for_device(context: &HostContext, device: &str) -> Self {
        Self(context.paths.mps_host_dir().join(format!("{device}{COMPUTE_MODE_RECORD_EXTENSION}")))
    }

    /// Returns a function that adds the action and the record's path to an I/O error.
    fn record_file_error(&self, action: &'static str) -> impl Fn(io::Error) -> ComputeModeError {
        move |source| ComputeModeError::Record { action, path: self.0.clone(), source }
    }

    fn exists(&self) -> bool {
        self.0.exists()
    }

    fn read(&self) -> Result<Option<SettableComputeMode>, ComputeModeError> {
        match std::fs::read_to_string(&self.0) {
            Ok(content) => match SettableComputeMode::parse(&content) {
                Some(mode) => Ok(Some(mode)),
                None => Err(ComputeModeError::UnknownRecord { path: self.0.clone(), content: shorten(content.trim()) }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.record_file_error("read")(error)),
        }
    }

    fn write(&self, mode: SettableComputeMode) -> Result<(), ComputeModeError> {
        replace_file(&self.0, mode.name().as_bytes()).map_err(self.record_file_error("write"))
    }

    fn remove(&self) -> Result<(), ComputeModeError> {
        std::fs::remove_file(&self.0).map_err(self.record_file_error("remove"))
    }
}

/// Sets a device to `EXCLUSIVE_PROCESS` and records the previous mode. Afterwards, only the MPS
/// server can use the device.
///
/// # Errors
/// Returns [`ComputeModeError`] if the mode cannot be set or recorded.
pub(crate) async fn set_exclusive_compute_mode(context: &HostContext, device: &str) -> Result<(), ComputeModeError> {
    let record = ComputeModeRecord::for_device(context, device);
    // A record of an earlier MPS host contains the mode to restore.
    let recorded = record.exists();
    if !recorded {
        // Record the default mode first: this process may exit before the child reports the
        // previous mode, which is nearly always the default.
        record.write(SettableComputeMode::Default)?;
    }
    match set_compute_mode_in_child(context, device, SettableComputeMode::ExclusiveProcess).await {
        Ok(_) if recorded => Ok(()),
        Ok(previous) => record.write(previous),
        Err(error) => {
            if !recorded {
                let _ = record.remove();
            }
            Err(error)
        }
    }
}

/// Restores the compute mode that this or an earlier MPS host changed.
///
/// # Errors
/// Returns [`ComputeModeError`] if the record cannot be read or removed, or the mode cannot be set.
pub(crate) async fn restore_compute_mode(context: &HostContext, device: &str) -> Result<(), ComputeModeError> {
    let record = ComputeModeRecord::for_device(context, device);
    let Some(previous) = record.read()? else { return Ok(()) };
    set_compute_mode_in_child(context, device, previous).await?;
    record.remove()
}

/// Returns the devices with a recorded compute mode to restore.
pub(crate) fn devices_with_record(mps: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(mps) else { return Vec::new() };
    let name = |entry: std::fs::DirEntry| {
        entry.file_name().to_str()?.strip_suffix(COMPUTE_MODE_RECORD_EXTENSION).map(str::to_owned)
    };
    entries.filter_map(|entry| name(entry.ok()?)).collect()
}

/// Sets a compute mode in a child process. Returns the previous mode.
async fn set_compute_mode_in_child(
    context: &HostContext,
    device: &str,
    mode: SettableComputeMode,
) -> Result<SettableComputeMode, ComputeModeError> {
    let mut words = context.options.compute_mode.iter();
    let mut command = Command::new(words.next().cloned().unwrap_or_default());
    command.args(words).args(["--device", device, "--mode", mode.name()]);
    let (child, output) = context.children.spawn(&mut command, &[]).map_err(ComputeModeError::Spawn)?;
    let mut text = Vec::new();
    let mut output = output.take(MAX_CHILD_OUTPUT_BYTES);
    let exited = timeout(CHILD_PROCESS_DEADLINE, async {
        output.read_to_end(&mut text).await?;
        io::Result::Ok(child.wait_for_exit().await)
    })
    .await;
    child.kill();
    let text = String::from_utf8_lossy(&text);
    match exited {
        // The output also contains log lines.
        Ok(Ok(ChildExit::Status(0))) => {
            let previous = text.lines().find_map(SettableComputeMode::parse);
            previous.ok_or_else(|| ComputeModeError::UnknownOutput(shorten(text.trim())))
        }
        Ok(Ok(exit)) => Err(ComputeModeError::Failed { output: shorten(text.trim()), exit }),
        Ok(Err(error)) => Err(ComputeModeError::Output(error)),
        Err(_) => Err(ComputeModeError::Timeout { after: CHILD_PROCESS_DEADLINE }),
    }
}
