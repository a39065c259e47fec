//! The command line of `cleave agent`, and what it means once parsed.
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use crate::gpu::health::QUIET;
use crate::termination::shutdown::Period;

/// Serves this node's GPUs to the kubelet, and keeps them as the node's `GpuNode` says.
#[derive(Debug, Clone, clap::Args)]
pub struct AgentArgs {
    /// Name of this node, and of its `GpuNode`.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,

    /// Directory shared with the MPS host, mounted at the same path on the host and in both pods.
    /// May be a tmpfs.
    #[arg(long, env = "CLEAVE_RUN_DIR", value_name = "DIR", default_value = "/run/cleave")]
    pub run_dir: PathBuf,

    /// Directory on the host's disk for the checkpoint: it has to survive a reboot.
    #[arg(long, env = "CLEAVE_STATE_DIR", value_name = "DIR", default_value = "/var/lib/cleave")]
    pub state_dir: PathBuf,

    /// The kubelet's device plugin directory. Mount the directory, not the socket: the kubelet
    /// makes the socket anew.
    #[arg(
        long,
        env = "CLEAVE_DEVICE_PLUGIN_DIR",
        value_name = "DIR",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    pub device_plugin_dir: PathBuf,

    /// The kubelet's PodResources socket. Mount its directory.
    #[arg(
        long,
        env = "CLEAVE_POD_RESOURCES_SOCKET",
        value_name = "PATH",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pub pod_resources_socket: PathBuf,

    /// The NVML library. Without it: libnvidia-ml.so.1 below the driver root, where NVIDIA's driver
    /// container, GKE and the distributions put it, and at last by the dynamic loader's own search.
    #[arg(long, env = "CLEAVE_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,

    /// Where this process sees the host's root file system: a prefix for finding the driver and its
    /// device nodes.
    #[arg(long, env = "CLEAVE_HOST_ROOT", value_name = "DIR", default_value = "/")]
    pub host_root: PathBuf,

    /// Host directory of the driver's files, for `--device-list-strategy cdi` and `device-nodes`:
    /// mounted read-only into each container that gets a GPU, at `--container-driver-root`. Without
    /// it nothing is mounted.
    #[arg(long, env = "CLEAVE_DRIVER_ROOT", value_name = "HOST_DIR")]
    pub driver_root: Option<PathBuf>,

    /// Where containers see `--driver-root`.
    #[arg(long, env = "CLEAVE_CONTAINER_DRIVER_ROOT", value_name = "DIR", default_value = "/usr/local/nvidia")]
    pub container_driver_root: PathBuf,

    /// How a container is given its GPU.
    #[arg(long, env = "CLEAVE_DEVICE_LIST_STRATEGY", value_enum, default_value_t = DeviceListStrategy::Envvar)]
    pub device_list_strategy: DeviceListStrategy,

    /// Where `--device-list-strategy cdi` writes its specification.
    #[arg(long, env = "CLEAVE_CDI_DIR", value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// A further mount of every container that gets a GPU, HOST:CONTAINER or HOST:CONTAINER:ro. May
    /// be repeated.
    #[arg(
        long = "container-mount",
        env = "CLEAVE_CONTAINER_MOUNTS",
        value_name = "HOST:CONTAINER[:ro]",
        value_delimiter = ','
    )]
    pub container_mounts: Vec<MountArg>,

    /// A further environment variable of every container that gets a GPU. May be repeated.
    #[arg(long = "container-env", value_name = "NAME=VALUE")]
    pub container_envs: Vec<EnvArg>,

    /// Whether MIG mode of a GPU that nothing uses is turned on and off as the `GpuNode` says. MIG
    /// instances are made and destroyed either way.
    #[arg(long, env = "CLEAVE_MIG_MODE", value_enum, default_value_t = MigMode::Manage)]
    pub mig_mode: MigMode,

    /// XIDs that say nothing about the GPU's health: a program's own fault, or reported once more
    /// by another XID.
    #[arg(long, env = "CLEAVE_IGNORE_XIDS", value_name = "XID,...", value_delimiter = ',', default_values_t = [13, 31, 43, 45, 68, 109])]
    pub ignore_xids: Vec<u64>,

    /// Seconds for which a GPU that an XID or memory errors made suspect must show nothing further
    /// before an answer of NVML's makes it healthy again. Short, a GPU that fails under every load
    /// gives out slices between two failures; long, one accident costs them for as long.
    #[arg(long, env = "CLEAVE_SUSPECT_QUIET", value_name = "SECONDS", default_value_t = QUIET.as_secs(), value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub suspect_quiet: u64,

    /// Seconds for which an allocation is kept although the kubelet lists no pod that holds it: a
    /// pod being admitted is not listed yet, and a kubelet or agent that has just started hears of
    /// its pods one by one.
    #[arg(long, env = "CLEAVE_ALLOCATION_GRACE", value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub allocation_grace: u64,

    /// The kubelet's `shutdownGracePeriodByPodPriority`, or what its `shutdownGracePeriod` comes
    /// to: how it ends pods when the node shuts down, the lowest priorities first. It deletes none
    /// of them. Without this its shutdown is not seen coming.
    #[arg(long, env = "CLEAVE_SHUTDOWN_GRACE", value_name = "PRIORITY=SECONDS,...", value_delimiter = ',')]
    pub shutdown_grace: Vec<Period>,

    /// The kubelet's directory on the host, in which it notes that the node shuts down.
    #[arg(long, env = "CLEAVE_KUBELET_DIR", value_name = "HOST_DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,

    /// Speak to no API server: read the spec from DIR/spec.json as it changes, write
    /// DIR/status.json, add events to DIR/events.jsonl. For benchmarks, tests, and a node without a
    /// cluster.
    #[arg(long, value_name = "DIR", hide = true)]
    pub offline: Option<PathBuf>,

    /// Where processes are told of, those of the host. For tests.
    #[arg(long, value_name = "DIR", default_value = "/proc", hide = true)]
    pub proc: PathBuf,

    /// Where /metrics, /healthz and /readyz are served.
    #[arg(long, env = "CLEAVE_METRICS_ADDR", value_name = "ADDR", default_value = "0.0.0.0:8080")]
    pub metrics_addr: SocketAddr,
}

