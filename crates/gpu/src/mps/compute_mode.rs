//! The compute mode of a GPU, set and put back by a process of its own: NVML would stay in this one's memory.
//!
//! What it was before is kept in a file beside the pipe directory, so that the next MPS host knows it where this one had no time.
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::host::{Host, replace};
use super::process::Exit;

/// Compute modes as the process names them: what it is asked for, and what it prints.
pub(crate) const MODES: [&str; 3] = ["default", "exclusive-process", "prohibited"];
/// How long the process may take.
const NVML: Duration = Duration::from_secs(20);
/// And print.
const LONGEST_OUTPUT: u64 = 64 * 1024;

fn file(host: &Host, device: &str) -> PathBuf {
    host.paths.mps().join(format!("{device}.compute-mode"))
}

/// Lets only one process use a device, which will be the MPS server, and remembers what was before.
pub(crate) async fn set(host: &Host, device: &str) -> Result<(), String> {
    let file = file(host, device);
    // What was there before an earlier host came counts, where that one had no time to put it back.
    let known = file.exists();
    let remember = |former: &str| {
        replace(&file, former.as_bytes()).map_err(|error| format!("cannot write {}: {error}", file.display()))
    };
    if !known {
        // Before it is changed, for a host that dies in between: the default is what it nearly always was.
        remember("default")?;
    }
    match run(host, device, "exclusive-process").await {
        Ok(_) if known => Ok(()),
        Ok(former) => remember(&former),
        Err(error) => {
            if !known {
                let _ = std::fs::remove_file(&file);
            }
            Err(error)
        }
    }
}

/// Puts a device's compute mode back to what it was, where this or an earlier host changed it.
pub(crate) async fn restore(host: &Host, device: &str) -> Result<(), String> {
    let file = file(host, device);
    let former = match std::fs::read_to_string(&file) {
        Ok(former) => former,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(format!("cannot read {}: {error}", file.display())),
    };
    run(host, device, former.trim()).await?;
    std::fs::remove_file(&file).map_err(|error| format!("cannot remove {}: {error}", file.display()))
}

/// Devices whose compute mode an earlier host changed and did not put back.
pub(crate) fn changed(mps: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(mps) else { return Vec::new() };
    let name = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_suffix(".compute-mode").map(str::to_owned);
    entries.filter_map(|entry| name(entry.ok()?)).collect()
}

async fn run(host: &Host, device: &str, mode: &str) -> Result<String, String> {
    let Some((program, arguments)) = host.options.compute_mode.split_first() else {
        return Err("no program for it".to_owned());
    };
    let mut command = Command::new(program);
    command.args(arguments).args(["--device", device, "--mode", mode]);
    let (child, output) = host.children.spawn(&mut command, &[]).map_err(|error| error.to_string())?;
    let mut text = Vec::new();
    let mut output = output.take(LONGEST_OUTPUT);
    let ended = timeout(NVML, async {
        output.read_to_end(&mut text).await?;
        io::Result::Ok(child.exited().await)
    })
    .await;
    child.kill();
    let text = String::from_utf8_lossy(&text);
    match ended {
        // Beside what it logs.
        Ok(Ok(Exit::Status(0))) => {
            let former = text.lines().map(str::trim).find(|line| MODES.contains(line));
            former.map(str::to_owned).ok_or_else(|| format!("NVML's answer is unknown: {}", text.trim()))
        }
        Ok(Ok(exit)) => Err(format!("{} ({exit})", text.trim())),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("NVML did not answer within {}s", NVML.as_secs())),
    }
}
