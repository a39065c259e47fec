//! Checks the built site: the target and the anchor of each link within the site must exist.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::text_file::read_text_file;

/// Pages that the check skips: mdBook generates them, and their links are not relative to the page
/// itself.
const SKIPPED_PAGES: [&str; 3] = ["print.html", "toc.html", "404.html"];

/// A page: the ids of its elements, and the targets of its links.
#[derive(Debug, Default)]
struct LinkedPage {
    ids: BTreeSet<String>,
    links: BTreeSet<String>,
}

/// Returns the broken internal links of the built site, each as a sentence.
pub(crate) fn find_problems(site: &Path) -> Result<Vec<String>> {
    let mut files = BTreeSet::new();
    collect_files(site, &mut files)?;
    let mut pages = BTreeMap::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "html")) {
        pages.insert(file.clone(), parse_page(&read_text_file(file)?));
    }
    let mut problems = Vec::new();
    let combined =
        |file: &Path| file.file_name().is_some_and(|name| SKIPPED_PAGES.iter().any(|combined| name == *combined));
    for (file, page) in pages.iter().filter(|(file, _)| !combined(file)) {
        for link in page.links.iter().filter(|link| is_internal(link)) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = resolve_link(file, path);
            let name = file.strip_prefix(site).unwrap_or(file).display();
            if !files.contains(&target) {
                problems.push(format!("{name}: the target of {link} does not exist"));
            } else if !anchor.is_empty() && pages.get(&target).is_some_and(|page| !page.ids.contains(anchor)) {
                problems.push(format!("{name}: {link} refers to no heading"));
            }
        }
    }
    Ok(problems)
}

/// Collects all files below a directory.
fn collect_files(directory: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(directory).with_context(|| format!("failed to list {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            collect_files(&path, files)?;
        } else {
            files.insert(path);
        }
    }
    Ok(())
}

/// Reads the ids and links of a page.
fn parse_page(html: &str) -> LinkedPage {
    let attributes = |name: &str| {
        let opening = format!(" {name}=\"");
        html.split(&opening)
            .skip(1)
            .filter_map(|rest| rest.split_once('"'))
            .map(|(value, _)| value.replace("&amp;", "&"))
            .collect::<BTreeSet<String>>()
    };
    let mut links = attributes("href");
    links.extend(attributes("src"));
    LinkedPage { ids: attributes("id"), links }
}

fn is_internal(link: &str) -> bool {
    let scheme = link.split_once(':').is_some_and(|(scheme, _)| scheme.chars().all(|c| c.is_ascii_alphanumeric()));
    !scheme && !link.starts_with("//")
}

/// Returns the file that a page's link refers to.
fn resolve_link(page: &Path, link: &str) -> PathBuf {
    if link.is_empty() {
        return page.to_owned();
    }
    let directory = page.parent().unwrap_or(page);
    let mut target = PathBuf::new();
    for component in directory.join(link).components() {
        match component {
            Component::ParentDir => {
                target.pop();
            }
            Component::CurDir => {}
            other => target.push(other),
        }
    }
    if link.ends_with('/') { target.join("index.html") } else { target }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ids_and_links_of_a_page_are_parsed() {
        let page = parse_page(
            r##"<h2 id="a"><a class="header" href="#a">A</a></h2><a href="b.html#c">B</a><img src="d.png">"##,
        );
        assert_eq!(page.ids.iter().collect::<Vec<_>>(), ["a"]);
        assert_eq!(page.links.iter().collect::<Vec<_>>(), ["#a", "b.html#c", "d.png"]);
    }

    #[test]
    fn relative_links_are_resolved_from_their_page() {
        let resolved = |link| resolve_link(Path::new("/site/how-to/a.html"), link);
        assert_eq!(resolved(""), Path::new("/site/how-to/a.html"));
        assert_eq!(resolved("../index.html"), Path::new("/site/index.html"));
        assert_eq!(resolved("b.html"), Path::new("/site/how-to/b.html"));
    }

    #[test]
    fn links_to_other_sites_are_not_internal() {
        assert!(is_internal("b.html#c") && is_internal("#c"));
        assert!(!is_internal("https://example.com") && !is_internal("mailto:a@b"));
    }
}
