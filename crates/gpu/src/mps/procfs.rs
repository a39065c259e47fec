//! Finds MPS processes in `/proc` and reads their state. Kills leftover MPS processes.
//!
//! A file that cannot be read is an error and never means that there is no process. Two cases are
//! no errors, because they must not prevent the start or stop of other devices' daemons: a process
//! that hangs in the driver, whose environment hangs too, and a process of another owner, whose
//! environment may not be read.
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Signal;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::process::PidFd;

/// Time limit of a search through all processes.
const PROCESS_SEARCH_DEADLINE: Duration = Duration::from_secs(5);
/// Stack size of the search thread, in bytes.
const SEARCH_THREAD_STACK_BYTES: usize = 128 * 1024;
/// Time limit for a killed process to exit.
const KILLED_PROCESSES_EXIT_DEADLINE: Duration = Duration::from_secs(5);
/// Time limit for reading the environments of all MPS processes. Below [`PROCESS_SEARCH_DEADLINE`].
const ENVIRONMENT_READ_DEADLINE: Duration = Duration::from_secs(2);
/// Maximum number of reads of an empty environment.
const MAX_EMPTY_ENVIRONMENT_READS: u32 = 20;
const EMPTY_ENVIRONMENT_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Directory of the kernel's files about processes.
const PROC: &str = "/proc";

/// Why a search for MPS processes has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProcessSearchError {
    #[error("failed to read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("failed to open a pidfd of process {pid}: {source}")]
    PidFd { pid: u32, source: io::Error },
    #[error("failed to start a thread: {0}")]
    Thread(io::Error),
    #[error("the search took longer than {} s", .0.as_secs())]
    Timeout(Duration),
}

/// What is known about the environment of a process.
enum EnvironmentState {
    Known(Vec<u8>),
    /// The process exited.
    Gone,
    /// Reading the environment hangs or is not permitted, or the environment is still empty.
    Unknown,
}

/// Whether another read may find the environment of a process.
enum EnvironmentRead {
    Done(EnvironmentState),
    Empty,
}

impl EnvironmentRead {
    /// Interprets the result of one read. A process whose environment this process may not read
    /// belongs to someone else: this MPS host can read the environments of its own daemons.
    fn of_result(result: Result<Option<Vec<u8>>, ProcessSearchError>) -> Result<Self, ProcessSearchError> {
        match result {
            Ok(None) => Ok(Self::Done(EnvironmentState::Gone)),
            Ok(Some(environment)) if environment.is_empty() => Ok(Self::Empty),
            Ok(Some(environment)) => Ok(Self::Done(EnvironmentState::Known(environment))),
            Err(ProcessSearchError::Read { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                Ok(Self::Done(EnvironmentState::Unknown))
            }
            Err(error) => Err(error),
        }
    }
}

/// Finds the MPS daemons and servers whose pipe directory is `pipe`. This MPS host or an earlier
/// one started them. Omits processes that hang, because their environment cannot be read. Includes
/// the process `own` even if it hangs: it is known to use the pipe directory.
///
/// # Errors
/// Returns [`ProcessSearchError`] if it is unknown which processes there are.
pub(crate) async fn find_processes_of_pipe(
    pipe: &Path,
    own: Option<u32>,
) -> Result<Vec<(u32, PidFd)>, ProcessSearchError> {
    let of = pipe.to_owned();
    run_on_own_thread(move || find_processes(Path::new(PROC), &of, own)).await
}

/// Finds all MPS daemons and servers that may serve a GPU.
///
/// # Errors
/// Returns [`ProcessSearchError`] if it is unknown which processes there are.
pub(crate) async fn find_processes_of_gpu(uuid: &str) -> Result<Vec<u32>, ProcessSearchError> {
    let uuid = uuid.to_owned();
    run_on_own_thread(move || {
        let serves = |environment: &EnvironmentState| match environment {
            EnvironmentState::Known(environment) => may_environment_serve_gpu(environment, &uuid),
            EnvironmentState::Gone => false,
            EnvironmentState::Unknown => true,
        };
        let found = mps_processes(Path::new(PROC))?;
        Ok(found.into_iter().filter(|(_, environment)| serves(environment)).map(|(pid, _)| pid).collect())
    })
    .await
}

/// Runs a search on a new thread, because the search reads many files and may wait.
async fn run_on_own_thread<T: Send + 'static>(
    search: impl FnOnce() -> Result<T, ProcessSearchError> + Send + 'static,
) -> Result<T, ProcessSearchError> {
    let (found, answer) = oneshot::channel();
    let search = move || {
        // Ignore errors: the search may have timed out.
        let _ = found.send(search());
    };
    start_thread(search)?;
    let timed_out = || ProcessSearchError::Timeout(PROCESS_SEARCH_DEADLINE);
    timeout(PROCESS_SEARCH_DEADLINE, answer).await.map_err(|_| timed_out())?.unwrap_or_else(|_| Err(timed_out()))
}

