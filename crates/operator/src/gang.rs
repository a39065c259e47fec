//! Finds a pod's gang in its labels, annotations and spec. Pure.
use std::collections::BTreeMap;

use cleave_api::names::{
    GANG_ANNOTATION, GANG_SIZE_ANNOTATION, KUEUE_GROUP_COUNT_ANNOTATION, KUEUE_GROUP_LABEL, POD_GROUP_LABEL,
};

/// Pods that are useful only if all of them run.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PodGang {
    /// Name of the gang. Pods of one namespace with the same name are one gang.
    pub name: String,
    /// Minimum number of pods that are released together, at least 1. `None` if the pod does not
    /// state it.
    pub size: Option<usize>,
    /// Where the name comes from.
    pub source: GangSource,
}

/// Where the name of a gang comes from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GangSource {
    /// Cleave's annotation.
    Annotation,
    /// Kueue's label. Kueue admits the pods of a group only once all of them exist.
    Kueue,
    /// The coscheduling plugin's label, which names a `PodGroup` of `scheduling.x-k8s.io`.
    Coscheduling,
    /// The pod's spec since Kubernetes 1.36, which names a `PodGroup` of `scheduling.k8s.io`.
    PodGroup,
    /// The pod's spec in Kubernetes 1.35, which names a group of a `Workload`.
    Workload {
        /// Name of the `Workload`.
        name: String,
        /// Name of the group in the `Workload`.
        group: String,
    },
}

/// The group in a pod's spec (KEP-4671).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupInSpec<'a> {
    /// Name of a `PodGroup`.
    PodGroup(&'a str),
    /// A group of a `Workload`. The key distinguishes replicas of the group.
    Workload {
        /// Name of the `Workload`.
        name: &'a str,
        /// Name of the group.
        group: &'a str,
        /// Key of the replica. Empty if the group has no replicas.
        key: &'a str,
    },
}

impl GroupInSpec<'_> {
    /// Returns the name of the gang and its source. Returns `None` if a name is empty.
    fn gang(self) -> Option<(String, GangSource)> {
        match self {
            Self::PodGroup(name) => (!name.is_empty()).then(|| (name.to_owned(), GangSource::PodGroup)),
            Self::Workload { name, group, key } => {
                let gang = [name, group, key].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
                let source = GangSource::Workload { name: name.to_owned(), group: group.to_owned() };
                (!name.is_empty() && !group.is_empty()).then_some((gang, source))
            }
        }
    }
}

impl PodGang {
    /// Finds the gang of a pod. `group` is the group in the pod's spec. The gang's name is the first
    /// set value of Cleave's annotation, Kueue's label, the coscheduling plugin's label, and the group
    /// in the spec.
    pub fn find<'a>(
        labels: &'a BTreeMap<String, String>,
        annotation: impl Fn(&str) -> Option<&'a str>,
        group: Option<GroupInSpec<'a>>,
    ) -> Option<Self> {
        let label = |name: &str| labels.get(name).map(String::as_str);
        let named = [
            (annotation(GANG_ANNOTATION), GangSource::Annotation),
            (label(KUEUE_GROUP_LABEL), GangSource::Kueue),
            (label(POD_GROUP_LABEL), GangSource::Coscheduling),
        ];
        let named = named
            .into_iter()
            .find_map(|(name, source)| name.filter(|name| !name.is_empty()).map(|name| (name.to_owned(), source)));
        let (name, source) = named.or_else(|| group?.gang())?;
        let sizes = [annotation(GANG_SIZE_ANNOTATION), annotation(KUEUE_GROUP_COUNT_ANNOTATION)];
        let size = sizes.into_iter().flatten().find_map(|size| size.trim().parse::<usize>().ok());
        Some(Self { name, size: size.map(|size| size.max(1)), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_gang(
        labels: &[(&str, &str)],
        annotations: &[(&str, &str)],
        group: Option<GroupInSpec<'_>>,
    ) -> Option<(String, Option<usize>, GangSource)> {
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let (labels, annotations) = (map(labels), map(annotations));
        let found = PodGang::find(&labels, |name| annotations.get(name).map(String::as_str), group);
        found.map(|gang| (gang.name, gang.size, gang.source))
    }

    #[test]
    fn a_gangs_name_comes_from_an_annotation_a_label_or_the_spec() {
        let named = |name: &str, size, source| Some((name.to_owned(), size, source));
        let group = Some(GroupInSpec::PodGroup("g"));
        let kueue = [("kueue.x-k8s.io/pod-group-name", "k")];
        let count = [("kueue.x-k8s.io/pod-group-total-count", "3")];
        let plugin = [("scheduling.x-k8s.io/pod-group", "s")];
        let own = [("cleave.dev/gang", "t"), ("cleave.dev/gang-size", "4")];
        let size = [("cleave.dev/gang-size", "2")];
        assert_eq!(find_gang(&[("app", "x")], &[("cleave.dev/borrow", "Never")], None), None);
        assert_eq!(find_gang(&[], &own, None), named("t", Some(4), GangSource::Annotation));
        assert_eq!(find_gang(&kueue, &count, None), named("k", Some(3), GangSource::Kueue));
        assert_eq!(find_gang(&plugin, &[], None), named("s", None, GangSource::Coscheduling));
        assert_eq!(find_gang(&[], &size, group), named("g", Some(2), GangSource::PodGroup));
        let first = named("t", None, GangSource::Annotation);
        assert_eq!(find_gang(&kueue, &own[..1], group), first, "Cleave's annotation is first");
    }

    #[test]
    fn each_replica_of_a_group_of_a_workload_is_a_gang() {
        let workload = |name, group, key| Some(GroupInSpec::Workload { name, group, key });
        let source = GangSource::Workload { name: "w".to_owned(), group: "g".to_owned() };
        assert_eq!(find_gang(&[], &[], workload("w", "g", "")), Some(("w/g".to_owned(), None, source.clone())));
        assert_eq!(find_gang(&[], &[], workload("w", "g", "1")), Some(("w/g/1".to_owned(), None, source)));
        assert_eq!(find_gang(&[], &[], workload("w", "", "1")), None);
    }

    #[test]
    fn an_invalid_gang_size_is_ignored() {
        let find_size = |size| {
            let found = find_gang(&[], &[("cleave.dev/gang", "t"), ("cleave.dev/gang-size", size)], None);
            found.and_then(|(_, size, _)| size)
        };
        for size in ["", "-1", "1e9", "many", "99999999999999999999"] {
            assert_eq!(find_size(size), None, "{size:?}");
        }
        assert_eq!(find_size("0"), Some(1));
        assert_eq!(find_gang(&[], &[("cleave.dev/gang", "")], None), None, "an empty name is none");
    }
}
