//! Simulates a node with one GPU, a kubelet and an MPS host.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_agent::allocation::allocate::{ResourceView, grant_allocation};
use cleave_agent::allocation::table::AllocationTable;
use cleave_agent::checkpoint::Checkpoint;
use cleave_agent::gpu::layout::parse_slice_id;
use cleave_agent::gpu::mig::{MigChange, MigOrder, MigOrderResult};
use cleave_agent::mig_order::apply_order;
use cleave_agent::mps::HostView;
use cleave_agent::node::{Actions, Node};
use cleave_agent::object::GpuNodeState;
use cleave_api::GpuNodeSpec;
use cleave_api::gpunode::GpuSpec;
use cleave_gpu::mps::wire::{DaemonState, DaemonStatus, Desired, Enforcement, MpsHostStatus};
use cleave_gpu::nvml::MigInstance;
use cleave_kubelet::ContainerDevices;

use super::simulated_gpu::{GPU_UUID, SharedGpu};
use crate::fixtures::record_answer;

/// Time for which the agent keeps allocations that the kubelet does not list yet.
pub(super) const ALLOCATION_GRACE: Duration = Duration::from_secs(30);

/// Number of rounds that is enough for every expected change.
const ROUNDS_FOR_ANY_CHANGE: usize = 80;

pub(super) struct TestNode {
    pub(super) gpu: SharedGpu,
    /// The agent's model.
    pub(super) agent: Node,
    pub(super) table: AllocationTable,
    pub(super) object: GpuNodeState,
    pub(super) now: Instant,
    /// Result of the last call of `reconcile`.
    pub(super) last: Actions,
    /// The agent's orders that the node has not performed yet.
    pub(super) orders: Vec<MigOrder>,
    /// The kubelet's allocations.
    pub(super) allocated: Vec<ContainerDevices>,
    /// The daemons and doors that the MPS host runs.
    pub(super) host: Desired,
    /// Reason and note of each Event.
    pub(super) events: Vec<(&'static str, String)>,
    pods: u32,
}

impl TestNode {
    pub(super) fn new(model: &str) -> Self {
        Self::start(SharedGpu::new(model), Instant::now(), None)
    }

    fn start(gpu: SharedGpu, now: Instant, checkpoint: Option<Checkpoint>) -> Self {
        let (mut agent, allocations) = Node::start("boot".into(), ALLOCATION_GRACE, checkpoint, None, now);
        let mut table = AllocationTable { allocations, ..AllocationTable::default() };
        let last = agent.reconcile(&mut table, now);
        let mut node = Self {
            gpu,
            agent,
            table,
            object: GpuNodeState::Unknown,
            now,
            last,
            orders: Vec::new(),
            allocated: Vec::new(),
            host: Desired::default(),
            events: Vec::new(),
            pods: 0,
        };
        node.read_gpu();
        node
    }

    /// Replaces the agent with a new agent.
    pub(super) fn restart_agent(&mut self, with_checkpoint: bool) {
        let object = std::mem::replace(&mut self.object, GpuNodeState::Unknown);
        let checkpoint = with_checkpoint.then(|| self.last.checkpoint.clone());
        let mut next = Self::start(self.gpu.clone(), self.now, checkpoint);
        (next.allocated, next.host, next.pods) = (std::mem::take(&mut self.allocated), self.host.clone(), self.pods);
        next.object = object.clone();
        next.agent.record_gpu_node(object);
        *self = next;
        self.list_allocations();
        self.report_mps_host_status(self.host.hash());
    }

    /// Passes NVML's description of the GPU and its processes to the agent.
    pub(super) fn read_gpu(&mut self) {
        let inventory = self.gpu.inventory();
        record_answer(&mut self.agent, inventory, self.now);
    }

    /// Passes the kubelet's list of allocations to the agent.
    pub(super) fn list_allocations(&mut self) {
        self.agent.record_pod_resources(Ok(self.allocated.clone()), self.now, &mut self.table.allocations);
    }

    /// Applies the desired file as the MPS host does, and reports the MPS host's status to the
    /// agent.
    pub(super) fn apply_desired_file(&mut self) {
        self.host = self.last.desired.clone();
        self.report_mps_host_status(self.host.hash());
    }

