//! Where the NVML library may be.
use std::path::{Path, PathBuf};

/// The library's name, also for the dynamic loader's own search.
pub(super) const NAME: &str = "libnvidia-ml.so.1";

/// Where to look for the library.
#[derive(Debug, Clone)]
pub struct Search {
    /// The library itself: nothing else is tried.
    pub library: Option<PathBuf>,
    /// Where this process sees the host's root file system.
    pub host_root: PathBuf,
    /// Host directory of the driver's files.
    pub driver_root: Option<PathBuf>,
}

impl Default for Search {
    fn default() -> Self {
        Self { library: None, host_root: PathBuf::from("/"), driver_root: None }
    }
}

/// Host roots of a driver: that of NVIDIA's driver container, of GKE's nodes, and the host's own.
const ROOTS: [&str; 3] = ["/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "/"];

/// Library folders below a root: Debian's, Red Hat's, and those of the driver directories that are
/// mounted into containers.
const FOLDERS: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/local/nvidia/lib64",
    "usr/lib",
];

impl Search {
    /// Files to try in order. Empty where only the loader's own search is left.
    pub(super) fn candidates(&self) -> Vec<PathBuf> {
        if let Some(library) = &self.library {
            return vec![library.clone()];
        }
        self.driver_root
            .iter()
            .map(PathBuf::as_path)
            .chain(ROOTS.iter().map(Path::new))
            .map(|root| below(&self.host_root, root))
            .flat_map(|root| FOLDERS.iter().map(move |folder| root.join(folder).join(NAME)))
            .collect()
    }
}

/// `path` of the host as this process sees it.
fn below(host_root: &Path, path: &Path) -> PathBuf {
    host_root.join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_library_is_the_only_candidate() {
        let search = Search { library: Some("/x/libnvidia_ml.so".into()), ..Search::default() };
        assert_eq!(search.candidates(), [PathBuf::from("/x/libnvidia_ml.so")]);
    }

    #[test]
    fn the_driver_root_comes_first_and_everything_is_below_the_host_root() {
        let search = Search { host_root: "/host".into(), driver_root: Some("/opt/driver".into()), ..Search::default() };
        let candidates = search.candidates();
        assert_eq!(candidates[0], PathBuf::from("/host/opt/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"));
        assert!(candidates.contains(&PathBuf::from("/host/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1")));
        assert!(candidates.contains(&PathBuf::from("/host/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")));
        assert!(candidates.iter().all(|path| path.starts_with("/host")));
    }
}
