//! A resource in terms of the device plugin API: devices, answers and refusals. This module does no
//! I/O and does not depend on GPUs.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::sync::watch;

use crate::proto::v1beta1 as wire;

/// One extended resource of this node, with the answers to the kubelet's calls.
///
/// Keep every wait short and bounded: while the kubelet waits for devices or settings, it admits no
/// pod, and while it waits for [`pre_start`](Self::pre_start), the container does not start.
pub trait Resource: Send + Sync + 'static {
    /// Returns a receiver of the device list. The open stream sends the newest published list, even
    /// if the list equals the previous one, because the kubelet writes its
    /// [checkpoint](crate::KubeletCheckpoint) for each list. The stream does not send the same
    /// `Arc` twice in succession.
    ///
    /// If the sender is dropped, the last list remains valid.
    fn devices(&self) -> watch::Receiver<Arc<DeviceList>>;

    /// Returns the optional calls that the kubelet may use. The kubelet reads the options at each
    /// registration. The plugin registers again when a replacement resource has different options.
    fn options(&self) -> PluginOptions;

    /// Chooses devices for a container from the available devices. The answer is a hint: the
    /// kubelet may allocate other devices.
    fn preferred_devices<'a>(&'a self, request: PreferredRequest<'a>) -> BoxFuture<'a, Result<Vec<String>, Refusal>>;

    /// Returns the settings for a container to which the kubelet allocates exactly these devices.
    /// The kubelet can repeat the call for the same devices.
    ///
    /// `ids` contains the ids as the kubelet sent them. This method must refuse unknown ids,
    /// repeated ids and empty lists.
    fn allocate<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<ContainerResponse, Refusal>>;

    /// Prepares a container with these devices. The kubelet requests this call before each start of
    /// the container if [`PluginOptions::pre_start`] is set. The kubelet waits at most 30 s and
    /// retries with the backoff of the container's restarts.
    fn pre_start<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<(), Refusal>> {
        let _ = ids;
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The optional calls that a resource supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PluginOptions {
    /// The kubelet calls `PreStartContainer` before each start of a container.
    pub pre_start: bool,
    /// The kubelet can call `GetPreferredAllocation`.
    pub preferred: bool,
}

/// The name of an extended resource that the kubelet accepts, such as `nvidia.com/gpu-mps`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceName(Arc<str>);

/// Why a string is not the name of an extended resource.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not the name of an extended resource: {why}")]
pub struct InvalidResourceName {
    name: String,
    why: &'static str,
}

impl ResourceName {
    /// Maximum length of the domain in bytes. The kubelet checks `requests.<name>` as a qualified
    /// name. The domain of a qualified name may have 253 bytes.
    const MAX_DOMAIN_BYTES: usize = 253 - "requests.".len();
    const MAX_NAME_BYTES: usize = 63;

    /// Parses a name. Accepts the names that the kubelet's `IsExtendedResourceName` accepts.
    ///
    /// # Errors
    /// Returns [`InvalidResourceName`] with the reason for any other name.
    pub fn parse(name: &str) -> Result<Self, InvalidResourceName> {
        let refuse = |why| Err(InvalidResourceName { name: truncate(name), why });
        let Some((domain, short)) = name.split_once('/') else {
            return refuse("a domain is required, as in `example.com/device`");
        };
        if name.contains("kubernetes.io/") {
            return refuse("`kubernetes.io` is reserved for native resources");
        }
        if name.starts_with("requests.") {
            return refuse("`requests.` is reserved for quotas");
        }
        if domain.len() > Self::MAX_DOMAIN_BYTES || !domain.split('.').all(is_dns_label) {
            return refuse("the part before `/` is not a DNS subdomain of at most 244 characters");
        }
        if short.len() > Self::MAX_NAME_BYTES || !is_unqualified_name(short) {
            return refuse(
                "the part after `/` is not 1 to 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends",
            );
        }
        Ok(Self(name.into()))
    }

    /// Returns the name as a string.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_dns_label(label: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    label.bytes().all(inner) && !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
}

fn is_unqualified_name(name: &str) -> bool {
    let ends = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    ends(name.bytes().next())
        && ends(name.bytes().next_back())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for ResourceName {
    type Err = InvalidResourceName;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::parse(name)
    }
}

impl Borrow<str> for ResourceName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// The id of a device: 1 to 63 bytes, unique within its resource, and never changed. Cheap to
/// clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(Arc<str>);

/// Truncates a string for an error message. The string is external input and can be long.
fn truncate(text: &str) -> String {
    text.chars().take(100).collect()
}

/// Why a string is not a device id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device id: the kubelet's API allows 1 to 63 bytes")]
pub struct InvalidDeviceId(String);

impl DeviceId {
    /// Parses an id. Checks only the length, because the API has no other requirement.
    ///
    /// # Errors
    /// Returns [`InvalidDeviceId`] if the id is empty or longer than 63 bytes.
    pub fn parse(id: &str) -> Result<Self, InvalidDeviceId> {
        if id.is_empty() || id.len() > 63 {
            return Err(InvalidDeviceId(truncate(id)));
        }
        Ok(Self(id.into()))
    }

    /// Returns the id as a string.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Borrow<str> for DeviceId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// One device of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The device's id.
    pub id: DeviceId,
    /// Whether the kubelet may allocate the device. After a restart of the kubelet, a container
    /// that does not run starts only if its devices are healthy.
    pub healthy: bool,
    /// The NUMA node of the device, if known.
    pub numa: Option<u32>,
}

/// All devices of a resource at one time.
pub type DeviceList = Vec<Device>;

/// The API's health value of a device that the kubelet may allocate.
const HEALTHY: &str = "Healthy";

pub(crate) fn list_response(devices: &DeviceList) -> wire::ListAndWatchResponse {
    let devices = devices
        .iter()
        .map(|device| wire::Device {
            id: device.id.as_str().to_owned(),
            health: if device.healthy { HEALTHY } else { "Unhealthy" }.to_owned(),
            topology: device.numa.map(|node| wire::TopologyInfo { nodes: vec![wire::NumaNode { id: node.into() }] }),
        })
        .collect();
    wire::ListAndWatchResponse { devices }
}

/// Parses a device list from another plugin.
///
/// # Errors
/// Returns [`InvalidDeviceId`] with the first id that the API does not allow.
pub(crate) fn parse_list(list: wire::ListAndWatchResponse) -> Result<DeviceList, InvalidDeviceId> {
    let parse = |device: wire::Device| {
        let numa = device.topology.and_then(|topology| topology.nodes.first().map(|node| node.id));
        Ok(Device {
            id: DeviceId::parse(&device.id)?,
            healthy: device.health == HEALTHY,
            numa: numa.and_then(|node| u32::try_from(node).ok()),
        })
    };
    list.devices.into_iter().map(parse).collect()
}

/// A request to choose devices for a container, as the kubelet sent it.
#[derive(Clone, Copy, Debug)]
pub struct PreferredRequest<'a> {
    /// Devices to choose from, including `must_include`. The kubelet's order is random.
    pub available: &'a [String],
    /// Devices that must be part of the answer, because they are already allocated to the
    /// container.
    pub must_include: &'a [String],
    /// Number of devices to choose, including `must_include`.
    pub size: usize,
}

