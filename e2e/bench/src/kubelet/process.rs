//! Starts a device plugin as another process, together with a fake kubelet.
use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cleave_kubelet::fake::{Endpoint, FakeKubelet, FakeKubeletState, FakePodResources};
use sim_machine::Machine;
use tokio::process::{Child, Command};

use super::simulated::{Sharing, SimulatedHardware};

/// Time limit for any reaction of the plugin. NVIDIA's plugin retries a registration after 30 s.
pub(super) const PLUGIN_REACTION_TIMEOUT: Duration = Duration::from_secs(60);

/// Starts a plugin with fixed settings.
pub(super) struct Launcher {
    resource: String,
    program: PathBuf,
    args: Vec<String>,
    simulated: Option<SimulatedHardware>,
    /// The kubelet relay between the kubelet and the plugin, if one runs.
    relay: Option<PathBuf>,
}

/// A running plugin and its fake kubelet.
pub(super) struct Plugin {
    pub(super) kubelet: FakeKubelet,
    pub(super) resource: String,
    /// Time at which the process was started.
    pub(super) started: Instant,
    /// The simulated machine, if the plugin uses one.
    pub(super) machine: Option<Machine>,
    child: Child,
    command: Command,
    host: Option<Child>,
    relay: Option<Child>,
    log: PathBuf,
    _pods: FakePodResources,
    _directory: tempfile::TempDir,
    _run_directory: tempfile::TempDir,
}

/// A directory of an in-memory file system, if the machine has one. On a node, the run directory
/// `/run` is also in memory.
const MEMORY_FILE_SYSTEM: &str = "/dev/shm";

/// Name of the directory in which the plugin registers with the relay.
const RELAY_DIRECTORY: &str = "relay";

/// Name prefix of the threads of Cleave's agent that call NVML.
const NVML_THREAD_PREFIX: &str = "nvml-";

impl Launcher {
    /// Returns a launcher that starts this program to serve synthetic GPUs.
    pub(super) fn for_synthetic_gpus(resource: &str, gpus: u32, units: u32) -> Result<Self> {
        let args = ["kubelet", "--resource", resource, "--serve", "{dir}/device-plugins"].map(str::to_owned);
        let sizes = ["--gpus".to_owned(), gpus.to_string(), "--units".to_owned(), units.to_string()];
        Ok(Self {
            resource: resource.to_owned(),
            program: std::env::current_exe().context("this program's path")?,
            args: args.into_iter().chain(sizes).collect(),
            simulated: None,
            relay: None,
        })
    }

    /// Returns a launcher of any command. The command must not be empty.
    pub(super) fn for_command(resource: &str, command: &[String]) -> Self {
        Self {
            resource: resource.to_owned(),
            program: PathBuf::from(&command[0]),
            args: command[1..].to_vec(),
            simulated: None,
            relay: None,
        }
    }

    /// Returns a launcher of Cleave's agent on simulated GPUs. The program is `cleave`, which has
    /// the subcommand `agent`, or `cleave-agent`.
    pub(super) fn for_agent(resource: &str, cleave: &Path, sharing: Sharing, gpus: u32, units: u32) -> Result<Self> {
        let alone = cleave.file_name().is_some_and(|name| name == "cleave-agent");
        let args = ["agent", "--node-name", "bench", "--offline", "{dir}/offline", "--metrics-addr", "127.0.0.1:0"];
        let args = &args[usize::from(alone)..];
        Ok(Self {
            resource: resource.to_owned(),
            program: cleave.to_owned(),
            args: args.iter().copied().map(str::to_owned).collect(),
            simulated: Some(SimulatedHardware::new(resource, cleave, sharing, gpus, units)?),
            relay: None,
        })
    }

    /// Adds a kubelet relay between the kubelet and the plugin, as the chart does.
    pub(super) fn with_relay(self, relay: Option<&Path>) -> Self {
        Self { relay: relay.map(Path::to_owned), ..self }
    }

