//! The controller that reports pods that use a GPU outside their share, and evicts them.
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::decide::{EVICTION_RETRY_DELAY, Eviction, FindingTracker};
use crate::events;
use crate::evict::{EvictionResult, evict};
use crate::metrics::Outcome;
use crate::pod_condition::write;
use crate::task::{Context, Controller, Trigger};
use crate::watches::Wakers;
use crate::write::publish;

/// Time to wait for further changes after the first one.
const BATCH_WINDOW: Duration = Duration::from_millis(200);

/// Writes the conditions of pods and evicts pods, according to the decisions of [`FindingTracker`].
pub(crate) struct TenantController {
    context: Context,
    wakes: Wakers,
    tracker: FindingTracker,
    /// UIDs of pods for which an Event already reports that a disruption budget protects the pod.
    protected: BTreeSet<String>,
    started: Instant,
}

impl TenantController {
    pub(crate) fn new(context: Context, wakes: Wakers) -> Self {
        Self { context, wakes, tracker: FindingTracker::default(), protected: BTreeSet::new(), started: Instant::now() }
    }

    /// Evicts a pod and reports the eviction. If a disruption budget prevents the eviction, reports
    /// the refusal once.
    async fn evict(&mut self, eviction: &Eviction) {
        let Eviction { pod, uid, node, message } = eviction;
        let evicted = evict(&self.context.client, pod, uid).await;
        self.context.metrics.tenant_evictions.get_or_create(&Outcome { result: evicted.as_str() }).inc();
        let event = match evicted {
            EvictionResult::Done => {
                tracing::info!(pod, node, message, "evicted a pod that exceeded its limits");
                events::outside_share_event(node, message)
            }
            EvictionResult::Protected(why) => {
                tracing::info!(
                    pod,
                    node,
                    why,
                    "a disruption budget prevented the eviction of a pod that exceeded its limits"
                );
                if !self.protected.insert(uid.clone()) {
                    return;
                }
                events::protected_event(&why)
            }
            EvictionResult::NotFound => return,
            EvictionResult::Throttled(_) => return tracing::warn!(pod, node, "the API server limits evictions"),
            EvictionResult::Refused(error) | EvictionResult::Failed(error) => {
                return tracing::warn!(pod, node, error, "failed to evict a pod that exceeded its limits");
            }
        };
        publish(&self.context.recorder, &event, &events::pod_reference(pod, uid)).await;
    }
}

impl Controller for TenantController {
    fn batch_window(&mut self) -> Duration {
        BATCH_WINDOW
    }

    async fn reconcile(&mut self, _: Trigger) -> Option<Duration> {
        if !self.context.claim.is_current() {
            self.tracker.reset();
            return None;
        }
        let (nodes, pods) = (self.context.stores.gpu_nodes.state(), self.context.stores.pods.state());
        let actions = self.tracker.decide(&nodes, &pods, self.started.elapsed());
        self.wakes.set_has_tenants(!self.tracker.is_idle());
        let mut requeue = actions.next;
        for update in &actions.conditions {
            if !self.context.claim.is_current() {
                return requeue;
            }
            let done =
                write(&self.context.client, (&update.pod, &update.uid), &update.condition, update.status_changed).await;
            self.context
                .metrics
                .tenant_conditions
                .get_or_create(&Outcome { result: if done { "ok" } else { "failed" } })
                .inc();
            if done {
                self.tracker.record_write(update, self.started.elapsed());
            } else {
                requeue = Some(requeue.map_or(EVICTION_RETRY_DELAY, |requeue| requeue.min(EVICTION_RETRY_DELAY)));
            }
        }
        for eviction in &actions.evictions {
            if !self.context.claim.is_current() {
                return requeue;
            }
            self.evict(eviction).await;
        }
        self.protected
            .retain(|uid| actions.next.is_some() && pods.iter().any(|pod| pod.metadata.uid.as_deref() == Some(uid)));
        requeue
    }
}

#[cfg(test)]
mod tests {
    use cleave_api::names::CONDITION_WITHIN_SHARE;
    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower_test::mock::Handle;

    use super::super::decide::ConditionUpdate;
    use super::*;
    use crate::pods::PodCondition;

    type Server = Handle<Request<Body>, Response<Body>>;

    fn mock_client() -> (Client, Server) {
        let (service, server) = tower_test::mock::pair();
        (Client::new(service, "default"), server)
    }

