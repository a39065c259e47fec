//! What free capacity is worth, given what pods typically ask for.
//!
//! The value of a node is what its GPUs' free parts can still hold ([`packing_values`]), less what
//! of them no CPU is left for, plus what its model is worth to pods that can run on few models. A
//! pod goes where the value falls least.
use std::collections::BTreeMap;

use super::demand::{Demand, Typical};
use super::{GPU, Node, Rank, Score, left};

/// How much more a whole GPU is worth when all that wait want whole ones.
const AWAITED: f64 = 0.4;

/// Steps that a GPU is divided into in the table of values.
const STEPS: usize = 100;

/// How much free GPU without CPU beside it costs. Between 0.3 and 3 the figure hardly matters.
const STRANDED: f64 = 2.0;

/// How much the scarcity of a model counts.
const MODEL: f64 = 0.8;

/// The most that one model's scarcity counts.
const MODEL_MOST: f64 = 1.5;

/// How much the fuller node is preferred where everything else is equal.
const COMPACT: f64 = 0.06;

/// How much nodes with much CPU for each GPU are spared, once CPU is scarce.
const SPARE_CPU: f64 = 0.05;

/// CPU wanted ÷ CPU there is from which CPU counts as scarce.
const CPU_SCARCE: f64 = 0.93;

/// CPU for each GPU that is not thought of as much, thousandths of a core.
const USUAL_CPU_PER_GPU: f64 = 12_000.0;

/// What free capacity is worth.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Worth of a GPU with that many hundredths free; a whole one is 1.
    packing: Vec<f64>,
    /// Thousandths of a core that a pod wants for each thousandth of a GPU.
    cpu_per_gpu: f64,
    /// Demand for a model by the pods that name it, over what there is.
    models: BTreeMap<String, f64>,
    /// How much nodes with much CPU are spared: 0 where CPU is plenty.
    spare_cpu: f64,
    /// What a whole GPU is worth above its packing.
    whole: f64,
}

#[allow(clippy::cast_precision_loss, reason = "thousandths of cores and GPUs are far below 2^52")]
const fn float(number: u64) -> f64 {
    number as f64
}

impl Value {
    /// Learns from what is typical (with models kept apart) and what there is.
    pub fn learn(typical: &[Typical], nodes: &[Node]) -> Self {
        let gpu_wanted: f64 = typical.iter().map(|kind| kind.weight * kind.total()).sum();
        let cpu_beside: f64 =
            typical.iter().filter(|kind| kind.gpus > 0).map(|kind| kind.weight * float(kind.cpu)).sum();
        let cpu_wanted: f64 = typical.iter().map(|kind| kind.weight * float(kind.cpu)).sum();
        let cpu_there: f64 = nodes.iter().map(|node| float(node.cpu_total)).sum();
        let mut gpus_of: BTreeMap<&str, f64> = BTreeMap::new();
        for node in nodes {
            *gpus_of.entry(&node.model).or_default() += float(node.gpus.len() as u64);
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
        models.values_mut().for_each(|price: &mut f64| *price = price.min(MODEL_MOST));
        let scarcity = (cpu_wanted / gpu_wanted) / (cpu_there / (gpus_there * f64::from(GPU)));
        Self {
            packing: packing_values(&shared(typical)),
            cpu_per_gpu: cpu_beside / gpu_wanted,
            models,
            spare_cpu: SPARE_CPU * (10.0 * (scarcity - CPU_SCARCE)).clamp(0.0, 1.0),
            whole: 0.0,
        }
    }

    /// Takes account of the pods that wait: holes that nobody waits for are filled before a whole
    /// GPU is opened that others wait for.
    ///
    /// Without departures this never matters; with them, pods that share would else keep GPUs from
    /// ever becoming whole again.
    #[must_use]
    pub fn awaited<'a>(mut self, waiting: impl Iterator<Item = &'a Demand>) -> Self {
        let (mut whole, mut all) = (0u64, 0u64);
        for demand in waiting {
            all += u64::from(demand.total());
            whole += if demand.per_gpu == GPU { u64::from(demand.total()) } else { 0 };
        }
        self.whole = if all > 0 { AWAITED * float(whole) / float(all) } else { 0.0 };
        self
    }

    /// Worth of one GPU with that many thousandths free.
    fn gpu(&self, free: u32) -> f64 {
        self.packing.get(free as usize * STEPS / GPU as usize).copied().unwrap_or(1.0)
            + if free >= GPU { self.whole } else { 0.0 }
    }

    /// Worth of free CPU and GPU together, apart from what each GPU can hold.
    fn beside(&self, model: f64, cpu: f64, free: f64) -> f64 {
        let stranded = if self.cpu_per_gpu > 0.0 { (free - cpu / self.cpu_per_gpu).max(0.0) } else { 0.0 };
        (MODEL * model * free - STRANDED * stranded) / f64::from(GPU)
    }
}

/// What is kept of a node between questions.
#[derive(Debug, Clone, PartialEq)]
pub struct Before {
    free: f64,
    beside: f64,
    model: f64,
    cpu_rich: f64,
}

impl Score for Value {
    type Before = Before;

    fn before(&self, node: &Node) -> Before {
        let free = f64::from(node.free());
        let model = self.models.get(&node.model).copied().unwrap_or(0.0);
        let gpus = float(node.gpus.len().max(1) as u64);
        Before {
            free,
            beside: self.beside(model, float(node.cpu), free),
            model,
            cpu_rich: (float(node.cpu_total) / (USUAL_CPU_PER_GPU * gpus) - 1.0).min(4.0),
        }
    }

