//! Reports fatal GPU errors: one Event for the node, and one Event for each affected pod. Pure: the
//! time is an argument.
//!
//! A fatal error breaks all MPS clients of a GPU, and MPS does not report which client caused the
//! error. Only the node's own Event names pods of several namespaces. A pod's Event names another
//! pod only if both pods are in the same namespace.
//!
//! The MPS server's log may name a client, but a name in the log is no proof. On an H200 with
//! driver 580, the log named a neighbour in ten of 14 illegal accesses. Each Event that quotes the
//! log also states that the log often names a neighbour.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_gpu::mps::wire::{Client, Fault};
use cleave_kubelet::ContainerDevices;

use crate::allocation::allocation_id;
use crate::allocation::pending::PendingAllocations;
use crate::allocation::usage::Allocations;
use crate::event::{EventSubject, NodeEvent, PodRef};
use crate::mps::HostView;

/// Maximum time for which an Event waits until the MPS server's log names clients. If the log names
/// several clients, no Event names a client as the cause.
const MAX_LOG_DELAY: Duration = Duration::from_millis(500);
/// Maximum time for which an Event waits until the kubelet and the API server report the pod of an
/// allocation.
const MAX_OWNER_DELAY: Duration = Duration::from_secs(2);
/// Maximum number of pods that an Event names.
const MAX_NAMED_PODS: usize = 8;

/// Sources that identify the pod of an allocation.
#[derive(Debug, Clone, Copy)]
pub struct PodSources<'a> {
    /// The kubelet's PodResources list.
    pub listed: &'a [ContainerDevices],
    /// The agent's allocations.
    pub allocations: &'a Allocations,
    /// The node's pods, from the API server.
    pub pending: &'a PendingAllocations,
}

impl PodSources<'_> {
    /// Returns the pod that an allocation belongs to, if the kubelet lists it.
    fn pod_of_allocation(&self, id: &str) -> Option<PodRef> {
        let allocation = self.allocations.get(id);
        let is = |row: &&ContainerDevices| {
            // The kubelet allocates an init container's slices again to another container, and
            // lists the slices only for the other container.
            let shares = |slice: &String| {
                allocation
                    .is_some_and(|allocation| allocation.resource == row.resource && allocation.ids.contains(slice))
            };
            allocation_id(&row.resource, &row.ids) == id || row.ids.iter().any(shares)
        };
        let ContainerDevices { namespace, pod, .. } = self.listed.iter().find(is)?;
        let uid = self.pending.pod_uid(namespace, pod).unwrap_or_default().to_owned();
        Some(PodRef { namespace: namespace.clone(), name: pod.clone(), uid })
    }
}

/// The Events and counts of new faults.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FaultReport {
    /// Events to publish.
    pub events: Vec<NodeEvent>,
    /// Number of faults since the last update, by device.
    pub faults: BTreeMap<String, u64>,
    /// Maximum time until the next update, if one is needed.
    pub wake_after: Option<Duration>,
}

/// The last fault of each device, and the parts of the fault that Events have reported.
#[derive(Debug, Default)]
pub struct ReportedFaults {
    /// PID of the MPS host that numbered the faults. `None` before the first status.
    host: Option<u32>,
    seen: BTreeMap<String, ReportedFault>,
}

/// A fault, and the parts that Events have reported.
#[derive(Debug)]
struct ReportedFault {
    fault: Fault,
    since: Instant,
    reported: bool,
    /// Number of terminated clients that Events have reported.
    reported_terminations: usize,
    /// Pods by allocation id. The fault stores its pods, because a pod may be deleted before the
    /// agent reports the fault.
    pods: BTreeMap<String, PodRef>,
}

