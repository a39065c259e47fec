//! Tests the replicas of the operator: on which nodes they run, and how the leader changes. Also
//! tests which changes are possible with the tokens of the operator and of the agents.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Refused, SYSTEM_NAMESPACE, Scope, pod, text, wait_until};
use serde_json::{Value, json};

use crate::chart::ChartSetting;
use crate::gate_admission::{GATE_NAME, GATE_VALUE, OTHER_GATE_NAME, REGISTRATIONS_PATH};
use crate::restarts::{component_pod, is_ready, leader_identity};
use crate::{HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE, ten_shares};

/// Returns the operator's pods that are not being deleted.
fn operator_pods(cluster: &Cluster) -> Result<Vec<Value>> {
    let path = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?labelSelector=app.kubernetes.io/component=operator");
    Ok(cluster.list(&path)?.into_iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null()).collect())
}

/// Waits until two operators are ready and one of them is the leader.
fn wait_for_two_operators(cluster: &Cluster) -> Result<()> {
    wait_until("two operators are ready and one leads", || {
        let (pods, leader) = (operator_pods(cluster)?, leader_identity(cluster)?);
        Ok(pods.len() == 2
            && pods.iter().all(is_ready)
            && pods.iter().any(|pod| text(&pod["metadata"]["name"]) == leader))
    })
}

#[test]
fn two_operators_run_and_a_drain_may_evict_one() -> Result<()> {
    let cluster = Cluster::connect()?;
    wait_for_two_operators(&cluster)?;
    let budget = format!("/apis/policy/v1/namespaces/{SYSTEM_NAMESPACE}/poddisruptionbudgets/cleave-operator");
    wait_until("the disruption budget allows one eviction", || {
        let status = cluster.get(&budget)?["status"].clone();
        Ok(status["disruptionsAllowed"] == 1 && status["expectedPods"] == 2)
    })?;
    let deployment =
        cluster.get(&format!("/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments/cleave-operator"))?;
    let spread = &deployment["spec"]["template"]["spec"]["topologySpreadConstraints"];
    ensure!(
        spread[0]["topologyKey"] == "kubernetes.io/hostname" && spread[0]["whenUnsatisfiable"] == "ScheduleAnyway",
        "{spread}"
    );
    Ok(())
}

