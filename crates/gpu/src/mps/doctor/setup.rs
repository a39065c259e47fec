//! What the tests run on and with.
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use super::program::Program;
use crate::nvml::Worker;

/// How long NVML may take: milliseconds, or seconds if it has to initialize a GPU.
pub(super) const NVML_DEADLINE: Duration = Duration::from_secs(20);

/// The GPU to test, and what to test it with.
pub(super) struct Setup {
    pub(super) uuid: String,
    pub(super) memory_mib: u64,
    pub(super) control: PathBuf,
    pub(super) library_path: Option<OsString>,
    pub(super) program: Option<Program>,
    pub(super) nvml: Worker,
    /// Whether processes of other containers are visible.
    pub(super) sees_others: bool,
}
