//! Turns violations into findings. A finding is a violation that two consecutive samples of its
//! device show. Pure: callers pass in the time.
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_api::gpunode::FindingStatus;
use cleave_api::names::finding::{MEMORY_EXCEEDED, OUTSIDE_MPS};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::names::PodNames;
use super::violations::{Assessment, ProcessId, Violation, ViolationKey};

/// Time for which the agent reports a finding after the last sample that shows its violation. The
/// time is long enough for the operator to notice the finding, and for an intermittent violation to
/// remain one finding.
pub const FINDING_RETENTION: Duration = Duration::from_secs(10);
/// Time for which the agent reports a finding after the last sample that shows its violation, if
/// later samples do not contain its device.
const FINDING_RETENTION_WITHOUT_SAMPLES: Duration = Duration::from_secs(60);
/// Maximum number of findings in a `GpuNode`.
pub const MAX_FINDINGS: usize = 32;
/// Time for which a former MPS client is exempt from `OutsideMps`. When an MPS server exits, the
/// driver may list the server's broken clients as plain processes. The exemption must end, because
/// a process can execute another program.
const RECENT_CLIENT_EXEMPTION: Duration = Duration::from_secs(10);
/// Minimum interval between requests to terminate the same client.
const MIN_TERMINATION_INTERVAL: Duration = Duration::from_secs(10);

/// The findings of the node.
#[derive(Debug, Default)]
pub struct Findings {
    /// Violations that the previous sample shows, with the processes that caused them.
    previous: BTreeMap<ViolationKey, BTreeSet<ProcessId>>,
    confirmed: BTreeMap<ViolationKey, Finding>,
    /// Time of the last request to terminate each client.
    terminated: BTreeMap<ProcessId, Instant>,
    /// Time at which a sample last listed each process as an MPS client.
    clients: BTreeMap<ProcessId, Instant>,
}

/// A confirmed violation.
#[derive(Debug)]
struct Finding {
    status: FindingStatus,
    evict: bool,
    last_seen: Instant,
    /// Whether an Event on the pod has reported the finding.
    reported: bool,
}

/// Whether a sample has data about a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleState {
    /// The sample contains the device's processes.
    Sampled,
    /// NVML has not answered for the device yet. Unconfirmed violations of the device remain
    /// unconfirmed.
    Pending,
    /// NVML failed to answer for the device.
    Unreachable,
}

/// Actions that the caller must perform after a sample.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FindingChanges {
    /// New findings to log and count.
    pub new: Vec<FindingStatus>,
    /// Findings to report as Events on their pods.
    pub report: Vec<FindingStatus>,
    /// MPS clients to terminate, each with the UUID of its device.
    pub terminate: Vec<(String, ProcessId)>,
    /// Whether the sample shows a new violation. The next sample must then follow early to confirm
    /// the violation.
    pub confirm: bool,
}

impl Findings {
    /// Updates the findings after the assessment of a sample.
    ///
    /// `state` returns whether the sample has data about a device. `evicts` returns whether a
    /// device's policy is to evict pods that exceed their limits.
    pub fn update(
        &mut self,
        Assessment { violations, clients, .. }: Assessment,
        state: impl Fn(&str) -> SampleState,
        evicts: impl Fn(&str) -> bool,
        names: &PodNames,
        (now, time): (Instant, Timestamp),
    ) -> FindingChanges {
        let mut changes = FindingChanges::default();
        self.record_clients(clients, now);
        let previous = std::mem::take(&mut self.previous);
        let violations: Vec<Violation> =
            violations.into_iter().filter_map(|violation| self.exclude_recent_clients(violation)).collect();
        for violation in violations {
            let evict = evicts(&violation.key.device);
            self.previous.insert(violation.key.clone(), violation.processes.clone());
            if !self.confirmed.contains_key(&violation.key) && !is_confirmed(&violation, &previous) {
                changes.confirm = true;
                continue;
            }
            if evict {
                self.add_clients_to_terminate(&violation, now, &mut changes);
            }
            self.record_violation(violation, evict, (now, time), &mut changes);
        }
        let pending = |key: &ViolationKey| state(&key.device) == SampleState::Pending;
        self.previous.extend(previous.into_iter().filter(|(key, _)| pending(key)));
        self.remove_expired(state, evicts, names, now);
        self.add_findings_to_report(&mut changes);
        changes
    }

