//! Looks at the processes on shared devices, each GPU on a thread of its own: one that hangs is
//! left out, and delays what is known of the others by [`PATIENCE`] once.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_gpu::nvml::{Gpus, Library, NvmlError, Worker};
use tokio::sync::mpsc;

use crate::tenants::judge::{Look, ProcessId, Seen};
use crate::tenants::process;
use crate::tenants::snapshot::TenantSnapshot;

/// How long NVML may take for a look at a GPU before it counts as silent.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long a round waits for the GPUs that it asks. What comes later belongs to the next round.
const PATIENCE: Duration = Duration::from_millis(500);

/// What a round of looks has seen.
#[derive(Debug, Default)]
pub(crate) struct Round {
    /// Devices that answered, and who uses them.
    pub(crate) look: Look,
    /// Devices of GPUs that are still being asked: what was suspected there stays so.
    pub(crate) waiting: BTreeSet<String>,
    /// GPUs that failed to answer.
    pub(crate) silent: Vec<(String, NvmlError)>,
}

struct Answer {
    gpu: String,
    look: Result<Look, NvmlError>,
}

/// The threads, by GPU. At most one call for each GPU is under way.
pub(crate) struct Looks {
    library: Library,
    proc: PathBuf,
    /// Kept also while nobody uses the GPU: a thread that is stuck must not be joined by another.
    workers: BTreeMap<String, Worker>,
    /// Devices that are being asked, by GPU.
    asked: BTreeMap<String, Vec<String>>,
    tell: mpsc::UnboundedSender<Answer>,
    answers: mpsc::UnboundedReceiver<Answer>,
}

impl Looks {
    pub(crate) fn new(library: Library, proc: PathBuf) -> Self {
        // Holds one answer for each GPU at most.
        let (tell, answers) = mpsc::unbounded_channel();
        Self { library, proc, workers: BTreeMap::new(), asked: BTreeMap::new(), tell, answers }
    }

    /// Looks at these devices, those left out whose GPU is still being asked, and gives what came
    /// in time and what came late from rounds before.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(crate) async fn round(&mut self, snapshot: &Arc<TenantSnapshot>, devices: &[String]) -> std::io::Result<Round> {
        let end = Instant::now() + PATIENCE;
        let mut mine = BTreeSet::new();
        for (gpu, devices) in by_gpu(snapshot, devices) {
            if !self.asked.contains_key(&gpu) {
                self.ask(gpu.clone(), devices, Arc::clone(snapshot))?;
                mine.insert(gpu);
            }
        }
        let mut round = Round::default();
        while !mine.is_empty() {
            match tokio::time::timeout_at(end.into(), self.answers.recv()).await {
                Ok(Some(answer)) => {
                    mine.remove(&answer.gpu);
                    self.take(answer, &mut round);
                }
                Ok(None) | Err(_) => break,
            }
        }
        while let Ok(answer) = self.answers.try_recv() {
            self.take(answer, &mut round);
        }
        round.waiting = self.asked.values().flatten().cloned().collect();
        Ok(round)
    }

    fn ask(&mut self, gpu: String, devices: Vec<String>, snapshot: Arc<TenantSnapshot>) -> std::io::Result<()> {
        let worker = match self.workers.get(&gpu) {
            Some(worker) => worker.clone(),
            None => {
                let worker = Worker::start(&self.library, format!("nvml-tenants-{}", self.workers.len()))?;
                self.workers.insert(gpu.clone(), worker.clone());
                worker
            }
        };
        self.asked.insert(gpu.clone(), devices.clone());
        let (proc, tell) = (self.proc.clone(), self.tell.clone());
        tokio::spawn(async move {
            let look = worker.call(DEADLINE, move |gpus| look(gpus, &proc, &snapshot, &devices)).await;
            // Nobody listens any more when the agent ends.
            let _ = tell.send(Answer { gpu, look });
        });
        Ok(())
    }

    fn take(&mut self, Answer { gpu, look }: Answer, round: &mut Round) {
        self.asked.remove(&gpu);
        match look {
            Ok(Look { devices, daemon_pods }) => {
                round.look.devices.extend(devices);
                round.look.daemon_pods.extend(daemon_pods);
            }
            Err(error) => round.silent.push((gpu, error)),
        }
    }
}

