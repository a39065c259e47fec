//! Decides when to terminate the MPS clients of terminating pods through MPS. A client must be
//! terminated before a signal can kill its program while a kernel runs. If a signal killed the
//! program while a kernel runs, the programs of neighbours would fail.
//!
//! - [`pods`] tracks the terminating pods and their deadlines.
//! - [`shutdown`] predicts which pods terminate because the node shuts down.
//! - `process` reads the state of a client's process from `/proc`.
//! - [`Terminations`] decides which clients to terminate now.
//!
//! All of these modules and types except `process` are pure. A task in `run` sends the requests to
//! the MPS host. Changes of the node's pods and of the MPS host's status wake the task, and so do
//! outcomes and deadlines.
pub mod pods;
pub(crate) mod process;
pub mod shutdown;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use self::pods::TerminationDeadlines;

/// Time from a client's deadline until the agent reports that the client still runs. The delay is
/// shorter than a `preStop` sleep of one second, so that the report precedes SIGTERM.
const LATE_CLIENT_REPORT_DELAY: Duration = Duration::from_millis(500);
/// First and maximum backoff after a failed attempt.
const ATTEMPT_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Interval between checks of a client that has no context, or that is stopped.
const RECHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Identifies a client of an MPS server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientKey {
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// PID on the host.
    pub pid: u32,
}

/// A client of a terminating pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// Device and PID of the client.
    pub key: ClientKey,
    /// `namespace/name` of its pod.
    pub pod: String,
    /// Deadlines of its pod.
    pub deadlines: TerminationDeadlines,
    /// Whether the process continues after SIGTERM.
    pub survives_sigterm: bool,
    /// Whether the process is stopped. If the agent requested the termination of a stopped client,
    /// MPS would wait for the process, and all other clients would wait for MPS.
    pub stopped: bool,
}

/// The outcome of one attempt to terminate a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// MPS has destroyed all contexts of the client.
    Terminated,
    /// The client has no context, so none of its kernels runs. The client can still create a
    /// context.
    NoContext,
    /// The attempt failed for this reason.
    Failed(String),
}

/// Actions that the caller must perform.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TerminationDecision {
    /// Clients to terminate now, at most one for each device. Pass each outcome to
    /// [`Terminations::record_outcome`].
    pub terminate: Vec<Client>,
    /// Clients that were not terminated in time, each with the reason. Each client is reported only
    /// once.
    pub report: Vec<(Client, String)>,
    /// Latest time of the next decision. `None` if the next decision is needed only after new
    /// input.
    pub next_check: Option<Instant>,
}

/// Tracks the clients that are due for termination.
#[derive(Debug, Default)]
pub struct Terminations {
    attempts: BTreeMap<ClientKey, ClientAttempts>,
    /// Devices with a request in progress. An MPS daemon handles one request at a time.
    busy: BTreeSet<String>,
}

/// The attempts to terminate one client.
#[derive(Debug)]
struct ClientAttempts {
    terminated: bool,
    /// Time at which the client became due.
    due: Instant,
    failures: u32,
    not_before: Instant,
    last_error: Option<String>,
    /// Whether the client has been reported as late.
    reported: bool,
}

impl Terminations {
    /// Decides which clients to terminate and report now. `clients` must contain all clients of
    /// terminating pods.
    pub fn decide(&mut self, clients: Vec<Client>, now: Instant) -> TerminationDecision {
        let listed: BTreeSet<&ClientKey> = clients.iter().map(|client| &client.key).collect();
        self.attempts.retain(|key, _| listed.contains(key));
        let mut decision = TerminationDecision::default();
        let mut check_at = |at: Instant| {
            let at = at.max(now);
            decision.next_check = Some(decision.next_check.map_or(at, |earlier| earlier.min(at)));
        };
        let mut ready = Vec::new();
        for client in clients {
            let due = client.deadlines.termination_time(client.survives_sigterm);
            if now < due {
                check_at(due);
                continue;
            }
            let first = ClientAttempts {
                terminated: false,
                due: now,
                failures: 0,
                not_before: now,
                last_error: None,
                reported: false,
            };
            let attempts = self.attempts.entry(client.key.clone()).or_insert(first);
            if attempts.terminated {
                continue;
            }
            let busy = self.busy.contains(&client.key.device);
            if client.stopped {
                attempts.last_error = Some("the process is stopped, and MPS would wait for it".into());
            }
            // MPS cannot terminate a stopped client in time, so report the client at once.
            let report_at = if client.stopped { now } else { attempts.due + LATE_CLIENT_REPORT_DELAY };
            if !attempts.reported && now >= report_at {
                attempts.reported = true;
                let error = attempts.last_error.clone();
                let error = error.unwrap_or_else(|| "the MPS host has not answered yet".into());
                decision.report.push((client.clone(), error));
            }
            if !attempts.reported {
                check_at(report_at);
            }
            if client.stopped {
                check_at(now + RECHECK_INTERVAL);
            } else if now < attempts.not_before {
                check_at(attempts.not_before);
            } else if !busy {
                ready.push((due, client));
            }
        }
        ready.sort_by(|(a, of_a), (b, of_b)| (a, &of_a.key).cmp(&(b, &of_b.key)));
        for (_, client) in ready {
            // Other clients of the device wait until the outcome of this request is recorded.
            if self.busy.insert(client.key.device.clone()) {
                decision.terminate.push(client);
            }
        }
        decision
    }

