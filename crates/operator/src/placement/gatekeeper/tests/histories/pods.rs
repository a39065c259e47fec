//! The pods of the histories, and the controllers that own them.
use cleave_api::names::GATE;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::world::MPS_RESOURCE;
use super::scheduler::ZONE;

/// Zones of the nodes.
pub(super) const ZONES: [&str; 3] = ["a", "b", "c"];
/// Names of the claims of bound volumes, one in each zone.
pub(super) const BOUND_CLAIMS: [&str; 3] = ["bound-a", "bound-b", "bound-c"];
/// Key of a taint that excludes pods without a toleration.
pub(super) const DEDICATED_TAINT: &str = "dedicated";

/// What owns a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Nothing,
    ReplicaSet,
    /// A controller that gives a replacement pod the name of the replaced pod.
    StatefulSet,
    Job,
}

/// A rule that affects where a pod can run.
#[derive(Debug, Clone)]
pub(super) enum Rule {
    /// Node selector.
    Zone(usize),
    /// Required node affinity.
    NotZone(usize),
    /// Required node affinity to nodes of a later generation.
    Generation,
    /// A toleration of the taint [`DEDICATED_TAINT`].
    Tolerate,
    HostPort(u16),
    /// A bound volume in a zone.
    Volume(usize),
    /// A volume that is created when the pod is bound, in some zones.
    NewVolume(u8),
    Affinity(App, Topology),
    AntiAffinity(App, Topology),
    Spread {
        app: App,
        over: Topology,
        max_skew: u32,
        min_domains: Option<u32>,
        honor_taints: bool,
    },
}

/// The value of the label `app`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct App(pub(super) u8);

/// A topology key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Topology {
    Host,
    Zone,
}

impl Topology {
    fn key(self) -> &'static str {
        match self {
            Self::Host => cleave_plan::affinity::HOSTNAME,
            Self::Zone => ZONE,
        }
    }
}

impl App {
    pub(super) fn labels(self) -> Value {
        json!({"app": format!("app-{}", self.0)})
    }

    fn selector(self) -> Value {
        json!({"matchLabels": self.labels()})
    }
}

/// Template of one pod, or of the pods of one controller.
#[derive(Debug, Clone)]
pub(super) struct Template {
    pub(super) owner: Owner,
    pub(super) replicas: usize,
    pub(super) app: App,
    pub(super) priority: i32,
    /// Requested shares of each container.
    pub(super) shares: Vec<u32>,
    /// Requested CPU of the first container, in thousandths.
    pub(super) cpu: u32,
    pub(super) rules: Vec<Rule>,
}

fn topology() -> impl Strategy<Value = Topology> {
    prop_oneof![Just(Topology::Host), Just(Topology::Zone)]
}

fn app() -> impl Strategy<Value = App> {
    (0_u8..3).prop_map(App)
}

fn rule() -> impl Strategy<Value = Rule> {
    prop_oneof![
        2 => (0_usize..3).prop_map(Rule::Zone),
        1 => (0_usize..3).prop_map(Rule::NotZone),
        1 => Just(Rule::Generation),
        3 => Just(Rule::Tolerate),
        2 => (8000_u16..8002).prop_map(Rule::HostPort),
        2 => (0_usize..3).prop_map(Rule::Volume),
        1 => (1_u8..8).prop_map(Rule::NewVolume),
        2 => (app(), topology()).prop_map(|(app, over)| Rule::Affinity(app, over)),
        3 => (app(), topology()).prop_map(|(app, over)| Rule::AntiAffinity(app, over)),
        4 => (app(), topology(), 1_u32..3, prop::option::of(2_u32..4), any::<bool>()).prop_map(
            |(app, over, max_skew, min_domains, honor_taints)| Rule::Spread { app, over, max_skew, min_domains, honor_taints }),
    ]
}

/// Generates pods of all kinds.
pub(super) fn template() -> impl Strategy<Value = Template> {
    let owner = prop_oneof![
        3 => Just(Owner::Nothing),
        4 => Just(Owner::ReplicaSet),
        1 => Just(Owner::StatefulSet),
        1 => Just(Owner::Job),
    ];
    let shares = prop_oneof![
        6 => prop::collection::vec(1_u32..=10, 1..2),
        2 => prop::collection::vec(1_u32..=6, 2..3),
        1 => Just(vec![11]),
    ];
    let cpu = prop_oneof![2 => Just(0_u32), 2 => 500_u32..5000, 1 => Just(7000_u32)];
    let rules = prop_oneof![
        3 => prop::collection::vec(rule(), 0..1),
        4 => prop::collection::vec(rule(), 1..2),
        2 => prop::collection::vec(rule(), 2..4),
    ];
    (owner, 1_usize..5, app(), 0_i32..3, shares, cpu, rules).prop_map(
        |(owner, replicas, app, priority, shares, cpu, rules)| {
            let replicas = if matches!(owner, Owner::ReplicaSet | Owner::StatefulSet) { replicas } else { 1 };
            Template { owner, replicas, app, priority, shares, cpu, rules }
        },
    )
}

