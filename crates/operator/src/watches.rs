//! Watches the cluster, fills the stores that controllers read, and wakes the controllers that each
//! change affects.
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use cleave_api::names::ALLOW_LABEL;
use cleave_api::{GpuNode, GpuQuota, SharingPolicy};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Namespace;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::catch_up::{StoreVersion, VersionOfKind, Versions};
use crate::metrics::{KindLabel, Metrics};
use crate::pod_store::{self, AffectedControllers, PodStore};
use crate::pods::RawPod;
use crate::read::{
    AgentPod, BudgetObject, LIVING_PODS, NamespaceObject, NodeObject, Stores, VolumeClaimObject, VolumeObject,
    copy_model_fields,
};
use crate::rollout::{MpsHostStores, Revision};

/// Seconds after which a watch ends and continues at the last resource version that it received. A
/// watch on a connection that was silently lost ends 5 s later.
pub(crate) const WATCH_TIMEOUT_SECONDS: u32 = 30;

/// Kind of quotas in metrics. An older chart may not have installed this resource.
const QUOTA_KIND: &str = "GpuQuota";

/// Returns the configuration of all watches.
fn watch_config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_TIMEOUT_SECONDS)
}

/// Rules for one kind of object: which fields are stored, and which changes wake controllers.
struct WatchRules<K> {
    /// Drops unused fields before an object is stored.
    trim: fn(&mut K),
    /// Returns whether two trimmed versions of an object are equal. A change between equal
    /// versions, such as a node's heartbeat, wakes no controller.
    same: fn(&K, &K) -> bool,
    /// Wakes the controllers that read the object. `None` means that all objects were listed.
    wake: fn(&Wakers, Option<&K>),
}

/// Notifications that wake the controllers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wakers {
    pub(crate) passes: Arc<Notify>,
    pub(crate) placement: Arc<Notify>,
    pub(crate) tenants: Arc<Notify>,
    /// Whether the last pass found that no GPU is partitioned on demand. In this case, pods do not
    /// wake passes.
    ignore_pods: Arc<AtomicBool>,
    /// Whether no agent reports a finding about a pod, and no pod has the condition `WithinShare`.
    /// In this case, pods without the condition do not wake the tenant controller.
    ignore_tenants: Arc<AtomicBool>,
    /// Whether no waiting pod may preempt others. In this case, disruption budgets do not wake the
    /// placement controller.
    ignore_budgets: Arc<AtomicBool>,
}

impl Wakers {
    /// Wakes the placement controller if a waiting pod may preempt others. Budgets change with each
    /// pod that becomes ready.
    fn wake_for_budget(&self) {
        if !self.ignore_budgets.load(Ordering::Acquire) {
            self.placement.notify_one();
        }
    }

    /// Records whether a waiting pod may preempt others. If one may now and none could before,
    /// wakes the placement controller again, because a budget that changed during the current
    /// reconcile did not wake it.
    pub(crate) fn set_awaits_budgets(&self, awaits: bool) {
        let before = self.ignore_budgets.swap(!awaits, Ordering::AcqRel);
        if awaits && before {
            self.placement.notify_one();
        }
    }

    /// Wakes the placement controller.
    fn wake_placement(&self) {
        self.placement.notify_one();
    }

    /// Wakes the GPU controller and the placement controller. The tenant controller reads only
    /// `GpuNode`s and pods.
    fn wake_planners(&self) {
        self.passes.notify_one();
        self.placement.notify_one();
    }

    /// Wakes the controllers that a changed `GpuNode` affects. Findings affect the tenant
    /// controller.
    fn wake_for_gpu_node(&self, node: Option<&DeserializeGuard<GpuNode>>) {
        self.wake_planners();
        let status =
            |node: &DeserializeGuard<GpuNode>| Some(!node.0.as_ref().ok()?.status.as_ref()?.findings.is_empty());
        let concerns_tenants = node.is_none_or(|node| status(node).unwrap_or_default());
        if concerns_tenants || !self.ignore_tenants.load(Ordering::Acquire) {
            self.tenants.notify_one();
        }
    }

