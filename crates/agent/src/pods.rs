//! Reads pod objects of the node: the requests of a pod for slices, its names, and the progress of
//! its termination.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_api::names::is_served;
use cleave_api::placement::{PLACEMENT_ANNOTATION, Placement};
use cleave_plan::Quantity;
use cleave_plan::ledger::{self, ContainerKind};
use k8s_openapi::api::core::v1::Pod as CorePod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::allocation::pending::{BoundPod, ContainerRequest};
use crate::tenants::names::PodName;
use crate::termination::pods::{Deletion, PodObservation, TerminatingPods};
use crate::termination::shutdown::{self, Shutdown};

/// Grace period in seconds of a pod whose spec contains none. The API server uses the same default.
const DEFAULT_GRACE_SECONDS: i64 = 30;

/// Annotation of mirror pods. A mirror pod is the API server's object for a static pod.
const MIRROR_POD_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// The fields of a pod object that the agent reads.
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

/// A hook that the kubelet runs before it sends SIGTERM. The agent knows the hook's duration only
/// if the hook's action is `sleep`.
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
    /// Set by the kubelet when it admits or rejects the pod.
    start_time: Option<IgnoredAny>,
    container_statuses: Vec<ContainerStatus>,
    init_container_statuses: Vec<ContainerStatus>,
    ephemeral_container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct ContainerStatus {
    name: String,
    /// The container's id with the runtime as prefix, such as `containerd://<id>`. Absent until the
    /// container is created.
    #[serde(rename = "containerID")]
    container_id: Option<String>,
}

impl PodObject {
    /// Returns the pod and the `Allocate` calls that the kubelet makes for it on `node`. Returns
    /// `None` if the pod has completed or requests no resource that Cleave serves.
    pub fn bound_pod(&self, node: &str) -> Option<BoundPod> {
        let PodObject { metadata, spec, status } = self;
        if self.has_ended() {
            return None;
        }
        let annotation = metadata.annotations.as_ref().and_then(|all| all.get(PLACEMENT_ANNOTATION));
        // Ignore a malformed annotation, because the operator did not write it.
        let mut placement = annotation.and_then(|text| Placement::parse(text).ok()).unwrap_or_default();
        let reservations = placement.nodes.remove(node).unwrap_or_default();
        let requests = container_requests(spec, &reservations);
        (!requests.is_empty()).then_some(BoundPod {
            uid: metadata.uid.clone()?,
            namespace: metadata.namespace.clone()?,
            name: metadata.name.clone()?,
            terminating: metadata.deletion_timestamp.is_some(),
            admitted: status.start_time.is_some() || !matches!(status.phase.as_str(), "" | "Pending"),
            requests,
        })
    }

    /// Returns the progress of the pod's termination.
    fn termination(&self, bound: &BoundPod, now: Timestamp) -> PodObservation {
        let seconds = |seconds: i64| Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        let PodObject { metadata, spec, .. } = self;
        // Init containers that are not sidecars need no exception, because they have no hooks.
        let containers = spec.init_containers.iter().chain(&spec.containers);
        let with_shares =
            containers.filter(|container| bound.requests.iter().any(|request| request.container == container.name));
        let hooks = with_shares.map(|container| container.lifecycle.pre_stop.sleep.seconds);
        let deletion = metadata.deletion_timestamp.as_ref().map(|end| Deletion {
            grace: seconds(metadata.deletion_grace_period_seconds.unwrap_or(0)),
            left: Duration::try_from(end.0.duration_since(now)).unwrap_or_default(),
        });
        let name = format!("{}/{}", bound.namespace, bound.name);
        PodObservation { uid: bound.uid.clone(), name, sleep: seconds(hooks.min().unwrap_or(0)), deletion }
    }

    /// Records the progress of the pod's termination. Returns whether the record changed.
    pub fn record_termination(&self, node: &str, terminating: &mut TerminatingPods, shutdown: &mut Shutdown) -> bool {
        let Some(uid) = &self.metadata.uid else { return false };
        // A mirror pod is the API server's object for a static pod. Deleting a mirror pod
        // terminates no process.
        let is_mirror = self.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(MIRROR_POD_ANNOTATION));
        let bound = self.bound_pod(node).filter(|_| !is_mirror);
        let now = Instant::now();
        let seen = if self.has_ended() {
            shutdown.remove(uid);
            None
        } else {
            let grace = self.spec.termination_grace_period_seconds.unwrap_or(DEFAULT_GRACE_SECONDS);
            let pod = shutdown::ShutdownPod {
                priority: self.spec.priority,
                grace: Duration::from_secs(u64::try_from(grace).unwrap_or(0)),
                observation: bound.map(|bound| self.termination(&bound, Timestamp::now())),
            };
            shutdown.observe(uid, pod, now)
        };
        match seen {
            Some(seen) => terminating.observe(seen, now),
            None => !is_mirror && terminating.remove_finished(uid),
        }
    }

    fn has_ended(&self) -> bool {
        matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }

    /// Returns the pod's UID, namespace and name, and the names of its containers. Returns `None`
    /// if the pod has completed.
    pub fn uid_and_names(&self) -> Option<(String, PodName)> {
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

    /// Returns the pod's UID.
    pub(crate) fn uid(&self) -> Option<&String> {
        self.metadata.uid.as_ref()
    }
}

