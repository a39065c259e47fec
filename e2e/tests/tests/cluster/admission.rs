//! Tests that the admission policies refuse pods for which Cleave could not keep its promises, that
//! the messages explain the refusals, and that the policies do not affect other pods.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Refused, Scope, kubectl, pod, text, wait_until};
use serde_json::{Value, json};

use crate::gate::SLEEP_FOREVER_SCRIPT;
use crate::{NODE, SHARES_RESOURCE, ten_shares};

/// API path of the policies and their bindings.
const REGISTRATIONS_PATH: &str = "/apis/admissionregistration.k8s.io/v1";
/// Options of `kubectl` that impersonate the operator's service account. The group of
/// administrators grants all permissions, because these tests do not test the operator's role.
const AS_OPERATOR_ARGUMENTS: [&str; 2] =
    ["--as=system:serviceaccount:cleave-system:cleave-operator", "--as-group=system:masters"];

/// Returns a pod with these limits, after `change` has modified the pod's spec.
pub(crate) fn pod_with(limits: &Value, change: impl FnOnce(&mut Value)) -> Value {
    let mut pod = pod("t", limits, "true");
    change(&mut pod["spec"]);
    pod
}

/// Returns a pod with these limits and this environment variable.
pub(crate) fn pod_with_env(limits: &Value, env: &Value) -> Value {
    pod_with(limits, |spec| spec["containers"][0]["env"] = json!([env]))
}

/// Returns the environment variable that requests all GPUs from the container runtime.
pub(crate) fn env_for_all_gpus() -> Value {
    json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})
}

/// Returns an additional container without limits.
pub(crate) fn extra_container(name: &str, env: &Value) -> Value {
    json!({"name": name, "image": "localhost/cleave-client:dev", "imagePullPolicy": "Never", "env": [env]})
}

/// Requests the creation of a pod as a dry run. Returns the message of the refusal, or `None` if
/// the API server admits the pod.
fn refusal_message(scope: &Scope, pod: &Value) -> Result<Option<String>> {
    refusal_in_result(scope.cluster.create(&format!("/api/v1/namespaces/{}/pods?dryRun=All", scope.namespace), pod))
}

/// Returns the message of the API server's refusal, or `None` if the request succeeded.
fn refusal_in_result(result: Result<Value>) -> Result<Option<String>> {
    match result {
        Ok(_) => Ok(None),
        Err(error) => match error.downcast_ref::<Refused>() {
            Some(refused) => Ok(Some(refused.message.clone())),
            None => Err(error),
        },
    }
}

/// Checks that the API server refuses a pod, with a message that contains all of `texts`.
fn check_refused(scope: &Scope, pod: &Value, texts: &[&str]) -> Result<()> {
    let message = refusal_message(scope, pod)?.with_context(|| format!("admitted: {pod}"))?;
    ensure!(
        texts.iter().all(|part| message.contains(part)),
        "{pod} is refused with {message:?}, which does not contain {texts:?}"
    );
    Ok(())
}

/// Checks that the API server admits a pod.
fn check_admitted(scope: &Scope, pod: &Value) -> Result<()> {
    let message = refusal_message(scope, pod)?;
    ensure!(message.is_none(), "{pod} is refused: {message:?}");
    Ok(())
}

/// Sets the exceptions (`cleave.dev/allow`) of the namespace.
fn set_exceptions(scope: &Scope, allow: &str) -> Result<()> {
    let change = json!({"metadata": {"labels": {"cleave.dev/allow": allow}}});
    scope.cluster.patch(&format!("/api/v1/namespaces/{}", scope.namespace), &change).map(|_| ())
}

