//! Tests that the list of known findings matches the findings in this repository.
use std::fs;
use std::path::Path;

use cleave_structure::{check, files, known};

const WRITE_COMMAND: &str = "cargo run -p cleave-structure -- --write";

#[test]
fn the_repository_has_only_known_findings() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let sources = files::read_sources(root).unwrap();
    for crate_root in [
        "src/main.rs",
        "src/bin/cleave-agent.rs",
        "crates/dra/src/lib.rs",
        "crates/plan/src/lib.rs",
        "e2e/structure/src/lib.rs",
    ] {
        assert!(sources.crates.iter().any(|a_crate| a_crate.root == crate_root), "{crate_root} is not checked");
    }
    for other in ["Makefile", "e2e/test", "charts/cleave/values.yaml", "e2e/cluster/launcher/main.go"] {
        assert!(sources.other_files.contains_key(other), "{other} is not checked");
    }
    let findings = check(&sources).unwrap();
    let known = fs::read_to_string(root.join(files::KNOWN_FINDINGS)).unwrap();
    let difference = known::compare_with_list(&findings, &known);
    let new: String = difference
        .new
        .iter()
        .map(|finding| format!("{}\n  {}\n", finding.description, finding.locations.join("\n  ")))
        .collect();
    assert!(new.is_empty(), "new findings, to be resolved:\n{new}");
    assert!(
        difference.obsolete.is_empty(),
        "no longer found, to be removed from {} with `{WRITE_COMMAND}`:\n{}",
        files::KNOWN_FINDINGS,
        difference.obsolete.join("\n")
    );
}
