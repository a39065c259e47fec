//! Fatal GPU errors, told to the pods that they hit and to whoever looks after the node. Pure: the
//! time is an argument.
//!
//! MPS shares a GPU's fatal errors among all its clients, and nobody tells them whose it was. Names
//! of pods of other namespaces are for the node's own objects: a tenant learns that a neighbour
//! broke its program, and which one where both are in one namespace.
//!
//! Whom the MPS server's log names is told as that and no more: on an H200 (driver 580) it named a
//! neighbour in six of eight illegal accesses.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_gpu::mps::wire::{Client, Fault};
use cleave_kubelet::HeldDevices;

use crate::allocation::allocation_id;
use crate::allocation::pending::PendingAllocations;
use crate::allocation::usage::Allocations;
use crate::event::{NodeEvent, PodRef};
use crate::mps::HostView;

/// How long the MPS server's log may take to name the culprit, and all whom it names: of several,
/// none is accused.
const NAMED: Duration = Duration::from_millis(500);
/// How long kubelet and API server may take to tell whose an allocation is.
const KNOWN: Duration = Duration::from_secs(2);
/// What is known only so.
const LOG: &str = "by the MPS server's log, which often names a neighbour,";
/// Pods that a sentence names.
const MOST: usize = 8;

/// What says whose an allocation is.
#[derive(Debug, Clone, Copy)]
pub struct Pods<'a> {
    /// What the kubelet lists.
    pub held: &'a [HeldDevices],
    /// What was given out.
    pub allocations: &'a Allocations,
    /// The node's pods, from the API server.
    pub pending: &'a PendingAllocations,
}

impl Pods<'_> {
    fn of(&self, allocation: &str) -> Option<PodRef> {
        let given = self.allocations.get(allocation);
        let is = |row: &&HeldDevices| {
            // An init container's is listed for the container that its slices went on to, and for
            // no other.
            let shares =
                |id: &String| given.is_some_and(|given| given.resource == row.resource && given.ids.contains(id));
            allocation_id(&row.resource, &row.ids) == allocation || row.ids.iter().any(shares)
        };
        let HeldDevices { namespace, pod, .. } = self.held.iter().find(is)?;
        let uid = self.pending.uid(namespace, pod).unwrap_or_default().to_owned();
        Some(PodRef { namespace: namespace.clone(), name: pod.clone(), uid })
    }
}

/// What follows from a look.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct News {
    /// What is to be told.
    pub events: Vec<NodeEvent>,
    /// Faults since the last look, by device.
    pub faults: BTreeMap<String, u64>,
    /// Look again after this long, at the latest.
    pub again: Option<Duration>,
}

/// What was told of the faults of each device.
#[derive(Debug, Default)]
pub struct Faults {
    /// The MPS host that counts them.
    host: Option<u32>,
    seen: BTreeMap<String, Seen>,
}

#[derive(Debug)]
struct Seen {
    fault: Fault,
    since: Instant,
    told: bool,
    /// How many of those that were ended are told.
    ended: usize,
    /// Whose an allocation was, by its id: it may be nobody's when it is told.
    pods: BTreeMap<String, PodRef>,
}

impl Faults {
    /// Looks at what the MPS host says.
    pub fn look(&mut self, view: &HostView, pods: &Pods<'_>, now: Instant) -> News {
        let mut news = News::default();
        // The last word of a host that stopped has no pid, and nothing new.
        if !view.alive || view.status.pid == 0 {
            return news;
        }
        // What was over when this process came was told by the one before it.
        let first = self.host.is_none();
        if self.host != Some(view.status.pid) {
            self.host = Some(view.status.pid);
            self.seen.clear();
        }
        for (device, daemon) in &view.status.daemons {
            let Some(fault) = &daemon.fault else { continue };
            let before = self.seen.get(device).map_or(0, |seen| seen.fault.number);
            if fault.number != before {
                let known = first && fault.over;
                if !known {
                    *news.faults.entry(device.clone()).or_default() += fault.number.saturating_sub(before).max(1);
                }
                let fresh = Seen { fault: fault.clone(), since: now, told: known, ended: 0, pods: BTreeMap::new() };
                if let Some(old) = self.seen.insert(device.clone(), fresh).filter(|old| !old.told) {
                    news.events.extend(old.events(device));
                }
            }
            let Some(seen) = self.seen.get_mut(device) else { continue };
            seen.fault.clone_from(fault);
            if let Some(wait) = seen.wait(pods, now) {
                news.again = Some(news.again.map_or(wait, |again| again.min(wait)));
            } else if !std::mem::replace(&mut seen.told, true) {
                news.events.extend(seen.events(device));
            }
            if seen.told && !(first && fault.over) {
                news.events.extend(seen.endings(device));
            }
        }
        news
    }
}

