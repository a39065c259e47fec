//! Stores the sizes of gangs that other objects state: `PodGroup`s of the coscheduling plugin, and
//! `PodGroup`s and `Workload`s of Kubernetes (KEP-4671). `gang_watch` reads these objects.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::ResourceExt as _;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event;
use serde_json::Value;

use crate::gang::{GangSource, PodGang};

/// Size of a gang whose group is not listed yet. No gang has so many pods.
pub(crate) const UNKNOWN_SIZE: usize = usize::MAX;

/// A kind of object that states the size of a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupKind {
    /// `PodGroup` of the coscheduling plugin.
    Coscheduling,
    /// `PodGroup` of Kubernetes since 1.36.
    PodGroup,
    /// `Workload` of Kubernetes 1.35.
    Workload,
}

impl GroupKind {
    /// All kinds.
    pub(crate) const ALL: [Self; 3] = [Self::Coscheduling, Self::PodGroup, Self::Workload];

    /// Returns the value of the `kind` label in metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Coscheduling => "PodGroup.scheduling.x-k8s.io",
            Self::PodGroup => "PodGroup.scheduling.k8s.io",
            Self::Workload => "Workload.scheduling.k8s.io",
        }
    }

    /// Returns the API group, the versions whose fields the operator knows, the newest first, and the
    /// plural of the resource.
    pub(crate) const fn resource(self) -> (&'static str, &'static [&'static str], &'static str) {
        match self {
            Self::Coscheduling => ("scheduling.x-k8s.io", &["v1alpha1"], "podgroups"),
            Self::PodGroup => ("scheduling.k8s.io", &["v1", "v1beta1", "v1alpha3", "v1alpha2"], "podgroups"),
            Self::Workload => ("scheduling.k8s.io", &["v1alpha1"], "workloads"),
        }
    }

    /// Returns the groups that an object describes as gangs, each with its size. The group of a
    /// `PodGroup` has no name of its own.
    fn sizes(self, object: &DynamicObject) -> Vec<(String, usize)> {
        let size = |value: &Value| value.as_u64().and_then(|size| usize::try_from(size).ok());
        let alone = |path: &str| {
            let size = object.data.pointer(path).and_then(size);
            size.map(|size| (String::new(), size)).into_iter().collect()
        };
        match self {
            Self::Coscheduling => alone("/spec/minMember"),
            Self::PodGroup => alone("/spec/schedulingPolicy/gang/minCount"),
            Self::Workload => {
                let groups = object.data.pointer("/spec/podGroups").and_then(Value::as_array);
                let sized = |group: &Value| {
                    let name = group.get("name")?.as_str()?.to_owned();
                    Some((name, size(group.pointer("/policy/gang/minCount")?)?))
                };
                groups.into_iter().flatten().filter_map(sized).collect()
            }
        }
    }
}

/// Name of a group: its kind, its namespace, the name of the object, and the name of the group in the
/// object.
type GroupName = (GroupKind, String, String, String);

/// The sizes of groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupSizes {
    sizes: Arc<BTreeMap<GroupName, usize>>,
    /// Kinds whose objects are not listed yet.
    unlisted: BTreeSet<GroupKind>,
}

impl GroupSizes {
    /// Returns the number of pods without which no pod of a gang is released, at least 1. The pod's
    /// own statement counts first. Returns [`UNKNOWN_SIZE`] if the group is not listed yet.
    pub(crate) fn size(&self, namespace: &str, gang: &PodGang) -> usize {
        if let Some(size) = gang.size {
            return size;
        }
        let (kind, object, group) = match &gang.source {
            GangSource::Annotation | GangSource::Kueue => return 1,
            GangSource::Coscheduling => (GroupKind::Coscheduling, &gang.name, ""),
            GangSource::PodGroup => (GroupKind::PodGroup, &gang.name, ""),
            GangSource::Workload { name, group } => (GroupKind::Workload, name, group.as_str()),
        };
        if self.unlisted.contains(&kind) {
            return UNKNOWN_SIZE;
        }
        let name = (kind, namespace.to_owned(), object.clone(), group.to_owned());
        self.sizes.get(&name).copied().unwrap_or(1).max(1)
    }

    fn remove(&mut self, kind: GroupKind, object: &DynamicObject) {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let is_other = |(of, at, object, _): &GroupName| (*of, at, object) != (kind, &namespace, &name);
        if !self.sizes.keys().all(is_other) {
            Arc::make_mut(&mut self.sizes).retain(|of, _| is_other(of));
        }
    }

    fn insert(&mut self, kind: GroupKind, object: &DynamicObject) {
        self.remove(kind, object);
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        for (group, size) in kind.sizes(object) {
            Arc::make_mut(&mut self.sizes).insert((kind, namespace.clone(), name.clone(), group), size);
        }
    }

    /// Replaces all groups of a kind.
    fn replace(&mut self, kind: GroupKind, objects: &[DynamicObject]) {
        if self.sizes.keys().any(|(of, ..)| *of == kind) {
            Arc::make_mut(&mut self.sizes).retain(|(of, ..), _| *of != kind);
        }
        objects.iter().for_each(|object| self.insert(kind, object));
        self.unlisted.remove(&kind);
    }
}

