//! Watches the pods of this node through the API server, and distributes the changes.
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
use crate::termination::shutdown::{Shutdown, ShutdownPeriods};

/// Number of pods in one page of a list. A list of all pods of a node could take a megabyte of
/// memory, which this process might never release.
const POD_LIST_PAGE_SIZE: u32 = 20;

/// The recipients of changes of this node's pods.
#[derive(Debug, Clone)]
pub(super) struct NodePods {
    /// Receives updates of pending allocations.
    pub(super) allocator: Arc<Allocator>,
    /// The node's pods with slices, and the deadlines of those that terminate.
    pub(super) terminating: watch::Sender<TerminatingPods>,
    /// Names of all pods, including those that request no GPUs.
    pub(super) names: SharedPodNames,
}

impl NodePods {
    pub(super) fn new(allocator: Arc<Allocator>) -> Self {
        Self { allocator, terminating: watch::Sender::default(), names: SharedPodNames::default() }
    }
}

/// Returns the UID of a pod, even if the object is malformed.
fn pod_uid(DeserializeGuard(object): &DeserializeGuard<PodObject>) -> Option<&String> {
    match object {
        Ok(pod) => pod.uid(),
        Err(invalid) => invalid.metadata.uid.as_ref(),
    }
}

/// Detects terminating pods on the node.
#[derive(Debug, Default)]
struct TerminationWatch {
    shutdown: Shutdown,
    /// UIDs in the current list, while the watch reads it.
    listed: BTreeSet<String>,
    /// The time at which the kubelet terminates the next group of pods during a shutdown of the
    /// node.
    next_group: Option<Instant>,
}

impl TerminationWatch {
    /// Records an event of the watch. Returns whether `terminating` changed.
    fn record_event(
        &mut self,
        terminating: &mut TerminatingPods,
        event: &Event<DeserializeGuard<PodObject>>,
        node: &str,
    ) -> bool {
        let Self { shutdown, listed, .. } = self;
        let changed = match event {
            Event::Init => {
                listed.clear();
                false
            }
            Event::InitDone => {
                let listed = std::mem::take(listed);
                shutdown.retain_listed(&listed);
                terminating.retain_listed(&listed, Instant::now())
            }
            Event::Delete(object) => pod_uid(object).is_some_and(|uid| {
                shutdown.remove(uid);
                terminating.record_removal(uid, Instant::now())
            }),
            Event::InitApply(object) | Event::Apply(object) => {
                if matches!(event, Event::InitApply(_)) {
                    listed.extend(pod_uid(object).cloned());
                }
                object.0.as_ref().is_ok_and(|pod| pod.record_termination(node, terminating, shutdown))
            }
        };
        let advanced = shutdown.is_in_progress() && self.advance_shutdown(terminating);
        changed || advanced
    }

    /// Updates `terminating` with the pods that the node's shutdown terminates. Returns whether
    /// `terminating` changed.
    fn advance_shutdown(&mut self, terminating: &mut TerminatingPods) -> bool {
        let (changed, next_group) = self.shutdown.update(terminating, Instant::now());
        self.next_group = next_group;
        changed
    }
}

/// Updates the names of pods after an event of the watch.
fn update_names(names: &mut PodNames, event: &Event<DeserializeGuard<PodObject>>) {
    match event {
        Event::Init => names.begin_list(),
        Event::InitDone => names.end_list(),
        Event::InitApply(DeserializeGuard(object)) | Event::Apply(DeserializeGuard(object)) => {
            let Ok(pod) = object else { return };
            match (pod.uid_and_names(), pod.uid()) {
                (Some((uid, pod)), _) => names.insert(uid, pod),
                (None, Some(uid)) => names.remove(uid),
                (None, None) => {}
            }
        }
        Event::Delete(object) => pod_uid(object).into_iter().for_each(|uid| names.remove(uid)),
    }
}

