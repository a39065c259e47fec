//! Tests the MPS host as a process on a simulated machine with a stand-in MPS, and clients at its
//! doors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test helpers may panic as tests do")]
mod devices;
mod doctor;
mod drivers;
mod faults;
mod handshake;
mod node;

use std::fs;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Instant;

use cleave_gpu::mps::wire::{Allocation, DaemonSettings, DaemonState, Reply, Request};
use rustix::process::{Resource, Rlimit, Signal};
use sim_machine::{ComputeMode, FaultEffect};
use sim_mps::handshake as mps;
use sim_mps::seqpacket::Connection;

use node::{Client, Node, default_daemon, parse_limits, send_signal, set_user, wait_until};

const ALLOCATION_A: &str = "aa";
const ALLOCATION_B: &str = "bb";

/// Returns a node with one GPU and two allocations: one fifth and one half of the GPU.
fn node_with_two_tenants() -> Node {
    let mut node = Node::with_mps_host(1);
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.desire_allocation(ALLOCATION_B, 0, Some(50), Some(20480));
    node.apply_desired();
    node
}

#[test]
fn clients_run_under_the_limits_of_their_allocation() {
    let mut node = node_with_two_tenants();
    node.desire_allocation("cc", 0, None, None);
    node.apply_desired();
    let expected = |id: &str| match id {
        ALLOCATION_A => (26, Some(8192)),
        ALLOCATION_B => (66, Some(20480)),
        _ => (132, None),
    };
    // Clients connect in bursts of six, interleaved.
    for _ in 0..8 {
        let ids = [ALLOCATION_A, ALLOCATION_B, "cc", ALLOCATION_A, ALLOCATION_B, "cc"];
        let mut clients: Vec<(&str, Client)> = ids.iter().map(|id| (*id, node.start_client(id, &[]))).collect();
        for (id, client) in &mut clients {
            assert_eq!(parse_limits(&client.read_line()), expected(id), "{id}");
        }
    }
    // The CUDA library connects once for the process and once for each context.
    let status = node.wait_for_status("all clients are counted", |status| {
        status.allocations.values().all(|door| door.admitted >= 16)
    });
    assert!(status.allocations.values().all(|door| door.refused == 0 && door.waiting == 0), "{status:#?}");
}

#[test]
fn a_tenant_can_lower_its_limits_but_not_raise_them() {
    let node = node_with_two_tenants();
    let saw = |threads: &str, memory: &str| {
        let mut command = node.client_command(ALLOCATION_A, &[]);
        command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", threads).env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory);
        parse_limits(&Client::spawn(command).read_line())
    };
    assert_eq!(saw("100", "0=100G"), (26, Some(8192)));
    assert_eq!(saw("10", "0=4G"), (12, Some(4096)));
}

#[test]
fn a_user_other_than_root_is_admitted() {
    let node = node_with_two_tenants();
    let mut command = node.client_command(ALLOCATION_A, &[]);
    set_user(&mut command, 1000);
    assert_eq!(parse_limits(&Client::spawn(command).read_line()), (26, Some(8192)));
}

#[test]
fn defaults_are_set_before_clients_are_admitted_and_after_a_restart() {
    let mut node = Node::without_mps_host(1);
    let defaults = DaemonSettings { default_threads: Some(40), default_memory_mib: Some(1536), ..default_daemon() };
    node.desire_daemon(0, defaults);
    node.write_desired();
    node.start_mps_host();
    let before = node.wait_for_state(0, DaemonState::Active);
    let check = |node: &Node, server: u32| {
        assert_eq!(node.send_admin_command(0, "get_default_active_thread_percentage"), "40.0");
        assert_eq!(node.send_admin_command(0, "get_default_device_pinned_mem_limit 0"), "1G");
        assert_eq!(node.send_admin_command(0, &format!("get_active_thread_percentage {server}")), "40.0");
    };
    check(&node, before.server_pid.unwrap());
    send_signal(before.pid.unwrap(), Signal::KILL);
    let uuid = node.uuid(0);
    let status = node.wait_for_status("the daemon serves again", |status| {
        let daemon = &status.daemons[&uuid];
        daemon.state == DaemonState::Active && daemon.pid != before.pid
    });
    assert_eq!(status.daemons[&uuid].restarts, 1);
    assert!(status.daemons[&uuid].message.contains("signal 9"), "{status:#?}");
    check(&node, status.daemons[&uuid].server_pid.unwrap());
}