impl<'a> TryFrom<&'a wire::ContainerPreferredAllocationRequest> for PreferredRequest<'a> {
    type Error = Refusal;

    /// Converts the kubelet's request. Refuses a request with inconsistent numbers. The resource
    /// itself checks the ids.
    fn try_from(wire: &'a wire::ContainerPreferredAllocationRequest) -> Result<Self, Refusal> {
        let (available, must_include) = (&wire.available_device_i_ds, &wire.must_include_device_i_ds);
        let Ok(size) = usize::try_from(wire.allocation_size) else {
            return Err(Refusal::Invalid(format!("{} devices requested", wire.allocation_size)));
        };
        if size > available.len() {
            return Err(Refusal::Invalid(format!(
                "{size} devices requested, but only {} are available",
                available.len()
            )));
        }
        if must_include.len() > size {
            return Err(Refusal::Invalid(format!(
                "{size} devices requested, but {} devices must be included",
                must_include.len()
            )));
        }
        Ok(Self { available, must_include, size })
    }
}

/// Settings for a container to which devices are allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerResponse {
    /// Environment variables.
    pub envs: BTreeMap<String, String>,
    /// Host directories or files to mount.
    pub mounts: Vec<Mount>,
    /// Device nodes.
    pub devices: Vec<DeviceNode>,
    /// Fully qualified CDI names, such as `nvidia.com/gpu=all`.
    pub cdi_names: Vec<String>,
    /// Annotations for the container runtime. The annotations are not set on the pod.
    pub annotations: BTreeMap<String, String>,
}

/// A host path that is mounted into a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Path in the container.
    pub container_path: String,
    /// Path on the host.
    pub host_path: String,
    /// Whether the mount is read-only.
    pub read_only: bool,
}

/// A device node of the host that is added to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// Path in the container.
    pub container_path: String,
    /// Path on the host.
    pub host_path: String,
    /// Permissions in the cgroup: any of `r`, `w` and `m`.
    pub permissions: String,
}

