//! Defines the driver behaviour that Cleave expects, and compares it with the observations. Pure.
use cleave_plan::mps;
use cleave_plan::units::{Percent, Sms};
use serde::Serialize;

use super::observed::{
    AllocationResult, ClientTermination, CommandExchange, GpuView, LimitedView, LoggedEvents, LoweredLimits,
    Observations, TestOutcome, TestedGpu,
};
use crate::mps::protocol::{self, Command, ServerState, TerminateResult};
use crate::nvml::ComputeMode;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const CUDA_ERROR_OUT_OF_MEMORY: i64 = 2;
/// `CUDA_ERROR_MPS_CLIENT_TERMINATED`.
const CUDA_ERROR_MPS_CLIENT_TERMINATED: i64 = 810;

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum CheckVerdict {
    /// The driver behaves as Cleave expects.
    AsExpected,
    /// The driver behaves differently.
    Differs,
    NotTested,
}

/// A check and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CheckResult {
    pub(super) check: &'static str,
    pub(super) expected: &'static str,
    pub(super) observed: String,
    pub(super) verdict: CheckVerdict,
    /// The effect on users if the driver differs.
    pub(super) impact: &'static str,
}

/// A behaviour of the driver that Cleave expects.
struct ExpectedBehaviour {
    name: &'static str,
    expected: &'static str,
    impact: &'static str,
}

impl ExpectedBehaviour {
    /// Compares the outcome of a test with the expected behaviour.
    fn judge_outcome<T>(self, outcome: &TestOutcome<T>, judge: impl FnOnce(&T) -> (bool, String)) -> CheckResult {
        let (verdict, observed) = match outcome {
            TestOutcome::NotTested(why) => (CheckVerdict::NotTested, why.clone()),
            TestOutcome::Failed(why) => (CheckVerdict::Differs, why.clone()),
            TestOutcome::Observed(observed) => match judge(observed) {
                (true, observed) => (CheckVerdict::AsExpected, observed),
                (false, observed) => (CheckVerdict::Differs, observed),
            },
        };
        CheckResult { check: self.name, expected: self.expected, observed, verdict, impact: self.impact }
    }

    /// Creates the result of a check that the doctor does not run. `why` is the reason.
    fn not_tested(self, why: &str) -> CheckResult {
        self.judge_outcome(&TestOutcome::<()>::NotTested(why.to_owned()), |()| (true, String::new()))
    }
}

/// Returns the results of all checks, in the order of the report.
pub(super) fn judge_all_checks(seen: &Observations, gpu: TestedGpu) -> Vec<CheckResult> {
    let mut findings = judge_daemon(seen);
    findings.extend(judge_limits(seen, gpu));
    findings.extend(judge_known_limit_bypasses(seen, gpu));
    findings.extend(judge_clients(seen, gpu));
    findings
}

/// Returns the results of the checks of the daemon's start and protocol.
fn judge_daemon(seen: &Observations) -> Vec<CheckResult> {
    let start = ExpectedBehaviour {
        name: "start",
        expected: "the control daemon runs in the foreground and answers within 15 s",
        impact: "no MPS share of this node becomes healthy",
    };
    let greeting = ExpectedBehaviour {
        name: "door",
        expected: "the daemon speaks the handshake of driver 580, so Cleave can put doors in front of the daemon",
        impact: "MPS shares are Unhealthy, unless the SharingPolicy sets mps.enforcement: Advisory: a pod can then remove the limits from its environment",
    };
    let commands = ExpectedBehaviour {
        name: "commands",
        expected: "the daemon knows Cleave's commands and answers them in the known form",
        impact: "limits cannot be set or read back, so no share becomes healthy, or clients cannot be terminated",
    };
    let unprivileged = ExpectedBehaviour {
        name: "privileges",
        expected: "programs cannot change settings through the socket `control`",
        impact: "a program that reaches the daemon's own socket can reconfigure its neighbours. Pods reach only Cleave's door, which refuses \
                 commands; with advisory limits they reach the daemon",
    };
    let log = ExpectedBehaviour {
        name: "log",
        expected: "the daemon logs to standard output when a server is ready and when clients connect and exit",
        impact: "faults and exits of clients are reported late or never",
    };
    vec![
        start.judge_outcome(&seen.start, |ms| (true, format!("answered after {ms} ms"))),
        greeting.judge_outcome(&seen.greeting, |&known| {
            (known, if known { "known greeting" } else { "unknown greeting" }.to_owned())
        }),
        commands.judge_outcome(&seen.commands, |exchanges| {
            let unexpected: Vec<String> =
                exchanges.iter().filter(|exchange| !has_answer_of_known_form(exchange)).map(format_exchange).collect();
            let seen = if unexpected.is_empty() {
                format!("{} sent, all answered", exchanges.len())
            } else {
                unexpected.join("; ")
            };
            (unexpected.is_empty(), seen)
        }),
        unprivileged.judge_outcome(&seen.unprivileged, |exchanges| {
            let accepted: Vec<String> = exchanges
                .iter()
                .filter(|exchange| !exchange.answer.contains("privilege"))
                .map(format_exchange)
                .collect();
            let seen =
                if accepted.is_empty() { format!("{} commands refused", exchanges.len()) } else { accepted.join("; ") };
            (accepted.is_empty(), seen)
        }),
        log.judge_outcome(&seen.log, judge_logged_events),
    ]
}

