//! Tests the command line of `cleave`: the help, the options that are accepted or refused, and the
//! output of commands that need no cluster.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
use std::io::Write as _;
use std::process::{Command, Output, Stdio};

/// The commands that people run.
const USER_COMMANDS: [&str; 13] = [
    "status",
    "quotas",
    "explain",
    "plan",
    "simulate",
    "cordon",
    "uncordon",
    "drain",
    "forget",
    "crds",
    "preflight",
    "migrate",
    "doctor",
];
/// The commands that run as components in the cluster.
const COMPONENTS: [&str; 3] = ["operator", "agent", "mps-host"];
/// The exit status for a command line that cannot be parsed.
const USAGE_EXIT_CODE: Option<i32> = Some(2);

/// Runs `cleave` with this standard input and without access to a cluster.
fn run_cleave(args: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleave"));
    command.args(args).env("KUBECONFIG", "/no/such/file").env_remove("KUBERNETES_SERVICE_HOST");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // Ignore errors, because the program may exit before it reads its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn stdout_of_success(args: &[&str], input: &str) -> String {
    let output = run_cleave(args, input);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_help_has_at_most_32_lines_of_80_characters_and_one_line_for_each_command() {
    for flag in ["-h", "--help"] {
        let help = stdout_of_success(&[flag], "");
        assert!(help.lines().count() <= 32, "{help}");
        assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
        for command in USER_COMMANDS.iter().chain(&COMPONENTS) {
            let start = format!("  {command} ");
            assert_eq!(help.lines().filter(|line| line.starts_with(&start)).count(), 1, "{command} in\n{help}");
        }
    }
}

#[test]
fn only_the_help_of_components_lists_the_log_options() {
    for command in USER_COMMANDS {
        assert!(!stdout_of_success(&[command, "--help"], "").contains("--log"), "{command}");
    }
    for command in COMPONENTS {
        let help = stdout_of_success(&[command, "--help"], "");
        assert!(help.contains("--log <LEVELS>") && help.contains("--log-format"), "{help}");
        assert!(!help.starts_with("Options"), "the help starts with what the component does: {help}");
    }
}

#[test]
fn every_command_accepts_the_log_options_before_and_after_its_name() {
    for args in [["--log", "debug", "crds"], ["crds", "--log", "debug"]] {
        stdout_of_success(&args, "");
    }
    for args in [
        ["--log", "cleave=loud", "operator", "--identity", "x"],
        ["operator", "--log", "cleave=loud", "--identity", "x"],
        ["status", "--log", "cleave=loud", "--node", "x"],
    ] {
        assert_eq!(run_cleave(&args, "").status.code(), USAGE_EXIT_CODE, "{args:?}");
    }
}

#[test]
fn migrate_prints_each_format_and_fails_if_the_input_has_errors() {
    let config = "version: v1\nunknown: 1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\n";
    let json: serde_json::Value =
        serde_json::from_str(&stdout_of_success(&["migrate", "-", "-o", "json"], config)).unwrap();
    let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["policies", "renames", "report", "values", "valuesFiles"]);
    assert_eq!(json["renames"][0]["now"], "nvidia.com/gpu-mps");
    let policies = stdout_of_success(&["migrate", "-", "-o", "policies"], config);
    assert!(policies.starts_with("apiVersion: cleave.dev/v1alpha1\n") && policies.contains("units: 10"), "{policies}");
    assert_eq!(stdout_of_success(&["migrate", "-", "-o", "values"], config), "# No further values are needed.\n");
    let report = stdout_of_success(&["migrate", "-", "--preview"], config);
    assert!(report.contains("  unknown     unknown = 1") && report.contains("\nPods:\n"), "{report}");
    let refused = run_cleave(&["migrate", "-"], &config.replace("10", "1"));
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && error.contains("standard input: sharing.mps"), "{error}");
    assert_eq!(run_cleave(&["migrate"], "").status.code(), USAGE_EXIT_CODE);
    assert_eq!(run_cleave(&["migrate", "/no/such/file"], "").status.code(), Some(1));
}

#[test]
fn plan_accepts_cluster_options_only_with_live() {
    for args in [
        ["plan", "--snapshot", "-", "--context", "x"],
        ["plan", "--snapshot", "-", "--cleave-namespace", "x"],
        ["plan", "--live", "--units", "3", "-ojson"],
    ] {
        assert_eq!(run_cleave(&args, "{}").status.code(), USAGE_EXIT_CODE, "{args:?}");
    }
    assert_eq!(run_cleave(&["plan"], "").status.code(), USAGE_EXIT_CODE);
    for namespace in ["--cleave-namespace", "--namespace"] {
        let output = run_cleave(&["plan", "--live", "--kubeconfig", "/no/such/file", namespace, "x"], "");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && error.contains("failed to load the kubeconfig"), "{error}");
    }
}

#[test]
fn plan_of_a_snapshot_has_these_json_keys() {
    let text = stdout_of_success(&["plan", "--snapshot", "-", "-o", "json"], r#"{"nodes": [], "pods": []}"#);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["changed", "gpus", "notes", "placements", "unplaced"]);
}
