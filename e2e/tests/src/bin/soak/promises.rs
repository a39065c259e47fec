//! Tracks the pods of the soak, and checks Cleave's promises at each observation, also immediately
//! after disruptions.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;
use cleave_e2e::{Scope, allocation_errors, live_pods, text};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::chaos::Disruption;
use crate::common::{Counts, DYNAMIC_NODE, SHARES_NODE, SHARES_PER_GPU, SHARES_RESOURCE, format_counts};

/// The pods and the `GpuNode`s at one point in time.
pub(crate) struct Observation {
    pods: Vec<Value>,
    nodes: BTreeMap<&'static str, Value>,
}

impl Observation {
    /// Reads the pods and the `GpuNode`s from the API server.
    pub(crate) fn read(scope: &Scope) -> Result<Self> {
        let pods = scope.pods()?;
        let nodes = [SHARES_NODE, DYNAMIC_NODE]
            .into_iter()
            .map(|node| Ok((node, scope.cluster.gpu_node(node)?)))
            .collect::<Result<_>>()?;
        Ok(Self { pods, nodes })
    }

    /// Returns whether a pod is in transit to a node: either the pod has been released but not
    /// bound, or the pod is bound but the kubelet has not started the pod.
    pub(crate) fn has_pod_in_transit(&self) -> bool {
        self.pods.iter().any(|pod| {
            let gated = pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty());
            let bound = pod["spec"]["nodeName"].is_string();
            text(&pod["status"]["phase"]) == "Pending" && (bound || !gated && requests_shares(pod))
        })
    }
}

/// Returns whether a pod requests shares of [`SHARES_NODE`]. Other pods are not in transit until
/// they are bound.
fn requests_shares(pod: &Value) -> bool {
    let limits = pod["spec"]["containers"][0]["resources"]["limits"].as_object();
    limits.is_some_and(|limits| limits.keys().any(|name| name == SHARES_RESOURCE))
}

/// Time after a disruption during which slices may remain unhealthy. The agent polls the GPUs every
/// 10 s.
const AFTERMATH_DURATION: Duration = Duration::from_secs(40);

/// The period from the start of a disruption until the component has recovered.
type Period = std::ops::Range<Timestamp>;

/// Returns whether the time of a kubelet's rejection is during a disruption or during its
/// aftermath. The kubelet reports whole seconds, so `failed` may be up to a second before the
/// disruption.
fn is_aftermath(disruptions: &[Period], failed: Timestamp) -> bool {
    disruptions.iter().any(|period| {
        failed.duration_since(period.start) > SignedDuration::from_secs(-1)
            && failed.duration_since(period.end) < SignedDuration::try_from(AFTERMATH_DURATION).unwrap_or_default()
    })
}

/// A pod of the soak.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about one pod")]
struct TrackedPod {
    node: &'static str,
    /// Whether the pod requests shares or slices. The soak accepts that the kubelet rejects a pod
    /// that requests a whole GPU.
    requests_slices: bool,
    /// Whether the pod runs a CUDA client.
    client: bool,
    /// Whether the tracker has counted the end of the pod, or expects the end because the soak
    /// deletes the pod.
    done: bool,
    /// Whether an MPS process of the pod's node was killed while the pod existed.
    mps_killed: bool,
    /// Id of the pod's container, once the container has run.
    container: Option<String>,
}

/// Everything observed since the start of the soak.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    /// Number of pods created.
    pub(crate) created: u64,
    pods: BTreeMap<String, TrackedPod>,
    outcomes: Counts,
    /// Periods of disruption, by node.
    disruptions: BTreeMap<&'static str, Vec<Period>>,
    /// Descriptions of broken promises.
    pub(crate) violations: BTreeSet<String>,
}

impl Tracker {
    /// Records that the soak created a pod.
    pub(crate) fn record_created_pod(&mut self, name: &str, node: &'static str, requests_slices: bool, client: bool) {
        self.created += 1;
        let pod = TrackedPod { node, requests_slices, client, done: false, mps_killed: false, container: None };
        self.pods.insert(name.to_owned(), pod);
    }

