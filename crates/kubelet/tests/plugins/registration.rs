//! Tests registrations, device streams, restarts of the kubelet, and the directory.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cleave_kubelet::fake::{FakeKubelet, FakeKubeletState};
use cleave_kubelet::proto::v1beta1 as wire;
use cleave_kubelet::{
    Backoff, DirectoryError, DirectoryState, PluginOptions, PluginServer, PluginServerConfig, PluginServerState,
    ResourcePhase,
};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;

use crate::{
    Fixture, LONGER_THAN_ANY_TEST, MPS_RESOURCE, TEST_TIMEOUT, TIMESLICE_RESOURCE, TestResource, connect_to_plugin,
    count_registrations, device_list, resources_by_name, wait_for_kubelet, wait_for_state, wait_until,
    wait_until_ready, wait_until_served,
};

#[tokio::test]
async fn a_resource_is_registered_and_its_devices_are_streamed() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0", "a::1"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let endpoint = wait_until_served(&kubelet, MPS_RESOURCE, &["a::0", "a::1"]).await;
    assert!(endpoint.options.pre_start_required && endpoint.options.get_preferred_allocation_available);
    let state = wait_until_ready(&plugins).await;
    let request = kubelet.state().borrow().registrations[0].request.clone();
    assert_eq!((request.version.as_str(), request.resource_name.as_str()), ("v1beta1", MPS_RESOURCE));
    assert_eq!(state.resources[MPS_RESOURCE].socket.as_ref(), Some(&request.endpoint));
    assert_eq!(fixture.socket_names(), [request.endpoint]);
    assert_eq!((state.resources[MPS_RESOURCE].registrations, state.resources[MPS_RESOURCE].streams), (1, 1));
}

#[tokio::test]
async fn every_published_list_is_streamed_once() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let _plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    for _ in 0..100 {
        shares.devices.send_modify(|_| {});
        tokio::task::yield_now().await;
    }
    shares.devices.send_replace(device_list(&["a::0", "a::1"]));
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0", "a::1"]).await;
    shares.devices.send_modify(|list| Arc::make_mut(list)[0].healthy = false);
    let endpoint = wait_until_served(&kubelet, MPS_RESOURCE, &["a::1"]).await;
    assert_eq!(endpoint.devices.len(), 2, "an unhealthy device stays in the list");
    assert_eq!(endpoint.lists, 3);
    // The plugin must send an equal list again, so that the kubelet writes its checkpoint.
    shares.devices.send_modify(|list| *list = Arc::new(list.to_vec()));
    wait_for_kubelet(&kubelet, "an equal list", |seen| seen.endpoints[MPS_RESOURCE].lists == 4).await;
    assert_eq!(count_registrations(&kubelet, MPS_RESOURCE), 1);
}

#[tokio::test]
async fn two_streams_both_receive_every_change() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let endpoint = wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    let mut other = connect_to_plugin(&fixture.path().join(endpoint.socket)).await.expect("a connection");
    let mut stream = other.list_and_watch(wire::Empty {}).await.expect("a stream").into_inner();
    let mut next = async || stream.message().await.expect("no error").expect("a list").devices.len();
    assert_eq!(next().await, 1);
    wait_for_state(&plugins, "two streams", |state| state.resources[MPS_RESOURCE].streams == 2).await;
    shares.devices.send_replace(device_list(&["a::0", "a::1"]));
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0", "a::1"]).await;
    assert_eq!(next().await, 2);
}

#[tokio::test]
async fn each_restart_of_the_kubelet_causes_a_registration_with_a_new_socket() {
    let fixture = Fixture::new();
    let mut kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let mut sockets = vec![wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await.socket];
    for _ in 0..5 {
        kubelet.stop();
        kubelet.start_with_listen_delay(Duration::from_millis(20)).await.expect("a kubelet");
        sockets.push(wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await.socket);
    }
    assert_eq!(fixture.socket_names(), [sockets[5].clone()]);
    sockets.sort();
    sockets.dedup();
    assert_eq!(sockets.len(), 6);
    assert_eq!(count_registrations(&kubelet, MPS_RESOURCE), 6);
    let state = wait_until_ready(&plugins).await;
    assert_eq!(
        state.resources[MPS_RESOURCE].streamless, 0,
        "the new socket causes the registration, not the missing stream"
    );
}

