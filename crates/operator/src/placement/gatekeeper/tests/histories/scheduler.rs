//! A model of kube-scheduler's filters, written from the documentation of Kubernetes. The model
//! reads the API objects and shares no code with the operator. The model does not preempt pods and
//! does not score nodes.
//!
//! | plugin | rule |
//! |---|---|
//! | `NodeUnschedulable`, `TaintToleration` | cordons, and taints with `NoSchedule` or `NoExecute` |
//! | `NodeAffinity` | node selector and required node affinity |
//! | `NodeResourcesFit` | sums of requests, and the number of pods |
//! | `NodePorts` | host ports |
//! | `VolumeBinding` | node affinity of bound volumes, topologies of volumes that do not exist yet |
//! | `PodTopologySpread` | constraints with `DoNotSchedule` |
//! | `InterPodAffinity` | required affinity and anti-affinity, and the anti-affinity of other pods |
use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::super::world::TestCluster;

/// The scheduler's inputs.
pub(super) struct View<'a> {
    pub(super) api: &'a TestCluster,
    /// The zones in which the volumes of each unbound claim can be created.
    pub(super) zones: &'a BTreeMap<String, BTreeSet<String>>,
}

/// The label of a node's zone.
pub(super) const ZONE: &str = "topology.kubernetes.io/zone";
const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";

/// Returns a part of an object. `path` contains names of fields and indices of lists.
fn value_at<'a>(object: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('/').skip(1).try_fold(object, |value, key| match value {
        Value::Array(list) => list.get(key.parse::<usize>().ok()?),
        value => value.get(key),
    })
}

/// Returns a list in an object. An absent list is empty.
pub(super) fn list<'a>(object: &'a Value, path: &str) -> &'a [Value] {
    value_at(object, path).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// Returns a string in an object. An absent string is empty.
pub(super) fn text<'a>(object: &'a Value, path: &str) -> &'a str {
    value_at(object, path).and_then(Value::as_str).unwrap_or_default()
}

/// Returns the node that a pod is bound to.
pub(super) fn node_of(pod: &Value) -> Option<&str> {
    pod["spec"]["nodeName"].as_str()
}

/// Returns a quantity in thousandths.
fn milli(quantity: &Value) -> u64 {
    let quantity = quantity.as_str().unwrap();
    match quantity.strip_suffix('m') {
        Some(milli) => milli.parse().unwrap(),
        None => quantity.parse::<u64>().unwrap() * 1000,
    }
}

/// Returns the requests of a pod, in thousandths. A container has either a request or a limit of a
/// resource, so the function adds both.
fn requests(pod: &Value) -> BTreeMap<&str, u64> {
    let mut sums = BTreeMap::from([("pods", 1000)]);
    for container in list(pod, "/spec/containers") {
        for kind in ["requests", "limits"] {
            let amounts = container["resources"][kind].as_object();
            for (resource, amount) in amounts.into_iter().flatten() {
                *sums.entry(resource).or_default() += milli(amount);
            }
        }
    }
    sums
}

/// Returns the host ports of a pod. Each port is a TCP port of every address.
fn host_ports(pod: &Value) -> BTreeSet<u64> {
    let containers = list(pod, "/spec/containers").iter();
    containers.flat_map(|container| list(container, "/ports")).filter_map(|port| port["hostPort"].as_u64()).collect()
}

pub(super) fn label<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["labels"].get(key)?.as_str()
}

/// Returns whether a label selector of an API object selects an object. Only `matchLabels` occur.
fn selects(selector: &Value, object: &Value) -> bool {
    let labels = selector["matchLabels"].as_object();
    labels.is_some_and(|labels| labels.iter().all(|(key, value)| label(object, key) == value.as_str()))
}

/// Returns whether a requirement of a node selector term accepts a value.
fn accepts(requirement: &Value, value: Option<&str>) -> bool {
    let listed = value.is_some_and(|value| list(requirement, "/values").iter().any(|one| one == value));
    match requirement["operator"].as_str().unwrap() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "Gt" => {
            let bound: i64 = requirement["values"][0].as_str().unwrap().parse().unwrap();
            value.and_then(|value| value.parse::<i64>().ok()).is_some_and(|value| value > bound)
        }
        other => panic!("{other}"),
    }
}