/// The devices of each GPU.
fn by_gpu(snapshot: &TenantSnapshot, devices: &[String]) -> BTreeMap<String, Vec<String>> {
    let mut gpus: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for device in devices {
        let gpu = snapshot.devices.get(device).map_or(device, |shared| &shared.gpu);
        gpus.entry(gpu.clone()).or_default().push(device.clone());
    }
    gpus
}

/// Looks at devices of one GPU and at the processes on them. A device that does not say its
/// processes is left out, and an error is one of the whole GPU.
fn look(gpus: &dyn Gpus, proc: &Path, snapshot: &TenantSnapshot, devices: &[String]) -> Result<Look, NvmlError> {
    let mut look = Look::default();
    let mut refused = None;
    for device in devices {
        let tenants = match gpus.device_processes(device) {
            Ok(tenants) => tenants,
            Err(error) => {
                tracing::debug!(device, error = &error as &dyn std::error::Error, "no processes are told");
                refused = Some(error);
                continue;
            }
        };
        let mut seen = Vec::new();
        for process in tenants.processes {
            match process::look(proc, process.pid) {
                Ok(Some(of)) => seen.push(Seen {
                    id: ProcessId { pid: process.pid, start: of.start },
                    bytes: process.memory,
                    mps: tenants.are_clients_known.then_some(process.mps),
                    parent: of.parent,
                    owner: of.owner,
                }),
                // It has ended.
                Ok(None) => {}
                Err(error) => tracing::debug!(pid = process.pid, %error, "nothing is known of a process"),
            }
        }
        look.devices.insert(device.clone(), seen);
    }
    match refused {
        Some(error) if look.devices.is_empty() => Err(error),
        _ => {
            look.daemon_pods = daemon_pods(proc, snapshot, devices);
            Ok(look)
        }
    }
}

