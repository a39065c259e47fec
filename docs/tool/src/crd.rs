//! Generates the reference page of a custom resource from its `CustomResourceDefinition`.
use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value};

use crate::wrapping::{wrap, wrap_list_item};

/// Type of `status.conditions` on the page. Kubernetes documents the fields of a condition.
const CONDITIONS_TYPE: &str = "list of conditions";

/// Returns the page of a `CustomResourceDefinition`.
pub(crate) fn render_page(crd: &Value) -> Result<String> {
    let text = |pointer: &str| crd.pointer(pointer).and_then(Value::as_str).with_context(|| format!("no {pointer}"));
    let kind = text("/spec/names/kind")?;
    let schema = crd.pointer("/spec/versions/0/schema/openAPIV3Schema").context("the CRD has no schema")?;
    let mut page = PageWriter { out: String::new(), sections: Vec::new() };
    let _ = write!(page.out, "# {kind}\n\n<!-- Generated from the types by `make docs`. Do not edit. -->\n\n");
    page.write_paragraph(schema);
    let _ = write!(
        page.out,
        "| | |\n|---|---|\n| `apiVersion` | `{}/{}` |\n| `kind` | `{kind}` |\n| scope | {} |\n| `kubectl get` | `{}`, `{}` |\n",
        text("/spec/group")?,
        text("/spec/versions/0/name")?,
        text("/spec/scope")?,
        text("/spec/names/plural")?,
        text("/spec/names/shortNames/0")?,
    );
    page.write_columns(crd);
    for part in ["spec", "status"] {
        let schema = schema.pointer(&format!("/properties/{part}")).with_context(|| format!("no {part}"))?;
        page.write_section(part, 2, schema);
    }
    Ok(page.out)
}

/// The page that is being written.
struct PageWriter {
    out: String,
    /// Objects that have a section: the properties of the object, and the path in the section's
    /// heading.
    sections: Vec<(Value, String)>,
}

impl PageWriter {
    /// Writes the description of a schema as a paragraph.
    fn write_paragraph(&mut self, schema: &Value) {
        if let Some(text) = one_line_description(schema) {
            self.out.push_str(&wrap(&text, "", ""));
            self.out.push('\n');
        }
    }

    /// Writes the columns that `kubectl get` prints.
    fn write_columns(&mut self, crd: &Value) {
        let columns = crd.pointer("/spec/versions/0/additionalPrinterColumns").and_then(Value::as_array);
        let Some(columns) = columns else { return };
        self.out.push_str("\n| column | field |\n|---|---|\n");
        for column in columns {
            let field = |name: &str| column.get(name).and_then(Value::as_str).unwrap_or_default();
            let wide = column.get("priority").and_then(Value::as_i64).is_some_and(|priority| priority > 0);
            let wide = if wide { " (`-o wide`)" } else { "" };
            let path = field("jsonPath").replace('|', "\\|");
            let _ = writeln!(self.out, "| {}{wide} | `{path}` |", field("name"));
        }
    }

