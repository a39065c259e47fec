//! Reads the node's own `GpuNode` from the API server, and writes its status and Events. The
//! kubelet's requests do not wait for these reads and writes.
use std::sync::Arc;
use std::time::Duration;

use cleave_api::gpunode::GpuNodeStatus;
use cleave_api::names::AGENT_FIELD_MANAGER;
use cleave_api::{GpuNode, GpuNodeSpec};
use futures::StreamExt;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::watcher::Event as WatchEvent;
use kube::runtime::watcher::{Config, watcher};
use kube::{Client, Resource};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::connect;
use super::input::Input;
use super::pods::{self, NodePods};
use super::shutdown;
use crate::args::AgentArgs;
use crate::event::{EventSubject, NodeEvent, PodEvent, PodRef};
use crate::metrics::Metrics;
use crate::node::status::{is_minor_change, with_condition_times};
use crate::object::GpuNodeState;
use crate::termination::shutdown::ShutdownPeriods;

/// Minimum interval between status writes, so that a burst of changes causes one write.
const MIN_STATUS_WRITE_INTERVAL: Duration = Duration::from_millis(200);
/// Delay before a status with only minor changes is written. Pods often start in bursts, and the
/// operator keeps their reservations until the status contains their allocations.
const MINOR_CHANGE_DELAY: Duration = Duration::from_millis(500);
/// First and maximum backoff after a failed write, or after a failure to configure the client.
const STATUS_WRITE_BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));
/// Maximum number of characters of an Event's note. The API server's limit is 1024.
const MAX_NOTE_CHARS: usize = 1000;

/// The node's `GpuNode` as the agent last read it from the API server.
#[derive(Debug, Clone, Default)]
struct ServerState {
    /// Whether the object exists.
    present: bool,
    /// UID of the object, for Events.
    uid: Option<String>,
    /// The status that the agent last read.
    status: Option<GpuNodeStatus>,
    /// Resource version of the object.
    version: Option<String>,
}

/// Creates a client for the API server. Retries until the client's configuration is available.
async fn connect_to_api_server(metrics: &Metrics) -> Client {
    let mut pause = STATUS_WRITE_BACKOFF.0;
    loop {
        match connect::in_cluster_client() {
            Ok(client) => return client,
            Err(error) => {
                metrics.count_error("api-configuration");
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "failed to configure a client for the API server; retrying"
                );
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(STATUS_WRITE_BACKOFF.1);
    }
}

/// Watches the node's `GpuNode` until the receiver of `objects` is closed.
async fn follow_gpu_node(
    client: Client,
    name: String,
    objects: mpsc::Sender<GpuNodeState>,
    server: watch::Sender<ServerState>,
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
                record_gpu_node(object, &server)
            }
            Ok(WatchEvent::InitDone) if listed => continue,
            Ok(WatchEvent::InitDone | WatchEvent::Delete(_)) => {
                server.send_replace(ServerState::default());
                tracing::info!(name, "GpuNode not found; waiting for the operator to create it");
                GpuNodeState::Missing
            }
            Err(error) => {
                metrics.count_error("api-watch");
                tracing::warn!(error = &error as &dyn std::error::Error, "failed to watch the GpuNode");
                continue;
            }
        };
        if objects.send(object).await.is_err() {
            return;
        }
    }
}

/// Records the object in `server` and returns its state. A malformed object does not replace the
/// last valid spec.
fn record_gpu_node(
    DeserializeGuard(object): DeserializeGuard<GpuNode>,
    server: &watch::Sender<ServerState>,
) -> GpuNodeState {
    match object {
        Ok(object) => {
            let ObjectMeta { uid, resource_version, generation, .. } = object.metadata;
            server.send_replace(ServerState { present: true, uid, status: object.status, version: resource_version });
            GpuNodeState::Present(generation.unwrap_or_default(), object.spec)
        }
        Err(invalid) => {
            tracing::warn!(error = invalid.error, "ignoring a malformed GpuNode; the last valid spec still applies");
            server.send_replace(ServerState { present: true, uid: invalid.metadata.uid, ..ServerState::default() });
            GpuNodeState::Malformed(invalid.error)
        }
    }
}

