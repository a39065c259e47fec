//! Who left its share. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::names::finding::{MEMORY_EXCEEDED, NO_SHARE, OUTSIDE_MPS};

use super::names::Names;
use super::snapshot::{Share, Shared, TenantSnapshot};
use crate::cgroup::Owner;

/// How much more NVML may show for a container than its shares allow, MiB.
///
/// MPS and NVML count a context differently. On an H200 under driver 580 NVML shows 274 MiB for a
/// client that has allocated nothing, of which MPS counts from 57 MiB (8 SMs) to 514 (132) against
/// its limit: a client that has all that MPS lets it have shows up to 217 MiB more than its limit.
/// It is once for a container and not for each of its processes, whose contexts have to have room
/// in the share like all else.
pub const TOLERANCE_MIB: u64 = 256;

const MIB: u64 = 1 << 20;

/// What was seen of the devices that answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// Processes by device.
    pub devices: BTreeMap<String, Vec<Seen>>,
    /// UIDs of the pods that MPS daemons run in.
    pub daemon_pods: BTreeSet<String>,
}

/// A process on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// It.
    pub id: ProcessId,
    /// Memory in bytes, where the driver knows it.
    pub bytes: Option<u64>,
    /// It is an MPS client, where the driver says who is.
    pub mps: Option<bool>,
    /// Its parent's pid.
    pub parent: u32,
    /// Whose it is.
    pub owner: Option<Owner>,
}

/// A process, for as long as the node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId {
    /// Host pid.
    pub pid: u32,
    /// Clock ticks from boot to its start.
    pub start: u64,
}

/// What a container uses of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// Whose.
    pub tenant: Tenant,
    /// The device.
    pub device: String,
    /// Bytes.
    pub bytes: u64,
    /// What its shares allow, MiB; none is no limit.
    pub limit_mib: Option<u64>,
}

/// Who, as people call it; empty where that is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tenant {
    /// Namespace of the pod.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container.
    pub container: String,
}

/// What makes two suspicions the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// What it did.
    pub kind: &'static str,
    /// The device.
    pub device: String,
    /// Who did it; no pod where that is none.
    pub owner: Option<Owner>,
}

/// Somebody seems to have left its share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suspect {
    /// What, where and who.
    pub key: Key,
    /// The GPU.
    pub gpu: String,
    /// Who, as people call it.
    pub tenant: Tenant,
    /// The processes that did it.
    pub processes: BTreeSet<ProcessId>,
    /// Of these the MPS clients.
    pub clients: BTreeSet<ProcessId>,
    /// What, in words, and what to do.
    pub message: String,
}

/// What follows from a look.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judgement {
    /// What containers use.
    pub usage: Vec<Usage>,
    /// Who seems to have left its share.
    pub suspects: Vec<Suspect>,
    /// All MPS clients.
    pub clients: BTreeSet<ProcessId>,
}

/// Judges what was seen.
pub fn judge(snapshot: &TenantSnapshot, look: &Look, names: &Names) -> Judgement {
    let mut judgement = Judgement::default();
    for (device, seen) in &look.devices {
        let Some(shared) = snapshot.devices.get(device) else { continue };
        let mut groups: BTreeMap<Option<&Owner>, Vec<(&Seen, Role<'_>)>> = BTreeMap::new();
        for process in seen.iter().filter(|process| !is_daemon(process, shared, look)) {
            groups.entry(process.owner.as_ref()).or_default().push((process, role(process, shared)));
        }
        for (owner, processes) in groups {
            let clients = processes.iter().filter(|(_, role)| *role != Role::Outside);
            judgement.clients.extend(clients.map(|(seen, _)| seen.id));
            Group { snapshot, names, device, shared, owner, processes }.judge(&mut judgement);
        }
    }
    judgement
}

/// A server that its daemon started just now may not be told yet.
fn is_daemon(process: &Seen, shared: &Shared, look: &Look) -> bool {
    let of_pod = process.owner.as_ref().is_some_and(|owner| look.daemon_pods.contains(&owner.pod));
    of_pod || shared.daemon.contains(&process.id.pid) || shared.daemon.contains(&process.parent)
}

/// What a process is to the MPS daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role<'a> {
    Outside,
    /// With the allocation whose door it came through; none where it came another way.
    Client(Option<&'a str>),
    /// The MPS host has not told of it yet.
    NewClient,
}

/// The driver's word on who is a client is taken before that of MPS, to which a process may have
/// spoken that computes elsewhere.
fn role<'a>(process: &Seen, shared: &'a Shared) -> Role<'a> {
    match (process.mps, shared.clients.get(&process.id.pid)) {
        (Some(false), _) | (None, None) => Role::Outside,
        (_, Some(allocation)) => Role::Client(allocation.as_deref()),
        (Some(true), None) => Role::NewClient,
    }
}

