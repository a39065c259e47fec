//! Tests rollouts of the agents. A new agent takes over from the old agent on its node, and the old
//! agent serves again if the new agent fails.
use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, SYSTEM_NAMESPACE, Scope, text, wait_until, wait_without_violation};
use serde_json::{Value, json};

use crate::restarts::is_ready;
use crate::{GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, ten_shares, wait_until_advertised};

/// The `DaemonSet` of the agents. Dropping this value restores the containers of the template, and
/// waits until all agents match the template.
struct AgentDaemonSet<'a> {
    cluster: &'a Cluster,
    path: String,
    containers: Value,
}

impl<'a> AgentDaemonSet<'a> {
    fn read(cluster: &'a Cluster) -> Result<Self> {
        let path = format!("/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/daemonsets/cleave-agent");
        let containers = cluster.get(&path)?["spec"]["template"]["spec"]["containers"].take();
        let agents = Self { cluster, path, containers };
        agents.wait_until_rolled_out()?;
        Ok(agents)
    }

    fn set_containers(&self, containers: &Value) -> Result<()> {
        let change = json!({"spec": {"template": {"spec": {"containers": containers}}}});
        self.cluster.patch(&self.path, &change).map(drop)
    }

    /// Sets environment variables in the agents' template.
    fn set_env(&self, values: &[(&str, &str)]) -> Result<()> {
        let mut containers = self.containers.clone();
        let env = containers[0]["env"].as_array_mut().context("the agent has no environment")?;
        for (name, value) in values {
            env.retain(|variable| variable["name"] != *name);
            env.push(json!({"name": name, "value": value}));
        }
        self.set_containers(&containers)
    }

    /// Returns whether all agents match the template and are available, and all other agents are
    /// terminating.
    fn is_rolled_out(&self) -> Result<bool> {
        let set = self.cluster.get(&self.path)?;
        let (status, all) = (&set["status"], &set["status"]["desiredNumberScheduled"]);
        Ok(status["observedGeneration"] == set["metadata"]["generation"]
            && status["updatedNumberScheduled"] == *all
            && status["numberAvailable"] == *all
            && Some(self.pods()?.len() as u64) == all.as_u64())
    }

    fn wait_until_rolled_out(&self) -> Result<()> {
        wait_until("all agents are of the newest revision", || self.is_rolled_out())
    }

    /// Returns the agents' pods that are not terminating, by UID.
    fn pods(&self) -> Result<BTreeMap<String, Value>> {
        let selector = "labelSelector=app.kubernetes.io/component=agent";
        let pods = self.cluster.list(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?{selector}"))?;
        let remaining = pods.into_iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        Ok(remaining.map(|pod| (text(&pod["metadata"]["uid"]), pod)).collect())
    }
}

impl Drop for AgentDaemonSet<'_> {
    fn drop(&mut self) {
        let restored = self.set_containers(&self.containers).and_then(|()| self.wait_until_rolled_out());
        if let Err(error) = restored {
            let _ = writeln!(std::io::stderr(), "failed to restore the agents: {error:#}");
        }
    }
}

#[test]
fn a_rollout_of_agents_that_fail_after_they_take_over_stops_at_the_first_node() -> Result<()> {
    let cluster = Cluster::connect()?;
    let agents = AgentDaemonSet::read(&cluster)?;
    // The rollout may start on any node.
    let scope = Scope::new(&cluster, "broken-agents")?;
    let spec = json!({"nodeSelector": {"kubernetes.io/os": "linux"}, "mode": "Mps", "mps": {"units": 10}});
    scope.create_policy("shares-on-all-nodes", &spec)?;
    let old = agents.pods()?;
    for node in old.values().map(|pod| text(&pod["spec"]["nodeName"])) {
        wait_until(&format!("{node} advertises shares"), || Ok(cluster.allocatable(&node, SHARES_RESOURCE)? > 0))?;
    }
    // With this relay directory, a new agent takes over from the old agent but never serves.
    agents.set_env(&[("CLEAVE_RELAY_DIR", "/run/none"), ("CLEAVE_PROBATION", "5")])?;
    let new_pods = || -> Result<Vec<Value>> {
        Ok(agents.pods()?.into_iter().filter(|(uid, _)| !old.contains_key(uid)).map(|(_, pod)| pod).collect())
    };
    let restarts = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0);
    wait_without_violation(
        "a new agent has failed",
        || Ok(new_pods()?.iter().any(|pod| restarts(pod) >= 1)),
        || {
            let now = agents.pods()?;
            let lost = old.keys().find(|uid| !now.get(*uid).is_some_and(is_ready));
            let lost = lost.map(|uid| format!("the old agent {uid} is deleted or not ready"));
            let more = (now.len() > old.len() + 1).then(|| "the roll-out has not stopped at the first node".to_owned());
            Ok(lost.or(more))
        },
    )?;
    let new = new_pods()?;
    ensure!(new.len() == 1 && !is_ready(&new[0]), "{new:?}");
    let node = text(&new[0]["spec"]["nodeName"]);
    let name = text(&new[0]["metadata"]["name"]);
    let log = cluster.read(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{name}/log?previous=true"))?;
    ensure!(log.contains("this agent serves the node"), "the new agent has not taken over:\n{log}");
    scope.create_pod_on_node(&node, "served", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("served")?;
    agents.set_containers(&agents.containers)?;
    agents.wait_until_rolled_out()?;
    ensure!(agents.pods()?.keys().eq(old.keys()), "an old agent was replaced");
    scope.create_pod_on_node(&node, "later", &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("later").map(drop)
}

#[test]
fn a_rollout_of_agents_while_pods_arrive_rejects_no_pod() -> Result<()> {
    let cluster = Cluster::connect()?;
    let agents = AgentDaemonSet::read(&cluster)?;
    let scope = ten_shares(&cluster, "agents-and-pods")?;
    let old = agents.pods()?;
    agents.set_env(&[("CLEAVE_E2E_RELEASE", "next")])?;
    // `wait_until_running` fails if the kubelet rejects a pod.
    let mut round = 0;
    loop {
        let rolled_out = round > 0 && agents.is_rolled_out()?;
        let names: Vec<String> = (0..8).map(|number| format!("p{round}-{number}")).collect();
        for name in &names {
            scope.create_pod(name, &json!({SHARES_RESOURCE: 1}), HOLD_CLIENT_SCRIPT)?;
        }
        names.iter().try_for_each(|name| scope.wait_until_running(name).map(drop))?;
        names.iter().try_for_each(|name| scope.delete_pod(name, 0))?;
        if rolled_out {
            break;
        }
        round += 1;
    }
    ensure!(agents.pods()?.keys().all(|uid| !old.contains_key(uid)), "an agent was not replaced");
    for (uid, pod) in &old {
        let path = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{}", text(&pod["metadata"]["name"]));
        wait_until(&format!("the old agent {uid} has ended"), || Ok(cluster.find(&path)?.is_none()))?;
    }
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE).with_context(|| NODE)
}
