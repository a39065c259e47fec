//! The slices keep the API's limits, and names of devices do not change.
use std::collections::BTreeSet;

use cleave_dra::gpu::Layout;
use cleave_dra::wire::{MAX_ATTRIBUTE_LENGTH, MAX_COUNTER_SETS, MAX_COUNTERS, MAX_DEVICES, ResourceSlice, Taint};
use cleave_dra::{Gpu, MigOffer, NodeName, Offer, Pool};
use cleave_plan::mig::Profile;
use proptest::prelude::*;
use serde_json::json;

use crate::gpus::{MODELS, any_gpus, any_layout, everything, gpu, pool, units};

fn names(slices: &[ResourceSlice]) -> Vec<&str> {
    slices.iter().flat_map(|slice| &slice.spec.devices).map(|device| device.name.as_str()).collect()
}

#[test]
fn a_gpu_that_offers_everything_has_these_slices() {
    let profiles = vec![Profile {
        name: "1g.12gb".to_owned(),
        memory_mib: 11_008,
        sms: 26,
        size: 2,
        starts: vec![0, 2],
        count: None,
    }];
    let taint = Taint {
        key: "cleave.dev/unhealthy".to_owned(),
        value: "XidError".to_owned(),
        effect: "NoSchedule".to_owned(),
        time_added: Some("2026-11-28T00:00:00Z".to_owned()),
    };
    let one = Gpu { profiles, taints: vec![taint], ..gpu(0x2d, ("NVIDIA H100 80GB HBM3", 81_559), everything()) };
    let slices = serde_json::to_value(pool(vec![one]).slices(7)).expect("serializable");
    let expected: serde_json::Value = serde_json::from_str(include_str!("everything.json")).expect("JSON");
    assert_eq!(slices, expected, "{slices:#}");
}

#[test]
fn a_gpu_with_one_kind_of_partition_needs_no_counters() {
    let layout = Layout::Fixed(vec![("3g.40gb".to_owned(), 4), ("2g.20gb".to_owned(), 0), ("1g.10gb".to_owned(), 3)]);
    let offers = [
        Offer { whole: true, ..Offer::default() },
        Offer { units: Some(units(10)), ..Offer::default() },
        Offer { mig: Some(MigOffer { layout: layout.clone(), units: None }), ..Offer::default() },
        Offer { mig: Some(MigOffer { layout, units: Some(units(3)) }), ..Offer::default() },
    ];
    let gpus = (1..).zip(offers).map(|(number, offer)| gpu(number, MODELS[3], offer));
    let slices = pool(gpus.collect()).slices(1);
    assert_eq!(
        names(&slices),
        [
            "gpu-00000001",
            "gpu-00000002-mps",
            "gpu-00000003-mig-1g10gb-3",
            "gpu-00000003-mig-2g20gb-0",
            "gpu-00000003-mig-3g40gb-4",
            "gpu-00000004-mig-1g10gb-3-mps",
            "gpu-00000004-mig-2g20gb-0-mps",
            "gpu-00000004-mig-3g40gb-4-mps",
        ]
    );
    assert_eq!(slices.len(), 4, "no slice has only counters");
    assert!(slices.iter().flat_map(|slice| &slice.spec.devices).all(|device| device.consumes_counters.is_empty()));
}

#[test]
fn small_instances_and_placements_that_block_the_least_come_first() {
    let slices = pool(vec![gpu(1, MODELS[1], Offer { mig: Some(any_layout()), ..Offer::default() })]).slices(1);
    let names = names(&slices);
    let first = |profile: &str| names.iter().find(|name| name.contains(profile)).copied();
    assert_eq!(first("-1g5gb-"), Some("gpu-00000001-mig-1g5gb-6"));
    assert_eq!(first("-3g20gb-"), Some("gpu-00000001-mig-3g20gb-4"));
    // By name, 1g.10gb with two memory slices would be before 1g.5gb.
    assert_eq!(names.first().copied(), Some("gpu-00000001-mig-1g5gb-6"));
    assert_eq!(names.last().copied(), Some("gpu-00000001-mig-7g40gb-0"));
}

