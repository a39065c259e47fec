//! Tests properties of every plan, on random snapshots with valid and invalid parts.
#![allow(clippy::expect_used, reason = "helpers of tests")]

use std::collections::BTreeMap;

use cleave_plan::device::Mode;
use cleave_plan::snapshot::{
    Gpu, MigSharing, Node, NodeSelectorTerm, Operator, Pod, Requirement, SliceGroup, Taint, Toleration,
};
use cleave_plan::{Plan, Policy, Quantity, Snapshot, check, plan};
use proptest::prelude::*;

/// Kinds of GPUs: model, memory in MiB and mode.
const GPU_KINDS: [(&str, u64, Mode); 8] = [
    ("NVIDIA A100-SXM4-40GB", 40_960, Mode::Mig),
    ("NVIDIA A30", 24_576, Mode::Mig),
    ("NVIDIA H100 80GB HBM3", 81_559, Mode::Auto),
    ("NVIDIA A100-SXM4-80GB", 81_920, Mode::Mps),
    ("Tesla T4", 15_360, Mode::TimeSlicing),
    ("Tesla T4", 15_360, Mode::Whole),
    ("NVIDIA Z9000", 96_000, Mode::Mig),
    ("NVIDIA A100-SXM4-40GB", 40_960, Mode::Unknown),
];

const RESOURCES: [&str; 22] = [
    "nvidia.com/gpu",
    "nvidia.com/gpu-mps",
    "nvidia.com/gpu-timeslice",
    "nvidia.com/gpu-5gb",
    "nvidia.com/gpu-10gb",
    "nvidia.com/gpu-20gb",
    "nvidia.com/gpu-40gb",
    "nvidia.com/mig-1g.5gb",
    "nvidia.com/mig-1g.5gb.me",
    "nvidia.com/mig-2g.10gb",
    "nvidia.com/mig-3g.20gb",
    "nvidia.com/mig-4g.20gb",
    "nvidia.com/mig-7g.40gb",
    "nvidia.com/mig-1g.6gb",
    "nvidia.com/mig-2g.12gb",
    "nvidia.com/mig-4g.24gb",
    "nvidia.com/mig-1g.10gb",
    "nvidia.com/mig-1g.20gb",
    "nvidia.com/mig-3g.40gb",
    "nvidia.com/mig-1g.5gb.shared",
    "nvidia.com/mig-2g.10gb.shared",
    "example.com/widget",
];

fn resource() -> impl Strategy<Value = String> {
    prop::sample::select(&RESOURCES[..]).prop_map(str::to_owned)
}

fn slice() -> impl Strategy<Value = SliceGroup> {
    let placement = prop_oneof![3 => prop::sample::select(vec![0, 1, 2, 4, 6]).prop_map(Some), 1 => Just(None)];
    (placement, resource(), any::<bool>(), 1..3_u32).prop_map(|(placement, resource, in_use, count)| SliceGroup {
        placement: placement.filter(|_| resource.contains("mig-")),
        count: if resource.contains("mig-") && !resource.ends_with("shared") { 1 } else { count },
        resource,
        in_use,
        profile: None,
        pod: None,
    })
}

/// Returns the slices that a GPU can have: the slices of a plan for these requests, some of them in
/// use.
fn possible_slices(gpu: &Gpu, requested: &[String], taken: &[bool]) -> Vec<SliceGroup> {
    let pods = requested.iter().enumerate().map(|(at, resource)| Pod {
        name: format!("p{at}"),
        requests: BTreeMap::from([(resource.clone(), Quantity::whole(1))]),
        ..Pod::default()
    });
    let node = Node { name: "n".to_owned(), gpus: vec![gpu.clone()], ..Node::default() };
    let planned = plan(&Snapshot { nodes: vec![node], pods: pods.collect() }, &Policy::default()).plan;
    let mut slices = planned.gpus.into_iter().next().map_or_else(Vec::new, |gpu| gpu.slices);
    for (slice, &taken) in slices.iter_mut().zip(taken.iter().cycle()) {
        slice.in_use = taken;
    }
    slices
}

