//! Tests that pods that request GPUs are gated at their creation, and that other pods are not
//! affected. The admission policy and the webhook must behave in the same way.
//!
//! Most tests create pods in dry runs. They check the pod that the API server admits, which the
//! operator cannot release.

use anyhow::{Context, Result, ensure};
use cleave_e2e::{
    Cluster, KubernetesVersion, Refused, SYSTEM_NAMESPACE, Scope, kubectl, pod, report_skipped, text, wait_until,
    wait_without_violation,
};
use serde_json::{Value, json};

use crate::chart::ChartSetting;
use crate::{NODE, SHARES_RESOURCE};

/// Cleave's placement gate.
pub(crate) const GATE_NAME: &str = "cleave.dev/placement";
/// The name of a scheduling gate of another controller.
pub(crate) const OTHER_GATE_NAME: &str = "example.com/hold";
pub(crate) const REGISTRATIONS_PATH: &str = "/apis/admissionregistration.k8s.io/v1";
/// Options of `kubectl` that impersonate the operator's service account. The group of
/// administrators grants all permissions, because these tests do not test the operator's role.
const AS_OPERATOR_ARGUMENTS: [&str; 2] =
    ["--as=system:serviceaccount:cleave-system:cleave-operator", "--as-group=system:masters"];

/// The chart value that selects the mechanism that adds the placement gate to pods.
pub(crate) const GATE_VALUE: &str = "admission.gate";

/// Returns whether the cluster has no `MutatingAdmissionPolicy`. If so, reports that the running
/// test is skipped.
pub(crate) fn skips_without_mutating_policies(cluster: &Cluster) -> Result<bool> {
    let skipped = !cluster.version()?.has_mutating_policies();
    if skipped {
        let first = KubernetesVersion::MUTATING_POLICIES;
        report_skipped(&format!("MutatingAdmissionPolicy needs Kubernetes {first}; another test covers the webhook"))?;
    }
    Ok(skipped)
}

/// Requests the creation of a pod as a dry run, and returns the pod that the API server admits.
pub(crate) fn admit_in_dry_run(scope: &Scope, pod: &Value) -> Result<Value> {
    scope.cluster.create(&format!("/api/v1/namespaces/{}/pods?dryRun=All", scope.namespace), pod)
}

/// Returns the names of a pod's scheduling gates.
fn gate_names(pod: &Value) -> Vec<String> {
    pod["spec"]["schedulingGates"].as_array().into_iter().flatten().map(|gate| text(&gate["name"])).collect()
}

/// Sets a pod's scheduling gates.
fn set_gates(pod: &mut Value, gates: &[&str]) {
    pod["spec"]["schedulingGates"] = gates.iter().map(|gate| json!({"name": gate})).collect();
}

/// Returns a pod with one container that has these limits.
fn pod_requesting(limits: &Value) -> Value {
    pod("t", limits, "true")
}

/// Returns a pod whose init container or sidecar has these limits. The main container has no
/// limits.
fn pod_requesting_in_init_container(limits: &Value, sidecar: bool) -> Value {
    let mut pod = pod_requesting(&json!({}));
    let mut first = pod["spec"]["containers"][0].clone();
    first["name"] = json!("first");
    first["resources"] = json!({"limits": limits});
    if sidecar {
        first["restartPolicy"] = json!("Always");
    }
    pod["spec"]["initContainers"] = json!([first]);
    pod
}

/// Sets the exceptions (`cleave.dev/allow`) of the namespace.
pub(crate) fn set_exceptions(scope: &Scope, allow: &str) -> Result<()> {
    let change = json!({"metadata": {"labels": {"cleave.dev/allow": allow}}});
    scope.cluster.patch(&format!("/api/v1/namespaces/{}", scope.namespace), &change).map(drop)
}

/// Waits until the API server admits a pod with these gates. The API server applies changes of
/// policies, webhooks and labels after a short delay.
fn wait_for_gates(scope: &Scope, pod: &Value, expected: &[&str]) -> Result<()> {
    wait_until(&format!("{expected:?} on {pod}"), || {
        let gates = gate_names(&admit_in_dry_run(scope, pod)?);
        ensure!(gates == expected, "the pod has {gates:?}");
        Ok(true)
    })
}

/// Checks that the API server admits a pod with these gates.
fn check_gates(scope: &Scope, pod: &Value, expected: &[&str]) -> Result<()> {
    let gates = gate_names(&admit_in_dry_run(scope, pod)?);
    ensure!(gates == expected, "{pod} has {gates:?}, not {expected:?}");
    Ok(())
}

