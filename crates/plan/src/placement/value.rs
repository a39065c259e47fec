//! Computes the value of free capacity, given typical requests of pods.
//!
//! The value of a node has three parts. The free part of each GPU has the value of the requests
//! that still fit ([`packing_values`]). If a node has too little free CPU, the value excludes the
//! GPU capacity that pods cannot use. The node's model adds value for pods that can run on few
//! models. A pod is placed where it reduces the value of the nodes least.
use std::collections::BTreeMap;

use super::demand::{Demand, TypicalPod};
use super::{Node, Rank, Score, THOUSANDTHS_PER_GPU, remaining_thousandths};

/// Additional value of a whole GPU if all pending pods request whole GPUs.
const WHOLE_GPU_BONUS: f64 = 0.4;

/// Number of steps into which the table of values divides a GPU.
const STEPS_PER_GPU: usize = 100;

/// Cost of free GPU capacity that lacks free CPU on the node. Values between 0.3 and 3 make little
/// difference.
const STRANDED_GPU_COST: f64 = 2.0;

/// Weight of a model's scarcity.
const MODEL_SCARCITY_WEIGHT: f64 = 0.8;

/// Maximum scarcity of one model.
const MAX_MODEL_SCARCITY: f64 = 1.5;

/// Number of steps into which the loss of one GPU's value is divided.
const LOSS_STEPS: f64 = 1_048_576.0;
/// Weight of the preference for fuller nodes.
const FULLER_NODE_BONUS: f64 = 0.06;

/// Weight of the penalty for a node with much CPU per GPU. Applies only if CPU is scarce.
const SPARE_CPU_PENALTY: f64 = 0.05;

/// CPU counts as scarce if requested CPU per GPU divided by available CPU per GPU exceeds this
/// ratio.
const SCARCE_CPU_RATIO: f64 = 0.93;

/// Part of the GPU capacity that must be in use before the use of CPU determines how scarce CPU is.
const MIN_USED_GPU_PART: f64 = 0.02;

/// CPU per GPU above which a node counts as having much CPU, in thousandths of a core.
const USUAL_CPU_PER_GPU: f64 = 12_000.0;

/// The value of free capacity.
#[derive(Debug, Clone, PartialEq)]
pub struct CapacityValue {
    /// Value of a GPU by its free hundredths. An entirely free GPU has the value 1.
    packing: Vec<f64>,
    /// Thousandths of a core that pods with GPUs request per thousandth of a GPU.
    cpu_per_gpu: f64,
    /// Demand for each model by the pods that name it, relative to the supply of the model.
    models: BTreeMap<String, f64>,
    /// Penalty for a node with much CPU per GPU. 0 if CPU is not scarce.
    spare_cpu: f64,
    /// Additional value of a whole GPU.
    whole: f64,
}

#[allow(clippy::cast_precision_loss, reason = "thousandths of cores and GPUs are far below 2^52")]
const fn to_f64(number: u64) -> f64 {
    number as f64
}

impl CapacityValue {
    /// Learns from typical pods, with the models that they can run on, and from the nodes of the
    /// cluster.
    pub fn learn(typical: &[TypicalPod], nodes: &[Node]) -> Self {
        let gpu_wanted: f64 = typical.iter().map(|kind| kind.weight * kind.total()).sum();
        let cpu_beside: f64 =
            typical.iter().filter(|kind| kind.gpus > 0).map(|kind| kind.weight * to_f64(kind.cpu)).sum();
        let cpu_wanted: f64 = typical.iter().map(|kind| kind.weight * to_f64(kind.cpu)).sum();
        let cpu_there: f64 = nodes.iter().map(|node| to_f64(node.cpu_total)).sum();
        let mut gpus_of: BTreeMap<&str, f64> = BTreeMap::new();
        for node in nodes {
            *gpus_of.entry(&node.model).or_default() += to_f64(node.gpus.len() as u64);
        }
        let gpus_there: f64 = gpus_of.values().sum();
        if gpu_wanted <= 0.0 || gpus_there <= 0.0 {
            return Self {
                packing: packing_values(&[]),
                cpu_per_gpu: 0.0,
                models: BTreeMap::new(),
                spare_cpu: 0.0,
                whole: 0.0,
            };
        }
        let mut models = BTreeMap::new();
        for kind in typical.iter().filter(|kind| !kind.models.is_empty()) {
            let able: f64 = kind.models.iter().filter_map(|model| gpus_of.get(model.as_str())).sum();
            if able > 0.0 {
                for model in &kind.models {
                    *models.entry(model.clone()).or_insert(0.0) +=
                        kind.weight * kind.total() / able * gpus_there / gpu_wanted;
                }
            }
        }
        models.values_mut().for_each(|price: &mut f64| *price = price.min(MAX_MODEL_SCARCITY));
        let cpu_per_gpu_wanted = (cpu_wanted / gpu_wanted).max(used_cpu_per_gpu(nodes));
        let cpu_per_gpu_there = cpu_there / (gpus_there * f64::from(THOUSANDTHS_PER_GPU));
        let scarcity = if cpu_per_gpu_there > 0.0 { cpu_per_gpu_wanted / cpu_per_gpu_there } else { 0.0 };
        Self {
            packing: packing_values(&shared_sizes(typical)),
            cpu_per_gpu: cpu_beside / gpu_wanted,
            models,
            spare_cpu: SPARE_CPU_PENALTY * (10.0 * (scarcity - SCARCE_CPU_RATIO)).clamp(0.0, 1.0),
            whole: 0.0,
        }
    }

