//! Evicts pods for waiting pods.
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::Event;

use super::PlacementController;
use crate::events;
use crate::evict::{self, EvictionOptions, EvictionResult};
use crate::metrics::{NO_QUOTA, Outcome};
use crate::placement::actions::{Actions, Eviction};
use crate::placement::gang_evictions::GangResults;
use crate::write::{MAX_IN_FLIGHT, WRITE_TIMEOUT, publish_all};

/// Maximum number of times that the evictions of one waiting pod wait because the API server limits
/// requests. Releases wait meanwhile.
const MAX_RETRIES: u32 = 3;
/// Maximum time of one such wait.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);

impl PlacementController {
    /// Evicts pods for waiting pods. Returns false if any of the victims was not evicted.
    ///
    /// If one victim cannot be evicted, the preemptor's other victims are not evicted. Therefore
    /// pods that a disruption budget may protect are evicted first, one after the other. The others
    /// are evicted together: a gang can have many pods.
    pub(super) async fn evict_all(&mut self, actions: &Actions) -> bool {
        if actions.evictions.is_empty() || !self.context.claim.is_current() {
            return true;
        }
        let unwritten = self.write_nominations(&actions.kept).await;
        let (mut are_all_evicted, mut is_throttled, mut events) = (true, false, Vec::new());
        let mut of_gangs = GangResults::default();
        for victims in actions.evictions.chunk_by(|one, next| one.preemptor == next.preemptor) {
            let is_unwritten = victims.first().is_some_and(|first| unwritten.contains(first.preemptor.as_str()));
            if is_throttled || is_unwritten {
                are_all_evicted = false;
                continue;
            }
            for (eviction, result) in self.evict_for_one(victims).await {
                self.keeper.record_eviction(eviction, &result, self.started.elapsed());
                of_gangs.record(eviction, &result);
                events.extend(self.report_eviction(eviction, &result));
                is_throttled |= matches!(result, EvictionResult::Throttled(_));
                are_all_evicted &= !is_failure(&result);
            }
        }
        let corrected = of_gangs.correct(&actions.kept);
        if self.context.claim.is_current() {
            are_all_evicted &= self.write_nominations(&corrected).await.is_empty();
        }
        publish_all(&self.context.recorder, &self.context.claim, events).await;
        are_all_evicted
    }

    /// Evicts the victims of one preemptor. Returns the results of the requests that were sent.
    async fn evict_for_one<'e>(&self, victims: &'e [Eviction]) -> Vec<(&'e Eviction, EvictionResult)> {
        let (limited, others): (Vec<&Eviction>, Vec<&Eviction>) =
            victims.iter().partition(|eviction| eviction.may_be_refused && !is_deletion(eviction));
        let may_write = || self.context.claim.is_current();
        let evict = |eviction| self.evict_one(eviction);
        let mut results = evict_until_failure(limited, 1, may_write, evict).await;
        if !results.iter().any(|(_, result)| is_failure(result)) {
            results.extend(evict_together(others, may_write, evict).await);
        }
        results
    }

    async fn evict_one(&self, eviction: &Eviction) -> EvictionResult {
        let Eviction { pod, uid, quota, .. } = eviction;
        let grace = quota.as_ref().and_then(|quota| quota.grace);
        let options = EvictionOptions { grace, timeout: WRITE_TIMEOUT };
        if is_deletion(eviction) {
            evict::delete(&self.context.client, pod, uid, options).await
        } else {
            evict::evict_with(&self.context.client, pod, uid, options).await
        }
    }

    /// Logs and counts the result of an eviction. Returns the Event about the evicted pod.
    fn report_eviction(&self, eviction: &Eviction, result: &EvictionResult) -> Option<(ObjectReference, Event)> {
        let Eviction { pod, uid, preemptor, quota, .. } = eviction;
        self.context.metrics.evictions.get_or_create(&Outcome { result: result.as_str() }).inc();
        match result {
            EvictionResult::Done => {
                tracing::info!(pod, preemptor, "preempted a pod");
                let event = match quota {
                    Some(quota) => {
                        let name = |quota: &Option<String>| quota.clone().unwrap_or_else(|| NO_QUOTA.to_owned());
                        let (from, to) = (name(&quota.from), name(&quota.to));
                        self.context.metrics.quotas.count_eviction(&from, &to, quota.kind.name());
                        events::reclaimed_event(preemptor, &quota.message)
                    }
                    None => events::preempted_event(preemptor),
                };
                return Some((events::pod_reference(pod, uid), event));
            }
            EvictionResult::NotFound => {}
            EvictionResult::Protected(message) => {
                tracing::info!(pod, preemptor, message, "a disruption budget prevented an eviction");
            }
            EvictionResult::Refused(message) => {
                tracing::warn!(pod, preemptor, message, "the API server refused to evict a pod");
            }
            EvictionResult::Throttled(after) => {
                tracing::warn!(pod, preemptor, seconds = after.as_secs(), "the API server limits evictions");
            }
            EvictionResult::Failed(error) => tracing::warn!(pod, preemptor, error, "failed to evict a pod"),
        }
        None
    }
}

/// Returns whether the operator deletes the pod, so that disruption budgets do not protect it.
fn is_deletion(eviction: &Eviction) -> bool {
    eviction.quota.as_ref().is_some_and(|quota| quota.force)
}

/// Returns whether a pod runs on after an eviction request.
const fn is_failure(result: &EvictionResult) -> bool {
    !matches!(result, EvictionResult::Done | EvictionResult::NotFound)
}

