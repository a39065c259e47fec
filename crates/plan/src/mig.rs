//! Describes MIG profiles, and searches for placements on one GPU.
//!
//! The memory slices of a GPU are bits of a mask. NVML reports at which slices a profile can start.
//! The code contains no list of combinations: the placements and limits of the profiles determine
//! which instances fit together.
use serde::{Deserialize, Serialize};

use crate::device::mig_resource;

/// One MIG profile of a GPU, as NVML reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Profile {
    /// Name without prefix, such as `1g.10gb` or `1g.10gb+me`.
    pub name: String,
    /// Memory in MiB.
    #[serde(default)]
    pub memory_mib: u64,
    /// Number of streaming multiprocessors (SMs).
    #[serde(default)]
    pub sms: u32,
    /// Number of memory slices of one instance.
    pub size: u32,
    /// Memory slices at which an instance can start.
    pub starts: Vec<u32>,
    /// Maximum number of instances on one GPU, if the placements do not determine it (1 for `+me`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

/// Why the profiles of a GPU are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The GPU has more profiles than the planner supports.
    #[error("the GPU reports {0} MIG profiles, more than the maximum of 32")]
    TooManyProfiles(usize),
    /// A placement has no memory slices, or ends outside the first 32.
    #[error(
        "the driver reports an invalid placement of MIG profile {name}: {size} memory slices from slice {start}; a placement must have at least 1 slice and end within the first 32"
    )]
    Place {
        /// Name of the profile.
        name: String,
        /// Number of memory slices of the profile.
        size: u32,
        /// First memory slice of the placement.
        start: u32,
    },
    /// Two profiles have the same resource.
    #[error("MIG profile {0} is reported twice")]
    Repeated(String),
}

/// Memory slices as bits.
pub(crate) type Mask = u32;

/// One MIG instance: the index of its profile in the [`ProfileTable`], and its first memory slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instance {
    pub(crate) profile: u8,
    pub(crate) start: u8,
}

/// The media engines of a profile, by NVIDIA's suffixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MediaEngines {
    /// No media suffix: the instance has the profile's standard part of the media engines.
    Plain,
    /// `+me`: the instance has the GPU's only set of extra media engines.
    Extra,
    /// `+me.all`: all media engines. Only instances without media engines can coexist with such an
    /// instance.
    All,
    /// `-me`: no media engines.
    Without,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct ProfileEntry {
    name: String,
    resource: String,
    size: u8,
    starts: Vec<u8>,
    count: u32,
    media: MediaEngines,
    /// Number of compute slices, from the name. 0 if the name does not contain it.
    compute: u32,
}

/// The validated profiles and placements of one kind of GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProfileTable {
    entries: Vec<ProfileEntry>,
    /// Distinct pairs of a profile's size, in memory slices, and its possible first slices. Used to
    /// estimate the value of free memory slices.
    shapes: Vec<(u8, Vec<u8>)>,
    slices: u32,
    compute: u32,
}

/// What limits the instances of one profile on one GPU.
#[derive(Debug, Clone, Copy)]
pub struct ProfileRules<'a> {
    table: &'a ProfileTable,
    entry: &'a ProfileEntry,
}

