//! Communicates with the MPS host, and interprets its status.
pub mod link;

use cleave_gpu::mps::wire::{DaemonSettings, DaemonStatus, Enforcement, FILE_FORMAT_VERSION, MpsHostStatus};

/// Maximum length of a parse error in characters. The agent limits the length because the error
/// quotes the status file, and the agent writes the error to the status of the `GpuNode`.
const MAX_ERROR_CHARS: usize = 300;

/// State of the MPS host, as the agent last observed it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostView {
    /// Whether the MPS host accepts connections on its socket.
    pub alive: bool,
    /// The last status that the agent read, or the default status if the file is missing or
    /// unusable.
    pub status: MpsHostStatus,
    /// Why the file is unusable or could not be read, or the error that the MPS host reports.
    /// `None` if there is no error.
    pub error: Option<String>,
}

impl HostView {
    /// Returns whether the daemon's unknown handshake prevents programs from starting on a device:
    /// the settings do not accept the handshake, or the doors hold all clients. Ignores the state
    /// of the daemon, because MPS hosts of earlier versions report such a daemon as usable.
    pub fn has_unknown_handshake(&self, device: &str, settings: &DaemonSettings) -> bool {
        let advisory = |daemon: &DaemonStatus| daemon.enforcement == Enforcement::Advisory;
        let unaccepted = !settings.accept_advisory && self.status.daemons.get(device).is_some_and(advisory);
        unaccepted || self.holds_clients(device)
    }

    /// Returns whether the doors of a device hold all clients, because the daemon sent unexpected
    /// replies to clients.
    pub fn holds_clients(&self, device: &str) -> bool {
        self.status.daemons.get(device).is_some_and(|daemon| daemon.holds_clients)
    }
}

/// Parses the status file of the MPS host.
///
/// # Errors
/// Returns a clause with the reason if the file is malformed, or if a newer MPS host wrote the
/// file.
pub fn parse_status(bytes: &[u8]) -> Result<MpsHostStatus, String> {
    #[derive(serde::Deserialize)]
    struct VersionField {
        version: u32,
    }
    let malformed = |error: serde_json::Error| error.to_string().chars().take(MAX_ERROR_CHARS).collect::<String>();
    let VersionField { version } = serde_json::from_slice(bytes).map_err(malformed)?;
    if version > FILE_FORMAT_VERSION {
        return Err(format!(
            "the file has version {version} of a newer MPS host; this agent reads version {FILE_FORMAT_VERSION}"
        ));
    }
    serde_json::from_slice(bytes).map_err(malformed)
}
