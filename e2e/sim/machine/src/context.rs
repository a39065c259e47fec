//! Manages contexts on devices: which processes may open a context, and how much memory each
//! context uses.

use std::fs::{self, File};

use rustix::fs::{FlockOperation, flock};

use crate::error::{ContextError, Error};
use crate::process::{self, PidRef, Process, ProcessKind};
use crate::state::{ComputeMode, DeviceRef, State};
use crate::store::{LEASES_DIRECTORY, Machine, io_error, open_shared};

/// The kind of context that a process opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextKind {
    /// A plain CUDA program.
    Compute,
    /// An MPS server.
    MpsServer,
    /// A graphics program.
    Graphics,
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Unused bytes.
    pub free: u64,
    /// Total bytes, as CUDA reports them.
    pub total: u64,
}

/// A context on a device. The context closes when it is dropped, or when its process ends for any
/// reason.
#[derive(Debug)]
pub struct Context {
    machine: Machine,
    id: u64,
    boot: u64,
    device: String,
    lease: String,
    // Locked while the context is open, so that other processes can detect that this process is
    // alive.
    lock: File,
}

impl Machine {
    /// Opens a context of this process on a GPU or MIG device. The context uses `overhead` bytes of
    /// the device's memory.
    ///
    /// `EXCLUSIVE_PROCESS` allows contexts of one process only. `PROHIBITED` allows no context. On
    /// a GPU in MIG mode, open a context on a MIG device instead.
    ///
    /// # Errors
    /// Returns an error if programs cannot use the device, if its compute mode does not allow the
    /// context, or if too little memory is free.
    pub fn open_context(&self, device: &str, kind: ContextKind, overhead: u64) -> Result<Context, ContextError> {
        let kind = match kind {
            ContextKind::Compute => ProcessKind::Compute,
            ContextKind::MpsServer => ProcessKind::MpsServer,
            ContextKind::Graphics => ProcessKind::Graphics,
        };
        self.register_context(device, kind, PidRef::of_this_process(), process::own_process_name(), overhead)
    }

    /// Registers a client of this process, which must be an MPS server. `pid` is the client's PID
    /// in this process's namespace, as `SCM_CREDENTIALS` reports it. The compute mode does not
    /// apply, because the client uses the server's context.
    ///
    /// # Errors
    /// Returns an error if programs cannot use the device, or if too little memory is free.
    pub fn register_client(&self, device: &str, pid: u32, used: u64) -> Result<Context, ContextError> {
        self.register_context(device, ProcessKind::MpsClient, PidRef::of_pid(pid), process::process_name(pid), used)
    }

    fn register_context(
        &self,
        device: &str,
        kind: ProcessKind,
        pid: PidRef,
        name: String,
        used: u64,
    ) -> Result<Context, ContextError> {
        self.update(|state| {
            self.remove_exited_processes(state);
            let found = usable_device(state, device)?;
            check_compute_mode_permits(state, &found, kind, pid)?;
            check_memory_fits(state, &found, used)?;
            let (id, boot, device) = (state.next_id(), state.boot, device.to_owned());
            let lease = format!("{boot}-{id}");
            let path = self.path(LEASES_DIRECTORY).join(&lease);
            let file = open_shared(&path, false).map_err(io_error("create", &path))?;
            flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|e| io_error("lock", &path)(e.into()))?;
            let entry = Process { id, kind, device: device.clone(), used, pid, name, lease: Some(lease.clone()) };
            state.processes.push(entry);
            Ok(Context { machine: self.clone(), id, boot, device, lease, lock: file })
        })
    }
}

impl Context {
    /// Returns the device's UUID.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Allocates `bytes` bytes of device memory.
    ///
    /// # Errors
    /// Returns an error if too little memory is free, if programs cannot use the device, or if the
    /// context no longer exists.
    pub fn allocate(&self, bytes: u64) -> Result<(), ContextError> {
        self.change(|state, entry| {
            check_memory_fits(state, &usable_device(state, &state.processes[entry].device)?, bytes)?;
            state.processes[entry].used += bytes;
            Ok(())
        })
    }

