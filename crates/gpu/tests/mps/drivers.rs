//! Tests drivers with an unknown handshake, and single unexpected packets of known drivers.
use cleave_gpu::mps::wire::{DaemonSettings, DaemonState, DaemonStatus, Enforcement};
use rustix::process::Signal;
use sim_machine::FaultEffect;
use sim_mps::handshake as mps;
use sim_mps::seqpacket::Connection;

use crate::node::{Node, default_daemon, parse_limits, send_signal, wait_until};
use crate::{ALLOCATION_A, ALLOCATION_B, node_with_two_tenants};

const UNKNOWN_HANDSHAKE_FAULT: &str = "mps:handshake";
const UNKNOWN_REPLY_FAULT: &str = "mps:reply";

/// Returns a node with a running MPS host and a daemon that has this fault.
fn start_node_with_fault(fault: &str, driver: &str, accept_advisory: bool) -> Node {
    let mut node = Node::without_mps_host(1);
    node.set_driver_version(driver);
    node.desire_daemon(0, DaemonSettings { default_threads: Some(40), accept_advisory, ..default_daemon() });
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.inject_fault(fault, None, FaultEffect::Code(1), None);
    node.write_desired();
    node.start_mps_host();
    node
}

/// Waits until the MPS host refuses to serve because of the handshake. Ignores the status of an
/// earlier daemon, which has another message.
fn wait_until_refused(node: &Node) -> DaemonStatus {
    let uuid = node.uuid(0);
    let refused = node.wait_for_status("the handshake is refused", |status| {
        let daemon = status.daemons.get(&uuid);
        daemon.is_some_and(|daemon| {
            daemon.enforcement == Enforcement::Advisory
                && matches!(daemon.state, DaemonState::Restarting | DaemonState::BackOff)
                && daemon.message.contains("handshake is unknown")
        })
    });
    refused.daemons[&uuid].clone()
}

/// Connects to a door and checks that the daemon's own packets arrive unchanged.
fn check_relay(node: &Node) {
    let through = Connection::connect(&node.paths.door(ALLOCATION_A)).unwrap();
    assert_eq!(through.recv(64).unwrap().unwrap().data, mps::HELLO_PACKET_OF_OTHER_DRIVER);
    // The door also relays credentials and descriptors.
    through.send_credentials(mps::CREDENTIALS_PACKET, mps::own_credentials()).unwrap();
    through.send(&mps::KIND_CLIENT.to_le_bytes()).unwrap();
    let packet = through.recv_fd(64).unwrap().unwrap();
    assert_eq!(packet.data, mps::DESCRIPTOR_PACKET);
    let sockets = mps::ClientSockets { daemon: through, server: Connection::from_fd(packet.fd.unwrap()) };
    let _client = sockets.introduce_to_server(mps::IntroductionSubject::Process).unwrap();
    node.wait_for_status("the client is counted", |status| status.allocations[ALLOCATION_A].admitted == 1);
}

#[test]
fn an_unknown_handshake_is_relayed_only_with_consent() {
    let mut node = start_node_with_fault(UNKNOWN_HANDSHAKE_FAULT, "999.1", false);
    let refused = wait_until_refused(&node);
    assert!(refused.message.contains("handshake is unknown"), "{}", refused.message);
    node.desire_daemon(0, DaemonSettings { default_threads: Some(40), accept_advisory: true, ..default_daemon() });
    node.write_desired();
    let active = node.wait_for_state(0, DaemonState::Active);
    assert_eq!(active.enforcement, Enforcement::Advisory);
    // The MPS host sets the defaults with the driver's own tool. Doors set no limits.
    assert_eq!(node.send_admin_command(0, "get_default_active_thread_percentage"), "40.0");
    check_relay(&node);
}

#[test]
fn consent_to_advisory_limits_does_not_restart_a_daemon_whose_doors_enforce_limits() {
    let mut node = node_with_two_tenants();
    let mut client = node.start_client(ALLOCATION_A, &["--hold", "forever"]);
    client.read_line();
    let before = node.daemon_status(0);
    for accept_advisory in [true, false] {
        let settings = DaemonSettings { accept_advisory, ..node.desired.daemons[&node.uuid(0)].clone() };
        node.desire_daemon(0, settings);
        // Change other limits too: once the MPS host acknowledges these limits, it has also read
        // the consent.
        let threads = if accept_advisory { 30 } else { 40 };
        node.desire_allocation(ALLOCATION_B, 0, Some(threads), None);
        node.apply_desired();
        let now = node.daemon_status(0);
        assert_eq!((now.state, now.pid, now.enforcement), (DaemonState::Active, before.pid, Enforcement::Hard));
    }
    client.signal(Signal::KILL);
    client.wait();
    node.run_and_read_limits(ALLOCATION_A);
    assert_eq!(node.daemon_status(0).pid, before.pid, "the daemon was not replaced after the last client");
}

