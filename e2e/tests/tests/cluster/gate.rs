//! No pod reaches the scheduler before room of one GPU is held for it, and none waits that could
//! run.
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, PATIENCE, Random, SYSTEM, Scope, given_out_wrongly, launcher, pod, signal, signal_component, staying,
    text, wait_for, wait_until,
};
use serde_json::{Value, json};

use crate::gate_admission::GATE;
use crate::restarts::agent_says;
use crate::{GPUS, NODE, SHARES, allocations, ten_shares, undisturbed};

/// Holds its shares and nothing else: hundreds of clients would only load the machine.
const STAY: &str = "exec sleep 1000000";

pub(crate) fn is_gated(pod: &Value) -> bool {
    pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| gates.iter().any(|gate| gate["name"] == GATE))
}

/// Events of a pod, as «reason: message».
fn events(scope: &Scope, pod: &str) -> Result<Vec<String>> {
    let events = scope.cluster.list(&format!("/apis/events.k8s.io/v1/namespaces/{}/events", scope.namespace))?;
    let of_pod = events.iter().filter(|event| event["regarding"]["name"] == pod);
    Ok(of_pod.map(|event| format!("{}: {}", text(&event["reason"]), text(&event["note"]))).collect())
}

/// Waits until an Event of a pod says this.
pub(crate) fn told(scope: &Scope, pod: &str, words: &str) -> Result<()> {
    wait_until(&format!("{pod} is told «{words}»"), || {
        let events = events(scope, pod)?;
        ensure!(events.iter().any(|event| event.contains(words)), "{events:?}");
        Ok(true)
    })
}

/// The one GPU that a pod is on, with so many shares.
fn on_one_gpu(cluster: &Cluster, scope: &Scope, pod: &str, shares: usize) -> Result<String> {
    wait_for(&format!("{pod} is listed"), PATIENCE, || {
        let held = allocations(cluster, scope, pod)?;
        if held.is_empty() {
            return Ok(None);
        }
        ensure!(held.len() == 1, "it is on several GPUs: {held:?}");
        ensure!(held[0]["ids"].as_array().map(Vec::len) == Some(shares), "{held:?}");
        Ok(Some(text(&held[0]["device"])))
    })
}

#[test]
fn free_shares_of_several_gpus_are_no_room_and_the_pod_waits_until_one_has_enough() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "fragments")?;
    for index in 0..GPUS {
        scope.pod(&format!("seven-{index}"), &json!({SHARES: 7}), STAY)?;
    }
    let mut devices = BTreeSet::new();
    for index in 0..GPUS {
        let name = format!("seven-{index}");
        scope.running(&name)?;
        devices.insert(on_one_gpu(&cluster, &scope, &name, 7)?);
    }
    ensure!(devices.len() as u64 == GPUS, "sevens of ten share no GPU: {devices:?}");
    // Twelve are free, three on each: a scheduler that adds them up would send it here.
    scope.pod("five", &json!({SHARES: 5}), STAY)?;
    told(&scope, "five", "no device has 5 nvidia.com/gpu-mps free: the emptiest has 3")?;
    let waiting = cluster.get(&scope.pod_path("five"))?;
    ensure!(is_gated(&waiting) && waiting["spec"]["nodeName"].is_null(), "{waiting}");
    scope.pod("three", &json!({SHARES: 3}), STAY)?;
    scope.running("three")?;
    let taken = on_one_gpu(&cluster, &scope, "three", 3)?;
    let other = (0..GPUS).map(|index| format!("seven-{index}"));
    let leaves = other
        .map(|name| Ok((on_one_gpu(&cluster, &scope, &name, 7)?, name)))
        .find(|found: &Result<_>| found.as_ref().is_ok_and(|(device, _)| *device != taken))
        .context("all on one GPU")??;
    scope.delete_pod(&leaves.1, 0)?;
    scope.running("five")?;
    ensure!(on_one_gpu(&cluster, &scope, "five", 5)? == leaves.0, "it is where the room is");
    Ok(())
}

