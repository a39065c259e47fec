//! Generates random pools of GPUs, quotas and pods, and random histories of them.
//!
//! Amounts are tenths of a GPU. A world has up to four GPUs, up to five quotas and some pods. A
//! history is a world and the events that follow it.
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::super::{Amount, Gang, Guarantee, Mode, Owner, Place, Pod, Quota, Settings, World};
use crate::ledger::Moment;

/// A tenth of a GPU.
pub(super) const TENTH: u64 = 100_000;
/// Names of quotas.
pub(super) const QUOTAS: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Returns an amount of tenths of a GPU.
pub(super) const fn tenths(tenths: u64) -> Amount {
    Amount(tenths * TENTH)
}

/// The kinds of guarantees in a random world.
#[derive(Debug, Clone, Copy)]
pub(super) enum Guarantees {
    Counts,
    Cells,
    Both,
}

/// The properties of the generated worlds.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    pub(super) pods: Range<usize>,
    pub(super) guarantees: Guarantees,
    /// Whether some quotas have mode `Count`.
    pub(super) counted_only: bool,
    /// Whether some pods are exempt from quotas, are protected, must not borrow, or evict no pods.
    pub(super) flags: bool,
    /// Whether some pods belong to gangs.
    pub(super) gangs: bool,
}

pub(super) const ANY: Shape =
    Shape { pods: 2..15, guarantees: Guarantees::Both, counted_only: true, flags: true, gangs: false };

/// The limits of a quota.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    min: u64,
    /// The maximum beyond `min`.
    more: Option<u64>,
    lends_half: bool,
    weight: i64,
    guarantee: Guarantee,
    mode: Mode,
}

/// A pod. It runs on `gpu` if it fits there, and otherwise waits.
#[derive(Debug, Clone)]
pub(super) struct Row {
    /// Index into [`QUOTAS`]. An index past the end means no quota.
    owner: usize,
    tenths: u64,
    priority: i32,
    gpu: Option<usize>,
    flag: Flag,
    /// Number and size of the gang.
    gang: Option<(usize, usize)>,
}

/// A property that few pods have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flag {
    None,
    DoesNotBorrow,
    EvictsNobody,
    Protected,
    Exempt,
    System,
}

/// An event between two passes. A number selects an object, modulo the number of objects.
#[derive(Debug, Clone)]
pub(super) enum Event {
    Arrive(Row),
    End(usize),
    /// A quota gets other limits.
    Edit(usize, Limits),
    Delete(usize),
    /// A disruption budget starts or stops protecting a pod.
    Protect(usize),
    /// A GPU fails, or recovers.
    Fail(usize),
    /// Evicted pods exit, and their replacements wait.
    Replace,
    /// Another leader takes over. The new leader knows no nominations.
    Lead,
    /// Seconds pass.
    Wait(u64),
}

/// A world and its events.
#[derive(Debug, Clone)]
pub(super) struct History {
    pub(super) start: Start,
    pub(super) events: Vec<Event>,
}

fn limits(guarantees: Guarantees, counted_only: bool) -> impl Strategy<Value = Limits> {
    let guarantee = match guarantees {
        Guarantees::Counts => Just(Guarantee::Count).boxed(),
        Guarantees::Cells => Just(Guarantee::Cells).boxed(),
        Guarantees::Both => prop_oneof![2 => Just(Guarantee::Count), 1 => Just(Guarantee::Cells)].boxed(),
    };
    let mode = prop_oneof![9 => Just(false), 1 => Just(counted_only)];
    let mode = mode.prop_map(|counts| if counts { Mode::Count } else { Mode::Enforce });
    let numbers = (0..16_u64, option::of(0..12_u64), any::<bool>(), 1..4_i64);
    (numbers, guarantee, mode).prop_map(|((min, more, lends_half, weight), guarantee, mode)| {
        let min = if guarantee == Guarantee::Cells { min / 5 * 10 } else { min };
        Limits { min, more, lends_half, weight, guarantee, mode }
    })
}

fn row(flags: bool, gangs: bool) -> impl Strategy<Value = Row> {
    let few = prop_oneof![
        3 => Just(Flag::DoesNotBorrow),
        2 => Just(Flag::EvictsNobody),
        2 => Just(Flag::Protected),
        1 => Just(Flag::Exempt),
        1 => Just(Flag::System),
    ];
    let flag = prop_oneof![6 => Just(Flag::None), 1 => few].prop_map(move |flag| if flags { flag } else { Flag::None });
    let size = select(vec![1, 2, 3, 4, 5, 8, 10_u64]);
    let gang = (0..4_usize, 1..4_usize);
    let gang = if gangs { option::weighted(0.7, gang).boxed() } else { Just(None).boxed() };
    (0..QUOTAS.len() + 2, size, -1..3_i32, option::of(0..4_usize), flag, gang)
        .prop_map(|(owner, tenths, priority, gpu, flag, gang)| Row { owner, tenths, priority, gpu, flag, gang })
}

