//! Whatever the scheduler can allocate, the GPUs can serve, and the reverse.
use std::collections::{BTreeMap, BTreeSet};

use cleave_dra::wire::Device;
use cleave_dra::{ClaimPlan, Gpu, NodeName, Offer, Part, Pool};
use cleave_plan::Quantity;
use cleave_plan::mig::{Profile, ProfileTable, built_in};
use proptest::prelude::*;
use sim_machine::{Gpu as SimGpu, GpuDescription, MachineDescription, Model, Placement, builtin_models};

use crate::gpus::{self, MODELS, any_gpus, any_layout, any_profiles, gpu, pool};
use crate::scheduler::{Amounts, Scheduler, claim_with};

/// Returns the plans of everything that is allocated, each as a claim of its own.
fn plans(pool: &Pool, scheduler: &Scheduler) -> Vec<ClaimPlan> {
    let allocated = scheduler.allocated().iter();
    allocated.map(|one| pool.read_claim(&claim_with(one.clone())).expect("the scheduler's allocation")).collect()
}

/// Returns requests for a device: the default, and some amounts of its first consumable capacity.
fn requests(device: &Device, amount: u64) -> Vec<Amounts> {
    let consumable = device.capacity.iter().rfind(|(_, capacity)| {
        capacity.request_policy.as_ref().is_some_and(|policy| policy.valid_range.min != policy.valid_range.max)
    });
    let Some((name, capacity)) = consumable else { return vec![Amounts::new()] };
    let one = capacity.request_policy.as_ref().expect("consumable").default.milli().expect("a number") / 1000;
    let total = capacity.value.milli().expect("a number") / 1000;
    let amounts = [one, total, total + one, amount % (total / one + 2) * one, total.saturating_sub(one).max(one)];
    let named = amounts.map(|amount| Amounts::from([(name.clone(), Quantity::whole(amount))]));
    [Amounts::new()].into_iter().chain(named).collect()
}

/// Returns whether the claims divide one GPU by equal shares and by memory. The GPU could serve
/// them, but the counters exclude it.
fn divides_a_gpu_in_two_ways(plans: &[ClaimPlan]) -> bool {
    let mut ways: BTreeMap<&str, [bool; 2]> = BTreeMap::new();
    for holding in plans.iter().flat_map(ClaimPlan::holdings) {
        match holding.part {
            Part::Units(_) => ways.entry(holding.gpu.as_str()).or_default()[0] = true,
            Part::Memory(_) => ways.entry(holding.gpu.as_str()).or_default()[1] = true,
            _ => {}
        }
    }
    ways.values().any(|ways| ways == &[true, true])
}

proptest! {
    #[test]
    fn the_scheduler_allocates_exactly_what_the_gpus_can_serve(
        gpus in any_gpus(),
        steps in prop::collection::vec((any::<prop::sample::Index>(), 0..4_u8, 0..200_u64), 1..24),
    ) {
        let (pool, _) = Pool::new(NodeName::new("node1").expect("valid"), gpus);
        let mut scheduler = Scheduler::new(&pool.slices(1));
        for (index, action, amount) in steps {
            if action == 0 && !scheduler.allocated().is_empty() {
                scheduler.free(index.index(scheduler.allocated().len()));
                continue;
            }
            if scheduler.devices().is_empty() {
                break;
            }
            let device = index.get(scheduler.devices()).clone();
            let requests = requests(&device, amount);
            let wanted = index.get(&requests);
            if let Some(allocated) = scheduler.try_device(&device, wanted) {
                scheduler.allocate(allocated);
            }
            let plans = plans(&pool, &scheduler);
            prop_assert_eq!(pool.check(&plans), Ok(()));
            prop_assert_eq!(missing_device(&pool, &scheduler, &plans, amount), None);
        }
    }

    #[test]
    fn counters_and_nvml_agree_on_every_layout_of_any_profiles(profiles in any_profiles()) {
        compare_layouts(&profiles);
    }
}

