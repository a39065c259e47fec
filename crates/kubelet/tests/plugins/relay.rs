//! Tests the relay between an agent and a fake kubelet.

use std::os::unix::fs::MetadataExt as _;

use cleave_kubelet::proto::v1beta1 as wire;
use cleave_kubelet::{RelayConfig, RelayError, RelayTimings, SupervisorLock, run_relay};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::*;

/// A kubelet's directory, an agent's directory, and a relay between them.
struct RelayFixture {
    kubelet: Fixture,
    agent: Fixture,
    timings: RelayTimings,
}

/// A running relay.
struct RunningRelay {
    stop: oneshot::Sender<()>,
    relay: JoinHandle<Result<(), RelayError>>,
}

impl RunningRelay {
    async fn stop(self) {
        let _ = self.stop.send(());
        self.relay.await.expect("no panic").expect("no error");
    }
}

impl RelayFixture {
    fn new() -> Self {
        let timings = RelayTimings {
            stream: TEST_TIMEOUT,
            answer: TEST_TIMEOUT,
            absent: LONGER_THAN_ANY_TEST,
            supervised: LONGER_THAN_ANY_TEST,
            start: TEST_TIMEOUT,
            removed: 2 * LONGER_THAN_ANY_TEST,
            ..RelayTimings::default()
        };
        Self { kubelet: Fixture::new(), agent: Fixture::new(), timings }
    }

    fn start_relay(&self) -> RunningRelay {
        let (stop, stopped) = oneshot::channel();
        let config = RelayConfig {
            kubelet: self.kubelet.config.clone(),
            agent_directory: self.agent.path().to_owned(),
            timings: self.timings,
        };
        let relay = tokio::spawn(run_relay(config, async move {
            let _ = stopped.await;
        }));
        RunningRelay { stop, relay }
    }

    /// Starts an agent that serves the device `a` and does not answer calls of `allocate`.
    fn start_silent_agent(&self) -> (PluginServer, watch::Receiver<u32>) {
        let (called, calls) = watch::channel(0);
        let silent = SilentResource { devices: watch::Sender::new(device_list(&["a"])), called };
        let agent = PluginServer::start(&self.agent.config).expect("plugins");
        let name = ResourceName::parse(MPS_RESOURCE).expect("a name");
        agent.set(BTreeMap::from([(name, Arc::new(silent) as Arc<dyn Resource>)]));
        (agent, calls)
    }
}

/// Requests an allocation of the device `a`, and returns the refusal. Panics if the relay does not
/// refuse the request within [`TEST_TIMEOUT`].
async fn refused_allocation(kubelet: &FakeKubelet) -> tonic::Status {
    let answer = tokio::time::timeout(TEST_TIMEOUT, kubelet.allocate(MPS_RESOURCE, &["a"])).await;
    answer.expect("an answer in time").expect_err("a refusal")
}

fn assert_refused_for_absence(refusal: &tonic::Status) {
    assert_eq!(refusal.code(), tonic::Code::Unavailable);
    assert!(refusal.message().contains("Cleave's agent on this node has been absent for"), "{refusal}");
}

/// Returns a condition that is met when the kubelet can allocate exactly these devices.
fn can_allocate_exactly(ids: &[&str]) -> impl Fn(&FakeKubeletState) -> bool {
    move |seen| seen.endpoints.get(MPS_RESOURCE).is_some_and(|endpoint| endpoint.healthy_ids() == ids)
}

fn has_one_unhealthy_device(seen: &FakeKubeletState) -> bool {
    let endpoint = &seen.endpoints[MPS_RESOURCE];
    endpoint.connected && endpoint.devices.len() == 1 && endpoint.healthy_ids().is_empty()
}

