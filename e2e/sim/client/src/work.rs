//! What a program does once it has its contexts.

use std::io::{self, BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::Arguments;
use crate::cuda::{self, Context, Cuda};
use crate::devices::Given;

/// How often a program that waits looks for errors and signals.
const LOOK: Duration = Duration::from_millis(10);
/// How long an illegal access may take to be told.
const FAULT: Duration = Duration::from_secs(30);

/// How long something lasts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Span {
    /// So long.
    For(Duration),
    /// Until a signal.
    Forever,
}

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "forever" {
            return Ok(Self::Forever);
        }
        let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        seconds.map(Self::For).ok_or_else(|| format!("{text:?} is neither a number of seconds nor \"forever\""))
    }
}

impl Span {
    fn is_over(self, since: Instant) -> bool {
        match self {
            Self::For(span) => since.elapsed() >= span,
            Self::Forever => false,
        }
    }
}

/// Why a program stopped.
enum Stop {
    /// A `CUresult`.
    Error(i32),
    /// A signal that it handles.
    Signal,
}

/// Runs the program: its exit status.
pub(crate) fn run(arguments: &Arguments, terminated: &Arc<AtomicBool>) -> u8 {
    let control = sim_mps::tool::pipe_directory().join("control");
    // Kept as long as its contexts: it is what the server knows the process by.
    let cuda = Cuda::init(&control, &Given::own());
    let contexts = match &cuda {
        Ok(cuda) => (0..arguments.contexts).map(|_| cuda.context()).collect::<Result<Vec<_>, _>>(),
        Err(code) => Err(*code),
    };
    let outcome = match &contexts {
        Ok(contexts) => Program { arguments, contexts, terminated }.run(),
        Err(code) => Err(Stop::Error(*code)),
    };
    let status = match outcome {
        Ok(()) | Err(Stop::Signal) => 0,
        Err(Stop::Error(code)) => {
            print(&json!({ "error": code, "name": cuda::name(code) }));
            if let Some(span) = arguments.linger {
                let since = Instant::now();
                while !span.is_over(since) && !terminated.load(Ordering::Relaxed) {
                    thread::sleep(LOOK);
                }
            }
            exit_status(code)
        }
    };
    // In order: dropping the contexts says goodbye to the server.
    drop(contexts);
    status
}

/// The exit status of a `CUresult`: the code modulo 256, and never 0.
fn exit_status(code: i32) -> u8 {
    u8::try_from(code.rem_euclid(256)).ok().filter(|status| *status != 0).unwrap_or(1)
}

struct Program<'a> {
    arguments: &'a Arguments,
    contexts: &'a [Context],
    terminated: &'a AtomicBool,
}

impl Program<'_> {
    fn run(&self) -> Result<(), Stop> {
        let first = self.first()?;
        let mib = |bytes: u64| bytes >> 20;
        print(&json!({
            "sms": first.sms(),
            "freeMiB": mib(first.free_memory().map_err(Stop::Error)?),
            "totalMiB": mib(first.device().memory),
            "viaMps": first.via_mps(),
            "uuid": first.device().uuid,
            "pid": std::process::id(),
            "limitMiB": first.limit().map(mib),
        }));
        if self.arguments.read_line {
            // An end of input is an answer, too.
            let _ = io::stdin().lock().read_line(&mut String::new());
        }
        for mib in &self.arguments.allocate {
            first.allocate(mib << 20).map_err(Stop::Error)?;
            print(&json!({ "allocatedMiB": mib, "freeMiB": first.free_memory().map_err(Stop::Error)? >> 20 }));
        }
        if let Some(after) = self.arguments.fault {
            self.work(Some(Span::For(after.0)))?;
            first.access_illegally().map_err(Stop::Error)?;
            return self.wait(Span::For(FAULT));
        }
        let busy = if self.arguments.busy_forever { Some(Span::Forever) } else { self.arguments.busy };
        self.work(busy)?;
        self.arguments.hold.map_or(Ok(()), |span| self.wait(span))
    }

    fn first(&self) -> Result<&Context, Stop> {
        self.contexts.first().ok_or(Stop::Error(cuda_invalid_context()))
    }

    /// Runs kernels, one after the other, for so long; without a kernel's length it only waits.
    fn work(&self, span: Option<Span>) -> Result<(), Stop> {
        let Some(span) = span else { return Ok(()) };
        let Some(kernel_ms) = self.arguments.kernel_ms else { return self.wait(span) };
        let context = self.first()?;
        let since = Instant::now();
        context.launch(kernel_ms).map_err(Stop::Error)?;
        print(&json!({ "launched": true, "kernelMs": kernel_ms }));
        let waited = self.wait(span);
        if let Err(Stop::Error(code)) = waited {
            return Err(Stop::Error(code));
        }
        // The kernel in flight runs to its end.
        let kernel = Duration::try_from_secs_f64(kernel_ms / 1000.0).unwrap_or_default();
        let begun = since.elapsed().as_secs_f64() / kernel.as_secs_f64();
        let left = if begun.is_finite() { kernel.mul_f64(begun.ceil() - begun) } else { Duration::ZERO };
        thread::sleep(left);
        context.synchronize().map_err(Stop::Error)?;
        print(&json!({ "kernelMs": kernel_ms, "iterations": if begun.is_finite() { begun.ceil() } else { 0.0 } }));
        waited
    }

    /// Waits so long, unless an error or a handled signal comes first.
    fn wait(&self, span: Span) -> Result<(), Stop> {
        let since = Instant::now();
        loop {
            if let Some(code) = self.contexts.iter().find_map(Context::error) {
                return Err(Stop::Error(code));
            }
            if self.terminated.load(Ordering::Relaxed) {
                return Err(Stop::Signal);
            }
            if span.is_over(since) {
                return Ok(());
            }
            thread::sleep(LOOK);
        }
    }
}

/// No contexts were asked for.
fn cuda_invalid_context() -> i32 {
    201
}

/// Prints a line; whoever reads it may be gone.
pub(crate) fn print(value: &serde_json::Value) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{value}").and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_never_a_success() {
        assert_eq!(exit_status(700), 188);
        assert_eq!(exit_status(806), 38);
        assert_eq!(exit_status(2), 2);
        assert_eq!(exit_status(256), 1);
    }

    #[test]
    fn a_span_is_seconds_or_forever() {
        assert_eq!("1.5".parse(), Ok(Span::For(Duration::from_millis(1500))));
        assert_eq!("forever".parse(), Ok(Span::Forever));
        assert!("-1".parse::<Span>().is_err());
        assert!("soon".parse::<Span>().is_err());
    }
}
