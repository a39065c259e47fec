//! Tests a node that reboots after a power cut. The node loses the state that a boot clears, but
//! the files on its disk remain.
//!
//! The test cannot change the machine's boot id. The agent compares the machine's boot id with the
//! boot id in its checkpoint, so the test changes the checkpoint while the node is down. The
//! kubelet also reads the machine's boot id, but this has no effect on these tests.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use cleave_e2e::{
    Cluster, SYSTEM_NAMESPACE, Scope, TEST_LABEL, WAIT_TIMEOUT, allocation_errors, driver_directory, live_pods,
    on_node, pod, run_launcher, text, wait_for, wait_until,
};
use serde_json::{Value, json};

use crate::health::{RepairGuard, wait_for_health};
use crate::{
    GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, allocations, container_and_restarts, ten_shares,
    wait_until_advertised,
};

/// The node that does not reboot.
const OTHER_NODE: &str = "node2";
/// [`NODE`]'s first process. All other processes of the node exit with it.
const NODE_COMPONENT: &str = "node@node1";
/// The number of the Deployment's pods, and the number of shares that each pod requests.
const REPLICA_COUNT: usize = 3;
const SHARES_PER_REPLICA: u64 = 3;

/// Returns the path on this machine of a file of [`NODE`]. The file can be read while the node is
/// down.
fn node_file(path: &str) -> Result<PathBuf> {
    let kubeconfig = std::env::var_os("KUBECONFIG").context("KUBECONFIG is not set")?;
    let state = Path::new(&kubeconfig).parent().context("KUBECONFIG has no parent directory")?;
    Ok(state.join("nodes").join(NODE).join("host").join(path.trim_start_matches('/')))
}

/// Keeps [`NODE`] powered off. Dropping this value starts the node if it is still down.
struct PowerCut;

impl PowerCut {
    /// Kills [`NODE`], and changes its simulated GPUs and its checkpoint as a reboot would change
    /// them.
    fn new() -> Result<Self> {
        let guard = Self;
        run_launcher(&["kill", NODE_COMPONENT])?;
        let simgpu = Path::new(&driver_directory()?).join("bin/simgpu");
        let rebooted =
            Command::new(simgpu).arg("reboot").env("SIMGPU_STATE", node_file("/var/lib/simgpu")?).status()?;
        ensure!(rebooted.success(), "failed to reboot the simulated GPUs: {rebooted}");
        let path = node_file("/var/lib/cleave/agent.json")?;
        let mut checkpoint: Value = serde_json::from_slice(&fs::read(&path)?)?;
        ensure!(checkpoint["bootId"].is_string(), "the checkpoint has no boot id: {checkpoint}");
        checkpoint["bootId"] = json!("00000000-0000-4000-8000-000000000000");
        fs::write(&path, serde_json::to_vec(&checkpoint)?)?;
        Ok(guard)
    }
}

impl Drop for PowerCut {
    fn drop(&mut self) {
        if let Err(error) = run_launcher(&["start", NODE_COMPONENT]) {
            let _ = writeln!(std::io::stderr(), "failed to start {NODE}: {error:#}");
        }
    }
}

/// Keeps the API server down until this value is dropped.
struct ApiServerDown;

impl ApiServerDown {
    fn new() -> Result<Self> {
        let guard = Self;
        run_launcher(&["kill", "apiserver"])?;
        Ok(guard)
    }
}

impl Drop for ApiServerDown {
    fn drop(&mut self) {
        if let Err(error) = run_launcher(&["start", "apiserver"]) {
            let _ = writeln!(std::io::stderr(), "failed to start the API server: {error:#}");
        }
    }
}

