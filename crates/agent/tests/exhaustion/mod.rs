//! Tests the agent without free file descriptors, inotify instances or disk space. No share becomes
//! Unhealthy, and no allocation is lost.
use std::fs;
use std::net::TcpStream;
use std::time::Instant;

use cleave_kubelet::fake::FakeKubeletState;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};
use tokio::task::JoinHandle;

use crate::machine::{MPS_RESOURCE, Machine, TEST_TIMEOUT, container_devices, kill_child, mps_spec, share_ids};

/// Total number of shares of the node's GPUs.
const TOTAL_SHARES: usize = 20;
/// Number of failed write attempts that a test waits for. The agent makes one attempt each second.
/// The tests thus last longer than the 10 s after which shares of an absent daemon become
/// Unhealthy.
const FAILED_WRITE_ATTEMPTS: usize = 13;
const WRITE_FAILURE_LOG_WORDS: &[&str] = &["failed to write files"];

/// Command that starts a program with soft and hard limits of 256 open files.
const RUN_WITH_256_DESCRIPTORS: [&str; 3] = ["/bin/sh", "-c", "ulimit -n 256; exec \"$0\" \"$@\""];
/// Command that starts a program with a soft limit of 256 open files.
const RUN_WITH_SOFT_LIMIT_OF_256_DESCRIPTORS: [&str; 3] = ["/bin/sh", "-c", "ulimit -S -n 256; exec \"$0\" \"$@\""];
/// Command that starts a program in a user namespace that allows no inotify instances.
const RUN_WITHOUT_INOTIFY: [&str; 6] = [
    "/usr/bin/unshare",
    "--user",
    "--map-root-user",
    "/bin/sh",
    "-c",
    "echo 0 >/proc/sys/user/max_inotify_instances && exec \"$0\" \"$@\"",
];

/// Returns a node with two GPUs of ten shares each, on which neither the agent nor the MPS host
/// runs.
fn node_with_shares() -> Machine {
    let machine = Machine::new(&["2xH200"]);
    machine.set_spec("first", machine.uuids.iter().map(|gpu| mps_spec(gpu, 10)).collect());
    machine
}

/// Starts a task that watches the kubelet's view. The task panics if a share is not Healthy.
fn expect_healthy_from_now_on(machine: &Machine) -> JoinHandle<()> {
    let mut state = machine.kubelet.state();
    tokio::spawn(async move {
        loop {
            let healthy = state.borrow_and_update().endpoints[MPS_RESOURCE].healthy_ids().len();
            assert_eq!(healthy, TOTAL_SHARES, "healthy shares");
            if state.changed().await.is_err() {
                return;
            }
        }
    })
}

/// Ends the watch, and checks that all shares have been Healthy.
async fn assert_stayed_healthy(watching: JoinHandle<()>) {
    watching.abort();
    let ended = watching.await.unwrap_err();
    assert!(ended.is_cancelled(), "{ended}");
}

/// Allocates a share as for a new pod, and checks that a program can use the share.
async fn assert_new_pod_works(machine: &Machine, share: &str) {
    let given = machine.kubelet.allocate(MPS_RESOURCE, &[share]).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &[share]).await.unwrap();
    assert!(machine.run_client(&given, &[])["uuid"].is_string(), "the program has no GPU");
}

/// Makes the kubelet list one pod for each of these shares.
fn set_pods(machine: &Machine, shares: &[&String]) {
    let rows: Vec<_> =
        shares.iter().map(|share| container_devices(share, MPS_RESOURCE, std::slice::from_ref(*share))).collect();
    machine.pods.set_devices(&rows);
}

/// Sets the soft limit of open files of a process. Returns the previous soft limit.
fn set_descriptor_limit(pid: u32, soft: Option<u64>) -> Option<u64> {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    let before =
        prlimit(Some(pid), Resource::Nofile, Rlimit { current: soft, maximum: hard_descriptor_limit(pid) }).unwrap();
    before.current
}

fn hard_descriptor_limit(pid: Pid) -> Option<u64> {
    descriptor_limits(pid.as_raw_nonzero().get().unsigned_abs())[1]
}

fn soft_descriptor_limit(pid: u32) -> Option<u64> {
    descriptor_limits(pid)[0]
}

/// Returns the soft and the hard limit of open files of a process. `None` means unlimited.
fn descriptor_limits(pid: u32) -> [Option<u64>; 2] {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    [3, 4].map(|word| line.split_whitespace().nth(word).unwrap().parse().ok())
}

fn open_descriptors(pid: u32) -> u64 {
    u64::try_from(fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()).unwrap()
}

