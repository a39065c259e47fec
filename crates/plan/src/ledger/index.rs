//! Indexes nodes by the free units of their devices, so that the ledger can place a pod without
//! checking every node.
use std::collections::{BTreeMap, BTreeSet};

/// Nodes by the free units of their devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Index {
    /// Nodes by resource and number of free units on one device.
    nodes: BTreeMap<String, BTreeMap<u32, BTreeSet<String>>>,
    /// The entries of each node in `nodes`, as resource and free units.
    noted: BTreeMap<String, BTreeSet<(String, u32)>>,
}

impl Index {
    /// Replaces the entries of a node: for each device, the resource and its free units.
    pub(super) fn put<'a>(&mut self, node: &str, free: impl Iterator<Item = (&'a str, u32)>) {
        let free: BTreeSet<(String, u32)> =
            free.filter(|(_, units)| *units > 0).map(|(resource, units)| (resource.to_owned(), units)).collect();
        if self.noted.get(node) == Some(&free) {
            return;
        }
        self.remove(node);
        for (resource, units) in &free {
            let nodes = self.nodes.entry(resource.clone()).or_default().entry(*units).or_default();
            nodes.insert(node.to_owned());
        }
        if !free.is_empty() {
            self.noted.insert(node.to_owned(), free);
        }
    }

    /// Removes a node.
    pub(super) fn remove(&mut self, node: &str) {
        for (resource, units) in self.noted.remove(node).into_iter().flatten() {
            let Some(by_units) = self.nodes.get_mut(&resource) else { continue };
            if let Some(nodes) = by_units.get_mut(&units) {
                nodes.remove(node);
                if nodes.is_empty() {
                    by_units.remove(&units);
                }
            }
            if by_units.is_empty() {
                self.nodes.remove(&resource);
            }
        }
    }

    /// Nodes with a device that has at least this many free units, in ascending order of free
    /// units, then by name. A node with several such devices is returned several times.
    pub(super) fn at_least(&self, resource: &str, units: u32) -> impl Iterator<Item = &str> {
        let by_units = self.nodes.get(resource).into_iter();
        by_units.flat_map(move |by_units| by_units.range(units..)).flat_map(|(_, nodes)| nodes).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_least(index: &Index, units: u32) -> Vec<&str> {
        index.at_least("r", units).collect()
    }

    #[test]
    fn nodes_are_found_by_free_units_tightest_first() {
        let mut index = Index::default();
        index.put("b", [("r", 3), ("r", 3), ("r", 9), ("other", 4)].into_iter());
        index.put("a", [("r", 5), ("r", 0)].into_iter());
        index.put("c", [("r", 3)].into_iter());
        assert_eq!(at_least(&index, 2), ["b", "c", "a", "b"]);
        assert_eq!(at_least(&index, 4), ["a", "b"]);
        assert_eq!(at_least(&index, 10), [""; 0]);
        index.put("b", [("r", 5)].into_iter());
        assert_eq!(at_least(&index, 2), ["c", "a", "b"]);
        for node in ["a", "b", "c"] {
            index.remove(node);
        }
        assert_eq!(index, Index::default(), "nothing is left of nodes that are gone");
    }
}
