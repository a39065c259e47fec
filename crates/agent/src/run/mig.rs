//! Makes changes of GPUs, each on a thread of its own.
use std::time::{Duration, Instant};

use cleave_gpu::nvml::{Library, Worker};

use crate::act::perform;
use crate::gpu::hardware::error_chain;
use crate::gpu::mig::{ChangeOutcome, MigOrder, OrderResult};

/// After this long a change counts as hanging. An instance takes a fraction of a second, a GPU that
/// the driver resets some seconds.
const SLOW: Duration = Duration::from_secs(15);

/// Makes a change and tells how it ended; before, that it takes long.
pub(super) async fn carry_out(library: Library, order: MigOrder, tell: impl AsyncFn(OrderResult)) {
    let worker = match Worker::start(&library, "nvml-change") {
        Ok(worker) => worker,
        Err(error) => {
            let outcome = ChangeOutcome::Failed(format!("cannot start a thread: {error}"));
            return tell(OrderResult { order, outcome, after: None, at: Instant::now() }).await;
        }
    };
    let begun = Instant::now();
    let ordered = order.clone();
    // No deadline: what it did must be known before anything else is done to this GPU.
    let call = worker.call(Duration::MAX, move |gpus| Ok(perform(gpus, &ordered)));
    let mut call = std::pin::pin!(call);
    let answer = match tokio::time::timeout(SLOW, &mut call).await {
        Ok(answer) => answer,
        Err(_) => {
            let outcome = ChangeOutcome::Slow(begun.elapsed());
            tell(OrderResult { order: order.clone(), outcome, after: None, at: Instant::now() }).await;
            call.await
        }
    };
    let (outcome, after) = answer.unwrap_or_else(|error| (ChangeOutcome::Failed(error_chain(&error)), None));
    tell(OrderResult { order, outcome, after, at: Instant::now() }).await;
}
