//! The command line of `nvidia-cuda-mps-control`.
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Returns the command `nvidia-cuda-mps-control` for a device. The program is both the daemon and
/// the tool that sends commands to the daemon.
pub(crate) fn control_tool_command(program: &Path, library_path: Option<&OsStr>, pipe: &Path, device: &str) -> Command {
    let mut command = Command::new(program);
    command
        .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
        .env("CUDA_MPS_LOG_DIRECTORY", pipe)
        .env("CUDA_VISIBLE_DEVICES", device)
        .env_remove("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        .env_remove("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
        .current_dir("/");
    if let Some(path) = library_path {
        command.env("LD_LIBRARY_PATH", path);
    }
    // The daemon searches PATH for the server program, which is in the daemon's directory.
    if let Some(directory) = program.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let directories = std::iter::once(directory.to_owned()).chain(std::env::split_paths(&path));
        if let Ok(path) = std::env::join_paths(directories) {
            command.env("PATH", path);
        }
    }
    command
}
