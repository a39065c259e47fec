//! Applies quotas at the placement gate, within one reconcile.
//!
//! [`QuotaWorlds`] has the pods and GPUs of each pool, read anew in each reconcile from the pods'
//! annotations, the `GpuNode`s and the ledger. Nothing else is stored, so a new leader decides the
//! same. [`QuotaPass`] follows the decisions of the reconcile. The rules are in
//! `cleave_plan::quota`.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use cleave_api::GpuQuotaStatus;
use cleave_plan::ledger::{Fits, Holder, Holders, Ledger, Moment, Preemption, Rank};
use cleave_plan::quota::{
    Amount, Book, Class, GPU, Kind, Owner, Place, Pod, PodId, Quota, Rights, Settings, Unit, Wait, World,
};
use jiff::Timestamp;

use super::claims::RESERVATION_TIME;
use super::cluster::Cluster;
use super::pod_tracker::PodTracker;
use super::verdict::PreemptionProspect;
use crate::pods::{PodObject, full_name};
use crate::policies::demand::{Reason, WaitingPod};
use crate::quotas::charge::NodeCosts;
use crate::quotas::status::{self, PoolView};
use crate::quotas::validate::{Quotas, Unnamed};

/// Time after the end of a pod's grace period for which it counts against its quota's maximum.
const HELD_AFTER_GRACE: u64 = 30;

/// Settings of quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QuotaSettings {
    /// Durations of the rules.
    pub rules: Settings,
    /// What pods of namespaces without a quota may do.
    pub unnamed: Unnamed,
}

/// The pods and GPUs of one pool.
#[derive(Debug)]
pub(crate) struct PoolWorld {
    pub(crate) world: World,
    /// Pods by name.
    ids: BTreeMap<String, PodId>,
    /// GPUs by the UUID of a device on them.
    gpus: BTreeMap<String, usize>,
    /// Whether some quota of the pool is enforced.
    pub(crate) is_enforced: bool,
}

/// All pools with quotas.
#[derive(Debug)]
pub(crate) struct QuotaWorlds {
    pub(crate) pools: Vec<PoolWorld>,
    /// Pool of each node.
    pool_of_node: BTreeMap<String, usize>,
    now: Moment,
}

/// What is known of a node.
struct NodeView<'a> {
    name: &'a str,
    pool: usize,
    costs: NodeCosts,
    first_gpu: usize,
}

/// Returns the valid quotas of a cluster.
pub(crate) fn quotas_of(cluster: &Cluster, unnamed: Unnamed) -> Quotas {
    let nothing = BTreeMap::new();
    let namespaces: Vec<(&str, &BTreeMap<String, String>)> = cluster
        .namespaces
        .iter()
        .filter_map(|object| {
            Some((object.metadata.name.as_deref()?, object.metadata.labels.as_ref().unwrap_or(&nothing)))
        })
        .collect();
    let gpus = cluster.gpu_nodes.iter().filter_map(|node| node.0.as_ref().ok()?.status.as_ref());
    let products: BTreeSet<String> = gpus.flat_map(|status| &status.gpus).map(|gpu| gpu.model.clone()).collect();
    let objects = cluster.quotas.iter().filter_map(|object| object.0.as_ref().ok());
    Quotas::new(objects, &namespaces, &products, unnamed)
}