impl Seen {
    /// How long it is worth waiting for more to be known, if at all.
    fn wait(&mut self, pods: &Pods<'_>, now: Instant) -> Option<Duration> {
        if self.told {
            return None;
        }
        let allocations =
            self.fault.affected.iter().chain(&self.fault.culprit).filter_map(|client| client.allocation.as_ref());
        let mut all_known = true;
        for allocation in allocations {
            let known = self.pods.get(allocation).is_some_and(|pod| !pod.uid.is_empty());
            if !known && let Some(pod) = pods.of(allocation) {
                self.pods.insert(allocation.clone(), pod);
            }
            all_known &= self.pods.get(allocation).is_some_and(|pod| !pod.uid.is_empty());
        }
        let age = now.saturating_duration_since(self.since);
        let patience = if all_known && self.fault.over {
            return None;
        } else if all_known {
            NAMED
        } else {
            KNOWN
        };
        patience.checked_sub(age).filter(|wait| !wait.is_zero())
    }

    fn pod(&self, client: &Client) -> Option<&PodRef> {
        self.pods.get(client.allocation.as_ref()?)
    }

    /// The pods that were hit, each once.
    fn hit(&self) -> Vec<&PodRef> {
        let mut hit: Vec<&PodRef> = self.fault.affected.iter().filter_map(|client| self.pod(client)).collect();
        hit.sort_unstable();
        hit.dedup();
        hit
    }

    /// For the node, with all names, and for each pod that was hit.
    fn events(&self, device: &str) -> Vec<NodeEvent> {
        let culprit = self.fault.culprit.as_ref();
        let of = culprit.and_then(|client| self.pod(client));
        let hit = self.hit();
        let unknown = self.fault.affected.iter().filter(|client| self.pod(client).is_none()).count();
        let others: Vec<&PodRef> = hit.iter().filter(|pod| Some(**pod) != of).copied().collect();
        let mut notes = vec![NodeEvent {
            warning: true,
            reason: "GpuFault",
            note: format!("{device}: {}; it broke {}", cause(culprit, of, self.fault.killed), list(&others, unknown)),
            regarding: None,
            related: of.or_else(|| hit.first().copied()).cloned(),
        }];
        for pod in hit {
            let said = if Some(pod) == of {
                own(self.fault.killed).to_owned()
            } else {
                format!(
                    "its program on {device} was broken by {}, as MPS does to all programs on a GPU: it has to be started again",
                    neighbour(pod, culprit, of, self.fault.killed)
                )
            };
            let reason = match (Some(pod) == of, self.fault.killed) {
                (false, _) => "BrokenByGpuFault",
                (true, true) => "CausedGpuFault",
                (true, false) => "NamedInGpuFault",
            };
            let note = format!("pod {}/{}: {said}", pod.namespace, pod.name);
            notes.push(NodeEvent { warning: true, reason, note, regarding: Some(pod.clone()), related: None });
        }
        notes
    }

    /// For the pods whose programs were ended since the last look.
    fn endings(&mut self, device: &str) -> Vec<NodeEvent> {
        let fresh = self.fault.ended.get(self.ended..).unwrap_or_default();
        let mut pods: Vec<&PodRef> = fresh.iter().filter_map(|client| self.pod(client)).collect();
        pods.sort_unstable();
        pods.dedup();
        let told = |pod: &PodRef| NodeEvent {
            warning: true,
            reason: "EndedInGpuFault",
            note: format!(
                "pod {}/{}: its program did not exit after the fatal GPU error on {device}, and was ended: nobody could use the GPU before",
                pod.namespace, pod.name
            ),
            regarding: Some(pod.clone()),
            related: None,
        };
        let events = pods.into_iter().map(told).collect();
        self.ended = self.fault.ended.len();
        events
    }
}