#[tokio::test]
async fn lists_and_calls_are_relayed() {
    let fixture = RelayFixture::new();
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let shares = TestResource::new(&["a", "b"]);
    let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a", "b"])).await.expect("the first list");
    shares.devices.send_replace(device_list(&["a", "c"]));
    let seen = kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a", "c"])).await.expect("the second list");
    let options = seen.endpoints[MPS_RESOURCE].options;
    assert!(options.pre_start_required && options.get_preferred_allocation_available);
    let response = kubelet.allocate(MPS_RESOURCE, &["a", "c"]).await.expect("an allocation");
    assert_eq!(response.envs["IDS"], "a,c");
    assert_eq!((response.mounts.len(), response.devices.len(), response.cdi_devices.len()), (1, 1, 1));
    assert_eq!(response.annotations["a"], "b");
    let refusal = kubelet.allocate(MPS_RESOURCE, &["x"]).await.expect_err("an unknown device");
    assert_eq!((refusal.code(), refusal.message()), (tonic::Code::InvalidArgument, "no device x"));
    assert_eq!(kubelet.preferred_allocation(MPS_RESOURCE, &["a", "c"], &["c"], 1).await.expect("a choice"), ["c"]);
    kubelet.pre_start(MPS_RESOURCE, &["a"]).await.expect("ready");
    let refusal = kubelet.pre_start(MPS_RESOURCE, &[]).await.expect_err("not ready");
    assert_eq!((refusal.code(), refusal.message()), (tonic::Code::Unavailable, "the daemon starts"));
    // When the agent removes a resource, the kubelet receives an empty device list.
    agent.set(BTreeMap::new());
    let removed = |seen: &FakeKubeletState| seen.endpoints[MPS_RESOURCE].devices.is_empty();
    kubelet.wait_for(TEST_TIMEOUT, removed).await.expect("the resource is removed");
    agent.shutdown().await;
    relay.stop().await;
    assert!(fixture.kubelet.socket_names().is_empty());
}

#[tokio::test]
async fn an_agent_restart_ends_no_stream_and_fails_no_call() {
    let fixture = RelayFixture::new();
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let shares = TestResource::new(&["a", "b"]);
    let mut agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a", "b"])).await.expect("a list");
    for round in 0..10 {
        // Dropping the plugins immediately ends their connections, as SIGKILL does.
        if round % 2 == 0 {
            drop(agent);
        } else {
            agent.shutdown().await;
        }
        let restart = async {
            tokio::task::yield_now().await;
            fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)])
        };
        let calls = async {
            for _ in 0..20 {
                kubelet.allocate(MPS_RESOURCE, &["b"]).await.expect("an allocation");
                kubelet.pre_start(MPS_RESOURCE, &["b"]).await.expect("ready");
            }
        };
        (agent, ()) = tokio::join!(restart, calls);
    }
    let seen = kubelet.state().borrow().clone();
    let endpoint = &seen.endpoints[MPS_RESOURCE];
    assert!(endpoint.connected);
    assert_eq!((endpoint.disconnected, seen.registrations.len()), (0, 1));
    agent.shutdown().await;
    relay.stop().await;
}

#[tokio::test]
async fn devices_of_an_absent_agent_become_unhealthy_and_healthy_again_when_it_returns() {
    let mut fixture = RelayFixture::new();
    fixture.timings.absent = Duration::ZERO;
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let shares = TestResource::new(&["a"]);
    let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
    agent.shutdown().await;
    kubelet.wait_for(TEST_TIMEOUT, has_one_unhealthy_device).await.expect("unhealthy devices");
    assert_refused_for_absence(&refused_allocation(&kubelet).await);
    // `PreStartContainer` delays only one container, so the relay holds this call longer than
    // others.
    let returns = async { fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]) };
    let (agent, started) = tokio::join!(returns, kubelet.pre_start(MPS_RESOURCE, &["a"]));
    started.expect("the agent returned");
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("the list again");
    // The relay disconnects immediately, so the agent does not wait for the relay.
    let begun = std::time::Instant::now();
    agent.shutdown().await;
    assert!(begun.elapsed() < fixture.agent.config.timings.hang_up, "the agent waited for the relay");
    relay.stop().await;
}

#[tokio::test]
async fn resources_of_an_absent_agent_are_removed_and_served_again_when_it_returns() {
    let mut fixture = RelayFixture::new();
    (fixture.timings.absent, fixture.timings.removed) = (Duration::ZERO, Duration::ZERO);
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let shares = TestResource::new(&["a"]);
    for _ in 0..3 {
        let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
        kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
        agent.shutdown().await;
        let removed = |seen: &FakeKubeletState| seen.endpoints[MPS_RESOURCE].devices.is_empty();
        kubelet.wait_for(TEST_TIMEOUT, removed).await.expect("no devices");
    }
    relay.stop().await;
}

#[tokio::test]
async fn after_a_restart_of_the_kubelet_resources_are_registered_without_the_agent() {
    let fixture = RelayFixture::new();
    let mut kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let shares = TestResource::new(&["a"]);
    let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
    drop(agent);
    kubelet.restart().expect("a restart");
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("the list again");
    let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
    kubelet.allocate(MPS_RESOURCE, &["a"]).await.expect("an allocation");
    // The agent must register again after the kubelet's next restart.
    let mut states = agent.state();
    let registrations = |state: &PluginServerState| state.resources.values().map(|one| one.registrations).sum::<u64>();
    states.wait_for(PluginServerState::is_ready).await.expect("ready");
    let before = registrations(&states.borrow());
    kubelet.restart().expect("a restart");
    let again = states.wait_for(|state| registrations(state) > before && state.is_ready());
    tokio::time::timeout(TEST_TIMEOUT, again).await.expect("in time").expect("a state");
    kubelet.allocate(MPS_RESOURCE, &["a"]).await.expect("an allocation");
    agent.shutdown().await;
    relay.stop().await;
}

