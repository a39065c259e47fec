//! GPUs for the tests.
use cleave_dra::gpu::{Layout, Replicas, Units};
use cleave_dra::wire::Taint;
use cleave_dra::{Gpu, GpuUuid, MigOffer, NodeName, Offer, Pool};
use cleave_plan::mig::{Profile, built_in};
use cleave_plan::units::{Mebibytes, Sms};
use proptest::prelude::*;

/// Models with built-in MIG profiles, and one without MIG.
pub(crate) const MODELS: [(&str, u64); 12] = [
    ("NVIDIA A30", 24_576),
    ("NVIDIA A100-SXM4-40GB", 40_960),
    ("NVIDIA A100-SXM4-80GB", 81_920),
    ("NVIDIA H100 80GB HBM3", 81_559),
    ("NVIDIA H100 NVL", 95_830),
    ("NVIDIA GH200 480GB", 97_871),
    ("NVIDIA H200", 143_771),
    ("NVIDIA B200", 183_359),
    ("NVIDIA GB200", 189_471),
    ("NVIDIA B300", 275_040),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887),
    ("Tesla T4", 15_360),
];

pub(crate) fn uuid(number: u32) -> GpuUuid {
    GpuUuid::new(&format!("GPU-{number:08x}-5fc4-5d41-8059-30551187688f")).expect("valid")
}

pub(crate) fn units(units: u32) -> Units {
    Units::new(units).expect("valid")
}

pub(crate) fn replicas(replicas: u32) -> Replicas {
    Replicas::new(replicas).expect("valid")
}

/// An offer of MIG instances at every placement.
pub(crate) fn any_layout() -> MigOffer {
    MigOffer { layout: Layout::Any, units: None }
}

/// An offer of everything, as for policies of mode Auto.
pub(crate) fn everything() -> Offer {
    Offer { whole: true, units: Some(units(10)), memory: true, replicas: Some(replicas(4)), mig: Some(any_layout()) }
}

/// A GPU of a model. The built-in profiles lack memory and SMs, so instances get their part of the
/// GPU's.
pub(crate) fn gpu(number: u32, (model, memory): (&str, u64), offer: Offer) -> Gpu {
    let mut profiles = built_in(model, memory).unwrap_or_default();
    let slices = profiles.iter().map(|profile| profile.size).max().unwrap_or(1);
    for profile in &mut profiles {
        profile.memory_mib = memory * u64::from(profile.size) / u64::from(slices);
        profile.sms = 132 * profile.size / slices;
    }
    Gpu {
        uuid: uuid(number),
        model: model.to_owned(),
        driver: "580.159.04".to_owned(),
        memory: Mebibytes(memory),
        sms: Sms(132),
        pcie_root: Some("pci0000:00".to_owned()),
        profiles,
        offer,
        taints: Vec::new(),
    }
}

/// A pool of GPUs that offers everything that the GPUs' offers contain.
pub(crate) fn pool(gpus: Vec<Gpu>) -> Pool {
    let (pool, refusals) = Pool::new(NodeName::new("node1").expect("valid"), gpus);
    assert_eq!(refusals, []);
    pool
}

/// Profiles of GPUs that do not exist: any placements, media engines and limits.
pub(crate) fn any_profiles() -> impl Strategy<Value = Vec<Profile>> {
    let names = vec![
        "1g.5gb",
        "1g.5gb+me",
        "1g.5gb-me",
        "1g.5gb+gfx",
        "1g.10gb",
        "2g.10gb",
        "2g.10gb+me.all",
        "3g.20gb",
        "7g.40gb",
    ];
    let profile = (1..=5_u32, prop::collection::vec(0..8_u32, 1..5), prop::option::weighted(0.3, 0..3_u32));
    (prop::sample::subsequence(names, 1..=6), prop::collection::vec(profile, 6)).prop_map(|(names, shapes)| {
        let profile = |(name, (size, starts, count)): (&str, (u32, Vec<u32>, Option<u32>))| Profile {
            name: name.to_owned(),
            memory_mib: 4864,
            sms: 14,
            size,
            starts,
            count,
        };
        names.into_iter().zip(shapes).map(profile).collect()
    })
}

fn any_offer() -> impl Strategy<Value = Offer> {
    let mig = (prop::option::weighted(0.3, 1..=48_u32), any::<bool>()).prop_map(|(shares, offered)| {
        offered.then(|| MigOffer { layout: Layout::Any, units: shares.and_then(Units::new) })
    });
    let shares = prop_oneof![Just(1), Just(2), Just(10), Just(48), 1..=48_u32];
    let (shares, turns) = (prop::option::of(shares), prop::option::of(1..=100_u32));
    (any::<bool>(), shares, any::<bool>(), turns, mig).prop_map(|(whole, shares, memory, turns, mig)| Offer {
        whole,
        units: shares.and_then(Units::new),
        memory,
        replicas: turns.and_then(Replicas::new),
        mig,
    })
}

/// GPUs of real models, and GPUs with any profiles.
pub(crate) fn any_gpus() -> impl Strategy<Value = Vec<Gpu>> {
    let real = (prop::sample::select(MODELS.to_vec()), any_offer()).prop_map(|(model, offer)| gpu(0, model, offer));
    let other = (any_profiles(), 1024..200_000_u64, any_offer())
        .prop_map(|(profiles, memory, offer)| Gpu { profiles, ..gpu(0, ("unknown", memory), offer) });
    let one = (prop_oneof![real, other], prop::bool::weighted(0.1));
    prop::collection::vec(one, 1..3).prop_map(|gpus| {
        let taint = Taint {
            key: "cleave.dev/unhealthy".to_owned(),
            value: "XidError".to_owned(),
            effect: "NoSchedule".to_owned(),
            time_added: Some("2026-11-28T00:00:00Z".to_owned()),
        };
        let number = |(number, (gpu, tainted)): (u32, (Gpu, bool))| Gpu {
            uuid: uuid(number),
            taints: if tainted { vec![taint.clone()] } else { Vec::new() },
            ..gpu
        };
        (1..).zip(gpus).map(number).collect()
    })
}