/// Creates a Deployment `deployed` of [`REPLICA_COUNT`] pods on [`NODE`].
fn create_deployment(scope: &Scope) -> Result<()> {
    let mut spec = pod("deployed", &json!({SHARES_RESOURCE: SHARES_PER_REPLICA}), HOLD_CLIENT_SCRIPT)["spec"].take();
    spec["restartPolicy"] = json!("Always");
    spec["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
    let labels = json!({"app": "deployed"});
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "deployed", "labels": {TEST_LABEL: "true"}},
        "spec": {
            "replicas": REPLICA_COUNT, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    });
    scope.cluster.create(&format!("/apis/apps/v1/namespaces/{}/deployments", scope.namespace), &deployment)?;
    Ok(())
}

/// Returns whether a pod belongs to the Deployment.
fn belongs_to_deployment(pod: &Value) -> bool {
    text(&pod["metadata"]["labels"]["app"]) == "deployed"
}

/// Returns whether a pod runs in a container that is not in `before`.
fn runs_in_new_container(pod: &Value, before: &BTreeSet<String>) -> bool {
    let container = &pod["status"]["containerStatuses"][0];
    text(&pod["status"]["phase"]) == "Running"
        && pod["metadata"]["deletionTimestamp"].is_null()
        && container["state"]["running"].is_object()
        && !before.contains(&text(&container["containerID"]))
}

/// Waits until all pods of the Deployment run in containers that are not in `before`. Returns the
/// names of the pods.
fn wait_until_deployed(scope: &Scope, before: &BTreeSet<String>) -> Result<Vec<String>> {
    wait_for("the Deployment's pods run", 2 * WAIT_TIMEOUT, || {
        let pods = scope.pods()?;
        let names: Vec<String> = pods
            .iter()
            .filter(|pod| belongs_to_deployment(pod) && runs_in_new_container(pod, before))
            .map(|pod| text(&pod["metadata"]["name"]))
            .collect();
        ensure!(names.len() == REPLICA_COUNT, "{} of {REPLICA_COUNT} run", names.len());
        Ok(Some(names))
    })
}

/// Returns the ids of the containers of the namespace's pods.
fn container_ids(scope: &Scope) -> Result<BTreeSet<String>> {
    Ok(scope.pods()?.iter().map(|pod| text(&pod["status"]["containerStatuses"][0]["containerID"])).collect())
}

/// The effect of a reboot on a pod of the node.
#[derive(Debug, PartialEq, Eq)]
enum RebootOutcome {
    /// The kubelet started a new container for the pod.
    Restarted,
    /// The kubelet permanently rejected the pod.
    Rejected,
}

/// Waits until the kubelet has restarted or rejected a pod.
fn wait_for_outcome(scope: &Scope, name: &str, before: &BTreeSet<String>) -> Result<RebootOutcome> {
    wait_for(&format!("{name} is restarted or rejected"), 2 * WAIT_TIMEOUT, || {
        let pod = scope.cluster.get(&scope.pod_path(name))?;
        let (phase, reason) = (text(&pod["status"]["phase"]), text(&pod["status"]["reason"]));
        match phase.as_str() {
            "Failed" if is_rejection(&reason) => Ok(Some(RebootOutcome::Rejected)),
            "Failed" => bail!("the pod failed for another reason: {}", pod["status"]),
            _ => Ok(runs_in_new_container(&pod, before).then_some(RebootOutcome::Restarted)),
        }
    })
}

/// Returns whether the reason of a failed pod means that the kubelet rejected the pod at admission:
/// because of an error of the device manager, or because a resource was missing.
fn is_rejection(reason: &str) -> bool {
    reason == "UnexpectedAdmissionError" || reason.starts_with("OutOf")
}

/// Reads the shares of each pod from the kubelet's device checkpoint. Returns them by the UID of
/// the pod.
fn kubelet_allocations() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let file: Value =
        serde_json::from_slice(&fs::read(node_file("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")?)?)?;
    let mut shares: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in file["Data"]["PodDeviceEntries"].as_array().into_iter().flatten() {
        let ids = entry["DeviceIDs"].as_object().into_iter().flat_map(|by_numa| by_numa.values());
        let ids = ids.filter_map(Value::as_array).flatten().map(text);
        if text(&entry["ResourceName"]) == SHARES_RESOURCE {
            shares.entry(text(&entry["PodUID"])).or_default().extend(ids);
        }
    }
    Ok(shares)
}

