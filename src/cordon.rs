//! `cleave cordon`, `cleave uncordon` and `cleave drain`: one GPU of a node, for an administrator.
//!
//! What is said of a GPU is an annotation of its `GpuNode`, which the operator reads. Each change is made of what the object was and refused
//! by the API server if it is another by then: two administrators undo nothing of each other's.
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use cleave_api::GpuNode;
use cleave_api::cordon::{Cleared, Cordons, check_reason};
use cleave_api::gpunode::{GpuStatus, Health};
use cleave_api::names::{CLEARED_ANNOTATION, CORDON_ANNOTATION};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::json;
use tokio::time::Instant;

use crate::status::configure;

/// How often a change is tried again that somebody else was faster with.
const TRIES: u32 = 5;
/// Between two looks at who is still there.
const LOOK: Duration = Duration::from_secs(1);
/// Between two evictions of a pod that its disruption budget protects.
const AGAIN: Duration = Duration::from_secs(5);
/// The field manager of what is written here.
const MANAGER: &str = "cleave";
/// Exit code of a drain that was not done in time.
const NOT_IN_TIME: u8 = 3;

/// Keeps new pods away from one GPU. What is in use there stays and runs on; the GPU's free slices are told as Unhealthy.
#[derive(Debug, clap::Args)]
pub(crate) struct CordonArgs {
    #[command(flatten)]
    gpu: GpuArgs,
    /// Why, for others to read. It has no commas.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

/// Lets pods use a GPU again, and says that what was found wrong with it before is over.
#[derive(Debug, clap::Args)]
pub(crate) struct UncordonArgs {
    #[command(flatten)]
    gpu: GpuArgs,
}

/// Cordons one GPU, evicts the pods that hold slices of it as far as their disruption budgets allow, and waits until it is free. It exits
/// with 0 when the GPU is free, 1 when that cannot be, and 3 when it was not in time; the GPU stays cordoned in any case.
#[derive(Debug, clap::Args)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    gpu: GpuArgs,
    /// Why, for others to read. It has no commas.
    #[arg(long, value_name = "TEXT", default_value = "draining")]
    reason: String,
    /// Seconds that each pod has to end; its own grace period without this.
    #[arg(long, value_name = "SECONDS")]
    grace: Option<u32>,
    /// Seconds after which it is given up; 0 is never.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Evict also pods that nothing makes anew (of no Job, Deployment and so on).
    #[arg(long)]
    force: bool,
}

#[derive(Debug, clap::Args)]
struct GpuArgs {
    /// The node.
    #[arg(value_name = "NODE")]
    node: String,
    /// The GPU, by its index or UUID.
    #[arg(value_name = "GPU")]
    gpu: String,
    /// The kubeconfig's context.
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The kubeconfig; else that of KUBECONFIG, of the home directory, or the pod's own account.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// Cordons a GPU.
pub(crate) async fn cordon(args: CordonArgs) -> Result<()> {
    let CordonArgs { gpu, reason } = args;
    let client = gpu.client().await?;
    set_cordon(&client, &gpu, &reason).await.map(drop)
}

/// Uncordons a GPU.
pub(crate) async fn uncordon(args: UncordonArgs) -> Result<()> {
    let client = args.gpu.client().await?;
    let (at, changed) = change(&client, &args.gpu, uncordoned).await?;
    println!("{at} is {}", if changed { "uncordoned" } else { "not cordoned, and nothing was found wrong with it" });
    Ok(())
}

/// Drains a GPU.
pub(crate) async fn drain(args: DrainArgs) -> Result<ExitCode> {
    let config = args.gpu.config().await?;
    let client = Client::try_from(config.clone())?;
    // What a disruption budget refuses is answered by 429, which a client would repeat for minutes while others could be evicted.
    let mut once = config;
    once.default_retry = false;
    drain_with(&client, &Client::try_from(once)?, &args).await
}

async fn set_cordon(client: &Client, gpu: &GpuArgs, reason: &str) -> Result<At> {
    check_reason(reason).with_context(|| format!("the reason {reason:?} cannot be written"))?;
    let (at, changed) = change(client, gpu, |object, uuid| cordoned(object, uuid, reason.trim())).await?;
    println!("{at} {}", if changed { "is cordoned" } else { "was cordoned already" });
    Ok(at)
}

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct At {
    node: String,
    /// None of one that is there no more.
    index: Option<u32>,
    uuid: String,
}

impl std::fmt::Display for At {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.index {
            Some(index) => write!(formatter, "GPU {index} ({}) of {}", self.uuid, self.node),
            None => write!(formatter, "{} of {}, which is not there any more,", self.uuid, self.node),
        }
    }
}

