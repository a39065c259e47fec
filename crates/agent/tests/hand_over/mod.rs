//! Tests a rollout on one node: two agents run as processes, and only one of them serves.
use std::fs;

use crate::machine::{MPS_RESOURCE, Machine, container_devices, kill_pid, mps_spec, share_ids};

const OLD_AGENT_ARGUMENTS: [&str; 2] = ["--pod-uid", "old"];
const NEW_AGENT_ARGUMENTS: [&str; 2] = ["--pod-uid", "new"];

/// Returns a node on which the agent `old` serves ten shares and is ready.
async fn node_with_old_agent() -> Machine {
    let mut machine = Machine::new(&["H200"]);
    machine.set_spec("first", vec![mps_spec(&machine.uuids[0], 10)]);
    machine.start_mps_host();
    machine.start_agent(&OLD_AGENT_ARGUMENTS);
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    machine.wait_until("the old agent has recorded that it is ready", || is_recorded_ready(&machine)).await;
    machine
}

fn is_recorded_ready(machine: &Machine) -> Option<()> {
    let text = fs::read_to_string(machine.path("state/hand-over.json")).ok()?;
    let record: serde_json::Value = serde_json::from_str(&text).ok()?;
    (record["agents"][0]["ready"] == true).then_some(())
}

fn is_ok(answer: Option<&String>) -> bool {
    answer.is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// Waits until an agent has logged `count` times that it serves.
async fn wait_until_serving(machine: &Machine, agent: &str, count: usize) {
    let words = ["this agent serves the node", &format!("agent=\"{agent}\"")];
    let serves = || (machine.count_logged(&words) >= count).then_some(());
    machine.wait_until(&format!("{agent} serves"), serves).await;
}

/// Checks that the kubelet receives healthy shares, and that a container with one share can start.
async fn assert_serves(machine: &Machine, share: u32) {
    machine.wait_for_view("an agent serves", |seen| seen.endpoints[MPS_RESOURCE].connected).await;
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    let ids = share_ids(&machine.uuids[0], [share]);
    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, &ids)]);
    machine.kubelet.allocate(MPS_RESOURCE, &[&ids[0]]).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &[&ids[0]]).await.unwrap();
}

#[tokio::test]
async fn a_new_agent_takes_over_with_all_allocations_and_the_old_agent_waits() {
    let mut machine = node_with_old_agent().await;
    assert_serves(&machine, 2).await;
    let desired = machine.read_desired_file().unwrap();
    assert_eq!(desired.allocations.len(), 1);
    let registrations = machine.kubelet.state().borrow().registrations.len();
    machine.start_second_agent(&NEW_AGENT_ARGUMENTS);
    let [old, _] = machine.agent_pids();
    wait_until_serving(&machine, "new", 1).await;
    machine.wait_until("the new agent is ready", || is_ok(machine.readiness()[1].as_ref()).then_some(())).await;
    machine.wait_until("the old agent remains ready", || is_ok(machine.readiness()[0].as_ref()).then_some(())).await;
    let both_wait = || (machine.count_logged(&["waiting for another agent of this node"]) == 2).then_some(());
    machine.wait_until("both agents have waited", both_wait).await;
    machine
        .wait_for_view("the new agent is registered", |seen| {
            seen.registrations.len() > registrations && seen.endpoints[MPS_RESOURCE].connected
        })
        .await;
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    assert_eq!(machine.read_desired_file().unwrap(), desired);
    assert_eq!(machine.agent_pids()[0], old, "the old agent is the same process");
    assert!(machine.stop_first_agent().success(), "a waiting agent exits without an error on SIGTERM");
    assert_serves(&machine, 3).await;
    assert_eq!(machine.count_logged(&["handing over to another agent"]), 1);
}

/// Starts a new agent with arguments that make it fail after it has taken over. Checks that the old
/// agent serves again, remains ready, and delays a second hand-over to the new agent.
async fn check_failing_agent(machine: &mut Machine, faulty: &[&str]) {
    machine.start_second_agent(&[&NEW_AGENT_ARGUMENTS[..], faulty].concat());
    wait_until_serving(machine, "new", 1).await;
    wait_until_serving(machine, "old", 2).await;
    let exit = loop {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        // The old agent restarts its program, so it may not answer yet.
        let answers = machine.readiness();
        assert!(answers[0].is_none() || is_ok(answers[0].as_ref()), "{answers:?}");
        if let Some(exit) = machine.agent_exit_status() {
            break exit;
        }
    };
    assert!(!exit.success(), "{exit}");
    assert_serves(machine, 1).await;
    // As after a restart of the container by the kubelet, the new agent could serve now. However,
    // the old agent still refuses the hand-over.
    machine.start_agent(&NEW_AGENT_ARGUMENTS);
    let refused = || (machine.count_logged(&["does not hand over yet", "failures=1"]) == 1).then_some(());
    machine.wait_until("the old agent refuses to hand over", refused).await;
    machine.wait_until("the old agent answers", || machine.readiness()[0].clone().map(drop)).await;
    machine.wait_until("the new agent answers", || machine.readiness()[1].clone().map(drop)).await;
    let [old, new] = machine.readiness();
    assert!(is_ok(old.as_ref()), "{old:?}");
    assert!(new.is_some_and(|new| new.starts_with("HTTP/1.1 503") && new.contains("another agent")));
    assert_eq!(machine.count_logged(&["handing over to another agent"]), 1);
    assert_serves(machine, 2).await;
}

