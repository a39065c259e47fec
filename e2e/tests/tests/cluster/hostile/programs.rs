//! Lists attempts by hostile programs in pods with shares. The programs change their environment,
//! connect to sockets, violate the protocol of the door, and use too much memory or too many
//! processes.
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, POLICIES_PATH, Scope, WAIT_TIMEOUT, on_node, pod, program_output, text, wait_for, wait_until,
};
use serde_json::{Value, json};

use super::{Attempt, ExpectedOutcome, Outcome, TestBed, parse_json_lines};
use crate::shares::limits_of_shares;
use crate::tenants::wait_for_condition_and_event;
use crate::{GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, allocations, wait_until_advertised};

/// The pod in which most attempts run, and the number of its shares.
const HOSTILE_POD: &str = "hostile";
const HOSTILE_SHARES: u32 = 3;
/// The pod that uses the same GPU, and the number of its shares.
pub(super) const NEIGHBOUR_POD: &str = "neighbour";
const NEIGHBOUR_SHARES: u32 = 2;
/// The pod that violates the protocol of the door from its start, on several simultaneous
/// connections.
const VIOLATING_POD: &str = "liar";
/// Maximum number of GPU processes of a pod, which the policy sets.
const MAX_CLIENTS: usize = 8;
const SLEEP_FOREVER_SCRIPT: &str = "exec sleep infinity";
/// The directory of the door in a container.
const DOOR_DIRECTORY: &str = "/run/cleave-mps";

/// The violations by [`VIOLATING_POD`], as arguments of `cleave-client --lie`.
const VIOLATIONS: [&str; 18] = [
    "stall=0",
    "stall=4",
    "stall=9",
    "garbage",
    "kind=3",
    "short-kind",
    "huge",
    "long-command",
    "twice",
    "descriptors",
    "pid=1",
    "unread",
    "administrator-after-client",
    "mute=0",
    "mute=1",
    "mute=2",
    "no-last-word",
    "last-word=7",
];

/// The expected outcome if the door closes the connection.
const REFUSED_AS_CLOSED: ExpectedOutcome = ExpectedOutcome::Refused(&["closed"]);
/// The expected outcome if the kernel refuses the credentials.
const REFUSED_BY_THE_KERNEL: ExpectedOutcome = ExpectedOutcome::Refused(&["\"outcome\":\"refused\""]);
/// The expected outcome if the driver refuses a context because of the compute mode
/// `EXCLUSIVE_PROCESS`.
const REFUSED_WITHOUT_CONTEXT: ExpectedOutcome = ExpectedOutcome::Refused(&["CUDA_ERROR_DEVICE_UNAVAILABLE"]);
const REFUSED_AS_READ_ONLY: ExpectedOutcome = ExpectedOutcome::Refused(&["Read-only file system"]);

