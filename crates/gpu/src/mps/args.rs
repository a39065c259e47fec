//! Command line of the MPS host.
use std::ffi::OsString;
use std::path::PathBuf;

use super::compute_mode::SettableComputeMode;

/// Run this node's MPS daemons and enforce the limits of their clients.
#[derive(Debug, Clone, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct HostArgs {
    #[command(subcommand)]
    pub(crate) command: Option<MpsHostCommand>,

    #[command(flatten)]
    pub(crate) paths: PathArgs,

    /// Run the process of this device, as a child of the MPS host.
    #[arg(long, value_name = "UUID", requires = "parent", hide = true)]
    pub(crate) device: Option<String>,

    /// PID of the MPS host that started this process.
    #[arg(long, value_name = "PID", requires = "device", hide = true)]
    pub(crate) parent: Option<u32>,
}

// Paths on the node. This is not a doc comment, because clap would use a doc comment as the
// command's help.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PathArgs {
    /// Directory shared with the agent. Use the same path on the host and in both pods. The
    /// directory may be on a tmpfs.
    #[arg(long, env = "CLEAVE_RUN_DIR", value_name = "DIR", default_value = "/run/cleave")]
    pub(crate) run_dir: PathBuf,

    /// Program of the MPS control daemon. The daemon searches for the server program in the same
    /// directory first.
    #[arg(long, env = "CLEAVE_MPS_CONTROL", value_name = "PATH", default_value = "nvidia-cuda-mps-control")]
    pub(crate) mps_control: PathBuf,

    /// Directories of the driver's libraries: `LD_LIBRARY_PATH` of MPS control daemons and CUDA
    /// programs. Default: `LD_LIBRARY_PATH` of this process.
    #[arg(long, env = "CLEAVE_MPS_LIBRARY_PATH", value_name = "DIR[:DIR]")]
    pub(crate) mps_library_path: Option<OsString>,

    /// Path of the NVML library. Default: search the usual driver directories.
    #[arg(long, env = "CLEAVE_NVML_LIBRARY", value_name = "PATH")]
    pub(crate) nvml_library: Option<PathBuf>,

    /// File that contains the version of the driver.
    #[arg(
        long,
        env = "CLEAVE_DRIVER_VERSION_FILE",
        value_name = "PATH",
        default_value = "/sys/module/nvidia/version",
        hide = true
    )]
    pub(crate) driver_version_file: PathBuf,
}

#[derive(Debug, Clone, clap::Subcommand)]
pub(crate) enum MpsHostCommand {
    /// Set a GPU's compute mode and print the previous mode. The MPS host runs this command in a
    /// child process, so that the MPS host itself does not load NVML.
    #[command(hide = true)]
    ComputeMode {
        /// UUID of the GPU.
        #[arg(long)]
        device: String,
        #[arg(long, value_enum)]
        mode: SettableComputeMode,
        #[arg(long, env = "CLEAVE_NVML_LIBRARY", value_name = "PATH")]
        nvml_library: Option<PathBuf>,
    },
    /// Fail unless the MPS host of this node answers on its socket. The MPS host's pod runs this
    /// command as its readiness probe.
    #[command(hide = true)]
    Ready {
        /// Directory that the agent and the MPS host share.
        #[arg(long, env = "CLEAVE_RUN_DIR", value_name = "DIR", default_value = "/run/cleave")]
        run_dir: PathBuf,
    },
}
