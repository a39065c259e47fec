//! Parses GKE node pools, from the labels of nodes or from the output of `gcloud container
//! node-pools describe`. Pure.
use anyhow::{Context as _, Result, bail, ensure};
use cleave_plan::constraints::Labels;
use cleave_plan::mig;
use serde_json::Value;

use super::plugin::SharedBy;
use crate::migrate::fields::Section;
use crate::migrate::report::{Notes, SettingPlace};

/// Label with the name of a node's pool.
pub(in crate::migrate) const GKE_POOL_LABEL: &str = "cloud.google.com/gke-nodepool";
/// Label with the model of a node's GPUs.
pub(in crate::migrate) const ACCELERATOR_LABEL: &str = "cloud.google.com/gke-accelerator";
/// Label with the strategy that GKE uses to share GPUs.
pub(in crate::migrate) const STRATEGY_LABEL: &str = "cloud.google.com/gke-gpu-sharing-strategy";
/// Label with the maximum number of clients that share each GPU.
pub(in crate::migrate) const CLIENTS_LABEL: &str = "cloud.google.com/gke-max-shared-clients-per-gpu";
/// Label with the profile of the MIG instances.
pub(in crate::migrate) const PARTITION_LABEL: &str = "cloud.google.com/gke-gpu-partition-size";

/// Models of GKE that support MIG: GKE's name, NVML's name, and the memory in MiB.
const MODELS: [(&str, &str, u64); 6] = [
    ("nvidia-tesla-a100", "NVIDIA A100-SXM4-40GB", 40_960),
    ("nvidia-a100-80gb", "NVIDIA A100-SXM4-80GB", 81_920),
    ("nvidia-h100-80gb", "NVIDIA H100 80GB HBM3", 81_559),
    ("nvidia-h100-mega-80gb", "NVIDIA H100 80GB HBM3", 81_559),
    ("nvidia-h200-141gb", "NVIDIA H200", 143_771),
    ("nvidia-b200", "NVIDIA B200", 183_359),
];

/// A node pool with GPUs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::migrate) struct Pool {
    /// Name of the pool. Empty if the input does not name the pool.
    pub(in crate::migrate) name: String,
    /// The GKE labels of the pool's nodes. Pods use these labels to select the pool.
    pub(in crate::migrate) labels: Labels,
    /// How GPUs or MIG instances are shared, and the number of clients of each GPU or instance.
    pub(in crate::migrate) shared: Option<(Strategy, u32)>,
    /// Profile of the MIG instances.
    pub(in crate::migrate) partition: Option<String>,
    /// The number of MIG instances of each GPU. `None` if the pool has no instances, or if the
    /// model or the profile is unknown.
    pub(in crate::migrate) instances: Option<usize>,
}

/// How GKE shares GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::migrate) enum Strategy {
    TimeSharing,
    Mps,
}

impl From<Strategy> for SharedBy {
    fn from(strategy: Strategy) -> Self {
        match strategy {
            Strategy::TimeSharing => Self::TimeSlicing,
            Strategy::Mps => Self::Mps,
        }
    }
}

/// Returns whether a mapping describes a node pool.
pub(in crate::migrate) fn is_pool(value: &Value) -> bool {
    value.pointer("/config/accelerators").is_some()
}

/// Returns whether a node with these labels belongs to a GKE node pool with GPUs.
pub(in crate::migrate) fn is_gke_node(labels: &Labels) -> bool {
    labels.contains_key(ACCELERATOR_LABEL)
}

/// Parses a description of a node pool.
///
/// # Errors
/// Returns an error if a field has a wrong type or a value that GKE does not set.
pub(in crate::migrate) fn parse(source: &str, value: &Value, notes: &mut Notes) -> Result<Vec<Pool>> {
    let name = value.get("name").and_then(Value::as_str).unwrap_or_default();
    let accelerators = value.pointer("/config/accelerators").cloned().unwrap_or_default();
    let mut wrapper = Section::root(source, serde_json::json!({"accelerators": accelerators}))?;
    let mut pools = Vec::new();
    for mut accelerator in wrapper.take_sections("accelerators")?.unwrap_or_default() {
        let mut labels = Labels::new();
        labels.insert(GKE_POOL_LABEL.to_owned(), name.to_owned());
        let kind = accelerator.take_string("acceleratorType")?;
        if let Some((_, kind)) = &kind {
            labels.insert(ACCELERATOR_LABEL.to_owned(), kind.clone());
        }
        if let Some((_, size)) = accelerator.take_string("gpuPartitionSize")?
            && !size.is_empty()
        {
            labels.insert(PARTITION_LABEL.to_owned(), size);
        }
        if let Some(mut sharing) = accelerator.take_section("gpuSharingConfig")? {
            if let Some((_, strategy)) = sharing.take_string("gpuSharingStrategy")? {
                labels.insert(STRATEGY_LABEL.to_owned(), strategy.to_lowercase().replace('_', "-"));
            }
            if let Some((_, clients)) = sharing.take_string("maxSharedClientsPerGpu")? {
                labels.insert(CLIENTS_LABEL.to_owned(), clients);
            }
            sharing.finish(notes);
        }
        accelerator.drop_keys(
            &[
                ("acceleratorCount", "The agent finds the GPUs of a node."),
                (
                    "gpuDriverInstallationConfig",
                    "Create the pool with gpu-driver-version=disabled, and install the driver with Google's DaemonSet.",
                ),
            ],
            notes,
        );
        accelerator.finish(notes);
        pools.push(from_labels(source, &labels, notes)?);
    }
    Ok(pools)
}

