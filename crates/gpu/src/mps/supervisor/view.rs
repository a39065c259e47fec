//! What the MPS host knows about the process of one device, and what it reports of it. Pure.
use std::time::Duration;

use crate::mps::channel::DeviceStatus;
use crate::mps::wire::{DaemonState, DaemonStatus, Desired, Enforcement, Fault, MpsHostStatus};

/// Why the status of a device's process does not apply now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProcessProblem {
    /// State of the daemon to report.
    pub(super) state: DaemonState,
    /// What happened, as a clause for people.
    pub(super) message: String,
}

impl ProcessProblem {
    /// The process runs, but has not answered for `silence`.
    pub(super) fn no_answer(pid: u32, silence: Duration) -> Self {
        let message = format!(
            "process {pid} of the MPS host, which supervises this device, has not answered for {} s. \
            Running programs continue, but no program can start. If the process does not recover, end it with \
            `kill -9 {pid}` on the node. This ends the programs of this device only",
            silence.as_secs()
        );
        Self { state: DaemonState::Restarting, message }
    }
}

/// The process of one device, as the MPS host last observed it.
#[derive(Debug)]
pub(super) struct ProcessView {
    /// The part of the desired state, and its hash.
    part: Desired,
    hash: String,
    /// The last status. `None` before the first status.
    status: Option<MpsHostStatus>,
    /// Whether the status is that of the running process.
    is_current: bool,
    /// Whether nothing is left of an earlier process.
    cleaned_up: bool,
    problem: Option<ProcessProblem>,
    /// Whether the MPS host reports a desired file as applied although this process has not applied
    /// its part.
    is_behind: bool,
    earlier: EarlierProcesses,
}

/// Totals of the earlier processes of the device. A process counts from its own start, but the
/// agent expects counts since the start of the MPS host.
#[derive(Debug, Default)]
struct EarlierProcesses {
    restarts: u32,
    faults: u64,
    fault: Option<Fault>,
    message: String,
}

impl ProcessView {
    pub(super) fn new() -> Self {
        let part = Desired::default();
        Self {
            hash: part.hash(),
            part,
            status: None,
            is_current: false,
            cleaned_up: false,
            problem: None,
            is_behind: false,
            earlier: EarlierProcesses::default(),
        }
    }

    /// Sets the part of the desired state. Returns whether it has changed.
    pub(super) fn set_part(&mut self, part: Desired) -> bool {
        let changed = self.part != part;
        self.hash = part.hash();
        self.part = part;
        changed
    }

    /// Returns whether neither a daemon nor a door is desired.
    pub(super) fn is_undesired(&self) -> bool {
        self.part.daemons.is_empty() && self.part.allocations.is_empty()
    }

    /// Records a status of the running process.
    pub(super) fn record_status(&mut self, status: DeviceStatus) {
        self.status = Some(status.host);
        self.is_current = true;
        self.cleaned_up |= status.cleaned_up;
        self.problem = None;
        self.is_behind &= !self.has_applied_part();
    }

    /// Records that the running process answers. Returns whether this is news.
    pub(super) fn record_answer(&mut self) -> bool {
        // The problem of an earlier process remains until the new process reports.
        self.is_current && self.problem.take().is_some()
    }

    /// Records a problem of the running process. Returns whether this is news.
    pub(super) fn record_problem(&mut self, problem: ProcessProblem) -> bool {
        let before = self.problem.replace(problem);
        before != self.problem
    }

    /// Records that the process has failed and will be restarted.
    pub(super) fn record_failure(&mut self, problem: ProcessProblem, device: &str) {
        let fault = self.reported_fault(device);
        let daemon = self.current_daemon(device);
        self.earlier.restarts = self.earlier.restarts.saturating_add(daemon.map_or(0, |daemon| daemon.restarts) + 1);
        if let Some(fault) = fault {
            self.earlier.faults = fault.number;
            self.earlier.fault = Some(Fault { over: true, ..fault });
        }
        self.earlier.message.clone_from(&problem.message);
        self.is_current = false;
        self.cleaned_up = false;
        self.problem = Some(problem);
    }

    /// Records that the process has ended and has left nothing.
    pub(super) fn record_end(&mut self) {
        self.status = None;
        self.is_current = false;
        self.cleaned_up = true;
        self.problem = None;
    }

    /// Returns whether nothing is left of an earlier process.
    pub(super) fn is_cleaned_up(&self) -> bool {
        self.cleaned_up
    }

    /// Returns why the process cannot answer now.
    pub(super) fn problem(&self) -> Option<&ProcessProblem> {
        self.problem.as_ref()
    }

    /// Returns the clients of the last status.
    pub(super) fn clients(&self, device: &str) -> impl Iterator<Item = u32> {
        let daemon = self.status.as_ref().and_then(|status| status.daemons.get(device));
        daemon.into_iter().flat_map(|daemon| &daemon.clients).map(|client| client.pid)
    }