fn judge_logged_events(log: &LoggedEvents) -> (bool, String) {
    let missing: Vec<&str> = [
        (log.version.is_some(), "the version"),
        (log.server_ready, "a ready server"),
        (log.client_connected != Some(false), "a connecting client"),
        (log.client_disconnected != Some(false), "an exiting client"),
    ]
    .into_iter()
    .filter_map(|(is_there, what)| (!is_there).then_some(what))
    .collect();
    match (missing.as_slice(), log.client_connected) {
        ([], Some(_)) => (true, "version, server and clients are logged".to_owned()),
        ([], None) => (true, "version and server are logged; there was no client".to_owned()),
        (missing, _) => (false, format!("not logged: {}", missing.join(", "))),
    }
}

fn format_exchange(exchange: &CommandExchange) -> String {
    format!("`{}` answers {:?}", exchange.command, exchange.answer.trim())
}

/// Returns whether an answer has the form that Cleave parses.
fn has_answer_of_known_form(CommandExchange { command, answer, set }: &CommandExchange) -> bool {
    match command {
        Command::ServerList | Command::Clients(_) => protocol::parse_pids(answer).is_ok(),
        Command::ServerStatus(_) => {
            protocol::parse_server_state(answer).is_ok_and(|state| state == ServerState::Active)
        }
        Command::SetThreads { percent, .. } | Command::SetDefaultThreads(percent) => {
            protocol::is_answer_with_percentage(answer, *percent)
        }
        Command::GetDefaultThreads => set
            .and_then(|set| u8::try_from(set).ok())
            .is_some_and(|set| protocol::is_answer_with_percentage(answer, set)),
        Command::GetMemory { .. } | Command::GetDefaultMemory => protocol::is_answer_with_memory_limit(answer, *set),
        Command::StartServer { .. }
        | Command::ShutdownServer { .. }
        | Command::SetMemory { .. }
        | Command::SetDefaultMemory(_)
        | Command::Quit { .. } => answer.trim().is_empty(),
        Command::Terminate { .. } => protocol::parse_terminate_result(answer).is_ok(),
    }
}

/// Returns the SMs that Cleave reports for a percentage.
fn expected_sms(percent: u8, gpu: TestedGpu) -> u32 {
    mps::usable_sms(Percent::new(percent).ok(), Sms(gpu.sms)).0
}

/// Returns whether exactly these limits apply to the program, neither higher nor lower ones.
fn are_limits_exact(bound: &LimitedView, gpu: TestedGpu) -> bool {
    bound.view.sms == expected_sms(bound.percent, gpu) && is_free_memory_limited(bound.view, bound.limit_mib)
}

/// Returns whether free memory matches a limit. The context uses a part of the limit. On known
/// GPUs, this part is less than half of the smallest tested limit.
fn is_free_memory_limited(view: GpuView, limit_mib: u64) -> bool {
    (limit_mib / 2..=limit_mib).contains(&view.free_mib)
}