impl ReportedFaults {
    /// Compares the MPS host's status with earlier reports, and returns the Events and counts of
    /// new faults.
    pub fn update(&mut self, view: &HostView, pods: &PodSources<'_>, now: Instant) -> FaultReport {
        let mut report = FaultReport::default();
        // The status of a stopped MPS host has no PID and contains no new faults.
        if !view.alive || view.status.pid == 0 {
            return report;
        }
        // Do not report faults that were over when this process started, because an earlier agent
        // has usually reported them.
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
                    *report.faults.entry(device.clone()).or_default() += fault.number.saturating_sub(before).max(1);
                }
                let fresh = ReportedFault {
                    fault: fault.clone(),
                    since: now,
                    reported: known,
                    reported_terminations: 0,
                    pods: BTreeMap::new(),
                };
                if let Some(old) = self.seen.insert(device.clone(), fresh).filter(|old| !old.reported) {
                    report.events.extend(old.events(device));
                }
            }
            let Some(seen) = self.seen.get_mut(device) else { continue };
            seen.fault.clone_from(fault);
            if let Some(wait) = seen.wait_before_report(pods, now) {
                report.wake_after = Some(report.wake_after.map_or(wait, |again| again.min(wait)));
            } else if !std::mem::replace(&mut seen.reported, true) {
                report.events.extend(seen.events(device));
            }
            if seen.reported && !(first && fault.over) {
                report.events.extend(seen.termination_events(device));
            }
        }
        report
    }
}

impl ReportedFault {
    /// Returns the time to wait for more information before the report, or `None` to report now.
    fn wait_before_report(&mut self, pods: &PodSources<'_>, now: Instant) -> Option<Duration> {
        if self.reported {
            return None;
        }
        let allocations =
            self.fault.affected.iter().chain(&self.fault.culprit).filter_map(|client| client.allocation.as_ref());
        let mut all_known = true;
        for allocation in allocations {
            let known = self.pods.get(allocation).is_some_and(|pod| !pod.uid.is_empty());
            if !known && let Some(pod) = pods.pod_of_allocation(allocation) {
                self.pods.insert(allocation.clone(), pod);
            }
            all_known &= self.pods.get(allocation).is_some_and(|pod| !pod.uid.is_empty());
        }
        let age = now.saturating_duration_since(self.since);
        let patience = if all_known && self.fault.over {
            return None;
        } else if all_known {
            MAX_LOG_DELAY
        } else {
            MAX_OWNER_DELAY
        };
        patience.checked_sub(age).filter(|wait| !wait.is_zero())
    }

    /// Returns the pod of a client.
    fn pod_of_client(&self, client: &Client) -> Option<&PodRef> {
        self.pods.get(client.allocation.as_ref()?)
    }

    /// Returns the affected pods, each once.
    fn affected_pods(&self) -> Vec<&PodRef> {
        let mut affected: Vec<&PodRef> =
            self.fault.affected.iter().filter_map(|client| self.pod_of_client(client)).collect();
        affected.sort_unstable();
        affected.dedup();
        affected
    }

    /// Returns an Event for the node, which names the affected pods, and an Event for each affected
    /// pod.
    fn events(&self, device: &str) -> Vec<NodeEvent> {
        let culprit = self.fault.culprit.as_ref();
        let named = culprit.and_then(|client| self.pod_of_client(client));
        let affected = self.affected_pods();
        let unknown = self.fault.affected.iter().filter(|client| self.pod_of_client(client).is_none()).count();
        let others: Vec<&PodRef> = affected.iter().filter(|pod| Some(**pod) != named).copied().collect();
        let mut notes = vec![NodeEvent {
            warning: true,
            reason: "GpuFault",
            note: format!(
                "{device}: {}. The fault broke {}.",
                cause_for_node(culprit, named, self.fault.killed),
                affected_programs(&others, unknown)
            ),
            regarding: None,
            related: named
                .or_else(|| affected.first().copied())
                .map_or_else(|| EventSubject::device(device), |pod| Some(EventSubject::Pod(pod.clone()))),
        }];
        for pod in affected {
            let text = if Some(pod) == named {
                note_for_culprit(self.fault.killed).to_owned()
            } else {
                format!(
                    "the pod's program on {device} was broken by {}. Under MPS a fatal error breaks all programs on the GPU. Restart the program.",
                    cause_for_neighbour(pod, culprit, named, self.fault.killed)
                )
            };
            let reason = match (Some(pod) == named, self.fault.killed) {
                (false, _) => "BrokenByGpuFault",
                (true, true) => "CausedGpuFault",
                (true, false) => "NamedInGpuFault",
            };
            let note = format!("pod {}/{}: {text}", pod.namespace, pod.name);
            notes.push(NodeEvent { warning: true, reason, note, regarding: Some(pod.clone()), related: None });
        }
        notes
    }

