//! Polls NVML for the GPUs, their state and their links.
//!
//! Each GPU has its own worker thread, which publishes NVML's answers for the GPU as they arrive. A
//! GPU that hangs therefore delays no other GPU. The query of the driver, which calls no GPU, also
//! has its own worker. If this query fails, all GPUs are unreachable. At most one thread is blocked
//! for each GPU and purpose. Another worker reads the links between the GPUs. If a GPU hangs, this
//! worker is blocked, and the agent keeps the known links.
//!
//! ```text
//!  driver ─┐
//!  GPU 0 ──┼─▶ batch: answers that arrive close together are one input ──▶ main loop
//!  GPU 1 ──┘                                                                  ▲
//!  events of each GPU ────────────────────────────────────────────────────────┤
//!  links between GPUs ────────────────────────────────────────────────────────┘
//! ```
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use anyhow::Context;
use cleave_gpu::nvml::{EventWatch, Library, NvmlError, Worker};
use cleave_plan::topology::Topology;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::input::Input;

/// Interval between polls of a GPU or the driver. An event triggers a poll at once.
const GPU_POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of recent reads of links that the agent combines. A link that the latest read
/// lacks keeps its value from an earlier one of these reads.
const MAX_LINK_READS: usize = 10;
/// Minimum interval between polls, regardless of the number of events.
const MIN_GPU_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Deadline for a read of the links between GPUs. The call may have to initialize a GPU first. A
/// driver that hangs takes minutes to answer, or never answers.
const LINKS_CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between reads of the links between GPUs. The links change only if hardware fails.
const LINKS_POLL_INTERVAL: Duration = Duration::from_secs(3600);
/// Interval between reads of the links while a read fails or lacks a GPU or a link.
const LINKS_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Answers that arrive within this time after the first answer form one input. A poll of eight GPUs
/// then causes one reconciliation instead of eight.
const BATCH_WINDOW: Duration = Duration::from_millis(50);
/// Maximum time to wait for the first answers for all GPUs. The agent waits so that a node does not
/// appear to have fewer GPUs than it has. A GPU that hangs delays the other GPUs by this time, but
/// only once.
const FIRST_ANSWERS_TIMEOUT: Duration = Duration::from_secs(1);

/// Polls the driver and its GPUs. Each call about the driver or a GPU has the deadline `timeout`.
/// Returns when the main loop has ended.
///
/// # Errors
/// Returns an error if a thread cannot be started.
pub(crate) async fn watch_hardware(
    library: Library,
    inputs: mpsc::Sender<Input>,
    mut poll: watch::Receiver<()>,
    timeout: Duration,
) -> anyhow::Result<()> {
    let node = Worker::start(&library, "nvml-node").context("failed to start the NVML thread")?;
    let (mut events, mut received_events) = EventWatch::new(library.clone());
    let links = Worker::start(&library, "nvml-links").context("failed to start the NVML thread for links")?;
    let (counted, count) = watch::channel(0);
    let (driver_back, driver_returned) = watch::channel(());
    let (answers, to_batch) = mpsc::channel(64);
    let forward = async {
        while let Some(event) = received_events.recv().await {
            if inputs.send(Input::Event(event)).await.is_err() {
                break;
            }
        }
        anyhow::Ok(())
    };
    let driver = async {
        let (mut watched, mut gpus) = (0, JoinSet::new());
        gpus.spawn(watch_links(links, inputs.clone(), count));
        let mut answered = false;
        loop {
            let requested_at = Instant::now();
            let answer = node.call(timeout, |gpus| gpus.driver_info()).await;
            if answer.as_ref().is_err_and(NvmlError::is_caused_by_this_process) {
                wait_for_next_poll(poll.changed()).await;
                continue;
            }
            let count = answer.as_ref().map_or(0, |driver_info| driver_info.count);
            let before = std::mem::replace(&mut answered, answer.is_ok());
            // Send the driver's answer first, because the main loop needs it before the answers for
            // the GPUs.
            if answers.send(Input::DriverInfo(answer, requested_at)).await.is_err() {
                return Ok(());
            }
            if answered && !before {
                driver_back.send_replace(());
            }
            counted.send_if_modified(|known| std::mem::replace(known, count) != count);
            events.watch(count).context("failed to start an NVML event thread")?;
            while watched < count {
                let worker = Worker::start(&library, format!("nvml-gpu-{watched}"));
                let worker = worker.context("failed to start the NVML thread of a GPU")?;
                let triggers = (poll.clone(), driver_returned.clone());
                gpus.spawn(watch_gpu(watched, (worker, timeout), answers.clone(), triggers));
                watched += 1;
            }
            wait_for_next_poll(poll.changed()).await;
            // One poll follows all changes during the wait.
            poll.mark_unchanged();
        }
    };
    tokio::try_join!(forward, driver, forward_in_batches(to_batch, &inputs)).map(drop)
}

