//! Prints the findings about the structure of the code, and can also write the list of known
//! findings.
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser as _;
use cleave_structure::{check, files, known};

/// Finds cycles of uses among modules, files over 800 lines, functions over 80 lines and comments
/// over 100 columns.
#[derive(Debug, clap::Parser)]
struct Options {
    /// Root of the repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
    /// Write the list of known findings.
    #[arg(long)]
    write: bool,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cleave-structure: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let findings = check(&files::read_sources(&options.root)?)?;
    for finding in &findings {
        println!("{}", finding.description);
        for place in &finding.locations {
            println!("  {place}");
        }
    }
    if options.write {
        let path = options.root.join(files::KNOWN_FINDINGS);
        fs::write(&path, known::format_list(&findings))
            .with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(())
}
