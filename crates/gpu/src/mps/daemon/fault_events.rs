//! Records fault events and reports them in the daemon's status.
use tokio::time::Instant;

use super::Device;

impl Device {
    /// Records a log line about a fatal error. The line may name a client. Returns whether a fault
    /// is in progress.
    pub(super) fn record_logged_fault(&self, client: Option<u32>) -> bool {
        let now = Instant::now();
        if client.is_none() && self.faults.borrow().is_late_log_of_ended_fault(now) {
            return false;
        }
        self.begin_fault(now);
        if let Some(pid) = client {
            let allocation = self.clients.borrow().allocation_of(pid);
            let allocation_text = allocation.as_deref().unwrap_or("none").to_owned();
            self.faults.borrow_mut().record_named_client(pid, allocation);
            if self.faults.borrow().last_fault().is_some_and(|fault| !fault.killed) {
                self.set_message(&format!(
                    "a fatal GPU error: the log names client {pid} of allocation {allocation_text}"
                ));
            }
        }
        self.context.notify_status_change();
        true
    }

    /// Records that the server reports FAULT.
    pub(super) fn record_confirmed_fault(&self) {
        self.begin_fault(Instant::now());
        self.faults.borrow_mut().confirm_fault();
    }

    fn begin_fault(&self, now: Instant) {
        if self.faults.borrow().has_current_fault() {
            return;
        }
        let clients = self.clients.borrow().all_clients();
        if !self.faults.borrow_mut().begin_fault(clients, now) {
            return;
        }
        let fault = self.faults.borrow().last_fault().cloned().unwrap_or_default();
        let pids: Vec<u32> = fault.affected.iter().map(|client| client.pid).collect();
        tracing::error!(device = self.name, number = fault.number, clients = ?pids, "fatal GPU error");
        match &fault.culprit {
            Some(client) => self.set_message(&format!(
                "client {} was killed while its kernels ran, which broke all other clients",
                client.pid
            )),
            None => self.set_message("a fatal GPU error broke all clients"),
        }
        self.context.notify_status_change();
    }

    /// Records that the server reports ACTIVE. Ends the current fault unless the log has just
    /// reported that fault. Returns false if the fault continues.
    pub(super) fn record_active_server(&self) -> bool {
        let clients = self.clients.borrow().count_clients();
        if !self.faults.borrow().has_recovered(clients, Instant::now()) {
            return false;
        }
        self.end_fault("the MPS server recovered");
        true
    }

    /// Ends the current fault, if any.
    pub(super) fn end_fault(&self, reason: &'static str) {
        let lasted = self.faults.borrow_mut().end_fault(Instant::now());
        if let Some(lasted) = lasted {
            tracing::info!(device = self.name, ?lasted, reason, "fault is over");
            self.context.notify_status_change();
        }
    }

    /// Records a client that exited with an open context.
    pub(super) fn record_exit(&self, pid: u32) {
        // During a fault, all clients exit with open contexts.
        if self.faults.borrow().has_current_fault() {
            return;
        }
        let client = self.clients.borrow().client(pid);
        tracing::info!(device = self.name, pid, allocation = client.allocation, "client exited with an open context");
        self.faults.borrow_mut().record_exit(client, Instant::now());
        // Remove the client now. Otherwise MPS's last list would include the client until the next
        // probe, and a door would admit another client to this server. The next probe finds no
        // change, so report the change here.
        if self.clients.borrow_mut().remove_listed(pid) {
            self.context.notify_status_change();
        }
    }
}
