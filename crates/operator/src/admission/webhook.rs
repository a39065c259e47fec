//! The webhook that gates pods as they are created, and gives containers with shares a `preStop`
//! hook, where the API server has no policies for that (Kubernetes before 1.36).
//!
//! [`review`] answers, purely, and remembers nothing: any replica may be asked. All that it knows
//! besides the pod are the namespaces with exceptions, which no review tells of. What it serves
//! with is kept by [`crate::admission::certificate`].
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
    ALLOW_ALL, ALLOW_LABEL, ALLOW_PLACEMENT, ALLOW_PRE_STOP, GATE, PRE_STOP, PRE_STOP_NONE, is_mps, is_shared,
};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
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

use crate::pods::{Container, PodObject};

/// Where reviews are sent to; the chart has the same.
pub const PATH: &str = "/gate";
/// Where reviews are sent to for a hook that sleeps so many seconds; the chart has the same.
pub const PRE_STOP_PATH: &str = "/pre-stop/{seconds}";
/// The grace of a pod that does not say it.
const GRACE: i64 = 30;
/// The API server takes no larger objects (3 MiB), and a review has one, and who sent it.
const BODY: usize = 4 << 20;
/// How many bodies are read at once: with [`BODY`], what strangers can make this process keep.
const BODIES: usize = 16;
/// How many connections there are at once. An API server keeps some tens.
const CONNECTIONS: usize = 256;
/// How long a client may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a client may take for a request's header, or be silent between two: API servers drop
/// idle connections after 90 s, and had better do so first.
const SILENCE: Duration = Duration::from_secs(120);
/// How long a request may take as a whole; the API server waits for 10 s.
const REQUEST: Duration = Duration::from_secs(8);
/// How long is still answered after the process was told to end: API servers learn a moment later
/// that it is no longer to be asked.
pub(crate) const LINGER: Duration = Duration::from_secs(3);
/// How long open requests then have.
const GOODBYE: Duration = Duration::from_secs(2);

/// What was sent is no review of a pod.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// Not JSON, or not of an `AdmissionReview`.
    #[error("this is no AdmissionReview of a pod: {0}")]
    Json(String),
    /// A review of nothing.
    #[error("the AdmissionReview has no request")]
    NoRequest,
    /// A request about nothing.
    #[error("the AdmissionReview has no pod")]
    NoPod,
    /// The answer could not be written.
    #[error("the patch could not be written")]
    Patch(#[source] SerializePatchError),
}

/// What a review is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The gate, for pods that ask for shares.
    Gate,
    /// A hook that sleeps for so many seconds, for containers with shares under MPS.
    PreStop(u16),
}

impl Change {
    fn patch(self, pod: &PodObject) -> Option<Patch> {
        match self {
            Self::Gate => gate(pod),
            Self::PreStop(seconds) => pre_stop(pod, seconds),
        }
    }

    /// Whether pods go without where a namespace has these labels.
    pub fn is_excepted(self, labels: Option<&BTreeMap<String, String>>) -> bool {
        let word = match self {
            Self::Gate => ALLOW_PLACEMENT,
            Self::PreStop(_) => ALLOW_PRE_STOP,
        };
        let allow = labels.and_then(|labels| labels.get(ALLOW_LABEL)).map_or("", String::as_str);
        allow == ALLOW_ALL || allow.split('.').any(|allowed| allowed == word)
    }
}

/// What is told of an error, which repeats texts of the body, however long.
fn beginning(error: &serde_json::Error) -> String {
    error.to_string().chars().take(300).collect()
}

/// Answers a review: the pod is let in, changed if that is for it. `excepted` says whether a
/// namespace's pods go without.
///
/// # Errors
/// What was sent is no review of a pod.
pub fn review(
    change: Change,
    body: &[u8],
    excepted: impl FnOnce(&str) -> bool,
) -> Result<AdmissionReview<DynamicObject>, Malformed> {
    let review: AdmissionReview<PodObject> =
        serde_json::from_slice(body).map_err(|error| Malformed::Json(beginning(&error)))?;
    let request: AdmissionRequest<PodObject> = review.try_into().map_err(|_| Malformed::NoRequest)?;
    let pod = request.object.as_ref().ok_or(Malformed::NoPod)?;
    let response = AdmissionResponse::from(&request);
    let response = match change.patch(pod) {
        Some(patch) if !excepted(request.namespace.as_deref().unwrap_or_default()) => {
            response.with_patch(patch).map_err(Malformed::Patch)?
        }
        _ => response,
    };
    Ok(response.into_review())
}

