//! `cleave drain`: cordons one GPU or all GPUs of a node, evicts the pods that use them, and waits
//! until the GPUs are free.
use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use cleave_api::GpuNode;
use cleave_operator::evict::{EvictionOptions, EvictionResult, evict_with};
use k8s_openapi::api::core::v1::Pod;
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt as _};
use tokio::time::Instant;

use crate::client::ClusterArgs;
use crate::cordon::{cordon_gpus, quiesce};
use crate::gpu::{NodeGpu, find_gpus, read_gpu_node, reported_gpus};

/// Interval between two reads of the `GpuNode`.
const GPU_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Delay before the next attempt to evict a pod that a disruption budget protects, or whose
/// eviction the API server throttled.
const EVICTION_RETRY_DELAY: Duration = Duration::from_secs(5);
/// Time limit of one eviction. Admission webhooks may take 30 s each.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(60);
/// The exit status after a timeout.
const TIMEOUT_EXIT_STATUS: u8 = 3;

/// Examples in the help of `cleave drain`.
pub(crate) const HELP_EXAMPLES: &str = "\
Examples:
  cleave drain gpu-17 3
  cleave drain gpu-17 3 --force --grace 30 --timeout 0
  cleave drain gpu-17 3 --quiesce      then nvidia-smi --gpu-reset, then cleave uncordon
  cleave drain gpu-17 --quiesce        all GPUs of the node, to upgrade its driver";

/// Options of `cleave drain`.
#[derive(Debug, Clone, clap::Args)]
pub struct DrainArgs {
    /// Name of the node.
    #[arg(value_name = "NODE")]
    pub node: String,
    /// Index or UUID of the GPU. With `--quiesce`, the default is all GPUs of the node.
    #[arg(value_name = "GPU", required_unless_present = "quiesce")]
    pub gpu: Option<String>,
    /// Connection to the node's cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Reason, shown to other administrators. Must not contain commas.
    #[arg(long, value_name = "TEXT", default_value = "draining")]
    pub reason: String,
    /// Seconds each pod has to terminate [default: the pod's own grace period].
    #[arg(long, value_name = "SECONDS")]
    pub grace: Option<u32>,
    /// Seconds to wait until the GPUs are free and, with `--quiesce`, quiesced. 0 waits forever.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,
    /// Also evict pods that no controller recreates.
    #[arg(long)]
    pub force: bool,
    /// After the drain, end the GPU's MPS daemons and close NVML, so that the GPU can be reset or
    /// the driver unloaded. Run `cleave uncordon` to return the GPU to service.
    #[arg(long)]
    pub quiesce: bool,
}

/// The result of a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainOutcome {
    /// No pod uses the GPUs. With `--quiesce`, no process of Cleave uses the GPUs either.
    Free,
    /// Pods still use a GPU, or a GPU is not yet quiesced.
    TimedOut,
}

/// Runs `cleave drain`.
pub(crate) async fn run(args: DrainArgs) -> Result<ExitCode> {
    let config = args.cluster.kube_config().await?;
    let client = Client::try_from(config.clone()).context("failed to create the Kubernetes client")?;
    // The API server answers 429 if a disruption budget forbids an eviction. A client with retries
    // repeats the request for minutes, and delays the evictions of other pods.
    let mut no_retry = config;
    no_retry.default_retry = false;
    let evictor = Client::try_from(no_retry).context("failed to create the Kubernetes client")?;
    Ok(match drain(&client, &evictor, &args).await? {
        DrainOutcome::Free => ExitCode::SUCCESS,
        DrainOutcome::TimedOut => ExitCode::from(TIMEOUT_EXIT_STATUS),
    })
}

