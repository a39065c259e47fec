//! Implements NVML's event sets.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings as sys;
use sim_machine::{Event, EventKind, State};

use crate::library::{Code, Handle, HandleTarget, MachineView, Result, handle_of, object_of_handle};

/// Mask of the event types that a recent driver supports on a data center GPU.
pub(crate) const SUPPORTED_EVENT_TYPES: u64 = sys::nvmlEventTypeAll as u64;

/// An event set.
#[derive(Debug, Default)]
struct EventSet {
    /// By GPU: the mask of registered event types, and the last number that was assigned before the
    /// registration.
    registered: HashMap<String, (u64, u64)>,
    /// Number of the last delivered event.
    seen: u64,
}

/// The number of the newest event set, and all event sets by number.
static EVENT_SETS: Mutex<Option<(u64, HashMap<u64, EventSet>)>> = Mutex::new(None);

fn lock_event_sets() -> MutexGuard<'static, Option<(u64, HashMap<u64, EventSet>)>> {
    EVENT_SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates an empty set.
pub(crate) fn create_event_set() -> Handle {
    let mut sets = lock_event_sets();
    let (last, sets) = sets.get_or_insert_default();
    *last += 1;
    sets.insert(*last, EventSet::default());
    handle_of(HandleTarget::EventSet(*last))
}

/// Frees a set.
pub(crate) fn free_event_set(set: Handle) -> Result<()> {
    with_set(set, |_| ())?;
    let HandleTarget::EventSet(number) = object_of_handle(set)? else { return Err(Code::INVALID_ARGUMENT) };
    if let Some((_, sets)) = lock_event_sets().as_mut() {
        sets.remove(&number);
    }
    Ok(())
}

/// Registers a GPU's events with a set.
pub(crate) fn register_gpu(view: &MachineView, gpu: &str, types: u64, set: Handle) -> Result<()> {
    if types & !SUPPORTED_EVENT_TYPES != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    with_set(set, |set| {
        set.registered.entry(gpu.to_owned()).or_insert((0, view.state.last_id)).0 |= types;
    })
}

/// Waits for the set's next event.
pub(crate) fn wait_for_event(view: &MachineView, set: Handle, timeout: Duration) -> Result<Event> {
    let deadline = Instant::now() + timeout;
    let mut state = Arc::clone(&view.state);
    loop {
        let next = with_set(set, |set| {
            let next = next_event(set, &state);
            if let Some(event) = &next {
                set.seen = event.seq;
            }
            // Deliver pending events before the error that the GPU is lost.
            next.map(Ok).or_else(|| has_lost_gpu(set, &state).then_some(Err(Code::GPU_IS_LOST)))
        })?;
        if let Some(next) = next {
            return next;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Code::TIMEOUT);
        }
        view.machine.wait_for_change(state.generation, left)?;
        state = view.machine.snapshot()?;
    }
}

/// Runs `body` with the event set of a handle.
fn with_set<T>(set: Handle, body: impl FnOnce(&mut EventSet) -> T) -> Result<T> {
    let HandleTarget::EventSet(number) = object_of_handle(set)? else { return Err(Code::INVALID_ARGUMENT) };
    let mut sets = lock_event_sets();
    let set = sets.as_mut().and_then(|(_, sets)| sets.get_mut(&number)).ok_or(Code::INVALID_ARGUMENT)?;
    Ok(body(set))
}

/// Returns the first registered event that has not been delivered to the set.
fn next_event(set: &EventSet, state: &State) -> Option<Event> {
    let wanted = |e: &&Event| {
        let is_registered = set
            .registered
            .get(&e.gpu)
            .is_some_and(|(types, after)| e.seq > *after && types & event_type_bit(e.kind) != 0);
        is_registered && e.seq > set.seen
    };
    state.events.iter().find(wanted).cloned()
}

/// Returns whether this process has registered for events of a GPU.
pub(crate) fn is_registered(gpu: &str) -> bool {
    lock_event_sets().iter().flat_map(|(_, sets)| sets.values()).any(|set| set.registered.contains_key(gpu))
}

/// Returns whether a GPU with registered events is lost.
fn has_lost_gpu(set: &EventSet, state: &State) -> bool {
    state.gpus.iter().any(|g| g.lost && set.registered.contains_key(&g.uuid))
}

/// Returns the `nvmlEventType…` bit of an event.
pub(crate) fn event_type_bit(kind: EventKind) -> u64 {
    u64::from(match kind {
        EventKind::Xid => sys::nvmlEventTypeXidCriticalError,
        EventKind::SingleBitEcc => sys::nvmlEventTypeSingleBitEccError,
        EventKind::DoubleBitEcc => sys::nvmlEventTypeDoubleBitEccError,
        EventKind::MigConfigChange => sys::nvmlEventMigConfigChange,
    })
}
