//! Pods that ask for shares are gated when they are created, by the policy and by the webhook
//! alike; nobody else notices.
//!
//! What is looked at is mostly what the API server answers to a dry run: pods as admitted, before
//! anybody opens a gate.

use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Refused, SYSTEM, Scope, hold_until, kubectl, pod, text, wait_until};
use serde_json::{Value, json};

use crate::chart::Setting;
use crate::{NODE, SHARES};

/// Our gate, and one of somebody else's.
pub(crate) const GATE: &str = "cleave.dev/placement";
pub(crate) const OTHER: &str = "example.com/hold";
pub(crate) const REGISTRATIONS: &str = "/apis/admissionregistration.k8s.io/v1";
/// The operator, as the policies know it; in the group of administrators, because what it may do is
/// not what is tested.
const OPERATOR: [&str; 2] = ["--as=system:serviceaccount:cleave-system:cleave-operator", "--as-group=system:masters"];

/// Value of the chart: what gates pods.
pub(crate) const GATING: &str = "admission.gate";

/// A pod as the API server admits it; it is not made.
pub(crate) fn admitted(scope: &Scope, pod: &Value) -> Result<Value> {
    scope.cluster.create(&format!("/api/v1/namespaces/{}/pods?dryRun=All", scope.namespace), pod)
}

/// The names of a pod's gates.
fn gates(pod: &Value) -> Vec<String> {
    pod["spec"]["schedulingGates"].as_array().into_iter().flatten().map(|gate| text(&gate["name"])).collect()
}

fn gated_by(pod: &mut Value, gates: &[&str]) {
    pod["spec"]["schedulingGates"] = gates.iter().map(|gate| json!({"name": gate})).collect();
}

fn asking(limits: &Value) -> Value {
    pod("t", limits, "true")
}

/// A pod that asks for nothing in its own container and for these in one that comes before it.
fn asking_before(limits: &Value, sidecar: bool) -> Value {
    let mut pod = asking(&json!({}));
    let mut first = pod["spec"]["containers"][0].clone();
    first["name"] = json!("first");
    first["resources"] = json!({"limits": limits});
    if sidecar {
        first["restartPolicy"] = json!("Always");
    }
    pod["spec"]["initContainers"] = json!([first]);
    pod
}

pub(crate) fn label(scope: &Scope, allow: &str) -> Result<()> {
    let change = json!({"metadata": {"labels": {"cleave.dev/allow": allow}}});
    scope.cluster.patch(&format!("/api/v1/namespaces/{}", scope.namespace), &change).map(drop)
}

/// The API server learns of policies, webhooks and labels a moment later.
fn soon(scope: &Scope, pod: &Value, expected: &[&str]) -> Result<()> {
    wait_until(&format!("{expected:?} on {pod}"), || {
        let gates = gates(&admitted(scope, pod)?);
        ensure!(gates == expected, "it has {gates:?}");
        Ok(true)
    })
}

fn has(scope: &Scope, pod: &Value, expected: &[&str]) -> Result<()> {
    let gates = gates(&admitted(scope, pod)?);
    ensure!(gates == expected, "{pod} has {gates:?}, not {expected:?}");
    Ok(())
}

/// Who is gated and who is not; the same by whatever means.
fn the_list(scope: &Scope) -> Result<()> {
    let two = json!({SHARES: 2});
    soon(scope, &asking(&two), &[GATE])?;
    for limits in [
        json!({SHARES: "1"}),
        json!({"nvidia.com/gpu-10gb": 1}),
        json!({"nvidia.com/gpu-timeslice": 1}),
        json!({"nvidia.com/gpu.shared": 1}),
        json!({"nvidia.com/mig-1g.10gb": 1}),
        json!({SHARES: 1, "nvidia.com/mig-1g.10gb": 1, "nvidia.com/gpu": 1}),
    ] {
        has(scope, &asking(&limits), &[GATE])?;
    }
    let mut both = asking(&two);
    both["spec"]["containers"][0]["resources"]["requests"] = two.clone();
    has(scope, &both, &[GATE])?;
    has(scope, &asking_before(&two, false), &[GATE])?;
    has(scope, &asking_before(&two, true), &[GATE])?;
    // Once, and with those of others.
    for (given, expected) in [(&[GATE][..], &[GATE][..]), (&[OTHER], &[OTHER, GATE]), (&[GATE, OTHER], &[GATE, OTHER])]
    {
        let mut pod = asking(&two);
        gated_by(&mut pod, given);
        has(scope, &pod, expected)?;
    }
    for limits in [
        json!({}),
        json!({"cpu": "10m"}),
        json!({"nvidia.com/gpu": 1}),
        json!({SHARES: 0}),
        json!({"example.com/gpu-mps": 1}),
    ] {
        has(scope, &asking(&limits), &[])?;
        has(scope, &asking_before(&limits, true), &[])?;
    }
    let mut pinned = asking(&json!({}));
    pinned["spec"]["nodeName"] = json!(NODE);
    has(scope, &pinned, &[])?;
    // It is refused for what is wrong with it, which is looked at later.
    let mut empty = asking(&two);
    empty["spec"]["containers"] = Value::Null;
    let refused = admitted(scope, &empty).err().context("it is admitted without containers")?.downcast::<Refused>()?;
    ensure!(refused.message.contains("spec.containers: Required value"), "{refused}");
    exceptions(scope)
}

