//! Tests attempts by hostile tenants, by hostile programs in their pods and by a compromised agent.
//! `docs/explanation/attempts.md` lists the same attempts.
//!
//! An attempt with the expected outcome `NoEffect` must return a description of the state that did
//! not change. No attempt may affect Cleave's pods and programs, an MPS daemon, or a neighbour that
//! uses the same GPU.
mod floods;
mod programs;
mod requests;

use std::io::Write as _;

use anyhow::{Result, bail, ensure};
use cleave_e2e::{Cluster, Refused, Scope, wait_for_pid, wait_until};
use serde_json::{Value, json};

use crate::policies::cleave_pods;
use crate::{NODE, container_and_restarts, daemon_pids};

/// The outcome that is expected of an attempt.
#[derive(Debug, Clone, Copy)]
enum ExpectedOutcome {
    /// Cleave, Kubernetes or the kernel refuses the attempt. Each refusal contains all of these
    /// texts.
    Refused(&'static [&'static str]),
    /// The attempt is not refused, but has no effect.
    NoEffect,
    /// The attempt succeeds, and the agent reports this finding on the pod.
    Found(&'static str),
}

/// The outcome of an attempt.
#[derive(Debug)]
enum Outcome {
    /// The attempt was refused. Contains the message of each refusal.
    Refused(Vec<String>),
    /// The attempt had no effect. Contains a description of the state that did not change.
    NoEffect(String),
    /// The agent reported this finding on the pod.
    Found(&'static str),
    /// The attempt succeeded. Contains a description of the effect.
    Succeeded(String),
}

/// One attempt.
struct Attempt {
    /// Name of the attempt in the documentation.
    name: &'static str,
    expected: ExpectedOutcome,
    run: fn(&TestBed<'_>) -> Result<Outcome>,
}

impl ExpectedOutcome {
    /// Returns the words with which the result of the attempt starts in the documentation.
    const fn outcome_words(self) -> &'static str {
        match self {
            Self::Refused(_) => "refused",
            Self::NoEffect => "no effect",
            Self::Found(_) => "found",
        }
    }
}

impl Attempt {
    /// Runs the attempt. Returns a description of the outcome, or an error if the outcome is
    /// unexpected.
    fn check(&self, bed: &TestBed<'_>) -> Result<String> {
        match (self.expected, (self.run)(bed)?) {
            (ExpectedOutcome::Refused(words), Outcome::Refused(answers)) => {
                ensure!(!answers.is_empty(), "the attempt caused no refusal");
                for answer in &answers {
                    let says = words.iter().all(|word| answer.contains(word));
                    ensure!(says, "the attempt is refused with {answer:?}, which does not contain {words:?}");
                }
                Ok(answers.concat())
            }
            (ExpectedOutcome::NoEffect, Outcome::NoEffect(same)) => Ok(same),
            (ExpectedOutcome::Found(kind), Outcome::Found(found)) if kind == found => Ok(found.to_owned()),
            (_, Outcome::Succeeded(what)) => bail!("the attempt succeeded: {what}"),
            (expected, outcome) => bail!("expected {expected:?}, got {outcome:?}"),
        }
    }
}

/// The namespace of the attempts, and the credentials with which the attempts are made.
struct TestBed<'a> {
    scope: Scope<'a>,
    /// A client with the permissions of the namespace's owner: the role `admin`, and all verbs on
    /// pods.
    tenant: Cluster,
    /// Token of the namespace's owner.
    token: String,
}

/// Name of the service account of the namespace's owner.
const TENANT_NAME: &str = "tenant";

impl<'a> TestBed<'a> {
    fn new(scope: Scope<'a>) -> Result<Self> {
        // Grant more permissions than the built-in role `admin` has, so that Cleave, not RBAC,
        // refuses the attempts.
        let pods = ["pods", "pods/status", "pods/ephemeralcontainers", "pods/resize", "pods/binding", "bindings"];
        let rules = json!([{"apiGroups": [""], "resources": pods, "verbs": ["*"]}]);
        let roles = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles", scope.namespace);
        scope.cluster.create(&roles, &json!({"metadata": {"name": "owner"}, "rules": rules}))?;
        let token = create_owner(&scope, TENANT_NAME)?;
        Ok(Self { tenant: Cluster::by_token(&token, None)?, token, scope })
    }

    /// Returns the API path of the namespace's pods.
    fn pods_path(&self) -> String {
        format!("/api/v1/namespaces/{}/pods", self.scope.namespace)
    }

    /// Reads the state that attempts must not change.
    fn read_state(&self) -> Result<State> {
        let cluster = self.scope.cluster;
        let neighbour = cluster.find(&self.scope.pod_path(programs::NEIGHBOUR_POD))?;
        Ok(State {
            pods: cleave_pods(cluster)?,
            daemons: daemon_pids(cluster)?,
            neighbour: neighbour
                .map(|_| container_and_restarts(cluster, &self.scope, programs::NEIGHBOUR_POD))
                .transpose()?,
        })
    }

