//! GPUs are cut as pods ask for them, again and again, and what is in use stays what it is.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Faults, SYSTEM, Scope, signal, text, wait_until};
use cleave_plan::mps::{self, Threads};
use cleave_plan::units::Sms;
use serde_json::{Value, json};

use crate::HOLD;

/// The node with two A100 of 40 GB.
const NODE: &str = "node2";
const WHOLE: &str = "nvidia.com/gpu";
const TEN: &str = "nvidia.com/gpu-10gb";
const TWENTY: &str = "nvidia.com/gpu-20gb";

/// A namespace, and a policy that has these GPUs of [`NODE`] cut as pods ask for it.
fn cut<'a>(cluster: &'a Cluster, name: &str, indices: &[u32], rest: &Value) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    let mut spec = json!({"nodeSelector": {"kubernetes.io/hostname": NODE}, "gpus": {"indices": indices}});
    spec.as_object_mut().into_iter().for_each(|spec| spec.extend(rest.as_object().cloned().unwrap_or_default()));
    scope.policy("by-demand", &spec)?;
    Ok(scope)
}

fn auto<'a>(cluster: &'a Cluster, name: &str, indices: &[u32]) -> Result<Scope<'a>> {
    cut(cluster, name, indices, &json!({"mode": "Auto"}))
}

/// A pod on [`NODE`] that holds what it gets.
fn ask(scope: &Scope, name: &str, resource: &str, count: u32) -> Result<()> {
    scope.pod_on(NODE, name, &json!({resource: count}), HOLD).map(drop)
}

fn gpu(cluster: &Cluster, index: usize) -> Result<Value> {
    Ok(cluster.gpunode(NODE)?["status"]["gpus"][index].clone())
}

/// What a pod holds on [`NODE`]: devices, each once.
fn devices(cluster: &Cluster, scope: &Scope, name: &str) -> Result<Vec<String>> {
    let name = format!("{}/{name}", scope.namespace);
    let gpus = cluster.gpunode(NODE)?["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let rows = gpus.iter().flat_map(|gpu| gpu["allocations"].as_array().cloned().unwrap_or_default());
    let mine: BTreeSet<String> = rows.filter(|row| row["pod"] == name).map(|row| text(&row["device"])).collect();
    Ok(mine.into_iter().collect())
}

/// Waits until the node tells what a pod holds.
fn holds(cluster: &Cluster, scope: &Scope, name: &str) -> Result<Vec<String>> {
    wait_until(&format!("the node tells what {name} holds"), || Ok(!devices(cluster, scope, name)?.is_empty()))?;
    devices(cluster, scope, name)
}

/// Container id and restarts of pods, and what they hold.
type Kept = BTreeMap<String, (String, u64, Vec<String>)>;

fn kept(cluster: &Cluster, scope: &Scope, names: &[&str]) -> Result<Kept> {
    let one = |name: &&str| {
        let (container, restarts) = crate::undisturbed(cluster, scope, name)?;
        Ok(((*name).to_owned(), (container, restarts, holds(cluster, scope, name)?)))
    };
    names.iter().map(one).collect()
}

/// What events say of one thing about an object, as often as they say it.
fn told(cluster: &Cluster, kind: &str, name: &str, reason: &str) -> Result<BTreeSet<(String, String)>> {
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

/// Waits until an event about an object says something that was not said before.
fn is_told(
    cluster: &Cluster,
    (kind, name, reason): (&str, &str, &str),
    before: &BTreeSet<(String, String)>,
    part: &str,
) -> Result<()> {
    wait_until(&format!("an event {reason} of {kind} {name} says {part:?}"), || {
        let now = told(cluster, kind, name, reason)?;
        Ok(now.difference(before).any(|(_, note)| note.contains(part)))
    })
}

#[test]
fn mig_pods_of_mixed_profiles_are_served_by_cutting() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = cut(&cluster, "mixed", &[0, 1], &json!({"mode": "Mig"}))?;
    let wanted = [("a", "1g.5gb"), ("b", "2g.10gb"), ("c", "3g.20gb"), ("d", "1g.5gb"), ("e", "3g.20gb")];
    for (name, profile) in wanted {
        ask(&scope, name, &format!("nvidia.com/mig-{profile}"), 1)?;
    }
    let mut held = Vec::new();
    for (name, profile) in wanted {
        scope.running(name)?;
        let devices = holds(&cluster, &scope, name)?;
        let instances = (0..2).map(|index| Ok(gpu(&cluster, index)?["mig"]["instances"].clone()));
        let instances: Vec<Value> = instances.collect::<Result<Vec<Value>>>()?;
        let all: Vec<&Value> = instances.iter().filter_map(Value::as_array).flatten().collect();
        let instance = all.iter().find(|instance| devices.contains(&text(&instance["uuid"])));
        ensure!(instance.is_some_and(|instance| instance["profile"] == profile), "{name} holds {devices:?} of {all:?}");
        held.extend(devices);
    }
    ensure!(held.iter().collect::<BTreeSet<_>>().len() == wanted.len(), "two pods are on one instance: {held:?}");
    // A further one is cut beside those that run.
    let before = kept(&cluster, &scope, &["a", "b", "c", "d", "e"])?;
    ask(&scope, "f", "nvidia.com/mig-1g.5gb", 1)?;
    scope.running("f")?;
    ensure!(before == kept(&cluster, &scope, &["a", "b", "c", "d", "e"])?, "a running pod was disturbed");
    Ok(())
}

#[test]
fn an_idle_gpu_for_mps_becomes_one_for_mig_and_comes_back_whole() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = auto(&cluster, "modes-by-demand", &[0])?;
    ask(&scope, "mps", TEN, 1)?;
    scope.running("mps")?;
    let seen = scope.seen("mps")?;
    ensure!(seen["viaMps"] == true, "it sees {seen}");
    scope.delete_pod("mps", 0)?;
    ask(&scope, "mig", "nvidia.com/mig-3g.20gb", 1)?;
    scope.running("mig")?;
    ensure!(gpu(&cluster, 0)?["mode"] == "Mig", "{}", gpu(&cluster, 0)?);
    scope.delete_pod("mig", 0)?;
    ask(&scope, "whole", WHOLE, 2)?;
    scope.running("whole")?;
    ensure!(holds(&cluster, &scope, "whole")?.len() == 2);
    ensure!(gpu(&cluster, 0)?["mode"] == "Whole", "{}", gpu(&cluster, 0)?);
    Ok(())
}

