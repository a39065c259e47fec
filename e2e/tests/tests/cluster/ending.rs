//! Tests that the termination of one pod does not break its neighbours (other pods that use the
//! same GPU). Cleave adds a `preStop` hook to containers with shares. The hook is a sleep, so the
//! kubelet sends SIGTERM only after the sleep. During the sleep, the agent terminates the
//! containers' GPU programs through MPS.
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cleave_e2e::{Cluster, Refused, Scope, WAIT_TIMEOUT, on_node, pod, signal_program, text, wait_for, wait_until};
use serde_json::{Value, json};

use crate::chart::ChartSetting;
use crate::gate_admission::{
    GATE_VALUE, REGISTRATIONS_PATH, admit_in_dry_run, set_exceptions, skips_without_mutating_policies,
};
use crate::{NODE, SHARES_RESOURCE, allocations, ten_shares, ten_shares_of};

/// Number of pods deleted for each combination of grace period and program.
const DELETION_ROUNDS: usize = 2;
/// Script of a program with long kernels. If the program is killed during a kernel, its neighbours
/// always break.
const BUSY_SCRIPT: &str = "exec cleave-client --kernel-ms 1000 --busy-forever";
/// Script of a program with long kernels that exits cleanly on SIGTERM.
const BUSY_UNTIL_SIGTERM_SCRIPT: &str = "exec cleave-client --kernel-ms 1000 --busy-forever --handle-sigterm";
/// Script of a program with short kernels.
const NEIGHBOUR_SCRIPT: &str = "exec cleave-client --kernel-ms 1 --busy-forever";
/// The chart value that sets the sleep of an injected `preStop` hook, in seconds.
const PRE_STOP_VALUE: &str = "admission.preStopSeconds";

/// Returns a pod with one container that has these limits, and with the default grace period.
fn pod_requesting(limits: &Value) -> Value {
    let mut pod = pod("t", limits, "true");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(30);
    pod
}

/// Returns the seconds that the `preStop` hook of each container sleeps: first of the containers,
/// then of the init containers.
fn prestop_sleep_seconds(pod: &Value) -> Vec<Option<i64>> {
    let all = ["containers", "initContainers"].map(|list| pod["spec"][list].as_array().cloned().unwrap_or_default());
    all.concat().iter().map(|container| container["lifecycle"]["preStop"]["sleep"]["seconds"].as_i64()).collect()
}

/// Waits until the API server admits a pod with these sleeps, and returns the admitted pod. The API
/// server applies changes of policies, webhooks and labels after a short delay. If one call of the
/// webhook fails, the API server admits the pod without a sleep.
fn wait_for_prestop_sleeps(scope: &Scope, pod: &Value, expected: &[Option<i64>]) -> Result<Value> {
    wait_for(&format!("{expected:?} on {pod}"), WAIT_TIMEOUT, || {
        let admitted = admit_in_dry_run(scope, pod)?;
        let found = prestop_sleep_seconds(&admitted);
        ensure!(found == expected, "the sleeps are {found:?}");
        Ok(Some(admitted))
    })
}

