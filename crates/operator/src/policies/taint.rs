//! Taints nodes that can serve no pod, because all of their GPUs are lost or need a reset, or
//! because their agent is not ready. The taint is disabled by default.
//!
//! [`Taints`] makes the decisions and is pure. [`write_all`] changes only Cleave's taint of a node,
//! with a JSON patch. [`TaintBackoff`] delays the nodes whose taint could not be written.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::names::{HEALTH_LOST, HEALTH_NEEDS_RESET, UNHEALTHY_TAINT};
use cleave_plan::snapshot::Taint;
use futures::StreamExt as _;
use http::Request;
use kube::Client;
use serde_json::{Value, json};

use crate::leader::LeaseGuard;
use crate::read::{Node, Observed};
use crate::write::{MAX_IN_FLIGHT, WRITE_TIMEOUT};

/// How long an agent may be not ready before its node is tainted. An upgrade of the agent usually
/// takes a few seconds. The start of a node takes longer.
pub(crate) const NOT_READY_TIMEOUT: Duration = Duration::from_secs(60);
/// First delay after the taint of a node could not be written. Each further failure doubles the
/// delay.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// Maximum delay after the taint of a node could not be written.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Effect of the taint. The effect keeps new pods off the node and does not evict running pods.
const UNHEALTHY_EFFECT: &str = "NoSchedule";

/// Key and effect of the taint.
const UNHEALTHY_KEY_AND_EFFECT: (&str, &str) = (UNHEALTHY_TAINT, UNHEALTHY_EFFECT);

/// A change to one node's taints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaintChange {
    /// Name of the node.
    pub node: String,
    /// Why the node is tainted. `None` if the taint is removed.
    pub why: Option<&'static str>,
    /// JSON patch of the node's taints.
    pub patch: Value,
}

/// Whether a node can serve pods with GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeVerdict {
    /// The node can serve pods, or its state is unknown.
    Usable,
    /// The node cannot serve pods. Contains the reason.
    Unusable(&'static str),
    /// The node's agent is not ready. Contains the time since the agent became not ready.
    NotReady(Duration),
}

/// The nodes whose taint could not be written. Each node has its own delay, so that one refused
/// taint does not delay other writes. Times are durations since the process started.
#[derive(Debug, Default)]
pub(crate) struct TaintBackoff(BTreeMap<String, WriteFailures>);

/// Consecutive failures to write the taint of a node.
#[derive(Debug, Default)]
struct WriteFailures {
    times: u32,
    /// The end of the delay.
    until: Duration,
}

impl TaintBackoff {
    /// Records whether the taint of a node was written.
    pub(crate) fn record_write(&mut self, node: &str, written: bool, now: Duration) {
        if written {
            self.0.remove(node);
            return;
        }
        let failures = self.0.entry(node.to_owned()).or_default();
        let delay = FIRST_BACKOFF.saturating_mul(2_u32.saturating_pow(failures.times)).min(MAX_BACKOFF);
        failures.times = failures.times.saturating_add(1);
        failures.until = now.saturating_add(delay);
    }

    /// Returns whether the write of a node's taint is delayed.
    pub(crate) fn is_delayed(&self, node: &str, now: Duration) -> bool {
        self.0.get(node).is_some_and(|failures| failures.until > now)
    }

    /// Returns the time until the first delay ends. Returns `None` if no delay is in progress.
    pub(crate) fn time_to_retry(&self, now: Duration) -> Option<Duration> {
        self.0.values().map(|failures| failures.until.saturating_sub(now)).filter(|left| !left.is_zero()).min()
    }

    /// Forgets the failures of all nodes that are not in `nodes`.
    pub(crate) fn retain(&mut self, nodes: &BTreeSet<&str>) {
        self.0.retain(|node, _| nodes.contains(node.as_str()));
    }
}

/// The nodes that may need a taint.
#[derive(Debug, Default)]
pub(crate) struct Taints {
    /// Nodes whose agent is not ready, each with the time at which the agent became not ready.
    away: BTreeMap<String, Duration>,
    backoff: TaintBackoff,
}