#[test]
fn the_other_operator_takes_over_when_the_leader_is_killed() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = ten_shares(&cluster, "takeover")?;
    wait_for_two_operators(&cluster)?;
    scope.create_pod("before", &json!({SHARES_RESOURCE: 7}), HOLD_CLIENT_SCRIPT)?;
    scope.wait_until_running("before")?;
    let old = leader_identity(&cluster)?;
    cluster.delete(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{old}"), Some(0))?;
    // The new leader must also count the shares of a pod that the earlier leader has released.
    scope.create_pod("first", &json!({SHARES_RESOURCE: 7}), HOLD_CLIENT_SCRIPT)?;
    scope.create_pod("second", &json!({SHARES_RESOURCE: 7}), HOLD_CLIENT_SCRIPT)?;
    // The new leader is the other replica, or the replica that replaces the old leader.
    wait_until("another operator leads", || {
        let leader = leader_identity(&cluster)?;
        Ok(!leader.is_empty() && leader != old)
    })?;
    for name in ["first", "second"] {
        scope.wait_until_running(name)?;
    }
    // The old leader may have released the pods, because it is the leader until its container ends.
    wait_until("the new leader has marked its pod before it waits for its watch of pods", || {
        let leader = leader_identity(&cluster)?;
        let marked = cluster.get(&format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{leader}"))?;
        Ok(leader != old && marked["metadata"]["annotations"]["cleave.dev/leading-since"].is_string())
    })?;
    wait_for_two_operators(&cluster)
}

/// Checks that a policy forbids a request, with a message that contains this text.
fn check_forbidden(result: Result<Value>, expected: &str) -> Result<()> {
    let refused = result.err().with_context(|| format!("not refused: {expected}"))?.downcast::<Refused>()?;
    ensure!(refused.code == 403 && refused.message.contains(expected), "{refused} does not contain {expected:?}");
    Ok(())
}

#[test]
fn the_operators_token_changes_only_what_placement_needs() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "operator-token")?;
    let mut waits = pod("waits", &json!({SHARES_RESOURCE: 1}), "true");
    // Because of the other gate, the operator itself does not release the pod.
    waits["spec"]["schedulingGates"] = json!([{"name": OTHER_GATE_NAME}, {"name": GATE_NAME}]);
    cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &waits)?;
    let path = scope.pod_path("waits");
    let operator = Cluster::by_token(&cluster.token(SYSTEM_NAMESPACE, "cleave-operator", None)?, None)?;
    let only = "may change only the placement gate";
    let container = cluster.get(&path)?["spec"]["containers"][0].clone();
    let mut other = container.clone();
    other["image"] = json!("localhost/other:dev");
    let mut tolerations = cluster.get(&path)?["spec"]["tolerations"].as_array().cloned().unwrap_or_default();
    tolerations.push(json!({"key": "example.com/reserved", "operator": "Exists"}));
    for (change, field) in [
        (json!({"spec": {"containers": [other]}}), "spec.containers"),
        (json!({"spec": {"activeDeadlineSeconds": 1}}), "spec.activeDeadlineSeconds"),
        (json!({"spec": {"nodeSelector": {"a": "b"}}}), "spec.nodeSelector"),
        (json!({"spec": {"schedulingGates": [{"name": GATE_NAME}]}}), "spec.schedulingGates"),
        (json!({"spec": {"tolerations": tolerations}}), "spec.tolerations"),
        (json!({"metadata": {"labels": {"a": "b"}}}), "metadata.labels"),
        (json!({"metadata": {"annotations": {"a": "b"}}}), "metadata.annotations[a]"),
        (json!({"metadata": {"finalizers": ["example.com/hold"]}}), "metadata.finalizers"),
        (
            json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"}]}}),
            "metadata.ownerReferences",
        ),
    ] {
        check_forbidden(operator.patch(&path, &change), only)?;
        check_forbidden(operator.patch(&path, &change), field)?;
    }
    let status = format!("{path}/status");
    let conditions = cluster.get(&path)?["status"]["conditions"].clone();
    let with = |type_: &str| {
        let mut all = conditions.as_array().cloned().unwrap_or_default();
        all.push(json!({"type": type_, "status": "False", "reason": "Test", "message": "a test"}));
        json!({"status": {"conditions": all}})
    };
    check_forbidden(operator.patch(&status, &with("Ready")), "status.conditions[Ready]")?;
    check_forbidden(operator.patch(&status, &json!({"status": {"phase": "Failed"}})), "status.phase")?;
    operator.patch(&status, &with("cleave.dev/Placed"))?;
    // This patch contains the changes that a release makes to a pod.
    operator.patch(
        &path,
        &json!({
            "metadata": {"annotations": {"cleave.dev/placement": "{}"}},
            "spec": {
                "schedulingGates": [{"name": OTHER_GATE_NAME}],
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]},
                ]}}},
            },
        }),
    )?;
    let agent = component_pod(&cluster, "agent")?;
    let path = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{}?dryRun=All", text(&agent["metadata"]["name"]));
    let deleted = operator.delete(&path, None).err().context("the operator may delete an agent's pod")?;
    let refused = deleted.downcast::<Refused>()?;
    ensure!(refused.code == 403 && refused.message.contains("only pods of MPS hosts"), "{refused}");
    scope.delete_pod("waits", 0)
}

#[test]
fn the_operators_token_changes_only_taints_of_cleave_on_a_node() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _taints = ChartSetting::change("operator.taintUnhealthyNodes", true)?;
    let operator = Cluster::by_token(&cluster.token(SYSTEM_NAMESPACE, "cleave-operator", None)?, None)?;
    let path = format!("/api/v1/nodes/{NODE}?dryRun=All");
    // The API server applies new permissions and policies after a short delay.
    let annotation = json!({"metadata": {"annotations": {"cleave.dev/test": "a"}}});
    let only = "may change only the taints";
    wait_until("the policy is in effect", || Ok(check_forbidden(operator.patch(&path, &annotation), only).is_ok()))?;
    for (change, field) in [
        (annotation, "metadata.annotations[cleave.dev/test]"),
        (json!({"metadata": {"annotations": {"a": "b"}}}), "metadata.annotations[a]"),
        (json!({"metadata": {"labels": {"a": "b"}}}), "metadata.labels"),
        (json!({"spec": {"unschedulable": true}}), "spec.unschedulable"),
        (json!({"spec": {"taints": [{"key": "cleave.dev/unhealthy", "effect": "NoExecute"}]}}), "spec.taints"),
    ] {
        check_forbidden(operator.patch(&path, &change), field)?;
    }
    Ok(())
}

