//! Parses a policy's fields into types that cannot represent an invalid policy. Pure.
//!
//! The rules are the same as in the CRD (`cleave_api::sharingpolicy`). The operator checks them
//! again, because an object may have been stored under an older CRD, or under a CRD without the
//! rules.
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_api::names::{
    RESOURCE_MPS, RESOURCE_SHARED, RESOURCE_SHARES_PREFIX, RESOURCE_TIMESLICE, is_served, mig_resource,
};
use cleave_api::sharingpolicy::{
    ClientLimits, ComputeMode, DEFAULT_MAX_UNAVAILABLE_PERCENT, DynamicPartitioning, Enforcement, GpuSelector,
    Interval, MAX_REPLICAS, MemoryPolicy, Mig, Mode, Mps, MpsEnforcement, MpsSizes, OnFailure, Rollout,
    SharingPolicySpec, ThreadPolicy, TimeSlicing,
};
use cleave_plan::device::Mode as PlannerMode;
use cleave_plan::mps::{MAX_CLIENTS, Threads};
use cleave_plan::units::Mebibytes;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// Maximum number of MIG instances in a layout. No GPU has more.
const MAX_LAYOUT_INSTANCES: usize = 8;

/// A valid policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Name of the policy.
    pub name: String,
    /// When the policy was created. A policy without this time counts as the youngest.
    pub created: Option<Timestamp>,
    /// Labels that a node must have. An empty map selects every node.
    pub nodes: BTreeMap<String, String>,
    /// Which GPUs of the selected nodes the policy applies to.
    pub gpus: GpuSelector,
    /// How the policy shares a GPU.
    pub share: SharingMode,
    /// How Cleave handles a pod that uses a GPU outside its share.
    pub enforcement: Enforcement,
    /// Time to wait for further pods, and for a node to change.
    pub dynamic: BatchRules,
    /// How a change of the policy reaches its nodes.
    pub rollout: RolloutRules,
}

/// How a policy shares a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SharingMode {
    /// The GPU is not shared.
    Whole,
    /// MPS shares of the whole GPU.
    Mps(MpsShare),
    /// Time-sliced replicas of the whole GPU.
    TimeSlicing(ReplicaRules),
    /// MIG instances in a fixed layout.
    Mig {
        /// The profile of each instance.
        layout: Vec<String>,
        /// How each instance is shared.
        each: InstanceShare,
    },
    /// Partitioned on demand, as pending pods request.
    Demand(Demand),
}

/// How a GPU may be partitioned on demand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// The setting that selects on-demand partitioning, for messages.
    pub words: &'static str,
    /// The sharing modes that are allowed.
    pub mode: PlannerMode,
    /// Rules for all MPS slices.
    pub mps: MpsRules,
    /// The equal shares that a GPU can have. `None` if only sized MPS slices are allowed.
    pub shares: Option<ShareSize>,
    /// The replicas that a GPU can have.
    pub time_slicing: Option<ReplicaRules>,
    /// How each MIG instance is shared.
    pub each: InstanceShare,
}

/// Rules for MPS slices of any size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsRules {
    /// How strictly SMs are limited.
    pub threads: Threads,
    /// Whether memory is limited.
    pub limited: bool,
    /// Whether clients of several UIDs share an MPS server.
    pub multi_user: bool,
    /// The compute mode of the GPU while it serves MPS.
    pub compute_mode: ComputeMode,
    /// Whether shares are served on a driver with an unknown MPS handshake.
    pub enforcement: MpsEnforcement,
    /// Maximum number of processes per allocation.
    pub max_clients: Option<u32>,
    /// Number of equal parts of an allocation's memory limit. Each process receives one part.
    pub memory_parts: u32,
}

impl Default for MpsRules {
    /// Returns the rules of a policy without an `mps` section.
    fn default() -> Self {
        Self {
            threads: ThreadPolicy::default().into(),
            limited: true,
            multi_user: true,
            compute_mode: ComputeMode::default(),
            enforcement: MpsEnforcement::default(),
            max_clients: None,
            memory_parts: 1,
        }
    }
}

