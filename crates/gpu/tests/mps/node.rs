//! Simulates a node with an MPS host and programs. Dropping the [`Node`] stops its processes and
//! removes its files.
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use cleave_gpu::mps::wire::{
    Allocation, DaemonSettings, DaemonState, DaemonStatus, Desired, FILE_FORMAT_VERSION, MpsHostStatus, Paths, Reply,
    Request,
};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use sim_machine::{Fault, FaultEffect, GpuDescription, Machine, MachineDescription};
use sim_mps::handshake;

/// Time limit of each wait. No step takes this long, even on a busy machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// File with the driver's version, below a node's directory.
const DRIVER_VERSION_FILE: &str = "driver-version";

pub(crate) struct Node {
    dir: tempfile::TempDir,
    pub(crate) machine: Machine,
    pub(crate) paths: Paths,
    pub(crate) desired: Desired,
    host: Option<Child>,
    env: Vec<(String, String)>,
}

impl Node {
    /// Returns a node with this number of H200s and no MPS host.
    pub(crate) fn without_mps_host(gpus: usize) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests need root: the MPS host passes on the credentials of other processes"
        );
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        // Link the files here: MPS servers and programs of other users may have no access to the
        // checkout.
        for name in ["cleave-client", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "libnvidia_ml.so"] {
            let (program, path) = (build_programs().join(name), dir.path().join(name));
            fs::hard_link(&program, &path).or_else(|_| fs::copy(&program, &path).map(drop)).unwrap();
        }
        let gpus = vec![GpuDescription { model: "H200-141".into(), ..GpuDescription::default() }; gpus];
        // The UUIDs depend on the name, so no two tests share a UUID.
        let name = dir.path().display().to_string();
        let description = MachineDescription { name, gpus, ..MachineDescription::default() };
        let machine = Machine::init(dir.path().join("machine"), &description).unwrap();
        let paths = Paths::new(dir.path().join("run"));
        let desired = Desired { version: FILE_FORMAT_VERSION, ..Desired::default() };
        let node = Self { dir, machine, paths, desired, host: None, env: Vec::new() };
        node.set_driver_version("580.159.04");
        node
    }

    /// Sets the driver's version for daemons that start from now on.
    pub(crate) fn set_driver_version(&self, version: &str) {
        fs::write(self.path(DRIVER_VERSION_FILE), format!("{version}\n")).unwrap();
    }

    /// Returns a node with an MPS host and one running MPS daemon per GPU.
    pub(crate) fn with_mps_host(gpus: usize) -> Self {
        let mut node = Self::without_mps_host(gpus);
        for gpu in 0..gpus {
            node.desire_daemon(gpu, default_daemon());
        }
        node.write_desired();
        node.start_mps_host();
        for gpu in 0..gpus {
            node.wait_for_state(gpu, DaemonState::Active);
        }
        node
    }

    /// Sets a variable for MPS hosts started from now on.
    pub(crate) fn set_env(&mut self, name: &str, value: &str) {
        self.env.push((name.to_owned(), value.to_owned()));
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn uuid(&self, gpu: usize) -> String {
        self.machine.snapshot().unwrap().gpus[gpu].uuid.clone()
    }

    /// Starts the MPS host.
    pub(crate) fn start_mps_host(&mut self) {
        let log = File::options().create(true).append(true).open(self.path("log.txt")).unwrap();
        let mut command = self.mps_host_command();
        self.host = Some(command.stdout(Stdio::null()).stderr(log).stdin(Stdio::null()).spawn().unwrap());
        let pid = self.mps_host_pid();
        self.wait_for_status("the MPS host writes its status", |status| status.pid == pid);
    }

    pub(crate) fn mps_host_command(&self) -> Command {
        let mut command = Command::new(mps_host_program());
        command
            .args(["mps-host", "--run-dir"])
            .arg(self.paths.run())
            .arg("--mps-control")
            .arg(self.path("nvidia-cuda-mps-control"))
            .arg("--nvml-library")
            .arg(self.path("libnvidia_ml.so"))
            .env("SIMGPU_STATE", self.machine.dir())
            .env("CLEAVE_DRIVER_VERSION_FILE", self.path(DRIVER_VERSION_FILE))
            .env("SIM_MPS_SERVER_START_MS", "0")
            .envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    pub(crate) fn mps_host_pid(&self) -> u32 {
        self.host.as_ref().unwrap().id()
    }

    /// Signals the MPS host and waits until it has exited.
    pub(crate) fn stop_mps_host(&mut self, with: Signal) -> ExitStatus {
        let mut host = self.host.take().unwrap();
        rustix::process::kill_process(Pid::from_child(&host), with).unwrap();
        wait_until("the MPS host exits", || host.try_wait().unwrap().is_some());
        host.wait().unwrap()
    }

    pub(crate) fn desire_daemon(&mut self, gpu: usize, daemon: DaemonSettings) {
        self.desired.daemons.insert(self.uuid(gpu), daemon);
    }

    pub(crate) fn desire_allocation(&mut self, id: &str, gpu: usize, threads: Option<u8>, memory_mib: Option<u64>) {
        let allocation = Allocation { device: self.uuid(gpu), threads, memory_mib, max_clients: None };
        self.desired.allocations.insert(id.to_owned(), allocation);
    }

    /// Writes the desired file and renames it into place, as the agent does.
    pub(crate) fn write_desired(&self) {
        self.write_desired_bytes(&serde_json::to_vec(&self.desired).unwrap());
    }

    pub(crate) fn write_desired_bytes(&self, bytes: &[u8]) {
        fs::create_dir_all(self.paths.mps_host_dir()).unwrap();
        let building = self.paths.mps_host_dir().join("desired.tmp");
        fs::write(&building, bytes).unwrap();
        fs::rename(&building, self.paths.desired()).unwrap();
    }

    /// Writes the desired file and waits until every door is ready.
    pub(crate) fn apply_desired(&self) {
        self.write_desired();
        let hash = self.desired.hash();
        self.wait_for_status("the MPS host applies the desired file", |status| status.desired == hash);
        for allocation in self.desired.allocations.keys() {
            assert_eq!(self.wait_until_ready(allocation), Reply::Done);
        }
    }

    pub(crate) fn wait_until_ready(&self, allocation: &str) -> Reply {
        let timeout_ms = u64::try_from(WAIT_TIMEOUT.as_millis()).unwrap();
        self.send_request(&Request::Await { allocation: allocation.to_owned(), timeout_ms })
    }

    pub(crate) fn send_request(&self, request: &Request) -> Reply {
        let text = serde_json::to_string(request).unwrap();
        self.send_line(&format!("{text}\n"))
    }

    pub(crate) fn send_line(&self, text: &str) -> Reply {
        let mut stream = UnixStream::connect(self.paths.socket()).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT * 2)).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    pub(crate) fn status(&self) -> Option<MpsHostStatus> {
        serde_json::from_slice(&fs::read(self.paths.status()).ok()?).ok()
    }

    /// Waits for a status that meets a condition.
    pub(crate) fn wait_for_status(
        &self,
        what: &str,
        mut condition: impl FnMut(&MpsHostStatus) -> bool,
    ) -> MpsHostStatus {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let status = self.status();
            if let Some(status) = status.as_ref().filter(|status| condition(status)) {
                return status.clone();
            }
            assert!(
                Instant::now() < deadline,
                "timed out waiting until {what}: {status:#?}\n{}",
                self.read_mps_host_log()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn wait_for_state(&self, gpu: usize, state: DaemonState) -> DaemonStatus {
        let uuid = self.uuid(gpu);
        let is = |status: &MpsHostStatus| status.daemons.get(&uuid).is_some_and(|daemon| daemon.state == state);
        self.wait_for_status(&format!("GPU {gpu} is {state:?}"), is).daemons.remove(&uuid).unwrap()
    }

    pub(crate) fn daemon_status(&self, gpu: usize) -> DaemonStatus {
        self.status().unwrap().daemons.remove(&self.uuid(gpu)).unwrap()
    }

    /// Returns the log of the MPS host.
    pub(crate) fn read_mps_host_log(&self) -> String {
        fs::read_to_string(self.path("log.txt")).unwrap_or_default()
    }

    /// Sends an administrator's command to a GPU's daemon, and returns the answer.
    pub(crate) fn send_admin_command(&self, gpu: usize, command: &str) -> String {
        let socket = self.paths.pipe(&self.uuid(gpu)).join("control_privileged");
        handshake::send_command(&socket, command).unwrap().unwrap().trim().to_owned()
    }

    /// Returns the command of a program that uses an allocation.
    pub(crate) fn client_command(&self, allocation: &str, arguments: &[&str]) -> Command {
        let device = &self.desired.allocations[allocation].device;
        let mut command = Command::new(self.path("cleave-client"));
        command
            .args(arguments)
            .env_remove("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
            .env_remove("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
            .env("SIMGPU_STATE", self.machine.dir())
            .env("CUDA_MPS_PIPE_DIRECTORY", self.paths.allocation(allocation))
            .env("CUDA_VISIBLE_DEVICES", device)
            .env_remove("NVIDIA_VISIBLE_DEVICES");
        command
    }

    pub(crate) fn start_client(&self, allocation: &str, arguments: &[&str]) -> Client {
        Client::spawn(self.client_command(allocation, arguments))
    }

    /// Starts a client that ignores SIGTERM.
    pub(crate) fn start_client_ignoring_sigterm(&self, allocation: &str, arguments: &[&str]) -> Client {
        let program = self.client_command(allocation, arguments);
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' TERM; exec \"$0\" \"$@\""]).arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        Client::spawn(shell)
    }

    /// Runs a program that uses the allocation. Returns the number of SMs and the memory limit in
    /// MiB that the program sees.
    pub(crate) fn run_and_read_limits(&self, allocation: &str) -> (u64, Option<u64>) {
        let mut client = self.start_client(allocation, &[]);
        let line = client.read_line();
        // Wait for the exit: after a kill, the MPS host would replace the server.
        client.wait();
        parse_limits(&line)
    }

    pub(crate) fn inject_fault(&self, call: &str, gpu: Option<usize>, effect: FaultEffect, remaining: Option<u32>) {
        let gpu = gpu.map(|gpu| self.uuid(gpu));
        let add = |state: &mut sim_machine::State| {
            let id = state.next_id();
            state.faults.push(Fault { id, call: call.to_owned(), gpu, effect, remaining });
            Ok::<_, sim_machine::Error>(())
        };
        self.machine.update(add).unwrap();
    }

    pub(crate) fn clear_faults(&self) {
        let clear = |state: &mut sim_machine::State| {
            state.faults.clear();
            Ok::<_, sim_machine::Error>(())
        };
        self.machine.update(clear).unwrap();
    }

    /// Returns the PIDs of the processes that an MPS host of this node has started for a GPU.
    pub(crate) fn device_processes(&self, gpu: usize) -> Vec<u32> {
        let wanted = format!("--device\0{}\0", self.uuid(gpu)).into_bytes();
        let is_wanted = |pid: &u32| {
            let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            arguments.windows(wanted.len()).any(|window| window == wanted)
        };
        let entries = fs::read_dir("/proc").unwrap().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_wanted).collect()
    }

    /// Returns the PID of the process that supervises a GPU. Waits until there is exactly one: a
    /// child of the MPS host that sets a compute mode has other arguments.
    pub(crate) fn device_process(&self, gpu: usize) -> u32 {
        wait_until("the GPU has one process", || self.device_processes(gpu).len() == 1);
        self.device_processes(gpu)[0]
    }

    /// Returns the number of descriptors that the process of the first GPU has open.
    pub(crate) fn count_mps_host_descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.device_process(0))).unwrap().count()
    }

    /// Returns the PIDs of MPS processes with a pipe directory of this node.
    pub(crate) fn mps_processes(&self) -> Vec<u32> {
        let run = self.paths.mps_host_dir().into_os_string().into_encoded_bytes();
        let wanted = [b"CUDA_MPS_PIPE_DIRECTORY=".as_slice(), &run].concat();
        let is_ours = |pid: &u32| {
            let read = |what: &str| fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
            read("comm").starts_with(b"nvidia-cuda-mps")
                && read("environ").split(|&byte| byte == 0).any(|v| v.starts_with(&wanted))
        };
        let entries = fs::read_dir("/proc").unwrap().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_ours).collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(mut host) = self.host.take() {
            // Send SIGTERM first, so that the MPS host stops its daemons.
            let _ = rustix::process::kill_process(Pid::from_child(&host), Signal::TERM);
            let deadline = Instant::now() + Duration::from_secs(15);
            while matches!(host.try_wait(), Ok(None)) && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(5));
            }
            let _ = host.kill();
            let _ = host.wait();
        }
        for pid in self.mps_processes() {
            let _ = rustix::process::kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL);
        }
        if thread::panicking() {
            eprintln!("{}", self.read_mps_host_log());
        }
    }
}

