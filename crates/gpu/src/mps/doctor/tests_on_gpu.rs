//! The tests that the doctor runs on a GPU, with commands and programs under its own daemon.
use std::cell::{Cell, RefCell};
use std::fs;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::observed::{
    AllocationResults, ClientTermination, CommandExchange, GpuView, LimitedView, LoggedEvents, LoweredLimits,
    Observations, TestOutcome,
};
use super::own_daemon::{DaemonLog, OwnDaemon};
use super::program::{Program, ProgramError, ProgramRunOptions, RunningProgram};
use super::setup::{DoctorSetup, NVML_CALL_DEADLINE};
use crate::mps::control::{self, ANSWER_DEADLINE, ControlError};
use crate::mps::daemon::SERVER_START_DEADLINE;
use crate::mps::protocol::{self, Command, ServerState, UnexpectedAnswer};
use crate::nvml::NvmlError;

/// Thread percentages for which the test of rounding reads the number of SMs.
const THREAD_PERCENTAGES_TO_TEST: [u8; 9] = [1, 10, 14, 20, 33, 50, 75, 90, 100];
/// Thread percentage of most programs. A program that sees fewer SMs than the GPU has uses MPS.
const USUAL_THREAD_PERCENTAGE: u8 = 50;
/// A percentage below [`USUAL_THREAD_PERCENTAGE`].
const LOW_THREAD_PERCENTAGE: u8 = 20;
/// UID of an unprivileged user.
const NOBODY_UID: u32 = 65_534;
/// Time limit for MPS, its log or NVML to report that a client connected or exited.
const CLIENT_CHANGE_DEADLINE: Duration = Duration::from_secs(3);
/// Poll interval for reports that a client connected or exited.
const CLIENT_CHANGE_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time limit of `terminate_client`, which takes 3 to 10 ms on an H200 with driver 580.
const TERMINATE_DEADLINE: Duration = Duration::from_secs(10);
/// Why the doctor skips tests that need a CUDA program.
const NO_PROGRAM_REASON: &str = "needs a CUDA program (--client)";

/// Why a test has no observation.
enum NoObservation {
    NotTested(String),
    Failed(String),
}

impl From<ProgramError> for NoObservation {
    fn from(error: ProgramError) -> Self {
        match &error {
            ProgramError::Broken(_) => Self::NotTested(error.to_string()),
            ProgramError::Cuda(_) | ProgramError::Timeout => Self::Failed(error.to_string()),
        }
    }
}

