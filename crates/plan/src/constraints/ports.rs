//! Ports of the node that pods take.
use std::collections::BTreeMap;

use serde::Deserialize;

use super::{MOST_REQUIREMENTS, Neighbour};

/// A port of the node that a container takes. Two pods whose ports conflict cannot run on one node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HostPort {
    /// The node's address that the port is bound to. An empty text is `0.0.0.0`, every address.
    pub ip: String,
    /// `TCP`, `UDP` or `SCTP`. An empty text is `TCP`.
    pub protocol: String,
    /// The port. 0 is none and conflicts with nothing.
    pub port: u16,
}

/// Every address of a node. IPv6's `::` has no such meaning for kube-scheduler.
const EVERY_ADDRESS: &str = "0.0.0.0";

impl HostPort {
    /// Whether both are bound to one address. Ports conflict if their [sockets](Self::socket) are
    /// equal, too.
    fn shares_address_with(&self, other: &Self) -> bool {
        let every = self.address() == EVERY_ADDRESS || other.address() == EVERY_ADDRESS;
        every || self.address() == other.address()
    }

    fn address(&self) -> &str {
        if self.ip.is_empty() { EVERY_ADDRESS } else { &self.ip }
    }

    /// Protocol and port.
    fn socket(&self) -> (&str, u16) {
        (if self.protocol.is_empty() { "TCP" } else { &self.protocol }, self.port)
    }
}

/// Nodes on which a port of the subject is taken.
#[derive(Debug, Default)]
pub(super) struct Taken<'a> {
    wanted: BTreeMap<(&'a str, u16), Vec<&'a HostPort>>,
    nodes: BTreeMap<&'a str, u16>,
}

impl<'a> Taken<'a> {
    pub(super) fn new(ports: &'a [HostPort]) -> Self {
        let mut wanted: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for port in ports.iter().filter(|port| port.port != 0) {
            wanted.entry(port.socket()).or_default().push(port);
        }
        Self { wanted, nodes: BTreeMap::new() }
    }

    pub(super) fn count(&mut self, neighbour: &Neighbour<'a>) {
        if self.wanted.is_empty() {
            return;
        }
        for port in neighbour.rules.ports.iter().take(MOST_REQUIREMENTS) {
            let wanted = self.wanted.get(&port.socket());
            if wanted.into_iter().flatten().any(|one| one.shares_address_with(port)) {
                self.nodes.insert(neighbour.node, port.port);
            }
        }
    }

    /// A port of the subject that is taken on a node.
    pub(super) fn on(&self, node: &str) -> Option<u16> {
        self.nodes.get(node).copied()
    }
}
