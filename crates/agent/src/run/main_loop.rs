//! The main loop: the only task that makes decisions about the node.
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cleave_api::gpunode::GpuNodeStatus;
use cleave_gpu::nvml::{ClosedLibrary, Gpu, GpuEvent, Library};
use cleave_kubelet::{PluginServer, Resource, ResourceName};
use futures::FutureExt as _;
use k8s_openapi::jiff::Timestamp;
use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::files::FileContents;
use super::hand_over;
use super::http::Heartbeat;
use super::input::Input;
use super::kubelet::ListSchedule;
use super::mig;
use super::nvml_closing::{self, ClosingStep, NvmlClosing};
use super::pods::NodePods;
use crate::args::{AgentArgs, DeviceListStrategy};
use crate::cdi;
use crate::checkpoint::StateLock;
use crate::device_plugin::ServedResource;
use crate::event::NodeEvent;
use crate::gpu::mig::{ChangeOutcome, MigOrder, MigOrderResult};
use crate::gpu::xid;
use crate::metrics::Metrics;
use crate::node::{Actions, Node};
use crate::tenants::snapshot::TenantSnapshot;

/// Maximum delay between an allocation and the update of files and status.
const MAX_ALLOCATION_DELAY: Duration = Duration::from_millis(30);
/// Maximum time until the next reconciliation. Even without inputs, decisions can change with time.
const MAX_RECONCILE_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum time for the last write of the files before a restart. The kubelet's calls wait during
/// this time.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);

/// State of the main loop.
pub(super) struct MainLoop {
    pub(super) node: Node,
    pub(super) pods: NodePods,
    pub(super) plugins: PluginServer,
    pub(super) served: BTreeMap<ResourceName, Arc<ServedResource>>,
    pub(super) args: Arc<AgentArgs>,
    pub(super) metrics: Metrics,
    pub(super) heartbeat: watch::Sender<Heartbeat>,
    pub(super) written: watch::Sender<Arc<FileContents>>,
    pub(super) status: watch::Sender<Option<cleave_api::GpuNodeStatus>>,
    pub(super) events: mpsc::Sender<NodeEvent>,
    pub(super) listing: watch::Sender<ListSchedule>,
    pub(super) poll: watch::Sender<()>,
    pub(super) snapshot: watch::Sender<Arc<TenantSnapshot>>,
    pub(super) library: Library,
    /// Keeps NVML closed while a GPU is quiesced.
    pub(super) closed_library: Option<ClosedLibrary>,
    pub(super) nvml_was_closed: bool,
    pub(super) nvml_closing: NvmlClosing,
    pub(super) inputs: mpsc::WeakSender<Input>,
    /// Steps that are already in the log.
    pub(super) steps: Vec<cleave_api::gpunode::StepStatus>,
    pub(super) kubelet_answers: bool,
    /// Cancelled on SIGTERM and before a restart, so that other tasks can distinguish a shutdown
    /// from a failure.
    pub(super) stopping: CancellationToken,
    pub(super) terminate: Signal,
    /// The contents that were last written to both files.
    pub(super) complete: watch::Receiver<Arc<FileContents>>,
    /// Id of the agent to hand over to.
    pub(super) successor: watch::Receiver<Option<String>>,
    /// The lock of the state directory.
    pub(super) lock: StateLock,
}

