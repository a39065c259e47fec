//! Records the pool before and after each decision of a pass.
use super::super::look::Pass;
use super::super::state::State;
use super::super::{Exchange, Outcome, Place, PodId, World, look};
use super::naive::Pool;
use super::worlds::{History, Run};
use crate::ledger::Moment;

/// A decision about one pod.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) pod: PodId,
    /// The pool before the decision, without the pod's nomination.
    pub(super) before: Pool,
    pub(super) after: Pool,
    /// The GPU to which the pod is released.
    pub(super) released: Option<usize>,
    pub(super) exchange: Option<Exchange>,
}

/// Decides about each waiting pod of a pool. `check` receives the state after each decision.
pub(super) fn steps(world: &World, now: Moment, check: impl Fn(&State<'_>, &Pool)) -> (Vec<Step>, Outcome) {
    let mut pass = Pass::new(world, now);
    let mut before = world.clone();
    let mut steps = Vec::new();
    while let Some(pod) = pass.next() {
        let known = (pass.outcome.released.len(), pass.outcome.exchanges.len());
        pass.decide(pod);
        let after = situation(&pass.state, &before);
        if matches!(before.pods[pod.0].place, Place::Waiting { .. }) {
            before.pods[pod.0].place = Place::Waiting { nominated: None };
        }
        let pool = |world: &World| Pool::at(world.clone(), now);
        check(&pass.state, &pool(&after));
        steps.push(Step {
            pod,
            before: pool(&before),
            after: pool(&after),
            released: pass.outcome.released.get(known.0).map(|released| released.gpu),
            exchange: pass.outcome.exchanges.get(known.1).cloned(),
        });
        before = after;
    }
    (steps, pass.finish())
}

/// Returns the pool as another pass would read it in the middle of this pass.
fn situation(state: &State<'_>, previous: &World) -> World {
    let mut world = previous.clone();
    for (at, pod) in world.pods.iter_mut().enumerate() {
        let id = PodId(at);
        pod.place = match (state.gpu_of(id), pod.place) {
            (Some(_), Place::Running { .. }) | (None, Place::Leaving { .. }) => pod.place,
            (Some(gpu), _) => Place::Running { gpu, since: state.now },
            (None, Place::Running { gpu, .. }) => Place::Leaving { gpu, held: true },
            (None, Place::Waiting { .. }) => Place::Waiting { nominated: state.nominated(id) },
        };
    }
    world
}

impl Run {
    /// Applies the decisions of a pass. Evicted pods become terminating pods.
    pub(super) fn apply(&mut self, outcome: &Outcome) {
        for (at, pod) in self.world.pods.iter_mut().enumerate() {
            if let Place::Waiting { nominated } = &mut pod.place {
                *nominated = outcome.nominations.get(&PodId(at)).copied();
            }
        }
        for released in &outcome.released {
            self.world.pods[released.pod.0].place = Place::Running { gpu: released.gpu, since: self.now };
        }
        for victim in outcome.exchanges.iter().flat_map(|exchange| &exchange.victims) {
            let pod = &mut self.world.pods[victim.0];
            if let Place::Running { gpu, .. } = pod.place {
                pod.place = Place::Leaving { gpu, held: true };
            }
        }
    }
}

/// Runs a history with a pass before each event. `check` receives each decision.
pub(super) fn each_step(history: &History, mut check: impl FnMut(&Step)) {
    let mut run = Run::new(history.start.0.clone());
    for event in &history.events {
        let (steps, outcome) = steps(&run.world, run.now, |_, _| {});
        steps.iter().for_each(&mut check);
        run.apply(&outcome);
        run.happen(event);
    }
}

/// Runs a history with a pass before each event. `check` receives the pool before each pass, and
/// the decisions of the pass.
pub(super) fn each_pass(history: &History, mut check: impl FnMut(&Run, &Outcome)) {
    let mut run = Run::new(history.start.0.clone());
    for event in &history.events {
        let outcome = look(&run.world, run.now);
        check(&run, &outcome);
        run.apply(&outcome);
        run.happen(event);
    }
}
