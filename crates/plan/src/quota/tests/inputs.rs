//! Tests that classes and passes depend only on the pool (properties R7 to R11).
use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::room::Rank;
use super::super::state::State;
use super::super::{Amount, Class, Kind, Mode, Outcome, Owner, Place, Pod, PodId, Wait, World, look};
use super::config;
use super::naive::Pool;
use super::steps::{each_pass, steps};
use super::worlds::{ANY, Run, Start, count, describe, histories, worlds};
use crate::ledger::{
    Allocation, DeviceFacts, DeviceRequest, Holder, Holders, Ledger, Moment, NodeFacts, PendingPod, Units,
};

/// An outcome with names instead of positions, for the pods that a filter accepts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    released: Vec<(String, usize)>,
    exchanges: Vec<(Kind, String, Vec<String>)>,
    nominations: BTreeMap<String, usize>,
    waits: BTreeMap<String, Wait>,
    classes: BTreeMap<String, Option<Class>>,
}

pub(super) fn named(world: &World, outcome: &Outcome, of: impl Fn(&Pod) -> bool) -> Named {
    let name = |id: PodId| world.pod(id).name.clone();
    let is_included = |id: &PodId| of(world.pod(*id));
    let released = outcome.released.iter().filter(|released| is_included(&released.pod));
    let exchange = |one: &super::super::Exchange| {
        (one.kind, name(one.taker), one.victims.iter().map(|victim| name(*victim)).collect())
    };
    let classes = world.pods.iter().zip(&outcome.classes).filter(|(pod, _)| of(pod));
    Named {
        released: released.map(|released| (name(released.pod), released.gpu)).collect(),
        exchanges: outcome.exchanges.iter().filter(|one| is_included(&one.taker)).map(exchange).collect(),
        nominations: outcome
            .nominations
            .iter()
            .filter(|(id, _)| is_included(id))
            .map(|(id, gpu)| (name(*id), *gpu))
            .collect(),
        waits: outcome.waits.iter().filter(|(id, _)| is_included(id)).map(|(id, wait)| (name(*id), *wait)).collect(),
        classes: classes.map(|(pod, class)| (pod.name.clone(), *class)).collect(),
    }
}

/// Checks that a state equals the state that is built from its pods.
pub(super) fn assert_rebuilt(kept: &State<'_>, pool: &Pool) {
    let rebuilt = State::new(&pool.world, pool.now);
    let show = || describe(&pool.world);
    for account in 0..kept.accounts.len() {
        let sums = |state: &State<'_>| {
            let accounts = &state.accounts;
            let owned: Vec<bool> = (0..state.gpus.len()).map(|gpu| accounts.owns(account, gpu)).collect();
            let excess = accounts.excess(account, Amount::ZERO, Amount::ZERO);
            (accounts.used(account), accounts.held(account), excess, owned)
        };
        assert_eq!(sums(kept), sums(&rebuilt), "account {account}: {}", show());
    }
    for pod in (0..pool.world.pods.len()).map(PodId) {
        let facts = |state: &State<'_>| {
            let accounts = &state.accounts;
            let waits = matches!(pool.world.pod(pod).place, Place::Waiting { nominated: None });
            let within = waits.then(|| accounts.is_within(pod));
            (accounts.class(pod), accounts.since(pod), state.gpu_of(pod), state.nominated(pod), within)
        };
        assert_eq!(facts(kept), facts(&rebuilt), "{}", show());
    }
    // A pod of the lowest rank must respect all nominations.
    let lowest = Rank { account: usize::MAX, class: Class::Over, priority: i32::MIN, overriding: None };
    for (one, other) in kept.gpus.iter().zip(&rebuilt.gpus) {
        let pods = |room: &super::super::room::GpuRoom| room.pods.iter().copied().collect::<BTreeSet<PodId>>();
        let free = |room: &super::super::room::GpuRoom| {
            (room.free_with_reserved(&lowest), room.free_later_with_reserved(&lowest))
        };
        assert_eq!(free(one), free(other), "{}", show());
        assert_eq!(pods(one), pods(other), "{}", show());
    }
}