#[test]
fn the_admission_policies_have_no_type_errors_and_deny_requests() -> Result<()> {
    let cluster = Cluster::connect()?;
    for name in [
        "cleave-pods",
        "cleave-annotations",
        "cleave-operator-pods",
        "cleave-operator-deletes",
        "cleave-agent",
        "cleave-agent-events",
    ] {
        let path = format!("{REGISTRATIONS_PATH}/validatingadmissionpolicies/{name}");
        wait_until(&format!("{name} was type-checked"), || {
            let policy = cluster.get(&path)?;
            Ok(policy["status"]["observedGeneration"] == policy["metadata"]["generation"])
        })?;
        let policy = cluster.get(&path)?;
        let warnings = &policy["status"]["typeChecking"]["expressionWarnings"];
        ensure!(warnings.is_null(), "{name}: {warnings}");
        let binding = cluster.get(&format!("{REGISTRATIONS_PATH}/validatingadmissionpolicybindings/{name}"))?;
        ensure!(binding["spec"] == json!({"policyName": name, "validationActions": ["Deny"]}), "{}", binding["spec"]);
    }
    Ok(())
}

#[test]
fn a_pod_with_shares_cannot_set_what_cleave_sets() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "environment")?;
    let shares = json!({SHARES_RESOURCE: 2});
    let help = "cleave.dev/allow=environment";
    for (env, name) in [
        (json!({"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp"}), "CUDA_MPS_PIPE_DIRECTORY"),
        (
            json!({"name": "CUDA_MPS_LOG_DIRECTORY", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}),
            "CUDA_MPS_LOG_DIRECTORY",
        ),
        (env_for_all_gpus(), "NVIDIA_VISIBLE_DEVICES"),
        (json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}), "NVIDIA_VISIBLE_DEVICES"),
    ] {
        check_refused(&scope, &pod_with_env(&shares, &env), &["container \"main\" sets", name, help])?;
    }
    for resource in
        ["nvidia.com/gpu-10gb", "nvidia.com/gpu-timeslice", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"]
    {
        check_refused(
            &scope,
            &pod_with_env(&json!({resource: 1}), &env_for_all_gpus()),
            &["NVIDIA_VISIBLE_DEVICES", help],
        )?;
    }
    let sidecar =
        pod_with(&shares, |spec| spec["initContainers"] = json!([extra_container("first", &env_for_all_gpus())]));
    check_refused(&scope, &sidecar, &["container \"first\" sets NVIDIA_VISIBLE_DEVICES"])?;
    let asking = pod_with(&json!({}), |spec| {
        spec["initContainers"] = json!([extra_container("first", &env_for_all_gpus())]);
        spec["initContainers"][0]["resources"] = json!({"limits": shares});
    });
    check_refused(&scope, &asking, &["container \"first\" sets NVIDIA_VISIBLE_DEVICES"])
}

#[test]
fn an_ephemeral_container_cannot_set_what_cleave_sets() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "ephemeral")?;
    // No node advertises shares, so the pod remains Pending. A running pod is not necessary for
    // this test.
    scope.create_pod("waits", &json!({SHARES_RESOURCE: 1}), "true")?;
    let path = format!("{}/ephemeralcontainers", scope.pod_path("waits"));
    let debug = |env: &Value| json!({"spec": {"ephemeralContainers": [extra_container("debug", env)]}});
    let message = refusal_in_result(cluster.patch(&path, &debug(&env_for_all_gpus())))?
        .context("the ephemeral container was admitted")?;
    ensure!(message.contains("container \"debug\" sets NVIDIA_VISIBLE_DEVICES"), "{message}");
    cluster.patch(&path, &debug(&json!({"name": "A", "value": "b"})))?;
    Ok(())
}

#[test]
fn more_shares_than_any_gpu_has_are_refused() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "size")?;
    for (resource, most) in [(SHARES_RESOURCE, 48), ("nvidia.com/gpu-10gb", 48), ("nvidia.com/gpu-timeslice", 100)] {
        check_admitted(&scope, &pod("t", &json!({resource: most}), "true"))?;
        let asked = format!("requests {} {resource}", most + 1);
        let at_most = format!("one GPU has at most {most}");
        check_refused(&scope, &pod("t", &json!({resource: most + 1}), "true"), &[&asked, &at_most, "Request fewer"])?;
    }
    // A request of MIG instances or whole GPUs may be larger than any one GPU.
    check_admitted(&scope, &pod("t", &json!({"nvidia.com/mig-1g.10gb": 100, "nvidia.com/gpu": 100}), "true"))
}

