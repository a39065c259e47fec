//! Finds containers that exceed the limits of their shares or use a device outside MPS. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::names::finding::{MEMORY_EXCEEDED, NO_SHARE, OUTSIDE_MPS};

use super::names::PodNames;
use super::snapshot::{Share, SharedDevice, TenantSnapshot};
use crate::cgroup::ProcessOwner;

/// Maximum amount in MiB by which the memory that NVML reports for a container may exceed the
/// memory limit of the container's shares.
///
/// MPS and NVML count a context differently. On an H200 with driver 580, NVML shows 274 MiB for a
/// client that has allocated nothing. For the same client, MPS counts from 57 MiB (8 SMs) to 514
/// MiB (132 SMs) against its limit. For a client at its MPS limit, NVML therefore shows up to 217
/// MiB more than the limit. The tolerance applies once to each container, not to each process. The
/// contexts of the container's other processes must fit into the memory of its shares, like all
/// other memory.
pub const MEMORY_TOLERANCE_MIB: u64 = 256;

const BYTES_PER_MIB: u64 = 1 << 20;

/// The processes on the devices for which NVML answered, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessSample {
    /// Processes by device UUID.
    pub devices: BTreeMap<String, Vec<SampledProcess>>,
    /// UIDs of the pods that run MPS daemons.
    pub daemon_pods: BTreeSet<String>,
}

/// A process that uses a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampledProcess {
    /// Identity of the process.
    pub id: ProcessId,
    /// GPU memory in bytes, if the driver reports it.
    pub bytes: Option<u64>,
    /// Whether the process is an MPS client, if the driver reports it.
    pub mps: Option<bool>,
    /// PID of the parent process.
    pub parent: u32,
    /// The pod and container of the process.
    pub owner: Option<ProcessOwner>,
}

/// Identifies a process until the node reboots, even if another process reuses the PID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId {
    /// PID on the host.
    pub pid: u32,
    /// Time from boot to the start of the process, in clock ticks.
    pub start: u64,
}

/// The memory that a container uses on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantUsage {
    /// Names of the container that uses the memory.
    pub tenant: Tenant,
    /// UUID of the device.
    pub device: String,
    /// Memory in bytes.
    pub bytes: u64,
    /// Memory that the container's shares allow, in MiB. `None` means unlimited.
    pub limit_mib: Option<u64>,
}

/// The names of a container and its pod. Unknown names are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tenant {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
}

/// Identifies a violation across samples.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ViolationKey {
    /// Kind of the violation, a constant of [`cleave_api::names::finding`].
    pub kind: &'static str,
    /// UUID of the device.
    pub device: String,
    /// The container. `None` for processes that belong to no pod.
    pub owner: Option<ProcessOwner>,
}

/// A violation of a container's limits in one sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Kind, device and container.
    pub key: ViolationKey,
    /// UUID of the GPU.
    pub gpu: String,
    /// Names of the container and its pod.
    pub tenant: Tenant,
    /// The processes that cause the violation, including MPS clients.
    pub processes: BTreeSet<ProcessId>,
    /// The MPS clients among `processes`.
    pub clients: BTreeSet<ProcessId>,
    /// What happened, and what the user should do.
    pub message: String,
}

/// Result of a comparison of one sample with the limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Assessment {
    /// Memory use of each container whose pod is known.
    pub usage: Vec<TenantUsage>,
    /// Processes and containers that exceed limits or bypass MPS.
    pub violations: Vec<Violation>,
    /// All MPS clients in the sample.
    pub clients: BTreeSet<ProcessId>,
}