impl Template {
    /// Returns the template of a pod without a controller and without rules.
    pub(super) fn plain() -> Self {
        Self {
            owner: Owner::Nothing,
            replicas: 1,
            app: App(0),
            priority: 0,
            shares: Vec::new(),
            cpu: 0,
            rules: Vec::new(),
        }
    }

    /// Returns a pod at the gate. `controller` is the UID of the pod's controller, and `claim`
    /// names the pod's claims of volumes that do not exist yet.
    pub(super) fn pod(&self, name: &str, uid: &str, controller: Option<&str>, claim: &str) -> Value {
        let container = |(index, shares): (usize, &u32)| {
            let cpu = if index == 0 { self.cpu } else { 0 };
            json!({"name": format!("c{index}"), "resources": {"requests": {"cpu": format!("{cpu}m")}, "limits": {MPS_RESOURCE: shares.to_string()}}})
        };
        let mut pod = json!({
            "metadata": {"name": name, "namespace": "team", "uid": uid, "labels": self.app.labels()},
            "spec": {
                "schedulingGates": [{"name": GATE}], "priority": self.priority,
                "containers": self.shares.iter().enumerate().map(container).collect::<Vec<_>>(),
                // Each cluster's API server adds this toleration.
                "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}],
            },
            "status": {"phase": "Pending"},
        });
        if let Some(controller) = controller {
            let kind = format!("{:?}", self.owner);
            pod["metadata"]["ownerReferences"] =
                json!([{"apiVersion": "v1", "kind": kind, "name": controller, "uid": controller, "controller": true}]);
        }
        self.rules
            .iter()
            .enumerate()
            .for_each(|(index, rule)| rule.add_to(&mut pod["spec"], &format!("{claim}-{index}")));
        pod
    }
}

fn push(spec: &mut Value, pointer: &[&str], item: Value) {
    let mut place = spec;
    for key in pointer {
        place = &mut place[*key];
    }
    if place.is_null() {
        *place = json!([]);
    }
    place.as_array_mut().unwrap().push(item);
}

impl Rule {
    /// Returns the zones in which the volume of this rule can be created.
    pub(super) fn zones_of_new_volume(&self) -> Option<impl Iterator<Item = &'static str>> {
        let Self::NewVolume(zones) = *self else { return None };
        Some(ZONES.into_iter().enumerate().filter(move |(index, _)| zones & (1 << index) != 0).map(|(_, zone)| zone))
    }

    fn add_to(&self, spec: &mut Value, claim: &str) {
        const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
        let mount = |claim: &str| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}});
        let term = |app: App, over: Topology| json!({"labelSelector": app.selector(), "topologyKey": over.key()});
        match self {
            Self::Zone(zone) => spec["nodeSelector"] = json!({ZONE: ZONES[*zone]}),
            Self::NotZone(zone) => {
                require_node(spec, json!({"key": ZONE, "operator": "NotIn", "values": [ZONES[*zone]]}));
            }
            Self::Generation => require_node(spec, json!({"key": "generation", "operator": "Gt", "values": ["8"]})),
            Self::Tolerate => push(spec, &["tolerations"], json!({"key": DEDICATED_TAINT, "operator": "Exists"})),
            Self::HostPort(port) => push(
                &mut spec["containers"][0],
                &["ports"],
                json!({"containerPort": port, "hostPort": port, "protocol": "TCP"}),
            ),
            Self::Volume(zone) => push(spec, &["volumes"], mount(BOUND_CLAIMS[*zone])),
            Self::NewVolume(_) => push(spec, &["volumes"], mount(claim)),
            Self::Affinity(app, over) => push(spec, &["affinity", "podAffinity", REQUIRED], term(*app, *over)),
            Self::AntiAffinity(app, over) => push(spec, &["affinity", "podAntiAffinity", REQUIRED], term(*app, *over)),
            Self::Spread { app, over, max_skew, min_domains, honor_taints } => {
                let mut constraint = term(*app, *over);
                constraint["maxSkew"] = json!(max_skew);
                constraint["whenUnsatisfiable"] = json!("DoNotSchedule");
                if let Some(domains) = min_domains {
                    constraint["minDomains"] = json!(domains);
                }
                if *honor_taints {
                    constraint["nodeTaintsPolicy"] = json!("Honor");
                }
                push(spec, &["topologySpreadConstraints"], constraint);
            }
        }
    }
}

/// Adds a requirement to a pod's only node selector term.
pub(super) fn require_node(spec: &mut Value, requirement: Value) {
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    let terms = &mut spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"];
    if terms.is_null() {
        *terms = json!([{"matchExpressions": []}]);
    }
    terms[0]["matchExpressions"].as_array_mut().unwrap().push(requirement);
}