/// Returns the pool of a node with these labels, and reports the labels.
///
/// # Errors
/// Returns an error if a label has a value that GKE does not set.
pub(in crate::migrate) fn from_labels(source: &str, labels: &Labels, notes: &mut Notes) -> Result<Pool> {
    let place = |label: &str| SettingPlace {
        source: source.to_owned(),
        setting: label.to_owned(),
        value: labels.get(label).cloned().unwrap_or_default(),
    };
    let strategy = match labels.get(STRATEGY_LABEL).map(String::as_str) {
        None => None,
        Some("time-sharing") => Some(Strategy::TimeSharing),
        Some("mps") => Some(Strategy::Mps),
        Some(other) => bail!("{source}: {STRATEGY_LABEL} is {other:?}; it must be time-sharing or mps"),
    };
    let shared = match strategy {
        None => None,
        Some(strategy) => {
            let clients = labels
                .get(CLIENTS_LABEL)
                .with_context(|| format!("{source}: {STRATEGY_LABEL} needs {CLIENTS_LABEL}"))?;
            let parsed = clients.parse().ok().filter(|clients| (2..=u32::from(u16::MAX)).contains(clients));
            let clients: u32 = parsed.with_context(|| {
                format!("{source}: {CLIENTS_LABEL} is {clients:?}; it must be a number, at least 2")
            })?;
            notes.translated(place(STRATEGY_LABEL), "The mode of the policy.");
            notes.translated(place(CLIENTS_LABEL), "The number of shares or replicas of each GPU.");
            Some((strategy, clients))
        }
    };
    let accelerator = labels.get(ACCELERATOR_LABEL).map(String::as_str).unwrap_or_default();
    notes.dropped(
        place(ACCELERATOR_LABEL),
        "New pools have this label too. Pods may continue to select nodes by this label.",
    );
    let partition = labels.get(PARTITION_LABEL).cloned();
    let mut instances = None;
    if let Some(size) = &partition {
        ensure!(!size.is_empty(), "{source}: {PARTITION_LABEL} is empty");
        instances = max_instances_of_profile(accelerator, size);
        let text = match instances {
            Some(count) => format!("A layout of {count} instances, the maximum for the model."),
            None => "`cleave migrate` does not know the model, so the operator creates instances on demand.".to_owned(),
        };
        notes.translated(place(PARTITION_LABEL), text);
    }
    let labels = labels.iter().filter(|(label, _)| {
        [GKE_POOL_LABEL, ACCELERATOR_LABEL, STRATEGY_LABEL, CLIENTS_LABEL, PARTITION_LABEL].contains(&label.as_str())
    });
    let labels: Labels = labels.map(|(label, value)| (label.clone(), value.clone())).collect();
    let name = labels.get(GKE_POOL_LABEL).cloned().unwrap_or_default();
    Ok(Pool { name, labels, shared, partition, instances })
}

/// Returns the maximum number of instances of a profile on a GPU. Returns `None` if the model or
/// the profile is unknown.
fn max_instances_of_profile(accelerator: &str, profile: &str) -> Option<usize> {
    let (_, model, memory) = MODELS.iter().find(|(name, ..)| *name == accelerator)?;
    let profiles = mig::built_in(model, *memory)?;
    let profile = profiles.into_iter().find(|known| known.name == profile)?;
    let mut starts = profile.starts.clone();
    starts.sort_unstable();
    let mut next = 0;
    let mut count = 0;
    for start in starts {
        if start >= next {
            count += 1;
            next = start + profile.size;
        }
    }
    Some(count)
}
