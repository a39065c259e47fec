//! Evicts gangs completely, although the eviction of each pod is a request of its own.
//!
//! If one of the requests fails, the other pods of the gang are evicted, and the pod would keep its
//! GPUs without use. So the pods of the gang are remembered until all of them terminate, and later
//! reconciles evict those that still run. If the API server evicted none of the pods, nothing is
//! remembered, and the next reconcile decides anew.
//!
//! The nomination of the waiting pod records the gang before the first request. After the requests,
//! the operator removes a gang of which no pod was evicted from the record, and marks a gang of
//! which only some pods were evicted. A new leader evicts the rest of a marked gang. It does so for
//! other recorded gangs only if one of the pods terminates because of an eviction: a pod that is
//! missing may have ended by itself.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_api::placement::{EvictedGang, Placement};
use cleave_plan::quota::Kind;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::actions::{Eviction, GangId, NominationRecord, QuotaEviction};
use super::evictions::TERMINATION_TIME;
use super::pod_tracker::PodTracker;
use super::quota_pass::requested_grace;
use super::quota_times::created;
use crate::evict::EvictionResult;
use crate::pods::{DISRUPTION_TARGET, PodObject, full_name};

/// Gangs of which some pods may not be evicted yet.
#[derive(Debug, Default)]
pub(super) struct GangEvictions(BTreeMap<GangId, PartlyEvicted>);

/// A gang whose eviction was decided.
#[derive(Debug)]
struct PartlyEvicted {
    /// When the eviction was decided, in seconds since the Unix epoch.
    decided: u64,
    /// Pods that may still run, by UID.
    pods: BTreeMap<String, Remaining>,
    /// UIDs of the pods of the gang that ran when the eviction was decided.
    members: BTreeSet<String>,
    /// Whether the API server evicted one of the pods.
    has_begun: bool,
    /// The time until which a request without an answer may still turn out to have evicted a pod.
    undecided_until: Duration,
}

/// A pod of a gang that may still run.
#[derive(Debug)]
struct Remaining {
    eviction: Eviction,
    /// The end of the pod's grace period when its eviction was decided.
    deleted: Option<Time>,
    /// Whether a request to evict the pod had no answer.
    is_unanswered: bool,
}

impl Remaining {
    const fn new(eviction: Eviction, deleted: Option<Time>) -> Self {
        Self { eviction, deleted, is_unanswered: false }
    }
}

impl PartlyEvicted {
    const fn new(decided: u64) -> Self {
        Self {
            decided,
            pods: BTreeMap::new(),
            members: BTreeSet::new(),
            has_begun: false,
            undecided_until: Duration::ZERO,
        }
    }

    /// Removes the pods that terminate since their eviction was decided, or no longer exist.
    fn update(&mut self, released: &ReleasedGangPods<'_>) {
        let has_begun = &mut self.has_begun;
        self.pods.retain(|uid, remaining| {
            let pod = released.by_uid.get(uid.as_str());
            let runs = pod.is_some_and(|pod| pod.metadata.deletion_timestamp == remaining.deleted);
            *has_begun |= !runs && remaining.is_unanswered;
            runs
        });
    }

    /// Returns whether replacements of evicted pods were released beside the remaining pods. All
    /// pods that the gang still needs are released together. A pod that was created before the
    /// decision replaces another pod, and does not make the gang complete.
    fn has_replacements(&self, running: &[&PodObject]) -> bool {
        let is_member = |pod: &PodObject| pod.metadata.uid.as_deref().is_some_and(|uid| self.members.contains(uid));
        running.iter().any(|pod| !is_member(pod) && created(pod).0 >= self.decided)
    }

    /// Returns whether a request without an answer may still turn out to have evicted a pod.
    fn is_undecided(&self, up: Duration) -> bool {
        up < self.undecided_until && self.pods.values().any(|pod| pod.is_unanswered)
    }
}

/// The pods of gangs that have left the gate.
struct ReleasedGangPods<'a> {
    by_uid: BTreeMap<&'a str, &'a PodObject>,
    /// Pods that do not terminate.
    by_gang: BTreeMap<GangId, Vec<&'a PodObject>>,
    /// Gangs with a pod that terminates because of an eviction.
    evicted: BTreeSet<GangId>,
    /// Gangs with a pod that terminates for another reason, for example a deletion.
    deleted: BTreeSet<GangId>,
}

