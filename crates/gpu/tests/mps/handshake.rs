//! Daemon and server wait for each client without a deadline, and for good where one leaves between the socket that it was handed and its
//! words to the server: what a client does there must not reach the next.
use cleave_gpu::mps::wire::DaemonState;
use sim_mps::handshake::{self, CREDENTIALS, Closed, Entrance, KIND_CLIENT, Subject, own_credentials};

use crate::node::Node;
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
