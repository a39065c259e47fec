//! Tests that the committed CRDs match the types, and that the rules of the CRDs refuse exactly the
//! invalid objects.
//!
//! `fixtures/good` and `fixtures/bad` contain complete `SharingPolicy`s, and `fixtures/quota-good`
//! and `fixtures/quota-bad` contain complete `GpuQuota`s. The first line of each bad object quotes
//! a part of the message that refuses it. This test evaluates the rules with an implementation of
//! CEL. This test skips bad policies with `checked by: schema`: these policies break the schema
//! itself, which only the API server checks.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test, its helpers included")]

use std::path::Path;

use cleave_api::GpuQuota;
use cleave_api::crds::crd_files;
use cleave_api::sharingpolicy::SharingPolicy;
use kube::CustomResourceExt;
use kube_cel::{Validator, apply_defaults};
use serde_json::Value;

fn read_file(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn read_fixtures(kind: &str) -> Vec<(String, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(kind);
    let mut found: Vec<(String, String)> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), read_file(&path)))
        .collect();
    found.sort();
    found
}

fn remove_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(key, value)| (key, remove_nulls(value)))
            .collect(),
        other => other,
    }
}

/// Returns the messages of the rules that refuse a policy. Drops nulls and sets defaults first, as
/// the API server does.
fn refusals(text: &str) -> String {
    refusals_by(&crd_schema(), text)
}

fn refusals_by(schema: &Value, text: &str) -> String {
    let object: Value = serde_saphyr::from_str(text).unwrap();
    let object = apply_defaults(schema, &remove_nulls(object));
    match Validator::new().validate(schema, &object, None) {
        Ok(()) => String::new(),
        Err(errors) => errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"),
    }
}

fn crd_schema() -> Value {
    schema_of::<SharingPolicy>()
}

fn schema_of<K: CustomResourceExt>() -> Value {
    let crd = serde_json::to_value(K::crd()).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

#[test]
fn good_quotas_are_accepted() {
    let schema = schema_of::<GpuQuota>();
    let fixtures = read_fixtures("quota-good");
    assert!(fixtures.len() >= 4);
    for (name, text) in fixtures {
        assert_eq!(refusals_by(&schema, &text), "", "{name}");
        let quota: GpuQuota = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(quota.metadata.name.as_deref(), Some(name.as_str()));
    }
}

#[test]
fn bad_quotas_are_refused_with_their_message_and_each_rule_refuses_one() {
    let schema = schema_of::<GpuQuota>();
    let mut all = String::new();
    for (name, text) in read_fixtures("quota-bad") {
        let expected = text.lines().next().and_then(|line| line.strip_prefix("# expect: "));
        let expected = expected.unwrap_or_else(|| panic!("{name}"));
        let refusals = refusals_by(&schema, &text);
        assert!(refusals.contains(expected), "{name}: {expected:?} is not in {refusals:?}");
        all.push_str(&refusals);
    }
    let mut messages = Vec::new();
    collect_rule_messages(&schema, &mut messages);
    assert!(messages.len() >= 10);
    for message in messages {
        assert!(all.contains(&message), "no object of fixtures/quota-bad is refused with: {message}");
    }
}

#[test]
fn committed_definitions_match_the_types() {
    for (name, text) in crd_files().unwrap() {
        let committed = read_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crds").join(name));
        assert!(committed == text, "crds/{name} does not match the types: run `make crds`");
    }
}

#[test]
fn the_schema_uses_only_formats_that_the_api_server_knows() {
    for (name, text) in crd_files().unwrap() {
        for line in text.lines().filter(|line| line.trim_start().starts_with("format:")) {
            assert!(["int32", "int64", "date-time"].iter().any(|known| line.ends_with(known)), "{name}: {line}");
        }
        assert!(!text.contains("nullable:"), "{name}: null must mean that a field is left out");
    }
}

#[test]
fn good_policies_are_accepted() {
    let fixtures = read_fixtures("good");
    assert!(!fixtures.is_empty());
    for (name, text) in fixtures {
        assert_eq!(refusals(&text), "", "{name}");
        let policy: SharingPolicy = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(policy.metadata.name.as_deref(), Some(name.as_str()));
    }
}

#[test]
fn bad_policies_are_refused_with_their_message() {
    let mut checked = 0;
    for (name, text) in read_fixtures("bad") {
        let expected =
            text.lines().next().and_then(|line| line.strip_prefix("# expect: ")).unwrap_or_else(|| panic!("{name}"));
        if text.contains("# checked by: schema") {
            continue;
        }
        checked += 1;
        let refusals = refusals(&text);
        assert!(refusals.contains(expected), "{name}: {expected:?} is not in {refusals:?}");
    }
    assert!(checked > 40);
}

/// Each rule of the `SharingPolicy` CRD must refuse at least one bad policy. A rule that refuses no
/// fixture may have no effect.
#[test]
fn each_rule_refuses_at_least_one_policy() {
    let all: String = read_fixtures("bad").iter().map(|(_, text)| refusals(text)).collect();
    let schema = serde_json::to_string(&crd_schema()).unwrap();
    let mut messages: Vec<String> = Vec::new();
    collect_rule_messages(&crd_schema(), &mut messages);
    assert!(!messages.is_empty() && schema.contains("x-kubernetes-validations"));
    for message in messages {
        assert!(all.contains(&message), "no object of fixtures/bad is refused with: {message}");
    }
}

fn collect_rule_messages(schema: &Value, messages: &mut Vec<String>) {
    match schema {
        Value::Object(map) => {
            if let Some(Value::Array(rules)) = map.get("x-kubernetes-validations") {
                messages.extend(
                    rules.iter().map(|rule| rule["message"].as_str().expect("each rule has a message").to_owned()),
                );
            }
            map.values().for_each(|value| collect_rule_messages(value, messages));
        }
        Value::Array(items) => items.iter().for_each(|value| collect_rule_messages(value, messages)),
        _ => {}
    }
}
