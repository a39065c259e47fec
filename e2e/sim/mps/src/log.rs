//! Writes log lines in the format of the real tools:
//! `[2026-11-21 10:15:39.123 Control  1234] text`.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// The destination of log lines.
#[derive(Debug)]
pub struct Log(Mutex<LogDestination>);

#[derive(Debug)]
enum LogDestination {
    Stdout,
    File(File),
}

impl Log {
    /// Returns a log that writes to standard output.
    pub fn stdout() -> Self {
        Self(Mutex::new(LogDestination::Stdout))
    }

    /// Returns a log that appends to a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub fn append(path: &Path) -> io::Result<Self> {
        Ok(Self(Mutex::new(LogDestination::File(OpenOptions::new().create(true).append(true).open(path)?))))
    }

    /// Formats and writes a line of a component (`Control`, `Server` or `Other`) with a PID.
    pub fn write_line(&self, component: &str, pid: u32, text: &str) {
        self.write_raw(format!("{}\n", format_line(Timestamp::now(), component, pid, text)).as_bytes());
    }

    /// Writes a line that is already formatted.
    pub fn write_raw(&self, line: &[u8]) {
        // Ignore errors, because a log that nobody reads must not stop the daemon.
        let _ = match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            LogDestination::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(line).and_then(|()| out.flush())
            }
            LogDestination::File(file) => file.write_all(line),
        };
    }
}

fn format_line(now: Timestamp, component: &str, pid: u32, text: &str) -> String {
    let time = now.to_zoned(TimeZone::UTC).strftime("%Y-%m-%d %H:%M:%S%.3f").to_string();
    format!("[{time} {component} {pid:>5}] {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_the_format_of_the_real_tools() {
        let time: Timestamp = "2026-11-21T10:15:39.123456Z".parse().unwrap();
        assert_eq!(
            format_line(time, "Control", 261, "NEW SERVER 337: Ready"),
            "[2026-11-21 10:15:39.123 Control   261] NEW SERVER 337: Ready"
        );
    }
}
