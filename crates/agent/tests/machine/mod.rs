//! Runs a node without a cluster: simulated GPUs, a fake kubelet, and the agent and the MPS host as
//! processes. Dropping the node stops the agents and the MPS host.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "only tests use it")]

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cleave_api::GpuNodeSpec;
use cleave_api::gpunode::{GpuNodeStatus, GpuSpec, MpsPartition, MpsSlices, Partition, TimeSlicedPartition};
use cleave_gpu::mps::wire;
use cleave_kubelet::ContainerDevices;
use cleave_kubelet::fake::{FakeKubelet, FakeKubeletState, FakePodResources};
use serde_json::Value;

/// Timeout of each wait. Long enough for a busy machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";
pub(crate) const TIMESLICE_RESOURCE: &str = "nvidia.com/gpu-timeslice";
pub(crate) const WHOLE_GPU_RESOURCE: &str = "nvidia.com/gpu";

/// Builds the programs of other packages that the tests start, so that the programs are never
/// outdated. Returns their directory.
fn build_programs() -> &'static Path {
    static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        let packages = ["cleave", "sim-nvml", "sim-mps", "simgpu", "cleave-client"];
        let mut cargo = Command::new(env!("CARGO"));
        cargo.arg("build").args(packages.iter().flat_map(|package| ["--package", package]));
        assert!(cargo.stderr(Stdio::null()).status().unwrap().success(), "failed to build the programs");
        // The path of the test program is target/debug/deps/<test>.
        std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned()
    })
}

/// A simulated node.
pub(crate) struct Machine {
    directory: tempfile::TempDir,
    pub(crate) uuids: Vec<String>,
    pub(crate) kubelet: FakeKubelet,
    pub(crate) pods: FakePodResources,
    library: PathBuf,
    agent: Option<Child>,
    agent_port: u16,
    first_agent: Option<Child>,
    first_agent_port: u16,
    host: Option<Child>,
}

impl Machine {
    /// Creates a node with these GPUs. Only the fake kubelet runs on the node.
    pub(crate) fn new(gpus: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["plugins", "spec", "sim"] {
            fs::create_dir(path(name)).unwrap();
        }
        let kubelet = FakeKubelet::start_in(&path("plugins")).unwrap();
        let pods = FakePodResources::start(&path("pods.sock")).unwrap();
        let library = build_programs().join("libnvidia_ml.so");
        let mut machine = Self {
            directory,
            uuids: Vec::new(),
            kubelet,
            pods,
            library,
            agent: None,
            agent_port: 0,
            first_agent: None,
            first_agent_port: 0,
            host: None,
        };
        let mut arguments = vec!["init"];
        arguments.extend(gpus.iter().flat_map(|gpu| ["--gpus", gpu]));
        machine.simgpu(&arguments);
        let shown: Value = serde_json::from_str(&machine.simgpu(&["show", "--output", "json"])).unwrap();
        machine.uuids =
            shown["gpus"].as_array().unwrap().iter().map(|gpu| gpu["uuid"].as_str().unwrap().to_owned()).collect();
        machine
    }

    /// Creates a node on which the agent and the MPS host run.
    pub(crate) fn start(gpus: &[&str], spec: impl FnOnce(&[String]) -> Vec<GpuSpec>) -> Self {
        let mut machine = Self::new(gpus);
        let spec = spec(&machine.uuids);
        machine.set_spec("first", spec);
        machine.start_mps_host();
        machine.start_agent(&[]);
        machine
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Sets the path of the NVML library for programs that start from now on. Returns the previous
    /// path.
    pub(crate) fn replace_library(&mut self, path: PathBuf) -> PathBuf {
        std::mem::replace(&mut self.library, path)
    }

    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(build_programs().join(program));
        command.env("SIMGPU_STATE", self.path("sim")).env("SIM_MPS_SERVER_START_MS", "0").stdin(Stdio::null());
        command
    }

