//! Tests how exits, errors and faults affect a program and its neighbours.

mod node;

use std::process::Stdio;

use node::{Client, Node, wait_for_answer, wait_until};
use rustix::process::Signal;
use sim_machine::{ComputeMode, FaultEffect};
use sim_mps::seqpacket::{Connection, Listener};

#[test]
fn without_a_daemon_a_program_is_plain_cuda() {
    let mut node = Node::without_daemon();
    let plain = |node: &Node| {
        let line = node.run_and_read_line(&[("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")]);
        assert_eq!((line["viaMps"].as_bool(), line["sms"].as_i64()), (Some(false), Some(132)), "{line}");
        assert!(line["freeMiB"].as_i64() > Some(142_000));
    };
    plain(&node);
    node.start_daemon(&[]);
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
    node.kill_daemon();
    plain(&node);
    let listener = Listener::bind(&node.socket_path("control"), 0o666).unwrap();
    std::thread::spawn(move || while listener.accept().is_ok() {});
    plain(&node);
}

#[test]
fn exclusive_process_rejects_programs_without_mps() {
    let mut node = Node::without_daemon();
    node.set_compute_mode(ComputeMode::ExclusiveProcess);
    let nowhere = [("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")];
    assert_eq!(node.run_and_read_line(&nowhere)["viaMps"], false);
    node.start_daemon(&[]);
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
    assert_eq!(node.run_and_read_line(&nowhere)["error"], 46);
}

#[test]
fn a_server_does_not_start_on_a_gpu_in_use() {
    let mut node = Node::without_daemon();
    node.set_compute_mode(ComputeMode::ExclusiveProcess);
    let mut plain = node.start_client(&["--hold", "forever"]);
    plain.read_line();
    node.start_daemon(&[]);
    node.send_command("start_server -uid 0");
    wait_until("the server has failed", || node.read_log().contains("exited with status 1"));
    assert_eq!(node.send_command("get_server_list"), "");
    plain.kill(Signal::KILL);
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
}

#[test]
fn without_a_gpu_a_daemon_runs_but_no_server() {
    let mut node = Node::without_daemon();
    node.set_daemon_env("CUDA_VISIBLE_DEVICES", "GPU-00000000-dead");
    node.start_daemon(&[]);
    // After several failed server starts, the daemon refuses the client. The client then runs
    // without MPS.
    assert_eq!(node.run_and_read_line(&[])["viaMps"], false);
    assert!(node.read_log().contains("no CUDA-capable device is detected"));
    assert!(node.read_log().matches("Starting new server").count() > 5);
}

#[test]
fn a_program_without_a_gpu_finds_no_device() {
    let node = Node::with_daemon(&[]);
    let mut blind = node.client_command(&[]);
    blind.env("NVIDIA_VISIBLE_DEVICES", "none");
    let mut client = Client::spawn(blind);
    assert_eq!(client.wait_for_error(), 100);
    assert_eq!(client.wait().code(), Some(100));
}

#[test]
fn a_killed_daemon_ends_its_server_and_clients_and_can_be_replaced() {
    let mut node = Node::with_daemon(&[]);
    let mut client = node.start_running_client(&["--hold", "forever"]);
    node.send_command("set_default_active_thread_percentage 50");
    node.kill_daemon();
    assert_eq!(client.wait_for_error(), 806);
    assert_eq!(client.wait().code(), Some(806 - 3 * 256));
    node.start_daemon(&[]);
    let line = node.run_and_read_line(&[]);
    assert_eq!((line["viaMps"].as_bool(), line["sms"].as_i64()), (Some(true), Some(132)));
}

