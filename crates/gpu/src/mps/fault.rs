//! Fatal GPU errors of one device: whose it was and whom it hit, and what is done until the device serves again.
//!
//! In FAULT the contexts of all clients are lost, and the server lets nobody in until the last of those clients has exited. Whoever does not
//! exit by itself keeps the GPU from everybody else, and is ended: whatever policies say, for others' shares depend on it.
//!
//! A server in which a busy client was killed may look ACTIVE and break a later client: it makes way for another as soon as nobody uses it.
use std::cell::{Cell, RefCell};
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use super::daemon::{Device, Failure};
use super::decide::{Ladder, Rung};
use super::process::Child;
use super::protocol::{self, Command};
use super::wire::{Client, Fault};

/// The server's log is ahead of its state, by 0.13 s at most as measured: so long the log is believed against an ACTIVE.
const CONFIRM: Duration = Duration::from_secs(1);
/// A client that died in the midst of its work so long before a fault caused it: 0.1 to 0.23 s as measured.
const CAUSE: Duration = Duration::from_secs(2);
/// Log lines that belong to a fault may come so long after it.
const ECHO: Duration = Duration::from_secs(1);
/// How long a server without clients may take to end.
const END: Duration = Duration::from_secs(5);

/// A client that died with a context open.
#[derive(Debug)]
struct Lost {
    client: Client,
    at: Instant,
}

/// A fault that is not over.
#[derive(Debug)]
struct Current {
    began: Instant,
    ladder: Ladder,
    /// The server has said FAULT, not only its log.
    confirmed: bool,
    /// Pids that the log names.
    named: Vec<u32>,
}

/// The faults of a device.
#[derive(Debug, Default)]
pub(super) struct Faults {
    last: Option<Fault>,
    current: Option<Current>,
    ended: Option<Instant>,
    lost: Vec<Lost>,
}

impl Faults {
    /// A fault begins, unless one is under way.
    fn begin(&mut self, clients: Vec<Client>, now: Instant) -> bool {
        if self.current.is_some() {
            return false;
        }
        let cause: Vec<Client> = self
            .lost
            .drain(..)
            .filter(|lost| now.saturating_duration_since(lost.at) < CAUSE)
            .map(|lost| lost.client)
            .collect();
        let number = self.last.as_ref().map_or(0, |fault| fault.number) + 1;
        let mut affected = clients;
        // Where several died, any of them may be it.
        let culprit = if let [only] = cause.as_slice() { Some(only.clone()) } else { None };
        for client in cause {
            if !affected.iter().any(|known| known.pid == client.pid) {
                affected.push(client);
            }
        }
        let killed = culprit.is_some();
        self.last = Some(Fault { number, culprit, killed, affected, ..Fault::default() });
        self.current = Some(Current { began: now, ladder: Ladder::default(), confirmed: false, named: Vec::new() });
        true
    }

    /// The log says that it was this client's error. Where it says so of several, nobody knows whose came first; and where one died in the
    /// midst of its work, it names one that lives: on an H200 (driver 580) a neighbour in 47 of 47 faults that such a death caused.
    fn name(&mut self, pid: u32, allocation: Option<String>) {
        let (Some(fault), Some(current)) = (&mut self.last, &mut self.current) else { return };
        if current.named.contains(&pid) {
            return;
        }
        current.named.push(pid);
        let known = fault.affected.iter().find(|client| client.pid == pid).cloned();
        let client = known.unwrap_or(Client { pid, allocation });
        if !fault.affected.contains(&client) {
            fault.affected.push(client.clone());
        }
        if !fault.killed {
            fault.culprit = (current.named.len() == 1).then_some(client);
        }
    }

    /// Whether a log line that names nobody is an echo of what is over.
    fn is_echo(&self, now: Instant) -> bool {
        self.current.is_none() && self.ended.is_some_and(|ended| now.saturating_duration_since(ended) < ECHO)
    }

    /// Whether an ACTIVE can be believed, with so many clients left.
    fn is_healed(&self, clients: usize, now: Instant) -> bool {
        let waits = |current: &Current| {
            !current.confirmed && clients > 0 && now.saturating_duration_since(current.began) < CONFIRM
        };
        !self.current.as_ref().is_some_and(waits)
    }

    /// It is over; how long it lasted.
    fn over(&mut self, now: Instant) -> Option<Duration> {
        let current = self.current.take()?;
        if let Some(fault) = &mut self.last {
            fault.over = true;
        }
        self.ended = Some(now);
        Some(now.saturating_duration_since(current.began))
    }
}

/// What is known of a device's faults, and whether its server has to make way.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    faults: RefCell<Faults>,
    /// A client died with a context open: the server may break a later one.
    unclean: Cell<bool>,
}

impl Trouble {
    pub(super) fn told(&self) -> Option<Fault> {
        self.faults.borrow().last.clone()
    }

    /// A server that serves anew, or another, knows nothing of those who died before.
    pub(super) fn fresh_server(&self) {
        self.unclean.set(false);
    }

    pub(super) fn is_current(&self) -> bool {
        self.faults.borrow().current.is_some()
    }