impl ProfileRules<'_> {
    /// Returns the name of the profile.
    pub fn name(&self) -> &str {
        &self.entry.name
    }

    /// Returns the number of memory slices of one instance.
    pub fn size(&self) -> u8 {
        self.entry.size
    }

    /// Returns the memory slices at which an instance can start, in ascending order.
    pub fn starts(&self) -> &[u8] {
        &self.entry.starts
    }

    /// Returns the media engines of one instance.
    pub fn media_engines(&self) -> MediaEngines {
        self.entry.media
    }

    /// Returns the maximum number of instances on one GPU, if the memory slices alone would allow
    /// more.
    pub fn max_count(&self) -> Option<u32> {
        let by_placement = max_instances(self.entry.size, &self.entry.starts, 0);
        (self.entry.count < by_placement).then_some(self.entry.count)
    }

    /// Returns the placements in the order in which a first-fit allocator should try them. If the
    /// earlier placements are used, the next placement leaves the most room for other instances,
    /// by the same estimate as the planner's. Among equal placements, the highest comes first.
    pub fn first_fit_order(&self) -> Vec<u8> {
        let mut rest = self.entry.starts.clone();
        let mut order = Vec::with_capacity(rest.len());
        let mut used: Mask = 0;
        let bits = |start: u8| slice_mask(self.entry.size, start);
        while let Some(&best) = rest.iter().max_by_key(|&&start| {
            // A placement that overlaps an earlier one is only tried if the earlier one is blocked.
            (used & bits(start) == 0, self.table.estimate_room(used | bits(start)), start)
        }) {
            used |= bits(best);
            rest.retain(|&start| start != best);
            order.push(best);
        }
        order
    }
}

/// Placements of the requested instances on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Arrangement {
    /// The requested instances.
    pub(crate) placed: Vec<Instance>,
    /// Free instances that can be kept, although they are not requested.
    pub(crate) kept: Vec<Instance>,
}

const MASK_BITS: u32 = Mask::BITS;

/// Maximum number of steps of one search for placements. A node that reports invalid data must not
/// delay the plan.
const MAX_ARRANGEMENT_STEPS: u32 = 20_000;

impl ProfileTable {
    /// Validates the profiles that NVML reported, in any order.
    ///
    /// # Errors
    /// Returns [`TableError`] if a placement is invalid, two profiles have the same resource, or
    /// the table has more than 32 profiles.
    pub fn new(profiles: &[Profile]) -> Result<Self, TableError> {
        let mut entries = Vec::with_capacity(profiles.len());
        for profile in profiles {
            let mut starts = Vec::with_capacity(profile.starts.len());
            for &start in &profile.starts {
                let ends = start.checked_add(profile.size).filter(|&end| profile.size > 0 && end <= MASK_BITS);
                match (ends, u8::try_from(start)) {
                    (Some(_), Ok(start)) => starts.push(start),
                    _ => return Err(TableError::Place { name: profile.name.clone(), size: profile.size, start }),
                }
            }
            starts.sort_unstable();
            starts.dedup();
            // A profile without a placement cannot be created. The other profiles are still valid.
            let Some(size) = u8::try_from(profile.size).ok().filter(|_| !starts.is_empty()) else { continue };
            let media = media_engines(&profile.name);
            let count = profile.count.unwrap_or(if matches!(media, MediaEngines::Extra | MediaEngines::All) {
                1
            } else {
                u32::MAX
            });
            let compute = compute_slices(&profile.name);
            entries.push(ProfileEntry {
                resource: mig_resource(&profile.name),
                name: profile.name.clone(),
                size,
                starts,
                count,
                media,
                compute,
            });
        }
        if entries.len() > 32 {
            return Err(TableError::TooManyProfiles(entries.len()));
        }
        entries.sort();
        if let Some(pair) = entries.windows(2).find(|pair| pair[0].resource == pair[1].resource) {
            return Err(TableError::Repeated(pair[0].name.clone()));
        }
        let mut shapes: Vec<_> = entries.iter().map(|entry| (entry.size, entry.starts.clone())).collect();
        shapes.sort();
        shapes.dedup();
        let end = |entry: &ProfileEntry| entry.starts.iter().map(|start| u32::from(start + entry.size)).max();
        Ok(Self {
            slices: entries.iter().filter_map(end).max().unwrap_or(0),
            compute: entries.iter().map(|entry| entry.compute).max().unwrap_or(0),
            shapes,
            entries,
        })
    }

    /// Returns the built-in profiles of a model, for snapshots without NVML's report. Returns
    /// `None` if none are known.
    pub fn built_in(model: &str, memory_mib: u64) -> Option<Self> {
        let profiles = built_in(model, memory_mib)?;
        Self::new(&profiles).ok()
    }