/// Drains a GPU, or all GPUs of a node, and prints the progress. `evictor` is a client that does
/// not retry requests.
///
/// # Errors
/// Returns an error if the GPU does not exist, the reason is not valid, a pod needs `--force`, or
/// the API server refuses a request. Cordoned GPUs remain cordoned after an error.
pub async fn drain(client: &Client, evictor: &Client, args: &DrainArgs) -> Result<DrainOutcome> {
    let started = Instant::now();
    let mut targets = cordon_gpus(client, &args.node, args.gpu.as_deref(), &args.reason).await?;
    let mut evictions = BTreeMap::new();
    let mut printed = vec![String::new(); targets.len()];
    let mut quiescing = false;
    loop {
        let object = read_gpu_node(client, &args.node).await?;
        let states: Vec<GpuState> = targets.iter().map(|target| gpu_state(&object, target, quiescing)).collect();
        // Evict pods during a quiesce too: the agent may report a pod after the GPU seemed to be
        // free.
        let pods = states.iter().flat_map(|state| state.usage.pods.iter().cloned()).collect();
        evict_due_pods(client, evictor, args, &targets, &pods, &mut evictions).await?;
        for (state, printed) in states.iter().zip(&mut printed) {
            if *printed != state.text {
                println!("{}", state.text);
                printed.clone_from(&state.text);
            }
        }
        let late: Vec<&NodeGpu> =
            targets.iter().zip(&states).filter(|(_, state)| !state.done).map(|(target, _)| target).collect();
        if late.is_empty() && (quiescing || !args.quiesce) {
            return Ok(DrainOutcome::Free);
        }
        if late.is_empty() {
            // A drain of the whole node includes GPUs that the agent first reports during the
            // drain.
            let new = if args.gpu.is_none() { unknown_gpus(&object, &args.node, &targets)? } else { Vec::new() };
            if !new.is_empty() {
                for gpu in new {
                    targets.extend(cordon_gpus(client, &args.node, Some(&gpu.uuid), &args.reason).await?);
                }
                printed.resize(targets.len(), String::new());
                continue;
            }
            quiesce(client, &args.node, &targets).await?;
            quiescing = true;
            continue;
        }
        if args.timeout > 0 && started.elapsed() >= Duration::from_secs(args.timeout) {
            let wanted = if quiescing { "quiesced" } else { "free" };
            for target in late {
                eprintln!("cleave: {target} is not {wanted} after {} s and remains cordoned", args.timeout);
            }
            return Ok(DrainOutcome::TimedOut);
        }
        tokio::time::sleep(GPU_POLL_INTERVAL).await;
    }
}

/// Returns the GPUs that the agent reports and `targets` does not include.
fn unknown_gpus(object: &GpuNode, node: &str, targets: &[NodeGpu]) -> Result<Vec<NodeGpu>> {
    let mut gpus = find_gpus(object, node, None)?;
    gpus.retain(|gpu| targets.iter().all(|target| target.uuid != gpu.uuid));
    Ok(gpus)
}

/// The progress of the drain of one GPU.
struct GpuState {
    usage: GpuUsage,
    /// Whether the GPU is free, or quiesced if the drain has reached the quiesce.
    done: bool,
    /// The progress, as `cleave drain` prints it.
    text: String,
}

/// Returns the progress of a GPU's drain, or of its quiesce if `quiescing` is true.
fn gpu_state(object: &GpuNode, target: &NodeGpu, quiescing: bool) -> GpuState {
    let usage = gpu_usage(object, &target.uuid).unwrap_or_default();
    let free = usage == GpuUsage::default();
    if !quiescing {
        let text = if free { format!("{target} is free") } else { format!("{target}: {usage}") };
        return GpuState { usage, done: free, text };
    }
    let gpu = reported_gpus(object).iter().find(|gpu| gpu.uuid == target.uuid);
    let status = gpu.and_then(|gpu| gpu.quiesce.clone()).unwrap_or_default();
    let message = if status.message.is_empty() { "waiting for the agent" } else { &status.message };
    let text = format!("{target}: {message}");
    GpuState { usage, done: status.quiesced, text }
}

/// The pods that use a GPU, and the number of its slices in use.
#[derive(Debug, Default, PartialEq, Eq)]
struct GpuUsage {
    /// `namespace/name` of each pod.
    pods: BTreeSet<String>,
    /// Shares, sized slices, replicas, MIG instances or whole GPUs in use.
    slices: u32,
}

impl std::fmt::Display for GpuUsage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pods: Vec<&str> = self.pods.iter().map(String::as_str).collect();
        // The kubelet allocates slices before it lists the pod.
        let pods = if pods.is_empty() { "pods that are starting".to_owned() } else { pods.join(", ") };
        write!(formatter, "{} in use by {pods}", self.slices)
    }
}

/// Returns the usage of a GPU, or `None` if the node does not report the GPU.
fn gpu_usage(object: &GpuNode, uuid: &str) -> Option<GpuUsage> {
    let gpu = reported_gpus(object).iter().find(|gpu| gpu.uuid == uuid)?;
    Some(GpuUsage {
        pods: gpu.allocations.iter().map(|allocation| allocation.pod.clone()).collect(),
        slices: gpu.slices.iter().map(|slice| slice.in_use).sum(),
    })
}

