//! Determines the changes to a container for its allocation: environment variables, mounts and
//! devices. Pure.
//!
//! The changes correspond to the container edits of a CDI specification
//! (<https://github.com/cncf-tags/container-device-interface>). Each front end translates the
//! changes into its own API.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::allocation::Allocation;
use crate::args::{AgentArgs, DeviceListStrategy, EnvArg, MountArg};
use crate::cdi;

/// Path of the allocation's directory inside the container.
pub const CONTAINER_PIPE_DIRECTORY: &str = "/run/cleave-mps";

/// A host path that is mounted into a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Path on the host.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Whether the mount is read-only.
    pub read_only: bool,
}

/// Changes to a container for its allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerEdits {
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// Host directories and files to mount.
    pub mounts: Vec<Mount>,
    /// Paths of device nodes, which are the same on the host and in the container. The container
    /// may read and write the devices.
    pub device_nodes: Vec<String>,
    /// Fully qualified names of CDI devices.
    pub cdi_devices: Vec<String>,
}

/// Settings from the command line that control how containers access devices.
#[derive(Debug, Clone)]
pub struct ContainerSettings {
    strategy: DeviceListStrategy,
    alloc_dir: String,
    mounts: Vec<Mount>,
    envs: Vec<EnvArg>,
    cdi_dir: PathBuf,
}

impl ContainerSettings {
    /// Reads the settings from the command line.
    pub fn new(args: &AgentArgs) -> Self {
        let mount = |MountArg { host, container, read_only }: &MountArg| Mount {
            container_path: container.clone(),
            host_path: host.clone(),
            read_only: *read_only,
        };
        let mut mounts: Vec<Mount> = args.container_mounts.iter().map(mount).collect();
        if let (DeviceListStrategy::DeviceNodes, Some(driver)) = (args.device_list_strategy, &args.driver_root) {
            mounts.push(Mount {
                container_path: args.container_driver_root.display().to_string(),
                host_path: driver.display().to_string(),
                read_only: true,
            });
        }
        Self {
            strategy: args.device_list_strategy,
            alloc_dir: args.run_dir.join("alloc").display().to_string(),
            mounts,
            envs: args.container_envs.clone(),
            cdi_dir: args.cdi_dir.clone(),
        }
    }

    /// Returns the directory of the CDI specification. A container can start only after the
    /// specification lists the devices of its allocation. Returns `None` for strategies without
    /// CDI.
    pub fn cdi_directory(&self) -> Option<&Path> {
        (self.strategy == DeviceListStrategy::Cdi).then_some(self.cdi_dir.as_path())
    }

