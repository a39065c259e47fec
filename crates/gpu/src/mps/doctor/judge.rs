//! What Cleave relies on of a driver, and whether what was seen is that. Nothing here does I/O.
use cleave_plan::mps;
use cleave_plan::units::{Percent, Sms};
use serde::Serialize;

use crate::mps::protocol::{self, Command, ServerState, Terminated};
use crate::nvml::ComputeMode;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i64 = 2;
/// `CUDA_ERROR_MPS_CLIENT_TERMINATED`.
const TERMINATED: i64 = 810;

/// What became of one look at the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome<T> {
    /// It was left out, and why.
    NotTried(String),
    /// It came to nothing that could be looked at: the driver, not the doctor, was in the way.
    Failed(String),
    /// This was seen.
    Seen(T),
}

impl<T> Outcome<T> {
    /// A part of what was seen.
    pub(super) fn map<U>(&self, part: impl FnOnce(&T) -> U) -> Outcome<U> {
        match self {
            Self::NotTried(why) => Outcome::NotTried(why.clone()),
            Self::Failed(why) => Outcome::Failed(why.clone()),
            Self::Seen(seen) => Outcome::Seen(part(seen)),
        }
    }
}

/// What was left out, and why.
fn left<T>(why: &str) -> Outcome<T> {
    Outcome::NotTried(why.to_owned())
}

/// What a program sees of the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sight {
    pub(super) sms: u32,
    pub(super) free_mib: u64,
}

/// The daemon's log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Log {
    pub(super) version: Option<u32>,
    pub(super) server_ready: bool,
    /// None where there was no client.
    pub(super) client_came: Option<bool>,
    pub(super) client_went: Option<bool>,
}

/// One command and its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) command: Command,
    pub(super) answer: String,
    /// Of a command that reads a setting: the percentage or MiB that were set.
    pub(super) set: Option<u64>,
}

/// Limits, and what a program saw that connected under them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bound {
    pub(super) percent: u8,
    pub(super) limit_mib: u64,
    pub(super) sight: Sight,
}

/// What programs saw under the same limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lowered {
    pub(super) set: Bound,
    /// With more in its environment.
    pub(super) asked_more: Sight,
    /// With these lower limits in its environment.
    pub(super) asked_less: Bound,
}

/// What allocating came to: an error of CUDA's.
pub(super) type Allocated = Result<(), i64>;

/// Allocations under a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) limit_mib: u64,
    pub(super) half: Allocated,
    pub(super) all: Allocated,
}

/// The end of a client by MPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) answer: String,
    /// What the client's next call gave, and a neighbour's.
    pub(super) client: Allocated,
    pub(super) neighbour: Allocated,
}

/// All that was looked at.
#[derive(Debug)]
pub(super) struct Observed {
    /// Milliseconds until it answered.
    pub(super) start: Outcome<u128>,
    /// Whether it greets as driver 580's.
    pub(super) greeting: Outcome<bool>,
    pub(super) commands: Outcome<Vec<Asked>>,
    /// Commands over the socket that is for everybody, which are for administrators alone.
    pub(super) unprivileged: Outcome<Vec<Asked>>,
    pub(super) log: Outcome<Log>,
    /// Whether MPS lists a client by its pid.
    pub(super) by_mps: Outcome<bool>,
    /// Whether NVML lists it as one of MPS. None: this driver does not tell clients from other processes.
    pub(super) by_nvml: Outcome<Option<bool>>,
    /// Two programs that connected one after the other, and ran side by side.
    pub(super) bound: Outcome<[Bound; 2]>,
    /// Percentages, and the SMs that programs saw.
    pub(super) rounding: Outcome<Vec<(u8, u32)>>,
    pub(super) lowered: Outcome<Lowered>,
    pub(super) memory: Outcome<Memory>,
    /// A limit, and what a program saw whose environment has a limit that means nothing.
    pub(super) escape: Outcome<Bound>,
    /// What another user's program saw beside root's.
    pub(super) users: Outcome<Bound>,
    /// What a program saw that has nothing of MPS but a link to `control`.
    pub(super) link: Outcome<Bound>,
    pub(super) ended: Outcome<Ended>,
    /// The daemon's defaults, and what the first program of a new server saw.
    pub(super) defaults: Outcome<Bound>,
    /// What a program saw without a `control` socket, or the error that it got.
    pub(super) plain: Outcome<Result<Sight, i64>>,
}

