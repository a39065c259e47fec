//! Classifies XIDs with a table that has a source for each line.
//!
//! The sources are documents of NVIDIA unless stated otherwise:
//! - [`XID_CATALOG_SOURCE`]: "Xid Catalog",
//!   <https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>, the column of
//!   immediate actions
//! - [`MEMORY_ERROR_SOURCE`]: "GPU Memory Error Management",
//!   <https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/>
//! - [`DEVICE_PLUGIN_SOURCE`]: the XIDs that NVIDIA's device plugin ignores,
//!   `internal/rm/health.go` of <https://github.com/NVIDIA/k8s-device-plugin>
//! - [`XID_CHECKS_SOURCE`]: "Health Validation: Xid Checks",
//!   <https://docs.nvidia.com/health-validation/reference/checks/xid.md>
//! - [`ALIBABA_SOURCE`]: Alibaba Cloud's list of GPU node conditions, from which the table takes
//!   those that a reboot of the node resolves
use cleave_api::names::{HEALTH_LOST, HEALTH_NEEDS_RESET, HEALTH_SUSPECT};
use serde::{Deserialize, Serialize};

/// Source: NVIDIA's catalog of XIDs.
pub const XID_CATALOG_SOURCE: &str = "Xid Catalog";
/// Source: NVIDIA's guide to GPU memory errors.
pub const MEMORY_ERROR_SOURCE: &str = "GPU Memory Error Management";
/// Source: the XIDs that NVIDIA's device plugin ignores.
pub const DEVICE_PLUGIN_SOURCE: &str = "NVIDIA k8s-device-plugin";
/// Source: NVIDIA's guide to XID checks.
pub const XID_CHECKS_SOURCE: &str = "Health Validation: Xid Checks";
/// Source: Alibaba Cloud's node conditions for GPUs.
pub const ALIBABA_SOURCE: &str = "Alibaba Cloud: GPU node conditions";

/// Classes of faults, from least to most severe. The class determines what a GPU needs before it
/// can serve again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FaultClass {
    /// The GPU needs nothing, because the XID is an error of a program or a message from the
    /// driver. The agent reports the XID, and no slice becomes unhealthy.
    Application,
    /// The GPU needs a quiet period, and then a full answer from NVML.
    Suspect,
    /// The GPU needs a reset. The fault ends when NVML or a reboot proves a reset, or when an
    /// administrator clears the fault.
    NeedsReset,
    /// The fault ends when NVML answers for the GPU.
    Lost,
}

impl FaultClass {
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

/// An entry of [`XID_TABLE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XidEntry {
    /// NVIDIA's number for the error.
    pub xid: u64,
    /// Class of the XID.
    pub class: FaultClass,
    /// NVIDIA's description of the error, possibly shortened.
    pub meaning: &'static str,
    /// Title of the document that is the source of the class: one of the constants in this module.
    pub source: &'static str,
}

const fn xid_entry(xid: u64, class: FaultClass, meaning: &'static str, source: &'static str) -> XidEntry {
    XidEntry { xid, class, meaning, source }
}

