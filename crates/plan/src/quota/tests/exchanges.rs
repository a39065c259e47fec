//! Tests the rules R1 to R4, which each decision follows.
use proptest::prelude::*;

use super::super::{Amount, Class, Kind, Owner};
use super::config;
use super::steps::each_step;
use super::worlds::histories;

proptest! {
    #![proptest_config(config())]

    /// After a pod of a quota is released, the quota's pods, including terminating pods, do not
    /// exceed the quota's maximum.
    #[test]
    fn r1_no_released_pod_exceeds_its_maximum(history in histories()) {
        each_step(&history, |step| {
            let owner = step.after.owner(step.pod.0);
            let quota = step.after.quota(&owner);
            let limit = quota.max().filter(|_| quota.is_enforced() && step.released.is_some());
            assert!(limit.is_none_or(|max| step.after.held(&owner) <= max), "{step:?}");
        });
    }

    /// A pod that is evicted for a pod of another quota was borrowing, is subject to quotas, is no
    /// component of the system, and has run for the minimum run time.
    #[test]
    fn r2_only_borrowing_pods_are_evicted_for_other_quotas(history in histories()) {
        each_step(&history, |step| {
            let Some(exchange) = &step.exchange else { return };
            let (pool, taker) = (&step.before, step.before.owner(step.pod.0));
            let (classes, settings) = (pool.classes(), &pool.world.settings);
            for victim in &exchange.victims {
                let (pod, owner) = (pool.world.pod(*victim), pool.owner(victim.0));
                assert!(pod.priority < 2_000_000_000, "{step:?}");
                let patience = settings.budget_patience.filter(|_| exchange.kind == Kind::Reclaim);
                let is_kept = |since: u64| patience.is_none_or(|patience| pool.now.0 < since + patience);
                assert!(pod.protected.is_none_or(|since| !is_kept(since.0)), "{step:?}");
                if exchange.kind == Kind::Priority {
                    let both_count = !pool.quota(&owner).is_enforced() && !pool.quota(&taker).is_enforced();
                    assert!(owner == taker || both_count, "{step:?}");
                    assert!(pod.priority < pool.world.pod(step.pod).priority, "{step:?}");
                    continue;
                }
                assert!(owner != taker && owner != Owner::Outside && pool.quota(&owner).is_enforced(), "{step:?}");
                assert_eq!(classes.of[&victim.0], Class::Over, "{step:?}");
                let min_runtime = if exchange.kind == Kind::FairShare { settings.min_runtime_fair_share } else { 0 };
                let since = pool.since(victim.0).0;
                assert!(since.0 + min_runtime <= pool.now.0, "{step:?}");
            }
        });
    }

    /// After a pod reclaims GPUs, it is within the guarantee: its quota uses no more than the
    /// guarantee, even with its terminating pods.
    #[test]
    fn r3_a_pod_that_reclaims_is_within_the_guarantee(history in histories()) {
        each_step(&history, |step| {
            if step.exchange.as_ref().is_none_or(|exchange| exchange.kind != Kind::Reclaim) {
                return;
            }
            let owner = step.after.owner(step.pod.0);
            let (quota, classes) = (step.after.quota(&owner), step.after.classes());
            assert_eq!(classes.of[&step.pod.0], Class::In, "{step:?}");
            match quota.cells() {
                Some(cells) => assert!(classes.cells(&owner) <= cells, "{step:?}"),
                None => assert!(step.after.held(&owner) <= quota.min(), "{step:?}"),
            }
        });
    }

    /// After an eviction for fair share, the share of the pod's quota is at most the share of each
    /// victim's quota, even with the terminating pods of the pod's quota.
    #[test]
    fn r4_fair_share_evicts_only_from_quotas_that_borrow_more_even_afterwards(history in histories()) {
        each_step(&history, |step| {
            let Some(exchange) = step.exchange.as_ref().filter(|exchange| exchange.kind == Kind::FairShare) else {
                return;
            };
            let share = |pod: usize| step.after.share(&step.after.owner(pod), Amount::ZERO, Amount::ZERO);
            let owner = step.after.owner(step.pod.0);
            let leaving = step.after.held(&owner).minus(step.after.used(&owner));
            for victim in &exchange.victims {
                assert!(step.after.share(&owner, leaving, Amount::ZERO) <= share(victim.0), "{step:?}");
            }
        });
    }
}
