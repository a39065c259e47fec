//! Determines the order of the turns of waiting pods, and explains why a pod still waits after its
//! turn.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cleave_plan::quota::{Amount, Owner, Quota, Wait};

use super::quota_pass::{Member, QuotaPass, QuotaTurn};
use super::quota_waits::QuotaWait;
use super::verdict::PreemptionProspect;

/// The order in which waiting pods have their turns.
#[derive(Debug)]
pub(super) enum TurnOrder {
    /// By priority and age.
    Sorted(std::ops::Range<usize>),
    /// By the rules of quotas.
    ByQuota(TurnQueues),
}

impl TurnOrder {
    /// Returns the order of turns for the waiting pods with these names. `names` must be sorted by
    /// priority and age. `leads_since` is when this process became the leader, in seconds since the
    /// Unix epoch.
    pub(super) fn new<'n>(
        quotas: Option<&QuotaPass<'_>>,
        names: impl ExactSizeIterator<Item = &'n str>,
        leads_since: u64,
    ) -> Self {
        match quotas {
            None => Self::Sorted(0..names.len()),
            Some(pass) => Self::ByQuota(TurnQueues::new(pass, names, leads_since)),
        }
    }

    /// Returns the position of the next candidate.
    pub(super) fn next(&mut self, quotas: Option<&QuotaPass<'_>>) -> Option<usize> {
        match (self, quotas) {
            (Self::Sorted(rest), _) => rest.next(),
            (Self::ByQuota(queues), Some(pass)) => queues.next(pass),
            (Self::ByQuota(_), None) => None,
        }
    }

    /// Returns the positions of all waiting pods of a candidate's gang, if the candidate represents
    /// its gang. Returns an empty slice for a pod without a gang.
    pub(super) fn gang(&self, candidate: usize) -> &[usize] {
        match self {
            Self::Sorted(_) => &[],
            Self::ByQuota(queues) => queues.gangs.get(&candidate).map_or(&[], Vec::as_slice),
        }
    }
}

/// Waiting pods, by the account that they are charged to.
#[derive(Debug, Default)]
pub(super) struct TurnQueues {
    /// Gangs of which an earlier leader released only a part. Other pods could otherwise use the
    /// units that the rest of the gang needs.
    unfinished: VecDeque<usize>,
    by_account: BTreeMap<(usize, usize), VecDeque<(usize, Member)>>,
    others: VecDeque<usize>,
    /// The candidates of each gang, by the candidate that represents the gang.
    gangs: BTreeMap<usize, Vec<usize>>,
}

impl TurnQueues {
    /// Sorts candidates into queues. `names` are sorted by priority and age. Only one pod of a gang
    /// has a turn, for all of its waiting pods, also for those that can be placed in no pool.
    fn new<'n>(pass: &QuotaPass<'_>, names: impl Iterator<Item = &'n str>, leads_since: u64) -> Self {
        let mut queues = Self::default();
        let mut units: BTreeMap<&str, (Option<usize>, Vec<usize>)> = BTreeMap::new();
        let mut mixed = BTreeSet::new();
        for (at, name) in names.enumerate() {
            let head = pass.unit(name).filter(|unit| unit.pods.len() > 1).and_then(|unit| unit.head.as_deref());
            if let Some(head) = head {
                let (first, all) = units.entry(head).or_default();
                all.push(at);
                if head != name {
                    continue;
                }
                *first = Some(at);
            }
            if pass.is_unfinished_release(name, leads_since) {
                queues.unfinished.push_back(at);
                continue;
            }
            let Some(&member) = pass.members(name).first() else {
                queues.others.push_back(at);
                continue;
            };
            let key = (member.pool, pass.book(member).account(member.id));
            if head.is_some() {
                mixed.insert(key);
            }
            queues.by_account.entry(key).or_default().push_back((at, member));
        }
        queues.gangs = units.into_values().filter_map(|(first, all)| Some((first?, all))).collect();
        for key in mixed {
            // A gang has the lowest priority of its pods, and the age of its youngest pod.
            let of_turn = |(_, member): &(usize, Member)| {
                let book = pass.book(*member);
                (Reverse(book.priority(member.id)), book.created(member.id), pass.pod(*member).name.clone())
            };
            if let Some(queue) = queues.by_account.get_mut(&key) {
                queue.make_contiguous().sort_by_cached_key(of_turn);
            }
        }
        queues
    }

    /// Removes and returns the next waiting pod. The rest of gangs that are partly released comes
    /// first, then pods that are in no pool with an enforced quota, because these pods use other
    /// GPUs.
    fn next(&mut self, pass: &QuotaPass<'_>) -> Option<usize> {
        if let Some(at) = self.unfinished.pop_front().or_else(|| self.others.pop_front()) {
            return Some(at);
        }
        let turn = |(_, member): &(usize, Member)| pass.book(*member).turn(member.id);
        let first = self.by_account.iter().filter_map(|(key, queue)| Some((turn(queue.front()?), *key))).min()?;
        self.by_account.get_mut(&first.1)?.pop_front().map(|(at, _)| at)
    }
}

