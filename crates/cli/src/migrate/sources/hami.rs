//! Parses values of the HAMi chart and the configurations in its `ConfigMap`s. Pure.
use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};
use cleave_api::sharingpolicy::ThreadPolicy;
use cleave_plan::constraints::Labels;
use serde_json::Value;

use crate::migrate::fields::Section;
use crate::migrate::report::{Notes, Outcome, SettingPlace};

/// Name of HAMi's scheduler in pods.
pub(in crate::migrate) const SCHEDULER_NAME: &str = "hami-scheduler";

/// The names of the resources that pods request from HAMi.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::migrate) struct HamiResources {
    /// The resource for the number of GPUs.
    pub(in crate::migrate) count: String,
    /// The resource for the memory of each GPU, in MiB.
    pub(in crate::migrate) memory: String,
    /// The resource for the memory of each GPU, in percent.
    pub(in crate::migrate) percentage: String,
    /// The resource for the SMs of each GPU, in percent.
    pub(in crate::migrate) cores: String,
}

impl Default for HamiResources {
    fn default() -> Self {
        Self {
            count: "nvidia.com/gpu".to_owned(),
            memory: "nvidia.com/gpumem".to_owned(),
            percentage: "nvidia.com/gpumem-percentage".to_owned(),
            cores: "nvidia.com/gpucores".to_owned(),
        }
    }
}

/// How HAMi limits programs on one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::migrate) enum OperatingMode {
    /// Software enforces the limits: a library that HAMi loads into each program, or MPS.
    Core,
    /// MIG instances, created on demand.
    Mig,
}

/// HAMi's settings that affect policies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::migrate) struct HamiConfig {
    /// The names of resources.
    pub(in crate::migrate) names: HamiResources,
    /// Labels of the nodes that HAMi manages.
    pub(in crate::migrate) node_selector: Option<Labels>,
    /// How strictly HAMi limits SMs.
    pub(in crate::migrate) threads: Option<ThreadPolicy>,
    /// Operating modes of the nodes that HAMi's configuration names.
    pub(in crate::migrate) nodes: BTreeMap<String, OperatingMode>,
}

/// Returns whether a mapping is a values file of HAMi.
pub(in crate::migrate) fn is_values(value: &Value) -> bool {
    value.get("resourceMem").is_some()
        || value.get("resourceCores").is_some()
        || value.pointer("/devicePlugin/deviceSplitCount").is_some()
        || value.pointer("/devicePlugin/deviceMemoryScaling").is_some()
}

/// Returns whether a mapping is the configuration of HAMi's scheduler.
pub(in crate::migrate) fn is_device_config(value: &Value) -> bool {
    value.pointer("/nvidia/resourceCountName").is_some()
}

/// Returns whether a mapping is the configuration of HAMi's nodes.
pub(in crate::migrate) fn is_node_config(value: &Value) -> bool {
    value.get("nodeconfig").is_some()
}

/// The report's text for settings of HAMi's own pods.
const OWN_POD_NOTE: &str = "The setting applies only to HAMi's own pods.";

/// Parses a values file.
///
/// # Errors
/// Returns an error if a value has a wrong type or is unknown.
pub(in crate::migrate) fn parse_values(
    source: &str,
    value: Value,
    into: &mut HamiConfig,
    notes: &mut Notes,
) -> Result<()> {
    let mut top = Section::root(source, value)?;
    read_resource_names(
        &mut top,
        ["resourceName", "resourceMem", "resourceMemPercentage", "resourceCores", "resourcePriority"],
        into,
        notes,
    )?;
    if let Some(mut plugin) = top.take_section("devicePlugin")? {
        read_device_plugin(&mut plugin, into, notes)?;
        plugin.finish(notes);
    }
    if let Some(mut scheduler) = top.take_section("scheduler")? {
        read_scheduler(&mut scheduler, notes)?;
    }
    if let Some(mut devices) = top.take_section("devices")? {
        if let Some(mut nvidia) = devices.take_section("nvidia")? {
            read_nvidia(&mut nvidia, into, notes)?;
            nvidia.finish(notes);
        }
        for key in devices.keys() {
            devices.drop_keys(&[(&key, "Cleave shares only NVIDIA's GPUs.")], notes);
        }
    }
    top.drop_keys(
        &[
            ("schedulerName", "Cleave needs no scheduler of its own. Remove schedulerName from pods."),
            ("global", OWN_POD_NOTE),
            ("nameOverride", OWN_POD_NOTE),
            ("fullnameOverride", OWN_POD_NOTE),
            ("namespaceOverride", OWN_POD_NOTE),
            ("platform", "`cleave preflight` detects the platform."),
            ("openshift", "The chart's value openshift.enabled."),
            ("selinux", "The chart's value nodes.seLinuxOptions."),
            ("podSecurityPolicy", OWN_POD_NOTE),
            ("mockDevicePlugin", OWN_POD_NOTE),
            ("legacyMetrics", OWN_POD_NOTE),
            ("prometheus", "See the how-to guide on monitoring."),
            ("device-config", "Pass this configuration to `cleave migrate` as a file."),
        ],
        notes,
    );
    for key in top.keys() {
        if ["mlu", "dcu", "hcu", "metax", "enflame", "kunlun", "vastai", "biren"]
            .iter()
            .any(|vendor| key.starts_with(vendor))
        {
            top.drop_keys(&[(&key, "Cleave shares only NVIDIA's GPUs.")], notes);
        }
    }
    top.finish(notes);
    Ok(())
}

