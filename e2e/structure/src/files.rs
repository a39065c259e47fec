//! Reads the repository: its Rust files, their crates, and other files with comments. No other
//! module of this crate does I/O.
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::comments;
use crate::model::{Crate, Sources};

/// Path of the list of known findings, from the repository's root.
pub const KNOWN_FINDINGS: &str = "e2e/structure/known.txt";

/// Directories of a package that contain Rust code.
const CODE_DIRECTORIES: [&str; 4] = ["src", "tests", "benches", "examples"];

/// Directories that are not part of the repository.
const IGNORED_DIRECTORIES: [&str; 3] = [".git", ".gpu", "target"];

/// Reads the Rust files in the code directories of every member of the workspace at `root`, finds
/// the members' libraries and programs, and reads all other files whose comments are checked.
///
/// # Errors
/// Returns an error if a file cannot be read, or if a manifest contains no package name.
pub fn read_sources(root: &Path) -> Result<Sources> {
    let mut sources = Sources::default();
    let mut members = workspace_members(&read_text(&root.join("Cargo.toml"))?);
    members.sort();
    for member in members {
        let directory = if member == "." { String::new() } else { format!("{member}/") };
        let manifest = root.join(&member).join("Cargo.toml");
        let package =
            package_name(&read_text(&manifest)?).with_context(|| format!("{}: no package", manifest.display()))?;
        for code in CODE_DIRECTORIES {
            let path = root.join(&member).join(code);
            if path.is_dir() {
                visit_files(&path, &format!("{directory}{code}/"), &mut |path, file| {
                    if file.extension().is_some_and(|extension| extension == "rs") {
                        sources.files.insert(path, read_text(file)?);
                    }
                    Ok(())
                })?;
            }
        }
        let source = format!("{directory}src/");
        for path in sources.files.keys().filter_map(|path| path.strip_prefix(&source)) {
            let name = match path.strip_prefix("bin/").unwrap_or(path).trim_end_matches(".rs") {
                "lib" => package.clone(),
                program if path == "main.rs" || path.strip_prefix("bin/").is_some_and(|path| !path.contains('/')) => {
                    format!("{package}/{program}")
                }
                program if path.starts_with("bin/") && program.ends_with("/main") => {
                    format!("{package}/{}", program.trim_end_matches("/main"))
                }
                _ => continue,
            };
            sources.crates.push(Crate { name, root: format!("{source}{path}") });
        }
    }
    let Sources { files, other_files, .. } = &mut sources;
    visit_files(root, "", &mut |path, file| {
        if files.contains_key(&path) {
            return Ok(());
        }
        // Read the content, because the first line can show that the file's format has comments.
        // Binary files have no comments.
        let Ok(content) = String::from_utf8(read_bytes(file)?) else { return Ok(()) };
        if comments::comment_marker(&path, &content).is_some() {
            other_files.insert(path, content);
        }
        Ok(())
    })?;
    Ok(sources)
}

/// Calls `visit` for each file, with the path from the repository's root and the path on this
/// machine. `prefix` is the path of `directory` from the repository's root: empty, or ending in
/// `/`. Does not follow symbolic links.
fn visit_files(directory: &Path, prefix: &str, visit: &mut impl FnMut(String, &Path) -> Result<()>) -> Result<()> {
    let failed = || format!("failed to read {}", directory.display());
    for entry in fs::read_dir(directory).with_context(failed)? {
        let entry = entry.with_context(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().with_context(failed)?;
        if kind.is_dir() && !IGNORED_DIRECTORIES.contains(&name.as_str()) {
            visit_files(&entry.path(), &format!("{prefix}{name}/"), visit)?;
        } else if kind.is_file() {
            visit(format!("{prefix}{name}"), &entry.path())?;
        }
    }
    Ok(())
}

fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("failed to read {}", path.display()))
}

fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))
}

/// Returns the package's name from a package's manifest.
fn package_name(manifest: &str) -> Option<String> {
    let mut lines = manifest.lines().skip_while(|line| line.trim() != "[package]");
    let name = lines.find_map(|line| line.strip_prefix("name = "))?;
    Some(name.trim().trim_matches('"').to_owned())
}

/// Returns the members from a workspace's manifest, in which each member is on a separate line.
fn workspace_members(manifest: &str) -> Vec<String> {
    let lines = manifest.lines().map(str::trim).skip_while(|line| *line != "members = [").skip(1);
    let names = lines.take_while(|line| *line != "]").filter(|line| line.starts_with('"'));
    names.map(|line| line.trim_matches(|c| c == '"' || c == ',').to_owned()).collect()
}
