//! Reads, changes and watches the state directory. A lock protects the state file. Each change
//! replaces the file atomically, and increases a generation number.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock, inotify};

use crate::description::MachineDescription;
use crate::error::Error;
use crate::process::{PidResolver, Process};
use crate::state::{Fault, FaultEffect, State};

/// The default state directory. `$SIMGPU_STATE` can name another directory.
pub const DEFAULT_STATE_DIRECTORY: &str = "/var/lib/simgpu";
/// The environment variable that names the state directory.
pub const STATE_DIRECTORY_ENV: &str = "SIMGPU_STATE";

const STATE_FILE: &str = "state.json";
const LOCK_FILE: &str = "lock";
const GENERATION_FILE: &str = "generation";
pub(crate) const LEASES_DIRECTORY: &str = "leases";

/// A handle to a simulated machine. A handle is cheap to clone, and all clones share the parsed
/// state.
#[derive(Clone, Debug)]
pub struct Machine {
    inner: Arc<MachineHandle>,
}

/// The start of a simulated call: the effect of injected faults, and the state that the call uses.
#[derive(Clone, Debug)]
pub struct BegunCall {
    /// The code with which the call must fail, if a fault injects a code.
    pub code: Option<i32>,
    /// The state after all injected hangs.
    pub state: Arc<State>,
}

#[derive(Debug)]
struct MachineHandle {
    dir: PathBuf,
    cache: Mutex<Option<Arc<State>>>,
    /// The open file with the generation number. The file remains open, so that calls need no free
    /// file descriptor, like the calls of a real driver.
    generation: Mutex<Option<File>>,
    pids: PidResolver,
}

impl Machine {
    /// Opens the machine in `$SIMGPU_STATE`, or in `/var/lib/simgpu`.
    ///
    /// # Errors
    /// Returns an error if the directory contains no machine (`simgpu init` creates one) or cannot
    /// be read.
    pub fn open_default() -> Result<Self, Error> {
        let dir = std::env::var_os(STATE_DIRECTORY_ENV).filter(|d| !d.is_empty());
        Self::open(dir.map_or_else(|| PathBuf::from(DEFAULT_STATE_DIRECTORY), PathBuf::from))
    }

