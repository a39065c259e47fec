//! Tests `cleave quotas` and `cleave quotas import`.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod golden;

use cleave_api::GpuQuota;
use cleave_api::gpuquota::QuotaMode;
use cleave_cli::quotas::import::{Import, ImportMode, import, render_report, render_yaml};
use cleave_cli::quotas::report::QuotasReport;
use cleave_cli::quotas::{render, render_one};
use golden::assert_matches_file;
use kube::CustomResourceExt as _;
use kube::api::ObjectList;
use kube::core::DeserializeGuard;
use kube_cel::{Validator, apply_defaults};
use serde_json::Value;

const NOS: &str = include_str!("quotas/nos.yaml");
const KUEUE: &str = include_str!("quotas/kueue.yaml");

fn read_report() -> QuotasReport {
    let quotas: ObjectList<DeserializeGuard<GpuQuota>> =
        serde_saphyr::from_str(include_str!("quotas/gpuquotas.yaml")).unwrap();
    QuotasReport::new(quotas.items)
}

#[test]
fn quotas_match_the_committed_files() {
    let report = read_report();
    assert_matches_file("quotas/table.txt", &render(&report, false));
    assert_matches_file("quotas/wide.txt", &render(&report, true));
    assert_matches_file("quotas/report.json", &(serde_json::to_string_pretty(&report).unwrap() + "\n"));
    for name in ["team-a", "team-b", "memory", "new", "broken"] {
        let quota = report.quotas.iter().find(|quota| quota.name == name).unwrap();
        assert_matches_file(&format!("quotas/{name}.txt"), &render_one(quota));
    }
}

#[test]
fn a_cluster_without_quotas_is_described_in_a_sentence() {
    let text = render(&QuotasReport::new(Vec::new()), false);
    assert_eq!(text, "No GpuQuotas. No namespace has a guarantee or a maximum.\n");
}

