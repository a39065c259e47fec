//! A policy's fields, parsed once into what cannot be wrong. Pure.
//!
//! The rules are those of the definition (`cleave_api::sharingpolicy`), told again: an object may
//! have been stored under an older definition, or one whose rules somebody removed.
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_api::names::{
    RESOURCE_MPS, RESOURCE_SHARED, RESOURCE_SHARES_PREFIX, RESOURCE_TIMESLICE, is_served, mig_resource,
};
use cleave_api::sharingpolicy::{
    Clients, ComputeMode, Dynamic, Enforcement, GpuSelector, Interval, MAX_REPLICAS, MemoryPolicy, Mig, Mode, Mps,
    SharingPolicySpec, Sizes, ThreadPolicy, TimeSlicing,
};
use cleave_plan::device::Mode as CutMode;
use cleave_plan::mps::{MAX_CLIENTS, Threads};
use cleave_plan::units::Mebibytes;
use jiff::{SignedDuration, Timestamp};

/// The most MIG instances that a layout may name; no GPU has as many.
const MAX_INSTANCES: usize = 8;

/// A policy that means something.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Its name.
    pub name: String,
    /// When it was created; none counts as the youngest.
    pub created: Option<Timestamp>,
    /// Labels that a node must have; none selects every node.
    pub nodes: BTreeMap<String, String>,
    /// Which of their GPUs.
    pub gpus: GpuSelector,
    /// What a GPU is made into.
    pub share: Share,
    /// What happens to a pod that leaves its limits.
    pub enforcement: Enforcement,
    /// How pending pods are gathered.
    pub dynamic: Gathering,
}

/// What a policy makes of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Share {
    /// Undivided.
    Whole,
    /// MPS shares of the whole GPU.
    Mps(MpsShare),
    /// Time-sliced replicas of the whole GPU.
    TimeSlicing(Turns),
    /// MIG instances of these profiles.
    Mig {
        /// Profile names.
        layout: Vec<String>,
        /// What each instance is made into.
        each: InstanceShare,
    },
    /// What pending pods want.
    Demand(Demand),
}

/// What pending pods may have a GPU cut into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// What of the policy says so, in its own words.
    pub words: &'static str,
    /// The ways of cutting that are allowed.
    pub mode: CutMode,
    /// What holds for all MPS slices.
    pub mps: MpsRules,
    /// Equal shares that a GPU can have; none where only sized slices can be cut.
    pub shares: Option<ShareSize>,
    /// Replicas that a GPU can have.
    pub turns: Option<Turns>,
    /// What each MIG instance is made into.
    pub each: InstanceShare,
}

/// What holds for all MPS slices of a GPU, whatever their size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsRules {
    /// How hard the SM limit is.
    pub threads: Threads,
    /// Memory is limited.
    pub limited: bool,
    /// Clients of several uids share a server.
    pub multi_user: bool,
    /// The GPU's compute mode meanwhile.
    pub compute_mode: ComputeMode,
    /// Most processes of one allocation.
    pub max_clients: Option<u32>,
    /// Each process gets this part of its allocation's memory.
    pub memory_parts: u32,
}

impl Default for MpsRules {
    /// What a policy that says nothing of MPS means.
    fn default() -> Self {
        Self {
            threads: ThreadPolicy::default().into(),
            limited: true,
            multi_user: true,
            compute_mode: ComputeMode::default(),
            max_clients: None,
            memory_parts: 1,
        }
    }
}

/// What a policy makes of a MIG instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceShare {
    /// Undivided.
    Whole,
    /// MPS shares.
    Mps(MpsShare),
    /// Time-sliced replicas.
    TimeSlicing(Turns),
}

/// Equal MPS shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsShare {
    /// How many, or how large.
    pub size: ShareSize,
    /// What holds for each.
    pub rules: MpsRules,
    /// Another resource name.
    pub resource: Option<String>,
}

/// How many shares, or how large one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareSize {
    /// 1 to 48.
    Units(u32),
    /// At least 1 MiB.
    Memory(Mebibytes),
}

/// Time-sliced replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turns {
    /// 1 to [`MAX_REPLICAS`].
    pub replicas: u32,
    /// How long a turn is.
    pub interval: Interval,
    /// Another resource name.
    pub resource: Option<String>,
}

/// How pending pods are gathered before GPUs are cut anew.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gathering {
    /// Plan when no further pod came for this long.
    pub idle: Option<Duration>,
    /// Plan after this long at the latest.
    pub timeout: Option<Duration>,
}

impl MpsShare {
    /// The extended resource of shares of a whole GPU.
    pub fn resource(&self) -> &str {
        self.resource.as_deref().unwrap_or(RESOURCE_MPS)
    }
}

