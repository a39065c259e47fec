//! Tests that a failure of one device's process affects only this device.
use cleave_gpu::mps::wire::{DaemonSettings, DaemonState, Reply, Request};
use rustix::process::Signal;
use sim_machine::ComputeMode;

use super::node::{Client, Node, default_daemon, parse_limits, send_signal, wait_until};
use super::{ALLOCATION_A, ALLOCATION_B};

/// Returns a node with two GPUs and one allocation on each.
fn node_with_two_gpus() -> Node {
    let mut node = Node::with_mps_host(2);
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.desire_allocation(ALLOCATION_B, 1, Some(50), Some(20480));
    node.apply_desired();
    node
}

/// Starts a client that runs until the test ends.
fn start_running_client(node: &Node, allocation: &str) -> Client {
    let mut client = node.start_client(allocation, &["--hold", "forever"]);
    parse_limits(&client.read_line());
    client
}

/// Returns the PIDs of the daemons and servers of all GPUs, as the status reports them.
fn reported_mps_processes(node: &Node) -> Vec<u32> {
    let status = node.status().unwrap();
    let mut pids: Vec<u32> =
        status.daemons.values().flat_map(|daemon| [daemon.pid, daemon.server_pid]).flatten().collect();
    pids.sort_unstable();
    pids
}

fn assert_only_reported_mps_processes_run(node: &Node) {
    wait_until("only the reported MPS processes run", || {
        let mut running = node.mps_processes();
        running.sort_unstable();
        running == reported_mps_processes(node)
    });
}

#[test]
fn a_killed_process_affects_only_its_gpu_and_is_restarted() {
    let node = node_with_two_gpus();
    let (uuid, other_uuid) = (node.uuid(0), node.uuid(1));
    let mut running = start_running_client(&node, ALLOCATION_B);
    let (before, other) = (node.daemon_status(0), node.daemon_status(1));
    let (process, other_process) = (node.device_process(0), node.device_process(1));
    for round in 1..=3 {
        send_signal(node.device_process(0), Signal::KILL);
        let after = node.wait_for_status("a new daemon serves", |status| {
            // The other GPU serves at all times, and its daemon is always reported.
            assert_eq!(status.daemons[&other_uuid].state, DaemonState::Active);
            assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
            let daemon = status.daemons.get(&uuid).expect("a daemon that may run is reported");
            daemon.restarts == round && daemon.state == DaemonState::Active
        });
        assert!(after.daemons[&uuid].message.contains("exited with signal 9"), "{after:#?}");
        assert_eq!(after.pid, node.mps_host_pid());
        assert_eq!(node.wait_until_ready(ALLOCATION_A), Reply::Done);
        assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    }
    assert_ne!(node.device_process(0), process);
    assert_ne!(node.daemon_status(0).pid, before.pid);
    assert_only_reported_mps_processes_run(&node);
    let other_now = node.daemon_status(1);
    assert_eq!((other_now.pid, other_now.server_pid, other_now.restarts), (other.pid, other.server_pid, 0));
    assert_eq!(node.device_process(1), other_process);
    assert!(running.has_no_output(), "the client of the other GPU runs on");
}

#[test]
fn a_hanging_process_is_reported_and_delays_no_other_gpu() {
    let mut node = node_with_two_gpus();
    let uuid = node.uuid(0);
    let mut running = [start_running_client(&node, ALLOCATION_A), start_running_client(&node, ALLOCATION_B)];
    let before = node.daemon_status(0);
    let process = node.device_process(0);
    send_signal(process, Signal::STOP);
    let hangs = node.wait_for_status("the GPU is not served", |status| {
        assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
        status.daemons[&uuid].state == DaemonState::Restarting
    });
    let message = &hangs.daemons[&uuid].message;
    assert!(message.contains(&format!("process {process}")) && message.contains("has not answered"), "{message}");
    assert_eq!(hangs.daemons[&uuid].clients.len(), 1, "the running client remains listed");
    // Requests about this GPU fail, and do not wait for the process.
    let terminate = Request::Terminate { device: uuid.clone(), pid: running[0].pid() };
    assert!(matches!(node.send_request(&terminate), Reply::Error { message } if message.contains("has not answered")));
    let ready = Request::Await { allocation: ALLOCATION_A.into(), timeout_ms: 1 };
    assert!(matches!(node.send_request(&ready), Reply::Error { message } if message.contains("has not answered")));
    // Changes of both GPUs are applied, as far as the processes answer.
    node.desire_daemon(0, DaemonSettings { default_threads: Some(40), ..default_daemon() });
    node.desire_allocation(ALLOCATION_B, 1, Some(20), Some(8192));
    node.desire_allocation("cc", 1, Some(20), Some(8192));
    node.write_desired();
    assert_eq!(node.wait_until_ready("cc"), Reply::Done);
    let hash = node.desired.hash();
    let applied = node.wait_for_status("the desired file is applied", |status| status.desired == hash);
    assert_eq!(applied.daemons[&uuid].state, DaemonState::Restarting);
    assert_eq!(node.run_and_read_limits(ALLOCATION_B), (26, Some(8192)));
    // A GPU without a desired daemon is not free while its process hangs.
    let settings = node.desired.daemons.remove(&uuid).unwrap();
    node.write_desired();
    let hash = node.desired.hash();
    let applied = node.wait_for_status("the desired file is applied", |status| status.desired == hash);
    assert_eq!(applied.daemons[&uuid].state, DaemonState::Stopping);
    node.desired.daemons.insert(uuid.clone(), settings);
    node.write_desired();
    send_signal(process, Signal::CONT);
    let mut is_active_too_early = false;
    node.wait_for_status("the process waits for its client", |status| {
        is_active_too_early |= status.daemons[&uuid].state == DaemonState::Active;
        status.daemons[&uuid].message.contains("waiting for 1 client")
    });
    assert!(!is_active_too_early, "the old settings are not reported as the new settings");
    assert!(running.iter_mut().all(Client::has_no_output), "no running client was affected");
    assert_eq!((node.daemon_status(0).pid, node.device_process(0)), (before.pid, process));
    running[0].signal(Signal::KILL);
    running[0].wait();
    let served = node.wait_for_state(0, DaemonState::Active);
    assert_eq!(served.restarts, 0);
    assert_eq!(node.send_admin_command(0, "get_default_active_thread_percentage"), "40.0");
}

