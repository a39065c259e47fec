//! Tests elastic quotas. Guarantees must be met, and the replacements of evicted borrowers (pods
//! beyond their quota's guarantee) must not be evicted again and again. The rules of quotas must
//! also hold when leading operators are killed.
use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, Random, SYSTEM_NAMESPACE, Scope, TEST_LABEL, WAIT_TIMEOUT, apply_manifest, kubectl, pod, program_output,
    text, wait_for, wait_until,
};
use serde_json::{Value, json};

use crate::gate::{SLEEP_FOREVER_SCRIPT, is_gated, run_storm, wait_for_allocation_on_one_gpu};
use crate::health::cleave_path;
use crate::leaders::LeaderKiller;
use crate::{GPUS_PER_NODE, SHARES_RESOURCE, container_and_restarts, ten_shares};

const QUOTAS_PATH: &str = "/apis/cleave.dev/v1alpha1/gpuquotas";
/// Number of shares of one GPU.
const SHARES_PER_GPU: u64 = 10;
/// Grace period of borrowers, in seconds. Their program has PID 1 and no handler for SIGTERM, so
/// borrowers run until the end of the grace period.
const GRACE_SECONDS: u64 = 5;
/// The time, in addition to the grace period, within which promise P8 requires the operator to
/// release a guaranteed pod.
const MAX_OPERATOR_DELAY: Duration = Duration::from_secs(2);
/// Additional time, because the machine also runs the cluster and other tests.
const ADDITIONAL_TIME: Duration = Duration::from_secs(20);

/// Namespaces of teams, in addition to the namespace of a [`Scope`], and the quotas of all
/// namespaces. Dropping this value deletes these namespaces and quotas.
struct Teams<'a> {
    cluster: &'a Cluster,
    namespaces: Vec<String>,
}

impl<'a> Teams<'a> {
    /// Creates a namespace `e2e-NAME` with these labels for each name.
    fn new(cluster: &'a Cluster, teams: &[(&str, Value)]) -> Result<Self> {
        let namespaces = teams.iter().map(|(name, _)| format!("e2e-{name}")).collect();
        let created = Self { cluster, namespaces };
        created.delete()?;
        for ((name, labels), namespace) in teams.iter().zip(&created.namespaces) {
            let path = format!("/api/v1/namespaces/{namespace}");
            wait_until("the namespace of an earlier run no longer exists", || Ok(cluster.find(&path)?.is_none()))?;
            let mut metadata = json!({"name": namespace, "labels": {TEST_LABEL: name}});
            for (key, value) in labels.as_object().into_iter().flatten() {
                metadata["labels"][key] = value.clone();
            }
            cluster.create("/api/v1/namespaces", &json!({"metadata": metadata}))?;
            wait_until("the namespace has its default service account", || {
                Ok(cluster.find(&format!("{path}/serviceaccounts/default"))?.is_some())
            })?;
        }
        Ok(created)
    }

    /// Creates a quota of H100 GPUs for a namespace, and waits until the quota is ready.
    fn create_quota(&self, name: &str, namespace: &str, mut spec: Value) -> Result<()> {
        spec["namespaces"] = json!([namespace]);
        spec["gpus"] = json!({"models": ["H100"]});
        let object = json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota",
            "metadata": {"name": name, "labels": {TEST_LABEL: "true"}}, "spec": spec});
        self.cluster.create(QUOTAS_PATH, &object)?;
        wait_until(&format!("the quota {name} is ready"), || {
            let quota = self.cluster.get(&format!("{QUOTAS_PATH}/{name}"))?;
            let conditions = quota["status"]["conditions"].as_array().cloned().unwrap_or_default();
            Ok(conditions.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True"))
        })
    }

    fn status(&self, quota: &str) -> Result<Value> {
        Ok(self.cluster.get(&format!("{QUOTAS_PATH}/{quota}"))?["status"].clone())
    }

    fn delete(&self) -> Result<()> {
        for quota in self.cluster.list(&format!("{QUOTAS_PATH}?labelSelector={TEST_LABEL}"))? {
            self.cluster.delete(&format!("{QUOTAS_PATH}/{}", text(&quota["metadata"]["name"])), None)?;
        }
        for namespace in &self.namespaces {
            let path = format!("/api/v1/namespaces/{namespace}");
            if self.cluster.find(&path)?.is_none() {
                continue;
            }
            self.cluster.delete(&path, None)?;
            wait_until("the namespace has no pods", || {
                let pods = self.cluster.list(&format!("{path}/pods"))?;
                for pod in &pods {
                    self.cluster.delete(&format!("{path}/pods/{}", text(&pod["metadata"]["name"])), Some(0))?;
                }
                Ok(pods.is_empty())
            })?;
        }
        Ok(())
    }
}

