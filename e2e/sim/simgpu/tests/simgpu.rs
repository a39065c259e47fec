//! Tests of the `simgpu` command.

// Tests fail by panicking.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sim_machine::{ComputeMode, EventKind, FaultEffect, Machine};

/// A temporary directory of a machine, on which tests run `simgpu`.
struct Simgpu(tempfile::TempDir);

impl Simgpu {
    fn new(arguments: &[&str]) -> Self {
        let simgpu = Self(tempfile::tempdir().unwrap());
        simgpu.run_successfully(&[&["init"], arguments].concat());
        simgpu
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_simgpu"));
        command.arg("--state").arg(self.0.path()).args(arguments);
        command
    }

    /// Runs a command that must succeed, and returns its output.
    fn run_successfully(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that must fail and must not change the machine, and returns the error text.
    fn run_refused(&self, arguments: &[&str]) -> String {
        let before = self.machine().snapshot().unwrap().generation;
        let output = self.command(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        assert_eq!(self.machine().snapshot().unwrap().generation, before, "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn machine(&self) -> Machine {
        Machine::open(self.0.path()).unwrap()
    }
}

/// A `simgpu hold` process. Dropping this value kills the process.
struct GpuUser(Child);

impl Drop for GpuUser {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn start_gpu_user(simgpu: &Simgpu, device: &str) -> GpuUser {
    let machine = simgpu.machine();
    let before = machine.processes().unwrap().len();
    let command = simgpu.command(&["hold", device, "--memory", "700"]).stdout(Stdio::null()).spawn();
    let held = GpuUser(command.unwrap());
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let seen = machine.snapshot().unwrap().generation;
        if machine.processes().unwrap().len() > before {
            return held;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "timed out waiting for a process on {device}");
        machine.wait_for_change(seen, left).unwrap();
    }
}

#[test]
fn init_creates_the_described_machine() {
    let simgpu = Simgpu::new(&["--gpus", "4xH100-80", "--gpus", "T4", "--gpus", "2xL4", "--machine", "node-1"]);
    let state = simgpu.machine().snapshot().unwrap();
    let models: Vec<&str> = state.gpus.iter().map(|g| g.model.as_str()).collect();
    let h100 = "NVIDIA H100 80GB HBM3";
    assert_eq!(models, [h100, h100, h100, h100, "Tesla T4", "NVIDIA L4", "NVIDIA L4"]);
    let other = Simgpu::new(&["--gpus", "T4", "--machine", "node-2"]);
    assert_ne!(other.machine().snapshot().unwrap().gpus[0].uuid, state.gpus[0].uuid);
    let shown = simgpu.run_successfully(&["show"]);
    assert!(state.gpus.iter().all(|g| shown.contains(&g.uuid)), "{shown}");
    assert!(simgpu.run_refused(&["init", "--gpus", "3xH900"]).contains("H900"));
    assert!(simgpu.run_refused(&["init", "--gpus", "99999999999xT4"]).contains("more than the maximum"));
}

#[test]
fn a_file_describes_more_than_the_options() {
    let simgpu = Simgpu::new(&[]);
    let file = simgpu.0.path().join("machine.json");
    let text = r#"{"name":"numa","gpus":[{"model":"A30","uuid":"GPU-a","numaNode":1},{"model":"Own"}],
        "models":[{"name":"Own","architecture":"Hopper","computeCapability":[9,0],"sms":4,"coresPerSm":128,"memoryMib":100,
        "cudaMemoryMib":90,"memoryBusWidth":64,"pciDeviceId":1,"pciSubsystemId":2,"powerWatts":[10,5]}]}"#;
    std::fs::write(&file, text).unwrap();
    simgpu.run_successfully(&["init", "--file", file.to_str().unwrap()]);
    let state = simgpu.machine().snapshot().unwrap();
    assert_eq!((state.gpus[0].uuid.as_str(), state.gpus[0].numa_node), ("GPU-a", Some(1)));
    assert_eq!(state.model(&state.gpus[1]).unwrap().sms, 4);
    std::fs::write(&file, r#"{"name":"x","gpu":[]}"#).unwrap();
    assert!(simgpu.run_refused(&["init", "--file", file.to_str().unwrap()]).contains("unknown field"));
}

#[test]
fn faults_are_injected_and_cleared() {
    let simgpu = Simgpu::new(&["--gpus", "2xT4"]);
    simgpu.run_successfully(&["fail", "nvmlDeviceGetUUID", "--gpu", "1", "--code", "gpu_is_lost", "--count", "3"]);
    let second = simgpu.run_successfully(&["hang", "nvmlEventSetWait", "--seconds", "2.5"]);
    simgpu.run_successfully(&["fail", "mps:start", "--code", "7"]);
    let state = simgpu.machine().snapshot().unwrap();
    assert_eq!(state.faults[0].gpu.as_ref(), Some(&state.gpus[1].uuid));
    let seen: Vec<_> = state.faults.iter().map(|f| (f.effect, f.remaining)).collect();
    assert_eq!(
        seen,
        [(FaultEffect::Code(15), Some(3)), (FaultEffect::Hang(Some(2.5)), None), (FaultEffect::Code(7), None)]
    );
    assert!(simgpu.run_successfully(&["show"]).contains("nvmlEventSetWait hangs for 2.5 s"));
    simgpu.run_successfully(&["clear", second.trim().strip_prefix("fault ").unwrap()]);
    assert_eq!(simgpu.machine().snapshot().unwrap().faults.len(), 2);
    simgpu.run_successfully(&["clear"]);
    assert!(simgpu.machine().snapshot().unwrap().faults.is_empty());
    assert!(simgpu.run_refused(&["clear", "77"]).contains("fault 77 does not exist"));
    assert!(simgpu.run_refused(&["fail", "x", "--code", "NONSENSE"]).contains("NONSENSE"));
    assert!(simgpu.run_refused(&["fail", "x", "--gpu", "7"]).contains("no GPU 7"));
    assert!(simgpu.run_refused(&["hang", "x", "--seconds=-1"]).contains("not a duration"));
}

#[test]
fn xids_are_injected_and_a_gpu_can_be_lost() {
    let simgpu = Simgpu::new(&["--gpus", "2xH100-80"]);
    simgpu.run_successfully(&["xid", "0", "79"]);
    simgpu.run_successfully(&["xid", "1", "94", "--instance", "3,0"]);
    simgpu.run_successfully(&["ecc", "1", "--uncorrected", "2"]);
    simgpu.run_successfully(&["lose", "0"]);
    let state = simgpu.machine().snapshot().unwrap();
    let seen: Vec<_> = state.events.iter().map(|e| (e.kind, e.data, e.gpu_instance)).collect();
    assert_eq!(seen, [(EventKind::Xid, 79, None), (EventKind::Xid, 94, Some(3)), (EventKind::DoubleBitEcc, 0, None)]);
    assert_eq!((state.gpus[0].lost, state.gpus[1].ecc), (true, [0, 2]));
    assert!(simgpu.run_successfully(&["show"]).contains("LOST"));
    simgpu.run_successfully(&["restore", "0"]);
    assert!(!simgpu.machine().snapshot().unwrap().gpus[0].lost);
    assert!(simgpu.run_refused(&["xid", "9", "79"]).contains("no GPU 9"));
}

#[test]
fn settings_of_a_gpu_can_be_changed() {
    let simgpu = Simgpu::new(&["--gpus", "H100-80"]);
    simgpu.run_successfully(&["set", "0", "compute-mode=exclusive-process", "temperature=91", "numa=1", "cpus=0-3"]);
    let gpu = simgpu.machine().snapshot().unwrap().gpus[0].clone();
    assert_eq!((gpu.compute_mode, gpu.temperature, gpu.numa_node), (ComputeMode::ExclusiveProcess, Some(91), Some(1)));
    // A command applies all of its changes or none, so the first change is not applied.
    assert!(simgpu.run_refused(&["set", "0", "temperature=50", "speed=9"]).contains("speed"));
    assert_eq!(simgpu.machine().snapshot().unwrap().gpus[0].temperature, Some(91));
    simgpu.run_successfully(&["driver", "--present", "false", "--version", "570.1"]);
    let state = simgpu.machine().snapshot().unwrap();
    assert_eq!((state.driver.present, state.driver.version.as_str()), (false, "570.1"));
    assert!(simgpu.run_successfully(&["show"]).contains("not loaded"));
}

#[test]
fn processes_are_listed_and_keep_their_devices() {
    let simgpu = Simgpu::new(&["--gpus", "A100-40"]);
    simgpu.run_successfully(&["set", "0", "mig=on"]);
    let uuid = simgpu.run_successfully(&["mig", "create", "0", "3g.20gb", "--at", "0"]).trim().to_owned();
    assert!(simgpu.run_refused(&["mig", "create", "0", "3g.20gb", "--at", "0"]).contains("insufficient resources"));
    assert!(simgpu.run_refused(&["mig", "create", "0", "9g.90gb"]).contains("no profile"));
    let held = start_gpu_user(&simgpu, &uuid);
    let listed: serde_json::Value =
        serde_json::from_str(&simgpu.run_successfully(&["processes", "-o", "json"])).unwrap();
    assert_eq!((&listed[0]["visiblePid"], &listed[0]["used"]), (&held.0.id().into(), &(700_u64 << 20).into()));
    assert!(simgpu.run_refused(&["mig", "destroy", &uuid]).contains("in use"));
    assert!(simgpu.run_refused(&["reset", "0"]).contains("in use"));
    drop(held);
    assert_eq!(simgpu.run_successfully(&["processes", "-o", "json"]).trim(), "[]");
    simgpu.run_successfully(&["mig", "destroy", &uuid]);
    simgpu.run_successfully(&["set", "0", "mig=off"]);
    assert!(simgpu.run_successfully(&["show"]).contains("Default\n"));
}

#[test]
fn an_open_nvml_session_prevents_a_reset_an_unload_and_mig_mode_on_ampere() {
    let simgpu = Simgpu::new(&["--gpus", "A100-80", "--gpus", "H100-80"]);
    let machine = simgpu.machine();
    let uuids: Vec<String> = machine.snapshot().unwrap().gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let open =
        || [Some(uuids[0].as_str()), Some(uuids[1].as_str()), None].map(|gpu| machine.open_session(gpu).unwrap());
    let sessions = open();
    for command in [&["reset", "0"][..], &["reset", "1"], &["unload"]] {
        let refused = simgpu.run_refused(command);
        assert!(refused.contains("in use: 1 NVML sessions are open"), "{command:?}: {refused}");
    }
    assert!(simgpu.run_successfully(&["set", "0", "mig=on"]).contains("pending"), "Ampere");
    assert!(!simgpu.run_successfully(&["set", "1", "mig=on"]).contains("pending"), "Hopper");
    drop(sessions);
    simgpu.run_successfully(&["reset", "0"]);
    assert!(machine.snapshot().unwrap().gpus[0].mig, "the reset activates the pending mode");
    simgpu.run_successfully(&["unload"]);
    assert!(!machine.snapshot().unwrap().driver.present);
}

#[test]
fn a_reboot_ends_processes() {
    let simgpu = Simgpu::new(&["--gpus", "T4"]);
    let mut held = start_gpu_user(&simgpu, "0");
    simgpu.run_successfully(&["reboot"]);
    assert!(!held.0.wait().unwrap().success());
    assert!(simgpu.machine().processes().unwrap().is_empty());
}

#[test]
fn without_a_machine_the_error_names_the_command_that_creates_one() {
    let none = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-machine-here");
    let output = Command::new(env!("CARGO_BIN_EXE_simgpu")).arg("--state").arg(&none).arg("show").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("simgpu init"), "{text}");
    let models = Command::new(env!("CARGO_BIN_EXE_simgpu")).arg("models").output().unwrap();
    assert!(String::from_utf8(models.stdout).unwrap().contains("NVIDIA H200"));
}
