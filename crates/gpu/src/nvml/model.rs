//! GPUs, MIG instances and processes as NVML reports them.
use std::collections::BTreeSet;

use cleave_plan::units::{Mebibytes, Sms};
use serde::{Deserialize, Serialize};

/// The driver and the number of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverInfo {
    /// Driver version.
    pub driver: String,
    /// Number of GPUs. NVML's indices are 0 to `count - 1`.
    pub count: u32,
}

/// One GPU and the processes on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuObservation {
    /// The GPU's description.
    pub gpu: Gpu,
    /// The GPU's processes, including those in its MIG instances.
    pub processes: Vec<Process>,
}

/// An event that NVML reports asynchronously.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuEvent {
    /// A critical XID.
    Xid {
        /// UUID of the GPU.
        uuid: String,
        /// NVIDIA's error number.
        xid: u64,
        /// The GPU instance, if the GPU is in MIG mode.
        gpu_instance: Option<u32>,
    },
    /// A GPU may have changed: NVML reported another event, or the events of a GPU could not be
    /// read. Read all GPUs again.
    Rescan,
}

/// Memory errors of a GPU and the recovery action that its driver requests. A field is `None` if
/// this GPU or driver does not report the value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuVitals {
    /// Number of uncorrected ECC errors since the driver was loaded or the GPU was reset
    /// (`nvmlDeviceGetTotalEccErrors`, volatile).
    pub uncorrected: Option<u64>,
    /// Whether the next reset will retire pages or remap rows
    /// (`nvmlDeviceGetRetiredPagesPendingStatus`, `nvmlDeviceGetRemappedRows`).
    pub remap_pending: Option<bool>,
    /// Whether a row could not be remapped (`nvmlDeviceGetRemappedRows`).
    pub remap_failed: Option<bool>,
    /// The requested recovery action (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, since driver 570).
    pub recovery: Option<RecoveryAction>,
}

/// The action that the driver requests to recover a GPU (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAction {
    /// No action.
    Nothing,
    /// A reset of the GPU or of its bus.
    Reset,
    /// A reboot of the node.
    Reboot,
    /// A reset at a convenient time, or an end of peer-to-peer transfers. The GPU works until
    /// the reset.
    Drain,
}

/// Readings of a GPU's sensors at one moment. A field is `None` if this GPU or driver does not
/// report the value. For example, a GPU in MIG mode reports no utilization.
///
/// No field describes a single process. Under MPS, NVML attributes all utilization of a GPU to its
/// MPS server, so the utilization of a client is unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuReadings {
    /// Percentage of the driver's last sample period in which a kernel ran
    /// (`nvmlDeviceGetUtilizationRates`). The percentage does not show how many SMs the kernels
    /// used.
    pub busy_percent: Option<u32>,
    /// Used memory in bytes, except the memory that the driver reserves
    /// (`nvmlDeviceGetMemoryInfo_v2`).
    pub memory_used: Option<u64>,
    /// Power in milliwatts, averaged by the driver (`nvmlDeviceGetPowerUsage`).
    pub power_milliwatts: Option<u32>,
    /// Power limit in milliwatts (`nvmlDeviceGetEnforcedPowerLimit`).
    pub power_limit_milliwatts: Option<u32>,
    /// Energy in millijoules since the driver was loaded (`nvmlDeviceGetTotalEnergyConsumption`).
    pub energy_millijoules: Option<u64>,
    /// Temperature of the GPU in degrees Celsius (`nvmlDeviceGetTemperature`).
    pub temperature_celsius: Option<u32>,
    /// Clock of the SMs in MHz (`nvmlDeviceGetClockInfo`).
    pub sm_clock_mhz: Option<u32>,
    /// Clock of the memory in MHz (`nvmlDeviceGetClockInfo`).
    pub memory_clock_mhz: Option<u32>,
    /// Why the clocks are lower than they could be (`nvmlDeviceGetCurrentClocksThrottleReasons`).
    /// Empty if nothing slows the GPU down.
    pub throttling: Option<BTreeSet<ThrottleReason>>,
}