#[tokio::test]
async fn after_a_restart_of_the_relay_the_agent_registers_again() {
    let fixture = RelayFixture::new();
    let kubelet = fixture.kubelet.start_kubelet();
    let shares = TestResource::new(&["a"]);
    let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
    for _ in 0..3 {
        let relay = fixture.start_relay();
        kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
        kubelet.allocate(MPS_RESOURCE, &["a"]).await.expect("an allocation");
        relay.stop().await;
        kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&[])).await.expect("no devices");
    }
    agent.shutdown().await;
}

#[tokio::test]
async fn a_registration_without_a_kubelet_fails_and_is_repeated() {
    let mut fixture = RelayFixture::new();
    fixture.timings.stream = Duration::from_millis(50);
    let relay = fixture.start_relay();
    let shares = TestResource::new(&["a"]);
    let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let mut states = agent.state();
    let failed = states.wait_for(|state| state.resources.values().any(|one| one.failures > 1));
    let state = tokio::time::timeout(TEST_TIMEOUT, failed).await.expect("in time").expect("a state").clone();
    assert!(!state.is_ready(), "{state:?}");
    let kubelet = fixture.kubelet.start_kubelet();
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
    let ready = states.wait_for(PluginServerState::is_ready);
    tokio::time::timeout(TEST_TIMEOUT, ready).await.expect("in time").expect("a state");
    agent.shutdown().await;
    relay.stop().await;
}

/// A resource that counts the calls of `allocate` and never answers them.
struct SilentResource {
    devices: watch::Sender<Arc<DeviceList>>,
    called: watch::Sender<u32>,
}

impl Resource for SilentResource {
    fn devices(&self) -> watch::Receiver<Arc<DeviceList>> {
        self.devices.subscribe()
    }

    fn options(&self) -> PluginOptions {
        PluginOptions { pre_start: true, preferred: true }
    }

    fn preferred_devices<'a>(&'a self, _: PreferredRequest<'a>) -> BoxFuture<'a, Result<Vec<String>, Refusal>> {
        Box::pin(std::future::pending())
    }

    fn allocate<'a>(&'a self, _: &'a [String]) -> BoxFuture<'a, Result<ContainerResponse, Refusal>> {
        self.called.send_modify(|calls| *calls += 1);
        Box::pin(std::future::pending())
    }
}

#[tokio::test]
async fn the_next_agent_receives_a_call_that_was_in_progress() {
    let mut fixture = RelayFixture::new();
    fixture.timings.answer = Duration::from_secs(2);
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let (agent, mut calls) = fixture.start_silent_agent();
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
    let restart = async {
        calls.wait_for(|calls| *calls == 1).await.expect("a call");
        drop(agent);
        // The time of the absence does not count as time in which the agent did not answer.
        tokio::time::sleep(fixture.timings.answer + Duration::from_millis(200)).await;
        fixture.agent.start_plugins(&[(MPS_RESOURCE, &TestResource::new(&["a"]))])
    };
    let (response, agent) = tokio::join!(kubelet.allocate(MPS_RESOURCE, &["a"]), restart);
    assert_eq!(response.expect("an allocation").envs["IDS"], "a");
    agent.shutdown().await;
    relay.stop().await;
}

#[tokio::test]
async fn a_connected_agent_that_does_not_answer_is_not_awaited_like_an_absent_one() {
    let mut fixture = RelayFixture::new();
    fixture.timings.answer = Duration::from_millis(50);
    let _supervisor = SupervisorLock::acquire(fixture.agent.path()).expect("a lock");
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let (agent, _calls) = fixture.start_silent_agent();
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
    let refusal = refused_allocation(&kubelet).await;
    assert_eq!(refusal.code(), tonic::Code::Unavailable);
    assert_eq!(refusal.message(), format!("{MPS_RESOURCE}: Cleave's agent on this node did not answer within 0 s"));
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("the agent is connected");
    agent.shutdown().await;
    relay.stop().await;
}