#[tokio::test]
async fn an_agent_that_is_never_ready_is_replaced_by_the_old_agent() {
    let mut machine = node_with_old_agent().await;
    let missing = machine.path("no-relay");
    check_failing_agent(&mut machine, &["--probation", "1", "--relay-dir", missing.to_str().unwrap()]).await;
    assert_eq!(machine.count_logged(&["this agent serves the node", "probation=true"]), 1);
}

#[tokio::test]
async fn an_agent_that_exits_after_it_has_taken_over_is_replaced_by_the_old_agent() {
    let mut machine = node_with_old_agent().await;
    // No interface has this address, so the agent cannot serve its endpoints.
    check_failing_agent(&mut machine, &["--metrics-addr", "192.0.2.1:1"]).await;
}

#[tokio::test]
async fn if_one_agent_is_killed_at_any_step_the_other_agent_serves() {
    let steps: [&[&str]; 3] = [
        &["waiting for another agent of this node"],
        &["handing over to another agent of this node"],
        &["this agent serves the node", "agent=\"new\""],
    ];
    for (step, victim) in steps.iter().flat_map(|step| [(step, 0), (step, 1)]) {
        let mut machine = node_with_old_agent().await;
        let before = machine.kubelet.state().borrow().registrations.len();
        machine.start_second_agent(&NEW_AGENT_ARGUMENTS);
        machine.wait_until(&format!("{step:?}"), || (machine.count_logged(step) > 0).then_some(())).await;
        kill_pid(machine.agent_pids()[victim]);
        let survivor = ["new", "old"][victim];
        // An old agent that has not handed over does not register again.
        if survivor == "new" || machine.count_logged(&["handing over to another agent"]) > 0 {
            wait_until_serving(&machine, survivor, if survivor == "new" { 1 } else { 2 }).await;
            let again = |seen: &cleave_kubelet::fake::FakeKubeletState| {
                seen.registrations.len() > before && seen.endpoints[MPS_RESOURCE].connected
            };
            machine.wait_for_view(&format!("{survivor} serves after {step:?}"), again).await;
        }
        assert_serves(&machine, 1).await;
        let ready = || is_ok(machine.readiness()[1 - victim].as_ref()).then_some(());
        machine.wait_until(&format!("{survivor} is ready after {step:?}"), ready).await;
    }
}

#[tokio::test]
async fn a_killed_old_agent_does_not_request_a_hand_over_again() {
    let mut machine = node_with_old_agent().await;
    machine.start_second_agent(&NEW_AGENT_ARGUMENTS);
    machine.wait_until("the new agent is ready", || is_ok(machine.readiness()[1].as_ref()).then_some(())).await;
    machine.kill_first_agent();
    // Start the old agent again, as its supervisor would.
    machine.start_second_agent(&OLD_AGENT_ARGUMENTS);
    machine.wait_until("the old agent is ready", || is_ok(machine.readiness()[1].as_ref()).then_some(())).await;
    assert_eq!(
        fs::read_to_string(machine.path("state/successor")).unwrap(),
        "new",
        "the old agent has requested no hand-over"
    );
    assert_eq!(machine.count_logged(&["handing over to another agent"]), 1);
    assert_serves(&machine, 1).await;
}

#[tokio::test]
async fn an_agent_that_cannot_lock_the_state_directory_does_not_serve() {
    let mut machine = Machine::new(&["H200"]);
    machine.set_spec("first", vec![mps_spec(&machine.uuids[0], 10)]);
    machine.start_mps_host();
    // A file at the path of the state directory prevents the lock.
    fs::write(machine.path("state"), "").unwrap();
    machine.start_agent(&OLD_AGENT_ARGUMENTS);
    let failed = || (machine.count_logged(&["failed to lock the checkpoint's directory"]) == 1).then_some(());
    machine.wait_until("the agent cannot lock the directory", failed).await;
    assert!(machine.agent_is_running());
    assert!(machine.kubelet.state().borrow().registrations.is_empty());
    fs::remove_file(machine.path("state")).unwrap();
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
}
