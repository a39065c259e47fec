//! The device plugin against a fake kubelet on real unix sockets: what it must survive, and what
//! must not disturb it.

#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cleave_kubelet::fake::{Endpoint, FakeKubelet, Seen};
use cleave_kubelet::proto::v1beta1 as wire;
use cleave_kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use cleave_kubelet::{
    Backoff, Config, ContainerResponse, Device, DeviceId, DeviceList, DeviceNode, DirectoryError, DirectoryState,
    Mount, Options, Phase, Plugins, PluginsState, PreferredRequest, Refusal, Resource, ResourceName,
};
use futures::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tonic::Code;
use tonic::transport::Endpoint as Address;

/// For every condition: far more than it takes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(20);
/// Longer than any test, for what must not be what ends a wait.
const NEVER: Duration = Duration::from_secs(3600);

const MPS: &str = "nvidia.com/gpu-mps";
const SLICE: &str = "nvidia.com/gpu-timeslice";

/// A resource whose devices the test changes.
struct Shares {
    devices: watch::Sender<Arc<DeviceList>>,
    options: Options,
}

fn devices(ids: &[&str]) -> Arc<DeviceList> {
    let device = |id: &&str| Device { id: DeviceId::parse(id).expect("an id"), healthy: true, numa: None };
    Arc::new(ids.iter().map(device).collect())
}

impl Shares {
    fn of(ids: &[&str]) -> Arc<Self> {
        Self::with(ids, Options { pre_start: true, preferred: true })
    }

    fn with(ids: &[&str], options: Options) -> Arc<Self> {
        Arc::new(Self { devices: watch::Sender::new(devices(ids)), options })
    }
}

impl Resource for Shares {
    fn devices(&self) -> watch::Receiver<Arc<DeviceList>> {
        self.devices.subscribe()
    }

    fn options(&self) -> Options {
        self.options
    }

    fn preferred(&self, request: &PreferredRequest<'_>) -> Result<Vec<String>, Refusal> {
        let others = request.available.iter().filter(|id| !request.must_include.contains(id));
        Ok(request.must_include.iter().chain(others).take(request.size).cloned().collect())
    }

    fn allocate(&self, ids: &[String]) -> Result<ContainerResponse, Refusal> {
        let known = self.devices.borrow();
        if let Some(id) = ids.iter().find(|id| !known.iter().any(|device| device.id.as_str() == id.as_str())) {
            return Err(Refusal::Invalid(format!("no device {id}")));
        }
        Ok(ContainerResponse {
            envs: BTreeMap::from([("IDS".to_owned(), ids.join(","))]),
            mounts: vec![Mount { container_path: "/c".into(), host_path: "/h".into(), read_only: true }],
            devices: vec![DeviceNode {
                container_path: "/dev/c".into(),
                host_path: "/dev/h".into(),
                permissions: "rw".into(),
            }],
            cdi_names: vec!["nvidia.com/gpu=0".into()],
            annotations: BTreeMap::from([("a".to_owned(), "b".to_owned())]),
        })
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

fn resources(of: &[(&str, &Arc<Shares>)]) -> BTreeMap<ResourceName, Arc<dyn Resource>> {
    of.iter()
        .map(|(name, shares)| {
            let resource: Arc<dyn Resource> = Arc::clone(shares) as _;
            (ResourceName::parse(name).expect("a name"), resource)
        })
        .collect()
}

/// A device plugin directory, and patience such that only what a test is about can happen in it.
struct Bench {
    folder: tempfile::TempDir,
    config: Config,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = Config::new(folder.path());
        config.timings.stream = Backoff { first: NEVER, cap: NEVER };
        config.timings.register_deadline = NEVER;
        config.timings.look_watched = NEVER;
        Self { folder, config }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn kubelet(&self) -> FakeKubelet {
        FakeKubelet::start(self.path()).expect("a kubelet")
    }

    fn plugins(&self, of: &[(&str, &Arc<Shares>)]) -> Plugins {
        let plugins = Plugins::start(&self.config).expect("plugins");
        plugins.set(resources(of));
        plugins
    }

    /// Sockets in the directory, without the kubelet's.
    fn sockets(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.path()).expect("a folder").map(|e| e.expect("an entry").file_name());
        let mut names: Vec<_> =
            names.map(|n| n.into_string().expect("UTF-8")).filter(|n| n != "kubelet.sock").collect();
        names.sort();
        names
    }
}

async fn kubelet_sees(kubelet: &FakeKubelet, what: &str, condition: impl FnMut(&Seen) -> bool) -> Seen {
    match kubelet.once(DEADLINE, condition).await {
        Some(seen) => seen,
        None => panic!("the kubelet does not see {what}, but {:#?}", *kubelet.seen().borrow()),
    }
}

/// Waits until the kubelet would hand out exactly these devices.
async fn served(kubelet: &FakeKubelet, resource: &str, ids: &[&str]) -> Endpoint {
    let has = |endpoint: &Endpoint| endpoint.connected && endpoint.healthy() == ids;
    let condition = |seen: &Seen| seen.endpoints.get(resource).is_some_and(has);
    kubelet_sees(kubelet, &format!("{ids:?} of {resource}"), condition).await.endpoints[resource].clone()
}

async fn state_is(plugins: &Plugins, what: &str, condition: impl FnMut(&PluginsState) -> bool) -> PluginsState {
    let mut state = plugins.state();
    let found = tokio::time::timeout(DEADLINE, state.wait_for(condition)).await;
    let found = found.map(|state| state.expect("a manager").clone());
    found.unwrap_or_else(|_| panic!("never {what}: {:#?}", *plugins.state().borrow()))
}

async fn ready(plugins: &Plugins) -> PluginsState {
    state_is(plugins, "ready", |state| state.is_ready() && !state.resources.is_empty()).await
}

/// Waits for what has no channel, such as files.
async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let poll = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(DEADLINE, poll).await.is_ok(), "never {what}");
}