    /// Returns whether the process has applied its part of the desired state.
    pub(super) fn has_applied_part(&self) -> bool {
        self.is_current && self.status.as_ref().is_some_and(|status| status.desired == self.hash)
    }

    /// Returns whether the MPS host need not wait for this process before it reports a desired file
    /// as applied. If the process has not applied its part, the reported daemon is not Active until
    /// then.
    pub(super) fn accept_desired_file(&mut self) -> bool {
        let has_applied = self.has_applied_part();
        if !has_applied && self.problem.is_some() {
            self.is_behind = true;
        }
        has_applied || self.is_behind
    }

    /// Returns whether nothing is left to do for the process.
    pub(super) fn is_done(&self) -> bool {
        let is_empty = |status: &MpsHostStatus| {
            status.daemons.is_empty() && status.allocations.is_empty() && status.door_errors.is_empty()
        };
        let is_empty = self.status.as_ref().is_some_and(is_empty);
        self.is_undesired() && self.cleaned_up && self.problem.is_none() && self.has_applied_part() && is_empty
    }

    /// Adds the device to the status of the MPS host.
    pub(super) fn add_to(&self, whole: &mut MpsHostStatus, device: &str) {
        if let Some(daemon) = self.reported_daemon(device) {
            whole.daemons.insert(device.to_owned(), daemon);
        }
        // The doors of a process that has ended are closed.
        if let Some(status) = self.status.as_ref().filter(|_| self.is_current) {
            whole.allocations.extend(status.allocations.clone());
            whole.door_errors.extend(status.door_errors.clone());
        }
    }

    fn current_daemon(&self, device: &str) -> Option<&DaemonStatus> {
        self.status.as_ref().filter(|_| self.is_current)?.daemons.get(device)
    }

    /// Returns the daemon to report. A daemon that may still run is always reported, because the
    /// agent treats a GPU without a daemon as free.
    fn reported_daemon(&self, device: &str) -> Option<DaemonStatus> {
        let listed = self.status.as_ref().and_then(|status| status.daemons.get(device));
        let is_desired = self.part.daemons.contains_key(device);
        let is_reliable = self.is_current && self.cleaned_up && self.problem.is_none() && !self.is_behind;
        if listed.is_none() && (is_reliable || self.cleaned_up && !is_desired) {
            return None;
        }
        let mut daemon = listed.cloned().unwrap_or_else(unknown_daemon);
        if !is_reliable {
            let state = self.problem.as_ref().map(|problem| problem.state);
            let state = state.or((self.is_current || listed.is_some()).then_some(DaemonState::Restarting));
            daemon.state = match (is_desired, daemon.state) {
                (false, _) => DaemonState::Stopping,
                (true, DaemonState::BackOff | DaemonState::Fault) if self.problem.is_none() => daemon.state,
                (true, _) => state.unwrap_or(DaemonState::Starting),
            };
        }
        if let Some(problem) = &self.problem {
            daemon.message.clone_from(&problem.message);
        } else if daemon.message.is_empty() {
            daemon.message.clone_from(&self.earlier.message);
        }
        if self.is_current {
            daemon.restarts = daemon.restarts.saturating_add(self.earlier.restarts);
        } else {
            daemon.restarts = self.earlier.restarts;
        }
        daemon.fault = self.reported_fault(device);
        Some(daemon)
    }

    /// Returns the last fault, with its number since the start of the MPS host.
    fn reported_fault(&self, device: &str) -> Option<Fault> {
        let fault = self.current_daemon(device).and_then(|daemon| daemon.fault.clone());
        let counted = fault.map(|fault| Fault { number: fault.number + self.earlier.faults, ..fault });
        counted.or_else(|| self.earlier.fault.clone())
    }
}

