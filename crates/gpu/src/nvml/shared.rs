//! One NVML session for every thread of a process.
use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use super::{GpuEvent, Gpus, Nvml, NvmlError, Search};

type Open = Box<dyn Fn() -> Result<Arc<dyn Gpus>, NvmlError> + Send + Sync>;

/// The NVML library: loaded by the first call, and loaded again after an error that nothing else
/// can mend. Clones share one session, which NVML allows threads to use at the same time.
#[derive(Clone)]
pub struct Library(Arc<Shared>);

struct Shared {
    open: Open,
    /// Held while the library is loaded: one thread at most hangs in `nvmlInit`, the others wait
    /// for it. Never held during any other call.
    session: Mutex<Option<Arc<dyn Gpus>>>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

impl Library {
    /// The library where `search` finds it.
    pub fn find(search: Search) -> Self {
        Self::new(move || Ok(Arc::new(Nvml::open(&search)?)))
    }

    /// A library that `open` loads. `open` runs on the thread that makes the call.
    pub fn new(open: impl Fn() -> Result<Arc<dyn Gpus>, NvmlError> + Send + Sync + 'static) -> Self {
        Self(Arc::new(Shared { open: Box::new(open), session: Mutex::new(None) }))
    }

    /// Makes a call on this thread, which hangs if the driver does.
    pub(super) fn with<T>(&self, call: impl FnOnce(&dyn Gpus) -> Result<T, NvmlError>) -> Result<T, NvmlError> {
        let gpus = self.session()?;
        let result = call(gpus.as_ref());
        if result.as_ref().is_err_and(NvmlError::is_fatal_to_handle) {
            self.forget(&gpus);
        }
        result
    }

    /// [`Gpus::listen`] on this thread. Ends without an error when another thread has found that
    /// the session is of no use any more, so that the next call listens in the new one.
    pub(super) fn listen(
        &self,
        index: u32,
        tell: &mut dyn FnMut(Option<GpuEvent>) -> ControlFlow<()>,
    ) -> Result<(), NvmlError> {
        self.with(|gpus| {
            gpus.listen(index, &mut |event| {
                tell(event)?;
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

    /// The next call loads the library again. Calls that are under way keep the old session.
    fn forget(&self, gpus: &Arc<dyn Gpus>) {
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
