//! Tests quotas at the gate: whole cases, from the API objects to the pods that finally run.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::names::{GATE, NOMINATION_ANNOTATION};
use cleave_plan::quota::{Kind, Settings};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::world::{ActualAllocations, MPS_RESOURCE, TestCluster, at, reservation};
use crate::evict::EvictionResult;
use crate::placement::actions::{Actions, NominationRecord};
use crate::placement::gang_evictions::GangResults;
use crate::placement::gatekeeper::Gatekeeper;
use crate::placement::quota_reports::CapacityLabel;
use crate::placement::quotas::QuotaSettings;
use crate::policies::demand::Reason;

/// Maximum number of reconciles until nothing changes.
const MAX_RECONCILES: u64 = 60;

/// A cluster with one node. Amounts are tenths of a GPU, and each GPU has ten shares.
pub(super) struct Case {
    pub(super) world: TestCluster,
    pub(super) reality: ActualAllocations,
    gpus: usize,
    pub(super) keeper: Gatekeeper,
    rules: Settings,
    pub(super) seconds: u64,
    /// Evictions: the kind, the preemptor and the victim.
    pub(super) evicted: Vec<(String, String, String)>,
    /// The reconciles that evicted other pods for a waiting pod, by the UID of the waiting pod.
    rounds: BTreeMap<String, BTreeSet<u64>>,
    /// Bit mask of the reconciles before which another process takes over the lease. The lowest bit
    /// is the first reconcile.
    pub(super) losses: u64,
    /// Whether promises are checked after each reconcile.
    is_checked: bool,
    /// How evicted pods end.
    pub(super) ending: Ending,
    /// A pod whose release fails, because the pod has changed.
    pub(super) failing_release: Option<String>,
    /// A pod whose next eviction fails, and the result. The operator sends no further evictions for
    /// the same waiting pod in the same reconcile, and none at all after a throttled request.
    pub(super) failing_eviction: Option<(String, EvictionResult)>,
}

/// How evicted pods end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// At once. Their shares are free.
    Free,
    /// At once. The node no longer lists them, but still counts their shares as used.
    Unlisted,
    /// They terminate until the test ends them.
    Terminating,
}

/// A pod: name, quota, shares and priority.
pub(super) type PodOfCase<'a> = (&'a str, &'a str, u32, i32);

const RULES: fn() -> Settings = || Settings { min_runtime_fair_share: 0, ..Settings::default() };

pub(super) fn keeper() -> Gatekeeper {
    keeper_with(RULES())
}

fn keeper_with(rules: Settings) -> Gatekeeper {
    Gatekeeper::default().with_quotas(QuotaSettings { rules, ..QuotaSettings::default() })
}