#[test]
fn what_no_gpu_can_hold_is_honestly_unschedulable() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "never")?;
    scope.pod("eleven", &json!({SHARES: 11}), STAY)?;
    let condition = wait_for("the scheduler says that it cannot be scheduled", PATIENCE, || {
        let pod = cluster.get(&scope.pod_path("eleven"))?;
        let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        Ok(conditions.into_iter().find(|condition| condition["reason"] == "Unschedulable"))
    })?;
    ensure!(condition["status"] == "False", "{condition}");
    told(&scope, "eleven", "the largest has 10")
}

#[test]
fn every_kind_of_pod_gets_its_shares_of_one_gpu() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "kinds")?;
    let ns = &scope.namespace;
    let template = |app: &str, shares: u32| {
        let spec = pod(app, &json!({SHARES: shares}), STAY)["spec"].clone();
        json!({"metadata": {"labels": {"app": app}}, "spec": spec})
    };
    let always = |app: &str, shares: u32| {
        let mut template = template(app, shares);
        template["spec"]["restartPolicy"] = json!("Always");
        template
    };
    let selector = |app: &str| json!({"matchLabels": {"app": app}});
    let apps = format!("/apis/apps/v1/namespaces/{ns}");
    cluster.create(
        &format!("{apps}/deployments"),
        &json!({"metadata": {"name": "deployed"}, "spec": {"replicas": 2, "selector": selector("deployed"), "template": always("deployed", 6)}}),
    )?;
    cluster.create(
        &format!("{apps}/statefulsets"),
        &json!({"metadata": {"name": "stateful"}, "spec": {"replicas": 1, "serviceName": "none", "selector": selector("stateful"), "template": always("stateful", 3)}}),
    )?;
    let mut daemon = always("daemon", 1);
    daemon["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": NODE});
    cluster.create(
        &format!("{apps}/daemonsets"),
        &json!({"metadata": {"name": "daemon"}, "spec": {"selector": selector("daemon"), "template": daemon}}),
    )?;
    cluster.create(
        &format!("/apis/batch/v1/namespaces/{ns}/jobs"),
        &json!({"metadata": {"name": "job"}, "spec": {"template": template("job", 2)}}),
    )?;
    // Two containers with shares of their own, a sidecar, and an init container whose shares are
    // used again.
    let mut several = pod("several", &json!({SHARES: 4}), STAY);
    let container = |name: &str, shares: u32, script: &str| {
        let mut container = several["spec"]["containers"][0].clone();
        container["name"] = json!(name);
        container["command"] = json!(["sh", "-c", script]);
        container["resources"]["limits"] = json!({SHARES: shares.to_string()});
        container
    };
    let (second, first) = (container("second", 5, STAY), container("first", 2, "true"));
    let mut beside = container("beside", 1, STAY);
    beside["restartPolicy"] = json!("Always");
    several["spec"]["containers"].as_array_mut().context("containers")?.push(second);
    several["spec"]["initContainers"] = json!([first, beside]);
    cluster.create(&format!("/api/v1/namespaces/{ns}/pods"), &several)?;
    let held = wait_for("all of them run", PATIENCE, || {
        let pods = scope.pods()?;
        let running = |pod: &&Value| text(&pod["status"]["phase"]) == "Running";
        ensure!(
            pods.len() == 6 && pods.iter().filter(running).count() == 6,
            "{} pods, {} run",
            pods.len(),
            pods.iter().filter(running).count()
        );
        let mut held: BTreeMap<String, Vec<(String, usize)>> = BTreeMap::new();
        for pod in &pods {
            let name = text(&pod["metadata"]["name"]);
            for part in allocations(&cluster, &scope, &name)? {
                let of = text(&pod["metadata"]["labels"]["app"]);
                let of = if of.is_empty() { name.clone() } else { of };
                held.entry(of)
                    .or_default()
                    .push((text(&part["container"]), part["ids"].as_array().map_or(0, Vec::len)));
            }
        }
        Ok((held.values().map(Vec::len).sum::<usize>() >= 8).then_some(held))
    })?;
    let of = |app: &str| {
        let mut found = held.get(app).cloned().unwrap_or_default();
        found.sort();
        found
    };
    ensure!(of("deployed") == [("main".into(), 6), ("main".into(), 6)], "{held:?}");
    ensure!(
        of("stateful") == [("main".into(), 3)]
            && of("daemon") == [("main".into(), 1)]
            && of("job") == [("main".into(), 2)],
        "{held:?}"
    );
    ensure!(of("several") == [("beside".into(), 1), ("main".into(), 4), ("second".into(), 5)], "{held:?}");
    Ok(())
}

