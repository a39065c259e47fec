//! Random histories of a cluster against models of kube-scheduler, kubelets and agents.
//!
//! | module | content |
//! |---|---|
//! | `pods` | the pods of the histories, and their rules |
//! | `scheduler` | the model of kube-scheduler |
//! | `simulation` | the true state: API server, kubelets, agents, controllers |
//! | `operator` | the gatekeeper under test, with lagging watches and lost answers |
//! | `checks` | conditions that must hold |
//!
//! Each history has random steps, followed by a quiet time of an hour, in which most deadlines of
//! the operator pass. `cargo test` runs the same [`DEFAULT_CASES`] histories each time, so that it
//! never fails by chance. `PROPTEST_CASES` sets another number, and selects the histories at
//! random.
//!
//! Documented exceptions:
//!
//! | exception | where |
//! |---|---|
//! | A released pod fails if its GPU, the agent or the partition was lost before its admission. |
//! `Simulation::admit` |
//! | The scheduler may bind a pod after its reservation ended. The pod then uses any units. |
//! `Simulation::is_disturbed` |
//! | The operator does not know where a volume can be created. | `checks` |
//! | A released pod counts only its node for `minDomains`. | `checks::narrowed` |
//!
//! Not simulated: other device plugins, whole GPUs and MIG, MPS hosts, preemption by the scheduler,
//! restarts of kubelets, and pods that swap units.
mod checks;
mod operator;
mod pods;
mod scheduler;
mod simulation;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::json;

use self::operator::{KINDS, Kind, Operator, WriteResponses};
use self::pods::{App, DEDICATED_TAINT, Owner, Template, template};
use self::scheduler::list;
use self::simulation::Simulation;

/// Number of histories if `PROPTEST_CASES` is not set.
const DEFAULT_CASES: u32 = 128;
/// Selects the histories if `PROPTEST_CASES` is not set.
const DEFAULT_SEED: RngSeed = RngSeed::Fixed(1);
/// Duration of the quiet time at the end of each history, in seconds.
const QUIET_SECONDS: u64 = 3600;
/// Maximum number of nodes.
const MAX_NODES: usize = 6;

/// One step of a history. A number selects an object.
#[derive(Debug, Clone)]
enum Step {
    Create(Template),
    Reconcile(WriteResponses),
    Report(Kind),
    /// The agent and the kubelet of a node report.
    ReportNode(usize),
    Schedule(usize),
    Admit(usize),
    /// Every component reacts once.
    Settle,
    Wait(u64),
    Delete {
        pod: usize,
        force: bool,
        seconds: u64,
    },
    Finish(usize),
    Cordon(usize, bool),
    Taint(usize, usize),
    Untaint(usize),
    /// A node becomes `NotReady` or `Ready`.
    Down(usize, bool),
    RemoveNode(usize),
    AddNode(usize),
    /// A GPU fails or recovers.
    Fault(usize, bool),
    /// A node's agent stops or starts.
    Agent(usize, bool),
    Policy(bool),
    /// A pod without GPUs is bound to a node.
    Occupy {
        node: usize,
        cpu: u32,
        app: App,
    },
    Budget {
        app: App,
        allowed: u32,
    },
    Restart,
    FailOver,
}

