//! Prints the program's output.

use std::io::{self, Write};

/// Prints a value as one line of JSON. Ignores errors, because the reader may have exited.
pub(crate) fn print_json_line(value: &serde_json::Value) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{value}").and_then(|()| out.flush());
}