/// Returns a device that the GPUs could serve beside the allocated devices, and that the scheduler
/// does not allocate.
fn missing_device(pool: &Pool, scheduler: &Scheduler, plans: &[ClaimPlan], amount: u64) -> Option<String> {
    // Allocate from an empty pool, so that the counters do not decide.
    let empty = Scheduler::new(&pool.slices(1));
    for device in scheduler.devices().iter().filter(|device| device.taints.is_empty()) {
        for wanted in requests(device, amount) {
            let Some(mut allocated) = empty.try_device(device, &wanted) else { continue };
            if let Some(share) = &mut allocated.share_id {
                share.replace_range(..8, "ffffffff");
            }
            let mut all = plans.to_vec();
            all.push(pool.read_claim(&claim_with(allocated)).expect("an allocation"));
            let can_serve = pool.check(&all).is_ok() && !divides_a_gpu_in_two_ways(&all);
            if can_serve && scheduler.try_device(device, &wanted).is_none() {
                return Some(format!("{} with {wanted:?}", device.name));
            }
        }
    }
    None
}

#[test]
fn shares_and_memory_of_one_gpu_exclude_each_other_although_mps_could_serve_both() {
    let offer = Offer { units: Some(gpus::units(10)), memory: true, ..Offer::default() };
    let pool = pool(vec![gpu(1, MODELS[6], offer)]);
    let mut scheduler = Scheduler::new(&pool.slices(1));
    let [shares, memory] = [0, 1].map(|at| scheduler.devices()[at].clone());
    let by_memory = scheduler.try_device(&memory, &Amounts::new()).expect("the GPU is free");
    scheduler.allocate(scheduler.try_device(&shares, &Amounts::new()).expect("the GPU is free"));
    assert_eq!(scheduler.try_device(&memory, &Amounts::new()), None);
    let by_memory = cleave_dra::wire::AllocatedDevice {
        share_id: by_memory.share_id.map(|share| share.replace("00000000", "00000001")),
        ..by_memory
    };
    let mut all = plans(&pool, &scheduler);
    all.push(pool.read_claim(&claim_with(by_memory)).expect("an allocation"));
    assert_eq!(pool.check(&all), Ok(()));
    assert!(divides_a_gpu_in_two_ways(&all));
}

/// Calls `visit` with each set of MIG devices that the scheduler can allocate, in each order in
/// which the devices are listed.
fn visit_layouts(scheduler: &mut Scheduler, from: usize, visit: &mut impl FnMut(&Scheduler)) {
    visit(scheduler);
    for next in from..scheduler.devices().len() {
        let device = scheduler.devices()[next].clone();
        if let Some(allocated) = scheduler.try_device(&device, &Amounts::new()) {
            scheduler.allocate(allocated);
            visit_layouts(scheduler, next + 1, visit);
            scheduler.free(scheduler.allocated().len() - 1);
        }
    }
}

/// Returns the profile and first memory slice of each MIG device, by the device's name.
fn placements(scheduler: &Scheduler) -> BTreeMap<String, (String, u8)> {
    use cleave_dra::wire::Attribute;
    let placement = |device: &Device| match (&device.attributes["profile"], &device.attributes["memorySlice"]) {
        (Attribute::String(profile), Attribute::Int(start)) => {
            (profile.clone(), u8::try_from(*start).expect("a memory slice"))
        }
        other => panic!("{other:?}"),
    };
    scheduler.devices().iter().map(|device| (device.name.clone(), placement(device))).collect()
}

/// Checks that the counters allow exactly the layouts that NVML can create with these profiles.
/// Returns the number of layouts.
fn compare_layouts(profiles: &[Profile]) -> usize {
    let offer = Offer { mig: Some(any_layout()), ..Offer::default() };
    let gpu = Gpu { profiles: profiles.to_vec(), ..gpu(1, ("unknown", 81_559), offer) };
    let (pool, refusals) = Pool::new(NodeName::new("node1").expect("valid"), vec![gpu]);
    let mut scheduler = Scheduler::new(&pool.slices(1));
    let placements = placements(&scheduler);
    let possible = profiles.iter().filter(|profile| profile.count != Some(0));
    let possible: usize = possible.map(|one| one.starts.iter().collect::<BTreeSet<_>>().len()).sum();
    assert_eq!(placements.len(), possible, "every placement is a device: {refusals:?}");
    let table = ProfileTable::new(profiles).expect("valid");
    let mut layouts = 0;
    visit_layouts(&mut scheduler, 0, &mut |scheduler| {
        layouts += 1;
        let place = |device: &str| (placements[device].0.as_str(), placements[device].1);
        let here: Vec<_> = scheduler.allocated().iter().map(|one| place(&one.device)).collect();
        assert!(table.can_coexist(here.iter().copied()), "NVML cannot create {here:?}");
        for device in scheduler.devices() {
            let possible = table.can_coexist(here.iter().copied().chain([place(&device.name)]));
            let allocated = scheduler.try_device(device, &Amounts::new()).is_some();
            assert_eq!(allocated, possible, "{} beside {here:?}", device.name);
        }
    });
    layouts
}