/// The processes of one container on one device.
struct Group<'a> {
    snapshot: &'a TenantSnapshot,
    names: &'a Names,
    device: &'a str,
    shared: &'a Shared,
    owner: Option<&'a Owner>,
    processes: Vec<(&'a Seen, Role<'a>)>,
}

impl Group<'_> {
    fn judge(&self, judgement: &mut Judgement) {
        let tenant = self.tenant();
        let limit_mib = self.limit(&tenant);
        let bytes = self.processes.iter().fold(0_u64, |sum, (seen, _)| sum.saturating_add(seen.bytes.unwrap_or(0)));
        if !tenant.pod.is_empty() {
            let device = self.device.to_owned();
            judgement.usage.push(Usage { tenant: tenant.clone(), device, bytes, limit_mib });
        }
        if let Some(limit) = limit_mib.filter(|limit| bytes / MIB > limit.saturating_add(TOLERANCE_MIB)) {
            let message = format!(
                "{} uses {} MiB of {}, and its shares are of {limit} MiB: let it use less, or ask for more shares. MPS itself limits each \
                 process alone, and none that sets CUDA_MPS_PINNED_DEVICE_MEM_LIMIT to what MPS does not understand",
                who(&tenant, self.owner),
                bytes / MIB,
                self.device
            );
            judgement.suspects.push(self.suspect(MEMORY_EXCEEDED, &tenant, |_| true, message));
        }
        let outside = |role: Role<'_>| role == Role::Outside;
        if let Some(pid) = self.first(outside) {
            let message = format!(
                "process {pid} of {} computes on {} outside MPS, where neither its SMs nor its memory are limited: let it reach MPS by the \
                 CUDA_MPS_PIPE_DIRECTORY that Cleave gives to containers with shares",
                who(&tenant, self.owner),
                self.device
            );
            judgement.suspects.push(self.suspect(OUTSIDE_MPS, &tenant, outside, message));
        }
        let stranger = |role: Role<'_>| self.is_stranger(role, &tenant);
        if let Some(pid) = self.first(stranger) {
            let message = format!(
                "process {pid} of {} is an MPS client on {}, of which its pod holds no share: ask for shares, and use no other pod's",
                who(&tenant, self.owner),
                self.device
            );
            judgement.suspects.push(self.suspect(NO_SHARE, &tenant, stranger, message));
        }
    }

    fn first(&self, is: impl Fn(Role<'_>) -> bool) -> Option<u32> {
        self.processes.iter().filter(|(_, role)| is(*role)).map(|(seen, _)| seen.id.pid).min()
    }

    fn suspect(&self, kind: &'static str, tenant: &Tenant, is: impl Fn(Role<'_>) -> bool, message: String) -> Suspect {
        let those = || self.processes.iter().filter(|(_, role)| is(*role));
        Suspect {
            key: Key { kind, device: self.device.to_owned(), owner: self.owner.cloned() },
            gpu: self.shared.gpu.clone(),
            tenant: tenant.clone(),
            processes: those().map(|(seen, _)| seen.id).collect(),
            clients: those().filter(|(_, role)| *role != Role::Outside).map(|(seen, _)| seen.id).collect(),
            message,
        }
    }

    /// The allocations whose doors its clients came through.
    fn doors(&self) -> BTreeSet<&str> {
        let door = |(_, role): &(&Seen, Role<'_>)| match role {
            Role::Client(Some(_)) => true,
            Role::Client(None) | Role::Outside | Role::NewClient => false,
        };
        let through = self.processes.iter().filter(|process| door(process));
        through.filter_map(|(seen, _)| self.shared.clients.get(&seen.id.pid)?.as_deref()).collect()
    }

    fn shares(&self) -> impl Iterator<Item = &Share> {
        self.snapshot.shares.iter().flatten().filter(|share| share.device == self.device)
    }

    fn tenant(&self) -> Tenant {
        let Some((owner, pod)) = self.owner.and_then(|owner| Some((owner, self.names.get(&owner.pod)?))) else {
            return Tenant::default();
        };
        let mut tenant = Tenant { namespace: pod.namespace.clone(), pod: pod.name.clone(), container: String::new() };
        let named = owner.container.as_ref().and_then(|id| pod.containers.get(id));
        // The API server tells of a container some time after it has started; the kubelet has told
        // who holds the shares.
        let doors = self.doors();
        let by_door = || self.shares().find(|share| share.is_of(&tenant) && doors.contains(share.allocation.as_str()));
        tenant.container = named.cloned().or_else(|| Some(by_door()?.container.clone())).unwrap_or_default();
        tenant
    }

    /// What the container's shares of the device allow, MiB. The kubelet does not list what init
    /// containers hold: there it is what the doors allow that they came through, unless these are
    /// others'.
    fn limit(&self, tenant: &Tenant) -> Option<u64> {
        self.owner?;
        let own = |share: &&Share| share.is_of(tenant) && share.container == tenant.container;
        let mut allocations: BTreeSet<&str> =
            self.shares().filter(own).map(|share| share.allocation.as_str()).collect();
        if allocations.is_empty() {
            allocations = self.doors();
            allocations.retain(|id| !self.is_anothers(id, tenant));
        }
        if allocations.is_empty() {
            return None;
        }
        let limit = |id: &&str| self.snapshot.limits.get(*id).copied().flatten();
        allocations.iter().try_fold(0_u64, |sum, id| Some(sum.saturating_add(limit(id)?)))
    }

    /// Whether an allocation is one that another pod holds.
    fn is_anothers(&self, allocation: &str, tenant: &Tenant) -> bool {
        let mut holders = self.shares().filter(|share| share.allocation == allocation).peekable();
        !tenant.pod.is_empty() && holders.peek().is_some() && !holders.any(|share| share.is_of(tenant))
    }

    /// Whether it is an MPS client of a pod that holds no share of the device. Where the kubelet or
    /// the API server have not told who is who, nobody is.
    fn is_stranger(&self, role: Role<'_>, tenant: &Tenant) -> bool {
        let Role::Client(door) = role else { return false };
        if self.snapshot.shares.is_none() || tenant.pod.is_empty() || self.shares().any(|share| share.is_of(tenant)) {
            return false;
        }
        match door {
            // Its own, as far as anybody knows: an init container's, or of a pod that the kubelet
            // does not list yet.
            Some(id) => self.is_anothers(id, tenant) || !self.snapshot.limits.contains_key(id),
            None => true,
        }
    }
}

