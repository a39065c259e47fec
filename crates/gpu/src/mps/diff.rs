//! Changes between two desired states. Pure.
use super::wire::Desired;

/// Changes to apply, in this order: removals before additions.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct DesiredChanges {
    /// Close the doors of these allocations.
    pub(crate) close: Vec<String>,
    /// Stop the daemons of these devices.
    pub(crate) stop: Vec<String>,
    /// Start the daemons of these devices, or restart them with new settings.
    pub(crate) run: Vec<String>,
    /// Open the doors of these allocations.
    pub(crate) open: Vec<String>,
    /// Change the limits of the open doors of these allocations, for clients that connect later.
    pub(crate) limit: Vec<String>,
}

/// Returns the changes that turn `old` into `new`.
pub(crate) fn desired_changes_between(old: &Desired, new: &Desired) -> DesiredChanges {
    let mut changes = DesiredChanges::default();
    for (id, was) in &old.allocations {
        // A door cannot change its device: close the door of an allocation that moves to another
        // device.
        if new.allocations.get(id).is_none_or(|is| is.device != was.device) {
            changes.close.push(id.clone());
        }
    }
    changes.stop.extend(old.daemons.keys().filter(|device| !new.daemons.contains_key(*device)).cloned());
    for (device, is) in &new.daemons {
        if old.daemons.get(device) != Some(is) {
            changes.run.push(device.clone());
        }
    }
    for (id, is) in &new.allocations {
        match old.allocations.get(id) {
            Some(was) if was == is => {}
            Some(was) if was.device == is.device => changes.limit.push(id.clone()),
            _ => changes.open.push(id.clone()),
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::wire::{Allocation, DaemonSettings, FILE_FORMAT_VERSION};
    use super::*;

    fn desired(daemons: &[(&str, u8)], allocations: &[(&str, &str, u8)]) -> Desired {
        let daemon = |threads| DaemonSettings {
            multi_user: true,
            exclusive: false,
            default_threads: Some(threads),
            default_memory_mib: None,
            accept_advisory: false,
        };
        let allocation = |device: &str, threads| Allocation {
            device: device.into(),
            threads: Some(threads),
            memory_mib: None,
            max_clients: None,
        };
        Desired {
            version: FILE_FORMAT_VERSION,
            daemons: daemons.iter().map(|&(name, threads)| (name.into(), daemon(threads))).collect(),
            allocations: allocations
                .iter()
                .map(|&(id, device, threads)| (id.into(), allocation(device, threads)))
                .collect::<BTreeMap<_, _>>(),
        }
    }

    #[test]
    fn equal_states_need_no_change() {
        let same = desired(&[("a", 50)], &[("1", "a", 10)]);
        assert_eq!(desired_changes_between(&same, &same), DesiredChanges::default());
    }

    #[test]
    fn each_difference_causes_its_changes() {
        let old = desired(
            &[("a", 50), ("b", 50), ("c", 50)],
            &[("1", "a", 10), ("2", "a", 10), ("3", "b", 10), ("4", "a", 10)],
        );
        let new = desired(
            &[("a", 60), ("b", 50), ("d", 50)],
            &[("2", "a", 20), ("3", "a", 10), ("4", "a", 10), ("5", "d", 10)],
        );
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            desired_changes_between(&old, &new),
            DesiredChanges {
                close: names(&["1", "3"]),
                stop: names(&["c"]),
                run: names(&["a", "d"]),
                open: names(&["3", "5"]),
                limit: names(&["2"]),
            }
        );
    }
}