impl<'a> ReleasedGangPods<'a> {
    fn new(tracker: &'a PodTracker) -> Self {
        let (mut by_uid, mut by_gang) = (BTreeMap::new(), BTreeMap::<GangId, Vec<&PodObject>>::new());
        let (mut evicted, mut deleted) = (BTreeSet::new(), BTreeSet::new());
        for pod in tracker.living_pods().filter(|pod| pod.requests_gpus()) {
            let (Some(gang), Some(uid)) =
                (GangId::of(pod).filter(|_| pod.has_left_gate()), pod.metadata.uid.as_deref())
            else {
                continue;
            };
            by_uid.insert(uid, pod);
            if pod.metadata.deletion_timestamp.is_none() {
                by_gang.entry(gang).or_default().push(pod);
            } else if pod.condition(DISRUPTION_TARGET).is_some_and(|condition| condition.status == "True") {
                evicted.insert(gang);
            } else {
                deleted.insert(gang);
            }
        }
        Self { by_uid, by_gang, evicted, deleted }
    }

    /// Returns the pods of a gang that do not terminate.
    fn running(&self, gang: &GangId) -> &[&'a PodObject] {
        self.by_gang.get(gang).map_or(&[], Vec::as_slice)
    }
}

/// Returns the record of the gangs among the pods that are evicted for a waiting pod. Gangs whose
/// pods record no time of their release have no record.
pub(super) fn evicted_gangs(evictions: &[Eviction]) -> Vec<EvictedGang> {
    let mut gangs: BTreeMap<&GangId, EvictedGang> = BTreeMap::new();
    for eviction in evictions {
        let (Some(gang), Some(quota)) = (&eviction.gang, &eviction.quota) else { continue };
        let Some(since) = gang.since else { continue };
        let new = || EvictedGang {
            namespace: gang.namespace.clone(),
            name: gang.name.clone(),
            since,
            pods: 0,
            kind: quota.kind.name().to_owned(),
            from: quota.from.clone(),
            to: quota.to.clone(),
            begun: false,
            force: quota.force,
        };
        gangs.entry(gang).or_insert_with(new).pods += 1;
    }
    gangs.into_values().collect()
}

/// The results of the evictions of gangs in one reconcile.
#[derive(Debug, Default)]
pub(super) struct GangResults(BTreeMap<GangId, GangResult>);

#[derive(Debug, Default)]
struct GangResult {
    /// Number of pods that the API server evicted.
    evicted: usize,
    /// Whether a request had no answer.
    is_unanswered: bool,
}

impl GangResults {
    /// Records the result of an eviction.
    pub(super) fn record(&mut self, eviction: &Eviction, result: &EvictionResult) {
        let Some(gang) = &eviction.gang else { return };
        let of = self.0.entry(gang.clone()).or_default();
        of.evicted += usize::from(*result == EvictionResult::Done);
        of.is_unanswered |= matches!(result, EvictionResult::Failed(_));
    }

    /// Returns the nominations to write again, because their record of evicted gangs has changed.
    /// `kept` are the nominations as they were written before the evictions.
    pub(super) fn correct(&self, kept: &[NominationRecord]) -> Vec<NominationRecord> {
        let corrected = |record: &NominationRecord| {
            let evicts: Vec<EvictedGang> =
                record.room.evicts.iter().filter_map(|gang| self.correct_gang(gang)).collect();
            let has_changed = evicts != record.room.evicts;
            has_changed
                .then(|| NominationRecord { room: Placement { evicts, ..record.room.clone() }, ..record.clone() })
        };
        kept.iter().filter_map(corrected).collect()
    }

    /// Returns the new record of a gang. Returns `None` if none of its pods was evicted.
    fn correct_gang(&self, gang: &EvictedGang) -> Option<EvictedGang> {
        let id = GangId { namespace: gang.namespace.clone(), name: gang.name.clone(), since: Some(gang.since) };
        let GangResult { evicted, is_unanswered } = self.0.get(&id)?;
        let begun = (1..gang.pods).contains(evicted);
        (*evicted > 0 || *is_unanswered).then(|| EvictedGang { begun, ..gang.clone() })
    }
}

impl GangEvictions {
    /// Returns whether no gang is remembered.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Remembers the pods of gangs whose evictions this reconcile decided.
    /// `now` is in seconds since the Unix epoch.
    pub(super) fn remember(&mut self, evictions: &[Eviction], tracker: &PodTracker, now: u64) {
        let of_gangs = || evictions.iter().filter_map(|one| Some((one.gang.as_ref()?, one)));
        if of_gangs().next().is_none() {
            return;
        }
        let released = ReleasedGangPods::new(tracker);
        for (gang, eviction) in of_gangs() {
            let pod = released.by_uid.get(eviction.uid.as_str());
            let deleted = pod.and_then(|pod| pod.metadata.deletion_timestamp.clone());
            let new = || Remaining::new(eviction.clone(), deleted);
            let of = self.0.entry(gang.clone()).or_insert_with(|| PartlyEvicted::new(now));
            // A later decision may ignore disruption budgets.
            of.pods.entry(eviction.uid.clone()).or_insert_with(new).eviction = eviction.clone();
        }
        let gangs: BTreeSet<&GangId> = of_gangs().map(|(gang, _)| gang).collect();
        for gang in gangs {
            if let Some(of) = self.0.get_mut(gang) {
                of.members.extend(released.running(gang).iter().filter_map(|pod| pod.uid()));
            }
        }
    }