/// How a policy shares a MIG instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceShare {
    /// The instance is not shared.
    Whole,
    /// MPS shares.
    Mps(MpsShare),
    /// Time-sliced replicas.
    TimeSlicing(ReplicaRules),
}

/// Equal MPS shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsShare {
    /// The number of shares, or their size.
    pub size: ShareSize,
    /// Rules for each share.
    pub rules: MpsRules,
    /// The resource name, if the policy sets one.
    pub resource: Option<String>,
}

/// The number of shares, or the size of one share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareSize {
    /// Number of shares, from 1 to 48.
    Units(u32),
    /// Size of one share, at least 1 MiB.
    Memory(Mebibytes),
}

/// Time-sliced replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaRules {
    /// Number of replicas, from 1 to [`MAX_REPLICAS`].
    pub replicas: u32,
    /// Length of a time slice.
    pub interval: Interval,
    /// The resource name, if the policy sets one.
    pub resource: Option<String>,
}

/// Time to wait for further pods before GPUs are repartitioned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BatchRules {
    /// Time without further pods after which the operator plans.
    pub idle: Option<Duration>,
    /// Maximum time to wait for further pods. Also the deadline for a node to change.
    pub timeout: Option<Duration>,
}

/// How a change of a policy reaches its nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RolloutRules {
    /// Maximum number of nodes that are repartitioned at a time.
    pub max_unavailable: MaxUnavailable,
    /// Whether nodes keep their current partition.
    pub paused: bool,
    /// Whether other nodes still change when a node fails.
    pub on_failure: OnFailure,
}

/// Maximum number of nodes that are repartitioned at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxUnavailable {
    /// Number of nodes, at least 1.
    Nodes(usize),
    /// Percentage of the policy's nodes, from 1 to 100.
    Percent(u32),
}

impl Default for MaxUnavailable {
    fn default() -> Self {
        Self::Percent(DEFAULT_MAX_UNAVAILABLE_PERCENT)
    }
}

impl MaxUnavailable {
    /// Returns the number of nodes, if the policy has `total` nodes. A percentage is rounded up.
    pub fn of(self, total: usize) -> usize {
        match self {
            Self::Nodes(nodes) => nodes,
            Self::Percent(percent) => total.saturating_mul(percent as usize).div_ceil(100).max(1),
        }
    }
}

impl MpsShare {
    /// Returns the name of the extended resource for shares of a whole GPU.
    pub fn resource(&self) -> &str {
        self.resource.as_deref().unwrap_or(RESOURCE_MPS)
    }
}

impl ReplicaRules {
    /// Returns the name of the extended resource for replicas of a whole GPU.
    pub fn resource(&self) -> &str {
        self.resource.as_deref().unwrap_or(RESOURCE_TIMESLICE)
    }
}

/// Returns the name of the extended resource for shares or replicas of a MIG instance. NVIDIA's
/// device plugin uses the same default.
pub fn shared_instance_resource(profile: &str, named: Option<&str>) -> String {
    named.map_or_else(|| format!("{}.shared", mig_resource(profile)), str::to_owned)
}

/// Why a policy is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A number is outside its range.
    #[error("{field} is {value}; it must be from {least} to {most}")]
    Range {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: u32,
        /// Minimum value.
        least: u32,
        /// Maximum value.
        most: u32,
    },
    /// A text does not have the form that the field requires.
    #[error("{field} is {:?}; it must be {expected}", quoted_part(value))]
    Text {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// The form that the field requires.
        expected: &'static str,
    },
    /// Fields contradict each other, or a field is missing.
    #[error("{0}")]
    Shape(&'static str),
}

/// Returns the part of a text that an error quotes. A text that was stored under a CRD without the
/// rules may have any length.
fn quoted_part(text: &str) -> String {
    text.chars().take(100).collect()
}

