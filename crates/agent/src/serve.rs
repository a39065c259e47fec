//! The resources, as the kubelet calls them: from memory, under one short lock.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_gpu::mps::wire::{Reply, Request};
use cleave_kubelet::{ContainerResponse, DeviceList, Options, PreferredRequest, Refusal, Resource};
use futures::future::BoxFuture;
use tokio::sync::{Notify, watch};

use crate::allocate::{Allocation, Denied, Handover, View, grant, prefer};
use crate::cdi;
use crate::ending::Pods as Departures;
use crate::expected::Expected;
use crate::layout::{Kind, Pool, parse_id};
use crate::metrics::{Metrics, Outcome};
use crate::mps::Link;
use crate::node::Occurrence;
use crate::tenants::names::Directory;
use crate::usage::Allocations;

/// How long a container's start waits for its door. The kubelet gives up after 30 s, and tries again.
const START: Duration = Duration::from_secs(25);

/// Between looks at the CDI specification.
const LOOK: Duration = Duration::from_millis(20);

/// How long the kubelet waits for its answer while the API server has not told of the pod that it asks for: it tells the kubelet and the
/// agent at the same time, so that the kubelet may be first, by little.
const KNOWN: Duration = Duration::from_secs(2);

/// Events that wait to be told; more at once say nothing new.
const NEWS: usize = 16;

/// What the kubelet's calls are answered from.
#[derive(Debug, Default)]
pub struct Table {
    /// Pools by resource.
    pub pools: BTreeMap<String, Vec<Pool>>,
    /// What the kubelet will ask for.
    pub expected: Expected,
    /// What was given out.
    pub allocations: Allocations,
    /// Device nodes by device.
    pub nodes: BTreeMap<String, Vec<String>>,
    /// What happened in answers, until it is told.
    pub news: Vec<Occurrence>,
}

/// What all resources share.
#[derive(Debug)]
pub struct Counter {
    table: Mutex<Table>,
    handover: Handover,
    link: Link,
    metrics: Metrics,
    /// An allocation was given out: files and status follow soon.
    pub given: Notify,
    /// A container starts: they are wanted now.
    pub starting: Notify,
    /// Changes when what is expected does.
    arrivals: watch::Sender<()>,
    /// Which pods leave.
    pub departures: watch::Sender<Departures>,
    /// The node's pods, whether they ask for anything or not.
    pub names: Directory,
}

impl Counter {
    /// With nothing to give out yet.
    pub fn new(table: Table, handover: Handover, link: Link, metrics: Metrics) -> Self {
        let (given, starting, arrivals) = (Notify::new(), Notify::new(), watch::channel(()).0);
        let departures = watch::Sender::default();
        let names = Directory::default();
        Self { table: Mutex::new(table), handover, link, metrics, given, starting, arrivals, departures, names }
    }

    /// Takes in what was told of pods.
    pub fn expect(&self, change: impl FnOnce(&mut Expected)) {
        change(&mut self.table().expected);
        self.arrivals.send_replace(());
    }

    /// Waits until a request of this size is some known pod's; not for ever.
    async fn until_known(&self, resource: &str, units: u32) {
        let mut arrivals = self.arrivals.subscribe();
        let known =
            async { while !self.table().expected.knows(resource, units) && arrivals.changed().await.is_ok() {} };
        if tokio::time::timeout(KNOWN, known).await.is_ok() {
            self.metrics.waited(true);
            return;
        }
        self.metrics.waited(false);
        self.table().expected.in_vain();
        tracing::info!(resource, units, "the API server tells of no pod that asks for as many; choosing without");
    }

