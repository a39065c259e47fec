//! NVML on a thread of its own, so that a call that hangs in the driver holds nothing else.
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{Gpus, NvmlError};

/// Loads the library: called again after an error that only a new start can mend.
type Open = Box<dyn FnMut() -> Result<Box<dyn Gpus>, NvmlError> + Send>;
type Job = Box<dyn FnOnce(&mut Session) + Send>;

/// A handle to the thread; it ends when the last handle and the call that it is in have ended.
#[derive(Debug, Clone)]
pub struct Worker {
    jobs: Sender<Job>,
    progress: Arc<Mutex<Progress>>,
}

#[derive(Debug, Default)]
struct Progress {
    /// Calls asked for.
    asked: u64,
    /// Calls that have returned.
    returned: u64,
    /// When a call began that outlived its deadline, if one did and has not returned.
    stuck: Option<Instant>,
}

struct Session {
    open: Open,
    gpus: Option<Box<dyn Gpus>>,
}

impl Worker {
    /// Starts the thread; the library is loaded by the first call.
    pub fn start(open: Open) -> std::io::Result<Self> {
        let (jobs, queue) = channel();
        // NVML's initialisation is not frugal with its stack: the default size, of which only touched pages count.
        thread::Builder::new().name("nvml".into()).spawn(move || serve(Session { open, gpus: None }, &queue))?;
        Ok(Self { jobs, progress: Arc::default() })
    }

    /// Calls `call` on the thread.
    ///
    /// # Errors
    /// What the call gives, or [`NvmlError::Hung`] after `deadline`, and at once while an earlier call hangs.
    pub async fn call<T: Send + 'static>(
        &self,
        deadline: Duration,
        call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError> + Send + 'static,
    ) -> Result<T, NvmlError> {
        let begun = Instant::now();
        let number = {
            let mut progress = self.progress();
            if let Some(since) = progress.stuck {
                return Err(NvmlError::Hung(since.elapsed()));
            }
            progress.asked += 1;
            progress.asked
        };
        let (answer, answered) = oneshot::channel();
        let progress = Arc::clone(&self.progress);
        let job: Job = Box::new(move |session| {
            let result = session.with(call);
            let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
            progress.returned = number;
            progress.stuck = None;
            drop(progress);
            // A caller that gave up is not told.
            let _ = answer.send(result);
        });
        if self.jobs.send(job).is_err() {
            return Err(NvmlError::Hung(Duration::ZERO));
        }
        match tokio::time::timeout(deadline, answered).await {
            Ok(Ok(result)) => result,
            // The thread ended in the call: it panicked.
            Ok(Err(_)) => Err(NvmlError::Hung(begun.elapsed())),
            Err(_) => {
                let mut progress = self.progress();
                // It may have returned since.
                if progress.returned < number {
                    progress.stuck = Some(begun);
                }
                Err(NvmlError::Hung(begun.elapsed()))
            }
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn serve(mut session: Session, queue: &Receiver<Job>) {
    while let Ok(job) = queue.recv() {
        job(&mut session);
    }
}

impl Session {
    fn with<T>(&mut self, call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError>) -> Result<T, NvmlError> {
        let gpus = match self.gpus.take() {
            Some(gpus) => gpus,
            None => (self.open)()?,
        };
        let result = call(gpus.as_ref());
        if !result.as_ref().is_err_and(NvmlError::is_fatal_to_handle) {
            self.gpus = Some(gpus);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ComputeMode, Gpu, Inventory, MigActivation, MigInstance, Process, Tenants};
    use super::*;

    struct NoGpus;

    impl Gpus for NoGpus {
        fn inventory(&self) -> Result<Inventory, NvmlError> {
            let (gpus, processes) = Default::default();
            Ok(Inventory { driver: "1".into(), gpus, processes })
        }
        fn look(&self, uuid: &str) -> Result<Gpu, NvmlError> {
            Err(NvmlError::NotFound(uuid.into()))
        }
        fn set_mig_mode(&self, _: &str, _: bool) -> Result<MigActivation, NvmlError> {
            Err(NvmlError::NotSupported { call: "set" })
        }
        fn processes(&self, _: &str) -> Result<Vec<Process>, NvmlError> {
            Err(NvmlError::NoDriver)
        }
        fn tenants(&self, device: &str) -> Result<Tenants, NvmlError> {
            match device {
                "gone" => Err(NvmlError::NoDriver),
                "lost" => Err(NvmlError::Lost { call: "tenants" }),
                _ => Ok(Tenants::default()),
            }
        }
        fn set_compute_mode(&self, _: &str, mode: ComputeMode) -> Result<ComputeMode, NvmlError> {
            Ok(mode)
        }
        fn create_mig_instance(&self, _: &str, _: &str, _: u32) -> Result<MigInstance, NvmlError> {
            Err(NvmlError::NotSupported { call: "create" })
        }
        fn destroy_mig_instance(&self, _: &str, _: u32) -> Result<(), NvmlError> {
            Ok(())
        }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_call_that_hangs_costs_its_caller_a_deadline_and_others_nothing_and_ends_with_the_hang() {
        let worker = Worker::start(Box::new(|| Ok(Box::new(NoGpus)))).unwrap();
        let (release, held) = channel::<()>();
        let hanging = worker
            .call(Duration::from_millis(1), move |_| {
                let _ = held.recv();
                Ok(())
            })
            .await;
        assert!(matches!(hanging, Err(NvmlError::Hung(_))));
        assert!(matches!(worker.call(LONG, |_| Ok(())).await, Err(NvmlError::Hung(_))), "not queued behind it");
        release.send(()).unwrap();
        while worker.call(LONG, |_| Ok(())).await.is_err() {
            tokio::task::yield_now().await;
        }
        assert_eq!(worker.call(LONG, |gpus| gpus.inventory()).await.unwrap().driver, "1");
    }

    #[tokio::test]
    async fn a_device_that_does_not_say_its_processes_hides_no_others_and_a_driver_that_is_gone_all() {
        let worker = Worker::start(Box::new(|| Ok(Box::new(NoGpus)))).unwrap();
        let ask = |devices: [&str; 2]| devices.map(str::to_owned);
        let one = ask(["lost", "a"]);
        let told = worker.call(LONG, move |gpus| gpus.tenants_of(&one)).await.unwrap();
        assert_eq!(told.keys().collect::<Vec<_>>(), ["a"]);
        let none = ask(["a", "gone"]);
        assert!(matches!(worker.call(LONG, move |gpus| gpus.tenants_of(&none)).await, Err(NvmlError::NoDriver)));
    }

    #[tokio::test]
    async fn the_library_is_opened_anew_after_the_driver_went_and_never_before_it_is_wanted() {
        let opened = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let count = Arc::clone(&opened);
        let worker = Worker::start(Box::new(move || match count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
            0 => Err(NvmlError::NoLibrary("nowhere".into())),
            _ => Ok(Box::new(NoGpus)),
        }))
        .unwrap();
        assert_eq!(opened.load(std::sync::atomic::Ordering::SeqCst), 0);
        assert!(worker.call(LONG, |gpus| gpus.inventory()).await.is_err());
        for expected in [2, 3] {
            assert!(worker.call(LONG, |gpus| gpus.inventory()).await.is_ok());
            assert!(matches!(worker.call(LONG, |gpus| gpus.processes("x")).await, Err(NvmlError::NoDriver)));
            assert_eq!(opened.load(std::sync::atomic::Ordering::SeqCst), expected);
        }
    }
}