    /// Starts the plugin, and waits until the kubelet has its devices.
    pub(super) async fn start(&self) -> Result<Plugin> {
        let directory = tempfile::Builder::new().prefix("cleave-bench").tempdir().context("a directory")?;
        let at = |name: &str| directory.path().join(name);
        let memory = Some(Path::new(MEMORY_FILE_SYSTEM)).filter(|path| path.is_dir());
        let run_directory = tempfile::Builder::new()
            .prefix("cleave-bench-run")
            .tempdir_in(memory.unwrap_or(directory.path()))
            .context("a directory")?;
        let (plugins, pods) = (at("device-plugins"), at("pod-resources/kubelet.sock"));
        for name in ["device-plugins", "pod-resources", "state", "cdi", "offline"] {
            std::fs::DirBuilder::new().mode(0o750).create(at(name)).context("a directory")?;
        }
        let kubelet = FakeKubelet::start_in(&plugins).context("a fake kubelet")?;
        let pod_resources = FakePodResources::start(&pods).context("fake PodResources")?;
        let log = at("log");
        let output = File::options().create(true).append(true).open(&log).context("a log")?;
        let dir = directory.path().to_str().context("a path in UTF-8")?;
        let command = |program: &Path, args: Vec<String>| -> Result<Command> {
            let mut command = Command::new(program);
            command
                .args(args)
                .env("CLEAVE_DEVICE_PLUGIN_DIR", &plugins)
                .env("CLEAVE_POD_RESOURCES_SOCKET", &pods)
                .env("CLEAVE_RUN_DIR", run_directory.path())
                .env("CLEAVE_STATE_DIR", at("state"))
                .env("CLEAVE_CDI_DIR", at("cdi"))
                .env("NODE_NAME", "bench")
                .stdin(Stdio::null())
                .stdout(output.try_clone().context("a log")?)
                .stderr(output.try_clone().context("a log")?)
                .kill_on_drop(true);
            if let Some(simulated) = &self.simulated {
                command.envs(simulated.environment(directory.path()));
            }
            Ok(command)
        };
        let machine = match &self.simulated {
            Some(simulated) => Some(simulated.create_machine(directory.path())?),
            None => None,
        };
        let host = match self.simulated.as_ref().and_then(SimulatedHardware::mps_host) {
            Some(program) => Some(command(program, Vec::new())?.spawn().context("failed to start the MPS host")?),
            None => None,
        };
        let relay = match &self.relay {
            Some(program) => {
                let mut command = command(program, Vec::new())?;
                let relay = command.env("CLEAVE_RELAY_DIR", at(RELAY_DIRECTORY)).spawn();
                let relay = relay.with_context(|| format!("failed to start {}", program.display()))?;
                wait_for_socket(&at(RELAY_DIRECTORY).join("kubelet.sock")).await.context("the relay")?;
                Some(relay)
            }
            None => None,
        };
        let args = self.args.iter().map(|arg| arg.replace("{dir}", dir)).collect();
        let mut command = command(&self.program, args)?;
        if relay.is_some() {
            command.env("CLEAVE_RELAY_DIR", at(RELAY_DIRECTORY));
        }
        let started = Instant::now();
        let child = command.spawn().with_context(|| format!("failed to start {}", self.program.display()))?;
        let resource = self.resource.clone();
        let mut plugin = Plugin {
            kubelet,
            resource,
            started,
            machine,
            child,
            command,
            host,
            relay,
            log,
            _pods: pod_resources,
            _directory: directory,
            _run_directory: run_directory,
        };
        plugin.wait_until_served().await?;
        Ok(plugin)
    }
}

impl Plugin {
    /// Returns the PID of the plugin.
    pub(super) fn pid(&self) -> Result<u32> {
        self.child.id().context("the plugin has exited")
    }

    /// Returns the PID of the kubelet relay, if one runs.
    pub(super) fn relay_pid(&self) -> Option<u32> {
        self.relay.as_ref().and_then(Child::id)
    }

    /// Returns the endpoint that the kubelet currently has for the resource.
    pub(super) fn endpoint(&self) -> Endpoint {
        self.kubelet.state().borrow().endpoints.get(&self.resource).cloned().unwrap_or_default()
    }

    /// Returns the number of lines in the log of the plugin, its relay and its MPS host.
    pub(super) fn count_log_lines(&self) -> usize {
        std::fs::read(&self.log).map_or(0, |log| String::from_utf8_lossy(&log).lines().count())
    }

    /// Waits until the kubelet has devices of the resource, and all these devices are healthy.
    pub(super) async fn wait_until_served(&mut self) -> Result<FakeKubeletState> {
        let resource = self.resource.clone();
        let all = |endpoint: &Endpoint| {
            !endpoint.devices.is_empty() && endpoint.healthy_ids().len() == endpoint.devices.len()
        };
        self.wait_for_kubelet(&format!("devices of {resource}"), |seen| seen.endpoints.get(&resource).is_some_and(all))
            .await
    }

    /// Waits until the resource's endpoint meets a condition, and returns the endpoint.
    pub(super) async fn wait_for_endpoint(
        &mut self,
        what: &str,
        mut condition: impl FnMut(&Endpoint) -> bool,
    ) -> Result<Endpoint> {
        let resource = self.resource.clone();
        let mut seen =
            self.wait_for_kubelet(what, |seen| seen.endpoints.get(&resource).is_some_and(&mut condition)).await?;
        seen.endpoints.remove(&resource).context("an endpoint")
    }

