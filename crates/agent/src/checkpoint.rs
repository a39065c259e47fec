//! What the agent has to know before the API server, and NVML, answer: versioned, on the host's disk, whole or not there.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cleave_api::GpuNodeSpec;
use cleave_gpu::nvml::Gpu;
use serde::{Deserialize, Serialize};

use crate::allocate::Allocation;
use crate::files::write_atomically;
use crate::health::Record;
use crate::layout::Layout;

/// The version written, and the only one read.
const VERSION: u32 = 1;
/// The file in the state directory.
const FILE: &str = "agent.json";

/// What was true when it was written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    /// Boot id of the kernel that it was written under.
    pub boot_id: String,
    /// Generation of the spec.
    pub generation: i64,
    /// The last spec.
    pub spec: Option<GpuNodeSpec>,
    /// The GPUs.
    pub gpus: Vec<Gpu>,
    /// What they are served as, by UUID: not always what the spec says, since a change waits for pods.
    pub layouts: BTreeMap<String, Layout>,
    /// What was given out.
    pub allocations: Vec<Allocation>,
    /// GPUs that a spec has cut by MIG: they become whole where no spec names them any more.
    #[serde(default)]
    pub cut: BTreeSet<String>,
    /// What was found wrong with GPUs, under this boot, and is not over; by UUID.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub health: BTreeMap<String, Record>,
}

/// Why a checkpoint is no help.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The disk.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not what an agent wrote.
    #[error("{path} is damaged")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        source: serde_json::Error,
    },
    /// Written by another version of the agent.
    #[error("{path} has version {found}; this agent reads {VERSION}")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
}

impl Checkpoint {
    /// As bytes, with this agent's version.
    pub fn encode(&self) -> Vec<u8> {
        #[derive(Serialize)]
        struct Versioned<'a> {
            version: u32,
            #[serde(flatten)]
            checkpoint: &'a Checkpoint,
        }
        // Maps have string keys and nothing is a float that JSON lacks: it cannot fail.
        serde_json::to_vec(&Versioned { version: VERSION, checkpoint: self }).unwrap_or_default()
    }
}

/// The checkpoint of a node.
#[derive(Debug, Clone)]
pub struct Store {
    path: PathBuf,
}

impl Store {
    /// In this directory, which is made when first written.
    pub fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join(FILE) }
    }

    /// Reads it; nothing where none was written.
    pub fn load(&self) -> Result<Option<Checkpoint>, CheckpointError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let path = || self.path.clone();
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::Read { path: path(), source }),
        };
        let damaged = |source| CheckpointError::Damaged { path: path(), source };
        // The version first: of another one nothing else can be taken for granted.
        let Versioned { version } = serde_json::from_slice(&bytes).map_err(damaged)?;
        if version != VERSION {
            return Err(CheckpointError::Version { path: path(), found: version });
        }
        serde_json::from_slice(&bytes).map(Some).map_err(damaged)
    }

    /// Puts one that is no help aside, for a person or the agent that it is of.
    pub fn put_aside(&self) -> io::Result<PathBuf> {
        let aside = self.path.with_extension("json.unread");
        fs::rename(&self.path, &aside)?;
        Ok(aside)
    }

    /// Writes it, whole or not at all.
    pub fn save(&self, content: &[u8]) -> io::Result<()> {
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        write_atomically(&self.path, content)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::tests::{gpu, mps_spec};
    use crate::layout::wanted;
    use crate::usage::tests::allocation;

    fn checkpoint() -> Checkpoint {
        let spec = mps_spec("GPU-a", 10);
        let layout = wanted(Some(&spec), &gpu("GPU-a", 0), false).unwrap().layout;
        Checkpoint {
            generation: 7,
            spec: Some(GpuNodeSpec { plan_id: "p".into(), gpus: vec![spec] }),
            gpus: vec![gpu("GPU-a", 0)],
            layouts: BTreeMap::from([("GPU-a".into(), layout)]),
            allocations: vec![allocation(&["GPU-a::0"])],
            boot_id: "boot".into(),
            cut: BTreeSet::from(["GPU-b".to_owned()]),
            health: BTreeMap::from([("GPU-a".into(), Record { uncorrected: Some(1), ..Record::default() })]),
        }
    }

    #[test]
    fn what_is_saved_is_loaded_and_nothing_is_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(&folder.path().join("not/there/yet"));
        assert!(store.load().unwrap().is_none());
        store.save(&checkpoint().encode()).unwrap();
        assert_eq!(store.load().unwrap(), Some(checkpoint()));
        store.save(&Checkpoint::default().encode()).unwrap();
        assert_eq!(store.load().unwrap(), Some(Checkpoint::default()));
    }

    #[test]
    fn one_of_another_version_is_told_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        store.save(br#"{"version": 2, "layouts": "of another shape"}"#).unwrap();
        let error = store.load().unwrap_err();
        assert!(error.to_string().ends_with("has version 2; this agent reads 1"), "{error}");
        let aside = store.put_aside().unwrap();
        assert!(store.load().unwrap().is_none());
        assert!(fs::read_to_string(aside).unwrap().contains("another shape"));
    }

    #[test]
    fn a_write_that_fails_leaves_the_last_one() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        store.save(&checkpoint().encode()).unwrap();
        // A directory where the temporary file would be.
        fs::create_dir(folder.path().join("agent.json.tmp")).unwrap();
        assert!(store.save(b"{}").is_err());
        assert_eq!(store.load().unwrap(), Some(checkpoint()));
    }

    proptest! {
        #[test]
        fn a_damaged_one_is_an_error_and_never_a_panic(cut in 0_usize..2000, byte: u8) {
            let folder = tempfile::tempdir().unwrap();
            let store = Store::new(folder.path());
            let mut bytes = checkpoint().encode();
            let cut = cut % bytes.len();
            bytes.truncate(cut);
            store.save(&bytes).unwrap();
            prop_assert!(store.load().is_err());
            let mut bytes = checkpoint().encode();
            bytes[cut] = byte;
            store.save(&bytes).unwrap();
            let _ = store.load();
        }
    }
}
