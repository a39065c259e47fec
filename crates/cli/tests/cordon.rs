//! Tests `cleave cordon`, `cleave drain` and `cleave forget` against a mock API server.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
use std::time::Duration;

use cleave_api::names::{CORDON_ANNOTATION, FORGOTTEN_ANNOTATION};
use cleave_cli::cordon::cordon;
use cleave_cli::drain::{DrainArgs, DrainOutcome, drain};
use cleave_cli::forget::{ForgetArgs, ForgetOutcome, forget};
use cleave_cli::{ClusterArgs, GpuArgs};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::timeout;
use tower_test::mock;

/// Time limit for the next request, in tokio's paused time. Longer than any test waits.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

type Server = mock::Handle<http::Request<Body>, http::Response<Body>>;

fn mock_client() -> (Client, Server) {
    let (service, server) = mock::pair::<http::Request<Body>, http::Response<Body>>();
    (Client::new(service, "default"), server)
}

/// Answers the next request. Returns the method and the path of the request, and its body.
async fn answer_request(server: &mut Server, status: u16, body: &Value) -> (String, Value) {
    let (request, reply) = timeout(REQUEST_TIMEOUT, server.next_request()).await.unwrap().unwrap();
    let line = format!("{} {}", request.method(), request.uri().path());
    let sent = request.into_body().collect_bytes().await.unwrap();
    let body = Body::from(body.to_string().into_bytes());
    reply.send_response(http::Response::builder().status(status).body(body).unwrap());
    (line, serde_json::from_slice(&sent).unwrap_or_default())
}

fn error_status(code: u16) -> Value {
    json!({"kind": "Status", "status": "Failure", "code": code, "message": "no", "reason": ""})
}

/// Returns a `GpuNode` on which these pods use GPU 0.
fn gpu_node_with_pods(pods: &[&str]) -> Value {
    let allocation = |pod: &&str| json!({"pod": pod, "container": "c", "resource": "nvidia.com/gpu-mps", "device": "GPU-a", "ids": ["GPU-a::0"]});
    let slice = json!({"device": "GPU-a", "resource": "nvidia.com/gpu-mps", "total": 10, "inUse": pods.len(),
        "unhealthy": 0});
    json!({
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "GpuNode",
        "metadata": {"name": "n", "resourceVersion": "7", "annotations": {"other": "x"}},
        "spec": {},
        "status": {"gpus": [{"uuid": "GPU-a", "index": 0, "model": "H100", "memoryMib": 1, "sms": 1,
            "health": {"healthy": true}, "slices": [slice],
            "allocations": pods.iter().map(allocation).collect::<Vec<_>>()}]},
    })
}

fn gpu_args() -> GpuArgs {
    GpuArgs { node: "n".into(), gpu: "0".into(), cluster: ClusterArgs::default() }
}

fn drain_args(force: bool, timeout: u64) -> DrainArgs {
    let cluster = ClusterArgs::default();
    let (node, gpu) = ("n".into(), Some("0".into()));
    DrainArgs { node, gpu, cluster, reason: "fan".into(), grace: Some(5), timeout, force, quiesce: false }
}

fn pod(controlled: bool) -> Value {
    let owner = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "j", "controller": true}]);
    json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {
        "name": "p", "namespace": "ns", "uid": "u", "ownerReferences": if controlled { owner } else { json!([]) }}})
}

/// Answers the requests that cordon the GPU.
async fn answer_cordon(server: &mut Server, pods: &[&str]) {
    answer_request(server, 200, &gpu_node_with_pods(pods)).await;
    answer_request(server, 200, &gpu_node_with_pods(pods)).await;
}

