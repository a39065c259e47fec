//! Generates the tables of metrics from the calls that register them.
//!
//! This module parses the source code, because a registry reports labels only after the first
//! sample.
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use syn::visit::{self, Visit};
use syn::{Expr, ExprMethodCall, File, GenericArgument, Item, Lit, Local, Pat, PathArguments, Type};

use crate::generated_parts::{fill_generated_parts, format_table};
use crate::text_file::read_text_file;

/// Source files that register metrics, grouped by program.
const METRIC_SOURCES: [&[&str]; 2] = [
    &["crates/agent/src/metrics.rs", "crates/agent/src/metrics/device_counters.rs", "crates/agent/src/metrics/gpus.rs"],
    &["crates/operator/src/metrics.rs", "crates/operator/src/metrics/quotas.rs"],
];
/// Name of the table of metrics that are registered without a prefix, such as `process_open_fds`.
const PROCESS_PREFIX: &str = "process";

/// A registered metric.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Metric {
    name: String,
    kind: &'static str,
    labels: Vec<String>,
    help: String,
}

/// Returns the page with a generated table for each metric prefix.
pub(crate) fn render_page(root: &Path, page: &str) -> Result<String> {
    let mut groups: BTreeMap<String, Vec<Metric>> = BTreeMap::new();
    for sources in METRIC_SOURCES {
        // A file may register the metrics of a struct that another file declares.
        let mut program = syn::parse_file("")?;
        for source in sources {
            let file = syn::parse_file(&read_text_file(&root.join(source))?);
            program.items.extend(file.with_context(|| format!("failed to parse {source}"))?.items);
        }
        let metrics = registered_metrics(&program);
        for (prefix, metric) in metrics.with_context(|| format!("failed to find metrics in {sources:?}"))? {
            groups.entry(prefix).or_default().push(metric);
        }
    }
    let required: Vec<String> = groups.keys().cloned().collect();
    fill_generated_parts(page, &required, |name| {
        let metrics = groups.get(name).context("no metric has this prefix")?;
        let row = |Metric { name, kind, labels, help }: &Metric| {
            let labels = labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
            vec![format!("`{name}`"), (*kind).to_owned(), labels, help.clone()]
        };
        Ok(format_table(&["metric", "type", "labels", "meaning"], &metrics.iter().map(row).collect::<Vec<_>>()))
    })
}

/// Returns the metrics that a file registers, each with its prefix.
fn registered_metrics(file: &File) -> Result<Vec<(String, Metric)>> {
    let structs: BTreeMap<String, Vec<(String, &Type)>> = file
        .items
        .iter()
        .filter_map(|item| if let Item::Struct(item) = item { Some(item) } else { None })
        .map(|item| {
            let fields = item.fields.iter().filter_map(|field| Some((field.ident.as_ref()?.to_string(), &field.ty)));
            (item.ident.to_string(), fields.collect())
        })
        .collect();
    // If a struct registers the metrics of one of its fields, that call sets their prefix.
    let mut prefixes = PrefixFinder::default();
    prefixes.visit_file(file);
    let mut metrics = Vec::new();
    for item in &file.items {
        let Item::Impl(item) = item else { continue };
        let Type::Path(of) = &*item.self_ty else { continue };
        let Some(name) = of.path.get_ident().map(ToString::to_string) else { continue };
        let Some(fields) = structs.get(&name) else { continue };
        let field =
            structs.values().flatten().find(|(_, ty)| matches!(ty, Type::Path(path) if path.path.is_ident(&name)));
        let prefix = field.and_then(|(field, _)| prefixes.0.get(field).cloned());
        let mut calls = RegisterCallFinder { prefix: prefix.unwrap_or_default(), ..RegisterCallFinder::default() };
        calls.visit_item_impl(item);
        for RegisterCall { prefix, name, help, field } in calls.found {
            let (_, ty) =
                fields.iter().find(|(known, _)| *known == field).with_context(|| format!("no field {field}"))?;
            let (kind, label) = metric_kind(ty).with_context(|| format!("{field} is not a metric"))?;
            let labels = label.and_then(|label| structs.get(&label));
            let labels = labels.into_iter().flatten().map(|(label, _)| label.clone()).collect();
            let name = if kind == "counter" { format!("{name}_total") } else { name };
            let name = if prefix.is_empty() { name } else { format!("{prefix}_{name}") };
            let prefix = if prefix.is_empty() { PROCESS_PREFIX.to_owned() } else { prefix };
            metrics.push((prefix, Metric { name, kind, labels, help }));
        }
    }
    ensure!(!metrics.is_empty(), "no call registers a metric");
    Ok(metrics)
}

/// A call `registry.register(name, help, metric)`.
#[derive(Debug)]
struct RegisterCall {
    prefix: String,
    name: String,
    help: String,
    field: String,
}

