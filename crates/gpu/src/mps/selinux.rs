//! SELinux labels of doors.
//!
//! Where SELinux is enforced, a container can use a host directory and a socket in that directory
//! only if both have the type of container files. Without the labels, no client could reach its
//! door.
use std::io;
use std::path::Path;

use rustix::fs::{XattrFlags, setxattr};
use rustix::io::Errno;

/// The extended attribute that contains a file's label.
const LABEL_ATTRIBUTE: &str = "security.selinux";
/// The label of files that all containers may use under the policy `container-selinux`. Like labels
/// that other programs write, this label ends with a NUL.
const CONTAINER_FILE_LABEL: &[u8] = b"system_u:object_r:container_file_t:s0\0";

/// Labels files for containers, if SELinux is enabled on the node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContainerLabel {
    enabled: bool,
}

impl ContainerLabel {
    /// Detects whether SELinux is enabled. The kernel registers `selinuxfs` only if SELinux is
    /// enabled.
    pub(crate) fn detect() -> Self {
        let filesystems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        Self { enabled: lists_selinux(&filesystems) }
    }

    /// Labels a file or directory. Logs a warning instead of returning an error if the file system
    /// does not label single files, or if the policy does not know the label. In these cases, the
    /// administrator chooses the label.
    ///
    /// # Errors
    /// Returns an error if the file cannot be labelled, because containers could not use it.
    pub(crate) fn apply(self, path: &Path) -> io::Result<()> {
        self.try_apply(path).or_else(|error| {
            if !is_label_impossible(&error) {
                let text = format!("failed to set the SELinux label for containers: {error}");
                return Err(io::Error::new(error.kind(), text));
            }
            tracing::warn!(%error, path = %path.display(), "failed to set SELinux label for containers");
            Ok(())
        })
    }

    fn try_apply(self, path: &Path) -> io::Result<()> {
        if self.enabled {
            setxattr(path, LABEL_ATTRIBUTE, CONTAINER_FILE_LABEL, XattrFlags::empty())?;
        }
        Ok(())
    }
}

/// Returns whether an error means that the file system or the policy does not support the label.
fn is_label_impossible(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOTSUP | Errno::INVAL))
}

/// Returns whether the text of `/proc/filesystems` lists `selinuxfs`.
fn lists_selinux(filesystems: &str) -> bool {
    filesystems.lines().any(|line| line.split_whitespace().next_back() == Some("selinuxfs"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::fs::getxattr;

    use super::*;

    #[test]
    fn selinux_is_enabled_if_its_file_system_is_registered() {
        assert!(lists_selinux("nodev\tsysfs\nnodev\tselinuxfs\n\text4\n"));
        assert!(!lists_selinux("nodev\tsysfs\nnodev\tsecurityfs\n\text4\n"));
        assert!(!lists_selinux(""));
    }

    #[test]
    fn errors_are_ignored_only_where_no_file_can_have_the_label() {
        for (errno, impossible) in
            [(Errno::NOTSUP, true), (Errno::INVAL, true), (Errno::ACCESS, false), (Errno::PERM, false)]
        {
            assert_eq!(is_label_impossible(&errno.into()), impossible, "{errno}");
        }
        let absent = ContainerLabel { enabled: true }.apply(Path::new("/nonexistent")).unwrap_err();
        assert!(absent.to_string().contains("SELinux"), "{absent}");
        ContainerLabel { enabled: false }.apply(Path::new("/nonexistent")).unwrap();
    }

    #[test]
    fn directories_and_sockets_are_labelled_for_containers_only_with_selinux() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("control");
        let _listener = UnixListener::bind(&socket).unwrap();
        let label = |path: &Path| {
            let mut label = vec![0; 256];
            getxattr(path, LABEL_ATTRIBUTE, &mut label).map(|length| label[..length].to_vec())
        };
        let before = (label(directory.path()), label(&socket));
        let disabled = ContainerLabel { enabled: false };
        disabled.try_apply(directory.path()).unwrap();
        disabled.try_apply(&socket).unwrap();
        assert_eq!((label(directory.path()), label(&socket)), before);
        let enabled = ContainerLabel { enabled: true };
        for path in [directory.path(), &socket] {
            match enabled.try_apply(path) {
                Ok(()) => assert_eq!(label(path).unwrap(), CONTAINER_FILE_LABEL),
                // Without SELinux, only root may write labels. With SELinux, the policy must allow
                // the label. Not every file system supports labels.
                Err(error) => assert!(
                    matches!(
                        Errno::from_io_error(&error),
                        Some(Errno::PERM | Errno::ACCESS | Errno::NOTSUP | Errno::INVAL)
                    ),
                    "{error}"
                ),
            }
        }
    }
}
