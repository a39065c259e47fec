//! One NVML session for all threads of a process.
use std::fmt;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::NvmlError;
use super::find::LibrarySearch;
use super::gpus::Gpus;
use super::model::GpuEvent;
use super::session::Nvml;

type OpenLibrary = Box<dyn Fn() -> Result<Arc<dyn Gpus>, NvmlError> + Send + Sync>;

/// The NVML library. The first call loads it. After an error that only a reload can fix, the next
/// call reloads it. Clones share one session: NVML allows concurrent calls.
///
/// `nvmlInit` opens the device files of GPUs, and the last `nvmlShutdown` closes them. A GPU whose
/// file is open cannot be reset, and the driver cannot be unloaded. NVML cannot close a single GPU,
/// so [`Library::close`] refuses all calls. The session ends when the calls in progress have
/// returned ([`Library::is_closed`]).
#[derive(Clone)]
pub struct Library(Arc<SharedLibraryState>);

/// The parts that all clones of a [`Library`] use.
struct SharedLibraryState {
    open: OpenLibrary,
    /// Locked while the library is being loaded: one thread can hang in `nvmlInit`, and the other
    /// threads wait for that thread. Never locked during any other call.
    session: Mutex<SessionSlot>,
    /// Number of sessions that NVML has not shut down yet.
    open_sessions: Arc<AtomicUsize>,
}

/// The current session, and whether sessions are allowed.
#[derive(Default)]
struct SessionSlot {
    current: Option<Arc<Session>>,
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
            open_sessions: Arc::default(),
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

    /// Runs `call` in a separate session, which is shut down afterwards. Keep the library closed
    /// before and during the call, so that no other thread of this process uses a GPU.
    pub(super) fn call_alone<T>(&self, call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError>) -> Result<T, NvmlError> {
        let session = Session { gpus: (self.0.open)()?, _count: SessionCount::new(&self.0.open_sessions) };
        call(session.gpus.as_ref())
    }

    /// Runs `call` on this thread. The thread hangs if the driver hangs.
    pub(super) fn call_library<T>(&self, call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError>) -> Result<T, NvmlError> {
        let session = self.open_or_reuse_session()?;
        let result = call(session.gpus.as_ref());
        if result.as_ref().is_err_and(NvmlError::requires_reload) {
            self.discard(&session);
        }
        result
    }

    /// Calls [`Gpus::listen`] on this thread. Returns `Ok` when another thread has closed the
    /// session, so that the next call listens in the new session.
    pub(super) fn listen(
        &self,
        index: u32,
        report: &mut dyn FnMut(Option<GpuEvent>) -> ControlFlow<()>,
    ) -> Result<(), NvmlError> {
        self.call_library(|gpus| {
            gpus.listen(index, &mut |event| {
                report(event)?;
                if self.is_current(gpus) { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            })
        })
    }

    fn open_or_reuse_session(&self) -> Result<Arc<Session>, NvmlError> {
        let mut slot = self.lock_slot();
        if slot.closers > 0 {
            return Err(NvmlError::Closed);
        }
        match &slot.current {
            Some(session) => Ok(Arc::clone(session)),
            None => {
                let gpus = (self.0.open)()?;
                let session = Session { gpus, _count: SessionCount::new(&self.0.open_sessions) };
                Ok(Arc::clone(slot.current.insert(Arc::new(session))))
            }
        }
    }

    /// Closes a session: the next call reloads the library. Calls in progress continue in the old
    /// session.
    fn discard(&self, session: &Arc<Session>) {
        let mut slot = self.lock_slot();
        if slot.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, session)) {
            slot.current = None;
        }
    }

    fn is_current(&self, gpus: &dyn Gpus) -> bool {
        let slot = self.lock_slot();
        slot.current.as_ref().is_some_and(|current| std::ptr::addr_eq(Arc::as_ptr(&current.gpus), gpus))
    }

    fn lock_slot(&self) -> MutexGuard<'_, SessionSlot> {
        self.0.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::{ComputeMode, DriverInfo, Gpu, MigActivation, MigInstance, Process};
    use super::*;

    struct LibraryWithoutGpus;

    impl Gpus for LibraryWithoutGpus {
        fn driver_info(&self) -> Result<DriverInfo, NvmlError> {
            Ok(DriverInfo { driver: "1".into(), count: 0 })
        }
        fn gpu_at(&self, index: u32) -> Result<Gpu, NvmlError> {
            Err(NvmlError::NotFound(index.to_string()))
        }
        fn gpu(&self, uuid: &str) -> Result<Gpu, NvmlError> {
            Err(NvmlError::NotFound(uuid.into()))
        }
        fn set_mig_mode(&self, _: &str, _: bool) -> Result<MigActivation, NvmlError> {
            Ok(MigActivation::Now)
        }
        fn processes(&self, _: &str) -> Result<Vec<Process>, NvmlError> {
            Ok(Vec::new())
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
}
