//! Decides which findings of agents become conditions of pods, and which pods are evicted. Pure:
//! the time is given.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::GpuNode;
use cleave_api::gpunode::FindingStatus;
use cleave_api::names::{CONDITION_WITHIN_SHARE, WITHIN_SHARE};
use cleave_api::sharingpolicy::Enforcement;
use kube::Resource;
use kube::core::DeserializeGuard;

use crate::pods::{PodCondition, PodObject, full_name};

/// After how long an eviction that a disruption budget did not let, or that came to nothing, is
/// tried again.
pub(crate) const AGAIN: Duration = Duration::from_secs(5);
/// How long what was written is believed before the watch tells it.
const BELIEVED: Duration = Duration::from_secs(10);
/// Longest message of a condition.
const LONGEST: usize = 1000;

/// A condition that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Told {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// What it says.
    pub condition: PodCondition,
    /// Its status is another than before, and not its reason or message alone.
    pub turned: bool,
}

/// A pod that is to leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expulsion {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Its node.
    pub node: String,
    /// Why, in words.
    pub message: String,
}

/// What is to be done now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Conditions to write.
    pub tell: Vec<Told>,
    /// Pods to evict.
    pub expel: Vec<Expulsion>,
    /// When to look again though nothing changes, from now.
    pub next: Option<Duration>,
}

/// What was done, for as long as the watches do not tell it.
#[derive(Debug, Default)]
pub(crate) struct Judge {
    /// Conditions by pod UID, and when they were written.
    written: BTreeMap<String, (PodCondition, Duration)>,
    /// When pods were last told to leave, by UID.
    expelled: BTreeMap<String, Duration>,
}

impl Judge {
    /// Forgets everything: another process leads, or has led.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }

    /// A condition was written.
    pub(crate) fn wrote(&mut self, told: &Told, now: Duration) {
        self.written.insert(told.uid.clone(), (told.condition.clone(), now));
    }

    /// Looks at what agents found, and at the pods.
    pub(crate) fn look(
        &mut self,
        nodes: &[Arc<DeserializeGuard<GpuNode>>],
        pods: &[Arc<PodObject>],
        now: Duration,
    ) -> Turn {
        let found = found(nodes);
        let mut turn = Turn::default();
        let mut there = BTreeSet::new();
        for pod in pods {
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            let findings = pod.node().and_then(|node| found.get(&(node, uid))).map_or(&[][..], Vec::as_slice);
            let has = pod.status.conditions.iter().find(|condition| condition.type_ == CONDITION_WITHIN_SHARE);
            // Most pods: nothing was ever found of them.
            if findings.is_empty() && has.is_none() && !self.written.contains_key(uid) {
                continue;
            }
            if uid.is_empty() || matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
                continue;
            }
            there.insert(uid.to_owned());
            let condition = condition(findings);
            let written = self.written.get(uid).filter(|(_, at)| now.saturating_sub(*at) < BELIEVED);
            let known = written.map_or(has, |(condition, _)| Some(condition));
            if known.map_or(!findings.is_empty(), |known| *known != condition) {
                let turned = known.is_none_or(|known| known.status != condition.status);
                turn.tell.push(Told { pod: full_name(&pod.metadata), uid: uid.to_owned(), condition, turned });
            }
            let (Some(node), Some(why)) = (pod.node(), findings.iter().find(|(_, evict)| *evict)) else { continue };
            if pod.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let wait =
                self.expelled.get(uid).map_or(Duration::ZERO, |at| AGAIN.saturating_sub(now.saturating_sub(*at)));
            let next = if wait.is_zero() {
                self.expelled.insert(uid.to_owned(), now);
                let (pod, message) = (full_name(&pod.metadata), why.0.message.clone());
                turn.expel.push(Expulsion { pod, uid: uid.to_owned(), node: node.to_owned(), message });
                AGAIN
            } else {
                wait
            };
            turn.next = Some(turn.next.map_or(next, |other| other.min(next)));
        }
        self.written.retain(|uid, _| there.contains(uid));
        self.expelled.retain(|uid, _| there.contains(uid));
        turn
    }
}

/// A finding, and whether the policy of its GPU evicts who does that.
type Found<'a> = (&'a FindingStatus, bool);

/// What was found, by node and UID of the pod.
fn found(nodes: &[Arc<DeserializeGuard<GpuNode>>]) -> BTreeMap<(&str, &str), Vec<Found<'_>>> {
    let mut found: BTreeMap<(&str, &str), Vec<Found<'_>>> = BTreeMap::new();
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

