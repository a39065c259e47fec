//! Defines the command line of `simgpu`.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use sim_machine::{DEFAULT_STATE_DIRECTORY, MachineTopology, STATE_DIRECTORY_ENV};

/// Creates, shows and changes the simulated GPUs of the machine, which the simulated NVML, MPS and
/// CUDA programs see.
///
/// Changes apply immediately to all running programs. GPU is the index or the UUID of a GPU.
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
    /// The directory of the machine's state.
    #[arg(long, global = true, env = STATE_DIRECTORY_ENV, default_value = DEFAULT_STATE_DIRECTORY, value_name = "DIR")]
    pub(crate) state: PathBuf,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create a machine, and replace an existing machine.
    Init {
        /// GPUs as `COUNTxMODEL` or `MODEL`, in the order of their indices. Repeatable.
        /// `simgpu models` lists the models.
        #[arg(long, value_name = "COUNTxMODEL")]
        gpus: Vec<String>,
        /// A JSON file that describes the machine. Unlike --gpus, the file can set UUIDs, NUMA
        /// nodes, PCI addresses and additional models.
        #[arg(long, value_name = "FILE", conflicts_with_all = ["gpus", "machine"])]
        file: Option<PathBuf>,
        /// How the GPUs are linked: hybrid-cube-mesh, nv-switch or two-sockets.
        #[arg(long, value_name = "TOPOLOGY", conflicts_with = "file")]
        topology: Option<MachineTopology>,
        /// The machine's name. The UUIDs of the GPUs depend on the name.
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
    /// Make the driver report an XID error.
    Xid {
        /// The index or UUID of the GPU.
        gpu: String,
        /// The number of the XID error, such as 79.
        code: u64,
        /// The MIG device that reports the error, as the numbers of its GPU instance and compute
        /// instance.
        #[arg(long, value_name = "GI,CI", value_parser = parse_instance)]
        instance: Option<(u32, u32)>,
    },
    /// Add ECC errors to the GPU's counters, and report the errors as events.
    Ecc {
        /// The index or UUID of the GPU.
        gpu: String,
        /// Number of uncorrected errors.
        #[arg(long, default_value_t = 0)]
        uncorrected: u64,
        /// Number of corrected errors.
        #[arg(long, default_value_t = 0)]
        corrected: u64,
    },
    /// Make a GPU fall off the bus: every call about the GPU fails with `GPU_IS_LOST`. The GPU
    /// reports no XID error (see `xid`).
    Lose {
        /// The index or UUID of the GPU.
        gpu: String,
    },
    /// Remove a GPU from the machine: NVML no longer lists the GPU, and decreases the indices of
    /// the later GPUs by one. `restore` restores the GPU. The other commands of simgpu still count
    /// removed GPUs in the indices.
    Remove {
        /// The index or UUID of the GPU.
        gpu: String,
    },
    /// Restore a lost or removed GPU to its previous state.
    Restore {
        /// The index or UUID of the GPU.
        gpu: String,
    },
    /// Reset a GPU: activate a pending MIG mode, clear the ECC counts and the requested recovery
    /// action, destroy the MIG instances and restore a lost GPU that was not removed. Fails while a
    /// process uses the GPU, unless the GPU is lost, and while any program has an NVML session
    /// open, because a session opens every GPU.
    Reset {
        /// The index or UUID of the GPU.
        gpu: String,
        /// Ignore open NVML sessions, like a reset from outside the machine (by a hypervisor).
        #[arg(long)]
        from_outside: bool,
    },
    /// Make calls of an NVML function fail. CALL is the function's name with or without its
    /// version, or a prefix of names followed by `*`.
    Fail {
        /// The name or prefix, such as `nvmlDeviceGetUUID` or `nvmlDevice*`.
        call: String,
        /// Apply the fault only to calls about this GPU and its MIG devices, or about this MIG
        /// device.
        #[arg(long)]
        gpu: Option<String>,
        /// The return code of the calls, as NVML's name or number.
        #[arg(long, default_value = "UNKNOWN", value_parser = parse_nvml_code)]
        code: i32,
        /// Apply the fault only to this number of calls.
        #[arg(long)]
        count: Option<u32>,
    },
    /// Make calls of an NVML function hang, and then continue.
    Hang {
        /// The name or prefix, such as `nvmlEventSetWait` or `nvmlDevice*`.
        call: String,
        /// Apply the fault only to calls about this GPU and its MIG devices, or about this MIG
        /// device.
        #[arg(long)]
        gpu: Option<String>,
        /// Seconds for which calls hang. By default, calls hang until the fault is cleared.
        #[arg(long)]
        seconds: Option<f64>,
        /// Apply the fault only to this number of calls.
        #[arg(long)]
        count: Option<u32>,
    },
    /// Remove all injected faults, or only the faults with these numbers (see `show`).
    Clear {
        /// The numbers of the faults to remove.
        ids: Vec<u64>,
    },
    /// Change a GPU: compute-mode, mig, mig-needs-reset, persistence, numa, cpus, temperature,
    /// utilization, throttling (reasons why clocks are low, such as power-cap,hardware-thermal),
    /// energy (millijoules), remap-pending, remap-failed, recovery (the action that the driver
    /// requests: none, reset, reboot or drain-and-reset).
    Set {
        /// The index or UUID of the GPU.
        gpu: String,
        /// The changes as KEY=VALUE. An empty value of numa, cpus, temperature, utilization,
        /// throttling or energy restores the default.
        #[arg(required = true, value_name = "KEY=VALUE")]
        values: Vec<String>,
    },
    /// Change the driver.
    Driver {
        /// Whether the driver is loaded.
        #[arg(long)]
        present: Option<bool>,
        /// The version of the driver, such as 580.159.04.
        #[arg(long)]
        version: Option<String>,
        /// The CUDA version as NVML encodes it: 13000 means 13.0.
        #[arg(long)]
        cuda: Option<i32>,
    },
    /// Create or destroy MIG devices, as an administrator does with nvidia-smi.
    #[command(subcommand)]
    Mig(MigCommand),
    /// Use a GPU without MPS until simgpu is killed.
    Hold {
        /// The index or UUID of the GPU, or the UUID of a MIG device.
        gpu: String,
        /// The memory to allocate.
        #[arg(long, default_value_t = 500, value_name = "MIB")]
        memory: u64,
        /// Register simgpu as a graphics process.
        #[arg(long)]
        graphics: bool,
    },
    /// Unload the driver, as rmmod does. Fails while a process uses a GPU or has an NVML session
    /// open. `driver --present true` loads the driver again.
    Unload,
    /// Reboot the machine. A reboot clears processes, MIG instances, events, ECC counts and compute
    /// modes, and restores lost GPUs that were not removed. Injected faults remain. The MIG mode
    /// remains if the board stores the mode (Ampere).
    Reboot,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MigCommand {
    /// Create a GPU instance with one compute instance of the same size, and print the UUID of the
    /// MIG device.
    Create {
        /// The index or UUID of the GPU.
        gpu: String,
        /// The profile of the GPU instance, such as 3g.40gb.
        profile: String,
        /// The first memory slice.
        #[arg(long)]
        at: Option<u32>,
    },
    /// Destroy a MIG device and its GPU instance. Fails while a process uses the MIG device.
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

/// Parses the name or number of an NVML return code.
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

/// Parses the numbers of a GPU instance and of its compute instance, such as `1,0`.
pub(crate) fn parse_instance(text: &str) -> Result<(u32, u32), String> {
    let parts = text.split_once(',').and_then(|(gi, ci)| Some((gi.parse().ok()?, ci.parse().ok()?)));
    parts.ok_or_else(|| format!("{text} is not GI,CI"))
}
