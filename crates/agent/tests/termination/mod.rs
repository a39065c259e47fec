//! Pods that leave while their programs are busy, beside one that must go on. What kills programs
//! here is the test, as the kubelet would.
use std::fs::{self, File};
use std::process::{Child, ExitStatus};

use cleave_api::gpunode::GpuNodeStatus;
use cleave_gpu::mps::wire::DaemonState;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::machine::{MPS, Machine, held, ids, mps, pod};

/// Killed with such a kernel in flight, a client breaks its neighbours every time.
const LONG: [&str; 3] = ["--kernel-ms", "1000", "--busy-forever"];

/// A node with pods that each have one share and one program.
struct Node {
    machine: Machine,
    pods: Vec<Value>,
    rows: Vec<cleave_kubelet::HeldDevices>,
}

/// A pod's program; it goes with the value.
struct Program {
    child: Child,
    name: &'static str,
}

impl Program {
    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Gone already, as most are.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Node {
    async fn on(gpus: &[&str]) -> Self {
        let mut machine = Machine::new(gpus);
        let partitions: Vec<_> = machine.uuids.iter().map(|uuid| mps(uuid, 10)).collect();
        machine.want("first", partitions);
        machine.pods_are(&[]);
        machine.start_host();
        machine.start_agent(&[]);
        machine.healthy(MPS, 10 * machine.uuids.len()).await;
        Self { machine, pods: Vec::new(), rows: Vec::new() }
    }

    /// A pod with a share of a GPU, whose program works.
    async fn working(&mut self, name: &'static str, gpu: usize, arguments: &[&str]) -> Program {
        let share = u32::try_from(self.pods.len()).unwrap();
        let device = self.machine.uuids[gpu].clone();
        let id = ids(&device, [share]);
        self.pods.push(pod(name, 1, &device));
        self.machine.pods_are(&self.pods);
        let response = self.machine.kubelet.allocate(MPS, &[&id[0]]).await.unwrap();
        self.machine.kubelet.pre_start(MPS, &[&id[0]]).await.unwrap();
        self.rows.push(held(name, MPS, &id));
        self.machine.pods.hold(&self.rows);
        let out = File::create(self.machine.path(name)).unwrap();
        let child = self.machine.program(&response).args(arguments).stdout(out).spawn().unwrap();
        let program = Program { child, name };
        self.machine.until("it works", || self.said(name, "launched")).await;
        let listed = || {
            let status = self.machine.host_status()?;
            let client = status.daemons[&device].clients.iter().find(|client| client.pid == program.pid())?;
            client.allocation.clone()
        };
        self.machine.until("the MPS host lists it", listed).await;
        // Whose it is the agent knows from the kubelet's list.
        let holder = format!("ns/{name}");
        let told =
            |status: &GpuNodeStatus| status.gpus.iter().flat_map(|gpu| &gpu.allocations).any(|held| held.pod == holder);
        self.machine.status("the agent knows whose it is", told).await;
        program
    }

    /// What a program said with this key, the last time.
    fn said(&self, name: &str, key: &str) -> Option<Value> {
        let text = fs::read_to_string(self.machine.path(name)).ok()?;
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter_map(|line| line.get(key).cloned()).next_back()
    }

    async fn error(&self, name: &str) -> i64 {
        self.machine.until(&format!("{name} fails"), || self.said(name, "error")).await.as_i64().unwrap()
    }

    /// The API server tells that these are deleted, with a grace in seconds.
    fn delete(&mut self, names: &[&str], grace: i64) {
        for pod in self.pods.iter_mut().filter(|pod| names.iter().any(|name| pod["metadata"]["name"] == *name)) {
            let end = Timestamp::now() + SignedDuration::from_secs(grace);
            pod["metadata"]["deletionTimestamp"] = json!(end.to_string());
            pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        }
        self.machine.pods_are(&self.pods);
    }

    /// The API server does not have a pod any more.
    fn forget(&mut self, name: &str) {
        self.pods.retain(|pod| pod["metadata"]["name"] != name);
        self.machine.pods_are(&self.pods);
    }

    async fn exit(&self, mut program: Program) -> ExitStatus {
        self.machine.until("it ends", || program.child.try_wait().unwrap()).await
    }

    /// Waits until the MPS host has seen a program go.
    async fn gone(&self, pid: u32) {
        let gone = || {
            let status = self.machine.host_status()?;
            let mut clients = status.daemons.values().flat_map(|daemon| &daemon.clients);
            clients.all(|client| client.pid != pid).then_some(())
        };
        self.machine.until("the server has seen it go", gone).await;
    }

    /// A program goes on, and so does its server.
    fn unharmed(&self, program: &mut Program) {
        assert_eq!(self.said(program.name, "error"), None, "{} is broken", program.name);
        assert!(program.child.try_wait().unwrap().is_none(), "{} has ended", program.name);
        let states: Vec<DaemonState> =
            self.machine.host_status().unwrap().daemons.values().map(|daemon| daemon.state).collect();
        assert!(states.iter().all(|state| *state == DaemonState::Active), "{states:?}");
    }
}

#[tokio::test]
async fn a_busy_program_that_nobody_saw_leave_breaks_its_neighbour() {
    let mut pods = Node::on(&["H200"]).await;
    let _stays = pods.working("stays", 0, &["--kernel-ms", "1", "--busy-forever"]).await;
    let leaves = pods.working("leaves", 0, &LONG).await;
    leaves.signal(Signal::KILL);
    assert_eq!(pods.error("stays").await, 700);
}

#[tokio::test]
async fn a_busy_program_of_a_pod_that_leaves_is_ended_before_it_is_killed() {
    let mut pods = Node::on(&["H200"]).await;
    let mut stays = pods.working("stays", 0, &["--kernel-ms", "1", "--busy-forever"]).await;
    for (round, signal) in [("deleted", Signal::KILL), ("deleted-too", Signal::TERM), ("lost", Signal::KILL)] {
        // It lives on after its error: it is killed all the same.
        let leaves = pods.working(round, 0, &[&LONG[..], &["--linger", "forever"]].concat()).await;
        match round {
            "lost" => pods.forget(round),
            _ => pods.delete(&[round], 30),
        }
        assert_eq!(pods.error(round).await, 810, "{round}");
        let pid = leaves.pid();
        leaves.signal(signal);
        pods.gone(pid).await;
        pods.unharmed(&mut stays);
    }
    assert!(pods.machine.events().is_empty());
}

#[tokio::test]
async fn a_program_that_handles_sigterm_has_its_grace_and_no_more() {
    let mut pods = Node::on(&["H200"]).await;
    let mut stays = pods.working("stays", 0, &["--kernel-ms", "1", "--busy-forever"]).await;
    let handles = [&LONG[..], &["--handle-sigterm"]].concat();
    let polite = pods.working("polite", 0, &handles).await;
    let dies = pods.working("dies", 0, &LONG).await;
    pods.delete(&["polite", "dies"], 30);
    // By then it would have been ended as well.
    assert_eq!(pods.error("dies").await, 810);
    polite.signal(Signal::TERM);
    assert_eq!((pods.exit(polite).await.code(), pods.said("polite", "error")), (Some(0), None));
    // One that nobody passes the SIGTERM on to is ended before the end of its grace.
    let deaf = pods.working("deaf", 0, &handles).await;
    pods.delete(&["deaf"], 1);
    assert_eq!(pods.error("deaf").await, 810);
    let pid = deaf.pid();
    drop(deaf);
    pods.gone(pid).await;
    pods.unharmed(&mut stays);
    drop(dies);
}

#[tokio::test]
async fn one_that_is_stopped_is_told_of_and_holds_nobody_up() {
    let mut pods = Node::on(&["H200"]).await;
    let mut stays = pods.working("stays", 0, &["--kernel-ms", "1", "--busy-forever"]).await;
    let stopped = pods.working("stopped", 0, &LONG).await;
    let _other = pods.working("other", 0, &LONG).await;
    stopped.signal(Signal::STOP);
    pods.delete(&["stopped", "other"], 30);
    assert_eq!(pods.error("other").await, 810);
    pods.machine.until("the event", || (pods.machine.events() == ["ClientNotEnded"]).then_some(())).await;
    let text = fs::read_to_string(pods.machine.path("spec/events.jsonl")).unwrap();
    assert!(text.contains("ns/stopped") && text.contains("it is stopped"), "{text}");
    stopped.signal(Signal::CONT);
    assert_eq!(pods.error("stopped").await, 810);
    pods.unharmed(&mut stays);
}

#[tokio::test]
async fn a_daemon_that_hangs_delays_no_other_and_an_attempt_that_fails_is_made_again() {
    let mut pods = Node::on(&["2xH200"]).await;
    let mut stays = pods.working("stays", 1, &["--kernel-ms", "1", "--busy-forever"]).await;
    let _first = pods.working("first", 0, &LONG).await;
    let _second = pods.working("second", 1, &LONG).await;
    pods.machine.simgpu(&["hang", "mps:command:terminate_client", "--gpu", "0", "--seconds", "3600"]);
    pods.machine.simgpu(&["fail", "mps:command:terminate_client", "--gpu", "1", "--code", "1", "--count", "2"]);
    pods.delete(&["first", "second"], 30);
    assert_eq!(pods.error("second").await, 810);
    assert_eq!(pods.said("first", "error"), None);
    let told = || {
        let text = fs::read_to_string(pods.machine.path("spec/events.jsonl")).ok()?;
        text.contains("ns/first").then_some(())
    };
    pods.machine.until("the event", told).await;
    pods.unharmed(&mut stays);
    pods.machine.simgpu(&["clear"]);
    // The daemon may have been taken for dead meanwhile, and was replaced: then its clients have
    // gone with it.
    assert!([806, 810].contains(&pods.error("first").await));
    pods.machine.until("the second goes on", || stays.child.try_wait().unwrap().is_none().then_some(())).await;
}

#[tokio::test]
async fn a_pod_that_leaves_slowly_is_left_to_its_own_hook_first() {
    let mut pods = Node::on(&["H200"]).await;
    let drains = pods.working("drains", 0, &LONG).await;
    let other = pods.working("other", 0, &LONG).await;
    pods.pods[0]["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 20}}});
    pods.delete(&["drains", "other"], 60);
    assert_eq!(pods.error("other").await, 810);
    assert_eq!(pods.said("drains", "error"), None, "its hook drains it");
    pods.delete(&["drains"], 0);
    assert_eq!(pods.error("drains").await, 810);
    drop((drains, other));
}
