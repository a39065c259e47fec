//! One NVML session for all threads of a process.
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::NvmlError;
use super::find::LibrarySearch;
use super::gpus::{GpuEvents, Gpus};
use super::model::GpuEvent;
use super::session::Nvml;

type OpenLibrary = Box<dyn Fn() -> Result<Arc<dyn Gpus>, NvmlError> + Send + Sync>;

/// The NVML library. The first call loads it. After an error that only a reload can fix, the next
/// call reloads the library. Clones share one session: NVML allows concurrent calls.
///
/// `nvmlInit` opens the device files of GPUs, and the last `nvmlShutdown` closes them. A GPU whose
/// file is open cannot be reset, and the driver cannot be unloaded. NVML cannot close a single GPU,
/// so [`Library::close`] refuses all calls. The session ends when the calls in progress have
/// returned ([`Library::is_closed`]).
#[derive(Clone)]
pub struct Library(Arc<SharedLibraryState>);

/// The state that all clones of a [`Library`] share.
struct SharedLibraryState {
    open: OpenLibrary,
    /// Locked only for a moment, and never during an NVML call, because a call can hang. Callers
    /// that must not wait also lock it.
    session: Mutex<SessionSlot>,
    /// Notified when an attempt to open a session has ended, and when the library is closed.
    changed: Condvar,
    /// Number of sessions that are being opened, or that NVML has not shut down yet.
    open_sessions: Arc<AtomicUsize>,
    calls: Arc<Mutex<CallsInProgress>>,
}

/// The current session, and whether sessions are allowed.
#[derive(Default)]
struct SessionSlot {
    current: Option<Arc<Session>>,
    /// Whether a thread is opening a session. The thread can hang in `nvmlInit`. Other threads that
    /// need a session wait for it.
    opening: bool,
    /// Number of [`ClosedLibrary`] values. A session can open only while this number is 0.
    closers: usize,
}

/// Keeps a library closed until it is dropped.
#[derive(Debug)]
pub struct ClosedLibrary(Library);

impl Drop for ClosedLibrary {
    fn drop(&mut self) {
        let mut slot = self.0.lock_slot();
        slot.closers = slot.closers.saturating_sub(1);
    }
}

/// An open NVML session. Fields are dropped in order of declaration, so the count decreases after
/// NVML has shut down.
struct Session {
    gpus: Arc<dyn Gpus>,
    _count: SessionCount,
}

/// The events of one GPU in one session. The session stays open until this value is dropped.
/// Fields are dropped in order of declaration.
pub(super) struct OpenEvents {
    events: Box<dyn GpuEvents>,
    session: Arc<Session>,
}

/// Counts as one open session until it is dropped.
struct SessionCount(Arc<AtomicUsize>);

impl SessionCount {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for SessionCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The start time of each call in progress, by number of the call.
#[derive(Default)]
struct CallsInProgress {
    last: u64,
    since: BTreeMap<u64, Instant>,
}

/// One call in [`CallsInProgress`].
struct CallInProgress {
    calls: Arc<Mutex<CallsInProgress>>,
    number: u64,
}

impl CallInProgress {
    fn begin(calls: &Arc<Mutex<CallsInProgress>>) -> Self {
        let mut all = lock(calls);
        all.last += 1;
        let number = all.last;
        all.since.insert(number, Instant::now());
        drop(all);
        Self { calls: Arc::clone(calls), number }
    }
}

impl Drop for CallInProgress {
    fn drop(&mut self) {
        lock(&self.calls).since.remove(&self.number);
    }
}

/// Ends an attempt to open a session, even if the attempt panics.
struct OpeningSession<'a>(&'a SharedLibraryState);

