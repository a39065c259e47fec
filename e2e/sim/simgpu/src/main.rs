//! Describes, shows and changes the simulated machine, faults included.

mod change;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};
use sim_machine::{DEFAULT_DIR, Description, GpuDescription, Machine, STATE_ENV};

/// The simulated GPUs of this machine: what the stand-in NVML, MPS and CUDA programs see.
///
/// Changes hold at once for all running programs. GPU is an index or a UUID.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:\n  \
    simgpu init --gpus 4xH100-80 --gpus T4\n  \
    simgpu xid 2 79                               GPU 2 fell off the bus, says the driver\n  \
    simgpu lose 2; simgpu restore 2               calls about GPU 2 say GPU_IS_LOST; no more\n  \
    simgpu fail nvmlDeviceGetUUID --gpu 0 --code UNKNOWN --count 3\n  \
    simgpu hang nvmlEventSetWait --seconds 30\n  \
    simgpu clear                                  no more injected faults\n  \
    simgpu set 0 compute-mode=EXCLUSIVE_PROCESS temperature=90"
)]
struct Arguments {
    /// The machine's directory.
    #[arg(long, global = true, env = STATE_ENV, default_value = DEFAULT_DIR, value_name = "DIR")]
    state: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a machine, in place of any that was there.
    Init {
        /// GPUs as `COUNTxMODEL` or `MODEL`, in the order of their indices; may be repeated.
        /// `simgpu models` lists the models.
        #[arg(long, value_name = "COUNTxMODEL")]
        gpus: Vec<String>,
        /// A description as a JSON file, for what --gpus cannot say: UUIDs, NUMA nodes, PCI
        /// addresses, own models.
        #[arg(long, value_name = "FILE", conflicts_with_all = ["gpus", "machine"])]
        file: Option<PathBuf>,
        /// The machine's name; UUIDs are derived from it.
        #[arg(long, default_value = "simulated", value_name = "NAME")]
        machine: String,
    },
    /// Show the GPUs, their MIG instances, processes and faults.
    Show {
        /// How.
        #[arg(short, long, value_enum, default_value_t)]
        output: Output,
    },
    /// List the models and their MIG profiles.
    Models,
    /// List the processes on the GPUs.
    Processes {
        /// How.
        #[arg(short, long, value_enum, default_value_t)]
        output: Output,
    },
    /// Let the driver report an XID.
    Xid {
        /// The GPU.
        gpu: String,
        /// The XID, such as 79.
        code: u64,
        /// The MIG device it is about, as GPU instance and compute instance.
        #[arg(long, value_name = "GI,CI", value_parser = change::instance)]
        instance: Option<(u32, u32)>,
    },
    /// Count ECC errors, and report them by events.
    Ecc {
        /// The GPU.
        gpu: String,
        /// Uncorrected ones.
        #[arg(long, default_value_t = 0)]
        uncorrected: u64,
        /// Corrected ones.
        #[arg(long, default_value_t = 0)]
        corrected: u64,
    },
    /// Let a GPU fall off the bus: every call about it says `GPU_IS_LOST`. Without an XID: see
    /// `xid`.
    Lose {
        /// The GPU.
        gpu: String,
    },
    /// Bring a lost GPU back, as it was.
    Restore {
        /// The GPU.
        gpu: String,
    },
    /// Reset a GPU: a pending MIG mode holds, ECC counts and what the driver wanted are gone, MIG
    /// instances are gone, a lost GPU is back. Refused while it is in use.
    Reset {
        /// The GPU.
        gpu: String,
    },
    /// Let calls fail: NVML's function by its name, with or without its version, or up to a `*`.
    Fail {
        /// The call, such as `nvmlDeviceGetUUID` or `nvmlDevice*`.
        call: String,
        /// Only calls about this GPU (and its MIG devices), or about this MIG device.
        #[arg(long)]
        gpu: Option<String>,
        /// The code, by NVML's name or as a number.
        #[arg(long, default_value = "UNKNOWN", value_parser = change::code)]
        code: i32,
        /// Only so many calls.
        #[arg(long)]
        count: Option<u32>,
    },
    /// Let calls hang, then work.
    Hang {
        /// The call.
        call: String,
        /// Only calls about this GPU.
        #[arg(long)]
        gpu: Option<String>,
        /// For so long; without it, until cleared.
        #[arg(long)]
        seconds: Option<f64>,
        /// Only so many calls.
        #[arg(long)]
        count: Option<u32>,
    },
    /// Take injected faults away: all, or those with these numbers (see `show`).
    Clear {
        /// The faults.
        ids: Vec<u64>,
    },
    /// Change a GPU: compute-mode, mig, mig-needs-reset, persistence, numa, cpus, temperature,
    /// utilization, remap-pending, remap-failed, recovery (what the driver wants done: none, reset,
    /// reboot or drain-and-reset).
    Set {
        /// The GPU.
        gpu: String,
        /// What, as KEY=VALUE; an empty value where the model's own is to hold.
        #[arg(required = true, value_name = "KEY=VALUE")]
        values: Vec<String>,
    },
    /// Change the driver.
    Driver {
        /// Whether it is loaded.
        #[arg(long)]
        present: Option<bool>,
        /// Its version.
        #[arg(long)]
        version: Option<String>,
        /// CUDA's version as NVML gives it: 13000 is 13.0.
        #[arg(long)]
        cuda: Option<i32>,
    },
    /// Make or destroy MIG devices from outside, as an administrator with nvidia-smi.
    #[command(subcommand)]
    Mig(Mig),
    /// Be a process that uses a GPU and knows nothing of MPS, until killed.
    Hold {
        /// The GPU, or a MIG device by its UUID.
        gpu: String,
        /// Memory to take.
        #[arg(long, default_value_t = 500, value_name = "MIB")]
        memory: u64,
        /// Be a graphics process.
        #[arg(long)]
        graphics: bool,
    },
    /// Reboot the machine: processes, MIG instances, events, ECC counts, compute modes and lost
    /// GPUs are forgotten; MIG mode is kept where the board stores it (Ampere). Injected faults
    /// stay.
    Reboot,
}

