//! Stores the pods of the cluster, and records which pods have changed.
//!
//! A cluster usually has many more pods than other objects, and few of the pods use GPUs. Therefore
//! this store differs from the stores of other objects:
//!
//! - Pods of one controller share labels, requests, constraints and conditions.
//! - The store replaces a pod only if a field that the operator reads has changed. Other changes
//!   wake no controller.
//! - The placement controller reads only the pods that have changed since its last read; see
//!   [`PodStore::changes`].
use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_api::placement::Placement;
use cleave_plan::shared::Interner;
use kube::runtime::watcher::Event;
use tokio::sync::watch;

use crate::pods::{PodObject, PodSpec, PodStatus, RawPod};

/// Maximum number of recorded changes. After more changes, the placement controller reads all pods.
const MAX_RECORDED_CHANGES: usize = 100_000;

/// The watch of pods has stopped.
#[derive(Debug, thiserror::Error)]
#[error("the watch of pods has stopped")]
pub struct Stopped;

/// A pod before and after a change. `None` means that the pod does not exist.
#[derive(Debug, Clone)]
pub struct PodChange {
    pub(crate) before: Option<Arc<PodObject>>,
    pub(crate) now: Option<Arc<PodObject>>,
}

impl PodChange {
    /// Returns the arrival of a pod.
    pub const fn added(pod: Arc<PodObject>) -> Self {
        Self { before: None, now: Some(pod) }
    }
}

/// The changes of pods that a reader has not read yet.
#[derive(Debug, Clone)]
pub enum PodChanges {
    /// All pods. The reader compares these pods with the pods of its last read.
    All(Vec<Arc<PodObject>>),
    /// The changes since the last call, oldest first.
    Since(Vec<PodChange>),
}

/// Which controllers a change affects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct AffectedControllers {
    /// A changed pod uses GPUs or waits at the placement gate.
    pub(crate) of_gpus: bool,
    /// A changed pod has the condition `WithinShare`.
    pub(crate) of_tenants: bool,
}

impl AffectedControllers {
    /// Returns the effect of both changes.
    fn merged_with(self, other: Self) -> Self {
        Self { of_gpus: self.of_gpus || other.of_gpus, of_tenants: self.of_tenants || other.of_tenants }
    }

    fn of(change: &PodChange) -> Self {
        let mut effect = Self::default();
        for pod in [&change.before, &change.now].into_iter().flatten() {
            effect.of_gpus |= pod.requests_gpus() || pod.waits_at_gate();
            effect.of_tenants |= pod.condition(cleave_api::names::CONDITION_WITHIN_SHARE).is_some();
        }
        effect
    }
}

/// The stored pods. Clones share the pods.
#[derive(Clone)]
pub struct PodStore {
    state: Arc<Mutex<State>>,
    ready: watch::Receiver<bool>,
}

/// Writes the events of a watch into a [`PodStore`].
pub(crate) struct PodWriter {
    state: Arc<Mutex<State>>,
    ready: watch::Sender<bool>,
    /// The pods of a list that is not complete yet, and the effect of all changes since the last
    /// complete list.
    listed: Option<(HashSet<PodByName>, AffectedControllers)>,
}

#[derive(Default)]
struct State {
    pods: HashSet<PodByName>,
    /// Changes that the placement controller has not read. `None` if it reads all pods next.
    changes: Option<Vec<PodChange>>,
    interners: Interners,
}

/// A pod that is compared by name.
#[derive(Debug, Clone)]
struct PodByName(Arc<PodObject>);

impl PodByName {
    fn name(&self) -> (&str, Option<&str>) {
        (self.0.namespace(), self.0.metadata.name.as_deref())
    }
}

impl PartialEq for PodByName {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for PodByName {}

impl Hash for PodByName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

/// Deduplicates the parts that several pods have in common.
#[derive(Debug, Default)]
struct Interners {
    names: Interner<str>,
    labels: Interner<BTreeMap<String, String>>,
    specs: Interner<PodSpec>,
    statuses: Interner<PodStatus>,
    placements: Interner<Placement>,
}

impl Interners {
    /// Converts a pod of the watch to its stored form.
    fn compact(&mut self, raw: RawPod) -> PodObject {
        let mut pod = PodObject::from(raw);
        pod.trim();
        // Only writes to pods that wait for a node depend on the resource version. Without the
        // resource version, a bound pod equals its earlier state if no field that the operator
        // reads has changed.
        if pod.node().is_some() || !(pod.requests_gpus() || pod.waits_at_gate()) {
            pod.metadata.resource_version = None;
        }
        let names = pod.metadata.namespace.iter_mut().chain(&mut pod.bound_to);
        names.for_each(|name| self.names.intern(name));
        pod.metadata.labels.iter_mut().for_each(|labels| self.labels.share(labels));
        if pod.node().is_some()
            && let Some(placement) = &mut pod.placement
        {
            // The reservation of a bound pod does not expire. Without the expiry time, pods with
            // equal requests on one GPU share one stored reservation.
            placement.until = 0;
            self.placements.share(placement);
        }
        self.specs.share(&mut pod.spec);
        self.statuses.share(&mut pod.status);
        pod.metadata.name.iter_mut().for_each(String::shrink_to_fit);
        pod
    }
}

impl State {
    /// Stores a pod. Returns the controllers that the change affects.
    fn store(&mut self, pod: &PodByName) -> AffectedControllers {
        let before = self.pods.get(pod).map(|known| Arc::clone(&known.0));
        if before.as_ref() == Some(&pod.0) {
            return AffectedControllers::default();
        }
        self.pods.replace(pod.clone());
        self.record_change(PodChange { before, now: Some(Arc::clone(&pod.0)) })
    }

