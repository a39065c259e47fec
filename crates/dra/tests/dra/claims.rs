//! Allocations that Cleave accepts, and allocations that it refuses with a sentence.
use std::collections::BTreeMap;

use cleave_dra::wire::{AllocatedDevice, DeviceAllocation};
use cleave_dra::{ClaimError, ClaimPlan, Offer, Part, Pool};
use cleave_plan::Quantity;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::gpus::{MODELS, any_layout, everything, gpu, pool, units, uuid};

/// A pool with two GPUs that offer everything, and one whose MIG instances are shared.
fn node() -> Pool {
    let mut shared = any_layout();
    shared.units = Some(units(3));
    let offer = Offer { mig: Some(shared), ..Offer::default() };
    pool(vec![gpu(1, MODELS[3], everything()), gpu(2, MODELS[3], everything()), gpu(3, MODELS[3], offer)])
}

const SHARE: &str = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";
const OTHER_SHARE: &str = "7ba7b810-9dad-11d1-80b4-00c04fd430c8";

/// Returns a device of an allocation as the API server sends it.
fn device(name: &str, more: &Value) -> Value {
    let mut device = json!({"request": "gpu", "driver": "gpu.cleave.dev", "pool": "cleave/node1", "device": name});
    device.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    device
}

fn read(results: &[Value]) -> Result<ClaimPlan, ClaimError> {
    let allocation: DeviceAllocation = serde_json::from_value(json!({"results": results})).expect("an allocation");
    node().read_claim(&allocation)
}

fn part(name: &str, more: &Value) -> Part {
    read(&[device(name, more)]).expect("valid").holdings()[0].part.clone()
}

/// Asserts that an allocation is refused with an error that contains the text.
fn assert_refused(results: &[Value], text: &str) {
    let error = read(results).expect_err("an invalid allocation").to_string();
    assert!(error.contains(text), "{error:?} does not contain {text:?}");
}

#[test]
fn devices_become_parts_of_gpus() {
    assert_eq!(part("gpu-00000001", &json!({})), Part::Whole);
    let shared = |amounts: Value| json!({"shareID": SHARE, "consumedCapacity": amounts});
    let Part::Units(share) = part("gpu-00000001-mps", &shared(json!({"units": "3"}))) else { panic!("shares") };
    assert_eq!((share.units(), share.of().get()), (3, 10));
    let Part::Memory(gib) = part("gpu-00000001-mem", &shared(json!({"memory": "20Gi", "clients": "1"}))) else {
        panic!("memory")
    };
    assert_eq!(gib.get(), 20);
    let Part::Replica(replicas) = part("gpu-00000001-ts", &shared(json!({"replicas": "1"}))) else { panic!("replica") };
    assert_eq!(replicas.get(), 4);
    let Part::Instance(placement) = part("gpu-00000002-mig-3g40gb-4", &json!({})) else { panic!("an instance") };
    assert_eq!((placement.profile(), placement.start(), placement.size()), ("3g.40gb", 4, 4));
    let part = part("gpu-00000003-mig-1g10gb-plus-me-0-mps", &shared(json!({"units": "2"})));
    assert_eq!(part.to_string(), "2 of 3 shares of MIG instance 1g.10gb+me at memory slice 0");
}

#[test]
fn a_claim_keeps_its_requests_gpus_and_shares() {
    let share = |request: &str, id: &str| {
        device("gpu-00000001-mps", &json!({"request": request, "shareID": id, "consumedCapacity": {"units": "1"}}))
    };
    // A second request of the claim can have its own shares of the same GPU. The field
    // `tolerations` is one that Cleave does not read.
    let other = json!({"request": "nic", "driver": "nic.example.com", "pool": "p", "device": "d", "tolerations": []});
    let plan = read(&[share("a/small", SHARE), other, share("b", OTHER_SHARE)]).expect("valid");
    let held: Vec<_> = plan
        .holdings()
        .iter()
        .map(|one| (one.request.as_str(), one.gpu.clone(), one.share.as_ref().map(|share| share.as_str().to_owned())))
        .collect();
    assert_eq!(held, [("a", uuid(1), Some(SHARE.to_owned())), ("b", uuid(1), Some(OTHER_SHARE.to_owned()))]);
    let both = read(&[device("gpu-00000001", &json!({})), device("gpu-00000002", &json!({}))]).expect("valid");
    assert_eq!(both.holdings().len(), 2);
}

#[test]
fn devices_that_the_node_does_not_offer_are_refused() {
    assert_refused(&[], "no device of driver gpu.cleave.dev");
    assert_refused(&[device("x", &json!({"driver": "gpu.nvidia.com"}))], "no device of driver gpu.cleave.dev");
    assert_refused(&[device("gpu-00000001", &json!({"pool": "cleave/node2"}))], "in pool \"cleave/node2\"");
    for name in ["gpu-00000009", "gpu-00000001-mig-1g10gb-7", "gpu-00000001-mig-9g90gb-0", "GPU-00000001", "", "../x"] {
        assert_refused(&[device(name, &json!({}))], "this node offers no device");
    }
    let many = vec![device("gpu-00000001", &json!({})); 33];
    assert_refused(&many, "33 devices");
}