/// Waits until the kubelet, the agent and the MPS host agree. The status of the `GpuNode` must list
/// exactly the allocations that the kubelet has for the node's running pods, without an allocation
/// error. Each allocation must have a door.
fn wait_until_consistent(scope: &Scope) -> Result<()> {
    wait_until("kubelet, agent and MPS host agree about allocations", || {
        let mut running = scope.pods()?;
        running.retain(|pod| text(&pod["spec"]["nodeName"]) == NODE && runs_in_new_container(pod, &BTreeSet::new()));
        let node = scope.cluster.gpu_node(NODE)?;
        let errors = allocation_errors(&node, &live_pods(&running), Some(10));
        ensure!(errors.is_empty(), "{errors:#?}");
        let mut reported: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for gpu in node["status"]["gpus"].as_array().into_iter().flatten() {
            for allocation in gpu["allocations"].as_array().into_iter().flatten() {
                reported
                    .entry(text(&allocation["pod"]))
                    .or_default()
                    .extend(allocation["ids"].as_array().into_iter().flatten().map(text));
            }
        }
        let by_uid = kubelet_allocations()?;
        let mut expected = BTreeMap::new();
        for pod in &running {
            let uid = text(&pod["metadata"]["uid"]);
            let ids = by_uid.get(&uid).with_context(|| format!("the kubelet's checkpoint has no entry for {uid}"))?;
            expected.insert(format!("{}/{}", scope.namespace, text(&pod["metadata"]["name"])), ids.clone());
        }
        ensure!(reported == expected, "the node reports {reported:?}, and the kubelet has {expected:?}");
        let all: BTreeSet<&String> = expected.values().flatten().collect();
        ensure!(
            all.len() == expected.values().map(BTreeSet::len).sum::<usize>(),
            "a share is allocated twice: {expected:?}"
        );
        let desired: Value = serde_json::from_str(&on_node(NODE, &["cat", "/run/cleave/mps/desired.json"])?)?;
        let doors = desired["allocations"].as_object().map_or(0, serde_json::Map::len);
        ensure!(doors == expected.len(), "there are {doors} doors for {} pods", expected.len());
        Ok(true)
    })
}

/// Returns the number of SMs that a pod can use with 2, 3 or 5 of a GPU's ten shares.
fn sms_of_shares(shares: u64) -> u64 {
    // A limit consists of whole TPCs, and each TPC has two SMs.
    match shares {
        2 => 26,
        3 => 38,
        5 => 66,
        _ => 0,
    }
}

/// The names of pods without a controller, and the number of shares that each pod requests.
const BARE_POD_SHARES: [(&str, u64); 2] = [("two", 2), ("five", 5)];

/// Makes two GPUs unhealthy. A reboot clears the fault of GPU 3, but not the fault of GPU 2.
fn break_gpus(cluster: &Cluster, repair: &RepairGuard) -> Result<()> {
    // A boot clears a fault that only requires a reset, but does not repair failed hardware.
    repair.faults.simgpu(&["set", "2", "remap-failed=on"])?;
    // After an XID error, the agent reads all of NVML's health information, so the agent also
    // detects the fault of GPU 2.
    repair.faults.simgpu(&["xid", "3", "48"])?;
    wait_until_advertised(cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 2))?;
    wait_for_health(cluster, 3, "NeedsReset")?;
    wait_for_health(cluster, 2, "NeedsReset")
}

/// Checks that a pod's program has the limits of the pod's shares.
fn check_limits(scope: &Scope, name: &str, shares: u64) -> Result<()> {
    let report = scope.client_report(name)?;
    ensure!(report["sms"] == sms_of_shares(shares), "{name} has other limits: {report}");
    Ok(())
}

