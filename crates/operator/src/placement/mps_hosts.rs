//! Describes each node's MPS host, so that `crate::rollout` can decide which MPS hosts to replace.
use std::collections::BTreeMap;

use cleave_plan::ledger::Ledger;

use super::cluster::Cluster;
use super::nodes::Nodes;
use crate::rollout::{self, MpsHostView, MpsHosts};

/// Returns the nodes that have, or should have, an MPS host.
pub(super) fn host_views(
    cluster: &Cluster,
    hosts: &MpsHosts,
    nodes: &Nodes,
    ledger: &Ledger,
) -> BTreeMap<String, MpsHostView> {
    let newest = rollout::NewestRevisions::of(hosts.revisions.iter().map(AsRef::as_ref));
    let mut agents: BTreeMap<&str, bool> = BTreeMap::new();
    for pod in &cluster.agents {
        if let Some(node) = pod.spec.node_name.as_deref() {
            *agents.entry(node).or_default() |= newest.is_outdated_pod(pod);
        }
    }
    let mut hosts = rollout::mps_hosts_by_node(hosts, &newest);
    let outdated = hosts.values().any(|host| host.outdated);
    let serves =
        |node: &str, resource: &str| nodes.0.get(node).is_some_and(|state| state.mps.may_be_mps_resource(resource));
    let mut pending = if outdated { rollout::pending_users(ledger, serves) } else { BTreeMap::new() };
    let mut views = BTreeMap::new();
    for (name, state) in nodes.0.iter().filter(|(_, state)| state.managed) {
        let host = hosts.remove(name.as_str());
        let agent = agents.get(name.as_str());
        if host.is_some() || agent.is_some() {
            let user = state.mps.user.clone().or_else(|| pending.remove(name.as_str()));
            // The newest agent also supports MPS hosts of the older revision. An older agent may
            // not support the newest MPS host.
            let agent_first = || (agent == Some(&true)).then(|| "the agent is upgraded first".to_owned());
            let busy = user.or_else(agent_first);
            let excused = rollout::may_be_down(&state.node);
            views.insert(
                name.clone(),
                MpsHostView { host, daemon_problem: state.mps.daemon_problem.clone(), busy, excused },
            );
        }
    }
    views
}
