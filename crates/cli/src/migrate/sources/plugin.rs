//! Parses configurations of NVIDIA's device plugin (`version: v1`). Pure.
use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use crate::migrate::fields::Section;
use crate::migrate::report::{Notes, Outcome, SettingPlace};

/// The resource that the plugin serves for whole GPUs, and for shares that it does not rename.
pub(in crate::migrate) const GPU: &str = "nvidia.com/gpu";
/// Prefix of the resources of MIG instances.
pub(in crate::migrate) const MIG_PREFIX: &str = "nvidia.com/mig-";
/// The report's text for settings of GPU feature discovery.
const FEATURE_DISCOVERY_NOTE: &str = "The setting belongs to GPU feature discovery, which may stay installed.";
/// Suffix that the plugin adds to renamed resources.
const SHARED_SUFFIX: &str = ".shared";

/// How the plugin names MIG instances.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::migrate) enum MigStrategy {
    /// The plugin does not serve MIG instances.
    #[default]
    None,
    /// The plugin serves MIG instances as `nvidia.com/gpu`.
    Single,
    /// The plugin serves MIG instances as `nvidia.com/mig-<profile>`.
    Mixed,
}

impl MigStrategy {
    /// Parses a MIG strategy, and reports its effect on pods.
    ///
    /// # Errors
    /// Returns an error if the text is not a strategy.
    pub(in crate::migrate) fn read(place: SettingPlace, text: &str, notes: &mut Notes) -> Result<Self> {
        let strategy = match text {
            "none" => Self::None,
            "single" => Self::Single,
            "mixed" => Self::Mixed,
            _ => bail!("{}: {} is {text:?}; it must be none, single or mixed", place.source, place.setting),
        };
        match strategy {
            Self::None => notes.translated(
                place,
                "MIG is not used. If a GPU is in MIG mode anyway, Cleave serves its instances as nvidia.com/mig-<profile>, but NVIDIA's plugin serves the whole GPU.",
            ),
            Self::Single => notes.decide(
                place,
                "Cleave serves MIG instances as nvidia.com/mig-<profile> only. Pods that request nvidia.com/gpu on \
                 these nodes must request the instance instead.",
            ),
            Self::Mixed => notes.translated(place, "MIG instances have the same names: nvidia.com/mig-<profile>."),
        }
        Ok(strategy)
    }
}

/// How the plugin shares each device of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::migrate) enum SharedBy {
    TimeSlicing,
    Mps,
}

/// The `sharing` section of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::migrate) struct Sharing {
    /// How devices are shared.
    pub(in crate::migrate) by: SharedBy,
    /// Whether names of shared resources end in `.shared`.
    pub(in crate::migrate) renamed: bool,
    /// Whether the plugin refuses requests for more than 1.
    pub(in crate::migrate) refuses_above_one: bool,
    /// The number of replicas of each device, by resource.
    pub(in crate::migrate) replicas: BTreeMap<String, u32>,
}

impl Sharing {
    /// Returns the name that the plugin gives to shares of a resource.
    pub(in crate::migrate) fn served_resource(&self, resource: &str) -> String {
        if self.renamed { format!("{resource}{SHARED_SUFFIX}") } else { resource.to_owned() }
    }
}

/// One configuration of the plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::migrate) struct PluginConfig {
    /// The MIG strategy, if the configuration sets one.
    pub(in crate::migrate) mig_strategy: Option<MigStrategy>,
    /// How devices are shared. `None` if they are not shared.
    pub(in crate::migrate) sharing: Option<Sharing>,
}

/// Returns whether a mapping is a configuration of the plugin.
pub(in crate::migrate) fn is_plugin_config(value: &Value) -> bool {
    let has = |key: &str| value.get(key).is_some();
    has("version")
        && !has("kind")
        && !has("mig-configs")
        && ["flags", "sharing", "resources", "imex"].iter().any(|key| has(key))
        || value.as_object().is_some_and(|keys| keys.len() == 1 && value.get("version") == Some(&json!("v1")))
}