/// Why a busy GPU does not run at its full clock (`nvmlClocksEventReasons`). The set does not
/// include idleness or clocks that an administrator has set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThrottleReason {
    /// The power limit.
    PowerCap,
    /// The hardware halves the clocks or more, because of heat, power or a brake signal.
    HardwareSlowdown,
    /// Another GPU of the same sync boost group.
    SyncBoost,
    /// The driver's temperature limit.
    Thermal,
    /// The hardware's temperature limit.
    HardwareThermal,
    /// A brake signal, for example from the power supply.
    PowerBrake,
}

impl ThrottleReason {
    /// All reasons.
    pub const ALL: [Self; 6] = [
        Self::PowerCap,
        Self::HardwareSlowdown,
        Self::SyncBoost,
        Self::Thermal,
        Self::HardwareThermal,
        Self::PowerBrake,
    ];

    /// Returns the reason's name in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PowerCap => "power_cap",
            Self::HardwareSlowdown => "hardware_slowdown",
            Self::SyncBoost => "sync_boost",
            Self::Thermal => "thermal",
            Self::HardwareThermal => "hardware_thermal",
            Self::PowerBrake => "power_brake",
        }
    }
}

/// When a new MIG mode takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigActivation {
    /// Immediately.
    Now,
    /// After a GPU reset that the driver cannot perform itself. For a GPU that is passed through to
    /// a virtual machine, restart the virtual machine.
    AfterReset,
    /// Once no process uses the GPU. The driver keeps the mode as pending.
    InUse,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// NVML's UUID.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// The number in `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name.
    pub model: String,
    /// Total memory as CUDA reports it: NVML's total minus the memory that the driver reserves.
    pub memory: Mebibytes,
    /// Streaming multiprocessors with MIG off.
    pub sms: Sms,
    /// PCI bus ID in the format of sysfs: `0000:3b:00.0`.
    pub pci: String,
    /// NUMA node of the GPU, if the machine reports one.
    pub numa: Option<u32>,
    /// CUDA compute capability: its major and its minor number.
    pub compute_capability: (u32, u32),
    /// MIG, if the GPU supports it.
    pub mig: Option<MigState>,
}

/// State of MIG on one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigState {
    /// Whether MIG mode is on.
    pub enabled: bool,
    /// MIG mode after the next reset, if it differs from the current mode.
    pub pending: Option<bool>,
    /// Profiles and placements as NVML reports them.
    pub profiles: Vec<MigProfile>,
    /// Existing GPU instances, sorted by start.
    pub instances: Vec<MigInstance>,
}

/// One MIG profile of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigProfile {
    /// NVML's ID of the profile, for creating instances on this GPU.
    pub id: u32,
    /// Name without prefix: `1g.10gb`, `1g.10gb+me`.
    pub name: String,
    /// Memory of one instance.
    pub memory: Mebibytes,
    /// Streaming multiprocessors of one instance.
    pub sms: Sms,
    /// Compute slices of one instance.
    pub slices: u32,
    /// Memory slices of one instance.
    pub size: u32,
    /// Memory slices at which an instance can start.
    pub starts: Vec<u32>,
}

/// One GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigInstance {
    /// UUID of the MIG device. The UUID is empty while no compute instance exists.
    pub uuid: String,
    /// Profile name without prefix.
    pub profile: String,
    /// First memory slice.
    pub start: u32,
    /// ID of the GPU instance.
    pub gpu_instance: u32,
    /// ID of the first compute instance.
    pub compute_instance: Option<u32>,
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// PID on the host.
    pub pid: u32,
    /// Used GPU memory in bytes, if the driver reports it.
    pub memory: Option<u64>,
    /// Whether the process is an MPS client.
    pub mps: bool,
    /// GPU instance, if the GPU is in MIG mode.
    pub gpu_instance: Option<u32>,
}

/// The processes on a GPU or MIG device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceProcesses {
    /// The processes, sorted by PID.
    pub processes: Vec<Process>,
    /// Whether the driver reports which processes are MPS clients. If not, ignore
    /// [`Process::mps`].
    pub are_clients_known: bool,
}

/// The processes that may create contexts on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any process.
    Default,
    /// One process at a time.
    ExclusiveProcess,
    /// No process.
    Prohibited,
}
