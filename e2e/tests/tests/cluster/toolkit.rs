//! Tests Cleave with NVIDIA's container toolkit on node1. `e2e/toolkit/test` runs these tests once
//! for each layout. The other tests cannot use this cluster, because node1 has two H100-80 and an
//! installed driver.
use anyhow::{Context, Result, ensure};
use cleave_e2e::{Cluster, Scope, pod, wait_until};
use serde_json::{Value, json};

use crate::shares::limits_of_shares;
use crate::{HOLD_CLIENT_SCRIPT, NODE, SHARES_RESOURCE};

const GPU_RESOURCE: &str = "nvidia.com/gpu";
const SLEEP_SCRIPT: &str = "exec sleep infinity";
/// Script that prints the device nodes of GPUs and the files of the driver's library libcuda that a
/// container sees.
const LIST_DRIVER_FILES_SCRIPT: &str = "ls /dev | grep -E '^nvidia[0-9]+$' || true; find / -xdev -name 'libcuda.so*' 2>/dev/null; \
                           grep -o '/[^ ]*libcuda.so[^ ]*' /proc/mounts || true";

/// How the cluster uses the toolkit. `e2e/toolkit/test` describes the layouts.
struct ToolkitLayout {
    /// The `RuntimeClass` of pods with GPUs.
    class: Option<&'static str>,
    /// The `RuntimeClass` with which NVIDIA's runtime handles a pod. `None` for the default.
    nvidia: Option<&'static str>,
}

impl ToolkitLayout {
    fn from_environment() -> Result<Self> {
        let name = std::env::var("TOOLKIT_LAYOUT").context("run e2e/toolkit/test, which sets TOOLKIT_LAYOUT")?;
        match name.as_str() {
            "default" | "cdi" => Ok(Self { class: None, nvidia: None }),
            "class" => Ok(Self { class: Some("nvidia"), nvidia: Some("nvidia") }),
            "operator" => Ok(Self { class: None, nvidia: Some("nvidia") }),
            _ => anyhow::bail!("there is no layout {name}"),
        }
    }
}

/// Creates a pod with a `RuntimeClass`, or without a `RuntimeClass` if `class` is `None`.
fn create_pod_with_class(scope: &Scope, cluster: &Cluster, pod: &Value, class: Option<&str>) -> Result<Value> {
    let mut pod = pod.clone();
    if let Some(class) = class {
        pod["spec"]["runtimeClassName"] = json!(class);
    }
    cluster.create(&format!("/api/v1/namespaces/{}/pods", scope.namespace), &pod)
}

/// Creates a namespace, and a policy that divides one GPU into ten shares. The other GPU remains a
/// whole GPU.
fn scope_with_one_divided_gpu<'a>(cluster: &'a Cluster, name: &str) -> Result<Scope<'a>> {
    let scope = Scope::new(cluster, name)?;
    let mps = json!({"units": 10, "threads": "Strict"});
    scope.create_policy("shares", &json!({"mode": "Mps", "mps": mps, "gpus": {"indices": [0]}}))?;
    wait_until("the node advertises ten shares and one GPU", || {
        Ok(cluster.allocatable(NODE, SHARES_RESOURCE)? == 10 && cluster.allocatable(NODE, GPU_RESOURCE)? == 1)
    })?;
    Ok(scope)
}

/// Returns whether a container sees the driver's library libcuda, and the names of the GPU device
/// nodes that the container sees.
fn visible_driver_and_gpus(scope: &Scope, name: &str) -> Result<(bool, Vec<String>)> {
    let listed = scope.exec_in_pod(name, &["sh", "-c", LIST_DRIVER_FILES_SCRIPT])?;
    let gpus = listed.lines().filter(|line| line.starts_with("nvidia")).map(str::to_owned).collect();
    Ok((listed.contains("libcuda.so"), gpus))
}

