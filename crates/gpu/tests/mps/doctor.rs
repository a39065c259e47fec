//! Tests the doctor as a process with stand-ins for NVML, MPS and the CUDA program.
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal};
use serde_json::Value;
use sim_machine::FaultEffect;

use super::node::{Node, default_daemon, mps_host_program, wait_until};

/// Returns the command that runs a doctor on a node. The doctor's temporary files are in the node's
/// directory.
fn doctor_command(node: &Node, arguments: &[&str]) -> Command {
    fs::create_dir_all(temporary_directory(node)).unwrap();
    fs::set_permissions(temporary_directory(node), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(mps_host_program());
    command
        .args(["doctor", "--idle", "--run-dir"])
        .arg(node.paths.run())
        .arg("--mps-control")
        .arg(node.path("nvidia-cuda-mps-control"))
        .arg("--nvml-library")
        .arg(node.path("libnvidia_ml.so"))
        .args(arguments)
        .env("SIMGPU_STATE", node.machine.dir())
        .env("SIM_MPS_SERVER_START_MS", "0")
        .env("TMPDIR", temporary_directory(node))
        .env_remove("NVIDIA_VISIBLE_DEVICES")
        .stdin(Stdio::null());
    command
}

fn temporary_directory(node: &Node) -> PathBuf {
    node.path("tmp")
}

fn client_path(node: &Node) -> String {
    node.path("cleave-client").display().to_string()
}

/// Returns the exit status and the report of a doctor.
fn status_and_report(output: &Output) -> (Option<i32>, Value) {
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    (output.status.code(), serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}\n{error}")))
}

/// Runs a doctor with JSON output. Returns its exit status and its report.
fn run_doctor(node: &Node, arguments: &[&str]) -> (Option<i32>, Value) {
    status_and_report(&doctor_command(node, &[&["--json"], arguments].concat()).output().unwrap())
}

fn run_doctor_with_client(node: &Node) -> (Option<i32>, Value) {
    run_doctor(node, &["--client", &client_path(node)])
}

/// Returns the verdict of each check, by name of the check.
fn verdicts(report: &Value) -> BTreeMap<&str, &str> {
    let findings = report["findings"].as_array().unwrap().iter();
    findings.map(|finding| (finding["check"].as_str().unwrap(), finding["verdict"].as_str().unwrap())).collect()
}

/// Returns the names of the checks with this verdict.
fn checks_with_verdict<'a>(report: &'a Value, verdict: &str) -> Vec<&'a str> {
    let findings = report["findings"].as_array().unwrap().iter();
    findings.filter(|finding| finding["verdict"] == verdict).map(|finding| finding["check"].as_str().unwrap()).collect()
}

/// Returns the observation that the doctor reports for a check.
fn observation_of<'a>(report: &'a Value, check: &str) -> &'a str {
    let findings = report["findings"].as_array().unwrap().iter();
    findings
        .filter(|finding| finding["check"] == check)
        .map(|finding| finding["observed"].as_str().unwrap())
        .next()
        .unwrap()
}