/// Parses a configuration. Returns `None` for a configuration that Nos wrote.
///
/// # Errors
/// Returns an error if NVIDIA's plugin would refuse the configuration.
pub(in crate::migrate) fn parse(source: &str, value: Value, notes: &mut Notes) -> Result<Option<PluginConfig>> {
    let mut top = Section::root(source, value)?;
    if let Some((place, version)) = top.take_string("version")? {
        ensure!(version == "v1", "{source}: version is {version:?}; NVIDIA's device plugin reads v1 only");
        notes.translated(place, "A configuration of NVIDIA's device plugin.");
    }
    let mut config = PluginConfig::default();
    if let Some(mut flags) = top.take_section("flags")? {
        config.mig_strategy = read_flags(&mut flags, notes)?;
        flags.finish(notes);
    }
    if let Some(mut sharing) = top.take_section("sharing")? {
        let parsed = read_sharing(&mut sharing, notes)?;
        sharing.finish(notes);
        match parsed {
            SharingContent::OfNos => return Ok(None),
            SharingContent::Parsed(sharing) => config.sharing = sharing,
        }
    }
    top.drop_keys(
        &[
            ("resources", "NVIDIA's plugin ignores this section too. A policy's resourceName names shares."),
            ("imex", "Cleave does not support IMEX channels."),
        ],
        notes,
    );
    top.finish(notes);
    Ok(Some(config))
}

/// Reads the section `flags` of a configuration, or the same settings at the top of a chart's
/// values. Returns the MIG strategy, if it is set.
///
/// # Errors
/// Returns an error if a flag has a wrong type or value.
pub(in crate::migrate) fn read_flags(flags: &mut Section, notes: &mut Notes) -> Result<Option<MigStrategy>> {
    let strategy = match flags.take_string("migStrategy")? {
        Some((place, text)) => Some(MigStrategy::read(place, &text, notes)?),
        None => None,
    };
    if let Some((place, _)) = flags.take_bool("failOnInitError")? {
        notes.dropped(place, "Cleave's agent reports a missing driver in its GpuNode, and waits for the driver.");
    }
    if let Some((place, root)) = flags.take_string("nvidiaDriverRoot")? {
        report_driver_root(place, &root, notes);
    }
    for (key, what) in [("gdrcopyEnabled", "GDRCopy"), ("gdsEnabled", "GPUDirect Storage"), ("mofedEnabled", "MOFED")] {
        match flags.take_bool(key)? {
            Some((place, true)) => notes.decide(
                place,
                format!(
                    "Cleave does not inject {what}. Add its devices and libraries to every container with \
                     containers.mounts, or exclude these nodes from Cleave."
                ),
            ),
            Some((place, false)) => notes.dropped(place, format!("Cleave does not inject {what}.")),
            None => {}
        }
    }
    match flags.take_string("deviceDiscoveryStrategy")? {
        Some((place, text)) if text == "tegra" => {
            notes.decide(place, "Cleave finds GPUs through NVML only. It does not support Tegra.");
        }
        Some((place, _)) => notes.translated(place, "Cleave finds GPUs through NVML."),
        None => {}
    }
    flags.drop_keys(
        &[
            ("nvidiaDevRoot", "The agent finds device nodes itself."),
            ("mpsRoot", "Cleave's MPS host has its own directory: the chart's value paths.run."),
        ],
        notes,
    );
    flags.take_keys(
        Outcome::Kept,
        &[("useNodeFeatureAPI", FEATURE_DISCOVERY_NOTE), ("gfd", FEATURE_DISCOVERY_NOTE)],
        notes,
    );
    if let Some(mut plugin) = flags.take_section("plugin")? {
        read_plugin_flags(&mut plugin, notes)?;
        plugin.finish(notes);
    }
    Ok(strategy)
}

/// Reports what the driver's location means for Cleave.
fn report_driver_root(place: SettingPlace, root: &str, notes: &mut Notes) {
    match root {
        "/" => notes.translated(place, "The agent finds a driver that is installed on the host."),
        "/run/nvidia/driver" => {
            notes.use_values_file("platforms/gpu-operator.yaml");
            notes.translated(place, "The GPU Operator runs the driver in a container: platforms/gpu-operator.yaml.");
        }
        _ => notes.decide(
            place,
            "Set driver.path to the directory with the driver's programs and libraries, or use the values file of \
             your platform. `cleave preflight` detects the platform.",
        ),
    }
}

