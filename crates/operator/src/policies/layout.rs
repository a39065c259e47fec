//! Chooses placements for the MIG instances of a fixed layout on one GPU. Pure.
//!
//! Possible placements come from NVML, never from a fixed table. Existing instances with a valid
//! placement keep their placement.
use cleave_api::gpunode::{MigInstanceStatus, MigProfileStatus};

/// Why a layout is not possible on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The GPU does not support the profile.
    #[error("the GPU does not support MIG profile {profile}; it supports {}", .has.join(", "))]
    NoSuchProfile {
        /// The requested profile.
        profile: String,
        /// The profiles that the GPU supports.
        has: Vec<String>,
    },
    /// The GPU supports all profiles, but not all instances at the same time. Contains the layout.
    #[error("the MIG profiles {} do not fit on the GPU at the same time", .0.join(", "))]
    DoesNotFit(Vec<String>),
}

/// One bit for each memory slice of a GPU. Current GPUs have at most 8 memory slices.
type SliceMask = u64;

/// Returns the first memory slice of each instance, in the order of `layout`.
///
/// Places the largest instances first. Each instance prefers the placement of an existing instance
/// of its profile, then a free placement, then the lowest placement. The function returns the first
/// arrangement that it finds in this order.
pub(super) fn place_instances(
    layout: &[String],
    profiles: &[MigProfileStatus],
    existing: &[MigInstanceStatus],
) -> Result<Vec<u32>, Error> {
    let mut wanted: Vec<(usize, &MigProfileStatus)> = Vec::with_capacity(layout.len());
    for (at, name) in layout.iter().enumerate() {
        let profile = profiles.iter().find(|profile| &profile.name == name).ok_or_else(|| Error::NoSuchProfile {
            profile: name.clone(),
            has: profiles.iter().map(|profile| profile.name.clone()).collect(),
        })?;
        wanted.push((at, profile));
    }
    wanted.sort_by(|(a_at, a), (b_at, b)| (b.size, &a.name, a_at).cmp(&(a.size, &b.name, b_at)));
    let old: Vec<(&str, u32, SliceMask)> = existing
        .iter()
        .filter_map(|instance| {
            let profile = profiles.iter().find(|profile| profile.name == instance.profile)?;
            Some((instance.profile.as_str(), instance.start, slice_mask(instance.start, profile.size)?))
        })
        .collect();
    let mut starts = vec![0; layout.len()];
    if place_remaining(&wanted, &old, 0, &mut starts) { Ok(starts) } else { Err(Error::DoesNotFit(layout.to_vec())) }
}

/// Places the first instance of `wanted`, then the remaining instances. Returns true if all
/// instances fit.
fn place_remaining(
    wanted: &[(usize, &MigProfileStatus)],
    old: &[(&str, u32, SliceMask)],
    taken: SliceMask,
    starts: &mut [u32],
) -> bool {
    let Some(((at, profile), rest)) = wanted.split_first() else { return true };
    let mut places: Vec<(u32, SliceMask)> =
        profile.starts.iter().filter_map(|&start| Some((start, slice_mask(start, profile.size)?))).collect();
    places.sort_unstable_by_key(|&(start, place)| {
        let exists = old.iter().any(|&(name, at, _)| name == profile.name && at == start);
        let disturbs = old.iter().any(|&(_, _, mask)| mask & place != 0);
        (!exists, disturbs, start)
    });
    for (start, place) in places {
        if taken & place == 0 && place_remaining(rest, old, taken | place, starts) {
            if let Some(slot) = starts.get_mut(*at) {
                *slot = start;
            }
            return true;
        }
    }
    false
}