    /// Runs `simgpu`, which shows and changes the simulated GPUs. Returns its output.
    pub(crate) fn simgpu(&self, arguments: &[&str]) -> String {
        let output = self.command("simgpu").args(arguments).output().unwrap();
        assert!(output.status.success(), "simgpu {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a program that uses a device and does not run in a pod.
    pub(crate) fn start_program_outside_pods(&self, device: &str) -> Child {
        self.command("simgpu").args(["hold", device]).stdout(Stdio::null()).spawn().unwrap()
    }

    fn open_log(&self, name: &str) -> File {
        File::options().create(true).append(true).open(self.path(name)).unwrap()
    }

    /// Starts the agent with additional arguments.
    pub(crate) fn start_agent(&mut self, more: &[&str]) {
        self.start_agent_as(self.command("cleave"), more);
    }

    /// Starts the agent through another program. The command line of the agent follows `wrapper`,
    /// and the program must replace itself with the agent.
    pub(crate) fn start_agent_under(&mut self, wrapper: &[&str]) {
        let command = self.command_under(wrapper);
        self.start_agent_as(command, &[]);
    }

    /// Starts the MPS host through another program, as in [`Self::start_agent_under`].
    pub(crate) fn start_mps_host_under(&mut self, wrapper: &[&str]) {
        let command = self.command_under(wrapper);
        self.start_mps_host_as(command);
    }

    fn command_under(&self, wrapper: &[&str]) -> Command {
        let mut command = self.command(wrapper[0]);
        command.args(&wrapper[1..]).arg(build_programs().join("cleave"));
        command
    }

    /// Returns the PID of the last started agent.
    pub(crate) fn agent_pid(&self) -> u32 {
        self.agent.as_ref().unwrap().id()
    }

    /// Returns the PID of the MPS host's process for a device. Panics unless there is exactly one.
    pub(crate) fn device_process(&self, device: &str) -> u32 {
        let wanted = format!("--device\0{device}\0--parent\0{}\0", self.host.as_ref().unwrap().id()).into_bytes();
        let is_wanted = |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(&wanted));
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let found: Vec<u32> =
            entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_wanted).collect();
        assert_eq!(found.len(), 1, "processes of {device}: {found:?}");
        found[0]
    }

    /// Returns the address of the last started agent's HTTP port.
    pub(crate) fn agent_address(&self) -> std::net::SocketAddr {
        ([127, 0, 0, 1], self.agent_port).into()
    }

    /// Starts a second agent with additional arguments. The first agent continues to run.
    pub(crate) fn start_second_agent(&mut self, more: &[&str]) {
        self.first_agent = self.agent.take();
        self.first_agent_port = self.agent_port;
        self.start_agent(more);
    }

    /// Returns the PIDs of the first and the second agent.
    pub(crate) fn agent_pids(&self) -> [u32; 2] {
        [&self.first_agent, &self.agent].map(|agent| agent.as_ref().unwrap().id())
    }

    /// Returns the answers of the first and the second agent to `/readyz`. An entry is `None` if
    /// the agent does not answer.
    pub(crate) fn readiness(&self) -> [Option<String>; 2] {
        [self.first_agent_port, self.agent_port].map(|port| request_readyz(port).ok())
    }

