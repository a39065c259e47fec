//! Reads the modules of a crate: their items, their imports and the paths in their code.
use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::TokenStream;
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{Attribute, Block, Expr, File, ImplItem, Item, ItemMod, ItemUse, Lit, Meta, Path, UseTree, Visibility};

use crate::parse::{Error, Parsed, is_only_in_test_builds};
use crate::tokens;

/// The modules of one crate, except modules that exist only in test builds. The first module is the
/// crate's root.
#[derive(Debug, Default)]
pub struct ModuleTree {
    pub(crate) modules: Vec<Module>,
    pub(crate) imports: Vec<Import>,
    pub(crate) mentions: Vec<PathMention>,
    pub(crate) files: Vec<SourceFile>,
}

/// A file of the crate. Each file is a node of the graph of uses.
#[derive(Debug)]
pub(crate) struct SourceFile {
    /// Path of the file, from the repository's root.
    pub(crate) path: String,
    /// Path of the file's module. For the root, the path is `crate`.
    pub(crate) module: String,
}

#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) file: usize,
    pub(crate) parent: Option<usize>,
    pub(crate) names: BTreeMap<String, Vec<ItemName>>,
    /// Indices of imports that end in `*`.
    pub(crate) globs: Vec<usize>,
    /// Lower-case names that patterns in the module bind. A variable with one of these names is not
    /// a use of an item.
    pub(crate) variables: BTreeSet<String>,
}

/// The kind of a name in a module.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ItemName {
    /// A child module.
    Module(usize),
    /// A type, trait or macro that this module defines.
    Type,
    /// A function, constant or static that this module defines.
    Value,
    /// An import, by the import's index.
    Import(usize),
}

/// One name of a `use` item.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) module: usize,
    pub(crate) path: Vec<String>,
    pub(crate) glob: bool,
    /// Whether the `use` item has a visibility, such as `pub`.
    pub(crate) exported: bool,
    pub(crate) line: usize,
}

/// A path in code.
#[derive(Debug)]
pub(crate) struct PathMention {
    pub(crate) module: usize,
    pub(crate) path: Vec<String>,
    pub(crate) line: usize,
}

/// Reads the crate whose root file is `root`.
pub fn read_modules(parsed: &Parsed, root: &str) -> Result<ModuleTree, Error> {
    let file = parsed.get(root).ok_or_else(|| Error::NoRoot(root.to_owned()))?;
    let mut reader = TreeReader { parsed, tree: ModuleTree::default(), error: None };
    let module = reader.add_file(root, "crate".to_owned(), None);
    let (directory, _) = split_path(root);
    reader.read_file(file, module, directory);
    match reader.error {
        Some(error) => Err(error),
        None => Ok(reader.tree),
    }
}

struct TreeReader<'a> {
    parsed: &'a Parsed,
    tree: ModuleTree,
    /// The first error found in the crate.
    error: Option<Error>,
}

impl TreeReader<'_> {
    fn add_file(&mut self, path: &str, module: String, parent: Option<usize>) -> usize {
        self.tree.files.push(SourceFile { path: path.to_owned(), module });
        self.add_module(self.tree.files.len() - 1, parent)
    }

    fn add_module(&mut self, file: usize, parent: Option<usize>) -> usize {
        self.tree.modules.push(Module {
            file,
            parent,
            names: BTreeMap::new(),
            globs: Vec::new(),
            variables: BTreeSet::new(),
        });
        self.tree.modules.len() - 1
    }

    /// Reads a file of a module. `directory` contains the files of the module's children.
    fn read_file(&mut self, file: &File, module: usize, directory: &str) {
        ModuleVisitor { reader: self, module, directory: directory.to_owned(), blocks: 0 }.visit_file(file);
    }
}

/// Visits the code of one module in one file.
struct ModuleVisitor<'r, 'a> {
    reader: &'r mut TreeReader<'a>,
    module: usize,
    directory: String,
    /// Number of enclosing blocks. An item inside a function is not an item of the module.
    blocks: usize,
}

impl ModuleVisitor<'_, '_> {
    fn current_module(&mut self) -> &mut Module {
        &mut self.reader.tree.modules[self.module]
    }

    fn define(&mut self, ident: &syn::Ident, name: ItemName) {
        if self.blocks == 0 {
            self.current_module().names.entry(ident.to_string()).or_default().push(name);
        }
    }

    fn add_mention(&mut self, path: Vec<String>, line: usize) {
        self.reader.tree.mentions.push(PathMention { module: self.module, path, line });
    }

    fn add_mentions_in_tokens(&mut self, tokens: TokenStream) {
        for (path, line) in tokens::mentioned_paths(tokens) {
            self.add_mention(path, line);
        }
    }

    fn read_inline_module(&mut self, item: &ItemMod, items: &[Item]) {
        let file = self.current_module().file;
        let module = self.reader.add_module(file, Some(self.module));
        self.define(&item.ident, ItemName::Module(module));
        let directory = format!("{}/{}", self.directory, item.ident);
        let mut inner = ModuleVisitor { reader: &mut *self.reader, module, directory, blocks: 0 };
        for item in items {
            inner.visit_item(item);
        }
    }