    /// Wakes the controllers that a change of pods affects. Pods change often, and a pass covers
    /// all nodes. So pods wake passes only if a GPU is partitioned on demand.
    fn wake_for_pods(&self, effect: AffectedControllers) {
        if effect.of_gpus {
            if !self.ignore_pods.load(Ordering::Acquire) {
                self.passes.notify_one();
            }
            self.placement.notify_one();
        }
        if effect.of_tenants || effect.of_gpus && !self.ignore_tenants.load(Ordering::Acquire) {
            self.tenants.notify_one();
        }
    }

    /// Records whether the tenant controller has pods to report or evict. If the controller has
    /// such pods now and had none before, wakes the controller again, because a pod that changed
    /// meanwhile did not wake it.
    pub(crate) fn set_has_tenants(&self, has: bool) {
        let before = self.ignore_tenants.swap(!has, Ordering::AcqRel);
        if has && before {
            self.tenants.notify_one();
        }
    }

    /// Records whether the current pass found a GPU that is partitioned on demand. If the current
    /// pass found one and the previous pass found none, requests another pass, because a pod that
    /// changed during the current pass did not request one.
    pub(crate) fn set_partitions_on_demand(&self, decide: bool) {
        let before = self.ignore_pods.swap(!decide, Ordering::AcqRel);
        if decide && before {
            self.passes.notify_one();
        }
    }
}

/// Starts watches that share their tasks and metrics.
pub(crate) struct Watches<'a> {
    pub(crate) tasks: &'a mut JoinSet<(&'static str, Result<()>)>,
    pub(crate) wakes: &'a Wakers,
    pub(crate) metrics: &'a Metrics,
    /// Publishes the resource versions that the stores have reached.
    pub(crate) versions: &'a watch::Sender<Versions>,
    /// Whether a watch found that the cluster does not have the CRD `GpuQuota`. Never cleared.
    pub(crate) has_no_quotas: Arc<AtomicBool>,
    pub(crate) stop: &'a CancellationToken,
}

fn wake_placement<K>(wakes: &Wakers, _: Option<&K>) {
    wakes.wake_placement();
}