#[test]
fn a_hanging_process_without_clients_is_replaced() {
    let node = node_with_two_gpus();
    let (process, other) = (node.device_process(0), node.daemon_status(1));
    send_signal(process, Signal::STOP);
    let uuid = node.uuid(0);
    node.wait_for_status("a new process serves", |status| {
        let daemon = &status.daemons[&uuid];
        daemon.state == DaemonState::Active && daemon.restarts == 1
    });
    assert_ne!(node.device_process(0), process);
    assert_eq!(node.daemon_status(1).pid, other.pid);
    assert_only_reported_mps_processes_run(&node);
}

#[test]
fn new_settings_and_removals_affect_only_their_gpu() {
    let mut node = node_with_two_gpus();
    let mut running = start_running_client(&node, ALLOCATION_B);
    let (process, other_process, other) = (node.device_process(0), node.device_process(1), node.daemon_status(1));
    node.desire_daemon(0, DaemonSettings { default_threads: Some(40), ..default_daemon() });
    node.apply_desired();
    node.wait_for_state(0, DaemonState::Active);
    assert_eq!(node.device_process(0), process, "new settings need no new process");
    // A removed GPU needs no process.
    let uuid = node.uuid(0);
    node.desired.daemons.remove(&uuid);
    node.desired.allocations.remove(ALLOCATION_A);
    node.write_desired();
    node.wait_for_status("the daemon has exited", |status| !status.daemons.contains_key(&uuid));
    wait_until("the process has exited", || node.device_processes(0).is_empty());
    wait_until("the pipe directory is removed", || !node.paths.pipe(&uuid).exists());
    assert!(!node.read_mps_host_log().contains("the process of a device failed"));
    node.desire_daemon(0, default_daemon());
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.apply_desired();
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    let now = node.daemon_status(1);
    assert_eq!((now.pid, now.restarts, node.device_process(1)), (other.pid, 0, other_process));
    assert!(running.has_no_output());
}

#[test]
fn an_mps_host_that_stops_leaves_nothing_even_of_a_hanging_process() {
    let mut node = Node::without_mps_host(2);
    for gpu in 0..2 {
        node.desire_daemon(gpu, DaemonSettings { exclusive: true, ..default_daemon() });
    }
    node.write_desired();
    node.start_mps_host();
    for gpu in 0..2 {
        node.wait_for_state(gpu, DaemonState::Active);
    }
    let processes = [node.device_process(0), node.device_process(1)];
    send_signal(processes[0], Signal::STOP);
    node.wait_for_state(0, DaemonState::Restarting);
    assert!(node.stop_mps_host(Signal::TERM).success());
    assert_eq!(node.mps_processes(), Vec::<u32>::new());
    assert_eq!([node.device_processes(0), node.device_processes(1)], [Vec::<u32>::new(), Vec::new()]);
    let modes: Vec<ComputeMode> = node.machine.snapshot().unwrap().gpus.iter().map(|gpu| gpu.compute_mode).collect();
    assert_eq!(modes, [ComputeMode::Default; 2]);
    assert!(node.status().unwrap().error.unwrap().contains("stopped"));
    assert!(!node.read_mps_host_log().contains("panicked"), "{}", node.read_mps_host_log());
}

