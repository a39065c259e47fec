//! The admission webhook. The webhook gates new pods that request GPUs, and adds `preStop` hooks to
//! containers with MPS shares, on API servers without mutating admission policies (Kubernetes
//! before 1.36).
//!
//! [`review`] is pure and has no state, so any replica can answer any request. Its inputs are the
//! change, the review and the exempt namespaces. [`crate::admission::certificate`] manages the
//! certificate.
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody as _, to_bytes};
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use cleave_api::names::{
    ALLOW_ALL, ALLOW_LABEL, ALLOW_PLACEMENT, ALLOW_PRE_STOP, GATE, PRE_STOP_ANNOTATION, PRE_STOP_NONE, RESOURCE_GPU,
    is_mps, is_served, is_shared,
};
use cleave_plan::snapshot::Toleration;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, Patch, PatchOperation};
use k8s_openapi::api::core::v1::Namespace;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview, SerializePatchError};
use kube::core::{DynamicObject, PartialObjectMeta};
use kube::runtime::reflector::{ObjectRef, Store};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;

use crate::pods::{Container, RawPod};

/// Path of reviews that add the placement gate. The chart uses the same path. The path must not
/// change between versions, because API servers also send reviews to operators of the old version
/// during an upgrade.
pub const GATE_PATH: &str = "/gate";
/// Path of reviews that add a preStop hook. The hook sleeps for the number of seconds in the path.
/// The chart uses the same path.
pub const PRE_STOP_PATH: &str = "/pre-stop/{seconds}";
/// Default grace period of a pod, in seconds.
const DEFAULT_GRACE_SECONDS: i64 = 30;
/// Maximum size of a request body in bytes. The API server accepts objects of up to 3 MiB. A review
/// contains one object and the identity of its requester.
const MAX_BODY_BYTES: usize = 4 << 20;
/// Maximum number of bodies that are read at the same time. Together with [`MAX_BODY_BYTES`], this
/// limits the memory that unknown clients can use.
const MAX_CONCURRENT_BODIES: usize = 16;
/// Maximum number of open connections. The maximum limits the memory that unknown clients can use.
const MAX_CONNECTIONS: usize = 256;
/// Time limit of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for a request's header and for an idle connection. API servers close idle connections
/// after 90 s. This limit is longer, so that the API servers close connections first.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for a request's body, including the wait for other bodies. With the chart, the API
/// server waits 10 s for a review of the gate and 5 s for a review of the preStop hook.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(8);
/// How long the webhook still answers requests after `stop` is cancelled. API servers need some
/// time to switch to another replica.
pub(crate) const DRAIN_TIME: Duration = Duration::from_secs(3);
/// How long open requests may continue after [`DRAIN_TIME`].
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// The request body is not a review of a pod, or the answer could not be created.
#[derive(Debug, thiserror::Error)]
pub enum MalformedReview {
    /// The body is not JSON, or not an `AdmissionReview`.
    #[error("the body is not an AdmissionReview of a pod: {0}")]
    Json(String),
    /// The review has no request.
    #[error("the AdmissionReview has no request")]
    NoRequest,
    /// The request has no object.
    #[error("the AdmissionReview has no pod")]
    NoPod,
    /// The patch could not be serialized.
    #[error("failed to serialize the patch")]
    Patch(#[source] SerializePatchError),
}

/// A change that the webhook can make to a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodChange {
    /// Add the placement gate to pods that request GPUs.
    Gate {
        /// Whether pods that request shares also get a toleration of taints whose key is
        /// [`RESOURCE_GPU`].
        tolerate: bool,
    },
    /// Add a preStop hook to containers with MPS shares. The hook sleeps for the given number of
    /// seconds.
    PreStop(u16),
}

impl PodChange {
    fn patch(self, pod: &RawPod) -> Option<Patch> {
        match self {
            Self::Gate { tolerate } => gate_patch(pod, tolerate),
            Self::PreStop(seconds) => pre_stop_patch(pod, seconds),
        }
    }

    /// Returns whether a namespace with these labels is exempt from the change.
    pub fn is_exempt(self, labels: Option<&BTreeMap<String, String>>) -> bool {
        let word = match self {
            Self::Gate { .. } => ALLOW_PLACEMENT,
            Self::PreStop(_) => ALLOW_PRE_STOP,
        };
        let allow = labels.and_then(|labels| labels.get(ALLOW_LABEL)).map_or("", String::as_str);
        allow == ALLOW_ALL || allow.split('.').any(|allowed| allowed == word)
    }
}