    /// The table. Held for moments only, never across an await.
    pub fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give(&self, resource: &str, ids: &[String]) -> Result<(Allocation, ContainerResponse), Refusal> {
        let mut table = self.table();
        let pools = table.pools.get(resource).map(Vec::as_slice).unwrap_or_default();
        let granted = grant(&View { resource, pools, kept: &[] }, ids);
        let allocation = granted.map_err(|denied| self.denied(&mut table, resource, denied))?;
        let response = self.handover.response(&allocation, &table.nodes);
        table.allocations.give(allocation.clone(), Instant::now());
        drop(table);
        if allocation.mps.is_some()
            && let Err(error) = self.link.make_folder(&allocation.id())
        {
            // The container's start tries again, and says so there; the pod is not lost.
            tracing::error!(%error, allocation = allocation.id(), "cannot make the folder of an allocation");
        }
        self.given.notify_one();
        Ok((allocation, response))
    }

    fn denied(&self, table: &mut Table, resource: &str, denied: Denied) -> Refusal {
        match denied {
            Denied::Split(sentence) => {
                self.metrics.split(resource);
                if table.news.len() < NEWS {
                    let note = format!("a pod was refused: {sentence}");
                    table.news.push(Occurrence {
                        warning: true,
                        reason: "SharesSplit",
                        note,
                        regarding: None,
                        related: None,
                    });
                }
                self.given.notify_one();
                Refusal::Invalid(sentence)
            }
            Denied::Invalid(sentence) => Refusal::Invalid(sentence),
        }
    }

    /// The allocation of these ids; given out anew where it is not known, after a reboot or a lost checkpoint.
    fn known(&self, resource: &str, ids: &[String]) -> Result<Allocation, Refusal> {
        let known = self.table().allocations.get(&crate::allocate::allocation_id(resource, ids)).cloned();
        match known {
            Some(allocation) => Ok(allocation),
            None => self.give(resource, ids).map(|(allocation, _)| allocation),
        }
    }

    async fn ready(&self, allocation: &Allocation) -> Result<(), String> {
        if let Some(folder) = self.handover.specification() {
            // A MIG instance that was made just now may not be in it yet.
            let end = Instant::now() + START;
            while !cdi::describes(folder, &allocation.devices) {
                if Instant::now() > end {
                    return Err(format!("{} are not in the CDI specification yet", allocation.devices.join(", ")));
                }
                tokio::time::sleep(LOOK).await;
            }
        }
        if allocation.mps.is_none() {
            return Ok(());
        }
        self.starting.notify_one();
        let id = allocation.id();
        self.link.make_folder(&id).map_err(|error| format!("cannot make the folder of the shares: {error}"))?;
        let timeout_ms = u64::try_from(START.as_millis()).unwrap_or(u64::MAX);
        match self.link.ask(&Request::Await { allocation: id, timeout_ms }, START).await? {
            Reply::Done => Ok(()),
            Reply::Error { message } => Err(message),
            Reply::Status(_) | Reply::NoContext => Err("the MPS host gave another answer than was asked for".into()),
        }
    }
}

/// Whether it matters which slices are taken: they are parts of several devices, and no device is decided on.
fn has_choice(pools: &[Pool], request: &PreferredRequest<'_>) -> bool {
    let mut devices = request.available.iter().filter_map(|id| Some(parse_id(id)?.0));
    let first = devices.next();
    request.must_include.is_empty()
        && pools.iter().any(|pool| pool.kind != Kind::Whole)
        && devices.any(|device| Some(device) != first)
}

/// One resource.
#[derive(Debug)]
pub struct Served {
    resource: String,
    counter: Arc<Counter>,
    devices: watch::Sender<Arc<DeviceList>>,
}

impl Served {
    /// With its first list.
    pub fn new(resource: String, counter: Arc<Counter>, devices: DeviceList) -> Self {
        Self { resource, counter, devices: watch::Sender::new(Arc::new(devices)) }
    }

    /// Changes the list in the open stream, where it is another.
    pub fn update(&self, devices: DeviceList) {
        self.devices.send_if_modified(|list| {
            let changed = **list != devices;
            if changed {
                *list = Arc::new(devices);
            }
            changed
        });
    }

    /// Sends the same list again.
    pub fn renew(&self) {
        self.devices.send_modify(|list| *list = Arc::new(list.to_vec()));
    }
}

