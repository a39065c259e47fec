//! The door of an allocation: the control socket that its containers see.
//!
//! A client connects here. The door first receives the client's whole introduction, within a time
//! limit, so that the daemon never waits for a client. Then the door acquires the device's
//! [`ControlLock`] and sets the server's limits to the allocation's limits. The door introduces the
//! client to the daemon, and passes the client its connection to the server. The door holds the
//! lock until the server has accepted the client or can no longer accept it. The server applies the
//! limits when it accepts a client. The daemon and its server handle one client at a time without a
//! deadline.
//!
//! The server must not wait for a client. Driver 580's server waits forever if a client disconnects
//! before it has introduced itself. The door can introduce the client on the client's behalf, but
//! not on a socket that the client has shut down. A shutdown affects all processes that share the
//! socket. The door therefore keeps the server's socket. The client receives one end of a
//! connection to the door, and the door relays packets both ways.
//!
//! [`ControlLock`]: super::daemon::ControlLock
mod admission;
mod handshake;
mod relay;

use std::cell::{Cell, RefCell};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::context::HostContext;
use super::daemon::Device;
use super::error::NotReady;
use super::seqpacket::Listener;
use super::wire::{Allocation, AllocationStatus};

/// Maximum number of connections that a door serves at the same time, slightly more than the 48
/// clients of a server. Further connections stay in the kernel's queue, and their clients wait for
/// the door's greeting.
const MAX_DOOR_CONNECTIONS: usize = 64;
/// Maximum number of connections of one allocation to its server. A client has two or three
/// connections, and a GPU has at most 48 contexts.
const MAX_SERVER_CONNECTIONS: usize = 256;
/// Delay after a failed `accept`. Descriptors may be exhausted until a connection closes.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// An open door.
#[derive(Debug)]
pub(crate) struct Door {
    id: String,
    path: PathBuf,
    context: Rc<HostContext>,
    device: Rc<Device>,
    allocation: RefCell<Allocation>,
    admitted: Cell<u64>,
    refused: Cell<u64>,
    waiting: Cell<u32>,
    /// Device number and inode number of the socket's file. These numbers show whether the socket
    /// was removed from the file system.
    inode: Cell<Option<(u64, u64)>>,
    connections: Arc<Semaphore>,
    server_connections: Arc<Semaphore>,
    /// Held by the client of this allocation that waits for the device's control lock. At most one
    /// client per allocation waits for that lock, so allocations take turns.
    turn: Mutex<()>,
    /// Number of consecutive clients that did not complete their handshake.
    stalled: Cell<u32>,
    /// When a failure to open a pidfd was last logged.
    pidfd_error_logged: Cell<Option<Instant>>,
    /// Cancelled when a new listener replaces the current one.
    replaced: RefCell<CancellationToken>,
    closed: CancellationToken,
}

impl Door {
    /// Opens the door of an allocation.
    ///
    /// # Errors
    /// Returns an error if the door cannot listen at its socket.
    pub(crate) fn open(
        id: &str,
        allocation: &Allocation,
        device: Rc<Device>,
        context: &Rc<HostContext>,
    ) -> io::Result<Rc<Self>> {
        let door = Rc::new(Self {
            id: id.to_owned(),
            path: context.paths.door(id),
            context: Rc::clone(context),
            device,
            allocation: RefCell::new(allocation.clone()),
            admitted: Cell::default(),
            refused: Cell::default(),
            waiting: Cell::default(),
            inode: Cell::default(),
            connections: Arc::new(Semaphore::new(MAX_DOOR_CONNECTIONS)),
            server_connections: Arc::new(Semaphore::new(MAX_SERVER_CONNECTIONS)),
            turn: Mutex::default(),
            stalled: Cell::default(),
            pidfd_error_logged: Cell::default(),
            replaced: RefCell::default(),
            closed: CancellationToken::new(),
        });
        door.start_listening()?;
        Ok(door)
    }

    /// Sets the limits of clients that connect from now on.
    pub(crate) fn set_limits(&self, allocation: &Allocation) {
        *self.allocation.borrow_mut() = allocation.clone();
    }

    /// Returns whether the door belongs to the device.
    pub(crate) fn is_on_device(&self, device: &str) -> bool {
        self.device.name == device
    }

