//! Resolves imports and paths to the files that contain the definitions.
use std::collections::{BTreeMap, BTreeSet};

use crate::modules::{Import, ItemName, ModuleTree};

/// Uses of one file by another file. Maps the indices of both files to the line of the first use.
/// The line of a `use` item takes precedence.
pub type Uses = BTreeMap<(usize, usize), usize>;

/// The definition to which a path resolves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ResolvedPath {
    /// A module itself, by index.
    Module(usize),
    /// An item that the module with this index defines.
    Item(usize),
}

/// Returns every use of one file by another file, except re-exports of items that descendants of a
/// module define.
pub fn uses_between_files(tree: &ModuleTree) -> Uses {
    let mut lines: BTreeMap<(usize, usize), (bool, usize)> = BTreeMap::new();
    let resolver = Resolver { tree };
    let mut add = |from: usize, target: ResolvedPath, in_code: bool, line: usize| {
        // A path that ends at a module does not use the module's content. Only a path through the
        // module uses the content.
        let ResolvedPath::Item(to) = target else { return };
        let (from, to) = (tree.modules[from].file, tree.modules[to].file);
        if from != to {
            let first = lines.entry((from, to)).or_insert((in_code, line));
            *first = (*first).min((in_code, line));
        }
    };
    for import in tree.imports.iter().filter(|import| !import.glob) {
        for target in resolver.resolve_path(import.module, &import.path, &mut BTreeSet::new()) {
            if !(import.exported && resolver.is_in_descendant(import, target)) {
                add(import.module, target, false, import.line);
            }
        }
    }
    for mention in &tree.mentions {
        let variable =
            matches!(mention.path.as_slice(), [name] if tree.modules[mention.module].variables.contains(name));
        if !variable {
            for target in resolver.resolve_path(mention.module, &mention.path, &mut BTreeSet::new()) {
                add(mention.module, target, true, mention.line);
            }
        }
    }
    lines.into_iter().map(|(files, (_, line))| (files, line)).collect()
}

struct Resolver<'a> {
    tree: &'a ModuleTree,
}

impl Resolver<'_> {
    /// Returns whether `target`, which an import names, is an item of a descendant of the import's
    /// module.
    fn is_in_descendant(&self, import: &Import, target: ResolvedPath) -> bool {
        let ResolvedPath::Item(mut module) = target else { return false };
        while let Some(parent) = self.tree.modules[module].parent {
            if parent == import.module {
                return true;
            }
            module = parent;
        }
        false
    }

    /// Returns the definitions to which `path` resolves from `module`. The result is empty if the
    /// path leads to another crate or starts with `Self`. `followed` contains the imports that the
    /// search has already followed, so that the search ends if imports are circular.
    fn resolve_path(&self, module: usize, path: &[String], followed: &mut BTreeSet<usize>) -> BTreeSet<ResolvedPath> {
        let Some((first, mut rest)) = path.split_first() else { return BTreeSet::new() };
        let mut start = module;
        match first.as_str() {
            "crate" => start = 0,
            "self" => {}
            "super" => start = self.parent(start),
            "Self" => return BTreeSet::new(),
            _ => return self.resolve_name(module, first, rest, followed),
        }
        while let Some((_, further)) = rest.split_first().filter(|(name, _)| *name == "super") {
            start = self.parent(start);
            rest = further;
        }
        self.resolve_within(start, rest, followed)
    }

    fn parent(&self, module: usize) -> usize {
        self.tree.modules[module].parent.unwrap_or(module)
    }

    /// Returns the definitions to which `path` resolves within `module`. If a name is not found,
    /// assumes that a macro defines the name.
    fn resolve_within(&self, module: usize, path: &[String], followed: &mut BTreeSet<usize>) -> BTreeSet<ResolvedPath> {
        let Some((first, rest)) = path.split_first() else { return BTreeSet::from([ResolvedPath::Module(module)]) };
        let found = self.resolve_name(module, first, rest, followed);
        if found.is_empty() && !self.has_name(module, first) {
            BTreeSet::from([ResolvedPath::Item(module)])
        } else {
            found
        }
    }

    fn has_name(&self, module: usize, name: &str) -> bool {
        self.tree.modules[module].names.contains_key(name)
    }

    /// Returns the definitions to which `name` followed by `rest` resolves in the scope of
    /// `module`.
    fn resolve_name(
        &self,
        module: usize,
        name: &str,
        rest: &[String],
        followed: &mut BTreeSet<usize>,
    ) -> BTreeSet<ResolvedPath> {
        let mut found = BTreeSet::new();
        for name in self.tree.modules[module].names.get(name).into_iter().flatten() {
            match *name {
                ItemName::Module(child) => found.extend(self.resolve_within(child, rest, followed)),
                ItemName::Type => _ = found.insert(ResolvedPath::Item(module)),
                // A function or constant contains no items, so a longer path means another item
                // with this name.
                ItemName::Value if rest.is_empty() => _ = found.insert(ResolvedPath::Item(module)),
                ItemName::Value => {}
                ItemName::Import(import) => found.extend(self.resolve_import(import, rest, followed)),
            }
        }
        if self.has_name(module, name) {
            return found;
        }
        for &glob in &self.tree.modules[module].globs {
            if followed.insert(glob) {
                let import = &self.tree.imports[glob];
                for target in self.resolve_path(import.module, &import.path, followed) {
                    if let ResolvedPath::Module(of) = target {
                        found.extend(self.resolve_name(of, name, rest, followed));
                    }
                }
                followed.remove(&glob);
            }
        }
        found
    }

    fn resolve_import(&self, import: usize, rest: &[String], followed: &mut BTreeSet<usize>) -> BTreeSet<ResolvedPath> {
        if !followed.insert(import) {
            return BTreeSet::new();
        }
        let Import { module, path, .. } = &self.tree.imports[import];
        let mut found = BTreeSet::new();
        for target in self.resolve_path(*module, path, followed) {
            match target {
                ResolvedPath::Module(of) => found.extend(self.resolve_within(of, rest, followed)),
                ResolvedPath::Item(_) => _ = found.insert(target),
            }
        }
        followed.remove(&import);
        found
    }
}