/// Creates a policy that divides each GPU into ten shares, the neighbour, and the pods in which
/// attempts run.
pub(super) fn test_bed(cluster: &Cluster) -> Result<TestBed<'_>> {
    let scope = Scope::new(cluster, "hostile")?;
    let spec = json!({
        "nodeSelector": {"kubernetes.io/hostname": NODE}, "gpus": {"indices": [0]}, "mode": "Mps",
        "mps": {"units": 10, "threads": "Strict", "clients": {"max": MAX_CLIENTS}},
    });
    scope.create_policy("hostile", &spec)?;
    wait_until_advertised(cluster, SHARES_RESOURCE, 10)?;
    let bed = TestBed::new(scope)?;
    let scope = &bed.scope;
    // Until these three pods run, the policy selects only one GPU, so that the pods are on the same
    // GPU.
    scope.create_pod(HOSTILE_POD, &json!({SHARES_RESOURCE: HOSTILE_SHARES}), SLEEP_FOREVER_SCRIPT)?;
    scope.wait_until_running(HOSTILE_POD)?;
    scope.create_pod(NEIGHBOUR_POD, &json!({SHARES_RESOURCE: NEIGHBOUR_SHARES}), HOLD_CLIENT_SCRIPT)?;
    scope.client_report(NEIGHBOUR_POD)?;
    ensure!(
        gpu_of_pod(&bed, HOSTILE_POD)? == gpu_of_pod(&bed, NEIGHBOUR_POD)?,
        "the hostile pod and its neighbour are on two GPUs"
    );
    let pods = other_pods();
    let (liar, others) = pods.split_first().context("no pods")?;
    ensure!(text(&liar["metadata"]["name"]) == VIOLATING_POD, "the first pod is {liar}");
    bed.tenant.create(&bed.pods_path(), liar)?;
    scope.wait_until_running(VIOLATING_POD)?;
    gpu_of_pod(&bed, VIOLATING_POD)?;
    cluster.patch(&format!("{POLICIES_PATH}/hostile"), &json!({"spec": {"gpus": null}}))?;
    wait_until_advertised(cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    for (name, data) in [
        ("more", json!({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1000G"})),
        ("away", json!({"CUDA_MPS_PIPE_DIRECTORY": "/nowhere", "NVIDIA_VISIBLE_DEVICES": "all"})),
    ] {
        let settings = json!({"metadata": {"name": name}, "data": data});
        bed.tenant.create(&format!("/api/v1/namespaces/{}/configmaps", scope.namespace), &settings)?;
    }
    for pod in others {
        bed.tenant.create(&bed.pods_path(), pod)?;
    }
    for pod in others {
        scope.wait_until_running(&text(&pod["metadata"]["name"]))?;
    }
    Ok(bed)
}

/// Returns the pods other than [`HOSTILE_POD`] and [`NEIGHBOUR_POD`].
fn other_pods() -> Vec<Value> {
    let script = format!(
        "for lie in {}; do cleave-client --lie $lie --hold 30 >/tmp/$lie 2>&1 & done; wait; {SLEEP_FOREVER_SCRIPT}",
        VIOLATIONS.join(" ")
    );
    let one = json!({SHARES_RESOURCE: 1});
    let with = |name: &str, limits: &Value, script: &str, field: &str, value: Value| {
        let mut pod = pod(name, limits, script);
        pod["spec"]["containers"][0][field] = value;
        pod
    };
    let from = |name: &str| json!([{"configMapRef": {"name": name}}]);
    // Keep this order: the kernel refuses the first attempt immediately, but the client of the
    // flood waits until its connections are closed.
    let user = format!(
        "cleave-client --lie root --hold 10 >/tmp/root 2>&1; \
         cleave-client --lie flood=200 --hold 60 >/tmp/flood=200 2>&1; {SLEEP_FOREVER_SCRIPT}"
    );
    let administrator = format!("cleave-client --lie pid=1 --hold 10 >/tmp/pid=1 2>&1; {SLEEP_FOREVER_SCRIPT}");
    let several = "exec cleave-client --processes 2 --allocate 6000 --hold forever";
    let junk = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=junk exec cleave-client --allocate 20000 --hold forever";
    let mut over = with(
        "over",
        &one,
        SLEEP_FOREVER_SCRIPT,
        "volumeMounts",
        json!([{"name": "over", "mountPath": DOOR_DIRECTORY}]),
    );
    over["spec"]["volumes"] = json!([{"name": "over", "emptyDir": {}}]);
    // Select the node, because the kubelet of another node may still have the resource, but without
    // devices. Such a kubelet rejects the pod.
    let mut none = pod("none", &json!({SHARES_RESOURCE: 0}), SLEEP_FOREVER_SCRIPT);
    none["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
    vec![
        pod(VIOLATING_POD, &one, &script),
        with("user", &one, &user, "securityContext", json!({"runAsUser": 1000, "runAsGroup": 1000})),
        with("capable", &one, &administrator, "securityContext", json!({"capabilities": {"add": ["SYS_ADMIN"]}})),
        with("more", &json!({SHARES_RESOURCE: 2}), SLEEP_FOREVER_SCRIPT, "envFrom", from("more")),
        with("away", &one, SLEEP_FOREVER_SCRIPT, "envFrom", from("away")),
        over,
        none,
        pod("junk", &one, junk),
        pod("several", &one, several),
    ]
}

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "another thread percentage, set in the container",
        expected: ExpectedOutcome::NoEffect,
        run: |bed| {
            let values =
                "for p in 100 1000 abc 0 -1; do CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$p cleave-client --once; done";
            check_limits(bed, HOSTILE_SHARES, &run_script(bed, HOSTILE_POD, values)?, 5)
        },
    },
    Attempt {
        name: "a higher memory limit, set in the container",
        expected: ExpectedOutcome::NoEffect,
        run: |bed| {
            let values =
                "for m in 0=1000G 0=99999999M; do CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=$m cleave-client --once; done";
            check_limits(bed, HOSTILE_SHARES, &run_script(bed, HOSTILE_POD, values)?, 2)
        },
    },
    Attempt {
        name: "higher limits by `envFrom` with a ConfigMap",
        expected: ExpectedOutcome::NoEffect,
        run: |bed| {
            let script =
                "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; cleave-client --once";
            let said = run_script(bed, "more", script)?;
            ensure!(said.starts_with("100 0=1000G"), "the container does not have the ConfigMap's values: {said}");
            check_limits(bed, 2, &said, 1)
        },
    },
    Attempt {
        name: "another pipe directory by `envFrom` with a ConfigMap",
        expected: REFUSED_WITHOUT_CONTEXT,
        run: |bed| {
            let said = run_script(bed, "away", "echo $CUDA_MPS_PIPE_DIRECTORY; cleave-client --once")?;
            ensure!(said.starts_with("/nowhere"), "the container does not have the ConfigMap's value: {said}");
            check_no_context(&said, 1)
        },
    },
    Attempt {
        name: "the pipe directory unset in the container",
        expected: REFUSED_WITHOUT_CONTEXT,
        run: |bed| {
            let said = run_script(bed, HOSTILE_POD, "unset CUDA_MPS_PIPE_DIRECTORY; cleave-client --once")?;
            check_no_context(&said, 1)
        },
    },
    Attempt {
        name: "the pipe directory set to another directory",
        expected: REFUSED_WITHOUT_CONTEXT,
        run: |bed| {
            let said = run_script(bed, HOSTILE_POD, "CUDA_MPS_PIPE_DIRECTORY=/nowhere cleave-client --once")?;
            check_no_context(&said, 1)
        },
    },
    Attempt { name: "a volume over the door's directory", expected: ExpectedOutcome::NoEffect, run: mount_over_door },
    Attempt {
        name: "a separate MPS daemon in the container",
        expected: REFUSED_WITHOUT_CONTEXT,
        run: start_own_daemon,
    },
    Attempt {
        name: "another GPU of the node, through its own door",
        expected: ExpectedOutcome::Refused(&["CUDA_ERROR_NO_DEVICE"]),
        run: |bed| run_on_other_gpus(bed, "NVIDIA_VISIBLE_DEVICES=all"),
    },
    Attempt {
        name: "another GPU of the node, without MPS",
        expected: REFUSED_WITHOUT_CONTEXT,
        run: |bed| run_on_other_gpus(bed, "NVIDIA_VISIBLE_DEVICES=all CUDA_MPS_PIPE_DIRECTORY=/nowhere"),
    },
    Attempt {
        name: "more memory than its shares have",
        expected: ExpectedOutcome::Refused(&["CUDA_ERROR_OUT_OF_MEMORY"]),
        run: |bed| {
            let said = run_script(bed, HOSTILE_POD, "cleave-client --allocate 30000")?;
            let errors = parse_json_lines(&said).into_iter().filter(|line| !line["error"].is_null());
            let errors: Vec<String> = errors.map(|line| line.to_string()).collect();
            Ok(if errors.is_empty() { Outcome::Succeeded(said) } else { Outcome::Refused(errors) })
        },
    },
    Attempt {
        name: "more processes than the policy allows",
        expected: REFUSED_WITHOUT_CONTEXT,
        run: start_too_many_processes,
    },
    Attempt {
        name: "a door in a pod without shares",
        expected: ExpectedOutcome::Refused(&["No such file"]),
        run: |bed| Ok(Outcome::Refused(vec![run_script(bed, "none", "ls /run/cleave-mps/control")?])),
    },
    Attempt {
        name: "a new file in the door's directory",
        expected: REFUSED_AS_READ_ONLY,
        run: |bed| Ok(Outcome::Refused(vec![run_script(bed, HOSTILE_POD, "touch $CUDA_MPS_PIPE_DIRECTORY/mine")?])),
    },
    Attempt {
        name: "replacement of the door by another socket",
        expected: REFUSED_AS_READ_ONLY,
        run: |bed| {
            let remove = run_script(bed, HOSTILE_POD, "cd $CUDA_MPS_PIPE_DIRECTORY; rm control")?;
            Ok(Outcome::Refused(vec![
                remove,
                run_script(bed, HOSTILE_POD, "cd $CUDA_MPS_PIPE_DIRECTORY; mv control mine")?,
            ]))
        },
    },
    Attempt {
        name: "the door's directory remounted",
        expected: REFUSED_AS_READ_ONLY,
        run: |bed| {
            // All commands that change mounts must fail. The last command shows whether the
            // directory is still read-only.
            let mounts = "cd $CUDA_MPS_PIPE_DIRECTORY; { mount -o remount,rw,bind none $PWD; umount -l $PWD; \
                unshare -m mount -o remount,rw,bind none $PWD; } >/dev/null 2>&1; touch $CUDA_MPS_PIPE_DIRECTORY/mine";
            Ok(Outcome::Refused(vec![run_script(bed, HOSTILE_POD, mounts)?]))
        },
    },
    Attempt {
        name: "the sockets of other pods, of the daemons and of the MPS host, by their paths",
        expected: ExpectedOutcome::Refused(&["No such file or directory"]),
        run: connect_to_all_sockets,
    },
    Attempt {
        name: "signals to the neighbour's program and to the MPS server",
        expected: ExpectedOutcome::Refused(&["No such process"]),
        run: |bed| {
            let GpuProcesses { server, neighbour } = read_processes(bed)?;
            let kill = |pid: u64| run_script(bed, HOSTILE_POD, &format!("kill -9 {pid}"));
            Ok(Outcome::Refused(vec![kill(server)?, kill(neighbour)?]))
        },
    },
    Attempt {
        name: "an administrator's queries at the door",
        expected: ExpectedOutcome::Refused(&["no answer"]),
        run: |bed| {
            let server = read_processes(bed)?.server;
            let asked = ["get_server_list", "ps", "lspart", "get_default_active_thread_percentage"].map(str::to_owned);
            send_admin_commands(bed, &[&asked[..], &[format!("get_client_list {server}")]].concat())
        },
    },
    Attempt {
        name: "an administrator's limits at the door",
        expected: ExpectedOutcome::Refused(&["no answer"]),
        run: |bed| {
            let server = read_processes(bed)?.server;
            let set = [
                "set_default_active_thread_percentage 100".to_owned(),
                "set_default_device_pinned_mem_limit 0 80G".to_owned(),
                format!("set_active_thread_percentage {server} 100"),
                format!("set_device_pinned_mem_limit {server} 0 80G"),
                "set_default_client_priority 0".to_owned(),
            ];
            let refused = send_admin_commands(bed, &set)?;
            let still = check_limits(bed, HOSTILE_SHARES, &run_script(bed, HOSTILE_POD, "cleave-client --once")?, 1)?;
            Ok(if matches!(still, Outcome::NoEffect(_)) { refused } else { still })
        },
    },
    Attempt {
        name: "an administrator's commands at the door that end the neighbour, the server and the daemon",
        expected: ExpectedOutcome::Refused(&["no answer"]),
        run: |bed| {
            let GpuProcesses { server, neighbour } = read_processes(bed)?;
            let end = [
                format!("terminate_client {server} {neighbour}"),
                format!("shutdown_server {server}"),
                format!("shutdown_server {server} -f"),
                "quit".to_owned(),
                "quit -t 0".to_owned(),
                "start_server -uid 0".to_owned(),
            ];
            let refused = send_admin_commands(bed, &end)?;
            ensure!(read_processes(bed)?.server == server, "the MPS server was replaced");
            Ok(refused)
        },
    },
    Attempt {
        name: "an incomplete handshake",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["stall=0", "stall=4", "stall=9"]),
    },
    Attempt {
        name: "a handshake with invalid words",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["garbage", "kind=3", "short-kind"]),
    },
    Attempt {
        name: "a handshake that is too long",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["huge", "long-command"]),
    },
    Attempt {
        name: "two introductions on one connection",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["twice"]),
    },
    Attempt {
        name: "descriptors with the introduction",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["descriptors"]),
    },
    Attempt {
        name: "another process's PID in the introduction",
        expected: REFUSED_BY_THE_KERNEL,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["pid=1"]),
    },
    Attempt {
        name: "another process's PID, with CAP_SYS_ADMIN",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, "capable", &["pid=1"]),
    },
    Attempt {
        name: "root's UID in the introduction of another user",
        expected: REFUSED_BY_THE_KERNEL,
        run: |bed| wait_for_violations(bed, "user", &["root"]),
    },
    Attempt {
        name: "an administrator's command after a client's introduction",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["administrator-after-client"]),
    },
    Attempt {
        name: "a reply that the client never reads",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["unread"]),
    },
    Attempt {
        name: "no further message after the server's socket is received",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["mute=0", "mute=1", "mute=2"]),
    },
    Attempt {
        name: "a last message of the handshake that is missing or wrong",
        expected: REFUSED_AS_CLOSED,
        run: |bed| wait_for_violations(bed, VIOLATING_POD, &["no-last-word", "last-word=7"]),
    },
    Attempt {
        name: "exit of a client that has the server's socket",
        expected: ExpectedOutcome::NoEffect,
        run: exit_during_handshake,
    },
    Attempt {
        name: "a socket to the server that is shut down",
        expected: ExpectedOutcome::NoEffect,
        run: shut_down_during_handshake,
    },
    Attempt {
        name: "two hundred simultaneous connections that send nothing",
        expected: REFUSED_AS_CLOSED,
        run: |bed| {
            check_neighbour_starts(bed)?;
            wait_for_violations(bed, "user", &["flood=200"])
        },
    },
    Attempt {
        name: "a memory limit that MPS does not understand, set in the container",
        expected: ExpectedOutcome::Found("MemoryExceeded"),
        run: |bed| wait_for_finding(bed, "junk", "MemoryExceeded"),
    },
    Attempt {
        name: "several processes that each use the pod's memory",
        expected: ExpectedOutcome::Found("MemoryExceeded"),
        run: |bed| wait_for_finding(bed, "several", "MemoryExceeded"),
    },
    Attempt {
        name: "another pod's door, by a volume with the node's directory",
        expected: ExpectedOutcome::Found("NoShare"),
        run: use_neighbours_door,
    },
];