    /// Records the MPS clients of a sample, and removes expired records.
    fn record_clients(&mut self, clients: BTreeSet<ProcessId>, now: Instant) {
        self.clients.extend(clients.into_iter().map(|process| (process, now)));
        self.clients.retain(|_, at| now.saturating_duration_since(*at) < RECENT_CLIENT_EXEMPTION);
        self.terminated.retain(|_, at| now.saturating_duration_since(*at) < MIN_TERMINATION_INTERVAL);
    }

    /// Removes recent MPS clients from a violation of kind `OutsideMps`. Returns `None` if no other
    /// process remains.
    fn exclude_recent_clients(&self, mut violation: Violation) -> Option<Violation> {
        if violation.key.kind == OUTSIDE_MPS {
            violation.processes.retain(|process| !self.clients.contains_key(process));
        }
        (!violation.processes.is_empty()).then_some(violation)
    }

    /// Adds the violation's clients to the clients to terminate, except clients that the agent
    /// requested to terminate less than [`MIN_TERMINATION_INTERVAL`] ago.
    fn add_clients_to_terminate(&mut self, violation: &Violation, now: Instant, changes: &mut FindingChanges) {
        for &process in &violation.clients {
            if let Entry::Vacant(entry) = self.terminated.entry(process) {
                entry.insert(now);
                changes.terminate.push((violation.key.device.clone(), process));
            }
        }
    }

    /// Adds a confirmed violation as a finding, or updates its existing finding.
    fn record_violation(
        &mut self,
        violation: Violation,
        evict: bool,
        (now, time): (Instant, Timestamp),
        changes: &mut FindingChanges,
    ) {
        let Violation { key, gpu, tenant, processes, message, .. } = violation;
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
        let Some(finding) = self.confirmed.get_mut(&key) else {
            changes.new.push(status.clone());
            self.confirmed.insert(key, Finding { status, evict, last_seen: now, reported: false });
            return;
        };
        (finding.last_seen, finding.evict) = (now, evict);
        // The amount of memory in the message changes with every sample. To avoid a status write
        // for each sample, update the message only when the pod's name becomes known.
        if finding.status.pod.is_empty() && !status.pod.is_empty() {
            finding.status = FindingStatus { since: finding.status.since.take(), ..status };
        }
    }

    fn remove_expired(
        &mut self,
        state: impl Fn(&str) -> SampleState,
        evicts: impl Fn(&str) -> bool,
        names: &PodNames,
        now: Instant,
    ) {
        self.confirmed.retain(|key, finding| {
            let sampled = state(&key.device) == SampleState::Sampled;
            let retention = if sampled { FINDING_RETENTION } else { FINDING_RETENTION_WITHOUT_SAMPLES };
            // Keep the finding until the operator has evicted the pod, because the agent terminates
            // the clients first, which ends the violation.
            let awaits_eviction = finding.evict && evicts(&key.device) && !finding.status.uid.is_empty();
            now.saturating_duration_since(finding.last_seen) < retention
                || awaits_eviction && !names.is_pod_removed(&finding.status.uid)
        });
    }

    /// Adds the findings with known pods that no Event has reported to `changes`.
    fn add_findings_to_report(&mut self, changes: &mut FindingChanges) {
        let ready = |finding: &&mut Finding| !finding.reported && !finding.status.pod.is_empty();
        for finding in self.confirmed.values_mut().filter(ready) {
            finding.reported = true;
            changes.report.push(finding.status.clone());
        }
    }

    /// Returns the oldest [`MAX_FINDINGS`] findings, oldest first.
    pub fn statuses(&self) -> Vec<FindingStatus> {
        let mut all: Vec<FindingStatus> = self.confirmed.values().map(|finding| finding.status.clone()).collect();
        let since = |finding: &FindingStatus| finding.since.as_ref().map(|time| time.0);
        all.sort_by(|a, b| (since(a), &a.device, &a.uid, &a.kind).cmp(&(since(b), &b.device, &b.uid, &b.kind)));
        all.truncate(MAX_FINDINGS);
        all
    }

    /// Returns whether there are no findings and no unconfirmed violations.
    pub fn is_empty(&self) -> bool {
        self.confirmed.is_empty() && self.previous.is_empty()
    }
}

