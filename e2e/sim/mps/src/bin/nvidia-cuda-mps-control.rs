//! A simulated MPS control daemon and its command line.
fn main() -> std::process::ExitCode {
    sim_mps::tool::main()
}
