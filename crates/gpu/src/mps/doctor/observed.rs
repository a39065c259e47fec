//! The observations of the doctor's tests. Data only.
use crate::mps::protocol::Command;
use crate::nvml::ComputeMode;

/// Result of one test of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TestOutcome<T> {
    /// The test was skipped, for this reason.
    NotTested(String),
    /// The driver failed the test, for this reason.
    Failed(String),
    /// The test's observation.
    Observed(T),
}

impl<T> TestOutcome<T> {
    /// Returns the outcome with the part of the observation that `part` selects. An outcome without
    /// an observation does not change.
    pub(super) fn map<U>(&self, part: impl FnOnce(&T) -> U) -> TestOutcome<U> {
        match self {
            Self::NotTested(why) => TestOutcome::NotTested(why.clone()),
            Self::Failed(why) => TestOutcome::Failed(why.clone()),
            Self::Observed(observed) => TestOutcome::Observed(part(observed)),
        }
    }
}

/// Returns the outcome of a test that was not run.
fn not_run<T>(why: &str) -> TestOutcome<T> {
    TestOutcome::NotTested(why.to_owned())
}

/// The SMs and free memory that a program sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GpuView {
    pub(super) sms: u32,
    pub(super) free_mib: u64,
}

/// The events that the daemon logged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LoggedEvents {
    pub(super) version: Option<u32>,
    pub(super) server_ready: bool,
    /// Whether the daemon logged a client's connection. `None` if no client connected.
    pub(super) client_connected: Option<bool>,
    pub(super) client_disconnected: Option<bool>,
}

/// A command and its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CommandExchange {
    pub(super) command: Command,
    pub(super) answer: String,
    /// The percentage or MiB set before this command, if the command reads a setting.
    pub(super) set: Option<u64>,
}

/// Limits, and the view of a program that connected under them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LimitedView {
    pub(super) percent: u8,
    pub(super) limit_mib: u64,
    pub(super) view: GpuView,
}

/// The views of three programs: one without limits in its environment, and two with limits other
/// than the server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LoweredLimits {
    pub(super) set: LimitedView,
    /// The view of a program with higher limits in its environment.
    pub(super) requested_more: GpuView,
    /// Lower limits in a program's environment, and the view of that program.
    pub(super) requested_less: LimitedView,
}

/// Result of an allocation. The error is CUDA's error code.
pub(super) type AllocationResult = Result<(), i64>;

/// Allocations under a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AllocationResults {
    pub(super) limit_mib: u64,
    pub(super) half: AllocationResult,
    pub(super) all: AllocationResult,
}

/// A client terminated by MPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientTermination {
    pub(super) answer: String,
    /// Result of the client's next CUDA call.
    pub(super) client: AllocationResult,
    /// Result of a neighbour's next CUDA call.
    pub(super) neighbour: AllocationResult,
}

/// The outcomes of all tests.
#[derive(Debug)]
pub(super) struct Observations {
    /// Milliseconds until the daemon answered.
    pub(super) start: TestOutcome<u128>,
    /// Whether the daemon's greeting is that of driver 580.
    pub(super) greeting: TestOutcome<bool>,
    pub(super) commands: TestOutcome<Vec<CommandExchange>>,
    /// Administrators' commands over the socket that every user can reach, with the answers.
    pub(super) unprivileged: TestOutcome<Vec<CommandExchange>>,
    pub(super) log: TestOutcome<LoggedEvents>,
    /// Whether MPS lists a client by its PID.
    pub(super) listed_by_mps: TestOutcome<bool>,
    /// Whether NVML lists the same client as an MPS client. `None` if this driver does not
    /// distinguish clients from other processes.
    pub(super) listed_by_nvml: TestOutcome<Option<bool>>,
    /// Two programs that connected one after the other and ran side by side.
    pub(super) bound: TestOutcome<[LimitedView; 2]>,
    /// Thread percentages, and the number of SMs that a program saw with each percentage.
    pub(super) rounding: TestOutcome<Vec<(u8, u32)>>,
    pub(super) lowered: TestOutcome<LoweredLimits>,
    pub(super) memory: TestOutcome<AllocationResults>,
    /// The view of a program with an invalid memory limit in its environment.
    pub(super) escape: TestOutcome<LimitedView>,
    /// The view of another user's program while root's program was running.
    pub(super) users: TestOutcome<LimitedView>,
    /// The view of a program with a pipe directory that contains only a link to `control`.
    pub(super) link: TestOutcome<LimitedView>,
    pub(super) terminated: TestOutcome<ClientTermination>,
    /// The view of the first program of a new server, under the daemon's defaults.
    pub(super) defaults: TestOutcome<LimitedView>,
    /// The view of a program without a `control` socket, or its CUDA error.
    pub(super) no_control: TestOutcome<Result<GpuView, i64>>,
}

impl Observations {
    /// Creates the observations of a doctor that skipped all tests. `why` is the reason.
    pub(super) fn for_skipped_tests(why: &str) -> Self {
        Self {
            start: not_run(why),
            greeting: not_run(why),
            commands: not_run(why),
            unprivileged: not_run(why),
            log: not_run(why),
            listed_by_mps: not_run(why),
            listed_by_nvml: not_run(why),
            bound: not_run(why),
            rounding: not_run(why),
            lowered: not_run(why),
            memory: not_run(why),
            escape: not_run(why),
            users: not_run(why),
            link: not_run(why),
            terminated: not_run(why),
            defaults: not_run(why),
            no_control: not_run(why),
        }
    }
}

/// The GPU that the tests ran on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TestedGpu {
    pub(super) sms: u32,
    pub(super) compute_mode: Option<ComputeMode>,
}
