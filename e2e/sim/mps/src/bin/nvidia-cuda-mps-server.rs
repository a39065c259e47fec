//! Stand-in for NVIDIA's MPS server; the control daemon starts it.
fn main() -> std::process::ExitCode {
    sim_mps::server::main()
}
