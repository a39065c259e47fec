//! MPS hosts take what their `DaemonSet` is changed to when nothing uses MPS on their node, and not
//! before (`mpsHost.upgrade: WhenIdle`).
use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, SYSTEM, hold_until, run, text, wait_until};
use serde_json::{Value, json};

use crate::health::cleave;
use crate::restarts::{part, ready};
use crate::{GPUS, HOLD, NODE, SHARES, daemon_pids, offers, ten_shares, undisturbed};

/// Of the template, as an upgrade of the chart could change it.
const RELEASE: &str = "e2e/release";

/// The `DaemonSet` of the MPS hosts; as it was, and all of them with it, when the value goes.
struct Template<'a> {
    cluster: &'a Cluster,
    path: String,
    image: String,
}

impl<'a> Template<'a> {
    fn of(cluster: &'a Cluster) -> Result<Self> {
        let path = format!("/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/cleave-mps-host");
        let image = text(&cluster.get(&path)?["spec"]["template"]["spec"]["containers"][0]["image"]);
        let template = Self { cluster, path, image };
        // An earlier run may have been killed.
        template.annotate(&Value::Null)?;
        template.reached()?;
        Ok(template)
    }

    fn annotate(&self, release: &Value) -> Result<()> {
        let change = json!({"spec": {"template": {"metadata": {"annotations": {RELEASE: release}}}}});
        self.cluster.patch(&self.path, &change).map(drop)
    }

    fn image(&self, image: &str) -> Result<()> {
        let mut set = self.cluster.get(&self.path)?;
        let containers = &mut set["spec"]["template"]["spec"]["containers"];
        containers[0]["image"] = json!(image);
        let change = json!({"spec": {"template": {"spec": {"containers": containers}}}});
        self.cluster.patch(&self.path, &change).map(drop)
    }

    /// Whether all hosts are as it says, and ready.
    fn is_reached(&self) -> Result<bool> {
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

    fn reached(&self) -> Result<()> {
        wait_until("all MPS hosts are of the newest revision", || self.is_reached())
    }
}

impl Drop for Template<'_> {
    fn drop(&mut self) {
        let restored = self.annotate(&Value::Null).and_then(|()| self.image(&self.image)).and_then(|()| self.reached());
        if let Err(error) = restored {
            let _ = writeln!(std::io::stderr(), "the MPS hosts are not as they were: {error:#}");
        }
    }
}

/// MPS hosts by node, those that are going left out.
fn hosts(cluster: &Cluster) -> Result<BTreeMap<String, Value>> {
    let selector = "labelSelector=app.kubernetes.io/component=mps-host";
    let pods = cluster.list(&format!("/api/v1/namespaces/{SYSTEM}/pods?{selector}"))?;
    let stays = pods.into_iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(stays.map(|pod| (text(&pod["spec"]["nodeName"]), pod)).collect())
}

fn uids(cluster: &Cluster) -> Result<BTreeMap<String, String>> {
    Ok(hosts(cluster)?.into_iter().map(|(node, pod)| (node, text(&pod["metadata"]["uid"]))).collect())
}

/// Nodes without a host that is ready: more than one is one too many.
fn more_than_one_down(cluster: &Cluster, nodes: usize) -> impl FnMut() -> Result<Option<String>> + '_ {
    move || {
        let hosts = hosts(cluster)?;
        let up = hosts.values().filter(|pod| ready(pod)).count();
        Ok((up + 1 < nodes).then(|| format!("of {nodes} MPS hosts {up} are up")))
    }
}