    /// Returns the value of the agent's metric for the first series with all of `labels`, such as
    /// `uuid="GPU-a"`. Returns `None` if no such series exists.
    pub(crate) fn metric(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let text = request_path(self.agent_port, "/metrics").ok()?;
        let mut series = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} "));
        let (_, value) = series.find(|(found, _)| labels.iter().all(|label| found.contains(label)))?;
        value.parse().ok()
    }

    /// Returns the value of a metric of the agent that has only the label `node`.
    pub(crate) fn metric_without_labels(&self, name: &str) -> Option<f64> {
        self.metric(name, &["node="])
    }

    /// Stops the first of two agents with SIGTERM. Returns its exit status.
    pub(crate) fn stop_first_agent(&mut self) -> std::process::ExitStatus {
        stop_with_sigterm(self.first_agent.take().unwrap())
    }

    /// Returns the exit status of the last started agent. Returns `None` while the agent runs.
    pub(crate) fn agent_exit_status(&mut self) -> Option<std::process::ExitStatus> {
        self.agent.as_mut()?.try_wait().unwrap()
    }

    /// Returns the number of lines in the log of all agents that contain all of `words`.
    pub(crate) fn count_logged(&self, words: &[&str]) -> usize {
        let log = fs::read_to_string(self.path("agent.log")).unwrap_or_default();
        log.lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
    }

    /// Kills the first of two agents with SIGKILL.
    pub(crate) fn kill_first_agent(&mut self) {
        kill_if_running(&mut self.first_agent);
    }

    /// Starts the agent under a supervisor that restarts the agent, as in the chart.
    pub(crate) fn start_supervised_agent(&mut self) {
        let mut command = self.command("cleave-supervise");
        command.arg(build_programs().join("cleave"));
        self.start_agent_as(command, &[]);
    }

    /// Returns the PID of the agent under its supervisor.
    pub(crate) fn supervised_pid(&self) -> Option<u32> {
        let pid = self.agent.as_ref().unwrap().id();
        fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.split_whitespace().next()?.parse().ok()
    }

    fn start_agent_as(&mut self, mut command: Command, more: &[&str]) {
        self.add_common_arguments(&mut command);
        command.arg("--offline").arg(self.path("spec")).args(more);
        self.agent_port = free_port();
        if !more.contains(&"--metrics-addr") {
            command.arg("--metrics-addr").arg(format!("127.0.0.1:{}", self.agent_port));
        }
        self.agent = Some(command.stderr(self.open_log("agent.log")).spawn().unwrap());
    }

    /// Starts the agent without a spec, as in a cluster with an API server that does not answer.
    pub(crate) fn start_agent_without_api_server(&mut self) {
        let mut command = self.command("cleave");
        self.add_common_arguments(&mut command);
        command.args(["--metrics-addr", "127.0.0.1:0"]);
        command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1").env("KUBERNETES_SERVICE_PORT", "1");
        self.agent = Some(command.stderr(self.open_log("agent.log")).spawn().unwrap());
    }

    /// Adds the arguments that do not depend on the source of the spec.
    fn add_common_arguments(&self, command: &mut Command) {
        command.args(["--log", "info,cleave_agent=debug", "agent", "--node-name", "node"]);
        command
            .args(["--allocation-grace", "1"])
            .arg("--run-dir")
            .arg(self.path("run"))
            .arg("--state-dir")
            .arg(self.path("state"));
        command
            .arg("--device-plugin-dir")
            .arg(self.path("plugins"))
            .arg("--pod-resources-socket")
            .arg(self.path("pods.sock"));
        command.arg("--nvml-library").arg(&self.library);
    }

    /// Starts the MPS host.
    pub(crate) fn start_mps_host(&mut self) {
        self.start_mps_host_as(self.command("cleave"));
    }

    fn start_mps_host_as(&mut self, mut command: Command) {
        command.args(["mps-host", "--mps-control"]).arg(build_programs().join("nvidia-cuda-mps-control"));
        command.arg("--nvml-library").arg(&self.library).arg("--run-dir").arg(self.path("run"));
        self.host = Some(command.stdout(self.open_log("host.log")).stderr(self.open_log("host.log")).spawn().unwrap());
    }

    /// Kills the last started agent with SIGKILL.
    pub(crate) fn kill_agent(&mut self) {
        kill_if_running(&mut self.agent);
    }

    /// Kills the MPS host with SIGKILL.
    pub(crate) fn kill_mps_host(&mut self) {
        kill_if_running(&mut self.host);
    }

    /// Simulates a reboot of the node: ends the agent and the MPS host, clears the state that a
    /// boot clears, and sets another boot id in the checkpoint.
    pub(crate) fn reboot(&mut self) {
        self.kill_agent();
        self.stop_mps_host();
        fs::remove_dir_all(self.path("run")).unwrap();
        self.simgpu(&["reboot"]);
        let checkpoint = self.path("state/agent.json");
        let mut json: Value = serde_json::from_slice(&fs::read(&checkpoint).unwrap()).unwrap();
        assert!(json["bootId"].is_string(), "{json}");
        json["bootId"] = "another".into();
        fs::write(&checkpoint, json.to_string()).unwrap();
    }

    /// Stops the MPS host with SIGTERM. The MPS host also ends its daemons.
    fn stop_mps_host(&mut self) {
        if let Some(mut host) = self.host.take() {
            let pid = rustix::process::Pid::from_child(&host);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            let _ = host.wait();
        }
    }

    /// Stops the last started agent with SIGTERM. Returns its exit status.
    pub(crate) fn stop_agent(&mut self) -> std::process::ExitStatus {
        stop_with_sigterm(self.agent.take().unwrap())
    }

    pub(crate) fn agent_is_running(&mut self) -> bool {
        self.agent.as_mut().unwrap().try_wait().unwrap().is_none()
    }

    /// Writes the spec of the `GpuNode`, with `plan` as the plan's id.
    pub(crate) fn set_spec(&self, plan: &str, gpus: Vec<GpuSpec>) {
        let spec = GpuNodeSpec { plan_id: plan.into(), gpus };
        let new = self.path("spec/spec.json.new");
        fs::write(&new, serde_json::to_vec(&spec).unwrap()).unwrap();
        fs::rename(new, self.path("spec/spec.json")).unwrap();
    }

    /// Sets the pods that the API server lists for the node. Tests with pods must call this
    /// function before the agent starts.
    pub(crate) fn set_pods(&self, pods: &[Value]) {
        let new = self.path("spec/pods.json.new");
        fs::write(&new, serde_json::to_vec(pods).unwrap()).unwrap();
        fs::rename(new, self.path("spec/pods.json")).unwrap();
    }

    /// Waits until the agent's status meets the condition, and returns the status.
    pub(crate) async fn wait_for_status(
        &self,
        what: &str,
        condition: impl Fn(&GpuNodeStatus) -> bool,
    ) -> GpuNodeStatus {
        let read = || serde_json::from_slice(&fs::read(self.path("spec/status.json")).ok()?).ok();
        self.wait_until(what, || read().filter(&condition)).await
    }

    /// Reads the desired file, which the agent writes for the MPS host.
    pub(crate) fn read_desired_file(&self) -> Option<wire::Desired> {
        serde_json::from_slice(&fs::read(self.path("run/mps/desired.json")).ok()?).ok()
    }

    /// Reads the status file of the MPS host.
    pub(crate) fn mps_host_status(&self) -> Option<wire::MpsHostStatus> {
        serde_json::from_slice(&fs::read(self.path("run/mps/status.json")).ok()?).ok()
    }

    /// Returns the reasons of all Events that the agent has published.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("spec/events.jsonl")).unwrap_or_default();
        let reason = |line: &str| serde_json::from_str::<Value>(line).unwrap()["reason"].as_str().unwrap().to_owned();
        text.lines().map(reason).collect()
    }

    /// Waits until the kubelet's view meets the condition, and returns the view.
    pub(crate) async fn wait_for_view(
        &self,
        what: &str,
        condition: impl Fn(&FakeKubeletState) -> bool,
    ) -> FakeKubeletState {
        match self.kubelet.wait_for(TEST_TIMEOUT, condition).await {
            Some(seen) => seen,
            None => self.panic_with_logs(what),
        }
    }

    /// Waits until the kubelet sees exactly `count` healthy devices of a resource.
    pub(crate) async fn wait_for_healthy(&self, resource: &str, count: usize) -> FakeKubeletState {
        let condition = |seen: &FakeKubeletState| {
            seen.endpoints.get(resource).is_some_and(|endpoint| endpoint.healthy_ids().len() == count)
        };
        self.wait_for_view(&format!("{count} healthy {resource}"), condition).await
    }

    /// Waits until `condition` returns a value, and returns the value. Panics with `what` and the
    /// logs after [`TEST_TIMEOUT`].
    pub(crate) async fn wait_until<T>(&self, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + TEST_TIMEOUT;
        while Instant::now() < end {
            if let Some(value) = condition() {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.panic_with_logs(what)
    }

    fn panic_with_logs(&self, what: &str) -> ! {
        let log = |name: &str| fs::read_to_string(self.path(name)).unwrap_or_default();
        let seen: Vec<_> = self
            .kubelet
            .state()
            .borrow()
            .endpoints
            .iter()
            .map(|(name, e)| (name.clone(), e.devices.len(), e.healthy_ids().len()))
            .collect();
        panic!(
            "never: {what}\nkubelet: {seen:?}\n--- agent\n{}\n--- MPS host\n{}\n--- status\n{}",
            log("agent.log"),
            log("host.log"),
            log("spec/status.json")
        );
    }

    /// Returns the command of a CUDA program with the environment of a container that got this
    /// response.
    pub(crate) fn container_command(
        &self,
        response: &cleave_kubelet::proto::v1beta1::ContainerAllocateResponse,
    ) -> Command {
        let mut command = self.command("cleave-client");
        for (name, value) in &response.envs {
            let mount = response.mounts.iter().find(|mount| mount.container_path == *value);
            command.env(name, mount.map_or(value, |mount| &mount.host_path));
        }
        command
    }

    /// Starts a CUDA program as in a container, with additional environment variables and
    /// arguments.
    pub(crate) fn start_client(
        &self,
        response: &cleave_kubelet::proto::v1beta1::ContainerAllocateResponse,
        envs: &[(&str, &str)],
        more: &[&str],
    ) -> Child {
        let mut command = self.container_command(response);
        command.envs(envs.iter().copied()).args(more).stdout(Stdio::null()).spawn().unwrap()
    }

    /// Runs a CUDA program as in a container. Returns the JSON in the first line of its output, or
    /// null.
    pub(crate) fn run_client(
        &self,
        response: &cleave_kubelet::proto::v1beta1::ContainerAllocateResponse,
        more: &[&str],
    ) -> Value {
        let output = self.container_command(response).args(more).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        serde_json::from_str(text.lines().next().unwrap_or_default()).unwrap_or(Value::Null)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill_agent();
        self.kill_first_agent();
        self.stop_mps_host();
    }
}

/// Stops an agent with SIGTERM. Returns its exit status.
fn stop_with_sigterm(mut agent: Child) -> std::process::ExitStatus {
    let pid = rustix::process::Pid::from_child(&agent);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    agent.wait().unwrap()
}

/// Returns a port on which nothing listens.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Requests `/readyz` from an agent. Returns the whole HTTP response.
fn request_readyz(port: u16) -> std::io::Result<String> {
    request_path(port, "/readyz")
}

/// Requests a path from an agent. Returns the whole HTTP response.
fn request_path(port: u16, path: &str) -> std::io::Result<String> {
    let mut agent = std::net::TcpStream::connect(("127.0.0.1", port))?;
    agent.set_read_timeout(Some(TEST_TIMEOUT))?;
    write!(agent, "GET {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    agent.read_to_string(&mut answer)?;
    Ok(answer)
}

fn kill_if_running(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        kill_child(&mut child);
    }
}

pub(crate) fn kill_child(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Kills a process by its PID with SIGKILL.
pub(crate) fn kill_pid(pid: u32) {
    signal_pid(pid, rustix::process::Signal::KILL);
}

/// Sends a signal to a process.
pub(crate) fn signal_pid(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Returns a row of the kubelet's list of allocated devices.
pub(crate) fn container_devices(pod: &str, resource: &str, ids: &[String]) -> ContainerDevices {
    ContainerDevices {
        namespace: "ns".into(),
        pod: pod.into(),
        container: "c".into(),
        resource: resource.into(),
        ids: ids.to_vec(),
    }
}

/// Returns a pod that is bound to the node. The pod's only container requests shares, and the pod
/// has a reservation of these shares on a device.
pub(crate) fn pod(name: &str, shares: usize, device: &str) -> Value {
    let placement = serde_json::json!({"until": 0, "nodes": {"node": [{"resource": MPS_RESOURCE, "units": shares, "device": device}]}});
    let annotations = serde_json::json!({"cleave.dev/placement": placement.to_string()});
    serde_json::json!({
        "metadata": {"name": name, "namespace": "ns", "uid": name, "annotations": annotations},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {MPS_RESOURCE: shares.to_string()}}}]},
        "status": {"phase": "Pending"},
    })
}

