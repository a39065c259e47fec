//! The devices that a GPU offers, in the order in which the scheduler should try them.
use std::collections::BTreeSet;
use std::fmt;

use cleave_plan::mig::{Profile, ProfileTable};
use cleave_plan::units::Mebibytes;

use crate::gpu::{Gpu, Layout, MigOffer, Replicas, Units};
use crate::names::profile_label;

/// A MIG placement that the GPU's profiles allow.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Placement {
    profile: String,
    start: u8,
    size: u8,
}

impl Placement {
    /// Returns the name of the profile, such as `1g.10gb`.
    pub fn profile(&self) -> &str {
        &self.profile
    }

    /// Returns the first memory slice.
    pub fn start(&self) -> u8 {
        self.start
    }

    /// Returns the number of memory slices.
    pub fn size(&self) -> u8 {
        self.size
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at memory slice {}", self.profile, self.start)
    }
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The undivided GPU.
    Whole,
    /// The GPU's MPS shares.
    Units(Units),
    /// MPS shares by memory, and the GPU's memory in GiB, rounded down.
    Memory(u64),
    /// The GPU's time-sliced replicas.
    Replicas(Replicas),
    /// An undivided MIG instance.
    Instance(Placement),
    /// The MPS shares of a MIG instance.
    InstanceUnits(Placement, Units),
}

impl Kind {
    /// Returns whether claims share the device.
    pub(crate) const fn is_shared(&self) -> bool {
        match self {
            Self::Whole | Self::Instance(_) => false,
            Self::Units(_) | Self::Memory(_) | Self::Replicas(_) | Self::InstanceUnits(..) => true,
        }
    }

    /// Returns the device's placement. `None` means that the device uses the whole GPU.
    pub(crate) const fn placement(&self) -> Option<&Placement> {
        match self {
            Self::Instance(placement) | Self::InstanceUnits(placement, _) => Some(placement),
            Self::Whole | Self::Units(_) | Self::Memory(_) | Self::Replicas(_) => None,
        }
    }
}

/// A device that a GPU offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OfferedDevice {
    pub(crate) name: String,
    pub(crate) kind: Kind,
}

/// Returns the MIG profiles that names of devices can contain, and why the others cannot be
/// offered.
pub(crate) fn usable_profiles(profiles: &[Profile]) -> (Vec<Profile>, Vec<String>) {
    let mut labels = BTreeSet::new();
    let is_usable = |profile: &&Profile| profile_label(&profile.name).is_some_and(|label| labels.insert(label));
    let (usable, others): (Vec<&Profile>, Vec<&Profile>) = profiles.iter().partition(is_usable);
    let refused = others.iter().map(|profile| format!("no device can be named after MIG profile {:?}", profile.name));
    (usable.into_iter().cloned().collect(), refused.collect())
}

/// Returns the devices of a GPU, and why it does not offer some of the requested devices.
///
/// The scheduler takes the first device that fits. Small devices come first, so that a request that
/// several devices satisfy uses the smallest.
pub(crate) fn offered_devices(gpu: &Gpu, table: &ProfileTable) -> (Vec<OfferedDevice>, Vec<String>) {
    let name = gpu.uuid.device_name();
    let (mut devices, mut refused) = (Vec::new(), Vec::new());
    let mut offer = |suffix: &str, kind: Kind| devices.push(OfferedDevice { name: format!("{name}{suffix}"), kind });
    if let Some(units) = gpu.offer.units {
        offer("-mps", Kind::Units(units));
    }
    if gpu.offer.memory {
        match gpu.memory.0 / Mebibytes::from_gib(1).0 {
            0 => refused.push(format!("the GPU has {}, and shares by memory need at least 1 GiB", gpu.memory)),
            gib => offer("-mem", Kind::Memory(gib)),
        }
    }
    if let Some(replicas) = gpu.offer.replicas {
        offer("-ts", Kind::Replicas(replicas));
    }
    if let Some(mig) = &gpu.offer.mig {
        let (placements, mut unusable) = offered_placements(mig, table);
        refused.append(&mut unusable);
        for (label, placement) in placements {
            let suffix = format!("-mig-{label}-{}", placement.start);
            match mig.units {
                Some(units) => offer(&format!("{suffix}-mps"), Kind::InstanceUnits(placement, units)),
                None => offer(&suffix, Kind::Instance(placement)),
            }
        }
    }
    if gpu.offer.whole {
        offer("", Kind::Whole);
    }
    (devices, refused)
}

/// Returns the placements that a GPU offers with the labels of their profiles, and why it does not
/// offer the others. Small instances come first, and the placements of one profile are in
/// [first-fit order](cleave_plan::mig::ProfileRules::first_fit_order).
fn offered_placements(mig: &MigOffer, table: &ProfileTable) -> (Vec<(String, Placement)>, Vec<String>) {
    let (mut placements, mut refused) = (Vec::new(), Vec::new());
    let mut profiles: Vec<_> = table.profiles().filter(|rules| rules.max_count() != Some(0)).collect();
    profiles.sort_by_key(|rules| (rules.size(), rules.name().to_owned()));
    if profiles.is_empty() {
        refused.push("the GPU reports no MIG profiles".to_owned());
    }
    for rules in profiles {
        let Some(label) = profile_label(rules.name()) else { continue };
        for start in rules.first_fit_order() {
            let placement = Placement { profile: rules.name().to_owned(), start, size: rules.size() };
            placements.push((label.clone(), placement));
        }
    }
    if let Layout::Fixed(wanted) = &mig.layout {
        let is_wanted = |placement: &Placement| {
            wanted.iter().any(|(profile, start)| *profile == placement.profile && *start == u32::from(placement.start))
        };
        placements.retain(|(_, placement)| is_wanted(placement));
        for (profile, start) in wanted {
            if !placements.iter().any(|(_, one)| one.profile == *profile && u32::from(one.start) == *start) {
                refused.push(format!("the GPU cannot create {profile} at memory slice {start}"));
            }
        }
    }
    (placements, refused)
}
