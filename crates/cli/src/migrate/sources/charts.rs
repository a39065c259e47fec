//! Values of the chart of NVIDIA's device plugin, values of the GPU Operator's chart, and its
//! `ClusterPolicy`. Pure.
use anyhow::Result;
use serde_json::{Value, json};

use super::plugin::{MigStrategy, read_flags, read_plugin_flags};
use crate::migrate::fields::Section;
use crate::migrate::report::{Notes, Outcome, SettingPlace};

/// What a chart's values specify about configurations.
#[derive(Debug, Clone, Default, PartialEq)]
pub(in crate::migrate) struct ChartFacts {
    /// The MIG strategy, which overrides the strategy of each configuration.
    pub(in crate::migrate) mig_strategy: Option<MigStrategy>,
    /// Name of the `ConfigMap` with the plugin's configurations.
    pub(in crate::migrate) config_map: Option<String>,
    /// Configurations in the values themselves, by name.
    pub(in crate::migrate) configs: Vec<(String, Value)>,
    /// The plugin's configuration for nodes without a label.
    pub(in crate::migrate) default_config: Option<String>,
    /// The MIG manager's configuration for nodes without a label.
    pub(in crate::migrate) default_mig: Option<String>,
    /// Whether the input has settings of the GPU Operator. The GPU Operator has no fallback for
    /// nodes without a label.
    pub(in crate::migrate) gpu_operator: bool,
}

/// The report's text for settings of the plugin's own pods.
const OWN_POD_NOTE: &str = "The setting applies only to the plugin's own pods. Cleave's pods have their own settings.";

/// Returns whether a mapping is a values file of NVIDIA's device plugin.
pub(in crate::migrate) fn is_plugin_values(value: &Value) -> bool {
    let has_config = ["map", "default", "fallbackStrategies"]
        .iter()
        .any(|key| value.get("config").is_some_and(|config| config.get(key).is_some()));
    let flags = ["migStrategy", "failOnInitError", "deviceListStrategy", "deviceIDStrategy", "compatWithCPUManager"];
    value.get("version").is_none() && (has_config || flags.iter().any(|key| value.get(key).is_some()))
}

/// Returns whether a mapping is a values file of the GPU Operator.
pub(in crate::migrate) fn is_operator_values(value: &Value) -> bool {
    let parts = ["mig", "migManager", "toolkit", "dcgmExporter", "nodeStatusExporter", "ccManager", "driver"];
    let plugin = value.get("devicePlugin").is_some_and(|plugin| plugin.get("deviceSplitCount").is_none());
    parts.iter().any(|key| value.get(key).is_some()) || plugin && value.get("resourceMem").is_none()
}

