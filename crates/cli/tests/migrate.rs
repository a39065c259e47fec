//! Tests `cleave migrate` with configurations like those that other projects publish.
//!
//! Each directory of `migrate/SOURCE/` has an `input.yaml` and the expected report, policies and
//! values.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test, its helpers included")]
mod golden;

use std::collections::BTreeMap;
use std::path::Path;

use cleave_api::SharingPolicy;
use cleave_cli::migrate::{Translation, translate};
use cleave_operator::policies::validate::validate;
use golden::assert_matches_file;
use kube::CustomResourceExt as _;
use kube_cel::{Validator, apply_defaults};
use serde_json::Value;

/// The sources of configurations. Each source has at least [`MIN_CASES_PER_SOURCE`] cases.
const SOURCES: [&str; 6] = ["gke", "gpu-operator", "hami", "mig-parted", "nos", "nvidia"];
const MIN_CASES_PER_SOURCE: usize = 3;

/// Returns the names of the cases, `SOURCE/CASE`.
fn cases() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/migrate");
    let entries = |path: &Path| {
        let names = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    let sources = entries(&root).into_iter();
    sources
        .flat_map(|source| entries(&root.join(&source)).into_iter().map(move |case| format!("{source}/{case}")))
        .collect()
}

fn translate_case(case: &str) -> Translation {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/migrate").join(case).join("input.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    translate(&[("input.yaml", &text)]).unwrap_or_else(|error| panic!("{case}: {error:#}"))
}

fn translate_error(text: &str) -> String {
    match translate(&[("input.yaml", text)]) {
        Ok(translation) => panic!("{text}\nis translated to\n{}", translation.report),
        Err(error) => format!("{error:#}"),
    }
}

#[test]
fn configurations_are_translated_as_expected() {
    for case in cases() {
        let Translation { report, policies, values } = translate_case(&case);
        assert_matches_file(&format!("migrate/{case}/report.txt"), &report);
        assert_matches_file(&format!("migrate/{case}/policies.yaml"), &policies);
        assert_matches_file(&format!("migrate/{case}/values.yaml"), &values);
    }
}

#[test]
fn each_migration_source_has_several_cases() {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for case in cases() {
        *counts.entry(case.split('/').next().unwrap().to_owned()).or_default() += 1;
    }
    assert_eq!(counts.keys().collect::<Vec<_>>(), SOURCES.iter().collect::<Vec<_>>());
    assert!(counts.values().all(|&count| count >= MIN_CASES_PER_SOURCE), "{counts:?}");
}

/// The CRD's rules and the operator accept every policy, and the names are unique.
#[test]
fn the_crd_and_the_operator_accept_every_policy() {
    let crd = serde_json::to_value(SharingPolicy::crd()).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut checked = 0;
    for case in cases() {
        let options = serde_saphyr::options! { strict_booleans: true };
        let policies: Vec<Value> =
            serde_saphyr::from_multiple_with_options(&translate_case(&case).policies, options).unwrap();
        let mut names = Vec::new();
        for object in policies.into_iter().filter(|object| !object.is_null()) {
            let with_defaults = apply_defaults(schema, &object);
            let refusals = Validator::new().validate(schema, &with_defaults, None);
            assert!(refusals.is_ok(), "{case}: {object}: {:?}", refusals.err());
            let policy: SharingPolicy = serde_json::from_value(object).unwrap();
            let name = policy.metadata.name.expect("a name");
            validate(&name, None, &policy.spec).unwrap_or_else(|error| panic!("{case}: {name}: {error}"));
            assert!(is_object_name(&name) && !names.contains(&name), "{case}: {name}");
            names.push(name);
            checked += 1;
        }
    }
    assert!(checked > 25, "{checked} policies");
}

fn is_object_name(name: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let allowed = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    allowed && name.len() <= 63 && ends(name.chars().next()) && ends(name.chars().last())
}

/// The report contains each key that no code reads, at every level of the input.
#[test]
fn unknown_keys_are_reported() {
    let text = "version: v1\nflags: {new: 1, plugin: {new: 2}}\nsharing: {new: 3, timeSlicing: {new: 4, resources: \
                [{name: gpu, replicas: 2, new: 5}]}}\nnew: 6\n";
    let report = translate(&[("input.yaml", text)]).unwrap().report;
    for setting in [
        "flags.new = 1",
        "flags.plugin.new = 2",
        "sharing.new = 3",
        "sharing.timeSlicing.new = 4",
        "sharing.timeSlicing.resources[0].new = 5",
        "new = 6",
    ] {
        assert!(report.contains(&format!("  unknown     {setting}\n")), "{setting} in\n{report}");
    }
}

#[test]
fn the_order_of_files_does_not_change_policies() {
    let plugin = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\n";
    let mig = "version: v1\nmig-configs: {halves: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]}\n";
    let one = translate(&[("a.yaml", plugin), ("b.yaml", mig)]).unwrap();
    let other = translate(&[("b.yaml", mig), ("a.yaml", plugin)]).unwrap();
    assert_eq!(one.policies, other.policies);
    assert!(one.policies.contains("units: 10") && one.policies.contains("3g.40gb"), "{}", one.policies);
}

