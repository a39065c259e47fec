//! Tests the requests that the operator sends when it writes, and how it handles the answers.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test, its helpers included")]

use cleave_api::sharingpolicy::SharingPolicyStatus;
use cleave_api::{GpuNode, GpuNodeSpec, SharingPolicy};
use cleave_operator::dry_run;
use cleave_operator::leader::Elector;
use cleave_operator::policies::apply::{self, GpuNodeChange};
use cleave_operator::policies::demand::Reason;
use cleave_operator::policies::status::{self, StatusUpdate};
use http::{Request, Response, StatusCode};
use k8s_openapi::api::coordination::v1::Lease;
use kube::client::Body;
use kube::core::DeserializeGuard;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower_test::mock::Handle;

type Server = Handle<Request<Body>, Response<Body>>;

fn mock_client() -> (Client, Server) {
    let (service, server) = tower_test::mock::pair();
    (Client::new(service, "default"), server)
}

/// Answers the next request with `status` and `answer`. Returns the request's method, its path with
/// query, and its body.
async fn answer_request(server: &mut Server, status: StatusCode, answer: &Value) -> (String, String, Value) {
    let (request, reply) = server.next_request().await.unwrap_or_else(|| panic!("no request"));
    let (parts, body) = request.into_parts();
    let bytes = body.collect_bytes().await.unwrap();
    reply.send_response(Response::builder().status(status).body(Body::from(answer.to_string().into_bytes())).unwrap());
    let body = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap() };
    (parts.method.to_string(), parts.uri.to_string(), body)
}

fn error_status(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason, "reason": reason, "code": code})
}

fn gpu_node_change() -> GpuNodeChange {
    let spec = GpuNodeSpec { plan_id: "p".into(), ..GpuNodeSpec::default() };
    GpuNodeChange { node: "n1".into(), uid: "u1".into(), spec, create: true }
}

fn status_update() -> StatusUpdate {
    StatusUpdate {
        policy: "p".into(),
        from: None,
        status: SharingPolicyStatus { gpus: 4, ..Default::default() },
        changed: Vec::new(),
    }
}