fn describe_view(GpuView { sms, free_mib }: GpuView) -> String {
    format!("{sms} SMs and {free_mib} MiB free")
}

fn describe_limited_view(bound: &LimitedView) -> String {
    format!("at {} % and {} MiB: {}", bound.percent, bound.limit_mib, describe_view(bound.view))
}

/// Returns the results of the checks of limits.
fn judge_limits(seen: &Observations, gpu: TestedGpu) -> Vec<CheckResult> {
    let bound = ExpectedBehaviour {
        name: "limits",
        expected: "a server's limits apply to the next client that connects, not to clients that already run",
        impact: "pods may run under each other's limits: do not use MPS on this node",
    };
    let rounding = ExpectedBehaviour {
        name: "sms",
        expected: "a percentage is rounded down to an even number of SMs, at least 8",
        impact: "`cleave status` reports other numbers of SMs than pods have",
    };
    let lowered = ExpectedBehaviour {
        name: "lower",
        expected: "a program's environment can lower its limits, never raise them",
        impact: "a pod can exceed its share by setting a variable. Admission refuses such pods, but a program can still set it",
    };
    let memory = ExpectedBehaviour {
        name: "memory",
        expected: "a memory limit is enforced: a program cannot allocate more",
        impact: "a pod can use its neighbours' memory. Cleave reports the pod within 2 s, and evicts the pod only with `enforcement: Evict`",
    };
    let defaults = ExpectedBehaviour {
        name: "defaults",
        expected: "a server that starts later has the daemon's default limits",
        impact: "after a server exits, the first programs may run without limits unless the door sets them",
    };
    vec![
        bound.judge_outcome(&seen.bound, |both| {
            (both.iter().all(|one| are_limits_exact(one, gpu)), both.each_ref().map(describe_limited_view).join("; "))
        }),
        rounding.judge_outcome(&seen.rounding, |seen| {
            let other: Vec<String> = seen
                .iter()
                .filter(|&&(percent, sms)| sms != expected_sms(percent, gpu))
                .map(|&(percent, sms)| format!("{percent} %: {sms}, not {}", expected_sms(percent, gpu)))
                .collect();
            let all = || seen.iter().map(|(percent, sms)| format!("{percent} %: {sms}")).collect::<Vec<_>>().join(", ");
            (other.is_empty(), if other.is_empty() { all() } else { other.join(", ") })
        }),
        lowered.judge_outcome(&seen.lowered, |lowered| judge_lowered_limits(lowered, gpu)),
        memory.judge_outcome(&seen.memory, |memory| {
            let of = |allocated: AllocationResult| {
                allocated.map_or_else(|code| format!("error {code}"), |()| "allocated".to_owned())
            };
            let good = memory.half.is_ok() && memory.all == Err(CUDA_ERROR_OUT_OF_MEMORY);
            (good, format!("limit {} MiB: half {}, all {}", memory.limit_mib, of(memory.half), of(memory.all)))
        }),
        defaults.judge_outcome(&seen.defaults, |bound| (are_limits_exact(bound, gpu), describe_limited_view(bound))),
    ]
}

fn judge_lowered_limits(lowered: &LoweredLimits, gpu: TestedGpu) -> (bool, String) {
    let LoweredLimits { set, requested_more, requested_less } = lowered;
    let raised = LimitedView { view: *requested_more, ..*set };
    let good = are_limits_exact(set, gpu) && are_limits_exact(&raised, gpu) && are_limits_exact(requested_less, gpu);
    (
        good,
        format!(
            "{}; requesting more: {}; less: {}",
            describe_limited_view(set),
            describe_view(*requested_more),
            describe_view(requested_less.view)
        ),
    )
}