pub(crate) fn share_ids(uuid: &str, numbers: impl IntoIterator<Item = u32>) -> Vec<String> {
    numbers.into_iter().map(|number| format!("{uuid}::{number}")).collect()
}

pub(crate) fn mps_spec(uuid: &str, units: u32) -> GpuSpec {
    let slices = MpsSlices {
        resource: MPS_RESOURCE.into(),
        count: units,
        first: 0,
        memory_mib: (1..=units).map(|k| 10_000 * u64::from(k) / u64::from(units)).collect(),
        threads: (1..=units).map(|k| u8::try_from(100 * k / units).unwrap()).collect(),
        max_clients: None,
    };
    let partition = MpsPartition {
        multi_user: true,
        compute_mode: cleave_api::sharingpolicy::ComputeMode::ExclusiveProcess,
        enforcement: cleave_api::sharingpolicy::MpsEnforcement::Hard,
        slices: vec![slices],
    };
    spec(uuid, Partition { mps: Some(partition), ..Partition::default() })
}

pub(crate) fn timeslice_spec(uuid: &str, replicas: u32) -> GpuSpec {
    let partition = TimeSlicedPartition {
        resource: TIMESLICE_RESOURCE.into(),
        replicas,
        interval: cleave_api::sharingpolicy::Interval::Default,
    };
    spec(uuid, Partition { time_slicing: Some(partition), ..Partition::default() })
}

pub(crate) fn spec(uuid: &str, partition: Partition) -> GpuSpec {
    GpuSpec { uuid: uuid.into(), partition, ..GpuSpec::default() }
}