    /// Returns Events for the pods whose programs the MPS host has terminated since the last
    /// update.
    fn termination_events(&mut self, device: &str) -> Vec<NodeEvent> {
        let fresh = self.fault.ended.get(self.reported_terminations..).unwrap_or_default();
        let mut pods: Vec<&PodRef> = fresh.iter().filter_map(|client| self.pod_of_client(client)).collect();
        pods.sort_unstable();
        pods.dedup();
        let event = |pod: &PodRef| NodeEvent {
            warning: true,
            reason: "TerminatedInGpuFault",
            note: format!(
                "pod {}/{}: the pod's program did not exit after the fatal GPU error on {device} and was terminated. No program can use the GPU until all affected programs have exited.",
                pod.namespace, pod.name
            ),
            regarding: Some(pod.clone()),
            related: None,
        };
        let events = pods.into_iter().map(event).collect();
        self.reported_terminations = self.fault.ended.len();
        events
    }
}

/// Returns the cause of the fault, for the node's Event.
fn cause_for_node(culprit: Option<&Client>, pod: Option<&PodRef>, killed: bool) -> String {
    let who = match (culprit, pod) {
        (None, _) => return "a fatal GPU error of a program that MPS did not identify".to_owned(),
        (Some(client), Some(pod)) => format!("process {} of pod {}/{}", client.pid, pod.namespace, pod.name),
        (Some(client), None) => format!("process {} of an unknown pod", client.pid),
    };
    if killed {
        format!("{who} was killed while its kernels ran")
    } else {
        format!("a fatal GPU error. The MPS server's log names {who}, but it often names a neighbour")
    }
}

/// Returns the note of the Event for the culprit's pod. The culprit is a program that was killed,
/// or that the MPS server's log names.
fn note_for_culprit(killed: bool) -> &'static str {
    if killed {
        "the pod's program was killed while its kernels ran on a shared GPU, which broke the other programs on that GPU. Let programs finish their kernels after SIGTERM, and set a grace period that is long enough."
    } else {
        "the MPS server's log names the pod's program in a fatal GPU error, such as an access to memory that does not belong to the program. The error broke all \
         programs on the GPU, including this one. The log often names a neighbour of the program that caused the error. Restart the program."
    }
}

/// Returns the cause of the fault, for the Event of another affected pod (`reader`).
fn cause_for_neighbour(reader: &PodRef, culprit: Option<&Client>, pod: Option<&PodRef>, killed: bool) -> String {
    let who = match (culprit, pod) {
        (None, _) => {
            return "a fatal GPU error of an unidentified program on the GPU, possibly the pod's own".to_owned();
        }
        (Some(_), Some(pod)) if pod.namespace == reader.namespace => format!("pod {}, which shares the GPU", pod.name),
        (Some(_), _) => "another pod, which shares the GPU".to_owned(),
    };
    if killed {
        format!("the exit of a program of {who}, while its kernels ran")
    } else {
        format!("a fatal GPU error. The MPS server's log names {who}, but it often names a neighbour")
    }
}

/// Returns a text about the affected programs that names their pods.
fn affected_programs(pods: &[&PodRef], unknown: usize) -> String {
    let mut names: Vec<String> =
        pods.iter().take(MAX_NAMED_PODS).map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
    if pods.len() > MAX_NAMED_PODS {
        names.push(match pods.len() - MAX_NAMED_PODS {
            1 => "1 more pod".to_owned(),
            more => format!("{more} more pods"),
        });
    }
    let mut parts = Vec::new();
    if !names.is_empty() {
        parts.push(format!("programs of {}", names.join(", ")));
    }
    if unknown > 0 {
        parts.push(match unknown {
            1 => "1 program of an unknown pod".to_owned(),
            _ => format!("{unknown} programs of unknown pods"),
        });
    }
    if parts.is_empty() { "no programs of other pods".to_owned() } else { parts.join(" and ") }
}

#[cfg(test)]
mod tests {
    use cleave_gpu::mps::wire::{DaemonState, DaemonStatus, Enforcement, MpsHostStatus};

    use super::*;
    use crate::allocation::pending::BoundPod;
    use crate::allocation::usage::tests::{allocation, container_devices};