fn registrations(kubelet: &FakeKubelet, resource: &str) -> usize {
    kubelet.seen().borrow().registrations.iter().filter(|r| r.request.resource_name == resource).count()
}

async fn dial(socket: &Path) -> Result<DevicePluginClient<tonic::transport::Channel>, tonic::transport::Error> {
    let address = Address::from_shared(format!("unix://{}", socket.display())).expect("an address");
    Ok(DevicePluginClient::new(address.connect().await?))
}

#[tokio::test]
async fn a_resource_is_registered_and_its_devices_are_streamed() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0", "a::1"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let endpoint = served(&kubelet, MPS, &["a::0", "a::1"]).await;
    assert!(endpoint.options.pre_start_required && endpoint.options.get_preferred_allocation_available);
    let state = ready(&plugins).await;
    let request = kubelet.seen().borrow().registrations[0].request.clone();
    assert_eq!((request.version.as_str(), request.resource_name.as_str()), ("v1beta1", MPS));
    assert_eq!(state.resources[MPS].socket.as_ref(), Some(&request.endpoint));
    assert_eq!(bench.sockets(), [request.endpoint]);
    assert_eq!((state.resources[MPS].registrations, state.resources[MPS].streams), (1, 1));
}

#[tokio::test]
async fn changes_are_streamed_and_the_same_list_is_not() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let _plugins = bench.plugins(&[(MPS, &shares)]);
    served(&kubelet, MPS, &["a::0"]).await;
    for _ in 0..100 {
        shares.devices.send_modify(|_| {});
        tokio::task::yield_now().await;
    }
    shares.devices.send_replace(devices(&["a::0", "a::1"]));
    served(&kubelet, MPS, &["a::0", "a::1"]).await;
    shares.devices.send_modify(|list| Arc::make_mut(list)[0].healthy = false);
    let endpoint = served(&kubelet, MPS, &["a::1"]).await;
    assert_eq!(endpoint.devices.len(), 2, "an unhealthy device stays in the list");
    assert_eq!(endpoint.lists, 3);
    // Published anew: the kubelet writes its checkpoint.
    shares.devices.send_modify(|list| *list = Arc::new(list.to_vec()));
    kubelet_sees(&kubelet, "an equal list", |seen| seen.endpoints[MPS].lists == 4).await;
    assert_eq!(registrations(&kubelet, MPS), 1);
}

#[tokio::test]
async fn two_streams_both_see_every_change() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let endpoint = served(&kubelet, MPS, &["a::0"]).await;
    let mut other = dial(&bench.path().join(endpoint.socket)).await.expect("a connection");
    let mut stream = other.list_and_watch(wire::Empty {}).await.expect("a stream").into_inner();
    let mut next = async || stream.message().await.expect("no error").expect("a list").devices.len();
    assert_eq!(next().await, 1);
    state_is(&plugins, "two streams", |state| state.resources[MPS].streams == 2).await;
    shares.devices.send_replace(devices(&["a::0", "a::1"]));
    served(&kubelet, MPS, &["a::0", "a::1"]).await;
    assert_eq!(next().await, 2);
}