/// Runs a script in a pod's container. Returns the script's standard output, followed by its
/// standard error.
pub(super) fn run_script(bed: &TestBed<'_>, pod: &str, script: &str) -> Result<String> {
    let output = program_output("kubectl", &["-n", &bed.scope.namespace, "exec", pod, "--", "sh", "-c", script])?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
}

/// Checks that `printed` contains the reports of `programs` programs, and that each program uses
/// MPS with the SMs and at most the memory of `shares` shares.
pub(super) fn check_limits(bed: &TestBed<'_>, shares: u32, printed: &str, programs: usize) -> Result<Outcome> {
    let node = bed.scope.cluster.gpu_node(NODE)?;
    let total = node["status"]["gpus"][0]["memoryMib"].as_u64().context("no memory in the status")?;
    let (sms, memory) = limits_of_shares(shares, total);
    let reports = parse_json_lines(printed);
    ensure!(reports.len() == programs, "expected reports of {programs} programs: {printed}");
    let is_within = |line: &&Value| {
        line["viaMps"] == true
            && line["sms"] == sms.0
            && line["limitMiB"].as_u64().is_some_and(|limit| limit <= memory.0)
    };
    match reports.iter().find(|line| !is_within(line)) {
        Some(more) => Ok(Outcome::Succeeded(more.to_string())),
        None => Ok(Outcome::NoEffect(format!("the limits are {} SMs and {} MiB", sms.0, memory.0))),
    }
}