/// Parses a values file of NVIDIA's device plugin.
///
/// # Errors
/// Returns an error if a value has a wrong type or is unknown.
pub(in crate::migrate) fn parse_plugin_values(source: &str, value: Value, notes: &mut Notes) -> Result<ChartFacts> {
    let mut top = Section::root(source, value)?;
    let mut facts = ChartFacts::default();
    if let Some(mut config) = top.take_section("config")? {
        read_config_names(&mut config, "map", &mut facts, notes)?;
        config.finish(notes);
    }
    facts.mig_strategy = read_flags(&mut top, notes)?;
    read_plugin_flags(&mut top, notes)?;
    if let Some((place, _)) = top.take_bool("compatWithCPUManager")? {
        notes.dropped(place, "The agent adds device nodes itself under deviceListStrategy DeviceNodes.");
    }
    if let Some((place, class)) = top.take_string("runtimeClassName")? {
        notes.set_chart_value(place, "driver.runtimeClassName", json!(class));
    }
    if let Some((place, selector)) = top.take_value("nodeSelector") {
        notes.set_chart_value(place, "nodes.nodeSelector", selector);
    }
    if let Some((place, _)) = top.take_value("affinity") {
        notes.decide(
            place,
            "Cleave's agents run on nodes with one of the labels in nodes.gpuLabels. Set nodes.nodeSelector or \
             nodes.affinity if this affinity selects other nodes.",
        );
    }
    top.take_keys(Outcome::Kept, &[("nfd", "Node feature discovery may stay installed.")], notes);
    top.drop_keys(
        &[
            ("tolerations", "Cleave's pods on GPU nodes tolerate all taints (nodes.tolerations)."),
            ("mps", "Cleave's MPS host has its own directory: the chart's value paths.run."),
            ("cdi", "The agent finds NVIDIA's container toolkit itself."),
            ("devicePlugin", "Uninstall the chart, or keep its DaemonSet off the nodes that Cleave manages."),
            ("legacyDaemonsetAPI", OWN_POD_NOTE),
            ("nameOverride", OWN_POD_NOTE),
            ("fullnameOverride", OWN_POD_NOTE),
            ("namespaceOverride", OWN_POD_NOTE),
            ("selectorLabelsOverride", OWN_POD_NOTE),
            ("allowDefaultNamespace", OWN_POD_NOTE),
            ("imagePullSecrets", OWN_POD_NOTE),
            ("image", OWN_POD_NOTE),
            ("updateStrategy", OWN_POD_NOTE),
            ("podAnnotations", OWN_POD_NOTE),
            ("podSecurityContext", OWN_POD_NOTE),
            ("securityContext", OWN_POD_NOTE),
            ("resources", OWN_POD_NOTE),
            ("priorityClassName", OWN_POD_NOTE),
        ],
        notes,
    );
    top.finish(notes);
    Ok(facts)
}

/// Reads the name of the `ConfigMap`, the default configuration, and the configurations that the
/// values contain under the key `inline`.
fn read_config_names(config: &mut Section, inline: &str, facts: &mut ChartFacts, notes: &mut Notes) -> Result<()> {
    if let Some((place, name)) = config.take_string("name")?
        && !name.is_empty()
    {
        notes.translated(place, format!("The plugin's configurations are in the ConfigMap {name}."));
        facts.config_map = Some(name);
    }
    if let Some((place, name)) = config.take_string("default")?
        && !name.is_empty()
    {
        notes.translated(place, "The policies of this configuration have no nodeSelector.");
        facts.default_config = Some(name);
    }
    if let Some(mut map) = config.take_section(inline)? {
        for name in map.keys() {
            facts.configs.extend(map.take_value(&name).map(|(_, value)| (name, value)));
        }
    }
    config.drop_keys(
        &[
            ("create", "Cleave's policies replace the ConfigMap."),
            ("fallbackStrategies", "A policy without nodeSelector applies to nodes without a label."),
        ],
        notes,
    );
    Ok(())
}

/// Sections of the GPU Operator's values for components that may remain installed, and the report's
/// text for each section.
const OTHER_COMPONENTS: [(&str, &str); 30] = [
    ("clusterPolicy", "It does not serve GPUs."),
    ("gpuCluster", "It does not serve GPUs."),
    ("platform", "It does not serve GPUs."),
    ("extraObjects", "They do not serve GPUs."),
    ("vgpuManager", "Cleave does not serve virtual machines."),
    ("vgpuDeviceManager", "Cleave does not serve virtual machines."),
    ("vfioManager", "Cleave does not serve virtual machines."),
    ("fabricManager", "It does not serve GPUs."),
    ("driver", "Cleave uses the driver. Use platforms/gpu-operator.yaml."),
    ("toolkit", "Containers get their GPUs through the toolkit."),
    ("cdi", "Cleave gives containers their GPUs through CDI. Cleave does not support nriPluginEnabled."),
    ("dcgm", "It does not serve GPUs."),
    ("dcgmExporter", "It reads the GPUs' metrics. It identifies Cleave's pods through the kubelet's API."),
    ("gfd", "Cleave sets no node labels with GPU models."),
    ("nfd", "Label GPU nodes cleave.dev/gpu=true too, because discovery may remove its labels."),
    ("node-feature-discovery", "Label GPU nodes cleave.dev/gpu=true too."),
    ("nodeStatusExporter", "It does not serve GPUs."),
    ("validator", "Its check of the plugin is skipped while the plugin is disabled."),
    ("operator", "It does not serve GPUs."),
    ("daemonsets", "The setting applies only to the GPU Operator's pods."),
    ("psa", "It does not serve GPUs."),
    ("psp", "It does not serve GPUs."),
    ("gds", "Cleave does not inject GPUDirect Storage into containers."),
    ("gdrcopy", "Cleave does not inject GDRCopy into containers."),
    ("hostPaths", "It does not serve GPUs."),
    ("kataManager", "Cleave does not serve confidential containers."),
    ("ccManager", "Cleave does not serve confidential containers."),
    ("sandboxWorkloads", "Cleave does not serve virtual machines: exclude their nodes from Cleave."),
    ("sandboxDevicePlugin", "It serves virtual machines on nodes that Cleave does not manage."),
    ("kataSandboxDevicePlugin", "It serves virtual machines on nodes that Cleave does not manage."),
];