/// Checks and parses a policy.
///
/// # Errors
/// Returns the first rule that the policy violates.
pub fn validate(name: &str, created: Option<Timestamp>, spec: &SharingPolicySpec) -> Result<Policy, Error> {
    // Do not use `..`, so that the compiler reports an error here when a field is added. All values
    // of `replica_placement` are valid, and only the gatekeeper reads it.
    let SharingPolicySpec {
        node_selector,
        gpus,
        mode,
        mps,
        time_slicing,
        mig,
        dynamic,
        rollout,
        enforcement,
        resource_name,
        replica_placement: _,
    } = spec;
    let nodes = match node_selector {
        Some(labels) if labels.is_empty() => {
            return Err(Error::Shape("nodeSelector is empty: omit it to select every node, or name a label"));
        }
        labels => labels.clone().unwrap_or_default(),
    };
    if mps.is_some() && !matches!(mode, Mode::Mps | Mode::Auto) {
        return Err(Error::Shape("the section mps is for mode Mps or Auto"));
    }
    if time_slicing.is_some() && !matches!(mode, Mode::TimeSlicing | Mode::Auto) {
        return Err(Error::Shape("the section timeSlicing is for mode TimeSlicing or Auto"));
    }
    if mig.is_some() && !matches!(mode, Mode::Mig | Mode::Auto) {
        return Err(Error::Shape("the section mig is for mode Mig or Auto"));
    }
    let resource = resource_name.as_deref();
    let share = match mode {
        Mode::Whole => SharingMode::Whole,
        Mode::Mps => mps_share(mps.as_ref(), resource)?,
        Mode::TimeSlicing => SharingMode::TimeSlicing(replica_rules(
            time_slicing.as_ref().ok_or(Error::Shape("mode TimeSlicing needs timeSlicing.replicas"))?,
            "timeSlicing.replicas",
            resource,
        )?),
        Mode::Mig => mig_share(mig.as_ref(), resource)?,
        Mode::Auto => SharingMode::Demand(auto_demand(mps.as_ref(), time_slicing.as_ref(), mig.as_ref())?),
    };
    check_resource(resource, &share)?;
    let batch_rules = dynamic.as_ref().map(batch_rules).transpose()?.unwrap_or_default();
    if dynamic.is_some() && !matches!(share, SharingMode::Demand(_)) {
        return Err(Error::Shape("dynamic needs mode Auto, mode Mig without a layout, or mps.sizes: Dynamic"));
    }
    Ok(Policy {
        name: name.to_owned(),
        created,
        nodes,
        gpus: gpus.as_ref().map(parse_selector).transpose()?.unwrap_or_default(),
        share,
        enforcement: *enforcement,
        dynamic: batch_rules,
        rollout: rollout.as_ref().map(rollout_rules).transpose()?.unwrap_or_default(),
    })
}

fn parse_selector(selector: &GpuSelector) -> Result<GpuSelector, Error> {
    let GpuSelector { models, uuids, indices } = selector;
    if models.is_empty() && uuids.is_empty() && indices.is_empty() {
        return Err(Error::Shape("gpus selects nothing: omit it to select every GPU, or set models, uuids or indices"));
    }
    if let Some(blank) = models.iter().find(|model| model.trim().is_empty()) {
        return Err(Error::Text {
            field: "gpus.models",
            value: blank.clone(),
            expected: "a product name or part of one",
        });
    }
    if let Some(wrong) = uuids.iter().find(|uuid| !is_gpu_uuid(uuid)) {
        return Err(Error::Text {
            field: "gpus.uuids",
            value: wrong.clone(),
            expected: "a GPU's UUID, GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx",
        });
    }
    if let Some(&index) = indices.iter().find(|&&index| index > 63) {
        return Err(Error::Range { field: "gpus.indices", value: index, least: 0, most: 63 });
    }
    Ok(selector.clone())
}

