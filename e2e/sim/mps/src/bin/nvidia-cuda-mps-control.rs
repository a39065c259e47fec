//! Stand-in for NVIDIA's MPS control daemon and its command line.
fn main() -> std::process::ExitCode {
    sim_mps::tool::main()
}