#[test]
fn the_operators_token_changes_only_ca_bundles_of_the_webhook() -> Result<()> {
    let cluster = Cluster::connect()?;
    let _gating = ChartSetting::change(GATE_VALUE, "webhook")?;
    let operator = Cluster::by_token(&cluster.token(SYSTEM_NAMESPACE, "cleave-operator", None)?, None)?;
    let webhook = format!("{REGISTRATIONS_PATH}/mutatingwebhookconfigurations/cleave-webhook");
    let path = format!("{webhook}?dryRun=All");
    let only = "may change only the CA bundles";
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    // The API server applies new permissions and policies after a short delay.
    wait_until("the policy is in effect", || Ok(check_forbidden(operator.patch(&path, &label), only).is_ok()))?;
    let before = cluster.get(&webhook)?["webhooks"].as_array().cloned().unwrap_or_default();
    ensure!(before.len() == 2, "not the gate and the preStop hook: {before:?}");
    let with = |change: &dyn Fn(&mut Vec<Value>)| {
        let mut webhooks = before.clone();
        change(&mut webhooks);
        json!({"webhooks": webhooks})
    };
    for (change, field) in [
        (label, "metadata.labels"),
        (json!({"metadata": {"annotations": {"cleave.dev/a": "b"}}}), "metadata.annotations[cleave.dev/a]"),
        (json!({"metadata": {"finalizers": ["example.com/hold"]}}), "metadata.finalizers"),
        (
            with(&|webhooks| webhooks[0]["clientConfig"] = json!({"url": "https://example.com/"})),
            "webhooks[gate.cleave.dev]",
        ),
        (
            with(&|webhooks| webhooks[1]["clientConfig"]["service"]["path"] = json!("/other")),
            "webhooks[pre-stop.cleave.dev]",
        ),
        (with(&|webhooks| webhooks[0]["rules"][0]["resources"] = json!(["secrets"])), "webhooks[gate.cleave.dev]"),
        (with(&|webhooks| webhooks[1]["failurePolicy"] = json!("Fail")), "webhooks[pre-stop.cleave.dev]"),
        (with(&|webhooks| webhooks[0]["matchConditions"] = json!([])), "webhooks[gate.cleave.dev]"),
        (with(&|webhooks| drop(webhooks.pop())), "webhooks"),
        (with(&|webhooks| webhooks.reverse()), "webhooks"),
        (
            with(&|webhooks| {
                let mut more = webhooks[0].clone();
                more["name"] = json!("more.cleave.dev");
                webhooks.push(more);
            }),
            "webhooks",
        ),
    ] {
        check_forbidden(operator.patch(&path, &change), only)?;
        check_forbidden(operator.patch(&path, &change), field)?;
    }
    // The operator itself adds and replaces CA bundles, so this change is permitted.
    let without_ca = with(&|webhooks| {
        webhooks[0]["clientConfig"].as_object_mut().map(|client| client.remove("caBundle"));
    });
    operator.patch(&path, &without_ca).map(drop)
}

#[test]
fn an_agents_token_writes_only_events_of_its_own_node_and_of_pods() -> Result<()> {
    let cluster = Cluster::connect()?;
    let scope = Scope::new(&cluster, "agent-events")?;
    let agent = component_pod(&cluster, "agent")?;
    let agent = Cluster::by_token(&cluster.token(SYSTEM_NAMESPACE, "cleave-agent", Some(&agent))?, None)?;
    let events = |namespace: &str| format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events?dryRun=All");
    let event = |reporter: &str, kind: &str, name: &str| {
        json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"generateName": "test-"},
            "eventTime": "2027-01-15T08:00:00.000000Z", "reportingController": "cleave-agent",
            "reportingInstance": reporter, "action": "Test", "reason": "Test", "type": "Normal",
            "regarding": {"apiVersion": "v1", "kind": kind, "name": name},
        })
    };
    let mut of_pod = event(NODE, "Pod", "p");
    of_pod["regarding"]["namespace"] = json!(scope.namespace);
    agent.create(&events(&scope.namespace), &of_pod)?;
    agent.create(&events("default"), &event(NODE, "Node", NODE))?;
    agent.create(&events("default"), &event(NODE, "GpuNode", NODE))?;
    let (reporter, about) = ("name cleave-agent and this node as their reporter", "only Events about this node");
    check_forbidden(agent.create(&events("default"), &event("node2", "Node", NODE)), reporter)?;
    check_forbidden(agent.create(&events("default"), &event(NODE, "Node", "node2")), about)?;
    check_forbidden(agent.create(&events("default"), &event(NODE, "Namespace", NODE)), about)?;
    let mut forged = event(NODE, "Node", NODE);
    forged["reportingController"] = json!("kubelet");
    check_forbidden(agent.create(&events("default"), &forged), reporter)
}