/// Compares a sample with the limits in `snapshot`. Ignores devices that are not in `snapshot`.
pub fn find_violations(snapshot: &TenantSnapshot, sample: &ProcessSample, names: &PodNames) -> Assessment {
    let mut assessment = Assessment::default();
    for (uuid, processes) in &sample.devices {
        let Some(device) = snapshot.devices.get(uuid) else { continue };
        let mut by_owner: BTreeMap<Option<&ProcessOwner>, Vec<(&SampledProcess, ProcessRole<'_>)>> = BTreeMap::new();
        for process in processes.iter().filter(|process| !belongs_to_daemon(process, device, sample)) {
            by_owner.entry(process.owner.as_ref()).or_default().push((process, process_role(process, device)));
        }
        for (owner, processes) in by_owner {
            let clients = processes.iter().filter(|(_, role)| *role != ProcessRole::Outside);
            assessment.clients.extend(clients.map(|(process, _)| process.id));
            ContainerOnDevice { snapshot, names, uuid, device, owner, processes }.add_to(&mut assessment);
        }
    }
    assessment
}

/// Returns whether a process is part of an MPS daemon. Also checks the parent and the pod of the
/// process, because the snapshot may not contain a new MPS server yet.
fn belongs_to_daemon(process: &SampledProcess, device: &SharedDevice, sample: &ProcessSample) -> bool {
    let in_daemon_pod = process.owner.as_ref().is_some_and(|owner| sample.daemon_pods.contains(&owner.pod));
    in_daemon_pod || device.daemon.contains(&process.id.pid) || device.daemon.contains(&process.parent)
}

/// How a process uses the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessRole<'a> {
    /// The process is not an MPS client.
    Outside,
    /// The process is an MPS client that connected through the door of this allocation. `None` if
    /// the client connected to the daemon's own socket.
    Client(Option<&'a str>),
    /// The process is an MPS client that the MPS host has not reported yet.
    NewClient,
}

/// Returns the role of a process on a device. The driver's report takes precedence over the MPS
/// host's report, because a process can connect to MPS and still compute outside MPS.
fn process_role<'a>(process: &SampledProcess, device: &'a SharedDevice) -> ProcessRole<'a> {
    match (process.mps, device.clients.get(&process.id.pid)) {
        (Some(false), _) | (None, None) => ProcessRole::Outside,
        (_, Some(allocation)) => ProcessRole::Client(allocation.as_deref()),
        (Some(true), None) => ProcessRole::NewClient,
    }
}

/// The processes of one container on one device.
struct ContainerOnDevice<'a> {
    snapshot: &'a TenantSnapshot,
    names: &'a PodNames,
    uuid: &'a str,
    device: &'a SharedDevice,
    owner: Option<&'a ProcessOwner>,
    processes: Vec<(&'a SampledProcess, ProcessRole<'a>)>,
}