/// Parses the configuration of the scheduler (`device-config.yaml`).
///
/// # Errors
/// Returns an error if a value has a wrong type or is unknown.
pub(in crate::migrate) fn parse_device_config(
    source: &str,
    value: Value,
    into: &mut HamiConfig,
    notes: &mut Notes,
) -> Result<()> {
    let mut top = Section::root(source, value)?;
    if let Some(mut nvidia) = top.take_section("nvidia")? {
        read_resource_names(
            &mut nvidia,
            [
                "resourceCountName",
                "resourceMemoryName",
                "resourceMemoryPercentageName",
                "resourceCoreName",
                "resourcePriorityName",
            ],
            into,
            notes,
        )?;
        read_limits(&mut nvidia, notes)?;
        read_nvidia(&mut nvidia, into, notes)?;
        nvidia.drop_keys(
            &[
                ("overwriteEnv", "Containers without shares may themselves set NVIDIA_VISIBLE_DEVICES=void."),
                ("memoryFactor", "gpumem counts MiB."),
                ("runtimeClassName", "The chart's value driver.runtimeClassName."),
                ("migProfileAllowlist", "Cleave reads the profiles of each GPU from NVML."),
                ("knownMigGeometries", "Cleave reads the profiles of each GPU from NVML."),
            ],
            notes,
        );
        nvidia.finish(notes);
    }
    for key in top.keys() {
        top.drop_keys(&[(&key, "Cleave shares only NVIDIA's GPUs.")], notes);
    }
    Ok(())
}

/// Parses the configuration of nodes (`config.json`).
///
/// # Errors
/// Returns an error if a value is missing, has a wrong type or is unknown, or if two entries
/// describe the same node.
pub(in crate::migrate) fn parse_node_config(
    source: &str,
    value: Value,
    into: &mut HamiConfig,
    notes: &mut Notes,
) -> Result<()> {
    let mut top = Section::root(source, value)?;
    for mut node in top.take_sections("nodeconfig")?.unwrap_or_default() {
        let Some((_, name)) = node.take_string("name")? else { bail!("{source}: an entry of nodeconfig has no name") };
        let mode = match node.take_string("operatingmode")? {
            None => OperatingMode::Core,
            Some((place, mode)) => match mode.as_str() {
                "" | "hami-core" => {
                    notes.translated(place, "The node has the policy of the other nodes.");
                    OperatingMode::Core
                }
                "mig" => {
                    notes.translated(
                        place,
                        "A policy that selects this node by kubernetes.io/hostname has mode Mig. The policy creates instances on demand.",
                    );
                    OperatingMode::Mig
                }
                "mps" => {
                    notes.translated(place, "The node has the policy of the other nodes, which uses MPS.");
                    OperatingMode::Core
                }
                _ => bail!("{source}: {} is {mode:?}; it must be hami-core, mig or mps", place.setting),
            },
        };
        for (key, name) in [("devicesplitcount", "deviceSplitCount"), ("devicememoryscaling", "deviceMemoryScaling")] {
            if let Some((place, value)) = node.take_value(key) {
                report_limit(place, name, &value, notes)?;
            }
        }
        if let Some((place, value)) = node.take_value("filterdevices") {
            let lists = value.as_object().into_iter().flat_map(serde_json::Map::values);
            let (outcome, text) = if lists.into_iter().any(|list| list.as_array().is_some_and(|list| !list.is_empty()))
            {
                (
                    Outcome::Decide,
                    "Cleave serves all GPUs of a node. Create a separate policy for these GPUs, with gpus.uuids or gpus.indices.",
                )
            } else {
                (Outcome::Translated, "Cleave serves all GPUs of a node.")
            };
            notes.add(place, outcome, text);
        }
        node.drop_keys(
            &[
                ("devicecorescaling", "A sized slice gets SMs in proportion to its memory."),
                ("preconfigureddevicememory", "Cleave reads the memory of GPUs from NVML."),
                ("enablenumatopology", "Cleave's hints to the kubelet include the NUMA node."),
                ("enablegetpreferredallocation", "Cleave answers the kubelet's requests for preferred devices."),
                ("migstrategy", "The policy has mode Mig if the node's operatingmode is mig."),
            ],
            notes,
        );
        node.finish(notes);
        if into.nodes.insert(name.clone(), mode).is_some() {
            bail!("{source}: node {name} is described twice");
        }
    }
    top.finish(notes);
    Ok(())
}