/// Checks which containers receive a hook. The policy and the webhook follow the same rules.
fn check_which_containers_get_sleeps(scope: &Scope) -> Result<()> {
    wait_for_prestop_sleeps(scope, &pod_requesting(&json!({SHARES_RESOURCE: 2})), &[Some(1)])?;
    for limits in
        [json!({SHARES_RESOURCE: "1"}), json!({"nvidia.com/gpu-10gb": 1}), json!({"nvidia.com/mig-1g.10gb.shared": 1})]
    {
        wait_for_prestop_sleeps(scope, &pod_requesting(&limits), &[Some(1)])?;
    }
    for limits in [
        json!({}),
        json!({"cpu": "10m"}),
        json!({SHARES_RESOURCE: 0}),
        json!({"nvidia.com/gpu": 1}),
        json!({"nvidia.com/gpu-timeslice": 1}),
        json!({"nvidia.com/mig-1g.10gb": 1}),
    ] {
        wait_for_prestop_sleeps(scope, &pod_requesting(&limits), &[None])?;
    }
    // This pod has several containers with and without hooks of their own, and init containers.
    let mut pod = pod_requesting(&json!({SHARES_RESOURCE: 1}));
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
        // The API server accepts duplicate environment variables with a warning.
        container("twice", json!({"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]})),
    ]);
    pod["spec"]["initContainers"] =
        json!([container("first", json!({})), container("sidecar", json!({"restartPolicy": "Always"}))]);
    let expected = [Some(1), None, None, Some(7), Some(1), Some(1), None, Some(1)];
    let made = wait_for_prestop_sleeps(scope, &pod, &expected)?;
    let containers = &made["spec"]["containers"];
    ensure!(containers[2]["lifecycle"]["preStop"]["exec"].is_object(), "{}", containers[2]);
    ensure!(containers[4]["lifecycle"]["postStart"]["exec"].is_object(), "{}", containers[4]);
    ensure!(containers[5]["env"].as_array().is_some_and(|env| env.len() == 2), "{}", containers[5]);
    check_which_pods_get_no_sleeps(scope)
}

/// Checks which pods with shares receive no hook, and which invalid pods the API server refuses.
fn check_which_pods_get_no_sleeps(scope: &Scope) -> Result<()> {
    // Cleave injects no hook if its sleep would use the whole grace period.
    for (grace, expected) in [(0, None), (1, None), (2, Some(1))] {
        let mut pod = pod_requesting(&json!({SHARES_RESOURCE: 1}));
        pod["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        wait_for_prestop_sleeps(scope, &pod, &[expected])?;
    }
    let mut opted_out = pod_requesting(&json!({SHARES_RESOURCE: 1}));
    opted_out["metadata"]["annotations"] = json!({"cleave.dev/pre-stop": "none"});
    wait_for_prestop_sleeps(scope, &opted_out, &[None])?;
    opted_out["metadata"]["annotations"] = json!({"cleave.dev/pre-stop": "please"});
    wait_for_prestop_sleeps(scope, &opted_out, &[Some(1)])?;
    let mut forged = pod_requesting(&json!({SHARES_RESOURCE: 1}));
    forged["metadata"]["annotations"] = json!({"cleave.dev/pre-stopped": "none"});
    let refused =
        admit_in_dry_run(scope, &forged).err().context("an unknown annotation was accepted")?.downcast::<Refused>()?;
    ensure!(refused.message.contains("cleave.dev/pre-stopped"), "{refused}");
    // The API server's validation, not the policy, refuses an invalid pod.
    let mut empty = pod_requesting(&json!({SHARES_RESOURCE: 1}));
    empty["spec"]["containers"] = Value::Null;
    let refused = admit_in_dry_run(scope, &empty)
        .err()
        .context("a pod without containers was admitted")?
        .downcast::<Refused>()?;
    ensure!(refused.message.contains("spec.containers: Required value"), "{refused}");
    for (allow, expected) in
        [("pre-stop", None), ("size.pre-stop", None), ("placement", Some(1)), ("all", None), ("", Some(1))]
    {
        set_exceptions(scope, allow)?;
        wait_for_prestop_sleeps(scope, &pod_requesting(&json!({SHARES_RESOURCE: 1})), &[expected])?;
    }
    Ok(())
}

#[test]
fn the_admission_policy_injects_sleeps_into_containers_with_shares() -> Result<()> {
    let cluster = Cluster::connect()?;
    if skips_without_mutating_policies(&cluster)? {
        return Ok(());
    }
    let scope = Scope::new(&cluster, "ending-policy")?;
    let mut setting = ChartSetting::change(GATE_VALUE, "policy")?;
    let policy = cluster.get(&format!("{REGISTRATIONS_PATH}/mutatingadmissionpolicies/cleave-pre-stop"))?;
    ensure!(policy["spec"]["failurePolicy"] == "Ignore", "{}", policy["spec"]);
    check_which_containers_get_sleeps(&scope)?;
    // The injection of the sleep does not depend on the placement gate.
    setting.change_also(&[(GATE_VALUE, json!("none")), (PRE_STOP_VALUE, json!(3))])?;
    wait_for_prestop_sleeps(&scope, &pod_requesting(&json!({SHARES_RESOURCE: 1})), &[Some(3)])?;
    setting.change_also(&[(PRE_STOP_VALUE, json!(0))])?;
    wait_for_prestop_sleeps(&scope, &pod_requesting(&json!({SHARES_RESOURCE: 1})), &[None])?;
    Ok(())
}

#[test]
fn the_webhook_injects_the_same_sleeps() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "ending-webhook")?;
    let _gating = ChartSetting::change(GATE_VALUE, "webhook")?;
    let path = format!("{REGISTRATIONS_PATH}/mutatingadmissionpolicies/cleave-pre-stop");
    ensure!(cluster.find(&path)?.is_none(), "the admission policy is installed too");
    check_which_containers_get_sleeps(&scope)
}

