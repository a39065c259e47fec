//! The command line of `cleave agent`.
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use crate::gpu::health::DEFAULT_QUIET_PERIOD;
use crate::termination::shutdown::ShutdownPeriod;

/// Serve this node's GPUs to the kubelet, and apply its GpuNode.
#[derive(Debug, Clone, clap::Args)]
pub struct AgentArgs {
    /// Name of this node, and of its `GpuNode`.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,

    /// Directory that the agent shares with the MPS host. Use the same path on the host and in both
    /// pods. The directory may be on a tmpfs.
    #[arg(long, env = "CLEAVE_RUN_DIR", value_name = "DIR", default_value = "/run/cleave")]
    pub run_dir: PathBuf,

    /// Directory for the agent's checkpoint, on the host's disk. The directory must survive a
    /// reboot.
    #[arg(long, env = "CLEAVE_STATE_DIR", value_name = "DIR", default_value = "/var/lib/cleave")]
    pub state_dir: PathBuf,

    /// The kubelet's device plugin directory. Mount the directory, not the socket, because the
    /// kubelet replaces the socket.
    #[arg(
        long,
        env = "CLEAVE_DEVICE_PLUGIN_DIR",
        value_name = "DIR",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    pub device_plugin_dir: PathBuf,

    /// The directory of the kubelet relay. With this option, the agent registers with the relay
    /// instead of the kubelet.
    #[arg(long, env = "CLEAVE_RELAY_DIR", value_name = "DIR")]
    pub relay_dir: Option<PathBuf>,

    /// The kubelet's PodResources socket. Mount the socket's directory, not the socket.
    #[arg(
        long,
        env = "CLEAVE_POD_RESOURCES_SOCKET",
        value_name = "PATH",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pub pod_resources_socket: PathBuf,

    /// Path of the NVML library. The default is libnvidia-ml.so.1 below the driver root, in the
    /// usual locations of NVIDIA's driver container, GKE and Linux distributions, and then in the
    /// dynamic loader's path.
    #[arg(long, env = "CLEAVE_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,

    /// Path of the host's root file system in this process. The agent searches for the driver and
    /// its device nodes below this path.
    #[arg(long, env = "CLEAVE_HOST_ROOT", value_name = "DIR", default_value = "/")]
    pub host_root: PathBuf,

    /// Host directory of the driver's files, for `--device-list-strategy cdi` and `device-nodes`.
    /// Containers that get a GPU also get this directory, mounted read-only at
    /// `--container-driver-root`. Without this option, `cdi` uses NVIDIA's container toolkit on the
    /// host.
    #[arg(long, env = "CLEAVE_DRIVER_ROOT", value_name = "HOST_DIR")]
    pub driver_root: Option<PathBuf>,

    /// Path in containers at which the directory of `--driver-root` is mounted.
    #[arg(long, env = "CLEAVE_CONTAINER_DRIVER_ROOT", value_name = "DIR", default_value = "/usr/local/nvidia")]
    pub container_driver_root: PathBuf,

    /// How containers get access to their GPU.
    #[arg(long, env = "CLEAVE_DEVICE_LIST_STRATEGY", value_enum, default_value_t = DeviceListStrategy::Envvar)]
    pub device_list_strategy: DeviceListStrategy,

