//! Tests that the agent terminates the MPS clients of pods that end. Another pod on the same GPU
//! must continue. Before the tests kill a program with the kubelet's signals, the agent must have
//! terminated its client.
use std::fs::{self, File};
use std::process::{Child, ExitStatus};

use cleave_api::gpunode::GpuNodeStatus;
use cleave_gpu::mps::wire::DaemonState;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::machine::{MPS_RESOURCE, Machine, container_devices, mps_spec, pod, share_ids};

/// Arguments of a client that always runs a long kernel. If such a client is killed, all other
/// clients of its daemon fail.
const LONG_KERNELS_ARGUMENTS: [&str; 3] = ["--kernel-ms", "1000", "--busy-forever"];

/// A node whose pods each have one share and one program.
struct NodeWithPrograms {
    machine: Machine,
    pods: Vec<Value>,
    rows: Vec<cleave_kubelet::ContainerDevices>,
}

/// The running program of a pod. Dropping this value kills the program.
struct Program {
    child: Child,
    name: &'static str,
}

impl Program {
    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn send_signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Ignore errors, because most programs have already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl NodeWithPrograms {
    /// Starts a node with ten shares on each GPU.
    async fn new(gpus: &[&str]) -> Self {
        let mut machine = Machine::new(gpus);
        let partitions: Vec<_> = machine.uuids.iter().map(|uuid| mps_spec(uuid, 10)).collect();
        machine.set_spec("first", partitions);
        machine.set_pods(&[]);
        machine.start_mps_host();
        machine.start_agent(&[]);
        machine.wait_for_healthy(MPS_RESOURCE, 10 * machine.uuids.len()).await;
        Self { machine, pods: Vec::new(), rows: Vec::new() }
    }

    /// Starts a pod with one share of a GPU. Waits until its program runs kernels and the agent
    /// knows the pod.
    async fn start_pod(&mut self, name: &'static str, gpu: usize, arguments: &[&str]) -> Program {
        let share = u32::try_from(self.pods.len()).unwrap();
        let device = self.machine.uuids[gpu].clone();
        let id = share_ids(&device, [share]);
        self.pods.push(pod(name, 1, &device));
        self.machine.set_pods(&self.pods);
        let response = self.machine.kubelet.allocate(MPS_RESOURCE, &[&id[0]]).await.unwrap();
        self.machine.kubelet.pre_start(MPS_RESOURCE, &[&id[0]]).await.unwrap();
        self.rows.push(container_devices(name, MPS_RESOURCE, &id));
        self.machine.pods.set_devices(&self.rows);
        let out = File::create(self.machine.path(name)).unwrap();
        let child = self.machine.container_command(&response).args(arguments).stdout(out).spawn().unwrap();
        let program = Program { child, name };
        self.machine.wait_until("the first kernel runs", || self.last_output(name, "launched")).await;
        let listed = || {
            let status = self.machine.mps_host_status()?;
            let client = status.daemons[&device].clients.iter().find(|client| client.pid == program.pid())?;
            client.allocation.clone()
        };
        self.machine.wait_until("the MPS host lists the client", listed).await;
        // The agent learns the client's pod from the kubelet's list of pods and their devices.
        let holder = format!("ns/{name}");
        let reported =
            |status: &GpuNodeStatus| status.gpus.iter().flat_map(|gpu| &gpu.allocations).any(|held| held.pod == holder);
        self.machine.wait_for_status("the agent knows the client's pod", reported).await;
        program
    }

    /// Returns the value that a program last printed for a key, or `None` if it printed none.
    fn last_output(&self, name: &str, key: &str) -> Option<Value> {
        let text = fs::read_to_string(self.machine.path(name)).ok()?;
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter_map(|line| line.get(key).cloned()).next_back()
    }

    /// Waits until a program reports a CUDA error. Returns the number of the error.
    async fn wait_for_error(&self, name: &str) -> i64 {
        self.machine.wait_until(&format!("{name} fails"), || self.last_output(name, "error")).await.as_i64().unwrap()
    }

    /// Starts the deletion of pods in the API server, with a grace period in seconds.
    fn delete_pods(&mut self, names: &[&str], grace: i64) {
        for pod in self.pods.iter_mut().filter(|pod| names.iter().any(|name| pod["metadata"]["name"] == *name)) {
            let end = Timestamp::now() + SignedDuration::from_secs(grace);
            pod["metadata"]["deletionTimestamp"] = json!(end.to_string());
            pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        }
        self.machine.set_pods(&self.pods);
    }

    /// Removes a pod from the API server without a grace period.
    fn delete_pod_by_force(&mut self, name: &str) {
        self.pods.retain(|pod| pod["metadata"]["name"] != name);
        self.machine.set_pods(&self.pods);
    }

    async fn wait_for_exit(&self, mut program: Program) -> ExitStatus {
        self.machine.wait_until("the program exits", || program.child.try_wait().unwrap()).await
    }

    /// Waits until the MPS host no longer lists the client with this PID.
    async fn wait_until_client_removed(&self, pid: u32) {
        let removed = || {
            let status = self.machine.mps_host_status()?;
            let mut clients = status.daemons.values().flat_map(|daemon| &daemon.clients);
            clients.all(|client| client.pid != pid).then_some(())
        };
        self.machine.wait_until("the client is removed", removed).await;
    }

    /// Returns the number of times that the MPS host restarted a GPU's daemon after failures.
    fn daemon_restarts(&self, gpu: usize) -> u32 {
        self.machine.mps_host_status().unwrap().daemons[&self.machine.uuids[gpu]].restarts
    }

    /// Checks that a program still runs and has reported no CUDA error.
    fn assert_continues(&self, program: &mut Program) {
        assert_eq!(self.last_output(program.name, "error"), None, "{} fails", program.name);
        assert!(program.child.try_wait().unwrap().is_none(), "{} has exited", program.name);
    }

    /// Checks that a program still runs without an error, and that all MPS daemons are active.
    fn assert_unharmed(&self, program: &mut Program) {
        self.assert_continues(program);
        let states: Vec<DaemonState> =
            self.machine.mps_host_status().unwrap().daemons.values().map(|daemon| daemon.state).collect();
        assert!(states.iter().all(|state| *state == DaemonState::Active), "{states:?}");
    }
}

#[tokio::test]
async fn killing_a_busy_program_of_a_pod_that_is_not_being_deleted_makes_its_neighbour_fail() {
    let mut pods = NodeWithPrograms::new(&["H200"]).await;
    let _neighbour = pods.start_pod("neighbour", 0, &["--kernel-ms", "1", "--busy-forever"]).await;
    let busy = pods.start_pod("busy", 0, &LONG_KERNELS_ARGUMENTS).await;
    busy.send_signal(Signal::KILL);
    assert_eq!(pods.wait_for_error("neighbour").await, 700);
}

#[tokio::test]
async fn the_client_of_a_deleted_pod_is_terminated_before_its_program_is_killed() {
    let mut pods = NodeWithPrograms::new(&["H200"]).await;
    let mut neighbour = pods.start_pod("neighbour", 0, &["--kernel-ms", "1", "--busy-forever"]).await;
    for (name, signal) in [("deleted", Signal::KILL), ("deleted-too", Signal::TERM), ("by-force", Signal::KILL)] {
        // With `--linger forever`, the program continues after a CUDA error until the test ends it.
        let busy = pods.start_pod(name, 0, &[&LONG_KERNELS_ARGUMENTS[..], &["--linger", "forever"]].concat()).await;
        match name {
            "by-force" => pods.delete_pod_by_force(name),
            _ => pods.delete_pods(&[name], 30),
        }
        assert_eq!(pods.wait_for_error(name).await, 810, "{name}");
        let pid = busy.pid();
        busy.send_signal(signal);
        pods.wait_until_client_removed(pid).await;
        pods.assert_unharmed(&mut neighbour);
    }
    assert!(pods.machine.events().is_empty());
}

#[tokio::test]
async fn the_client_of_a_program_that_handles_sigterm_is_terminated_only_shortly_before_the_grace_period_ends() {
    let mut pods = NodeWithPrograms::new(&["H200"]).await;
    let mut neighbour = pods.start_pod("neighbour", 0, &["--kernel-ms", "1", "--busy-forever"]).await;
    let handles = [&LONG_KERNELS_ARGUMENTS[..], &["--handle-sigterm"]].concat();
    let polite = pods.start_pod("polite", 0, &handles).await;
    let dies = pods.start_pod("dies", 0, &LONG_KERNELS_ARGUMENTS).await;
    pods.delete_pods(&["polite", "dies"], 30);
    // `polite` handles SIGTERM, so it has most of its grace period. An agent that ignored the grace
    // period would terminate `polite` before `dies` fails.
    assert_eq!(pods.wait_for_error("dies").await, 810);
    polite.send_signal(Signal::TERM);
    assert_eq!((pods.wait_for_exit(polite).await.code(), pods.last_output("polite", "error")), (Some(0), None));
    // `deaf` also handles SIGTERM but receives none. Its client is terminated before the grace
    // period ends.
    let deaf = pods.start_pod("deaf", 0, &handles).await;
    pods.delete_pods(&["deaf"], 1);
    assert_eq!(pods.wait_for_error("deaf").await, 810);
    let pid = deaf.pid();
    drop(deaf);
    pods.wait_until_client_removed(pid).await;
    pods.assert_unharmed(&mut neighbour);
    drop(dies);
}

#[tokio::test]
async fn a_stopped_program_is_reported_and_does_not_delay_the_termination_of_others() {
    let mut pods = NodeWithPrograms::new(&["H200"]).await;
    let mut neighbour = pods.start_pod("neighbour", 0, &["--kernel-ms", "1", "--busy-forever"]).await;
    let stopped = pods.start_pod("stopped", 0, &LONG_KERNELS_ARGUMENTS).await;
    let _other = pods.start_pod("other", 0, &LONG_KERNELS_ARGUMENTS).await;
    stopped.send_signal(Signal::STOP);
    pods.delete_pods(&["stopped", "other"], 30);
    assert_eq!(pods.wait_for_error("other").await, 810);
    pods.machine
        .wait_until("the Event is published", || (pods.machine.events() == ["ClientNotTerminated"]).then_some(()))
        .await;
    let text = fs::read_to_string(pods.machine.path("spec/events.jsonl")).unwrap();
    assert!(text.contains("ns/stopped") && text.contains("the process is stopped"), "{text}");
    stopped.send_signal(Signal::CONT);
    assert_eq!(pods.wait_for_error("stopped").await, 810);
    pods.assert_unharmed(&mut neighbour);
}

#[tokio::test]
async fn a_hanging_daemon_does_not_delay_other_gpus_and_failed_attempts_are_repeated() {
    let mut pods = NodeWithPrograms::new(&["2xH200"]).await;
    let mut neighbour = pods.start_pod("neighbour", 1, &["--kernel-ms", "1", "--busy-forever"]).await;
    let _first = pods.start_pod("first", 0, &LONG_KERNELS_ARGUMENTS).await;
    let _second = pods.start_pod("second", 1, &LONG_KERNELS_ARGUMENTS).await;
    pods.machine.simgpu(&["hang", "mps:command:terminate_client", "--gpu", "0", "--seconds", "3600"]);
    pods.machine.simgpu(&["fail", "mps:command:terminate_client", "--gpu", "1", "--code", "1", "--count", "2"]);
    pods.delete_pods(&["first", "second"], 30);
    assert_eq!(pods.wait_for_error("second").await, 810);
    // On a busy machine, the MPS host may already have restarted the hanging daemon. The daemon's
    // clients then also fail.
    assert!(pods.last_output("first", "error").is_none() || pods.daemon_restarts(0) > 0);
    let reported = || {
        let text = fs::read_to_string(pods.machine.path("spec/events.jsonl")).ok()?;
        text.contains("ns/first").then_some(())
    };
    pods.machine.wait_until("the Event is published", reported).await;
    pods.assert_continues(&mut neighbour);
    pods.machine.simgpu(&["clear"]);
    assert!([806, 810].contains(&pods.wait_for_error("first").await));
    pods.machine
        .wait_until("the neighbour continues", || neighbour.child.try_wait().unwrap().is_none().then_some(()))
        .await;
}

#[tokio::test]
async fn a_prestop_sleep_delays_termination_at_most_until_the_grace_period_ends() {
    let mut pods = NodeWithPrograms::new(&["H200"]).await;
    let drains = pods.start_pod("drains", 0, &LONG_KERNELS_ARGUMENTS).await;
    let other = pods.start_pod("other", 0, &LONG_KERNELS_ARGUMENTS).await;
    pods.pods[0]["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 20}}});
    pods.delete_pods(&["drains", "other"], 60);
    assert_eq!(pods.wait_for_error("other").await, 810);
    assert_eq!(pods.last_output("drains", "error"), None, "the pod's preStop hook still sleeps");
    pods.delete_pods(&["drains"], 0);
    assert_eq!(pods.wait_for_error("drains").await, 810);
    drop((drains, other));
}
