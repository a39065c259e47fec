//! Replaces the generated parts of hand-written pages.
//!
//! `<!-- generated: NAME -->` starts a generated part, and `<!-- end of generated -->` ends the
//! part.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail};

const START_MARKER: &str = "<!-- generated: ";
const END_MARKER: &str = "<!-- end of generated -->\n";

/// Replaces each generated part of a page with the result of `content` for the part's name. Fails
/// if `content` fails, if a part has no end, or if the page lacks a part that `required` names.
pub(crate) fn fill_generated_parts(
    page: &str,
    required: &[String],
    content: impl Fn(&str) -> Result<String>,
) -> Result<String> {
    let mut out = String::with_capacity(page.len());
    let mut rest = page;
    let mut found: Vec<&str> = Vec::new();
    while let Some((before, after)) = rest.split_once(START_MARKER) {
        let (name, after) = after.split_once(" -->\n").context("a generated part has no name")?;
        let (_, after) =
            after.split_once(END_MARKER).with_context(|| format!("the generated part {name} has no end"))?;
        let text = content(name).with_context(|| format!("failed to generate the part {name}"))?;
        for piece in [before, START_MARKER, name, " -->\n\n", text.trim(), "\n\n", END_MARKER] {
            out.push_str(piece);
        }
        found.push(name);
        rest = after;
    }
    out.push_str(rest);
    match required.iter().find(|name| !found.contains(&name.as_str())) {
        Some(missing) => bail!("the page has no part {START_MARKER}{missing} -->"),
        None => Ok(out),
    }
}

/// Formats a Markdown table.
pub(crate) fn format_table(head: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut out = line(head.iter().map(|&cell| cell.to_owned()).collect());
    let _ = writeln!(out, "|{}", "---|".repeat(head.len()));
    for row in rows {
        out.push_str(&line(row.iter().map(|cell| cell.replace('|', "\\|")).collect()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_WITH_PART: &str = "# A\n\n<!-- generated: b -->\nold\n<!-- end of generated -->\n\nText.\n";

    #[test]
    fn the_generated_part_is_replaced_and_the_other_text_is_kept() -> Result<()> {
        let filled = fill_generated_parts(PAGE_WITH_PART, &["b".to_owned()], |name| Ok(format!("new {name}\n")))?;
        assert_eq!(filled, "# A\n\n<!-- generated: b -->\n\nnew b\n\n<!-- end of generated -->\n\nText.\n");
        assert_eq!(
            fill_generated_parts(&filled, &[], |name| Ok(format!("new {name}")))?,
            filled,
            "filling twice changes nothing"
        );
        Ok(())
    }

    #[test]
    fn a_missing_part_and_a_missing_end_are_errors() {
        let content = |_: &str| Ok(String::new());
        assert!(fill_generated_parts(PAGE_WITH_PART, &["c".to_owned()], content).is_err());
        assert!(fill_generated_parts("<!-- generated: b -->\n", &[], content).is_err());
    }
}
