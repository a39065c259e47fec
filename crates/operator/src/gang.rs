//! Finds a pod's gang in its labels, annotations and spec. Pure.
use std::collections::BTreeMap;

use cleave_api::names::{
    GANG_ANNOTATION, GANG_SIZE_ANNOTATION, KUEUE_GROUP_COUNT_ANNOTATION, KUEUE_GROUP_LABEL, POD_GROUP_LABEL,
};
use cleave_api::placement::ReleasedGang;

/// Pods that are useful only if all of them run.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PodGang {
    /// Name of the gang. Pods of one namespace with the same gang name are one gang.
    pub name: String,
    /// Minimum number of pods that are released together, at least 1. `None` if the pod states no
    /// valid size. For a released pod, the recorded number of pods of the gang.
    pub size: Option<usize>,
    /// When the gang was released, in seconds since the Unix epoch. 0 for a pod whose release
    /// recorded the size of the gang, but no time. `None` for a pod without such a record.
    pub released: Option<u64>,
    /// Whether the gang is a pod group of Kueue, which admits the pods only once all of them exist.
    pub is_of_kueue: bool,
}

impl From<ReleasedGang> for PodGang {
    fn from(ReleasedGang { name, size, since }: ReleasedGang) -> Self {
        // Early versions recorded no time. Without one, a pod that replaces a lost pod of the gang
        // would not belong to the gang.
        let released = since.or(size.map(|_| 0));
        Self { name, size, released, is_of_kueue: false }
    }
}

impl PodGang {
    /// Returns what a pod records that is released alone. `now` is in seconds since the Unix epoch.
    pub fn released_alone(&self, now: u64) -> ReleasedGang {
        ReleasedGang { name: self.name.clone(), size: Some(1), since: Some(now) }
    }

    /// Finds the gang of a pod. `group` is the group in the pod's spec (KEP-4671). The gang's name
    /// is the first set value of Cleave's annotation, Kueue's label, the coscheduling plugin's
    /// label, and the group in the spec.
    ///
    /// `PodGroup` objects are not read. If no annotation has a valid size, `size` is `None`.
    pub fn find<'a>(
        labels: &'a BTreeMap<String, String>,
        annotation: impl Fn(&str) -> Option<&'a str>,
        group: Option<&'a str>,
    ) -> Option<Self> {
        let label = |name: &str| labels.get(name).map(String::as_str);
        let named = [annotation(GANG_ANNOTATION), label(KUEUE_GROUP_LABEL), label(POD_GROUP_LABEL), group];
        let name = named.into_iter().flatten().find(|name| !name.is_empty())?;
        let sizes = [annotation(GANG_SIZE_ANNOTATION), annotation(KUEUE_GROUP_COUNT_ANNOTATION)];
        let size = sizes.into_iter().flatten().find_map(|size| size.trim().parse::<usize>().ok());
        let is_of_kueue = annotation(GANG_ANNOTATION).is_none_or(str::is_empty)
            && label(KUEUE_GROUP_LABEL).is_some_and(|name| !name.is_empty());
        let size = size.map(|size| size.max(1));
        Some(Self { name: name.to_owned(), size, released: None, is_of_kueue })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_gang(
        labels: &[(&str, &str)],
        annotations: &[(&str, &str)],
        group: Option<&str>,
    ) -> Option<(String, Option<usize>)> {
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let (labels, annotations) = (map(labels), map(annotations));
        let found = PodGang::find(&labels, |name| annotations.get(name).map(String::as_str), group);
        found.map(|gang| (gang.name, gang.size))
    }

    #[test]
    fn a_gangs_name_comes_from_an_annotation_a_label_or_the_spec() {
        let named = |name: &str, size| Some((name.to_owned(), size));
        assert_eq!(find_gang(&[("app", "x")], &[("cleave.dev/borrow", "Never")], None), None);
        assert_eq!(
            find_gang(&[], &[("cleave.dev/gang", "t"), ("cleave.dev/gang-size", "4")], None),
            named("t", Some(4))
        );
        let kueue = [("kueue.x-k8s.io/pod-group-name", "k")];
        assert_eq!(find_gang(&kueue, &[("kueue.x-k8s.io/pod-group-total-count", "3")], None), named("k", Some(3)));
        assert_eq!(find_gang(&[("scheduling.x-k8s.io/pod-group", "s")], &[], None), named("s", None));
        assert_eq!(find_gang(&[], &[("cleave.dev/gang-size", "2")], Some("g")), named("g", Some(2)));
        assert_eq!(
            find_gang(&kueue, &[("cleave.dev/gang", "t")], Some("g")),
            named("t", None),
            "Cleave's annotation is first"
        );
    }

    #[test]
    fn the_group_of_kubernetes_1_35_names_workload_group_and_replica() {
        let trimmed = |reference: serde_json::Value| {
            let mut pod: crate::pods::PodObject = serde_json::from_value(
                serde_json::json!({"metadata": {"name": "p"}, "spec": {"workloadRef": reference}}),
            )
            .unwrap();
            pod.trim();
            pod.gang.map(|gang| gang.name.clone())
        };
        let reference = serde_json::json!({"name": "train", "podGroup": "workers", "podGroupReplicaKey": "1"});
        assert_eq!(trimmed(reference).as_deref(), Some("train/workers/1"));
        let one = serde_json::json!({"name": "train", "podGroup": "workers"});
        assert_eq!(trimmed(one).as_deref(), Some("train/workers"));
        assert_eq!(trimmed(serde_json::Value::Null), None);
    }

    #[test]
    fn an_invalid_gang_size_is_ignored() {
        for size in ["", "-1", "1e9", "many", "99999999999999999999"] {
            let found = find_gang(&[], &[("cleave.dev/gang", "t"), ("cleave.dev/gang-size", size)], None);
            assert_eq!(found, Some(("t".to_owned(), None)), "{size:?}");
        }
        assert_eq!(
            find_gang(&[], &[("cleave.dev/gang", "t"), ("cleave.dev/gang-size", "0")], None),
            Some(("t".to_owned(), Some(1)))
        );
        assert_eq!(find_gang(&[], &[("cleave.dev/gang", "")], None), None, "an empty name is none");
    }
}
