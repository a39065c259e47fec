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
    let item = |id: PodId| Item { id, charge: world.pod(id).charge, gpus: world.pod(id).gpus.as_deref() };
    pack_items(order.into_iter().map(item).collect(), room, restricted)
}

/// Returns whether there is a GPU for each amount.
pub(super) fn fits(charges: &[Amount], room: &[i128]) -> bool {
    let mut order: Vec<Item<'_>> = charges.iter().map(|&charge| Item { id: PodId(0), charge, gpus: None }).collect();
    order.sort_by_key(|item| std::cmp::Reverse(item.charge));
    pack_items(order, room, false).is_some()
}

/// A pod or an amount that needs capacity on one GPU.
struct Item<'w> {
    id: PodId,
    charge: Amount,
    /// The GPUs that the pod may use. `None` means all.
    gpus: Option<&'w BTreeSet<usize>>,
}

fn pack_items(order: Vec<Item<'_>>, room: &[i128], restricted: bool) -> Option<Vec<Part>> {
    let first = order.first()?;
    let mut rooms: BTreeMap<i128, BTreeSet<usize>> = BTreeMap::new();
    let are_alike = !restricted || order.iter().all(|item| item.gpus == first.gpus);
    let is_usable = |gpu: usize| !restricted || !are_alike || first.gpus.is_none_or(|gpus| gpus.contains(&gpu));
    for (gpu, &free) in room.iter().enumerate().filter(|(gpu, free)| **free > 0 && is_usable(*gpu)) {
        rooms.entry(free).or_default().insert(gpu);
    }
    let charges: Vec<Amount> = order.iter().map(|item| item.charge).collect();
    if !may_fit(&charges, &rooms) {
        return None;
    }
    let mut packing = Packing { order, are_alike, rooms, parts: Vec::new(), steps: 0 };
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
    order: Vec<Item<'w>>,
    /// Whether all pods may use the same GPUs. If so, `rooms` contains only these GPUs.
    are_alike: bool,
    /// GPUs by free capacity.
    rooms: BTreeMap<i128, BTreeSet<usize>>,
    parts: Vec<Part>,
    steps: usize,
}

impl Packing<'_> {
    /// Places the items from this position in `order` on. Returns whether a placement was found.
    fn place_from(&mut self, at: usize) -> bool {
        let Some(&Item { id, charge, gpus: allowed }) = self.order.get(at) else { return true };
        let charge = i128::from(charge);
        // GPUs with equal free capacity are interchangeable if all pods may use them.
        let are_alike = self.are_alike;
        let limit = if are_alike { 1 } else { usize::MAX };
        let choices: Vec<(i128, usize)> = self
            .rooms
            .range(charge..)
            .flat_map(|(&free, gpus)| {
                let usable =
                    gpus.iter().filter(move |&&gpu| are_alike || allowed.is_none_or(|allowed| allowed.contains(&gpu)));
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