    /// Answers the next request. Returns the request's method and URI, its content type, and its
    /// body.
    async fn answer_request(server: &mut Server, code: u16) -> (String, String, Value) {
        let (request, reply) = server.next_request().await.unwrap();
        let (parts, body) = request.into_parts();
        let kind = parts.headers.get(http::header::CONTENT_TYPE).map(|kind| kind.to_str().unwrap().to_owned());
        let body = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
        let details = json!({"causes": [{"reason": "DisruptionBudget"}]});
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no room in the budget", "code": code, "details": details});
        reply
            .send_response(Response::builder().status(code).body(Body::from(status.to_string().into_bytes())).unwrap());
        (format!("{} {}", parts.method, parts.uri), kind.unwrap_or_default(), body)
    }

    async fn write_condition(client: &Client, update: &ConditionUpdate) -> bool {
        write(client, (&update.pod, &update.uid), &update.condition, update.status_changed).await
    }

    fn outside_mps_update(status_changed: bool) -> ConditionUpdate {
        let condition = PodCondition {
            type_: CONDITION_WITHIN_SHARE.into(),
            status: "False".into(),
            reason: "OutsideMps".into(),
            message: "why".into(),
        };
        ConditionUpdate { pod: "team/p".into(), uid: "u".into(), condition, status_changed }
    }

    #[tokio::test]
    async fn a_condition_is_merged_into_the_status_of_its_own_pod_only() {
        let (client, mut server) = mock_client();
        let first = outside_mps_update(true);
        let (done, (line, kind, body)) =
            tokio::join!(write_condition(&client, &first), answer_request(&mut server, 200));
        assert!(done);
        assert_eq!(line, "PATCH /api/v1/namespaces/team/pods/p/status?fieldManager=cleave-operator");
        assert_eq!(kind, "application/strategic-merge-patch+json");
        assert_eq!(body["metadata"], json!({"uid": "u"}));
        let entry = &body["status"]["conditions"][0];
        assert_eq!(
            (&entry["type"], &entry["status"], &entry["reason"]),
            (&json!("cleave.dev/WithinShare"), &json!("False"), &json!("OutsideMps"))
        );
        assert!(entry["lastTransitionTime"].as_str().unwrap().ends_with('Z'));
        let second = outside_mps_update(false);
        let (_, (_, _, body)) = tokio::join!(write_condition(&client, &second), answer_request(&mut server, 200));
        assert_eq!(
            body["status"]["conditions"][0].get("lastTransitionTime"),
            None,
            "the time changes only with the status"
        );
    }

    #[tokio::test]
    async fn a_failed_write_is_retried_unless_the_pod_no_longer_exists() {
        let (client, mut server) = mock_client();
        for (code, done) in [(500, false), (403, false), (404, true), (409, true), (422, true)] {
            let condition = outside_mps_update(true);
            let (result, _) = tokio::join!(write_condition(&client, &condition), answer_request(&mut server, code));
            assert_eq!(result, done, "{code}");
        }
    }

    #[tokio::test]
    async fn an_eviction_of_a_stranded_pod_requires_its_resource_version() {
        let (client, mut server) = mock_client();
        let evict = crate::evict::evict_unchanged(&client, "team/p", "u", "7");
        let (evicted, (line, _, body)) = tokio::join!(evict, answer_request(&mut server, 409));
        assert_eq!(line, "POST /api/v1/namespaces/team/pods/p/eviction");
        assert_eq!(body["deleteOptions"]["preconditions"], json!({"uid": "u", "resourceVersion": "7"}));
        assert_eq!(evicted, EvictionResult::NotFound, "a pod that was bound since the decision is not evicted");
    }

    #[tokio::test]
    async fn an_eviction_requires_the_uid_and_respects_budgets() {
        let (client, mut server) = mock_client();
        for (code, result) in [
            (201, "evicted"),
            (429, "protected"),
            (404, "not_found"),
            (409, "not_found"),
            (500, "failed"),
            (503, "failed"),
        ] {
            let (evicted, (line, _, body)) =
                tokio::join!(evict(&client, "team/p", "u"), answer_request(&mut server, code));
            assert_eq!(evicted.as_str(), result, "{code}: {evicted:?}");
            assert_eq!(line, "POST /api/v1/namespaces/team/pods/p/eviction");
            assert_eq!(body["deleteOptions"]["preconditions"], json!({"uid": "u"}));
            if let EvictionResult::Protected(why) = evicted {
                assert_eq!(why, "no room in the budget");
            }
        }
    }
}