    /// Directory for the CDI specification that the agent writes, for `--device-list-strategy cdi`.
    #[arg(long, env = "CLEAVE_CDI_DIR", value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// Additional mount for every container that gets a GPU. May be repeated.
    #[arg(
        long = "container-mount",
        env = "CLEAVE_CONTAINER_MOUNTS",
        value_name = "HOST:CONTAINER[:ro]",
        value_delimiter = ','
    )]
    pub container_mounts: Vec<MountArg>,

    /// Additional environment variable for every container that gets a GPU. May be repeated.
    #[arg(long = "container-env", value_name = "NAME=VALUE")]
    pub container_envs: Vec<EnvArg>,

    /// Whether the agent changes the MIG mode of unused GPUs as the `GpuNode` specifies. The agent
    /// creates and destroys MIG instances with either setting.
    #[arg(long, env = "CLEAVE_MIG_MODE", value_enum, default_value_t = MigMode::Manage)]
    pub mig_mode: MigMode,

    /// XIDs that do not change the GPU's health. The default XIDs are errors of programs, and
    /// errors that another XID also reports.
    #[arg(long, env = "CLEAVE_IGNORE_XIDS", value_name = "XID,...", value_delimiter = ',', default_values_t = [13, 31, 43, 45, 68, 109])]
    pub ignore_xids: Vec<u64>,

    /// Number of seconds without further errors after which a suspect GPU can become healthy again.
    #[arg(long, env = "CLEAVE_SUSPECT_QUIET", value_name = "SECONDS", default_value_t = DEFAULT_QUIET_PERIOD.as_secs(), value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub suspect_quiet: u64,

    /// Number of seconds for which the agent keeps an allocation that the kubelet does not list
    /// yet.
    // The kubelet does not list a pod that it is admitting. A restarted kubelet lists its pods one
    // by one.
    #[arg(long, env = "CLEAVE_ALLOCATION_GRACE", value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub allocation_grace: u64,

    /// The kubelet's `shutdownGracePeriodByPodPriority`, or the equivalent of its
    /// `shutdownGracePeriod`. Without this option, the agent does not react to node shutdowns.
    // During a node shutdown, the kubelet terminates pods by priority, lowest first, and does not
    // delete the pods.
    #[arg(long, env = "CLEAVE_SHUTDOWN_GRACE", value_name = "PRIORITY=SECONDS,...", value_delimiter = ',')]
    pub shutdown_grace: Vec<ShutdownPeriod>,

    /// The kubelet's directory on the host. The kubelet records node shutdowns in this directory.
    #[arg(long, env = "CLEAVE_KUBELET_DIR", value_name = "HOST_DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,

    /// UID of this pod. The UID identifies the agent when one agent of the node hands over to
    /// another agent. The default is an identifier of the process.
    #[arg(long, env = "CLEAVE_POD_UID", value_name = "UID")]
    pub pod_uid: Option<String>,

    /// Number of seconds within which an agent must become ready after a hand-over. For tests.
    #[arg(long, env = "CLEAVE_PROBATION", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600), hide = true)]
    pub probation: u64,

    /// Use files in DIR instead of the API server: read spec.json whenever it changes, write
    /// status.json, and append Events to events.jsonl. For benchmarks, tests, and nodes without a
    /// cluster.
    #[arg(long, value_name = "DIR", hide = true)]
    pub offline: Option<PathBuf>,

    /// Run a program in the host's root directory instead of the agent. The agent starts itself
    /// with this option to run NVIDIA's container toolkit.
    #[arg(long, value_name = "PROGRAM", num_args = 1.., allow_hyphen_values = true, hide = true)]
    pub run_on_host: Vec<String>,

    /// Mount path of the host's proc file system. For tests.
    #[arg(long, value_name = "DIR", default_value = "/proc", hide = true)]
    pub proc: PathBuf,

    /// Number of seconds within which NVML must answer a query of a GPU's state. For tests.
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=600), hide = true)]
    pub gpu_timeout: u64,

    /// Address on which the agent serves /metrics, /healthz and /readyz. `[::]` includes IPv4.
    #[arg(long, env = "CLEAVE_METRICS_ADDR", value_name = "ADDR", default_value = "[::]:8080")]
    pub metrics_addr: SocketAddr,
}

/// How containers get access to their GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceListStrategy {
    /// `NVIDIA_VISIBLE_DEVICES`, for NVIDIA's container runtime.
    Envvar,
    /// CDI device names, from a specification that the agent writes. The driver's files come from
    /// `--driver-root`, or from NVIDIA's container toolkit on the host.
    Cdi,
    /// Device nodes, for a runtime without GPU support. The driver's files come from
    /// `--driver-root`.
    DeviceNodes,
}

/// Whether the agent changes the MIG mode of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MigMode {
    /// The agent changes the MIG mode of unused GPUs.
    Manage,
    /// The agent never changes MIG mode. Administrators change it.
    Never,
}

/// A mount, as `HOST:CONTAINER[:ro]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountArg {
    /// Path on the host.
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Whether the mount is read-only.
    pub read_only: bool,
}

/// Error for a text that is not `HOST:CONTAINER[:ro]`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not HOST:CONTAINER or HOST:CONTAINER:ro with absolute paths")]
pub struct InvalidMount(String);

