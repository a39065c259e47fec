//! Simulates a cluster in which pods end and typical requests change. Policies learn typical
//! demands from arrivals, and receive no list of pods in advance.
use std::collections::{BTreeMap, VecDeque};

use anyhow::{Result, ensure};
use cleave_plan::placement::ObservedDemands;
use serde_json::json;

use super::chooser::{PlacementPolicy, Policy};
use super::cluster::{Cluster, PodPlacement};
use super::figures::{percentile, ratio};
use super::lists::Pod;
use super::random::Rng;

/// Number of arrivals in a run.
const ARRIVALS: usize = 200_000;
/// Maximum lifetime, in seconds. A few pods of the trace run for months. A simulation with these
/// pods never reaches a steady state.
const MAX_LIFETIME_SECONDS: f64 = 6.0 * 3600.0;
/// Mean GPU demand relative to the capacity.
const OFFERED_LOAD_PER_CAPACITY: f64 = 1.05;
/// Number of later arrivals that halve the weight of an arrival.
const HALF_LIFE_ARRIVALS: f64 = 4_000.0;
/// Number of arrivals between updates of the typical demands.
const RELEARN_INTERVAL_ARRIVALS: usize = 500;
/// Number of arrivals that fill the cluster before the measurement of the allocation starts.
const WARM_UP_ARRIVALS: usize = ARRIVALS / 3;
/// Maximum number of waiting pods considered when a pod ends. The pods that have waited longest are
/// considered.
const MAX_WAITING_PODS_CONSIDERED: usize = 64;

/// Converts seconds since the start to whole milliseconds, which can be the key of a map.
fn to_whole_milliseconds(seconds: f64) -> u64 {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a run lasts far less than 2^53 ms")]
    let milliseconds = (seconds.max(0.0) * 1000.0) as u64;
    milliseconds
}

/// Runs a policy on arrivals and departures, and prints its figures as JSON.
pub(super) fn run<P: PlacementPolicy>(policy: Policy, seed: u64, mut cluster: Cluster<P>, pods: &[Pod]) -> Result<()> {
    let pods: Vec<(&Pod, f64)> = pods
        .iter()
        .filter_map(|pod| pod.lifetime.filter(|&life| life > 0.0).map(|life| (pod, life.min(MAX_LIFETIME_SECONDS))))
        .collect();
    ensure!(!pods.is_empty(), "the list has no creation and deletion times");
    let capacity: u64 = cluster.hosts().iter().map(|host| u64::from(host.free_gpu_thousandths())).sum();
    // By Little's law, this rate of arrivals per second causes a mean demand of
    // `OFFERED_LOAD_PER_CAPACITY` times the capacity.
    let work: f64 = pods.iter().map(|(pod, life)| f64::from(pod.demand.total()) * life).sum::<f64>()
        / f64::from(u32::try_from(pods.len())?);
    let rate = OFFERED_LOAD_PER_CAPACITY * ratio(capacity, 1) / work;
    let mut rng = Rng(seed);
    let mut seen = ObservedDemands::new(Some(HALF_LIFE_ARRIVALS));
    let mut departures: BTreeMap<(u64, usize), (&Pod, PodPlacement)> = BTreeMap::new();
    let mut waiting: VecDeque<(f64, &Pod, f64)> = VecDeque::new();
    let (mut now, mut allocated) = (0.0f64, 0u64);
    let (mut area, mut counted_from, mut last) = (0.0f64, 0.0f64, 0.0f64);
    let mut waits = Vec::new();
    let mut placed = 0usize;
    for arrival in 0..ARRIVALS {
        now += -(1.0 - rng.next_fraction()).max(1e-12).ln() / rate;
        if arrival == WARM_UP_ARRIVALS {
            (area, counted_from, last) = (0.0, now, now);
        }
        while let Some(entry) = departures.first_entry().filter(|entry| entry.key().0 <= to_whole_milliseconds(now)) {
            #[allow(clippy::cast_precision_loss, reason = "milliseconds of a run are far below 2^52")]
            let time = entry.key().0 as f64 / 1000.0;
            let (pod, placed_at) = entry.remove();
            area += ratio(allocated, capacity) * (time - last).max(0.0);
            last = last.max(time);
            allocated -= u64::from(pod.demand.total());
            cluster.end_pod(pod, &placed_at);
            let mut position = 0;
            while position < waiting.len().min(MAX_WAITING_PODS_CONSIDERED) {
                let (since, pod, life) = waiting[position];
                let Some(placed_at) = P::place_pod(&mut cluster, pod) else {
                    position += 1;
                    continue;
                };
                waiting.remove(position);
                cluster.start_pod(pod, &placed_at);
                allocated += u64::from(pod.demand.total());
                waits.push(time - since);
                placed += 1;
                departures.insert((to_whole_milliseconds(time + life), placed), (pod, placed_at));
            }
        }
        area += ratio(allocated, capacity) * (now - last).max(0.0);
        last = last.max(now);
        let (pod, life) = draw_pod(&pods, arrival, &mut rng);
        seen.add(&pod.demand);
        P::count_arrived_pod(&mut cluster, pod);
        if arrival % RELEARN_INTERVAL_ARRIVALS == RELEARN_INTERVAL_ARRIVALS - 1 {
            let waiting: Vec<&Pod> = waiting.iter().map(|(_, pod, _)| *pod).collect();
            P::update_score(&mut cluster, &seen, &waiting);
        }
        match P::place_pod(&mut cluster, pod) {
            Some(placed_at) => {
                cluster.start_pod(pod, &placed_at);
                allocated += u64::from(pod.demand.total());
                waits.push(0.0);
                placed += 1;
                departures.insert((to_whole_milliseconds(now + life), placed), (pod, placed_at));
            }
            None => waiting.push_back((now, pod, life)),
        }
    }
    let unserved = waiting.len();
    waits.extend(waiting.iter().map(|(since, ..)| now - since));
    let mean = waits.iter().sum::<f64>() / f64::from(u32::try_from(waits.len().max(1))?);
    waits.sort_by(f64::total_cmp);
    let result = json!({
        "policy": policy.name(), "seed": seed, "arrivals": ARRIVALS, "load": OFFERED_LOAD_PER_CAPACITY,
        "allocation_mean": area / (now - counted_from), "wait_s_mean": mean, "wait_s_p90": percentile(&waits, 90),
        "wait_s_p99": percentile(&waits, 99), "still_waiting": unserved,
    });
    println!("{result}");
    Ok(())
}

/// Draws a pod at random. Among pods that share a GPU, large requests become more frequent during
/// the run.
fn draw_pod<'a>(pods: &[(&'a Pod, f64)], arrival: usize, rng: &mut Rng) -> (&'a Pod, f64) {
    let progress =
        f64::from(u32::try_from(arrival).unwrap_or(u32::MAX)) / f64::from(u32::try_from(ARRIVALS).unwrap_or(1));
    loop {
        let pod = pods[rng.next_below(pods.len())];
        let shares = pod.0.demand.gpus == 1 && pod.0.demand.per_gpu < 1000;
        let keep = match (shares, pod.0.demand.per_gpu > 500) {
            (false, _) => 1.0,
            (true, true) => 0.3 + 0.7 * progress,
            (true, false) => 1.0 - 0.7 * progress,
        };
        if rng.next_fraction() < keep {
            return pod;
        }
    }
}