/// Checks that `printed` contains the reports of `programs` programs, and that no program could
/// create a CUDA context.
fn check_no_context(printed: &str, programs: usize) -> Result<Outcome> {
    let reports = parse_json_lines(printed);
    ensure!(reports.len() == programs, "expected reports of {programs} programs: {printed}");
    match reports.iter().find(|line| line["error"].is_null()) {
        Some(context) => Ok(Outcome::Succeeded(context.to_string())),
        None => Ok(Outcome::Refused(reports.iter().map(|line| text(&line["name"])).collect())),
    }
}

/// Checks that the neighbour can start another program, and that this program has the neighbour's
/// limits.
fn check_neighbour_starts(bed: &TestBed<'_>) -> Result<()> {
    let outcome = check_limits(bed, NEIGHBOUR_SHARES, &run_script(bed, NEIGHBOUR_POD, "cleave-client --once")?, 1)?;
    ensure!(matches!(outcome, Outcome::NoEffect(_)), "the neighbour's next program: {outcome:?}");
    Ok(())
}

/// Waits until a pod has an allocation, and returns the GPU of the allocation.
fn gpu_of_pod(bed: &TestBed<'_>, pod: &str) -> Result<String> {
    wait_for(&format!("the node reports the allocation of {pod}"), WAIT_TIMEOUT, || {
        let allocated = allocations(bed.scope.cluster, &bed.scope, pod)?;
        Ok(allocated.first().map(|allocation| text(&allocation["device"])))
    })
}

