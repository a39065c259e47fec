//! Allocates slices for a front end such as the device plugin.
//!
//! The allocator answers requests from memory. One lock protects the [`AllocationTable`]. Hold the
//! lock only briefly: never across an `await` point or during file I/O. When a container starts,
//! the allocator waits until the allocation's door and devices are ready.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_gpu::mps::wire::{Reply, Request};
use tokio::sync::{Notify, watch};

use crate::allocation::allocate::{DenialReason, ResourceView, grant_allocation};
use crate::allocation::pending::PendingAllocations;
use crate::allocation::table::AllocationTable;
use crate::allocation::{Allocation, allocation_id};
use crate::cdi;
use crate::container_edits::{ContainerEdits, ContainerSettings};
use crate::event::NodeEvent;
use crate::metrics::Metrics;
use crate::mps::link::HostLink;

/// Maximum time that the start of a container waits for the container's devices and door. The
/// kubelet's own timeout is 30 s, after which it retries.
const START_TIMEOUT: Duration = Duration::from_secs(25);

/// Interval between checks of the CDI specification.
const CDI_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum time that a request waits for the API server to report its pod. The API server reports a
/// pod to the kubelet and the agent at the same time. The kubelet's request may therefore arrive
/// before the agent knows the pod.
pub(crate) const POD_KNOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of unpublished Events in the table. Further Events would add no information.
pub(crate) const MAX_UNPUBLISHED_EVENTS: usize = 16;

/// Allocates slices from an [`AllocationTable`] and notifies other tasks of changes.
#[derive(Debug)]
pub struct Allocator {
    table: Mutex<AllocationTable>,
    settings: ContainerSettings,
    link: HostLink,
    metrics: Metrics,
    /// Notified after an allocation, or after the refusal of shares of several devices. The main
    /// loop then soon updates its files and status.
    pub allocated: Notify,
    /// Notified when a container starts, so that the main loop writes its files immediately.
    pub starting: Notify,
    /// Notified when the pending allocations change.
    pending_changes: watch::Sender<()>,
}

impl Allocator {
    /// Creates an allocator that answers requests from `table`.
    pub fn new(table: AllocationTable, settings: ContainerSettings, link: HostLink, metrics: Metrics) -> Self {
        let (allocated, starting, pending_changes) = (Notify::new(), Notify::new(), watch::channel(()).0);
        Self { table: Mutex::new(table), settings, link, metrics, allocated, starting, pending_changes }
    }

    /// Changes the pending allocations, and wakes requests that wait for their pod.
    pub fn update_pending(&self, change: impl FnOnce(&mut PendingAllocations)) {
        change(&mut self.table().pending);
        self.pending_changes.send_replace(());
    }

    /// Waits until a known pod requests this number of slices, for at most [`POD_KNOWN_TIMEOUT`].
    pub async fn wait_for_pod(&self, resource: &str, units: u32) {
        let mut changes = self.pending_changes.subscribe();
        let known = async {
            while !self.table().pending.expects_request(resource, units) && changes.changed().await.is_ok() {}
        };
        if tokio::time::timeout(POD_KNOWN_TIMEOUT, known).await.is_ok() {
            self.metrics.count_pod_wait(true);
            return;
        }
        self.metrics.count_pod_wait(false);
        self.table().pending.record_wait_timeout();
        tracing::info!(
            resource,
            units,
            "no known pod requests this number of slices; allocating without a reservation"
        );
    }

    /// Locks the table. Drop the guard before every `await` point and before any I/O.
    pub fn table(&self) -> MutexGuard<'_, AllocationTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates these slices of a resource.
    ///
    /// # Errors
    /// Returns [`DenialReason`] if the slices cannot be allocated together.
    pub fn allocate(&self, resource: &str, ids: &[String]) -> Result<(Arc<Allocation>, ContainerEdits), DenialReason> {
        let mut table = self.table();
        let pools = table.pools.get(resource).map(Vec::as_slice).unwrap_or_default();
        let granted = grant_allocation(&ResourceView { resource, pools, reserved: &[] }, ids);
        let allocation =
            Arc::new(granted.inspect_err(|denied| self.report_split_request(&mut table, resource, denied))?);
        let edits = self.settings.edits(&allocation, &table.nodes);
        table.allocations.insert(Arc::clone(&allocation), Instant::now());
        drop(table);
        if allocation.mps.is_some()
            && let Err(error) = self.link.create_allocation_directory(&allocation.id())
        {
            // This error is not fatal: `PreStartContainer` tries to create the directory again, and
            // reports an error if that also fails.
            tracing::error!(%error, allocation = allocation.id(), "failed to create an allocation's directory");
        }
        self.allocated.notify_one();
        Ok((allocation, edits))
    }