/// Finds the calls that register metrics, in order.
#[derive(Debug, Default)]
struct RegisterCallFinder {
    prefix: String,
    /// Values of string variables.
    strings: BTreeMap<String, String>,
    found: Vec<RegisterCall>,
}

impl Visit<'_> for RegisterCallFinder {
    fn visit_local(&mut self, local: &Local) {
        if let (Pat::Ident(name), Some(init)) = (&local.pat, &local.init) {
            if let Some(text) = string_literal(&init.expr) {
                self.strings.insert(name.ident.to_string(), text);
            } else if let (true, Some(prefix)) = (name.ident == "registry", sub_registry_prefix(&init.expr)) {
                self.prefix = prefix;
            }
        }
        visit::visit_local(self, local);
    }

    fn visit_expr_method_call(&mut self, call: &ExprMethodCall) {
        let arguments: Vec<&Expr> = call.args.iter().collect();
        if let (true, [name, help, metric]) = (call.method == "register", arguments.as_slice()) {
            let help = string_literal(help).or_else(|| self.strings.get(&variable_name(help)?).cloned());
            if let (Some(name), Some(help), Some(field)) = (string_literal(name), help, cloned_field_name(metric)) {
                self.found.push(RegisterCall { prefix: self.prefix.clone(), name, help, field });
            }
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// Collects the registry prefix of each field, from calls of
/// `self.field.register(all.sub_registry_with_prefix(prefix))`.
#[derive(Debug, Default)]
struct PrefixFinder(BTreeMap<String, String>);

impl Visit<'_> for PrefixFinder {
    fn visit_expr_method_call(&mut self, call: &ExprMethodCall) {
        if let (true, Some(argument), 1) = (call.method == "register", call.args.first(), call.args.len())
            && let (Expr::Field(field), Some(prefix)) = (&*call.receiver, sub_registry_prefix(argument))
            && let syn::Member::Named(name) = &field.member
        {
            self.0.insert(name.to_string(), prefix);
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// Returns the prefix in `all.sub_registry_with_prefix(prefix)`.
fn sub_registry_prefix(expr: &Expr) -> Option<String> {
    match expr {
        Expr::MethodCall(call) if call.method == "sub_registry_with_prefix" => string_literal(call.args.first()?),
        _ => None,
    }
}

/// Returns the value of a string literal.
fn string_literal(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

fn variable_name(expr: &Expr) -> Option<String> {
    if let Expr::Path(path) = expr { path.path.get_ident().map(ToString::to_string) } else { None }
}

/// Returns the name of the field in `self.field.clone()`.
fn cloned_field_name(expr: &Expr) -> Option<String> {
    let Expr::MethodCall(call) = expr else { return None };
    let Expr::Field(field) = &*call.receiver else { return None };
    if let syn::Member::Named(name) = &field.member { Some(name.to_string()) } else { None }
}

/// Returns the kind of a metric and the type of its labels, from the metric's Rust type.
fn metric_kind(ty: &Type) -> Option<(&'static str, Option<String>)> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last()?;
    match last.ident.to_string().as_str() {
        "Counter" => Some(("counter", None)),
        "Gauge" => Some(("gauge", None)),
        "Histogram" => Some(("histogram", None)),
        "Family" => {
            let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
            let mut types = arguments.args.iter().filter_map(|argument| match argument {
                GenericArgument::Type(Type::Path(path)) => path.path.segments.last(),
                _ => None,
            });
            let label = types.next()?.ident.to_string();
            let kind = match types.next()?.ident.to_string().as_str() {
                "Counter" => "counter",
                "Gauge" => "gauge",
                "Histogram" => "histogram",
                _ => return None,
            };
            Some((kind, Some(label)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS_SOURCE: &str = r#"
        struct Label { kind: String, result: &'static str }
        struct Metrics { a: Family<Label, Counter>, b: Gauge<f64, AtomicU64>, inner: Inner }
        struct Inner { c: Histogram }
        impl Metrics {
            fn new() {
                metrics.inner.register(all.sub_registry_with_prefix("inner"));
                registry.register("bare", "Bare", metrics.b.clone());
                let registry = all.sub_registry_with_prefix("outer");
                let help = "Of a";
                registry.register("a", help, metrics.a.clone());
            }
        }
        impl Inner {
            fn register(&self, registry: &mut Registry) { registry.register("c", "Of c", self.c.clone()); }
        }
    "#;

    #[test]
    fn the_name_type_labels_and_help_of_each_metric_are_found() -> Result<()> {
        let metrics = registered_metrics(&syn::parse_file(METRICS_SOURCE)?)?;
        let lines: Vec<String> = metrics
            .iter()
            .map(|(prefix, Metric { name, kind, labels, help })| format!("{prefix} {name} {kind} {labels:?} {help}"))
            .collect();
        assert_eq!(
            lines,
            [
                "process bare gauge [] Bare",
                "outer outer_a_total counter [\"kind\", \"result\"] Of a",
                "inner inner_c histogram [] Of c",
            ]
        );
        Ok(())
    }
}
