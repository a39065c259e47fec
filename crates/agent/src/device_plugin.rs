//! The device plugin: a front end of [`Allocator`] for extended resources. The device plugin
//! translates the kubelet's calls, and decides only whether a request waits for its pod.
use std::sync::Arc;
use std::time::Instant;

use cleave_kubelet::{
    ContainerResponse, DeviceList, DeviceNode, Mount, PluginOptions, PreferredRequest, Refusal, Resource,
};
use futures::future::BoxFuture;
use tokio::sync::watch;

use crate::allocation::allocate::{ChoiceRequest, DenialReason, ResourceView, choose_preferred};
use crate::allocation::whole_gpus::choose_linked_gpus;
use crate::allocator::Allocator;
use crate::container_edits::ContainerEdits;
use crate::gpu::layout::{Pool, PoolKind, parse_slice_id};
use crate::metrics::{AllocateOutcome, KubeletCall, Metrics};

/// Returns whether the choice of slices matters: the slices are not whole GPUs, they belong to
/// several devices, and `must_include` is empty.
fn has_choice(pools: &[Pool], request: &PreferredRequest<'_>) -> bool {
    let mut devices = request.available.iter().filter_map(|id| Some(parse_slice_id(id)?.0));
    let first = devices.next();
    request.must_include.is_empty()
        && pools.iter().any(|pool| pool.kind != PoolKind::Whole)
        && devices.any(|device| Some(device) != first)
}

/// Translates container edits into the kubelet's response.
pub fn container_response(edits: ContainerEdits) -> ContainerResponse {
    let ContainerEdits { env, mounts, device_nodes, cdi_devices } = edits;
    let mount = |crate::container_edits::Mount { host_path, container_path, read_only }| Mount {
        container_path,
        host_path,
        read_only,
    };
    let node = |path: String| DeviceNode { container_path: path.clone(), host_path: path, permissions: "rw".into() };
    ContainerResponse {
        envs: env,
        mounts: mounts.into_iter().map(mount).collect(),
        devices: device_nodes.into_iter().map(node).collect(),
        cdi_names: cdi_devices,
        ..ContainerResponse::default()
    }
}

impl<'a> From<&PreferredRequest<'a>> for ChoiceRequest<'a> {
    fn from(&PreferredRequest { available, must_include, size }: &PreferredRequest<'a>) -> Self {
        Self { available, must_include, size }
    }
}

/// Converts a denial to the error that the kubelet receives. The kubelet copies the error's message
/// to the pod's status.
fn refusal_for_denial(denied: DenialReason) -> Refusal {
    match denied {
        DenialReason::Split(sentence) | DenialReason::Invalid(sentence) => Refusal::Invalid(sentence),
    }
}

/// An extended resource that the agent serves to the kubelet.
#[derive(Debug)]
pub struct ServedResource {
    resource: String,
    metrics: Metrics,
    allocator: Arc<Allocator>,
    devices: watch::Sender<Arc<DeviceList>>,
}

impl ServedResource {
    /// Creates the resource with its first device list.
    pub fn new(resource: String, allocator: Arc<Allocator>, metrics: Metrics, devices: DeviceList) -> Self {
        Self { resource, metrics, allocator, devices: watch::Sender::new(Arc::new(devices)) }
    }

    /// Replaces the device list with `devices` if they differ. Open streams send the new list to
    /// the kubelet.
    pub fn update(&self, devices: DeviceList) {
        self.devices.send_if_modified(|list| {
            let changed = **list != devices;
            if changed {
                *list = Arc::new(devices);
            }
            changed
        });
    }

    /// Sends the unchanged list to the kubelet again.
    pub fn resend_list(&self) {
        self.devices.send_modify(|list| *list = Arc::new(list.to_vec()));
    }
}

impl ServedResource {
    /// Returns the number of requested units if the choice of slices matters and no known pod has
    /// this request. Returns `None` otherwise.
    fn units_of_unknown_pod(&self, request: &PreferredRequest<'_>) -> Option<u32> {
        let units = u32::try_from(request.size).ok()?;
        let table = self.allocator.table();
        let pools = table.pools.get(&self.resource)?;
        (has_choice(pools, request) && !table.pending.expects_request(&self.resource, units)).then_some(units)
    }

    /// Returns the ids of the slices that the kubelet should allocate for the request.
    fn choose_slices(&self, request: &PreferredRequest<'_>) -> Vec<String> {
        let table = self.allocator.table();
        let pools = table.pools.get(&self.resource).map(Vec::as_slice).unwrap_or_default();
        let reserved = table.pending.open_reservations(&self.resource);
        let view = ResourceView { resource: &self.resource, pools, reserved: &reserved };
        let request = request.into();
        choose_linked_gpus(&view, &request, &table.topology).unwrap_or_else(|| choose_preferred(&view, &request))
    }