    /// The reported faults of a node, and the inputs of their updates.
    struct FaultTest {
        listed: Vec<ContainerDevices>,
        allocations: Allocations,
        pending: PendingAllocations,
        faults: ReportedFaults,
        now: Instant,
    }

    fn nth_slice_id(number: usize) -> String {
        format!("GPU-a::{number}")
    }

    fn nth_allocation_id(number: usize) -> String {
        allocation(&[&nth_slice_id(number)]).id()
    }

    fn client(number: usize) -> Client {
        Client { pid: 100 + u32::try_from(number).unwrap(), allocation: Some(nth_allocation_id(number)) }
    }

    fn mps_host_view(host: u32, fault: Option<Fault>) -> HostView {
        let daemon = DaemonStatus {
            state: DaemonState::Fault,
            pid: None,
            server_pid: None,
            restarts: 0,
            enforcement: Enforcement::Hard,
            holds_clients: false,
            replies_unproven: false,
            message: String::new(),
            clients: Vec::new(),
            fault,
        };
        let daemons = BTreeMap::from([("GPU-a".to_owned(), daemon)]);
        HostView { alive: true, status: MpsHostStatus { pid: host, daemons, ..MpsHostStatus::default() }, error: None }
    }

    impl FaultTest {
        /// Returns a node with these pods, each with one slice. The API server reports all pods
        /// except those in `unknown`. The MPS host has reported no fault yet.
        fn new(pods: &[(&str, &str)], unknown: &[&str]) -> Self {
            let now = Instant::now();
            let mut pending = PendingAllocations::with_watch();
            let mut rows = Vec::new();
            for (number, (namespace, name)) in pods.iter().enumerate() {
                rows.push(ContainerDevices {
                    namespace: (*namespace).to_owned(),
                    ..container_devices(name, &[&nth_slice_id(number)])
                });
                if !unknown.contains(name) {
                    pending.update_pod(bound_pod(namespace, name), now);
                }
            }
            let mut test = Self {
                listed: rows,
                allocations: Allocations::default(),
                pending,
                faults: ReportedFaults::default(),
                now,
            };
            assert_eq!(test.update(&mps_host_view(7, None)), FaultReport::default());
            test
        }

        fn update(&mut self, view: &HostView) -> FaultReport {
            let pods = PodSources { listed: &self.listed, allocations: &self.allocations, pending: &self.pending };
            self.faults.update(view, &pods, self.now)
        }

        /// Updates the faults now, and again after [`MAX_LOG_DELAY`]. Returns the second report.
        fn update_after_log_delay(&mut self, view: &HostView) -> FaultReport {
            let first = self.update(view);
            assert_eq!(
                (first.events, first.wake_after),
                (Vec::new(), Some(MAX_LOG_DELAY)),
                "the log may still name another client"
            );
            self.now += MAX_LOG_DELAY;
            self.update(view)
        }
    }

    fn bound_pod(namespace: &str, name: &str) -> BoundPod {
        BoundPod {
            uid: format!("uid-{name}"),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            terminating: false,
            admitted: true,
            requests: Vec::new(),
        }
    }

    fn fault(number: u64, culprit: Option<usize>, affected: usize) -> Fault {
        let affected = (0..affected).map(client).collect();
        Fault { number, culprit: culprit.map(client), affected, ..Fault::default() }
    }

    /// Returns the pod name, reason and note of each Event.
    fn events(report: &FaultReport) -> Vec<(Option<&str>, &str, &str)> {
        let events = report.events.iter();
        let to = events.clone().map(|event| event.regarding.as_ref().map(|pod| pod.name.as_str()));
        to.zip(events).map(|(to, event)| (to, event.reason, event.note.as_str())).collect()
    }

