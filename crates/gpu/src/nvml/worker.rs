//! Runs NVML calls on a separate thread, because a call that hangs in the driver must not block
//! other work.
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::error::NvmlError;
use super::gpus::Gpus;
use super::library::Library;

type Job = Box<dyn FnOnce() + Send>;

/// A handle to a worker thread. The thread stops once the last handle is dropped and the thread's
/// call has returned.
///
/// A call that hangs blocks only this worker, so use one worker per GPU and purpose. Once a call
/// has missed its deadline, further calls with a deadline fail immediately until that call returns.
#[derive(Debug, Clone)]
pub struct Worker {
    library: Library,
    jobs: Sender<Job>,
    progress: Arc<Mutex<QueueState>>,
}

/// The state of the worker's queue.
#[derive(Debug, Default)]
struct QueueState {
    /// Number of calls queued.
    queued: u64,
    /// Number of calls that have returned.
    returned: u64,
    /// The deadline that the current call has missed.
    missed: Option<Duration>,
}

impl Worker {
    /// Starts a thread with this name. The kernel truncates the name to 15 bytes. The first call
    /// loads the library.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub fn start(library: &Library, name: impl Into<String>) -> std::io::Result<Self> {
        let (jobs, queue) = channel();
        // NVML needs a large stack. Keep the default size: untouched pages cost nothing.
        thread::Builder::new().name(name.into()).spawn(move || run_jobs(&queue))?;
        Ok(Self { library: library.clone(), jobs, progress: Arc::default() })
    }

    /// Runs `call` on the thread.
    ///
    /// # Errors
    /// Returns the errors of the call. Returns [`NvmlError::Hung`] after `deadline`, or immediately
    /// if an earlier call has missed its deadline and has not returned.
    pub async fn call<T: Send + 'static>(
        &self,
        deadline: Duration,
        call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError> + Send + 'static,
    ) -> Result<T, NvmlError> {
        let started = Instant::now();
        let number = {
            let mut progress = self.lock_queue_state();
            if let Some(missed) = progress.missed {
                return Err(NvmlError::Hung(missed));
            }
            progress.queued += 1;
            progress.queued
        };
        let (answer, answered) = oneshot::channel();
        let (library, progress) = (self.library.clone(), Arc::clone(&self.progress));
        let job: Job = Box::new(move || {
            let result = library.call_library(call);
            let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
            progress.returned = number;
            progress.missed = None;
            drop(progress);
            // Ignore errors: the caller may have stopped waiting.
            let _ = answer.send(result);
        });
        if self.jobs.send(job).is_err() {
            return Err(NvmlError::Hung(Duration::ZERO));
        }
        match tokio::time::timeout(deadline, answered).await {
            Ok(Ok(result)) => result,
            // `call` panicked.
            Ok(Err(_)) => Err(NvmlError::Hung(started.elapsed())),
            Err(_) => {
                let mut progress = self.lock_queue_state();
                // The call may have returned after the timeout and before this check.
                if progress.returned < number {
                    progress.missed = Some(deadline);
                }
                Err(NvmlError::Hung(deadline))
            }
        }
    }

    /// Runs `call` in a separate session on this thread ([`Library::call_alone`]), without a
    /// deadline.
    ///
    /// # Errors
    /// Returns the errors of the call.
    pub async fn call_alone<T: Send + 'static>(
        &self,
        call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError> + Send + 'static,
    ) -> Result<T, NvmlError> {
        let (answer, answered) = oneshot::channel();
        let library = self.library.clone();
        // Ignore errors: the caller may have stopped waiting.
        let job: Job = Box::new(move || drop(answer.send(library.call_alone(call))));
        if self.jobs.send(job).is_err() {
            return Err(NvmlError::Hung(Duration::ZERO));
        }
        answered.await.unwrap_or(Err(NvmlError::Hung(Duration::ZERO)))
    }

    fn lock_queue_state(&self) -> MutexGuard<'_, QueueState> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the queued calls, one at a time, until the worker is dropped.
fn run_jobs(queue: &Receiver<Job>) {
    while let Ok(job) = queue.recv() {
        job();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::super::model::{DriverInfo, Process};
    use super::*;

    struct LibraryWithoutGpus;

    impl Gpus for LibraryWithoutGpus {
        fn driver_info(&self) -> Result<DriverInfo, NvmlError> {
            Ok(DriverInfo { driver: "1".into(), count: 0 })
        }
        fn processes(&self, _: &str) -> Result<Vec<Process>, NvmlError> {
            Err(NvmlError::NoDriver)
        }
    }

    const LONG_TIMEOUT: Duration = Duration::from_secs(60);

    fn library_without_gpus() -> Library {
        Library::new(|| Ok(Arc::new(LibraryWithoutGpus)))
    }

    #[tokio::test]
    async fn a_hanging_call_fails_at_its_deadline_and_blocks_only_its_own_worker_until_it_returns() {
        let library = library_without_gpus();
        let [worker, other] = ["one", "other"].map(|name| Worker::start(&library, name).unwrap());
        let (release, blocked) = channel::<()>();
        let deadline = Duration::from_millis(1);
        let hanging = worker
            .call(deadline, move |_| {
                let _ = blocked.recv();
                Ok(())
            })
            .await;
        assert!(matches!(hanging, Err(NvmlError::Hung(after)) if after == deadline));
        assert!(matches!(worker.call(LONG_TIMEOUT, |_| Ok(())).await, Err(NvmlError::Hung(_))), "not queued behind it");
        assert_eq!(
            other.call(LONG_TIMEOUT, |gpus| gpus.driver_info()).await.unwrap().driver,
            "1",
            "the session is shared"
        );
        release.send(()).unwrap();
        while worker.call(LONG_TIMEOUT, |_| Ok(())).await.is_err() {
            tokio::task::yield_now().await;
        }
        assert_eq!(worker.call(LONG_TIMEOUT, |gpus| gpus.driver_info()).await.unwrap().driver, "1");
    }

    #[tokio::test]
    async fn the_first_call_loads_the_library_and_the_first_call_after_a_lost_driver_reloads_it() {
        let opened = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&opened);
        let library = Library::new(move || match count.fetch_add(1, Ordering::SeqCst) {
            0 => Err(NvmlError::NoLibrary("nowhere".into())),
            _ => Ok(Arc::new(LibraryWithoutGpus)),
        });
        let workers = ["a", "b"].map(|name| Worker::start(&library, name).unwrap());
        assert_eq!(opened.load(Ordering::SeqCst), 0);
        assert!(workers[0].call(LONG_TIMEOUT, |gpus| gpus.driver_info()).await.is_err());
        for expected in [2, 3] {
            for worker in &workers {
                assert!(worker.call(LONG_TIMEOUT, |gpus| gpus.driver_info()).await.is_ok());
            }
            assert!(matches!(
                workers[1].call(LONG_TIMEOUT, |gpus| gpus.processes("x")).await,
                Err(NvmlError::NoDriver)
            ));
            assert_eq!(opened.load(Ordering::SeqCst), expected);
        }
    }
}
