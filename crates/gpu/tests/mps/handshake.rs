//! Daemon and server wait for each client without a deadline, and for good where one leaves between the socket that it was handed and its
//! words to the server: what a client does there must not reach the next.
use std::thread;
use std::time::{Duration, Instant};

use cleave_gpu::mps::wire::DaemonState;
use sim_mps::handshake::{self, CREDENTIALS, Closed, Entrance, KIND_CLIENT, Subject, own_credentials};
use sim_mps::seqpacket::Connection;

use crate::node::{Node, until};
use crate::{A, B, two_tenants};

/// A client with the socket to the server in hand.
fn handed(node: &Node, allocation: &str) -> Entrance {
    handshake::knock(&node.paths.door(allocation)).unwrap()
}

/// Whether the other clients run as ever, on the server that was there before.
fn unharmed(node: &Node, before: Option<u32>) {
    assert_eq!(node.saw(B), (66, Some(20480)));
    assert_eq!(node.saw(A), (26, Some(8192)));
    let daemon = node.daemon(0);
    assert_eq!((daemon.server_pid, daemon.restarts), (before, 0), "{}", node.log());
    node.until_state(0, DaemonState::Active);
}

#[test]
fn a_client_that_dies_with_the_socket_in_hand_takes_nobody_with_it() {
    let node = two_tenants();
    let server = node.daemon(0).server_pid;
    for _ in 0..3 {
        drop(handed(&node, A));
        unharmed(&node, server);
    }
}

#[test]
fn a_client_that_stalls_with_the_socket_in_hand_is_dropped() {
    let node = two_tenants();
    let server = node.daemon(0).server_pid;
    let stalled = handed(&node, A);
    unharmed(&node, server);
    // It would run under what was set for others since.
    assert!(matches!(stalled.enter(Subject::Process), Err(Closed::ByServer)));
    unharmed(&node, server);
}

#[test]
fn a_client_that_says_only_some_of_its_words_is_dropped() {
    let node = two_tenants();
    let server = node.daemon(0).server_pid;
    for words in 1..3 {
        let client = handed(&node, A);
        let channel = client.channel().unwrap();
        client.server.send_credentials(CREDENTIALS, own_credentials()).unwrap();
        for word in Subject::Process.words().iter().take(words - 1) {
            client.server.send(word).unwrap();
        }
        drop((client, channel));
        unharmed(&node, server);
    }
}

/// Each of a client's sockets shut down, at each step that it can be done at.
fn shutdowns() -> Vec<String> {
    let halves = ["shutdown", "shutdown-reading", "shutdown-writing", "shutdown-daemon", "shutdown-channel"];
    let lies = halves.iter().flat_map(|half| (0..=5).map(move |step| format!("{half}={step}")));
    lies.filter(|lie| lie != "shutdown-channel=0").collect()
}

#[test]
fn a_client_that_shuts_its_sockets_down_at_any_step_ends_nothing_but_its_own_handshake() {
    let node = two_tenants();
    let mut neighbour = node.client(B, &["--busy-forever", "--kernel-ms", "1"]);
    neighbour.line();
    assert_eq!(neighbour.line()["launched"], true);
    let before = node.daemon(0);
    for lie in shutdowns() {
        let mut liar = node.client(A, &["--lie", &lie, "--hold", "60"]);
        let told = liar.line();
        liar.wait();
        let start = Instant::now();
        assert_eq!(node.saw(B), (66, Some(20480)), "{lie}");
        assert_eq!(node.saw(A), (26, Some(8192)), "{lie}");
        assert!(start.elapsed() < Duration::from_secs(5), "{lie}: {:?}", start.elapsed());
        let now = node.daemon(0);
        assert_eq!((now.pid, now.server_pid, now.restarts), (before.pid, before.server_pid, 0), "{lie}: {told}");
        assert!(neighbour.is_silent(), "{lie}: the neighbour runs on");
    }
    node.until_state(0, DaemonState::Active);
}