/// Returns the first 300 characters of an error's text, because the error may quote long parts of
/// the body.
fn shorten_error(error: &serde_json::Error) -> String {
    error.to_string().chars().take(300).collect()
}

/// Answers a review: allows the pod, and changes it if necessary. `exempt` returns whether a
/// namespace is exempt.
///
/// # Errors
/// Returns an error if the body is not a review of a pod, or if the patch cannot be serialized.
pub fn review(
    change: PodChange,
    body: &[u8],
    exempt: impl FnOnce(&str) -> bool,
) -> Result<AdmissionReview<DynamicObject>, MalformedReview> {
    let review: AdmissionReview<RawPod> =
        serde_json::from_slice(body).map_err(|error| MalformedReview::Json(shorten_error(&error)))?;
    let request: AdmissionRequest<RawPod> = review.try_into().map_err(|_| MalformedReview::NoRequest)?;
    let pod = request.object.as_ref().ok_or(MalformedReview::NoPod)?;
    let response = AdmissionResponse::from(&request);
    let response = match change.patch(pod) {
        Some(patch) if !exempt(request.namespace.as_deref().unwrap_or_default()) => {
            response.with_patch(patch).map_err(MalformedReview::Patch)?
        }
        _ => response,
    };
    Ok(response.into_review())
}

/// Returns the patch that adds the placement gate to a new pod. With `tolerate`, the patch also
/// adds the toleration. Returns `None` if the pod requests no GPUs, already has the gate, or is
/// bound.
///
/// The chart's match conditions select the resources for which pods wait at the gate. API servers
/// do not send other pods for review.
fn gate_patch(pod: &RawPod, tolerate: bool) -> Option<Patch> {
    let spec = &pod.spec;
    let is_gated = spec.scheduling_gates.iter().any(|gate| gate.name == GATE);
    if !requests_any(pod, is_served) || spec.node_name.as_deref().is_some_and(|node| !node.is_empty()) || is_gated {
        return None;
    }
    let mut changes =
        vec![append_operation(["spec", "schedulingGates"], spec.scheduling_gates.is_empty(), json!({"name": GATE}))];
    if tolerate && requests_any(pod, is_shared) && !spec.tolerations.iter().any(covers_gpu_taint) {
        let toleration = json!({"key": RESOURCE_GPU, "operator": "Exists"});
        changes.push(append_operation(["spec", "tolerations"], spec.tolerations.is_empty(), toleration));
    }
    Some(Patch(changes))
}

/// Returns whether a container or init container requests a resource for which `is_selected`
/// returns true. The limits of a container always include its extended resources. The API server
/// refuses quantities that are not numbers.
fn requests_any(pod: &RawPod, is_selected: fn(&str) -> bool) -> bool {
    let mut containers = pod.spec.containers.iter().chain(&pod.spec.init_containers);
    containers.any(|container| {
        container.resources.limits.iter().any(|(name, quantity)| is_selected(name) && quantity.milli() != Some(0))
    })
}

/// Returns whether a toleration is for taints whose key is [`RESOURCE_GPU`], or for taints with any
/// key. In this case, the operator does not change the pod's tolerations.
fn covers_gpu_taint(toleration: &Toleration) -> bool {
    toleration.key == RESOURCE_GPU || toleration.key.is_empty() && toleration.operator == "Exists"
}

/// Returns the operation that appends a value to a list. With `is_missing`, the list is absent or
/// empty, and the operation adds a list with the value.
fn append_operation(list: [&str; 2], is_missing: bool, value: serde_json::Value) -> PatchOperation {
    let (path, value) = if is_missing {
        (PointerBuf::from_tokens(list), json!([value]))
    } else {
        (PointerBuf::from_tokens(list.into_iter().chain(["-"])), value)
    };
    PatchOperation::Add(AddOperation { path, value })
}

