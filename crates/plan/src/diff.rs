//! What a node has to do to become what it shall be.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::snapshot::Slice;

/// What a node's GPUs are: slices by UUID.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    /// Slices by GPU.
    pub gpus: BTreeMap<String, Vec<Slice>>,
}

/// What a node's GPUs shall be: slices by UUID. Whether they are in use does not matter. GPUs that
/// are not here stay as they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Desired {
    /// Slices by GPU.
    pub gpus: BTreeMap<String, Vec<Slice>>,
}

/// One thing to do, or not to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "step")]
pub enum Step {
    /// Takes slices away that nobody uses.
    Remove {
        /// The GPU.
        gpu: String,
        /// What, and how many.
        slice: Slice,
    },
    /// Makes slices.
    Create {
        /// The GPU.
        gpu: String,
        /// What, and how many.
        slice: Slice,
    },
    /// Leaves a GPU as it is, because this slice would have to go.
    Refuse {
        /// The GPU.
        gpu: String,
        /// What is in the way; none where the GPU is not there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slice: Option<Slice>,
        /// Why, in words.
        reason: String,
    },
}

/// The steps from what is to what shall be: all removals, then what is made, then what is refused,
/// each by GPU.
///
/// A GPU of which a slice in use would have to go is left alone altogether: the plan is older than
/// that use, and what else it wants there may need the room.
pub fn diff(observed: &Observed, desired: &Desired) -> Vec<Step> {
    let (mut removals, mut creations, mut refusals) = (Vec::new(), Vec::new(), Vec::new());
    for (gpu, wanted) in &desired.gpus {
        let Some(there) = observed.gpus.get(gpu) else {
            let reason = "this GPU is not on the node".to_owned();
            refusals.push(Step::Refuse { gpu: gpu.clone(), slice: None, reason });
            continue;
        };
        let wanted = counted(wanted);
        let mut held: BTreeMap<Key<'_>, (u64, &Slice)> = BTreeMap::new();
        for slice in there.iter().filter(|slice| slice.in_use) {
            held.entry(key(slice)).or_insert((0, slice)).0 += u64::from(slice.count);
        }
        let mut refused = false;
        for (key, (count, slice)) in &held {
            if *count > wanted.get(key).copied().unwrap_or(0) {
                refused = true;
                let holder = slice.pod.as_ref().map_or_else(|| "a pod".to_owned(), |pod| format!("pod {pod}"));
                let reason = format!("{holder} uses {}", slice.resource);
                refusals.push(Step::Refuse { gpu: gpu.clone(), slice: Some((*slice).clone()), reason });
            }
        }
        if refused {
            continue;
        }
        let there = counted(there);
        for (key, &count) in &there {
            if let Some(more) = count.checked_sub(wanted.get(key).copied().unwrap_or(0)).filter(|&more| more > 0) {
                removals.push(Step::Remove { gpu: gpu.clone(), slice: slice(key, more) });
            }
        }
        for (key, &count) in &wanted {
            if let Some(more) = count.checked_sub(there.get(key).copied().unwrap_or(0)).filter(|&more| more > 0) {
                creations.push(Step::Create { gpu: gpu.clone(), slice: slice(key, more) });
            }
        }
    }
    removals.into_iter().chain(creations).chain(refusals).collect()
}

/// What makes two slices the same: place, resource, profile.
type Key<'a> = (Option<u32>, &'a str, Option<&'a str>);

fn key(slice: &Slice) -> Key<'_> {
    (slice.placement, &slice.resource, slice.profile.as_deref())
}

fn counted(slices: &[Slice]) -> BTreeMap<Key<'_>, u64> {
    let mut counts = BTreeMap::new();
    for slice in slices {
        *counts.entry(key(slice)).or_default() += u64::from(slice.count);
    }
    counts
}

fn slice(&(placement, resource, profile): &Key<'_>, count: u64) -> Slice {
    Slice {
        placement,
        resource: resource.to_owned(),
        in_use: false,
        count: u32::try_from(count).unwrap_or(u32::MAX),
        profile: profile.map(str::to_owned),
        pod: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mig(profile: &str, placement: u32, in_use: bool) -> Slice {
        Slice {
            placement: Some(placement),
            resource: format!("nvidia.com/mig-{profile}"),
            in_use,
            count: 1,
            profile: None,
            pod: in_use.then(|| "default/a".to_owned()),
        }
    }

    fn gpus(all: &[(&str, &[Slice])]) -> BTreeMap<String, Vec<Slice>> {
        all.iter().map(|(gpu, slices)| ((*gpu).to_owned(), slices.to_vec())).collect()
    }

    fn steps(observed: &[(&str, &[Slice])], desired: &[(&str, &[Slice])]) -> Vec<Step> {
        diff(&Observed { gpus: gpus(observed) }, &Desired { gpus: gpus(desired) })
    }

    #[test]
    fn only_the_difference_is_done_and_removals_come_first() {
        let there = [mig("1g.5gb", 0, true), mig("1g.5gb", 1, false), mig("3g.20gb", 4, false)];
        let wanted = [mig("1g.5gb", 0, false), mig("1g.5gb", 1, false), mig("2g.10gb", 4, false)];
        let done = steps(&[("a", &there), ("b", &[])], &[("b", &wanted[..1]), ("a", &wanted)]);
        let remove = Step::Remove { gpu: "a".to_owned(), slice: mig("3g.20gb", 4, false) };
        let create = |gpu: &str, slice: &Slice| Step::Create { gpu: gpu.to_owned(), slice: slice.clone() };
        assert_eq!(done, [remove, create("a", &wanted[2]), create("b", &wanted[0])]);
        assert_eq!(steps(&[("a", &there)], &[("a", &there)]), []);
    }

    #[test]
    fn a_gpu_of_which_a_slice_in_use_would_have_to_go_is_left_alone() {
        let there = [mig("1g.5gb", 0, true), mig("2g.10gb", 2, false)];
        let done = steps(&[("a", &there)], &[("a", &[mig("7g.40gb", 0, false)])]);
        assert!(matches!(done.as_slice(), [Step::Refuse { reason, slice: Some(slice), .. }]
            if reason == "pod default/a uses nvidia.com/mig-1g.5gb" && slice.placement == Some(0)));
    }

    #[test]
    fn a_gpu_that_is_not_there_is_refused_and_one_that_is_not_wanted_stays() {
        let done = steps(&[("a", &[mig("1g.5gb", 0, false)])], &[("b", &[])]);
        assert!(matches!(done.as_slice(), [Step::Refuse { gpu, slice: None, .. }] if gpu == "b"));
    }

    #[test]
    fn counts_and_single_slices_are_the_same_thing() {
        let shares = |count, in_use| Slice {
            placement: None,
            resource: "nvidia.com/gpu-mps".to_owned(),
            in_use,
            count,
            profile: None,
            pod: None,
        };
        let there = [shares(3, true), shares(7, false)];
        let ten: Vec<Slice> = std::iter::repeat_n(shares(1, false), 10).collect();
        assert_eq!(steps(&[("a", &there)], &[("a", &ten)]), []);
        assert!(
            matches!(steps(&[("a", &there)], &[("a", &ten[..4])]).as_slice(), [Step::Remove { slice, .. }] if slice.count == 6)
        );
        assert!(matches!(steps(&[("a", &there)], &[("a", &ten[..2])]).as_slice(), [Step::Refuse { .. }]));
    }
}