/// Evicts pods with `evict`, several at a time. If the API server limits requests after some of the
/// pods were evicted, waits and evicts the others: half a gang is useless.
async fn evict_together<'e, F: Future<Output = EvictionResult>>(
    mut left: Vec<&'e Eviction>,
    may_write: impl Fn() -> bool,
    evict: impl Fn(&'e Eviction) -> F,
) -> Vec<(&'e Eviction, EvictionResult)> {
    let mut results = Vec::new();
    for retries_left in (0..=MAX_RETRIES).rev() {
        let mut sent = evict_until_failure(left.clone(), MAX_IN_FLIGHT, &may_write, &evict).await;
        let delay = |(_, result): &(&Eviction, EvictionResult)| match result {
            EvictionResult::Throttled(after) => Some((*after).min(MAX_RETRY_DELAY)),
            _ => None,
        };
        let delay_of_all = sent.iter().filter_map(delay).max();
        let are_some_evicted = !results.is_empty() || sent.iter().any(|(_, result)| !is_failure(result));
        let retry = delay_of_all.filter(|_| retries_left > 0 && are_some_evicted);
        if retry.is_some() {
            sent.retain(|one| delay(one).is_none());
        }
        let done: BTreeSet<&str> = sent.iter().map(|(eviction, _)| eviction.uid.as_str()).collect();
        left.retain(|eviction| !done.contains(eviction.uid.as_str()));
        results.append(&mut sent);
        match retry {
            Some(delay) => tokio::time::sleep(delay).await,
            None => break,
        }
    }
    results
}

/// Evicts pods with `evict`, at most `concurrency` at a time. Sends no further request after one
/// has failed, or while `may_write` returns false. Returns the results of the requests.
async fn evict_until_failure<'e, F: Future<Output = EvictionResult>>(
    victims: Vec<&'e Eviction>,
    concurrency: usize,
    may_write: impl Fn() -> bool,
    evict: impl Fn(&'e Eviction) -> F,
) -> Vec<(&'e Eviction, EvictionResult)> {
    let has_failed = AtomicBool::new(false);
    let (has_failed, may_write, evict) = (&has_failed, &may_write, &evict);
    let requests: Vec<_> = victims
        .into_iter()
        .map(|eviction| async move {
            if has_failed.load(Ordering::Relaxed) || !may_write() {
                return None;
            }
            let result = evict(eviction).await;
            has_failed.fetch_or(is_failure(&result), Ordering::Relaxed);
            Some((eviction, result))
        })
        .collect();
    let results: Vec<_> = futures::stream::iter(requests).buffer_unordered(concurrency).collect().await;
    results.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn evictions(count: usize) -> Vec<Eviction> {
        let eviction = |at: usize| Eviction {
            pod: format!("team/p{at}"),
            uid: at.to_string(),
            preemptor: "team/a".to_owned(),
            may_be_refused: false,
            quota: None,
            gang: None,
        };
        (0..count).map(eviction).collect()
    }

    /// Evicts the pods of a gang. The eviction of the pod with the UID `refused` fails. Returns the
    /// number of requests, and the maximum number of requests at the same time.
    async fn evict_gang(count: usize, concurrency: usize, refused: &str) -> (usize, usize) {
        let evictions = evictions(count);
        let (in_flight, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let evict = |eviction: &'_ Eviction| {
            let is_refused = eviction.uid == refused;
            let (in_flight, most) = (&in_flight, &most);
            async move {
                most.fetch_max(in_flight.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                in_flight.fetch_sub(1, Ordering::Relaxed);
                if is_refused { EvictionResult::Refused("no".to_owned()) } else { EvictionResult::Done }
            }
        };
        let results = evict_until_failure(evictions.iter().collect(), concurrency, || true, evict).await;
        (results.len(), most.into_inner())
    }

    #[tokio::test]
    async fn the_pods_of_a_large_gang_are_evicted_together() {
        assert_eq!(evict_gang(1000, MAX_IN_FLIGHT, "").await, (1000, MAX_IN_FLIGHT));
    }

    #[tokio::test(start_paused = true)]
    async fn a_gang_is_evicted_completely_although_the_api_server_limits_requests() {
        let evictions = evictions(100);
        let sent = AtomicUsize::new(0);
        let evict = |_: &Eviction| {
            let number = sent.fetch_add(1, Ordering::Relaxed);
            let throttled = EvictionResult::Throttled(Duration::from_secs(1));
            std::future::ready(if number == 50 { throttled } else { EvictionResult::Done })
        };
        let results = evict_together(evictions.iter().collect(), || true, evict).await;
        let evicted: BTreeSet<&str> = results.iter().map(|(eviction, _)| eviction.uid.as_str()).collect();
        assert!(results.iter().all(|(_, result)| *result == EvictionResult::Done));
        assert_eq!((results.len(), evicted.len()), (100, 100));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_repeated_if_no_pod_was_evicted_or_the_limit_remains() {
        let evictions = evictions(100);
        let attempts = async |first: usize| {
            let sent = AtomicUsize::new(0);
            let evict = |_: &Eviction| {
                let number = sent.fetch_add(1, Ordering::Relaxed);
                let throttled = EvictionResult::Throttled(Duration::from_secs(1));
                std::future::ready(if number < first { EvictionResult::Done } else { throttled })
            };
            let results = evict_together(evictions.iter().collect(), || true, evict).await;
            results.iter().filter(|(_, result)| matches!(result, EvictionResult::Throttled(_))).count()
        };
        assert_eq!((attempts(0).await, attempts(50).await), (1, 1));
    }

    #[tokio::test]
    async fn after_a_refusal_no_further_pods_are_evicted() {
        assert_eq!(evict_gang(1000, 1, "3").await, (4, 1));
        let (requests, _) = evict_gang(1000, MAX_IN_FLIGHT, "3").await;
        assert!(requests < 4 + 2 * MAX_IN_FLIGHT, "{requests}");
    }
}
