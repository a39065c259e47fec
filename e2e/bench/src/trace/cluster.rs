//! A simulated cluster that places pods as the operator does: the chooser ranks the nodes of the
//! ledger, and each placed pod has a reservation.
use std::collections::BTreeMap;

use cleave_plan::ledger::{
    Allocation, ChoiceCriteria, Chooser, DeviceFacts, DeviceRequest, Ledger, Moment, NodeCpu, NodeFacts, PendingPod,
    Siblings, Units,
};
use cleave_plan::placement::{self, Score, THOUSANDTHS_PER_GPU};

use super::lists::{Host, Pod};

/// The resource of the simulated GPUs. Each GPU has [`THOUSANDTHS_PER_GPU`] units.
pub(super) const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

/// The node and the GPUs of a placed pod.
#[derive(Debug, Clone)]
pub(super) struct PodPlacement {
    pod: String,
    /// Index of the node.
    pub(super) node: usize,
    /// Indices of the pod's GPUs.
    pub(super) devices: Vec<usize>,
}

/// The nodes with their free capacity, and the operator's state.
pub(super) struct Cluster<S: Score> {
    hosts: Vec<Host>,
    by_name: BTreeMap<String, usize>,
    ledger: Ledger,
    pub(super) chooser: Chooser<S>,
    /// The score that ranks nodes for pods without GPUs until the policy has learned a score.
    score: S,
    /// Allocations of each node, as the node's agent would report them.
    allocations: Vec<Vec<Allocation>>,
    pods: usize,
    /// How the benchmark places pods without GPUs.
    without_gpus: CpuPodPlacement,
}

/// How the benchmark places pods without GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum CpuPodPlacement {
    /// The placement policy under test also places these pods, as the published policies do.
    Policy,
    /// The pod is placed on the node with the most free CPU and memory, as by the default
    /// scheduler.
    Scheduler,
}

impl<S: Score + Default> Cluster<S> {
    pub(super) fn new(hosts: Vec<Host>, without_gpus: CpuPodPlacement) -> Self {
        let mut cluster = Self {
            by_name: hosts.iter().enumerate().map(|(index, host)| (host.name.clone(), index)).collect(),
            allocations: vec![Vec::new(); hosts.len()],
            hosts,
            ledger: Ledger::default(),
            chooser: Chooser::default(),
            score: S::default(),
            pods: 0,
            without_gpus,
        };
        (0..cluster.hosts.len()).for_each(|node| cluster.report_to_ledger(node));
        cluster.ledger.synchronize(&mut cluster.chooser);
        cluster
    }

    /// Replaces the score. For policies that do not learn as the operator does.
    pub(super) fn set_score(&mut self, score: S) {
        self.chooser.set_score(MPS_RESOURCE, THOUSANDTHS_PER_GPU, score);
    }

    /// Returns the nodes with their free capacity.
    pub(super) fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Decides where to place a pod, and reserves its units. Returns `None` if the pod fits on no
    /// node.
    pub(super) fn place_pod(&mut self, pod: &Pod) -> Option<PodPlacement> {
        if pod.demand.gpus == 0 {
            let (_, node) =
                self.hosts.iter().enumerate().filter(|(_, host)| host.has_cpu_memory_and_model_for(pod)).fold(
                    None,
                    |best, (index, host)| {
                        let worth = self.score_without_gpus(host, pod);
                        match best {
                            Some((most, _)) if worth <= most => best,
                            _ => Some((worth, index)),
                        }
                    },
                )?;
            return Some(PodPlacement { pod: String::new(), node, devices: Vec::new() });
        }
        self.pods += 1;
        let name = format!("p{}", self.pods);
        let device_requests = device_requests(pod);
        let siblings = Siblings::default();
        self.ledger.synchronize(&mut self.chooser);
        let hosts = &self.hosts;
        let by_name = &self.by_name;
        let has_cpu_memory_and_model_for = |node: &str| {
            by_name
                .get(node)
                .and_then(|node| hosts.get(*node))
                .is_some_and(|host| host.has_cpu_memory_and_model_for(pod))
        };
        let waiting = PendingPod { pod: &name, priority: 0, device_requests: &device_requests };
        let beside = ChoiceCriteria { cpu: pod.demand.cpu, siblings: &siblings };
        let fits = self.ledger.choose(waiting, beside, &mut self.chooser, 1, has_cpu_memory_and_model_for)?;
        self.ledger.reserve(&name, &fits, Moment(u64::MAX)).ok()?;
        let fit = fits.iter().next()?;
        let node = *self.by_name.get(fit.node())?;
        let devices = fit.reservations().iter().filter_map(|take| take.device.parse().ok()).collect();
        Some(PodPlacement { pod: name, node, devices })
    }

