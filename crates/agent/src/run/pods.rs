//! Follows the pods of this node at the API server, for everything that needs to know of them.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt;
use kube::Client;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use tokio::sync::watch;

use crate::allocation::pending::PendingAllocations;
use crate::allocator::Allocator;
use crate::metrics::Metrics;
use crate::pods::PodObject;
use crate::tenants::names::{PodNames, SharedPodNames};
use crate::termination::pods::TerminatingPods;
use crate::termination::shutdown::{Periods, Shutdown};

/// Pods in one page of a list. All pods of a node are a megabyte, which this process would keep.
const PAGE: u32 = 20;

/// Everything that learns of the pods of this node.
#[derive(Debug, Clone)]
pub(super) struct NodePods {
    /// Reads which allocations are pending.
    pub(super) allocator: Arc<Allocator>,
    /// Pods that are being terminated.
    pub(super) terminating: watch::Sender<TerminatingPods>,
    /// Names of all pods, whether they request GPUs or not.
    pub(super) names: SharedPodNames,
}

impl NodePods {
    pub(super) fn new(allocator: Arc<Allocator>) -> Self {
        Self { allocator, terminating: watch::Sender::default(), names: SharedPodNames::default() }
    }
}

/// The UID of a pod, well-formed or not.
fn uid(DeserializeGuard(object): &DeserializeGuard<PodObject>) -> Option<&String> {
    match object {
        Ok(pod) => pod.uid(),
        Err(invalid) => invalid.metadata.uid.as_ref(),
    }
}

/// Finds out which pods of the node are being terminated.
#[derive(Debug, Default)]
struct TerminationWatch {
    shutdown: Shutdown,
    /// UIDs of the list that is being read.
    listed: BTreeSet<String>,
    /// When the next group of pods ends, while the node shuts down.
    again: Option<Instant>,
}

impl TerminationWatch {
    /// Handles an event. Returns whether that changes anything.
    fn take(
        &mut self,
        terminating: &mut TerminatingPods,
        event: &Event<DeserializeGuard<PodObject>>,
        node: &str,
    ) -> bool {
        let Self { shutdown, listed, .. } = self;
        let news = match event {
            Event::Init => {
                listed.clear();
                false
            }
            Event::InitDone => {
                let listed = std::mem::take(listed);
                shutdown.complete_list(&listed);
                terminating.complete_list(&listed, Instant::now())
            }
            Event::Delete(object) => uid(object).is_some_and(|uid| {
                shutdown.remove(uid);
                terminating.removed(uid, Instant::now())
            }),
            Event::InitApply(object) | Event::Apply(object) => {
                if matches!(event, Event::InitApply(_)) {
                    listed.extend(uid(object).cloned());
                }
                object.0.as_ref().is_ok_and(|pod| pod.note_departure(node, terminating, shutdown))
            }
        };
        let turned = shutdown.in_progress() && self.advance(terminating);
        news || turned
    }

    /// Updates which pods end while the node shuts down. Returns whether that changes anything.
    fn advance(&mut self, terminating: &mut TerminatingPods) -> bool {
        let (news, again) = self.shutdown.update(terminating, Instant::now());
        self.again = again;
        news
    }
}

/// Handles an event for the names of pods.
fn name(names: &mut PodNames, event: &Event<DeserializeGuard<PodObject>>) {
    match event {
        Event::Init => names.begin_list(),
        Event::InitDone => names.end_list(),
        Event::InitApply(DeserializeGuard(object)) | Event::Apply(DeserializeGuard(object)) => {
            let Ok(pod) = object else { return };
            match (pod.named(), pod.uid()) {
                (Some((uid, pod)), _) => names.insert(uid, pod),
                (None, Some(uid)) => names.remove(uid),
                (None, None) => {}
            }
        }
        Event::Delete(object) => uid(object).into_iter().for_each(|uid| names.remove(uid)),
    }
}