/// Creates the pods of [`BARE_POD_SHARES`] on [`NODE`]. The restart policy of these pods permits
/// the kubelet to restart their containers.
fn create_bare_pods(scope: &Scope) -> Result<()> {
    for (name, shares) in BARE_POD_SHARES {
        let mut object = pod(name, &json!({SHARES_RESOURCE: shares}), HOLD_CLIENT_SCRIPT);
        object["spec"]["restartPolicy"] = json!("Always");
        object["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
        scope.cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        scope.wait_until_running(name)?;
        check_limits(scope, name, shares)?;
    }
    Ok(())
}

/// Returns the ids of a pod's shares, for each of its containers.
fn share_ids(scope: &Scope, name: &str) -> Result<Vec<Value>> {
    let allocated = allocations(scope.cluster, scope, name)?;
    Ok(allocated.into_iter().map(|allocation| allocation["ids"].clone()).collect())
}

/// Waits until each pod of [`BARE_POD_SHARES`] has been restarted with its earlier shares and
/// limits, or has been rejected. Returns the number of restarted pods.
fn check_bare_pods(
    scope: &Scope,
    containers: &BTreeSet<String>,
    shares_before: &BTreeMap<&str, Vec<Value>>,
) -> Result<usize> {
    let mut restarted = 0;
    for (name, shares) in BARE_POD_SHARES {
        if wait_for_outcome(scope, name, containers)? == RebootOutcome::Restarted {
            restarted += 1;
            check_limits(scope, name, shares)?;
            wait_until(&format!("the node reports the shares of {name} from before the reboot"), || {
                Ok(share_ids(scope, name)? == shares_before[name])
            })?;
        }
    }
    Ok(restarted)
}

/// Waits until the Deployment's pods have been restarted or replaced and run with their limits.
/// Prints the numbers of restarted, replaced and rejected pods, and fails if the kubelet rejected
/// too many pods.
fn check_deployment(scope: &Scope, first: &[String], containers: &BTreeSet<String>, bare: usize) -> Result<()> {
    let now = wait_until_deployed(scope, containers)?;
    for name in &now {
        check_limits(scope, name, SHARES_PER_REPLICA)?;
    }
    let restarted = now.iter().filter(|name| first.contains(*name)).count();
    let rejected = scope
        .pods()?
        .iter()
        .filter(|pod| belongs_to_deployment(pod) && is_rejection(&text(&pod["status"]["reason"])))
        .count();
    writeln!(
        std::io::stderr(),
        "of {} pods with shares on a rebooted node, {} were restarted, {} were rejected by the kubelet and replaced \
         ({rejected} rejections), {} were rejected and have no controller to replace them",
        BARE_POD_SHARES.len() + REPLICA_COUNT,
        bare + restarted,
        REPLICA_COUNT - restarted,
        BARE_POD_SHARES.len() - bare,
    )?;
    // The operator does not release replacement pods to the node until the node's agent serves, so
    // the number of rejected pods must be small.
    ensure!(rejected <= 3 * REPLICA_COUNT, "the kubelet rejected {rejected} pods for {REPLICA_COUNT} replicas");
    Ok(())
}

#[test]
fn a_reboot_loses_no_share_and_allocates_none_twice() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "reboot")?;
    scope.create_policy(
        "five-shares",
        &json!({"nodeSelector": {"kubernetes.io/hostname": OTHER_NODE}, "mode": "Mps", "mps": {"units": 5, "threads": "Strict"}}),
    )?;
    wait_until(&format!("{OTHER_NODE} advertises ten shares"), || {
        Ok(cluster.allocatable(OTHER_NODE, SHARES_RESOURCE)? == 10)
    })?;
    let repair = RepairGuard::new(&cluster);
    break_gpus(&cluster, &repair)?;

    create_bare_pods(&scope)?;
    create_deployment(&scope)?;
    let first = wait_until_deployed(&scope, &BTreeSet::new())?;
    scope.create_pod_on_node(OTHER_NODE, "beside", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("beside")?;
    scope.client_report("beside")?;
    wait_until_consistent(&scope)?;
    let beside = container_and_restarts(&cluster, &scope, "beside")?;
    let shares_before: BTreeMap<&str, Vec<Value>> =
        BARE_POD_SHARES.iter().map(|(name, _)| Ok((*name, share_ids(&scope, name)?))).collect::<Result<_>>()?;
    let before = container_ids(&scope)?;

    let power_cut = PowerCut::new()?;
    run_launcher(&["start", NODE_COMPONENT])?;
    drop(power_cut);

    let bare = check_bare_pods(&scope, &before, &shares_before)?;
    check_deployment(&scope, &first, &before, bare)?;
    wait_until_consistent(&scope)?;
    wait_for_health(&cluster, 3, "")?;
    wait_for_health(&cluster, 2, "NeedsReset")?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * (GPUS_PER_NODE - 1))?;
    ensure!(beside == container_and_restarts(&cluster, &scope, "beside")?, "a pod of another node was disturbed");
    scope.create_pod_on_node(NODE, "new", &json!({SHARES_RESOURCE: 5}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("new")?;
    check_limits(&scope, "new", 5)?;
    wait_until_consistent(&scope)
}

#[test]
fn a_rebooted_node_starts_no_pod_until_the_api_server_is_back() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "reboot-alone")?;
    create_deployment(&scope)?;
    wait_until_deployed(&scope, &BTreeSet::new())?;
    let before = container_ids(&scope)?;
    let socket = node_file("/var/lib/kubelet/device-plugins/kubelet.sock")?;
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.ino(), found.ctime(), found.ctime_nsec())).ok();
    let rejected_before = rejected_pods_of_cleave(&cluster)?;
    let power_cut = PowerCut::new()?;
    let api_server_down = ApiServerDown::new()?;
    let old = identity(&socket);
    // Run this command in the background, because it waits until the node is Ready, which requires
    // the API server. No other `cluster start` can run until this command exits.
    let mut starting = Command::new("cluster").args(["start", NODE_COMPONENT]).spawn()?;
    let started =
        wait_until("the kubelet accepts device plugins", || Ok(identity(&socket).is_some_and(|new| Some(new) != old)));
    starting.kill()?;
    starting.wait()?;
    started?;
    // The kubelet reads the node's pods, including the agent's pod, from the API server. Without
    // the API server, no device plugin can register, and the kubelet cannot reject a pod.
    let tasks = on_node(NODE, &["ctr", "tasks", "list", "--quiet"])?;
    ensure!(tasks.trim().is_empty(), "without an API server the kubelet has started {tasks}");
    drop(api_server_down);
    // Start the node's remaining components.
    run_launcher(&["start", NODE_COMPONENT])?;
    drop(power_cut);
    for name in wait_until_deployed(&scope, &before)? {
        check_limits(&scope, &name, SHARES_PER_REPLICA)?;
    }
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    wait_until_consistent(&scope)?;
    let rejected = rejected_pods_of_cleave(&cluster)?;
    let new: Vec<_> = rejected.difference(&rejected_before).collect();
    ensure!(new.is_empty(), "the kubelet rejected pods of Cleave: {new:?}");
    Ok(())
}

/// Returns the names of those pods of Cleave that a kubelet rejected.
fn rejected_pods_of_cleave(cluster: &Cluster) -> Result<BTreeSet<String>> {
    let pods = cluster.list(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"))?;
    let rejected = pods.iter().filter(|pod| is_rejection(&text(&pod["status"]["reason"])));
    Ok(rejected.map(|pod| text(&pod["metadata"]["name"])).collect())
}