/// Tries to run a program on each of the node's other GPUs, with these environment variables.
fn run_on_other_gpus(bed: &TestBed<'_>, environment: &str) -> Result<Outcome> {
    let own = gpu_of_pod(bed, HOSTILE_POD)?;
    let node = bed.scope.cluster.gpu_node(NODE)?;
    let gpus = node["status"]["gpus"].as_array().into_iter().flatten().map(|gpu| text(&gpu["uuid"]));
    let others: Vec<String> = gpus.filter(|uuid| *uuid != own).collect();
    let script = others.iter().fold(String::new(), |mut script, uuid| {
        let _ = write!(script, "{environment} CUDA_VISIBLE_DEVICES={uuid} cleave-client --once; ");
        script
    });
    ensure!(!others.is_empty(), "there is no other GPU");
    check_no_context(&run_script(bed, HOSTILE_POD, &script)?, others.len())
}

/// Starts an MPS daemon in the pod. The program `cleave-client` acts as the simulated MPS daemon or
/// MPS server if its file has the name of that program.
fn start_own_daemon(bed: &TestBed<'_>) -> Result<Outcome> {
    let said = run_script(
        bed,
        HOSTILE_POD,
        "mkdir -p /tmp/own /tmp/pipe
        cp /usr/bin/cleave-client /tmp/own/nvidia-cuda-mps-control
        cp /usr/bin/cleave-client /tmp/own/nvidia-cuda-mps-server
        export CUDA_MPS_PIPE_DIRECTORY=/tmp/pipe CUDA_MPS_LOG_DIRECTORY=/tmp/log
        /tmp/own/nvidia-cuda-mps-control -d </dev/null >/dev/null 2>&1 && echo it listens
        cleave-client --once
        /tmp/own/nvidia-cuda-mps-control quit >/dev/null 2>&1",
    )?;
    ensure!(said.contains("it listens"), "the pod's daemon does not start: {said}");
    check_no_context(&said, 1)
}