impl Turns {
    /// The extended resource of replicas of a whole GPU.
    pub fn resource(&self) -> &str {
        self.resource.as_deref().unwrap_or(RESOURCE_TIMESLICE)
    }
}

/// The extended resource of shares or replicas of a MIG instance: as NVIDIA's plugin names it,
/// unless the policy says otherwise.
pub fn shared_instance_resource(profile: &str, named: Option<&str>) -> String {
    named.map_or_else(|| format!("{}.shared", mig_resource(profile)), str::to_owned)
}

/// Why a policy means nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A number outside its range.
    #[error("{field} is {value}: it must be from {least} to {most}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// The least that is allowed.
        least: u32,
        /// The most that is allowed.
        most: u32,
    },
    /// A text that says nothing.
    #[error("{field} is {:?}: it must be {expected}", beginning(value))]
    Text {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// Fields that do not go together, or one that is missing.
    #[error("{0}")]
    Shape(&'static str),
}

/// What an error repeats of a text, which may have any length where somebody removed the
/// definition's rules.
fn beginning(text: &str) -> String {
    text.chars().take(100).collect()
}

/// Checks and parses a policy.
pub fn validate(name: &str, created: Option<Timestamp>, spec: &SharingPolicySpec) -> Result<Policy, Error> {
    // No `..`: a new field must be thought of here.
    let SharingPolicySpec { node_selector, gpus, mode, mps, time_slicing, mig, dynamic, enforcement, resource_name } =
        spec;
    let nodes = match node_selector {
        Some(labels) if labels.is_empty() => {
            return Err(Error::Shape("nodeSelector is empty: leave it out to select every node, or name a label"));
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
        Mode::Whole => Share::Whole,
        Mode::Mps => mps_share(mps.as_ref(), resource)?,
        Mode::TimeSlicing => Share::TimeSlicing(turns(
            time_slicing.as_ref().ok_or(Error::Shape("mode TimeSlicing needs timeSlicing.replicas"))?,
            "timeSlicing.replicas",
            resource,
        )?),
        Mode::Mig => mig_share(mig.as_ref(), resource)?,
        Mode::Auto => Share::Demand(auto(mps.as_ref(), time_slicing.as_ref(), mig.as_ref())?),
    };
    check_resource(resource, &share)?;
    let gathering = dynamic.as_ref().map(gathering).transpose()?.unwrap_or_default();
    if dynamic.is_some() && !matches!(share, Share::Demand(_)) {
        return Err(Error::Shape("dynamic says when GPUs are cut anew, and nothing is cut anew here"));
    }
    Ok(Policy {
        name: name.to_owned(),
        created,
        nodes,
        gpus: gpus.as_ref().map(selector).transpose()?.unwrap_or_default(),
        share,
        enforcement: *enforcement,
        dynamic: gathering,
    })
}

fn selector(selector: &GpuSelector) -> Result<GpuSelector, Error> {
    let GpuSelector { models, uuids, indices } = selector;
    if models.is_empty() && uuids.is_empty() && indices.is_empty() {
        return Err(Error::Shape(
            "gpus selects nothing: leave it out to select every GPU, or give models, uuids or indices",
        ));
    }
    if let Some(blank) = models.iter().find(|model| model.trim().is_empty()) {
        return Err(Error::Text {
            field: "gpus.models",
            value: blank.clone(),
            expected: "a product name or a part of one",
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

fn mps_share(mps: Option<&Mps>, resource: Option<&str>) -> Result<Share, Error> {
    let mps = mps.ok_or(Error::Shape("mode Mps needs mps.units, mps.unitMemory or mps.sizes: Dynamic"))?;
    match equal_shares(mps, resource)? {
        Some(share) => Ok(Share::Mps(share)),
        None if mps.sizes == Sizes::Dynamic => Ok(Share::Demand(Demand {
            words: "mps.sizes: Dynamic",
            mode: CutMode::Mps,
            mps: mps_rules(mps)?,
            shares: None,
            turns: None,
            each: InstanceShare::Whole,
        })),
        None => Err(Error::Shape("mode Mps needs mps.units, mps.unitMemory or mps.sizes: Dynamic")),
    }
}

/// The shares that `units` or `unitMemory` describe; none where neither is given.
fn equal_shares(mps: &Mps, resource: Option<&str>) -> Result<Option<MpsShare>, Error> {
    let Mps { units, unit_memory, sizes, threads: _, memory: _, multi_user: _, compute_mode: _, clients: _ } = mps;
    let rules = mps_rules(mps)?;
    if *sizes == Sizes::Dynamic && (units.is_some() || unit_memory.is_some()) {
        return Err(Error::Shape("sizes: Dynamic cuts slices as pods ask for them: leave units and unitMemory out"));
    }
    let size = match (units, unit_memory) {
        (Some(_), Some(_)) => return Err(Error::Shape("give units or unitMemory, not both")),
        (Some(units), None) => ShareSize::Units(in_range("mps.units", *units, 1, MAX_CLIENTS)?),
        (None, Some(memory)) => ShareSize::Memory(whole_mebibytes(memory)?),
        (None, None) => return Ok(None),
    };
    Ok(Some(MpsShare { size, rules, resource: resource.map(str::to_owned) }))
}

fn mps_rules(mps: &Mps) -> Result<MpsRules, Error> {
    let Mps { units: _, unit_memory: _, sizes: _, threads, memory, multi_user, compute_mode, clients } = mps;
    let (max_clients, memory_parts) = clients.as_ref().map_or(Ok((None, 1)), client_rule)?;
    Ok(MpsRules {
        threads: (*threads).into(),
        limited: *memory == MemoryPolicy::Limited,
        multi_user: *multi_user,
        compute_mode: *compute_mode,
        max_clients,
        memory_parts,
    })
}

fn client_rule(clients: &Clients) -> Result<(Option<u32>, u32), Error> {
    let Clients { max, split } = clients;
    if let Some(max) = max {
        in_range("clients.max", *max, 1, MAX_CLIENTS)?;
    }
    match (split, max) {
        (false, max) => Ok((*max, 1)),
        (true, Some(max)) => Ok((Some(*max), *max)),
        (true, None) => Err(Error::Shape("clients.split divides an allocation's memory by clients.max: give max too")),
    }
}

fn turns(slicing: &TimeSlicing, field: &'static str, resource: Option<&str>) -> Result<Turns, Error> {
    let TimeSlicing { replicas, interval } = slicing;
    Ok(Turns {
        replicas: in_range(field, *replicas, 1, MAX_REPLICAS)?,
        interval: *interval,
        resource: resource.map(str::to_owned),
    })
}

fn mig_share(mig: Option<&Mig>, resource: Option<&str>) -> Result<Share, Error> {
    let demand = |each| {
        Share::Demand(Demand {
            words: "mode Mig without a layout",
            mode: CutMode::Mig,
            mps: MpsRules::default(),
            shares: None,
            turns: None,
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
                InstanceShare::TimeSlicing(turns(slicing, "mig.sharing.timeSlicing.replicas", resource)?)
            }
            _ => return Err(Error::Shape("mig.sharing needs mps or timeSlicing, one of the two")),
        },
    };
    let Some(layout) = layout else { return by_demand(each).map(demand) };
    if layout.is_empty() {
        return Err(Error::Shape("mig.layout is empty: leave it out to have GPUs cut as pods want, or name a profile"));
    }
    if layout.len() > MAX_INSTANCES {
        return Err(Error::Shape("mig.layout names more than 8 profiles: no GPU has as many MIG instances"));
    }
    if let Some(wrong) = layout.iter().find(|profile| !is_profile(profile)) {
        return Err(Error::Text {
            field: "mig.layout",
            value: wrong.clone(),
            expected: "a MIG profile as nvidia-smi mig -lgip names it without MIG, for example 1g.10gb",
        });
    }
    Ok(Share::Mig { layout: layout.clone(), each })
}

/// `1g.10gb`, `1g.10gb+me`.
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

/// Instances that are cut as pods ask for them have one number of shares, whatever their profile: a
/// request for shares must say what to cut.
fn by_demand(each: InstanceShare) -> Result<InstanceShare, Error> {
    match each {
        InstanceShare::Mps(MpsShare { size: ShareSize::Memory(_), .. }) => Err(Error::Shape(
            "mig.sharing.mps.unitMemory needs mig.layout: where instances are cut as pods ask for them, give mig.sharing.mps.units",
        )),
        each => Ok(each),
    }
}

/// Mode Auto: sized slices, MIG instances and whole GPUs always; shares and replicas where their
/// sections say how many. A `mig.layout` is checked and otherwise of no use: pods say what is cut.
fn auto(mps: Option<&Mps>, slicing: Option<&TimeSlicing>, mig: Option<&Mig>) -> Result<Demand, Error> {
    let each = match mig_share(mig, None)? {
        Share::Mig { each, .. } | Share::Demand(Demand { each, .. }) => by_demand(each)?,
        _ => InstanceShare::Whole,
    };
    Ok(Demand {
        words: "mode Auto",
        mode: CutMode::Auto,
        mps: mps.map(mps_rules).transpose()?.unwrap_or_default(),
        shares: mps.map(|mps| equal_shares(mps, None)).transpose()?.flatten().map(|share| share.size),
        turns: slicing.map(|slicing| turns(slicing, "timeSlicing.replicas", None)).transpose()?,
        each,
    })
}

fn check_resource(resource: Option<&str>, share: &Share) -> Result<(), Error> {
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
        return wrong("another name: this one is kept for slices of that many GiB");
    }
    match share {
        Share::Mps(_) if matches!(resource, RESOURCE_TIMESLICE | RESOURCE_SHARED) => {
            wrong("another name: this one is of time-sliced replicas")
        }
        Share::TimeSlicing(_) if resource == RESOURCE_MPS => wrong("another name: this one is of MPS shares"),
        Share::Mig { .. } if matches!(resource, RESOURCE_MPS | RESOURCE_TIMESLICE | RESOURCE_SHARED) => {
            wrong("another name: this one is of shares of whole GPUs")
        }
        Share::Mps(_)
        | Share::TimeSlicing(_)
        | Share::Mig { each: InstanceShare::Mps(_) | InstanceShare::TimeSlicing(_), .. } => Ok(()),
        Share::Whole | Share::Demand(_) | Share::Mig { each: InstanceShare::Whole, .. } => Err(Error::Shape(
            "resourceName renames equal shares or replicas: it is for mode Mps with units or unitMemory, mode TimeSlicing, and mig.sharing",
        )),
    }
}

fn gathering(dynamic: &Dynamic) -> Result<Gathering, Error> {
    let Dynamic { idle, timeout } = dynamic;
    let idle = idle.as_deref().map(|text| duration("dynamic.idle", text)).transpose()?;
    let timeout = timeout.as_deref().map(|text| duration("dynamic.timeout", text)).transpose()?;
    if let (Some(idle), Some(timeout)) = (idle, timeout)
        && timeout < idle
    {
        return Err(Error::Shape("dynamic.timeout is the longest wait and cannot be shorter than dynamic.idle"));
    }
    Ok(Gathering { idle, timeout })
}

fn duration(field: &'static str, text: &str) -> Result<Duration, Error> {
    let wrong =
        || Error::Text { field, value: text.to_owned(), expected: "a duration, for example 500ms, 10s or 1m30s" };
    let parsed: SignedDuration = text.parse().map_err(|_| wrong())?;
    Duration::try_from(parsed).map_err(|_| wrong())
}

fn whole_mebibytes(text: &str) -> Result<Mebibytes, Error> {
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

fn in_range(field: &'static str, value: u32, least: u32, most: u32) -> Result<u32, Error> {
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

    fn judge(text: &str) -> Result<Policy, String> {
        let policy: SharingPolicy = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        validate("p", None, &policy.spec).map_err(|error| error.to_string())
    }

    #[test]
    fn what_the_definition_takes_is_taken() {
        for (name, text) in fixtures("good") {
            assert_eq!(judge(&text).err(), None, "{name}");
        }
    }

    /// An object stored before a rule existed is refused here by the same rule.
    #[test]
    fn what_the_definition_refuses_is_refused() {
        for (name, text) in fixtures("bad") {
            // The API server drops unknown fields, or refuses them; what is left of this one is
            // fine.
            if !name.contains("field-unknown") {
                assert!(judge(&text).is_err(), "{name}");
            }
        }
    }

    #[test]
    fn fields_are_parsed_into_their_meaning() {
        let text = |name: &str| {
            std::fs::read_to_string(format!("{}/../api/tests/fixtures/good/{name}.yaml", env!("CARGO_MANIFEST_DIR")))
                .unwrap()
        };
        let Share::Mps(share) = judge(&text("shares-by-memory")).unwrap().share else { panic!("not MPS") };
        assert_eq!(share.size, ShareSize::Memory(Mebibytes(10 * 1024)));
        assert_eq!((share.rules.max_clients, share.rules.memory_parts), (Some(4), 4));
        assert_eq!(share.resource(), "nvidia.com/gpu-10gi");
        assert_eq!(
            judge(&text("dynamic-slices")).unwrap().dynamic,
            Gathering { idle: Some(Duration::from_millis(500)), timeout: Some(Duration::from_secs(90)) }
        );
        let Share::Demand(demand) = judge(&text("mig-dynamic")).unwrap().share else { panic!("not by demand") };
        assert_eq!((demand.words, demand.mode), ("mode Mig without a layout", CutMode::Mig));
        let Share::Demand(auto) = judge(&text("auto")).unwrap().share else { panic!("not by demand") };
        assert_eq!(auto.mode, CutMode::Auto);
        assert!(auto.mps.multi_user && auto.mps.limited);
    }

    #[test]
    fn a_refusal_names_the_field_and_what_it_should_be() {
        let error =
            judge(&fixtures("bad").into_iter().find(|(name, _)| name.contains("units-49")).unwrap().1).unwrap_err();
        assert_eq!(error, "mps.units is 49: it must be from 1 to 48");
    }
}
