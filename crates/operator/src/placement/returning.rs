//! Tracks units that are briefly unavailable, because an agent restarts, a GPU is being
//! repartitioned, or a pod was deleted before its node reported it. If these units can serve a pod,
//! the pod needs no other node yet, and the operator delays evictions for the pod. Pure: callers
//! pass in the time.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleave_api::names::UNHEALTHY_TAINT;
use cleave_plan::ledger::{Ledger, Moment, Nomination, Tightest};
use cleave_plan::snapshot::Toleration;

use super::actions::Actions;
use super::claims::{PodClaims, claim_nodes};
use super::facts::Absence;
use super::nodes::{NodeState, Nodes, OUTDATED_TAINTS};
use super::search::{Candidate, PlacementSearch, SearchKey};
use super::verdict::PreemptionProspect;

/// How long pods wait for the units of a node that are briefly unavailable.
///
/// An agent usually restarts within a second, or within a minute if its image is pulled. A GPU is
/// usually repartitioned within a minute. Longer absences, such as the reboot of a server, take
/// about as long as an autoscaler needs to add a node.
pub(super) const RETURN_TIME: Duration = Duration::from_secs(120);

/// Nodes with units that are briefly unavailable, and when each absence began. Times are durations
/// since the process started. Each absence has its own start time. Otherwise a GPU that waits for
/// days to be repartitioned would leave no waiting time for an agent that restarts.
#[derive(Debug, Default)]
pub(super) struct Returning(BTreeMap<String, BTreeMap<Absence, Duration>>);

impl Returning {
    /// Examines the nodes that have changed.
    pub(super) fn update<'n>(&mut self, nodes: &Nodes, changed: impl Iterator<Item = &'n str>, up: Duration) {
        for node in changed {
            let absences = nodes.0.get(node).map(NodeState::absences).filter(|absences| !absences.is_empty());
            let Some(absences) = absences else {
                self.0.remove(node);
                continue;
            };
            let known = self.0.entry(node.to_owned()).or_default();
            known.retain(|absence, _| absences.contains(absence));
            for absence in absences {
                known.entry(absence.clone()).or_insert(up);
            }
        }
    }

    /// Returns the units that pods may wait for now.
    pub(super) fn units<'a>(
        &self,
        nodes: &'a Nodes,
        (ledger, claims): (&Ledger, &'a PodClaims),
        up: Duration,
        actions: &mut Actions,
    ) -> ReturningUnits<'a> {
        let mut returning = BTreeMap::new();
        for (name, absences) in &self.0 {
            let Some((name, _)) = nodes.0.get_key_value(name) else { continue };
            let left = |since: &Duration| since.saturating_add(RETURN_TIME).saturating_sub(up);
            let short = || absences.iter().filter(|(_, since)| !left(since).is_zero());
            if let Some(left) = short().map(|(_, since)| left(since)).min() {
                actions.requeue_in(left);
                let over: BTreeSet<Absence> = short().map(|(absence, _)| absence.clone()).collect();
                returning.insert(name.as_str(), over);
            }
        }
        let deleted: BTreeSet<&str> = claims.lingering_pods().collect();
        for claim in deleted.iter().filter_map(|pod| ledger.claim(pod)) {
            for (name, _) in claim_nodes(&claim.place).iter().filter_map(|name| nodes.0.get_key_value(name)) {
                returning.entry(name.as_str()).or_default();
            }
        }
        ReturningUnits { nodes, returning, deleted, ledger: None, not_fitting: BTreeSet::new() }
    }
}

/// The units that return soon, within one reconcile. Each unit serves one pod.
pub(super) struct ReturningUnits<'a> {
    nodes: &'a Nodes,
    /// The absences that end soon, by node. Includes the nodes of `deleted`.
    returning: BTreeMap<&'a str, BTreeSet<Absence>>,
    /// Deleted pods whose claims end soon.
    deleted: BTreeSet<&'a str>,
    /// The ledger of these nodes after their units have returned, without the units that were
    /// promised to pods. Built for the first pod.
    ledger: Option<Ledger>,
    /// Properties of pods that do not fit.
    not_fitting: BTreeSet<SearchKey<'a>>,
}

