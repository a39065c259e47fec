//! Watches XID events of all GPUs.
//!
//! Two threads ask NVML for the events of all GPUs in turn, so that an idle node wakes no thread
//! for each GPU. NVML's calls can block forever. While one thread hangs in a call for a GPU, the
//! other thread asks for the events of the other GPUs, and starts a third thread to take turns
//! with. A GPU that hangs or is lost therefore delays the events of other GPUs only once, by one
//! interval.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::error::NvmlError;
use super::library::{Library, OpenEvents};
use super::model::GpuEvent;

/// Interval between two rounds, each of which asks for the events of all GPUs.
const ROUND_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum and maximum delay after an error.
const BACK_OFF_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Number of threads that take turns.
const ALTERNATING_THREADS: usize = 2;
/// Maximum number of queued events. A full channel blocks the threads, and NVML then queues further
/// events.
const EVENT_QUEUE_CAPACITY: usize = 64;

/// The threads that ask for events. The threads stop within seconds after this value is dropped. A
/// thread that hangs in a call stops when the call returns.
#[derive(Debug)]
pub struct EventWatch(Arc<SharedWatch>);

/// What the threads share.
#[derive(Debug)]
struct SharedWatch {
    library: Library,
    events: mpsc::Sender<GpuEvent>,
    stop: AtomicBool,
    /// Locked only for a moment, and never during an NVML call.
    rounds: Mutex<Rounds>,
}

/// The GPUs, and the threads' turns.
#[derive(Debug, Default)]
struct Rounds {
    /// By NVML index. An element is `None` while a thread reads the events of this GPU.
    gpus: Vec<Option<GpuWatch>>,
    /// Start of the next round that no thread has claimed.
    next: Option<Instant>,
    /// Number of threads that wait for the start of the round that they have claimed.
    waiting: usize,
    /// Number of threads that were started. Only names contain this number.
    started: usize,
}

/// The state of one GPU's events.
struct GpuWatch {
    index: u32,
    /// `None` until the GPU is registered, and after an error.
    open: Option<OpenEvents>,
    /// Time of the last registration or attempt.
    opened_at: Instant,
    /// The last delay after an error.
    pause: Duration,
    /// End of the delay after an error.
    retry_at: Option<Instant>,
}

impl EventWatch {
    /// Creates a watch without threads, and the channel on which it sends events.
    pub fn new(library: Library) -> (Self, mpsc::Receiver<GpuEvent>) {
        let (events, receiver) = mpsc::channel(EVENT_QUEUE_CAPACITY);
        let shared = SharedWatch { library, events, stop: AtomicBool::default(), rounds: Mutex::default() };
        (Self(Arc::new(shared)), receiver)
    }

    /// Watches every index below `count`. Continues to watch higher indices: a missing GPU may
    /// return.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be started. Call this function again to retry.
    pub fn watch(&mut self, count: u32) -> std::io::Result<()> {
        let must_start = {
            let mut rounds = self.0.lock_rounds();
            let known = u32::try_from(rounds.gpus.len()).unwrap_or(u32::MAX);
            rounds.gpus.extend((known..count).map(|index| Some(GpuWatch::new(index))));
            !rounds.gpus.is_empty() && rounds.started == 0
        };
        if must_start { start_thread(&self.0) } else { Ok(()) }
    }
}

impl Drop for EventWatch {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// Starts a thread that takes turns with the other threads.
fn start_thread(shared: &Arc<SharedWatch>) -> std::io::Result<()> {
    let name = format!("nvml-event-{}", shared.lock_rounds().started);
    let of_thread = Arc::clone(shared);
    // NVML needs a large stack. Keep the default size: untouched pages cost nothing.
    thread::Builder::new().name(name).spawn(move || run_rounds(&of_thread))?;
    shared.lock_rounds().started += 1;
    Ok(())
}

/// Runs rounds until the watch stops, or until enough other threads take turns.
fn run_rounds(shared: &Arc<SharedWatch>) {
    while let Some(start) = shared.claim_round() {
        thread::sleep(start.saturating_duration_since(Instant::now()));
        let is_alone = shared.begin_round();
        if shared.should_stop() {
            return;
        }
        if is_alone && let Err(error) = start_thread(shared) {
            // The next round tries again.
            tracing::warn!(%error, "failed to start another NVML event thread");
        }
        shared.run_round();
    }
}

impl SharedWatch {
    fn should_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.events.is_closed()
    }

