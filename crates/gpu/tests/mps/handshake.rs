//! Tests clients that misbehave during the handshake. The daemon and its server wait for each
//! client without a deadline. The server waits forever if a client disconnects after it has
//! received the server's socket and before it has introduced itself. A misbehaving client must not
//! affect other clients.
use std::thread;
use std::time::Duration;

use cleave_gpu::mps::wire::DaemonState;
use sim_mps::handshake::{
    self, CREDENTIALS_PACKET, ClientSockets, ConnectError, IntroductionSubject, KIND_CLIENT, own_credentials,
};
use sim_mps::seqpacket::Connection;

use crate::node::{Node, wait_until};
use crate::{ALLOCATION_A, ALLOCATION_B, node_with_two_tenants};

/// Returns a client that has received the server's socket.
fn client_with_socket(node: &Node, allocation: &str) -> ClientSockets {
    handshake::connect_to_server(&node.paths.door(allocation)).unwrap()
}

/// Asserts that other clients still run under their limits, on the same server.
fn assert_other_clients_unharmed(node: &Node, before: Option<u32>) {
    assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    let daemon = node.daemon_status(0);
    assert_eq!((daemon.server_pid, daemon.restarts), (before, 0), "{}", node.read_mps_host_log());
    node.wait_for_state(0, DaemonState::Active);
}

#[test]
fn a_client_that_exits_before_its_introduction_to_the_server_affects_no_other_client() {
    let node = node_with_two_tenants();
    let server = node.daemon_status(0).server_pid;
    for _ in 0..3 {
        drop(client_with_socket(&node, ALLOCATION_A));
        assert_other_clients_unharmed(&node, server);
    }
}

#[test]
fn a_client_that_never_introduces_itself_to_the_server_is_disconnected() {
    let node = node_with_two_tenants();
    let server = node.daemon_status(0).server_pid;
    let stalled = client_with_socket(&node, ALLOCATION_A);
    assert_other_clients_unharmed(&node, server);
    // An open connection would let the stalled client run under limits that were set later for
    // other clients.
    assert!(matches!(stalled.introduce_to_server(IntroductionSubject::Process), Err(ConnectError::ByServer)));
    assert_other_clients_unharmed(&node, server);
}

#[test]
fn a_client_that_introduces_itself_only_partly_is_disconnected() {
    let node = node_with_two_tenants();
    let server = node.daemon_status(0).server_pid;
    for words in 1..3 {
        let client = client_with_socket(&node, ALLOCATION_A);
        let channel = client.receive_channel().unwrap();
        client.server.send_credentials(CREDENTIALS_PACKET, own_credentials()).unwrap();
        for word in IntroductionSubject::Process.introduction_words().iter().take(words - 1) {
            client.server.send(word).unwrap();
        }
        drop((client, channel));
        assert_other_clients_unharmed(&node, server);
    }
}

/// Returns all cases: a shutdown of each socket of a client, at each possible step.
fn shutdown_violations() -> Vec<String> {
    let halves = ["shutdown", "shutdown-reading", "shutdown-writing", "shutdown-daemon", "shutdown-channel"];
    let lies = halves.iter().flat_map(|half| (0..=5).map(move |step| format!("{half}={step}")));
    lies.filter(|lie| lie != "shutdown-channel=0").collect()
}

#[test]
fn a_client_that_shuts_its_sockets_down_breaks_only_its_own_handshake() {
    let node = node_with_two_tenants();
    let mut neighbour = node.start_client(ALLOCATION_B, &["--busy-forever", "--kernel-ms", "1"]);
    neighbour.read_line();
    assert_eq!(neighbour.read_line()["launched"], true);
    let before = node.daemon_status(0);
    for lie in shutdown_violations() {
        let mut client = node.start_client(ALLOCATION_A, &["--lie", &lie, "--hold", "60"]);
        let line = client.read_line();
        client.wait();
        assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)), "{lie}");
        assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)), "{lie}");
        let now = node.daemon_status(0);
        assert_eq!((now.pid, now.server_pid, now.restarts), (before.pid, before.server_pid, 0), "{lie}: {line}");
        assert!(neighbour.has_no_output(), "{lie}: the neighbour still runs");
    }
    node.wait_for_state(0, DaemonState::Active);
}

#[test]
fn a_client_that_claims_to_be_refused_is_disconnected() {
    let node = node_with_two_tenants();
    let server = node.daemon_status(0).server_pid.unwrap();
    let client = client_with_socket(&node, ALLOCATION_A);
    let channel = client.receive_channel().unwrap();
    client.server.send_credentials(CREDENTIALS_PACKET, own_credentials()).unwrap();
    for word in IntroductionSubject::Process.introduction_words() {
        client.server.send(&word).unwrap();
    }
    assert_eq!(client.server.recv(64).unwrap().unwrap().data, [0; 4]);
    client.daemon.send(&7_u32.to_le_bytes()).unwrap();
    wait_until("the server has disconnected the client", || {
        node.send_admin_command(0, &format!("get_client_list {server}"))
            .lines()
            .all(|line| line != std::process::id().to_string())
    });
    assert_other_clients_unharmed(&node, Some(server));
    drop((client, channel));
}

