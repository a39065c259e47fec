//! Runs NVIDIA's Container Toolkit on the host.
//!
//! With CDI and without a driver directory, the toolkit determines which of the driver's files a
//! container needs. The command `nvidia-ctk cdi generate` prints a specification of all GPUs. The
//! agent uses the edits that are common to all devices: libraries, programs, sockets and hooks. The
//! agent lists the device nodes itself, because a container must get only the nodes of its GPU.
use std::io;
use std::os::unix::fs::chroot;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::args::AgentArgs;
use crate::cdi::DriverEdits;

/// Directories on the host that may contain the toolkit's programs. Packages of distributions and
/// the container of NVIDIA's GPU Operator use these directories.
const TOOLKIT_DIRECTORIES: [&str; 4] =
    ["/usr/bin", "/usr/local/bin", "/usr/local/nvidia/toolkit", "/opt/nvidia/toolkit"];
/// Program of the toolkit that prints specifications.
const GENERATOR_PROGRAM: &str = "nvidia-ctk";
/// Program of the toolkit that the hooks of a specification call.
const HOOK_PROGRAM: &str = "nvidia-cdi-hook";
/// `PATH` of the generator.
const HOST_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// `TMPDIR` of the generator. The generator first writes its output to a temporary file. The host's
/// root is read-only for the agent, but this directory is a separate mount.
const HOST_TEMPORARY_DIRECTORY: &str = "/dev/shm";
/// Maximum time that the generator may take. The generator calls NVML, and the call hangs if a GPU
/// hangs.
const GENERATOR_TIMEOUT: Duration = Duration::from_secs(60);
/// Directory of an MPS daemon that does not belong to Cleave. Through the daemon's socket, programs
/// could bypass doors.
const FOREIGN_MPS_DIRECTORY: &str = "/tmp/nvidia-mps";

/// Why the toolkit's edits are not available.
#[derive(Debug, thiserror::Error)]
pub enum ToolkitError {
    /// The host has no toolkit.
    #[error(
        "NVIDIA's container toolkit is not installed: the host has no nvidia-ctk in {}. Install the toolkit, or set \
         driver.path to the driver's directory",
        TOOLKIT_DIRECTORIES.join(", ")
    )]
    NotInstalled,
    /// The agent could not start the generator.
    #[error("failed to run nvidia-ctk: {0}")]
    NotStarted(#[from] io::Error),
    /// The generator did not exit in time.
    #[error("nvidia-ctk did not exit within {} s", GENERATOR_TIMEOUT.as_secs())]
    TimedOut,
    /// The generator failed.
    #[error("nvidia-ctk failed: {0}")]
    Failed(String),
    /// The agent cannot use the generator's output as a specification.
    #[error("the specification of nvidia-ctk is not usable: {0}")]
    Invalid(String),
}

/// Paths of the toolkit's programs on the host.
#[derive(Debug, PartialEq, Eq)]
struct Toolkit {
    generator: PathBuf,
    hook: Option<PathBuf>,
}

impl Toolkit {
    /// Searches for the toolkit below the host's root.
    fn find(host_root: &Path) -> Option<Self> {
        let there = |path: &PathBuf| {
            // Do not follow symbolic links: a link may be absolute on the host, so this process
            // cannot check its target.
            std::fs::symlink_metadata(host_root.join(path.strip_prefix("/").unwrap_or(path))).is_ok()
        };
        TOOLKIT_DIRECTORIES.iter().find_map(|directory| {
            let generator = Some(Path::new(directory).join(GENERATOR_PROGRAM)).filter(there)?;
            Some(Self { generator, hook: Some(Path::new(directory).join(HOOK_PROGRAM)).filter(there) })
        })
    }

    /// Returns the command line of the generator. The toolkit's own configuration determines the
    /// driver's root.
    fn command_line(&self) -> Vec<String> {
        let mut words = vec![self.generator.display().to_string(), "cdi".into(), "generate".into()];
        words.extend(["--format=json".to_owned(), "--dev-root=/".to_owned()]);
        words.extend(self.hook.as_ref().map(|hook| format!("--nvidia-cdi-hook-path={}", hook.display())));
        words
    }
}

