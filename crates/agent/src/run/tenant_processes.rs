//! Lists the processes on shared devices, on a separate thread for each GPU. A GPU that hangs
//! delays the other GPUs only in one round, by [`ROUND_TIMEOUT`]. Later rounds omit the GPU.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_gpu::nvml::{Gpus, Library, NvmlError, Worker};
use tokio::sync::mpsc;

use crate::tenants::process;
use crate::tenants::snapshot::TenantSnapshot;
use crate::tenants::violations::{ProcessId, ProcessSample, SampledProcess};

/// Deadline for NVML's answer about a GPU.
const GPU_CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time that a round waits for answers. A later answer belongs to the next round.
const ROUND_TIMEOUT: Duration = Duration::from_millis(500);

/// Result of a round.
#[derive(Debug, Default)]
pub(crate) struct SampleRound {
    /// The processes on the devices that answered.
    pub(crate) sample: ProcessSample,
    /// Devices of GPUs for which NVML has not answered yet. Suspected violations on these devices
    /// remain suspected.
    pub(crate) waiting: BTreeSet<String>,
    /// UUIDs of the GPUs for which the query failed, each with the error.
    pub(crate) unreachable: Vec<(String, NvmlError)>,
}

/// Result of the query of one GPU.
struct GpuAnswer {
    gpu: String,
    sample: Result<ProcessSample, NvmlError>,
}

/// Queries the processes on GPUs. Each GPU has at most one call in progress.
pub(crate) struct ProcessObserver {
    library: Library,
    proc: PathBuf,
    /// Worker threads, by UUID of the GPU. A worker is kept even while its GPU is unused, because
    /// otherwise a second thread could block on the same GPU.
    workers: BTreeMap<String, Worker>,
    /// Devices that are being queried, by UUID of the GPU.
    in_progress: BTreeMap<String, Vec<String>>,
    sender: mpsc::UnboundedSender<GpuAnswer>,
    answers: mpsc::UnboundedReceiver<GpuAnswer>,
}

impl ProcessObserver {
    pub(crate) fn new(library: Library, proc: PathBuf) -> Self {
        // The channel contains at most one answer for each GPU, so it needs no limit.
        let (sender, answers) = mpsc::unbounded_channel();
        Self { library, proc, workers: BTreeMap::new(), in_progress: BTreeMap::new(), sender, answers }
    }

    /// Queries the processes on these devices, except on GPUs that are still being queried. Returns
    /// the answers that arrived in time, and late answers of earlier rounds.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be started.
    pub(crate) async fn run_round(
        &mut self,
        snapshot: &Arc<TenantSnapshot>,
        devices: &[String],
    ) -> std::io::Result<SampleRound> {
        let end = Instant::now() + ROUND_TIMEOUT;
        let mut queried = BTreeSet::new();
        for (gpu, devices) in group_by_gpu(snapshot, devices) {
            if !self.in_progress.contains_key(&gpu) {
                self.start_query(gpu.clone(), devices, Arc::clone(snapshot))?;
                queried.insert(gpu);
            }
        }
        let mut round = SampleRound::default();
        while !queried.is_empty() {
            match tokio::time::timeout_at(end.into(), self.answers.recv()).await {
                Ok(Some(answer)) => {
                    queried.remove(&answer.gpu);
                    self.record_answer(answer, &mut round);
                }
                Ok(None) | Err(_) => break,
            }
        }
        while let Ok(answer) = self.answers.try_recv() {
            self.record_answer(answer, &mut round);
        }
        round.waiting = self.in_progress.values().flatten().cloned().collect();
        Ok(round)
    }