impl<'a> ReturningUnits<'a> {
    /// Returns whether a pod fits units that return soon, and promises these units to the pod. A
    /// pod with a nomination needs no such units.
    pub(super) fn serve(
        &mut self,
        ledger: &Ledger,
        search: &PlacementSearch<'a>,
        candidate: &'a Candidate<'a>,
    ) -> bool {
        let is_nominated = || ledger.nominations().contains_key(&candidate.name);
        if self.returning.is_empty() || candidate.device_requests.is_empty() || is_nominated() {
            return false;
        }
        let key = search.key(candidate);
        if self.not_fitting.contains(&key) {
            return false;
        }
        let Self { nodes, returning, deleted, ledger: known, not_fitting } = self;
        let returned = known.get_or_insert_with(|| ledger_of_returned_nodes(ledger, nodes, (returning, deleted)));
        // The taints of a node whose agent is not ready end when the agent is ready.
        let mut tolerant = candidate.plan_pod.clone();
        tolerant.tolerations.extend(OUTDATED_TAINTS.iter().chain(&[UNHEALTHY_TAINT]).map(|key| tolerate(key)));
        let admitted = returning.iter().filter(|(name, over)| {
            let pod = if over.is_empty() { &candidate.plan_pod } else { &tolerant };
            nodes.admits(name, pod)
        });
        let admitted = admitted.map(|(name, _)| *name);
        let fits = |returned: &Ledger, on: &[&str]| {
            returned.fit_for(candidate.pending_pod(), on.iter().copied(), 1, &Tightest).ok()
        };
        // Evaluate rules between pods last, because they cost more time than the check of units.
        let has_units: Vec<&str> = admitted.filter(|name| fits(returned, &[name]).is_some()).collect();
        let found = (!has_units.is_empty())
            .then(|| search.nodes_with_room(ledger, candidate, has_units.into_iter()))
            .and_then(|on| fits(returned, &on));
        let Some(found) = found else {
            if !search.has_lasting_predecessor(ledger, candidate, returning.keys().copied()) {
                not_fitting.insert(key);
            }
            return false;
        };
        returned.reserve(&candidate.name, &found, Moment(u64::MAX)).is_ok()
    }

    /// Returns whether units that return soon are promised to a pod.
    pub(super) fn is_promised(&self, pod: &str) -> bool {
        self.ledger.as_ref().is_some_and(|returned| returned.claim(pod).is_some())
    }

    /// Ends the promise of units to a pod if a preemption frees units for the pod. Other pods may
    /// then wait for the promised units.
    pub(super) fn end_promise(&mut self, pod: &str, preemption: PreemptionProspect) {
        if let Some(returned) = self.ledger.as_mut().filter(|_| preemption == PreemptionProspect::Nominated) {
            returned.remove_claim(pod);
        }
    }
}

/// Returns a ledger of these nodes after their units have returned and the claims of deleted pods
/// have ended.
fn ledger_of_returned_nodes(
    ledger: &Ledger,
    nodes: &Nodes,
    (returning, deleted): (&BTreeMap<&str, BTreeSet<Absence>>, &BTreeSet<&str>),
) -> Ledger {
    let facts = |(name, over): (&&str, &BTreeSet<Absence>)| {
        let facts = if over.is_empty() { ledger.facts(name) } else { nodes.0.get(*name)?.returned_facts(over) };
        Some(((*name).to_owned(), facts?))
    };
    let pods: BTreeSet<&str> = returning.keys().flat_map(|name| ledger.pods_with_claims(name)).collect();
    let claims = pods.difference(deleted).filter_map(|pod| Some((Arc::from(*pod), ledger.claim(pod)?.clone())));
    let mut returned = Ledger::rebuild_from(returning.iter().filter_map(facts), claims);
    let is_here = |nomination: &Nomination| returning.contains_key(nomination.node.as_str());
    for (pod, nomination) in ledger.nominations().iter().filter(|(_, nomination)| is_here(nomination)) {
        // Ignore errors: the ledger refuses only nominations for pods with a claim.
        let _ = returned.nominate(pod, nomination.clone());
    }
    returned
}

fn tolerate(key: &str) -> Toleration {
    Toleration { key: key.to_owned(), operator: "Exists".to_owned(), ..Toleration::default() }
}