#[test]
fn amounts_that_the_device_does_not_have_are_refused() {
    let mps = "gpu-00000001-mps";
    let shared = |amounts: Value| json!({"shareID": SHARE, "consumedCapacity": amounts});
    for units in ["0", "11", "-1", "1500m", "much", "18446744073709551616"] {
        assert_refused(&[device(mps, &shared(json!({"units": units})))], "it can consume units from 1 to 10");
    }
    for amounts in [json!({}), json!({"memory": "1Gi"}), json!({"units": "1", "memory": "1Gi"})] {
        assert_refused(&[device(mps, &shared(amounts))], "it can consume units from 1 to 10");
    }
    for memory in ["0", "80Gi", "1Mi", "1025Mi"] {
        let amounts = json!({"memory": memory, "clients": "1"});
        assert_refused(&[device("gpu-00000001-mem", &shared(amounts))], "from 1Gi to 79Gi");
    }
    assert_refused(&[device("gpu-00000001-mem", &shared(json!({"memory": "1Gi", "clients": "2"})))], "1 of clients");
    assert_refused(&[device("gpu-00000001-ts", &shared(json!({"replicas": "2"})))], "1 of replicas");
    let forged = json!({"consumedCapacity": {"units": "1"}});
    assert_refused(&[device("gpu-00000001", &forged)], "no capacity to consume");
    assert_refused(&[device(mps, &forged)], "a share ID is required");
    assert_refused(&[device("gpu-00000001", &json!({"shareID": SHARE}))], "a share ID is required");
    let path = json!({"shareID": "../../etc", "consumedCapacity": {"units": "1"}});
    assert_refused(&[device(mps, &path)], "is not a UUID");
    assert_refused(&[device("gpu-00000001", &json!({"request": "../x"}))], "is not the name of a request");
}

#[test]
fn claims_that_one_program_cannot_use_are_refused() {
    let share = |name: &str, request: &str, id: &str| {
        device(name, &json!({"request": request, "shareID": id, "consumedCapacity": {"units": "1"}}))
    };
    let first = share("gpu-00000001-mps", "a", SHARE);
    let whole = device("gpu-00000002", &json!({"request": "b"}));
    assert_refused(&[first.clone(), whole.clone()], "Use a separate claim for each");
    assert_refused(&[whole, first.clone()], "Use a separate claim for each");
    assert_refused(&[first.clone(), share("gpu-00000002-mps", "b", OTHER_SHARE)], "Use a separate claim for each");
    assert_refused(&[first.clone(), share("gpu-00000002-mps", "a", OTHER_SHARE)], "count above 1");
    assert_refused(&[first.clone(), first], "allocated twice");
    let whole = device("gpu-00000001", &json!({}));
    assert_refused(&[whole.clone(), whole], "allocated twice");
    assert_refused(&[device("gpu-00000001", &json!({"adminAccess": true}))], "adminAccess");
    assert!(read(&[device("gpu-00000001", &json!({"adminAccess": false}))]).is_ok());
}

#[test]
fn only_configuration_for_other_drivers_is_ignored() {
    let with = |driver: &str| {
        let config =
            json!([{"source": "FromClaim", "requests": [], "opaque": {"driver": driver, "parameters": {"a": 1}}}]);
        let allocation = json!({"results": [device("gpu-00000001", &json!({}))], "config": config});
        node().read_claim(&serde_json::from_value(allocation).expect("an allocation"))
    };
    assert!(with("gpu.nvidia.com").is_ok());
    assert_eq!(with("gpu.cleave.dev"), Err(ClaimError::Configuration));
}