/// Cluster-wide priorities, gone with the value.
struct Priorities<'a>(&'a Cluster);

const PRIORITIES: &str = "/apis/scheduling.k8s.io/v1/priorityclasses";

impl<'a> Priorities<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let made = Self(cluster);
        made.sweep()?;
        for (name, policy) in [("e2e-high", "PreemptLowerPriority"), ("e2e-patient", "Never")] {
            let class = json!({"metadata": {"name": name}, "value": 1000, "preemptionPolicy": policy});
            cluster.create(PRIORITIES, &class)?;
        }
        Ok(made)
    }

    fn sweep(&self) -> Result<()> {
        ["e2e-high", "e2e-patient"].iter().try_for_each(|name| self.0.delete(&format!("{PRIORITIES}/{name}"), None))
    }
}

impl Drop for Priorities<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.sweep() {
            let _ = writeln!(std::io::stderr(), "the priorities could not be swept away: {error:#}");
        }
    }
}

#[test]
fn a_pod_of_higher_priority_gets_room_on_one_gpu_from_whom_no_budget_protects() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _priorities = Priorities::new(&cluster)?;
    let scope = ten_shares(&cluster, "preempt")?;
    let ns = &scope.namespace;
    let pods = format!("/api/v1/namespaces/{ns}/pods");
    for index in 0..GPUS {
        let mut pod = pod(&format!("seven-{index}"), &json!({SHARES: 7}), STAY);
        if index > 0 {
            pod["metadata"]["labels"] = json!({"keep": "me"});
        }
        cluster.create(&pods, &pod)?;
        // Of pods of one priority those that began last leave first, and that is to be the
        // protected ones: times are whole seconds.
        std::thread::sleep(Duration::from_millis(1100));
    }
    cluster.create(
        &format!("/apis/policy/v1/namespaces/{ns}/poddisruptionbudgets"),
        &json!({"metadata": {"name": "keep"}, "spec": {"minAvailable": GPUS - 1, "selector": {"matchLabels": {"keep": "me"}}}}),
    )?;
    let before: Vec<(String, u64)> = (0..GPUS)
        .map(|index| {
            let name = format!("seven-{index}");
            scope.running(&name)?;
            on_one_gpu(&cluster, &scope, &name, 7)?;
            undisturbed(&cluster, &scope, &name)
        })
        .collect::<Result<_>>()?;
    wait_until("the budget counts its pods", || {
        let budget = cluster.get(&format!("/apis/policy/v1/namespaces/{ns}/poddisruptionbudgets/keep"))?;
        Ok(budget["status"]["currentHealthy"] == GPUS - 1)
    })?;
    let with = |name: &str, class: &str| {
        let mut pod = pod(name, &json!({SHARES: 6}), STAY);
        pod["spec"]["priorityClassName"] = json!(class);
        pod
    };
    // One that must not make others leave waits, however important.
    cluster.create(&pods, &with("patient", "e2e-patient"))?;
    told(&scope, "patient", "the emptiest has 3")?;
    cluster.delete(&scope.pod_path("patient"), Some(0))?;
    cluster.create(&pods, &with("high", "e2e-high"))?;
    scope.running("high")?;
    ensure!(cluster.find(&scope.pod_path("seven-0"))?.is_none(), "the one that nobody protects has left");
    for (index, before) in before.iter().enumerate().skip(1) {
        ensure!(undisturbed(&cluster, &scope, &format!("seven-{index}"))? == *before, "seven-{index} was disturbed");
    }
    told(&scope, "seven-0", "Preempted")
}

/// Shares of the node that are in use.
fn in_use(cluster: &Cluster) -> Result<u64> {
    let node = cluster.gpunode(NODE)?;
    let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
    let slices = gpus.iter().flat_map(|gpu| gpu["slices"].as_array().cloned().unwrap_or_default());
    Ok(slices.filter_map(|slices| slices["inUse"].as_u64()).sum())
}

