//! Compares output with committed files.

/// Compares `actual` with the file `name` below `tests`. `UPDATE_EXPECTED=1 cargo test -p
/// cleave-cli` writes the file first.
pub(crate) fn assert_matches_file(name: &str, actual: &str) {
    let path = format!("{}/tests/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_EXPECTED").is_some() {
        std::fs::write(&path, actual).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    assert!(expected == actual, "{path} has\n{expected}\nand the output is\n{actual}");
}