fn event(gangs: bool, guarantees: Guarantees) -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => row(true, gangs).prop_map(|row| Event::Arrive(Row { gpu: None, ..row })),
        4 => any::<usize>().prop_map(Event::End),
        2 => (any::<usize>(), limits(guarantees, true)).prop_map(|(quota, limits)| Event::Edit(quota, limits)),
        1 => any::<usize>().prop_map(Event::Delete),
        1 => any::<usize>().prop_map(Event::Protect),
        1 => any::<usize>().prop_map(Event::Fail),
        5 => Just(Event::Replace),
        1 => Just(Event::Lead),
        2 => (1..9_u64).prop_map(Event::Wait),
    ]
}

/// Returns random worlds.
pub(super) fn worlds(shape: &Shape) -> impl Strategy<Value = Start> + use<> {
    let gpus = vec(prop_oneof![1 => Just(0_u64), 6 => Just(10)], 1..5);
    let quotas = vec(limits(shape.guarantees, shape.counted_only), 1..=QUOTAS.len());
    (gpus, quotas, vec(row(shape.flags, shape.gangs), shape.pods.clone())).prop_map(|(gpus, quotas, rows)| {
        let names = QUOTAS.iter().map(|name| (*name).to_owned());
        let mut world = World {
            gpus: gpus.into_iter().map(tenths).collect(),
            quotas: names.zip(quotas.iter().map(Limits::quota)).collect(),
            pods: Vec::new(),
            settings: settings(),
        };
        for (at, row) in rows.iter().enumerate() {
            let pod = row.pod(at, Moment(at as u64 + 1), &world);
            world.pods.push(pod);
        }
        Start(world)
    })
}

/// Returns random histories, with random settings.
pub(super) fn histories() -> impl Strategy<Value = History> {
    histories_of(&ANY)
}

/// Returns random histories of worlds of a shape, with random settings.
pub(super) fn histories_of(shape: &Shape) -> impl Strategy<Value = History> + use<> {
    let settings = (
        select(vec![0, 0, 3_u64]),
        select(vec![None, Some(4_u64)]),
        select(vec![1, 8, usize::MAX]),
        select(vec![None, Some(0), Some(4_u64)]),
    );
    (worlds(shape), settings, vec(event(shape.gangs, shape.guarantees), 1..12)).prop_map(
        |(mut start, settings, events)| {
            let set = &mut start.0.settings;
            (set.min_runtime_fair_share, set.budget_patience, set.max_preemptors, set.ageing) = settings;
            History { start, events }
        },
    )
}

/// Settings without time limits.
pub(super) fn settings() -> Settings {
    Settings {
        min_runtime_fair_share: 0,
        min_runtime_reclaim: 0,
        budget_patience: None,
        ageing: None,
        max_preemptors: usize::MAX,
        ..Settings::default()
    }
}

impl Limits {
    fn quota(&self) -> Quota {
        let quota = Quota::new(tenths(self.min)).with_max(self.more.map(|more| tenths(self.min + more))).unwrap();
        let quota = quota.with_lend(self.lends_half.then_some(tenths(self.min / 2))).unwrap();
        quota.with_weight(self.weight).unwrap().with_mode(self.mode).with_guarantee(self.guarantee).unwrap()
    }
}

impl Row {
    fn pod(&self, number: usize, created: Moment, world: &World) -> Pod {
        let owner = match QUOTAS.get(self.owner).copied().filter(|name| world.quotas.contains_key(*name)) {
            _ if self.flag == Flag::Exempt => Owner::Outside,
            Some(name) => Owner::Quota(name.to_owned()),
            None => Owner::Unnamed,
        };
        let gpu =
            self.gpu.filter(|&gpu| gpu < world.gpus.len() && used_of(world, gpu) + self.tenths <= size(world, gpu));
        Pod {
            name: format!("p{number:02}"),
            owner,
            charge: tenths(self.tenths),
            priority: if self.flag == Flag::System { 2_000_000_000 } else { self.priority },
            created,
            place: gpu.map_or(Place::Waiting { nominated: None }, |gpu| Place::Running { gpu, since: created }),
            borrows: self.flag != Flag::DoesNotBorrow,
            preempts: self.flag != Flag::EvictsNobody,
            protected: (self.flag == Flag::Protected).then_some(created),
            gang: self.gang.map(|(number, size)| Gang { name: format!("g{number}"), size }),
            pieces: Vec::new(),
            gpus: None,
        }
    }
}