    /// Frees `bytes` bytes of device memory, or less if the context uses less.
    ///
    /// # Errors
    /// Returns an error if programs cannot use the device, or if the context no longer exists.
    pub fn free(&self, bytes: u64) -> Result<(), ContextError> {
        self.change(|state, entry| {
            let used = &mut state.processes[entry].used;
            *used = used.saturating_sub(bytes);
            Ok(())
        })
    }

    /// Returns the number of bytes that this context uses, including its overhead.
    ///
    /// # Errors
    /// Returns an error if the context no longer exists.
    pub fn used_bytes(&self) -> Result<u64, ContextError> {
        let state = self.machine.snapshot()?;
        Ok(state.processes[self.process_index(&state)?].used)
    }

    /// Returns the free and total memory of the device.
    ///
    /// # Errors
    /// Returns an error if programs cannot use the device, or if the context no longer exists.
    pub fn memory(&self) -> Result<MemoryInfo, ContextError> {
        let state = self.machine.snapshot()?;
        self.process_index(&state)?;
        let device = usable_device(&state, &self.device)?;
        let total = device.cuda_memory_bytes();
        Ok(MemoryInfo { free: total.saturating_sub(state.used_bytes(&self.machine.processes()?, &self.device)), total })
    }

    /// Checks that the context still exists, and that programs can use its device.
    ///
    /// # Errors
    /// Returns an error if the context no longer exists, or if programs cannot use its device. A
    /// real CUDA call on the context would return this error.
    pub fn check_exists(&self) -> Result<(), ContextError> {
        let state = self.machine.snapshot()?;
        self.process_index(&state)?;
        usable_device(&state, &self.device).map(drop)
    }

    fn change(&self, change: impl FnOnce(&mut State, usize) -> Result<(), ContextError>) -> Result<(), ContextError> {
        self.machine.update(|state| {
            self.machine.remove_exited_processes(state);
            let entry = self.process_index(state)?;
            usable_device(state, &self.device)?;
            change(state, entry)
        })
    }

    fn process_index(&self, state: &State) -> Result<usize, ContextError> {
        let here = |p: &Process| p.id == self.id && state.boot == self.boot;
        state.processes.iter().position(here).ok_or(ContextError::Destroyed)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Unlock explicitly: a forked child inherits the lock, so closing the file is not enough.
        let _ = flock(&self.lock, FlockOperation::Unlock);
        // Ignore errors, because other processes ignore contexts with unlocked leases.
        let _ = self.machine.update::<_, Error>(|state| {
            if state.boot == self.boot {
                state.processes.retain(|p| p.id != self.id);
            }
            Ok(())
        });
        let _ = fs::remove_file(self.machine.path(LEASES_DIRECTORY).join(&self.lease));
    }
}

/// Returns the device with this UUID. Fails if programs cannot use the device: the driver is not
/// loaded, or the device does not exist, is lost or is a GPU in MIG mode.
fn usable_device<'a>(state: &'a State, uuid: &str) -> Result<DeviceRef<'a>, ContextError> {
    if !state.driver.present {
        return Err(ContextError::NoDevice("the driver is not loaded".to_owned()));
    }
    let device = state.device(uuid).ok_or_else(|| ContextError::InvalidDevice(uuid.to_owned()))?;
    if device.gpu.lost {
        return Err(ContextError::Lost(device.gpu.uuid.clone()));
    }
    if device.gpu.mig && device.mig.is_none() {
        return Err(ContextError::NoDevice(format!("GPU {uuid} is in MIG mode")));
    }
    Ok(device)
}

/// Checks that the device's compute mode permits a context of this process. `state` must contain
/// only live processes.
fn check_compute_mode_permits(
    state: &State,
    device: &DeviceRef<'_>,
    kind: ProcessKind,
    pid: PidRef,
) -> Result<(), ContextError> {
    let refuse = |reason: String| Err(ContextError::Unavailable { device: device.uuid().to_owned(), reason });
    match device.gpu.compute_mode {
        _ if kind == ProcessKind::MpsClient => Ok(()),
        ComputeMode::Default => Ok(()),
        ComputeMode::Prohibited => refuse("compute mode is PROHIBITED".to_owned()),
        ComputeMode::ExclusiveProcess => {
            let others = |p: &&Process| p.device == device.uuid() && p.kind != ProcessKind::MpsClient && p.pid != pid;
            match state.processes.iter().find(others) {
                Some(p) => {
                    refuse(format!("compute mode is EXCLUSIVE_PROCESS and {} (PID {}) uses it", p.name, p.pid.pid))
                }
                None => Ok(()),
            }
        }
    }
}