/// What puts the gate on a pod, as it comes from its maker; nothing where it asks for no shares,
/// has the gate, or has a node.
fn gate(pod: &PodObject) -> Option<Patch> {
    let spec = &pod.spec;
    let mut containers = spec.containers.iter().chain(&spec.init_containers);
    // An extended resource is always in the limits. What is no number is for the API server to
    // refuse.
    let asks = containers.any(|container| {
        container.resources.limits.iter().any(|(name, quantity)| is_shared(name) && quantity.milli() != Some(0))
    });
    if !asks || pod.node().is_some() || spec.scheduling_gates.iter().any(|gate| gate.name == GATE) {
        return None;
    }
    let gate = json!({"name": GATE});
    let gates = ["spec", "schedulingGates"];
    let (path, value) = if spec.scheduling_gates.is_empty() {
        (PointerBuf::from_tokens(gates), json!([gate]))
    } else {
        (PointerBuf::from_tokens(gates.into_iter().chain(["-"])), gate)
    };
    Some(Patch(vec![PatchOperation::Add(AddOperation { path, value })]))
}

/// What makes containers with shares under MPS sleep before they are sent SIGTERM, where they have
/// no hook of their own; nothing where that would take the whole grace, or the pod declines. The
/// API server knows no hooks of init containers but sidecars'.
fn pre_stop(pod: &PodObject, seconds: u16) -> Option<Patch> {
    let spec = &pod.spec;
    let declined = || {
        let said = pod.metadata.annotations.as_ref().and_then(|all| all.get(PRE_STOP));
        said.is_some_and(|said| said == PRE_STOP_NONE)
    };
    let has_the_time = spec.termination_grace_period_seconds.unwrap_or(GRACE) > i64::from(seconds);
    if seconds == 0 || !has_the_time || declined() {
        return None;
    }
    let wants = |container: &Container| {
        let has_hook = container.lifecycle.as_ref().is_some_and(|lifecycle| lifecycle.pre_stop.is_some());
        let mut limits = container.resources.limits.iter();
        !has_hook && limits.any(|(name, quantity)| is_mps(name) && quantity.milli() != Some(0))
    };
    let hook = json!({"sleep": {"seconds": seconds}});
    let add = |list: &str, index: usize, container: &Container| {
        let place = PointerBuf::from_tokens(["spec", list, &index.to_string(), "lifecycle"]);
        // The whole where there is none: a patch adds below what is there.
        let (path, value) = match &container.lifecycle {
            None => (place, json!({"preStop": hook})),
            Some(_) => (place.concat(&PointerBuf::from_tokens(["preStop"])), hook.clone()),
        };
        PatchOperation::Add(AddOperation { path, value })
    };
    let sidecar = |container: &Container| container.restart_policy.as_deref() == Some("Always");
    let of_main = spec.containers.iter().enumerate().filter(|(_, container)| wants(container));
    let of_init = spec.init_containers.iter().enumerate();
    let of_init = of_init.filter(|(_, container)| sidecar(container) && wants(container));
    let changes: Vec<PatchOperation> = of_main
        .map(|(index, container)| add("containers", index, container))
        .chain(of_init.map(|(index, container)| add("initContainers", index, container)))
        .collect();
    (!changes.is_empty()).then_some(Patch(changes))
}

/// Namespaces with [`ALLOW_LABEL`].
pub(crate) type Namespaces = Store<PartialObjectMeta<Namespace>>;

/// What a request is answered from.
#[derive(Clone)]
struct Reviewer {
    namespaces: Namespaces,
    bodies: Arc<Semaphore>,
}

async fn gated(State(reviewer): State<Reviewer>, body: Body) -> Response {
    reviewed(Change::Gate, reviewer, body).await
}

async fn hooked(State(reviewer): State<Reviewer>, Path(seconds): Path<u16>, body: Body) -> Response {
    reviewed(Change::PreStop(seconds), reviewer, body).await
}

