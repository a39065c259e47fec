//! A simulated MPS server. The control daemon starts it.
fn main() -> std::process::ExitCode {
    sim_mps::server::main()
}
