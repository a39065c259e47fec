//! What ends one pod does not break its neighbours: containers with shares are given a moment
//! before SIGTERM, in which the agent ends what they have on the GPU.
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cleave_e2e::{Cluster, PATIENCE, Refused, Scope, on_node, pod, signal, text, wait_for, wait_until};
use serde_json::{Value, json};

use crate::chart::Setting;
use crate::gate_admission::{GATING, REGISTRATIONS, admitted, label};
use crate::{NODE, SHARES, allocations, ten_shares};

/// How many pods are deleted in each way.
const ROUNDS: usize = 4;
/// With such a kernel in flight a kill breaks the neighbours every time.
const BUSY: &str = "exec cleave-client --kernel-ms 1000 --busy-forever";
/// The same, and it ends in order when it is told to.
const POLITE: &str = "exec cleave-client --kernel-ms 1000 --busy-forever --handle-sigterm";
const NEIGHBOUR: &str = "exec cleave-client --kernel-ms 1 --busy-forever";
/// Value of the chart: how long a `preStop` that is injected sleeps.
const PRE_STOP: &str = "admission.preStopSeconds";

/// A pod whose containers have the usual grace.
fn asking(limits: &Value) -> Value {
    let mut pod = pod("t", limits, "true");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(30);
    pod
}

/// What each container, and each init container, sleeps before its end.
fn sleeps(pod: &Value) -> Vec<Option<i64>> {
    let all = ["containers", "initContainers"].map(|list| pod["spec"][list].as_array().cloned().unwrap_or_default());
    all.concat().iter().map(|container| container["lifecycle"]["preStop"]["sleep"]["seconds"].as_i64()).collect()
}

/// The API server learns of policies, webhooks and labels a moment later.
fn soon(scope: &Scope, pod: &Value, expected: &[Option<i64>]) -> Result<()> {
    wait_until(&format!("{expected:?} on {pod}"), || {
        let found = sleeps(&admitted(scope, pod)?);
        ensure!(found == expected, "it has {found:?}");
        Ok(true)
    })
}

fn has(scope: &Scope, pod: &Value, expected: &[Option<i64>]) -> Result<()> {
    let found = sleeps(&admitted(scope, pod)?);
    ensure!(found == expected, "{pod} has {found:?}, not {expected:?}");
    Ok(())
}