#[test]
fn no_client_is_admitted_if_defaults_are_not_accepted() {
    let mut node = Node::without_mps_host(1);
    node.desire_daemon(0, DaemonSettings { default_threads: Some(40), ..default_daemon() });
    node.desire_allocation(ALLOCATION_A, 0, None, None);
    node.inject_fault("mps:command:get_default_active_thread_percentage", None, FaultEffect::Code(7), None);
    node.write_desired();
    node.start_mps_host();
    let backing_off = node.wait_for_state(0, DaemonState::BackOff);
    assert!(backing_off.message.contains("did not accept"), "{backing_off:#?}");
    let mut client = node.start_client(ALLOCATION_A, &[]);
    let waits = node.wait_for_status("the client waits", |status| status.allocations[ALLOCATION_A].waiting == 1);
    assert_eq!(waits.allocations[ALLOCATION_A].admitted, 0);
    assert!(client.has_no_output());
    node.clear_faults();
    assert_eq!(parse_limits(&client.read_line()), (132, None));
}

#[test]
fn administrators_are_refused_and_counted() {
    let node = node_with_two_tenants();
    let control = node.paths.door(ALLOCATION_A);
    for command in ["get_server_list", "quit", "set_default_active_thread_percentage 100"] {
        assert!(!matches!(mps::send_command(&control, command), Ok(Some(_))), "{command}");
    }
    node.wait_for_status("all clients are counted", |status| status.allocations[ALLOCATION_A].refused == 3);
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}

#[test]
fn a_client_that_connects_without_a_daemon_waits_and_runs_under_its_limits() {
    let mut node = Node::without_mps_host(1);
    node.set_env("SIM_MPS_SERVER_START_MS", "1500");
    node.desire_daemon(0, default_daemon());
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.write_desired();
    node.start_mps_host();
    node.wait_for_status("the door is open", |status| status.allocations.contains_key(ALLOCATION_A));
    // This client connects before the first daemon runs.
    let mut first = node.start_client(ALLOCATION_A, &[]);
    node.wait_for_status("the first client waits", |status| {
        status.allocations.get(ALLOCATION_A).is_some_and(|door| door.waiting == 1)
    });
    assert!(first.has_no_output());
    assert_eq!(parse_limits(&first.read_line()), (26, Some(8192)));
    // These clients connect after the daemon was killed.
    for _ in 0..2 {
        send_signal(node.wait_for_state(0, DaemonState::Active).pid.unwrap(), Signal::KILL);
        node.wait_for_state(0, DaemonState::Restarting);
        let mut clients: Vec<Client> = (0..5).map(|_| node.start_client(ALLOCATION_A, &[])).collect();
        node.wait_for_status("the clients wait", |status| status.allocations[ALLOCATION_A].waiting == 5);
        for client in &mut clients {
            assert_eq!(parse_limits(&client.read_line()), (26, Some(8192)));
        }
        node.wait_for_status("no client waits", |status| status.allocations[ALLOCATION_A].waiting == 0);
    }
}

#[test]
fn a_killed_server_is_restarted_and_gets_its_limits_again() {
    let node = node_with_two_tenants();
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    let before = node.daemon_status(0);
    send_signal(before.server_pid.unwrap(), Signal::KILL);
    let uuid = node.uuid(0);
    let is_new = |server: Option<u32>| server.is_some() && server != before.server_pid;
    let after = node.wait_for_status("a new server serves", |status| {
        status.daemons[&uuid].state == DaemonState::Active && is_new(status.daemons[&uuid].server_pid)
    });
    assert_eq!(after.daemons[&uuid].pid, before.pid, "the daemon is the same");
    // A client of the new server runs under the limits of its allocation.
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}

