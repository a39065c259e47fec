//! Reads the XID events of one GPU.
use std::sync::Arc;

use nvml_wrapper::error::NvmlError as Code;
use nvml_wrapper::{Device, Nvml};

use super::error::NvmlError;
use super::gpus::GpuEvents;
use super::model::GpuEvent;
use super::sys::{self, XidSet};

/// The XID events of one GPU, in an event set of its own.
///
/// Asks for events instead of waiting in the library. NVML lets only one thread wait at a time, and
/// all other threads spin on a lock. Two waiting threads used a whole CPU (two H200s, driver
/// 580.159).
#[derive(Debug)]
pub(super) struct XidEvents {
    set: XidSet,
    uuid: String,
    /// [`sys::handle_identity`] of the GPU.
    device: usize,
}

impl XidEvents {
    /// Registers a GPU for its XIDs.
    pub(super) fn open(nvml: &Arc<Nvml>, device: &Device<'_>) -> Result<Self, NvmlError> {
        let uuid = device.uuid().map_err(|code| NvmlError::from_code("nvmlDeviceGetUUID", code))?;
        Ok(Self { set: XidSet::new(nvml, device)?, uuid, device: sys::handle_identity(device) })
    }
}

impl GpuEvents for XidEvents {
    fn next_event(&mut self) -> Result<Option<GpuEvent>, NvmlError> {
        match self.set.next_event() {
            Ok(event) if event.kind & sys::XID_EVENT_TYPE != 0 && event.device == self.device => {
                let uuid = self.uuid.clone();
                Ok(Some(GpuEvent::Xid { uuid, xid: event.data, gpu_instance: event.gpu_instance }))
            }
            Ok(_) => Ok(Some(GpuEvent::Rescan)),
            Err(Code::Timeout) => Ok(None),
            Err(code) => Err(NvmlError::from_code("nvmlEventSetWait", code)),
        }
    }
}
