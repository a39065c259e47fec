//! Checks references to the code on pages for contributors: each named file must exist and declare
//! the named item.
//!
//! A reference is a code span such as `crates/api/src/sharingpolicy.rs` or, with an item of that
//! file, `crates/api/src/sharingpolicy.rs::Mode`. A name without a file, such as `is_served`, must
//! occur in a file that the page names.
use std::collections::BTreeSet;
use std::path::Path;

/// Directories that a reference can start with.
const REFERENCE_DIRECTORIES: [&str; 8] = ["charts/", "crates/", "deploy/", "docs/", "e2e/", "proto/", "src/", "tests/"];
/// Keywords that declare an item.
const ITEM_KEYWORDS: [&str; 8] = ["fn", "struct", "enum", "trait", "mod", "const", "static", "type"];

/// Returns the broken references of a page, each as a sentence that starts with a line number.
pub(crate) fn find_problems(root: &Path, page: &str) -> Vec<String> {
    let words = words_of_named_files(root, page);
    page.lines()
        .enumerate()
        .flat_map(|(index, line)| code_spans(line).map(move |span| (index + 1, span)))
        .filter_map(|(line, span)| {
            let Some((path, item)) = parse_reference(span) else {
                let unknown = is_bare_name(span) && !words.contains(span);
                return unknown.then(|| format!("{line}: no file named on this page contains {span}"));
            };
            let file = root.join(path);
            match item {
                _ if !file.exists() => Some(format!("{line}: there is no {path}")),
                Some(item) if !std::fs::read_to_string(&file).is_ok_and(|text| declares_item(&text, item)) => {
                    Some(format!("{line}: {path} declares no {item}"))
                }
                _ => None,
            }
        })
        .collect()
}

/// Returns the path and the item of a reference. Returns `None` if the code span is not a
/// reference.
fn parse_reference(span: &str) -> Option<(&str, Option<&str>)> {
    let (path, item) = span.split_once("::").map_or((span, None), |(path, item)| (path, Some(item)));
    let starts = REFERENCE_DIRECTORIES.iter().any(|directory| path.starts_with(directory));
    (starts && !contains_placeholder(path)).then_some((path, item))
}

/// Returns whether a code span is a name in Rust code without a file: lower case, with an
/// underscore. Other names may belong to Kubernetes or to a file format.
fn is_bare_name(span: &str) -> bool {
    span.contains('_')
        && span.starts_with(|c: char| c.is_ascii_lowercase())
        && span.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

/// Returns all words in the files that a page names.
fn words_of_named_files(root: &Path, page: &str) -> BTreeSet<String> {
    let paths: BTreeSet<&str> =
        page.lines().flat_map(code_spans).filter_map(parse_reference).map(|(path, _)| path).collect();
    let texts = paths.into_iter().filter_map(|path| std::fs::read_to_string(root.join(path)).ok());
    texts.flat_map(|text| words(&text).map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Returns whether a path contains a placeholder, such as `TARGET`.
fn contains_placeholder(path: &str) -> bool {
    let placeholder = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_uppercase());
    path.contains(['<', '*', '{', ' ']) || path.split('/').any(placeholder)
}

/// Returns the code spans of a line.
fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Returns whether a Rust file declares an item.
fn declares_item(text: &str, item: &str) -> bool {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let mut lines = code.map(|line| words(line).collect::<Vec<_>>());
    lines.any(|words| words.windows(2).any(|pair| ITEM_KEYWORDS.contains(&pair[0]) && pair[1] == item))
}

/// Returns the words of a text: sequences of letters, digits and underscores.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_must_name_an_existing_file_and_item() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let right =
            "`docs/tool/src/code_references.rs::find_problems`, `docs/tool/src/code_references.rs` and `docs/tool`";
        assert_eq!(find_problems(&root, right), Vec::<String>::new());
        assert_eq!(find_problems(&root, "a\n`docs/tool/src/none.rs`"), ["2: there is no docs/tool/src/none.rs"]);
        let missing = "`docs/tool/src/code_references.rs::absent`";
        assert_eq!(find_problems(&root, missing), ["1: docs/tool/src/code_references.rs declares no absent"]);
    }

    #[test]
    fn a_name_without_a_file_must_occur_in_a_file_that_the_page_names() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let page = |name: &str| format!("`docs/tool/src/pages.rs`\n`{name}`");
        for known in ["find_problems", "absent", "Absent_name", "ABSENT_NAME", "an_absent name"] {
            assert_eq!(find_problems(&root, &page(known)), Vec::<String>::new(), "{known}");
        }
        let unknown = ["2: no file named on this page contains is_bare_name"];
        assert_eq!(find_problems(&root, &page("is_bare_name")), unknown, "the page does not name code_references.rs");
    }

    #[test]
    fn a_code_span_outside_the_reference_directories_is_not_a_reference() {
        assert_eq!(
            find_problems(Path::new("."), "`kubectl get pods`, `e2e/<name>`, `e2e/TARGET/a`, `/run`"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn an_item_in_a_comment_is_not_a_declaration() {
        assert!(declares_item("pub(crate) async fn run(self) {", "run"));
        assert!(!declares_item("// fn run()", "run") && !declares_item("fn runs()", "run"));
    }
}