    #[test]
    fn each_pod_gets_one_event_that_names_no_pod_of_another_namespace() {
        let mut test = FaultTest::new(&[("ns", "bad"), ("ns", "near"), ("other", "far")], &[]);
        let report = test.update_after_log_delay(&mps_host_view(7, Some(fault(1, Some(0), 3))));
        let events = events(&report);
        assert_eq!(
            events.iter().map(|(to, reason, _)| (*to, *reason)).collect::<Vec<_>>(),
            [
                (None, "GpuFault"),
                (Some("bad"), "NamedInGpuFault"),
                (Some("near"), "BrokenByGpuFault"),
                (Some("far"), "BrokenByGpuFault"),
            ]
        );
        assert!(
            events[0].2.contains("process 100 of pod ns/bad") && events[0].2.contains("ns/near, other/far"),
            "{}",
            events[0].2
        );
        assert!(events[1].2.starts_with("pod ns/bad: the MPS server's log names the pod's program"), "{}", events[1].2);
        assert!(events[2].2.contains("names pod bad,"), "{}", events[2].2);
        assert!(events[3].2.contains("names another pod,"), "{}", events[3].2);
        for (to, _, note) in &events[1..] {
            let others = ["bad", "near", "far"].into_iter().filter(|name| Some(*name) != *to);
            let known = |name: &&str| note.contains(*name) && !(*to == Some("near") && *name == "bad");
            assert_eq!(others.filter(known).count(), 0, "{note}");
        }
        let pod = report.events[3].regarding.clone().unwrap();
        assert_eq!(pod, PodRef { namespace: "other".into(), name: "far".into(), uid: "uid-far".into() });
        assert_eq!(
            test.update(&mps_host_view(7, Some(Fault { over: true, ..fault(1, Some(0), 3) }))),
            FaultReport::default()
        );
        assert_eq!(
            test.update(&mps_host_view(7, Some(fault(2, None, 3)))).faults,
            BTreeMap::from([("GPU-a".to_owned(), 1)])
        );
    }

    #[test]
    fn no_event_names_a_cause_if_the_log_names_several_clients() {
        let mut test = FaultTest::new(&[("ns", "a"), ("ns", "b")], &[]);
        assert_eq!(test.update(&mps_host_view(7, Some(fault(1, Some(0), 2)))).events, []);
        test.now += MAX_LOG_DELAY / 2;
        // The MPS host reports no culprit if the log names two clients.
        assert_eq!(test.update(&mps_host_view(7, Some(fault(1, None, 2)))).events, []);
        let report = test.update(&mps_host_view(7, Some(Fault { over: true, ..fault(1, None, 2) })));
        let reasons: Vec<&str> = events(&report).iter().map(|event| event.1).collect();
        assert_eq!(
            reasons,
            ["GpuFault", "BrokenByGpuFault", "BrokenByGpuFault"],
            "the fault is over, so no name can follow"
        );
    }

    #[test]
    fn events_wait_for_unknown_pods_for_a_limited_time() {
        let mut test = FaultTest::new(&[("ns", "a"), ("ns", "b")], &["b"]);
        let report = test.update(&mps_host_view(7, Some(fault(1, None, 2))));
        assert_eq!((report.events.len(), report.wake_after, report.faults.len()), (0, Some(MAX_OWNER_DELAY), 1));
        test.pending.update_pod(bound_pod("ns", "b"), test.now);
        test.now += MAX_LOG_DELAY / 2;
        let report = test.update(&mps_host_view(7, Some(fault(1, None, 2))));
        assert_eq!(
            (report.events.len(), report.wake_after),
            (0, Some(MAX_LOG_DELAY / 2)),
            "the log may still name a client"
        );
        // The kubelet no longer lists the pods, but the fault has recorded them.
        test.listed.clear();
        test.now += MAX_LOG_DELAY / 2;
        let report = test.update(&mps_host_view(7, Some(fault(1, None, 2))));
        assert_eq!(events(&report).len(), 3);
        assert!(events(&report)[1].2.contains("possibly the pod's own"));
        assert_eq!(report.wake_after, None);
        // No source reports the pods of the second fault.
        test.update(&mps_host_view(7, Some(fault(2, Some(0), 2))));
        test.now += MAX_OWNER_DELAY;
        let report = test.update(&mps_host_view(7, Some(fault(2, Some(0), 2))));
        assert_eq!(events(&report).len(), 1);
        assert!(events(&report)[0].2.contains(
            "process 100 of an unknown pod, but it often names a neighbour. The fault broke 2 programs of unknown pods"
        ));
    }

