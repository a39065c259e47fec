//! The GPUs as far as they are known: what NVML said last, what it says no more, and XIDs. Pure: the time is an argument.
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cleave_api::gpunode::Health;
use cleave_gpu::nvml::{Gpu, Inventory, NvmlError, Process};

/// How long a GPU must answer without a further XID before it is healthy again.
///
/// Long enough for a GPU that fails under every load to show it again, short enough that one accident does not cost an hour.
pub const QUIET: Duration = Duration::from_secs(60);

/// The driver and its GPUs as they are known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hardware {
    /// The driver.
    pub driver: Driver,
    /// GPUs by UUID, those that NVML lists no more included.
    pub gpus: BTreeMap<String, KnownGpu>,
}

/// What is known of the driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Driver {
    /// NVML has not answered yet.
    #[default]
    Unknown,
    /// There is none, or it does not answer: why, in words.
    Missing(String),
    /// Its version.
    Present(String),
}

/// A GPU and how it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownGpu {
    /// As NVML described it when it last did.
    pub gpu: Gpu,
    /// Whether it can serve.
    pub health: Health,
    /// NVML has described it to this process, and not only to one before.
    pub observed: bool,
    /// Processes on it, those in its MIG instances included, as NVML last said.
    pub processes: Vec<Process>,
}

impl Hardware {
    /// GPUs in NVML's order.
    pub fn by_index(&self) -> Vec<&KnownGpu> {
        let mut gpus: Vec<&KnownGpu> = self.gpus.values().collect();
        gpus.sort_by(|a, b| (a.gpu.index, &a.gpu.uuid).cmp(&(b.gpu.index, &b.gpu.uuid)));
        gpus
    }

    /// The GPU that a GPU or MIG device is of.
    pub fn gpu_of(&self, device: &str) -> Option<&KnownGpu> {
        self.gpus.get(device).or_else(|| {
            self.gpus.values().find(|known| {
                known.gpu.mig.iter().flat_map(|mig| &mig.instances).any(|instance| instance.uuid == device)
            })
        })
    }
}

/// Gathers what becomes [`Hardware`].
#[derive(Debug, Default)]
pub struct Book {
    driver: Driver,
    gpus: BTreeMap<String, Entry>,
    /// The GPUs are those of an earlier boot: what NVML does not list was taken out of the machine.
    earlier_boot: bool,
}

#[derive(Debug)]
struct Entry {
    gpu: Gpu,
    observed: bool,
    processes: Vec<Process>,
    /// Why NVML cannot ask it.
    lost: Option<(&'static str, String)>,
    /// The last XID that counts, and when.
    xid: Option<(u64, Instant)>,
}

impl Book {
    /// Starts with the GPUs of a checkpoint, which count as healthy until NVML says otherwise: pods may start before it has answered.
    pub fn remembering(gpus: Vec<Gpu>, same_boot: bool) -> Self {
        let entry =
            |gpu: Gpu| (gpu.uuid.clone(), Entry { gpu, observed: false, processes: Vec::new(), lost: None, xid: None });
        Self { driver: Driver::Unknown, gpus: gpus.into_iter().map(entry).collect(), earlier_boot: !same_boot }
    }

    /// Takes in what NVML answered.
    pub fn observe(&mut self, answer: Result<Inventory, NvmlError>) {
        let inventory = match answer {
            Ok(inventory) => inventory,
            Err(error) => {
                let message = chain(&error);
                for entry in self.gpus.values_mut() {
                    entry.lost = Some(("DriverUnavailable", message.clone()));
                }
                self.driver = Driver::Missing(message);
                return;
            }
        };
        let Inventory { driver, gpus, mut processes } = inventory;
        self.driver = Driver::Present(driver);
        let seen: Vec<String> = gpus.values().flatten().map(|gpu| gpu.uuid.clone()).collect();
        if std::mem::take(&mut self.earlier_boot) && gpus.values().all(Result::is_ok) {
            self.gpus.retain(|uuid, _| seen.contains(uuid));
        }
        for (uuid, entry) in &mut self.gpus {
            if !seen.contains(uuid) {
                let why = gpus.get(&entry.gpu.index).and_then(|gpu| gpu.as_ref().err()).map(|error| chain(error));
                entry.lost = Some(("GpuLost", why.unwrap_or_else(|| "NVML does not list it any more".into())));
            }
        }
        for (index, result) in gpus {
            match result {
                Ok(gpu) => {
                    let processes = processes.remove(&gpu.uuid).unwrap_or_default();
                    self.see(gpu, processes);
                }
                // One that was never seen has no UUID, and nothing is served of it.
                Err(error) => tracing::debug!(index, error = &error as &dyn std::error::Error, "a GPU does not answer"),
            }
        }
    }

    /// Takes in what NVML says of one GPU.
    pub fn see(&mut self, gpu: Gpu, processes: Vec<Process>) {
        match self.gpus.get_mut(&gpu.uuid) {
            Some(entry) => {
                // Lost and back: it was reset, and what it had is over.
                if entry.lost.take().is_some() {
                    entry.xid = None;
                }
                (entry.gpu, entry.observed, entry.processes) = (gpu, true, processes);
            }
            None => {
                self.gpus.insert(gpu.uuid.clone(), Entry { gpu, observed: true, processes, lost: None, xid: None });
            }
        }
    }

    /// A GPU as it was described last.
    pub fn known(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.get(uuid).map(|entry| &entry.gpu)
    }

