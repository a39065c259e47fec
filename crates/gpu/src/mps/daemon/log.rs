//! Reads a daemon's output and reacts to logged events before the next probe.
use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe;

use super::Device;
use crate::mps::log::{LogEvent, LogLine, parse_log_line};
use crate::mps::wire::DaemonState;

/// Maximum length of a line in bytes. Longer lines are split.
const MAX_LOG_LINE_BYTES: usize = 4096;

impl Device {
    /// Reads the daemon's output to its end. Stores in `last_line` the last line that may explain
    /// an exit.
    pub(super) async fn read_log(self: Rc<Self>, output: pipe::Receiver, last_line: Rc<RefCell<String>>) {
        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        loop {
            line.clear();
            match read_line(&mut output, &mut line).await {
                Ok(true) => {
                    let text = String::from_utf8_lossy(&line);
                    let line = parse_log_line(&text);
                    if line.event != LogEvent::Chatter {
                        line.text.clone_into(&mut last_line.borrow_mut());
                    }
                    self.process_log_line(&line);
                }
                Ok(false) => return,
                Err(error) => {
                    tracing::warn!(device = self.name, %error, "failed to read MPS daemon output");
                    return;
                }
            }
        }
    }

    fn process_log_line(&self, line: &LogLine<'_>) {
        let (device, source, pid, text) = (&self.name, line.source, line.pid, line.text);
        match line.event {
            LogEvent::Chatter => tracing::trace!(device, source, pid, "{text}"),
            LogEvent::Routine => tracing::debug!(device, source, pid, "{text}"),
            LogEvent::ClientConnected(_) => {
                tracing::debug!(device, source, pid, "{text}");
                self.request_probe();
            }
            LogEvent::ClientDisconnected(client) => {
                tracing::debug!(device, source, pid, "{text}");
                self.clients.borrow_mut().remove_disconnected(client);
                self.request_probe();
            }
            LogEvent::ClientLost(client) => {
                tracing::debug!(device, source, pid, "{text}");
                let is_terminated = self.clients.borrow().is_terminated(client);
                if !is_terminated {
                    self.record_exit(client);
                }
                self.request_probe();
            }
            LogEvent::Fault { client } => {
                tracing::error!(device, source, pid, "{text}");
                // In other states, the server has no clients that a fault could break, or the next
                // probe records the fault.
                let serves = matches!(self.phase.borrow().state, DaemonState::Active | DaemonState::Fault);
                if serves && self.record_logged_fault(client) {
                    self.set_state(DaemonState::Fault, None);
                }
                self.request_probe();
            }
            LogEvent::ServerExited { server, .. } => {
                tracing::warn!(device, source, pid, "{text}");
                let phase = *self.phase.borrow();
                if phase.server == Some(server) && phase.is_open() {
                    // Change the state now, not at the next probe: clients that connect now have to
                    // wait.
                    self.set_state(DaemonState::Restarting, Some("the MPS server exited"));
                }
                self.request_probe();
            }
            LogEvent::ServerReady(_) | LogEvent::Version(_) | LogEvent::Other => {
                tracing::info!(device, source, pid, "{text}");
            }
        }
    }
}

/// Reads a line, or a part of [`MAX_LOG_LINE_BYTES`] bytes. Returns false at the end of the output.
async fn read_line(output: &mut BufReader<pipe::Receiver>, line: &mut Vec<u8>) -> io::Result<bool> {
    loop {
        let buffer = output.fill_buf().await?;
        if buffer.is_empty() {
            return Ok(!line.is_empty());
        }
        let room = MAX_LOG_LINE_BYTES.saturating_sub(line.len());
        let end = buffer.iter().take(room).position(|&byte| byte == b'\n');
        let taken = end.unwrap_or(buffer.len().min(room));
        line.extend(buffer.iter().take(taken));
        output.consume(taken + usize::from(end.is_some()));
        if end.is_some() || line.len() >= MAX_LOG_LINE_BYTES {
            return Ok(true);
        }
    }
}