/// Checks that pods that request GPUs receive the gate, and that other pods do not. Both mechanisms
/// follow the same rules.
fn check_which_pods_are_gated(scope: &Scope) -> Result<()> {
    let two = json!({SHARES_RESOURCE: 2});
    wait_for_gates(scope, &pod_requesting(&two), &[GATE_NAME])?;
    for limits in [
        json!({SHARES_RESOURCE: "1"}),
        json!({"nvidia.com/gpu-10gb": 1}),
        json!({"nvidia.com/gpu-timeslice": 1}),
        json!({"nvidia.com/gpu.shared": 1}),
        json!({"nvidia.com/mig-1g.10gb": 1}),
        json!({SHARES_RESOURCE: 1, "nvidia.com/mig-1g.10gb": 1, "nvidia.com/gpu": 1}),
        json!({"nvidia.com/gpu": 1}),
    ] {
        check_gates(scope, &pod_requesting(&limits), &[GATE_NAME])?;
    }
    let mut both = pod_requesting(&two);
    both["spec"]["containers"][0]["resources"]["requests"] = two.clone();
    check_gates(scope, &both, &[GATE_NAME])?;
    check_gates(scope, &pod_requesting_in_init_container(&two, false), &[GATE_NAME])?;
    check_gates(scope, &pod_requesting_in_init_container(&two, true), &[GATE_NAME])?;
    // The gate is added only once, and other gates remain.
    for (given, expected) in [
        (&[GATE_NAME][..], &[GATE_NAME][..]),
        (&[OTHER_GATE_NAME], &[OTHER_GATE_NAME, GATE_NAME]),
        (&[GATE_NAME, OTHER_GATE_NAME], &[GATE_NAME, OTHER_GATE_NAME]),
    ] {
        let mut pod = pod_requesting(&two);
        set_gates(&mut pod, given);
        check_gates(scope, &pod, expected)?;
    }
    for limits in [
        json!({}),
        json!({"cpu": "10m"}),
        json!({"nvidia.com/gpu": 0}),
        json!({SHARES_RESOURCE: 0}),
        json!({"example.com/gpu-mps": 1}),
    ] {
        check_gates(scope, &pod_requesting(&limits), &[])?;
        check_gates(scope, &pod_requesting_in_init_container(&limits, true), &[])?;
    }
    let mut pinned = pod_requesting(&json!({}));
    pinned["spec"]["nodeName"] = json!(NODE);
    check_gates(scope, &pinned, &[])?;
    // The API server's validation, not the policy, refuses an invalid pod.
    let mut empty = pod_requesting(&two);
    empty["spec"]["containers"] = Value::Null;
    let refused = admit_in_dry_run(scope, &empty)
        .err()
        .context("a pod without containers was admitted")?
        .downcast::<Refused>()?;
    ensure!(refused.message.contains("spec.containers: Required value"), "{refused}");
    check_tolerations(scope)?;
    check_exceptions(scope)
}

/// Checks which pods receive a toleration of taints with the key `nvidia.com/gpu`.
fn check_tolerations(scope: &Scope) -> Result<()> {
    let added = json!({"key": "nvidia.com/gpu", "operator": "Exists"});
    let other = json!({"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"});
    let own = json!({"key": "nvidia.com/gpu", "operator": "Equal", "value": "team-a"});
    let all = json!({"operator": "Exists"});
    let (shares, whole, plain) = (json!({SHARES_RESOURCE: 1}), json!({"nvidia.com/gpu": 1}), json!({"cpu": "10m"}));
    for (limits, given, expected) in [
        (&shares, vec![], vec![&added]),
        (&shares, vec![&other], vec![&other, &added]),
        (&shares, vec![&own], vec![&own]),
        (&shares, vec![&all], vec![&all]),
        (&whole, vec![], vec![]),
        (&plain, vec![], vec![]),
    ] {
        let mut pod = pod_requesting(limits);
        if !given.is_empty() {
            pod["spec"]["tolerations"] = json!(given);
        }
        let admitted = admit_in_dry_run(scope, &pod)?;
        let tolerations = admitted["spec"]["tolerations"].as_array().cloned().unwrap_or_default();
        // Ignore the tolerations that the API server itself adds.
        let default = |toleration: &Value| text(&toleration["key"]).starts_with("node.kubernetes.io/");
        let tolerations: Vec<&Value> = tolerations.iter().filter(|toleration| !default(toleration)).collect();
        ensure!(tolerations == expected, "{limits} with {given:?}: {tolerations:?}");
    }
    Ok(())
}