impl QuotaWorlds {
    /// Reads the pools. Returns `None` if there is no valid quota. `waiting` are the pods at the
    /// gate, and `is_evicted` returns whether an eviction of the pod with this UID was accepted.
    pub(crate) fn new<'a>(
        cluster: &Cluster,
        (tracker, ledger): (&PodTracker, &Ledger),
        waiting: impl Iterator<Item = (&'a str, &'a PodObject)>,
        is_evicted: impl Fn(&str) -> bool,
        (settings, now): (&QuotaSettings, u64),
    ) -> Option<Self> {
        if cluster.quotas.is_empty() {
            return None;
        }
        let quotas = quotas_of(cluster, settings.unnamed);
        if quotas.pools.is_empty() {
            return None;
        }
        let mut worlds = Self { pools: Vec::new(), pool_of_node: BTreeMap::new(), now: Moment(now) };
        for (at, pool) in quotas.pools.iter().enumerate() {
            let world = World { quotas: pool.quotas.clone(), settings: settings.rules, ..World::default() };
            let (ids, gpus) = (BTreeMap::new(), BTreeMap::new());
            worlds.pools.push(PoolWorld { world, ids, gpus, is_enforced: quotas.is_enforced(at) });
        }
        let nodes = worlds.add_nodes(cluster, &quotas);
        let by_name: BTreeMap<&str, &NodeView<'_>> = nodes.iter().map(|node| (node.name, node)).collect();
        for pod in tracker.living_pods().filter(|pod| pod.requests_gpus()) {
            let name = full_name(&pod.metadata);
            let placed = ledger
                .devices_of(&name)
                .next()
                .map(|(node, devices)| (node.to_owned(), devices.first().map(|device| (*device).to_owned())));
            let placed = placed.or_else(|| pod.node().map(|node| (node.to_owned(), None)));
            let Some((node, device)) = placed else { continue };
            let Some(view) = by_name.get(node.as_str()) else { continue };
            let place = worlds.place_of(pod, view, device.as_deref(), &is_evicted);
            worlds.add_pod(&quotas, view, &name, pod, place);
        }
        let mut costs: Vec<NodeCosts> = vec![NodeCosts::default(); worlds.pools.len()];
        nodes.iter().for_each(|node| costs[node.pool].extend(&node.costs));
        for (name, pod) in waiting {
            let nominated = ledger.nominations().get(name);
            for (pool, costs) in costs.iter().enumerate() {
                let unit = quotas.pools[pool].unit;
                let Some(charge) = costs.cost(&pod.spec.device_requests, unit) else { continue };
                let in_pool = nominated.filter(|of| worlds.pool_of_node.get(&of.node) == Some(&pool));
                let nominated = in_pool
                    .and_then(|of| of.takes.first())
                    .map(|take| worlds.pools[pool].gpus.get(&take.device).copied().unwrap_or(0));
                worlds.insert(&quotas, pool, name, pod, (charge, Place::Waiting { nominated }));
            }
        }
        Some(worlds)
    }

    /// Returns whether a quota is enforced.
    pub(crate) fn are_enforced(&self) -> bool {
        self.pools.iter().any(|pool| pool.is_enforced)
    }

    /// Returns whether a node is in a pool.
    pub(super) fn has_node(&self, pool: usize, node: &str) -> bool {
        self.pool_of_node.get(node) == Some(&pool)
    }

    fn add_nodes<'a>(&mut self, cluster: &'a Cluster, quotas: &Quotas) -> Vec<NodeView<'a>> {
        let mut nodes = Vec::new();
        for node in cluster.gpu_nodes.iter().filter_map(|node| node.0.as_ref().ok()) {
            let (Some(name), Some(status)) = (node.metadata.name.as_deref(), &node.status) else { continue };
            let Some(pool) = status.gpus.first().and_then(|gpu| quotas.pool_of(&gpu.model)) else { continue };
            let PoolWorld { world, gpus, .. } = &mut self.pools[pool];
            let first_gpu = world.gpus.len();
            for gpu in &status.gpus {
                let whole = match quotas.pools[pool].unit {
                    Unit::Gpus => GPU,
                    Unit::Memory => Amount(gpu.memory_mib),
                };
                let at = world.gpus.len();
                world.gpus.push(if gpu.health.healthy { whole } else { Amount::ZERO });
                gpus.insert(gpu.uuid.clone(), at);
                gpus.extend(gpu.slices.iter().map(|slice| (slice.device.clone(), at)));
            }
            self.pool_of_node.insert(name.to_owned(), pool);
            nodes.push(NodeView { name, pool, costs: NodeCosts::new(node), first_gpu });
        }
        nodes
    }

    fn place_of(
        &self,
        pod: &PodObject,
        view: &NodeView<'_>,
        device: Option<&str>,
        is_evicted: &impl Fn(&str) -> bool,
    ) -> Place {
        let known = device.and_then(|device| self.pools[view.pool].gpus.get(device).copied());
        let gpu = known.unwrap_or(view.first_gpu);
        let seconds = |time: i64| u64::try_from(time).unwrap_or(0);
        if let Some(deleted) = &pod.metadata.deletion_timestamp {
            let held = self.now.0 < seconds(deleted.0.as_second()).saturating_add(HELD_AFTER_GRACE);
            return Place::Leaving { gpu, held };
        }
        if is_evicted(pod.metadata.uid.as_deref().unwrap_or_default()) {
            return Place::Leaving { gpu, held: true };
        }
        let released =
            pod.placement.as_ref().map(|placement| placement.until.saturating_sub(RESERVATION_TIME.as_secs()));
        Place::Running { gpu, since: Moment(released.unwrap_or_else(|| created(pod).0)) }
    }

    fn add_pod(&mut self, quotas: &Quotas, view: &NodeView<'_>, name: &str, pod: &PodObject, place: Place) {
        let unit = quotas.pools[view.pool].unit;
        if let Some(charge) = view.costs.cost(&pod.spec.device_requests, unit) {
            self.insert(quotas, view.pool, name, pod, (charge, place));
        }
    }

    fn insert(&mut self, quotas: &Quotas, pool: usize, name: &str, pod: &PodObject, (charge, place): (Amount, Place)) {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let PoolWorld { world, ids, .. } = &mut self.pools[pool];
        ids.insert(name.to_owned(), PodId(world.pods.len()));
        world.pods.push(Pod {
            name: name.to_owned(),
            owner: quotas.owner(pool, namespace),
            charge,
            priority: pod.spec.priority.unwrap_or(0),
            created: created(pod),
            place,
            borrows: !pod.never_borrows,
            preempts: pod.spec.preemption_policy.as_deref() != Some("Never"),
            protected: None,
            gang: None,
            gpus: None,
        });
    }
}

