//! Finds files and functions that are too long.
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{Attribute, Block, ImplItemFn, ItemFn, ItemImpl, ItemTrait, Signature, TraitItemFn, Type};

use crate::model::{Finding, Sources};
use crate::parse::Parsed;

/// Maximum number of lines of a file.
const MAX_FILE_LINES: usize = 800;
/// Maximum number of lines of a function, from the signature to the last brace.
const MAX_FUNCTION_LINES: usize = 80;
/// Prefix of a comment that states the reason why a file or function is longer.
const REASON_PREFIX: &str = "// long:";

/// Finds the Rust files with over 800 lines that state no reason at their top.
pub fn long_files(sources: &Sources) -> Vec<Finding> {
    let long = |(path, text): (&String, &String)| {
        let lines = text.lines().count();
        let mut top = text.lines().map(str::trim).take_while(|line| line.is_empty() || is_comment_or_attribute(line));
        (lines > MAX_FILE_LINES && !top.any(is_reason)).then(|| Finding {
            description: format!("long-file {path}"),
            locations: vec![format!("{path}: {lines} lines, at most {MAX_FILE_LINES}")],
        })
    };
    sources.files.iter().filter_map(long).collect()
}

/// Finds the functions, including tests, with over 80 lines and without a reason above them.
pub fn long_functions(sources: &Sources, parsed: &Parsed) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, file) in parsed {
        let lines = sources.files.get(path).map(|text| text.lines().map(str::trim).collect()).unwrap_or_default();
        let mut functions = FunctionVisitor { path, lines, owner: None, found: &mut found };
        functions.visit_file(file);
    }
    found
}

struct FunctionVisitor<'a> {
    path: &'a str,
    lines: Vec<&'a str>,
    /// The type or trait that contains the visited function.
    owner: Option<String>,
    found: &'a mut Vec<Finding>,
}

impl FunctionVisitor<'_> {
    fn check_function(&mut self, attributes: &[Attribute], signature: &Signature, block: &Block) {
        let first = signature.fn_token.span.start().line;
        let lines = block.brace_token.span.close().end().line + 1 - first;
        if lines <= MAX_FUNCTION_LINES || self.has_reason(attributes, first) {
            return;
        }
        let owner = self.owner.as_ref().map(|owner| format!("{owner}::")).unwrap_or_default();
        let (path, name) = (self.path, &signature.ident);
        self.found.push(Finding {
            description: format!("long-function {path} {owner}{name}"),
            locations: vec![format!("{path}:{first}: {lines} lines, at most {MAX_FUNCTION_LINES}")],
        });
    }

    /// Returns whether a comment states a reason for the function's length. The comment can be
    /// above the function's attributes, or between the attributes and the signature.
    fn has_reason(&self, attributes: &[Attribute], first: usize) -> bool {
        let top = attributes.iter().map(|attribute| attribute.span().start().line).min().unwrap_or(first).min(first);
        let between = self.lines.get(top - 1..first - 1).unwrap_or_default();
        let above = self.lines.get(..top - 1).unwrap_or_default();
        between.iter().any(|line| is_reason(line))
            || above.iter().rev().take_while(|line| is_comment_or_attribute(line)).any(|line| is_reason(line))
    }

    fn with_owner(&mut self, owner: String, walk: impl FnOnce(&mut Self)) {
        let outer = self.owner.replace(owner);
        walk(self);
        self.owner = outer;
    }
}

impl<'ast> Visit<'ast> for FunctionVisitor<'_> {
    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.check_function(&item.attrs, &item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.check_function(&item.attrs, &item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        if let Some(block) = &item.default {
            self.check_function(&item.attrs, &item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        let owner = match &*item.self_ty {
            Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
            _ => None,
        };
        self.with_owner(owner.unwrap_or_else(|| "_".to_owned()), |functions| visit::visit_item_impl(functions, item));
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        self.with_owner(item.ident.to_string(), |functions| visit::visit_item_trait(functions, item));
    }
}

/// Returns whether a line is a comment or an inner attribute (`#![…]`).
fn is_comment_or_attribute(line: &str) -> bool {
    line.starts_with("//") || line.starts_with("#![")
}

/// Returns whether a line is a comment that states a reason.
fn is_reason(line: &str) -> bool {
    line.strip_prefix(REASON_PREFIX).is_some_and(|reason| !reason.trim().is_empty())
}
