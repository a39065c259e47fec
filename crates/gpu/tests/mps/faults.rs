//! Tests fatal GPU errors. The status reports the culprit and the affected clients. Clients that do
//! not exit are signalled, and the device always serves again.
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use cleave_gpu::mps::wire::{Client as Reported, DaemonState, DaemonStatus, Fault, Reply, Request};
use rustix::process::Signal;
use sim_machine::FaultEffect;
use sim_mps::handshake::{self, IntroductionSubject};
use sim_mps::wire::{self as words, FromContext, ToContext};

use crate::node::{Client, Node, parse_limits, send_signal};
use crate::{ALLOCATION_A, ALLOCATION_B, node_with_two_tenants};

/// Arguments of a client that runs a kernel and then makes an illegal access.
const FAULT_ARGUMENTS: [&str; 3] = ["--kernel-ms", "1", "--fault"];

fn reported_client(client: &Client, allocation: &str) -> Reported {
    Reported { pid: client.pid(), allocation: Some(allocation.to_owned()) }
}

fn sorted_clients<const N: usize>(mut clients: [Reported; N]) -> Vec<Reported> {
    clients.sort_by_key(|client| client.pid);
    clients.into()
}

fn start_running_client(node: &Node, allocation: &str, arguments: &[&str]) -> Client {
    wait_until_running(node.start_client(allocation, arguments))
}

/// Waits until a client has a context.
fn wait_until_running(mut client: Client) -> Client {
    assert_eq!(client.read_line()["viaMps"], true);
    client
}

/// Starts a client that runs kernels.
fn start_busy_client(node: &Node, allocation: &str, kernel_ms: &str) -> Client {
    let mut client = start_running_client(node, allocation, &["--busy", "forever", "--kernel-ms", kernel_ms]);
    assert_eq!(client.read_line()["launched"], true);
    client
}

/// Waits until a GPU's fault is over and the GPU serves.
fn wait_until_fault_is_over(node: &Node, gpu: usize) -> (Fault, DaemonStatus) {
    let uuid = node.uuid(gpu);
    let is = |daemon: &DaemonStatus| daemon.fault.as_ref().is_some_and(|fault| fault.over);
    let mut status = node.wait_for_status("the fault has ended", |status| {
        is(&status.daemons[&uuid]) && status.daemons[&uuid].state == DaemonState::Active
    });
    let daemon = status.daemons.remove(&uuid).unwrap();
    (daemon.fault.clone().unwrap(), daemon)
}

fn terminating_signal(status: ExitStatus) -> Option<i32> {
    status.signal()
}

#[test]
fn a_fault_is_reported_and_clients_that_do_not_exit_are_signalled() {
    let node = node_with_two_tenants();
    let before = node.daemon_status(0);
    assert_eq!(before.fault, None);
    let mut exits = start_running_client(&node, ALLOCATION_B, &["--hold", "forever"]);
    let mut lingers = start_running_client(&node, ALLOCATION_B, &["--hold", "forever", "--linger", "forever"]);
    let mut deaf = wait_until_running(
        node.start_client_ignoring_sigterm(ALLOCATION_A, &["--hold", "forever", "--linger", "forever"]),
    );
    let mut culprit = start_running_client(&node, ALLOCATION_A, &FAULT_ARGUMENTS);
    let expected = sorted_clients([
        reported_client(&culprit, ALLOCATION_A),
        reported_client(&deaf, ALLOCATION_A),
        reported_client(&exits, ALLOCATION_B),
        reported_client(&lingers, ALLOCATION_B),
    ]);
    let uuid = node.uuid(0);
    let during = node.wait_for_status("the fault is reported while it lasts", |status| {
        let fault = status.daemons[&uuid].fault.as_ref();
        fault.is_some_and(|fault| !fault.over && fault.culprit.is_some())
    });
    assert!(during.daemons[&uuid].message.contains(&format!("client {}", culprit.pid())));
    // One other client exits by itself, one after SIGTERM, and one after SIGKILL.
    assert_eq!(culprit.wait().code(), Some(700 - 2 * 256));
    assert_eq!(exits.wait().code(), Some(700 - 2 * 256));
    assert_eq!(terminating_signal(lingers.wait()), Some(15));
    assert_eq!(terminating_signal(deaf.wait()), Some(9));
    let (fault, after) = wait_until_fault_is_over(&node, 0);
    let mut affected = fault.affected.clone();
    affected.sort_by_key(|client| client.pid);
    assert_eq!(affected, expected);
    assert_eq!((fault.number, fault.culprit, fault.killed), (1, Some(reported_client(&culprit, ALLOCATION_A)), false));
    let mut ended = fault.ended;
    ended.sort_by_key(|client| client.pid);
    assert_eq!(ended, sorted_clients([reported_client(&deaf, ALLOCATION_A), reported_client(&lingers, ALLOCATION_B)]));
    assert_eq!((after.pid, after.server_pid, after.restarts), (before.pid, before.server_pid, 0));
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
    // The next fault has its own number.
    start_running_client(&node, ALLOCATION_B, &FAULT_ARGUMENTS).wait();
    node.wait_for_status("the next fault is reported", |status| {
        status.daemons[&uuid].fault.as_ref().is_some_and(|fault| fault.number == 2 && fault.over)
    });
}

