//! Metrics of GPUs: NVML's readings, and sums of the limits of the allocations.
use std::sync::atomic::AtomicU64;

use cleave_api::gpunode::GpuStatus;
use cleave_gpu::nvml::{GpuReadings, ThrottleReason};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Labels of a GPU or MIG device. `gpu` is empty until a status lists the device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
pub(super) struct DeviceLabels {
    pub(super) gpu: String,
    pub(super) uuid: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ThrottleLabels {
    gpu: String,
    uuid: String,
    reason: &'static str,
}

/// Metrics of GPUs.
#[derive(Debug, Clone, Default)]
pub(super) struct GpuMetrics {
    up: Family<DeviceLabels, Gauge>,
    sms: Family<DeviceLabels, Gauge>,
    sms_allocated: Family<DeviceLabels, Gauge>,
    memory: Family<DeviceLabels, Gauge>,
    memory_allocated: Family<DeviceLabels, Gauge>,
    memory_used: Family<DeviceLabels, Gauge>,
    utilization: Family<DeviceLabels, Gauge<f64, AtomicU64>>,
    power: Family<DeviceLabels, Gauge<f64, AtomicU64>>,
    power_limit: Family<DeviceLabels, Gauge<f64, AtomicU64>>,
    energy: Family<DeviceLabels, Counter<f64, AtomicU64>>,
    temperature: Family<DeviceLabels, Gauge>,
    sm_clock: Family<DeviceLabels, Gauge>,
    memory_clock: Family<DeviceLabels, Gauge>,
    throttled: Family<ThrottleLabels, Gauge>,
}

impl GpuMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("up", "1 if NVML answered the last query about the GPU, else 0", self.up.clone());
        registry.register("sms", "Streaming multiprocessors (SMs) of the GPU", self.sms.clone());
        let allocated = "Sum of the SM limits of the allocations on the GPU and its MIG devices";
        registry.register("sms_allocated", allocated, self.sms_allocated.clone());
        registry.register("memory_bytes", "Memory of the GPU without the driver's part", self.memory.clone());
        let allocated = "Sum of the memory limits of the allocations on the GPU and its MIG devices";
        registry.register("memory_allocated_bytes", allocated, self.memory_allocated.clone());
        let used = "Used memory of the GPU without the driver's part, as NVML reports it";
        registry.register("memory_used_bytes", used, self.memory_used.clone());
        let utilization = "Fraction of the driver's last sample period in which a kernel ran; no series in MIG mode";
        registry.register("utilization_ratio", utilization, self.utilization.clone());
        registry.register("power_watts", "Power of the GPU", self.power.clone());
        registry.register("power_limit_watts", "Power limit of the GPU", self.power_limit.clone());
        registry.register("energy_joules", "Energy that the GPU used since the driver was loaded", self.energy.clone());
        registry.register("temperature_celsius", "Temperature of the GPU", self.temperature.clone());
        registry.register("sm_clock_hertz", "Clock of the SMs", self.sm_clock.clone());
        registry.register("memory_clock_hertz", "Clock of the memory", self.memory_clock.clone());
        let throttled = "1 for each reason that lowers the GPU's clocks now, else 0";
        registry.register("throttled", throttled, self.throttled.clone());
    }

    /// Removes the series that [`Self::set_status`] sets, for all GPUs.
    pub(super) fn clear_status(&self) {
        for family in [&self.sms, &self.sms_allocated, &self.memory, &self.memory_allocated] {
            family.clear();
        }
    }

    /// Sets the metrics of a GPU from its status.
    pub(super) fn set_status(&self, label: &DeviceLabels, gpu: &GpuStatus) {
        let bytes = |mib: u64| to_gauge_value(mib.saturating_mul(BYTES_PER_MIB));
        self.sms.get_or_create(label).set(gpu.sms.into());
        self.memory.get_or_create(label).set(bytes(gpu.memory_mib));
        let limited_sms: u32 = gpu.allocations.iter().filter_map(|allocation| allocation.sms).sum();
        self.sms_allocated.get_or_create(label).set(limited_sms.into());
        let limited_memory = gpu.allocations.iter().filter_map(|allocation| allocation.memory_mib).sum();
        self.memory_allocated.get_or_create(label).set(bytes(limited_memory));
    }

    /// Removes the readings and the energy of a GPU that the status no longer lists.
    pub(super) fn remove(&self, label: &DeviceLabels) {
        self.forget_readings(label);
        self.energy.remove(label);
    }

    /// Removes the readings that NVML reported about a GPU, except the energy.
    pub(super) fn forget_readings(&self, label: &DeviceLabels) {
        self.up.remove(label);
        self.remove_values(label);
    }

    /// Removes the values that NVML reports. Keeps the energy, because it is a counter.
    fn remove_values(&self, label: &DeviceLabels) {
        for family in [&self.memory_used, &self.temperature, &self.sm_clock, &self.memory_clock] {
            family.remove(label);
        }
        for family in [&self.utilization, &self.power, &self.power_limit] {
            family.remove(label);
        }
        for reason in ThrottleReason::ALL {
            self.throttled.remove(&throttle_labels(label, reason));
        }
    }

    /// Sets the values that NVML reports, and removes the values that NVML does not report. `None`
    /// means that NVML did not answer.
    pub(super) fn set_readings(&self, label: &DeviceLabels, readings: Option<&GpuReadings>) {
        self.up.get_or_create(label).set(readings.is_some().into());
        self.remove_values(label);
        let Some(readings) = readings else { return };
        if let Some(joules) = readings.energy_millijoules.map(from_thousandths) {
            // Add the difference, because the library cannot set a counter to a value. The driver's
            // energy counter restarts at 0 when the driver is loaded.
            if self.energy.get_or_create(label).get() > joules {
                self.energy.remove(label);
            }
            let counter = self.energy.get_or_create(label);
            counter.inc_by(joules - counter.get());
        }
        let mhz = |mhz: u32| i64::from(mhz) * 1_000_000;
        let integers = [
            (&self.memory_used, readings.memory_used.map(to_gauge_value)),
            (&self.temperature, readings.temperature_celsius.map(i64::from)),
            (&self.sm_clock, readings.sm_clock_mhz.map(mhz)),
            (&self.memory_clock, readings.memory_clock_mhz.map(mhz)),
        ];
        for (family, value) in integers {
            if let Some(value) = value {
                family.get_or_create(label).set(value);
            }
        }
        let fractions = [
            (&self.utilization, readings.busy_percent.map(|percent| f64::from(percent) / 100.0)),
            (&self.power, readings.power_milliwatts.map(|power| from_thousandths(power.into()))),
            (&self.power_limit, readings.power_limit_milliwatts.map(|power| from_thousandths(power.into()))),
        ];
        for (family, value) in fractions {
            if let Some(value) = value {
                family.get_or_create(label).set(value);
            }
        }
        if let Some(throttling) = &readings.throttling {
            for reason in ThrottleReason::ALL {
                let active = throttling.contains(&reason);
                self.throttled.get_or_create(&throttle_labels(label, reason)).set(active.into());
            }
        }
    }
}

