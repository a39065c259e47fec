//! Tracks which settings of MPS daemons the MPS host has applied, and which states of the daemons
//! Events have reported. Pure.
use std::collections::{BTreeMap, VecDeque};

use cleave_gpu::mps::wire::{DaemonSettings, DaemonState, DaemonStatus, Desired, Enforcement};

use super::status::check_daemon;
use crate::event::{NodeEvent, device_recovery, device_warning};
use crate::mps::HostView;

/// Maximum number of stored hashes of desired files. In practice, the MPS host lags behind the
/// agent by far fewer files.
const MAX_STORED_HASHES: usize = 64;

/// Tracks which changes of MPS daemons the MPS host has applied. The hash of the desired file
/// identifies a change.
#[derive(Debug, Default)]
pub(super) struct DesiredFileTracker {
    /// Daemons of the last desired file.
    daemons: BTreeMap<String, DaemonSettings>,
    /// Number of the last change of the daemons. The number is 0 before the first desired file.
    sequence: u64,
    /// Hashes of desired files, each with the number of the latest change of daemons in the file.
    /// The list contains only files that the agent wrote before the MPS host had applied all
    /// changes of daemons.
    hashes: VecDeque<(u64, String)>,
    changed: BTreeMap<String, u64>,
    removed: BTreeMap<String, u64>,
    applied: u64,
}

impl DesiredFileTracker {
    /// Records the daemons and doors that should run.
    pub(super) fn record_desired(&mut self, desired: &Desired) {
        if desired.daemons != self.daemons || self.sequence == 0 {
            self.sequence += 1;
            for (device, daemon) in &desired.daemons {
                if self.daemons.get(device) != Some(daemon) {
                    self.changed.insert(device.clone(), self.sequence);
                }
            }
            self.changed.retain(|device, _| desired.daemons.contains_key(device));
            let gone = self.daemons.keys().filter(|device| !desired.daemons.contains_key(*device));
            self.removed.extend(gone.map(|device| (device.clone(), self.sequence)));
            self.removed.retain(|device, sequence| *sequence > self.applied && !desired.daemons.contains_key(device));
            self.daemons.clone_from(&desired.daemons);
        }
        // The hash covers every door and is therefore slow to compute. Compute the hash only while
        // the MPS host has not applied all changes of daemons.
        if self.awaits_changes() {
            let file = (self.sequence, desired.hash());
            if self.hashes.back() != Some(&file) {
                self.hashes.push_back(file);
            }
            if self.hashes.len() > MAX_STORED_HASHES {
                self.hashes.pop_front();
            }
        }
    }

    /// Returns whether there is a change of daemons that the MPS host has not applied yet.
    fn awaits_changes(&self) -> bool {
        self.changed.values().chain(self.removed.values()).any(|sequence| *sequence > self.applied)
    }

    /// Records the hash of the desired file that the MPS host last applied.
    pub(super) fn record_applied(&mut self, hash: &str) {
        if let Some((sequence, _)) = self.hashes.iter().rev().find(|(_, known)| known == hash) {
            self.applied = self.applied.max(*sequence);
        }
    }

    /// Returns whether the MPS host has applied the removal of this daemon, or no removal is
    /// recorded.
    pub(super) fn has_applied_removal(&self, device: &str) -> bool {
        self.removed.get(device).is_none_or(|sequence| self.applied >= *sequence)
    }

    /// Returns whether the MPS host has applied the current settings of this daemon, or no change
    /// of them is recorded.
    pub(super) fn has_applied_settings(&self, device: &str) -> bool {
        self.changed.get(device).is_none_or(|sequence| self.applied >= *sequence)
    }
}

/// The last reported state of each daemon. With these states, the agent reports each exit and each
/// recovery once.
#[derive(Debug, Default)]
pub(super) struct ReportedDaemons(BTreeMap<String, ReportedState>);

/// The last reported state of a daemon.
#[derive(Debug, Clone, Copy, Default)]
enum ReportedState {
    /// The agent has reported no state, because the daemon or the agent has just started.
    #[default]
    Nothing,
    /// The daemon serves. The number is the daemon's restart count at the time of the report.
    Serving(u32),
    /// The daemon does not serve.
    Unavailable,
}

