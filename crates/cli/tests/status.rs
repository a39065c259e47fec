//! Tests `cleave status` on a cluster whose objects are in different states.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod golden;

use cleave_api::{GpuNode, GpuQuota, SharingPolicy};
use cleave_cli::status::render;
use cleave_cli::status::report::StatusReport;
use golden::assert_matches_file;
use kube::api::ObjectList;
use kube::core::DeserializeGuard;

fn read_report(only: Option<&str>) -> StatusReport {
    let nodes: ObjectList<DeserializeGuard<GpuNode>> =
        serde_saphyr::from_str(include_str!("status/gpunodes.yaml")).unwrap();
    let policies: ObjectList<DeserializeGuard<SharingPolicy>> =
        serde_saphyr::from_str(include_str!("status/sharingpolicies.yaml")).unwrap();
    StatusReport::new(nodes.items, policies.items, only)
}

#[test]
fn status_tables_match_the_committed_files() {
    assert_matches_file("status/table.txt", &render(&read_report(None), false));
    assert_matches_file("status/wide.txt", &render(&read_report(None), true));
}

#[test]
fn json_matches_the_committed_file() {
    assert_matches_file("status/report.json", &(serde_json::to_string_pretty(&read_report(None)).unwrap() + "\n"));
}

#[test]
fn one_node_is_shown_with_its_allocations_only() {
    let one = read_report(Some("node2"));
    assert_eq!(one.nodes.len(), 1);
    assert!(one.allocations.iter().all(|allocation| allocation.node == "node2"));
    assert!(read_report(Some("nowhere")).nodes.is_empty());
}

#[test]
fn an_empty_cluster_is_described_in_sentences() {
    let text = render(&StatusReport::new(Vec::new(), Vec::new(), None), false);
    assert_eq!(
        text,
        "No GpuNodes. The operator creates one for each node that runs an agent.\n\n\
         No SharingPolicies. Cleave divides no GPU.\n\nNo pod uses a GPU.\n"
    );
}

#[test]
fn quotas_are_shown_in_short_if_there_are_any() {
    let quotas: ObjectList<DeserializeGuard<GpuQuota>> =
        serde_saphyr::from_str(include_str!("quotas/gpuquotas.yaml")).unwrap();
    let report = read_report(Some("node1")).with_quotas(quotas.items);
    assert_matches_file("status/quotas.txt", &render(&report, false));
}
