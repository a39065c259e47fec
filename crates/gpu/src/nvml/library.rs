//! One NVML session for all threads of a process.
use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use super::error::NvmlError;
use super::find::LibrarySearch;
use super::gpus::Gpus;
use super::model::GpuEvent;
use super::session::Nvml;

type Open = Box<dyn Fn() -> Result<Arc<dyn Gpus>, NvmlError> + Send + Sync>;

/// The NVML library. The first call loads it. After an error that only a reload can fix, the next
/// call reloads it. Clones share one session: NVML allows concurrent calls.
#[derive(Clone)]
pub struct Library(Arc<SharedLibraryState>);

/// The parts that all clones of a [`Library`] use.
struct SharedLibraryState {
    open: Open,
    /// Locked while the library is being loaded: one thread can hang in `nvmlInit`, and the other
    /// threads wait for that thread. Never locked during any other call.
    session: Mutex<Option<Arc<dyn Gpus>>>,
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
        Self(Arc::new(SharedLibraryState { open: Box::new(open), session: Mutex::new(None) }))
    }

    /// Runs `call` on this thread. The thread hangs if the driver hangs.
    pub(super) fn call_library<T>(&self, call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError>) -> Result<T, NvmlError> {
        let gpus = self.session()?;
        let result = call(gpus.as_ref());
        if result.as_ref().is_err_and(NvmlError::requires_reload) {
            self.close(&gpus);
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

    fn session(&self) -> Result<Arc<dyn Gpus>, NvmlError> {
        let mut session = self.0.session.lock().unwrap_or_else(PoisonError::into_inner);
        match &*session {
            Some(gpus) => Ok(Arc::clone(gpus)),
            None => Ok(Arc::clone(session.insert((self.0.open)()?))),
        }
    }

    /// Closes the session `gpus`: the next call reloads the library. Calls in progress continue in
    /// the old session.
    fn close(&self, gpus: &Arc<dyn Gpus>) {
        let mut session = self.0.session.lock().unwrap_or_else(PoisonError::into_inner);
        if session.as_ref().is_some_and(|current| Arc::ptr_eq(current, gpus)) {
            *session = None;
        }
    }

    fn is_current(&self, gpus: &dyn Gpus) -> bool {
        let session = self.0.session.lock().unwrap_or_else(PoisonError::into_inner);
        session.as_ref().is_some_and(|current| std::ptr::addr_eq(Arc::as_ptr(current), gpus))
    }
}
