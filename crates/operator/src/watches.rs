//! Keeps the stores that controllers read up to date, and wakes the controllers that a change
//! concerns.
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
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::metrics::{Kind, Metrics};
use crate::pods::PodObject;
use crate::read::{AgentPod, NamespaceObject, NodeObject, Stores, VolumeClaimObject, VolumeObject, complete};
use crate::rollout::{Revision, Watched};

/// What is dropped of an object before it is kept, and whether a change of it is worth a look.
type Keeping<K> = (fn(&mut K), fn(&K) -> bool);

/// Whom changes wake.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wakes {
    pub(crate) passes: Arc<Notify>,
    pub(crate) gate: Arc<Notify>,
    pub(crate) tenants: Arc<Notify>,
    /// Pods decide what no GPU becomes, as the last pass saw it.
    indifferent: Arc<AtomicBool>,
}

impl Wakes {
    /// Something that all look at.
    fn all(&self) {
        self.passes.notify_one();
        self.gate.notify_one();
        self.tenants.notify_one();
    }

    /// A pod: passes look at them only where pods decide what GPUs become. They come and go, and a
    /// pass is about all nodes.
    fn pod(&self) {
        if !self.indifferent.load(Ordering::Acquire) {
            self.passes.notify_one();
        }
        self.gate.notify_one();
        self.tenants.notify_one();
    }

    /// A pass has seen whether pods decide about GPUs. What came before it was known that they do
    /// is looked at again.
    pub(crate) fn pods_decide(&self, decide: bool) {
        let before = self.indifferent.swap(!decide, Ordering::AcqRel);
        if decide && before {
            self.passes.notify_one();
        }
    }
}

/// What the watches share.
pub(crate) struct Watches<'a> {
    pub(crate) tasks: &'a mut JoinSet<(&'static str, Result<()>)>,
    pub(crate) wakes: &'a Wakes,
    pub(crate) metrics: &'a Metrics,
    pub(crate) stop: &'a CancellationToken,
}

impl Watches<'_> {
    /// Keeps all that passes and the gate look at.
    pub(crate) fn stores(&mut self, client: &Client, namespace: &str, agent_selector: &str) -> Stores {
        let everything = watcher::Config::default();
        let agents = watcher::Config::default().labels(agent_selector);
        // Pods that have ended hold nothing; the API server need not even tell of them.
        let living = watcher::Config::default().fields("status.phase!=Succeeded,status.phase!=Failed");
        let gate: fn(&Wakes) = |wakes| wakes.gate.notify_one();
        Stores {
            policies: self.keep(
                "SharingPolicy",
                watcher(Api::<DeserializeGuard<SharingPolicy>>::all(client.clone()), everything.clone()),
                (trim, |_| true),
                Wakes::all,
            ),
            gpu_nodes: self.keep(
                "GpuNode",
                watcher(Api::<DeserializeGuard<GpuNode>>::all(client.clone()), everything.clone()),
                (
                    |object| {
                        trim_others(object);
                        complete(object);
                    },
                    |_| true,
                ),
                Wakes::all,
            ),
            nodes: self.keep(
                "Node",
                watcher(Api::<NodeObject>::all(client.clone()), everything),
                (trim, |_| true),
                Wakes::all,
            ),
            agents: self.keep(
                "AgentPod",
                watcher(Api::<AgentPod>::namespaced(client.clone(), namespace), agents),
                (trim, |_| true),
                Wakes::all,
            ),
            // What other pods do changes little, and the next pass sees it.
            pods: self.keep(
                "Pod",
                watcher(Api::<PodObject>::all(client.clone()), living),
                (PodObject::trim, |pod| pod.wants_gpus() || pod.is_ours_to_open()),
                Wakes::pod,
            ),
            // Where volumes can be mounted, and namespaces' labels: what the scheduler looks at
            // too. The gate alone does.
            volume_claims: self.keep(
                "PersistentVolumeClaim",
                watcher(Api::<VolumeClaimObject>::all(client.clone()), watcher::Config::default()),
                (trim, |_| true),
                gate,
            ),
            volumes: self.keep(
                "PersistentVolume",
                watcher(Api::<VolumeObject>::all(client.clone()), watcher::Config::default()),
                (trim, |_| true),
                gate,
            ),
            namespaces: self.keep(
                "NamespaceLabels",
                watcher(Api::<NamespaceObject>::all(client.clone()), watcher::Config::default()),
                (trim, |_| false),
                gate,
            ),
        }
    }

    /// Keeps the namespaces with exceptions from admission.
    pub(crate) fn exceptions(&mut self, client: &Client) -> Store<PartialObjectMeta<Namespace>> {
        let excepted = watcher::Config::default().labels(ALLOW_LABEL);
        let watch = watcher(Api::<PartialObjectMeta<Namespace>>::all(client.clone()), excepted);
        self.keep("Namespace", watch, (trim, |_| false), Wakes::all)
    }

    /// Keeps what MPS hosts are replaced by: the gate alone looks at it.
    pub(crate) fn hosts(&mut self, client: &Client, namespace: &str, selector: &str) -> Watched {
        let labelled = watcher::Config::default().labels(selector);
        let wake = |wakes: &Wakes| wakes.gate.notify_one();
        let pods = watcher(Api::<AgentPod>::namespaced(client.clone(), namespace), labelled);
        let revisions = watcher(Api::<Revision>::namespaced(client.clone(), namespace), watcher::Config::default());
        Watched {
            pods: self.keep("MpsHostPod", pods, (trim, |_| true), wake),
            revisions: self.keep("ControllerRevision", revisions, (trim, |_| true), wake),
            namespace: namespace.to_owned(),
        }
    }

    /// Keeps what a watch tells in a store, for ever. `trim` drops what nobody reads before it is
    /// kept; of what `matters` a pass is made.
    fn keep<K>(
        &mut self,
        kind: &'static str,
        watch: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
        (trim, matters): Keeping<K>,
        wake: fn(&Wakes),
    ) -> Store<K>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    {
        let (store, writer) = reflector::store();
        let (wakes, metrics, stop) = (self.wakes.clone(), self.metrics.clone(), self.stop.clone());
        // A bare watcher repeats a failed request at once; this waits from 0.8 to 30 s.
        let events = watch.default_backoff().modify(trim).reflect(writer);
        self.tasks.spawn(async move {
            let told = events.for_each(|event| {
                match event {
                    // A list in progress is not what the cluster says yet.
                    Ok(Event::Init | Event::InitApply(_)) => {}
                    Ok(Event::Apply(object) | Event::Delete(object)) if !matters(&object) => {}
                    Ok(Event::Apply(_) | Event::Delete(_) | Event::InitDone) => wake(&wakes),
                    Err(error) => {
                        metrics.watch_errors.get_or_create(&Kind { kind }).inc();
                        tracing::warn!(
                            kind,
                            error = &error as &dyn std::error::Error,
                            "the watch failed and is tried again"
                        );
                    }
                }
                std::future::ready(())
            });
            // Dropping a watch loses nothing that anybody still reads.
            tokio::select! {
                () = told => {}
                () = stop.cancelled() => {}
            }
            ("watch", Ok(()))
        });
        store
    }
}

