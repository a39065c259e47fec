//! The kubelet's device plugin v1beta1 and PodResources v1 protocols: registration, streams,
//! sockets. It knows no GPU.
//!
//! An agent hands [`Plugins`] the resources to serve, as a map from names to [`Resource`]s, as
//! often as it likes; what did not change is not disturbed. Tasks, and what passes between them:
//!
//! ```text
//!  Plugins::set ──watch──▶ manager ── holds the flock, watches the directory (inotify)
//!                             │ one task per resource: the resource, whether to go on, "look at the directory again" (all watch)
//!                             ▼
//!                       registration ── kubelet.sock: Register, with retries; decides by looking, never by counting events
//!                             │ one session per registration, at a socket with a name of its own
//!                             ▼
//!                       gRPC server ◀── the kubelet: ListAndWatch (fed from Resource::devices), Allocate, …
//!
//!  Plugins::state ◀─watch── all of them
//! ```

mod checkpoint;
mod connections;
mod directory;
#[cfg(feature = "fake")]
pub mod fake;
mod plugins;
mod pods;
pub mod proto;
mod registration;
mod resource;
mod server;

pub use checkpoint::{AllocatedDevices, KubeletCheckpoint, allocated};
pub use directory::{DEVICE_PLUGINS, DirectoryError};
pub use plugins::{Backoff, Config, DirectoryState, Phase, Plugins, PluginsState, ResourceState, Timings};
pub use pods::{AllocatableDevices, HeldDevices, POD_RESOURCES, PodResources, PodResourcesError, held};
pub use resource::{
    ContainerResponse, Device, DeviceId, DeviceList, DeviceNode, InvalidDeviceId, InvalidResourceName, Mount, Options,
    PreferredRequest, Refusal, Resource, ResourceName,
};