/// Which containers sleep and which do not; the same by whatever means.
fn the_list(scope: &Scope) -> Result<()> {
    soon(scope, &asking(&json!({SHARES: 2})), &[Some(1)])?;
    for limits in [json!({SHARES: "1"}), json!({"nvidia.com/gpu-10gb": 1}), json!({"nvidia.com/mig-1g.10gb.shared": 1})]
    {
        has(scope, &asking(&limits), &[Some(1)])?;
    }
    for limits in [
        json!({}),
        json!({"cpu": "10m"}),
        json!({SHARES: 0}),
        json!({"nvidia.com/gpu": 1}),
        json!({"nvidia.com/gpu-timeslice": 1}),
        json!({"nvidia.com/mig-1g.10gb": 1}),
    ] {
        has(scope, &asking(&limits), &[None])?;
    }
    // Several containers, with hooks of their own and without, and those that come before.
    let mut pod = asking(&json!({SHARES: 1}));
    let main = pod["spec"]["containers"][0].clone();
    let container = |name: &str, change: Value| {
        let mut container = main.clone();
        container["name"] = json!(name);
        for (key, value) in change.as_object().into_iter().flatten() {
            container[key.as_str()] = value.clone();
        }
        container
    };
    let command = json!({"exec": {"command": ["true"]}});
    pod["spec"]["containers"] = json!([
        main,
        container("beside", json!({"resources": {}})),
        container("own", json!({"lifecycle": {"preStop": command}})),
        container("sleeper", json!({"lifecycle": {"preStop": {"sleep": {"seconds": 7}}}})),
        container("starter", json!({"lifecycle": {"postStart": command}})),
        // Which the API server takes, with a warning.
        container("twice", json!({"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]})),
    ]);
    pod["spec"]["initContainers"] =
        json!([container("first", json!({})), container("sidecar", json!({"restartPolicy": "Always"}))]);
    let made = admitted(scope, &pod)?;
    ensure!(
        sleeps(&made) == [Some(1), None, None, Some(7), Some(1), Some(1), None, Some(1)],
        "{:?} of {}",
        sleeps(&made),
        made["spec"]
    );
    let containers = &made["spec"]["containers"];
    ensure!(containers[2]["lifecycle"]["preStop"]["exec"].is_object(), "{}", containers[2]);
    ensure!(containers[4]["lifecycle"]["postStart"]["exec"].is_object(), "{}", containers[4]);
    ensure!(containers[5]["env"].as_array().is_some_and(|env| env.len() == 2), "{}", containers[5]);
    // Where it would take the whole grace.
    for (grace, expected) in [(0, None), (1, None), (2, Some(1))] {
        let mut pod = asking(&json!({SHARES: 1}));
        pod["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        has(scope, &pod, &[expected])?;
    }
    let mut declining = asking(&json!({SHARES: 1}));
    declining["metadata"]["annotations"] = json!({"cleave.dev/pre-stop": "none"});
    has(scope, &declining, &[None])?;
    declining["metadata"]["annotations"] = json!({"cleave.dev/pre-stop": "please"});
    has(scope, &declining, &[Some(1)])?;
    let mut forged = asking(&json!({SHARES: 1}));
    forged["metadata"]["annotations"] = json!({"cleave.dev/pre-stopped": "none"});
    let refused = admitted(scope, &forged).err().context("any annotation may be set")?.downcast::<Refused>()?;
    ensure!(refused.message.contains("cleave.dev/pre-stopped"), "{refused}");
    // It is refused for what is wrong with it.
    let mut empty = asking(&json!({SHARES: 1}));
    empty["spec"]["containers"] = Value::Null;
    let refused = admitted(scope, &empty).err().context("it is admitted without containers")?.downcast::<Refused>()?;
    ensure!(refused.message.contains("spec.containers: Required value"), "{refused}");
    for (allow, expected) in
        [("pre-stop", None), ("size.pre-stop", None), ("placement", Some(1)), ("all", None), ("", Some(1))]
    {
        label(scope, allow)?;
        soon(scope, &asking(&json!({SHARES: 1})), &[expected])?;
    }
    Ok(())
}

#[test]
fn a_policy_lets_containers_with_shares_sleep_before_their_end() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "ending-policy")?;
    let gating = Setting::of(GATING, "policy")?;
    let policy = cluster.get(&format!("{REGISTRATIONS}/mutatingadmissionpolicies/cleave-pre-stop"))?;
    ensure!(policy["spec"]["failurePolicy"] == "Ignore", "{}", policy["spec"]);
    the_list(&scope)?;
    drop(gating);
    // Without the gate too: they have nothing to do with each other.
    let gating = Setting::of(GATING, "none")?;
    soon(&scope, &asking(&json!({SHARES: 1})), &[Some(1)])?;
    drop(gating);
    let seconds = Setting::of(PRE_STOP, 3)?;
    soon(&scope, &asking(&json!({SHARES: 1})), &[Some(3)])?;
    drop(seconds);
    let off = Setting::of(PRE_STOP, 0)?;
    soon(&scope, &asking(&json!({SHARES: 1})), &[None])?;
    drop(off);
    Ok(())
}

#[test]
fn a_webhook_does_the_same() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "ending-webhook")?;
    let _gating = Setting::of(GATING, "webhook")?;
    let path = format!("{REGISTRATIONS}/mutatingadmissionpolicies/cleave-pre-stop");
    ensure!(cluster.find(&path)?.is_none(), "there is a policy besides");
    the_list(&scope)
}

/// How a pod is deleted.
#[derive(Clone, Copy)]
struct Way {
    grace: u32,
    script: &'static str,
    declines: bool,
}

/// What came of deletions in one way.
#[derive(Default)]
struct Count {
    deletions: usize,
    broken: usize,
}

/// Makes the neighbour, unless there is one that works. Whether there was one that is broken.
fn neighbour(scope: &Scope) -> Result<bool> {
    let broken = breakage(scope)?.is_some();
    if broken || scope.cluster.find(&scope.pod_path("neighbour"))?.is_none() {
        scope.delete_pod("neighbour", 0)?;
        scope.pod("neighbour", &json!({SHARES: 1}), NEIGHBOUR)?;
        works(scope, "neighbour")?;
    }
    Ok(broken)
}

