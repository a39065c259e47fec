//! Tests the choice of whole GPUs against an exact search that shares no code with it, on the
//! topologies of real machines.
#![allow(clippy::expect_used, reason = "helpers of tests")]

use cleave_plan::topology::{GpuLink, PciePath, Topology};
use sim_machine::cube_mesh_nvlinks;

type LinkFunction = fn(usize, usize) -> GpuLink;

/// Returns the path of two GPUs in a machine with pairs of GPUs at a PCIe switch and four GPUs at a
/// NUMA node.
fn pcie_path(one: usize, other: usize, same_node: PciePath) -> PciePath {
    match (one / 2 == other / 2, one / 4 == other / 4) {
        (true, _) => PciePath::OneSwitch,
        (false, true) => same_node,
        (false, false) => PciePath::AcrossNumaNodes,
    }
}

/// Returns the link between two GPUs of a DGX-1 with V100.
fn dgx_v100(one: usize, other: usize) -> GpuLink {
    let index = |gpu: usize| u32::try_from(gpu).expect("a small index");
    GpuLink {
        pcie: pcie_path(one, other, PciePath::SameHostBridge),
        nvlinks: cube_mesh_nvlinks(index(one), index(other)),
    }
}

/// Returns the link between two GPUs of a DGX A100: NVSwitches connect all GPUs.
fn dgx_a100(one: usize, other: usize) -> GpuLink {
    GpuLink { pcie: pcie_path(one, other, PciePath::SameNumaNode), nvlinks: 12 }
}

/// Returns the link between two GPUs of a machine with two sockets of four GPUs each, without
/// NVLink.
fn pcie_only(one: usize, other: usize) -> GpuLink {
    let same = one / 4 == other / 4;
    GpuLink { pcie: if same { PciePath::SameNumaNode } else { PciePath::AcrossNumaNodes }, nvlinks: 0 }
}

/// Returns the link between two GPUs of a machine with NVLink bridges between pairs of GPUs, as on
/// PCIe boards of the A100 and H100.
fn bridged_pairs(one: usize, other: usize) -> GpuLink {
    GpuLink { nvlinks: if one / 2 == other / 2 { 12 } else { 0 }, ..pcie_only(one, other) }
}

const MACHINES: [(&str, LinkFunction); 4] = [
    ("DGX-1 V100", dgx_v100),
    ("DGX A100", dgx_a100),
    ("two sockets with four GPUs", pcie_only),
    ("bridged pairs", bridged_pairs),
];

fn gpu_name(gpu: usize) -> String {
    format!("GPU-{gpu:02}")
}

fn topology(count: usize, link: LinkFunction) -> Topology {
    Topology::new((0..count).map(gpu_name).collect(), link)
}

/// Calls [`Topology::choose`] with indices of GPUs instead of names.
fn choose(topology: &Topology, available: &[usize], required: &[usize], size: usize) -> Vec<usize> {
    let names = |gpus: &[usize]| gpus.iter().map(|&gpu| gpu_name(gpu)).collect::<Vec<_>>();
    let (available, required) = (names(available), names(required));
    let available: Vec<&str> = available.iter().map(String::as_str).collect();
    let required: Vec<&str> = required.iter().map(String::as_str).collect();
    let number = |gpu: &str| gpu.trim_start_matches("GPU-").parse().expect("a number");
    topology.choose(&available, &required, size).into_iter().map(number).collect()
}

/// Returns the score of a set of GPUs, by the definition.
fn score(link: LinkFunction, gpus: &[usize]) -> u32 {
    let mut sum = 0;
    for &one in gpus {
        for &other in gpus {
            if one < other {
                let GpuLink { pcie, nvlinks } = link(one, other);
                let path = [
                    PciePath::Unknown,
                    PciePath::AcrossNumaNodes,
                    PciePath::SameNumaNode,
                    PciePath::SameHostBridge,
                    PciePath::SeveralSwitches,
                    PciePath::OneSwitch,
                    PciePath::SameBoard,
                ];
                let path = path.iter().position(|&known| known == pcie).expect("a known path");
                sum += u32::try_from(path).expect("few") * 10 + u32::from(nvlinks) * 100;
            }
        }
    }
    sum
}

/// Returns the available GPUs that are not in a set.
fn gpus_without(available: &[usize], set: &[usize]) -> Vec<usize> {
    available.iter().copied().filter(|gpu| !set.contains(gpu)).collect()
}

/// Tries all sets. Returns the best score of all sets, and the best score of the remaining GPUs if
/// a set with this score is chosen.
fn find_optimum(link: LinkFunction, available: &[usize], required: &[usize], size: usize) -> (u32, u32) {
    fn visit_sets(set: &mut Vec<usize>, next: &[usize], size: usize, found: &mut dyn FnMut(&[usize])) {
        if set.len() == size {
            return found(set);
        }
        for (at, &gpu) in next.iter().enumerate() {
            set.push(gpu);
            visit_sets(set, &next[at + 1..], size, found);
            set.pop();
        }
    }
    let mut best = (0, 0);
    visit_sets(&mut required.to_vec(), &gpus_without(available, required), size, &mut |set| {
        let own = score(link, set);
        if own >= best.0 {
            best = best.max((own, score(link, &gpus_without(available, set))));
        }
    });
    best
}