#[test]
fn sized_slices_are_cut_and_merged_and_who_waits_is_told_why() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = auto(&cluster, "sizes", &[0])?;
    let total = gpu(&cluster, 0)?["memoryMib"].as_u64().context("no memory in the status")?;
    let tens = total / (10 * 1024);
    let names: Vec<String> = (0..tens).map(|index| format!("ten-{index}")).collect();
    for name in &names {
        ask(&scope, name, TEN, 1)?;
    }
    for name in &names {
        scope.running(name)?;
    }
    let before = told(&cluster, "Pod", "twenty", "NoGpu")?;
    ask(&scope, "twenty", TWENTY, 1)?;
    is_told(&cluster, ("Pod", "twenty", "NoGpu"), &before, NODE)?;
    let stay: Vec<&str> = names.iter().skip(2).map(String::as_str).collect();
    let before = kept(&cluster, &scope, &stay)?;
    scope.delete_pod(&names[0], 0)?;
    scope.delete_pod(&names[1], 0)?;
    scope.running("twenty")?;
    let seen = scope.seen("twenty")?;
    let limit = mps::sized(cleave_plan::units::Mebibytes::from_gib(20), cleave_plan::units::Mebibytes(total)).0;
    ensure!(seen["freeMiB"].as_u64().is_some_and(|free| free <= limit), "it sees {seen}, and may use {limit} MiB");
    ensure!(before == kept(&cluster, &scope, &stay)?, "a running pod was disturbed");
    // And back: two small ones where the large one was.
    scope.delete_pod("twenty", 0)?;
    for name in ["again-0", "again-1"] {
        ask(&scope, name, TEN, 1)?;
    }
    scope.running("again-0")?;
    scope.running("again-1")?;
    ensure!(before == kept(&cluster, &scope, &stay)?, "a running pod was disturbed");
    Ok(())
}

#[test]
fn shares_inside_a_mig_instance_run_with_their_limits() -> Result<()> {
    let cluster = Cluster::connect()?;
    let sharing = json!({"mode": "Mig", "mig": {"sharing": {"mps": {"units": 4, "threads": "Strict"}}}});
    let scope = cut(&cluster, "inside", &[0], &sharing)?;
    let shared = "nvidia.com/mig-3g.20gb.shared";
    ask(&scope, "two", shared, 2)?;
    ask(&scope, "one", shared, 1)?;
    let models = cluster.gpunode(NODE)?["status"]["models"].as_array().cloned().unwrap_or_default();
    let mut profiles = models.iter().filter_map(|model| model["migProfiles"].as_array()).flatten();
    let profile = profiles.find(|profile| profile["name"] == "3g.20gb").context("it has no 3g.20gb")?;
    let total = Sms(u32::try_from(profile["sms"].as_u64().context("no SMs of the profile")?)?);
    for (name, shares) in [("two", 2), ("one", 1)] {
        scope.running(name)?;
        let seen = scope.seen(name)?;
        let sms = mps::sms(mps::threads(shares, 4, Threads::Strict), total).0;
        ensure!(seen["viaMps"] == true && seen["sms"] == sms, "{name} sees {seen}, expected {sms} SMs");
    }
    ensure!(holds(&cluster, &scope, "one")? == holds(&cluster, &scope, "two")?, "they are of one instance");
    Ok(())
}