/// Waits until a pod's program has a kernel in flight.
fn works(scope: &Scope, name: &str) -> Result<()> {
    scope.running(name)?;
    wait_until(&format!("{name} works"), || {
        let log = scope.log(name)?;
        if log.contains("\"error\"") {
            bail!("it failed: {log}");
        }
        Ok(log.contains("\"launched\""))
    })
}

/// What broke the neighbour, if that is so.
fn breakage(scope: &Scope) -> Result<Option<String>> {
    if scope.cluster.find(&scope.pod_path("neighbour"))?.is_none() {
        return Ok(None);
    }
    let log = scope.log("neighbour")?;
    Ok(log.lines().find(|line| line.contains("\"error\"")).map(str::to_owned))
}

/// Deletes busy pods beside the neighbour, one after the other.
fn delete(scope: &Scope, way: Way) -> Result<Count> {
    let Way { grace, script, declines } = way;
    let mut count = Count::default();
    neighbour(scope)?;
    for round in 0..ROUNDS {
        let name = format!("busy-{round}");
        let mut object = pod(&name, &json!({SHARES: 2}), script);
        object["spec"]["terminationGracePeriodSeconds"] = json!(30);
        // On the neighbour's GPU: it is the one that has the fewest free shares.
        if declines {
            object["metadata"]["annotations"] = json!({"cleave.dev/pre-stop": "none"});
        }
        let path = scope.pod_path(&name);
        scope.cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        works(scope, &name)?;
        let [one, other] = [name.as_str(), "neighbour"].map(|pod| scope.seen(pod).map(|seen| text(&seen["uuid"])));
        let (one, other) = (one?, other?);
        ensure!(one == other, "{name} is on {one}, its neighbour on {other}");
        let server = || -> Result<Value> {
            let node = scope.cluster.gpunode(NODE)?;
            let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
            let mut all = gpus.iter().flat_map(|gpu| gpu["allocations"].as_array().cloned().unwrap_or_default());
            let own = format!("{}/{name}", scope.namespace);
            Ok(all.find(|allocation| text(&allocation["pod"]) == own).unwrap_or(Value::Null))
        };
        scope.cluster.delete(&path, Some(grace))?;
        // Deleted by force, its program outlives the object.
        wait_until(&format!("{name} is gone, and its client with it"), || {
            Ok(scope.cluster.find(&path)?.is_none() && server()?["clients"].as_u64().unwrap_or(0) == 0)
        })?;
        count.deletions += 1;
        // What breaks does so with the client's death, and says so within milliseconds: less than a
        // command in its container takes, which fails where it has ended by then.
        let _ = scope.exec("neighbour", &["true"]);
        count.broken += usize::from(neighbour(scope)?);
    }
    Ok(count)
}

#[test]
fn busy_pods_are_deleted_and_their_neighbour_goes_on() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "ending")?;
    let mut out = std::io::stderr();
    writeln!(out, "neighbours broken by the deletion of a pod that computes, kernels of 1 s:")?;
    let mut foreseen = 0;
    for grace in [30, 5, 0] {
        for (what, script) in [("without a handler", BUSY), ("that handles SIGTERM", POLITE)] {
            let count = delete(&scope, Way { grace, script, declines: false })?;
            writeln!(out, "  grace {grace:>2} s, {what}: {} of {}", count.broken, count.deletions)?;
            if grace > 0 {
                foreseen += count.broken;
            }
        }
    }
    let declined = delete(&scope, Way { grace: 30, script: BUSY, declines: true })?;
    writeln!(out, "  grace 30 s, without a handler or a hook: {} of {}", declined.broken, declined.deletions)?;
    ensure!(foreseen == 0, "{foreseen} neighbours were broken by deletions that could be seen coming");
    Ok(())
}

/// Stops the agent of the node, until the value goes.
struct Stopped;

impl Stopped {
    fn new() -> Result<Self> {
        signal(NODE, "cleave-agent", "STOP")?;
        Ok(Self)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Err(error) = signal(NODE, "cleave-agent", "CONT") {
            let _ = writeln!(std::io::stderr(), "the agent does not go on: {error:#}");
        }
    }
}