/// Taints, with their effects.
const TAINTS: [(&str, &str); 4] = [
    (DEDICATED_TAINT, "NoSchedule"),
    (DEDICATED_TAINT, "NoExecute"),
    ("cleave.dev/unhealthy", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
];

fn step() -> impl Strategy<Value = Step> {
    let which = any::<usize>;
    let app = || (0_u8..3).prop_map(App);
    prop_oneof![
        14 => template().prop_map(Step::Create),
        8 => Just(Step::Reconcile(WriteResponses::Good)),
        4 => any::<u64>().prop_map(|seed| Step::Reconcile(WriteResponses::Faulty(seed))),
        8 => prop::sample::select(&KINDS[..]).prop_map(Step::Report),
        4 => which().prop_map(Step::ReportNode),
        6 => which().prop_map(Step::Schedule),
        5 => which().prop_map(Step::Admit),
        8 => Just(Step::Settle),
        4 => prop_oneof![1_u64..10, 10_u64..60, 100_u64..400].prop_map(Step::Wait),
        5 => (which(), any::<bool>(), 0_u64..60).prop_map(|(pod, force, seconds)| Step::Delete { pod, force, seconds }),
        3 => which().prop_map(Step::Finish),
        3 => (which(), any::<bool>()).prop_map(|(node, on)| Step::Cordon(node, on)),
        3 => (which(), 0..TAINTS.len()).prop_map(|(node, taint)| Step::Taint(node, taint)),
        2 => which().prop_map(Step::Untaint),
        3 => (which(), any::<bool>()).prop_map(|(node, on)| Step::Down(node, on)),
        1 => which().prop_map(Step::RemoveNode),
        1 => (1_usize..5).prop_map(Step::AddNode),
        3 => (which(), any::<bool>()).prop_map(|(gpu, on)| Step::Fault(gpu, on)),
        3 => (which(), any::<bool>()).prop_map(|(node, on)| Step::Agent(node, on)),
        2 => any::<bool>().prop_map(Step::Policy),
        3 => (which(), 500_u32..8000, app()).prop_map(|(node, cpu, app)| Step::Occupy { node, cpu, app }),
        2 => (app(), 0_u32..2).prop_map(|(app, allowed)| Step::Budget { app, allowed }),
        2 => Just(Step::Restart),
        2 => Just(Step::FailOver),
    ]
}

/// Generates a history: the initial GPUs of each node, the steps, whether pods are reported to
/// autoscalers, and whether all faults end before the quiet time.
fn history() -> impl Strategy<Value = (Vec<usize>, Vec<Step>, bool, bool)> {
    (
        prop::collection::vec(1_usize..5, 3..=MAX_NODES),
        prop::collection::vec(step(), 1..60),
        any::<bool>(),
        any::<bool>(),
    )
}

/// Generates a history in which another process leads, or the operator restarts, just after bound
/// pods were deleted by force. No node has reported their allocations, and their containers still
/// run. Pods that request shares wait at the gate.
fn handover_history() -> impl Strategy<Value = (Vec<usize>, Vec<Step>, bool, bool)> {
    let leader = prop_oneof![Just(Step::Restart), Just(Step::FailOver)];
    let begin = (prop::collection::vec(1_usize..3, 1..3), prop::collection::vec(4_u32..=10, 1..4));
    (begin, (4_u32..=10, 1_usize..4), leader, any::<bool>()).prop_map(
        |((gpus, deleted), (shares, replicas), leader, reports)| {
            let create = |shares: u32| Step::Create(Template { shares: vec![shares], ..Template::plain() });
            let waiting = Template { shares: vec![shares], owner: Owner::ReplicaSet, replicas, ..Template::plain() };
            let count = deleted.len();
            let mut steps = vec![Step::Reconcile(WriteResponses::Good), Step::Wait(10)];
            steps.extend(deleted.into_iter().map(create));
            steps.extend([Step::Report(Kind::Pods), Step::Reconcile(WriteResponses::Good)]);
            steps.extend((0..count).map(|_| Step::Schedule(0)).chain((0..gpus.len()).map(Step::Admit)));
            // The containers run for some more seconds.
            steps.extend((0..count).map(|_| Step::Delete { pod: 0, force: true, seconds: 3 }));
            steps.extend([leader, Step::Create(waiting), Step::Settle]);
            (gpus, steps, reports, true)
        },
    )
}

/// The cluster with its operator.
struct World {
    simulation: Simulation,
    operator: Operator,
    /// The last state to which the scheduler, kubelets and agents have reacted: the version of the
    /// cluster, and the number of pods whose containers have ended.
    reacted: (u64, u64),
}

/// Returns the name of an object that a number selects.
fn select_name<'a>(names: impl Iterator<Item = &'a String>, which: usize) -> Option<String> {
    let names: Vec<&String> = names.collect();
    names.get(which.checked_rem(names.len())?).map(|name| (*name).clone())
}

impl World {
    fn node(&self, which: usize) -> Option<String> {
        select_name(self.simulation.api.nodes.keys(), which)
    }

    fn change_node(&mut self, which: usize, change: impl FnOnce(&mut serde_json::Value)) {
        if let Some(node) = self.node(which) {
            self.simulation.api.change(|api| &mut api.nodes, &node, change);
        }
    }