fn exceptions(scope: &Scope) -> Result<()> {
    let two = json!({SHARES: 2});
    for (allow, expected) in [
        ("placement", &[][..]),
        ("size", &[GATE]),
        ("size.placement", &[]),
        ("placement.environment", &[]),
        ("placements", &[GATE]),
        ("all", &[]),
        ("", &[GATE]),
    ] {
        label(scope, allow)?;
        soon(scope, &asking(&two), expected)?;
    }
    // Where a pod may name its node, it has none to be gated for.
    let mut pinned = asking(&two);
    pinned["spec"]["nodeName"] = json!(NODE);
    label(scope, "node-name")?;
    wait_until("a pod may name its node", || Ok(gates(&admitted(scope, &pinned)?).is_empty()))?;
    label(scope, "")?;
    soon(scope, &asking(&two), &[GATE])
}

/// Only the operator takes the gate away, unless the namespace allows more.
fn it_stays(scope: &Scope) -> Result<()> {
    let pods = format!("/api/v1/namespaces/{}/pods", scope.namespace);
    let left = |gates: &[&str]| {
        let mut change = json!({"spec": {}});
        gated_by(&mut change, gates);
        change
    };
    let make = |name: &str, limits: &Value| {
        // The operator leaves a pod alone that waits for somebody else too.
        let mut pod = pod(name, limits, "true");
        gated_by(&mut pod, &[OTHER, GATE]);
        scope.cluster.create(&pods, &pod)
    };
    make("waits", &json!({SHARES: 1}))?;
    let path = scope.pod_path("waits");
    for change in [left(&[OTHER]), left(&[])] {
        let refused = scope.cluster.patch(&path, &change).err().context("the gate was taken away")?;
        let refused = refused.downcast::<Refused>()?;
        ensure!(refused.code == 403, "{refused}");
        for part in ["only the Cleave operator may remove the scheduling gate", GATE, "cleave.dev/allow=placement"] {
            ensure!(refused.message.contains(part), "{refused} does not say {part:?}");
        }
    }
    // What is not ours may change as before.
    scope.cluster.patch(&path, &json!({"metadata": {"labels": {"mine": "yes"}}}))?;
    let change = left(&[OTHER]).to_string();
    let args = ["-n", &scope.namespace, "patch", "pod", "waits", "--type=merge", "-p", &change];
    kubectl(&[&OPERATOR[..], &args].concat())?;
    ensure!(gates(&scope.cluster.get(&path)?) == [OTHER], "the operator could not");
    // On a pod that asks for nothing the gate promises nothing.
    make("plain", &json!({}))?;
    scope.cluster.patch(&scope.pod_path("plain"), &left(&[OTHER]))?;
    make("allowed", &json!({SHARES: 1}))?;
    label(scope, "placement")?;
    wait_until("the namespace's label counts", || {
        scope.cluster.patch(&scope.pod_path("allowed"), &left(&[OTHER])).map(|_| true)
    })?;
    label(scope, "")?;
    for name in ["waits", "plain", "allowed"] {
        scope.delete_pod(name, 0)?;
    }
    Ok(())
}

