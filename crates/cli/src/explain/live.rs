//! Reads the cluster for one explanation.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use cleave_api::GpuQuota;
use cleave_operator::dry_run::Objects;
use cleave_operator::placement::{Cluster, Gatekeeper, ReconcileTime, ReleaseReason};
use cleave_operator::pods::{PodObject, RawPod, full_name};
use cleave_operator::policies::demand::WaitingPod;
use cleave_operator::read::Observed;
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::{Api, Client};

use crate::client::InstallationArgs;
use crate::quotas::list_quotas_if_allowed;
use crate::quotas::report::{Quota, QuotasReport};

/// The cluster at one time, as input of the placement gate and of planning.
#[derive(Debug, Default)]
pub struct LiveCluster {
    /// The input of the placement gate.
    pub(super) cluster: Cluster,
    /// The input of planning.
    pub(super) observed: Observed,
    /// What the operator reported about the quotas of the cluster.
    pub(super) quotas: Vec<Quota>,
    /// Seconds since the Unix epoch.
    pub(super) now: u64,
}

impl LiveCluster {
    /// Lists the objects of a cluster, and the pod `namespace/name` even if the pod has ended.
    ///
    /// # Errors
    /// Returns an error if the API server refuses a request.
    pub(super) async fn observe(client: &Client, install: &InstallationArgs, pod: &str) -> Result<Self> {
        let objects = Objects::list(client, &install.cleave_namespace, &install.agent_selector).await?;
        let mut objects = objects.list_for_placement(client).await?;
        if !objects.pods.iter().any(|one| full_name(&one.metadata) == pod)
            && let Some((namespace, name)) = pod.split_once('/')
        {
            // `Objects::list` omits pods that have ended.
            let named = ListParams::default().fields(&format!("metadata.name={name}"));
            let ended = Api::<RawPod>::namespaced(client.clone(), namespace).list(&named).await;
            let ended = ended.with_context(|| format!("failed to read pod {pod}"))?;
            objects.pods.extend(ended.items.into_iter().map(PodObject::from));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Ok(Self::new(objects, now).with_quotas(list_quotas_if_allowed(client).await?))
    }

    /// Adds the quotas of the cluster. The placement gate applies them.
    #[must_use]
    pub fn with_quotas(mut self, quotas: Vec<DeserializeGuard<GpuQuota>>) -> Self {
        self.cluster.quotas = quotas.iter().cloned().map(Arc::new).collect();
        self.quotas = QuotasReport::new(quotas).quotas;
        self
    }

    /// Builds the inputs of the placement gate and of planning from the objects. `now` is in
    /// seconds since the Unix epoch.
    pub fn new(mut objects: Objects, now: u64) -> Self {
        objects.pods.iter_mut().for_each(PodObject::trim);
        let observed = objects.to_observed();
        let cluster = Cluster {
            pods: objects.pods.into_iter().map(Arc::new).collect(),
            nodes: objects.nodes.into_iter().map(Arc::new).collect(),
            gpu_nodes: objects.gpu_nodes.into_iter().map(Arc::new).collect(),
            policies: objects.policies.into_iter().map(Arc::new).collect(),
            agents: objects.agents.into_iter().map(Arc::new).collect(),
            // Only the operator knows which MPS hosts it replaces. The operator reports
            // replaced MPS hosts in Events of the pods that wait for such an MPS host.
            hosts: None,
            volume_claims: objects.volume_claims.into_iter().map(Arc::new).collect(),
            volumes: objects.volumes.into_iter().map(Arc::new).collect(),
            budgets: objects.budgets.into_iter().map(Arc::new).collect(),
            quotas: Vec::new(),
            namespaces: objects.namespaces.into_iter().map(Arc::new).collect(),
        };
        Self { cluster, observed, quotas: Vec::new(), now }
    }

    /// Returns the cluster without the pods that still have the placement gate: they have no
    /// reservation yet.
    pub(super) fn without_gated_pods(&self) -> Cluster {
        let pods = self.cluster.pods.iter().filter(|pod| !pod.waits_at_gate());
        Cluster { pods: pods.cloned().collect(), ..self.cluster.clone() }
    }
}

/// The decisions of the placement gate, by pod.
#[derive(Debug, Default)]
pub(super) struct GateDecisions {
    /// The pods that are released, and why.
    pub(super) released: BTreeMap<String, ReleaseReason>,
    /// The reasons why the other pods wait, as messages to their owners.
    pub(super) waiting: BTreeMap<String, String>,
}

/// Runs the placement gate until it releases no more pods, as the operator does within seconds.
/// `up` is the time since the operator started. `epoch` is the current time in seconds since the
/// Unix epoch.
pub(super) fn run_placement_gate(
    keeper: &mut Gatekeeper,
    cluster: &Cluster,
    demand: &BTreeMap<String, WaitingPod>,
    up: Duration,
    epoch: u64,
) -> GateDecisions {
    let mut decisions = GateDecisions::default();
    loop {
        let actions = keeper.reconcile(cluster, demand, ReconcileTime { up, epoch });
        let more = actions.more && !actions.releases.is_empty();
        decisions.released.extend(actions.releases.into_iter().map(|release| (release.pod, release.reason)));
        if !more {
            decisions.waiting = actions.waiting.into_iter().map(|(pod, waiting)| (pod, waiting.message)).collect();
            return decisions;
        }
    }
}