/// Returns the victims that the ledger's preemption evicts for a pod in a pool without quotas.
fn without_quotas(world: &World, pod: &Pod) -> Option<Vec<String>> {
    let units = |amount: Amount| Units::new(u32::try_from(amount.0 / super::worlds::TENTH).unwrap()).unwrap();
    let (mut ledger, mut holders) = (Ledger::default(), Holders::default());
    let device = |gpu: usize| format!("gpu{gpu}");
    let mut facts = NodeFacts { model: "m".to_owned(), devices: Vec::new(), allocations: Vec::new() };
    let mut used = vec![0; world.gpus.len()];
    let mut known = BTreeMap::new();
    for other in &world.pods {
        let Place::Running { gpu, since } = other.place else { continue };
        let units = units(other.charge);
        used[gpu] += units.get();
        facts.allocations.push(Allocation {
            pod: other.name.clone(),
            resource: "shares".to_owned(),
            device: device(gpu),
            units,
        });
        if other.priority < 2_000_000_000 {
            let holder =
                Holder { priority: other.priority, started: since, budget: None, ending: false, requests: None };
            known.insert(other.name.clone(), holder);
        }
    }
    for (gpu, used) in used.into_iter().enumerate() {
        let capacity = u32::try_from(world.gpus[gpu].0 / super::worlds::TENTH).unwrap();
        facts.devices.push(DeviceFacts { device: device(gpu), resource: "shares".to_owned(), capacity, used });
    }
    holders.pods.insert("n".to_owned(), known);
    ledger.observe("n", facts);
    let requests = [DeviceRequest { resource: "shares".to_owned(), units: units(pod.charge) }];
    let pending = PendingPod { pod: &pod.name, priority: pod.priority, device_requests: &requests };
    ledger.preempt(pending, ["n"], &holders, &BTreeSet::new()).map(|preemption| preemption.victims)
}

