//! Finds places for pods at the gate, and remembers within one look who has none.
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleave_plan::Quantity;
use cleave_plan::constraints::Judge;
use cleave_plan::ledger::{Ask, Fits, Ledger, Tightest, Waiting as Asking};
use cleave_plan::snapshot::{Node as PlanNode, NodeSelectorTerm, Pod as PlanPod, Toleration};
use kube::ResourceExt;

use super::cluster::{Seen, planned};
use super::nodes::{Free, Impossible, Nodes, Provider, Rules, Verdict};
use super::patch;
use super::present::Present;
use super::surroundings::{Peculiar, Surroundings, refused};
use super::turn::{Opening, Towards, Why};
use crate::pods::PodObject;

/// To how many nodes a pod is released whose rules the operator does not evaluate: the scheduler
/// may refuse some of them.
const SEVERAL: usize = 4;

/// A pod at the gate.
pub(super) struct Candidate<'a> {
    /// `namespace/name`.
    pub(super) name: String,
    pub(super) pod: &'a PodObject,
    pub(super) wanted: PlanPod,
    /// What it asks for that Cleave serves, sorted.
    pub(super) asks: Vec<Ask>,
    /// Nodes to which the scheduler did not bind pods of its controller: others are tried first.
    avoid: Option<&'a BTreeSet<String>>,
    /// Some node offers some of that.
    offered: bool,
    /// Another plugin serves all of that on nodes where Cleave runs, as far as their kubelets say.
    unclear: bool,
}

impl<'a> Candidate<'a> {
    pub(super) fn new(name: String, pod: &'a PodObject, nodes: &Nodes, avoid: Option<&'a BTreeSet<String>>) -> Self {
        let mut asks = pod.asks();
        asks.retain(|ask| nodes.provider(&ask.resource) != Provider::Another);
        asks.sort();
        let unclear = asks.iter().all(|ask| nodes.provider(&ask.resource) == Provider::Unclear);
        let offered = asks.iter().any(|ask| nodes.provider(&ask.resource) == Provider::Cleave);
        Self { name, pod, wanted: planned(pod), asks, avoid, offered, unclear }
    }

    /// One that was released as unschedulable, as it was before.
    pub(super) fn released(pod: &'a PodObject, nodes: &Nodes) -> Self {
        let mut candidate = Self::new(crate::pods::full_name(&pod.metadata), pod, nodes, None);
        candidate.wanted.affinity = patch::without_larger(&candidate.wanted.affinity);
        candidate
    }

    /// What it asks the ledger.
    pub(super) fn asking(&self) -> Asking<'_> {
        Asking { pod: &self.name, priority: self.wanted.priority, asks: &self.asks }
    }

    /// Releases it.
    pub(super) fn opening(&self, why: Why, towards: Towards<'_>, waited: Duration) -> Opening {
        let uid = self.pod.uid().unwrap_or_default();
        Opening { pod: self.name.clone(), uid, waited, patch: patch::open(self.pod, &why, towards), why }
    }

    /// Releases it although nothing is reserved: nothing has been able to hold it for long.
    pub(super) fn give_up(&self, impossible: Option<Impossible>, message: String, waited: Duration) -> Opening {
        if self.unclear {
            // For so long that no kubelet's report is that old: another plugin serves it on nodes
            // where Cleave runs.
            return self.opening(Why::NotOurs, Towards::Anywhere, waited);
        }
        // Nodes that offer it would fail it, those included that it may not use now; where none
        // does, any that is added may serve it.
        let larger = impossible == Some(Impossible::TooLarge) || self.offered;
        let towards = if larger { Towards::Larger(&self.asks) } else { Towards::Anywhere };
        self.opening(Why::Never(message), towards, waited)
    }

    fn signature(&self) -> Signature<'_> {
        (&self.wanted.node_selector, self.wanted.affinity.as_slice(), self.wanted.tolerations.as_slice())
    }
}

/// What of a pod decides which nodes it may run on.
type Signature<'a> = (&'a BTreeMap<String, String>, &'a [NodeSelectorTerm], &'a [Toleration]);

/// What of a pod decides whether it fits.
type Wish<'a> = (&'a [Ask], i32, &'a BTreeMap<String, Quantity>, Signature<'a>, Option<Peculiar<'a>>);

/// Finds places within one look.
pub(super) struct Placing<'a> {
    nodes: &'a Nodes,
    free: RefCell<Free<'a>>,
    surroundings: Surroundings<'a>,
    eligible: RefCell<BTreeMap<Signature<'a>, Vec<&'a str>>>,
    without_place: BTreeMap<Wish<'a>, Verdict>,
}