    /// Returns the edits for a container with this allocation. `nodes` contains the paths of device
    /// nodes, by UUID of the device.
    pub fn edits(&self, allocation: &Allocation, nodes: &BTreeMap<String, Vec<String>>) -> ContainerEdits {
        let mut edits = ContainerEdits { mounts: self.mounts.clone(), ..ContainerEdits::default() };
        let visible = match self.strategy {
            DeviceListStrategy::Envvar => allocation.devices.join(","),
            // NVIDIA's images request all GPUs by default. If NVIDIA's runtime starts the
            // container, "void" prevents the runtime from adding all GPUs.
            DeviceListStrategy::Cdi | DeviceListStrategy::DeviceNodes => "void".to_owned(),
        };
        edits.env.insert("NVIDIA_VISIBLE_DEVICES".into(), visible);
        match self.strategy {
            DeviceListStrategy::Envvar => {}
            DeviceListStrategy::Cdi => {
                edits.cdi_devices = allocation.devices.iter().map(|uuid| cdi::device_name(uuid)).collect();
            }
            DeviceListStrategy::DeviceNodes => {
                let paths: BTreeSet<&String> =
                    allocation.devices.iter().filter_map(|uuid| nodes.get(uuid)).flatten().collect();
                edits.device_nodes = paths.into_iter().cloned().collect();
            }
        }
        for EnvArg { name, value } in &self.envs {
            edits.env.insert(name.clone(), value.clone());
        }
        if let Some(limits) = &allocation.mps {
            edits.env.insert("CUDA_MPS_PIPE_DIRECTORY".into(), CONTAINER_PIPE_DIRECTORY.into());
            if let Some(threads) = limits.threads {
                edits.env.insert("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".into(), threads.to_string());
            }
            if let Some(memory) = limits.memory_mib {
                // Write whole MiB, because the driver cannot create a context if the limit has a
                // fraction. The driver ignores a limit that it cannot parse. Device 0 is the only
                // visible device.
                edits.env.insert("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT".into(), format!("0={memory}M"));
            }
            edits.mounts.push(Mount {
                container_path: CONTAINER_PIPE_DIRECTORY.into(),
                host_path: format!("{}/{}", self.alloc_dir, allocation.id()),
                read_only: true,
            });
        }
        edits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocation::MpsLimits;
    use crate::args::tests::parse_args;

    const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";

    fn settings(strategy: &str, extra: &[&str]) -> ContainerSettings {
        let base = ["--run-dir", "/r", "--device-list-strategy", strategy];
        ContainerSettings::new(&parse_args(&[&base, extra].concat()).unwrap())
    }

    fn allocation(ids: &[&str], mps: Option<MpsLimits>) -> Allocation {
        let ids = ids.iter().map(|&id| id.to_owned()).collect();
        Allocation { resource: MPS_RESOURCE.into(), ids, devices: vec!["GPU-0".into()], mps }
    }

    #[test]
    fn a_container_with_shares_gets_its_limits_its_directory_and_its_gpu() {
        let limits = MpsLimits { threads: Some(20), memory_mib: Some(2000), max_clients: None };
        let granted = allocation(&["GPU-0::2", "GPU-0::5"], Some(limits));
        let edits = settings("envvar", &["--container-mount", "/s:/t", "--container-env", "A=b"])
            .edits(&granted, &BTreeMap::new());
        let env = |name: &str| edits.env.get(name).map(String::as_str);
        assert_eq!(env("NVIDIA_VISIBLE_DEVICES"), Some("GPU-0"));
        assert_eq!(env("CUDA_MPS_PIPE_DIRECTORY"), Some("/run/cleave-mps"));
        assert_eq!(env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), Some("20"));
        assert_eq!(env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), Some("0=2000M"));
        assert_eq!(env("A"), Some("b"));
        let mount = |host_path: &str, container_path: &str, read_only| Mount {
            container_path: container_path.into(),
            host_path: host_path.into(),
            read_only,
        };
        let directory = format!("/r/alloc/{}", granted.id());
        assert_eq!(edits.mounts, [mount("/s", "/t", false), mount(&directory, "/run/cleave-mps", true)]);
        assert!(edits.device_nodes.is_empty() && edits.cdi_devices.is_empty());
    }

    #[test]
    fn a_container_with_a_whole_gpu_gets_the_device_and_no_mps_settings() {
        let granted = allocation(&["GPU-0::0"], None);
        let nodes =
            BTreeMap::from([("GPU-0".to_owned(), vec!["/dev/nvidia3".to_owned(), "/dev/nvidiactl".to_owned()])]);
        let cdi = settings("cdi", &[]).edits(&granted, &nodes);
        assert_eq!(cdi.cdi_devices, ["cleave.dev/gpu=GPU-0"]);
        assert_eq!(cdi.env, BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_owned(), "void".to_owned())]));
        assert!(cdi.mounts.is_empty() && cdi.device_nodes.is_empty());
        let plain = settings("device-nodes", &["--driver-root", "/opt/nvidia"]).edits(&granted, &nodes);
        assert_eq!(plain.device_nodes, ["/dev/nvidia3", "/dev/nvidiactl"]);
        assert_eq!(plain.mounts[0].container_path, "/usr/local/nvidia");
        assert!(plain.mounts[0].read_only);
    }
}
