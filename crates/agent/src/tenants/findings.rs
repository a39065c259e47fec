//! From suspicions to findings: who is suspected by two looks in a row has left its share. Pure:
//! the time is an argument.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_api::gpunode::FindingStatus;
use cleave_api::names::finding::{MEMORY_EXCEEDED, OUTSIDE_MPS};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::judge::{Judgement, Key, ProcessId, Suspect};
use super::names::Names;

/// How long a finding is told after it was last seen: the operator must not miss it, and one that
/// comes and goes is one.
pub const HOLD: Duration = Duration::from_secs(10);
/// Most findings that a `GpuNode` has.
pub const MOST: usize = 32;
/// How long a process that was an MPS client may be none: when a server ends the driver may list
/// its clients as plain processes, broken as they are. Not for ever, since a process can become
/// another program.
const FORMER: Duration = Duration::from_secs(10);
/// How long a client that was to be ended is not ended again.
const END_AGAIN: Duration = Duration::from_secs(10);

/// What was found.
#[derive(Debug, Default)]
pub struct Findings {
    suspected: BTreeMap<Key, BTreeSet<ProcessId>>,
    found: BTreeMap<Key, Found>,
    /// Clients that were to be ended, and when.
    ended: BTreeMap<ProcessId, Instant>,
    /// MPS clients, and when they last were.
    clients: BTreeMap<ProcessId, Instant>,
}

#[derive(Debug)]
struct Found {
    status: FindingStatus,
    evict: bool,
    seen: Instant,
    /// The pod was told.
    told: bool,
}

/// What a look says of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// Its processes.
    Said,
    /// Nothing yet: it is still being asked. What was suspected before stays so.
    Awaited,
    /// Nothing: it does not answer.
    Silent,
}

/// What follows from a look.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct News {
    /// What was found by this look.
    pub begun: Vec<FindingStatus>,
    /// What pods are to be told.
    pub tell: Vec<FindingStatus>,
    /// MPS clients that are to be ended, by device.
    pub end: Vec<(String, ProcessId)>,
    /// Somebody is suspected, and another look will tell.
    pub pending: bool,
}

impl Findings {
    /// Takes in what follows from a look. `said` is what it says of a device: of one that did not
    /// answer nothing is known, and `evicts` whether the policy says that who leaves its share of a
    /// device is evicted.
    pub fn take(
        &mut self,
        Judgement { suspects, clients, .. }: Judgement,
        said: impl Fn(&str) -> Word,
        evicts: impl Fn(&str) -> bool,
        names: &Names,
        (now, time): (Instant, Timestamp),
    ) -> News {
        let mut news = News::default();
        let before = std::mem::take(&mut self.suspected);
        self.clients.extend(clients.into_iter().map(|process| (process, now)));
        self.clients.retain(|_, at| now.saturating_duration_since(*at) < FORMER);
        for suspect in suspects {
            let Suspect { key, gpu, tenant, mut processes, clients, message } = suspect;
            if key.kind == OUTSIDE_MPS {
                processes.retain(|process| !self.clients.contains_key(process));
                if processes.is_empty() {
                    continue;
                }
            }
            let again = before.get(&key).is_some_and(|before| {
                // Of a container that starts many programs each may look odd for a moment.
                key.kind == MEMORY_EXCEEDED || before.intersection(&processes).next().is_some()
            });
            let evict = evicts(&key.device);
            let known = self.found.get_mut(&key);
            if known.is_none() && !again {
                news.pending = true;
                self.suspected.insert(key, processes);
                continue;
            }
            let status = FindingStatus {
                kind: key.kind.to_owned(),
                gpu,
                device: key.device.clone(),
                namespace: tenant.namespace,
                pod: tenant.pod,
                uid: key.owner.as_ref().map(|owner| owner.pod.clone()).unwrap_or_default(),
                container: tenant.container,
                pid: processes.first().map(|process| process.pid),
                message,
                since: Some(Time(time)),
            };
            if evict {
                for process in clients {
                    let last = self.ended.get(&process);
                    if last.is_none_or(|last| now.saturating_duration_since(*last) >= END_AGAIN) {
                        self.ended.insert(process, now);
                        news.end.push((key.device.clone(), process));
                    }
                }
            }
            match known {
                None => {
                    news.begun.push(status.clone());
                    self.found.insert(key.clone(), Found { status, evict, seen: now, told: false });
                }
                Some(found) => {
                    (found.seen, found.evict) = (now, evict);
                    // How much it uses changes each moment: what is told stays, unless it was not
                    // known whose it is.
                    if found.status.pod.is_empty() && !status.pod.is_empty() {
                        found.status = FindingStatus { since: found.status.since.take(), ..status };
                    }
                }
            }
            self.suspected.insert(key, processes);
        }
        self.suspected.extend(before.into_iter().filter(|(key, _)| said(&key.device) == Word::Awaited));
        self.ended.retain(|_, at| now.saturating_duration_since(*at) < END_AGAIN);
        self.found.retain(|key, found| {
            let silent = said(&key.device) != Word::Said && now.saturating_duration_since(found.seen) < HOLD * 6;
            let fresh = now.saturating_duration_since(found.seen) < HOLD;
            // Its contexts are ended first: that it is within its share for that is no reason to
            // let it go on.
            let leaving = found.evict && evicts(&key.device) && !found.status.uid.is_empty();
            let gone = names.is_gone(&found.status.uid);
            fresh || silent || leaving && !gone
        });
        for found in self.found.values_mut().filter(|found| !found.told && !found.status.pod.is_empty()) {
            found.told = true;
            news.tell.push(found.status.clone());
        }
        news
    }