    /// Reports to the agent that the MPS host has read the desired file. Daemons that the file does
    /// not contain still run.
    pub(super) fn read_desired_file(&mut self) {
        self.report_mps_host_status(self.last.desired.hash());
    }

    /// Reports the MPS host's daemons, and the hash of the desired file that the MPS host has read,
    /// to the agent.
    pub(super) fn report_mps_host_status(&mut self, desired: String) {
        let status = DaemonStatus {
            state: DaemonState::Active,
            pid: Some(1),
            server_pid: None,
            restarts: 0,
            enforcement: Enforcement::Hard,
            holds_clients: false,
            replies_unproven: false,
            message: String::new(),
            clients: Vec::new(),
            fault: None,
        };
        let daemons = self.host.daemons.keys().map(|device| (device.clone(), status.clone())).collect();
        let status = MpsHostStatus { version: 1, desired, daemons, ..MpsHostStatus::default() };
        self.agent.record_mps_view(HostView { alive: true, status, error: None });
    }

    pub(super) fn set_spec(&mut self, gpus: Vec<GpuSpec>) {
        let plan_id = format!("{gpus:?}");
        self.object = GpuNodeState::Present(1, GpuNodeSpec { plan_id, gpus });
        self.agent.record_gpu_node(self.object.clone());
    }

    /// Runs the agent's `reconcile`, and checks that no order removes a served device.
    pub(super) fn reconcile(&mut self) {
        self.last = self.agent.reconcile(&mut self.table, self.now);
        self.orders.append(&mut self.last.orders);
        self.events.extend(self.last.events.iter().map(|event| (event.reason, event.note.clone())));
        assert!(self.orders.len() <= 1, "one change of a GPU at a time: {:?}", self.orders);
        self.assert_unique_ids();
        for MigOrder { change, .. } in &self.orders {
            let removed = match change {
                MigChange::Destroy(instance) => instance.uuid.as_str(),
                MigChange::Mode(true) => GPU_UUID,
                // In MIG mode, the agent serves only instances.
                MigChange::Mode(false) | MigChange::Create { .. } => continue,
            };
            let served = self.table.pools.values().flatten().any(|pool| pool.device == removed);
            assert!(!served, "{change} while its slices can be allocated");
        }
    }

    fn assert_unique_ids(&self) {
        for list in self.last.lists.values() {
            let ids: BTreeSet<&str> = list.iter().map(|device| device.id.as_str()).collect();
            assert_eq!(ids.len(), list.len());
        }
    }

    /// Returns the UUIDs of the existing devices that pods or processes use.
    fn devices_in_use(&self) -> BTreeSet<String> {
        let listed =
            self.allocated.iter().flat_map(|row| &row.ids).filter_map(|id| Some(parse_slice_id(id)?.0.to_owned()));
        let allocated = self.table.allocations.iter().flat_map(|(_, allocation)| allocation.devices.clone());
        let gpu = self.gpu.lock();
        let has_process = |instance: &MigInstance| gpu.processes.values().any(|gi| *gi == Some(instance.gpu_instance));
        let instances: Vec<MigInstance> = gpu.describe().mig.map(|mig| mig.instances).unwrap_or_default();
        let with_process = instances.iter().filter(|instance| has_process(instance));
        let devices = listed.chain(allocated).chain(with_process.map(|instance| instance.uuid.clone()));
        let exists = |device: &String| device == GPU_UUID || instances.iter().any(|instance| instance.uuid == *device);
        devices.filter(exists).collect()
    }

    /// Returns the GPU instance id and first slice of each MIG device, by UUID. A GPU instance
    /// without a compute instance is not a device, and no process can use it.
    pub(super) fn mig_devices(&self) -> BTreeMap<String, (u32, u32)> {
        let gpu = self.gpu.lock().describe();
        let devices = gpu.mig.iter().flat_map(|mig| &mig.instances).filter(|instance| !instance.uuid.is_empty());
        devices.map(|instance| (instance.uuid.clone(), (instance.gpu_instance, instance.start))).collect()
    }