    /// Reports a refused request for shares of several devices as a metric and an Event. Ignores
    /// other refusals.
    fn report_split_request(&self, table: &mut AllocationTable, resource: &str, denied: &DenialReason) {
        let DenialReason::Split(sentence) = denied else { return };
        self.metrics.count_split_request(resource);
        if table.events.len() < MAX_UNPUBLISHED_EVENTS {
            let note = format!(
                "the agent refused a request for shares: {sentence}. Delete and recreate the pod that failed with UnexpectedAdmissionError on this node."
            );
            table.events.push(NodeEvent { warning: true, reason: "SharesSplit", note, regarding: None, related: None });
        }
        self.allocated.notify_one();
    }

    /// Returns the allocation of these slices. If the allocation is unknown, creates the allocation
    /// again, because a reboot or the loss of the checkpoint may have removed it.
    ///
    /// # Errors
    /// Returns [`DenialReason`] if the slices cannot be allocated together.
    pub fn get_or_allocate(&self, resource: &str, ids: &[String]) -> Result<Arc<Allocation>, DenialReason> {
        let known = self.table().allocations.get(&allocation_id(resource, ids)).cloned();
        match known {
            Some(allocation) => Ok(allocation),
            None => self.allocate(resource, ids).map(|(allocation, _)| allocation),
        }
    }

    /// Waits until a container can start with this allocation. With the strategy `Cdi`, the CDI
    /// specification must list the allocation's devices. For MPS shares, the allocation's door must
    /// listen, and its daemon must accept clients.
    ///
    /// # Errors
    /// Returns a clause about the failed step, or about the condition that is still unmet after
    /// [`START_TIMEOUT`].
    pub async fn wait_until_ready(&self, allocation: &Allocation) -> Result<(), String> {
        let deadline = tokio::time::Instant::now() + START_TIMEOUT;
        if let Some(directory) = self.settings.cdi_directory() {
            // The specification may not list a new MIG instance yet.
            while !cdi::specification_lists_devices(directory, &allocation.devices) {
                if tokio::time::Instant::now() >= deadline {
                    return Err(format!(
                        "the CDI specification does not contain {} yet",
                        allocation.devices.join(", ")
                    ));
                }
                tokio::time::sleep(CDI_POLL_INTERVAL).await;
            }
        }
        if allocation.mps.is_none() {
            return Ok(());
        }
        self.starting.notify_one();
        let id = allocation.id();
        self.link
            .create_allocation_directory(&id)
            .map_err(|error| format!("failed to create the allocation's directory: {error}"))?;
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        let timeout_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        match self.link.request(&Request::Await { allocation: id, timeout_ms }, left).await? {
            Reply::Done => Ok(()),
            Reply::Error { message } => Err(message),
            Reply::Status(_) | Reply::NoContext => Err("the MPS host sent an unexpected answer".into()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use cleave_gpu::mps::wire::Paths;

    use super::*;
    use crate::allocation::MpsLimits;
    use crate::args::tests::parse_args;
    use crate::fixtures::allocation;

    /// The wait for the CDI specification may use part of the timeout. The wait for the door gets
    /// only the remaining time, so the agent answers before the kubelet's timeout.
    #[tokio::test(start_paused = true)]
    async fn devices_and_door_share_one_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let cdi_dir = directory.path().join("cdi");
        let args = parse_args(&["--device-list-strategy", "cdi", "--cdi-dir", cdi_dir.to_str().unwrap()]).unwrap();
        let link = HostLink::new(Paths::new(directory.path()));
        let settings = ContainerSettings::new(&args);
        let allocator = Allocator::new(AllocationTable::default(), settings, link, Metrics::new());
        let mps = Some(MpsLimits { threads: None, memory_mib: None, max_clients: None });
        let allocation = Allocation { mps, ..allocation(&["GPU-a::0"]) };
        let started = tokio::time::Instant::now();
        let list_devices = async {
            tokio::time::sleep(START_TIMEOUT.saturating_sub(Duration::from_secs(5))).await;
            let nodes = BTreeMap::from([("GPU-a".to_owned(), Vec::new())]);
            let driver = cdi::DriverEdits::from_directory("/opt/nvidia".as_ref(), "/usr/local/nvidia".as_ref());
            cdi::write_cdi_specification(&args, &nodes, &driver).unwrap();
        };
        let (ready, ()) = tokio::join!(allocator.wait_until_ready(&allocation), list_devices);
        let error = ready.unwrap_err();
        assert!(error.contains("MPS host"), "the devices are listed, but no MPS host answers: {error}");
        assert!(started.elapsed() <= START_TIMEOUT, "{:?}", started.elapsed());
    }

    pub(crate) fn allocator(table: AllocationTable) -> Allocator {
        let settings = ContainerSettings::new(&parse_args(&[]).unwrap());
        Allocator::new(table, settings, HostLink::new(Paths::new("/proc/none")), Metrics::new())
    }

    impl Allocator {
        pub(crate) fn metrics(&self) -> &Metrics {
            &self.metrics
        }

        pub(crate) fn pending_changes(&self) -> watch::Receiver<()> {
            self.pending_changes.subscribe()
        }
    }
}