impl<'a> Watches<'a> {
    /// Starts no watch yet.
    pub(crate) fn new(
        tasks: &'a mut JoinSet<(&'static str, Result<()>)>,
        (wakes, metrics): (&'a Wakers, &'a Metrics),
        versions: &'a watch::Sender<Versions>,
        stop: &'a CancellationToken,
    ) -> Self {
        Self { tasks, wakes, metrics, versions, has_no_quotas: Arc::default(), stop }
    }

    /// Starts the watches that fill [`Stores`].
    pub(crate) fn start_stores(&mut self, client: &Client, namespace: &str, agent_selector: &str) -> Stores {
        let agents = watch_config().labels(agent_selector);
        Stores {
            policies: self.store_objects(
                "SharingPolicy",
                (Api::<DeserializeGuard<SharingPolicy>>::all(client.clone()), watch_config()),
                WatchRules { trim: trim_metadata, same: |_, _| false, wake: |wakes, _| wakes.wake_planners() },
            ),
            gpu_nodes: self.store_objects_and_version(
                "GpuNode",
                (Api::<DeserializeGuard<GpuNode>>::all(client.clone()), watch_config()),
                WatchRules {
                    trim: |object| {
                        trim_foreign_metadata(object);
                        copy_model_fields(object);
                    },
                    same: |_, _| false,
                    wake: Wakers::wake_for_gpu_node,
                },
                Some(|versions| &mut versions.gpu_nodes),
            ),
            nodes: self.store_objects_and_version(
                "Node",
                (Api::<NodeObject>::all(client.clone()), watch_config()),
                WatchRules { trim: trim_metadata, same: NodeObject::is_same, wake: |wakes, _| wakes.wake_planners() },
                Some(|versions| &mut versions.nodes),
            ),
            agents: self.store_objects(
                "AgentPod",
                (Api::<AgentPod>::namespaced(client.clone(), namespace), agents),
                WatchRules { trim: trim_metadata, same: AgentPod::is_same, wake: |wakes, _| wakes.wake_planners() },
            ),
            pods: self.store_pods(Api::<RawPod>::all(client.clone()), watch_config().fields(LIVING_PODS)),
            // The scheduler also reads volumes and namespaces' labels. Only the placement
            // controller needs these objects.
            volume_claims: self.store_objects(
                "PersistentVolumeClaim",
                (Api::<VolumeClaimObject>::all(client.clone()), watch_config()),
                WatchRules { trim: trim_metadata, same: VolumeClaimObject::is_same, wake: wake_placement },
            ),
            volumes: self.store_objects(
                "PersistentVolume",
                (Api::<VolumeObject>::all(client.clone()), watch_config()),
                WatchRules { trim: trim_metadata, same: VolumeObject::is_same, wake: wake_placement },
            ),
            quotas: self.store_objects(
                QUOTA_KIND,
                (Api::<DeserializeGuard<GpuQuota>>::all(client.clone()), watch_config()),
                WatchRules { trim: trim_metadata, same: is_same_quota, wake: wake_placement },
            ),
            has_no_quotas: Arc::clone(&self.has_no_quotas),
            budgets: self.store_objects(
                "PodDisruptionBudget",
                (Api::<BudgetObject>::all(client.clone()), watch_config()),
                WatchRules {
                    trim: trim_metadata,
                    same: BudgetObject::is_same,
                    wake: |wakes, _| wakes.wake_for_budget(),
                },
            ),
            namespaces: self.store_objects(
                "NamespaceLabels",
                (Api::<NamespaceObject>::all(client.clone()), watch_config()),
                WatchRules {
                    trim: trim_metadata,
                    same: |_, _| true,
                    wake: |wakes, namespace| {
                        if namespace.is_none() {
                            wakes.wake_placement();
                        }
                    },
                },
            ),
        }
    }

    /// Watches the namespaces that are exempt from admission.
    pub(crate) fn exempt_namespaces(&mut self, client: &Client) -> Store<PartialObjectMeta<Namespace>> {
        let namespaces = (Api::<PartialObjectMeta<Namespace>>::all(client.clone()), watch_config().labels(ALLOW_LABEL));
        // Only the webhook reads these objects.
        self.store_objects(
            "Namespace",
            namespaces,
            WatchRules { trim: trim_metadata, same: |_, _| true, wake: |_, _| {} },
        )
    }

    /// Watches the objects that decide which MPS hosts to replace. Only the placement controller
    /// reads them.
    pub(crate) fn start_host_stores(&mut self, client: &Client, namespace: &str, selector: &str) -> MpsHostStores {
        let pods = (Api::<AgentPod>::namespaced(client.clone(), namespace), watch_config().labels(selector));
        let revisions = (Api::<Revision>::namespaced(client.clone(), namespace), watch_config());
        MpsHostStores {
            pods: self.store_objects(
                "MpsHostPod",
                pods,
                WatchRules { trim: trim_metadata, same: AgentPod::is_same, wake: |wakes, _| wakes.wake_placement() },
            ),
            revisions: self.store_objects(
                "ControllerRevision",
                revisions,
                WatchRules { trim: trim_metadata, same: |_, _| false, wake: |wakes, _| wakes.wake_placement() },
            ),
            namespace: namespace.to_owned(),
        }
    }

    /// Stores the objects of a watch; see [`Watches::store_objects_and_version`].
    fn store_objects<K>(
        &mut self,
        kind: &'static str,
        watched: (Api<K>, watcher::Config),
        rules: WatchRules<K>,
    ) -> Store<K>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
    {
        self.store_objects_and_version(kind, watched, rules, None)
    }

    /// Stores the objects of a watch until the process stops. `of_kind` selects the field for the
    /// store's version.
    fn store_objects_and_version<K>(
        &mut self,
        kind: &'static str,
        watched: (Api<K>, watcher::Config),
        WatchRules { trim, same, wake }: WatchRules<K>,
        of_kind: Option<VersionOfKind>,
    ) -> Store<K>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
    {
        let (store, mut writer) = reflector::store();
        let (wakes, stored) = (self.wakes.clone(), store.clone());
        let (versions, mut version) = (self.versions.clone(), StoreVersion::default());
        self.watch(kind, watched, move |event| {
            let event = event.modify(trim);
            let wakes_some = match &event {
                Event::Apply(object) => {
                    let known = stored.get(&ObjectRef::from_obj(object));
                    known.is_none_or(|known| !same(&known, object))
                }
                Event::Delete(_) | Event::InitDone => true,
                // An incomplete list does not show the state of the cluster yet.
                Event::Init | Event::InitApply(_) => false,
            };
            writer.apply_watcher_event(&event);
            if let Some(of_kind) = of_kind {
                publish_version(&versions, of_kind, version.version_after(&event));
            }
            if wakes_some {
                match &event {
                    Event::Apply(object) | Event::Delete(object) => wake(&wakes, Some(object)),
                    _ => wake(&wakes, None),
                }
            }
        });
        store
    }

    /// Stores the pods of a watch until the process stops.
    fn store_pods(&mut self, pods: Api<RawPod>, config: watcher::Config) -> PodStore {
        let (store, mut writer) = pod_store::new_store();
        let (wakes, versions, mut version) = (self.wakes.clone(), self.versions.clone(), StoreVersion::default());
        self.watch("Pod", (pods, config), move |event| {
            let reached = version.version_after(&event);
            let effect = writer.apply(event);
            publish_version(&versions, |versions| &mut versions.pods, reached);
            wakes.wake_for_pods(effect);
        });
        store
    }

    /// Calls `handle` for each event of a watch until the process stops. Counts and logs errors.
    fn watch<K>(
        &mut self,
        kind: &'static str,
        (api, config): (Api<K>, watcher::Config),
        mut handle: impl FnMut(Event<K>) + Send + 'static,
    ) where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
    {
        let (metrics, stop) = (self.metrics.clone(), self.stop.clone());
        let (has_no_quotas, wakes) = (Arc::clone(&self.has_no_quotas), self.wakes.clone());
        self.tasks.spawn(async move {
            let followed = watch_objects(kind, api, config, |event| match event {
                Ok(event) => handle(event),
                Err(error) => {
                    if kind == QUOTA_KIND && is_absent(&error) && !has_no_quotas.swap(true, Ordering::AcqRel) {
                        wakes.wake_placement();
                    }
                    metrics.watch_errors.get_or_create(&KindLabel { kind }).inc();
                    tracing::warn!(kind, error = &error as &dyn std::error::Error, "watch failed; retrying");
                }
            });
            // Dropping a watch is safe, because no task reads the store after `stop`.
            tokio::select! {
                () = followed => {}
                () = stop.cancelled() => {}
            }
            ("watch", Ok(()))
        });
    }
}