impl Case {
    /// `quotas` contains names and specs. Each quota applies to the namespace with the same name.
    pub(super) fn new(gpus: usize, quotas: &[(&str, Value)]) -> Self {
        let mut world = TestCluster::default().node("n1", &vec![0; gpus]);
        for (name, spec) in quotas {
            let mut spec = spec.clone();
            for field in ["min", "max", "lend"] {
                if let Some(tenths) = spec[field].as_u64() {
                    spec[field] = json!(format!("{}m", tenths * 100));
                }
            }
            spec["namespaces"] = json!([name]);
            world.quotas.push(json!({"apiVersion": "cleave.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec}));
        }
        let (evicted, reality) = (Vec::new(), ActualAllocations::default());
        let rules = RULES();
        let (keeper, rounds) = (keeper(), BTreeMap::new());
        Self {
            world,
            reality,
            gpus,
            keeper,
            rules,
            seconds: 0,
            evicted,
            rounds,
            losses: 0,
            is_checked: false,
            ending: Ending::Free,
            failing_release: None,
            failing_eviction: None,
        }
    }

    /// Enables ageing: the operator keeps units for pods that have waited this number of seconds.
    pub(super) fn with_ageing(mut self, seconds: u64) -> Self {
        self.rules.ageing = Some(seconds);
        self.keeper = keeper_with(self.rules);
        self
    }

    /// Lets disruption budgets protect borrowers for this number of seconds.
    pub(super) fn with_budget_patience(mut self, seconds: u64) -> Self {
        self.rules.budget_patience = Some(seconds);
        self.keeper = keeper_with(self.rules);
        self
    }

    /// Lets pods of this priority and above override quotas.
    pub(super) fn with_override_priority(mut self, priority: Option<i32>) -> Self {
        self.rules.override_priority = priority;
        self.keeper = keeper_with(self.rules);
        self
    }

    /// Makes these pods of a quota a gang of `size` pods.
    pub(super) fn gang(mut self, quota: &str, gang: &str, size: usize, pods: &[&str]) -> Self {
        for pod in pods {
            self.world.change(
                |world| &mut world.pods,
                &format!("{quota}/{pod}"),
                |pod| {
                    pod["metadata"]["annotations"]["cleave.dev/gang"] = json!(gang);
                    pod["metadata"]["annotations"]["cleave.dev/gang-size"] = json!(size.to_string());
                },
            );
        }
        self
    }

    /// Ends a pod without recreating it.
    pub(super) fn end(&mut self, pod: &str) {
        self.world.pods.remove(pod).unwrap();
        self.reality.given.remove(pod);
    }

    pub(super) fn add(&mut self, (name, quota, shares, priority): PodOfCase<'_>, device: Option<usize>) {
        let namespace = if quota == "-" { "other" } else { quota };
        self.seconds += 1;
        self.world.version += 1;
        let created = jiff::Timestamp::from_second(1_000_000 + i64::try_from(self.seconds).unwrap()).unwrap();
        let gates = if device.is_some() { json!([]) } else { json!([{"name": GATE}]) };
        let mut pod = json!({"metadata": {"name": name, "namespace": namespace, "uid": format!("{name}-{}", self.world.version),
                "resourceVersion": self.world.version.to_string(), "creationTimestamp": created.to_string()},
            "spec": {"schedulingGates": gates, "priority": priority,
                "containers": [{"name": "main", "resources": {"limits": {MPS_RESOURCE: shares.to_string()}}}]}});
        let full = format!("{namespace}/{name}");
        if let Some(device) = device {
            pod["spec"]["nodeName"] = json!("n1");
            self.reality.given.insert(full.clone(), (format!("n1-GPU-{device}"), shares));
        }
        self.world.pods.insert(full, pod);
    }

    pub(super) fn running(mut self, pods: &[(PodOfCase<'_>, usize)]) -> Self {
        for (pod, device) in pods {
            self.add(*pod, Some(*device));
        }
        self
    }

    pub(super) fn waiting(mut self, pods: &[PodOfCase<'_>]) -> Self {
        for pod in pods {
            self.add(*pod, None);
        }
        self
    }

    /// Reconciles until nothing changes. Evicted pods end immediately, and are recreated like pods
    /// of a Deployment.
    pub(super) fn until_rest(mut self) -> Self {
        let end = self.seconds + MAX_RECONCILES;
        let mut idle = 0;
        loop {
            let is_lost = self.losses & 1 == 1;
            let actions = self.step();
            assert!(self.seconds < end, "the decisions do not settle: {:?}", self.evicted);
            let is_idle = actions.releases.is_empty() && actions.evictions.is_empty();
            idle = if is_idle { idle + 1 } else { 0 };
            // After this number of reconciles, each pod has had its turn. A leader that is lost
            // each time never gets to the pods whose turn comes later.
            if is_idle && (!actions.more || is_lost || idle > 3) {
                return self;
            }
        }
    }

    /// Reconciles once, and applies the decisions.
    pub(super) fn step(&mut self) -> Actions {
        self.seconds += 1;
        self.reality.report_on(&mut self.world, self.gpus);
        if self.losses & 1 == 1 {
            self.keeper = keeper_with(self.rules);
        }
        self.losses >>= 1;
        let actions = self.keeper.reconcile(&self.world.cluster(), &BTreeMap::new(), at(self.seconds));
        let before = self.used();
        if self.is_checked {
            self.check_promises(&before, &actions);
        }
        for release in &actions.releases {
            if self.failing_release.as_ref() == Some(&release.pod) {
                self.keeper.record_failed_release(&release.pod);
                continue;
            }
            assert!(self.world.apply_release(release), "{release:?}");
            let (node, reserved) = reservation(release).nodes.pop_first().unwrap();
            self.reality.given.insert(release.pod.clone(), (reserved[0].device.clone(), reserved[0].units));
            self.world.change(|world| &mut world.pods, &release.pod, |pod| pod["spec"]["nodeName"] = json!(node));
        }
        if self.is_checked {
            self.check_promises(&before, &Actions::default());
            self.check_gangs();
        }
        self.write_notes(&actions.kept);
        let round = self.seconds;
        let mut of_gangs = GangResults::default();
        let mut failed = BTreeSet::new();
        for eviction in &actions.evictions {
            if failed.contains(&eviction.preemptor) {
                continue;
            }
            if let Some((_, result)) = self.failing_eviction.take_if(|(pod, _)| *pod == eviction.pod) {
                self.keeper.record_eviction(eviction, &result, at(self.seconds).up);
                of_gangs.record(eviction, &result);
                if matches!(result, EvictionResult::Throttled(_)) {
                    break;
                }
                failed.insert(eviction.preemptor.clone());
                continue;
            }
            let kind = eviction.quota.as_ref().map_or_else(|| "-".to_owned(), |quota| format!("{:?}", quota.kind));
            self.keeper.record_eviction(eviction, &EvictionResult::Done, at(self.seconds).up);
            of_gangs.record(eviction, &EvictionResult::Done);
            self.evicted.push((kind, short(&eviction.preemptor), short(&eviction.pod)));
            if self.world.pods.contains_key(&eviction.preemptor) {
                self.rounds.entry(self.world.uid(&eviction.preemptor)).or_default().insert(round);
            }
            if self.ending == Ending::Terminating {
                self.world.terminate(&eviction.pod, "2100-01-01T00:00:00Z");
            } else {
                self.recreate(&eviction.pod);
            }
        }
        self.write_notes(&of_gangs.correct(&actions.kept));
        actions
    }

    /// Writes nominations to the nominated pods.
    fn write_notes(&mut self, kept: &[NominationRecord]) {
        for record in kept {
            let note = json!(record.room.to_text().unwrap());
            self.world.change(
                |world| &mut world.pods,
                &record.pod,
                |pod| pod["metadata"]["annotations"][NOMINATION_ANNOTATION] = note,
            );
        }
    }

    /// Replaces a pod as its controller does.
    fn recreate(&mut self, name: &str) {
        let pod = self.world.pods.remove(name).unwrap();
        if let Some(given) = self.reality.given.remove(name).filter(|_| self.ending == Ending::Unlisted) {
            self.reality.unlisted.insert(name.to_owned(), given);
        }
        let (quota, short) = name.split_once('/').unwrap();
        let priority = i32::try_from(pod["spec"]["priority"].as_i64().unwrap()).unwrap();
        self.add((short, if quota == "other" { "-" } else { quota }, TestCluster::units(&pod), priority), None);
        let gang = &pod["metadata"]["annotations"]["cleave.dev/gang"];
        if !gang.is_null() {
            let size = &pod["metadata"]["annotations"]["cleave.dev/gang-size"];
            let mut annotations = json!({"cleave.dev/gang": gang});
            if size.is_string() {
                annotations["cleave.dev/gang-size"] = size.clone();
            }
            self.world.change(|world| &mut world.pods, name, |pod| pod["metadata"]["annotations"] = annotations);
        }
    }

    /// Checks that either all pods of each gang run, or none.
    fn check_gangs(&self) {
        let mut gangs: BTreeMap<(String, String), (usize, usize)> = BTreeMap::new();
        for (name, pod) in &self.world.pods {
            let Some(gang) = pod["metadata"]["annotations"]["cleave.dev/gang"].as_str() else { continue };
            let (namespace, _) = name.split_once('/').unwrap();
            let (all, running) = gangs.entry((namespace.to_owned(), gang.to_owned())).or_default();
            *all += 1;
            *running += usize::from(pod["spec"]["nodeName"].is_string());
        }
        for (gang, (all, running)) in gangs {
            assert!(running == 0 || running == all, "{running} of {all} pods of {gang:?} run");
        }
    }

    pub(super) fn is_running(&self) -> BTreeSet<String> {
        let running = self.world.pods.iter().filter(|(_, pod)| pod["spec"]["nodeName"].is_string());
        running.map(|(name, _)| short(name)).collect()
    }

    /// Checks the promises that hold after each reconcile. No quota exceeds its maximum (R1). Pods
    /// of other quotas are evicted only if their quota borrows (R2). A pod that reclaims fits into
    /// the guarantee of its quota (R3).
    fn check_promises(&self, before: &BTreeMap<String, u32>, actions: &Actions) {
        let used = self.used();
        for (quota, used) in &used {
            if let Some(max) = self.limit(quota, "max") {
                assert!(*used <= max || used <= before.get(quota).unwrap_or(&0), "{quota} uses {used} of {max}");
            }
        }
        for eviction in &actions.evictions {
            let kind = eviction.quota.as_ref().unwrap().kind;
            let namespace = |name: &str| name.split_once('/').unwrap().0.to_owned();
            let (taker, victim) = (namespace(&eviction.preemptor), namespace(&eviction.pod));
            assert_eq!(kind == Kind::Priority, taker == victim, "{eviction:?}");
            if kind != Kind::Priority {
                let min = self.limit(&victim, "min").unwrap_or(0);
                assert!(
                    before.get(&victim).is_some_and(|used| *used > min),
                    "{eviction:?}: only borrowers are evicted"
                );
            }
            if kind == Kind::Reclaim {
                let units = TestCluster::units(&self.world.pods[&eviction.preemptor]);
                let min = self.limit(&taker, "min").unwrap_or(0);
                // A pod that is larger than the guarantee borrows instead, so that smaller pods can
                // use the guarantee.
                assert!(units <= min, "{eviction:?}: the preemptor fits into the guarantee");
            }
        }
    }

    /// Returns the shares that the pods of each namespace use.
    fn used(&self) -> BTreeMap<String, u32> {
        let mut used = BTreeMap::new();
        for (pod, (_, units)) in &self.reality.given {
            *used.entry(pod.split_once('/').unwrap().0.to_owned()).or_default() += units;
        }
        used
    }

    fn limit(&self, quota: &str, field: &str) -> Option<u32> {
        let spec = self.world.quotas.iter().find(|object| object["metadata"]["name"] == quota)?;
        let text = spec["spec"][field].as_str()?;
        Some(text.strip_suffix('m').unwrap().parse::<u32>().unwrap() / 100)
    }

    /// Checks the evictions, in order, and the pods that finally run. Repeats the check with a new
    /// leader before each reconcile.
    pub(super) fn expect(self, evicted: &[(&str, &str, &str)], running: &[&str]) {
        let lost = Self {
            world: self.world.clone(),
            reality: ActualAllocations { given: self.reality.given.clone(), ..ActualAllocations::default() },
            keeper: keeper_with(self.rules),
            evicted: Vec::new(),
            rounds: BTreeMap::new(),
            losses: u64::MAX,
            failing_release: self.failing_release.clone(),
            failing_eviction: self.failing_eviction.clone(),
            ..self
        };
        for case in [self, lost] {
            let rest = case.until_rest();
            let of = |(kind, taker, victim): &(String, String, String)| (kind.clone(), taker.clone(), victim.clone());
            let expected: Vec<_> = evicted
                .iter()
                .map(|(kind, taker, victim)| ((*kind).to_owned(), (*taker).to_owned(), (*victim).to_owned()))
                .collect();
            assert_eq!(rest.evicted.iter().map(of).collect::<Vec<_>>(), expected, "in order");
            assert_eq!(rest.is_running(), running.iter().map(|name| (*name).to_owned()).collect(), "finally");
        }
    }
}

fn short(name: &str) -> String {
    name.split_once('/').map_or(name, |(_, name)| name).to_owned()
}

#[test]
fn a_guarantee_is_reclaimed_from_borrowers_and_the_second_pod_waits() {
    Case::new(1, &[("a", json!({"min": 5})), ("b", json!({"min": 5}))])
        .running(&[(("b1", "b", 5, 0), 0), (("b2", "b", 5, 0), 0)])
        .waiting(&[("a1", "a", 5, 0), ("a2", "a", 5, 0)])
        .expect(&[("Reclaim", "a1", "b2")], &["a1", "b1"]);
}

#[test]
fn units_without_a_guarantee_can_be_borrowed() {
    Case::new(2, &[("a", json!({"min": 5})), ("b", json!({"min": 5}))])
        .running(&[(("a1", "a", 5, 0), 0), (("b1", "b", 5, 0), 0)])
        .waiting(&[("a2", "a", 10, 0)])
        .expect(&[], &["a1", "a2", "b1"]);
}

#[test]
fn a_pod_beyond_the_maximum_waits_although_units_are_free_and_a_smaller_pod_is_released() {
    Case::new(2, &[("a", json!({"min": 5, "max": 10}))])
        .running(&[(("a1", "a", 6, 0), 0)])
        .waiting(&[("a2", "a", 5, 0), ("a3", "a", 4, 0)])
        .expect(&[], &["a1", "a3"]);
}

#[test]
fn a_namespace_without_a_quota_borrows() {
    Case::new(1, &[("a", json!({"min": 6}))])
        .running(&[(("x1", "-", 6, 500), 0), (("x2", "-", 4, 0), 0)])
        .waiting(&[("a1", "a", 4, 0)])
        .expect(&[("Reclaim", "a1", "x2")], &["a1", "x1"]);
}

#[test]
fn borrowers_share_units_by_weight() {
    let b = ["b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8"];
    let a = ["a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8"];
    let running: Vec<_> = b.iter().enumerate().map(|(at, name)| ((*name, "b", 5, 0), at / 2)).collect();
    let waiting: Vec<_> = a.iter().map(|name| (*name, "a", 5, 0)).collect();
    let exchanges = [("a1", "b8"), ("a2", "b7"), ("a3", "b6"), ("a4", "b5"), ("a5", "b4"), ("a6", "b3")];
    Case::new(4, &[("a", json!({"weight": 3})), ("b", json!({}))]).running(&running).waiting(&waiting).expect(
        &exchanges.map(|(taker, victim)| ("FairShare", taker, victim)),
        &["a1", "a2", "a3", "a4", "a5", "a6", "b1", "b2"],
    );
}

#[test]
fn at_the_maximum_priority_decides_within_the_quota() {
    Case::new(2, &[("a", json!({"min": 5, "max": 10}))])
        .running(&[(("low", "a", 5, 0), 0), (("mid", "a", 5, 10), 0)])
        .waiting(&[("high", "a", 5, 20)])
        .expect(&[("Priority", "high", "low")], &["high", "mid"]);
}

#[test]
fn priority_does_not_evict_a_pod_within_the_guarantee_of_another_quota() {
    Case::new(1, &[("a", json!({"min": 2})), ("b", json!({"min": 8}))])
        .running(&[(("a1", "a", 2, 0), 0), (("b1", "b", 8, 0), 0)])
        .waiting(&[("a2", "a", 4, 1_000_000)])
        .expect(&[], &["a1", "b1"]);
}

#[test]
fn reclaimed_units_are_not_used_by_a_borrower_of_higher_priority() {
    Case::new(1, &[("a", json!({"min": 5})), ("b", json!({})), ("c", json!({}))])
        .running(&[(("b1", "b", 10, 0), 0)])
        .waiting(&[("a1", "a", 5, 0), ("c1", "c", 10, 1000)])
        .expect(&[("Reclaim", "a1", "b1")], &["a1"]);
}

#[test]
fn the_borrower_that_exceeds_its_share_most_is_evicted() {
    Case::new(3, &[("a", json!({"min": 10})), ("b", json!({})), ("c", json!({}))])
        .running(&[(("b1", "b", 10, 5), 0), (("b2", "b", 10, 5), 1), (("c1", "c", 10, 0), 2)])
        .waiting(&[("a1", "a", 10, 0)])
        .expect(&[("Reclaim", "a1", "b2")], &["a1", "b1", "c1"]);
}

#[test]
fn only_a_guarantee_of_cells_reclaims_a_whole_gpu() {
    let pods =
        |case: Case| case.running(&[(("b1", "b", 5, 0), 0), (("b2", "b", 5, 0), 1)]).waiting(&[("a1", "a", 10, 0)]);
    pods(Case::new(2, &[("a", json!({"min": 10})), ("b", json!({"min": 10}))])).expect(&[], &["b1", "b2"]);
    let cells = json!({"min": 10, "guarantee": "Cells"});
    pods(Case::new(2, &[("a", cells.clone()), ("b", cells)])).expect(&[("Reclaim", "a1", "b2")], &["a1", "b1", "b2"]);
}

#[test]
fn the_part_of_a_guarantee_that_is_not_lent_remains_free() {
    Case::new(2, &[("a", json!({"min": 10, "lend": 4})), ("b", json!({"min": 10}))])
        .running(&[(("b1", "b", 10, 0), 0)])
        .waiting(&[("b2", "b", 3, 0), ("b3", "b", 3, 0)])
        .expect(&[], &["b1", "b2"]);
}

#[test]
fn a_pod_that_does_not_borrow_waits_for_its_guarantee() {
    let mut case = Case::new(1, &[("a", json!({"min": 5}))])
        .running(&[(("a1", "a", 3, 0), 0)])
        .waiting(&[("a2", "a", 4, 0), ("a3", "a", 2, 0)]);
    for name in ["a/a2", "a/a3"] {
        let never = |pod: &mut Value| pod["metadata"]["annotations"] = json!({"cleave.dev/borrow": "Never"});
        case.world.change(|world| &mut world.pods, name, never);
    }
    let actions = keeper().reconcile(&case.world.cluster(), &BTreeMap::new(), at(9));
    let waiting = &actions.waiting["a/a2"];
    assert_eq!(waiting.reason, Reason::WaitsForGuarantee);
    assert!(waiting.message.contains("uses 0.3 of 0.5 guaranteed"), "{}", waiting.message);
    case.expect(&[], &["a1", "a3"]);
}

#[test]
fn the_status_reports_used_held_and_requested_amounts() {
    let mut case = Case::new(1, &[("a", json!({"min": 5})), ("b", json!({"min": 5, "max": 12}))])
        .running(&[(("b1", "b", 5, 0), 0), (("b2", "b", 5, 0), 0)])
        .waiting(&[("a1", "a", 5, 0), ("b3", "b", 5, 0)]);
    case.reality.report_on(&mut case.world, 1);
    let cluster = case.world.cluster();
    let mut keeper = keeper();
    let actions = keeper.reconcile(&cluster, &BTreeMap::new(), at(9));
    keeper.record_eviction(&actions.evictions[0], &EvictionResult::Done, at(9).up);
    let reports = keeper.quota_reports(&cluster, &actions.waiting, at(9));
    let statuses: BTreeMap<_, _> = reports.statuses.into_iter().collect();
    let (a, b) = (&statuses["a"], &statuses["b"]);
    assert_eq!((a.used.as_str(), a.pods.within, a.waiting.pods, a.waiting.gpus.as_str()), ("0.5", 1, 1, "0.5"));
    let guaranteed = |status: &cleave_api::GpuQuotaStatus| status.conditions[1].reason.clone();
    assert_eq!((guaranteed(a).as_str(), guaranteed(b).as_str()), ("Reclaiming", "Kept"));
    assert_eq!((b.used.as_str(), b.held.as_str(), b.pods.leaving), ("0.5", "1", 1));
    assert_eq!(b.waiting.reasons, BTreeMap::from([("OverMax".to_owned(), 1)]));
    let mut seen = case.world.clone();
    for quota in &mut seen.quotas {
        quota["status"] = json!(statuses[quota["metadata"]["name"].as_str().unwrap()]);
    }
    let again = keeper.quota_reports(&seen.cluster(), &actions.waiting, at(10));
    assert_eq!(again.statuses, [], "only differences are written");
    assert_eq!(again.usages["a"].waiting, BTreeMap::from([("Nominated".to_owned(), 1)]));
    let label = |pod: &str, value| CapacityLabel { pod: pod.to_owned(), uid: seen.uid(pod), value: Some(value) };
    assert_eq!(again.labels, [label("b/b1", "in-quota")], "b2 is evicted");
}

#[test]
fn quotas_in_mode_count_do_not_change_decisions() {
    let case = |quotas: &[(&str, Value)]| {
        Case::new(1, quotas)
            .running(&[(("b1", "b", 5, 0), 0), (("b2", "b", 5, 3), 0)])
            .waiting(&[("a1", "a", 5, 9), ("a2", "a", 5, 1)])
            .until_rest()
    };
    let counted = json!({"min": 5, "max": 5, "mode": "Count"});
    let (with, without) = (case(&[("a", counted.clone()), ("b", counted)]), case(&[]));
    assert_eq!((&with.evicted, with.is_running()), (&without.evicted, without.is_running()));
    assert_eq!(without.evicted.len(), 1, "priority alone decides: {:?}", without.evicted);
}

#[test]
fn a_new_leader_keeps_the_nomination_for_which_pods_were_evicted() {
    for losses in [0, u64::MAX] {
        let mut case = Case::new(2, &[("a", json!({})), ("b", json!({})), ("c", json!({}))])
            .running(&[(("b1", "b", 5, 0), 0), (("b2", "b", 5, 0), 0), (("b3", "b", 5, 0), 1), (("b4", "b", 5, 0), 1)])
            .waiting(&[("a1", "a", 5, 0)]);
        case.losses = losses;
        case.step();
        assert_eq!(case.evicted.len(), 1, "{:?}", case.evicted);
        // The quota of c1 has a lower share, so the turn of c1 is before the turn of a1.
        let case = case.waiting(&[("c1", "c", 4, 0)]).until_rest();
        let for_a1 = case.evicted.iter().filter(|(_, taker, _)| taker == "a1").count();
        assert_eq!(for_a1, 1, "losses {losses:x}: {:?}", case.evicted);
        assert!(case.is_running().contains("a1"), "{:?}", case.is_running());
    }
}

#[test]
fn a_nomination_that_has_expired_or_whose_units_are_in_use_is_not_restored() {
    let note = |until: u64| {
        json!({"until": until, "nodes": {"n1": [{"resource": MPS_RESOURCE, "units": 5, "device": "n1-GPU-0"}]}})
            .to_string()
    };
    for (until, running, expected) in [(2_000_000, 6, 0), (1, 0, 0), (2_000_000, 0, 1)] {
        let mut case = Case::new(1, &[("a", json!({})), ("b", json!({}))]).waiting(&[("a1", "a", 5, 0)]);
        if running > 0 {
            case = case.running(&[(("b1", "b", running, 0), 0)]);
        }
        case.world.change(
            |world| &mut world.pods,
            "a/a1",
            |pod| pod["metadata"]["annotations"][NOMINATION_ANNOTATION] = json!(note(until)),
        );
        case.reality.report_on(&mut case.world, 1);
        // The pod is released as soon as it fits, so the nomination is visible only while
        // reservations are delayed.
        let mut keeper = keeper().with_settling_delay();
        keeper.reconcile(&case.world.cluster(), &BTreeMap::new(), at(1));
        assert!(keeper.ledger().unwrap().nominations().is_empty(), "nothing is decided yet");
        let actions = keeper.reconcile(&case.world.cluster(), &BTreeMap::new(), at(9));
        let kept = keeper.ledger().unwrap().nominations().len() + actions.releases.len();
        assert!(kept >= expected && actions.evictions.is_empty(), "until {until}: {actions:?}");
    }
}

#[test]
fn with_ageing_a_stream_of_small_pods_does_not_starve_a_large_pod() {
    let stream = |ageing: u64| {
        let mut case = Case::new(1, &[("a", json!({}))])
            .running(&[(("s0", "a", 5, 0), 0), (("s1", "a", 5, 0), 0)])
            .waiting(&[("big", "a", 10, 0)])
            .with_ageing(ageing);
        for round in 2..12 {
            // The next small pod always waits before a running small pod ends.
            case.add((&format!("s{round}"), "a", 5, 0), None);
            case.end(&format!("a/s{}", round - 2));
            case.step();
            let is_running = case.is_running();
            if is_running.contains("big") {
                return Some(round);
            }
            if !is_running.contains(&format!("s{round}")) {
                // The operator releases no further small pod, so the running pods end one by one.
                let waits = case.world.pods.iter().filter(|(_, pod)| !pod["spec"]["nodeName"].is_string());
                assert!(waits.count() >= 2);
                for name in is_running {
                    case.end(&format!("a/{name}"));
                }
                case.step();
                return case.is_running().contains("big").then_some(round);
            }
        }
        None
    };
    assert_eq!(stream(1_000_000), None, "small pods use all units that become free");
    assert!(stream(3).is_some());
}

/// Limits of a quota in a random case: min, the difference between max and min, and weight.
type Limits = (u32, Option<u32>, u32);

fn random_quota((min, more, weight): Limits) -> Value {
    let mut spec = json!({"min": min, "weight": weight});
    if let Some(more) = more {
        spec["max"] = json!(min + more);
    }
    spec
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Evicted pods are recreated immediately, like pods of a Deployment. The decisions still
    /// settle, even if another process takes over the lease before any of the first reconciles.
    #[test]
    fn promises_hold_after_each_reconcile_and_decisions_settle(
        limits in proptest::collection::vec((0_u32..12, proptest::option::of(0_u32..10), 1_u32..4), 2..4),
        pods in proptest::collection::vec((0_usize..4, 1_u32..9, 0_i32..3), 1..14),
        gpus in 1_usize..3,
        first in 0_usize..10,
        losses in 0_u64..256,
    ) {
        const NAMES: [&str; 4] = ["a", "b", "c", "-"];
        let quotas: Vec<(&str, Value)> =
            limits.iter().zip(NAMES).map(|(limits, name)| (name, random_quota(*limits))).collect();
        let names: Vec<String> = (0..pods.len()).map(|at| format!("p{at}")).collect();
        let of: Vec<PodOfCase<'_>> = pods
            .iter()
            .zip(&names)
            .map(|((quota, shares, priority), name)| (name.as_str(), if *quota < quotas.len() { NAMES[*quota] } else { "-" }, *shares, *priority))
            .collect();
        let (early, late) = of.split_at(first.min(of.len()));
        let mut case = Case::new(gpus, &quotas).waiting(early);
        (case.is_checked, case.losses) = (true, losses);
        let mut case = case.until_rest();
        case.evicted.clear();
        let case = case.waiting(late).until_rest();
        let mut times: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, _, victim) in &case.evicted {
            *times.entry(victim.as_str()).or_default() += 1;
        }
        prop_assert!(times.values().all(|times| *times <= 2), "{:?}", case.evicted);
    }

    /// Only one reconcile evicts pods for the same pod, even if the leader changes and other pods
    /// arrive. Without guarantees and priorities, no other pod may use the units that are kept for
    /// the pod.
    #[test]
    fn after_a_change_of_the_leader_no_further_pods_are_evicted_for_the_same_pod(
        weights in proptest::collection::vec(1_u32..4, 3),
        pods in proptest::collection::vec((0_usize..3, 1_u32..9), 4..16),
        gpus in 1_usize..3,
        losses in any::<u64>(),
    ) {
        const NAMES: [&str; 3] = ["a", "b", "c"];
        let quotas: Vec<(&str, Value)> =
            NAMES.into_iter().zip(&weights).map(|(name, weight)| (name, json!({"weight": weight}))).collect();
        let mut case = Case::new(gpus, &quotas);
        case.losses = losses;
        for (at, (quota, shares)) in pods.iter().enumerate() {
            case.add((&format!("p{at}"), NAMES[*quota], *shares, 0), None);
            case.step();
        }
        let case = case.until_rest();
        prop_assert!(case.rounds.values().all(|rounds| rounds.len() == 1), "{:?}: {:?}", case.rounds, case.evicted);
    }

    /// After each reconcile, either all pods of a gang run or none, although pods are evicted and
    /// recreated. No two gangs wait for each other.
    #[test]
    fn all_pods_of_a_gang_run_or_none_and_decisions_settle(
        limits in proptest::collection::vec((0_u32..20, proptest::option::of(5_u32..15), 1_u32..4), 2..4),
        gangs in proptest::collection::vec((0_usize..3, 1_usize..4, 1_u32..8, 0_i32..3), 1..6),
        gpus in 1_usize..3,
        first in 0_usize..4,
        losses in 0_u64..256,
    ) {
        const NAMES: [&str; 3] = ["a", "b", "c"];
        let quotas: Vec<(&str, Value)> =
            limits.iter().zip(NAMES).map(|(limits, name)| (name, random_quota(*limits))).collect();
        let mut case = Case::new(gpus, &quotas);
        (case.is_checked, case.losses) = (true, losses);
        for (at, (quota, size, shares, priority)) in gangs.iter().enumerate() {
            let quota = NAMES[*quota % quotas.len()];
            let names: Vec<String> = (0..*size).map(|pod| format!("g{at}-{pod}")).collect();
            for name in &names {
                case = case.waiting(&[(name, quota, *shares, *priority)]);
            }
            if *size > 1 {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                case = case.gang(quota, &format!("g{at}"), *size, &names);
            }
            if at + 1 == first {
                case = case.until_rest();
                case.evicted.clear();
            }
        }
        let case = case.until_rest();
        let mut times: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, _, victim) in &case.evicted {
            *times.entry(victim.as_str()).or_default() += 1;
        }
        prop_assert!(times.values().all(|times| *times <= 2), "{:?}", case.evicted);
    }
}
