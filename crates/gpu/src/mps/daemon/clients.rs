//! The clients of one server: the clients that MPS lists, and the clients that a door admitted.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::mps::process::PidFd;
use crate::mps::wire::Client;

/// Maximum time from the detection of a client's exit until MPS logs the exit. After this time, the
/// MPS host no longer expects the log line.
const MAX_EXIT_LOG_DELAY: Duration = Duration::from_millis(500);

/// A client that a door admitted.
#[derive(Debug)]
struct AdmittedClient {
    allocation: String,
    pidfd: Option<PidFd>,
    identity: PidFdIdentity,
    /// When the client's exit was detected. The entry remains until MPS has also logged the exit.
    exited_at: Option<Instant>,
}

/// Whether the pidfd is proven to refer to the client. The PID may be reused between the client's
/// first packet at the door and the opening of the pidfd. The kernel attests the PID to the server
/// only later. Therefore, if MPS first lists the PID after the pidfd was opened, the pidfd refers
/// to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PidFdIdentity {
    /// MPS listed the PID before the pidfd was opened, so the list proves nothing.
    Unprovable,
    /// MPS has not listed the PID yet.
    Unproven,
    /// MPS first listed the PID after the pidfd was opened.
    Proven,
}

impl AdmittedClient {
    fn has_exited(&self) -> bool {
        self.pidfd.as_ref().is_none_or(PidFd::has_exited)
    }
}

/// A server's clients.
#[derive(Debug, Default)]
pub(super) struct Clients {
    /// PIDs in MPS's latest list, and PIDs of clients admitted since that list.
    listed: BTreeSet<u32>,
    admitted: BTreeMap<u32, AdmittedClient>,
    /// Clients with contexts that MPS has terminated. When these clients exit, they break no other
    /// client.
    terminated: BTreeSet<u32>,
}

impl Clients {
    /// Registers a client of an allocation. A program that connects several times is registered
    /// once.
    pub(super) fn admit(&mut self, pid: u32, allocation: &str, pidfd: Option<PidFd>) {
        let is_new = self.listed.insert(pid);
        if let Some(admitted) = self.admitted.get_mut(&pid).filter(|admitted| !admitted.has_exited()) {
            // Change only the allocation, and keep the pidfd of the program's first connection.
            allocation.clone_into(&mut admitted.allocation);
        } else {
            let identity = if is_new { PidFdIdentity::Unproven } else { PidFdIdentity::Unprovable };
            let allocation = allocation.to_owned();
            self.admitted.insert(pid, AdmittedClient { allocation, pidfd, identity, exited_at: None });
        }
    }

    /// Records the PIDs that MPS lists. Returns whether the list has changed.
    pub(super) fn set_listed_pids(&mut self, pids: BTreeSet<u32>) -> bool {
        for (pid, admitted) in &mut self.admitted {
            if admitted.identity == PidFdIdentity::Unproven && pids.contains(pid) {
                admitted.identity = PidFdIdentity::Proven;
            }
        }
        let changed = self.listed != pids;
        self.listed = pids;
        changed
    }

    /// Removes a client after MPS has logged its exit.
    pub(super) fn remove_disconnected(&mut self, pid: u32) {
        self.admitted.remove(&pid);
        self.terminated.remove(&pid);
    }

    /// Removes all clients, because their server has exited. Returns whether MPS had listed a
    /// client.
    pub(super) fn remove_all(&mut self) -> bool {
        let had_listed = !self.listed.is_empty();
        *self = Self::default();
        had_listed
    }

    /// Marks a client as terminated by MPS.
    pub(super) fn mark_terminated(&mut self, pid: u32) {
        self.terminated.insert(pid);
    }

    /// Reverts [`Clients::mark_terminated`].
    pub(super) fn unmark_terminated(&mut self, pid: u32) {
        self.terminated.remove(&pid);
    }

    /// Returns whether MPS terminated the client's contexts.
    pub(super) fn is_terminated(&self, pid: u32) -> bool {
        self.terminated.contains(&pid)
    }

    /// Returns the allocation whose door admitted a client, if any.
    pub(super) fn allocation_of(&self, pid: u32) -> Option<String> {
        self.admitted.get(&pid).map(|admitted| admitted.allocation.clone())
    }

    /// Returns a client with its allocation.
    pub(super) fn client(&self, pid: u32) -> Client {
        Client { pid, allocation: self.allocation_of(pid) }
    }

    /// Returns the clients that MPS lists.
    pub(super) fn listed_clients(&self) -> Vec<Client> {
        self.listed.iter().map(|&pid| self.client(pid)).collect()
    }

    /// Returns all clients, including those that MPS does not list yet or no longer lists.
    pub(super) fn all_clients(&self) -> Vec<Client> {
        self.listed_and_admitted_pids().into_iter().map(|pid| self.client(pid)).collect()
    }

    /// Removes a client that has exited from the clients that MPS listed at the last probe. Returns
    /// whether MPS had listed the client.
    pub(super) fn remove_listed(&mut self, pid: u32) -> bool {
        self.listed.remove(&pid)
    }

    /// Returns the number of all clients.
    pub(super) fn count_clients(&self) -> usize {
        self.listed_and_admitted_pids().len()
    }

    /// Returns the PIDs of all clients that MPS lists or a door admitted.
    fn listed_and_admitted_pids(&self) -> BTreeSet<u32> {
        self.listed.iter().chain(self.admitted.keys()).copied().collect()
    }

    /// Returns the running clients that may be signalled: a door admitted them, MPS lists them, and
    /// their identity is proven.
    pub(super) fn signalable_clients(&self) -> impl Iterator<Item = (Client, &PidFd)> {
        self.admitted.iter().filter_map(|(&pid, admitted)| {
            let pidfd = admitted.pidfd.as_ref().filter(|pidfd| {
                admitted.identity == PidFdIdentity::Proven && self.listed.contains(&pid) && !pidfd.has_exited()
            })?;
            Some((Client { pid, allocation: Some(admitted.allocation.clone()) }, pidfd))
        })
    }

    /// Returns the number of an allocation's running clients other than `pid`.
    pub(super) fn count_other_clients(&self, allocation: &str, pid: u32) -> usize {
        let is_other = |&(&other, admitted): &(&u32, &AdmittedClient)| {
            other != pid && admitted.allocation == allocation && admitted.exited_at.is_none()
        };
        self.admitted.iter().filter(is_other).count()
    }

    /// Removes each client whose exit was detected at least [`MAX_EXIT_LOG_DELAY`] ago, and each
    /// client without a pidfd.
    pub(super) fn forget_exited(&mut self, now: Instant) {
        self.admitted.retain(|_, admitted| {
            !admitted.has_exited()
                || (admitted.pidfd.is_some()
                    && now.saturating_duration_since(*admitted.exited_at.get_or_insert(now)) < MAX_EXIT_LOG_DELAY)
        });
    }

    /// Returns whether MPS may still log the exit of a client that has exited.
    pub(super) fn has_unlogged_exit(&self) -> bool {
        self.admitted.values().any(|admitted| admitted.exited_at.is_some())
    }
}
