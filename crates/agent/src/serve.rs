//! The resources, as the kubelet calls them: from memory, under one short lock.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_api::gpunode::Reservation;
use cleave_gpu::mps::wire::{Reply, Request};
use cleave_kubelet::{ContainerResponse, DeviceList, Options, PreferredRequest, Refusal, Resource};
use futures::future::BoxFuture;
use tokio::sync::{Notify, watch};

use crate::allocate::{Allocation, Handover, View, grant, prefer};
use crate::cdi;
use crate::layout::Pool;
use crate::metrics::{Metrics, Outcome};
use crate::mps::Link;
use crate::usage::Allocations;

/// How long a container's start waits for its door. The kubelet gives up after 30 s, and tries again.
const START: Duration = Duration::from_secs(25);

/// Between looks at the CDI specification.
const LOOK: Duration = Duration::from_millis(20);

/// What the kubelet's calls are answered from.
#[derive(Debug, Default)]
pub struct Table {
    /// Pools by resource.
    pub pools: BTreeMap<String, Vec<Pool>>,
    /// Held for pods that have not come yet.
    pub reservations: Vec<Reservation>,
    /// What was given out.
    pub allocations: Allocations,
    /// Device nodes by device.
    pub nodes: BTreeMap<String, Vec<String>>,
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
}

impl Counter {
    /// With nothing to give out yet.
    pub fn new(table: Table, handover: Handover, link: Link, metrics: Metrics) -> Self {
        Self { table: Mutex::new(table), handover, link, metrics, given: Notify::new(), starting: Notify::new() }
    }

    /// The table. Held for moments only, never across an await.
    pub fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give(&self, resource: &str, ids: &[String]) -> Result<(Allocation, ContainerResponse), Refusal> {
        let mut table = self.table();
        let pools = table.pools.get(resource).map(Vec::as_slice).unwrap_or_default();
        let view = View { resource, pools, reservations: &table.reservations };
        let allocation = grant(&view, ids).map_err(Refusal::Invalid)?;
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
            Reply::Status(_) => Err("the MPS host gave another answer than was asked for".into()),
        }
    }
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
}

impl Resource for Served {
    fn devices(&self) -> watch::Receiver<Arc<DeviceList>> {
        self.devices.subscribe()
    }

    fn options(&self) -> Options {
        // The same for every resource, so that a resource that gains shares under MPS need not be registered again.
        Options { pre_start: true, preferred: true }
    }

    fn preferred(&self, request: &PreferredRequest<'_>) -> Result<Vec<String>, Refusal> {
        let table = self.counter.table();
        let pools = table.pools.get(&self.resource).map(Vec::as_slice).unwrap_or_default();
        Ok(prefer(&View { resource: &self.resource, pools, reservations: &table.reservations }, request))
    }

    fn allocate(&self, ids: &[String]) -> Result<ContainerResponse, Refusal> {
        let given = self.counter.give(&self.resource, ids);
        match &given {
            Ok((allocation, _)) => {
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
            let allocation = self.counter.known(&self.resource, ids)?;
            self.counter.ready(&allocation).await.map_err(|why| {
                tracing::warn!(
                    resource = self.resource,
                    allocation = allocation.id(),
                    why,
                    "a container's start waits"
                );
                Refusal::NotReady(format!("{}: {why}", self.resource))
            })
        })
    }
}