fn judge_known_limit_bypasses(seen: &Observations, gpu: TestedGpu) -> Vec<CheckResult> {
    let escape = ExpectedBehaviour {
        name: "escape",
        expected: "known hole: an invalid memory limit in a program's environment removes its limit",
        impact: "better than expected: this driver enforces the limit. Cleave still refuses such pods and watches memory",
    };
    let plain = ExpectedBehaviour {
        name: "no control",
        expected: "known hole: without a control socket a program runs without MPS, unless the compute mode forbids it",
        impact: "differs from the known hole: such programs may wait or fail instead of running without MPS",
    };
    vec![
        escape.judge_outcome(&seen.escape, |bound| {
            let escaped = bound.view.free_mib > bound.limit_mib;
            (escaped, format!("limit {} MiB, {} MiB free", bound.limit_mib, bound.view.free_mib))
        }),
        plain.judge_outcome(&seen.no_control, |plain| {
            let forbidden = matches!(gpu.compute_mode, Some(ComputeMode::ExclusiveProcess | ComputeMode::Prohibited));
            match plain {
                Ok(view) => (!forbidden && view.sms == gpu.sms, describe_view(*view)),
                Err(code) => (forbidden, format!("error {code}")),
            }
        }),
    ]
}

/// Returns the results of the checks of clients: which clients can connect, how MPS and NVML list
/// clients, and how a client is terminated.
fn judge_clients(seen: &Observations, gpu: TestedGpu) -> Vec<CheckResult> {
    let users = ExpectedBehaviour {
        name: "users",
        expected: "with -multiuser-server several users share a server at once",
        impact: "a pod of another user waits until the first has exited: run pods that share a GPU as the same user",
    };
    let link = ExpectedBehaviour {
        name: "link",
        expected: "a directory that contains only a hard link to control is enough for a program",
        impact: "with advisory limits, pods cannot reach MPS",
    };
    let by_mps = ExpectedBehaviour {
        name: "clients",
        expected: "MPS lists its clients by their PIDs",
        impact: "clients of deleted pods are not terminated through MPS and may break their neighbours",
    };
    let by_nvml = ExpectedBehaviour {
        name: "nvml",
        expected: "NVML lists MPS clients, marked as such",
        impact: "pods that bypass MPS or exceed their memory are not detected",
    };
    let ended = ExpectedBehaviour {
        name: "terminate",
        expected: "terminate_client terminates one client's contexts (error 810) and no other's",
        impact: "deleting a pod can break its neighbours: let programs exit before you delete pods",
    };
    let contexts = ExpectedBehaviour {
        name: "48 clients",
        expected: "a server serves 48 clients and refuses the next one with error 808",
        impact: "Cleave refuses more than 48 shares of a GPU, even if this driver supports more",
    };
    let fault = ExpectedBehaviour {
        name: "fault",
        expected: "an illegal access breaks all clients of the server, which serves again once they have exited",
        impact: "after a fault, shares stay unhealthy until the daemon is replaced",
    };
    vec![
        users.judge_outcome(&seen.users, |bound| {
            (are_limits_exact(bound, gpu), format!("beside root: {}", describe_limited_view(bound)))
        }),
        link.judge_outcome(&seen.link, |bound| (are_limits_exact(bound, gpu), describe_limited_view(bound))),
        by_mps.judge_outcome(&seen.listed_by_mps, |&known| (known, describe_whether_listed(Some(known)).to_owned())),
        by_nvml.judge_outcome(&seen.listed_by_nvml, |&known| {
            (known == Some(true), describe_whether_listed(known).to_owned())
        }),
        ended.judge_outcome(&seen.terminated, judge_termination),
        contexts.not_tested("needs 49 programs; measured on driver 580"),
        fault.not_tested("would break the GPU's clients; measured on driver 580"),
    ]
}

fn describe_whether_listed(listed: Option<bool>) -> &'static str {
    match listed {
        Some(true) => "listed",
        Some(false) => "not listed",
        None => "this driver does not distinguish MPS clients from other processes",
    }
}

fn judge_termination(ended: &ClientTermination) -> (bool, String) {
    let of = |allocated: AllocationResult| {
        allocated.map_or_else(|code| format!("error {code}"), |()| "continues".to_owned())
    };
    let answered = protocol::parse_terminate_result(&ended.answer) == Ok(TerminateResult::Done);
    let good = answered && ended.client == Err(CUDA_ERROR_MPS_CLIENT_TERMINATED) && ended.neighbour.is_ok();
    let answer = if answered { String::new() } else { format!("answers {:?}; ", ended.answer.trim()) };
    (good, format!("{answer}the client: {}; its neighbour: {}", of(ended.client), of(ended.neighbour)))
}