/// Annotations and what they shall be; nothing is none.
type Annotations = Vec<(&'static str, Option<String>)>;

impl GpuArgs {
    async fn config(&self) -> Result<Config> {
        // An error says that one is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        configure(self.context.clone(), self.kubeconfig.clone()).await.context("finding the API server")
    }

    async fn client(&self) -> Result<Client> {
        Ok(Client::try_from(self.config().await?)?)
    }
}

/// Reads a node's object.
async fn read(client: &Client, node: &str) -> Result<GpuNode> {
    let found = Api::<DeserializeGuard<GpuNode>>::all(client.clone()).get_opt(node).await;
    let found = found.with_context(|| format!("reading the GpuNode {node}"))?;
    let Some(found) = found else {
        bail!("there is no GpuNode {node}: kubectl get gpunodes lists those that there are");
    };
    found.0.map_err(|invalid| anyhow!("the GpuNode {node} is malformed: {}", invalid.error))
}

/// Changes annotations of a GPU's node as `wanted` says of the object as it is; says whether there was something to change.
async fn change(client: &Client, args: &GpuArgs, wanted: impl Fn(&GpuNode, &str) -> Annotations) -> Result<(At, bool)> {
    let api = Api::<DeserializeGuard<GpuNode>>::all(client.clone());
    let manager = PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
    for _ in 0..TRIES {
        let object = read(client, &args.node).await?;
        let at = find(&object, &args.node, &args.gpu)?;
        let annotations = wanted(&object, &at.uuid);
        if annotations.is_empty() {
            return Ok((at, false));
        }
        let annotations: serde_json::Map<_, _> =
            annotations.into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect();
        let patch =
            json!({"metadata": {"resourceVersion": object.metadata.resource_version, "annotations": annotations}});
        match api.patch(&args.node, &manager, &Patch::Merge(patch)).await {
            Ok(_) => return Ok((at, true)),
            // Somebody else was faster: it is another object now.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error).with_context(|| format!("changing the GpuNode {}", args.node)),
        }
    }
    bail!("the GpuNode {} changes all the time: try again", args.node)
}

/// A GPU of a node by its index or UUID.
fn find(object: &GpuNode, node: &str, name: &str) -> Result<At> {
    let gpus = object.status.as_ref().map_or(&[][..], |status| status.gpus.as_slice());
    let at = |gpu: &GpuStatus| At { node: node.to_owned(), index: Some(gpu.index), uuid: gpu.uuid.clone() };
    if let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == name || gpu.index.to_string() == name) {
        return Ok(at(gpu));
    }
    // One that was taken out is forgotten by this.
    if cordons(object).0.contains_key(name) {
        return Ok(At { node: node.to_owned(), index: None, uuid: name.to_owned() });
    }
    let of_instance = |gpu: &&GpuStatus| {
        gpu.mig.iter().flat_map(|mig| &mig.instances).any(|instance| !name.is_empty() && instance.uuid == name)
    };
    if let Some(gpu) = gpus.iter().find(of_instance) {
        bail!("{name} is a MIG device of GPU {} ({}): name the GPU", gpu.index, gpu.uuid);
    }
    let there: Vec<String> = gpus.iter().map(|gpu| format!("{} ({})", gpu.index, gpu.uuid)).collect();
    ensure!(!there.is_empty(), "no agent has told what GPUs {node} has");
    bail!("{node} has no GPU {name:?}; it has {}", there.join(", "))
}

fn annotation<'a>(object: &'a GpuNode, name: &str) -> Option<&'a String> {
    object.metadata.annotations.as_ref()?.get(name)
}

/// The cordoned GPUs of a node.
pub(crate) fn cordons(object: &GpuNode) -> Cordons {
    Cordons::read(annotation(object, CORDON_ANNOTATION))
}

