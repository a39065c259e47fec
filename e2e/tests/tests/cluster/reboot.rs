//! A node that is started again: its power is cut, with it goes what a boot clears, and what lies
//! on its disk stays.
//!
//! The machine's boot id cannot be another. What the agent concludes from it, it concludes by the
//! one in its checkpoint: that is made another while the node is down, as it would be on a real
//! one. The kubelet's own view of the boot id decides nothing that is looked at here.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use cleave_e2e::{
    Cluster, LABEL, PATIENCE, SYSTEM, Scope, given_out_wrongly, launcher, on_node, pod, staying, text, wait_for,
    wait_until,
};
use serde_json::{Value, json};

use crate::health::{Mended, health};
use crate::{GPUS, HOLD, NODE, SHARES, allocations, offers, ten_shares, undisturbed};

/// The node that stays.
const OTHER: &str = "node2";
/// [`NODE`]'s first process: the others end with it.
const COMPONENT: &str = "node@node1";
/// Pods of the Deployment, and what each asks for.
const REPLICAS: usize = 3;
const EACH: u64 = 3;

/// Where the machine has a file of the node's: it is there also while the node is not.
fn of_node(path: &str) -> Result<PathBuf> {
    let kubeconfig = std::env::var_os("KUBECONFIG").context("KUBECONFIG is not set")?;
    let state = Path::new(&kubeconfig).parent().context("KUBECONFIG is in no folder")?;
    Ok(state.join("nodes").join(NODE).join("host").join(path.trim_start_matches('/')))
}

/// A node without power. It is started again when the value goes, at the latest.
struct Down;

impl Down {
    fn cut() -> Result<Self> {
        let down = Self;
        launcher(&["kill", COMPONENT])?;
        let simgpu = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/demo/driver/bin/simgpu");
        let rebooted = Command::new(simgpu).arg("reboot").env("SIMGPU_STATE", of_node("/var/lib/simgpu")?).status()?;
        ensure!(rebooted.success(), "the simulated GPUs were not started again: {rebooted}");
        let path = of_node("/var/lib/cleave/agent.json")?;
        let mut checkpoint: Value = serde_json::from_slice(&fs::read(&path)?)?;
        ensure!(checkpoint["bootId"].is_string(), "the checkpoint has no boot id: {checkpoint}");
        checkpoint["bootId"] = json!("00000000-0000-4000-8000-000000000000");
        fs::write(&path, serde_json::to_vec(&checkpoint)?)?;
        Ok(down)
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        if let Err(error) = launcher(&["start", COMPONENT]) {
            let _ = writeln!(std::io::stderr(), "{NODE} is not back: {error:#}");
        }
    }
}

/// No API server, until the value goes.
struct NoApi;

impl NoApi {
    fn now() -> Result<Self> {
        let guard = Self;
        launcher(&["kill", "apiserver"])?;
        Ok(guard)
    }
}

impl Drop for NoApi {
    fn drop(&mut self) {
        if let Err(error) = launcher(&["start", "apiserver"]) {
            let _ = writeln!(std::io::stderr(), "the API server is not back: {error:#}");
        }
    }
}

/// A Deployment `made` of [`REPLICAS`] pods on [`NODE`].
fn deploy(scope: &Scope) -> Result<()> {
    let mut spec = pod("made", &json!({SHARES: EACH}), HOLD)["spec"].take();
    spec["restartPolicy"] = json!("Always");
    spec["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
    let labels = json!({"app": "made"});
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "made", "labels": {LABEL: "true"}},
        "spec": {
            "replicas": REPLICAS, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    });
    scope.cluster.create(&format!("/apis/apps/v1/namespaces/{}/deployments", scope.namespace), &deployment)?;
    Ok(())
}

fn is_made(pod: &Value) -> bool {
    text(&pod["metadata"]["labels"]["app"]) == "made"
}

/// A container of the pod runs that is none of `before`.
fn runs(pod: &Value, before: &BTreeSet<String>) -> bool {
    let container = &pod["status"]["containerStatuses"][0];
    text(&pod["status"]["phase"]) == "Running"
        && pod["metadata"]["deletionTimestamp"].is_null()
        && container["state"]["running"].is_object()
        && !before.contains(&text(&container["containerID"]))
}

/// The pods of the Deployment, when as many run as should, in containers that are none of `before`.
fn made(scope: &Scope, before: &BTreeSet<String>) -> Result<Vec<String>> {
    wait_for("the Deployment's pods run", 2 * PATIENCE, || {
        let pods = scope.pods()?;
        let names: Vec<String> = pods
            .iter()
            .filter(|pod| is_made(pod) && runs(pod, before))
            .map(|pod| text(&pod["metadata"]["name"]))
            .collect();
        ensure!(names.len() == REPLICAS, "{} of {REPLICAS} run", names.len());
        Ok(Some(names))
    })
}

/// The containers of the namespace's pods.
fn containers(scope: &Scope) -> Result<BTreeSet<String>> {
    Ok(scope.pods()?.iter().map(|pod| text(&pod["status"]["containerStatuses"][0]["containerID"])).collect())
}

