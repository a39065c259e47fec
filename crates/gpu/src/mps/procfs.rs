//! Finds MPS processes in `/proc` and reads their state. Kills processes of an earlier MPS host.
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::process::PidFd;

/// Time limit of a search through all processes. 10,000 processes take 0.1 s.
const PROCESS_SEARCH_DEADLINE: Duration = Duration::from_secs(5);
/// Stack size of the search thread, in bytes.
const SEARCH_THREAD_STACK_BYTES: usize = 128 * 1024;
/// Time limit for a killed process to exit.
const KILLED_PROCESSES_EXIT_DEADLINE: Duration = Duration::from_secs(5);
/// Maximum number of reads of an empty environment.
const MAX_EMPTY_ENVIRONMENT_READS: u32 = 20;
const EMPTY_ENVIRONMENT_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Finds the MPS daemons and servers whose pipe directory is `pipe`. This MPS host or an earlier
/// one started them.
pub(crate) async fn find_processes_of_pipe(pipe: &Path) -> Vec<(u32, PidFd)> {
    let of = pipe.to_owned();
    run_on_own_thread(move || find_processes(&of)).await.unwrap_or_default()
}

/// Finds all MPS daemons and servers that may serve a GPU. Returns `None` if the search failed.
pub(crate) async fn find_processes_of_gpu(uuid: &str) -> Option<Vec<u32>> {
    let uuid = uuid.to_owned();
    run_on_own_thread(move || {
        all_pids().filter(|&pid| is_mps_process(pid) && may_process_serve_device(pid, &uuid)).collect()
    })
    .await
}

/// Runs a search on a new thread. Reading the environment of a process that hangs in the driver
/// also hangs, and must not block other devices. The search abandons a thread that hangs.
async fn run_on_own_thread<T: Send + 'static>(search: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (found, answer) = oneshot::channel();
    let search = move || {
        // Ignore errors: the search may have timed out.
        let _ = found.send(search());
    };
    let started = std::thread::Builder::new().stack_size(SEARCH_THREAD_STACK_BYTES).spawn(search);
    match (started, timeout(PROCESS_SEARCH_DEADLINE, answer).await) {
        (Ok(_), Ok(Ok(found))) => return Some(found),
        (Err(error), _) => tracing::error!(%error, "failed to start the search for MPS processes"),
        _ => tracing::error!(deadline = ?PROCESS_SEARCH_DEADLINE, "search for MPS processes timed out"),
    }
    None
}

/// Returns the PIDs of all visible processes.
fn all_pids() -> impl Iterator<Item = u32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten();
    processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Returns the content of a process's file, or nothing if the file cannot be read.
fn read_proc(pid: u32, what: &str) -> Vec<u8> {
    std::fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default()
}

fn is_mps_process(pid: u32) -> bool {
    read_proc(pid, "comm").starts_with(b"nvidia-cuda-mps")
}

/// Returns whether an MPS process may serve a device.
fn may_process_serve_device(pid: u32, uuid: &str) -> bool {
    // A process briefly has no environment while it starts, and none once it has exited.
    for _ in 0..MAX_EMPTY_ENVIRONMENT_READS {
        let environment = read_proc(pid, "environ");
        if !environment.is_empty() {
            return may_environment_serve_gpu(&environment, uuid);
        }
        if process_state(pid).is_none_or(|state| matches!(state, 'Z' | 'X')) {
            return false;
        }
        std::thread::sleep(EMPTY_ENVIRONMENT_RETRY_INTERVAL);
    }
    true
}

/// Returns whether a daemon with this environment may serve a GPU. Returns false if the environment
/// names only other devices, by UUID. An index may mean any GPU.
fn may_environment_serve_gpu(environment: &[u8], uuid: &str) -> bool {
    let name = b"CUDA_VISIBLE_DEVICES=".as_slice();
    let list = environment.split(|&byte| byte == 0).find_map(|variable| variable.strip_prefix(name));
    let is_other = |entry: &[u8]| {
        (entry.starts_with(b"GPU-") && !uuid.as_bytes().starts_with(entry)) || entry.starts_with(b"MIG-")
    };
    list.is_none_or(|list| !list.split(|&byte| byte == b',').all(is_other))
}

/// Returns the MPS processes that use a pipe directory, with open pidfds.
fn find_processes(pipe: &Path) -> Vec<(u32, PidFd)> {
    all_pids()
        .filter(|&pid| is_process_of_pipe(pid, pipe))
        // Check again with the pidfd open: the PID may have been reused after the first check.
        .filter_map(|pid| Some((pid, PidFd::open(pid).ok()??)))
        .filter(|&(pid, _)| is_process_of_pipe(pid, pipe))
        .collect()
}

fn is_process_of_pipe(pid: u32, pipe: &Path) -> bool {
    if !is_mps_process(pid) {
        return false;
    }
    let wanted = [b"CUDA_MPS_PIPE_DIRECTORY=", pipe.as_os_str().as_encoded_bytes()].concat();
    read_proc(pid, "environ").split(|&byte| byte == 0).any(|variable| variable == wanted)
}

/// Kills the MPS processes of a pipe directory. Returns their number.
pub(crate) async fn kill_processes_of_pipe(pipe: &Path) -> usize {
    let left = find_processes_of_pipe(pipe).await;
    for (pid, hold) in &left {
        tracing::warn!(pid, pipe = %pipe.display(), "killing leftover MPS process");
        hold.signal(Signal::KILL);
    }
    for (pid, hold) in &left {
        if !hold.wait_for_exit(KILLED_PROCESSES_EXIT_DEADLINE).await {
            tracing::error!(pid, "leftover MPS process still runs after SIGKILL");
        }
    }
    left.len()
}

/// Returns whether a process is stopped by a signal or a debugger. Such a process does not answer.
pub(crate) fn is_process_stopped(pid: u32) -> bool {
    matches!(process_state(pid), Some('T' | 't'))
}

/// Returns a process's state from `/proc/PID/stat`, or `None` if the process no longer exists.
fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses, which may contain anything.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Returns the user id of a process.
pub(crate) fn owner_uid(pid: u32) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(format!("/proc/{pid}")).ok().map(|metadata| metadata.uid())
}

#[cfg(test)]
mod tests {
    use super::{may_environment_serve_gpu, may_process_serve_device, process_state};

    #[test]
    fn a_daemon_that_names_only_other_gpus_does_not_serve_this_one() {
        let serves = |list: &str| {
            may_environment_serve_gpu(format!("A=1\0CUDA_VISIBLE_DEVICES={list}\0B=2").as_bytes(), "GPU-12-34")
        };
        for list in ["GPU-12-34", "GPU-12", "0", "", "GPU-56,GPU-12-34", "GPU-56,1"] {
            assert!(serves(list), "{list}");
        }
        for list in ["GPU-56", "GPU-56,GPU-78", "MIG-12-34"] {
            assert!(!serves(list), "{list}");
        }
        assert!(may_environment_serve_gpu(b"A=1\0", "GPU-12-34"), "without the variable it sees every GPU");
    }

    #[test]
    fn an_exited_daemon_serves_no_gpu() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        while process_state(child.id()) != Some('Z') {
            std::thread::yield_now();
        }
        assert!(!may_process_serve_device(child.id(), "GPU-1"), "an exited process has no environment");
        child.wait().unwrap();
    }
}