fn throttle_labels(DeviceLabels { gpu, uuid }: &DeviceLabels, reason: ThrottleReason) -> ThrottleLabels {
    ThrottleLabels { gpu: gpu.clone(), uuid: uuid.clone(), reason: reason.as_str() }
}

pub(super) const BYTES_PER_MIB: u64 = 1 << 20;

/// Converts a number to a gauge's value. Larger numbers become [`i64::MAX`].
pub(super) fn to_gauge_value(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Converts thousandths of a unit to units.
#[allow(clippy::cast_precision_loss, reason = "a metric is a float; 2^53 mJ are more than a GPU uses in 400 years")]
fn from_thousandths(thousandths: u64) -> f64 {
    thousandths as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use crate::metrics::Metrics;

    #[test]
    fn gpu_quiesced_is_1_when_the_quiesce_is_complete() {
        let metrics = Metrics::new();
        let series = |quiesces: &[(&str, Option<bool>)]| {
            let gpu = |(uuid, quiesced): &(&str, Option<bool>)| {
                let mut gpu = serde_json::json!({"uuid": uuid, "index": 0, "model": "H100", "memoryMib": 1, "sms": 1,
                    "health": {"healthy": true}});
                if let Some(quiesced) = quiesced {
                    gpu["quiesce"] = serde_json::json!({"quiesced": quiesced, "message": ""});
                }
                gpu
            };
            let gpus: Vec<_> = quiesces.iter().map(gpu).collect();
            metrics.set_node_status(&serde_json::from_value(serde_json::json!({"gpus": gpus})).unwrap());
            let text = metrics.encode().unwrap();
            let value =
                |line: &str| Some(line.strip_prefix("cleave_agent_gpu_quiesced{")?.split_once("uuid=\"")?.1.to_owned());
            let mut values: Vec<String> = text.lines().filter_map(value).collect();
            values.sort();
            values
        };
        let of = |uuid: &str, value: u8| format!("{uuid}\",model=\"H100\"}} {value}");
        let all = series(&[("GPU-a", None), ("GPU-b", Some(false)), ("GPU-c", Some(true))]);
        assert_eq!(all, [of("GPU-a", 0), of("GPU-b", 0), of("GPU-c", 1)]);
        assert_eq!(series(&[("GPU-c", None)]), [of("GPU-c", 0)], "removed GPUs have no series");
    }
}