    /// Waits until the kubelet's state meets a condition. Fails if the plugin exits, or after
    /// [`PLUGIN_REACTION_TIMEOUT`].
    pub(super) async fn wait_for_kubelet(
        &mut self,
        what: &str,
        condition: impl FnMut(&FakeKubeletState) -> bool,
    ) -> Result<FakeKubeletState> {
        let failure = tokio::select! {
            seen = self.kubelet.wait_for(PLUGIN_REACTION_TIMEOUT, condition) => match seen {
                Some(seen) => return Ok(seen),
                None => format!("the kubelet did not see {what} within {PLUGIN_REACTION_TIMEOUT:?}"),
            },
            status = self.child.wait() => format!("the plugin exited: {}", status?),
        };
        bail!("{failure}\n{}", read_log_tail(&self.log))
    }

    /// Terminates the plugin, and restarts it with the same kubelet and directories.
    pub(super) async fn restart(&mut self) -> Result<()> {
        terminate(&mut self.child).await?;
        self.child = self.command.spawn().context("failed to restart the plugin")?;
        Ok(())
    }

    /// Terminates the plugin, its relay and its MPS host. Returns how long the plugin took to exit.
    pub(super) async fn stop(mut self) -> Result<Duration> {
        let took = terminate(&mut self.child).await?;
        if let Some(mut relay) = self.relay.take() {
            terminate(&mut relay).await.context("the relay")?;
        }
        if let Some(mut host) = self.host.take() {
            terminate(&mut host).await.context("the MPS host")?;
        }
        Ok(took)
    }
}

/// Waits until a socket accepts connections.
async fn wait_for_socket(path: &Path) -> Result<()> {
    let accepted = async {
        while tokio::net::UnixStream::connect(path).await.is_err() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PLUGIN_REACTION_TIMEOUT, accepted)
        .await
        .with_context(|| format!("nothing listens at {}", path.display()))
}

/// Sends SIGTERM to a process, and waits until the process exits. Returns how long the exit took.
async fn terminate(child: &mut Child) -> Result<Duration> {
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw);
    let sent = Instant::now();
    rustix::process::kill_process(pid.context("the process has exited")?, rustix::process::Signal::TERM)
        .context("SIGTERM")?;
    tokio::time::timeout(PLUGIN_REACTION_TIMEOUT, child.wait())
        .await
        .context("the process does not exit on SIGTERM")??;
    Ok(sent.elapsed())
}

/// Returns the last 20 lines of a log.
fn read_log_tail(log: &Path) -> String {
    let text = std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Memory of a process, in KiB.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessMemory {
    pub(super) resident: u64,
    pub(super) anonymous: u64,
    pub(super) proportional: u64,
}

/// Reads the memory of a process.
pub(super) fn read_memory(pid: u32) -> Result<ProcessMemory> {
    let read =
        |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).with_context(|| format!("{file} of {pid}"));
    let (status, rollup) = (read("status")?, read("smaps_rollup")?);
    let of = |text: &str, key: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next()?.parse().ok());
        value.with_context(|| format!("no {key} of {pid}"))
    };
    Ok(ProcessMemory {
        resident: of(&status, "VmRSS:")?,
        anonymous: of(&status, "RssAnon:")?,
        proportional: of(&rollup, "Pss:")?,
    })
}

/// Processor time, context switches and number of threads of a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessLoad {
    pub(super) time: Duration,
    /// Part of `time` in the threads that call NVML. The simulated NVML uses most of this part.
    pub(super) nvml_time: Duration,
    pub(super) switches: u64,
    pub(super) threads: usize,
}

/// Reads the processor time, context switches and number of threads of a process.
pub(super) fn read_load(pid: u32) -> Result<ProcessLoad> {
    let mut work = ProcessLoad { time: Duration::ZERO, nvml_time: Duration::ZERO, switches: 0, threads: 0 };
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).context("threads")? {
        let path = task?.path();
        let schedstat = std::fs::read_to_string(path.join("schedstat")).context("schedstat")?;
        let run: u64 = schedstat.split_whitespace().next().and_then(|ns| ns.parse().ok()).context("schedstat")?;
        work.time += Duration::from_nanos(run);
        if std::fs::read_to_string(path.join("comm")).context("comm")?.starts_with(NVML_THREAD_PREFIX) {
            work.nvml_time += Duration::from_nanos(run);
        }
        let status = std::fs::read_to_string(path.join("status")).context("status")?;
        let switches = status.lines().filter(|line| line.contains("voluntary_ctxt_switches:"));
        work.switches += switches.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>();
        work.threads += 1;
    }
    Ok(work)
}
