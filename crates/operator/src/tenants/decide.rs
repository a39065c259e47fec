//! Decides which findings of agents become conditions of pods, and which pods are evicted. Pure:
//! callers pass in the time.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::GpuNode;
use cleave_api::gpunode::FindingStatus;
use cleave_api::names::{CONDITION_WITHIN_SHARE, WITHIN_SHARE_REASON};
use cleave_api::sharingpolicy::Enforcement;
use kube::Resource;
use kube::core::DeserializeGuard;

use crate::pods::{PodCondition, PodObject, full_name};

/// Delay before the operator evicts a pod again that still has a finding, and before it retries a
/// failed write of a condition.
pub(crate) const EVICTION_RETRY_DELAY: Duration = Duration::from_secs(5);
/// How long the operator assumes that a written condition exists before the watch delivers it.
const WATCH_LAG: Duration = Duration::from_secs(10);
/// Maximum length of a condition's message, in characters.
const MAX_MESSAGE_CHARS: usize = 1000;

/// A condition to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConditionUpdate {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// The new condition.
    pub condition: PodCondition,
    /// Whether the condition's status changes, and not only its reason or message.
    pub status_changed: bool,
}

/// A pod to evict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Eviction {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Name of the pod's node.
    pub node: String,
    /// Message of the finding.
    pub message: String,
}

/// The actions to take now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Actions {
    /// Conditions to write.
    pub conditions: Vec<ConditionUpdate>,
    /// Pods to evict.
    pub evictions: Vec<Eviction>,
    /// Time until the next decision, even if nothing changes.
    pub next: Option<Duration>,
}

/// Remembers the last written condition and the last eviction of each pod. For [`WATCH_LAG`] after
/// a write, a written condition takes precedence over the watched pod. An eviction is retried after
/// [`EVICTION_RETRY_DELAY`].
#[derive(Debug, Default)]
pub(crate) struct FindingTracker {
    /// Written conditions and when they were written, by pod UID.
    written: BTreeMap<String, (PodCondition, Duration)>,
    /// When each pod was last evicted, by UID.
    evicted: BTreeMap<String, Duration>,
    /// Whether the last decision found a pod to report, or a pod with the condition `WithinShare`.
    busy: bool,
}

impl FindingTracker {
    /// Drops all state. Call this while this process does not lead.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Returns whether the last decision found no pod to report, and no pod with the condition
    /// `WithinShare`.
    pub(crate) fn is_idle(&self) -> bool {
        !self.busy
    }

    /// Records that a condition was written.
    pub(crate) fn record_write(&mut self, update: &ConditionUpdate, now: Duration) {
        self.written.insert(update.uid.clone(), (update.condition.clone(), now));
    }

    /// Decides the actions from the findings of all agents and from all pods.
    pub(crate) fn decide(
        &mut self,
        nodes: &[Arc<DeserializeGuard<GpuNode>>],
        pods: &[Arc<PodObject>],
        now: Duration,
    ) -> Actions {
        let found = findings_by_pod(nodes);
        self.busy = !found.is_empty() || !self.written.is_empty();
        let mut actions = Actions::default();
        let mut present = BTreeSet::new();
        for pod in pods {
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            let findings = pod.node().and_then(|node| found.get(&(node, uid))).map_or(&[][..], Vec::as_slice);
            let has = pod.status.conditions.iter().find(|condition| condition.type_ == CONDITION_WITHIN_SHARE);
            // This check skips most pods, because no agent ever reported them.
            if findings.is_empty() && has.is_none() && !self.written.contains_key(uid) {
                continue;
            }
            self.busy = true;
            if uid.is_empty() || pod.has_ended() {
                continue;
            }
            present.insert(uid.to_owned());
            let condition = findings_condition(findings);
            let written = self.written.get(uid).filter(|(_, at)| now.saturating_sub(*at) < WATCH_LAG);
            let known = written.map_or(has, |(condition, _)| Some(condition));
            if known.map_or(!findings.is_empty(), |known| *known != condition) {
                let status_changed = known.is_none_or(|known| known.status != condition.status);
                actions.conditions.push(ConditionUpdate {
                    pod: full_name(&pod.metadata),
                    uid: uid.to_owned(),
                    condition,
                    status_changed,
                });
            }
            let (Some(node), Some(why)) = (pod.node(), findings.iter().find(|(_, evict)| *evict)) else { continue };
            if pod.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let wait = self
                .evicted
                .get(uid)
                .map_or(Duration::ZERO, |at| EVICTION_RETRY_DELAY.saturating_sub(now.saturating_sub(*at)));
            let next = if wait.is_zero() {
                self.evicted.insert(uid.to_owned(), now);
                let (pod, message) = (full_name(&pod.metadata), why.0.message.clone());
                actions.evictions.push(Eviction { pod, uid: uid.to_owned(), node: node.to_owned(), message });
                EVICTION_RETRY_DELAY
            } else {
                wait
            };
            actions.next = Some(actions.next.map_or(next, |other| other.min(next)));
        }
        self.written.retain(|uid, _| present.contains(uid));
        self.evicted.retain(|uid, _| present.contains(uid));
        actions
    }
}

