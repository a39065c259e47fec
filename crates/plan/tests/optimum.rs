//! Tests the planner against an exact solver on small random clusters of A100s.
//!
//! The solver shares no code with the planner. The solver tries every set of pods on every node,
//! with the placements of NVIDIA's guide listed in this file.
#![allow(clippy::expect_used, reason = "helpers of tests")]

use std::collections::BTreeMap;

use cleave_plan::device::Mode;
use cleave_plan::snapshot::{Gpu, Node, Pod, SliceGroup};
use cleave_plan::{Plan, Policy, Quantity, Snapshot, check, plan};

/// Profiles of an A100 with 40 GB: name, memory slices and placements.
const PROFILES: [(&str, u32, &[u32]); 5] = [
    ("1g.5gb", 1, &[0, 1, 2, 3, 4, 5, 6]),
    ("2g.10gb", 2, &[0, 2, 4]),
    ("3g.20gb", 4, &[0, 4]),
    ("4g.20gb", 4, &[0]),
    ("7g.40gb", 8, &[0]),
];

/// Generates the same pseudo-random numbers in every run (`SplitMix64`).
struct RandomNumbers(u64);

impl RandomNumbers {
    fn number_below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u32::try_from((mixed ^ (mixed >> 31)) % u64::from(end)).expect("below a u32")
    }

    fn is_one_in(&mut self, chance: u32) -> bool {
        self.number_below(chance) == 0
    }

    fn choose<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.number_below(u32::try_from(all.len()).expect("few")) as usize]
    }
}

/// Variations of one series of random tests.
#[derive(Clone, Copy)]
struct CampaignSettings {
    priorities: u32,
    zones: bool,
    /// Whether pods request two or three slices.
    several: bool,
    /// Whether nodes have little CPU.
    scarce: bool,
}

fn slice_mask(size: u32, start: u32) -> u32 {
    ((1 << size) - 1) << start
}

fn random_gpu(numbers: &mut RandomNumbers, node: u32, index: u32) -> Gpu {
    let mut slices = Vec::new();
    let mut taken = 0;
    for _ in 0..numbers.number_below(6) {
        let (name, size, places) = numbers.choose(&PROFILES);
        let start = *numbers.choose(places);
        if taken & slice_mask(*size, start) == 0 {
            taken |= slice_mask(*size, start);
            slices.push(SliceGroup {
                placement: Some(start),
                resource: format!("nvidia.com/mig-{name}"),
                in_use: numbers.is_one_in(3),
                count: 1,
                profile: None,
                pod: None,
            });
        }
    }
    Gpu {
        uuid: format!("GPU-{node}-{index}"),
        index,
        model: "NVIDIA A100-SXM4-40GB".to_owned(),
        memory: Quantity::mebibytes(40_960),
        mode: Mode::Mig,
        slices,
        ..Gpu::default()
    }
}

fn random_snapshot(seed: u64, campaign: CampaignSettings) -> Snapshot {
    let mut numbers = RandomNumbers(seed);
    let nodes = (0..=numbers.number_below(4)).map(|node| {
        let gpus = 1 + numbers.number_below(2);
        Node {
            name: format!("n{node}"),
            labels: BTreeMap::from([("zone".to_owned(), (*numbers.choose(&["a", "b"])).to_owned())]),
            allocatable: BTreeMap::from([(
                "cpu".to_owned(),
                Quantity::whole(if campaign.scarce { 2 + u64::from(numbers.number_below(6)) } else { 64 }),
            )]),
            gpus: (0..gpus).map(|index| random_gpu(&mut numbers, node, index)).collect(),
            ..Node::default()
        }
    });
    let nodes = nodes.collect();
    let pods = (0..2 + numbers.number_below(11)).map(|pod| {
        let (name, _, _) = numbers.choose(&PROFILES);
        let count = if campaign.several && numbers.is_one_in(3) { 2 + numbers.number_below(2) } else { 1 };
        let mut requests = BTreeMap::from([
            (format!("nvidia.com/mig-{name}"), Quantity::whole(u64::from(count))),
            ("cpu".to_owned(), Quantity::whole(1 + u64::from(numbers.number_below(2)))),
        ]);
        if campaign.several && numbers.is_one_in(6) {
            let (other, _, _) = numbers.choose(&PROFILES);
            requests.insert(format!("nvidia.com/mig-{other}"), Quantity::whole(1));
        }
        let mut selector = BTreeMap::new();
        if campaign.zones && numbers.is_one_in(2) {
            selector.insert("zone".to_owned(), (*numbers.choose(&["a", "b"])).to_owned());
        }
        Pod {
            name: format!("p{pod}"),
            priority: i32::try_from(numbers.number_below(campaign.priorities)).expect("few") * 100,
            requests,
            node_selector: selector,
            ..Pod::default()
        }
    });
    Snapshot { nodes, pods: pods.collect() }
}

