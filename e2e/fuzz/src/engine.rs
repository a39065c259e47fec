//! Runs one target on many inputs: first on its samples and its corpus, then on mutations.
//! Mutations start from the samples, the corpus, and mutated inputs that the target could read.
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use fastrand::Rng;

use crate::mutate::mutate_input;
use crate::{ReadResult, Target, guard};

/// Maximum number of mutated inputs that become samples.
const MAX_ADDED_SAMPLES: usize = 200;

/// When a run ends.
#[derive(Debug, Clone, Copy)]
pub enum RunLimit {
    /// Ends the run after this number of inputs. Two runs with the same seed use the same inputs.
    Inputs(u64),
    /// Ends the run after this time.
    Time(Duration),
}

/// Progress of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of inputs that the target has processed.
    pub inputs: u64,
    /// Number of inputs that the target could read.
    pub read: u64,
}

impl Progress {
    /// Counts one input.
    fn count_input(&mut self, seen: ReadResult) {
        self.inputs += 1;
        self.read += u64::from(seen == ReadResult::Read);
    }

    /// Returns the percentage of inputs that the target could read.
    pub fn read_percent(&self) -> u64 {
        self.read * 100 / self.inputs.max(1)
    }
}

/// Reads the committed inputs of a target, including inputs that once failed. Returns the inputs
/// sorted by path. Returns no inputs if the target has no directory.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub fn read_corpus(target: &Target) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort_unstable();
    paths.into_iter().map(|path| fs::read(&path).map(|bytes| (path, bytes))).collect()
}

/// Runs a target, and calls `report` every second.
///
/// # Errors
/// Returns an error if the corpus cannot be read.
///
/// # Panics
/// Panics if the target panics, after printing the input and writing it to a file. If the target
/// exceeds a limit, the process exits instead.
pub fn fuzz(target: &Target, seed: u64, budget: RunLimit, mut report: impl FnMut(&Progress)) -> io::Result<Progress> {
    let started = Instant::now();
    let mut reported = started;
    let mut progress = Progress::default();
    let mut samples = (target.samples)();
    samples.extend(read_corpus(target)?.into_iter().map(|(_, bytes)| bytes));
    for sample in &samples {
        progress.count_input(guard::run(target, sample));
    }
    let first = samples.len();
    // The seed also depends on the target's name, so that a target's inputs do not depend on the
    // other targets of the run.
    let mut rng = Rng::with_seed(target.name.bytes().fold(seed, |seed, byte| seed.rotate_left(5) ^ u64::from(byte)));
    loop {
        let done = match budget {
            RunLimit::Inputs(most) => progress.inputs >= most,
            RunLimit::Time(most) => started.elapsed() >= most,
        };
        if done {
            return Ok(progress);
        }
        let (sample, other) = (rng.choice(&samples), rng.choice(&samples));
        let input = match (sample, other) {
            (Some(sample), Some(other)) => mutate_input(target.shape, target.words, sample, other, &mut rng),
            _ => Vec::new(),
        };
        let seen = guard::run(target, &input);
        progress.count_input(seen);
        // Add some valid inputs to the samples, so that mutations accumulate. Do not add long
        // inputs, because they are slow.
        if seen == ReadResult::Read && rng.u8(..8) == 0 && input.len() < 8192 {
            if samples.len() < first + MAX_ADDED_SAMPLES {
                samples.push(input);
            } else {
                let at = rng.usize(first..samples.len());
                samples.splice(at..=at, [input]);
            }
        }
        if reported.elapsed() >= Duration::from_secs(1) {
            reported = Instant::now();
            report(&progress);
        }
    }
}
