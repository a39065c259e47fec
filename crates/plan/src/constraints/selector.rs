//! Label selectors.
use std::collections::BTreeMap;

use serde::Deserialize;

use crate::scheduling::requirement_matches;
use crate::snapshot::{Operator, Requirement};

/// Labels of a pod, a node or a namespace.
pub type Labels = BTreeMap<String, String>;

/// Maximum number of comparisons for one pod's rules. Counts terms, requirements, their values,
/// namespaces and ports together.
///
/// A pod is an API object of up to 1.5 MiB, so it can contain 50,000 requirements. This limit
/// bounds the time that one pod takes.
pub const MAX_REQUIREMENTS: usize = 256;

/// A `metav1.LabelSelector`. All requirements of a selector must match. A selector without
/// requirements matches everything.
///
/// A missing selector (`None`) matches nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LabelSelector {
    /// Labels that must have exactly these values.
    pub match_labels: BTreeMap<String, String>,
    /// Requirements on labels: `In`, `NotIn`, `Exists` or `DoesNotExist`. Any other operator
    /// matches nothing.
    pub match_expressions: Vec<Requirement>,
}

impl LabelSelector {
    /// Returns whether the labels meet every requirement.
    pub fn matches(&self, labels: &Labels) -> bool {
        let holds = |requirement: &Requirement| {
            let known = !matches!(requirement.operator, Operator::Gt | Operator::Lt | Operator::Unknown);
            known && requirement_matches(requirement, labels.get(&requirement.key).map(String::as_str))
        };
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(holds)
    }

    /// Returns whether the selector has no requirements.
    pub(super) fn is_empty(&self) -> bool {
        self.match_labels.is_empty() && self.match_expressions.is_empty()
    }

    /// Returns the maximum number of comparisons that [`Self::matches`] makes. The count stops soon
    /// after [`MAX_REQUIREMENTS`].
    pub(super) fn max_comparisons(&self) -> usize {
        let expressions = self.match_expressions.iter().take(MAX_REQUIREMENTS + 1);
        self.match_labels.len() + expressions.map(|one| 1 + one.values.len()).sum::<usize>()
    }
}