impl FromStr for MountArg {
    type Err = InvalidMount;

    fn from_str(text: &str) -> Result<Self, InvalidMount> {
        let parts: Vec<&str> = text.split(':').collect();
        let (host, container, read_only) = match parts[..] {
            [host, container] | [host, container, "rw"] => (host, container, false),
            [host, container, "ro"] => (host, container, true),
            _ => return Err(InvalidMount(text.to_owned())),
        };
        if !host.starts_with('/') || !container.starts_with('/') {
            return Err(InvalidMount(text.to_owned()));
        }
        Ok(Self { host: host.to_owned(), container: container.to_owned(), read_only })
    }
}

/// An environment variable, as `NAME=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvArg {
    /// The text before the first `=`.
    pub name: String,
    /// The text after the first `=`, possibly empty.
    pub value: String,
}

/// Error for a text that is not `NAME=VALUE`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not NAME=VALUE")]
pub struct InvalidEnv(String);

impl FromStr for EnvArg {
    type Err = InvalidEnv;

    fn from_str(text: &str) -> Result<Self, InvalidEnv> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok(Self { name: name.to_owned(), value: value.to_owned() }),
            _ => Err(InvalidEnv(text.to_owned())),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: AgentArgs,
    }

    pub(crate) fn parse_args(extra: &[&str]) -> Result<AgentArgs, clap::Error> {
        Cli::try_parse_from(["agent", "--node-name", "n"].into_iter().chain(extra.iter().copied())).map(|cli| cli.args)
    }

    #[test]
    fn the_default_address_accepts_both_ip_families() {
        assert_eq!(parse_args(&[]).unwrap().metrics_addr, "[::]:8080".parse().unwrap());
    }

    #[test]
    fn mounts_and_variables_are_parsed_and_invalid_ones_are_refused() {
        let args = parse_args(&[
            "--container-mount",
            "/a:/b",
            "--container-mount",
            "/c:/d:ro",
            "--container-env",
            "A=b=c",
            "--container-env",
            "E=",
        ])
        .unwrap();
        let mount = |host: &str, container: &str, read_only| MountArg {
            host: host.into(),
            container: container.into(),
            read_only,
        };
        assert_eq!(args.container_mounts, [mount("/a", "/b", false), mount("/c", "/d", true)]);
        assert_eq!(args.container_envs[0], EnvArg { name: "A".into(), value: "b=c".into() });
        assert_eq!(args.container_envs[1].value, "");
        for bad in ["", "/a", "a:/b", "/a:b", "/a:/b:rx", "/a:/b:ro:x"] {
            assert!(parse_args(&["--container-mount", bad]).is_err(), "{bad}");
        }
        assert!(parse_args(&["--container-env", "=x"]).is_err());
        assert!(parse_args(&["--container-env", "x"]).is_err());
    }

    #[test]
    fn the_quiet_period_is_a_minute_by_default() {
        assert_eq!(parse_args(&[]).unwrap().suspect_quiet, 60);
        assert_eq!(parse_args(&["--suspect-quiet", "20"]).unwrap().suspect_quiet, 20);
        for bad in ["0", "-1", "86401", "x"] {
            assert!(parse_args(&[&format!("--suspect-quiet={bad}")]).is_err(), "{bad}");
        }
    }

    #[test]
    fn xids_of_programs_are_ignored_by_default() {
        assert_eq!(parse_args(&[]).unwrap().ignore_xids, [13, 31, 43, 45, 68, 109]);
        assert_eq!(parse_args(&["--ignore-xids", "13,31"]).unwrap().ignore_xids, [13, 31]);
        assert!(parse_args(&["--allocation-grace", "0"]).is_err());
        assert!(parse_args(&[]).unwrap().shutdown_grace.is_empty());
        let periods = parse_args(&["--shutdown-grace=-5=60,0=20"]).unwrap().shutdown_grace;
        assert_eq!(
            periods,
            [ShutdownPeriod { priority: -5, seconds: 60 }, ShutdownPeriod { priority: 0, seconds: 20 }]
        );
        assert!(parse_args(&["--shutdown-grace", "20"]).is_err());
    }
}
