//! Queries the sensors of GPUs only when Prometheus scrapes the metrics. From the first scrape on,
//! each GPU has its own worker thread for its sensors. A GPU that hangs therefore delays only one
//! scrape, by [`GPU_CALL_TIMEOUT`], and no other call.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_gpu::nvml::{GpuReadings, Library, NvmlError, Worker};
use futures::future::join_all;

use crate::metrics::Metrics;

/// Deadline for NVML's answer about a GPU. The deadline is well below Prometheus's default timeout
/// of 10 s.
const GPU_CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Minimum time between two queries. Further scrapes within this time, for example by a second
/// Prometheus, report the same values.
const MIN_QUERY_INTERVAL: Duration = Duration::from_secs(1);

/// Queries the sensors of the node's GPUs and updates the metrics.
#[derive(Debug)]
pub(super) struct GpuSensors {
    library: Library,
    metrics: Metrics,
    /// Locked during a query, so that concurrent scrapes share the answers.
    state: tokio::sync::Mutex<SensorState>,
}

#[derive(Debug, Default)]
struct SensorState {
    workers: BTreeMap<String, Worker>,
    queried_at: Option<Instant>,
}

impl GpuSensors {
    pub(super) fn new(library: Library, metrics: Metrics) -> Self {
        Self { library, metrics, state: tokio::sync::Mutex::default() }
    }

    /// Queries all GPUs, unless the last query ended less than [`MIN_QUERY_INTERVAL`] ago. The
    /// query continues if the caller stops waiting. If the query ended with the caller, a GPU that
    /// hangs would never miss its deadline when Prometheus gives up earlier, and would delay each
    /// scrape.
    pub(super) async fn refresh(self: &Arc<Self>) {
        let sensors = Arc::clone(self);
        if let Err(error) = tokio::spawn(async move { sensors.query_gpus().await }).await {
            tracing::warn!(%error, "failed to query the sensors of GPUs");
        }
    }

    async fn query_gpus(&self) {
        let mut state = self.state.lock().await;
        if state.queried_at.is_some_and(|at| at.elapsed() < MIN_QUERY_INTERVAL) {
            return;
        }
        let gpus = self.metrics.gpu_uuids();
        state.workers.retain(|uuid, _| gpus.contains(uuid));
        for uuid in &gpus {
            if !state.workers.contains_key(uuid) {
                match Worker::start(&self.library, format!("nvml-sensor-{}", state.workers.len())) {
                    Ok(worker) => drop(state.workers.insert(uuid.clone(), worker)),
                    Err(error) => tracing::warn!(uuid, %error, "failed to start the thread of a GPU's sensors"),
                }
            }
        }
        let answers = join_all(state.workers.iter().map(|(uuid, worker)| read_sensors(uuid, worker))).await;
        for (uuid, answer) in answers {
            match answer {
                Ok(readings) => self.metrics.set_readings(uuid, Some(&readings)),
                // NVML is closed while any GPU is quiesced, or while a change of MIG mode resets a
                // GPU.
                Err(error) if error.is_caused_by_this_process() => self.metrics.forget_readings(uuid),
                Err(error) => {
                    self.metrics.count_error("sensors");
                    let error = &error as &dyn std::error::Error;
                    tracing::debug!(uuid, error, "failed to read the sensors of a GPU");
                    self.metrics.set_readings(uuid, None);
                }
            }
        }
        state.queried_at = Some(Instant::now());
    }
}

