//! The target for allocated claims. Whoever may write the status of a claim can forge an
//! allocation.
use cleave_dra::gpu::{Layout, Replicas, Units};
use cleave_dra::wire::DeviceAllocation;
use cleave_dra::{DRIVER, Gpu, GpuUuid, MigOffer, NodeName, Offer, Part, Pool};
use cleave_plan::mig::built_in;
use cleave_plan::units::{Mebibytes, Sms};
use serde_json::json;

use crate::mutate::InputShape;
use crate::{ReadResult, Target, assert_printable};

/// Names of all GPUs in the target start with these eight digits.
const GPU: &str = "gpu-2dd884f1";

pub(super) const CLAIM: Target = Target {
    name: "claim",
    what: "devices that the scheduler allocated to a claim",
    shape: InputShape::Json,
    words: &[
        "results",
        "config",
        "opaque",
        "driver",
        "adminAccess",
        "shareID",
        "consumedCapacity",
        "units",
        "memory",
        "clients",
        "replicas",
        "gpu.cleave.dev",
        "gpu.nvidia.com",
        "cleave/node1",
        "gpu-2dd884f1",
        "gpu-2dd884f1-mps",
        "gpu-2dd884f1-mem",
        "gpu-2dd884f1-ts",
        "gpu-2dd884f1-mig-1g10gb-6",
        "gpu-2dd884f1-mig-3g40gb-0",
        "a/b",
        "../x",
        "10",
        "11",
        "79Gi",
        "80Gi",
        "1500m",
        "16Ei",
    ],
    samples: || {
        let share = |id: u32| format!("{id:08x}-9dad-11d1-80b4-00c04fd430c8");
        let one = |device: &str, more: serde_json::Value| {
            let mut result = json!({
                "request": "gpu/a", "driver": DRIVER, "pool": "cleave/node1", "device": format!("{GPU}{device}"),
            });
            if let (Some(fields), Some(more)) = (result.as_object_mut(), more.as_object()) {
                fields.extend(more.clone());
            }
            result
        };
        let other = json!({"request": "nic", "driver": "nic.example.com", "pool": "p", "device": "d"});
        let config = json!([{"source": "FromClaim", "opaque": {"driver": "nic.example.com", "parameters": {}}}]);
        let units = json!({"shareID": share(1), "consumedCapacity": {"units": "3"}});
        let memory = json!({"shareID": share(2), "consumedCapacity": {"memory": "20Gi", "clients": "1"}});
        let replica = json!({"shareID": share(3), "consumedCapacity": {"replicas": "1"}});
        [
            json!({"results": [one("", json!({"adminAccess": false})), other], "config": config}),
            json!({"results": [one("-mps", units)]}),
            json!({"results": [one("-mem", memory)]}),
            json!({"results": [one("-ts", replica)]}),
            json!({"results": [one("-mig-1g10gb-6", json!({})), one("-mig-3g40gb-0", json!({}))]}),
        ]
        .iter()
        .map(|allocation| allocation.to_string().into_bytes())
        .collect()
    },
    inputs: 8_000,
    run: |bytes| {
        let Ok(allocation) = serde_json::from_slice::<DeviceAllocation>(bytes) else { return ReadResult::Refused };
        let Some(pool) = pool() else { return ReadResult::Refused };
        let claim = match pool.read_claim(&allocation) {
            Ok(claim) => claim,
            Err(error) => {
                assert_printable(&error.to_string());
                return ReadResult::Refused;
            }
        };
        let ours = allocation.results.iter().filter(|result| result.driver == DRIVER).count();
        assert_eq!(claim.holdings().len(), ours);
        for holding in claim.holdings() {
            assert!(holding.device.starts_with(GPU));
            assert!(!holding.request.as_str().contains(['/', '.']));
            match &holding.part {
                Part::Units(share) | Part::InstanceUnits(_, share) => assert!((1..=10).contains(&share.units())),
                Part::Memory(gib) => assert!((1..=79).contains(&gib.get())),
                Part::Instance(placement) => assert!(placement.start() + placement.size() <= 8),
                Part::Whole | Part::Replica(_) => {}
            }
        }
        if let Err(conflict) = pool.check([&claim]) {
            assert_printable(&conflict.to_string());
        }
        // No GPU serves the same claim twice.
        assert!(pool.check([&claim, &claim]).is_err());
        ReadResult::Read
    },
};

/// Returns a node with one GPU that offers everything.
fn pool() -> Option<Pool> {
    let gpu = Gpu {
        uuid: GpuUuid::new("GPU-2dd884f1-5fc4-5d41-8059-30551187688f").ok()?,
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        driver: "580.159.04".to_owned(),
        memory: Mebibytes(81_559),
        sms: Sms(132),
        pcie_root: None,
        profiles: built_in("H100", 81_559)?,
        offer: Offer {
            whole: true,
            units: Units::new(10),
            memory: true,
            replicas: Replicas::new(4),
            mig: Some(MigOffer { layout: Layout::Any, units: None }),
        },
        taints: Vec::new(),
    };
    Some(Pool::new(NodeName::new("node1").ok()?, vec![gpu]).0)
}