#[test]
fn a_client_that_shuts_its_socket_down_and_claims_to_be_connected_is_detected() {
    let node = node_with_two_tenants();
    let server = node.daemon_status(0).server_pid;
    for words in 0..3 {
        let client = client_with_socket(&node, ALLOCATION_A);
        let channel = client.receive_channel().unwrap();
        if words > 0 {
            client.server.send_credentials(CREDENTIALS_PACKET, own_credentials()).unwrap();
        }
        for word in IntroductionSubject::Process.introduction_words().iter().take(words.max(1) - 1) {
            client.server.send(word).unwrap();
        }
        client.server.shutdown();
        client.daemon.send(&0_u32.to_le_bytes()).unwrap();
        assert_other_clients_unharmed(&node, server);
        drop((client, channel));
    }
}

#[test]
fn unread_packets_do_not_keep_the_connection_of_a_client_that_has_closed() {
    let node = node_with_two_tenants();
    let server = node.daemon_status(0).server_pid;
    let before = node.count_mps_host_descriptors();
    let (channel, socket) =
        client_with_socket(&node, ALLOCATION_A).introduce_to_server(IntroductionSubject::Process).unwrap();
    let full = |socket: &Connection| {
        (0..10).all(|_| {
            thread::sleep(Duration::from_millis(2));
            socket.try_send(&[0; 4096]).is_err()
        })
    };
    wait_until("the connection is full", || full(&socket));
    drop(socket);
    wait_until("the client's connection is closed", || node.count_mps_host_descriptors() <= before);
    assert!(channel.recv(64).unwrap().is_none());
    assert_other_clients_unharmed(&node, server);
}

#[test]
fn connections_are_limited_per_allocation() {
    let node = node_with_two_tenants();
    let server = node.daemon_status(0).server_pid;
    let enter = || {
        handshake::connect_to_server(&node.paths.door(ALLOCATION_A))
            .and_then(|sockets| sockets.introduce_to_server(IntroductionSubject::Process))
    };
    let held: Vec<_> = (0..256).map(|_| enter().unwrap()).collect();
    let descriptors = node.count_mps_host_descriptors();
    assert!(matches!(enter(), Err(ConnectError::ByDaemon)));
    assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
    drop(held);
    wait_until("the clients' descriptors are closed", || node.count_mps_host_descriptors() + 512 <= descriptors);
    assert_other_clients_unharmed(&node, server);
}

#[test]
fn a_client_that_claims_to_be_connected_is_detected() {
    let node = node_with_two_tenants();
    let server = node.daemon_status(0).server_pid;
    let client = client_with_socket(&node, ALLOCATION_A);
    client.daemon.send(&0_u32.to_le_bytes()).unwrap();
    assert_other_clients_unharmed(&node, server);
    assert!(matches!(client.introduce_to_server(IntroductionSubject::Process), Err(ConnectError::ByServer)));
    let status = node.wait_for_status("the refusal is counted", |status| status.allocations[ALLOCATION_A].refused == 1);
    assert!(status.daemons.values().all(|daemon| daemon.restarts == 0));
}

#[test]
fn a_client_that_connects_late_but_in_time_is_admitted() {
    let node = node_with_two_tenants();
    let client = client_with_socket(&node, ALLOCATION_A);
    let entered = client.introduce_to_server(IntroductionSubject::Process).unwrap();
    node.wait_for_status("the client is counted", |status| status.allocations[ALLOCATION_A].admitted == 1);
    drop(entered);
}

#[test]
fn allocations_take_turns_even_if_one_allocation_has_many_clients() {
    let node = node_with_two_tenants();
    let door = node.paths.door(ALLOCATION_A);
    let before = node.daemon_status(0).server_pid;
    // Each client introduces itself to the daemon but does not use its socket to the server.
    let stalling: Vec<_> =
        (0..12).map(|_| handshake::introduce_to_daemon(&door, KIND_CLIENT).unwrap().unwrap()).collect();
    // A client makes three connections: one to check for a daemon, one for the process, and one for
    // a context.
    assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
    let dropped = node.status().unwrap().allocations[ALLOCATION_A].refused;
    assert!(dropped <= 4, "the door waited for {dropped} of 12");
    assert_eq!(node.daemon_status(0).server_pid, before);
    drop(stalling);
}

#[test]
fn a_connection_whose_process_has_exited_is_refused_once_and_logged_once() {
    let node = node_with_two_tenants();
    let server = node.daemon_status(0).server_pid;
    let mut client = node.start_client(ALLOCATION_A, &["--lie", "orphan"]);
    // The test reads the exit status, so that no process has the PID afterwards.
    client.wait();
    let status =
        node.wait_for_status("the connection is refused", |status| status.allocations[ALLOCATION_A].refused == 1);
    assert_eq!((status.allocations[ALLOCATION_A].admitted, status.allocations[ALLOCATION_A].waiting), (0, 0));
    let log = node.read_mps_host_log();
    assert_eq!(log.matches("process has exited").count(), 1, "{log}");
    assert!(!log.contains("failed to open a pidfd"), "{log}");
    assert_other_clients_unharmed(&node, server);
}
