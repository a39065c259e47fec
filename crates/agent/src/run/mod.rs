//! The tasks of the agent. Only these tasks wait for I/O and time, and only [`main_loop`] decides
//! about the node.
mod api;
mod connect;
mod files;
mod gpu_readings;
mod hand_over;
mod hardware;
mod http;
mod input;
mod kubelet;
mod main_loop;
pub(crate) mod mig;
mod mps;
mod nvml_closing;
mod offline;
mod pods;
mod shutdown;
mod specification;
mod tenant_processes;
mod tenants;
mod termination;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use cleave_gpu::mps::wire::Paths;
use cleave_gpu::nvml::{Library, LibrarySearch};
use cleave_kubelet::{PluginServer, PluginServerConfig};
use k8s_openapi::jiff::Timestamp;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::files::FileContents;
use self::http::Heartbeat;
use self::kubelet::ListSchedule;
use self::main_loop::MainLoop;
use self::nvml_closing::NvmlClosing;
use self::pods::NodePods;
use crate::allocation::pending::PendingAllocations;
use crate::allocation::table::AllocationTable;
use crate::allocation::usage::Allocations;
use crate::allocator::Allocator;
use crate::args::{AgentArgs, DeviceListStrategy, MigMode};
use crate::checkpoint::CheckpointStore;
use crate::container_edits::ContainerSettings;
use crate::hand_over::RETURN_READY_TIMEOUT;
use crate::metrics::Metrics;
use crate::mps::link::HostLink;
use crate::node::Node;
use crate::object::GpuNodeState;
use crate::tenants::snapshot::TenantSnapshot;

/// Runs the agent until it receives SIGTERM.
///
/// # Errors
/// Returns an error if the agent cannot use a path, or if a task that should never end has ended.
// long: creates each channel, and starts each task with its channels
pub async fn run(args: AgentArgs) -> anyhow::Result<()> {
    if !args.run_on_host.is_empty() {
        return Err(crate::toolkit::run_on_host(&args.host_root, &args.run_on_host)).context("failed to run a program");
    }
    // Ignore the error, because the caller may have installed a provider. The first provider
    // remains installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    cleave_serve::descriptors::raise_limit();
    let args = Arc::new(args);
    let store = CheckpointStore::new(&args.state_dir);
    // Install the signal handler before the wait, so that a signal before the start of the main
    // loop is not lost.
    let mut terminate = signal(SignalKind::terminate())?;
    let serving = tokio::select! {
        serving = hand_over::wait_for_lock(&store, &args) => serving?,
        _ = terminate.recv() => {
            tracing::info!("received SIGTERM");
            return Ok(());
        }
    };
    let now = Instant::now();
    let metrics = Metrics::for_node(&args.node_name);
    let link = HostLink::new(Paths::new(&args.run_dir));
    let offline = args.offline.clone().map(offline::OfflineDirectory::new);
    let source = offline.map(|directory| (directory.read_spec(1), directory));
    let (node, table) = restore_node_and_table(&args, &store, &link, source.as_ref(), now);
    let allocator = Allocator::new(table, ContainerSettings::new(&args), link.clone(), metrics.clone());
    let pods = NodePods::new(Arc::new(allocator));

    let (inputs, received) = mpsc::channel(64);
    let starting = Heartbeat { reconciled: now, not_ready: Some("starting".into()), changing: false };
    let (heartbeat, heartbeats) = watch::channel(starting);
    let (written, to_write) = watch::channel(Arc::<FileContents>::default());
    let (completed, complete) = watch::channel(Arc::<FileContents>::default());
    let (successor, successors) = watch::channel(None);
    let (status, statuses) = watch::channel(None);
    let (events, to_publish) = mpsc::channel(64);
    let termination_events = events.clone();
    let (listing, listings) =
        watch::channel(ListSchedule { interval: kubelet::USUAL_LIST_DELAY, allocated: 0, resent: 0 });
    let (poll, polls) = watch::channel(());
    let (snapshot, snapshots) = watch::channel(Arc::new(TenantSnapshot::default()));
    let (pod_events, pod_events_to_publish) = mpsc::channel(64);
    let library = Library::find(nvml_search(&args));
    // Close NVML before any task can open it.
    let closed_library = node.needs_nvml_closed().then(|| library.close());
    let plugin_dir = args.relay_dir.as_ref().unwrap_or(&args.device_plugin_dir);
    let main = MainLoop {
        nvml_was_closed: closed_library.is_some(),
        closed_library,
        nvml_closing: NvmlClosing::default(),
        node,
        pods: pods.clone(),
        plugins: PluginServer::start(&PluginServerConfig::new(plugin_dir))?,
        served: BTreeMap::new(),
        args: Arc::clone(&args),
        metrics: metrics.clone(),
        heartbeat,
        written,
        status,
        events,
        listing,
        poll,
        snapshot,
        library: library.clone(),
        inputs: inputs.downgrade(),
        steps: Vec::new(),
        kubelet_answers: true,
        stopping: CancellationToken::new(),
        terminate,
        complete,
        successor: successors,
        lock: serving.lock,
    };
    let (plugin_states, stopping) = (main.plugins.state(), main.stopping.clone());

    let gpu_timeout = Duration::from_secs(args.gpu_timeout);
    let mut tasks = JoinSet::new();
    // Start the main loop first, because it serves the checkpoint's state before other tasks have
    // answers.
    tasks.spawn(main.run(received));
    tasks.spawn(hardware::watch_hardware(library.clone(), inputs.clone(), polls, gpu_timeout));
    let view = watch::Sender::new(link.read_view());
    let terminating = (pods.terminating.subscribe(), view.subscribe());
    tasks.spawn(termination::run(link.clone(), terminating, termination_events, metrics.clone()));
    tasks.spawn(mps::watch_mps_host(link.clone(), view, inputs.clone()));
    let tenant_handles = (link.clone(), pods.names.clone(), metrics.clone());
    let process_sources = (library.clone(), args.proc.clone());
    tasks.spawn(tenants::watch_tenants(process_sources, tenant_handles, snapshots, pod_events, inputs.clone()));
    tasks.spawn(kubelet::list_allocations(Arc::clone(&args), inputs.clone(), listings, metrics.clone()));
    tasks.spawn(kubelet::watch_restarts(plugin_states.clone(), inputs.clone(), stopping));
    if args.device_list_strategy == DeviceListStrategy::Cdi {
        tasks.spawn(specification::write_specification(Arc::clone(&args), to_write.clone(), metrics.clone()));
    }
    tasks.spawn(files::write_files(store, link, to_write, completed, metrics.clone()));
    let ready_until = serving.start.returns_ready.then(|| now + RETURN_READY_TIMEOUT);
    tasks.spawn(serving.watch.run(heartbeats.clone(), plugin_states.clone(), successor));
    let (sources, events) = ((metrics.clone(), Some(library)), (to_publish, pod_events_to_publish));
    tasks.spawn(http::serve_endpoints(args.metrics_addr, sources, heartbeats, plugin_states, ready_until));
    match source {
        Some(source) => tasks.spawn(offline::run(source, args.node_name.clone(), pods, inputs, statuses, events)),
        None => tasks.spawn(api::run(args, pods, inputs, statuses, events, metrics)),
    };
    // None of these tasks ends while the agent works. The result of the first task that ends is the
    // agent's result.
    match tasks.join_next().await {
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(error).context("a task of the agent failed"),
        None => Ok(()),
    }
}

