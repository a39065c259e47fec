//! Simulates a node with one H200, its MPS daemon and its programs. Dropping the [`Node`] kills the
//! MPS daemon and removes the simulated machine.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "only tests use it")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::Value;
use sim_machine::{ComputeMode, Fault, FaultEffect, GpuDescription, Machine, MachineDescription};
use sim_mps::handshake;

/// Timeout of each step, which is sufficient even on a busy machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// A node with one GPU.
pub(crate) struct Node {
    dir: tempfile::TempDir,
    pub(crate) machine: Machine,
    daemon: Option<Child>,
    env: Vec<(String, String)>,
}

impl Node {
    /// Creates a node without an MPS daemon.
    pub(crate) fn without_daemon() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let gpus = vec![GpuDescription { model: "H200-141".into(), ..GpuDescription::default() }];
        let description = MachineDescription { name: "test".into(), gpus, ..MachineDescription::default() };
        for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "cleave-client"] {
            // Under the first two names, the program acts as NVIDIA's programs. The programs find
            // each other in their common directory, which all users can access.
            let (program, path) = (env!("CARGO_BIN_EXE_cleave-client"), dir.path().join(name));
            fs::hard_link(program, &path).or_else(|_| fs::copy(program, &path).map(drop)).unwrap();
        }
        let machine = Machine::init(dir.path().join("machine"), &description).unwrap();
        Self { dir, machine, daemon: None, env: Vec::new() }
    }

    /// Creates a node, and starts an MPS daemon with `-f` and these arguments.
    pub(crate) fn with_daemon(arguments: &[&str]) -> Self {
        let mut node = Self::without_daemon();
        node.start_daemon(arguments);
        node
    }

    /// Sets an environment variable for daemons that start later.
    pub(crate) fn set_daemon_env(&mut self, name: &str, value: &str) {
        self.env.push((name.to_owned(), value.to_owned()));
    }

    /// Starts a daemon and waits until it listens.
    pub(crate) fn start_daemon(&mut self, arguments: &[&str]) {
        let mut command = self.control_command();
        let log = File::options().create(true).append(true).open(self.path("log.txt")).unwrap();
        command.arg("-f").args(arguments).stdout(log).stdin(Stdio::null());
        self.daemon = Some(command.spawn().unwrap());
        wait_until("the daemon listens", || handshake::probe_daemon(&self.socket_path("control_privileged")).is_ok());
    }

    /// Returns a command that runs `nvidia-cuda-mps-control` on this node.
    pub(crate) fn control_command(&self) -> Command {
        let mut command = Command::new(self.path("nvidia-cuda-mps-control"));
        self.set_env(&mut command);
        command.env("CUDA_MPS_LOG_DIRECTORY", self.path("log"));
        command.env("SIM_MPS_SERVER_START_MS", "0");
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs `nvidia-cuda-mps-control` with these arguments, as this user if given, and returns the
    /// output.
    pub(crate) fn run_control(&self, arguments: &[&str], uid: Option<u32>) -> String {
        let mut command = self.control_command();
        command.args(arguments).stdin(Stdio::null());
        if let Some(uid) = uid {
            set_user(&mut command, uid);
        }
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    fn set_env(&self, command: &mut Command) {
        command
            .env_remove("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
            .env_remove("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
            .env("SIMGPU_STATE", self.machine.dir())
            .env("CUDA_MPS_PIPE_DIRECTORY", self.path("pipe"))
            .env("CUDA_VISIBLE_DEVICES", self.uuid())
            .env_remove("NVIDIA_VISIBLE_DEVICES");
    }

    /// Returns the path of a file of this node.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the path of a socket in the pipe directory.
    pub(crate) fn socket_path(&self, name: &str) -> PathBuf {
        self.path("pipe").join(name)
    }

    /// Returns the GPU's UUID.
    pub(crate) fn uuid(&self) -> String {
        self.machine.snapshot().unwrap().gpus[0].uuid.clone()
    }

    /// Returns the log of the daemon and its servers.
    pub(crate) fn read_log(&self) -> String {
        fs::read_to_string(self.path("log.txt")).unwrap()
    }

    /// Sends an administrator's command over `control_privileged`, and returns the answer.
    pub(crate) fn send_command(&self, command: &str) -> String {
        handshake::send_command(&self.socket_path("control_privileged"), command).unwrap().unwrap()
    }

    /// Sends an administrator's command in the background. The channel receives the answer.
    pub(crate) fn send_command_in_background(&self, command: &str) -> Receiver<String> {
        let (sender, answer) = mpsc::channel();
        let (socket, command) = (self.socket_path("control_privileged"), command.to_owned());
        thread::spawn(move || {
            if let Ok(Some(text)) = handshake::send_command(&socket, &command) {
                // Ignore errors, because the test may have dropped the receiver.
                let _ = sender.send(text);
            }
        });
        answer
    }

    /// Returns the PID of the server. Starts the server if necessary.
    pub(crate) fn wait_for_server(&self) -> u32 {
        if self.send_command("get_server_list").is_empty() {
            self.send_command("start_server -uid 0");
        }
        let pid = self.send_command("get_server_list").trim().parse().unwrap();
        wait_until("the server is ACTIVE", || self.send_command(&format!("get_server_status {pid}")) == "ACTIVE\n");
        pid
    }

    /// Returns the PID of the server after it has entered FAULT.
    pub(crate) fn wait_for_fault(&self) -> u32 {
        let pid = self.send_command("get_server_list").trim().parse().unwrap();
        wait_until("the server is in FAULT", || self.send_command(&format!("get_server_status {pid}")) == "FAULT\n");
        pid
    }

    /// Starts a program that always runs a kernel of `kernel_ms` milliseconds.
    pub(crate) fn start_busy_client(&self, kernel_ms: &str) -> Client {
        self.start_busy_client_with(kernel_ms, &[])
    }

    /// Starts a program as [`Self::start_busy_client`] does, with more arguments.
    pub(crate) fn start_busy_client_with(&self, kernel_ms: &str, more: &[&str]) -> Client {
        let arguments = ["--kernel-ms", kernel_ms, "--busy-forever"];
        let mut client = self.start_running_client(&[arguments.as_slice(), more].concat());
        assert_eq!(client.read_line()["launched"], true);
        client
    }

    /// Returns a command that runs a client program on this node.
    pub(crate) fn client_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.dir.path().join("cleave-client"));
        self.set_env(&mut command);
        command.args(arguments);
        command
    }

    /// Starts a program.
    pub(crate) fn start_client(&self, arguments: &[&str]) -> Client {
        Client::spawn(self.client_command(arguments))
    }

    /// Starts a program, waits for its first line, and checks that the program uses MPS.
    pub(crate) fn start_running_client(&self, arguments: &[&str]) -> Client {
        let mut client = self.start_client(arguments);
        let line = client.read_line();
        assert_eq!(line["viaMps"], true, "{line}");
        client
    }

    /// Runs a program with these environment variables, and returns its first line.
    pub(crate) fn run_and_read_line(&self, env: &[(&str, &str)]) -> Value {
        let mut command = self.client_command(&[]);
        command.envs(env.iter().copied());
        Client::spawn(command).read_line()
    }

    /// Runs other programs to completion, so that an unwanted event has time to happen.
    pub(crate) fn wait_for_side_effects(&self) {
        for _ in 0..5 {
            assert_eq!(self.run_and_read_line(&[("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")])["viaMps"], false);
        }
    }

    /// Returns the PIDs of the server's clients.
    pub(crate) fn client_pids(&self, server: u32) -> Vec<u32> {
        self.send_command(&format!("get_client_list {server}")).lines().map(|pid| pid.parse().unwrap()).collect()
    }

    /// Sets the GPU's compute mode.
    pub(crate) fn set_compute_mode(&self, mode: ComputeMode) {
        let set = |state: &mut sim_machine::State| {
            state.gpus[0].compute_mode = mode;
            Ok::<_, sim_machine::Error>(())
        };
        self.machine.update(set).unwrap();
    }

    /// Injects a fault into a call. `remaining` is the maximum number of calls that the fault
    /// affects, or `None` for no limit.
    pub(crate) fn inject_fault(&self, call: &str, effect: FaultEffect, remaining: Option<u32>) {
        let add = |state: &mut sim_machine::State| {
            let id = state.next_id();
            state.faults.push(Fault { id, call: call.to_owned(), gpu: None, effect, remaining });
            Ok::<_, sim_machine::Error>(())
        };
        self.machine.update(add).unwrap();
    }

    /// Returns whether every injected fault has already affected its maximum number of calls.
    pub(crate) fn are_faults_consumed(&self) -> bool {
        self.machine.snapshot().unwrap().faults.iter().all(|fault| fault.remaining == Some(0))
    }

    /// Makes the GPU fall off the bus.
    pub(crate) fn lose_gpu(&self) {
        let lose = |state: &mut sim_machine::State| {
            state.gpus[0].lost = true;
            Ok::<_, sim_machine::Error>(())
        };
        self.machine.update(lose).unwrap();
    }

    /// Clears all faults.
    pub(crate) fn clear_faults(&self) {
        let clear = |state: &mut sim_machine::State| {
            state.faults.clear();
            Ok::<_, sim_machine::Error>(())
        };
        self.machine.update(clear).unwrap();
    }

    /// Kills the daemon.
    pub(crate) fn kill_daemon(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    /// Waits until the daemon exits, and returns its exit status.
    pub(crate) fn wait_for_daemon_exit(&mut self) -> ExitStatus {
        let daemon = self.daemon.as_mut().unwrap();
        wait_until("the daemon exits", || daemon.try_wait().unwrap().is_some());
        self.daemon.take().unwrap().wait().unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            // The daemon's servers exit with it.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        // A failed test may leave a background daemon. Check the program's path, because another
        // process may have reused the PID.
        let pid = fs::read_to_string(self.socket_path("nvidia-cuda-mps-control.pid")).unwrap_or_default();
        let is_ours = fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.starts_with(self.dir.path()));
        if let (true, Some(pid)) = (is_ours, pid.parse().ok().and_then(Pid::from_raw)) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// A running program.
pub(crate) struct Client {
    child: Child,
    lines: Receiver<String>,
}

impl Client {
    /// Starts a program.
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

    /// Waits for the program's next line, and returns it.
    pub(crate) fn read_line(&mut self) -> Value {
        serde_json::from_str(&self.lines.recv_timeout(STEP_TIMEOUT).expect("the program prints a line")).unwrap()
    }

    /// Returns whether the program is running and has printed no unread line. Panics if there is an
    /// unread line.
    pub(crate) fn has_no_output(&mut self) -> bool {
        match self.lines.try_recv() {
            Ok(line) => panic!("the program printed {line}"),
            Err(_) => self.child.try_wait().unwrap().is_none(),
        }
    }

    /// Waits for the next error that the program prints, and returns its `CUresult`.
    pub(crate) fn wait_for_error(&mut self) -> i64 {
        loop {
            let line = self.read_line();
            if let Some(code) = line["error"].as_i64() {
                return code;
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Sends SIGSTOP to the program, and waits until the program is stopped.
    pub(crate) fn suspend(&self) {
        self.signal(Signal::STOP);
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
            stat.rsplit(')').next().unwrap().trim_start().chars().next()
        };
        wait_until("the program is stopped", || state() == Some('T'));
    }

    /// Sends a signal to the program, and waits until the program has exited.
    pub(crate) fn kill(mut self, signal: Signal) {
        self.signal(signal);
        self.wait();
    }

    /// Sends a line to a program with `--read-line`.
    pub(crate) fn send_line(&mut self) {
        self.child.stdin.take().unwrap().write_all(b"\n").unwrap();
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let child = &mut self.child;
        wait_until("the program exits", || child.try_wait().unwrap().is_some());
        child.wait().unwrap()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Ignore errors, because the program has usually exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal to a running process.
pub(crate) fn send_signal(pid: u32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

/// Waits for the answer to an administrator's command.
pub(crate) fn wait_for_answer(reply: &Receiver<String>) -> String {
    reply.recv_timeout(STEP_TIMEOUT).expect("the daemon answers")
}

/// Waits for a condition. `what` describes the condition in the failure message.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + STEP_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether tests can create processes of other users.
pub(crate) fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root");
    }
    root
}

/// Configures a command to run as another user.
pub(crate) fn set_user(command: &mut Command, uid: u32) {
    command.uid(uid).gid(uid);
}
