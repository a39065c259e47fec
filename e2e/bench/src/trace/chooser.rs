//! The choice of a placement policy, and its state during a run.
use cleave_plan::placement::{Choice, Demand, Node, Observed, Placer, Value};

use super::policies::{BestFit, Fgd, random};
use super::random::Rng;

/// A placement policy to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Policy {
    /// Cleave's policy.
    Cleave,
    /// Fragmentation gradient descent.
    Fgd,
    /// The node and GPU with the least free capacity.
    BestFit,
    /// Any GPUs that fit.
    Random,
}

impl Policy {
    /// Name of the policy on the command line.
    pub(super) fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// A policy with its state.
pub(super) enum Chooser {
    Cleave(Placer<Value>),
    Fgd(Placer<Fgd>),
    BestFit(Placer<BestFit>),
    Random(Placer<BestFit>, Rng),
}

/// Calls a method of the placer of any policy.
macro_rules! placer {
    ($chooser:expr, $placer:ident => $call:expr) => {
        match $chooser {
            Chooser::Cleave($placer) => $call,
            Chooser::Fgd($placer) => $call,
            Chooser::BestFit($placer) => $call,
            Chooser::Random($placer, _) => $call,
        }
    };
}

impl Chooser {
    /// Creates a policy on these nodes. It learns typical demands from `seen`.
    pub(super) fn new(policy: Policy, nodes: Vec<Node>, seen: &Observed, seed: u64) -> Self {
        match policy {
            Policy::Cleave => {
                let value = Value::learn(&seen.typical(true), &nodes);
                Self::Cleave(Placer::new(nodes, value))
            }
            Policy::Fgd => Self::Fgd(Placer::new(nodes, Fgd::new(&seen.typical(true)))),
            Policy::BestFit => Self::BestFit(Placer::new(nodes, BestFit)),
            Policy::Random => Self::Random(Placer::new(nodes, BestFit), Rng(!seed)),
        }
    }

    /// Chooses a node and its GPUs for a demand; `None` if it fits nowhere.
    pub(super) fn choose(&mut self, demand: &Demand) -> Option<Choice> {
        match self {
            Self::Cleave(placer) => placer.choose(demand),
            Self::Fgd(placer) => placer.choose(demand),
            Self::BestFit(placer) => placer.choose(demand),
            Self::Random(placer, rng) => random(placer.nodes(), demand, rng),
        }
    }

    /// Allocates the capacity of a choice.
    pub(super) fn allocate(&mut self, demand: &Demand, choice: &Choice) {
        placer!(self, placer => placer.allocate(demand, choice));
    }

    /// Frees the capacity of a choice.
    pub(super) fn free(&mut self, demand: &Demand, choice: &Choice) {
        placer!(self, placer => placer.deallocate(demand, choice));
    }

    /// Updates the typical demands of a policy that uses them.
    pub(super) fn update_typical<'a>(&mut self, seen: &Observed, waiting: impl Iterator<Item = &'a Demand>) {
        match self {
            Self::Cleave(placer) => {
                let value = Value::learn(&seen.typical(true), placer.nodes()).with_pending(waiting);
                placer.set_policy(value);
            }
            Self::Fgd(placer) => placer.set_policy(Fgd::new(&seen.typical(true))),
            Self::BestFit(_) | Self::Random(..) => {}
        }
    }

    /// The nodes with their free capacity.
    pub(super) fn nodes(&self) -> &[Node] {
        placer!(self, placer => placer.nodes())
    }
}
