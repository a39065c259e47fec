//! Containers that are about to be killed for the machine's memory. Programs are real and their kernels are simulated; control groups are files,
//! and what the kernel would write there the test writes. On a machine whose memory controller is of version 2, they are real once more.
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cleave_api::gpunode::GpuSpec;
use cleave_api::sharingpolicy::HostOutOfMemory;
use cleave_gpu::mps::wire::DaemonState;
use serde_json::{Value, json};

use crate::machine::{DEADLINE, MPS, Machine, held, kill_child, mps};

const PODS: [(&str, &str, char); 2] =
    [("eats", "11111111-2222-4333-8444-555555555555", 'a'), ("stays", "99999999-2222-4333-8444-555555555555", 'b')];
const LIMIT: u64 = 1000 << 20;
/// 5 % less.
const LEVEL: u64 = 950 << 20;
/// Killed with such a kernel in flight, a client breaks its neighbours every time.
const LONG: [&str; 5] = ["--kernel-ms", "1000", "--busy-forever", "--linger", "forever"];
const SHORT: [&str; 3] = ["--kernel-ms", "1", "--busy-forever"];
/// Of a real container.
const SMALL: u64 = 256 << 20;
/// Of that, in whole pages as large as they come.
const SMALL_LEVEL: u64 = (SMALL - SMALL / 20) >> 16 << 16;

/// A node with two pods, each with a share of one GPU and a program.
struct Node {
    machine: Machine,
    programs: Vec<Child>,
    /// Where control groups are, or files in their place.
    groups: PathBuf,
    real: bool,
}

impl Drop for Node {
    fn drop(&mut self) {
        for program in &mut self.programs {
            let _ = program.kill();
            let _ = program.wait();
        }
        if self.real {
            for pod in 0..PODS.len() {
                let group = self.file(pod, "");
                let _ = fs::write(group.join("cgroup.kill"), "1");
                let end = Instant::now() + DEADLINE;
                while fs::remove_dir(&group).is_err() && group.exists() && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(10));
                }
                let above = group.ancestors().skip(1).take_while(|above| above.starts_with(&self.groups));
                above.for_each(|above| drop(fs::remove_dir(above)));
            }
        }
    }
}

/// Which control groups a node's containers have.
#[derive(Clone, Copy, PartialEq)]
enum Groups {
    /// Files, which the test writes.
    Files,
    /// Of no memory controller.
    None,
    /// The machine's own.
    Real,
}

/// A group of this machine's version 2 with a memory controller below it, for one test; none on other machines.
fn real_groups() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 ") && line.split(' ').nth(3) == Some("/"))?;
    let root = PathBuf::from(mount.split(' ').nth(4)?);
    let own = root.join(format!("cleave-oom-{}", std::process::id()));
    let made = [root.as_path(), &own].map(|group| {
        fs::create_dir_all(group).is_ok() && fs::write(group.join("cgroup.subtree_control"), "+memory").is_ok()
    });
    if made != [true, true] {
        let _ = fs::remove_dir(&own);
        return None;
    }
    Some(own)
}

fn shares(uuid: &str, host_out_of_memory: HostOutOfMemory) -> GpuSpec {
    GpuSpec { host_out_of_memory, ..mps(uuid, 10) }
}

fn pod(index: usize) -> Value {
    let (name, uid, letter) = PODS[index];
    let id = format!("containerd://{}", letter.to_string().repeat(64));
    json!({
        "metadata": {"name": name, "namespace": "ns", "uid": uid},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {MPS: "1"}}}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "c", "containerID": id}]},
    })
}

impl Node {
    async fn new(says: HostOutOfMemory, groups: Groups) -> Self {
        let machine = Machine::new(&["H200"]);
        machine.want("first", vec![shares(&machine.uuids[0], says)]);
        machine.pods_are(&[pod(0), pod(1)]);
        let at = match groups {
            Groups::Real => real_groups().unwrap(),
            _ => machine.path("cgroup"),
        };
        let real = groups == Groups::Real;
        let mut node = Self { machine, programs: Vec::new(), groups: at.clone(), real };
        let proc = node.machine.path("proc");
        if !real {
            fs::create_dir_all(proc.join("self")).unwrap();
            let mounts = format!("30 23 0:26 / {} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n", at.display());
            fs::write(proc.join("self/mountinfo"), mounts).unwrap();
        }
        for index in 0..PODS.len() {
            node.make_group(index, groups);
        }
        node.machine.start_host();
        node.start_agent();
        node.machine.healthy(MPS, 10).await;
        let ids: Vec<String> = (0..2).map(|number| format!("{}::{number}", node.machine.uuids[0])).collect();
        let rows: Vec<_> =
            PODS.iter().zip(&ids).map(|((pod, ..), id)| held(pod, MPS, std::slice::from_ref(id))).collect();
        node.machine.pods.hold(&rows);
        for (index, id) in ids.iter().enumerate() {
            let given = node.machine.kubelet.allocate(MPS, &[id]).await.unwrap();
            node.machine.kubelet.pre_start(MPS, &[id]).await.unwrap();
            let out = File::create(node.machine.path(PODS[index].0)).unwrap();
            let arguments: &[&str] = if index == 0 { &LONG } else { &SHORT };
            let program = node.machine.program(&given).args(arguments).stdout(out).spawn().unwrap();
            let folder = proc.join(program.id().to_string());
            node.programs.push(program);
            if real {
                fs::write(node.file(index, "cgroup.procs"), node.programs[index].id().to_string()).unwrap();
                node.machine.until("it works", || node.said(index, "launched")).await;
                continue;
            }
            fs::create_dir(&folder).unwrap();
            let path = node.file(index, "");
            let path = path.strip_prefix(&at).unwrap().display().to_string();
            fs::write(folder.join("cgroup"), format!("0::/{}/below\n", path.trim_end_matches('/'))).unwrap();
            symlink(format!("/proc/{}/stat", node.programs[index].id()), folder.join("stat")).unwrap();
            node.machine.until("it works", || node.said(index, "launched")).await;
        }
        node
    }