#[test]
fn a_hung_daemon_is_replaced_and_the_other_gpu_never_waits() {
    let mut node = Node::with_mps_host(2);
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.desire_allocation(ALLOCATION_B, 1, Some(50), Some(20480));
    node.apply_desired();
    let before = node.daemon_status(0);
    let other = node.daemon_status(1);
    send_signal(before.pid.unwrap(), Signal::STOP);
    let mut waits = node.start_client(ALLOCATION_A, &[]);
    let uuid = node.uuid(0);
    let mut seen_meanwhile = 0;
    node.wait_for_status("the daemon is replaced", |status| {
        seen_meanwhile += usize::from(node.run_and_read_limits(ALLOCATION_B) == (66, Some(20480)));
        let daemon = &status.daemons[&uuid];
        daemon.state == DaemonState::Active && daemon.pid != before.pid
    });
    assert!(seen_meanwhile > 0);
    assert_eq!(parse_limits(&waits.read_line()), (26, Some(8192)));
    assert_eq!(node.daemon_status(1).pid, other.pid);
    assert_eq!(node.daemon_status(1).restarts, 0);
}

#[test]
fn a_hung_command_does_not_delay_the_other_gpu() {
    let mut node = Node::with_mps_host(2);
    node.desire_allocation(ALLOCATION_A, 0, Some(20), None);
    node.desire_allocation(ALLOCATION_B, 1, Some(50), None);
    node.apply_desired();
    node.inject_fault("mps:command:set_active_thread_percentage", Some(0), FaultEffect::Hang(None), None);
    let mut waits = node.start_client(ALLOCATION_A, &[]);
    node.wait_for_status("the client waits", |status| status.allocations[ALLOCATION_A].waiting == 1);
    for _ in 0..5 {
        assert_eq!(node.run_and_read_limits(ALLOCATION_B).0, 66);
    }
    assert!(waits.has_no_output(), "no client is admitted without limits");
    node.clear_faults();
    assert_eq!(parse_limits(&waits.read_line()).0, 26);
}

#[test]
fn invalid_and_stalled_handshakes_are_refused_and_delay_no_other_client() {
    let node = node_with_two_tenants();
    let lies = [
        "stall=0",
        "stall=4",
        "stall=9",
        "kind=3",
        "kind=0",
        "short-kind",
        "huge",
        "garbage",
        "twice",
        "descriptors",
        "pid=1",
        "administrator-after-client",
        "unread",
        "long-command",
        "flood=200",
    ];
    let mut liars: Vec<Client> =
        lies.iter().map(|lie| node.start_client(ALLOCATION_A, &["--lie", lie, "--hold", "30"])).collect();
    let before = node.daemon_status(0);
    for _ in 0..4 {
        assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
    }
    for (liar, lie) in liars.iter_mut().zip(lies) {
        assert_ne!(liar.read_line()["outcome"], "open", "{lie}");
    }
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    let after = node.daemon_status(0);
    assert_eq!((after.pid, after.server_pid, after.restarts), (before.pid, before.server_pid, 0));
}

#[test]
fn connections_leak_no_descriptors() {
    let node = node_with_two_tenants();
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    let settled = |node: &Node| {
        node.wait_for_status("no client is connected", |status| {
            status.daemons.values().all(|daemon| daemon.clients.is_empty())
        });
        node.count_mps_host_descriptors()
    };
    let before = settled(&node);
    let door = node.paths.door(ALLOCATION_A);
    for round in 0..250 {
        // Peers that disconnect: one before the handshake, one during it, one after it has received
        // the server's socket (in every tenth round), and an administrator.
        drop(Connection::connect(&door).unwrap());
        drop(mps::introduce_to_daemon(&door, mps::KIND_CLIENT).unwrap());
        if round % 10 == 0 {
            drop(mps::connect_to_server(&door).unwrap());
        }
        drop(mps::introduce_to_daemon(&door, mps::KIND_ADMINISTRATOR).unwrap());
    }
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    wait_until("all descriptors are closed", || settled(&node) <= before);
}