/// Returns whether a node matches at least one term of a node selector.
fn matches_terms(terms: &[Value], node: &Value) -> bool {
    terms.iter().any(|term| {
        let expressions = list(term, "/matchExpressions");
        let matches = |one: &Value| accepts(one, label(node, one["key"].as_str().unwrap()));
        !expressions.is_empty() && expressions.iter().all(matches)
    })
}

/// Returns whether a node matches a pod's node selector and required node affinity.
fn matches_affinity(pod: &Value, node: &Value) -> bool {
    let selector = pod["spec"]["nodeSelector"].as_object();
    let selected = selector.into_iter().flatten().all(|(key, value)| label(node, key) == value.as_str());
    let required = &pod["spec"]["affinity"]["nodeAffinity"][REQUIRED];
    selected && (required.is_null() || matches_terms(list(required, "/nodeSelectorTerms"), node))
}

/// Returns whether a pod tolerates a taint. All tolerations have the operator `Exists`.
pub(super) fn tolerates(pod: &Value, key: &str, effect: &str) -> bool {
    list(pod, "/spec/tolerations")
        .iter()
        .any(|one| (one["key"].is_null() || one["key"] == key) && (one["effect"].is_null() || one["effect"] == effect))
}

/// Returns the key of a taint of the node that the pod does not tolerate.
fn untolerated_taint<'a>(pod: &Value, node: &'a Value) -> Option<&'a str> {
    let hard = |taint: &&Value| taint["effect"] == "NoSchedule" || taint["effect"] == "NoExecute";
    let mut taints = list(node, "/spec/taints").iter().filter(hard);
    let taint = taints.find(|taint| !tolerates(pod, text(taint, "/key"), text(taint, "/effect")))?;
    Some(text(taint, "/key"))
}

impl<'a> View<'a> {
    /// Returns the bound pods, each with its node.
    fn bound_pods(&self) -> impl Iterator<Item = (&'a Value, &'a str)> {
        self.api.pods.values().filter_map(|pod| Some((pod, node_of(pod)?)))
    }