/// Restores the node and the table from the checkpoint of the last agent. Adds the current state of
/// the MPS host. Without an API server, also adds the spec.
fn restore_node_and_table(
    args: &AgentArgs,
    store: &CheckpointStore,
    link: &HostLink,
    source: Option<&(GpuNodeState, offline::OfflineDirectory)>,
    now: Instant,
) -> (Node, AllocationTable) {
    let (node, allocations) = restore_node(args, store, link, now);
    let mut node = node.with_fixed_mig_mode(args.mig_mode == MigMode::Never);
    node.record_mps_view(link.read_view());
    node.record_gpu_node(source.map(|(spec, _)| spec.clone()).unwrap_or_default());
    for (id, allocation) in allocations.iter().filter(|(_, allocation)| allocation.mps.is_some()) {
        // Create the directory again: after a reboot the run directory is empty, and the kubelet
        // restarts its containers without another `Allocate` call.
        if let Err(error) = link.create_allocation_directory(id) {
            tracing::warn!(%error, ids = ?allocation.ids, "failed to create an allocation's directory");
        }
    }
    let pending = match source {
        Some((_, directory)) if !directory.has_pods() => PendingAllocations::default(),
        _ => PendingAllocations::with_watch(),
    };
    (node, AllocationTable { pending, allocations, ..AllocationTable::default() })
}

/// Restores the node from the checkpoint of the last agent. If the checkpoint is missing or cannot
/// be used, restores the node from the MPS host's last desired file.
fn restore_node(args: &AgentArgs, store: &CheckpointStore, link: &HostLink, now: Instant) -> (Node, Allocations) {
    let boot_id =
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default();
    let checkpoint = store.load().unwrap_or_else(|error| {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "failed to read the checkpoint; restoring allocations from the kubelet"
        );
        match store.rename_unusable() {
            Ok(path) => tracing::info!(path = %path.display(), "renamed the unreadable checkpoint"),
            Err(error) => tracing::warn!(%error, "failed to rename the unreadable checkpoint"),
        }
        None
    });
    let last_desired = if checkpoint.is_none() { link.last_desired() } else { None };
    let (mut node, allocations) =
        Node::start(boot_id, Duration::from_secs(args.allocation_grace), checkpoint, last_desired, now);
    node.set_quiet_period(Duration::from_secs(args.suspect_quiet));
    node.set_time(now, Timestamp::now());
    (node, allocations)
}

/// Returns the locations in which to search for NVML.
fn nvml_search(args: &AgentArgs) -> LibrarySearch {
    LibrarySearch {
        library: args.nvml_library.clone(),
        host_root: args.host_root.clone(),
        driver_root: args.driver_root.clone(),
    }
}