#[tokio::test]
async fn the_plugin_registers_with_a_kubelet_that_starts_later() {
    let fixture = Fixture::new();
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let waiting = |state: &PluginServerState| {
        state.resources.get(MPS_RESOURCE).is_some_and(|r| r.phase == ResourcePhase::WaitingForKubelet)
    };
    assert!(!wait_for_state(&plugins, "waiting", waiting).await.is_ready());
    let kubelet = fixture.start_kubelet();
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
}

#[tokio::test]
async fn the_server_is_not_ready_while_no_kubelet_runs() {
    let fixture = Fixture::new();
    let mut kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    wait_until_ready(&plugins).await;
    kubelet.stop();
    wait_for_state(&plugins, "without a stream", |state| !state.is_ready()).await;
    kubelet.start().expect("a kubelet");
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    wait_until_ready(&plugins).await;
}

#[tokio::test]
async fn a_kubelet_socket_that_is_moved_back_causes_no_registration() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let _plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let endpoint = wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    let (socket, aside) = (fixture.path().join("kubelet.sock"), fixture.path().join("aside"));
    std::fs::rename(&socket, &aside).expect("rename");
    std::fs::rename(&aside, &socket).expect("rename");
    // Delete the plugin's socket, so that the plugin decides again after both renames.
    std::fs::remove_file(fixture.path().join(&endpoint.socket)).expect("the plugin's socket");
    wait_until("bound again", || fixture.path().join(&endpoint.socket).exists()).await;
    assert_eq!(count_registrations(&kubelet, MPS_RESOURCE), 1);
    assert!(kubelet.state().borrow().endpoints[MPS_RESOURCE].connected);
}

#[tokio::test]
async fn a_deleted_socket_is_rebound_without_ending_the_stream() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let before = wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    for _ in 0..3 {
        std::fs::remove_file(fixture.path().join(&before.socket)).expect("the plugin's socket");
        wait_until("bound again", || fixture.path().join(&before.socket).exists()).await;
        let mut client = connect_to_plugin(&fixture.path().join(&before.socket))
            .await
            .expect("the plugin answers at the new socket");
        client.get_device_plugin_options(wire::Empty {}).await.expect("options");
    }
    shares.devices.send_replace(device_list(&["a::0", "a::1"]));
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0", "a::1"]).await;
    assert_eq!(count_registrations(&kubelet, MPS_RESOURCE), 1);
    assert_eq!(wait_until_ready(&plugins).await.resources[MPS_RESOURCE].streams, 1);
}

#[tokio::test]
async fn a_deleted_socket_without_a_stream_is_registered_again() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    kubelet.open_no_stream(1);
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let state = wait_for_state(&plugins, "registered", |s| {
        s.resources.get(MPS_RESOURCE).is_some_and(|r| r.phase == ResourcePhase::Registered)
    });
    let socket = state.await.resources[MPS_RESOURCE].socket.clone().expect("a socket");
    std::fs::remove_file(fixture.path().join(&socket)).expect("the plugin's socket");
    assert_ne!(wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await.socket, socket);
}

#[tokio::test]
async fn the_plugin_registers_at_once_with_a_new_kubelet_after_the_plugins_socket_was_removed() {
    let mut fixture = Fixture::new();
    // The plugin must register before this delay ends, because the kubelet admits pods earlier.
    fixture.config.timings.settle = LONGER_THAN_ANY_TEST;
    let mut kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let socket = wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await.socket;
    kubelet.stop();
    wait_for_state(&plugins, "without a stream", |s| s.resources[MPS_RESOURCE].streams == 0).await;
    std::fs::remove_file(fixture.path().join(&socket)).expect("the plugin's socket");
    wait_for_state(&plugins, "waiting", |s| s.resources[MPS_RESOURCE].phase == ResourcePhase::WaitingForKubelet).await;
    kubelet.start().expect("a kubelet");
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
}

#[tokio::test]
async fn the_plugin_registers_again_if_the_kubelet_opens_no_stream() {
    let mut fixture = Fixture::new();
    fixture.config.timings.stream = Backoff { first: Duration::from_millis(50), cap: Duration::from_millis(100) };
    let kubelet = fixture.start_kubelet();
    kubelet.open_no_stream(3);
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    let state = wait_until_ready(&plugins).await;
    assert_eq!((state.resources[MPS_RESOURCE].streamless, count_registrations(&kubelet, MPS_RESOURCE)), (3, 4));
}

