//! Amounts of a node's resources, in thousandths, and the amounts that pods request. Pure.
use std::collections::BTreeMap;

use cleave_api::names::is_served;
use cleave_plan::Quantity;
use cleave_plan::scheduling::PODS_RESOURCE;

/// Free amounts by resource. An amount is negative if pods request more than the node has.
pub(super) type FreeAmounts<'a> = BTreeMap<&'a str, i128>;

/// The kind of resource that a node lacks for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shortage {
    /// CPU, memory, pod slots or another resource that Cleave does not serve.
    Resources,
    /// Units, in the scheduler's sum of the node's free units.
    Units,
}

/// Requests of a pod by resource.
type Requests = BTreeMap<String, Quantity>;

/// Returns the amounts above 0 that a pod requests of a node's resources. Excludes the pod's slot,
/// and resources that Cleave can serve.
pub(super) fn requested(requests: &Requests) -> impl Iterator<Item = (&str, i128)> {
    requested_with_gpus(requests).filter(|(name, _)| !is_served(name))
}

/// Returns the amounts above 0 that a pod requests of resources that Cleave can serve.
pub(super) fn requested_units(requests: &Requests) -> impl Iterator<Item = (&str, i128)> {
    requested_with_gpus(requests).filter(|(name, _)| is_served(name))
}

/// Returns the amounts above 0 that a pod requests of a node's resources. Excludes the pod's slot.
pub(super) fn requested_with_gpus(requests: &Requests) -> impl Iterator<Item = (&str, i128)> {
    let amounts =
        requests.keys().filter(|name| *name != PODS_RESOURCE).map(|name| (name.as_str(), amount(requests, name)));
    amounts.filter(|(_, amount)| *amount > 0)
}

/// Returns the amount that a pod uses of one resource of a node. If the number of GPUs is malformed
/// or too large, the pod fits no node. Malformed amounts of other resources are ignored.
pub(super) fn amount(requests: &Requests, resource: &str) -> i128 {
    if resource == PODS_RESOURCE {
        return 1000;
    }
    let Some(quantity) = requests.get(resource) else { return 0 };
    quantity.milli().map_or(if is_served(resource) { i128::MAX } else { 0 }, i128::from)
}

/// Returns whether the free amounts suffice for these requested amounts and one more pod.
pub(super) fn has_room_for_pod<'r>(
    free: &FreeAmounts<'_>,
    mut requested: impl Iterator<Item = (&'r str, i128)>,
) -> bool {
    let has_slot = free.get(PODS_RESOURCE).is_none_or(|slots| *slots >= amount(&BTreeMap::new(), PODS_RESOURCE));
    has_slot && requested.all(|(resource, wanted)| free.get(resource).is_some_and(|free| *free >= wanted))
}

/// Subtracts the resources that a pod uses, including its pod slot.
pub(super) fn subtract(free: &mut FreeAmounts<'_>, requests: &Requests) {
    for (name, free) in free.iter_mut() {
        *free = free.saturating_sub(amount(requests, name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(amounts: &[(&str, &str)]) -> Requests {
        amounts
            .iter()
            .map(|(name, amount)| ((*name).to_owned(), serde_json::from_value((*amount).into()).unwrap()))
            .collect()
    }

    /// Requests, free pod slots in thousandths, and whether the free amounts suffice for the pod,
    /// without and with its GPUs.
    type Case = (&'static [(&'static str, &'static str)], i128, bool, bool);

    #[test]
    fn free_amounts_cover_a_pod_only_if_each_resource_and_a_slot_are_free() {
        let free = |pods: i128| FreeAmounts::from([("cpu", 2000), ("nvidia.com/gpu", 1000), (PODS_RESOURCE, pods)]);
        let cases: [Case; 7] = [
            (&[("cpu", "2")], 1000, true, true),
            (&[("cpu", "2001m")], 1000, false, false),
            (&[("cpu", "2")], 999, false, false),
            (&[("memory", "1")], 1000, false, false),
            (&[("memory", "0")], 1000, true, true),
            (&[("nvidia.com/gpu", "2")], 1000, true, false),
            (&[("nvidia.com/gpu", "1"), (PODS_RESOURCE, "5")], 1000, true, true),
        ];
        for (amounts, pods, without_gpus, with_gpus) in cases {
            let requests = requests(amounts);
            let found = (
                has_room_for_pod(&free(pods), requested(&requests)),
                has_room_for_pod(&free(pods), requested_with_gpus(&requests)),
            );
            assert_eq!(found, (without_gpus, with_gpus), "{amounts:?}");
        }
        assert!(has_room_for_pod(&FreeAmounts::new(), [].into_iter()), "a node that lists no slots has no limit");
    }

    #[test]
    fn a_pod_uses_its_requests_and_one_slot() {
        let mut free =
            FreeAmounts::from([("cpu", 2000), ("memory", 5), ("nvidia.com/gpu", 1000), (PODS_RESOURCE, 3000)]);
        subtract(
            &mut free,
            &requests(&[("cpu", "2500m"), ("nvidia.com/gpu", "1"), ("unknown", "1"), (PODS_RESOURCE, "9")]),
        );
        assert_eq!(
            free,
            FreeAmounts::from([("cpu", -500), ("memory", 5), ("nvidia.com/gpu", 0), (PODS_RESOURCE, 2000)])
        );
    }
}