/// What a pod's condition says; of no findings that it keeps to its shares.
fn condition(findings: &[Found<'_>]) -> PodCondition {
    let within = findings.is_empty();
    let messages: Vec<&str> = findings.iter().map(|(finding, _)| finding.message.as_str()).collect();
    PodCondition {
        type_: CONDITION_WITHIN_SHARE.to_owned(),
        status: if within { "True" } else { "False" }.to_owned(),
        reason: findings.first().map_or(WITHIN_SHARE, |(finding, _)| finding.kind.as_str()).to_owned(),
        message: messages.join("; ").chars().take(LONGEST).collect(),
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
            // Not believed: the pod is known by its UID.
            "namespace": "kube-system", "pod": "somebody-else"})
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

    fn told(turn: &Turn) -> Vec<(&str, &str, &str)> {
        turn.tell
            .iter()
            .map(|told| (told.pod.as_str(), told.condition.status.as_str(), told.condition.reason.as_str()))
            .collect()
    }

    #[test]
    fn a_pod_is_told_what_was_found_of_it_and_when_it_is_over() {
        let mut judge = Judge::default();
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let pods = [pod("a", "n1", &ready), pod("b", "n1", &ready)];
        let found = [node("n1", "Report", &json!([finding("a", "MemoryExceeded"), finding("a", "OutsideMps")]))];
        let turn = judge.look(&found, &pods, at(0));
        assert_eq!(told(&turn), [("team/a", "False", "MemoryExceeded")]);
        assert_eq!(turn.tell[0].condition.message, "MemoryExceeded: why; OutsideMps: why");
        assert!(turn.tell[0].turned && turn.expel.is_empty(), "it is only told");
        judge.wrote(&turn.tell[0], at(0));
        assert_eq!(judge.look(&found, &pods, at(1)), Turn::default(), "the watch is behind");
        let condition = json!([{"type": "cleave.dev/WithinShare", "status": "False", "reason": "MemoryExceeded",
            "message": "MemoryExceeded: why; OutsideMps: why"}]);
        let pods = [pod("a", "n1", &condition)];
        assert_eq!(judge.look(&found, &pods, at(60)), Turn::default(), "it is told");
        let less = [node("n1", "Report", &json!([finding("a", "OutsideMps")]))];
        let turn = judge.look(&less, &pods, at(61));
        assert_eq!((told(&turn), turn.tell[0].turned), (vec![("team/a", "False", "OutsideMps")], false));
        // Another process leads since: what was written is on the pod.
        let over = Judge::default().look(&[node("n1", "Report", &json!([]))], &pods, at(70));
        assert_eq!((told(&over), over.tell[0].turned), (vec![("team/a", "True", "WithinShare")], true));
    }

    #[test]
    fn an_agent_speaks_for_the_pods_of_its_own_node_alone_and_by_their_uid() {
        let pods = [pod("a", "n1", &json!([])), pod("b", "n2", &json!([])), pod("somebody-else", "n1", &json!([]))];
        let lies =
            [node("n1", "Evict", &json!([finding("b", "NoShare"), finding("", "NoShare"), finding("x", "NoShare")]))];
        assert_eq!(Judge::default().look(&lies, &pods, at(0)), Turn::default());
        let unbound = [pod("b", "", &json!([]))];
        assert_eq!(
            Judge::default().look(&[node("", "Evict", &json!([finding("b", "NoShare")]))], &unbound, at(0)),
            Turn::default()
        );
    }

    #[test]
    fn a_pod_is_evicted_where_the_policy_says_so_and_again_until_it_leaves() {
        let mut judge = Judge::default();
        let found = [node("n1", "Evict", &json!([finding("a", "MemoryExceeded")]))];
        let pods = [pod("a", "n1", &json!([]))];
        let turn = judge.look(&found, &pods, at(0));
        assert_eq!((told(&turn).len(), turn.expel.len(), turn.next), (1, 1, Some(AGAIN)));
        assert_eq!(
            (turn.expel[0].pod.as_str(), turn.expel[0].uid.as_str(), turn.expel[0].node.as_str()),
            ("team/a", "a", "n1")
        );
        let soon = judge.look(&found, &pods, at(1));
        assert_eq!((soon.expel.len(), soon.next), (0, AGAIN.checked_sub(at(1))), "not in a storm");
        assert_eq!(judge.look(&found, &pods, AGAIN).expel.len(), 1, "a disruption budget may have let none");
        let mut leaving = (*pods[0]).clone();
        leaving.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
        assert!(judge.look(&found, &[Arc::new(leaving)], at(60)).expel.is_empty(), "it leaves");
        let other = [node(
            "n1",
            "Evict",
            &json!([{"kind": "MemoryExceeded", "gpu": "GPU-b", "device": "GPU-b", "uid": "a", "message": ""}]),
        )];
        assert!(judge.look(&other, &pods, at(90)).expel.is_empty(), "the policy of another GPU");
    }

    #[test]
    fn a_malformed_node_or_an_ended_pod_is_nobodys_matter() {
        let malformed: DeserializeGuard<GpuNode> =
            serde_json::from_value(json!({"metadata": {"name": "n1"}, "spec": {"gpus": 7}})).unwrap();
        let pods = [pod("a", "n1", &json!([]))];
        assert_eq!(Judge::default().look(&[Arc::new(malformed)], &pods, at(0)), Turn::default());
        let mut ended = (*pods[0]).clone();
        ended.status.phase = "Failed".into();
        let found = [node("n1", "Evict", &json!([finding("a", "MemoryExceeded")]))];
        assert_eq!(Judge::default().look(&found, &[Arc::new(ended)], at(0)), Turn::default());
    }
}