    /// Records the result of an eviction.
    pub(super) fn record(&mut self, eviction: &Eviction, result: &EvictionResult, up: Duration) {
        let Some(of) = eviction.gang.as_ref().and_then(|gang| self.0.get_mut(gang)) else { return };
        let (is_accepted, is_unanswered) =
            (*result == EvictionResult::Done, matches!(result, EvictionResult::Failed(_)));
        of.has_begun |= is_accepted;
        if is_unanswered {
            of.undecided_until = up.saturating_add(TERMINATION_TIME);
        }
        if let Some(pod) = of.pods.get_mut(&eviction.uid) {
            pod.is_unanswered |= is_unanswered;
        }
    }

    /// Remembers the gangs that an earlier leader began to evict for pods that still wait. `now` is
    /// in seconds since the Unix epoch, `grace_cap` the maximum grace period of evicted pods.
    /// `has_budget` returns whether a disruption budget selects a pod.
    pub(super) fn restore(
        &mut self,
        tracker: &PodTracker,
        (now, grace_cap): (u64, Duration),
        has_budget: impl Fn(&PodObject) -> bool,
    ) {
        let noted: Vec<(&PodObject, &EvictedGang)> = tracker
            .living_pods()
            .filter(|pod| pod.waits_at_gate())
            .filter_map(|pod| Some((pod, pod.nomination.as_ref().filter(|room| room.until > now)?)))
            .flat_map(|(pod, room)| room.evicts.iter().map(move |gang| (pod, gang)))
            .collect();
        if noted.is_empty() {
            return;
        }
        let released = ReleasedGangPods::new(tracker);
        for (preemptor, noted) in noted {
            let EvictedGang { namespace, name, since, pods, kind, from, to, begun, force } = noted;
            let gang = GangId { namespace: namespace.clone(), name: name.clone(), since: Some(*since) };
            let running = released.running(&gang);
            // The previous leader may have been lost before it recorded the results.
            let has_begun = *begun || released.evicted.contains(&gang) || *force && released.deleted.contains(&gang);
            let until = preemptor.nomination.as_ref().map_or(0, |room| room.until);
            let decided = until.saturating_sub(grace_cap.saturating_add(TERMINATION_TIME).as_secs());
            let has_replacements = running.iter().any(|pod| created(pod).0 > decided);
            let is_partly_evicted = has_begun && !has_replacements && running.len() < *pods;
            let Some(kind) = Kind::from_name(kind).filter(|_| is_partly_evicted) else { continue };
            let of = self.0.entry(gang.clone()).or_insert_with(|| PartlyEvicted::new(decided));
            of.has_begun = true;
            of.members.extend(running.iter().filter_map(|pod| pod.uid()));
            for pod in running {
                let (grace, uid) = (requested_grace(pod, grace_cap, *force), pod.uid().unwrap_or_default());
                let message = format!("other pods of the gang {name} were evicted");
                let quota = QuotaEviction { kind, from: from.clone(), to: to.clone(), grace, force: *force, message };
                let eviction = Eviction {
                    pod: full_name(&pod.metadata),
                    uid: uid.clone(),
                    preemptor: full_name(&preemptor.metadata),
                    may_be_refused: has_budget(pod),
                    quota: Some(quota),
                    gang: Some(gang.clone()),
                };
                of.pods.insert(uid, Remaining::new(eviction, None));
            }
        }
    }

    /// Starts a reconcile. Returns the evictions of the remaining pods that `can_evict` accepts, by
    /// UID. Forgets the gangs of which all pods terminate or none was evicted, and those of which
    /// replacements were released beside the remaining pods.
    pub(super) fn evict_rest(
        &mut self,
        tracker: &PodTracker,
        can_evict: impl Fn(&PodObject, &Eviction) -> bool,
        up: Duration,
    ) -> Vec<Eviction> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let released = ReleasedGangPods::new(tracker);
        let mut evictions = Vec::new();
        self.0.retain(|gang, of| {
            of.update(&released);
            if !of.has_begun {
                return of.is_undecided(up);
            }
            if of.has_replacements(released.running(gang)) {
                return false;
            }
            let can_evict =
                |uid: &str, eviction: &Eviction| released.by_uid.get(uid).is_some_and(|pod| can_evict(pod, eviction));
            let due = of.pods.iter().filter(|(uid, pod)| can_evict(uid, &pod.eviction));
            evictions.extend(due.map(|(_, pod)| pod.eviction.clone()));
            !of.pods.is_empty()
        });
        evictions
    }
}
