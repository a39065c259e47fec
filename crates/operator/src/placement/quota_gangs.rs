//! Finds the gangs of one reconcile, over all pools.
//!
//! A gang is the pods that one reconcile releases together. Each pod records the gang when it is
//! released: the time, and the number of pods. Later pods replace missing pods of the gang, and do
//! not enlarge it.
//!
//! | pods | belong to |
//! |---|---|
//! | waiting pods with one gang name | one [`GangUnit`], all of which is released in one pool, or
//! nothing |
//! | released pods with one record | one gang, up to the recorded number of pods |
//! | released pods without a record | one gang, up to the number of pods that they state |
//! | components of the system | no gang |
//!
//! A pod that requests no GPU of Cleave only counts towards the size of its gang.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::names::is_served;
use cleave_api::placement::ReleasedGang;
use cleave_plan::ledger::Moment;
use cleave_plan::quota::{Gang, MAX_GANG_PODS, NEVER_EVICTED, Wait};

use super::claims::RESERVATION_TIME;
use super::gang_restarts::GangRestarts;
use super::nodes::{Nodes, ResourceProvider};
use super::pod_tracker::PodTracker;
use super::quota_times::{created, released};
use super::quota_waits::QuotaWait;
use crate::pods::{PodObject, full_name};

/// How long waiting pods of a gang wait for pods that are missing, in seconds after the newest of
/// them was created. A controller that restarts a gang creates all pods again within this time. The
/// operator does not watch ended pods, so it cannot count them.
const MISSING_PODS_TIME: u64 = 30;

/// The gangs of one reconcile.
#[derive(Debug, Default)]
pub(crate) struct Gangs {
    units: Vec<GangUnit>,
    /// Unit of each waiting pod, by the pod's name.
    unit_of: BTreeMap<String, usize>,
    released: Vec<ReleasedPods>,
    /// Released gang of each pod, by the pod's name.
    released_of: BTreeMap<String, usize>,
    /// When missing pods of a gang next count as ended.
    pub(super) next_end: Option<Moment>,
}

/// Where a pod is, or can be placed.
pub(super) struct Location {
    /// The pools in which an enforced quota counts the pod.
    pub(super) enforced: BTreeSet<usize>,
    /// Whether the pod can be evicted: it runs in a pool, or is in no pool.
    pub(super) is_running: bool,
}

/// The waiting pods of a gang that this reconcile can place.
#[derive(Debug)]
pub(super) struct GangUnit {
    /// Name of the gang in its namespace.
    name: String,
    /// Name of the gang in the worlds.
    world_name: String,
    pub(super) pods: BTreeSet<String>,
    /// A waiting pod of the gang that this reconcile cannot place: its earlier release is not yet
    /// known to be applied, its release is delayed, or an earlier pod of its name still uses units.
    absent: Option<String>,
    /// The largest size that a pod states.
    stated: Option<usize>,
    /// The number of pods without which none is released. 1 if no pod is missing.
    needed: usize,
    /// The released gang whose missing pods these pods replace.
    replaces: Option<usize>,
    /// When the gang in `replaces` was released, in seconds since the Unix epoch, if all of these
    /// pods existed then: they were to be released together with the others.
    unfinished_since: Option<u64>,
    /// Enforced pools in which all of these pods can be placed.
    pools: BTreeSet<usize>,
    /// Whether the pods may use GPUs that no enforced quota counts.
    pub(super) may_use_others: bool,
    /// The first pod that can be placed in an enforced pool.
    pub(super) head: Option<String>,
    /// Whether pods of the gang use or may use a pool with an enforced quota. Without one, gangs
    /// have no effect.
    is_enforced: bool,
}

/// The pods of a released gang.
#[derive(Debug)]
struct ReleasedPods {
    world_name: String,
    /// The recorded time of the release, in seconds since the Unix epoch. `None` without a record.
    since: Option<u64>,
    /// Maximum number of pods.
    size: usize,
    /// Number of pods that do not terminate.
    living: usize,
    pods: Vec<String>,
    /// Whether an enforced quota counts one of the pods.
    is_enforced: bool,
}

/// A released pod of a gang. Pods that do not terminate are first, then pods that were released
/// first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ReleasedPod {
    is_terminating: bool,
    since: Moment,
    name: String,
    /// The size of the gang: as recorded, or as the pod states it.
    size: Option<usize>,
    /// The recorded time of the release.
    recorded: Option<u64>,
}