/// Returns the requests of each container for each resource that Cleave serves, with their
/// reservations.
fn container_requests(spec: &PodSpec, reservations: &[cleave_api::placement::ReservedUnits]) -> Vec<ContainerRequest> {
    let init = spec.init_containers.iter().map(|container| {
        let sidecar = container.restart_policy.as_deref() == Some("Always");
        (if sidecar { ContainerKind::Sidecar } else { ContainerKind::Init }, container)
    });
    let all: Vec<(ContainerKind, &Container)> =
        init.chain(spec.containers.iter().map(|main| (ContainerKind::Main, main))).collect();
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
    let device_requests = ledger::device_requests(&containers);
    // Match reservations by resource and order, because the annotation lists the reservations in
    // the order of the requests.
    let device_of = |request: usize| {
        let resource = device_requests.get(request)?.resource.as_str();
        let nth = device_requests[..request].iter().filter(|before| before.resource == resource).count();
        let reservation = reservations.iter().filter(|reservation| reservation.resource == resource).nth(nth)?;
        (reservation.units == device_requests[request].units.get()).then(|| reservation.device.clone())
    };
    let request = |part: ledger::RequestPart| {
        Some(ContainerRequest {
            container: all.get(part.container)?.1.name.clone(),
            reserved_on: device_of(part.request),
            units: part.units.get(),
            needed: part.needed.get(),
            group: part.request,
            resource: part.resource,
        })
    };
    ledger::request_parts(&containers).into_iter().filter_map(request).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

    pub(crate) fn pod_object(name: &str, placement: &str, spec: &Value) -> Value {
        json!({
            "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}"), "resourceVersion": "1",
                "annotations": {"cleave.dev/placement": placement}},
            "spec": spec,
        })
    }

    fn read_bound_pod(object: &Value) -> Option<BoundPod> {
        serde_json::from_value::<PodObject>(object.clone()).unwrap().bound_pod("n")
    }

    pub(crate) fn container(name: &str, limits: &Value) -> Value {
        json!({"name": name, "resources": {"limits": limits}, "image": "i", "env": [{"name": "A", "value": "b"}]})
    }

    pub(crate) fn placement(entries: &[(&str, u32, &str)]) -> String {
        let reservations: Vec<Value> = entries
            .iter()
            .map(|(resource, units, device)| json!({"resource": resource, "units": units, "device": device}))
            .collect();
        json!({"until": 9, "nodes": {"n": reservations, "m": []}}).to_string()
    }

    #[test]
    fn requests_follow_the_containers_limits_and_the_pods_reservations() {
        let spec = json!({
            "initContainers": [container("first", &json!({MPS_RESOURCE: "2"}))],
            "containers": [
                container("main", &json!({MPS_RESOURCE: 5, "cpu": "1", "nvidia.com/gpu-10gb": "1"})),
                container("beside", &json!({"memory": "1Gi"})),
                container("other", &json!({MPS_RESOURCE: "3", "nvidia.com/gpu": "2"})),
            ],
        });
        let note = placement(&[
            ("nvidia.com/gpu-10gb", 1, "GPU-c"),
            (MPS_RESOURCE, 5, "GPU-a"),
            (MPS_RESOURCE, 3, "GPU-b"),
            ("nvidia.com/gpu", 1, "GPU-d"),
            ("nvidia.com/gpu", 1, "GPU-e"),
        ]);
        let bound = read_bound_pod(&pod_object("p", &note, &spec)).unwrap();
        let requests: Vec<(&str, &str, u32, Option<&str>)> = bound
            .requests
            .iter()
            .map(|request| {
                (request.container.as_str(), request.resource.as_str(), request.units, request.reserved_on.as_deref())
            })
            .collect();
        assert_eq!(
            requests,
            [
                ("first", MPS_RESOURCE, 2, Some("GPU-a")),
                ("main", "nvidia.com/gpu-10gb", 1, Some("GPU-c")),
                ("main", MPS_RESOURCE, 5, Some("GPU-a")),
                ("other", "nvidia.com/gpu", 2, None),
                ("other", MPS_RESOURCE, 3, Some("GPU-b")),
            ]
        );
        assert!(!bound.admitted && !bound.terminating);
    }

    #[test]
    fn an_annotation_that_does_not_match_the_request_is_ignored() {
        let spec = json!({"containers": [container("main", &json!({MPS_RESOURCE: "5"}))]});
        for note in [
            "",
            "{",
            "[]",
            &placement(&[]),
            &placement(&[(MPS_RESOURCE, 4, "GPU-a")]),
            r#"{"until":1,"nodes":{"m":[]}}"#,
        ] {
            let bound = read_bound_pod(&pod_object("p", note, &spec)).unwrap();
            assert_eq!(bound.requests[0].reserved_on, None, "{note}");
        }
    }

    #[test]
    fn completed_pods_and_pods_without_shares_have_no_requests_and_started_pods_are_admitted() {
        let spec = json!({"containers": [container("main", &json!({MPS_RESOURCE: "5"}))]});
        let with = |status: Value| {
            let mut object = pod_object("p", "", &spec);
            object["status"] = status;
            read_bound_pod(&object)
        };
        for phase in ["Succeeded", "Failed"] {
            assert_eq!(with(json!({"phase": phase})), None);
        }
        assert!(with(json!({"phase": "Running"})).unwrap().admitted);
        assert!(with(json!({"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"})).unwrap().admitted);
        assert!(!with(json!({"phase": "Pending", "conditions": [{"type": "PodScheduled"}]})).unwrap().admitted);
        for limits in [
            json!({}),
            json!({"cpu": "1"}),
            json!({MPS_RESOURCE: "0"}),
            json!({MPS_RESOURCE: "x"}),
            json!({MPS_RESOURCE: "-1"}),
        ] {
            assert_eq!(
                read_bound_pod(&pod_object("p", "", &json!({"containers": [container("main", &limits)]}))),
                None,
                "{limits}"
            );
        }
    }

    #[test]
    fn a_deletion_is_read_with_its_grace_period_and_the_hooks_sleep() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let spec = |sleeps: [Value; 2]| {
            let [main, other] = ["main", "other"].map(|name| container(name, &json!({MPS_RESOURCE: "1"})));
            let mut all = [main, other, container("beside", &json!({}))];
            for (container, hook) in all.iter_mut().zip(sleeps) {
                container["lifecycle"] = hook;
            }
            json!({ "containers": all })
        };
        let sleep = |seconds: i64| json!({"preStop": {"sleep": {"seconds": seconds}}, "postStart": {"exec": {}}});
        let exec = json!({"preStop": {"exec": {"command": ["true"]}}});
        let termination = |sleeps: [Value; 2], change: Value| {
            let mut object = pod_object("p", "", &spec(sleeps));
            for (key, value) in change.as_object().into_iter().flatten() {
                object["metadata"][key.as_str()] = value.clone();
            }
            let pod = serde_json::from_value::<PodObject>(object).unwrap();
            pod.termination(&pod.bound_pod("n").unwrap(), now)
        };
        let stays = termination([sleep(20), sleep(15)], json!({}));
        assert_eq!((stays.uid.as_str(), stays.name.as_str(), stays.deletion), ("uid-p", "ns/p", None));
        assert_eq!(stays.sleep, Duration::from_secs(15), "the shortest hook of the containers with shares");
        for hooks in [[sleep(20), json!({})], [exec, sleep(20)], [sleep(-1), sleep(20)]] {
            assert_eq!(termination(hooks, json!({})).sleep, Duration::ZERO);
        }
        for (end, left) in [("2027-01-15T08:00:20Z", 20), ("2027-01-15T08:00:00Z", 0), ("2027-01-15T07:00:00Z", 0)] {
            let change = json!({"deletionTimestamp": end, "deletionGracePeriodSeconds": 30});
            let deletion = termination([sleep(1), sleep(1)], change).deletion.unwrap();
            assert_eq!((deletion.grace.as_secs(), deletion.left.as_secs()), (30, left), "{end}");
        }
        let forced = json!({"deletionTimestamp": "2027-01-15T08:00:00Z", "deletionGracePeriodSeconds": 0});
        assert_eq!(termination([sleep(1), sleep(1)], forced).deletion.unwrap().grace, Duration::ZERO);
    }
}