impl MainLoop {
    pub(super) async fn run(mut self, mut inputs: mpsc::Receiver<Input>) -> anyhow::Result<()> {
        let allocator = Arc::clone(&self.pods.allocator);
        loop {
            let pause = self.reconcile().map_or(MAX_RECONCILE_INTERVAL, |pause| pause.min(MAX_RECONCILE_INTERVAL));
            if self.must_restart_to_close_nvml() {
                tracing::warn!("restarting this agent: a call to NVML hangs and keeps the GPUs open");
                return self.restart().await;
            }
            tokio::select! {
                // Cancel-safe: an unreceived message remains in the channel.
                input = inputs.recv() => match input {
                    Some(input) => self.apply_input(input),
                    None => anyhow::bail!("all inputs of the main loop are closed"),
                },
                // Cancel-safe: an unreceived notification remains pending.
                () = allocator.allocated.notified() => {
                    // Wait briefly, so that the kubelet gets its response first, and so that one
                    // reconciliation covers a burst of allocations. The start of a container ends
                    // the wait.
                    let _ = tokio::time::timeout(MAX_ALLOCATION_DELAY, allocator.starting.notified()).await;
                    self.listing.send_modify(|listing| listing.allocated += 1);
                }
                // Cancel-safe: the next call returns a missed signal.
                _ = self.terminate.recv() => {
                    tracing::info!("received SIGTERM");
                    self.stopping.cancel();
                    self.plugins.stop().await;
                    return Ok(());
                }
                // Cancel-safe: the next call returns a missed change.
                Ok(()) = self.successor.changed() => {
                    let successor = self.successor.borrow_and_update().clone();
                    if let Some(successor) = successor.filter(|_| !self.node.is_changing_hardware()) {
                        return self.hand_over(&successor).await;
                    }
                }
                () = tokio::time::sleep(pause) => {}
            }
            // Apply all queued inputs before the next reconciliation.
            while let Ok(input) = inputs.try_recv() {
                self.apply_input(input);
            }
        }
    }

    /// Returns whether a quiesce needs NVML closed and only a restart of this process can close it.
    /// Also records in the node whether even a restart cannot close NVML.
    fn must_restart_to_close_nvml(&mut self) -> bool {
        let must_close = self.closed_library.is_some() && !self.library.is_closed();
        let can_end_threads = || nvml_closing::can_end_threads(Path::new("/proc/self/task"));
        let step = self.nvml_closing.next_step(must_close, can_end_threads, Instant::now());
        self.node.record_nvml_stuck(step == ClosingStep::Stuck);
        // Do not restart during a change of a GPU, because a restart would interrupt the change.
        step == ClosingStep::Restart && !self.node.is_changing_hardware()
    }

    /// Stops serving, releases the lock, and restarts this process as a standby. Returns only after
    /// an error or SIGTERM.
    async fn hand_over(self, successor: &str) -> anyhow::Result<()> {
        tracing::info!(successor, "handing over to another agent of this node");
        self.restart().await
    }

    /// Stops serving, releases the lock, and restarts this process. Without a successor in the
    /// record of hand-overs, the process serves again at once. Returns only after an error or
    /// SIGTERM.
    async fn restart(mut self) -> anyhow::Result<()> {
        self.stopping.cancel();
        self.plugins.stop().await;
        // Reconcile and write the files after the last allocation, because the successor starts
        // from these files.
        self.reconcile();
        let wanted = Arc::clone(&self.written.borrow());
        let complete = self.complete.wait_for(|complete| Arc::ptr_eq(complete, &wanted));
        if tokio::time::timeout(WRITE_TIMEOUT, complete).await.is_err() {
            // Continue after a failed write: as after a crash, the successor learns recent
            // allocations from the kubelet.
            tracing::warn!("failed to write the files before the restart");
        }
        if self.terminate.recv().now_or_never().is_some() {
            tracing::info!("received SIGTERM");
            return Ok(());
        }
        Err(hand_over::restart_as_standby(self.lock)).context("failed to restart the agent")
    }

