//! The API server: the node's own `GpuNode` is read, its status and events are written. Nothing here holds up what the kubelet is answered.
use std::time::Duration;

use cleave_api::GpuNode;
use cleave_api::gpunode::GpuNodeStatus;
use cleave_api::names::AGENT_MANAGER;
use futures::StreamExt;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::watcher::Event as WatchEvent;
use kube::runtime::watcher::{Config, watcher};
use kube::{Client, Resource};
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use crate::metrics::Metrics;
use crate::node::{Object, Occurrence};
use crate::status::with_times;

/// Least time between two status writes: a burst of changes is one.
const BETWEEN: Duration = Duration::from_millis(200);
/// First and longest pause after a write that failed.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));
/// Longest event note that the API server takes, with room.
const NOTE: usize = 1000;

/// What is known of the object on the server.
#[derive(Debug, Clone, Default)]
pub struct Server {
    /// It is there.
    present: bool,
    /// Its uid, for events.
    uid: Option<String>,
    /// Its status as it was last seen.
    status: Option<GpuNodeStatus>,
}

/// A client, as soon as there is a configuration for one.
pub async fn connect(metrics: &Metrics) -> Client {
    let mut pause = BACK_OFF.0;
    loop {
        match Client::try_default().await {
            Ok(client) => return client,
            Err(error) => {
                metrics.error("api-configuration");
                tracing::warn!(error = &error as &dyn std::error::Error, "there is no way to the API server yet");
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(BACK_OFF.1);
    }
}

/// Follows the node's object for ever.
pub async fn follow(
    client: Client,
    name: String,
    objects: mpsc::Sender<Object>,
    server: watch::Sender<Server>,
    metrics: Metrics,
) {
    let api: Api<DeserializeGuard<GpuNode>> = Api::all(client);
    let config = Config::default().fields(&format!("metadata.name={name}"));
    let mut events = std::pin::pin!(watcher(api, config).default_backoff());
    let mut listed = false;
    while let Some(event) = events.next().await {
        let object = match event {
            Ok(WatchEvent::Init) => {
                listed = false;
                continue;
            }
            Ok(WatchEvent::InitApply(object) | WatchEvent::Apply(object)) => {
                listed = true;
                read(object, &server)
            }
            Ok(WatchEvent::InitDone) if listed => continue,
            Ok(WatchEvent::InitDone | WatchEvent::Delete(_)) => {
                server.send_replace(Server::default());
                tracing::info!(name, "there is no GpuNode yet; the operator makes it");
                Object::Missing
            }
            Err(error) => {
                metrics.error("api-watch");
                tracing::warn!(error = &error as &dyn std::error::Error, "following the GpuNode failed");
                continue;
            }
        };
        if objects.send(object).await.is_err() {
            return;
        }
    }
}

fn read(DeserializeGuard(object): DeserializeGuard<GpuNode>, server: &watch::Sender<Server>) -> Object {
    match object {
        Ok(object) => {
            server.send_replace(Server { present: true, uid: object.metadata.uid, status: object.status });
            Object::Present(object.metadata.generation.unwrap_or_default(), object.spec)
        }
        Err(invalid) => {
            tracing::warn!(error = invalid.error, "the GpuNode is malformed; the last sound spec stays in force");
            server.send_replace(Server { present: true, uid: invalid.metadata.uid, status: None });
            Object::Malformed(invalid.error)
        }
    }
}

/// Writes the status where it differs, for ever.
pub async fn write_status(
    client: Client,
    name: String,
    mut wanted: watch::Receiver<Option<GpuNodeStatus>>,
    mut server: watch::Receiver<Server>,
    metrics: Metrics,
) {
    let api: Api<GpuNode> = Api::all(client);
    let mut pause = BACK_OFF.0;
    // What was written last, until the watch says something newer.
    let mut written: Option<GpuNodeStatus> = None;
    let mut believed = false;
    loop {
        let Server { present, status: seen, .. } = server.borrow_and_update().clone();
        let status = wanted.borrow_and_update().clone();
        if let Some(status) = status.filter(|_| present) {
            let on_server = if believed { written.as_ref() } else { seen.as_ref() };
            let before =
                written.as_ref().or(seen.as_ref()).map(|status| status.conditions.as_slice()).unwrap_or_default();
            let status = with_times(status, before, Timestamp::now());
            if on_server != Some(&status) {
                if let Err(error) = api.patch_status(&name, &PatchParams::apply(AGENT_MANAGER), &patch(&status)).await {
                    metrics.error("api-status");
                    tracing::warn!(error = &error as &dyn std::error::Error, "writing the GpuNode's status failed");
                    sleep(pause).await;
                    pause = (pause * 2).min(BACK_OFF.1);
                    continue;
                }
                pause = BACK_OFF.0;
                written = Some(status);
                believed = true;
                sleep(BETWEEN).await;
            }
        } else {
            written = None;
        }
        tokio::select! {
            // Both are cancel-safe: a change that is not taken is seen by the next call.
            changed = wanted.changed() => if changed.is_err() { return },
            changed = server.changed() => {
                believed = false;
                if changed.is_err() { return }
            }
        }
    }
}

/// A merge patch: every list is replaced, and every top-level field is there.
fn patch(status: &GpuNodeStatus) -> Patch<serde_json::Value> {
    Patch::Merge(serde_json::json!({ "status": status }))
}

/// Writes events on the `GpuNode` and on the Node, for ever. They are a courtesy: one that cannot be written is not tried for ever.
pub async fn write_events(
    client: Client,
    name: String,
    mut occurrences: mpsc::Receiver<Occurrence>,
    server: watch::Receiver<Server>,
    metrics: Metrics,
) {
    let recorder = Recorder::new(client, Reporter { controller: AGENT_MANAGER.into(), instance: Some(name.clone()) });
    while let Some(Occurrence { warning, reason, note }) = occurrences.recv().await {
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            note: Some(note.chars().take(NOTE).collect()),
            action: "Serve".into(),
            secondary: None,
        };
        let uid = server.borrow().uid.clone();
        // The kubelet's own events name the Node by its name as uid, and `kubectl describe node` looks for that.
        let node = reference("v1".into(), "Node".into(), &name, Some(name.clone()));
        let of_node = reference(GpuNode::api_version(&()).into(), GpuNode::kind(&()).into(), &name, uid);
        for object in [&of_node, &node] {
            if let Err(error) = recorder.publish(&event, object).await {
                metrics.error("api-event");
                tracing::warn!(error = &error as &dyn std::error::Error, reason, "writing an event failed");
            }
        }
    }
}

fn reference(api_version: String, kind: String, name: &str, uid: Option<String>) -> ObjectReference {
    ObjectReference {
        api_version: Some(api_version),
        kind: Some(kind),
        name: Some(name.to_owned()),
        uid,
        ..ObjectReference::default()
    }
}