    /// Records that the soak deletes a pod, so that the tracker expects the end of the pod.
    pub(crate) fn record_deleted_pod(&mut self, name: &str) {
        if let Some(pod) = self.pods.get_mut(name) {
            pod.done = true;
        }
    }

    /// Records a disruption that lasted from `since` until now.
    pub(crate) fn record_disruption(&mut self, disruption: &Disruption, since: Timestamp) {
        self.disruptions.entry(disruption.node).or_default().push(since..Timestamp::now());
        if disruption.breaks_clients {
            let on_node = self.pods.values_mut().filter(|pod| pod.node == disruption.node);
            on_node.for_each(|pod| pod.mps_killed = true);
        }
    }

    /// Records the promises that an observation violates.
    pub(crate) fn observe(&mut self, observation: &Observation) {
        for pod in &observation.pods {
            self.check_pod(pod);
        }
        let pods = live_pods(&observation.pods);
        for (node, object) in &observation.nodes {
            let units = (*node == SHARES_NODE).then_some(SHARES_PER_GPU);
            let errors = allocation_errors(object, &pods, units);
            self.violations.extend(errors.into_iter().map(|error| format!("{node}: {error}")));
        }
    }

    /// Records a violation if a pod has lost its container, or has failed without an accepted
    /// cause.
    fn check_pod(&mut self, pod: &Value) {
        let name = text(&pod["metadata"]["name"]);
        let Some(tracked) = self.pods.get_mut(&name) else { return };
        let status = &pod["status"]["containerStatuses"][0];
        match text(&pod["status"]["phase"]).as_str() {
            "Running" => {
                let container = text(&status["containerID"]);
                match &tracked.container {
                    None if !container.is_empty() => {
                        tracked.container = Some(container);
                        *self.outcomes.entry("ran").or_default() += 1;
                    }
                    Some(before) if !container.is_empty() && *before != container => {
                        self.violations.insert(format!("{name} lost its container {before} and has {container}"));
                    }
                    _ => {}
                }
            }
            "Failed" if !tracked.done => {
                tracked.done = true;
                // Use the start time, not the time of the observation, because the time between
                // observations is long on a busy machine. The start time of a rejected pod is the
                // time of its rejection.
                let failed = text(&pod["status"]["startTime"]).parse().unwrap_or_else(|_| Timestamp::now());
                let is_recent = self.disruptions.get(tracked.node).is_some_and(|periods| is_aftermath(periods, failed));
                let rejected = text(&pod["status"]["reason"]) == "UnexpectedAdmissionError";
                let why = format!("{} {}", text(&pod["status"]["reason"]), text(&pod["status"]["message"]));
                if tracked.client && tracked.mps_killed {
                    *self.outcomes.entry("failed because their MPS was killed").or_default() += 1;
                } else if is_recent && rejected {
                    *self.outcomes.entry("rejected after a disruption").or_default() += 1;
                } else if !tracked.requests_slices && rejected {
                    *self.outcomes.entry("rejected, whole GPU").or_default() += 1;
                } else {
                    self.violations.insert(format!("{name} on {} failed: {why} {}", tracked.node, status["state"]));
                }
            }
            _ => {}
        }
    }

    /// Formats the numbers of created pods, of outcomes of each kind and of violations so far.
    pub(crate) fn summary(&self) -> String {
        format!("{} pods: {}; violations: {}", self.created, format_counts(&self.outcomes), self.violations.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejection_is_accepted_during_a_disruption_and_its_aftermath() {
        let at = |seconds: i64| Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        let disruptions = [at(100)..at(110), at(300)..at(300)];
        for (failed, expected) in
            [(98, false), (100, true), (105, true), (149, true), (150, false), (299, false), (300, true), (340, false)]
        {
            assert_eq!(is_aftermath(&disruptions, at(failed)), expected, "{failed}");
        }
        // The kubelet rounds times down to whole seconds.
        let within = at(100) + SignedDuration::from_millis(900);
        assert!(is_aftermath(&[within..within], at(100)));
        assert!(!is_aftermath(&[], at(100)));
    }
}