#[test]
fn a_client_that_waited_while_the_handshake_was_unknown_is_limited_once_it_is_known() {
    let node = start_node_with_fault(UNKNOWN_HANDSHAKE_FAULT, "999.1", false);
    wait_until_refused(&node);
    let mut waits = node.start_client(ALLOCATION_A, &[]);
    node.wait_for_status("the client waits", |status| status.allocations[ALLOCATION_A].waiting == 1);
    assert!(waits.has_no_output(), "no client is admitted without limits");
    node.clear_faults();
    assert_eq!(parse_limits(&waits.read_line()), (26, Some(8192)));
    assert_eq!(node.daemon_status(0).enforcement, Enforcement::Hard);
}

#[test]
fn unknown_replies_of_a_driver_that_was_not_measured_close_the_daemons_doors() {
    let node = start_node_with_fault(UNKNOWN_REPLY_FAULT, "570.124.06", false);
    node.wait_for_state(0, DaemonState::Active);
    let mut waits = node.start_client(ALLOCATION_A, &[]);
    let refused = wait_until_refused(&node);
    assert!(refused.message.contains("handshake is unknown"), "{}", refused.message);
    node.wait_for_status("the client waits", |status| status.allocations[ALLOCATION_A].waiting == 1);
    assert!(waits.has_no_output(), "no client is admitted without limits");
    let uuid = node.uuid(0);
    node.wait_for_status("the daemon is not served again", |status| {
        status.daemons[&uuid].state == DaemonState::BackOff
    });
    node.clear_faults();
    // The handshake of a restarted daemon counts as unproven.
    assert_eq!(parse_limits(&waits.read_line()), (26, Some(8192)));
    let served = node.wait_for_state(0, DaemonState::Active);
    assert_eq!((served.enforcement, served.holds_clients), (Enforcement::Hard, false));
}

#[test]
fn accepted_unknown_replies_make_limits_advisory_until_the_daemon_restarts() {
    let node = start_node_with_fault(UNKNOWN_REPLY_FAULT, "570.124.06", true);
    let before = node.wait_for_state(0, DaemonState::Active);
    let uuid = node.uuid(0);
    let _waits = node.start_client(ALLOCATION_A, &[]);
    let advisory = node
        .wait_for_status("limits are advisory", |status| status.daemons[&uuid].enforcement == Enforcement::Advisory);
    let advisory = &advisory.daemons[&uuid];
    assert_eq!((advisory.state, advisory.pid, advisory.holds_clients), (DaemonState::Active, before.pid, false));
    node.clear_faults();
    send_signal(before.pid.unwrap(), Signal::KILL);
    let limited = node.wait_for_status("a new daemon enforces limits", |status| {
        let daemon = &status.daemons[&uuid];
        daemon.state == DaemonState::Active && daemon.pid != before.pid && daemon.enforcement == Enforcement::Hard
    });
    assert!(!limited.daemons[&uuid].holds_clients, "no client waited while limits were advisory");
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}

#[test]
fn the_drivers_version_is_read_again_for_each_daemon() {
    let node = start_node_with_fault(UNKNOWN_REPLY_FAULT, "580.159.04", false);
    let before = node.wait_for_state(0, DaemonState::Active);
    node.set_driver_version("570.124.06");
    send_signal(before.pid.unwrap(), Signal::KILL);
    let _waits = node.start_client(ALLOCATION_A, &[]);
    let refused = wait_until_refused(&node);
    assert!(refused.message.contains("handshake is unknown"), "{}", refused.message);
}

#[test]
fn held_clients_of_a_measured_driver_are_reported_and_running_clients_continue() {
    let node = node_with_two_tenants();
    let mut running = node.start_client(ALLOCATION_B, &["--hold", "forever"]);
    assert_eq!(parse_limits(&running.read_line()), (66, Some(20480)));
    let before = node.daemon_status(0);
    assert!(!before.holds_clients);
    node.inject_fault(UNKNOWN_REPLY_FAULT, None, FaultEffect::Code(1), None);
    let mut waits = node.start_client(ALLOCATION_A, &[]);
    let uuid = node.uuid(0);
    let held = node.wait_for_status("held clients are reported", |status| status.daemons[&uuid].holds_clients);
    let held = &held.daemons[&uuid];
    assert_eq!((held.state, held.pid, held.restarts), (DaemonState::Active, before.pid, 0));
    assert_eq!(held.enforcement, Enforcement::Hard, "no client runs without limits");
    assert!(waits.has_no_output() && running.has_no_output());
    node.clear_faults();
    assert_eq!(parse_limits(&waits.read_line()), (26, Some(8192)));
    let after = node.wait_for_status("clients are no longer held", |status| !status.daemons[&uuid].holds_clients);
    assert_eq!((after.daemons[&uuid].pid, after.daemons[&uuid].restarts), (before.pid, 0));
}