#[test]
fn a_pod_with_shares_cannot_name_its_node() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "node-name")?;
    let on_node = |limits: Value| pod_with(&limits, |spec| spec["nodeName"] = json!(NODE));
    check_refused(
        &scope,
        &on_node(json!({SHARES_RESOURCE: 1})),
        &["spec.nodeName is set", "kubernetes.io/hostname", "cleave.dev/allow=node-name"],
    )?;
    check_admitted(&scope, &on_node(json!({})))?;
    check_admitted(
        &scope,
        &pod_with(&json!({SHARES_RESOURCE: 1}), |spec| spec["nodeSelector"] = json!({"kubernetes.io/hostname": NODE})),
    )
}

#[test]
fn only_the_operator_writes_annotations_below_cleave_dev() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "annotations")?;
    let annotated = |annotations: Value| {
        let mut pod = pod("t", &json!({}), "true");
        pod["metadata"]["annotations"] = annotations;
        pod
    };
    check_refused(
        &scope,
        &annotated(json!({"cleave.dev/slice": "x", "a": "b"})),
        &["(cleave.dev/slice)", "only the Cleave operator"],
    )?;
    check_refused(&scope, &annotated(json!({"placement.cleave.dev/slice": "x"})), &["cleave.dev/allow=annotations"])?;
    check_admitted(&scope, &annotated(json!({"cleave.dev.example.com/slice": "x", "notcleave.dev/slice": "y"})))?;
    scope.create_pod("t", &json!({SHARES_RESOURCE: 1}), "true")?;
    let annotate = |value: &Value| json!({"metadata": {"annotations": {"cleave.dev/slice": value}}});
    let path = scope.pod_path("t");
    for path in [path.clone(), format!("{path}/status")] {
        let message = refusal_in_result(cluster.patch(&path, &annotate(&json!("forged"))))?
            .context("a forged annotation was accepted")?;
        ensure!(message.contains("(cleave.dev/slice)"), "{message}");
    }
    kubectl(
        &[&AS_OPERATOR_ARGUMENTS[..], &["-n", &scope.namespace, "annotate", "pod", "t", "cleave.dev/slice=true"]]
            .concat(),
    )?;
    for value in [json!("changed"), Value::Null] {
        let message =
            refusal_in_result(cluster.patch(&path, &annotate(&value)))?.context("a changed annotation was accepted")?;
        ensure!(message.contains("(cleave.dev/slice)"), "{message}");
    }
    // Other annotations can still be changed.
    cluster.patch(&path, &json!({"metadata": {"annotations": {"mine": "yes"}}}))?;
    let now = cluster.get(&path)?;
    ensure!(text(&now["metadata"]["annotations"]["cleave.dev/slice"]) == "true", "{}", now["metadata"]);
    Ok(())
}

#[test]
fn the_operator_deletes_only_pods_that_request_gpus_and_only_with_a_grace_period() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "deletes")?;
    // The label must not matter, because users can write it.
    let labelled = json!({"metadata": {"labels": {"cleave.dev/capacity": "over-quota"}}});
    for (name, limits) in [("shares", json!({SHARES_RESOURCE: 1})), ("no-shares", json!({}))] {
        scope.create_pod_on_node(NODE, name, &limits, SLEEP_FOREVER_SCRIPT)?;
        scope.wait_until_running(name)?;
    }
    cluster.patch(&scope.pod_path("no-shares"), &labelled)?;
    let delete = |pod: &str, grace: &[&str]| {
        let request = ["-n", &scope.namespace, "delete", "pod", pod, "--dry-run=server"];
        kubectl(&[&AS_OPERATOR_ARGUMENTS[..], &request, grace].concat())
    };
    let (graceful, immediate): (&[&str], &[&str]) = (&["--grace-period=5"], &["--grace-period=0", "--force"]);
    delete("shares", graceful)?;
    // The operator requests one second for a pod whose own grace period is zero.
    let mut hasty = pod("hasty", &json!({SHARES_RESOURCE: 1}), SLEEP_FOREVER_SCRIPT);
    hasty["spec"]["terminationGracePeriodSeconds"] = json!(0);
    cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &hasty)?;
    scope.wait_until_running("hasty")?;
    delete("hasty", &["--grace-period=1"])?;
    for (pod, grace) in [("shares", immediate), ("no-shares", graceful)] {
        let error = delete(pod, grace).err().with_context(|| format!("{pod} was deleted with {grace:?}"))?;
        ensure!(format!("{error:#}").contains("the Cleave operator may delete only pods"), "{error:#}");
    }
    Ok(())
}