/// Checks which exceptions exempt a namespace's pods from the placement gate.
fn check_exceptions(scope: &Scope) -> Result<()> {
    let two = json!({SHARES_RESOURCE: 2});
    for (allow, expected) in [
        ("placement", &[][..]),
        ("size", &[GATE_NAME]),
        ("size.placement", &[]),
        ("placement.environment", &[]),
        ("placements", &[GATE_NAME]),
        ("all", &[]),
        ("", &[GATE_NAME]),
    ] {
        set_exceptions(scope, allow)?;
        wait_for_gates(scope, &pod_requesting(&two), expected)?;
    }
    // The scheduler ignores a pod whose spec names a node, so the pod is not gated.
    let mut pinned = pod_requesting(&two);
    pinned["spec"]["nodeName"] = json!(NODE);
    set_exceptions(scope, "node-name")?;
    wait_until("a pod may name its node", || Ok(gate_names(&admit_in_dry_run(scope, &pinned)?).is_empty()))?;
    set_exceptions(scope, "")?;
    wait_for_gates(scope, &pod_requesting(&two), &[GATE_NAME])
}

/// Checks that only the operator removes the gate from a pod that requests GPUs, unless the
/// namespace has an exception.
fn check_gate_is_protected(scope: &Scope) -> Result<()> {
    let pods = format!("/api/v1/namespaces/{}/pods", scope.namespace);
    let keep = |gates: &[&str]| {
        let mut change = json!({"spec": {}});
        set_gates(&mut change, gates);
        change
    };
    let create = |name: &str, limits: &Value| {
        // Because of the other gate, the operator does not release the pod.
        let mut pod = pod(name, limits, "true");
        set_gates(&mut pod, &[OTHER_GATE_NAME, GATE_NAME]);
        scope.cluster.create(&pods, &pod)
    };
    create("waits", &json!({SHARES_RESOURCE: 1}))?;
    let path = scope.pod_path("waits");
    for change in [keep(&[OTHER_GATE_NAME]), keep(&[])] {
        let refused = scope.cluster.patch(&path, &change).err().context("the gate was removed")?;
        let refused = refused.downcast::<Refused>()?;
        ensure!(refused.code == 403, "{refused}");
        for part in ["only the Cleave operator may remove the scheduling gate", GATE_NAME, "cleave.dev/allow=placement"]
        {
            ensure!(refused.message.contains(part), "{refused} does not contain {part:?}");
        }
    }
    // Users can still change other fields of the pod.
    scope.cluster.patch(&path, &json!({"metadata": {"labels": {"mine": "yes"}}}))?;
    let change = keep(&[OTHER_GATE_NAME]).to_string();
    let args = ["-n", &scope.namespace, "patch", "pod", "waits", "--type=merge", "-p", &change];
    kubectl(&[&AS_OPERATOR_ARGUMENTS[..], &args].concat())?;
    ensure!(gate_names(&scope.cluster.get(&path)?) == [OTHER_GATE_NAME], "the operator failed to remove the gate");
    // Any user who may update pods can remove the gate from a pod that requests no GPU.
    create("plain", &json!({}))?;
    scope.cluster.patch(&scope.pod_path("plain"), &keep(&[OTHER_GATE_NAME]))?;
    create("allowed", &json!({SHARES_RESOURCE: 1}))?;
    set_exceptions(scope, "placement")?;
    wait_until("the API server applies the namespace's label", || {
        scope.cluster.patch(&scope.pod_path("allowed"), &keep(&[OTHER_GATE_NAME])).map(|_| true)
    })?;
    set_exceptions(scope, "")?;
    for name in ["waits", "plain", "allowed"] {
        scope.delete_pod(name, 0)?;
    }
    Ok(())
}

#[test]
fn the_admission_policy_gates_pods_that_request_shares() -> Result<()> {
    let cluster = Cluster::connect()?;
    if skips_without_mutating_policies(&cluster)? {
        return Ok(());
    }
    let scope = Scope::new(&cluster, "gate-policy")?;
    let gating = ChartSetting::change(GATE_VALUE, "policy")?;
    let path = format!("{REGISTRATIONS_PATH}/mutatingwebhookconfigurations/cleave-webhook");
    ensure!(cluster.find(&path)?.is_none(), "the webhook is installed too");
    let policy = cluster.get(&format!("{REGISTRATIONS_PATH}/mutatingadmissionpolicies/cleave-gate"))?;
    ensure!(policy["spec"]["failurePolicy"] == "Fail", "{}", policy["spec"]);
    check_which_pods_are_gated(&scope)?;
    check_gate_is_protected(&scope)?;
    drop(gating);
    Ok(())
}

