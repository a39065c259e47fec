//! The checkpoint contains the state that the agent needs before the API server and NVML answer.
//! The checkpoint is a versioned file on the host's disk. The agent replaces the file atomically.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cleave_api::GpuNodeSpec;
use cleave_gpu::mps::wire::{self, Desired};
use cleave_gpu::nvml::Gpu;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::allocation::Allocation;
use crate::files::write_json_atomically;
use crate::gpu::health::HealthRecord;
use crate::gpu::layout::{Layout, Pool};

/// The only format version that this agent writes and reads.
const FORMAT_VERSION: u32 = 1;
/// Name of the checkpoint file in the state directory.
const CHECKPOINT_FILE: &str = "agent.json";

/// State of the agent at the time of writing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    /// Boot id of the node at the time of writing.
    pub boot_id: String,
    /// Generation of the spec.
    pub generation: i64,
    /// The last valid spec.
    pub spec: Option<GpuNodeSpec>,
    /// The known GPUs, as NVML last described them.
    pub gpus: Vec<Gpu>,
    /// Layouts by UUID of the GPU. A layout may differ from the spec while a change waits for pods
    /// to end.
    pub layouts: BTreeMap<String, Layout>,
    /// Allocations that have not ended.
    #[serde(with = "arc_list")]
    pub allocations: Vec<Arc<Allocation>>,
    /// UUIDs of the GPUs that a spec has partitioned by MIG. The agent removes a GPU's partition
    /// when the spec no longer lists the GPU.
    #[serde(default, rename = "cut")]
    pub mig_partitioned: BTreeSet<String>,
    /// For GPUs whose MIG mode is being turned on: the layout before the change, by UUID of the
    /// GPU.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub replaced: BTreeMap<String, Layout>,
    /// Faults of GPUs that were recorded since the node's last boot, by UUID of the GPU.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub health: BTreeMap<String, HealthRecord>,
}

/// Serializes and deserializes a list of `Arc` values as a plain list of the values.
mod arc_list {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<T: Serialize, S: Serializer>(values: &[Arc<T>], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(values.iter().map(Arc::as_ref))
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<Arc<T>>, D::Error> {
        Ok(Vec::<T>::deserialize(from)?.into_iter().map(Arc::new).collect())
    }
}

/// The content of the checkpoint file: the checkpoint and its format version.
#[derive(Serialize)]
struct VersionedCheckpoint<'a> {
    version: u32,
    #[serde(flatten)]
    checkpoint: &'a Checkpoint,
}

/// Why the agent cannot use a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file could not be read.
    #[error("failed to read the checkpoint {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        source: io::Error,
    },
    /// The content of the file cannot be used.
    #[error("the checkpoint {path} is not usable: {source}")]
    Unusable {
        /// Path of the file.
        path: PathBuf,
        /// Why the content cannot be used.
        source: DecodeError,
    },
}

/// Why the agent cannot use the content of a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The content is not a JSON checkpoint.
    #[error("the file is damaged")]
    Damaged(#[source] serde_json::Error),
    /// The file has another format version. Another version of the agent wrote it.
    #[error("the file has version {0}; this agent reads version {FORMAT_VERSION}")]
    Version(u32),
    /// A value is impossible. The text is the reason.
    #[error("the file is damaged: {0}")]
    Invalid(String),
}