    fn score_without_gpus(&self, host: &Host, pod: &Pod) -> (f64, f64, i64) {
        match self.without_gpus {
            CpuPodPlacement::Scheduler => {
                let part = |free: u64, wanted: u64, total: u64| super::figures::ratio(free - wanted, total.max(1));
                let cpu = part(host.cpu, pod.demand.cpu, host.cpu_total);
                (cpu + part(host.memory, pod.memory, host.memory_total), 0.0, 0)
            }
            CpuPodPlacement::Policy => {
                let node = host.node();
                let score = self.chooser.score(MPS_RESOURCE, THOUSANDTHS_PER_GPU).unwrap_or(&self.score);
                let rank = score.rank(&node, &score.precompute(&node), &pod.demand, None);
                (rank.score, -rank.spread, -i64::from(rank.left))
            }
        }
    }

    /// Starts a placed pod: the scheduler binds it, and the kubelet allocates its units.
    pub(super) fn start_pod(&mut self, pod: &Pod, placed: &PodPlacement) {
        self.change_free_capacity(pod, placed, u64::checked_sub, |free, part| free - part);
        let Some(host) = self.hosts.get(placed.node) else { return };
        if pod.demand.gpus > 0 {
            self.ledger.bind(&placed.pod, &host.name, &device_requests(pod));
            if let Some(allocations) = self.allocations.get_mut(placed.node) {
                allocations.extend(placed.devices.iter().filter_map(|device| {
                    let units = Units::new(pod.demand.per_gpu)?;
                    Some(Allocation {
                        pod: placed.pod.clone(),
                        resource: MPS_RESOURCE.to_owned(),
                        device: device.to_string(),
                        units,
                    })
                }));
            }
            self.report_to_ledger(placed.node);
        }
        self.report_node_cpu(placed.node);
    }

    /// Ends a pod.
    pub(super) fn end_pod(&mut self, pod: &Pod, placed: &PodPlacement) {
        self.change_free_capacity(pod, placed, u64::checked_add, |free, part| free + part);
        if pod.demand.gpus > 0 {
            self.ledger.remove_claim(&placed.pod);
            if let Some(allocations) = self.allocations.get_mut(placed.node) {
                allocations.retain(|allocation| allocation.pod != placed.pod);
            }
            self.report_to_ledger(placed.node);
        }
        self.report_node_cpu(placed.node);
    }

    fn change_free_capacity(
        &mut self,
        pod: &Pod,
        placed: &PodPlacement,
        amount: fn(u64, u64) -> Option<u64>,
        gpu: fn(u32, u32) -> u32,
    ) {
        let Some(host) = self.hosts.get_mut(placed.node) else { return };
        host.cpu = amount(host.cpu, pod.demand.cpu).unwrap_or_default();
        host.memory = amount(host.memory, pod.memory).unwrap_or_default();
        for device in &placed.devices {
            host.gpus.get_mut(*device).into_iter().for_each(|free| *free = gpu(*free, pod.demand.per_gpu));
        }
    }

    /// Passes a node's devices and allocations to the ledger, as the operator does when a `GpuNode`
    /// changes.
    fn report_to_ledger(&mut self, node: usize) {
        let (Some(host), Some(allocations)) = (self.hosts.get(node), self.allocations.get(node)) else { return };
        let device = |(index, free): (usize, &u32)| DeviceFacts {
            device: index.to_string(),
            resource: MPS_RESOURCE.to_owned(),
            capacity: THOUSANDTHS_PER_GPU,
            used: THOUSANDTHS_PER_GPU - free,
        };
        let devices = host.gpus.iter().enumerate().map(device).collect();
        self.ledger
            .observe(&host.name, NodeFacts { model: host.model.clone(), devices, allocations: allocations.clone() });
        self.report_node_cpu(node);
    }

    fn report_node_cpu(&mut self, node: usize) {
        if let Some(host) = self.hosts.get(node) {
            self.chooser.set_cpu(&host.name, NodeCpu { total: host.cpu_total, free: host.cpu });
        }
    }
}

/// Returns the requests of a pod, as the operator would read them from the pod's containers.
pub(super) fn device_requests(pod: &Pod) -> Vec<DeviceRequest> {
    let units = Units::new(pod.demand.per_gpu);
    let ask = units.map(|units| DeviceRequest { resource: MPS_RESOURCE.to_owned(), units });
    (0..pod.demand.gpus).filter_map(|_| ask.clone()).collect()
}

impl Host {
    /// Converts the host to the type that a score ranks.
    pub(super) fn node(&self) -> placement::Node {
        placement::Node { model: self.model.clone(), cpu_total: self.cpu_total, cpu: self.cpu, gpus: self.gpus.clone() }
    }
}
