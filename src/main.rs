//! The `cleave` binary: parses the command line and calls the crate that does the work.
fn main() {}