/// Reads the sensors of a GPU on the GPU's worker thread.
async fn read_sensors<'u>(uuid: &'u str, worker: &Worker) -> (&'u str, Result<GpuReadings, NvmlError>) {
    let of = uuid.to_owned();
    (uuid, worker.call(GPU_CALL_TIMEOUT, move |gpus| gpus.readings(&of)).await)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, channel};

    use cleave_api::gpunode::{GpuNodeStatus, GpuStatus};
    use cleave_gpu::nvml::Gpus;

    use super::*;

    /// A simulated NVML with two GPUs. The query of `GPU-b` waits for a message in the channel.
    struct FakeNvml(Mutex<Receiver<()>>);

    impl Gpus for FakeNvml {
        fn readings(&self, uuid: &str) -> Result<GpuReadings, NvmlError> {
            if uuid == "GPU-b" {
                self.0.lock().unwrap().recv().map_err(|_| NvmlError::Lost { call: "test" })?;
            }
            Ok(GpuReadings { busy_percent: Some(25), temperature_celsius: Some(40), ..GpuReadings::default() })
        }
    }

    /// Returns the values of a metric by UUID.
    fn metric_values(metrics: &Metrics, name: &str) -> BTreeMap<String, String> {
        let text = metrics.encode().unwrap();
        let value = |line: &str| {
            let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.split_once("} ")?;
            Some((labels.split_once("uuid=\"")?.1.trim_end_matches('"').to_owned(), value.to_owned()))
        };
        text.lines().filter_map(value).collect()
    }

    fn by_uuid(values: &[(&str, &str)]) -> BTreeMap<String, String> {
        values.iter().map(|(uuid, value)| ((*uuid).to_owned(), (*value).to_owned())).collect()
    }

    #[tokio::test]
    async fn a_gpu_that_hangs_does_not_hide_the_readings_of_other_gpus() {
        let (answer, answers) = channel();
        let nvml: Arc<dyn Gpus> = Arc::new(FakeNvml(Mutex::new(answers)));
        let library = Library::new(move || Ok(Arc::clone(&nvml)));
        let metrics = Metrics::new();
        let gpu = |index: u32, uuid: &str| GpuStatus { index, uuid: uuid.into(), ..GpuStatus::default() };
        let status = |gpus| GpuNodeStatus { gpus, ..GpuNodeStatus::default() };
        metrics.set_node_status(&status(vec![gpu(0, "GPU-a"), gpu(1, "GPU-b")]));
        let sensors = Arc::new(GpuSensors::new(library.clone(), metrics.clone()));
        let refresh = async || {
            sensors.state.lock().await.queried_at = None;
            sensors.refresh().await;
        };
        // Prometheus gives up before the deadline of the GPU that hangs.
        let never_waits = async {
            while !metric_values(&metrics, "cleave_gpu_up").contains_key("GPU-b") {
                let _ = tokio::time::timeout(GPU_CALL_TIMEOUT / 10, sensors.refresh()).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), never_waits).await.unwrap();
        assert_eq!(metric_values(&metrics, "cleave_gpu_up"), by_uuid(&[("GPU-a", "1"), ("GPU-b", "0")]));
        assert_eq!(metric_values(&metrics, "cleave_gpu_utilization_ratio"), by_uuid(&[("GPU-a", "0.25")]));
        refresh().await;
        assert_eq!(metric_values(&metrics, "cleave_gpu_up"), by_uuid(&[("GPU-a", "1"), ("GPU-b", "0")]));
        // `GPU-b` answers all further queries.
        for _ in 0..1000 {
            answer.send(()).unwrap();
        }
        let answers_again = async {
            while metric_values(&metrics, "cleave_gpu_up")["GPU-b"] == "0" {
                refresh().await;
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), answers_again).await.unwrap();
        let both = [("GPU-a", "40"), ("GPU-b", "40")];
        assert_eq!(metric_values(&metrics, "cleave_gpu_temperature_celsius"), by_uuid(&both));

        // While NVML is closed, all readings are unknown. After NVML was opened again, a removed
        // GPU has no series.
        let closed = library.close();
        refresh().await;
        assert!(metric_values(&metrics, "cleave_gpu_up").is_empty());
        drop(closed);
        metrics.set_node_status(&status(vec![gpu(0, "GPU-a")]));
        refresh().await;
        assert_eq!(metric_values(&metrics, "cleave_gpu_up"), by_uuid(&[("GPU-a", "1")]));
        metrics.set_node_status(&status(vec![]));
        assert!(!metrics.encode().unwrap().contains("GPU-a"));
    }
}