#[tokio::test(start_paused = true)]
async fn cordon_retries_on_a_conflict_and_keeps_the_other_change() {
    let (client, mut server) = mock_client();
    let cordoning = tokio::spawn(async move { cordon(&client, &gpu_args(), "fan").await });
    answer_request(&mut server, 200, &gpu_node_with_pods(&[])).await;
    let (line, sent) = answer_request(&mut server, 409, &error_status(409)).await;
    assert_eq!(line, "PATCH /apis/cleave.dev/v1alpha1/gpunodes/n");
    assert_eq!(sent["metadata"], json!({"resourceVersion": "7", "annotations": {CORDON_ANNOTATION: "GPU-a=fan"}}));
    let mut other = gpu_node_with_pods(&[]);
    other["metadata"]["annotations"] = json!({CORDON_ANNOTATION: "GPU-b"});
    other["metadata"]["resourceVersion"] = json!("8");
    answer_request(&mut server, 200, &other).await;
    let (_, sent) = answer_request(&mut server, 200, &other).await;
    let both = json!({CORDON_ANNOTATION: "GPU-a=fan,GPU-b"});
    assert_eq!(sent["metadata"], json!({"resourceVersion": "8", "annotations": both}));
    assert_eq!(cordoning.await.unwrap().unwrap().uuid, "GPU-a");
}

#[tokio::test(start_paused = true)]
async fn drain_retries_a_pod_that_a_disruption_budget_protects() {
    let (client, mut server) = mock_client();
    let draining = tokio::spawn(async move { drain(&client, &client, &drain_args(false, 0)).await });
    answer_cordon(&mut server, &["ns/p"]).await;
    answer_request(&mut server, 200, &gpu_node_with_pods(&["ns/p"])).await;
    assert_eq!(answer_request(&mut server, 200, &pod(true)).await.0, "GET /api/v1/namespaces/ns/pods/p");
    let (line, sent) = answer_request(&mut server, 429, &error_status(429)).await;
    assert_eq!(line, "POST /api/v1/namespaces/ns/pods/p/eviction");
    assert_eq!(sent["deleteOptions"], json!({"preconditions": {"uid": "u"}, "gracePeriodSeconds": 5}));
    // `cleave drain` polls the GPU until the retry is due.
    let retry = loop {
        let (line, _) = answer_request(&mut server, 200, &gpu_node_with_pods(&["ns/p"])).await;
        if !line.starts_with("GET /apis/cleave.dev") {
            break line;
        }
    };
    assert_eq!(retry, "GET /api/v1/namespaces/ns/pods/p");
    drop(draining);
}

#[tokio::test(start_paused = true)]
async fn drain_evicts_no_bare_pod_without_force() {
    let (client, mut server) = mock_client();
    let draining = tokio::spawn(async move { drain(&client, &client, &drain_args(false, 0)).await });
    answer_cordon(&mut server, &["ns/p"]).await;
    answer_request(&mut server, 200, &gpu_node_with_pods(&["ns/p"])).await;
    answer_request(&mut server, 200, &pod(false)).await;
    let error = draining.await.unwrap().unwrap_err().to_string();
    assert_eq!(
        error,
        "no controller recreates these pods: ns/p. Pass --force to evict them. GPU 0 (GPU-a) on node n remains cordoned."
    );
}

#[tokio::test(start_paused = true)]
async fn drain_with_force_evicts_a_bare_pod_and_times_out_if_the_pod_keeps_running() {
    let (client, mut server) = mock_client();
    let draining = tokio::spawn(async move { drain(&client, &client, &drain_args(true, 3)).await });
    answer_cordon(&mut server, &["ns/p"]).await;
    answer_request(&mut server, 200, &gpu_node_with_pods(&["ns/p"])).await;
    answer_request(&mut server, 200, &pod(false)).await;
    let (line, _) = answer_request(&mut server, 201, &json!({"kind": "Status", "status": "Success"})).await;
    assert!(line.ends_with("/eviction"), "{line}");
    for _ in 0..3 {
        answer_request(&mut server, 200, &gpu_node_with_pods(&["ns/p"])).await;
    }
    assert_eq!(draining.await.unwrap().unwrap(), DrainOutcome::TimedOut);
}

#[tokio::test(start_paused = true)]
async fn drain_of_a_free_gpu_ends_at_once() {
    let (client, mut server) = mock_client();
    let draining = tokio::spawn(async move { drain(&client, &client, &drain_args(false, 0)).await });
    answer_cordon(&mut server, &[]).await;
    answer_request(&mut server, 200, &gpu_node_with_pods(&[])).await;
    assert_eq!(draining.await.unwrap().unwrap(), DrainOutcome::Free);
}