impl Observed {
    /// Nothing, and why.
    pub(super) fn nothing(why: &str) -> Self {
        Self {
            start: left(why),
            greeting: left(why),
            commands: left(why),
            unprivileged: left(why),
            log: left(why),
            by_mps: left(why),
            by_nvml: left(why),
            bound: left(why),
            rounding: left(why),
            lowered: left(why),
            memory: left(why),
            escape: left(why),
            users: left(why),
            link: left(why),
            ended: left(why),
            defaults: left(why),
            plain: left(why),
        }
    }
}

/// The GPU that it was seen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whole {
    pub(super) sms: u32,
    pub(super) compute_mode: Option<ComputeMode>,
}

/// What a check came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Verdict {
    /// As Cleave relies on.
    AsReliedOn,
    /// Otherwise.
    Differs,
    /// Nobody looked.
    NotTried,
}

/// A check and what it came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Finding {
    pub(super) check: &'static str,
    pub(super) relied_on: &'static str,
    pub(super) seen: String,
    pub(super) verdict: Verdict,
    /// What it means for a user if it differs.
    pub(super) otherwise: &'static str,
}

/// Something that Cleave relies on.
struct Check {
    name: &'static str,
    relied_on: &'static str,
    otherwise: &'static str,
}

impl Check {
    fn judge<T>(self, outcome: &Outcome<T>, judge: impl FnOnce(&T) -> (bool, String)) -> Finding {
        let (verdict, seen) = match outcome {
            Outcome::NotTried(why) => (Verdict::NotTried, why.clone()),
            Outcome::Failed(why) => (Verdict::Differs, why.clone()),
            Outcome::Seen(seen) => match judge(seen) {
                (true, seen) => (Verdict::AsReliedOn, seen),
                (false, seen) => (Verdict::Differs, seen),
            },
        };
        Finding { check: self.name, relied_on: self.relied_on, seen, verdict, otherwise: self.otherwise }
    }

    /// A fact that is taken from the driver that was measured.
    fn stated(self, why: &str) -> Finding {
        self.judge(&Outcome::<()>::NotTried(why.to_owned()), |()| (true, String::new()))
    }
}

/// Every check, in the order in which a person reads them.
pub(super) fn findings(seen: &Observed, whole: Whole) -> Vec<Finding> {
    let mut findings = daemon(seen);
    findings.extend(limits(seen, whole));
    findings.extend(holes(seen, whole));
    findings.extend(lives(seen, whole));
    findings
}

fn daemon(seen: &Observed) -> Vec<Finding> {
    let start = Check {
        name: "start",
        relied_on: "the control daemon runs in the foreground and answers within 15 s",
        otherwise: "no MPS share of this node becomes Healthy",
    };
    let greeting = Check {
        name: "door",
        relied_on: "the daemon speaks driver 580's handshake, so that Cleave's door can stand before it",
        otherwise: "limits are advisory (GpuNode says so): pods have them by their environment, and could take them off",
    };
    let commands = Check {
        name: "commands",
        relied_on: "the commands that Cleave gives are known, and their answers have the known shape",
        otherwise: "limits cannot be set or read back, so that no share becomes Healthy, or clients cannot be ended",
    };
    let unprivileged = Check {
        name: "privileges",
        relied_on: "over control, which programs reach, nothing can be changed",
        otherwise: "whoever reaches the daemon's own socket can reconfigure its neighbours. Pods reach Cleave's door, which refuses \
                    commands; where limits are advisory they reach the daemon",
    };
    let log = Check {
        name: "log",
        relied_on: "the daemon logs to standard output when a server is ready and which clients come and go",
        otherwise: "faults and the deaths of clients are seen late or not at all: neighbours may be broken without a word",
    };
    vec![
        start.judge(&seen.start, |ms| (true, format!("answered after {ms} ms"))),
        greeting.judge(&seen.greeting, |&known| {
            (known, if known { "greets as known" } else { "greets with something else" }.to_owned())
        }),
        commands.judge(&seen.commands, |asked| {
            let strange: Vec<String> = asked.iter().filter(|asked| !is_understood(asked)).map(said).collect();
            let seen =
                if strange.is_empty() { format!("{} asked, all answered", asked.len()) } else { strange.join("; ") };
            (strange.is_empty(), seen)
        }),
        unprivileged.judge(&seen.unprivileged, |asked| {
            let taken: Vec<String> =
                asked.iter().filter(|asked| !asked.answer.contains("privilege")).map(said).collect();
            let seen = if taken.is_empty() { format!("{} commands refused", asked.len()) } else { taken.join("; ") };
            (taken.is_empty(), seen)
        }),
        log.judge(&seen.log, log_seen),
    ]
}