#[test]
fn clients_are_reported_with_their_allocation_until_they_exit() {
    let node = node_with_two_tenants();
    let mut a = node.start_client(ALLOCATION_A, &["--hold", "forever"]);
    let mut b = node.start_client(ALLOCATION_B, &["--hold", "forever"]);
    a.read_line();
    b.read_line();
    let uuid = node.uuid(0);
    let of = |pid: u32, allocation: &str| (pid, Some(allocation.to_owned()));
    let mut expected = vec![of(a.pid(), ALLOCATION_A), of(b.pid(), ALLOCATION_B)];
    expected.sort();
    node.wait_for_status("both are reported", |status| {
        let reported = status.daemons[&uuid].clients.iter().map(|client| (client.pid, client.allocation.clone()));
        reported.collect::<Vec<_>>() == expected
    });
    a.signal(Signal::KILL);
    a.wait();
    node.wait_for_status("the exited client is no longer reported", |status| {
        status.daemons[&uuid].clients.iter().map(|client| client.pid).eq([b.pid()])
    });
}

#[test]
fn clients_beyond_the_maximum_are_refused_until_another_client_exits() {
    let mut node = Node::with_mps_host(1);
    let allocation = Allocation { device: node.uuid(0), threads: Some(20), memory_mib: None, max_clients: Some(2) };
    node.desired.allocations.insert(ALLOCATION_A.into(), allocation);
    node.apply_desired();
    let mut running: Vec<Client> = (0..2).map(|_| node.start_client(ALLOCATION_A, &["--hold", "forever"])).collect();
    for client in &mut running {
        assert_eq!(parse_limits(&client.read_line()).0, 26);
    }
    let third = node.start_client(ALLOCATION_A, &[]).read_line();
    assert!(!third["viaMps"].as_bool().unwrap_or_default(), "{third}");
    node.wait_for_status("the refusal is counted", |status| status.allocations[ALLOCATION_A].refused > 0);
    running.pop();
    assert_eq!(node.run_and_read_limits(ALLOCATION_A).0, 26);
}

#[test]
fn clients_wait_while_the_server_is_in_fault() {
    let node = node_with_two_tenants();
    let mut culprit = node.start_client(ALLOCATION_A, &["--kernel-ms", "1", "--fault", "--linger", "forever"]);
    culprit.read_line();
    let fault = node.wait_for_state(0, DaemonState::Fault);
    assert_eq!(fault.pid, node.daemon_status(0).pid);
    let mut waits = node.start_client(ALLOCATION_B, &[]);
    node.wait_for_status("a client waits", |status| status.allocations[ALLOCATION_B].waiting == 1);
    assert!(waits.has_no_output());
    culprit.signal(Signal::KILL);
    node.wait_for_state(0, DaemonState::Active);
    assert_eq!(parse_limits(&waits.read_line()), (66, Some(20480)));
    assert_eq!(node.daemon_status(0).restarts, 0);
}

#[test]
fn an_mps_host_cleans_up_after_a_killed_mps_host() {
    let mut node = node_with_two_tenants();
    let before = node.daemon_status(0);
    node.stop_mps_host(Signal::KILL);
    node.start_mps_host();
    let uuid = node.uuid(0);
    node.wait_for_status("a new daemon serves", |status| {
        let daemon = status.daemons.get(&uuid);
        daemon.is_some_and(|daemon| daemon.state == DaemonState::Active && daemon.pid != before.pid)
    });
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    let mut processes = node.mps_processes();
    processes.sort_unstable();
    let now = node.daemon_status(0);
    let mut expected = vec![now.pid.unwrap(), now.server_pid.unwrap()];
    expected.sort_unstable();
    assert_eq!(processes, expected, "no process of the earlier MPS host is left");
}

