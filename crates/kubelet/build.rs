//! Compiles the vendored kubelet protocols; protox replaces `protoc`.
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    // Compile each directory with its own include path, because both files are named `api.proto`.
    for directory in ["deviceplugin/v1beta1", "podresources/v1"] {
        let root = format!("../../proto/{directory}");
        println!("cargo::rerun-if-changed={root}/api.proto");
        let files = protox::compile(["api.proto"], [&root])?;
        tonic_prost_build::configure()
            // Use ordered maps, so that equal messages have equal bytes.
            .btree_map(".")
            .compile_fds(files)?;
    }
    Ok(())
}
