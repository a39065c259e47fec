//! Terminations the clients of pods that leave, through MPS, before a signal can hit a kernel in
//! flight: that would break their neighbours.
//!
//! [`pods`] knows which pods leave and until when, [`shutdown`] which of them do because the node
//! goes down, `process` what the kernel says of a client, and [`Terminations`] here what follows.
//! These are pure; `run` is the task that asks the MPS host, woken by the watch of the node's pods
//! and by the MPS host's status.
pub mod pods;
pub(crate) mod process;
pub mod shutdown;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use self::pods::Leaving;

/// How long after it was due a client that is not ended is told of. A `preStop` sleep of a second
/// is not over by then.
const TELL: Duration = Duration::from_millis(500);
/// First and longest pause after an attempt that failed.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Between attempts at a client that has no context yet, or has none any more.
const IDLE: Duration = Duration::from_millis(250);

/// A client of an MPS server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The GPU or MIG device.
    pub device: String,
    /// Its host pid.
    pub pid: u32,
}

/// What is known of a client whose pod leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// Which.
    pub key: Key,
    /// `namespace/name` of its pod.
    pub pod: String,
    /// How its pod leaves.
    pub leaving: Leaving,
    /// A SIGTERM does not end it.
    pub survives: bool,
    /// It is stopped: MPS would wait for it, and every other client for MPS.
    pub stopped: bool,
}

/// What came of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Its contexts are gone.
    Terminated,
    /// It has no context, and nothing that could be in flight; it may still make one.
    Idle,
    /// Why not.
    Failed(String),
}

/// What to do now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Clients that are to be ended now: at most one of a device. What came of each is to be told
    /// to [`Terminations::answered`].
    pub terminate: Vec<Client>,
    /// Clients that are not ended although it is time, and why. Each is told once.
    pub report: Vec<(Client, String)>,
    /// Look again then, at the latest.
    pub again: Option<Instant>,
}

/// The clients that are being ended.
#[derive(Debug, Default)]
pub struct Terminations {
    attempts: BTreeMap<Key, Attempt>,
    /// Devices whose MPS daemon is busy with one: a daemon does one thing at a time.
    busy: BTreeSet<String>,
}

#[derive(Debug)]
struct Attempt {
    /// It is over.
    done: bool,
    /// Since when it should be.
    due: Instant,
    failures: u32,
    not_before: Instant,
    why: Option<String>,
    told: bool,
}

impl Terminations {
    /// What to do about the clients of pods that leave, which these are all of.
    pub fn decide(&mut self, clients: Vec<Client>, now: Instant) -> Decision {
        let listed: BTreeSet<&Key> = clients.iter().map(|client| &client.key).collect();
        self.attempts.retain(|key, _| listed.contains(key));
        let mut decision = Decision::default();
        let mut again = |at: Instant| {
            let at = at.max(now);
            decision.again = Some(decision.again.map_or(at, |earlier| earlier.min(at)));
        };
        let mut ready = Vec::new();
        for client in clients {
            let due = client.leaving.due(client.survives);
            if now < due {
                again(due);
                continue;
            }
            let fresh = Attempt { done: false, due: now, failures: 0, not_before: now, why: None, told: false };
            let attempt = self.attempts.entry(client.key.clone()).or_insert(fresh);
            if attempt.done {
                continue;
            }
            let asked = self.busy.contains(&client.key.device);
            if client.stopped {
                attempt.why = Some("it is stopped, and MPS would wait for it".into());
            }
            // Of one that is stopped it is known at once.
            let tell_at = if client.stopped { now } else { attempt.due + TELL };
            if !attempt.told && now >= tell_at {
                attempt.told = true;
                let why = attempt.why.clone().unwrap_or_else(|| "the MPS host has not answered yet".into());
                decision.report.push((client.clone(), why));
            }
            if !attempt.told {
                again(tell_at);
            }
            if client.stopped {
                again(now + IDLE);
            } else if now < attempt.not_before {
                again(attempt.not_before);
            } else if !asked {
                ready.push((due, client));
            }
        }
        ready.sort_by(|(a, of_a), (b, of_b)| (a, &of_a.key).cmp(&(b, &of_b.key)));
        for (_, client) in ready {
            // Those of a device that is busy have their turn when the answer is there.
            if self.busy.insert(client.key.device.clone()) {
                decision.terminate.push(client);
            }
        }
        decision
    }