    /// Requests the processes of a GPU from its worker thread, and starts the thread on first use.
    fn start_query(&mut self, gpu: String, devices: Vec<String>, snapshot: Arc<TenantSnapshot>) -> std::io::Result<()> {
        let worker = match self.workers.get(&gpu) {
            Some(worker) => worker.clone(),
            None => {
                let worker = Worker::start(&self.library, format!("nvml-tenants-{}", self.workers.len()))?;
                self.workers.insert(gpu.clone(), worker.clone());
                worker
            }
        };
        self.in_progress.insert(gpu.clone(), devices.clone());
        let (proc, sender) = (self.proc.clone(), self.sender.clone());
        tokio::spawn(async move {
            let sample =
                worker.call(GPU_CALL_TIMEOUT, move |gpus| sample_processes(gpus, &proc, &snapshot, &devices)).await;
            // Ignore errors, because the channel is closed only when the agent ends.
            let _ = sender.send(GpuAnswer { gpu, sample });
        });
        Ok(())
    }

    /// Adds a GPU's answer to the round.
    fn record_answer(&mut self, GpuAnswer { gpu, sample }: GpuAnswer, round: &mut SampleRound) {
        self.in_progress.remove(&gpu);
        match sample {
            Ok(ProcessSample { devices, daemon_pods }) => {
                round.sample.devices.extend(devices);
                round.sample.daemon_pods.extend(daemon_pods);
            }
            // Ignore errors of this process: NVML is briefly closed, a GPU is quiesced, or this
            // process has no free file descriptor.
            Err(error) if error.is_caused_by_this_process() => {}
            Err(error) => round.unreachable.push((gpu, error)),
        }
    }
}

/// Groups devices by the UUID of their GPU.
fn group_by_gpu(snapshot: &TenantSnapshot, devices: &[String]) -> BTreeMap<String, Vec<String>> {
    let mut gpus: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for device in devices {
        let gpu = snapshot.devices.get(device).map_or(device, |shared| &shared.gpu);
        gpus.entry(gpu.clone()).or_default().push(device.clone());
    }
    gpus
}

