//! The task that tells pods that left their shares, and evicts them, apart from the passes and the
//! gate.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kube::Client;
use kube::runtime::events::Recorder;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::decide::{Eviction, FindingTracker, RETRY};
use crate::events;
use crate::evict::{Evicted, evict};
use crate::leader::LeaseGuard;
use crate::metrics::{Metrics, Outcome};
use crate::pod_condition::write;
use crate::read::Stores;
use crate::write::publish;

/// How long the first change waits for others.
const GATHER: Duration = Duration::from_millis(200);

/// What the task is made of.
pub(crate) struct Parts {
    pub(crate) client: Client,
    pub(crate) stores: Stores,
    pub(crate) claim: LeaseGuard,
    pub(crate) metrics: Metrics,
    pub(crate) recorder: Recorder,
    pub(crate) dirty: Arc<Notify>,
    pub(crate) stop: CancellationToken,
}

/// The task.
pub(crate) struct Tenants {
    parts: Parts,
    tracker: FindingTracker,
    /// Pods that were told that a disruption budget protects them, by UID.
    protected: BTreeSet<String>,
    started: Instant,
}

impl Tenants {
    pub(crate) fn new(parts: Parts) -> Self {
        Self { parts, tracker: FindingTracker::default(), protected: BTreeSet::new(), started: Instant::now() }
    }

    /// Looks whenever something has changed, until `stop`.
    pub(crate) async fn run(mut self) -> Result<()> {
        let stop = self.parts.stop.clone();
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            ready = self.parts.stores.wait_until_ready() => ready.context("listing the cluster's objects")?,
        }
        let mut turned = self.parts.claim.clone();
        let mut pause = None;
        loop {
            // Cancel-safe: `notified` keeps its permit when dropped, the others are a watch
            // channel, a token and a timer.
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = self.parts.dirty.notified() => tokio::time::sleep(GATHER).await,
                () = turned.changed() => {}
                () = async { tokio::time::sleep(pause.unwrap_or_default()).await }, if pause.is_some() => {}
            }
            pause = self.look().await;
        }
    }

    /// Looks once, and says when to look again.
    async fn look(&mut self) -> Option<Duration> {
        if !self.parts.claim.is_current() {
            self.tracker.reset();
            return None;
        }
        let (nodes, pods) = (self.parts.stores.gpu_nodes.state(), self.parts.stores.pods.state());
        let actions = self.tracker.decide(&nodes, &pods, self.started.elapsed());
        let mut next = actions.next;
        for update in &actions.conditions {
            if !self.parts.claim.is_current() {
                return next;
            }
            let done =
                write(&self.parts.client, (&update.pod, &update.uid), &update.condition, update.status_changed).await;
            self.parts.metrics.judged.get_or_create(&Outcome { result: if done { "ok" } else { "failed" } }).inc();
            if done {
                self.tracker.wrote(update, self.started.elapsed());
            } else {
                next = Some(next.map_or(RETRY, |next| next.min(RETRY)));
            }
        }
        for eviction in &actions.evictions {
            if !self.parts.claim.is_current() {
                return next;
            }
            self.evict(eviction).await;
        }
        self.protected
            .retain(|uid| actions.next.is_some() && pods.iter().any(|pod| pod.metadata.uid.as_ref() == Some(uid)));
        next
    }

    async fn evict(&mut self, eviction: &Eviction) {
        let Eviction { pod, uid, node, message } = eviction;
        let evicted = evict(&self.parts.client, pod, uid).await;
        self.parts.metrics.expelled.get_or_create(&Outcome { result: evicted.as_str() }).inc();
        let event = match evicted {
            Evicted::Done => {
                tracing::info!(pod, node, message, "evicted because it left its share");
                events::expelled(node, message)
            }
            Evicted::Protected(why) => {
                tracing::info!(pod, node, why, "it left its share, and a disruption budget protects it");
                if !self.protected.insert(uid.clone()) {
                    return;
                }
                events::protected(&why)
            }
            Evicted::Gone => return,
            Evicted::Failed(error) => {
                return tracing::warn!(pod, node, error, "it left its share, and was not evicted");
            }
        };
        publish(&self.parts.recorder, &event, &events::of_pod(pod, uid)).await;
    }
}

