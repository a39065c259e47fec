//! What must hold at every look, whatever was killed.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;
use cleave_e2e::{Scope, given_out_wrongly, staying, text};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::chaos::Victim;
use crate::{CUT, Count, SHARED, UNITS, listed};

/// The pods and what the nodes say of them, at one moment.
pub(crate) struct Look {
    pods: Vec<Value>,
    nodes: BTreeMap<&'static str, Value>,
}

impl Look {
    pub(crate) fn at(scope: &Scope) -> Result<Self> {
        let pods = scope.pods()?;
        let nodes =
            [SHARED, CUT].into_iter().map(|node| Ok((node, scope.cluster.gpunode(node)?))).collect::<Result<_>>()?;
        Ok(Self { pods, nodes })
    }

    /// Whether the scheduler or a kubelet has a pod in hand.
    pub(crate) fn is_anybody_on_the_way(&self) -> bool {
        self.pods.iter().any(|pod| {
            let gated = pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty());
            let bound = pod["spec"]["nodeName"].is_string();
            text(&pod["status"]["phase"]) == "Pending" && (bound || !gated && wants_shares(pod))
        })
    }
}

/// What the gate is for; others wait at the scheduler until something is cut for them.
fn wants_shares(pod: &Value) -> bool {
    let limits = pod["spec"]["containers"][0]["resources"]["limits"].as_object();
    limits.is_some_and(|limits| limits.keys().any(|name| name == crate::SHARES))
}

/// How long after a blow a node's slices may be unhealthy that were not when the pod was let
/// through: an NVML that fails is asked again after 10 s.
const AFTERMATH: Duration = Duration::from_secs(40);

/// From the moment at which something was struck to that at which it was back.
type Blow = std::ops::Range<Timestamp>;

/// Whether a pod that a kubelet refused at this time, in whole seconds, met one of these blows or
/// what it had left.
fn is_aftermath(blows: &[Blow], failed: Timestamp) -> bool {
    blows.iter().any(|blow| {
        failed.duration_since(blow.start) > SignedDuration::from_secs(-1)
            && failed.duration_since(blow.end) < SignedDuration::try_from(AFTERMATH).unwrap_or_default()
    })
}

/// A pod of the soak.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is another thing that happened to it, or not")]
struct Made {
    node: &'static str,
    /// It waits at the gate until its slices are there; pods for whole GPUs do not, and one may be
    /// cut while they are on their way.
    gated: bool,
    /// It is a client of MPS.
    client: bool,
    /// It was deleted: how it ends says nothing.
    unmade: bool,
    /// An MPS process of its node was killed in its life.
    struck: bool,
    /// Its container, once it ran.
    container: Option<String>,
}

/// What was seen, from the first look on.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) created: u64,
    pods: BTreeMap<String, Made>,
    fates: Count,
    /// When a node was struck.
    blows: BTreeMap<&'static str, Vec<Blow>>,
    /// Promises that were broken, in words.
    pub(crate) broken: BTreeSet<String>,
}

impl Seen {
    pub(crate) fn made(&mut self, name: &str, node: &'static str, gated: bool, client: bool) {
        self.created += 1;
        let made = Made { node, gated, client, unmade: false, struck: false, container: None };
        self.pods.insert(name.to_owned(), made);
    }

    pub(crate) fn unmade(&mut self, name: &str) {
        if let Some(made) = self.pods.get_mut(name) {
            made.unmade = true;
        }
    }

    pub(crate) fn struck(&mut self, victim: &Victim, since: Timestamp) {
        self.blows.entry(victim.node).or_default().push(since..Timestamp::now());
        if let Some(node) = victim.mps_of {
            self.pods.values_mut().filter(|made| made.node == node).for_each(|made| made.struck = true);
        }
    }

    pub(crate) fn look(&mut self, look: &Look) {
        for pod in &look.pods {
            self.pod(pod);
        }
        let staying = staying(&look.pods);
        for (node, object) in &look.nodes {
            let units = (*node == SHARED).then_some(UNITS);
            let broken = given_out_wrongly(object, &staying, units);
            self.broken.extend(broken.into_iter().map(|broken| format!("{node}: {broken}")));
        }
    }

    fn pod(&mut self, pod: &Value) {
        let name = text(&pod["metadata"]["name"]);
        let Some(made) = self.pods.get_mut(&name) else { return };
        let status = &pod["status"]["containerStatuses"][0];
        match text(&pod["status"]["phase"]).as_str() {
            "Running" => {
                let container = text(&status["containerID"]);
                match &made.container {
                    None if !container.is_empty() => {
                        made.container = Some(container);
                        *self.fates.entry("ran").or_default() += 1;
                    }
                    Some(before) if !container.is_empty() && *before != container => {
                        self.broken.insert(format!("{name} has another container: {before}, {container}"));
                    }
                    _ => {}
                }
            }
            "Failed" if !made.unmade => {
                made.unmade = true;
                // When it failed and not when that is seen: a machine that is busy looks seldom.
                let failed = text(&pod["status"]["startTime"]).parse().unwrap_or_else(|_| Timestamp::now());
                let is_recent = self.blows.get(made.node).is_some_and(|blows| is_aftermath(blows, failed));
                let refused = text(&pod["status"]["reason"]) == "UnexpectedAdmissionError";
                let why = format!("{} {}", text(&pod["status"]["reason"]), text(&pod["status"]["message"]));
                if made.client && made.struck {
                    *self.fates.entry("lost their MPS").or_default() += 1;
                } else if is_recent && refused {
                    *self.fates.entry("refused by a node just struck").or_default() += 1;
                } else if !made.gated && refused {
                    *self.fates.entry("not gated and refused").or_default() += 1;
                } else {
                    self.broken.insert(format!("{name} on {} failed: {why} {}", made.node, status["state"]));
                }
            }
            _ => {}
        }
    }

    pub(crate) fn summary(&self) -> String {
        format!("{} pods: {}; broken: {}", self.created, listed(&self.fates), self.broken.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_met_a_blow_or_what_it_left_is_judged_by_when_the_pod_failed() {
        let at = |seconds: i64| Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        let blows = [at(100)..at(110), at(300)..at(300)];
        for (failed, expected) in
            [(98, false), (100, true), (105, true), (149, true), (150, false), (299, false), (300, true), (340, false)]
        {
            assert_eq!(is_aftermath(&blows, at(failed)), expected, "{failed}");
        }
        // The kubelet drops what is less than a second.
        let within = at(100) + SignedDuration::from_millis(900);
        assert!(is_aftermath(&[within..within], at(100)));
        assert!(!is_aftermath(&[], at(100)));
    }
}