/// Returns whether the previous sample shows the same violation.
fn is_confirmed(violation: &Violation, previous: &BTreeMap<ViolationKey, BTreeSet<ProcessId>>) -> bool {
    previous.get(&violation.key).is_some_and(|processes| {
        // A new process can briefly look like a violation of another kind, and a container may
        // start many programs. Therefore both samples must contain the same process.
        violation.key.kind == MEMORY_EXCEEDED || !processes.is_disjoint(&violation.processes)
    })
}

#[cfg(test)]
mod tests {
    use super::super::names::PodName;
    use super::super::violations::Tenant;
    use super::super::violations::tests::owner;
    use super::*;

    struct FindingsTest {
        findings: Findings,
        names: PodNames,
        start: Instant,
        evict: bool,
        state: SampleState,
        clients: BTreeSet<ProcessId>,
    }

    impl FindingsTest {
        fn new() -> Self {
            let mut names = PodNames::default();
            names.begin_list();
            names.insert("uid-p".into(), PodName::default());
            names.end_list();
            Self {
                findings: Findings::default(),
                names,
                start: Instant::now(),
                evict: false,
                state: SampleState::Sampled,
                clients: BTreeSet::new(),
            }
        }

        /// Returns a sample `at` milliseconds after the start.
        fn sample(&mut self, at: u64, violations: Vec<Violation>) -> FindingChanges {
            let now = self.start + Duration::from_millis(at);
            let Self { evict, state, .. } = *self;
            let clients = std::mem::take(&mut self.clients);
            let assessment = Assessment { violations, clients, ..Assessment::default() };
            self.findings.update(assessment, |_| state, |_| evict, &self.names, (now, Timestamp::UNIX_EPOCH))
        }
    }

    fn violation(kind: &'static str, pid: u32, mib: u64) -> Violation {
        Violation {
            key: ViolationKey { kind, device: "GPU-a".into(), owner: owner("uid-p", "c") },
            gpu: "GPU-a".into(),
            tenant: Tenant { namespace: "ns".into(), pod: "p".into(), container: "c".into() },
            processes: [ProcessId { pid, start: 1 }].into(),
            clients: [ProcessId { pid, start: 1 }].into(),
            message: format!("uses {mib} MiB"),
        }
    }

    #[test]
    fn a_violation_in_two_samples_is_a_finding_that_is_reported_once() {
        let mut watch = FindingsTest::new();
        let first = watch.sample(0, vec![violation(MEMORY_EXCEEDED, 1, 5)]);
        assert!(
            first.confirm && first.new.is_empty() && first.report.is_empty() && watch.findings.statuses().is_empty()
        );
        let second = watch.sample(400, vec![violation(MEMORY_EXCEEDED, 1, 6)]);
        assert_eq!((second.new.len(), second.report.len(), second.confirm), (1, 1, false));
        let third = watch.sample(1400, vec![violation(MEMORY_EXCEEDED, 2, 7)]);
        assert_eq!((third.new.len(), third.report.len(), third.confirm), (0, 0, false));
        assert_eq!(
            watch.findings.statuses()[0].message,
            "uses 6 MiB",
            "a new amount of memory does not change the message"
        );
    }

    #[test]
    fn violations_of_different_new_processes_do_not_confirm_each_other() {
        let mut watch = FindingsTest::new();
        for at in 0..20 {
            let changes = watch.sample(at * 400, vec![violation(OUTSIDE_MPS, u32::try_from(at).unwrap(), 0)]);
            assert!(changes.new.is_empty() && changes.confirm, "{at}");
        }
        assert_eq!(watch.sample(9000, vec![violation(OUTSIDE_MPS, 19, 0)]).new.len(), 1);
    }

    #[test]
    fn a_former_mps_client_is_exempt_from_outside_mps_for_ten_seconds() {
        let mut watch = FindingsTest::new();
        watch.clients = [ProcessId { pid: 1, start: 1 }].into();
        watch.sample(0, vec![]);
        for at in [1000, 5000, 9900] {
            let changes = watch.sample(at, vec![violation(OUTSIDE_MPS, 1, 0)]);
            assert!(changes.new.is_empty() && !changes.confirm, "{at}");
        }
        watch.sample(10_000, vec![violation(OUTSIDE_MPS, 1, 0)]);
        assert_eq!(watch.sample(10_400, vec![violation(OUTSIDE_MPS, 1, 0)]).new.len(), 1);
    }

