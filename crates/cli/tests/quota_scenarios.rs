//! Tests quotas with the scenarios in `quota_scenarios/`. The expected results were computed by
//! hand or with an independent model.
//!
//! | file | content |
//! |---|---|
//! | `basic.json` | one rule each |
//! | `harder.json` | several rules at once, gangs |
//!
//! A scenario is an input of `cleave simulate --quotas` and its expected result.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
use std::collections::{BTreeMap, BTreeSet};

use cleave_cli::quota_file::{parse_world, simulate_quotas};
use cleave_plan::ledger::Moment;
use cleave_plan::quota::{Place, Rest, Wait, World, look, simulate};
use serde::Deserialize;
use serde_json::Value;

struct Scenario {
    id: String,
    world: World,
    expect: Expected,
    /// The input.
    text: String,
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
    let files = [include_str!("quota_scenarios/basic.json"), include_str!("quota_scenarios/harder.json")];
    let objects = files.into_iter().flat_map(|text| serde_json::from_str::<Vec<Value>>(text).unwrap());
    let scenario = |object: Value| {
        let text = object.to_string();
        Scenario {
            id: object["id"].as_str().unwrap().to_owned(),
            world: parse_world(&text).unwrap(),
            expect: serde_json::from_value(object["expect"].clone()).unwrap(),
            text,
        }
    };
    objects.map(scenario).collect()
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
        let rest = simulate(scenario.world, 50, |_, _| {}).unwrap();
        assert_eq!(result(&rest), scenario.expect, "{}", scenario.id);
        let printed: Expected = serde_json::from_value(simulate_quotas(&scenario.text).unwrap()).unwrap();
        assert_eq!(printed, scenario.expect, "{}", scenario.id);
    }
}

/// A simulation that restarts from the pods of any step ends with the same running and waiting
/// pods, except in the scenario `withdrawn`. The restart drops all nominations, because a new
/// leader of the operator does not know them.
#[test]
fn a_new_leader_reaches_the_same_result() {
    for scenario in scenarios().into_iter().filter(|scenario| scenario.id != "withdrawn") {
        let mut worlds = Vec::new();
        simulate(scenario.world.clone(), 50, |world, _| worlds.push(world.clone())).unwrap();
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

/// The order of pods in the input does not change the result.
#[test]
fn the_order_of_pods_does_not_change_the_result() {
    for scenario in scenarios() {
        let mut world = scenario.world;
        world.pods.reverse();
        assert_eq!(result(&simulate(world, 50, |_, _| {}).unwrap()), scenario.expect, "{}", scenario.id);
    }
}

/// A pod that may use only some GPUs reclaims only shares of these GPUs.
#[test]
fn a_pod_uses_only_the_gpus_that_it_may_use() {
    let scenario = scenarios().into_iter().find(|scenario| scenario.id == "exempt").unwrap();
    let mut world = scenario.world;
    let only = |gpu: usize| Some(std::sync::Arc::new(BTreeSet::from([gpu])));
    (world.pods[2].gpus, world.pods[3].gpus) = (only(0), only(1));
    let rest = simulate(world.clone(), 50, |_, _| {}).unwrap();
    assert_eq!((rest.leaves[0].taker.as_str(), rest.leaves.len()), ("a2", 1), "a1 may use only the exempt pod's GPU");
    world.pods[2].gpus = only(7);
    let outcome = look(&world, Moment(9));
    assert_eq!(outcome.waits.values().next(), Some(&Wait::NoGpuFits));
}

#[test]
fn malformed_input_is_an_error_that_names_the_object() {
    for (text, part) in [
        ("", "not a description of quotas"),
        ("[]", "not a description of quotas"),
        (r#"{"gpus": [-1]}"#, "invalid value: integer `-1`"),
        (r#"{"gpus": [10000001]}"#, "GPU 0: 10000001 tenths"),
        (r#"{"gpus": [], "quotas": {"a": {"min": 2, "max": 1}}}"#, "quota a: min exceeds max"),
        (r#"{"gpus": [], "quotas": {"a": {"min": 5, "guarantee": "Cells"}}}"#, "quota a: min must be a whole number"),
        (r#"{"gpus": [], "quotas": {"a": {"weight": 0}}}"#, "quota a: weight 0"),
        (r#"{"gpus": [], "quotas": {"a": {"least": 1}}}"#, "unknown field `least`"),
        (r#"{"gpus": [], "quotas": {"-": {}}}"#, "a quota cannot be named `-`"),
        (r#"{"gpus": [10], "running": [["p", "-", 1, 0, 1, 1]]}"#, "running pod 1: p runs on GPU 1"),
        (r#"{"gpus": [10], "running": [["p", "-", 11, 0, 1, 0]]}"#, "GPU 0 has a size of 1 GPUs"),
        (r#"{"gpus": [10], "waiting": [["p", "b", 1, 0, 1]]}"#, "waiting pod 1: p has quota b, which is not in quotas"),
        (r#"{"gpus": [10], "waiting": [["p", "-", 0, 0, 1]]}"#, "p requests nothing"),
        (r#"{"gpus": [10], "waiting": [["p", "-", 1, 0]]}"#, "waiting pod 1: the columns are [name"),
        (r#"{"gpus": [10], "waiting": [["p", "-", 1, 0, 1], ["p", "-", 1, 0, 1]]}"#, "two pods are named p"),
        (r#"{"gpus": [10], "waiting": [["p", "-", 1, 0, 1, {"lend": 1}]]}"#, "flags: unknown field `lend`"),
    ] {
        let error = format!("{:#}", simulate_quotas(text).unwrap_err());
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}