/// Waits until the driver or a GPU must be polled again: after `trigger`, and otherwise after
/// [`GPU_POLL_INTERVAL`], but never earlier than after [`MIN_GPU_POLL_INTERVAL`]. `trigger` must be
/// cancel-safe.
async fn wait_for_next_poll<T>(trigger: impl Future<Output = T>) {
    let earliest = tokio::time::Instant::now() + MIN_GPU_POLL_INTERVAL;
    // An idle node wakes only once, so do not wait for `earliest` first.
    if tokio::time::timeout_at(earliest + GPU_POLL_INTERVAL, trigger).await.is_ok() {
        tokio::time::sleep_until(earliest).await;
    }
}

/// Forwards answers to the main loop. Answers that arrive within [`BATCH_WINDOW`] form one input.
/// The driver's answer and the first answers for its GPUs form one input if they arrive within
/// [`FIRST_ANSWERS_TIMEOUT`].
async fn forward_in_batches(mut answers: mpsc::Receiver<Input>, inputs: &mpsc::Sender<Input>) -> anyhow::Result<()> {
    let (mut count, mut awaited) = (0, BTreeSet::new());
    let (mut batch, mut until) = (Vec::new(), None);
    loop {
        let next = match until {
            None => Ok(answers.recv().await),
            // Cancel-safe: an unreceived message remains in the channel.
            Some(until) => tokio::time::timeout_at(until, answers.recv()).await,
        };
        let now = tokio::time::Instant::now();
        match next {
            Ok(Some(answer)) => {
                match &answer {
                    Input::DriverInfo(Ok(driver_info), _) if driver_info.count != count => {
                        count = driver_info.count;
                        awaited = (0..count).collect();
                        until = Some(now + FIRST_ANSWERS_TIMEOUT);
                    }
                    Input::Gpu(index, ..) if awaited.remove(index) && awaited.is_empty() => until = Some(now),
                    _ => {}
                }
                until.get_or_insert(now + BATCH_WINDOW);
                batch.push(answer);
            }
            Err(_) => {
                awaited.clear();
                until = None;
                if inputs.send(Input::Many(std::mem::take(&mut batch))).await.is_err() {
                    return Ok(());
                }
            }
            Ok(None) => return Ok(()),
        }
    }
}

