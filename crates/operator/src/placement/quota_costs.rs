//! What pods cost in a pool with quotas, and on which GPUs.
use std::borrow::Cow;
use std::collections::BTreeMap;

use cleave_api::gpunode::GpuStatus;
use cleave_plan::ledger::{DeviceRequest, Moment, Units};
use cleave_plan::quota::{Amount, GPU, Owner, Piece, Place, Unit, charge_per_gpu};
use cleave_plan::snapshot::{NodeSelectorTerm, Toleration};

use super::cluster::to_plan_pod;
use super::nodes::Nodes;
use super::quotas::{NodeView, PoolWorld};
use crate::pods::{PodObject, is_interchangeable};
use crate::quotas::charge::{NodeCosts, is_mig};

/// Units of a pod: resource, device and number.
pub(super) type UnitsOn<'l> = (&'l str, &'l str, Units);

/// Node selector, affinity and tolerations of a pod.
type NodeRules = (BTreeMap<String, String>, Vec<NodeSelectorTerm>, Vec<Toleration>);

/// What requests cost on the nodes that a pod may use, by pool. A node that no pod may use, or whose
/// report is wrong, then makes nothing dearer for the others.
pub(super) struct EligibleCosts<'n, 'v> {
    nodes: &'n Nodes,
    views: &'n [NodeView<'v>],
    pools: usize,
    known: BTreeMap<NodeRules, Vec<NodeCosts>>,
}

impl<'n, 'v> EligibleCosts<'n, 'v> {
    pub(super) fn new(nodes: &'n Nodes, views: &'n [NodeView<'v>], pools: usize) -> Self {
        Self { nodes, views, pools, known: BTreeMap::new() }
    }

    /// Returns the costs in a pool.
    pub(super) fn of(&mut self, pod: &PodObject, pool: usize) -> Option<&NodeCosts> {
        let pod = to_plan_pod(pod);
        let rules = (pod.node_selector.clone(), pod.affinity.clone(), pod.tolerations.clone());
        let (nodes, views, pools) = (self.nodes, self.views, self.pools);
        let costs = self.known.entry(rules).or_insert_with(|| {
            let mut costs = vec![NodeCosts::default(); pools];
            let eligible = views.iter().filter(|view| nodes.admits(view.name, &pod));
            eligible.for_each(|view| costs[view.pool].extend(&view.costs));
            costs
        });
        costs.get(pool)
    }
}

impl PoolWorld {
    /// Adds a GPU. Returns its index.
    pub(super) fn add_gpu(&mut self, gpu: &GpuStatus, is_current: bool) -> usize {
        let whole = match self.unit {
            Unit::Gpus => GPU,
            Unit::Memory => Amount(gpu.memory_mib),
        };
        let at = self.world.gpus.len();
        self.world.gpus.push(if is_current && gpu.health.healthy { whole } else { Amount::ZERO });
        self.sizes.push(whole);
        self.costs.add(gpu);
        self.has_mig |= gpu.slices.iter().any(|slice| is_mig(&slice.resource));
        self.gpus.insert(gpu.uuid.clone(), at);
        self.gpus.extend(gpu.slices.iter().map(|slice| (slice.device.clone(), at)));
        at
    }

    /// Returns what each request costs, and on which GPU. `units` are the pod's units, if they are
    /// known. Other requests cost what `dearest` returns, and are on the GPU that `elsewhere`
    /// returns. Requests of resources that the pool does not offer are left out.
    pub(super) fn pieces(
        &self,
        requests: &[DeviceRequest],
        units: &[UnitsOn<'_>],
        dearest: impl Fn(&DeviceRequest) -> Option<Amount>,
        mut elsewhere: impl FnMut(&DeviceRequest) -> Option<usize>,
    ) -> Vec<Piece> {
        let mut left = units.to_vec();
        let mut piece = |request: &DeviceRequest| {
            let find = |is_exact: bool| {
                left.iter().position(|(resource, _, units)| {
                    *resource == request.resource && (!is_exact || *units == request.units)
                })
            };
            let taken = find(true).or_else(|| find(false)).map(|at| left.remove(at));
            let on_device = taken.and_then(|(resource, device, _)| {
                let charge = self.costs.cost(device, resource, request.units.get(), self.unit)?;
                Some(Piece { charge, gpu: self.gpus.get(device).copied() })
            });
            on_device.or_else(|| Some(Piece { charge: dearest(request)?, gpu: elsewhere(request) }))
        };
        requests.iter().filter_map(&mut piece).collect()
    }

    /// Returns what the pods of a quota use of each GPU, released and nominated ones.
    pub(super) fn use_of(&self, owner: &Owner) -> BTreeMap<usize, Amount> {
        let mut sums: BTreeMap<usize, Amount> = BTreeMap::new();
        for pod in self.world.pods.iter().filter(|pod| pod.owner == *owner) {
            let gpu = match pod.place {
                Place::Running { gpu, .. } | Place::Leaving { gpu, .. } => Some(gpu),
                Place::Waiting { nominated } => nominated,
            };
            let whole = gpu.filter(|_| pod.pieces.is_empty()).map(|gpu| (gpu, pod.charge));
            let parts = pod.pieces.iter().filter_map(|piece| Some((piece.gpu?, piece.charge)));
            for (gpu, charge) in whole.into_iter().chain(parts) {
                let sum = sums.entry(gpu).or_default();
                *sum = sum.plus(charge);
            }
        }
        sums
    }

    /// Cuts what the pods of a quota cost on one GPU at the size of the GPU. The youngest pay less.
    pub(super) fn cut_charges(&mut self) {
        let Self { world, sizes, .. } = self;
        let mut on: BTreeMap<(usize, Owner), Vec<(Moment, Moment, usize, usize, Amount)>> = BTreeMap::new();
        for (at, pod) in world.pods.iter().enumerate() {
            let (since, gpu) = match pod.place {
                Place::Leaving { gpu, .. } => (Moment(0), Some(gpu)),
                Place::Running { gpu, since } => (since, Some(gpu)),
                Place::Waiting { nominated } => (Moment(u64::MAX), nominated),
            };
            let Some(gpu) = gpu else { continue };
            let mut add = |gpu: usize, piece: usize, charge: Amount| {
                on.entry((gpu, pod.owner.clone())).or_default().push((since, pod.created, at, piece, charge));
            };
            if pod.pieces.is_empty() {
                add(gpu, 0, pod.charge);
            }
            for (number, piece) in pod.pieces.iter().enumerate() {
                add(piece.gpu.unwrap_or(gpu), number, piece.charge);
            }
        }
        for ((gpu, _), mut charges) in on {
            charges.sort_unstable();
            let costs: Vec<Amount> = charges.iter().map(|(.., charge)| *charge).collect();
            for ((.., at, piece, charge), paid) in charges.into_iter().zip(charge_per_gpu(&costs, sizes[gpu])) {
                let pod = &mut world.pods[at];
                pod.charge = pod.charge.minus(charge.minus(paid));
                if let Some(piece) = pod.pieces.get_mut(piece) {
                    piece.charge = paid;
                }
            }
        }
    }
}

/// Returns what a pod requests, in order, whole GPUs and MIG instances included.
pub(super) fn requests_of(pod: &PodObject) -> Cow<'_, [DeviceRequest]> {
    let is_short = pod.spec.device_requests.len() < 2;
    if !is_short || pod.spec.requests.keys().any(|resource| is_interchangeable(resource)) {
        let mut requests = pod.device_requests();
        requests.sort();
        return Cow::Owned(requests);
    }
    Cow::Borrowed(&pod.spec.device_requests)
}