fn start_thread(run: impl FnOnce() + Send + 'static) -> Result<(), ProcessSearchError> {
    let thread = std::thread::Builder::new().stack_size(SEARCH_THREAD_STACK_BYTES);
    thread.spawn(run).map(drop).map_err(ProcessSearchError::Thread)
}

/// Returns the PIDs of all visible processes.
fn all_pids(proc: &Path) -> Result<Vec<u32>, ProcessSearchError> {
    let failed = |source| ProcessSearchError::Read { path: proc.to_owned(), source };
    let mut pids = Vec::new();
    for entry in std::fs::read_dir(proc).map_err(failed)? {
        pids.extend(entry.map_err(failed)?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(pids)
}

/// Returns the content of a process's file. Returns `None` if the process no longer exists.
fn read_proc(proc: &Path, pid: u32, what: &str) -> Result<Option<Vec<u8>>, ProcessSearchError> {
    let path = proc.join(pid.to_string()).join(what);
    match std::fs::read(&path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if is_error_of_ended_process(&error) => Ok(None),
        Err(source) => Err(ProcessSearchError::Read { path, source }),
    }
}

/// Returns whether a file in `/proc` cannot be read because its process has ended.
fn is_error_of_ended_process(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// Returns the MPS daemons and servers, each with its environment. Reads each environment on a
/// separate thread, and abandons threads that hang.
fn mps_processes(proc: &Path) -> Result<Vec<(u32, EnvironmentState)>, ProcessSearchError> {
    let mut found = Vec::new();
    let (sender, environments) = mpsc::channel();
    for pid in all_pids(proc)? {
        if !is_mps_process(proc, pid)? {
            continue;
        }
        let (sender, proc) = (sender.clone(), proc.to_owned());
        start_thread(move || {
            // Ignore errors: the search may have ended.
            let _ = sender.send((pid, read_environment(&proc, pid)));
        })?;
        found.push((pid, EnvironmentState::Unknown));
    }
    drop(sender);
    let end = Instant::now() + ENVIRONMENT_READ_DEADLINE;
    while let Ok((pid, environment)) = environments.recv_timeout(end.saturating_duration_since(Instant::now())) {
        if let Some((_, state)) = found.iter_mut().find(|(found, _)| *found == pid) {
            *state = environment?;
        }
    }
    Ok(found)
}

fn is_mps_process(proc: &Path, pid: u32) -> Result<bool, ProcessSearchError> {
    Ok(read_proc(proc, pid, "comm")?.is_some_and(|name| name.starts_with(b"nvidia-cuda-mps")))
}

/// Reads the environment of a process. Hangs if the process hangs in the driver.
fn read_environment(proc: &Path, pid: u32) -> Result<EnvironmentState, ProcessSearchError> {
    // A process briefly has no environment while it starts, and none once it has exited.
    for _ in 0..MAX_EMPTY_ENVIRONMENT_READS {
        if let EnvironmentRead::Done(state) = EnvironmentRead::of_result(read_proc(proc, pid, "environ"))? {
            return Ok(state);
        }
        if process_state(proc, pid)?.is_none_or(|state| matches!(state, 'Z' | 'X')) {
            return Ok(EnvironmentState::Gone);
        }
        std::thread::sleep(EMPTY_ENVIRONMENT_RETRY_INTERVAL);
    }
    Ok(EnvironmentState::Unknown)
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
fn find_processes(proc: &Path, pipe: &Path, own: Option<u32>) -> Result<Vec<(u32, PidFd)>, ProcessSearchError> {
    let wanted = [b"CUDA_MPS_PIPE_DIRECTORY=", pipe.as_os_str().as_encoded_bytes()].concat();
    let is_of_pipe = |pid: u32, environment: &EnvironmentState| match environment {
        EnvironmentState::Known(environment) => environment.split(|&byte| byte == 0).any(|variable| variable == wanted),
        EnvironmentState::Gone => false,
        EnvironmentState::Unknown if own == Some(pid) => true,
        EnvironmentState::Unknown => {
            tracing::warn!(
                pid,
                "failed to read the environment of an MPS process: ignored as the process of another device"
            );
            false
        }
    };
    let mut found = Vec::new();
    for (pid, environment) in mps_processes(proc)?.iter().filter(|(pid, environment)| is_of_pipe(*pid, environment)) {
        let opened = PidFd::open(*pid).map_err(|source| ProcessSearchError::PidFd { pid: *pid, source })?;
        let Some(pidfd) = opened else { continue };
        // Check again with the pidfd open: the PID may have been reused after the first check.
        let is_same = match environment {
            EnvironmentState::Known(environment) => read_proc(proc, *pid, "environ")?.as_ref() == Some(environment),
            EnvironmentState::Gone | EnvironmentState::Unknown => is_mps_process(proc, *pid)?,
        };
        if is_same {
            found.push((*pid, pidfd));
        }
    }
    Ok(found)
}

/// Kills the MPS processes of a pipe directory. Returns their number. `own` has the same meaning as
/// in [`find_processes_of_pipe`].
///
/// # Errors
/// Returns [`ProcessSearchError`] if it is unknown which processes there are.
pub(crate) async fn kill_processes_of_pipe(pipe: &Path, own: Option<u32>) -> Result<usize, ProcessSearchError> {
    let left = find_processes_of_pipe(pipe, own).await?;
    for (pid, hold) in &left {
        tracing::warn!(pid, pipe = %pipe.display(), "killing leftover MPS process");
        hold.signal(Signal::KILL);
    }
    for (pid, hold) in &left {
        if !hold.wait_for_exit(KILLED_PROCESSES_EXIT_DEADLINE).await {
            tracing::error!(pid, "leftover MPS process still runs after SIGKILL");
        }
    }
    Ok(left.len())
}

/// Returns whether a process is stopped by a signal or a debugger. Such a process does not answer.
///
/// # Errors
/// Returns [`ProcessSearchError`] if the process exists and its state cannot be read.
pub(crate) fn is_process_stopped(pid: u32) -> Result<bool, ProcessSearchError> {
    Ok(matches!(process_state(Path::new(PROC), pid)?, Some('T' | 't')))
}

/// Returns a process's state from `/proc/PID/stat`, or `None` if the process no longer exists.
fn process_state(proc: &Path, pid: u32) -> Result<Option<char>, ProcessSearchError> {
    let Some(stat) = read_proc(proc, pid, "stat")? else { return Ok(None) };
    let stat = String::from_utf8_lossy(&stat);
    // The second field is the name in parentheses. The name may contain any character.
    Ok(stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()))
}

/// Returns the UID of a process, or `None` if the process no longer exists.
///
/// # Errors
/// Returns [`ProcessSearchError`] if the process exists and its owner cannot be read.
pub(crate) fn owner_uid(pid: u32) -> Result<Option<u32>, ProcessSearchError> {
    use std::os::unix::fs::MetadataExt;
    let path = Path::new(PROC).join(pid.to_string());
    match std::fs::metadata(&path) {
        Ok(metadata) => Ok(Some(metadata.uid())),
        Err(error) if is_error_of_ended_process(&error) => Ok(None),
        Err(source) => Err(ProcessSearchError::Read { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    /// Returns a `/proc` with one MPS daemon, process 7, that has this environment.
    fn proc_with_daemon(environment: &[u8]) -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("7")).unwrap();
        for (name, content) in
            [("comm", b"nvidia-cuda-mps-control".as_slice()), ("environ", environment), ("stat", b"7 (a) b) S 1")]
        {
            fs::write(proc.path().join("7").join(name), content).unwrap();
        }
        proc
    }

    /// Replaces a file by a directory, which even root cannot read as a file.
    fn make_unreadable(path: &Path) {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error_and_does_not_hide_a_process() {
        let pipe = Path::new("/pipe");
        for what in ["comm", "environ"] {
            let proc = proc_with_daemon(b"CUDA_MPS_PIPE_DIRECTORY=/pipe\0");
            make_unreadable(&proc.path().join("7").join(what));
            assert!(find_processes(proc.path(), pipe, None).is_err(), "{what}");
            assert!(mps_processes(proc.path()).is_err(), "{what}");
        }
        let proc = proc_with_daemon(b"");
        make_unreadable(&proc.path().join("7/stat"));
        assert!(mps_processes(proc.path()).is_err());
        assert!(find_processes(&proc.path().join("none"), pipe, None).is_err());
        // A process that has ended has no files.
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("7")).unwrap();
        assert!(find_processes(proc.path(), pipe, None).unwrap().is_empty());
    }

    #[test]
    fn an_environment_that_may_not_be_read_is_unknown_and_not_an_error() {
        let read = |kind: io::ErrorKind| {
            let path = PathBuf::from("/proc/7/environ");
            EnvironmentRead::of_result(Err(ProcessSearchError::Read { path, source: kind.into() }))
        };
        let denied = read(io::ErrorKind::PermissionDenied).unwrap();
        assert!(matches!(denied, EnvironmentRead::Done(EnvironmentState::Unknown)));
        assert!(read(io::ErrorKind::Other).is_err());
    }

    #[test]
    fn a_process_that_hangs_belongs_to_a_device_only_if_it_is_known_to() {
        // No process writes to the FIFO, so reading it hangs.
        let fifo = |pid: u32| {
            let proc = proc_with_daemon(b"CUDA_MPS_PIPE_DIRECTORY=/other\0");
            let directory = proc.path().join(pid.to_string());
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("comm"), "nvidia-cuda-mps-server").unwrap();
            assert!(Command::new("mkfifo").arg(directory.join("environ")).status().unwrap().success());
            proc
        };
        let own = std::process::id();
        let proc = fifo(own);
        assert!(find_processes(proc.path(), Path::new("/pipe"), None).unwrap().is_empty());
        let found = find_processes(proc.path(), Path::new("/pipe"), Some(own)).unwrap();
        assert_eq!(found.into_iter().map(|(pid, _)| pid).collect::<Vec<_>>(), [own]);
    }

    #[test]
    fn a_daemon_that_names_only_other_gpus_does_not_serve_this_gpu() {
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
    fn an_exited_daemon_has_no_environment() {
        let proc = Path::new(PROC);
        let mut child = Command::new("true").spawn().unwrap();
        while process_state(proc, child.id()).unwrap() != Some('Z') {
            std::thread::yield_now();
        }
        assert!(matches!(read_environment(proc, child.id()).unwrap(), EnvironmentState::Gone));
        child.wait().unwrap();
    }
}
