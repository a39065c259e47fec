//! The checkpoint of the kubelet's device manager: what a kubelet that starts takes for allocated.
//!
//! It drops devices of pods that are no more from memory when it lists them or is about to
//! allocate; the file is written only when it has allocated, and for each list of devices that a
//! plugin sends. A kubelet that starts reads it, and admits the pods that it is told of first
//! before it drops anything: a device that only the file has is refused to them. The layout is that
//! of `pkg/kubelet/cm/devicemanager/checkpoint`, which is no public interface.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

/// Its name in the device plugin directory.
const FILE: &str = "kubelet_internal_checkpoint";

/// Longest file: some hundred bytes for each container with devices.
const MAX_FILE: u64 = 16 << 20;

/// Devices, by extended resource and id.
pub type AllocatedDevices = BTreeSet<(String, String)>;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// Go writes an empty list as null.
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "ResourceName")]
    resource: String,
    /// By NUMA node.
    #[serde(rename = "DeviceIDs")]
    ids: BTreeMap<String, Vec<String>>,
}

/// The devices of a checkpoint.
///
/// # Errors
/// It is none. Says where, and repeats nothing of it: it may be long.
pub fn allocated(text: &[u8]) -> io::Result<AllocatedDevices> {
    let wrong = |error: serde_json::Error| {
        let (line, column) = (error.line(), error.column());
        let what = format!("no checkpoint of a kubelet: {:?} error at line {line}, column {column}", error.classify());
        io::Error::new(io::ErrorKind::InvalidData, what)
    };
    let file: File = serde_json::from_slice(text).map_err(wrong)?;
    let entries = file.data.pod_device_entries.unwrap_or_default();
    let of = |entry: Entry| {
        let Entry { resource, ids } = entry;
        ids.into_values().flatten().map(move |id| (resource.clone(), id))
    };
    Ok(entries.into_iter().flat_map(of).collect())
}

/// Device, inode, time and size: the kubelet writes another file and renames it.
type FileId = (u64, u64, i64, i64, u64);

/// The checkpoint of the kubelet whose device plugin directory this is.
#[derive(Debug)]
pub struct KubeletCheckpoint {
    path: PathBuf,
    read: Option<FileId>,
    devices: Option<Arc<AllocatedDevices>>,
}

impl KubeletCheckpoint {
    /// In that directory; it need not be there.
    pub fn of(directory: &Path) -> Self {
        Self { path: directory.join(FILE), read: None, devices: None }
    }

    /// What a kubelet that started now would take for allocated; nothing where there is no such
    /// file. It is read only where it is another than last time.
    ///
    /// # Errors
    /// The file cannot be read, or is no checkpoint. Said once of a file: after that, none is
    /// known.
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
        if found.len() > MAX_FILE {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("{} bytes", found.len())));
        }
        self.devices = Some(Arc::new(allocated(&tokio::fs::read(&self.path).await?)?));
        Ok(self.devices.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a kubelet 1.36 writes it.
    const WRITTEN: &str = r#"{"Data":{"PodDeviceEntries":[
        {"PodUID":"2f9a","ContainerName":"main","ResourceName":"nvidia.com/gpu-mps","DeviceIDs":{"-1":["GPU-a::1"],"0":["GPU-a::0"]},"AllocResp":"CgA="},
        {"PodUID":"77c1","ContainerName":"main","ResourceName":"example.com/nic","DeviceIDs":{"0":["eth1"]},"AllocResp":"CgA="}],
        "RegisteredDevices":{"nvidia.com/gpu-mps":["GPU-a::0","GPU-a::1","GPU-a::2"]}},"Checksum":2049411213}"#;

    fn devices(all: &[(&str, &str)]) -> AllocatedDevices {
        all.iter().map(|(resource, id)| ((*resource).to_owned(), (*id).to_owned())).collect()
    }

    #[test]
    fn it_has_the_devices_of_all_containers_whatever_their_node() {
        let expected = devices(&[
            ("nvidia.com/gpu-mps", "GPU-a::0"),
            ("nvidia.com/gpu-mps", "GPU-a::1"),
            ("example.com/nic", "eth1"),
        ]);
        assert_eq!(allocated(WRITTEN.as_bytes()).unwrap(), expected);
        let empty = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
        assert_eq!(allocated(empty.as_bytes()).unwrap(), devices(&[]));
        for wrong in ["", "[]", "{}", r#"{"Data":{"PodDeviceEntries":[{"DeviceIDs":7}]}}"#] {
            assert!(allocated(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn a_file_that_came_or_changed_is_read_anew_and_a_wrong_one_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut checkpoint = KubeletCheckpoint::of(folder.path());
        assert_eq!(checkpoint.devices().await.unwrap(), None, "there is none");
        let write = |text: &str| {
            std::fs::write(folder.path().join("new"), text).unwrap();
            std::fs::rename(folder.path().join("new"), folder.path().join(FILE)).unwrap();
        };
        write(WRITTEN);
        let first = checkpoint.devices().await.unwrap().unwrap();
        assert_eq!(first.len(), 3);
        assert!(Arc::ptr_eq(&first, &checkpoint.devices().await.unwrap().unwrap()), "not read again");
        write("{");
        assert!(checkpoint.devices().await.is_err());
        assert_eq!(checkpoint.devices().await.unwrap(), None);
        write(WRITTEN);
        assert_eq!(checkpoint.devices().await.unwrap(), Some(first));
    }
}