fn gpu(with_invalid_parts: bool) -> impl Strategy<Value = Gpu> {
    let kinds = if with_invalid_parts { 0..8_usize } else { 0..6_usize };
    let requested = prop::collection::vec(resource(), 0..6);
    let taken = prop::collection::vec(any::<bool>(), 6);
    let wild = prop::collection::vec(slice(), 0..5);
    (kinds, requested, taken, wild, 0..8_u32, 0..8_u32).prop_map(move |(kind, requested, taken, wild, dice, other)| {
        let (model, memory, mode) = GPU_KINDS[kind];
        let mut gpu = Gpu {
            model: model.to_owned(),
            memory: Quantity::mebibytes(memory),
            mode,
            units: (dice < 4).then_some(4),
            replicas: Some(3),
            mig_sharing: (dice == 7).then_some(MigSharing { units: 3, resource_name: None }),
            fixed: other == 0,
            exclusion: (with_invalid_parts && other == 1).then(|| "the GPU is lost".to_owned()),
            ..Gpu::default()
        };
        gpu.slices = if with_invalid_parts && other < 4 {
            wild
        } else {
            possible_slices(&Gpu { fixed: false, exclusion: None, ..gpu.clone() }, &requested, &taken)
        };
        gpu
    })
}

fn node(with_invalid_parts: bool) -> impl Strategy<Value = Node> {
    let quantity = prop_oneof![8 => (1..20_u64).prop_map(Quantity::whole), u32::from(with_invalid_parts) => Just(Quantity::new("much"))];
    let zone = prop::sample::select(vec!["a", "b"]);
    (prop::collection::vec(gpu(with_invalid_parts), 0..3), quantity, zone, 0..10_u32).prop_map(
        move |(mut gpus, cpu, zone, dice)| {
            for (index, gpu) in gpus.iter_mut().enumerate() {
                gpu.index = u32::try_from(index).expect("few");
            }
            let taint = Taint { key: "gpu".to_owned(), value: String::new(), effect: "NoSchedule".to_owned() };
            Node {
                labels: BTreeMap::from([("zone".to_owned(), zone.to_owned())]),
                taints: if dice == 0 { vec![taint] } else { Vec::new() },
                unschedulable: dice == 1,
                allocatable: BTreeMap::from([
                    ("cpu".to_owned(), cpu),
                    ("example.com/widget".to_owned(), Quantity::whole(2)),
                    ("pods".to_owned(), Quantity::whole(8)),
                ]),
                gpus,
                exclusion: (with_invalid_parts && dice == 2).then(|| "the GPU does not answer".to_owned()),
                ..Node::default()
            }
        },
    )
}

fn pod(with_invalid_parts: bool) -> impl Strategy<Value = Pod> {
    let count = prop_oneof![6 => Just("1"), 2 => Just("2"), 1 => Just("3"), u32::from(with_invalid_parts) => Just("1.5"), u32::from(with_invalid_parts) => Just("99999999999")];
    let requests = prop::collection::btree_map(resource(), count.prop_map(Quantity::new), 0..3);
    (requests, 0..3_i32, 0..12_u32, 1..5_u64).prop_map(|(mut requests, priority, dice, cpu)| {
        requests.insert("cpu".to_owned(), Quantity::whole(cpu));
        let zone = |zone: &str| BTreeMap::from([("zone".to_owned(), zone.to_owned())]);
        let not_a = Requirement { key: "zone".to_owned(), operator: Operator::NotIn, values: vec!["a".to_owned()] };
        Pod {
            priority,
            requests,
            node_selector: match dice {
                0 => zone("a"),
                1 => zone("b"),
                _ => BTreeMap::new(),
            },
            affinity: if dice == 2 {
                vec![NodeSelectorTerm { match_expressions: vec![not_a], match_fields: Vec::new() }]
            } else {
                Vec::new()
            },
            tolerations: if dice == 3 {
                vec![Toleration { operator: "Exists".to_owned(), ..Toleration::default() }]
            } else {
                Vec::new()
            },
            ..Pod::default()
        }
    })
}

fn snapshot(with_invalid_parts: bool) -> impl Strategy<Value = Snapshot> {
    let twin = prop::bool::weighted(if with_invalid_parts { 0.1 } else { 0.0 });
    (prop::collection::vec(node(with_invalid_parts), 0..5), prop::collection::vec(pod(with_invalid_parts), 0..9), twin)
        .prop_map(|(mut nodes, mut pods, twin)| {
            for (at, node) in nodes.iter_mut().enumerate() {
                node.name = format!("n{}", if twin { 0 } else { at });
                for (index, gpu) in node.gpus.iter_mut().enumerate() {
                    gpu.uuid = format!("GPU-{at}-{}", if twin { 0 } else { index });
                }
            }
            for (at, pod) in pods.iter_mut().enumerate() {
                pod.name = format!("p{}", if twin && at == 2 { 1 } else { at });
            }
            Snapshot { nodes, pods }
        })
}