    /// Opens the machine in a directory.
    ///
    /// # Errors
    /// Returns an error if the directory contains no machine or cannot be read.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, Error> {
        let machine = Self::new_handle(dir.into());
        machine.snapshot()?;
        Ok(machine)
    }

    /// Creates a machine, and replaces an existing machine in the directory. All users may write to
    /// the directory and its files.
    ///
    /// # Errors
    /// Returns an error if the description is invalid, or the directory cannot be written.
    pub fn init(dir: impl Into<PathBuf>, description: &MachineDescription) -> Result<Self, Error> {
        let machine = Self::new_handle(dir.into());
        let mut fresh = description.state()?;
        let leases = machine.path(LEASES_DIRECTORY);
        fs::create_dir_all(&leases).map_err(io_error("create", &leases))?;
        for dir in [machine.dir(), &leases] {
            fs::set_permissions(dir, Permissions::from_mode(0o777)).map_err(io_error("set the permissions of", dir))?;
        }
        let _lock = machine.lock()?;
        // Continue the numbers of the old machine, so that its contexts and leases are not mistaken
        // for those of the new machine.
        if let Ok(old) = machine.load_state() {
            fresh.boot = old.boot + 1;
            fresh.last_id = old.last_id;
            fresh.generation = old.generation;
        }
        machine.store_state(fresh)?;
        Ok(machine)
    }

    fn new_handle(dir: PathBuf) -> Self {
        Self {
            inner: Arc::new(MachineHandle {
                dir,
                cache: Mutex::default(),
                generation: Mutex::default(),
                pids: PidResolver::default(),
            }),
        }
    }

    /// Returns the machine's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// Returns the current state. Parses the state file only if the generation number has changed
    /// since the last call.
    ///
    /// # Errors
    /// Returns an error if the directory no longer exists, or its state is malformed.
    pub fn snapshot(&self) -> Result<Arc<State>, Error> {
        // A writer increases the generation number before it replaces the file. Between these
        // steps, a reader reads the old file with the old number, so it never caches the old state
        // under the new number.
        let generation = self.generation()?;
        let mut cache = self.inner.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = cache.as_ref().filter(|s| s.generation == generation) {
            return Ok(Arc::clone(state));
        }
        let state = Arc::new(self.load_state()?);
        *cache = Some(Arc::clone(&state));
        Ok(state)
    }

    /// Returns the generation number of the latest change, even if the state file has not been
    /// replaced yet.
    fn generation(&self) -> Result<u64, Error> {
        let path = self.path(GENERATION_FILE);
        let mut open = self.inner.generation.lock().unwrap_or_else(PoisonError::into_inner);
        let is_current = |file: &File| file.metadata().is_ok_and(|found| found.nlink() > 0);
        let file = match open.take().filter(is_current) {
            Some(file) => file,
            None => File::open(&path).map_err(io_error("read", &path))?,
        };
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).map_err(io_error("read", &path))?;
        *open = Some(file);
        Ok(u64::from_le_bytes(bytes))
    }

    /// Changes the state atomically under the lock. If `change` fails, keeps the old state.
    ///
    /// # Errors
    /// Returns the error of `change`, or an error if the directory cannot be read or written.
    pub fn update<T, E: From<Error>>(&self, change: impl FnOnce(&mut State) -> Result<T, E>) -> Result<T, E> {
        let _lock = self.lock()?;
        let mut state = State::clone(&*self.snapshot()?);
        let result = change(&mut state)?;
        self.store_state(state)?;
        Ok(result)
    }

    /// Changes the state atomically under the lock, with a change that cannot fail.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read or written.
    pub fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> Result<T, Error> {
        self.update(|state| Ok(change(state)))
    }

    /// Waits until the generation number of the state is greater than `since`, or until the
    /// timeout. Returns the current generation number.
    ///
    /// # Errors
    /// Returns an error if the directory no longer exists, or its changes cannot be watched.
    pub fn wait_for_change(&self, since: u64, timeout: Duration) -> Result<u64, Error> {
        let deadline = Instant::now() + timeout;
        let now = self.snapshot()?.generation;
        if now > since || timeout.is_zero() {
            return Ok(now);
        }
        let dir = self.dir();
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)
            .map_err(|e| io_error("watch", dir)(e.into()))?;
        let events = inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::DELETE_SELF;
        inotify::add_watch(&watch, dir, events).map_err(|e| io_error("watch", dir)(e.into()))?;
        loop {
            let now = self.snapshot()?.generation;
            let left = deadline.saturating_duration_since(Instant::now());
            if now > since || left.is_zero() {
                return Ok(now);
            }
            let mut fds = [rustix::event::PollFd::new(&watch, rustix::event::PollFlags::IN)];
            let left = rustix::event::Timespec::try_from(left).ok();
            match rustix::event::poll(&mut fds, left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(io_error("watch", dir)(e.into())),
            }
            let mut drained = [0_u8; 1024];
            while matches!(rustix::io::read(&watch, &mut drained), Ok(n) if n > 0) {}
        }
    }

    /// Returns the contexts of all live processes.
    ///
    /// # Errors
    /// Returns an error if the directory no longer exists, or its state is malformed.
    pub fn processes(&self) -> Result<Vec<Process>, Error> {
        Ok(self.live_processes(&*self.snapshot()?))
    }

    /// Returns the contexts in `state` that belong to live processes. Within [`Machine::update`],
    /// no other process can add a context.
    #[must_use]
    pub fn live_processes(&self, state: &State) -> Vec<Process> {
        self.live_processes_where(state, |_| true)
    }

    /// Returns the contexts in `state` that `wanted` selects and that belong to live processes.
    /// Checks only the leases of the selected contexts.
    #[must_use]
    pub fn live_processes_where(&self, state: &State, wanted: impl Fn(&Process) -> bool) -> Vec<Process> {
        state.processes.iter().filter(|p| wanted(p) && self.is_alive(p)).cloned().collect()
    }

    /// Returns the PID of a context's owner in this process's namespace. Returns `None` if the
    /// owner is not visible in this namespace.
    #[must_use]
    pub fn visible_pid(&self, process: &Process) -> Option<u32> {
        self.inner.pids.resolve(&process.pid)
    }

    /// Returns whether the owner of a context is alive.
    pub(crate) fn is_alive(&self, process: &Process) -> bool {
        let held = process.lease.as_ref().is_none_or(|name| {
            let path = self.path(LEASES_DIRECTORY).join(name);
            File::open(path).is_ok_and(|f| flock(&f, FlockOperation::NonBlockingLockShared).is_err())
        });
        held && !process.pid.is_dead()
    }

    /// Removes the contexts of processes that have exited, and their lease files. Call this
    /// function only within [`Machine::update`].
    pub(crate) fn remove_exited_processes(&self, state: &mut State) {
        state.processes.retain(|p| {
            let alive = self.is_alive(p);
            if let (false, Some(lease)) = (alive, &p.lease) {
                // Ignore errors, because a file that remains has no effect.
                let _ = fs::remove_file(self.path(LEASES_DIRECTORY).join(lease));
            }
            alive
        });
    }

    /// Applies the injected faults for a call about a device, or for a call without a device. Waits
    /// if the call must hang. Returns the code with which the call must fail, if any. A fault for a
    /// GPU also applies to its MIG devices.
    ///
    /// # Errors
    /// Returns an error if the directory no longer exists, or its state is malformed.
    pub fn apply_faults(&self, call: &str, device: Option<&str>) -> Result<Option<i32>, Error> {
        self.begin_call(call, device).map(|begun| begun.code)
    }

    /// Applies faults as [`Machine::apply_faults`] does. Also returns the state after the last
    /// hang, so that a call without a fault reads the state only once.
    ///
    /// # Errors
    /// Returns an error if the directory no longer exists, or its state is malformed.
    pub fn begin_call(&self, call: &str, device: Option<&str>) -> Result<BegunCall, Error> {
        let mut done = Vec::new();
        loop {
            let state = self.snapshot()?;
            let matches =
                |f: &&Fault| !done.contains(&f.id) && f.remaining != Some(0) && f.applies_to(&state, call, device);
            let Some(fault) = state.faults.iter().find(matches) else { return Ok(BegunCall { code: None, state }) };
            done.push(fault.id);
            if fault.remaining.is_some() && !self.consume_fault(fault.id)? {
                continue;
            }
            match fault.effect {
                FaultEffect::Code(code) => return Ok(BegunCall { code: Some(code), state }),
                FaultEffect::Hang(seconds) => self.hang_call(fault.id, seconds)?,
            }
        }
    }

    /// Consumes one call of a fault. Returns false if other processes have consumed all calls, or
    /// if the fault no longer exists. After its last call, a fault with the effect `Hang` remains
    /// in the list with 0 remaining calls. The hanging calls continue when the fault is cleared.
    fn consume_fault(&self, id: u64) -> Result<bool, Error> {
        self.update(|state| {
            let Some(fault) = state.faults.iter_mut().find(|f| f.id == id) else { return Ok(false) };
            let Some(left) = fault.remaining.filter(|n| *n > 0) else { return Ok(fault.remaining.is_none()) };
            fault.remaining = Some(left - 1);
            if left == 1 && matches!(fault.effect, FaultEffect::Code(_)) {
                state.faults.retain(|f| f.id != id);
            }
            Ok(true)
        })
    }

    fn hang_call(&self, id: u64, seconds: Option<f64>) -> Result<(), Error> {
        let deadline = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).map(|d| Instant::now() + d);
        loop {
            let state = self.snapshot()?;
            let left = deadline.map_or(Duration::from_secs(3600), |d| d.saturating_duration_since(Instant::now()));
            if left.is_zero() || !state.faults.iter().any(|f| f.id == id) {
                return Ok(());
            }
            self.wait_for_change(state.generation, left)?;
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.inner.dir.join(name)
    }

    fn lock(&self) -> Result<File, Error> {
        let path = self.path(LOCK_FILE);
        let file = open_shared(&path, false).map_err(io_error("open", &path))?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(io_error("lock", &path)(e.into())),
            }
        }
    }

    fn load_state(&self) -> Result<State, Error> {
        let path = self.path(STATE_FILE);
        let bytes = fs::read(&path).map_err(io_error("read", &path))?;
        serde_json::from_slice(&bytes).map_err(|source| Error::Malformed { path, source })
    }

    /// Writes a state with the next generation number. The caller must hold the lock.
    fn store_state(&self, mut state: State) -> Result<(), Error> {
        state.generation = self.generation().unwrap_or(0).max(state.generation) + 1;
        let (path, fresh, number) = (self.path(STATE_FILE), self.path("state.json.new"), self.path(GENERATION_FILE));
        let text = serde_json::to_vec(&state).map_err(|source| Error::Malformed { path: path.clone(), source })?;
        // A killed writer of another user may have left a file. This process can remove that file,
        // but cannot open it.
        match fs::remove_file(&fresh) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(io_error("replace", &fresh)(e)),
            _ => {}
        }
        open_shared(&fresh, true).and_then(|mut f| f.write_all(&text)).map_err(io_error("write", &fresh))?;
        let raised = open_shared(&number, false).and_then(|f| f.write_all_at(&state.generation.to_le_bytes(), 0));
        raised.map_err(io_error("write", &number))?;
        fs::rename(&fresh, &path).map_err(io_error("replace", &path))?;
        *self.inner.cache.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(state));
        Ok(())
    }
}