#[tokio::test]
async fn a_stream_that_the_kubelet_drops_is_restored() {
    let mut fixture = Fixture::new();
    fixture.config.timings.stream = Backoff { first: Duration::from_millis(50), cap: Duration::from_secs(1) };
    let kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let _plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let first = wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await.socket;
    kubelet.drop_stream(MPS_RESOURCE);
    assert_ne!(wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await.socket, first);
}

#[tokio::test]
async fn a_refused_registration_is_retried_and_reported() {
    let mut fixture = Fixture::new();
    fixture.config.timings.register = Backoff { first: Duration::from_millis(10), cap: Duration::from_millis(20) };
    let kubelet = fixture.start_kubelet();
    kubelet.refuse_registrations(5);
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let reported = |state: &PluginServerState| {
        state
            .resources
            .get(MPS_RESOURCE)
            .and_then(|r| r.error.as_ref())
            .is_some_and(|e| e.contains("refused by the test"))
    };
    wait_for_state(&plugins, "reporting the error", reported).await;
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    let state = wait_until_ready(&plugins).await;
    assert_eq!((state.resources[MPS_RESOURCE].failures, state.resources[MPS_RESOURCE].registrations), (5, 1));
    assert_eq!(state.resources[MPS_RESOURCE].error, None);
    assert_eq!(fixture.socket_names().len(), 1, "one session serves all attempts");
}

#[tokio::test]
async fn a_registration_with_a_hanging_kubelet_times_out() {
    let mut fixture = Fixture::new();
    fixture.config.timings.register_deadline = Duration::from_millis(50);
    let kubelet = fixture.start_kubelet();
    kubelet.set_hanging(true);
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let failed = |state: &PluginServerState| state.resources.get(MPS_RESOURCE).is_some_and(|r| r.failures >= 2);
    let state = wait_for_state(&plugins, "failed", failed).await;
    assert!(state.resources[MPS_RESOURCE].error.as_ref().is_some_and(|e| e.contains("did not answer within 0.05 s")));
    kubelet.set_hanging(false);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
}

#[tokio::test]
async fn the_plugin_registers_at_once_with_the_successor_of_a_killed_hanging_kubelet() {
    let fixture = Fixture::new();
    let mut kubelet = fixture.start_kubelet();
    kubelet.set_hanging(true);
    let shares = TestResource::new(&["a::0"]);
    let _plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    wait_for_kubelet(&kubelet, "a registration", |seen| !seen.registrations.is_empty()).await;
    kubelet.stop();
    kubelet.set_hanging(false);
    kubelet.start().expect("a kubelet");
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
}

#[tokio::test]
async fn the_plugin_registers_with_a_new_kubelet_while_the_old_one_hangs() {
    let fixture = Fixture::new();
    let hanging = fixture.start_kubelet();
    hanging.set_hanging(true);
    let shares = TestResource::new(&["a::0"]);
    let _plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    wait_for_kubelet(&hanging, "a registration", |seen| !seen.registrations.is_empty()).await;
    let next = fixture.start_kubelet();
    wait_until_served(&next, MPS_RESOURCE, &["a::0"]).await;
}

/// Up to Kubernetes 1.36, the end of an old stream disconnects the resource's current client, even
/// if this is a new client.
#[tokio::test]
async fn the_plugin_registers_again_only_after_the_kubelet_disconnects() {
    let mut fixture = Fixture::new();
    fixture.config.timings.hang_up = LONGER_THAN_ANY_TEST;
    let kubelet = fixture.start_kubelet();
    kubelet.delay_disconnections(Duration::from_millis(200));
    let plugins =
        fixture.start_plugins(&[(MPS_RESOURCE, &TestResource::with_options(&["a::0"], PluginOptions::default()))]);
    let first = wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await.socket;
    plugins.set(resources_by_name(&[(
        MPS_RESOURCE,
        &TestResource::with_options(&["a::0"], PluginOptions { pre_start: true, preferred: false }),
    )]));
    wait_for_kubelet(&kubelet, "the agent registers again", |seen| seen.endpoints[MPS_RESOURCE].socket != first).await;
    let disconnected = |seen: &FakeKubeletState| seen.endpoints[MPS_RESOURCE].disconnected == 1;
    let seen = wait_for_kubelet(&kubelet, "the old stream ends", disconnected).await;
    assert!(seen.endpoints[MPS_RESOURCE].connected, "the old stream must not end the new client");
    wait_until_ready(&plugins).await;
}

