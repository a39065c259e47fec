//! XID events, from one thread for each GPU: NVML's calls block, and may block for ever. A GPU that
//! hangs while it is registered, or that makes each wait fail because it is lost, is alone with
//! that.
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::error::NvmlError as Code;
use tokio::sync::mpsc;

use super::{Library, Nvml, NvmlError, sys};

/// Length of one part of a pause, and so how soon a thread notices that it is to end.
const WAIT: Duration = Duration::from_secs(2);
/// How long the thread of a GPU sleeps between two questions for its events.
const POLL: Duration = Duration::from_millis(500);
/// First and longest pause after an error. A lost GPU makes every wait fail at once.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Events on their way. A full channel stops the threads, and NVML keeps what it has.
const CAPACITY: usize = 64;

/// Something that NVML reports without being asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuEvent {
    /// A critical XID.
    Xid {
        /// The GPU.
        uuid: String,
        /// NVIDIA's number for it.
        xid: u64,
        /// The GPU instance, under MIG.
        gpu_instance: Option<u32>,
    },
    /// Something is wrong with a GPU and NVML does not say which: look at all of them.
    Look,
}

/// The threads. They end some seconds after this value is dropped; one that hangs ends with its
/// call.
#[derive(Debug)]
pub struct EventWatch {
    library: Library,
    events: mpsc::Sender<GpuEvent>,
    stop: Arc<AtomicBool>,
    /// Number of threads: one for each index below it.
    watched: u32,
}

impl EventWatch {
    /// Watches no GPU yet.
    pub fn new(library: Library) -> (Self, mpsc::Receiver<GpuEvent>) {
        let (events, receiver) = mpsc::channel(CAPACITY);
        (Self { library, events, stop: Arc::default(), watched: 0 }, receiver)
    }

    /// Watches every index below `count`, and goes on to watch those watched before: a GPU that is
    /// away may come back.
    ///
    /// # Errors
    /// When a thread cannot be started. Calling again tries again.
    pub fn watch(&mut self, count: u32) -> std::io::Result<()> {
        while self.watched < count {
            let (index, library) = (self.watched, self.library.clone());
            let (events, stop) = (self.events.clone(), Arc::clone(&self.stop));
            // NVML is not frugal with its stack: the default size, of which only touched pages
            // count.
            thread::Builder::new()
                .name(format!("nvml-event-{index}"))
                .spawn(move || watch(&library, index, &events, &stop))?;
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

fn watch(library: &Library, index: u32, events: &mpsc::Sender<GpuEvent>, stop: &AtomicBool) {
    let mut pause = BACK_OFF.0;
    let ends = || stop.load(Ordering::Relaxed) || events.is_closed();
    while !ends() {
        let begun = Instant::now();
        let mut tell = |event: Option<GpuEvent>| {
            let sent = event.is_none_or(|event| events.blocking_send(event).is_ok());
            if sent && !ends() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        match library.listen(index, &mut tell) {
            Ok(()) => pause = BACK_OFF.0,
            Err(error) => {
                match &error {
                    // The inventory reports these: no driver, or fewer GPUs than before.
                    NvmlError::NoLibrary(_) | NvmlError::NoDriver | NvmlError::NotFound(_) => {}
                    NvmlError::NotSupported { .. } => {
                        tracing::warn!(index, error = &error as &dyn std::error::Error, "no events of this GPU");
                    }
                    error => {
                        tracing::warn!(
                            index,
                            error = error as &dyn std::error::Error,
                            "waiting for events of a GPU failed"
                        );
                        if events.blocking_send(GpuEvent::Look).is_err() {
                            return;
                        }
                    }
                }
                // After a long time without an error this is a new one, not the old one again.
                pause = if begun.elapsed() > BACK_OFF.1 { BACK_OFF.0 } else { (pause * 2).min(BACK_OFF.1) };
                sleep(pause, stop);
            }
        }
    }
}

fn sleep(duration: Duration, stop: &AtomicBool) {
    let until = Instant::now() + duration;
    while !stop.load(Ordering::Relaxed) && Instant::now() < until {
        thread::sleep(WAIT.min(until.saturating_duration_since(Instant::now())));
    }
}

/// Registers a GPU in an event set of its own and reports what comes, and nothing after each
/// [`POLL`], until it is told to stop.
///
/// It asks and sleeps, and never waits in the library: there, one thread waits at a time, and the
/// others spin on a lock meanwhile. Two threads that waited took a whole processor (two H200s,
/// driver 580.159).
pub(super) fn listen(
    nvml: &Nvml,
    index: u32,
    tell: &mut dyn FnMut(Option<GpuEvent>) -> ControlFlow<()>,
) -> Result<(), NvmlError> {
    let failed = |call| move |code| NvmlError::of(call, code);
    let device = nvml.by_index(index)?;
    let uuid = device.uuid().map_err(failed("nvmlDeviceGetUUID"))?;
    let set = nvml.inner.create_event_set().map_err(failed("nvmlEventSetCreate"))?;
    sys::register(&nvml.inner, &device, &set)?;
    loop {
        let event = match sys::wait(&nvml.inner, &set, 0) {
            Ok(event) if event.kind & sys::XID != 0 && event.device == sys::identity(&device) => {
                Some(GpuEvent::Xid { uuid: uuid.clone(), xid: event.data, gpu_instance: event.gpu_instance })
            }
            Ok(_) => Some(GpuEvent::Look),
            Err(Code::Timeout) => None,
            Err(code) => return Err(NvmlError::of("nvmlEventSetWait", code)),
        };
        let is_quiet = event.is_none();
        if tell(event).is_break() {
            return Ok(());
        }
        if is_quiet {
            thread::sleep(POLL);
        }
    }
}