fn log_seen(log: &Log) -> (bool, String) {
    let missing: Vec<&str> = [
        (log.version.is_some(), "the version"),
        (log.server_ready, "a server that is ready"),
        (log.client_came != Some(false), "a client that comes"),
        (log.client_went != Some(false), "a client that goes"),
    ]
    .into_iter()
    .filter_map(|(is_there, what)| (!is_there).then_some(what))
    .collect();
    match (missing.as_slice(), log.client_came) {
        ([], Some(_)) => (true, "version, server and clients are told".to_owned()),
        ([], None) => (true, "version and server are told; there was no client".to_owned()),
        (missing, _) => (false, format!("not told: {}", missing.join(", "))),
    }
}

fn said(asked: &Asked) -> String {
    format!("`{}` answers {:?}", asked.command, asked.answer.trim())
}

/// Whether an answer has the shape that Cleave reads.
fn is_understood(Asked { command, answer, set }: &Asked) -> bool {
    match command {
        Command::ServerList | Command::Clients(_) => protocol::pids(answer).is_ok(),
        Command::ServerStatus(_) => protocol::server_state(answer).is_ok_and(|state| state == ServerState::Active),
        Command::SetThreads { percent, .. } | Command::SetDefaultThreads(percent) => {
            protocol::is_percentage(answer, *percent)
        }
        Command::GetDefaultThreads => {
            set.and_then(|set| u8::try_from(set).ok()).is_some_and(|set| protocol::is_percentage(answer, set))
        }
        Command::GetMemory { .. } | Command::GetDefaultMemory => protocol::is_memory(answer, *set),
        Command::StartServer { .. }
        | Command::ShutdownServer { .. }
        | Command::SetMemory { .. }
        | Command::SetDefaultMemory(_)
        | Command::Quit { .. } => answer.trim().is_empty(),
        Command::Terminate { .. } => protocol::terminated(answer).is_ok(),
    }
}

/// The SMs that Cleave says a percentage is worth.
fn worth(percent: u8, whole: Whole) -> u32 {
    mps::sms(Percent::new(percent).ok(), Sms(whole.sms)).0
}

/// Whether a program is bound by limits, and no more tightly than it has to be.
fn holds(bound: &Bound, whole: Whole) -> bool {
    bound.sight.sms == worth(bound.percent, whole) && is_limited(bound.sight, bound.limit_mib)
}

/// Of a limit the context takes a part: on the GPUs that are known less than a half of the least limit that is tried.
fn is_limited(sight: Sight, limit_mib: u64) -> bool {
    (limit_mib / 2..=limit_mib).contains(&sight.free_mib)
}

fn seen_by(Sight { sms, free_mib }: Sight) -> String {
    format!("{sms} SMs and {free_mib} MiB free")
}

fn under(bound: &Bound) -> String {
    format!("at {} % and {} MiB: {}", bound.percent, bound.limit_mib, seen_by(bound.sight))
}

