//! Tests that Cleave repartitions GPUs when pods request slices, and does not change allocated
//! slices.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, Faults, GPU_NODES_PATH, SYSTEM_NAMESPACE, Scope, find_pid, signal_program, text, wait_until,
};
use cleave_plan::mps::{self, Threads};
use cleave_plan::units::Sms;
use serde_json::{Value, json};

use crate::HOLD_CLIENT_SCRIPT;
use crate::stranded::AddedNodes;

/// The node with two GPUs of model A100-40.
const NODE: &str = "node2";
const WHOLE_GPU_RESOURCE: &str = "nvidia.com/gpu";
const SLICE_10GB_RESOURCE: &str = "nvidia.com/gpu-10gb";
const SLICE_20GB_RESOURCE: &str = "nvidia.com/gpu-20gb";

/// Creates a namespace, and a policy for the GPUs of [`NODE`] with these indices. With the policy,
/// the operator repartitions the GPUs when pods request slices. `rest` contains the policy's other
/// fields.
fn dynamic_scope<'a>(cluster: &'a Cluster, name: &str, indices: &[u32], rest: &Value) -> Result<Scope<'a>> {
    dynamic_scope_on_node(cluster, NODE, name, indices, rest)
}

/// Does the same as [`dynamic_scope`], but the policy selects `node`.
fn dynamic_scope_on_node<'a>(
    cluster: &'a Cluster,
    node: &str,
    name: &str,
    indices: &[u32],
    rest: &Value,
) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    let mut spec = json!({"nodeSelector": {"kubernetes.io/hostname": node}, "gpus": {"indices": indices}});
    spec.as_object_mut().into_iter().for_each(|spec| spec.extend(rest.as_object().cloned().unwrap_or_default()));
    scope.create_policy("by-demand", &spec)?;
    Ok(scope)
}

/// Does the same as [`dynamic_scope`], with mode `Auto` in the policy.
fn auto_scope<'a>(cluster: &'a Cluster, name: &str, indices: &[u32]) -> Result<Scope<'a>> {
    dynamic_scope(cluster, name, indices, &json!({"mode": "Auto"}))
}

/// Creates a pod on [`NODE`] that runs until it is deleted, and so keeps its allocation.
fn create_pod(scope: &Scope, name: &str, resource: &str, count: u32) -> Result<()> {
    scope.create_pod_on_node(NODE, name, &json!({resource: count}), HOLD_CLIENT_SCRIPT).map(drop)
}

fn read_gpu(cluster: &Cluster, index: usize) -> Result<Value> {
    Ok(cluster.gpu_node(NODE)?["status"]["gpus"][index].clone())
}

