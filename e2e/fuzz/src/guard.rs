//! Watches over targets while they run: what panics, takes too long or takes too much memory is
//! told with its input, and the input kept.
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::{Seen, Target};

/// No input may take so long, without optimization and on a machine that has much else to do.
const LONGEST: Duration = Duration::from_secs(20);
/// The whole program may take so much memory, in bytes.
const MOST: u64 = 2 << 30;
/// Between looks at both.
const LOOK: Duration = Duration::from_millis(20);
/// Of an input no more is printed, in bytes; the file has all.
const SHOWN: usize = 512;

/// What a thread runs now.
struct Running {
    target: &'static str,
    input: Vec<u8>,
    since: Instant,
}

static RUNNING: Mutex<Option<HashMap<ThreadId, Running>>> = Mutex::new(None);

/// A panic while it is held is told by the hook of the same thread: a poisoned lock is as good as
/// another.
fn running() -> MutexGuard<'static, Option<HashMap<ThreadId, Running>>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a target with an input.
///
/// # Panics
/// The target did: the input was told and kept by then.
pub fn run(target: &Target, input: &[u8]) -> Seen {
    static WATCH: Once = Once::new();
    WATCH.call_once(watch);
    let thread = thread::current().id();
    let now = Running { target: target.name, input: input.to_vec(), since: Instant::now() };
    running().get_or_insert_default().insert(thread, now);
    let seen = (target.run)(input);
    running().get_or_insert_default().remove(&thread);
    seen
}

/// Where inputs that fail are kept.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/fuzz-failures")
}

/// Keeps an input, under a name that is the same for the same input.
///
/// # Errors
/// It cannot be written.
pub fn keep(folder: &Path, target: &str, input: &[u8]) -> io::Result<PathBuf> {
    let mut hash = DefaultHasher::new();
    input.hash(&mut hash);
    let path = folder.join(format!("{target}-{:016x}", hash.finish()));
    std::fs::create_dir_all(folder)?;
    std::fs::write(&path, input)?;
    path.canonicalize()
}

/// What a person needs to see a failure again.
fn told(target: &str, input: &[u8], why: &str) -> String {
    let hex = input.iter().take(SHOWN).fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    let more = if input.len() > SHOWN { "…" } else { "" };
    let again = match keep(&folder(), target, input) {
        Ok(path) => format!("again: cargo run -p cleave-fuzz -- {target} --input {}", path.display()),
        Err(error) => format!("the input cannot be kept: {error}"),
    };
    format!("\n{target}: {why}\ninput of {} bytes: {hex}{more}\n{again}", input.len())
}

fn watch() {
    let before = std::panic::take_hook();
    // In the hook, so that it is told in programs too that do not unwind.
    std::panic::set_hook(Box::new(move |panic| {
        before(panic);
        let failed = running().as_mut().and_then(|all| all.remove(&thread::current().id()));
        if let Some(Running { target, input, .. }) = failed {
            eprintln!("{}", told(target, &input, "it panicked"));
        }
    }));
    thread::spawn(|| {
        loop {
            thread::sleep(LOOK);
            let memory = resident().unwrap_or(0);
            let mut all = running();
            let all = all.get_or_insert_default().values();
            let wrong: Vec<String> = if memory > MOST {
                all.map(|one| told(one.target, &one.input, &format!("{} MiB are in use", memory >> 20))).collect()
            } else {
                let late = all.filter(|one| one.since.elapsed() > LONGEST);
                late.map(|one| told(one.target, &one.input, &format!("it takes more than {LONGEST:?}"))).collect()
            };
            if !wrong.is_empty() {
                // Not by a macro: what those print in a test is kept back until it ends, which this
                // one does not.
                let _ = writeln!(io::stderr(), "{}", wrong.join("\n"));
                // Nothing else ends what goes on in another thread.
                std::process::exit(101);
            }
        }
    });
}

/// What this process keeps in memory, in bytes.
fn resident() -> Option<u64> {
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").ok()?.split(' ').nth(1)?.parse().ok()?;
    // Pages are larger on some machines: the bound is then a looser one.
    Some(pages * 4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutate::Shape;

    const FAILS: Target = Target {
        name: "of_a_test",
        what: "",
        shape: Shape::Bytes,
        words: &[],
        samples: Vec::new,
        inputs: 0,
        run: |input| {
            assert!(input != b"bad", "as it should");
            Seen::Read
        },
    };

    #[test]
    fn an_input_that_panics_is_kept_and_one_that_does_not_is_not() {
        assert_eq!(run(&FAILS, b"good"), Seen::Read);
        let kept = keep(&folder(), FAILS.name, b"bad").unwrap();
        std::fs::remove_file(&kept).unwrap();
        thread::spawn(|| run(&FAILS, b"bad")).join().unwrap_err();
        assert_eq!(std::fs::read(&kept).unwrap(), b"bad");
        std::fs::remove_file(kept).unwrap();
    }

    #[test]
    fn what_is_told_of_a_long_input_is_short_and_says_how_to_see_it_again() {
        let told = told("of_a_test_too", &vec![0xab; 9000], "why");
        assert!(told.len() < 2000 && told.contains("9000 bytes: abab") && told.contains("--input /"), "{told}");
    }
}
