//! Finds GPUs for several pods at once.
use std::collections::{BTreeMap, BTreeSet};

use super::amount::Amount;
use super::gang::Part;
use super::world::{PodId, World};

/// Maximum number of placements that the search tries before it gives up. The search needs one step
/// for each pod if all pods have the same size.
const MAX_PACKING_STEPS: usize = 10_000;

/// Finds a GPU for each pod. Places large pods first, each on the fullest GPU that still allows a
/// placement of the other pods. `room` is the free capacity of each GPU, negative if too much is
/// used.
///
/// The search is exact up to [`MAX_PACKING_STEPS`]. Without `restricted`, pods may use all GPUs.
pub(super) fn pack(world: &World, pods: &[PodId], room: &[i128], restricted: bool) -> Option<Vec<Part>> {
    let mut order = pods.to_vec();
    order.sort_by_key(|&id| (std::cmp::Reverse(world.pod(id).charge), &world.pod(id).name, id));
    let first = world.pod(*order.first()?);
    let mut rooms: BTreeMap<i128, BTreeSet<usize>> = BTreeMap::new();
    let are_alike = !restricted || order.iter().all(|&id| world.pod(id).gpus == first.gpus);
    let is_usable = |gpu: usize| !restricted || !are_alike || first.may_use(gpu);
    for (gpu, &free) in room.iter().enumerate().filter(|(gpu, free)| **free > 0 && is_usable(*gpu)) {
        rooms.entry(free).or_default().insert(gpu);
    }
    let charges: Vec<Amount> = order.iter().map(|&id| world.pod(id).charge).collect();
    if !may_fit(&charges, &rooms) {
        return None;
    }
    let mut packing = Packing { world, order, are_alike, rooms, parts: Vec::new(), steps: 0 };
    packing.place_from(0).then_some(packing.parts)
}

/// Returns whether, for each size, the GPUs have enough free capacity for all pods of this size or
/// larger. If not, no placement exists.
fn may_fit(charges: &[Amount], rooms: &BTreeMap<i128, BTreeSet<usize>>) -> bool {
    charges.iter().enumerate().all(|(at, &charge)| {
        let charge = i128::from(charge).max(1);
        let places = rooms.range(charge..).map(|(free, gpus)| (free / charge).saturating_mul(gpus.len() as i128));
        places.fold(0, i128::saturating_add) > at as i128
    })
}

struct Packing<'w> {
    world: &'w World,
    order: Vec<PodId>,
    /// Whether all pods may use the same GPUs. If so, `rooms` contains only these GPUs.
    are_alike: bool,
    /// GPUs by free capacity.
    rooms: BTreeMap<i128, BTreeSet<usize>>,
    parts: Vec<Part>,
    steps: usize,
}

impl Packing<'_> {
    /// Places the pods from this position in `order` on. Returns whether a placement was found.
    fn place_from(&mut self, at: usize) -> bool {
        let Some(&id) = self.order.get(at) else { return true };
        let pod = self.world.pod(id);
        let charge = i128::from(pod.charge);
        // GPUs with equal free capacity are interchangeable if all pods may use them.
        let are_alike = self.are_alike;
        let limit = if are_alike { 1 } else { usize::MAX };
        let choices: Vec<(i128, usize)> = self
            .rooms
            .range(charge..)
            .flat_map(|(&free, gpus)| {
                let usable = gpus.iter().filter(move |&&gpu| are_alike || pod.may_use(gpu));
                usable.take(limit).map(move |&gpu| (free, gpu))
            })
            .collect();
        for (free, gpu) in choices {
            self.steps += 1;
            if self.steps > MAX_PACKING_STEPS {
                return false;
            }
            self.change(gpu, free, free - charge);
            self.parts.push((id, gpu));
            if self.place_from(at + 1) {
                return true;
            }
            self.parts.pop();
            self.change(gpu, free - charge, free);
        }
        false
    }

    fn change(&mut self, gpu: usize, from: i128, to: i128) {
        if let Some(gpus) = self.rooms.get_mut(&from) {
            gpus.remove(&gpu);
            if gpus.is_empty() {
                self.rooms.remove(&from);
            }
        }
        self.rooms.entry(to).or_default().insert(gpu);
    }
}