    /// Returns the door's counts since it was opened.
    pub(crate) fn status(&self) -> AllocationStatus {
        AllocationStatus { admitted: self.admitted.get(), refused: self.refused.get(), waiting: self.waiting.get() }
    }

    /// Checks whether the door would admit a client now.
    pub(crate) fn check_door_admits_clients(&self) -> Result<(), NotReady> {
        let phase = *self.device.subscribe_to_phase().borrow();
        if phase.is_open() {
            Ok(())
        } else {
            Err(NotReady::Daemon { device: self.device.name.clone(), state: phase.state })
        }
    }

    /// Closes the door and disconnects the clients that wait for admission.
    pub(crate) fn close(&self) {
        self.closed.cancel();
        let is_own = self.inode.get().is_some() && self.find_socket_inode() == self.inode.get();
        if is_own && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(allocation = self.id, %error, "failed to remove door socket");
        }
    }

    /// Listens again if the socket was removed from the file system.
    ///
    /// # Errors
    /// Returns an error if the door cannot listen at its socket.
    pub(crate) fn restore_socket(self: &Rc<Self>) -> io::Result<()> {
        if self.find_socket_inode() == self.inode.get() {
            return Ok(());
        }
        self.start_listening()?;
        tracing::warn!(allocation = self.id, path = %self.path.display(), "recreated a door socket that was removed");
        Ok(())
    }

    fn find_socket_inode(&self) -> Option<(u64, u64)> {
        std::fs::symlink_metadata(&self.path).ok().map(|found| (found.dev(), found.ino()))
    }

    fn start_listening(self: &Rc<Self>) -> io::Result<()> {
        if let Some(directory) = self.path.parent() {
            std::fs::create_dir_all(directory)?;
            self.context.label.apply(directory)?;
        }
        let listener = Listener::bind(&self.path, |path| self.context.label.apply(path))?;
        self.inode.set(self.find_socket_inode());
        let replaced = CancellationToken::new();
        self.replaced.replace(replaced.clone()).cancel();
        let door = Rc::clone(self);
        tokio::task::spawn_local(async move {
            tokio::select! {
                () = door.closed.cancelled() => {}
                () = door.accept_clients(&listener, &replaced) => {}
            }
        });
        Ok(())
    }

    /// Accepts clients until the listener is replaced.
    async fn accept_clients(self: &Rc<Self>, listener: &Listener, replaced: &CancellationToken) {
        let mut has_failed = false;
        loop {
            // Acquire a permit before `accept`: without a permit, a connection remains in the
            // kernel's queue.
            let Ok(permit) = Arc::clone(&self.connections).acquire_owned().await else { return };
            let Ok(shared_permit) = Arc::clone(&self.context.connections).acquire_owned().await else { return };
            let accepted = tokio::select! {
                biased;
                accepted = listener.accept() => accepted,
                // Stop only once the queue is empty. Later connections use the new socket.
                () = replaced.cancelled() => return,
            };
            match accepted {
                Ok(client) => {
                    has_failed = false;
                    let served = Rc::clone(self).serve_connection(client);
                    tokio::task::spawn_local(async move {
                        served.await;
                        drop((permit, shared_permit));
                    });
                }
                Err(error) => {
                    if !has_failed {
                        tracing::error!(allocation = self.id, %error, "failed to accept connections; clients wait");
                        has_failed = true;
                    }
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    fn count_admitted(&self) {
        self.admitted.set(self.admitted.get() + 1);
        self.context.notify_status_change();
    }

    fn count_refused(&self) {
        self.refused.set(self.refused.get() + 1);
        self.context.notify_status_change();
    }
}

/// Counts a connection as waiting, from [`WaitingConnection::start_waiting`] until this value is
/// dropped.
struct WaitingConnection<'a> {
    door: &'a Door,
    counted: Cell<bool>,
}

impl<'a> WaitingConnection<'a> {
    fn new(door: &'a Door) -> Self {
        Self { door, counted: Cell::new(false) }
    }

    fn start_waiting(&self) {
        if !self.counted.replace(true) {
            self.door.waiting.set(self.door.waiting.get() + 1);
            self.door.context.notify_status_change();
        }
    }
}

impl Drop for WaitingConnection<'_> {
    fn drop(&mut self) {
        if self.counted.get() {
            self.door.waiting.set(self.door.waiting.get() - 1);
            self.door.context.notify_status_change();
        }
    }
}