#[test]
fn an_illegal_access_breaks_all_clients_and_blocks_new_clients_until_the_broken_clients_exit() {
    let node = Node::with_daemon(&[]);
    let mut slow = node.start_running_client(&["--hold", "forever", "--linger", "forever"]);
    let mut other = node.start_running_client(&["--hold", "forever"]);
    let mut culprit = node.start_running_client(&["--fault=0.05", "--kernel-ms", "1"]);
    for client in [&mut culprit, &mut other, &mut slow] {
        assert_eq!(client.wait_for_error(), 700);
    }
    assert_eq!(culprit.wait().code(), Some(700 - 2 * 256));
    let server = node.wait_for_fault();
    let mut late = node.start_client(&[]);
    assert_eq!(late.wait_for_error(), 807);
    assert_eq!(late.wait().code(), Some(807 - 3 * 256));
    assert!(node.client_pids(server).contains(&slow.pid()));
    slow.kill(Signal::TERM);
    wait_until("the server is ACTIVE again", || {
        node.send_command(&format!("get_server_status {server}")) == "ACTIVE\n"
    });
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
    let log = node.read_log();
    let blamed = format!("Client {{PID: {}, Context: 1}} encountered a fatal GPU error.", culprit.pid());
    assert!(log.contains(&blamed), "{log}");
    assert!(log.contains("Server is handling a fatal GPU error."), "{log}");
    assert!(log.contains("The following clients have a sticky error set:"), "{log}");
    let events = &node.machine.snapshot().unwrap().events;
    assert_eq!(events.iter().map(|event| event.data).collect::<Vec<_>>(), [31]);
}

#[test]
fn a_busy_client_that_is_killed_breaks_its_neighbours() {
    for signal in [Signal::KILL, Signal::TERM] {
        let node = Node::with_daemon(&[]);
        let mut neighbour = node.start_running_client(&["--hold", "forever"]);
        node.start_busy_client("100").kill(signal);
        assert_eq!(neighbour.wait_for_error(), 700, "{signal:?}");
        neighbour.wait();
        assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
    }
}

#[test]
fn killed_clients_with_short_kernels_break_no_client_but_every_twelfth_with_longer_kernels_does() {
    let node = Node::with_daemon(&[]);
    let server = node.wait_for_server();
    let mut neighbour = node.start_running_client(&["--hold", "forever"]);
    let die = |kernel_ms: &str| {
        let client = node.start_busy_client(kernel_ms);
        let pid = client.pid();
        client.kill(Signal::KILL);
        wait_until("the server no longer lists the client", || !node.client_pids(server).contains(&pid));
    };
    die("0.1");
    (0..11).for_each(|_| die("10"));
    assert!(neighbour.has_no_output());
    die("10");
    assert_eq!(neighbour.wait_for_error(), 700);
}

#[test]
fn a_busy_client_killed_without_neighbours_breaks_a_later_client() {
    let node = Node::with_daemon(&[]);
    let server = node.wait_for_server();
    node.start_busy_client("1000").kill(Signal::KILL);
    wait_until("the server no longer lists the client", || node.client_pids(server).is_empty());
    assert_eq!(node.send_command(&format!("get_server_status {server}")), "ACTIVE\n");
    let mut later = node.start_running_client(&["--kernel-ms", "1", "--busy", "forever"]);
    assert_eq!(later.wait_for_error(), 700);
}

#[test]
fn a_client_that_is_terminated_or_exits_cleanly_breaks_no_neighbour() {
    let node = Node::with_daemon(&[]);
    let server = node.wait_for_server();
    let mut neighbour = node.start_running_client(&["--hold", "forever"]);
    let mut terminated = node.start_busy_client("1000");
    assert_eq!(node.send_command(&format!("terminate_client {server} {}", terminated.pid())), "0\n");
    assert_eq!(terminated.wait_for_error(), 810);
    assert_eq!(terminated.wait().code(), Some(810 - 3 * 256));
    wait_until("the client has disconnected", || node.client_pids(server) == [neighbour.pid()]);
    let lingering = node.start_busy_client_with("1000", &["--linger", "forever"]);
    let terminate = format!("terminate_client {server} {}", lingering.pid());
    assert_eq!((node.send_command(&terminate).as_str(), node.send_command(&terminate).as_str()), ("0\n", "201\n"));
    lingering.kill(Signal::KILL);
    let mut handling = node.start_busy_client_with("100", &["--handle-sigterm"]);
    handling.signal(Signal::TERM);
    assert_eq!(handling.wait().code(), Some(0));
    assert!(neighbour.has_no_output());
}

