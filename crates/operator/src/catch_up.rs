//! Delays writes after this process acquires the lease, until its stores are as new as the lease.
//!
//! Watches may lag. If a new leader's watches have not yet delivered the former leader's last
//! releases, the new leader would reserve the same shares again. So a new leader writes only after
//! its watches have stored all pods, nodes and `GpuNode`s that were written before the leader
//! acquired the lease:
//!
//! - **Pods.** The process writes an annotation to its own pod. A watch delivers changes in order.
//!   So once the watch delivers the annotation, the store contains all earlier changes of pods. One
//!   write costs less than a list of all pods.
//! - **Nodes and `GpuNode`s**, and pods if the process cannot annotate its pod. The process lists
//!   the objects' metadata from etcd, and waits until the stores contain the newest listed version.
//!   The list does not show deletions, but a missed deletion cannot cause a double reservation.
//!
//! [`Versions::has_reached`] makes the decision and is pure.
use std::fmt::Debug;
use std::time::Duration;

use cleave_api::GpuNode;
use cleave_api::names::LEADING_SINCE_ANNOTATION;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, Patch, PatchParams};
use kube::runtime::watcher::Event;
use kube::{Api, Client, Resource};
use prometheus_client::metrics::counter::Counter;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::leader::LeaseGuard;
use crate::read::LIVING_PODS;

/// Maximum number of objects in one response to a list request.
const PAGE_SIZE: u32 = 500;
/// Time limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after a failed request.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Time after which the process logs that the stores still lag, and reads the required resource
/// versions again. The newest object of a list may have ended or been deleted.
const WARN_AFTER: Duration = Duration::from_secs(10);
/// How long the process may lead without a write before it gives up the lease. Another process may
/// have newer stores. Each consecutive late term doubles the time, so that a single process, or a
/// process in a cluster where watches always lag, eventually becomes ready.
const LATE_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of times that [`LATE_AFTER`] is doubled.
const MAX_DOUBLINGS: u32 = 4;

/// One resource version for each kind of object that reservations depend on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Versions {
    pub(crate) pods: u64,
    pub(crate) nodes: u64,
    pub(crate) gpu_nodes: u64,
}

/// Selects the version of one kind of object in [`Versions`].
pub(crate) type VersionOfKind = fn(&mut Versions) -> &mut u64;

impl Versions {
    /// Returns whether stores with these resource versions contain everything up to the `required`
    /// versions.
    pub(crate) const fn has_reached(self, required: Self) -> bool {
        self.pods >= required.pods && self.nodes >= required.nodes && self.gpu_nodes >= required.gpu_nodes
    }

    /// Returns the older resource version of each kind. Each resource version that was read in a
    /// term suffices for its kind.
    fn older_of_each(self, other: Self) -> Self {
        Self {
            pods: self.pods.min(other.pods),
            nodes: self.nodes.min(other.nodes),
            gpu_nodes: self.gpu_nodes.min(other.gpu_nodes),
        }
    }
}

/// Computes the resource version that a store has reached, from the events of the store's watch.
#[derive(Debug, Default)]
pub(crate) struct StoreVersion {
    /// The highest resource version in a list that is not complete yet.
    listed: u64,
}

impl StoreVersion {
    /// Returns the resource version that the store contains after this event. Returns `None` if the
    /// event does not show the resource version.
    pub(crate) fn version_after<K: Resource>(&mut self, event: &Event<K>) -> Option<u64> {
        match event {
            Event::Init => self.listed = 0,
            Event::InitApply(object) => self.listed = self.listed.max(resource_version_number(object)),
            Event::InitDone => return Some(self.listed),
            // The event of a deletion has the resource version of the deletion.
            Event::Apply(object) | Event::Delete(object) => return Some(resource_version_number(object)),
        }
        None
    }
}