impl Checkpoint {
    /// Parses the output of [`Checkpoint::encode`].
    ///
    /// # Errors
    /// Returns [`DecodeError`] if `bytes` is not a checkpoint in this agent's format version.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        #[derive(Deserialize)]
        struct VersionField {
            version: u32,
        }
        // Check the version first: the format of other versions is unknown.
        let VersionField { version } = serde_json::from_slice(bytes).map_err(DecodeError::Damaged)?;
        if version != FORMAT_VERSION {
            return Err(DecodeError::Version(version));
        }
        let checkpoint: Self = serde_json::from_slice(bytes).map_err(DecodeError::Damaged)?;
        checkpoint.check_values().map_err(DecodeError::Invalid)?;
        Ok(checkpoint)
    }

    /// Checks the values that the agent does not check later. Numbers and names must follow the
    /// rules of [`crate::gpu::layout`].
    fn check_values(&self) -> Result<(), String> {
        let mut desired = Desired { version: wire::FILE_FORMAT_VERSION, ..Desired::default() };
        let instances = self.gpus.iter().filter_map(|gpu| gpu.mig.as_ref()).flat_map(|mig| &mig.instances);
        let mut known = BTreeSet::new();
        let mut devices = self.gpus.iter().map(|gpu| &gpu.uuid).chain(instances.map(|instance| &instance.uuid));
        if let Some(twice) = devices.find(|uuid| !uuid.is_empty() && !known.insert(*uuid)) {
            return Err(format!("device {twice:.80} is listed twice"));
        }
        let mut pools: Vec<&Pool> = self.layouts.values().flat_map(|layout| &layout.pools).collect();
        pools.sort_by_key(|pool| (&pool.resource, &pool.device, pool.first));
        for (uuid, layout) in &self.layouts {
            layout.check().map_err(|wrong| format!("GPU {uuid:.80}: {wrong}"))?;
            desired.daemons.extend(layout.daemons.clone());
        }
        let overlap = |one: &Pool, next: &Pool| {
            (&one.resource, &one.device) == (&next.resource, &next.device) && one.contains(&next.device, next.first)
        };
        if let Some((twice, _)) = pools.iter().zip(pools.iter().skip(1)).find(|(one, next)| overlap(one, next)) {
            return Err(format!("{:.80}: slices of {:.80} are listed twice", twice.resource, twice.device));
        }
        desired.allocations.extend(self.allocations.iter().filter_map(|allocation| allocation.door()));
        desired.check().map_err(|wrong| wrong.to_string())
    }

    /// Serializes the checkpoint with this agent's format version.
    pub fn encode(&self) -> Vec<u8> {
        // Serialization cannot fail: all map keys are strings, and there are no floats.
        serde_json::to_vec(&self.versioned()).unwrap_or_default()
    }

    fn versioned(&self) -> VersionedCheckpoint<'_> {
        VersionedCheckpoint { version: FORMAT_VERSION, checkpoint: self }
    }
}

/// Lock of the state directory. While the lock exists, no other process can be the node's agent.
/// Dropping this value releases the lock.
#[derive(Debug)]
pub struct StateLock {
    _directory: fs::File,
}

/// The checkpoint file of a node.
#[derive(Debug, Clone)]
pub struct CheckpointStore {
    path: PathBuf,
}

