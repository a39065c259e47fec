//! Remembers units that a node still uses although it no longer lists the pod that used them.
//!
//! The kubelet stops listing an ended pod shortly before the agent reports that the pod's units are
//! free. In between, the units are used, and no pod is listed for them. For a short time, they
//! count as about to be free, as the units of a terminating pod do. Otherwise more pods would be
//! evicted for a pod that waits for these units. Pure: callers pass in the time.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::ledger::{DeviceAmounts, Ledger, NodeFacts};

/// How long used units count as about to be free after the node stopped listing their pod. After
/// that, the units count as used until the node reports otherwise.
pub(super) const UNLISTED_TIME: Duration = Duration::from_secs(10);

/// Pods that nodes stopped listing less than [`UNLISTED_TIME`] ago, and whose units are still used.
#[derive(Debug, Default)]
pub(super) struct UnlistedUnits(BTreeMap<String, BTreeMap<String, UnlistedPod>>);

#[derive(Debug)]
struct UnlistedPod {
    /// When the node stopped listing the pod.
    since: Duration,
    /// The units that the node listed for the pod.
    units: DeviceAmounts,
}

impl UnlistedUnits {
    /// Compares the new state of a node with its state in the ledger, before the ledger observes
    /// it. `facts` is `None` if the node no longer exists.
    pub(super) fn update(&mut self, ledger: &Ledger, node: &str, facts: Option<&NodeFacts>, up: Duration) {
        let Some(facts) = facts else {
            self.0.remove(node);
            return;
        };
        let listed: BTreeSet<&str> = facts.allocations.iter().map(|allocation| allocation.pod.as_str()).collect();
        let unlisted = ledger.allocations(node).filter(|allocation| !listed.contains(allocation.pod.as_str()));
        let mut pods = self.0.remove(node).unwrap_or_default();
        pods.retain(|pod, _| !listed.contains(pod.as_str()));
        for allocation in unlisted {
            let new = || UnlistedPod { since: up, units: DeviceAmounts::new() };
            let units = &mut pods.entry(allocation.pod).or_insert_with(new).units;
            let sum = units.entry((allocation.resource, allocation.device)).or_default();
            *sum = sum.saturating_add(allocation.units.get());
        }
        let used = units_without_pod(facts);
        pods.retain(|_, pod| {
            pod.units.retain(|device, _| used.contains(device));
            !pod.units.is_empty()
        });
        if !pods.is_empty() {
            self.0.insert(node.to_owned(), pods);
        }
    }

    /// Forgets pods whose time is over.
    pub(super) fn expire(&mut self, up: Duration) {
        self.0.retain(|_, pods| {
            pods.retain(|_, pod| up < pod.since.saturating_add(UNLISTED_TIME));
            !pods.is_empty()
        });
    }

    /// Returns the time until the next pod is forgotten.
    pub(super) fn next_expiry(&self, up: Duration) -> Option<Duration> {
        let expiry = |pod: &UnlistedPod| pod.since.saturating_add(UNLISTED_TIME).saturating_sub(up);
        self.0.values().flat_map(BTreeMap::values).map(expiry).min()
    }

    /// Returns the pods that the node no longer lists, with the units that it listed for each.
    pub(super) fn of_node(&self, node: &str) -> impl Iterator<Item = (&str, &DeviceAmounts)> {
        self.0.get(node).into_iter().flatten().map(|(name, pod)| (name.as_str(), &pod.units))
    }
}

/// Returns the devices with used units for which the node lists no pod.
fn units_without_pod(facts: &NodeFacts) -> BTreeSet<(String, String)> {
    let mut listed = DeviceAmounts::new();
    for allocation in &facts.allocations {
        let sum = listed.entry((allocation.resource.clone(), allocation.device.clone())).or_default();
        *sum = sum.saturating_add(allocation.units.get());
    }
    let devices = facts.devices.iter().map(|device| ((device.resource.clone(), device.device.clone()), device.used));
    devices.filter(|(key, used)| *used > listed.get(key).copied().unwrap_or(0)).map(|(key, _)| key).collect()
}

#[cfg(test)]
mod tests {
    use cleave_plan::ledger::{Allocation, DeviceFacts, Units};

    use super::*;

    fn facts(used: u32, pods: &[(&str, u32)]) -> NodeFacts {
        let (device, resource) = ("GPU-0".to_owned(), "shares".to_owned());
        let allocations = pods.iter().map(|(pod, units)| Allocation {
            pod: (*pod).to_owned(),
            resource: resource.clone(),
            device: device.clone(),
            units: Units::new(*units).unwrap(),
        });
        NodeFacts {
            allocations: allocations.collect(),
            devices: vec![DeviceFacts { device: device.clone(), resource: resource.clone(), capacity: 10, used }],
            ..NodeFacts::default()
        }
    }

    /// Observes these states of a node, one each second. Returns the unlisted units, and the names
    /// of their pods.
    fn unlisted(states: &[NodeFacts]) -> (UnlistedUnits, Vec<String>) {
        let (mut ledger, mut units) = (Ledger::default(), UnlistedUnits::default());
        for (second, state) in (0..).zip(states) {
            units.update(&ledger, "n", Some(state), Duration::from_secs(second));
            ledger.observe("n", state.clone());
        }
        let pods = units.of_node("n").map(|(pod, _)| pod.to_owned()).collect();
        (units, pods)
    }

    #[test]
    fn only_units_that_were_listed_and_are_still_used_count() {
        let both = facts(7, &[("a", 3), ("b", 4)]);
        assert_eq!(unlisted(&[facts(7, &[("b", 4)])]).1, [""; 0], "a was never listed");
        assert_eq!(unlisted(&[both.clone(), facts(7, &[("b", 4)])]).1, ["a"]);
        assert_eq!(unlisted(&[both.clone(), facts(4, &[("b", 4)])]).1, [""; 0], "its units are free");
        assert_eq!(unlisted(&[both.clone(), facts(7, &[("b", 4)]), facts(4, &[("b", 4)])]).1, [""; 0]);
        assert_eq!(unlisted(&[both.clone(), facts(7, &[("b", 4)]), both]).1, [""; 0], "a is listed again");
    }

    #[test]
    fn units_count_only_for_a_short_time_since_the_pod_is_not_listed() {
        let (gone, still) = (facts(3, &[]), facts(3, &[]));
        let (mut units, _) = unlisted(&[facts(3, &[("a", 3)]), gone, still]);
        let since = Duration::from_secs(1);
        assert_eq!(units.next_expiry(since), Some(UNLISTED_TIME));
        units.expire(UNLISTED_TIME + Duration::from_millis(999));
        assert_eq!(units.of_node("n").count(), 1);
        units.expire(since + UNLISTED_TIME);
        assert_eq!((units.of_node("n").count(), units.next_expiry(since)), (0, None));
    }
}
