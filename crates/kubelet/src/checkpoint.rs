//! The checkpoint of the kubelet's device manager: the devices that a restarted kubelet considers
//! allocated.
//!
//! When the kubelet lists or allocates devices, it first drops the devices of deleted pods from
//! memory. The kubelet does not write the checkpoint file then. It writes the file after an
//! allocation, and for each device list that a plugin sends. A restarted kubelet reads the
//! checkpoint, and admits pods before it drops any device. Therefore the restarted kubelet does not
//! allocate a device that the checkpoint lists as allocated, even if the pod no longer exists. The
//! file format is that of `pkg/kubelet/cm/devicemanager/checkpoint`, which is not a public
//! interface.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

/// Name of the checkpoint file in the device plugin directory.
const CHECKPOINT_FILE: &str = "kubelet_internal_checkpoint";

/// Maximum size of the checkpoint in bytes. The checkpoint has an entry for each container and
/// resource.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Pairs of an extended resource name and a device id.
pub type AllocatedDevices = BTreeSet<(String, String)>;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointFile {
    data: CheckpointData,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointData {
    /// Devices that the kubelet has allocated. `None` if there are none: Go writes a nil slice as
    /// null.
    pod_device_entries: Option<Vec<DeviceEntry>>,
}

#[derive(Deserialize)]
struct DeviceEntry {
    #[serde(rename = "ResourceName")]
    resource: String,
    /// Device ids by NUMA node.
    #[serde(rename = "DeviceIDs")]
    ids: BTreeMap<String, Vec<String>>,
}

/// Parses the content of a checkpoint, and returns the allocated devices.
///
/// # Errors
/// Returns an error if the content is not a checkpoint. The error contains the position but not the
/// content, which can be long.
pub fn parse_allocated_devices(text: &[u8]) -> io::Result<AllocatedDevices> {
    let wrong = |error: serde_json::Error| {
        let (line, column) = (error.line(), error.column());
        let what = format!(
            "the file is not a kubelet checkpoint: {:?} error at line {line}, column {column}",
            error.classify()
        );
        io::Error::new(io::ErrorKind::InvalidData, what)
    };
    let file: CheckpointFile = serde_json::from_slice(text).map_err(wrong)?;
    let entries = file.data.pod_device_entries.unwrap_or_default();
    let of = |entry: DeviceEntry| {
        let DeviceEntry { resource, ids } = entry;
        ids.into_values().flatten().map(move |id| (resource.clone(), id))
    };
    Ok(entries.into_iter().flat_map(of).collect())
}

/// Identity of the checkpoint file: device, inode, modification time in seconds and nanoseconds,
/// and size. The identity changes with each write, because the kubelet writes a new file and
/// renames it.
type FileId = (u64, u64, i64, i64, u64);

/// Reader of the checkpoint in a device plugin directory.
#[derive(Debug)]
pub struct KubeletCheckpoint {
    path: PathBuf,
    read: Option<FileId>,
    devices: Option<Arc<AllocatedDevices>>,
}

impl KubeletCheckpoint {
    /// Creates a reader for this directory. It is not an error if the file does not exist.
    pub fn in_directory(directory: &Path) -> Self {
        Self { path: directory.join(CHECKPOINT_FILE), read: None, devices: None }
    }

    /// Returns the devices that a kubelet would consider allocated if it restarted now. Returns
    /// `None` if the file does not exist. Reads the file only if it has changed.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, has more than 16 MiB, or is not a checkpoint.
    /// After an error in a file whose metadata could be read, later calls return `None` until the
    /// file changes.
    pub async fn devices(&mut self) -> io::Result<Option<Arc<AllocatedDevices>>> {
        let found = match tokio::fs::metadata(&self.path).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            found => Some(found?),
        };
        let id = found.as_ref().map(|found| (found.dev(), found.ino(), found.mtime(), found.mtime_nsec(), found.len()));
        if id == self.read {
            return Ok(self.devices.clone());
        }
        (self.read, self.devices) = (id, None);
        let Some(found) = found else { return Ok(None) };
        if found.len() > MAX_FILE_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("{} bytes", found.len())));
        }
        self.devices = Some(Arc::new(parse_allocated_devices(&tokio::fs::read(&self.path).await?)?));
        Ok(self.devices.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkpoint in the format of kubelet 1.36.
    const SAMPLE_CHECKPOINT: &str = r#"{"Data":{"PodDeviceEntries":[
        {"PodUID":"2f9a","ContainerName":"main","ResourceName":"nvidia.com/gpu-mps","DeviceIDs":{"-1":["GPU-a::1"],"0":["GPU-a::0"]},"AllocResp":"CgA="},
        {"PodUID":"77c1","ContainerName":"main","ResourceName":"example.com/nic","DeviceIDs":{"0":["eth1"]},"AllocResp":"CgA="}],
        "RegisteredDevices":{"nvidia.com/gpu-mps":["GPU-a::0","GPU-a::1","GPU-a::2"]}},"Checksum":2049411213}"#;

    fn allocated_devices(all: &[(&str, &str)]) -> AllocatedDevices {
        all.iter().map(|(resource, id)| ((*resource).to_owned(), (*id).to_owned())).collect()
    }

    #[test]
    fn the_checkpoint_has_the_devices_of_all_containers_and_numa_nodes() {
        let expected = allocated_devices(&[
            ("nvidia.com/gpu-mps", "GPU-a::0"),
            ("nvidia.com/gpu-mps", "GPU-a::1"),
            ("example.com/nic", "eth1"),
        ]);
        assert_eq!(parse_allocated_devices(SAMPLE_CHECKPOINT.as_bytes()).unwrap(), expected);
        let empty = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
        assert_eq!(parse_allocated_devices(empty.as_bytes()).unwrap(), allocated_devices(&[]));
        for wrong in ["", "[]", "{}", r#"{"Data":{"PodDeviceEntries":[{"DeviceIDs":7}]}}"#] {
            assert!(parse_allocated_devices(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn a_new_file_is_read_and_an_invalid_one_is_reported_once() {
        let directory = tempfile::tempdir().unwrap();
        let mut checkpoint = KubeletCheckpoint::in_directory(directory.path());
        assert_eq!(checkpoint.devices().await.unwrap(), None, "there is none");
        let write = |text: &str| {
            std::fs::write(directory.path().join("new"), text).unwrap();
            std::fs::rename(directory.path().join("new"), directory.path().join(CHECKPOINT_FILE)).unwrap();
        };
        write(SAMPLE_CHECKPOINT);
        let first = checkpoint.devices().await.unwrap().unwrap();
        assert_eq!(first.len(), 3);
        assert!(Arc::ptr_eq(&first, &checkpoint.devices().await.unwrap().unwrap()), "not read again");
        write("{");
        assert!(checkpoint.devices().await.is_err());
        assert_eq!(checkpoint.devices().await.unwrap(), None);
        write(SAMPLE_CHECKPOINT);
        assert_eq!(checkpoint.devices().await.unwrap(), Some(first));
    }
}
