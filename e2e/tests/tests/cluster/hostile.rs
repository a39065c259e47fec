//! What hostile tenants, programs in their pods and an agent that was taken over try, one by one;
//! `docs/explanation/attempts.md` is the same list.
//!
//! What is let be has to show what it would have changed and did not. None may be felt by Cleave's
//! own parts, by an MPS daemon, or by a neighbour that computes meanwhile.
mod floods;
mod programs;
mod requests;

use std::io::Write as _;

use anyhow::{Result, bail, ensure};
use cleave_e2e::{Cluster, Refused, Scope, process, wait_until};
use serde_json::{Value, json};

use crate::policies::agents;
use crate::{NODE, daemon_pids, undisturbed};

/// What is expected of an attempt.
#[derive(Debug, Clone, Copy)]
enum Expected {
    /// It is refused; each refusal says all of these.
    Refused(&'static [&'static str]),
    /// It is let be, and changes nothing.
    NoEffect,
    /// It succeeds, is found, and the pod is told this.
    Found(&'static str),
}

/// What became of an attempt.
#[derive(Debug)]
enum Outcome {
    /// What it was refused with, for each way in which it was tried.
    Refused(Vec<String>),
    /// What is as it was.
    NoEffect(String),
    /// What its pod was told.
    Found(&'static str),
    /// It got what it wanted.
    Succeeded(String),
}

/// One attempt.
struct Attempt {
    /// As in the documentation.
    name: &'static str,
    expected: Expected,
    tried: fn(&Ground<'_>) -> Result<Outcome>,
}

impl Expected {
    /// How the documentation's result begins.
    const fn word(self) -> &'static str {
        match self {
            Self::Refused(_) => "refused",
            Self::NoEffect => "no effect",
            Self::Found(_) => "found",
        }
    }
}

impl Attempt {
    /// Tries it; what came of it in words, if that is what is expected.
    fn result(&self, ground: &Ground<'_>) -> Result<String> {
        match (self.expected, (self.tried)(ground)?) {
            (Expected::Refused(words), Outcome::Refused(answers)) => {
                ensure!(!answers.is_empty(), "it was not tried");
                for answer in &answers {
                    let says = words.iter().all(|word| answer.contains(word));
                    ensure!(says, "it is refused with {answer:?}, which does not say {words:?}");
                }
                Ok(answers.concat())
            }
            (Expected::NoEffect, Outcome::NoEffect(same)) => Ok(same),
            (Expected::Found(kind), Outcome::Found(told)) if kind == told => Ok(told.to_owned()),
            (_, Outcome::Succeeded(what)) => bail!("it succeeds: {what}"),
            (expected, outcome) => bail!("{expected:?} is expected, and it is {outcome:?}"),
        }
    }
}

/// Where attempts are made.
struct Ground<'a> {
    scope: Scope<'a>,
    /// The owner of the namespace: what the role `admin` may, and anything with its pods.
    tenant: Cluster,
    /// The owner's token.
    token: String,
}

/// The owner's service account.
const TENANT: &str = "tenant";

impl<'a> Ground<'a> {
    fn new(scope: Scope<'a>) -> Result<Self> {
        // More than any role gives: what only the lack of a right keeps from happening is not
        // refused by Cleave.
        let pods = ["pods", "pods/status", "pods/ephemeralcontainers", "pods/resize", "pods/binding", "bindings"];
        let rules = json!([{"apiGroups": [""], "resources": pods, "verbs": ["*"]}]);
        let roles = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles", scope.namespace);
        scope.cluster.create(&roles, &json!({"metadata": {"name": "owner"}, "rules": rules}))?;
        let token = owner(&scope, TENANT)?;
        Ok(Self { tenant: Cluster::by_token(&token, None)?, token, scope })
    }

    /// The pods' path.
    fn pods(&self) -> String {
        format!("/api/v1/namespaces/{}/pods", self.scope.namespace)
    }

    /// What attempts must not change.
    fn state(&self) -> Result<State> {
        let cluster = self.scope.cluster;
        let neighbour = cluster.find(&self.scope.pod_path(programs::NEIGHBOUR))?;
        Ok(State {
            parts: agents(cluster)?,
            daemons: daemon_pids(cluster)?,
            neighbour: neighbour.map(|_| undisturbed(cluster, &self.scope, programs::NEIGHBOUR)).transpose()?,
        })
    }