    /// Returns the topology domain of the node that a bound pod runs on.
    fn domain(&self, node: &str, key: &str) -> Option<&'a str> {
        label(self.api.nodes.get(node)?, key)
    }

    /// Returns the first filter that refuses the node. Returns `None` if the scheduler may bind the
    /// pod to the node.
    pub(super) fn refusal(&self, pod: &Value, node: &Value) -> Option<String> {
        if node["spec"]["unschedulable"] == true && !tolerates(pod, "node.kubernetes.io/unschedulable", "NoSchedule") {
            return Some("cordoned".to_owned());
        }
        if let Some(key) = untolerated_taint(pod, node) {
            return Some(format!("taint {key}"));
        }
        if !matches_affinity(pod, node) {
            return Some("node affinity".to_owned());
        }
        let rules: [(&str, bool); 5] = [
            ("resources", self.has_resources(pod, node)),
            ("host ports", self.has_free_ports(pod, node)),
            ("volumes", self.has_volumes(pod, node)),
            ("spread", self.is_spread(pod, node)),
            ("pod affinity", self.has_affinity(pod, node) && !self.is_repelled(pod, node)),
        ];
        rules.into_iter().find(|(_, passes)| !passes).map(|(rule, _)| rule.to_owned())
    }

    fn pods_on(&self, node: &Value) -> impl Iterator<Item = &'a Value> {
        let name = node["metadata"]["name"].as_str().unwrap().to_owned();
        self.bound_pods().filter(move |(_, node)| *node == name).map(|(pod, _)| pod)
    }

    fn has_resources(&self, pod: &Value, node: &Value) -> bool {
        let mut wanted = requests(pod);
        for other in self.pods_on(node) {
            for (resource, amount) in requests(other) {
                wanted.entry(resource).and_modify(|wanted| *wanted += amount);
            }
        }
        // A resource that the pod does not request cannot exclude the node.
        let own = requests(pod);
        wanted.iter().all(|(resource, wanted)| {
            let allocatable = &node["status"]["allocatable"][*resource];
            own[resource] == 0 || !allocatable.is_null() && *wanted <= milli(allocatable)
        })
    }

    fn has_free_ports(&self, pod: &Value, node: &Value) -> bool {
        let own = host_ports(pod);
        own.is_empty() || self.pods_on(node).all(|other| host_ports(other).is_disjoint(&own))
    }

    fn has_volumes(&self, pod: &Value, node: &Value) -> bool {
        list(pod, "/spec/volumes").iter().all(|volume| {
            let name = text(volume, "/persistentVolumeClaim/claimName");
            let claim = self.api.volume_claims.iter().find(|claim| claim["metadata"]["name"] == name);
            let Some(claim) = claim else { return false };
            match claim["spec"]["volumeName"].as_str() {
                Some(bound) => {
                    let volume = self.api.volumes.iter().find(|volume| volume["metadata"]["name"] == bound).unwrap();
                    matches_terms(list(volume, "/spec/nodeAffinity/required/nodeSelectorTerms"), node)
                }
                None => self.zones[name].contains(label(node, ZONE).unwrap()),
            }
        })
    }

    fn is_spread(&self, pod: &Value, node: &Value) -> bool {
        let constraints = list(pod, "/spec/topologySpreadConstraints");
        let has_all = |node: &Value| constraints.iter().all(|one| label(node, text(one, "/topologyKey")).is_some());
        constraints.iter().all(|constraint| {
            let key = text(constraint, "/topologyKey");
            let Some(here) = label(node, key) else { return false };
            let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
            for (name, other) in &self.api.nodes {
                let honored = constraint["nodeTaintsPolicy"] != "Honor" || untolerated_taint(pod, other).is_none();
                if !has_all(other) || !matches_affinity(pod, other) || !honored {
                    continue;
                }
                let selected = self.bound_pods().filter(|(one, on)| {
                    on == name
                        && one["metadata"]["namespace"] == pod["metadata"]["namespace"]
                        && one["metadata"]["deletionTimestamp"].is_null()
                        && selects(&constraint["labelSelector"], one)
                });
                *counts.entry(label(other, key).unwrap()).or_default() += i64::try_from(selected.count()).unwrap();
            }
            let domains = i64::try_from(counts.len()).unwrap();
            let enough = domains >= constraint["minDomains"].as_i64().unwrap_or(1);
            let least = if enough { counts.values().copied().min().unwrap_or(0) } else { 0 };
            let own = i64::from(selects(&constraint["labelSelector"], pod));
            counts.get(here).copied().unwrap_or(0) + own - least <= constraint["maxSkew"].as_i64().unwrap()
        })
    }

    /// Returns the required terms of a pod's affinity of this kind.
    fn terms(pod: &'a Value, kind: &str) -> &'a [Value] {
        list(&pod["spec"]["affinity"][kind], "/requiredDuringSchedulingIgnoredDuringExecution")
    }

    fn has_affinity(&self, pod: &Value, node: &Value) -> bool {
        let affinity = View::terms(pod, "podAffinity");
        let anti_affinity = View::terms(pod, "podAntiAffinity");
        let matches_all = |other: &Value| affinity.iter().all(|term| selects(&term["labelSelector"], other));
        let same = |term: &Value, other: &str| {
            let key = text(term, "/topologyKey");
            label(node, key).is_some_and(|here| self.domain(other, key) == Some(here))
        };
        let keys = affinity.iter().all(|term| label(node, text(term, "/topologyKey")).is_some());
        let beside =
            affinity.iter().all(|term| self.bound_pods().any(|(other, on)| matches_all(other) && same(term, on)));
        let first = || matches_all(pod) && !self.bound_pods().any(|(other, _)| matches_all(other));
        let avoided = anti_affinity
            .iter()
            .any(|term| self.bound_pods().any(|(other, on)| selects(&term["labelSelector"], other) && same(term, on)));
        keys && (beside || first()) && !avoided
    }

    /// Returns whether the anti-affinity of another pod excludes the pod from the node.
    fn is_repelled(&self, pod: &Value, node: &Value) -> bool {
        self.bound_pods().any(|(other, on)| {
            View::terms(other, "podAntiAffinity").iter().any(|term| {
                let key = text(term, "/topologyKey");
                let here = label(node, key);
                selects(&term["labelSelector"], pod) && here.is_some() && self.domain(on, key) == here
            })
        })
    }
}