#[tokio::test]
async fn each_restart_of_the_kubelet_causes_a_registration_with_a_new_socket() {
    let bench = Bench::new();
    let mut kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let mut sockets = vec![served(&kubelet, MPS, &["a::0"]).await.socket];
    for _ in 0..5 {
        kubelet.stop();
        kubelet.run_slowly(Duration::from_millis(20)).await.expect("a kubelet");
        sockets.push(served(&kubelet, MPS, &["a::0"]).await.socket);
    }
    assert_eq!(bench.sockets(), [sockets[5].clone()]);
    sockets.sort();
    sockets.dedup();
    assert_eq!(sockets.len(), 6);
    assert_eq!(registrations(&kubelet, MPS), 6);
    let state = ready(&plugins).await;
    assert_eq!(state.resources[MPS].streamless, 0, "noticed by the new socket, not by the watchdog");
}

#[tokio::test]
async fn a_kubelet_that_starts_later_is_registered_with() {
    let bench = Bench::new();
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let waiting = |state: &PluginsState| state.resources.get(MPS).is_some_and(|r| r.phase == Phase::WaitingForKubelet);
    assert!(!state_is(&plugins, "waiting", waiting).await.is_ready());
    let kubelet = bench.kubelet();
    served(&kubelet, MPS, &["a::0"]).await;
}

#[tokio::test]
async fn without_a_kubelet_nothing_is_ready_until_it_returns() {
    let bench = Bench::new();
    let mut kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    ready(&plugins).await;
    kubelet.stop();
    state_is(&plugins, "without a stream", |state| !state.is_ready()).await;
    kubelet.run().expect("a kubelet");
    served(&kubelet, MPS, &["a::0"]).await;
    ready(&plugins).await;
}

#[tokio::test]
async fn a_kubelet_socket_that_is_moved_back_causes_no_registration() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let _plugins = bench.plugins(&[(MPS, &shares)]);
    let endpoint = served(&kubelet, MPS, &["a::0"]).await;
    let (socket, aside) = (bench.path().join("kubelet.sock"), bench.path().join("aside"));
    std::fs::rename(&socket, &aside).expect("rename");
    std::fs::rename(&aside, &socket).expect("rename");
    // What follows is decided by the same look at the directory, or a later one.
    std::fs::remove_file(bench.path().join(&endpoint.socket)).expect("our socket");
    until("bound again", || bench.path().join(&endpoint.socket).exists()).await;
    assert_eq!(registrations(&kubelet, MPS), 1);
    assert!(kubelet.seen().borrow().endpoints[MPS].connected);
}

#[tokio::test]
async fn a_deleted_socket_is_rebound_without_ending_the_stream() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let before = served(&kubelet, MPS, &["a::0"]).await;
    for _ in 0..3 {
        std::fs::remove_file(bench.path().join(&before.socket)).expect("our socket");
        until("bound again", || bench.path().join(&before.socket).exists()).await;
        let mut client = dial(&bench.path().join(&before.socket)).await.expect("it answers there");
        client.get_device_plugin_options(wire::Empty {}).await.expect("options");
    }
    shares.devices.send_replace(devices(&["a::0", "a::1"]));
    served(&kubelet, MPS, &["a::0", "a::1"]).await;
    assert_eq!(registrations(&kubelet, MPS), 1);
    assert_eq!(ready(&plugins).await.resources[MPS].streams, 1);
}

#[tokio::test]
async fn a_deleted_socket_without_a_stream_is_registered_anew() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    kubelet.open_no_stream(1);
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let state =
        state_is(&plugins, "registered", |s| s.resources.get(MPS).is_some_and(|r| r.phase == Phase::Registered));
    let socket = state.await.resources[MPS].socket.clone().expect("a socket");
    std::fs::remove_file(bench.path().join(&socket)).expect("our socket");
    assert_ne!(served(&kubelet, MPS, &["a::0"]).await.socket, socket);
}

