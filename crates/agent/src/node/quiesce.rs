//! Quiesces GPUs, so that an administrator can reset them or unload the driver. Pure.
//!
//! ```text
//!  requested ─▶ free slices are Unhealthy ─▶ no pod uses the GPU ─▶ its MPS daemons have ended
//!            ─▶ NVML is closed in this process ─▶ quiesced
//! ```
//!
//! NVML cannot close the device file of a single GPU: `nvmlInit` opens all device files, and only
//! the last `nvmlShutdown` closes them. Therefore the agent does not query the other GPUs while a
//! GPU is quiesced, and keeps their last reports. The other GPUs continue to serve.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_api::gpunode::QuiesceStatus;

use crate::event::{EventSubject, NodeEvent};

/// Time for which the agent lists the slices as Unhealthy before it stops the MPS daemons. The
/// delay is needed because the kubelet may already be allocating a slice.
const WITHDRAWAL_DELAY: Duration = Duration::from_millis(300);

/// Progress of all requested quiesces, by UUID of the GPU.
#[derive(Debug, Default)]
pub struct Quiesces {
    gpus: BTreeMap<String, QuiesceProgress>,
    /// UUIDs of the GPUs that an Event has reported as quiesced.
    reported: BTreeSet<String>,
    nvml_closed: bool,
    /// Whether a call to NVML hangs in the kernel. If so, even a restart of the agent does not
    /// close NVML.
    nvml_stuck: bool,
}

/// Progress of one quiesce.
#[derive(Debug, Default)]
struct QuiesceProgress {
    /// Time since which no pod uses the GPU. `None` while the GPU is in use.
    free_since: Option<Instant>,
    /// Whether the GPU's MPS daemons must not run.
    stops_daemons: bool,
    /// Why the quiesce waits. `None` if NVML can be closed.
    waits: Option<String>,
}

/// Current use of a GPU whose quiesce was requested.
#[derive(Debug, Default)]
pub struct GpuUse {
    /// Why the GPU is or may be in use. `None` if no pod and no process uses the GPU.
    pub in_use: Option<String>,
    /// Why the GPU's MPS daemons may still run. `None` if the daemons have exited.
    pub daemons: Option<String>,
}

impl Quiesces {
    /// Restores the quiesces of an earlier agent. The earlier agent has already listed the slices
    /// as Unhealthy.
    pub fn restore(gpus: impl Iterator<Item = String>, now: Instant) -> Self {
        let progress = |uuid| {
            let free_since = now.checked_sub(WITHDRAWAL_DELAY);
            (uuid, QuiesceProgress { free_since, stops_daemons: free_since.is_some(), waits: None })
        };
        Self { gpus: gpus.map(progress).collect(), ..Self::default() }
    }

    /// Records whether NVML is closed.
    pub const fn record_nvml_closed(&mut self, closed: bool) {
        self.nvml_closed = closed;
    }

    /// Records whether this process cannot close NVML, because a call to NVML hangs.
    pub const fn record_nvml_stuck(&mut self, stuck: bool) {
        self.nvml_stuck = stuck;
    }

    /// Updates the progress of the GPUs that the spec requests to quiesce. `state` returns the
    /// current use of a GPU.
    pub fn update(&mut self, wanted: &BTreeSet<String>, state: impl Fn(&str) -> GpuUse, now: Instant) {
        self.gpus.retain(|uuid, _| wanted.contains(uuid));
        for uuid in wanted {
            let progress = self.gpus.entry(uuid.clone()).or_default();
            let GpuUse { in_use, daemons } = state(uuid);
            if let Some(why) = in_use {
                *progress = QuiesceProgress { waits: Some(why), ..QuiesceProgress::default() };
                continue;
            }
            let since = *progress.free_since.get_or_insert(now);
            // Wait, because the kubelet may be allocating a slice that has just become Unhealthy.
            progress.stops_daemons |= now.saturating_duration_since(since) >= WITHDRAWAL_DELAY;
            progress.waits = match daemons {
                _ if !progress.stops_daemons => Some("the agent has just listed the slices as Unhealthy".into()),
                why => why,
            };
        }
    }

    /// Returns whether the MPS daemons of a GPU must not run.
    pub fn stops_daemons(&self, uuid: &str) -> bool {
        self.gpus.get(uuid).is_some_and(|progress| progress.stops_daemons)
    }

    /// Returns whether a quiesce of this GPU is requested.
    pub fn is_requested(&self, uuid: &str) -> bool {
        self.gpus.contains_key(uuid)
    }

    /// Returns whether NVML must be closed, because at least one GPU is ready for its quiesce.
    pub fn needs_nvml_closed(&self) -> bool {
        self.gpus.values().any(|progress| progress.waits.is_none())
    }

    /// Returns whether at least one requested quiesce is not complete.
    pub fn is_in_progress(&self) -> bool {
        self.gpus.values().any(|progress| progress.waits.is_some()) || (self.needs_nvml_closed() && !self.nvml_closed)
    }