fn is_gpu_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    let [prefix, groups @ ..] = groups.as_slice() else { return false };
    *prefix == "GPU"
        && groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.iter().all(|group| group.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

fn mps_share(mps: Option<&Mps>, resource: Option<&str>) -> Result<SharingMode, Error> {
    let mps = mps.ok_or(Error::Shape("mode Mps needs mps.units, mps.unitMemory or mps.sizes: Dynamic"))?;
    match equal_shares(mps, resource)? {
        Some(share) => Ok(SharingMode::Mps(share)),
        None if mps.sizes == MpsSizes::Dynamic => Ok(SharingMode::Demand(Demand {
            words: "mps.sizes: Dynamic",
            mode: PlannerMode::Mps,
            mps: mps_rules(mps)?,
            shares: None,
            time_slicing: None,
            each: InstanceShare::Whole,
        })),
        None => Err(Error::Shape("mode Mps needs mps.units, mps.unitMemory or mps.sizes: Dynamic")),
    }
}

/// Returns the shares that `units` or `unitMemory` describe, or `None` if neither is set.
fn equal_shares(mps: &Mps, resource: Option<&str>) -> Result<Option<MpsShare>, Error> {
    let Mps { units, unit_memory, sizes, .. } = mps;
    let rules = mps_rules(mps)?;
    if *sizes == MpsSizes::Dynamic && (units.is_some() || unit_memory.is_some()) {
        return Err(Error::Shape("sizes: Dynamic creates slices as pods request them: omit units and unitMemory"));
    }
    let size = match (units, unit_memory) {
        (Some(_), Some(_)) => return Err(Error::Shape("set units or unitMemory, not both")),
        (Some(units), None) => ShareSize::Units(check_range("mps.units", *units, 1, MAX_CLIENTS)?),
        (None, Some(memory)) => ShareSize::Memory(parse_mebibytes(memory)?),
        (None, None) => return Ok(None),
    };
    Ok(Some(MpsShare { size, rules, resource: resource.map(str::to_owned) }))
}

fn mps_rules(mps: &Mps) -> Result<MpsRules, Error> {
    let Mps { units: _, unit_memory: _, sizes: _, threads, memory, multi_user, compute_mode, enforcement, clients } =
        mps;
    let (max_clients, memory_parts) = clients.as_ref().map_or(Ok((None, 1)), client_rules)?;
    Ok(MpsRules {
        threads: (*threads).into(),
        limited: *memory == MemoryPolicy::Limited,
        multi_user: *multi_user,
        compute_mode: *compute_mode,
        enforcement: *enforcement,
        max_clients,
        memory_parts,
    })
}

fn client_rules(clients: &ClientLimits) -> Result<(Option<u32>, u32), Error> {
    let ClientLimits { max, split } = clients;
    if let Some(max) = max {
        check_range("clients.max", *max, 1, MAX_CLIENTS)?;
    }
    match (split, max) {
        (false, max) => Ok((*max, 1)),
        (true, Some(max)) => Ok((Some(*max), *max)),
        (true, None) => Err(Error::Shape("clients.split divides an allocation's memory by clients.max: set max too")),
    }
}

fn replica_rules(slicing: &TimeSlicing, field: &'static str, resource: Option<&str>) -> Result<ReplicaRules, Error> {
    let TimeSlicing { replicas, interval } = slicing;
    Ok(ReplicaRules {
        replicas: check_range(field, *replicas, 1, MAX_REPLICAS)?,
        interval: *interval,
        resource: resource.map(str::to_owned),
    })
}

fn mig_share(mig: Option<&Mig>, resource: Option<&str>) -> Result<SharingMode, Error> {
    let demand = |each| {
        SharingMode::Demand(Demand {
            words: "mode Mig without a layout",
            mode: PlannerMode::Mig,
            mps: MpsRules::default(),
            shares: None,
            time_slicing: None,
            each,
        })
    };
    let Some(Mig { layout, sharing }) = mig else { return Ok(demand(InstanceShare::Whole)) };
    let each = match sharing {
        None => InstanceShare::Whole,
        Some(sharing) => match (&sharing.mps, &sharing.time_slicing) {
            (Some(mps), None) => InstanceShare::Mps(
                equal_shares(mps, resource)?.ok_or(Error::Shape("mig.sharing.mps needs units or unitMemory"))?,
            ),
            (None, Some(slicing)) => {
                InstanceShare::TimeSlicing(replica_rules(slicing, "mig.sharing.timeSlicing.replicas", resource)?)
            }
            _ => return Err(Error::Shape("mig.sharing needs either mps or timeSlicing")),
        },
    };
    let Some(layout) = layout else { return check_on_demand_sharing(each).map(demand) };
    if layout.is_empty() {
        return Err(Error::Shape("layout is empty: omit it to partition GPUs as pods request, or name a profile"));
    }
    if layout.len() > MAX_LAYOUT_INSTANCES {
        return Err(Error::Shape("layout names more than 8 profiles: no GPU can have that many MIG instances"));
    }
    if let Some(wrong) = layout.iter().find(|profile| !is_profile(profile)) {
        return Err(Error::Text {
            field: "mig.layout",
            value: wrong.clone(),
            expected: "a MIG profile as nvidia-smi mig -lgip names it without MIG, for example 1g.10gb",
        });
    }
    Ok(SharingMode::Mig { layout: layout.clone(), each })
}

/// Returns whether a text is a MIG profile, such as `1g.10gb` or `1g.10gb+me`.
fn is_profile(text: &str) -> bool {
    let (size, attribute) = match text.split_once(['+', '-']) {
        Some((size, attribute)) => (size, Some(attribute)),
        None => (text, None),
    };
    let digits = |part: &str, most: usize| {
        (1..=most).contains(&part.len()) && !part.starts_with('0') && part.bytes().all(|byte| byte.is_ascii_digit())
    };
    let known = attribute.is_none_or(|attribute| matches!(attribute, "me" | "gfx" | "me.all"));
    let named = size.split_once("g.").is_some_and(|(compute, memory)| {
        digits(compute, 1) && memory.strip_suffix("gb").is_some_and(|memory| digits(memory, 3))
    });
    known && named
}

/// Checks the sharing of MIG instances that are created on demand. Such instances need a fixed
/// number of shares, because a request for shares must determine which instance to create.
fn check_on_demand_sharing(each: InstanceShare) -> Result<InstanceShare, Error> {
    match each {
        InstanceShare::Mps(MpsShare { size: ShareSize::Memory(_), .. }) => Err(Error::Shape(
            "mig.sharing.mps.unitMemory needs mig.layout: to create instances as pods request them, set mig.sharing.mps.units",
        )),
        each => Ok(each),
    }
}

/// Returns the on-demand partitioning of mode Auto. Sized slices, MIG instances and whole GPUs are
/// always allowed. Shares and replicas are allowed only if their sections specify a number. A
/// `mig.layout` is checked and then ignored, because pods determine the instances.
fn auto_demand(mps: Option<&Mps>, slicing: Option<&TimeSlicing>, mig: Option<&Mig>) -> Result<Demand, Error> {
    let each = match mig_share(mig, None)? {
        SharingMode::Mig { each, .. } | SharingMode::Demand(Demand { each, .. }) => check_on_demand_sharing(each)?,
        _ => InstanceShare::Whole,
    };
    Ok(Demand {
        words: "mode Auto",
        mode: PlannerMode::Auto,
        mps: mps.map(mps_rules).transpose()?.unwrap_or_default(),
        shares: mps.map(|mps| equal_shares(mps, None)).transpose()?.flatten().map(|share| share.size),
        time_slicing: slicing.map(|slicing| replica_rules(slicing, "timeSlicing.replicas", None)).transpose()?,
        each,
    })
}

fn check_resource(resource: Option<&str>, share: &SharingMode) -> Result<(), Error> {
    let Some(resource) = resource else { return Ok(()) };
    let wrong = |expected| Err(Error::Text { field: "resourceName", value: resource.to_owned(), expected });
    let own = resource.strip_prefix(RESOURCE_SHARES_PREFIX).unwrap_or_default();
    let well_formed = resource == RESOURCE_SHARED
        || ((1..=58).contains(&own.len())
            && own.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'-' | b'.'))
            && own.starts_with(|first: char| first.is_ascii_alphanumeric())
            && own.ends_with(|last: char| last.is_ascii_alphanumeric()));
    if !well_formed || !is_served(resource) {
        return wrong(
            "nvidia.com/gpu.shared, or nvidia.com/gpu- followed by lower-case letters, digits, dashes and dots",
        );
    }
    if own.strip_suffix("gb").is_some_and(|size| !size.is_empty() && size.bytes().all(|byte| byte.is_ascii_digit())) {
        return wrong("another name: this one is reserved for sized slices");
    }
    match share {
        SharingMode::Mps(_) if matches!(resource, RESOURCE_TIMESLICE | RESOURCE_SHARED) => {
            wrong("another name: this one means time-sliced replicas")
        }
        SharingMode::TimeSlicing(_) if resource == RESOURCE_MPS => wrong("another name: this one means MPS shares"),
        SharingMode::Mig { .. } if matches!(resource, RESOURCE_MPS | RESOURCE_TIMESLICE | RESOURCE_SHARED) => {
            wrong("another name: this one means shares of whole GPUs")
        }
        SharingMode::Mps(_)
        | SharingMode::TimeSlicing(_)
        | SharingMode::Mig { each: InstanceShare::Mps(_) | InstanceShare::TimeSlicing(_), .. } => Ok(()),
        SharingMode::Whole | SharingMode::Demand(_) | SharingMode::Mig { each: InstanceShare::Whole, .. } => {
            Err(Error::Shape(
                "resourceName needs equal shares or replicas: mode Mps with units or unitMemory, mode TimeSlicing, or mig.sharing",
            ))
        }
    }
}