    /// Runs all attempts and prints their outcomes. Fails if an outcome is not as expected.
    fn run(&self, attempts: &[Attempt]) -> Result<()> {
        let mut out = std::io::stderr();
        // The state does not show a restart of the agent by its supervisor, so also compare PIDs.
        let programs = || ["cleave-agent", "cleave-mps-host"].map(|program| wait_for_pid(NODE, program));
        let own = programs().into_iter().collect::<Result<Vec<_>>>()?;
        let mut before = self.read_state()?;
        let mut failed = Vec::new();
        for attempt in attempts {
            let mut result = attempt.check(self);
            let after = self.read_state()?;
            if after != before {
                result = Err(anyhow::anyhow!("the attempt changed the state from {before:?} to {after:?}"));
                before = after;
            }
            match result {
                Ok(said) => {
                    writeln!(out, "  {}: {}: {}", attempt.name, attempt.expected.outcome_words(), shorten(&said))?;
                }
                Err(error) => {
                    writeln!(out, "  {}: FAILED: {error:#}", attempt.name)?;
                    failed.push(attempt.name);
                }
            }
        }
        let now = programs().into_iter().collect::<Result<Vec<_>>>()?;
        ensure!(now == own, "a program of Cleave was restarted");
        ensure!(failed.is_empty(), "{} of {} attempts failed: {failed:?}", failed.len(), attempts.len());
        Ok(())
    }
}

/// Identities of Cleave's pods, of the MPS daemons and of the neighbour's container, with the
/// numbers of restarts. If an attempt causes one of them to restart, these values change.
#[derive(Debug, PartialEq)]
struct State {
    pods: Vec<(String, u64)>,
    daemons: Vec<(String, u64)>,
    neighbour: Option<(String, u64)>,
}

/// Creates a service account with the permissions of the namespace's owner, and returns the
/// account's token.
fn create_owner(scope: &Scope, account: &str) -> Result<String> {
    let (cluster, ns) = (scope.cluster, &scope.namespace);
    cluster.create(&format!("/api/v1/namespaces/{ns}/serviceaccounts"), &json!({"metadata": {"name": account}}))?;
    for (kind, role) in [("ClusterRole", "admin"), ("Role", "owner")] {
        let binding = json!({
            "metadata": {"name": format!("{account}-{role}")},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": ns}],
        });
        cluster.create(&format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/rolebindings"), &binding)?;
    }
    let token = cluster.token(ns, account, None)?;
    let owner = Cluster::by_token(&token, None)?;
    // The API server applies roles after a short delay. Wait for the roles, because until they
    // apply, the API server refuses the attempts for lack of permissions.
    for (resource, subresource) in [("configmaps", ""), ("pods", "binding")] {
        let attributes = json!({"namespace": ns, "verb": "create", "resource": resource, "subresource": subresource});
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        });
        wait_until(&format!("{account} may create {resource} {subresource}"), || {
            let answer = owner.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", &review)?;
            Ok(answer["status"]["allowed"] == true)
        })?;
    }
    Ok(token)
}

/// Collects the API server's refusals of requests. If a request succeeds, the outcome is
/// `Succeeded`.
fn refusals(answers: impl IntoIterator<Item = Result<Value>>) -> Result<Outcome> {
    let mut refusals = Vec::new();
    for answer in answers {
        match answer {
            Ok(value) => return Ok(Outcome::Succeeded(value.to_string())),
            Err(error) => refusals.push(error.downcast::<Refused>()?.to_string()),
        }
    }
    Ok(Outcome::Refused(refusals))
}

/// Parses the JSON objects in the output of programs. Each object is on a separate line.
fn parse_json_lines(said: &str) -> Vec<Value> {
    said.lines().filter_map(|line| serde_json::from_str(line).ok()).filter(Value::is_object).collect()
}

/// Shortens a text to at most 160 characters, and joins its lines.
fn shorten(said: &str) -> String {
    said.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(160).collect()
}

#[test]
fn hostile_requests_to_the_api_server_are_refused() -> Result<()> {
    let cluster = Cluster::connect()?;
    let bed = requests::test_bed(&cluster)?;
    bed.run(requests::ATTEMPTS)
}

#[test]
fn hostile_programs_and_floods_of_pods_harm_no_other_pod() -> Result<()> {
    let cluster = Cluster::connect()?;
    let bed = programs::test_bed(&cluster)?;
    let programs = bed.run(programs::ATTEMPTS);
    let floods = bed.run(floods::ATTEMPTS);
    let log = bed.scope.pod_log(programs::NEIGHBOUR_POD)?;
    ensure!(!log.contains("\"error\""), "the neighbour's program failed: {log}");
    programs.and(floods)
}

#[test]
fn the_documentation_lists_exactly_these_attempts() {
    let documented = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/explanation/attempts.md"));
    let rows = documented.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| attempt |"));
    let cells = |row: &str| row.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let listed: Vec<(String, String)> = rows
        .map(|row| match cells(row).as_slice() {
            [_, name, result, ..] => (name.clone(), result.clone()),
            _ => (row.to_owned(), String::new()),
        })
        .collect();
    let attempts: Vec<&Attempt> =
        [requests::ATTEMPTS, programs::ATTEMPTS, floods::ATTEMPTS].into_iter().flatten().collect();
    let count = format!("\n{} attempts of", attempts.len());
    assert!(documented.contains(&count), "the documentation does not contain{count}");
    let names = |names: Vec<&str>| names.join("\n");
    assert_eq!(
        names(listed.iter().map(|(name, _)| name.as_str()).collect()),
        names(attempts.iter().map(|attempt| attempt.name).collect())
    );
    for ((name, result), attempt) in listed.iter().zip(attempts) {
        assert!(result.starts_with(attempt.expected.outcome_words()), "{name}: {result}");
    }
}