/// Parses a values file of the GPU Operator, or the `spec` of its `ClusterPolicy`.
///
/// # Errors
/// Returns an error if a value has a wrong type or is unknown.
pub(in crate::migrate) fn parse_operator(source: &str, value: Value, notes: &mut Notes) -> Result<ChartFacts> {
    let mut top = Section::root(source, value)?;
    let mut facts = ChartFacts { gpu_operator: true, ..ChartFacts::default() };
    notes.use_values_file("platforms/gpu-operator.yaml");
    let is_off = |part: &str| top.value(part).and_then(|part| part.get("enabled")) == Some(&Value::Bool(false));
    if !(is_off("devicePlugin") && is_off("migManager")) {
        notes.decide(
        SettingPlace::of_whole_source(source),
        "Set devicePlugin.enabled and migManager.enabled to false, so that the GPU Operator neither serves GPUs nor \
         changes MIG. To move node by node, label each node nvidia.com/gpu.deploy.device-plugin=false and \
         nvidia.com/gpu.deploy.mig-manager=false instead.",
        );
    }
    if let Some(mut plugin) = top.take_section("devicePlugin")? {
        read_device_plugin(&mut plugin, &mut facts, notes)?;
        plugin.finish(notes);
    }
    if let Some(mut mig) = top.take_section("mig")? {
        if let Some((place, text)) = mig.take_string("strategy")? {
            facts.mig_strategy = Some(MigStrategy::read(place, &text, notes)?);
        }
        mig.finish(notes);
    }
    if let Some(mut manager) = top.take_section("migManager")? {
        read_mig_manager(&mut manager, &mut facts, notes)?;
        manager.finish(notes);
    }
    if let Some((place, _)) = top.take_value("draDriver") {
        notes.decide(
            place,
            "NVIDIA's DRA driver may stay for ComputeDomains. It must not allocate GPUs of nodes that Cleave manages \
             (resources.gpus.enabled=false).",
        );
    }
    top.take_keys(Outcome::Kept, &OTHER_COMPONENTS, notes);
    top.finish(notes);
    Ok(facts)
}

fn read_device_plugin(plugin: &mut Section, facts: &mut ChartFacts, notes: &mut Notes) -> Result<()> {
    if let Some((place, enabled)) = plugin.take_bool("enabled")? {
        let (outcome, text) = if enabled {
            (Outcome::Decide, "Disable it: two plugins must not advertise the same GPUs.")
        } else {
            (Outcome::Translated, "It is already disabled, as Cleave requires.")
        };
        notes.add(place, outcome, text);
    }
    if let Some(mut config) = plugin.take_section("config")? {
        read_config_names(&mut config, "data", facts, notes)?;
        config.finish(notes);
    }
    if let Some((place, value)) = plugin.take_value("env") {
        read_environment_variables(&place, &value, notes);
    }
    plugin.drop_keys(
        &[
            ("mps", "Cleave's MPS host has its own directory: the chart's value paths.run."),
            ("args", "Arguments of NVIDIA's plugin."),
            ("hostNetwork", OWN_POD_NOTE),
            ("repository", OWN_POD_NOTE),
            ("image", OWN_POD_NOTE),
            ("version", OWN_POD_NOTE),
            ("imagePullPolicy", OWN_POD_NOTE),
            ("imagePullSecrets", OWN_POD_NOTE),
            ("resources", OWN_POD_NOTE),
        ],
        notes,
    );
    Ok(())
}