#[test]
fn counters_and_nvml_agree_on_every_layout_of_every_model() {
    let mut shapes = BTreeSet::new();
    for (model, memory) in MODELS {
        let Some(profiles) = built_in(model, memory) else { continue };
        // Most models differ only in the sizes in the profiles' names, as in 1g.10gb and 1g.12gb.
        let suffix = |name: &str| name.split_once("gb").map(|(_, suffix)| suffix.to_owned());
        let shape = |one: &Profile| (suffix(&one.name), one.size, one.starts.clone(), one.count);
        if shapes.insert(profiles.iter().map(shape).collect::<Vec<_>>()) {
            let layouts = compare_layouts(&profiles);
            assert!(layouts > 30, "{model}: {layouts} layouts");
        }
    }
    assert_eq!(shapes.len(), 3, "the A30, GPUs with seven compute slices, and the RTX PRO 6000");
}

#[test]
fn each_limit_of_nvml_has_a_counter() {
    let profile = |name: &str, count| Profile {
        name: name.to_owned(),
        size: 1,
        starts: vec![0, 1, 2, 3],
        count,
        ..Profile::default()
    };
    for (profiles, layouts) in [
        // At most two of four placements, and beside them the placements of another profile.
        (vec![profile("1g.5gb", Some(2))], 1 + 4 + 6),
        (vec![profile("1g.5gb", Some(0)), profile("1g.10gb", None)], 16),
        (vec![profile("1g.5gb+me", None)], 1 + 4),
        // Beside one `+me.all`, each other slice is free or has an instance without media engines.
        (vec![profile("1g.5gb+me.all", None), profile("1g.5gb-me", None)], 16 + 4 * 8),
        // Nothing with media engines is beside a `+me.all`.
        (vec![profile("1g.5gb+me.all", None), profile("1g.5gb", None)], 16 + 4),
    ] {
        assert_eq!(compare_layouts(&profiles), layouts, "{profiles:?}");
    }
}

/// Returns a simulated GPU, which limits media engines by their numbers and not by the names of
/// profiles.
fn simulated(model: &Model) -> SimGpu {
    let gpus = vec![GpuDescription { model: model.name.clone(), mig: true, ..GpuDescription::default() }];
    let machine = MachineDescription { name: "test".to_owned(), gpus, ..MachineDescription::default() };
    machine.state().expect("valid").gpus.remove(0)
}

#[test]
fn the_simulated_driver_creates_every_layout_that_the_scheduler_can_allocate_and_no_other() {
    for model in builtin_models().iter().filter(|model| model.is_mig_capable()) {
        let profile = |profile: &sim_machine::GpuProfile| Profile {
            name: profile.name.clone(),
            memory_mib: profile.memory_mib,
            sms: profile.sms,
            size: profile.size,
            starts: profile.starts.clone(),
            count: None,
        };
        let mut gpu = gpu(1, (&model.name, model.memory_mib), Offer { mig: Some(any_layout()), ..Offer::default() });
        gpu.profiles = model.gpu_profiles.iter().map(profile).collect();
        let pool = pool(vec![gpu]);
        let mut scheduler = Scheduler::new(&pool.slices(1));
        let placements = placements(&scheduler);
        let create = |gpu: &mut SimGpu, device: &str| {
            let (name, start) = &placements[device];
            let profile = model.gpu_profiles.iter().find(|profile| profile.name == *name).expect("a profile");
            let placement = Placement { start: u32::from(*start), size: profile.size };
            gpu.create_gpu_instance(model, profile.id, Some(placement)).is_ok()
        };
        let empty = simulated(model);
        visit_layouts(&mut scheduler, 0, &mut |scheduler| {
            let mut gpu = empty.clone();
            for one in scheduler.allocated() {
                assert!(create(&mut gpu, &one.device), "{}: {} is refused", model.name, one.device);
            }
            for device in scheduler.devices() {
                let possible = create(&mut gpu.clone(), &device.name);
                let allocated = scheduler.try_device(device, &Amounts::new()).is_some();
                assert_eq!(allocated, possible, "{}: {} beside {:?}", model.name, device.name, gpu.instances);
            }
        });
    }
}