#[tokio::test]
async fn a_gpu_node_is_applied_and_owned_by_its_node() {
    let (client, mut server) = mock_client();
    let api: Api<DeserializeGuard<GpuNode>> = Api::all(client);
    let stored = json!({"metadata": {"name": "n1"}, "spec": {}});
    let change = gpu_node_change();
    let (written, (method, uri, body)) =
        tokio::join!(apply::write(&api, &change), answer_request(&mut server, StatusCode::CREATED, &stored));
    written.unwrap();
    assert_eq!(method, "PATCH");
    assert_eq!(uri, "/apis/cleave.dev/v1alpha1/gpunodes/n1?&force=true&fieldManager=cleave-operator");
    assert_eq!(body["apiVersion"], "cleave.dev/v1alpha1");
    assert_eq!(
        body["metadata"]["ownerReferences"],
        json!([{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"}])
    );
    assert_eq!(body["spec"], json!({"planId": "p", "gpus": []}));
    assert_eq!(body.get("status"), None, "the agent owns the status");
}

#[tokio::test]
async fn a_policy_status_is_applied_without_the_spec() {
    let (client, mut server) = mock_client();
    let api: Api<DeserializeGuard<SharingPolicy>> = Api::all(client);
    let stored = json!({"metadata": {"name": "p"}, "spec": {"mode": "Whole"}});
    let update = status_update();
    let (written, (method, uri, body)) =
        tokio::join!(status::write(&api, &update), answer_request(&mut server, StatusCode::OK, &stored));
    written.unwrap();
    assert_eq!(method, "PATCH");
    assert_eq!(uri, "/apis/cleave.dev/v1alpha1/sharingpolicies/p/status?&force=true&fieldManager=cleave-operator");
    assert_eq!(body["status"]["gpus"], 4);
    assert_eq!(body.get("spec"), None, "users own the spec");
}

/// The API server answers with the whole object. The server has stored the object even if its
/// response is malformed, so the operator must not write the object again in each pass.
#[tokio::test]
async fn a_malformed_response_is_not_a_failed_write() {
    let (client, mut server) = mock_client();
    let stored = json!({"metadata": {"name": "p"}, "spec": {"mode": "Sliced", "gpus": 7}});
    let policies: Api<DeserializeGuard<SharingPolicy>> = Api::all(client.clone());
    let update = status_update();
    let (written, _) =
        tokio::join!(status::write(&policies, &update), answer_request(&mut server, StatusCode::OK, &stored));
    written.unwrap();
    let nodes: Api<DeserializeGuard<GpuNode>> = Api::all(client);
    let change = gpu_node_change();
    let (written, _) =
        tokio::join!(apply::write(&nodes, &change), answer_request(&mut server, StatusCode::OK, &stored));
    written.unwrap();
}

#[tokio::test]
async fn an_error_names_the_object_and_keeps_its_cause() {
    let (client, mut server) = mock_client();
    let api: Api<DeserializeGuard<GpuNode>> = Api::all(client);
    let change = gpu_node_change();
    let no = error_status(403, "Forbidden");
    let (written, _) =
        tokio::join!(apply::write(&api, &change), answer_request(&mut server, StatusCode::FORBIDDEN, &no));
    let error = written.unwrap_err();
    assert_eq!(error.to_string(), "failed to write GpuNode n1");
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("Forbidden"));
}

fn lease(holder: Option<&str>) -> Value {
    json!({
        "metadata": {"name": "l", "namespace": "default", "resourceVersion": "7"},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": 1},
    })
}

/// The clock is paused, so only timers advance the clock and the test does not wait.
#[tokio::test(start_paused = true)]
async fn a_free_lease_is_acquired_renewed_and_released() {
    let (client, mut server) = mock_client();
    let api: Api<Lease> = Api::default_namespaced(client);
    let (elector, guard) = Elector::new(api, "l".into(), "a".into());
    let (stop, released) = (CancellationToken::new(), CancellationToken::new());
    let task = tokio::spawn(elector.run(stop.clone(), released.clone()));
    assert!(!guard.is_known() && !guard.is_current());

    let (method, uri, _) = answer_request(&mut server, StatusCode::OK, &lease(None)).await;
    assert_eq!((method.as_str(), uri.as_str()), ("GET", "/apis/coordination.k8s.io/v1/namespaces/default/leases/l"));
    let (method, _, body) = answer_request(&mut server, StatusCode::OK, &lease(Some("a"))).await;
    assert_eq!((method.as_str(), &body["spec"]["holderIdentity"]), ("PUT", &json!("a")));
    assert_eq!(body["metadata"]["resourceVersion"], "7", "one of two concurrent writes gets a conflict");
    assert_eq!(body["spec"]["leaseTransitions"], 2);

    // The lease is renewed. From this request on, this process leads.
    answer_request(&mut server, StatusCode::OK, &lease(Some("a"))).await;
    assert!(guard.is_known() && guard.is_current());
    answer_request(&mut server, StatusCode::OK, &lease(Some("a"))).await;
    let renewed = tokio::time::Instant::now();

    // From here on, the API server fails. The guard expires before another process may acquire the
    // lease.
    while guard.is_current() {
        answer_request(&mut server, StatusCode::INTERNAL_SERVER_ERROR, &error_status(500, "InternalError")).await;
        assert!(renewed.elapsed() < cleave_operator::leader::LEASE_TIME, "the operator leads without a lease");
    }

    // After `stop` is cancelled, the lease is released only once all writers have stopped.
    stop.cancel();
    while let Ok(Some((_, reply))) =
        tokio::time::timeout(cleave_operator::leader::LEASE_TIME * 9, server.next_request()).await
    {
        // A request that was already sent may still arrive.
        reply.send_error("the API server cannot be reached");
        assert!(!task.is_finished(), "the lease is released while a write is possible");
    }
    released.cancel();
    loop {
        let (method, _, body) = answer_request(&mut server, StatusCode::OK, &lease(Some("a"))).await;
        if method == "PUT" && body["spec"].get("holderIdentity").is_none() {
            break;
        }
    }
    task.await.unwrap();
    assert!(!guard.is_current());
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_another_process_is_acquired_only_after_it_expires() {
    let (client, mut server) = mock_client();
    let (elector, guard) = Elector::new(Api::default_namespaced(client), "l".into(), "a".into());
    let started = tokio::time::Instant::now();
    tokio::spawn(elector.run(CancellationToken::new(), CancellationToken::new()));
    let body = loop {
        let (method, _, body) = answer_request(&mut server, StatusCode::OK, &lease(Some("b"))).await;
        if method == "PUT" {
            break body;
        }
        assert!(!guard.is_current());
    };
    assert_eq!(body["spec"]["holderIdentity"], "a");
    assert!(started.elapsed() >= cleave_operator::leader::LEASE_TIME);
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_another_process_is_not_released() {
    let (client, mut server) = mock_client();
    let (elector, _guard) = Elector::new(Api::default_namespaced(client), "l".into(), "a".into());
    let (stop, released) = (CancellationToken::new(), CancellationToken::new());
    let task = tokio::spawn(elector.run(stop.clone(), released.clone()));
    answer_request(&mut server, StatusCode::OK, &lease(Some("b"))).await;
    stop.cancel();
    released.cancel();
    while !task.is_finished() {
        if let Ok(Some((request, reply))) =
            tokio::time::timeout(cleave_operator::leader::GUARD_TIME, server.next_request()).await
        {
            assert_eq!(request.method(), "GET", "the operator writes to another process's lease");
            let body = Body::from(lease(Some("b")).to_string().into_bytes());
            reply.send_response(Response::builder().status(StatusCode::OK).body(body).unwrap());
        }
    }
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_process_that_loses_the_race_for_a_lease_does_not_lead() {
    let (client, mut server) = mock_client();
    let (elector, guard) = Elector::new(Api::default_namespaced(client), "l".into(), "a".into());
    tokio::spawn(elector.run(CancellationToken::new(), CancellationToken::new()));
    answer_request(&mut server, StatusCode::NOT_FOUND, &error_status(404, "NotFound")).await;
    let (method, ..) = answer_request(&mut server, StatusCode::CONFLICT, &error_status(409, "AlreadyExists")).await;
    assert_eq!(method, "POST");
    answer_request(&mut server, StatusCode::OK, &lease(Some("b"))).await;
    answer_request(&mut server, StatusCode::OK, &lease(Some("b"))).await;
    assert!(guard.is_known() && !guard.is_current());
}

fn list(items: &Value) -> Value {
    json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items})
}

/// Tests the requests of `cleave plan --live`, and its result for objects as an API server returns
/// them.
#[tokio::test]
async fn a_dry_run_reads_the_cluster_and_writes_nothing() {
    let (client, mut server) = mock_client();
    let gpu = json!({
        "uuid": "GPU-a", "index": 0, "model": "NVIDIA A100-SXM4-40GB", "memoryMib": 40960, "sms": 108, "mode": "Whole",
        "health": {"healthy": true},
        "slices": [{"device": "GPU-a", "resource": "nvidia.com/gpu", "total": 1, "inUse": 0, "unhealthy": 0}],
    });
    let pod = |name: &str, spec: Value| {
        json!({"metadata": {"name": name, "namespace": "team", "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z",
            "managedFields": [{"manager": "kubectl"}]}, "spec": spec, "status": {"phase": "Pending"}})
    };
    let ten = json!({"containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu-10gb": "1"}, "requests": {"cpu": "100m", "nvidia.com/gpu-10gb": "1"}}}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}},
        "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}]});
    let mut odd = ten.clone();
    odd["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]["matchExpressions"]
        [0]["operator"] = json!("Resembles");
    let answers = [
        list(&json!([{"metadata": {"name": "n1", "uid": "u1", "labels": {"zone": "a"}},
            "spec": {"podCIDR": "10.0.0.0/24", "taints": [{"key": "soft", "effect": "PreferNoSchedule"}]},
            "status": {"allocatable": {"cpu": "8", "memory": "64Gi", "pods": "110"}, "images": [{"names": ["a"]}]}}])),
        list(
            &json!([{"metadata": {"name": "agent", "namespace": "cleave-system"}, "spec": {"nodeName": "n1", "containers": []},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]}}]),
        ),
        list(&json!([{"metadata": {"name": "n1", "generation": 1}, "spec": {"planId": "", "gpus": []},
            "status": {"observedGeneration": 1, "agentVersion": "0.1.0", "gpus": [gpu]}}])),
        list(
            &json!([{"metadata": {"name": "auto"}, "spec": {"mode": "Auto"}}, {"metadata": {"name": "broken"}, "spec": {"mode": 7}}]),
        ),
        list(&json!([pod("one", ten), pod("odd", odd)])),
    ];
    let serve = async {
        let mut requests = Vec::new();
        for reply in &answers {
            let (method, uri, _) = answer_request(&mut server, StatusCode::OK, reply).await;
            requests.push(format!("{method} {uri}"));
        }
        requests
    };
    let (observed, requests) = tokio::join!(dry_run::observe(&client, "cleave-system", "a=b"), serve);
    assert_eq!(
        requests,
        [
            "GET /api/v1/nodes?&limit=500",
            "GET /api/v1/namespaces/cleave-system/pods?&labelSelector=a%3Db&limit=500",
            "GET /apis/cleave.dev/v1alpha1/gpunodes?&limit=500",
            "GET /apis/cleave.dev/v1alpha1/sharingpolicies?&limit=500",
            "GET /api/v1/pods?&fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed&limit=500",
        ]
    );
    let run = dry_run::dry_run(&observed.unwrap()).unwrap();
    assert_eq!(run.outcome.waiting["team/one"].reason, Reason::Repartitioning);
    assert_eq!(run.outcome.waiting["team/odd"].reason, Reason::NoRoom, "only the pod with unknown constraints waits");
    assert_eq!(run.changes.len(), 1);
    assert_eq!(run.changes[0].spec.gpus[0].partition.mps.as_ref().unwrap().slices[0].count, 1);
}