/// What makes a GPU cordoned. Another reason than before is written; none leaves the one that there is.
fn cordoned(object: &GpuNode, uuid: &str, reason: &str) -> Annotations {
    let mut cordons = cordons(object);
    let before = cordons.0.get(uuid);
    if before.is_some_and(|before| reason.is_empty() || before == reason) {
        return Annotations::new();
    }
    cordons.0.insert(uuid.to_owned(), reason.to_owned());
    vec![(CORDON_ANNOTATION, Some(cordons.to_string()))]
}

/// What makes a GPU uncordoned, and what was found wrong with it until now over.
fn uncordoned(object: &GpuNode, uuid: &str) -> Annotations {
    let mut annotations = Annotations::new();
    let written = |text: String| (!text.is_empty()).then_some(text);
    let mut cordons = cordons(object);
    if cordons.0.remove(uuid).is_some() {
        annotations.push((CORDON_ANNOTATION, written(cordons.to_string())));
    }
    let mut cleared = Cleared::read(annotation(object, CLEARED_ANNOTATION));
    let gpus = object.status.as_ref().map_or(&[][..], |status| status.gpus.as_slice());
    let found = gpus.iter().find(|gpu| gpu.uuid == uuid).and_then(last_found);
    if let Some(last) = found
        && cleared.0.get(uuid).is_none_or(|before| *before < last)
    {
        cleared.0.insert(uuid.to_owned(), last);
        // Of GPUs that are there no more nobody asks again.
        cleared.0.retain(|uuid, _| gpus.iter().any(|gpu| gpu.uuid == *uuid));
        annotations.push((CLEARED_ANNOTATION, written(cleared.to_string())));
    }
    annotations
}

/// When something was last found wrong with a GPU or its MIG devices that is not over.
fn last_found(gpu: &GpuStatus) -> Option<Time> {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).filter_map(|instance| instance.health.as_ref());
    let last = |health: &Health| health.last.clone().filter(|_| !health.healthy);
    instances.chain([&gpu.health]).filter_map(last).max()
}

/// Who holds slices of a GPU, and how many are in use.
#[derive(Debug, Default, PartialEq, Eq)]
struct Held {
    pods: BTreeSet<String>,
    slices: u32,
}

/// None of a GPU that the node does not tell of.
fn held(object: &GpuNode, uuid: &str) -> Option<Held> {
    let gpu = object.status.as_ref()?.gpus.iter().find(|gpu| gpu.uuid == uuid)?;
    Some(Held {
        pods: gpu.allocations.iter().map(|held| held.pod.clone()).collect(),
        slices: gpu.slices.iter().map(|slices| slices.in_use).sum(),
    })
}

/// What became of a pod that a drain has looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// It is on its way out.
    Leaving,
    /// Its disruption budget protected it then.
    Protected(Instant),
}

/// The pods to evict now.
fn to_evict<'a>(held: &'a Held, asked: &BTreeMap<String, Asked>, now: Instant) -> Vec<&'a str> {
    let due = |pod: &&String| match asked.get(*pod) {
        None => true,
        Some(Asked::Leaving) => false,
        Some(Asked::Protected(at)) => now.saturating_duration_since(*at) >= AGAIN,
    };
    held.pods.iter().filter(due).map(String::as_str).collect()
}

/// Pods that nothing makes anew, and that would go on.
fn alone<'a>(pods: impl IntoIterator<Item = (&'a str, &'a PartialObjectMeta<Pod>)>) -> Vec<&'a str> {
    let controlled =
        |pod: &PartialObjectMeta<Pod>| pod.owner_references().iter().any(|owner| owner.controller == Some(true));
    let leaves = |pod: &PartialObjectMeta<Pod>| pod.metadata.deletion_timestamp.is_some();
    pods.into_iter().filter(|(_, pod)| !controlled(pod) && !leaves(pod)).map(|(name, _)| name).collect()
}