    #[test]
    fn a_sample_without_the_violation_resets_its_confirmation() {
        let mut watch = FindingsTest::new();
        watch.sample(0, vec![violation(MEMORY_EXCEEDED, 1, 5)]);
        watch.sample(400, vec![]);
        assert!(watch.findings.is_empty());
        assert!(watch.sample(1400, vec![violation(MEMORY_EXCEEDED, 1, 5)]).new.is_empty());
    }

    #[test]
    fn an_unconfirmed_violation_outlasts_a_pending_sample_but_not_an_unreachable_gpu() {
        for (state, new) in [(SampleState::Pending, 1), (SampleState::Unreachable, 0)] {
            let mut watch = FindingsTest::new();
            watch.sample(0, vec![violation(MEMORY_EXCEEDED, 1, 5)]);
            watch.state = state;
            watch.sample(400, vec![]);
            watch.state = SampleState::Sampled;
            assert_eq!(watch.sample(1400, vec![violation(MEMORY_EXCEEDED, 1, 5)]).new.len(), new, "{state:?}");
        }
    }

    #[test]
    fn a_finding_is_retained_longer_while_the_gpu_is_unreachable() {
        let mut watch = FindingsTest::new();
        for at in [0, 400] {
            watch.sample(at, vec![violation(MEMORY_EXCEEDED, 1, 5)]);
        }
        watch.sample(5000, vec![]);
        assert_eq!(watch.findings.statuses().len(), 1);
        watch.state = SampleState::Unreachable;
        watch.sample(20_000, vec![]);
        assert_eq!(watch.findings.statuses().len(), 1, "the GPU is unreachable");
        watch.state = SampleState::Sampled;
        watch.sample(21_000, vec![]);
        assert!(watch.findings.is_empty());
        let again = watch.sample(22_000, vec![violation(MEMORY_EXCEEDED, 1, 5)]);
        assert!(again.confirm && again.new.is_empty());
    }

    #[test]
    fn if_the_policy_evicts_clients_are_terminated_and_the_finding_remains_until_the_pod_is_removed() {
        let mut watch = FindingsTest::new();
        watch.evict = true;
        assert!(watch.sample(0, vec![violation(MEMORY_EXCEEDED, 1, 5)]).terminate.is_empty());
        let found = watch.sample(400, vec![violation(MEMORY_EXCEEDED, 1, 5)]);
        assert_eq!(found.terminate, [("GPU-a".to_owned(), ProcessId { pid: 1, start: 1 })]);
        assert!(watch.sample(1400, vec![violation(MEMORY_EXCEEDED, 1, 5)]).terminate.is_empty(), "once");
        let next_program = watch.sample(2400, vec![violation(MEMORY_EXCEEDED, 2, 5)]);
        assert_eq!(next_program.terminate.len(), 1);
        let still_running = watch.sample(13_000, vec![violation(MEMORY_EXCEEDED, 2, 5)]);
        assert_eq!(still_running.terminate.len(), 1);
        watch.sample(900_000, vec![]);
        assert_eq!(watch.findings.statuses().len(), 1, "a disruption budget may delay the eviction");
        watch.names.remove("uid-p");
        watch.sample(901_000, vec![]);
        assert!(watch.findings.is_empty());
    }

    #[test]
    fn a_finding_is_reported_on_its_pod_once_the_name_is_known() {
        let mut watch = FindingsTest::new();
        let unnamed = || Violation { tenant: Tenant::default(), ..violation(MEMORY_EXCEEDED, 1, 5) };
        watch.sample(0, vec![unnamed()]);
        let found = watch.sample(400, vec![unnamed()]);
        assert_eq!((found.new.len(), found.report.len()), (1, 0));
        assert_eq!(watch.findings.statuses()[0].uid, "uid-p");
        let named = watch.sample(1400, vec![violation(MEMORY_EXCEEDED, 1, 5)]);
        assert_eq!((named.new.len(), named.report.len()), (0, 1));
        assert_eq!(watch.findings.statuses()[0].pod, "p");
    }

    #[test]
    fn a_gpunode_contains_at_most_32_findings() {
        let mut watch = FindingsTest::new();
        let many = || {
            let one = |n: u32| {
                let mut violation = violation(MEMORY_EXCEEDED, n, 5);
                violation.key.owner = owner(&format!("uid-{n}"), "c");
                violation
            };
            (0..100).map(one).collect::<Vec<_>>()
        };
        watch.sample(0, many());
        assert_eq!(watch.sample(400, many()).new.len(), 100);
        assert_eq!(watch.findings.statuses().len(), MAX_FINDINGS);
    }
}
