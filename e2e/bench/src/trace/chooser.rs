//! Defines the placement policies of the benchmark, and how each policy learns and places pods.
use cleave_plan::placement::{LearnedScore, ObservedDemands, Score, THOUSANDTHS_PER_GPU};

use super::cluster::{Cluster, MPS_RESOURCE, PodPlacement, device_requests};
use super::lists::Pod;
use super::policies::{BestFitScore, FgdScore, RandomScore};

/// A placement policy to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Policy {
    /// Cleave's policy.
    Cleave,
    /// Fragmentation gradient descent.
    Fgd,
    /// Choose the node and GPU with the least free capacity.
    BestFit,
    /// Choose at random among the nodes and GPUs that fit.
    Random,
}

impl Policy {
    /// Returns the name of the policy on the command line.
    pub(super) fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// A placement policy that a [`Cluster`] uses.
pub(super) trait PlacementPolicy: Score + Default {
    /// Counts an arrived pod.
    fn count_arrived_pod(_: &mut Cluster<Self>, _: &Pod) {}

    /// Updates the score from the pods that arrived (`seen`) and the pods that wait (`waiting`).
    fn update_score(cluster: &mut Cluster<Self>, seen: &ObservedDemands, waiting: &[&Pod]);

    /// Decides where to place a pod. Returns `None` if the pod fits on no node.
    fn place_pod(cluster: &mut Cluster<Self>, pod: &Pod) -> Option<PodPlacement> {
        cluster.place_pod(pod)
    }
}

/// The operator's score, which learns as in the operator.
impl PlacementPolicy for LearnedScore {
    fn count_arrived_pod(cluster: &mut Cluster<Self>, pod: &Pod) {
        cluster.chooser.count_arrival(&device_requests(pod), pod.demand.cpu, pod.demand.models.clone());
    }

    fn update_score(cluster: &mut Cluster<Self>, _: &ObservedDemands, waiting: &[&Pod]) {
        cluster.chooser.learn(waiting.iter().map(|pod| (device_requests(pod), pod.demand.cpu)));
    }
}

impl PlacementPolicy for FgdScore {
    fn update_score(cluster: &mut Cluster<Self>, seen: &ObservedDemands, _: &[&Pod]) {
        cluster.set_score(Self::new(&seen.typical_pods()));
    }
}

impl PlacementPolicy for BestFitScore {
    fn update_score(_: &mut Cluster<Self>, _: &ObservedDemands, _: &[&Pod]) {}
}

impl PlacementPolicy for RandomScore {
    fn update_score(_: &mut Cluster<Self>, _: &ObservedDemands, _: &[&Pod]) {}

    fn place_pod(cluster: &mut Cluster<Self>, pod: &Pod) -> Option<PodPlacement> {
        let next =
            cluster.chooser.score(MPS_RESOURCE, THOUSANDTHS_PER_GPU).map_or_else(Self::default, Self::next_score);
        cluster.set_score(next);
        cluster.place_pod(pod)
    }
}
