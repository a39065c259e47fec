//! Reads a process from `/proc`.
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::cgroup::{self, ProcessOwner};

/// Maximum number of bytes to read from a file. `/proc/PID/cgroup` has one line for each hierarchy,
/// with a path of at most 4 KiB.
const MAX_PROC_FILE_BYTES: u64 = 64 << 10;

/// Facts about a process, from `/proc`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Time from boot to the start of the process, in clock ticks. The start time and the PID
    /// together identify the process until the node reboots.
    pub start: u64,
    /// PID of the parent process.
    pub parent: u32,
    /// The pod and container of the process. `None` if the process is in no pod.
    pub owner: Option<ProcessOwner>,
}

/// Reads a process. Returns `None` if the process has ended, or if its PID was reused during the
/// read.
///
/// # Errors
/// Returns an error if a file cannot be read or parsed. In this case, the process may still run.
pub fn read_process(proc: &Path, pid: u32) -> io::Result<Option<ProcessInfo>> {
    let directory = proc.join(pid.to_string());
    let read = |name: &str| match File::open(directory.join(name)) {
        Ok(file) => {
            let mut bytes = Vec::new();
            match file.take(MAX_PROC_FILE_BYTES).read_to_end(&mut bytes) {
                Ok(_) => Ok(Some(bytes)),
                // The process ended after the file was opened.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Ok(None),
                Err(error) => Err(error),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let stat = |bytes: &[u8]| {
        // The name may contain invalid UTF-8, because a program may set its name to any bytes.
        parse_stat(&String::from_utf8_lossy(bytes)).ok_or(io::ErrorKind::InvalidData)
    };
    let Some(before) = read("stat")? else { return Ok(None) };
    let Some(cgroups) = read("cgroup")? else { return Ok(None) };
    let Some(after) = read("stat")? else { return Ok(None) };
    let (parent, start) = stat(&before)?;
    if stat(&after)?.1 != start {
        return Ok(None);
    }
    Ok(Some(ProcessInfo { start, parent, owner: cgroup::parse_owner(&String::from_utf8_lossy(&cgroups)) }))
}

/// Parses `/proc/PID/stat` (`proc_pid_stat(5)`). Returns the PID of the parent (field 4) and the
/// start time in clock ticks (field 22). The name, field 2, may contain spaces and parentheses.
///
/// Ignores the state of the process, because the state is zombie after the first thread has ended,
/// even if other threads run.
pub fn parse_stat(stat: &str) -> Option<(u32, u64)> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    Some((parent, fields.nth(17)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const PROC_STAT_LINE: &str = "42 (a b) c) S 7 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1 1\n";

    #[test]
    fn spaces_and_parentheses_in_a_name_do_not_shift_the_fields() {
        assert_eq!(parse_stat(PROC_STAT_LINE), Some((7, 987_654)));
        assert_eq!(parse_stat(&PROC_STAT_LINE.replace("a b) c", ") R 1 1 1")), Some((7, 987_654)));
        for text in ["", ")", "42 (x) S", "42 (x) S 1 2 3", "42 (x) S x 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 9"]
        {
            assert_eq!(parse_stat(text), None, "{text}");
        }
    }

    #[test]
    fn a_running_process_is_read_and_an_ended_process_causes_no_error() {
        let own = read_process(Path::new("/proc"), std::process::id()).unwrap().unwrap();
        assert_eq!((own.parent, own.start > 0), (std::os::unix::process::parent_id(), true));
        let proc = tempfile::tempdir().unwrap();
        assert_eq!(read_process(proc.path(), 7).unwrap(), None);
        fs::create_dir(proc.path().join("7")).unwrap();
        fs::write(proc.path().join("7/stat"), PROC_STAT_LINE).unwrap();
        assert_eq!(read_process(proc.path(), 7).unwrap(), None, "the process ended between two reads");
        fs::write(proc.path().join("7/cgroup"), "\u{fffd}\n0::/\n").unwrap();
        assert_eq!(read_process(proc.path(), 7).unwrap(), Some(ProcessInfo { start: 987_654, parent: 7, owner: None }));
        fs::write(proc.path().join("7/stat"), "nonsense").unwrap();
        assert!(read_process(proc.path(), 7).is_err(), "a process that cannot be read does not count as ended");
    }
}
