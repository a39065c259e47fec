//! Tests `mpsHost.upgrade: WhenIdle`: the operator must replace an outdated MPS host when no pod
//! uses MPS on its node any more.
use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, SYSTEM_NAMESPACE, run_program, text, wait_until, wait_without_violation};
use serde_json::{Value, json};

use crate::health::cleave_path;
use crate::restarts::{component_pod, is_ready};
use crate::{
    GPUS_PER_NODE, HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, container_and_restarts, daemon_pids, ten_shares,
    wait_until_advertised,
};

/// An annotation of the template. The tests change this annotation to simulate an upgrade of the
/// chart.
const RELEASE_ANNOTATION: &str = "e2e/release";

/// The `DaemonSet` of the MPS hosts. Dropping this value restores the template, and waits until all
/// MPS hosts match the template.
struct MpsHostDaemonSet<'a> {
    cluster: &'a Cluster,
    path: String,
    image: String,
}

impl<'a> MpsHostDaemonSet<'a> {
    fn read(cluster: &'a Cluster) -> Result<Self> {
        let path = format!("/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/daemonsets/cleave-mps-host");
        let image = text(&cluster.get(&path)?["spec"]["template"]["spec"]["containers"][0]["image"]);
        let template = Self { cluster, path, image };
        // Remove the annotation, because an earlier run may have been killed.
        template.set_release(&Value::Null)?;
        template.wait_until_rolled_out()?;
        Ok(template)
    }

    /// Sets the annotation [`RELEASE_ANNOTATION`] of the template.
    fn set_release(&self, release: &Value) -> Result<()> {
        let change = json!({"spec": {"template": {"metadata": {"annotations": {RELEASE_ANNOTATION: release}}}}});
        self.cluster.patch(&self.path, &change).map(drop)
    }

    /// Changes the image of the template.
    fn set_image(&self, image: &str) -> Result<()> {
        let mut set = self.cluster.get(&self.path)?;
        let containers = &mut set["spec"]["template"]["spec"]["containers"];
        containers[0]["image"] = json!(image);
        let change = json!({"spec": {"template": {"spec": {"containers": containers}}}});
        self.cluster.patch(&self.path, &change).map(drop)
    }

    /// Returns true if all MPS hosts match the template and are ready. Otherwise, returns an error
    /// that contains the status.
    fn is_rolled_out(&self) -> Result<bool> {
        let set = self.cluster.get(&self.path)?;
        let status = &set["status"];
        let all = &status["desiredNumberScheduled"];
        ensure!(
            status["observedGeneration"] == set["metadata"]["generation"]
                && status["updatedNumberScheduled"] == *all
                && status["numberReady"] == *all,
            "{status}"
        );
        Ok(true)
    }

    /// Waits until all MPS hosts match the template and are ready.
    fn wait_until_rolled_out(&self) -> Result<()> {
        wait_until("all MPS hosts are of the newest revision", || self.is_rolled_out())
    }
}

impl Drop for MpsHostDaemonSet<'_> {
    fn drop(&mut self) {
        let restored = self
            .set_release(&Value::Null)
            .and_then(|()| self.set_image(&self.image))
            .and_then(|()| self.wait_until_rolled_out());
        if let Err(error) = restored {
            let _ = writeln!(std::io::stderr(), "failed to restore the MPS hosts: {error:#}");
        }
    }
}

/// Returns the pods of MPS hosts that are not terminating, by node.
fn mps_host_pods(cluster: &Cluster) -> Result<BTreeMap<String, Value>> {
    let selector = "labelSelector=app.kubernetes.io/component=mps-host";
    let pods = cluster.list(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?{selector}"))?;
    let remaining = pods.into_iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(remaining.map(|pod| (text(&pod["spec"]["nodeName"]), pod)).collect())
}

/// Returns the UIDs of the pods of MPS hosts, by node.
fn mps_host_uids(cluster: &Cluster) -> Result<BTreeMap<String, String>> {
    Ok(mps_host_pods(cluster)?.into_iter().map(|(node, pod)| (node, text(&pod["metadata"]["uid"]))).collect())
}

/// Returns a check for [`wait_without_violation`]. The check reports a violation if more than one
/// node has no ready MPS host.
fn check_for_two_unready_hosts(cluster: &Cluster, nodes: usize) -> impl FnMut() -> Result<Option<String>> + '_ {
    move || {
        let hosts = mps_host_pods(cluster)?;
        let up = hosts.values().filter(|pod| is_ready(pod)).count();
        Ok((up + 1 < nodes).then(|| format!("only {up} of {nodes} MPS hosts are ready")))
    }
}

