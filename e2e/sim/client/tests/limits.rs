//! Tests how thread percentages, memory limits and the maximum number of contexts affect a program.

mod node;

use node::{Node, wait_until};
use sim_mps::client::{LimitEnvironment, MpsConnection};

const THREADS_ENV: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
const MEMORY_ENV: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
const GPU_TOTAL_MIB: i64 = 143_155;

#[test]
fn a_percentage_gives_the_measured_number_of_sms() {
    let node = Node::with_daemon(&[]);
    let measured = [
        (1, 8),
        (5, 8),
        (10, 12),
        (12, 14),
        (14, 18),
        (20, 26),
        (25, 32),
        (33, 42),
        (50, 66),
        (66, 86),
        (75, 98),
        (90, 118),
        (100, 132),
    ];
    for (percent, sms) in measured {
        assert_eq!(node.run_and_read_line(&[(THREADS_ENV, &percent.to_string())])["sms"], sms, "{percent} %");
    }
}

#[test]
fn the_environment_can_only_lower_the_percentage() {
    let node = Node::with_daemon(&[]);
    assert_eq!(node.send_command("get_default_active_thread_percentage"), "100.0\n");
    assert_eq!(node.send_command("set_default_active_thread_percentage 50"), "50.0\n");
    for (own, sms) in [("75", 66), ("25", 32), ("abc", 66), ("0", 66)] {
        assert_eq!(node.run_and_read_line(&[(THREADS_ENV, own)])["sms"], sms, "{own}");
    }
}

#[test]
fn a_change_applies_to_the_next_client_only() {
    let node = Node::with_daemon(&[]);
    node.send_command("set_default_active_thread_percentage 50");
    let mut running = node.start_client(&["--hold", "forever"]);
    assert_eq!(running.read_line()["sms"], 66);
    let server = node.wait_for_server();
    assert_eq!(node.send_command(&format!("set_active_thread_percentage {server} 80")), "80.0\n");
    assert_eq!(node.run_and_read_line(&[])["sms"], 104);
    assert_eq!(node.send_command(&format!("get_active_thread_percentage {server}")), "80.0\n");
    assert!(running.has_no_output());
}

#[test]
fn limits_are_set_at_the_first_handshake_of_a_process() {
    let node = Node::with_daemon(&[]);
    let server = node.wait_for_server();
    node.send_command(&format!("set_active_thread_percentage {server} 20"));
    let mps = MpsConnection::attach(&node.socket_path("control")).unwrap().unwrap();
    node.send_command(&format!("set_active_thread_percentage {server} 50"));
    node.send_command(&format!("set_device_pinned_mem_limit {server} 0 8G"));
    let context = mps.create_context(&LimitEnvironment::default(), mps.devices(), 0).unwrap();
    assert_eq!((context.sms(), context.memory_limit()), (26, None));
    assert_eq!(node.run_and_read_line(&[])["sms"], 66);
}

#[test]
fn replies_match_the_measurements() {
    let node = Node::with_daemon(&[]);
    assert_eq!(node.send_command("ps"), "Server not found\n");
    assert_eq!(node.send_command("get_server_status 9"), "Server 9 not found\n");
    assert_eq!(node.send_command("frobnicate 1"), "Unknown command \"frobnicate\"\n");
    let server = node.wait_for_server();
    let send_command = |command: &str| node.send_command(&command.replace("SERVER", &server.to_string()));
    assert_eq!(send_command("set_active_thread_percentage SERVER 20"), "20.0\n");
    assert_eq!(send_command("set_active_thread_percentage SERVER abc"), "20.0\n");
    assert_eq!(send_command("get_device_pinned_mem_limit SERVER 0"), "");
    for (set, printed) in [("8192M", "8G\n"), ("512M", "512M\n"), ("1536M", "1G\n"), ("0", "")] {
        assert_eq!(send_command(&format!("set_device_pinned_mem_limit SERVER 0 {set}")), "");
        assert_eq!(send_command("get_device_pinned_mem_limit SERVER 0"), printed);
    }
    assert!(node.run_and_read_line(&[])["limitMiB"].is_null());
    assert_eq!(send_command("terminate_client SERVER 9"), "Invalid process 9!\n1\n");
}

#[test]
fn a_memory_limit_reduces_free_memory_but_not_the_total() {
    let node = Node::with_daemon(&[]);
    let prefix = node.uuid()[..12].to_owned();
    for limit in ["0=8G".to_owned(), "0=8192M".to_owned(), format!("{}=8G", node.uuid()), format!("{prefix}=8G")] {
        let line = node.run_and_read_line(&[(MEMORY_ENV, &limit)]);
        assert_eq!((line["freeMiB"].as_i64(), line["totalMiB"].as_i64()), (Some(7678), Some(GPU_TOTAL_MIB)), "{limit}");
    }
    let mut command = node.client_command(&["--allocate", "7424,256"]);
    command.env(MEMORY_ENV, "0=8G");
    let mut client = node::Client::spawn(command);
    client.read_line();
    assert_eq!(client.read_line()["freeMiB"], 254);
    assert_eq!(client.wait_for_error(), 2);
    assert_eq!(client.wait().code(), Some(2));
    assert_eq!(node.run_and_read_line(&[(MEMORY_ENV, "0=8.5G")])["error"], 2);
}

