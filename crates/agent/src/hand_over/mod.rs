//! Decides which of two agents of a node serves, and when one hands over to the other. Pure:
//! callers pass in the record, the time and the waiting agents.
//!
//! During a rollout, the pods of the old and the new agent run on a node at the same time. The
//! agent that holds the lock of the state directory serves. The other agent is a standby.
//!
//! ```text
//!  new agent                                 old agent
//!  standby, not ready ─ requests hand-over ▶ serves
//!  takes the lock, on probation ◀─ hands over ─ standby, as ready as before
//!  ready: serves                             Kubernetes deletes its pod
//!  not ready in time, or ends ─────────────▶ serves again
//! ```
//!
//! - Only a newer agent requests a hand-over from an older agent, so two agents never replace each
//!   other repeatedly. The newer agent is the agent that first served later, or has not served yet.
//! - An older standby reports the readiness that it had when it last served. Otherwise the
//!   `DaemonSet` controller would delete the standby's pod, even while the new pod is not ready.
//! - A newer standby reports that it is not ready, unless the record is empty. If a newer standby
//!   reported that it is ready, Kubernetes would delete the old pod before the new agent has proved
//!   that it works.
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Time for which a standby does not take a free lock, so that the agent with a hand-over request
/// can take the lock.
pub const CLAIM_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for which an agent reports that it is ready while it starts to serve in place of a
/// failed newer agent. If the agent reported that it is not ready, Kubernetes would delete the
/// agent's pod. The description of this module explains why.
pub const RETURN_READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after which the agent exits if every attempt to lock the state directory fails with an
/// error.
pub const LOCK_ERROR_TIMEOUT: Duration = Duration::from_secs(30);
/// Delay before the next hand-over to an agent that failed once. Each further failure doubles the
/// delay.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Maximum delay before the next hand-over to an agent that has failed.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(3600);
/// Maximum number of agents in the record. The record drops the oldest agents first.
const MAX_KNOWN_AGENTS: usize = 16;

/// The node's agents, and the agent that serves. Only the serving agent writes the record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HandOverRecord {
    /// Agents, in the order in which they served for the first time.
    agents: Vec<KnownAgent>,
    /// Id of the agent that serves now or served last.
    serving: Option<String>,
    /// Id of the agent that takes over next. The serving agent has handed over to the successor,
    /// but the successor does not serve yet.
    successor: Option<String>,
    /// Whether the serving agent must still prove that it works.
    probation: bool,
}

/// An agent of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KnownAgent {
    /// UID of the agent's pod.
    id: String,
    /// Whether the agent was ready when it last served.
    ready: bool,
    /// Number of times that an older agent served again because this agent failed.
    failures: u32,
}

/// How an agent starts to serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceStart {
    /// Whether the agent was ready before, and serves again because a newer agent failed.
    pub returns_ready: bool,
    /// Whether the agent is on probation. An agent on probation exits if it is not ready in time
    /// and another agent waits.
    pub probation: bool,
}

/// What an agent does while another agent serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StandbyDecision {
    /// Whether the agent requests a hand-over from the serving agent.
    pub requests_hand_over: bool,
    /// Whether the agent reports that it is ready.
    pub ready: bool,
}

impl HandOverRecord {
    /// Returns whether the record names no serving agent. An agent that supports hand-overs writes
    /// the record as soon as it serves.
    pub fn is_empty(&self) -> bool {
        self.serving.is_none()
    }

    /// Returns whether the serving agent must still prove that it works.
    pub fn is_on_probation(&self) -> bool {
        self.probation
    }

    /// Returns whether the agent was ready when it last served.
    pub fn was_ready(&self, id: &str) -> bool {
        self.known_agent(id).is_some_and(|known_agent| known_agent.ready)
    }

    /// Returns the number of times that an older agent served again because this agent failed.
    pub fn count_failures(&self, id: &str) -> u32 {
        self.known_agent(id).map_or(0, |known_agent| known_agent.failures)
    }

    /// Returns the position of an agent in the record, in which the oldest agent is first. An
    /// unknown agent gets the position after all known agents.
    fn age_position(&self, id: &str) -> usize {
        self.agents.iter().position(|known_agent| known_agent.id == id).unwrap_or(self.agents.len())
    }

    fn known_agent(&self, id: &str) -> Option<&KnownAgent> {
        self.agents.iter().find(|known_agent| known_agent.id == id)
    }