/// Watches objects. At first, existing objects arrive as a stream, so that neither side needs
/// memory for a whole list. If the API server refuses the stream or ends it early, this function
/// lists objects in pages from then on. The function also uses pages for all later lists.
async fn watch_objects<K>(
    kind: &'static str,
    api: Api<K>,
    config: watcher::Config,
    mut handle: impl FnMut(watcher::Result<Event<K>>),
) where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    // Without a backoff, a watcher retries a failed request immediately. The default backoff grows
    // from 0.8 s to 30 s.
    let start = |config| watcher(api.clone(), config).default_backoff().boxed();
    let (mut events, mut streamed) = (start(config.clone().streaming_lists()), StreamedList::default());
    while let Some(event) = events.next().await {
        let needs_pages = streamed.needs_pages(&event);
        // Do not count this error as a watch error. An API server without the feature refuses the
        // stream of each kind once.
        if !(needs_pages && event.is_err()) {
            handle(event);
        }
        if needs_pages {
            tracing::info!(kind, "listing in pages");
            events = start(config.clone());
        }
    }
}

/// Decides when to list in pages instead of streaming. Only the first list is streamed. The API
/// server streams its cache, which may be older than the operator's store. A list in pages is
/// current.
#[derive(Debug, Default, PartialEq, Eq)]
enum StreamedList {
    /// No list has begun.
    #[default]
    Idle,
    /// The first list is being streamed.
    Began,
    /// The first list is complete.
    Done,
    /// Lists are requested in pages until the process stops.
    Paged,
}

