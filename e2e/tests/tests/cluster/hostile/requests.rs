//! Requests to the API server: by the owner of a namespace, and by an agent's own token.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, GPUNODES, PATIENCE, POLICIES, SYSTEM, Scope, pod, text, wait_for};
use serde_json::{Value, json};

use super::{Attempt, Expected, Ground, Outcome, owner, refusals};
use crate::admission::{all_gpus, beside, changed, with_env};
use crate::gate_admission::{GATE, OTHER, REGISTRATIONS};
use crate::{NODE, SHARES};

/// Another node that has an agent.
const ELSEWHERE: &str = "node2";
/// The annotation that operator and agents believe, and what it must not be made to say.
const NOTE: &str = "cleave.dev/placement";
pub(super) const FORGED: &str = concat!(
    r#"{"until":99999999999,"nodes":{"../../node2":[],"#,
    r#""node1":[{"resource":"nvidia.com/gpu-mps","units":9,"device":"../../etc/passwd"}]}}"#
);
const AGENT: &str = "cleave-agent";
const OPERATOR: &str = "cleave-operator";

/// What all refusals of the annotation say.
const NOT_YOURS: Expected =
    Expected::Refused(&["(cleave.dev/placement)", "only the Cleave operator may write annotations"]);
const NOT_YOUR_GATE: Expected = Expected::Refused(&["only the Cleave operator may remove the scheduling gate", GATE]);
const NO_RIGHT_TO_GPU_NODES: Expected = Expected::Refused(&["cannot patch resource \"gpunodes"]);