    fn reconcile(&mut self, answers: WriteResponses) -> Result<(), String> {
        self.operator.report_stale(&self.simulation);
        self.operator.reconcile(&mut self.simulation, answers)?;
        checks::no_units_are_reserved_twice(&self.simulation)
    }

    /// Runs every component once.
    fn settle(&mut self, which: usize) -> Result<(), String> {
        let Self { simulation, operator, .. } = self;
        simulation.run_kubelets();
        simulation.run_controllers();
        operator.report_all(simulation);
        self.reconcile(WriteResponses::Good)?;
        if self.reacted == (self.simulation.api.version, self.simulation.ended) {
            return Ok(());
        }
        self.react(which)?;
        self.reacted = (self.simulation.api.version, self.simulation.ended);
        Ok(())
    }

    fn report_nodes(&mut self) {
        let nodes: Vec<String> = self.simulation.api.nodes.keys().cloned().collect();
        nodes.iter().for_each(|node| self.simulation.report_node(node));
    }

    /// Runs the scheduler, the kubelets, the agents and the controllers once.
    fn react(&mut self, which: usize) -> Result<(), String> {
        let simulation = &mut self.simulation;
        for (index, pod) in simulation.schedulable_pods().into_iter().enumerate() {
            simulation.schedule(&pod, which.wrapping_add(index));
        }
        for node in simulation.api.nodes.keys().cloned().collect::<Vec<_>>() {
            simulation.admit(&node)?;
            simulation.report_node(&node);
        }
        simulation.run_controllers();
        Ok(())
    }

    /// Advances the time. Watches, agents and kubelets react as slowly as the models allow.
    fn wait(&mut self, seconds: u64) -> Result<(), String> {
        let begin = self.simulation.now;
        let end = begin + seconds;
        while self.simulation.now < end {
            self.simulation.now = (self.simulation.now + 5).min(end);
            if (self.simulation.now - begin).is_multiple_of(30) {
                self.report_nodes();
            }
            self.simulation.run_kubelets();
            if self.operator.due.is_some_and(|due| due <= self.simulation.now) {
                self.reconcile(WriteResponses::Good)?;
            }
        }
        Ok(())
    }

    fn run_step(&mut self, step: &Step, number: usize) -> Result<(), String> {
        match *step {
            Step::Reconcile(answers) => self.reconcile(answers)?,
            Step::Report(kind) => self.operator.report(&self.simulation, kind),
            Step::Settle => self.settle(number)?,
            Step::Wait(seconds) => self.wait(seconds)?,
            Step::Restart => self.operator.restart(&self.simulation),
            Step::FailOver => self.operator.fail_over(&self.simulation),
            Step::Admit(which) => {
                if let Some(node) = self.node(which) {
                    self.simulation.admit(&node)?;
                }
            }
            _ => self.apply_cluster_step(step),
        }
        self.simulation.now += 1;
        self.simulation.run_kubelets();
        self.simulation.run_controllers();
        Ok(())
    }

    /// Changes the cluster.
    fn apply_cluster_step(&mut self, step: &Step) {
        let simulation = &mut self.simulation;
        match step {
            Step::Create(template) => simulation.create(template),
            Step::Schedule(which) => {
                if let Some(pod) = select_name(simulation.schedulable_pods().iter(), *which) {
                    simulation.schedule(&pod, *which);
                }
            }
            Step::Delete { pod, force, seconds } => {
                if let Some(pod) = select_name(simulation.api.pods.keys(), *pod) {
                    simulation.delete(&pod, *force, *seconds);
                }
            }
            Step::Finish(which) => {
                if let Some(pod) = select_name(simulation.api.pods.keys(), *which) {
                    simulation.complete_pod(&pod);
                }
            }
            Step::Fault(which, fails) => {
                if let Some(gpu) = select_name(simulation.gpus.keys(), *which) {
                    simulation.gpus.get_mut(&gpu).unwrap().healthy = !fails;
                }
            }
            Step::Policy(exists) => simulation.set_policy(*exists),
            Step::AddNode(gpus) if simulation.api.nodes.len() < MAX_NODES => simulation.add_node(*gpus),
            Step::Budget { app, allowed } => {
                let budget = json!({"metadata": {"name": format!("budget-{}", app.0), "namespace": "team", "generation": 1},
                    "spec": {"selector": {"matchLabels": app.labels()}},
                    "status": {"observedGeneration": 1, "disruptionsAllowed": allowed}});
                let name = format!("budget-{}", app.0);
                simulation.api.budgets.insert(name.clone(), budget);
                simulation.api.change(|api| &mut api.budgets, &name, |_| ());
            }
            _ => self.apply_node_step(step),
        }
    }