    /// Removes a pod. Returns the controllers that the removal affects.
    fn remove(&mut self, pod: &PodByName) -> AffectedControllers {
        self.pods.take(pod).map_or_else(AffectedControllers::default, |gone| {
            self.record_change(PodChange { before: Some(gone.0), now: None })
        })
    }

    fn record_change(&mut self, change: PodChange) -> AffectedControllers {
        let effect = AffectedControllers::of(&change);
        if let Some(changes) = &mut self.changes {
            changes.push(change);
            if changes.len() > MAX_RECORDED_CHANGES {
                self.changes = None;
            }
        }
        effect
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // Ignore poisoning: a panic aborts the process. In tests, a panic under the lock fails the
    // test.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates an empty store.
pub(crate) fn new_store() -> (PodStore, PodWriter) {
    let (sender, ready) = watch::channel(false);
    let state = Arc::<Mutex<State>>::default();
    (PodStore { state: Arc::clone(&state), ready }, PodWriter { state, ready: sender, listed: None })
}

impl PodStore {
    /// Waits until the pods have been listed once.
    ///
    /// # Errors
    /// Returns an error if the watch stops before the list is complete.
    pub async fn wait_until_ready(&self) -> Result<(), Stopped> {
        self.ready.clone().wait_for(|ready| *ready).await.map(drop).map_err(|_| Stopped)
    }

    /// Returns all pods.
    pub fn state(&self) -> Vec<Arc<PodObject>> {
        lock(&self.state).pods.iter().map(|pod| Arc::clone(&pod.0)).collect()
    }

    /// Returns the pods that have changed since the last call, or all pods. Only one reader may
    /// call this function.
    pub(crate) fn changes(&self) -> PodChanges {
        let mut state = lock(&self.state);
        match state.changes.replace(Vec::new()) {
            Some(changes) => PodChanges::Since(changes),
            None => PodChanges::All(state.pods.iter().map(|pod| Arc::clone(&pod.0)).collect()),
        }
    }

    /// Stops recording changes. The next call of [`Self::changes`] returns all pods.
    pub(crate) fn forget_changes(&self) {
        lock(&self.state).changes = None;
    }
}

impl PodWriter {
    /// Stores the pods of an event. Returns the controllers that the event affects. During a list,
    /// only the last event returns an effect: the effect of all listed pods.
    ///
    /// Stores each listed pod immediately. A listed pod is newer than the stored pod. A second copy
    /// of all pods would need a lot of memory.
    pub(crate) fn apply(&mut self, event: Event<RawPod>) -> AffectedControllers {
        let mut state = lock(&self.state);
        match event {
            Event::Init => {
                // Keep the effect of an interrupted list. Its pods are already stored, so the new
                // list does not report them as changes.
                let (_, so_far) = self.listed.take().unwrap_or_default();
                self.listed = Some((HashSet::new(), so_far));
                AffectedControllers::default()
            }
            Event::InitApply(raw) => {
                let pod = PodByName(Arc::new(state.interners.compact(raw)));
                let effect = state.store(&pod);
                if let Some((listed, so_far)) = &mut self.listed {
                    listed.extend(state.pods.get(&pod).cloned());
                    *so_far = so_far.merged_with(effect);
                }
                AffectedControllers::default()
            }
            Event::InitDone => {
                let (listed, mut effect) = self.listed.take().unwrap_or_default();
                let gone: Vec<PodByName> = state.pods.difference(&listed).cloned().collect();
                for pod in gone {
                    effect = effect.merged_with(state.remove(&pod));
                }
                if !self.ready.send_replace(true) {
                    effect = AffectedControllers { of_gpus: true, of_tenants: true };
                }
                effect
            }
            Event::Apply(raw) => {
                let pod = PodByName(Arc::new(state.interners.compact(raw)));
                state.store(&pod)
            }
            Event::Delete(raw) => {
                let pod = PodByName(Arc::new(PodObject::from(raw)));
                state.remove(&pod)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn raw_pod(name: &str, limits: &Value, status: &Value) -> RawPod {
        let spec = json!({"nodeName": "n", "containers": [{"resources": {"limits": limits}}]});
        let meta = json!({"name": name, "namespace": "team", "uid": name, "labels": {"app": "web"}});
        serde_json::from_value(json!({"metadata": meta, "spec": spec, "status": status})).unwrap()
    }

    fn with_version(mut pod: RawPod, version: &str) -> RawPod {
        pod.metadata.resource_version = Some(version.to_owned());
        pod
    }

    fn names(changes: &PodChanges) -> Vec<String> {
        let name = |pod: &Option<Arc<PodObject>>| pod.as_ref().map_or("-".to_owned(), |pod| pod.name_any());
        match changes {
            PodChanges::All(all) => vec![format!("all {}", all.len())],
            PodChanges::Since(some) => {
                some.iter().map(|change| format!("{}>{}", name(&change.before), name(&change.now))).collect()
            }
        }
    }

    fn list(writer: &mut PodWriter, pods: impl IntoIterator<Item = RawPod>) -> AffectedControllers {
        writer.apply(Event::Init);
        for pod in pods {
            assert_eq!(writer.apply(Event::InitApply(pod)), AffectedControllers::default(), "only a whole list wakes");
        }
        writer.apply(Event::InitDone)
    }

    const CPU_LIMITS: fn() -> Value = || json!({"cpu": 1});
    const GPU_LIMITS: fn() -> Value = || json!({"nvidia.com/gpu-mps": 1});

    #[test]
    fn a_change_of_fields_that_are_not_stored_has_no_effect() {
        let (store, mut writer) = new_store();
        let running = || json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        let first = list(
            &mut writer,
            [with_version(raw_pod("gpu", &GPU_LIMITS(), &running()), "1"), raw_pod("cpu", &CPU_LIMITS(), &running())],
        );
        assert_eq!(first, AffectedControllers { of_gpus: true, of_tenants: true });
        assert_eq!(names(&store.changes()), ["all 2"]);
        // The changed fields are a condition that the operator does not read, an address, and the
        // resource version.
        let mut status = running();
        status["podIP"] = json!("10.0.0.1");
        status["conditions"].as_array_mut().unwrap().push(json!({"type": "Initialized", "status": "True"}));
        let beat = with_version(raw_pod("gpu", &GPU_LIMITS(), &status), "2");
        assert_eq!(writer.apply(Event::Apply(beat)), AffectedControllers::default());
        assert_eq!(names(&store.changes()), Vec::<String>::new());
        let unready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]});
        let of_gpus = AffectedControllers { of_gpus: true, of_tenants: false };
        assert_eq!(writer.apply(Event::Apply(raw_pod("gpu", &GPU_LIMITS(), &unready))), of_gpus);
        assert_eq!(names(&store.changes()), ["gpu>gpu"]);
    }

    #[test]
    fn a_changed_pod_without_gpus_is_recorded_but_wakes_no_controller() {
        let (store, mut writer) = new_store();
        list(&mut writer, []);
        store.changes();
        assert_eq!(
            writer.apply(Event::Apply(raw_pod("cpu", &CPU_LIMITS(), &json!({})))),
            AffectedControllers::default()
        );
        assert_eq!(
            writer.apply(Event::Apply(raw_pod("cpu", &json!({"cpu": 2}), &json!({})))),
            AffectedControllers::default()
        );
        assert_eq!(
            writer.apply(Event::Delete(raw_pod("cpu", &CPU_LIMITS(), &json!({})))),
            AffectedControllers::default()
        );
        assert_eq!(names(&store.changes()), ["->cpu", "cpu>cpu", "cpu>-"]);
        assert_eq!(store.state().len(), 0);
    }

    #[test]
    fn the_resource_version_of_a_gated_pod_is_kept() {
        let gated = |version: &str| {
            let mut pod = with_version(raw_pod("p", &GPU_LIMITS(), &json!({})), version);
            pod.spec.node_name = None;
            pod.spec.scheduling_gates = vec![crate::pods::Gate { name: cleave_api::names::GATE.to_owned() }];
            pod
        };
        let (store, mut writer) = new_store();
        list(&mut writer, [gated("1")]);
        assert!(writer.apply(Event::Apply(gated("2"))).of_gpus, "the patch that releases the pod tests the version");
        assert_eq!(store.state()[0].metadata.resource_version.as_deref(), Some("2"));
    }

    #[test]
    fn a_later_list_removes_deleted_pods_and_keeps_equal_pods() {
        let (store, mut writer) = new_store();
        list(&mut writer, [raw_pod("a", &GPU_LIMITS(), &json!({})), raw_pod("b", &CPU_LIMITS(), &json!({}))]);
        store.changes();
        let before = store.state();
        assert_eq!(
            list(&mut writer, [raw_pod("a", &GPU_LIMITS(), &json!({}))]),
            AffectedControllers::default(),
            "b uses no GPU"
        );
        assert_eq!(names(&store.changes()), ["b>-"]);
        assert!(before.iter().any(|pod| Arc::ptr_eq(pod, &store.state()[0])), "a is still the same object");
        assert!(list(&mut writer, []).of_gpus);
        assert_eq!(names(&store.changes()), ["a>-"]);
    }

    #[test]
    fn an_interrupted_list_takes_effect_at_the_end_of_the_next_list() {
        let (store, mut writer) = new_store();
        list(&mut writer, []);
        store.changes();
        let pod = || raw_pod("a", &GPU_LIMITS(), &json!({}));
        for _ in 0..2 {
            writer.apply(Event::Init);
            writer.apply(Event::InitApply(pod()));
        }
        let of_gpus = AffectedControllers { of_gpus: true, of_tenants: false };
        assert_eq!(list(&mut writer, [pod()]), of_gpus, "the pod is stored, and no controller was woken for it");
        assert_eq!(names(&store.changes()), ["->a"]);
        assert_eq!(list(&mut writer, [pod()]), AffectedControllers::default());
    }

    #[test]
    fn a_reader_that_forgets_changes_reads_all_pods() {
        let (store, mut writer) = new_store();
        list(&mut writer, [raw_pod("a", &GPU_LIMITS(), &json!({}))]);
        store.changes();
        store.forget_changes();
        writer.apply(Event::Apply(raw_pod("b", &GPU_LIMITS(), &json!({}))));
        assert_eq!(names(&store.changes()), ["all 2"]);
        writer.apply(Event::Delete(raw_pod("b", &GPU_LIMITS(), &json!({}))));
        assert_eq!(names(&store.changes()), ["b>-"]);
    }

    #[test]
    fn pods_of_one_controller_share_equal_parts() {
        let (store, mut writer) = new_store();
        list(
            &mut writer,
            (0..1000).map(|number| raw_pod(&format!("p{number}"), &CPU_LIMITS(), &json!({"phase": "Running"}))),
        );
        let state = lock(&writer.state);
        let Interners { names, labels, specs, statuses, .. } = &state.interners;
        assert_eq!((names.count(), labels.count(), specs.count(), statuses.count()), (2, 1, 1, 1));
        drop(state);
        assert_eq!(store.state().len(), 1000);
    }

    #[test]
    fn bound_pods_share_equal_reservations_with_different_expiry_times() {
        let (store, mut writer) = new_store();
        let reserved = |name: &str, until: u64| {
            let mut pod = raw_pod(name, &GPU_LIMITS(), &json!({}));
            let note = json!({"until": until, "nodes": {"n": [{"resource": "r", "units": 1, "device": "d"}]}});
            pod.metadata.annotations =
                Some([(cleave_api::placement::PLACEMENT_ANNOTATION.to_owned(), note.to_string())].into());
            pod
        };
        list(&mut writer, [reserved("a", 1), reserved("b", 2)]);
        let pods = store.state();
        let [Some(a), Some(b)] = [&pods[0], &pods[1]].map(|pod| pod.placement.as_deref()) else { panic!("{pods:?}") };
        assert!(std::ptr::eq(a, b));
        assert_eq!(a.nodes["n"].len(), 1);
        let mut untils: Vec<Option<u64>> = pods.iter().map(|pod| pod.reserved_until).collect();
        untils.sort_unstable();
        assert_eq!(untils, [Some(1), Some(2)], "quotas need the time of the release");
        // The reservation of a pod that is not bound keeps its expiry time.
        let mut waiting = reserved("c", 3);
        waiting.spec.node_name = None;
        writer.apply(Event::Apply(waiting));
        assert!(store.state().iter().any(|pod| pod.placement.as_ref().is_some_and(|placement| placement.until == 3)));
    }

    #[tokio::test]
    async fn the_store_is_ready_after_the_first_list() {
        let (store, mut writer) = new_store();
        writer.apply(Event::Init);
        let mut ready = std::pin::pin!(store.wait_until_ready());
        assert!(futures::poll!(&mut ready).is_pending());
        writer.apply(Event::InitDone);
        assert!(ready.await.is_ok());
        let (other, writer) = super::new_store();
        drop(writer);
        assert!(other.wait_until_ready().await.is_err());
    }
}
