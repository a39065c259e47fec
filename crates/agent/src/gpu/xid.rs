//! What each XID says of the GPU: a table, each line with its source.
//!
//! Sources, all NVIDIA's unless said otherwise:
//! - [`CATALOG`]: "Xid Catalog",
//!   <https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>, the column of
//!   immediate actions
//! - [`MEMORY`]: "GPU Memory Error Management",
//!   <https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/>
//! - [`PLUGIN`]: the XIDs that the device plugin of NVIDIA passes over, `internal/rm/health.go` of
//!   <https://github.com/NVIDIA/k8s-device-plugin>
//! - [`CHECKS`]: "Health Validation: Xid Checks",
//!   <https://docs.nvidia.com/health-validation/reference/checks/xid.md>
//! - [`REPAIR`]: Alibaba Cloud's node conditions for GPUs, those that a restart of the node
//!   resolves
use cleave_api::names::{HEALTH_LOST, HEALTH_NEEDS_RESET, HEALTH_SUSPECT};
use serde::{Deserialize, Serialize};

/// Source of a line; see the module.
pub const CATALOG: &str = "Xid Catalog";
/// Source of a line; see the module.
pub const MEMORY: &str = "GPU Memory Error Management";
/// Source of a line; see the module.
pub const PLUGIN: &str = "NVIDIA k8s-device-plugin";
/// Source of a line; see the module.
pub const CHECKS: &str = "Health Validation: Xid Checks";
/// Source of a line; see the module.
pub const REPAIR: &str = "Alibaba Cloud: GPU node conditions";

/// What has to happen until a GPU can serve again. In order: the later is the worse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Class {
    /// Nothing: it is a program's own fault, or a note of the driver's. It is told, and no slice
    /// goes.
    Application,
    /// A quiet time, and a full answer of NVML's after it.
    Suspect,
    /// A reset, shown by NVML or by another boot of the node, or an administrator's word.
    NeedsReset,
    /// NVML has to answer.
    Lost,
}

impl Class {
    /// As a `GpuNode`, logs and metrics write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Application => "Application",
            Self::Suspect => HEALTH_SUSPECT,
            Self::NeedsReset => HEALTH_NEEDS_RESET,
            Self::Lost => HEALTH_LOST,
        }
    }
}

/// A line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    /// NVIDIA's number.
    pub xid: u64,
    /// What it says of the GPU.
    pub class: Class,
    /// What it is, in NVIDIA's words or fewer.
    pub meaning: &'static str,
    /// Where that is written.
    pub source: &'static str,
}

const fn line(xid: u64, class: Class, meaning: &'static str, source: &'static str) -> Line {
    Line { xid, class, meaning, source }
}

/// The XIDs that are known, by number. Every other is [`Class::Suspect`].
pub const TABLE: &[Line] = {
    use Class::{Application, NeedsReset, Suspect};
    &[
        line(8, Application, "GPU stopped processing: a channel timed out", CATALOG),
        line(11, Application, "invalid or corrupted push buffer stream", CATALOG),
        line(13, Application, "graphics engine exception", PLUGIN),
        line(31, Application, "GPU memory page fault", PLUGIN),
        line(32, Application, "invalid or corrupted push buffer stream", CATALOG),
        line(43, Application, "GPU stopped processing: a program's channel was reset", PLUGIN),
        line(44, NeedsReset, "graphics engine fault during a context switch", REPAIR),
        line(45, Application, "preemptive cleanup, due to previous errors", PLUGIN),
        line(46, NeedsReset, "GPU stopped processing", CHECKS),
        line(48, NeedsReset, "double-bit ECC error", CHECKS),
        line(61, NeedsReset, "internal micro-controller breakpoint or warning", REPAIR),
        line(62, NeedsReset, "internal micro-controller halt", CATALOG),
        // It says that the next reset remaps, which NVML says too: nothing is wrong until then.
        line(63, Application, "ECC page retirement or row remapping recorded", MEMORY),
        line(64, NeedsReset, "ECC page retirement or row remapping failed", MEMORY),
        line(68, Application, "video processor exception", PLUGIN),
        line(69, Application, "graphics engine class error", CATALOG),
        line(74, NeedsReset, "NVLink error", CATALOG),
        line(79, NeedsReset, "GPU has fallen off the bus", CATALOG),
        line(92, Suspect, "high single-bit ECC error rate", CATALOG),
        // The program that used the memory is ended, others go on, and new ones may start (section
        // "Error Recovery and Response Flags").
        line(94, Suspect, "contained ECC error", MEMORY),
        line(95, NeedsReset, "uncontained ECC error", MEMORY),
        line(109, Application, "context switch timeout", PLUGIN),
        line(119, NeedsReset, "GSP RPC timeout", CATALOG),
        line(120, NeedsReset, "GSP error", CATALOG),
        line(137, Application, "NVLink privilege error: an illegal access to a peer", CATALOG),
        line(140, NeedsReset, "unrecovered ECC error", REPAIR),
        line(143, NeedsReset, "GPU initialization failure", CATALOG),
        // What the driver wants done is asked of NVML, and counts from there.
        line(154, Application, "GPU recovery action changed", CATALOG),
    ]
};

/// What an XID says of the GPU.
pub fn classify(xid: u64, ignored: &[u64]) -> Class {
    if ignored.contains(&xid) {
        return Class::Application;
    }
    TABLE.iter().find(|line| line.xid == xid).map_or(Class::Suspect, |line| line.class)
}

/// `XID 79 (GPU has fallen off the bus)`.
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
    fn each_xid_is_there_once_in_order_with_a_source() {
        assert!(TABLE.is_sorted_by(|a, b| a.xid < b.xid));
        assert!(TABLE.iter().all(|line| [CATALOG, MEMORY, PLUGIN, CHECKS, REPAIR].contains(&line.source)));
        assert!(TABLE.iter().all(|line| line.class != Class::Lost), "only NVML's silence says that");
    }

    #[test]
    fn programs_hurt_no_gpu_and_what_nobody_knows_is_suspect() {
        for xid in [13, 31, 43, 45, 68, 69] {
            assert_eq!(classify(xid, &[]), Class::Application, "{xid}");
        }
        for xid in [48, 62, 64, 74, 79, 95, 119, 120, 140, 143] {
            assert_eq!(classify(xid, &[]), Class::NeedsReset, "{xid}");
        }
        for xid in [0, 94, 999, u64::MAX] {
            assert_eq!(classify(xid, &[]), Class::Suspect, "{xid}");
        }
        assert_eq!(classify(79, &[79]), Class::Application, "as the administrator wants it");
        assert_eq!((describe(79).as_str(), describe(999).as_str()), ("XID 79 (GPU has fallen off the bus)", "XID 999"));
    }
}
