//! Tests how `cleave migrate` reads a cluster.
use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock;

use super::migration::{Migration, migrate};
use super::read::from_cluster;

/// Reads a cluster from a mock API server, and translates it. `answer` returns the response for a
/// path and a query.
async fn translate_cluster(preview: bool, answer: impl Fn(&str, &str) -> (u16, Value)) -> anyhow::Result<Migration> {
    let (service, mut server) = mock::pair::<Request<Body>, Response<Body>>();
    let reading = async move { from_cluster(&Client::new(service, "default"), preview).await };
    let serving = async move {
        while let Some((request, reply)) = server.next_request().await {
            let (status, body) = answer(request.uri().path(), request.uri().query().unwrap_or_default());
            let body = Body::from(body.to_string().into_bytes());
            reply.send_response(Response::builder().status(status).body(body).unwrap());
        }
    };
    migrate(tokio::join!(reading, serving).0?, preview)
}

fn failure_response(code: u16) -> (u16, Value) {
    let message = format!("answer {code}");
    (code, json!({"kind": "Status", "status": "Failure", "code": code, "message": message, "reason": "Failure"}))
}

/// Returns the responses of a cluster that has a configuration of NVIDIA's plugin and a `ConfigMap`
/// that is not YAML. The GPU Operator is not installed. The list of nodes has two pages.
fn cluster_response(path: &str, query: &str) -> (u16, Value) {
    let node = |name: &str, config: &str| json!({"metadata": {"name": name, "labels": {"nvidia.com/device-plugin.config": config}}});
    let (items, next) = match path {
        "/api/v1/nodes" if query.contains("continue=second") => (json!([node("b", "four")]), ""),
        "/api/v1/nodes" => (json!([node("a", "two")]), "second"),
        "/api/v1/configmaps" => {
            let config = |replicas: u32| {
                let resource = format!("{{name: nvidia.com/gpu, replicas: {replicas}}}");
                format!("version: v1\nsharing: {{timeSlicing: {{resources: [{resource}]}}}}\n")
            };
            let configs = json!({"two": config(2), "four": config(4), "unused": config(8)});
            let others = json!({"script": "if [ a ]; then\n\t{", "text": "words"});
            let map = |name: &str, data: Value| json!({"metadata": {"name": name, "namespace": "x"}, "data": data});
            (json!([map("plugin", configs), map("others", others)]), "")
        }
        "/api/v1/pods" => {
            let container = json!({"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}});
            let spec = json!({"nodeName": "b", "containers": [container]});
            (json!([{"metadata": {"name": "p", "namespace": "x"}, "spec": spec}]), "")
        }
        _ => return failure_response(404),
    };
    (200, json!({"metadata": {"continue": next}, "items": items}))
}

#[tokio::test]
async fn configurations_that_nodes_use_are_translated() {
    let migration = translate_cluster(true, cluster_response).await.unwrap();
    let replicas: Vec<&Value> =
        migration.policies.iter().map(|policy| &policy["spec"]["timeSlicing"]["replicas"]).collect();
    assert_eq!(replicas, [4, 2], "{:?}", migration.policies);
    let pods = serde_json::to_value(migration.pods).unwrap();
    assert_eq!(pods[0]["requests"][0]["becomes"][0]["now"], "nvidia.com/gpu-timeslice: 1", "{pods}");
}

#[tokio::test]
async fn pods_are_read_for_the_preview_only() {
    let without_pods = |path: &str, query: &str| {
        if path == "/api/v1/pods" { failure_response(403) } else { cluster_response(path, query) }
    };
    assert!(translate_cluster(false, without_pods).await.unwrap().pods.is_none());
    let error = format!("{:#}", translate_cluster(true, without_pods).await.unwrap_err());
    assert!(error.contains("failed to list /api/v1/pods") && error.contains("answer 403"), "{error}");
}

#[tokio::test]
async fn a_missing_gpu_operator_is_the_only_missing_list_that_is_no_error() {
    let error = translate_cluster(false, |path, query| match path {
        "/apis/nvidia.com/v1/clusterpolicies" => failure_response(403),
        path => cluster_response(path, query),
    });
    assert!(format!("{:#}", error.await.unwrap_err()).contains("clusterpolicies"));
}
