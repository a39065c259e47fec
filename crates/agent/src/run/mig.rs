//! Performs MIG changes, each on its own thread.
use std::time::{Duration, Instant};

use cleave_gpu::nvml::{Library, Worker};

use crate::gpu::hardware::error_chain;
use crate::gpu::mig::{ChangeOutcome, MigOrder, MigOrderResult};
use crate::mig_order::apply_order;

/// A change counts as slow after this time. Changing an instance takes a fraction of a second.
/// Changing a GPU that the driver resets takes some seconds.
const SLOW_CHANGE_THRESHOLD: Duration = Duration::from_secs(15);

/// Performs a change and reports its result. Before the result, reports a change that is slow.
pub(super) async fn run_order(library: Library, order: MigOrder, report: impl AsyncFn(MigOrderResult)) {
    let worker = match Worker::start(&library, "nvml-change") {
        Ok(worker) => worker,
        Err(error) => {
            let outcome = ChangeOutcome::Failed(format!("failed to start a thread: {error}"));
            return report(MigOrderResult { order, outcome, after: None, at: Instant::now() }).await;
        }
    };
    let begun = Instant::now();
    let ordered = order.clone();
    // No deadline: the result must be known before any other change of this GPU.
    let call = worker.call(Duration::MAX, move |gpus| Ok(apply_order(gpus, &ordered)));
    let mut call = std::pin::pin!(call);
    let answer = match tokio::time::timeout(SLOW_CHANGE_THRESHOLD, &mut call).await {
        Ok(answer) => answer,
        Err(_) => {
            let outcome = ChangeOutcome::Slow(begun.elapsed());
            report(MigOrderResult { order: order.clone(), outcome, after: None, at: Instant::now() }).await;
            call.await
        }
    };
    let (outcome, after) = answer.unwrap_or_else(|error| (ChangeOutcome::Failed(error_chain(&error)), None));
    report(MigOrderResult { order, outcome, after, at: Instant::now() }).await;
}
