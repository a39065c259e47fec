//! Tests the snapshot of the agent's model that the tenant watch uses.
use std::collections::BTreeMap;
use std::time::Instant;

use cleave_agent::allocation::table::AllocationTable;
use cleave_agent::allocation::{Allocation, MpsLimits};
use cleave_agent::mps::HostView;
use cleave_agent::node::Node;
use cleave_agent::object::GpuNodeState;
use cleave_agent::tenants::snapshot::TenantSnapshot;
use cleave_api::GpuNodeSpec;
use cleave_api::sharingpolicy::Enforcement;
use cleave_gpu::mps::wire::{self, Client, DaemonState, DaemonStatus, MpsHostStatus};
use cleave_gpu::nvml::Process;

use crate::fixtures::{Inventory, allocation, container_devices, gpu, mps_spec, record_answer};

struct TestNode {
    /// The agent's model.
    agent: Node,
    table: AllocationTable,
    start: Instant,
}

impl TestNode {
    fn snapshot(&mut self) -> TenantSnapshot {
        self.agent.reconcile(&mut self.table, self.start).snapshot
    }
}

/// Returns a node that serves `GPU-a` as ten shares and `GPU-b` as a whole.
fn serving_node(enforcement: Enforcement) -> TestNode {
    let start = Instant::now();
    let (mut agent, allocations) = Node::start("boot".into(), std::time::Duration::ZERO, None, None, start);
    let gpus = [gpu("GPU-a", 0), gpu("GPU-b", 1)].map(|gpu| (gpu.index, Ok(gpu)));
    record_answer(
        &mut agent,
        Ok(Inventory { driver: "580".into(), gpus: gpus.into(), processes: BTreeMap::new() }),
        start,
    );
    let spec = GpuNodeSpec {
        plan_id: "p".into(),
        gpus: vec![cleave_api::gpunode::GpuSpec { enforcement, ..mps_spec("GPU-a", 10) }],
    };
    agent.record_gpu_node(GpuNodeState::Present(1, spec));
    TestNode { agent, table: AllocationTable { allocations, ..AllocationTable::default() }, start }
}

fn share() -> Allocation {
    let limits = MpsLimits { threads: Some(10), memory_mib: Some(1000), max_clients: None };
    Allocation { mps: Some(limits), ..allocation(&["GPU-a::0"]) }
}

#[test]
fn a_device_that_cannot_be_in_use_is_not_watched() {
    let mut node = serving_node(Enforcement::Report);
    let snapshot = node.snapshot();
    assert_eq!(snapshot.devices.keys().collect::<Vec<_>>(), ["GPU-a"], "whole GPUs are not shared");
    assert_eq!((snapshot.devices_in_use(), snapshot.shares), (vec![], None), "the kubelet has not listed allocations");
    node.table.allocations.insert(share(), node.start);
    assert_eq!(node.snapshot().devices_in_use(), ["GPU-a"]);
}

#[test]
fn a_device_with_a_process_is_watched_even_without_allocations() {
    let mut node = serving_node(Enforcement::Report);
    let process = Process { pid: 7, memory: None, mps: false, gpu_instance: None };
    let gpus = [(0, Ok(gpu("GPU-a", 0)))].into();
    let processes = [("GPU-a".to_owned(), vec![process])].into();
    record_answer(&mut node.agent, Ok(Inventory { driver: "580".into(), gpus, processes }), node.start);
    assert_eq!(node.snapshot().devices_in_use(), ["GPU-a"]);
}

#[test]
fn allocations_come_from_the_kubelet_and_clients_from_the_mps_host() {
    let mut node = serving_node(Enforcement::Evict);
    let id = share().id();
    node.table.allocations.insert(share(), node.start);
    node.agent.record_pod_resources(
        Ok(vec![container_devices("p", &["GPU-a::0"])]),
        node.start,
        &mut node.table.allocations,
    );
    let daemon = DaemonStatus {
        state: DaemonState::Active,
        pid: Some(10),
        server_pid: Some(11),
        restarts: 0,
        enforcement: wire::Enforcement::Hard,
        holds_clients: false,
        replies_unproven: false,
        message: String::new(),
        clients: vec![Client { pid: 7, allocation: Some(id.clone()) }, Client { pid: 8, allocation: None }],
        fault: None,
    };
    let status =
        MpsHostStatus { version: 1, daemons: [("GPU-a".to_owned(), daemon)].into(), ..MpsHostStatus::default() };
    node.agent.record_mps_view(HostView { alive: true, status, error: None });
    let snapshot = node.snapshot();
    let device = &snapshot.devices["GPU-a"];
    assert_eq!((device.gpu.as_str(), device.evict, device.daemon.clone()), ("GPU-a", true, [10, 11].into()));
    assert_eq!(device.clients, [(7, Some(id.clone())), (8, None)].into());
    assert_eq!(snapshot.limits, [(id.clone(), Some(1000))].into());
    let share = &snapshot.shares.as_ref().unwrap()[0];
    assert_eq!((share.pod.as_str(), share.device.as_str(), &share.allocation), ("p", "GPU-a", &id));
    node.agent.record_pod_resources(Err("no".into()), node.start, &mut node.table.allocations);
    assert_eq!(node.snapshot().shares, None, "an earlier list may name a deleted pod");
}