    /// All findings, the oldest first, as many as a `GpuNode` has.
    pub fn all(&self) -> Vec<FindingStatus> {
        let mut all: Vec<FindingStatus> = self.found.values().map(|found| found.status.clone()).collect();
        let since = |finding: &FindingStatus| finding.since.as_ref().map(|time| time.0);
        all.sort_by(|a, b| (since(a), &a.device, &a.uid, &a.kind).cmp(&(since(b), &b.device, &b.uid, &b.kind)));
        all.truncate(MOST);
        all
    }

    /// Whether there is nothing that time or a look could change.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty() && self.suspected.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::super::judge::Tenant;
    use super::super::judge::tests::owner;
    use super::super::names::PodName;
    use super::*;

    struct Watch {
        findings: Findings,
        names: Names,
        start: Instant,
        evict: bool,
        word: Word,
        clients: BTreeSet<ProcessId>,
    }

    impl Watch {
        fn new() -> Self {
            let mut names = Names::default();
            names.begin();
            names.put("uid-p".into(), PodName::default());
            names.end();
            Self {
                findings: Findings::default(),
                names,
                start: Instant::now(),
                evict: false,
                word: Word::Said,
                clients: BTreeSet::new(),
            }
        }

        fn look(&mut self, at: u64, suspects: Vec<Suspect>) -> News {
            let now = self.start + Duration::from_millis(at);
            let Self { evict, word, .. } = *self;
            let clients = std::mem::take(&mut self.clients);
            let judgement = Judgement { suspects, clients, ..Judgement::default() };
            self.findings.take(judgement, |_| word, |_| evict, &self.names, (now, Timestamp::UNIX_EPOCH))
        }
    }

    fn suspect(kind: &'static str, pid: u32, mib: u64) -> Suspect {
        Suspect {
            key: Key { kind, device: "GPU-a".into(), owner: owner("uid-p", "c") },
            gpu: "GPU-a".into(),
            tenant: Tenant { namespace: "ns".into(), pod: "p".into(), container: "c".into() },
            processes: [ProcessId { pid, start: 1 }].into(),
            clients: [ProcessId { pid, start: 1 }].into(),
            message: format!("uses {mib} MiB"),
        }
    }

    #[test]
    fn it_takes_two_looks_and_is_told_once() {
        let mut watch = Watch::new();
        let first = watch.look(0, vec![suspect(MEMORY_EXCEEDED, 1, 5)]);
        assert!(first.pending && first.begun.is_empty() && first.tell.is_empty() && watch.findings.all().is_empty());
        let second = watch.look(400, vec![suspect(MEMORY_EXCEEDED, 1, 6)]);
        assert_eq!((second.begun.len(), second.tell.len(), second.pending), (1, 1, false));
        let third = watch.look(1400, vec![suspect(MEMORY_EXCEEDED, 2, 7)]);
        assert_eq!((third.begun.len(), third.tell.len(), third.pending), (0, 0, false));
        assert_eq!(watch.findings.all()[0].message, "uses 6 MiB", "no write for each change");
    }

    #[test]
    fn programs_that_each_look_odd_for_a_moment_are_not_one_that_stays() {
        let mut watch = Watch::new();
        for at in 0..20 {
            let news = watch.look(at * 400, vec![suspect(OUTSIDE_MPS, u32::try_from(at).unwrap(), 0)]);
            assert!(news.begun.is_empty() && news.pending, "{at}");
        }
        assert_eq!(watch.look(9000, vec![suspect(OUTSIDE_MPS, 19, 0)]).begun.len(), 1);
    }