impl Drop for OpeningSession<'_> {
    fn drop(&mut self) {
        lock(&self.0.session).opening = false;
        self.0.changed.notify_all();
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

impl Library {
    /// Creates a handle to the library file that `search` finds. Loads nothing yet.
    pub fn find(search: LibrarySearch) -> Self {
        Self::new(move || Ok(Arc::new(Nvml::open(&search)?)))
    }

    /// Creates a handle to a library that `open` loads. `open` runs on the thread whose call needs
    /// the library.
    pub fn new(open: impl Fn() -> Result<Arc<dyn Gpus>, NvmlError> + Send + Sync + 'static) -> Self {
        Self(Arc::new(SharedLibraryState {
            open: Box::new(open),
            session: Mutex::default(),
            changed: Condvar::new(),
            open_sessions: Arc::default(),
            calls: Arc::default(),
        }))
    }

    /// Closes the session until the returned value is dropped. Until then, each new call fails with
    /// [`NvmlError::Closed`]. Does not wait: calls in progress continue.
    #[must_use]
    pub fn close(&self) -> ClosedLibrary {
        let before = {
            let mut slot = self.lock_slot();
            slot.closers += 1;
            slot.current.take()
        };
        self.0.changed.notify_all();
        if let Some(before) = before {
            // Dropping the last handle shuts NVML down, which can block. If no thread can be
            // started, this thread drops the handle.
            let _ = std::thread::Builder::new().name("nvml-close".into()).spawn(move || drop(before));
        }
        ClosedLibrary(self.clone())
    }

    /// Returns whether the library is closed and NVML has shut down.
    pub fn is_closed(&self) -> bool {
        let kept_closed = self.lock_slot().closers > 0;
        kept_closed && self.0.open_sessions.load(Ordering::SeqCst) == 0
    }

    /// Returns the duration of the longest call in progress, or zero if no call is in progress.
    /// While a call hangs, its session stays open, so the library cannot close.
    pub fn longest_call(&self) -> Duration {
        lock(&self.0.calls).since.values().min().map_or(Duration::ZERO, Instant::elapsed)
    }

    /// Runs `call` in a separate session, and shuts the session down afterwards. Keep the library
    /// closed before and during the call, so that no other thread of this process uses a GPU.
    pub(super) fn call_alone<T>(&self, call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError>) -> Result<T, NvmlError> {
        let count = SessionCount::new(&self.0.open_sessions);
        let session = Session { gpus: (self.0.open)()?, _count: count };
        call(session.gpus.as_ref())
    }

    /// Runs `call` on this thread. The thread hangs if the driver hangs.
    ///
    /// # Errors
    /// Returns the errors of the call. Returns [`NvmlError::NoDescriptors`] if the call fails while
    /// this process cannot open any file. NVML opens files, so such an error shows nothing about a
    /// GPU.
    pub(super) fn call_library<T>(&self, call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError>) -> Result<T, NvmlError> {
        self.call_tracked(|| {
            let session = self.open_or_reuse_session()?;
            self.call_session(&session, || call(session.gpus.as_ref()))
        })
    }

    /// Calls [`Gpus::open_events`] on this thread.
    pub(super) fn open_events(&self, index: u32) -> Result<OpenEvents, NvmlError> {
        self.call_tracked(|| {
            let session = self.open_or_reuse_session()?;
            let events = self.call_session(&session, || session.gpus.open_events(index))?;
            Ok(OpenEvents { events, session })
        })
    }

    /// Calls [`GpuEvents::next_event`] on this thread, even after the end of the session
    /// ([`Library::are_current`]).
    pub(super) fn next_event(&self, open: &mut OpenEvents) -> Result<Option<GpuEvent>, NvmlError> {
        let OpenEvents { events, session } = open;
        self.call_tracked(|| self.call_session(session, || events.next_event()))
    }

    /// Ends the registration of these events on this thread. Shuts NVML down if nothing else uses
    /// the session and the session has ended.
    pub(super) fn close_events(&self, open: OpenEvents) {
        let progress = CallInProgress::begin(&self.0.calls);
        drop(open);
        drop(progress);
    }

    /// Returns whether new calls use the session of these events.
    pub(super) fn are_current(&self, open: &OpenEvents) -> bool {
        self.lock_slot().current.as_ref().is_some_and(|current| Arc::ptr_eq(current, &open.session))
    }

    /// Runs `call`, which counts as a call in progress.
    fn call_tracked<T>(&self, call: impl FnOnce() -> Result<T, NvmlError>) -> Result<T, NvmlError> {
        let progress = CallInProgress::begin(&self.0.calls);
        let result = call();
        drop(progress);
        result
    }

    /// Runs `call`, which uses a session. Discards the session after an error that only a reload
    /// can fix.
    fn call_session<T>(
        &self,
        session: &Arc<Session>,
        call: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Result<T, NvmlError> {
        let result = call().map_err(explain_missing_descriptors);
        if result.as_ref().is_err_and(NvmlError::requires_reload) {
            self.discard(session);
        }
        result
    }

    fn open_or_reuse_session(&self) -> Result<Arc<Session>, NvmlError> {
        let mut slot = self.lock_slot();
        loop {
            if slot.closers > 0 {
                return Err(NvmlError::Closed);
            }
            if let Some(session) = &slot.current {
                return Ok(Arc::clone(session));
            }
            if !slot.opening {
                break;
            }
            slot = self.0.changed.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
        slot.opening = true;
        drop(slot);
        let opening = OpeningSession(&self.0);
        let count = SessionCount::new(&self.0.open_sessions);
        let gpus = (self.0.open)().map_err(explain_missing_descriptors)?;
        let session = Arc::new(Session { gpus, _count: count });
        let mut slot = self.lock_slot();
        let is_allowed = slot.closers == 0;
        if is_allowed {
            slot.current = Some(Arc::clone(&session));
        }
        drop(slot);
        drop(opening);
        // If the library was closed meanwhile, this drops the session and shuts NVML down.
        if is_allowed { Ok(session) } else { Err(NvmlError::Closed) }
    }

    /// Closes a session: the next call reloads the library. Calls in progress continue in the old
    /// session.
    fn discard(&self, session: &Arc<Session>) {
        let mut slot = self.lock_slot();
        if slot.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, session)) {
            slot.current = None;
        }
    }

    fn lock_slot(&self) -> MutexGuard<'_, SessionSlot> {
        lock(&self.0.session)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Replaces the error by [`NvmlError::NoDescriptors`] if this process cannot open any file.
fn explain_missing_descriptors(error: NvmlError) -> NvmlError {
    use rustix::fs::{Mode, OFlags};
    use rustix::io::Errno;
    match rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::MFILE | Errno::NFILE) if !matches!(error, NvmlError::Closed) => NvmlError::NoDescriptors,
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::super::model::{DriverInfo, MigActivation};
    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);
    /// Time that the simulated driver takes to end a registration for events.
    const CLOSE_DURATION: Duration = Duration::from_millis(50);

    struct LibraryWithoutGpus;

    impl Gpus for LibraryWithoutGpus {
        fn driver_info(&self) -> Result<DriverInfo, NvmlError> {
            Ok(DriverInfo { driver: "1".into(), count: 0 })
        }
        fn set_mig_mode(&self, _: &str, _: bool) -> Result<MigActivation, NvmlError> {
            Ok(MigActivation::Now)
        }
    }

    #[test]
    fn a_closed_library_refuses_calls_and_is_closed_when_the_last_call_has_returned() {
        let library = Library::new(|| Ok(Arc::new(LibraryWithoutGpus)));
        assert!(library.call_library(|gpus| gpus.driver_info()).is_ok());
        assert!(!library.is_closed(), "closed only on request");
        let closed = library
            .call_library(|_| {
                let closed = library.close();
                assert!(!library.is_closed(), "this call is in progress");
                assert!(matches!(library.call_library(|gpus| gpus.driver_info()), Err(NvmlError::Closed)));
                Ok(closed)
            })
            .unwrap();
        while !library.is_closed() {
            std::thread::yield_now();
        }
        assert!(library.call_alone(|gpus| gpus.set_mig_mode("GPU-a", true)).is_ok());
        assert!(library.is_closed(), "the session of the one call is closed again");
        drop(library.close());
        assert!(library.is_closed(), "closed while one value remains");
        drop(closed);
        assert!(library.call_library(|gpus| gpus.driver_info()).is_ok() && !library.is_closed());
    }

    #[test]
    fn a_hanging_initialization_blocks_neither_close_nor_is_closed() {
        let (entered, enters) = channel();
        let (release, released) = channel::<()>();
        let released = Mutex::new(released);
        let library = Library::new(move || {
            entered.send(()).unwrap();
            // Hangs until the test drops the sender.
            let _ = lock(&released).recv();
            Ok(Arc::new(LibraryWithoutGpus))
        });
        let calls = [0, 1].map(|_| {
            let library = library.clone();
            thread::spawn(move || library.call_library(|gpus| gpus.driver_info()))
        });
        enters.recv().unwrap();
        let (answer, answered) = channel();
        let closing = library.clone();
        thread::spawn(move || {
            let closed = closing.close();
            let is_closed = closing.is_closed();
            answer.send((closed, is_closed, closing.longest_call())).unwrap();
        });
        let (closed, is_closed, longest) =
            answered.recv_timeout(TEST_TIMEOUT).expect("the close waits for the initialization");
        assert!(!is_closed, "the initialization may have opened device files");
        assert!(longest > Duration::ZERO);
        drop(release);
        for call in calls {
            assert!(matches!(call.join().unwrap(), Err(NvmlError::Closed)));
        }
        assert!(library.is_closed(), "the session was not kept");
        assert_eq!(library.longest_call(), Duration::ZERO);
        drop(closed);
        assert!(library.call_library(|gpus| gpus.driver_info()).is_ok());
    }

    #[test]
    fn open_events_keep_their_session_open_but_are_no_call_in_progress() {
        struct WithEvents;
        impl Gpus for WithEvents {
            fn open_events(&self, _: u32) -> Result<Box<dyn GpuEvents>, NvmlError> {
                Ok(Box::new(NoEvents))
            }
        }
        struct NoEvents;
        impl GpuEvents for NoEvents {
            fn next_event(&mut self) -> Result<Option<GpuEvent>, NvmlError> {
                Ok(None)
            }
        }
        impl Drop for NoEvents {
            fn drop(&mut self) {
                thread::sleep(CLOSE_DURATION);
            }
        }
        let library = Library::new(|| Ok(Arc::new(WithEvents)));
        let mut open = library.open_events(0).unwrap();
        assert!(library.next_event(&mut open).unwrap().is_none());
        assert_eq!(library.longest_call(), Duration::ZERO);
        assert!(library.are_current(&open));
        let closed = library.close();
        assert!(!library.are_current(&open));
        assert!(matches!(library.open_events(0), Err(NvmlError::Closed)));
        assert!(library.next_event(&mut open).unwrap().is_none(), "the session is still open");
        assert!(!library.is_closed());
        let closing = library.clone();
        let closing = thread::spawn(move || closing.close_events(open));
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut was_in_progress = false;
        while !library.is_closed() {
            was_in_progress |= library.longest_call() > Duration::ZERO;
            assert!(Instant::now() < deadline, "the session stays open");
            thread::yield_now();
        }
        closing.join().unwrap();
        assert!(was_in_progress, "the end of a registration may hang, as a call may");
        drop(closed);
        let mut open = library.open_events(0).unwrap();
        assert!(library.are_current(&open) && library.next_event(&mut open).unwrap().is_none());
    }
}
