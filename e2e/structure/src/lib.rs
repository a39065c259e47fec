//! Checks the structure of the workspace's code. The uses among the modules of a crate must not
//! form a cycle, files and functions must be short, and comments must wrap at 100 columns.
//!
//! In this library, no module except [`files`] does I/O: the other modules receive sources as text
//! and return findings.
//!
//! ```text
//! files ── Sources ──► parse ──► modules ──► uses ──► cycles ──┐
//!            │           └─────► length ───────────────────────┼─► Finding ──► known
//!            └─────────────────► comments ─────────────────────┘
//! ```
//!
//! In the graph, each file is a node. A file depends on the files that define the items it names.
//! The resolver follows a re-export to the definition. The graph omits test code, `mod`
//! declarations, and a module's `pub use` of items that its descendants define.
//!
//! Limits: a method call on a value does not name a module. A call of an inherent method that
//! another file defines therefore does not count as a use of that file. The resolver does not
//! expand macros, and reads only their arguments.
pub mod comments;
pub mod cycles;
pub mod files;
pub mod known;
pub mod length;
pub mod modules;
pub mod parse;
pub mod uses;

mod model;
mod tokens;

pub use model::{Crate, Finding, Sources};

/// Returns all findings about `sources`: the cycles of each crate, then long files, long functions
/// and wide comments.
///
/// # Errors
/// Returns an error if a file has a syntax error, or if the file of a module does not exist.
pub fn check(sources: &Sources) -> Result<Vec<Finding>, parse::Error> {
    let parsed = parse::parse(sources)?;
    let mut findings = Vec::new();
    for a_crate in &sources.crates {
        let tree = modules::read_modules(&parsed, &a_crate.root)?;
        findings.extend(cycles::find_cycles(&a_crate.name, &tree, &uses::uses_between_files(&tree)));
    }
    findings.extend(length::long_files(sources));
    findings.extend(length::long_functions(sources, &parsed));
    findings.extend(comments::wide_comments(sources));
    Ok(findings)
}