/// Checks one choice against the optimum.
fn check_choice(machine: (&str, LinkFunction), available: &[usize], required: &[usize], size: usize) {
    let (title, link) = machine;
    let chosen = choose(&topology(8, link), available, required, size);
    let what = format!("{title}: {size} of {available:?} with {required:?}: {chosen:?}");
    assert_eq!(chosen.len(), size, "{what}");
    assert!(required.iter().all(|gpu| chosen.contains(gpu)), "{what}");
    assert!(chosen.iter().all(|gpu| available.contains(gpu)), "{what}");
    let rest = score(link, &gpus_without(available, &chosen));
    assert_eq!((score(link, &chosen), rest), find_optimum(link, available, required, size), "{what}");
}

fn members_of_set(set: u32) -> Vec<usize> {
    (0..32).filter(|bit| set >> bit & 1 == 1).collect()
}

#[test]
fn every_choice_among_eight_gpus_is_optimal() {
    for machine in MACHINES {
        for free in 0..256 {
            let available = members_of_set(free);
            for size in 1..=available.len() {
                check_choice(machine, &available, &[], size);
            }
        }
    }
}

#[test]
fn a_choice_with_required_gpus_is_optimal() {
    for machine in MACHINES {
        for free in (0..256).step_by(3) {
            let available = members_of_set(free);
            for (at, &one) in available.iter().enumerate() {
                for size in 1..=available.len() {
                    check_choice(machine, &available, &[one], size);
                }
                for &other in &available[at + 1..] {
                    for size in 2..=available.len() {
                        check_choice(machine, &available, &[one, other], size);
                    }
                }
            }
        }
    }
}

/// The examples of NVIDIA's go-gpuallocator (`besteffort_test.go`) on a DGX-1 with V100.
#[test]
fn nvidias_examples_have_the_same_answers_except_one() {
    let dgx = topology(8, dgx_v100);
    let all = members_of_set(0xff);
    for (available, required, size, expected) in [
        (&[0, 4, 5, 6][..], &[][..], 2, &[5, 6][..]),
        (&[0, 3, 1], &[], 2, &[0, 3]),
        (&[0, 1, 4], &[], 2, &[0, 4]),
        (&all, &[4], 1, &[4]),
        (&all, &[4], 2, &[4, 7]),
        (&all, &[4], 4, &[4, 5, 6, 7]),
        (&all, &[0, 2, 4, 6], 4, &[0, 2, 4, 6]),
        (&all, &[], 4, &[0, 1, 2, 3]),
        (&[4, 5, 6, 7], &[], 4, &[4, 5, 6, 7]),
        (&all, &[], 8, &all),
    ] {
        assert_eq!(choose(&dgx, available, required, size), expected, "{size} of {available:?} with {required:?}");
    }
    // NVIDIA's answer is [4, 5] with one NVLink, so that [0, 2] stays free for another pod.
    assert_eq!(choose(&dgx, &[0, 2, 4, 5], &[], 2), [0, 4], "the pair with two NVLinks");
    // Four pods request two GPUs each. NVIDIA's choices each score 230, so the sum is the same.
    let mut free = all;
    let scores = [(); 4].map(|()| {
        let pair = choose(&dgx, &free, &[], 2);
        free = gpus_without(&free, &pair);
        score(dgx_v100, &pair)
    });
    assert_eq!(scores, [250, 250, 210, 210]);
}

#[test]
fn complete_groups_stay_free_for_larger_requests() {
    let sockets = topology(8, pcie_only);
    assert_eq!(choose(&sockets, &[0, 1, 2, 3, 5, 6, 7], &[], 2), [5, 6], "not from the complete socket");
    assert_eq!(choose(&sockets, &[0, 1, 2, 3, 5], &[], 1), [5]);
    let pairs = topology(8, bridged_pairs);
    assert_eq!(choose(&pairs, &[0, 1, 2, 3, 5], &[], 1), [5], "not half of a bridged pair");
    assert_eq!(choose(&pairs, &[0, 1, 2, 4, 5], &[], 3), [0, 1, 2]);
}

