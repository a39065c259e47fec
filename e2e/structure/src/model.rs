//! The input and the output of the checks.
use std::collections::BTreeMap;

/// The code of a workspace, as text.
#[derive(Debug, Default)]
pub struct Sources {
    /// All Rust files of workspace members, by path in the repository. Paths use `/`.
    pub files: BTreeMap<String, String>,
    /// Other files with comments to check, by path in the repository.
    pub other_files: BTreeMap<String, String>,
    /// The crates to check, in the order in which findings are reported.
    pub crates: Vec<Crate>,
}

/// One library or program: a tree of modules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crate {
    /// The name of the package. For a program, `/` and the name of its root file follow.
    pub name: String,
    /// The path of the root file.
    pub root: String,
}

/// A violation of the rules for the structure of the code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The finding without line numbers, as the list of known findings contains it.
    pub what: String,
    /// Locations of the finding. Each is one line that starts with the file and the line number.
    pub locations: Vec<String>,
}