impl StreamedList {
    /// Returns whether lists are requested in pages from this event on.
    fn needs_pages<K>(&mut self, event: &watcher::Result<Event<K>>) -> bool {
        let refused = |error: &watcher::Error| match error {
            watcher::Error::WatchStartFailed(kube::Error::Api(status)) => matches!(status.code, 400 | 422),
            _ => false,
        };
        let next = match (&*self, event) {
            (Self::Idle, Ok(Event::Init)) => Self::Began,
            (Self::Began, Ok(Event::InitDone)) => Self::Done,
            // The stream ended before the list was complete, for example at
            // `WATCH_TIMEOUT_SECONDS`. The watcher starts the next stream without an error, and the
            // next stream may also end early.
            (Self::Began | Self::Done, Ok(Event::Init)) => Self::Paged,
            (Self::Idle | Self::Began | Self::Done, Err(error)) if refused(error) => Self::Paged,
            _ => return false,
        };
        *self = next;
        *self == Self::Paged
    }
}

/// Returns whether an error means that the cluster does not have the watched resource.
fn is_absent(error: &watcher::Error) -> bool {
    let (watcher::Error::InitialListFailed(error)
    | watcher::Error::WatchStartFailed(error)
    | watcher::Error::WatchFailed(error)) = error
    else {
        return false;
    };
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// Publishes the resource version that a store has reached. A list may replace a newer store.
fn publish_version(versions: &watch::Sender<Versions>, of_kind: VersionOfKind, reached: Option<u64>) {
    if let Some(version) = reached {
        versions.send_modify(|versions| *of_kind(versions) = version);
    }
}

/// Returns whether two versions of a quota have the same spec. The operator writes the status.
fn is_same_quota(one: &DeserializeGuard<GpuQuota>, other: &DeserializeGuard<GpuQuota>) -> bool {
    matches!((&one.0, &other.0), (Ok(one), Ok(other)) if one.spec == other.spec)
}

/// Drops metadata that the operator never reads.
fn trim_metadata<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    meta.annotations = None;
}

