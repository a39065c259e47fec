//! Performs MIG changes, each on its own thread.
use std::time::{Duration, Instant};

use cleave_gpu::nvml::{Library, Worker};

use crate::gpu::hardware::error_chain;
use crate::gpu::mig::{ChangeOutcome, MigChange, MigOrder, MigOrderResult};
use crate::mig_order::apply_order;

/// A change counts as slow after this time. A change of an instance takes a fraction of a second. A
/// change of MIG mode that resets the GPU takes some seconds.
const SLOW_CHANGE_THRESHOLD: Duration = Duration::from_secs(15);

/// Maximum time to wait for NVML to be closed before a change of MIG mode. NVML is closed when all
/// calls in progress have returned.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(25);
/// A call that has been in progress for this time probably never returns, so NVML cannot be closed.
/// An attempt to close NVML would only interrupt the watch of the other GPUs. The threshold is not
/// lower because the initialization of a GPU takes seconds.
const HANGING_CALL_THRESHOLD: Duration = Duration::from_secs(10);
/// Interval between checks of whether NVML is closed.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Performs a change and reports its result. If the change is slow, first reports
/// [`ChangeOutcome::Slow`].
pub(super) async fn run_order(library: Library, order: MigOrder, report: impl AsyncFn(MigOrderResult)) {
    run_order_unless_hanging(library, order, HANGING_CALL_THRESHOLD, report).await;
}

/// Like [`run_order`], but a call that has been in progress for `hanging` counts as hanging.
async fn run_order_unless_hanging(
    library: Library,
    order: MigOrder,
    hanging: Duration,
    report: impl AsyncFn(MigOrderResult),
) {
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
            // If this query fails because the GPU is lost, the change below fails too.
            mode_change_resets(gpu.compute_capability)
        }),
        _ => false,
    };
    let mut closed = None;
    if resets {
        let cannot_close = library.longest_call() >= hanging || {
            closed = Some(library.close());
            tokio::time::timeout(CLOSE_TIMEOUT, wait_until_closed(&library)).await.is_err()
        };
        if cannot_close {
            let why = "a call to NVML does not return, so the agent cannot close NVML. Reboot the node";
            return report(result(ChangeOutcome::Busy(why.into()), None)).await;
        }
    }
    // Set no deadline, because the result must be known before any other change of this GPU.
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
            // Open NVML again, because the other GPUs must not wait for a driver that hangs.
            drop(closed.take());
            report(result(ChangeOutcome::Slow(begun.elapsed()), None)).await;
            call.await
        }
    };
    drop(closed);
    let (outcome, after) = answer.unwrap_or_else(|error| (ChangeOutcome::Failed(error_chain(&error)), None));
    report(result(outcome, after)).await;
}

/// Returns whether a change of MIG mode resets a GPU of this compute capability. On GPUs before
/// Hopper (9.0), the change resets the GPU, and the driver refuses the change while another user
/// has the GPU open. An event registration of this process also keeps the GPU open, so the agent
/// closes NVML for the change. While NVML is closed, events of all GPUs are lost.
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
    use std::cell::RefCell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;

    use cleave_gpu::nvml::{Gpu, Gpus, NvmlError};
    use tokio::sync::oneshot;

    use super::*;
    use crate::fixtures::gpu;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);
    /// Duration after which a call counts as hanging.
    const HANGING: Duration = Duration::from_millis(1);

    /// A simulated NVML with one A100.
    struct OneGpu;

    impl Gpus for OneGpu {
        fn gpu(&self, uuid: &str) -> Result<Gpu, NvmlError> {
            Ok(Gpu { compute_capability: (8, 0), ..gpu(uuid, 0) })
        }
    }

    #[tokio::test]
    async fn while_a_call_hangs_a_change_of_mig_mode_fails_at_once_and_nvml_remains_open() {
        let opened = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&opened);
        let library = Library::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok(Arc::new(OneGpu))
        });
        let (release, released) = channel::<()>();
        let (started, has_started) = oneshot::channel();
        let worker = Worker::start(&library, "hanging").unwrap();
        let hangs = worker.call(HANGING, move |_| {
            let _ = started.send(());
            // Hangs until the test drops the sender.
            let _ = released.recv();
            Ok(())
        });
        assert!(matches!(hangs.await, Err(NvmlError::Hung(_))));
        // On a busy machine, the call starts later than its deadline.
        tokio::time::timeout(TEST_TIMEOUT, has_started).await.expect("the call starts").unwrap();
        tokio::time::sleep(HANGING).await;
        let results = RefCell::new(Vec::new());
        let order = MigOrder { gpu: "GPU-a".into(), change: MigChange::Mode(true) };
        let report = async |result: MigOrderResult| results.borrow_mut().push(result.outcome);
        run_order_unless_hanging(library.clone(), order, HANGING, report).await;
        let results = results.into_inner();
        assert!(matches!(&results[..], [ChangeOutcome::Busy(why)] if why.contains("does not return")), "{results:?}");
        assert_eq!(opened.load(Ordering::SeqCst), 1, "the session of the other GPUs is still open");
        drop(release);
    }

    #[test]
    fn a_change_of_mig_mode_resets_only_gpus_before_hopper() {
        assert!(mode_change_resets((8, 0)), "A100");
        assert!(!mode_change_resets((9, 0)), "H100");
    }
}