/// Checks that `wanted` bytes are free on the device. `state` must contain only live processes.
fn check_memory_fits(state: &State, device: &DeviceRef<'_>, wanted: u64) -> Result<(), ContextError> {
    let free = device.cuda_memory_bytes().saturating_sub(state.used_bytes(&state.processes, device.uuid()));
    if wanted > free { Err(ContextError::OutOfMemory { wanted, free }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;
    use crate::description::{GpuDescription, MachineDescription};

    fn machine(model: &str) -> (tempfile::TempDir, Machine, String) {
        let dir = tempfile::tempdir().unwrap();
        let gpus = vec![GpuDescription { model: model.to_owned(), ..GpuDescription::default() }];
        let machine = Machine::init(
            dir.path(),
            &MachineDescription { name: "test".to_owned(), gpus, ..MachineDescription::default() },
        );
        let machine = machine.unwrap();
        let uuid = machine.snapshot().unwrap().gpus[0].uuid.clone();
        (dir, machine, uuid)
    }

    /// A child process that is killed at the end of the test.
    struct OtherProcess(Child);

    impl OtherProcess {
        fn new() -> Self {
            Self(Command::new("sleep").arg("600").spawn().unwrap())
        }

        fn context(&self, machine: &Machine, device: &str, kind: ProcessKind) -> Result<Context, ContextError> {
            machine.register_context(device, kind, PidRef::of_pid(self.0.id()), "other".to_owned(), 1 << 20)
        }
    }

    impl Drop for OtherProcess {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    fn set_compute_mode(machine: &Machine, mode: ComputeMode) {
        machine.change(|s| s.gpus[0].compute_mode = mode).unwrap();
    }

    #[test]
    fn an_exclusive_gpu_accepts_one_process_and_its_mps_clients() {
        let (_dir, machine, gpu) = machine("H200-141");
        set_compute_mode(&machine, ComputeMode::ExclusiveProcess);
        let other = OtherProcess::new();
        let server = machine.open_context(&gpu, ContextKind::MpsServer, 66 << 20).unwrap();
        let second = machine.open_context(&gpu, ContextKind::Compute, 0).unwrap();
        let refused = other.context(&machine, &gpu, ProcessKind::Compute).unwrap_err();
        assert!(matches!(&refused, ContextError::Unavailable { .. }), "{refused}");
        assert_eq!(refused.cuda_code(), 46);
        let client = machine.register_client(&gpu, other.0.id(), 274 << 20).unwrap();
        drop((server, second));
        // An MPS client does not count as a process that uses the GPU.
        other.context(&machine, &gpu, ProcessKind::Compute).unwrap();
        drop(client);
    }

    #[test]
    fn a_prohibited_gpu_accepts_no_process() {
        let (_dir, machine, gpu) = machine("T4");
        set_compute_mode(&machine, ComputeMode::Prohibited);
        let refused = machine.open_context(&gpu, ContextKind::MpsServer, 0).unwrap_err();
        assert!(matches!(refused, ContextError::Unavailable { .. }));
    }

    #[test]
    fn used_memory_is_the_sum_over_all_processes_and_is_freed_on_exit() {
        let (_dir, machine, gpu) = machine("H200-141");
        let other = OtherProcess::new();
        let mib = |context: &Context| context.memory().unwrap().free >> 20;
        let mine = machine.open_context(&gpu, ContextKind::Compute, 500 << 20).unwrap();
        assert_eq!(mine.memory().unwrap().total >> 20, 143_155);
        let theirs = other.context(&machine, &gpu, ProcessKind::Compute).unwrap();
        mine.allocate(100_000 << 20).unwrap();
        assert_eq!(mib(&theirs), 143_155 - 500 - 1 - 100_000);
        let refused = theirs.allocate(50_000 << 20).unwrap_err();
        assert_eq!(refused.cuda_code(), 2);
        let refused = machine.open_context(&gpu, ContextKind::Compute, 50_000 << 20).unwrap_err();
        assert!(matches!(refused, ContextError::OutOfMemory { .. }), "no memory for the context itself");
        mine.free(99_999 << 20).unwrap();
        theirs.allocate(50_000 << 20).unwrap();
        assert_eq!(theirs.used_bytes().unwrap() >> 20, 50_001);
        drop(theirs);
        assert_eq!(mib(&mine), 143_155 - 501);
    }

    #[test]
    fn a_killed_process_frees_its_memory() {
        let (_dir, machine, gpu) = machine("T4");
        set_compute_mode(&machine, ComputeMode::ExclusiveProcess);
        let other = OtherProcess::new();
        let held = other.context(&machine, &gpu, ProcessKind::Compute).unwrap();
        assert_eq!(machine.processes().unwrap().len(), 1);
        drop(other);
        assert!(machine.processes().unwrap().is_empty());
        machine.open_context(&gpu, ContextKind::Compute, 0).unwrap();
        assert!(matches!(held.check_exists(), Err(ContextError::Destroyed)));
    }

    #[test]
    fn an_invisible_process_is_alive_while_its_lease_is_locked() {
        let (_dir, machine, gpu) = machine("T4");
        set_compute_mode(&machine, ComputeMode::ExclusiveProcess);
        let elsewhere = PidRef { pid: 1, namespace: 1, start: 1 };
        let context = machine.register_context(&gpu, ProcessKind::Compute, elsewhere, "pod".to_owned(), 0).unwrap();
        assert_eq!(machine.processes().unwrap().len(), 1);
        assert!(machine.open_context(&gpu, ContextKind::Compute, 0).is_err());
        // When the owner is killed, the kernel only releases the lock.
        flock(&context.lock, FlockOperation::Unlock).unwrap();
        assert!(machine.processes().unwrap().is_empty());
        machine.open_context(&gpu, ContextKind::Compute, 0).unwrap();
    }

    #[test]
    fn a_lost_gpu_fails_new_and_open_contexts() {
        let (_dir, machine, gpu) = machine("T4");
        let context = machine.open_context(&gpu, ContextKind::Compute, 0).unwrap();
        machine.change(|s| s.gpus[0].lost = true).unwrap();
        assert!(matches!(context.check_exists(), Err(ContextError::Lost(_))));
        assert!(matches!(machine.open_context(&gpu, ContextKind::Compute, 0), Err(ContextError::Lost(_))));
        assert!(matches!(machine.open_context("GPU-x", ContextKind::Compute, 0), Err(ContextError::InvalidDevice(_))));
    }

    #[test]
    fn a_gpu_in_mig_mode_is_usable_through_its_instances() {
        let (_dir, machine, gpu) = machine("A100-40");
        let uuid = machine.update(|s| {
            let model = s.model(&s.gpus[0])?.clone();
            let gpu = &mut s.gpus[0];
            gpu.set_mig_mode(&model, true, false).unwrap();
            let gi = gpu.create_gpu_instance(&model, 9, None).unwrap();
            gpu.create_compute_instance(&model, gi, 2, None).unwrap();
            Ok::<_, Error>(gpu.instances[0].compute[0].uuid.clone())
        });
        let uuid = uuid.unwrap();
        assert!(matches!(machine.open_context(&gpu, ContextKind::Compute, 0), Err(ContextError::NoDevice(_))));
        let context = machine.open_context(&uuid, ContextKind::Compute, 1 << 30).unwrap();
        assert_eq!(context.memory().unwrap(), MemoryInfo { free: (20_096 - 1024) << 20, total: 20_096 << 20 });
        let state = machine.snapshot().unwrap();
        assert_eq!(state.device(&uuid).unwrap().sms(), 42);
        assert_eq!(state.used_bytes(&machine.processes().unwrap(), &gpu), 1 << 30);
        assert_eq!(state.visible_devices(None)[0].uuid(), uuid);
    }

    #[test]
    fn a_reboot_ends_contexts_and_dropping_an_old_context_does_not_end_a_new_context() {
        let (_dir, machine, gpu) = machine("T4");
        let old = machine.open_context(&gpu, ContextKind::Compute, 0).unwrap();
        machine.change(State::reboot).unwrap();
        assert!(matches!(old.allocate(1), Err(ContextError::Destroyed)));
        let new = machine.open_context(&gpu, ContextKind::Compute, 0).unwrap();
        drop(old);
        new.check_exists().unwrap();
        assert_eq!(machine.processes().unwrap().len(), 1);
    }
}