    /// Whether an end of the daemon is what was wanted of it.
    pub(super) fn is_replacing(&self) -> bool {
        self.faults.borrow().current.as_ref().is_some_and(|current| current.ladder.rung() >= Rung::Quit)
    }

    /// The log's word on a fatal error: whether there is a fault now.
    pub(super) fn logged(&self, device: &Device, client: Option<u32>) -> bool {
        let now = Instant::now();
        if client.is_none() && self.faults.borrow().is_echo(now) {
            return false;
        }
        self.begin(device, now);
        if let Some(pid) = client {
            let allocation = device.allocation_of(pid);
            let of = allocation.as_deref().unwrap_or("none").to_owned();
            self.faults.borrow_mut().name(pid, allocation);
            if self.told().is_some_and(|fault| !fault.killed) {
                device.set_message(&format!("a fatal GPU error: the log names client {pid} of allocation {of}"));
            }
        }
        device.host.changed();
        true
    }

    /// The server's own word.
    pub(super) fn confirmed(&self, device: &Device) {
        self.begin(device, Instant::now());
        if let Some(current) = &mut self.faults.borrow_mut().current {
            current.confirmed = true;
        }
    }

    fn begin(&self, device: &Device, now: Instant) {
        if self.is_current() {
            return;
        }
        if self.faults.borrow_mut().begin(device.told_clients(), now) {
            let fault = self.told().unwrap_or_default();
            let pids: Vec<u32> = fault.affected.iter().map(|client| client.pid).collect();
            tracing::error!(device = device.name, number = fault.number, clients = ?pids, "a fatal GPU error broke all clients");
            let message = match &fault.culprit {
                Some(client) => {
                    format!("client {} was killed while its kernels ran, which broke all others", client.pid)
                }
                None => "a fatal GPU error broke all clients".to_owned(),
            };
            device.set_message(&message);
            device.host.changed();
        }
    }

    /// Whether the server's ACTIVE means that it serves. If so, a fault is over.
    pub(super) fn healed(&self, device: &Device) -> bool {
        let now = Instant::now();
        if !self.faults.borrow().is_healed(device.clients(), now) {
            return false;
        }
        self.over(device, "the server serves again");
        true
    }

    /// A fault is over, one way or the other.
    pub(super) fn over(&self, device: &Device, how: &str) {
        let lasted = self.faults.borrow_mut().over(Instant::now());
        if let Some(lasted) = lasted {
            tracing::info!(device = device.name, ?lasted, how, "the fault is over");
            // It has made its contexts anew.
            self.unclean.set(false);
            device.host.changed();
        }
    }

    /// A client's context is gone that was not closed.
    pub(super) fn lost(&self, device: &Device, pid: u32) {
        // In FAULT they all end so.
        if self.is_current() {
            return;
        }
        let client = Client { pid, allocation: device.allocation_of(pid) };
        tracing::info!(device = device.name, pid, allocation = client.allocation, "a client died with a context open");
        self.unclean.set(true);
        let lost = &mut self.faults.borrow_mut().lost;
        let now = Instant::now();
        lost.retain(|lost| lost.client.pid != pid && now.saturating_duration_since(lost.at) < CAUSE);
        lost.push(Lost { client, at: now });
    }

    /// Takes the next step out of a fault, if it is time. Under the device's gate; takes no longer than the step's deadline.
    pub(super) async fn climb(&self, device: &Device, daemon: &Child) {
        let clients = device.clients();
        let (step, at) = {
            let mut faults = self.faults.borrow_mut();
            let Some(current) = &mut faults.current else { return };
            let at = current.began.elapsed();
            (current.ladder.climb(at, clients), at)
        };
        let Some(step) = step else { return };
        tracing::warn!(device = device.name, ?step, ?at, clients, "the server stays in FAULT");
        let message = match step {
            Rung::Wait => return,
            Rung::Terminate => {
                self.end(device, Signal::TERM);
                format!("in FAULT until {clients} clients exit: they were told to end")
            }
            Rung::Kill => {
                self.end(device, Signal::KILL);
                format!("in FAULT until {clients} clients exit: they were killed")
            }
            Rung::ShutDown => "in FAULT for too long: the server is shut down".to_owned(),
            Rung::Quit => "in FAULT for too long: the daemon is told to quit".to_owned(),
            Rung::Replace => {
                daemon.kill();
                "in FAULT for too long: the daemon was killed".to_owned()
            }
        };
        device.set_message(&message);
        let server = device.phase().borrow().server;
        let command = match (step, server) {
            (Rung::ShutDown, Some(server)) => Command::ShutdownServer { server, force: true },
            (Rung::Quit, _) => Command::Quit { seconds: 0 },
            _ => return,
        };
        if let Err(error) = device.ask_within(&command, step.deadline()).await {
            tracing::warn!(device = device.name, %error, ?step, "a step out of FAULT failed: the next will be taken");
        }
    }