impl ReportedDaemons {
    /// Updates the states and returns the Events to publish. `daemons` contains the settings of the
    /// node's daemons, by device.
    pub(super) fn update(&mut self, daemons: &BTreeMap<&String, &DaemonSettings>, view: &HostView) -> Vec<NodeEvent> {
        let mut events = Vec::new();
        self.0.retain(|device, _| daemons.contains_key(device));
        for (&device, &settings) in daemons {
            let daemon = view.status.daemons.get(device);
            let restarts = daemon.map_or(0, |daemon| daemon.restarts);
            // A daemon in state Stopping belongs to the previous layout.
            let expected = |state| matches!(state, DaemonState::Starting | DaemonState::Active | DaemonState::Stopping);
            let failing =
                daemon.is_some_and(|daemon| !expected(daemon.state)) || view.has_unknown_handshake(device, settings);
            let unavailable =
                |why: &str| device_warning("MpsUnavailable", device, format!("shares of {device}: {why}"));
            let recovery = || device_recovery(device, format!("shares of {device}: {}", recovery_note(daemon)));
            let reported = self.0.get(device).copied().unwrap_or_default();
            let next = match (reported, check_daemon(view, device, settings)) {
                (ReportedState::Serving(before), Ok(())) if restarts > before => {
                    // The daemon exited and recovered between two updates.
                    events.extend([unavailable("the MPS daemon exited"), recovery()]);
                    ReportedState::Serving(restarts)
                }
                (ReportedState::Unavailable, Ok(())) => {
                    events.push(recovery());
                    ReportedState::Serving(restarts)
                }
                (ReportedState::Nothing | ReportedState::Serving(_), Ok(())) => ReportedState::Serving(restarts),
                (ReportedState::Serving(_), Err(why)) => {
                    events.push(unavailable(&why));
                    ReportedState::Unavailable
                }
                (ReportedState::Nothing, Err(why)) if failing => {
                    events.push(unavailable(&why));
                    ReportedState::Unavailable
                }
                // A normal start causes no Event. A failure causes one Event, no matter how long
                // the failure lasts.
                (reported @ (ReportedState::Nothing | ReportedState::Unavailable), Err(_)) => reported,
            };
            self.0.insert(device.clone(), next);
        }
        events
    }
}

/// Returns the note of the Event for a daemon whose shares are available again.
fn recovery_note(daemon: Option<&DaemonStatus>) -> &'static str {
    match daemon {
        Some(DaemonStatus { replies_unproven: true, .. }) => {
            "the shares are available again, because no program has waited at a door for a minute. \
            It is unknown whether the MPS daemon's replies are expected again until the next \
            program starts"
        }
        Some(DaemonStatus { enforcement: Enforcement::Advisory, .. }) => {
            "the MPS daemon serves again. Limits are advisory, as the policy accepts"
        }
        _ => "the MPS daemon serves again with all limits",
    }
}

#[cfg(test)]
mod tests {
    use cleave_gpu::mps::wire;

    use super::*;

    fn desired(daemons: &[(&str, u8)], doors: usize) -> Desired {
        let settings = |threads| DaemonSettings {
            multi_user: false,
            exclusive: false,
            default_threads: Some(threads),
            default_memory_mib: None,
            accept_advisory: false,
        };
        let door = |number: usize| {
            let device = "GPU-a".to_owned();
            (format!("{number:032x}"), wire::Allocation { device, threads: None, memory_mib: None, max_clients: None })
        };
        Desired {
            version: wire::FILE_FORMAT_VERSION,
            daemons: daemons.iter().map(|(device, threads)| ((*device).to_owned(), settings(*threads))).collect(),
            allocations: (0..doors).map(door).collect(),
        }
    }

    #[test]
    fn a_later_file_with_more_doors_applies_a_change_and_an_earlier_file_does_not() {
        let mut tracker = DesiredFileTracker::default();
        let first = desired(&[("GPU-a", 10), ("GPU-b", 10)], 0);
        tracker.record_desired(&first);
        assert!(!tracker.has_applied_settings("GPU-a"));
        tracker.record_applied(&first.hash());
        assert!(tracker.has_applied_settings("GPU-a") && tracker.has_applied_removal("GPU-b"));
        for doors in 1..4 {
            tracker.record_desired(&desired(&[("GPU-a", 10), ("GPU-b", 10)], doors));
            assert!(tracker.has_applied_settings("GPU-a"), "doors change no daemon");
        }
        assert_eq!(tracker.hashes.len(), 1, "no hash is needed while all daemons are applied");
        for doors in 3..6 {
            tracker.record_desired(&desired(&[("GPU-a", 20)], doors));
        }
        tracker.record_applied(&desired(&[("GPU-a", 10), ("GPU-b", 10)], 3).hash());
        tracker.record_applied(&first.hash());
        assert!(!tracker.has_applied_settings("GPU-a") && !tracker.has_applied_removal("GPU-b"));
        tracker.record_applied(&desired(&[("GPU-a", 20)], 4).hash());
        assert!(tracker.has_applied_settings("GPU-a") && tracker.has_applied_removal("GPU-b"));
    }
}
