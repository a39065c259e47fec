//! Asks NVML what GPUs there are and how they are.
//!
//! Each GPU has a worker of its own: its answers are published as they come, and one that hangs
//! delays no other. The census, which asks no GPU, has a worker too; when it fails, all GPUs are
//! unreachable. At most one thread is stuck for each GPU and purpose.
//!
//! ```text
//!  census ─┐
//!  GPU 0 ──┼─▶ gather: answers that come close together are one input ─▶ main loop
//!  GPU 1 ──┘                                                              ▲
//!  events of each GPU ────────────────────────────────────────────────────┘
//! ```
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context;
use cleave_gpu::nvml::{EventWatch, Library, Worker};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::input::Input;

/// Between two looks. An event asks for one at once.
const INVENTORY: Duration = Duration::from_secs(10);
/// At the least between two looks, however many events ask for one.
const LEAST: Duration = Duration::from_millis(100);
/// How long NVML may take for a GPU. It answers within a second, also where it initialises one; a
/// driver that hangs takes minutes, or for ever.
const DEADLINE: Duration = Duration::from_secs(20);
/// How long answers are gathered: a look at eight GPUs is one turn of the main loop, not eight.
const TOGETHER: Duration = Duration::from_millis(50);
/// How long the first answers of all GPUs are waited for, so that a node is not seen to have fewer
/// GPUs than it has. One that hangs delays the others by this once.
const FIRST: Duration = Duration::from_secs(1);

/// Watches the driver and its GPUs. Ends when nobody listens any more.
///
/// # Errors
/// When a thread cannot be started.
pub(crate) async fn watch(
    library: Library,
    inputs: mpsc::Sender<Input>,
    mut look: watch::Receiver<()>,
) -> anyhow::Result<()> {
    let node = Worker::start(&library, "nvml-node").context("cannot start the NVML thread")?;
    let (mut events, mut heard) = EventWatch::new(library.clone());
    let (back, returned) = watch::channel(());
    let (answers, gathered) = mpsc::channel(64);
    let forward = async {
        while let Some(event) = heard.recv().await {
            if inputs.send(Input::Event(event)).await.is_err() {
                break;
            }
        }
        anyhow::Ok(())
    };
    let census = async {
        let (mut watched, mut gpus) = (0, JoinSet::new());
        let mut answered = false;
        loop {
            let asked = Instant::now();
            let answer = node.call(DEADLINE, |gpus| gpus.census()).await;
            let count = answer.as_ref().map_or(0, |census| census.count);
            let before = std::mem::replace(&mut answered, answer.is_ok());
            // Before what its GPUs say.
            if answers.send(Input::Census(answer, asked)).await.is_err() {
                return Ok(());
            }
            if answered && !before {
                back.send_replace(());
            }
            events.watch(count).context("cannot start an NVML event thread")?;
            while watched < count {
                let worker = Worker::start(&library, format!("nvml-gpu-{watched}"));
                let worker = worker.context("cannot start the NVML thread of a GPU")?;
                gpus.spawn(watch_gpu(watched, worker, answers.clone(), look.clone(), returned.clone()));
                watched += 1;
            }
            tokio::time::sleep(LEAST).await;
            tokio::select! {
                // Cancel-safe: a change that is not taken is seen by the next call.
                _ = look.changed() => {}
                () = tokio::time::sleep(INVENTORY) => {}
            }
        }
    };
    tokio::try_join!(forward, census, gather(gathered, &inputs)).map(drop)
}

