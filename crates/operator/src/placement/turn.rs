//! What one look decides: pods to release, pods to evict, and why other pods wait.
use std::collections::BTreeMap;
use std::time::Duration;

use cleave_api::placement::Placement;
use cleave_plan::ledger::Ask;
use serde_json::Value;

use super::stranded::Rescue;
use crate::policies::demand::Waiting;
use crate::rollout::Step;

/// Why a pod is let through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// Room is held for it.
    Held(Placement),
    /// It asks for nothing that is served here.
    NotOurs,
    /// Nothing here can ever hold it; in words for its owner.
    Never(String),
}

impl Why {
    /// As metrics name it.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Held(_) => "held",
            Self::NotOurs => "not_ours",
            Self::Never(_) => "never",
        }
    }
}

/// A pod that is let through.
#[derive(Debug, Clone, PartialEq)]
pub struct Opening {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// Why.
    pub why: Why,
    /// How long it was waited for.
    pub waited: Duration,
    /// A JSON Patch (RFC 6902).
    pub patch: Value,
}

/// A pod that is to leave for one of higher priority.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eviction {
    /// `namespace/name`.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// For whom: `namespace/name`.
    pub by: String,
}

/// What is to be done now.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Turn {
    /// Pods to let through, in order of priority and arrival.
    pub openings: Vec<Opening>,
    /// Pods to evict; the room that they leave is kept for whom they leave for.
    pub evictions: Vec<Eviction>,
    /// Pods that wait at the gate, and what for.
    pub waiting: BTreeMap<String, Waiting>,
    /// What is to be done about released pods that no node takes.
    pub rescue: Rescue,
    /// What is to be done about MPS hosts; nothing where they were not looked at.
    pub rollout: Option<Step>,
    /// There are more to let through.
    pub more: bool,
    /// When to look again though nothing changes, from now.
    pub next: Option<Duration>,
}

impl Turn {
    /// There is to be another look no later than this from now.
    pub(super) fn look_in(&mut self, time: Duration) {
        self.next = Some(self.next.map_or(time, |next| next.min(time)));
    }
}

/// Where a pod is let through to.
#[derive(Debug, Clone)]
pub(super) enum Towards<'a> {
    Anywhere,
    Among(Vec<&'a str>),
    /// Nodes whose GPUs are large enough for the largest of these.
    Larger(&'a [Ask]),
}