impl Drop for Teams<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.delete() {
            let _ = writeln!(std::io::stderr(), "failed to delete the quotas and namespaces of teams: {error:#}");
        }
    }
}

/// Creates a Deployment of borrowers that request `shares` shares each. The Deployment immediately
/// replaces an evicted pod.
fn create_borrowers(cluster: &Cluster, namespace: &str, replicas: u64, shares: u64) -> Result<()> {
    let mut template = json!({"metadata": {"labels": {"app": "borrower"}}});
    template["spec"] = pod("borrower", &json!({SHARES_RESOURCE: shares}), SLEEP_FOREVER_SCRIPT)["spec"].take();
    template["spec"]["restartPolicy"] = json!("Always");
    template["spec"]["terminationGracePeriodSeconds"] = json!(GRACE_SECONDS);
    let spec = json!({"replicas": replicas, "selector": {"matchLabels": {"app": "borrower"}}, "template": template});
    cluster
        .create(
            &format!("/apis/apps/v1/namespaces/{namespace}/deployments"),
            &json!({"metadata": {"name": "borrower"}, "spec": spec}),
        )
        .map(drop)
}

/// Returns the pods of a namespace that have been released and are not being deleted.
fn released_pods(cluster: &Cluster, namespace: &str) -> Result<Vec<Value>> {
    let pods = cluster.list(&format!("/api/v1/namespaces/{namespace}/pods"))?;
    Ok(pods.into_iter().filter(|pod| !is_gated(pod) && pod["metadata"]["deletionTimestamp"].is_null()).collect())
}

fn wait_for_running(cluster: &Cluster, namespace: &str, count: u64) -> Result<()> {
    wait_until(&format!("{count} pods of {namespace} run"), || {
        let pods = released_pods(cluster, namespace)?;
        let running = pods.iter().filter(|pod| text(&pod["status"]["phase"]) == "Running").count();
        ensure!(running as u64 == count, "{running} run");
        Ok(true)
    })
}

/// Returns the name of the evicted pod and the note of each Event `Reclaimed` in a namespace. Each
/// eviction because of a quota causes one such Event.
fn reclaim_events(cluster: &Cluster, namespace: &str) -> Result<Vec<String>> {
    let events = cluster.list(&format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events"))?;
    let reclaimed = events.iter().filter(|event| event["reason"] == "Reclaimed");
    let describe = |event: &Value| format!("{}: {}", text(&event["regarding"]["name"]), text(&event["note"]));
    Ok(reclaimed.map(describe).collect())
}

#[test]
fn a_guarantee_is_met_within_the_grace_period_of_borrowers() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "quota-a")?;
    let teams = Teams::new(&cluster, &[("quota-b", json!({}))])?;
    teams.create_quota("e2e-a", &scope.namespace, json!({"min": "2"}))?;
    teams.create_quota("e2e-b", "e2e-quota-b", json!({}))?;
    create_borrowers(&cluster, "e2e-quota-b", GPUS_PER_NODE, SHARES_PER_GPU)?;
    wait_for_running(&cluster, "e2e-quota-b", GPUS_PER_NODE)?;
    wait_until("the borrowers have their label", || {
        let pods = released_pods(&cluster, "e2e-quota-b")?;
        Ok(pods.iter().all(|pod| pod["metadata"]["labels"]["cleave.dev/capacity"] == "over-quota"))
    })?;
    let began = Instant::now();
    scope.create_pod("guaranteed", &json!({SHARES_RESOURCE: SHARES_PER_GPU}), SLEEP_FOREVER_SCRIPT)?;
    let bound = Duration::from_secs(GRACE_SECONDS) + MAX_OPERATOR_DELAY;
    let waited = wait_for("the pod within the guarantee is released", bound + ADDITIONAL_TIME, || {
        Ok((!is_gated(&cluster.get(&scope.pod_path("guaranteed"))?)).then(|| began.elapsed()))
    })?;
    let _ = writeln!(
        std::io::stderr(),
        "a pod within its guarantee waited {:.2} s for borrowers with a grace period of {GRACE_SECONDS} s; P8 allows {} s",
        waited.as_secs_f64(),
        bound.as_secs()
    );
    scope.wait_until_running("guaranteed")?;
    wait_for_allocation_on_one_gpu(&cluster, &scope, "guaranteed", usize::try_from(SHARES_PER_GPU)?)?;
    wait_until("the pod has its label", || {
        Ok(cluster.get(&scope.pod_path("guaranteed"))?["metadata"]["labels"]["cleave.dev/capacity"] == "in-quota")
    })?;
    let notes = reclaim_events(&cluster, "e2e-quota-b")?;
    ensure!(notes.len() == 1 && notes[0].contains("quota e2e-a is guaranteed 2 GPUs"), "{notes:?}");
    Ok(())
}