#[tokio::test]
async fn with_256_descriptors_five_thousand_silent_connections_make_no_share_unhealthy() {
    const CONNECTIONS: usize = 5000;
    let mut machine = node_with_shares();
    machine.start_mps_host();
    machine.start_agent_under(&RUN_WITH_256_DESCRIPTORS);
    machine.wait_for_healthy(MPS_RESOURCE, TOTAL_SHARES).await;
    let watching = expect_healthy_from_now_on(&machine);

    let own = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: own.maximum, ..own }).unwrap();
    let address = machine.agent_address();
    let deadline = Instant::now() + TEST_TIMEOUT;
    let connect = move || {
        let left = || deadline.checked_duration_since(Instant::now()).expect("the agent accepts too slowly");
        (0..CONNECTIONS).map(|_| TcpStream::connect_timeout(&address, left()).unwrap()).collect::<Vec<_>>()
    };
    let silent = tokio::task::spawn_blocking(connect).await.unwrap();
    assert_eq!(silent.len(), CONNECTIONS);
    assert!(open_descriptors(machine.agent_pid()) < 256);

    for number in 0..3 {
        assert_new_pod_works(&machine, &share_ids(&machine.uuids[0], [number])[0]).await;
    }
    assert_stayed_healthy(watching).await;
    machine.kubelet.restart().unwrap();
    machine.wait_for_healthy(MPS_RESOURCE, TOTAL_SHARES).await;
    assert_new_pod_works(&machine, &share_ids(&machine.uuids[1], [0])[0]).await;
    assert!(machine.agent_is_running());
    drop(silent);
}

#[tokio::test]
async fn the_agent_and_the_processes_of_mps_devices_raise_their_soft_limit_of_open_files() {
    let mut machine = node_with_shares();
    machine.start_mps_host_under(&RUN_WITH_SOFT_LIMIT_OF_256_DESCRIPTORS);
    machine.start_agent_under(&RUN_WITH_SOFT_LIMIT_OF_256_DESCRIPTORS);
    machine.wait_for_healthy(MPS_RESOURCE, TOTAL_SHARES).await;
    for pid in [machine.agent_pid(), machine.device_process(&machine.uuids[0])] {
        let soft = soft_descriptor_limit(pid);
        assert!(soft.is_none_or(|soft| soft > 256), "process {pid}: {soft:?}");
    }
}

#[tokio::test]
async fn a_client_that_connects_while_the_mps_host_has_no_free_descriptor_waits_and_is_then_listed() {
    let mut machine = node_with_shares();
    machine.start_mps_host();
    machine.start_agent(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, TOTAL_SHARES).await;
    let [share] = <[String; 1]>::try_from(share_ids(&machine.uuids[0], [0])).unwrap();
    let given = machine.kubelet.allocate(MPS_RESOURCE, &[&share]).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &[&share]).await.unwrap();
    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, std::slice::from_ref(&share))]);
    let host = machine.device_process(&machine.uuids[0]);
    let idle = open_descriptors(host);
    // The connection of the client uses the last free descriptor.
    let before = set_descriptor_limit(host, Some(idle + 1));
    let mut client = machine.start_client(&given, &[], &["--hold", "forever"]);
    machine.wait_until("the client is connected to its door", || (open_descriptors(host) > idle).then_some(())).await;
    let clients = || -> Option<usize> {
        let status = machine.mps_host_status()?;
        let clients = status.daemons.get(&machine.uuids[0])?.clients.iter();
        Some(clients.filter(|client| client.allocation.is_some()).count())
    };
    assert_eq!(clients(), Some(0));
    set_descriptor_limit(host, before);
    machine.wait_until("the client is attributed to its allocation", || (clients()? == 1).then_some(())).await;
    // After another client has connected and ended, the status must still contain the first client.
    assert_new_pod_works(&machine, &share_ids(&machine.uuids[0], [1])[0]).await;
    machine.wait_until("only the first client is left, and attributed", || (clients()? == 1).then_some(())).await;
    assert_eq!(client.try_wait().unwrap(), None);
    kill_child(&mut client);
}

#[tokio::test]
async fn without_inotify_instances_agent_and_mps_host_notice_changes_by_polling() {
    let mut machine = node_with_shares();
    machine.start_mps_host_under(&RUN_WITHOUT_INOTIFY);
    machine.start_agent_under(&RUN_WITHOUT_INOTIFY);
    machine.wait_for_healthy(MPS_RESOURCE, TOTAL_SHARES).await;
    let watching = expect_healthy_from_now_on(&machine);
    assert_new_pod_works(&machine, &share_ids(&machine.uuids[0], [1])[0]).await;
    assert_stayed_healthy(watching).await;
    machine.kubelet.restart().unwrap();
    let registered_again = |seen: &FakeKubeletState| {
        seen.endpoints[MPS_RESOURCE].healthy_ids().len() == TOTAL_SHARES && seen.registrations.len() > 1
    };
    machine.wait_for_view("the agent registers with the new kubelet", registered_again).await;
    assert_new_pod_works(&machine, &share_ids(&machine.uuids[1], [1])[0]).await;
    assert!(machine.count_logged(&["inotify"]) > 0 || machine.count_logged(&["polling"]) > 0, "inotify worked");
}