/// The known XIDs, by number. Every other XID is [`FaultClass::Suspect`].
pub const XID_TABLE: &[XidEntry] = {
    use FaultClass::{Application, NeedsReset, Suspect};
    &[
        xid_entry(8, Application, "GPU stopped processing: a channel timed out", XID_CATALOG_SOURCE),
        xid_entry(11, Application, "invalid or corrupted push buffer stream", XID_CATALOG_SOURCE),
        xid_entry(13, Application, "graphics engine exception", DEVICE_PLUGIN_SOURCE),
        xid_entry(31, Application, "GPU memory page fault", DEVICE_PLUGIN_SOURCE),
        xid_entry(32, Application, "invalid or corrupted push buffer stream", XID_CATALOG_SOURCE),
        xid_entry(43, Application, "GPU stopped processing: a program's channel was reset", DEVICE_PLUGIN_SOURCE),
        xid_entry(44, NeedsReset, "graphics engine fault during a context switch", ALIBABA_SOURCE),
        xid_entry(45, Application, "preemptive cleanup, due to previous errors", DEVICE_PLUGIN_SOURCE),
        xid_entry(46, NeedsReset, "GPU stopped processing", XID_CHECKS_SOURCE),
        xid_entry(48, NeedsReset, "double-bit ECC error", XID_CHECKS_SOURCE),
        xid_entry(61, NeedsReset, "internal micro-controller breakpoint or warning", ALIBABA_SOURCE),
        xid_entry(62, NeedsReset, "internal micro-controller halt", XID_CATALOG_SOURCE),
        // The GPU continues to work, and its next reset remaps the memory row. NVML also reports
        // the pending remapping.
        xid_entry(63, Application, "ECC page retirement or row remapping recorded", MEMORY_ERROR_SOURCE),
        xid_entry(64, NeedsReset, "ECC page retirement or row remapping failed", MEMORY_ERROR_SOURCE),
        xid_entry(68, Application, "video processor exception", DEVICE_PLUGIN_SOURCE),
        xid_entry(69, Application, "graphics engine class error", XID_CATALOG_SOURCE),
        xid_entry(74, NeedsReset, "NVLink error", XID_CATALOG_SOURCE),
        xid_entry(79, NeedsReset, "GPU has fallen off the bus", XID_CATALOG_SOURCE),
        xid_entry(92, Suspect, "high single-bit ECC error rate", XID_CATALOG_SOURCE),
        // The driver terminates the program that used the memory. Other programs continue, and new
        // programs may start (section "Error Recovery and Response Flags").
        xid_entry(94, Suspect, "contained ECC error", MEMORY_ERROR_SOURCE),
        xid_entry(95, NeedsReset, "uncontained ECC error", MEMORY_ERROR_SOURCE),
        xid_entry(109, Application, "context switch timeout", DEVICE_PLUGIN_SOURCE),
        xid_entry(119, NeedsReset, "GSP RPC timeout", XID_CATALOG_SOURCE),
        xid_entry(120, NeedsReset, "GSP error", XID_CATALOG_SOURCE),
        xid_entry(137, Application, "NVLink privilege error: an illegal access to a peer", XID_CATALOG_SOURCE),
        xid_entry(140, NeedsReset, "unrecovered ECC error", ALIBABA_SOURCE),
        xid_entry(143, NeedsReset, "GPU initialization failure", XID_CATALOG_SOURCE),
        // The agent reads the recovery action from NVML and derives the GPU's health from this
        // action.
        xid_entry(154, Application, "GPU recovery action changed", XID_CATALOG_SOURCE),
    ]
};

/// Returns the class of an XID. Ignored XIDs are [`FaultClass::Application`].
pub fn classify_xid(xid: u64, ignored: &[u64]) -> FaultClass {
    if ignored.contains(&xid) {
        return FaultClass::Application;
    }
    XID_TABLE.iter().find(|line| line.xid == xid).map_or(FaultClass::Suspect, |line| line.class)
}

/// Returns the number and meaning of an XID, such as `XID 79 (GPU has fallen off the bus)`.
pub fn describe_xid(xid: u64) -> String {
    match XID_TABLE.iter().find(|line| line.xid == xid) {
        Some(line) => format!("XID {xid} ({})", line.meaning),
        None => format!("XID {xid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_xid_is_listed_once_in_order_with_a_source() {
        assert!(XID_TABLE.is_sorted_by(|a, b| a.xid < b.xid));
        assert!(XID_TABLE.iter().all(|line| {
            [XID_CATALOG_SOURCE, MEMORY_ERROR_SOURCE, DEVICE_PLUGIN_SOURCE, XID_CHECKS_SOURCE, ALIBABA_SOURCE]
                .contains(&line.source)
        }));
        assert!(
            XID_TABLE.iter().all(|line| line.class != FaultClass::Lost),
            "only NVML itself can report a GPU as lost"
        );
    }

    #[test]
    fn errors_of_programs_do_not_affect_the_gpu_and_unknown_xids_are_suspect() {
        for xid in [13, 31, 43, 45, 68, 69] {
            assert_eq!(classify_xid(xid, &[]), FaultClass::Application, "{xid}");
        }
        for xid in [48, 62, 64, 74, 79, 95, 119, 120, 140, 143] {
            assert_eq!(classify_xid(xid, &[]), FaultClass::NeedsReset, "{xid}");
        }
        for xid in [0, 94, 999, u64::MAX] {
            assert_eq!(classify_xid(xid, &[]), FaultClass::Suspect, "{xid}");
        }
        assert_eq!(classify_xid(79, &[79]), FaultClass::Application, "ignored by the administrator");
        assert_eq!(
            (describe_xid(79).as_str(), describe_xid(999).as_str()),
            ("XID 79 (GPU has fallen off the bus)", "XID 999")
        );
    }
}
