//! Generates the reference pages of the documentation site, and checks the site.
//!
//! The tool reads only files of the repository and the built site, and needs no network and no
//! cluster. `docs/build` runs this tool.
mod chart_values;
mod cli;
mod code_references;
mod crd;
mod diagram;
mod events;
mod generated_parts;
mod kubernetes_versions;
mod links;
mod metrics;
mod pages;
mod text_file;
mod wrapping;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser as _;
use cleave_api::{GpuNode, GpuQuota, SharingPolicy};
use kube::CustomResourceExt as _;

use crate::text_file::read_text_file;

/// Generates reference pages and checks the documentation site.
#[derive(Debug, clap::Parser)]
enum Command {
    /// Write the generated reference pages, the generated parts of other pages, and the diagrams.
    Generate {
        /// Root of the repository.
        #[arg(long, default_value = ".")]
        root: PathBuf,
        /// Write nothing, and fail if a committed page or diagram differs from the generated page
        /// or diagram.
        #[arg(long)]
        check: bool,
    },
    /// Check the pages: line length, table of contents, commands, references to the code, links,
    /// and reasons of Events and conditions.
    Pages {
        /// Root of the repository.
        #[arg(long, default_value = ".")]
        root: PathBuf,
    },
    /// Check the internal links and anchors of the built site.
    Links {
        /// Directory of the built site.
        site: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cleave-docs: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Generate { root, check } => generate(&root, check),
        Command::Pages { root } => {
            print_problems(&[pages::find_problems(&root)?, events::find_problems(&root)?].concat())
        }
        Command::Links { site } => print_problems(&links::find_problems(&site)?),
    }
}

/// Writes the generated pages and diagrams, or compares them with the committed ones.
fn generate(root: &Path, check: bool) -> Result<()> {
    let chart = root.join("charts/cleave");
    let written = |name: &str| read_text_file(&root.join("docs/reference").join(name));
    let pages = [
        ("sharingpolicy.md", crd::render_page(&serde_json::to_value(SharingPolicy::crd())?)?),
        ("gpuquota.md", crd::render_page(&serde_json::to_value(GpuQuota::crd())?)?),
        ("gpunode.md", crd::render_page(&serde_json::to_value(GpuNode::crd())?)?),
        ("cli.md", cli::render_page(&written("cli.md")?)?),
        ("events.md", events::render_page(&written("events.md")?)?),
        ("metrics.md", metrics::render_page(root, &written("metrics.md")?)?),
        (
            "values.md",
            chart_values::render_page(
                &read_text_file(&chart.join("values.yaml"))?,
                &read_text_file(&chart.join("values.schema.json"))?,
            )?,
        ),
    ];
    let mut outputs: Vec<(PathBuf, String)> =
        pages.into_iter().map(|(name, page)| (root.join("docs/reference").join(name), page)).collect();
    let install = root.join("docs/how-to/install.md");
    let page = kubernetes_versions::render_page(root, &read_text_file(&install)?)?;
    outputs.push((install, page));
    let directory = root.join("docs/diagrams");
    for entry in std::fs::read_dir(&directory).with_context(|| format!("failed to list {}", directory.display()))? {
        let text = entry?.path();
        if text.extension().is_some_and(|extension| extension == "txt") {
            let svg = diagram::render_svg(&read_text_file(&text)?)
                .with_context(|| format!("failed to draw {}", text.display()))?;
            outputs.push((text.with_extension("svg"), svg));
        }
    }
    for (path, page) in outputs {
        if check {
            let committed = read_text_file(&path)?;
            ensure!(committed == page, "{} is outdated: run `make docs` and commit it", path.display());
        } else {
            std::fs::write(&path, page).with_context(|| format!("failed to write {}", path.display()))?;
        }
    }
    Ok(())
}

/// Prints the problems. Returns an error if the list is not empty.
fn print_problems(problems: &[String]) -> Result<()> {
    for problem in problems {
        eprintln!("{problem}");
    }
    if problems.is_empty() { Ok(()) } else { bail!("{} problems in the documentation", problems.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository_root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    #[test]
    fn the_committed_reference_pages_match_the_code() -> Result<()> {
        generate(&repository_root(), true)
    }

    #[test]
    fn the_committed_pages_have_no_problems() -> Result<()> {
        assert_eq!(pages::find_problems(&repository_root())?, Vec::<String>::new());
        Ok(())
    }

    #[test]
    fn the_tables_list_every_reason_that_the_code_writes() -> Result<()> {
        assert_eq!(events::find_problems(&repository_root())?, Vec::<String>::new());
        Ok(())
    }
}
