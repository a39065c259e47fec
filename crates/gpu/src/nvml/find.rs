//! Finds the NVML library.
use std::path::{Path, PathBuf};

/// File name of the NVML library. The dynamic loader searches for the same name.
pub(super) const LIBRARY_NAME: &str = "libnvidia-ml.so.1";

/// Locations at which to search for the NVML library.
#[derive(Debug, Clone)]
pub struct LibrarySearch {
    /// Path of the library file. If set, the search considers only this path.
    pub library: Option<PathBuf>,
    /// Mount point of the host's root file system in this process.
    pub host_root: PathBuf,
    /// Directory of the driver's files on the host.
    pub driver_root: Option<PathBuf>,
}

impl Default for LibrarySearch {
    fn default() -> Self {
        Self { library: None, host_root: PathBuf::from("/"), driver_root: None }
    }
}

/// Usual root directories of a driver: in NVIDIA's driver container, on GKE nodes and on the host.
const DRIVER_ROOTS: [&str; 3] = ["/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "/"];

/// Library directories below a root directory: those of Debian, of Red Hat, and of drivers for
/// containers.
const LIBRARY_DIRECTORIES: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/local/nvidia/lib64",
    "usr/lib",
];

impl LibrarySearch {
    /// Returns the files to try, in order of preference.
    pub(super) fn candidate_files(&self) -> Vec<PathBuf> {
        if let Some(library) = &self.library {
            return vec![library.clone()];
        }
        self.driver_root
            .iter()
            .map(PathBuf::as_path)
            .chain(DRIVER_ROOTS.iter().map(Path::new))
            .map(|root| path_under_host_root(&self.host_root, root))
            .flat_map(|root| LIBRARY_DIRECTORIES.iter().map(move |directory| root.join(directory).join(LIBRARY_NAME)))
            .collect()
    }
}

/// Translates a path on the host to its path in this process.
fn path_under_host_root(host_root: &Path, path: &Path) -> PathBuf {
    host_root.join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configured_library_is_the_only_candidate() {
        let search = LibrarySearch { library: Some("/x/libnvidia_ml.so".into()), ..LibrarySearch::default() };
        assert_eq!(search.candidate_files(), [PathBuf::from("/x/libnvidia_ml.so")]);
    }

    #[test]
    fn the_driver_root_comes_first_and_all_candidates_are_below_the_host_root() {
        let search = LibrarySearch {
            host_root: "/host".into(),
            driver_root: Some("/opt/driver".into()),
            ..LibrarySearch::default()
        };
        let candidates = search.candidate_files();
        assert_eq!(candidates[0], PathBuf::from("/host/opt/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"));
        assert!(candidates.contains(&PathBuf::from("/host/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1")));
        assert!(candidates.contains(&PathBuf::from("/host/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")));
        assert!(candidates.iter().all(|path| path.starts_with("/host")));
    }
}