/// Returns the devices of [`NODE`] on which a pod has an allocation. Each device appears once.
fn devices_of_pod(cluster: &Cluster, scope: &Scope, name: &str) -> Result<Vec<String>> {
    let name = format!("{}/{name}", scope.namespace);
    let gpus = cluster.gpu_node(NODE)?["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let rows = gpus.iter().flat_map(|gpu| gpu["allocations"].as_array().cloned().unwrap_or_default());
    let mine: BTreeSet<String> = rows.filter(|row| row["pod"] == name).map(|row| text(&row["device"])).collect();
    Ok(mine.into_iter().collect())
}

/// Waits until the node reports an allocation of a pod, and returns the pod's devices.
fn allocated_devices(cluster: &Cluster, scope: &Scope, name: &str) -> Result<Vec<String>> {
    wait_until(&format!("the node reports the allocation of {name}"), || {
        Ok(!devices_of_pod(cluster, scope, name)?.is_empty())
    })?;
    devices_of_pod(cluster, scope, name)
}

/// The container id, the number of restarts and the devices of each pod, by name.
type PodStates = BTreeMap<String, (String, u64, Vec<String>)>;

fn pod_states(cluster: &Cluster, scope: &Scope, names: &[&str]) -> Result<PodStates> {
    let one = |name: &&str| {
        let (container, restarts) = crate::container_and_restarts(cluster, scope, name)?;
        Ok(((*name).to_owned(), (container, restarts, allocated_devices(cluster, scope, name)?)))
    };
    names.iter().map(one).collect()
}

/// Returns the resource version and note of each Event with this reason about an object.
fn event_notes(cluster: &Cluster, kind: &str, name: &str, reason: &str) -> Result<BTreeSet<(String, String)>> {
    let events = cluster.list("/apis/events.k8s.io/v1/events")?;
    let about = |event: &&Value| {
        event["regarding"]["kind"] == kind && event["regarding"]["name"] == name && event["reason"] == reason
    };
    Ok(events
        .iter()
        .filter(about)
        .map(|event| (text(&event["metadata"]["resourceVersion"]), text(&event["note"])))
        .collect())
}

/// Waits until a new or repeated Event about an object contains this text.
fn wait_for_new_event(
    cluster: &Cluster,
    (kind, name, reason): (&str, &str, &str),
    before: &BTreeSet<(String, String)>,
    part: &str,
) -> Result<()> {
    wait_until(&format!("an Event {reason} of {kind} {name} contains {part:?}"), || {
        let now = event_notes(cluster, kind, name, reason)?;
        Ok(now.difference(before).any(|(_, note)| note.contains(part)))
    })
}

#[test]
fn pods_of_mixed_mig_profiles_are_served_by_partitioning() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = dynamic_scope(&cluster, "mixed", &[0, 1], &json!({"mode": "Mig"}))?;
    let wanted = [("a", "1g.5gb"), ("b", "2g.10gb"), ("c", "3g.20gb"), ("d", "1g.5gb"), ("e", "3g.20gb")];
    for (name, profile) in wanted {
        create_pod(&scope, name, &format!("nvidia.com/mig-{profile}"), 1)?;
    }
    let mut held = Vec::new();
    for (name, profile) in wanted {
        scope.wait_until_running(name)?;
        let devices = allocated_devices(&cluster, &scope, name)?;
        let instances = (0..2).map(|index| Ok(read_gpu(&cluster, index)?["mig"]["instances"].clone()));
        let instances: Vec<Value> = instances.collect::<Result<Vec<Value>>>()?;
        let all: Vec<&Value> = instances.iter().filter_map(Value::as_array).flatten().collect();
        let instance = all.iter().find(|instance| devices.contains(&text(&instance["uuid"])));
        ensure!(instance.is_some_and(|instance| instance["profile"] == profile), "{name} is on {devices:?} of {all:?}");
        held.extend(devices);
    }
    ensure!(held.iter().collect::<BTreeSet<_>>().len() == wanted.len(), "two pods are on the same instance: {held:?}");
    // The agent creates another MIG instance on the GPU, and does not change the allocated
    // instances.
    let before = pod_states(&cluster, &scope, &["a", "b", "c", "d", "e"])?;
    create_pod(&scope, "f", "nvidia.com/mig-1g.5gb", 1)?;
    scope.wait_until_running("f")?;
    ensure!(before == pod_states(&cluster, &scope, &["a", "b", "c", "d", "e"])?, "a running pod was disturbed");
    Ok(())
}

#[test]
fn an_idle_gpu_changes_from_mps_to_mig_and_back_to_whole() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = auto_scope(&cluster, "modes-by-demand", &[0])?;
    create_pod(&scope, "mps", SLICE_10GB_RESOURCE, 1)?;
    scope.wait_until_running("mps")?;
    let report = scope.client_report("mps")?;
    ensure!(report["viaMps"] == true, "the client reports {report}");
    scope.delete_pod("mps", 0)?;
    create_pod(&scope, "mig", "nvidia.com/mig-3g.20gb", 1)?;
    scope.wait_until_running("mig")?;
    ensure!(read_gpu(&cluster, 0)?["mode"] == "Mig", "{}", read_gpu(&cluster, 0)?);
    scope.delete_pod("mig", 0)?;
    create_pod(&scope, "whole", WHOLE_GPU_RESOURCE, 2)?;
    scope.wait_until_running("whole")?;
    ensure!(allocated_devices(&cluster, &scope, "whole")?.len() == 2);
    ensure!(read_gpu(&cluster, 0)?["mode"] == "Whole", "{}", read_gpu(&cluster, 0)?);
    Ok(())
}