/// Returns the toolkit's edits that give containers the driver's files.
///
/// # Errors
/// Returns an error if the host has no toolkit, if the generator cannot be run, fails or hangs, or
/// if its output does not contain the driver.
pub async fn driver_edits(args: &AgentArgs) -> Result<DriverEdits, ToolkitError> {
    let toolkit = Toolkit::find(&args.host_root).ok_or(ToolkitError::NotInstalled)?;
    let command = host_command(&std::env::current_exe()?, args, &toolkit);
    let mut command = tokio::process::Command::from(command);
    let output = tokio::time::timeout(GENERATOR_TIMEOUT, command.kill_on_drop(true).output());
    let output = output.await.map_err(|_| ToolkitError::TimedOut)??;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it printed no error");
        return Err(ToolkitError::Failed(format!("{last} ({})", output.status)));
    }
    common_edits(&output.stdout)
}

/// Returns the command that starts this program again to run the generator on the host
/// ([`run_on_host`]).
fn host_command(this: &Path, args: &AgentArgs, toolkit: &Toolkit) -> Command {
    let mut command = Command::new(this);
    if this.file_name().is_some_and(|name| name == "cleave") {
        command.arg("agent");
    }
    command.arg("--node-name").arg(&args.node_name).arg("--host-root").arg(&args.host_root);
    command.arg("--run-on-host").args(toolkit.command_line());
    command.env_clear().env("PATH", HOST_PATH).env("TMPDIR", HOST_TEMPORARY_DIRECTORY);
    command.stdin(Stdio::null());
    command
}

/// Replaces this process with a program of the host, in the host's root directory. Returns only if
/// the replacement fails.
pub fn run_on_host(host_root: &Path, command_line: &[String]) -> io::Error {
    let Some((program, arguments)) = command_line.split_first() else {
        return io::Error::new(io::ErrorKind::InvalidInput, "no program is given");
    };
    if let Err(error) = chroot(host_root).and_then(|()| std::env::set_current_dir("/")) {
        return error;
    }
    Command::new(program).args(arguments).exec()
}

