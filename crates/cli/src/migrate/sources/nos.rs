//! Parses values of the Nos chart. Pure.
use anyhow::{Result, ensure};
use serde_json::Value;

use crate::migrate::fields::Section;
use crate::migrate::report::{Notes, SettingPlace};

/// Node label that determines how Nos partitions the node's GPUs.
pub(in crate::migrate) const PARTITIONING_LABEL: &str = "nos.nebuly.com/gpu-partitioning";

/// Maximum number of seconds that a policy accepts.
const MAX_SECONDS: u32 = 999_999;

/// How Nos partitions the GPUs of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::migrate) enum Partitioning {
    Mig,
    Mps,
    /// Nos accepts this value, and partitions no GPU.
    Hybrid,
}

impl Partitioning {
    /// Parses a value of [`PARTITIONING_LABEL`]. Returns `None` for any other value.
    pub(in crate::migrate) fn parse(text: &str) -> Option<Self> {
        match text {
            "mig" => Some(Self::Mig),
            "mps" => Some(Self::Mps),
            "hybrid" => Some(Self::Hybrid),
            _ => None,
        }
    }

    /// Returns the value of [`PARTITIONING_LABEL`].
    pub(in crate::migrate) const fn label_value(self) -> &'static str {
        match self {
            Self::Mig => "mig",
            Self::Mps => "mps",
            Self::Hybrid => "hybrid",
        }
    }
}

/// The values that affect policies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::migrate) struct NosValues {
    /// Seconds without a new pod after which Nos plans.
    pub(in crate::migrate) idle_seconds: Option<u32>,
    /// Maximum number of seconds that Nos waits before it plans.
    pub(in crate::migrate) timeout_seconds: Option<u32>,
}

/// Returns whether a mapping is a values file of Nos.
pub(in crate::migrate) fn is_values(value: &Value) -> bool {
    value.get("gpuPartitioner").is_some()
        || value.get("nvidiaGpuResourceMemoryGB").is_some()
        || value.get("shareTelemetry").is_some()
}

/// Parses a values file.
///
/// # Errors
/// Returns an error if a value has a wrong type or is out of range.
pub(in crate::migrate) fn parse(source: &str, value: Value, notes: &mut Notes) -> Result<NosValues> {
    const QUOTAS_NOTE: &str =
        "Nos's quotas. `cleave quotas import` translates ElasticQuota and CompositeElasticQuota objects.";
    let mut top = Section::root(source, value)?;
    let mut values = NosValues::default();
    if let Some(mut partitioner) = top.take_section("gpuPartitioner")? {
        values = read_partitioner(&mut partitioner, notes)?;
        partitioner.finish(notes);
    }
    if let Some((place, _)) = top.take_value("nvidiaGpuResourceMemoryGB") {
        notes.dropped(place, "Nos uses the setting to convert nvidia.com/gpu to nos.nebuly.com/gpu-memory in quotas. See Cleave's quotas.");
    }
    top.drop_keys(
        &[
            ("operator", QUOTAS_NOTE),
            ("scheduler", "Cleave needs no scheduler of its own. Remove schedulerName: nos-scheduler from pods."),
            ("shareTelemetry", "Cleave sends no telemetry."),
            ("allowDefaultNamespace", "Cleave runs in the namespace of its release."),
            ("nameOverride", "Names of Nos's objects."),
            ("fullnameOverride", "Names of Nos's objects."),
        ],
        notes,
    );
    top.finish(notes);
    Ok(values)
}

fn read_partitioner(partitioner: &mut Section, notes: &mut Notes) -> Result<NosValues> {
    const OWN_POD_NOTE: &str = "The setting applies only to Nos's own pods.";
    let mut values = NosValues::default();
    let check = |place: &SettingPlace, seconds: u32| {
        ensure!(
            seconds <= MAX_SECONDS,
            "{}: {} is {seconds}; it must be at most {MAX_SECONDS}",
            place.source,
            place.setting
        );
        Ok(())
    };
    if let Some((place, seconds)) = partitioner.take_number("batchWindowIdleSeconds", 1)? {
        check(&place, seconds)?;
        notes.translated(place, "dynamic.idle of the policies. Omit it to plan as soon as pods wait.");
        values.idle_seconds = Some(seconds);
    }
    if let Some((place, seconds)) = partitioner.take_number("batchWindowTimeoutSeconds", 1)? {
        check(&place, seconds)?;
        notes.translated(
            place,
            "dynamic.timeout of the policies, which is also the maximum time for a node to apply a partition.",
        );
        values.timeout_seconds = Some(seconds);
    }
    if let Some((place, _)) = partitioner.take_value("knownMigGeometries") {
        notes.dropped(place, "Cleave reads the profiles and placements of each GPU from NVML.");
    }
    partitioner.drop_keys(
        &[
            ("devicePlugin", "Cleave's agent reads the plan from its GpuNode. No ConfigMap or delay is needed."),
            ("scheduler", "Cleave plans for the cluster's own scheduler."),
            ("migAgent", "Cleave's agent creates instances and reports changes at once."),
            ("gpuAgent", "Cleave's agent reports changes at once."),
            ("enabled", OWN_POD_NOTE),
            ("logLevel", OWN_POD_NOTE),
            ("replicaCount", OWN_POD_NOTE),
            ("nameOverride", OWN_POD_NOTE),
            ("fullnameOverride", OWN_POD_NOTE),
            ("image", OWN_POD_NOTE),
            ("kubeRbacProxy", OWN_POD_NOTE),
            ("leaderElection", OWN_POD_NOTE),
            ("podSecurityContext", OWN_POD_NOTE),
            ("resources", OWN_POD_NOTE),
            ("podAnnotations", OWN_POD_NOTE),
            ("tolerations", OWN_POD_NOTE),
            ("affinity", OWN_POD_NOTE),
            ("nodeSelector", OWN_POD_NOTE),
        ],
        notes,
    );
    Ok(values)
}