impl Taints {
    /// Returns the nodes to change, and when to check again even if nothing changes. `now` is the
    /// time since the process started.
    pub(crate) fn update(&mut self, observed: &Observed, now: Duration) -> (Vec<TaintChange>, Option<Duration>) {
        self.away.retain(|name, _| observed.nodes.contains_key(name));
        let mut next: Option<Duration> = None;
        let mut changes = Vec::new();
        let mut differing = BTreeSet::new();
        for (name, node) in &observed.nodes {
            let verdict = self.verdict(name, node, now);
            let tainted =
                node.taints.iter().position(|taint| taint.key == UNHEALTHY_TAINT && taint.effect == UNHEALTHY_EFFECT);
            let (why, patch) = match (verdict, tainted) {
                (NodeVerdict::NotReady(since), _) if since < NOT_READY_TIMEOUT => {
                    let left = NOT_READY_TIMEOUT.saturating_sub(since);
                    next = Some(next.map_or(left, |next| next.min(left)));
                    continue;
                }
                (NodeVerdict::NotReady(_), None) => {
                    (Some("the agent is not ready"), add_patch(&UNHEALTHY_KEY_AND_EFFECT, &node.taints, &node.version))
                }
                (NodeVerdict::Unusable(why), None) => {
                    (Some(why), add_patch(&UNHEALTHY_KEY_AND_EFFECT, &node.taints, &node.version))
                }
                (NodeVerdict::Usable, Some(index)) => (None, remove_patch(&UNHEALTHY_KEY_AND_EFFECT, index)),
                _ => continue,
            };
            differing.insert(name.as_str());
            if !self.backoff.is_delayed(name, now) {
                changes.push(TaintChange { node: name.clone(), why, patch });
            }
        }
        self.backoff.retain(&differing);
        (changes, next.into_iter().chain(self.backoff.time_to_retry(now)).min())
    }

    /// Records whether the taint of a node was written. Returns the time until the next retry.
    pub(crate) fn record_write(&mut self, node: &str, written: bool, now: Duration) -> Option<Duration> {
        self.backoff.record_write(node, written, now);
        self.backoff.time_to_retry(now)
    }

    fn verdict(&mut self, name: &str, node: &Node, now: Duration) -> NodeVerdict {
        // A node whose agent has not reported any GPU may have no GPU, so the node is not tainted.
        let Some(gpus) = node.reported().filter(|gpus| !gpus.is_empty()) else {
            self.away.remove(name);
            return NodeVerdict::Usable;
        };
        if !node.agent.is_some_and(|agent| agent.ready) {
            let since = *self.away.entry(name.to_owned()).or_insert(now);
            return NodeVerdict::NotReady(now.saturating_sub(since));
        }
        self.away.remove(name);
        // Suspect GPUs usually become healthy again within a minute. Other causes, such as a failed
        // MPS daemon, are not faults of the GPU.
        let is_out = |class: &str| matches!(class, HEALTH_LOST | HEALTH_NEEDS_RESET);
        if gpus.iter().all(|gpu| !gpu.health.healthy && is_out(&gpu.health.class)) {
            return NodeVerdict::Unusable("all GPUs of the node are lost or need a reset");
        }
        NodeVerdict::Usable
    }
}

/// Builds a patch that adds a taint to a node with these taints and this `resourceVersion`. Other
/// kinds of patches replace the whole list and could undo concurrent changes.
pub(crate) fn add_patch((key, effect): &(&str, &str), taints: &[Taint], version: &str) -> Value {
    let taint = json!({"key": key, "effect": effect});
    let change = if taints.is_empty() {
        json!({"op": "add", "path": "/spec/taints", "value": [taint]})
    } else {
        json!({"op": "add", "path": "/spec/taints/-", "value": taint})
    };
    json!([{"op": "test", "path": "/metadata/resourceVersion", "value": version}, change])
}

/// Builds a patch that removes the taint at this index.
pub(crate) fn remove_patch((key, effect): &(&str, &str), index: usize) -> Value {
    json!([
        {"op": "test", "path": format!("/spec/taints/{index}/key"), "value": key},
        {"op": "test", "path": format!("/spec/taints/{index}/effect"), "value": effect},
        {"op": "remove", "path": format!("/spec/taints/{index}")},
    ])
}

/// The result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaintWriteResult {
    /// The change was written.
    Done,
    /// The node changed after the decision, so the API server refused the patch. The next decision
    /// reads the node again.
    NodeChanged,
    /// The request failed, or the API server did not answer.
    Failed,
}

/// Writes changes, several at a time, and logs the results. Starts no write after this process
/// loses the permission to write. The result of a skipped change is `None`.
pub(crate) async fn write_all<'c>(
    client: &Client,
    claim: &LeaseGuard,
    changes: &'c [TaintChange],
) -> Vec<(&'c TaintChange, Option<TaintWriteResult>)> {
    let write = |change| async move {
        let may_write = claim.is_current();
        (change, if may_write { Some(write_change(client, change).await) } else { None })
    };
    let writes: Vec<_> = changes.iter().map(write).collect();
    futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await
}