fn limits(seen: &Observed, whole: Whole) -> Vec<Finding> {
    let bound = Check {
        name: "limits",
        relied_on: "a server's limits bind who connects next; who runs already does not matter",
        otherwise: "pods may run under each other's limits: do not share by MPS on this node",
    };
    let rounding = Check {
        name: "sms",
        relied_on: "a percentage of the SMs is rounded down to an even count, and is never below 8",
        otherwise: "`cleave status` tells other numbers of SMs than pods have",
    };
    let lowered = Check {
        name: "lower",
        relied_on: "a program's environment lowers its limits and never raises them",
        otherwise: "a pod takes more than its share by a variable: admission refuses pods that set it, programs can still do so",
    };
    let memory = Check {
        name: "memory",
        relied_on: "a memory limit is enforced: more than that cannot be allocated",
        otherwise: "a pod can take its neighbours' memory: it is found within 2 s, and ended only under `enforcement: Evict`",
    };
    let defaults = Check {
        name: "defaults",
        relied_on: "a server that is started later has the daemon's default limits",
        otherwise: "after a server's end the first programs may run without limits where the door does not set them",
    };
    vec![
        bound.judge(&seen.bound, |both| {
            (both.iter().all(|one| holds(one, whole)), both.each_ref().map(under).join("; "))
        }),
        rounding.judge(&seen.rounding, |seen| {
            let other: Vec<String> = seen
                .iter()
                .filter(|&&(percent, sms)| sms != worth(percent, whole))
                .map(|&(percent, sms)| format!("{percent} %: {sms}, not {}", worth(percent, whole)))
                .collect();
            let all = || seen.iter().map(|(percent, sms)| format!("{percent} %: {sms}")).collect::<Vec<_>>().join(", ");
            (other.is_empty(), if other.is_empty() { all() } else { other.join(", ") })
        }),
        lowered.judge(&seen.lowered, |lowered| lowered_seen(lowered, whole)),
        memory.judge(&seen.memory, |memory| {
            let of =
                |allocated: Allocated| allocated.map_or_else(|code| format!("error {code}"), |()| "taken".to_owned());
            let good = memory.half.is_ok() && memory.all == Err(OUT_OF_MEMORY);
            (good, format!("of {} MiB: half is {}, all is {}", memory.limit_mib, of(memory.half), of(memory.all)))
        }),
        defaults.judge(&seen.defaults, |bound| (holds(bound, whole), under(bound))),
    ]
}

fn lowered_seen(lowered: &Lowered, whole: Whole) -> (bool, String) {
    let Lowered { set, asked_more, asked_less } = lowered;
    let raised = Bound { sight: *asked_more, ..*set };
    let good = holds(set, whole) && holds(&raised, whole) && holds(asked_less, whole);
    (
        good,
        format!("{}; asking for more: {}; for less: {}", under(set), seen_by(*asked_more), seen_by(asked_less.sight)),
    )
}

fn holes(seen: &Observed, whole: Whole) -> Vec<Finding> {
    let escape = Check {
        name: "escape",
        relied_on: "known hole: a memory limit that means nothing in a program's environment takes its limit away",
        otherwise: "better than known: this driver keeps the limit. Cleave goes on refusing and watching all the same",
    };
    let plain = Check {
        name: "no control",
        relied_on: "known hole: without a control socket a program runs as plain CUDA, unless the compute mode forbids it",
        otherwise: "other than known: programs may wait or fail where Cleave looks for plain ones",
    };
    vec![
        escape.judge(&seen.escape, |bound| {
            let escaped = bound.sight.free_mib > bound.limit_mib;
            (escaped, format!("under {} MiB it has {} MiB free", bound.limit_mib, bound.sight.free_mib))
        }),
        plain.judge(&seen.plain, |plain| {
            let forbidden = matches!(whole.compute_mode, Some(ComputeMode::ExclusiveProcess | ComputeMode::Prohibited));
            match plain {
                Ok(sight) => (!forbidden && sight.sms == whole.sms, seen_by(*sight)),
                Err(code) => (forbidden, format!("error {code}")),
            }
        }),
    ]
}