#[test]
fn an_mps_host_is_replaced_only_after_the_last_pod_with_shares_on_its_node_ends() -> Result<()> {
    let cluster = Cluster::connect()?;
    let template = MpsHostDaemonSet::read(&cluster)?;
    let scope = ten_shares(&cluster, "idle-upgrade")?;
    scope.create_pod_on_node(NODE, "holder", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("holder")?;
    scope.client_report("holder")?;
    let (before, daemons, old) =
        (container_and_restarts(&cluster, &scope, "holder")?, daemon_pids(&cluster)?, mps_host_uids(&cluster)?);
    let name = text(&component_pod(&cluster, "mps-host")?["metadata"]["name"]);
    template.set_release(&json!("next"))?;
    // No pod uses MPS on the other nodes.
    wait_without_violation(
        "the MPS hosts of all other nodes are replaced",
        || {
            let hosts = mps_host_pods(&cluster)?;
            let is_new = |(node, uid): (&String, &String)| {
                node == NODE
                    || hosts.get(node).is_some_and(|pod| text(&pod["metadata"]["uid"]) != *uid && is_ready(pod))
            };
            Ok(old.iter().all(is_new))
        },
        || {
            let uid = mps_host_uids(&cluster)?.remove(NODE);
            Ok((uid.as_ref() != old.get(NODE))
                .then(|| format!("the MPS host of {NODE} was replaced while it had a client")))
        },
    )?;
    // The node must accept new pods while the replacement of its MPS host is pending.
    scope.create_pod_on_node(NODE, "guest", &json!({SHARES_RESOURCE: 3}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("guest")?;
    scope.delete_pod("guest", 0)?;
    ensure!(before == container_and_restarts(&cluster, &scope, "holder")?, "a running pod was disturbed");
    ensure!(daemons == daemon_pids(&cluster)?, "an MPS daemon was restarted");

    scope.delete_pod("holder", 0)?;
    wait_until("the MPS host is replaced", || {
        Ok(mps_host_uids(&cluster)?.get(NODE).is_some_and(|uid| Some(uid) != old.get(NODE)))
    })?;
    // The new pod may wait at the gate or for its MPS daemon, but must not fail.
    scope.create_pod_on_node(NODE, "next", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("next")?;
    ensure!(
        scope.client_report("next")?["sms"] == 26,
        "the new pod has other limits: {}",
        scope.client_report("next")?
    );
    template.wait_until_rolled_out()?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    wait_until("the DaemonSet has an Event of the replacement", || {
        let events = cluster.list(&format!("/apis/events.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/events"))?;
        let names =
            |event: &Value| text(&event["note"]).starts_with(&format!("replacing {SYSTEM_NAMESPACE}/{name} with"));
        Ok(events.iter().any(|event| event["reason"] == "MpsHostReplaced" && names(event)))
    })?;
    // Delete this pod, because the restored template can roll out only when no pod uses MPS.
    scope.delete_pod("next", 0)
}

#[test]
fn an_mps_host_is_replaced_on_a_node_whose_gpus_are_all_drained() -> Result<()> {
    let cluster = Cluster::connect()?;
    let template = MpsHostDaemonSet::read(&cluster)?;
    let scope = ten_shares(&cluster, "drained-upgrade")?;
    scope.create_pod_on_node(NODE, "holder", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("holder")?;
    let old = mps_host_uids(&cluster)?;
    template.set_release(&json!("drained"))?;
    let uncordon = || {
        (0..GPUS_PER_NODE)
            .try_for_each(|gpu| run_program(&cleave_path(), &["uncordon", NODE, &gpu.to_string()]).map(drop))
    };
    let drained = || -> Result<()> {
        for gpu in 0..GPUS_PER_NODE {
            run_program(
                &cleave_path(),
                &["drain", NODE, &gpu.to_string(), "--force", "--grace", "1", "--timeout", "80"],
            )?;
        }
        wait_until("the MPS host is replaced", || {
            Ok(mps_host_uids(&cluster)?.get(NODE).is_some_and(|uid| Some(uid) != old.get(NODE)))
        })?;
        template.wait_until_rolled_out()
    };
    let outcome = drained();
    uncordon()?;
    outcome?;
    wait_until_advertised(&cluster, SHARES_RESOURCE, 10 * GPUS_PER_NODE)?;
    scope.create_pod_on_node(NODE, "next", &json!({SHARES_RESOURCE: 2}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("next")?;
    scope.delete_pod("next", 0)
}

#[test]
fn an_image_that_cannot_be_pulled_affects_one_node_until_the_next_change() -> Result<()> {
    let cluster = Cluster::connect()?;
    let template = MpsHostDaemonSet::read(&cluster)?;
    let old = mps_host_uids(&cluster)?;
    template.set_image("localhost/cleave:none")?;
    let cannot_start = |pod: &Value| {
        let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
        text(&waiting["reason"]).starts_with("ErrImage") || waiting["reason"] == "ImagePullBackOff"
    };
    wait_without_violation(
        "one MPS host cannot start",
        || Ok(mps_host_pods(&cluster)?.values().any(cannot_start)),
        check_for_two_unready_hosts(&cluster, old.len()),
    )?;
    // With the old image, the other MPS hosts are up to date again, so only the affected MPS host
    // is replaced.
    let affected: Vec<String> =
        mps_host_pods(&cluster)?.into_iter().filter(|(_, pod)| cannot_start(pod)).map(|(node, _)| node).collect();
    template.set_image(&template.image)?;
    wait_without_violation(
        "all MPS hosts are ready",
        || template.is_rolled_out().or(Ok(false)),
        check_for_two_unready_hosts(&cluster, old.len()),
    )?;
    let now = mps_host_uids(&cluster)?;
    for (node, uid) in &old {
        let now = now.get(node).with_context(|| format!("{node} has no MPS host"))?;
        ensure!(
            (now == uid) != affected.contains(node),
            "the MPS host of {node} was replaced without need, or not at all"
        );
    }
    Ok(())
}