/// How a container is given its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceListStrategy {
    /// `NVIDIA_VISIBLE_DEVICES`, for NVIDIA's container runtime.
    Envvar,
    /// CDI device names, of a specification that the agent writes.
    Cdi,
    /// Device nodes, for a runtime that knows nothing of GPUs; the driver comes from
    /// `--driver-root`.
    DeviceNodes,
}

/// Who turns MIG mode on and off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MigMode {
    /// The agent.
    Manage,
    /// A person.
    Never,
}

/// `HOST:CONTAINER[:ro]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountArg {
    /// Path on the host.
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Not writable.
    pub read_only: bool,
}

/// Not `HOST:CONTAINER[:ro]`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not HOST:CONTAINER or HOST:CONTAINER:ro with absolute paths")]
pub struct NotAMount(String);

impl FromStr for MountArg {
    type Err = NotAMount;

    fn from_str(text: &str) -> Result<Self, NotAMount> {
        let parts: Vec<&str> = text.split(':').collect();
        let (host, container, read_only) = match parts[..] {
            [host, container] | [host, container, "rw"] => (host, container, false),
            [host, container, "ro"] => (host, container, true),
            _ => return Err(NotAMount(text.to_owned())),
        };
        if !host.starts_with('/') || !container.starts_with('/') {
            return Err(NotAMount(text.to_owned()));
        }
        Ok(Self { host: host.to_owned(), container: container.to_owned(), read_only })
    }
}

/// `NAME=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvArg {
    /// Before the first `=`.
    pub name: String,
    /// After it, possibly empty.
    pub value: String,
}

/// Not `NAME=VALUE`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not NAME=VALUE")]
pub struct NotAnEnv(String);

impl FromStr for EnvArg {
    type Err = NotAnEnv;

    fn from_str(text: &str) -> Result<Self, NotAnEnv> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok(Self { name: name.to_owned(), value: value.to_owned() }),
            _ => Err(NotAnEnv(text.to_owned())),
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

    pub(crate) fn parse(extra: &[&str]) -> Result<AgentArgs, clap::Error> {
        Cli::try_parse_from(["agent", "--node-name", "n"].into_iter().chain(extra.iter().copied())).map(|cli| cli.args)
    }

    #[test]
    fn mounts_and_envs_are_parsed_and_nonsense_is_refused() {
        let args = parse(&[
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
            assert!(parse(&["--container-mount", bad]).is_err(), "{bad}");
        }
        assert!(parse(&["--container-env", "=x"]).is_err());
        assert!(parse(&["--container-env", "x"]).is_err());
    }

    #[test]
    fn a_suspect_is_quiet_for_a_minute_unless_another_time_is_asked_for() {
        assert_eq!(parse(&[]).unwrap().suspect_quiet, 60);
        assert_eq!(parse(&["--suspect-quiet", "20"]).unwrap().suspect_quiet, 20);
        for bad in ["0", "-1", "86401", "x"] {
            assert!(parse(&[&format!("--suspect-quiet={bad}")]).is_err(), "{bad}");
        }
    }

    #[test]
    fn defaults_ignore_the_xids_of_programs() {
        assert_eq!(parse(&[]).unwrap().ignore_xids, [13, 31, 43, 45, 68, 109]);
        assert_eq!(parse(&["--ignore-xids", "13,31"]).unwrap().ignore_xids, [13, 31]);
        assert!(parse(&["--allocation-grace", "0"]).is_err());
        assert!(parse(&[]).unwrap().shutdown_grace.is_empty());
        let periods = parse(&["--shutdown-grace=-5=60,0=20"]).unwrap().shutdown_grace;
        assert_eq!(periods, [Period { priority: -5, seconds: 60 }, Period { priority: 0, seconds: 20 }]);
        assert!(parse(&["--shutdown-grace", "20"]).is_err());
    }
}
