//! Classification of XIDs: a table with a source for each line.
//!
//! Sources, all NVIDIA's unless stated otherwise:
//! - [`CATALOG`]: "Xid Catalog",
//!   <https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>, the column of
//!   immediate actions
//! - [`MEMORY`]: "GPU Memory Error Management",
//!   <https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/>
//! - [`PLUGIN`]: the XIDs that NVIDIA's device plugin ignores, `internal/rm/health.go` of
//!   <https://github.com/NVIDIA/k8s-device-plugin>
//! - [`CHECKS`]: "Health Validation: Xid Checks",
//!   <https://docs.nvidia.com/health-validation/reference/checks/xid.md>
//! - [`ALIBABA`]: Alibaba Cloud's node conditions for GPUs, those that a reboot of the node
//!   resolves
use cleave_api::names::{HEALTH_LOST, HEALTH_NEEDS_RESET, HEALTH_SUSPECT};
use serde::{Deserialize, Serialize};

/// Source: NVIDIA's catalog of XIDs.
pub const CATALOG: &str = "Xid Catalog";
/// Source: NVIDIA's guide to GPU memory errors.
pub const MEMORY: &str = "GPU Memory Error Management";
/// Source: the XIDs that NVIDIA's device plugin ignores.
pub const PLUGIN: &str = "NVIDIA k8s-device-plugin";
/// Source: NVIDIA's guide to XID checks.
pub const CHECKS: &str = "Health Validation: Xid Checks";
/// Source: Alibaba Cloud's node conditions for GPUs.
pub const ALIBABA: &str = "Alibaba Cloud: GPU node conditions";

/// Classes of XIDs, from least to most severe. The class determines what the GPU needs before it
/// can serve again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Class {
    /// The GPU needs nothing: the XID is an error of a program, or a message from the driver. The
    /// agent reports the XID, and no slice becomes unhealthy.
    Application,
    /// The GPU needs a quiet period, and then a full answer of NVML.
    Suspect,
    /// The GPU needs a reset, proven by NVML or by a reboot of the node. Alternatively, an
    /// administrator clears the fault.
    NeedsReset,
    /// The GPU only needs to be reachable again: NVML answers for it.
    Lost,
}

impl Class {
    /// Returns the name in `GpuNode` objects, logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Application => "Application",
            Self::Suspect => HEALTH_SUSPECT,
            Self::NeedsReset => HEALTH_NEEDS_RESET,
            Self::Lost => HEALTH_LOST,
        }
    }
}

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    /// NVIDIA's number of the XID.
    pub xid: u64,
    /// Class of the XID.
    pub class: Class,
    /// NVIDIA's description of the XID, possibly shortened.
    pub meaning: &'static str,
    /// Title of the document that states the class, one of the constants in this module.
    pub source: &'static str,
}

const fn line(xid: u64, class: Class, meaning: &'static str, source: &'static str) -> Line {
    Line { xid, class, meaning, source }
}

/// The known XIDs, by number. Every other XID is [`Class::Suspect`].
pub const TABLE: &[Line] = {
    use Class::{Application, NeedsReset, Suspect};
    &[
        line(8, Application, "GPU stopped processing: a channel timed out", CATALOG),
        line(11, Application, "invalid or corrupted push buffer stream", CATALOG),
        line(13, Application, "graphics engine exception", PLUGIN),
        line(31, Application, "GPU memory page fault", PLUGIN),
        line(32, Application, "invalid or corrupted push buffer stream", CATALOG),
        line(43, Application, "GPU stopped processing: a program's channel was reset", PLUGIN),
        line(44, NeedsReset, "graphics engine fault during a context switch", ALIBABA),
        line(45, Application, "preemptive cleanup, due to previous errors", PLUGIN),
        line(46, NeedsReset, "GPU stopped processing", CHECKS),
        line(48, NeedsReset, "double-bit ECC error", CHECKS),
        line(61, NeedsReset, "internal micro-controller breakpoint or warning", ALIBABA),
        line(62, NeedsReset, "internal micro-controller halt", CATALOG),
        // The GPU keeps working, and its next reset remaps the row. NVML reports the pending
        // remapping too.
        line(63, Application, "ECC page retirement or row remapping recorded", MEMORY),
        line(64, NeedsReset, "ECC page retirement or row remapping failed", MEMORY),
        line(68, Application, "video processor exception", PLUGIN),
        line(69, Application, "graphics engine class error", CATALOG),
        line(74, NeedsReset, "NVLink error", CATALOG),
        line(79, NeedsReset, "GPU has fallen off the bus", CATALOG),
        line(92, Suspect, "high single-bit ECC error rate", CATALOG),
        // The driver terminates the program that used the memory. Other programs continue, and new
        // ones may start (section "Error Recovery and Response Flags").
        line(94, Suspect, "contained ECC error", MEMORY),
        line(95, NeedsReset, "uncontained ECC error", MEMORY),
        line(109, Application, "context switch timeout", PLUGIN),
        line(119, NeedsReset, "GSP RPC timeout", CATALOG),
        line(120, NeedsReset, "GSP error", CATALOG),
        line(137, Application, "NVLink privilege error: an illegal access to a peer", CATALOG),
        line(140, NeedsReset, "unrecovered ECC error", ALIBABA),
        line(143, NeedsReset, "GPU initialization failure", CATALOG),
        // The agent reads the recovery action from NVML and derives the GPU's health from that.
        line(154, Application, "GPU recovery action changed", CATALOG),
    ]
};

/// Returns the class of an XID. Ignored XIDs are [`Class::Application`].
pub fn classify(xid: u64, ignored: &[u64]) -> Class {
    if ignored.contains(&xid) {
        return Class::Application;
    }
    TABLE.iter().find(|line| line.xid == xid).map_or(Class::Suspect, |line| line.class)
}

/// Returns the number and meaning of an XID, like `XID 79 (GPU has fallen off the bus)`.
pub fn describe(xid: u64) -> String {
    match TABLE.iter().find(|line| line.xid == xid) {
        Some(line) => format!("XID {xid} ({})", line.meaning),
        None => format!("XID {xid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_xid_is_listed_once_in_order_with_a_source() {
        assert!(TABLE.is_sorted_by(|a, b| a.xid < b.xid));
        assert!(TABLE.iter().all(|line| [CATALOG, MEMORY, PLUGIN, CHECKS, ALIBABA].contains(&line.source)));
        assert!(TABLE.iter().all(|line| line.class != Class::Lost), "only NVML itself can report a GPU as lost");
    }

    #[test]
    fn errors_of_programs_do_not_affect_the_gpu_and_unknown_xids_are_suspect() {
        for xid in [13, 31, 43, 45, 68, 69] {
            assert_eq!(classify(xid, &[]), Class::Application, "{xid}");
        }
        for xid in [48, 62, 64, 74, 79, 95, 119, 120, 140, 143] {
            assert_eq!(classify(xid, &[]), Class::NeedsReset, "{xid}");
        }
        for xid in [0, 94, 999, u64::MAX] {
            assert_eq!(classify(xid, &[]), Class::Suspect, "{xid}");
        }
        assert_eq!(classify(79, &[79]), Class::Application, "ignored by the administrator");
        assert_eq!((describe(79).as_str(), describe(999).as_str()), ("XID 79 (GPU has fallen off the bus)", "XID 999"));
    }
}