    /// Changes one node.
    fn apply_node_step(&mut self, step: &Step) {
        match *step {
            Step::ReportNode(which) => {
                if let Some(node) = self.node(which) {
                    self.simulation.report_node(&node);
                }
            }
            Step::Cordon(which, on) => self.change_node(which, |node| node["spec"]["unschedulable"] = json!(on)),
            Step::Taint(which, taint) => self.change_node(which, |node| {
                let (key, effect) = TAINTS[taint];
                let mut taints = list(node, "/spec/taints").to_vec();
                taints.retain(|one| one["key"] != key || one["effect"] != effect);
                taints.push(json!({"key": key, "effect": effect}));
                node["spec"]["taints"] = json!(taints);
            }),
            Step::Untaint(which) => self.change_node(which, |node| {
                let mut taints = list(node, "/spec/taints").to_vec();
                taints.retain(|one| one["key"] == "node.kubernetes.io/not-ready");
                node["spec"]["taints"] = json!(taints);
            }),
            Step::Down(which, down) => {
                if let Some(node) = self.node(which) {
                    self.simulation.set_node_down(&node, down);
                }
            }
            Step::Agent(which, away) => {
                if let Some(node) = self.node(which) {
                    self.simulation.set_agent_stopped(&node, away);
                }
            }
            Step::RemoveNode(which) => {
                if let Some(node) = self.node(which).filter(|_| self.simulation.api.nodes.len() > 1) {
                    self.simulation.remove_node(&node);
                }
            }
            Step::Occupy { node, cpu, app } => {
                if let Some(node) = self.node(node) {
                    self.simulation.bind_pod_without_gpus(&node, cpu, app);
                }
            }
            _ => {}
        }
    }

    /// Ends all faults.
    fn end_faults(&mut self) {
        let simulation = &mut self.simulation;
        simulation.set_policy(true);
        simulation.gpus.values_mut().for_each(|gpu| gpu.healthy = true);
        for node in simulation.api.nodes.keys().cloned().collect::<Vec<_>>() {
            simulation.set_node_down(&node, false);
            simulation.set_agent_stopped(&node, false);
            simulation.api.change(|api| &mut api.nodes, &node, |node| node["spec"] = json!({}));
        }
    }

    fn run_steps(&mut self, steps: &[Step], heals: bool) -> Result<(), String> {
        for (number, step) in steps.iter().enumerate() {
            self.simulation.log(|| format!("step {number}: {step:?}"));
            self.run_step(step, number)?;
        }
        if heals {
            self.simulation.log(|| "all faults end".to_owned());
            self.end_faults();
        }
        self.run_quiet_time()
    }

    /// Runs the quiet time, in which components only react to earlier steps.
    fn run_quiet_time(&mut self) -> Result<(), String> {
        let begin = self.simulation.now;
        let end = begin + QUIET_SECONDS;
        let mut recreations = None;
        while self.simulation.now < end {
            let before = self.simulation.api.version;
            let now = self.simulation.now;
            if now + QUIET_SECONDS / 2 > end && recreations.is_none() {
                recreations = Some(self.simulation.recreations.clone());
            }
            self.settle(0)?;
            let changed = self.simulation.api.version != before;
            let next = [self.operator.due, self.simulation.next_container_end()].into_iter().flatten().min();
            // To save time, the operator may be late by up to 1 s and a twentieth of the quiet time
            // so far.
            let late = now + 1 + (now - begin) / 20;
            self.simulation.now = if changed { now + 1 } else { next.unwrap_or(end).max(late).min(end) };
        }
        // The last reaction may have created a pod.
        self.operator.report_all(&self.simulation);
        self.reconcile(WriteResponses::Good)?;
        checks::no_runnable_pod_waits(&self.simulation, &self.operator)?;
        // If the simulation skipped the second half of the quiet time, no pod was evicted in that
        // half.
        let before = recreations.unwrap_or_else(|| self.simulation.recreations.clone());
        checks::no_controller_is_evicted_repeatedly(&self.simulation, &before)
    }
}

