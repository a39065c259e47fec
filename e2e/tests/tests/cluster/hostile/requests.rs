//! Lists attempts that consist of requests to the API server. The owner of a namespace sends the
//! requests, or an attacker sends them with an agent's token.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, GPU_NODES_PATH, POLICIES_PATH, SYSTEM_NAMESPACE, Scope, WAIT_TIMEOUT, pod, text, wait_for, wait_until,
};
use serde_json::{Value, json};

use super::{Attempt, ExpectedOutcome, Outcome, TestBed, create_owner, refusals};
use crate::admission::{env_for_all_gpus, extra_container, pod_with, pod_with_env};
use crate::gate_admission::{GATE_NAME, OTHER_GATE_NAME, REGISTRATIONS_PATH};
use crate::{NODE, SHARES_RESOURCE, daemon_pids};

/// Another node that has an agent.
const OTHER_NODE: &str = "node2";
/// The annotation in which the operator records reservations, and a forged value of the annotation.
const PLACEMENT_ANNOTATION: &str = "cleave.dev/placement";
pub(super) const FORGED_PLACEMENT: &str = concat!(
    r#"{"until":99999999999,"nodes":{"../../node2":[],"#,
    r#""node1":[{"resource":"nvidia.com/gpu-mps","units":9,"device":"../../etc/passwd"}]}}"#
);
const AGENT_ACCOUNT: &str = "cleave-agent";
const OPERATOR_ACCOUNT: &str = "cleave-operator";

/// The expected refusal of a write to the annotation.
const ANNOTATION_REFUSED: ExpectedOutcome =
    ExpectedOutcome::Refused(&["(cleave.dev/placement)", "only the Cleave operator may write annotations"]);
/// The expected refusal of the removal of the gate.
const GATE_REFUSED: ExpectedOutcome =
    ExpectedOutcome::Refused(&["only the Cleave operator may remove the scheduling gate", GATE_NAME]);
/// The expected refusal, by RBAC, of a write to `GpuNode`s.
const GPU_NODES_REFUSED: ExpectedOutcome = ExpectedOutcome::Refused(&["cannot patch resource \"gpunodes"]);

