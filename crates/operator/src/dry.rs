//! Computes the operator's decisions without writing anything, for `cleave plan --live`.
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cleave_api::{GpuNode, SharingPolicy};
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::{Api, Client};

use crate::pods::PodObject;
use crate::policies::apply::{self, Change};
use crate::policies::demand::{self, Outcome};
use crate::policies::plan::{self, Plan};
use crate::policies::snapshot::History;
use crate::read::{AgentPod, NodeObject, Observed};

/// Selects pods that have not ended.
const RUNNING: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// The result of one pass that writes nothing.
#[derive(Debug, Clone)]
pub struct DryRun {
    /// The desired state of every node.
    pub plan: Plan,
    /// The decision for each pending pod.
    pub outcome: Outcome,
    /// The nodes whose `GpuNode.spec` would change.
    pub changes: Vec<Change>,
}

/// Computes the decisions of one pass. Pure.
///
/// # Errors
/// The plan violates a rule, so the operator would not apply it.
pub fn dry_run(observed: &Observed) -> Result<DryRun> {
    let mut plan = plan::plan(observed);
    let outcome = demand::overlay(&mut plan, observed, &mut History::default(), Duration::ZERO);
    if !outcome.violations.is_empty() {
        let wrong: Vec<String> = outcome.violations.iter().map(ToString::to_string).collect();
        bail!("the plan is invalid and was not applied:\n{}", wrong.join("\n"));
    }
    let changes = apply::changes(&plan, observed);
    Ok(DryRun { plan, outcome, changes })
}

/// The objects of a cluster that decisions depend on, listed once.
#[derive(Debug, Default)]
pub struct Objects {
    /// All nodes.
    pub nodes: Vec<NodeObject>,
    /// The agents' pods.
    pub agents: Vec<AgentPod>,
    /// All `GpuNode`s, including malformed objects.
    pub gpu_nodes: Vec<DeserializeGuard<GpuNode>>,
    /// All `SharingPolicy`s, including malformed objects.
    pub policies: Vec<DeserializeGuard<SharingPolicy>>,
    /// All pods that have not ended, trimmed.
    pub pods: Vec<PodObject>,
}

impl Objects {
    /// Lists a cluster's objects.
    ///
    /// # Arguments
    /// `namespace` is the namespace of Cleave. `agent_selector` selects the agents' pods in this
    /// namespace.
    ///
    /// # Errors
    /// The API server refused a list request.
    pub async fn list(client: &Client, namespace: &str, agent_selector: &str) -> Result<Self> {
        let all = ListParams::default();
        let nodes = Api::<NodeObject>::all(client.clone()).list(&all).await.context("failed to list Nodes")?;
        let agents = Api::<AgentPod>::namespaced(client.clone(), namespace);
        let agents = agents.list(&all.clone().labels(agent_selector)).await;
        let agents = agents.with_context(|| format!("failed to list the agents' Pods in namespace {namespace}"))?;
        let gpu_nodes = Api::<DeserializeGuard<GpuNode>>::all(client.clone());
        let gpu_nodes = gpu_nodes.list(&all).await.context("failed to list GpuNodes")?;
        let policies = Api::<DeserializeGuard<SharingPolicy>>::all(client.clone());
        let policies = policies.list(&all).await.context("failed to list SharingPolicies")?;
        let pods = Api::<PodObject>::all(client.clone());
        let mut pods = pods.list(&all.fields(RUNNING)).await.context("failed to list Pods")?.items;
        pods.iter_mut().for_each(PodObject::trim);
        Ok(Self {
            nodes: nodes.items,
            agents: agents.items,
            gpu_nodes: gpu_nodes.items,
            policies: policies.items,
            pods,
        })
    }

    /// Converts the objects to the operator's view of the cluster.
    pub fn observed(&self) -> Observed {
        let mut observed = Observed::default();
        self.nodes.iter().for_each(|node| observed.add_node(node));
        self.agents.iter().for_each(|pod| observed.add_agent(pod));
        self.gpu_nodes.iter().for_each(|object| observed.add_gpu_node(object));
        self.policies.iter().for_each(|policy| observed.add_policy(policy));
        observed.set_pods(self.pods.iter());
        observed
    }
}

/// Lists a cluster's objects and converts them to the operator's view; see [`Objects::list`].
///
/// # Errors
/// The API server refused a list request.
pub async fn observe(client: &Client, namespace: &str, agent_selector: &str) -> Result<Observed> {
    Ok(Objects::list(client, namespace, agent_selector).await?.observed())
}
