//! The task that watches tenants.
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
use super::tenant_processes::{Looks, Round};
use crate::event::PodEvent;
use crate::metrics::Metrics;
use crate::mps::link::HostLink;
use crate::tenants::findings::{Findings, SampleState};
use crate::tenants::names::SharedPodNames;
use crate::tenants::snapshot::TenantSnapshot;
use crate::tenants::violations::{ProcessId, find_violations};

/// Between looks.
const LOOK: Duration = Duration::from_secs(1);
/// Between the look that suspects somebody and the one that finds it. Together with [`LOOK`] well
/// within the two seconds that are promised, and longer than a program takes from its first context
/// to the driver's word that it is an MPS client.
const CONFIRM: Duration = Duration::from_millis(400);
/// How long the MPS host may take to end a client.
const END: Duration = Duration::from_secs(15);

/// What the watch is made of.
struct Parts {
    /// NVML.
    library: Library,
    /// Where processes are.
    proc: PathBuf,
    /// The MPS host.
    link: HostLink,
    /// What the node knows.
    snapshot: watch::Receiver<Arc<TenantSnapshot>>,
    /// The node's pods.
    names: SharedPodNames,
    /// Metrics.
    metrics: Metrics,
    /// Whom findings are told to.
    findings: mpsc::Sender<Vec<FindingStatus>>,
    /// What pods are told.
    tell: mpsc::Sender<PodEvent>,
}

/// Watches for ever.
async fn follow(parts: Parts) -> anyhow::Result<()> {
    let Parts { library, proc, link, mut snapshot, names, metrics, findings: report, tell } = parts;
    let mut looks = Looks::new(library, proc);
    let mut findings = Findings::default();
    let mut told = Vec::new();
    let mut silent = BTreeSet::new();
    loop {
        let begun = Instant::now();
        let before = Arc::clone(&snapshot.borrow_and_update());
        let devices = before.in_use();
        if devices.is_empty() && findings.is_empty() {
            metrics.tenants(&[]);
            if snapshot.changed().await.is_err() {
                return Ok(());
            }
            continue;
        }
        let round = looks.round(&before, &devices).await.context("cannot start a tenant watch's NVML thread")?;
        note_silence(&round, &before, &mut silent, &metrics);
        let Round { sample, waiting, .. } = round;
        // Who is a client may have been told meanwhile.
        let now = Arc::clone(&snapshot.borrow_and_update());
        let changes = {
            let names = names.lock();
            let assessment = find_violations(&now, &sample, &names);
            metrics.tenants(&assessment.usage);
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
            tracing::warn!(kind, device, namespace, pod, uid, pid, message, "a tenant left its share");
            metrics.finding(kind);
        }
        for finding in changes.report {
            if tell.try_send(PodEvent::of(finding)).is_err() {
                metrics.error("event-dropped");
            }
        }
        for (device, process) in changes.terminate {
            tokio::spawn(end(link.clone(), device, process));
        }
        let all = findings.all();
        if all != told {
            told.clone_from(&all);
            if report.send(all).await.is_err() {
                return Ok(());
            }
        }
        let pause = if changes.confirm { CONFIRM } else { LOOK };
        tokio::time::sleep(pause.saturating_sub(begun.elapsed())).await;
    }
}

/// Logs which GPUs say nothing of their tenants, and which say something again, each once.
fn note_silence(round: &Round, snapshot: &TenantSnapshot, silent: &mut BTreeSet<String>, metrics: &Metrics) {
    for (gpu, error) in &round.silent {
        metrics.error("tenants");
        if silent.insert(gpu.clone()) {
            tracing::warn!(
                gpu,
                error = error as &dyn std::error::Error,
                "NVML does not say what processes there are: nothing is known of tenants"
            );
        }
    }
    for gpu in round.sample.devices.keys().filter_map(|device| snapshot.devices.get(device)).map(|shared| &shared.gpu) {
        if silent.remove(gpu) {
            tracing::info!(gpu, "the tenant watch sees processes again");
        }
    }
}

/// Ends an MPS client's contexts: its memory is free then, and the signal that follows hits no
/// kernel.
async fn end(link: HostLink, device: String, process: ProcessId) {
    let request = Request::Terminate { device: device.clone(), pid: process.pid };
    let pid = process.pid;
    match link.request(&request, END).await {
        Ok(Reply::Done) => tracing::info!(device, pid, "ended a client that left its share"),
        Ok(Reply::NoContext) => tracing::debug!(device, pid, "a client that left its share has nothing to end"),
        Ok(Reply::Error { message }) => tracing::warn!(device, pid, message, "a client could not be ended"),
        Ok(Reply::Status(_)) => tracing::warn!(device, pid, "the MPS host gave another answer than was asked for"),
        Err(error) => tracing::warn!(device, pid, error, "a client could not be ended"),
    }
}

/// Watches tenants, for ever.
pub(super) async fn watch(
    (library, proc): (Library, PathBuf),
    (link, names, metrics): (HostLink, SharedPodNames, Metrics),
    snapshot: watch::Receiver<Arc<TenantSnapshot>>,
    tell: mpsc::Sender<PodEvent>,
    inputs: mpsc::Sender<Input>,
) -> anyhow::Result<()> {
    let (findings, mut found) = mpsc::channel(4);
    let parts = Parts { library, proc, link, snapshot, names, metrics, findings, tell };
    let forward = async {
        while let Some(findings) = found.recv().await {
            if inputs.send(Input::Findings(findings)).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        // Neither ends before the agent does.
        ended = follow(parts) => ended,
        () = forward => Ok(()),
    }
}
