//! `cleave crds`: prints, writes or compares the custom resource definitions.
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use cleave_api::crds::crd_files;

use crate::output::print;

/// Examples in the help of `cleave crds`.
pub(crate) const HELP_EXAMPLES: &str = "\
Examples:
  cleave crds | kubectl apply --server-side -f -";

/// Options of `cleave crds`.
#[derive(Debug, clap::Args)]
pub struct CrdsArgs {
    /// Write one file per CRD to this directory.
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    write: Option<PathBuf>,
    /// Compare with the files in this directory; fail if they differ.
    #[arg(long, value_name = "DIR")]
    check: Option<PathBuf>,
}

/// Runs `cleave crds`.
///
/// # Errors
/// Returns an error if a file cannot be read or written, or differs from the CRDs.
pub(crate) fn run(args: &CrdsArgs) -> Result<()> {
    let files = crd_files()?;
    if let Some(dir) = &args.write {
        for (name, text) in &files {
            let path = dir.join(name);
            std::fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))?;
        }
    } else if let Some(dir) = &args.check {
        for (name, text) in &files {
            let path = dir.join(name);
            let committed = std::fs::read_to_string(&path);
            let committed = committed.with_context(|| format!("failed to read {}", path.display()))?;
            ensure!(&committed == text, "{} is out of date. Run `make crds`.", path.display());
        }
    } else {
        for (_, text) in &files {
            print(text)?;
        }
    }
    Ok(())
}