#[test]
fn pods_without_shares_are_not_affected() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "others")?;
    let anything = |limits: Value| {
        pod_with(&limits, |spec| {
            spec["nodeName"] = json!(NODE);
            spec["containers"][0]["env"] =
                json!([env_for_all_gpus(), {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp"}]);
        })
    };
    for limits in
        [json!({}), json!({"nvidia.com/gpu": 2}), json!({SHARES_RESOURCE: 0}), json!({"example.com/gpu-mps": 60})]
    {
        check_admitted(&scope, &anything(limits))?;
    }
    // CUDA images request all GPUs by default, so a container without shares is allowed to
    // explicitly request no GPU.
    for value in ["", "void", "none"] {
        let env = json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": value});
        let pod = pod_with(&json!({SHARES_RESOURCE: 1}), |spec| {
            if let Some(containers) = spec["containers"].as_array_mut() {
                containers.push(extra_container("log", &env));
            }
        });
        check_admitted(&scope, &pod)?;
    }
    Ok(())
}

#[test]
fn a_label_on_the_namespace_excepts_its_pods_from_the_named_rules() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "allow")?;
    let shares = json!({SHARES_RESOURCE: 1});
    let mut forged = pod("t", &shares, "true");
    forged["metadata"]["annotations"] = json!({"cleave.dev/slice": "x"});
    let broken = [
        ("environment", pod_with_env(&shares, &env_for_all_gpus())),
        ("size", pod("t", &json!({SHARES_RESOURCE: 49}), "true")),
        ("node-name", pod_with(&shares, |spec| spec["nodeName"] = json!(NODE))),
        ("annotations", forged),
    ];
    for allow in ["environment", "size", "node-name", "annotations", "environment.node-name", "all", "anything", ""] {
        set_exceptions(&scope, allow)?;
        for (word, pod) in &broken {
            let excepted = allow == "all" || allow.split('.').any(|allowed| allowed == *word);
            // The API server applies a changed label after a short delay.
            wait_until(&format!("{word} under {allow:?} is excepted: {excepted}"), || {
                let message = refusal_message(&scope, pod)?;
                ensure!(message.is_none() == excepted, "{message:?}");
                Ok(true)
            })?;
        }
    }
    Ok(())
}

#[test]
fn the_status_of_a_deployment_contains_the_reason_for_refused_pods() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "template")?;
    let mut template = pod_with_env(&json!({SHARES_RESOURCE: 1}), &env_for_all_gpus());
    template["metadata"] = json!({"labels": {"app": "t"}});
    template["spec"]["restartPolicy"] = json!("Always");
    let deployments = format!("/apis/apps/v1/namespaces/{}/deployments", scope.namespace);
    let deployment = json!({
        "metadata": {"name": "t"},
        "spec": {"selector": {"matchLabels": {"app": "t"}}, "template": template},
    });
    // The policies check pods, not pod templates, so the API server accepts the Deployment.
    cluster.create(&deployments, &deployment)?;
    wait_until("the Deployment's status has the reason", || {
        let conditions = cluster.get(&format!("{deployments}/t"))?["status"]["conditions"].clone();
        let failed =
            conditions.as_array().into_iter().flatten().find(|condition| condition["type"] == "ReplicaFailure");
        let failed = failed.with_context(|| conditions.to_string())?;
        let message = text(&failed["message"]);
        ensure!(message.contains("container \"main\" sets NVIDIA_VISIBLE_DEVICES"), "{message}");
        Ok(true)
    })?;
    ensure!(scope.pods()?.is_empty(), "pods were created");
    cluster.delete(&format!("{deployments}/t"), None)
}
