//! The target for the input of `cleave plan --snapshot`.
use cleave_plan::{Policy, Snapshot, check, plan};
use serde_json::json;

use super::{fixtures, mps};
use crate::mutate::InputShape;
use crate::{ReadResult, Target};

pub(super) const SNAPSHOT: Target = Target {
    name: "snapshot",
    what: "snapshots of a cluster, for the planner",
    shape: InputShape::Json,
    words: &[
        "nodes",
        "pods",
        "gpus",
        "slices",
        "profiles",
        "units",
        "replicas",
        "sizes",
        "fixed",
        "leftOut",
        "placement",
        "inUse",
        "count",
        "migSharing",
        "nvidia.com/gpu",
        "nvidia.com/gpu-mps",
        "nvidia.com/gpu-10gb",
        "nvidia.com/gpu.shared",
        "nvidia.com/mig-1g.10gb",
        "nvidia.com/mig-3g.40gb.shared",
        "Auto",
        "Mps",
        "Mig",
        "TimeSlicing",
        "80Gi",
        "16Ei",
        "1n",
        "Exists",
        "NotIn",
        "Gt",
    ],
    samples: || {
        let gpu = |index: u32, more: serde_json::Value| {
            let mut gpu = json!({"uuid": fixtures::gpu_uuid(index), "index": index, "model": fixtures::GPU_MODEL, "memory": "81079Mi", "mode": "Auto"});
            if let (Some(fields), Some(more)) = (gpu.as_object_mut(), more.as_object()) {
                fields.extend(more.clone());
            }
            gpu
        };
        let busy = json!([{"resource": "nvidia.com/mig-3g.40gb", "placement": 4, "inUse": true, "pod": "team/x"}]);
        let shares = json!([{"resource": "nvidia.com/gpu-mps", "count": 6}, {"resource": "nvidia.com/gpu-mps", "count": 4, "inUse": true}]);
        let pod = |name: &str, resource: &str, count: u32| {
            json!({
                "name": name, "priority": 1, "requests": {"cpu": "500m", (resource): count}, "nodeSelector": {"zone": "a"},
                "affinity": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}], "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n9"]}]}],
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
            })
        };
        let snapshot = json!({
            "nodes": [{
                "name": "n1", "labels": {"zone": "a"}, "taints": [{"key": "gpu", "effect": "NoSchedule"}],
                "allocatable": {"cpu": "16", "memory": "64Gi", "example.com/x": "2"}, "requested": {"cpu": "1500m"},
                "gpus": [
                    gpu(0, json!({"units": 10, "slices": shares, "mode": "Mps"})), gpu(1, json!({"slices": busy})), gpu(2, json!({"units": 4, "replicas": 4})),
                    gpu(3, json!({"mode": "Mig", "migSharing": {"units": 2}, "profiles": [{"name": "1g.10gb", "size": 1, "starts": [0, 1, 2]}, {"name": "2g.20gb", "size": 2, "starts": [0, 2]}]})),
                ],
            }],
            "pods": [
                pod("a", "nvidia.com/gpu-mps", 3), pod("b", "nvidia.com/mig-1g.10gb", 1), pod("c", "nvidia.com/gpu-20gb", 1),
                pod("d", "nvidia.com/mig-2g.20gb.shared", 1), pod("e", "nvidia.com/gpu", 1), pod("f", "nvidia.com/gpu.shared", 1),
            ],
        });
        vec![fixtures::to_json(&snapshot)]
    },
    inputs: 400,
    run: |bytes| {
        let Ok(snapshot) = serde_json::from_slice::<Snapshot>(bytes) else { return ReadResult::Refused };
        mps::check_round_trip::<Snapshot>(bytes);
        // Vary `--units` and `--replicas`. Use few search steps, because the target needs valid
        // plans but not good plans.
        let numbers = [None, Some(0), Some(4), Some(48), Some(u32::MAX)];
        let at = |byte: usize| {
            numbers.get(bytes.get(byte).map_or(0, |byte| usize::from(*byte) % numbers.len())).copied().flatten()
        };
        let policy = Policy { units: at(bytes.len() / 2), replicas: at(bytes.len() / 3), search_steps: 50 };
        let planned = plan(&snapshot, &policy);
        let wrong: Vec<String> = check(&snapshot, &planned.plan).iter().map(ToString::to_string).collect();
        assert!(wrong.is_empty(), "{policy:?}: {wrong:?}");
        assert_eq!(plan(&snapshot, &policy).plan, planned.plan, "a second run returned a different plan");
        for pod in &planned.report.pods {
            assert!(!pod.reason.is_empty(), "{}", pod.pod);
        }
        ReadResult::Read
    },
};