/// Polls the GPU at one index until the main loop has ended. Continues while the driver lists no
/// GPU at this index, because the GPU may reappear.
async fn watch_gpu(
    index: u32,
    (worker, timeout): (Worker, Duration),
    answers: mpsc::Sender<Input>,
    (mut poll, mut driver_returned): (watch::Receiver<()>, watch::Receiver<()>),
) {
    let mut answered = true;
    loop {
        let requested_at = Instant::now();
        let answer = worker.call(timeout, move |gpus| gpus.observe(index)).await;
        if answer.as_ref().is_err_and(NvmlError::is_caused_by_this_process) {
            // NVML was not called, for example because another GPU is quiesced. The last answer
            // remains valid.
            wait_for_next_poll(poll.changed()).await;
            continue;
        }
        if answer.is_ok() != std::mem::replace(&mut answered, answer.is_ok()) {
            match &answer {
                Ok(_) => tracing::info!(index, "the GPU answers NVML again"),
                Err(error) => {
                    tracing::warn!(index, error = error as &dyn std::error::Error, "the GPU does not answer NVML");
                }
            }
        }
        let uuid = answer.as_ref().ok().map(|seen| seen.gpu.uuid.clone());
        if answers.send(Input::Gpu(index, answer, requested_at)).await.is_err() {
            return;
        }
        if let Some(uuid) = uuid {
            let of = uuid.clone();
            // Ignore errors, because the next poll requests the values again.
            if let Ok(vitals) = worker.call(timeout, move |gpus| gpus.vitals(&of)).await
                && answers.send(Input::Vitals(uuid, vitals, requested_at)).await.is_err()
            {
                return;
            }
        }
        wait_for_next_poll(async {
            tokio::select! {
                // Cancel-safe: the next call returns a missed change.
                _ = poll.changed() => {}
                _ = driver_returned.changed() => {}
            }
        })
        .await;
        poll.mark_unchanged();
        driver_returned.mark_unchanged();
    }
}