#[test]
fn an_mps_host_that_stops_removes_its_processes_and_files() {
    let mut node = node_with_two_tenants();
    let mut running = node.start_client(ALLOCATION_A, &["--hold", "forever"]);
    running.read_line();
    assert!(node.stop_mps_host(Signal::TERM).success());
    assert_eq!(node.mps_processes(), Vec::<u32>::new());
    for gone in [node.paths.door(ALLOCATION_A), node.paths.door(ALLOCATION_B), node.paths.socket()] {
        assert!(!gone.exists(), "{}", gone.display());
    }
    let status = node.status().unwrap();
    assert_eq!((status.pid, status.daemons.len(), status.allocations.len()), (0, 0, 0));
    assert!(status.error.unwrap().contains("stopped"));
}

#[test]
fn exclusive_process_is_set_before_the_daemon_starts_and_restored_after_it_stops() {
    let mut node = Node::without_mps_host(1);
    node.desire_daemon(0, DaemonSettings { exclusive: true, ..default_daemon() });
    node.desire_allocation(ALLOCATION_A, 0, Some(20), None);
    let mode = |node: &Node| node.machine.snapshot().unwrap().gpus[0].compute_mode;
    assert_eq!(mode(&node), ComputeMode::Default);
    node.write_desired();
    node.start_mps_host();
    node.wait_for_state(0, DaemonState::Active);
    assert_eq!(mode(&node), ComputeMode::ExclusiveProcess);
    assert_eq!(node.run_and_read_limits(ALLOCATION_A).0, 26);
    // A killed MPS host cannot restore the compute mode. The next MPS host restores it. Stop the
    // process of the device first: it could restore the mode before the kernel kills it too.
    send_signal(node.device_process(0), Signal::STOP);
    node.stop_mps_host(Signal::KILL);
    assert_eq!(mode(&node), ComputeMode::ExclusiveProcess);
    node.start_mps_host();
    node.wait_for_state(0, DaemonState::Active);
    node.stop_mps_host(Signal::TERM);
    assert_eq!(mode(&node), ComputeMode::Default);
    // An MPS host that no longer has a daemon for the GPU also restores the mode.
    node.start_mps_host();
    node.wait_for_state(0, DaemonState::Active);
    send_signal(node.device_process(0), Signal::STOP);
    node.stop_mps_host(Signal::KILL);
    node.desired.daemons.clear();
    node.desired.allocations.clear();
    node.write_desired();
    node.start_mps_host();
    wait_until("the compute mode is restored", || mode(&node) == ComputeMode::Default);
}

#[test]
fn an_undesired_daemon_stops_once_its_clients_have_exited() {
    let mut node = node_with_two_tenants();
    let mut running = node.start_client(ALLOCATION_A, &["--hold", "forever"]);
    running.read_line();
    let before = node.daemon_status(0);
    let uuid = node.uuid(0);
    node.desired.daemons.clear();
    node.desired.allocations.clear();
    node.write_desired();
    let stopping = node.wait_for_state(0, DaemonState::Stopping);
    assert_eq!(stopping.pid, before.pid);
    assert!(stopping.message.contains("waiting for 1 client to exit"), "{}", stopping.message);
    assert!(!node.paths.door(ALLOCATION_A).exists());
    assert!(running.has_no_output());
    running.signal(Signal::KILL);
    running.wait();
    node.wait_for_status("the daemon has exited", |status| !status.daemons.contains_key(&uuid));
    assert_eq!(node.mps_processes(), Vec::<u32>::new());
    // The agent may desire a removed daemon again.
    node.desire_daemon(0, default_daemon());
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.apply_desired();
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}