#[cfg(test)]
mod tests {
    use super::super::observed::AllocationResults;
    use super::*;

    const H200: TestedGpu = TestedGpu { sms: 132, compute_mode: Some(ComputeMode::Default) };
    const FIFTY_PERCENT_LIMIT: LimitedView =
        LimitedView { percent: 50, limit_mib: 8192, view: GpuView { sms: 66, free_mib: 7921 } };
    const TWENTY_PERCENT_LIMIT: LimitedView =
        LimitedView { percent: 20, limit_mib: 4096, view: GpuView { sms: 26, free_mib: 3973 } };
    const SERVER_PID: u32 = 17;

    fn exchange(command: Command, answer: &str, set: Option<u64>) -> CommandExchange {
        CommandExchange { command, answer: answer.to_owned(), set }
    }

    /// Returns the observations of an H200 under driver 580. Commands over `control` are refused,
    /// as Cleave expects, although the measured driver obeys them.
    fn measured_observations() -> Observations {
        let commands = vec![
            exchange(Command::SetDefaultThreads(50), "50.0", None),
            exchange(Command::GetDefaultThreads, "50.0", Some(50)),
            exchange(Command::SetDefaultMemory(8192), "", None),
            exchange(Command::GetDefaultMemory, "8G", Some(8192)),
            exchange(Command::StartServer { uid: 0 }, "", None),
            exchange(Command::ServerList, "17", None),
            exchange(Command::ServerStatus(SERVER_PID), "ACTIVE", None),
            exchange(Command::SetThreads { server: SERVER_PID, percent: 20 }, "20.0", None),
            exchange(Command::SetMemory { server: SERVER_PID, mib: Some(8192) }, "", None),
            exchange(Command::GetMemory { server: SERVER_PID }, "8G", Some(8192)),
            exchange(Command::GetMemory { server: SERVER_PID }, "", None),
            exchange(Command::Clients(SERVER_PID), "", None),
        ];
        let refused = exchange(Command::SetDefaultThreads(50), "Not enough privilege to execute it", None);
        let log = LoggedEvents {
            version: Some(13000),
            server_ready: true,
            client_connected: Some(true),
            client_disconnected: Some(true),
        };
        Observations {
            start: TestOutcome::Observed(21),
            greeting: TestOutcome::Observed(true),
            commands: TestOutcome::Observed(commands),
            unprivileged: TestOutcome::Observed(vec![refused]),
            log: TestOutcome::Observed(log),
            listed_by_mps: TestOutcome::Observed(true),
            listed_by_nvml: TestOutcome::Observed(Some(true)),
            bound: TestOutcome::Observed([FIFTY_PERCENT_LIMIT, TWENTY_PERCENT_LIMIT]),
            rounding: TestOutcome::Observed(vec![(1, 8), (10, 12), (33, 42), (90, 118), (100, 132)]),
            lowered: TestOutcome::Observed(LoweredLimits {
                set: FIFTY_PERCENT_LIMIT,
                requested_more: FIFTY_PERCENT_LIMIT.view,
                requested_less: TWENTY_PERCENT_LIMIT,
            }),
            memory: TestOutcome::Observed(AllocationResults { limit_mib: 8192, half: Ok(()), all: Err(2) }),
            escape: TestOutcome::Observed(LimitedView {
                view: GpuView { sms: 66, free_mib: 142_815 },
                ..FIFTY_PERCENT_LIMIT
            }),
            users: TestOutcome::Observed(FIFTY_PERCENT_LIMIT),
            link: TestOutcome::Observed(FIFTY_PERCENT_LIMIT),
            terminated: TestOutcome::Observed(ClientTermination {
                answer: "0".to_owned(),
                client: Err(810),
                neighbour: Ok(()),
            }),
            defaults: TestOutcome::Observed(FIFTY_PERCENT_LIMIT),
            no_control: TestOutcome::Observed(Ok(GpuView { sms: 132, free_mib: 142_575 })),
        }
    }