/// Returns the resource version of an object as a number. Returns 0 if the resource version is
/// absent or not a number. In this case, the process does not wait for the object.
fn resource_version_number(object: &impl Resource) -> u64 {
    object.meta().resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

/// State of the wait for up-to-date stores in one term.
struct CatchUp {
    term: u64,
    began: Instant,
    /// The resource versions that the stores must contain. `None` until the process has read them.
    required: Option<Versions>,
}

impl CatchUp {
    fn new(term: u64) -> Self {
        Self { term, began: Instant::now(), required: None }
    }

    /// Reads the required versions, and waits until the stores contain them. Returns false if a
    /// retry is necessary.
    async fn attempt(
        &mut self,
        client: &Client,
        pod: &(String, String),
        stored: &mut watch::Receiver<Versions>,
    ) -> bool {
        match read_required_versions(client, pod).await {
            Ok(read) => {
                let required = self.required.map_or(read, |before| before.older_of_each(read));
                self.required = Some(required);
                wait_until_stored(stored, required).await
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "failed to read resource versions");
                tokio::time::sleep(RETRY_DELAY).await;
                false
            }
        }
    }

    /// Returns whether the process has led for too long without writing. If the term is late, logs
    /// and counts the term. `before` is the number of consecutive late terms before this term.
    fn is_term_late(&self, before: u32, late: &Counter) -> bool {
        if self.began.elapsed() < time_until_late(before) {
            return false;
        }
        late.inc();
        let (term, required) = (self.term, self.required);
        tracing::error!(term, ?required, "giving up the lease; the stores are still older than the lease");
        true
    }
}

/// Returns the time after which a term is late. `before` is the number of consecutive late terms
/// before that term.
fn time_until_late(before: u32) -> Duration {
    LATE_AFTER.saturating_mul(2_u32.saturating_pow(before.min(MAX_DOUBLINGS)))
}

/// Sends the number of each term in which this process leads, once `stored` shows that the stores
/// are as new as the lease. Runs until `stop` is cancelled. `pod` is the namespace and the name of
/// this process's pod. `late` counts terms in which the stores were not up to date in time. The
/// process gives up a late term, so that another process can lead.
pub(crate) async fn run(
    (client, late): (Client, Counter),
    pod: (String, String),
    mut lease: LeaseGuard,
    (mut stored, ready): (watch::Receiver<Versions>, watch::Sender<u64>),
    stop: CancellationToken,
) {
    let follow = async {
        let mut last: Option<CatchUp> = None;
        let (mut given_up, mut late_terms) = (0, 0_u32);
        loop {
            let ended = given_up.max(*ready.borrow());
            let term = lease.term_after(ended).await;
            // Versions that were read in an earlier term do not suffice.
            let mut current = last.take().filter(|last| last.term == term).unwrap_or_else(|| CatchUp::new(term));
            if current.attempt(&client, &pod, &mut stored).await {
                tracing::info!(term, "the stores are as new as the lease");
                ready.send_replace(term);
                late_terms = 0;
            } else if current.is_term_late(late_terms, &late) {
                lease.give_up(term);
                (given_up, late_terms) = (term, late_terms.saturating_add(1));
            } else {
                last = Some(current);
            }
        }
    };
    // Dropping the requests is safe, because no task waits for the answers after `stop`.
    tokio::select! {
        () = stop.cancelled() => {}
        () = follow => {}
    }
}

/// Waits until the stores contain the required resource versions. Returns false after
/// [`WARN_AFTER`]. A watch that lags for a long time may have lost its connection. The watch then
/// reconnects within [`crate::watches::WATCH_TIMEOUT_SECONDS`].
async fn wait_until_stored(stored: &mut watch::Receiver<Versions>, required: Versions) -> bool {
    let reached = tokio::time::timeout(WARN_AFTER, stored.wait_for(|stored| stored.has_reached(required))).await;
    match reached.map(|reached| reached.is_ok()) {
        Ok(true) => true,
        // The watches have stopped. `crate::run` handles that.
        Ok(false) => std::future::pending().await,
        Err(_) => {
            let stored = *stored.borrow();
            tracing::warn!(?stored, ?required, "watches lag; waiting before writes");
            false
        }
    }
}

/// A request for resource versions failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The API server refused the request.
    #[error("the API server refused the request")]
    Api(#[from] kube::Error),
    /// The API server did not answer in time.
    #[error("the API server did not answer within {} s", REQUEST_TIMEOUT.as_secs())]
    Timeout,
}