    /// Grants or refuses an allocation. Counts and logs the result.
    fn grant(&self, ids: &[String]) -> Result<ContainerResponse, Refusal> {
        let allocated = self.allocator.allocate(&self.resource, ids);
        match &allocated {
            Ok((allocation, _)) => {
                if let (Ok(units), [device]) = (u32::try_from(ids.len()), allocation.devices.as_slice()) {
                    self.allocator.table().pending.record_allocate_answer(
                        &self.resource,
                        units,
                        device,
                        Instant::now(),
                    );
                }
                self.metrics.count_allocation(&self.resource, AllocateOutcome::Granted);
                tracing::info!(resource = self.resource, allocation = allocation.id(), ids = ?allocation.ids, "allocated slices");
            }
            Err(denied) => {
                self.metrics.count_allocation(&self.resource, AllocateOutcome::Refused);
                tracing::warn!(resource = self.resource, %denied, "refused an allocation");
            }
        }
        allocated.map(|(_, edits)| container_response(edits)).map_err(refusal_for_denial)
    }
}

impl Resource for ServedResource {
    fn devices(&self) -> watch::Receiver<Arc<DeviceList>> {
        self.devices.subscribe()
    }

    fn options(&self) -> PluginOptions {
        // All resources use the same options. If MPS needed other options, a resource would have to
        // register again when it first serves shares.
        PluginOptions { pre_start: true, preferred: true }
    }

    fn preferred_devices<'a>(&'a self, request: PreferredRequest<'a>) -> BoxFuture<'a, Result<Vec<String>, Refusal>> {
        Box::pin(async move {
            let began = Instant::now();
            if let Some(units) = self.units_of_unknown_pod(&request) {
                self.allocator.wait_for_pod(&self.resource, units).await;
            }
            let chosen = self.choose_slices(&request);
            self.metrics.observe_call(KubeletCall::PreferredAllocation, began.elapsed());
            Ok(chosen)
        })
    }

    fn allocate<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<ContainerResponse, Refusal>> {
        let began = Instant::now();
        let granted = self.grant(ids);
        self.metrics.observe_call(KubeletCall::Allocate, began.elapsed());
        Box::pin(std::future::ready(granted))
    }

    fn pre_start<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let began = Instant::now();
            let allocation = self.allocator.get_or_allocate(&self.resource, ids).map_err(refusal_for_denial)?;
            let ready = self.allocator.wait_until_ready(&allocation).await;
            self.metrics.observe_call(KubeletCall::PreStart, began.elapsed());
            ready.map_err(|why| {
                tracing::warn!(
                    resource = self.resource,
                    allocation = allocation.id(),
                    why,
                    "delaying a container's start"
                );
                Refusal::NotReady(format!("{}: {why}", self.resource))
            })?;
            let took_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            tracing::debug!(resource = self.resource, allocation = allocation.id(), took_us, "a container may start");
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::allocation::pending::{BoundPod, ContainerRequest, PendingAllocations};
    use crate::allocation::table::AllocationTable;
    use crate::allocator::tests::allocator;
    use crate::allocator::{MAX_UNPUBLISHED_EVENTS, POD_KNOWN_TIMEOUT};

    const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

    fn pools(devices: &[&str], kind: &PoolKind) -> Vec<Pool> {
        let pool = |device: &&str| Pool {
            device: (*device).into(),
            resource: MPS_RESOURCE.into(),
            first: 0,
            count: 10,
            kind: kind.clone(),
        };
        devices.iter().map(pool).collect()
    }

    fn mps_kind() -> PoolKind {
        PoolKind::Mps { memory_mib: vec![], threads: vec![], max_clients: None }
    }

    fn served_resource(pending: PendingAllocations, pools: Vec<Pool>) -> ServedResource {
        let table = AllocationTable {
            pools: BTreeMap::from([(MPS_RESOURCE.into(), pools)]),
            pending,
            ..AllocationTable::default()
        };
        ServedResource::new(MPS_RESOURCE.into(), Arc::new(allocator(table)), Metrics::new(), Vec::new())
    }