    /// Adapts the value to pending pods. The adapted score places pods on free parts that no
    /// pending pod needs, rather than on whole GPUs that pending pods wait for.
    ///
    /// The adaptation helps only if pods terminate. Without the adaptation, new pods that share
    /// GPUs could prevent GPUs from becoming entirely free again.
    #[must_use]
    pub fn with_pending<'a>(mut self, waiting: impl Iterator<Item = &'a Demand>) -> Self {
        let (mut whole, mut all) = (0u64, 0u64);
        for demand in waiting {
            all += u64::from(demand.total());
            whole += if demand.per_gpu == THOUSANDTHS_PER_GPU { u64::from(demand.total()) } else { 0 };
        }
        self.whole = if all > 0 { WHOLE_GPU_BONUS * to_f64(whole) / to_f64(all) } else { 0.0 };
        self
    }

    /// Returns the value of one GPU by its free thousandths.
    fn gpu_value(&self, free: u32) -> f64 {
        self.packing.get(free as usize * STEPS_PER_GPU / THOUSANDTHS_PER_GPU as usize).copied().unwrap_or(1.0)
            + if free >= THOUSANDTHS_PER_GPU { self.whole } else { 0.0 }
    }

    /// Returns the value of a node's free CPU and GPU capacity together, without the values of
    /// single GPUs.
    fn node_value(&self, model: f64, cpu: f64, free: f64) -> f64 {
        let stranded = if self.cpu_per_gpu > 0.0 { (free - cpu / self.cpu_per_gpu).max(0.0) } else { 0.0 };
        (MODEL_SCARCITY_WEIGHT * model * free - STRANDED_GPU_COST * stranded) / f64::from(THOUSANDTHS_PER_GPU)
    }
}

/// Values computed once for a node.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeValues {
    free: f64,
    node_value: f64,
    model: f64,
    cpu_rich: f64,
}

impl Score for CapacityValue {
    type NodeValues = NodeValues;

    fn precompute(&self, node: &Node) -> NodeValues {
        let free = f64::from(node.free());
        let model = self.models.get(&node.model).copied().unwrap_or(0.0);
        let gpus = to_f64(node.gpus.len().max(1) as u64);
        NodeValues {
            free,
            node_value: self.node_value(model, to_f64(node.cpu), free),
            model,
            cpu_rich: (to_f64(node.cpu_total) / (USUAL_CPU_PER_GPU * gpus) - 1.0).min(4.0),
        }
    }

    fn rank(&self, node: &Node, before: &NodeValues, demand: &Demand, way: Option<usize>) -> Rank {
        let cpu = to_f64(node.cpu.saturating_sub(demand.cpu));
        let free = before.free - f64::from(demand.total());
        let lost = match way {
            Some(device) => {
                let now = node.gpus.get(device).copied().unwrap_or(0);
                self.gpu_value(now) - self.gpu_value(now.saturating_sub(demand.per_gpu))
            }
            // A pod with several GPUs uses whole GPUs.
            None => f64::from(demand.gpus) * (self.gpu_value(demand.per_gpu)),
        };
        // Equal losses may differ in their last bits, because they are sums of the same values in
        // another order. Without the rounding, these bits would decide instead of the next
        // criterion.
        let lost = (lost * LOSS_STEPS).round() / LOSS_STEPS;
        let compact = cpu / 128_000.0 + free / 8_000.0;
        let spared = if demand.gpus == 1 { self.spare_cpu * before.cpu_rich } else { 0.0 };
        let score =
            self.node_value(before.model, cpu, free) - before.node_value - lost - FULLER_NODE_BONUS * compact - spared;
        Rank { score, spread: 0.0, left: remaining_thousandths(node, demand, way) }
    }
}