impl Simulation {
    fn set_policy(&mut self, exists: bool) {
        self.policy = exists;
        if exists {
            if self.api.policies.is_empty() {
                self.api = std::mem::take(&mut self.api).policy(10);
            }
        } else {
            self.api.policies.clear();
            self.api.version += 1;
        }
    }

    fn set_node_down(&mut self, node: &str, down: bool) {
        const NOT_READY: &str = "node.kubernetes.io/not-ready";
        if down {
            self.down.insert(node.to_owned())
        } else {
            self.down.remove(node)
        };
        self.api.change(
            |api| &mut api.nodes,
            node,
            |node| {
                let mut taints = list(node, "/spec/taints").to_vec();
                taints.retain(|one| one["key"] != NOT_READY);
                if down {
                    taints
                        .extend(["NoSchedule", "NoExecute"].map(|effect| json!({"key": NOT_READY, "effect": effect})));
                }
                node["spec"]["taints"] = json!(taints);
            },
        );
        self.report_agent_readiness(node);
    }

    fn set_agent_stopped(&mut self, node: &str, away: bool) {
        if away {
            self.away.insert(node.to_owned())
        } else {
            self.away.remove(node)
        };
        self.report_agent_readiness(node);
    }

    fn report_agent_readiness(&mut self, node: &str) {
        let ready = if self.down.contains(node) || self.away.contains(node) { "False" } else { "True" };
        self.api.change(|api| &mut api.agents, node, |agent| agent["status"]["conditions"][0]["status"] = json!(ready));
    }

    /// Binds a pod without GPUs to a node, if the scheduler would not refuse the node.
    fn bind_pod_without_gpus(&mut self, node: &str, cpu: u32, app: App) {
        let uid = format!("cpu-{}", self.api.version);
        let pod = json!({"metadata": {"name": uid, "namespace": "team", "uid": uid, "labels": app.labels()},
            "spec": {"nodeName": node, "containers": [{"name": "main", "resources": {"requests": {"cpu": format!("{cpu}m")}}}],
                "tolerations": [{"operator": "Exists"}]},
            "status": {"phase": "Running"}});
        if self.view().refusal(&pod, &self.api.nodes[node]).is_none() {
            let name = format!("team/{uid}");
            self.api.pods.insert(name.clone(), pod);
            self.api.change(|api| &mut api.pods, &name, |_| ());
        }
    }
}

fn run_history((gpus, steps, reports, heals): &(Vec<usize>, Vec<Step>, bool, bool)) -> Result<(), String> {
    let simulation = Simulation::new(gpus);
    let operator = Operator::new(&simulation, *reports);
    let mut world = World { simulation, operator, reacted: (0, 0) };
    world.run_steps(steps, *heals).map_err(|error| {
        let last = world.simulation.log.len().saturating_sub(60);
        format!("second {}: {error}\n{}", world.simulation.now, world.simulation.log[last..].join("\n"))
    })
}

fn proptest_config() -> ProptestConfig {
    let mut config = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_none() {
        (config.cases, config.rng_seed) = (DEFAULT_CASES, DEFAULT_SEED);
    }
    config
}

proptest! {
    #![proptest_config(proptest_config())]

    /// Checks that each pod that could run is released, and is not pinned to a node where it cannot
    /// run. Also checks that no units are reserved twice.
    #[test]
    fn every_pod_that_can_run_runs(history in history()) {
        run_history(&history).map_err(TestCaseError::fail)?;
    }

    /// A new leader does not know of allocations that no node has reported, so the leader waits
    /// before it reserves units.
    #[test]
    fn a_new_leader_reserves_no_units_of_pods_that_were_just_deleted(history in handover_history()) {
        run_history(&history).map_err(TestCaseError::fail)?;
    }
}