#[test]
fn a_daemon_that_is_desired_again_after_its_removal_holds_no_clients() {
    let mut node = node_with_two_tenants();
    node.inject_fault(UNKNOWN_REPLY_FAULT, None, FaultEffect::Code(1), None);
    let mut waits = node.start_client(ALLOCATION_A, &[]);
    let uuid = node.uuid(0);
    node.wait_for_status("held clients are reported", |status| status.daemons[&uuid].holds_clients);
    waits.signal(Signal::KILL);
    waits.wait();
    let settings = node.desired.daemons.remove(&uuid).unwrap();
    node.write_desired();
    node.wait_for_status("the daemon has exited", |status| !status.daemons.contains_key(&uuid));
    node.clear_faults();
    node.desire_daemon(0, settings);
    node.write_desired();
    let served = node.wait_for_state(0, DaemonState::Active);
    assert!(!served.holds_clients, "no client waits");
}

#[test]
fn unexpected_replies_of_a_measured_driver_end_only_their_connections() {
    let node = node_with_two_tenants();
    let before = node.daemon_status(0);
    node.inject_fault(UNKNOWN_REPLY_FAULT, None, FaultEffect::Code(1), Some(5));
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)), "the client waits, and is admitted");
    assert!(node.machine.snapshot().unwrap().faults.is_empty(), "all five replies were sent");
    let after = node.daemon_status(0);
    assert_eq!((after.pid, after.server_pid, after.restarts), (before.pid, before.server_pid, 0));
    assert_eq!(after.enforcement, Enforcement::Hard);
}

#[test]
fn a_daemon_is_replaced_only_after_several_unexpected_replies_to_probes_in_a_row() {
    let node = node_with_two_tenants();
    let mut holds = node.start_client(ALLOCATION_A, &["--hold", "forever"]);
    assert_eq!(parse_limits(&holds.read_line()), (26, Some(8192)));
    let before = node.daemon_status(0);
    let recoveries = || node.read_mps_host_log().matches("answers probes again").count();
    for (call, count, recovery) in [("mps:command:get_server_status", 2, 1), (UNKNOWN_HANDSHAKE_FAULT, 2, 2)] {
        node.inject_fault(call, None, FaultEffect::Code(7), Some(count));
        wait_until("two probes failed and one succeeded", || recoveries() == recovery);
        assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
        let after = node.daemon_status(0);
        assert_eq!((after.pid, after.server_pid, after.restarts), (before.pid, before.server_pid, 0), "{call}");
        assert_eq!(after.enforcement, Enforcement::Hard);
    }
    node.inject_fault("mps:command:get_server_status", None, FaultEffect::Code(7), None);
    let uuid = node.uuid(0);
    node.wait_for_status("the daemon is replaced", |status| status.daemons[&uuid].restarts > 0);
    node.clear_faults();
    node.wait_for_state(0, DaemonState::Active);
}

#[test]
fn failed_probes_of_an_earlier_daemon_do_not_count() {
    let node = node_with_two_tenants();
    let uuid = node.uuid(0);
    let before = node.daemon_status(0);
    let failures = || node.read_mps_host_log().matches("ended unexpectedly").count();
    node.inject_fault("mps:command:get_server_status", None, FaultEffect::Code(7), Some(2));
    wait_until("two probes failed", || failures() == 2);
    send_signal(before.pid.unwrap(), Signal::KILL);
    let restarted = node.wait_for_status("a new daemon serves", |status| {
        let daemon = &status.daemons[&uuid];
        daemon.state == DaemonState::Active && daemon.pid != before.pid
    });
    node.inject_fault("mps:command:get_server_status", None, FaultEffect::Code(7), Some(2));
    wait_until("two more probes failed", || failures() == 4);
    wait_until("a probe succeeded", || node.read_mps_host_log().contains("answers probes again"));
    assert_eq!(node.daemon_status(0).pid, restarted.daemons[&uuid].pid, "{}", node.read_mps_host_log());
}