/// Returns the resource versions that the stores must contain. No object that was written before
/// this call, and still exists, has a newer resource version.
async fn read_required_versions(client: &Client, pod: &(String, String)) -> Result<Versions, Error> {
    let all = ListParams::default().limit(PAGE_SIZE);
    let pods = match annotate_own_pod(client, pod).await {
        Some(version) => version,
        // List only living pods: the watch does not deliver pods that have ended.
        None => read_newest_version::<Pod>(client, all.clone().fields(LIVING_PODS)).await?,
    };
    let nodes = read_newest_version::<Node>(client, all.clone()).await?;
    Ok(Versions { pods, nodes, gpu_nodes: read_newest_version::<GpuNode>(client, all).await? })
}

/// Writes an annotation to this process's pod. Returns the resource version of the write. Returns
/// `None` if the write fails, for example because the pod does not exist, or because a webhook or a
/// policy refuses the write.
async fn annotate_own_pod(client: &Client, (namespace, name): &(String, String)) -> Option<u64> {
    let api = Api::<Pod>::namespaced(client.clone(), namespace);
    let annotation = json!({LEADING_SINCE_ANNOTATION: Timestamp::now().to_string()});
    let patch = Patch::Merge(json!({"metadata": {"annotations": annotation}}));
    match with_timeout(api.patch_metadata(name, &PatchParams::default(), &patch)).await {
        Ok(pod) => Some(resource_version_number(&pod)).filter(|version| *version > 0),
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(namespace, name, error, "failed to annotate this process's pod; listing all pods instead");
            None
        }
    }
}

/// Returns the resource version of the newest object of a kind, read from etcd. Returns 0 if there
/// is no object.
async fn read_newest_version<K>(client: &Client, mut page: ListParams) -> Result<u64, Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api = Api::<K>::all(client.clone());
    let mut newest = 0;
    loop {
        let list = with_timeout(api.list_metadata(&page)).await?;
        newest = list.items.iter().map(resource_version_number).fold(newest, u64::max);
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            None => return Ok(newest),
            Some(token) => page = page.continue_token(&token),
        }
    }
}