    fn make_group(&self, pod: usize, groups: Groups) {
        fs::create_dir_all(self.file(pod, "")).unwrap();
        match groups {
            Groups::None => {}
            Groups::Files => {
                self.write(pod, "memory.max", &format!("{LIMIT}\n"));
                self.write(pod, "memory.high", "max\n");
                self.write(pod, "memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n");
                self.uses(pod, 100 << 20, 0);
            }
            Groups::Real => {
                let group = self.file(pod, "");
                let above: Vec<_> =
                    group.ancestors().skip(1).take_while(|above| above.starts_with(&self.groups)).collect();
                for above in above.into_iter().rev() {
                    fs::write(above.join("cgroup.subtree_control"), "+memory").unwrap();
                }
                // As the kubelet does: all of the container is killed.
                for (name, value) in [
                    ("memory.max", SMALL.to_string()),
                    ("memory.swap.max", "0".into()),
                    ("memory.oom.group", "1".into()),
                ] {
                    // A kernel without swap has no such limit.
                    let set = fs::write(self.file(pod, name), value);
                    assert!(set.is_ok() || name == "memory.swap.max", "{name}: {set:?}");
                }
            }
        }
    }

    fn start_agent(&mut self) {
        let proc = if self.real { "/proc".into() } else { self.machine.path("proc") };
        self.machine.start_agent(&["--proc", proc.to_str().unwrap()]);
    }

    /// A program of a pod's container that takes memory until it is killed.
    fn hoard(&self, pod: usize) -> Child {
        let script = format!("echo $$ > {} && exec tail /dev/zero", self.file(pod, "cgroup.procs").display());
        Command::new("sh").args(["-c", &script]).stderr(Stdio::null()).spawn().unwrap()
    }

    fn file(&self, pod: usize, name: &str) -> PathBuf {
        let (_, uid, letter) = PODS[pod];
        self.groups.join(format!("kubepods/burstable/pod{uid}/{}", letter.to_string().repeat(64))).join(name)
    }

    /// Whole, as the kernel's files are.
    fn write(&self, pod: usize, name: &str, text: &str) {
        fs::write(self.file(pod, "new"), text).unwrap();
        fs::rename(self.file(pod, "new"), self.file(pod, name)).unwrap();
    }

    fn uses(&self, pod: usize, current: u64, files: u64) {
        self.write(pod, "memory.stat", &format!("anon {}\nfile {files}\ninactive_file {files}\n", current - files));
        self.write(pod, "memory.current", &format!("{current}\n"));
    }

    /// The kernel says that `memory.high` was exceeded.
    fn exceeded(&self, pod: usize) {
        fs::write(self.file(pod, "memory.events"), "low 0\nhigh 1\nmax 0\noom 0\noom_kill 0\n").unwrap();
    }

    async fn high(&self, pod: usize, expected: &str) {
        let is = || (fs::read_to_string(self.file(pod, "memory.high")).ok()?.trim() == expected).then_some(());
        self.machine.until(&format!("memory.high of {} is {expected}", PODS[pod].0), is).await;
    }

    fn said(&self, pod: usize, key: &str) -> Option<Value> {
        let text = fs::read_to_string(self.machine.path(PODS[pod].0)).ok()?;
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter_map(|line| line.get(key).cloned()).next_back()
    }

    async fn error(&self, pod: usize) -> i64 {
        self.machine.until(&format!("{} fails", PODS[pod].0), || self.said(pod, "error")).await.as_i64().unwrap()
    }

