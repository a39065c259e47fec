//! A simulated MPS server. The control daemon starts this program.
fn main() -> std::process::ExitCode {
    sim_mps::server::main()
}