/// Returns the patch that adds a sleep before SIGTERM to containers with MPS shares, unless they
/// have a preStop hook. Returns `None` if `seconds` is 0, if no container needs a hook, if the
/// sleep would use up the grace period, or if the pod opts out. The API server accepts hooks of
/// init containers only for sidecars.
fn pre_stop_patch(pod: &RawPod, seconds: u16) -> Option<Patch> {
    let spec = &pod.spec;
    let declined = || {
        let value = pod.metadata.annotations.as_ref().and_then(|all| all.get(PRE_STOP_ANNOTATION));
        value.is_some_and(|value| value == PRE_STOP_NONE)
    };
    let has_time = spec.termination_grace_period_seconds.unwrap_or(DEFAULT_GRACE_SECONDS) > i64::from(seconds);
    if seconds == 0 || !has_time || declined() {
        return None;
    }
    let needs_hook = |container: &Container| {
        let has_hook = container.lifecycle.as_ref().is_some_and(|lifecycle| lifecycle.pre_stop.is_some());
        let mut limits = container.resources.limits.iter();
        !has_hook && limits.any(|(name, quantity)| is_mps(name) && quantity.milli() != Some(0))
    };
    let hook = json!({"sleep": {"seconds": seconds}});
    let add = |list: &str, index: usize, container: &Container| {
        let place = PointerBuf::from_tokens(["spec", list, &index.to_string(), "lifecycle"]);
        // A patch can only add to an existing object, so add the whole object if it is missing.
        let (path, value) = match &container.lifecycle {
            None => (place, json!({"preStop": hook})),
            Some(_) => (place.concat(&PointerBuf::from_tokens(["preStop"])), hook.clone()),
        };
        PatchOperation::Add(AddOperation { path, value })
    };
    let sidecar = |container: &Container| container.restart_policy.as_deref() == Some("Always");
    let of_main = spec.containers.iter().enumerate().filter(|(_, container)| needs_hook(container));
    let of_init = spec.init_containers.iter().enumerate();
    let of_init = of_init.filter(|(_, container)| sidecar(container) && needs_hook(container));
    let changes: Vec<PatchOperation> = of_main
        .map(|(index, container)| add("containers", index, container))
        .chain(of_init.map(|(index, container)| add("initContainers", index, container)))
        .collect();
    (!changes.is_empty()).then_some(Patch(changes))
}

/// Namespaces with the label [`ALLOW_LABEL`].
pub(crate) type Namespaces = Store<PartialObjectMeta<Namespace>>;

/// State shared by all requests.
#[derive(Clone)]
pub(crate) struct Reviewer {
    namespaces: Namespaces,
    /// Whether gated pods that request shares get a toleration of GPU taints.
    tolerate: bool,
    bodies: Arc<Semaphore>,
}

impl Reviewer {
    /// Creates a reviewer. `namespaces` contains the namespaces with the label [`ALLOW_LABEL`].
    /// With `tolerate`, gated pods that request shares get a toleration of taints whose key is
    /// [`RESOURCE_GPU`].
    pub(crate) fn new(namespaces: Namespaces, tolerate: bool) -> Self {
        Self { namespaces, tolerate, bodies: Arc::new(Semaphore::new(MAX_CONCURRENT_BODIES)) }
    }
}

async fn review_gate(State(reviewer): State<Reviewer>, body: Body) -> Response {
    answer_review(PodChange::Gate { tolerate: reviewer.tolerate }, reviewer, body).await
}

async fn review_pre_stop(State(reviewer): State<Reviewer>, Path(seconds): Path<u16>, body: Body) -> Response {
    answer_review(PodChange::PreStop(seconds), reviewer, body).await
}

async fn answer_review(change: PodChange, Reviewer { namespaces, bodies, .. }: Reviewer, body: Body) -> Response {
    if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
        let message = format!("the request body is larger than the maximum of {MAX_BODY_BYTES} bytes");
        return refusal_response(StatusCode::PAYLOAD_TOO_LARGE, &message);
    }
    // The timeout drops a body that arrives too slowly, together with its permit.
    let read = tokio::time::timeout(REQUEST_TIMEOUT, async {
        let _permit = bodies.acquire().await;
        to_bytes(body, MAX_BODY_BYTES).await
    });
    let body = match read.await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => return refusal_response(StatusCode::PAYLOAD_TOO_LARGE, &error.to_string()),
        Err(_) => return refusal_response(StatusCode::REQUEST_TIMEOUT, "the request body did not arrive in time"),
    };
    let exempt = |namespace: &str| {
        let found = namespaces.get(&ObjectRef::new(namespace));
        found.is_some_and(|namespace| change.is_exempt(namespace.metadata.labels.as_ref()))
    };
    match review(change, &body, exempt).map(|review| serde_json::to_vec(&review)) {
        Ok(Ok(review)) => ([(header::CONTENT_TYPE, "application/json")], review).into_response(),
        Ok(Err(error)) => refusal_response(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        Err(error) => refusal_response(StatusCode::BAD_REQUEST, &error.to_string()),
    }
}

fn refusal_response(status: StatusCode, why: &str) -> Response {
    tracing::warn!(status = status.as_u16(), why, "refused an admission review");
    (status, format!("{why}\n")).into_response()
}

