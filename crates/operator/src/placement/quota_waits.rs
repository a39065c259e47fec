//! The reason of a pod that waits because of quotas.
use cleave_plan::quota::Wait;

use crate::policies::demand::{Reason, WaitingPod};

/// Why a pod waits because of quotas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct QuotaWait {
    pub(super) wait: Wait,
    /// The explanation, as a clause.
    pub(super) message: String,
}

impl QuotaWait {
    /// Returns the explanation for the pod's owner.
    pub(super) fn into_waiting_pod(self) -> WaitingPod {
        let reason = match self.wait {
            Wait::OverMax | Wait::LargerThanMax => Reason::OverMax,
            Wait::WaitsForGuarantee => Reason::WaitsForGuarantee,
            Wait::Protected => Reason::Protected,
            Wait::GangIncomplete => Reason::GangIncomplete,
            Wait::GangTooLarge => Reason::GangTooLarge,
            _ => Reason::NoRoom,
        };
        let mut message = self.message;
        if let Some(first) = message.get(..1).map(str::to_uppercase) {
            message.replace_range(..1, &first);
        }
        WaitingPod { reason, message }
    }
}