/// All pods with one gang name.
#[derive(Debug, Default)]
struct NamedPods {
    /// Number of pods that exist, with or without GPUs.
    pods: usize,
    /// The largest size that a pod states which is not released.
    stated: Option<usize>,
    /// When the newest pod was created that waits at the gate, in seconds since the Unix epoch.
    newest: u64,
    /// Whether Kueue admits the pods.
    is_of_kueue: bool,
    /// Whether a pod with GPUs has a gate of another controller.
    has_other_gates: bool,
    /// Pods that wait at the gate, by name.
    waiting: BTreeSet<String>,
    /// How many pods with GPUs ran when the operator evicted the gang.
    evicted: Option<usize>,
    /// One of the pods whose release is decided but not yet reported by the watch.
    in_flight: Option<String>,
    released: Vec<ReleasedPod>,
}

impl NamedPods {
    /// Returns when missing pods count as ended, in seconds since the Unix epoch. Returns `None` if
    /// no pod is missing, or missing pods may still be created.
    fn missing_until(&self) -> Option<u64> {
        // Pods that had completed before an eviction are not created again.
        let are_evicted_back = self.evicted.is_some_and(|evicted| self.waiting.len() >= evicted);
        let is_running = || self.released.iter().any(|pod| !pod.is_terminating);
        let may_have_ended = self.is_of_kueue || are_evicted_back || is_running();
        let is_short = self.pods < self.size();
        (is_short && may_have_ended && !self.has_other_gates).then(|| self.newest.saturating_add(MISSING_PODS_TIME))
    }

    /// Returns the number of pods without which none of the waiting pods is released. A gang of
    /// which all pods exist somewhere misses none.
    fn needed(&self, now: u64) -> usize {
        let is_over = self.missing_until().is_some_and(|until| until <= now);
        if self.pods >= self.size() || is_over { 1 } else { self.size() }
    }

    fn size(&self) -> usize {
        self.stated.unwrap_or(1)
    }
}

impl Gangs {
    /// Finds the gangs. `candidates` are the names of the pods that this reconcile can place.
    /// `has_units` returns whether a pod has allocations or reservations. `is_leaving` returns
    /// whether the pod with this UID is evicted or about to be, and `is_in_flight` whether the
    /// release of a pod at the gate is decided.
    pub(super) fn new(
        (tracker, nodes): (&PodTracker, &Nodes),
        (candidates, has_units): (&BTreeSet<&str>, impl Fn(&str) -> bool),
        (is_leaving, is_in_flight, restarts): (
            &impl Fn(&str) -> bool,
            &impl Fn(&str, &PodObject) -> bool,
            &GangRestarts,
        ),
        now: u64,
    ) -> Self {
        let mut by_name: BTreeMap<(&str, &str), NamedPods> = BTreeMap::new();
        let mut served: BTreeMap<&str, bool> = BTreeMap::new();
        for pod in tracker.living_pods() {
            let Some(gang) = pod.gang.as_ref().filter(|_| pod.spec.priority.unwrap_or(0) < NEVER_EVICTED) else {
                continue;
            };
            let of = by_name.entry((pod.namespace(), gang.name.as_str())).or_default();
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            let is_terminating = pod.metadata.deletion_timestamp.is_some() || is_leaving(uid);
            let name = full_name(&pod.metadata);
            let has_left_gate = pod.has_left_gate();
            let is_in_flight = !has_left_gate && is_in_flight(&name, pod);
            let is_released = has_left_gate || is_in_flight;
            let mut resources = pod.spec.requests.keys().filter(|resource| is_served(resource));
            let needs_cleave = |resource: &str| nodes.provider(resource) != ResourceProvider::Another;
            let is_placed_here = is_released
                || resources.any(|resource| *served.entry(resource).or_insert_with(|| needs_cleave(resource)));
            if !has_left_gate && !is_terminating {
                of.stated = of.stated.max(gang.size);
            }
            of.is_of_kueue |= gang.is_of_kueue;
            if !pod.requests_gpus() || !is_placed_here {
                of.pods += usize::from(!is_terminating);
            } else if is_released && pod.node().is_none() && !is_in_flight && !has_units(&name) {
                // The pod uses no GPU, and may never be bound. Its gang can be evicted without it.
                of.pods += usize::from(!is_terminating);
            } else if is_released {
                of.pods += usize::from(!is_terminating);
                if is_in_flight {
                    of.in_flight.get_or_insert_with(|| name.clone());
                }
                let (since, recorded) = (released(pod), gang.released);
                of.released.push(ReleasedPod { is_terminating, since, name, size: gang.size, recorded });
            } else if pod.waits_at_gate() && !is_terminating {
                of.pods += 1;
                of.newest = of.newest.max(created(pod).0);
                of.waiting.insert(name);
            } else {
                of.has_other_gates |= !is_terminating;
            }
        }
        let mut gangs = Self::default();
        for ((namespace, name), mut pods) in by_name {
            pods.evicted = restarts.evicted_pods(namespace, name);
            let end = pods.missing_until().filter(|until| *until > now).map(Moment);
            gangs.next_end = gangs.next_end.into_iter().chain(end).min();
            gangs.add((namespace, name), pods, candidates, now);
        }
        gangs
    }