fn slice_mask(start: u32, size: u32) -> Option<SliceMask> {
    let ones = 1_u64.checked_shl(size)?.checked_sub(1).filter(|&ones| ones > 0)?;
    // If bits were shifted out, two overlapping placements could seem disjoint.
    ones.checked_shl(start).filter(|mask| mask.count_ones() == size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the MIG profiles of an A100 with 40 GB, as NVML reports them.
    fn a100() -> Vec<MigProfileStatus> {
        let profile = |name: &str, size, starts: &[u32]| MigProfileStatus {
            name: name.to_owned(),
            size,
            starts: starts.to_vec(),
            ..MigProfileStatus::default()
        };
        vec![
            profile("1g.5gb", 1, &[0, 1, 2, 3, 4, 5, 6]),
            profile("1g.10gb", 2, &[0, 2, 4, 6]),
            profile("2g.10gb", 2, &[0, 2, 4]),
            profile("3g.20gb", 4, &[0, 4]),
            profile("4g.20gb", 4, &[0]),
            profile("7g.40gb", 8, &[0]),
        ]
    }

    fn layout(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn instance(profile: &str, start: u32) -> MigInstanceStatus {
        MigInstanceStatus { profile: profile.to_owned(), start, ..MigInstanceStatus::default() }
    }

    #[test]
    fn layouts_use_the_placements_that_nvml_reports() {
        for (names, expected) in [
            (&["7g.40gb"][..], &[0][..]),
            (&["3g.20gb", "4g.20gb"], &[4, 0]),
            (&["3g.20gb", "3g.20gb"], &[0, 4]),
            (&["1g.5gb", "2g.10gb", "4g.20gb"], &[6, 4, 0]),
            (&["1g.5gb"; 7], &[0, 1, 2, 3, 4, 5, 6]),
        ] {
            assert_eq!(place_instances(&layout(names), &a100(), &[]), Ok(expected.to_vec()), "{names:?}");
        }
    }

    #[test]
    fn errors_name_the_profiles() {
        let error = place_instances(&layout(&["4g.20gb", "4g.20gb"]), &a100(), &[]).unwrap_err();
        assert_eq!(error.to_string(), "the MIG profiles 4g.20gb, 4g.20gb do not fit on the GPU at the same time");
        assert_eq!(
            place_instances(&layout(&["1g.5gb"; 8]), &a100(), &[]),
            Err(Error::DoesNotFit(layout(&["1g.5gb"; 8])))
        );
        let error = place_instances(&layout(&["3g.40gb"]), &a100(), &[]).unwrap_err();
        assert!(
            error.to_string().starts_with("the GPU does not support MIG profile 3g.40gb; it supports 1g.5gb, "),
            "{error}"
        );
    }

    #[test]
    fn existing_instances_of_the_layout_keep_their_placement() {
        let existing = [instance("1g.5gb", 5), instance("2g.10gb", 2)];
        assert_eq!(place_instances(&layout(&["1g.5gb", "2g.10gb"]), &a100(), &existing), Ok(vec![5, 2]));
        assert_eq!(place_instances(&layout(&["3g.20gb", "1g.5gb"]), &a100(), &[instance("1g.5gb", 0)]), Ok(vec![4, 0]));
    }

    #[test]
    fn an_existing_instance_does_not_make_a_layout_impossible() {
        assert_eq!(
            place_instances(&layout(&["3g.20gb", "4g.20gb"]), &a100(), &[instance("3g.20gb", 0)]),
            Ok(vec![4, 0])
        );
    }

    #[test]
    fn placements_outside_the_mask_are_ignored() {
        let strange = |size, start| {
            [MigProfileStatus { name: "x".into(), size, starts: vec![start], ..MigProfileStatus::default() }]
        };
        for (size, start) in [(0, 0), (64, 0), (2, 63), (1, 64), (u32::MAX, u32::MAX)] {
            assert!(place_instances(&layout(&["x"]), &strange(size, start), &[]).is_err(), "{size} at {start}");
        }
        assert_eq!(place_instances(&layout(&["x"]), &strange(1, 63), &[]), Ok(vec![63]));
    }
}