#[test]
#[ignore = "e2e/toolkit/test runs it"]
fn containers_get_the_driver_and_only_their_own_gpus() -> Result<()> {
    let (layout, cluster) = (ToolkitLayout::from_environment()?, Cluster::connect()?);
    let scope = scope_with_one_divided_gpu(&cluster, "toolkit")?;
    create_pod_with_class(
        &scope,
        &cluster,
        &pod("shares", &json!({SHARES_RESOURCE: 3}), HOLD_CLIENT_SCRIPT),
        layout.class,
    )?;
    create_pod_with_class(&scope, &cluster, &pod("whole", &json!({GPU_RESOURCE: 1}), SLEEP_SCRIPT), layout.class)?;
    create_pod_with_class(&scope, &cluster, &pod("nothing", &json!({}), SLEEP_SCRIPT), layout.class)?;
    for name in ["shares", "whole", "nothing"] {
        scope.wait_until_running(name)?;
    }
    let report = scope.client_report("shares")?;
    let (sms, _) = limits_of_shares(3, 1);
    ensure!(report["viaMps"] == true && report["sms"] == sms.0, "the pod with shares reports {report}");
    for (name, node) in [("shares", "nvidia0"), ("whole", "nvidia1")] {
        let (driver, gpus) = visible_driver_and_gpus(&scope, name)?;
        ensure!(driver && gpus == [node], "{name}: sees the driver: {driver}; GPUs: {gpus:?}");
    }
    let (driver, gpus) = visible_driver_and_gpus(&scope, "nothing")?;
    ensure!(!driver && gpus.is_empty(), "a pod without GPUs sees the driver: {driver}; GPUs: {gpus:?}");
    Ok(())
}

#[test]
#[ignore = "e2e/toolkit/test runs it"]
fn a_pod_without_shares_cannot_set_visible_devices() -> Result<()> {
    let (layout, cluster) = (ToolkitLayout::from_environment()?, Cluster::connect()?);
    let scope = Scope::new(&cluster, "visible")?;
    let with_env = |name: &str, env: Value, from: Value| {
        let mut pod = pod(name, &json!({}), SLEEP_SCRIPT);
        pod["spec"]["containers"][0]["env"] = env;
        pod["spec"]["containers"][0]["envFrom"] = from;
        pod
    };
    let all = with_env("all", json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]), json!([]));
    let field = json!({"fieldRef": {"fieldPath": "metadata.labels['devices']"}});
    let from_field = with_env("field", json!([{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": field}]), json!([]));
    let from_map = with_env("map", json!([]), json!([{"prefix": "NVIDIA_", "configMapRef": {"name": "m"}}]));
    let mut whole = all.clone();
    whole["spec"]["containers"][0]["resources"] = json!({"limits": {GPU_RESOURCE: 1}});
    for (what, pod) in
        [("a value", &all), ("a field", &from_field), ("a ConfigMap", &from_map), ("a whole GPU", &whole)]
    {
        let refused = create_pod_with_class(&scope, &cluster, pod, layout.nvidia).map(|_| ());
        let message = refused.as_ref().map_or_else(|error| format!("{error:#}"), |()| String::new());
        ensure!(message.contains("sets NVIDIA_VISIBLE_DEVICES"), "{what}: {refused:?}");
    }
    let void = with_env("void", json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]), json!([]));
    create_pod_with_class(&scope, &cluster, &void, layout.nvidia)?;
    let plain =
        with_env("plain", json!([]), json!([{"prefix": "APP_", "configMapRef": {"name": "m", "optional": true}}]));
    create_pod_with_class(&scope, &cluster, &plain, layout.nvidia)?;
    Ok(())
}

/// Tests the access that the admission policy prevents. An environment variable of an image grants
/// the same access.
#[test]
#[ignore = "e2e/toolkit/test runs it"]
fn without_the_policy_visible_devices_grants_every_gpu() -> Result<()> {
    let (layout, cluster) = (ToolkitLayout::from_environment()?, Cluster::connect()?);
    let scope = Scope::new(&cluster, "exempt")?;
    let namespace = format!("/api/v1/namespaces/{}", scope.namespace);
    cluster.patch(&namespace, &json!({"metadata": {"labels": {"cleave.dev/allow": "environment"}}}))?;
    let mut all = pod("all", &json!({}), SLEEP_SCRIPT);
    all["spec"]["containers"][0]["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    create_pod_with_class(&scope, &cluster, &all, layout.nvidia)?;
    scope.wait_until_running("all")?;
    let (driver, gpus) = visible_driver_and_gpus(&scope, "all")?;
    ensure!(driver && gpus == ["nvidia0", "nvidia1"], "sees the driver: {driver}; GPUs: {gpus:?}");
    if layout.nvidia.is_some() {
        all["metadata"]["name"] = json!("runc");
        create_pod_with_class(&scope, &cluster, &all, None)?;
        scope.wait_until_running("runc")?;
        let (driver, gpus) = visible_driver_and_gpus(&scope, "runc")?;
        ensure!(!driver && gpus.is_empty(), "under runc: sees the driver: {driver}; GPUs: {gpus:?}");
    }
    Ok(())
}