    /// Writes a section for an object, and for each object in it that has no section yet.
    /// Conditions have no section.
    fn write_section(&mut self, path: &str, level: usize, schema: &Value) {
        let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return };
        // Record all objects at this level before writing their sections. An object that occurs at
        // several levels then has its section at the outermost level.
        let mut described = Vec::new();
        for (name, field) in properties {
            let inner = element_schema(field);
            if let Some(fields) = inner.get("properties")
                && !is_condition(inner)
                && self.section_path(inner).is_none()
            {
                self.sections.push((fields.clone(), child_path(path, name, field)));
                described.push((name, field));
            }
        }
        let _ = write!(self.out, "\n{} {path}\n\n", "#".repeat(level));
        self.write_paragraph(schema);
        for (name, field) in properties {
            let required = schema
                .get("required")
                .and_then(Value::as_array)
                .is_some_and(|names| names.iter().any(|required| required == name));
            let entry = self.describe_field(path, name, field, required);
            self.out.push_str(&wrap_list_item(&entry));
        }
        let rules = rule_messages(schema);
        if !rules.is_empty() {
            self.out.push_str("\nRules:\n\n");
            for rule in rules {
                self.out.push_str(&wrap_list_item(&rule));
            }
        }
        for (name, field) in &described {
            self.write_section(
                &child_path(path, name, field),
                level.min(3) + usize::from(level == 2),
                element_schema(field),
            );
        }
    }

    /// Returns the text of the list item for one field.
    fn describe_field(&self, path: &str, name: &str, field: &Value, required: bool) -> String {
        let mut notes = vec![self.describe_type(path, name, field)];
        if required {
            notes.push("required".to_owned());
        }
        if let Some(default) = field.get("default").filter(|value| value.is_string() || value.is_boolean()) {
            let text =
                default.as_str().filter(|text| !text.is_empty()).map_or_else(|| default.to_string(), str::to_owned);
            notes.push(format!("default `{text}`"));
        }
        let mut text = format!("`{name}` ({})", notes.join(", "));
        if let Some(description) = one_line_description(field) {
            let _ = write!(text, ": {description}");
        }
        let choices = allowed_values(field);
        if !choices.is_empty() {
            let _ = write!(text, " One of {}.", choices.join(", "));
        }
        let rules: Vec<String> = [field, element_schema(field)]
            .into_iter()
            .filter(|schema| schema.get("properties").is_none())
            .flat_map(rule_messages)
            .collect();
        let mut unique: Vec<String> = Vec::new();
        for rule in rules {
            if !unique.contains(&rule) {
                unique.push(rule);
            }
        }
        for rule in unique {
            let _ = write!(text, " Rule: {}.", rule.trim_end_matches('.'));
        }
        text
    }

    /// Returns a short name for a field's type.
    fn describe_type(&self, path: &str, name: &str, field: &Value) -> String {
        let inner = element_schema(field);
        let of = if is_condition(inner) {
            return CONDITIONS_TYPE.to_owned();
        } else if inner.get("properties").is_some() {
            let path = self.section_path(inner).unwrap_or_else(|| child_path(path, name, field));
            format!("[object](#{})", heading_anchor(&path))
        } else {
            let either = inner.get("x-kubernetes-int-or-string").is_some_and(|either| either == true);
            let untyped = if either { "integer or string" } else { "any" };
            inner.get("type").and_then(Value::as_str).unwrap_or(untyped).to_owned()
        };
        if field.get("items").is_some() {
            format!("list of {of}")
        } else if field.get("additionalProperties").is_some() {
            format!("map to {of}")
        } else {
            of
        }
    }

    /// Returns the path of the section that describes an object with these fields.
    fn section_path(&self, schema: &Value) -> Option<String> {
        self.sections
            .iter()
            .find(|(properties, _)| Some(properties) == schema.get("properties"))
            .map(|(_, path)| path.clone())
    }
}

/// Returns the schema of the elements of a list or map. Returns the schema itself for other types.
fn element_schema(field: &Value) -> &Value {
    field.get("items").or_else(|| field.get("additionalProperties")).filter(|inner| inner.is_object()).unwrap_or(field)
}

/// Returns the path of a field of the object at `path`. The path of a list ends with `[]`.
fn child_path(path: &str, name: &str, field: &Value) -> String {
    format!("{path}.{name}{}", if field.get("items").is_some() { "[]" } else { "" })
}

/// Returns the anchor that mdBook generates for a heading without spaces.
fn heading_anchor(heading: &str) -> String {
    heading.chars().filter(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect::<String>().to_lowercase()
}

/// Returns the description of a schema as one line, if the schema has a description.
fn one_line_description(schema: &Value) -> Option<String> {
    let text = schema.get("description")?.as_str()?;
    Some(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Returns the allowed values of a field or of its elements, as code spans.
fn allowed_values(field: &Value) -> Vec<String> {
    let values = element_schema(field).get("enum").and_then(Value::as_array);
    values.into_iter().flatten().filter_map(Value::as_str).map(|value| format!("`{value}`")).collect()
}

/// Returns the messages of a schema's validation rules.
fn rule_messages(schema: &Value) -> Vec<String> {
    let rules = schema.get("x-kubernetes-validations").and_then(Value::as_array);
    let rules = rules.into_iter().flatten().filter_map(|rule| rule.get("message")?.as_str());
    rules.map(|rule| rule.replace('<', "\\<")).collect()
}

/// Returns whether a schema is that of a Kubernetes condition.
fn is_condition(schema: &Value) -> bool {
    let has = |properties: &Map<String, Value>| properties.contains_key("lastTransitionTime");
    schema.get("properties").and_then(Value::as_object).is_some_and(has)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_api::SharingPolicy;
    use kube::CustomResourceExt as _;

    #[test]
    fn every_field_of_a_policy_is_on_its_page() {
        let crd = serde_json::to_value(SharingPolicy::crd()).unwrap_or_default();
        let page = render_page(&crd).unwrap_or_default();
        for field in ["`mode`", "`units`", "`nodeSelector`", "`enforcement`", "`layout`", "default `Burst`"] {
            assert!(page.contains(field), "{field}");
        }
        assert!(page.contains("[object](#specmps)"));
    }

    #[test]
    fn an_object_that_occurs_twice_is_described_once() {
        let crd = serde_json::to_value(SharingPolicy::crd()).unwrap_or_default();
        let page = render_page(&crd).unwrap_or_default();
        assert_eq!(page.matches("\n- `multiUser`").count(), 1);
    }
}