fn batch_rules(dynamic: &DynamicPartitioning) -> Result<BatchRules, Error> {
    let DynamicPartitioning { idle, timeout } = dynamic;
    let idle = idle.as_deref().map(|text| parse_duration("dynamic.idle", text)).transpose()?;
    let timeout = timeout.as_deref().map(|text| parse_duration("dynamic.timeout", text)).transpose()?;
    if let (Some(idle), Some(timeout)) = (idle, timeout)
        && timeout < idle
    {
        return Err(Error::Shape("dynamic.timeout must not be shorter than dynamic.idle"));
    }
    Ok(BatchRules { idle, timeout })
}

fn rollout_rules(rollout: &Rollout) -> Result<RolloutRules, Error> {
    let Rollout { max_unavailable, paused, on_failure } = rollout;
    let wrong = |value: String| Error::Text {
        field: "rollout.maxUnavailable",
        value,
        expected: "a number of nodes, at least 1, or a percentage from 1% to 100%",
    };
    let parsed = match max_unavailable {
        IntOrString::Int(nodes) => usize::try_from(*nodes).ok().filter(|&nodes| nodes > 0).map(MaxUnavailable::Nodes),
        IntOrString::String(text) => text
            .strip_suffix('%')
            .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
            .and_then(|digits| digits.parse().ok())
            .filter(|percent| (1..=100).contains(percent))
            .map(MaxUnavailable::Percent),
    };
    let max_unavailable = parsed.ok_or_else(|| match max_unavailable {
        IntOrString::Int(nodes) => wrong(nodes.to_string()),
        IntOrString::String(text) => wrong(text.clone()),
    })?;
    Ok(RolloutRules { max_unavailable, paused: *paused, on_failure: *on_failure })
}