/// Returns the thousandths of a core that are used on the nodes for each used thousandth of a GPU.
/// The number includes pods without GPUs, which the typical pods may not include. The result is 0
/// while less than [`MIN_USED_GPU_PART`] of the GPU capacity is used.
fn used_cpu_per_gpu(nodes: &[Node]) -> f64 {
    let free = |node: &Node| node.gpus.iter().map(|free| free.min(&THOUSANDTHS_PER_GPU)).sum::<u32>();
    let all: f64 = nodes.iter().map(|node| to_f64(node.gpus.len() as u64) * f64::from(THOUSANDTHS_PER_GPU)).sum();
    let used: f64 = all - nodes.iter().map(|node| f64::from(free(node))).sum::<f64>();
    let cpu: f64 = nodes.iter().map(|node| to_f64(node.cpu_total.saturating_sub(node.cpu))).sum();
    if used > MIN_USED_GPU_PART * all { cpu / used } else { 0.0 }
}

/// Returns the sizes, in hundredths rounded up, and the weights of the typical pods that share one
/// GPU.
fn shared_sizes(typical: &[TypicalPod]) -> Vec<(usize, f64)> {
    let mut sizes: BTreeMap<usize, f64> = BTreeMap::new();
    for kind in typical.iter().filter(|kind| kind.gpus == 1 && kind.per_gpu > 0 && kind.per_gpu < THOUSANDTHS_PER_GPU) {
        *sizes.entry((kind.per_gpu as usize * STEPS_PER_GPU).div_ceil(THOUSANDTHS_PER_GPU as usize)).or_default() +=
            kind.weight;
    }
    sizes.into_iter().collect()
}

/// Returns the value of a GPU with x hundredths free, for each x. The value is the highest sum of
/// prices of sizes that fit into x. Prices are dual prices of a cutting-stock problem: fit all
/// shared pods on the fewest GPUs. A free part in which no typical pod fits has no value. A size
/// that tiles a GPU is worth its part of the GPU. The method of multiplicative weights approximates
/// the solution of the linear program, and needs no solver.
fn packing_values(items: &[(usize, f64)]) -> Vec<f64> {
    const ROUNDS: usize = 4000;
    const WARM_UP_ROUNDS: usize = 1000;
    const STEP_SIZE: f64 = 0.02;
    const SHARPNESS: f64 = 0.1;
    let mut covered = vec![0.0f64; items.len()];
    let mut average = vec![0.0; items.len()];
    for round in 0..ROUNDS {
        let least = covered.iter().copied().fold(f64::INFINITY, f64::min);
        let prices: Vec<f64> = items
            .iter()
            .zip(&covered)
            .map(|(&(_, weight), cover)| (-(cover - least) / SHARPNESS).exp() / weight)
            .collect();
        let (worth, pattern) = solve_knapsack(items, &prices);
        let whole = worth.last().copied().unwrap_or(0.0);
        if whole <= 0.0 {
            break;
        }
        if round >= WARM_UP_ROUNDS {
            average.iter_mut().zip(&prices).for_each(|(sum, price)| *sum += price / whole);
        }
        let greatest = pattern.iter().zip(items).map(|(&count, &(_, weight))| count / weight).fold(0.0, f64::max);
        for ((cover, count), &(_, weight)) in covered.iter_mut().zip(&pattern).zip(items) {
            *cover += STEP_SIZE / greatest * count / weight;
        }
    }
    let (mut worth, _) = solve_knapsack(items, &average);
    match worth.last().copied() {
        Some(whole) if whole > 0.0 => worth.iter_mut().for_each(|value| *value /= whole),
        // No typical pod shares a GPU: only a whole GPU has a value.
        _ => {
            worth = vec![0.0; STEPS_PER_GPU + 1];
            if let Some(whole) = worth.last_mut() {
                *whole = 1.0;
            }
        }
    }
    worth
}