#[test]
fn a_creation_that_nvml_refuses_is_rolled_back_and_tried_again_when_that_helps() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = auto(&cluster, "refused", &[0])?;
    let uuid = text(&gpu(&cluster, 0)?["uuid"]);
    let before = told(&cluster, "Node", NODE, "GpuLeftOut")?;
    let faults = Faults::on(NODE);
    faults.simgpu(&["fail", "nvmlDeviceCreateGpuInstance*", "--gpu", &uuid, "--code", "INSUFFICIENT_RESOURCES"])?;
    ask(&scope, "mig", "nvidia.com/mig-3g.20gb", 1)?;
    is_told(&cluster, ("Node", NODE, "GpuLeftOut"), &before, &uuid)?;
    wait_until("nothing of it is left", || {
        let gpu = gpu(&cluster, 0)?;
        Ok(gpu["mig"]["instances"].as_array().is_none_or(Vec::is_empty))
    })?;
    drop(faults);
    scope.running("mig").map(drop)
}

/// The agent of [`NODE`] is stopped as long as the value lives.
struct Stopped;

impl Drop for Stopped {
    fn drop(&mut self) {
        // The kubelet may have started it anew meanwhile: then there is nothing to let go on.
        if let Err(error) = signal(NODE, "cleave-agent", "CONT") {
            eprintln!("the agent could not be let go on: {error:#}");
        }
    }
}

#[test]
fn a_silent_node_delays_nobody_and_is_taken_back() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "silent")?;
    scope.policy("by-demand", &json!({"mode": "Auto", "dynamic": {"timeout": "5s"}}))?;
    let left_out = told(&cluster, "Node", NODE, "GpuNodeLeftOut")?;
    let taken_back = told(&cluster, "Node", NODE, "GpuNodeTakenBack")?;
    let stopped = Stopped;
    signal(NODE, "cleave-agent", "STOP")?;
    // Two that only the other node could serve as well: wherever a plan sees them first, they run.
    for index in 0..2 {
        scope.pod(&format!("any-{index}"), &json!({TWENTY: 1}), HOLD)?;
    }
    for index in 0..2 {
        let running = scope.running(&format!("any-{index}"))?;
        ensure!(running["spec"]["nodeName"] != NODE, "a node without an agent serves");
    }
    // One that only the silent node could serve makes it be told something, and be left out.
    ask(&scope, "there", TEN, 1)?;
    is_told(&cluster, ("Node", NODE, "GpuNodeLeftOut"), &left_out, "left out")?;
    drop(stopped);
    is_told(&cluster, ("Node", NODE, "GpuNodeTakenBack"), &taken_back, "again")?;
    scope.running("there").map(drop)
}

/// What is killed.
#[derive(Debug, Clone, Copy)]
enum Part {
    Agent,
    Operator,
}

/// When.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    /// The pod is there.
    Asked,
    /// The node is told.
    Told,
    /// The node has done the first of it.
    Begun,
    /// The node has done it.
    Done,
}

/// Kills the process of a part. The agent's is its supervisor, which takes it along. Its pod goes
/// too: the kubelet lets one that was killed often wait for minutes.
fn kill(cluster: &Cluster, part: Part) -> Result<()> {
    let component = match part {
        Part::Agent => {
            signal(NODE, "cleave-supervise", "KILL")?;
            "agent"
        }
        Part::Operator => "operator",
    };
    let pods = format!("/api/v1/namespaces/{SYSTEM}/pods");
    for pod in cluster.list(&format!("{pods}?labelSelector=app.kubernetes.io/component={component}"))? {
        if component == "operator" || pod["spec"]["nodeName"] == NODE {
            cluster.delete(&format!("{pods}/{}", text(&pod["metadata"]["name"])), Some(0))?;
        }
    }
    if let Part::Agent = part {
        wait_until("an agent runs again", || signal(NODE, "cleave-agent", "CONT").map(|()| true))?;
    }
    Ok(())
}

/// Waits until a re-cut of [`NODE`] is so far, coming from that plan; or is over.
fn reach(cluster: &Cluster, step: Step, before: &Value) -> Result<()> {
    let plan = |node: &Value| text(&node["spec"]["planId"]);
    wait_until(&format!("the re-cut is {step:?}"), || {
        let node = cluster.gpunode(NODE)?;
        let told = plan(&node) != plan(before);
        let done = told && node["status"]["planId"] == node["spec"]["planId"];
        let begun =
            node["status"]["steps"] != before["status"]["steps"] || node["status"]["gpus"] != before["status"]["gpus"];
        Ok(match step {
            Step::Asked => true,
            Step::Told => told,
            Step::Begun => told && begun || done,
            Step::Done => done,
        })
    })
}

