//! Watches targets while they run. If a target panics, takes too long or uses too much memory, the
//! guard prints the input and writes it to a file.
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::{ReadResult, Target};

/// Time limit of one input. The limit allows for an unoptimized build on a busy machine.
const TIME_LIMIT_PER_INPUT: Duration = Duration::from_secs(20);
/// Memory limit of the whole program, in bytes.
const MEMORY_LIMIT_BYTES: u64 = 2 << 30;
/// Interval between checks of the time limit and the memory limit.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of bytes of an input that the guard prints. The file contains the whole input.
const MAX_PRINTED_BYTES: usize = 512;

/// The target that a thread runs, and the input.
struct RunningTarget {
    target: &'static str,
    input: Vec<u8>,
    since: Instant,
}

static RUNNING_TARGETS: Mutex<Option<HashMap<ThreadId, RunningTarget>>> = Mutex::new(None);

/// Locks the running targets. Ignores poisoning: a panic under the lock leaves the map valid, and
/// the panic hook must still report the input.
fn lock_running_targets() -> MutexGuard<'static, Option<HashMap<ThreadId, RunningTarget>>> {
    RUNNING_TARGETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a target on an input.
///
/// # Panics
/// Panics if the target panics, after printing the input and writing it to a file.
pub fn run(target: &Target, input: &[u8]) -> ReadResult {
    static WATCH: Once = Once::new();
    WATCH.call_once(watch_running_targets);
    let thread = thread::current().id();
    let now = RunningTarget { target: target.name, input: input.to_vec(), since: Instant::now() };
    lock_running_targets().get_or_insert_default().insert(thread, now);
    let seen = (target.run)(input);
    lock_running_targets().get_or_insert_default().remove(&thread);
    seen
}

/// Returns the directory to which failing inputs are written.
pub fn failing_inputs_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/fuzz-failures")
}

/// Writes an input to a file, and returns the file's path. The file's name depends only on the
/// target and the input.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn save_input(directory: &Path, target: &str, input: &[u8]) -> io::Result<PathBuf> {
    let mut hash = DefaultHasher::new();
    input.hash(&mut hash);
    let path = directory.join(format!("{target}-{:016x}", hash.finish()));
    std::fs::create_dir_all(directory)?;
    std::fs::write(&path, input)?;
    path.canonicalize()
}

/// Writes a failing input to a file, and returns a message with the command that reproduces the
/// failure.
fn save_and_describe_failure(target: &str, input: &[u8], why: &str) -> String {
    let hex = input.iter().take(MAX_PRINTED_BYTES).fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    let more = if input.len() > MAX_PRINTED_BYTES { "…" } else { "" };
    let repeat = match save_input(&failing_inputs_directory(), target, input) {
        Ok(path) => format!("repeat with: cargo run -p cleave-fuzz -- {target} --input {}", path.display()),
        Err(error) => format!("failed to write the input to a file: {error}"),
    };
    format!("\n{target}: {why}\ninput of {} bytes: {hex}{more}\n{repeat}", input.len())
}

/// Installs the panic hook, and starts the thread that checks the limits.
fn watch_running_targets() {
    let before = std::panic::take_hook();
    // Report in the panic hook, so that programs that abort on panic also print the report.
    std::panic::set_hook(Box::new(move |panic| {
        before(panic);
        let failed = lock_running_targets().as_mut().and_then(|all| all.remove(&thread::current().id()));
        if let Some(RunningTarget { target, input, .. }) = failed {
            eprintln!("{}", save_and_describe_failure(target, &input, "the target panicked"));
        }
    }));
    thread::spawn(|| {
        loop {
            thread::sleep(CHECK_INTERVAL);
            let memory = resident_bytes().unwrap_or(0);
            let mut all = lock_running_targets();
            let all = all.get_or_insert_default().values();
            let failures: Vec<String> = if memory > MEMORY_LIMIT_BYTES {
                all.map(|one| {
                    save_and_describe_failure(one.target, &one.input, &format!("the program uses {} MiB", memory >> 20))
                })
                .collect()
            } else {
                let late = all.filter(|one| one.since.elapsed() > TIME_LIMIT_PER_INPUT);
                late.map(|one| {
                    save_and_describe_failure(
                        one.target,
                        &one.input,
                        &format!("the input takes more than {TIME_LIMIT_PER_INPUT:?}"),
                    )
                })
                .collect()
            };
            if !failures.is_empty() {
                // Do not use a print macro: a test captures the macro's output until the test ends,
                // but this process exits before that.
                let _ = writeln!(io::stderr(), "{}", failures.join("\n"));
                // Exit the process, because a thread cannot stop another thread.
                std::process::exit(101);
            }
        }
    });
}

/// Returns the resident memory of this process, in bytes.
fn resident_bytes() -> Option<u64> {
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").ok()?.split(' ').nth(1)?.parse().ok()?;
    // Assume pages of 4 KiB. On machines with larger pages, the actual limit is higher.
    Some(pages * 4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutate::InputShape;

    const FAILING_TARGET: Target = Target {
        name: "of_a_test",
        what: "",
        shape: InputShape::Bytes,
        words: &[],
        samples: Vec::new,
        inputs: 0,
        run: |input| {
            assert!(input != b"bad", "expected by the test");
            ReadResult::Read
        },
    };

    #[test]
    fn only_an_input_that_makes_the_target_panic_is_written_to_a_file() {
        assert_eq!(run(&FAILING_TARGET, b"good"), ReadResult::Read);
        let kept = save_input(&failing_inputs_directory(), FAILING_TARGET.name, b"bad").unwrap();
        std::fs::remove_file(&kept).unwrap();
        thread::spawn(|| run(&FAILING_TARGET, b"bad")).join().unwrap_err();
        assert_eq!(std::fs::read(&kept).unwrap(), b"bad");
        std::fs::remove_file(kept).unwrap();
    }

    #[test]
    fn the_message_of_a_long_input_is_short_and_contains_the_command_that_repeats_it() {
        let message = save_and_describe_failure("of_a_test_too", &vec![0xab; 9000], "why");
        assert!(
            message.len() < 2000 && message.contains("9000 bytes: abab") && message.contains("--input /"),
            "{message}"
        );
    }
}