#[tokio::test]
async fn only_changed_options_cause_a_registration() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let plugins =
        fixture.start_plugins(&[(MPS_RESOURCE, &TestResource::with_options(&["a::0"], PluginOptions::default()))]);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    plugins.set(resources_by_name(&[(
        MPS_RESOURCE,
        &TestResource::with_options(&["b::0", "b::1"], PluginOptions::default()),
    )]));
    wait_until_served(&kubelet, MPS_RESOURCE, &["b::0", "b::1"]).await;
    assert_eq!(count_registrations(&kubelet, MPS_RESOURCE), 1, "replaced in the open stream");
    plugins.set(resources_by_name(&[(MPS_RESOURCE, &TestResource::new(&["c::0"]))]));
    wait_until_served(&kubelet, MPS_RESOURCE, &["c::0"]).await;
    wait_for_kubelet(&kubelet, "the new options", |seen| seen.endpoints[MPS_RESOURCE].options.pre_start_required).await;
    assert_eq!(count_registrations(&kubelet, MPS_RESOURCE), 2);
}

#[tokio::test]
async fn adding_or_removing_a_resource_does_not_affect_other_resources() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let (mps, slices) = (TestResource::new(&["a::0"]), TestResource::new(&["b::0", "b::1"]));
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &mps)]);
    let first = wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    for round in 1..=3 {
        plugins.set(resources_by_name(&[(MPS_RESOURCE, &mps), (TIMESLICE_RESOURCE, &slices)]));
        wait_until_served(&kubelet, TIMESLICE_RESOURCE, &["b::0", "b::1"]).await;
        plugins.set(resources_by_name(&[(MPS_RESOURCE, &mps)]));
        let gone = |seen: &FakeKubeletState| !seen.endpoints[TIMESLICE_RESOURCE].connected;
        let seen = wait_for_kubelet(&kubelet, "the stream ends", gone).await;
        assert!(seen.endpoints[TIMESLICE_RESOURCE].devices.is_empty(), "the capacity is immediately 0");
        assert_eq!(count_registrations(&kubelet, TIMESLICE_RESOURCE), round);
    }
    wait_for_state(&plugins, "one resource", |state| state.resources.len() == 1).await;
    let last = kubelet.state().borrow().endpoints[MPS_RESOURCE].clone();
    assert!(last.connected);
    assert_eq!((last.socket, last.lists, count_registrations(&kubelet, MPS_RESOURCE)), (first.socket.clone(), 1, 1));
    assert_eq!(fixture.socket_names(), [first.socket]);
}

#[tokio::test]
async fn a_resource_that_is_added_again_while_its_stream_ends_is_served() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    kubelet.delay_disconnections(Duration::from_millis(50));
    plugins.set(resources_by_name(&[]));
    wait_for_state(&plugins, "ending", |state| {
        state.resources.get(MPS_RESOURCE).is_none_or(|r| r.phase == ResourcePhase::Ending)
    })
    .await;
    plugins.set(resources_by_name(&[(MPS_RESOURCE, &shares)]));
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
}

#[tokio::test]
async fn a_second_agent_is_not_ready_until_the_first_exits() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let (first, second) = (TestResource::new(&["a::0"]), TestResource::new(&["a::0", "a::1"]));
    let one = fixture.start_plugins(&[(MPS_RESOURCE, &first)]);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    let two = fixture.start_plugins(&[(MPS_RESOURCE, &second)]);
    let state = wait_for_state(&two, "waiting", |state| state.directory == DirectoryState::HeldByAnother).await;
    assert!(!state.is_ready());
    wait_until_ready(&one).await;
    drop(one);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0", "a::1"]).await;
    wait_until_ready(&two).await;
}

#[tokio::test]
async fn shutdown_ends_streams_removes_sockets_and_releases_the_directory() {
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares), (TIMESLICE_RESOURCE, &shares)]);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    wait_until_served(&kubelet, TIMESLICE_RESOURCE, &["a::0"]).await;
    plugins.shutdown().await;
    let seen = wait_for_kubelet(&kubelet, "the end", |seen| seen.endpoints.values().all(|e| !e.connected)).await;
    assert_eq!(
        seen.endpoints[MPS_RESOURCE].devices.len(),
        1,
        "the list is not emptied, because another start will serve the devices"
    );
    assert!(fixture.socket_names().is_empty());
    let _next = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
}

