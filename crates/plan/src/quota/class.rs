//! Classes of pods, and shares of quotas.
use std::cmp::{Ordering, Reverse};

use super::amount::Amount;
use super::world::PodId;
use crate::ledger::Moment;

/// Whether a pod is within its quota's guarantee.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// The pod borrows. Pods of other quotas can evict it.
    Over,
    /// The pod is within the guarantee. Only a pod of the same quota with a higher priority, or a
    /// pod whose priority overrides quotas, can evict it.
    In,
}

/// The amount that a quota uses beyond its guarantee, relative to its weight.
///
/// Shares are fractions. The comparison multiplies crosswise, so that nothing is rounded.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    /// Amount beyond the guarantee.
    pub excess: Amount,
    /// Weight of the quota, at least 1.
    pub weight: u32,
}

impl Ord for Share {
    fn cmp(&self, other: &Self) -> Ordering {
        let left = u128::from(self.excess.0) * u128::from(other.weight);
        left.cmp(&(u128::from(other.excess.0) * u128::from(self.weight)))
    }
}

impl PartialOrd for Share {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Share {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Share {}

/// The time since which a pod counts. A nominated pod counts since the time of the pass, and is
/// ordered after pods that the pass releases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Since {
    pub(super) at: Moment,
    /// Creation time of a nominated pod. `None` for a released pod.
    pub(super) nominated: Option<Moment>,
}

/// Position of a pod among the pods of its quota. The most important pod is first. Pods that may
/// not borrow come before all others: they run only within the guarantee, so a pod that may borrow
/// does not push them out of the guarantee.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Importance<'w> {
    pub(super) borrows: bool,
    pub(super) priority: Reverse<i32>,
    pub(super) since: Since,
    pub(super) name: &'w str,
    pub(super) id: PodId,
}

/// The remaining part of a guarantee while the pods of a quota are visited in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct FirstFit {
    left: Amount,
}

impl FirstFit {
    pub(super) const fn new(min: Amount) -> Self {
        Self { left: min }
    }

    /// Returns whether a pod fits into the remaining part. Later pods only reduce this part.
    pub(super) fn has_room(self, charge: Amount) -> bool {
        charge <= self.left
    }

    /// Returns the class of the next pod. If a pod does not fit into the remaining part, smaller
    /// pods can still use this part.
    pub(super) fn next(&mut self, charge: Amount) -> Class {
        if !self.has_room(charge) {
            return Class::Over;
        }
        self.left = self.left.minus(charge);
        Class::In
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_compared_without_rounding_or_overflow() {
        let share = |excess, weight| Share { excess: Amount(excess), weight };
        assert_eq!(share(30, 3), share(10, 1));
        assert!(share(1, 3) < share(334, 1000) && share(333, 1000) < share(1, 3));
        assert!(share(u64::MAX, 1000) < share(u64::MAX, 999) && share(0, 1) == share(0, 1000));
    }

    #[test]
    fn a_large_pod_leaves_the_guarantee_to_smaller_pods() {
        let mut fit = FirstFit::new(Amount(4));
        assert_eq!(
            [3, 3, 1, 1].map(|charge| fit.next(Amount(charge))),
            [Class::In, Class::Over, Class::In, Class::Over]
        );
    }
}
