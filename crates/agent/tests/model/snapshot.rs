//! What tenants are judged by, as it follows from what the node knows.
use std::collections::BTreeMap;
use std::time::Instant;

use cleave_agent::allocation::table::AllocationTable;
use cleave_agent::allocation::{Allocation, MpsLimits};
use cleave_agent::mps::View;
use cleave_agent::node::Node;
use cleave_agent::object::Object;
use cleave_agent::tenants::snapshot::TenantSnapshot;
use cleave_api::GpuNodeSpec;
use cleave_api::sharingpolicy::Enforcement;
use cleave_gpu::mps::wire::{self, Client, DaemonState, DaemonStatus, Status};
use cleave_gpu::nvml::Process;

use crate::fixtures::{Inventory, allocation, answer, gpu, held, mps_spec};

struct Known {
    node: Node,
    table: AllocationTable,
    start: Instant,
}

impl Known {
    fn snapshot(&mut self) -> TenantSnapshot {
        self.node.reconcile(&mut self.table, self.start).snapshot
    }
}

/// A node that serves ten shares of GPU-a, and GPU-b whole.
fn node(enforcement: Enforcement) -> Known {
    let start = Instant::now();
    let (mut node, allocations) = Node::start("boot".into(), std::time::Duration::ZERO, None, None, start);
    let gpus = [gpu("GPU-a", 0), gpu("GPU-b", 1)].map(|gpu| (gpu.index, Ok(gpu)));
    answer(&mut node, Ok(Inventory { driver: "580".into(), gpus: gpus.into(), processes: BTreeMap::new() }), start);
    let spec = GpuNodeSpec {
        plan_id: "p".into(),
        gpus: vec![cleave_api::gpunode::GpuSpec { enforcement, ..mps_spec("GPU-a", 10) }],
    };
    node.object(Object::Present(1, spec));
    Known { node, table: AllocationTable { allocations, ..AllocationTable::default() }, start }
}

fn given() -> Allocation {
    let limits = MpsLimits { threads: Some(10), memory_mib: Some(1000), max_clients: None };
    Allocation { mps: Some(limits), ..allocation(&["GPU-a::0"]) }
}

#[test]
fn nothing_is_looked_at_while_nobody_can_use_a_shared_device() {
    let mut known = node(Enforcement::Report);
    let snapshot = known.snapshot();
    assert_eq!(snapshot.devices.keys().collect::<Vec<_>>(), ["GPU-a"], "no GPU that is whole");
    assert_eq!((snapshot.in_use(), snapshot.shares), (vec![], None), "the kubelet has not said who holds what");
    known.table.allocations.insert(given(), known.start);
    assert_eq!(known.snapshot().in_use(), ["GPU-a"]);
}

#[test]
fn a_process_is_reason_enough_to_look_though_nobody_holds_a_share() {
    let mut known = node(Enforcement::Report);
    let process = Process { pid: 7, memory: None, mps: false, gpu_instance: None };
    let gpus = [(0, Ok(gpu("GPU-a", 0)))].into();
    let processes = [("GPU-a".to_owned(), vec![process])].into();
    answer(&mut known.node, Ok(Inventory { driver: "580".into(), gpus, processes }), known.start);
    assert_eq!(known.snapshot().in_use(), ["GPU-a"]);
}

#[test]
fn who_holds_what_and_who_is_a_client_is_what_the_kubelet_and_mps_say() {
    let mut known = node(Enforcement::Evict);
    let id = given().id();
    known.table.allocations.insert(given(), known.start);
    known.node.pod_resources(Ok(vec![held("p", &["GPU-a::0"])]), known.start, &mut known.table.allocations);
    let daemon = DaemonStatus {
        state: DaemonState::Active,
        pid: Some(10),
        server_pid: Some(11),
        restarts: 0,
        enforcement: wire::Enforcement::Hard,
        message: String::new(),
        clients: vec![Client { pid: 7, allocation: Some(id.clone()) }, Client { pid: 8, allocation: None }],
        fault: None,
    };
    let status = Status { version: 1, daemons: [("GPU-a".to_owned(), daemon)].into(), ..Status::default() };
    known.node.mps(View { alive: true, status, error: None });
    let snapshot = known.snapshot();
    let shared = &snapshot.devices["GPU-a"];
    assert_eq!((shared.gpu.as_str(), shared.evict, shared.daemon.clone()), ("GPU-a", true, [10, 11].into()));
    assert_eq!(shared.clients, [(7, Some(id.clone())), (8, None)].into());
    assert_eq!(snapshot.limits, [(id.clone(), Some(1000))].into());
    let share = &snapshot.shares.as_ref().unwrap()[0];
    assert_eq!((share.pod.as_str(), share.device.as_str(), &share.allocation), ("p", "GPU-a", &id));
    known.node.pod_resources(Err("no".into()), known.start, &mut known.table.allocations);
    assert_eq!(known.snapshot().shares, None, "an answer of before may name a pod that is gone");
}