    /// Takes in an XID that says something about the GPU.
    pub fn xid(&mut self, uuid: &str, xid: u64, now: Instant) {
        if let Some(entry) = self.gpus.get_mut(uuid) {
            entry.xid = Some((xid, now));
        }
    }

    /// What is known now.
    pub fn hardware(&self, now: Instant) -> Hardware {
        let known = |entry: &Entry| {
            let health = match (&entry.lost, entry.xid) {
                (Some((reason, message)), _) => unhealthy(reason, message.clone()),
                (None, Some((xid, at))) if now.saturating_duration_since(at) < QUIET => unhealthy(
                    "XidError",
                    format!("XID {xid}; healthy again after {} s without another", QUIET.as_secs()),
                ),
                (None, _) => Health { healthy: true, ..Health::default() },
            };
            let Entry { gpu, observed, processes, .. } = entry;
            KnownGpu { gpu: gpu.clone(), health, observed: *observed, processes: processes.clone() }
        };
        Hardware {
            driver: self.driver.clone(),
            gpus: self.gpus.iter().map(|(uuid, entry)| (uuid.clone(), known(entry))).collect(),
        }
    }
}

fn unhealthy(reason: &str, message: String) -> Health {
    Health { healthy: false, reason: reason.to_owned(), message }
}

/// An error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::tests::gpu;

    #[expect(clippy::unnecessary_wraps, reason = "an answer, as NVML gives it")]
    fn inventory(gpus: Vec<(u32, Result<Gpu, NvmlError>)>) -> Result<Inventory, NvmlError> {
        let gpus = gpus.into_iter().collect();
        Ok(Inventory { driver: "580.159".into(), gpus, processes: BTreeMap::new() })
    }

    fn reason(hardware: &Hardware, uuid: &str) -> String {
        hardware.gpus[uuid].health.reason.clone()
    }

    #[test]
    fn one_lost_gpu_is_one_lost_gpu_and_comes_back() {
        let now = Instant::now();
        let mut book = Book::default();
        book.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-b", 1)))]));
        book.xid("GPU-b", 79, now);
        book.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Err(NvmlError::Lost { call: "x" }))]));
        let hardware = book.hardware(now);
        assert!(hardware.gpus["GPU-a"].health.healthy);
        assert_eq!(reason(&hardware, "GPU-b"), "GpuLost");
        assert_eq!(hardware.by_index()[1].gpu.model, "NVIDIA H200", "still described");
        book.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-b", 1)))]));
        assert!(book.hardware(now).gpus["GPU-b"].health.healthy, "a reset ends the XID too");
    }

    #[test]
    fn a_gpu_that_vanishes_from_the_list_is_lost_not_forgotten() {
        let mut book = Book::default();
        book.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-b", 1)))]));
        book.observe(inventory(vec![(0, Ok(gpu("GPU-b", 0)))]));
        let hardware = book.hardware(Instant::now());
        assert_eq!(reason(&hardware, "GPU-a"), "GpuLost");
        assert_eq!(hardware.gpus["GPU-b"].gpu.index, 0);
    }

    #[test]
    fn an_xid_ends_after_a_quiet_time_and_a_second_one_starts_it_anew() {
        let start = Instant::now();
        let mut book = Book::remembering(vec![gpu("GPU-a", 0), gpu("GPU-b", 1)], true);
        book.xid("GPU-a", 48, start);
        book.xid("GPU-none", 48, start);
        assert_eq!(reason(&book.hardware(start), "GPU-a"), "XidError");
        assert!(book.hardware(start).gpus["GPU-b"].health.healthy);
        book.xid("GPU-a", 48, start + QUIET / 2);
        assert!(!book.hardware(start + QUIET).gpus["GPU-a"].health.healthy);
        assert!(book.hardware(start + QUIET / 2 + QUIET).gpus["GPU-a"].health.healthy);
    }

    #[test]
    fn a_driver_that_goes_takes_every_gpu_and_a_driver_that_comes_brings_them() {
        let mut book = Book::remembering(vec![gpu("GPU-a", 0)], true);
        assert!(
            book.hardware(Instant::now()).gpus["GPU-a"].health.healthy,
            "the checkpoint is believed until NVML answers"
        );
        book.observe(Err(NvmlError::NoDriver));
        let hardware = book.hardware(Instant::now());
        assert_eq!(reason(&hardware, "GPU-a"), "DriverUnavailable");
        assert_eq!(hardware.driver, Driver::Missing("the NVIDIA driver is not loaded".into()));
        book.observe(inventory(vec![(0, Ok(gpu("GPU-a", 0)))]));
        assert!(book.hardware(Instant::now()).gpus["GPU-a"].health.healthy);
    }

    #[test]
    fn after_a_reboot_a_gpu_that_is_not_there_was_taken_out() {
        let listed = || inventory(vec![(0, Ok(gpu("GPU-a", 0)))]);
        let checkpoint = || vec![gpu("GPU-a", 0), gpu("GPU-b", 1)];
        let mut book = Book::remembering(checkpoint(), false);
        book.observe(listed());
        assert_eq!(book.hardware(Instant::now()).gpus.len(), 1);
        let mut book = Book::remembering(checkpoint(), true);
        book.observe(listed());
        assert_eq!(reason(&book.hardware(Instant::now()), "GPU-b"), "GpuLost");
    }
}