    fn bound_pod(name: &str, units: u32, device: &str) -> BoundPod {
        let want = ContainerRequest {
            container: "c".into(),
            resource: MPS_RESOURCE.into(),
            units,
            group: 0,
            needed: units,
            reserved_on: Some(device.into()),
        };
        let (uid, namespace, name) = (name.into(), "ns".into(), name.into());
        BoundPod { uid, namespace, name, terminating: false, admitted: false, requests: vec![want] }
    }

    fn share_ids(device: &str) -> Vec<String> {
        (0..10).map(|number| format!("{device}::{number}")).collect()
    }

    fn all_share_ids() -> Vec<String> {
        [share_ids("A"), share_ids("B")].concat()
    }

    fn preferred_request<'a>(available: &'a [String], must_include: &'a [String], size: usize) -> PreferredRequest<'a> {
        PreferredRequest { available, must_include, size }
    }

    #[tokio::test(start_paused = true)]
    async fn a_preferred_allocation_waits_for_its_pod_for_at_most_two_seconds() {
        let served = served_resource(PendingAllocations::with_watch(), pools(&["A", "B"], &mps_kind()));
        let all = all_share_ids();
        let request = preferred_request(&all, &[], 3);
        let waits = served.preferred_devices(request);
        let allocator = Arc::clone(&served.allocator);
        let comes = async {
            tokio::task::yield_now().await;
            allocator.update_pending(|pending| pending.update_pod(bound_pod("other", 4, "A"), Instant::now()));
            tokio::task::yield_now().await;
            allocator.update_pending(|pending| pending.update_pod(bound_pod("p", 3, "B"), Instant::now()));
        };
        let started = tokio::time::Instant::now();
        let (chosen, ()) = tokio::join!(waits, comes);
        assert_eq!(started.elapsed(), Duration::ZERO, "the pod is reported in time");
        assert!(served.units_of_unknown_pod(&request).is_none(), "the pod is known");
        let chosen = chosen.unwrap();
        assert!(chosen.iter().all(|id| id.starts_with("B::")), "{chosen:?}");
        let _ = served.grant(&chosen).unwrap();
        let _ = served.preferred_devices(request).await.unwrap();
        assert_eq!(
            started.elapsed(),
            POD_KNOWN_TIMEOUT,
            "no second pod of that size is reported, so the wait times out"
        );
    }

    #[test]
    fn no_request_waits_without_a_choice_or_without_a_watch() {
        let all = all_share_ids();
        let two = || pools(&["A", "B"], &mps_kind());
        let waits =
            |served: &ServedResource, request: &PreferredRequest<'_>| served.units_of_unknown_pod(request).is_some();
        assert!(waits(&served_resource(PendingAllocations::with_watch(), two()), &preferred_request(&all, &[], 3)));
        assert!(
            !waits(&served_resource(PendingAllocations::default(), two()), &preferred_request(&all, &[], 3)),
            "without an API server"
        );
        assert!(
            !waits(
                &served_resource(PendingAllocations::with_watch(), two()),
                &preferred_request(&share_ids("A"), &[], 3)
            ),
            "all on one device"
        );
        assert!(
            !waits(
                &served_resource(PendingAllocations::with_watch(), two()),
                &preferred_request(&all, &share_ids("B")[..1], 3)
            ),
            "an init container used the slice"
        );
        assert!(!waits(
            &served_resource(PendingAllocations::with_watch(), pools(&["A", "B"], &PoolKind::Whole)),
            &preferred_request(&all, &[], 1)
        ));
        assert!(!waits(
            &served_resource(PendingAllocations::with_watch(), Vec::new()),
            &preferred_request(&[], &[], 0)
        ));
    }

    #[test]
    fn shares_of_two_devices_are_refused_counted_and_reported() {
        let served = served_resource(PendingAllocations::with_watch(), pools(&["A", "B"], &mps_kind()));
        let both = ["A::0", "B::0"].map(str::to_owned);
        let refusal = served.grant(&both).unwrap_err();
        assert!(refusal.to_string().contains("cannot come from 2 GPUs"), "{refusal}");
        assert!(served.grant(&[]).is_err());
        let events = std::mem::take(&mut served.allocator.table().events);
        assert_eq!(events.iter().map(|event| event.reason).collect::<Vec<_>>(), ["SharesSplit"]);
        let metrics = served.allocator.metrics().encode().unwrap();
        assert!(metrics.contains("cleave_agent_split_requests_total{resource=\"nvidia.com/gpu-mps\"} 1"), "{metrics}");
        for _ in 0..2 * MAX_UNPUBLISHED_EVENTS {
            let _ = served.grant(&both);
        }
        assert_eq!(served.allocator.table().events.len(), MAX_UNPUBLISHED_EVENTS);
    }
}