#[tokio::test]
async fn a_kubelet_that_takes_our_socket_away_before_its_predecessors_is_registered_with_at_once() {
    let mut bench = Bench::new();
    // It admits pods before that.
    bench.config.timings.settle = NEVER;
    let mut kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let socket = served(&kubelet, MPS, &["a::0"]).await.socket;
    kubelet.stop();
    state_is(&plugins, "without a stream", |s| s.resources[MPS].streams == 0).await;
    std::fs::remove_file(bench.path().join(&socket)).expect("our socket");
    state_is(&plugins, "waiting", |s| s.resources[MPS].phase == Phase::WaitingForKubelet).await;
    kubelet.run().expect("a kubelet");
    served(&kubelet, MPS, &["a::0"]).await;
}

#[tokio::test]
async fn a_kubelet_that_opens_no_stream_is_asked_again() {
    let mut bench = Bench::new();
    bench.config.timings.stream = Backoff { first: Duration::from_millis(50), cap: Duration::from_millis(100) };
    let kubelet = bench.kubelet();
    kubelet.open_no_stream(3);
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    served(&kubelet, MPS, &["a::0"]).await;
    let state = ready(&plugins).await;
    assert_eq!((state.resources[MPS].streamless, registrations(&kubelet, MPS)), (3, 4));
}

#[tokio::test]
async fn a_stream_that_the_kubelet_drops_is_restored() {
    let mut bench = Bench::new();
    bench.config.timings.stream = Backoff { first: Duration::from_millis(50), cap: Duration::from_secs(1) };
    let kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let _plugins = bench.plugins(&[(MPS, &shares)]);
    let first = served(&kubelet, MPS, &["a::0"]).await.socket;
    kubelet.drop_stream(MPS);
    assert_ne!(served(&kubelet, MPS, &["a::0"]).await.socket, first);
}

#[tokio::test]
async fn a_refused_registration_is_tried_again_and_told() {
    let mut bench = Bench::new();
    bench.config.timings.register = Backoff { first: Duration::from_millis(10), cap: Duration::from_millis(20) };
    let kubelet = bench.kubelet();
    kubelet.refuse(5);
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let told = |state: &PluginsState| {
        state.resources.get(MPS).and_then(|r| r.error.as_ref()).is_some_and(|e| e.contains("refused by the test"))
    };
    state_is(&plugins, "telling", told).await;
    served(&kubelet, MPS, &["a::0"]).await;
    let state = ready(&plugins).await;
    assert_eq!((state.resources[MPS].failures, state.resources[MPS].registrations), (5, 1));
    assert_eq!(state.resources[MPS].error, None);
    assert_eq!(bench.sockets().len(), 1, "one session serves all attempts");
}

#[tokio::test]
async fn a_kubelet_that_hangs_times_out() {
    let mut bench = Bench::new();
    bench.config.timings.register_deadline = Duration::from_millis(50);
    let kubelet = bench.kubelet();
    kubelet.hang(true);
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let failed = |state: &PluginsState| state.resources.get(MPS).is_some_and(|r| r.failures >= 2);
    let state = state_is(&plugins, "failed", failed).await;
    assert!(state.resources[MPS].error.as_ref().is_some_and(|e| e.contains("did not answer within 50ms")));
    kubelet.hang(false);
    served(&kubelet, MPS, &["a::0"]).await;
}

#[tokio::test]
async fn a_kubelet_that_dies_while_it_hangs_is_replaced_by_the_next_at_once() {
    let bench = Bench::new();
    let mut kubelet = bench.kubelet();
    kubelet.hang(true);
    let shares = Shares::of(&["a::0"]);
    let _plugins = bench.plugins(&[(MPS, &shares)]);
    kubelet_sees(&kubelet, "a registration", |seen| !seen.registrations.is_empty()).await;
    kubelet.stop();
    kubelet.hang(false);
    kubelet.run().expect("a kubelet");
    served(&kubelet, MPS, &["a::0"]).await;
}

#[tokio::test]
async fn a_kubelet_socket_that_is_replaced_while_the_old_one_hangs_is_registered_with() {
    let bench = Bench::new();
    let hanging = bench.kubelet();
    hanging.hang(true);
    let shares = Shares::of(&["a::0"]);
    let _plugins = bench.plugins(&[(MPS, &shares)]);
    kubelet_sees(&hanging, "a registration", |seen| !seen.registrations.is_empty()).await;
    let next = bench.kubelet();
    served(&next, MPS, &["a::0"]).await;
}