fn lives(seen: &Observed, whole: Whole) -> Vec<Finding> {
    let users = Check {
        name: "users",
        relied_on: "with -multiuser-server programs of several users share a server at once",
        otherwise: "a pod of another user waits until the first is gone: let pods that share a GPU run as the same user",
    };
    let link = Check {
        name: "link",
        relied_on: "a folder with nothing but a hard link to control is enough for a program",
        otherwise: "where limits are advisory, pods do not get through to MPS",
    };
    let by_mps = Check {
        name: "clients",
        relied_on: "MPS lists its clients by their process ids",
        otherwise: "clients of pods that are deleted are not ended through MPS, and may break their neighbours",
    };
    let by_nvml = Check {
        name: "nvml",
        relied_on: "NVML lists MPS clients, and as such",
        otherwise: "pods that leave MPS, or take more memory than they have, are not found",
    };
    let ended = Check {
        name: "terminate",
        relied_on: "terminate_client ends one client's contexts (error 810), and nobody else's",
        otherwise: "deleting a pod can break its neighbours: let programs end by themselves before pods are deleted",
    };
    let contexts = Check {
        name: "48 clients",
        relied_on: "one server serves 48 clients; the next gets error 808",
        otherwise: "more than 48 shares of a GPU are refused, whatever the driver could do",
    };
    let fault = Check {
        name: "fault",
        relied_on: "an illegal access breaks all clients of the server, which serves again when they are gone",
        otherwise: "shares stay Unhealthy after a fault, until the daemon is replaced",
    };
    vec![
        users.judge(&seen.users, |bound| (holds(bound, whole), format!("beside root's, {}", under(bound)))),
        link.judge(&seen.link, |bound| (holds(bound, whole), under(bound))),
        by_mps.judge(&seen.by_mps, |&known| (known, listed(Some(known)).to_owned())),
        by_nvml.judge(&seen.by_nvml, |&known| (known == Some(true), listed(known).to_owned())),
        ended.judge(&seen.ended, ended_seen),
        contexts.stated("stated of driver 580: it takes 49 programs"),
        fault.stated("stated of driver 580: nothing is broken here on purpose"),
    ]
}

fn listed(listed: Option<bool>) -> &'static str {
    match listed {
        Some(true) => "listed",
        Some(false) => "not listed",
        None => "this driver does not tell MPS clients from others",
    }
}