fn parse_duration(field: &'static str, text: &str) -> Result<Duration, Error> {
    let wrong =
        || Error::Text { field, value: text.to_owned(), expected: "a duration, for example 500ms, 10s or 1m30s" };
    let parsed: SignedDuration = text.parse().map_err(|_| wrong())?;
    Duration::try_from(parsed).map_err(|_| wrong())
}

fn parse_mebibytes(text: &str) -> Result<Mebibytes, Error> {
    let parsed = [("Gi", 1024), ("Mi", 1)].into_iter().find_map(|(suffix, factor)| {
        let digits = text.strip_suffix(suffix)?;
        let number: u64 = digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
        number.checked_mul(factor).filter(|&mebibytes| mebibytes > 0)
    });
    parsed.map(Mebibytes).ok_or_else(|| Error::Text {
        field: "mps.unitMemory",
        value: text.to_owned(),
        expected: "a whole number of Mi or Gi, for example 10Gi or 5120Mi",
    })
}

fn check_range(field: &'static str, value: u32, least: u32, most: u32) -> Result<u32, Error> {
    if (least..=most).contains(&value) { Ok(value) } else { Err(Error::Range { field, value, least, most }) }
}

#[cfg(test)]
mod tests {
    use cleave_api::SharingPolicy;

    use super::*;