/// Up to Kubernetes 1.36, the end of an old stream disconnects whichever client the resource has by
/// then.
#[tokio::test]
async fn the_kubelet_has_hung_up_before_it_is_registered_with_again() {
    let mut bench = Bench::new();
    bench.config.timings.hang_up = NEVER;
    let kubelet = bench.kubelet();
    kubelet.disconnect_slowly(Duration::from_millis(200));
    let plugins = bench.plugins(&[(MPS, &Shares::with(&["a::0"], Options::default()))]);
    let first = served(&kubelet, MPS, &["a::0"]).await.socket;
    plugins.set(resources(&[(MPS, &Shares::with(&["a::0"], Options { pre_start: true, preferred: false }))]));
    kubelet_sees(&kubelet, "another registration", |seen| seen.endpoints[MPS].socket != first).await;
    let disconnected = |seen: &Seen| seen.endpoints[MPS].disconnected == 1;
    let seen = kubelet_sees(&kubelet, "the end of the old stream", disconnected).await;
    assert!(seen.endpoints[MPS].connected, "it came late, and took the new client down");
    ready(&plugins).await;
}

#[tokio::test]
async fn other_options_are_registered_and_the_same_ones_are_not() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let plugins = bench.plugins(&[(MPS, &Shares::with(&["a::0"], Options::default()))]);
    served(&kubelet, MPS, &["a::0"]).await;
    plugins.set(resources(&[(MPS, &Shares::with(&["b::0", "b::1"], Options::default()))]));
    served(&kubelet, MPS, &["b::0", "b::1"]).await;
    assert_eq!(registrations(&kubelet, MPS), 1, "replaced in the open stream");
    plugins.set(resources(&[(MPS, &Shares::of(&["c::0"]))]));
    served(&kubelet, MPS, &["c::0"]).await;
    kubelet_sees(&kubelet, "the new options", |seen| seen.endpoints[MPS].options.pre_start_required).await;
    assert_eq!(registrations(&kubelet, MPS), 2);
}

#[tokio::test]
async fn the_set_changes_without_disturbing_what_stays() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let (mps, slices) = (Shares::of(&["a::0"]), Shares::of(&["b::0", "b::1"]));
    let plugins = bench.plugins(&[(MPS, &mps)]);
    let first = served(&kubelet, MPS, &["a::0"]).await;
    for round in 1..=3 {
        plugins.set(resources(&[(MPS, &mps), (SLICE, &slices)]));
        served(&kubelet, SLICE, &["b::0", "b::1"]).await;
        plugins.set(resources(&[(MPS, &mps)]));
        let gone = |seen: &Seen| !seen.endpoints[SLICE].connected;
        let seen = kubelet_sees(&kubelet, "the end of the stream", gone).await;
        assert!(seen.endpoints[SLICE].devices.is_empty(), "the capacity is 0 at once");
        assert_eq!(registrations(&kubelet, SLICE), round);
    }
    state_is(&plugins, "one resource", |state| state.resources.len() == 1).await;
    let last = kubelet.seen().borrow().endpoints[MPS].clone();
    assert!(last.connected);
    assert_eq!((last.socket, last.lists, registrations(&kubelet, MPS)), (first.socket.clone(), 1, 1));
    assert_eq!(bench.sockets(), [first.socket]);
}

#[tokio::test]
async fn a_resource_that_is_removed_and_added_at_once_is_served() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    served(&kubelet, MPS, &["a::0"]).await;
    kubelet.disconnect_slowly(Duration::from_millis(50));
    plugins.set(resources(&[]));
    state_is(&plugins, "ending", |state| state.resources.get(MPS).is_none_or(|r| r.phase == Phase::Ending)).await;
    plugins.set(resources(&[(MPS, &shares)]));
    served(&kubelet, MPS, &["a::0"]).await;
}

#[tokio::test]
async fn a_second_agent_waits_for_the_end_of_the_first_and_says_so() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let (first, second) = (Shares::of(&["a::0"]), Shares::of(&["a::0", "a::1"]));
    let one = bench.plugins(&[(MPS, &first)]);
    served(&kubelet, MPS, &["a::0"]).await;
    let two = bench.plugins(&[(MPS, &second)]);
    let state = state_is(&two, "waiting", |state| state.directory == DirectoryState::HeldByAnother).await;
    assert!(!state.is_ready());
    ready(&one).await;
    drop(one);
    served(&kubelet, MPS, &["a::0", "a::1"]).await;
    ready(&two).await;
}

