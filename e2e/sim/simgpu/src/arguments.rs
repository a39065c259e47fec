//! The command line of `simgpu`.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use sim_machine::{DEFAULT_STATE_DIRECTORY, MachineTopology, STATE_DIRECTORY_ENV};

/// Creates, shows and changes the GPUs that the simulated NVML, MPS and CUDA programs see.
///
/// Changes apply immediately to all running programs. GPU is an index or a UUID.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:\n  \
    simgpu init --gpus 4xH100-80 --gpus T4\n  \
    simgpu xid 2 79                               the driver reports that GPU 2 fell off the bus\n  \
    simgpu lose 2; simgpu restore 2               calls about GPU 2 fail with GPU_IS_LOST, then work\n  \
    simgpu fail nvmlDeviceGetUUID --gpu 0 --code UNKNOWN --count 3\n  \
    simgpu hang nvmlEventSetWait --seconds 30\n  \
    simgpu clear                                  removes all injected faults\n  \
    simgpu set 0 compute-mode=EXCLUSIVE_PROCESS temperature=90"
)]
pub(crate) struct Arguments {
    /// The machine's directory.
    #[arg(long, global = true, env = STATE_DIRECTORY_ENV, default_value = DEFAULT_STATE_DIRECTORY, value_name = "DIR")]
    pub(crate) state: PathBuf,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create a machine, and replace an existing one.
    Init {
        /// GPUs as `COUNTxMODEL` or `MODEL`, in the order of their indices. Repeatable.
        /// `simgpu models` lists the models.
        #[arg(long, value_name = "COUNTxMODEL")]
        gpus: Vec<String>,
        /// A JSON file that describes the machine. Unlike --gpus it can set UUIDs, NUMA nodes, PCI
        /// addresses and additional models.
        #[arg(long, value_name = "FILE", conflicts_with_all = ["gpus", "machine"])]
        file: Option<PathBuf>,
        /// How the GPUs are linked: hybrid-cube-mesh, nv-switch or two-sockets.
        #[arg(long, value_name = "TOPOLOGY", conflicts_with = "file")]
        topology: Option<MachineTopology>,
        /// The machine's name, from which UUIDs are derived.
        #[arg(long, default_value = "simulated", value_name = "NAME")]
        machine: String,
    },
    /// Show the GPUs, their MIG instances, processes and faults.
    Show {
        /// The output format.
        #[arg(short, long, value_enum, default_value_t)]
        output: OutputFormat,
    },
    /// List the models and their MIG profiles.
    Models,
    /// List the processes on the GPUs.
    Processes {
        /// The output format.
        #[arg(short, long, value_enum, default_value_t)]
        output: OutputFormat,
    },
    /// Make the driver report an XID.
    Xid {
        /// Index or UUID of the GPU.
        gpu: String,
        /// The XID, such as 79.
        code: u64,
        /// The MIG device concerned, as GPU instance and compute instance.
        #[arg(long, value_name = "GI,CI", value_parser = parse_instance)]
        instance: Option<(u32, u32)>,
    },
    /// Add ECC errors to the counters, and report them as events.
    Ecc {
        /// Index or UUID of the GPU.
        gpu: String,
        /// Number of uncorrected errors.
        #[arg(long, default_value_t = 0)]
        uncorrected: u64,
        /// Number of corrected errors.
        #[arg(long, default_value_t = 0)]
        corrected: u64,
    },
    /// Make a GPU fall off the bus: every call about it fails with `GPU_IS_LOST`. The GPU reports
    /// no XID (see `xid`).
    Lose {
        /// Index or UUID of the GPU.
        gpu: String,
    },
    /// Take a GPU out of the machine: NVML no longer lists it, and the indices of later GPUs move
    /// down. `restore` puts it back. Other commands name GPUs by their index with all GPUs.
    Remove {
        /// Index or UUID of the GPU.
        gpu: String,
    },
    /// Restore a lost or removed GPU in its previous state.
    Restore {
        /// Index or UUID of the GPU.
        gpu: String,
    },
    /// Reset a GPU: activate a pending MIG mode, clear ECC counts and requested recovery, destroy
    /// MIG instances and restore a lost GPU. Fails while a working GPU is in use by a process, and
    /// while any program has an NVML session open, because a session opens every GPU.
    Reset {
        /// Index or UUID of the GPU.
        gpu: String,
        /// Ignore open NVML sessions, like a reset from outside the machine (by a hypervisor).
        #[arg(long)]
        from_outside: bool,
    },
    /// Make calls fail, by the NVML function's name with or without its version, or by a prefix
    /// with `*`.
    Fail {
        /// The call, such as `nvmlDeviceGetUUID` or `nvmlDevice*`.
        call: String,
        /// Apply only to calls about this GPU and its MIG devices, or about this MIG device.
        #[arg(long)]
        gpu: Option<String>,
        /// The return code, by NVML's name or number.
        #[arg(long, default_value = "UNKNOWN", value_parser = parse_nvml_code)]
        code: i32,
        /// Apply only to this number of calls.
        #[arg(long)]
        count: Option<u32>,
    },
    /// Make calls hang and then work.
    Hang {
        /// Name of the NVML function.
        call: String,
        /// Apply only to calls about this GPU.
        #[arg(long)]
        gpu: Option<String>,
        /// Time in seconds for which calls hang. Default: until the fault is cleared.
        #[arg(long)]
        seconds: Option<f64>,
        /// Apply only to this number of calls.
        #[arg(long)]
        count: Option<u32>,
    },
    /// Remove all injected faults, or those with these numbers (see `show`).
    Clear {
        /// The numbers of the faults.
        ids: Vec<u64>,
    },
    /// Change a GPU: compute-mode, mig, mig-needs-reset, persistence, numa, cpus, temperature,
    /// utilization, throttling (reasons why clocks are low, such as power-cap,hardware-thermal),
    /// energy (millijoules), remap-pending, remap-failed, recovery (the action that the driver
    /// requests: none, reset, reboot or drain-and-reset).
    Set {
        /// Index or UUID of the GPU.
        gpu: String,
        /// The changes as KEY=VALUE. An empty value restores the model's default.
        #[arg(required = true, value_name = "KEY=VALUE")]
        values: Vec<String>,
    },
    /// Change the driver.
    Driver {
        /// Whether the driver is loaded.
        #[arg(long)]
        present: Option<bool>,
        /// Version of the driver, such as 580.159.04.
        #[arg(long)]
        version: Option<String>,
        /// CUDA's version as NVML encodes it: 13000 is 13.0.
        #[arg(long)]
        cuda: Option<i32>,
    },
    /// Create or destroy MIG devices, like an administrator with nvidia-smi.
    #[command(subcommand)]
    Mig(MigCommand),
    /// Use a GPU without MPS, until killed.
    Hold {
        /// The GPU, or a MIG device by its UUID.
        gpu: String,
        /// The memory to allocate.
        #[arg(long, default_value_t = 500, value_name = "MIB")]
        memory: u64,
        /// Register as a graphics process.
        #[arg(long)]
        graphics: bool,
    },
    /// Unload the driver, like rmmod. Fails while a process uses a GPU or has an NVML session open.
    /// `driver --present true` loads it again.
    Unload,
    /// Reboot the machine. This clears processes, MIG instances, events, ECC counts and compute
    /// modes, and restores lost GPUs. Injected faults remain. MIG mode remains if the board stores
    /// it (Ampere).
    Reboot,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MigCommand {
    /// Create a GPU instance with one compute instance of its size, and print the MIG device's
    /// UUID.
    Create {
        /// Index or UUID of the GPU.
        gpu: String,
        /// The profile, such as 3g.40gb.
        profile: String,
        /// The first memory slice.
        #[arg(long)]
        at: Option<u32>,
    },
    /// Destroy a MIG device and its GPU instance. Fails while a process uses it.
    Destroy {
        /// The MIG device's UUID.
        uuid: String,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Text in tables.
    #[default]
    Table,
    /// JSON.
    Json,
}

/// Parses an NVML return code, by name or number.
pub(crate) fn parse_nvml_code(text: &str) -> Result<i32, String> {
    let name = text.to_ascii_uppercase();
    let name = name.strip_prefix("NVML_ERROR_").unwrap_or(&name);
    let code = match name {
        "UNINITIALIZED" => 1,
        "INVALID_ARGUMENT" => 2,
        "NOT_SUPPORTED" => 3,
        "NO_PERMISSION" => 4,
        "NOT_FOUND" => 6,
        "INSUFFICIENT_SIZE" => 7,
        "DRIVER_NOT_LOADED" => 9,
        "TIMEOUT" => 10,
        "IRQ_ISSUE" => 11,
        "LIBRARY_NOT_FOUND" => 12,
        "FUNCTION_NOT_FOUND" => 13,
        "GPU_IS_LOST" => 15,
        "RESET_REQUIRED" => 16,
        "OPERATING_SYSTEM" => 17,
        "LIB_RM_VERSION_MISMATCH" => 18,
        "IN_USE" => 19,
        "MEMORY" => 20,
        "NO_DATA" => 21,
        "INSUFFICIENT_RESOURCES" => 23,
        "UNKNOWN" => 999,
        _ => return name.parse().map_err(|_| format!("{text} is not an NVML return code")),
    };
    Ok(code)
}

/// Parses `1,0` as GPU instance and compute instance.
pub(crate) fn parse_instance(text: &str) -> Result<(u32, u32), String> {
    let parts = text.split_once(',').and_then(|(gi, ci)| Some((gi.parse().ok()?, ci.parse().ok()?)));
    parts.ok_or_else(|| format!("{text} is not GI,CI"))
}