/// Reads environment variables of the plugin. These variables override the plugin's configurations.
fn read_environment_variables(place: &SettingPlace, value: &Value, notes: &mut Notes) {
    for variable in value.as_array().into_iter().flatten() {
        let text = |key: &str| variable.get(key).and_then(Value::as_str).unwrap_or_default();
        let (name, value) = (text("name"), text("value"));
        let here =
            SettingPlace { setting: format!("{}.{name}", place.setting), value: value.to_owned(), ..place.clone() };
        match name {
            "DP_DISABLE_HEALTHCHECKS" => {
                let xids: Option<Vec<u32>> = value.split(',').map(|xid| xid.trim().parse().ok()).collect();
                match xids {
                    Some(xids) => notes.set_chart_value(here, "agent.ignoreXids", json!(xids)),
                    None => notes.decide(
                        here,
                        "Cleave always checks health. agent.ignoreXids names XIDs that do not affect it.",
                    ),
                }
            }
            "PASS_DEVICE_SPECS"
            | "FAIL_ON_INIT_ERROR"
            | "DP_ENABLE_HEALTHCHECKS"
            | "NVIDIA_VISIBLE_DEVICES"
            | "NVIDIA_DRIVER_CAPABILITIES" => notes.dropped(here, "The setting applies only to NVIDIA's plugin."),
            _ => notes.add(here, Outcome::Unknown, "`cleave migrate` does not know this setting."),
        }
    }
}

fn read_mig_manager(manager: &mut Section, facts: &mut ChartFacts, notes: &mut Notes) -> Result<()> {
    const MANAGER_POD_NOTE: &str = "The setting applies only to the MIG manager's own pods.";
    if let Some((place, enabled)) = manager.take_bool("enabled")? {
        let (outcome, text) = if enabled {
            (Outcome::Decide, "Disable it, or set agent.migMode to Never: only one of the two may change MIG.")
        } else {
            (Outcome::Translated, "It is already disabled, as Cleave requires.")
        };
        notes.add(place, outcome, text);
    }
    if let Some(mut config) = manager.take_section("config")? {
        if let Some((place, name)) = config.take_string("default")?
            && !name.is_empty()
        {
            notes.translated(place, "The policies of this configuration have no nodeSelector.");
            facts.default_mig = Some(name);
        }
        config.drop_keys(
            &[
                ("name", "Add this ConfigMap to the input of `cleave migrate` too."),
                ("create", "Cleave's policies replace the ConfigMap."),
                ("data", "Pass these configurations to `cleave migrate` as a file."),
            ],
            notes,
        );
        config.finish(notes);
    }
    manager.drop_keys(
        &[
            ("gpuClientsConfig", "Cleave changes MIG only on GPUs that no program uses. You need not stop any client."),
            ("env", MANAGER_POD_NOTE),
            ("args", MANAGER_POD_NOTE),
            ("hostNetwork", MANAGER_POD_NOTE),
            ("repository", MANAGER_POD_NOTE),
            ("image", MANAGER_POD_NOTE),
            ("version", MANAGER_POD_NOTE),
            ("imagePullPolicy", MANAGER_POD_NOTE),
            ("imagePullSecrets", MANAGER_POD_NOTE),
            ("resources", MANAGER_POD_NOTE),
            ("securityContext", MANAGER_POD_NOTE),
        ],
        notes,
    );
    Ok(())
}
