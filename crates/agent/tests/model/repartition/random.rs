//! Tests repartitioning with random sequences of events.
use std::time::Duration;

use cleave_agent::gpu::mig::{MigChange, MigOrder};
use proptest::prelude::*;

use super::WHOLE_GPU_RESOURCE;
use super::simulated_gpu::GPU_UUID;
use super::test_node::{ALLOCATION_GRACE, TestNode};
use crate::fixtures::{mig_spec, mps_spec};

#[derive(Debug, Clone)]
enum RandomEvent {
    WantInstances(Vec<usize>),
    WantWhole,
    WantShares,
    Allocate(usize),
    PodEnds(usize),
    ProcessStarts(usize),
    AllProcessesEnd,
    /// The next calls with this name fail. The number is the number of these calls.
    CallsFail(&'static str, u32),
    /// The agent is killed, possibly in the middle of a change.
    AgentRestarts {
        with_checkpoint: bool,
        in_change: bool,
    },
    /// An administrator creates a MIG instance manually.
    CreateByHand(usize),
    Reconcile,
    PerformOrder,
    HostApplies,
    HostReadsDesired,
    ListAllocations,
    ReadGpu,
    Wait {
        ms: u64,
    },
}

/// A placement of a MIG instance: profile, first memory slice, number of memory slices, and number
/// of MPS shares (0 for a whole instance).
type MigPlacement = (&'static str, u32, u32, u32);

/// Placements on an H100. A spec contains some of these placements that do not overlap.
const PLACEMENTS: [MigPlacement; 12] = [
    ("1g.10gb", 0, 1, 0),
    ("1g.10gb", 1, 1, 4),
    ("1g.10gb", 2, 1, 0),
    ("1g.10gb", 3, 1, 2),
    ("1g.10gb", 6, 1, 0),
    ("2g.20gb", 0, 2, 0),
    ("2g.20gb", 4, 2, 4),
    ("1g.20gb", 6, 2, 0),
    ("3g.40gb", 0, 4, 0),
    ("3g.40gb", 4, 4, 2),
    ("4g.40gb", 0, 4, 0),
    ("7g.80gb", 0, 8, 0),
];

/// Returns the profile, first memory slice and number of shares of the placements at these indices.
/// Omits placements that overlap an earlier placement.
fn non_overlapping_placements(picks: &[usize]) -> Vec<(&'static str, u32, u32)> {
    let mut chosen: Vec<MigPlacement> = Vec::new();
    for place in picks.iter().map(|pick| PLACEMENTS[pick % PLACEMENTS.len()]) {
        if chosen.iter().all(|other| place.1 >= other.1 + other.2 || other.1 >= place.1 + place.2) {
            chosen.push(place);
        }
    }
    chosen.into_iter().map(|(profile, start, _, units)| (profile, start, units)).collect()
}

fn random_event() -> impl Strategy<Value = RandomEvent> {
    let call = prop::sample::select(vec!["gi", "ci", "ci-destroy", "gi-destroy", "mode"]);
    prop_oneof![
        3 => prop::collection::vec(0..PLACEMENTS.len(), 0..5).prop_map(RandomEvent::WantInstances),
        1 => Just(RandomEvent::WantWhole),
        1 => Just(RandomEvent::WantShares),
        3 => any::<usize>().prop_map(RandomEvent::Allocate),
        2 => any::<usize>().prop_map(RandomEvent::PodEnds),
        1 => any::<usize>().prop_map(RandomEvent::ProcessStarts),
        1 => Just(RandomEvent::AllProcessesEnd),
        1 => (call, 1_u32..8).prop_map(|(call, times)| RandomEvent::CallsFail(call, times)),
        1 => any::<(bool, bool)>()
            .prop_map(|(with_checkpoint, in_change)| RandomEvent::AgentRestarts { with_checkpoint, in_change }),
        1 => any::<usize>().prop_map(RandomEvent::CreateByHand),
        8 => Just(RandomEvent::Reconcile),
        6 => Just(RandomEvent::PerformOrder),
        3 => Just(RandomEvent::HostApplies),
        2 => Just(RandomEvent::HostReadsDesired),
        3 => Just(RandomEvent::ListAllocations),
        3 => Just(RandomEvent::ReadGpu),
        4 => (1_u64..40_000).prop_map(|ms| RandomEvent::Wait { ms }),
    ]
}

impl TestNode {
    fn apply_event(&mut self, event: &RandomEvent) {
        match event {
            RandomEvent::WantInstances(picks) => {
                self.set_spec(vec![mig_spec(GPU_UUID, &non_overlapping_placements(picks))]);
            }
            RandomEvent::WantWhole => self.set_spec(vec![]),
            RandomEvent::WantShares => self.set_spec(vec![mps_spec(GPU_UUID, 4)]),
            RandomEvent::Allocate(pick) => drop(self.allocate(*pick)),
            RandomEvent::PodEnds(pick) => {
                if let Some(at) = pick.checked_rem(self.allocated.len()) {
                    self.allocated.remove(at);
                }
            }
            RandomEvent::ProcessStarts(pick) => {
                let instances: Vec<u32> = self.mig_devices().values().map(|(instance, _)| *instance).collect();
                let mut gpu = self.gpu.lock();
                let pid = 1000 + u32::try_from(gpu.processes.len()).unwrap();
                match pick.checked_rem(instances.len()) {
                    Some(at) => gpu.processes.insert(pid, Some(instances[at])),
                    None if gpu.state.mig => None,
                    None => gpu.processes.insert(pid, None),
                };
            }
            RandomEvent::AllProcessesEnd => self.gpu.lock().processes.clear(),
            RandomEvent::CallsFail(call, times) => drop(self.gpu.lock().failures.insert(call, *times)),
            RandomEvent::AgentRestarts { with_checkpoint, in_change } => {
                if let (true, Some(MigOrder { change, .. })) = (*in_change, self.orders.pop()) {
                    let mut gpu = self.gpu.lock();
                    match change {
                        MigChange::Create { profile, start } => drop(gpu.create_gpu_instance(&profile, start)),
                        MigChange::Destroy(instance) => drop(gpu.destroy_compute_instance(instance.gpu_instance)),
                        MigChange::Mode(_) => {}
                    }
                }
                self.orders.clear();
                // Add the latest allocations, because the agent writes its checkpoint shortly after
                // an allocation.
                self.last.checkpoint.allocations =
                    self.table.allocations.iter().map(|(_, allocation)| allocation.clone()).collect();
                self.restart_agent(*with_checkpoint);
            }
            RandomEvent::CreateByHand(pick) => {
                let (profile, start, _, _) = PLACEMENTS[pick % PLACEMENTS.len()];
                let mut gpu = self.gpu.lock();
                if let (true, Ok(instance)) = (gpu.state.mig, gpu.create_gpu_instance(profile, start)) {
                    let _ = gpu.create_compute_instance(instance);
                }
            }
            RandomEvent::Reconcile => self.reconcile(),
            RandomEvent::PerformOrder => self.perform_order(),
            RandomEvent::HostApplies => self.apply_desired_file(),
            RandomEvent::HostReadsDesired => self.read_desired_file(),
            RandomEvent::ListAllocations => self.list_allocations(),
            RandomEvent::ReadGpu => self.read_gpu(),
            RandomEvent::Wait { ms } => self.now += Duration::from_millis(*ms),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// [`TestNode`] checks that no change removes a device in use. When no device is in use, the
    /// agent applies the spec. Further rounds change nothing.
    #[test]
    fn after_any_events_devices_in_use_are_kept_and_the_spec_is_applied_when_they_are_free(
        sequence in prop::collection::vec(random_event(), 1..120),
        last in prop::collection::vec(0..PLACEMENTS.len(), 0..5),
    ) {
        let mut node = TestNode::new("H100-80");
        node.set_spec(vec![]);
        for event in &sequence {
            node.apply_event(event);
        }
        let wanted = non_overlapping_placements(&last);
        node.set_spec(vec![mig_spec(GPU_UUID, &wanted)]);
        node.gpu.lock().failures.clear();
        node.gpu.lock().processes.clear();
        // Run rounds in which the running pods keep their allocations.
        node.run();
        node.allocated.clear();
        node.now += ALLOCATION_GRACE;
        node.run_until_applied();
        let expected: Vec<_> = wanted.iter().map(|&(profile, start, _)| (profile, start)).collect();
        prop_assert!(node.has_exactly_instances(&expected), "{:?} {:?}", node.step_results(), node.gpu.lock().instances());
        prop_assert!(node.is_applied(), "{:?}", node.step_results());
        node.gpu.lock().calls.clear();
        (0..10).for_each(|_| node.run_round());
        prop_assert!(node.gpu.lock().calls.is_empty());
        node.set_spec(vec![]);
        node.run_until_applied();
        prop_assert!(node.is_applied() && node.count_healthy_slices(WHOLE_GPU_RESOURCE) == 1, "{:?}", node.step_results());
    }
}