    /// Returns the number of memory slices that instances can use.
    pub fn memory_slices(&self) -> u32 {
        self.slices
    }

    /// Returns the rules of each profile.
    pub fn profiles(&self) -> impl Iterator<Item = ProfileRules<'_>> {
        self.entries.iter().map(|entry| ProfileRules { table: self, entry })
    }

    /// Returns whether instances of these profiles, at these first memory slices, can exist on one
    /// GPU at the same time.
    pub fn can_coexist<'a>(&self, instances: impl IntoIterator<Item = (&'a str, u8)>) -> bool {
        let find = |(name, start): (&str, u8)| {
            let profile = self.entries.iter().position(|entry| entry.name == name)?;
            Some(Instance { profile: u8::try_from(profile).ok()?, start })
        };
        let found: Option<Vec<Instance>> = instances.into_iter().map(find).collect();
        found.is_some_and(|found| self.combined_mask(&found).is_some())
    }

    /// Returns the index of the profile that a resource such as `nvidia.com/mig-1g.10gb` names.
    pub(crate) fn profile(&self, resource: &str) -> Option<u8> {
        let at = self.entries.iter().position(|entry| entry.resource == resource)?;
        u8::try_from(at).ok()
    }

    /// Returns the name of a profile.
    pub(crate) fn name(&self, profile: u8) -> Option<&str> {
        self.entries.get(usize::from(profile)).map(|entry| entry.name.as_str())
    }

    /// Returns the resources of the profiles, in the order of their indices.
    pub(crate) fn resources(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.resource.as_str())
    }

    /// Returns an instance's part of the GPU's memory slices and compute slices, in 65,536ths,
    /// rounded down.
    pub(crate) fn memory_and_compute_part(&self, profile: u8) -> (u32, u32) {
        let Some(entry) = self.entries.get(usize::from(profile)) else { return (0, 0) };
        let compute = (entry.compute << 16).checked_div(self.compute).unwrap_or(0);
        (((u32::from(entry.size)) << 16).checked_div(self.slices).unwrap_or(0), compute)
    }

    /// Returns the memory slices of an instance. Returns `None` if the profile cannot start at this
    /// slice.
    pub(crate) fn mask(&self, instance: Instance) -> Option<Mask> {
        let entry = self.entries.get(usize::from(instance.profile))?;
        entry.starts.binary_search(&instance.start).ok()?;
        Some(slice_mask(entry.size, instance.start))
    }

    /// Returns whether instances of these profiles can be on one GPU, regardless of their
    /// placements.
    fn can_combine(&self, profiles: impl Iterator<Item = u8> + Clone) -> bool {
        let mut counts = [0_u32; 32];
        let (mut extra, mut all, mut plain) = (0, 0, 0);
        for profile in profiles {
            let Some(entry) = self.entries.get(usize::from(profile)) else { return false };
            let Some(count) = counts.get_mut(usize::from(profile)) else { return false };
            *count += 1;
            if *count > entry.count {
                return false;
            }
            match entry.media {
                MediaEngines::Plain => plain += 1,
                MediaEngines::Extra => extra += 1,
                MediaEngines::All => all += 1,
                MediaEngines::Without => {}
            }
        }
        extra + all <= 1 && (all == 0 || plain == 0)
    }

    /// Estimates the remaining space for instances if the slices in `mask` are used. The estimate
    /// is the sum, over all shapes, of the slices that instances of one shape alone could cover.
    /// Higher is better. An instance lowers the estimate only a little where no larger instance
    /// could start.
    pub(crate) fn estimate_room(&self, mask: Mask) -> u32 {
        self.shapes.iter().map(|(size, starts)| u32::from(*size) * max_instances(*size, starts, mask)).sum()
    }

    /// Returns the mask of all these instances. Returns `None` if the instances cannot exist at the
    /// same time.
    pub(crate) fn combined_mask(&self, instances: &[Instance]) -> Option<Mask> {
        let mut mask = 0;
        for &instance in instances {
            let bits = self.mask(instance)?;
            if mask & bits != 0 {
                return None;
            }
            mask |= bits;
        }
        self.can_combine(instances.iter().map(|instance| instance.profile)).then_some(mask)
    }

    /// Finds placements for the `wanted` profiles. The instances `in_use` are not moved.
    ///
    /// Prefers placements that destroy and create the fewest instances, then placements with the
    /// highest [`Self::estimate_room`], then placements that start lowest. Returns `None` if it
    /// finds no placements.
    pub(crate) fn arrange(&self, in_use: &[Instance], free: &[Instance], wanted: &[u8]) -> Option<Arrangement> {
        let taken = self.combined_mask(in_use)?;
        let everyone = in_use.iter().map(|instance| instance.profile).chain(wanted.iter().copied());
        if !self.can_combine(everyone) {
            return None;
        }
        let mut order = wanted.to_vec();
        let size = |profile: u8| self.entries.get(usize::from(profile)).map_or(0, |entry| entry.size);
        order.sort_unstable_by_key(|&profile| (u8::MAX - size(profile), profile));
        let mut search = ArrangementSearch {
            table: self,
            order: &order,
            free,
            steps: 0,
            placed: Vec::with_capacity(order.len()),
            best: None,
        };
        search.place(taken);
        let (_, placed) = search.best?;

        let mut mask = placed.iter().filter_map(|&instance| self.mask(instance)).fold(taken, |mask, bits| mask | bits);
        let mut kept = Vec::new();
        for &instance in free {
            let Some(bits) = self.mask(instance) else { continue };
            let everyone = in_use.iter().chain(&placed).chain(&kept).map(|other| other.profile);
            if bits & mask == 0 && self.can_combine(everyone.chain([instance.profile])) {
                mask |= bits;
                kept.push(instance);
            }
        }
        Some(Arrangement { placed, kept })
    }
}