    /// Claims the next round for this thread, and returns its start. Returns `None` if enough other
    /// threads wait for a round.
    fn claim_round(&self) -> Option<Instant> {
        let mut rounds = self.lock_rounds();
        if rounds.waiting >= ALTERNATING_THREADS {
            return None;
        }
        rounds.waiting += 1;
        let now = Instant::now();
        let start = rounds.next.map_or(now, |next| next.max(now));
        rounds.next = Some(start + ROUND_INTERVAL);
        Some(start)
    }

    /// Begins the round that this thread has claimed. Returns whether no other thread waits for a
    /// round, because all others hang in a call.
    fn begin_round(&self) -> bool {
        let mut rounds = self.lock_rounds();
        rounds.waiting -= 1;
        rounds.waiting == 0
    }

    /// Reports the events of all GPUs, except GPUs for which another thread is in a call.
    fn run_round(&self) {
        let count = self.lock_rounds().gpus.len();
        for index in 0..count {
            let free = self.lock_rounds().gpus.get_mut(index).and_then(Option::take);
            let Some(mut gpu) = free else { continue };
            gpu.report_events(&self.library, &self.events);
            if let Some(place) = self.lock_rounds().gpus.get_mut(index) {
                *place = Some(gpu);
            }
        }
    }

    fn lock_rounds(&self) -> MutexGuard<'_, Rounds> {
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GpuWatch {
    fn new(index: u32) -> Self {
        Self { index, open: None, opened_at: Instant::now(), pause: BACK_OFF_RANGE.0, retry_at: None }
    }

    /// Reports the GPU's events. After an error, waits for longer and longer before the next
    /// attempt.
    fn report_events(&mut self, library: &Library, events: &mpsc::Sender<GpuEvent>) {
        if self.retry_at.is_some_and(|at| Instant::now() < at) {
            return;
        }
        self.retry_at = None;
        if let Err(error) = self.try_report_events(library, events) {
            self.close(library);
            self.record_error(&error, events);
        }
    }

    /// Ends the registration of the GPU.
    fn close(&mut self, library: &Library) {
        if let Some(open) = self.open.take() {
            library.close_events(open);
        }
    }

    fn try_report_events(&mut self, library: &Library, events: &mpsc::Sender<GpuEvent>) -> Result<(), NvmlError> {
        if self.open.is_none() {
            self.register(library)?;
        }
        let Some(open) = &mut self.open else { return Ok(()) };
        while let Some(event) = library.next_event(open)? {
            // The channel is closed when the watch stops.
            if events.blocking_send(event).is_err() {
                return Ok(());
            }
        }
        if !library.are_current(open) {
            // Another thread has closed the session.
            self.close(library);
            self.pause = BACK_OFF_RANGE.0;
            self.register(library)?;
        }
        Ok(())
    }

    /// Registers the GPU for events in the current session.
    fn register(&mut self, library: &Library) -> Result<(), NvmlError> {
        self.opened_at = Instant::now();
        self.open = Some(library.open_events(self.index)?);
        Ok(())
    }

    /// Logs an error, requests new answers of NVML, and sets the delay before the next attempt.
    fn record_error(&mut self, error: &NvmlError, events: &mpsc::Sender<GpuEvent>) {
        let (index, cause) = (self.index, error as &dyn std::error::Error);
        // After a long time without an error, the delay returns to its minimum.
        let usual = if self.opened_at.elapsed() > BACK_OFF_RANGE.1 {
            BACK_OFF_RANGE.0
        } else {
            (self.pause * 2).min(BACK_OFF_RANGE.1)
        };
        self.pause = usual;
        match error {
            // Retry soon: NVML may reopen at any moment.
            error if error.is_caused_by_this_process() => self.pause = BACK_OFF_RANGE.0,
            // The inventory reports a missing driver and missing GPUs.
            NvmlError::NoLibrary(_) | NvmlError::NoDriver | NvmlError::NotFound(_) => {}
            NvmlError::NotSupported { .. } => tracing::warn!(index, error = cause, "GPU does not support events"),
            _ => {
                tracing::warn!(index, error = cause, "failed to read events of GPU");
                // Ignore errors: the channel is closed when the watch stops.
                let _ = events.blocking_send(GpuEvent::Rescan);
            }
        }
        self.retry_at = Some(Instant::now() + self.pause);
    }
}

impl std::fmt::Debug for GpuWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuWatch").field("index", &self.index).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::super::gpus::{GpuEvents, Gpus};
    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    /// What the simulated NVML returns for a GPU.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Answer {
        Xid(u64),
        Lost,
        /// The call blocks until the test sends another answer.
        Hang,
    }

    /// A simulated NVML. Each GPU returns the answers that the test sends, one for each call.
    struct FakeNvml(BTreeMap<u32, Arc<Mutex<Receiver<Answer>>>>);

    struct FakeEvents(u32, Arc<Mutex<Receiver<Answer>>>);

    impl Gpus for FakeNvml {
        fn open_events(&self, index: u32) -> Result<Box<dyn GpuEvents>, NvmlError> {
            Ok(Box::new(FakeEvents(index, Arc::clone(&self.0[&index]))))
        }
    }

    impl GpuEvents for FakeEvents {
        fn next_event(&mut self) -> Result<Option<GpuEvent>, NvmlError> {
            let answers = self.1.lock().unwrap();
            let mut answer = answers.try_recv().ok();
            while answer == Some(Answer::Hang) {
                answer = answers.recv().ok();
            }
            match answer {
                Some(Answer::Xid(xid)) => {
                    Ok(Some(GpuEvent::Xid { uuid: format!("GPU-{}", self.0), xid, gpu_instance: None }))
                }
                Some(Answer::Lost) => Err(NvmlError::Lost { call: "test" }),
                _ => Ok(None),
            }
        }
    }

    /// Returns a library with `count` GPUs, and the sender of each GPU's answers.
    fn fake_library(count: u32) -> (Library, Vec<Sender<Answer>>) {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..count).map(|_| channel()).unzip();
        let receivers = receivers.into_iter().map(|answers| Arc::new(Mutex::new(answers)));
        let nvml: Arc<dyn Gpus> = Arc::new(FakeNvml((0..).zip(receivers).collect()));
        (Library::new(move || Ok(Arc::clone(&nvml))), senders)
    }

    async fn next_event(received: &mut mpsc::Receiver<GpuEvent>) -> GpuEvent {
        tokio::time::timeout(TEST_TIMEOUT, received.recv()).await.expect("an event").expect("the threads run")
    }

    fn xid_event(gpu: usize, xid: u64) -> GpuEvent {
        GpuEvent::Xid { uuid: format!("GPU-{gpu}"), xid, gpu_instance: None }
    }

    #[tokio::test]
    async fn gpus_that_hang_do_not_stop_the_events_of_other_gpus() {
        let (library, gpus) = fake_library(4);
        let (mut watch, mut received) = EventWatch::new(library);
        watch.watch(4).unwrap();
        // Three GPUs hang one after the other, so that more threads hang than usually run.
        for hanging in &gpus[..3] {
            hanging.send(Answer::Hang).unwrap();
            for xid in [31, 43] {
                gpus[3].send(Answer::Xid(xid)).unwrap();
                assert_eq!(next_event(&mut received).await, xid_event(3, xid));
            }
        }
        for (index, hanging) in gpus[..3].iter().enumerate() {
            hanging.send(Answer::Xid(79)).unwrap();
            assert_eq!(next_event(&mut received).await, xid_event(index, 79), "the call returned");
        }
        let rounds = Arc::clone(&watch.0);
        let alternating = async {
            while rounds.lock_rounds().waiting != ALTERNATING_THREADS {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, alternating).await.expect("two threads take turns again");
    }

    #[tokio::test]
    async fn a_lost_gpu_requests_new_answers_of_nvml_and_is_watched_again() {
        let (library, gpus) = fake_library(2);
        let (mut watch, mut received) = EventWatch::new(library);
        watch.watch(1).unwrap();
        gpus[0].send(Answer::Lost).unwrap();
        assert_eq!(next_event(&mut received).await, GpuEvent::Rescan);
        watch.watch(2).unwrap();
        gpus[1].send(Answer::Xid(13)).unwrap();
        assert_eq!(next_event(&mut received).await, xid_event(1, 13), "a GPU that was added");
        gpus[0].send(Answer::Xid(31)).unwrap();
        assert_eq!(next_event(&mut received).await, xid_event(0, 31), "the lost GPU answers again");
    }

    #[tokio::test]
    async fn the_threads_stop_after_the_watch_is_dropped() {
        let (library, _gpus) = fake_library(1);
        let (mut watch, mut received) = EventWatch::new(library);
        watch.watch(1).unwrap();
        drop(watch);
        let ended = tokio::time::timeout(TEST_TIMEOUT, received.recv()).await.expect("the threads stop");
        assert_eq!(ended, None);
    }
}
