//! Selects the policy that each GPU follows. Pure.
//!
//! A policy matches a GPU if the node has all of the policy's labels and each list of the policy
//! (models, UUIDs, indices) contains the GPU. If several policies match, the policy with the lowest
//! [`PolicyRank`] wins. The order prefers policies that select GPUs more precisely, then policies
//! that select nodes more precisely, then older policies, then the first by name.
use std::cmp::Reverse;
use std::collections::BTreeMap;

use cleave_api::gpunode::GpuStatus;
use cleave_api::sharingpolicy::GpuSelector;
use jiff::Timestamp;

use crate::policies::validate::Policy;

/// How precisely a policy selects GPUs. The lowest rank wins.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PolicyRank<'a> {
    // These fields are reversed, so that a more specific policy has a lower rank.
    uuids: Reverse<bool>,
    indices: Reverse<bool>,
    models: Reverse<bool>,
    labels: Reverse<usize>,
    created: (bool, Option<Timestamp>),
    name: &'a str,
}

impl<'a> PolicyRank<'a> {
    /// Returns the rank of a policy.
    pub(super) fn of(policy: &'a Policy) -> Self {
        Self {
            uuids: Reverse(!policy.gpus.uuids.is_empty()),
            indices: Reverse(!policy.gpus.indices.is_empty()),
            models: Reverse(!policy.gpus.models.is_empty()),
            labels: Reverse(policy.nodes.len()),
            created: (policy.created.is_none(), policy.created),
            name: &policy.name,
        }
    }
}

/// Sorts policies so that the winning policy comes first.
pub(super) fn sort_by_rank(policies: &mut [Policy]) {
    policies.sort_by(|a, b| PolicyRank::of(a).cmp(&PolicyRank::of(b)));
}

/// Returns the policies that match a GPU, the winner first. `policies` must be sorted by
/// [`sort_by_rank`].
pub(super) fn matching_policies<'a>(
    policies: &'a [Policy],
    labels: &'a BTreeMap<String, String>,
    gpu: &'a GpuStatus,
) -> impl Iterator<Item = &'a Policy> {
    policies.iter().filter(move |policy| selects_node(policy, labels) && selects_gpu(&policy.gpus, gpu))
}