#[test]
fn a_server_that_does_not_recover_is_replaced() {
    let mut node = Node::with_mps_host(2);
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.desire_allocation(ALLOCATION_B, 1, Some(50), Some(20480));
    node.apply_desired();
    let (before, other) = (node.daemon_status(0), node.daemon_status(1));
    node.inject_fault("mps:heal", Some(0), FaultEffect::Code(1), None);
    start_running_client(&node, ALLOCATION_A, &FAULT_ARGUMENTS).wait();
    let mut waits = node.start_client(ALLOCATION_A, &[]);
    node.wait_for_status("a client waits", |status| status.allocations[ALLOCATION_A].waiting == 1);
    let uuid = node.uuid(0);
    let mut meanwhile = 0;
    node.wait_for_status("the fault has ended", |status| {
        meanwhile += usize::from(node.run_and_read_limits(ALLOCATION_B) == (66, Some(20480)));
        status.daemons[&uuid].fault.as_ref().is_some_and(|fault| fault.over)
    });
    assert!(meanwhile > 0);
    assert_eq!(parse_limits(&waits.read_line()), (26, Some(8192)));
    let (fault, after) = wait_until_fault_is_over(&node, 0);
    assert_eq!((after.pid, after.restarts, fault.ended), (before.pid, 0, vec![]));
    assert_ne!(after.server_pid, before.server_pid);
    let still = node.daemon_status(1);
    assert_eq!(
        (still.pid, still.server_pid, still.restarts, still.fault),
        (other.pid, other.server_pid, 0, None),
        "{}",
        node.read_mps_host_log()
    );
}

#[test]
fn a_daemon_that_ignores_commands_is_replaced_and_gets_its_limits() {
    let node = node_with_two_tenants();
    let before = node.daemon_status(0);
    for call in ["mps:heal", "mps:command:shutdown_server", "mps:command:quit"] {
        node.inject_fault(call, Some(0), FaultEffect::Code(1), None);
    }
    start_running_client(&node, ALLOCATION_A, &FAULT_ARGUMENTS).wait();
    let (fault, after) = wait_until_fault_is_over(&node, 0);
    assert_eq!((fault.number, after.restarts), (1, 1));
    assert_ne!(after.pid, before.pid);
    assert!(after.message.contains("FAULT") && after.message.contains("signal 9"), "{}", after.message);
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}

