//! Targets for the operator's input: objects and admission requests from the API server.
use cleave_api::{GpuNode, SharingPolicy, SharingPolicySpec};
use cleave_operator::admission::webhook::{PodChange, review};
use cleave_operator::dry_run;
use cleave_operator::pods::PodObject;
use cleave_operator::policies::apply;
use cleave_operator::policies::demand::{self, Outcome};
use cleave_operator::policies::plan::{self, PolicyError};
use cleave_operator::policies::snapshot::History;
use cleave_operator::policies::validate::{MpsShare, ShareSize, SharingMode, validate};
use cleave_operator::read::{AgentPod, NodeObject, Observed};
use kube::core::DeserializeGuard;
use serde::Deserialize;
use serde_json::{Value, json};

use super::fixtures;
use crate::mutate::InputShape;
use crate::{ReadResult, Target, assert_printable};

pub(super) const POLICY: Target = Target {
    name: "policy",
    what: "SharingPolicy objects that the API server accepts",
    shape: InputShape::Json,
    words: &[
        "mode",
        "mps",
        "units",
        "unitMemory",
        "sizes",
        "Dynamic",
        "timeSlicing",
        "replicas",
        "mig",
        "layout",
        "sharing",
        "1g.10gb",
        "10Gi",
        "nodeSelector",
        "gpus",
        "models",
        "uuids",
        "indices",
        "clients",
        "max",
        "split",
        "dynamic",
        "60s",
        "resourceName",
        "nvidia.com/gpu.shared",
        "nvidia.com/gpu-x",
        "Auto",
        "Mig",
        "Mps",
        "Whole",
        "TimeSlicing",
    ],
    samples: || fixtures::policies().iter().map(fixtures::to_json).collect(),
    inputs: 900,
    run: |bytes| {
        let Ok(policy) = serde_json::from_slice::<DeserializeGuard<SharingPolicy>>(bytes) else {
            return ReadResult::Refused;
        };
        let mut observed = read_cluster(&fixtures::cluster()).unwrap_or_default();
        observed.policies.clear();
        observed.add_policy(&policy);
        let run = plan_cluster(&observed);
        for report in run.plan.policies.values() {
            match &report.invalid {
                Some(PolicyError::Malformed(error)) => assert!(!error.is_empty()),
                Some(PolicyError::Refused(error)) => assert_printable(&error.to_string()),
                None => {}
            }
            report.unsupported.iter().for_each(|(_, cannot)| assert_printable(&cannot.to_string()));
        }
        let Ok(policy) = policy.0 else { return ReadResult::Refused };
        let again = serde_json::from_slice::<SharingPolicySpec>(&fixtures::to_json(&policy.spec)).ok();
        assert_eq!(again.as_ref(), Some(&policy.spec));
        match validate("p", None, &policy.spec) {
            Err(_) => ReadResult::Refused,
            Ok(valid) => {
                if let SharingMode::Mps(MpsShare { size: ShareSize::Units(units), .. }) = valid.share {
                    assert!((1..=48).contains(&units), "a policy with {units} units was accepted");
                }
                ReadResult::Read
            }
        }
    },
};

/// Lists of objects that the operator watches.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct FuzzedCluster {
    nodes: Vec<NodeObject>,
    agents: Vec<AgentPod>,
    gpu_nodes: Vec<DeserializeGuard<GpuNode>>,
    policies: Vec<DeserializeGuard<SharingPolicy>>,
    pods: Vec<PodObject>,
}

impl FuzzedCluster {
    fn into_observed(mut self) -> Observed {
        let mut observed = Observed::default();
        self.nodes.iter().for_each(|node| observed.add_node(node));
        self.agents.iter().for_each(|pod| observed.add_agent(pod));
        self.gpu_nodes.iter().for_each(|object| observed.add_gpu_node(object));
        self.policies.iter().for_each(|policy| observed.add_policy(policy));
        self.pods.iter_mut().for_each(PodObject::trim);
        observed.set_pods(self.pods.iter());
        observed
    }
}

/// Reads the objects of a cluster as the operator does.
pub(super) fn read_cluster(cluster: &Value) -> Option<Observed> {
    FuzzedCluster::deserialize(cluster).ok().map(FuzzedCluster::into_observed)
}

/// Runs the operator's planning. Checks that the plan passes `check`, and that the operator can
/// read the objects that it would write.
pub(super) fn plan_cluster(observed: &Observed) -> dry_run::DryRun {
    let mut plan = plan::plan(observed);
    let outcome: Outcome =
        demand::decide_partitions(&mut plan, observed, &mut History::default(), std::time::Duration::ZERO);
    let wrong: Vec<String> = outcome.violations.iter().map(ToString::to_string).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    let changes = apply::changes(&plan, observed);
    for change in &changes {
        let again = serde_json::from_slice(&fixtures::to_json(&change.spec)).ok();
        assert_eq!(again.as_ref(), Some(&change.spec));
    }
    dry_run::DryRun { plan, outcome, changes }
}

