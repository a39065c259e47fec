//! Finds cycles of uses among the files of a crate.
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::model::Finding;
use crate::modules::ModuleTree;
use crate::uses::Uses;

/// Finds cycles of uses in a crate. Each use that is part of a cycle is in at least one of the
/// returned cycles.
pub fn find_cycles(name: &str, tree: &ModuleTree, uses: &Uses) -> Vec<Finding> {
    let finding = |cycle: &Vec<usize>| {
        let steps = || cycle.iter().zip(cycle.iter().cycle().skip(1));
        let modules: Vec<&str> =
            cycle.iter().chain(cycle.first()).map(|file| tree.files[*file].module.as_str()).collect();
        let place = |(from, to): (&usize, &usize)| {
            let line = uses.get(&(*from, *to)).copied().unwrap_or_default();
            format!("{}:{line} uses {}", tree.files[*from].path, tree.files[*to].module)
        };
        Finding {
            description: format!("cycle {name} {}", modules.join(" -> ")),
            locations: steps().map(place).collect(),
        }
    };
    let mut found: Vec<Finding> = shortest_cycles(uses).iter().map(finding).collect();
    found.sort_by(|a, b| a.description.cmp(&b.description));
    found
}

/// Returns the shortest cycle through every use that is part of a cycle. Each cycle starts at the
/// file with the lowest index, and is returned only once. A use is part of a cycle if both of its
/// files are in the same strongly connected component.
fn shortest_cycles(uses: &Uses) -> BTreeSet<Vec<usize>> {
    let mut graph: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for &(from, to) in uses.keys() {
        graph.entry(from).or_default().push(to);
    }
    uses.keys().filter_map(|&(from, to)| shortest_path(&graph, to, from)).map(rotate_to_lowest).collect()
}

/// Returns the shortest path between two nodes, including these two nodes.
fn shortest_path(graph: &BTreeMap<usize, Vec<usize>>, from: usize, to: usize) -> Option<Vec<usize>> {
    let mut came_from = BTreeMap::from([(from, from)]);
    let mut queue = VecDeque::from([from]);
    while let Some(node) = queue.pop_front() {
        if node == to {
            let mut path = vec![to];
            while let Some(&last) = path.last().filter(|last| **last != from) {
                path.push(*came_from.get(&last)?);
            }
            path.reverse();
            return Some(path);
        }
        for &next in graph.get(&node).into_iter().flatten() {
            came_from.entry(next).or_insert_with(|| {
                queue.push_back(next);
                node
            });
        }
    }
    None
}

fn rotate_to_lowest(mut cycle: Vec<usize>) -> Vec<usize> {
    let lowest = cycle.iter().enumerate().min_by_key(|(_, node)| **node).map_or(0, |(at, _)| at);
    cycle.rotate_left(lowest);
    cycle
}