/// Reads the resource names, in the order count, memory, percentage, cores and priority.
fn read_resource_names(section: &mut Section, keys: [&str; 5], into: &mut HamiConfig, notes: &mut Notes) -> Result<()> {
    let [count, memory, percentage, cores, priority] = keys;
    let texts = [
        (count, &mut into.names.count, "Pods that request no memory request whole GPUs: nvidia.com/gpu."),
        (memory, &mut into.names.memory, "Pods request memory as nvidia.com/gpu-<G>gb: 1, in whole GiB."),
        (percentage, &mut into.names.percentage, "Pods request memory as nvidia.com/gpu-<G>gb: 1, in whole GiB."),
        (cores, &mut into.names.cores, "A sized slice gets SMs in proportion to its memory."),
    ];
    for (key, name, text) in texts {
        if let Some((place, value)) = section.take_string(key)? {
            *name = value;
            notes.translated(place, text);
        }
    }
    if let Some((place, _)) = section.take_string(priority)? {
        notes.dropped(
            place,
            "Cleave has no priorities between pods that share a GPU. Use the pod's priority class for placement.",
        );
    }
    Ok(())
}

/// Reads the number of pods per GPU, the over-commitment factors and the default requests.
fn read_limits(section: &mut Section, notes: &mut Notes) -> Result<()> {
    for key in [
        "deviceSplitCount",
        "deviceMemoryScaling",
        "deviceCoreScaling",
        "defaultMemory",
        "defaultCores",
        "defaultGPUNum",
    ] {
        if let Some((place, value)) = section.take_value(key) {
            report_limit(place, key, &value, notes)?;
        }
    }
    section.drop_keys(
        &[
            ("preConfiguredDeviceMemory", "Cleave reads the memory of GPUs from NVML."),
            ("enableNumaTopology", "Cleave's hints to the kubelet include the NUMA node."),
        ],
        notes,
    );
    Ok(())
}

fn report_limit(place: SettingPlace, key: &str, value: &Value, notes: &mut Notes) -> Result<()> {
    let number = value.as_f64().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
    let number = number
        .filter(|number| *number >= 0.0)
        .with_context(|| format!("{}: {} is {value}; it must be a number", place.source, place.setting))?;
    match key {
        "deviceSplitCount" => {
            notes.dropped(place, "Memory limits how many slices a GPU has: at most 48, the clients of an MPS server.");
        }
        "deviceMemoryScaling" if number > 1.0 => notes.decide(
            place,
            "Cleave allocates no more memory than a GPU has. Pods that relied on more must request less, or share by \
             time-slicing, which limits no memory.",
        ),
        "deviceCoreScaling" if number > 1.0 => {
            notes.decide(place, "A slice gets SMs in proportion to its memory. mps.threads: Burst allows up to twice as many, and Uncapped allows all SMs.");
        }
        "deviceMemoryScaling" | "deviceCoreScaling" => {
            notes.translated(place, "The setting causes no over-commitment.");
        }
        "defaultMemory" | "defaultCores" if number > 0.0 => {
            notes.decide(place, "Cleave has no default request. Pods that request only nvidia.com/gpu get whole GPUs.");
        }
        _ => notes.dropped(place, "Cleave has no default request."),
    }
    Ok(())
}