/// Whose it was, for those who look after the node.
fn cause(culprit: Option<&Client>, pod: Option<&PodRef>, killed: bool) -> String {
    let who = match (culprit, pod) {
        (None, _) => return "a fatal GPU error of a program that MPS does not name".to_owned(),
        (Some(client), Some(pod)) => format!("process {} of pod {}/{}", client.pid, pod.namespace, pod.name),
        (Some(client), None) => format!("process {} of no known pod", client.pid),
    };
    if killed {
        format!("{who} was killed while its kernels ran")
    } else {
        format!("a fatal GPU error, {LOG} of {who}")
    }
}

/// To the pod whose it was.
fn own(killed: bool) -> &'static str {
    if killed {
        "its program was killed while its kernels ran on a shared GPU, which broke the others there: programs that end at SIGTERM after their \
         kernels, and are given the time, break nobody"
    } else {
        "the MPS server's log names its program in a fatal GPU error, such as an access to memory that is not its own, which broke all programs \
         on the GPU, its own included: they have to be started again. That log often names a neighbour of whose error it was"
    }
}

/// Whose it was, as a tenant may know it.
fn neighbour(of: &PodRef, culprit: Option<&Client>, pod: Option<&PodRef>, killed: bool) -> String {
    let who = match (culprit, pod) {
        (None, _) => return "a fatal GPU error of a program that shares the GPU, perhaps its own".to_owned(),
        (Some(_), Some(pod)) if pod.namespace == of.namespace => format!("pod {}, which shares the GPU", pod.name),
        (Some(_), _) => "another pod, which shares the GPU".to_owned(),
    };
    if killed {
        format!("the death of {who}, in the midst of its work")
    } else {
        format!("a fatal GPU error, {LOG} of {who}")
    }
}