/// Returns the statuses of quotas that differ from those in the cluster.
pub(super) fn statuses<'a>(
    cluster: &Cluster,
    state: (&PodTracker, &Ledger),
    waiting: impl Iterator<Item = (&'a str, &'a PodObject)>,
    is_evicted: impl Fn(&str) -> bool,
    (settings, now): (&QuotaSettings, u64),
    waits: &BTreeMap<String, WaitingPod>,
) -> Vec<(String, GpuQuotaStatus)> {
    if cluster.quotas.is_empty() {
        return Vec::new();
    }
    let quotas = quotas_of(cluster, settings.unnamed);
    let worlds = QuotaWorlds::new(cluster, state, waiting, is_evicted, (settings, now));
    let pools = worlds.iter().flat_map(|worlds| &worlds.pools).zip(&quotas.pools);
    let views: Vec<PoolView<'_>> = pools
        .map(|(pool, of)| PoolView { world: &pool.world, book: Book::new(&pool.world, Moment(now)), unit: of.unit })
        .collect();
    let time = Timestamp::from_second(i64::try_from(now).unwrap_or(0)).unwrap_or_default();
    let objects = cluster.quotas.iter().filter_map(|object| object.0.as_ref().ok());
    let statuses = objects.filter_map(|quota| {
        let name = quota.metadata.name.as_deref()?;
        let view = views.iter().find(|view| view.world.quotas.contains_key(name));
        let status = status::status(quota, (view, quotas.problems.get(name)), waits, time);
        (quota.status.as_ref() != Some(&status)).then(|| (name.to_owned(), status))
    });
    statuses.collect()
}

fn created(pod: &PodObject) -> Moment {
    let seconds = pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
    Moment(u64::try_from(seconds).unwrap_or(0))
}

/// A waiting pod in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) pool: usize,
    id: PodId,
}

/// The turn of a waiting pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QuotaTurn {
    pub(super) member: Member,
    pub(super) rights: Rights,
    /// Whether room was kept for the pod before this turn.
    pub(super) was_nominated: bool,
    /// Whether the pod may use room that is free now.
    pub(super) may_use_free_room: bool,
    pub(super) rank: Rank,
}