/// Reads how containers get their devices, from `flags.plugin` or from the top of a chart's values.
///
/// # Errors
/// Returns an error if a flag has a wrong type or value.
pub(in crate::migrate) fn read_plugin_flags(plugin: &mut Section, notes: &mut Notes) -> Result<()> {
    if let Some((place, strategies)) = plugin.take_strings("deviceListStrategy")? {
        for strategy in strategies.iter().flat_map(|text| text.split(',')) {
            report_device_list(place.clone(), strategy.trim(), notes)?;
        }
    }
    match plugin.take_string("deviceIDStrategy")? {
        Some((place, id)) if id == "index" => {
            notes.dropped(place, "Containers get GPUs by UUID. Indices can change when a GPU is lost.");
        }
        Some((place, id)) if id == "uuid" => notes.translated(place, "Containers get GPUs by UUID."),
        Some((place, id)) => {
            bail!("{}: {} is {id:?}; it must be uuid or index", place.source, place.setting)
        }
        None => {}
    }
    if let Some((place, policy)) = plugin.take_string("sharedDevicesAllocationPolicy")? {
        match policy.as_str() {
            "packed" => notes.translated(place, "Cleave first fills GPUs that are already in use."),
            "distributed" => notes.decide(
                place,
                "Cleave keeps only replicas of one controller apart (replicaPlacement: Spread, the default). Other pods first fill GPUs that are already in use.",
            ),
            _ => bail!("{}: {} is {policy:?}; it must be distributed or packed", place.source, place.setting),
        }
    }
    plugin.drop_keys(
        &[
            ("passDeviceSpecs", "The agent adds device nodes itself under deviceListStrategy DeviceNodes."),
            ("cdiAnnotationPrefix", "Cleave passes CDI names in the kubelet's own field, not in annotations."),
            ("nvidiaCTKPath", "The agent finds NVIDIA's container toolkit itself."),
            ("nvidiaCDIHookPath", "The agent finds NVIDIA's container toolkit itself."),
            ("containerDriverRoot", "The agent finds the driver itself."),
        ],
        notes,
    );
    Ok(())
}

fn report_device_list(place: SettingPlace, strategy: &str, notes: &mut Notes) -> Result<()> {
    const CHART_VALUE_PATH: &str = "agent.deviceListStrategy";
    match strategy {
        "envvar" => notes.set_chart_value(place, CHART_VALUE_PATH, json!("Envvar")),
        "cdi-cri" | "cdi-annotations" => notes.set_chart_value(place, CHART_VALUE_PATH, json!("Cdi")),
        "volume-mounts" => notes.decide(
            place,
            "Cleave does not list devices as volume mounts. Choose Envvar or Cdi for agent.deviceListStrategy.",
        ),
        _ => bail!(
            "{}: {} is {strategy:?}; it must be envvar, volume-mounts, cdi-annotations or cdi-cri",
            place.source,
            place.setting
        ),
    }
    Ok(())
}

/// The content of a `sharing` section.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SharingContent {
    Parsed(Option<Sharing>),
    /// Nos wrote the section as part of its plan.
    OfNos,
}