#[test]
fn sized_slices_are_split_and_merged_and_a_waiting_pod_gets_an_event() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = auto_scope(&cluster, "sizes", &[0])?;
    let total = read_gpu(&cluster, 0)?["memoryMib"].as_u64().context("no memory in the status")?;
    let tens = total / (10 * 1024);
    let names: Vec<String> = (0..tens).map(|index| format!("ten-{index}")).collect();
    for name in &names {
        create_pod(&scope, name, SLICE_10GB_RESOURCE, 1)?;
    }
    for name in &names {
        scope.wait_until_running(name)?;
    }
    let before = event_notes(&cluster, "Pod", "twenty", "NoGpu")?;
    create_pod(&scope, "twenty", SLICE_20GB_RESOURCE, 1)?;
    wait_for_new_event(&cluster, ("Pod", "twenty", "NoGpu"), &before, NODE)?;
    let stay: Vec<&str> = names.iter().skip(2).map(String::as_str).collect();
    let before = pod_states(&cluster, &scope, &stay)?;
    scope.delete_pod(&names[0], 0)?;
    scope.delete_pod(&names[1], 0)?;
    scope.wait_until_running("twenty")?;
    let report = scope.client_report("twenty")?;
    let limit =
        mps::sized_slice_memory(cleave_plan::units::Mebibytes::from_gib(20), cleave_plan::units::Mebibytes(total)).0;
    ensure!(
        report["freeMiB"].as_u64().is_some_and(|free| free <= limit),
        "the client reports {report}, and its limit is {limit} MiB"
    );
    ensure!(before == pod_states(&cluster, &scope, &stay)?, "a running pod was disturbed");
    // Then the large slice is split into two small slices.
    scope.delete_pod("twenty", 0)?;
    for name in ["again-0", "again-1"] {
        create_pod(&scope, name, SLICE_10GB_RESOURCE, 1)?;
    }
    scope.wait_until_running("again-0")?;
    scope.wait_until_running("again-1")?;
    ensure!(before == pod_states(&cluster, &scope, &stay)?, "a running pod was disturbed");
    Ok(())
}

#[test]
fn shares_inside_a_mig_instance_run_with_their_limits() -> Result<()> {
    let cluster = Cluster::connect()?;
    let sharing = json!({"mode": "Mig", "mig": {"sharing": {"mps": {"units": 4, "threads": "Strict"}}}});
    let scope = dynamic_scope(&cluster, "inside", &[0], &sharing)?;
    let shared = "nvidia.com/mig-3g.20gb.shared";
    create_pod(&scope, "two", shared, 2)?;
    create_pod(&scope, "one", shared, 1)?;
    let models = cluster.gpu_node(NODE)?["status"]["models"].as_array().cloned().unwrap_or_default();
    let mut profiles = models.iter().filter_map(|model| model["migProfiles"].as_array()).flatten();
    let profile = profiles.find(|profile| profile["name"] == "3g.20gb").context("the model has no profile 3g.20gb")?;
    let total = Sms(u32::try_from(profile["sms"].as_u64().context("the profile has no SMs")?)?);
    for (name, shares) in [("two", 2), ("one", 1)] {
        scope.wait_until_running(name)?;
        let report = scope.client_report(name)?;
        let sms = mps::usable_sms(mps::thread_percentage(shares, 4, Threads::Strict), total).0;
        ensure!(report["viaMps"] == true && report["sms"] == sms, "{name} reports {report}, expected {sms} SMs");
    }
    ensure!(
        allocated_devices(&cluster, &scope, "one")? == allocated_devices(&cluster, &scope, "two")?,
        "the pods are on two instances"
    );
    Ok(())
}

#[test]
fn an_instance_that_nvml_refuses_is_rolled_back_and_retried() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = auto_scope(&cluster, "refused", &[0])?;
    let uuid = text(&read_gpu(&cluster, 0)?["uuid"]);
    let before = event_notes(&cluster, "Node", NODE, "GpuExcluded")?;
    let faults = Faults::on_node(NODE);
    faults.simgpu(&["fail", "nvmlDeviceCreateGpuInstance*", "--gpu", &uuid, "--code", "INSUFFICIENT_RESOURCES"])?;
    create_pod(&scope, "mig", "nvidia.com/mig-3g.20gb", 1)?;
    wait_for_new_event(&cluster, ("Node", NODE, "GpuExcluded"), &before, &uuid)?;
    wait_until("no instance remains", || {
        let gpu = read_gpu(&cluster, 0)?;
        Ok(gpu["mig"]["instances"].as_array().is_none_or(Vec::is_empty))
    })?;
    drop(faults);
    scope.wait_until_running("mig").map(drop)
}

/// Dropping this value continues the stopped agent of [`NODE`].
struct StoppedAgent;

impl Drop for StoppedAgent {
    fn drop(&mut self) {
        // The signal has no effect if the kubelet has already restarted the agent.
        if let Err(error) = signal_program(NODE, "cleave-agent", "CONT") {
            eprintln!("failed to continue the agent: {error:#}");
        }
    }
}