/// Returns settings of a daemon that serves all users and does not change the compute mode.
pub(crate) fn default_daemon() -> DaemonSettings {
    DaemonSettings {
        multi_user: true,
        exclusive: false,
        default_threads: None,
        default_memory_mib: None,
        accept_advisory: false,
    }
}

/// Reads the number of SMs and the memory limit in MiB from a line that a program printed.
pub(crate) fn parse_limits(line: &Value) -> (u64, Option<u64>) {
    assert_eq!(line["viaMps"], true, "{line}");
    (line["sms"].as_u64().unwrap(), line["limitMiB"].as_u64())
}

/// A running program.
pub(crate) struct Client {
    child: Child,
    lines: Receiver<String>,
}

impl Client {
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, lines }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the next line that the program prints.
    pub(crate) fn read_line(&mut self) -> Value {
        serde_json::from_str(&self.lines.recv_timeout(WAIT_TIMEOUT).expect("the program prints a line")).unwrap()
    }

    /// Returns whether the program is running and has printed no further line.
    pub(crate) fn has_no_output(&mut self) -> bool {
        self.lines.try_recv().is_err() && self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let child = &mut self.child;
        wait_until("the program exits", || child.try_wait().unwrap().is_some());
        child.wait().unwrap()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Ignore errors: the program may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn send_signal(pid: u32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn set_user(command: &mut Command, uid: u32) {
    command.uid(uid).gid(uid);
}

/// Returns the path of the MPS host's program.
pub(crate) fn mps_host_program() -> PathBuf {
    build_programs().join("examples/mps-host")
}

/// Returns the directory with the MPS host and the stand-ins for MPS, the CUDA program and NVML.
/// Builds these programs first, because `cargo test` builds only the packages that its arguments
/// name.
pub(crate) fn build_programs() -> &'static Path {
    static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let built = test.parent().and_then(Path::parent).unwrap().to_owned();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--bins", "--lib", "--example", "mps-host"]);
        for package in ["cleave-gpu", "sim-mps", "cleave-client", "sim-nvml"] {
            cargo.args(["--package", package]);
        }
        if built.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.arg("--target-dir").arg(built.parent().unwrap());
        assert!(cargo.status().unwrap().success(), "failed to build the simulated hardware");
        built
    })
}