fn size(world: &World, gpu: usize) -> u64 {
    world.gpus[gpu].0 / TENTH
}

fn used_of(world: &World, gpu: usize) -> u64 {
    let on = world.pods.iter().filter(|pod| matches!(pod.place, Place::Running { gpu: at, .. } if at == gpu));
    on.map(|pod| pod.charge.0 / TENTH).sum()
}

/// A world during its history.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) world: World,
    pub(super) now: Moment,
    /// Number of pods that were ever created.
    created: usize,
}

impl Run {
    pub(super) fn new(start: World) -> Self {
        let created = start.pods.len();
        Self { world: start, now: Moment(created as u64 + 1), created }
    }

    /// Applies an event.
    pub(super) fn happen(&mut self, event: &Event) {
        let Self { world, now, created } = self;
        now.0 += 1;
        let names: Vec<String> = world.quotas.keys().cloned().collect();
        let quota = |number: usize| names.get(number % names.len().max(1));
        match event {
            Event::Arrive(row) => {
                world.pods.push(row.pod(*created, *now, world));
                *created += 1;
            }
            Event::End(number) if !world.pods.is_empty() => {
                world.pods.remove(number % world.pods.len());
            }
            Event::Edit(number, limits) => {
                quota(*number).map(|name| world.quotas.insert(name.clone(), limits.quota()));
            }
            Event::Delete(number) => {
                quota(*number).map(|name| world.quotas.remove(name));
            }
            Event::Protect(number) if !world.pods.is_empty() => {
                let at = number % world.pods.len();
                let protected = &mut world.pods[at].protected;
                *protected = if protected.is_some() { None } else { Some(*now) };
            }
            Event::Fail(number) => {
                let at = number % world.gpus.len();
                world.gpus[at] = if world.gpus[at] == Amount::ZERO { tenths(10) } else { Amount::ZERO };
            }
            Event::Replace => self.replace(false),
            Event::Lead => self.forget_nominations(),
            Event::Wait(seconds) => now.0 += seconds,
            Event::End(_) | Event::Protect(_) => {}
        }
    }
}

impl Run {
    /// Removes evicted pods and adds waiting replacements. With `keeps_names`, the replacements
    /// have the same names.
    pub(super) fn replace(&mut self, keeps_names: bool) {
        self.now.0 += 1;
        let Self { world, now, created } = self;
        for pod in world.pods.iter_mut().filter(|pod| matches!(pod.place, Place::Leaving { .. })) {
            now.0 += 1;
            pod.created = *now;
            (pod.place, pod.protected) = (Place::Waiting { nominated: None }, None);
            if !keeps_names {
                pod.name = format!("p{created:02}");
                *created += 1;
            }
        }
    }

    /// Adds a pod that is created now.
    pub(super) fn add(&mut self, pod: impl Fn(usize, Moment) -> Pod) {
        self.world.pods.push(pod(self.created, self.now));
        self.created += 1;
    }

    /// Removes all nominations, as if another leader took over.
    pub(super) fn forget_nominations(&mut self) {
        for pod in &mut self.world.pods {
            if let Place::Waiting { nominated } = &mut pod.place {
                *nominated = None;
            }
        }
    }
}

/// A random world. Its `Debug` is short.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Start(pub(super) World);

impl fmt::Debug for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&describe(&self.0))
    }
}

/// Describes a world, one line for each object.
pub(super) fn describe(world: &World) -> String {
    let mut text = format!("GPUs {:?}, {:?}\n", world.gpus, world.settings);
    let mut line = |line: String| text.push_str(&(line + "\n"));
    for (name, quota) in &world.quotas {
        line(format!("  quota {name}: {quota:?}"));
    }
    for pod in &world.pods {
        let Pod { name, owner, charge, priority, created, place, borrows, preempts, protected, gang, pieces, gpus } =
            pod;
        let gang = gang.as_ref().map(|gang| format!("{} of {}", gang.name, gang.size));
        let flags =
            format!("borrows {borrows} preempts {preempts} protected {protected:?} {gang:?} {pieces:?} {gpus:?}");
        line(format!("  {name} {owner:?} {charge} priority {priority} created {} {place:?} {flags}", created.0));
    }
    text
}

/// Counts pods by name, for messages.
pub(super) fn count<'a>(names: impl Iterator<Item = &'a String>) -> BTreeMap<&'a str, usize> {
    names.fold(BTreeMap::new(), |mut counts, name| {
        *counts.entry(name.as_str()).or_default() += 1;
        counts
    })
}