#[test]
fn an_invalid_entry_in_the_environment_removes_every_memory_limit() {
    let node = Node::with_daemon(&[]);
    node.send_command("set_default_device_pinned_mem_limit 0 10G");
    assert_eq!(node.send_command("get_default_device_pinned_mem_limit 0"), "10G\n");
    assert_eq!(node.run_and_read_line(&[])["limitMiB"], 10 << 10);
    for escape in ["0=2G,1=4G", "1=8G", "8G", "junk"] {
        let line = node.run_and_read_line(&[(MEMORY_ENV, escape)]);
        assert!(line["limitMiB"].is_null(), "{escape}: {line}");
        assert!(line["freeMiB"].as_i64() > Some(GPU_TOTAL_MIB - 1000), "{escape}: {line}");
    }
    for (own, limit) in [("0=4G", 4 << 10), ("0=100G", 10 << 10)] {
        assert_eq!(node.run_and_read_line(&[(MEMORY_ENV, own)])["limitMiB"], limit, "{own}");
    }
}

#[test]
fn limits_set_before_a_connection_apply_to_that_client() {
    let node = Node::with_daemon(&[]);
    let server = node.wait_for_server();
    for (percent, limit, sms, free) in [(20, "8G", 26, 8069), (50, "20G", 66, 20209)] {
        node.send_command(&format!("set_active_thread_percentage {server} {percent}"));
        node.send_command(&format!("set_device_pinned_mem_limit {server} 0 {limit}"));
        assert_eq!(node.send_command(&format!("get_device_pinned_mem_limit {server} 0")), format!("{limit}\n"));
        let line = node.run_and_read_line(&[(THREADS_ENV, "100")]);
        assert_eq!((line["sms"].as_i64(), line["freeMiB"].as_i64()), (Some(sms), Some(free)));
    }
    assert!(node.read_log().contains("Device pinned memory limit for device 0 set to 0x200000000 bytes"));
}

#[test]
fn the_defaults_come_from_the_daemons_environment() {
    let mut node = Node::without_daemon();
    node.set_daemon_env(THREADS_ENV, "25");
    node.set_daemon_env(MEMORY_ENV, "0=16G");
    node.start_daemon(&[]);
    let line = node.run_and_read_line(&[]);
    assert_eq!((line["sms"].as_i64(), line["limitMiB"].as_i64()), (Some(32), Some(16 << 10)));
}

#[test]
fn a_killed_servers_replacement_has_the_defaults() {
    let node = Node::with_daemon(&[]);
    node.send_command("set_default_active_thread_percentage 50");
    let server = node.wait_for_server();
    node.send_command(&format!("set_active_thread_percentage {server} 10"));
    assert_eq!(node.run_and_read_line(&[])["sms"], 12);
    let mut client = node.start_running_client(&["--hold", "forever"]);
    node::send_signal(server, rustix::process::Signal::KILL);
    assert_eq!(client.wait_for_error(), 806);
    assert_eq!(node.run_and_read_line(&[])["sms"], 66);
    assert_ne!(node.wait_for_server(), server);
}

#[test]
fn the_49th_context_is_refused() {
    let node = Node::with_daemon(&[]);
    let mut crowd = node.start_running_client(&["--contexts", "48", "--hold", "forever"]);
    let mut late = node.start_client(&[]);
    assert_eq!(late.wait_for_error(), 808);
    assert_eq!(late.wait().code(), Some(808 - 3 * 256));
    crowd.signal(rustix::process::Signal::TERM);
    crowd.wait();
    assert_eq!(node.run_and_read_line(&[])["viaMps"], true);
}

#[test]
fn the_machine_lists_server_and_clients_with_their_memory() {
    let node = Node::with_daemon(&[]);
    let mut client = node.start_running_client(&["--allocate", "1024", "--hold", "forever"]);
    client.read_line();
    assert!(!node.read_log().contains("exit"), "the process lives as long as its context");
    let listed = |pid: u32| {
        let processes = node.machine.processes().unwrap();
        processes
            .iter()
            .find(|process| node.machine.visible_pid(process) == Some(pid))
            .map(|process| process.used >> 20)
    };
    assert_eq!(listed(node.wait_for_server()), Some(66));
    assert_eq!(listed(client.pid()), Some(274 + 1024));
    let pid = client.pid();
    client.kill(rustix::process::Signal::KILL);
    wait_until("the client is no longer listed", || listed(pid).is_none());
}