async fn drain_with(client: &Client, evictor: &Client, args: &DrainArgs) -> Result<ExitCode> {
    let started = Instant::now();
    let at = set_cordon(client, &args.gpu, &args.reason).await?;
    let mut asked: BTreeMap<String, Asked> = BTreeMap::new();
    let mut told = Held::default();
    loop {
        let object = read(client, &args.gpu.node).await?;
        let held = held(&object, &at.uuid).unwrap_or_default();
        if held == Held::default() {
            println!("{at} is free");
            return Ok(ExitCode::SUCCESS);
        }
        let due = to_evict(&held, &asked, Instant::now());
        let mut metas = BTreeMap::new();
        for pod in &due {
            metas.extend(pod_of(client, pod).await?.map(|meta| (*pod, meta)));
        }
        let alone = alone(metas.iter().map(|(pod, meta)| (*pod, meta)));
        ensure!(
            args.force || alone.is_empty(),
            "nothing makes {} anew when evicted: --force evicts such pods too; {at} stays cordoned",
            alone.join(", ")
        );
        for (pod, meta) in &metas {
            let state = evict(evictor, pod, meta, args.grace).await?;
            match state {
                Asked::Leaving => println!("{pod} is leaving"),
                Asked::Protected(_) if !asked.contains_key(*pod) => {
                    println!("{pod} is protected by its disruption budget: trying again");
                }
                Asked::Protected(_) => {}
            }
            asked.insert((*pod).to_owned(), state);
        }
        if told != held {
            let who = if held.pods.is_empty() {
                "pods that are being admitted".to_owned()
            } else {
                held.pods.iter().cloned().collect::<Vec<_>>().join(", ")
            };
            println!("{at} has {} slices in use, by {who}", held.slices);
            told = held;
        }
        if args.timeout > 0 && started.elapsed() >= Duration::from_secs(args.timeout) {
            eprintln!("cleave: {at} is not free after {} s: it stays cordoned", args.timeout);
            return Ok(ExitCode::from(NOT_IN_TIME));
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn api_of(client: &Client, pod: &str) -> Result<(Api<Pod>, String)> {
    let (namespace, name) = pod.split_once('/').with_context(|| format!("{pod} is no pod's name"))?;
    Ok((Api::namespaced(client.clone(), namespace), name.to_owned()))
}

/// A pod's metadata; none where it is gone.
async fn pod_of(client: &Client, pod: &str) -> Result<Option<PartialObjectMeta<Pod>>> {
    let (api, name) = api_of(client, pod)?;
    api.get_metadata_opt(&name).await.with_context(|| format!("reading the pod {pod}"))
}

/// Evicts a pod, if it is still this one.
async fn evict(client: &Client, pod: &str, meta: &PartialObjectMeta<Pod>, grace: Option<u32>) -> Result<Asked> {
    if meta.metadata.deletion_timestamp.is_some() {
        return Ok(Asked::Leaving);
    }
    let (api, name) = api_of(client, pod)?;
    let mut options = json!({"preconditions": {"uid": meta.uid()}});
    if let (Some(grace), Some(options)) = (grace, options.as_object_mut()) {
        options.insert("gracePeriodSeconds".into(), json!(grace));
    }
    let body = json!({"apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": name, "namespace": meta.namespace()}, "deleteOptions": options});
    let posted = kube::api::PostParams::default();
    match api.create_subresource::<_, serde_json::Value>("eviction", &name, &posted, &body).await {
        Ok(_) => Ok(Asked::Leaving),
        // It is gone already, or another has its name.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(Asked::Leaving),
        Err(kube::Error::Api(status)) if status.code == 429 => Ok(Asked::Protected(Instant::now())),
        Err(error) => Err(error).with_context(|| format!("evicting {pod}")),
    }
}

#[cfg(test)]
mod tests {
    use kube::client::Body;
    use serde_json::Value;
    use tokio::time::timeout;
    use tower_test::mock;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(120);

    type Server = mock::Handle<http::Request<Body>, http::Response<Body>>;

    fn client() -> (Client, Server) {
        let (service, server) = mock::pair::<http::Request<Body>, http::Response<Body>>();
        (Client::new(service, "default"), server)
    }

    /// Takes the next request and answers it.
    async fn answer(server: &mut Server, status: u16, body: &Value) -> (String, Value) {
        let (request, reply) = timeout(PATIENCE, server.next_request()).await.unwrap().unwrap();
        let asked = format!("{} {}", request.method(), request.uri().path());
        let sent = request.into_body().collect_bytes().await.unwrap();
        let body = Body::from(body.to_string().into_bytes());
        reply.send_response(http::Response::builder().status(status).body(body).unwrap());
        (asked, serde_json::from_slice(&sent).unwrap_or_default())
    }

    fn refusal(code: u16) -> Value {
        json!({"kind": "Status", "status": "Failure", "code": code, "message": "no", "reason": ""})
    }

    fn holding(pods: &[&str]) -> Value {
        let allocations: Vec<Value> = pods
            .iter()
            .map(|pod| json!({"pod": pod, "container": "c", "resource": "nvidia.com/gpu-mps", "device": "GPU-a", "ids": ["GPU-a::0"]}))
            .collect();
        let instance = json!({"uuid": "MIG-b", "profile": "1g.10gb", "start": 0, "gpuInstance": 1,
            "health": {"healthy": false, "last": "2026-11-21T20:00:05Z"}});
        json!({
            "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode",
            "metadata": {"name": "n", "resourceVersion": "7", "annotations": {"other": "x"}}, "spec": {},
            "status": {"gpus": [
                {"uuid": "GPU-a", "index": 0, "model": "H100", "memoryMib": 1, "sms": 1,
                 "health": {"healthy": false, "class": "NeedsReset", "last": "2026-11-21T20:00:00Z"},
                 "slices": [{"device": "GPU-a", "resource": "nvidia.com/gpu-mps", "total": 10, "inUse": pods.len(), "unhealthy": 0}],
                 "allocations": allocations},
                {"uuid": "GPU-b", "index": 1, "model": "H100", "memoryMib": 1, "sms": 1, "health": {"healthy": true},
                 "mig": {"enabled": true, "profiles": [], "instances": [instance]}},
            ]},
        })
    }

    fn node() -> GpuNode {
        serde_json::from_value(holding(&[])).unwrap()
    }

    fn with(annotations: &Annotations) -> GpuNode {
        let mut object = node();
        let all = object.metadata.annotations.get_or_insert_default();
        for (name, value) in annotations {
            match value {
                Some(value) => drop(all.insert((*name).to_owned(), value.clone())),
                None => drop(all.remove(*name)),
            }
        }
        object
    }

    fn gpu(name: &str) -> GpuArgs {
        GpuArgs { node: "n".into(), gpu: name.into(), context: None, kubeconfig: None }
    }

    fn draining(force: bool, timeout: u64) -> DrainArgs {
        DrainArgs { gpu: gpu("0"), reason: "fan".into(), grace: Some(5), timeout, force }
    }

    #[test]
    fn a_gpu_is_found_by_index_and_uuid_and_every_other_name_is_explained() {
        let object = node();
        for name in ["1", "GPU-b"] {
            assert_eq!(find(&object, "n", name).unwrap().to_string(), "GPU 1 (GPU-b) of n");
        }
        for (name, says) in [
            ("2", "n has no GPU \"2\"; it has 0 (GPU-a), 1 (GPU-b)"),
            ("", "n has no GPU \"\""),
            ("MIG-b", "MIG-b is a MIG device of GPU 1 (GPU-b): name the GPU"),
        ] {
            let error = find(&object, "n", name).unwrap_err().to_string();
            assert!(error.starts_with(says), "{error}");
        }
        let gone = with(&cordoned(&object, "GPU-gone", ""));
        assert_eq!(find(&gone, "n", "GPU-gone").unwrap().index, None, "it can be uncordoned still");
    }

    #[test]
    fn what_is_so_already_is_not_written_again_and_others_stay() {
        let first = with(&cordoned(&node(), "GPU-a", "new fan"));
        assert!(cordoned(&first, "GPU-a", "new fan").is_empty() && cordoned(&first, "GPU-a", "").is_empty());
        let both = with(&cordoned(&first, "GPU-b", ""));
        assert_eq!(annotation(&both, CORDON_ANNOTATION).unwrap(), "GPU-a=new fan,GPU-b");
        let mut one = with(&cordoned(&both, "GPU-b", "x"));
        one.metadata.annotations = both.metadata.annotations.clone();
        let after = uncordoned(&one, "GPU-a");
        assert_eq!(after[0], (CORDON_ANNOTATION, Some("GPU-b".to_owned())));
        // What was found wrong with it is over, as far as it is known now.
        assert_eq!(after[1], (CLEARED_ANNOTATION, Some("GPU-a=2026-11-21T20:00:00Z".to_owned())));
        assert!(uncordoned(&with(&after), "GPU-a").is_empty(), "twice is once");
        assert_eq!(uncordoned(&node(), "GPU-b"), [(CLEARED_ANNOTATION, Some("GPU-b=2026-11-21T20:00:05Z".to_owned()))]);
    }

    #[tokio::test(start_paused = true)]
    async fn somebody_who_was_faster_is_not_overwritten() {
        let (client, mut api) = client();
        let cordoning = tokio::spawn(async move { set_cordon(&client, &gpu("0"), "fan").await });
        answer(&mut api, 200, &holding(&[])).await;
        let (asked, sent) = answer(&mut api, 409, &refusal(409)).await;
        assert_eq!(asked, "PATCH /apis/cleave.dev/v1alpha1/gpunodes/n");
        assert_eq!(sent["metadata"], json!({"resourceVersion": "7", "annotations": {CORDON_ANNOTATION: "GPU-a=fan"}}));
        let mut other = holding(&[]);
        other["metadata"]["annotations"] = json!({CORDON_ANNOTATION: "GPU-b"});
        other["metadata"]["resourceVersion"] = json!("8");
        answer(&mut api, 200, &other).await;
        let (_, sent) = answer(&mut api, 200, &other).await;
        assert_eq!(
            sent["metadata"],
            json!({"resourceVersion": "8", "annotations": {CORDON_ANNOTATION: "GPU-a=fan,GPU-b"}})
        );
        assert_eq!(cordoning.await.unwrap().unwrap().uuid, "GPU-a");
    }

    fn pod(controlled: bool) -> Value {
        let owner = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "j", "controller": true}]);
        json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": "p", "namespace": "ns", "uid": "u",
            "ownerReferences": if controlled { owner } else { json!([]) }}})
    }

    /// Answers until the GPU is cordoned.
    async fn cordoning(api: &mut Server, holders: &[&str]) {
        answer(api, 200, &holding(holders)).await;
        answer(api, 200, &holding(holders)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_obeys_budgets_asks_again_and_ends_when_the_gpu_is_free() {
        let (client, mut api) = client();
        let draining = tokio::spawn(async move { drain_with(&client, &client, &draining(false, 0)).await });
        cordoning(&mut api, &["ns/p"]).await;
        answer(&mut api, 200, &holding(&["ns/p"])).await;
        assert_eq!(answer(&mut api, 200, &pod(true)).await.0, "GET /api/v1/namespaces/ns/pods/p");
        let (asked, sent) = answer(&mut api, 429, &refusal(429)).await;
        assert_eq!(asked, "POST /api/v1/namespaces/ns/pods/p/eviction");
        assert_eq!(sent["deleteOptions"], json!({"preconditions": {"uid": "u"}, "gracePeriodSeconds": 5}));
        // It looks at the GPU in between.
        let again = loop {
            let (asked, _) = answer(&mut api, 200, &holding(&["ns/p"])).await;
            if !asked.starts_with("GET /apis/cleave.dev") {
                break asked;
            }
        };
        assert_eq!(again, "GET /api/v1/namespaces/ns/pods/p");
        drop(draining);
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_refuses_what_nothing_makes_anew_and_tells_when_it_is_not_in_time() {
        let (client, mut api) = client();
        let refused = {
            let client = client.clone();
            tokio::spawn(async move { drain_with(&client, &client, &draining(false, 0)).await })
        };
        cordoning(&mut api, &["ns/p"]).await;
        answer(&mut api, 200, &holding(&["ns/p"])).await;
        answer(&mut api, 200, &pod(false)).await;
        let error = refused.await.unwrap().unwrap_err().to_string();
        assert!(error.contains("ns/p") && error.contains("--force"), "{error}");

        let late = tokio::spawn(async move { drain_with(&client, &client, &draining(true, 3)).await });
        cordoning(&mut api, &["ns/p"]).await;
        answer(&mut api, 200, &holding(&["ns/p"])).await;
        answer(&mut api, 200, &pod(false)).await;
        assert!(answer(&mut api, 201, &json!({"kind": "Status", "status": "Success"})).await.0.ends_with("/eviction"));
        for _ in 0..3 {
            answer(&mut api, 200, &holding(&["ns/p"])).await;
        }
        assert_eq!(late.await.unwrap().unwrap(), ExitCode::from(NOT_IN_TIME));
    }

    #[tokio::test(start_paused = true)]
    async fn a_free_gpu_is_drained_at_once() {
        let (client, mut api) = client();
        let draining = tokio::spawn(async move { drain_with(&client, &client, &draining(false, 0)).await });
        cordoning(&mut api, &[]).await;
        answer(&mut api, 200, &holding(&[])).await;
        assert_eq!(draining.await.unwrap().unwrap(), ExitCode::SUCCESS);
    }
}