#[tokio::test]
async fn shutdown_ends_the_streams_removes_the_sockets_and_gives_the_directory_up() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares), (SLICE, &shares)]);
    served(&kubelet, MPS, &["a::0"]).await;
    served(&kubelet, SLICE, &["a::0"]).await;
    plugins.shutdown().await;
    let seen = kubelet_sees(&kubelet, "the end", |seen| seen.endpoints.values().all(|e| !e.connected)).await;
    assert_eq!(seen.endpoints[MPS].devices.len(), 1, "another start will serve them: no farewell");
    assert!(bench.sockets().is_empty());
    let _next = bench.plugins(&[(MPS, &shares)]);
    served(&kubelet, MPS, &["a::0"]).await;
}

#[tokio::test]
async fn a_peer_that_never_hangs_up_does_not_delay_the_shutdown() {
    let mut bench = Bench::new();
    bench.config.timings.hang_up = Duration::from_millis(50);
    let kubelet = bench.kubelet();
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let endpoint = served(&kubelet, MPS, &["a::0"]).await;
    let mut silent = UnixStream::connect(bench.path().join(endpoint.socket)).await.expect("a connection");
    tokio::time::timeout(DEADLINE, plugins.shutdown()).await.expect("an end");
    let mut rest = Vec::new();
    tokio::time::timeout(DEADLINE, silent.read_to_end(&mut rest)).await.expect("hung up").ok();
}

#[tokio::test]
async fn only_our_own_stale_sockets_are_removed() {
    let bench = Bench::new();
    let at = |name: &str| bench.path().join(name);
    let stale = ["cleave-00000000-00000001.sock", "cleave-deadbeef-0badf00d.sock"];
    for name in stale {
        drop(UnixListener::bind(at(name)).expect("bind"));
    }
    let kept = ["cleave-00000000-00000002.sock", "nvidia-gpu.sock", "kubelet_internal_checkpoint", "cleave-notes.sock"];
    let _alive = UnixListener::bind(at(kept[0])).expect("bind");
    drop(UnixListener::bind(at(kept[1])).expect("bind"));
    std::fs::write(at(kept[2]), "{}").expect("a file");
    drop(UnixListener::bind(at(kept[3])).expect("bind"));
    let _plugins = bench.plugins(&[]);
    until("removed", || stale.iter().all(|name| !at(name).exists())).await;
    assert!(kept.iter().all(|name| at(name).exists()), "{:?}", bench.sockets());
}

#[tokio::test]
async fn a_directory_that_is_created_later_is_served_from() {
    let mut bench = Bench::new();
    let directory = bench.path().join("device-plugins");
    bench.config.directory.clone_from(&directory);
    bench.config.timings.lock = Duration::from_millis(10);
    let shares = Shares::of(&["a::0"]);
    let plugins = bench.plugins(&[(MPS, &shares)]);
    let failed =
        |state: &PluginsState| matches!(&state.directory, DirectoryState::Failed(e) if e.contains("No such file"));
    for _ in 0..2 {
        state_is(&plugins, "failed", failed).await;
        std::fs::create_dir(&directory).expect("a directory");
        let kubelet = FakeKubelet::start(&directory).expect("a kubelet");
        served(&kubelet, MPS, &["a::0"]).await;
        drop(kubelet);
        std::fs::remove_dir_all(&directory).expect("no directory");
    }
    state_is(&plugins, "failed", failed).await;
}

#[tokio::test]
async fn an_invalid_path_is_an_error_at_once() {
    let long = PathBuf::from(format!("/{}", "d".repeat(100)));
    let error = Plugins::start(&Config::new(&long)).err().expect("too long");
    assert!(matches!(error, DirectoryError::TooLong { length: 131, .. }), "{error}");
    assert!(matches!(Plugins::start(&Config::new("relative")).err(), Some(DirectoryError::Path(_))));
}

#[tokio::test]
async fn the_longest_resource_name_is_served() {
    let domain = [63, 63, 63, 52].map(|n| "a".repeat(n)).join(".");
    let name = format!("{domain}/{}", "b".repeat(63));
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let _plugins = bench.plugins(&[(&name, &Shares::of(&["a::0"]))]);
    served(&kubelet, &name, &["a::0"]).await;
}