/// A kind of deletion: the grace period in seconds, the script of the pod, and whether an
/// annotation of the pod prevents the hook.
#[derive(Clone, Copy)]
struct Deletion {
    grace: u32,
    script: &'static str,
    without_hook: bool,
}

/// The number of deletions, and the number of deletions that broke the neighbour.
#[derive(Default)]
struct DeletionCount {
    deletions: usize,
    broken: usize,
}

/// Creates the neighbour if it does not exist, and recreates the neighbour if it is broken. Returns
/// whether it was broken.
fn ensure_neighbour(scope: &Scope) -> Result<bool> {
    let broken = neighbour_error(scope)?.is_some();
    if broken || scope.cluster.find(&scope.pod_path("neighbour"))?.is_none() {
        scope.delete_pod("neighbour", 0)?;
        scope.create_pod("neighbour", &json!({SHARES_RESOURCE: 1}), NEIGHBOUR_SCRIPT)?;
        wait_until_busy(scope, "neighbour")?;
    }
    Ok(broken)
}

/// Waits until a pod's program has launched a kernel.
fn wait_until_busy(scope: &Scope, name: &str) -> Result<()> {
    scope.wait_until_running(name)?;
    wait_until(&format!("{name} has launched a kernel"), || {
        let log = scope.pod_log(name)?;
        if log.contains("\"error\"") {
            bail!("the program failed: {log}");
        }
        Ok(log.contains("\"launched\""))
    })
}

/// Returns the neighbour's error if the neighbour is broken.
fn neighbour_error(scope: &Scope) -> Result<Option<String>> {
    if scope.cluster.find(&scope.pod_path("neighbour"))?.is_none() {
        return Ok(None);
    }
    let log = scope.pod_log("neighbour")?;
    Ok(log.lines().find(|line| line.contains("\"error\"")).map(str::to_owned))
}

/// Creates a namespace, and divides one GPU into ten shares. All pods with shares are then on the
/// same GPU.
fn ten_shares_of_one_gpu<'a>(cluster: &'a Cluster, name: &str) -> Result<Scope<'a>> {
    ten_shares_of(cluster, name, Some(&[0]))
}

/// Creates and deletes busy pods on the neighbour's GPU, one after another, and counts the
/// deletions that break the neighbour.
fn delete_busy_pods(scope: &Scope, deletion: Deletion) -> Result<DeletionCount> {
    let Deletion { grace, script, without_hook } = deletion;
    let mut count = DeletionCount::default();
    ensure_neighbour(scope)?;
    for round in 0..DELETION_ROUNDS {
        let name = format!("busy-{round}");
        let mut object = pod(&name, &json!({SHARES_RESOURCE: 2}), script);
        object["spec"]["terminationGracePeriodSeconds"] = json!(30);
        if without_hook {
            object["metadata"]["annotations"] = json!({"cleave.dev/pre-stop": "none"});
        }
        let path = scope.pod_path(&name);
        scope.cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        wait_until_busy(scope, &name)?;
        let [one, other] =
            [name.as_str(), "neighbour"].map(|pod| scope.client_report(pod).map(|report| text(&report["uuid"])));
        let (one, other) = (one?, other?);
        ensure!(one == other, "{name} is on {one}, its neighbour on {other}");
        let allocation = || -> Result<Value> {
            let node = scope.cluster.gpu_node(NODE)?;
            let gpus = node["status"]["gpus"].as_array().cloned().unwrap_or_default();
            let mut all = gpus.iter().flat_map(|gpu| gpu["allocations"].as_array().cloned().unwrap_or_default());
            let own = format!("{}/{name}", scope.namespace);
            Ok(all.find(|allocation| text(&allocation["pod"]) == own).unwrap_or(Value::Null))
        };
        scope.cluster.delete(&path, Some(grace))?;
        // After a deletion with grace period 0, the program may run longer than the object exists.
        wait_until(&format!("{name} and its client no longer exist"), || {
            Ok(scope.cluster.find(&path)?.is_none() && allocation()?["clients"].as_u64().unwrap_or(0) == 0)
        })?;
        count.deletions += 1;
        // Run a command in the neighbour's container to wait. A broken neighbour reports its error
        // within milliseconds after the end of the deleted pod's client, before the command ends.
        // Ignore errors, because the command fails if the neighbour has exited.
        let _ = scope.exec_in_pod("neighbour", &["true"]);
        count.broken += usize::from(ensure_neighbour(scope)?);
    }
    Ok(count)
}

