//! The input and the output of the checks.
use std::collections::BTreeMap;

/// The code of a workspace, as text.
#[derive(Debug, Default)]
pub struct Sources {
    /// All Rust files of members by path in the repository, with `/` between names.
    pub files: BTreeMap<String, String>,
    /// Other files with comments to check, by path in the repository.
    pub other_files: BTreeMap<String, String>,
    /// The crates to check, in the order in which findings are reported.
    pub crates: Vec<Crate>,
}

/// One library or program: a tree of modules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crate {
    /// The package's name, and for a program `/` and the name of its root file.
    pub name: String,
    /// The path of the root file.
    pub root: String,
}

/// A violation of the rules for the structure of the code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The finding without line numbers, as in a line of the list of known findings.
    pub what: String,
    /// Locations of the finding. Each is one line that starts with the file and the line number.
    pub locations: Vec<String>,
}
