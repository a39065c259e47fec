//! Writes the CDI specification of this node's devices, and finds and creates their device nodes.
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cleave_gpu::nvml::{Gpu, MigInstance};
use rustix::fs::{CWD, FileType, Mode};
use serde_json::{Value, json};

use crate::args::AgentArgs;
use crate::files::write_atomically;

/// CDI kind (vendor and class) of the devices.
const CDI_KIND: &str = "cleave.dev/gpu";
/// Lowest CDI version that supports the edits of the devices.
const CDI_VERSION: &str = "0.5.0";
/// Name of the specification's file in the CDI directory.
const CDI_SPECIFICATION_FILE: &str = "cleave.dev-gpu.json";
/// Device nodes that containers get in addition to the nodes of their GPU.
const CONTROL_DEVICE_NODES: [&str; 4] =
    ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

/// Returns the fully qualified CDI name of a device.
pub fn device_name(uuid: &str) -> String {
    format!("{CDI_KIND}={uuid}")
}

/// Returns the paths of the existing device nodes, by UUID of the GPU or MIG device.
pub fn device_nodes(gpus: &[&Gpu], host_root: &Path) -> BTreeMap<String, Vec<String>> {
    let there = |path: &str| host_root.join(path.trim_start_matches('/')).exists();
    let control: Vec<String> =
        CONTROL_DEVICE_NODES.iter().filter(|path| there(path)).map(|&path| path.to_owned()).collect();
    let mut nodes = BTreeMap::new();
    for gpu in gpus {
        let own = format!("/dev/nvidia{}", gpu.minor);
        let mut of_gpu = control.clone();
        of_gpu.extend(there(&own).then_some(own));
        for instance in gpu.mig.iter().flat_map(|mig| &mig.instances).filter(|instance| !instance.uuid.is_empty()) {
            let caps = instance_capabilities(gpu, instance, host_root).map(CapabilityDevice::device_path);
            let mut of_instance = of_gpu.clone();
            of_instance.extend(caps.filter(|path| there(path)));
            nodes.insert(instance.uuid.clone(), of_instance);
        }
        nodes.insert(gpu.uuid.clone(), of_gpu);
    }
    nodes
}

/// A device of NVIDIA's kernel driver that gives access to a GPU instance or a compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CapabilityDevice {
    minor: u32,
    mode: u32,
}

impl CapabilityDevice {
    /// Parses a capability's `access` file in the driver's `/proc` directory.
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok();
        Some(Self { minor: field("DeviceFileMinor:")?, mode: field("DeviceFileMode:").unwrap_or(0o444) & 0o777 })
    }

    /// Returns the path of the capability's device node on the host.
    fn device_path(self) -> String {
        format!("/dev/nvidia-caps/nvidia-cap{}", self.minor)
    }
}

/// Returns the capability devices of a MIG instance that the driver lists: one for its GPU instance
/// and one for its compute instance.
fn instance_capabilities<'a>(
    gpu: &Gpu,
    instance: &MigInstance,
    host_root: &'a Path,
) -> impl Iterator<Item = CapabilityDevice> + use<'a> {
    let directory = format!("proc/driver/nvidia/capabilities/gpu{}/mig/gi{}", gpu.minor, instance.gpu_instance);
    let compute = instance.compute_instance.unwrap_or_default();
    let accesses = [format!("{directory}/access"), format!("{directory}/ci{compute}/access")];
    accesses.into_iter().filter_map(|file| CapabilityDevice::parse(&fs::read_to_string(host_root.join(file)).ok()?))
}