    /// Returns the names of the checks with verdict [`CheckVerdict::Differs`].
    fn names_of_differing_checks(seen: &Observations, gpu: TestedGpu) -> Vec<&'static str> {
        let differs = |finding: &CheckResult| (finding.verdict == CheckVerdict::Differs).then_some(finding.check);
        judge_all_checks(seen, gpu).iter().filter_map(differs).collect()
    }

    /// Returns the names of the differing checks after a change of [`measured_observations`].
    fn differing_checks_after(change: impl FnOnce(&mut Observations)) -> Vec<&'static str> {
        let mut seen = measured_observations();
        change(&mut seen);
        names_of_differing_checks(&seen, H200)
    }

    #[test]
    fn the_measured_driver_is_as_expected_in_all_tested_checks() {
        let findings = judge_all_checks(&measured_observations(), H200);
        let not: Vec<&CheckResult> =
            findings.iter().filter(|finding| finding.verdict != CheckVerdict::AsExpected).collect();
        assert!(not.iter().all(|finding| finding.verdict == CheckVerdict::NotTested), "{not:#?}");
        assert_eq!(not.iter().map(|finding| finding.check).collect::<Vec<_>>(), ["48 clients", "fault"]);
    }

    #[test]
    fn a_skipped_test_is_not_tested_and_a_failed_test_differs() {
        let left = judge_all_checks(&Observations::for_skipped_tests("no GPU is free"), H200);
        assert!(left.iter().all(|finding| finding.verdict == CheckVerdict::NotTested));
        assert_eq!(left[0].observed, "no GPU is free");
        assert_eq!(differing_checks_after(|seen| seen.start = TestOutcome::Failed("it ends".to_owned())), ["start"]);
        assert_eq!(differing_checks_after(|seen| seen.users = TestOutcome::Failed("no output".to_owned())), ["users"]);
    }

    #[test]
    fn an_unknown_handshake_or_answer_differs() {
        assert_eq!(differing_checks_after(|seen| seen.greeting = TestOutcome::Observed(false)), ["door"]);
        for (command, answer, set) in [
            (Command::ServerList, "Unknown command \"get_server_list\"", None),
            (Command::ServerStatus(SERVER_PID), "FAULT", None),
            (Command::GetMemory { server: SERVER_PID }, "", Some(8192)),
            (Command::GetMemory { server: SERVER_PID }, "8G", None),
            (Command::GetDefaultThreads, "100.0", Some(50)),
            (Command::SetThreads { server: SERVER_PID, percent: 20 }, "", None),
            (Command::SetMemory { server: SERVER_PID, mib: None }, "Usage: …", None),
        ] {
            let unexpected = exchange(command, answer, set);
            assert_eq!(
                differing_checks_after(|seen| seen.commands = TestOutcome::Observed(vec![unexpected.clone()])),
                ["commands"],
                "{unexpected:?}"
            );
        }
        let accepted = exchange(Command::SetDefaultThreads(50), "50.0", None);
        assert_eq!(
            differing_checks_after(|seen| seen.unprivileged = TestOutcome::Observed(vec![accepted])),
            ["privileges"]
        );
    }

    #[test]
    fn an_incomplete_log_differs() {
        let log = LoggedEvents {
            version: Some(13000),
            server_ready: true,
            client_connected: Some(true),
            client_disconnected: Some(true),
        };
        for less in [
            LoggedEvents { version: None, ..log.clone() },
            LoggedEvents { server_ready: false, ..log.clone() },
            LoggedEvents { client_connected: Some(false), ..log.clone() },
            LoggedEvents { client_disconnected: Some(false), ..log.clone() },
        ] {
            assert_eq!(differing_checks_after(|seen| seen.log = TestOutcome::Observed(less)), ["log"]);
        }
        assert!(
            differing_checks_after(|seen| seen.log =
                TestOutcome::Observed(LoggedEvents { client_connected: None, client_disconnected: None, ..log }))
            .is_empty()
        );
    }

    #[test]
    fn limits_that_do_not_apply_differ() {
        let more_sms = LimitedView { view: GpuView { sms: 132, ..FIFTY_PERCENT_LIMIT.view }, ..FIFTY_PERCENT_LIMIT };
        let more_memory =
            LimitedView { view: GpuView { free_mib: 100_000, ..FIFTY_PERCENT_LIMIT.view }, ..FIFTY_PERCENT_LIMIT };
        let no_memory =
            LimitedView { view: GpuView { free_mib: 100, ..FIFTY_PERCENT_LIMIT.view }, ..FIFTY_PERCENT_LIMIT };
        for other in [more_sms, more_memory, no_memory] {
            assert_eq!(
                differing_checks_after(|seen| seen.bound = TestOutcome::Observed([other, TWENTY_PERCENT_LIMIT])),
                ["limits"]
            );
            assert_eq!(
                differing_checks_after(|seen| seen.bound = TestOutcome::Observed([TWENTY_PERCENT_LIMIT, other])),
                ["limits"]
            );
            assert_eq!(differing_checks_after(|seen| seen.defaults = TestOutcome::Observed(other)), ["defaults"]);
            assert_eq!(differing_checks_after(|seen| seen.users = TestOutcome::Observed(other)), ["users"]);
            assert_eq!(differing_checks_after(|seen| seen.link = TestOutcome::Observed(other)), ["link"]);
            let raised = LoweredLimits {
                set: FIFTY_PERCENT_LIMIT,
                requested_more: other.view,
                requested_less: TWENTY_PERCENT_LIMIT,
            };
            assert_eq!(differing_checks_after(|seen| seen.lowered = TestOutcome::Observed(raised)), ["lower"]);
        }
        let deaf = LoweredLimits {
            set: FIFTY_PERCENT_LIMIT,
            requested_more: FIFTY_PERCENT_LIMIT.view,
            requested_less: LimitedView { view: FIFTY_PERCENT_LIMIT.view, ..TWENTY_PERCENT_LIMIT },
        };
        assert_eq!(differing_checks_after(|seen| seen.lowered = TestOutcome::Observed(deaf)), ["lower"]);
        assert_eq!(
            differing_checks_after(|seen| seen.rounding = TestOutcome::Observed(vec![(10, 12), (33, 43)])),
            ["sms"]
        );
        for (half, all) in [(Ok(()), Ok(())), (Err(2), Err(2)), (Ok(()), Err(700))] {
            let memory = AllocationResults { limit_mib: 8192, half, all };
            assert_eq!(differing_checks_after(|seen| seen.memory = TestOutcome::Observed(memory)), ["memory"]);
        }
    }

    #[test]
    fn a_limit_that_programs_can_no_longer_exceed_differs() {
        assert_eq!(differing_checks_after(|seen| seen.escape = TestOutcome::Observed(FIFTY_PERCENT_LIMIT)), ["escape"]);
        assert_eq!(differing_checks_after(|seen| seen.no_control = TestOutcome::Observed(Err(805))), ["no control"]);
        assert_eq!(
            differing_checks_after(|seen| seen.no_control = TestOutcome::Observed(Ok(FIFTY_PERCENT_LIMIT.view))),
            ["no control"]
        );
        let exclusive = TestedGpu { compute_mode: Some(ComputeMode::ExclusiveProcess), ..H200 };
        assert_eq!(
            names_of_differing_checks(&measured_observations(), exclusive),
            ["no control"],
            "it ran in spite of the mode"
        );
        let refused = Observations { no_control: TestOutcome::Observed(Err(46)), ..measured_observations() };
        assert!(names_of_differing_checks(&refused, exclusive).is_empty());
    }

    #[test]
    fn unlisted_clients_and_terminations_that_break_a_neighbour_differ() {
        assert_eq!(differing_checks_after(|seen| seen.listed_by_mps = TestOutcome::Observed(false)), ["clients"]);
        assert_eq!(differing_checks_after(|seen| seen.listed_by_nvml = TestOutcome::Observed(Some(false))), ["nvml"]);
        assert_eq!(differing_checks_after(|seen| seen.listed_by_nvml = TestOutcome::Observed(None)), ["nvml"]);
        for (answer, client, neighbour) in [("201", Err(810), Ok(())), ("0", Ok(()), Ok(())), ("0", Err(810), Err(700))]
        {
            let ended = ClientTermination { answer: answer.to_owned(), client, neighbour };
            assert_eq!(differing_checks_after(|seen| seen.terminated = TestOutcome::Observed(ended)), ["terminate"]);
        }
    }
}