#[test]
fn claims_that_exclude_each_other_name_the_gpu_and_the_reason() {
    let pool = node();
    let plan = |name: &str, more: &Value| read(&[device(name, more)]).expect("valid");
    let shares = |id: &str, units: u32| {
        plan("gpu-00000001-mps", &json!({"shareID": id, "consumedCapacity": {"units": units.to_string()}}))
    };
    let whole = plan("gpu-00000001", &json!({}));
    let instance = |name: &str| plan(&format!("gpu-00000001-mig-{name}"), &json!({}));
    let refused = |claims: &[ClaimPlan], text: &str| {
        let conflict = pool.check(claims).expect_err("a conflict").to_string();
        assert!(conflict.contains(uuid(1).as_str()) && conflict.contains(text), "{conflict}");
    };
    assert_eq!(pool.check(&[shares(SHARE, 4), shares(OTHER_SHARE, 6)]), Ok(()));
    refused(&[shares(SHARE, 4), shares(OTHER_SHARE, 7)], "11 of 10 shares");
    refused(&[shares(SHARE, 4), shares(SHARE, 4)], "the same share ID");
    // MPS can serve equal shares and shares by memory of one GPU together, if the memory suffices.
    let memory = |id: &str, gib: u32| {
        let amounts = json!({"memory": format!("{gib}Gi"), "clients": "1"});
        plan("gpu-00000001-mem", &json!({"shareID": id, "consumedCapacity": amounts}))
    };
    assert_eq!(pool.check(&[shares(SHARE, 5), memory(OTHER_SHARE, 39)]), Ok(()));
    refused(&[shares(SHARE, 5), memory(OTHER_SHARE, 40)], "5 of 10 shares and 40960 MiB exceed its 81559 MiB");
    let many: Vec<ClaimPlan> =
        (0..48).map(|share| memory(&format!("{share:08x}-9dad-11d1-80b4-00c04fd430c8"), 1)).collect();
    assert_eq!(pool.check(&many), Ok(()));
    refused(&[many, vec![memory(SHARE, 1)]].concat(), "at most 48 clients");
    let replica = |id: &str| plan("gpu-00000001-ts", &json!({"shareID": id, "consumedCapacity": {"replicas": "1"}}));
    let four = [0, 1, 2, 3].map(|share| replica(&format!("{share:08x}-9dad-11d1-80b4-00c04fd430c8")));
    assert_eq!(pool.check(&four), Ok(()));
    refused(&[four.to_vec(), vec![replica(SHARE)]].concat(), "5 of 4 replicas");
    refused(&[shares(SHARE, 1), whole.clone()], "the whole GPU and MPS shares are both allocated");
    refused(&[whole.clone(), whole], "2 claims have the whole GPU");
    assert_eq!(pool.check(&[instance("3g40gb-4"), instance("1g10gb-3"), instance("2g20gb-0")]), Ok(()));
    refused(&[instance("3g40gb-4"), instance("1g10gb-6")], "cannot have these MIG instances together");
    refused(&[instance("3g40gb-4"), instance("3g40gb-4")], "claims have 2 shares of MIG instance 3g.40gb");
    let of_instance = |device: &str, id: &str, units: u32| {
        let amounts = json!({"shareID": id, "consumedCapacity": {"units": units.to_string()}});
        plan(&format!("gpu-00000003-mig-{device}-mps"), &amounts)
    };
    let two = [of_instance("1g10gb-0", SHARE, 1), of_instance("1g10gb-0", OTHER_SHARE, 2)];
    assert_eq!(pool.check(&two), Ok(()));
    let three = pool.check(&[of_instance("1g10gb-0", SHARE, 2), of_instance("1g10gb-0", OTHER_SHARE, 2)]);
    assert!(three.expect_err("a conflict").reason.contains("4 shares of MIG instance"));
    let other = plan("gpu-00000002", &json!({}));
    assert_eq!(pool.check(&[shares(SHARE, 10), other]), Ok(()));

    // The rules come from the GPU. They do not depend on what the GPU offers now.
    let changed = crate::gpus::pool(vec![gpu(1, MODELS[3], Offer { whole: true, ..Offer::default() })]);
    assert_eq!(changed.check(&[instance("3g40gb-4"), instance("1g10gb-3")]), Ok(()));
    assert!(changed.check(&[instance("3g40gb-4"), instance("1g10gb-6")]).is_err());
}

proptest! {
    /// The allocation comes from the API, and anyone who may write a claim's status can forge it.
    #[test]
    fn any_allocation_is_read_or_refused(
        devices in prop::collection::vec(
            (
                prop::sample::select(vec![
                    "gpu-00000001", "gpu-00000001-mps", "gpu-00000001-mem", "gpu-00000001-ts",
                    "gpu-00000001-mig-1g10gb-0", "gpu-00000003-mig-1g10gb-0-mps", "gpu-00000001-mig-1g10gb-9",
                ]),
                prop::option::of(prop::sample::select(vec![SHARE, OTHER_SHARE, "x"])),
                prop::collection::btree_map("units|memory|clients|replicas", "[0-9]{1,3}(Gi|m)?", 0..3),
                "[a-c/.]{0,3}",
            ),
            0..4,
        ),
    ) {
        let results = devices.into_iter().map(|(device, share, amounts, request)| AllocatedDevice {
            request,
            driver: "gpu.cleave.dev".to_owned(),
            pool: "cleave/node1".to_owned(),
            device: device.to_owned(),
            admin_access: None,
            share_id: share.map(str::to_owned),
            consumed_capacity: amounts.iter().map(|(name, amount)| (name.clone(), Quantity::new(amount))).collect::<BTreeMap<_, _>>(),
        });
        let allocation = DeviceAllocation { results: results.collect(), config: Vec::new() };
        let pool = node();
        match pool.read_claim(&allocation) {
            Ok(plan) => {
                prop_assert_eq!(plan.holdings().len(), allocation.results.len());
                prop_assert!(!plan.holdings().is_empty());
                // The scheduler never allocates more than a device has, but a forged claim can.
                let _ = pool.check([&plan]);
            }
            Err(error) => prop_assert!(error.to_string().len() > 20),
        }
    }
}