/// Cost of an arrangement, lower is better: the number of instances destroyed and created,
/// `u32::MAX` minus [`ProfileTable::estimate_room`], and the placements. The placements make every
/// cost unique.
type ArrangementCost = (usize, u32, Vec<Instance>);

struct ArrangementSearch<'a> {
    table: &'a ProfileTable,
    order: &'a [u8],
    free: &'a [Instance],
    steps: u32,
    placed: Vec<Instance>,
    best: Option<(ArrangementCost, Vec<Instance>)>,
}

impl ArrangementSearch<'_> {
    /// Tries each free position for the next instance, and then places the remaining instances.
    fn place(&mut self, mask: Mask) {
        self.steps += 1;
        let Some(&profile) = self.order.get(self.placed.len()) else { return self.record_arrangement(mask) };
        let Some(entry) = self.table.entries.get(usize::from(profile)) else { return };
        // Place equal profiles in ascending order, because exchanging them makes no difference.
        let after = self.placed.last().filter(|last| last.profile == profile).map_or(0, |last| last.start + 1);
        for &start in entry.starts.iter().filter(|&&start| start >= after) {
            let bits = slice_mask(entry.size, start);
            if mask & bits != 0 || self.steps > MAX_ARRANGEMENT_STEPS {
                continue;
            }
            self.placed.push(Instance { profile, start });
            self.place(mask | bits);
            self.placed.pop();
        }
    }

    /// Keeps an arrangement of all instances if it costs less than the best arrangement so far.
    fn record_arrangement(&mut self, mask: Mask) {
        let reused = self.placed.iter().filter(|instance| self.free.contains(instance)).count();
        let covered = |instance: &&Instance| {
            !self.placed.contains(instance) && self.table.mask(**instance).is_some_and(|bits| bits & mask != 0)
        };
        let touched = self.placed.len() - reused + self.free.iter().filter(covered).count();
        let cost = (touched, u32::MAX - self.table.estimate_room(mask), self.placed.clone());
        if self.best.as_ref().is_none_or(|(best, _)| cost < *best) {
            self.best = Some((cost, self.placed.clone()));
        }
    }
}