/// Returns the status of a daemon of which nothing is known.
fn unknown_daemon() -> DaemonStatus {
    DaemonStatus {
        state: DaemonState::Starting,
        pid: None,
        server_pid: None,
        restarts: 0,
        enforcement: Enforcement::Hard,
        holds_clients: false,
        replies_unproven: false,
        message: String::new(),
        clients: Vec::new(),
        fault: None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::mps::wire::{DaemonSettings, FILE_FORMAT_VERSION};

    const DEVICE: &str = "GPU-a";

    fn part(threads: Option<u8>) -> Desired {
        let settings = DaemonSettings {
            multi_user: true,
            exclusive: false,
            default_threads: threads,
            default_memory_mib: None,
            accept_advisory: false,
        };
        Desired {
            version: FILE_FORMAT_VERSION,
            daemons: BTreeMap::from([(DEVICE.to_owned(), settings)]),
            ..Desired::default()
        }
    }

    fn no_part() -> Desired {
        Desired { version: FILE_FORMAT_VERSION, ..Desired::default() }
    }

    /// Returns the status of a process that has applied `part` and has an Active daemon.
    fn serving(part: &Desired, fault: Option<u64>) -> DeviceStatus {
        let fault = fault.map(|number| Fault { number, ..Fault::default() });
        let daemon = DaemonStatus { state: DaemonState::Active, pid: Some(7), fault, ..unknown_daemon() };
        let daemons = BTreeMap::from([(DEVICE.to_owned(), daemon)]);
        let host = MpsHostStatus { desired: part.hash(), daemons, ..MpsHostStatus::default() };
        DeviceStatus { host, cleaned_up: true }
    }

    fn serving_view() -> ProcessView {
        let mut view = ProcessView::new();
        view.set_part(part(None));
        view.record_status(serving(&part(None), None));
        view
    }

    fn exit() -> ProcessProblem {
        ProcessProblem { state: DaemonState::Restarting, message: "exited".to_owned() }
    }

    fn reported(view: &ProcessView) -> Option<DaemonStatus> {
        let mut whole = MpsHostStatus::default();
        view.add_to(&mut whole, DEVICE);
        whole.daemons.remove(DEVICE)
    }

    fn state(view: &ProcessView) -> Option<DaemonState> {
        reported(view).map(|daemon| daemon.state)
    }

    #[test]
    fn a_desired_file_waits_for_processes_that_answer_and_not_for_others() {
        let mut view = ProcessView::new();
        view.set_part(part(None));
        assert_eq!((view.accept_desired_file(), state(&view)), (false, Some(DaemonState::Starting)));
        view.record_status(serving(&part(None), None));
        assert_eq!((view.accept_desired_file(), state(&view)), (true, Some(DaemonState::Active)));
        view.set_part(part(Some(50)));
        assert!(!view.accept_desired_file(), "the process answers and will apply the settings soon");
        assert!(view.record_problem(ProcessProblem::no_answer(7, Duration::from_secs(5))));
        assert_eq!((view.accept_desired_file(), state(&view)), (true, Some(DaemonState::Restarting)));
        assert!(view.record_answer());
        assert_eq!(state(&view), Some(DaemonState::Restarting), "the old settings are in force");
        view.record_status(serving(&part(None), None));
        assert_eq!(state(&view), Some(DaemonState::Restarting), "the old settings are in force");
        view.record_status(serving(&part(Some(50)), None));
        assert_eq!(state(&view), Some(DaemonState::Active));
    }

    #[test]
    fn a_daemon_that_may_run_is_reported_until_a_process_has_cleaned_up() {
        let mut view = serving_view();
        view.record_failure(exit(), DEVICE);
        assert_eq!(state(&view), Some(DaemonState::Restarting));
        view.set_part(no_part());
        assert_eq!((view.accept_desired_file(), state(&view)), (true, Some(DaemonState::Stopping)));
        let mut empty = serving(&no_part(), None);
        empty.host.daemons.clear();
        view.record_status(DeviceStatus { cleaned_up: false, ..empty.clone() });
        assert_eq!((state(&view), view.is_done()), (Some(DaemonState::Stopping), false));
        view.record_status(empty);
        assert_eq!((state(&view), view.is_done()), (None, true));
        view.record_end();
        assert_eq!(state(&view), None);
    }

    #[test]
    fn counts_continue_after_a_restart_of_the_process() {
        let mut view = serving_view();
        view.record_status(serving(&part(None), Some(2)));
        view.record_failure(exit(), DEVICE);
        let between = reported(&view).unwrap();
        assert_eq!((between.restarts, between.message.as_str()), (1, "exited"));
        assert_eq!(between.fault.map(|fault| (fault.number, fault.over)), Some((2, true)));
        view.record_status(serving(&part(None), None));
        let after = reported(&view).unwrap();
        assert_eq!((after.restarts, after.message.as_str()), (1, "exited"));
        assert_eq!(after.fault.map(|fault| fault.number), Some(2));
        view.record_status(serving(&part(None), Some(1)));
        view.record_failure(exit(), DEVICE);
        let again = reported(&view).unwrap();
        assert_eq!((again.restarts, again.fault.map(|fault| fault.number)), (2, Some(3)));
    }

    #[test]
    fn a_process_that_does_not_answer_is_reported_once() {
        let mut view = serving_view();
        let silent = || ProcessProblem::no_answer(7, Duration::from_secs(5));
        assert_eq!([view.record_problem(silent()), view.record_problem(silent())], [true, false]);
        assert_eq!([view.record_answer(), view.record_answer()], [true, false]);
        assert_eq!(state(&view), Some(DaemonState::Active));
        // An answer of a new process does not end the problem of the old process: the new process
        // has not reported its state yet.
        view.record_failure(exit(), DEVICE);
        assert!(!view.record_answer());
        assert_eq!(state(&view), Some(DaemonState::Restarting));
    }
}