    /// Sends a signal to the clients that hold the server in FAULT.
    fn end(&self, device: &Device, signal: Signal) {
        let signalled = device.signal_clients(signal);
        tracing::warn!(device = device.name, ?signal, clients = ?signalled, "clients that hold the server in FAULT are ended");
        let mut faults = self.faults.borrow_mut();
        let Some(fault) = &mut faults.last else { return };
        for client in signalled {
            if !fault.ended.contains(&client) {
                fault.ended.push(client);
            }
        }
        drop(faults);
        device.host.changed();
    }

    /// Whether the server may break a client, and nobody uses it.
    pub(super) fn must_renew(&self, device: &Device) -> bool {
        self.unclean.get() && device.phase().borrow().is_open() && device.clients() == 0
    }

    /// Has another server in the place of one that may break a client, where nobody uses it. Under the device's gate, so that doors wait;
    /// the shares stay what they are, for this takes no longer than a program's start.
    pub(super) async fn renew(&self, device: &Device) -> Result<(), Failure> {
        let phase = *device.phase().borrow();
        let Some(server) = phase.server.filter(|_| self.must_renew(device)) else { return Ok(()) };
        tracing::info!(
            device = device.name,
            server,
            "a client died in this server with a context open: another takes its place"
        );
        // From here on its end is no surprise.
        device.lost_server();
        device.ask_within(&Command::ShutdownServer { server, force: false }, END).await?;
        let deadline = Instant::now() + END;
        while protocol::pids(&device.ask(&Command::ServerList).await?)?.contains(&server) {
            if Instant::now() > deadline {
                return Err(Failure::NoServer { last: format!("server {server} does not end") });
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if phase.multi_user {
            let server = device.start_server(0).await?;
            device.serves(server);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(pid: u32) -> Client {
        Client { pid, allocation: Some(format!("{pid:02x}")) }
    }

    fn lost(pid: u32, at: Instant) -> Lost {
        Lost { client: client(pid), at }
    }

    fn culprit(faults: &Faults) -> Option<u32> {
        faults.last.as_ref()?.culprit.as_ref().map(|client| client.pid)
    }

    #[test]
    fn a_fault_is_one_from_its_first_sign_to_its_end() {
        let now = Instant::now();
        let mut faults = Faults::default();
        assert!(faults.begin(vec![client(1), client(2)], now));
        faults.name(2, None);
        assert!(!faults.begin(vec![client(1)], now + ECHO));
        assert_eq!(culprit(&faults), Some(2));
        assert_eq!(faults.last.as_ref().unwrap().affected, [client(1), client(2)]);
        assert!(!faults.last.as_ref().unwrap().killed);
        assert_eq!(faults.over(now + ECHO), Some(ECHO));
        assert!(faults.over(now + ECHO).is_none());
        assert!(faults.is_echo(now + ECHO * 3 / 2) && !faults.is_echo(now + ECHO * 2));
        faults.name(1, None);
        assert_eq!(culprit(&faults), Some(2), "what is over is told as it was");
        assert!(faults.begin(vec![], now + ECHO * 2));
        assert_eq!((faults.last.as_ref().unwrap().number, culprit(&faults)), (2, None));
    }

    #[test]
    fn nobody_is_blamed_where_several_may_be_it() {
        let now = Instant::now();
        let mut faults = Faults::default();
        faults.begin(vec![client(1), client(2)], now);
        faults.name(1, None);
        faults.name(1, None);
        assert_eq!(culprit(&faults), Some(1));
        faults.name(2, None);
        assert_eq!(culprit(&faults), None);
        let mut faults = Faults { lost: vec![lost(1, now), lost(2, now)], ..Faults::default() };
        faults.begin(vec![client(3)], now);
        assert_eq!(culprit(&faults), None);
        assert_eq!(faults.last.unwrap().affected.len(), 3);
    }

    #[test]
    fn a_client_that_was_killed_right_before_is_the_cause_whomever_the_log_names() {
        let now = Instant::now();
        let mut faults = Faults { lost: vec![lost(1, now)], ..Faults::default() };
        faults.begin(vec![client(2)], now + CAUSE / 2);
        assert_eq!((culprit(&faults), faults.last.as_ref().unwrap().killed), (Some(1), true));
        faults.name(2, None);
        assert_eq!(
            (culprit(&faults), faults.last.as_ref().unwrap().killed),
            (Some(1), true),
            "it names one that lives"
        );
        let mut faults = Faults { lost: vec![lost(1, now)], ..Faults::default() };
        faults.begin(vec![client(2)], now + CAUSE);
        assert_eq!(culprit(&faults), None, "long ago");
    }

    #[test]
    fn the_log_is_believed_for_a_while_against_an_active() {
        let now = Instant::now();
        let mut faults = Faults::default();
        assert!(faults.is_healed(3, now));
        faults.begin(vec![client(1)], now);
        assert!(!faults.is_healed(1, now + CONFIRM / 2));
        assert!(faults.is_healed(0, now + CONFIRM / 2), "who was hit has left");
        assert!(faults.is_healed(1, now + CONFIRM), "there was nothing");
        faults.current.as_mut().unwrap().confirmed = true;
        assert!(faults.is_healed(1, now), "it was FAULT, and is not");
    }
}