#[test]
fn a_client_that_says_it_was_refused_is_none() {
    let node = two_tenants();
    let server = node.daemon(0).server_pid.unwrap();
    let liar = handed(&node, A);
    let channel = liar.channel().unwrap();
    liar.server.send_credentials(CREDENTIALS, own_credentials()).unwrap();
    for word in Subject::Process.words() {
        liar.server.send(&word).unwrap();
    }
    assert_eq!(liar.server.recv(64).unwrap().unwrap().data, [0; 4]);
    liar.daemon.send(&7_u32.to_le_bytes()).unwrap();
    until("the server has dropped it", || {
        node.admin(0, &format!("get_client_list {server}")).lines().all(|line| line != std::process::id().to_string())
    });
    unharmed(&node, Some(server));
    drop((liar, channel));
}

#[test]
fn a_client_that_shuts_its_socket_down_and_claims_to_have_connected_is_found_out() {
    let node = two_tenants();
    let server = node.daemon(0).server_pid;
    for words in 0..3 {
        let liar = handed(&node, A);
        let channel = liar.channel().unwrap();
        if words > 0 {
            liar.server.send_credentials(CREDENTIALS, own_credentials()).unwrap();
        }
        for word in Subject::Process.words().iter().take(words.max(1) - 1) {
            liar.server.send(word).unwrap();
        }
        liar.server.shutdown();
        liar.daemon.send(&0_u32.to_le_bytes()).unwrap();
        unharmed(&node, server);
        drop((liar, channel));
    }
}

#[test]
fn what_a_server_does_not_read_keeps_no_place_for_a_client_that_has_closed() {
    let node = two_tenants();
    let server = node.daemon(0).server_pid;
    let before = node.descriptors();
    let (channel, socket) = handed(&node, A).enter(Subject::Process).unwrap();
    let full = |socket: &Connection| {
        (0..10).all(|_| {
            thread::sleep(Duration::from_millis(2));
            socket.try_send(&[0; 4096]).is_err()
        })
    };
    until("nothing more goes in", || full(&socket));
    drop(socket);
    until("its place is free", || node.descriptors() <= before);
    assert!(channel.recv(64).unwrap().is_none());
    unharmed(&node, server);
}

#[test]
fn an_allocation_has_so_many_connections_and_others_have_theirs() {
    let node = two_tenants();
    let server = node.daemon(0).server_pid;
    let enter = || handshake::knock(&node.paths.door(A)).and_then(|entrance| entrance.enter(Subject::Process));
    let held: Vec<_> = (0..256).map(|_| enter().unwrap()).collect();
    let descriptors = node.descriptors();
    assert!(matches!(enter(), Err(Closed::ByDaemon)));
    assert_eq!(node.saw(B), (66, Some(20480)));
    drop(held);
    until("their descriptors are closed", || node.descriptors() + 512 <= descriptors);
    unharmed(&node, server);
}

#[test]
fn a_client_that_claims_to_have_connected_is_found_out() {
    let node = two_tenants();
    let server = node.daemon(0).server_pid;
    let liar = handed(&node, A);
    liar.daemon.send(&0_u32.to_le_bytes()).unwrap();
    unharmed(&node, server);
    assert!(matches!(liar.enter(Subject::Process), Err(Closed::ByServer)));
    let status = node.until("it is counted", |status| status.allocations[A].refused == 1);
    assert!(status.daemons.values().all(|daemon| daemon.restarts == 0));
}

#[test]
fn a_client_that_connects_late_but_in_time_is_let_in() {
    let node = two_tenants();
    let client = handed(&node, A);
    let entered = client.enter(Subject::Process).unwrap();
    node.until("it is counted", |status| status.allocations[A].admitted == 1);
    drop(entered);
}

#[test]
fn however_many_an_allocation_sends_the_others_turn_is_next() {
    let node = two_tenants();
    let door = node.paths.door(A);
    let before = node.daemon(0).server_pid;
    // Each will be handed its socket, and do nothing with it.
    let stalling: Vec<_> = (0..12).map(|_| handshake::introduce(&door, KIND_CLIENT).unwrap().unwrap()).collect();
    // Three handshakes: for the process, and for a context; and the look whether somebody is there.
    assert_eq!(node.saw(B), (66, Some(20480)));
    let dropped = node.status().unwrap().allocations[A].refused;
    assert!(dropped <= 4, "{dropped} of 12 were waited for");
    assert_eq!(node.daemon(0).server_pid, before);
    drop(stalling);
}