/// What became of a pod of an earlier boot.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// The kubelet has started its container again.
    Back,
    /// The kubelet has refused it, for good.
    Refused,
}

fn fate(scope: &Scope, name: &str, before: &BTreeSet<String>) -> Result<Fate> {
    wait_for(&format!("{name} is back or refused"), 2 * PATIENCE, || {
        let pod = scope.cluster.get(&scope.pod_path(name))?;
        let (phase, reason) = (text(&pod["status"]["phase"]), text(&pod["status"]["reason"]));
        match phase.as_str() {
            "Failed" if is_refusal(&reason) => Ok(Some(Fate::Refused)),
            "Failed" => bail!("it failed of something else: {}", pod["status"]),
            _ => Ok(runs(&pod, before).then_some(Fate::Back)),
        }
    })
}

/// Whether it is how a kubelet tells that it does not admit a pod: its device manager, or what it
/// counts.
fn is_refusal(reason: &str) -> bool {
    reason == "UnexpectedAdmissionError" || reason.starts_with("OutOf")
}

/// The shares that the kubelet has given out, by its own file: by the pods' UIDs.
fn by_kubelet() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let file: Value =
        serde_json::from_slice(&fs::read(of_node("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")?)?)?;
    let mut given: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in file["Data"]["PodDeviceEntries"].as_array().into_iter().flatten() {
        let ids = entry["DeviceIDs"].as_object().into_iter().flat_map(|by_numa| by_numa.values());
        let ids = ids.filter_map(Value::as_array).flatten().map(text);
        if text(&entry["ResourceName"]) == SHARES {
            given.entry(text(&entry["PodUID"])).or_default().extend(ids);
        }
    }
    Ok(given)
}

/// Waits until the node tells of just those shares that the kubelet has for its running pods, each
/// given out once and each pod's of one GPU, and until there is a door for each of them and for
/// nobody else.
fn agreed(scope: &Scope) -> Result<()> {
    wait_until("kubelet, agent and MPS host are of one mind", || {
        let mut running = scope.pods()?;
        running.retain(|pod| text(&pod["spec"]["nodeName"]) == NODE && runs(pod, &BTreeSet::new()));
        let node = scope.cluster.gpunode(NODE)?;
        let wrong = given_out_wrongly(&node, &staying(&running), Some(10));
        ensure!(wrong.is_empty(), "{wrong:#?}");
        let mut told: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for gpu in node["status"]["gpus"].as_array().into_iter().flatten() {
            for held in gpu["allocations"].as_array().into_iter().flatten() {
                told.entry(text(&held["pod"]))
                    .or_default()
                    .extend(held["ids"].as_array().into_iter().flatten().map(text));
            }
        }
        let by_kubelet = by_kubelet()?;
        let mut has = BTreeMap::new();
        for pod in &running {
            let uid = text(&pod["metadata"]["uid"]);
            let ids = by_kubelet.get(&uid).with_context(|| format!("the kubelet has nothing for {uid}"))?;
            has.insert(format!("{}/{}", scope.namespace, text(&pod["metadata"]["name"])), ids.clone());
        }
        ensure!(told == has, "the node tells {told:?}, and the kubelet has {has:?}");
        let all: BTreeSet<&String> = has.values().flatten().collect();
        ensure!(all.len() == has.values().map(BTreeSet::len).sum::<usize>(), "a share is given out twice: {has:?}");
        let desired: Value = serde_json::from_str(&on_node(NODE, &["cat", "/run/cleave/mps/desired.json"])?)?;
        let doors = desired["allocations"].as_object().map_or(0, serde_json::Map::len);
        ensure!(doors == has.len(), "there are {doors} doors for {} pods", has.len());
        Ok(true)
    })
}

/// SMs that so many of ten shares of a GPU are.
fn sms(shares: u64) -> u64 {
    // In whole TPCs of two.
    match shares {
        2 => 26,
        3 => 38,
        5 => 66,
        _ => 0,
    }
}

