//! Checks references to the code on pages for contributors: each named file exists, and declares
//! the named item.
//!
//! A reference is a code span such as `crates/api/src/sharingpolicy.rs` or, with an item of that
//! file, `crates/api/src/sharingpolicy.rs::Mode`.
use std::path::Path;

/// Directories with which references start.
const REFERENCE_DIRECTORIES: [&str; 7] = ["charts/", "crates/", "deploy/", "docs/", "e2e/", "src/", "tests/"];
/// Keywords that declare an item.
const KEYWORDS: [&str; 8] = ["fn", "struct", "enum", "trait", "mod", "const", "static", "type"];

/// Returns the references of a page that do not exist, each as a sentence without the page.
pub(crate) fn find_problems(root: &Path, page: &str) -> Vec<String> {
    page.lines()
        .enumerate()
        .flat_map(|(index, line)| code_spans(line).map(move |span| (index + 1, span)))
        .filter_map(|(line, span)| {
            let (path, item) = span.split_once("::").map_or((span, None), |(path, item)| (path, Some(item)));
            if !REFERENCE_DIRECTORIES.iter().any(|directory| path.starts_with(directory)) || contains_placeholder(path)
            {
                return None;
            }
            let file = root.join(path);
            match item {
                _ if !file.exists() => Some(format!("{line}: there is no {path}")),
                Some(item) if !std::fs::read_to_string(&file).is_ok_and(|text| declares(&text, item)) => {
                    Some(format!("{line}: {path} declares no {item}"))
                }
                _ => None,
            }
        })
        .collect()
}

/// Returns whether a path has parts that readers replace, such as `TARGET`.
fn contains_placeholder(path: &str) -> bool {
    let placeholder = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_uppercase());
    path.contains(['<', '*', '{', ' ']) || path.split('/').any(placeholder)
}

/// Returns the code spans of a line.
fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Returns whether a Rust file declares an item.
fn declares(text: &str, item: &str) -> bool {
    let words =
        |line: &str| line.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned).collect::<Vec<_>>();
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.map(words).any(|words| words.windows(2).any(|pair| KEYWORDS.contains(&pair[0].as_str()) && pair[1] == item))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_names_a_file_and_an_item_of_it() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let right = "`docs/tool/src/code.rs::find_problems`, `docs/tool/src/code.rs` and `docs/tool`";
        assert_eq!(find_problems(&root, right), Vec::<String>::new());
        assert_eq!(find_problems(&root, "a\n`docs/tool/src/none.rs`"), ["2: there is no docs/tool/src/none.rs"]);
        let missing = "`docs/tool/src/code.rs::absent`";
        assert_eq!(find_problems(&root, missing), ["1: docs/tool/src/code.rs declares no absent"]);
    }

    #[test]
    fn code_outside_the_reference_directories_is_no_reference() {
        assert_eq!(
            find_problems(Path::new("."), "`kubectl get pods`, `e2e/<name>`, `e2e/TARGET/a`, `/run`"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn items_in_comments_are_not_declared() {
        assert!(declares("pub(crate) async fn run(self) {", "run"));
        assert!(!declares("// fn run()", "run") && !declares("fn runs()", "run"));
    }
}
