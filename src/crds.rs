//! `cleave crds`: the custom resource definitions, printed, written or compared.
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use cleave_api::crds::files;

/// Prints the custom resource definitions as YAML: `cleave crds | kubectl apply --server-side -f -`.
#[derive(Debug, clap::Args)]
pub(crate) struct CrdsArgs {
    /// Write them to this directory, one file each.
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    write: Option<PathBuf>,
    /// Compare them with this directory, and fail where they differ.
    #[arg(long, value_name = "DIR")]
    check: Option<PathBuf>,
}

/// Prints, writes or compares the definitions.
pub(crate) fn run(args: &CrdsArgs) -> Result<()> {
    let files = files()?;
    if let Some(dir) = &args.write {
        for (name, text) in &files {
            let path = dir.join(name);
            std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        }
    } else if let Some(dir) = &args.check {
        for (name, text) in &files {
            let path = dir.join(name);
            let committed = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            ensure!(&committed == text, "{} is not what the types say: run `make crds`", path.display());
        }
    } else {
        for (_, text) in &files {
            print!("{text}");
        }
    }
    Ok(())
}