impl CheckpointStore {
    /// Creates a store for the checkpoint in this directory. The first write creates the file.
    pub fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join(CHECKPOINT_FILE) }
    }

    /// Locks the directory for this process. Returns `None` while another process has the lock. The
    /// kernel releases the lock when the process ends.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be created, opened or locked.
    pub fn try_lock(&self) -> io::Result<Option<StateLock>> {
        let directory = self.path.parent().unwrap_or(&self.path);
        fs::create_dir_all(directory)?;
        let directory = fs::File::open(directory)?;
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(StateLock { _directory: directory })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the checkpoint. Returns `None` if the file does not exist.
    ///
    /// # Errors
    /// Returns [`CheckpointError`] if the file cannot be read or decoded.
    pub fn load(&self) -> Result<Option<Checkpoint>, CheckpointError> {
        let path = || self.path.clone();
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::Read { path: path(), source }),
        };
        Checkpoint::decode(&bytes).map(Some).map_err(|source| CheckpointError::Unusable { path: path(), source })
    }

    /// Renames an unusable checkpoint, so that an administrator or another version of the agent can
    /// read the file. Returns the new path.
    ///
    /// # Errors
    /// Returns an error if the file cannot be renamed.
    pub fn rename_unusable(&self) -> io::Result<PathBuf> {
        let aside = self.path.with_extension("json.unread");
        fs::rename(&self.path, &aside)?;
        Ok(aside)
    }

    /// Writes the checkpoint atomically.
    ///
    /// # Errors
    /// Returns an error if the directory or the file cannot be written.
    pub fn save(&self, checkpoint: &Checkpoint) -> io::Result<()> {
        if let Some(directory) = self.path.parent() {
            fs::create_dir_all(directory)?;
        }
        write_json_atomically(&self.path, &checkpoint.versioned())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::allocation::usage::tests::allocation;
    use crate::gpu::layout::target_layout;
    use crate::gpu::layout::tests::{gpu, mps_spec};

    fn sample_checkpoint() -> Checkpoint {
        let spec = mps_spec("GPU-a", 10);
        let layout = target_layout(Some(&spec), &gpu("GPU-a", 0), false).unwrap().layout;
        Checkpoint {
            generation: 7,
            spec: Some(GpuNodeSpec { plan_id: "p".into(), gpus: vec![spec] }),
            gpus: vec![gpu("GPU-a", 0)],
            layouts: BTreeMap::from([("GPU-a".into(), layout)]),
            allocations: vec![Arc::new(allocation(&["GPU-a::0"]))],
            boot_id: "boot".into(),
            mig_partitioned: BTreeSet::from(["GPU-b".to_owned()]),
            replaced: BTreeMap::new(),
            health: BTreeMap::from([(
                "GPU-a".into(),
                HealthRecord { uncorrected: Some(1), ..HealthRecord::default() },
            )]),
        }
    }

    #[test]
    fn a_saved_checkpoint_is_loaded_and_a_missing_one_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let store = CheckpointStore::new(&directory.path().join("not/there/yet"));
        assert!(store.load().unwrap().is_none());
        store.save(&sample_checkpoint()).unwrap();
        assert_eq!(store.load().unwrap(), Some(sample_checkpoint()));
        store.save(&Checkpoint::default()).unwrap();
        assert_eq!(store.load().unwrap(), Some(Checkpoint::default()));
    }

    #[test]
    fn a_checkpoint_of_another_version_is_refused_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let store = CheckpointStore::new(directory.path());
        fs::write(&store.path, br#"{"version": 2, "layouts": "of another shape"}"#).unwrap();
        let error = store.load().unwrap_err();
        assert!(error.to_string().ends_with("has version 2; this agent reads version 1"), "{error}");
        let aside = store.rename_unusable().unwrap();
        assert!(store.load().unwrap().is_none());
        assert!(fs::read_to_string(aside).unwrap().contains("another shape"));
    }

    #[test]
    fn a_checkpoint_with_impossible_values_is_refused_as_damaged() {
        let changed = |pointer: &str, value: serde_json::Value| {
            let mut json: serde_json::Value = serde_json::from_slice(&sample_checkpoint().encode()).unwrap();
            *json.pointer_mut(pointer).unwrap() = value;
            Checkpoint::decode(json.to_string().as_bytes()).map_err(|error| error.to_string())
        };
        let pool = "/layouts/GPU-a/pools/0";
        for (pointer, value, part) in [
            // The agent keeps the id of every slice in memory. A checkpoint with this count would
            // need four billion ids.
            ("count", json!(u32::MAX), "GPU GPU-a: nvidia.com/gpu-mps: one pool has 4294967295 slices"),
            ("first", json!(u32::MAX), "cannot be numbered from 4294967295"),
            ("resource", json!("x".repeat(100_000)), "is not the name of an extended resource"),
            ("kind/Mps/threads", json!([1]), "there are 10 shares but limits for fewer"),
        ] {
            let error = changed(&format!("{pool}/{pointer}"), value).unwrap_err();
            assert!(error.contains(part) && error.len() < 1000, "{error}");
        }
        let layout: serde_json::Value = serde_json::to_value(&sample_checkpoint().layouts["GPU-a"]).unwrap();
        let twice = changed("/layouts", json!({"GPU-a": layout, "GPU-b": layout})).unwrap_err();
        assert!(twice.contains("nvidia.com/gpu-mps: slices of GPU-a are listed twice"), "{twice}");
        let gpus =
            json!([serde_json::to_value(gpu("GPU-a", 0)).unwrap(), serde_json::to_value(gpu("GPU-a", 1)).unwrap()]);
        assert!(changed("/gpus", gpus).unwrap_err().contains("device GPU-a is listed twice"));
        let threads = changed("/layouts/GPU-a/daemons/GPU-a/defaultThreads", json!(101));
        assert!(threads.unwrap_err().contains("invalid active thread percentage 101"));
        let limits = json!({"threads": 20, "memory_mib": 1, "max_clients": null});
        let allocation = json!({"resource": "r", "ids": ["x::0"], "devices": ["../x"], "mps": limits});
        let device = changed("/allocations/0", allocation).unwrap_err();
        assert!(device.contains("invalid device \"../x\""), "{device}");
        assert_eq!(changed(&format!("{pool}/count"), json!(10)), Ok(sample_checkpoint()));
    }

    #[test]
    fn a_failed_write_keeps_the_last_checkpoint() {
        let directory = tempfile::tempdir().unwrap();
        let store = CheckpointStore::new(directory.path());
        store.save(&sample_checkpoint()).unwrap();
        // A directory at the path of the temporary file causes the write to fail.
        fs::create_dir(directory.path().join("agent.json.tmp")).unwrap();
        assert!(store.save(&Checkpoint::default()).is_err());
        assert_eq!(store.load().unwrap(), Some(sample_checkpoint()));
    }

    proptest! {
        #[test]
        fn a_damaged_checkpoint_causes_an_error_but_no_panic(cut in 0_usize..2000, byte: u8) {
            let directory = tempfile::tempdir().unwrap();
            let store = CheckpointStore::new(directory.path());
            let mut bytes = sample_checkpoint().encode();
            let cut = cut % bytes.len();
            bytes.truncate(cut);
            fs::write(&store.path, &bytes).unwrap();
            prop_assert!(store.load().is_err());
            let mut bytes = sample_checkpoint().encode();
            bytes[cut] = byte;
            fs::write(&store.path, &bytes).unwrap();
            let _ = store.load();
        }
    }
}
