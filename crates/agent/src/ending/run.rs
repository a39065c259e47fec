//! The task that ends clients: woken by what is known of pods and of the MPS host, never by looking around.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use cleave_gpu::mps::wire::{Reply, Request};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::process::{self, Process};
use super::{Client, Ending, Key, Outcome, Pods};
use crate::metrics::{Metrics, Termination};
use crate::mps;
use crate::node::Occurrence;
use crate::serve::Counter;

/// The MPS host answers within 8 s, of which it waits 4 for its daemon to have time.
const ANSWER: Duration = Duration::from_secs(10);

/// Ends clients of pods that leave, for ever.
pub(crate) async fn run(
    link: mps::Link,
    counter: Arc<Counter>,
    mut views: watch::Receiver<mps::View>,
    occurrences: mpsc::Sender<Occurrence>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let mut pods = counter.departures.subscribe();
    let (mut ending, mut known) = (Ending::default(), BTreeMap::new());
    let mut asked = JoinSet::new();
    loop {
        let clients = clients(&pods.borrow_and_update(), &views.borrow_and_update(), &mut known);
        let decision = ending.decide(clients, Instant::now());
        for (client, why) in decision.tell {
            tell(&client, &why, &occurrences, &metrics);
        }
        for client in decision.terminate {
            asked.spawn(terminate(link.clone(), client));
        }
        let again = decision.again.map(tokio::time::Instant::from_std);
        tokio::select! {
            // All are cancel-safe: what is not taken is seen by the next call.
            changed = pods.changed() => changed.context("nobody tells of pods any more")?,
            changed = views.changed() => changed.context("nobody tells of the MPS host any more")?,
            Some(answer) = asked.join_next() => {
                let (client, outcome, began) = answer.context("ending a client failed")?;
                ended(&client, &outcome, began, &metrics);
                ending.answered(&client.key, &outcome, Instant::now());
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

/// The clients of pods that leave. Processes are looked at only where a pod does, and whose they are only once: `known` is that.
fn clients(pods: &Pods, view: &mps::View, known: &mut BTreeMap<Key, Vec<String>>) -> Vec<Client> {
    if !pods.any_leaves() {
        known.clear();
        return Vec::new();
    }
    let mut before = std::mem::take(known);
    let mut found = Vec::new();
    for (device, daemon) in &view.status.daemons {
        for client in &daemon.clients {
            let key = Key { device: device.clone(), pid: client.pid };
            let uids = before.remove(&key).unwrap_or_else(|| process::pods_of(client.pid));
            if let Some((pod, leaving)) = pods.leaving(&uids, client.allocation.as_deref())
                && let Some(Process { survives, stopped }) = Process::look(client.pid)
            {
                found.push(Client { key: key.clone(), pod: pod.to_owned(), leaving, survives, stopped });
            }
            known.insert(key, uids);
        }
    }
    found
}

/// Asks the MPS host to end a client; what came of it, and when that began.
pub(crate) async fn terminate(link: mps::Link, client: Client) -> (Client, Outcome, Instant) {
    let began = Instant::now();
    let Key { device, pid } = client.key.clone();
    let outcome = match link.ask(&Request::Terminate { device, pid }, ANSWER).await {
        Ok(Reply::Done) => Outcome::Terminated,
        Ok(Reply::NoContext) => Outcome::Idle,
        Ok(Reply::Error { message }) | Err(message) => Outcome::Failed(message),
        Ok(Reply::Status(_)) => Outcome::Failed("the MPS host answered something else".into()),
    };
    (client, outcome, began)
}

fn ended(client: &Client, outcome: &Outcome, began: Instant, metrics: &Metrics) {
    let Client { key: Key { device, pid }, pod, leaving, survives, .. } = client;
    let took_ms = began.elapsed().as_millis();
    let since_deletion_ms = leaving.since.elapsed().as_millis();
    match outcome {
        Outcome::Terminated => {
            metrics.terminated(Termination::Done);
            tracing::info!(
                pod,
                pid,
                device,
                survives,
                took_ms,
                since_deletion_ms,
                "a client was ended: its pod leaves"
            );
        }
        Outcome::Idle => {
            tracing::debug!(pod, pid, device, "a client of a pod that leaves has no context to end");
        }
        Outcome::Failed(why) => {
            metrics.terminated(Termination::Failed);
            tracing::warn!(
                pod,
                pid,
                device,
                took_ms,
                since_deletion_ms,
                why,
                "a client could not be ended; trying again"
            );
        }
    }
}

fn tell(client: &Client, why: &str, occurrences: &mpsc::Sender<Occurrence>, metrics: &Metrics) {
    let Client { key: Key { device, pid }, pod, .. } = client;
    metrics.terminated(Termination::Late);
    tracing::warn!(pod, pid, device, why, "a client is not ended, and its pod leaves");
    let note = format!(
        "pod {pod} leaves, and its process {pid} is not ended through MPS: {why}. Killed with work in flight, it may break the other \
         programs on {device}"
    );
    let occurrence = Occurrence { warning: true, reason: "ClientNotEnded", note, regarding: None, related: None };
    if occurrences.try_send(occurrence).is_err() {
        metrics.error("event-dropped");
    }
}