    #[test]
    fn pods_of_terminated_programs_get_an_event() {
        let mut test = FaultTest::new(&[("ns", "a"), ("ns", "b")], &[]);
        test.update_after_log_delay(&mps_host_view(7, Some(fault(1, Some(0), 2))));
        let terminated =
            |clients: Vec<Client>| mps_host_view(7, Some(Fault { ended: clients, ..fault(1, Some(0), 2) }));
        let report = test.update(&terminated(vec![client(1)]));
        assert_eq!(
            events(&report).iter().map(|event| (event.0, event.1)).collect::<Vec<_>>(),
            [(Some("b"), "TerminatedInGpuFault")]
        );
        assert_eq!(test.update(&terminated(vec![client(1)])), FaultReport::default());
        assert_eq!(
            test.update(&terminated(vec![client(1), client(0)])).events[0].regarding.as_ref().unwrap().name,
            "a"
        );
    }

    #[test]
    fn a_program_killed_while_its_kernels_ran_is_the_known_cause() {
        let mut test = FaultTest::new(&[("ns", "a"), ("ns", "b")], &[]);
        let report =
            test.update_after_log_delay(&mps_host_view(7, Some(Fault { killed: true, ..fault(1, Some(0), 2) })));
        let events = events(&report);
        assert_eq!(events[1].1, "CausedGpuFault");
        assert!(events[0].2.contains("was killed while its kernels ran"), "{}", events[0].2);
        assert!(events[1].2.contains("was killed while its kernels ran"), "{}", events[1].2);
        assert!(events[2].2.contains("the exit of a program of pod a"), "{}", events[2].2);
    }

    #[test]
    fn a_new_agent_reports_only_ongoing_faults_and_a_new_mps_host_restarts_the_fault_numbers() {
        let mut test = FaultTest::new(&[("ns", "a")], &[]);
        test.faults = ReportedFaults::default();
        let over = |number| Fault { over: true, ended: vec![client(0)], ..fault(number, Some(0), 1) };
        assert_eq!(
            test.update(&mps_host_view(7, Some(over(3)))),
            FaultReport::default(),
            "an earlier agent reported it"
        );
        assert_eq!(test.update(&mps_host_view(7, Some(over(3)))), FaultReport::default());
        assert_eq!(test.update(&mps_host_view(7, Some(over(5)))).faults["GPU-a"], 2, "one was missed");
        assert_eq!(test.update(&HostView { alive: false, ..mps_host_view(8, Some(over(1))) }), FaultReport::default());
        assert_eq!(test.update(&mps_host_view(0, Some(over(1)))), FaultReport::default(), "the MPS host has stopped");
        assert_eq!(events(&test.update(&mps_host_view(8, Some(over(1))))).len(), 3);
        test.faults = ReportedFaults::default();
        assert_eq!(
            events(&test.update_after_log_delay(&mps_host_view(8, Some(fault(1, Some(0), 1))))).len(),
            2,
            "the fault is ongoing"
        );
    }

    #[test]
    fn a_second_fault_does_not_suppress_the_report_of_the_first() {
        let mut test = FaultTest::new(&[("ns", "a")], &["a"]);
        assert_eq!(events(&test.update(&mps_host_view(7, Some(fault(1, Some(0), 1))))).len(), 0);
        let report = test.update(&mps_host_view(7, Some(fault(2, Some(0), 1))));
        assert_eq!(events(&report).iter().map(|event| event.1).collect::<Vec<_>>(), ["GpuFault", "NamedInGpuFault"]);
        assert_eq!(report.wake_after, Some(MAX_OWNER_DELAY));
    }

    #[test]
    fn an_init_containers_slices_belong_to_its_pod() {
        let mut test = FaultTest::new(&[("ns", "a")], &[]);
        test.listed = vec![container_devices("a", &[&nth_slice_id(0)])];
        let first = allocation(&[&nth_slice_id(0), &nth_slice_id(1)]);
        let client = Client { pid: 1, allocation: Some(first.id()) };
        test.allocations.insert(first, test.now);
        let fault = Fault { number: 1, culprit: Some(client.clone()), affected: vec![client], ..Fault::default() };
        assert_eq!(events(&test.update_after_log_delay(&mps_host_view(7, Some(fault))))[1].0, Some("a"));
    }
}