async fn reviewed(change: Change, Reviewer { namespaces, bodies }: Reviewer, body: Body) -> Response {
    if body.size_hint().lower() > BODY as u64 {
        return refuse(StatusCode::PAYLOAD_TOO_LARGE, "no pod is that large");
    }
    // One that trickles in is dropped with its permit.
    let read = tokio::time::timeout(REQUEST, async {
        let _permit = bodies.acquire().await;
        to_bytes(body, BODY).await
    });
    let body = match read.await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => return refuse(StatusCode::PAYLOAD_TOO_LARGE, &error.to_string()),
        Err(_) => return refuse(StatusCode::REQUEST_TIMEOUT, "the request did not come in time"),
    };
    let excepted = |namespace: &str| {
        let found = namespaces.get(&ObjectRef::new(namespace));
        found.is_some_and(|namespace| change.is_excepted(namespace.metadata.labels.as_ref()))
    };
    match review(change, &body, excepted).map(|review| serde_json::to_vec(&review)) {
        Ok(Ok(review)) => ([(header::CONTENT_TYPE, "application/json")], review).into_response(),
        Ok(Err(error)) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        Err(error) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
    }
}

fn refuse(status: StatusCode, why: &str) -> Response {
    tracing::warn!(status = status.as_u16(), why, "a review is not answered");
    (status, format!("{why}\n")).into_response()
}

/// Answers reviews until `stop`, and for `linger` after it.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    namespaces: Namespaces,
    stop: CancellationToken,
    linger: Duration,
) -> Result<(), Infallible> {
    let reviewer = Reviewer { namespaces, bodies: Arc::new(Semaphore::new(BODIES)) };
    let router = Router::new().route(PATH, post(gated)).route(PRE_STOP_PATH, post(hooked)).with_state(reviewer);
    let acceptor = TlsAcceptor::from(tls);
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    let open = GracefulShutdown::new();
    let mut end = std::pin::pin!(async {
        stop.cancelled().await;
        tokio::time::sleep(linger).await;
    });
    loop {
        // Cancel-safe: a permit or a connection that was not handed over stays where it was.
        let (stream, permit) = tokio::select! {
            () = &mut end => break,
            accepted = accept(&listener, &connections) => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "no connection could be accepted");
                    // Mostly there are too many files open: at once it would be the same.
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    continue;
                }
            },
        };
        tokio::spawn(converse(stream, acceptor.clone(), router.clone(), open.watcher(), permit));
    }
    drop(listener);
    if tokio::time::timeout(GOODBYE, open.shutdown()).await.is_err() {
        tracing::warn!("some reviews were not answered");
    }
    Ok(())
}