#[test]
fn a_server_that_hangs_in_fault_is_replaced_while_the_other_gpu_serves() {
    let mut node = Node::with_mps_host(2);
    node.desire_allocation(ALLOCATION_A, 0, Some(20), Some(8192));
    node.desire_allocation(ALLOCATION_B, 1, Some(50), Some(20480));
    node.apply_desired();
    let before = node.daemon_status(0);
    let _lingers = start_running_client(&node, ALLOCATION_A, &["--hold", "forever", "--linger", "forever"]);
    start_running_client(&node, ALLOCATION_A, &FAULT_ARGUMENTS).wait();
    send_signal(node.wait_for_state(0, DaemonState::Fault).server_pid.unwrap(), Signal::STOP);
    let uuid = node.uuid(0);
    let mut meanwhile = 0;
    node.wait_for_status("a new daemon serves", |status| {
        meanwhile += usize::from(node.run_and_read_limits(ALLOCATION_B) == (66, Some(20480)));
        let daemon = &status.daemons[&uuid];
        daemon.state == DaemonState::Active && daemon.pid != before.pid
    });
    assert!(meanwhile > 0);
    assert_eq!(wait_until_fault_is_over(&node, 0).0.number, 1);
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    assert_eq!(node.daemon_status(1).restarts, 0);
}

/// Returns the number of times that a server was replaced after an unclean exit.
fn count_replacements(node: &Node) -> usize {
    node.read_mps_host_log().matches("replacing the MPS server").count()
}

#[test]
fn after_an_unclean_exit_the_server_is_replaced_once_it_has_no_clients() {
    let node = node_with_two_tenants();
    let uuid = node.uuid(0);
    let before = node.daemon_status(0).server_pid;
    let has_clients = |count: usize| {
        node.wait_for_status("the number of clients is as expected", |status| {
            status.daemons[&uuid].clients.len() == count
        });
    };
    // One client exits cleanly by itself, one after a signal that it handles, and one through MPS.
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    let mut handles = start_running_client(&node, ALLOCATION_A, &["--hold", "forever", "--handle-sigterm"]);
    handles.signal(Signal::TERM);
    assert_eq!(handles.wait().code(), Some(0));
    let mut ended = start_busy_client(&node, ALLOCATION_A, "1000");
    assert_eq!(node.send_request(&Request::Terminate { device: uuid.clone(), pid: ended.pid() }), Reply::Done);
    ended.signal(Signal::KILL);
    ended.wait();
    has_clients(0);
    assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
    assert_eq!(
        (node.daemon_status(0).server_pid, count_replacements(&node)),
        (before, 0),
        "{}",
        node.read_mps_host_log()
    );
    // One client is killed while another runs.
    let mut stays = start_running_client(&node, ALLOCATION_B, &["--hold", "forever", "--handle-sigterm"]);
    let mut killed = start_running_client(&node, ALLOCATION_A, &["--hold", "forever"]);
    killed.signal(Signal::KILL);
    killed.wait();
    has_clients(1);
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
    has_clients(1);
    assert!(stays.has_no_output());
    assert_eq!((node.daemon_status(0).server_pid, count_replacements(&node)), (before, 0));
    stays.signal(Signal::TERM);
    assert_eq!(stays.wait().code(), Some(0));
    let after = node.wait_for_status("a new server serves", |status| {
        let server = status.daemons[&uuid].server_pid;
        server.is_some() && server != before
    });
    assert_eq!((after.daemons[&uuid].restarts, &after.daemons[&uuid].fault), (0, &None));
    assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
    assert_eq!(count_replacements(&node), 1);
    assert!(
        !node.read_mps_host_log().contains("to=Restarting"),
        "the device stayed Active: {}",
        node.read_mps_host_log()
    );
}

#[test]
fn an_unclean_server_that_did_not_shut_down_is_replaced_by_the_next_probe() {
    let node = node_with_two_tenants();
    let uuid = node.uuid(0);
    let before = node.daemon_status(0);
    node.inject_fault("mps:close:shutdown_server", None, FaultEffect::Code(1), Some(1));
    let mut killed = start_running_client(&node, ALLOCATION_A, &["--hold", "forever"]);
    killed.signal(Signal::KILL);
    killed.wait();
    node.wait_for_status("a new server serves", |status| {
        let server = status.daemons[&uuid].server_pid;
        server.is_some() && server != before.server_pid
    });
    assert!(node.machine.snapshot().unwrap().faults.is_empty(), "the first command was not executed");
    let after = node.daemon_status(0);
    assert_eq!((after.pid, after.restarts), (before.pid, 0), "only the server was replaced");
    assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
    assert_eq!(count_replacements(&node), 2, "one failed");
}

