//! The files of containers' control groups, of version 2.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::figures::{Bytes, Figures, high_below, limit, reclaimable, swap_free};
use crate::tenants::cgroup::{Owner, container_of, container_path};

/// A container is not deeper than this, even on a node that is itself a container.
const DEEPEST: usize = 10;
/// Most folders that are looked at for what an agent before this one has set.
const MOST: usize = 50_000;

/// A file system of control groups that can be written to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Tree {
    at: PathBuf,
    /// Which group is there, as this process's `/proc` names it.
    root: String,
}

/// The control groups of the machine, as far as they are to be seen.
#[derive(Debug, Clone, Default)]
pub(super) struct Trees {
    trees: Vec<Tree>,
    proc: PathBuf,
}

impl Trees {
    /// Those that are mounted.
    pub(super) fn find(proc: &Path) -> Self {
        let mountinfo = fs::read_to_string(proc.join("self/mountinfo")).unwrap_or_default();
        Self { trees: trees(&mountinfo), proc: proc.to_owned() }
    }

    /// The control group of the container that a process is of, where it can be limited here.
    pub(super) fn container(&self, pid: u32) -> Option<(PathBuf, Owner)> {
        let text = fs::read(self.proc.join(pid.to_string()).join("cgroup")).ok()?;
        let (owner, path) = container_path(&String::from_utf8_lossy(&text))?;
        let folders = self.trees.iter().filter_map(|tree| tree.folder(&path));
        let folder = folders.into_iter().find(|folder| folder.join("memory.high").exists())?;
        Some((folder, owner))
    }

    /// The containers whose `memory.high` an agent has set, known by its value.
    pub(super) fn set(&self) -> Vec<(PathBuf, Owner, Bytes)> {
        let mut found = Vec::new();
        for tree in &self.trees {
            let mut rest = vec![(tree.at.clone(), tree.root.trim_end_matches('/').to_owned(), 0)];
            let mut seen = 0;
            while let Some((folder, path, depth)) = rest.pop() {
                if let Some((owner, _)) = container_of(&path) {
                    let high = read_limit(&folder, "memory.high").ok().flatten();
                    let ours = read_limit(&folder, "memory.max").ok().flatten().and_then(high_below);
                    found.extend(high.filter(|_| high == ours).map(|high| (folder, owner, high)));
                    continue;
                }
                let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
                let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
                for entry in folders.filter(|_| depth < DEEPEST) {
                    seen += 1;
                    if seen <= MOST {
                        let name = entry.file_name();
                        rest.push((entry.path(), format!("{path}/{}", name.to_string_lossy()), depth + 1));
                    }
                }
            }
            if !found.is_empty() {
                break;
            }
        }
        found
    }

    /// What is free in the machine's swap.
    fn swap(&self) -> Bytes {
        swap_free(&fs::read_to_string(self.proc.join("meminfo")).unwrap_or_default())
    }

    /// What a container uses.
    ///
    /// # Errors
    /// [`is_gone`] tells those of a container that has ended.
    pub(super) fn read(&self, folder: &Path) -> io::Result<Figures> {
        let number = |name: &str| read_limit(folder, name);
        let (max, high) = (number("memory.max")?, number("memory.high")?);
        let current = number("memory.current")?.unwrap_or_default();
        // Of a kernel without swap there are no such files.
        let used = number("memory.swap.current").ok().flatten().unwrap_or_default();
        let swap = match number("memory.swap.max") {
            Ok(Some(most)) => Bytes(most.0.saturating_sub(used.0)).min(self.swap()),
            Ok(None) => self.swap(),
            Err(_) => Bytes(0),
        };
        let reclaimable = reclaimable(&fs::read_to_string(folder.join("memory.stat"))?, swap);
        Ok(Figures { max, high, current, reclaimable })
    }
}

impl Tree {
    fn folder(&self, path: &str) -> Option<PathBuf> {
        let below = path.strip_prefix(self.root.trim_end_matches('/'))?.strip_prefix('/')?;
        // Of a control group outside this namespace it is not known where it is.
        let plain = below.split('/').all(|component| component != "..");
        plain.then(|| self.at.join(below))
    }
}

