//! Tracks the host ports that pods use.
use std::collections::BTreeMap;

use super::pods::PlacedPod;
use super::rules::HostPort;
use super::selector::MAX_REQUIREMENTS;

/// Nodes on which another pod uses a port of the subject.
#[derive(Debug, Default)]
pub(super) struct PortConflicts<'a> {
    wanted: BTreeMap<(&'a str, u16), Vec<&'a HostPort>>,
    nodes: BTreeMap<&'a str, u16>,
}

impl<'a> PortConflicts<'a> {
    pub(super) fn new(ports: &'a [HostPort]) -> Self {
        let mut wanted: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for port in ports.iter().filter(|port| port.port != 0) {
            wanted.entry(port.socket()).or_default().push(port);
        }
        Self { wanted, nodes: BTreeMap::new() }
    }

    pub(super) fn count_pod(&mut self, placed: &PlacedPod<'a>) {
        if self.wanted.is_empty() {
            return;
        }
        for port in placed.rules.ports.iter().take(MAX_REQUIREMENTS) {
            let wanted = self.wanted.get(&port.socket());
            if wanted.into_iter().flatten().any(|one| one.shares_address_with(port)) {
                self.nodes.insert(placed.node, port.port);
            }
        }
    }

    /// Returns a port of the subject that another pod uses on the node. Returns `None` if no ports
    /// conflict.
    pub(super) fn conflict_on(&self, node: &str) -> Option<u16> {
        self.nodes.get(node).copied()
    }
}
