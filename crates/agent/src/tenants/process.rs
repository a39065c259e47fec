//! A process, as `/proc` tells it.
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::cgroup::{self, Owner};

/// Longest file that is read: of a process's cgroups a line for each hierarchy, each with a path of
/// at most 4 KiB.
const MOST: u64 = 64 << 10;

/// What is known of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Clock ticks from boot to its start: with the pid it names the process for as long as the
    /// node runs.
    pub start: u64,
    /// Its parent's pid.
    pub parent: u32,
    /// Whose it is; none where it is no pod's.
    pub owner: Option<Owner>,
}

/// Looks at a process; none where it is gone, or another had its pid meanwhile.
///
/// # Errors
/// Whatever keeps the files from being read: nothing is known of the process then.
pub fn look(proc: &Path, pid: u32) -> io::Result<Option<Process>> {
    let folder = proc.join(pid.to_string());
    let read = |name: &str| match File::open(folder.join(name)) {
        Ok(file) => {
            let mut bytes = Vec::new();
            match file.take(MOST).read_to_end(&mut bytes) {
                Ok(_) => Ok(Some(bytes)),
                // It ended between the two calls.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Ok(None),
                Err(error) => Err(error),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let stat = |bytes: &[u8]| {
        // A program names itself, in any bytes.
        parse_stat(&String::from_utf8_lossy(bytes)).ok_or(io::ErrorKind::InvalidData)
    };
    let Some(before) = read("stat")? else { return Ok(None) };
    let Some(cgroups) = read("cgroup")? else { return Ok(None) };
    let Some(after) = read("stat")? else { return Ok(None) };
    let (parent, start) = stat(&before)?;
    if stat(&after)?.1 != start {
        return Ok(None);
    }
    Ok(Some(Process { start, parent, owner: cgroup::owner(&String::from_utf8_lossy(&cgroups)) }))
}

/// The parent's pid and the start in clock ticks: fields 4 and 22 of `/proc/PID/stat`
/// (`proc_pid_stat(5)`). The name, field 2, may have spaces and parentheses.
///
/// A process whose first thread has ended is a zombie by its state while other threads go on: that
/// says nothing here.
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

    const STAT: &str = "42 (a b) c) S 7 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1 1\n";

    #[test]
    fn a_name_does_not_shift_the_fields() {
        assert_eq!(parse_stat(STAT), Some((7, 987_654)));
        assert_eq!(parse_stat(&STAT.replace("a b) c", ") R 1 1 1")), Some((7, 987_654)));
        for text in ["", ")", "42 (x) S", "42 (x) S 1 2 3", "42 (x) S x 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 9"]
        {
            assert_eq!(parse_stat(text), None, "{text}");
        }
    }

    #[test]
    fn a_process_that_lives_is_seen_and_one_that_is_gone_is_not_an_error() {
        let own = look(Path::new("/proc"), std::process::id()).unwrap().unwrap();
        assert_eq!((own.parent, own.start > 0), (std::os::unix::process::parent_id(), true));
        let proc = tempfile::tempdir().unwrap();
        assert_eq!(look(proc.path(), 7).unwrap(), None);
        fs::create_dir(proc.path().join("7")).unwrap();
        fs::write(proc.path().join("7/stat"), STAT).unwrap();
        assert_eq!(look(proc.path(), 7).unwrap(), None, "it ended between two looks");
        fs::write(proc.path().join("7/cgroup"), "\u{fffd}\n0::/\n").unwrap();
        assert_eq!(look(proc.path(), 7).unwrap(), Some(Process { start: 987_654, parent: 7, owner: None }));
        fs::write(proc.path().join("7/stat"), "nonsense").unwrap();
        assert!(look(proc.path(), 7).is_err(), "nothing is known of it");
    }
}