    /// Returns the status of a GPU's quiesce. Returns `None` if no quiesce of the GPU is requested.
    pub fn status(&self, uuid: &str) -> Option<QuiesceStatus> {
        let QuiesceProgress { waits, .. } = self.gpus.get(uuid)?;
        let message = match waits {
            Some(why) => format!("waiting: {why}"),
            None if self.nvml_closed => {
                "quiesced: its MPS daemons have exited, and the agent has closed NVML. The GPU can be reset".into()
            }
            None if self.nvml_stuck => {
                "waiting: a call to NVML hangs in the kernel, so the agent cannot close NVML. Reboot the node".into()
            }
            None => "waiting: calls to NVML have not returned yet".into(),
        };
        Some(QuiesceStatus { quiesced: waits.is_none() && self.nvml_closed, message })
    }

    /// Returns an Event for each GPU whose quiesce has completed or ended since the last call.
    pub fn take_events(&mut self) -> Vec<NodeEvent> {
        let event = |reason, uuid: &str, note| NodeEvent {
            warning: false,
            reason,
            note,
            regarding: None,
            related: EventSubject::device(uuid),
        };
        let done = |uuid: &&String| self.status(uuid).is_some_and(|status| status.quiesced);
        let now: BTreeSet<String> = self.gpus.keys().filter(done).cloned().collect();
        let mut events: Vec<NodeEvent> = now
            .difference(&self.reported)
            .map(|uuid| {
                let note = "is quiesced: no process of Cleave uses it. Reset it, or quiesce the next GPU. Until you run cleave uncordon, Cleave does not monitor the node's other GPUs";
                event("GpuQuiesced", uuid, format!("GPU {uuid} {note}"))
            })
            .collect();
        let resumed = self.reported.iter().filter(|uuid| !self.gpus.contains_key(*uuid));
        events.extend(resumed.map(|uuid| event("GpuResumed", uuid, format!("GPU {uuid} is no longer quiesced"))));
        self.reported.retain(|uuid| self.gpus.contains_key(uuid));
        self.reported.extend(now);
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requested_gpus() -> BTreeSet<String> {
        BTreeSet::from(["GPU-a".to_owned()])
    }

    fn unused_gpu(_: &str) -> GpuUse {
        GpuUse::default()
    }

    fn event_reasons(quiesces: &mut Quiesces) -> Vec<&'static str> {
        quiesces.take_events().into_iter().map(|event| event.reason).collect()
    }

    #[test]
    fn each_stage_waits_for_the_previous_stage_and_one_event_reports_the_end() {
        let (mut quiesces, start) = (Quiesces::default(), Instant::now());
        let in_use = |_: &str| GpuUse { in_use: Some("in use by ns/p".into()), daemons: None };
        quiesces.update(&requested_gpus(), in_use, start);
        assert!(!quiesces.stops_daemons("GPU-a") && !quiesces.needs_nvml_closed());
        assert!(quiesces.status("GPU-a").unwrap().message.contains("ns/p"));

        quiesces.update(&requested_gpus(), unused_gpu, start);
        assert!(!quiesces.stops_daemons("GPU-a"), "the kubelet may be allocating a slice");
        let later = start + WITHDRAWAL_DELAY;
        let running = |_: &str| GpuUse { in_use: None, daemons: Some("the MPS daemon has not exited yet".into()) };
        quiesces.update(&requested_gpus(), running, later);
        assert!(quiesces.stops_daemons("GPU-a") && !quiesces.needs_nvml_closed());

        quiesces.update(&requested_gpus(), unused_gpu, later);
        assert!(quiesces.needs_nvml_closed() && quiesces.is_in_progress());
        assert!(!quiesces.status("GPU-a").unwrap().quiesced && event_reasons(&mut quiesces).is_empty());
        quiesces.record_nvml_stuck(true);
        let stuck = quiesces.status("GPU-a").unwrap();
        assert!(!stuck.quiesced && stuck.message.contains("Reboot the node"), "{}", stuck.message);
        quiesces.record_nvml_stuck(false);
        quiesces.record_nvml_closed(true);
        assert!(quiesces.status("GPU-a").unwrap().quiesced && !quiesces.is_in_progress());
        assert_eq!(event_reasons(&mut quiesces), ["GpuQuiesced"]);
        assert!(event_reasons(&mut quiesces).is_empty());

        quiesces.update(&BTreeSet::new(), unused_gpu, later);
        assert!(!quiesces.needs_nvml_closed() && quiesces.status("GPU-a").is_none());
        assert_eq!(event_reasons(&mut quiesces), ["GpuResumed"]);
    }

    #[test]
    fn an_allocation_at_the_last_moment_delays_the_quiesce() {
        let (mut quiesces, start) = (Quiesces::default(), Instant::now());
        quiesces.update(&requested_gpus(), unused_gpu, start);
        let in_use = |_: &str| GpuUse { in_use: Some("in use".into()), daemons: None };
        quiesces.update(&requested_gpus(), in_use, start + WITHDRAWAL_DELAY / 2);
        quiesces.update(&requested_gpus(), unused_gpu, start + WITHDRAWAL_DELAY);
        assert!(!quiesces.stops_daemons("GPU-a"), "the delay starts again");
    }

    #[test]
    fn a_restarted_agent_keeps_nvml_closed_from_the_start() {
        let now = Instant::now() + Duration::from_secs(60);
        let mut quiesces = Quiesces::restore(requested_gpus().into_iter(), now);
        assert!(quiesces.needs_nvml_closed());
        quiesces.update(&requested_gpus(), unused_gpu, now);
        assert!(quiesces.needs_nvml_closed());
    }
}