async fn accept(
    listener: &TcpListener,
    connections: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(connections).acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

/// Answers on one connection until its end.
async fn converse(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    router: Router,
    watcher: Watcher,
    _permit: OwnedSemaphorePermit,
) {
    let stream = match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        // Anybody may knock; a client that does not trust the certificate says so here.
        Ok(Err(error)) => return tracing::debug!(error = &error as &dyn std::error::Error, "no TLS"),
        Err(_) => return tracing::debug!("a client said nothing"),
    };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(SILENCE);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(error = &error as &dyn std::error::Error, "a connection broke");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const SHARES: &str = "nvidia.com/gpu-mps";

    /// A review as an API server writes it.
    fn of(spec: &Value) -> Value {
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

    fn asking(limits: &Value) -> Value {
        json!({"containers": [{"name": "main", "resources": {"limits": limits}}]})
    }

    /// The pod that it becomes.
    fn changed(change: Change, review: &Value, excepted: bool) -> Value {
        let answer = super::review(change, review.to_string().as_bytes(), |namespace| {
            assert_eq!(namespace, "team");
            excepted
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

    /// The gates that a pod has in the end.
    fn gates(spec: &Value, excepted: bool) -> Vec<String> {
        let pod = changed(Change::Gate, &of(spec), excepted);
        let gates = pod["spec"]["schedulingGates"].as_array().into_iter().flatten();
        gates.map(|gate| gate["name"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn pods_that_ask_for_shares_are_gated() {
        for limits in [
            json!({SHARES: "2"}),
            json!({SHARES: 2}),
            json!({"nvidia.com/gpu-10gb": "1"}),
            json!({"nvidia.com/gpu.shared": "1"}),
            json!({"nvidia.com/mig-1g.10gb": "1", "nvidia.com/gpu": "1"}),
        ] {
            assert_eq!(gates(&asking(&limits), false), [GATE]);
        }
        let plain = json!({"name": "main", "resources": {}});
        let first = json!({"name": "first", "restartPolicy": "Always", "resources": {"limits": {SHARES: "1"}}});
        assert_eq!(gates(&json!({"containers": [plain], "initContainers": [first]}), false), [GATE]);
        assert_eq!(gates(&json!({"containers": [plain, first]}), false), [GATE]);
    }

    #[test]
    fn nobody_else_is() {
        for limits in [json!({}), json!({"cpu": "1"}), json!({"nvidia.com/gpu": "1"}), json!({SHARES: "0"})] {
            assert!(gates(&asking(&limits), false).is_empty());
        }
        assert!(gates(&json!({"containers": [{"name": "main"}]}), false).is_empty());
        assert!(gates(&asking(&json!({SHARES: "1"})), true).is_empty());
        let mut pinned = asking(&json!({SHARES: "1"}));
        pinned["nodeName"] = json!("n1");
        assert!(gates(&pinned, false).is_empty());
    }

    #[test]
    fn there_is_one_gate_and_others_stay() {
        let gated = |gates: Value| {
            let mut spec = asking(&json!({SHARES: "1"}));
            spec["schedulingGates"] = gates;
            spec
        };
        let (ours, other) = (json!({"name": GATE}), json!({"name": "example.com/hold"}));
        assert_eq!(gates(&gated(json!([other])), false), ["example.com/hold", GATE]);
        assert_eq!(gates(&gated(json!([ours, other])), false), [GATE, "example.com/hold"]);
        assert_eq!(gates(&gated(json!([ours])), false), [GATE]);
        assert_eq!(gates(&gated(json!([])), false), [GATE]);
    }

    #[test]
    fn exceptions_are_words() {
        let labels = |allow: &str| BTreeMap::from([(ALLOW_LABEL.to_owned(), allow.to_owned())]);
        for (change, word) in [(Change::Gate, "placement"), (Change::PreStop(1), "pre-stop")] {
            for allow in [word.to_owned(), "all".to_owned(), format!("size.{word}"), format!("{word}.environment")] {
                assert!(change.is_excepted(Some(&labels(&allow))), "{allow}");
            }
            for allow in ["", "size", "placements", "size.all", "all.size", "Placement", "stop", "pre"] {
                assert!(!change.is_excepted(Some(&labels(allow))), "{allow}");
            }
            assert!(!change.is_excepted(None));
            assert!(!change.is_excepted(Some(&BTreeMap::new())));
        }
        assert!(!Change::Gate.is_excepted(Some(&labels("pre-stop"))));
    }

    /// What containers and init containers of a pod sleep before their end, as a review makes it.
    fn sleeps(review: &Value, seconds: u16, excepted: bool) -> Vec<Option<i64>> {
        let pod = changed(Change::PreStop(seconds), review, excepted);
        let all =
            ["containers", "initContainers"].map(|list| pod["spec"][list].as_array().cloned().unwrap_or_default());
        all.concat().iter().map(|container| container["lifecycle"]["preStop"]["sleep"]["seconds"].as_i64()).collect()
    }

    #[test]
    fn containers_with_mps_shares_sleep_before_their_end() {
        let with = |name: &str, limits: Value| json!({"name": name, "resources": {"limits": limits}});
        for limits in [json!({SHARES: "2"}), json!({SHARES: 1}), json!({"nvidia.com/mig-1g.10gb.shared": "1"})] {
            assert_eq!(sleeps(&of(&asking(&limits)), 1, false), [Some(1)]);
            assert_eq!(sleeps(&of(&asking(&limits)), 1, true), [None], "excepted");
        }
        for limits in
            [json!({}), json!({SHARES: "0"}), json!({"nvidia.com/gpu": 1}), json!({"nvidia.com/gpu-timeslice": 1})]
        {
            assert_eq!(sleeps(&of(&asking(&limits)), 1, false), [None], "{limits}");
        }
        let mut sidecar = with("sidecar", json!({SHARES: "1"}));
        sidecar["restartPolicy"] = json!("Always");
        let mut own = with("own", json!({SHARES: "1"}));
        own["lifecycle"] = json!({"preStop": {"exec": {"command": ["true"]}}});
        let mut started = with("started", json!({SHARES: "1"}));
        started["lifecycle"] = json!({"postStart": {"exec": {"command": ["true"]}}});
        let spec = json!({
            "containers": [with("main", json!({SHARES: "1"})), with("beside", json!({"cpu": "1"})), own, started],
            "initContainers": [with("first", json!({SHARES: "1"})), sidecar],
        });
        let review = of(&spec);
        assert_eq!(sleeps(&review, 3, false), [Some(3), None, None, Some(3), None, Some(3)]);
        let pod = changed(Change::PreStop(3), &review, false);
        assert_eq!(pod["spec"]["containers"][2], spec["containers"][2]);
        assert!(
            pod["spec"]["containers"][3]["lifecycle"]["postStart"]["exec"].is_object(),
            "a hook that is there stays"
        );
        assert_eq!(pod["spec"]["schedulingGates"], Value::Null);
        // Once.
        let mut again = review;
        again["request"]["object"] = pod;
        assert_eq!(changed(Change::PreStop(5), &again, false), again["request"]["object"]);
    }

    #[test]
    fn a_pod_without_the_time_or_that_declines_has_no_hook_of_ours() {
        let review = |grace: Option<i64>, annotations: &Value| {
            let mut spec = asking(&json!({SHARES: "1"}));
            if let Some(grace) = grace {
                spec["terminationGracePeriodSeconds"] = json!(grace);
            }
            let mut review = of(&spec);
            review["request"]["object"]["metadata"]["annotations"] = annotations.clone();
            review
        };
        for (grace, expected) in
            [(Some(0), None), (Some(1), None), (Some(2), Some(1)), (Some(30), Some(1)), (None, Some(1))]
        {
            assert_eq!(sleeps(&review(grace, &Value::Null), 1, false), [expected], "{grace:?}");
        }
        assert_eq!(
            sleeps(&review(None, &Value::Null), 30, false),
            [None],
            "as long as the grace is when nothing is said"
        );
        assert_eq!(sleeps(&review(None, &Value::Null), 0, false), [None]);
        assert_eq!(sleeps(&review(None, &json!({"cleave.dev/pre-stop": "none"})), 1, false), [None]);
        for other in [json!({"cleave.dev/pre-stop": "off"}), json!({"pre-stop": "none"}), json!({})] {
            assert_eq!(sleeps(&review(None, &other), 1, false), [Some(1)], "{other}");
        }
    }

    #[test]
    fn what_is_no_review_is_refused() {
        let answer = |body: &[u8]| review(Change::Gate, body, |_| false).map(|_| ()).unwrap_err().to_string();
        let whole = of(&asking(&json!({SHARES: "1"}))).to_string();
        for body in
            [&b""[..], b"{", b"null", b"[]", b"\xff\xfe", b"{\"kind\": 1}", &whole.as_bytes()[..whole.len() / 2]]
        {
            assert!(answer(body).starts_with("this is no AdmissionReview of a pod: "), "{}", answer(body));
        }
        let mut empty = of(&json!({}));
        empty["request"]["object"] = Value::Null;
        assert_eq!(answer(empty.to_string().as_bytes()), "the AdmissionReview has no pod");
        empty["request"] = Value::Null;
        assert_eq!(answer(empty.to_string().as_bytes()), "the AdmissionReview has no request");
        for spec in [json!(1), json!({"containers": 1}), json!({"containers": [{"resources": {"limits": [1]}}]})] {
            answer(of(&spec).to_string().as_bytes());
        }
    }
    mod served {
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
        use crate::admission::certificate::{Material, tls};

        const HOST: &str = "cleave-webhook.cleave-system.svc";

        struct Server {
            addr: SocketAddr,
            served: watch::Sender<Option<Arc<rustls::sign::CertifiedKey>>>,
            stop: CancellationToken,
            task: tokio::task::JoinHandle<()>,
        }

        impl Server {
            async fn start(material: Option<&Material>) -> Self {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let addr = listener.local_addr().unwrap();
                let (served, certified) = watch::channel(material.map(Material::certified));
                let (namespaces, mut writer) = reflector::store();
                let excepted = json!({"metadata": {"name": "lab", "labels": {ALLOW_LABEL: "placement"}}});
                writer.apply_watcher_event(&Event::Apply(serde_json::from_value(excepted).unwrap()));
                let stop = CancellationToken::new();
                let until = stop.clone();
                let task = tokio::spawn(async move {
                    let _kept = writer;
                    serve(listener, tls(certified).unwrap(), namespaces, until, Duration::ZERO).await.unwrap();
                });
                Self { addr, served, stop, task }
            }

            async fn connect(&self, trusted: &Material) -> std::io::Result<TlsStream<TcpStream>> {
                let mut roots = RootCertStore::empty();
                for authority in CertificateDer::pem_slice_iter(&trusted.data()["ca.crt"].0) {
                    roots.add(authority.unwrap()).unwrap();
                }
                let provider = Arc::new(rustls::crypto::ring::default_provider());
                let config = ClientConfig::builder_with_provider(provider)
                    .with_safe_default_protocol_versions()
                    .unwrap()
                    .with_root_certificates(roots)
                    .with_no_client_auth();
                let stream = TcpStream::connect(self.addr).await?;
                TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(HOST).unwrap(), stream).await
            }

            /// Status and body of the answer to one request.
            async fn ask(&self, trusted: &Material, request: &str, body: &[u8]) -> (u16, String) {
                let mut stream = self.connect(trusted).await.unwrap();
                let head = format!(
                    "{request} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                stream.write_all(head.as_bytes()).await.unwrap();
                // One that is refused by its length need not be read.
                let _ = stream.write_all(body).await;
                let _ = stream.flush().await;
                let mut answer = Vec::new();
                let _ = stream.read_to_end(&mut answer).await;
                let answer = String::from_utf8(answer).unwrap();
                let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
                (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
            }

            async fn end(self) {
                self.stop.cancel();
                self.task.await.unwrap();
            }
        }

        fn material(before: Option<&Material>) -> Material {
            Material::make(HOST, SystemTime::now(), before).unwrap()
        }

        fn in_namespace(namespace: &str) -> Vec<u8> {
            let mut review = of(&asking(&json!({SHARES: "1"})));
            review["request"]["namespace"] = json!(namespace);
            review.to_string().into_bytes()
        }

        #[tokio::test]
        async fn reviews_are_answered() {
            let material = material(None);
            let server = Server::start(Some(&material)).await;
            let (status, body) = server.ask(&material, "POST /gate?timeout=10s", &in_namespace("team")).await;
            assert_eq!(status, 200);
            let answer: Value = serde_json::from_str(&body).unwrap();
            assert!(answer["response"]["patch"].is_array(), "{answer}");
            let (status, body) = server.ask(&material, "POST /gate", &in_namespace("lab")).await;
            assert_eq!(status, 200);
            let answer: Value = serde_json::from_str(&body).unwrap();
            assert!(answer["response"]["patch"].is_null() && answer["response"]["allowed"] == true, "{answer}");
            let (status, body) = server.ask(&material, "POST /pre-stop/3?timeout=5s", &in_namespace("team")).await;
            let answer: Value = serde_json::from_str(&body).unwrap();
            let patch: Vec<u8> = serde_json::from_value(answer["response"]["patch"].clone()).unwrap();
            let patch = String::from_utf8(patch).unwrap();
            assert!(status == 200 && patch.contains(r#""seconds":3"#) && !patch.contains(GATE), "{patch}");
            server.end().await;
        }

        #[tokio::test]
        async fn what_is_no_review_harms_nobody() {
            let material = material(None);
            let server = Server::start(Some(&material)).await;
            // One that says nothing, and one that stops in the middle.
            let silent = TcpStream::connect(server.addr).await.unwrap();
            let mut halting = server.connect(&material).await.unwrap();
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
                assert_eq!(server.ask(&material, request, body).await.0, expected, "{request}");
            }
            let mut huge = server.connect(&material).await.unwrap();
            let head = format!("POST /gate HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", BODY + 1);
            huge.write_all(head.as_bytes()).await.unwrap();
            let mut answer = [0; 12];
            huge.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"HTTP/1.1 413");
            let mut plain = TcpStream::connect(server.addr).await.unwrap();
            plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
            let _ = plain.read_to_end(&mut Vec::new()).await;
            assert_eq!(server.ask(&material, "POST /gate", &in_namespace("team")).await.0, 200);
            drop((silent, halting));
            server.end().await;
        }

        #[tokio::test]
        async fn another_certificate_is_served_from_the_next_connection_on() {
            let first = material(None);
            let server = Server::start(None).await;
            assert!(server.connect(&first).await.is_err(), "there is nothing to serve with");
            server.served.send_replace(Some(first.certified()));
            server.connect(&first).await.map(drop).unwrap();
            let second = material(Some(&first));
            server.connect(&second).await.map(drop).unwrap();
            server.served.send_replace(Some(second.certified()));
            assert!(server.connect(&first).await.is_err(), "the first does not make the second known");
            server.connect(&second).await.map(drop).unwrap();
            server.end().await;
        }
    }
}