#[test]
fn terminate_client_blocks_while_the_client_is_stopped() {
    let node = Node::with_daemon(&[]);
    let server = node.wait_for_server();
    let mut neighbour = node.start_running_client(&["--hold", "forever"]);
    let mut stopped = node.start_busy_client("1000");
    stopped.suspend();
    let terminated = node.send_command_in_background(&format!("terminate_client {server} {}", stopped.pid()));
    wait_until("the command has arrived", || node.read_log().contains("Cmd:terminate_client"));
    // All other commands wait until `terminate_client` has finished.
    let listed = node.send_command_in_background("get_server_list");
    node.wait_for_side_effects();
    assert!(terminated.try_recv().is_err() && listed.try_recv().is_err());
    stopped.signal(Signal::CONT);
    assert_eq!(wait_for_answer(&terminated), "0\n");
    assert_eq!(wait_for_answer(&listed), format!("{server}\n"));
    assert_eq!(stopped.wait_for_error(), 810);
    assert!(neighbour.has_no_output());
}

#[test]
fn servers_are_shut_down_and_the_daemon_quits_cleanly() {
    let mut node = Node::with_daemon(&[]);
    let server = node.wait_for_server();
    let mut client = node.start_running_client(&["--hold", "forever"]);
    node.send_command(&format!("shutdown_server {server} -f"));
    assert_eq!(client.wait_for_error(), 806);
    assert_eq!(node.send_command("get_server_list"), "");
    node.wait_for_server();
    let mut client = node.start_running_client(&["--hold", "forever"]);
    node.send_command("quit -t 0");
    assert_eq!(node.wait_for_daemon_exit().code(), Some(0));
    assert_eq!(client.wait_for_error(), 806);
    assert!(!node.socket_path("control").exists());
    assert!(node.machine.processes().unwrap().is_empty());
}

#[test]
fn a_directory_has_at_most_one_daemon_even_in_the_background() {
    let node = Node::without_daemon();
    let started = |command: &mut std::process::Command| command.stdin(Stdio::null()).output().unwrap();
    let first = started(node.control_command().arg("-d"));
    assert!(first.status.success(), "{first:?}");
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
    let second = started(node.control_command().arg("-d"));
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("An instance of this daemon is already running"));
    let log = |name: &str| std::fs::read_to_string(node.path("log").join(name)).unwrap();
    assert!(log("control.log").contains("Starting control daemon using socket"));
    wait_until("the server's log is written", || log("server.log").contains("Server has started"));
    let pid: u32 = std::fs::read_to_string(node.socket_path("nvidia-cuda-mps-control.pid")).unwrap().parse().unwrap();
    let quit = started(node.control_command().arg("quit"));
    assert!(quit.status.success(), "{quit:?}");
    wait_until("the daemon has exited", || !std::path::Path::new(&format!("/proc/{pid}")).exists());
    let nobody = started(node.control_command().arg("get_server_list"));
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("Cannot find MPS control daemon process"));
}

#[test]
fn an_injected_hang_of_a_command_blocks_the_daemon() {
    let node = Node::with_daemon(&[]);
    node.inject_fault("mps:command:get_server_list", FaultEffect::Hang(None), Some(1));
    let hanging = node.send_command_in_background("get_server_list");
    wait_until("the command hangs", || node.are_faults_consumed());
    let other = node.send_command_in_background("get_default_active_thread_percentage");
    node.wait_for_side_effects();
    assert!(hanging.try_recv().is_err() && other.try_recv().is_err());
    node.clear_faults();
    assert_eq!(wait_for_answer(&hanging), "");
    assert_eq!(wait_for_answer(&other), "100.0\n");
}