#[test]
fn unhealthy_and_unknown_gpus_do_not_affect_the_choice_of_other_gpus() {
    // GPU 3 is unhealthy, so the kubelet does not list it as available, and its pair has only one
    // GPU.
    let pairs = topology(8, bridged_pairs);
    assert_eq!(choose(&pairs, &[0, 1, 2, 4, 5, 6, 7], &[], 1), [2]);
    // GPUs 8 and 9 are not in the topology. Sets with these GPUs are chosen only if no other set is
    // large enough.
    assert_eq!(choose(&pairs, &[9, 8, 1, 0], &[], 2), [0, 1]);
    assert_eq!(choose(&pairs, &[9, 8, 1, 0], &[], 3), [0, 1, 8]);
    assert_eq!(choose(&pairs, &[9, 1, 8], &[9], 2), [1, 9], "no links: the first GPU");
    assert_eq!(choose(&pairs, &[9, 1, 8], &[], 5), [1, 8, 9], "fewer than requested");
    assert!(choose(&pairs, &[], &[], 2).is_empty() && choose(&pairs, &[1, 2], &[], 0).is_empty());
    assert_eq!(choose(&Topology::default(), &[2, 1, 3], &[], 2), [1, 2], "without a topology");
}

/// Returns the link between two of sixteen GPUs in groups of four. Two groups share a NUMA node.
/// The first two GPUs of a group have a bridge to the first two GPUs of the next group.
fn link_in_groups_of_four(one: usize, other: usize) -> GpuLink {
    let (low, high) = (one.min(other), one.max(other));
    let pcie = match (low / 4 == high / 4, low / 8 == high / 8) {
        (true, _) => PciePath::SeveralSwitches,
        (false, true) => PciePath::SameNumaNode,
        (false, false) => PciePath::AcrossNumaNodes,
    };
    let bridged = low / 4 % 2 == 0 && high == low + 4 && low % 4 < 2;
    GpuLink { pcie, nvlinks: if bridged { 4 } else { 0 } }
}

/// Returns the link between two of sixteen GPUs in two cube meshes.
fn two_cube_meshes(one: usize, other: usize) -> GpuLink {
    if one / 8 == other / 8 {
        dgx_v100(one % 8, other % 8)
    } else {
        GpuLink { pcie: PciePath::AcrossNumaNodes, nvlinks: 0 }
    }
}

#[test]
fn every_choice_among_sixteen_gpus_is_optimal() {
    let mut bits = 0x9e37_79b9_u32;
    for link in [link_in_groups_of_four as LinkFunction, two_cube_meshes, dgx_a100] {
        let topology = topology(16, link);
        for round in 0..40 {
            bits = bits.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
            // In the first sixteen rounds, all sixteen GPUs are available. The other rounds have
            // random sets of available GPUs.
            let available = members_of_set(if round < 16 { 0xffff } else { (bits >> 8 | bits >> 20) & 0xffff });
            let size = 1 + round % 16;
            if size > available.len() {
                continue;
            }
            let required: Vec<usize> = available.iter().copied().take(usize::from(round % 5 == 4)).collect();
            let chosen = choose(&topology, &available, &required, size);
            let rest = score(link, &gpus_without(&available, &chosen));
            let best = find_optimum(link, &available, &required, size);
            assert_eq!((score(link, &chosen), rest), best, "{size} of {available:?} with {required:?}: {chosen:?}");
            assert!(chosen.len() == size && required.iter().all(|gpu| chosen.contains(gpu)), "{chosen:?}");
        }
    }
}

#[test]
fn a_choice_among_more_gpus_uses_one_group_if_possible() {
    let topology = topology(24, link_in_groups_of_four);
    let all: Vec<usize> = (0..24).collect();
    assert_eq!(choose(&topology, &all, &[], 4), [0, 1, 4, 5], "two bridges");
    assert_eq!(choose(&topology, &all[2..], &[22], 2), [20, 22]);
    assert_eq!(choose(&topology, &all, &[3, 9], 2), [3, 9], "required");
    assert_eq!(choose(&topology, &all, &[], 24), all);
}

#[test]
fn unknown_links_keep_their_earlier_score_and_known_links_replace_it() {
    let nvlinks = |nvlinks: u8| move |_: usize, _: usize| GpuLink { nvlinks, ..GpuLink::default() };
    let names = |names: &str| names.split(' ').map(String::from).collect::<Vec<_>>();
    let pair_scores = |topology: &Topology| {
        ["A B", "A C", "B C", "A D"].map(|pair| topology.score(&pair.split(' ').collect::<Vec<_>>()))
    };
    let before = Topology::new(names("A B C"), nvlinks(3));
    assert!(before.has_all_links());
    // GPU C is not listed, D is new, and the link between A and B is unknown.
    let read = Topology::with_unknown_links(names("B A D"), nvlinks(1), |one, other| one + other != 1);
    assert!(!read.has_all_links());
    let both = read.with_earlier_links(&before);
    assert_eq!(both.gpus(), names("A B C D"));
    assert_eq!(pair_scores(&both), [300, 300, 300, 100]);
    assert!(!both.has_all_links(), "nobody knows the link between C and D");
    let again = Topology::new(names("A B"), nvlinks(2)).with_earlier_links(&both);
    assert_eq!(pair_scores(&again), [200, 300, 300, 100], "the newer link of A and B");
    assert_eq!(read.with_earlier_links(&Topology::default()), read, "nothing is known yet");
}