#[test]
fn a_node_that_is_started_again_loses_no_share_gives_none_twice_and_its_pods_come_back_or_are_made_anew() -> Result<()>
{
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "reboot")?;
    scope.policy(
        "five-shares",
        &json!({"nodeSelector": {"kubernetes.io/hostname": OTHER}, "mode": "Mps", "mps": {"units": 5, "threads": "Strict"}}),
    )?;
    wait_until(&format!("{OTHER} offers ten shares"), || Ok(cluster.allocatable(OTHER, SHARES)? == 10))?;
    let mended = Mended::new(&cluster);
    // A boot heals what wants a reset, and not what is broken.
    mended.faults.simgpu(&["set", "2", "remap-failed=on"])?;
    // Of an XID the agent looks at all that NVML says.
    mended.faults.simgpu(&["xid", "3", "48"])?;
    offers(&cluster, SHARES, 10 * (GPUS - 2))?;
    health(&cluster, 3, "NeedsReset")?;
    health(&cluster, 2, "NeedsReset")?;

    let bare = [("two", 2), ("five", 5)];
    for (name, shares) in bare {
        let mut object = pod(name, &json!({SHARES: shares}), HOLD);
        // What may be started again where it is.
        object["spec"]["restartPolicy"] = json!("Always");
        object["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
        cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        scope.running(name)?;
        ensure!(scope.seen(name)?["sms"] == sms(shares), "{name} has other limits: {}", scope.seen(name)?);
    }
    deploy(&scope)?;
    let first = made(&scope, &BTreeSet::new())?;
    scope.pod_on(OTHER, "beside", &json!({SHARES: 1}), HOLD)?;
    scope.running("beside")?;
    scope.seen("beside")?;
    agreed(&scope)?;
    let beside = undisturbed(&cluster, &scope, "beside")?;
    let ids = |name: &str| -> Result<Vec<Value>> {
        Ok(allocations(&cluster, &scope, name)?.into_iter().map(|held| held["ids"].clone()).collect())
    };
    let held: BTreeMap<&str, Vec<Value>> =
        bare.iter().map(|(name, _)| Ok((*name, ids(name)?))).collect::<Result<_>>()?;
    let before = containers(&scope)?;

    let down = Down::cut()?;
    launcher(&["start", COMPONENT])?;
    drop(down);

    let (mut back, mut lost) = (0, 0);
    for (name, shares) in bare {
        match fate(&scope, name, &before)? {
            Fate::Back => {
                back += 1;
                ensure!(scope.seen(name)?["sms"] == sms(shares), "{name} has other limits: {}", scope.seen(name)?);
                wait_until(&format!("the node tells of {name}"), || Ok(ids(name)? == held[name]))?;
            }
            Fate::Refused => lost += 1,
        }
    }
    let now = made(&scope, &before)?;
    for name in &now {
        ensure!(scope.seen(name)?["sms"] == sms(EACH), "{name} has other limits: {}", scope.seen(name)?);
    }
    let stayed = now.iter().filter(|name| first.contains(*name)).count();
    let refused =
        scope.pods()?.iter().filter(|pod| is_made(pod) && is_refusal(&text(&pod["status"]["reason"]))).count();
    writeln!(
        std::io::stderr(),
        "{} pods with shares of a node that was started again: {} came back, {} were refused by the kubelet and made anew \
         ({refused} refusals), {lost} were refused and nothing makes them anew",
        bare.len() + REPLICAS,
        back + stayed,
        REPLICAS - stayed,
    )?;
    // Those that are made anew wait until the node's agent serves.
    ensure!(refused <= 3 * REPLICAS, "{refused} pods were refused for {REPLICAS}");
    agreed(&scope)?;
    health(&cluster, 3, "")?;
    health(&cluster, 2, "NeedsReset")?;
    offers(&cluster, SHARES, 10 * (GPUS - 1))?;
    ensure!(beside == undisturbed(&cluster, &scope, "beside")?, "a pod of another node was disturbed");
    scope.pod_on(NODE, "new", &json!({SHARES: 5}), HOLD)?;
    scope.running("new")?;
    ensure!(scope.seen("new")?["sms"] == sms(5), "the new pod has other limits");
    agreed(&scope)
}

#[test]
fn without_an_api_server_a_node_that_is_started_again_starts_nothing_and_with_it_all_that_is_made_anew_is_back()
-> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "reboot-alone")?;
    deploy(&scope)?;
    made(&scope, &BTreeSet::new())?;
    let before = containers(&scope)?;
    let socket = of_node("/var/lib/kubelet/device-plugins/kubelet.sock")?;
    let bound = |path: &Path| fs::metadata(path).map(|found| (found.ino(), found.ctime(), found.ctime_nsec())).ok();
    let down = Down::cut()?;
    let no_api = NoApi::now()?;
    let old = bound(&socket);
    // It waits for the node to be Ready, which takes an API server, and lets nobody else start
    // anything meanwhile.
    let mut starting = Command::new("cluster").args(["start", COMPONENT]).spawn()?;
    let started =
        wait_until("the kubelet takes device plugins", || Ok(bound(&socket).is_some_and(|new| Some(new) != old)));
    starting.kill()?;
    starting.wait()?;
    started?;
    // Pods come from the API server, and with them the agent: nobody registers, and nobody is
    // refused.
    let tasks = on_node(NODE, &["ctr", "tasks", "list", "--quiet"])?;
    ensure!(tasks.trim().is_empty(), "without an API server the kubelet has started {tasks}");
    drop(no_api);
    // What of the node does not run yet.
    launcher(&["start", COMPONENT])?;
    drop(down);
    for name in made(&scope, &before)? {
        ensure!(scope.seen(&name)?["sms"] == sms(EACH), "{name} has other limits: {}", scope.seen(&name)?);
    }
    offers(&cluster, SHARES, 10 * GPUS)?;
    agreed(&scope)?;
    let parts = cluster.list(&format!("/api/v1/namespaces/{SYSTEM}/pods"))?;
    let refused: Vec<String> = parts
        .iter()
        .filter(|pod| is_refusal(&text(&pod["status"]["reason"])))
        .map(|pod| text(&pod["metadata"]["name"]))
        .collect();
    ensure!(refused.is_empty(), "the kubelet refused Cleave's own: {refused:?}");
    Ok(())
}