/// Creates a namespace with a gated pod `waits`. The operator does not release the pod, because the
/// pod also has another gate.
pub(super) fn test_bed(cluster: &Cluster) -> Result<TestBed<'_>> {
    // Wait, because the status may still contain the daemons of the previous test for a short time.
    wait_until("the node reports no MPS daemons", || Ok(daemon_pids(cluster)?.is_empty()))?;
    let bed = TestBed::new(Scope::new(cluster, "hostile-requests")?)?;
    let mut waits = pod("waits", &json!({SHARES_RESOURCE: 1}), "true");
    waits["spec"]["schedulingGates"] = json!([{"name": OTHER_GATE_NAME}, {"name": GATE_NAME}]);
    cluster.create(&bed.pods_path(), &waits)?;
    Ok(bed)
}

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "CUDA_MPS_PIPE_DIRECTORY in a pod's specification",
        expected: ExpectedOutcome::Refused(&["sets CUDA_MPS_PIPE_DIRECTORY", "cleave.dev/allow=environment"]),
        run: |bed| expect_refusal_of_env(bed, &json!({"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp"})),
    },
    Attempt {
        name: "a memory limit from a ConfigMap's key",
        expected: ExpectedOutcome::Refused(&["sets CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]),
        run: |bed| {
            let from = json!({"configMapKeyRef": {"name": "any", "key": "limit", "optional": true}});
            expect_refusal_of_env(bed, &json!({"name": "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "valueFrom": from}))
        },
    },
    Attempt {
        name: "NVIDIA_VISIBLE_DEVICES=all in a pod's specification",
        expected: ExpectedOutcome::Refused(&["sets NVIDIA_VISIBLE_DEVICES"]),
        run: |bed| expect_refusal_of_env(bed, &env_for_all_gpus()),
    },
    Attempt {
        name: "NVIDIA_VISIBLE_DEVICES=all in an init container",
        expected: ExpectedOutcome::Refused(&["container \"first\" sets NVIDIA_VISIBLE_DEVICES"]),
        run: |bed| {
            let first =
                |spec: &mut Value| spec["initContainers"] = json!([extra_container("first", &env_for_all_gpus())]);
            expect_refusal(bed, &pod_with(&json!({SHARES_RESOURCE: 1}), first))
        },
    },
    Attempt {
        name: "NVIDIA_VISIBLE_DEVICES=all in an ephemeral container",
        expected: ExpectedOutcome::Refused(&["container \"debug\" sets NVIDIA_VISIBLE_DEVICES"]),
        run: |bed| {
            let debug = json!({"spec": {"ephemeralContainers": [extra_container("debug", &env_for_all_gpus())]}});
            refusals([bed.tenant.patch(&format!("{}/ephemeralcontainers", path_of_waiting_pod(bed)), &debug)])
        },
    },
    Attempt {
        name: "a forged placement at a pod's creation",
        expected: ANNOTATION_REFUSED,
        run: |bed| {
            let mut pod = pod("t", &json!({SHARES_RESOURCE: 1}), "true");
            pod["metadata"]["annotations"] = json!({PLACEMENT_ANNOTATION: FORGED_PLACEMENT});
            expect_refusal(bed, &pod)
        },
    },
    Attempt {
        name: "a forged placement on a pod that waits at the gate",
        expected: ANNOTATION_REFUSED,
        run: |bed| refusals([bed.tenant.patch(&path_of_waiting_pod(bed), &forged_annotation_patch())]),
    },
    Attempt {
        name: "a forged placement through the pod's status",
        expected: ANNOTATION_REFUSED,
        run: |bed| {
            refusals([bed.tenant.patch(&format!("{}/status", path_of_waiting_pod(bed)), &forged_annotation_patch())])
        },
    },
    Attempt {
        name: "a forged placement through a binding",
        expected: ANNOTATION_REFUSED,
        run: |bed| bind_waiting_pod(bed, &json!({PLACEMENT_ANNOTATION: FORGED_PLACEMENT})),
    },
    Attempt {
        name: "a binding of a pod that waits at the gate",
        expected: ExpectedOutcome::Refused(&["non-empty .spec.schedulingGates"]),
        run: |bed| bind_waiting_pod(bed, &json!({})),
    },
    Attempt {
        name: "a path in an annotation's name",
        expected: ExpectedOutcome::Refused(&["metadata.annotations: Invalid value"]),
        run: |bed| {
            let mut pod = pod("t", &json!({SHARES_RESOURCE: 1}), "true");
            pod["metadata"]["annotations"] = json!({"../../etc.cleave.dev/placement": FORGED_PLACEMENT});
            expect_refusal(bed, &pod)
        },
    },
    Attempt {
        name: "removal of the gate by the pod's owner",
        expected: GATE_REFUSED,
        run: |bed| refusals([remove_gate(&bed.tenant, bed)]),
    },
    Attempt {
        name: "removal of the gate by a service account with the operator's name in another namespace",
        expected: GATE_REFUSED,
        run: |bed| {
            let token = create_owner(&bed.scope, OPERATOR_ACCOUNT)?;
            refusals([remove_gate(&Cluster::by_token(&token, None)?, bed)])
        },
    },
    Attempt {
        name: "removal of the gate by impersonation of the operator",
        expected: ExpectedOutcome::Refused(&["cannot impersonate"]),
        run: |bed| {
            let operator = format!("system:serviceaccount:{SYSTEM_NAMESPACE}:{OPERATOR_ACCOUNT}");
            refusals([remove_gate(&Cluster::by_token(&bed.token, Some(&operator))?, bed)])
        },
    },
    Attempt {
        name: "spec.nodeName",
        expected: ExpectedOutcome::Refused(&["spec.nodeName is set", "cleave.dev/allow=node-name"]),
        run: |bed| expect_refusal(bed, &pod_with_node_name()),
    },
    Attempt {
        name: "spec.nodeName on a pod that poses as a static pod's mirror",
        expected: ExpectedOutcome::Refused(&["spec.nodeName is set"]),
        run: |bed| {
            let mut pod = pod_with_node_name();
            pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
            expect_refusal(bed, &pod)
        },
    },
    Attempt {
        name: "paths as a pod's name",
        expected: ExpectedOutcome::Refused(&["metadata.name: Invalid value"]),
        run: |bed| {
            let named = |name: &str| create_in_dry_run(bed, &pod(name, &json!({SHARES_RESOURCE: 1}), "true"));
            refusals(["..", "../../cleave-system/x", "/run/cleave", "x\u{0}"].map(named))
        },
    },
    Attempt {
        name: "more shares than a GPU can have",
        expected: ExpectedOutcome::Refused(&["one GPU has at most 48"]),
        run: |bed| {
            refusals(
                ["49", "1k", "9223372036854775807"]
                    .map(|count| create_in_dry_run(bed, &pod_requesting(&json!({SHARES_RESOURCE: count})))),
            )
        },
    },
    Attempt {
        name: "a negative number of shares",
        expected: ExpectedOutcome::Refused(&["must be greater than or equal to 0"]),
        run: |bed| expect_refusal(bed, &pod_requesting(&json!({SHARES_RESOURCE: "-1"}))),
    },
    Attempt {
        name: "half a share",
        expected: ExpectedOutcome::Refused(&["must be an integer"]),
        run: |bed| {
            refusals(
                ["0.5", "500m"].map(|count| create_in_dry_run(bed, &pod_requesting(&json!({SHARES_RESOURCE: count})))),
            )
        },
    },
    Attempt {
        name: "shares in the requests, and none in the limits",
        expected: ExpectedOutcome::Refused(&["Limit must be set for non overcommitable resources"]),
        run: |bed| {
            let requests =
                |spec: &mut Value| spec["containers"][0]["resources"] = json!({"requests": {SHARES_RESOURCE: "1"}});
            expect_refusal(bed, &pod_with(&json!({}), requests))
        },
    },
    Attempt {
        name: "more shares by a resize of the pod",
        expected: ExpectedOutcome::Refused(&["only cpu and memory resources are mutable"]),
        run: |bed| {
            let mut containers = bed.scope.cluster.get(&path_of_waiting_pod(bed))?["spec"]["containers"].clone();
            for kind in ["limits", "requests"] {
                containers[0]["resources"][kind][SHARES_RESOURCE] = json!("5");
            }
            let change = json!({"spec": {"containers": containers}});
            refusals([bed.tenant.patch(&format!("{}/resize", path_of_waiting_pod(bed)), &change)])
        },
    },
    Attempt {
        name: "a volume with Cleave's directory of the node, where the namespace enforces the standard `baseline`",
        expected: ExpectedOutcome::Refused(&["violates PodSecurity", "hostPath volumes"]),
        run: mount_host_path,
    },
    Attempt {
        name: "an exception for the owner's own namespace",
        expected: ExpectedOutcome::Refused(&["cannot patch resource \"namespaces\""]),
        run: |bed| {
            let label = json!({"metadata": {"labels": {"cleave.dev/allow": "all"}}});
            refusals([bed.tenant.patch(&format!("/api/v1/namespaces/{}", bed.scope.namespace), &label)])
        },
    },
    Attempt {
        name: "deletion of the admission policies",
        expected: ExpectedOutcome::Refused(&["cannot delete resource \"validatingadmissionpolicybindings\""]),
        run: |bed| {
            refusals(["cleave-pods", "cleave-annotations", "cleave-gate"].map(|name| {
                let path = format!("{REGISTRATIONS_PATH}/validatingadmissionpolicybindings/{name}");
                bed.tenant.delete(&path, None).map(|()| Value::Null)
            }))
        },
    },
    Attempt {
        name: "a SharingPolicy by the owner of a namespace",
        expected: ExpectedOutcome::Refused(&["cannot create resource \"sharingpolicies\""]),
        run: |bed| {
            let policy = json!({
                "apiVersion": "cleave.dev/v1alpha1", "kind": "SharingPolicy", "metadata": {"name": "mine"},
                "spec": {"mode": "Whole"},
            });
            refusals([bed.tenant.create(POLICIES_PATH, &policy)])
        },
    },
    Attempt {
        name: "a GpuNode's spec and status by the owner of a namespace",
        expected: GPU_NODES_REFUSED,
        run: |bed| {
            let path = format!("{GPU_NODES_PATH}/{NODE}");
            refusals([
                bed.tenant.patch(&path, &json!({"spec": {"gpus": []}})),
                bed.tenant.patch(&format!("{path}/status"), &patch_without_gpus()),
            ])
        },
    },
    Attempt {
        name: "a token of the agent's account for the owner of a namespace",
        expected: ExpectedOutcome::Refused(&["cannot create resource \"serviceaccounts/token\""]),
        run: |bed| refusals([bed.tenant.token(SYSTEM_NAMESPACE, AGENT_ACCOUNT, None).map(Value::from)]),
    },
    Attempt {
        name: "the status of another node's GpuNode by an agent's token",
        expected: ExpectedOutcome::Refused(&["the Cleave agent of node node2 may write only GpuNode node2, not node1"]),
        run: |bed| {
            refusals([
                agent_client(bed, OTHER_NODE)?.patch(&format!("{GPU_NODES_PATH}/{NODE}/status"), &patch_without_gpus())
            ])
        },
    },
    Attempt {
        name: "labels, owners and finalizers of another node's GpuNode by an agent's token",
        expected: ExpectedOutcome::Refused(&["\"node1\" is forbidden"]),
        run: |bed| {
            let (agent, path) = (agent_client(bed, OTHER_NODE)?, format!("{GPU_NODES_PATH}/{NODE}"));
            refusals([agent.patch(&path, &metadata_patch()), agent.patch(&format!("{path}/status"), &metadata_patch())])
        },
    },
    Attempt {
        name: "the spec, labels, owners and finalizers of its own GpuNode through the status, by an agent's token",
        expected: ExpectedOutcome::NoEffect,
        run: change_own_metadata,
    },
    Attempt {
        name: "its own GpuNode's spec by an agent's token",
        expected: GPU_NODES_REFUSED,
        run: |bed| {
            refusals([
                agent_client(bed, NODE)?.patch(&format!("{GPU_NODES_PATH}/{NODE}"), &json!({"spec": {"gpus": []}}))
            ])
        },
    },
    Attempt {
        name: "a GpuNode's status by an agent's token that is bound to no pod",
        expected: ExpectedOutcome::Refused(&["bound to no node"]),
        run: |bed| {
            let token = bed.scope.cluster.token(SYSTEM_NAMESPACE, AGENT_ACCOUNT, None)?;
            let path = format!("{GPU_NODES_PATH}/{NODE}/status");
            refusals([Cluster::by_token(&token, None)?.patch(&path, &patch_without_gpus())])
        },
    },
    Attempt {
        name: "creation and deletion of GpuNodes by an agent's token",
        expected: ExpectedOutcome::Refused(&["resource \"gpunodes\" in API group \"cleave.dev\" at the cluster scope"]),
        run: |bed| {
            let agent = agent_client(bed, NODE)?;
            let made = json!({
                "apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "mine"},
                "spec": {"planId": "x", "gpus": []},
            });
            let deleted = agent.delete(&format!("{GPU_NODES_PATH}/{OTHER_NODE}"), None).map(|()| Value::Null);
            refusals([agent.create(GPU_NODES_PATH, &made), deleted])
        },
    },
    Attempt {
        name: "change, eviction and deletion of a tenant's pod by an agent's token",
        expected: ExpectedOutcome::Refused(&["resource \"pods"]),
        run: |bed| {
            let (agent, path) = (agent_client(bed, NODE)?, path_of_waiting_pod(bed));
            let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "waits"}});
            refusals([
                agent.patch(&path, &forged_annotation_patch()),
                agent.create(&format!("{path}/eviction"), &eviction),
                agent.delete(&path, Some(0)).map(|()| Value::Null),
            ])
        },
    },
];

/// Returns the API path of the pod `waits`.
fn path_of_waiting_pod(bed: &TestBed<'_>) -> String {
    bed.scope.pod_path("waits")
}

/// Requests the creation of a pod as the tenant, as a dry run.
fn create_in_dry_run(bed: &TestBed<'_>, pod: &Value) -> Result<Value> {
    bed.tenant.create(&format!("{}?dryRun=All", bed.pods_path()), pod)
}

/// Requests the creation of a pod as the tenant, as a dry run, and collects the refusal.
fn expect_refusal(bed: &TestBed<'_>, pod: &Value) -> Result<Outcome> {
    refusals([create_in_dry_run(bed, pod)])
}

/// Returns a pod with one container that has these limits.
fn pod_requesting(limits: &Value) -> Value {
    pod("t", limits, "true")
}

/// Does the same as [`expect_refusal`], with a pod that has a share and this environment variable.
fn expect_refusal_of_env(bed: &TestBed<'_>, env: &Value) -> Result<Outcome> {
    expect_refusal(bed, &pod_with_env(&json!({SHARES_RESOURCE: 1}), env))
}

/// Returns a pod with a share whose spec names the node.
fn pod_with_node_name() -> Value {
    pod_with(&json!({SHARES_RESOURCE: 1}), |spec| spec["nodeName"] = json!(NODE))
}

/// Returns a patch that sets the forged annotation.
fn forged_annotation_patch() -> Value {
    json!({"metadata": {"annotations": {PLACEMENT_ANNOTATION: FORGED_PLACEMENT}}})
}

/// Returns a patch that removes all GPUs from the status of a `GpuNode`.
fn patch_without_gpus() -> Value {
    json!({"status": {"gpus": []}})
}

/// Returns a patch that sets labels, finalizers and owner references.
fn metadata_patch() -> Value {
    json!({"metadata": {"labels": {"hostile": "yes"}, "finalizers": ["example.com/hostile"], "ownerReferences": []}})
}

/// Requests the removal of the placement gate from the pod `waits`. The other gate remains.
fn remove_gate(client: &Cluster, bed: &TestBed<'_>) -> Result<Value> {
    client.patch(&path_of_waiting_pod(bed), &json!({"spec": {"schedulingGates": [{"name": OTHER_GATE_NAME}]}}))
}

/// Returns a client that uses a token of the agent's pod on a node.
fn agent_client(bed: &TestBed<'_>, node: &str) -> Result<Cluster> {
    let cluster = bed.scope.cluster;
    let path = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?labelSelector=app.kubernetes.io/component=agent");
    let pods = cluster.list(&path)?;
    let is_agent = |pod: &&Value| pod["spec"]["nodeName"] == node && pod["metadata"]["deletionTimestamp"].is_null();
    let pod = pods.iter().find(is_agent).with_context(|| format!("no agent on {node}"))?;
    Cluster::by_token(&cluster.token(SYSTEM_NAMESPACE, AGENT_ACCOUNT, Some(pod))?, None)
}

/// Tries to bind the pod `waits`, with these annotations in the binding. The API server copies
/// annotations of a binding to the pod without evaluating admission policies on pods.
fn bind_waiting_pod(bed: &TestBed<'_>, annotations: &Value) -> Result<Outcome> {
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": {"name": "waits", "annotations": annotations},
        "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
    });
    let outcome = refusals([
        bed.tenant.create(&format!("{}/binding", path_of_waiting_pod(bed)), &binding),
        bed.tenant.create(&format!("/api/v1/namespaces/{}/bindings", bed.scope.namespace), &binding),
    ])?;
    let pod = bed.scope.cluster.get(&path_of_waiting_pod(bed))?;
    ensure!(
        pod["spec"]["nodeName"].is_null() && pod["metadata"]["annotations"][PLACEMENT_ANNOTATION].is_null(),
        "{pod}"
    );
    Ok(outcome)
}

