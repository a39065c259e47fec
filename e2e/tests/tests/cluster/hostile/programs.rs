//! Programs in pods with shares: what they set, where they connect, what they say at the door, and
//! what they take.
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, PATIENCE, Scope, on_node, output, pod, text, wait_for, wait_until};
use serde_json::{Value, json};

use super::{Attempt, Expected, Ground, Outcome, lines};
use crate::shares::worth;
use crate::tenants::found;
use crate::{GPUS, HOLD, NODE, SHARES, allocations, offers};

/// Tries what can be tried by hand, with three shares.
const HOSTILE: &str = "hostile";
const HOSTILES: u32 = 3;
/// Computes on the same GPU, with two shares.
pub(super) const NEIGHBOUR: &str = "neighbour";
const NEIGHBOURS: u32 = 2;
/// Lies in its handshakes, all at once, while others do the rest.
const LIAR: &str = "liar";
/// Processes that the policy lets a pod have.
const CLIENTS: usize = 8;
const STAY: &str = "exec sleep infinity";
/// Where a container sees its door.
const FOLDER: &str = "/run/cleave-mps";

/// What [`LIAR`] says.
const LIES: [&str; 18] = [
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

const CLOSED: Expected = Expected::Refused(&["closed"]);
const BY_THE_KERNEL: Expected = Expected::Refused(&["\"outcome\":\"refused\""]);
/// What CUDA says where `EXCLUSIVE_PROCESS` lets a program have no context.
const NO_CONTEXT: Expected = Expected::Refused(&["CUDA_ERROR_DEVICE_UNAVAILABLE"]);
const READ_ONLY: Expected = Expected::Refused(&["Read-only file system"]);

/// Ten shares of each GPU, and the pods that attempts are made from, beside the neighbour.
pub(super) fn ground(cluster: &Cluster) -> Result<Ground<'_>> {
    let scope = Scope::new(cluster, "hostile")?;
    let spec = json!({
        "nodeSelector": {"kubernetes.io/hostname": NODE}, "mode": "Mps",
        "mps": {"units": 10, "threads": "Strict", "clients": {"max": CLIENTS}},
    });
    scope.policy("hostile", &spec)?;
    offers(cluster, SHARES, 10 * GPUS)?;
    let ground = Ground::new(scope)?;
    let scope = &ground.scope;
    // These two first: they are to be on one GPU.
    scope.pod(HOSTILE, &json!({SHARES: HOSTILES}), STAY)?;
    scope.running(HOSTILE)?;
    scope.pod(NEIGHBOUR, &json!({SHARES: NEIGHBOURS}), HOLD)?;
    scope.seen(NEIGHBOUR)?;
    ensure!(device(&ground, HOSTILE)? == device(&ground, NEIGHBOUR)?, "they are on two GPUs");
    for (name, data) in [
        ("more", json!({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1000G"})),
        ("away", json!({"CUDA_MPS_PIPE_DIRECTORY": "/nowhere", "NVIDIA_VISIBLE_DEVICES": "all"})),
    ] {
        let settings = json!({"metadata": {"name": name}, "data": data});
        ground.tenant.create(&format!("/api/v1/namespaces/{}/configmaps", scope.namespace), &settings)?;
    }
    for pod in others() {
        ground.tenant.create(&ground.pods(), &pod)?;
    }
    for pod in others() {
        scope.running(&text(&pod["metadata"]["name"]))?;
    }
    Ok(ground)
}

/// All but the two that are there first.
fn others() -> Vec<Value> {
    let lies = format!(
        "for lie in {}; do cleave-client --lie $lie --hold 30 >/tmp/$lie 2>&1 & done; wait; {STAY}",
        LIES.join(" ")
    );
    let one = json!({SHARES: 1});
    let with = |name: &str, limits: &Value, script: &str, field: &str, value: Value| {
        let mut pod = pod(name, limits, script);
        pod["spec"]["containers"][0][field] = value;
        pod
    };
    let from = |name: &str| json!([{"configMapRef": {"name": name}}]);
    // The kernel's word on the first comes at once; the flood's lie waits for its connections to be
    // closed.
    let user = format!(
        "cleave-client --lie root --hold 10 >/tmp/root 2>&1; \
         cleave-client --lie flood=200 --hold 60 >/tmp/flood=200 2>&1; {STAY}"
    );
    let administrator = format!("cleave-client --lie pid=1 --hold 10 >/tmp/pid=1 2>&1; {STAY}");
    let several = "exec cleave-client --processes 2 --allocate 6000 --hold forever";
    let junk = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=junk exec cleave-client --allocate 20000 --hold forever";
    let mut over = with("over", &one, STAY, "volumeMounts", json!([{"name": "over", "mountPath": FOLDER}]));
    over["spec"]["volumes"] = json!([{"name": "over", "emptyDir": {}}]);
    vec![
        pod(LIAR, &one, &lies),
        with("user", &one, &user, "securityContext", json!({"runAsUser": 1000, "runAsGroup": 1000})),
        with("capable", &one, &administrator, "securityContext", json!({"capabilities": {"add": ["SYS_ADMIN"]}})),
        with("more", &json!({SHARES: 2}), STAY, "envFrom", from("more")),
        with("away", &one, STAY, "envFrom", from("away")),
        over,
        pod("none", &json!({SHARES: 0}), STAY),
        pod("junk", &one, junk),
        pod("several", &one, several),
    ]
}

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "another thread percentage, set in the container",
        expected: Expected::NoEffect,
        tried: |ground| {
            let values =
                "for p in 100 1000 abc 0 -1; do CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$p cleave-client --once; done";
            within(ground, HOSTILES, &said(ground, HOSTILE, values)?, 5)
        },
    },
    Attempt {
        name: "a higher memory limit, set in the container",
        expected: Expected::NoEffect,
        tried: |ground| {
            let values =
                "for m in 0=1000G 0=99999999M; do CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=$m cleave-client --once; done";
            within(ground, HOSTILES, &said(ground, HOSTILE, values)?, 2)
        },
    },
    Attempt {
        name: "higher limits from a ConfigMap as a whole",
        expected: Expected::NoEffect,
        tried: |ground| {
            let script =
                "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; cleave-client --once";
            let said = said(ground, "more", script)?;
            ensure!(said.starts_with("100 0=1000G"), "the ConfigMap's are not those that the container has: {said}");
            within(ground, 2, &said, 1)
        },
    },
    Attempt {
        name: "another pipe directory from a ConfigMap as a whole",
        expected: NO_CONTEXT,
        tried: |ground| {
            let said = said(ground, "away", "echo $CUDA_MPS_PIPE_DIRECTORY; cleave-client --once")?;
            ensure!(said.starts_with("/nowhere"), "the ConfigMap's is not the one that the container has: {said}");
            without_context(&said, 1)
        },
    },
    Attempt {
        name: "the pipe directory unset in the container",
        expected: NO_CONTEXT,
        tried: |ground| {
            let said = said(ground, HOSTILE, "unset CUDA_MPS_PIPE_DIRECTORY; cleave-client --once")?;
            without_context(&said, 1)
        },
    },
    Attempt {
        name: "the pipe directory elsewhere",
        expected: NO_CONTEXT,
        tried: |ground| {
            let said = said(ground, HOSTILE, "CUDA_MPS_PIPE_DIRECTORY=/nowhere cleave-client --once")?;
            without_context(&said, 1)
        },
    },
    Attempt { name: "a volume over the door's folder", expected: Expected::NoEffect, tried: volume_over },
    Attempt { name: "an MPS daemon of its own", expected: NO_CONTEXT, tried: own_daemon },
    Attempt {
        name: "another GPU of the node, through its own door",
        expected: Expected::Refused(&["CUDA_ERROR_NO_DEVICE"]),
        tried: |ground| other_gpus(ground, "NVIDIA_VISIBLE_DEVICES=all"),
    },
    Attempt {
        name: "another GPU of the node, around MPS",
        expected: NO_CONTEXT,
        tried: |ground| other_gpus(ground, "NVIDIA_VISIBLE_DEVICES=all CUDA_MPS_PIPE_DIRECTORY=/nowhere"),
    },
    Attempt {
        name: "more memory than its shares have",
        expected: Expected::Refused(&["CUDA_ERROR_OUT_OF_MEMORY"]),
        tried: |ground| {
            let said = said(ground, HOSTILE, "cleave-client --allocate 30000")?;
            let errors = lines(&said).into_iter().filter(|line| !line["error"].is_null());
            let errors: Vec<String> = errors.map(|line| line.to_string()).collect();
            Ok(if errors.is_empty() { Outcome::Succeeded(said) } else { Outcome::Refused(errors) })
        },
    },
    Attempt { name: "more processes than the policy lets a pod have", expected: NO_CONTEXT, tried: too_many },
    Attempt {
        name: "no share, and the door all the same",
        expected: Expected::Refused(&["No such file"]),
        tried: |ground| Ok(Outcome::Refused(vec![said(ground, "none", "ls /run/cleave-mps/control")?])),
    },
    Attempt {
        name: "files in the door's folder",
        expected: READ_ONLY,
        tried: |ground| Ok(Outcome::Refused(vec![said(ground, HOSTILE, "touch $CUDA_MPS_PIPE_DIRECTORY/mine")?])),
    },
    Attempt {
        name: "another socket in the place of the door",
        expected: READ_ONLY,
        tried: |ground| {
            let remove = said(ground, HOSTILE, "cd $CUDA_MPS_PIPE_DIRECTORY; rm control")?;
            Ok(Outcome::Refused(vec![remove, said(ground, HOSTILE, "cd $CUDA_MPS_PIPE_DIRECTORY; mv control mine")?]))
        },
    },
    Attempt {
        name: "the door's folder mounted anew",
        expected: READ_ONLY,
        tried: |ground| {
            // None may succeed; the last shows that none has.
            let mounts = "cd $CUDA_MPS_PIPE_DIRECTORY; { mount -o remount,rw,bind none $PWD; umount -l $PWD; \
                unshare -m mount -o remount,rw,bind none $PWD; } >/dev/null 2>&1; touch $CUDA_MPS_PIPE_DIRECTORY/mine";
            Ok(Outcome::Refused(vec![said(ground, HOSTILE, mounts)?]))
        },
    },
    Attempt {
        name: "the sockets of others, of the daemons and of the MPS host, by their paths",
        expected: Expected::Refused(&["No such file or directory"]),
        tried: sockets,
    },
    Attempt {
        name: "signals to the neighbour's program and to the MPS server",
        expected: Expected::Refused(&["No such process"]),
        tried: |ground| {
            let Processes { server, neighbour } = processes(ground)?;
            let kill = |pid: u64| said(ground, HOSTILE, &format!("kill -9 {pid}"));
            Ok(Outcome::Refused(vec![kill(server)?, kill(neighbour)?]))
        },
    },
    Attempt {
        name: "an administrator's questions at the door",
        expected: Expected::Refused(&["no answer"]),
        tried: |ground| {
            let server = processes(ground)?.server;
            let asked = ["get_server_list", "ps", "lspart", "get_default_active_thread_percentage"].map(str::to_owned);
            administrator(ground, &[&asked[..], &[format!("get_client_list {server}")]].concat())
        },
    },
    Attempt {
        name: "an administrator's limits at the door",
        expected: Expected::Refused(&["no answer"]),
        tried: |ground| {
            let server = processes(ground)?.server;
            let set = [
                "set_default_active_thread_percentage 100".to_owned(),
                "set_default_device_pinned_mem_limit 0 80G".to_owned(),
                format!("set_active_thread_percentage {server} 100"),
                format!("set_device_pinned_mem_limit {server} 0 80G"),
                "set_default_client_priority 0".to_owned(),
            ];
            let refused = administrator(ground, &set)?;
            let still = within(ground, HOSTILES, &said(ground, HOSTILE, "cleave-client --once")?, 1)?;
            Ok(if matches!(still, Outcome::NoEffect(_)) { refused } else { still })
        },
    },
    Attempt {
        name: "an administrator's end of the neighbour, of the server and of the daemon at the door",
        expected: Expected::Refused(&["no answer"]),
        tried: |ground| {
            let Processes { server, neighbour } = processes(ground)?;
            let end = [
                format!("terminate_client {server} {neighbour}"),
                format!("shutdown_server {server}"),
                format!("shutdown_server {server} -f"),
                "quit".to_owned(),
                "quit -t 0".to_owned(),
                "start_server -uid 0".to_owned(),
            ];
            let refused = administrator(ground, &end)?;
            ensure!(processes(ground)?.server == server, "there is another server");
            Ok(refused)
        },
    },
    Attempt {
        name: "a handshake cut short",
        expected: CLOSED,
        tried: |ground| lied(ground, LIAR, &["stall=0", "stall=4", "stall=9"]),
    },
    Attempt {
        name: "a handshake of other words",
        expected: CLOSED,
        tried: |ground| lied(ground, LIAR, &["garbage", "kind=3", "short-kind"]),
    },
    Attempt {
        name: "a handshake that is too long",
        expected: CLOSED,
        tried: |ground| lied(ground, LIAR, &["huge", "long-command"]),
    },
    Attempt {
        name: "two introductions on one connection",
        expected: CLOSED,
        tried: |ground| lied(ground, LIAR, &["twice"]),
    },
    Attempt {
        name: "descriptors with the introduction",
        expected: CLOSED,
        tried: |ground| lied(ground, LIAR, &["descriptors"]),
    },
    Attempt {
        name: "another process's pid in the introduction",
        expected: BY_THE_KERNEL,
        tried: |ground| lied(ground, LIAR, &["pid=1"]),
    },
    Attempt {
        name: "another process's pid, with CAP_SYS_ADMIN",
        expected: CLOSED,
        tried: |ground| lied(ground, "capable", &["pid=1"]),
    },
    Attempt {
        name: "root's uid in the introduction of another user",
        expected: BY_THE_KERNEL,
        tried: |ground| lied(ground, "user", &["root"]),
    },
    Attempt {
        name: "an administrator's command after a client's introduction",
        expected: CLOSED,
        tried: |ground| lied(ground, LIAR, &["administrator-after-client"]),
    },
    Attempt {
        name: "an answer that is never taken",
        expected: CLOSED,
        tried: |ground| lied(ground, LIAR, &["unread"]),
    },
    Attempt {
        name: "silence with the server's socket in hand",
        expected: CLOSED,
        tried: |ground| lied(ground, LIAR, &["mute=0", "mute=1", "mute=2"]),
    },
    Attempt {
        name: "a last word that is missing or wrong",
        expected: CLOSED,
        tried: |ground| lied(ground, LIAR, &["no-last-word", "last-word=7"]),
    },
    Attempt { name: "death with the server's socket in hand", expected: Expected::NoEffect, tried: vanish },
    Attempt { name: "a socket to the server that is shut down", expected: Expected::NoEffect, tried: shut_down },
    Attempt {
        name: "two hundred connections at once, and silence",
        expected: CLOSED,
        tried: |ground| {
            neighbour_starts(ground)?;
            lied(ground, "user", &["flood=200"])
        },
    },
    Attempt {
        name: "a memory limit that MPS does not understand, set in the container",
        expected: Expected::Found("MemoryExceeded"),
        tried: |ground| told(ground, "junk", "MemoryExceeded"),
    },
    Attempt {
        name: "several processes with a pod's memory each",
        expected: Expected::Found("MemoryExceeded"),
        tried: |ground| told(ground, "several", "MemoryExceeded"),
    },
    Attempt {
        name: "another pod's door, by a volume with the node's folder",
        expected: Expected::Found("NoShare"),
        tried: anothers_door,
    },
];

/// What a command in a pod's container prints, errors included.
pub(super) fn said(ground: &Ground<'_>, pod: &str, script: &str) -> Result<String> {
    let output = output("kubectl", &["-n", &ground.scope.namespace, "exec", pod, "--", "sh", "-c", script])?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
}

/// That so many programs saw no more than so many shares.
pub(super) fn within(ground: &Ground<'_>, shares: u32, said: &str, programs: usize) -> Result<Outcome> {
    let node = ground.scope.cluster.gpunode(NODE)?;
    let total = node["status"]["gpus"][0]["memoryMib"].as_u64().context("no memory in the status")?;
    let (sms, memory) = worth(shares, total);
    let seen = lines(said);
    ensure!(seen.len() == programs, "{programs} programs were to say what they see: {said}");
    let keeps = |line: &&Value| {
        line["viaMps"] == true
            && line["sms"] == sms.0
            && line["limitMiB"].as_u64().is_some_and(|limit| limit <= memory.0)
    };
    match seen.iter().find(|line| !keeps(line)) {
        Some(more) => Ok(Outcome::Succeeded(more.to_string())),
        None => Ok(Outcome::NoEffect(format!("it sees {} SMs and {} MiB", sms.0, memory.0))),
    }
}

/// That so many programs got no context.
fn without_context(said: &str, programs: usize) -> Result<Outcome> {
    let seen = lines(said);
    ensure!(seen.len() == programs, "{programs} programs were to say what they see: {said}");
    match seen.iter().find(|line| line["error"].is_null()) {
        Some(context) => Ok(Outcome::Succeeded(context.to_string())),
        None => Ok(Outcome::Refused(seen.iter().map(|line| text(&line["name"])).collect())),
    }
}

/// That the neighbour can start another program, with its own limits.
fn neighbour_starts(ground: &Ground<'_>) -> Result<()> {
    let outcome = within(ground, NEIGHBOURS, &said(ground, NEIGHBOUR, "cleave-client --once")?, 1)?;
    ensure!(matches!(outcome, Outcome::NoEffect(_)), "the neighbour's next program: {outcome:?}");
    Ok(())
}

/// The GPU that a pod is on.
fn device(ground: &Ground<'_>, pod: &str) -> Result<String> {
    wait_for(&format!("the node tells who holds {pod}'s shares"), PATIENCE, || {
        let held = allocations(ground.scope.cluster, &ground.scope, pod)?;
        Ok(held.first().map(|held| text(&held["device"])))
    })
}

/// An attempt's program for each of the node's other GPUs.
fn other_gpus(ground: &Ground<'_>, environment: &str) -> Result<Outcome> {
    let own = device(ground, HOSTILE)?;
    let node = ground.scope.cluster.gpunode(NODE)?;
    let gpus = node["status"]["gpus"].as_array().into_iter().flatten().map(|gpu| text(&gpu["uuid"]));
    let others: Vec<String> = gpus.filter(|uuid| *uuid != own).collect();
    let script = others.iter().fold(String::new(), |mut script, uuid| {
        let _ = write!(script, "{environment} CUDA_VISIBLE_DEVICES={uuid} cleave-client --once; ");
        script
    });
    ensure!(!others.is_empty(), "there is no other GPU");
    without_context(&said(ground, HOSTILE, &script)?, others.len())
}

/// The stand-in client is the stand-in daemon and server by other names.
fn own_daemon(ground: &Ground<'_>) -> Result<Outcome> {
    let said = said(
        ground,
        HOSTILE,
        "mkdir -p /tmp/own /tmp/pipe
        cp /usr/bin/cleave-client /tmp/own/nvidia-cuda-mps-control
        cp /usr/bin/cleave-client /tmp/own/nvidia-cuda-mps-server
        export CUDA_MPS_PIPE_DIRECTORY=/tmp/pipe CUDA_MPS_LOG_DIRECTORY=/tmp/log
        /tmp/own/nvidia-cuda-mps-control -d </dev/null >/dev/null 2>&1 && echo it listens
        cleave-client --once
        /tmp/own/nvidia-cuda-mps-control quit >/dev/null 2>&1",
    )?;
    ensure!(said.contains("it listens"), "its daemon does not start: {said}");
    without_context(&said, 1)
}

/// The volume may hide the folder or be hidden by it: either way nothing is had around MPS.
fn volume_over(ground: &Ground<'_>) -> Result<Outcome> {
    let said = said(ground, "over", "cleave-client --once")?;
    match without_context(&said, 1)? {
        Outcome::Refused(errors) => {
            ensure!(errors == ["CUDA_ERROR_DEVICE_UNAVAILABLE"], "{errors:?}");
            Ok(Outcome::NoEffect("it has no context, and its GPU is as it was".to_owned()))
        }
        _ => within(ground, 1, &said, 1),
    }
}

fn too_many(ground: &Ground<'_>) -> Result<Outcome> {
    let hold = format!(
        "cleave-client --processes {CLIENTS} --hold forever --handle-sigterm >/tmp/many 2>&1 </dev/null & \
         echo $! >/tmp/many.pid"
    );
    said(ground, HOSTILE, &hold)?;
    let many = wait_for("as many processes as it may have", PATIENCE, || {
        let many = said(ground, HOSTILE, "cat /tmp/many")?;
        Ok((lines(&many).len() == CLIENTS).then_some(many))
    })?;
    within(ground, HOSTILES, &many, CLIENTS)?;
    let outcome = without_context(&said(ground, HOSTILE, "cleave-client --once")?, 1);
    said(ground, HOSTILE, "kill $(cat /tmp/many.pid)")?;
    wait_until("it may have another process", || {
        let said = said(ground, HOSTILE, "cleave-client --once")?;
        Ok(matches!(within(ground, HOSTILES, &said, 1)?, Outcome::NoEffect(_)))
    })?;
    outcome
}

/// Tries all sockets below Cleave's folder of the node, the own door's among them, by paths that
/// could lead there.
fn sockets(ground: &Ground<'_>) -> Result<Outcome> {
    let found = on_node(NODE, &["find", "/run/cleave", "-type", "s"])?;
    let found: Vec<&str> = found.split_whitespace().collect();
    ensure!(found.len() > 3, "there are no sockets to try: {found:?}");
    let mut script = String::new();
    for path in &found {
        for root in ["", "/proc/1/root", "/proc/self/root/..", "/run/cleave-mps/../.."] {
            let _ = writeln!(script, "cleave-client --admin get_server_list --socket {root}{path}");
        }
    }
    let said = said(ground, HOSTILE, &script)?;
    if let Some(reached) = lines(&said).first() {
        return Ok(Outcome::Succeeded(reached.to_string()));
    }
    let refused: Vec<String> =
        said.lines().filter(|line| line.contains("os error")).map(|line| line.trim().to_owned()).collect();
    ensure!(refused.len() == 4 * found.len(), "{} of {} paths: {said}", refused.len(), 4 * found.len());
    Ok(Outcome::Refused(refused))
}

/// Processes of the node that share [`HOSTILE`]'s GPU, by its pids.
struct Processes {
    server: u64,
    neighbour: u64,
}

/// What the MPS host says.
fn status() -> Result<Value> {
    Ok(serde_json::from_str(&on_node(NODE, &["cat", "/run/cleave/mps/status.json"])?)?)
}

fn processes(ground: &Ground<'_>) -> Result<Processes> {
    let (device, door) = (device(ground, NEIGHBOUR)?, door(ground)?);
    let daemon = status()?["daemons"][&device].clone();
    let clients = daemon["clients"].as_array().cloned().unwrap_or_default();
    let neighbour = clients.iter().find(|client| client["allocation"] == door.as_str());
    Ok(Processes {
        server: daemon["serverPid"].as_u64().context("no server")?,
        neighbour: neighbour.and_then(|client| client["pid"].as_u64()).context("the neighbour is no client")?,
    })
}

/// The neighbour's allocation.
fn door(ground: &Ground<'_>) -> Result<String> {
    let mounts = said(ground, NEIGHBOUR, "cat /proc/self/mountinfo")?;
    let mount = mounts.lines().find(|line| line.contains(&format!(" {FOLDER} "))).context("no door")?;
    let root = mount.split(' ').nth(3).and_then(|root| root.rsplit('/').next()).context("no root of the mount")?;
    Ok(root.to_owned())
}

fn administrator(ground: &Ground<'_>, commands: &[String]) -> Result<Outcome> {
    let script = commands.iter().fold(String::new(), |mut script, command| {
        let _ = writeln!(script, "cleave-client --admin '{command}'");
        script
    });
    let said = said(ground, HOSTILE, &script)?;
    let replies = lines(&said);
    ensure!(replies.len() == commands.len(), "{commands:?}: {said}");
    match replies.iter().find(|reply| !reply["reply"].is_null()) {
        Some(answered) => Ok(Outcome::Succeeded(answered.to_string())),
        None => Ok(Outcome::Refused(commands.iter().map(|command| format!("{command}: no answer; ")).collect())),
    }
}

/// What became of lies that a pod told when it started.
fn lied(ground: &Ground<'_>, pod: &str, lies: &[&str]) -> Result<Outcome> {
    let mut outcomes = Vec::new();
    for lie in lies {
        let outcome = wait_for(&format!("{pod} has said {lie}"), PATIENCE, || {
            let told = said(ground, pod, &format!("cat /tmp/{lie}"))?;
            Ok((!told.trim().is_empty()).then_some(told))
        })?;
        if outcome.contains("\"open\"") {
            return Ok(Outcome::Succeeded(outcome));
        }
        // Where the door closes in the midst of a lie, the liar cannot end it.
        let ended = outcome.contains("cannot connect to");
        outcomes.push(if ended { format!("closed: {outcome}") } else { outcome });
    }
    Ok(Outcome::Refused(outcomes))
}

fn vanish(ground: &Ground<'_>) -> Result<Outcome> {
    on_the_same_server(ground, (0..4).map(|words| format!("vanish={words}")))
}

fn shut_down(ground: &Ground<'_>) -> Result<Outcome> {
    on_the_same_server(ground, (0..6).map(|step| format!("shutdown={step}")))
}

fn on_the_same_server(ground: &Ground<'_>, lies: impl Iterator<Item = String>) -> Result<Outcome> {
    let server = processes(ground)?.server;
    for lie in lies {
        said(ground, LIAR, &format!("cleave-client --lie {lie}"))?;
        neighbour_starts(ground)?;
    }
    let now = processes(ground)?.server;
    ensure!(now == server, "the server was {server}, and is {now}");
    Ok(Outcome::NoEffect("the neighbour's next programs start on the same server".to_owned()))
}

fn told(ground: &Ground<'_>, pod: &str, kind: &'static str) -> Result<Outcome> {
    found(ground.scope.cluster, &ground.scope, pod, kind)?;
    Ok(Outcome::Found(kind))
}

/// Whoever may mount the node's folders is root on the node; what it does to GPUs through them is
/// found all the same.
fn anothers_door(ground: &Ground<'_>) -> Result<Outcome> {
    let script = format!("CUDA_MPS_PIPE_DIRECTORY=/doors/{} exec cleave-client --hold forever", door(ground)?);
    let mut thief = pod("thief", &json!({}), &script);
    thief["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
    thief["spec"]["volumes"] = json!([{"name": "doors", "hostPath": {"path": "/run/cleave/alloc"}}]);
    thief["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "doors", "mountPath": "/doors"}]);
    thief["spec"]["containers"][0]["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    ground.tenant.create(&ground.pods(), &thief)?;
    let seen = ground.scope.seen("thief")?;
    ensure!(seen["viaMps"] == true, "it does not get through the neighbour's door: {seen}");
    let outcome = told(ground, "thief", "NoShare")?;
    ground.scope.delete_pod("thief", 0)?;
    Ok(outcome)
}