/// Returns the edits for all devices in the toolkit's specification, without the edits that Cleave
/// makes itself.
///
/// # Errors
/// Returns an error if the text is not a specification, or if the specification does not contain
/// the driver.
fn common_edits(specification: &[u8]) -> Result<DriverEdits, ToolkitError> {
    let invalid = |reason: &str| ToolkitError::Invalid(reason.to_owned());
    let mut spec: Value =
        serde_json::from_slice(specification).map_err(|error| ToolkitError::Invalid(error.to_string()))?;
    let cdi_version = spec["cdiVersion"].as_str().ok_or_else(|| invalid("it has no cdiVersion"))?.to_owned();
    let mut edits = spec["containerEdits"].take();
    let fields = edits.as_object_mut().ok_or_else(|| invalid("it has no containerEdits"))?;
    // Remove the nodes: the agent adds the nodes of each device, which include the control devices.
    fields.remove("deviceNodes");
    if let Some(env) = fields.get_mut("env").and_then(Value::as_array_mut) {
        env.retain(|entry| !entry.as_str().is_some_and(|entry| entry.starts_with("NVIDIA_VISIBLE_DEVICES=")));
    }
    let is_foreign = |mount: &Value| mount["hostPath"].as_str() == Some(FOREIGN_MPS_DIRECTORY);
    let mounts = fields.get_mut("mounts").and_then(Value::as_array_mut);
    let mounts = mounts.ok_or_else(|| invalid("it mounts nothing"))?;
    mounts.retain(|mount| !is_foreign(mount));
    let is_cuda = |mount: &Value| {
        let name = mount["containerPath"].as_str().and_then(|path| path.rsplit('/').next());
        name.is_some_and(|name| name.starts_with("libcuda.so"))
    };
    if !mounts.iter().any(is_cuda) {
        return Err(invalid("it does not mount libcuda.so"));
    }
    Ok(DriverEdits { cdi_version, edits })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use serde_json::json;

    use super::*;
    use crate::args::tests::parse_args;
    use crate::cdi::cdi_specification;

    const DRIVER_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05";

    fn specification() -> Value {
        let hook =
            json!({"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["update-ldcache"]});
        json!({
            "cdiVersion": "0.7.0",
            "kind": "nvidia.com/gpu",
            "devices": [{"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
            "containerEdits": {
                "env": ["NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_CTK_LIBCUDA_DIR=/usr/lib"],
                "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-uvm"}],
                "hooks": [hook],
                "mounts": [
                    {"hostPath": DRIVER_LIBRARY, "containerPath": DRIVER_LIBRARY, "options": ["ro"]},
                    {"hostPath": "/tmp/nvidia-mps", "containerPath": "/tmp/nvidia-mps"},
                ],
            },
        })
    }

    #[test]
    fn common_edits_contain_the_drivers_files_but_no_devices() {
        let edits = common_edits(specification().to_string().as_bytes()).unwrap();
        assert_eq!(edits.edits["env"], json!(["NVIDIA_CTK_LIBCUDA_DIR=/usr/lib"]));
        assert_eq!(edits.edits["hooks"][0]["args"], json!(["update-ldcache"]));
        assert_eq!(
            edits.edits["mounts"].as_array().unwrap().len(),
            1,
            "the directory of another MPS daemon is not mounted"
        );
        assert_eq!(edits.edits["mounts"][0]["hostPath"], DRIVER_LIBRARY);
        assert!(edits.edits.get("deviceNodes").is_none());
        let nodes = BTreeMap::from([("GPU-1".to_owned(), vec!["/dev/nvidia1".to_owned()])]);
        let spec = cdi_specification(&nodes, &edits);
        assert_eq!(spec["cdiVersion"], "0.7.0");
        assert!(!spec.to_string().contains("/dev/nvidia0"), "no device of another GPU");
    }

    #[test]
    fn a_specification_without_the_driver_is_refused() {
        let without = |path: &str| {
            let mut spec = specification();
            *spec.pointer_mut(path).unwrap() = Value::Null;
            common_edits(spec.to_string().as_bytes()).unwrap_err().to_string()
        };
        assert!(without("/cdiVersion").contains("cdiVersion"));
        assert!(without("/containerEdits").contains("containerEdits"));
        assert!(without("/containerEdits/mounts").contains("mounts nothing"));
        assert!(without("/containerEdits/mounts/0").contains("libcuda.so"));
        common_edits(b"no JSON").unwrap_err();
    }

    #[test]
    fn the_generator_runs_on_the_host_with_a_writable_temporary_directory() {
        let args = parse_args(&["--host-root", "/host"]).unwrap();
        let toolkit = Toolkit { generator: "/usr/bin/nvidia-ctk".into(), hook: None };
        for (program, first) in [("/usr/bin/cleave-agent", "--node-name"), ("/usr/bin/cleave", "agent")] {
            let command = host_command(Path::new(program), &args, &toolkit);
            let words: Vec<&str> = command.get_args().filter_map(|word| word.to_str()).collect();
            assert_eq!(words[0], first);
            let from_agent = &words[words.iter().position(|word| *word == "--node-name").unwrap()..];
            let parsed = parse_args(&from_agent[2..]).unwrap();
            assert_eq!(parsed.host_root, Path::new("/host"));
            assert_eq!(parsed.run_on_host, toolkit.command_line());
            let env: BTreeMap<_, _> = command.get_envs().collect();
            assert_eq!(env[std::ffi::OsStr::new("TMPDIR")], Some("/dev/shm".as_ref()));
        }
    }

    #[test]
    fn the_toolkit_is_found_together_with_its_hook_program() {
        let host = tempfile::tempdir().unwrap();
        assert_eq!(Toolkit::find(host.path()), None);
        let put = |path: &str| {
            let path = host.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        put("usr/local/nvidia/toolkit/nvidia-ctk");
        let found = Toolkit::find(host.path()).unwrap();
        assert_eq!(found.hook, None, "a toolkit before 1.17 has no separate hook");
        assert_eq!(found.command_line().len(), 5);
        put("usr/local/nvidia/toolkit/nvidia-cdi-hook");
        let found = Toolkit::find(host.path()).unwrap().command_line();
        assert_eq!(found[0], "/usr/local/nvidia/toolkit/nvidia-ctk");
        assert_eq!(found[5], "--nvidia-cdi-hook-path=/usr/local/nvidia/toolkit/nvidia-cdi-hook");
    }
}
