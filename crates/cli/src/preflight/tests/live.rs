//! Tests how preflight reads lists from an API server.
use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock;

use super::{FindingReason, gpu_node, problems, report_for_node_selector};
use crate::preflight::facts::Facts;
use crate::preflight::read::from_cluster;

/// Reads the facts from a mock API server. `answer` returns the response for a path and a query.
async fn read_facts(answer: impl Fn(&str, &str) -> (u16, Value)) -> anyhow::Result<Facts> {
    let (service, mut server) = mock::pair::<Request<Body>, Response<Body>>();
    let reading = read_and_drop_client(Client::new(service, "default"));
    let serving = async move {
        while let Some((request, reply)) = server.next_request().await {
            let (status, body) = answer(request.uri().path(), request.uri().query().unwrap_or_default());
            let body = Body::from(body.to_string().into_bytes());
            reply.send_response(Response::builder().status(status).body(body).unwrap());
        }
    };
    tokio::join!(reading, serving).0
}

/// Reads the facts, and then drops the client, so that the mock server stops.
async fn read_and_drop_client(client: Client) -> anyhow::Result<Facts> {
    from_cluster(&client, super::NAMESPACE).await
}

fn healthy_response(path: &str) -> (u16, Value) {
    let items = match path {
        "/version" => return (200, json!({"gitVersion": "v1.36.4"})),
        "/apis/admissionregistration.k8s.io/v1" => {
            let names = ["validatingadmissionpolicies", "mutatingadmissionpolicies"];
            return (200, json!({"resources": names.map(|name| json!({"name": name})).to_vec()}));
        }
        "/api/v1/nodes" => json!([gpu_node("a"), gpu_node("b")]),
        "/apis/scheduling.k8s.io/v1/priorityclasses" => {
            json!([super::named_object("system-node-critical"), super::named_object("system-cluster-critical")])
        }
        "/api/v1/namespaces" => json!([super::namespace(&json!({}))]),
        _ => json!([]),
    };
    (200, json!({"metadata": {}, "items": items}))
}

#[tokio::test]
async fn a_healthy_cluster_is_read_without_findings() {
    let facts = read_facts(|path, _| healthy_response(path)).await.unwrap();
    assert_eq!(problems(&report_for_node_selector(&facts, &[])), []);
    assert_eq!(facts.nodes.unwrap().len(), 2);
}

#[tokio::test]
async fn a_forbidden_list_is_unknown_and_other_lists_are_read() {
    let facts = read_facts(|path, _| match path {
        "/apis/apps/v1/daemonsets" => {
            let message = "daemonsets.apps is forbidden";
            (
                403,
                json!({"kind": "Status", "status": "Failure", "code": 403, "message": message, "reason": "Forbidden"}),
            )
        }
        path => healthy_response(path),
    })
    .await
    .unwrap();
    assert_eq!(facts.daemon_sets.as_ref().unwrap_err(), "daemonsets.apps is forbidden");
    assert_eq!(problems(&report_for_node_selector(&facts, &[])), [FindingReason::NotChecked]);
}

#[tokio::test]
async fn all_pages_of_a_list_are_read() {
    let facts = read_facts(|path, query| match path {
        "/api/v1/nodes" if query.contains("continue=second") => {
            (200, json!({"metadata": {}, "items": [gpu_node("b"), gpu_node("c")]}))
        }
        "/api/v1/nodes" => (200, json!({"metadata": {"continue": "second"}, "items": [gpu_node("a")]})),
        path => healthy_response(path),
    })
    .await
    .unwrap();
    let names: Vec<String> = facts.nodes.unwrap().into_iter().map(|node| node.metadata.name).collect();
    assert_eq!(names, ["a", "b", "c"]);
}

#[tokio::test]
async fn quotas_are_read_only_from_the_target_namespace() {
    let facts = read_facts(|path, _| match path {
        "/api/v1/namespaces/cleave-system/resourcequotas" => {
            (200, json!({"metadata": {}, "items": [super::named_object("quota")]}))
        }
        path => healthy_response(path),
    })
    .await
    .unwrap();
    assert_eq!(facts.quotas.unwrap().len(), 1);
}

#[tokio::test]
async fn an_unreachable_api_server_is_an_error() {
    let (service, server) = mock::pair::<Request<Body>, Response<Body>>();
    drop(server);
    let error = from_cluster(&Client::new(service, "default"), super::NAMESPACE).await.unwrap_err();
    assert_eq!(error.to_string(), "failed to reach the API server");
}
