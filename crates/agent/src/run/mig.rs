//! Performs MIG changes, each on its own thread.
use std::time::{Duration, Instant};

use cleave_gpu::nvml::{Library, Worker};

use crate::gpu::hardware::error_chain;
use crate::gpu::mig::{ChangeOutcome, MigChange, MigOrder, MigOrderResult};
use crate::mig_order::apply_order;

/// A change counts as slow after this time. Changing an instance takes a fraction of a second.
/// Changing a GPU that the driver resets takes some seconds.
const SLOW_CHANGE_THRESHOLD: Duration = Duration::from_secs(15);

/// Maximum time to wait until calls in progress return, so that NVML can be closed before a change
/// of MIG mode.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(25);
/// Interval between checks whether NVML is closed.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Performs a change and reports its result. If the change is slow, reports the delay before the
/// result.
pub(super) async fn run_order(library: Library, order: MigOrder, report: impl AsyncFn(MigOrderResult)) {
    let result = |outcome, after| MigOrderResult { order: order.clone(), outcome, after, at: Instant::now() };
    let worker = match Worker::start(&library, "nvml-change") {
        Ok(worker) => worker,
        Err(error) => {
            return report(result(ChangeOutcome::Failed(format!("failed to start a thread: {error}")), None)).await;
        }
    };
    let begun = Instant::now();
    let ordered = order.clone();
    let uuid = order.gpu.clone();
    let resets = match order.change {
        MigChange::Mode(_) => worker.call(SLOW_CHANGE_THRESHOLD, move |gpus| gpus.gpu(&uuid)).await.is_ok_and(|gpu| {
            // If the GPU is lost, the change below fails.
            mode_change_resets(gpu.compute_capability)
        }),
        _ => false,
    };
    let mut closed = None;
    if resets {
        closed = Some(library.close());
        if tokio::time::timeout(CLOSE_TIMEOUT, wait_until_closed(&library)).await.is_err() {
            let why = "a call to NVML does not return, so the agent cannot close NVML";
            return report(result(ChangeOutcome::Busy(why.into()), None)).await;
        }
    }
    // No deadline: the result must be known before any other change of this GPU.
    let call = async {
        if resets {
            worker.call_alone(move |gpus| Ok(apply_order(gpus, &ordered))).await
        } else {
            worker.call(Duration::MAX, move |gpus| Ok(apply_order(gpus, &ordered))).await
        }
    };
    let mut call = std::pin::pin!(call);
    let answer = match tokio::time::timeout(SLOW_CHANGE_THRESHOLD, &mut call).await {
        Ok(answer) => answer,
        Err(_) => {
            // The other GPUs must not wait for a driver that hangs.
            drop(closed.take());
            report(result(ChangeOutcome::Slow(begun.elapsed()), None)).await;
            call.await
        }
    };
    drop(closed);
    let (outcome, after) = answer.unwrap_or_else(|error| (ChangeOutcome::Failed(error_chain(&error)), None));
    report(result(outcome, after)).await;
}

/// Returns whether a change of MIG mode resets a GPU of this compute capability. Before Hopper
/// (9.0) the change resets the GPU, and the driver refuses the change while another user has the
/// GPU open. An event registration of this process also keeps the GPU open. While NVML is closed,
/// events of all GPUs are lost.
fn mode_change_resets(compute_capability: (u32, u32)) -> bool {
    compute_capability < (9, 0)
}

/// Waits until no thread of this process uses NVML.
async fn wait_until_closed(library: &Library) {
    while !library.is_closed() {
        tokio::time::sleep(CLOSE_CHECK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_mode_resets_gpus_before_hopper() {
        assert!(mode_change_resets((8, 0)), "A100");
        assert!(!mode_change_resets((9, 0)), "H100");
    }
}