const fn slice_mask(size: u8, start: u8) -> Mask {
    // The full size is a special case, because a shift by the full width of the type overflows.
    if size as u32 >= MASK_BITS { Mask::MAX } else { ((1 << size) - 1) << start }
}

/// Returns the maximum number of instances of one shape that fit outside `mask`. For intervals of
/// equal length, choosing the lowest interval that fits is optimal.
fn max_instances(size: u8, starts: &[u8], mask: Mask) -> u32 {
    let mut taken = mask;
    let mut count = 0;
    for &start in starts {
        let bits = slice_mask(size, start);
        if taken & bits == 0 {
            taken |= bits;
            count += 1;
        }
    }
    count
}

/// Returns the media engines of a profile, from its name.
fn media_engines(name: &str) -> MediaEngines {
    if name.contains("+me.all") {
        MediaEngines::All
    } else if name.contains("+me") {
        MediaEngines::Extra
    } else if name.contains("-me") {
        MediaEngines::Without
    } else {
        MediaEngines::Plain
    }
}

/// Returns the number of compute slices in a profile's name, such as 3 in `3g.20gb`, or 0 if the
/// name has none. NVIDIA has no profile with more than 64 compute slices.
fn compute_slices(name: &str) -> u32 {
    name.split_once('g').and_then(|(digits, _)| digits.parse().ok()).filter(|&count: &u32| count <= 64).unwrap_or(0)
}

/// Memory in GB of the profiles of a GPU with seven compute and eight memory slices: `1g`, `1g`
/// with double memory, half the GPU and the whole GPU.
struct SliceMemory {
    one: u32,
    two: u32,
    half: u32,
    whole: u32,
}

/// Returns the profiles and placements of the A30, of data center GPUs with seven compute slices,
/// and of the RTX PRO 6000, as `nvidia-smi mig -lgipp` prints them. Returns `None` for other
/// models.
pub fn built_in(model: &str, memory_mib: u64) -> Option<Vec<Profile>> {
    let words: Vec<&str> = model.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let has = |word: &str| words.contains(&word);
    let large = |gigabytes: u64| memory_mib >= gigabytes * 1000;
    let sevenths = |one, two, half, whole| Some(seven_slice_profiles(&SliceMemory { one, two, half, whole }));
    if has("A30") {
        return Some(vec![
            profile("1g.6gb", 1, &[0, 1, 2, 3]),
            profile("1g.6gb+me", 1, &[0, 1, 2, 3]),
            profile("2g.12gb", 2, &[0, 2]),
            profile("2g.12gb+me", 2, &[0, 2]),
            profile("4g.24gb", 4, &[0]),
        ]);
    }
    if has("A100") {
        return if has("80GB") || !has("40GB") && large(60) {
            sevenths(10, 20, 40, 80)
        } else {
            sevenths(5, 10, 20, 40)
        };
    }
    if has("GH200") {
        return if large(120) { sevenths(18, 36, 72, 144) } else { sevenths(12, 24, 48, 96) };
    }
    if has("H100") {
        return if has("NVL") || has("94GB") || !has("80GB") && large(90) {
            sevenths(12, 24, 47, 94)
        } else {
            sevenths(10, 20, 40, 80)
        };
    }
    if has("H200") {
        return sevenths(18, 35, 71, 141);
    }
    if has("H20") {
        return sevenths(12, 24, 48, 96);
    }
    if has("GB200") {
        return sevenths(23, 47, 93, 186);
    }
    if has("B200") {
        return sevenths(23, 45, 90, 180);
    }
    if has("B300") {
        return sevenths(34, 67, 135, 269);
    }
    if has("RTX") && has("PRO") && has("6000") {
        let quarter = ["1g.24gb", "1g.24gb+me", "1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me"];
        let half = ["2g.48gb", "2g.48gb+gfx", "2g.48gb+me.all", "2g.48gb-me"];
        let quarters = quarter.iter().map(|name| profile(name, 3, &[0, 3, 6, 9]));
        let halves = half.iter().map(|name| profile(name, 6, &[0, 6]));
        let whole = ["4g.96gb", "4g.96gb+gfx"].iter().map(|name| profile(name, 12, &[0]));
        return Some(quarters.chain(halves).chain(whole).collect());
    }
    None
}