    fn fixtures(kind: &str) -> Vec<(String, String)> {
        let dir = format!("{}/../api/tests/fixtures/{kind}", env!("CARGO_MANIFEST_DIR"));
        let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        paths.map(|path| (path.display().to_string(), std::fs::read_to_string(path).unwrap())).collect()
    }

    fn validate_yaml(text: &str) -> Result<Policy, String> {
        let policy: SharingPolicy = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        validate("p", None, &policy.spec).map_err(|error| error.to_string())
    }

    #[test]
    fn policies_that_the_crd_accepts_are_valid() {
        for (name, text) in fixtures("good") {
            assert_eq!(validate_yaml(&text).err(), None, "{name}");
        }
    }

    /// The operator also applies the CRD's rules to objects that were stored before the rules
    /// existed.
    #[test]
    fn policies_that_the_crd_refuses_are_invalid() {
        for (name, text) in fixtures("bad") {
            // The API server drops or refuses unknown fields. The rest of this object is valid.
            if !name.contains("field-unknown") {
                assert!(validate_yaml(&text).is_err(), "{name}");
            }
        }
    }

    #[test]
    fn fields_are_parsed_into_typed_values() {
        let text = |name: &str| {
            std::fs::read_to_string(format!("{}/../api/tests/fixtures/good/{name}.yaml", env!("CARGO_MANIFEST_DIR")))
                .unwrap()
        };
        let SharingMode::Mps(share) = validate_yaml(&text("shares-by-memory")).unwrap().share else {
            panic!("not MPS")
        };
        assert_eq!(share.size, ShareSize::Memory(Mebibytes(10 * 1024)));
        assert_eq!((share.rules.max_clients, share.rules.memory_parts), (Some(4), 4));
        assert_eq!(share.resource(), "nvidia.com/gpu-10gi");
        assert_eq!(
            validate_yaml(&text("dynamic-slices")).unwrap().dynamic,
            BatchRules { idle: Some(Duration::from_millis(500)), timeout: Some(Duration::from_secs(90)) }
        );
        let SharingMode::Demand(demand) = validate_yaml(&text("mig-dynamic")).unwrap().share else {
            panic!("not on demand")
        };
        assert_eq!((demand.words, demand.mode), ("mode Mig without a layout", PlannerMode::Mig));
        let SharingMode::Demand(auto) = validate_yaml(&text("auto")).unwrap().share else { panic!("not on demand") };
        assert_eq!(auto.mode, PlannerMode::Auto);
        assert!(auto.mps.multi_user && auto.mps.limited);
    }

    #[test]
    fn the_number_of_unavailable_nodes_is_a_number_or_a_percentage_rounded_up() {
        let rules = |rollout: &str| {
            let text = format!(
                "apiVersion: cleave.dev/v1alpha1\nkind: SharingPolicy\nmetadata: {{name: p}}\nspec: {{mode: Whole{rollout}}}"
            );
            validate_yaml(&text).map(|policy| policy.rollout)
        };
        let of = |rollout: &str, total| rules(rollout).unwrap().max_unavailable.of(total);
        assert_eq!([1, 2, 4, 5, 100].map(|total| of("", total)), [1, 1, 1, 2, 25]);
        assert_eq!(of(", rollout: {paused: true}", 100), 25);
        assert_eq!([1, 9].map(|total| of(", rollout: {maxUnavailable: 3}", total)), [3, 3]);
        assert_eq!(of(", rollout: {maxUnavailable: 100%}", 7), 7);
        for wrong in ["0", "-1", "0%", "101%", "5", "+5%", "%", "2.5%"] {
            let error = rules(&format!(", rollout: {{maxUnavailable: '{wrong}'}}")).unwrap_err();
            assert!(error.starts_with("rollout.maxUnavailable is "), "{error}");
        }
        assert!(rules(", rollout: {maxUnavailable: 0}").is_err());
        assert!(rules(", rollout: {maxUnavailable: -1}").is_err());
    }

    #[test]
    fn an_error_names_the_field_and_its_valid_values() {
        let error = validate_yaml(&fixtures("bad").into_iter().find(|(name, _)| name.contains("units-49")).unwrap().1)
            .unwrap_err();
        assert_eq!(error, "mps.units is 49; it must be from 1 to 48");
    }
}
