//! Describes, shows and changes the simulated machine, faults included.
fn main() {}