/// Writes the status whenever it changes, until a channel is closed.
async fn write_status(
    client: Client,
    name: String,
    mut wanted: watch::Receiver<Option<GpuNodeStatus>>,
    mut server: watch::Receiver<ServerState>,
    metrics: Metrics,
) {
    let api: Api<GpuNode> = Api::all(client);
    let mut pause = STATUS_WRITE_BACKOFF.0;
    // The last written status and its version. `trust_written` is true until the watch reports the
    // object again.
    let mut written: Option<(GpuNodeStatus, Option<String>)> = None;
    let mut trust_written = false;
    let mut delayed_since: Option<Instant> = None;
    loop {
        let ServerState { present, status: seen, version: seen_version, .. } = server.borrow_and_update().clone();
        let status = wanted.borrow_and_update().clone();
        let mut delayed_until = None;
        if let Some(status) = status.filter(|_| present) {
            let (on_server, version) = match written.as_ref().filter(|_| trust_written) {
                Some((status, version)) => (Some(status), version.clone()),
                None => (seen.as_ref(), seen_version),
            };
            let before = written.as_ref().map(|(status, _)| status).or(seen.as_ref());
            let before = before.map(|status| status.conditions.as_slice()).unwrap_or_default();
            let status = with_condition_times(status, before, Timestamp::now());
            if on_server == Some(&status) {
                delayed_since = None;
            } else {
                let since = *delayed_since.get_or_insert_with(Instant::now);
                delayed_until = on_server
                    .filter(|written| is_minor_change(written, &status))
                    .map(|_| since + MINOR_CHANGE_DELAY)
                    .filter(|until| *until > Instant::now());
                if delayed_until.is_none() {
                    let version = match write_status_once(&api, &name, version, &status).await {
                        Ok(version) => version,
                        Err(error) => {
                            metrics.count_error("api-status");
                            tracing::warn!(
                                error = &error as &dyn std::error::Error,
                                "failed to write the GpuNode's status"
                            );
                            sleep(pause).await;
                            pause = (pause * 2).min(STATUS_WRITE_BACKOFF.1);
                            continue;
                        }
                    };
                    pause = STATUS_WRITE_BACKOFF.0;
                    written = Some((status, version));
                    (trust_written, delayed_since) = (true, None);
                    sleep(MIN_STATUS_WRITE_INTERVAL).await;
                }
            }
        } else {
            (written, delayed_since) = (None, None);
        }
        tokio::select! {
            // All branches are cancel-safe: the next call of `changed` returns a missed change, and
            // the next iteration sets the timer again.
            changed = wanted.changed() => if changed.is_err() { return },
            changed = server.changed() => {
                trust_written = false;
                if changed.is_err() { return }
            }
            () = async { sleep_until(delayed_until.unwrap_or_else(Instant::now)).await }, if delayed_until.is_some() => {}
        }
    }
}

/// Writes a status once and returns the new resource version. Replaces a known version, which costs
/// the API server less than a patch. Patches the status if the version is unknown, or after a
/// conflict with another writer.
async fn write_status_once(
    api: &Api<GpuNode>,
    name: &str,
    version: Option<String>,
    status: &GpuNodeStatus,
) -> kube::Result<Option<String>> {
    if version.is_some() {
        // The empty spec is harmless, because the API server ignores all fields except the status
        // in this request.
        let mut object = GpuNode::new(name, GpuNodeSpec::default());
        object.metadata.resource_version = version;
        object.status = Some(status.clone());
        let params = PostParams { field_manager: Some(AGENT_FIELD_MANAGER.into()), ..PostParams::default() };
        match api.replace_status(name, &params, &object).await {
            Err(kube::Error::Api(refused)) if refused.code == 409 => {}
            outcome => return outcome.map(|object| object.metadata.resource_version),
        }
    }
    let patched = api.patch_status(name, &PatchParams::apply(AGENT_FIELD_MANAGER), &status_patch(status)).await;
    patched.map(|object| object.metadata.resource_version)
}

/// Returns a merge patch with the whole status. The patch replaces each list as a whole.
fn status_patch(status: &GpuNodeStatus) -> Patch<serde_json::Value> {
    Patch::Merge(serde_json::json!({ "status": status }))
}