/// Returns whether these slices fit beside the slices in use, by trying every placement.
fn fit_together(taken: &mut [u32], wanted: &[usize]) -> bool {
    let Some((&profile, rest)) = wanted.split_first() else { return true };
    let (_, size, places) = PROFILES[profile];
    for gpu in 0..taken.len() {
        for &start in places {
            if taken[gpu] & slice_mask(size, start) == 0 {
                taken[gpu] |= slice_mask(size, start);
                let done = fit_together(taken, rest);
                taken[gpu] &= !slice_mask(size, start);
                if done {
                    return true;
                }
            }
        }
    }
    false
}

fn requested_profiles(pod: &Pod) -> Vec<usize> {
    let mut wanted = Vec::new();
    for (at, (name, _, _)) in PROFILES.iter().enumerate() {
        let count = pod.requests.get(&format!("nvidia.com/mig-{name}")).and_then(Quantity::count).unwrap_or(0);
        wanted.extend(std::iter::repeat_n(at, usize::try_from(count).expect("few")));
    }
    wanted
}

fn requested_cpu_millis(pod: &Pod) -> u64 {
    pod.requests["cpu"].milli().expect("a number")
}

/// Returns, for each set of pods, whether a node can run the set.
fn runnable_pod_sets(node: &Node, pods: &[Pod]) -> Vec<bool> {
    let in_use = |gpu: &Gpu| {
        let of = |slice: &SliceGroup| {
            let name = slice.resource.trim_start_matches("nvidia.com/mig-");
            let (_, size, _) = PROFILES.iter().find(|(known, _, _)| *known == name).expect("known");
            slice_mask(*size, slice.placement.expect("placed"))
        };
        gpu.slices.iter().filter(|slice| slice.in_use).map(of).fold(0, |mask, bits| mask | bits)
    };
    let mut taken: Vec<u32> = node.gpus.iter().map(in_use).collect();
    let free: u32 = taken.iter().map(|mask| 8 - mask.count_ones()).sum();
    let all_cpu = node.allocatable["cpu"].milli().expect("a number");
    let wanted_by: Vec<Vec<usize>> = pods.iter().map(requested_profiles).collect();
    let cpu_of: Vec<u64> = pods.iter().map(requested_cpu_millis).collect();
    let selects = |pod: &Pod| pod.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value));
    let may: Vec<bool> = pods.iter().map(selects).collect();
    let mut table = vec![false; 1 << pods.len()];
    table[0] = true;
    for set in 1..table.len() {
        let members = || (0..pods.len()).filter(|pod| set & (1 << pod) != 0);
        if !members().all(|pod| may[pod] && table[set & !(1 << pod)]) {
            continue;
        }
        let mut wanted: Vec<usize> = members().flat_map(|pod| wanted_by[pod].iter().copied()).collect();
        // Place large slices first, because they fail early.
        wanted.sort_unstable_by(|a, b| b.cmp(a));
        let total: u32 = wanted.iter().map(|&profile| PROFILES[profile].1).sum();
        table[set] = members().map(|pod| cpu_of[pod]).sum::<u64>() <= all_cpu
            && total <= free
            && fit_together(&mut taken, &wanted);
    }
    table
}

fn priorities_highest_first(snapshot: &Snapshot) -> Vec<i32> {
    let mut levels: Vec<i32> = snapshot.pods.iter().map(|pod| pod.priority).collect();
    levels.sort_unstable_by(|a, b| b.cmp(a));
    levels.dedup();
    levels
}

