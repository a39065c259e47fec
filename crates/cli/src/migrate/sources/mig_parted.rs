//! Parses configurations of NVIDIA's mig-parted and MIG manager (`mig-configs:`). Pure.
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use crate::migrate::fields::Section;
use crate::migrate::report::{Notes, SettingPlace};

/// Maximum number of MIG instances in the layout of a policy.
const MAX_INSTANCES: u64 = 8;
/// NVIDIA's vendor ID, the lower half of a PCI device ID.
const NVIDIA_VENDOR_ID: u32 = 0x10DE;

/// PCI device IDs, and for each ID the part of NVML's product name that identifies the model.
const MODELS_BY_DEVICE_ID: [(u32, &str); 18] = [
    (0x20B0, "A100-SXM4-40GB"),
    (0x20B2, "A100-SXM4-80GB"),
    (0x20B5, "A100 80GB PCIe"),
    (0x20B7, "A30"),
    (0x20F1, "A100-PCIE-40GB"),
    (0x20F3, "A800-SXM4-80GB"),
    (0x20F5, "A800 80GB PCIe"),
    (0x2321, "H100 NVL"),
    (0x2322, "H800 PCIe"),
    (0x2324, "H800"),
    (0x2329, "H20"),
    (0x2330, "H100 80GB HBM3"),
    (0x2331, "H100 PCIe"),
    (0x2335, "H200"),
    (0x233B, "H200 NVL"),
    (0x2342, "GH200 480GB"),
    (0x2901, "B200"),
    (0x2BB5, "RTX PRO 6000 Blackwell Server Edition"),
];

/// The MIG mode of a GPU and its instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::migrate) enum MigState {
    /// MIG mode is off.
    Off,
    /// MIG mode is on, without instances.
    Empty,
    /// MIG mode is on, with instances of these profiles.
    Layout(Vec<String>),
}

/// One entry of a configuration, which describes some or all GPUs of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::migrate) struct MigRule {
    /// The models of the GPUs. Empty for every model.
    pub(in crate::migrate) models: Vec<String>,
    /// The indices of the GPUs. Empty for all.
    pub(in crate::migrate) indices: Vec<u32>,
    /// The MIG state that each of these GPUs must have.
    pub(in crate::migrate) state: MigState,
}

/// Returns whether a mapping is a configuration of mig-parted.
pub(in crate::migrate) fn is_mig_config(value: &Value) -> bool {
    value.get("mig-configs").is_some()
}

/// Parses the named configurations. `wanted` selects the configurations whose settings the report
/// lists. The report summarizes all other configurations in one line.
///
/// # Errors
/// Returns an error if mig-parted would refuse the configuration, or if a layout has more instances
/// than a policy accepts.
pub(in crate::migrate) fn parse(
    source: &str,
    value: Value,
    wanted: &dyn Fn(&str) -> bool,
    notes: &mut Notes,
) -> Result<BTreeMap<String, Vec<MigRule>>> {
    let mut top = Section::root(source, value)?;
    if let Some((place, version)) = top.take_string("version")? {
        ensure!(version == "v1", "{source}: version is {version:?}; mig-parted reads v1 only");
        notes.translated(place, "A configuration of mig-parted.");
    }
    let mut configs = BTreeMap::new();
    let mut unused = Vec::new();
    if let Some(mut named) = top.take_section("mig-configs")? {
        for name in named.keys() {
            let entries = named.take_sections(&name)?.unwrap_or_default();
            let mut ignored = Notes::default();
            let notes = if wanted(&name) {
                &mut *notes
            } else {
                unused.push(name.clone());
                &mut ignored
            };
            configs.insert(name.clone(), parse_entries(source, &name, entries, notes)?);
        }
    }
    if !unused.is_empty() {
        notes.dropped(
            SettingPlace { source: source.to_owned(), setting: "mig-configs".to_owned(), value: String::new() },
            format!("No node has the label nvidia.com/mig.config with one of these values: {}.", unused.join(", ")),
        );
    }
    top.finish(notes);
    Ok(configs)
}

fn parse_entries(source: &str, name: &str, entries: Vec<Section>, notes: &mut Notes) -> Result<Vec<MigRule>> {
    let mut rules = Vec::new();
    let mut seen = BTreeSet::new();
    for mut entry in entries {
        let rule = parse_entry(&mut entry, notes)?;
        entry.finish(notes);
        let Some(rule) = rule else { continue };
        if rule.models.is_empty() {
            let key =
                if rule.indices.is_empty() { vec![None] } else { rule.indices.iter().copied().map(Some).collect() };
            for index in key {
                let gpus = index.map_or_else(|| "all GPUs".to_owned(), |index| format!("GPU {index}"));
                ensure!(seen.insert(index), "{source}: mig-configs.{name} describes {gpus} twice");
            }
        }
        rules.push(rule);
    }
    Ok(rules)
}