#[test]
fn a_server_in_which_a_busy_client_was_killed_breaks_no_later_client() {
    let node = node_with_two_tenants();
    for round in 1..=3 {
        let mut killed = start_busy_client(&node, ALLOCATION_A, "1000");
        killed.signal(Signal::KILL);
        killed.wait();
        // The next client connects at once and waits for the new server.
        let mut later =
            start_running_client(&node, ALLOCATION_B, &["--busy", "forever", "--kernel-ms", "1", "--handle-sigterm"]);
        assert_eq!(later.read_line()["launched"], true);
        assert_eq!(count_replacements(&node), round);
        assert!(later.has_no_output());
        later.signal(Signal::TERM);
        assert_eq!(later.wait().code(), Some(0));
    }
    assert_eq!(node.daemon_status(0).fault, None);
}

#[test]
fn a_client_killed_while_its_kernels_ran_is_reported_as_the_cause() {
    let node = node_with_two_tenants();
    let mut neighbour = start_running_client(&node, ALLOCATION_B, &["--hold", "forever"]);
    let mut killed = start_busy_client(&node, ALLOCATION_A, "1000");
    let cause = reported_client(&killed, ALLOCATION_A);
    killed.signal(Signal::KILL);
    killed.wait();
    assert_eq!(neighbour.wait().code(), Some(700 - 2 * 256));
    let (fault, _) = wait_until_fault_is_over(&node, 0);
    assert_eq!((fault.culprit.as_ref(), fault.killed), (Some(&cause), true));
    assert!(fault.affected.contains(&cause) && fault.affected.contains(&reported_client(&neighbour, ALLOCATION_B)));
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}

#[test]
fn killing_a_server_in_fault_ends_the_fault() {
    let node = node_with_two_tenants();
    let mut lingers = wait_until_running(
        node.start_client_ignoring_sigterm(ALLOCATION_B, &["--hold", "forever", "--linger", "forever"]),
    );
    start_running_client(&node, ALLOCATION_A, &FAULT_ARGUMENTS).wait();
    let fault = node.wait_for_state(0, DaemonState::Fault);
    send_signal(fault.server_pid.unwrap(), Signal::KILL);
    let (_, after) = wait_until_fault_is_over(&node, 0);
    assert_eq!((after.pid, after.restarts), (fault.pid, 0));
    assert_eq!(node.run_and_read_limits(ALLOCATION_B), (66, Some(20480)));
    assert!(lingers.read_line()["error"].is_number());
    assert!(lingers.has_no_output(), "the fault no longer blocks the GPU");
}

#[test]
fn a_process_whose_identity_is_not_proven_to_the_server_is_not_signalled() {
    let node = node_with_two_tenants();
    let mut command = Command::new("sleep");
    command.arg("600");
    let mut bystander = Client::spawn(command);
    let pid = bystander.pid();
    let who = sim_mps::seqpacket::Credentials { pid: i32::try_from(pid).unwrap(), ..handshake::own_credentials() };
    let door = node.paths.door(ALLOCATION_A);
    // The door sees this test as the client, but the server sees the bystander.
    let _process =
        handshake::connect_to_server(&door).unwrap().introduce_to_server_as(IntroductionSubject::Process, who).unwrap();
    let (channel, _socket) =
        handshake::connect_to_server(&door).unwrap().introduce_to_server_as(IntroductionSubject::Context, who).unwrap();
    let create = ToContext::Create { device: node.uuid(0), threads: None, command: "x".into(), namespace: 0 };
    words::send(&channel, &create).unwrap();
    assert!(matches!(words::recv(&channel).unwrap(), Some(FromContext::Created { .. })));
    words::send(&channel, &ToContext::IllegalAccess).unwrap();
    let (fault, after) = wait_until_fault_is_over(&node, 0);
    assert_eq!((fault.ended, after.restarts), (vec![], 0));
    assert!(bystander.has_no_output());
    assert_eq!(fault.culprit, Some(Reported { pid, allocation: None }));
    assert_eq!(node.run_and_read_limits(ALLOCATION_A), (26, Some(8192)));
}