/// The command in the report changes keys that a colon follows, with at most a quotation mark in
/// between. It changes neither values nor longer names with the same prefix.
#[test]
fn the_sed_command_renames_requests() {
    let config = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\n";
    let report = translate(&[("input.yaml", config)]).unwrap().report;
    let command = report.lines().map(str::trim).find(|line| line.starts_with("sed -E -i ")).expect("a command");
    let script = command.split('\'').nth(1).expect("a script in quotes");
    let manifest = "nvidia.com/gpu: 1\n\"nvidia.com/gpu\": 1, 'nvidia.com/gpu' : 2\nrequests.nvidia.com/gpu: 4\n\
                    nvidia.com/gpu.product: A100\nkey: nvidia.com/gpu\nnvidia.com/gpumem: 3\n";
    let expected = "nvidia.com/gpu-mps: 1\n\"nvidia.com/gpu-mps\": 1, 'nvidia.com/gpu' : 2\n\
                    requests.nvidia.com/gpu-mps: 4\nnvidia.com/gpu.product: A100\nkey: nvidia.com/gpu\nnvidia.com/gpumem: 3\n";
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("manifest.yaml");
    std::fs::write(&file, manifest).unwrap();
    let output = std::process::Command::new("sed").args(["-E", script]).arg(&file).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected, "{script}");
}

/// Each case is an input and a part of the expected error.
#[test]
fn errors_name_the_setting() {
    let sharing = |resource: &str| format!("version: v1\nsharing: {{timeSlicing: {{resources: [{resource}]}}}}\n");
    let mig = |entry: &str| format!("version: v1\nmig-configs: {{x: [{entry}]}}\n");
    for (text, expected) in [
        ("a: [".to_owned(), "input.yaml: not valid YAML"),
        ("version: v1\nversion: v1\nflags: {}\n".to_owned(), "duplicate"),
        ("just a text".to_owned(), "a document is not a mapping"),
        ("colour: green\n".to_owned(), "a document was not recognized"),
        ("version: v2\nflags: {}\n".to_owned(), "version is \"v2\""),
        ("version: v1\nflags: {migStrategy: some}\n".to_owned(), "flags.migStrategy is \"some\""),
        ("version: v1\nflags: {failOnInitError: maybe}\n".to_owned(), "flags.failOnInitError must be true or false"),
        ("version: v1\nflags: {plugin: {deviceListStrategy: fax}}\n".to_owned(), "deviceListStrategy is \"fax\""),
        ("version: v1\nflags: []\n".to_owned(), "flags must be a mapping"),
        ("version: v1\nsharing: {timeSlicing: {resources: []}}\n".to_owned(), "lists no resources"),
        ("version: v1\nsharing: {timeSlicing: {}, mps: {}}\n".to_owned(), "exclude each other"),
        (sharing("{name: nvidia.com/gpu}"), "has no replicas"),
        (sharing("{replicas: 2}"), "has no name"),
        (sharing("{name: nvidia.com/gpu, replicas: 1}"), "resources[0].replicas is 1"),
        (sharing("{name: nvidia.com/gpu, replicas: 99999999999999999999}"), "resources[0].replicas is"),
        (sharing("{name: nvidia.com/gpu, replicas: -3}"), "resources[0].replicas is -3"),
        (sharing("{name: amd.com/gpu, replicas: 2}"), "\"amd.com/gpu\" is not a resource"),
        (sharing("{name: gpu, replicas: 2}, {name: nvidia.com/gpu, replicas: 3}"), "nvidia.com/gpu is listed twice"),
        (mig("{devices: all}"), "has no mig-enabled"),
        (mig("{mig-enabled: true}"), "has no devices"),
        (mig("{devices: [64], mig-enabled: false}"), "indices from 0 to 63"),
        (mig("{devices: some, mig-enabled: false}"), "indices from 0 to 63"),
        (mig("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 9}}"), "no GPU has more than 8"),
        (mig("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 18446744073709551615}}"), "no GPU has more than 8"),
        (mig("{devices: all, mig-enabled: true, mig-devices: {huge: 1}}"), "mig.layout is \"huge\""),
        (mig("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: many}}"), "must be a number of instances"),
        (mig("{devices: [1], mig-enabled: false}, {devices: [0, 1], mig-enabled: false}"), "describes GPU 1 twice"),
        (mig("{device-filter: Tesla, devices: all, mig-enabled: false}"), "which is not a PCI device ID"),
        ("kind: ConfigMap\nmetadata: {name: x}\ndata: {a: '{'}\n".to_owned(), "ConfigMap x, a: not valid YAML"),
        (
            "kind: ClusterPolicy\nmetadata: {name: c}\nspec: {devicePlugin: {config: {default: gone}}}\n".to_owned(),
            "the default configuration gone is not in the input",
        ),
        ("gpuPartitioner: {batchWindowIdleSeconds: soon}\n".to_owned(), "batchWindowIdleSeconds is \"soon\""),
        ("gpuPartitioner: {batchWindowIdleSeconds: 4000000000}\n".to_owned(), "it must be at most 999999"),
        (
            "gpuPartitioner: {batchWindowIdleSeconds: 60, batchWindowTimeoutSeconds: 10}\n".to_owned(),
            "dynamic.timeout must not be shorter than dynamic.idle",
        ),
        (
            "name: p\nconfig: {accelerators: [{gpuSharingConfig: {gpuSharingStrategy: DREAM}}]}\n".to_owned(),
            "it must be time-sharing or mps",
        ),
        (
            "name: p\nconfig: {accelerators: [{gpuSharingConfig: {gpuSharingStrategy: MPS, maxSharedClientsPerGpu: 0}}]}\n"
                .to_owned(),
            "it must be a number, at least 2",
        ),
        (mig("{devices: all, mig-enabled: false}").replace("x:", "two words:"), "cannot be the value of a node label"),
        ("devicePlugin: {deviceSplitCount: ten}\n".to_owned(), "deviceSplitCount is \"ten\""),
        ("nodeconfig: [{name: a}, {name: a}]\n".to_owned(), "node a is described twice"),
        ("kind: Pod\nmetadata: {name: p}\nspec: {containers: 1}\n".to_owned(), "Pod default/p is malformed"),
    ] {
        let error = translate_error(&text);
        assert!(error.contains(expected), "{text}: {expected:?} is not in {error:?}");
    }
}