#[tokio::test]
async fn a_full_disk_makes_no_share_unhealthy_and_prevents_no_container_from_starting() {
    let mut machine = node_with_shares();
    let state = machine.path("state");
    fs::create_dir(&state).unwrap();
    let mount = format!("mount -t tmpfs -o size=128k none {} && exec \"$0\" \"$@\"", state.to_str().unwrap());
    machine.start_mps_host();
    machine.start_agent_under(&["/usr/bin/unshare", "--mount", "/bin/sh", "-c", &mount]);
    machine.wait_for_healthy(MPS_RESOURCE, TOTAL_SHARES).await;
    // Access the state directory through the agent's mount namespace, because the tmpfs exists only
    // in this namespace.
    let state = std::path::PathBuf::from(format!("/proc/{}/root{}", machine.agent_pid(), state.display()));
    let saved = |share: &str| {
        fs::read_to_string(state.join("agent.json")).is_ok_and(|text| text.contains(&format!("\"{share}\"")))
    };
    let [kept] = <[String; 1]>::try_from(share_ids(&machine.uuids[0], [0])).unwrap();
    assert_new_pod_works(&machine, &kept).await;
    set_pods(&machine, &[&kept]);
    machine.wait_until("the allocation is saved", || saved(&kept).then_some(())).await;

    let watching = expect_healthy_from_now_on(&machine);
    let error = fs::write(state.join("filler"), vec![1; 256 << 10]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    let [meanwhile] = <[String; 1]>::try_from(share_ids(&machine.uuids[1], [3])).unwrap();
    assert_new_pod_works(&machine, &meanwhile).await;
    set_pods(&machine, &[&kept, &meanwhile]);
    let failed = || (machine.count_logged(WRITE_FAILURE_LOG_WORDS) >= FAILED_WRITE_ATTEMPTS).then_some(());
    machine.wait_until("writes fail for longer than a daemon may be absent", failed).await;
    assert!(saved(&kept) && !saved(&meanwhile), "the last complete checkpoint remains");
    assert_stayed_healthy(watching).await;

    fs::remove_file(state.join("filler")).unwrap();
    machine.wait_until("the new allocation is saved", || saved(&meanwhile).then_some(())).await;
    assert!(saved(&kept) && machine.agent_is_running());
}

fn checkpoint_contains(machine: &Machine, share: &str) -> bool {
    let text = fs::read_to_string(machine.path("state/agent.json"));
    text.is_ok_and(|text| text.contains(&format!("\"{share}\"")))
}

#[tokio::test]
async fn an_agent_that_cannot_open_any_file_keeps_all_shares_healthy_and_loses_no_allocation() {
    let mut machine = node_with_shares();
    machine.start_mps_host();
    machine.start_agent(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, TOTAL_SHARES).await;
    let [kept] = <[String; 1]>::try_from(share_ids(&machine.uuids[0], [0])).unwrap();
    assert_new_pod_works(&machine, &kept).await;
    set_pods(&machine, &[&kept]);
    machine.wait_until("the allocation is saved", || checkpoint_contains(&machine, &kept).then_some(())).await;

    let watching = expect_healthy_from_now_on(&machine);
    let before = set_descriptor_limit(machine.agent_pid(), Some(0));
    let [meanwhile] = <[String; 1]>::try_from(share_ids(&machine.uuids[1], [3])).unwrap();
    // The kubelet's connection is already open, so the kubelet can admit the pod. The pod's
    // container cannot start yet.
    machine.kubelet.allocate(MPS_RESOURCE, &[&meanwhile]).await.unwrap();
    set_pods(&machine, &[&kept, &meanwhile]);
    let failed = || (machine.count_logged(WRITE_FAILURE_LOG_WORDS) >= FAILED_WRITE_ATTEMPTS).then_some(());
    machine.wait_until("writes fail for longer than a daemon may be absent", failed).await;
    assert!(!checkpoint_contains(&machine, &meanwhile));
    assert_stayed_healthy(watching).await;

    set_descriptor_limit(machine.agent_pid(), before);
    machine.wait_until("the new allocation is saved", || checkpoint_contains(&machine, &meanwhile).then_some(())).await;
    machine.kubelet.pre_start(MPS_RESOURCE, &[&meanwhile]).await.unwrap();
    assert!(checkpoint_contains(&machine, &kept), "the pod's allocation was forgotten");
    assert!(machine.agent_is_running());
}

#[tokio::test]
async fn an_mps_host_that_restarts_while_the_agent_cannot_open_any_file_counts_as_alive() {
    let mut machine = node_with_shares();
    machine.start_mps_host();
    machine.start_agent(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, TOTAL_SHARES).await;
    let watching = expect_healthy_from_now_on(&machine);
    let before = set_descriptor_limit(machine.agent_pid(), Some(0));
    // The agent loses its connection to the MPS host, and has no descriptor for another one.
    machine.kill_mps_host();
    machine.start_mps_host();
    // A failed write needs something to write.
    machine.kubelet.allocate(MPS_RESOURCE, &[&share_ids(&machine.uuids[1], [3])[0]]).await.unwrap();
    let failed = || (machine.count_logged(WRITE_FAILURE_LOG_WORDS) >= FAILED_WRITE_ATTEMPTS).then_some(());
    machine.wait_until("writes fail for longer than a daemon may be absent", failed).await;
    assert_stayed_healthy(watching).await;
    set_descriptor_limit(machine.agent_pid(), before);
    assert_new_pod_works(&machine, &share_ids(&machine.uuids[0], [1])[0]).await;
}