fn read_nvidia(nvidia: &mut Section, into: &mut HamiConfig, notes: &mut Notes) -> Result<()> {
    if let Some((place, policy)) = nvidia.take_string("gpuCorePolicy")? {
        let (threads, text) = match policy.as_str() {
            "default" | "" => (ThreadPolicy::Burst, "mps.threads: Burst, up to twice a share's part of the SMs."),
            "force" => (ThreadPolicy::Strict, "mps.threads: Strict, exactly a share's part of the SMs."),
            "disable" => (ThreadPolicy::Uncapped, "mps.threads: Uncapped, no limit of SMs."),
            _ => bail!("{}: {} is {policy:?}; it must be default, force or disable", place.source, place.setting),
        };
        into.threads = Some(threads);
        notes.translated(place, text);
    }
    nvidia.drop_keys(&[("libCudaLogLevel", "Cleave loads no library into programs.")], notes);
    Ok(())
}

/// Settings of the device plugin that do not affect policies, and the report's text for each group
/// of settings.
const PLUGIN_KEYS: [(&[&str], &str); 4] = [
    (&["migStrategy"], "Cleave serves MIG instances as nvidia.com/mig-<profile> where a policy has mode Mig."),
    (
        &["deviceListStrategy", "passDeviceSpecsEnabled", "nvidiaDriverRoot", "nvidiaHookPath"],
        "The chart's values agent.deviceListStrategy and driver. `cleave preflight` prints them.",
    ),
    (&["gdrcopyEnabled", "gdsEnabled", "mofedEnabled"], "Cleave does not inject it."),
    (
        &[
            "enabled",
            "gpuOperatorToolkitReady",
            "image",
            "monitor",
            "numaRefit",
            "createRuntimeClass",
            "extraArgs",
            "extraEnvs",
            "service",
            "pluginPath",
            "libPath",
            "podAnnotations",
            "hostPID",
            "hostPIDBroker",
            "hostNetwork",
            "securityContext",
            "tolerations",
            "updateStrategy",
            "resources",
        ],
        OWN_POD_NOTE,
    ),
];

fn read_device_plugin(plugin: &mut Section, into: &mut HamiConfig, notes: &mut Notes) -> Result<()> {
    read_limits(plugin, notes)?;
    if let Some((place, selector)) = plugin.take_value("nvidiaNodeSelector") {
        let labels = serde_json::from_value(selector)
            .with_context(|| format!("{}: {} must be labels", place.source, place.setting))?;
        into.node_selector = Some(labels);
        notes.translated(place, "nodeSelector of the policy. If the nodes lose these labels, change nodeSelector.");
    }
    if let Some((place, flag)) = plugin.take_bool("disablecorelimit")? {
        if flag {
            into.threads = Some(ThreadPolicy::Uncapped);
            notes.translated(place, "mps.threads: Uncapped, no limit of SMs.");
        } else {
            notes.translated(place, "SMs are limited.");
        }
    }
    if let Some((place, class)) = plugin.take_string("runtimeClassName")?
        && !class.is_empty()
    {
        notes.set_chart_value(place, "driver.runtimeClassName", class.into());
    }
    if let Some(mut nodes) = plugin.take_section("nodeConfiguration")? {
        if let Some((place, config)) = nodes.take_string("config")?
            && !config.trim().is_empty()
        {
            notes.decide(place, "Pass this configuration to `cleave migrate` as a separate file.");
        }
        nodes.drop_keys(&[("externalConfigName", "Add this ConfigMap to the input of `cleave migrate` too.")], notes);
        nodes.finish(notes);
    }
    for (keys, text) in PLUGIN_KEYS {
        for key in keys {
            plugin.drop_keys(&[(key, text)], notes);
        }
    }
    Ok(())
}

fn read_scheduler(scheduler: &mut Section, notes: &mut Notes) -> Result<()> {
    if let Some(mut policy) = scheduler.take_section("defaultSchedulerPolicy")? {
        for key in ["nodeSchedulerPolicy", "gpuSchedulerPolicy"] {
            match policy.take_string(key)? {
                Some((place, word)) if word == "binpack" => {
                    notes.translated(place, "Cleave first fills nodes and GPUs that are already in use.");
                }
                Some((place, _)) => notes.decide(
                    place,
                    "Cleave keeps only replicas of one controller apart (replicaPlacement: Spread, the default).",
                ),
                None => {}
            }
        }
        policy.finish(notes);
    }
    for key in scheduler.keys() {
        scheduler.drop_keys(&[(&key, "Cleave needs no scheduler of its own.")], notes);
    }
    Ok(())
}