/// Returns the errors of the CRD's rules for the quotas of an import.
fn refusals(import: &Import) -> Vec<String> {
    let crd = serde_json::to_value(GpuQuota::crd()).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let documents: Vec<Value> = serde_saphyr::from_multiple(&render_yaml(import).unwrap()).unwrap();
    assert_eq!(documents.len(), import.quotas.len());
    let refusals = documents.iter().filter_map(|document| {
        let object = apply_defaults(schema, document);
        let errors = Validator::new().validate(schema, &object, None).err()?;
        Some(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    });
    refusals.collect()
}

#[test]
fn imported_quotas_match_the_committed_files_and_satisfy_the_rules_of_the_crd() {
    for (name, text, count) in [("nos", NOS, 6), ("kueue", KUEUE, 5)] {
        let imported = import(text, None).unwrap();
        let text = render_report(&imported) + "\n" + &render_yaml(&imported).unwrap();
        assert_matches_file(&format!("quotas/{name}.txt"), &text);
        assert_eq!(imported.quotas.len(), count, "{name}");
        assert_eq!(refusals(&imported), Vec::<String>::new(), "{name}");
        let documents: Vec<GpuQuota> = serde_saphyr::from_multiple(&render_yaml(&imported).unwrap()).unwrap();
        assert_eq!(documents, imported.quotas.into_iter().map(|one| one.quota).collect::<Vec<_>>(), "{name}");
    }
}

fn spec(imported: &Import, name: &str) -> cleave_api::GpuQuotaSpec {
    let found = imported.quotas.iter().find(|one| one.quota.metadata.name.as_deref() == Some(name));
    found.unwrap().quota.spec.clone()
}

fn refusal(imported: &Import, origin: &str) -> String {
    imported.refused.iter().find(|one| one.origin == origin).unwrap().reason.clone()
}

#[test]
fn quotas_of_nos_keep_guarantees_limits_and_proportions() {
    let imported = import(NOS, None).unwrap();
    let (a, b, c) =
        (spec(&imported, "elastic-quota-a"), spec(&imported, "elastic-quota-b"), spec(&imported, "elastic-quota-c"));
    assert_eq!([a.min, b.min, c.min], ["40Gi", "10Gi", "30Gi"].map(|min| Some(min.to_owned())));
    assert_eq!((a.weight, c.weight), (4 * b.weight, 3 * b.weight), "Nos shares in proportion to min");
    let research = spec(&imported, "research");
    assert_eq!((research.max.as_deref(), research.mode), (Some("160Gi"), QuotaMode::Enforce));
    assert_eq!(research.namespaces.unwrap(), ["speech", "vision"]);
    assert_eq!(spec(&imported, "slices").min.as_deref(), Some("25Gi"));
    let mode =
        |mode| import(NOS, Some(mode)).unwrap().quotas.into_iter().all(|one| one.quota.spec.mode == QuotaMode::Count);
    assert!(mode(ImportMode::Count) && !mode(ImportMode::Enforce));
}

#[test]
fn a_composite_that_overlaps_another_quota_is_refused_and_deletes_nothing() {
    let imported = import(NOS, None).unwrap();
    let reason = refusal(&imported, "CompositeElasticQuota default/overlap");
    assert!(reason.contains("namespace a has ElasticQuota a/elastic-quota-a, which Nos would delete"), "{reason}");
    assert_eq!(spec(&imported, "elastic-quota-a").namespaces.unwrap(), ["a"]);
}

#[test]
fn queues_of_kueue_borrow_and_lend_as_before() {
    let imported = import(KUEUE, None).unwrap();
    let (a, b) = (spec(&imported, "team-a-cq"), spec(&imported, "team-b-cq"));
    assert_eq!((a.min.as_deref(), a.max.as_deref(), a.lend.as_deref()), (Some("9"), Some("10"), None));
    assert_eq!((b.min.as_deref(), b.max.as_deref(), b.lend.as_deref()), (Some("12"), None, Some("4")));
    assert_eq!((a.weight, b.weight), (3, 4));
    assert_eq!(a.namespaces.unwrap(), ["team-a", "team-a-dev"]);
    let alone = spec(&imported, "alone");
    assert_eq!((alone.max.as_deref(), alone.lend.as_deref()), (Some("3"), Some("0")), "no cohort: no borrowing");
    let (h100, a100) = (spec(&imported, "research-h100"), spec(&imported, "research-a100"));
    assert_eq!((h100.min.as_deref(), h100.max.as_deref()), (Some("12"), Some("20")));
    assert_eq!((a100.min.as_deref(), a100.gpus.unwrap().models), (Some("2.5"), vec!["A100".to_owned()]));
    assert!(imported.quotas.iter().all(|one| one.quota.spec.mode == QuotaMode::Count), "Kueue still admits");
    let reason = refusal(&imported, "ClusterQueue twice");
    assert!(reason.contains("namespace team-b is in ClusterQueue team-b-cq too"), "{reason}");
}

#[test]
fn malformed_input_is_an_error_that_names_the_cause() {
    for (text, part) in [
        ("a: [", "not valid YAML"),
        ("metadata: {}", "document 1: an object in the input has no kind"),
        ("kind: ConfigMap\n---\nitems: [{spec: 1}]", "document 2: an object in the input has no kind"),
        ("- 1", "no kind"),
        ("", "no ElasticQuota or CompositeElasticQuota of Nos, and no ClusterQueue of Kueue"),
        ("kind: ConfigMap", "no ElasticQuota or CompositeElasticQuota of Nos"),
        (
            "kind: ElasticQuota\napiVersion: scheduling.x-k8s.io/v1alpha1",
            "not imported: ElasticQuota of scheduling.x-k8s.io",
        ),
    ] {
        let error = format!("{:#}", import(text, None).unwrap_err());
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}

#[test]
fn a_bad_quota_is_refused_by_name_and_the_others_are_imported() {
    let good = "---\nkind: ElasticQuota\napiVersion: nos.nebuly.com/v1alpha1\nmetadata: {name: good, namespace: good}\n\
                spec: {min: {nvidia.com/gpu: 1}}\n";
    for (spec, part) in [
        ("{min: {nvidia.com/gpu: -1}}", "min nvidia.com/gpu \"-1\" is not an amount"),
        ("{min: {nvidia.com/gpu: lots}}", "\"lots\" is not an amount"),
        ("{min: {nvidia.com/gpu: 4GB}}", "has an unknown unit"),
        ("{min: {nvidia.com/gpu: 2000000}}", "is too large: the maximum is 1000000 GPUs"),
        ("{min: {nvidia.com/gpu: 99999999999999999999999999}}", "nvidia.com/gpu"),
        ("{min: {nvidia.com/gpu: 1u}}", "too precise"),
        ("{min: {nvidia.com/gpu: 4}, max: {nvidia.com/gpu: 2}}", "min exceeds max"),
        ("{min: {nos.nebuly.com/gpu-memory: 40Gi}}", "is not a whole number of GB"),
        ("{min: {nos.nebuly.com/gpu-memory: 40}}", "All quotas of a pool must count the same resource"),
        ("{min: [1]}", "spec.min is malformed: invalid type: sequence, expected a map"),
        ("{max: {nvidia.com/gpu: 1}, namespaces: [a, {}]}", "spec.namespaces[1] is malformed"),
        ("7", "spec is malformed"),
    ] {
        let bad = format!(
            "kind: ElasticQuota\napiVersion: nos.nebuly.com/v1alpha1\nmetadata: {{name: bad, namespace: bad}}\nspec: {spec}\n"
        );
        let imported = import(&format!("{good}---\n{bad}"), None).unwrap();
        let reason = refusal(&imported, "ElasticQuota bad/bad");
        assert!(reason.contains(part), "{part:?} is not in {reason:?}");
        assert_eq!(imported.quotas.len(), 1, "{spec}");
    }
}

#[test]
fn names_of_the_input_can_neither_end_a_comment_nor_become_invalid_names() {
    let text = |name: &str, namespace: &str| {
        format!(
            "kind: ElasticQuota\napiVersion: nos.nebuly.com/v1alpha1\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
             spec: {{min: {{nvidia.com/gpu: 1, \"x\\nkind: Secret\": 1}}}}\n"
        )
    };
    let imported = import(&text("good", "team"), None).unwrap();
    let yaml = render_yaml(&imported).unwrap();
    assert!(yaml.contains("# - Dropped: min x kind: Secret 1.") && !yaml.contains("\nkind: Secret"), "{yaml}");
    for (name, namespace) in [("\"a\\nb\"", "team"), ("Upper", "team"), ("good", "\"te am\""), ("\"\"", "team")] {
        let imported = import(&text(name, namespace), None).unwrap();
        assert_eq!((imported.quotas.len(), imported.refused.len()), (0, 1), "{name} {namespace}");
    }
}

#[test]
fn quotas_of_one_name_get_their_namespace_as_prefix() {
    let quota = |namespace: &str| {
        format!(
            "---\nkind: ElasticQuota\napiVersion: nos.nebuly.com/v1alpha1\nmetadata: {{name: gpus, namespace: {namespace}}}\n\
             spec: {{min: {{nvidia.com/gpu: 1}}}}\n"
        )
    };
    let imported = import(&(quota("a") + &quota("b")), None).unwrap();
    let names: Vec<&str> = imported.quotas.iter().filter_map(|one| one.quota.metadata.name.as_deref()).collect();
    assert_eq!(names, ["a-gpus", "b-gpus"]);
    let twice = import(&(quota("a") + &quota("a")), None).unwrap();
    assert_eq!((twice.quotas.len(), twice.refused.len()), (1, 1), "a namespace has one quota");
}

#[test]
fn a_bad_queue_of_kueue_is_refused_with_the_field() {
    let queue = |spec: &str| {
        format!("kind: ClusterQueue\napiVersion: kueue.x-k8s.io/v1beta1\nmetadata: {{name: bad}}\nspec: {spec}\n")
    };
    let groups = |resource: &str| {
        queue(&format!("{{resourceGroups: [{{flavors: [{{name: a}}, {{name: b, resources: [{resource}]}}]}}]}}"))
    };
    for (text, part) in [
        (
            groups("{name: nvidia.com/gpu, nominalQuota: [4]}"),
            "spec.resourceGroups[0].flavors[1].resources[0].nominalQuota is malformed",
        ),
        (
            groups("{name: nvidia.com/gpu}"),
            "spec.resourceGroups[0].flavors[1].resources[0] is malformed: missing field",
        ),
        (queue("{cohort: {}}"), "spec.cohort is malformed"),
    ] {
        let imported = import(&text, None).unwrap();
        let reason = refusal(&imported, "ClusterQueue bad");
        assert!(reason.contains(part), "{part:?} is not in {reason:?}");
        assert_eq!(imported.quotas, Vec::new(), "{text}");
    }
}

#[test]
fn an_object_without_a_name_is_refused_by_its_position() {
    let text = "kind: ConfigMap\n---\nkind: ElasticQuota\napiVersion: nos.nebuly.com/v1alpha1\nspec: 7\n";
    let imported = import(text, None).unwrap();
    assert_eq!(
        refusal(&imported, "ElasticQuota without a name (object 2 of the input)"),
        "spec is malformed: invalid type: integer `7`, expected struct NosSpec"
    );
}