#[test]
fn deleting_busy_pods_does_not_break_their_neighbour() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares_of_one_gpu(&cluster, "ending")?;
    let mut out = std::io::stderr();
    writeln!(out, "neighbours broken by the deletion of a pod that runs kernels of 1 s:")?;
    let mut graceful = 0;
    for grace in [30, 5, 0] {
        for (what, script) in [("without a handler", BUSY_SCRIPT), ("that handles SIGTERM", BUSY_UNTIL_SIGTERM_SCRIPT)]
        {
            let count = delete_busy_pods(&scope, Deletion { grace, script, without_hook: false })?;
            writeln!(out, "  grace {grace:>2} s, {what}: {} of {}", count.broken, count.deletions)?;
            if grace > 0 {
                graceful += count.broken;
            }
        }
    }
    let opted_out = delete_busy_pods(&scope, Deletion { grace: 30, script: BUSY_SCRIPT, without_hook: true })?;
    writeln!(out, "  grace 30 s, without a handler or a hook: {} of {}", opted_out.broken, opted_out.deletions)?;
    ensure!(graceful == 0, "{graceful} neighbours were broken by deletions with a grace period");
    Ok(())
}

/// Keeps the agent of [`NODE`] stopped until this value is dropped.
struct StoppedAgent;

impl StoppedAgent {
    fn new() -> Result<Self> {
        signal_program(NODE, "cleave-agent", "STOP")?;
        Ok(Self)
    }
}

impl Drop for StoppedAgent {
    fn drop(&mut self) {
        if let Err(error) = signal_program(NODE, "cleave-agent", "CONT") {
            let _ = writeln!(std::io::stderr(), "failed to continue the agent: {error:#}");
        }
    }
}

#[test]
fn without_the_agent_deleting_a_busy_pod_breaks_its_neighbours() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares_of_one_gpu(&cluster, "ending-none")?;
    let mut broken = 0;
    for round in 0..2 {
        let _ = ensure_neighbour(&scope)?;
        let name = format!("busy-{round}");
        // A process with PID 1 ignores SIGTERM if it has no handler, so the kubelet kills the
        // process after the grace period.
        let mut object = pod(&name, &json!({SHARES_RESOURCE: 2}), BUSY_SCRIPT);
        object["spec"]["terminationGracePeriodSeconds"] = json!(2);
        cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        wait_until_busy(&scope, &name)?;
        let stopped = StoppedAgent::new()?;
        scope.delete_pod(&name, 2)?;
        let error = wait_for("the neighbour reports an error", WAIT_TIMEOUT, || neighbour_error(&scope));
        drop(stopped);
        broken += usize::from(error.is_ok());
    }
    writeln!(std::io::stderr(), "neighbours broken while no agent runs: {broken} of 2")?;
    ensure!(broken == 2, "the simulated MPS does not break neighbours, so the other test proves nothing");
    Ok(())
}

/// The file in which the kubelet records that it terminates pods because the node shuts down.
const SHUTDOWN_STATE_PATH: &str = "/var/lib/kubelet/graceful_node_shutdown_state";