#[test]
fn without_the_agent_the_neighbours_break() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "ending-none")?;
    let mut broken = 0;
    for round in 0..2 {
        let _ = neighbour(&scope)?;
        let name = format!("busy-{round}");
        // As the first process it gets SIGTERM and does not notice: it is killed at the end of the
        // grace.
        let mut object = pod(&name, &json!({SHARES: 2}), BUSY);
        object["spec"]["terminationGracePeriodSeconds"] = json!(2);
        cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        works(&scope, &name)?;
        let stopped = Stopped::new()?;
        scope.delete_pod(&name, 2)?;
        let told = wait_for("the neighbour says that it is broken", PATIENCE, || breakage(&scope));
        drop(stopped);
        broken += usize::from(told.is_ok());
    }
    writeln!(std::io::stderr(), "neighbours broken where no agent sees it coming: {broken} of 2")?;
    ensure!(broken == 2, "the simulated MPS does not break them: nothing is shown by the other test");
    Ok(())
}

/// Where the kubelet of a node notes that it ends pods for a shutdown.
const NOTE: &str = "/var/lib/kubelet/graceful_node_shutdown_state";

/// The agents know of these periods, until this goes; and no node shuts down then.
struct Periods(#[expect(dead_code, reason = "held until it goes")] Setting);

impl Periods {
    fn set(periods: &[(i32, u32)]) -> Result<Self> {
        let entry =
            |(priority, seconds): &(i32, u32)| json!({"priority": priority, "shutdownGracePeriodSeconds": seconds});
        let periods: Vec<Value> = periods.iter().map(entry).collect();
        Ok(Self(Setting::of("agent.shutdownGracePeriodByPodPriority", periods)?))
    }
}

impl Drop for Periods {
    fn drop(&mut self) {
        if let Err(error) = on_node(NODE, &["rm", "-f", NOTE]) {
            let _ = writeln!(std::io::stderr(), "agents still expect a shutdown: {error:#}");
        }
    }
}

/// How many clients the node says that a pod has.
fn clients(scope: &Scope, name: &str) -> Result<u64> {
    Ok(allocations(scope.cluster, scope, name)?.iter().filter_map(|held| held["clients"].as_u64()).sum())
}

/// The kubelet's note is written in its place: its own shutdown would take the node's systemd
/// along. So nobody is killed here, and who is ended was ended by the agent.
#[test]
fn at_a_shutdown_pods_are_ended_through_mps_as_their_priority_has_its_turn() -> Result<()> {
    const CLASS: &str = "/apis/scheduling.k8s.io/v1/priorityclasses";
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "ending-shutdown")?;
    let class = format!("{CLASS}/e2e-later");
    if cluster.find(&class)?.is_none() {
        cluster.create(CLASS, &json!({"metadata": {"name": "e2e-later"}, "value": 1000}))?;
    }
    let _periods = Periods::set(&[(0, 12), (1000, 60), (2_000_000_000, 10)])?;
    for (name, script, class) in
        [("first", BUSY, None), ("polite", POLITE, None), ("later", NEIGHBOUR, Some("e2e-later"))]
    {
        let mut object = pod(name, &json!({SHARES: 2}), script);
        object["spec"]["terminationGracePeriodSeconds"] = json!(30);
        object["spec"]["priorityClassName"] = json!(class);
        cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        works(&scope, name)?;
    }
    let begun = Instant::now();
    let write = "printf '{\"startTime\":\"%s\",\"endTime\":\"0001-01-01T00:00:00Z\"}' \
        \"$(date -u +%Y-%m-%dT%H:%M:%SZ)\" >$0.new && mv $0.new $0";
    on_node(NODE, &["sh", "-c", write, NOTE])?;
    wait_until("what SIGTERM would end is ended", || Ok(clients(&scope, "first")? == 0))?;
    let took = begun.elapsed();
    ensure!(took < Duration::from_secs(5), "the first were ended after {took:?}");
    ensure!(clients(&scope, "polite")? == 1 && clients(&scope, "later")? == 1, "others were ended with them");
    for name in ["polite", "later"] {
        let log = scope.log(name)?;
        ensure!(!log.contains("\"error\""), "{name} was broken: {log}");
    }
    wait_until("what handles SIGTERM is ended at the end of its group's time", || Ok(clients(&scope, "polite")? == 0))?;
    let took = begun.elapsed();
    ensure!(took > Duration::from_secs(7), "it had {took:?} of 12 s");
    // Its group's time is over, or nobody of it is left, of this test or otherwise.
    wait_until("the next ones' turn comes", || Ok(clients(&scope, "later")? == 0))?;
    let took = begun.elapsed();
    ensure!(took > Duration::from_secs(9), "it came after {took:?}");
    cluster.delete(&class, None)
}
