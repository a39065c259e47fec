//! Benchmarks of Cleave beside published figures.
fn main() {}
