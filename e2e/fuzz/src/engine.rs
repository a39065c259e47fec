//! Runs one target for some inputs: its samples and its corpus first, then changes of those and of
//! what it has read since.
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use fastrand::Rng;

use crate::mutate::mutated;
use crate::{Seen, Target, guard};

/// Samples that are kept beside the first.
const KEPT: usize = 200;

/// How much is done.
#[derive(Debug, Clone, Copy)]
pub enum Budget {
    /// So many inputs: the same ones for the same seed.
    Inputs(u64),
    /// As many as there is time for.
    Time(Duration),
}

/// How far it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Inputs that were run.
    pub inputs: u64,
    /// Those of them that were read.
    pub read: u64,
}

impl Progress {
    fn counting(&mut self, seen: Seen) {
        self.inputs += 1;
        self.read += u64::from(seen == Seen::Read);
    }

    /// How many of a hundred inputs were read.
    pub fn percent(&self) -> u64 {
        self.read * 100 / self.inputs.max(1)
    }
}

/// The committed inputs of a target: samples, and inputs that once failed. In order of their names.
///
/// # Errors
/// They cannot be read. A target without a folder has none.
pub fn corpus(target: &Target) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort_unstable();
    paths.into_iter().map(|path| fs::read(&path).map(|bytes| (path, bytes))).collect()
}

/// Runs a target; `tell` hears every second how far it is.
///
/// # Errors
/// The corpus cannot be read.
///
/// # Panics
/// An input fails: it was told and kept by then.
pub fn fuzz(target: &Target, seed: u64, budget: Budget, mut tell: impl FnMut(&Progress)) -> io::Result<Progress> {
    let begun = Instant::now();
    let mut told = begun;
    let mut progress = Progress::default();
    let mut samples = (target.samples)();
    samples.extend(corpus(target)?.into_iter().map(|(_, bytes)| bytes));
    for sample in &samples {
        progress.counting(guard::run(target, sample));
    }
    let first = samples.len();
    // By its name, so that a target's inputs are the same whichever others run.
    let mut rng = Rng::with_seed(target.name.bytes().fold(seed, |seed, byte| seed.rotate_left(5) ^ u64::from(byte)));
    loop {
        let done = match budget {
            Budget::Inputs(most) => progress.inputs >= most,
            Budget::Time(most) => begun.elapsed() >= most,
        };
        if done {
            return Ok(progress);
        }
        let (sample, other) = (rng.choice(&samples), rng.choice(&samples));
        let input = match (sample, other) {
            (Some(sample), Some(other)) => mutated(target.shape, target.words, sample, other, &mut rng),
            _ => Vec::new(),
        };
        let seen = guard::run(target, &input);
        progress.counting(seen);
        // Further away by each step, but not by growing: the long ones are slow.
        if seen == Seen::Read && rng.u8(..8) == 0 && input.len() < 8192 {
            if samples.len() < first + KEPT {
                samples.push(input);
            } else {
                let at = rng.usize(first..samples.len());
                samples.splice(at..=at, [input]);
            }
        }
        if told.elapsed() >= Duration::from_secs(1) {
            told = Instant::now();
            tell(&progress);
        }
    }
}