/// Returns the number of placed pods of each priority in the best placement, highest priority
/// first. Of two placements, the better one places more pods of the highest priority at which the
/// numbers of pods differ.
fn max_placed_by_priority(snapshot: &Snapshot) -> Vec<u32> {
    let sets = 1 << snapshot.pods.len();
    let mut reachable = vec![false; sets];
    reachable[0] = true;
    for node in &snapshot.nodes {
        let here = runnable_pod_sets(node, &snapshot.pods);
        let mut next = vec![false; sets];
        for set in 0..sets {
            let mut part = set;
            loop {
                if here[part] && reachable[set & !part] {
                    next[set] = true;
                    break;
                }
                if part == 0 {
                    break;
                }
                part = (part - 1) & set;
            }
        }
        reachable = next;
    }
    let pods_of = |level: &i32| {
        let pods = snapshot.pods.iter().enumerate().filter(|(_, pod)| pod.priority == *level);
        pods.fold(0_usize, |set, (pod, _)| set | (1 << pod))
    };
    let levels: Vec<usize> = priorities_highest_first(snapshot).iter().map(pods_of).collect();
    let counts = |set: usize| -> Vec<u32> { levels.iter().map(|level| (set & level).count_ones()).collect() };
    (0..sets).filter(|&set| reachable[set]).map(counts).max().expect("nothing is always possible")
}

fn placed_by_priority(snapshot: &Snapshot, plan: &Plan) -> Vec<u32> {
    let count_placed = |level: &i32| {
        let has_level = |name: &str| snapshot.pods.iter().any(|pod| pod.name == name && pod.priority == *level);
        u32::try_from(plan.placements.iter().filter(|placement| has_level(&placement.pod)).count()).expect("few")
    };
    priorities_highest_first(snapshot).iter().map(count_placed).collect()
}

fn run_campaign(name: &str, instances: u64, campaign: CampaignSettings) -> (u64, u64) {
    let (mut equal, mut top, mut ours, mut best) = (0, 0, 0, 0);
    for seed in 0..instances {
        let snapshot = random_snapshot(seed, campaign);
        let planned = plan(&snapshot, &Policy::default());
        assert_eq!(check(&snapshot, &planned.plan), [], "{name} {seed}");
        let (bound, optimum) = (placed_by_priority(&snapshot, &planned.plan), max_placed_by_priority(&snapshot));
        assert!(bound <= optimum, "{name} {seed}: {bound:?} beats the exact solver's {optimum:?}");
        equal += u64::from(bound == optimum);
        top += u64::from(bound[0] == optimum[0]);
        ours += bound.iter().sum::<u32>();
        best += optimum.iter().sum::<u32>();
    }
    println!(
        "{name}: {equal} of {instances} instances as the exact solver binds, {top} of {instances} in the top priority; {ours} of {best} pods"
    );
    (equal, top)
}

#[test]
fn small_clusters_are_planned_as_well_as_by_an_exact_solver() {
    let zones_and_priorities = CampaignSettings { priorities: 3, zones: true, several: false, scarce: false };
    let (equal, top) = run_campaign("mixed profiles, priorities and zones", 1000, zones_and_priorities);
    assert!(equal >= 990, "{equal} of 1000");
    assert_eq!(top, 1000, "a pod of the top priority that could run does not");
}

#[test]
fn varied_small_clusters_are_planned_as_well_as_by_an_exact_solver() {
    let plain = CampaignSettings { priorities: 1, zones: false, several: false, scarce: false };
    for (name, kind) in [
        ("equal priority", plain),
        ("two priorities", CampaignSettings { priorities: 2, ..plain }),
        ("zones", CampaignSettings { zones: true, ..plain }),
        (
            "several slices a pod, little CPU",
            CampaignSettings { priorities: 2, zones: true, several: true, scarce: true },
        ),
    ] {
        let (equal, top) = run_campaign(name, 250, kind);
        assert!(equal >= 248 && top == 250, "{name}: {equal} and {top} of 250");
    }
}