/// Configures the agents with grace periods for a node shutdown. Dropping this value restores the
/// configuration, and ends the simulated shutdown.
struct ShutdownPeriods(#[expect(dead_code, reason = "dropped with this value")] ChartSetting);

impl ShutdownPeriods {
    fn set(periods: &[(i32, u32)]) -> Result<Self> {
        let entry =
            |(priority, seconds): &(i32, u32)| json!({"priority": priority, "shutdownGracePeriodSeconds": seconds});
        let periods: Vec<Value> = periods.iter().map(entry).collect();
        Ok(Self(ChartSetting::change("agent.shutdownGracePeriodByPodPriority", periods)?))
    }
}

impl Drop for ShutdownPeriods {
    fn drop(&mut self) {
        if let Err(error) = on_node(NODE, &["rm", "-f", SHUTDOWN_STATE_PATH]) {
            let _ = writeln!(std::io::stderr(), "failed to end the simulated shutdown: {error:#}");
        }
    }
}

/// Returns the number of MPS clients of a pod, as the node reports it.
fn count_clients(scope: &Scope, name: &str) -> Result<u64> {
    Ok(allocations(scope.cluster, scope, name)?.iter().filter_map(|held| held["clients"].as_u64()).sum())
}

/// Simulates a shutdown: the test writes the kubelet's file, because a real shutdown would require
/// systemd on the node. The kubelet therefore kills no pod, and only the agent terminates programs.
#[test]
fn at_a_node_shutdown_pods_are_terminated_through_mps_in_order_of_priority() -> Result<()> {
    const PRIORITY_CLASSES_PATH: &str = "/apis/scheduling.k8s.io/v1/priorityclasses";
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "ending-shutdown")?;
    let class = format!("{PRIORITY_CLASSES_PATH}/e2e-later");
    if cluster.find(&class)?.is_none() {
        cluster.create(PRIORITY_CLASSES_PATH, &json!({"metadata": {"name": "e2e-later"}, "value": 1000}))?;
    }
    let _periods = ShutdownPeriods::set(&[(0, 12), (1000, 60), (2_000_000_000, 10)])?;
    for (name, script, class) in [
        ("first", BUSY_SCRIPT, None),
        ("polite", BUSY_UNTIL_SIGTERM_SCRIPT, None),
        ("later", NEIGHBOUR_SCRIPT, Some("e2e-later")),
    ] {
        let mut object = pod(name, &json!({SHARES_RESOURCE: 2}), script);
        object["spec"]["terminationGracePeriodSeconds"] = json!(30);
        object["spec"]["priorityClassName"] = json!(class);
        cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &object)?;
        wait_until_busy(&scope, name)?;
    }
    for name in ["first", "polite", "later"] {
        wait_until(&format!("the node reports the client of {name}"), || Ok(count_clients(&scope, name)? == 1))?;
    }
    let begun = Instant::now();
    let write = "printf '{\"startTime\":\"%s\",\"endTime\":\"0001-01-01T00:00:00Z\"}' \
        \"$(date -u +%Y-%m-%dT%H:%M:%SZ)\" >$0.new && mv $0.new $0";
    on_node(NODE, &["sh", "-c", write, SHUTDOWN_STATE_PATH])?;
    wait_until("the program without a SIGTERM handler is terminated", || Ok(count_clients(&scope, "first")? == 0))?;
    let took = begun.elapsed();
    // The agent terminates a program with a handler no earlier than 9 s after the start of the
    // shutdown.
    ensure!(took < Duration::from_secs(8), "the program was terminated after {took:?}");
    ensure!(
        count_clients(&scope, "polite")? == 1 && count_clients(&scope, "later")? == 1,
        "other programs were terminated too"
    );
    for name in ["polite", "later"] {
        let log = scope.pod_log(name)?;
        ensure!(!log.contains("\"error\""), "{name} was broken: {log}");
    }
    wait_until("the program with a SIGTERM handler is terminated at the end of its period", || {
        Ok(count_clients(&scope, "polite")? == 0)
    })?;
    let took = begun.elapsed();
    ensure!(took > Duration::from_secs(7), "the program was terminated after {took:?} of 12 s");
    // The kubelet terminates the next group of pods when the period of the first group ends, or
    // when no pod of the first group remains.
    wait_until("the pod of the next group is terminated", || Ok(count_clients(&scope, "later")? == 0))?;
    let took = begun.elapsed();
    ensure!(took > Duration::from_secs(9), "the program was terminated after {took:?}");
    cluster.delete(&class, None)
}
