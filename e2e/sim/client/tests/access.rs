//! Tests what clients and administrators may do.

mod node;

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use node::{Client, Node, is_root, set_user, wait_for_answer, wait_until};
use sim_mps::handshake;
use sim_mps::seqpacket::Connection;

const PRIVILEGE_ERROR: &str = "privilege";

#[test]
fn the_pipe_directory_has_the_same_files_as_with_the_real_mps() {
    let node = Node::with_daemon(&[]);
    let metadata = |name: &str| fs::metadata(node.socket_path(name)).unwrap();
    assert!(metadata("control").file_type().is_socket());
    assert_eq!(metadata("control").permissions().mode() & 0o777, 0o666);
    assert!(metadata("control_privileged").file_type().is_socket());
    assert_eq!(metadata("control_privileged").permissions().mode() & 0o777, 0o755);
    assert!(metadata("log").file_type().is_fifo());
    assert!(metadata("control_lock").is_file());
    assert!(fs::read_to_string(node.socket_path("nvidia-cuda-mps-control.pid")).unwrap().parse::<u32>().is_ok());
}

#[test]
fn the_control_socket_allows_reading_commands_but_no_changes() {
    let node = Node::with_daemon(&[]);
    let client = node.start_running_client(&["--hold", "forever"]);
    let server = node.wait_for_server();
    let send_command = |command: &str| handshake::send_command(&node.socket_path("control"), command).unwrap().unwrap();
    assert_eq!(send_command("get_server_list"), format!("{server}\n"));
    assert_eq!(send_command(&format!("get_client_list {server}")), format!("{}\n", client.pid()));
    let pid = client.pid();
    for command in [
        "set_default_active_thread_percentage 10".to_owned(),
        "set_default_device_pinned_mem_limit 0 1G".to_owned(),
        format!("set_active_thread_percentage {server} 10"),
        format!("terminate_client {server} {pid}"),
        format!("shutdown_server {server} -f"),
        "quit".to_owned(),
    ] {
        assert!(send_command(&command).contains(PRIVILEGE_ERROR), "{command}");
    }
    assert_eq!(node.send_command("get_default_active_thread_percentage"), "100.0\n");
    assert_eq!(node.client_pids(server), [pid]);
}

#[test]
fn the_control_tool_uses_the_privileged_socket_if_accessible() {
    if !is_root() {
        return;
    }
    let node = Node::with_daemon(&[]);
    assert_eq!(node.run_control(&["set_default_active_thread_percentage", "40"], None), "40.0\n");
    assert!(node.run_control(&["set_default_active_thread_percentage", "10"], Some(1000)).contains(PRIVILEGE_ERROR));
    assert!(node.run_control(&["quit"], Some(1000)).contains(PRIVILEGE_ERROR));
    assert_eq!(node.run_control(&["get_default_active_thread_percentage"], Some(1000)), "40.0\n");
}

#[test]
fn a_program_can_be_an_administrator() {
    let node = Node::with_daemon(&[]);
    let mut client = node.start_client(&["--admin", "set_default_active_thread_percentage 10"]);
    assert!(client.read_line()["reply"].as_str().unwrap().contains(PRIVILEGE_ERROR));
    let privileged = node.socket_path("control_privileged");
    let arguments = ["--admin", "get_default_active_thread_percentage", "--socket", privileged.to_str().unwrap()];
    assert_eq!(node.start_client(&arguments).read_line()["reply"], "100.0\n");
}

#[test]
fn a_client_connects_through_a_hard_link_to_the_control_socket() {
    let mut node = Node::with_daemon(&[]);
    let view = node.path("view");
    fs::create_dir(&view).unwrap();
    let through_view = |node: &Node| {
        let mut command = node.client_command(&[]);
        command.env("CUDA_MPS_PIPE_DIRECTORY", &view);
        Client::spawn(command).read_line()
    };
    fs::hard_link(node.socket_path("control"), view.join("control")).unwrap();
    assert_eq!(through_view(&node)["viaMps"], true);
    node.kill_daemon();
    assert_eq!(through_view(&node)["viaMps"], false);
    node.start_daemon(&[]);
    assert_eq!(through_view(&node)["viaMps"], false);
    fs::remove_file(view.join("control")).unwrap();
    fs::hard_link(node.socket_path("control"), view.join("control")).unwrap();
    assert_eq!(through_view(&node)["viaMps"], true);
}

#[test]
fn a_second_user_waits_until_the_first_user_has_no_clients_and_gets_another_server() {
    if !is_root() {
        return;
    }
    let node = Node::with_daemon(&[]);
    let first = node.start_running_client(&["--hold", "forever"]);
    let server = node.wait_for_server();
    let mut command = node.client_command(&[]);
    set_user(&mut command, 1000);
    let mut second = Client::spawn(command);
    let pending =
        format!("NEW CLIENT {} from user 1000: Server is not ready, push client to pending list", second.pid());
    wait_until("the second user is pending", || node.read_log().contains(&pending));
    assert!(second.has_no_output());
    first.kill(rustix::process::Signal::TERM);
    assert_eq!(second.read_line()["viaMps"], true);
    wait_until("the first server has exited", || {
        node.read_log().contains(&format!("Server {server} exited with status 0"))
    });
    let own = node.wait_for_server();
    assert_ne!(own, server);
    assert_eq!(fs::metadata(format!("/proc/{own}")).unwrap().uid(), 1000);
}