#[cfg(test)]
mod tests {
    use cleave_api::names::CONDITION_WITHIN_SHARE;
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower_test::mock::Handle;

    use super::super::decide::ConditionUpdate;
    use super::*;
    use crate::pods::PodCondition;

    type Server = Handle<Request<Body>, Response<Body>>;

    fn client() -> (Client, Server) {
        let (service, server) = tower_test::mock::pair();
        (Client::new(service, "default"), server)
    }

    /// Answers the next request, and gives it as its line, content type and body.
    async fn answer(server: &mut Server, code: u16) -> (String, String, Value) {
        let (request, reply) = server.next_request().await.unwrap();
        let (parts, body) = request.into_parts();
        let kind = parts.headers.get(http::header::CONTENT_TYPE).map(|kind| kind.to_str().unwrap().to_owned());
        let body = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no room in the budget", "code": code});
        reply
            .send_response(Response::builder().status(code).body(Body::from(status.to_string().into_bytes())).unwrap());
        (format!("{} {}", parts.method, parts.uri), kind.unwrap_or_default(), body)
    }

    async fn write_update(client: &Client, update: &ConditionUpdate) -> bool {
        write(client, (&update.pod, &update.uid), &update.condition, update.status_changed).await
    }

    fn update(status_changed: bool) -> ConditionUpdate {
        let condition = PodCondition {
            type_: CONDITION_WITHIN_SHARE.into(),
            status: "False".into(),
            reason: "OutsideMps".into(),
            message: "why".into(),
        };
        ConditionUpdate { pod: "team/p".into(), uid: "u".into(), condition, status_changed }
    }

    #[tokio::test]
    async fn a_condition_is_written_to_the_status_of_that_pod_alone_beside_the_others() {
        let (client, mut server) = client();
        let first = update(true);
        let (done, (line, kind, body)) = tokio::join!(write_update(&client, &first), answer(&mut server, 200));
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
        let second = update(false);
        let (_, (_, _, body)) = tokio::join!(write_update(&client, &second), answer(&mut server, 200));
        assert_eq!(body["status"]["conditions"][0].get("lastTransitionTime"), None, "the time is of the status");
    }

    #[tokio::test]
    async fn what_cannot_be_written_is_tried_again_and_what_is_gone_is_not() {
        let (client, mut server) = client();
        for (code, done) in [(500, false), (403, false), (404, true), (409, true), (422, true)] {
            let condition = update(true);
            let (result, _) = tokio::join!(write_update(&client, &condition), answer(&mut server, code));
            assert_eq!(result, done, "{code}");
        }
    }

    #[tokio::test]
    async fn an_eviction_of_a_stranded_pod_names_the_version_that_was_looked_at() {
        let (client, mut server) = client();
        let evict = crate::evict::evict_unchanged(&client, "team/p", "u", "7");
        let (evicted, (line, _, body)) = tokio::join!(evict, answer(&mut server, 409));
        assert_eq!(line, "POST /api/v1/namespaces/team/pods/p/eviction");
        assert_eq!(body["deleteOptions"]["preconditions"], json!({"uid": "u", "resourceVersion": "7"}));
        assert_eq!(evicted, Evicted::Gone, "it was bound meanwhile: it stays");
    }

    #[tokio::test]
    async fn an_eviction_is_of_that_pod_alone_and_obeys_budgets() {
        let (client, mut server) = client();
        for (code, result) in [(201, "evicted"), (429, "protected"), (404, "gone"), (409, "gone"), (500, "failed")] {
            let (evicted, (line, _, body)) = tokio::join!(evict(&client, "team/p", "u"), answer(&mut server, code));
            assert_eq!(evicted.as_str(), result, "{code}: {evicted:?}");
            assert_eq!(line, "POST /api/v1/namespaces/team/pods/p/eviction");
            assert_eq!(body["deleteOptions"]["preconditions"], json!({"uid": "u"}));
            if let Evicted::Protected(why) = evicted {
                assert_eq!(why, "no room in the budget");
            }
        }
    }
}
