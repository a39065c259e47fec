//! XID events, from one thread of their own: NVML's wait blocks, and may block for ever.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::error::NvmlError as Code;
use tokio::sync::mpsc;

use super::{Nvml, NvmlError, Search, sys};

/// How long one wait lasts: how soon the thread notices that it should end.
const WAIT: Duration = Duration::from_secs(2);
/// First and longest pause after an error. A lost GPU makes every wait fail at once, without end.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How often GPUs are looked for anew where not every one could be watched.
const AGAIN: Duration = Duration::from_secs(30);
/// Events on their way; a full channel holds the thread, and NVML keeps what it has.
const CAPACITY: usize = 64;

/// Something that NVML said without being asked.
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
    /// Something is wrong with a GPU, NVML does not say which: look at them all.
    Look,
}

/// The thread; it ends some seconds after this value is dropped.
#[derive(Debug)]
pub struct EventWatch {
    stop: Arc<AtomicBool>,
}

impl EventWatch {
    /// Starts the thread. The receiver ends only with the thread.
    pub fn start(search: Search) -> std::io::Result<(Self, mpsc::Receiver<GpuEvent>)> {
        let stop = Arc::new(AtomicBool::new(false));
        let (events, receiver) = mpsc::channel(CAPACITY);
        let stopped = Arc::clone(&stop);
        // NVML is not frugal with its stack: the default size, of which only touched pages count.
        thread::Builder::new().name("nvml-events".into()).spawn(move || watch(&search, &events, &stopped))?;
        Ok((Self { stop }, receiver))
    }
}

impl Drop for EventWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn watch(search: &Search, events: &mpsc::Sender<GpuEvent>, stop: &AtomicBool) {
    let mut pause = BACK_OFF.0;
    while !stop.load(Ordering::Relaxed) && !events.is_closed() {
        let begun = Instant::now();
        match Nvml::open(search).and_then(|nvml| watch_set(&nvml, events, stop)) {
            Ok(()) => pause = BACK_OFF.0,
            Err(error) => {
                // No driver is what an agent on a node without GPUs has, and the inventory says it.
                if !matches!(error, NvmlError::NoLibrary(_) | NvmlError::NoDriver) {
                    tracing::warn!(error = &error as &dyn std::error::Error, "waiting for GPU events failed");
                    if events.blocking_send(GpuEvent::Look).is_err() {
                        return;
                    }
                }
                // It went well for long: a new trouble, not the old one.
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

/// Watches every GPU that can be; returns when it is time to look which ones those are, or to end.
fn watch_set(nvml: &Nvml, events: &mpsc::Sender<GpuEvent>, stop: &AtomicBool) -> Result<(), NvmlError> {
    let failed = |call| move |code| NvmlError::of(call, code);
    let nvml = &nvml.inner;
    let count = nvml.device_count().map_err(failed("nvmlDeviceGetCount"))?;
    let set = nvml.create_event_set().map_err(failed("nvmlEventSetCreate"))?;
    let mut watched = Vec::new();
    for index in 0..count {
        let Ok(device) = nvml.device_by_index(index) else { continue };
        let Ok(uuid) = device.uuid() else { continue };
        // One GPU that cannot be watched is one GPU.
        if let Err(error) = sys::register(nvml, &device, &set) {
            tracing::warn!(gpu = uuid, error = &error as &dyn std::error::Error, "no events of this GPU");
            continue;
        }
        watched.push((sys::identity(&device), uuid));
    }
    let complete = u32::try_from(watched.len()) == Ok(count) && count > 0;
    let begun = Instant::now();
    let timeout = u32::try_from(WAIT.as_millis()).unwrap_or(u32::MAX);
    while !stop.load(Ordering::Relaxed) && !events.is_closed() {
        if !complete && begun.elapsed() > AGAIN {
            return Ok(());
        }
        let event = match sys::wait(nvml, &set, timeout) {
            Ok(event) => event,
            Err(Code::Timeout) => continue,
            Err(code) => return Err(NvmlError::of("nvmlEventSetWait", code)),
        };
        let event = match watched.iter().find(|(identity, _)| *identity == event.device) {
            Some((_, uuid)) if event.kind & sys::XID != 0 => {
                GpuEvent::Xid { uuid: uuid.clone(), xid: event.data, gpu_instance: event.gpu_instance }
            }
            _ => GpuEvent::Look,
        };
        if events.blocking_send(event).is_err() {
            return Ok(());
        }
    }
    Ok(())
}
