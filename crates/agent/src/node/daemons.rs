//! What the agent knows of MPS daemons beyond their status: which settings the MPS host has
//! applied, and which events were reported. Pure.
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cleave_gpu::mps::wire::{DaemonState, Desired};

use super::status::daemon_trouble;
use crate::event::{NodeEvent, recovered, warning};
use crate::mps::HostView;

/// Desired files whose hash is remembered: more than the MPS host can be behind.
const REMEMBERED: usize = 64;

/// Which desired files the MPS host has applied.
#[derive(Debug, Default)]
pub(super) struct Acknowledged {
    last: Desired,
    sequence: u64,
    hashes: VecDeque<(u64, String)>,
    changed: BTreeMap<String, u64>,
    removed: BTreeMap<String, u64>,
    acted: u64,
}

impl Acknowledged {
    /// Records what shall run now.
    pub(super) fn wants(&mut self, desired: &Desired) {
        if *desired != self.last || self.sequence == 0 {
            self.sequence += 1;
            for (device, daemon) in &desired.daemons {
                if self.last.daemons.get(device) != Some(daemon) {
                    self.changed.insert(device.clone(), self.sequence);
                }
            }
            self.changed.retain(|device, _| desired.daemons.contains_key(device));
            let gone = self.last.daemons.keys().filter(|device| !desired.daemons.contains_key(*device));
            self.removed.extend(gone.map(|device| (device.clone(), self.sequence)));
            self.removed.retain(|device, sequence| *sequence > self.acted && !desired.daemons.contains_key(device));
            self.hashes.push_back((self.sequence, desired.hash()));
            if self.hashes.len() > REMEMBERED {
                self.hashes.pop_front();
            }
            self.last = desired.clone();
        }
    }

    /// Records the hash of the desired file that the MPS host says it applied.
    pub(super) fn acted(&mut self, hash: &str) {
        if let Some((sequence, _)) = self.hashes.iter().rev().find(|(_, known)| known == hash) {
            self.acted = self.acted.max(*sequence);
        }
    }

    /// Whether the MPS host has read that the daemon shall not run.
    pub(super) fn knows_gone(&self, device: &str) -> bool {
        self.removed.get(device).is_none_or(|sequence| self.acted >= *sequence)
    }

    /// Whether the MPS host has read the current settings of the daemon.
    pub(super) fn knows(&self, device: &str) -> bool {
        self.changed.get(device).is_none_or(|sequence| self.acted >= *sequence)
    }
}

/// What was reported of each daemon, so that every end and every return is one event.
#[derive(Debug, Default)]
pub(super) struct ReportedDaemons(BTreeMap<String, Reported>);

/// What was reported of a daemon.
#[derive(Debug, Clone, Copy, Default)]
enum Reported {
    /// Nothing: the daemon, or this process, has just started.
    #[default]
    Nothing,
    /// That it serves, with its restarts so far.
    Serving(u32),
    /// That it does not serve.
    Unavailable,
}

impl ReportedDaemons {
    /// The events that follow from the MPS host's status. `devices` are those that have a daemon.
    pub(super) fn update(&mut self, devices: BTreeSet<String>, view: &HostView) -> Vec<NodeEvent> {
        let mut events = Vec::new();
        self.0.retain(|device, _| devices.contains(device));
        for device in devices {
            let daemon = view.status.daemons.get(&device);
            let restarts = daemon.map_or(0, |daemon| daemon.restarts);
            // A daemon that is Stopping belongs to the last layout and is on its way out.
            let going = |state| matches!(state, DaemonState::Starting | DaemonState::Active | DaemonState::Stopping);
            let failing = daemon.is_some_and(|daemon| !going(daemon.state));
            let ended = |why: &str| warning("MpsUnavailable", format!("shares of {device}: {why}"));
            let back = || recovered(format!("shares of {device}: the MPS daemon serves again, with its limits"));
            let reported = self.0.get(&device).copied().unwrap_or_default();
            let next = match (reported, daemon_trouble(view, &device)) {
                (Reported::Serving(before), Ok(())) if restarts > before => {
                    // It was back before its end was seen.
                    events.extend([ended("the MPS daemon ended"), back()]);
                    Reported::Serving(restarts)
                }
                (Reported::Unavailable, Ok(())) => {
                    events.push(back());
                    Reported::Serving(restarts)
                }
                (Reported::Nothing | Reported::Serving(_), Ok(())) => Reported::Serving(restarts),
                (Reported::Serving(_), Err(why)) => {
                    events.push(ended(&why));
                    Reported::Unavailable
                }
                (Reported::Nothing, Err(why)) if failing => {
                    events.push(ended(&why));
                    Reported::Unavailable
                }
                // A start is no trouble, and trouble is reported once.
                (reported @ (Reported::Nothing | Reported::Unavailable), Err(_)) => reported,
            };
            self.0.insert(device, next);
        }
        events
    }
}