#[tokio::test]
async fn calls_return_the_resources_answers() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let _plugins = bench.plugins(&[(MPS, &Shares::of(&["a::0", "a::1"]))]);
    served(&kubelet, MPS, &["a::0", "a::1"]).await;

    let response = kubelet.allocate(MPS, &["a::1", "a::0"]).await.expect("allocated");
    assert_eq!(response.envs["IDS"], "a::1,a::0");
    assert_eq!((response.mounts[0].host_path.as_str(), response.mounts[0].read_only), ("/h", true));
    assert_eq!(
        (response.devices[0].container_path.as_str(), response.devices[0].permissions.as_str()),
        ("/dev/c", "rw")
    );
    assert_eq!((response.cdi_devices[0].name.as_str(), response.annotations["a"].as_str()), ("nvidia.com/gpu=0", "b"));
    let refused = kubelet.allocate(MPS, &["x"]).await.expect_err("unknown");
    assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, "no device x"));

    let preferred = kubelet.preferred(MPS, &["a::0", "a::1"], &["a::1"], 2).await.expect("preferred");
    assert_eq!(preferred, ["a::1", "a::0"]);
    for (must_include, size) in [(&[][..], -1), (&[], 3), (&["a::0", "a::1"], 1)] {
        let refused = kubelet.preferred(MPS, &["a::0", "a::1"], must_include, size).await.expect_err("bad numbers");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }

    kubelet.pre_start(MPS, &["a::0"]).await.expect("started");
    let refused = kubelet.pre_start(MPS, &[]).await.expect_err("not ready");
    assert_eq!((refused.code(), refused.message()), (Code::Unavailable, "the daemon starts"));
}

#[tokio::test]
async fn several_containers_in_one_request_are_answered_in_order() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let _plugins = bench.plugins(&[(MPS, &Shares::of(&["a::0", "a::1"]))]);
    served(&kubelet, MPS, &["a::0", "a::1"]).await;
    let mut client = kubelet.client(MPS).expect("a client");
    let container = |id: &str| wire::ContainerAllocateRequest { devices_ids: vec![id.to_owned()] };
    let ask = |ids: &[&str]| wire::AllocateRequest { container_requests: ids.iter().map(|id| container(id)).collect() };
    let answer = client.allocate(ask(&["a::1", "a::0"])).await.expect("allocated").into_inner();
    let ids: Vec<_> = answer.container_responses.iter().map(|response| response.envs["IDS"].as_str()).collect();
    assert_eq!(ids, ["a::1", "a::0"]);
    assert!(client.allocate(ask(&[])).await.expect("allocated").into_inner().container_responses.is_empty());
    let refused = client.allocate(ask(&["a::1", "x"])).await.expect_err("one is unknown");
    assert_eq!(refused.code(), Code::InvalidArgument);
}

/// An HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Headers of a call of `GetDevicePluginOptions`, without compression, for this `:authority`.
fn headers(authority: &str) -> Vec<u8> {
    let text = |text: &str| {
        let mut literal = vec![u8::try_from(text.len()).expect("short")];
        literal.extend(text.as_bytes());
        literal
    };
    [
        vec![0x83, 0x86, 0x04],
        text("/v1beta1.DevicePlugin/GetDevicePluginOptions"),
        vec![0x01],
        text(authority),
        vec![0x0f, 0x10],
        text("application/grpc"),
        vec![0x00],
        text("te"),
        text("trailers"),
    ]
    .concat()
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

/// Reads frames until one of this stream that is not a window update.
async fn next_of(connection: &mut UnixStream, stream: u32) -> (u8, Vec<u8>) {
    loop {
        let mut head = [0; 9];
        connection.read_exact(&mut head).await.expect("a frame");
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        connection.read_exact(&mut payload).await.expect("its payload");
        let of = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        assert_ne!(head[3], GOAWAY, "the connection is closed: {payload:?}");
        if of == stream && head[3] != 8 {
            return (head[3], payload);
        }
    }
}

/// The kubelet says `localhost`, others say other names. A path is no authority, and h2 resets that
/// call alone.
#[tokio::test]
async fn a_call_with_a_path_as_authority_is_reset_and_its_connection_stays_open() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let _plugins = bench.plugins(&[(MPS, &Shares::of(&["a::0"]))]);
    let socket = bench.path().join(served(&kubelet, MPS, &["a::0"]).await.socket);
    let exchange = async {
        let mut connection = UnixStream::connect(&socket).await.expect("a connection");
        let start = [PREFACE.to_vec(), frame(SETTINGS, 0, 0, &[])].concat();
        connection.write_all(&start).await.expect("sent");
        let calls = [
            (1, "localhost"),
            (3, "/var/lib/kubelet/device-plugins/x.sock"),
            (5, "%2Fvar%2Fx"),
            (7, "tonic"),
            (9, "localhost"),
        ];
        for (stream, authority) in calls {
            let call = [frame(HEADERS, 4, stream, &headers(authority)), frame(DATA, 1, stream, &[0; 5])].concat();
            connection.write_all(&call).await.expect("sent");
            let (kind, payload) = next_of(&mut connection, stream).await;
            if authority.contains(['/', '%']) {
                assert_eq!((kind, payload.as_slice()), (RESET, &[0, 0, 0, 1][..]), "{authority}");
            } else {
                assert_eq!(kind, HEADERS, "{authority}");
                // The message, with both options set, and the trailers.
                assert_eq!(next_of(&mut connection, stream).await, (DATA, vec![0, 0, 0, 0, 4, 8, 1, 16, 1]));
                assert_eq!(next_of(&mut connection, stream).await.0, HEADERS);
            }
        }
    };
    tokio::time::timeout(DEADLINE, exchange).await.expect("an answer to each call");
}

