//! Tests quotas with the scenarios in `quotas/`, whose results were worked out by hand or with
//! another model.
//!
//! | file | content |
//! |---|---|
//! | `basic.json` | one rule each |
//! | `harder.json` | several rules at once, gangs |
//!
//! The format is that of `cleave simulate --quotas`, and `gang` with the name and size of a gang.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
use std::collections::{BTreeMap, BTreeSet};

use cleave_plan::ledger::Moment;
use cleave_plan::quota::{
    Amount, Gang, Guarantee, Owner, Place, Pod, Quota, Rest, Settings, Wait, World, look, simulate,
};
use serde::Deserialize;
use serde_json::Value;

/// A tenth of a GPU.
const TENTH: u64 = 100_000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Scenario {
    id: String,
    #[allow(dead_code, reason = "explains the scenario")]
    title: String,
    gpus: Vec<u64>,
    quotas: BTreeMap<String, Limits>,
    running: Vec<Vec<Value>>,
    waiting: Vec<Vec<Value>>,
    expect: Expected,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Limits {
    #[serde(default)]
    min: u64,
    max: Option<u64>,
    lend: Option<u64>,
    weight: Option<i64>,
    #[serde(default)]
    guarantee: Guarantee,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Flags {
    borrow: Option<bool>,
    protected: bool,
    exempt: bool,
    gang: Option<(String, usize)>,
}

#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Expected {
    leave: Vec<(String, String, BTreeSet<String>)>,
    #[serde(rename = "in")]
    within: BTreeSet<String>,
    over: BTreeSet<String>,
    waits: BTreeMap<String, String>,
}

fn scenarios() -> Vec<Scenario> {
    let files = [include_str!("quotas/basic.json"), include_str!("quotas/harder.json")];
    files.into_iter().flat_map(|text| serde_json::from_str::<Vec<Scenario>>(text).unwrap()).collect()
}

impl Scenario {
    fn world(&self) -> World {
        let amount = |tenths: u64| Amount(tenths * TENTH);
        let quota = |limits: &Limits| {
            let quota = Quota::new(amount(limits.min)).with_max(limits.max.map(amount)).unwrap();
            let quota = quota.with_lend(limits.lend.map(amount)).unwrap();
            quota.with_weight(limits.weight.unwrap_or(1)).unwrap().with_guarantee(limits.guarantee).unwrap()
        };
        World {
            gpus: self.gpus.iter().map(|&size| amount(size)).collect(),
            quotas: self.quotas.iter().map(|(name, limits)| (name.clone(), quota(limits))).collect(),
            pods: self
                .running
                .iter()
                .map(|row| pod(row, true))
                .chain(self.waiting.iter().map(|row| pod(row, false)))
                .collect(),
            settings: Settings {
                min_runtime_fair_share: 0,
                budget_patience: None,
                ageing: None,
                max_preemptors: usize::MAX,
                ..Settings::default()
            },
        }
    }
}

fn pod(row: &[Value], runs: bool) -> Pod {
    let number = |at: usize| row[at].as_u64().unwrap();
    let text = |at: usize| row[at].as_str().unwrap().to_owned();
    let flags = row.get(if runs { 6 } else { 5 }).cloned().unwrap_or(Value::Object(serde_json::Map::new()));
    let flags: Flags = serde_json::from_value(flags).unwrap();
    let created = Moment(number(4));
    Pod {
        name: text(0),
        owner: match text(1).as_str() {
            "-" if flags.exempt => Owner::Outside,
            "-" => Owner::Unnamed,
            name => Owner::Quota(name.to_owned()),
        },
        charge: Amount(number(2) * TENTH),
        priority: i32::try_from(row[3].as_i64().unwrap()).unwrap(),
        created,
        place: if runs {
            Place::Running { gpu: usize::try_from(number(5)).unwrap(), since: created }
        } else {
            Place::Waiting { nominated: None }
        },
        borrows: flags.borrow.unwrap_or(true),
        preempts: true,
        protected: flags.protected.then_some(Moment(0)),
        gang: flags.gang.map(|(name, size)| Gang { name, size }),
        gpus: None,
    }
}

fn result(rest: &Rest) -> Expected {
    let leave = rest.leaves.iter().map(|leave| {
        (format!("{:?}", leave.kind), leave.taker.clone(), leave.victims.iter().cloned().collect::<BTreeSet<String>>())
    });
    Expected {
        leave: leave.collect(),
        within: rest.within.clone(),
        over: rest.over.clone(),
        waits: rest.waits.iter().map(|(pod, wait)| (pod.clone(), wait.name().to_owned())).collect(),
    }
}

#[test]
fn scenarios_have_the_expected_results() {
    let scenarios = scenarios();
    assert_eq!(scenarios.len(), 29);
    for scenario in scenarios {
        let rest = simulate(scenario.world(), 50, |_, _| {}).unwrap();
        assert_eq!(result(&rest), scenario.expect, "{}", scenario.id);
    }
}

/// A scenario that is interrupted and starts again from its pods has the same end: another leader
/// knows all pods, and no nominations.
#[test]
fn another_leader_comes_to_the_same_end() {
    for scenario in scenarios().into_iter().filter(|scenario| scenario.id != "withdrawn") {
        let mut worlds = Vec::new();
        simulate(scenario.world(), 50, |world, _| worlds.push(world.clone())).unwrap();
        for mut world in worlds {
            for pod in &mut world.pods {
                if let Place::Waiting { nominated } = &mut pod.place {
                    *nominated = None;
                }
            }
            let end = result(&simulate(world, 50, |_, _| {}).unwrap());
            let Expected { within, over, waits, .. } = &scenario.expect;
            assert_eq!((&end.within, &end.over, &end.waits), (within, over, waits), "{}", scenario.id);
        }
    }
}

/// The order of pods in the input, and names of quotas, do not matter.
#[test]
fn the_order_of_pods_does_not_matter() {
    for scenario in scenarios() {
        let mut world = scenario.world();
        world.pods.reverse();
        assert_eq!(result(&simulate(world, 50, |_, _| {}).unwrap()), scenario.expect, "{}", scenario.id);
    }
}

/// A pod that may use only some GPUs reclaims room on these.
#[test]
fn a_pod_uses_only_the_gpus_that_it_may_use() {
    let scenario = scenarios().into_iter().find(|scenario| scenario.id == "exempt").unwrap();
    let mut world = scenario.world();
    let only = |gpu: usize| Some(std::sync::Arc::new(BTreeSet::from([gpu])));
    (world.pods[2].gpus, world.pods[3].gpus) = (only(0), only(1));
    let rest = simulate(world.clone(), 50, |_, _| {}).unwrap();
    assert_eq!((rest.leaves[0].taker.as_str(), rest.leaves.len()), ("a2", 1), "a1 may use only the exempt pod's GPU");
    world.pods[2].gpus = only(7);
    let outcome = look(&world, Moment(9));
    assert_eq!(outcome.waits.values().next(), Some(&Wait::NoGpuFits));
}