/// A kubelet that starts takes its pods in before it drops what its checkpoint has of pods that are
/// no more, and it writes that file only when it gives something out or hears of devices.
#[test]
fn what_the_kubelets_checkpoint_still_has_is_promised_to_nobody() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "forgotten")?;
    let names: Vec<String> = (0..GPUS).map(|index| format!("full-{index}")).collect();
    names.iter().try_for_each(|name| scope.pod(name, &json!({SHARES: 10}), STAY).map(drop))?;
    names.iter().try_for_each(|name| scope.running(name).map(drop))?;
    wait_until("all is held", || Ok(in_use(&cluster)? == 10 * GPUS))?;
    scope.delete_pod(&names[0], 0)?;
    wait_until("a GPU is free", || Ok(in_use(&cluster)? == 10 * (GPUS - 1)))?;
    // It dies with the pod on its way to it.
    let kubelet = format!("kubelet@{NODE}");
    signal_component(&kubelet, "STOP")?;
    scope.pod("next", &json!({SHARES: 10}), STAY)?;
    wait_until("it is bound", || Ok(cluster.get(&scope.pod_path("next"))?["spec"]["nodeName"] == NODE))?;
    launcher(&["kill", &kubelet])?;
    launcher(&["start", &kubelet])?;
    scope.running("next")?;
    on_one_gpu(&cluster, &scope, "next", 10).map(drop)
}

/// What was seen of a storm.
#[derive(Debug, Default)]
struct Seen {
    created: u64,
    ran: BTreeSet<String>,
    /// Pods that the kubelet refused for good, and why.
    refused: BTreeMap<String, String>,
    /// Pods over two GPUs, and GPUs with more than they have.
    broken: BTreeSet<String>,
}

/// Looks at all pods and at what the node says of them.
fn look(scope: &Scope, seen: &mut Seen) -> Result<Vec<Value>> {
    let pods = scope.pods()?;
    for pod in &pods {
        let name = text(&pod["metadata"]["name"]);
        match text(&pod["status"]["phase"]).as_str() {
            "Running" => drop(seen.ran.insert(name)),
            // Who is killed for being deleted has failed too, for a moment, and has no reason: whom
            // the kubelet refused has one.
            "Failed" if !text(&pod["status"]["reason"]).is_empty() => {
                let why = format!("{}: {}", text(&pod["status"]["reason"]), text(&pod["status"]["message"]));
                seen.refused.insert(name, why);
            }
            _ => {}
        }
    }
    seen.broken.extend(given_out_wrongly(&scope.cluster.gpunode(NODE)?, &staying(&pods), Some(10)));
    Ok(pods)
}

/// Pods that are created between two kills.
const KILL_EVERY: u64 = 12;

/// Creates and deletes pods of 1 to 10 shares in bursts; `kill` is called for every [`KILL_EVERY`]
/// of them, with how often it was before. In the end all that is left runs, some after others.
fn storm(scope: &Scope, count: u64, random: &mut Random, mut kill: impl FnMut(u64) -> Result<()>) -> Result<Seen> {
    let mut seen = Seen::default();
    let mut kills = 0;
    let delete =
        |pod: &Value, grace| scope.cluster.delete(&scope.pod_path(&text(&pod["metadata"]["name"])), Some(grace));
    while seen.created < count {
        let living = look(scope, &mut seen)?.len() as u64;
        // The kubelet takes 110 pods.
        for _ in 0..(1 + random.below(16)).min(count - seen.created).min(70_u64.saturating_sub(living)) {
            let shares = 1 + random.below(10);
            scope.pod(&format!("p{}", seen.created), &json!({SHARES: shares}), STAY)?;
            seen.created += 1;
        }
        if seen.created / KILL_EVERY > kills {
            kill(kills)?;
            kills += 1;
        }
        let pods = look(scope, &mut seen)?;
        for pod in &pods {
            let ended = text(&pod["status"]["phase"]) == "Failed";
            // Most of those that go have run; some have not.
            let goes =
                if text(&pod["status"]["phase"]) == "Running" { random.below(3) == 0 } else { random.below(20) == 0 };
            if ended || goes {
                delete(pod, u32::try_from(random.below(2))?)?;
            }
        }
        std::thread::sleep(Duration::from_millis(random.below(300)));
    }
    // Whoever is left runs when others have gone.
    let mut before = BTreeSet::new();
    wait_for("all that are left have run", PATIENCE * 4, || {
        let pods = look(scope, &mut seen)?;
        for pod in pods.iter().filter(|pod| text(&pod["status"]["phase"]) != "Pending") {
            delete(pod, 0)?;
        }
        let waiting: BTreeSet<String> = pods.iter().map(|pod| text(&pod["metadata"]["name"])).collect();
        if waiting != before {
            before.clone_from(&waiting);
        }
        ensure!(waiting.is_empty(), "{} are left: {waiting:?}", waiting.len());
        Ok(Some(()))
    })?;
    Ok(seen)
}