/// Hands on answers, those that come within [`TOGETHER`] as one input. The first answers of all
/// GPUs that a census counts are one input with it, if they come within [`FIRST`].
async fn gather(mut answers: mpsc::Receiver<Input>, inputs: &mpsc::Sender<Input>) -> anyhow::Result<()> {
    let (mut count, mut awaited) = (0, BTreeSet::new());
    let (mut batch, mut until) = (Vec::new(), None);
    loop {
        let next = match until {
            None => Ok(answers.recv().await),
            // Cancel-safe: a message that is not taken stays in the channel.
            Some(until) => tokio::time::timeout_at(until, answers.recv()).await,
        };
        let now = tokio::time::Instant::now();
        match next {
            Ok(Some(answer)) => {
                match &answer {
                    Input::Census(Ok(census), _) if census.count != count => {
                        count = census.count;
                        awaited = (0..count).collect();
                        until = Some(now + FIRST);
                    }
                    Input::Gpu(index, ..) if awaited.remove(index) && awaited.is_empty() => until = Some(now),
                    _ => {}
                }
                until.get_or_insert(now + TOGETHER);
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

/// Asks one GPU for ever, also while the driver lists none at its index: it may come back.
async fn watch_gpu(
    index: u32,
    worker: Worker,
    answers: mpsc::Sender<Input>,
    mut look: watch::Receiver<()>,
    mut returned: watch::Receiver<()>,
) {
    let mut answered = true;
    loop {
        let asked = Instant::now();
        let answer = worker.call(DEADLINE, move |gpus| gpus.observe(index)).await;
        if answer.is_ok() != std::mem::replace(&mut answered, answer.is_ok()) {
            match &answer {
                Ok(_) => tracing::info!(index, "the GPU answers NVML again"),
                Err(error) => {
                    tracing::warn!(index, error = error as &dyn std::error::Error, "the GPU does not answer NVML");
                }
            }
        }
        let uuid = answer.as_ref().ok().map(|seen| seen.gpu.uuid.clone());
        if answers.send(Input::Gpu(index, answer, asked)).await.is_err() {
            return;
        }
        if let Some(uuid) = uuid {
            let of = uuid.clone();
            // What a GPU does not say is not told: the next look asks again.
            if let Ok(vitals) = worker.call(DEADLINE, move |gpus| gpus.vitals(&of)).await
                && answers.send(Input::Vitals(uuid, vitals, asked)).await.is_err()
            {
                return;
            }
        }
        tokio::time::sleep(LEAST).await;
        tokio::select! {
            // Cancel-safe: a change that is not taken is seen by the next call.
            _ = look.changed() => {}
            _ = returned.changed() => {}
            () = tokio::time::sleep(INVENTORY) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use cleave_gpu::nvml::{Census, NvmlError};

    use super::*;

    fn census(count: u32) -> Input {
        Input::Census(Ok(Census { driver: "1".into(), count }), Instant::now())
    }

    fn gpu(index: u32) -> Input {
        Input::Gpu(index, Err(NvmlError::NoDriver), Instant::now())
    }

    /// Indices that one input answers for.
    fn answers(input: Option<Input>) -> Vec<u32> {
        let Some(Input::Many(batch)) = input else { return Vec::new() };
        let index = |input: &Input| match input {
            Input::Gpu(index, ..) => Some(*index),
            _ => None,
        };
        batch.iter().filter_map(index).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_answers_are_one_input_and_one_that_hangs_delays_the_others_once() {
        let (send, gathered) = mpsc::channel(64);
        let (inputs, mut received) = mpsc::channel(64);
        tokio::spawn(async move { gather(gathered, &inputs).await });
        let begun = tokio::time::Instant::now();
        for input in [census(3), gpu(0), gpu(2)] {
            send.send(input).await.unwrap();
        }
        tokio::time::sleep(FIRST / 2).await;
        send.send(gpu(1)).await.unwrap();
        assert_eq!(answers(received.recv().await), [0, 2, 1]);
        assert!(begun.elapsed() < FIRST, "nothing is waited for when all have answered");

        // A fourth, which hangs.
        for input in [census(4), gpu(0), gpu(1)] {
            send.send(input).await.unwrap();
        }
        assert_eq!(answers(received.recv().await), [0, 1]);
        let begun = tokio::time::Instant::now();
        for input in [census(4), gpu(0), gpu(1)] {
            send.send(input).await.unwrap();
        }
        assert_eq!(answers(received.recv().await), [0, 1]);
        assert!(begun.elapsed() < FIRST, "it was waited for once");
        drop(send);
        assert!(received.recv().await.is_none());
    }
}