/// Stored sizes of groups. Clones share them.
#[derive(Debug, Clone)]
pub struct GroupStore(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    known: GroupSizes,
    /// Objects of lists that are not complete yet.
    listed: BTreeMap<GroupKind, Vec<DynamicObject>>,
}

impl Default for GroupStore {
    /// Creates a store in which no kind is listed yet.
    fn default() -> Self {
        let known = GroupSizes { unlisted: GroupKind::ALL.into(), ..GroupSizes::default() };
        Self(Arc::new(Mutex::new(State { known, listed: BTreeMap::new() })))
    }
}

impl GroupStore {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Ignore poisoning: a panic aborts the process.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the sizes of all groups.
    pub fn state(&self) -> GroupSizes {
        self.lock().known.clone()
    }

    /// Stores an event. Returns whether the sizes have changed.
    pub(crate) fn apply(&self, kind: GroupKind, event: Event<DynamicObject>) -> bool {
        let mut state = self.lock();
        let State { known, listed } = &mut *state;
        let before = known.clone();
        match event {
            Event::Init => drop(listed.insert(kind, Vec::new())),
            Event::InitApply(object) => listed.entry(kind).or_default().push(object),
            Event::InitDone => known.replace(kind, &listed.remove(&kind).unwrap_or_default()),
            Event::Apply(object) => known.insert(kind, &object),
            Event::Delete(object) => known.remove(kind, &object),
        }
        *known != before
    }

    /// Records that the cluster does not have a kind, or that the operator may not read it. Returns
    /// whether the sizes have changed.
    pub(crate) fn record_absence(&self, kind: GroupKind) -> bool {
        let mut state = self.lock();
        let before = state.known.clone();
        state.known.replace(kind, &[]);
        state.known != before
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(kind: GroupKind, name: &str, spec: &Value) -> DynamicObject {
        let (group, versions, _) = kind.resource();
        let meta = json!({"name": name, "namespace": "team"});
        let api_version = format!("{group}/{}", versions[0]);
        serde_json::from_value(json!({"apiVersion": api_version, "kind": "Group", "metadata": meta, "spec": spec}))
            .unwrap()
    }

    fn gang(name: &str, source: GangSource) -> PodGang {
        PodGang { name: name.to_owned(), size: None, source }
    }

    fn list(store: &GroupStore, kind: GroupKind, objects: Vec<DynamicObject>) -> bool {
        store.apply(kind, Event::Init);
        for object in objects {
            assert!(!store.apply(kind, Event::InitApply(object)), "a list counts once it is complete");
        }
        store.apply(kind, Event::InitDone)
    }

    #[test]
    fn each_kind_of_group_states_its_size() {
        let store = GroupStore::default();
        let workload = GangSource::Workload { name: "w".to_owned(), group: "workers".to_owned() };
        let gangs =
            [gang("s", GangSource::Coscheduling), gang("p", GangSource::PodGroup), gang("w/workers/1", workload)];
        let sizes = || gangs.each_ref().map(|gang| store.state().size("team", gang));
        assert_eq!(sizes(), [UNKNOWN_SIZE; 3], "nothing is listed");
        let groups = json!({"podGroups": [{"name": "driver", "policy": {"basic": {}}},
            {"name": "workers", "policy": {"gang": {"minCount": 4}}}]});
        for (kind, name, spec) in [
            (GroupKind::Coscheduling, "s", json!({"minMember": 2})),
            (GroupKind::PodGroup, "p", json!({"schedulingPolicy": {"gang": {"minCount": 3}}})),
            (GroupKind::Workload, "w", groups),
        ] {
            assert!(list(&store, kind, vec![object(kind, name, &spec)]));
        }
        assert_eq!(sizes(), [2, 3, 4]);
        let state = store.state();
        assert_eq!(state.size("other", &gangs[0]), 1, "the group is in another namespace");
        assert_eq!(
            state.size("team", &PodGang { size: Some(7), ..gangs[0].clone() }),
            7,
            "the pod's statement is first"
        );
        assert_eq!(state.size("team", &gang("s", GangSource::Annotation)), 1, "no group is named");
    }

    #[test]
    fn sizes_follow_the_objects() {
        let (store, kind) = (GroupStore::default(), GroupKind::PodGroup);
        let group =
            |name: &str, count: u32| object(kind, name, &json!({"schedulingPolicy": {"gang": {"minCount": count}}}));
        let size = |name: &str| store.state().size("team", &gang(name, GangSource::PodGroup));
        assert!(store.record_absence(kind) && !store.record_absence(kind));
        assert_eq!(size("a"), 1, "the cluster has no such resource");
        assert!(list(&store, kind, vec![group("a", 2), group("b", 3)]));
        assert!(store.apply(kind, Event::Apply(group("a", 5))) && !store.apply(kind, Event::Apply(group("a", 5))));
        assert!(store.apply(kind, Event::Delete(group("b", 3))));
        assert_eq!((size("a"), size("b")), (5, 1));
        let basic = object(kind, "a", &json!({"schedulingPolicy": {"basic": {}}}));
        assert!(store.apply(kind, Event::Apply(basic)));
        assert_eq!(size("a"), 1, "the group is no gang");
        assert!(list(&store, kind, vec![group("c", 2)]));
        assert_eq!((size("a"), size("c")), (1, 2), "a later list replaces the groups");
    }
}