/// Drops other writers' metadata. Keeps Cleave's annotations, because administrators use them, for
/// example to cordon GPUs.
fn trim_foreign_metadata<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    if let Some(annotations) = &mut meta.annotations {
        annotations.retain(|name, _| name.starts_with("cleave.dev/"));
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn only_cleave_annotations_of_a_gpu_node_are_kept() {
        let mut node = cleave_api::GpuNode::new("n", cleave_api::GpuNodeSpec::default());
        let annotations =
            ["cleave.dev/cordon", "cleave.dev/cleared", "kubectl.kubernetes.io/last-applied-configuration"];
        node.metadata.annotations = Some(annotations.map(|name| (name.to_owned(), "x".to_owned())).into());
        node.metadata.managed_fields = Some(Vec::new());
        trim_foreign_metadata(&mut node);
        let kept: Vec<String> = node.metadata.annotations.into_iter().flatten().map(|(name, _)| name).collect();
        assert_eq!(kept, ["cleave.dev/cleared", "cleave.dev/cordon"]);
        assert_eq!(node.metadata.managed_fields, None);
    }

    #[test]
    fn budgets_wake_placement_only_while_a_pod_may_preempt_and_no_change_is_missed() {
        let wakes = Wakers::default();
        let woken = || wakes.placement.notified().now_or_never().is_some();
        wakes.wake_for_budget();
        assert!(woken(), "before the first reconcile");
        wakes.set_awaits_budgets(false);
        wakes.wake_for_budget();
        assert!(!woken());
        // This budget changes after the placement controller has read the budgets.
        wakes.wake_for_budget();
        wakes.set_awaits_budgets(true);
        assert!(woken());
        wakes.set_awaits_budgets(true);
        assert!(!woken(), "a repeated report wakes no controller");
        wakes.wake_for_budget();
        assert!(woken());
    }

    const GPU_POD_CHANGE: AffectedControllers = AffectedControllers { of_gpus: true, of_tenants: false };

    #[test]
    fn pods_wake_passes_only_if_a_gpu_is_partitioned_on_demand_and_none_is_missed() {
        let wakes = Wakers::default();
        let woken = |of: &Arc<Notify>| of.notified().now_or_never().is_some();
        wakes.wake_for_pods(GPU_POD_CHANGE);
        assert!(woken(&wakes.passes) && woken(&wakes.placement), "before the first pass, pods may affect the plan");
        wakes.set_partitions_on_demand(false);
        wakes.wake_for_pods(GPU_POD_CHANGE);
        assert!(!woken(&wakes.passes) && woken(&wakes.placement));
        wakes.wake_planners();
        assert!(woken(&wakes.passes) && woken(&wakes.placement));
        // This pod changes after the pass has read the pods and before the pass reports that GPUs
        // are partitioned on demand.
        wakes.wake_for_pods(GPU_POD_CHANGE);
        wakes.set_partitions_on_demand(true);
        assert!(woken(&wakes.passes));
        wakes.set_partitions_on_demand(true);
        assert!(!woken(&wakes.passes), "a repeated report wakes no controller");
        wakes.wake_for_pods(GPU_POD_CHANGE);
        assert!(woken(&wakes.passes));
        woken(&wakes.placement);
        wakes.wake_for_pods(AffectedControllers::default());
        assert!(!woken(&wakes.passes) && !woken(&wakes.placement), "a pod without GPUs");
    }

    fn gpu_node(findings: &serde_json::Value) -> DeserializeGuard<GpuNode> {
        let object = serde_json::json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuNode",
            "metadata": {"name": "n"}, "spec": {}, "status": {"findings": findings}});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn the_tenant_controller_is_woken_only_by_findings_and_reported_pods() {
        let wakes = Wakers::default();
        let woken = || wakes.tenants.notified().now_or_never().is_some();
        let (calm, found) = (
            gpu_node(&serde_json::json!([])),
            gpu_node(
                &serde_json::json!([{"uid": "u", "kind": "OutsideMps", "gpu": "GPU-a", "device": "GPU-a", "message": "m", "pod": "team/p"}]),
            ),
        );
        assert!(found.0.as_ref().unwrap().status.as_ref().unwrap().findings.len() == 1);
        wakes.wake_for_gpu_node(Some(&calm));
        assert!(woken(), "every change wakes the controller before its first reconcile");
        wakes.set_has_tenants(false);
        wakes.wake_for_gpu_node(Some(&calm));
        wakes.wake_for_pods(GPU_POD_CHANGE);
        wakes.wake_planners();
        assert!(!woken());
        wakes.wake_for_gpu_node(Some(&found));
        assert!(woken());
        wakes.wake_for_pods(AffectedControllers { of_gpus: false, of_tenants: true });
        assert!(woken(), "a pod has the condition");
        wakes.wake_for_pods(GPU_POD_CHANGE);
        assert!(!woken());
        wakes.set_has_tenants(true);
        assert!(woken(), "the pod changed meanwhile");
        wakes.wake_for_gpu_node(Some(&calm));
        assert!(woken(), "the finding is over");
        wakes.wake_for_gpu_node(None);
        assert!(woken(), "all nodes were listed");
    }

    #[test]
    fn only_the_first_list_is_streamed_and_only_if_the_api_server_supports_it() {
        let refused = |code: u16| {
            let status = kube::core::Status { code, ..kube::core::Status::default() };
            Err(watcher::Error::WatchStartFailed(kube::Error::Api(Box::new(status))))
        };
        let needs = |events: Vec<watcher::Result<Event<NodeObject>>>| {
            let mut streamed = StreamedList::default();
            events.iter().map(|event| streamed.needs_pages(event)).collect::<Vec<_>>()
        };
        let object = || Ok(Event::InitApply(NodeObject::default()));
        assert_eq!(needs(vec![refused(422)]), [true], "the API server does not know the option");
        assert_eq!(needs(vec![refused(500), refused(403), Ok(Event::Init)]), [false; 3]);
        let cut = || [Ok(Event::Init), object(), Ok(Event::Init)];
        let once = needs(cut().into_iter().chain([Ok(Event::Init), refused(422)]).collect());
        assert_eq!(once, [false, false, true, false, false], "the stream ended before the list was complete");
        let listed = || [Ok(Event::Init), object(), Ok(Event::InitDone)];
        let again = needs(listed().into_iter().chain([object(), Ok(Event::Init)]).collect());
        assert_eq!(again, [false, false, false, false, true], "a second stream may be older than the store");
        let no_longer = needs(listed().into_iter().chain([refused(422), refused(422)]).collect());
        assert_eq!(no_longer, [false, false, false, true, false], "an older API server responds");
        let paged = needs([refused(400)].into_iter().chain(listed()).chain(cut()).chain([refused(422)]).collect());
        assert_eq!(paged, [true, false, false, false, false, false, false, false]);
    }

    #[test]
    fn a_list_older_than_the_store_lowers_the_version_of_the_store() {
        let node = |version: &str| {
            let mut node = NodeObject::default();
            node.metadata.resource_version = Some(version.to_owned());
            node
        };
        let (versions, mut version) = (watch::Sender::new(Versions::default()), StoreVersion::default());
        let mut reached = |event: Event<NodeObject>| {
            publish_version(&versions, |versions| &mut versions.nodes, version.version_after(&event));
            versions.borrow().nodes
        };
        assert_eq!(reached(Event::Apply(node("100"))), 100);
        assert_eq!(reached(Event::Init), 100);
        assert_eq!(
            reached(Event::InitApply(node("90"))),
            100,
            "the store keeps its objects until the list is complete"
        );
        assert_eq!(reached(Event::InitDone), 90);
    }

    #[test]
    fn a_heartbeat_does_not_change_the_stored_node() {
        let node = |version: &str, cpu: &str, beat: &str| -> NodeObject {
            let status = serde_json::json!({"allocatable": {"cpu": cpu}, "images": [beat],
                "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": beat}]});
            let meta = serde_json::json!({"name": "n", "uid": "u", "resourceVersion": version,
                "annotations": {"beat": beat}, "managedFields": [{"time": beat}]});
            let object = serde_json::json!({"metadata": meta, "spec": {}, "status": status});
            let mut node: NodeObject = serde_json::from_value(object).unwrap();
            trim_metadata(&mut node);
            node
        };
        let first = node("1", "8", "2026-01-01T00:00:00Z");
        assert!(first.is_same(&node("2", "8", "2026-01-01T00:05:00Z")));
        assert!(!first.is_same(&node("2", "9", "2026-01-01T00:00:00Z")));
        let mut cordoned = first.clone();
        cordoned.spec.unschedulable = true;
        assert!(!first.is_same(&cordoned));
    }
}