impl From<ControlError> for NoObservation {
    fn from(error: ControlError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<UnexpectedAnswer> for NoObservation {
    fn from(error: UnexpectedAnswer) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<io::Error> for NoObservation {
    fn from(error: io::Error) -> Self {
        Self::NotTested(format!("failed to create a file: {error}"))
    }
}

impl From<NvmlError> for NoObservation {
    fn from(error: NvmlError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Runs the tests with one daemon.
struct DriverTests<'a> {
    setup: &'a DoctorSetup,
    directory: &'a Path,
    log: &'a Mutex<DaemonLog>,
    limit_mib: u64,
    server: Cell<Option<u32>>,
    /// PID of the first client.
    client: Cell<Option<u32>>,
    /// Why the remaining tests are skipped.
    stopped: RefCell<Option<String>>,
}

/// Runs all tests and records their outcomes.
pub(super) async fn run_tests(setup: &DoctorSetup, daemon: &OwnDaemon, seen: &mut Observations) {
    let tests = DriverTests {
        setup,
        directory: &daemon.directory,
        log: &daemon.log,
        // The context uses less than half of this limit, and every GPU has this much memory.
        limit_mib: (setup.memory_mib / 8).clamp(2048, 8192),
        server: Cell::new(None),
        client: Cell::new(None),
        stopped: RefCell::new(None),
    };
    seen.commands = tests.run_test(tests.send_commands()).await;
    seen.unprivileged = tests.run_test(tests.send_unprivileged_commands()).await;
    let listed = tests.run_test(tests.check_client_lists()).await;
    seen.listed_by_mps = listed.map(|listed| listed.0);
    seen.listed_by_nvml = if setup.are_others_visible {
        listed.map(|listed| listed.1)
    } else {
        TestOutcome::NotTested("needs the node's PID namespace (hostPID)".to_owned())
    };
    seen.bound = tests.run_test(tests.view_under_two_limits()).await;
    seen.rounding = tests.run_test(tests.view_rounded_sms()).await;
    seen.lowered = tests.run_test(tests.view_with_requested_limits()).await;
    seen.memory = tests.run_test(tests.allocate_up_to_limit()).await;
    seen.escape = tests.run_test(tests.view_with_invalid_limit()).await;
    seen.users = tests.run_test(tests.view_of_other_user()).await;
    seen.link = tests.run_test(tests.view_through_hard_link()).await;
    seen.no_control = tests.run_test(tests.view_without_control()).await;
    seen.terminated = tests.run_test(tests.terminate_client()).await;
    seen.defaults = tests.run_test(tests.view_under_defaults()).await;
    // Read the log last: its lines arrive after the clients' actions.
    seen.log = TestOutcome::Observed(tests.wait_for_log().await);
}

impl DriverTests<'_> {
    /// Runs one test, unless another process uses the GPU.
    async fn run_test<T>(&self, work: impl Future<Output = Result<T, NoObservation>>) -> TestOutcome<T> {
        if self.stopped.borrow().is_none() {
            *self.stopped.borrow_mut() = self.reason_to_stop_tests().await;
        }
        if let Some(why) = &*self.stopped.borrow() {
            return TestOutcome::NotTested(why.clone());
        }
        match work.await {
            Ok(seen) => TestOutcome::Observed(seen),
            Err(NoObservation::NotTested(why)) => TestOutcome::NotTested(why),
            Err(NoObservation::Failed(why)) => TestOutcome::Failed(why),
        }
    }

    /// Returns why the tests must stop: another process uses the GPU. Returns `None` if no other
    /// process uses the GPU.
    async fn reason_to_stop_tests(&self) -> Option<String> {
        if !self.setup.are_others_visible {
            return None;
        }
        let deadline = Instant::now() + CLIENT_CHANGE_DEADLINE;
        loop {
            let uuid = self.setup.uuid.clone();
            match self.setup.nvml.call(NVML_CALL_DEADLINE, move |gpus| gpus.processes(&uuid)).await {
                Err(error) => return Some(format!("NVML no longer reports which processes use the GPU: {error}")),
                Ok(processes) => {
                    let other = processes.iter().find(|process| !self.is_own_process(process.pid))?;
                    // NVML may still list a test process that has just exited.
                    if Instant::now() > deadline {
                        return Some(format!("process {} started to use the GPU", other.pid));
                    }
                }
            }
            sleep(CLIENT_CHANGE_POLL_INTERVAL).await;
        }
    }

    fn is_own_process(&self, pid: u32) -> bool {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        self.server.get() == Some(pid) || log.ready.contains(&pid)
    }

    /// Returns the daemon's pipe directory.
    fn pipe_directory(&self) -> PathBuf {
        self.directory.join("pipe")
    }

    async fn send_command(&self, command: Command) -> Result<String, NoObservation> {
        Ok(control::send_command(&self.pipe_directory(), &command, ANSWER_DEADLINE).await?)
    }

    /// Sends a command and records the answer.
    async fn send_and_record(
        &self,
        exchanges: &mut Vec<CommandExchange>,
        command: Command,
        set: Option<u64>,
    ) -> Result<(), NoObservation> {
        let answer = self.send_command(command.clone()).await?;
        exchanges.push(CommandExchange { command, answer, set });
        Ok(())
    }

    /// Returns the PID of the MPS server.
    fn server_pid(&self) -> Result<u32, NoObservation> {
        self.server.get().ok_or_else(|| NoObservation::NotTested("no MPS server is running".to_owned()))
    }

    fn program(&self) -> Result<&Program, NoObservation> {
        self.setup.program.as_ref().ok_or_else(|| NoObservation::NotTested(NO_PROGRAM_REASON.to_owned()))
    }

    fn run_options(&self) -> ProgramRunOptions {
        ProgramRunOptions { pipe: self.pipe_directory(), ..ProgramRunOptions::default() }
    }

    /// Returns the view of a program that sets no limits of its own.
    async fn view_gpu(&self) -> Result<GpuView, NoObservation> {
        Ok(self.program()?.run_and_view(&self.run_options()).await?)
    }

    /// Starts a program that waits for a line on its standard input.
    async fn start_waiting_program(&self, allocate_mib: Option<u64>) -> Result<RunningProgram, NoObservation> {
        Ok(self.program()?.start(&ProgramRunOptions { waits: true, allocate_mib, ..self.run_options() }).await?)
    }

    /// Sets the limits of the next program that connects.
    async fn set_limits(&self, percent: u8, mib: Option<u64>) -> Result<(), NoObservation> {
        // Check for a program first, because the tests need one.
        self.program()?;
        let server = self.server_pid()?;
        let actual = self.send_command(Command::SetThreads { server, percent }).await?;
        if !protocol::is_answer_with_percentage(&actual, percent) {
            return Err(UnexpectedAnswer::new(&actual).into());
        }
        let actual = self.send_command(Command::SetMemory { server, mib }).await?;
        if actual.trim().is_empty() { Ok(()) } else { Err(UnexpectedAnswer::new(&actual).into()) }
    }

    async fn set_usual_limits(&self) -> Result<(), NoObservation> {
        self.set_limits(USUAL_THREAD_PERCENTAGE, Some(self.limit_mib)).await
    }

    fn view_under_usual_limits(&self, view: GpuView) -> LimitedView {
        LimitedView { percent: USUAL_THREAD_PERCENTAGE, limit_mib: self.limit_mib, view }
    }

    /// Sends the commands that start a server, set and read limits, and list servers and clients.
    async fn send_commands(&self) -> Result<Vec<CommandExchange>, NoObservation> {
        let mut exchanges = Vec::new();
        let limit = Some(self.limit_mib);
        self.send_and_record(&mut exchanges, Command::SetDefaultThreads(USUAL_THREAD_PERCENTAGE), None).await?;
        self.send_and_record(&mut exchanges, Command::GetDefaultThreads, Some(USUAL_THREAD_PERCENTAGE.into())).await?;
        self.send_and_record(&mut exchanges, Command::SetDefaultMemory(self.limit_mib), None).await?;
        self.send_and_record(&mut exchanges, Command::GetDefaultMemory, limit).await?;
        self.send_and_record(&mut exchanges, Command::StartServer { uid: 0 }, None).await?;
        let server = self.wait_for_server().await?;
        self.server.set(Some(server));
        self.send_and_record(&mut exchanges, Command::ServerList, None).await?;
        self.send_and_record(&mut exchanges, Command::ServerStatus(server), None).await?;
        self.send_and_record(&mut exchanges, Command::SetThreads { server, percent: LOW_THREAD_PERCENTAGE }, None)
            .await?;
        self.send_and_record(&mut exchanges, Command::SetMemory { server, mib: limit }, None).await?;
        self.send_and_record(&mut exchanges, Command::GetMemory { server }, limit).await?;
        self.send_and_record(&mut exchanges, Command::SetMemory { server, mib: None }, None).await?;
        self.send_and_record(&mut exchanges, Command::GetMemory { server }, None).await?;
        self.send_and_record(&mut exchanges, Command::Clients(server), None).await?;
        Ok(exchanges)
    }

    /// Waits until the server serves. Returns its PID.
    async fn wait_for_server(&self) -> Result<u32, NoObservation> {
        let deadline = Instant::now() + SERVER_START_DEADLINE;
        while Instant::now() < deadline {
            if let Some(&server) = protocol::parse_pids(&self.send_command(Command::ServerList).await?)?.first()
                && protocol::parse_server_state(&self.send_command(Command::ServerStatus(server)).await?)?
                    == ServerState::Active
            {
                return Ok(server);
            }
            sleep(CLIENT_CHANGE_POLL_INTERVAL).await;
        }
        Err(NoObservation::Failed(format!("no MPS server became ready within {} s", SERVER_START_DEADLINE.as_secs())))
    }

    /// Sends privileged commands through the socket `control`, to which programs also have access.
    async fn send_unprivileged_commands(&self) -> Result<Vec<CommandExchange>, NoObservation> {
        let server = self.server_pid()?;
        let mut exchanges = Vec::new();
        for command in [
            Command::SetDefaultThreads(USUAL_THREAD_PERCENTAGE),
            Command::SetDefaultMemory(self.limit_mib),
            Command::SetThreads { server, percent: USUAL_THREAD_PERCENTAGE },
            Command::SetMemory { server, mib: Some(self.limit_mib) },
            // Use the server's PID, which does not belong to a client.
            Command::Terminate { server, client: server },
        ] {
            let answer =
                control::send_command_to_socket(&self.pipe_directory().join("control"), &command, ANSWER_DEADLINE)
                    .await?;
            exchanges.push(CommandExchange { command, answer, set: None });
        }
        Ok(exchanges)
    }

    /// Returns whether MPS lists a client, and whether NVML lists the client as an MPS client. The
    /// second value is `None` if this driver does not distinguish clients from other processes.
    async fn check_client_lists(&self) -> Result<(bool, Option<bool>), NoObservation> {
        self.set_limits(100, None).await?;
        let server = self.server_pid()?;
        let client = self.start_waiting_program(None).await?;
        self.client.set(Some(client.pid));
        let deadline = Instant::now() + CLIENT_CHANGE_DEADLINE;
        let known = loop {
            let by_mps =
                protocol::parse_pids(&self.send_command(Command::Clients(server)).await?)?.contains(&client.pid);
            let uuid = self.setup.uuid.clone();
            let found = self.setup.nvml.call(NVML_CALL_DEADLINE, move |gpus| gpus.device_processes(&uuid)).await?;
            let listed = found.processes.iter().any(|process| process.pid == client.pid && process.mps);
            if (by_mps && listed) || Instant::now() > deadline {
                break (by_mps, found.are_clients_known.then_some(listed));
            }
            sleep(CLIENT_CHANGE_POLL_INTERVAL).await;
        };
        client.finish().await;
        Ok(known)
    }

    /// Returns the views of two running programs that started under different limits.
    async fn view_under_two_limits(&self) -> Result<[LimitedView; 2], NoObservation> {
        self.set_usual_limits().await?;
        let first = self.start_waiting_program(None).await?;
        let low = self.limit_mib / 2;
        self.set_limits(LOW_THREAD_PERCENTAGE, Some(low)).await?;
        let second = LimitedView { percent: LOW_THREAD_PERCENTAGE, limit_mib: low, view: self.view_gpu().await? };
        let first_saw = self.view_under_usual_limits(first.view);
        first.finish().await;
        Ok([first_saw, second])
    }

    /// Returns the SMs that a program sees with each of [`THREAD_PERCENTAGES_TO_TEST`].
    async fn view_rounded_sms(&self) -> Result<Vec<(u8, u32)>, NoObservation> {
        let mut seen = Vec::new();
        for percent in THREAD_PERCENTAGES_TO_TEST {
            self.set_limits(percent, None).await?;
            seen.push((percent, self.view_gpu().await?.sms));
        }
        Ok(seen)
    }

    async fn view_with_environment(&self, percent: u8, mib: u64) -> Result<GpuView, NoObservation> {
        let environment = [
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent.to_string()),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={mib}M")),
        ];
        let start = ProgramRunOptions { environment: environment.into(), ..self.run_options() };
        Ok(self.program()?.run_and_view(&start).await?)
    }

    /// Returns the views of programs that request more or less than their limits.
    async fn view_with_requested_limits(&self) -> Result<LoweredLimits, NoObservation> {
        self.set_usual_limits().await?;
        let set = self.view_under_usual_limits(self.view_gpu().await?);
        let requested_more = self.view_with_environment(100, self.setup.memory_mib).await?;
        let low = self.limit_mib / 2;
        let view = self.view_with_environment(LOW_THREAD_PERCENTAGE, low).await?;
        Ok(LoweredLimits {
            set,
            requested_more,
            requested_less: LimitedView { percent: LOW_THREAD_PERCENTAGE, limit_mib: low, view },
        })
    }

    /// Allocates half of the memory limit in one program, and the whole memory limit in another
    /// program.
    async fn allocate_up_to_limit(&self) -> Result<AllocationResults, NoObservation> {
        self.set_usual_limits().await?;
        let half = self.program()?.allocate(&self.pipe_directory(), self.limit_mib / 2).await?;
        let all = self.program()?.allocate(&self.pipe_directory(), self.limit_mib).await?;
        Ok(AllocationResults { limit_mib: self.limit_mib, half, all })
    }

    /// Returns the view of a program with an invalid memory limit in its environment.
    async fn view_with_invalid_limit(&self) -> Result<LimitedView, NoObservation> {
        self.set_usual_limits().await?;
        let environment = [("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "junk".to_owned())].into();
        let view = self.program()?.run_and_view(&ProgramRunOptions { environment, ..self.run_options() }).await?;
        Ok(self.view_under_usual_limits(view))
    }

    /// Returns the view of another user's program, while a program of root runs.
    async fn view_of_other_user(&self) -> Result<LimitedView, NoObservation> {
        if !rustix::process::geteuid().is_root() {
            return Err(NoObservation::NotTested("needs root".to_owned()));
        }
        self.set_usual_limits().await?;
        let root = self.start_waiting_program(None).await?;
        let view =
            self.program()?.run_and_view(&ProgramRunOptions { uid: Some(NOBODY_UID), ..self.run_options() }).await;
        root.finish().await;
        match view {
            Err(error @ ProgramError::Broken(_)) => {
                Err(NoObservation::NotTested(format!("as user {NOBODY_UID}: {error}")))
            }
            view => Ok(self.view_under_usual_limits(view?)),
        }
    }

    /// Returns the view of a program that connects through a hard link to the socket.
    async fn view_through_hard_link(&self) -> Result<LimitedView, NoObservation> {
        self.set_usual_limits().await?;
        let pipe = self.directory.join("link");
        fs::hard_link(self.pipe_directory().join("control"), pipe.join("control"))?;
        let view = self.program()?.run_and_view(&ProgramRunOptions { pipe, ..ProgramRunOptions::default() }).await?;
        Ok(self.view_under_usual_limits(view))
    }

    async fn view_without_control(&self) -> Result<Result<GpuView, i64>, NoObservation> {
        let start = ProgramRunOptions { pipe: self.directory.join("empty"), ..ProgramRunOptions::default() };
        match self.program()?.run_and_view(&start).await {
            Ok(view) => Ok(Ok(view)),
            Err(ProgramError::Cuda(code)) => Ok(Err(code)),
            Err(error) => Err(error.into()),
        }
    }

    /// Terminates one of two clients, and observes both clients' next calls.
    async fn terminate_client(&self) -> Result<ClientTermination, NoObservation> {
        self.set_usual_limits().await?;
        let server = self.server_pid()?;
        let mut client = self.start_waiting_program(Some(1)).await?;
        let mut neighbour = self.start_waiting_program(Some(1)).await?;
        let terminate = Command::Terminate { server, client: client.pid };
        let answer = control::send_command(&self.pipe_directory(), &terminate, TERMINATE_DEADLINE).await?;
        let termination =
            ClientTermination { answer, client: client.resume().await?, neighbour: neighbour.resume().await? };
        client.finish().await;
        neighbour.finish().await;
        Ok(termination)
    }

    /// Returns the view of a program whose server started after a shutdown, with the default
    /// limits.
    async fn view_under_defaults(&self) -> Result<LimitedView, NoObservation> {
        self.set_usual_limits().await?;
        let server = self.server_pid()?;
        self.send_command(Command::ShutdownServer { server, force: false }).await?;
        let deadline = Instant::now() + CLIENT_CHANGE_DEADLINE;
        while !protocol::parse_pids(&self.send_command(Command::ServerList).await?)?.is_empty() {
            if Instant::now() > deadline {
                return Err(NoObservation::Failed("the server does not shut down".to_owned()));
            }
            sleep(CLIENT_CHANGE_POLL_INTERVAL).await;
        }
        Ok(self.view_under_usual_limits(self.view_gpu().await?))
    }

    /// Returns the events that the daemon has logged. Waits at most [`CLIENT_CHANGE_DEADLINE`] for
    /// missing events.
    async fn wait_for_log(&self) -> LoggedEvents {
        let deadline = Instant::now() + CLIENT_CHANGE_DEADLINE;
        loop {
            let logged = {
                let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                let client = self.client.get();
                LoggedEvents {
                    version: log.version,
                    server_ready: self.server.get().is_some_and(|server| log.ready.contains(&server)),
                    client_connected: client.map(|client| log.connected.contains(&client)),
                    client_disconnected: client.map(|client| log.disconnected.contains(&client)),
                }
            };
            let complete = logged.version.is_some() && logged.server_ready && logged.client_disconnected != Some(false);
            if complete || Instant::now() > deadline {
                return logged;
            }
            sleep(CLIENT_CHANGE_POLL_INTERVAL).await;
        }
    }
}