#[test]
fn a_node_whose_agent_is_stopped_delays_no_other_pod_and_is_used_again_later() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "silent")?;
    scope.create_policy("by-demand", &json!({"mode": "Auto", "dynamic": {"timeout": "5s"}}))?;
    let excluded = event_notes(&cluster, "Node", NODE, "GpuNodeExcluded")?;
    let included = event_notes(&cluster, "Node", NODE, "GpuNodeIncluded")?;
    let stopped = StoppedAgent;
    signal_program(NODE, "cleave-agent", "STOP")?;
    // Both nodes have GPUs for these pods. The pods must run on the node whose agent runs, even if
    // a plan first places the pods on the other node.
    for index in 0..2 {
        scope.create_pod(&format!("any-{index}"), &json!({SLICE_20GB_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    }
    for index in 0..2 {
        let running = scope.wait_until_running(&format!("any-{index}"))?;
        ensure!(running["spec"]["nodeName"] != NODE, "a node without a running agent got a pod");
    }
    // Only the node with the stopped agent can run this pod. The operator writes a plan for the
    // node, receives no response, and excludes the node.
    create_pod(&scope, "there", SLICE_10GB_RESOURCE, 1)?;
    wait_for_new_event(&cluster, ("Node", NODE, "GpuNodeExcluded"), &excluded, "exclude")?;
    drop(stopped);
    wait_for_new_event(&cluster, ("Node", NODE, "GpuNodeIncluded"), &included, "again")?;
    scope.wait_until_running("there").map(drop)
}

/// The component that a test kills.
#[derive(Debug, Clone, Copy)]
enum KilledComponent {
    Agent,
    Operator,
}

/// The step of a repartitioning at which a test kills the component.
#[derive(Debug, Clone, Copy, PartialEq)]
enum RepartitioningStep {
    /// The pod exists.
    Requested,
    /// The plan is in the `GpuNode`'s spec.
    Planned,
    /// The node's status shows that the agent applies the plan.
    Started,
    /// The node has applied the plan.
    Applied,
}

/// Kills a component: all pods of the operator, or the agent of [`NODE`]. The agent's supervisor
/// restarts the agent.
///
/// Does not kill the supervisor. Then only the kubelet could start the next agent. If the kubelet
/// admits a pod first, it starts no container while it waits for the agent's answer, and rejects
/// the pod permanently (decision 0010).
fn kill_component(cluster: &Cluster, victim: KilledComponent) -> Result<()> {
    match victim {
        KilledComponent::Agent => {
            let old = find_pid(NODE, "cleave-agent")?;
            signal_program(NODE, "cleave-agent", "KILL")?;
            wait_until("another agent runs", || Ok(find_pid(NODE, "cleave-agent").is_ok_and(|pid| pid != old)))
        }
        KilledComponent::Operator => {
            let pods = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods");
            for pod in cluster.list(&format!("{pods}?labelSelector=app.kubernetes.io/component=operator"))? {
                cluster.delete(&format!("{pods}/{}", text(&pod["metadata"]["name"])), Some(0))?;
            }
            Ok(())
        }
    }
}

/// Waits until a new repartitioning of [`NODE`] reaches a step or finishes, or until `pod` is bound
/// without a repartitioning. `before` is the `GpuNode` before the new repartitioning.
fn wait_for_step(scope: &Scope, pod: &str, step: RepartitioningStep, before: &Value) -> Result<()> {
    let cluster = scope.cluster;
    let plan = |node: &Value| text(&node["spec"]["planId"]);
    wait_until(&format!("the repartitioning is {step:?}"), || {
        let node = cluster.gpu_node(NODE)?;
        let planned = plan(&node) != plan(before);
        let applied = planned && node["status"]["planId"] == node["spec"]["planId"];
        let started =
            node["status"]["steps"] != before["status"]["steps"] || node["status"]["gpus"] != before["status"]["gpus"];
        let bound = cluster.find(&scope.pod_path(pod))?.is_some_and(|pod| pod["spec"]["nodeName"].is_string());
        Ok(match step {
            RepartitioningStep::Requested => true,
            _ if bound => true,
            RepartitioningStep::Planned => planned,
            RepartitioningStep::Started => planned && started || applied,
            RepartitioningStep::Applied => applied,
        })
    })
}

#[test]
fn agent_or_operator_killed_at_any_step_of_a_repartitioning_loses_no_allocation() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = auto_scope(&cluster, "killed", &[0, 1])?;
    create_pod(&scope, "holder", SLICE_10GB_RESOURCE, 1)?;
    scope.wait_until_running("holder")?;
    let before = pod_states(&cluster, &scope, &["holder"])?;
    // Successive pods need different partitionings: MIG, MPS, or a whole GPU.
    let wants = ["nvidia.com/mig-3g.20gb", "nvidia.com/gpu-30gb", "nvidia.com/mig-1g.5gb", WHOLE_GPU_RESOURCE];
    let mut resources = wants.iter().cycle();
    for victim in [KilledComponent::Agent, KilledComponent::Operator] {
        for step in [
            RepartitioningStep::Requested,
            RepartitioningStep::Planned,
            RepartitioningStep::Started,
            RepartitioningStep::Applied,
        ] {
            let resource = resources.next().context("no further resource")?;
            println!("killing the {victim:?} when the repartitioning for {resource} is {step:?}");
            let node = cluster.gpu_node(NODE)?;
            create_pod(&scope, "next", resource, 1)?;
            wait_for_step(&scope, "next", step, &node)?;
            kill_component(&cluster, victim)?;
            scope
                .wait_until_running("next")
                .with_context(|| format!("{victim:?} killed at {step:?}, for {resource}"))?;
            ensure!(
                before == pod_states(&cluster, &scope, &["holder"])?,
                "{victim:?} killed at {step:?}: a running pod was disturbed"
            );
            scope.delete_pod("next", 0)?;
            wait_until("the node reports no allocation of the pod", || {
                Ok(devices_of_pod(&cluster, &scope, "next")?.is_empty())
            })?;
        }
    }
    wait_until("the node has applied its plan", || {
        let node = cluster.gpu_node(NODE)?;
        Ok(node["status"]["planId"] == node["spec"]["planId"])
    })
}

/// Durations from a pod's creation until each step of its start.
#[derive(Debug, Default, Clone, Copy)]
struct StartDurations {
    /// Time until the plan is in the `GpuNode`'s spec.
    planned: Duration,
    /// Time until the node has applied the plan.
    applied: Duration,
    /// Time until the kubelet reports the resource as allocatable.
    advertised: Duration,
    /// Time until the scheduler has bound the pod.
    bound: Duration,
    /// Time until the pod's container runs.
    running: Duration,
}

/// Creates a pod on a node, and measures the durations of its start.
fn measure_start(scope: &Scope, node_name: &str, name: &str, resource: &str) -> Result<StartDurations> {
    let cluster = scope.cluster;
    let before = text(&cluster.gpu_node(node_name)?["spec"]["planId"]);
    let started = Instant::now();
    scope.create_pod_on_node(node_name, name, &json!({resource: 1}), HOLD_CLIENT_SCRIPT)?;
    let mut times = StartDurations::default();
    let first = |at: &mut Duration, holds: bool| {
        if holds && at.is_zero() {
            *at = started.elapsed();
        }
    };
    wait_until(&format!("{name} runs"), || {
        let node = cluster.gpu_node(node_name)?;
        let planned = text(&node["spec"]["planId"]) != before;
        first(&mut times.planned, planned);
        first(&mut times.applied, planned && node["status"]["planId"] == node["spec"]["planId"]);
        first(&mut times.advertised, cluster.allocatable(node_name, resource)? > 0);
        let pod = cluster.get(&scope.pod_path(name))?;
        first(&mut times.bound, pod["spec"]["nodeName"].is_string());
        first(&mut times.running, pod["status"]["containerStatuses"][0]["state"]["running"].is_object());
        Ok(!times.running.is_zero())
    })?;
    Ok(times)
}

/// Prints the measured durations. Fails if the pod does not run, or if it runs without a
/// repartitioning.
#[test]
fn a_pod_that_needs_a_repartitioning_runs_and_its_start_times_are_printed() -> Result<()> {
    const ADDED_NODE: &str = "node3";
    let cluster = Cluster::connect()?;
    // The kubelet of the added node reports the node's status at the default interval of
    // Kubernetes. The kubelets of the other nodes report more often.
    let _added = AddedNodes::new(&cluster, &[ADDED_NODE])?;
    let scope = dynamic_scope_on_node(&cluster, ADDED_NODE, "times", &[0], &json!({"mode": "Auto"}))?;
    wait_until("the added node has a GPU", || {
        let node = cluster.find(&format!("{GPU_NODES_PATH}/{ADDED_NODE}"))?;
        Ok(node.is_some_and(|node| node["status"]["gpus"].as_array().is_some_and(|gpus| !gpus.is_empty())))
    })?;
    let times = measure_start(&scope, ADDED_NODE, "mig", "nvidia.com/mig-3g.20gb")?;
    ensure!(
        !times.planned.is_zero() && !times.applied.is_zero(),
        "the slice was served without a repartitioning: {times:?}"
    );
    println!(
        "planned after {:?}, applied after {:?}, advertised by the kubelet after {:?}, bound after {:?}, running after {:?}",
        times.planned, times.applied, times.advertised, times.bound, times.running
    );
    scope.delete_pod("mig", 1)
}
