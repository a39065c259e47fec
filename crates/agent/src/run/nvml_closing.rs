//! Decides how to close NVML for a quiesce if a call to NVML hangs.
//!
//! A call that hangs keeps its NVML session open, and with the session the device files of all
//! GPUs. Only the end of this program closes the files. The agent therefore restarts itself: it
//! starts from the checkpoint and with NVML closed, as after an upgrade. However, a thread that
//! hangs in the kernel cannot end, and a restart would wait for the thread forever. If such a
//! thread exists, only a reboot of the node closes the files.
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time after which the agent restarts itself if calls in progress have not returned. The
/// initialization of a GPU takes seconds.
const CALLS_RETURN_TIMEOUT: Duration = Duration::from_secs(10);

/// The next step of a quiesce that needs NVML closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClosingStep {
    /// Do nothing: NVML is closed, does not have to be closed, or calls in progress may still
    /// return.
    Wait,
    /// Restart the agent: a call hangs, and all threads can be ended.
    Restart,
    /// Even a restart of the agent does not help: a call hangs, and a thread cannot be ended.
    Stuck,
}

/// Tracks for how long NVML has been open although it must be closed.
#[derive(Debug, Default)]
pub(super) struct NvmlClosing {
    since: Option<Instant>,
}

impl NvmlClosing {
    /// Decides the next step. `must_close` states whether NVML must be closed but is still open.
    /// `can_end_threads` returns whether all threads of this process can be ended.
    pub(super) fn next_step(
        &mut self,
        must_close: bool,
        can_end_threads: impl FnOnce() -> bool,
        now: Instant,
    ) -> ClosingStep {
        if !must_close {
            self.since = None;
            return ClosingStep::Wait;
        }
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) < CALLS_RETURN_TIMEOUT {
            ClosingStep::Wait
        } else if can_end_threads() {
            ClosingStep::Restart
        } else {
            ClosingStep::Stuck
        }
    }
}

/// Returns whether a signal can end each thread in this directory of `/proc`. Returns false if the
/// state of a thread cannot be read.
pub(super) fn can_end_threads(tasks: &Path) -> bool {
    let all = || -> io::Result<bool> {
        for task in fs::read_dir(tasks)? {
            let path = task?.path().join("stat");
            match fs::read_to_string(&path) {
                // `D` is an uninterruptible sleep. Search from the end, because the name in
                // parentheses may contain any characters.
                Ok(stat) if stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('D')) => return Ok(false),
                Ok(_) => {}
                // The thread has ended.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    };
    all().unwrap_or_else(|error| {
        tracing::warn!(%error, tasks = %tasks.display(), "failed to read the state of the agent's threads");
        false
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_restarts_only_if_calls_hang_and_their_threads_can_end() {
        let begin = Instant::now();
        let late = begin + CALLS_RETURN_TIMEOUT;
        let mut closing = NvmlClosing::default();
        assert_eq!(closing.next_step(true, || true, begin), ClosingStep::Wait);
        assert_eq!(closing.next_step(true, || false, late), ClosingStep::Stuck);
        assert_eq!(closing.next_step(true, || true, late), ClosingStep::Restart);
        assert_eq!(closing.next_step(false, || true, late), ClosingStep::Wait);
        assert_eq!(closing.next_step(true, || true, late), ClosingStep::Wait, "calls have time to return again");
    }

    #[test]
    fn a_thread_in_an_uninterruptible_sleep_or_in_an_unknown_state_cannot_be_ended() {
        let tasks = tempfile::tempdir().unwrap();
        let set = |task: &str, stat: &str| {
            fs::create_dir_all(tasks.path().join(task)).unwrap();
            fs::write(tasks.path().join(task).join("stat"), stat).unwrap();
        };
        set("1", "1 (cleave) S 0");
        set("2", "2 (D) ) R 0");
        assert!(can_end_threads(tasks.path()));
        set("3", "3 (nvml-gpu-0) D 0");
        assert!(!can_end_threads(tasks.path()));
        set("3", "");
        assert!(!can_end_threads(tasks.path()));
        assert!(!can_end_threads(&tasks.path().join("none")));
        assert!(can_end_threads(Path::new("/proc/self/task")));
    }
}
