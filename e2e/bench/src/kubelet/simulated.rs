//! Creates simulated GPUs for the agent: a new machine for each start, and a spec that replaces the
//! operator's.
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use cleave_api::GpuNodeSpec;
use cleave_api::gpunode::{GpuSpec, MpsPartition, MpsSlices, Partition, TimeSlicedPartition};
use cleave_api::sharingpolicy::{ComputeMode, Interval, MpsEnforcement};
use cleave_plan::mps::{Threads, memory_limit, thread_percentage};
use cleave_plan::units::Mebibytes;
use sim_machine::{Driver, GpuDescription, Machine, MachineDescription, STATE_DIRECTORY_ENV};

const SIMULATED_GPU_MODEL: &str = "H100-80";

/// How the agent shares GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Sharing {
    /// Shares under MPS, with an MPS host and the simulated MPS.
    Mps,
    /// Time-sliced replicas.
    TimeSlicing,
}

/// The simulated hardware of a run.
pub(super) struct SimulatedHardware {
    resource: String,
    sharing: Sharing,
    gpus: u32,
    units: u32,
    nvml: PathBuf,
    mps_control: PathBuf,
    mps_host: PathBuf,
}

impl SimulatedHardware {
    /// Uses the simulated NVML and MPS and the MPS host in the directory of the agent's program.
    /// Fails if a file is missing.
    pub(super) fn new(resource: &str, cleave: &Path, sharing: Sharing, gpus: u32, units: u32) -> Result<Self> {
        let beside = |name: &str| {
            let path = cleave.canonicalize().ok().and_then(|path| Some(path.parent()?.join(name)));
            let path = path.with_context(|| format!("{} does not exist", cleave.display()))?;
            ensure!(path.exists(), "{} is missing: cargo build -p cleave -p sim-nvml -p sim-mps", path.display());
            Ok(path)
        };
        Ok(Self {
            resource: resource.to_owned(),
            sharing,
            gpus,
            units,
            nvml: beside("libnvidia_ml.so")?,
            mps_control: beside("nvidia-cuda-mps-control")?,
            mps_host: beside("cleave-mps-host")?,
        })
    }

    /// Returns the directory of the simulated machine.
    fn machine_directory(directory: &Path) -> PathBuf {
        directory.join("machine")
    }

    /// Returns the environment variables that select the simulated hardware for the agent and the
    /// MPS host.
    pub(super) fn environment(&self, directory: &Path) -> [(&'static str, OsString); 3] {
        [
            (STATE_DIRECTORY_ENV, Self::machine_directory(directory).into()),
            ("CLEAVE_NVML_LIBRARY", self.nvml.clone().into()),
            ("CLEAVE_MPS_CONTROL", self.mps_control.clone().into()),
        ]
    }

    /// Returns the path of the MPS host, if the sharing mode needs one.
    pub(super) fn mps_host(&self) -> Option<&Path> {
        (self.sharing == Sharing::Mps).then_some(self.mps_host.as_path())
    }

    /// Creates the simulated machine, and writes the spec for its GPUs.
    pub(super) fn create_machine(&self, directory: &Path) -> Result<Machine> {
        let gpu = GpuDescription {
            model: SIMULATED_GPU_MODEL.to_owned(),
            count: Some(self.gpus),
            ..GpuDescription::default()
        };
        let description = MachineDescription {
            name: "bench".to_owned(),
            driver: Driver::default(),
            gpus: vec![gpu],
            topology: None,
            models: Vec::new(),
        };
        let machine = Machine::init(Self::machine_directory(directory), &description).context("a simulated machine")?;
        let state = machine.snapshot().context("a simulated machine")?;
        let mut gpus = Vec::new();
        for gpu in &state.gpus {
            let total = Mebibytes(state.model(gpu)?.memory_mib);
            gpus.push(GpuSpec { uuid: gpu.uuid.clone(), partition: self.partition(total), ..GpuSpec::default() });
        }
        let spec = GpuNodeSpec { plan_id: "bench".to_owned(), gpus };
        let text = serde_json::to_vec(&spec).context("a spec")?;
        std::fs::write(directory.join("offline/spec.json"), text).context("a spec")?;
        Ok(machine)
    }

    /// Returns the partition of a GPU with this memory.
    fn partition(&self, total: Mebibytes) -> Partition {
        let Self { resource, units, .. } = self;
        match self.sharing {
            Sharing::TimeSlicing => Partition {
                time_slicing: Some(TimeSlicedPartition {
                    resource: resource.clone(),
                    replicas: *units,
                    interval: Interval::default(),
                }),
                ..Partition::default()
            },
            Sharing::Mps => {
                let slices = MpsSlices {
                    resource: resource.clone(),
                    count: *units,
                    first: 0,
                    memory_mib: (1..=*units).map(|k| memory_limit(k, *units, total).0).collect(),
                    threads: (1..=*units)
                        .filter_map(|k| thread_percentage(k, *units, Threads::Strict))
                        .map(u8::from)
                        .collect(),
                    max_clients: None,
                };
                let mps = MpsPartition {
                    multi_user: true,
                    compute_mode: ComputeMode::ExclusiveProcess,
                    enforcement: MpsEnforcement::Hard,
                    slices: vec![slices],
                };
                Partition { mps: Some(mps), ..Partition::default() }
            }
        }
    }
}
