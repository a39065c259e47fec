//! Watches XID events with one thread per GPU.
//!
//! NVML's calls can block forever. With separate threads, a GPU that hangs or is lost does not
//! delay the events of other GPUs.
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::error::NvmlError;
use super::library::Library;
use super::model::GpuEvent;

/// Maximum time until a waiting thread checks whether it should stop.
const STOP_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Minimum and maximum delay after an error. Without a delay, the thread of a lost GPU would spin,
/// because every read fails immediately.
const BACK_OFF_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Maximum number of queued events. A full channel blocks the threads, and NVML then queues further
/// events.
const EVENT_QUEUE_CAPACITY: usize = 64;

/// The threads that wait for events. The threads stop within seconds after this value is dropped. A
/// thread that hangs in a call stops when the call returns.
#[derive(Debug)]
pub struct EventWatch {
    library: Library,
    events: mpsc::Sender<GpuEvent>,
    stop: Arc<AtomicBool>,
    /// Number of threads: one for each NVML index from 0.
    watched: u32,
}

impl EventWatch {
    /// Creates a watch without threads, and the channel on which it sends events.
    pub fn new(library: Library) -> (Self, mpsc::Receiver<GpuEvent>) {
        let (events, receiver) = mpsc::channel(EVENT_QUEUE_CAPACITY);
        (Self { library, events, stop: Arc::default(), watched: 0 }, receiver)
    }

    /// Watches every index below `count`. Threads for higher indices continue: a missing GPU may
    /// return.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be started. Call this function again to retry.
    pub fn watch(&mut self, count: u32) -> std::io::Result<()> {
        while self.watched < count {
            let (index, library) = (self.watched, self.library.clone());
            let (events, stop) = (self.events.clone(), Arc::clone(&self.stop));
            // NVML needs a large stack. Keep the default size: untouched pages cost nothing.
            thread::Builder::new()
                .name(format!("nvml-event-{index}"))
                .spawn(move || watch_gpu(&library, index, &events, &stop))?;
            self.watched += 1;
        }
        Ok(())
    }
}

impl Drop for EventWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Reports a GPU's events until `stop` is set or the receiver is dropped. Retries with a back-off.
fn watch_gpu(library: &Library, index: u32, events: &mpsc::Sender<GpuEvent>, stop: &AtomicBool) {
    let mut pause = BACK_OFF_RANGE.0;
    let should_stop = || stop.load(Ordering::Relaxed) || events.is_closed();
    while !should_stop() {
        let started = Instant::now();
        let mut report = |event: Option<GpuEvent>| {
            let is_sent = event.is_none_or(|event| events.blocking_send(event).is_ok());
            if is_sent && !should_stop() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        match library.listen(index, &mut report) {
            Ok(()) => pause = BACK_OFF_RANGE.0,
            // Retry soon: NVML may reopen at any moment.
            Err(error) if error.is_caused_by_this_process() => {
                pause = BACK_OFF_RANGE.0;
                sleep_unless_stopped(pause, stop);
            }
            Err(error) => {
                match &error {
                    // The inventory reports a missing driver and missing GPUs.
                    NvmlError::NoLibrary(_) | NvmlError::NoDriver | NvmlError::NotFound(_) => {}
                    NvmlError::NotSupported { .. } => {
                        tracing::warn!(index, error = &error as &dyn std::error::Error, "GPU does not support events");
                    }
                    error => {
                        tracing::warn!(index, error = error as &dyn std::error::Error, "failed to read events of GPU");
                        if events.blocking_send(GpuEvent::Rescan).is_err() {
                            return;
                        }
                    }
                }
                // After a long run without an error, the delay returns to its minimum.
                pause = if started.elapsed() > BACK_OFF_RANGE.1 {
                    BACK_OFF_RANGE.0
                } else {
                    (pause * 2).min(BACK_OFF_RANGE.1)
                };
                sleep_unless_stopped(pause, stop);
            }
        }
    }
}

/// Sleeps for `duration`, or until soon after `stop` is set.
fn sleep_unless_stopped(duration: Duration, stop: &AtomicBool) {
    let until = Instant::now() + duration;
    while !stop.load(Ordering::Relaxed) && Instant::now() < until {
        thread::sleep(STOP_CHECK_INTERVAL.min(until.saturating_duration_since(Instant::now())));
    }
}