fn daemon_pods(proc: &Path, snapshot: &TenantSnapshot, devices: &[String]) -> BTreeSet<String> {
    let daemons: BTreeSet<u32> = devices
        .iter()
        .filter_map(|device| snapshot.devices.get(device))
        .flat_map(|shared| &shared.daemon)
        .copied()
        .collect();
    let of = |pid: u32| process::look(proc, pid).ok().flatten()?.owner;
    daemons.into_iter().filter_map(of).map(|owner| owner.pod).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use cleave_gpu::nvml::{Census, ComputeMode, DeviceProcesses, Gpu, MigActivation, MigInstance, Process};

    use super::*;
    use crate::tenants::snapshot::Shared;

    /// `GPU-b` answers once for each word on the line.
    struct Board(Mutex<Receiver<()>>);

    impl Gpus for Board {
        fn census(&self) -> Result<Census, NvmlError> {
            Err(NvmlError::NoDriver)
        }
        fn gpu_at(&self, index: u32) -> Result<Gpu, NvmlError> {
            Err(NvmlError::NotFound(index.to_string()))
        }
        fn gpu(&self, uuid: &str) -> Result<Gpu, NvmlError> {
            Err(NvmlError::NotFound(uuid.into()))
        }
        fn processes(&self, uuid: &str) -> Result<Vec<Process>, NvmlError> {
            self.device_processes(uuid).map(|found| found.processes)
        }
        fn device_processes(&self, device: &str) -> Result<DeviceProcesses, NvmlError> {
            match device {
                "GPU-b" => self.0.lock().unwrap().recv().map_err(|_| NvmlError::Lost { call: "tenants" })?,
                "MIG-lost" => return Err(NvmlError::Lost { call: "tenants" }),
                _ => {}
            }
            Ok(DeviceProcesses { are_clients_known: true, ..DeviceProcesses::default() })
        }
        fn set_compute_mode(&self, _: &str, mode: ComputeMode) -> Result<ComputeMode, NvmlError> {
            Ok(mode)
        }
        fn set_mig_mode(&self, _: &str, _: bool) -> Result<MigActivation, NvmlError> {
            Err(NvmlError::NotSupported { call: "set" })
        }
        fn create_mig_instance(&self, _: &str, _: &str, _: u32) -> Result<MigInstance, NvmlError> {
            Err(NvmlError::NotSupported { call: "create" })
        }
        fn destroy_mig_instance(&self, _: &str, _: u32) -> Result<(), NvmlError> {
            Ok(())
        }
    }

    fn board(devices: &[(&str, &str)]) -> (Sender<()>, Looks, Arc<TenantSnapshot>, Vec<String>) {
        let (word, line) = channel();
        let board: Arc<dyn Gpus> = Arc::new(Board(Mutex::new(line)));
        let library = Library::new(move || Ok(Arc::clone(&board)));
        let shared = |gpu: &str| Shared { gpu: gpu.into(), used: true, ..Shared::default() };
        let devices = devices.iter().map(|(device, gpu)| ((*device).to_owned(), shared(gpu)));
        let snapshot = Arc::new(TenantSnapshot { devices: devices.collect(), ..TenantSnapshot::default() });
        let in_use = snapshot.in_use();
        (word, Looks::new(library, "/proc".into()), snapshot, in_use)
    }

    fn seen(round: &Round) -> Vec<&str> {
        round.look.devices.keys().map(String::as_str).collect()
    }

    #[tokio::test]
    async fn a_gpu_that_hangs_is_left_out_delays_others_once_and_is_heard_when_it_is_back() {
        let (word, mut looks, snapshot, devices) = board(&[("GPU-a", "GPU-a"), ("GPU-b", "GPU-b"), ("GPU-c", "GPU-c")]);
        let first = looks.round(&snapshot, &devices).await.unwrap();
        assert_eq!((seen(&first), first.silent.len()), (vec!["GPU-a", "GPU-c"], 0));
        assert_eq!(first.waiting, BTreeSet::from(["GPU-b".to_owned()]));
        let begun = Instant::now();
        let second = looks.round(&snapshot, &devices).await.unwrap();
        assert_eq!(seen(&second), ["GPU-a", "GPU-c"]);
        assert!(begun.elapsed() < PATIENCE, "it is not waited for again");
        // Past the deadline it is known to be silent, and still asked by one thread alone.
        let silent = loop {
            let round = looks.round(&snapshot, &devices).await.unwrap();
            assert_eq!(seen(&round), ["GPU-a", "GPU-c"]);
            if !round.silent.is_empty() {
                break round;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert!(matches!(&silent.silent[..], [(gpu, NvmlError::Hung(_))] if gpu == "GPU-b"));
        assert_eq!(looks.workers.len(), 3);
        for _ in 0..1000 {
            word.send(()).unwrap();
        }
        while seen(&looks.round(&snapshot, &devices).await.unwrap()) != ["GPU-a", "GPU-b", "GPU-c"] {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_device_that_does_not_say_its_processes_hides_no_others_of_its_gpu() {
        let (_word, mut looks, snapshot, devices) =
            board(&[("MIG-a", "GPU-m"), ("MIG-lost", "GPU-m"), ("GPU-c", "GPU-c")]);
        let round = looks.round(&snapshot, &devices).await.unwrap();
        assert_eq!((seen(&round), round.silent.len()), (vec!["GPU-c", "MIG-a"], 0));
        let (_word, mut looks, snapshot, devices) = board(&[("MIG-lost", "GPU-m")]);
        let round = looks.round(&snapshot, &devices).await.unwrap();
        assert_eq!((seen(&round).len(), round.silent.len()), (0, 1));
    }
}