    /// An attempt has come to this.
    pub fn answered(&mut self, key: &Key, outcome: &Outcome, now: Instant) {
        self.busy.remove(&key.device);
        // Not listed any more: it is gone, whatever the answer.
        let Some(attempt) = self.attempts.get_mut(key) else { return };
        match outcome {
            Outcome::Terminated => attempt.done = true,
            Outcome::Idle => {
                (attempt.due, attempt.not_before) = (now + IDLE, now + IDLE);
                attempt.why = None;
            }
            Outcome::Failed(why) => {
                let pause = AGAIN.0.saturating_mul(1 << attempt.failures.min(8)).min(AGAIN.1);
                attempt.failures += 1;
                attempt.not_before = now + pause;
                attempt.why = Some(why.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::pods::tests::{millis, secs, seen};
    use super::pods::{Seen, TerminatingPods};
    use super::*;

    fn client(pods: &TerminatingPods, uid: &str, device: &str, pid: u32, survives: bool) -> Option<Client> {
        let (pod, leaving) = pods.leaving(&[uid.to_owned()], None)?;
        let key = Key { device: device.into(), pid };
        Some(Client { key, pod: pod.to_owned(), leaving, survives, stopped: false })
    }

    fn leaving(graces: &[(&str, u64)], now: Instant) -> TerminatingPods {
        let mut pods = TerminatingPods::default();
        for (uid, grace) in graces {
            pods.saw(seen(uid, Some((*grace, *grace))), now);
        }
        pods
    }

    fn ordered(decision: &Decision) -> Vec<u32> {
        decision.terminate.iter().map(|client| client.key.pid).collect()
    }

    #[test]
    fn one_that_sigterm_ends_goes_at_once_and_one_that_handles_it_before_the_end_of_its_grace() {
        let now = Instant::now();
        let pods = leaving(&[("a", 30)], now);
        let clients = || [(1, false), (2, true)].map(|(pid, survives)| client(&pods, "a", "G", pid, survives).unwrap());
        let mut terminations = Terminations::default();
        let decision = terminations.decide(clients().to_vec(), now);
        assert_eq!(ordered(&decision), [1]);
        assert_eq!(decision.again, Some(now + TELL));
        terminations.answered(&clients()[0].key, &Outcome::Terminated, now + millis(5));
        let decision = terminations.decide(clients().to_vec(), now + millis(5));
        assert_eq!((decision.terminate.len(), decision.again), (0, Some(now + secs(28))), "it is ended once");
        let decision = terminations.decide(clients().to_vec(), now + secs(28));
        assert_eq!(ordered(&decision), [2]);
        terminations.answered(&clients()[1].key, &Outcome::Terminated, now + secs(28));
        assert_eq!(terminations.decide(clients().to_vec(), now + secs(29)), Decision::default());
    }

    #[test]
    fn devices_do_not_wait_for_each_other_and_a_daemon_does_one_thing_at_a_time() {
        let now = Instant::now();
        let pods = leaving(&[("a", 30), ("b", 0)], now);
        let all: Vec<Client> = [("a", "G", 3, false), ("a", "G", 1, false), ("b", "H", 2, true), ("a", "H", 4, false)]
            .map(|(uid, device, pid, survives)| client(&pods, uid, device, pid, survives).unwrap())
            .to_vec();
        let mut terminations = Terminations::default();
        assert_eq!(ordered(&terminations.decide(all.clone(), now)), [1, 2]);
        assert!(terminations.decide(all.clone(), now).terminate.is_empty());
        // One daemon hangs; the other goes on.
        terminations.answered(&all[2].key, &Outcome::Terminated, now);
        assert_eq!(ordered(&terminations.decide(all.clone(), now)), [4]);
        let told = terminations.decide(all.clone(), now + TELL).report;
        let told: Vec<(u32, &str)> = told.iter().map(|(client, why)| (client.key.pid, why.as_str())).collect();
        assert_eq!(told, [3, 1, 4].map(|pid| (pid, "the MPS host has not answered yet")));
        assert!(terminations.decide(all.clone(), now + secs(9)).report.is_empty(), "once");
        terminations.answered(&all[1].key, &Outcome::Failed("hung".into()), now + secs(9));
        assert_eq!(ordered(&terminations.decide(all, now + secs(9))), [3], "it is the others' turn");
    }

    #[test]
    fn what_fails_is_tried_again_with_longer_and_longer_pauses_until_the_process_is_gone() {
        let start = Instant::now();
        let pods = leaving(&[("a", 30)], start);
        let one = client(&pods, "a", "G", 1, false).unwrap();
        let mut terminations = Terminations::default();
        let (mut now, mut pauses, mut told) = (start, Vec::new(), Vec::new());
        for _ in 0..8 {
            let decision = terminations.decide(vec![one.clone()], now);
            told.extend(decision.report);
            if decision.terminate.is_empty() {
                now = decision.again.unwrap();
                continue;
            }
            pauses.push((now - start).as_millis());
            terminations.answered(&one.key, &Outcome::Failed("busy".into()), now);
        }
        assert_eq!(pauses, [0, 100, 300, 700]);
        assert_eq!(told, [(one.clone(), "busy".to_owned())]);
        assert_eq!(terminations.decide(Vec::new(), now), Decision::default());
        // Another process by that pid is another.
        assert_eq!(ordered(&terminations.decide(vec![one], now)), [1]);
    }

    #[test]
    fn one_that_is_stopped_is_told_at_once_and_ended_when_it_runs() {
        let now = Instant::now();
        let pods = leaving(&[("a", 30)], now);
        let one = client(&pods, "a", "G", 1, false).unwrap();
        let stopped = Client { stopped: true, ..one.clone() };
        let other = client(&pods, "a", "G", 2, false).unwrap();
        let mut terminations = Terminations::default();
        let decision = terminations.decide(vec![stopped.clone(), other.clone()], now);
        assert_eq!(ordered(&decision), [2], "it blocks nobody");
        assert_eq!(decision.report.len(), 1);
        assert!(decision.report[0].1.contains("stopped"));
        terminations.answered(&other.key, &Outcome::Terminated, now);
        let decision = terminations.decide(vec![stopped], now);
        assert_eq!((decision.report.len(), decision.again), (0, Some(now + IDLE)));
        assert_eq!(ordered(&terminations.decide(vec![one], now + IDLE)), [1]);
    }

    #[test]
    fn one_without_a_context_is_no_failure_and_is_looked_at_again() {
        let start = Instant::now();
        let pods = leaving(&[("a", 30)], start);
        let one = client(&pods, "a", "G", 1, false).unwrap();
        let mut terminations = Terminations::default();
        for turn in 0..20 {
            let now = start + IDLE * turn;
            let decision = terminations.decide(vec![one.clone()], now);
            assert_eq!((ordered(&decision), decision.report.len()), (vec![1], 0));
            terminations.answered(&one.key, &Outcome::Idle, now);
            assert_eq!(terminations.decide(vec![one.clone()], now).again, Some(now + IDLE));
        }
    }

    /// What happens on a node, a tenth of a second after the other.
    #[derive(Debug, Clone)]
    enum Step {
        Delete {
            pod: usize,
            grace: u64,
        },
        Vanish {
            pod: usize,
        },
        Stop {
            client: usize,
        },
        Continue {
            client: usize,
        },
        /// The daemon of a device hangs from now on, fails, or works.
        Daemon {
            device: usize,
            does: Does,
        },
        Nothing,
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Does {
        Work,
        Fail,
        Hang,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let does = prop_oneof![Just(Does::Work), Just(Does::Fail), Just(Does::Hang)];
        let step = prop_oneof![
            2 => (0..6_usize, prop_oneof![Just(0), Just(1), Just(5), Just(30)])
                .prop_map(|(pod, grace)| Step::Delete { pod, grace }),
            1 => (0..6_usize).prop_map(|pod| Step::Vanish { pod }),
            1 => (0..12_usize).prop_map(|client| Step::Stop { client }),
            1 => (0..12_usize).prop_map(|client| Step::Continue { client }),
            1 => (0..2_usize, does).prop_map(|(device, does)| Step::Daemon { device, does }),
            20 => Just(Step::Nothing),
        ];
        proptest::collection::vec(step, 0..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// Six pods with two clients each, on two devices.
        #[test]
        fn clients_of_pods_that_stay_are_left_alone_and_the_others_ended_in_time_or_told_of(steps in steps()) {
            let start = Instant::now();
            let name = |pod: usize| format!("p{pod}");
            let mut pods = TerminatingPods::default();
            (0..6).for_each(|pod| { pods.saw(Seen { sleep: secs(0), ..seen(&name(pod), None) }, start); });
            let (mut stopped, mut daemons, mut ended) = ([false; 12], [Does::Work; 2], [false; 12]);
            let (mut deleted, mut told, mut late) = ([false; 6], [false; 12], [None; 12]);
            let mut terminations = Terminations::default();
            let mut hanging: [Option<usize>; 2] = [None; 2];
            for (turn, step) in steps.into_iter().chain(std::iter::repeat_n(Step::Nothing, 310)).enumerate() {
                let now = start + millis(100) * u32::try_from(turn).unwrap();
                match step {
                    Step::Delete { pod, grace } => {
                        deleted[pod] = true;
                        pods.saw(seen(&name(pod), Some((grace, grace))), now);
                    }
                    Step::Vanish { pod } => {
                        deleted[pod] = true;
                        pods.gone(&name(pod), now);
                    }
                    Step::Stop { client } => stopped[client] = true,
                    Step::Continue { client } => stopped[client] = false,
                    Step::Daemon { device, does } => daemons[device] = does,
                    Step::Nothing => {}
                }
                let key = |index: usize| Key { device: index.rem_euclid(2).to_string(), pid: u32::try_from(index).unwrap() };
                for device in 0..2 {
                    if daemons[device] != Does::Hang && let Some(index) = hanging[device].take() {
                        terminations.answered(&key(index), &Outcome::Failed("hung".into()), now);
                    }
                }
                loop {
                    let facts = |index: usize| {
                        let (pod, leaving) = pods.leaving(&[name(index / 2)], None)?;
                        let survives = index.is_multiple_of(3);
                        Some(Client { key: key(index), pod: pod.into(), leaving, survives, stopped: stopped[index] })
                    };
                    let decision = terminations.decide((0..12).filter_map(facts).collect(), now);
                    for (client, _) in &decision.report {
                        let index = client.key.pid as usize;
                        prop_assert!(!told[index], "told twice");
                        told[index] = true;
                    }
                    let orders = decision.terminate.len();
                    for client in decision.terminate {
                        let index = client.key.pid as usize;
                        prop_assert!(deleted[index / 2], "a pod that stays");
                        prop_assert!(now >= client.leaving.due(client.survives), "before its time");
                        prop_assert!(!ended[index] && !stopped[index]);
                        prop_assert_eq!(hanging[index % 2], None, "two at a time");
                        match daemons[index % 2] {
                            Does::Work => {
                                ended[index] = true;
                                terminations.answered(&client.key, &Outcome::Terminated, now);
                            }
                            Does::Fail => terminations.answered(&client.key, &Outcome::Failed("no".into()), now),
                            Does::Hang => hanging[index % 2] = Some(index),
                        }
                    }
                    if orders == 0 {
                        break;
                    }
                }
                for index in 0..12 {
                    let due = pods.leaving(&[name(index / 2)], None).map(|(_, leaving)| leaving.due(index.is_multiple_of(3)));
                    // Overdue, as seen from here: since the first look at which it was due.
                    let since = late[index].or(due.filter(|due| *due <= now).map(|_| now));
                    late[index] = since;
                    let overdue = since.is_some_and(|since| now >= since + TELL);
                    prop_assert!(!overdue || ended[index] || told[index], "client {} is not ended, and nobody told", index);
                }
            }
        }
    }
}