impl ContainerOnDevice<'_> {
    /// Adds the memory use and the violations of the container to `assessment`.
    fn add_to(&self, assessment: &mut Assessment) {
        let tenant = self.tenant();
        let limit_mib = self.limit_mib(&tenant);
        let bytes =
            self.processes.iter().fold(0_u64, |sum, (process, _)| sum.saturating_add(process.bytes.unwrap_or(0)));
        if !tenant.pod.is_empty() {
            let device = self.uuid.to_owned();
            assessment.usage.push(TenantUsage { tenant: tenant.clone(), device, bytes, limit_mib });
        }
        if let Some(limit) =
            limit_mib.filter(|limit| bytes / BYTES_PER_MIB > limit.saturating_add(MEMORY_TOLERANCE_MIB))
        {
            let message = format!(
                "{} uses {} MiB of {}, but its shares allow {limit} MiB. Use less memory, or request more shares. \
                 MPS limits each process separately, and does not limit a process whose CUDA_MPS_PINNED_DEVICE_MEM_LIMIT is invalid",
                describe_tenant(&tenant, self.owner),
                bytes / BYTES_PER_MIB,
                self.uuid
            );
            assessment.violations.push(self.violation(MEMORY_EXCEEDED, &tenant, |_| true, message));
        }
        let outside = |role: ProcessRole<'_>| role == ProcessRole::Outside;
        if let Some(pid) = self.lowest_pid(outside) {
            let message = format!(
                "process {pid} of {} uses {} outside MPS, where neither SMs nor memory are limited. Use the CUDA_MPS_PIPE_DIRECTORY that Cleave sets in containers with shares",
                describe_tenant(&tenant, self.owner),
                self.uuid
            );
            assessment.violations.push(self.violation(OUTSIDE_MPS, &tenant, outside, message));
        }
        let without_share = |role: ProcessRole<'_>| self.is_client_without_share(role, &tenant);
        if let Some(pid) = self.lowest_pid(without_share) {
            let message = format!(
                "process {pid} of {} is an MPS client on {} without a share of that device. Request shares, and do not use the MPS socket of another pod",
                describe_tenant(&tenant, self.owner),
                self.uuid
            );
            assessment.violations.push(self.violation(NO_SHARE, &tenant, without_share, message));
        }
    }

    fn lowest_pid(&self, matches: impl Fn(ProcessRole<'_>) -> bool) -> Option<u32> {
        self.processes.iter().filter(|(_, role)| matches(*role)).map(|(process, _)| process.id.pid).min()
    }

    /// Returns a violation that the processes with a matching role cause.
    fn violation(
        &self,
        kind: &'static str,
        tenant: &Tenant,
        matches: impl Fn(ProcessRole<'_>) -> bool,
        message: String,
    ) -> Violation {
        let causes = || self.processes.iter().filter(|(_, role)| matches(*role));
        Violation {
            key: ViolationKey { kind, device: self.uuid.to_owned(), owner: self.owner.cloned() },
            gpu: self.device.gpu.clone(),
            tenant: tenant.clone(),
            processes: causes().map(|(process, _)| process.id).collect(),
            clients: causes()
                .filter(|(_, role)| *role != ProcessRole::Outside)
                .map(|(process, _)| process.id)
                .collect(),
            message,
        }
    }

    /// Returns the allocation ids of the doors that the container's clients used.
    fn doors(&self) -> BTreeSet<&str> {
        let through_doors = self.processes.iter().filter_map(|(_, role)| match role {
            ProcessRole::Client(door) => *door,
            ProcessRole::Outside | ProcessRole::NewClient => None,
        });
        through_doors.collect()
    }

    /// Returns all allocated shares of the device.
    fn shares(&self) -> impl Iterator<Item = &Share> {
        self.snapshot.shares.iter().flatten().filter(|share| share.device == self.uuid)
    }

    /// Returns the names of the container and its pod. Returns an empty [`Tenant`] if the pod is
    /// unknown.
    fn tenant(&self) -> Tenant {
        let Some((owner, pod)) = self.owner.and_then(|owner| Some((owner, self.names.get(&owner.pod)?))) else {
            return Tenant::default();
        };
        let mut tenant = Tenant { namespace: pod.namespace.clone(), pod: pod.name.clone(), container: String::new() };
        let by_id = owner.container.as_ref().and_then(|id| pod.containers.get(id));
        // The API server reports the id of a container only some time after the container's start.
        // Until then, find the container through its shares, which the kubelet lists earlier.
        let doors = self.doors();
        let by_door =
            || self.shares().find(|share| share.belongs_to(&tenant) && doors.contains(share.allocation.as_str()));
        tenant.container = by_id.cloned().or_else(|| Some(by_door()?.container.clone())).unwrap_or_default();
        tenant
    }

    /// Returns the memory in MiB that the container's shares of the device allow. `None` means
    /// unlimited.
    ///
    /// The kubelet does not list the shares of init containers. Therefore the limits of an init
    /// container are those of the doors that its clients used, except doors of other pods.
    fn limit_mib(&self, tenant: &Tenant) -> Option<u64> {
        self.owner?;
        let own = |share: &&Share| share.belongs_to(tenant) && share.container == tenant.container;
        let mut allocations: BTreeSet<&str> =
            self.shares().filter(own).map(|share| share.allocation.as_str()).collect();
        if allocations.is_empty() {
            allocations = self.doors();
            allocations.retain(|id| !self.belongs_to_another_pod(id, tenant));
        }
        if allocations.is_empty() {
            return None;
        }
        let limit = |id: &&str| self.snapshot.limits.get(*id).copied().flatten();
        allocations.iter().try_fold(0_u64, |sum, id| Some(sum.saturating_add(limit(id)?)))
    }

    fn belongs_to_another_pod(&self, allocation: &str, tenant: &Tenant) -> bool {
        let mut holders = self.shares().filter(|share| share.allocation == allocation).peekable();
        !tenant.pod.is_empty() && holders.peek().is_some() && !holders.any(|share| share.belongs_to(tenant))
    }

    /// Returns whether a process with this role is an MPS client of a pod without a share of the
    /// device. Returns false while the pod's name or the kubelet's list is unknown.
    fn is_client_without_share(&self, role: ProcessRole<'_>, tenant: &Tenant) -> bool {
        let ProcessRole::Client(door) = role else { return false };
        if self.snapshot.shares.is_none()
            || tenant.pod.is_empty()
            || self.shares().any(|share| share.belongs_to(tenant))
        {
            return false;
        }
        match door {
            // A known allocation that the kubelet does not list may belong to this pod: the pod may
            // be new, or the client may be in an init container.
            Some(id) => self.belongs_to_another_pod(id, tenant) || !self.snapshot.limits.contains_key(id),
            None => true,
        }
    }
}

impl Share {
    fn belongs_to(&self, tenant: &Tenant) -> bool {
        self.namespace == tenant.namespace && self.pod == tenant.pod
    }
}

/// Returns a text for the owner of a process, for use within a sentence.
fn describe_tenant(tenant: &Tenant, owner: Option<&ProcessOwner>) -> String {
    match (tenant.pod.as_str(), tenant.container.as_str(), owner) {
        ("", _, None) => "the host (no pod)".to_owned(),
        ("", _, Some(owner)) => format!("the pod with UID {}", owner.pod),
        (pod, "", _) => format!("pod {}/{pod}", tenant.namespace),
        (pod, container, _) => format!("container {container} of pod {}/{pod}", tenant.namespace),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::names::PodName;
    use super::*;

    const DEVICE_UUID: &str = "GPU-a";
    const LIMIT_MIB: u64 = 1000;

    #[expect(clippy::unnecessary_wraps, reason = "the field of a process has the type Option")]
    pub(crate) fn owner(pod: &str, container: &str) -> Option<ProcessOwner> {
        Some(ProcessOwner { pod: pod.into(), container: Some(format!("id-{container}")) })
    }

    /// Returns an MPS client in container `c` of pod `p`.
    fn client(pid: u32, mib: u64) -> SampledProcess {
        SampledProcess {
            id: ProcessId { pid, start: u64::from(pid) },
            bytes: Some(mib * BYTES_PER_MIB),
            mps: Some(true),
            parent: 1,
            owner: owner("uid-p", "c"),
        }
    }

    fn share(pod: &str, allocation: &str) -> Share {
        Share {
            namespace: "ns".into(),
            pod: pod.into(),
            container: "c".into(),
            device: DEVICE_UUID.into(),
            allocation: allocation.into(),
        }
    }

    /// Returns a snapshot in which pods `ns/p` and `ns/q` have one share each. The daemon's PID is
    /// 10, and the server's PID is 11.
    fn snapshot(clients: &[(u32, Option<&str>)]) -> TenantSnapshot {
        let device = SharedDevice {
            gpu: DEVICE_UUID.into(),
            evict: false,
            in_use: true,
            daemon: [10, 11].into(),
            clients: clients.iter().map(|(pid, door)| (*pid, door.map(str::to_owned))).collect(),
        };
        TenantSnapshot {
            devices: [(DEVICE_UUID.to_owned(), device)].into(),
            shares: Some(vec![share("p", "a"), share("q", "b")]),
            limits: [("a", Some(LIMIT_MIB)), ("b", Some(LIMIT_MIB)), ("init", Some(LIMIT_MIB * 2)), ("free", None)]
                .map(|(id, limit)| (id.to_owned(), limit))
                .into(),
        }
    }

    fn pod_names() -> PodNames {
        let mut names = PodNames::default();
        names.begin_list();
        for pod in ["p", "q", "none"] {
            let containers = [("id-c".to_owned(), "c".to_owned()), ("id-d".to_owned(), "d".to_owned())].into();
            names.insert(format!("uid-{pod}"), PodName { namespace: "ns".into(), name: pod.into(), containers });
        }
        names.end_list();
        names
    }

    fn process_sample(processes: &[SampledProcess]) -> ProcessSample {
        ProcessSample { devices: [(DEVICE_UUID.to_owned(), processes.to_vec())].into(), ..ProcessSample::default() }
    }

    fn assess_processes(snapshot: &TenantSnapshot, processes: &[SampledProcess]) -> Assessment {
        find_violations(snapshot, &process_sample(processes), &pod_names())
    }

    /// Returns the kind and pod of each violation.
    fn violation_kinds(snapshot: &TenantSnapshot, processes: &[SampledProcess]) -> Vec<(&'static str, String)> {
        let violations = assess_processes(snapshot, processes).violations;
        violations.into_iter().map(|violation| (violation.key.kind, violation.tenant.pod)).collect()
    }

    #[test]
    fn the_memory_of_a_container_is_summed_and_the_tolerance_applies_once() {
        let snapshot = snapshot(&[(1, Some("a")), (2, Some("a")), (3, Some("b"))]);
        let neighbour = SampledProcess { owner: owner("uid-q", "c"), ..client(3, 900) };
        for (mib, over) in [
            ((500, 500), false),
            ((LIMIT_MIB, MEMORY_TOLERANCE_MIB), false),
            ((LIMIT_MIB, MEMORY_TOLERANCE_MIB + 1), true),
        ] {
            let assessment = assess_processes(&snapshot, &[client(1, mib.0), client(2, mib.1), neighbour.clone()]);
            let pods: Vec<_> = assessment.violations.iter().map(|violation| violation.tenant.pod.as_str()).collect();
            assert_eq!(pods, if over { vec!["p"] } else { vec![] }, "{mib:?}");
            let usage: Vec<_> =
                assessment.usage.iter().map(|usage| (usage.bytes / BYTES_PER_MIB, usage.limit_mib)).collect();
            assert_eq!(usage, [(mib.0 + mib.1, Some(LIMIT_MIB)), (900, Some(LIMIT_MIB))]);
        }
        let violations = assess_processes(&snapshot, &[client(1, 3000)]).violations;
        let message = &violations[0].message;
        assert!(message.contains("container c of pod ns/p uses 3000 MiB of GPU-a"), "{message}");
        assert!(message.contains("its shares allow 1000 MiB"), "{message}");
        assert_eq!(violations[0].clients, [ProcessId { pid: 1, start: 1 }].into());
    }

    #[test]
    fn memory_used_outside_mps_counts_towards_the_limit() {
        let snapshot = snapshot(&[(1, Some("a"))]);
        let outside = SampledProcess { mps: Some(false), ..client(2, 800) };
        assert_eq!(
            violation_kinds(&snapshot, &[client(1, 800), outside]),
            [(MEMORY_EXCEEDED, "p".to_owned()), (OUTSIDE_MPS, "p".to_owned())]
        );
    }

    #[test]
    fn memory_without_a_limit_and_unknown_memory_use_are_no_violations() {
        let mut unlimited = snapshot(&[(1, Some("free"))]);
        unlimited.shares = Some(vec![share("p", "free")]);
        assert_eq!(violation_kinds(&unlimited, &[client(1, 100_000)]), []);
        let unknown = SampledProcess { bytes: None, ..client(1, 0) };
        assert_eq!(violation_kinds(&snapshot(&[(1, Some("a"))]), &[unknown]), []);
    }

    #[test]
    fn an_init_container_missing_from_the_kubelets_list_has_the_limit_of_its_door() {
        let mut init = snapshot(&[(1, Some("init"))]);
        init.shares = Some(vec![share("q", "b")]);
        assert_eq!(violation_kinds(&init, &[client(1, LIMIT_MIB * 2)]), []);
        assert_eq!(
            violation_kinds(&init, &[client(1, LIMIT_MIB * 2 + MEMORY_TOLERANCE_MIB + 1)]),
            [(MEMORY_EXCEEDED, "p".to_owned())]
        );
        init.shares = None;
        assert_eq!(
            violation_kinds(&init, &[client(1, LIMIT_MIB * 3)]),
            [(MEMORY_EXCEEDED, "p".to_owned())],
            "no list at all"
        );
    }

    #[test]
    fn a_container_without_a_known_id_is_identified_by_its_door() {
        let snapshot = snapshot(&[(1, Some("a"))]);
        let assessment =
            assess_processes(&snapshot, &[SampledProcess { owner: owner("uid-p", "new"), ..client(1, 500) }]);
        assert_eq!(
            (assessment.usage[0].tenant.container.as_str(), assessment.usage[0].limit_mib),
            ("c", Some(LIMIT_MIB))
        );
        let unnamed = find_violations(&snapshot, &process_sample(&[client(1, 5000)]), &PodNames::default());
        assert_eq!(
            (unnamed.usage.len(), unnamed.violations.len()),
            (0, 1),
            "the limit also applies to a pod without a known name"
        );
        assert!(unnamed.violations[0].message.contains("the pod with UID uid-p"));
    }

    #[test]
    fn daemons_and_their_children_are_not_tenants() {
        let snapshot = snapshot(&[]);
        let with = |process: SampledProcess, daemon_pods: &[&str]| ProcessSample {
            daemon_pods: daemon_pods.iter().map(|&pod| pod.to_owned()).collect(),
            ..process_sample(&[SampledProcess { mps: Some(false), ..process }])
        };
        let host = || SampledProcess { owner: owner("uid-host", "mps"), ..client(99, 66) };
        let violations = |sample: &ProcessSample| find_violations(&snapshot, sample, &pod_names()).violations.len();
        assert_eq!(violations(&with(client(11, 66), &[])), 0, "the server");
        assert_eq!(
            violations(&with(SampledProcess { parent: 10, ..host() }, &[])),
            0,
            "a server that the MPS host has not reported yet"
        );
        assert_eq!(violations(&with(host(), &["uid-host"])), 0, "a process of an earlier daemon");
        assert_eq!(violations(&with(host(), &[])), 1);
    }

    #[test]
    fn the_mps_hosts_client_list_applies_only_if_the_driver_does_not_report_clients() {
        let snapshot = snapshot(&[(1, Some("a"))]);
        for (mps, listed, outside) in [
            (Some(true), true, false),
            (Some(true), false, false),
            // The process is connected to MPS, but computes outside MPS.
            (Some(false), true, true),
            (Some(false), false, true),
            (None, true, false),
            (None, false, true),
        ] {
            let process = SampledProcess { mps, ..client(if listed { 1 } else { 2 }, 100) };
            let expected = if outside { vec![(OUTSIDE_MPS, "p".to_owned())] } else { vec![] };
            assert_eq!(violation_kinds(&snapshot, &[process]), expected, "{mps:?} {listed}");
        }
    }

    #[test]
    fn a_process_outside_of_pods_is_reported_as_a_process_of_the_host() {
        let process = SampledProcess { owner: None, mps: Some(false), ..client(7, 100) };
        let assessment = assess_processes(&snapshot(&[]), &[process]);
        let violation = &assessment.violations[0];
        assert_eq!((assessment.usage.len(), violation.tenant.clone()), (0, Tenant::default()));
        assert!(violation.message.contains("process 7 of the host (no pod) uses"), "{}", violation.message);
    }

    #[test]
    fn a_client_of_a_pod_without_shares_that_used_no_door_of_its_pod_is_reported() {
        let of = |pod: &str, pid| SampledProcess { owner: owner(&format!("uid-{pod}"), "c"), ..client(pid, 100) };
        let no_share = || vec![(NO_SHARE, "none".to_owned())];
        assert_eq!(violation_kinds(&snapshot(&[(1, Some("a"))]), &[of("none", 1)]), no_share(), "the door of p");
        assert_eq!(violation_kinds(&snapshot(&[(1, None)]), &[of("none", 1)]), no_share(), "the daemon's own socket");
        assert_eq!(
            violation_kinds(&snapshot(&[(1, Some("over"))]), &[of("none", 1)]),
            no_share(),
            "a removed allocation"
        );
        assert_eq!(violation_kinds(&snapshot(&[(1, Some("init"))]), &[of("none", 1)]), [], "possibly its own door");
        assert_eq!(
            violation_kinds(&snapshot(&[]), &[of("none", 1)]),
            [],
            "a client that the MPS host has not reported yet"
        );
        assert_eq!(violation_kinds(&snapshot(&[(1, Some("a"))]), &[of("p", 1)]), []);
        let administrator = SampledProcess { owner: None, ..client(1, 1) };
        assert_eq!(violation_kinds(&snapshot(&[(1, None)]), &[administrator]), [], "an administrator's client");
        let no_list = TenantSnapshot { shares: None, ..snapshot(&[(1, Some("a"))]) };
        assert_eq!(violation_kinds(&no_list, &[of("none", 1)]), [], "no list from the kubelet");
    }

    #[test]
    fn devices_that_are_not_shared_are_ignored() {
        assert_eq!(violation_kinds(&TenantSnapshot::default(), &[client(1, 100_000)]), []);
    }
}