/// The trees of `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`).
fn trees(mountinfo: &str) -> Vec<Tree> {
    let tree = |line: &str| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, at, options) = (fields.next()?, fields.next()?, fields.next()?);
        let fits = kind.split(' ').next() == Some("cgroup2") && options.split(',').any(|option| option == "rw");
        // Where a path has spaces the kernel writes backslashes.
        (fits && !at.contains('\\')).then(|| Tree { at: at.into(), root: root.to_owned() })
    };
    mountinfo.lines().filter_map(tree).collect()
}

fn read_limit(folder: &Path, name: &str) -> io::Result<Option<Bytes>> {
    let text = fs::read_to_string(folder.join(name))?;
    limit(&text).map_err(|text| io::Error::new(io::ErrorKind::InvalidData, format!("{name} is {text:?}")))
}

/// Sets a container's `memory.high`, unless it is not any more what it was, or its `memory.max` is another: then somebody else sees to it.
///
/// The kernel reclaims what is above it before this comes back.
pub(super) fn change(folder: &Path, from: Option<Bytes>, to: Option<Bytes>) -> io::Result<()> {
    let is = read_limit(folder, "memory.high")?;
    let fits = to.is_none() || read_limit(folder, "memory.max")?.and_then(high_below) == to;
    if is != from || !fits {
        return Ok(());
    }
    fs::write(folder.join("memory.high"), to.map_or_else(|| "max".to_owned(), |bytes| bytes.0.to_string()))
}

/// Whether an error says that the container has ended.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::NODEV.raw_os_error())
}