/// Mounts a volume at the door's directory. The volume may hide the door, or the door's mount may
/// hide the volume. In both cases, the pod must not be able to use the GPU outside MPS.
fn mount_over_door(bed: &TestBed<'_>) -> Result<Outcome> {
    let said = run_script(bed, "over", "cleave-client --once")?;
    match check_no_context(&said, 1)? {
        Outcome::Refused(errors) => {
            ensure!(errors == ["CUDA_ERROR_DEVICE_UNAVAILABLE"], "{errors:?}");
            Ok(Outcome::NoEffect("the pod has no context, and its GPU is unchanged".to_owned()))
        }
        _ => check_limits(bed, 1, &said, 1),
    }
}

/// Starts as many processes as the policy permits, and then one more.
fn start_too_many_processes(bed: &TestBed<'_>) -> Result<Outcome> {
    let hold = format!(
        "cleave-client --processes {MAX_CLIENTS} --hold forever --handle-sigterm >/tmp/many 2>&1 </dev/null & \
         echo $! >/tmp/many.pid"
    );
    run_script(bed, HOSTILE_POD, &hold)?;
    let many = wait_for("the pod has its maximum of processes", WAIT_TIMEOUT, || {
        let many = run_script(bed, HOSTILE_POD, "cat /tmp/many")?;
        Ok((parse_json_lines(&many).len() == MAX_CLIENTS).then_some(many))
    })?;
    check_limits(bed, HOSTILE_SHARES, &many, MAX_CLIENTS)?;
    let outcome = check_no_context(&run_script(bed, HOSTILE_POD, "cleave-client --once")?, 1);
    run_script(bed, HOSTILE_POD, "kill $(cat /tmp/many.pid)")?;
    wait_until("the pod can start another process", || {
        let said = run_script(bed, HOSTILE_POD, "cleave-client --once")?;
        Ok(matches!(check_limits(bed, HOSTILE_SHARES, &said, 1)?, Outcome::NoEffect(_)))
    })?;
    outcome
}