/// Creates missing device nodes of MIG instances. The driver does not create these nodes, and
/// NVIDIA's tools create the nodes only when such a tool runs.
///
/// # Errors
/// Returns an error if a node is missing and `/proc/devices` cannot be read or does not list
/// `nvidia-caps`, or if the node cannot be created.
pub fn create_capability_nodes(gpus: &[&Gpu], host_root: &Path) -> io::Result<()> {
    let instances =
        gpus.iter().flat_map(|gpu| gpu.mig.iter().flat_map(|mig| &mig.instances).map(move |one| (gpu, one)));
    for (gpu, instance) in instances.filter(|(_, instance)| !instance.uuid.is_empty()) {
        for capability in instance_capabilities(gpu, instance, host_root) {
            let path = host_root.join(capability.device_path().trim_start_matches('/'));
            if path.exists() {
                continue;
            }
            let devices = fs::read_to_string(host_root.join("proc/devices"))?;
            let Some(major) = parse_capability_major(&devices) else {
                return Err(io::Error::new(io::ErrorKind::NotFound, "the kernel lists no nvidia-caps devices"));
            };
            if let Some(directory) = path.parent() {
                fs::create_dir_all(directory)?;
            }
            let device = rustix::fs::makedev(major, capability.minor);
            let mode = Mode::from_raw_mode(capability.mode);
            match rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, mode, device) {
                Ok(()) => rustix::fs::chmod(&path, mode)?,
                // One of NVIDIA's tools may have created the node in the meantime.
                Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Returns the major number of `nvidia-caps` in `/proc/devices`.
fn parse_capability_major(devices: &str) -> Option<u32> {
    let numbers = devices.lines().filter_map(|line| line.trim().split_once(' '));
    numbers.filter(|(_, name)| *name == "nvidia-caps").find_map(|(number, _)| number.parse().ok())
}

/// Returns whether the specification in `directory` lists all of `devices`.
pub fn specification_lists_devices(directory: &Path, devices: &[String]) -> bool {
    let Ok(text) = fs::read(directory.join(CDI_SPECIFICATION_FILE)) else { return false };
    let spec: Value = serde_json::from_slice(&text).unwrap_or_default();
    let named: Vec<&str> =
        spec["devices"].as_array().into_iter().flatten().filter_map(|device| device["name"].as_str()).collect();
    devices.iter().all(|device| named.contains(&device.as_str()))
}

/// Container edits that give containers the driver's files. The edits apply to all devices of a
/// specification.
#[derive(Debug, Clone, PartialEq)]
pub struct DriverEdits {
    /// The lowest CDI version that supports all of these edits.
    pub cdi_version: String,
    /// The object `containerEdits` of the specification.
    pub edits: Value,
}

impl DriverEdits {
    /// Returns edits that mount the host's driver directory read-only.
    pub fn from_directory(host: &Path, container: &Path) -> Self {
        let mount =
            json!({ "hostPath": host, "containerPath": container, "options": ["ro", "nosuid", "nodev", "rbind"] });
        Self { cdi_version: CDI_VERSION.to_owned(), edits: json!({ "mounts": [mount] }) }
    }
}

/// Parses a version such as `0.5.0` for comparison.
fn parse_version(version: &str) -> Option<Vec<u32>> {
    version.split('.').map(|part| part.parse().ok()).collect()
}

/// Builds the CDI specification.
pub fn cdi_specification(device_nodes: &BTreeMap<String, Vec<String>>, driver: &DriverEdits) -> Value {
    let devices: Vec<Value> = device_nodes
        .iter()
        .map(|(uuid, paths)| {
            let paths: Vec<Value> = paths.iter().map(|path| json!({ "path": path })).collect();
            // A device without edits is invalid. The value "void" prevents NVIDIA's runtime hook
            // from adding devices.
            let mut edits = json!({ "env": ["NVIDIA_VISIBLE_DEVICES=void"] });
            if !paths.is_empty() {
                edits["deviceNodes"] = Value::Array(paths);
            }
            json!({ "name": uuid, "containerEdits": edits })
        })
        .collect();
    let versions = [CDI_VERSION, driver.cdi_version.as_str()];
    let version = versions.into_iter().max_by_key(|version| parse_version(version)).unwrap_or(CDI_VERSION);
    json!({ "cdiVersion": version, "kind": CDI_KIND, "devices": devices, "containerEdits": driver.edits })
}

/// Writes the specification of the devices, unless the file is up to date. `device_nodes` contains
/// the paths of the device nodes, by UUID of the GPU or MIG device.
///
/// # Errors
/// Returns an error if the directory or the file cannot be written.
pub fn write_cdi_specification(
    args: &AgentArgs,
    device_nodes: &BTreeMap<String, Vec<String>>,
    driver: &DriverEdits,
) -> io::Result<()> {
    let text = cdi_specification(device_nodes, driver).to_string();
    let path: PathBuf = args.cdi_dir.join(CDI_SPECIFICATION_FILE);
    if fs::read_to_string(&path).is_ok_and(|before| before == text) {
        return Ok(());
    }
    fs::create_dir_all(&args.cdi_dir)?;
    write_atomically(&path, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

    use cleave_gpu::nvml::MigState;

    use super::*;
    use crate::gpu::layout::tests::gpu;

    fn directory_edits() -> DriverEdits {
        DriverEdits::from_directory(Path::new("/opt/nvidia"), Path::new("/usr/local/nvidia"))
    }

    #[test]
    fn the_specification_has_the_higher_of_both_cdi_versions() {
        let nodes = BTreeMap::from([("GPU-0".to_owned(), Vec::new())]);
        for (version, expected) in [("0.3.0", "0.5.0"), ("0.10.0", "0.10.0"), ("", "0.5.0")] {
            let edits = DriverEdits { cdi_version: version.into(), edits: json!({}) };
            assert_eq!(cdi_specification(&nodes, &edits)["cdiVersion"], expected);
        }
    }

    #[test]
    fn devices_list_only_existing_device_nodes() {
        let host = tempfile::tempdir().unwrap();
        let touch = |path: &str, text: &str| {
            let path = host.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for node in ["dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia1", "dev/nvidia-caps/nvidia-cap12"] {
            touch(node, "");
        }
        touch("proc/driver/nvidia/capabilities/gpu1/mig/gi3/access", "DeviceFileMinor: 12\nDeviceFileMode: 292\n");
        touch("proc/driver/nvidia/capabilities/gpu1/mig/gi3/ci0/access", "DeviceFileMinor: 13\n");
        let instance = MigInstance {
            uuid: "MIG-a".into(),
            profile: "1g.10gb".into(),
            start: 0,
            gpu_instance: 3,
            compute_instance: Some(0),
        };
        let mig = MigState { enabled: true, instances: vec![instance], ..MigState::default() };
        let (whole, with_mig) = (gpu("GPU-0", 0), Gpu { mig: Some(mig), ..gpu("GPU-1", 1) });
        let nodes = device_nodes(&[&whole, &with_mig], host.path());
        assert_eq!(nodes["GPU-0"], ["/dev/nvidiactl", "/dev/nvidia-uvm"], "the GPU's own device node does not exist");
        assert_eq!(nodes["GPU-1"], ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"]);
        assert_eq!(
            nodes["MIG-a"],
            ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap12"]
        );
        assert!(create_capability_nodes(&[&whole, &with_mig], host.path()).is_err(), "the major number is unknown");
        touch(
            "proc/devices",
            "Character devices:\n195 nvidia\n236 nvidia-caps-imex-channels\n237 nvidia-caps\n\nBlock devices:\n",
        );
        if !rustix::process::geteuid().is_root() {
            return;
        }
        create_capability_nodes(&[&whole, &with_mig], host.path()).unwrap();
        let made = fs::metadata(host.path().join("dev/nvidia-caps/nvidia-cap13")).unwrap();
        assert!(made.file_type().is_char_device());
        assert_eq!((made.rdev(), made.permissions().mode() & 0o777), (rustix::fs::makedev(237, 13), 0o444));
        assert_eq!(device_nodes(&[&with_mig], host.path())["MIG-a"].len(), 5);
        create_capability_nodes(&[&with_mig], host.path()).unwrap();
    }

    #[test]
    fn a_specification_lists_exactly_its_devices() {
        let directory = tempfile::tempdir().unwrap();
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert!(!specification_lists_devices(directory.path(), &names(&["MIG-a"])), "there is no specification");
        let nodes = BTreeMap::from([("MIG-a".to_owned(), Vec::new())]);
        fs::write(
            directory.path().join(CDI_SPECIFICATION_FILE),
            cdi_specification(&nodes, &directory_edits()).to_string(),
        )
        .unwrap();
        assert!(specification_lists_devices(directory.path(), &names(&["MIG-a"])));
        assert!(!specification_lists_devices(directory.path(), &names(&["MIG-a", "MIG-b"])));
    }

    #[test]
    fn a_device_without_nodes_still_has_an_edit() {
        let nodes = BTreeMap::from([("GPU-0".to_owned(), Vec::new())]);
        let spec = cdi_specification(&nodes, &directory_edits());
        assert_eq!(spec["devices"][0]["containerEdits"], json!({ "env": ["NVIDIA_VISIBLE_DEVICES=void"] }));
        assert_eq!(spec["containerEdits"]["mounts"][0]["hostPath"], "/opt/nvidia");
    }
}