impl Resource for Served {
    fn devices(&self) -> watch::Receiver<Arc<DeviceList>> {
        self.devices.subscribe()
    }

    fn options(&self) -> Options {
        // The same for every resource, so that a resource that gains shares under MPS need not be registered again.
        Options { pre_start: true, preferred: true }
    }

    fn until_known<'a>(&'a self, request: &PreferredRequest<'_>) -> Option<BoxFuture<'a, ()>> {
        let units = u32::try_from(request.size).ok()?;
        let table = self.counter.table();
        let pools = table.pools.get(&self.resource)?;
        let waits = has_choice(pools, request) && !table.expected.knows(&self.resource, units);
        waits.then(|| Box::pin(self.counter.until_known(&self.resource, units)) as BoxFuture<'a, ()>)
    }

    fn preferred(&self, request: &PreferredRequest<'_>) -> Result<Vec<String>, Refusal> {
        let table = self.counter.table();
        let pools = table.pools.get(&self.resource).map(Vec::as_slice).unwrap_or_default();
        let kept = table.expected.kept(&self.resource);
        Ok(prefer(&View { resource: &self.resource, pools, kept: &kept }, request))
    }

    fn allocate(&self, ids: &[String]) -> Result<ContainerResponse, Refusal> {
        let given = self.counter.give(&self.resource, ids);
        match &given {
            Ok((allocation, _)) => {
                if let (Ok(units), [device]) = (u32::try_from(ids.len()), allocation.devices.as_slice()) {
                    self.counter.table().expected.answered(&self.resource, units, device, Instant::now());
                }
                self.counter.metrics.allocate(&self.resource, Outcome::Granted);
                tracing::info!(resource = self.resource, allocation = allocation.id(), ids = ?allocation.ids, "given out");
            }
            Err(refusal) => {
                self.counter.metrics.allocate(&self.resource, Outcome::Refused);
                tracing::warn!(resource = self.resource, %refusal, "refused");
            }
        }
        given.map(|(_, response)| response)
    }

    fn pre_start<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let began = Instant::now();
            let allocation = self.counter.known(&self.resource, ids)?;
            self.counter.ready(&allocation).await.map_err(|why| {
                tracing::warn!(
                    resource = self.resource,
                    allocation = allocation.id(),
                    why,
                    "a container's start waits"
                );
                Refusal::NotReady(format!("{}: {why}", self.resource))
            })?;
            let took_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            tracing::debug!(resource = self.resource, allocation = allocation.id(), took_us, "a container may start");
            Ok(())
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser as _;
    use cleave_gpu::mps::wire::Paths;

    use super::*;
    use crate::args::AgentArgs;
    use crate::expected::{Bound, Want};

    const MPS: &str = "nvidia.com/gpu-mps";

    pub(crate) fn counter(table: Table) -> Counter {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            args: AgentArgs,
        }
        let args = Cli::try_parse_from(["agent", "--node-name", "n"]).unwrap().args;
        Counter::new(table, Handover::new(&args), Link::new(Paths::new("/proc/none")), Metrics::new())
    }

    impl Counter {
        pub(crate) fn arrivals(&self) -> watch::Receiver<()> {
            self.arrivals.subscribe()
        }
    }

    fn pools(devices: &[&str], kind: &Kind) -> Vec<Pool> {
        let pool = |device: &&str| Pool {
            device: (*device).into(),
            resource: MPS.into(),
            first: 0,
            count: 10,
            kind: kind.clone(),
        };
        devices.iter().map(pool).collect()
    }

    fn shares() -> Kind {
        Kind::Mps { memory_mib: vec![], threads: vec![], max_clients: None }
    }

    fn served(expected: Expected, pools: Vec<Pool>) -> Served {
        let table = Table { pools: BTreeMap::from([(MPS.into(), pools)]), expected, ..Table::default() };
        Served::new(MPS.into(), Arc::new(counter(table)), Vec::new())
    }