#[test]
fn an_injected_fault_fails_the_daemons_start() {
    let mut node = Node::without_daemon();
    node.inject_fault("mps:start", FaultEffect::Code(3), Some(2));
    for _ in 0..2 {
        let status = node.control_command().arg("-f").stdin(Stdio::null()).stdout(Stdio::null()).status().unwrap();
        assert_eq!(status.code(), Some(3));
    }
    node.start_daemon(&[]);
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
}

#[test]
fn programs_accept_an_injected_handshake_of_another_driver() {
    let node = Node::with_daemon(&[]);
    node.inject_fault("mps:handshake", FaultEffect::Code(1), None);
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
    assert_eq!(node.run_control(&["get_default_active_thread_percentage"], None), "100.0\n");
    let hello = Connection::connect(&node.socket_path("control")).unwrap().recv(64).unwrap().unwrap();
    assert_ne!(hello.data, sim_mps::handshake::HELLO_PACKET);
}

#[test]
fn a_socket_of_another_protocol_is_not_mps() {
    let node = Node::without_daemon();
    std::fs::create_dir(node.path("pipe")).unwrap();
    let listener = Listener::bind(&node.socket_path("control"), 0o666).unwrap();
    let talk = move || {
        while let Ok(connection) = listener.accept() {
            // Ignore errors, because the first connection closes before it reads the packet.
            let _ = connection.send(b"HTTP/1.1 200 OK");
        }
    };
    std::thread::spawn(talk);
    assert_eq!(node.run_and_read_line(&[])["viaMps"], false);
}

#[test]
fn a_program_waits_for_the_daemon_without_a_deadline() {
    let node = Node::with_daemon(&[]);
    node.inject_fault("mps:client", FaultEffect::Hang(None), Some(1));
    let mut client = node.start_client(&[]);
    wait_until("the client waits for the daemon", || node.are_faults_consumed());
    node.wait_for_side_effects();
    assert!(client.has_no_output());
    node.clear_faults();
    assert_eq!(client.read_line()["viaMps"], true);
}

#[test]
fn a_lost_gpu_ends_the_server_and_its_clients() {
    let node = Node::with_daemon(&[]);
    let mut client = node.start_running_client(&["--hold", "forever"]);
    node.lose_gpu();
    assert_eq!(client.wait_for_error(), 806);
    wait_until("the server has exited", || node.send_command("get_server_list").is_empty());
    assert_eq!(node.run_and_read_line(&[])["error"], 100);
}

#[test]
fn the_server_can_be_killed_repeatedly() {
    let node = Node::with_daemon(&[]);
    for _ in 0..3 {
        let mut client = node.start_running_client(&["--hold", "forever"]);
        node::send_signal(node.wait_for_server(), Signal::KILL);
        assert_eq!(client.wait_for_error(), 806);
    }
    assert!(node.read_log().contains("exited with status 0"));
}

#[test]
fn processes_of_one_program_are_separate_clients() {
    let node = Node::with_daemon(&[]);
    let mut all = node.start_client(&["--processes", "5", "--hold", "forever", "--handle-sigterm"]);
    (0..5).for_each(|_| assert_eq!(all.read_line()["viaMps"], true));
    let server = node.wait_for_server();
    assert_eq!(node.client_pids(server).len(), 5);
    all.signal(Signal::TERM);
    assert_eq!(all.wait().code(), Some(0));
    wait_until("all clients have disconnected", || node.client_pids(server).is_empty());
    let mut killed = node.start_client(&["--processes", "2", "--hold", "forever"]);
    (0..2).for_each(|_| assert_eq!(killed.read_line()["viaMps"], true));
    killed.signal(Signal::KILL);
    killed.wait();
    wait_until("all clients have disconnected", || node.client_pids(server).is_empty());
}