fn list(pods: &[&PodRef], unknown: usize) -> String {
    let mut names: Vec<String> = pods.iter().take(MOST).map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
    if pods.len() > MOST {
        names.push(format!("{} more pods", pods.len() - MOST));
    }
    if unknown > 0 {
        names.push(format!("{unknown} programs of no known pod"));
    }
    if names.is_empty() {
        "no other pod's programs".to_owned()
    } else {
        format!("the programs of {}", names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use cleave_gpu::mps::wire::{DaemonState, DaemonStatus, Enforcement, Status};

    use super::*;
    use crate::allocation::pending::Bound;
    use crate::allocation::usage::tests::{allocation, held};

    /// Pod `name` of namespace `ns`, or of the namespace before a slash.
    struct World {
        held: Vec<HeldDevices>,
        allocations: Allocations,
        pending: PendingAllocations,
        faults: Faults,
        now: Instant,
    }

    fn id(number: usize) -> String {
        format!("GPU-a::{number}")
    }

    fn of(number: usize) -> String {
        allocation(&[&id(number)]).id()
    }

    fn client(number: usize) -> Client {
        Client { pid: 100 + u32::try_from(number).unwrap(), allocation: Some(of(number)) }
    }

    fn view(host: u32, fault: Option<Fault>) -> HostView {
        let daemon = DaemonStatus {
            state: DaemonState::Fault,
            pid: None,
            server_pid: None,
            restarts: 0,
            enforcement: Enforcement::Hard,
            message: String::new(),
            clients: Vec::new(),
            fault,
        };
        let daemons = BTreeMap::from([("GPU-a".to_owned(), daemon)]);
        HostView { alive: true, status: Status { pid: host, daemons, ..Status::default() }, error: None }
    }

    impl World {
        /// With pods that hold a slice each, all known but `unknown` to the API server; a healthy
        /// MPS host was seen.
        fn new(pods: &[(&str, &str)], unknown: &[&str]) -> Self {
            let now = Instant::now();
            let mut pending = PendingAllocations::watched();
            let mut rows = Vec::new();
            for (number, (namespace, name)) in pods.iter().enumerate() {
                rows.push(HeldDevices { namespace: (*namespace).to_owned(), ..held(name, &[&id(number)]) });
                if !unknown.contains(name) {
                    pending.pod(bound(namespace, name), now);
                }
            }
            let mut world =
                Self { held: rows, allocations: Allocations::default(), pending, faults: Faults::default(), now };
            assert_eq!(world.look(&view(7, None)), News::default());
            world
        }

        fn look(&mut self, view: &HostView) -> News {
            let pods = Pods { held: &self.held, allocations: &self.allocations, pending: &self.pending };
            self.faults.look(view, &pods, self.now)
        }

        /// What is told once the log has had its time.
        fn settled(&mut self, view: &HostView) -> News {
            let first = self.look(view);
            assert_eq!((first.events, first.again), (Vec::new(), Some(NAMED)), "the log may name another still");
            self.now += NAMED;
            self.look(view)
        }
    }

    fn bound(namespace: &str, name: &str) -> Bound {
        Bound {
            uid: format!("uid-{name}"),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            leaving: false,
            admitted: true,
            wants: Vec::new(),
        }
    }

    fn fault(number: u64, culprit: Option<usize>, affected: usize) -> Fault {
        let affected = (0..affected).map(client).collect();
        Fault { number, culprit: culprit.map(client), affected, ..Fault::default() }
    }

    /// To whom, why, and what.
    fn told(news: &News) -> Vec<(Option<&str>, &str, &str)> {
        let events = news.events.iter();
        let to = events.clone().map(|told| told.regarding.as_ref().map(|pod| pod.name.as_str()));
        to.zip(events).map(|(to, told)| (to, told.reason, told.note.as_str())).collect()
    }

    #[test]
    fn each_pod_is_told_once_and_no_tenant_learns_the_name_of_another() {
        let mut world = World::new(&[("ns", "bad"), ("ns", "near"), ("other", "far")], &[]);
        let news = world.settled(&view(7, Some(fault(1, Some(0), 3))));
        let told = told(&news);
        assert_eq!(
            told.iter().map(|(to, reason, _)| (*to, *reason)).collect::<Vec<_>>(),
            [
                (None, "GpuFault"),
                (Some("bad"), "NamedInGpuFault"),
                (Some("near"), "BrokenByGpuFault"),
                (Some("far"), "BrokenByGpuFault"),
            ]
        );
        assert!(
            told[0].2.contains("process 100 of pod ns/bad") && told[0].2.contains("ns/near, other/far"),
            "{}",
            told[0].2
        );
        assert!(told[1].2.starts_with("pod ns/bad: the MPS server's log names its program"), "{}", told[1].2);
        assert!(told[2].2.contains("a neighbour, of pod bad,"), "{}", told[2].2);
        assert!(told[3].2.contains("a neighbour, of another pod,"), "{}", told[3].2);
        for (to, _, note) in &told[1..] {
            let others = ["bad", "near", "far"].into_iter().filter(|name| Some(*name) != *to);
            let known = |name: &&str| note.contains(*name) && !(*to == Some("near") && *name == "bad");
            assert_eq!(others.filter(known).count(), 0, "{note}");
        }
        let pod = news.events[3].regarding.clone().unwrap();
        assert_eq!(pod, PodRef { namespace: "other".into(), name: "far".into(), uid: "uid-far".into() });
        assert_eq!(world.look(&view(7, Some(Fault { over: true, ..fault(1, Some(0), 3) }))), News::default());
        assert_eq!(world.look(&view(7, Some(fault(2, None, 3)))).faults, BTreeMap::from([("GPU-a".to_owned(), 1)]));
    }

    #[test]
    fn of_several_whom_the_log_names_none_is_accused() {
        let mut world = World::new(&[("ns", "a"), ("ns", "b")], &[]);
        assert_eq!(world.look(&view(7, Some(fault(1, Some(0), 2)))).events, []);
        world.now += NAMED / 2;
        // What the MPS host makes of two names.
        assert_eq!(world.look(&view(7, Some(fault(1, None, 2)))).events, []);
        let news = world.look(&view(7, Some(Fault { over: true, ..fault(1, None, 2) })));
        let reasons: Vec<&str> = told(&news).iter().map(|told| told.1).collect();
        assert_eq!(reasons, ["GpuFault", "BrokenByGpuFault", "BrokenByGpuFault"], "over, there is no more to come");
    }

    #[test]
    fn what_is_not_known_yet_is_waited_for_and_not_for_ever() {
        let mut world = World::new(&[("ns", "a"), ("ns", "b")], &["b"]);
        let news = world.look(&view(7, Some(fault(1, None, 2))));
        assert_eq!((news.events.len(), news.again, news.faults.len()), (0, Some(KNOWN), 1));
        world.pending.pod(bound("ns", "b"), world.now);
        world.now += NAMED / 2;
        let news = world.look(&view(7, Some(fault(1, None, 2))));
        assert_eq!((news.events.len(), news.again), (0, Some(NAMED / 2)), "the culprit may be named still");
        // Gone from all lists: what was known stays known.
        world.held.clear();
        world.now += NAMED / 2;
        let news = world.look(&view(7, Some(fault(1, None, 2))));
        assert_eq!(told(&news).len(), 3);
        assert!(told(&news)[1].2.contains("perhaps its own"));
        assert_eq!(news.again, None);
        // Nobody ever says whose it is.
        world.look(&view(7, Some(fault(2, Some(0), 2))));
        world.now += KNOWN;
        let news = world.look(&view(7, Some(fault(2, Some(0), 2))));
        assert_eq!(told(&news).len(), 1);
        assert!(
            told(&news)[0]
                .2
                .contains("process 100 of no known pod; it broke the programs of 2 programs of no known pod")
        );
    }

    #[test]
    fn whoever_is_ended_is_told_so() {
        let mut world = World::new(&[("ns", "a"), ("ns", "b")], &[]);
        world.settled(&view(7, Some(fault(1, Some(0), 2))));
        let ended = |clients: Vec<Client>| view(7, Some(Fault { ended: clients, ..fault(1, Some(0), 2) }));
        let news = world.look(&ended(vec![client(1)]));
        assert_eq!(
            told(&news).iter().map(|told| (told.0, told.1)).collect::<Vec<_>>(),
            [(Some("b"), "EndedInGpuFault")]
        );
        assert_eq!(world.look(&ended(vec![client(1)])), News::default());
        assert_eq!(world.look(&ended(vec![client(1), client(0)])).events[0].regarding.as_ref().unwrap().name, "a");
    }

    #[test]
    fn a_death_in_the_midst_of_work_is_no_accusation() {
        let mut world = World::new(&[("ns", "a"), ("ns", "b")], &[]);
        let news = world.settled(&view(7, Some(Fault { killed: true, ..fault(1, Some(0), 2) })));
        let told = told(&news);
        assert_eq!(told[1].1, "CausedGpuFault");
        assert!(told[0].2.contains("was killed while its kernels ran"), "{}", told[0].2);
        assert!(told[1].2.contains("was killed while its kernels ran"), "{}", told[1].2);
        assert!(told[2].2.contains("the death of pod a"), "{}", told[2].2);
    }

    #[test]
    fn an_agent_that_starts_tells_what_lasts_and_one_that_meets_another_host_tells_anew() {
        let mut world = World::new(&[("ns", "a")], &[]);
        world.faults = Faults::default();
        let over = |number| Fault { over: true, ended: vec![client(0)], ..fault(number, Some(0), 1) };
        assert_eq!(world.look(&view(7, Some(over(3)))), News::default(), "the agent before this one told it");
        assert_eq!(world.look(&view(7, Some(over(3)))), News::default());
        assert_eq!(world.look(&view(7, Some(over(5)))).faults["GPU-a"], 2, "one was missed");
        assert_eq!(world.look(&HostView { alive: false, ..view(8, Some(over(1))) }), News::default());
        assert_eq!(world.look(&view(0, Some(over(1)))), News::default(), "a host that stopped");
        assert_eq!(told(&world.look(&view(8, Some(over(1))))).len(), 3);
        world.faults = Faults::default();
        assert_eq!(told(&world.settled(&view(8, Some(fault(1, Some(0), 1))))).len(), 2, "it lasts");
    }

    #[test]
    fn a_fault_that_follows_at_once_leaves_none_untold() {
        let mut world = World::new(&[("ns", "a")], &["a"]);
        assert_eq!(told(&world.look(&view(7, Some(fault(1, Some(0), 1))))).len(), 0);
        let news = world.look(&view(7, Some(fault(2, Some(0), 1))));
        assert_eq!(told(&news).iter().map(|told| told.1).collect::<Vec<_>>(), ["GpuFault", "NamedInGpuFault"]);
        assert_eq!(news.again, Some(KNOWN));
    }

    #[test]
    fn an_init_containers_slices_are_its_pods() {
        let mut world = World::new(&[("ns", "a")], &[]);
        world.held = vec![held("a", &[&id(0)])];
        let first = allocation(&[&id(0), &id(1)]);
        let client = Client { pid: 1, allocation: Some(first.id()) };
        world.allocations.give(first, world.now);
        let fault = Fault { number: 1, culprit: Some(client.clone()), affected: vec![client], ..Fault::default() };
        assert_eq!(told(&world.settled(&view(7, Some(fault))))[1].0, Some("a"));
    }
}
