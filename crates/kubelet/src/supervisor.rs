//! Shows the relay that a supervisor of the agent runs.
//!
//! A supervisor restarts a killed agent without the kubelet. Without a supervisor, only the kubelet
//! can start the next agent, and it starts none while it waits for the relay's answer. The relay
//! therefore waits longer for an absent agent while a supervisor runs.
//!
//! Each supervisor holds a shared lock of one file in the relay's directory. The kernel releases
//! the lock when the supervisor ends in any way. During an upgrade, the supervisors of two agents
//! hold the lock.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Name of the file that supervisors lock.
const LOCK_NAME: &str = "supervisor";
/// Number of attempts to lock the file, and the delay between two attempts. An attempt fails if it
/// coincides with a check by the relay, which holds the lock only for an instant.
const LOCK_ATTEMPTS: (u32, Duration) = (20, Duration::from_millis(10));

/// Shows the relay that this process supervises an agent, until this value is dropped or the
/// process ends.
#[derive(Debug)]
pub struct SupervisorLock {
    _file: File,
}

impl SupervisorLock {
    /// Acquires the lock in the relay's directory. Creates the directory if the relay has not
    /// created it yet. Blocks for at most a fraction of a second.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created or locked.
    pub fn acquire(directory: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let file = File::options().create(true).append(true).mode(0o600).open(directory.join(LOCK_NAME))?;
        let (mut attempts, delay) = LOCK_ATTEMPTS;
        loop {
            attempts -= 1;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
                Err(Errno::WOULDBLOCK) if attempts > 0 => std::thread::sleep(delay),
                locked => return Ok(locked.map(|()| Self { _file: file })?),
            }
        }
    }
}

/// Returns whether a supervisor of an agent runs that uses this directory. Returns false if the
/// check fails.
pub(crate) fn supervisor_runs(directory: &Path) -> bool {
    let lock = |file: File| rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive);
    File::open(directory.join(LOCK_NAME)).is_ok_and(|file| lock(file) == Err(Errno::WOULDBLOCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_runs_while_any_lock_is_held() {
        let parent = tempfile::tempdir().expect("a directory");
        let directory = parent.path().join("relay");
        assert!(!supervisor_runs(&directory), "the directory does not exist");
        let first = SupervisorLock::acquire(&directory).expect("a lock");
        let second = SupervisorLock::acquire(&directory).expect("a second lock");
        assert!(supervisor_runs(&directory));
        drop(first);
        assert!(supervisor_runs(&directory));
        drop(second);
        assert!(!supervisor_runs(&directory));
        let check = File::open(directory.join(LOCK_NAME)).expect("a file");
        rustix::fs::flock(&check, FlockOperation::NonBlockingLockExclusive).expect("a lock");
        let error = SupervisorLock::acquire(&directory).expect_err("a check that never ends");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "a supervisor must not wait forever");
        drop(check);
        let _lock = SupervisorLock::acquire(&directory).expect("a lock after the check");
    }
}