#[test]
fn the_policy_that_protects_gates_has_no_type_errors() -> Result<()> {
    let cluster = Cluster::connect()?;
    // With both mechanisms, the same policy protects the gate.
    let mechanism = if cluster.version()?.has_mutating_policies() { "policy" } else { "webhook" };
    let _gating = ChartSetting::change(GATE_VALUE, mechanism)?;
    let path = format!("{REGISTRATIONS_PATH}/validatingadmissionpolicies/cleave-gate");
    wait_until("the policy was type-checked", || {
        let policy = cluster.get(&path)?;
        Ok(policy["status"]["observedGeneration"] == policy["metadata"]["generation"])
    })?;
    let warnings = cluster.get(&path)?["status"]["typeChecking"]["expressionWarnings"].clone();
    ensure!(warnings.is_null(), "{warnings}");
    Ok(())
}

#[test]
fn with_gating_off_no_pod_is_gated() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "gate-none")?;
    let _gating = ChartSetting::change(GATE_VALUE, "none")?;
    wait_for_gates(&scope, &pod_requesting(&json!({SHARES_RESOURCE: 2})), &[])?;
    // Users can remove gates that they have set themselves.
    let mut pod = pod_requesting(&json!({SHARES_RESOURCE: 2}));
    set_gates(&mut pod, &[OTHER_GATE_NAME, GATE_NAME]);
    scope.cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &pod)?;
    let change = json!({"spec": {"schedulingGates": [{"name": OTHER_GATE_NAME}]}});
    // The API server observes the deletion of each policy separately. The policy that protects the
    // gate may therefore remain in effect longer than the policy that adds the gate.
    wait_until("a user removes the gate", || {
        scope.cluster.patch(&scope.pod_path("t"), &change)?;
        Ok(true)
    })?;
    scope.delete_pod("t", 0)
}

#[test]
fn the_webhook_gates_the_same_pods() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "gate-webhook")?;
    let gating = ChartSetting::change(GATE_VALUE, "webhook")?;
    let policy = format!("{REGISTRATIONS_PATH}/mutatingadmissionpolicies/cleave-gate");
    ensure!(cluster.find(&policy)?.is_none(), "the admission policy is installed too");
    let path = format!("{REGISTRATIONS_PATH}/mutatingwebhookconfigurations/cleave-webhook");
    let webhook = &cluster.get(&path)?["webhooks"][0];
    ensure!(webhook["failurePolicy"] == "Fail" && webhook["sideEffects"] == "None", "{webhook}");
    check_which_pods_are_gated(&scope)?;
    check_gate_is_protected(&scope)?;
    drop(gating);
    Ok(())
}

#[test]
fn replacing_the_webhooks_certificate_refuses_no_pod() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "gate-certificate")?;
    let _gating = ChartSetting::change(GATE_VALUE, "webhook")?;
    let pod = pod_requesting(&json!({SHARES_RESOURCE: 2}));
    wait_for_gates(&scope, &pod, &[GATE_NAME])?;
    let secret = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/cleave-webhook");
    let certificate = || Ok::<_, anyhow::Error>(text(&cluster.get(&secret)?["data"]["tls.crt"]));
    let before = certificate()?;
    ensure!(!before.is_empty(), "the Secret is empty");
    // The operator replaces an invalid certificate, as it replaces a certificate that expires soon.
    cluster.patch(&secret, &json!({"data": {"tls.crt": "bm9uZQ=="}}))?;
    wait_without_violation(
        "the Secret has another certificate",
        || {
            let now = certificate()?;
            Ok(now != before && now != "bm9uZQ==")
        },
        || match admit_in_dry_run(&scope, &pod) {
            Ok(admitted) => {
                Ok((gate_names(&admitted) != [GATE_NAME]).then(|| format!("gates: {:?}", gate_names(&admitted))))
            }
            Err(error) => Ok(Some(format!("refused: {error:#}"))),
        },
    )?;
    // If the CA bundle is removed, the operator restores it.
    let path = format!("{REGISTRATIONS_PATH}/mutatingwebhookconfigurations/cleave-webhook");
    let change = json!([{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]).to_string();
    kubectl(&["patch", "mutatingwebhookconfiguration", "cleave-webhook", "--type=json", "-p", &change])?;
    wait_until(
        "the CA is restored",
        || Ok(cluster.get(&path)?["webhooks"][0]["clientConfig"]["caBundle"].is_string()),
    )?;
    wait_for_gates(&scope, &pod, &[GATE_NAME])
}
