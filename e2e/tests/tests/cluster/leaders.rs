//! Kills leading operators while a test runs.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use cleave_e2e::{Cluster, SYSTEM_NAMESPACE, text};

use crate::restarts::component_pod;

/// Kills the leading operator at regular intervals, on a separate thread. After each kill, the
/// other replica takes over.
pub(crate) struct LeaderKiller {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<u32>>,
}

impl LeaderKiller {
    pub(crate) fn start(interval: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Self { stop, thread: std::thread::spawn(move || Self::run(interval, &stopped)) }
    }

    /// Kills leaders until `stopped` is true. Returns the number of killed leaders.
    fn run(interval: Duration, stopped: &AtomicBool) -> Result<u32> {
        let cluster = Cluster::connect()?;
        let mut kills = 0;
        let mut last_kill = Instant::now();
        while !stopped.load(Ordering::Relaxed) {
            if last_kill.elapsed() >= interval
                // While the other replica does not lead yet, no leader exists.
                && let Ok(leader) = component_pod(&cluster, "operator")
            {
                last_kill = Instant::now();
                let name = text(&leader["metadata"]["name"]);
                cluster.delete(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{name}"), Some(0))?;
                kills += 1;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(kills)
    }

    /// Stops the thread, and returns the number of killed leaders.
    pub(crate) fn stop(self) -> Result<u32> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow::anyhow!("the thread that kills leaders panicked"))?
    }
}
