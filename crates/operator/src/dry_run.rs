//! Computes the operator's decisions without writing anything, for `cleave plan --live`.
use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cleave_api::{GpuNode, SharingPolicy};
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::{Api, Client};
use serde::de::DeserializeOwned;

use crate::pods::{PodObject, RawPod};
use crate::policies::apply::{self, GpuNodeChange};
use crate::policies::demand::{self, Outcome};
use crate::policies::plan::{self, Plan};
use crate::policies::snapshot::History;
use crate::read::{
    AgentPod, BudgetObject, LIVING_PODS, NamespaceObject, NodeObject, Observed, VolumeClaimObject, VolumeObject,
};

/// Maximum number of objects in one response to a list request.
const PAGE_SIZE: u32 = 500;

/// The result of one pass that writes nothing.
#[derive(Debug, Clone)]
pub struct DryRun {
    /// The desired state of every node.
    pub plan: Plan,
    /// The decision for each pending pod.
    pub outcome: Outcome,
    /// The nodes whose `GpuNode.spec` differs from the plan.
    pub changes: Vec<GpuNodeChange>,
}

/// Computes the decisions of one pass. This function is pure.
///
/// # Errors
/// Returns an error if the plan violates a rule, so that the operator would not apply it.
pub fn dry_run(observed: &Observed) -> Result<DryRun> {
    let mut plan = plan::plan(observed);
    let outcome = demand::decide_partitions(&mut plan, observed, &mut History::default(), Duration::ZERO);
    if !outcome.violations.is_empty() {
        let wrong: Vec<String> = outcome.violations.iter().map(ToString::to_string).collect();
        bail!("the plan is invalid and was not applied:\n{}", wrong.join("\n"));
    }
    let changes = apply::changes(&plan, observed);
    Ok(DryRun { plan, outcome, changes })
}

/// The objects of a cluster on which decisions depend, listed once. The volume claims, volumes,
/// disruption budgets and namespaces are empty before [`Objects::list_for_placement`].
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
    /// All pods that have not ended, without the fields that the operator does not use.
    pub pods: Vec<PodObject>,
    /// All volume claims. The list is empty if the user may not list volume claims.
    pub volume_claims: Vec<VolumeClaimObject>,
    /// All volumes. The list is empty if the user may not list volumes.
    pub volumes: Vec<VolumeObject>,
    /// All disruption budgets. The list is empty if the user may not list budgets.
    pub budgets: Vec<BudgetObject>,
    /// All namespaces with their labels. The list is empty if the user may not list namespaces.
    pub namespaces: Vec<NamespaceObject>,
}

impl Objects {
    /// Lists a cluster's nodes, agents, `GpuNode`s, policies and pods.
    ///
    /// # Arguments
    /// `namespace` is the namespace of Cleave. `agent_selector` selects the agents' pods in this
    /// namespace.
    ///
    /// # Errors
    /// Returns an error if a list request fails.
    pub async fn list(client: &Client, namespace: &str, agent_selector: &str) -> Result<Self> {
        let all = ListParams::default();
        let nodes = list(&Api::all(client.clone()), all.clone()).await.context("failed to list Nodes")?;
        let agents = Api::<AgentPod>::namespaced(client.clone(), namespace);
        let agents = list(&agents, all.clone().labels(agent_selector)).await;
        let agents = agents.with_context(|| format!("failed to list the agents' Pods in namespace {namespace}"))?;
        let gpu_nodes = list(&Api::all(client.clone()), all.clone()).await.context("failed to list GpuNodes")?;
        let policies = list(&Api::all(client.clone()), all.clone()).await.context("failed to list SharingPolicies")?;
        let pods = list(&Api::<RawPod>::all(client.clone()), all.fields(LIVING_PODS)).await;
        let mut pods: Vec<PodObject> = pods.context("failed to list Pods")?.into_iter().map(PodObject::from).collect();
        pods.iter_mut().for_each(PodObject::trim);
        Ok(Self { nodes, agents, gpu_nodes, policies, pods, ..Self::default() })
    }

    /// Lists the objects that only placement reads: volumes, volume claims, disruption budgets and
    /// namespaces.
    ///
    /// # Errors
    /// Returns an error if a list request fails for a reason other than a missing permission.
    pub async fn list_for_placement(self, client: &Client) -> Result<Self> {
        let all = ListParams::default();
        Ok(Self {
            volume_claims: objects_if_allowed(
                "PersistentVolumeClaims",
                list(&Api::all(client.clone()), all.clone()).await,
            )?,
            volumes: objects_if_allowed("PersistentVolumes", list(&Api::all(client.clone()), all.clone()).await)?,
            budgets: objects_if_allowed("PodDisruptionBudgets", list(&Api::all(client.clone()), all.clone()).await)?,
            namespaces: objects_if_allowed("Namespaces", list(&Api::all(client.clone()), all).await)?,
            ..self
        })
    }

    /// Converts the objects to the operator's view of the cluster.
    pub fn to_observed(&self) -> Observed {
        let mut observed = Observed::default();
        self.nodes.iter().for_each(|node| observed.add_node(node));
        self.agents.iter().for_each(|pod| observed.add_agent(pod));
        self.gpu_nodes.iter().for_each(|object| observed.add_gpu_node(object));
        self.policies.iter().for_each(|policy| observed.add_policy(policy));
        observed.set_pods(self.pods.iter());
        observed
    }
}

/// Lists objects in pages, because one response with all objects of a large cluster would be huge.
async fn list<K>(api: &Api<K>, params: ListParams) -> kube::Result<Vec<K>>
where
    K: Clone + DeserializeOwned + Debug,
{
    let mut page = params.limit(PAGE_SIZE);
    let mut items = Vec::new();
    loop {
        let list = api.list(&page).await?;
        items.extend(list.items);
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            None => return Ok(items),
            Some(token) => page = page.continue_token(&token),
        }
    }
}

/// Returns the objects, or an empty list if the user may not list them. Users do not need the
/// operator's permissions.
fn objects_if_allowed<K>(kind: &str, listed: kube::Result<Vec<K>>) -> Result<Vec<K>> {
    match listed {
        Err(kube::Error::Api(status)) if status.code == 403 => {
            tracing::warn!(kind, "not allowed to list these objects; the result ignores them");
            Ok(Vec::new())
        }
        listed => listed.with_context(|| format!("failed to list {kind}")),
    }
}

/// Lists a cluster's objects and converts them to the operator's view; see [`Objects::list`].
///
/// # Errors
/// Returns an error if a list request fails.
pub async fn observe(client: &Client, namespace: &str, agent_selector: &str) -> Result<Observed> {
    Ok(Objects::list(client, namespace, agent_selector).await?.to_observed())
}

#[cfg(test)]
mod tests {
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn objects_are_listed_in_pages() {
        let service = tower::service_fn(|request: http::Request<Body>| async move {
            let query = request.uri().query().unwrap_or_default();
            assert!(query.contains("limit=500"), "{query}");
            let (name, next) = if query.contains("continue=more") { ("b", "") } else { ("a", "more") };
            let list = json!({"metadata": {"continue": next}, "items": [{"metadata": {"name": name}}]});
            Ok::<_, std::convert::Infallible>(http::Response::new(Body::from(list.to_string().into_bytes())))
        });
        let api = Api::<NodeObject>::all(Client::new(service, "default"));
        let nodes = list(&api, ListParams::default()).await.unwrap();
        let names: Vec<_> = nodes.iter().filter_map(|node| node.metadata.name.as_deref()).collect();
        assert_eq!(names, ["a", "b"]);
    }
}