#[test]
fn invalid_parts_are_refused_and_the_rest_is_offered() {
    let node = || NodeName::new("node1").expect("valid");
    let refusals = |gpus| {
        let (pool, refusals) = Pool::new(node(), gpus);
        let devices: Vec<String> = pool.device_names().map(str::to_owned).collect();
        (devices, refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    };
    let both = || Offer { whole: true, mig: Some(any_layout()), ..Offer::default() };

    let (devices, refused) = refusals(vec![gpu(1, MODELS[11], both())]);
    assert_eq!(devices, ["gpu-00000001"]);
    assert!(refused.contains("GPU-00000001") && refused.contains("reports no MIG profiles"), "{refused}");

    let layout = Layout::Fixed(vec![("1g.10gb".to_owned(), 7), ("1g.10gb".to_owned(), 0)]);
    let offer = Offer { mig: Some(MigOffer { layout, units: None }), ..Offer::default() };
    let (devices, refused) = refusals(vec![gpu(1, MODELS[3], offer)]);
    assert_eq!(devices, ["gpu-00000001-mig-1g10gb-0"]);
    assert!(refused.contains("cannot create 1g.10gb at memory slice 7"), "{refused}");

    let mut twin = gpu(1, MODELS[3], both());
    twin.uuid = cleave_dra::GpuUuid::new("GPU-00000001-ffff-5d41-8059-30551187688f").expect("valid");
    let (devices, refused) = refusals(vec![twin, gpu(1, MODELS[3], Offer { whole: true, ..Offer::default() })]);
    assert_eq!(devices, ["gpu-00000001"]);
    assert!(refused.contains("GPU-00000001-ffff") && refused.contains("first eight digits"), "{refused}");

    let mut same_label = gpu(1, MODELS[3], both());
    let profile = |name: &str| Profile { name: name.to_owned(), size: 1, starts: vec![0], ..Profile::default() };
    same_label.profiles = vec![profile("1g.10gb"), profile("1g1.0gb"), profile("1G.5gb")];
    let (devices, refused) = refusals(vec![same_label]);
    assert_eq!(devices, ["gpu-00000001", "gpu-00000001-mig-1g10gb-0"]);
    assert!(refused.contains("1G.5gb") && refused.contains("1g1.0gb"), "{refused}");

    let mut wide = gpu(1, MODELS[3], both());
    let starts: Vec<u32> = (0..32).collect();
    wide.profiles = vec![Profile { starts: starts.clone(), ..profile("1g.10gb") }];
    let (devices, refused) = refusals(vec![wide.clone()]);
    assert_eq!((devices.len(), refused.as_str()), (33, ""), "32 counters are allowed");
    wide.profiles.push(Profile { starts, ..profile("1g.10gb+me") });
    let (devices, refused) = refusals(vec![wide.clone()]);
    assert_eq!(devices, ["gpu-00000001"], "33 counters are not allowed");
    assert!(refused.contains("more shared counters"), "{refused}");
    let layout = Layout::Fixed(vec![("1g.10gb".to_owned(), 0), ("1g.10gb+me".to_owned(), 1)]);
    wide.offer = Offer { mig: Some(MigOffer { layout, units: None }), ..Offer::default() };
    let (devices, refused) = refusals(vec![wide]);
    assert_eq!((devices.len(), refused.as_str()), (2, ""), "a fixed layout needs no counters");
}

#[test]
fn a_gpu_with_many_placements_and_a_node_with_many_gpus_use_several_slices() {
    let starts: Vec<u32> = (0..12).collect();
    let profiles = (1..=6).map(|size| Profile {
        name: format!("{size}g.{size}gb"),
        size,
        starts: starts.clone(),
        ..Profile::default()
    });
    let profiles: Vec<Profile> = profiles.collect();
    let gpus = (1..=9).map(|number| {
        let offer = Offer { mig: Some(any_layout()), ..Offer::default() };
        Gpu { profiles: profiles.clone(), ..gpu(number, ("unknown", 81_559), offer) }
    });
    let slices = pool(gpus.collect()).slices(1);
    let sets: Vec<usize> = slices.iter().map(|slice| slice.spec.shared_counters.len()).collect();
    let devices: Vec<usize> = slices.iter().map(|slice| slice.spec.devices.len()).collect();
    assert_eq!(sets[..3], [8, 1, 0]);
    assert_eq!(devices[..5], [0, 0, 64, 8, 64]);
    assert_eq!(slices.len(), 2 + 9 * 2);
    assert_eq!(names(&slices).into_iter().collect::<BTreeSet<_>>().len(), 9 * 72);
}

#[test]
fn a_device_with_one_share_has_no_step() {
    let slices = pool(vec![gpu(1, MODELS[3], Offer { units: Some(units(1)), ..Offer::default() })]).slices(1);
    let units = serde_json::to_value(&slices[0].spec.devices[0].capacity["units"]).expect("serializable");
    let policy = json!({"default": "1", "validRange": {"min": "1", "max": "1"}});
    assert_eq!(units, json!({"value": "1", "requestPolicy": policy}));
}

#[test]
fn long_texts_are_shortened_between_characters() {
    let mut long = gpu(1, MODELS[3], Offer { whole: true, ..Offer::default() });
    long.model = format!("{}\u{e9}", "x".repeat(MAX_ATTRIBUTE_LENGTH - 1));
    let slices = pool(vec![long]).slices(1);
    let model = serde_json::to_value(&slices[0].spec.devices[0].attributes["model"]).expect("serializable");
    assert_eq!(model, json!({"string": "x".repeat(MAX_ATTRIBUTE_LENGTH - 1)}));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn slices_keep_the_limits_of_the_api(gpus in any_gpus()) {
        let (pool, _) = Pool::new(NodeName::new("node1").expect("valid"), gpus);
        let slices = pool.slices(1);
        let mut unique = BTreeSet::new();
        for slice in &slices {
            let spec = &slice.spec;
            prop_assert_eq!(spec.pool.resource_slice_count, slices.len());
            prop_assert!(spec.devices.is_empty() != spec.shared_counters.is_empty());
            prop_assert!(spec.devices.len() <= MAX_DEVICES && spec.shared_counters.len() <= MAX_COUNTER_SETS);
            prop_assert!(spec.shared_counters.iter().all(|set| set.counters.len() <= MAX_COUNTERS));
            for device in &spec.devices {
                prop_assert!(unique.insert(device.name.clone()), "{}", device.name);
                prop_assert!(device.name.len() <= 63);
                prop_assert!(device.attributes.len() + device.capacity.len() <= 32);
                prop_assert!(device.consumes_counters.len() <= 1);
            }
            let text = serde_json::to_string(slice).expect("serializable");
            prop_assert_eq!(&serde_json::from_str::<ResourceSlice>(&text).expect("readable"), slice);
        }
    }

    #[test]
    fn a_gpu_keeps_its_devices_when_others_change(gpus in any_gpus()) {
        let node = || NodeName::new("node1").expect("valid");
        let alone = |gpu: &Gpu| Pool::new(node(), vec![gpu.clone()]).0.slices(1);
        let together = Pool::new(node(), gpus.iter().rev().cloned().collect()).0.slices(1);
        let devices: Vec<_> = gpus.iter().flat_map(alone).flat_map(|slice| slice.spec.devices).collect();
        let beside: Vec<_> = together.into_iter().flat_map(|slice| slice.spec.devices).collect();
        prop_assert_eq!(devices, beside);
    }
}
