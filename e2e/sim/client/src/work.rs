//! Creates the program's contexts and performs its actions.

use std::io::{self, BufRead};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::arguments::{Arguments, StepDuration};
use crate::cuda::{self, Context, Cuda};
use crate::devices::DeviceSelection;
use crate::output::print_json_line;

/// Interval between checks for errors and signals while the program waits.
const WAIT_CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum time to wait for the error of an illegal access.
const FAULT_REPORT_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a program stopped.
enum StopReason {
    /// A CUDA call failed with this `CUresult`.
    Error(i32),
    /// The program received a signal that it handles.
    Signal,
}

/// Runs the program and returns its exit status.
pub(crate) fn run(arguments: &Arguments, terminated: &Arc<AtomicBool>) -> u8 {
    let control = sim_mps::tool::pipe_directory().join("control");
    // Keep this value until the contexts are dropped: the server identifies the process by its
    // connection.
    let cuda = Cuda::init(&control, &DeviceSelection::from_environment());
    let contexts = match &cuda {
        Ok(cuda) => (0..arguments.contexts).map(|_| cuda.create_context()).collect::<Result<Vec<_>, _>>(),
        Err(code) => Err(*code),
    };
    let outcome = match &contexts {
        Ok(contexts) => ProgramRun { arguments, contexts, terminated }.run(),
        Err(code) => Err(StopReason::Error(*code)),
    };
    let status = match outcome {
        Ok(()) | Err(StopReason::Signal) => 0,
        Err(StopReason::Error(code)) => {
            print_json_line(&json!({ "error": code, "name": cuda::error_name(code) }));
            if let Some(duration) = arguments.linger {
                let since = Instant::now();
                while !duration.is_over(since) && !terminated.load(Ordering::Relaxed) {
                    thread::sleep(WAIT_CHECK_INTERVAL);
                }
            }
            exit_status(code)
        }
    };
    // Drop the contexts, so that they are closed cleanly.
    drop(contexts);
    status
}

/// Returns the exit status for a `CUresult`: the code modulo 256, or 1 if that is 0.
fn exit_status(code: i32) -> u8 {
    u8::try_from(code.rem_euclid(256)).ok().filter(|status| *status != 0).unwrap_or(1)
}

/// The program's work on its contexts.
struct ProgramRun<'a> {
    arguments: &'a Arguments,
    contexts: &'a [Context],
    terminated: &'a AtomicBool,
}

impl ProgramRun<'_> {
    /// Prints the GPU's properties, and performs the requested work.
    fn run(&self) -> Result<(), StopReason> {
        let first = self.first_context()?;
        let mib = |bytes: u64| bytes >> 20;
        print_json_line(&json!({
            "sms": first.sms(),
            "freeMiB": mib(first.free_memory().map_err(StopReason::Error)?),
            "totalMiB": mib(first.device().memory),
            "viaMps": first.uses_mps(),
            "uuid": first.device().uuid,
            "pid": std::process::id(),
            "limitMiB": first.memory_limit().map(mib),
        }));
        if self.arguments.read_line {
            // Ignore the result: the end of input counts as a line.
            let _ = io::stdin().lock().read_line(&mut String::new());
        }
        for mib in &self.arguments.allocate {
            first.allocate(mib << 20).map_err(StopReason::Error)?;
            print_json_line(
                &json!({ "allocatedMiB": mib, "freeMiB": first.free_memory().map_err(StopReason::Error)? >> 20 }),
            );
        }
        if let Some(after) = self.arguments.fault {
            self.run_kernels(Some(StepDuration::For(after.0)))?;
            first.access_illegally().map_err(StopReason::Error)?;
            return self.wait_for_duration(StepDuration::For(FAULT_REPORT_TIMEOUT));
        }
        let busy = if self.arguments.busy_forever { Some(StepDuration::Forever) } else { self.arguments.busy };
        self.run_kernels(busy)?;
        self.arguments.hold.map_or(Ok(()), |duration| self.wait_for_duration(duration))
    }

    fn first_context(&self) -> Result<&Context, StopReason> {
        self.contexts.first().ok_or(StopReason::Error(invalid_context_error()))
    }

    /// Runs kernels one after the other for `duration`. If no kernel length is set, only waits.
    fn run_kernels(&self, duration: Option<StepDuration>) -> Result<(), StopReason> {
        let Some(duration) = duration else { return Ok(()) };
        let Some(kernel_ms) = self.arguments.kernel_ms else { return self.wait_for_duration(duration) };
        let context = self.first_context()?;
        let since = Instant::now();
        context.launch_kernels(kernel_ms).map_err(StopReason::Error)?;
        print_json_line(&json!({ "launched": true, "kernelMs": kernel_ms }));
        let waited = self.wait_for_duration(duration);
        if let Err(StopReason::Error(code)) = waited {
            return Err(StopReason::Error(code));
        }
        // Wait until the running kernel has finished.
        let kernel = Duration::try_from_secs_f64(kernel_ms / 1000.0).unwrap_or_default();
        let begun = since.elapsed().as_secs_f64() / kernel.as_secs_f64();
        let left = if begun.is_finite() { kernel.mul_f64(begun.ceil() - begun) } else { Duration::ZERO };
        thread::sleep(left);
        context.synchronize().map_err(StopReason::Error)?;
        print_json_line(
            &json!({ "kernelMs": kernel_ms, "iterations": if begun.is_finite() { begun.ceil() } else { 0.0 } }),
        );
        waited
    }

    /// Waits for `duration`. Returns early if an error or a handled signal arrives.
    fn wait_for_duration(&self, duration: StepDuration) -> Result<(), StopReason> {
        let since = Instant::now();
        loop {
            if let Some(code) = self.contexts.iter().find_map(Context::error) {
                return Err(StopReason::Error(code));
            }
            if self.terminated.load(Ordering::Relaxed) {
                return Err(StopReason::Signal);
            }
            if duration.is_over(since) {
                return Ok(());
            }
            thread::sleep(WAIT_CHECK_INTERVAL);
        }
    }
}

/// Returns the `CUresult` for a program without a context.
fn invalid_context_error() -> i32 {
    201
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_status_of_an_error_is_never_0() {
        assert_eq!(exit_status(700), 188);
        assert_eq!(exit_status(806), 38);
        assert_eq!(exit_status(2), 2);
        assert_eq!(exit_status(256), 1);
    }
}