    /// Makes all attempts, tells what became of each, and fails if one was another than is
    /// expected.
    fn run(&self, attempts: &[Attempt]) -> Result<()> {
        let mut out = std::io::stderr();
        // The agent's supervisor hides its death from the kubelet.
        let programs = || ["cleave-agent", "cleave-mps-host"].map(|program| process(NODE, program));
        let own = programs().into_iter().collect::<Result<Vec<_>>>()?;
        let mut before = self.state()?;
        let mut failed = Vec::new();
        for attempt in attempts {
            let mut result = attempt.result(self);
            let after = self.state()?;
            if after != before {
                result = Err(anyhow::anyhow!("it is felt: before {before:?}, after {after:?}"));
                before = after;
            }
            match result {
                Ok(said) => writeln!(out, "  {}: {}: {}", attempt.name, attempt.expected.word(), start(&said))?,
                Err(error) => {
                    writeln!(out, "  {}: FAILED: {error:#}", attempt.name)?;
                    failed.push(attempt.name);
                }
            }
        }
        let now = programs().into_iter().collect::<Result<Vec<_>>>()?;
        ensure!(now == own, "a program of Cleave's was started again");
        ensure!(failed.is_empty(), "{} of {} attempts: {failed:?}", failed.len(), attempts.len());
        Ok(())
    }
}

/// Cleave's pods, MPS daemons and the neighbour, by what they would not keep if they were
/// disturbed.
#[derive(Debug, PartialEq)]
struct State {
    parts: Vec<(String, u64)>,
    daemons: Vec<(String, u64)>,
    neighbour: Option<(String, u64)>,
}

/// The token of a new service account that owns the namespace.
fn owner(scope: &Scope, account: &str) -> Result<String> {
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
    // The API server learns of roles a moment later: what it refuses before is refused for another
    // reason.
    for (resource, subresource) in [("configmaps", ""), ("pods", "binding")] {
        let asked = json!({"namespace": ns, "verb": "create", "resource": resource, "subresource": subresource});
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        });
        wait_until(&format!("{account} may create {resource} {subresource}"), || {
            let answer = owner.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", &review)?;
            Ok(answer["status"]["allowed"] == true)
        })?;
    }
    Ok(token)
}

/// What the API server said no with, if it did each time.
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

/// The JSON lines that programs printed.
fn lines(said: &str) -> Vec<Value> {
    said.lines().filter_map(|line| serde_json::from_str(line).ok()).filter(Value::is_object).collect()
}

/// The beginning of a sentence, in one line.
fn start(said: &str) -> String {
    said.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(160).collect()
}

#[test]
fn what_a_tenant_or_an_agent_asks_of_the_api_server_is_refused() -> Result<()> {
    let cluster = Cluster::connect()?;
    let ground = requests::ground(&cluster)?;
    ground.run(requests::ATTEMPTS)
}

#[test]
fn programs_in_pods_and_floods_of_pods_harm_nobody() -> Result<()> {
    let cluster = Cluster::connect()?;
    let ground = programs::ground(&cluster)?;
    let programs = ground.run(programs::ATTEMPTS);
    let floods = ground.run(floods::ATTEMPTS);
    let log = ground.scope.log(programs::NEIGHBOUR)?;
    ensure!(!log.contains("\"error\""), "the neighbour's program broke: {log}");
    programs.and(floods)
}

#[test]
fn the_list_in_the_documentation_is_what_is_tried() {
    let documented = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/explanation/attempts.md"));
    let rows = documented.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| attempt |"));
    let cells = |row: &str| row.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let listed: Vec<(String, String)> = rows
        .map(|row| match cells(row).as_slice() {
            [_, name, result, ..] => (name.clone(), result.clone()),
            _ => (row.to_owned(), String::new()),
        })
        .collect();
    let tried: Vec<&Attempt> =
        [requests::ATTEMPTS, programs::ATTEMPTS, floods::ATTEMPTS].into_iter().flatten().collect();
    let count = format!("\n{} attempts of", tried.len());
    assert!(documented.contains(&count), "it does not say{count}");
    let names = |names: Vec<&str>| names.join("\n");
    assert_eq!(
        names(listed.iter().map(|(name, _)| name.as_str()).collect()),
        names(tried.iter().map(|attempt| attempt.name).collect())
    );
    for ((name, result), attempt) in listed.iter().zip(tried) {
        assert!(result.starts_with(attempt.expected.word()), "{name}: {result}");
    }
}