fn parse_entry(entry: &mut Section, notes: &mut Notes) -> Result<Option<MigRule>> {
    let source = entry.source().to_owned();
    let filter = entry.take_strings("device-filter")?;
    let indices = match entry.take_value("devices") {
        None => bail!("{source}: an entry of mig-configs has no devices"),
        Some((_, Value::String(all))) if all == "all" => Vec::new(),
        Some((place, value)) => parse_indices(&place, &value)?,
    };
    let Some((place, enabled)) = entry.take_bool("mig-enabled")? else {
        bail!("{source}: an entry of mig-configs has no mig-enabled");
    };
    let devices = entry.take_value("mig-devices");
    let models = match filter {
        None => Vec::new(),
        Some((place, ids)) => match models_of_device_ids(&place, &ids, notes)? {
            models if models.is_empty() => return Ok(None),
            models => models,
        },
    };
    let state = match (enabled, devices) {
        (false, _) => {
            notes.translated(place, "The policy has mode Whole, or the mode that shares whole GPUs.");
            MigState::Off
        }
        (true, None) => report_empty_mig(place, notes),
        (true, Some((place, value))) => match parse_layout(&place, &value)? {
            Layout::Profiles(profiles) if profiles.is_empty() => report_empty_mig(place, notes),
            Layout::Profiles(profiles) => {
                notes.translated(place, "The policy has mode Mig with this layout.");
                MigState::Layout(profiles)
            }
            Layout::ComputeInstances(profile) => {
                notes.decide(
                    place,
                    format!("Cleave does not divide instances into compute instances such as {profile}. `cleave migrate` writes no policy for these GPUs."),
                );
                return Ok(None);
            }
        },
    };
    Ok(Some(MigRule { models, indices, state }))
}

fn report_empty_mig(place: SettingPlace, notes: &mut Notes) -> MigState {
    notes.translated(place, "MIG mode without instances: the policy has mode Mig, which creates instances on demand.");
    MigState::Empty
}

fn parse_indices(place: &SettingPlace, value: &Value) -> Result<Vec<u32>> {
    let wrong =
        || anyhow::anyhow!("{}: {} must be all, or a list of indices from 0 to 63", place.source, place.setting);
    let items = value.as_array().filter(|items| !items.is_empty()).ok_or_else(wrong)?;
    let index = |item: &Value| item.as_u64().and_then(|index| u32::try_from(index).ok()).filter(|index| *index < 64);
    items.iter().map(|item| index(item).ok_or_else(wrong)).collect()
}

/// Returns the models of a device filter. Reports the IDs of unknown models as needing a decision.
fn models_of_device_ids(place: &SettingPlace, ids: &[String], notes: &mut Notes) -> Result<Vec<String>> {
    let mut models = BTreeSet::new();
    let mut unknown = Vec::new();
    for id in ids {
        let digits = id.strip_prefix("0x").or_else(|| id.strip_prefix("0X")).unwrap_or(id);
        let Ok(number) = u32::from_str_radix(digits, 16) else {
            bail!(
                "{}: {} contains {id:?}, which is not a PCI device ID such as 0x20B010DE",
                place.source,
                place.setting
            );
        };
        let known = MODELS_BY_DEVICE_ID.iter().find(|(device, _)| number == device << 16 | NVIDIA_VENDOR_ID);
        match known {
            Some((_, model)) => drop(models.insert((*model).to_owned())),
            None => unknown.push(id.as_str()),
        }
    }
    if !models.is_empty() {
        let names: Vec<&str> = models.iter().map(String::as_str).collect();
        notes.translated(place.clone(), format!("gpus.models of the policy: {}.", names.join(", ")));
    }
    if !unknown.is_empty() {
        notes.decide(
            place.clone(),
            format!(
                "`cleave migrate` does not know the models of these PCI devices: {}. If a node has one, {}",
                unknown.join(", "),
                if models.is_empty() {
                    "write a policy with its name in gpus.models, as `nvidia-smi -L` prints it."
                } else {
                    "add its name to gpus.models of the policy, as `nvidia-smi -L` prints it."
                }
            ),
        );
    }
    Ok(models.into_iter().collect())
}

/// The MIG instances of an entry.
enum Layout {
    Profiles(Vec<String>),
    /// The first profile that divides an instance into compute instances.
    ComputeInstances(String),
}

fn parse_layout(place: &SettingPlace, value: &Value) -> Result<Layout> {
    let Value::Object(counts) = value else { bail!("{}: {} must be a mapping", place.source, place.setting) };
    let mut total = 0_u64;
    let mut profiles = Vec::new();
    for (profile, count) in counts {
        let Some(count) = count.as_u64() else {
            bail!("{}: {}.{profile} is {count}; it must be a number of instances", place.source, place.setting);
        };
        if profile.split_once('g').is_some_and(|(start, _)| start.contains('c')) {
            return Ok(Layout::ComputeInstances(profile.clone()));
        }
        total = total.saturating_add(count);
        ensure!(
            total <= MAX_INSTANCES,
            "{}: {} has {total} instances or more; no GPU has more than {MAX_INSTANCES}",
            place.source,
            place.setting
        );
        profiles.extend((0..count).map(|_| profile.clone()));
    }
    Ok(Layout::Profiles(profiles))
}