    #[test]
    fn who_was_a_client_just_now_is_broken_rather_than_gone_elsewhere_but_not_for_ever() {
        let mut watch = Watch::new();
        watch.clients = [ProcessId { pid: 1, start: 1 }].into();
        watch.look(0, vec![]);
        for at in [1000, 5000, 9900] {
            let news = watch.look(at, vec![suspect(OUTSIDE_MPS, 1, 0)]);
            assert!(news.begun.is_empty() && !news.pending, "{at}");
        }
        watch.look(10_000, vec![suspect(OUTSIDE_MPS, 1, 0)]);
        assert_eq!(watch.look(10_400, vec![suspect(OUTSIDE_MPS, 1, 0)]).begun.len(), 1);
    }

    #[test]
    fn a_suspicion_ends_with_a_look_that_does_not_share_it() {
        let mut watch = Watch::new();
        watch.look(0, vec![suspect(MEMORY_EXCEEDED, 1, 5)]);
        watch.look(400, vec![]);
        assert!(watch.findings.is_empty());
        assert!(watch.look(1400, vec![suspect(MEMORY_EXCEEDED, 1, 5)]).begun.is_empty());
    }

    #[test]
    fn a_suspicion_outlives_looks_that_wait_for_its_gpu_and_not_its_silence() {
        for (word, found) in [(Word::Awaited, 1), (Word::Silent, 0)] {
            let mut watch = Watch::new();
            watch.look(0, vec![suspect(MEMORY_EXCEEDED, 1, 5)]);
            watch.word = word;
            watch.look(400, vec![]);
            watch.word = Word::Said;
            assert_eq!(watch.look(1400, vec![suspect(MEMORY_EXCEEDED, 1, 5)]).begun.len(), found, "{word:?}");
        }
    }

    #[test]
    fn a_finding_stays_a_while_and_through_a_drivers_silence_and_then_goes() {
        let mut watch = Watch::new();
        for at in [0, 400] {
            watch.look(at, vec![suspect(MEMORY_EXCEEDED, 1, 5)]);
        }
        watch.look(5000, vec![]);
        assert_eq!(watch.findings.all().len(), 1);
        watch.word = Word::Silent;
        watch.look(20_000, vec![]);
        assert_eq!(watch.findings.all().len(), 1, "nothing is known");
        watch.word = Word::Said;
        watch.look(21_000, vec![]);
        assert!(watch.findings.is_empty());
        let again = watch.look(22_000, vec![suspect(MEMORY_EXCEEDED, 1, 5)]);
        assert!(again.pending && again.begun.is_empty());
    }

    #[test]
    fn under_evict_clients_are_ended_and_the_finding_stays_until_the_pod_is_gone() {
        let mut watch = Watch::new();
        watch.evict = true;
        assert!(watch.look(0, vec![suspect(MEMORY_EXCEEDED, 1, 5)]).end.is_empty());
        let found = watch.look(400, vec![suspect(MEMORY_EXCEEDED, 1, 5)]);
        assert_eq!(found.end, [("GPU-a".to_owned(), ProcessId { pid: 1, start: 1 })]);
        assert!(watch.look(1400, vec![suspect(MEMORY_EXCEEDED, 1, 5)]).end.is_empty(), "once");
        assert_eq!(watch.look(2400, vec![suspect(MEMORY_EXCEEDED, 2, 5)]).end.len(), 1, "its next program");
        assert_eq!(watch.look(13_000, vec![suspect(MEMORY_EXCEEDED, 2, 5)]).end.len(), 1, "it lives on");
        watch.look(900_000, vec![]);
        assert_eq!(watch.findings.all().len(), 1, "a disruption budget may keep it");
        watch.names.remove("uid-p");
        watch.look(901_000, vec![]);
        assert!(watch.findings.is_empty());
    }

    #[test]
    fn a_pod_is_told_when_its_name_is_known() {
        let mut watch = Watch::new();
        let unnamed = || Suspect { tenant: Tenant::default(), ..suspect(MEMORY_EXCEEDED, 1, 5) };
        watch.look(0, vec![unnamed()]);
        let found = watch.look(400, vec![unnamed()]);
        assert_eq!((found.begun.len(), found.tell.len()), (1, 0));
        assert_eq!(watch.findings.all()[0].uid, "uid-p");
        let named = watch.look(1400, vec![suspect(MEMORY_EXCEEDED, 1, 5)]);
        assert_eq!((named.begun.len(), named.tell.len()), (0, 1));
        assert_eq!(watch.findings.all()[0].pod, "p");
    }

    #[test]
    fn a_gpunode_has_no_more_findings_than_it_can() {
        let mut watch = Watch::new();
        let many = || {
            let one = |n: u32| {
                let mut suspect = suspect(MEMORY_EXCEEDED, n, 5);
                suspect.key.owner = owner(&format!("uid-{n}"), "c");
                suspect
            };
            (0..100).map(one).collect::<Vec<_>>()
        };
        watch.look(0, many());
        assert_eq!(watch.look(400, many()).begun.len(), 100);
        assert_eq!(watch.findings.all().len(), MOST);
    }
}