/// A namespace with a pod that waits at its gate, for as long as another gate keeps the operator
/// from opening it.
pub(super) fn ground(cluster: &Cluster) -> Result<Ground<'_>> {
    let ground = Ground::new(Scope::new(cluster, "hostile-requests")?)?;
    let mut waits = pod("waits", &json!({SHARES: 1}), "true");
    waits["spec"]["schedulingGates"] = json!([{"name": OTHER}, {"name": GATE}]);
    cluster.create(&ground.pods(), &waits)?;
    Ok(ground)
}

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "CUDA_MPS_PIPE_DIRECTORY in a pod's specification",
        expected: Expected::Refused(&["sets CUDA_MPS_PIPE_DIRECTORY", "cleave.dev/allow=environment"]),
        tried: |ground| env(ground, &json!({"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp"})),
    },
    Attempt {
        name: "a memory limit from a ConfigMap's key",
        expected: Expected::Refused(&["sets CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]),
        tried: |ground| {
            let from = json!({"configMapKeyRef": {"name": "any", "key": "limit", "optional": true}});
            env(ground, &json!({"name": "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "valueFrom": from}))
        },
    },
    Attempt {
        name: "NVIDIA_VISIBLE_DEVICES=all in a pod's specification",
        expected: Expected::Refused(&["sets NVIDIA_VISIBLE_DEVICES"]),
        tried: |ground| env(ground, &all_gpus()),
    },
    Attempt {
        name: "the same in an init container",
        expected: Expected::Refused(&["container \"first\" sets NVIDIA_VISIBLE_DEVICES"]),
        tried: |ground| {
            let first = |spec: &mut Value| spec["initContainers"] = json!([beside("first", &all_gpus())]);
            dry(ground, &changed(&json!({SHARES: 1}), first))
        },
    },
    Attempt {
        name: "the same in an ephemeral container",
        expected: Expected::Refused(&["container \"debug\" sets NVIDIA_VISIBLE_DEVICES"]),
        tried: |ground| {
            let debug = json!({"spec": {"ephemeralContainers": [beside("debug", &all_gpus())]}});
            refusals([ground.tenant.patch(&format!("{}/ephemeralcontainers", waits(ground)), &debug)])
        },
    },
    Attempt {
        name: "a forged placement at a pod's creation",
        expected: NOT_YOURS,
        tried: |ground| {
            let mut pod = pod("t", &json!({SHARES: 1}), "true");
            pod["metadata"]["annotations"] = json!({NOTE: FORGED});
            dry(ground, &pod)
        },
    },
    Attempt {
        name: "a forged placement on a pod that waits",
        expected: NOT_YOURS,
        tried: |ground| refusals([ground.tenant.patch(&waits(ground), &forged())]),
    },
    Attempt {
        name: "a forged placement by way of the pod's status",
        expected: NOT_YOURS,
        tried: |ground| refusals([ground.tenant.patch(&format!("{}/status", waits(ground)), &forged())]),
    },
    Attempt {
        name: "a forged placement by way of a binding",
        expected: NOT_YOURS,
        tried: |ground| bind(ground, &json!({NOTE: FORGED})),
    },
    Attempt {
        name: "a pod that waits bound to a node",
        expected: Expected::Refused(&["non-empty .spec.schedulingGates"]),
        tried: |ground| bind(ground, &json!({})),
    },
    Attempt {
        name: "a path in an annotation's name",
        expected: Expected::Refused(&["metadata.annotations: Invalid value"]),
        tried: |ground| {
            let mut pod = pod("t", &json!({SHARES: 1}), "true");
            pod["metadata"]["annotations"] = json!({"../../etc.cleave.dev/placement": FORGED});
            dry(ground, &pod)
        },
    },
    Attempt {
        name: "the gate taken away by the pod's owner",
        expected: NOT_YOUR_GATE,
        tried: |ground| refusals([ungate(&ground.tenant, ground)]),
    },
    Attempt {
        name: "the gate taken away by a service account of the operator's name in another namespace",
        expected: NOT_YOUR_GATE,
        tried: |ground| {
            let token = owner(&ground.scope, OPERATOR)?;
            refusals([ungate(&Cluster::by_token(&token, None)?, ground)])
        },
    },
    Attempt {
        name: "the gate taken away by impersonation of the operator",
        expected: Expected::Refused(&["cannot impersonate"]),
        tried: |ground| {
            let operator = format!("system:serviceaccount:{SYSTEM}:{OPERATOR}");
            refusals([ungate(&Cluster::by_token(&ground.token, Some(&operator))?, ground)])
        },
    },
    Attempt {
        name: "spec.nodeName",
        expected: Expected::Refused(&["spec.nodeName is set", "cleave.dev/allow=node-name"]),
        tried: |ground| dry(ground, &on_node()),
    },
    Attempt {
        name: "spec.nodeName on a pod that poses as a static pod's mirror",
        expected: Expected::Refused(&["spec.nodeName is set"]),
        tried: |ground| {
            let mut pod = on_node();
            pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
            dry(ground, &pod)
        },
    },
    Attempt {
        name: "paths as a pod's name",
        expected: Expected::Refused(&["metadata.name: Invalid value"]),
        tried: |ground| {
            let named = |name: &str| created(ground, &pod(name, &json!({SHARES: 1}), "true"));
            refusals(["..", "../../cleave-system/x", "/run/cleave", "x\u{0}"].map(named))
        },
    },
    Attempt {
        name: "more shares than a GPU can have",
        expected: Expected::Refused(&["one GPU has at most 48"]),
        tried: |ground| {
            refusals(["49", "1k", "9223372036854775807"].map(|count| created(ground, &asking(&json!({SHARES: count})))))
        },
    },
    Attempt {
        name: "a negative number of shares",
        expected: Expected::Refused(&["must be greater than or equal to 0"]),
        tried: |ground| dry(ground, &asking(&json!({SHARES: "-1"}))),
    },
    Attempt {
        name: "half a share",
        expected: Expected::Refused(&["must be an integer"]),
        tried: |ground| refusals(["0.5", "500m"].map(|count| created(ground, &asking(&json!({SHARES: count}))))),
    },
    Attempt {
        name: "shares in the requests, and none in the limits",
        expected: Expected::Refused(&["Limit must be set for non overcommitable resources"]),
        tried: |ground| {
            let requests = |spec: &mut Value| spec["containers"][0]["resources"] = json!({"requests": {SHARES: "1"}});
            dry(ground, &changed(&json!({}), requests))
        },
    },
    Attempt {
        name: "more shares by a resize of the pod",
        expected: Expected::Refused(&["only cpu and memory resources are mutable"]),
        tried: |ground| {
            let mut containers = ground.scope.cluster.get(&waits(ground))?["spec"]["containers"].clone();
            for kind in ["limits", "requests"] {
                containers[0]["resources"][kind][SHARES] = json!("5");
            }
            let change = json!({"spec": {"containers": containers}});
            refusals([ground.tenant.patch(&format!("{}/resize", waits(ground)), &change)])
        },
    },
    Attempt {
        name: "a volume with Cleave's folder of the node, where the namespace is held to the standard `baseline`",
        expected: Expected::Refused(&["violates PodSecurity", "hostPath volumes"]),
        tried: host_path,
    },
    Attempt {
        name: "an exception for the owner's own namespace",
        expected: Expected::Refused(&["cannot patch resource \"namespaces\""]),
        tried: |ground| {
            let label = json!({"metadata": {"labels": {"cleave.dev/allow": "all"}}});
            refusals([ground.tenant.patch(&format!("/api/v1/namespaces/{}", ground.scope.namespace), &label)])
        },
    },
    Attempt {
        name: "the admission policies deleted",
        expected: Expected::Refused(&["cannot delete resource \"validatingadmissionpolicybindings\""]),
        tried: |ground| {
            refusals(["cleave-pods", "cleave-annotations", "cleave-gate"].map(|name| {
                let path = format!("{REGISTRATIONS}/validatingadmissionpolicybindings/{name}");
                ground.tenant.delete(&path, None).map(|()| Value::Null)
            }))
        },
    },
    Attempt {
        name: "a SharingPolicy by the owner of a namespace",
        expected: Expected::Refused(&["cannot create resource \"sharingpolicies\""]),
        tried: |ground| {
            let policy = json!({
                "apiVersion": "cleave.dev/v1alpha1", "kind": "SharingPolicy", "metadata": {"name": "mine"},
                "spec": {"mode": "Whole"},
            });
            refusals([ground.tenant.create(POLICIES, &policy)])
        },
    },
    Attempt {
        name: "a GpuNode's spec and status by the owner of a namespace",
        expected: NO_RIGHT_TO_GPU_NODES,
        tried: |ground| {
            let path = format!("{GPUNODES}/{NODE}");
            refusals([
                ground.tenant.patch(&path, &json!({"spec": {"gpus": []}})),
                ground.tenant.patch(&format!("{path}/status"), &no_gpus()),
            ])
        },
    },
    Attempt {
        name: "a token of the agent's account for the owner of a namespace",
        expected: Expected::Refused(&["cannot create resource \"serviceaccounts/token\""]),
        tried: |ground| refusals([ground.tenant.token(SYSTEM, AGENT, None).map(Value::from)]),
    },
    Attempt {
        name: "the status of another node's GpuNode by an agent's token",
        expected: Expected::Refused(&["the Cleave agent of node node2 may write only GpuNode node2, not node1"]),
        tried: |ground| refusals([agent(ground, ELSEWHERE)?.patch(&format!("{GPUNODES}/{NODE}/status"), &no_gpus())]),
    },
    Attempt {
        name: "labels, owners and finalizers of another node's GpuNode by an agent's token",
        expected: Expected::Refused(&["\"node1\" is forbidden"]),
        tried: |ground| {
            let (agent, path) = (agent(ground, ELSEWHERE)?, format!("{GPUNODES}/{NODE}"));
            refusals([agent.patch(&path, &metadata()), agent.patch(&format!("{path}/status"), &metadata())])
        },
    },
    Attempt {
        name: "the spec, labels, owners and finalizers of its own GpuNode by way of the status, by an agent's token",
        expected: Expected::NoEffect,
        tried: own_metadata,
    },
    Attempt {
        name: "its own GpuNode's spec by an agent's token",
        expected: NO_RIGHT_TO_GPU_NODES,
        tried: |ground| {
            refusals([agent(ground, NODE)?.patch(&format!("{GPUNODES}/{NODE}"), &json!({"spec": {"gpus": []}}))])
        },
    },
    Attempt {
        name: "a GpuNode's status by an agent's token that is bound to no pod",
        expected: Expected::Refused(&["bound to no node"]),
        tried: |ground| {
            let token = ground.scope.cluster.token(SYSTEM, AGENT, None)?;
            let path = format!("{GPUNODES}/{NODE}/status");
            refusals([Cluster::by_token(&token, None)?.patch(&path, &no_gpus())])
        },
    },
    Attempt {
        name: "GpuNodes made and deleted by an agent's token",
        expected: Expected::Refused(&["resource \"gpunodes\" in API group \"cleave.dev\" at the cluster scope"]),
        tried: |ground| {
            let agent = agent(ground, NODE)?;
            let made = json!({
                "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "mine"},
                "spec": {"planId": "x", "gpus": []},
            });
            let deleted = agent.delete(&format!("{GPUNODES}/{ELSEWHERE}"), None).map(|()| Value::Null);
            refusals([agent.create(GPUNODES, &made), deleted])
        },
    },
    Attempt {
        name: "a tenant's pod changed, evicted and deleted by an agent's token",
        expected: Expected::Refused(&["resource \"pods"]),
        tried: |ground| {
            let (agent, path) = (agent(ground, NODE)?, waits(ground));
            let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "waits"}});
            refusals([
                agent.patch(&path, &forged()),
                agent.create(&format!("{path}/eviction"), &eviction),
                agent.delete(&path, Some(0)).map(|()| Value::Null),
            ])
        },
    },
];

fn waits(ground: &Ground<'_>) -> String {
    ground.scope.pod_path("waits")
}

/// What the API server answers to a pod; it is not made.
fn created(ground: &Ground<'_>, pod: &Value) -> Result<Value> {
    ground.tenant.create(&format!("{}?dryRun=All", ground.pods()), pod)
}

fn dry(ground: &Ground<'_>, pod: &Value) -> Result<Outcome> {
    refusals([created(ground, pod)])
}

fn asking(limits: &Value) -> Value {
    pod("t", limits, "true")
}

fn env(ground: &Ground<'_>, env: &Value) -> Result<Outcome> {
    dry(ground, &with_env(&json!({SHARES: 1}), env))
}

fn on_node() -> Value {
    changed(&json!({SHARES: 1}), |spec| spec["nodeName"] = json!(NODE))
}

fn forged() -> Value {
    json!({"metadata": {"annotations": {NOTE: FORGED}}})
}

fn no_gpus() -> Value {
    json!({"status": {"gpus": []}})
}

fn metadata() -> Value {
    json!({"metadata": {"labels": {"hostile": "yes"}, "finalizers": ["example.com/hostile"], "ownerReferences": []}})
}

/// Takes our gate away and leaves the other.
fn ungate(who: &Cluster, ground: &Ground<'_>) -> Result<Value> {
    who.patch(&waits(ground), &json!({"spec": {"schedulingGates": [{"name": OTHER}]}}))
}

/// A node's agent, by the token that its pod has.
fn agent(ground: &Ground<'_>, node: &str) -> Result<Cluster> {
    let cluster = ground.scope.cluster;
    let path = format!("/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/component=agent");
    let pods = cluster.list(&path)?;
    let there = |pod: &&Value| pod["spec"]["nodeName"] == node && pod["metadata"]["deletionTimestamp"].is_null();
    let pod = pods.iter().find(there).with_context(|| format!("no agent on {node}"))?;
    Cluster::by_token(&cluster.token(SYSTEM, AGENT, Some(pod))?, None)
}

/// What a binding says of annotations the API server writes on the pod, and no policy on pods is
/// asked.
fn bind(ground: &Ground<'_>, annotations: &Value) -> Result<Outcome> {
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": {"name": "waits", "annotations": annotations},
        "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
    });
    let outcome = refusals([
        ground.tenant.create(&format!("{}/binding", waits(ground)), &binding),
        ground.tenant.create(&format!("/api/v1/namespaces/{}/bindings", ground.scope.namespace), &binding),
    ])?;
    let pod = ground.scope.cluster.get(&waits(ground))?;
    ensure!(pod["spec"]["nodeName"].is_null() && pod["metadata"]["annotations"][NOTE].is_null(), "{pod}");
    Ok(outcome)
}