    fn read_file_module(&mut self, item: &ItemMod) {
        let name = item.ident.to_string();
        let file = self.current_module().file;
        let parsed = self.reader.parsed;
        let declaring = &self.reader.tree.files[file];
        let found = match path_attribute(&item.attrs) {
            Some(path) => {
                Some(join_path(split_path(&declaring.path).0, &path)).map(|path| (split_path(&path).0.to_owned(), path))
            }
            None => {
                let children = format!("{}/{name}", self.directory);
                let candidates = [format!("{children}.rs"), format!("{children}/mod.rs")];
                candidates.into_iter().find(|path| parsed.contains_key(path)).map(|path| (children, path))
            }
        };
        let Some((children, path, file)) = found.and_then(|(children, path)| {
            let file = parsed.get(&path)?;
            Some((children, path, file))
        }) else {
            let line = item.ident.span().start().line;
            let error = Error::NoFile { path: declaring.path.clone(), line, name };
            self.reader.error.get_or_insert(error);
            return;
        };
        if is_only_in_test_builds(&file.attrs) {
            return;
        }
        let label = if declaring.module == "crate" { name } else { format!("{}::{name}", declaring.module) };
        let module = self.reader.add_file(&path, label, Some(self.module));
        self.define(&item.ident, ItemName::Module(module));
        self.reader.read_file(file, module, &children);
    }
}

impl<'ast> Visit<'ast> for ModuleVisitor<'_, '_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_only_in_test_builds(attributes(item)) {
            return;
        }
        match item {
            Item::Const(item) => self.define(&item.ident, ItemName::Value),
            Item::Fn(item) => self.define(&item.sig.ident, ItemName::Value),
            Item::Static(item) => self.define(&item.ident, ItemName::Value),
            Item::Enum(item) => self.define(&item.ident, ItemName::Type),
            Item::Struct(item) => self.define(&item.ident, ItemName::Type),
            Item::Trait(item) => self.define(&item.ident, ItemName::Type),
            Item::TraitAlias(item) => self.define(&item.ident, ItemName::Type),
            Item::Type(item) => self.define(&item.ident, ItemName::Type),
            Item::Union(item) => self.define(&item.ident, ItemName::Type),
            Item::Macro(item) => {
                if let Some(ident) = &item.ident {
                    self.define(ident, ItemName::Type);
                }
            }
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes: &[Attribute] = match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            _ => &[],
        };
        if !is_only_in_test_builds(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        match &item.content {
            Some((_, items)) => self.read_inline_module(item, items),
            None => self.read_file_module(item),
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_some() {
            return;
        }
        let mut names = Vec::new();
        flatten_use_tree(&item.tree, &mut Vec::new(), &mut names);
        let exported = !matches!(&item.vis, Visibility::Inherited);
        for ImportedName { path, name, line } in names {
            let import = self.reader.tree.imports.len();
            let glob = name.is_none();
            self.reader.tree.imports.push(Import { module: self.module, path, glob, exported, line });
            match name {
                Some(name) => self.current_module().names.entry(name).or_default().push(ItemName::Import(import)),
                None => self.current_module().globs.push(import),
            }
        }
    }

    fn visit_path(&mut self, path: &'ast Path) {
        let first = path.segments.first().filter(|_| path.leading_colon.is_none());
        if let Some(first) = first {
            let names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.add_mention(names, first.ident.span().start().line);
        }
        visit::visit_path(self, path);
    }

    fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
        let name = pattern.ident.to_string();
        if name.starts_with(char::is_lowercase) {
            self.current_module().variables.insert(name);
        }
        visit::visit_pat_ident(self, pattern);
    }

    fn visit_block(&mut self, block: &'ast Block) {
        self.blocks += 1;
        visit::visit_block(self, block);
        self.blocks -= 1;
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.visit_path(&mac.path);
        self.add_mentions_in_tokens(mac.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if attribute.path().is_ident("doc") || attribute.path().is_ident("path") {
            return;
        }
        if let Meta::List(list) = &attribute.meta {
            self.add_mentions_in_tokens(list.tokens.clone());
            for (path, line) in tokens::quoted_paths(list.tokens.clone()) {
                self.add_mention(path, line);
            }
        }
    }

    /// Ignores visibilities: `pub(in crate::a)` is not a use of `a`.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// One name that a `use` item imports.
struct ImportedName {
    path: Vec<String>,
    /// The imported name. `None` for `*`.
    name: Option<String>,
    line: usize,
}

fn flatten_use_tree(tree: &UseTree, prefix: &mut Vec<String>, names: &mut Vec<ImportedName>) {
    let line = tree.span().start().line;
    let with = |prefix: &[String], last: &syn::Ident| {
        let mut path = prefix.to_vec();
        // `a::{self}` imports `a`.
        if last != "self" || prefix.is_empty() {
            path.push(last.to_string());
        }
        path
    };
    match tree {
        UseTree::Path(tree) => {
            prefix.push(tree.ident.to_string());
            flatten_use_tree(&tree.tree, prefix, names);
            prefix.pop();
        }
        UseTree::Name(tree) => {
            let path = with(prefix, &tree.ident);
            let name = path.last().cloned();
            names.push(ImportedName { path, name, line });
        }
        UseTree::Rename(tree) => {
            let path = with(prefix, &tree.ident);
            names.push(ImportedName { path, name: Some(tree.rename.to_string()), line });
        }
        UseTree::Glob(_) => names.push(ImportedName { path: prefix.clone(), name: None, line }),
        UseTree::Group(tree) => {
            for item in &tree.items {
                flatten_use_tree(item, prefix, names);
            }
        }
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns the value of the attribute `#[path = "…"]`.
fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            Expr::Lit(value) => match &value.lit {
                Lit::Str(path) => Some(path.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    })
}

/// Splits a path into the directory and the name.
fn split_path(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or((".", path))
}

/// Joins `path` to `directory` and resolves each `..`.
fn join_path(directory: &str, path: &str) -> String {
    let mut names: Vec<&str> = directory.split('/').collect();
    for name in path.split('/') {
        match name {
            "." => {}
            ".." => {
                names.pop();
            }
            name => names.push(name),
        }
    }
    names.join("/")
}
