//! Watches the cluster, fills the stores that controllers read, and wakes the controllers that each
//! change affects.
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use cleave_api::names::ALLOW_LABEL;
use cleave_api::{GpuNode, SharingPolicy};
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Namespace;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::{self, Store};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::catch_up::{StoreVersion, VersionOfKind, Versions};
use crate::metrics::{Kind, Metrics};
use crate::pods::PodObject;
use crate::read::{
    AgentPod, BudgetObject, LIVING_PODS, NamespaceObject, NodeObject, Stores, VolumeClaimObject, VolumeObject, complete,
};
use crate::rollout::{HostStores, Revision};

/// Seconds after which a watch is restarted where it ended. A watch on which nothing arrives,
/// because its connection is lost without notice, ends 5 s later.
pub(crate) const WATCH_TIMEOUT: u32 = 30;

/// The configuration of all watches.
fn config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_TIMEOUT)
}

/// A function that drops unused fields before an object is stored, and a predicate for changes that
/// wake a controller.
type WatchRules<K> = (fn(&mut K), fn(&K) -> bool);

/// Notifications that wake the controllers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wakers {
    pub(crate) passes: Arc<Notify>,
    pub(crate) gate: Arc<Notify>,
    pub(crate) tenants: Arc<Notify>,
    /// Whether the last pass found that no GPU is partitioned on demand. If so, pods do not wake
    /// passes.
    ignore_pods: Arc<AtomicBool>,
    /// Whether no waiting pod may preempt others. If so, disruption budgets do not wake the gate.
    ignore_budgets: Arc<AtomicBool>,
}

impl Wakers {
    /// Wakers all controllers.
    fn all(&self) {
        self.passes.notify_one();
        self.gate.notify_one();
        self.tenants.notify_one();
    }

    /// Wakes the gate if a waiting pod may preempt others. Budgets change with each pod that
    /// becomes ready.
    fn budget(&self) {
        if !self.ignore_budgets.load(Ordering::Acquire) {
            self.gate.notify_one();
        }
    }

    /// Records whether a waiting pod may preempt others. If there was none before, wakes the gate
    /// again, because a budget that changed during the current reconcile did not wake it.
    pub(crate) fn set_awaits_budgets(&self, awaits: bool) {
        let before = self.ignore_budgets.swap(!awaits, Ordering::AcqRel);
        if awaits && before {
            self.gate.notify_one();
        }
    }

    /// Wakes the controllers that a changed pod affects. Pods change often, and a pass covers all
    /// nodes. So pods wake passes only if a GPU is partitioned on demand.
    fn pod(&self) {
        if !self.ignore_pods.load(Ordering::Acquire) {
            self.passes.notify_one();
        }
        self.gate.notify_one();
        self.tenants.notify_one();
    }

    /// Records whether the current pass found a GPU that is partitioned on demand. If the previous
    /// pass found none, wakes the passes again: a pod that changed during the current pass did not
    /// wake them.
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
    /// Publishes the versions that the stores have reached.
    pub(crate) versions: &'a watch::Sender<Versions>,
    pub(crate) stop: &'a CancellationToken,
}