fn read_sharing(sharing: &mut Section, notes: &mut Notes) -> Result<SharingContent> {
    let slicing = sharing.take_section("timeSlicing")?;
    let mps = sharing.take_section("mps")?;
    let (by, mut section) = match (slicing, mps) {
        (Some(_), Some(_)) => bail!(
            "{}: sharing.timeSlicing and sharing.mps exclude each other, because NVIDIA's plugin uses only mps",
            sharing.source()
        ),
        (Some(slicing), None) => (SharedBy::TimeSlicing, slicing),
        (None, Some(mps)) => (SharedBy::Mps, mps),
        (None, None) => return Ok(SharingContent::Parsed(None)),
    };
    let renamed = section.take_bool("renameByDefault")?;
    let refuses = section.take_bool("failRequestsGreaterThanOne")?;
    let refuses_above_one = refuses.as_ref().map_or(by == SharedBy::Mps, |(_, refuses)| *refuses);
    let resources = section.take_sections("resources")?.unwrap_or_default();
    ensure!(
        !resources.is_empty(),
        "{}: {by:?} lists no resources, so the plugin refuses the configuration",
        section.source()
    );
    if resources.iter().any(|resource| resource.has_value("memoryGB")) {
        notes.dropped(
            SettingPlace::of_whole_source(section.source()),
            "Nos wrote this configuration as a part of its plan. Cleave's operator makes its own plan.",
        );
        return Ok(SharingContent::OfNos);
    }
    let renamed_value = renamed.as_ref().is_some_and(|(_, renamed)| *renamed);
    if let Some((place, renamed)) = renamed {
        let text = if renamed {
            "The names that pods request end in .shared. See below for Cleave's names."
        } else {
            "Pods request shares by the name of whole devices. See below for Cleave's names."
        };
        notes.translated(place, text);
    }
    if let Some((place, _)) = refuses {
        notes.dropped(place, describe_requests_above_one(by));
    }
    let mut replicas = BTreeMap::new();
    for mut resource in resources {
        read_resource(&mut resource, by, &mut replicas, notes)?;
        resource.finish(notes);
    }
    section.finish(notes);
    Ok(SharingContent::Parsed(Some(Sharing { by, renamed: renamed_value, refuses_above_one, replicas })))
}

/// Describes what Cleave allocates for a request for more than 1.
const fn describe_requests_above_one(by: SharedBy) -> &'static str {
    match by {
        SharedBy::Mps => {
            "A request for N shares gets N shares of one GPU from Cleave: N times the memory and SMs of one share. Cleave does not refuse a request because N is above 1."
        }
        SharedBy::TimeSlicing => {
            "A request for N replicas gets N replicas of one GPU if possible, but not N times the GPU's time. Cleave does not refuse a request because N is above 1."
        }
    }
}

fn read_resource(
    resource: &mut Section,
    by: SharedBy,
    all: &mut BTreeMap<String, u32>,
    notes: &mut Notes,
) -> Result<()> {
    let source = resource.source().to_owned();
    let Some((_, name)) = resource.take_string("name")? else { bail!("{source}: a shared resource has no name") };
    // The plugin adds a missing prefix.
    let name = if name.contains('/') { name } else { format!("nvidia.com/{name}") };
    ensure!(
        name == GPU || name.strip_prefix(MIG_PREFIX).is_some_and(|profile| !profile.is_empty()),
        "{source}: {name:?} is not a resource that the plugin can share: it must be {GPU} or {MIG_PREFIX}<profile>"
    );
    let Some((place, replicas)) = resource.take_number("replicas", 2)? else {
        bail!("{source}: {name} has no replicas");
    };
    ensure!(all.insert(name.clone(), replicas).is_none(), "{source}: {name} is listed twice");
    let what = match by {
        SharedBy::Mps => {
            format!("{replicas} shares of each device of {name}, each with 1/{replicas} of memory and SMs.")
        }
        SharedBy::TimeSlicing => format!("{replicas} replicas of each device of {name}, without limits."),
    };
    notes.translated(place, what);
    if by == SharedBy::Mps && name != GPU {
        notes.translated(
            SettingPlace::of_whole_source(&source),
            format!("NVIDIA's plugin refuses MPS on {name}. Cleave supports it."),
        );
    }
    match resource.take_value("devices") {
        Some((place, Value::String(all))) if all == "all" => notes.translated(place, "The policy selects all GPUs."),
        Some((place, _)) => notes.dropped(
            place,
            "NVIDIA's plugin ignores this list and shares all devices. The policy shares all devices too. To share only some devices, add gpus.indices or gpus.uuids to the policy.",
        ),
        None => {}
    }
    if let Some((place, _)) = resource.take_value("rename") {
        notes.dropped(place, "NVIDIA's plugin ignores this name. A policy's resourceName sets a name.");
    }
    Ok(())
}
