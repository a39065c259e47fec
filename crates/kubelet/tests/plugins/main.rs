//! Tests the device plugin with a fake kubelet on Unix sockets. `registration` tests registrations,
//! streams and the directory. `calls` tests calls and connections.
//! `relay` tests the relay between an agent and the kubelet.

#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests")]

mod calls;
mod registration;
mod relay;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cleave_kubelet::fake::{Endpoint, FakeKubelet, FakeKubeletState};
use cleave_kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use cleave_kubelet::{
    Backoff, ContainerResponse, Device, DeviceId, DeviceList, DeviceNode, Mount, PluginOptions, PluginServer,
    PluginServerConfig, PluginServerState, PreferredRequest, Refusal, Resource, ResourceName,
};
use futures::future::BoxFuture;
use tokio::sync::watch;
use tonic::transport::Endpoint as Address;

/// Deadline for each condition, much longer than a busy machine needs to meet any condition.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// A duration that is longer than any test, for timers that must not fire.
const LONGER_THAN_ANY_TEST: Duration = Duration::from_secs(3600);

const MPS_RESOURCE: &str = "nvidia.com/gpu-mps";
const TIMESLICE_RESOURCE: &str = "nvidia.com/gpu-timeslice";

/// A resource with a device list that the test can replace.
struct TestResource {
    devices: watch::Sender<Arc<DeviceList>>,
    options: PluginOptions,
}

fn device_list(ids: &[&str]) -> Arc<DeviceList> {
    let device = |id: &&str| Device { id: DeviceId::parse(id).expect("an id"), healthy: true, numa: None };
    Arc::new(ids.iter().map(device).collect())
}

impl TestResource {
    fn new(ids: &[&str]) -> Arc<Self> {
        Self::with_options(ids, PluginOptions { pre_start: true, preferred: true })
    }

    fn with_options(ids: &[&str], options: PluginOptions) -> Arc<Self> {
        Arc::new(Self { devices: watch::Sender::new(device_list(ids)), options })
    }
}

impl Resource for TestResource {
    fn devices(&self) -> watch::Receiver<Arc<DeviceList>> {
        self.devices.subscribe()
    }

    fn options(&self) -> PluginOptions {
        self.options
    }

    fn preferred_devices<'a>(&'a self, request: PreferredRequest<'a>) -> BoxFuture<'a, Result<Vec<String>, Refusal>> {
        let others = request.available.iter().filter(|id| !request.must_include.contains(id));
        let chosen = request.must_include.iter().chain(others).take(request.size).cloned().collect();
        Box::pin(std::future::ready(Ok(chosen)))
    }

    fn allocate<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<ContainerResponse, Refusal>> {
        let known = self.devices.borrow();
        if let Some(id) = ids.iter().find(|id| !known.iter().any(|device| device.id.as_str() == id.as_str())) {
            return Box::pin(std::future::ready(Err(Refusal::Invalid(format!("no device {id}")))));
        }
        Box::pin(std::future::ready(Ok(ContainerResponse {
            envs: BTreeMap::from([("IDS".to_owned(), ids.join(","))]),
            mounts: vec![Mount { container_path: "/c".into(), host_path: "/h".into(), read_only: true }],
            devices: vec![DeviceNode {
                container_path: "/dev/c".into(),
                host_path: "/dev/h".into(),
                permissions: "rw".into(),
            }],
            cdi_names: vec!["nvidia.com/gpu=0".into()],
            annotations: BTreeMap::from([("a".to_owned(), "b".to_owned())]),
        })))
    }

    fn pre_start<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            match ids {
                [] => Err(Refusal::NotReady("the daemon starts".to_owned())),
                _ => Ok(()),
            }
        })
    }
}

fn resources_by_name(named: &[(&str, &Arc<TestResource>)]) -> BTreeMap<ResourceName, Arc<dyn Resource>> {
    named
        .iter()
        .map(|(name, shares)| {
            let resource: Arc<dyn Resource> = Arc::clone(shares) as _;
            (ResourceName::parse(name).expect("a name"), resource)
        })
        .collect()
}

/// A device plugin directory. The timers for streams, registrations and polls do not fire unless a
/// test sets them.
struct Fixture {
    directory: tempfile::TempDir,
    config: PluginServerConfig,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let mut config = PluginServerConfig::new(directory.path());
        config.timings.stream = Backoff { first: LONGER_THAN_ANY_TEST, cap: LONGER_THAN_ANY_TEST };
        config.timings.register_deadline = LONGER_THAN_ANY_TEST;
        config.timings.poll_watched = LONGER_THAN_ANY_TEST;
        Self { directory, config }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn start_kubelet(&self) -> FakeKubelet {
        FakeKubelet::start_in(self.path()).expect("a kubelet")
    }

    fn start_plugins(&self, named: &[(&str, &Arc<TestResource>)]) -> PluginServer {
        let plugins = PluginServer::start(&self.config).expect("plugins");
        plugins.set(resources_by_name(named));
        plugins
    }

    /// Returns the sorted names of the files in the directory, except `kubelet.sock`.
    fn socket_names(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.path()).expect("a directory").map(|e| e.expect("an entry").file_name());
        let mut names: Vec<_> =
            names.map(|n| n.into_string().expect("UTF-8")).filter(|n| n != "kubelet.sock").collect();
        names.sort();
        names
    }
}

async fn wait_for_kubelet(
    kubelet: &FakeKubelet,
    what: &str,
    condition: impl FnMut(&FakeKubeletState) -> bool,
) -> FakeKubeletState {
    match kubelet.wait_for(TEST_TIMEOUT, condition).await {
        Some(seen) => seen,
        None => panic!("the kubelet does not see {what}, but {:#?}", *kubelet.state().borrow()),
    }
}

/// Waits until the kubelet can allocate exactly these devices.
async fn wait_until_served(kubelet: &FakeKubelet, resource: &str, ids: &[&str]) -> Endpoint {
    let has = |endpoint: &Endpoint| endpoint.connected && endpoint.healthy_ids() == ids;
    let condition = |seen: &FakeKubeletState| seen.endpoints.get(resource).is_some_and(has);
    wait_for_kubelet(kubelet, &format!("{ids:?} of {resource}"), condition).await.endpoints[resource].clone()
}

async fn wait_for_state(
    plugins: &PluginServer,
    what: &str,
    condition: impl FnMut(&PluginServerState) -> bool,
) -> PluginServerState {
    let mut state = plugins.state();
    let found = tokio::time::timeout(TEST_TIMEOUT, state.wait_for(condition)).await;
    let found = found.map(|state| state.expect("a manager").clone());
    found.unwrap_or_else(|_| panic!("never {what}: {:#?}", *plugins.state().borrow()))
}

async fn wait_until_ready(plugins: &PluginServer) -> PluginServerState {
    wait_for_state(plugins, "ready", |state| state.is_ready() && !state.resources.is_empty()).await
}

/// Polls until a condition is met. Use this function for conditions that no channel reports, such
/// as the existence of a file.
async fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let poll = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(TEST_TIMEOUT, poll).await.is_ok(), "never {what}");
}

fn count_registrations(kubelet: &FakeKubelet, resource: &str) -> usize {
    kubelet.state().borrow().registrations.iter().filter(|r| r.request.resource_name == resource).count()
}

/// Connects to a plugin's socket, as the kubelet does.
async fn connect_to_plugin(
    socket: &Path,
) -> Result<DevicePluginClient<tonic::transport::Channel>, tonic::transport::Error> {
    let address = Address::from_shared(format!("unix://{}", socket.display())).expect("an address");
    Ok(DevicePluginClient::new(address.connect().await?))
}