#[test]
fn processes_end_with_a_killed_mps_host_and_the_next_mps_host_starts_no_second_daemon() {
    let mut node = node_with_two_gpus();
    let processes = [node.device_process(0), node.device_process(1)];
    // A stopped process cannot notice that the MPS host has ended.
    send_signal(processes[0], Signal::STOP);
    node.stop_mps_host(Signal::KILL);
    wait_until("the processes have ended", || [0, 1].iter().all(|gpu| node.device_processes(*gpu).is_empty()));
    // The second GPU is no longer desired.
    let uuid = node.uuid(1);
    node.desired.daemons.remove(&uuid);
    node.desired.allocations.remove(ALLOCATION_B);
    node.write_desired();
    node.start_mps_host();
    node.wait_for_state(0, DaemonState::Active);
    assert_eq!(node.wait_until_ready(ALLOCATION_A), Reply::Done);
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    node.wait_for_status("the daemon of the second GPU is not reported", |status| !status.daemons.contains_key(&uuid));
    assert_only_reported_mps_processes_run(&node);
    wait_until("the second GPU needs no process", || node.device_processes(1).is_empty());
}

/// Stops the daemon of a GPU with SIGSTOP, so that the daemon does not quit in time. Returns its
/// PID.
fn freeze_daemon(node: &Node, gpu: usize) -> u32 {
    let daemon = node.daemon_status(gpu).pid.unwrap();
    send_signal(daemon, Signal::STOP);
    daemon
}

/// Waits until the desired file is applied and the GPU has no reported daemon. Panics if the MPS
/// host reports no daemon while `daemon` runs.
fn wait_for_reported_exit(node: &Node, gpu: usize, daemon: u32) {
    let (uuid, hash) = (node.uuid(gpu), node.desired.hash());
    node.wait_for_status("the daemon is no longer reported", |status| {
        let is_reported = status.daemons.contains_key(&uuid);
        assert!(is_reported || !node.mps_processes().contains(&daemon), "the agent would use the GPU: {status:#?}");
        !is_reported && status.desired == hash
    });
}

#[test]
fn the_daemon_of_a_killed_mps_host_is_reported_by_the_next_mps_host_until_it_has_exited() {
    let mut node = node_with_two_gpus();
    let daemon = freeze_daemon(&node, 1);
    node.stop_mps_host(Signal::KILL);
    let uuid = node.uuid(1);
    node.desired.daemons.remove(&uuid);
    node.desired.allocations.remove(ALLOCATION_B);
    node.write_desired();
    node.start_mps_host();
    wait_for_reported_exit(&node, 1, daemon);
    assert_eq!(node.wait_until_ready(ALLOCATION_A), Reply::Done);
}

#[test]
fn an_mps_host_that_stops_early_leaves_no_daemon_of_an_earlier_mps_host() {
    let mut node = node_with_two_gpus();
    let daemon = freeze_daemon(&node, 1);
    node.stop_mps_host(Signal::KILL);
    node.desired.daemons.clear();
    node.desired.allocations.clear();
    node.write_desired();
    node.start_mps_host();
    node.device_process(1);
    assert!(node.mps_processes().contains(&daemon), "the process has not finished its clean-up");
    assert!(node.stop_mps_host(Signal::TERM).success());
    assert_eq!(node.mps_processes(), Vec::<u32>::new());
}

#[test]
fn a_terminated_process_is_restarted_and_its_daemon_is_reported_until_it_has_exited() {
    let mut node = node_with_two_gpus();
    let uuid = node.uuid(0);
    send_signal(node.device_process(0), Signal::TERM);
    node.wait_for_status("a new daemon serves", |status| {
        let daemon = status.daemons.get(&uuid).expect("a daemon that may run is reported");
        assert_ne!(daemon.state, DaemonState::Stopping, "the daemon will be back soon");
        daemon.state == DaemonState::Active && daemon.restarts == 1
    });
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    let daemon = freeze_daemon(&node, 0);
    send_signal(node.device_process(0), Signal::TERM);
    node.wait_for_state(0, DaemonState::Restarting);
    node.desired.daemons.remove(&uuid);
    node.desired.allocations.remove(ALLOCATION_A);
    node.write_desired();
    wait_for_reported_exit(&node, 0, daemon);
    assert_eq!(node.daemon_status(1).restarts, 0);
}

#[test]
fn an_mps_host_that_stops_reports_undesired_daemons_until_they_have_exited() {
    let mut node = node_with_two_gpus();
    let _running = start_running_client(&node, ALLOCATION_B);
    let uuid = node.uuid(1);
    node.desired.daemons.remove(&uuid);
    node.desired.allocations.remove(ALLOCATION_B);
    node.write_desired();
    node.wait_for_state(1, DaemonState::Stopping);
    let daemon = freeze_daemon(&node, 1);
    send_signal(node.mps_host_pid(), Signal::TERM);
    wait_for_reported_exit(&node, 1, daemon);
    assert!(node.stop_mps_host(Signal::TERM).success());
    assert_eq!(node.status().unwrap().daemons.len(), 0);
}
