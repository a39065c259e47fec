//! Implements the client side of MPS in the CUDA library: the search for a daemon, and contexts
//! that MPS serves.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::handshake::{self, ConnectError, IntroductionSubject};
use crate::limits::{self, DeviceName};
use crate::seqpacket::Connection;
use crate::wire::{self, Device, FromContext, ToContext};

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub const CUDA_ERROR_OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_NO_DEVICE`
pub const CUDA_ERROR_NO_DEVICE: i32 = 100;
/// `CUDA_ERROR_MPS_CONNECTION_FAILED`
pub const CUDA_ERROR_MPS_CONNECTION_FAILED: i32 = 805;
/// `CUDA_ERROR_MPS_RPC_FAILURE`: the server exited.
pub const CUDA_ERROR_MPS_RPC_FAILURE: i32 = 806;
/// `CUDA_ERROR_MPS_CLIENT_TERMINATED`
pub const CUDA_ERROR_MPS_CLIENT_TERMINATED: i32 = 810;

/// The environment variables that affect a program's limits.
#[derive(Debug, Clone, Default)]
pub struct LimitEnvironment {
    /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`
    pub threads: Option<String>,
    /// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`
    pub memory: Option<String>,
}

impl LimitEnvironment {
    /// Reads the environment variables of this process.
    pub fn of_this_process() -> Self {
        let text = |name| std::env::var(name).ok();
        Self { threads: text("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), memory: text("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") }
    }
}

/// Maximum number of attempts if the server exits during the handshake. The daemon starts a new
/// server for each attempt.
const MAX_CONNECT_RETRIES: u32 = 20;
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A connection of this process to an MPS server.
#[derive(Debug)]
pub struct MpsConnection {
    control: PathBuf,
    devices: Vec<Device>,
    /// When this connection closes, at the latest at the exit of the process, the server detects
    /// the end of the process.
    channel: Connection,
    _socket: Connection,
}

impl MpsConnection {
    /// Searches for a daemon, as the CUDA library does when it initializes. Waits for the daemon's
    /// answer without a deadline.
    ///
    /// `None` is not an error: the program then runs without MPS and without limits. Real programs
    /// behave in this way if `control` is missing, if no process listens, or if the daemon accepts
    /// and closes the connection. The simulation assumes the same if the daemon closes later in the
    /// handshake, which is the worst case.
    ///
    /// # Errors
    /// Returns a `CUresult` from the server, or [`CUDA_ERROR_MPS_CONNECTION_FAILED`] if every
    /// server exits during the handshake.
    pub fn attach(control: &Path) -> Result<Option<Self>, i32> {
        if handshake::probe_daemon(control).is_err() {
            return Ok(None);
        }
        let (devices, (channel, socket)) =
            match connect_with_retries(control, IntroductionSubject::Process, &ToContext::Devices) {
                Ok((FromContext::Devices(devices), entered)) => (devices, entered),
                Ok(_) | Err(ConnectError::ByServer) => return Err(CUDA_ERROR_MPS_CONNECTION_FAILED),
                Err(ConnectError::ByDaemon) => return Ok(None),
                Err(ConnectError::Refused(code)) => return Err(code),
            };
        Ok(Some(Self { control: control.to_owned(), devices, channel, _socket: socket }))
    }

    /// Returns the server's devices, in the order of their ordinals.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Creates a context on the device with this ordinal in `visible`, the devices that the program
    /// sees.
    ///
    /// # Errors
    /// Returns the `CUresult` of the failure.
    pub fn create_context(
        &self,
        environment: &LimitEnvironment,
        visible: &[Device],
        ordinal: usize,
    ) -> Result<MpsContext, i32> {
        let device = visible.get(ordinal).ok_or(CUDA_ERROR_NO_DEVICE)?.clone();
        let create = ToContext::Create {
            device: device.uuid.clone(),
            threads: environment.threads.as_deref().and_then(limits::parse_percentage),
            command: own_command_name(),
            namespace: pid_namespace(),
        };
        let entered = match handshake::connect_to_server(&self.control)
            .and_then(|sockets| sockets.introduce_to_server(IntroductionSubject::Context))
        {
            Ok(entered) => entered,
            Err(ConnectError::Refused(code)) => return Err(code),
            Err(ConnectError::ByServer) => return Err(CUDA_ERROR_MPS_RPC_FAILURE),
            Err(ConnectError::ByDaemon) => return Err(CUDA_ERROR_MPS_CONNECTION_FAILED),
        };
        let (channel, socket) = (Arc::new(entered.0), entered.1);
        wire::send(&channel, &create).map_err(|_| CUDA_ERROR_MPS_RPC_FAILURE)?;
        let (sms, limit) = match wire::recv(&channel) {
            Ok(Some(FromContext::Created { sms, limit, .. })) => (sms, limit),
            Ok(Some(FromContext::Error(code) | FromContext::Broken(code))) => return Err(code),
            Ok(_) | Err(_) => return Err(CUDA_ERROR_MPS_RPC_FAILURE),
        };
        let names: Vec<DeviceName<'_>> =
            visible.iter().enumerate().map(|(ordinal, device)| DeviceName { ordinal, uuid: &device.uuid }).collect();
        let own = limits::parse_client_memory_limit(environment.memory.as_deref(), &names, ordinal);
        let limit = limits::effective_memory_limit(limit, own);
        let overhead = limits::context_overhead(sms);
        if limit.is_some_and(|limit| limit < overhead) {
            let _ = wire::send(&channel, &ToContext::Goodbye);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let (answers, replies) = mpsc::channel();
        let state = Arc::new(FirstError::default());
        let reader = (Arc::clone(&channel), Arc::clone(&state));
        thread::spawn(move || read_messages(&reader.0, &reader.1, &answers));
        let (replies, allocated) = (Mutex::new(replies), AtomicU64::new(0));
        Ok(MpsContext { channel, _socket: socket, replies, state, device, sms, limit, overhead, allocated })
    }
}

impl Drop for MpsConnection {
    fn drop(&mut self) {
        // Ignore errors, because the server may have exited.
        let _ = wire::send(&self.channel, &ToContext::Goodbye);
    }
}

/// Performs the handshake, sends a first request and returns the answer. Retries if the server
/// exits before it answers.
fn connect_with_retries(
    control: &Path,
    subject: IntroductionSubject,
    question: &ToContext,
) -> Result<(FromContext, (Connection, Connection)), ConnectError> {
    let once = || {
        let entered = handshake::connect_to_server(control)?.introduce_to_server(subject)?;
        wire::send(&entered.0, question).map_err(|_| ConnectError::ByServer)?;
        let answer = wire::recv(&entered.0).ok().flatten().ok_or(ConnectError::ByServer)?;
        Ok((answer, entered))
    };
    for _ in 0..MAX_CONNECT_RETRIES {
        match once() {
            Err(ConnectError::ByServer) => thread::sleep(CONNECT_RETRY_INTERVAL),
            other => return other,
        }
    }
    Err(ConnectError::ByServer)
}

/// A context that an MPS server serves. Dropping this value closes the context cleanly. If the
/// process exits without that, the server detects the exit.
#[derive(Debug)]
pub struct MpsContext {
    channel: Arc<Connection>,
    _socket: Connection,
    replies: Mutex<Receiver<FromContext>>,
    state: Arc<FirstError>,
    device: Device,
    sms: u32,
    limit: Option<u64>,
    overhead: u64,
    allocated: AtomicU64,
}

impl MpsContext {
    /// Returns the context's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the number of SMs that the context may use.
    pub fn sms(&self) -> u32 {
        self.sms
    }

    /// Returns the memory limit of the context, in bytes. `None` means no limit.
    pub fn memory_limit(&self) -> Option<u64> {
        self.limit
    }

    /// Returns the free memory in bytes, as `cudaMemGetInfo` does.
    ///
    /// # Errors
    /// Returns the `CUresult` of the failure.
    pub fn free_memory(&self) -> Result<u64, i32> {
        let free = self.request_free_memory(&ToContext::Query)?;
        Ok(self.remaining_memory_limit().map_or(free, |left| left.min(free)))
    }

    /// Allocates `bytes` bytes of device memory.
    ///
    /// # Errors
    /// Returns the `CUresult` of the failure.
    pub fn allocate(&self, bytes: u64) -> Result<(), i32> {
        // The client library enforces the memory limit. The server only checks the device's memory.
        if self.remaining_memory_limit().is_some_and(|left| bytes > left) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.request_free_memory(&ToContext::Allocate(bytes))?;
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Starts kernels of `kernel_ms` milliseconds each. The kernels run until a call of
    /// [`synchronize`](Self::synchronize).
    ///
    /// # Errors
    /// Returns the `CUresult` of the failure.
    pub fn launch_kernels(&self, kernel_ms: f64) -> Result<(), i32> {
        self.notify(&ToContext::Busy(kernel_ms))
    }

    /// Reports to the server that all kernels have finished. The caller must have waited for the
    /// running kernel.
    ///
    /// # Errors
    /// Returns the `CUresult` of the failure.
    pub fn synchronize(&self) -> Result<(), i32> {
        self.notify(&ToContext::Idle)
    }

    /// Runs a kernel with an illegal memory access.
    ///
    /// # Errors
    /// Returns the `CUresult` of an earlier error. Later calls return the error of the illegal
    /// access.
    pub fn access_illegally(&self) -> Result<(), i32> {
        self.notify(&ToContext::IllegalAccess)
    }

    /// Returns the `CUresult` of the error that broke the context, if any.
    pub fn error(&self) -> Option<i32> {
        *self.state.lock()
    }

    /// Waits up to `timeout` until an error breaks the context. Returns the `CUresult` of the
    /// error, if any.
    pub fn wait_for_error(&self, timeout: Duration) -> Option<i32> {
        let deadline = Instant::now() + timeout;
        let mut error = self.state.lock();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if error.is_some() || left.is_zero() {
                return *error;
            }
            error = match self.state.changed.wait_timeout(error, left) {
                Ok((error, _)) => error,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    fn remaining_memory_limit(&self) -> Option<u64> {
        self.limit.map(|limit| limit.saturating_sub(self.overhead + self.allocated.load(Ordering::Relaxed)))
    }

    fn notify(&self, message: &ToContext) -> Result<(), i32> {
        match self.error() {
            Some(code) => Err(code),
            None => wire::send(&self.channel, message).map_err(|_| self.error().unwrap_or(CUDA_ERROR_MPS_RPC_FAILURE)),
        }
    }

    /// Sends a request, and returns the free memory from the answer, in bytes.
    fn request_free_memory(&self, message: &ToContext) -> Result<u64, i32> {
        let replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        self.notify(message)?;
        match replies.recv() {
            Ok(FromContext::Memory { free }) => Ok(free),
            Ok(FromContext::Error(code)) => Err(self.error().unwrap_or(code)),
            _ => Err(self.error().unwrap_or(CUDA_ERROR_MPS_RPC_FAILURE)),
        }
    }
}

impl Drop for MpsContext {
    fn drop(&mut self) {
        // Ignore errors, because the server may have exited.
        let _ = wire::send(&self.channel, &ToContext::Goodbye);
        self.channel.shutdown();
    }
}

/// Stores the first error that breaks a context.
#[derive(Debug, Default)]
struct FirstError {
    error: Mutex<Option<i32>>,
    changed: Condvar,
}

impl FirstError {
    fn lock(&self) -> MutexGuard<'_, Option<i32>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_if_first(&self, code: i32) {
        self.lock().get_or_insert(code);
        self.changed.notify_all();
    }
}

/// Reads the server's messages to a context, answers and notifications, until the connection
/// closes.
fn read_messages(socket: &Connection, state: &FirstError, answers: &Sender<FromContext>) {
    let end = loop {
        match wire::recv(socket) {
            Ok(Some(FromContext::Broken(code))) => state.set_if_first(code),
            Ok(Some(FromContext::Terminate)) => {
                state.set_if_first(CUDA_ERROR_MPS_CLIENT_TERMINATED);
                if wire::send(socket, &ToContext::Terminated).is_err() {
                    break CUDA_ERROR_MPS_RPC_FAILURE;
                }
            }
            Ok(Some(answer)) => {
                // Ignore errors, because the context may have been dropped.
                let _ = answers.send(answer);
            }
            Ok(None) | Err(_) => break CUDA_ERROR_MPS_RPC_FAILURE,
        }
    };
    state.set_if_first(end);
}

fn own_command_name() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    path.to_string_lossy().into_owned()
}

fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}
