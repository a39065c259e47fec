//! The door of an allocation: the control socket that its containers see.
//!
//! A client connects here. What it says is taken from it first, as long as it may take; then, under the device's gate, the server is told
//! the allocation's limits, the daemon is given the client's handshake in its place, and the client is handed the socket to the server.
//! The gate stays closed until the server has taken the client in, or is known not to: the limits bind at that moment, and the daemon and
//! its server wait for one client at a time, without a deadline of their own. So the daemon itself never waits for a client.
//!
//! Nor does the server. Driver 580's waits for ever where a client leaves before it has said its words, and on a socket that was shut down
//! nobody can say them any more; shutting down is a thing of the connection, which every holder can do to it. So the socket to the server
//! stays here, and the client is handed one end of a connection to the door, which passes on what is said. Whatever a client does to that
//! end, the words can be said in its place.
use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, UnixCredentials};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::control::{self, ControlError, Introduced};
use super::daemon::{Device, Failure, Gate, Limits, Phase};
use super::host::Host;
use super::process::Hold;
use super::protocol::{self, Command, Kind, ServerState};
use super::seqpacket::{Credentials, Listener, Packet, Socket};
use super::wire::{Allocation, AllocationStatus, Door as Enforcement};

/// How long a client may take to say who it is. Nobody else waits for it then.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// How long the server may wait for a client that was handed its socket; nobody else can connect to this GPU meanwhile. A client takes 1 ms,
/// 50 ms where the server makes its contexts anew; a throttled container some of its periods of 100 ms.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// After clients of an allocation that let the server wait: half as long for each, until one does not.
const SHORTEST: Duration = Duration::from_millis(250);
/// Between two tries for a client that could not be let in although the daemon seems well.
const RETRY: Duration = Duration::from_millis(100);
/// Connections of one allocation that are looked after at once, a few more than it can have clients. The others wait in the kernel's queue,
/// where their `connect` blocks.
const CONNECTIONS: usize = 64;
/// Connections of one allocation to its server: a client has two or three, and a GPU's 48 contexts are all that there are.
const PLACES: usize = 256;
/// A relayed connection to an unknown driver ends when nothing has passed for so long.
const IDLE: Duration = Duration::from_secs(600);
/// After a failed `accept`: descriptors may be short, and come free again.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// What came of a try to let a client in.
#[derive(Debug)]
enum Admission {
    /// It is the server's client, under its allocation's limits.
    Admitted,
    /// It reached the server, which refused it: a `CUresult`.
    Failed(u32),
    /// Not now: it waits.
    Held,
    /// It closed the connection, or died.
    Left,
    /// It will not be let in.
    Refused(String),
}

/// An open door.
#[derive(Debug)]
pub(crate) struct Door {
    id: String,
    path: PathBuf,
    host: Rc<Host>,
    device: Rc<Device>,
    allocation: RefCell<Allocation>,
    admitted: Cell<u64>,
    refused: Cell<u64>,
    waiting: Cell<u32>,
    /// The socket in the file system: somebody may remove it.
    inode: Cell<Option<(u64, u64)>>,
    connections: Arc<Semaphore>,
    places: Arc<Semaphore>,
    /// One client of an allocation at a time stands before the gate: however many it sends, the others' turn is next.
    turn: Mutex<()>,
    /// Clients in a row that let the server wait in vain.
    stalled: Cell<u32>,
    /// Tells the listener that another has taken its place.
    replaced: RefCell<CancellationToken>,
    closed: CancellationToken,
}

impl Door {
    /// Opens the door of an allocation.
    pub(crate) fn open(id: &str, allocation: &Allocation, device: Rc<Device>, host: &Rc<Host>) -> io::Result<Rc<Self>> {
        let door = Rc::new(Self {
            id: id.to_owned(),
            path: host.paths.door(id),
            host: Rc::clone(host),
            device,
            allocation: RefCell::new(allocation.clone()),
            admitted: Cell::default(),
            refused: Cell::default(),
            waiting: Cell::default(),
            inode: Cell::default(),
            connections: Arc::new(Semaphore::new(CONNECTIONS)),
            places: Arc::new(Semaphore::new(PLACES)),
            turn: Mutex::default(),
            stalled: Cell::default(),
            replaced: RefCell::default(),
            closed: CancellationToken::new(),
        });
        door.listen()?;
        Ok(door)
    }