/// Tries to connect to all sockets in Cleave's directory on the node, by paths that might reach the
/// directory from the container.
fn connect_to_all_sockets(bed: &TestBed<'_>) -> Result<Outcome> {
    let found = on_node(NODE, &["find", "/run/cleave", "-type", "s"])?;
    let found: Vec<&str> = found.split_whitespace().collect();
    ensure!(found.len() > 3, "found too few sockets: {found:?}");
    let mut script = String::new();
    for path in &found {
        for root in ["", "/proc/1/root", "/proc/self/root/..", "/run/cleave-mps/../.."] {
            let _ = writeln!(script, "cleave-client --admin get_server_list --socket {root}{path}");
        }
    }
    let said = run_script(bed, HOSTILE_POD, &script)?;
    if let Some(reached) = parse_json_lines(&said).first() {
        return Ok(Outcome::Succeeded(reached.to_string()));
    }
    let refused: Vec<String> =
        said.lines().filter(|line| line.contains("os error")).map(|line| line.trim().to_owned()).collect();
    ensure!(refused.len() == 4 * found.len(), "{} of {} paths were refused: {said}", refused.len(), 4 * found.len());
    Ok(Outcome::Refused(refused))
}

/// PIDs, in the node's PID namespace, of processes on the GPU of [`HOSTILE_POD`].
struct GpuProcesses {
    server: u64,
    neighbour: u64,
}

/// Reads the status file of the MPS host.
fn read_host_status() -> Result<Value> {
    Ok(serde_json::from_str(&on_node(NODE, &["cat", "/run/cleave/mps/status.json"])?)?)
}

/// Reads the PIDs from the status file of the MPS host.
fn read_processes(bed: &TestBed<'_>) -> Result<GpuProcesses> {
    let (device, door) = (gpu_of_pod(bed, NEIGHBOUR_POD)?, neighbour_allocation_id(bed)?);
    let daemon = read_host_status()?["daemons"][&device].clone();
    let clients = daemon["clients"].as_array().cloned().unwrap_or_default();
    let neighbour = clients.iter().find(|client| client["allocation"] == door.as_str());
    Ok(GpuProcesses {
        server: daemon["serverPid"].as_u64().context("no server")?,
        neighbour: neighbour.and_then(|client| client["pid"].as_u64()).context("the neighbour is not a client")?,
    })
}

/// Returns the id of the neighbour's allocation, which is also the name of its door's directory on
/// the node.
fn neighbour_allocation_id(bed: &TestBed<'_>) -> Result<String> {
    let mounts = run_script(bed, NEIGHBOUR_POD, "cat /proc/self/mountinfo")?;
    let mount = mounts.lines().find(|line| line.contains(&format!(" {DOOR_DIRECTORY} "))).context("no door")?;
    let root = mount.split(' ').nth(3).and_then(|root| root.rsplit('/').next()).context("no root of the mount")?;
    Ok(root.to_owned())
}

