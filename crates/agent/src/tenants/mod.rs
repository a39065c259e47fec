//! The tenant watch: who uses more of a shared GPU than its shares, or computes on it outside MPS, is found within two seconds and told.
//!
//! ```text
//!  main loop ── Scene ─┐                                                     ┌─▶ findings ─▶ main loop ─▶ GpuNode.status ─▶ operator
//!  NVML, own thread ── Look (each second) ─▶ judge (pure) ─▶ Findings (pure) ┼─▶ events on pods
//!  /proc, same thread ─┤                                                     ├─▶ metrics
//!  API server ─ Names ─┘                                                     └─▶ MPS host: terminate, where the policy says Evict
//! ```
//!
//! Nothing is asked while nobody can use a shared device. A driver that does not answer tells nothing of anybody: nobody is accused, and
//! nobody ended.
pub mod cgroup;
pub mod findings;
pub mod judge;
pub mod names;
pub mod process;
pub mod scene;
pub(crate) mod tell;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use cleave_api::gpunode::FindingStatus;
use cleave_gpu::mps::wire::{Reply, Request};
use cleave_gpu::nvml::{Gpus, Nvml, NvmlError, Search, Worker};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::{mpsc, watch};

use self::findings::Findings;
use self::judge::{Look, ProcessId, Seen, judge};
use self::names::Directory;
use self::scene::Scene;
use self::tell::PodEvent;
use crate::metrics::Metrics;
use crate::mps::Link;

/// Between looks.
const LOOK: Duration = Duration::from_secs(1);
/// Between the look that suspects somebody and the one that finds it. Together with [`LOOK`] well within the two seconds that are promised,
/// and longer than a program takes from its first context to the driver's word that it is an MPS client.
const CONFIRM: Duration = Duration::from_millis(400);
/// How long NVML may take for a look before it counts as silent.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long the MPS host may take to end a client.
const END: Duration = Duration::from_secs(15);

/// What the watch is made of.
pub(crate) struct Parts {
    /// Where NVML is.
    pub(crate) search: Search,
    /// Where processes are.
    pub(crate) proc: PathBuf,
    /// The MPS host.
    pub(crate) link: Link,
    /// What the node knows.
    pub(crate) scene: watch::Receiver<Arc<Scene>>,
    /// The node's pods.
    pub(crate) names: Directory,
    /// Metrics.
    pub(crate) metrics: Metrics,
    /// Whom findings are told to.
    pub(crate) findings: mpsc::Sender<Vec<FindingStatus>>,
    /// What pods are told.
    pub(crate) tell: mpsc::Sender<PodEvent>,
}

/// Watches for ever.
pub(crate) async fn watch(parts: Parts) -> anyhow::Result<()> {
    let Parts { search, proc, link, mut scene, names, metrics, findings: report, tell } = parts;
    let open = move || Nvml::open(&search).map(|nvml| Box::new(nvml) as Box<dyn Gpus>);
    let worker = Worker::start(Box::new(open)).context("cannot start the tenant watch's NVML thread")?;
    let mut findings = Findings::default();
    let mut told = Vec::new();
    let mut answers = true;
    loop {
        let begun = Instant::now();
        let before = Arc::clone(&scene.borrow_and_update());
        let devices = before.in_use();
        if devices.is_empty() && findings.is_empty() {
            metrics.tenants(&[]);
            if scene.changed().await.is_err() {
                return Ok(());
            }
            continue;
        }
        let (proc, asked) = (proc.clone(), Arc::clone(&before));
        let look = worker.call(DEADLINE, move |gpus| look(gpus, &proc, &asked, &devices)).await;
        if look.is_ok() != std::mem::replace(&mut answers, look.is_ok()) {
            match &look {
                Ok(_) => tracing::info!("the tenant watch sees processes again"),
                Err(error) => tracing::warn!(
                    error = error as &dyn std::error::Error,
                    "NVML does not say what processes there are: nothing is known of tenants"
                ),
            }
        }
        let look = look.unwrap_or_else(|_| {
            metrics.error("tenants");
            Look::default()
        });
        // Who is a client may have been told meanwhile.
        let now = Arc::clone(&scene.borrow_and_update());
        let news = {
            let names = names.lock();
            let judgement = judge(&now, &look, &names);
            metrics.tenants(&judgement.usage);
            let answered = |device: &str| look.devices.contains_key(device) || !before.devices.contains_key(device);
            let evicts = |device: &str| now.devices.get(device).is_some_and(|shared| shared.evict);
            findings.take(judgement, answered, evicts, &names, (Instant::now(), Timestamp::now()))
        };
        for finding in &news.begun {
            let FindingStatus { kind, device, namespace, pod, uid, pid, message, .. } = finding;
            tracing::warn!(kind, device, namespace, pod, uid, pid, message, "a tenant left its share");
            metrics.finding(kind);
        }
        for finding in news.tell {
            if tell.try_send(PodEvent::of(finding)).is_err() {
                metrics.error("event-dropped");
            }
        }
        for (device, process) in news.end {
            tokio::spawn(end(link.clone(), device, process));
        }
        let all = findings.all();
        if all != told {
            told.clone_from(&all);
            if report.send(all).await.is_err() {
                return Ok(());
            }
        }
        let pause = if news.pending { CONFIRM } else { LOOK };
        tokio::time::sleep(pause.saturating_sub(begun.elapsed())).await;
    }
}

/// Ends an MPS client's contexts: its memory is free then, and the signal that follows hits no kernel.
async fn end(link: Link, device: String, process: ProcessId) {
    let request = Request::Terminate { device: device.clone(), pid: process.pid };
    let pid = process.pid;
    match link.ask(&request, END).await {
        Ok(Reply::Done) => tracing::info!(device, pid, "ended a client that left its share"),
        Ok(Reply::NoContext) => tracing::debug!(device, pid, "a client that left its share has nothing to end"),
        Ok(Reply::Error { message }) => tracing::warn!(device, pid, message, "a client could not be ended"),
        Ok(Reply::Status(_)) => tracing::warn!(device, pid, "the MPS host gave another answer than was asked for"),
        Err(error) => tracing::warn!(device, pid, error, "a client could not be ended"),
    }
}

/// Looks at devices and at the processes on them, on NVML's thread: neither holds up anything else.
fn look(gpus: &dyn Gpus, proc: &Path, scene: &Scene, devices: &[String]) -> Result<Look, NvmlError> {
    let mut look = Look::default();
    for (device, tenants) in gpus.tenants_of(devices)? {
        let mut seen = Vec::new();
        for process in tenants.processes {
            match process::look(proc, process.pid) {
                Ok(Some(of)) => seen.push(Seen {
                    id: ProcessId { pid: process.pid, start: of.start },
                    bytes: process.memory,
                    mps: tenants.tells_clients.then_some(process.mps),
                    parent: of.parent,
                    owner: of.owner,
                }),
                // It has ended.
                Ok(None) => {}
                Err(error) => tracing::debug!(pid = process.pid, %error, "nothing is known of a process"),
            }
        }
        look.devices.insert(device, seen);
    }
    look.daemon_pods = daemon_pods(proc, scene, devices);
    Ok(look)
}

fn daemon_pods(proc: &Path, scene: &Scene, devices: &[String]) -> BTreeSet<String> {
    let daemons: BTreeSet<u32> = devices
        .iter()
        .filter_map(|device| scene.devices.get(device))
        .flat_map(|shared| &shared.daemon)
        .copied()
        .collect();
    let of = |pid: u32| process::look(proc, pid).ok().flatten()?.owner;
    daemons.into_iter().filter_map(of).map(|owner| owner.pod).collect()
}