fn own_metadata(ground: &Ground<'_>) -> Result<Outcome> {
    let cluster = ground.scope.cluster;
    let before = cluster.gpunode(NODE)?["metadata"].clone();
    let mut change = metadata();
    change["spec"] = json!({"planId": "hostile"});
    agent(ground, NODE)?.patch(&format!("{GPUNODES}/{NODE}/status"), &change)?;
    let after = cluster.gpunode(NODE)?;
    for field in ["labels", "finalizers", "ownerReferences"] {
        let (before, after) = (&before[field], &after["metadata"][field]);
        if before != after {
            return Ok(Outcome::Succeeded(format!("{field} were {before}, and are {after}")));
        }
    }
    if text(&after["spec"]["planId"]) == "hostile" {
        return Ok(Outcome::Succeeded(after["spec"].to_string()));
    }
    Ok(Outcome::NoEffect("all but the status is as it was".to_owned()))
}

fn host_path(ground: &Ground<'_>) -> Result<Outcome> {
    let namespace = format!("/api/v1/namespaces/{}", ground.scope.namespace);
    let label = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}});
    ground.scope.cluster.patch(&namespace, &label)?;
    let pod = changed(&json!({}), |spec| {
        spec["volumes"] = json!([{"name": "run", "hostPath": {"path": "/run/cleave"}}]);
        spec["containers"][0]["volumeMounts"] = json!([{"name": "run", "mountPath": "/mine"}]);
    });
    // The API server learns of the label a moment later.
    wait_for("the namespace's label counts", PATIENCE, || match dry(ground, &pod)? {
        refused @ Outcome::Refused(_) => Ok(Some(refused)),
        _ => Ok(None),
    })
}