impl From<ContainerResponse> for wire::ContainerAllocateResponse {
    fn from(response: ContainerResponse) -> Self {
        let ContainerResponse { envs, mounts, devices, cdi_names, annotations } = response;
        Self {
            envs,
            mounts: mounts
                .into_iter()
                .map(|Mount { container_path, host_path, read_only }| wire::Mount {
                    container_path,
                    host_path,
                    read_only,
                })
                .collect(),
            devices: devices
                .into_iter()
                .map(|DeviceNode { container_path, host_path, permissions }| wire::DeviceSpec {
                    container_path,
                    host_path,
                    permissions,
                })
                .collect(),
            annotations,
            cdi_devices: cdi_names.into_iter().map(|name| wire::CdiDevice { name }).collect(),
        }
    }
}

impl From<wire::ContainerAllocateResponse> for ContainerResponse {
    fn from(response: wire::ContainerAllocateResponse) -> Self {
        let wire::ContainerAllocateResponse { envs, mounts, devices, annotations, cdi_devices } = response;
        Self {
            envs,
            mounts: mounts
                .into_iter()
                .map(|wire::Mount { container_path, host_path, read_only }| Mount {
                    container_path,
                    host_path,
                    read_only,
                })
                .collect(),
            devices: devices
                .into_iter()
                .map(|wire::DeviceSpec { container_path, host_path, permissions }| DeviceNode {
                    container_path,
                    host_path,
                    permissions,
                })
                .collect(),
            cdi_names: cdi_devices.into_iter().map(|device| device.name).collect(),
            annotations,
        }
    }
}

/// Why a plugin refuses a request. The text appears in the pod's events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The plugin can never grant the request. Examples are unknown or repeated ids, or shares of
    /// two GPUs.
    #[error("{0}")]
    Invalid(String),
    /// The request is valid, but the resource is not ready for it yet. The kubelet retries a failed
    /// start of a container.
    #[error("{0}")]
    NotReady(String),
}

impl From<tonic::Status> for Refusal {
    /// Converts another plugin's refusal.
    fn from(status: tonic::Status) -> Self {
        let sentence = status.message().to_owned();
        match status.code() {
            tonic::Code::InvalidArgument => Self::Invalid(sentence),
            _ => Self::NotReady(sentence),
        }
    }
}

impl From<Refusal> for tonic::Status {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Invalid(sentence) => Self::invalid_argument(sentence),
            Refusal::NotReady(sentence) => Self::unavailable(sentence),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_resource_names_are_accepted() {
        let longest =
            format!("{}.{}.{}.{}/{}", "a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(52), "e".repeat(63));
        for name in ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared", "a/B_c", longest.as_str()] {
            assert_eq!(ResourceName::parse(name).expect(name).as_str(), name);
        }
    }

    #[test]
    fn names_that_the_kubelet_refuses_are_refused() {
        let long_domain = format!("{}.{}.{}.{}/x", "a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(53));
        let long_name = format!("nvidia.com/{}", "x".repeat(64));
        for name in [
            "",
            "gpu",
            "/gpu",
            "nvidia.com/",
            "nvidia.com/a/b",
            "nvidia.com/-a",
            "nvidia.com/a-",
            "nvidia.com/a b",
            "nvidia.com/../x",
            "Nvidia.com/gpu",
            "nvidia..com/gpu",
            "kubernetes.io/gpu",
            "x.kubernetes.io/gpu",
            "requests.nvidia.com/gpu",
            long_domain.as_str(),
            long_name.as_str(),
        ] {
            assert!(ResourceName::parse(name).is_err(), "{name}");
        }
    }

    #[test]
    fn an_error_quotes_only_the_beginning_of_a_long_name() {
        let long = "\n".repeat(100_000);
        assert!(ResourceName::parse(&long).expect_err("no name").to_string().len() < 1000);
        assert!(DeviceId::parse(&long).expect_err("no id").to_string().len() < 1000);
    }

    #[test]
    fn device_ids_have_1_to_63_bytes() {
        assert!(DeviceId::parse("GPU-fef8089b-4820-abfc-e83e-94318197576e::47").is_ok());
        assert!(DeviceId::parse("").is_err());
        assert!(DeviceId::parse(&"x".repeat(63)).is_ok());
        assert!(DeviceId::parse(&"x".repeat(64)).is_err());
    }

    #[test]
    fn a_device_list_keeps_order_health_and_numa() {
        let device = |id: &str, healthy, numa| Device { id: DeviceId::parse(id).expect("an id"), healthy, numa };
        let sent = list_response(&vec![device("b", true, Some(1)), device("a", false, None)]);
        let read: Vec<_> = sent
            .devices
            .iter()
            .map(|d| (d.id.as_str(), d.health.as_str(), d.topology.as_ref().map(|t| t.nodes[0].id)))
            .collect();
        assert_eq!(read, [("b", "Healthy", Some(1)), ("a", "Unhealthy", None)]);
    }
}