/// Lists the processes on devices of one GPU. Omits devices for which the call fails. Returns the
/// last error if all calls fail.
fn sample_processes(
    gpus: &dyn Gpus,
    proc: &Path,
    snapshot: &TenantSnapshot,
    devices: &[String],
) -> Result<ProcessSample, NvmlError> {
    let mut sample = ProcessSample::default();
    let mut refused = None;
    for device in devices {
        let tenants = match gpus.device_processes(device) {
            Ok(tenants) => tenants,
            Err(error) => {
                tracing::debug!(
                    device,
                    error = &error as &dyn std::error::Error,
                    "failed to list the processes on a device"
                );
                refused = Some(error);
                continue;
            }
        };
        let mut seen = Vec::new();
        for process in tenants.processes {
            match process::read_process(proc, process.pid) {
                Ok(Some(of)) => seen.push(SampledProcess {
                    id: ProcessId { pid: process.pid, start: of.start },
                    bytes: process.memory,
                    mps: tenants.are_clients_known.then_some(process.mps),
                    parent: of.parent,
                    owner: of.owner,
                }),
                // The process has exited.
                Ok(None) => {}
                Err(error) => tracing::debug!(pid = process.pid, %error, "failed to read a process"),
            }
        }
        sample.devices.insert(device.clone(), seen);
    }
    match refused {
        Some(error) if sample.devices.is_empty() => Err(error),
        _ => {
            sample.daemon_pods = daemon_pods(proc, snapshot, devices);
            Ok(sample)
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
    let of = |pid: u32| process::read_process(proc, pid).ok().flatten()?.owner;
    daemons.into_iter().filter_map(of).map(|owner| owner.pod).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use cleave_gpu::nvml::DeviceProcesses;

    use super::*;
    use crate::tenants::snapshot::SharedDevice;

    /// A simulated NVML. The query of `GPU-b` waits for a message in the channel, and the query of
    /// `MIG-lost` fails.
    struct FakeNvml(Mutex<Receiver<()>>);

    impl Gpus for FakeNvml {
        fn device_processes(&self, device: &str) -> Result<DeviceProcesses, NvmlError> {
            match device {
                "GPU-b" => self.0.lock().unwrap().recv().map_err(|_| NvmlError::Lost { call: "tenants" })?,
                "MIG-lost" => return Err(NvmlError::Lost { call: "tenants" }),
                _ => {}
            }
            Ok(DeviceProcesses { are_clients_known: true, ..DeviceProcesses::default() })
        }
    }

    fn fake_nvml(devices: &[(&str, &str)]) -> (Sender<()>, ProcessObserver, Arc<TenantSnapshot>, Vec<String>) {
        let (trigger, answers) = channel();
        let nvml: Arc<dyn Gpus> = Arc::new(FakeNvml(Mutex::new(answers)));
        let library = Library::new(move || Ok(Arc::clone(&nvml)));
        let shared = |gpu: &str| SharedDevice { gpu: gpu.into(), in_use: true, ..SharedDevice::default() };
        let devices = devices.iter().map(|(device, gpu)| ((*device).to_owned(), shared(gpu)));
        let snapshot = Arc::new(TenantSnapshot { devices: devices.collect(), ..TenantSnapshot::default() });
        let in_use = snapshot.devices_in_use();
        (trigger, ProcessObserver::new(library, "/proc".into()), snapshot, in_use)
    }

    fn sampled_devices(round: &SampleRound) -> Vec<&str> {
        round.sample.devices.keys().map(String::as_str).collect()
    }

    #[tokio::test]
    async fn a_gpu_that_hangs_is_omitted_until_it_answers_and_delays_other_gpus_only_once() {
        let (trigger, mut observer, snapshot, devices) =
            fake_nvml(&[("GPU-a", "GPU-a"), ("GPU-b", "GPU-b"), ("GPU-c", "GPU-c")]);
        let first = observer.run_round(&snapshot, &devices).await.unwrap();
        assert_eq!((sampled_devices(&first), first.unreachable.len()), (vec!["GPU-a", "GPU-c"], 0));
        assert_eq!(first.waiting, BTreeSet::from(["GPU-b".to_owned()]));
        let begun = Instant::now();
        let second = observer.run_round(&snapshot, &devices).await.unwrap();
        assert_eq!(sampled_devices(&second), ["GPU-a", "GPU-c"]);
        assert!(begun.elapsed() < ROUND_TIMEOUT, "the second round does not wait for the GPU that hangs");
        // After the deadline, the call fails. Even after the deadline, only one thread queries the
        // GPU.
        let unreachable = loop {
            let round = observer.run_round(&snapshot, &devices).await.unwrap();
            assert_eq!(sampled_devices(&round), ["GPU-a", "GPU-c"]);
            if !round.unreachable.is_empty() {
                break round;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert!(matches!(&unreachable.unreachable[..], [(gpu, NvmlError::Hung(_))] if gpu == "GPU-b"));
        assert_eq!(observer.workers.len(), 3);
        for _ in 0..1000 {
            trigger.send(()).unwrap();
        }
        while sampled_devices(&observer.run_round(&snapshot, &devices).await.unwrap()) != ["GPU-a", "GPU-b", "GPU-c"] {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_failing_device_does_not_hide_other_devices_of_its_gpu() {
        let (_trigger, mut observer, snapshot, devices) =
            fake_nvml(&[("MIG-a", "GPU-m"), ("MIG-lost", "GPU-m"), ("GPU-c", "GPU-c")]);
        let round = observer.run_round(&snapshot, &devices).await.unwrap();
        assert_eq!((sampled_devices(&round), round.unreachable.len()), (vec!["GPU-c", "MIG-a"], 0));
        let (_trigger, mut observer, snapshot, devices) = fake_nvml(&[("MIG-lost", "GPU-m")]);
        let round = observer.run_round(&snapshot, &devices).await.unwrap();
        assert_eq!((sampled_devices(&round).len(), round.unreachable.len()), (0, 1));
    }
}