    fn rank(&self, node: &Node, before: &Before, demand: &Demand, way: Option<usize>) -> Rank {
        let cpu = float(node.cpu.saturating_sub(demand.cpu));
        let free = before.free - f64::from(demand.total());
        let lost = match way {
            Some(device) => {
                let now = node.gpus.get(device).copied().unwrap_or(0);
                self.gpu(now) - self.gpu(now.saturating_sub(demand.per_gpu))
            }
            // Several GPUs are whole ones.
            None => f64::from(demand.gpus) * (self.gpu(demand.per_gpu)),
        };
        let compact = cpu / 128_000.0 + free / 8_000.0;
        let spared = if demand.gpus == 1 { self.spare_cpu * before.cpu_rich } else { 0.0 };
        let score = self.beside(before.model, cpu, free) - before.beside - lost - COMPACT * compact - spared;
        Rank { score, spread: 0.0, left: left(node, demand, way) }
    }
}

/// Sizes (hundredths, rounded up) and weights of the typical pods that share one GPU.
fn shared(typical: &[Typical]) -> Vec<(usize, f64)> {
    let mut sizes: BTreeMap<u32, f64> = BTreeMap::new();
    for kind in typical.iter().filter(|kind| kind.gpus == 1 && kind.per_gpu > 0 && kind.per_gpu < GPU) {
        *sizes.entry(kind.per_gpu).or_default() += kind.weight;
    }
    sizes.into_iter().map(|(per_gpu, weight)| ((per_gpu as usize * STEPS).div_ceil(GPU as usize), weight)).collect()
}

/// What a GPU with x hundredths free is worth, for each x: the dual prices of the cutting-stock
/// problem «the fewest GPUs that hold all shared pods», packed into x.
///
/// So a hole that nothing typical fits is worth nothing, and a size that tiles a GPU is worth its
/// part. The linear program is solved by multiplicative weights, which is as good here as exact
/// duals and needs no solver.
fn packing_values(items: &[(usize, f64)]) -> Vec<f64> {
    const ROUNDS: usize = 4000;
    const WARM_UP: usize = 1000;
    const STEP: f64 = 0.02;
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
        let (worth, pattern) = knapsack(items, &prices);
        let whole = worth.last().copied().unwrap_or(0.0);
        if whole <= 0.0 {
            break;
        }
        if round >= WARM_UP {
            average.iter_mut().zip(&prices).for_each(|(sum, price)| *sum += price / whole);
        }
        let greatest = pattern.iter().zip(items).map(|(&count, &(_, weight))| count / weight).fold(0.0, f64::max);
        for ((cover, count), &(_, weight)) in covered.iter_mut().zip(&pattern).zip(items) {
            *cover += STEP / greatest * count / weight;
        }
    }
    let (mut worth, _) = knapsack(items, &average);
    match worth.last().copied() {
        Some(whole) if whole > 0.0 => worth.iter_mut().for_each(|value| *value /= whole),
        // Nobody shares: only a whole GPU is worth anything.
        _ => {
            worth = vec![0.0; STEPS + 1];
            if let Some(whole) = worth.last_mut() {
                *whole = 1.0;
            }
        }
    }
    worth
}

/// The most worth that fits into each number of steps, and how many of each item make up the most
/// for the whole.
fn knapsack(items: &[(usize, f64)], prices: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let mut worth = vec![0.0f64; STEPS + 1];
    let mut chosen: Vec<Option<usize>> = vec![None; STEPS + 1];
    for room in 1..=STEPS {
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
    let mut room = STEPS;
    while room > 0 {
        let item = chosen.get(room).copied().flatten();
        let step = item.and_then(|item| {
            *pattern.get_mut(item)? += 1.0;
            items.get(item).map(|&(size, _)| size)
        });
        // A step without gain is a hundredth left empty.
        room = room.saturating_sub(step.unwrap_or(1).max(1));
    }
    (worth, pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(per_gpu: u32, weight: f64) -> Typical {
        Typical { cpu: 1000, gpus: 1, per_gpu, models: Vec::new(), weight }
    }

    #[test]
    fn sizes_that_tile_a_gpu_are_worth_their_part() {
        let worth = packing_values(&shared(&[kind(470, 0.5), kind(230, 0.5)]));
        assert!((worth[100] - 1.0).abs() < 1e-9);
        assert!((worth[47] - 0.5).abs() < 0.03, "{}", worth[47]);
        assert!((worth[23] - 0.25).abs() < 0.03, "{}", worth[23]);
        assert!(worth[22].abs() < 1e-9, "nothing fits into 22 hundredths");
    }

    #[test]
    fn the_hole_beside_a_large_pod_is_worth_nothing() {
        let worth = packing_values(&shared(&[kind(810, 0.6), kind(320, 0.4)]));
        assert!(worth[19].abs() < 1e-9 && (worth[81] - 1.0).abs() < 0.03, "{} {}", worth[19], worth[81]);
    }

    #[test]
    fn without_sharing_only_whole_gpus_are_worth_something() {
        let worth = packing_values(&[]);
        assert!(worth[99].abs() < 1e-9 && (worth[100] - 1.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_learned_is_no_division_by_zero() {
        let node = Node { model: "T4".into(), cpu_total: 0, cpu: 0, memory: 0, gpus: vec![GPU] };
        let value = Value::learn(&[], std::slice::from_ref(&node));
        let demand = Demand { cpu: 0, memory: 0, gpus: 1, per_gpu: 500, models: Vec::new() };
        assert!(value.rank(&node, &value.before(&node), &demand, Some(0)).score.is_finite());
    }
}