#[test]
fn new_settings_wait_for_clients_and_new_limits_apply_to_the_next_client() {
    let mut node = node_with_two_tenants();
    let mut running = node.start_client(ALLOCATION_A, &["--hold", "forever"]);
    running.read_line();
    let before = node.daemon_status(0);
    let uuid = node.uuid(0);
    node.desire_daemon(0, DaemonSettings { default_threads: Some(30), ..default_daemon() });
    node.desire_allocation(ALLOCATION_A, 0, Some(10), Some(1024));
    node.write_desired();
    let waits = node.wait_for_status("the restart waits for clients", |status| {
        status.daemons[&uuid].message.contains("waiting for 1 client to exit")
    });
    assert_eq!(waits.daemons[&uuid].state, DaemonState::Restarting, "it has the older settings");
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (12, Some(1024)));
    assert_eq!(node.daemon_status(0).pid, before.pid);
    running.signal(Signal::KILL);
    running.wait();
    node.wait_for_status("the daemon was restarted", |status| {
        let daemon = &status.daemons[&uuid];
        daemon.state == DaemonState::Active && daemon.pid != before.pid
    });
    assert_eq!(node.send_admin_command(0, "get_default_active_thread_percentage"), "30.0");
    assert_eq!(node.daemon_status(0).restarts, 0, "no client failed");
}

#[test]
fn an_invalid_desired_file_changes_nothing() {
    let node = node_with_two_tenants();
    let before = node.status().unwrap();
    for (bytes, says) in [
        (&b"{\"version\":1,\"daem"[..], "failed to parse"),
        (b"", "failed to parse"),
        (br#"{"version":7}"#, "version 7"),
        (br#"{"version":1,"daemons":{"../x":{"multiUser":true,"exclusive":false,"defaultThreads":null,"defaultMemoryMib":null}},"allocations":{}}"#, "../x"),
    ] {
        node.write_desired_bytes(bytes);
        let after = node.wait_for_status(says, |status| status.error.as_ref().is_some_and(|error| error.contains(says)));
        assert_eq!(after.desired, before.desired);
        assert_eq!(after.daemons, before.daemons);
    }
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    node.write_desired();
    node.wait_for_status("the error is cleared", |status| status.error.is_none());
}

#[test]
fn a_desired_file_that_could_not_be_read_is_read_again() {
    let mut node = node_with_two_tenants();
    let pid = rustix::process::Pid::from_raw(i32::try_from(node.mps_host_pid()).unwrap());
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    let set_limit =
        |current| rustix::process::prlimit(pid, Resource::Nofile, Rlimit { current, maximum }).unwrap().current;
    let before = set_limit(Some(3));
    node.desire_allocation(ALLOCATION_A, 0, Some(50), None);
    node.write_desired();
    let failed = "failed to apply the desired file";
    wait_until("the MPS host has no free descriptor", || node.read_mps_host_log().contains(failed));
    set_limit(before);
    let hash = node.desired.hash();
    node.wait_for_status("the desired file is applied", |status| status.desired == hash && status.error.is_none());
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (66, None));
    assert_eq!(node.read_mps_host_log().matches(failed).count(), 1, "{}", node.read_mps_host_log());
}

#[test]
fn a_status_that_could_not_be_written_is_written_again() {
    let mut node = node_with_two_tenants();
    let path = node.paths.status();
    // Create a directory at the path of the file.
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    node.desire_allocation(ALLOCATION_A, 0, Some(50), None);
    node.write_desired();
    wait_until("the status cannot be written", || node.read_mps_host_log().contains("failed to write status"));
    fs::remove_dir(&path).unwrap();
    let hash = node.desired.hash();
    node.wait_for_status("the status is written", |status| status.desired == hash && status.error.is_none());
}

#[test]
fn a_door_that_could_not_be_opened_is_reported_for_its_device_and_opened_later() {
    let mut node = Node::with_mps_host(2);
    let directory = node.paths.allocation(ALLOCATION_A);
    // Create a file at the path of the door's directory.
    fs::write(&directory, "").unwrap();
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.write_desired();
    let (uuid, hash) = (node.uuid(0), node.desired.hash());
    let failed = node.wait_for_status("the door's error is reported", |status| !status.door_errors.is_empty());
    assert_eq!((failed.desired, failed.error, failed.door_errors.len()), (hash, None, 1));
    assert!(failed.door_errors[&uuid].contains(ALLOCATION_A), "{:?}", failed.door_errors);
    fs::remove_file(&directory).unwrap();
    node.wait_for_status("the door is open", |status| status.door_errors.is_empty());
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}

#[test]
fn a_door_whose_socket_cannot_be_restored_is_reported_until_it_is_restored() {
    let node = node_with_two_tenants();
    let directory = node.paths.allocation(ALLOCATION_A);
    // Create a file at the path of the door's directory.
    fs::remove_dir_all(&directory).unwrap();
    fs::write(&directory, "").unwrap();
    let uuid = node.uuid(0);
    let failed = node.wait_for_status("the door's error is reported", |status| !status.door_errors.is_empty());
    assert!(failed.door_errors[&uuid].contains(ALLOCATION_A), "{:?}", failed.door_errors);
    fs::remove_file(&directory).unwrap();
    node.wait_for_status("the door is open", |status| status.door_errors.is_empty());
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}

#[test]
fn a_run_directory_that_is_too_long_for_sockets_is_an_error() {
    let node = Node::without_mps_host(1);
    let long = node.path(&"x".repeat(90));
    let output = Command::new(node::mps_host_program()).args(["mps-host", "--run-dir"]).arg(&long).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(errors.contains("too long") && errors.contains("--run-dir"), "{errors}");
}

#[test]
fn a_second_mps_host_in_the_same_directory_does_not_start() {
    let node = Node::with_mps_host(1);
    let output = node.mps_host_command().output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("another MPS host"));
    assert_eq!(node.status().unwrap().pid, node.mps_host_pid());
}