    /// Adds the pods with one gang name.
    fn add(&mut self, (namespace, name): (&str, &str), mut pods: NamedPods, candidates: &BTreeSet<&str>, now: u64) {
        let needed = pods.needed(now);
        let first = self.released.len();
        self.released.extend(group(&format!("{namespace}/{name}"), std::mem::take(&mut pods.released)));
        for (at, gang) in self.released.iter().enumerate().skip(first) {
            self.released_of.extend(gang.pods.iter().map(|pod| (pod.clone(), at)));
        }
        let (placed, others): (BTreeSet<String>, BTreeSet<String>) =
            pods.waiting.into_iter().partition(|pod| candidates.contains(pod.as_str()));
        if placed.is_empty() {
            return;
        }
        let count = placed.len() + others.len();
        let has_space = |gang: &ReleasedPods| {
            gang.since.is_some() && gang.living > 0 && gang.size.saturating_sub(gang.living) >= count
        };
        let replaces = (first..self.released.len()).find(|&at| has_space(&self.released[at]));
        let unfinished_since = replaces.and_then(|at| self.released[at].since).filter(|since| pods.newest <= *since);
        let world_name = match replaces {
            Some(at) => self.released[at].world_name.clone(),
            None => format!("{namespace}/{name}"),
        };
        let at = self.units.len();
        self.unit_of.extend(placed.iter().map(|pod| (pod.clone(), at)));
        self.units.push(GangUnit {
            name: name.to_owned(),
            world_name,
            pods: placed,
            absent: pods.in_flight.or_else(|| others.into_iter().next()),
            stated: pods.stated,
            needed,
            replaces,
            unfinished_since,
            pools: BTreeSet::new(),
            may_use_others: true,
            head: None,
            is_enforced: false,
        });
    }

    /// Records where the pods are, and where they can be placed. `location` returns this for a pod.
    pub(super) fn locate(&mut self, location: impl Fn(&str) -> Location) {
        let mut used: Vec<BTreeSet<Option<usize>>> = Vec::new();
        for gang in &mut self.released {
            let mut pools = BTreeSet::new();
            gang.pods.retain(|name| {
                let Location { enforced, is_running } = location(name);
                if enforced.is_empty() {
                    pools.insert(None);
                }
                pools.extend(enforced.into_iter().map(Some));
                is_running
            });
            gang.is_enforced = pools.iter().any(Option::is_some);
            used.push(pools);
        }
        for unit in &mut self.units {
            let mut pools: Option<BTreeSet<usize>> = None;
            for name in &unit.pods {
                let Location { enforced, .. } = location(name);
                if !enforced.is_empty() {
                    unit.head.get_or_insert_with(|| name.clone());
                }
                pools = Some(pools.map_or_else(|| enforced.clone(), |pools| &pools & &enforced));
            }
            unit.pools = pools.unwrap_or_default();
            unit.is_enforced = unit.head.is_some();
            if let Some(used) = unit.replaces.map(|at| &used[at]) {
                unit.may_use_others = used.contains(&None);
                unit.is_enforced |= used.iter().any(Option::is_some);
                unit.pools.retain(|pool| used.contains(&Some(*pool)));
            }
        }
    }

    /// Returns the gang of a pod for the worlds.
    pub(super) fn of(&self, pod: &str) -> Option<Gang> {
        if let Some(&at) = self.unit_of.get(pod) {
            let GangUnit { world_name, needed, .. } = &self.units[at];
            return Some(Gang { name: world_name.clone(), size: *needed });
        }
        let gang = &self.released[*self.released_of.get(pod)?];
        Some(Gang { name: gang.world_name.clone(), size: 1 })
    }

    /// Returns the unit of a waiting pod. Returns `None` if the pod has no gang, or if quotas do
    /// not apply to its gang.
    pub(super) fn unit(&self, pod: &str) -> Option<&GangUnit> {
        self.unit_of.get(pod).map(|at| &self.units[*at]).filter(|unit| unit.is_enforced)
    }

    /// Returns a number that the pods of a released pod's gang share, and these pods, in all pools
    /// and beside the pools. Returns `None` without a gang to which quotas apply.
    pub(super) fn mates(&self, pod: &str) -> Option<(usize, &[String])> {
        let at = *self.released_of.get(pod)?;
        self.released[at].is_enforced.then(|| (at, self.released[at].pods.as_slice()))
    }