#[tokio::test]
async fn a_peer_that_never_disconnects_does_not_delay_the_shutdown() {
    let mut fixture = Fixture::new();
    fixture.config.timings.hang_up = Duration::from_millis(50);
    let kubelet = fixture.start_kubelet();
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let endpoint = wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
    let mut silent = UnixStream::connect(fixture.path().join(endpoint.socket)).await.expect("a connection");
    tokio::time::timeout(TEST_TIMEOUT, plugins.shutdown()).await.expect("an end");
    let mut rest = Vec::new();
    tokio::time::timeout(TEST_TIMEOUT, silent.read_to_end(&mut rest)).await.expect("hung up").ok();
}

#[tokio::test]
async fn only_stale_sockets_of_cleave_are_removed() {
    let fixture = Fixture::new();
    let at = |name: &str| fixture.path().join(name);
    let stale = ["cleave-00000000-00000001.sock", "cleave-deadbeef-0badf00d.sock"];
    for name in stale {
        drop(UnixListener::bind(at(name)).expect("bind"));
    }
    let kept = ["cleave-00000000-00000002.sock", "nvidia-gpu.sock", "kubelet_internal_checkpoint", "cleave-notes.sock"];
    let _alive = UnixListener::bind(at(kept[0])).expect("bind");
    drop(UnixListener::bind(at(kept[1])).expect("bind"));
    std::fs::write(at(kept[2]), "{}").expect("a file");
    drop(UnixListener::bind(at(kept[3])).expect("bind"));
    let _plugins = fixture.start_plugins(&[]);
    wait_until("removed", || stale.iter().all(|name| !at(name).exists())).await;
    assert!(kept.iter().all(|name| at(name).exists()), "{:?}", fixture.socket_names());
}

#[tokio::test]
async fn plugins_serve_from_a_directory_that_is_created_later() {
    let mut fixture = Fixture::new();
    let directory = fixture.path().join("device-plugins");
    fixture.config.directory.clone_from(&directory);
    fixture.config.timings.lock = Duration::from_millis(10);
    let shares = TestResource::new(&["a::0"]);
    let plugins = fixture.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let failed =
        |state: &PluginServerState| matches!(&state.directory, DirectoryState::Failed(e) if e.contains("No such file"));
    for _ in 0..2 {
        wait_for_state(&plugins, "failed", failed).await;
        std::fs::create_dir(&directory).expect("a directory");
        let kubelet = FakeKubelet::start_in(&directory).expect("a kubelet");
        wait_until_served(&kubelet, MPS_RESOURCE, &["a::0"]).await;
        drop(kubelet);
        std::fs::remove_dir_all(&directory).expect("no directory");
    }
    wait_for_state(&plugins, "failed", failed).await;
}

#[tokio::test]
async fn an_invalid_path_fails_the_start() {
    let long = PathBuf::from(format!("/{}", "d".repeat(100)));
    let error = PluginServer::start(&PluginServerConfig::new(&long)).err().expect("too long");
    assert!(matches!(error, DirectoryError::TooLong { length: 131, .. }), "{error}");
    assert!(matches!(PluginServer::start(&PluginServerConfig::new("relative")).err(), Some(DirectoryError::Path(_))));
}

#[tokio::test]
async fn the_longest_resource_name_is_served() {
    let domain = [63, 63, 63, 52].map(|n| "a".repeat(n)).join(".");
    let name = format!("{domain}/{}", "b".repeat(63));
    let fixture = Fixture::new();
    let kubelet = fixture.start_kubelet();
    let _plugins = fixture.start_plugins(&[(&name, &TestResource::new(&["a::0"]))]);
    wait_until_served(&kubelet, &name, &["a::0"]).await;
}

/// A plugin can replace its socket at any time, even while the kubelet removes all sockets.
#[tokio::test]
async fn the_fake_kubelet_restarts_while_a_plugin_replaces_its_socket() {
    let directory = tempfile::tempdir().expect("a directory");
    let (temporary, socket) = (directory.path().join("plugin.sock.new"), directory.path().join("plugin.sock"));
    let mut kubelet = FakeKubelet::start_in(directory.path()).expect("a kubelet");
    let stopped = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stopped);
    let plugin = std::thread::spawn(move || {
        while !seen.load(Ordering::Relaxed) {
            // The kubelet may remove the socket before each of these calls.
            let _ = UnixListener::bind(&temporary);
            let _ = std::fs::rename(&temporary, &socket);
            let _ = std::fs::remove_file(&socket);
        }
    });
    for _ in 0..2000 {
        kubelet.restart().expect("a restart");
    }
    stopped.store(true, Ordering::Relaxed);
    plugin.join().expect("the plugin's thread");
}