#[test]
fn agent_and_operator_are_killed_at_every_step_and_nothing_in_use_is_lost() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = auto(&cluster, "killed", &[0, 1])?;
    ask(&scope, "holder", TEN, 1)?;
    scope.running("holder")?;
    let before = kept(&cluster, &scope, &["holder"])?;
    // Each re-cut is another: by MIG, for MPS, and whole again.
    let wants = ["nvidia.com/mig-3g.20gb", "nvidia.com/gpu-30gb", "nvidia.com/mig-1g.5gb", WHOLE];
    let mut asked = wants.iter().cycle();
    for part in [Part::Agent, Part::Operator] {
        for step in [Step::Asked, Step::Told, Step::Begun, Step::Done] {
            let resource = asked.next().context("no further resource")?;
            println!("{part:?} is killed when a re-cut for {resource} is {step:?}");
            let node = cluster.gpunode(NODE)?;
            ask(&scope, "next", resource, 1)?;
            reach(&cluster, step, &node)?;
            kill(&cluster, part)?;
            scope.running("next").with_context(|| format!("{part:?} killed at {step:?}, for {resource}"))?;
            ensure!(
                before == kept(&cluster, &scope, &["holder"])?,
                "{part:?} killed at {step:?}: the holder was disturbed"
            );
            scope.delete_pod("next", 0)?;
        }
    }
    wait_until("the node is as it shall be", || {
        let node = cluster.gpunode(NODE)?;
        Ok(node["status"]["planId"] == node["spec"]["planId"])
    })
}

/// From a pod's creation on.
#[derive(Debug, Default, Clone, Copy)]
struct Times {
    /// The node was told: gathered and planned.
    planned: Duration,
    /// The node was cut.
    cut: Duration,
    /// The kubelet has told what there is.
    offered: Duration,
    /// The scheduler has bound it.
    bound: Duration,
    /// It runs.
    running: Duration,
}

fn measure(cluster: &Cluster, scope: &Scope, name: &str, resource: &str) -> Result<Times> {
    let before = text(&cluster.gpunode(NODE)?["spec"]["planId"]);
    let started = Instant::now();
    ask(scope, name, resource, 1)?;
    let mut times = Times::default();
    let first = |at: &mut Duration, holds: bool| {
        if holds && at.is_zero() {
            *at = started.elapsed();
        }
    };
    wait_until(&format!("{name} runs"), || {
        let node = cluster.gpunode(NODE)?;
        let told = text(&node["spec"]["planId"]) != before;
        first(&mut times.planned, told);
        first(&mut times.cut, told && node["status"]["planId"] == node["spec"]["planId"]);
        first(&mut times.offered, cluster.allocatable(NODE, resource)? > 0);
        let pod = cluster.get(&scope.pod_path(name))?;
        first(&mut times.bound, pod["spec"]["nodeName"].is_string());
        first(&mut times.running, pod["status"]["containerStatuses"][0]["state"]["running"].is_object());
        Ok(!times.running.is_zero())
    })?;
    Ok(times)
}

/// Measured and printed; what is asserted is that each cut was needed, and made.
#[test]
fn time_from_creation_to_running_where_a_cut_is_needed() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = auto(&cluster, "times", &[0])?;
    let mut all = Vec::new();
    // Each is of another way of cutting than the one before, so that the one GPU must be cut each
    // time.
    for (round, resource) in
        ["nvidia.com/mig-3g.20gb", TWENTY, "nvidia.com/mig-2g.10gb", TEN, "nvidia.com/mig-1g.5gb"].iter().enumerate()
    {
        let name = format!("round-{round}");
        let times = measure(&cluster, &scope, &name, resource)?;
        ensure!(!times.planned.is_zero() && !times.cut.is_zero(), "{resource} was there without a cut: {times:?}");
        println!(
            "{resource}: planned after {:?}, cut after {:?}, offered by the kubelet after {:?}, bound after {:?}, running after {:?}",
            times.planned, times.cut, times.offered, times.bound, times.running
        );
        all.push(times);
        // How long its end takes is no part of what comes after it.
        scope.delete_pod(&name, 1)?;
        wait_until("the node knows that it is gone", || {
            Ok(gpu(&cluster, 0)?["allocations"].as_array().is_none_or(Vec::is_empty))
        })?;
    }
    let median = |part: fn(&Times) -> Duration| {
        let mut parts: Vec<Duration> = all.iter().map(part).collect();
        parts.sort();
        parts[parts.len() / 2]
    };
    println!(
        "median: planned {:?}, cut {:?}, offered {:?}, bound {:?}, running {:?}",
        median(|times| times.planned),
        median(|times| times.cut),
        median(|times| times.offered),
        median(|times| times.bound),
        median(|times| times.running)
    );
    Ok(())
}
