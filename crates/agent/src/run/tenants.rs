//! Detects tenants that exceed their limits.
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use cleave_api::gpunode::FindingStatus;
use cleave_gpu::mps::wire::{Reply, Request};
use cleave_gpu::nvml::Library;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::{mpsc, watch};

use super::input::Input;
use super::tenant_processes::{ProcessObserver, SampleRound};
use crate::event::PodEvent;
use crate::metrics::Metrics;
use crate::mps::link::HostLink;
use crate::tenants::findings::{Findings, SampleState};
use crate::tenants::names::SharedPodNames;
use crate::tenants::snapshot::TenantSnapshot;
use crate::tenants::violations::{ProcessId, find_violations};

/// Interval between two rounds.
const ROUND_INTERVAL: Duration = Duration::from_secs(1);
/// Time between the round that suspects a violation and the round that confirms it. The sum of this
/// delay and [`ROUND_INTERVAL`] is well below two seconds, the maximum time to find a violation.
/// After a program creates its first context, the driver needs less than this delay to report the
/// program as an MPS client.
const CONFIRMATION_DELAY: Duration = Duration::from_millis(400);
/// Deadline for the MPS host's reply to a request to terminate a client.
const TERMINATION_TIMEOUT: Duration = Duration::from_secs(15);

/// The inputs and outputs of [`run_rounds`].
struct WatchParts {
    /// The NVML library.
    library: Library,
    /// The proc file system of the host.
    proc: PathBuf,
    /// Connection to the MPS host.
    link: HostLink,
    /// The node's shared devices and shares.
    snapshot: watch::Receiver<Arc<TenantSnapshot>>,
    /// Names of the node's pods.
    names: SharedPodNames,
    /// The agent's metrics.
    metrics: Metrics,
    /// Receives all findings whenever they change.
    findings: mpsc::Sender<Vec<FindingStatus>>,
    /// Receives Events for pods.
    pod_events: mpsc::Sender<PodEvent>,
}

/// Runs rounds until a channel is closed.
async fn run_rounds(parts: WatchParts) -> anyhow::Result<()> {
    let WatchParts { library, proc, link, mut snapshot, names, metrics, findings: report, pod_events } = parts;
    let mut observer = ProcessObserver::new(library, proc);
    let mut findings = Findings::default();
    let mut reported = Vec::new();
    let mut unreachable = BTreeSet::new();
    loop {
        let begun = Instant::now();
        let before = Arc::clone(&snapshot.borrow_and_update());
        let devices = before.devices_in_use();
        if devices.is_empty() && findings.is_empty() {
            metrics.set_tenant_memory(&[]);
            if snapshot.changed().await.is_err() {
                return Ok(());
            }
            continue;
        }
        let round =
            observer.run_round(&before, &devices).await.context("failed to start a tenant watch's NVML thread")?;
        log_unreachable_gpus(&round, &before, &mut unreachable, &metrics);
        let SampleRound { sample, waiting, .. } = round;
        // Read the snapshot again, because the MPS host may have reported more clients during the
        // round.
        let now = Arc::clone(&snapshot.borrow_and_update());
        let changes = {
            let names = names.lock();
            let assessment = find_violations(&now, &sample, &names);
            metrics.set_tenant_memory(&assessment.usage);
            let state = |device: &str| {
                if sample.devices.contains_key(device) || !before.devices.contains_key(device) {
                    SampleState::Sampled
                } else if waiting.contains(device) {
                    SampleState::Pending
                } else {
                    SampleState::Unreachable
                }
            };
            let evicts = |device: &str| now.devices.get(device).is_some_and(|shared| shared.evict);
            findings.update(assessment, state, evicts, &names, (Instant::now(), Timestamp::now()))
        };
        for finding in &changes.new {
            let FindingStatus { kind, device, namespace, pod, uid, pid, message, .. } = finding;
            tracing::warn!(kind, device, namespace, pod, uid, pid, message, "a tenant exceeded its limits");
            metrics.count_finding(kind);
        }
        for finding in changes.report {
            if pod_events.try_send(PodEvent::for_finding(finding)).is_err() {
                metrics.count_error("event-dropped");
            }
        }
        for (device, process) in changes.terminate {
            tokio::spawn(terminate_client(link.clone(), device, process));
        }
        let all = findings.statuses();
        if all != reported {
            reported.clone_from(&all);
            if report.send(all).await.is_err() {
                return Ok(());
            }
        }
        let pause = if changes.confirm { CONFIRMATION_DELAY } else { ROUND_INTERVAL };
        tokio::time::sleep(pause.saturating_sub(begun.elapsed())).await;
    }
}

/// Logs once when NVML stops reporting the processes of a GPU, and once when NVML reports the
/// processes again.
fn log_unreachable_gpus(
    round: &SampleRound,
    snapshot: &TenantSnapshot,
    unreachable: &mut BTreeSet<String>,
    metrics: &Metrics,
) {
    for (gpu, error) in &round.unreachable {
        metrics.count_error("tenants");
        if unreachable.insert(gpu.clone()) {
            tracing::warn!(
                gpu,
                error = error as &dyn std::error::Error,
                "NVML does not report the GPU's processes; tenants of the GPU are not checked"
            );
        }
    }
    for gpu in round.sample.devices.keys().filter_map(|device| snapshot.devices.get(device)).map(|shared| &shared.gpu) {
        if unreachable.remove(gpu) {
            tracing::info!(gpu, "NVML reports the GPU's processes again");
        }
    }
}

/// Terminates an MPS client's contexts, which frees the client's GPU memory. After the termination,
/// a signal to the process interrupts no kernel.
async fn terminate_client(link: HostLink, device: String, process: ProcessId) {
    let request = Request::Terminate { device: device.clone(), pid: process.pid };
    let pid = process.pid;
    match link.request(&request, TERMINATION_TIMEOUT).await {
        Ok(Reply::Done) => tracing::info!(device, pid, "terminated a client that exceeded its limits"),
        Ok(Reply::NoContext) => tracing::debug!(device, pid, "a client that exceeded its limits has no context"),
        Ok(Reply::Error { message }) => tracing::warn!(device, pid, message, "failed to terminate a client"),
        Ok(Reply::Status(_)) => tracing::warn!(device, pid, "the MPS host sent an unexpected answer"),
        Err(error) => tracing::warn!(device, pid, error, "failed to terminate a client"),
    }
}

/// Watches tenants until the main loop has ended.
pub(super) async fn watch_tenants(
    (library, proc): (Library, PathBuf),
    (link, names, metrics): (HostLink, SharedPodNames, Metrics),
    snapshot: watch::Receiver<Arc<TenantSnapshot>>,
    pod_events: mpsc::Sender<PodEvent>,
    inputs: mpsc::Sender<Input>,
) -> anyhow::Result<()> {
    let (findings, mut found) = mpsc::channel(4);
    let parts = WatchParts { library, proc, link, snapshot, names, metrics, findings, pod_events };
    let forward = async {
        while let Some(findings) = found.recv().await {
            if inputs.send(Input::Findings(findings)).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        // Neither branch is ever restarted, so neither has to be cancel-safe.
        ended = run_rounds(parts) => ended,
        () = forward => Ok(()),
    }
}