/// Publishes each Event on the `GpuNode`, on the Node, and on the pod that the Event is about,
/// until the channel is closed. Does not retry a failed Event.
async fn write_events(
    client: Client,
    name: String,
    mut events: mpsc::Receiver<NodeEvent>,
    server: watch::Receiver<ServerState>,
    metrics: Metrics,
) {
    let recorder =
        Recorder::new(client, Reporter { controller: AGENT_FIELD_MANAGER.into(), instance: Some(name.clone()) });
    while let Some(NodeEvent { warning, reason, note, regarding, related }) = events.recv().await {
        let pod = regarding.map(reference_to_pod);
        let uid = server.borrow().uid.clone();
        // `kubectl describe node` searches for Events that have the Node's name as UID, because the
        // kubelet's own Events have it.
        let node = object_reference("v1".into(), "Node".into(), &name, Some(name.clone()));
        let of_node = object_reference(GpuNode::api_version(&()).into(), GpuNode::kind(&()).into(), &name, uid);
        let to_reference = |related| match related {
            EventSubject::Pod(pod) => reference_to_pod(pod),
            EventSubject::Device(device) => ObjectReference { field_path: Some(device), ..of_node.clone() },
        };
        // The recorder merges Events with the same reason on the same object, and keeps only the
        // first note. Different related objects prevent the merge.
        let related = pod.clone().or_else(|| related.map(to_reference));
        let event = |related| Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            note: Some(note.chars().take(MAX_NOTE_CHARS).collect()),
            action: "Serve".into(),
            secondary: related,
        };
        let on_pod = pod.iter().map(|pod| (None, pod));
        for (related, object) in on_pod.chain([(related.clone(), &of_node), (related.clone(), &node)]) {
            if let Err(error) = recorder.publish(&event(related), object).await {
                metrics.count_error("api-event");
                tracing::warn!(error = &error as &dyn std::error::Error, reason, "failed to publish an Event");
            }
        }
    }
}

fn reference_to_pod(PodRef { namespace, name, uid }: PodRef) -> ObjectReference {
    let uid = (!uid.is_empty()).then_some(uid);
    ObjectReference { namespace: Some(namespace), ..object_reference("v1".into(), "Pod".into(), &name, uid) }
}

fn object_reference(api_version: String, kind: String, name: &str, uid: Option<String>) -> ObjectReference {
    ObjectReference {
        api_version: Some(api_version),
        kind: Some(kind),
        name: Some(name.to_owned()),
        uid,
        ..ObjectReference::default()
    }
}

/// Runs all tasks that use the API server.
pub(super) async fn run(
    args: Arc<AgentArgs>,
    node_pods: NodePods,
    inputs: mpsc::Sender<Input>,
    statuses: watch::Receiver<Option<cleave_api::GpuNodeStatus>>,
    (events, pod_events): (mpsc::Receiver<NodeEvent>, mpsc::Receiver<PodEvent>),
    metrics: Metrics,
) -> anyhow::Result<()> {
    let name = args.node_name.clone();
    let client = connect_to_api_server(&metrics).await;
    let (server, seen) = watch::channel(ServerState::default());
    let (objects, read) = mpsc::channel(4);
    let (note, began) = watch::channel(None);
    let periods = ShutdownPeriods::new(args.shutdown_grace.clone());
    tokio::join!(
        shutdown::watch_shutdowns(&args, periods.clone(), note),
        follow_gpu_node(client.clone(), name.clone(), objects, server, metrics.clone()),
        pods::follow_pods(client.clone(), name.clone(), node_pods, (periods, began), metrics.clone()),
        write_status(client.clone(), name.clone(), statuses, seen.clone(), metrics.clone()),
        write_pod_events(client.clone(), name.clone(), pod_events, metrics.clone()),
        write_events(client, name, events, seen, metrics),
        forward_objects(read, inputs),
    );
    Ok(())
}

/// Forwards states of the `GpuNode` to the main loop.
pub(super) async fn forward_objects(mut objects: mpsc::Receiver<GpuNodeState>, inputs: mpsc::Sender<Input>) {
    while let Some(object) = objects.recv().await {
        if inputs.send(Input::Object(object)).await.is_err() {
            return;
        }
    }
}