/// Quotas within one reconcile.
pub(super) struct QuotaPass<'w> {
    worlds: &'w QuotaWorlds,
    books: Vec<Book<'w>>,
}

impl<'w> QuotaPass<'w> {
    /// Starts a reconcile. Sets the ranks of all nominated pods.
    pub(super) fn new(worlds: &'w QuotaWorlds, ledger: &mut Ledger) -> Self {
        let books = worlds.pools.iter().map(|pool| Book::new(&pool.world, worlds.now)).collect();
        let pass = Self { worlds, books };
        let nominated: Vec<String> = ledger.nominations().keys().cloned().collect();
        for name in nominated {
            if let Some(member) =
                pass.members(&name).into_iter().find(|member| pass.book(*member).class(member.id).is_some())
            {
                let is_within = pass.book(member).class(member.id) == Some(Class::In);
                ledger.set_rank(&name, pass.rank_of(member, is_within));
            }
        }
        pass
    }

    fn book(&self, member: Member) -> &Book<'w> {
        &self.books[member.pool]
    }

    fn pod(&self, member: Member) -> &'w Pod {
        self.worlds.pools[member.pool].world.pod(member.id)
    }

    fn rank_of(&self, member: Member, is_within: bool) -> Rank {
        // Numbers of accounts are per pool. Pods of different pools use different GPUs.
        Rank { quota: self.book(member).account(member.id) + 1, is_within, priority: self.pod(member).priority }
    }

    /// Returns a pod in the enforced pools whose GPUs it may use, the pool first in which it is
    /// within its guarantee.
    fn members(&self, name: &str) -> Vec<Member> {
        let pools = self.worlds.pools.iter().enumerate().filter(|(_, pool)| pool.is_enforced);
        let mut members: Vec<Member> =
            pools.filter_map(|(pool, world)| Some(Member { pool, id: *world.ids.get(name)? })).collect();
        if members.len() > 1 {
            members.sort_by_key(|member| {
                let book = self.book(*member);
                (book.class(member.id).is_none(), book.turn(member.id).0)
            });
        }
        members
    }

    /// Returns the positions of waiting pods in the order of their turns. `names` are sorted by
    /// priority and age.
    pub(super) fn queues(&self, names: impl Iterator<Item = impl AsRef<str>>) -> Queues {
        let mut queues = Queues::default();
        for (at, name) in names.enumerate() {
            match self.members(name.as_ref()).first() {
                Some(member) => {
                    let key = (member.pool, self.book(*member).account(member.id));
                    queues.by_account.entry(key).or_default().push_back((at, *member));
                }
                None => queues.others.push_back(at),
            }
        }
        queues
    }

    /// Takes the next waiting pod. Pods of pools without quotas come first: they use other GPUs.
    pub(super) fn next(&self, queues: &mut Queues) -> Option<usize> {
        if let Some(at) = queues.others.pop_front() {
            return Some(at);
        }
        let turn = |(_, member): &(usize, Member)| self.book(*member).turn(member.id);
        let first = queues.by_account.iter().filter_map(|(key, queue)| Some((turn(queue.front()?), *key))).min()?;
        queues.by_account.get_mut(&first.1)?.pop_front().map(|(at, _)| at)
    }

    /// Starts the turn of a waiting pod, whose nomination does not count meanwhile. Returns `None`
    /// if no quota concerns the pod.
    ///
    /// # Errors
    /// Returns why the pod must wait regardless of free room.
    pub(super) fn start_turn(&mut self, ledger: &mut Ledger, name: &str) -> Option<Result<QuotaTurn, QuotaWait>> {
        let members = self.members(name);
        let was_nominated = |member: &Member| self.book(*member).class(member.id).is_some();
        let nominated = members.iter().copied().find(was_nominated);
        if let Some(member) = nominated {
            self.books[member.pool].withdraw(member.id);
        }
        let member = nominated.or(members.first().copied())?;
        let book = self.book(member);
        let rights = match book.rights(member.id) {
            Ok(rights) => rights,
            Err(wait) => return Some(Err(self.wait(member, wait))),
        };
        let rank = self.rank_of(member, book.class_with(member.id, 0, &[]) == Class::In);
        ledger.set_rank(name, rank);
        let may_use_free_room = !rights.is_over_max && (nominated.is_some() || book.leaves_kept_room(member.id));
        Some(Ok(QuotaTurn { member, rights, was_nominated: nominated.is_some(), may_use_free_room, rank }))
    }

    fn gpu(&self, member: Member, device: Option<&str>) -> usize {
        device.and_then(|device| self.worlds.pools[member.pool].gpus.get(device).copied()).unwrap_or(0)
    }

    /// Records that a waiting pod is released to a device.
    pub(super) fn release(&mut self, member: Member, fits: &Fits) {
        let device = fits.iter().next().and_then(|fit| fit.reservations().first()).map(|take| take.device.as_str());
        let gpu = self.gpu(member, device);
        self.books[member.pool].release(member.id, gpu);
    }

    /// Records that room is kept for a waiting pod, and that its victims are evicted.
    pub(super) fn nominate(&mut self, member: Member, found: &Preemption) {
        let gpu = self.gpu(member, found.takes.first().map(|take| take.device.as_str()));
        for victim in self.victims(member, found) {
            self.books[member.pool].evict(victim);
        }
        self.books[member.pool].nominate(member.id, gpu);
    }

    /// Records that the nomination of a waiting pod is kept.
    pub(super) fn keep_nomination(&mut self, ledger: &Ledger, member: Member, name: &str) {
        let nomination = ledger.nominations().get(name);
        let device = nomination.and_then(|of| of.takes.first()).map(|take| take.device.as_str());
        let gpu = self.gpu(member, device);
        self.books[member.pool].nominate(member.id, gpu);
    }

    /// Returns whether a node is in the pool of a waiting pod.
    pub(super) fn has_node(&self, member: Member, node: &str) -> bool {
        self.worlds.has_node(member.pool, node)
    }

    fn victims(&self, member: Member, found: &Preemption) -> Vec<PodId> {
        let ids = &self.worlds.pools[member.pool].ids;
        found.victims.iter().filter_map(|name| ids.get(name).copied()).collect()
    }

    /// Returns the ways in which a waiting pod may make room, in order.
    pub(super) fn kinds(&self, turn: &QuotaTurn) -> impl Iterator<Item = Kind> + use<> {
        let rights = if turn.rights.is_within { Kind::Reclaim } else { Kind::FairShare };
        let is_enforced = self.book(turn.member).quota(turn.member.id).is_enforced();
        let rights = (!turn.rights.is_over_max && is_enforced).then_some(rights);
        rights.into_iter().chain([Kind::Priority])
    }

    /// Returns the pods that may be evicted for a waiting pod, and pods that terminate. Their
    /// priorities are their positions in the order in which they leave.
    pub(super) fn holders<'h>(&self, kind: Kind, member: Member, all: &Holders<'h>) -> Holders<'h> {
        let (book, ids) = (self.book(member), &self.worlds.pools[member.pool].ids);
        let may_leave = |name: &str, holder: &Holder<'_>| {
            let id = ids.get(name).copied()?;
            (!holder.ending && book.may_leave(kind, member.id, id)).then_some(id)
        };
        let in_pool = || all.pods.iter().filter(|(node, _)| self.has_node(member, node));
        let mut order: Vec<_> = in_pool()
            .flat_map(|(_, pods)| pods.iter().filter_map(|(name, holder)| may_leave(name, holder)))
            .map(|id| book.importance(id))
            .collect();
        order.sort_unstable();
        order.dedup();
        let position = |id: PodId| {
            order.binary_search(&book.importance(id)).map_or(0, |at| i32::try_from(at).unwrap_or(i32::MAX - 1))
        };
        let mut holders = Holders { pods: BTreeMap::new(), budgets: all.budgets.clone() };
        for (node, pods) in in_pool() {
            let allowed = pods.iter().filter_map(|(name, holder)| {
                let holder = match may_leave(name, holder) {
                    Some(id) => {
                        Holder { priority: position(id), started: book.since(id).unwrap_or(holder.started), ..*holder }
                    }
                    None if holder.ending => *holder,
                    None => return None,
                };
                Some((name.clone(), holder))
            });
            holders.pods.insert(node.clone(), allowed.collect());
        }
        holders
    }

    /// Returns how long a disruption budget may keep a borrower from leaving for a guarantee.
    pub(super) fn budget_patience(&self, member: Member) -> Option<Duration> {
        self.worlds.pools[member.pool].world.settings.budget_patience.map(Duration::from_secs)
    }

    /// Returns the maximum grace period of an evicted pod.
    pub(super) fn grace_cap(&self, member: Member) -> Duration {
        Duration::from_secs(self.worlds.pools[member.pool].world.settings.grace_cap)
    }

    /// Explains an eviction to the owner of the evicted pod.
    pub(super) fn eviction_message(&self, kind: Kind, member: Member) -> String {
        let (book, pod) = (self.book(member), self.pod(member));
        let (used, min) = (book.used(member.id), book.quota(member.id).min());
        let owner = match &pod.owner {
            Owner::Quota(name) => format!("quota {name}"),
            Owner::Unnamed | Owner::Outside => "the namespaces without a quota".to_owned(),
        };
        match kind {
            Kind::Reclaim => {
                format!("{owner} is guaranteed {min} GPUs and uses {used} with the pod; this pod borrowed")
            }
            Kind::FairShare => format!("{owner} borrows less than this pod's quota for its weight, even with the pod"),
            Kind::Priority => format!("the pod of {owner} has a higher priority"),
        }
    }

    /// Returns whether the rules permit an exchange.
    pub(super) fn is_legal(&self, kind: Kind, member: Member, found: &Preemption) -> bool {
        let gpu = self.gpu(member, found.takes.first().map(|take| take.device.as_str()));
        self.book(member).is_legal(kind, member.id, gpu, &self.victims(member, found))
    }

    /// Returns the least important pods of a waiting pod's own quota without which the quota stays
    /// within its maximum. Returns `None` if that is not possible or not allowed. The pod then uses
    /// room that is free.
    pub(super) fn victims_for_max(&self, member: Member, all: &Holders<'_>, found: Preemption) -> Option<Preemption> {
        let (book, ids) = (self.book(member), &self.worlds.pools[member.pool].ids);
        let max = book.quota(member.id).max()?;
        let mut own: Vec<(i32, std::cmp::Reverse<Moment>, &str, PodId)> = all
            .pods
            .values()
            .flatten()
            .filter(|(_, holder)| {
                !holder.ending
                    && holder.budget.is_none_or(|budget| all.budgets.get(budget).is_some_and(|left| *left > 0))
            })
            .filter_map(|(name, _)| Some((name.as_str(), *ids.get(name)?)))
            .filter(|(_, id)| book.may_leave(Kind::Priority, member.id, *id))
            .map(|(name, id)| {
                let pod = self.worlds.pools[member.pool].world.pod(id);
                (pod.priority, std::cmp::Reverse(book.since(id).unwrap_or(pod.created)), name, id)
            })
            .collect();
        own.sort_unstable();
        let mut after = book.used(member.id).plus(self.pod(member).charge);
        let mut victims = Vec::new();
        for (_, _, name, id) in own {
            if after <= max {
                break;
            }
            after = after.minus(self.worlds.pools[member.pool].world.pod(id).charge);
            victims.push(name.to_owned());
        }
        let found = Preemption { victims, ..found };
        (after <= max && self.is_legal(Kind::Priority, member, &found)).then_some(found)
    }

    /// Explains why a waiting pod waits that has had its turn. Returns `None` if the placement
    /// search explains it: no quota keeps the pod from room.
    pub(super) fn why(&self, turn: &QuotaTurn, prospect: PreemptionProspect) -> Option<QuotaWait> {
        if !self.book(turn.member).quota(turn.member.id).is_enforced() && turn.may_use_free_room {
            return None;
        }
        let wait = match prospect {
            PreemptionProspect::Nominated => Wait::Nominated,
            PreemptionProspect::Protected => Wait::Protected,
            _ if turn.rights.is_over_max => Wait::OverMax,
            PreemptionProspect::Unknown => Wait::Later,
            PreemptionProspect::Impossible => Wait::NoRoom,
        };
        Some(self.wait(turn.member, wait))
    }

    /// Explains why a waiting pod waits.
    fn wait(&self, member: Member, wait: Wait) -> QuotaWait {
        let (book, pod) = (self.book(member), self.pod(member));
        let quota: &Quota = book.quota(member.id);
        let used = book.used(member.id);
        let name = match &pod.owner {
            Owner::Quota(name) => format!("quota {name}"),
            Owner::Unnamed | Owner::Outside => "the namespaces without a quota".to_owned(),
        };
        let (asks, min) = (pod.charge, quota.min());
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
                format!("pods terminate to make room for the pod; {name} uses {used} GPUs with it, guaranteed {min}")
            }
            Wait::Protected => "only pods that disruption budgets protect could be evicted for the pod".to_owned(),
            _ if book.turn(member.id).0.is_none() => format!(
                "within the guarantee of {name} ({used} of {min} GPUs used, requests {asks}): no GPU can be freed now"
            ),
            _ => {
                let kept = book.kept_from(member.id);
                let kept = if kept == Amount::ZERO {
                    String::new()
                } else {
                    format!("; {kept} unlent GPUs of other quotas are kept free")
                };
                format!("borrows: {name} uses {used} GPUs, guaranteed {min}{kept}")
            }
        };
        QuotaWait { wait, message }
    }
}

