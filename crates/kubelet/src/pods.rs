//! PodResources v1: the kubelet's report of each container's devices.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use tonic::transport::Channel;

use crate::proto::podresources as wire;
use crate::proto::podresources::pod_resources_lister_client::PodResourcesListerClient;

/// The socket of the kubelet's PodResources API.
pub const POD_RESOURCES_SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";

type Client = PodResourcesListerClient<Channel>;

/// Maximum size of an answer in bytes. Kubernetes' own clients of this API also allow 16 MiB.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Devices that are allocated to a container.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerDevices {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// Name of the extended resource.
    pub resource: String,
    /// Ids of the devices, sorted.
    pub ids: Vec<String>,
}

/// Devices that the kubelet can allocate, including devices that are already allocated.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AllocatableDevices {
    /// Name of the extended resource.
    pub resource: String,
    /// Ids of the devices.
    pub ids: Vec<String>,
    /// NUMA nodes of the devices.
    pub numa: Vec<i64>,
}

/// Why a call to the PodResources API failed.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
    /// The socket's path is relative or not UTF-8.
    #[error("the path {0:?} of the kubelet's PodResources socket is not absolute, or not UTF-8")]
    Path(std::path::PathBuf),
    /// The kubelet did not answer within the deadline.
    #[error("the kubelet's PodResources API did not answer within {} s", .0.as_secs_f64())]
    Deadline(Duration),
    /// The kubelet returned an error, or the connection failed.
    #[error("the kubelet's PodResources API failed: {}", .0.message())]
    Call(#[source] Box<tonic::Status>),
}

/// A client of the kubelet's PodResources API. The client connects at the first call, and
/// reconnects after the kubelet restarts.
///
/// The kubelet answers at most 100 calls per second.
#[derive(Clone, Debug)]
pub struct PodResources {
    client: Client,
    deadline: Duration,
}

impl PodResources {
    /// Creates a client for the socket at this absolute path. Each call ends within the deadline.
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Returns [`PodResourcesError::Path`] if the path is not absolute or not valid UTF-8.
    pub fn new(socket: &Path, deadline: Duration) -> Result<Self, PodResourcesError> {
        let bad = || PodResourcesError::Path(socket.to_owned());
        let path = socket.to_str().filter(|_| socket.is_absolute()).ok_or_else(bad)?;
        let endpoint = crate::registration::unix_endpoint(path).ok_or_else(bad)?;
        let client = PodResourcesListerClient::new(endpoint.connect_lazy()).max_decoding_message_size(MAX_ANSWER_BYTES);
        Ok(Self { client, deadline })
    }

    /// Lists all device plugin devices that are allocated to containers. Pods and containers are in
    /// the kubelet's order.
    ///
    /// # Errors
    /// Returns [`PodResourcesError`] if the call fails or does not end within the deadline.
    pub async fn list(&self) -> Result<Vec<ContainerDevices>, PodResourcesError> {
        let list = async |mut client: Client| client.list(wire::ListPodResourcesRequest {}).await;
        Ok(container_devices(self.call_kubelet(list).await?))
    }

    /// Lists all device plugin devices that the kubelet can allocate.
    ///
    /// # Errors
    /// Returns [`PodResourcesError`] if the call fails or does not end within the deadline.
    pub async fn list_allocatable(&self) -> Result<Vec<AllocatableDevices>, PodResourcesError> {
        let call_kubelet =
            async |mut client: Client| client.get_allocatable_resources(wire::AllocatableResourcesRequest {}).await;
        let devices = self.call_kubelet(call_kubelet).await?.devices.into_iter().map(|devices| AllocatableDevices {
            resource: devices.resource_name,
            ids: devices.device_ids,
            numa: devices.topology.map(|t| t.nodes.into_iter().map(|node| node.id).collect()).unwrap_or_default(),
        });
        Ok(devices.collect())
    }

    async fn call_kubelet<T>(
        &self,
        call: impl AsyncFn(Client) -> Result<tonic::Response<T>, tonic::Status>,
    ) -> Result<T, PodResourcesError> {
        let answer = async {
            match call(self.client.clone()).await {
                // After the kubelet restarts, the old connection fails at its next use. Repeating a
                // call is safe, because calls only read.
                Err(status) if status.source().is_some() => call(self.client.clone()).await,
                answer => answer,
            }
        };
        match tokio::time::timeout(self.deadline, answer).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(PodResourcesError::Call(Box::new(status))),
            Err(_) => Err(PodResourcesError::Deadline(self.deadline)),
        }
    }
}

/// Returns one entry for each container and resource, with sorted ids. The kubelet sends one entry
/// for each NUMA node.
pub fn container_devices(answer: wire::ListPodResourcesResponse) -> Vec<ContainerDevices> {
    let mut rows: Vec<ContainerDevices> = Vec::new();
    for pod in answer.pod_resources {
        for container in pod.containers {
            let first = rows.len();
            for devices in container.devices {
                if let Some(row) = rows[first..].iter_mut().find(|row| row.resource == devices.resource_name) {
                    row.ids.extend(devices.device_ids);
                    continue;
                }
                rows.push(ContainerDevices {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name.clone(),
                    resource: devices.resource_name,
                    ids: devices.device_ids,
                });
            }
        }
    }
    // The kubelet's order of ids changes from call to call. Sort the ids, so that two lists can be
    // compared.
    rows.iter_mut().for_each(|row| row.ids.sort_unstable());
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_ids_in_the_kubelets_list_does_not_matter() {
        let answer = |ids: [&str; 3]| wire::ListPodResourcesResponse {
            pod_resources: vec![wire::PodResources {
                name: "p".to_owned(),
                containers: vec![wire::ContainerResources {
                    devices: vec![wire::ContainerDevices {
                        resource_name: "r".to_owned(),
                        device_ids: ids.map(str::to_owned).to_vec(),
                        topology: None,
                    }],
                    ..Default::default()
                }],
                ..Default::default()
            }],
        };
        assert_eq!(container_devices(answer(["c", "a", "b"])), container_devices(answer(["b", "c", "a"])));
    }

    #[test]
    fn a_containers_devices_of_several_numa_nodes_are_one_entry() {
        let devices = |resource: &str, id: &str| wire::ContainerDevices {
            resource_name: resource.to_owned(),
            device_ids: vec![id.to_owned()],
            topology: None,
        };
        let container =
            |name: &str, devices| wire::ContainerResources { name: name.to_owned(), devices, ..Default::default() };
        let rows = container_devices(wire::ListPodResourcesResponse {
            pod_resources: vec![wire::PodResources {
                name: "p".to_owned(),
                namespace: "n".to_owned(),
                containers: vec![
                    container("a", vec![devices("r", "1"), devices("s", "1"), devices("r", "2")]),
                    container("b", vec![devices("r", "3")]),
                    container("c", vec![]),
                ],
            }],
        });
        let read: Vec<_> = rows.iter().map(|r| (r.container.as_str(), r.resource.as_str(), r.ids.join(","))).collect();
        assert_eq!(read, [("a", "r", "1,2".to_owned()), ("a", "s", "1".to_owned()), ("b", "r", "3".to_owned())]);
    }
}