/// Returns whether a node has all labels that a policy requires.
pub(super) fn selects_node(policy: &Policy, labels: &BTreeMap<String, String>) -> bool {
    policy.nodes.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Returns whether a GPU is in each non-empty list of the selector.
pub(super) fn selects_gpu(selector: &GpuSelector, gpu: &GpuStatus) -> bool {
    let GpuSelector { models, uuids, indices } = selector;
    (models.is_empty() || models.iter().any(|model| matches_model(model, &gpu.model)))
        && (uuids.is_empty() || uuids.contains(&gpu.uuid))
        && (indices.is_empty() || indices.contains(&gpu.index))
}

/// Returns whether `wanted` is the product name, or a part of it between word boundaries, ignoring
/// case. `A100` matches `NVIDIA A100-SXM4-40GB`; `A10` does not.
pub(crate) fn matches_model(wanted: &str, product: &str) -> bool {
    let wanted = wanted.trim().to_ascii_lowercase();
    let product = product.to_ascii_lowercase();
    let boundary = |character: Option<char>| character.is_none_or(|character| !character.is_ascii_alphanumeric());
    !wanted.is_empty()
        && product.match_indices(&wanted).any(|(at, found)| {
            let (before, rest) = product.split_at(at);
            boundary(before.chars().next_back()) && boundary(rest.chars().nth(found.chars().count()))
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policies::validate::{BatchRules, RolloutRules, SharingMode};

    fn policy(name: &str, created: i64, labels: usize, gpus: GpuSelector) -> Policy {
        Policy {
            name: name.to_owned(),
            created: Timestamp::from_second(created).ok(),
            nodes: (0..labels).map(|label| (format!("l{label}"), "v".to_owned())).collect(),
            gpus,
            share: SharingMode::Whole,
            enforcement: cleave_api::sharingpolicy::Enforcement::Report,
            dynamic: BatchRules::default(),
            rollout: RolloutRules::default(),
        }
    }

    fn models(models: &[&str]) -> GpuSelector {
        GpuSelector { models: models.iter().map(|&model| model.to_owned()).collect(), ..GpuSelector::default() }
    }

    #[test]
    fn a_model_matches_only_between_word_boundaries() {
        let product = "NVIDIA A100-SXM4-40GB";
        for part in ["A100", "NVIDIA A100", "a100-sxm4", "40GB", product] {
            assert!(matches_model(part, product), "{part}");
        }
        for part in ["A10", "100", "40G", "H100", "", " ", "A100 SXM4"] {
            assert!(!matches_model(part, product), "{part}");
        }
        assert!(!matches_model("L4", "NVIDIA L40S"));
        assert!(matches_model("L4", "NVIDIA L4"));
    }

    #[test]
    fn the_more_specific_policy_wins_then_the_older_policy_then_the_first_name() {
        let gpu = |uuids: &[&str], indices: &[u32]| GpuSelector {
            uuids: uuids.iter().map(|&uuid| uuid.to_owned()).collect(),
            indices: indices.to_vec(),
            ..GpuSelector::default()
        };
        let mut policies = vec![
            policy("all-b", 5, 0, GpuSelector::default()),
            policy("all-a", 5, 0, GpuSelector::default()),
            policy("all-older", 1, 0, GpuSelector::default()),
            policy("two-labels", 9, 2, GpuSelector::default()),
            policy("one-label", 1, 1, GpuSelector::default()),
            policy("model", 9, 0, models(&["A100"])),
            policy("index", 9, 0, gpu(&[], &[0])),
            policy("uuid", 9, 0, gpu(&["GPU-x"], &[])),
        ];
        policies.push(Policy { created: None, ..policy("all-undated", 0, 0, GpuSelector::default()) });
        sort_by_rank(&mut policies);
        let names: Vec<&str> = policies.iter().map(|policy| policy.name.as_str()).collect();
        assert_eq!(
            names,
            ["uuid", "index", "model", "two-labels", "one-label", "all-older", "all-a", "all-b", "all-undated"]
        );
    }

    #[test]
    fn a_gpu_must_be_in_each_non_empty_list() {
        let gpu = GpuStatus { uuid: "GPU-1".into(), index: 1, model: "NVIDIA L4".into(), ..GpuStatus::default() };
        let both = GpuSelector { indices: vec![1], ..models(&["L4"]) };
        assert!(selects_gpu(&both, &gpu));
        assert!(!selects_gpu(&GpuSelector { indices: vec![0], ..both }, &gpu));
        assert!(selects_gpu(&GpuSelector::default(), &gpu));
    }

    #[test]
    fn a_policy_selects_a_node_only_if_all_labels_match() {
        let labels = BTreeMap::from([("l0".to_owned(), "v".to_owned()), ("l1".to_owned(), "w".to_owned())]);
        assert!(selects_node(&policy("p", 0, 0, GpuSelector::default()), &labels));
        assert!(selects_node(&policy("p", 0, 1, GpuSelector::default()), &labels));
        assert!(!selects_node(&policy("p", 0, 2, GpuSelector::default()), &labels));
    }

    proptest! {
        #[test]
        fn the_order_of_policies_does_not_depend_on_the_input_order(seed in proptest::collection::vec((0i64..3, 0usize..3, any::<bool>()), 1..8).prop_shuffle()) {
            let all: Vec<Policy> = seed.iter().enumerate().map(|(at, &(created, labels, model))| {
                policy(&format!("p{at}"), created, labels, if model { models(&["A"]) } else { GpuSelector::default() })
            }).collect();
            let mut forwards = all.clone();
            let mut backwards: Vec<Policy> = all.into_iter().rev().collect();
            sort_by_rank(&mut forwards);
            sort_by_rank(&mut backwards);
            prop_assert_eq!(forwards, backwards);
        }

        #[test]
        fn model_matching_accepts_any_text(wanted in ".{0,12}", product in ".{0,24}") {
            matches_model(&wanted, &product);
        }
    }
}