#[tokio::test(start_paused = true)]
async fn a_node_is_quiesced_when_the_agent_reports_each_of_its_gpus_as_quiesced() {
    let (client, mut server) = mock_client();
    let args = DrainArgs { gpu: None, quiesce: true, ..drain_args(false, 0) };
    let draining = tokio::spawn(async move { drain(&client, &client, &args).await });
    let two = |quiesced: &[bool]| {
        let mut object = gpu_node_with_pods(&[]);
        let gpu = |(index, quiesced): (usize, Option<&bool>)| {
            json!({"uuid": format!("GPU-{}", ["a", "b"][index]), "index": index, "model": "H100", "memoryMib": 1,
                "sms": 1, "health": {"healthy": true},
                "quiesce": quiesced.map(|quiesced| json!({"quiesced": quiesced, "message": "m"}))})
        };
        object["status"]["gpus"] = (0..2).map(|index| gpu((index, quiesced.get(index)))).collect();
        object
    };
    answer_request(&mut server, 200, &two(&[])).await;
    let (_, sent) = answer_request(&mut server, 200, &two(&[])).await;
    assert_eq!(sent["metadata"]["annotations"], json!({CORDON_ANNOTATION: "GPU-a=fan,GPU-b=fan"}));
    answer_request(&mut server, 200, &two(&[])).await;
    answer_request(&mut server, 200, &two(&[])).await;
    let (_, sent) = answer_request(&mut server, 200, &two(&[])).await;
    assert_eq!(sent["metadata"]["annotations"], json!({"cleave.dev/quiesce": "GPU-a,GPU-b"}));
    answer_request(&mut server, 200, &two(&[true, false])).await;
    assert!(!draining.is_finished());
    answer_request(&mut server, 200, &two(&[true, true])).await;
    assert_eq!(draining.await.unwrap().unwrap(), DrainOutcome::Free);
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_is_reported_during_the_drain_of_a_node_is_drained_before_the_quiesce() {
    let (client, mut server) = mock_client();
    let args = DrainArgs { gpu: None, quiesce: true, ..drain_args(false, 0) };
    let draining = tokio::spawn(async move { drain(&client, &client, &args).await });
    let gpus = |uuids: &[&str], quiesced: bool| {
        let mut object = gpu_node_with_pods(&[]);
        let gpu = |(index, uuid): (usize, &&str)| {
            json!({"uuid": uuid, "index": index, "model": "H100", "memoryMib": 1, "sms": 1,
                "health": {"healthy": true}, "quiesce": {"quiesced": quiesced, "message": "m"}})
        };
        object["status"]["gpus"] = uuids.iter().enumerate().map(gpu).collect();
        object
    };
    answer_request(&mut server, 200, &gpus(&["GPU-a"], false)).await;
    answer_request(&mut server, 200, &gpus(&["GPU-a"], false)).await;
    // The agent reports a second GPU, and the first GPU now has another index.
    let both = |quiesced| gpus(&["GPU-b", "GPU-a"], quiesced);
    answer_request(&mut server, 200, &both(false)).await;
    answer_request(&mut server, 200, &both(false)).await;
    let (_, sent) = answer_request(&mut server, 200, &both(false)).await;
    assert_eq!(sent["metadata"]["annotations"], json!({CORDON_ANNOTATION: "GPU-b=fan"}));
    answer_request(&mut server, 200, &both(false)).await;
    answer_request(&mut server, 200, &both(false)).await;
    let (_, sent) = answer_request(&mut server, 200, &both(false)).await;
    assert_eq!(sent["metadata"]["annotations"], json!({"cleave.dev/quiesce": "GPU-a,GPU-b"}));
    answer_request(&mut server, 200, &both(true)).await;
    assert_eq!(draining.await.unwrap().unwrap(), DrainOutcome::Free);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_reported_after_the_gpu_seemed_to_be_free_is_evicted_too() {
    let (client, mut server) = mock_client();
    let args = DrainArgs { quiesce: true, ..drain_args(false, 0) };
    let draining = tokio::spawn(async move { drain(&client, &client, &args).await });
    answer_cordon(&mut server, &[]).await;
    answer_request(&mut server, 200, &gpu_node_with_pods(&[])).await;
    // Answer the requests that quiesce the GPU.
    answer_cordon(&mut server, &[]).await;
    answer_request(&mut server, 200, &gpu_node_with_pods(&["ns/p"])).await;
    assert_eq!(answer_request(&mut server, 200, &pod(true)).await.0, "GET /api/v1/namespaces/ns/pods/p");
    let (line, _) = answer_request(&mut server, 201, &json!({"kind": "Status", "status": "Success"})).await;
    assert_eq!(line, "POST /api/v1/namespaces/ns/pods/p/eviction");
    let mut quiesced = gpu_node_with_pods(&[]);
    quiesced["status"]["gpus"][0]["quiesce"] = json!({"quiesced": true, "message": "m"});
    answer_request(&mut server, 200, &quiesced).await;
    assert_eq!(draining.await.unwrap().unwrap(), DrainOutcome::Free);
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_is_free_at_the_timeout_is_quiesced_and_the_drain_times_out_afterwards() {
    let (client, mut server) = mock_client();
    let args = DrainArgs { quiesce: true, ..drain_args(true, 1) };
    let draining = tokio::spawn(async move { drain(&client, &client, &args).await });
    answer_cordon(&mut server, &["ns/p"]).await;
    answer_request(&mut server, 200, &gpu_node_with_pods(&["ns/p"])).await;
    answer_request(&mut server, 200, &pod(true)).await;
    answer_request(&mut server, 201, &json!({"kind": "Status", "status": "Success"})).await;
    // One second later, the pod has exited.
    answer_request(&mut server, 200, &gpu_node_with_pods(&[])).await;
    answer_request(&mut server, 200, &gpu_node_with_pods(&[])).await;
    let (_, sent) = answer_request(&mut server, 200, &gpu_node_with_pods(&[])).await;
    assert_eq!(sent["metadata"]["annotations"], json!({"cleave.dev/quiesce": "GPU-a"}));
    answer_request(&mut server, 200, &gpu_node_with_pods(&[])).await;
    assert_eq!(draining.await.unwrap().unwrap(), DrainOutcome::TimedOut);
}

#[tokio::test(start_paused = true)]
async fn forget_writes_the_annotation_and_waits_until_the_agent_no_longer_reports_the_gpu() {
    let mut missing = gpu_node_with_pods(&[]);
    missing["status"]["gpus"][0]["health"] =
        json!({"healthy": false, "class": "Lost", "reason": "GpuMissing", "since": "2026-11-21T20:00:00Z"});
    for (gone, outcome) in [(true, ForgetOutcome::Forgotten), (false, ForgetOutcome::TimedOut)] {
        let (client, mut server) = mock_client();
        let forgetting = tokio::spawn(async move {
            let args = ForgetArgs { gpu: gpu_args(), timeout: 3 };
            forget(&client, &args, "2026-11-21T21:00:00Z".parse().unwrap()).await
        });
        answer_request(&mut server, 200, &missing).await;
        let (line, sent) = answer_request(&mut server, 200, &missing).await;
        assert_eq!(line, "PATCH /apis/cleave.dev/v1alpha1/gpunodes/n");
        let word = json!({FORGOTTEN_ANNOTATION: "GPU-a=2026-11-21T21:00:00Z"});
        assert_eq!(sent["metadata"], json!({"resourceVersion": "7", "annotations": word}));
        answer_request(&mut server, 200, &missing).await;
        if gone {
            missing["status"]["gpus"] = json!([]);
            answer_request(&mut server, 200, &missing).await;
            missing = gpu_node_with_pods(&[]);
            missing["status"]["gpus"][0]["health"] = json!({"healthy": false, "reason": "GpuMissing"});
        } else {
            for _ in 0..3 {
                answer_request(&mut server, 200, &missing).await;
            }
        }
        assert_eq!(forgetting.await.unwrap().unwrap(), outcome);
    }
}