#[test]
fn an_mps_host_is_replaced_when_the_last_pod_with_shares_has_left_its_node_and_not_before() -> Result<()> {
    let cluster = Cluster::connect()?;
    let template = Template::of(&cluster)?;
    let scope = ten_shares(&cluster, "idle-upgrade")?;
    scope.pod_on(NODE, "holder", &json!({SHARES: 2}), HOLD)?;
    scope.running("holder")?;
    scope.seen("holder")?;
    let (before, daemons, old) = (undisturbed(&cluster, &scope, "holder")?, daemon_pids(&cluster)?, uids(&cluster)?);
    let name = text(&part(&cluster, "mps-host")?["metadata"]["name"]);
    template.annotate(&json!("next"))?;
    // Nobody uses MPS on the others.
    hold_until(
        "the hosts of all other nodes are replaced",
        || {
            let hosts = hosts(&cluster)?;
            let is_new = |(node, uid): (&String, &String)| {
                node == NODE || hosts.get(node).is_some_and(|pod| text(&pod["metadata"]["uid"]) != *uid && ready(pod))
            };
            Ok(old.iter().all(is_new))
        },
        || {
            let uid = uids(&cluster)?.remove(NODE);
            Ok((uid.as_ref() != old.get(NODE)).then(|| format!("the host of {NODE} was replaced under a client")))
        },
    )?;
    // While it waits it takes new pods as ever.
    scope.pod_on(NODE, "guest", &json!({SHARES: 3}), HOLD)?;
    scope.running("guest")?;
    scope.delete_pod("guest", 0)?;
    ensure!(before == undisturbed(&cluster, &scope, "holder")?, "a running pod was disturbed");
    ensure!(daemons == daemon_pids(&cluster)?, "an MPS daemon was started again");

    scope.delete_pod("holder", 0)?;
    wait_until("the host is replaced", || Ok(uids(&cluster)?.get(NODE).is_some_and(|uid| Some(uid) != old.get(NODE))))?;
    // It waits at the gate, or for its daemon, and fails in no case.
    scope.pod_on(NODE, "next", &json!({SHARES: 2}), HOLD)?;
    scope.running("next")?;
    ensure!(scope.seen("next")?["sms"] == 26, "the new pod has other limits: {}", scope.seen("next")?);
    template.reached()?;
    offers(&cluster, SHARES, 10 * GPUS)?;
    wait_until("the DaemonSet is told of it", || {
        let events = cluster.list(&format!("/apis/events.k8s.io/v1/namespaces/{SYSTEM}/events"))?;
        let names = |event: &Value| text(&event["note"]).starts_with(&format!("{SYSTEM}/{name} is replaced"));
        Ok(events.iter().any(|event| event["reason"] == "MpsHostReplaced" && names(event)))
    })?;
    // What it is put back to waits for this one to leave.
    scope.delete_pod("next", 0)
}

#[test]
fn an_mps_host_is_replaced_on_a_node_whose_gpus_are_all_drained() -> Result<()> {
    let cluster = Cluster::connect()?;
    let template = Template::of(&cluster)?;
    let scope = ten_shares(&cluster, "drained-upgrade")?;
    scope.pod_on(NODE, "holder", &json!({SHARES: 2}), HOLD)?;
    scope.running("holder")?;
    let old = uids(&cluster)?;
    template.annotate(&json!("drained"))?;
    let uncordon = || (0..GPUS).try_for_each(|gpu| run(&cleave(), &["uncordon", NODE, &gpu.to_string()]).map(drop));
    let drained = || -> Result<()> {
        for gpu in 0..GPUS {
            run(&cleave(), &["drain", NODE, &gpu.to_string(), "--force", "--grace", "1", "--timeout", "80"])?;
        }
        wait_until("the host is replaced", || {
            Ok(uids(&cluster)?.get(NODE).is_some_and(|uid| Some(uid) != old.get(NODE)))
        })?;
        template.reached()
    };
    let outcome = drained();
    uncordon()?;
    outcome?;
    offers(&cluster, SHARES, 10 * GPUS)?;
    scope.pod_on(NODE, "next", &json!({SHARES: 2}), HOLD)?;
    scope.running("next")?;
    scope.delete_pod("next", 0)
}

#[test]
fn an_image_that_cannot_be_had_takes_one_node_and_no_other_and_the_next_change_mends_it() -> Result<()> {
    let cluster = Cluster::connect()?;
    let template = Template::of(&cluster)?;
    let old = uids(&cluster)?;
    template.image("localhost/cleave:none")?;
    let waits = |pod: &Value| {
        let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
        text(&waiting["reason"]).starts_with("ErrImage") || waiting["reason"] == "ImagePullBackOff"
    };
    hold_until(
        "one host cannot start",
        || Ok(hosts(&cluster)?.values().any(waits)),
        more_than_one_down(&cluster, old.len()),
    )?;
    // Back to what it was: those that are so still are up to date, and the other is replaced once
    // more.
    let bad: Vec<String> = hosts(&cluster)?.into_iter().filter(|(_, pod)| waits(pod)).map(|(node, _)| node).collect();
    template.image(&template.image)?;
    hold_until("all hosts serve", || template.is_reached().or(Ok(false)), more_than_one_down(&cluster, old.len()))?;
    let now = uids(&cluster)?;
    for (node, uid) in &old {
        let now = now.get(node).with_context(|| format!("{node} has no MPS host"))?;
        ensure!((now == uid) != bad.contains(node), "the host of {node} was replaced without need, or not at all");
    }
    Ok(())
}