/// Follows the pods that are bound to this node, and since when the kubelet terminates them for a
/// shutdown. Forever.
pub(super) async fn follow(
    client: Client,
    node: String,
    pods: NodePods,
    (periods, mut began): (Periods, watch::Receiver<Option<Instant>>),
    metrics: Metrics,
) {
    let api: Api<DeserializeGuard<PodObject>> = Api::all(client);
    let config = Config::default().fields(&format!("spec.nodeName={node}")).page_size(PAGE);
    let mut events = std::pin::pin!(watcher(api, config).default_backoff());
    let mut listed = BTreeSet::new();
    let mut leave = TerminationWatch { shutdown: Shutdown::new(periods), ..TerminationWatch::default() };
    loop {
        let again = leave.again.map(tokio::time::Instant::from_std);
        // All are cancel-safe: what is not taken is seen by the next call.
        let event = tokio::select! {
            Some(event) = events.next() => event,
            Ok(()) = began.changed() => {
                leave.shutdown.set_start(*began.borrow_and_update());
                pods.terminating.send_if_modified(|terminating| leave.advance(terminating));
                continue;
            }
            () = async {
                match again {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            } => {
                pods.terminating.send_if_modified(|terminating| leave.advance(terminating));
                continue;
            }
        };
        match event {
            Ok(event) => {
                // Termination first: programs may be about to be killed.
                pods.terminating.send_if_modified(|terminating| leave.take(terminating, &event, &node));
                name(&mut pods.names.lock(), &event);
                pods.allocator.update_pending(|pending| {
                    pending.answers(true);
                    take(pending, event, &node, &mut listed);
                });
            }
            Err(error) => {
                pods.allocator.update_pending(|pending| pending.answers(false));
                metrics.error("api-pods");
                tracing::warn!(error = &error as &dyn std::error::Error, "failed to watch the node's pods");
            }
        }
    }
}

/// Handles an event for the pending allocations. `listed` are the pods of the list that is being
/// read.
fn take(
    pending: &mut PendingAllocations,
    event: Event<DeserializeGuard<PodObject>>,
    node: &str,
    listed: &mut BTreeSet<String>,
) {
    let (DeserializeGuard(object), is_listed) = match event {
        Event::Init => return listed.clear(),
        Event::InitDone => return pending.only(&std::mem::take(listed)),
        Event::Delete(object) => return uid(&object).into_iter().for_each(|uid| pending.gone(uid)),
        Event::InitApply(object) => (object, true),
        Event::Apply(object) => (object, false),
    };
    match object {
        Ok(pod) => match (pod.bound(node), pod.uid()) {
            (Some(bound), _) => {
                if is_listed {
                    listed.insert(bound.uid.clone());
                }
                pending.pod(bound, Instant::now());
            }
            (None, Some(uid)) => pending.gone(uid),
            (None, None) => {}
        },
        Err(invalid) => tracing::warn!(error = invalid.error, "ignoring a malformed pod"),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::time::timeout;
    use tower_test::mock;

    use super::*;
    use crate::allocation::table::AllocationTable;
    use crate::allocator::tests::allocator;
    use crate::pods::tests::{container, held, object};

    const MPS: &str = "nvidia.com/gpu-mps";

    /// What is known of a pod's departure, by its UID: none where nothing is, and its end in
    /// seconds from now.
    fn leaves(terminating: &TerminatingPods, name: &str) -> Option<u64> {
        let (found, leaving) = terminating.find(&[format!("uid-{name}")], None)?;
        assert_eq!(found, format!("ns/{name}"));
        Some((leaving.end.saturating_duration_since(leaving.since)).as_secs())
    }

    #[test]
    fn what_the_api_server_tells_of_pods_that_leave_is_followed() {
        let spec = json!({"containers": [container("main", &json!({MPS: "1"}))]});
        let guard = |object: Value| serde_json::from_value::<DeserializeGuard<PodObject>>(object).unwrap();
        let deleted = |name: &str| {
            let mut object = object(name, "", &spec);
            object["metadata"]["deletionTimestamp"] = json!(Timestamp::now().to_string());
            object["metadata"]["deletionGracePeriodSeconds"] = json!(30);
            object
        };
        let (mut terminating, mut leave) = (TerminatingPods::default(), TerminationWatch::default());
        let mut tell = |terminating: &mut TerminatingPods, event| leave.take(terminating, &event, "n");
        assert!(!tell(&mut terminating, Event::Init));
        for name in ["a", "b", "c", "d"] {
            assert!(tell(&mut terminating, Event::InitApply(guard(object(name, "", &spec)))));
        }
        assert!(!tell(&mut terminating, Event::InitDone) && !terminating.any());
        assert!(tell(&mut terminating, Event::Apply(guard(deleted("a")))));
        assert_eq!(leaves(&terminating, "a"), Some(30));
        // Deleted by force: there was no word before.
        assert!(tell(&mut terminating, Event::Delete(guard(object("b", "", &spec)))));
        assert_eq!(leaves(&terminating, "b"), Some(0));
        // While the watch was broken one went, one is malformed now, and one has ended.
        let mut bad = object("c", "", &json!({"containers": 7}));
        bad["metadata"]["uid"] = json!("uid-c");
        let mut ended = object("a", "", &spec);
        ended["status"] = json!({"phase": "Succeeded"});
        assert!(!tell(&mut terminating, Event::Init));
        assert!(!tell(&mut terminating, Event::InitApply(guard(bad))));
        assert!(tell(&mut terminating, Event::InitApply(guard(ended))));
        assert!(tell(&mut terminating, Event::InitDone));
        assert_eq!(["a", "c", "d"].map(|name| leaves(&terminating, name)), [None, None, Some(0)]);
        // The image of a static pod is not the pod.
        let mut mirror = deleted("m");
        mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
        assert!(!tell(&mut terminating, Event::Apply(guard(mirror))));
        assert_eq!(leaves(&terminating, "m"), None);
    }

    #[test]
    fn while_the_node_shuts_down_pods_leave_as_it_is_their_turn() {
        let guard = |name: &str, priority: i32, limits: &Value| {
            let mut spec = json!({"containers": [container("main", limits)], "priority": priority});
            spec["terminationGracePeriodSeconds"] = json!(15);
            serde_json::from_value::<DeserializeGuard<PodObject>>(object(name, "", &spec)).unwrap()
        };
        let periods = ["0=20", "100=10"].map(|period| period.parse().unwrap()).to_vec();
        let mut leave =
            TerminationWatch { shutdown: Shutdown::new(Periods::new(periods)), ..TerminationWatch::default() };
        let mut terminating = TerminatingPods::default();
        let shares = json!({MPS: "1"});
        leave.take(&mut terminating, &Event::Init, "n");
        for (name, priority, limits) in [("a", 0, &shares), ("b", 100, &shares), ("c", 0, &json!({"cpu": "1"}))] {
            leave.take(&mut terminating, &Event::InitApply(guard(name, priority, limits)), "n");
        }
        leave.take(&mut terminating, &Event::InitDone, "n");
        leave.shutdown.set_start(Some(Instant::now()));
        assert!(leave.advance(&mut terminating));
        assert_eq!(["a", "b"].map(|name| leaves(&terminating, name)), [Some(15), None]);
        assert!(leave.again.is_some(), "the others' turn comes by time");
        assert!(leave.take(&mut terminating, &Event::Delete(guard("a", 0, &shares)), "n"));
        assert_eq!(leaves(&terminating, "b"), None, "one without shares is still there");
        assert!(leave.take(&mut terminating, &Event::Delete(guard("c", 0, &json!({"cpu": "1"}))), "n"));
        assert_eq!((leaves(&terminating, "b"), leave.again), (Some(10), None));
    }

    #[tokio::test(start_paused = true)]
    async fn the_nodes_pods_are_followed_and_a_malformed_one_stops_nothing() {
        let (service, mut api) = mock::pair::<http::Request<Body>, http::Response<Body>>();
        let allocator = Arc::new(allocator(AllocationTable {
            pending: PendingAllocations::watched(),
            ..AllocationTable::default()
        }));
        let (_none, began) = watch::channel(None);
        let told = (Periods::default(), began);
        tokio::spawn(follow(
            Client::new(service, "default"),
            "n".into(),
            NodePods::new(Arc::clone(&allocator)),
            told,
            Metrics::new(),
        ));
        let mut answer = async |body: Value| {
            let (request, reply) =
                timeout(std::time::Duration::from_secs(60), api.next_request()).await.unwrap().unwrap();
            reply.send_response(http::Response::new(Body::from(body.to_string().into_bytes())));
            request.uri().to_string()
        };
        let spec = |shares: u32| json!({"containers": [container("main", &json!({MPS: shares.to_string()}))]});
        let bad = json!({"metadata": {"name": "bad", "namespace": "ns", "uid": "bad"}, "spec": {"containers": 7}});
        let items = json!([bad, object("a", &held(&[(MPS, 3, "GPU-a")]), &spec(3))]);
        let asked = answer(
            json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}),
        )
        .await;
        assert!(asked.contains("fieldSelector=spec.nodeName%3Dn") && asked.contains("limit=20"), "{asked}");
        let mut arrivals = allocator.pending_changes();
        let mut until = async |what: &str, condition: &dyn Fn(&PendingAllocations) -> bool| {
            let arrived = async {
                while !condition(&allocator.table().pending) {
                    arrivals.changed().await.unwrap();
                }
            };
            timeout(std::time::Duration::from_secs(60), arrived).await.unwrap_or_else(|_| panic!("never: {what}"));
        };
        until("the listed pod", &|pending| pending.kept(MPS).iter().any(|kept| kept.device == "GPU-a")).await;
        let mut ended = object("a", "", &spec(3));
        ended["status"] = json!({"phase": "Failed"});
        let changes = [
            json!({"type": "ADDED", "object": object("b", &held(&[(MPS, 4, "GPU-b")]), &spec(4))}),
            json!({"type": "MODIFIED", "object": ended}),
        ];
        let text = changes.map(|change| format!("{change}\n")).concat();
        let (_, reply) = timeout(std::time::Duration::from_secs(60), api.next_request()).await.unwrap().unwrap();
        reply.send_response(http::Response::new(Body::from(text.into_bytes())));
        until("the change", &|pending| {
            pending.kept(MPS).iter().map(|kept| kept.device).collect::<Vec<_>>() == ["GPU-b"]
        })
        .await;
    }
}
