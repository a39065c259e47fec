//! MPS daemons that are away for a moment, of which nobody is told. Pure.
//!
//! A pod that reaches the kubelet while its shares are told as Unhealthy is refused for good; one
//! that is admitted only waits: `PreStartContainer` until its daemon is Active, its programs at
//! their door. So shares that were served stay Healthy while their daemon, or the MPS host, is
//! being started again. What is no matter of moments is told at once: a server in FAULT, a daemon
//! that fails again and again, one that is new to what its device is served as.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_gpu::mps::wire::{DaemonState, DaemonStatus};

use crate::gpu::layout::{Layout, Pool};
use crate::mps::HostView;

/// How long a daemon may be away.
///
/// More than twice what it takes: half a second for a daemon or server that is started again, 2 to
/// 4 s for an MPS host's pod that is replaced. And well below the 25 s that a container's start
/// waits, after which the kubelet tries again: a pod that came at the very beginning waits still
/// when others are told. Longer would only send more pods to a daemon that does not come back.
pub const SHORT: Duration = Duration::from_secs(10);

/// Daemons whose shares are told as Healthy.
#[derive(Debug, Default)]
pub struct Absences {
    /// By device: none while the daemon serves, or since when it is away.
    since: BTreeMap<String, Option<Instant>>,
}

/// What a daemon is for those who come.
enum Presence {
    Serves,
    Away,
    Fails,
}

impl Absences {
    /// What devices are served as has changed: of those that are served otherwise nothing is known
    /// any more.
    pub fn relaid(&mut self, before: &BTreeMap<String, Layout>, after: &BTreeMap<String, Layout>) {
        self.since.retain(|device, _| served(before, device) == served(after, device));
    }

    /// Takes in how the daemons of these devices are; `knows`: the MPS host has read a device's
    /// last settings.
    pub fn look<'a>(
        &mut self,
        devices: impl Iterator<Item = &'a String>,
        view: &HostView,
        knows: impl Fn(&str) -> bool,
        now: Instant,
    ) {
        let before = std::mem::take(&mut self.since);
        for device in devices.filter(|device| knows(device)) {
            let away = match (presence(view, device), before.get(device)) {
                (Presence::Serves, _) => None,
                (Presence::Away, Some(since)) => {
                    let since = since.unwrap_or(now);
                    if now.saturating_duration_since(since) >= SHORT {
                        continue;
                    }
                    Some(since)
                }
                // That it once served is forgotten with the first word of a failure: only serving
                // makes it healthy again.
                (Presence::Away, None) | (Presence::Fails, _) => continue,
            };
            self.since.insert(device.clone(), away);
        }
    }

    /// Whether a device's daemon is away, and nobody is told yet.
    pub fn is_short(&self, device: &str) -> bool {
        self.since.get(device).is_some_and(Option::is_some)
    }

    /// How long until the first of them is told.
    pub fn again(&self, now: Instant) -> Option<Duration> {
        let left = |since: &Instant| SHORT.saturating_sub(now.saturating_duration_since(*since));
        self.since.values().flatten().map(left).min()
    }
}

fn presence(view: &HostView, device: &str) -> Presence {
    match view.status.daemons.get(device).map(|DaemonStatus { state, .. }| state) {
        Some(DaemonState::Active) if view.alive => Presence::Serves,
        Some(DaemonState::Active | DaemonState::Starting | DaemonState::Restarting) | None => Presence::Away,
        Some(DaemonState::Fault | DaemonState::BackOff | DaemonState::Stopping) => Presence::Fails,
    }
}

/// What a device is served as.
fn served<'a>(
    layouts: &'a BTreeMap<String, Layout>,
    device: &str,
) -> Option<(&'a cleave_gpu::mps::wire::Daemon, Vec<&'a Pool>)> {
    layouts.values().find_map(|Layout { mode: _, pools, daemons }| {
        Some((daemons.get(device)?, pools.iter().filter(|pool| pool.device == device).collect()))
    })
}