impl Watches<'_> {
    /// Starts the watches that fill [`Stores`].
    pub(crate) fn stores(&mut self, client: &Client, namespace: &str, agent_selector: &str) -> Stores {
        let everything = config();
        let agents = config().labels(agent_selector);
        let living = config().fields(LIVING_PODS);
        let gate: fn(&Wakers) = |wakes| wakes.gate.notify_one();
        Stores {
            policies: self.store_objects(
                "SharingPolicy",
                watcher(Api::<DeserializeGuard<SharingPolicy>>::all(client.clone()), everything.clone()),
                (trim_metadata, |_| true),
                Wakers::all,
            ),
            gpu_nodes: self.store_version(
                "GpuNode",
                watcher(Api::<DeserializeGuard<GpuNode>>::all(client.clone()), everything.clone()),
                (
                    |object| {
                        trim_foreign_metadata(object);
                        complete(object);
                    },
                    |_| true,
                ),
                Wakers::all,
                Some(|versions| &mut versions.gpu_nodes),
            ),
            nodes: self.store_version(
                "Node",
                watcher(Api::<NodeObject>::all(client.clone()), everything),
                (trim_metadata, |_| true),
                Wakers::all,
                Some(|versions| &mut versions.nodes),
            ),
            agents: self.store_objects(
                "AgentPod",
                watcher(Api::<AgentPod>::namespaced(client.clone(), namespace), agents),
                (trim_metadata, |_| true),
                Wakers::all,
            ),
            // Other pods have little influence on plans, so they do not wake passes. The next pass
            // reads them in any case.
            pods: self.store_version(
                "Pod",
                watcher(Api::<PodObject>::all(client.clone()), living),
                (PodObject::trim, |pod| pod.requests_gpus() || pod.waits_at_gate()),
                Wakers::pod,
                Some(|versions| &mut versions.pods),
            ),
            // The scheduler also reads volumes and namespaces' labels. Only the gate needs these
            // objects.
            volume_claims: self.store_objects(
                "PersistentVolumeClaim",
                watcher(Api::<VolumeClaimObject>::all(client.clone()), config()),
                (trim_metadata, |_| true),
                gate,
            ),
            volumes: self.store_objects(
                "PersistentVolume",
                watcher(Api::<VolumeObject>::all(client.clone()), config()),
                (trim_metadata, |_| true),
                gate,
            ),
            budgets: self.store_objects(
                "PodDisruptionBudget",
                watcher(Api::<BudgetObject>::all(client.clone()), config()),
                (trim_metadata, |_| true),
                Wakers::budget,
            ),
            namespaces: self.store_objects(
                "NamespaceLabels",
                watcher(Api::<NamespaceObject>::all(client.clone()), config()),
                (trim_metadata, |_| false),
                gate,
            ),
        }
    }

    /// Watches the namespaces that are exempt from admission.
    pub(crate) fn exempt_namespaces(&mut self, client: &Client) -> Store<PartialObjectMeta<Namespace>> {
        let exempt = config().labels(ALLOW_LABEL);
        let watch = watcher(Api::<PartialObjectMeta<Namespace>>::all(client.clone()), exempt);
        self.store_objects("Namespace", watch, (trim_metadata, |_| false), Wakers::all)
    }

    /// Watches the objects that decide which MPS hosts to replace. Only the gate reads them.
    pub(crate) fn hosts(&mut self, client: &Client, namespace: &str, selector: &str) -> HostStores {
        let labelled = config().labels(selector);
        let wake = |wakes: &Wakers| wakes.gate.notify_one();
        let pods = watcher(Api::<AgentPod>::namespaced(client.clone(), namespace), labelled);
        let revisions = watcher(Api::<Revision>::namespaced(client.clone(), namespace), config());
        HostStores {
            pods: self.store_objects("MpsHostPod", pods, (trim_metadata, |_| true), wake),
            revisions: self.store_objects("ControllerRevision", revisions, (trim_metadata, |_| true), wake),
            namespace: namespace.to_owned(),
        }
    }

    /// Stores the objects of a watch; see [`Watches::store_version`].
    fn store_objects<K>(
        &mut self,
        kind: &'static str,
        watch: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
        rules: WatchRules<K>,
        wake: fn(&Wakers),
    ) -> Store<K>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    {
        self.store_version(kind, watch, rules, wake, None)
    }

    /// Stores the objects of a watch until the process stops. `trim` drops unused fields before an
    /// object is stored. A change of an object for which `is_relevant` returns true calls `wake`.
    /// `of_kind` selects where the version of the store is reported.
    fn store_version<K>(
        &mut self,
        kind: &'static str,
        watch: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
        (trim, is_relevant): WatchRules<K>,
        wake: fn(&Wakers),
        of_kind: Option<VersionOfKind>,
    ) -> Store<K>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    {
        let (store, writer) = reflector::store();
        let (wakes, metrics, stop) = (self.wakes.clone(), self.metrics.clone(), self.stop.clone());
        let (versions, mut version) = (self.versions.clone(), StoreVersion::default());
        // Without a backoff, a watcher retries a failed request immediately. The default backoff
        // grows from 0.8 s to 30 s.
        let events = watch.default_backoff().modify(trim).reflect(writer);
        self.tasks.spawn(async move {
            let handled = events.for_each(|event| {
                if let (Some(of_kind), Ok(event)) = (of_kind, &event)
                    && let Some(version) = version.version_after(event)
                {
                    versions.send_modify(|versions| *of_kind(versions) = version.max(*of_kind(versions)));
                }
                match event {
                    // An incomplete list is not yet the state of the cluster.
                    Ok(Event::Init | Event::InitApply(_)) => {}
                    Ok(Event::Apply(object) | Event::Delete(object)) if !is_relevant(&object) => {}
                    Ok(Event::Apply(_) | Event::Delete(_) | Event::InitDone) => wake(&wakes),
                    Err(error) => {
                        metrics.watch_errors.get_or_create(&Kind { kind }).inc();
                        tracing::warn!(kind, error = &error as &dyn std::error::Error, "watch failed; retrying");
                    }
                }
                std::future::ready(())
            });
            // Dropping a watch is safe: after `stop` nothing reads the store.
            tokio::select! {
                () = handled => {}
                () = stop.cancelled() => {}
            }
            ("watch", Ok(()))
        });
        store
    }
}

/// Drops metadata that the operator never reads.
fn trim_metadata<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    meta.annotations = None;
}

/// Drops other writers' metadata. Cleave's annotations are kept, because administrators use them,
/// for example to cordon GPUs.
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
    fn budgets_wake_the_gate_only_while_a_pod_may_preempt_and_no_change_is_missed() {
        let wakes = Wakers::default();
        let woken = || wakes.gate.notified().now_or_never().is_some();
        wakes.budget();
        assert!(woken(), "before the first reconcile");
        wakes.set_awaits_budgets(false);
        wakes.budget();
        assert!(!woken());
        // This budget changes after the gate has read the budgets.
        wakes.budget();
        wakes.set_awaits_budgets(true);
        assert!(woken());
        wakes.set_awaits_budgets(true);
        assert!(!woken(), "a repeated report wakes nothing");
        wakes.budget();
        assert!(woken());
    }

    #[test]
    fn pods_wake_passes_only_if_a_gpu_is_shared_by_demand_and_none_is_missed() {
        let wakes = Wakers::default();
        let woken = |of: &Arc<Notify>| of.notified().now_or_never().is_some();
        wakes.pod();
        assert!(
            woken(&wakes.passes) && woken(&wakes.gate),
            "before the first pass it is not known whether pods decide"
        );
        wakes.set_partitions_on_demand(false);
        wakes.pod();
        assert!(!woken(&wakes.passes) && woken(&wakes.gate));
        wakes.all();
        assert!(woken(&wakes.passes) && woken(&wakes.gate));
        // This pod changes after the pass has read the pods and before the pass reports that GPUs
        // are partitioned on demand.
        wakes.pod();
        wakes.set_partitions_on_demand(true);
        assert!(woken(&wakes.passes));
        wakes.set_partitions_on_demand(true);
        assert!(!woken(&wakes.passes), "a repeated report wakes nothing");
        wakes.pod();
        assert!(woken(&wakes.passes));
    }
}
