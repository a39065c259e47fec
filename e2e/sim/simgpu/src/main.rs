//! Creates, shows and changes the simulated machine and its faults.

mod arguments;
mod change;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use sim_machine::{GpuDescription, Machine, MachineDescription};

use arguments::{Arguments, Command, MigCommand, OutputFormat};

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("simgpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<()> {
    if let Command::Models = arguments.command {
        print!("{}", show::format_models()?);
        return Ok(());
    }
    if let Command::Init { gpus, file, topology, machine } = &arguments.command {
        let mut description = build_description(gpus, file.as_ref(), machine)?;
        description.topology = topology.or(description.topology);
        let machine = Machine::init(&arguments.state, &description)?;
        print!("{}", show::format_machine_table(&machine)?);
        return Ok(());
    }
    let open = || format!("no machine in {} (simgpu init creates one)", arguments.state.display());
    let machine = Machine::open(&arguments.state).with_context(open)?;
    match arguments.command {
        Command::Show { output: OutputFormat::Table } => print!("{}", show::format_machine_table(&machine)?),
        Command::Show { output: OutputFormat::Json } => println!("{}", show::format_machine_json(&machine)?),
        Command::Processes { output } => print!("{}", show::format_processes(&machine, output == OutputFormat::Json)?),
        Command::Hold { gpu, memory, graphics } => change::use_gpu(&machine, &gpu, memory, graphics)?,
        Command::Mig(MigCommand::Create { gpu, profile, at }) => {
            println!("{}", change::create_mig_device(&machine, &gpu, &profile, at)?);
        }
        Command::Mig(MigCommand::Destroy { uuid }) => change::destroy_mig_device(&machine, &uuid)?,
        other => change::apply(&machine, other)?,
    }
    Ok(())
}

fn build_description(gpus: &[String], file: Option<&PathBuf>, name: &str) -> Result<MachineDescription> {
    if let Some(file) = file {
        let text = std::fs::read(file).with_context(|| format!("failed to read {}", file.display()))?;
        return serde_json::from_slice(&text)
            .with_context(|| format!("{} does not describe a machine", file.display()));
    }
    let gpus = gpus.iter().map(|entry| parse_gpu_group(entry)).collect::<Result<_>>()?;
    Ok(MachineDescription { name: name.to_owned(), gpus, ..MachineDescription::default() })
}

/// Parses a number of GPUs and their model, such as `4xH100-80`, or only a model, such as `T4`, for
/// one GPU. No model's name begins with digits and an x.
fn parse_gpu_group(entry: &str) -> Result<GpuDescription> {
    let counted = entry.split_once(['x', 'X']).filter(|(n, _)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    let (count, model) = match counted {
        Some((count, model)) => {
            (count.parse().with_context(|| format!("{entry}: more than the maximum of 1024 GPUs"))?, model)
        }
        None => (1, entry),
    };
    anyhow::ensure!(count <= 1024, "{entry}: more than the maximum of 1024 GPUs");
    Ok(GpuDescription { model: model.to_owned(), count: Some(count), ..GpuDescription::default() })
}
