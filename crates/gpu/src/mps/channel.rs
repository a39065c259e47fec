//! The connection between the MPS host and the process of one device: messages of one line of JSON
//! each, over a socket pair. The socket is the standard input of the device's process.
use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::wire::{Desired, MpsHostStatus, Reply, Request};

/// A message to the process of a device.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToDevice {
    /// The daemon and the doors of the device that should exist.
    Desired(Desired),
    /// A request of the agent. The reply has the same number.
    Request(u64, Request),
    /// Requests a [`FromDevice::Pong`].
    Ping,
}

/// A message from the process of a device.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromDevice {
    /// The status has changed.
    Status(DeviceStatus),
    /// The reply to the request with this number.
    Reply(u64, Reply),
    /// The process answers.
    Pong,
}

/// The state that the process of a device reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceStatus {
    /// The status of the device's daemon and doors. The hash is that of the device's part of the
    /// desired state.
    pub(crate) host: MpsHostStatus,
    /// Whether nothing is left of an earlier process of the device.
    pub(crate) cleaned_up: bool,
}

/// Receives messages.
#[derive(Debug)]
pub(crate) struct MessageReader {
    reader: BufReader<OwnedReadHalf>,
    line: Vec<u8>,
}

impl MessageReader {
    pub(crate) fn new(reader: OwnedReadHalf) -> Self {
        Self { reader: BufReader::new(reader), line: Vec::new() }
    }

    /// Receives the next message. Returns `None` if the peer has closed the connection.
    /// Cancel-safe, because a partial line is kept.
    ///
    /// # Errors
    /// Returns an error if the connection fails, or if a line is no message.
    pub(crate) async fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        self.reader.read_until(b'\n', &mut self.line).await?;
        if !self.line.ends_with(b"\n") {
            return Ok(None);
        }
        let message = serde_json::from_slice(&self.line).map_err(io::Error::other);
        self.line.clear();
        message.map(Some)
    }
}

/// Sends a message.
///
/// # Errors
/// Returns an error if the peer has closed the connection.
pub(crate) async fn send<T: Serialize>(writer: &mut OwnedWriteHalf, message: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(message).map_err(io::Error::other)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn a_message_that_arrives_in_parts_is_received_although_the_wait_is_cancelled() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut reader, mut writer) = (MessageReader::new(ours.into_split().0), theirs.into_split().1);
        writer.write_all(b"\"Pi").await.unwrap();
        tokio::select! {
            biased;
            received = reader.receive::<ToDevice>() => panic!("{received:?}"),
            () = tokio::task::yield_now() => {}
        }
        writer.write_all(b"ng\"\n").await.unwrap();
        assert!(matches!(reader.receive().await, Ok(Some(ToDevice::Ping))));
        writer.write_all(b"nonsense\n").await.unwrap();
        reader.receive::<ToDevice>().await.unwrap_err();
        drop(writer);
        assert!(matches!(reader.receive::<ToDevice>().await, Ok(None)));
    }
}