    /// Limits for clients that come from now on.
    pub(crate) fn limit(&self, allocation: &Allocation) {
        *self.allocation.borrow_mut() = allocation.clone();
    }

    /// Whether it leads to this device.
    pub(crate) fn is_of(&self, device: &str) -> bool {
        self.device.name == device
    }

    /// Counts since the door was opened.
    pub(crate) fn status(&self) -> AllocationStatus {
        AllocationStatus { admitted: self.admitted.get(), refused: self.refused.get(), waiting: self.waiting.get() }
    }

    /// Whether clients of the allocation would be let in now.
    pub(crate) fn is_ready(&self) -> Result<(), String> {
        let phase = *self.device.phase().borrow();
        if phase.is_open() {
            Ok(())
        } else {
            Err(format!("the MPS daemon of {} is {:?}", self.device.name, phase.state))
        }
    }

    /// Closes it: clients that wait at it are sent away.
    pub(crate) fn close(&self) {
        self.closed.cancel();
        let listens_here = self.inode.get().is_some() && self.found() == self.inode.get();
        if listens_here && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(allocation = self.id, %error, "the door's socket cannot be removed");
        }
    }

    /// Listens again where the socket was removed.
    pub(crate) fn keep(self: &Rc<Self>) {
        if self.found() == self.inode.get() {
            return;
        }
        tracing::warn!(allocation = self.id, path = %self.path.display(), "the door's socket is gone: made anew");
        if let Err(error) = self.listen() {
            tracing::error!(allocation = self.id, %error, "the door's socket cannot be made");
        }
    }

    fn found(&self) -> Option<(u64, u64)> {
        std::fs::symlink_metadata(&self.path).ok().map(|found| (found.dev(), found.ino()))
    }

    fn listen(self: &Rc<Self>) -> io::Result<()> {
        if let Some(directory) = self.path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let listener = Listener::bind(&self.path)?;
        self.inode.set(self.found());
        let replaced = CancellationToken::new();
        self.replaced.replace(replaced.clone()).cancel();
        let door = Rc::clone(self);
        tokio::task::spawn_local(async move {
            tokio::select! {
                () = door.closed.cancelled() => {}
                () = door.accept(&listener, &replaced) => {}
            }
        });
        Ok(())
    }

    async fn accept(self: &Rc<Self>, listener: &Listener, replaced: &CancellationToken) {
        let mut told = false;
        loop {
            // Before a connection is taken: without one it stays in the kernel's queue.
            let Ok(permit) = Arc::clone(&self.connections).acquire_owned().await else { return };
            let Ok(among_all) = Arc::clone(&self.host.connections).acquire_owned().await else { return };
            let accepted = tokio::select! {
                biased;
                accepted = listener.accept() => accepted,
                // Only once nobody is left in the queue: their next try will find the new socket.
                () = replaced.cancelled() => return,
            };
            match accepted {
                Ok(client) => {
                    told = false;
                    let served = Rc::clone(self).serve(client);
                    tokio::task::spawn_local(async move {
                        served.await;
                        drop((permit, among_all));
                    });
                }
                Err(error) => {
                    if !told {
                        tracing::error!(allocation = self.id, %error, "no connection can be accepted: clients wait");
                        told = true;
                    }
                    sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    async fn serve(self: Rc<Self>, client: Socket) {
        let Ok(peer) = client.peer() else { return };
        if self.device.phase().borrow().door == Enforcement::Advisory {
            tokio::select! {
                () = self.closed.cancelled() => {}
                () = self.relay(&client) => {}
            }
            return;
        }
        let introduced = tokio::select! {
            () = self.closed.cancelled() => return,
            introduced = timeout(INTRODUCTION, introduction(&client, peer)) => introduced,
        };
        let refused = match introduced {
            Ok(Introduction::Client(who)) => self.wait(&client, who).await,
            // Each client's first connection looks only whether somebody is there.
            Ok(Introduction::Closed) => None,
            Ok(Introduction::Refused(why)) => Some(why),
            Err(_) => Some("it did not say who it is in time".to_owned()),
        };
        if let Some(why) = refused {
            tracing::warn!(allocation = self.id, pid = peer.pid, uid = peer.uid, why, "refused at the door");
            self.refused.set(self.refused.get() + 1);
            self.host.changed();
        }
    }

    /// Lets a client in as soon as that can be; returns why it will not be.
    async fn wait(&self, client: &Socket, who: Credentials) -> Option<String> {
        // Held from here on: its pid means this process even if it ends.
        let mut hold = Hold::of(who.pid);
        let waiting = Waiting::new(self);
        loop {
            let mut phase = self.device.phase();
            let open = phase.borrow().is_open();
            if !open {
                waiting.tell();
                tokio::select! {
                    () = self.closed.cancelled() => return None,
                    () = client.stirs() => return None,
                    open = phase.wait_for(Phase::is_open) => if open.is_err() { return None },
                }
            }
            match self.admit(client, who, &mut hold).await {
                Admission::Admitted => {
                    tracing::debug!(allocation = self.id, pid = who.pid, uid = who.uid, "let in");
                    self.admitted.set(self.admitted.get() + 1);
                    self.host.changed();
                    return None;
                }
                Admission::Failed(code) => {
                    tracing::warn!(allocation = self.id, pid = who.pid, code, "the MPS server refused a client");
                    return None;
                }
                Admission::Left => return None,
                Admission::Refused(why) => return Some(why),
                Admission::Held => {
                    waiting.tell();
                    tokio::select! {
                        () = self.closed.cancelled() => return None,
                        () = client.stirs() => return None,
                        () = sleep(RETRY) => {}
                    }
                }
            }
        }
    }

    /// Once the gate is passed, this is carried through to its end: the server may wait for the client.
    async fn admit(&self, client: &Socket, who: Credentials, hold: &mut Option<Hold>) -> Admission {
        let both = async {
            let turn = self.turn.lock().await;
            (turn, self.device.gate().await)
        };
        let (_turn, mut gate) = tokio::select! {
            () = self.closed.cancelled() => return Admission::Left,
            () = client.stirs() => return Admission::Left,
            both = both => both,
        };
        self.device.told_of_the_dead().await;
        if self.device.must_renew() {
            self.device.look_now();
            return Admission::Held;
        }
        if !self.device.phase().borrow().is_open() {
            return Admission::Held;
        }
        let most = self.allocation.borrow().max_clients;
        if let Some(most) = most.filter(|&most| self.device.is_full(&self.id, most, who.pid)) {
            return Admission::Refused(format!("the allocation has its {most} clients"));
        }
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            return Admission::Refused(format!("the allocation has its {PLACES} connections"));
        };
        let Ok(among_all) = Arc::clone(&self.host.places).try_acquire_owned() else { return Admission::Held };
        let server = match self.prepare(&mut gate, who).await {
            Ok(Some(server)) => server,
            Ok(None) => return Admission::Held,
            Err(failure) => {
                tracing::warn!(allocation = self.id, error = %failure, "a client waits: its limits could not be set");
                self.device.suspect(&failure);
                return Admission::Held;
            }
        };
        let introduced = match control::introduce(&self.device.pipe, who).await {
            Ok(introduced) => introduced,
            Err(ControlError::ClientGone) => return Admission::Left,
            Err(ControlError::Unknown) => {
                self.device.unknown_handshake();
                return Admission::Refused("the MPS daemon answered its handshake with something unknown".to_owned());
            }
            Err(error) => {
                tracing::warn!(allocation = self.id, %error, "a client waits: the MPS daemon did not take it");
                self.device.suspect(&error.into());
                return Admission::Held;
            }
        };
        self.hand_over(client, who, hold, introduced, server, (place, among_all)).await
    }

    /// Makes the server ready for whoever of this allocation connects next. `None`: not now.
    async fn prepare(&self, gate: &mut Gate, who: Credentials) -> Result<Option<u32>, Failure> {
        let Some(server) = self.device.server_for(who.uid).await? else { return Ok(None) };
        match protocol::server_state(&self.device.ask(&Command::ServerStatus(server)).await?)? {
            ServerState::Active => {}
            ServerState::Fault => {
                self.device.faulted();
                return Ok(None);
            }
            ServerState::Initializing | ServerState::Gone => {
                self.device.look_now();
                return Ok(None);
            }
        }
        let limits = {
            let allocation = self.allocation.borrow();
            Limits { threads: allocation.threads.unwrap_or(100), memory_mib: allocation.memory_mib }
        };
        self.device.limit(gate, server, limits).await?;
        Ok(Some(server))
    }

    /// Hands a client its end of the connection to the server, and sees to it that the server is done with it.
    async fn hand_over(
        &self,
        client: &Socket,
        who: Credentials,
        hold: &mut Option<Hold>,
        introduced: Introduced,
        server: u32,
        place: (OwnedSemaphorePermit, OwnedSemaphorePermit),
    ) -> Admission {
        let Introduced { server: socket, daemon } = introduced;
        let deadline = (HANDSHAKE / (1 << self.stalled.get().min(8))).max(SHORTEST);
        let (mut passing, far) = match socket.try_clone().and_then(Socket::in_place_of) {
            Ok((to_server, to_client, far)) => {
                let passing = async move {
                    pass(&to_client, &to_server).await;
                    drop(place);
                };
                (Some(tokio::task::spawn_local(passing)), Some(far))
            }
            Err(error) => {
                tracing::error!(allocation = self.id, %error, "a client cannot be connected to its server");
                (None, None)
            }
        };
        let handshake = async {
            let (far, passing) = (far?, passing.as_mut()?);
            client.send_descriptor(protocol::DESCRIPTOR, far.as_fd()).await.ok()?;
            // The client's alone from here on: with it goes the connection.
            drop(far);
            tokio::select! {
                biased;
                word = client.recv() => word.ok()?,
                // One that has closed it may have its last word on the way.
                _ = passing => timeout(SHORTEST, client.recv()).await.ok()?.ok()?,
            }
        };
        let word = timeout(deadline, handshake).await.ok().flatten();
        let word = word.and_then(|packet| <[u8; 4]>::try_from(packet.data.as_slice()).ok());
        // Ended before anything is said in the client's place: nothing that it still says comes in between.
        let cut = || {
            if let Some(passing) = &passing {
                passing.abort();
            }
        };
        if word.is_none() {
            cut();
            speak_for(&socket, who);
        }
        daemon.finish(&word.unwrap_or(protocol::DONE)).await;
        // Answered only once the server has taken the client in, whatever the client says: what is set next is not this one's.
        let mut through = self.device.ask(&Command::ServerStatus(server)).await;
        let lied = word.is_some() && matches!(through, Err(ControlError::Hung { .. }));
        if lied {
            cut();
            speak_for(&socket, who);
            through = self.device.ask(&Command::ServerStatus(server)).await;
        }
        if let Err(error) = through {
            tracing::warn!(allocation = self.id, pid = who.pid, %error, "the MPS server did not take a client in");
            self.device.suspect(&error.into());
        }
        match word.map(u32::from_le_bytes) {
            Some(0) if !lied => {
                self.stalled.set(0);
                self.device.admitted(who.pid, &self.id, hold.take());
                Admission::Admitted
            }
            Some(code) if !lied => {
                // Whoever only says so would be a client of the server that nobody has counted.
                cut();
                let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
                Admission::Failed(code)
            }
            _ => {
                // Connected by the words that were said for it: nothing that it still does may count.
                let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
                if hold.as_ref().is_none_or(Hold::has_ended) {
                    Admission::Left
                } else {
                    self.stalled.set(self.stalled.get().saturating_add(1));
                    Admission::Refused("it stopped in the middle of its handshake".to_owned())
                }
            }
        }
    }

    /// Passes everything on untouched, between a client and a daemon whose handshake is unknown here.
    async fn relay(&self, client: &Socket) {
        let waiting = Waiting::new(self);
        let mut phase = self.device.phase();
        if !phase.borrow().is_open() {
            waiting.tell();
        }
        if phase.wait_for(Phase::is_open).await.is_err() {
            return;
        }
        drop(waiting);
        let Ok(daemon) = Socket::connect(&self.device.pipe.join("control")).await else { return };
        loop {
            let passed = tokio::select! {
                packet = client.recv_credentials() => match packet {
                    Ok(Some(packet)) => match packet.credentials {
                        Some(who) => daemon.send_credentials(&packet.data, who).await,
                        None => daemon.send(&packet.data).await,
                    },
                    _ => return,
                },
                packet = daemon.recv_descriptor() => match packet {
                    Ok(Some(packet)) => match packet.descriptor {
                        Some(descriptor) => {
                            self.admitted.set(self.admitted.get() + 1);
                            self.host.changed();
                            client.send_descriptor(&packet.data, descriptor.as_fd()).await
                        }
                        None => client.send(&packet.data).await,
                    },
                    _ => return,
                },
                () = sleep(IDLE) => return,
            };
            if passed.is_err() {
                return;
            }
        }
    }
}

/// Counts a client among those that wait, once it was told that it does.
struct Waiting<'a> {
    door: &'a Door,
    told: Cell<bool>,
}

impl<'a> Waiting<'a> {
    fn new(door: &'a Door) -> Self {
        Self { door, told: Cell::new(false) }
    }

    fn tell(&self) {
        if !self.told.replace(true) {
            self.door.waiting.set(self.door.waiting.get() + 1);
            self.door.host.changed();
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.told.get() {
            self.door.waiting.set(self.door.waiting.get() - 1);
            self.door.host.changed();
        }
    }
}

/// What a connection turned out to be.
enum Introduction {
    Client(Credentials),
    Closed,
    Refused(String),
}

/// The daemon's part up to the kind, spoken here.
async fn introduction(client: &Socket, peer: Credentials) -> Introduction {
    if client.send(protocol::HELLO).await.is_err() {
        return Introduction::Closed;
    }
    let Ok(Some(packet)) = client.recv_credentials().await else { return Introduction::Closed };
    if packet.data != protocol::CREDENTIALS {
        return Introduction::Refused("it does not speak the handshake".to_owned());
    }
    let who = match packet.credentials {
        Some(who) if who.pid == 0 => {
            return Introduction::Refused(
                "it is in no pid namespace that the MPS host sees: hostPID is needed".to_owned(),
            );
        }
        // A process that may pass on another's credentials would be counted, and ended, as that other.
        Some(who) if who.pid != peer.pid => {
            return Introduction::Refused(format!("it gives itself out for process {}", who.pid));
        }
        Some(who) => who,
        None => return Introduction::Refused("it sent no credentials".to_owned()),
    };
    let Ok(Some(packet)) = client.recv_credentials().await else { return Introduction::Closed };
    match Kind::parse(&packet.data) {
        Kind::Client => Introduction::Client(who),
        Kind::Administrator => Introduction::Refused("administrators' commands are not for tenants".to_owned()),
        Kind::Unknown => Introduction::Refused("it is neither a client nor an administrator".to_owned()),
    }
}

/// Passes on what a client and its server say to each other, until one of them ends it. The server is told who speaks as the kernel attests
/// it here, once more: not whom the door took it for, nor, where nothing is attested, this process.
async fn pass(client: &Socket, server: &Socket) {
    let from_client = async {
        while let Ok(Some(Packet { data, credentials: Some(who), .. })) = client.recv_whole_credentials().await {
            tokio::select! {
                biased;
                sent = server.send_credentials(&data, who) => if sent.is_err() { return },
                // A server need not read any more, and its client's end is at the end of the queue.
                () = client.closed() => return,
            }
        }
    };
    let from_server = async {
        while let Ok(Some(Packet { data, descriptor, .. })) = server.recv_whole_descriptor().await {
            let sent = match descriptor {
                Some(descriptor) => client.send_descriptor(&data, descriptor.as_fd()).await,
                None => client.send(&data).await,
            };
            if sent.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = from_client => {}
        () = from_server => {}
    }
}

/// Says a client's words to the server in its place. Never waits.
fn speak_for(socket: &OwnedFd, who: Credentials) {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let say = |word: &[u8], who: Option<Credentials>| {
        let ucred = who.map(|who| {
            let pid = i32::try_from(who.pid).unwrap_or(0);
            UnixCredentials::from(nix::libc::ucred { pid, uid: who.uid, gid: who.gid })
        });
        let control: Vec<ControlMessage<'_>> = ucred.iter().map(ControlMessage::ScmCredentials).collect();
        nix::sys::socket::sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(word)], &control, flags, None)
    };
    let [first, rest @ ..] = protocol::INTRODUCTION;
    // The kernel passes on only credentials of somebody who lives.
    let said = say(first, Some(who)).or_else(|_| say(first, Some(Credentials::own())));
    for word in rest {
        if said.is_ok() {
            let _ = say(word, None);
        }
    }
}
