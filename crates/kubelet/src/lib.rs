//! The kubelet's device plugin v1beta1 and PodResources v1 protocols: registration, streams and
//! sockets. No code in this crate depends on GPUs.
//!
//! An agent passes [`PluginServer`] the resources to serve, as a map from names to [`Resource`]s,
//! whenever they change. The streams of unchanged resources continue.
//!
//! ```text
//!  PluginServer::set ──watch──▶ manager: locks the directory, watches it with inotify
//!                                  │ starts one task per resource
//!                                  ▼
//!                            registration ──▶ kubelet.sock: Register, with retries
//!                                  │ one session per registration, each with its own socket
//!                                  ▼
//!                            gRPC server ◀── kubelet: ListAndWatch, Allocate, …
//!
//!  PluginServer::state ◀─watch── all tasks
//! ```
//!
//! A resource's task decides from the state of the directory and never counts events, because
//! events can be lost or repeated.

mod checkpoint;
mod connections;
mod directory;
#[cfg(feature = "fake")]
pub mod fake;
mod plugins;
mod pods;
pub mod proto;
mod registration;
mod relay;
mod resource;
mod server;
mod supervisor;

pub use checkpoint::{AllocatedDevices, KubeletCheckpoint, parse_allocated_devices};
pub use directory::{DEVICE_PLUGIN_DIRECTORY, DirectoryError};
pub use plugins::{
    Backoff, DirectoryState, PluginServer, PluginServerConfig, PluginServerState, PluginTimings, ResourcePhase,
    ResourceState,
};
pub use pods::{
    AllocatableDevices, ContainerDevices, POD_RESOURCES_SOCKET, PodResources, PodResourcesError, container_devices,
};
pub use relay::{RelayConfig, RelayError, RelayTimings, run_relay};
pub use resource::{
    ContainerResponse, Device, DeviceId, DeviceList, DeviceNode, InvalidDeviceId, InvalidResourceName, Mount,
    PluginOptions, PreferredRequest, Refusal, Resource, ResourceName,
};
pub use supervisor::SupervisorLock;