/// Drops what nobody reads of any object.
fn trim<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    meta.annotations = None;
}

/// Drops what others wrote: what administrators say of GPUs is in annotations of ours.
fn trim_others<K: Resource>(object: &mut K) {
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
    fn what_administrators_say_of_a_gpu_node_is_kept_and_what_tools_wrote_is_not() {
        let mut node = cleave_api::GpuNode::new("n", cleave_api::GpuNodeSpec::default());
        let annotations =
            ["cleave.dev/cordon", "cleave.dev/cleared", "kubectl.kubernetes.io/last-applied-configuration"];
        node.metadata.annotations = Some(annotations.map(|name| (name.to_owned(), "x".to_owned())).into());
        node.metadata.managed_fields = Some(Vec::new());
        trim_others(&mut node);
        let kept: Vec<String> = node.metadata.annotations.into_iter().flatten().map(|(name, _)| name).collect();
        assert_eq!(kept, ["cleave.dev/cleared", "cleave.dev/cordon"]);
        assert_eq!(node.metadata.managed_fields, None);
    }

    #[test]
    fn pods_wake_passes_only_where_they_decide_what_gpus_become_and_none_is_missed_when_they_begin_to() {
        let wakes = Wakes::default();
        let woken = |of: &Arc<Notify>| of.notified().now_or_never().is_some();
        wakes.pod();
        assert!(woken(&wakes.passes) && woken(&wakes.gate), "before the first pass nobody knows");
        wakes.pods_decide(false);
        wakes.pod();
        assert!(!woken(&wakes.passes) && woken(&wakes.gate));
        wakes.all();
        assert!(woken(&wakes.passes) && woken(&wakes.gate));
        // This one comes after a pass has looked, and before that pass finds that pods decide.
        wakes.pod();
        wakes.pods_decide(true);
        assert!(woken(&wakes.passes));
        wakes.pods_decide(true);
        assert!(!woken(&wakes.passes), "and not again and again");
        wakes.pod();
        assert!(woken(&wakes.passes));
    }
}
