//! Compiles the vendored kubelet protocols; protox replaces `protoc`.
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    // Each `api.proto` is its own root: both files have the same name.
    for folder in ["deviceplugin/v1beta1", "podresources/v1"] {
        let root = format!("../../proto/{folder}");
        println!("cargo::rerun-if-changed={root}/api.proto");
        let files = protox::compile(["api.proto"], [&root])?;
        tonic_prost_build::configure()
            // Ordered maps: equal messages have equal bytes.
            .btree_map(".")
            .compile_fds(files)?;
    }
    Ok(())
}
