//! Checks the Markdown pages: line length, the table of contents, the comments on command blocks,
//! references to the code, and links between files.
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use cleave_docs_commands::parse_blocks;

use crate::code_references;
use crate::text_file::read_text_file;
use crate::wrapping::MAX_LINE_COLUMNS;

/// Directories with pages of the site.
const PAGE_DIRECTORIES: [&str; 7] =
    ["tutorial", "how-to", "runbooks", "reference", "explanation", "contributing", "decisions"];
/// Directories of pages on which each command block needs a comment that states how the block is
/// tested.
const DIRECTORIES_WITH_COMMANDS: [&str; 2] = ["tutorial", "how-to"];
/// Pages outside [`PAGE_DIRECTORIES`].
const OTHER_PAGES: [&str; 6] =
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/README.md"];
/// Pages outside docs/contributing that name files and items of the code.
const PAGES_WITH_CODE: [&str; 2] = ["CONTRIBUTING.md", "docs/explanation/architecture.md"];

/// Returns the problems of the pages, each as a sentence.
pub(crate) fn find_problems(root: &Path) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let summary = read_text_file(&root.join("docs/SUMMARY.md"))?;
    let mut pages: Vec<PathBuf> = OTHER_PAGES.iter().map(PathBuf::from).collect();
    for directory in PAGE_DIRECTORIES {
        let path = root.join("docs").join(directory);
        for entry in std::fs::read_dir(&path).with_context(|| format!("failed to list {}", path.display()))? {
            let name = entry?.file_name();
            let page = format!("{directory}/{}", name.to_string_lossy());
            if !summary.contains(&format!("({page})")) {
                problems.push(format!("docs/{page} is not in docs/SUMMARY.md"));
            }
            pages.push(Path::new("docs").join(page));
        }
    }
    pages.sort();
    for page in &pages {
        let text = read_text_file(&root.join(page))?;
        let name = page.display();
        problems.extend(
            long_lines(&text).into_iter().map(|line| format!("{name}:{line}: longer than {MAX_LINE_COLUMNS} columns")),
        );
        if DIRECTORIES_WITH_COMMANDS.iter().any(|directory| page.starts_with(Path::new("docs").join(directory))) {
            problems.extend(parse_blocks(&text).1.into_iter().map(|problem| format!("{name}:{problem}")));
        }
        if name.to_string().starts_with("docs/contributing/") || PAGES_WITH_CODE.contains(&name.to_string().as_str()) {
            problems.extend(
                code_references::find_problems(root, &text).into_iter().map(|problem| format!("{name}:{problem}")),
            );
        }
        let directory = root.join(page).parent().map(Path::to_owned).unwrap_or_default();
        let missing = relative_links(&text).into_iter().filter(|link| !directory.join(link).exists());
        problems.extend(missing.map(|link| format!("{name}: the target of {link} does not exist")));
    }
    Ok(problems)
}

/// Returns the numbers of lines that are too long. Tables, code blocks, and lines that consist of a
/// link or a link's address may be long.
fn long_lines(text: &str) -> Vec<usize> {
    let mut in_code = false;
    let mut long = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code
            && !line.starts_with('|')
            && !is_unbreakable_link(line)
            && line.chars().count() > MAX_LINE_COLUMNS
        {
            long.push(index + 1);
        }
    }
    long
}

/// Returns whether a line is `[name]: address`, or a single link without spaces.
fn is_unbreakable_link(line: &str) -> bool {
    line.starts_with('[') && line.contains("]: ") || !line.trim().contains(char::is_whitespace) && line.contains("](")
}

/// Returns the targets of the relative links in a Markdown text, without anchors.
fn relative_links(text: &str) -> Vec<String> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    let relative = targets.filter(|target| !target.contains("://") && !target.starts_with('#'));
    relative.map(|target| target.split('#').next().unwrap_or(target).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_tables_and_code_may_be_long() {
        let long = "x".repeat(MAX_LINE_COLUMNS + 1);
        let text = format!("| {long} |\n```\n{long}\n```\n{long}\n");
        assert_eq!(long_lines(&text), [5]);
        assert!(long_lines(&format!("[a]: {long}\n[a]({long})\n")).is_empty());
    }

    #[test]
    fn links_to_files_are_found_without_their_anchors() {
        assert_eq!(relative_links("[a](b.md#c) [d](#e) [f](https://g.h/i.md) [j](../k.md)"), ["b.md", "../k.md"]);
    }
}
