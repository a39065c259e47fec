//! Finds comments that are too wide.
use crate::model::{Finding, Sources};

/// Maximum number of characters in a line of a comment, including the indentation.
const MAX_COMMENT_WIDTH: usize = 100;

/// Characters that start a comment in Rust and Go.
const SLASH_MARKER: &str = "//";
/// Characters that start a comment in YAML, TOML, makefiles and scripts.
const HASH_MARKER: &str = "#";

/// Finds the files with lines of comments that are over 100 characters wide. Each finding contains
/// the number of these lines.
pub fn wide_comments(sources: &Sources) -> Vec<Finding> {
    let mut found: Vec<Finding> = sources
        .files
        .iter()
        .chain(&sources.other_files)
        .filter_map(|(path, text)| find_wide_comments(path, text))
        .collect();
    found.sort_by(|a, b| a.description.cmp(&b.description));
    found
}

fn find_wide_comments(path: &str, text: &str) -> Option<Finding> {
    let marker = comment_marker(path, text)?;
    let locations: Vec<String> = text
        .lines()
        .enumerate()
        .filter(|(_, line)| line.chars().count() > MAX_COMMENT_WIDTH && is_prose(line, marker))
        .map(|(at, line)| {
            format!("{path}:{}: {} characters, at most {MAX_COMMENT_WIDTH}", at + 1, line.chars().count())
        })
        .collect();
    (!locations.is_empty())
        .then(|| Finding { description: format!("wide-comment {path} {}", locations.len()), locations })
}

/// Returns the characters that start a comment in the file. Returns `None` if comments in the
/// file's format are not checked, or if the file is a generated manifest.
pub(crate) fn comment_marker(path: &str, text: &str) -> Option<&'static str> {
    if path == "deploy/manifests.yaml" || path.starts_with("crds/") {
        return None;
    }
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "rs" | "go" => Some(SLASH_MARKER),
        "sh" | "py" | "yaml" | "yml" | "toml" => Some(HASH_MARKER),
        "" if matches!(name, "Makefile" | "Containerfile") || text.starts_with("#!") => Some(HASH_MARKER),
        _ => None,
    }
}

/// Returns whether the line is part of a comment and can be wrapped. Directives, rows of tables and
/// addresses cannot be wrapped.
fn is_prose(line: &str, marker: &str) -> bool {
    let Some(comment) = line.trim_start().strip_prefix(marker) else { return false };
    if marker == SLASH_MARKER && comment.starts_with("go:") {
        return false;
    }
    let content = comment.trim_start_matches(['/', '!', '#']).trim();
    if content.starts_with('|') && content.ends_with('|') {
        return false;
    }
    // In Markdown, a link definition `[name]: address` must be on one line.
    let content = content.rsplit_once("]: ").map_or(content, |(_, address)| address);
    let address = content.trim_start_matches('<');
    let is_address = address.starts_with("https://") || address.starts_with("http://");
    !is_address || address.contains(char::is_whitespace)
}
