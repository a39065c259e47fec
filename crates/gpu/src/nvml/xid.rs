//! Reads the XID events of one GPU.
use std::ops::ControlFlow;
use std::thread;
use std::time::Duration;

use nvml_wrapper::error::NvmlError as Code;
use nvml_wrapper::{Device, Nvml};

use super::error::NvmlError;
use super::model::GpuEvent;
use super::sys;

/// Delay after a read that returned no event.
const XID_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Registers a GPU in its own event set. Passes each event to `report` until `report` returns
/// `Break`. Passes `None` after each read that returns no event.
///
/// Polls instead of waiting in the library. NVML lets only one thread wait at a time, and all other
/// threads spin on a lock. Two waiting threads used a whole CPU (two H200s, driver 580.159).
pub(super) fn listen_for_xids(
    nvml: &Nvml,
    device: &Device<'_>,
    report: &mut dyn FnMut(Option<GpuEvent>) -> ControlFlow<()>,
) -> Result<(), NvmlError> {
    let failed = |call| move |code| NvmlError::from_code(call, code);
    let uuid = device.uuid().map_err(failed("nvmlDeviceGetUUID"))?;
    let set = nvml.create_event_set().map_err(failed("nvmlEventSetCreate"))?;
    sys::register_for_xids(nvml, device, &set)?;
    loop {
        let event = match sys::wait_for_event(nvml, &set, 0) {
            Ok(event) if event.kind & sys::XID_EVENT_TYPE != 0 && event.device == sys::handle_identity(device) => {
                Some(GpuEvent::Xid { uuid: uuid.clone(), xid: event.data, gpu_instance: event.gpu_instance })
            }
            Ok(_) => Some(GpuEvent::Rescan),
            Err(Code::Timeout) => None,
            Err(code) => return Err(NvmlError::from_code("nvmlEventSetWait", code)),
        };
        let is_quiet = event.is_none();
        if report(event).is_break() {
            return Ok(());
        }
        if is_quiet {
            thread::sleep(XID_POLL_INTERVAL);
        }
    }
}
