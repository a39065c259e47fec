//! Generated bindings of the vendored protocols.

/// Device plugin v1beta1.
#[allow(clippy::all, clippy::pedantic, missing_docs, unreachable_pub, reason = "generated")]
pub mod v1beta1 {
    include!(concat!(env!("OUT_DIR"), "/v1beta1.rs"));
}

/// PodResources v1.
#[allow(clippy::all, clippy::pedantic, missing_docs, unreachable_pub, reason = "generated")]
pub mod podresources {
    include!(concat!(env!("OUT_DIR"), "/v1.rs"));
}

/// The version of the device plugin API in [`v1beta1`].
pub const DEVICE_PLUGIN_VERSION: &str = "v1beta1";
