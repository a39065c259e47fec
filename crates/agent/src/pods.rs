//! The node's own pods, from the API server: what is read of them, and what it means for what the
//! kubelet will ask.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_api::names::is_served;
use cleave_api::placement::{ANNOTATION, Placement};
use cleave_plan::Quantity;
use cleave_plan::ledger::{self, Kind};
use k8s_openapi::api::core::v1::Pod as CorePod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::allocation::pending::{Bound, Want};
use crate::tenants::names::PodName;
use crate::termination::pods::{Deletion, PodObservation, TerminatingPods};
use crate::termination::shutdown::{self, Shutdown};

/// The grace in seconds of a pod that says none, which the API server fills in.
const USUAL_GRACE: i64 = 30;

/// Annotation of the API server's images of static pods.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// A pod as the API server tells it, without what nobody reads here.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = "CorePod")]
pub struct PodObject {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    containers: Vec<Container>,
    init_containers: Vec<Container>,
    priority: i32,
    termination_grace_period_seconds: Option<i64>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    name: String,
    restart_policy: Option<String>,
    resources: Resources,
    lifecycle: Lifecycle,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Lifecycle {
    pre_stop: PreStop,
}

/// A hook that the kubelet runs before it sends SIGTERM. How long any other than a sleep takes
/// nobody knows.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct PreStop {
    sleep: Sleep,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Sleep {
    seconds: i64,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Resources {
    limits: BTreeMap<String, Quantity>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodStatus {
    phase: String,
    /// The kubelet writes it when it has admitted the pod, or refused it.
    start_time: Option<IgnoredAny>,
    container_statuses: Vec<ContainerStatus>,
    init_container_statuses: Vec<ContainerStatus>,
    ephemeral_container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct ContainerStatus {
    name: String,
    /// `containerd://<id>`; none before it was made.
    #[serde(rename = "containerID")]
    container_id: Option<String>,
}

impl PodObject {
    /// What the kubelet of this node will ask for it; nothing for a pod that has ended or wants
    /// nothing that is served.
    pub fn bound(&self, node: &str) -> Option<Bound> {
        let PodObject { metadata, spec, status } = self;
        if self.has_ended() {
            return None;
        }
        let note = metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION));
        // A note that is not what the operator writes says nothing.
        let mut note = note.and_then(|text| Placement::parse(text).ok()).unwrap_or_default();
        let held = note.nodes.remove(node).unwrap_or_default();
        let wants = wants(spec, &held);
        (!wants.is_empty()).then_some(Bound {
            uid: metadata.uid.clone()?,
            namespace: metadata.namespace.clone()?,
            name: metadata.name.clone()?,
            leaving: metadata.deletion_timestamp.is_some(),
            admitted: status.start_time.is_some() || !matches!(status.phase.as_str(), "" | "Pending"),
            wants,
        })
    }

    /// How far it is on its way out.
    fn departure(&self, bound: &Bound, now: Timestamp) -> PodObservation {
        let seconds = |seconds: i64| Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        let PodObject { metadata, spec, .. } = self;
        // A plain init container has no hooks.
        let containers = spec.init_containers.iter().chain(&spec.containers);
        let with_shares =
            containers.filter(|container| bound.wants.iter().any(|want| want.container == container.name));
        let hooks = with_shares.map(|container| container.lifecycle.pre_stop.sleep.seconds);
        let deletion = metadata.deletion_timestamp.as_ref().map(|end| Deletion {
            grace: seconds(metadata.deletion_grace_period_seconds.unwrap_or(0)),
            left: Duration::try_from(end.0.duration_since(now)).unwrap_or_default(),
        });
        let name = format!("{}/{}", bound.namespace, bound.name);
        PodObservation { uid: bound.uid.clone(), name, sleep: seconds(hooks.min().unwrap_or(0)), deletion }
    }

    /// Notes how far it is on its way out, and says whether that is news.
    pub fn note_departure(&self, node: &str, terminating: &mut TerminatingPods, shutdown: &mut Shutdown) -> bool {
        let Some(uid) = &self.metadata.uid else { return false };
        // Of a static pod this is the image: to delete it ends nothing.
        let is_mirror = self.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(MIRROR));
        let bound = self.bound(node).filter(|_| !is_mirror);
        let now = Instant::now();
        let seen = if self.has_ended() {
            shutdown.remove(uid);
            None
        } else {
            let grace = self.spec.termination_grace_period_seconds.unwrap_or(USUAL_GRACE);
            let pod = shutdown::Pod {
                priority: self.spec.priority,
                grace: Duration::from_secs(u64::try_from(grace).unwrap_or(0)),
                observation: bound.map(|bound| self.departure(&bound, Timestamp::now())),
            };
            shutdown.observe(uid, pod, now)
        };
        match seen {
            Some(seen) => terminating.observe(seen, now),
            None => !is_mirror && terminating.finished(uid),
        }
    }

    fn has_ended(&self) -> bool {
        matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }

    /// What people call it and its containers; none for a pod that has ended.
    pub fn named(&self) -> Option<(String, PodName)> {
        let PodObject { metadata, status, .. } = self;
        if self.has_ended() {
            return None;
        }
        let all = [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses];
        let id = |status: &ContainerStatus| {
            let (_, id) = status.container_id.as_ref()?.split_once("://")?;
            Some((id.to_owned(), status.name.clone()))
        };
        let pod = PodName {
            namespace: metadata.namespace.clone()?,
            name: metadata.name.clone()?,
            containers: all.into_iter().flatten().filter_map(id).collect(),
        };
        Some((metadata.uid.clone()?, pod))
    }

    /// Its UID.
    pub(crate) fn uid(&self) -> Option<&String> {
        self.metadata.uid.as_ref()
    }
}

fn wants(spec: &PodSpec, held: &[cleave_api::placement::Held]) -> Vec<Want> {
    let init = spec.init_containers.iter().map(|container| {
        let sidecar = container.restart_policy.as_deref() == Some("Always");
        (if sidecar { Kind::Sidecar } else { Kind::Init }, container)
    });
    let all: Vec<(Kind, &Container)> = init.chain(spec.containers.iter().map(|main| (Kind::Main, main))).collect();
    let limit = |(resource, quantity): (&String, &Quantity)| {
        let units = quantity.count().filter(|_| is_served(resource))?;
        Some((resource.clone(), u32::try_from(units).unwrap_or(u32::MAX)))
    };
    let containers: Vec<ledger::Container> = all
        .iter()
        .map(|(kind, container)| {
            let limits = container.resources.limits.iter().filter_map(limit).collect();
            ledger::Container { kind: *kind, limits }
        })
        .collect();
    let asks = ledger::asks(&containers);
    // Of each resource apart: whole devices are held one by one, and elsewhere in the note.
    let place = |ask: usize| {
        let resource = asks.get(ask)?.resource.as_str();
        let nth = asks[..ask].iter().filter(|before| before.resource == resource).count();
        let held = held.iter().filter(|held| held.resource == resource).nth(nth)?;
        (held.units == asks[ask].units.get()).then(|| held.device.clone())
    };
    let want = |part: ledger::Part| {
        Some(Want {
            container: all.get(part.container)?.1.name.clone(),
            held: place(part.ask),
            units: part.units.get(),
            needed: part.needed.get(),
            ask: part.ask,
            resource: part.resource,
        })
    };
    ledger::parts(&containers).into_iter().filter_map(want).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    const MPS: &str = "nvidia.com/gpu-mps";

    pub(crate) fn object(name: &str, held: &str, spec: &Value) -> Value {
        json!({
            "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}"), "resourceVersion": "1",
                "annotations": {"cleave.dev/placement": held}},
            "spec": spec,
        })
    }

    fn read(object: &Value) -> Option<Bound> {
        serde_json::from_value::<PodObject>(object.clone()).unwrap().bound("n")
    }

    pub(crate) fn container(name: &str, limits: &Value) -> Value {
        json!({"name": name, "resources": {"limits": limits}, "image": "i", "env": [{"name": "A", "value": "b"}]})
    }

    pub(crate) fn held(entries: &[(&str, u32, &str)]) -> String {
        let held: Vec<Value> = entries
            .iter()
            .map(|(resource, units, device)| json!({"resource": resource, "units": units, "device": device}))
            .collect();
        json!({"until": 9, "nodes": {"n": held, "m": []}}).to_string()
    }

    #[test]
    fn a_pod_wants_what_its_containers_ask_for_where_it_is_held() {
        let spec = json!({
            "initContainers": [container("first", &json!({MPS: "2"}))],
            "containers": [
                container("main", &json!({MPS: 5, "cpu": "1", "nvidia.com/gpu-10gb": "1"})),
                container("beside", &json!({"memory": "1Gi"})),
                container("other", &json!({MPS: "3", "nvidia.com/gpu": "2"})),
            ],
        });
        let note = held(&[
            ("nvidia.com/gpu-10gb", 1, "GPU-c"),
            (MPS, 5, "GPU-a"),
            (MPS, 3, "GPU-b"),
            ("nvidia.com/gpu", 1, "GPU-d"),
            ("nvidia.com/gpu", 1, "GPU-e"),
        ]);
        let bound = read(&object("p", &note, &spec)).unwrap();
        let wants: Vec<(&str, &str, u32, Option<&str>)> = bound
            .wants
            .iter()
            .map(|want| (want.container.as_str(), want.resource.as_str(), want.units, want.held.as_deref()))
            .collect();
        assert_eq!(
            wants,
            [
                ("first", MPS, 2, Some("GPU-a")),
                ("main", "nvidia.com/gpu-10gb", 1, Some("GPU-c")),
                ("main", MPS, 5, Some("GPU-a")),
                ("other", "nvidia.com/gpu", 2, None),
                ("other", MPS, 3, Some("GPU-b")),
            ]
        );
        assert!(!bound.admitted && !bound.leaving);
    }

    #[test]
    fn a_note_that_says_something_else_says_nothing() {
        let spec = json!({"containers": [container("main", &json!({MPS: "5"}))]});
        for note in ["", "{", "[]", &held(&[]), &held(&[(MPS, 4, "GPU-a")]), r#"{"until":1,"nodes":{"m":[]}}"#] {
            let bound = read(&object("p", note, &spec)).unwrap();
            assert_eq!(bound.wants[0].held, None, "{note}");
        }
    }

    #[test]
    fn what_has_ended_or_wants_nothing_is_not_expected_and_what_the_kubelet_knows_has_asked() {
        let spec = json!({"containers": [container("main", &json!({MPS: "5"}))]});
        let with = |status: Value| {
            let mut object = object("p", "", &spec);
            object["status"] = status;
            read(&object)
        };
        for phase in ["Succeeded", "Failed"] {
            assert_eq!(with(json!({"phase": phase})), None);
        }
        assert!(with(json!({"phase": "Running"})).unwrap().admitted);
        assert!(with(json!({"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"})).unwrap().admitted);
        assert!(!with(json!({"phase": "Pending", "conditions": [{"type": "PodScheduled"}]})).unwrap().admitted);
        for limits in [json!({}), json!({"cpu": "1"}), json!({MPS: "0"}), json!({MPS: "x"}), json!({MPS: "-1"})] {
            assert_eq!(read(&object("p", "", &json!({"containers": [container("main", &limits)]}))), None, "{limits}");
        }
    }

    #[test]
    fn a_deletion_is_noted_with_its_grace_and_what_the_hooks_sleep() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let spec = |sleeps: [Value; 2]| {
            let [main, other] = ["main", "other"].map(|name| container(name, &json!({MPS: "1"})));
            let mut all = [main, other, container("beside", &json!({}))];
            for (container, hook) in all.iter_mut().zip(sleeps) {
                container["lifecycle"] = hook;
            }
            json!({ "containers": all })
        };
        let sleep = |seconds: i64| json!({"preStop": {"sleep": {"seconds": seconds}}, "postStart": {"exec": {}}});
        let exec = json!({"preStop": {"exec": {"command": ["true"]}}});
        let departure = |sleeps: [Value; 2], change: Value| {
            let mut object = object("p", "", &spec(sleeps));
            for (key, value) in change.as_object().into_iter().flatten() {
                object["metadata"][key.as_str()] = value.clone();
            }
            let pod = serde_json::from_value::<PodObject>(object).unwrap();
            pod.departure(&pod.bound("n").unwrap(), now)
        };
        let stays = departure([sleep(20), sleep(15)], json!({}));
        assert_eq!((stays.uid.as_str(), stays.name.as_str(), stays.deletion), ("uid-p", "ns/p", None));
        assert_eq!(stays.sleep, Duration::from_secs(15), "the shortest, of those with shares");
        for hooks in [[sleep(20), json!({})], [exec, sleep(20)], [sleep(-1), sleep(20)]] {
            assert_eq!(departure(hooks, json!({})).sleep, Duration::ZERO);
        }
        for (end, left) in [("2027-01-15T08:00:20Z", 20), ("2027-01-15T08:00:00Z", 0), ("2027-01-15T07:00:00Z", 0)] {
            let change = json!({"deletionTimestamp": end, "deletionGracePeriodSeconds": 30});
            let deletion = departure([sleep(1), sleep(1)], change).deletion.unwrap();
            assert_eq!((deletion.grace.as_secs(), deletion.left.as_secs()), (30, left), "{end}");
        }
        let forced = json!({"deletionTimestamp": "2027-01-15T08:00:00Z", "deletionGracePeriodSeconds": 0});
        assert_eq!(departure([sleep(1), sleep(1)], forced).deletion.unwrap().grace, Duration::ZERO);
    }
}
