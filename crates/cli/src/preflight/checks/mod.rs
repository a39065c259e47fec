//! The checks of preflight. Pure: the checks turn facts about a cluster into a report.
mod cluster;
mod namespace;
mod nodes;
mod rivals;
mod view;
mod webhooks;

use serde_json::json;

use super::facts::{Facts, Target};
use super::report::Report;
use view::View;

#[cfg(test)]
pub(super) use cluster::{NEWEST_TESTED, OLDEST_SUPPORTED, SYSTEM_PRIORITY_CLASSES};
#[cfg(test)]
pub(super) use nodes::OPERATOR_TOLERATIONS;
#[cfg(test)]
pub(super) use view::{GPU_LABELS, TALOS_GPU_LABELS};

/// Runs all checks on the facts about a cluster.
pub(super) fn check(facts: &Facts, target: &Target) -> Report {
    let view = View::new(facts, target);
    let mut report = Report {
        kubernetes: facts.server.as_ref().ok().map(|server| server.text().to_owned()),
        platforms: view.platforms.iter().map(|platform| platform.name().to_owned()).collect(),
        gpu_nodes: view.gpu_nodes.len(),
        nodes: facts.nodes.as_ref().map_or(0, Vec::len),
        namespace: target.namespace.clone(),
        ..Report::default()
    };
    cluster::check(&view, &mut report);
    nodes::check(&view, &mut report);
    rivals::check(&view, &mut report);
    namespace::check(&view, &mut report);
    webhooks::check(&view, &mut report);
    if !target.node_selector.is_empty() {
        report.set_chart_value("nodes.nodeSelector", json!(target.node_selector));
    }
    report.findings.sort_by_key(|finding| finding.level);
    report
}
