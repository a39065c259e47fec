//! Runs passes over a pool until nothing changes.
//!
//! Between two passes, released pods start, and evicted pods exit. A waiting pod of the same name
//! replaces each evicted pod at once, as the pods of a Deployment are replaced.
use std::collections::{BTreeMap, BTreeSet};

use super::class::Class;
use super::exchange::Kind;
use super::look::{Outcome, Wait, look};
use super::world::{Place, PodId, World};
use crate::ledger::Moment;

/// Pods that were evicted for another pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leave {
    /// Why the pods were evicted.
    pub kind: Kind,
    /// Name of the pod for which they were evicted.
    pub taker: String,
    /// Names of the evicted pods, sorted.
    pub victims: Vec<String>,
}

/// A pool at rest: further passes would change nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rest {
    /// Evictions, in the order of the decisions.
    pub leaves: Vec<Leave>,
    /// Names of running pods within a guarantee.
    pub within: BTreeSet<String>,
    /// Names of running pods that borrow.
    pub over: BTreeSet<String>,
    /// Why the other pods wait, by name.
    pub waits: BTreeMap<String, Wait>,
    /// Number of passes that changed the pool.
    pub passes: usize,
    /// The pool.
    pub world: World,
}

/// The pool still changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the pool still changes after {0} passes")]
pub struct Restless(pub usize);

/// Runs passes over a pool until nothing changes, at most `limit` passes. `watch` receives the pool
/// before each pass, and the decisions of the pass.
pub fn simulate(mut world: World, limit: usize, mut watch: impl FnMut(&World, &Outcome)) -> Result<Rest, Restless> {
    let mut leaves = Vec::new();
    let mut now = world.pods.iter().map(|pod| started(&pod.place).max(pod.created)).max().unwrap_or(Moment(0));
    for passes in 0..limit {
        now = Moment(now.0.saturating_add(1));
        let outcome = look(&world, now);
        watch(&world, &outcome);
        if !changes(&world, &outcome) {
            return Ok(rest(world, &outcome, leaves, passes));
        }
        let name = |id: &PodId| world.pod(*id).name.clone();
        leaves.extend(outcome.exchanges.iter().map(|exchange| {
            let mut victims: Vec<String> = exchange.victims.iter().map(name).collect();
            victims.sort_unstable();
            Leave { kind: exchange.kind, taker: name(&exchange.taker), victims }
        }));
        now = apply(&mut world, &outcome, now);
    }
    Err(Restless(limit))
}

const fn started(place: &Place) -> Moment {
    match place {
        Place::Running { since, .. } => *since,
        Place::Waiting { .. } | Place::Leaving { .. } => Moment(0),
    }
}

fn changes(world: &World, outcome: &Outcome) -> bool {
    let is_nominated =
        |(at, pod): (usize, &super::world::Pod)| outcome.nominations.get(&PodId(at)).copied() != nomination(&pod.place);
    let is_leaving = |pod: &super::world::Pod| matches!(pod.place, Place::Leaving { .. });
    !outcome.released.is_empty()
        || !outcome.exchanges.is_empty()
        || world.pods.iter().enumerate().any(is_nominated)
        || world.pods.iter().any(is_leaving)
}

const fn nomination(place: &Place) -> Option<usize> {
    match place {
        Place::Waiting { nominated } => *nominated,
        Place::Running { .. } | Place::Leaving { .. } => None,
    }
}

/// Applies the decisions of a pass. Returns the time at which the last evicted pod was replaced, or
/// `now` if no pod was evicted.
fn apply(world: &mut World, outcome: &Outcome, now: Moment) -> Moment {
    // Pods that were terminating before this pass have exited. They are removed below.
    let mut now = now;
    for (at, pod) in world.pods.iter_mut().enumerate() {
        if let Place::Waiting { nominated } = &mut pod.place {
            *nominated = outcome.nominations.get(&PodId(at)).copied();
        }
    }
    for released in &outcome.released {
        world.pods[released.pod.0].place = Place::Running { gpu: released.gpu, since: now };
    }
    for victim in outcome.exchanges.iter().flat_map(|exchange| &exchange.victims) {
        now = Moment(now.0.saturating_add(1));
        let pod = &mut world.pods[victim.0];
        (pod.place, pod.created) = (Place::Waiting { nominated: None }, now);
    }
    world.pods.retain(|pod| !matches!(pod.place, Place::Leaving { .. }));
    now
}

fn rest(world: World, outcome: &Outcome, leaves: Vec<Leave>, passes: usize) -> Rest {
    let names = |class: Class| {
        let runs = |place: &Place| matches!(place, Place::Running { .. });
        let pods = world.pods.iter().zip(&outcome.classes);
        pods.filter(move |(pod, of)| runs(&pod.place) && **of == Some(class)).map(|(pod, _)| pod.name.clone()).collect()
    };
    let waits = outcome.waits.iter().map(|(id, wait)| (world.pod(*id).name.clone(), *wait)).collect();
    Rest { leaves, within: names(Class::In), over: names(Class::Over), waits, passes, world }
}