fn plan_of(snapshot: &Snapshot) -> Plan {
    plan(snapshot, &Policy { search_steps: 2000, ..Policy::default() }).plan
}

/// Returns the snapshot with the plan's slices, before any pod is placed.
fn apply_planned_slices(snapshot: &Snapshot, plan: &Plan) -> Snapshot {
    let mut next = snapshot.clone();
    for node in &mut next.nodes {
        for gpu in &mut node.gpus {
            if let Some(plan) = plan.gpus.iter().find(|one| one.uuid == gpu.uuid && one.node == node.name) {
                gpu.slices.clone_from(&plan.slices);
            }
        }
    }
    next
}

/// Returns the snapshot with the plan's slices and its pods.
fn apply_plan(snapshot: &Snapshot, plan: &Plan) -> Snapshot {
    let mut next = apply_planned_slices(snapshot, plan);
    for placement in &plan.placements {
        let pod = snapshot.pods.iter().find(|pod| pod.name == placement.pod).expect("a pod of the snapshot");
        let node = next.nodes.iter_mut().find(|node| node.name == placement.node).expect("a node of the snapshot");
        for (name, quantity) in pod.requests.iter().chain([(&"pods".to_owned(), &Quantity::whole(1))]) {
            let before = node.requested.get(name).and_then(Quantity::milli).unwrap_or(0);
            let milli = before + quantity.milli().expect("placed, so a number");
            node.requested.insert(name.clone(), Quantity::new(&format!("{milli}m")));
        }
        for take in &placement.takes {
            let gpu = node.gpus.iter_mut().find(|gpu| gpu.uuid == take.gpu).expect("a GPU of the node");
            let of_one_instance = |slices: &[SliceGroup], wanted: &SliceGroup| -> u32 {
                slices
                    .iter()
                    .filter(|one| !one.in_use && one.resource == wanted.resource && one.placement == wanted.placement)
                    .map(|one| one.count)
                    .sum()
            };
            // A share of a MIG instance is allocated from the instance with the fewest free shares
            // that suffice, as in an allocator.
            let shares = take.resource.ends_with("shared");
            let place = gpu
                .slices
                .iter()
                .filter(|one| !one.in_use && one.resource == take.resource)
                .filter(|one| !shares || of_one_instance(&gpu.slices, one) >= take.count)
                .min_by_key(|one| (of_one_instance(&gpu.slices, one), one.placement))
                .map(|one| one.placement);
            if take.resource == "nvidia.com/gpu" && gpu.slices.is_empty() {
                gpu.slices.push(SliceGroup {
                    placement: None,
                    resource: take.resource.clone(),
                    in_use: true,
                    count: 1,
                    profile: None,
                    pod: None,
                });
                continue;
            }
            let mut left = take.count;
            let mut split = Vec::new();
            for one in &mut gpu.slices {
                let here = !one.in_use && one.resource == take.resource && (!shares || Some(one.placement) == place);
                if left == 0 || !here {
                    continue;
                }
                let taken = one.count.min(left);
                left -= taken;
                if taken < one.count {
                    split.push(SliceGroup { count: one.count - taken, ..one.clone() });
                    one.count = taken;
                }
                one.in_use = true;
            }
            gpu.slices.extend(split);
            assert_eq!(left, 0, "{placement:?} takes what is not there");
        }
    }
    let placed = |pod: &Pod| plan.placements.iter().any(|placement| placement.pod == pod.name);
    next.pods.retain(|pod| !placed(pod));
    next
}