    fn apply_input(&mut self, input: Input) {
        // Update the time of day with every input, because the system clock may have been changed.
        self.node.set_time(Instant::now(), Timestamp::now());
        match input {
            Input::MigOrderResult(ended) => {
                let MigOrderResult { order, outcome, .. } = &ended;
                tracing::info!(gpu = order.gpu, change = %order.change, ?outcome, "changed a GPU");
                self.metrics.count_mig_change(&order.change, outcome);
                self.node.record_order_result(ended, Instant::now());
            }
            Input::Many(inputs) => inputs.into_iter().for_each(|input| self.apply_input(input)),
            Input::DriverInfo(answer, requested_at) => {
                if let Err(error) = &answer {
                    self.metrics.count_error("nvml");
                    tracing::warn!(error = error as &dyn std::error::Error, "failed to list the GPUs");
                }
                self.node.record_driver_info(answer, requested_at);
            }
            Input::Gpu(index, answer, requested_at) => {
                if answer.is_err() {
                    self.metrics.count_error("gpu");
                }
                self.node.record_gpu(index, answer, requested_at);
            }
            Input::Event(GpuEvent::Xid { uuid, xid, gpu_instance }) => {
                let class = self.node.record_xid(&uuid, xid, gpu_instance, &self.args.ignore_xids, Instant::now());
                tracing::warn!(
                    gpu = uuid,
                    xid,
                    gpu_instance,
                    class = class.as_str(),
                    meaning = xid::describe_xid(xid),
                    "XID"
                );
                self.metrics.count_xid(&uuid, xid, class);
                self.poll.send_replace(());
            }
            Input::Vitals(uuid, vitals, requested_at) => self.node.record_vitals(&uuid, vitals, requested_at),
            Input::Topology(topology) => self.pods.allocator.table().topology = topology,
            Input::Event(GpuEvent::Rescan) => self.poll.send_replace(()),
            Input::Object(object) => self.node.record_gpu_node(object),
            Input::Mps(view) => self.node.record_mps_view(view),
            Input::PodResources(answer, requested_at, kubelet_checkpoint) => {
                self.node.record_kubelet_checkpoint(kubelet_checkpoint);
                if answer.is_ok() != std::mem::replace(&mut self.kubelet_answers, answer.is_ok()) {
                    match &answer {
                        Ok(_) => tracing::info!("the kubelet lists pods again"),
                        Err(error) => {
                            tracing::warn!(error, "failed to list the kubelet's pods; keeping all slices");
                        }
                    }
                }
                if let Ok(rows) = &answer {
                    self.pods.terminating.send_if_modified(|pods| pods.set_holders(rows));
                }
                let mut table = self.pods.allocator.table();
                if let Ok(rows) = &answer {
                    table.pending.record_pod_resources_list(rows, requested_at);
                }
                let ended = self.node.record_pod_resources(answer, requested_at, &mut table.allocations);
                drop(table);
                if ended > 0 {
                    tracing::info!(ended, "removed allocations that no pod uses");
                }
            }
            Input::KubeletStarted => self.node.record_kubelet_start(Instant::now()),
            Input::Findings(findings) => self.node.record_findings(findings),
        }
    }

    /// Reconciles and carries out the actions. Returns the maximum time until the next
    /// reconciliation. Returns `None` if the next reconciliation is needed only after new input.
    fn reconcile(&mut self) -> Option<Duration> {
        let now = Instant::now();
        // Find and create device nodes before the table is locked: `device_nodes` does file I/O,
        // and the kubelet's calls wait for the lock.
        let nodes = self.device_nodes();
        self.node.record_nvml_closed(self.library.is_closed());
        let mut table = self.pods.allocator.table();
        let actions = self.node.reconcile(&mut table, now);
        table.nodes.clone_from(&nodes);
        let table_events = std::mem::take(&mut table.events);
        drop(table);
        let Actions { lists, resend, desired, checkpoint, status, events, faults, .. } = actions;
        // Send the lists before any other action, because the kubelet must receive the removal of
        // slices first.
        self.serve_device_lists(lists);
        let resent = resend.iter().filter_map(|name| self.served.get(name.as_str()));
        if resent.map(|served| served.resend_list()).count() > 0 {
            self.listing.send_modify(|listing| listing.resent += 1);
        }
        self.queue_file_writes(FileContents { desired, checkpoint, nodes, sweep: actions.sweep_directories });
        for (device, faults) in &faults {
            self.metrics.count_faults(device, *faults);
        }
        self.report_status_and_events(status, events.into_iter().chain(table_events));
        self.snapshot.send_if_modified(|last| {
            let changed = **last != actions.snapshot;
            if changed {
                *last = Arc::new(actions.snapshot);
            }
            changed
        });
        let interval = actions.list_interval;
        self.listing.send_if_modified(|listing| std::mem::replace(&mut listing.interval, interval) != interval);
        // Start no MIG changes while the agent stops, because the end of this process would
        // interrupt them.
        for order in actions.orders.into_iter().filter(|_| !self.stopping.is_cancelled()) {
            self.start_order(order);
        }
        if actions.close_nvml != self.closed_library.is_some() {
            tracing::info!(closed = actions.close_nvml, "opened or closed NVML for a quiesce");
            self.closed_library = actions.close_nvml.then(|| self.library.close());
        }
        if actions.poll_nvml || self.closed_library.is_none() && self.nvml_was_closed {
            self.poll.send_replace(());
        }
        self.nvml_was_closed = self.closed_library.is_some();
        self.heartbeat.send_replace(Heartbeat {
            reconciled: now,
            not_ready: actions.not_ready,
            changing: self.node.is_changing_hardware(),
        });
        actions.wake_after
    }