async fn with_timeout<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
    tokio::time::timeout(REQUEST_TIMEOUT, request).await.map_err(|_| Error::Timeout)?.map_err(Error::Api)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use kube::client::Body;
    use serde_json::Value;

    use super::*;
    use crate::leader::Elector;

    fn versions(pods: u64, nodes: u64, gpu_nodes: u64) -> Versions {
        Versions { pods, nodes, gpu_nodes }
    }

    fn pod_of_version(version: u64) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.resource_version = Some(version.to_string());
        pod
    }

    #[test]
    fn stores_are_current_only_if_no_kind_lags() {
        let required = versions(5, 6, 7);
        assert!(required.has_reached(required) && versions(9, 9, 9).has_reached(required));
        for lagging in [versions(4, 6, 7), versions(5, 5, 7), versions(5, 6, 6)] {
            assert!(!lagging.has_reached(required), "{lagging:?}");
        }
    }

    #[test]
    fn a_store_reaches_a_lists_version_when_the_list_is_complete() {
        let mut store = StoreVersion::default();
        let events = vec![
            (Event::Init, None),
            (Event::InitApply(pod_of_version(7)), None),
            (Event::InitApply(pod_of_version(3)), None),
            (Event::InitDone, Some(7)),
            (Event::Apply(pod_of_version(8)), Some(8)),
            (Event::Delete(pod_of_version(9)), Some(9)),
            (Event::Init, None),
            (Event::InitDone, Some(0)),
        ];
        for (event, expected) in events {
            assert_eq!(store.version_after(&event), expected, "{event:?}");
        }
        let mut foreign = pod_of_version(0);
        foreign.metadata.resource_version = Some("x".to_owned());
        assert_eq!(store.version_after(&Event::Apply(foreign)), Some(0));
    }

    #[test]
    fn a_version_that_was_read_again_suffices_if_it_is_older() {
        assert_eq!(
            versions(5, 6, 7).older_of_each(versions(6, 5, 7)),
            versions(5, 5, 7),
            "the newest node was deleted"
        );
    }

    #[test]
    fn the_time_for_a_term_doubles_up_to_a_limit() {
        let minutes: Vec<u64> =
            [0, 1, 2, 3, 4, 5, u32::MAX].map(|before| time_until_late(before).as_secs() / 60).into();
        assert_eq!(minutes, [1, 2, 4, 8, 16, 16, 16]);
    }

    /// Returns an API server with a lease, one pod, two pages of nodes and one `GpuNode`. The
    /// server answers the annotation of this process's pod with the status code
    /// `annotation_status`. The server records all requests except requests about the lease.
    fn mock_server(annotation_status: u16) -> (Client, Arc<Mutex<Vec<String>>>) {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let lease = Arc::new(Mutex::new(json!({"metadata": {"name": "l"}})));
        let seen = Arc::clone(&requests);
        let meta = |version: &str| json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": "o", "resourceVersion": version}});
        let list = move |items: &[&str], next: &str| json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": {"resourceVersion": "99", "continue": next}, "items": items.iter().map(|version| meta(version)).collect::<Vec<_>>()});
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (lease, seen) = (Arc::clone(&lease), Arc::clone(&seen));
            async move {
                let line = format!("{} {}", request.method(), request.uri());
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut status = 200;
                let answer: Value = if line.contains("/leases/") {
                    let mut lease = lease.lock().unwrap();
                    if !body.is_empty() {
                        *lease = serde_json::from_slice(&body).unwrap();
                    }
                    lease.clone()
                } else {
                    seen.lock().unwrap().push(line.clone());
                    match line.as_str() {
                        patch if patch.starts_with("PATCH") && annotation_status == 200 => meta("50"),
                        patch if patch.starts_with("PATCH") => {
                            status = annotation_status;
                            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "none", "reason": "Some", "code": annotation_status})
                        }
                        pods if pods.contains("/pods") => list(&["48"], ""),
                        second if second.contains("continue=more") => list(&["30"], ""),
                        nodes if nodes.contains("/api/v1/nodes") => list(&["20", "40"], "more"),
                        _ => list(&["45"], ""),
                    }
                };
                let response = http::Response::builder().status(status);
                Ok::<_, Infallible>(response.body(Body::from(answer.to_string().into_bytes())).unwrap())
            }
        });
        (Client::new(service, "default"), requests)
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_leader_may_write_only_when_lagging_watches_have_caught_up() {
        let (client, requests) = mock_server(200);
        let (elector, lease) =
            Elector::new(Api::namespaced(client.clone(), "default"), "l".to_owned(), "me".to_owned());
        let (stop, released) = (CancellationToken::new(), CancellationToken::new());
        let (progress, stored) = watch::channel(versions(49, 40, 45));
        let (ready, caught_up) = watch::channel(0);
        let mut guard = lease.with_readiness(caught_up);
        let own = ("ns".to_owned(), "me".to_owned());
        let late = Counter::default();
        let test = async {
            while requests.lock().unwrap().len() < 4 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(Duration::from_secs(30)).await;
            assert!(!guard.is_current(), "the watch of pods lags by one version");
            assert_eq!(late.get(), 0);
            tokio::time::sleep(Duration::from_secs(45)).await;
            assert_eq!((late.get(), guard.term()), (1, None), "another process may lead");
            tokio::time::sleep(Duration::from_secs(100)).await;
            assert_eq!((late.get(), guard.term()), (1, Some(2)), "no other process leads, and the time is doubled");
            progress.send_replace(versions(50, 40, 45));
            guard.changed().await;
            assert!(guard.is_current());
            stop.cancel();
            released.cancel();
        };
        tokio::join!(
            test,
            run((client, late.clone()), own, lease, (stored, ready), stop.clone()),
            elector.run(stop.clone(), released.clone())
        );
        let lines = requests.lock().unwrap().clone();
        assert!(lines[0].starts_with("PATCH /api/v1/namespaces/ns/pods/me?"), "{lines:?}");
        assert!(lines[1..].iter().all(|line| !line.contains("resourceVersion")), "lists are read from etcd: {lines:?}");
    }

    #[tokio::test]
    async fn a_process_that_cannot_annotate_its_pod_lists_the_pods() {
        let own = ("ns".to_owned(), "me".to_owned());
        for refused in [400, 403, 404, 409, 422, 429, 500] {
            let (client, requests) = mock_server(refused);
            assert_eq!(read_required_versions(&client, &own).await.unwrap(), versions(48, 40, 45), "{refused}");
            let lines = requests.lock().unwrap().clone();
            assert!(lines[1].contains("fieldSelector=status.phase"), "the watch has this selector: {lines:?}");
        }
        let (client, _) = mock_server(200);
        assert_eq!(read_required_versions(&client, &own).await.unwrap(), versions(50, 40, 45));
    }
}
