//! The MPS host as the agent sees it.
pub mod link;

use cleave_gpu::mps::wire::{Status, VERSION};

/// What is known of the MPS host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// It answers at its socket.
    pub alive: bool,
    /// Its last status.
    pub status: Status,
    /// Why that cannot be believed, if so.
    pub error: Option<String>,
}

/// Reads what the MPS host wrote to its status file.
///
/// # Errors
/// A sentence: it is not of its shape, or of a newer MPS host.
pub fn parse_status(bytes: &[u8]) -> Result<Status, String> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    // It repeats texts of the file, however long, and is told in a status.
    let malformed = |error: serde_json::Error| error.to_string().chars().take(300).collect::<String>();
    let Versioned { version } = serde_json::from_slice(bytes).map_err(malformed)?;
    if version > VERSION {
        return Err(format!("version {version} of a newer MPS host; this agent reads {VERSION}"));
    }
    serde_json::from_slice(bytes).map_err(malformed)
}