fn ended_seen(ended: &Ended) -> (bool, String) {
    let of = |allocated: Allocated| allocated.map_or_else(|code| format!("error {code}"), |()| "goes on".to_owned());
    let answered = protocol::terminated(&ended.answer) == Ok(Terminated::Done);
    let good = answered && ended.client == Err(TERMINATED) && ended.neighbour.is_ok();
    let answer = if answered { String::new() } else { format!("answers {:?}; ", ended.answer.trim()) };
    (good, format!("{answer}the client: {}; its neighbour: {}", of(ended.client), of(ended.neighbour)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Whole = Whole { sms: 132, compute_mode: Some(ComputeMode::Default) };
    const HALF: Bound = Bound { percent: 50, limit_mib: 8192, sight: Sight { sms: 66, free_mib: 7921 } };
    const FIFTH: Bound = Bound { percent: 20, limit_mib: 4096, sight: Sight { sms: 26, free_mib: 3973 } };
    const SERVER: u32 = 17;

    fn asked(command: Command, answer: &str, set: Option<u64>) -> Asked {
        Asked { command, answer: answer.to_owned(), set }
    }

    /// An H200 under driver 580.
    fn measured() -> Observed {
        let commands = vec![
            asked(Command::SetDefaultThreads(50), "50.0", None),
            asked(Command::GetDefaultThreads, "50.0", Some(50)),
            asked(Command::SetDefaultMemory(8192), "", None),
            asked(Command::GetDefaultMemory, "8G", Some(8192)),
            asked(Command::StartServer { uid: 0 }, "", None),
            asked(Command::ServerList, "17", None),
            asked(Command::ServerStatus(SERVER), "ACTIVE", None),
            asked(Command::SetThreads { server: SERVER, percent: 20 }, "20.0", None),
            asked(Command::SetMemory { server: SERVER, mib: Some(8192) }, "", None),
            asked(Command::GetMemory { server: SERVER }, "8G", Some(8192)),
            asked(Command::GetMemory { server: SERVER }, "", None),
            asked(Command::Clients(SERVER), "", None),
        ];
        let refused = asked(Command::SetDefaultThreads(50), "Not enough privilege to execute it", None);
        let log = Log { version: Some(13000), server_ready: true, client_came: Some(true), client_went: Some(true) };
        Observed {
            start: Outcome::Seen(21),
            greeting: Outcome::Seen(true),
            commands: Outcome::Seen(commands),
            unprivileged: Outcome::Seen(vec![refused]),
            log: Outcome::Seen(log),
            by_mps: Outcome::Seen(true),
            by_nvml: Outcome::Seen(Some(true)),
            bound: Outcome::Seen([HALF, FIFTH]),
            rounding: Outcome::Seen(vec![(1, 8), (10, 12), (33, 42), (90, 118), (100, 132)]),
            lowered: Outcome::Seen(Lowered { set: HALF, asked_more: HALF.sight, asked_less: FIFTH }),
            memory: Outcome::Seen(Memory { limit_mib: 8192, half: Ok(()), all: Err(2) }),
            escape: Outcome::Seen(Bound { sight: Sight { sms: 66, free_mib: 142_815 }, ..HALF }),
            users: Outcome::Seen(HALF),
            link: Outcome::Seen(HALF),
            ended: Outcome::Seen(Ended { answer: "0".to_owned(), client: Err(810), neighbour: Ok(()) }),
            defaults: Outcome::Seen(HALF),
            plain: Outcome::Seen(Ok(Sight { sms: 132, free_mib: 142_575 })),
        }
    }

    /// The checks that differ.
    fn differ(seen: &Observed, whole: Whole) -> Vec<&'static str> {
        let differs = |finding: &Finding| (finding.verdict == Verdict::Differs).then_some(finding.check);
        findings(seen, whole).iter().filter_map(differs).collect()
    }

    /// What differs when one thing is otherwise.
    fn when(change: impl FnOnce(&mut Observed)) -> Vec<&'static str> {
        let mut seen = measured();
        change(&mut seen);
        differ(&seen, H200)
    }

    #[test]
    fn the_driver_that_was_measured_is_as_relied_on_and_what_is_only_stated_was_not_tried() {
        let findings = findings(&measured(), H200);
        let not: Vec<&Finding> = findings.iter().filter(|finding| finding.verdict != Verdict::AsReliedOn).collect();
        assert!(not.iter().all(|finding| finding.verdict == Verdict::NotTried), "{not:#?}");
        assert_eq!(not.iter().map(|finding| finding.check).collect::<Vec<_>>(), ["48 clients", "fault"]);
    }

    #[test]
    fn what_was_left_out_is_neither_good_nor_bad_and_what_failed_differs() {
        let left = findings(&Observed::nothing("no GPU is free"), H200);
        assert!(left.iter().all(|finding| finding.verdict == Verdict::NotTried));
        assert_eq!(left[0].seen, "no GPU is free");
        assert_eq!(when(|seen| seen.start = Outcome::Failed("it ends".to_owned())), ["start"]);
        assert_eq!(when(|seen| seen.users = Outcome::Failed("it says nothing".to_owned())), ["users"]);
    }

    #[test]
    fn another_handshake_and_other_answers_are_told() {
        assert_eq!(when(|seen| seen.greeting = Outcome::Seen(false)), ["door"]);
        for (command, answer, set) in [
            (Command::ServerList, "Unknown command \"get_server_list\"", None),
            (Command::ServerStatus(SERVER), "FAULT", None),
            (Command::GetMemory { server: SERVER }, "", Some(8192)),
            (Command::GetMemory { server: SERVER }, "8G", None),
            (Command::GetDefaultThreads, "100.0", Some(50)),
            (Command::SetThreads { server: SERVER, percent: 20 }, "", None),
            (Command::SetMemory { server: SERVER, mib: None }, "Usage: …", None),
        ] {
            let strange = asked(command, answer, set);
            assert_eq!(when(|seen| seen.commands = Outcome::Seen(vec![strange.clone()])), ["commands"], "{strange:?}");
        }
        let taken = asked(Command::SetDefaultThreads(50), "50.0", None);
        assert_eq!(when(|seen| seen.unprivileged = Outcome::Seen(vec![taken])), ["privileges"]);
    }

    #[test]
    fn a_log_that_keeps_something_back_is_told() {
        let log = Log { version: Some(13000), server_ready: true, client_came: Some(true), client_went: Some(true) };
        for less in [
            Log { version: None, ..log.clone() },
            Log { server_ready: false, ..log.clone() },
            Log { client_came: Some(false), ..log.clone() },
            Log { client_went: Some(false), ..log.clone() },
        ] {
            assert_eq!(when(|seen| seen.log = Outcome::Seen(less)), ["log"]);
        }
        assert!(when(|seen| seen.log = Outcome::Seen(Log { client_came: None, client_went: None, ..log })).is_empty());
    }

    #[test]
    fn limits_that_do_not_hold_are_told() {
        let more_sms = Bound { sight: Sight { sms: 132, ..HALF.sight }, ..HALF };
        let more_memory = Bound { sight: Sight { free_mib: 100_000, ..HALF.sight }, ..HALF };
        let no_memory = Bound { sight: Sight { free_mib: 100, ..HALF.sight }, ..HALF };
        for other in [more_sms, more_memory, no_memory] {
            assert_eq!(when(|seen| seen.bound = Outcome::Seen([other, FIFTH])), ["limits"]);
            assert_eq!(when(|seen| seen.bound = Outcome::Seen([FIFTH, other])), ["limits"]);
            assert_eq!(when(|seen| seen.defaults = Outcome::Seen(other)), ["defaults"]);
            assert_eq!(when(|seen| seen.users = Outcome::Seen(other)), ["users"]);
            assert_eq!(when(|seen| seen.link = Outcome::Seen(other)), ["link"]);
            let raised = Lowered { set: HALF, asked_more: other.sight, asked_less: FIFTH };
            assert_eq!(when(|seen| seen.lowered = Outcome::Seen(raised)), ["lower"]);
        }
        let deaf = Lowered { set: HALF, asked_more: HALF.sight, asked_less: Bound { sight: HALF.sight, ..FIFTH } };
        assert_eq!(when(|seen| seen.lowered = Outcome::Seen(deaf)), ["lower"]);
        assert_eq!(when(|seen| seen.rounding = Outcome::Seen(vec![(10, 12), (33, 43)])), ["sms"]);
        for (half, all) in [(Ok(()), Ok(())), (Err(2), Err(2)), (Ok(()), Err(700))] {
            let memory = Memory { limit_mib: 8192, half, all };
            assert_eq!(when(|seen| seen.memory = Outcome::Seen(memory)), ["memory"]);
        }
    }

    #[test]
    fn a_hole_that_is_closed_is_told_too() {
        assert_eq!(when(|seen| seen.escape = Outcome::Seen(HALF)), ["escape"]);
        assert_eq!(when(|seen| seen.plain = Outcome::Seen(Err(805))), ["no control"]);
        assert_eq!(when(|seen| seen.plain = Outcome::Seen(Ok(HALF.sight))), ["no control"]);
        let exclusive = Whole { compute_mode: Some(ComputeMode::ExclusiveProcess), ..H200 };
        assert_eq!(differ(&measured(), exclusive), ["no control"], "it got in");
        let refused = Observed { plain: Outcome::Seen(Err(46)), ..measured() };
        assert!(differ(&refused, exclusive).is_empty());
    }

    #[test]
    fn clients_that_are_not_listed_or_not_ended_alone_are_told() {
        assert_eq!(when(|seen| seen.by_mps = Outcome::Seen(false)), ["clients"]);
        assert_eq!(when(|seen| seen.by_nvml = Outcome::Seen(Some(false))), ["nvml"]);
        assert_eq!(when(|seen| seen.by_nvml = Outcome::Seen(None)), ["nvml"]);
        for (answer, client, neighbour) in [("201", Err(810), Ok(())), ("0", Ok(()), Ok(())), ("0", Err(810), Err(700))]
        {
            let ended = Ended { answer: answer.to_owned(), client, neighbour };
            assert_eq!(when(|seen| seen.ended = Outcome::Seen(ended)), ["terminate"]);
        }
    }
}