#[tokio::test]
async fn hostile_connections_do_not_affect_the_kubelet() {
    let bench = Bench::new();
    let kubelet = bench.kubelet();
    let _plugins = bench.plugins(&[(MPS, &Shares::of(&["a::0"]))]);
    let socket = bench.path().join(served(&kubelet, MPS, &["a::0"]).await.socket);
    let settings = frame(SETTINGS, 0, 0, &[]);
    let call = frame(HEADERS, 4, 1, &headers("localhost"));
    let inputs: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        PREFACE[..10].to_vec(),
        [PREFACE, &settings[..5]].concat(),
        // A frame that claims 16 MiB.
        [PREFACE, &settings, &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1][..]].concat(),
        // Headers that are cut off, and headers that are no headers.
        [PREFACE, &settings, &call[..20]].concat(),
        [PREFACE, &settings, &frame(HEADERS, 4, 1, &[0xff; 64])].concat(),
        // A message that ends before its length, one that claims 4 GiB, and one that is no message.
        [PREFACE, &settings, &call, &frame(DATA, 1, 1, &[0, 0, 0, 0, 9, 1])].concat(),
        [PREFACE, &settings, &call, &frame(DATA, 0, 1, &[0, 0xff, 0xff, 0xff, 0xff])].concat(),
        [PREFACE, &settings, &call, &frame(DATA, 1, 1, &[0, 0, 0, 0, 2, 0xff, 0xff])].concat(),
    ];
    let mut open = Vec::new();
    for input in &inputs {
        // One of each that hangs up after it, and one that stays.
        for stays in [false, true] {
            let mut connection = UnixStream::connect(&socket).await.expect("a connection");
            // It may be closed by the time that all is written.
            let _ = connection.write_all(input).await;
            if stays {
                open.push(connection);
            }
        }
    }
    kubelet.allocate(MPS, &["a::0"]).await.expect("allocated");
    // More connections than there is room for: the kubelet's own is not touched.
    for _ in 0..200 {
        open.push(UnixStream::connect(&socket).await.expect("a connection"));
    }
    let mut closed = open.pop().expect("the last one");
    let read = tokio::time::timeout(DEADLINE, closed.read(&mut [0; 1])).await.expect("closed");
    assert!(matches!(&read, Ok(0)) || read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    kubelet.allocate(MPS, &["a::0"]).await.expect("allocated");
    drop(open);
    let mut client = dial_until_served(&socket).await;
    let too_long = wire::ContainerAllocateRequest { devices_ids: vec!["x".repeat(2 << 20)] };
    let refused =
        client.allocate(wire::AllocateRequest { container_requests: vec![too_long] }).await.expect_err("2 MiB");
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    assert_eq!(registrations(&kubelet, MPS), 1);
}

async fn dial_until_served(socket: &Path) -> DevicePluginClient<tonic::transport::Channel> {
    let attempt = async {
        loop {
            if let Ok(mut client) = dial(socket).await
                && client.get_device_plugin_options(wire::Empty {}).await.is_ok()
            {
                return client;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(DEADLINE, attempt).await.expect("room again")
}