proptest! {
    #![proptest_config(config())]

    /// Pods within a guarantee never use more than the guarantee.
    #[test]
    fn r7_pods_within_a_guarantee_use_no_more_than_the_guarantee(history in histories()) {
        each_pass(&history, |run, outcome| {
            let mut after = run.clone();
            after.apply(outcome);
            let pool = Pool::at(after.world, run.now);
            for owner in pool.owners().into_iter().filter(|owner| pool.quota(owner).is_enforced()) {
                let quota = pool.quota(&owner);
                let is_within = |pod: &usize| pool.owner(*pod) == owner && outcome.classes[*pod] == Some(Class::In);
                let gpus: BTreeSet<Option<usize>> = pool.pods().filter(is_within).map(|pod| pool.counts_on(pod)).collect();
                match quota.cells() {
                    Some(cells) => assert!(gpus.len() <= cells, "{pool:?}"),
                    None => assert!(pool.sum(|pod| is_within(&pod)) <= quota.min(), "{pool:?}"),
                }
            }
        });
    }

    /// A pass makes the same decisions for the same pods in another order.
    #[test]
    fn r7_the_order_of_the_input_does_not_matter(history in histories(), rotation in any::<usize>()) {
        each_pass(&history, |run, outcome| {
            let mut other = run.world.clone();
            let length = other.pods.len().max(1);
            other.pods.rotate_left(rotation % length);
            if rotation % 2 == 1 {
                other.pods.reverse();
            }
            let all = |_: &Pod| true;
            let shuffled = look(&other, run.now);
            assert_eq!(named(&run.world, outcome, all), named(&other, &shuffled, all), "{}", describe(&run.world));
        });
    }

    /// After each decision, the state equals the state that another leader would compute from the
    /// pods.
    #[test]
    fn r8_the_state_depends_only_on_the_pods(history in histories()) {
        let mut run = Run::new(history.start.0.clone());
        for event in &history.events {
            let (_, outcome) = steps(&run.world, run.now, assert_rebuilt);
            run.apply(&outcome);
            run.happen(event);
        }
    }

    /// The pool comes to rest although the leader changes often, and each change causes at most one
    /// more eviction of a pod.
    #[test]
    fn r8_the_pool_comes_to_rest_although_leaders_change(Start(start) in worlds(&ANY), changes in vec(any::<bool>(), 5)) {
        let mut run = Run::new(start);
        let mut evicted = Vec::new();
        for pass in 0..60 {
            let outcome = look(&run.world, run.now);
            let name = |id: &PodId| run.world.pod(*id).name.clone();
            evicted.extend(outcome.exchanges.iter().flat_map(|one| &one.victims).map(name));
            let before = run.world.clone();
            run.apply(&outcome);
            if changes.get(pass) == Some(&true) {
                run.forget_nominations();
            } else if run.world == before && !run.world.pods.iter().any(|pod| matches!(pod.place, Place::Leaving { .. })) {
                let times = count(evicted.iter());
                let limit = 2 + changes.iter().filter(|is_lost| **is_lost).count();
                prop_assert!(times.values().all(|times| *times <= limit), "{times:?}");
                return Ok(());
            }
            if pass % 2 == 1 {
                run.replace(true);
            }
        }
        prop_assert!(false, "no rest: {}", describe(&run.world));
    }

    /// Two kinds of pods have no effect on other pods: pods that fit on no GPU, and pods that must
    /// not borrow and are not within the guarantee. Pods with a reservation are an exception.
    #[test]
    fn r9_pods_that_cannot_be_released_have_no_effect_on_other_pods(history in histories()) {
        each_pass(&history, |run, outcome| {
            let pool = Pool::at(run.world.clone(), run.now);
            let is_hopeless = |id: &PodId, wait: &Wait| match wait {
                Wait::NoGpuFits => true,
                Wait::WaitsForGuarantee => !pool.is_within(id.0),
                _ => false,
            } && pool.world.pod(*id).place == Place::Waiting { nominated: None }
                && run.world.settings.ageing.is_none_or(|ageing| run.now.0 < pool.world.pod(*id).created.0 + ageing);
            let hopeless: BTreeSet<&str> = outcome.waits.iter().filter(|(id, wait)| is_hopeless(id, wait)).map(|(id, _)| run.world.pod(*id).name.as_str()).collect();
            let is_other = |pod: &Pod| !hopeless.contains(pod.name.as_str());
            let mut other = run.world.clone();
            other.pods.retain(is_other);
            let all = |_: &Pod| true;
            let without = look(&other, run.now);
            assert_eq!(named(&run.world, outcome, is_other), named(&other, &without, all), "{}", describe(&run.world));
        });
    }

    /// Without quotas, pods are evicted only for pods of higher priority. The ledger's preemption
    /// agrees whether a pod can evict others, and about the highest priority of the victims.
    #[test]
    fn r10_without_quotas_priority_alone_decides(Start(mut world) in worlds(&ANY)) {
        world.quotas.clear();
        world.pods.retain(|pod| pod.protected.is_none() && pod.owner != Owner::Outside);
        let now = Moment(world.pods.len() as u64 + 1);
        let (steps, _) = steps(&world, now, |_, _| {});
        let first = steps.iter().find(|step| step.released.is_none());
        let Some(step) = first.filter(|step| world.pod(step.pod).preempts && world.pod(step.pod).borrows) else { return Ok(()) };
        let pod = step.before.world.pod(step.pod);
        let priority = |name: &String| step.before.world.pods.iter().find(|pod| pod.name == *name).map(|pod| pod.priority);
        let expected = without_quotas(&step.before.world, pod);
        let exchange = step.exchange.as_ref();
        prop_assert!(exchange.is_none_or(|exchange| exchange.kind == Kind::Priority));
        prop_assert_eq!(exchange.is_some(), expected.is_some(), "{}", describe(&world));
        let actual = exchange.and_then(|exchange| exchange.victims.iter().map(|id| world.pod(*id).priority).max());
        prop_assert_eq!(actual, expected.and_then(|names| names.iter().filter_map(priority).max()));
    }

    /// A quota with mode `Count` has no effect on decisions: its pods are treated like exempt pods.
    #[test]
    fn r11_a_quota_that_only_counts_has_no_effect_on_decisions(history in histories()) {
        each_pass(&history, |run, outcome| {
            let mut other = run.world.clone();
            let quotas = &run.world.quotas;
            let counts = |owner: &Owner| matches!(owner, Owner::Quota(name) if quotas.get(name).is_some_and(|quota| !quota.is_enforced()));
            for pod in &mut other.pods {
                if counts(&pod.owner) {
                    pod.owner = Owner::Outside;
                }
            }
            other.quotas.retain(|_, quota| quota.is_enforced());
            let mut without = look(&other, run.now);
            for (class, pod) in without.classes.iter_mut().zip(&run.world.pods).zip(&outcome.classes).filter_map(|((class, pod), with)| counts(&pod.owner).then_some((class, with))) {
                *class = *pod;
            }
            assert_eq!(*outcome, without, "{}", describe(&run.world));
        });
    }
}

/// Pods of a quota that only counts have classes too.
#[test]
fn r11_pods_of_a_quota_that_only_counts_have_classes() {
    let quota = super::super::Quota::new(super::worlds::tenths(5)).with_mode(Mode::Count);
    let pod = |name: &str| Pod {
        name: name.to_owned(),
        owner: Owner::Quota("a".to_owned()),
        charge: super::worlds::tenths(5),
        priority: 0,
        created: Moment(0),
        place: Place::Running { gpu: 0, since: Moment(0) },
        borrows: true,
        preempts: true,
        protected: None,
        gang: None,
        pieces: Vec::new(),
        gpus: None,
    };
    let world = World {
        gpus: vec![super::worlds::tenths(10)],
        quotas: BTreeMap::from([("a".to_owned(), quota)]),
        pods: vec![pod("a1"), pod("a2")],
        settings: super::worlds::settings(),
    };
    assert_eq!(look(&world, Moment(1)).classes, [Some(Class::In), Some(Class::Over)]);
}
