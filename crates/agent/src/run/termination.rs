//! Terminates MPS clients of terminating pods. The task wakes when pods or the MPS host change, and
//! at the time of the next decision.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use cleave_gpu::mps::wire::{Reply, Request};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::event::{EventSubject, NodeEvent};
use crate::metrics::{Metrics, TerminationOutcome};
use crate::mps;
use crate::termination::pods::TerminatingPods;
use crate::termination::process::{self, LiveProcess};
use crate::termination::{AttemptOutcome, Client, ClientKey, Terminations};

/// Deadline for the MPS host's reply. The MPS host replies within 8 s, of which it waits up to 4 s
/// for a busy daemon.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Terminates clients of terminating pods. Returns only on an error.
pub(super) async fn run(
    link: mps::link::HostLink,
    (mut pods, mut views): (watch::Receiver<TerminatingPods>, watch::Receiver<mps::HostView>),
    events: mpsc::Sender<NodeEvent>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let (mut terminations, mut known) = (Terminations::default(), BTreeMap::new());
    let mut attempts = JoinSet::new();
    loop {
        let clients = clients_of_terminating_pods(&pods.borrow_and_update(), &views.borrow_and_update(), &mut known);
        let decision = terminations.decide(clients, Instant::now());
        for (client, why) in decision.report {
            report_late_termination(&client, &why, &events, &metrics);
        }
        for client in decision.terminate {
            attempts.spawn(terminate_client(link.clone(), client));
        }
        let again = decision.next_check.map(tokio::time::Instant::from_std);
        tokio::select! {
            // All branches are cancel-safe: the next call returns a missed change.
            changed = pods.changed() => changed.context("the watch of pods has stopped")?,
            changed = views.changed() => changed.context("the watch of the MPS host has stopped")?,
            Some(answer) = attempts.join_next() => {
                let (client, outcome, began) = answer.context("the task that terminates a client failed")?;
                log_outcome(&client, &outcome, began, &metrics);
                terminations.record_outcome(&client.key, &outcome, Instant::now());
            }
            () = async {
                match again {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            } => {}
        }
    }
}

/// Returns the clients of terminating pods. Reads `/proc` only if a pod is terminating. Reads the
/// cgroup of each client only once, because `known` caches the UIDs of the pods.
fn clients_of_terminating_pods(
    pods: &TerminatingPods,
    view: &mps::HostView,
    known: &mut BTreeMap<ClientKey, Vec<String>>,
) -> Vec<Client> {
    if !pods.has_terminating_pods() {
        known.clear();
        return Vec::new();
    }
    let mut before = std::mem::take(known);
    let mut found = Vec::new();
    for (device, daemon) in &view.status.daemons {
        for client in &daemon.clients {
            let key = ClientKey { device: device.clone(), pid: client.pid };
            let uids = before.remove(&key).unwrap_or_else(|| process::pod_uids_of_process(client.pid));
            if let Some((pod, deadlines)) = pods.find_terminating(&uids, client.allocation.as_deref())
                && let Some(LiveProcess { survives_sigterm, stopped }) = LiveProcess::read(client.pid)
            {
                found.push(Client { key: key.clone(), pod: pod.to_owned(), deadlines, survives_sigterm, stopped });
            }
            known.insert(key, uids);
        }
    }
    found
}

/// Requests the MPS host to terminate a client. Returns the client, the outcome, and the time at
/// which the request began.
async fn terminate_client(link: mps::link::HostLink, client: Client) -> (Client, AttemptOutcome, Instant) {
    let began = Instant::now();
    let ClientKey { device, pid } = client.key.clone();
    let outcome = match link.request(&Request::Terminate { device, pid }, REQUEST_TIMEOUT).await {
        Ok(Reply::Done) => AttemptOutcome::Terminated,
        Ok(Reply::NoContext) => AttemptOutcome::NoContext,
        Ok(Reply::Error { message }) | Err(message) => AttemptOutcome::Failed(message),
        Ok(Reply::Status(_)) => AttemptOutcome::Failed("the MPS host sent an unexpected answer".into()),
    };
    (client, outcome, began)
}

fn log_outcome(client: &Client, outcome: &AttemptOutcome, began: Instant, metrics: &Metrics) {
    let Client { key: ClientKey { device, pid }, pod, deadlines, survives_sigterm, .. } = client;
    let took_ms = began.elapsed().as_millis();
    let since_deletion_ms = deadlines.since.elapsed().as_millis();
    match outcome {
        AttemptOutcome::Terminated => {
            metrics.count_termination(TerminationOutcome::Done);
            tracing::info!(
                pod,
                pid,
                device,
                survives_sigterm,
                took_ms,
                since_deletion_ms,
                "terminated a client of a terminating pod"
            );
        }
        AttemptOutcome::NoContext => {
            tracing::debug!(pod, pid, device, "a client of a terminating pod has no context");
        }
        AttemptOutcome::Failed(why) => {
            metrics.count_termination(TerminationOutcome::Failed);
            tracing::warn!(pod, pid, device, took_ms, since_deletion_ms, why, "failed to terminate a client; retrying");
        }
    }
}

fn report_late_termination(client: &Client, why: &str, events: &mpsc::Sender<NodeEvent>, metrics: &Metrics) {
    let Client { key: ClientKey { device, pid }, pod, .. } = client;
    metrics.count_termination(TerminationOutcome::Late);
    tracing::warn!(pod, pid, device, why, "a client was not terminated in time");
    let note = format!(
        "pod {pod} is terminating, but process {pid} of the pod was not terminated through MPS: {why}. If the process is killed while its kernels run, other programs on {device} may fail"
    );
    let event = NodeEvent {
        warning: true,
        reason: "ClientNotTerminated",
        note,
        regarding: None,
        related: EventSubject::device(device),
    };
    if events.try_send(event).is_err() {
        metrics.count_error("event-dropped");
    }
}
