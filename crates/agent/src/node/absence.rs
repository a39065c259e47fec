//! Tolerates short absences of MPS daemons: the shares of an absent daemon remain Healthy for a
//! limited time. Pure.
//!
//! The kubelet permanently rejects a pod that arrives while its shares are Unhealthy. An admitted
//! pod only waits: `PreStartContainer` waits until the daemon is Active, and the pod's programs
//! wait at their door. Therefore shares that a daemon has served remain Healthy while the daemon or
//! the MPS host restarts. Shares become Unhealthy at once if the server is in state FAULT, or if
//! the daemon fails repeatedly, stops, has an unknown handshake, or has not served its current
//! layout yet.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_gpu::mps::wire::{DaemonSettings, DaemonState, DaemonStatus};

use crate::gpu::layout::{Layout, Pool};
use crate::mps::HostView;

/// Maximum time that a daemon may be unavailable while its shares remain Healthy.
///
/// The maximum is more than twice the usual absence: half a second for a restarted daemon or
/// server, and up to 4 s for a replaced MPS host. The maximum is well below the 25 s for which the
/// start of a container waits. Therefore a pod that arrived earlier is still waiting when the
/// shares become Unhealthy. A longer maximum would only let more pods start on a daemon that does
/// not recover.
pub const MAX_TOLERATED_ABSENCE: Duration = Duration::from_secs(10);

/// Tracks the daemons whose shares count as Healthy.
#[derive(Debug, Default)]
pub struct DaemonAbsences {
    /// Time at which each daemon became unavailable, by device. `None` while the daemon serves.
    since: BTreeMap<String, Option<Instant>>,
}

/// Availability of a daemon for new clients.
enum DaemonPresence {
    Serves,
    Away,
    Fails,
}

impl DaemonAbsences {
    /// Removes the devices for which pools or daemon settings changed.
    pub fn remove_changed_devices(&mut self, before: &BTreeMap<String, Layout>, after: &BTreeMap<String, Layout>) {
        self.since.retain(|device, _| settings_and_pools(before, device) == settings_and_pools(after, device));
    }

    /// Updates the daemons of these devices from the MPS host's status. `knows` returns whether the
    /// MPS host has applied the latest settings of a device.
    pub fn update<'a>(
        &mut self,
        daemons: impl Iterator<Item = (&'a String, &'a DaemonSettings)>,
        view: &HostView,
        knows: impl Fn(&str) -> bool,
        now: Instant,
    ) {
        let before = std::mem::take(&mut self.since);
        for (device, settings) in daemons.filter(|(device, _)| knows(device)) {
            let away = match (daemon_presence(view, device, settings), before.get(device)) {
                (DaemonPresence::Serves, _) => None,
                (DaemonPresence::Away, Some(since)) => {
                    let since = since.unwrap_or(now);
                    if now.saturating_duration_since(since) >= MAX_TOLERATED_ABSENCE {
                        continue;
                    }
                    Some(since)
                }
                // After a failure, the absence is no longer tolerated. The shares become Healthy
                // only when the daemon serves again.
                (DaemonPresence::Away, None) | (DaemonPresence::Fails, _) => continue,
            };
            self.since.insert(device.clone(), away);
        }
    }

    /// Returns whether the daemon of a device is unavailable while its shares still count as
    /// Healthy.
    pub fn is_absence_tolerated(&self, device: &str) -> bool {
        self.since.get(device).is_some_and(Option::is_some)
    }

    /// Returns the time until the first tolerated absence expires, or `None` if no daemon is
    /// absent.
    pub fn next_expiry(&self, now: Instant) -> Option<Duration> {
        let left = |since: &Instant| MAX_TOLERATED_ABSENCE.saturating_sub(now.saturating_duration_since(*since));
        self.since.values().flatten().map(left).min()
    }
}

/// Returns whether a device's MPS daemon serves, is briefly unavailable, or fails.
fn daemon_presence(view: &HostView, device: &str, settings: &DaemonSettings) -> DaemonPresence {
    if view.has_unknown_handshake(device, settings) {
        return DaemonPresence::Fails;
    }
    match view.status.daemons.get(device).map(|DaemonStatus { state, .. }| state) {
        Some(DaemonState::Active) if view.alive => DaemonPresence::Serves,
        Some(DaemonState::Active | DaemonState::Starting | DaemonState::Restarting) | None => DaemonPresence::Away,
        Some(DaemonState::Fault | DaemonState::BackOff | DaemonState::Stopping) => DaemonPresence::Fails,
    }
}

/// Returns the daemon settings and pools of a device. Returns `None` if the device has no daemon.
fn settings_and_pools<'a>(
    layouts: &'a BTreeMap<String, Layout>,
    device: &str,
) -> Option<(&'a DaemonSettings, Vec<&'a Pool>)> {
    layouts.values().find_map(|Layout { mode: _, pools, daemons }| {
        Some((daemons.get(device)?, pools.iter().filter(|pool| pool.device == device).collect()))
    })
}