#[test]
fn users_share_a_server_in_multi_user_mode() {
    if !is_root() {
        return;
    }
    let node = Node::with_daemon(&["-multiuser-server"]);
    let _first = node.start_running_client(&["--hold", "forever"]);
    let mut command = node.client_command(&["--hold", "forever"]);
    set_user(&mut command, 1000);
    let mut second = Client::spawn(command);
    assert_eq!(second.read_line()["viaMps"], true);
    assert_eq!(node.client_pids(node.wait_for_server()).len(), 2);
}

#[test]
fn a_client_in_other_namespaces_is_listed_by_its_pid_outside() {
    if !is_root() {
        return;
    }
    let node = Node::with_daemon(&[]);
    let program = node.client_command(&["--hold", "forever"]);
    let mut command = std::process::Command::new("unshare");
    command.args(["--pid", "--net", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"]);
    command.arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let mut client = Client::spawn(command);
    let line = client.read_line();
    assert_eq!((line["viaMps"].as_bool(), line["pid"].as_u64()), (Some(true), Some(1)));
    let clients = node.client_pids(node.wait_for_server());
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", client.pid())).unwrap();
    assert_eq!(children.trim(), clients[0].to_string());
    let table = node.send_command("ps");
    let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    let namespace = fs::metadata(format!("/proc/{}/ns/pid", clients[0])).unwrap().ino();
    assert_eq!(
        (row[0], row[3], row[4]),
        (clients[0].to_string().as_str(), &node.uuid()[..17], namespace.to_string().as_str(),)
    );
    assert_eq!(node.send_command("get_device_client_list"), format!("{} {}\n", node.uuid(), clients[0]));
}

#[test]
fn protocol_violations_are_rejected_and_affect_no_client() {
    let node = Node::with_daemon(&[]);
    let running = node.start_running_client(&["--hold", "forever"]);
    let privileged = node.socket_path("control_privileged");
    for lie in
        ["kind=7", "stall=4", "short-kind", "huge", "garbage", "twice", "descriptors", "long-command", "last-word=807"]
    {
        for extra in [[].as_slice(), &["--socket", privileged.to_str().unwrap()]] {
            let mut client = node.start_client(&[["--lie", lie].as_slice(), extra].concat());
            assert_eq!(client.read_line()["outcome"], "closed", "{lie}");
        }
    }
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
    wait_until("only the first client remains", || node.client_pids(node.wait_for_server()) == [running.pid()]);
}

#[test]
fn a_silent_peer_blocks_the_daemon_for_all_other_peers() {
    for lie in ["stall=0", "stall=9", "flood=3", "no-last-word"] {
        let node = Node::with_daemon(&[]);
        node.wait_for_server();
        let served = node.read_log().matches("Accepting connection").count();
        let silent = node.start_client(&["--lie", lie, "--hold", "forever"]);
        wait_until("the silent peer is served", || node.read_log().matches("Accepting connection").count() > served);
        if lie == "no-last-word" {
            // Wait until the server has accepted the client. A client that is killed before that
            // blocks the server.
            let connected = format!("Client {{PID: {}, Context ID: 0}} connected", silent.pid());
            wait_until("the client is accepted", || node.read_log().contains(&connected));
        }
        let reply = node.send_command_in_background("get_server_list");
        let mut client = node.start_client(&[]);
        node.wait_for_side_effects();
        assert!(reply.try_recv().is_err() && client.has_no_output(), "{lie}");
        silent.kill(rustix::process::Signal::KILL);
        assert!(!wait_for_answer(&reply).is_empty(), "{lie}");
        assert_eq!(client.read_line()["viaMps"], true, "{lie}");
    }
}

#[test]
fn a_client_that_closes_before_its_introduction_blocks_the_server_forever() {
    for lie in ["vanish=0", "vanish=2", "shutdown"] {
        let node = Node::with_daemon(&[]);
        let server = node.wait_for_server();
        node.start_client(&["--lie", lie, "--hold", "0.1"]).wait();
        let logged = format!("Server {server:>5}] User did not send valid credentials");
        wait_until("the server logs the event", || node.read_log().contains(&logged));
        let reply = node.send_command_in_background(&format!("get_server_status {server}"));
        node.wait_for_side_effects();
        assert!(reply.try_recv().is_err(), "{lie}");
    }
}

#[test]
fn a_later_introduction_on_a_copy_of_the_socket_unblocks_the_server() {
    let node = Node::with_daemon(&[]);
    let server = node.wait_for_server();
    let sockets = handshake::connect_to_server(&node.socket_path("control")).unwrap();
    let copy = Connection::from_fd(sockets.server.as_fd().try_clone_to_owned().unwrap());
    drop(sockets);
    let reply = node.send_command_in_background(&format!("get_server_status {server}"));
    let [first, second] = handshake::IntroductionSubject::Process.introduction_words();
    copy.send_credentials(handshake::CREDENTIALS_PACKET, handshake::own_credentials()).unwrap();
    copy.send(&first).unwrap();
    copy.send(&second).unwrap();
    assert_eq!(wait_for_answer(&reply), "ACTIVE\n");
    assert_eq!(node.client_pids(server), [std::process::id()]);
    copy.shutdown();
    wait_until("the client has exited", || node.client_pids(server).is_empty());
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
}
