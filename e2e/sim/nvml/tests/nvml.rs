//! Tests the built library, which nvml-wrapper loads like the real library.
//!
//! A process can have only one NVML and one machine, so each test runs itself in a separate process
//! with its own machine.

// The tests create MIG instances with the raw functions of nvml-wrapper-sys, because nvml-wrapper
// has no functions for this.
#![allow(unsafe_code)]
// Tests fail by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{
    Clock, ComputeMode, EccCounter, MemoryError, TemperatureSensor, TopologyLevel,
};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::event::EventData;
use nvml_wrapper::structs::device::MigMode;
use nvml_wrapper::{Device, EventSet, Nvml};
use nvml_wrapper_sys::bindings as sys;
use sim_machine::{
    ContextKind, EventKind, Fault, FaultEffect, GpuDescription, Machine, MachineDescription, MachineTopology,
    STATE_DIRECTORY_ENV, State,
};

/// Runs the body of a test in a separate process, on a machine with these GPUs.
fn run_in_separate_process(name: &str, gpus: &[&str], body: impl FnOnce(&Machine)) {
    run_on_linked_gpus(name, gpus, None, body);
}

/// Runs the body of a test in a separate process, on a machine with these GPUs and this topology.
fn run_on_linked_gpus(name: &str, gpus: &[&str], topology: Option<MachineTopology>, body: impl FnOnce(&Machine)) {
    if std::env::var_os(STATE_DIRECTORY_ENV).is_some() {
        return body(&Machine::open_default().unwrap());
    }
    let dir = tempfile::tempdir().unwrap();
    let numa_node = if topology.is_some() { None } else { Some(1) };
    let gpu = |m: &&str| GpuDescription { model: (*m).to_owned(), numa_node, ..GpuDescription::default() };
    let gpus = gpus.iter().map(gpu).collect();
    let name_of_machine = "test".to_owned();
    let description = MachineDescription { name: name_of_machine, gpus, topology, ..MachineDescription::default() };
    Machine::init(dir.path(), &description).unwrap();
    let output = test_command(name).env(STATE_DIRECTORY_ENV, dir.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// Returns a command that runs one test of this program.
fn test_command(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--include-ignored", "--nocapture"]);
    command
}

/// A process that uses GPU memory until it is killed.
struct GpuUser(Child);

impl GpuUser {
    fn new(machine: &Machine, device: &str) -> Self {
        let before = machine.processes().unwrap().len();
        let mut command = test_command("hold_gpu_memory");
        let child = command.env("HOLD", device).stdout(Stdio::null()).spawn().unwrap();
        wait_until(machine, |_| machine.processes().unwrap().len() > before);
        Self(child)
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for GpuUser {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until the state satisfies a condition.
fn wait_until(machine: &Machine, done: impl Fn(&State) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let state = machine.snapshot().unwrap();
        if done(&state) {
            return;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "timed out waiting for the condition");
        machine.wait_for_change(state.generation, left).unwrap();
    }
}

#[test]
#[ignore = "started by the tests that need a second process"]
fn hold_gpu_memory() {
    let device = std::env::var("HOLD").unwrap();
    let machine = Machine::open_default().unwrap();
    let _context = machine.open_context(&device, ContextKind::Compute, 300 << 20).unwrap();
    loop {
        std::thread::park();
    }
}

fn library_path() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libnvidia_ml.so")
}

fn load() -> Result<Nvml, NvmlError> {
    Nvml::builder().lib_path(library_path().as_os_str()).init()
}

fn nvml() -> Nvml {
    load().unwrap()
}

fn change_state(machine: &Machine, change: impl FnOnce(&mut State)) {
    machine.change(change).unwrap();
}

/// Calls a raw function of the library.
macro_rules! raw {
    ($nvml:expr, $name:ident($($argument:expr),*)) => {
        // SAFETY: the arguments are handles, numbers, and pointers. The library refuses invalid
        // handles and null pointers. All other pointers are to variables that outlive the call and
        // have the size that NVML requires.
        unsafe { $nvml.lib().$name($($argument),*) }
    };
}

fn raw_handle(device: &Device<'_>) -> sys::nvmlDevice_t {
    // SAFETY: the handle is passed only to the library that returned it, and this library remains
    // loaded.
    unsafe { device.handle() }
}

fn create_gpu_instance(
    nvml: &Nvml,
    gpu: &Device<'_>,
    profile: u32,
    at: Option<(u32, u32)>,
) -> Result<sys::nvmlGpuInstance_t, u32> {
    let mut made = std::ptr::null_mut();
    let code = match at {
        None => raw!(nvml, nvmlDeviceCreateGpuInstance(raw_handle(gpu), profile, &raw mut made)),
        Some((start, size)) => {
            let at = sys::nvmlGpuInstancePlacement_t { start, size };
            raw!(nvml, nvmlDeviceCreateGpuInstanceWithPlacement(raw_handle(gpu), profile, &raw const at, &raw mut made))
        }
    };
    if code == 0 { Ok(made) } else { Err(code) }
}

fn create_compute_instance(
    nvml: &Nvml,
    gi: sys::nvmlGpuInstance_t,
    profile: u32,
) -> Result<sys::nvmlComputeInstance_t, u32> {
    let mut made = std::ptr::null_mut();
    match raw!(nvml, nvmlGpuInstanceCreateComputeInstance(gi, profile, &raw mut made)) {
        0 => Ok(made),
        code => Err(code),
    }
}

fn set_mig_mode(nvml: &Nvml, gpu: &Device<'_>, on: u32) -> (u32, u32) {
    let mut activation = 99;
    let code = raw!(nvml, nvmlDeviceSetMigMode(raw_handle(gpu), on, &raw mut activation));
    (code, activation)
}

#[test]
fn nvml_lists_all_gpus_with_their_properties() {
    run_in_separate_process("nvml_lists_all_gpus_with_their_properties", &["H200-141", "T4", "L4", "A30"], |machine| {
        let nvml = nvml();
        let state = machine.snapshot().unwrap();
        assert_eq!(nvml.device_count().unwrap(), 4);
        assert_eq!(nvml.sys_driver_version().unwrap(), "580.159.04");
        assert_eq!(nvml.sys_nvml_version().unwrap(), "13.580.159.04");
        assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 13000);
        let sms = [132, 40, 58, 56];
        for (index, sms) in (0..).zip(sms) {
            let device = nvml.device_by_index(index).unwrap();
            let known = &state.gpus[index as usize];
            assert_eq!(device.uuid().unwrap(), known.uuid);
            assert_eq!(device.name().unwrap(), known.model);
            assert_eq!((device.index().unwrap(), device.minor_number().unwrap()), (index, index));
            let per_sm = match device.cuda_compute_capability().unwrap() {
                c if (c.major, c.minor) == (7, 5) || (c.major, c.minor) == (8, 0) => 64,
                _ => 128,
            };
            assert_eq!(device.num_cores().unwrap() / per_sm, sms);
            assert_eq!(device.memory_affinity(1, 0.try_into().unwrap()).unwrap(), [0b10]);
            let pci = device.pci_info().unwrap();
            assert_eq!(pci.bus_id, known.pci.bus_id());
            assert_eq!(nvml.device_by_pci_bus_id(pci.bus_id).unwrap().index().unwrap(), index);
            assert_eq!(nvml.device_by_uuid(known.uuid.as_str()).unwrap().index().unwrap(), index);
            assert!(device.power_usage().unwrap() <= device.enforced_power_limit().unwrap());
            assert!(device.temperature(TemperatureSensor::Gpu).unwrap() < 90);
        }
        let h200 = nvml.device_by_index(0).unwrap();
        let memory = h200.memory_info().unwrap();
        assert_eq!((memory.total >> 20, memory.free >> 20, memory.used), (143_771, 143_155, 0));
        assert_eq!(memory.total, memory.free + memory.reserved);
        assert_eq!(h200.mig_mode().unwrap(), MigMode { current: 0, pending: 0 });
        assert_eq!(h200.mig_device_count().unwrap(), 0);
        let none = NvmlError::NotSupported;
        assert_eq!(nvml.device_by_index(1).unwrap().mig_mode().unwrap_err().to_string(), none.to_string());
        assert!(matches!(h200.numa_node_id(), Err(NvmlError::NotSupported)));
        assert!(matches!(nvml.device_by_index(4), Err(NvmlError::InvalidArg)));
        assert!(matches!(nvml.device_by_uuid("GPU-x"), Err(NvmlError::NotFound)));
    });
}

#[test]
fn gpus_report_nvlinks_and_paths_of_a_cube_mesh() {
    const NAME: &str = "gpus_report_nvlinks_and_paths_of_a_cube_mesh";
    run_on_linked_gpus(NAME, &["H100-80"; 8], Some(MachineTopology::HybridCubeMesh), |machine| {
        let nvml = nvml();
        let gpu = |index| nvml.device_by_index(index).unwrap();
        let level = |one, other| gpu(one).topology_common_ancestor(gpu(other)).unwrap();
        assert_eq!(level(0, 1), TopologyLevel::Single);
        assert_eq!(level(0, 2), TopologyLevel::HostBridge);
        assert_eq!(level(0, 4), TopologyLevel::System);
        assert!(matches!(gpu(0).topology_common_ancestor(gpu(0)), Err(NvmlError::NotSupported)));
        let peers = |index: u32| {
            let device = gpu(index);
            let active = (0..6).filter(|&link| device.link_wrapper_for(link).is_active().unwrap());
            active.map(|link| device.link_wrapper_for(link).remote_pci_info().unwrap().bus_id).collect::<Vec<_>>()
        };
        let expected = [1, 2, 3, 3, 4, 4].map(|other| gpu(other).pci_info().unwrap().bus_id);
        assert_eq!(peers(0), expected);
        assert!(matches!(gpu(0).link_wrapper_for(6).is_active(), Err(NvmlError::InvalidArg)));
        change_state(machine, |state| state.gpus[3].lost = true);
        assert_eq!(peers(0).len(), 4, "the links to a lost GPU are inactive");
    });
}

#[test]
fn a_removed_gpu_is_not_listed_and_the_indices_of_later_gpus_move_down() {
    run_in_separate_process(
        "a_removed_gpu_is_not_listed_and_the_indices_of_later_gpus_move_down",
        &["H200-141", "H200-141", "H200-141"],
        |machine| {
            let nvml = nvml();
            let uuid = |index: u32| nvml.device_by_index(index).and_then(|device| device.uuid());
            let [first, second, third] = [0, 1, 2].map(|index| uuid(index).unwrap());
            change_state(machine, |state| (state.gpus[1].lost, state.gpus[1].removed) = (true, true));
            assert_eq!(nvml.device_count().unwrap(), 2);
            assert_eq!((uuid(0).unwrap(), uuid(1).unwrap()), (first, third.clone()));
            assert_eq!(nvml.device_by_uuid(third.as_str()).unwrap().index().unwrap(), 1);
            assert!(uuid(2).is_err() && nvml.device_by_uuid(second.as_str()).is_err());
        },
    );
}

#[test]
fn a_gpu_without_nvlinks_does_not_support_queries_of_links() {
    run_in_separate_process("a_gpu_without_nvlinks_does_not_support_queries_of_links", &["H200-141", "T4"], |_| {
        let nvml = nvml();
        let h200 = nvml.device_by_index(0).unwrap();
        assert!(matches!(h200.link_wrapper_for(0).is_active(), Err(NvmlError::NotSupported)));
        let t4 = nvml.device_by_index(1).unwrap();
        assert_eq!(h200.topology_common_ancestor(t4).unwrap(), TopologyLevel::Node);
    });
}

#[test]
fn the_largest_profile_of_a_hopper_gpu_has_all_its_sms() {
    run_in_separate_process("the_largest_profile_of_a_hopper_gpu_has_all_its_sms", &["H200-141", "T4"], |_| {
        let nvml = nvml();
        let h200 = nvml.device_by_index(0).unwrap();
        let info = h200.profile_info(sys::NVML_GPU_INSTANCE_PROFILE_7_SLICE).unwrap();
        assert_eq!((info.id, info.multiprocessor_count, info.memory_size_mb), (0, 132, 143_360));
        let info = h200.profile_info(sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2).unwrap();
        assert_eq!((info.id, info.multiprocessor_count, info.instance_count, info.memory_size_mb), (15, 26, 4, 33_280));
        assert!(matches!(h200.profile_info(sys::NVML_GPU_INSTANCE_PROFILE_8_SLICE), Err(NvmlError::NotSupported)));
        assert!(matches!(h200.profile_info(17), Err(NvmlError::InvalidArg)));
        // nvml-wrapper 0.13 returns an empty list, because of an error in its handling of the
        // length.
        let (mut list, mut count) = ([zeroed::<sys::nvmlGpuInstancePlacement_t>(); 8], 0);
        let none = std::ptr::null_mut();
        assert_eq!(
            raw!(nvml, nvmlDeviceGetGpuInstancePossiblePlacements_v2(raw_handle(&h200), 15, none, &raw mut count)),
            0
        );
        assert_eq!(count, 4, "a null list returns the count");
        let to = list.as_mut_ptr();
        assert_eq!(
            raw!(nvml, nvmlDeviceGetGpuInstancePossiblePlacements_v2(raw_handle(&h200), 15, to, &raw mut count)),
            0
        );
        assert_eq!(list[..4].iter().map(|p| (p.start, p.size)).collect::<Vec<_>>(), [(0, 2), (2, 2), (4, 2), (6, 2)]);
        // If MIG is off, NVML reports the capacity of an empty GPU.
        let mut capacity = 0;
        assert_eq!(raw!(nvml, nvmlDeviceGetGpuInstanceRemainingCapacity(raw_handle(&h200), 9, &raw mut capacity)), 0);
        assert_eq!(capacity, 2);
        let mut named = zeroed::<sys::nvmlGpuInstanceProfileInfo_v3_t>();
        named.version = u32::try_from(size_of_val(&named)).unwrap() | 3 << 24;
        let at = std::ptr::from_mut(&mut named).cast();
        assert_eq!(raw!(nvml, nvmlDeviceGetGpuInstanceProfileInfoV(raw_handle(&h200), 7, at)), 0);
        let name: String = named.name.iter().take_while(|c| **c != 0).map(|c| char::from(c.cast_unsigned())).collect();
        assert_eq!((name.as_str(), named.id, named.capabilities), ("MIG 1g.18gb+me", 20, 0));
        named.version = 1;
        let at = std::ptr::from_mut(&mut named).cast();
        assert_eq!(raw!(nvml, nvmlDeviceGetGpuInstanceProfileInfoV(raw_handle(&h200), 7, at)), 25);
        assert!(matches!(nvml.device_by_index(1).unwrap().profile_info(0), Err(NvmlError::NotSupported)));
    });
}

fn zeroed<T>() -> T {
    // SAFETY: the function is used only for NVML structures of integers, arrays and raw pointers,
    // for which zero is valid.
    unsafe { std::mem::zeroed() }
}

#[test]
fn mig_instances_are_created_used_and_destroyed() {
    run_in_separate_process("mig_instances_are_created_used_and_destroyed", &["H100-80"], |machine| {
        let nvml = nvml();
        let mut gpu = nvml.device_by_index(0).unwrap();
        assert_eq!(create_gpu_instance(&nvml, &gpu, 9, None).unwrap_err(), 3, "MIG is off");
        assert_eq!(set_mig_mode(&nvml, &gpu, 1), (0, 0));
        assert_eq!(gpu.mig_mode().unwrap(), MigMode { current: 1, pending: 1 });
        assert_eq!(gpu.mig_device_count().unwrap(), 7);
        assert!(matches!(gpu.mig_device_by_index(0), Err(NvmlError::NotFound)));

        let gi = create_gpu_instance(&nvml, &gpu, 9, Some((4, 4))).unwrap();
        assert_eq!(create_gpu_instance(&nvml, &gpu, 9, Some((4, 4))).unwrap_err(), 23, "taken");
        assert_eq!(
            create_gpu_instance(&nvml, &gpu, 9, Some((2, 4))).unwrap_err(),
            2,
            "the profile has no such placement"
        );
        assert_eq!(create_gpu_instance(&nvml, &gpu, 0, None).unwrap_err(), 23, "not enough free slices");
        assert_eq!(create_gpu_instance(&nvml, &gpu, 77, None).unwrap_err(), 2, "no such profile");
        let mut info = zeroed::<sys::nvmlGpuInstanceInfo_t>();
        assert_eq!(raw!(nvml, nvmlGpuInstanceGetInfo(gi, &raw mut info)), 0);
        assert_eq!((info.id, info.profileId, info.placement.start, info.placement.size), (2, 9, 4, 4));
        let (mut list, mut count) = ([std::ptr::null_mut(); 7], 0);
        assert_eq!(raw!(nvml, nvmlDeviceGetGpuInstances(raw_handle(&gpu), 9, list.as_mut_ptr(), &raw mut count)), 0);
        assert_eq!((count, list[0]), (1, gi));

        let mut profile = zeroed::<sys::nvmlComputeInstanceProfileInfo_t>();
        assert_eq!(raw!(nvml, nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, 2, 0, &raw mut profile)), 0);
        assert_eq!((profile.id, profile.multiprocessorCount, profile.instanceCount), (2, 60, 1));
        let ci = create_compute_instance(&nvml, gi, profile.id).unwrap();
        assert_eq!(create_compute_instance(&nvml, gi, 0).unwrap_err(), 23);
        let mig = gpu.mig_device_by_index(0).unwrap();
        let uuid = mig.uuid().unwrap();
        assert!(uuid.starts_with("MIG-") && mig.mig_is_mig_device_handle().unwrap());
        assert_eq!(mig.name().unwrap(), "NVIDIA H100 80GB HBM3 MIG 3g.40gb");
        assert_eq!(mig.mig_parent_device().unwrap().uuid().unwrap(), gpu.uuid().unwrap());
        let attributes = mig.attributes().unwrap();
        assert_eq!((attributes.multiprocessor_count, attributes.memory_size_mb), (60, 40_448));
        assert_eq!(nvml.device_by_uuid(uuid.as_str()).unwrap().index().unwrap(), 0);
        assert!(matches!(mig.minor_number(), Err(NvmlError::NotSupported)));
        assert!(matches!(gpu.attributes(), Err(NvmlError::NotSupported)));
        assert!(gpu.set_compute_mode(ComputeMode::ExclusiveProcess).is_err());

        let mut user = GpuUser::new(machine, &uuid);
        let listed = mig.running_compute_processes().unwrap();
        assert_eq!((listed.len(), listed[0].pid), (1, user.0.id()));
        let on_gpu = gpu.running_compute_processes().unwrap();
        assert_eq!((on_gpu[0].gpu_instance_id, on_gpu[0].compute_instance_id), (Some(2), Some(0)));
        assert_eq!(mig.memory_info().unwrap().used >> 20, 300);
        assert_eq!(raw!(nvml, nvmlComputeInstanceDestroy(ci)), 19, "in use by a process");
        assert_eq!(raw!(nvml, nvmlGpuInstanceDestroy(gi)), 19, "in use by a compute instance");
        assert_eq!(set_mig_mode(&nvml, &gpu, 0), (0, 19), "pending: in use");
        assert_eq!(gpu.mig_mode().unwrap(), MigMode { current: 1, pending: 0 });
        user.kill();
        // A fault for a GPU also applies to calls about its instances.
        let gpu_uuid = gpu.uuid().unwrap();
        let call = "nvmlComputeInstanceDestroy".to_owned();
        let fault = Fault { id: 1, call, gpu: Some(gpu_uuid), effect: FaultEffect::Code(999), remaining: Some(1) };
        change_state(machine, |s| s.faults.push(fault));
        assert_eq!(raw!(nvml, nvmlComputeInstanceDestroy(ci)), 999);
        assert_eq!(raw!(nvml, nvmlComputeInstanceDestroy(ci)), 0);
        assert_eq!(raw!(nvml, nvmlGpuInstanceDestroy(gi)), 0);
        assert_eq!(raw!(nvml, nvmlGpuInstanceDestroy(gi)), 6);
        assert!(matches!(mig.uuid(), Err(NvmlError::NotFound)));
        assert_eq!(set_mig_mode(&nvml, &gpu, 0), (0, 0));
    });
}

#[test]
fn invalid_handles_are_refused() {
    run_in_separate_process("invalid_handles_are_refused", &["A100-40"], |_| {
        let nvml = nvml();
        let gpu = raw_handle(&nvml.device_by_index(0).unwrap());
        let mut out = 0;
        for wrong in [0_usize, 1, 4096, gpu.addr() + 16, gpu.addr() + 1, usize::MAX] {
            let device = std::ptr::without_provenance_mut(wrong);
            assert_eq!(raw!(nvml, nvmlDeviceGetIndex(device, &raw mut out)), 2, "{wrong}");
        }
        assert_eq!(raw!(nvml, nvmlGpuInstanceDestroy(gpu.cast())), 2, "a GPU is not a GPU instance");
        assert_eq!(raw!(nvml, nvmlDeviceGetIndex(gpu, std::ptr::null_mut())), 2);
        let mut name = [0; 4];
        assert_eq!(raw!(nvml, nvmlDeviceGetName(gpu, name.as_mut_ptr(), 4)), 7, "too short");
        assert_eq!(raw!(nvml, nvmlDeviceGetBoardId(gpu, std::ptr::null_mut())), 3);
    });
}

fn expect_xid(event: &EventData<'_>) -> u64 {
    match event.event_data {
        Some(XidError::Value(code)) => code,
        Some(XidError::Unknown) | None => panic!("no XID"),
    }
}

fn wait_for_xid(set: &EventSet<'_>) -> u64 {
    expect_xid(&set.wait(60_000).unwrap())
}

#[test]
fn an_event_names_its_mig_device() {
    run_in_separate_process("an_event_names_its_mig_device", &["A30"], |machine| {
        let nvml = nvml();
        let gpu = raw_handle(&nvml.device_by_index(0).unwrap());
        let mut set = std::ptr::null_mut();
        assert_eq!(raw!(nvml, nvmlEventSetCreate(&raw mut set)), 0);
        assert_eq!(raw!(nvml, nvmlDeviceRegisterEvents(gpu, 1 << 40, set)), 3, "no such event");
        assert_eq!(raw!(nvml, nvmlDeviceRegisterEvents(gpu, 8, set)), 0);
        let uuid = machine.snapshot().unwrap().gpus[0].uuid.clone();
        change_state(machine, |s| s.push_event(&uuid, EventKind::Xid, 94, Some((3, 0))));
        change_state(machine, |s| s.push_event(&uuid, EventKind::Xid, 79, None));
        let mut data = zeroed::<sys::nvmlEventData_t>();
        let mut next = || {
            assert_eq!(raw!(nvml, nvmlEventSetWait_v2(set, &raw mut data, 60_000)), 0);
            assert_eq!((data.device, data.eventType), (gpu, 8));
            (data.eventData, data.gpuInstanceId, data.computeInstanceId)
        };
        assert_eq!(next(), (94, 3, 0));
        assert_eq!(next(), (79, u32::MAX, u32::MAX));
        assert_eq!(raw!(nvml, nvmlEventSetWait_v2(set, &raw mut data, 0)), 10);
        assert_eq!(raw!(nvml, nvmlEventSetFree(set)), 0);
        assert_eq!(raw!(nvml, nvmlEventSetWait_v2(set, &raw mut data, 0)), 2, "freed");
    });
}

#[test]
fn events_reach_registered_sets() {
    run_in_separate_process("events_reach_registered_sets", &["H100-80", "H100-80"], |machine| {
        let nvml = nvml();
        let uuids: Vec<String> = machine.snapshot().unwrap().gpus.iter().map(|g| g.uuid.clone()).collect();
        let xid =
            |gpu: usize, code: u64| change_state(machine, |s| s.push_event(&uuids[gpu], EventKind::Xid, code, None));
        xid(0, 1);
        let first = nvml.device_by_index(0).unwrap();
        let second = nvml.device_by_index(1).unwrap();
        assert!(first.supported_event_types().unwrap().contains(EventTypes::CRITICAL_XID_ERROR));
        let set = nvml.create_event_set().unwrap();
        let set = first.register_events(EventTypes::CRITICAL_XID_ERROR, set).unwrap();
        xid(1, 2);
        let ecc = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
        let set = second.register_events(ecc, set).unwrap();
        assert!(matches!(set.wait(20), Err(NvmlError::Timeout)), "earlier events are not delivered");
        xid(0, 79);
        change_state(machine, |s| s.push_event(&uuids[0], EventKind::DoubleBitEcc, 0, None));
        change_state(machine, |s| s.push_event(&uuids[1], EventKind::DoubleBitEcc, 0, None));
        change_state(machine, |s| s.push_event(&uuids[1], EventKind::Xid, 94, Some((3, 0))));
        let got = set.wait(60_000).unwrap();
        assert_eq!((got.device.uuid().unwrap(), expect_xid(&got)), (uuids[0].clone(), 79));
        let got = set.wait(60_000).unwrap();
        assert_eq!(got.device.uuid().unwrap(), uuids[1]);
        assert_eq!(got.event_type, EventTypes::DOUBLE_BIT_ECC_ERROR);
        assert_eq!(wait_for_xid(&set), 94);
        // The event must arrive during the wait.
        std::thread::scope(|scope| {
            scope.spawn(|| xid(0, 31));
            assert_eq!(wait_for_xid(&set), 31);
        });
        // The last event of a GPU must be delivered before the error that the GPU is lost.
        xid(1, 79);
        change_state(machine, |s| s.gpus[1].lost = true);
        assert_eq!(wait_for_xid(&set), 79);
        assert!(matches!(set.wait(60_000), Err(NvmlError::GpuLost)));
        change_state(machine, |s| s.gpus[1].lost = false);
        assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
    });
}

#[test]
fn a_lost_gpu_does_not_affect_other_gpus() {
    run_in_separate_process("a_lost_gpu_does_not_affect_other_gpus", &["A100-80", "A100-80"], |machine| {
        let nvml = nvml();
        let (lost, well) = (nvml.device_by_index(0).unwrap(), nvml.device_by_index(1).unwrap());
        let uuid = lost.uuid().unwrap();
        change_state(machine, |s| s.gpus[0].lost = true);
        assert!(matches!(lost.uuid(), Err(NvmlError::GpuLost)));
        assert!(matches!(lost.memory_info(), Err(NvmlError::GpuLost)));
        assert!(matches!(lost.running_compute_processes(), Err(NvmlError::GpuLost)));
        assert!(matches!(nvml.device_by_index(0), Err(NvmlError::GpuLost)));
        assert!(matches!(nvml.device_by_uuid(uuid.as_str()), Err(NvmlError::GpuLost)));
        assert_eq!(set_mig_mode(&nvml, &lost, 1).0, 15);
        assert_eq!(nvml.device_count().unwrap(), 2);
        well.memory_info().unwrap();
        // A program that starts now must see the same devices.
        drop(nvml);
        let nvml = self::nvml();
        assert!(matches!(nvml.device_by_index(0), Err(NvmlError::GpuLost)));
        change_state(machine, |s| s.gpus[0].lost = false);
        assert_eq!(nvml.device_by_index(0).unwrap().uuid().unwrap(), uuid);
    });
}

#[test]
fn processes_are_listed_with_their_memory_until_killed() {
    run_in_separate_process("processes_are_listed_with_their_memory_until_killed", &["H200-141"], |machine| {
        let nvml = nvml();
        let gpu = nvml.device_by_index(0).unwrap();
        let uuid = gpu.uuid().unwrap();
        assert!(gpu.running_compute_processes().unwrap().is_empty());
        let mut other = GpuUser::new(machine, &uuid);
        let server = machine.open_context(&uuid, ContextKind::MpsServer, 66 << 20).unwrap();
        let client = machine.register_client(&uuid, other.0.id(), 274 << 20).unwrap();
        let listed = |list: Vec<nvml_wrapper::struct_wrappers::device::ProcessInfo>| {
            let mib = |u| match u {
                UsedGpuMemory::Used(bytes) => bytes >> 20,
                UsedGpuMemory::Unavailable => panic!("no memory"),
            };
            let mut list: Vec<_> = list.into_iter().map(|p| (p.pid, mib(p.used_gpu_memory))).collect();
            list.sort_unstable();
            list
        };
        let mut expected = [(std::process::id(), 66), (other.0.id(), 574)];
        expected.sort_unstable();
        assert_eq!(listed(gpu.running_compute_processes().unwrap()), expected);
        assert_eq!(listed(gpu.running_compute_processes_v2().unwrap()), expected);
        assert_eq!(listed(gpu.mps_running_compute_processes().unwrap()), [(other.0.id(), 274)]);
        assert!(gpu.running_graphics_processes().unwrap().is_empty());
        assert_eq!(gpu.memory_info().unwrap().used >> 20, 640);
        let (mut count, mut few) = (1, [zeroed::<sys::nvmlProcessInfo_v2_t>(); 1]);
        let code = raw!(
            nvml,
            nvmlDeviceGetComputeRunningProcesses_v3(raw_handle(&gpu), &raw mut count, few.as_mut_ptr().cast())
        );
        assert_eq!((code, count), (7, 2), "the buffer is too small: the needed count");
        other.kill();
        assert_eq!(listed(gpu.running_compute_processes().unwrap()), [(std::process::id(), 66)]);
        assert!(gpu.mps_running_compute_processes().unwrap().is_empty());
        assert_eq!(gpu.memory_info().unwrap().used >> 20, 66);
        drop((client, server));
        assert!(gpu.running_compute_processes().unwrap().is_empty());
    });
}

#[test]
fn settings_are_visible_to_other_processes() {
    run_in_separate_process("settings_are_visible_to_other_processes", &["H200-141"], |machine| {
        let nvml = nvml();
        let mut gpu = nvml.device_by_index(0).unwrap();
        gpu.set_compute_mode(ComputeMode::ExclusiveProcess).unwrap();
        assert_eq!(machine.snapshot().unwrap().gpus[0].compute_mode, sim_machine::ComputeMode::ExclusiveProcess);
        let _holder = GpuUser::new(machine, &gpu.uuid().unwrap());
        assert!(machine.open_context(&gpu.uuid().unwrap(), ContextKind::Compute, 0).is_err());
        change_state(machine, |s| s.gpus[0].compute_mode = sim_machine::ComputeMode::Prohibited);
        assert_eq!(gpu.compute_mode().unwrap(), ComputeMode::Prohibited);
        change_state(machine, |s| s.gpus[0].ecc = [3, 1]);
        let errors = |kind| gpu.total_ecc_errors(kind, EccCounter::Volatile).unwrap();
        assert_eq!((errors(MemoryError::Corrected), errors(MemoryError::Uncorrected)), (3, 1));
    });
}

#[test]
fn clocks_and_throttling_depend_on_utilization_and_a_gpu_in_mig_mode_reports_none() {
    let name = "clocks_and_throttling_depend_on_utilization_and_a_gpu_in_mig_mode_reports_none";
    run_in_separate_process(name, &["H100-80"], |machine| {
        let nvml = nvml();
        let gpu = nvml.device_by_index(0).unwrap();
        let reasons = || gpu.current_throttle_reasons().unwrap();
        let clocks =
            || [Clock::Graphics, Clock::SM, Clock::Memory, Clock::Video].map(|kind| gpu.clock_info(kind).unwrap());
        // These values were measured on an idle H200 with driver 580.
        assert_eq!((clocks(), reasons()), ([345, 345, 3201, 765], ThrottleReasons::GPU_IDLE));
        let mut clock = 0;
        assert_eq!(raw!(nvml, nvmlDeviceGetClockInfo(raw_handle(&gpu), 4, &raw mut clock)), 3, "a count, not a clock");
        assert_eq!(gpu.max_clock_info(Clock::SM).unwrap(), 1980);

        change_state(machine, |s| s.gpus[0].utilization = Some(50));
        assert_eq!((gpu.clock_info(Clock::SM).unwrap(), reasons()), (1980, ThrottleReasons::empty()));
        change_state(machine, |s| s.gpus[0].throttling = ThrottleReasons::HW_THERMAL_SLOWDOWN.bits());
        assert_eq!((gpu.clock_info(Clock::SM).unwrap(), reasons()), (990, ThrottleReasons::HW_THERMAL_SLOWDOWN));
        change_state(machine, |s| s.gpus[0].energy_millijoules = 7);
        assert_eq!(gpu.total_energy_consumption().unwrap(), 7);

        assert_eq!(set_mig_mode(&nvml, &gpu, 1), (0, 0));
        assert!(matches!(gpu.utilization_rates(), Err(NvmlError::NotSupported)));
        assert!(
            gpu.power_usage().is_ok() && gpu.clock_info(Clock::SM).is_ok() && gpu.current_throttle_reasons().is_ok()
        );
        let instance = create_gpu_instance(&nvml, &gpu, 9, None).unwrap();
        create_compute_instance(&nvml, instance, 2).unwrap();
        let mig = gpu.mig_device_by_index(0).unwrap();
        assert!(matches!(mig.clock_info(Clock::SM), Err(NvmlError::NotSupported)));
        assert!(matches!(mig.current_throttle_reasons(), Err(NvmlError::NotSupported)));
        assert!(matches!(mig.total_energy_consumption(), Err(NvmlError::NotSupported)));
        assert!(matches!(mig.utilization_rates(), Err(NvmlError::NotSupported)));
    });
}

#[test]
fn only_root_can_change_a_gpu() {
    run_in_separate_process("only_root_can_change_a_gpu", &["H100-80"], |_| {
        let nvml = nvml();
        let mut gpu = nvml.device_by_index(0).unwrap();
        if rustix::process::geteuid().is_root() {
            // The system call affects only this thread, and only until the process exits.
            rustix::thread::set_thread_res_uid(
                rustix::process::Uid::from_raw(1000),
                rustix::process::Uid::from_raw(1000),
                rustix::process::Uid::ROOT,
            )
            .unwrap();
        }
        assert!(matches!(gpu.set_compute_mode(ComputeMode::Prohibited), Err(NvmlError::NoPermission)));
        assert_eq!(set_mig_mode(&nvml, &gpu, 1).0, 4);
        assert_eq!(create_gpu_instance(&nvml, &gpu, 0, None).unwrap_err(), 4);
        assert_eq!(gpu.compute_mode().unwrap(), ComputeMode::Default);
    });
}

#[test]
fn injected_errors_and_hangs_take_precedence() {
    run_in_separate_process("injected_errors_and_hangs_take_precedence", &["T4", "T4"], |machine| {
        let nvml = nvml();
        let (one, two) = (nvml.device_by_index(0).unwrap(), nvml.device_by_index(1).unwrap());
        let gpu = Some(one.uuid().unwrap());
        let inject = |id: u64, call: &str, gpu: Option<String>, effect, remaining| {
            change_state(machine, |s| s.faults.push(Fault { id, call: call.to_owned(), gpu, effect, remaining }));
        };
        inject(1, "nvmlDeviceGetUUID", gpu, FaultEffect::Code(999), Some(1));
        two.uuid().unwrap();
        assert!(matches!(one.uuid(), Err(NvmlError::Unknown)));
        one.uuid().unwrap();
        inject(2, "nvmlDeviceGetName", None, FaultEffect::Hang(Some(60.0)), Some(1));
        std::thread::scope(|scope| {
            let hanging = scope.spawn(|| one.name().unwrap());
            wait_until(machine, |s| s.faults.iter().any(|f| f.remaining == Some(0)));
            // The library must not be locked during the hang, so that other threads continue.
            two.memory_info().unwrap();
            assert!(!hanging.is_finished());
            change_state(machine, |s| s.faults.clear());
            assert_eq!(hanging.join().unwrap(), "Tesla T4");
        });
        inject(3, "nvmlInit*", None, FaultEffect::Code(18), None);
        assert!(matches!(load(), Err(NvmlError::LibRmVersionMismatch)));
    });
}

#[test]
fn nvml_fails_without_a_driver() {
    run_in_separate_process("nvml_fails_without_a_driver", &[], |machine| {
        assert_eq!(nvml().device_count().unwrap(), 0, "a driver without a GPU");
        change_state(machine, |s| s.driver.present = false);
        assert!(matches!(load(), Err(NvmlError::DriverNotLoaded)));
        std::fs::remove_dir_all(machine.dir()).unwrap();
        assert!(matches!(load(), Err(NvmlError::DriverNotLoaded)));
        std::fs::create_dir(machine.dir()).unwrap();
    });
}

#[test]
fn calls_fail_after_the_last_shutdown() {
    run_in_separate_process("calls_fail_after_the_last_shutdown", &["T4"], |_| {
        let (one, two) = (nvml(), nvml());
        drop(one);
        assert_eq!(two.device_count().unwrap(), 1);
        assert_eq!(raw!(two, nvmlShutdown()), 0);
        assert!(matches!(two.device_count(), Err(NvmlError::Uninitialized)));
        assert_eq!(raw!(two, nvmlShutdown()), 1);
    });
}
