//! The shared counters of a GPU. They express NVML's rules for MIG, and that a GPU serves one kind
//! of partition at a time.
//!
//! Each device consumes its memory slices, so no two devices share a memory slice. Devices that use
//! the whole GPU consume all slices. A shared device consumes its counters once, however many
//! shares are allocated. Three more rules of NVML concern instances in different slices:
//!
//! - `me`, of value 1: one instance has the extra media engines. `+me` and `+me.all` consume 1.
//! - `media`, with the number of slices as its value: beside `+me.all`, no instance has media
//!   engines. `+me.all` consumes all of it, and profiles without a media suffix consume 1.
//! - `count-<profile>`: NVML limits the number of instances of some profiles.
//!
//! A GPU has no more instances than slices, so `media` never limits instances without `+me.all`.
use std::collections::BTreeMap;

use cleave_plan::Quantity;
use cleave_plan::mig::{MediaEngines, ProfileTable};

use crate::devices::Kind;
use crate::names::profile_label;
use crate::wire::{Counter, CounterSet, MAX_COUNTERS};

/// The counters of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CounterModel {
    /// Number of memory slices. A GPU without MIG has one slice.
    slices: u32,
    /// The counters that are not memory slices.
    others: Vec<OtherCounter>,
}

/// A counter that is not a memory slice.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OtherCounter {
    name: String,
    value: u64,
    /// Consumption of one instance, by profile.
    by_profile: BTreeMap<String, u64>,
}

impl CounterModel {
    /// Creates the counters of a GPU with these profiles. Returns `None` if the API does not allow
    /// as many counters as the profiles need.
    pub(crate) fn new(table: &ProfileTable) -> Option<Self> {
        let slices = table.memory_slices().max(1);
        let by_media = |wanted: &[(MediaEngines, u64)]| -> BTreeMap<String, u64> {
            let amount = |media| wanted.iter().find(|(engines, _)| *engines == media).map(|(_, amount)| *amount);
            let profiles = table.profiles();
            profiles.filter_map(|rules| Some((rules.name().to_owned(), amount(rules.media_engines())?))).collect()
        };
        let has = |media| table.profiles().any(|rules| rules.media_engines() == media);
        let mut others = Vec::new();
        if has(MediaEngines::Extra) || has(MediaEngines::All) {
            let by_profile = by_media(&[(MediaEngines::Extra, 1), (MediaEngines::All, 1)]);
            others.push(OtherCounter { name: "me".to_owned(), value: 1, by_profile });
        }
        if has(MediaEngines::Plain) && has(MediaEngines::All) {
            let all = u64::from(slices);
            let by_profile = by_media(&[(MediaEngines::All, all), (MediaEngines::Plain, 1)]);
            others.push(OtherCounter { name: "media".to_owned(), value: all, by_profile });
        }
        for rules in table.profiles() {
            // The counter `me` already limits these profiles to one instance.
            let only_one = matches!(rules.media_engines(), MediaEngines::Extra | MediaEngines::All);
            let Some(count) = rules.max_count().filter(|_| !only_one) else { continue };
            let Some(label) = profile_label(rules.name()) else { continue };
            let by_profile = BTreeMap::from([(rules.name().to_owned(), 1)]);
            others.push(OtherCounter { name: format!("count-{label}"), value: u64::from(count), by_profile });
        }
        let fits = usize::try_from(slices).is_ok_and(|slices| slices + others.len() <= MAX_COUNTERS);
        fits.then_some(Self { slices, others })
    }

    /// Returns the counter set of the GPU.
    pub(crate) fn counter_set(&self, name: &str) -> CounterSet {
        let slices = (0..self.slices).map(|slice| (slice_counter(slice), counter(1)));
        let others = self.others.iter().map(|other| (other.name.clone(), counter(other.value)));
        CounterSet { name: name.to_owned(), counters: slices.chain(others).collect() }
    }

    /// Returns what a device consumes.
    pub(crate) fn consumption(&self, kind: &Kind) -> BTreeMap<String, Counter> {
        let Some(placement) = kind.placement() else {
            return (0..self.slices).map(|slice| (slice_counter(slice), counter(1))).collect();
        };
        let first = u32::from(placement.start());
        let slices = (first..first + u32::from(placement.size())).map(|slice| (slice_counter(slice), counter(1)));
        let others = self.others.iter().filter_map(|other| {
            let amount = other.by_profile.get(placement.profile())?;
            Some((other.name.clone(), counter(*amount)))
        });
        slices.chain(others).collect()
    }
}

fn slice_counter(slice: u32) -> String {
    format!("slice-{slice}")
}

fn counter(value: u64) -> Counter {
    Counter { value: Quantity::whole(value) }
}