/// The order in which waiting pods have their turns.
#[derive(Debug)]
pub(super) enum Order {
    /// By priority and age.
    Sorted(std::ops::Range<usize>),
    /// By the rules of quotas.
    ByQuota(Queues),
}

impl Order {
    /// `names` are sorted by priority and age.
    pub(super) fn new<'n>(quotas: Option<&QuotaPass<'_>>, names: impl ExactSizeIterator<Item = &'n str>) -> Self {
        match quotas {
            None => Self::Sorted(0..names.len()),
            Some(pass) => Self::ByQuota(pass.queues(names)),
        }
    }

    /// Returns the position of the next candidate.
    pub(super) fn next(&mut self, quotas: Option<&QuotaPass<'_>>) -> Option<usize> {
        match (self, quotas) {
            (Self::Sorted(rest), _) => rest.next(),
            (Self::ByQuota(queues), Some(pass)) => pass.next(queues),
            (Self::ByQuota(_), None) => None,
        }
    }
}

/// Why a pod waits because of quotas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct QuotaWait {
    wait: Wait,
    message: String,
}

impl QuotaWait {
    /// Returns the explanation for the pod's owner.
    pub(super) fn into_waiting_pod(self) -> WaitingPod {
        let reason = match self.wait {
            Wait::OverMax | Wait::LargerThanMax => Reason::OverMax,
            Wait::WaitsForGuarantee => Reason::WaitsForGuarantee,
            Wait::Protected => Reason::Protected,
            _ => Reason::NoRoom,
        };
        let mut message = self.message;
        if let Some(first) = message.get(..1).map(str::to_uppercase) {
            message.replace_range(..1, &first);
        }
        WaitingPod { reason, message }
    }
}

/// Waiting pods by the account whose rights they have.
#[derive(Debug, Default)]
pub(super) struct Queues {
    by_account: BTreeMap<(usize, usize), VecDeque<(usize, Member)>>,
    others: VecDeque<usize>,
}

/// Returns the grace period of an evicted pod: its own, but not more than the cap.
pub(super) fn capped_grace(pod: &PodObject, cap: Duration) -> Option<u32> {
    let own = u64::try_from(pod.spec.termination_grace_period_seconds.unwrap_or(30)).unwrap_or(30);
    (own > cap.as_secs()).then(|| u32::try_from(cap.as_secs()).unwrap_or(u32::MAX))
}