/// Writes one change, and logs the result.
async fn write_change(client: &Client, change: &TaintChange) -> TaintWriteResult {
    let TaintChange { node, why, .. } = change;
    match tokio::time::timeout(WRITE_TIMEOUT, patch_node(client, change)).await {
        Ok(Ok(())) => {
            tracing::info!(node, why, tainted = why.is_some(), "updated the node's taint");
            TaintWriteResult::Done
        }
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409 | 422) => {
            tracing::debug!(node, message = status.message, "postponed the taint update: the node changed");
            TaintWriteResult::NodeChanged
        }
        Ok(Err(error)) => {
            tracing::warn!(node, why, error = &error as &dyn std::error::Error, "failed to update the node's taint");
            TaintWriteResult::Failed
        }
        Err(_) => {
            tracing::warn!(node, why, "failed to update the node's taint: the API server did not answer");
            TaintWriteResult::Failed
        }
    }
}

/// Sends the patch of one change.
async fn patch_node(client: &Client, change: &TaintChange) -> Result<(), kube::Error> {
    let request = Request::patch(format!("/api/v1/nodes/{}?fieldManager=cleave-operator", change.node))
        .header(http::header::CONTENT_TYPE, "application/json-patch+json")
        .body(change.patch.to_string().into_bytes())
        .map_err(kube::Error::HttpError)?;
    client.request_text(request).await.map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cleave_api::gpunode::{GpuNodeStatus, GpuStatus, Health};
    use cleave_api::{GpuNode, GpuNodeSpec};
    use kube::client::Body;
    use kube::core::DeserializeGuard;

    use super::*;
    use crate::read::Agent;

    fn patch_that_adds_to(node: &Node) -> Value {
        super::add_patch(&UNHEALTHY_KEY_AND_EFFECT, &node.taints, &node.version)
    }

    fn patch_that_removes(index: usize) -> Value {
        super::remove_patch(&UNHEALTHY_KEY_AND_EFFECT, index)
    }

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Returns a node whose GPUs have these health classes.
    fn node(classes: &[&str]) -> Node {
        let gpu = |class: &&str| GpuStatus {
            health: Health { healthy: class.is_empty(), class: (*class).to_owned(), ..Health::default() },
            ..GpuStatus::default()
        };
        let status = GpuNodeStatus {
            agent_version: "1".into(),
            gpus: classes.iter().map(gpu).collect(),
            ..GpuNodeStatus::default()
        };
        let object = GpuNode { status: Some(status), ..GpuNode::new("n", GpuNodeSpec::default()) };
        Node {
            version: "7".into(),
            agent: Some(Agent { ready: true }),
            gpu_node: Some(Arc::new(DeserializeGuard(Ok(object)))),
            ..Node::default()
        }
    }

    fn taint(key: &str, effect: &str) -> Taint {
        Taint { key: key.into(), value: String::new(), effect: effect.into() }
    }

    fn update(taints: &mut Taints, node: Node, now: u64) -> (Option<bool>, Option<u64>) {
        let observed = Observed { nodes: BTreeMap::from([("n".to_owned(), node)]), ..Observed::default() };
        let (changes, next) = taints.update(&observed, seconds(now));
        assert!(changes.len() <= 1 && changes.iter().all(|change| change.node == "n"));
        (changes.first().map(|change| change.why.is_some()), next.map(|next| next.as_secs()))
    }

    #[test]
    fn a_node_is_tainted_while_all_of_its_gpus_are_lost_or_need_a_reset() {
        let ours = || vec![taint("other", UNHEALTHY_EFFECT), taint(UNHEALTHY_TAINT, UNHEALTHY_EFFECT)];
        for (classes, out) in [
            (&["Lost", "NeedsReset"][..], true),
            (&["Lost"], true),
            (&["Lost", ""], false),
            (&["Lost", "Suspect"], false),
            (&["", ""], false),
            (&[], false),
        ] {
            let mut taints = Taints::default();
            assert_eq!(update(&mut taints, node(classes), 9), (out.then_some(true), None), "{classes:?}");
            let tainted = Node { taints: ours(), ..node(classes) };
            assert_eq!(update(&mut taints, tainted, 9), ((!out).then_some(false), None), "{classes:?}");
        }
        // An MPS daemon that does not serve does not make the GPU lost.
        let mut unavailable = node(&[""]);
        if let Some(Ok(object)) = unavailable.gpu_node.as_mut().and_then(Arc::get_mut).map(|guard| &mut guard.0)
            && let Some(status) = &mut object.status
        {
            status.gpus[0].health.healthy = false;
        }
        assert_eq!(update(&mut Taints::default(), unavailable, 9), (None, None));
        assert_eq!(update(&mut Taints::default(), Node::default(), 9), (None, None), "a node without GPUs");
    }

    #[test]
    fn a_node_is_tainted_after_its_agent_has_been_not_ready_for_a_minute() {
        let mut taints = Taints::default();
        let away = || Node { agent: Some(Agent { ready: false }), ..node(&[""]) };
        let none = || Node { agent: None, ..node(&[""]) };
        assert_eq!(update(&mut taints, away(), 10), (None, Some(60)));
        assert_eq!(update(&mut taints, none(), 40), (None, Some(30)), "being replaced");
        assert_eq!(update(&mut taints, node(&[""]), 50), (None, None));
        assert_eq!(update(&mut taints, away(), 60), (None, Some(60)), "the time restarts");
        assert_eq!(update(&mut taints, away(), 120), (Some(true), None));
        let tainted = |node: Node| Node { taints: vec![taint(UNHEALTHY_TAINT, UNHEALTHY_EFFECT)], ..node };
        assert_eq!(update(&mut taints, tainted(away()), 121), (None, None));
        assert_eq!(update(&mut taints, tainted(node(&[""])), 122), (Some(false), None));
        assert_eq!(update(&mut taints, tainted(away()), 123), (None, Some(60)), "the taint stays meanwhile");
    }

    #[test]
    fn a_refused_taint_does_not_delay_other_nodes() {
        let mut taints = Taints::default();
        let lost = || BTreeMap::from(["n", "m"].map(|name| (name.to_owned(), node(&["Lost"]))));
        let mut observed = Observed { nodes: lost(), ..Observed::default() };
        let changed = |taints: &mut Taints, observed: &Observed, now: u64| {
            let (changes, next) = taints.update(observed, seconds(now));
            (changes.into_iter().map(|change| change.node).collect::<Vec<_>>(), next.map(|next| next.as_secs()))
        };
        let mut now = 9;
        for delay in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(changed(&mut taints, &observed, now), (vec!["m".to_owned(), "n".to_owned()], None));
            assert_eq!(taints.record_write("m", true, seconds(now)), None);
            assert_eq!(taints.record_write("n", false, seconds(now)), Some(seconds(delay)));
            assert_eq!(changed(&mut taints, &observed, now), (vec!["m".to_owned()], Some(delay)));
            now += delay;
        }
        taints.record_write("n", false, seconds(now));
        observed.nodes.insert("n".to_owned(), node(&[""]));
        assert_eq!(changed(&mut taints, &observed, now), (vec!["m".to_owned()], None), "n needs no taint");
        observed.nodes = lost();
        assert_eq!(changed(&mut taints, &observed, now).0, ["m", "n"], "the delays begin again");
    }

    #[test]
    fn a_patch_does_not_change_other_taints() {
        let patched = |node: &Node, patch: &Value, before: Value| {
            let mut object = json!({"metadata": {"resourceVersion": node.version}, "spec": before});
            let patch: json_patch::Patch = serde_json::from_value(patch.clone()).unwrap();
            json_patch::patch(&mut object, &patch).map(|()| object["spec"]["taints"].clone())
        };
        let ours = json!({"key": "cleave.dev/unhealthy", "effect": "NoSchedule"});
        let other = json!({"key": "other", "effect": "NoExecute", "timeAdded": "2027-01-15T08:00:00Z"});
        let bare = node(&["Lost"]);
        assert_eq!(patched(&bare, &patch_that_adds_to(&bare), json!({})).unwrap(), json!([ours]));
        let tainted = Node { taints: vec![taint("other", "NoExecute")], ..node(&["Lost"]) };
        assert_eq!(
            patched(&tainted, &patch_that_adds_to(&tainted), json!({"taints": [other]})).unwrap(),
            json!([other, ours])
        );
        assert_eq!(
            patched(&tainted, &patch_that_removes(1), json!({"taints": [other, ours]})).unwrap(),
            json!([other])
        );
        // Another writer changed the node first.
        let another = json!({"key": "another", "effect": "NoSchedule"});
        assert!(patched(&tainted, &patch_that_removes(1), json!({"taints": [ours, another]})).is_err());
        assert!(patched(&tainted, &patch_that_removes(1), json!({"taints": [other]})).is_err());
        let newer = Node { version: "8".into(), ..node(&["Lost"]) };
        assert!(patched(&newer, &patch_that_adds_to(&bare), json!({"taints": [other]})).is_err());
    }

    #[tokio::test]
    async fn a_change_is_a_json_patch_of_the_node() {
        let (service, mut server) = tower_test::mock::pair::<Request<Body>, http::Response<Body>>();
        let client = Client::new(service, "default");
        let change = TaintChange { node: "n".into(), why: None, patch: patch_that_removes(0) };
        let answer = async {
            let (request, reply) = server.next_request().await.unwrap();
            reply.send_response(http::Response::new(Body::from(b"{}".to_vec())));
            let kind = request.headers().get(http::header::CONTENT_TYPE).unwrap().to_str().unwrap().to_owned();
            (format!("{} {}", request.method(), request.uri()), kind)
        };
        let (written, (line, kind)) = tokio::join!(write_change(&client, &change), answer);
        assert_eq!(written, TaintWriteResult::Done);
        assert_eq!(line, "PATCH /api/v1/nodes/n?fieldManager=cleave-operator");
        assert_eq!(kind, "application/json-patch+json");
    }
}