#[test]
fn a_removed_door_socket_is_restored() {
    let node = node_with_two_tenants();
    fs::remove_dir_all(node.paths.allocation(ALLOCATION_A)).unwrap();
    wait_until("the door exists again", || node.paths.door(ALLOCATION_A).exists());
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}

#[test]
fn the_readiness_probe_succeeds_only_while_the_mps_host_answers() {
    let mut node = Node::with_mps_host(1);
    let ready = |node: &Node| {
        let mut probe = Command::new(node::mps_host_program());
        probe.args(["mps-host", "ready", "--run-dir"]).arg(node.paths.run()).output().unwrap()
    };
    let first = ready(&node);
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let pid = rustix::process::Pid::from_raw(i32::try_from(node.mps_host_pid()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let hung = ready(&node);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert!(!hung.status.success());
    assert!(String::from_utf8_lossy(&hung.stderr).contains("does not answer"), "{hung:?}");
    assert!(ready(&node).status.success());
    node.stop_mps_host(rustix::process::Signal::TERM);
    assert!(!ready(&node).status.success());
}

#[test]
fn valid_and_invalid_requests_are_answered() {
    let node = node_with_two_tenants();
    assert!(matches!(node.send_request(&Request::Status), Reply::Status(status) if status.pid == node.mps_host_pid()));
    for bad in ["{}\n", "\n", "nonsense\n", "{\"op\":\"explode\"}\n", &format!("{}\n", "[".repeat(100_000))] {
        assert!(matches!(node.send_line(bad), Reply::Error { .. }), "{bad:.20}");
    }
    let unknown = Request::Await { allocation: "ff".into(), timeout_ms: 1 };
    assert!(
        matches!(node.send_request(&unknown), Reply::Error { message } if message.contains("not in the desired file"))
    );
    // Connections that send only a part of a line delay no other connection.
    let mut silent: Vec<UnixStream> = (0..20).map(|_| UnixStream::connect(node.paths.socket()).unwrap()).collect();
    for stream in &mut silent {
        std::io::Write::write_all(stream, b"{\"op\":").unwrap();
    }
    assert_eq!(node.wait_until_ready(ALLOCATION_A), Reply::Done);
    // The MPS host terminates a client through MPS.
    let mut running = node.start_client(ALLOCATION_A, &["--hold", "forever"]);
    running.read_line();
    let terminate = Request::Terminate { device: node.uuid(0), pid: running.pid() };
    assert_eq!(node.send_request(&terminate), Reply::Done);
    // The first request ends this client's context, and the program keeps running.
    let mut ended = node.start_client(ALLOCATION_A, &["--hold", "forever", "--linger", "forever"]);
    ended.read_line();
    let terminate = Request::Terminate { device: node.uuid(0), pid: ended.pid() };
    assert_eq!([node.send_request(&terminate), node.send_request(&terminate)], [Reply::Done, Reply::NoContext]);
    // A stopped client would block the daemon until the client continues.
    let stopped = node.start_client(ALLOCATION_A, &["--hold", "forever", "--read-line"]);
    stopped.signal(Signal::STOP);
    let stat = format!("/proc/{}/stat", stopped.pid());
    wait_until("the client is stopped", || fs::read_to_string(&stat).unwrap().contains(") T "));
    let terminate = Request::Terminate { device: node.uuid(0), pid: stopped.pid() };
    assert!(matches!(node.send_request(&terminate), Reply::Error { message } if message.contains("stopped")));
    let terminate = Request::Terminate { device: "GPU-0".into(), pid: 1 };
    assert!(matches!(node.send_request(&terminate), Reply::Error { .. }));
}

#[test]
fn without_multi_user_users_take_turns() {
    let mut node = Node::without_mps_host(1);
    node.desire_daemon(0, DaemonSettings { multi_user: false, ..default_daemon() });
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.write_desired();
    node.start_mps_host();
    node.wait_for_state(0, DaemonState::Active);
    let as_1000 = |arguments: &[&str]| {
        let mut command = node.client_command(ALLOCATION_A, arguments);
        set_user(&mut command, 1000);
        Client::spawn(command)
    };
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    let mut holds = as_1000(&["--hold", "forever"]);
    assert_eq!(parse_limits(&holds.read_line()), (26, Some(8192)));
    let mut waits = node.start_client(ALLOCATION_A, &[]);
    node.wait_for_status("root's client waits", |status| status.allocations[ALLOCATION_A].waiting == 1);
    assert!(waits.has_no_output());
    holds.signal(Signal::KILL);
    assert_eq!(parse_limits(&waits.read_line()), (26, Some(8192)));
}

#[test]
fn orphans_are_reaped() {
    let node = node_with_two_tenants();
    let before = node.daemon_status(0);
    send_signal(before.pid.unwrap(), Signal::KILL);
    let uuid = node.uuid(0);
    node.wait_for_status("the daemon serves again", |status| {
        let daemon = &status.daemons[&uuid];
        daemon.state == DaemonState::Active && daemon.pid != before.pid
    });
    let parents = [node.mps_host_pid(), node.device_process(0)];
    let zombies = || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let stats = processes.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
        let is_zombie = |stat: &String| {
            let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
            parents.iter().any(|parent| rest.starts_with(&format!("Z {parent} ")))
        };
        stats.filter(is_zombie).count()
    };
    wait_until("no zombie process remains", || zombies() == 0);
}

#[test]
fn each_process_of_the_mps_host_uses_less_than_4_mib_of_anonymous_memory() {
    let node = node_with_two_tenants();
    let start = Instant::now();
    for _ in 0..20 {
        assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    }
    for pid in [node.mps_host_pid(), node.device_process(0)] {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
        println!("{} {} ({:?} for 20 clients)", line("VmRSS"), line("RssAnon"), start.elapsed());
        let anonymous: u64 = line("RssAnon").split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(anonymous < 4096, "{anonymous} kB of anonymous memory");
    }
}
