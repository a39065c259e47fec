//! Defines the input and the output of the checks.
use std::collections::BTreeMap;

/// The code of a workspace, as text.
#[derive(Debug, Default)]
pub struct Sources {
    /// The Rust files in the code directories of the workspace's members, by path from the
    /// repository's root. Paths use `/`.
    pub files: BTreeMap<String, String>,
    /// Other files whose comments are checked, by path from the repository's root.
    pub other_files: BTreeMap<String, String>,
    /// The crates to check. Findings are reported in this order.
    pub crates: Vec<Crate>,
}

/// One library or program: a tree of modules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crate {
    /// The name of the package. For a program, the package's name is followed by `/` and the
    /// program's name (`main` for `src/main.rs`).
    pub name: String,
    /// The path of the root file.
    pub root: String,
}

/// A violation of the rules for the structure of the code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The finding without line numbers, as a line of the list of known findings.
    pub description: String,
    /// Locations of the finding. Each is one line that starts with the file and the line number.
    pub locations: Vec<String>,
}