impl QuotaPass<'_> {
    /// Explains why a pod still waits after its turn. Returns `None` if no quota restricts the pod,
    /// so that the placement search explains the wait.
    pub(super) fn explain_wait(&self, turn: &QuotaTurn, prospect: PreemptionProspect) -> Option<QuotaWait> {
        if !self.book(turn.member).quota(turn.member.id).is_enforced() && turn.may_use_free_room {
            return None;
        }
        let wait = match prospect {
            PreemptionProspect::Nominated => Wait::Nominated,
            PreemptionProspect::Protected => Wait::Protected,
            _ if turn.needs_no_gpus() => Wait::OverMax,
            PreemptionProspect::Unknown => Wait::Later,
            PreemptionProspect::Impossible => Wait::NoRoom,
        };
        Some(self.explain((turn.member, wait)))
    }

    /// Explains why a gang still waits after its turn.
    pub(super) fn explain_gang_wait(&self, turn: &QuotaTurn, prospect: PreemptionProspect) -> QuotaWait {
        self.explain_wait(turn, prospect).unwrap_or_else(|| self.explain((turn.member, Wait::NoRoom)))
    }

    /// Explains why a waiting pod waits.
    pub(super) fn explain(&self, (member, wait): (Member, Wait)) -> QuotaWait {
        let (book, pod) = (self.book(member), self.pod(member));
        if let (Wait::GangIncomplete, Some(unit)) = (wait, self.unit(&pod.name)) {
            return unit.explain_pools();
        }
        let quota: &Quota = book.quota(member.id);
        let used = book.used(member.id);
        let name = match &pod.owner {
            Owner::Quota(name) => format!("quota {name}"),
            Owner::Unnamed | Owner::Outside => "the namespaces without a quota".to_owned(),
        };
        let (asks, min) = (book.charge(member.id), quota.min());
        let message = match wait {
            Wait::OverMax => {
                format!("{name} would use {} GPUs, and its max is {}", used.plus(asks), quota.max().unwrap_or_default())
            }
            Wait::LargerThanMax => {
                format!("the pod requests {asks} GPUs, and the max of {name} is {}", quota.max().unwrap_or_default())
            }
            Wait::WaitsForGuarantee => format!(
                "the pod does not borrow (cleave.dev/borrow: Never), and {name} uses {used} of {min} guaranteed GPUs"
            ),
            Wait::Nominated => {
                format!(
                    "pods terminate to free GPUs for the pod; {name} uses {used} GPUs with the pod and is guaranteed {min}"
                )
            }
            Wait::Protected => "only pods that disruption budgets protect could be evicted for the pod".to_owned(),
            _ if book.is_guaranteed(member.id) && book.awaits_leaving(member.id) > Amount::ZERO => format!(
                "within the guarantee of {name}, whose terminating pods still use {} GPUs: the pod waits until they end",
                book.awaits_leaving(member.id)
            ),
            _ if book.is_guaranteed(member.id) => format!(
                "within the guarantee of {name} ({used} of {min} GPUs used, requests {asks}): no GPU can be freed now"
            ),
            _ => {
                let kept = book.kept_from(member.id);
                let kept = if kept == Amount::ZERO {
                    String::new()
                } else {
                    format!("; {kept} GPUs of other quotas are not lent and remain free")
                };
                format!("the pod borrows: {name} uses {used} GPUs and is guaranteed {min}{kept}")
            }
        };
        QuotaWait { wait, message }
    }
}