/// Answers reviews until `stop` is cancelled and the duration `linger` has then passed.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    reviewer: Reviewer,
    stop: CancellationToken,
    linger: Duration,
) -> Result<(), Infallible> {
    let router = Router::new()
        .route(GATE_PATH, post(review_gate))
        .route(PRE_STOP_PATH, post(review_pre_stop))
        .with_state(reviewer);
    let acceptor = TlsAcceptor::from(tls);
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let open = GracefulShutdown::new();
    let mut end = std::pin::pin!(async {
        stop.cancelled().await;
        tokio::time::sleep(linger).await;
    });
    loop {
        // Cancel-safe: dropping this future loses no permit and no connection.
        let (stream, permit) = tokio::select! {
            () = &mut end => break,
            accepted = accept_connection(&listener, &connections) => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "failed to accept a connection");
                    // Retry later: the usual cause is too many open files.
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    continue;
                }
            },
        };
        tokio::spawn(serve_connection(stream, acceptor.clone(), router.clone(), open.watcher(), permit));
    }
    drop(listener);
    if tokio::time::timeout(SHUTDOWN_TIMEOUT, open.shutdown()).await.is_err() {
        tracing::warn!("closed connections with unanswered reviews");
    }
    Ok(())
}

async fn accept_connection(
    listener: &TcpListener,
    connections: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(connections).acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

/// Serves one connection until it closes.
async fn serve_connection(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    router: Router,
    watcher: Watcher,
    _permit: OwnedSemaphorePermit,
) {
    let stream = match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        // Any client may connect. A client that does not trust the certificate aborts the
        // handshake.
        Ok(Err(error)) => return tracing::debug!(error = &error as &dyn std::error::Error, "TLS handshake failed"),
        Err(_) => return tracing::debug!("TLS handshake timed out"),
    };
    cleave_serve::http::serve_connection(stream, router, IDLE_TIMEOUT, watcher).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

    /// Returns a review as an API server sends it.
    fn review_with_spec(spec: &Value) -> Value {
        json!({
            "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
            "request": {
                "uid": "u-1",
                "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "namespace": "team", "operation": "CREATE",
                "userInfo": {"username": "admin", "groups": ["system:masters"]},
                "object": {
                    "kind": "Pod", "apiVersion": "v1",
                    "metadata": {"generateName": "t-", "creationTimestamp": null},
                    "spec": spec, "status": {},
                },
                "oldObject": null, "dryRun": false, "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
            },
        })
    }

    fn pod_spec_with_limits(limits: &Value) -> Value {
        json!({"containers": [{"name": "main", "resources": {"limits": limits}}]})
    }

    /// Returns the pod after the change.
    fn changed_pod(change: PodChange, review: &Value, exempt: bool) -> Value {
        let answer = super::review(change, review.to_string().as_bytes(), |namespace| {
            assert_eq!(namespace, "team");
            exempt
        });
        let answer = serde_json::to_value(answer.unwrap()).unwrap();
        assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(answer["kind"], "AdmissionReview");
        let response = &answer["response"];
        assert_eq!((&response["uid"], &response["allowed"]), (&json!("u-1"), &json!(true)));
        let mut pod = review["request"]["object"].clone();
        if !response["patch"].is_null() {
            assert_eq!(response["patchType"], "JSONPatch");
            let patch: Vec<u8> = serde_json::from_value(response["patch"].clone()).unwrap();
            json_patch::patch(&mut pod, &serde_json::from_slice::<Patch>(&patch).unwrap()).unwrap();
        }
        pod
    }

    const GATE_ONLY: PodChange = PodChange::Gate { tolerate: false };

    /// Returns the gates of the pod after the change.
    fn gate_names(spec: &Value, exempt: bool) -> Vec<String> {
        let pod = changed_pod(GATE_ONLY, &review_with_spec(spec), exempt);
        let gates = pod["spec"]["schedulingGates"].as_array().into_iter().flatten();
        gates.map(|gate| gate["name"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn pods_that_request_gpus_are_gated() {
        for limits in [
            json!({MPS_RESOURCE: "2"}),
            json!({MPS_RESOURCE: 2}),
            json!({"nvidia.com/gpu-10gb": "1"}),
            json!({"nvidia.com/gpu.shared": "1"}),
            json!({"nvidia.com/mig-1g.10gb": "1", "nvidia.com/gpu": "1"}),
            json!({"nvidia.com/gpu": "8"}),
        ] {
            assert_eq!(gate_names(&pod_spec_with_limits(&limits), false), [GATE]);
        }
        let plain = json!({"name": "main", "resources": {}});
        let first = json!({"name": "first", "restartPolicy": "Always", "resources": {"limits": {MPS_RESOURCE: "1"}}});
        assert_eq!(gate_names(&json!({"containers": [plain], "initContainers": [first]}), false), [GATE]);
        assert_eq!(gate_names(&json!({"containers": [plain, first]}), false), [GATE]);
    }

    #[test]
    fn pods_that_are_exempt_bound_or_without_gpus_are_not_gated() {
        for limits in [json!({}), json!({"cpu": "1"}), json!({"nvidia.com/gpu": "0"}), json!({MPS_RESOURCE: "0"})] {
            assert!(gate_names(&pod_spec_with_limits(&limits), false).is_empty());
        }
        assert!(gate_names(&json!({"containers": [{"name": "main"}]}), false).is_empty());
        assert!(gate_names(&pod_spec_with_limits(&json!({MPS_RESOURCE: "1"})), true).is_empty());
        let mut pinned = pod_spec_with_limits(&json!({MPS_RESOURCE: "1"}));
        pinned["nodeName"] = json!("n1");
        assert!(gate_names(&pinned, false).is_empty());
    }

    #[test]
    fn the_gate_is_added_once_and_other_gates_are_kept() {
        let gated = |gates: Value| {
            let mut spec = pod_spec_with_limits(&json!({MPS_RESOURCE: "1"}));
            spec["schedulingGates"] = gates;
            spec
        };
        let (ours, other) = (json!({"name": GATE}), json!({"name": "example.com/hold"}));
        assert_eq!(gate_names(&gated(json!([other])), false), ["example.com/hold", GATE]);
        assert_eq!(gate_names(&gated(json!([ours, other])), false), [GATE, "example.com/hold"]);
        assert_eq!(gate_names(&gated(json!([ours])), false), [GATE]);
        assert_eq!(gate_names(&gated(json!([])), false), [GATE]);
    }

    #[test]
    fn exemptions_match_whole_words() {
        let labels = |allow: &str| BTreeMap::from([(ALLOW_LABEL.to_owned(), allow.to_owned())]);
        for (change, word) in [(GATE_ONLY, "placement"), (PodChange::PreStop(1), "pre-stop")] {
            for allow in [word.to_owned(), "all".to_owned(), format!("size.{word}"), format!("{word}.environment")] {
                assert!(change.is_exempt(Some(&labels(&allow))), "{allow}");
            }
            for allow in ["", "size", "placements", "size.all", "all.size", "Placement", "stop", "pre"] {
                assert!(!change.is_exempt(Some(&labels(allow))), "{allow}");
            }
            assert!(!change.is_exempt(None));
            assert!(!change.is_exempt(Some(&BTreeMap::new())));
        }
        assert!(!GATE_ONLY.is_exempt(Some(&labels("pre-stop"))));
    }

    #[test]
    fn pods_with_shares_tolerate_the_gpu_taint_unless_they_have_their_own_toleration() {
        let tolerations = |limits: &Value, own: &Value, tolerate: bool| {
            let mut spec = pod_spec_with_limits(limits);
            if !own.is_null() {
                spec["tolerations"] = own.clone();
            }
            changed_pod(PodChange::Gate { tolerate }, &review_with_spec(&spec), false)["spec"]["tolerations"].clone()
        };
        let shares = json!({MPS_RESOURCE: "1"});
        let added = json!({"key": "nvidia.com/gpu", "operator": "Exists"});
        let other = json!({"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"});
        assert_eq!(tolerations(&shares, &Value::Null, true), json!([added]));
        assert_eq!(tolerations(&shares, &json!([]), true), json!([added]));
        assert_eq!(tolerations(&shares, &json!([other]), true), json!([other, added]));
        assert_eq!(tolerations(&json!({"nvidia.com/mig-1g.10gb": 1}), &Value::Null, true), json!([added]));
        for own in [
            json!([{"key": "nvidia.com/gpu", "operator": "Equal", "value": "team-a"}]),
            json!([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]),
            json!([{"operator": "Exists"}]),
        ] {
            assert_eq!(tolerations(&shares, &own, true), own, "the owner decides");
        }
        assert_eq!(tolerations(&json!({"nvidia.com/gpu": 1}), &Value::Null, true), Value::Null, "whole GPUs");
        assert_eq!(tolerations(&shares, &Value::Null, false), Value::Null, "switched off");
        // A second review of the changed pod changes nothing.
        let mut again = review_with_spec(&pod_spec_with_limits(&shares));
        again["request"]["object"] = changed_pod(PodChange::Gate { tolerate: true }, &again, false);
        assert_eq!(changed_pod(PodChange::Gate { tolerate: true }, &again, false), again["request"]["object"]);
    }

    /// Returns the preStop sleep of each container and init container of the pod after the change.
    fn pre_stop_seconds(review: &Value, seconds: u16, exempt: bool) -> Vec<Option<i64>> {
        let pod = changed_pod(PodChange::PreStop(seconds), review, exempt);
        let all =
            ["containers", "initContainers"].map(|list| pod["spec"][list].as_array().cloned().unwrap_or_default());
        all.concat().iter().map(|container| container["lifecycle"]["preStop"]["sleep"]["seconds"].as_i64()).collect()
    }

    #[test]
    fn containers_with_mps_shares_sleep_before_they_terminate() {
        let with = |name: &str, limits: Value| json!({"name": name, "resources": {"limits": limits}});
        for limits in
            [json!({MPS_RESOURCE: "2"}), json!({MPS_RESOURCE: 1}), json!({"nvidia.com/mig-1g.10gb.shared": "1"})]
        {
            assert_eq!(pre_stop_seconds(&review_with_spec(&pod_spec_with_limits(&limits)), 1, false), [Some(1)]);
            assert_eq!(pre_stop_seconds(&review_with_spec(&pod_spec_with_limits(&limits)), 1, true), [None], "exempt");
        }
        for limits in [
            json!({}),
            json!({MPS_RESOURCE: "0"}),
            json!({"nvidia.com/gpu": 1}),
            json!({"nvidia.com/gpu-timeslice": 1}),
        ] {
            assert_eq!(
                pre_stop_seconds(&review_with_spec(&pod_spec_with_limits(&limits)), 1, false),
                [None],
                "{limits}"
            );
        }
        let mut sidecar = with("sidecar", json!({MPS_RESOURCE: "1"}));
        sidecar["restartPolicy"] = json!("Always");
        let mut own = with("own", json!({MPS_RESOURCE: "1"}));
        own["lifecycle"] = json!({"preStop": {"exec": {"command": ["true"]}}});
        let mut started = with("started", json!({MPS_RESOURCE: "1"}));
        started["lifecycle"] = json!({"postStart": {"exec": {"command": ["true"]}}});
        let spec = json!({
            "containers": [with("main", json!({MPS_RESOURCE: "1"})), with("beside", json!({"cpu": "1"})), own, started],
            "initContainers": [with("first", json!({MPS_RESOURCE: "1"})), sidecar],
        });
        let review = review_with_spec(&spec);
        assert_eq!(pre_stop_seconds(&review, 3, false), [Some(3), None, None, Some(3), None, Some(3)]);
        let pod = changed_pod(PodChange::PreStop(3), &review, false);
        assert_eq!(pod["spec"]["containers"][2], spec["containers"][2]);
        assert!(pod["spec"]["containers"][3]["lifecycle"]["postStart"]["exec"].is_object(), "existing hooks are kept");
        assert_eq!(pod["spec"]["schedulingGates"], Value::Null);
        // A second review of the changed pod changes nothing.
        let mut again = review;
        again["request"]["object"] = pod;
        assert_eq!(changed_pod(PodChange::PreStop(5), &again, false), again["request"]["object"]);
    }

    #[test]
    fn pods_with_a_short_grace_period_or_an_opt_out_get_no_hook() {
        let review = |grace: Option<i64>, annotations: &Value| {
            let mut spec = pod_spec_with_limits(&json!({MPS_RESOURCE: "1"}));
            if let Some(grace) = grace {
                spec["terminationGracePeriodSeconds"] = json!(grace);
            }
            let mut review = review_with_spec(&spec);
            review["request"]["object"]["metadata"]["annotations"] = annotations.clone();
            review
        };
        for (grace, expected) in
            [(Some(0), None), (Some(1), None), (Some(2), Some(1)), (Some(30), Some(1)), (None, Some(1))]
        {
            assert_eq!(pre_stop_seconds(&review(grace, &Value::Null), 1, false), [expected], "{grace:?}");
        }
        assert_eq!(
            pre_stop_seconds(&review(None, &Value::Null), 30, false),
            [None],
            "the sleep uses up the default grace period"
        );
        assert_eq!(pre_stop_seconds(&review(None, &Value::Null), 0, false), [None]);
        assert_eq!(pre_stop_seconds(&review(None, &json!({"cleave.dev/pre-stop": "none"})), 1, false), [None]);
        for other in [json!({"cleave.dev/pre-stop": "off"}), json!({"pre-stop": "none"}), json!({})] {
            assert_eq!(pre_stop_seconds(&review(None, &other), 1, false), [Some(1)], "{other}");
        }
    }

    #[test]
    fn bodies_that_are_not_reviews_are_refused() {
        let answer = |body: &[u8]| review(GATE_ONLY, body, |_| false).map(|_| ()).unwrap_err().to_string();
        let whole = review_with_spec(&pod_spec_with_limits(&json!({MPS_RESOURCE: "1"}))).to_string();
        for body in
            [&b""[..], b"{", b"null", b"[]", b"\xff\xfe", b"{\"kind\": 1}", &whole.as_bytes()[..whole.len() / 2]]
        {
            assert!(answer(body).starts_with("the body is not an AdmissionReview of a pod: "), "{}", answer(body));
        }
        let mut empty = review_with_spec(&json!({}));
        empty["request"]["object"] = Value::Null;
        assert_eq!(answer(empty.to_string().as_bytes()), "the AdmissionReview has no pod");
        empty["request"] = Value::Null;
        assert_eq!(answer(empty.to_string().as_bytes()), "the AdmissionReview has no request");
        for spec in [json!(1), json!({"containers": 1}), json!({"containers": [{"resources": {"limits": [1]}}]})] {
            answer(review_with_spec(&spec).to_string().as_bytes());
        }
    }
    mod server_tests {
        use std::net::SocketAddr;
        use std::time::SystemTime;

        use kube::runtime::reflector;
        use kube::runtime::watcher::Event;
        use rustls::pki_types::pem::PemObject as _;
        use rustls::pki_types::{CertificateDer, ServerName};
        use rustls::{ClientConfig, RootCertStore};
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        use tokio::sync::watch;
        use tokio_rustls::TlsConnector;
        use tokio_rustls::client::TlsStream;

        use super::*;
        use crate::admission::certificate::{Certificate, tls_config};

        const SERVICE_HOST: &str = "cleave-webhook.cleave-system.svc";

        struct Server {
            addr: SocketAddr,
            served: watch::Sender<Option<Arc<rustls::sign::CertifiedKey>>>,
            stop: CancellationToken,
            task: tokio::task::JoinHandle<()>,
        }

        impl Server {
            async fn start(certificate: Option<&Certificate>) -> Self {
                Self::start_with_toleration(certificate, false).await
            }

            async fn start_with_toleration(certificate: Option<&Certificate>, tolerate: bool) -> Self {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let addr = listener.local_addr().unwrap();
                let (served, certified) = watch::channel(certificate.map(Certificate::certified_key));
                let (namespaces, mut writer) = reflector::store();
                let exempt = json!({"metadata": {"name": "lab", "labels": {ALLOW_LABEL: "placement"}}});
                writer.apply_watcher_event(&Event::Apply(serde_json::from_value(exempt).unwrap()));
                let stop = CancellationToken::new();
                let until = stop.clone();
                let task = tokio::spawn(async move {
                    let _kept = writer;
                    let reviewer = Reviewer::new(namespaces, tolerate);
                    serve(listener, tls_config(certified).unwrap(), reviewer, until, Duration::ZERO).await.unwrap();
                });
                Self { addr, served, stop, task }
            }

            async fn connect(&self, trusted: &Certificate) -> std::io::Result<TlsStream<TcpStream>> {
                let mut roots = RootCertStore::empty();
                for authority in CertificateDer::pem_slice_iter(&trusted.secret_data()["ca.crt"].0) {
                    roots.add(authority.unwrap()).unwrap();
                }
                let provider = Arc::new(rustls::crypto::ring::default_provider());
                let config = ClientConfig::builder_with_provider(provider)
                    .with_safe_default_protocol_versions()
                    .unwrap()
                    .with_root_certificates(roots)
                    .with_no_client_auth();
                let stream = TcpStream::connect(self.addr).await?;
                TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(SERVICE_HOST).unwrap(), stream).await
            }

            /// Sends one request. Returns the status and body of the answer.
            async fn send(&self, trusted: &Certificate, request: &str, body: &[u8]) -> (u16, String) {
                let mut stream = self.connect(trusted).await.unwrap();
                let head = format!(
                    "{request} HTTP/1.1\r\nhost: {SERVICE_HOST}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                stream.write_all(head.as_bytes()).await.unwrap();
                // Ignore errors: the server may refuse a long body without reading it.
                let _ = stream.write_all(body).await;
                let _ = stream.flush().await;
                let mut answer = Vec::new();
                let _ = stream.read_to_end(&mut answer).await;
                let answer = String::from_utf8(answer).unwrap();
                let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
                (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
            }

            async fn stop(self) {
                self.stop.cancel();
                self.task.await.unwrap();
            }
        }

        fn new_certificate(before: Option<&Certificate>) -> Certificate {
            Certificate::create(SERVICE_HOST, SystemTime::now(), before).unwrap()
        }

        fn review_in_namespace(namespace: &str) -> Vec<u8> {
            let mut review = review_with_spec(&pod_spec_with_limits(&json!({MPS_RESOURCE: "1"})));
            review["request"]["namespace"] = json!(namespace);
            review.to_string().into_bytes()
        }

        #[tokio::test]
        async fn the_server_answers_reviews_on_both_paths() {
            let current = new_certificate(None);
            let server = Server::start(Some(&current)).await;
            let (status, body) = server.send(&current, "POST /gate?timeout=10s", &review_in_namespace("team")).await;
            assert_eq!(status, 200);
            let answer: Value = serde_json::from_str(&body).unwrap();
            assert!(answer["response"]["patch"].is_array(), "{answer}");
            let (status, body) = server.send(&current, "POST /gate", &review_in_namespace("lab")).await;
            assert_eq!(status, 200);
            let answer: Value = serde_json::from_str(&body).unwrap();
            assert!(answer["response"]["patch"].is_null() && answer["response"]["allowed"] == true, "{answer}");
            let (status, body) =
                server.send(&current, "POST /pre-stop/3?timeout=5s", &review_in_namespace("team")).await;
            let answer: Value = serde_json::from_str(&body).unwrap();
            let patch: Vec<u8> = serde_json::from_value(answer["response"]["patch"].clone()).unwrap();
            let patch = String::from_utf8(patch).unwrap();
            assert!(status == 200 && patch.contains(r#""seconds":3"#) && !patch.contains(GATE), "{patch}");
            server.stop().await;
        }

        #[tokio::test]
        async fn the_gate_path_adds_the_toleration_only_if_configured() {
            let current = new_certificate(None);
            for tolerate in [false, true] {
                let server = Server::start_with_toleration(Some(&current), tolerate).await;
                let (status, body) =
                    server.send(&current, "POST /gate?timeout=10s", &review_in_namespace("team")).await;
                let answer: Value = serde_json::from_str(&body).unwrap();
                let patch: Vec<u8> = serde_json::from_value(answer["response"]["patch"].clone()).unwrap();
                let patch = String::from_utf8(patch).unwrap();
                assert!(status == 200 && patch.contains(GATE), "{patch}");
                assert_eq!(patch.contains("/spec/tolerations"), tolerate, "{patch}");
                server.stop().await;
            }
        }

        #[tokio::test]
        async fn malformed_requests_do_not_affect_other_clients() {
            let current = new_certificate(None);
            let server = Server::start(Some(&current)).await;
            // One client sends no bytes, and another client stops in the middle of a request.
            let idle = TcpStream::connect(server.addr).await.unwrap();
            let mut halting = server.connect(&current).await.unwrap();
            halting.write_all(b"POST /gate HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{").await.unwrap();
            for (request, body, expected) in [
                ("POST /gate", &b"{"[..], 400),
                ("POST /gate", b"", 400),
                ("GET /gate", b"", 405),
                ("POST /", b"{}", 404),
                ("POST /pre-stop/", b"{}", 404),
                ("POST /pre-stop/ever", b"{}", 400),
                ("POST /pre-stop/-1", b"{}", 400),
            ] {
                assert_eq!(server.send(&current, request, body).await.0, expected, "{request}");
            }
            let mut huge = server.connect(&current).await.unwrap();
            let head = format!("POST /gate HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", MAX_BODY_BYTES + 1);
            huge.write_all(head.as_bytes()).await.unwrap();
            let mut answer = [0; 12];
            huge.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"HTTP/1.1 413");
            let mut plain = TcpStream::connect(server.addr).await.unwrap();
            plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
            let _ = plain.read_to_end(&mut Vec::new()).await;
            assert_eq!(server.send(&current, "POST /gate", &review_in_namespace("team")).await.0, 200);
            drop((idle, halting));
            server.stop().await;
        }

        #[tokio::test]
        async fn a_new_certificate_is_served_to_new_connections() {
            let first = new_certificate(None);
            let server = Server::start(None).await;
            assert!(server.connect(&first).await.is_err(), "no certificate is served yet");
            server.served.send_replace(Some(first.certified_key()));
            server.connect(&first).await.map(drop).unwrap();
            let second = new_certificate(Some(&first));
            server.connect(&second).await.map(drop).unwrap();
            server.served.send_replace(Some(second.certified_key()));
            assert!(server.connect(&first).await.is_err(), "the first bundle does not include the second CA");
            server.connect(&second).await.map(drop).unwrap();
            server.stop().await;
        }
    }
}