/// Reads the links between the GPUs at long intervals, and whenever the driver reports another
/// number of GPUs, for example after an outage. An incomplete read replaces only the links that it
/// contains. The other links keep their values for up to [`MAX_LINK_READS`] reads.
async fn watch_links(worker: Worker, inputs: mpsc::Sender<Input>, mut count: watch::Receiver<u32>) {
    // The latest reads, oldest first. A complete read replaces all earlier reads.
    let mut reads: VecDeque<Topology> = VecDeque::new();
    loop {
        let expected = *count.borrow_and_update();
        let mut complete = expected == 0;
        if expected > 0 {
            match worker.call(LINKS_CALL_TIMEOUT, |gpus| gpus.topology()).await {
                Ok(topology) => {
                    complete = u32::try_from(topology.gpus().len()) == Ok(expected) && topology.has_all_links();
                    tracing::debug!(complete, "read the links between GPUs");
                    if complete {
                        reads.clear();
                    }
                    reads.push_back(topology);
                    if reads.len() > MAX_LINK_READS {
                        reads.pop_front();
                    }
                    let merge = |earlier: Topology, later: &Topology| later.with_earlier_links(&earlier);
                    let known = reads.iter().fold(Topology::default(), merge);
                    if inputs.send(Input::Topology(known)).await.is_err() {
                        return;
                    }
                }
                Err(NvmlError::NotSupported { .. }) => complete = true,
                Err(error) if error.is_caused_by_this_process() => {}
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "failed to read the links between GPUs; keeping the known links"
                    );
                }
            }
        }
        let pause = if complete { LINKS_POLL_INTERVAL } else { LINKS_RETRY_INTERVAL };
        tokio::select! {
            // Cancel-safe: the next call returns a missed change.
            changed = count.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(pause) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use cleave_gpu::nvml::{DriverInfo, Gpus, NvmlError};
    use cleave_plan::topology::GpuLink;

    use super::*;

    /// A simulated NVML. `read` returns the result of each read of the links, and receives the
    /// number of the read, counted from 0.
    struct FakeNvml {
        reads: AtomicUsize,
        read: fn(usize) -> Result<Topology, NvmlError>,
    }

    impl Gpus for FakeNvml {
        fn topology(&self) -> Result<Topology, NvmlError> {
            (self.read)(self.reads.fetch_add(1, Ordering::SeqCst))
        }
    }

    #[tokio::test]
    async fn links_are_read_when_the_number_of_gpus_changes_and_a_failed_read_is_not_reported() {
        // Each read after the first lists one more GPU.
        let (nvml, counted, mut received, watching) = start_watching_links(|number| match number {
            0 => Err(NvmlError::Lost { call: "test" }),
            count => Ok(topology(count, |_, _| true)),
        });
        for number in [1, 2] {
            counted.send_replace(number);
            let reads = usize::try_from(number).unwrap();
            while nvml.reads.load(Ordering::SeqCst) < reads {
                tokio::task::yield_now().await;
            }
        }
        // The first read failed, so the first topology comes from the second read.
        assert_eq!(receive_topology(&mut received).await.gpus().len(), 1);
        counted.send_replace(3);
        assert_eq!(receive_topology(&mut received).await.gpus().len(), 2);
        drop(counted);
        watching.await.unwrap();
    }

    #[tokio::test]
    async fn an_incomplete_read_replaces_only_the_links_that_it_contains() {
        let (_nvml, counted, mut received, watching) = start_watching_links(|number| {
            Ok(match number {
                0 => topology(3, |_, _| true),
                // The second read omits the last GPU, and lacks the link between the other two
                // GPUs.
                1 => topology(2, |_, _| false),
                _ => topology(2, |_, _| true),
            })
        });
        counted.send_replace(3);
        let complete = receive_topology(&mut received).await;
        assert_eq!(complete.score(&["GPU-0", "GPU-1", "GPU-2"]), 3 * 100);
        // A change of the number causes the next read.
        counted.send_replace(4);
        assert_eq!(receive_topology(&mut received).await, complete);
        counted.send_replace(2);
        assert_eq!(receive_topology(&mut received).await, topology(2, |_, _| true), "a GPU was removed");
        drop(counted);
        watching.await.unwrap();
    }

    #[tokio::test]
    async fn an_unknown_link_keeps_its_earlier_value_for_a_limited_number_of_reads() {
        let (_nvml, counted, mut received, watching) = start_watching_links(|number| {
            Ok(if number == 0 { topology(2, |_, _| true) } else { topology(2, |_, _| false) })
        });
        // A change of the number causes the next read.
        for read in 0..=MAX_LINK_READS {
            counted.send_replace(if read % 2 == 0 { 2 } else { 3 });
            let expected = if read < MAX_LINK_READS { 100 } else { 0 };
            assert_eq!(receive_topology(&mut received).await.score(&["GPU-0", "GPU-1"]), expected, "read {read}");
        }
        drop(counted);
        watching.await.unwrap();
    }

    type RunningLinkWatch = (Arc<FakeNvml>, watch::Sender<u32>, mpsc::Receiver<Input>, tokio::task::JoinHandle<()>);

    /// Starts [`watch_links`] with an NVML that answers with `read`.
    fn start_watching_links(read: fn(usize) -> Result<Topology, NvmlError>) -> RunningLinkWatch {
        let nvml = Arc::new(FakeNvml { reads: AtomicUsize::new(0), read });
        let gpus = Arc::clone(&nvml);
        let library = Library::new(move || Ok(Arc::clone(&gpus) as Arc<dyn Gpus>));
        let (inputs, received) = mpsc::channel(64);
        let (counted, count) = watch::channel(0);
        let watching = tokio::spawn(watch_links(Worker::start(&library, "test").unwrap(), inputs, count));
        (nvml, counted, received, watching)
    }

    /// Returns a topology in which one NVLink connects each pair of GPUs. The link of a pair is
    /// unknown if `is_known` returns false.
    fn topology(count: usize, is_known: fn(usize, usize) -> bool) -> Topology {
        let gpus = (0..count).map(|gpu| format!("GPU-{gpu}")).collect();
        let link = |one, other| GpuLink { nvlinks: u8::from(is_known(one, other)), ..GpuLink::default() };
        Topology::with_unknown_links(gpus, link, is_known)
    }

    async fn receive_topology(received: &mut mpsc::Receiver<Input>) -> Topology {
        let Some(Input::Topology(topology)) = received.recv().await else { panic!("no topology") };
        topology
    }

    fn driver_info_input(count: u32) -> Input {
        Input::DriverInfo(Ok(DriverInfo { driver: "1".into(), count }), Instant::now())
    }

    fn gpu_input(index: u32) -> Input {
        Input::Gpu(index, Err(NvmlError::NoDriver), Instant::now())
    }

    /// Returns the indices of the GPUs in one input.
    fn gpu_indices(input: Option<Input>) -> Vec<u32> {
        let Some(Input::Many(batch)) = input else { return Vec::new() };
        let index = |input: &Input| match input {
            Input::Gpu(index, ..) => Some(*index),
            _ => None,
        };
        batch.iter().filter_map(index).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_that_causes_xids_in_a_loop_does_not_cause_polls_without_a_pause() {
        const POLLS: u32 = 20;
        let (xid, mut poll) = watch::channel(());
        let begun = tokio::time::Instant::now();
        for _ in 0..POLLS {
            for _ in 0..100 {
                xid.send_replace(());
            }
            wait_for_next_poll(poll.changed()).await;
        }
        assert!(begun.elapsed() >= POLLS * MIN_GPU_POLL_INTERVAL, "{:?}", begun.elapsed());
        assert!(begun.elapsed() < GPU_POLL_INTERVAL, "an XID causes a poll at once: {:?}", begun.elapsed());
        let begun = tokio::time::Instant::now();
        wait_for_next_poll(poll.changed()).await;
        assert!(begun.elapsed() >= GPU_POLL_INTERVAL, "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_node_is_polled_at_long_intervals_and_a_trigger_polls_it_soon_but_not_at_once() {
        let (trigger, mut poll) = watch::channel(());
        let waited = async |poll: &mut watch::Receiver<()>| {
            let begun = tokio::time::Instant::now();
            wait_for_next_poll(poll.changed()).await;
            begun.elapsed()
        };
        assert!(waited(&mut poll).await >= GPU_POLL_INTERVAL);
        trigger.send_replace(());
        let soon = waited(&mut poll).await;
        assert!(soon >= MIN_GPU_POLL_INTERVAL && soon < 2 * MIN_GPU_POLL_INTERVAL, "{soon:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_answers_form_one_input_and_a_hanging_gpu_delays_other_gpus_only_once() {
        let (send, answers) = mpsc::channel(64);
        let (inputs, mut received) = mpsc::channel(64);
        tokio::spawn(async move { forward_in_batches(answers, &inputs).await });
        let begun = tokio::time::Instant::now();
        for input in [driver_info_input(3), gpu_input(0), gpu_input(2)] {
            send.send(input).await.unwrap();
        }
        tokio::time::sleep(FIRST_ANSWERS_TIMEOUT / 2).await;
        send.send(gpu_input(1)).await.unwrap();
        assert_eq!(gpu_indices(received.recv().await), [0, 2, 1]);
        assert!(begun.elapsed() < FIRST_ANSWERS_TIMEOUT, "there is no wait after all GPUs have answered");

        // A fourth GPU appears and hangs.
        let begun = tokio::time::Instant::now();
        for input in [driver_info_input(4), gpu_input(0), gpu_input(1)] {
            send.send(input).await.unwrap();
        }
        assert_eq!(gpu_indices(received.recv().await), [0, 1]);
        assert!(begun.elapsed() <= FIRST_ANSWERS_TIMEOUT, "it delays other GPUs by {:?}", begun.elapsed());
        let begun = tokio::time::Instant::now();
        for input in [driver_info_input(4), gpu_input(0), gpu_input(1)] {
            send.send(input).await.unwrap();
        }
        assert_eq!(gpu_indices(received.recv().await), [0, 1]);
        assert!(begun.elapsed() < FIRST_ANSWERS_TIMEOUT, "the wait for it is over");
        drop(send);
        assert!(received.recv().await.is_none());
    }
}