/// Tries to change fields other than the status, through the status subresource and with an agent's
/// token.
fn change_own_metadata(bed: &TestBed<'_>) -> Result<Outcome> {
    let cluster = bed.scope.cluster;
    let before = cluster.gpu_node(NODE)?["metadata"].clone();
    let mut change = metadata_patch();
    change["spec"] = json!({"planId": "hostile"});
    agent_client(bed, NODE)?.patch(&format!("{GPU_NODES_PATH}/{NODE}/status"), &change)?;
    let after = cluster.gpu_node(NODE)?;
    for field in ["labels", "finalizers", "ownerReferences"] {
        let (before, after) = (&before[field], &after["metadata"][field]);
        if before != after {
            return Ok(Outcome::Succeeded(format!("{field} changed from {before} to {after}")));
        }
    }
    if text(&after["spec"]["planId"]) == "hostile" {
        return Ok(Outcome::Succeeded(after["spec"].to_string()));
    }
    Ok(Outcome::NoEffect("only the status can change".to_owned()))
}

/// Tries to mount a directory of the node as a volume, in a namespace that enforces the Pod
/// Security Standard `baseline`.
fn mount_host_path(bed: &TestBed<'_>) -> Result<Outcome> {
    let namespace = format!("/api/v1/namespaces/{}", bed.scope.namespace);
    let label = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}});
    bed.scope.cluster.patch(&namespace, &label)?;
    let pod = pod_with(&json!({}), |spec| {
        spec["volumes"] = json!([{"name": "run", "hostPath": {"path": "/run/cleave"}}]);
        spec["containers"][0]["volumeMounts"] = json!([{"name": "run", "mountPath": "/mine"}]);
    });
    // The API server applies the label after a short delay.
    wait_for("the API server applies the namespace's label", WAIT_TIMEOUT, || match expect_refusal(bed, &pod)? {
        outcome @ Outcome::Refused(_) => Ok(Some(outcome)),
        _ => Ok(None),
    })
}