impl Share {
    fn is_of(&self, tenant: &Tenant) -> bool {
        self.namespace == tenant.namespace && self.pod == tenant.pod
    }
}

fn who(tenant: &Tenant, owner: Option<&Owner>) -> String {
    match (tenant.pod.as_str(), tenant.container.as_str(), owner) {
        ("", _, None) => "the node, and of none of its pods,".to_owned(),
        ("", _, Some(owner)) => format!("the pod with UID {}", owner.pod),
        (pod, "", _) => format!("pod {}/{pod}", tenant.namespace),
        (pod, container, _) => format!("container {container} of pod {}/{pod}", tenant.namespace),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::names::PodName;
    use super::*;

    const DEVICE: &str = "GPU-a";
    const LIMIT: u64 = 1000;

    #[expect(clippy::unnecessary_wraps, reason = "as a process has it")]
    pub(crate) fn owner(pod: &str, container: &str) -> Option<Owner> {
        Some(Owner { pod: pod.into(), container: Some(format!("id-{container}")) })
    }

    /// Of container `c` of pod `p`, an MPS client.
    fn client(pid: u32, mib: u64) -> Seen {
        Seen {
            id: ProcessId { pid, start: u64::from(pid) },
            bytes: Some(mib * MIB),
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
            device: DEVICE.into(),
            allocation: allocation.into(),
        }
    }

    /// `ns/p` and `ns/q` hold a share each; the daemon is 10, its server 11.
    fn snapshot(clients: &[(u32, Option<&str>)]) -> TenantSnapshot {
        let shared = Shared {
            gpu: DEVICE.into(),
            evict: false,
            used: true,
            daemon: [10, 11].into(),
            clients: clients.iter().map(|(pid, door)| (*pid, door.map(str::to_owned))).collect(),
        };
        TenantSnapshot {
            devices: [(DEVICE.to_owned(), shared)].into(),
            shares: Some(vec![share("p", "a"), share("q", "b")]),
            limits: [("a", Some(LIMIT)), ("b", Some(LIMIT)), ("init", Some(LIMIT * 2)), ("free", None)]
                .map(|(id, limit)| (id.to_owned(), limit))
                .into(),
        }
    }

    fn names() -> Names {
        let mut names = Names::default();
        names.begin();
        for pod in ["p", "q", "none"] {
            let containers = [("id-c".to_owned(), "c".to_owned()), ("id-d".to_owned(), "d".to_owned())].into();
            names.put(format!("uid-{pod}"), PodName { namespace: "ns".into(), name: pod.into(), containers });
        }
        names.end();
        names
    }

    fn judged(snapshot: &TenantSnapshot, seen: &[Seen]) -> Judgement {
        let look = Look { devices: [(DEVICE.to_owned(), seen.to_vec())].into(), ..Look::default() };
        judge(snapshot, &look, &names())
    }

    fn kinds(snapshot: &TenantSnapshot, seen: &[Seen]) -> Vec<(&'static str, String)> {
        judged(snapshot, seen).suspects.into_iter().map(|suspect| (suspect.key.kind, suspect.tenant.pod)).collect()
    }

    #[test]
    fn memory_is_summed_over_a_container_and_its_contexts_have_room_once() {
        let snapshot = snapshot(&[(1, Some("a")), (2, Some("a")), (3, Some("b"))]);
        let neighbour = Seen { owner: owner("uid-q", "c"), ..client(3, 900) };
        for (mib, over) in [((500, 500), false), ((LIMIT, TOLERANCE_MIB), false), ((LIMIT, TOLERANCE_MIB + 1), true)] {
            let judged = judged(&snapshot, &[client(1, mib.0), client(2, mib.1), neighbour.clone()]);
            let accused: Vec<_> = judged.suspects.iter().map(|suspect| suspect.tenant.pod.as_str()).collect();
            assert_eq!(accused, if over { vec!["p"] } else { vec![] }, "{mib:?}");
            let used: Vec<_> = judged.usage.iter().map(|usage| (usage.bytes / MIB, usage.limit_mib)).collect();
            assert_eq!(used, [(mib.0 + mib.1, Some(LIMIT)), (900, Some(LIMIT))]);
        }
        let suspects = judged(&snapshot, &[client(1, 3000)]).suspects;
        let message = &suspects[0].message;
        assert!(
            message.contains("container c of pod ns/p uses 3000 MiB of GPU-a") && message.contains("of 1000 MiB"),
            "{message}"
        );
        assert_eq!(suspects[0].clients, [ProcessId { pid: 1, start: 1 }].into());
    }

    #[test]
    fn what_a_process_holds_outside_mps_counts_too() {
        let snapshot = snapshot(&[(1, Some("a"))]);
        let outside = Seen { mps: Some(false), ..client(2, 800) };
        assert_eq!(
            kinds(&snapshot, &[client(1, 800), outside]),
            [(MEMORY_EXCEEDED, "p".to_owned()), (OUTSIDE_MPS, "p".to_owned())]
        );
    }

    #[test]
    fn memory_without_a_limit_or_that_the_driver_does_not_know_is_nobodys_fault() {
        let mut free = snapshot(&[(1, Some("free"))]);
        free.shares = Some(vec![share("p", "free")]);
        assert_eq!(kinds(&free, &[client(1, 100_000)]), []);
        assert_eq!(kinds(&snapshot(&[(1, Some("a"))]), &[Seen { bytes: None, ..client(1, 0) }]), []);
    }

    #[test]
    fn an_init_container_that_the_kubelet_does_not_list_has_what_its_door_allows() {
        let mut init = snapshot(&[(1, Some("init"))]);
        init.shares = Some(vec![share("q", "b")]);
        assert_eq!(kinds(&init, &[client(1, LIMIT * 2)]), []);
        assert_eq!(kinds(&init, &[client(1, LIMIT * 2 + TOLERANCE_MIB + 1)]), [(MEMORY_EXCEEDED, "p".to_owned())]);
        init.shares = None;
        assert_eq!(kinds(&init, &[client(1, LIMIT * 3)]), [(MEMORY_EXCEEDED, "p".to_owned())], "nor anything else");
    }

    #[test]
    fn a_container_that_the_api_server_has_not_told_of_is_known_by_its_door() {
        let snapshot = snapshot(&[(1, Some("a"))]);
        let judged = judged(&snapshot, &[Seen { owner: owner("uid-p", "new"), ..client(1, 500) }]);
        assert_eq!((judged.usage[0].tenant.container.as_str(), judged.usage[0].limit_mib), ("c", Some(LIMIT)));
        let pod = judge(
            &snapshot,
            &Look { devices: [(DEVICE.to_owned(), vec![client(1, 5000)])].into(), ..Look::default() },
            &Names::default(),
        );
        assert_eq!((pod.usage.len(), pod.suspects.len()), (0, 1), "the limit is known before the name");
        assert!(pod.suspects[0].message.contains("the pod with UID uid-p"));
    }

    #[test]
    fn daemons_and_what_they_start_are_no_tenants() {
        let snapshot = snapshot(&[]);
        let look = |of: Seen, daemon_pods: &[&str]| Look {
            devices: [(DEVICE.to_owned(), vec![Seen { mps: Some(false), ..of }])].into(),
            daemon_pods: daemon_pods.iter().map(|&pod| pod.to_owned()).collect(),
        };
        let host = || Seen { owner: owner("uid-host", "mps"), ..client(99, 66) };
        let suspected = |look: &Look| judge(&snapshot, look, &names()).suspects.len();
        assert_eq!(suspected(&look(client(11, 66), &[])), 0, "the server");
        assert_eq!(suspected(&look(Seen { parent: 10, ..host() }, &[])), 0, "one that is not told yet");
        assert_eq!(suspected(&look(host(), &["uid-host"])), 0, "one that a daemon before left");
        assert_eq!(suspected(&look(host(), &[])), 1);
    }

    #[test]
    fn the_driver_says_who_is_a_client_and_mps_only_where_it_does_not() {
        let snapshot = snapshot(&[(1, Some("a"))]);
        for (mps, listed, outside) in [
            (Some(true), true, false),
            (Some(true), false, false),
            // It has spoken with MPS, and computes elsewhere.
            (Some(false), true, true),
            (Some(false), false, true),
            (None, true, false),
            (None, false, true),
        ] {
            let process = Seen { mps, ..client(if listed { 1 } else { 2 }, 100) };
            let expected = if outside { vec![(OUTSIDE_MPS, "p".to_owned())] } else { vec![] };
            assert_eq!(kinds(&snapshot, &[process]), expected, "{mps:?} {listed}");
        }
    }

    #[test]
    fn a_process_of_no_pod_is_told_as_the_nodes() {
        let process = Seen { owner: None, mps: Some(false), ..client(7, 100) };
        let judged = judged(&snapshot(&[]), &[process]);
        assert_eq!((judged.usage.len(), judged.suspects[0].tenant.clone()), (0, Tenant::default()));
        assert!(judged.suspects[0].message.contains("process 7 of the node"), "{}", judged.suspects[0].message);
    }

    #[test]
    fn a_client_has_no_share_where_another_pods_door_let_it_in_or_none_did() {
        let of = |pod: &str, pid| Seen { owner: owner(&format!("uid-{pod}"), "c"), ..client(pid, 100) };
        let stranger = || vec![(NO_SHARE, "none".to_owned())];
        assert_eq!(kinds(&snapshot(&[(1, Some("a"))]), &[of("none", 1)]), stranger(), "the door of p");
        assert_eq!(kinds(&snapshot(&[(1, None)]), &[of("none", 1)]), stranger(), "the daemon's own socket");
        assert_eq!(kinds(&snapshot(&[(1, Some("over"))]), &[of("none", 1)]), stranger(), "a door of nobody");
        assert_eq!(kinds(&snapshot(&[(1, Some("init"))]), &[of("none", 1)]), [], "a door that may be its own");
        assert_eq!(kinds(&snapshot(&[]), &[of("none", 1)]), [], "the MPS host has not told of it yet");
        assert_eq!(kinds(&snapshot(&[(1, Some("a"))]), &[of("p", 1)]), []);
        assert_eq!(kinds(&snapshot(&[(1, None)]), &[Seen { owner: None, ..client(1, 1) }]), [], "an administrator's");
        let silent = TenantSnapshot { shares: None, ..snapshot(&[(1, Some("a"))]) };
        assert_eq!(kinds(&silent, &[of("none", 1)]), [], "the kubelet does not say who holds what");
    }

    #[test]
    fn a_device_that_is_shared_no_more_is_nobodys_matter() {
        assert_eq!(kinds(&TenantSnapshot::default(), &[client(1, 100_000)]), []);
    }
}