/// Returns the MPS processes and files that a doctor left on this node.
fn remaining_processes_and_files(node: &Node) -> Vec<String> {
    let wanted = [b"CUDA_MPS_PIPE_DIRECTORY=", temporary_directory(node).as_os_str().as_encoded_bytes()].concat();
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let is_ours = |path: &Path| {
        let environment = fs::read(path.join("environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable.starts_with(&wanted))
    };
    let found = entries.filter(|entry| is_ours(&entry.path())).map(|entry| entry.path().display().to_string());
    found
        .chain(
            fs::read_dir(temporary_directory(node)).unwrap().flatten().map(|entry| entry.path().display().to_string()),
        )
        .collect()
}

fn inject_error_code(node: &Node, call: &str, code: i32) {
    node.inject_fault(call, None, FaultEffect::Code(code), None);
}

#[test]
fn the_simulated_driver_behaves_as_expected_and_the_doctor_cleans_up() {
    let node = Node::without_mps_host(1);
    let (status, report) = run_doctor_with_client(&node);
    assert_eq!(checks_with_verdict(&report, "differs"), [] as [&str; 0], "{report:#}");
    let not_tested: Vec<&str> = checks_with_verdict(&report, "notTested")
        .into_iter()
        .filter(|check| !(*check == "nvml" && is_in_a_nested_pid_namespace()))
        .collect();
    assert_eq!(not_tested, ["48 clients", "fault"], "{report:#}");
    assert_eq!((status, &report["asExpected"]), (Some(0), &Value::Bool(true)));
    assert_eq!((&report["driver"], &report["controlVersion"]), (&"580.159.04".into(), &13000.into()));
    assert_eq!(remaining_processes_and_files(&node), [] as [&str; 0]);
    assert!(node.machine.processes().unwrap().is_empty());
}

fn is_in_a_nested_pid_namespace() -> bool {
    fs::read_link("/proc/self/ns/pid").unwrap().as_os_str() != "pid:[4026531836]"
}

#[test]
fn without_a_cuda_program_the_checks_that_need_one_are_not_tested() {
    let node = Node::without_mps_host(1);
    let (status, report) = run_doctor(&node, &[]);
    assert_eq!(status, Some(0));
    assert_eq!(checks_with_verdict(&report, "asExpected"), ["start", "door", "commands", "privileges", "log"]);
    assert_eq!(observation_of(&report, "limits"), "needs a CUDA program (--client)");
    let (status, report) = run_doctor(&node, &["--client", "/nonexistent/program"]);
    assert_eq!((status, checks_with_verdict(&report, "differs")), (Some(0), Vec::new()));
    assert!(observation_of(&report, "limits").contains("does not start"), "{report:#}");
}

#[test]
fn an_unknown_handshake_differs_and_stops_the_tests() {
    let node = Node::without_mps_host(1);
    inject_error_code(&node, "mps:handshake", 1);
    let (status, report) = run_doctor_with_client(&node);
    assert_eq!((status, checks_with_verdict(&report, "differs")), (Some(1), vec!["door"]));
    assert!(observation_of(&report, "limits").contains("unknown"), "{report:#}");
    let text = doctor_command(&node, &[]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("door        DIFFERS") && text.contains("- door: MPS shares are Unhealthy"), "{text}");
    assert_eq!(remaining_processes_and_files(&node), [] as [&str; 0]);
}

#[test]
fn commands_that_fail_differ() {
    let node = Node::without_mps_host(1);
    inject_error_code(&node, "mps:command:terminate_client", 201);
    let (status, report) = run_doctor_with_client(&node);
    assert_eq!((status, checks_with_verdict(&report, "differs")), (Some(1), vec!["terminate"]));
    assert!(observation_of(&report, "terminate").contains("continues; its neighbour: continues"), "{report:#}");

    let node = Node::without_mps_host(1);
    inject_error_code(&node, "mps:command:set_default_device_pinned_mem_limit", 1);
    let (_, report) = run_doctor_with_client(&node);
    assert_eq!(checks_with_verdict(&report, "differs"), ["commands", "defaults"]);
}

#[test]
fn a_daemon_that_does_not_start_is_reported_with_its_last_line() {
    let node = Node::without_mps_host(1);
    inject_error_code(&node, "mps:start", 3);
    let (status, report) = run_doctor_with_client(&node);
    assert_eq!((status, checks_with_verdict(&report, "differs")), (Some(1), vec!["start"]));
    assert!(observation_of(&report, "start").starts_with("the daemon exited (exit status: 3)"), "{report:#}");
    assert_eq!(observation_of(&report, "limits"), "the daemon does not answer");
    assert_eq!(remaining_processes_and_files(&node), [] as [&str; 0]);
}

/// Writes a shell script that runs `script` and then the CUDA program. Returns the path of the
/// script.
fn write_client_script(node: &Node, script: &str) -> String {
    let path = node.path("script");
    fs::write(&path, format!("#!/bin/sh\n{script}\nexec {} \"$@\"\n", client_path(node))).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
fn a_driver_that_ignores_the_environment_differs() {
    let node = Node::without_mps_host(1);
    let script = write_client_script(&node, "unset CUDA_MPS_PINNED_DEVICE_MEM_LIMIT CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    let (status, report) = run_doctor(&node, &["--client", &script]);
    assert_eq!((status, checks_with_verdict(&report, "differs")), (Some(1), vec!["lower", "escape"]));
    assert!(observation_of(&report, "escape").starts_with("limit 8192 MiB, 7921 MiB"), "{report:#}");
}

#[test]
fn the_doctor_starts_nothing_on_a_gpu_in_use() {
    let mut node = Node::with_mps_host(1);
    let before = node.daemon_status(0);
    let (status, report) = run_doctor_with_client(&node);
    assert_eq!((status, checks_with_verdict(&report, "notTested").len()), (Some(0), verdicts(&report).len()));
    assert!(report["skipReason"].as_str().unwrap().contains("Cleave runs an MPS daemon for the GPU"), "{report:#}");
    assert_eq!(report["gpu"]["model"], "NVIDIA H200");
    // The daemon runs, but the desired file does not exist.
    fs::remove_file(node.paths.desired()).unwrap();
    let (_, report) = run_doctor_with_client(&node);
    assert!(
        report["skipReason"].as_str().unwrap().contains("an MPS daemon that may serve the GPU is already running"),
        "{report:#}"
    );
    assert_eq!(node.daemon_status(0), before);

    // A program uses the GPU without MPS.
    node = Node::without_mps_host(1);
    node.desire_allocation("aa", 0, None, None);
    let plain = node.start_client("aa", &["--hold", "forever"]);
    wait_until("it has a context", || !node.machine.processes().unwrap().is_empty());
    let (status, report) = run_doctor_with_client(&node);
    assert_eq!((status, report["skipReason"].as_str()), (Some(0), Some("the GPU is in use")));
    drop(plain);
}

#[test]
fn the_tests_stop_when_another_process_uses_the_gpu() {
    if is_in_a_nested_pid_namespace() {
        eprintln!("skipped: other processes are not visible in this PID namespace");
        return;
    }
    let node = Node::without_mps_host(1);
    let flag = node.path("came").display().to_string();
    let other = format!(
        "[ -e {flag} ] || {{ CUDA_MPS_PIPE_DIRECTORY=/nonexistent {} --hold forever >/dev/null </dev/null & echo $! >{flag}; }}",
        client_path(&node)
    );
    let (status, report) = run_doctor(&node, &["--client", &write_client_script(&node, &other)]);
    let pid: i32 = fs::read_to_string(&flag).unwrap().trim().parse().unwrap();
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    assert_eq!(status, Some(0), "{report:#}");
    assert!(observation_of(&report, "limits").contains(&format!("process {pid} started to use the GPU")), "{report:#}");
    assert!(
        observation_of(&report, "terminate").contains(&format!("process {pid} started to use the GPU")),
        "{report:#}"
    );
    assert_eq!(remaining_processes_and_files(&node), [] as [&str; 0]);
}

#[test]
fn a_doctor_that_receives_a_signal_stops_its_daemon() {
    let node = Node::without_mps_host(1);
    node.inject_fault("mps:command:start_server", None, FaultEffect::Hang(None), None);
    let mut doctor: Child =
        doctor_command(&node, &["--client", &client_path(&node)]).stdout(Stdio::piped()).spawn().unwrap();
    wait_until("the daemon runs", || remaining_processes_and_files(&node).len() >= 2);
    rustix::process::kill_process(Pid::from_child(&doctor), Signal::TERM).unwrap();
    wait_until("the doctor exits", || doctor.try_wait().unwrap().is_some());
    assert_eq!(doctor.wait().unwrap().code(), Some(2));
    assert_eq!(remaining_processes_and_files(&node), [] as [&str; 0]);
}

#[test]
fn a_missing_gpu_or_driver_gives_no_result() {
    let node = Node::without_mps_host(2);
    let output = doctor_command(&node, &["--gpu", "7"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no GPU 7 on this node; its GPUs: 0 (GPU-"));
    let (status, report) = run_doctor(&node, &["--gpu", &node.uuid(1)]);
    assert_eq!((status, &report["gpu"]["index"]), (Some(0), &1.into()));
    fs::remove_file(node.path("libnvidia_ml.so")).unwrap();
    let output = doctor_command(&node, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("found no NVML library"));
}

#[test]
fn a_daemon_of_another_gpu_is_ignored() {
    let mut node = Node::without_mps_host(2);
    node.desire_daemon(1, default_daemon());
    node.write_desired();
    let (_, report) = run_doctor(&node, &[]);
    assert_eq!(report["skipReason"], Value::Null, "{report:#}");
}