/// Opens a file for reading and writing. Permits all users to write to a new file. The umask would
/// otherwise prevent this.
pub(crate) fn open_shared(path: &Path, new: bool) -> std::io::Result<File> {
    let create = || OpenOptions::new().read(true).write(true).create_new(true).mode(0o666).open(path);
    let file = if new {
        create()?
    } else {
        match OpenOptions::new().read(true).write(true).open(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => match create() {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                    return OpenOptions::new().read(true).write(true).open(path);
                }
                other => other?,
            },
            other => return other,
        }
    };
    file.set_permissions(Permissions::from_mode(0o666))?;
    Ok(file)
}

pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::description::GpuDescription;

    fn machine() -> (tempfile::TempDir, Machine) {
        let dir = tempfile::tempdir().unwrap();
        let gpus = vec![GpuDescription { model: "A30".to_owned(), count: Some(2), ..GpuDescription::default() }];
        let description = MachineDescription { name: "test".to_owned(), gpus, ..MachineDescription::default() };
        let machine = Machine::init(dir.path(), &description).unwrap();
        (dir, machine)
    }

    fn add_fault(state: &mut State, call: &str, effect: FaultEffect, remaining: Option<u32>) -> u64 {
        let id = state.next_id();
        state.faults.push(Fault { id, call: call.to_owned(), gpu: None, effect, remaining });
        id
    }

    #[test]
    fn no_change_of_concurrent_writers_is_lost() {
        let (dir, machine) = machine();
        let before = machine.snapshot().unwrap().last_id;
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let own = Machine::open(dir.path()).unwrap();
                    for _ in 0..50 {
                        own.change(State::next_id).unwrap();
                    }
                });
            }
        });
        assert_eq!(machine.snapshot().unwrap().last_id, before + 200);
    }

    #[test]
    fn a_state_is_parsed_again_exactly_after_a_change() {
        let (dir, machine) = machine();
        let other = Machine::open(dir.path()).unwrap();
        let first = machine.snapshot().unwrap();
        assert!(Arc::ptr_eq(&first, &machine.snapshot().unwrap()));
        other.change(|s| s.gpus[0].lost = true).unwrap();
        assert!(machine.snapshot().unwrap().gpus[0].lost);
    }

    #[test]
    fn a_failed_change_changes_nothing() {
        let (_dir, machine) = machine();
        let before = machine.snapshot().unwrap();
        let refused = machine.update(|s| {
            s.gpus.clear();
            Err::<(), _>(Error::Invalid("no".to_owned()))
        });
        assert!(refused.is_err());
        assert!(Arc::ptr_eq(&before, &machine.snapshot().unwrap()));
    }

    #[test]
    fn a_killed_writer_leaves_the_old_state_readable() {
        let (dir, machine) = machine();
        let now = machine.snapshot().unwrap().generation;
        fs::write(dir.path().join(GENERATION_FILE), (now + 1).to_le_bytes()).unwrap();
        fs::write(dir.path().join("state.json.new"), "{").unwrap();
        assert_eq!(machine.snapshot().unwrap().generation, now);
        machine.change(|s| s.gpus[0].lost = true).unwrap();
        assert!(Machine::open(dir.path()).unwrap().snapshot().unwrap().gpus[0].lost);
    }

    #[test]
    fn a_directory_without_a_machine_is_an_error() {
        let (dir, _machine) = machine();
        fs::write(dir.path().join(STATE_FILE), "{\"gpus\":3}").unwrap();
        assert!(matches!(Machine::open(dir.path()), Err(Error::Malformed { .. })));
        let none = tempfile::tempdir().unwrap();
        assert!(matches!(Machine::open(none.path()), Err(Error::Io { action: "read", .. })));
    }

    #[test]
    fn waiting_ends_at_a_change_or_the_timeout() {
        let (dir, machine) = machine();
        let seen = machine.snapshot().unwrap().generation;
        assert_eq!(machine.wait_for_change(seen, Duration::from_millis(1)).unwrap(), seen);
        let writer = Machine::open(dir.path()).unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| machine.wait_for_change(seen, Duration::from_secs(60)));
            writer.change(State::next_id).unwrap();
            assert_eq!(waiter.join().unwrap().unwrap(), seen + 1);
        });
    }

    #[test]
    fn an_old_handle_sees_a_new_machine_in_the_same_directory() {
        let (dir, machine) = machine();
        let old = machine.snapshot().unwrap();
        Machine::init(dir.path(), &MachineDescription { name: "next".to_owned(), ..MachineDescription::default() })
            .unwrap();
        let new = machine.snapshot().unwrap();
        assert_eq!((new.machine.as_str(), new.gpus.len()), ("next", 0));
        assert!(new.generation > old.generation && new.boot > old.boot && new.last_id >= old.last_id);
    }

    #[test]
    fn a_counted_fault_applies_to_that_number_of_calls() {
        let (_dir, machine) = machine();
        machine.change(|s| add_fault(s, "nvmlDeviceGetUUID", FaultEffect::Code(15), Some(2))).unwrap();
        let hit = |call| machine.apply_faults(call, None).unwrap();
        assert_eq!(hit("nvmlDeviceGetName"), None);
        assert_eq!(
            (hit("nvmlDeviceGetUUID"), hit("nvmlDeviceGetUUID"), hit("nvmlDeviceGetUUID")),
            (Some(15), Some(15), None)
        );
        assert!(machine.snapshot().unwrap().faults.is_empty());
    }

    #[test]
    fn a_fault_for_a_gpu_applies_to_its_calls_of_any_version() {
        let (_dir, machine) = machine();
        let uuids: Vec<String> = machine.snapshot().unwrap().gpus.iter().map(|g| g.uuid.clone()).collect();
        let change = |s: &mut State| {
            add_fault(s, "nvmlDeviceGetMemory*", FaultEffect::Code(1), None);
            add_fault(s, "nvmlDeviceGetPciInfo", FaultEffect::Code(2), None);
            s.faults[0].gpu = Some(uuids[1].clone());
            Ok::<_, Error>(())
        };
        machine.update(change).unwrap();
        let hit = |call, gpu: Option<usize>| machine.apply_faults(call, gpu.map(|g| uuids[g].as_str())).unwrap();
        assert_eq!(hit("nvmlDeviceGetMemoryInfo_v2", Some(1)), Some(1));
        assert_eq!(hit("nvmlDeviceGetMemoryInfo_v2", Some(0)), None);
        assert_eq!(hit("nvmlDeviceGetMemoryInfo_v2", None), None);
        assert_eq!(hit("nvmlDeviceGetPciInfo_v3", None), Some(2));
    }

    #[test]
    fn a_hanging_call_continues_when_the_fault_is_cleared() {
        let (dir, machine) = machine();
        let id = machine.change(|s| add_fault(s, "nvmlInit", FaultEffect::Hang(Some(60.0)), Some(1))).unwrap();
        thread::scope(|scope| {
            let hanging = scope.spawn(|| Machine::open(dir.path()).unwrap().begin_call("nvmlInit_v2", None));
            // The call hangs as soon as it has consumed the only call of the fault.
            let mut state = machine.snapshot().unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            while state.faults[0].remaining == Some(1) {
                let left = deadline.saturating_duration_since(Instant::now());
                assert!(!left.is_zero(), "the call did not start");
                machine.wait_for_change(state.generation, left).unwrap();
                state = machine.snapshot().unwrap();
            }
            assert!(!hanging.is_finished());
            assert_eq!(machine.apply_faults("nvmlInit_v2", None).unwrap(), None);
            let clear = |s: &mut State| {
                s.faults.retain(|f| f.id != id);
                s.gpus[0].lost = true;
            };
            machine.change(clear).unwrap();
            let begun = hanging.join().unwrap().unwrap();
            assert_eq!(begun.code, None);
            assert!(begun.state.gpus[0].lost, "the call uses the state after it hung");
        });
    }
}
