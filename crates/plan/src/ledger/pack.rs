//! Assigns sizes to devices. If an assignment exists, it is found, unless the search reaches its
//! limit.
use std::collections::BTreeSet;

/// Maximum number of states that a search visits. A pod of one container needs one state. The limit
/// bounds the time for a pod with many containers of different sizes on a nearly full node.
const MAX_SEARCHED_STATES: usize = 20_000;

/// Returns the index of a device for each size. Returns `None` if the sizes do not fit at the same
/// time, or if the search reaches its limit.
///
/// `order` returns the devices to try for a size, given the free units, best first. Devices that
/// `order` omits are not tried. The search returns the first assignment that it finds. For one
/// size, the first assignment is the best.
pub(super) fn assign_to_devices(
    sizes: &[u32],
    free: &[u32],
    order: &mut dyn FnMut(u32, &[u32]) -> Vec<usize>,
) -> Option<Vec<usize>> {
    // Place the largest sizes first, while the most units are free.
    let mut indexed: Vec<(usize, u32)> = sizes.iter().copied().enumerate().collect();
    indexed.sort_by_key(|&(index, size)| (std::cmp::Reverse(size), index));
    let mut search = DeviceSearch { order, failed: BTreeSet::new(), states: 0 };
    let mut chosen = Vec::with_capacity(sizes.len());
    if !search.place(&indexed, &mut free.to_vec(), &mut chosen) {
        return None;
    }
    let mut devices: Vec<(usize, usize)> = indexed.iter().map(|&(index, _)| index).zip(chosen).collect();
    devices.sort_unstable();
    Some(devices.into_iter().map(|(_, device)| device).collect())
}

struct DeviceSearch<'a> {
    order: &'a mut dyn FnMut(u32, &[u32]) -> Vec<usize>,
    /// States without an assignment: the number of remaining sizes, and the sorted free units.
    failed: BTreeSet<(usize, Vec<u32>)>,
    states: usize,
}

impl DeviceSearch<'_> {
    fn place(&mut self, sizes: &[(usize, u32)], free: &mut [u32], chosen: &mut Vec<usize>) -> bool {
        let Some((&(_, size), rest)) = sizes.split_first() else { return true };
        let sum = |amounts: &mut dyn Iterator<Item = u32>| amounts.map(u64::from).sum::<u64>();
        if sum(&mut sizes.iter().map(|&(_, size)| size)) > sum(&mut free.iter().copied()) {
            return false;
        }
        let mut state = free.to_vec();
        state.sort_unstable();
        let state = (sizes.len(), state);
        if self.failed.contains(&state) || self.states >= MAX_SEARCHED_STATES {
            return false;
        }
        self.states += 1;
        let mut tried = BTreeSet::new();
        for device in (self.order)(size, free) {
            let Some(before) = free.get(device).copied() else { continue };
            let Some(left) = before.checked_sub(size) else { continue };
            // Devices with equal free units are equivalent for all remaining sizes.
            if !tried.insert(before) {
                continue;
            }
            free[device] = left;
            chosen.push(device);
            if self.place(rest, free, chosen) {
                return true;
            }
            chosen.pop();
            free[device] = before;
        }
        self.failed.insert(state);
        false
    }
}

/// Returns the devices with enough free units, in ascending order of free units.
pub(super) fn tightest_devices(size: u32, free: &[u32]) -> Vec<usize> {
    let mut devices: Vec<usize> = (0..free.len()).filter(|&device| free[device] >= size).collect();
    devices.sort_by_key(|&device| (free[device], device));
    devices
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_size_goes_to_the_tightest_device() {
        assert_eq!(assign_to_devices(&[3], &[9, 3, 4], &mut tightest_devices), Some(vec![1]));
        assert_eq!(assign_to_devices(&[10], &[9, 3, 4], &mut tightest_devices), None);
        assert_eq!(assign_to_devices(&[], &[], &mut tightest_devices), Some(vec![]));
        assert_eq!(assign_to_devices(&[1], &[], &mut tightest_devices), None);
    }

    #[test]
    fn the_search_backtracks_from_the_tightest_device() {
        // The tightest device for 4 has 6 free units. After this choice, 2 and 7 units are free, so
        // the third size of 3 does not fit.
        assert_eq!(assign_to_devices(&[3, 4, 3, 3], &[7, 6], &mut tightest_devices), Some(vec![0, 0, 1, 1]));
    }

    #[test]
    fn the_search_ends_at_its_limit() {
        let sizes: Vec<u32> = (100..160).collect();
        // No assignment exists: for 60 sizes on 19 devices, three devices must have four sizes
        // each. Even the twelve smallest sizes exceed 3 × 421.
        let free = vec![421; 19];
        assert_eq!(assign_to_devices(&sizes, &free, &mut tightest_devices), None);
    }

    proptest! {
        /// Compares with all possible assignments.
        #[test]
        fn an_assignment_is_found_exactly_if_one_exists(
            sizes in prop::collection::vec(1_u32..8, 0..5),
            free in prop::collection::vec(0_u32..11, 0..4),
        ) {
            let found = assign_to_devices(&sizes, &free, &mut tightest_devices);
            let assignments = free.len().pow(u32::try_from(sizes.len()).unwrap());
            let fits = |devices: &[usize]| {
                let mut left = free.clone();
                devices.iter().zip(&sizes).all(|(&device, &size)| {
                    left[device].checked_sub(size).map(|rest| left[device] = rest).is_some()
                })
            };
            let exists = (0..assignments).any(|way| {
                let devices: Vec<usize> =
                    (0..sizes.len()).map(|index| way / free.len().pow(u32::try_from(index).unwrap()) % free.len()).collect();
                fits(&devices)
            });
            prop_assert_eq!(found.is_some(), exists, "{:?}", found);
            if let Some(devices) = found {
                prop_assert!(devices.len() == sizes.len() && fits(&devices), "{:?}", devices);
            }
        }
    }
}