/// Sends commands of an MPS administrator to the door of [`HOSTILE_POD`].
fn send_admin_commands(bed: &TestBed<'_>, commands: &[String]) -> Result<Outcome> {
    let script = commands.iter().fold(String::new(), |mut script, command| {
        let _ = writeln!(script, "cleave-client --admin '{command}'");
        script
    });
    let said = run_script(bed, HOSTILE_POD, &script)?;
    let replies = parse_json_lines(&said);
    ensure!(replies.len() == commands.len(), "{commands:?}: {said}");
    match replies.iter().find(|reply| !reply["reply"].is_null()) {
        Some(answered) => Ok(Outcome::Succeeded(answered.to_string())),
        None => Ok(Outcome::Refused(commands.iter().map(|command| format!("{command}: no answer; ")).collect())),
    }
}

/// Waits for the outcomes of the protocol violations that a pod attempts when it starts.
fn wait_for_violations(bed: &TestBed<'_>, pod: &str, violations: &[&str]) -> Result<Outcome> {
    let mut outcomes = Vec::new();
    for violation in violations {
        let outcome = wait_for(&format!("{pod} has the outcome of {violation}"), WAIT_TIMEOUT, || {
            let printed = run_script(bed, pod, &format!("cat /tmp/{violation}"))?;
            Ok((!printed.trim().is_empty()).then_some(printed))
        })?;
        if outcome.contains("\"open\"") {
            return Ok(Outcome::Succeeded(outcome));
        }
        // If the door closes the connection early, the client cannot send the remaining packets.
        let ended = outcome.contains("failed to connect to");
        outcomes.push(if ended { format!("closed: {outcome}") } else { outcome });
    }
    Ok(Outcome::Refused(outcomes))
}

/// Runs clients that exit while they have an open socket to the MPS server.
fn exit_during_handshake(bed: &TestBed<'_>) -> Result<Outcome> {
    check_same_server_after(bed, (0..4).map(|words| format!("vanish={words}")))
}

/// Runs clients that shut down their socket to the MPS server.
fn shut_down_during_handshake(bed: &TestBed<'_>) -> Result<Outcome> {
    check_same_server_after(bed, (0..6).map(|step| format!("shutdown={step}")))
}

/// Runs protocol violations. Checks after each violation that the neighbour can start another
/// program, and at the end that the MPS server was not replaced.
fn check_same_server_after(bed: &TestBed<'_>, violations: impl Iterator<Item = String>) -> Result<Outcome> {
    let server = read_processes(bed)?.server;
    for violation in violations {
        run_script(bed, VIOLATING_POD, &format!("cleave-client --lie {violation}"))?;
        check_neighbour_starts(bed)?;
    }
    let now = read_processes(bed)?.server;
    ensure!(now == server, "the server {server} was replaced by {now}");
    Ok(Outcome::NoEffect("the neighbour's next programs start on the same server".to_owned()))
}

/// Waits until the agent reports this finding about a pod.
fn wait_for_finding(bed: &TestBed<'_>, pod: &str, kind: &'static str) -> Result<Outcome> {
    wait_for_condition_and_event(bed.scope.cluster, &bed.scope, pod, kind)?;
    Ok(Outcome::Found(kind))
}

/// Mounts the node's directory of doors, and uses the neighbour's door. A pod that can mount this
/// directory has the permissions of root on the node, but the agent still reports that the pod uses
/// the GPU.
fn use_neighbours_door(bed: &TestBed<'_>) -> Result<Outcome> {
    let script =
        format!("CUDA_MPS_PIPE_DIRECTORY=/doors/{} exec cleave-client --hold forever", neighbour_allocation_id(bed)?);
    let mut thief = pod("thief", &json!({}), &script);
    thief["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
    thief["spec"]["volumes"] = json!([{"name": "doors", "hostPath": {"path": "/run/cleave/alloc"}}]);
    thief["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "doors", "mountPath": "/doors"}]);
    thief["spec"]["containers"][0]["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    bed.tenant.create(&bed.pods_path(), &thief)?;
    let report = bed.scope.client_report("thief")?;
    ensure!(report["viaMps"] == true, "the neighbour's door does not accept it: {report}");
    let outcome = wait_for_finding(bed, "thief", "NoShare")?;
    bed.scope.delete_pod("thief", 0)?;
    Ok(outcome)
}
