//! The CDI specification of this node's devices, and the device nodes that it is made of.
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cleave_gpu::nvml::Gpu;
use serde_json::{Value, json};

use crate::args::AgentArgs;
use crate::files::write_atomically;

/// Vendor and class of the devices.
const KIND: &str = "cleave.dev/gpu";
/// The file in the CDI directory.
const FILE: &str = "cleave.dev-gpu.json";
/// Nodes that every CUDA program opens, beside its GPU's own.
const CONTROL_NODES: [&str; 4] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

/// A device's fully qualified name.
pub fn name(uuid: &str) -> String {
    format!("{KIND}={uuid}")
}

/// Device nodes by the UUID of the GPU or MIG device, as far as the host has them.
pub fn device_nodes(gpus: &[&Gpu], host_root: &Path) -> BTreeMap<String, Vec<String>> {
    let there = |path: &str| host_root.join(path.trim_start_matches('/')).exists();
    let control: Vec<String> = CONTROL_NODES.iter().filter(|path| there(path)).map(|&path| path.to_owned()).collect();
    let mut nodes = BTreeMap::new();
    for gpu in gpus {
        let own = format!("/dev/nvidia{}", gpu.minor);
        let mut of_gpu = control.clone();
        of_gpu.extend(there(&own).then_some(own));
        for instance in gpu.mig.iter().flat_map(|mig| &mig.instances).filter(|instance| !instance.uuid.is_empty()) {
            let folder = format!("proc/driver/nvidia/capabilities/gpu{}/mig/gi{}", gpu.minor, instance.gpu_instance);
            let compute = instance.compute_instance.unwrap_or_default();
            let accesses = [format!("{folder}/access"), format!("{folder}/ci{compute}/access")];
            let caps = accesses.iter().filter_map(|file| fs::read_to_string(host_root.join(file)).ok());
            let caps = caps
                .filter_map(|text| capability_minor(&text))
                .map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}"));
            let mut of_instance = of_gpu.clone();
            of_instance.extend(caps.filter(|path| there(path)));
            nodes.insert(instance.uuid.clone(), of_instance);
        }
        nodes.insert(gpu.uuid.clone(), of_gpu);
    }
    nodes
}

/// The minor number in a capability's `access` file.
fn capability_minor(text: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:"))?.trim().parse().ok()
}

/// The specification.
pub fn specification(nodes: &BTreeMap<String, Vec<String>>, driver: Option<(&Path, &Path)>) -> Value {
    let devices: Vec<Value> = nodes
        .iter()
        .map(|(uuid, paths)| {
            let paths: Vec<Value> = paths.iter().map(|path| json!({ "path": path })).collect();
            // A device without any edit is invalid, and a runtime hook of NVIDIA's must add nothing of its own.
            let mut edits = json!({ "env": ["NVIDIA_VISIBLE_DEVICES=void"] });
            if !paths.is_empty() {
                edits["deviceNodes"] = Value::Array(paths);
            }
            json!({ "name": uuid, "containerEdits": edits })
        })
        .collect();
    let mut spec = json!({ "cdiVersion": "0.5.0", "kind": KIND, "devices": devices });
    if let Some((host, container)) = driver {
        let mount =
            json!({ "hostPath": host, "containerPath": container, "options": ["ro", "nosuid", "nodev", "rbind"] });
        spec["containerEdits"] = json!({ "mounts": [mount] });
    }
    spec
}

/// Writes the specification of these devices, unless it is there.
pub fn write(args: &AgentArgs, nodes: &BTreeMap<String, Vec<String>>) -> io::Result<()> {
    let driver = args.driver_root.as_deref().map(|host| (host, args.container_driver_root.as_path()));
    let text = specification(nodes, driver).to_string();
    let path: PathBuf = args.cdi_dir.join(FILE);
    if fs::read_to_string(&path).is_ok_and(|before| before == text) {
        return Ok(());
    }
    fs::create_dir_all(&args.cdi_dir)?;
    write_atomically(&path, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use cleave_gpu::nvml::{Mig, MigInstance};

    use super::*;
    use crate::layout::tests::gpu;

    #[test]
    fn devices_are_the_nodes_that_the_host_has() {
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
        let mig = Mig { enabled: true, instances: vec![instance], ..Mig::default() };
        let (whole, cut) = (gpu("GPU-0", 0), Gpu { mig: Some(mig), ..gpu("GPU-1", 1) });
        let nodes = device_nodes(&[&whole, &cut], host.path());
        assert_eq!(nodes["GPU-0"], ["/dev/nvidiactl", "/dev/nvidia-uvm"], "its own node is not there");
        assert_eq!(nodes["GPU-1"], ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"]);
        assert_eq!(
            nodes["MIG-a"],
            ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap12"]
        );
    }

    #[test]
    fn a_device_without_nodes_still_has_an_edit() {
        let nodes = BTreeMap::from([("GPU-0".to_owned(), Vec::new())]);
        let spec = specification(&nodes, Some((Path::new("/opt/nvidia"), Path::new("/usr/local/nvidia"))));
        assert_eq!(spec["devices"][0]["containerEdits"], json!({ "env": ["NVIDIA_VISIBLE_DEVICES=void"] }));
        assert_eq!(spec["containerEdits"]["mounts"][0]["hostPath"], "/opt/nvidia");
    }
}
