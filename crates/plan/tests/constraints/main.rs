//! Tests the rules between pods: examples from the Kubernetes documentation, edge cases, and random
//! clusters that are compared with a second implementation.
mod examples;
mod naive;
mod random;

use std::collections::BTreeMap;

use cleave_plan::constraints::{Conflict, Labels, NodeChecker, PlacedPod, Rules, Subject};
use cleave_plan::snapshot::{Node, NodeSelectorTerm, Pod, Taint};

/// A test pod.
#[derive(Debug, Clone, Default)]
pub(crate) struct TestPod {
    pub(crate) namespace: String,
    pub(crate) labels: Labels,
    pub(crate) rules: Rules,
    pub(crate) pod: Pod,
    pub(crate) volumes: Vec<Vec<NodeSelectorTerm>>,
    pub(crate) terminating: bool,
    /// Name of the pod's node.
    pub(crate) node: String,
}

/// A test cluster.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Node>,
    pub(crate) pods: Vec<TestPod>,
    /// Labels of the known namespaces.
    pub(crate) namespaces: BTreeMap<String, Labels>,
}

impl Cluster {
    fn checker<'a>(&'a self, subject: &'a TestPod) -> NodeChecker<'a> {
        let placed_pod = |pod: &'a TestPod| PlacedPod {
            namespace: &pod.namespace,
            labels: &pod.labels,
            node: &pod.node,
            rules: &pod.rules,
            terminating: pod.terminating,
        };
        let all = self.pods.iter().map(placed_pod);
        let repelling = self.pods.iter().filter(|pod| pod.rules.repels()).map(placed_pod);
        NodeChecker::new(subject.as_subject(), &self.nodes, all, repelling, |name| self.namespaces.get(name))
    }

    /// Returns, for each node, whether the pod may run on the node.
    fn refusals_by_node(&self, subject: &TestPod) -> Vec<Result<(), Conflict>> {
        let checker = self.checker(subject);
        self.nodes.iter().map(|node| checker.check_node(node)).collect()
    }

    /// Returns the names of nodes that the pod may run on.
    fn allowed_nodes(&self, subject: &TestPod) -> Vec<&str> {
        let checker = self.checker(subject);
        let allowed = self.nodes.iter().filter(|node| checker.check_node(node).is_ok());
        allowed.map(|node| node.name.as_str()).collect()
    }

    /// Places the pod on the first node that it may run on. Returns the name of the node.
    fn place_on_first_allowed_node(&mut self, pod: &TestPod) -> Option<String> {
        let node = (*self.allowed_nodes(pod).first()?).to_owned();
        self.pods.push(pod.clone().on_node(&node));
        Some(node)
    }
}

impl TestPod {
    fn as_subject(&self) -> Subject<'_> {
        let Self { namespace, labels, rules, pod, volumes, .. } = self;
        Subject { namespace, labels, rules, pod, volumes }
    }

    fn on_node(mut self, node: &str) -> Self {
        node.clone_into(&mut self.node);
        self
    }

    fn in_namespace(mut self, namespace: &str) -> Self {
        namespace.clone_into(&mut self.namespace);
        self
    }

    fn terminating(mut self) -> Self {
        self.terminating = true;
        self
    }
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// Returns a pod in the namespace `default`, with these labels and with rules from JSON.
fn pod(pairs: &[(&str, &str)], rules: &str) -> TestPod {
    #[expect(clippy::expect_used, reason = "a test's own JSON")]
    let rules = serde_json::from_str(rules).expect("rules");
    TestPod { namespace: "default".to_owned(), labels: labels(pairs), rules, ..TestPod::default() }
}

/// Returns a node with a zone and its hostname.
fn node(name: &str, zone: &str) -> Node {
    let labels = labels(&[("zone", zone), ("kubernetes.io/hostname", name)]);
    Node { name: name.to_owned(), labels, ..Node::default() }
}

fn taint(key: &str) -> Taint {
    Taint { key: key.to_owned(), value: String::new(), effect: "NoSchedule".to_owned() }
}

/// Returns nodes with their zones.
fn cluster(nodes: &[(&str, &str)]) -> Cluster {
    Cluster { nodes: nodes.iter().map(|(name, zone)| node(name, zone)).collect(), ..Cluster::default() }
}