/// Returns a pending pod that could run on a node with free slices for it.
fn placeable_pending_pod(snapshot: &Snapshot, plan: &Plan) -> Option<String> {
    for waiting in &plan.unplaced {
        let pod = snapshot.pods.iter().find(|pod| pod.name == waiting.pod)?;
        // Check only pods without node constraints and with one kind of slice that is not a share,
        // on nodes with enough other resources.
        let of_gpus: Vec<_> = pod.requests.iter().filter(|(name, _)| name.starts_with("nvidia.com/")).collect();
        let [(resource, count)] = of_gpus.as_slice() else { continue };
        let plain = (resource.contains("mig-") && !resource.ends_with("shared")) || resource.ends_with("gb");
        let free_to_go = pod.node_selector.is_empty() && pod.affinity.is_empty();
        let Some(count) = count.count().filter(|_| plain && free_to_go && pod.requests.len() == 2) else { continue };
        for node in &snapshot.nodes {
            let used = |resource: &str| {
                let here = plan.placements.iter().filter(|placement| placement.node == node.name);
                let pods = here.filter_map(|placement| snapshot.pods.iter().find(|pod| pod.name == placement.pod));
                pods.filter_map(|pod| pod.requests.get(resource)?.milli()).sum::<u64>()
            };
            let cpu = node.allocatable["cpu"].milli()?.saturating_sub(used("cpu"));
            let room = plan.placements.iter().filter(|placement| placement.node == node.name).count() < 8;
            let open = node.taints.is_empty() && !node.unschedulable && node.exclusion.is_none();
            if !open || !room || cpu < pod.requests["cpu"].milli()? {
                continue;
            }
            let gpus = plan.gpus.iter().filter(|gpu| gpu.node == node.name);
            let free = gpus.flat_map(|gpu| &gpu.slices).filter(|slice| !slice.in_use && slice.resource == **resource);
            let free: u64 = free.map(|slice| u64::from(slice.count)).sum();
            let takes = plan
                .placements
                .iter()
                .filter(|placement| placement.node == node.name)
                .flat_map(|placement| &placement.takes);
            let taken: u64 = takes.filter(|take| take.resource == **resource).map(|take| u64::from(take.count)).sum();
            if free - taken >= count {
                return Some(format!("{} waits, and {} has {} {resource} free", pod.name, node.name, free - taken));
            }
        }
    }
    None
}

proptest! {
    #[test]
    fn every_plan_passes_the_check(snapshot in prop_oneof![snapshot(false), snapshot(true)]) {
        let plan = plan_of(&snapshot);
        prop_assert_eq!(check(&snapshot, &plan), vec![]);
    }

    #[test]
    fn planning_again_changes_nothing(snapshot in snapshot(false)) {
        let plan = plan_of(&snapshot);
        let next = apply_planned_slices(&snapshot, &plan);
        let again = plan_of(&next);
        prop_assert!(!again.changed, "{:#?}", again);
        prop_assert_eq!(again.placements.len(), plan.placements.len());
        let next = apply_plan(&snapshot, &plan);
        let again = plan_of(&next);
        prop_assert!(!again.changed, "{:#?}", again);
        prop_assert_eq!(again.placements, vec![]);
    }

    #[test]
    fn no_pod_is_pending_beside_a_free_slice(snapshot in snapshot(false)) {
        prop_assert_eq!(placeable_pending_pod(&snapshot, &plan_of(&snapshot)), None);
    }

    #[test]
    fn slices_in_use_are_kept(snapshot in prop_oneof![snapshot(false), snapshot(true)]) {
        let plan = plan_of(&snapshot);
        for node in &snapshot.nodes {
            for gpu in &node.gpus {
                let held = |slices: &[SliceGroup]| {
                    let mut held: Vec<SliceGroup> = slices.iter().filter(|slice| slice.in_use).cloned().collect();
                    held.sort();
                    held
                };
                let after = plan.gpus.iter().find(|one| one.uuid == gpu.uuid && one.node == node.name && held(&one.slices) == held(&gpu.slices));
                prop_assert!(after.is_some(), "{} of {}", gpu.uuid, node.name);
            }
        }
    }

    #[test]
    fn the_order_of_nodes_gpus_and_slices_does_not_matter(snapshot in prop_oneof![snapshot(false), snapshot(true)], turn in 0..5_usize) {
        let mut other = snapshot.clone();
        other.nodes.reverse();
        let middle = turn.min(other.nodes.len());
        other.nodes.rotate_left(middle);
        for node in &mut other.nodes {
            node.gpus.reverse();
            for gpu in &mut node.gpus {
                gpu.slices.reverse();
            }
        }
        prop_assert_eq!(plan(&snapshot, &Policy::default()), plan(&other, &Policy::default()));
    }

    #[test]
    fn an_invalid_node_affects_only_itself(snapshot in snapshot(false), strange in node(true)) {
        let before = plan_of(&snapshot);
        let mut other = snapshot;
        let gpus = strange.gpus.into_iter().enumerate().map(|(at, gpu)| Gpu { uuid: format!("GPU-odd-{at}"), ..gpu });
        other.nodes.insert(0, Node { name: "a-odd".to_owned(), exclusion: Some("the GPU does not answer".to_owned()), gpus: gpus.collect(), ..strange });
        let after = plan_of(&other);
        prop_assert_eq!(&before.placements, &after.placements);
        prop_assert!(after.gpus.iter().filter(|gpu| gpu.node == "a-odd").all(|gpu| !gpu.changed));
    }
}
