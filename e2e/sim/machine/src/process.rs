//! Identifies processes with contexts on a GPU across PID namespaces, and detects whether they are
//! alive.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

/// How a process uses a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessKind {
    /// A plain CUDA context.
    Compute,
    /// A client of an MPS server.
    MpsClient,
    /// An MPS server.
    MpsServer,
    /// A graphics context.
    Graphics,
}

/// A context on a GPU and the process that owns it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    /// The context's number in the state.
    pub id: u64,
    /// How the process uses the GPU.
    pub kind: ProcessKind,
    /// UUID of the GPU or MIG device.
    pub device: String,
    /// Device memory in bytes.
    pub used: u64,
    /// The process that owns the context.
    pub pid: PidRef,
    /// The process's name.
    pub name: String,
    /// The file under `leases/` that the owner keeps locked. Without a lease, the context exists
    /// while the process is alive.
    #[serde(default)]
    pub lease: Option<String>,
}

/// The identity of a process within a PID namespace. A PID alone is not unique: PIDs repeat in
/// other namespaces, and the kernel reuses PIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PidRef {
    /// The PID within `namespace`.
    pub pid: u32,
    /// The inode of the PID namespace.
    pub namespace: u64,
    /// Start time of the process, in clock ticks since boot. 0 means unknown.
    pub start: u64,
}

impl PidRef {
    /// Returns the identity of this process.
    #[must_use]
    pub fn of_this_process() -> Self {
        Self::of_pid(std::process::id())
    }

    /// Returns the identity of a process with this PID in this process's namespace.
    #[must_use]
    pub fn of_pid(pid: u32) -> Self {
        Self { pid, namespace: own_namespace(), start: start_time(pid).unwrap_or(0) }
    }

    /// Returns whether the process has certainly exited. Returns false for a process in another
    /// namespace, because this process cannot determine whether that process has exited.
    pub(crate) fn is_dead(&self) -> bool {
        self.namespace == own_namespace() && start_time(self.pid).is_none_or(|s| self.start != 0 && s != self.start)
    }
}

/// Returns the inode of this process's PID namespace, or 0 if `/proc` is not available.
fn own_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino())
}

/// Returns the start time of a process, in clock ticks since boot. Returns `None` for a dead
/// process or a zombie.
fn start_time(pid: u32) -> Option<u64> {
    parse_start_time(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses field 22 of `/proc/<pid>/stat`. Returns `None` for a zombie. The process name (field 2)
/// may contain spaces and parentheses.
fn parse_start_time(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Returns this process's name, as `ps` shows it.
pub(crate) fn own_process_name() -> String {
    fs::read_to_string("/proc/self/comm").map_or_else(|_| String::new(), |s| s.trim_end().to_owned())
}

/// Returns the name of a process by its PID in this namespace.
pub(crate) fn process_name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).map_or_else(|_| String::new(), |s| s.trim_end().to_owned())
}

/// Translates PIDs of other namespaces to *this* process's namespace, from `/proc/*/status`
/// (`NSpid`) and `/proc/*/ns/pid`. The host's PID namespace contains the processes of all
/// containers. A container's PID namespace contains only the container's processes.
#[derive(Debug, Default)]
pub struct PidResolver {
    known: Mutex<HashMap<PidRef, u32>>,
}

impl PidResolver {
    /// Returns the PID in this process's namespace, or `None` if the process is not visible in this
    /// namespace.
    pub fn resolve(&self, process: &PidRef) -> Option<u32> {
        let own = own_namespace();
        if process.namespace == own || process.namespace == 0 {
            return Some(process.pid);
        }
        let mut known = self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(pid) = known.get(process) {
            if start_time(*pid).is_some_and(|s| process.start == 0 || s == process.start) {
                return Some(*pid);
            }
            known.remove(process);
        }
        let found = find_pid_in(Path::new("/proc"), process)?;
        known.insert(*process, found);
        Some(found)
    }
}

/// Searches a `/proc` directory for a process of another namespace.
fn find_pid_in(proc: &Path, process: &PidRef) -> Option<u32> {
    fs::read_dir(proc).ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        if innermost_pid(&status)? != process.pid {
            return None;
        }
        // Only root can read the namespace's inode. All users can read the start time, and the PID
        // and start time together are almost certainly unique.
        let right = match fs::metadata(entry.path().join("ns/pid")) {
            Ok(namespace) => namespace.ino() == process.namespace,
            Err(_) => process.start != 0 && start_time(pid) == Some(process.start),
        };
        right.then_some(pid)
    })
}

/// Returns the process's PID in its innermost namespace: the last field of `NSpid`.
fn innermost_pid(status: &str) -> Option<u32> {
    status.lines().find_map(|l| l.strip_prefix("NSpid:"))?.split_ascii_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_break_parsing() {
        let stat = "42 (a b) c) S 1 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1 1";
        assert_eq!(parse_start_time(stat), Some(987_654));
        assert_eq!(parse_start_time(&stat.replace(") S ", ") Z ")), None);
        assert_eq!(parse_start_time(""), None);
        assert_eq!(parse_start_time("42 (x) S 1"), None);
    }

    #[test]
    fn the_innermost_pid_is_the_last_of_nspid() {
        assert_eq!(innermost_pid("Name:\tx\nNSpid:\t4711\t12\t1\nNSpgid:\t1\n"), Some(1));
        assert_eq!(innermost_pid("Name:\tx\n"), None);
    }

    #[test]
    fn a_process_of_another_namespace_is_found() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: u32, status: &str| {
            let dir = proc.path().join(pid.to_string());
            fs::create_dir_all(dir.join("ns")).unwrap();
            fs::write(dir.join("status"), status).unwrap();
            fs::write(dir.join("ns/pid"), "").unwrap();
            fs::metadata(dir.join("ns/pid")).unwrap().ino()
        };
        process(100, "NSpid:\t100\n");
        process(200, "NSpid:\t200\t7\n");
        let namespace = process(300, "NSpid:\t300\t7\n");
        fs::create_dir(proc.path().join("self")).unwrap();
        let wanted = PidRef { pid: 7, namespace, start: 0 };
        assert_eq!(find_pid_in(proc.path(), &wanted), Some(300));
        assert_eq!(find_pid_in(proc.path(), &PidRef { pid: 8, ..wanted }), None);
        assert_eq!(find_pid_in(proc.path(), &PidRef { namespace: 1, ..wanted }), None);
    }

    #[test]
    fn a_reused_pid_is_another_process() {
        let me = PidRef::of_this_process();
        assert!(!me.is_dead());
        assert!(PidRef { start: me.start + 1, ..me }.is_dead());
    }
}
