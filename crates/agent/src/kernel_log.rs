//! What NVIDIA's driver writes to the kernel's log of an XID: the process whose channel it was.
//!
//! NVML's events have no process, and the MPS server's log often names a neighbour. The kernel's log is read where it is asked for, that is
//! in a fault: nothing follows it, and it costs nothing while all is well.
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Inode of the machine's first pid namespace (`PROC_PID_INIT_INO` in the kernel's `proc_ns.h`), whose pids the kernel's log has.
const FIRST_PIDS: &str = "pid:[4026531836]";
/// Longer than any record of the kernel's log, which is read whole or not at all.
const RECORD: usize = 16 << 10;
/// What is read at once at most: a kernel's log that is written faster than it is read.
const MOST: usize = 4 << 20;
/// Priorities below this are of the kernel itself; it lets no process write them.
const OTHERS: u32 = 8;

/// An XID, and whose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xid {
    /// The XID.
    pub code: u64,
    /// The process, by the host's pid.
    pub pid: u32,
}

/// The kernel's log from when this was made.
#[derive(Debug)]
pub struct KernelLog {
    path: PathBuf,
    file: Option<File>,
    /// A line that is not whole yet, of a log that is a file.
    rest: Vec<u8>,
}

impl KernelLog {
    /// The log at `path`, from its end; `proc` is where processes are told of. None, with the reason, where its pids are not those that this
    /// process sees: on a node that is itself a container.
    pub fn open(path: PathBuf, proc: &Path) -> Result<Self, String> {
        let device = std::fs::metadata(&path).is_ok_and(|of| of.file_type().is_char_device());
        if device {
            let pids = std::fs::read_link(proc.join("self/ns/pid")).unwrap_or_default();
            if pids.as_os_str() != FIRST_PIDS {
                return Err(format!("its pids are the machine's, and this process sees those of {}", pids.display()));
            }
        }
        let mut log = Self { path, file: None, rest: Vec::new() };
        match log.reopen() {
            Ok(mut file) => {
                file.seek(SeekFrom::End(0)).map_err(|error| error.to_string())?;
                log.file = Some(file);
            }
            // A file may come.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error.to_string()),
        }
        Ok(log)
    }

    fn reopen(&self) -> io::Result<File> {
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        OpenOptions::new().read(true).custom_flags(nonblocking).open(&self.path)
    }

    /// The XIDs that came since the last time. What cannot be read is not there.
    pub fn read(&mut self) -> Vec<Xid> {
        if self.file.is_none() {
            self.file = self.reopen().ok();
        }
        let Some(file) = &mut self.file else { return Vec::new() };
        let mut record = vec![0; RECORD];
        let before = self.rest.len();
        while self.rest.len() - before < MOST {
            match file.read(&mut record) {
                Ok(0) => break,
                Ok(length) => self.rest.extend_from_slice(record.get(..length).unwrap_or_default()),
                // Records were overwritten before they were read: it goes on with the next that is there.
                Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
                Err(_) => break,
            }
        }
        let whole = self.rest.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let text: Vec<u8> = self.rest.drain(..whole).collect();
        if self.rest.len() > RECORD {
            self.rest.clear();
        }
        String::from_utf8_lossy(&text).lines().filter_map(parse).collect()
    }
}

/// The XID that a record of `/dev/kmsg` tells (`PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT`, the kernel's `Documentation/ABI/testing/dev-kmsg`),
/// if it is the kernel's own and names a process.
///
/// `NVRM: Xid (PCI:0000:00:06): 31, pid=14715, name=python3, channel 0x0000000e, …`: seen under driver 580.
pub fn parse(record: &str) -> Option<Xid> {
    let (prefix, text) = record.split_once(';')?;
    if prefix.split(',').next()?.parse::<u32>().ok()? >= OTHERS {
        return None;
    }
    let (_, said) = text.strip_prefix("NVRM: Xid (PCI:")?.split_once("): ")?;
    let (code, rest) = said.split_once(", pid=")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some(Xid { code: code.parse().ok()?, pid: rest.get(..digits)?.parse().ok().filter(|&pid| pid > 0)? })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const SEEN: &str = "4,901,317466047,-;NVRM: Xid (PCI:0000:00:06): 31, pid=14715, name=python3, channel 0x0000000e, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_4 faulted @ 0x7f00_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE";

    #[test]
    fn an_xid_is_whose_the_driver_says() {
        assert_eq!(parse(SEEN), Some(Xid { code: 31, pid: 14715 }));
        assert_eq!(parse("4,1,1,-;NVRM: Xid (PCI:0000:00:06): 13, pid=7"), Some(Xid { code: 13, pid: 7 }));
    }

    #[test]
    fn what_a_process_wrote_and_what_names_none_is_nothing() {
        for record in [
            // As `echo … > /dev/kmsg` is recorded, whatever priority it asks for: facility 1.
            &SEEN.replacen("4,", "12,", 1),
            &SEEN.replace("pid=14715", "pid='<unknown>'"),
            &SEEN.replace("pid=14715", "pid=0"),
            &SEEN.replace("pid=14715", "pid=99999999999"),
            "4,1,1,-;NVRM: Xid (PCI:0000:00:06): 79, GPU has fallen off the bus.",
            "4,1,1,-;NVRM: GPU at PCI:0000:00:06: GPU-8926ab2e",
            " SUBSYSTEM=pci",
            "",
            ";",
        ] {
            assert_eq!(parse(record), None, "{record}");
        }
    }

    #[test]
    fn only_what_comes_is_read_and_each_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kmsg");
        std::fs::write(&path, format!("{SEEN}\n")).unwrap();
        let mut log = KernelLog::open(path.clone(), Path::new("/proc")).unwrap();
        assert_eq!(log.read(), []);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        let (start, end) = SEEN.split_at(40);
        write!(file, "{}\n SUBSYSTEM=pci\n{start}", SEEN.replace("14715", "5")).unwrap();
        assert_eq!(log.read(), [Xid { code: 31, pid: 5 }]);
        writeln!(file, "{end}").unwrap();
        assert_eq!(log.read(), [Xid { code: 31, pid: 14715 }]);
        assert_eq!(log.read(), []);
    }

    #[test]
    fn a_log_that_comes_later_is_read_from_its_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kmsg");
        let mut log = KernelLog::open(path.clone(), Path::new("/proc")).unwrap();
        assert_eq!(log.read(), []);
        std::fs::write(&path, format!("{SEEN}\n")).unwrap();
        assert_eq!(log.read(), [Xid { code: 31, pid: 14715 }]);
    }

    #[test]
    fn pids_of_another_namespace_are_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("self/ns")).unwrap();
        std::os::unix::fs::symlink("pid:[4026532000]", folder.path().join("self/ns/pid")).unwrap();
        // Any character device.
        let refused = KernelLog::open("/dev/null".into(), folder.path()).unwrap_err();
        assert!(refused.contains("pid:[4026532000]"), "{refused}");
    }
}