#[tokio::test]
async fn an_absent_agent_is_awaited_for_longer_while_its_supervisor_runs() {
    let mut fixture = RelayFixture::new();
    fixture.timings.absent = Duration::ZERO;
    let supervisor = SupervisorLock::acquire(fixture.agent.path()).expect("a lock");
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let shares = TestResource::new(&["a"]);
    let start_agent = || fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
    let agent = start_agent();
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
    drop(agent);
    let restart = async {
        // Without the supervisor, the relay would refuse the call during this time.
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(can_allocate_exactly(&["a"])(&kubelet.state().borrow()), "the devices remain healthy");
        start_agent()
    };
    let (response, agent) = tokio::join!(kubelet.allocate(MPS_RESOURCE, &["a"]), restart);
    assert_eq!(response.expect("an allocation").envs["IDS"], "a");
    // If the supervisor ends too, only the kubelet can start an agent, and the kubelet waits for
    // the relay.
    drop(agent);
    let ends = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        drop(supervisor);
    };
    let (refusal, ()) = tokio::join!(refused_allocation(&kubelet), ends);
    assert_refused_for_absence(&refusal);
    kubelet.wait_for(TEST_TIMEOUT, has_one_unhealthy_device).await.expect("unhealthy devices");
    relay.stop().await;
}

#[tokio::test]
async fn an_agent_that_does_not_return_counts_as_lost_although_its_supervisor_runs() {
    let mut fixture = RelayFixture::new();
    (fixture.timings.absent, fixture.timings.supervised) = (Duration::ZERO, Duration::from_millis(50));
    let _supervisor = SupervisorLock::acquire(fixture.agent.path()).expect("a lock");
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &TestResource::new(&["a"]))]);
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
    drop(agent);
    assert_refused_for_absence(&refused_allocation(&kubelet).await);
    kubelet.wait_for(TEST_TIMEOUT, has_one_unhealthy_device).await.expect("unhealthy devices");
    relay.stop().await;
}

#[tokio::test]
async fn an_agent_that_disconnects_again_and_again_does_not_block_the_kubelet() {
    let mut fixture = RelayFixture::new();
    (fixture.timings.answer, fixture.timings.supervised) = (Duration::from_secs(2), Duration::ZERO);
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let mut running = fixture.start_silent_agent();
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
    // Each agent disconnects long before its time to answer is over.
    let restarts = async {
        loop {
            let (agent, mut calls) = running;
            calls.wait_for(|calls| *calls == 1).await.expect("a call");
            drop(agent);
            running = fixture.start_silent_agent();
        }
    };
    tokio::select! {
        refusal = refused_allocation(&kubelet) => assert_eq!(refusal.code(), tonic::Code::Unavailable),
        () = restarts => {}
    }
    relay.stop().await;
}

#[tokio::test]
async fn an_agent_with_other_options_answers_a_held_call() {
    let fixture = RelayFixture::new();
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let shares = TestResource::new(&["a"]);
    drop({
        let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
        kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
        agent
    });
    let mut client = kubelet.client(MPS_RESOURCE).expect("a client");
    let request = wire::PreStartContainerRequest { devices_ids: vec!["a".to_owned()] };
    let held = tokio::spawn(async move { client.pre_start_container(request).await });
    let other = TestResource::with_options(&["a"], PluginOptions { pre_start: false, preferred: true });
    let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &other)]);
    let changed = |seen: &FakeKubeletState| !seen.endpoints[MPS_RESOURCE].options.pre_start_required;
    kubelet.wait_for(TEST_TIMEOUT, changed).await.expect("the other options");
    held.await.expect("no panic").expect("an answer");
    agent.shutdown().await;
    relay.stop().await;
}

#[tokio::test]
async fn a_second_relay_waits_until_the_first_exits() {
    let fixture = RelayFixture::new();
    let kubelet = fixture.kubelet.start_kubelet();
    let relay = fixture.start_relay();
    let shares = TestResource::new(&["a"]);
    let agent = fixture.agent.start_plugins(&[(MPS_RESOURCE, &shares)]);
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("a list");
    let socket = || std::fs::metadata(fixture.agent.path().join("kubelet.sock")).expect("a socket").ino();
    let before = socket();
    let second = fixture.start_relay();
    for _ in 0..20 {
        kubelet.allocate(MPS_RESOURCE, &["a"]).await.expect("an allocation");
    }
    assert_eq!(socket(), before, "the agent's relay was replaced");
    relay.stop().await;
    kubelet.wait_for(TEST_TIMEOUT, can_allocate_exactly(&["a"])).await.expect("the list again");
    kubelet.allocate(MPS_RESOURCE, &["a"]).await.expect("an allocation");
    agent.shutdown().await;
    second.stop().await;
}
