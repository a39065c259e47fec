//! Determines which quota owns which GPU.
//!
//! A quota with `guarantee: Cells` owns whole GPUs. [`Ownership::assign`] visits pods in the order
//! in which they were released, and nominated pods last. A pod of such a quota is within the
//! guarantee if the quota owns the pod's GPU. The pod is also within the guarantee if the GPU has
//! no owner and the quota owns fewer GPUs than its guarantee. A GPU belongs to the quota of its
//! first pod within a guarantee.
use std::collections::BTreeSet;

use super::amount::Amount;
use super::class::Class;
use super::world::PodId;

/// A pod on a GPU. A pod on several GPUs is an occupant of each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Occupant {
    pub(super) id: PodId,
    /// Index of the pod's account.
    pub(super) account: usize,
    pub(super) gpu: usize,
    pub(super) charge: Amount,
    /// Class of the pod if its quota guarantees an amount. `None` if its quota guarantees cells.
    pub(super) counted: Option<Class>,
    /// The pod, or its gang. The GPUs of a pod, and the pods of a gang, are consecutive.
    pub(super) unit: (bool, usize),
}

/// Which account owns each GPU.
#[derive(Debug, Clone, Default)]
pub(super) struct Ownership {
    /// Owner of each GPU.
    pub(super) owner: Vec<Option<usize>>,
    /// Number of owned GPUs of each account.
    pub(super) cells: Vec<usize>,
    /// Amount of each GPU that pods within a guarantee use.
    pub(super) guaranteed: Vec<Amount>,
    /// Pods of quotas that guarantee cells, with their classes.
    pub(super) classes: Vec<(PodId, Class)>,
}

impl Ownership {
    /// Assigns GPUs to accounts. Occupants are in the order in which they were released. `limits`
    /// is the number of guaranteed GPUs of each account.
    pub(super) fn assign(gpus: usize, limits: &[usize], occupants: &[Occupant]) -> Self {
        let mut ownership = Self {
            owner: vec![None; gpus],
            cells: vec![0; limits.len()],
            guaranteed: vec![Amount::ZERO; gpus],
            classes: Vec::new(),
        };
        for unit in occupants.chunk_by(|one, next| one.unit == next.unit) {
            let Occupant { account, counted, .. } = unit[0];
            let class = counted.unwrap_or_else(|| match unit {
                [one] => ownership.class_of_next(account, &[one.gpu], limits[account]),
                many => {
                    let gpus: Vec<usize> = many.iter().map(|one| one.gpu).collect();
                    ownership.class_of_next(account, &gpus, limits[account])
                }
            });
            for &Occupant { id, gpu, charge, .. } in unit {
                if counted.is_none() && ownership.classes.last().is_none_or(|(last, _)| *last != id) {
                    ownership.classes.push((id, class));
                }
                if class == Class::In {
                    ownership.guaranteed[gpu] = ownership.guaranteed[gpu].plus(charge);
                    if ownership.owner[gpu].is_none() {
                        ownership.owner[gpu] = Some(account);
                        ownership.cells[account] += 1;
                    }
                }
            }
        }
        ownership
    }

    /// Returns the class that the next unit of an account has on these GPUs. The unit is within the
    /// guarantee if the account owns each of the GPUs or may still acquire it.
    pub(super) fn class_of_next(&self, account: usize, gpus: &[usize], limit: usize) -> Class {
        let is_new = |gpu: usize| self.owner[gpu].is_none();
        let is_foreign = |&gpu: &usize| self.owner[gpu].is_some_and(|owner| owner != account);
        let new = match gpus {
            &[gpu] => usize::from(is_new(gpu)),
            many => many.iter().filter(|&&gpu| is_new(gpu)).collect::<BTreeSet<_>>().len(),
        };
        let is_in = !gpus.iter().any(is_foreign) && (new == 0 || self.cells[account] + new <= limit);
        if is_in { Class::In } else { Class::Over }
    }

    /// Returns the GPUs of an account.
    pub(super) fn owned_by(&self, account: usize) -> impl Iterator<Item = usize> {
        self.owner.iter().enumerate().filter(move |(_, owner)| **owner == Some(account)).map(|(gpu, _)| gpu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn occupant(id: usize, account: usize, gpu: usize, counted: Option<Class>) -> Occupant {
        Occupant { id: PodId(id), account, gpu, charge: Amount(5), counted, unit: (false, id) }
    }

    #[test]
    fn a_gpu_belongs_to_the_quota_of_its_first_pod_within_a_guarantee() {
        // Account 0 is guaranteed one GPU, account 1 two. Account 2 guarantees an amount.
        let occupants = [
            occupant(0, 2, 0, Some(Class::Over)),
            occupant(1, 0, 0, None),
            occupant(2, 0, 1, None),
            occupant(3, 1, 1, None),
            occupant(4, 0, 0, None),
            occupant(5, 2, 2, Some(Class::In)),
            occupant(6, 1, 2, None),
        ];
        let ownership = Ownership::assign(4, &[1, 2, 0], &occupants);
        assert_eq!(ownership.owner, [Some(0), Some(1), Some(2), None]);
        let classes: Vec<(usize, bool)> =
            ownership.classes.iter().map(|(id, class)| (id.0, *class == Class::In)).collect();
        assert_eq!(classes, [(1, true), (2, false), (3, true), (4, true), (6, false)]);
        assert_eq!(ownership.guaranteed, [Amount(10), Amount(5), Amount(5), Amount(0)]);
        assert_eq!(ownership.owned_by(1).collect::<Vec<_>>(), [1]);
        let next = |account, gpu, limit| ownership.class_of_next(account, &[gpu], limit);
        let both = [ownership.class_of_next(0, &[0, 3], 1), ownership.class_of_next(0, &[0, 3, 3], 2)];
        assert_eq!(both, [Class::Over, Class::In], "a gang is within as a whole");
        assert_eq!(
            [next(0, 0, 1), next(0, 3, 1), next(1, 3, 2), next(1, 0, 2)],
            [Class::In, Class::Over, Class::In, Class::Over]
        );
    }
}