/// Returns the highest value that fits into each number of steps, and the number of each item in
/// the best packing of a whole GPU.
fn solve_knapsack(items: &[(usize, f64)], prices: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let mut worth = vec![0.0f64; STEPS_PER_GPU + 1];
    let mut chosen: Vec<Option<usize>> = vec![None; STEPS_PER_GPU + 1];
    for room in 1..=STEPS_PER_GPU {
        let (mut most, mut by) = (worth.get(room - 1).copied().unwrap_or(0.0), None);
        for (item, (&(size, _), price)) in items.iter().zip(prices).enumerate() {
            let Some(rest) = room.checked_sub(size) else { continue };
            let total = worth.get(rest).copied().unwrap_or(0.0) + price;
            if total > most {
                (most, by) = (total, Some(item));
            }
        }
        if let (Some(value), Some(choice)) = (worth.get_mut(room), chosen.get_mut(room)) {
            (*value, *choice) = (most, by);
        }
    }
    let mut pattern = vec![0.0; items.len()];
    let mut room = STEPS_PER_GPU;
    while room > 0 {
        let item = chosen.get(room).copied().flatten();
        let step = item.and_then(|item| {
            *pattern.get_mut(item)? += 1.0;
            items.get(item).map(|&(size, _)| size)
        });
        // A step without gain is an unused hundredth.
        room = room.saturating_sub(step.unwrap_or(1).max(1));
    }
    (worth, pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typical_pod(per_gpu: u32, weight: f64) -> TypicalPod {
        TypicalPod { cpu: 1000, gpus: 1, per_gpu, models: Vec::new(), weight }
    }

    #[test]
    fn sizes_that_fill_a_gpu_have_the_value_of_their_part_of_the_gpu() {
        let worth = packing_values(&shared_sizes(&[typical_pod(470, 0.5), typical_pod(230, 0.5)]));
        assert!((worth[100] - 1.0).abs() < 1e-9);
        assert!((worth[47] - 0.5).abs() < 0.03, "{}", worth[47]);
        assert!((worth[23] - 0.25).abs() < 0.03, "{}", worth[23]);
        assert!(worth[22].abs() < 1e-9, "nothing fits into 22 hundredths");
    }

    #[test]
    fn free_units_that_fit_no_typical_pod_have_no_value() {
        let worth = packing_values(&shared_sizes(&[typical_pod(810, 0.6), typical_pod(320, 0.4)]));
        assert!(worth[19].abs() < 1e-9 && (worth[81] - 1.0).abs() < 0.03, "{} {}", worth[19], worth[81]);
    }

    #[test]
    fn without_sharing_only_whole_gpus_have_a_value() {
        let worth = packing_values(&[]);
        assert!(worth[99].abs() < 1e-9 && (worth[100] - 1.0).abs() < 1e-9);
    }

    #[test]
    fn cpu_that_pods_without_gpus_use_makes_cpu_scarce() {
        let node = |cpu| Node { model: "T4".into(), cpu_total: 20_000, cpu, gpus: vec![500, 500] };
        let spare_cpu = |cpu| CapacityValue::learn(&[typical_pod(500, 1.0)], &[node(cpu)]).spare_cpu;
        assert!(spare_cpu(18_000).abs() < 1e-9, "the nodes' CPU suffices for pods with GPUs");
        assert!(spare_cpu(6_000) > 0.0, "other pods use much CPU");
    }

    #[test]
    fn the_exact_fit_is_preferred_among_equal_losses() {
        let node = Node { model: "T4".into(), cpu_total: 0, cpu: 0, gpus: vec![1000, 500] };
        let demand = Demand { cpu: 0, gpus: 1, per_gpu: 500, models: Vec::new() };
        for size in [10, 20, 50, 100, 125, 250, 500] {
            let value = CapacityValue::learn(&[typical_pod(size, 1.0)], std::slice::from_ref(&node));
            let before = value.precompute(&node);
            let [empty, exact] = [0, 1].map(|device| value.rank(&node, &before, &demand, Some(device)));
            assert!(exact.score >= empty.score, "typical size {size}: {} and {}", exact.score, empty.score);
        }
    }

    #[test]
    fn learning_from_nothing_does_not_divide_by_zero() {
        let node = Node { model: "T4".into(), cpu_total: 0, cpu: 0, gpus: vec![THOUSANDTHS_PER_GPU] };
        let value = CapacityValue::learn(&[], std::slice::from_ref(&node));
        let demand = Demand { cpu: 0, gpus: 1, per_gpu: 500, models: Vec::new() };
        assert!(value.rank(&node, &value.precompute(&node), &demand, Some(0)).score.is_finite());
    }
}