    /// Performs an order of the agent. Checks that the change removes no device in use and no
    /// device with an MPS daemon.
    pub(super) fn perform_order(&mut self) {
        let Some(order) = self.orders.pop() else { return };
        let (in_use, before, mode) = (self.devices_in_use(), self.mig_devices(), self.gpu.lock().state.mig);
        match &order.change {
            MigChange::Destroy(instance) => assert!(!self.host.daemons.contains_key(&instance.uuid), "{order:?}"),
            MigChange::Mode(_) => assert!(!self.host.daemons.contains_key(GPU_UUID), "{order:?}"),
            MigChange::Create { .. } => {}
        }
        let (outcome, after) = apply_order(&self.gpu, &order);
        let devices = self.mig_devices();
        for device in in_use.iter().filter(|device| *device != GPU_UUID) {
            assert_eq!(before[device], devices[device], "{order:?} removed {device}, which is in use");
        }
        if in_use.contains(GPU_UUID) {
            assert_eq!(mode, self.gpu.lock().state.mig, "{order:?}");
        }
        self.now += Duration::from_millis(1);
        self.agent.record_order_result(MigOrderResult { order, outcome, after, at: self.now }, self.now);
    }

    /// Allocates a free slice as the kubelet does, even if the slice is Unhealthy, because the
    /// kubelet may not know it yet. Returns the id of the slice.
    pub(super) fn allocate(&mut self, pick: usize) -> Option<String> {
        let pools =
            self.table.pools.iter().flat_map(|(resource, pools)| pools.iter().map(move |pool| (resource, pool)));
        let is_free = |(resource, id): &(String, String)| {
            !self.allocated.iter().any(|row| row.resource == *resource && row.ids.contains(id))
        };
        let slices: Vec<(String, String)> = pools
            .flat_map(|(resource, pool)| pool.ids().map(move |id| (resource.clone(), id)))
            .filter(is_free)
            .collect();
        let (resource, id) = slices.get(pick.checked_rem(slices.len())?)?.clone();
        let view = ResourceView { resource: &resource, pools: &self.table.pools[&resource], reserved: &[] };
        let allocation = grant_allocation(&view, std::slice::from_ref(&id)).unwrap();
        self.table.allocations.insert(allocation, self.now);
        self.pods += 1;
        self.allocated.push(ContainerDevices {
            namespace: "ns".into(),
            pod: format!("p{}", self.pods),
            container: "c".into(),
            resource,
            ids: vec![id.clone()],
        });
        Some(id)
    }

    /// Runs [`ROUNDS_FOR_ANY_CHANGE`] rounds in which every component works.
    pub(super) fn run(&mut self) {
        (0..ROUNDS_FOR_ANY_CHANGE).for_each(|_| self.run_round());
    }

    /// Runs rounds until the spec is applied, but at most [`ROUNDS_FOR_ANY_CHANGE`].
    pub(super) fn run_until_applied(&mut self) {
        self.reconcile();
        for _ in 0..ROUNDS_FOR_ANY_CHANGE {
            self.run_round();
            if self.is_applied() && self.orders.is_empty() {
                return;
            }
        }
    }

    pub(super) fn run_round(&mut self) {
        self.apply_desired_file();
        self.read_gpu();
        self.list_allocations();
        self.reconcile();
        self.perform_order();
        self.now += Duration::from_secs(1);
    }

    /// Returns the action and result of each step in the status.
    pub(super) fn step_results(&self) -> Vec<(&str, &str)> {
        self.last.status.steps.iter().map(|step| (step.action.as_str(), step.result.as_str())).collect()
    }

    pub(super) fn step_messages(&self) -> String {
        self.last.status.steps.iter().map(|step| step.message.as_str()).collect::<Vec<_>>().join("; ")
    }

    /// Returns the number of healthy slices of a resource.
    pub(super) fn count_healthy_slices(&self, resource: &str) -> usize {
        let healthy = |list: &cleave_kubelet::DeviceList| list.iter().filter(|device| device.healthy).count();
        self.last.lists.get(resource).map_or(0, healthy)
    }

    pub(super) fn is_applied(&self) -> bool {
        !self.last.status.plan_id.is_empty()
    }

    /// Returns whether the GPU has exactly these MIG instances, given by profile and first memory
    /// slice.
    pub(super) fn has_exactly_instances(&self, expected: &[(&str, u32)]) -> bool {
        let instances: BTreeSet<(String, u32)> = self.gpu.lock().instances().into_iter().collect();
        instances == expected.iter().map(|&(profile, start)| (profile.to_owned(), start)).collect()
    }
}