    fn known_agent_mut(&mut self, id: &str) -> &mut KnownAgent {
        let position = self.age_position(id);
        if position == self.agents.len() {
            self.agents.push(KnownAgent { id: id.to_owned(), ..KnownAgent::default() });
        }
        &mut self.agents[position]
    }

    /// Returns the id of the agent that should serve.
    fn designated_agent(&self) -> Option<&str> {
        self.successor.as_deref().or(self.serving.as_deref())
    }

    /// Records that this agent has the lock and serves from now on. If a newer agent should have
    /// served instead, counts this as a failure of the newer agent.
    pub fn start_serving(&mut self, id: &str) -> ServiceStart {
        let position = self.age_position(id);
        let failed = self.designated_agent().filter(|other| self.age_position(other) > position).map(str::to_owned);
        let before = self.serving.as_deref();
        let probation = match before {
            _ if failed.is_some() => false,
            Some(before) if before == id => self.probation,
            Some(before) => self.was_ready(before),
            None => false,
        };
        let returns_ready = failed.is_some() && self.was_ready(id);
        if let Some(failed) = failed {
            let failed = self.known_agent_mut(&failed);
            failed.failures = failed.failures.saturating_add(1);
            failed.ready = false;
        }
        self.known_agent_mut(id);
        while self.agents.len() > MAX_KNOWN_AGENTS {
            let oldest = usize::from(self.agents[0].id == id);
            self.agents.remove(oldest);
        }
        self.serving = Some(id.to_owned());
        self.successor = None;
        self.probation = probation;
        ServiceStart { returns_ready, probation }
    }

    /// Records whether this serving agent is ready. Becoming ready ends its probation.
    pub fn set_ready(&mut self, id: &str, ready: bool) {
        self.known_agent_mut(id).ready = ready;
        self.probation &= !ready;
    }

    /// Records that the serving agent hands over.
    pub fn hand_over_to(&mut self, successor: &str) {
        // Add the successor to the record now, so that later agents are newer than the successor.
        self.known_agent_mut(successor);
        self.successor = Some(successor.to_owned());
    }

    /// Decides what this agent does while another agent has the lock. If the record is empty, the
    /// other agent's version may not support hand-overs. An agent without support for hand-overs
    /// exits only after the new agent is ready.
    pub fn decide_standby(&self, id: &str, waited: Duration) -> StandbyDecision {
        let Some(current) = self.designated_agent() else {
            return StandbyDecision { requests_hand_over: true, ready: waited >= CLAIM_TIMEOUT };
        };
        let older = self.age_position(id) < self.age_position(current);
        StandbyDecision { requests_hand_over: !older, ready: older && self.was_ready(id) }
    }

    /// Decides whether the serving agent `own` hands over to the agent `requesting`. `served` is
    /// the time for which the serving agent has served without interruption. `changing` states
    /// whether a change of a GPU is in progress.
    pub fn should_hand_over(&self, own: &str, requesting: &str, served: Duration, changing: bool) -> bool {
        let delay = retry_delay(self.count_failures(requesting));
        self.age_position(requesting) > self.age_position(own) && !self.probation && !changing && served >= delay
    }
}

/// Returns the delay before a hand-over to an agent that failed `failures` times.
fn retry_delay(failures: u32) -> Duration {
    match failures.checked_sub(1) {
        None => Duration::ZERO,
        Some(more) => FIRST_RETRY_DELAY.saturating_mul(2_u32.saturating_pow(more)).min(MAX_RETRY_DELAY),
    }
}

/// Decides whether a standby may take a free lock. An agent with a hand-over request has priority,
/// but only for [`CLAIM_TIMEOUT`], because that agent may hang. `waited` is the time since the
/// standby started.
pub fn may_take_lock(another_requests: bool, waited: Duration) -> bool {
    !another_requests || waited >= CLAIM_TIMEOUT
}

/// State of a probation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probation {
    /// The agent works.
    Passed,
    /// The agent keeps running, because it may still become ready, or because no other agent could
    /// serve in its place.
    Open,
    /// The agent must exit, so that another agent serves.
    Failed,
}

/// Returns the state of an agent's probation. The agent fails if it is not ready within `limit`
/// while another agent waits for the lock (`awaited`).
pub fn judge_probation(ready: bool, served: Duration, limit: Duration, awaited: bool) -> Probation {
    if ready {
        Probation::Passed
    } else if served >= limit && awaited {
        Probation::Failed
    } else {
        Probation::Open
    }
}

#[cfg(test)]
mod tests;