/// Takes back whatever an agent has set: none is there to end anybody, and a container that is slowed down for ever is worse off than one that is
/// killed.
pub(crate) fn forget(proc: &Path) {
    for (folder, owner, high) in Trees::find(proc).set() {
        if let Err(error) = change(&folder, Some(high), None)
            && !is_gone(&error)
        {
            tracing::warn!(%error, pod = owner.pod, group = %folder.display(), "memory.high stays set");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "kubepods/burstable/pod6f1d2c3b-4a59-4e68-8f77-0123456789ab";
    const IDS: [char; 3] = ['a', 'b', 'c'];

    fn group(root: &Path, id: char, files: &[(&str, &str)]) -> PathBuf {
        let folder = root.join(POD).join(id.to_string().repeat(64));
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
        folder
    }

    /// A machine whose control groups are files.
    fn machine(mount: impl Fn(&Path) -> String) -> (tempfile::TempDir, Trees) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("proc/self")).unwrap();
        fs::write(folder.path().join("proc/self/mountinfo"), mount(&folder.path().join("cgroup"))).unwrap();
        let trees = Trees::find(&folder.path().join("proc"));
        (folder, trees)
    }

    fn line(at: &Path) -> String {
        format!("30 23 0:26 / {} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n", at.display())
    }

    #[test]
    fn trees_are_those_of_version_2_that_can_be_written() {
        let info = "25 30 0:23 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs rw\n\
                    26 25 0:24 / /sys/fs/cgroup/unified ro,nosuid shared:9 master:3 - cgroup2 cgroup2 rw\n\
                    27 25 0:25 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                    28 25 0:26 /a /with\\040space rw - cgroup2 cgroup2 rw\n\
                    29 25 0:26 /node1 /host/sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\nnonsense\n";
        let node = Tree { at: "/host/sys/fs/cgroup".into(), root: "/node1".into() };
        assert_eq!(trees(info), std::slice::from_ref(&node));
        assert_eq!(node.folder("/node1/kubepods/x"), Some("/host/sys/fs/cgroup/kubepods/x".into()));
        for outside in ["/node10/kubepods", "/kubepods/x", "/node1/../node2", "/node1"] {
            assert_eq!(node.folder(outside), None, "{outside}");
        }
        let whole = Tree { at: "/c".into(), root: "/".into() };
        assert_eq!(whole.folder("/kubepods/x"), Some("/c/kubepods/x".into()));
        assert_eq!(whole.folder("/../kubepods/x"), None);
    }

    #[test]
    fn a_process_has_the_group_of_its_container_where_that_has_the_controller() {
        let (folder, trees) = machine(line);
        let proc = folder.path().join("proc/7");
        fs::create_dir(&proc).unwrap();
        fs::write(proc.join("cgroup"), format!("0::/{POD}/{}/below\n", "a".repeat(64))).unwrap();
        let at = group(&folder.path().join("cgroup"), 'a', &[]);
        assert_eq!(trees.container(7), None, "a hybrid machine has another memory controller");
        fs::write(at.join("memory.high"), "max\n").unwrap();
        let (found, owner) = trees.container(7).unwrap();
        assert_eq!((found, owner.container), (at, Some("a".repeat(64))));
        assert_eq!(trees.container(8), None);
    }

    #[test]
    fn what_is_used_and_may_be_is_read() {
        let (folder, trees) = machine(line);
        let at = group(
            &folder.path().join("cgroup"),
            'a',
            &[
                ("memory.max", "1000\n"),
                ("memory.high", "max\n"),
                ("memory.current", "900\n"),
                ("memory.stat", "anon 600\nactive_file 200\n"),
            ],
        );
        let figures = Figures { max: Some(Bytes(1000)), high: None, current: Bytes(900), reclaimable: Bytes(200) };
        assert_eq!(trees.read(&at).unwrap(), figures);
        // The container's part of swap, and the machine's.
        for (most, used, free, reclaimable) in
            [("max", "0", 0, 200), ("max", "0", 1, 800), ("50", "20", 1, 230), ("0", "0", 1, 200), ("50", "60", 1, 200)]
        {
            fs::write(at.join("memory.swap.max"), most).unwrap();
            fs::write(at.join("memory.swap.current"), used).unwrap();
            fs::write(folder.path().join("proc/meminfo"), format!("SwapFree: {free} kB\n")).unwrap();
            assert_eq!(trees.read(&at).unwrap().reclaimable, Bytes(reclaimable), "{most} {used} {free}");
        }
        fs::write(at.join("memory.max"), "junk").unwrap();
        let error = trees.read(&at).unwrap_err();
        assert!(!is_gone(&error), "{error}");
        fs::remove_dir_all(&at).unwrap();
        assert!(is_gone(&trees.read(&at).unwrap_err()));
    }

    #[test]
    fn what_an_agent_has_set_is_found_by_its_value_and_nobody_elses_is_touched() {
        let (folder, trees) = machine(line);
        let root = folder.path().join("cgroup");
        let limit = Bytes::mib(1000);
        let ours = high_below(limit).unwrap().0.to_string();
        let highs = [ours.as_str(), "max", "900000"];
        let groups = IDS
            .iter()
            .zip(highs)
            .map(|(id, high)| group(&root, *id, &[("memory.max", &limit.0.to_string()), ("memory.high", high)]));
        let groups: Vec<PathBuf> = groups.collect();
        fs::create_dir_all(root.join("system.slice/a.service")).unwrap();
        let found = trees.set();
        assert_eq!(found.iter().map(|(folder, ..)| folder).collect::<Vec<_>>(), [&groups[0]]);
        assert_eq!(found[0].1.container, Some("a".repeat(64)));
        let read = |index: usize| fs::read_to_string(groups[index].join("memory.high")).unwrap();
        let value = high_below(limit);
        change(&groups[1], Some(Bytes(1)), value).unwrap();
        assert_eq!(read(1), "max", "it is not any more what it was");
        change(&groups[1], None, Some(Bytes::mib(1))).unwrap();
        assert_eq!(read(1), "max", "the limit is another meanwhile");
        change(&groups[1], None, value).unwrap();
        assert_eq!(read(1), ours);
        forget(&folder.path().join("proc"));
        assert_eq!([0, 1, 2].map(read), ["max", "max", "900000"]);
    }
}
