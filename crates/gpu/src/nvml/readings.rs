//! Reads the sensors of one GPU.
use std::collections::BTreeSet;

use nvml_wrapper::Device;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};

use super::error::{NvmlError, ignore_unless_lost};
use super::model::{GpuReadings, ThrottleReason};

/// Returns the readings of a GPU's sensors. Fails only if the GPU or the driver is lost.
pub(super) fn read_sensors(device: &Device<'_>) -> Result<GpuReadings, NvmlError> {
    let memory = ignore_unless_lost("nvmlDeviceGetMemoryInfo_v2", device.memory_info())?;
    let busy = ignore_unless_lost("nvmlDeviceGetUtilizationRates", device.utilization_rates())?;
    let reasons = ignore_unless_lost("nvmlDeviceGetCurrentClocksThrottleReasons", device.current_throttle_reasons())?;
    Ok(GpuReadings {
        busy_percent: busy.map(|rates| rates.gpu),
        memory_used: memory.map(|memory| memory.used),
        power_milliwatts: ignore_unless_lost("nvmlDeviceGetPowerUsage", device.power_usage())?,
        power_limit_milliwatts: ignore_unless_lost("nvmlDeviceGetEnforcedPowerLimit", device.enforced_power_limit())?,
        energy_millijoules: ignore_unless_lost(
            "nvmlDeviceGetTotalEnergyConsumption",
            device.total_energy_consumption(),
        )?,
        temperature_celsius: ignore_unless_lost(
            "nvmlDeviceGetTemperature",
            device.temperature(TemperatureSensor::Gpu),
        )?,
        sm_clock_mhz: ignore_unless_lost("nvmlDeviceGetClockInfo", device.clock_info(Clock::SM))?,
        memory_clock_mhz: ignore_unless_lost("nvmlDeviceGetClockInfo", device.clock_info(Clock::Memory))?,
        throttling: reasons.map(parse_throttle_reasons),
    })
}

fn parse_throttle_reasons(reasons: ThrottleReasons) -> BTreeSet<ThrottleReason> {
    let flag = |reason: &ThrottleReason| match reason {
        ThrottleReason::PowerCap => ThrottleReasons::SW_POWER_CAP,
        ThrottleReason::HardwareSlowdown => ThrottleReasons::HW_SLOWDOWN,
        ThrottleReason::SyncBoost => ThrottleReasons::SYNC_BOOST,
        ThrottleReason::Thermal => ThrottleReasons::SW_THERMAL_SLOWDOWN,
        ThrottleReason::HardwareThermal => ThrottleReasons::HW_THERMAL_SLOWDOWN,
        ThrottleReason::PowerBrake => ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN,
    };
    ThrottleReason::ALL.into_iter().filter(|reason| reasons.contains(flag(reason))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_gpus_and_gpus_with_clocks_set_by_an_administrator_are_not_throttled() {
        // Bits of nvml.h: idle, application clocks, display clocks.
        assert!(parse_throttle_reasons(ThrottleReasons::from_bits_truncate(0x1 | 0x2 | 0x100)).is_empty());
        // Power cap and hardware thermal slowdown.
        let reasons = parse_throttle_reasons(ThrottleReasons::from_bits_truncate(0x4 | 0x40));
        assert_eq!(reasons, BTreeSet::from([ThrottleReason::PowerCap, ThrottleReason::HardwareThermal]));
        assert_eq!(parse_throttle_reasons(ThrottleReasons::from_bits_truncate(0xfc)).len(), ThrottleReason::ALL.len());
    }
}