fn profile(name: &str, size: u32, starts: &[u32]) -> Profile {
    Profile { name: name.to_owned(), size, starts: starts.to_vec(), ..Profile::default() }
}

fn seven_slice_profiles(&SliceMemory { one, two, half, whole }: &SliceMemory) -> Vec<Profile> {
    vec![
        profile(&format!("1g.{one}gb"), 1, &[0, 1, 2, 3, 4, 5, 6]),
        profile(&format!("1g.{one}gb+me"), 1, &[0, 1, 2, 3, 4, 5, 6]),
        profile(&format!("1g.{two}gb"), 2, &[0, 2, 4, 6]),
        profile(&format!("2g.{two}gb"), 2, &[0, 2, 4]),
        profile(&format!("3g.{half}gb"), 4, &[0, 4]),
        profile(&format!("4g.{half}gb"), 4, &[0]),
        profile(&format!("7g.{whole}gb"), 8, &[0]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a100() -> ProfileTable {
        ProfileTable::built_in("NVIDIA A100-SXM4-40GB", 40_960).expect("known")
    }

    fn wanted(table: &ProfileTable, names: &[&str]) -> Vec<u8> {
        names.iter().map(|name| table.profile(&mig_resource(name)).expect(name)).collect()
    }

    fn instance(table: &ProfileTable, name: &str, start: u8) -> Instance {
        Instance { profile: table.profile(&mig_resource(name)).expect(name), start }
    }

    #[test]
    fn models_are_recognized_by_their_nvml_names() {
        for (model, memory, profile) in [
            ("NVIDIA A30", 24_576, "2g.12gb"),
            ("NVIDIA A100-SXM4-40GB", 40_960, "1g.5gb"),
            ("NVIDIA A100-PCIE-40GB", 40_960, "1g.10gb"),
            ("NVIDIA A100 80GB PCIe", 81_920, "7g.80gb"),
            ("NVIDIA A100-SXM4-80GB", 81_920, "1g.20gb"),
            ("NVIDIA H100 80GB HBM3", 81_559, "1g.10gb+me"),
            ("NVIDIA H100 PCIe", 81_559, "3g.40gb"),
            ("NVIDIA H100 NVL", 95_830, "3g.47gb"),
            ("NVIDIA GH200 480GB", 97_871, "7g.96gb"),
            ("NVIDIA H200", 143_771, "1g.18gb"),
            ("NVIDIA B200", 183_359, "7g.180gb"),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, "1g.24gb+gfx"),
        ] {
            let table = ProfileTable::built_in(model, memory).expect(model);
            assert!(table.profile(&mig_resource(profile)).is_some(), "{model} has {profile}");
        }
        assert!(ProfileTable::built_in("Tesla T4", 15_360).is_none());
    }

    /// Returns all legal layouts, complete or not. The enumeration is independent of the search.
    fn full_layouts(table: &ProfileTable) -> Vec<Vec<Instance>> {
        fn collect_layouts(
            table: &ProfileTable,
            from: &[Instance],
            chosen: &mut Vec<Instance>,
            all: &mut Vec<Vec<Instance>>,
        ) {
            for (at, &next) in from.iter().enumerate() {
                chosen.push(next);
                if table.combined_mask(chosen).is_some() {
                    collect_layouts(table, &from[at + 1..], chosen, all);
                }
                chosen.pop();
            }
            all.push(chosen.clone());
        }
        let mut instances = Vec::new();
        for (index, entry) in table.entries.iter().enumerate() {
            for &start in &entry.starts {
                instances.push(Instance { profile: u8::try_from(index).expect("few"), start });
            }
        }
        let mut all = Vec::new();
        collect_layouts(table, &instances, &mut Vec::new(), &mut all);
        all
    }

    #[test]
    fn an_a100_has_exactly_the_layouts_of_nvidias_guide() {
        let table = a100();
        // Exclude the variants of 1g. NVIDIA's guide lists 14 full layouts as counts of each
        // profile, including 4g + 3g and 3g + 4 × 1g.
        let plain = |name: &str| matches!(name, "1g.5gb" | "2g.10gb" | "3g.20gb" | "4g.20gb" | "7g.40gb");
        let profiles: Vec<Profile> =
            built_in("A100", 40_960).expect("known").into_iter().filter(|profile| plain(&profile.name)).collect();
        let small = ProfileTable::new(&profiles).expect("valid");
        let mut full = std::collections::BTreeSet::new();
        for layout in full_layouts(&small) {
            let mask = small.combined_mask(&layout).expect("legal");
            if small.estimate_room(mask) == 0 {
                let mut names: Vec<u8> = layout.iter().map(|instance| instance.profile).collect();
                names.sort_unstable();
                full.insert(names);
            }
        }
        let name = |index: u8| small.entries[usize::from(index)].name.clone();
        let full: Vec<Vec<String>> =
            full.iter().map(|layout| layout.iter().map(|&index| name(index)).collect()).collect();
        let as_counts = |counts: [usize; 5]| -> Vec<String> {
            let names = ["1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"];
            names.iter().zip(counts).flat_map(|(name, count)| vec![(*name).to_owned(); count]).collect()
        };
        for counts in [
            [0, 0, 0, 0, 1],
            [0, 0, 1, 1, 0],
            [1, 1, 0, 1, 0],
            [3, 0, 0, 1, 0],
            [0, 0, 2, 0, 0],
            [1, 1, 1, 0, 0],
            [3, 0, 1, 0, 0],
            [0, 2, 1, 0, 0],
            [2, 1, 1, 0, 0],
            [4, 0, 1, 0, 0],
            [1, 3, 0, 0, 0],
            [3, 2, 0, 0, 0],
            [5, 1, 0, 0, 0],
            [7, 0, 0, 0, 0],
        ] {
            assert!(full.contains(&as_counts(counts)), "{counts:?} is a full layout");
        }
        assert_eq!(full.len(), 14, "{full:#?}");
        assert_eq!(table.slices, 8);
    }

    #[test]
    fn instances_fit_by_their_placements_and_not_by_their_count() {
        let table = a100();
        let in_use = [instance(&table, "1g.5gb", 1), instance(&table, "1g.5gb", 5)];
        assert_eq!(table.arrange(&in_use, &[], &wanted(&table, &["3g.20gb"])), None);
        let in_use = [instance(&table, "1g.5gb", 4), instance(&table, "1g.5gb", 5)];
        let found = table.arrange(&in_use, &[], &wanted(&table, &["3g.20gb"])).expect("fits");
        assert_eq!(found.placed, [instance(&table, "3g.20gb", 0)]);
    }

    #[test]
    fn free_instances_are_reused_and_kept_if_possible() {
        let table = a100();
        let free = [instance(&table, "3g.20gb", 0), instance(&table, "2g.10gb", 4), instance(&table, "1g.5gb", 6)];
        let found = table.arrange(&[], &free, &wanted(&table, &["1g.5gb", "1g.5gb", "2g.10gb"])).expect("fits");
        // The existing 2g and 1g are reused. The second 1g replaces the 3g.
        assert!(found.placed.contains(&free[1]) && found.placed.contains(&free[2]));
        assert_eq!(found.kept, []);
        let found = table.arrange(&[], &free[..1], &wanted(&table, &["1g.5gb"])).expect("fits");
        assert_eq!(
            (found.placed.as_slice(), found.kept.as_slice()),
            (&[instance(&table, "1g.5gb", 6)][..], &free[..1])
        );
    }

    #[test]
    fn a_small_instance_is_placed_where_most_other_instances_still_fit() {
        let table = a100();
        let found = table.arrange(&[], &[], &wanted(&table, &["1g.5gb"])).expect("fits");
        // 1g must start at 6, so that 4g fits at 0 and 2g fits at 4.
        assert_eq!(found.placed, [instance(&table, "1g.5gb", 6)]);
    }

    #[test]
    fn first_fit_fills_a_gpu_from_the_end_that_leaves_the_most_room() {
        let table = a100();
        let order =
            |name: &str| table.profiles().find(|rules| rules.name() == name).map(|rules| rules.first_fit_order());
        // NVIDIA's driver also creates the first 1g at 6, and then avoids the half that 4g needs.
        let ones = order("1g.5gb").expect("known");
        assert_eq!((ones[0], ones.len()), (6, 7));
        assert!(ones[1..3].iter().all(|start| [4, 5].contains(start)), "{ones:?}");
        assert_eq!(order("3g.20gb").expect("known"), [4, 0]);
        assert_eq!(order("2g.10gb").expect("known")[0], 4);
    }

    #[test]
    fn instances_coexist_by_name_and_placement() {
        let table = a100();
        assert!(table.can_coexist([("3g.20gb", 4), ("2g.10gb", 0), ("1g.5gb", 3)]));
        assert!(!table.can_coexist([("3g.20gb", 4), ("2g.10gb", 4)]), "the instances overlap");
        assert!(!table.can_coexist([("3g.20gb", 2)]), "3g cannot start at 2");
        assert!(!table.can_coexist([("1g.10gb", 0), ("9g.90gb", 0)]), "the profile does not exist");
        assert!(!table.can_coexist([("1g.5gb+me", 0), ("1g.5gb+me", 1)]), "the GPU has one extra set");
    }

    #[test]
    fn media_engines_are_allocated_once() {
        let table = a100();
        assert!(table.arrange(&[], &[], &wanted(&table, &["1g.5gb+me", "1g.5gb"])).is_some());
        assert!(table.arrange(&[], &[], &wanted(&table, &["1g.5gb+me", "1g.5gb+me"])).is_none());
        let rtx = ProfileTable::built_in("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887).expect("known");
        assert!(rtx.arrange(&[], &[], &wanted(&rtx, &["1g.24gb+me.all", "1g.24gb-me", "2g.48gb-me"])).is_some());
        assert!(rtx.arrange(&[], &[], &wanted(&rtx, &["1g.24gb+me.all", "1g.24gb"])).is_none());
        assert!(rtx.arrange(&[], &[], &wanted(&rtx, &["1g.24gb+me", "1g.24gb+gfx", "2g.48gb"])).is_some());
    }

    #[test]
    fn invalid_profiles_are_refused_or_bounded() {
        let place = |size, start| ProfileTable::new(&[profile("1g.5gb", size, &[start])]);
        assert!(matches!(place(0, 0), Err(TableError::Place { .. })));
        assert!(matches!(place(1, 32), Err(TableError::Place { .. })));
        assert!(matches!(place(u32::MAX, u32::MAX), Err(TableError::Place { .. })));
        assert!(place(32, 0).is_ok());
        let twice = [profile("1g.5gb", 1, &[0]), profile("1g.5gb", 2, &[0])];
        assert!(matches!(ProfileTable::new(&twice), Err(TableError::Repeated(_))));
        let many: Vec<Profile> = (0..40).map(|index| profile(&format!("1g.{index}gb"), 1, &[0])).collect();
        assert!(matches!(ProfileTable::new(&many), Err(TableError::TooManyProfiles(40))));
        let none = ProfileTable::new(&[]).expect("an empty list is valid");
        assert_eq!((none.slices, none.estimate_room(0)), (0, 0));
        // 16 instances with 32 placements each have far more combinations than the search may try.
        let starts: Vec<u32> = (0..32).collect();
        let wide = ProfileTable::new(&[profile("1g.1gb", 1, &starts)]).expect("valid");
        assert!(wide.arrange(&[], &[], &[0; 16]).is_some());
    }
}
