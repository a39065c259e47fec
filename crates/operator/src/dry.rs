//! What the operator would do, without doing it.
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cleave_api::{GpuNode, SharingPolicy};
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::{Api, Client};

use crate::apply::{self, Change};
use crate::demand::{self, Outcome};
use crate::plan::{self, Plan};
use crate::pods::PodObject;
use crate::read::{AgentPod, NodeObject, Observed};
use crate::snapshot::Memory;

/// One pass that writes nothing.
#[derive(Debug, Clone)]
pub struct DryRun {
    /// What every node shall be.
    pub plan: Plan,
    /// What was decided for pods.
    pub outcome: Outcome,
    /// Nodes that would be written.
    pub changes: Vec<Change>,
}

/// What one pass would do. Pure.
///
/// # Errors
/// The plan breaks rules: the operator would not act on it either.
pub fn dry_run(observed: &Observed) -> Result<DryRun> {
    let mut plan = plan::plan(observed);
    let outcome = demand::overlay(&mut plan, observed, &mut Memory::default(), Duration::ZERO);
    if !outcome.violations.is_empty() {
        let wrong: Vec<String> = outcome.violations.iter().map(ToString::to_string).collect();
        bail!("the plan breaks rules and must not be used:\n{}", wrong.join("\n"));
    }
    let changes = apply::changes(&plan, observed);
    Ok(DryRun { plan, outcome, changes })
}

/// The cluster as the API server tells it now.
///
/// # Errors
/// Something could not be listed.
pub async fn observe(client: &Client, namespace: &str, agent_selector: &str) -> Result<Observed> {
    let all = ListParams::default();
    let mut observed = Observed::default();
    for node in Api::<NodeObject>::all(client.clone()).list(&all).await.context("listing nodes")? {
        observed.add_node(&node);
    }
    let agents = Api::<AgentPod>::namespaced(client.clone(), namespace);
    for pod in agents.list(&all.clone().labels(agent_selector)).await.context("listing the agents' pods")? {
        observed.add_agent(&pod);
    }
    for object in Api::<DeserializeGuard<GpuNode>>::all(client.clone()).list(&all).await.context("listing GpuNodes")? {
        observed.add_gpu_node(&object);
    }
    let policies = Api::<DeserializeGuard<SharingPolicy>>::all(client.clone());
    for policy in policies.list(&all).await.context("listing SharingPolicies")? {
        observed.add_policy(&policy);
    }
    let living = all.fields("status.phase!=Succeeded,status.phase!=Failed");
    let mut pods = Api::<PodObject>::all(client.clone()).list(&living).await.context("listing pods")?.items;
    pods.iter_mut().for_each(PodObject::trim);
    observed.set_pods(pods.iter());
    Ok(observed)
}