/// A finding, and whether the policy of the finding's GPU evicts the pod.
type PolicyFinding<'a> = (&'a FindingStatus, bool);

/// Returns the findings, by node and pod UID.
fn findings_by_pod(nodes: &[Arc<DeserializeGuard<GpuNode>>]) -> BTreeMap<(&str, &str), Vec<PolicyFinding<'_>>> {
    let mut found: BTreeMap<(&str, &str), Vec<PolicyFinding<'_>>> = BTreeMap::new();
    for node in nodes {
        let name = Resource::meta(&**node).name.as_deref().unwrap_or_default();
        let Ok(object) = &node.0 else { continue };
        for finding in object.status.iter().flat_map(|status| &status.findings) {
            let of_gpu = object.spec.gpus.iter().find(|gpu| gpu.uuid == finding.gpu);
            let evicts = of_gpu.is_some_and(|gpu| gpu.enforcement == Enforcement::Evict);
            found.entry((name, finding.uid.as_str())).or_default().push((finding, evicts));
        }
    }
    found
}

/// Returns the condition for these findings. Without findings, the condition is `WithinShare`.
fn findings_condition(findings: &[PolicyFinding<'_>]) -> PodCondition {
    let within = findings.is_empty();
    let messages: Vec<&str> = findings.iter().map(|(finding, _)| finding.message.as_str()).collect();
    PodCondition {
        type_: CONDITION_WITHIN_SHARE.to_owned(),
        status: if within { "True" } else { "False" }.to_owned(),
        reason: findings.first().map_or(WITHIN_SHARE_REASON, |(finding, _)| finding.kind.as_str()).to_owned(),
        message: messages.join("; ").chars().take(MAX_MESSAGE_CHARS).collect(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(name: &str, enforcement: &str, findings: &Value) -> Arc<DeserializeGuard<GpuNode>> {
        let object = json!({
            "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name},
            "spec": {"planId": "p", "gpus": [{"uuid": "GPU-a", "enforcement": enforcement, "partition": {"whole": {"resource": "nvidia.com/gpu"}}}]},
            "status": {"findings": findings},
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn finding(uid: &str, kind: &str) -> Value {
        json!({"kind": kind, "gpu": "GPU-a", "device": "GPU-a", "uid": uid, "message": format!("{kind}: why"),
            // The operator ignores the name and the namespace, because the UID identifies the pod.
            "namespace": "kube-system", "pod": "other"})
    }

    fn pod(uid: &str, node: &str, conditions: &Value) -> Arc<PodObject> {
        let object = json!({
            "metadata": {"name": uid, "namespace": "team", "uid": uid}, "spec": {"nodeName": node, "containers": []},
            "status": {"phase": "Running", "conditions": conditions},
        });
        let mut pod: PodObject = serde_json::from_value(object).unwrap();
        pod.trim();
        Arc::new(pod)
    }

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    fn updates(actions: &Actions) -> Vec<(&str, &str, &str)> {
        actions
            .conditions
            .iter()
            .map(|update| (update.pod.as_str(), update.condition.status.as_str(), update.condition.reason.as_str()))
            .collect()
    }

    #[test]
    fn a_condition_reports_findings_and_their_end() {
        let mut tracker = FindingTracker::default();
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let pods = [pod("a", "n1", &ready), pod("b", "n1", &ready)];
        let found = [node("n1", "Report", &json!([finding("a", "MemoryExceeded"), finding("a", "OutsideMps")]))];
        let actions = tracker.decide(&found, &pods, at(0));
        assert_eq!(updates(&actions), [("team/a", "False", "MemoryExceeded")]);
        assert_eq!(actions.conditions[0].condition.message, "MemoryExceeded: why; OutsideMps: why");
        assert!(actions.conditions[0].status_changed && actions.evictions.is_empty(), "it is only reported");
        tracker.record_write(&actions.conditions[0], at(0));
        assert_eq!(tracker.decide(&found, &pods, at(1)), Actions::default(), "the watch lags");
        let condition = json!([{"type": "cleave.dev/WithinShare", "status": "False", "reason": "MemoryExceeded",
            "message": "MemoryExceeded: why; OutsideMps: why"}]);
        let pods = [pod("a", "n1", &condition)];
        assert_eq!(tracker.decide(&found, &pods, at(60)), Actions::default(), "it is already reported");
        let less = [node("n1", "Report", &json!([finding("a", "OutsideMps")]))];
        let actions = tracker.decide(&less, &pods, at(61));
        assert_eq!(
            (updates(&actions), actions.conditions[0].status_changed),
            (vec![("team/a", "False", "OutsideMps")], false)
        );
        // A new leader reads the previous leader's condition from the pod.
        let over = FindingTracker::default().decide(&[node("n1", "Report", &json!([]))], &pods, at(70));
        assert_eq!(
            (updates(&over), over.conditions[0].status_changed),
            (vec![("team/a", "True", "WithinShare")], true)
        );
    }

    #[test]
    fn an_agent_can_report_only_pods_of_its_own_node_by_uid() {
        let pods = [pod("a", "n1", &json!([])), pod("b", "n2", &json!([])), pod("other", "n1", &json!([]))];
        let findings =
            [node("n1", "Evict", &json!([finding("b", "NoShare"), finding("", "NoShare"), finding("x", "NoShare")]))];
        assert_eq!(FindingTracker::default().decide(&findings, &pods, at(0)), Actions::default());
        let unbound = [pod("b", "", &json!([]))];
        assert_eq!(
            FindingTracker::default().decide(&[node("", "Evict", &json!([finding("b", "NoShare")]))], &unbound, at(0)),
            Actions::default()
        );
    }

    #[test]
    fn evictions_by_policy_are_retried_until_the_pod_terminates() {
        let mut tracker = FindingTracker::default();
        let found = [node("n1", "Evict", &json!([finding("a", "MemoryExceeded")]))];
        let pods = [pod("a", "n1", &json!([]))];
        let actions = tracker.decide(&found, &pods, at(0));
        assert_eq!(
            (updates(&actions).len(), actions.evictions.len(), actions.next),
            (1, 1, Some(EVICTION_RETRY_DELAY))
        );
        assert_eq!(
            (actions.evictions[0].pod.as_str(), actions.evictions[0].uid.as_str(), actions.evictions[0].node.as_str()),
            ("team/a", "a", "n1")
        );
        let soon = tracker.decide(&found, &pods, at(1));
        assert_eq!((soon.evictions.len(), soon.next), (0, EVICTION_RETRY_DELAY.checked_sub(at(1))), "no retry yet");
        assert_eq!(
            tracker.decide(&found, &pods, EVICTION_RETRY_DELAY).evictions.len(),
            1,
            "a disruption budget may have refused the eviction"
        );
        let mut terminating = (*pods[0]).clone();
        terminating.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
        assert!(
            tracker.decide(&found, &[Arc::new(terminating)], at(60)).evictions.is_empty(),
            "the pod is terminating"
        );
        let other = [node(
            "n1",
            "Evict",
            &json!([{"kind": "MemoryExceeded", "gpu": "GPU-b", "device": "GPU-b", "uid": "a", "message": ""}]),
        )];
        assert!(tracker.decide(&other, &pods, at(90)).evictions.is_empty(), "another GPU has no policy that evicts");
    }

    #[test]
    fn malformed_nodes_and_ended_pods_are_ignored() {
        let malformed: DeserializeGuard<GpuNode> =
            serde_json::from_value(json!({"metadata": {"name": "n1"}, "spec": {"gpus": 7}})).unwrap();
        let pods = [pod("a", "n1", &json!([]))];
        assert_eq!(FindingTracker::default().decide(&[Arc::new(malformed)], &pods, at(0)), Actions::default());
        let mut ended = (*pods[0]).clone();
        ended.status.phase = "Failed".into();
        let found = [node("n1", "Evict", &json!([finding("a", "MemoryExceeded")]))];
        assert_eq!(FindingTracker::default().decide(&found, &[Arc::new(ended)], at(0)), Actions::default());
    }
}