impl<'a> Placing<'a> {
    pub(super) fn new(seen: &Seen<'a>, nodes: &'a Nodes, present: &'a Present, ledger: &Ledger) -> Self {
        Self {
            nodes,
            free: RefCell::new(Free::new(nodes, present, ledger, seen.open)),
            surroundings: Surroundings::new(seen.cluster, nodes, (seen.living, seen.open), ledger),
            eligible: RefCell::default(),
            without_place: BTreeMap::new(),
        }
    }

    /// Places for a pod, or why there is none.
    pub(super) fn find(&mut self, ledger: &Ledger, candidate: &'a Candidate<'a>) -> Result<Fits, Verdict> {
        let Candidate { name, pod, wanted, asks, .. } = candidate;
        let peculiar = self.surroundings.peculiar(pod);
        let unbound = peculiar.as_ref().is_some_and(|(.., volumes)| volumes.unbound);
        let key = (asks.as_slice(), wanted.priority, &wanted.requests, candidate.signature(), peculiar);
        if let Some(known) = self.without_place.get(&key).filter(|_| !ledger.nominations().contains_key(name)) {
            return Err(known.clone());
        }
        let judge = key.4.as_ref().and_then(|peculiar| self.surroundings.judge(peculiar, wanted));
        let most = if pod.spec.particular || unbound { SEVERAL } else { 1 };
        let has_room = |node: &str| self.has_room(node, candidate);
        let allows = |node: &str| self.allows(node, judge.as_ref());
        let avoids = |node: &str| candidate.avoid.is_some_and(|avoid| avoid.contains(node));
        // Most find a place, and then not every node has to be looked at.
        let may_go = |node: &str| !avoids(node) && self.nodes.may(node, wanted) && allows(node) && has_room(node);
        if let Some(fits) = ledger.fit_tightest(candidate.asking(), most, may_go) {
            return Ok(fits);
        }
        let eligible = self.eligible(candidate);
        let with_room = || eligible.iter().copied().filter(|node| allows(node) && has_room(node));
        if candidate.avoid.is_some()
            && let Ok(fits) =
                ledger.fit_for(candidate.asking(), with_room().filter(|node| !avoids(node)), most, &Tightest)
        {
            return Ok(fits);
        }
        let verdict = match ledger.fit_for(candidate.asking(), with_room(), most, &Tightest) {
            Ok(fits) => return Ok(fits),
            Err(why) => {
                let refuses = |node: &PlanNode| refused(judge.as_ref(), node);
                let rules = Rules { refuses: &refuses, has_room: &has_room };
                self.nodes.judge(ledger, candidate.asking(), wanted, &rules, &why)
            }
        };
        drop(judge);
        self.without_place.insert(key, verdict.clone());
        Err(verdict)
    }

    /// Room was reserved for a pod: others of this look see it there.
    pub(super) fn placed(&mut self, candidate: &'a Candidate<'a>, fits: &Fits) {
        fits.iter().for_each(|fit| self.free.borrow_mut().take(fit.node(), &candidate.wanted.requests));
        self.surroundings.place(candidate.pod, fits.iter().map(|fit| fit.node().to_owned()).collect());
    }

    /// Nodes that a pod may run on by its node selector, affinity and tolerations, whoever leaves.
    pub(super) fn eligible(&self, candidate: &'a Candidate<'a>) -> Vec<&'a str> {
        let mut known = self.eligible.borrow_mut();
        known.entry(candidate.signature()).or_insert_with(|| self.nodes.eligible(&candidate.wanted)).clone()
    }

    /// Those of them that other rules allow and that have CPU, memory and a pod slot for it.
    pub(super) fn with_room(&self, candidate: &'a Candidate<'a>) -> Vec<&'a str> {
        let peculiar = self.surroundings.peculiar(candidate.pod);
        let judge = peculiar.as_ref().and_then(|peculiar| self.surroundings.judge(peculiar, &candidate.wanted));
        let mut nodes = self.eligible(candidate);
        nodes.retain(|node| self.allows(node, judge.as_ref()) && self.has_room(node, candidate));
        nodes
    }

    fn has_room(&self, node: &str, candidate: &Candidate<'_>) -> bool {
        self.free.borrow_mut().has_room(node, &candidate.wanted.requests)
    }

    fn allows(&self, node: &str, judge: Option<&Judge<'_>>) -> bool {
        self.nodes.0.get(node).is_some_and(|known| refused(judge, &known.node).is_ok())
    }
}