    /// Records the outcome of an attempt.
    pub fn record_outcome(&mut self, key: &ClientKey, outcome: &AttemptOutcome, now: Instant) {
        self.busy.remove(&key.device);
        // A client that is no longer listed has ended, regardless of the outcome.
        let Some(attempts) = self.attempts.get_mut(key) else { return };
        match outcome {
            AttemptOutcome::Terminated => attempts.terminated = true,
            AttemptOutcome::NoContext => {
                (attempts.due, attempts.not_before) = (now + RECHECK_INTERVAL, now + RECHECK_INTERVAL);
                attempts.last_error = None;
            }
            AttemptOutcome::Failed(error) => {
                let pause = ATTEMPT_BACKOFF.0.saturating_mul(1 << attempts.failures.min(8)).min(ATTEMPT_BACKOFF.1);
                attempts.failures += 1;
                attempts.not_before = now + pause;
                attempts.last_error = Some(error.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::pods::tests::{millis, observation, secs};
    use super::pods::{PodObservation, TerminatingPods};
    use super::*;

    fn client(pods: &TerminatingPods, uid: &str, device: &str, pid: u32, survives_sigterm: bool) -> Option<Client> {
        let (pod, deadlines) = pods.find_terminating(&[uid.to_owned()], None)?;
        let key = ClientKey { device: device.into(), pid };
        Some(Client { key, pod: pod.to_owned(), deadlines, survives_sigterm, stopped: false })
    }

    /// Returns terminating pods with these UIDs and grace periods in seconds.
    fn terminating_pods(graces: &[(&str, u64)], now: Instant) -> TerminatingPods {
        let mut pods = TerminatingPods::default();
        for (uid, grace) in graces {
            pods.observe(observation(uid, Some((*grace, *grace))), now);
        }
        pods
    }

    /// Returns the PIDs of the clients that the decision terminates.
    fn pids_to_terminate(decision: &TerminationDecision) -> Vec<u32> {
        decision.terminate.iter().map(|client| client.key.pid).collect()
    }

    #[test]
    fn a_client_that_survives_sigterm_is_terminated_just_before_its_grace_period_ends_and_others_at_once() {
        let now = Instant::now();
        let pods = terminating_pods(&[("a", 30)], now);
        let clients = || [(1, false), (2, true)].map(|(pid, survives)| client(&pods, "a", "G", pid, survives).unwrap());
        let mut terminations = Terminations::default();
        let decision = terminations.decide(clients().to_vec(), now);
        assert_eq!(pids_to_terminate(&decision), [1]);
        assert_eq!(decision.next_check, Some(now + LATE_CLIENT_REPORT_DELAY));
        terminations.record_outcome(&clients()[0].key, &AttemptOutcome::Terminated, now + millis(5));
        let decision = terminations.decide(clients().to_vec(), now + millis(5));
        assert_eq!((decision.terminate.len(), decision.next_check), (0, Some(now + secs(28))), "terminated once");
        let decision = terminations.decide(clients().to_vec(), now + secs(28));
        assert_eq!(pids_to_terminate(&decision), [2]);
        terminations.record_outcome(&clients()[1].key, &AttemptOutcome::Terminated, now + secs(28));
        assert_eq!(terminations.decide(clients().to_vec(), now + secs(29)), TerminationDecision::default());
    }

    #[test]
    fn a_daemon_has_one_request_at_a_time_and_devices_do_not_wait_for_each_other() {
        let now = Instant::now();
        let pods = terminating_pods(&[("a", 30), ("b", 0)], now);
        let all: Vec<Client> = [("a", "G", 3, false), ("a", "G", 1, false), ("b", "H", 2, true), ("a", "H", 4, false)]
            .map(|(uid, device, pid, survives)| client(&pods, uid, device, pid, survives).unwrap())
            .to_vec();
        let mut terminations = Terminations::default();
        assert_eq!(pids_to_terminate(&terminations.decide(all.clone(), now)), [1, 2]);
        assert!(terminations.decide(all.clone(), now).terminate.is_empty());
        // One daemon hangs, and the other daemon continues.
        terminations.record_outcome(&all[2].key, &AttemptOutcome::Terminated, now);
        assert_eq!(pids_to_terminate(&terminations.decide(all.clone(), now)), [4]);
        let reports = terminations.decide(all.clone(), now + LATE_CLIENT_REPORT_DELAY).report;
        let reports: Vec<(u32, &str)> = reports.iter().map(|(client, why)| (client.key.pid, why.as_str())).collect();
        assert_eq!(reports, [3, 1, 4].map(|pid| (pid, "the MPS host has not answered yet")));
        assert!(terminations.decide(all.clone(), now + secs(9)).report.is_empty(), "once");
        terminations.record_outcome(&all[1].key, &AttemptOutcome::Failed("hung".into()), now + secs(9));
        assert_eq!(pids_to_terminate(&terminations.decide(all, now + secs(9))), [3], "the other client is next");
    }

    #[test]
    fn failed_attempts_are_retried_with_growing_delays_until_the_process_has_ended() {
        let start = Instant::now();
        let pods = terminating_pods(&[("a", 30)], start);
        let one = client(&pods, "a", "G", 1, false).unwrap();
        let mut terminations = Terminations::default();
        let (mut now, mut attempts, mut reports) = (start, Vec::new(), Vec::new());
        for _ in 0..8 {
            let decision = terminations.decide(vec![one.clone()], now);
            reports.extend(decision.report);
            if decision.terminate.is_empty() {
                now = decision.next_check.unwrap();
                continue;
            }
            attempts.push((now - start).as_millis());
            terminations.record_outcome(&one.key, &AttemptOutcome::Failed("busy".into()), now);
        }
        assert_eq!(attempts, [0, 100, 300, 700]);
        assert_eq!(reports, [(one.clone(), "busy".to_owned())]);
        assert_eq!(terminations.decide(Vec::new(), now), TerminationDecision::default());
        // Attempts at an earlier process do not count for a new process with the same PID.
        assert_eq!(pids_to_terminate(&terminations.decide(vec![one], now)), [1]);
    }

    #[test]
    fn a_stopped_client_is_reported_at_once_and_terminated_when_it_continues() {
        let now = Instant::now();
        let pods = terminating_pods(&[("a", 30)], now);
        let one = client(&pods, "a", "G", 1, false).unwrap();
        let stopped = Client { stopped: true, ..one.clone() };
        let other = client(&pods, "a", "G", 2, false).unwrap();
        let mut terminations = Terminations::default();
        let decision = terminations.decide(vec![stopped.clone(), other.clone()], now);
        assert_eq!(pids_to_terminate(&decision), [2], "other clients do not wait for a stopped client");
        assert_eq!(decision.report.len(), 1);
        assert!(decision.report[0].1.contains("stopped"));
        terminations.record_outcome(&other.key, &AttemptOutcome::Terminated, now);
        let decision = terminations.decide(vec![stopped], now);
        assert_eq!((decision.report.len(), decision.next_check), (0, Some(now + RECHECK_INTERVAL)));
        assert_eq!(pids_to_terminate(&terminations.decide(vec![one], now + RECHECK_INTERVAL)), [1]);
    }

    #[test]
    fn a_client_without_a_context_is_tried_again_and_not_reported() {
        let start = Instant::now();
        let pods = terminating_pods(&[("a", 30)], start);
        let one = client(&pods, "a", "G", 1, false).unwrap();
        let mut terminations = Terminations::default();
        for attempt in 0..20 {
            let now = start + RECHECK_INTERVAL * attempt;
            let decision = terminations.decide(vec![one.clone()], now);
            assert_eq!((pids_to_terminate(&decision), decision.report.len()), (vec![1], 0));
            terminations.record_outcome(&one.key, &AttemptOutcome::NoContext, now);
            assert_eq!(terminations.decide(vec![one.clone()], now).next_check, Some(now + RECHECK_INTERVAL));
        }
    }

    /// An event on a node. Events occur at intervals of 100 ms.
    #[derive(Debug, Clone)]
    enum NodeStep {
        Delete {
            pod: usize,
            grace: u64,
        },
        ForceDelete {
            pod: usize,
        },
        Stop {
            client: usize,
        },
        Continue {
            client: usize,
        },
        /// The behaviour of the device's daemon from now on.
        Daemon {
            device: usize,
            behaviour: DaemonBehaviour,
        },
        Nothing,
    }

    /// How an MPS daemon answers requests.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum DaemonBehaviour {
        Work,
        Fail,
        Hang,
    }

    fn steps() -> impl Strategy<Value = Vec<NodeStep>> {
        let behaviour =
            prop_oneof![Just(DaemonBehaviour::Work), Just(DaemonBehaviour::Fail), Just(DaemonBehaviour::Hang)];
        let step = prop_oneof![
            2 => (0..6_usize, prop_oneof![Just(0), Just(1), Just(5), Just(30)])
                .prop_map(|(pod, grace)| NodeStep::Delete { pod, grace }),
            1 => (0..6_usize).prop_map(|pod| NodeStep::ForceDelete { pod }),
            1 => (0..12_usize).prop_map(|client| NodeStep::Stop { client }),
            1 => (0..12_usize).prop_map(|client| NodeStep::Continue { client }),
            1 => (0..2_usize, behaviour).prop_map(|(device, behaviour)| NodeStep::Daemon { device, behaviour }),
            20 => Just(NodeStep::Nothing),
        ];
        proptest::collection::vec(step, 0..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// Runs random events with six pods of two clients each, on two devices.
        #[test]
        fn clients_of_terminating_pods_are_terminated_or_reported_in_time_and_others_are_not(steps in steps()) {
            let start = Instant::now();
            let name = |pod: usize| format!("p{pod}");
            let mut pods = TerminatingPods::default();
            for pod in 0..6 {
                pods.observe(PodObservation { sleep: secs(0), ..observation(&name(pod), None) }, start);
            }
            let (mut stopped, mut daemons, mut terminated) = ([false; 12], [DaemonBehaviour::Work; 2], [false; 12]);
            let (mut deleted, mut reported, mut overdue_since) = ([false; 6], [false; 12], [None; 12]);
            let mut terminations = Terminations::default();
            let mut hanging: [Option<usize>; 2] = [None; 2];
            for (number, step) in steps.into_iter().chain(std::iter::repeat_n(NodeStep::Nothing, 310)).enumerate() {
                let now = start + millis(100) * u32::try_from(number).unwrap();
                match step {
                    NodeStep::Delete { pod, grace } => {
                        deleted[pod] = true;
                        pods.observe(observation(&name(pod), Some((grace, grace))), now);
                    }
                    NodeStep::ForceDelete { pod } => {
                        deleted[pod] = true;
                        pods.record_removal(&name(pod), now);
                    }
                    NodeStep::Stop { client } => stopped[client] = true,
                    NodeStep::Continue { client } => stopped[client] = false,
                    NodeStep::Daemon { device, behaviour } => daemons[device] = behaviour,
                    NodeStep::Nothing => {}
                }
                let pid = |index: usize| u32::try_from(index).unwrap();
                let key = |index: usize| ClientKey { device: index.rem_euclid(2).to_string(), pid: pid(index) };
                for device in 0..2 {
                    if daemons[device] != DaemonBehaviour::Hang && let Some(index) = hanging[device].take() {
                        terminations.record_outcome(&key(index), &AttemptOutcome::Failed("hung".into()), now);
                    }
                }
                loop {
                    let client = |index: usize| {
                        let (pod, deadlines) = pods.find_terminating(&[name(index / 2)], None)?;
                        let survives_sigterm = index.is_multiple_of(3);
                        let (key, stopped) = (key(index), stopped[index]);
                        Some(Client { key, pod: pod.into(), deadlines, survives_sigterm, stopped })
                    };
                    let decision = terminations.decide((0..12).filter_map(client).collect(), now);
                    for (client, _) in &decision.report {
                        let index = client.key.pid as usize;
                        prop_assert!(!reported[index], "client {} is reported twice", index);
                        reported[index] = true;
                    }
                    let count = decision.terminate.len();
                    for client in decision.terminate {
                        let index = client.key.pid as usize;
                        prop_assert!(deleted[index / 2], "the pod does not terminate");
                        prop_assert!(now >= client.deadlines.termination_time(client.survives_sigterm), "the client is not due");
                        prop_assert!(!terminated[index] && !stopped[index]);
                        prop_assert_eq!(hanging[index % 2], None, "the daemon is busy");
                        match daemons[index % 2] {
                            DaemonBehaviour::Work => {
                                terminated[index] = true;
                                terminations.record_outcome(&client.key, &AttemptOutcome::Terminated, now);
                            }
                            DaemonBehaviour::Fail => {
                                terminations.record_outcome(&client.key, &AttemptOutcome::Failed("no".into()), now);
                            }
                            DaemonBehaviour::Hang => hanging[index % 2] = Some(index),
                        }
                    }
                    if count == 0 {
                        break;
                    }
                }
                for index in 0..12 {
                    let found = pods.find_terminating(&[name(index / 2)], None);
                    let due = found.map(|(_, deadlines)| deadlines.termination_time(index.is_multiple_of(3)));
                    // The client counts as due from the first step at or after its deadline.
                    let since = overdue_since[index].or(due.filter(|due| *due <= now).map(|_| now));
                    overdue_since[index] = since;
                    let overdue = since.is_some_and(|since| now >= since + LATE_CLIENT_REPORT_DELAY);
                    prop_assert!(
                        !overdue || terminated[index] || reported[index],
                        "client {} is neither terminated nor reported", index
                    );
                }
            }
        }
    }
}