#[test]
fn a_policy_gates_pods_that_ask_for_shares() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "gate-policy")?;
    let gating = Setting::of(GATING, "policy")?;
    let path = format!("{REGISTRATIONS}/mutatingwebhookconfigurations/cleave-webhook");
    ensure!(cluster.find(&path)?.is_none(), "there is a webhook besides");
    let policy = cluster.get(&format!("{REGISTRATIONS}/mutatingadmissionpolicies/cleave-gate"))?;
    ensure!(policy["spec"]["failurePolicy"] == "Fail", "{}", policy["spec"]);
    the_list(&scope)?;
    it_stays(&scope)?;
    drop(gating);
    Ok(())
}

#[test]
fn the_policy_on_gates_was_type_checked() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _gating = Setting::of(GATING, "policy")?;
    let path = format!("{REGISTRATIONS}/validatingadmissionpolicies/cleave-gate");
    wait_until("it was type-checked", || {
        let policy = cluster.get(&path)?;
        Ok(policy["status"]["observedGeneration"] == policy["metadata"]["generation"])
    })?;
    let warnings = cluster.get(&path)?["status"]["typeChecking"]["expressionWarnings"].clone();
    ensure!(warnings.is_null(), "{warnings}");
    Ok(())
}

#[test]
fn without_a_gate_nothing_is_gated() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "gate-none")?;
    let _gating = Setting::of(GATING, "none")?;
    soon(&scope, &asking(&json!({SHARES: 2})), &[])?;
    // A gate that a user wrote is the user's.
    let mut pod = asking(&json!({SHARES: 2}));
    gated_by(&mut pod, &[OTHER, GATE]);
    scope.cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &pod)?;
    let change = json!({"spec": {"schedulingGates": [{"name": OTHER}]}});
    // The API server learns of each policy that is gone by itself, and of this one it may later
    // than of the one that gated.
    wait_until("a user takes the gate away", || {
        scope.cluster.patch(&scope.pod_path("t"), &change)?;
        Ok(true)
    })?;
    scope.delete_pod("t", 0)
}

#[test]
fn a_webhook_gates_the_same_pods() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "gate-webhook")?;
    let gating = Setting::of(GATING, "webhook")?;
    let policy = format!("{REGISTRATIONS}/mutatingadmissionpolicies/cleave-gate");
    ensure!(cluster.find(&policy)?.is_none(), "there is a policy besides");
    let path = format!("{REGISTRATIONS}/mutatingwebhookconfigurations/cleave-webhook");
    let webhook = &cluster.get(&path)?["webhooks"][0];
    ensure!(webhook["failurePolicy"] == "Fail" && webhook["sideEffects"] == "None", "{webhook}");
    the_list(&scope)?;
    it_stays(&scope)?;
    drop(gating);
    Ok(())
}

#[test]
fn the_webhooks_certificate_is_replaced_without_a_pod_refused() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "gate-certificate")?;
    let _gating = Setting::of(GATING, "webhook")?;
    let asking = asking(&json!({SHARES: 2}));
    soon(&scope, &asking, &[GATE])?;
    let secret = format!("/api/v1/namespaces/{SYSTEM}/secrets/cleave-webhook");
    let certificate = || Ok::<_, anyhow::Error>(text(&cluster.get(&secret)?["data"]["tls.crt"]));
    let before = certificate()?;
    ensure!(!before.is_empty(), "the Secret is empty");
    // What is no certificate is replaced, as one is that ends soon.
    cluster.patch(&secret, &json!({"data": {"tls.crt": "bm9uZQ=="}}))?;
    hold_until(
        "there is another certificate, and it is served",
        || {
            let now = certificate()?;
            Ok(now != before && now != "bm9uZQ==")
        },
        || match admitted(&scope, &asking) {
            Ok(pod) => Ok((gates(&pod) != [GATE]).then(|| format!("{:?}", gates(&pod)))),
            Err(error) => Ok(Some(format!("refused: {error:#}"))),
        },
    )?;
    // A CA that somebody took out of the configuration comes back.
    let path = format!("{REGISTRATIONS}/mutatingwebhookconfigurations/cleave-webhook");
    let change = json!([{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]).to_string();
    kubectl(&["patch", "mutatingwebhookconfiguration", "cleave-webhook", "--type=json", "-p", &change])?;
    wait_until("the CA is back", || Ok(cluster.get(&path)?["webhooks"][0]["clientConfig"]["caBundle"].is_string()))?;
    soon(&scope, &asking, &[GATE])
}