/// Kills the agent while no pod is on its way, and lets none come until it serves again: for a
/// tenth of a second the kubelet knows of no device, and refuses whoever comes for good.
fn kill_agent(scope: &Scope) -> Result<()> {
    let mut looks = 0;
    signal_component("scheduler", "STOP")?;
    let killed = wait_until("no pod is on its way", || {
        let on_its_way = |pod: &Value| pod["spec"]["nodeName"].is_string() && pod["status"]["phase"] == "Pending";
        // What the scheduler sent before it was stopped may arrive after one look.
        looks = if scope.pods()?.iter().any(on_its_way) { 0 } else { looks + 1 };
        Ok(looks == 2)
    })
    .and_then(|()| signal(NODE, "cleave-agent", "KILL"))
    .and_then(|()| wait_until("the agent serves again", || agent_says(scope.cluster, "readyz").map(|_| true)));
    signal_component("scheduler", "CONT").and(killed)
}

/// `STORM` is how many pods: 1,000 show more than there is time for in every run of the tests.
#[test]
fn a_storm_of_pods_has_none_refused_and_none_split_whatever_is_killed() -> Result<()> {
    let count = std::env::var("STORM").map_or(Ok(120), |count| count.parse().context("STORM"))?;
    let seed = std::env::var("SEED").map_or(Ok(42), |seed| seed.parse().context("SEED"))?;
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "storm")?;
    let mut killed: BTreeMap<&str, u32> = BTreeMap::new();
    let gated = storm(&scope, count, &mut Random::seeded(seed), |kills| {
        let what = ["agent", "operator", "kubelet"][usize::try_from(kills % 3)?];
        *killed.entry(what).or_default() += 1;
        match what {
            "agent" => kill_agent(&scope),
            "operator" => {
                let pods = cluster.list(&format!(
                    "/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/component=operator"
                ))?;
                pods.iter().try_for_each(|pod| {
                    cluster.delete(
                        &format!("/api/v1/namespaces/{SYSTEM}/pods/{}", text(&pod["metadata"]["name"])),
                        Some(0),
                    )
                })
            }
            _ => {
                launcher(&["kill", &format!("kubelet@{NODE}")])?;
                launcher(&["start", &format!("kubelet@{NODE}")]).map(drop)
            }
        }
    })?;
    // The same without the gate, in a namespace that an administrator has taken out.
    cluster.patch(
        &format!("/api/v1/namespaces/{}", scope.namespace),
        &json!({"metadata": {"labels": {"cleave.dev/allow": "placement"}}}),
    )?;
    let plain = storm(&scope, count.min(120), &mut Random::seeded(seed), |_| Ok(()))?;
    let _ = writeln!(
        std::io::stderr(),
        "storm, seed {seed}: with the gate {} pods, {} ran, {} refused, {} split or over-committed, killed {killed:?}; without it {} pods, {} ran, {} refused",
        gated.created,
        gated.ran.len(),
        gated.refused.len(),
        gated.broken.len(),
        plain.created,
        plain.ran.len(),
        plain.refused.len()
    );
    ensure!(gated.refused.is_empty() && gated.broken.is_empty(), "{gated:?}");
    ensure!(!plain.refused.is_empty(), "the storm shows nothing: {plain:?}");
    Ok(())
}