#[test]
fn borrowers_that_a_deployment_replaces_immediately_are_not_evicted_repeatedly() -> Result<()> {
    /// Number of pods that the test creates and deletes. After each creation and deletion, the
    /// operator decides again.
    const DECISION_COUNT: usize = 20;
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "quota-a")?;
    let teams = Teams::new(&cluster, &[("quota-b", json!({}))])?;
    teams.create_quota("e2e-a", &scope.namespace, json!({"min": "1", "max": "1"}))?;
    teams.create_quota("e2e-b", "e2e-quota-b", json!({}))?;
    create_borrowers(&cluster, "e2e-quota-b", GPUS_PER_NODE, SHARES_PER_GPU)?;
    wait_for_running(&cluster, "e2e-quota-b", GPUS_PER_NODE)?;
    scope.create_pod("guaranteed", &json!({SHARES_RESOURCE: SHARES_PER_GPU}), SLEEP_FOREVER_SCRIPT)?;
    scope.wait_until_running("guaranteed")?;
    let waits = || {
        let status = teams.status("e2e-b")?;
        ensure!(status["waiting"]["pods"] == 1 && status["pods"]["over"] == GPUS_PER_NODE - 1, "{status}");
        Ok(true)
    };
    wait_until("the replaced borrower waits", waits)?;
    for index in 0..DECISION_COUNT {
        // The quota is at its maximum, so this pod waits.
        let name = format!("decision-{index}");
        scope.create_pod(&name, &json!({SHARES_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT)?;
        wait_until("the operator has decided about the pod", || {
            Ok(teams.status("e2e-a")?["waiting"]["reasons"]["OverMax"] == 1)
        })?;
        scope.delete_pod(&name, 0)?;
        wait_until("the operator has seen the end of the pod", || {
            Ok(teams.status("e2e-a")?["waiting"]["pods"].as_u64().unwrap_or(0) == 0)
        })?;
    }
    wait_until("the replaced borrower still waits", waits)?;
    let notes = reclaim_events(&cluster, "e2e-quota-b")?;
    ensure!(notes.len() == 1, "one eviction frees enough shares: {notes:?}");
    Ok(())
}

/// Checks repeatedly, on a separate thread, that the released pods of a namespace request at most
/// the maximum of its quota (rule R1 of the quota tests of `cleave-plan`).
struct MaxChecker {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<u64>>,
}

impl MaxChecker {
    fn start(namespace: String, max: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Self { stop, thread: std::thread::spawn(move || Self::run(&namespace, max, &stopped)) }
    }

    /// Checks until `stopped` is true. Returns the largest number of shares that released pods
    /// requested at the same time.
    fn run(namespace: &str, max: u64, stopped: &AtomicBool) -> Result<u64> {
        let cluster = Cluster::connect()?;
        let mut most = 0;
        while !stopped.load(Ordering::Relaxed) {
            if let Ok(pods) = cluster.list(&format!("/api/v1/namespaces/{namespace}/pods")) {
                let has_ended = |pod: &&Value| matches!(text(&pod["status"]["phase"]).as_str(), "Failed" | "Succeeded");
                let held =
                    pods.iter().filter(|pod| !is_gated(pod) && !has_ended(pod)).map(requested_shares).sum::<u64>();
                ensure!(held <= max, "pods of {namespace} request {held} shares, and the maximum is {max}");
                most = most.max(held);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(most)
    }

    fn stop(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow::anyhow!("the thread that checks the maximum panicked"))?
    }
}

fn requested_shares(pod: &Value) -> u64 {
    text(&pod["spec"]["containers"][0]["resources"]["limits"][SHARES_RESOURCE]).parse().unwrap_or(0)
}

/// Tests some of the rules R1 to R4 of the quota tests of `cleave-plan`: no quota exceeds its
/// maximum, and no pod within its guarantee and no pod of an exempt namespace is evicted for a pod
/// of another quota.
#[test]
fn no_promise_is_broken_when_leaders_are_killed_in_a_storm_with_quotas() -> Result<()> {
    const MAX_SHARES: u64 = 3 * SHARES_PER_GPU;
    let seed = std::env::var("SEED").map_or(Ok(42), |seed| seed.parse().context("SEED"))?;
    let count = std::env::var("STORM").map_or(Ok(60), |count| count.parse().context("STORM"))?;
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "quota-a")?;
    let exempt = json!({"cleave.dev/allow": "quota"});
    let teams = Teams::new(&cluster, &[("quota-b", json!({})), ("quota-steady", json!({})), ("quota-exempt", exempt)])?;
    teams.create_quota("e2e-a", &scope.namespace, json!({"min": "2", "max": "3"}))?;
    teams.create_quota("e2e-steady", "e2e-quota-steady", json!({"min": "500m"}))?;
    let undisturbed = [("e2e-quota-steady", 5), ("e2e-quota-exempt", 2)];
    let in_team = |namespace: &str| Scope { cluster: &cluster, namespace: namespace.to_owned() };
    let mut before = BTreeMap::new();
    for (namespace, count) in undisturbed {
        // Do not drop this value, because dropping a scope deletes the test's policies.
        let team = std::mem::ManuallyDrop::new(in_team(namespace));
        team.create_pod("stays", &json!({SHARES_RESOURCE: count}), SLEEP_FOREVER_SCRIPT)?;
        team.wait_until_running("stays")?;
        before.insert(namespace, container_and_restarts(&cluster, &team, "stays")?);
    }
    create_borrowers(&cluster, "e2e-quota-b", GPUS_PER_NODE + 1, SHARES_PER_GPU / 2)?;
    let checker = MaxChecker::start(scope.namespace.clone(), MAX_SHARES);
    let killer = LeaderKiller::start(Duration::from_secs(10));
    let storm = run_storm(&scope, count, &mut Random::seeded(seed), |_| Ok(()));
    let (leaders, most) = (killer.stop()?, checker.stop()?);
    let storm = storm?;
    let notes = reclaim_events(&cluster, "e2e-quota-b")?;
    let _ = writeln!(
        std::io::stderr(),
        "storm with quotas, seed {seed}: {} pods, {} ran, {} evictions of borrowers, at most {most} of {MAX_SHARES} shares, killed {leaders} leading operators",
        storm.created,
        storm.ran.len(),
        notes.len()
    );
    ensure!(leaders > 0 && storm.rejected.is_empty() && storm.errors.is_empty(), "{storm:?}");
    for (namespace, before) in before {
        let team = std::mem::ManuallyDrop::new(in_team(namespace));
        ensure!(container_and_restarts(&cluster, &team, "stays")? == before, "the pod of {namespace} was disturbed");
        ensure!(reclaim_events(&cluster, namespace)?.is_empty(), "a pod of {namespace} was evicted");
    }
    let foreign = notes.iter().filter(|note| !note.contains(&format!("evicted for {}/", scope.namespace)));
    ensure!(foreign.count() == 0, "only pods of the other quota reclaim: {notes:?}");
    wait_for("all borrowers are released again", WAIT_TIMEOUT, || {
        Ok((released_pods(&cluster, "e2e-quota-b")?.len() as u64 == GPUS_PER_NODE + 1).then_some(()))
    })
}

/// A setting of the operator whose default is 300. Dropping this value restores the default.
struct OperatorSetting(&'static str);

impl OperatorSetting {
    fn set(name: &'static str, value: &str) -> Result<Self> {
        let setting = Self(name);
        setting.write(value)?;
        Ok(setting)
    }

    fn write(&self, value: &str) -> Result<()> {
        const OPERATOR: &str = "deployment/cleave-operator";
        kubectl(&["-n", SYSTEM_NAMESPACE, "set", "env", OPERATOR, &format!("{}={value}", self.0)])?;
        kubectl(&["-n", SYSTEM_NAMESPACE, "rollout", "status", OPERATOR, "--timeout", "2m"]).map(drop)
    }
}

impl Drop for OperatorSetting {
    fn drop(&mut self) {
        if let Err(error) = self.write("300") {
            let _ = writeln!(std::io::stderr(), "failed to restore a setting of the operator: {error:#}");
        }
    }
}

/// Tests an example from the documentation of Nos: the quotas A, B and C guarantee 40, 10 and 30,
/// and B uses all of the 30 that C does not use. This test uses half of each number, in tenths of
/// GPUs. A is entitled to a larger part of the unused amount than B, so one pod of B must be
/// evicted for a pod of A, but no second pod.
#[test]
fn the_documented_example_of_nos_ends_with_the_same_pods() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _setting = OperatorSetting::set("CLEAVE_QUOTAS_MIN_RUNTIME_FAIR_SHARE", "0")?;
    let scope = ten_shares(&cluster, "quota-a")?;
    let teams = Teams::new(&cluster, &[("quota-b", json!({})), ("quota-c", json!({}))])?;
    for (name, namespace, min) in
        [("e2e-a", scope.namespace.as_str(), "2"), ("e2e-b", "e2e-quota-b", "500m"), ("e2e-c", "e2e-quota-c", "1500m")]
    {
        teams.create_quota(name, namespace, json!({"min": min}))?;
    }
    for index in 0..4 {
        scope.create_pod(&format!("a{index}"), &json!({SHARES_RESOURCE: 5}), SLEEP_FOREVER_SCRIPT)?;
        scope.wait_until_running(&format!("a{index}"))?;
    }
    create_borrowers(&cluster, "e2e-quota-b", 4, 5)?;
    wait_for_running(&cluster, "e2e-quota-b", 4)?;
    for name in ["a4", "a5"] {
        scope.create_pod(name, &json!({SHARES_RESOURCE: 5}), SLEEP_FOREVER_SCRIPT)?;
    }
    wait_until("A has one pod more, and its next pod waits", || {
        let (a, b) = (teams.status("e2e-a")?, teams.status("e2e-b")?);
        ensure!(a["used"] == "2.5" && a["waiting"]["pods"] == 1 && a["pods"]["over"] == 1, "A: {a}");
        ensure!(b["used"] == "1.5" && b["waiting"]["pods"] == 1 && b["pods"]["in"] == 1, "B: {b}");
        Ok(true)
    })?;
    let notes = reclaim_events(&cluster, "e2e-quota-b")?;
    ensure!(notes.len() == 1, "{notes:?}");
    Ok(())
}

/// Imports a file with the quotas of another system, applies the result, and returns the names of
/// the quotas. `cleave quotas import` refuses some objects of the file, because Cleave has no
/// counterpart.
fn apply_imported(file: &str) -> Result<Vec<String>> {
    let path = format!("{}/../../crates/cli/tests/quotas/{file}", env!("CARGO_MANIFEST_DIR"));
    let imported = program_output(&cleave_path(), &["quotas", "import", &path])?;
    let manifest = String::from_utf8(imported.stdout)?;
    let count = manifest.lines().filter(|line| *line == "kind: GpuQuota").count();
    ensure!(count > 0, "nothing was imported: {}", String::from_utf8_lossy(&imported.stderr));
    let applied = apply_manifest(&manifest)?;
    let names: Vec<String> = applied
        .lines()
        .filter_map(|line| Some(line.strip_prefix("gpuquota.cleave.dev/")?.split(' ').next()?.to_owned()))
        .collect();
    for name in &names {
        // Quotas with this label are deleted after the test.
        kubectl(&["label", "gpuquota", name, &format!("{TEST_LABEL}=true")])?;
    }
    ensure!(names.len() == count, "{count} quotas were imported, and these were applied: {names:?}");
    Ok(names)
}

/// Waits until the operator reports each quota as ready and unused, and reports the reason
/// `enforced` in the condition `Enforced`.
fn wait_for_statuses(teams: &Teams<'_>, names: &[String], enforced: &str) -> Result<()> {
    for name in names {
        wait_until(&format!("the operator reports the status of the quota {name}"), || {
            let status = teams.status(name)?;
            let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
            let holds = |type_: &str, field: &str, value: &str| {
                conditions.iter().any(|condition| condition["type"] == type_ && condition[field] == value)
            };
            ensure!(holds("Ready", "status", "True") && holds("Enforced", "reason", enforced), "{status}");
            Ok(status["used"] == "0" || status["used"] == "0Gi")
        })?;
    }
    Ok(())
}

/// The examples of Nos's documentation: two kinds of quotas.
#[test]
fn the_api_server_accepts_imported_quotas_of_nos_and_the_operator_reports_their_status() -> Result<()> {
    let cluster = Cluster::connect()?;
    let teams = Teams::new(&cluster, &[])?;
    let names = apply_imported("nos.yaml")?;
    for name in ["quota-a", "elastic-quota-a", "research"] {
        ensure!(names.iter().any(|imported| imported == name), "{name} is not among {names:?}");
    }
    wait_for_statuses(&teams, &names, "Enforced")
}

/// The examples of Kueue's documentation. The operator does not enforce quotas that are imported
/// from Kueue, and only counts their pods.
#[test]
fn the_api_server_accepts_imported_queues_of_kueue_and_the_operator_reports_their_status() -> Result<()> {
    let cluster = Cluster::connect()?;
    let teams = Teams::new(&cluster, &[])?;
    let names = apply_imported("kueue.yaml")?;
    wait_for_statuses(&teams, &names, "Counting")
}