    fn unharmed(&mut self, pod: usize) {
        assert_eq!(self.said(pod, "error"), None, "{} is broken", PODS[pod].0);
        assert!(self.programs[pod].try_wait().unwrap().is_none(), "{} has ended", PODS[pod].0);
        let status = self.machine.host_status().unwrap();
        assert!(status.daemons.values().all(|daemon| daemon.state == DaemonState::Active), "{status:?}");
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
}

#[tokio::test]
async fn a_busy_program_is_ended_before_it_is_killed_for_its_memory_and_its_neighbour_goes_on() {
    let mut node = Node::new(HostOutOfMemory::EndFirst, Groups::Files).await;
    node.high(0, &LEVEL.to_string()).await;
    node.high(1, &LEVEL.to_string()).await;
    // Full of files: the kernel takes those first.
    node.uses(0, LEVEL + 4096, 300 << 20);
    node.exceeded(0);
    node.uses(1, LEVEL, 100 << 20);
    node.exceeded(1);
    // Then of what it cannot take.
    node.uses(0, LEVEL + 4096, 4096);
    node.exceeded(0);
    assert_eq!(node.error(0).await, 810);
    node.high(0, "max").await;
    let pid = node.programs[0].id();
    kill_child(&mut node.programs[0]);
    node.gone(pid).await;
    node.unharmed(1);
    node.high(1, &LEVEL.to_string()).await;
    let events = node.machine.path("spec/pod-events.jsonl");
    let text = node.machine.until("the pod's event", || fs::read_to_string(&events).ok()).await;
    let event: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert_eq!([&event["pod"], &event["uid"], &event["reason"]], ["ns/eats", PODS[0].1, "EndedBeforeOutOfMemory"]);
    let note = event["note"].as_str().unwrap();
    assert!(note.contains("container c uses 950 MiB of its memory limit of 1000 MiB"), "{note}");
}

#[tokio::test]
async fn a_policy_that_does_not_say_so_slows_nobody_down_and_one_that_does_is_followed() {
    let mut node = Node::new(HostOutOfMemory::Kill, Groups::Files).await;
    let want = |node: &Node, plan: &str, says| node.machine.want(plan, vec![shares(&node.machine.uuids[0], says)]);
    node.uses(0, LIMIT, 0);
    node.exceeded(0);
    want(&node, "second", HostOutOfMemory::EndFirst);
    node.high(1, &LEVEL.to_string()).await;
    // As full as that it was before.
    node.high(0, "max").await;
    want(&node, "third", HostOutOfMemory::Kill);
    node.high(1, "max").await;
    node.unharmed(0);
    node.unharmed(1);
}

#[tokio::test]
async fn an_agent_knows_what_the_one_before_it_has_set_and_takes_it_back_when_it_is_told_to_stop() {
    let mut node = Node::new(HostOutOfMemory::EndFirst, Groups::Files).await;
    node.high(0, &LEVEL.to_string()).await;
    node.high(1, &LEVEL.to_string()).await;
    node.machine.kill_agent();
    node.uses(0, LEVEL, 0);
    node.start_agent();
    assert_eq!(node.error(0).await, 810, "the kernel told of it while no agent was there");
    node.high(0, "max").await;
    node.unharmed(1);
    // One program goes while there is no agent.
    node.machine.kill_agent();
    kill_child(&mut node.programs[1]);
    node.start_agent();
    node.high(1, "max").await;
    let level = LEVEL.to_string();
    node.write(1, "memory.high", &level);
    assert!(node.machine.stop_agent().success());
    assert_eq!(fs::read_to_string(node.file(1, "memory.high")).unwrap(), "max");
}

#[tokio::test]
async fn where_containers_cannot_be_limited_the_node_is_told_once() {
    let node = Node::new(HostOutOfMemory::EndFirst, Groups::None).await;
    let told = || node.machine.events().iter().any(|reason| reason == "EndFirstNotPossible").then_some(());
    node.machine.until("the node is told", told).await;
    assert_eq!(node.machine.events(), ["EndFirstNotPossible"]);
    assert!(!node.file(0, "memory.high").exists());
}

/// Takes more memory than there is beside a busy program; how that was killed is the kernel's matter.
async fn out_of_memory(node: &mut Node) {
    let pid = node.programs[0].id();
    let mut hoarder = node.hoard(0);
    node.machine.until("the hoarder's end", || hoarder.try_wait().unwrap()).await;
    node.machine.until("the program's end", || node.programs[0].try_wait().unwrap()).await;
    node.gone(pid).await;
}

#[tokio::test]
async fn what_the_kernel_kills_for_its_memory_breaks_its_neighbour_unless_it_is_ended_first() {
    let Some(groups) = real_groups() else {
        eprintln!("skipped: this machine has no memory controller of version 2, or may not be changed");
        return;
    };
    fs::remove_dir(groups).unwrap();
    let mut node = Node::new(HostOutOfMemory::Kill, Groups::Real).await;
    out_of_memory(&mut node).await;
    assert_eq!(node.error(1).await, 700, "it breaks");
    drop(node);

    let mut node = Node::new(HostOutOfMemory::EndFirst, Groups::Real).await;
    node.high(0, &SMALL_LEVEL.to_string()).await;
    node.high(1, &SMALL_LEVEL.to_string()).await;
    out_of_memory(&mut node).await;
    node.unharmed(1);
    let events = node.machine.path("spec/pod-events.jsonl");
    let text = node.machine.until("the pod's event", || fs::read_to_string(&events).ok()).await;
    assert!(text.contains("EndedBeforeOutOfMemory") && text.contains("ns/eats"), "{text}");
}