/// Watches the pods that are bound to this node, and follows the node's shutdowns. Never returns.
pub(super) async fn follow_pods(
    client: Client,
    node: String,
    pods: NodePods,
    (periods, mut began): (ShutdownPeriods, watch::Receiver<Option<Instant>>),
    metrics: Metrics,
) {
    let api: Api<DeserializeGuard<PodObject>> = Api::all(client);
    let config = Config::default().fields(&format!("spec.nodeName={node}")).page_size(POD_LIST_PAGE_SIZE);
    let mut events = std::pin::pin!(watcher(api, config).default_backoff());
    let mut listed = BTreeSet::new();
    let mut watch_state = TerminationWatch { shutdown: Shutdown::new(periods), ..TerminationWatch::default() };
    loop {
        let next_group = watch_state.next_group.map(tokio::time::Instant::from_std);
        // All branches are cancel-safe: the next call returns a missed change.
        let event = tokio::select! {
            Some(event) = events.next() => event,
            Ok(()) = began.changed() => {
                watch_state.shutdown.set_start(*began.borrow_and_update());
                pods.terminating.send_if_modified(|terminating| watch_state.advance_shutdown(terminating));
                continue;
            }
            () = async {
                match next_group {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            } => {
                pods.terminating.send_if_modified(|terminating| watch_state.advance_shutdown(terminating));
                continue;
            }
        };
        match event {
            Ok(event) => {
                // Record terminations first, because the kubelet may be about to kill programs.
                pods.terminating.send_if_modified(|terminating| watch_state.record_event(terminating, &event, &node));
                update_names(&mut pods.names.lock(), &event);
                pods.allocator.update_pending(|pending| {
                    pending.set_watch_working(true);
                    update_pending(pending, event, &node, &mut listed);
                });
            }
            Err(error) => {
                pods.allocator.update_pending(|pending| pending.set_watch_working(false));
                metrics.count_error("api-pods");
                tracing::warn!(error = &error as &dyn std::error::Error, "failed to watch the node's pods");
            }
        }
    }
}

/// Updates the pending allocations after an event of the watch. `listed` contains the UIDs in the
/// current list, while the watch reads it.
fn update_pending(
    pending: &mut PendingAllocations,
    event: Event<DeserializeGuard<PodObject>>,
    node: &str,
    listed: &mut BTreeSet<String>,
) {
    let (DeserializeGuard(object), is_listed) = match event {
        Event::Init => return listed.clear(),
        Event::InitDone => return pending.retain_pods(&std::mem::take(listed)),
        Event::Delete(object) => return pod_uid(&object).into_iter().for_each(|uid| pending.remove_pod(uid)),
        Event::InitApply(object) => (object, true),
        Event::Apply(object) => (object, false),
    };
    match object {
        Ok(pod) => match (pod.bound_pod(node), pod.uid()) {
            (Some(bound), _) => {
                if is_listed {
                    listed.insert(bound.uid.clone());
                }
                pending.update_pod(bound, Instant::now());
            }
            (None, Some(uid)) => pending.remove_pod(uid),
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
    use crate::pods::tests::{container, placement, pod_object};

    const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

    /// Returns the number of seconds from the start of a pod's termination to its end. Returns
    /// `None` if the pod is not terminating.
    fn seconds_left(terminating: &TerminatingPods, name: &str) -> Option<u64> {
        let (found, leaving) = terminating.find_terminating(&[format!("uid-{name}")], None)?;
        assert_eq!(found, format!("ns/{name}"));
        Some((leaving.end.saturating_duration_since(leaving.since)).as_secs())
    }

    #[test]
    fn deletions_of_pods_update_the_terminating_pods() {
        let spec = json!({"containers": [container("main", &json!({MPS_RESOURCE: "1"}))]});
        let guard = |object: Value| serde_json::from_value::<DeserializeGuard<PodObject>>(object).unwrap();
        let deleted = |name: &str| {
            let mut object = pod_object(name, "", &spec);
            object["metadata"]["deletionTimestamp"] = json!(Timestamp::now().to_string());
            object["metadata"]["deletionGracePeriodSeconds"] = json!(30);
            object
        };
        let (mut terminating, mut watch_state) = (TerminatingPods::default(), TerminationWatch::default());
        let mut handle = |terminating: &mut TerminatingPods, event| watch_state.record_event(terminating, &event, "n");
        assert!(!handle(&mut terminating, Event::Init));
        for name in ["a", "b", "c", "d"] {
            assert!(handle(&mut terminating, Event::InitApply(guard(pod_object(name, "", &spec)))));
        }
        assert!(!handle(&mut terminating, Event::InitDone) && !terminating.has_terminating_pods());
        assert!(handle(&mut terminating, Event::Apply(guard(deleted("a")))));
        assert_eq!(seconds_left(&terminating, "a"), Some(30));
        // A forced deletion removes the pod object without an earlier change of it.
        assert!(handle(&mut terminating, Event::Delete(guard(pod_object("b", "", &spec)))));
        assert_eq!(seconds_left(&terminating, "b"), Some(0));
        // While the watch failed, one pod was deleted, one pod became malformed, and one pod
        // completed.
        let mut bad = pod_object("c", "", &json!({"containers": 7}));
        bad["metadata"]["uid"] = json!("uid-c");
        let mut completed = pod_object("a", "", &spec);
        completed["status"] = json!({"phase": "Succeeded"});
        assert!(!handle(&mut terminating, Event::Init));
        assert!(!handle(&mut terminating, Event::InitApply(guard(bad))));
        assert!(handle(&mut terminating, Event::InitApply(guard(completed))));
        assert!(handle(&mut terminating, Event::InitDone));
        assert_eq!(["a", "c", "d"].map(|name| seconds_left(&terminating, name)), [None, None, Some(0)]);
        // The deletion of a mirror pod does not terminate the static pod.
        let mut mirror = deleted("m");
        mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
        assert!(!handle(&mut terminating, Event::Apply(guard(mirror))));
        assert_eq!(seconds_left(&terminating, "m"), None);
    }

    #[test]
    fn during_a_shutdown_pods_terminate_in_order_of_priority() {
        let guard = |name: &str, priority: i32, limits: &Value| {
            let mut spec = json!({"containers": [container("main", limits)], "priority": priority});
            spec["terminationGracePeriodSeconds"] = json!(15);
            serde_json::from_value::<DeserializeGuard<PodObject>>(pod_object(name, "", &spec)).unwrap()
        };
        let periods = ["0=20", "100=10"].map(|period| period.parse().unwrap()).to_vec();
        let mut watch_state =
            TerminationWatch { shutdown: Shutdown::new(ShutdownPeriods::new(periods)), ..TerminationWatch::default() };
        let mut terminating = TerminatingPods::default();
        let shares = json!({MPS_RESOURCE: "1"});
        watch_state.record_event(&mut terminating, &Event::Init, "n");
        for (name, priority, limits) in [("a", 0, &shares), ("b", 100, &shares), ("c", 0, &json!({"cpu": "1"}))] {
            watch_state.record_event(&mut terminating, &Event::InitApply(guard(name, priority, limits)), "n");
        }
        watch_state.record_event(&mut terminating, &Event::InitDone, "n");
        watch_state.shutdown.set_start(Some(Instant::now()));
        assert!(watch_state.advance_shutdown(&mut terminating));
        assert_eq!(["a", "b"].map(|name| seconds_left(&terminating, name)), [Some(15), None]);
        assert!(watch_state.next_group.is_some(), "the next group has a start time");
        assert!(watch_state.record_event(&mut terminating, &Event::Delete(guard("a", 0, &shares)), "n"));
        assert_eq!(seconds_left(&terminating, "b"), None, "a pod without shares has not completed");
        assert!(watch_state.record_event(&mut terminating, &Event::Delete(guard("c", 0, &json!({"cpu": "1"}))), "n"));
        assert_eq!((seconds_left(&terminating, "b"), watch_state.next_group), (Some(10), None));
    }

    #[tokio::test(start_paused = true)]
    async fn pods_of_the_node_are_watched_despite_a_malformed_pod() {
        let (service, mut api) = mock::pair::<http::Request<Body>, http::Response<Body>>();
        let allocator = Arc::new(allocator(AllocationTable {
            pending: PendingAllocations::with_watch(),
            ..AllocationTable::default()
        }));
        let (_none, began) = watch::channel(None);
        let shutdown = (ShutdownPeriods::default(), began);
        tokio::spawn(follow_pods(
            Client::new(service, "default"),
            "n".into(),
            NodePods::new(Arc::clone(&allocator)),
            shutdown,
            Metrics::new(),
        ));
        let mut answer = async |body: Value| {
            let (request, reply) =
                timeout(std::time::Duration::from_secs(60), api.next_request()).await.unwrap().unwrap();
            reply.send_response(http::Response::new(Body::from(body.to_string().into_bytes())));
            request.uri().to_string()
        };
        let spec = |shares: u32| json!({"containers": [container("main", &json!({MPS_RESOURCE: shares.to_string()}))]});
        let bad = json!({"metadata": {"name": "bad", "namespace": "ns", "uid": "bad"}, "spec": {"containers": 7}});
        let items = json!([bad, pod_object("a", &placement(&[(MPS_RESOURCE, 3, "GPU-a")]), &spec(3))]);
        let request = answer(
            json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}),
        )
        .await;
        assert!(request.contains("fieldSelector=spec.nodeName%3Dn") && request.contains("limit=20"), "{request}");
        let mut arrivals = allocator.pending_changes();
        let mut until = async |what: &str, condition: &dyn Fn(&PendingAllocations) -> bool| {
            let arrived = async {
                while !condition(&allocator.table().pending) {
                    arrivals.changed().await.unwrap();
                }
            };
            timeout(std::time::Duration::from_secs(60), arrived).await.unwrap_or_else(|_| panic!("never: {what}"));
        };
        until("the listed pod", &|pending| {
            pending.open_reservations(MPS_RESOURCE).iter().any(|reserved| reserved.device == "GPU-a")
        })
        .await;
        let mut completed = pod_object("a", "", &spec(3));
        completed["status"] = json!({"phase": "Failed"});
        let changes = [
            json!({"type": "ADDED", "object": pod_object("b", &placement(&[(MPS_RESOURCE, 4, "GPU-b")]), &spec(4))}),
            json!({"type": "MODIFIED", "object": completed}),
        ];
        let text = changes.map(|change| format!("{change}\n")).concat();
        let (_, reply) = timeout(std::time::Duration::from_secs(60), api.next_request()).await.unwrap().unwrap();
        reply.send_response(http::Response::new(Body::from(text.into_bytes())));
        until("the changed pods", &|pending| {
            pending.open_reservations(MPS_RESOURCE).iter().map(|reserved| reserved.device).collect::<Vec<_>>()
                == ["GPU-b"]
        })
        .await;
    }
}
