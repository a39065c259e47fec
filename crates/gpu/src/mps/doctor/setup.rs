//! Settings of the tests.
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use super::program::Program;
use crate::nvml::Worker;

/// Time limit of NVML calls. A call takes milliseconds, or seconds if NVML initializes a GPU.
pub(super) const NVML_CALL_DEADLINE: Duration = Duration::from_secs(20);

/// The GPU to test, the MPS control program and the CUDA program.
pub(super) struct DoctorSetup {
    pub(super) uuid: String,
    pub(super) memory_mib: u64,
    pub(super) control: PathBuf,
    pub(super) library_path: Option<OsString>,
    pub(super) program: Option<Program>,
    pub(super) nvml: Worker,
    /// Whether processes of other containers are visible.
    pub(super) are_others_visible: bool,
}