    /// Returns the paths of the device nodes of each device, for the strategies that pass paths to
    /// containers. For these strategies, also creates missing device nodes of MIG instances.
    fn device_nodes(&self) -> BTreeMap<String, Vec<String>> {
        if self.args.device_list_strategy == DeviceListStrategy::Envvar {
            return BTreeMap::new();
        }
        let gpus = self.node.gpus();
        let gpus: Vec<&Gpu> = gpus.iter().collect();
        if let Err(error) = cdi::create_capability_nodes(&gpus, &self.args.host_root) {
            self.metrics.count_error("capability-nodes");
            tracing::warn!(%error, "failed to create the device nodes of MIG instances");
        }
        cdi::device_nodes(&gpus, &self.args.host_root)
    }

    /// Publishes a changed status, and the Events. Logs new steps and all Events.
    fn report_status_and_events(&mut self, status: GpuNodeStatus, events: impl Iterator<Item = NodeEvent>) {
        let is_changed = self.status.borrow().as_ref() != Some(&status);
        if is_changed {
            self.metrics.set_node_status(&status);
            for step in status.steps.iter().filter(|step| !self.steps.contains(step)) {
                tracing::info!(
                    gpu = step.gpu,
                    action = step.action,
                    result = step.result,
                    message = step.message,
                    "step"
                );
            }
            self.steps.clone_from(&status.steps);
            self.status.send_replace(Some(status));
        }
        for event in events {
            tracing::info!(warning = event.warning, reason = event.reason, note = event.note, "event");
            if self.events.try_send(event).is_err() {
                self.metrics.count_error("event-dropped");
            }
        }
    }

    /// Starts a MIG change. The result of the change arrives as an input.
    fn start_order(&self, order: MigOrder) {
        let inputs = self.inputs.clone();
        let (metrics, began) = (self.metrics.clone(), Instant::now());
        let send_result = async move |ended: MigOrderResult| {
            if !matches!(ended.outcome, ChangeOutcome::Slow(_)) {
                metrics.observe_mig_change(&ended.order.change, began.elapsed());
            }
            if let Some(inputs) = inputs.upgrade() {
                // Ignore errors, because the channel is closed only when the agent ends.
                let _ = inputs.send(Input::MigOrderResult(ended)).await;
            }
        };
        tokio::spawn(mig::run_order(self.library.clone(), order, send_result));
    }

    /// Sends the device lists to the kubelet through the open streams. Replaces the set of
    /// resources only if a resource was added or removed.
    fn serve_device_lists(&mut self, lists: BTreeMap<ResourceName, cleave_kubelet::DeviceList>) {
        let before: Vec<ResourceName> = self.served.keys().cloned().collect();
        self.served.retain(|name, _| lists.contains_key(name));
        for (name, devices) in lists {
            if let Some(served) = self.served.get(&name) {
                served.update(devices);
            } else {
                let served = ServedResource::new(
                    name.as_str().to_owned(),
                    Arc::clone(&self.pods.allocator),
                    self.metrics.clone(),
                    devices,
                );
                self.served.insert(name, Arc::new(served));
            }
        }
        if !self.served.keys().eq(before.iter()) {
            let resources =
                self.served.iter().map(|(name, served)| (name.clone(), Arc::clone(served) as Arc<dyn Resource>));
            self.plugins.set(resources.collect());
        }
    }

    /// Passes new contents to the task that writes the files, if the contents changed.
    fn queue_file_writes(&self, next: FileContents) {
        self.written.send_if_modified(|last| {
            let changed = **last != next;
            if changed {
                *last = Arc::new(next);
            }
            changed
        });
    }
}