/// The state of a pod's eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EvictionState {
    /// The pod is terminating or no longer exists.
    Accepted,
    /// A disruption budget refused the eviction at this time.
    Refused(Instant),
    /// The API server throttled the eviction at this time.
    Throttled(Instant),
}

/// Returns the pods to evict now.
fn pods_due_for_eviction<'a>(
    pods: &'a BTreeSet<String>,
    evictions: &BTreeMap<String, EvictionState>,
    now: Instant,
) -> Vec<&'a str> {
    let due = |pod: &&String| match evictions.get(*pod) {
        None => true,
        Some(EvictionState::Accepted) => false,
        Some(EvictionState::Refused(at) | EvictionState::Throttled(at)) => {
            now.saturating_duration_since(*at) >= EVICTION_RETRY_DELAY
        }
    };
    pods.iter().filter(due).map(String::as_str).collect()
}

/// Returns the pods that no controller recreates, except those that are already terminating.
fn pods_without_controller<'a>(pods: impl IntoIterator<Item = (&'a str, &'a PartialObjectMeta<Pod>)>) -> Vec<&'a str> {
    let controlled =
        |pod: &PartialObjectMeta<Pod>| pod.owner_references().iter().any(|owner| owner.controller == Some(true));
    let terminates = |pod: &PartialObjectMeta<Pod>| pod.metadata.deletion_timestamp.is_some();
    pods.into_iter().filter(|(_, pod)| !controlled(pod) && !terminates(pod)).map(|(name, _)| name).collect()
}

/// Evicts the pods that are due, and stores the results. Without `--force`, returns an error and
/// evicts no pod if no controller recreates one of the pods.
async fn evict_due_pods(
    client: &Client,
    evictor: &Client,
    args: &DrainArgs,
    targets: &[NodeGpu],
    pods: &BTreeSet<String>,
    evictions: &mut BTreeMap<String, EvictionState>,
) -> Result<()> {
    let mut metas = BTreeMap::new();
    for pod in pods_due_for_eviction(pods, evictions, Instant::now()) {
        metas.extend(read_pod_metadata(client, pod).await?.map(|meta| (pod, meta)));
    }
    let bare = pods_without_controller(metas.iter().map(|(pod, meta)| (*pod, meta)));
    let cordoned = match targets {
        [target] => target.to_string(),
        _ => format!("each GPU on node {}", args.node),
    };
    ensure!(
        args.force || bare.is_empty(),
        "no controller recreates these pods: {}. Pass --force to evict them. {cordoned} remains cordoned.",
        bare.join(", ")
    );
    for (pod, meta) in &metas {
        let eviction = evict(evictor, pod, meta, args.grace).await?;
        match eviction {
            EvictionState::Accepted => println!("pod {pod} is terminating"),
            EvictionState::Refused(_) if !evictions.contains_key(*pod) => {
                println!(
                    "pod {pod} is protected by a disruption budget; retrying every {} s",
                    EVICTION_RETRY_DELAY.as_secs()
                );
            }
            EvictionState::Refused(_) | EvictionState::Throttled(_) => {}
        }
        evictions.insert((*pod).to_owned(), eviction);
    }
    Ok(())
}

/// Returns a pod's metadata, or `None` if the pod no longer exists.
async fn read_pod_metadata(client: &Client, pod: &str) -> Result<Option<PartialObjectMeta<Pod>>> {
    let (namespace, name) = pod.split_once('/').with_context(|| format!("{pod:?} is not a pod name"))?;
    let api = Api::<Pod>::namespaced(client.clone(), namespace);
    api.get_metadata_opt(name).await.with_context(|| format!("failed to read pod {pod}"))
}

/// Evicts a pod, unless it is already terminating.
async fn evict(client: &Client, pod: &str, meta: &PartialObjectMeta<Pod>, grace: Option<u32>) -> Result<EvictionState> {
    if meta.metadata.deletion_timestamp.is_some() {
        return Ok(EvictionState::Accepted);
    }
    let uid = meta.uid().unwrap_or_default();
    match evict_with(client, pod, &uid, EvictionOptions { grace, timeout: EVICTION_TIMEOUT }).await {
        EvictionResult::Done | EvictionResult::NotFound => Ok(EvictionState::Accepted),
        EvictionResult::Protected(_) => Ok(EvictionState::Refused(Instant::now())),
        EvictionResult::Throttled(_) => Ok(EvictionState::Throttled(Instant::now())),
        EvictionResult::Refused(error) | EvictionResult::Failed(error) => bail!("failed to evict pod {pod}: {error}"),
    }
}