pub(super) const CLUSTER: Target = Target {
    name: "cluster",
    what: "nodes, GpuNodes, policies and pods together, as the operator plans for them",
    shape: InputShape::Json,
    words: &[
        "n1",
        "n2",
        "spec",
        "status",
        "gpus",
        "slices",
        "mig",
        "instances",
        "profiles",
        "models",
        "health",
        "total",
        "inUse",
        "allocations",
        "nvidia.com/gpu",
        "nvidia.com/gpu-mps",
        "nvidia.com/gpu-10gb",
        "nvidia.com/mig-1g.10gb",
        "cleave.dev/placement",
        "cleave.dev/cordon",
        "cpu",
        "memory",
        "500m",
        "16Ei",
        "Auto",
        "Mps",
        "Mig",
        "In",
        "Exists",
        "nodeName",
    ],
    samples: || vec![fixtures::to_json(&fixtures::cluster())],
    inputs: 300,
    run: |bytes| {
        let Some(observed) = serde_json::from_slice(bytes).ok().and_then(|cluster| read_cluster(&cluster)) else {
            return ReadResult::Refused;
        };
        plan_cluster(&observed);
        ReadResult::Read
    },
};

pub(super) const ADMISSION_REVIEW: Target = Target {
    name: "review",
    what: "AdmissionReviews of pods, at the operator's webhook",
    shape: InputShape::Json,
    words: &[
        "request",
        "object",
        "spec",
        "containers",
        "initContainers",
        "lifecycle",
        "preStop",
        "schedulingGates",
        "cleave.dev/placement",
        "cleave.dev/pre-stop",
        "nvidia.com/gpu-mps",
        "nvidia.com/gpu",
        "limits",
        "tolerations",
        "operator",
        "Exists",
        "restartPolicy",
        "Always",
        "terminationGracePeriodSeconds",
    ],
    samples: || {
        let review = |pod: Value| {
            json!({
                "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                "request": {
                    "uid": "6f1d2c3b-4a59-4e68-8f77-0123456789ab", "kind": {"group": "", "version": "v1", "kind": "Pod"},
                    "resource": {"group": "", "version": "v1", "resource": "pods"}, "name": "p", "namespace": "team", "operation": "CREATE",
                    "userInfo": {"username": "somebody"}, "dryRun": false, "object": pod,
                },
            })
        };
        let plain = fixtures::pod(
            "p",
            "nvidia.com/gpu-mps",
            2,
            &json!({"spec/schedulingGates": [], "spec/containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu-mps": "2"}}}]}),
        );
        let bare = fixtures::pod(
            "p",
            "nvidia.com/gpu-mps",
            2,
            &json!({"spec/schedulingGates": [], "spec/initContainers": []}),
        );
        [plain, bare].map(|pod| fixtures::to_json(&review(pod))).to_vec()
    },
    inputs: 2_000,
    run: |bytes| {
        let mut seen = ReadResult::Refused;
        for change in [PodChange::Gate { tolerate: false }, PodChange::Gate { tolerate: true }, PodChange::PreStop(5)] {
            match review(change, bytes, |_| false) {
                Err(error) => assert_printable(&error.to_string()),
                Ok(answer) => {
                    let response = answer.response.unwrap_or_else(|| unreachable!("an answer to a request"));
                    seen = ReadResult::Read;
                    let Some(patch) = response.patch else { continue };
                    let Ok(mut sent) = serde_json::from_slice::<Value>(bytes) else { continue };
                    let patch: json_patch::Patch = serde_json::from_slice(&patch).unwrap_or_default();
                    assert!(!patch.0.is_empty(), "the patch changes nothing");
                    let Some(pod) = sent.pointer_mut("/request/object") else { continue };
                    let applied = json_patch::patch(pod, &patch);
                    assert!(applied.is_ok(), "{applied:?} of {patch:?}");
                    let again = review(change, &fixtures::to_json(&sent), |_| false);
                    let patched = again.map(|answer| answer.response.is_some_and(|response| response.patch.is_some()));
                    assert!(matches!(patched, Ok(false)), "a second admission changes the pod again: {patched:?}");
                }
            }
        }
        seen
    },
};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::targets::agent::{sample_actions, sample_spec};

    #[test]
    fn the_sample_cluster_has_every_sharing_mode() {
        let run = plan_cluster(&read_cluster(&fixtures::cluster()).unwrap());
        assert!(run.plan.policies.values().all(|report| report.invalid.is_none() && report.unreported.is_empty()));
        assert_eq!(run.changes.len(), 2);
        let placed = run.outcome.planned.map_or(0, |planned| planned.plan.placements.len());
        assert!(placed >= 2, "only {placed} pods are placed");
        let partitions: Vec<_> = sample_spec().gpus.into_iter().map(|gpu| gpu.partition).collect();
        assert!(partitions.iter().any(|one| one.mps.is_some()) && partitions.iter().any(|one| one.mig.is_some()));
        assert!(partitions.iter().any(|one| one.time_slicing.is_some()));
        let actions = sample_actions();
        assert!(actions.desired.daemons.len() >= 2 && actions.desired.allocations.len() == 1, "{:?}", actions.desired);
        let modes: BTreeSet<&str> = actions.checkpoint.layouts.values().map(|layout| layout.mode.as_str()).collect();
        assert!(modes.len() >= 3, "{modes:?}");
    }
}