/// Publishes Events on pods until the channel is closed. Does not retry a failed Event.
async fn write_pod_events(client: Client, node: String, mut events: mpsc::Receiver<PodEvent>, metrics: Metrics) {
    let recorder = Recorder::new(client, Reporter { controller: AGENT_FIELD_MANAGER.into(), instance: Some(node) });
    while let Some(PodEvent { namespace, pod, uid, reason, note }) = events.recv().await {
        let regarding = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            namespace: Some(namespace),
            name: Some(pod),
            uid: Some(uid),
            ..ObjectReference::default()
        };
        let note = note.chars().take(MAX_NOTE_CHARS).collect();
        let event =
            Event { type_: EventType::Warning, reason, note: Some(note), action: "Watch".into(), secondary: None };
        if let Err(error) = recorder.publish(&event, &regarding).await {
            metrics.count_error("api-event");
            tracing::warn!(error = &error as &dyn std::error::Error, "failed to publish a pod Event");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cleave_api::gpunode::{AllocationStatus, GpuStatus};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::time::timeout;
    use tower_test::mock;

    use super::*;
    use crate::event::device_warning;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    type MockServer = mock::Handle<http::Request<Body>, http::Response<Body>>;

    fn mock_client() -> (Client, MockServer) {
        let (service, server) = mock::pair::<http::Request<Body>, http::Response<Body>>();
        (Client::new(service, "default"), server)
    }

    /// Answers the next request, and returns its method and URI, and its body.
    async fn answer_request(server: &mut MockServer, status: u16, body: &Value) -> (String, Value) {
        let (request, reply) = timeout(TEST_TIMEOUT, server.next_request()).await.unwrap().unwrap();
        let line = format!("{} {}", request.method(), request.uri());
        let sent = request.into_body().collect_bytes().await.unwrap();
        reply.send_response(
            http::Response::builder().status(status).body(Body::from(body.to_string().into_bytes())).unwrap(),
        );
        (line, serde_json::from_slice(&sent).unwrap_or_default())
    }

    fn gpu_node_object(status: &GpuNodeStatus) -> Value {
        json!({ "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "n" }, "spec": {}, "status": status })
    }

    fn gpu_node_status(driver: &str) -> GpuNodeStatus {
        GpuNodeStatus { driver: driver.into(), ..GpuNodeStatus::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_status_is_written_and_retried_after_an_error() {
        let (client, mut api) = mock_client();
        let (wanted, wants) = watch::channel(Some(gpu_node_status("1")));
        let (server, seen) = watch::channel(super::ServerState::default());
        tokio::spawn(write_status(client, "n".into(), wants, seen, Metrics::new()));
        assert!(timeout(Duration::from_secs(60), api.next_request()).await.is_err(), "there is no object");

        let present = |status| super::ServerState { present: true, status, ..super::ServerState::default() };
        server.send_replace(present(None));
        let failed = answer_request(
            &mut api,
            500,
            &json!({ "kind": "Status", "status": "Failure", "code": 500, "message": "", "reason": "" }),
        )
        .await;
        assert_eq!(failed.0, "PATCH /apis/cleave.dev/v1alpha1/gpunodes/n/status?&fieldManager=cleave-agent");
        let (_, sent) = answer_request(&mut api, 200, &gpu_node_object(&gpu_node_status("1"))).await;
        assert_eq!(sent["status"]["driver"], "1");

        server.send_replace(present(Some(gpu_node_status("1"))));
        assert!(timeout(Duration::from_secs(60), api.next_request()).await.is_err(), "it is up to date");
        wanted.send_replace(Some(gpu_node_status("2")));
        assert_eq!(
            answer_request(&mut api, 200, &gpu_node_object(&gpu_node_status("2"))).await.1["status"]["driver"],
            "2"
        );
        server.send_replace(present(Some(gpu_node_status("someone's"))));
        assert_eq!(
            answer_request(&mut api, 200, &gpu_node_object(&gpu_node_status("2"))).await.1["status"]["driver"],
            "2",
            "the agent overwrites other writers"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_known_version_is_replaced_and_after_a_conflict_the_status_is_patched() {
        let (client, mut api) = mock_client();
        let (wanted, wants) = watch::channel(Some(gpu_node_status("1")));
        let known = super::ServerState { present: true, version: Some("7".into()), ..super::ServerState::default() };
        let (_server, seen) = watch::channel(known);
        tokio::spawn(write_status(client, "n".into(), wants, seen, Metrics::new()));
        let with = |version: &str, status: &GpuNodeStatus| {
            let mut object = gpu_node_object(status);
            object["metadata"]["resourceVersion"] = version.into();
            object
        };
        let (request, sent) = answer_request(&mut api, 200, &with("8", &gpu_node_status("1"))).await;
        assert_eq!(request, "PUT /apis/cleave.dev/v1alpha1/gpunodes/n/status?&fieldManager=cleave-agent");
        assert_eq!((&sent["metadata"]["resourceVersion"], &sent["status"]["driver"]), (&json!("7"), &json!("1")));

        wanted.send_replace(Some(gpu_node_status("2")));
        let conflict =
            json!({ "kind": "Status", "status": "Failure", "code": 409, "message": "", "reason": "Conflict" });
        let (request, sent) = answer_request(&mut api, 409, &conflict).await;
        assert!(request.starts_with("PUT "), "{request}");
        assert_eq!(sent["metadata"]["resourceVersion"], "8", "the version of its own last write");
        let (request, sent) = answer_request(&mut api, 200, &with("10", &gpu_node_status("2"))).await;
        assert_eq!((request.starts_with("PATCH "), &sent["status"]["driver"]), (true, &json!("2")), "{request}");

        wanted.send_replace(Some(gpu_node_status("3")));
        assert_eq!(
            answer_request(&mut api, 200, &with("11", &gpu_node_status("3"))).await.1["metadata"]["resourceVersion"],
            "10"
        );
    }

    fn status_with_allocations(pods: &[&str]) -> GpuNodeStatus {
        let row = |pod: &&str| AllocationStatus { pod: (*pod).to_owned(), ..AllocationStatus::default() };
        let gpu = GpuStatus { allocations: pods.iter().map(row).collect(), ..GpuStatus::default() };
        GpuNodeStatus { gpus: vec![gpu], ..GpuNodeStatus::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn new_allocations_are_delayed_and_freed_allocations_are_reported_at_once() {
        let (client, mut api) = mock_client();
        let (wanted, wants) = watch::channel(Some(status_with_allocations(&[])));
        let present = super::ServerState {
            present: true,
            status: Some(status_with_allocations(&[])),
            ..super::ServerState::default()
        };
        let (_server, seen) = watch::channel(present);
        tokio::spawn(write_status(client, "n".into(), wants, seen, Metrics::new()));
        let pods = |sent: &Value| sent["status"]["gpus"][0]["allocations"].as_array().map_or(0, Vec::len);

        // Later minor changes do not extend the delay of the first minor change.
        let began = Instant::now();
        let mut pods_so_far: Vec<&str> = Vec::new();
        for pod in ["a", "b", "c", "d"] {
            pods_so_far.push(pod);
            wanted.send_replace(Some(status_with_allocations(&pods_so_far)));
            assert!(timeout(MINOR_CHANGE_DELAY / 5, api.next_request()).await.is_err(), "{pod}");
        }
        let (_, sent) = answer_request(&mut api, 200, &gpu_node_object(&status_with_allocations(&pods_so_far))).await;
        assert_eq!((pods(&sent), began.elapsed() <= MINOR_CHANGE_DELAY + Duration::from_millis(2)), (4, true));

        // An allocation is added, and then another allocation is removed. The removal is written at
        // once, because another pod may use the freed slices.
        tokio::time::sleep(MIN_STATUS_WRITE_INTERVAL).await;
        let began = Instant::now();
        wanted.send_replace(Some(status_with_allocations(&["a", "b", "c", "d", "e"])));
        assert!(timeout(MINOR_CHANGE_DELAY / 5, api.next_request()).await.is_err());
        wanted.send_replace(Some(status_with_allocations(&["a", "b", "c", "e"])));
        assert_eq!(pods(&answer_request(&mut api, 200, &gpu_node_object(&status_with_allocations(&["a"]))).await.1), 4);
        assert!(began.elapsed() < MINOR_CHANGE_DELAY / 2, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn events_of_a_pod_are_published_on_the_pod_and_on_the_node_and_are_not_merged() {
        let (client, mut api) = mock_client();
        let (events, to_publish) = mpsc::channel(4);
        let (_server, seen) = watch::channel(super::ServerState::default());
        tokio::spawn(write_events(client, "n".into(), to_publish, seen, Metrics::new()));
        for name in ["a", "b"] {
            let pod = PodRef { namespace: "ns".into(), name: name.into(), uid: format!("uid-{name}") };
            let note = format!("of {name}");
            events
                .send(NodeEvent { warning: true, reason: "R", note, regarding: Some(pod), related: None })
                .await
                .unwrap();
            let mut published = Vec::new();
            for _ in 0..3 {
                let (request, sent) = answer_request(&mut api, 201, &json!({})).await;
                assert_eq!((&sent["note"], &sent["type"]), (&json!(format!("of {name}")), &json!("Warning")));
                published.push((request, sent["regarding"]["kind"].clone(), sent["regarding"]["uid"].clone()));
                let related = if published.len() == 1 { Value::Null } else { json!(name) };
                assert_eq!(sent["related"]["name"], related);
            }
            let path = |namespace: &str| format!("POST /apis/events.k8s.io/v1/namespaces/{namespace}/events?");
            assert_eq!(
                published,
                [
                    (path("ns"), json!("Pod"), json!(format!("uid-{name}"))),
                    (path("default"), json!("GpuNode"), Value::Null),
                    (path("default"), json!("Node"), json!("n")),
                ]
            );
        }
        // The recorder does not merge Events on the node alone either, if their related pods
        // differ.
        for name in ["a", "b"] {
            let pod = PodRef { namespace: "ns".into(), name: name.into(), uid: format!("uid-{name}") };
            let note = format!("from {name}");
            let event =
                NodeEvent { warning: true, reason: "F", note, regarding: None, related: Some(EventSubject::Pod(pod)) };
            events.send(event).await.unwrap();
            for kind in ["GpuNode", "Node"] {
                let (request, sent) = answer_request(&mut api, 201, &json!({})).await;
                assert_eq!(request, "POST /apis/events.k8s.io/v1/namespaces/default/events?");
                assert_eq!((&sent["note"], &sent["regarding"]["kind"]), (&json!(format!("from {name}")), &json!(kind)));
            }
        }
        // The recorder does not merge Events about different devices.
        for device in ["GPU-1", "GPU-2"] {
            events.send(device_warning("D", device, format!("of {device}"))).await.unwrap();
            for _ in ["GpuNode", "Node"] {
                let (request, sent) = answer_request(&mut api, 201, &json!({})).await;
                assert_eq!(request, "POST /apis/events.k8s.io/v1/namespaces/default/events?");
                assert_eq!(
                    (&sent["note"], &sent["related"]["fieldPath"]),
                    (&json!(format!("of {device}")), &json!(device))
                );
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_malformed_object_is_reported_and_the_watch_continues() {
        let (client, mut api) = mock_client();
        let (objects, mut read) = mpsc::channel(4);
        let (server, _seen) = watch::channel(super::ServerState::default());
        tokio::spawn(follow_gpu_node(client, "n".into(), objects, server, Metrics::new()));
        let bad = json!({ "metadata": { "name": "n", "resourceVersion": "1" }, "spec": { "gpus": "none" } });
        let list = json!({ "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNodeList", "metadata": { "resourceVersion": "1" }, "items": [bad] });
        let (request, _) = answer_request(&mut api, 200, &list).await;
        assert!(request.contains("fieldSelector=metadata.name%3Dn"), "{request}");
        assert!(matches!(timeout(TEST_TIMEOUT, read.recv()).await.unwrap(), Some(GpuNodeState::Malformed(_))));
        let good = json!({ "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "n", "resourceVersion": "2", "generation": 2 }, "spec": { "planId": "p" } });
        answer_request(&mut api, 200, &json!({ "type": "MODIFIED", "object": good })).await;
        let spec = GpuNodeSpec { plan_id: "p".into(), ..GpuNodeSpec::default() };
        assert_eq!(timeout(TEST_TIMEOUT, read.recv()).await.unwrap(), Some(GpuNodeState::Present(2, spec)));
    }
}