    /// Returns what a pod records about its gang when this number of pods is released together.
    /// The record is the number of pods that are really released, not the number that they state.
    /// Otherwise a team could declare all of its borrowers one gang, one by one. Such a gang could
    /// never be evicted for a smaller pod of another team.
    pub(super) fn record(&self, pod: &str, count: usize, now: u64) -> Option<ReleasedGang> {
        let unit = &self.units[*self.unit_of.get(pod)?];
        let (size, since) = match unit.replaces.map(|at| &self.released[at]) {
            Some(gang) => (gang.size, gang.since),
            None => (unit.stated.map_or(count, |stated| stated.min(count)), Some(now)),
        };
        Some(ReleasedGang { name: unit.name.clone(), size: Some(size), since })
    }
}

impl GangUnit {
    /// Returns whether all of these pods can be placed in a pool, and may use it.
    pub(super) fn may_use(&self, pool: usize) -> bool {
        self.pools.contains(&pool)
    }

    /// Returns whether an earlier leader of the operator was about to release these pods when it
    /// released the others of their gang. `leads_since` is when this process became the leader, in
    /// seconds since the Unix epoch. After the time of a reservation, the pods wait like
    /// replacements.
    pub(super) fn is_unfinished_release(&self, leads_since: u64, now: Moment) -> bool {
        let is_recent = |since: u64| now.0 < since.saturating_add(RESERVATION_TIME.as_secs());
        self.unfinished_since.is_some_and(|since| since < leads_since && is_recent(since))
    }

    /// Returns why none of these pods can be released in any pool.
    pub(super) fn obstacle(&self) -> Option<QuotaWait> {
        let Self { name, absent, needed, pods, .. } = self;
        let largest = pods.len().max(*needed);
        if largest > MAX_GANG_PODS {
            let message = format!("the gang {name} has {largest} pods: a gang may have at most {MAX_GANG_PODS}");
            return Some(QuotaWait { wait: Wait::GangTooLarge, message });
        }
        if *needed > 1 {
            let message = format!("pods of the gang {name} are missing: none is released before {needed} pods exist");
            return Some(QuotaWait { wait: Wait::GangIncomplete, message });
        }
        let absent = absent.as_ref()?;
        let message = format!("the pod {absent} of the gang {name} cannot be released now: the others wait for it");
        Some(QuotaWait { wait: Wait::GangIncomplete, message })
    }

    /// Explains why these pods may not use a pool.
    pub(super) fn explain_pools(&self) -> QuotaWait {
        let name = &self.name;
        let message = if self.replaces.is_some() {
            format!("the other pods of the gang {name} use GPUs of another pool: all pods of a gang use one pool")
        } else {
            format!("the pods of the gang {name} request GPUs of different pools: no pool has all of them")
        };
        QuotaWait { wait: Wait::GangIncomplete, message }
    }
}

/// Groups the released pods with one gang name. A gang has no more pods than were released
/// together. Further pods belong to no gang.
fn group(name: &str, mut pods: Vec<ReleasedPod>) -> Vec<ReleasedPods> {
    pods.sort_unstable();
    let mut gangs: BTreeMap<Option<u64>, ReleasedPods> = BTreeMap::new();
    let mut rest: BTreeMap<Moment, ReleasedPods> = BTreeMap::new();
    let new = |world_name: String, since: Option<u64>| ReleasedPods {
        world_name: format!("{world_name} {name}"),
        since,
        size: 0,
        living: 0,
        pods: Vec::new(),
        is_enforced: false,
    };
    for pod in &pods {
        let since = pod.recorded;
        let name = || since.map_or_else(|| "unrecorded".to_owned(), |since| since.to_string());
        let gang = gangs.entry(since).or_insert_with(|| new(name(), since));
        gang.size = gang.size.max(pod.size.unwrap_or(0));
    }
    // The watch has not reported the records of some pods yet.
    pods.sort_by_key(|pod| pod.recorded.is_none());
    for pod in pods {
        let is_own = |gang: &&mut ReleasedPods| gang.pods.len() < gang.size;
        let gang = match pod.recorded {
            Some(_) => gangs.get_mut(&pod.recorded).filter(|gang| gang.pods.len() < gang.size),
            None if pod.size.is_none() => {
                let new = || ReleasedPods { size: usize::MAX, ..new(format!("since {}", pod.since.0), None) };
                Some(rest.entry(pod.since).or_insert_with(new))
            }
            None => gangs.values_mut().rev().find(is_own),
        };
        if let Some(gang) = gang {
            gang.living += usize::from(!pod.is_terminating);
            gang.pods.push(pod.name);
        }
    }
    gangs.into_values().chain(rest.into_values()).filter(|gang| !gang.pods.is_empty()).collect()
}