#[derive(Debug, Subcommand)]
enum Mig {
    /// Make a GPU instance with one compute instance that takes it whole; prints the MIG device's
    /// UUID.
    Create {
        /// The GPU.
        gpu: String,
        /// The profile, such as 3g.40gb.
        profile: String,
        /// The memory slice it begins at.
        #[arg(long)]
        at: Option<u32>,
    },
    /// Destroy a MIG device and its GPU instance. Refused while a process is in it.
    Destroy {
        /// The MIG device's UUID.
        uuid: String,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

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
        print!("{}", show::models()?);
        return Ok(());
    }
    if let Command::Init { gpus, file, machine } = &arguments.command {
        let description = describe(gpus, file.as_ref(), machine)?;
        let machine = Machine::init(&arguments.state, &description)?;
        print!("{}", show::table(&machine)?);
        return Ok(());
    }
    let open = || format!("no machine in {} (simgpu init makes one)", arguments.state.display());
    let machine = Machine::open(&arguments.state).with_context(open)?;
    match arguments.command {
        Command::Show { output: Output::Table } => print!("{}", show::table(&machine)?),
        Command::Show { output: Output::Json } => println!("{}", show::json(&machine)?),
        Command::Processes { output } => print!("{}", show::processes(&machine, output == Output::Json)?),
        Command::Hold { gpu, memory, graphics } => change::hold(&machine, &gpu, memory, graphics)?,
        Command::Mig(Mig::Create { gpu, profile, at }) => println!("{}", change::create(&machine, &gpu, &profile, at)?),
        Command::Mig(Mig::Destroy { uuid }) => change::destroy(&machine, &uuid)?,
        other => change::apply(&machine, other)?,
    }
    Ok(())
}

fn describe(gpus: &[String], file: Option<&PathBuf>, name: &str) -> Result<Description> {
    if let Some(file) = file {
        let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        return serde_json::from_slice(&text)
            .with_context(|| format!("{} does not describe a machine", file.display()));
    }
    let gpus = gpus.iter().map(|entry| group(entry)).collect::<Result<_>>()?;
    Ok(Description { name: name.to_owned(), gpus, ..Description::default() })
}

/// `4xH100-80`, or `T4` for one. No model's name begins with digits and an x.
fn group(entry: &str) -> Result<GpuDescription> {
    let counted = entry.split_once(['x', 'X']).filter(|(n, _)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    let (count, model) = match counted {
        Some((count, model)) => (count.parse().with_context(|| format!("too many GPUs: {entry}"))?, model),
        None => (1, entry),
    };
    anyhow::ensure!(count <= 1024, "too many GPUs: {entry}");
    Ok(GpuDescription { model: model.to_owned(), count: Some(count), ..GpuDescription::default() })
}