    fn bound(name: &str, units: u32, device: &str) -> Bound {
        let want = Want {
            container: "c".into(),
            resource: MPS.into(),
            units,
            ask: 0,
            needed: units,
            held: Some(device.into()),
        };
        let (uid, namespace, name) = (name.into(), "ns".into(), name.into());
        Bound { uid, namespace, name, leaving: false, admitted: false, wants: vec![want] }
    }

    fn ids(device: &str) -> Vec<String> {
        (0..10).map(|number| format!("{device}::{number}")).collect()
    }

    fn all() -> Vec<String> {
        [ids("A"), ids("B")].concat()
    }

    fn request<'a>(available: &'a [String], must_include: &'a [String], size: usize) -> PreferredRequest<'a> {
        PreferredRequest { available, must_include, size }
    }

    #[tokio::test(start_paused = true)]
    async fn the_kubelet_waits_for_the_pod_and_no_longer() {
        let served = served(Expected::told(), pools(&["A", "B"], &shares()));
        let all = all();
        let request = request(&all, &[], 3);
        let waits = served.until_known(&request).unwrap();
        let counter = Arc::clone(&served.counter);
        let comes = async {
            tokio::task::yield_now().await;
            counter.expect(|expected| expected.pod(bound("other", 4, "A"), Instant::now()));
            tokio::task::yield_now().await;
            counter.expect(|expected| expected.pod(bound("p", 3, "B"), Instant::now()));
        };
        let started = tokio::time::Instant::now();
        tokio::join!(waits, comes);
        assert_eq!(started.elapsed(), Duration::ZERO, "the clock stands still but for timers");
        assert!(served.until_known(&request).is_none(), "it is known");
        let chosen = served.preferred(&request).unwrap();
        assert!(chosen.iter().all(|id| id.starts_with("B::")), "{chosen:?}");
        let _ = served.allocate(&chosen).unwrap();
        served.until_known(&request).unwrap().await;
        assert_eq!(started.elapsed(), KNOWN, "another of that size is not known, and its time runs out");
    }

    #[test]
    fn nobody_waits_where_there_is_nothing_to_choose_or_nobody_tells() {
        let all = all();
        let two = || pools(&["A", "B"], &shares());
        let waits = |served: &Served, request: &PreferredRequest<'_>| served.until_known(request).is_some();
        assert!(waits(&served(Expected::told(), two()), &request(&all, &[], 3)));
        assert!(!waits(&served(Expected::default(), two()), &request(&all, &[], 3)), "without an API server");
        assert!(!waits(&served(Expected::told(), two()), &request(&ids("A"), &[], 3)), "all of one device");
        assert!(
            !waits(&served(Expected::told(), two()), &request(&all, &ids("B")[..1], 3)),
            "an init container had it"
        );
        assert!(!waits(&served(Expected::told(), pools(&["A", "B"], &Kind::Whole)), &request(&all, &[], 1)));
        assert!(!waits(&served(Expected::told(), Vec::new()), &request(&[], &[], 0)));
    }

    #[test]
    fn shares_of_two_devices_are_refused_counted_and_told() {
        let served = served(Expected::told(), pools(&["A", "B"], &shares()));
        let both = ["A::0", "B::0"].map(str::to_owned);
        let refusal = served.allocate(&both).unwrap_err();
        assert!(refusal.to_string().contains("cannot be shares of 2 GPUs"), "{refusal}");
        assert!(served.allocate(&[]).is_err());
        let news = std::mem::take(&mut served.counter.table().news);
        assert_eq!(news.iter().map(|news| news.reason).collect::<Vec<_>>(), ["SharesSplit"]);
        let metrics = served.counter.metrics.encode().unwrap();
        assert!(metrics.contains("cleave_agent_splits_total{resource=\"nvidia.com/gpu-mps\"} 1"), "{metrics}");
        for _ in 0..2 * NEWS {
            let _ = served.allocate(&both);
        }
        assert_eq!(served.counter.table().news.len(), NEWS);
    }
}
