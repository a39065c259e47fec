//! Tests of [`Node`] as a whole.
use cleave_api::gpunode::GpuSpec;
use cleave_api::names::{CONDITION_GPUS_PRESENT, CONDITION_LIMITS_ENFORCED, CONDITION_READY};
use cleave_api::sharingpolicy::MpsEnforcement;
use cleave_gpu::mps::wire::{DaemonState, DaemonStatus, Enforcement, MpsHostStatus};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::reconcile::LIST_INTERVAL_WHILE_IN_USE;
use super::*;
use crate::allocation::table::AllocationTable;
use crate::allocation::usage::tests::{MPS_RESOURCE, allocation, container_devices};
use crate::gpu::hardware::tests::Inventory;
use crate::gpu::layout::tests::{gpu, mps_spec};
use crate::node::absence::MAX_TOLERATED_ABSENCE;

const ALLOCATION_GRACE: Duration = Duration::from_secs(30);

fn spec_object(units: u32) -> GpuNodeState {
    let gpus = vec![mps_spec("GPU-a", units)];
    GpuNodeState::Present(3, GpuNodeSpec { plan_id: format!("p{units}"), gpus })
}

#[expect(clippy::unnecessary_wraps, reason = "the type of an NVML answer")]
fn inventory() -> Result<Inventory, NvmlError> {
    let gpus = BTreeMap::from([(0, Ok(gpu("GPU-a", 0)))]);
    Ok(Inventory { driver: "580".into(), gpus, processes: BTreeMap::new() })
}

/// Returns a node without hardware, and its table.
fn start_node(checkpoint: Option<Checkpoint>, last: Option<Desired>, start: Instant) -> (Node, AllocationTable) {
    let (node, allocations) = Node::start("boot".into(), ALLOCATION_GRACE, checkpoint, last, start);
    (node, AllocationTable { allocations, ..AllocationTable::default() })
}

fn mps_host_view(state: DaemonState, restarts: u32, desired: &Desired) -> mps::HostView {
    let daemon = DaemonStatus {
        state,
        pid: Some(1),
        server_pid: None,
        restarts,
        enforcement: Enforcement::Hard,
        holds_clients: false,
        replies_unproven: false,
        message: String::new(),
        clients: Vec::new(),
        fault: None,
    };
    let daemons = BTreeMap::from([("GPU-a".to_owned(), daemon)]);
    let status = MpsHostStatus { version: 1, desired: desired.hash(), daemons, ..MpsHostStatus::default() };
    mps::HostView { alive: true, status, error: None }
}

fn count_healthy(actions: &Actions) -> usize {
    actions.lists.values().flatten().filter(|device| device.healthy).count()
}

fn event_reasons(actions: &Actions) -> Vec<&'static str> {
    actions.events.iter().map(|event| event.reason).collect()
}

/// Returns a node that serves ten shares.
fn serving_node(start: Instant) -> (Node, AllocationTable, Desired) {
    let (mut node, mut table) = start_node(None, None, start);
    node.record_inventory(inventory(), start);
    node.record_gpu_node(spec_object(10));
    let desired = node.reconcile(&mut table, start).desired;
    node.record_mps_view(mps_host_view(DaemonState::Active, 0, &desired));
    assert_eq!(count_healthy(&node.reconcile(&mut table, start)), 10);
    (node, table, desired)
}

#[test]
fn a_short_absence_of_a_daemon_makes_no_share_unhealthy() {
    let start = Instant::now();
    let nothing = mps::HostView { alive: true, ..mps::HostView::default() };
    let desired = serving_node(start).2;
    let views = [
        ("the daemon starts", mps_host_view(DaemonState::Starting, 0, &desired)),
        ("the daemon restarts", mps_host_view(DaemonState::Restarting, 0, &desired)),
        (
            "the MPS host does not answer",
            mps::HostView { alive: false, ..mps_host_view(DaemonState::Active, 0, &desired) },
        ),
        ("a new MPS host has not started the daemon yet", nothing),
        ("the MPS host left no status", mps::HostView::default()),
    ];
    for (what, away) in views {
        let (mut node, mut table, desired) = serving_node(start);
        let served = |actions: &Actions| {
            let gpu = &actions.status.gpus[0];
            (
                count_healthy(actions),
                gpu.slices[0].unhealthy,
                gpu.health.healthy,
                actions.not_ready.is_none(),
                actions.wake_after,
            )
        };
        for gone in [start + MAX_TOLERATED_ABSENCE, start + 5 * MAX_TOLERATED_ABSENCE] {
            // The daemon serves again before its second absence. Only the duration of the current
            // absence counts.
            node.record_mps_view(mps_host_view(DaemonState::Active, 0, &desired));
            assert_eq!(served(&node.reconcile(&mut table, gone)), (10, 0, true, true, None), "{what}");
            let gone = gone + MAX_TOLERATED_ABSENCE;
            node.record_mps_view(away.clone());
            assert_eq!(
                served(&node.reconcile(&mut table, gone)),
                (10, 0, true, true, Some(MAX_TOLERATED_ABSENCE)),
                "{what}"
            );
            let pools = crate::allocation::allocate::ResourceView {
                resource: MPS_RESOURCE,
                pools: &table.pools[MPS_RESOURCE],
                reserved: &[],
            };
            assert!(
                crate::allocation::allocate::grant_allocation(&pools, &["GPU-a::0".to_owned()]).is_ok(),
                "{what}: Allocate answers"
            );
            let half = MAX_TOLERATED_ABSENCE / 2;
            assert_eq!(served(&node.reconcile(&mut table, gone + half)), (10, 0, true, true, Some(half)), "{what}");
            for late in [gone + MAX_TOLERATED_ABSENCE, gone + 2 * MAX_TOLERATED_ABSENCE] {
                let actions = node.reconcile(&mut table, late);
                assert_eq!((count_healthy(&actions), actions.status.gpus[0].slices[0].unhealthy), (0, 10), "{what}");
                assert_eq!((actions.wake_after, actions.not_ready.is_none()), (None, node.view.alive), "{what}");
            }
        }
    }
}

#[test]
fn failures_make_shares_unhealthy_at_once() {
    let start = Instant::now();
    for state in [DaemonState::Fault, DaemonState::BackOff, DaemonState::Stopping] {
        let (mut node, mut table, desired) = serving_node(start);
        for (state, shares) in [
            (DaemonState::Restarting, 10),
            (state, 0),
            (DaemonState::Restarting, 0),
            (DaemonState::Starting, 0),
            (DaemonState::Active, 10),
        ] {
            node.record_mps_view(mps_host_view(state, 0, &desired));
            let actions = node.reconcile(&mut table, start);
            assert_eq!(count_healthy(&actions), shares, "{state:?}");
            assert_eq!(actions.status.gpus[0].slices[0].unhealthy, 10 - u32::try_from(shares).unwrap());
        }
        node.record_mps_view(mps::HostView { alive: false, ..mps_host_view(state, 0, &desired) });
        assert_eq!(count_healthy(&node.reconcile(&mut table, start)), 0, "{state:?} was the MPS host's last status");
    }
    let (mut node, mut table, desired) = serving_node(start);
    node.record_mps_view(mps_host_view(DaemonState::Restarting, 0, &desired));
    node.record_xid("GPU-a", 79, None, &[], start);
    let actions = node.reconcile(&mut table, start);
    assert_eq!(
        (count_healthy(&actions), actions.status.gpus[0].health.reason.as_str()),
        (0, "ResetRequired"),
        "the GPU itself failed"
    );
}

#[test]
fn shares_whose_daemon_has_not_served_them_yet_are_unhealthy() {
    let start = Instant::now();
    for state in [DaemonState::Starting, DaemonState::Restarting] {
        let (mut node, mut table) = start_node(None, None, start);
        node.record_inventory(inventory(), start);
        node.record_gpu_node(spec_object(10));
        let desired = node.reconcile(&mut table, start).desired;
        node.record_mps_view(mps_host_view(state, 0, &desired));
        assert_eq!(count_healthy(&node.reconcile(&mut table, start)), 0, "{state:?}, not served before");
    }

    let (mut first, mut table, desired) = serving_node(start);
    let checkpoint = first.reconcile(&mut table, start).checkpoint;
    let (mut next, mut table) = start_node(Some(checkpoint), None, start);
    next.record_mps_view(mps_host_view(DaemonState::Restarting, 0, &desired));
    assert_eq!(count_healthy(&next.reconcile(&mut table, start)), 0, "a new agent does not know that it served");

    // The new layout has different limits. The daemon's settings remain the same only if
    // `same_daemon` is true.
    for same_daemon in [false, true] {
        let (mut node, mut table, desired) = serving_node(start);
        node.record_pod_resources(Ok(vec![]), start + ALLOCATION_GRACE, &mut table.allocations);
        let GpuNodeState::Present(generation, mut other) = spec_object(10) else { panic!() };
        let partition = other.gpus[0].partition.mps.as_mut().unwrap();
        if same_daemon {
            partition.slices[0].max_clients = Some(3);
        } else {
            partition.multi_user = false;
        }
        node.record_gpu_node(GpuNodeState::Present(generation, other));
        node.record_mps_view(mps_host_view(DaemonState::Restarting, 0, &desired));
        node.reconcile(&mut table, start);
        let actions = node.reconcile(&mut table, start + REMOVAL_DELAY);
        assert_eq!(actions.desired == desired, same_daemon);
        assert_eq!((count_healthy(&actions), actions.wake_after), (0, None), "the layout changed");
        for state in [DaemonState::Active, DaemonState::Restarting] {
            node.record_mps_view(mps_host_view(state, 0, &desired));
            let shares = count_healthy(&node.reconcile(&mut table, start));
            assert_eq!(shares, if same_daemon { 10 } else { 0 }, "{state:?}, with its last settings?");
        }
        node.record_mps_view(mps_host_view(DaemonState::Active, 0, &actions.desired));
        assert_eq!(count_healthy(&node.reconcile(&mut table, start)), 10);
    }
}

#[test]
fn a_daemon_is_reported_as_active_only_with_its_current_settings() {
    let start = Instant::now();
    let (mut node, mut table, desired) = serving_node(start);
    node.record_pod_resources(Ok(vec![]), start + ALLOCATION_GRACE, &mut table.allocations);
    let GpuNodeState::Present(generation, mut other) = spec_object(10) else { panic!() };
    other.gpus[0].partition.mps.as_mut().unwrap().multi_user = false;
    node.record_gpu_node(GpuNodeState::Present(generation + 1, other));
    let state = |actions: &Actions| actions.status.gpus[0].mps[0].state.clone();
    let withdrawn = node.reconcile(&mut table, start);
    assert_eq!((withdrawn.status.observed_generation, state(&withdrawn).as_str()), (generation + 1, "Restarting"));
    let changed = node.reconcile(&mut table, start + REMOVAL_DELAY);
    assert_ne!(changed.desired, desired);
    assert_eq!(state(&changed), "Restarting", "the status of the MPS host is about the older settings");
    assert!(changed.status.gpus[0].health.healthy, "no failure");
    let mut refused = mps_host_view(DaemonState::Active, 0, &desired);
    refused.status.error = Some("desired.json has version 9".to_owned());
    node.record_mps_view(refused);
    let actions = node.reconcile(&mut table, start + REMOVAL_DELAY);
    let health = &actions.status.gpus[0].health;
    assert_eq!((health.healthy, health.reason.as_str()), (false, "MpsUnavailable"));
    assert!(health.message.contains("desired.json has version 9"), "{}", health.message);
    node.record_mps_view(mps_host_view(DaemonState::BackOff, 0, &changed.desired));
    assert_eq!(state(&node.reconcile(&mut table, start + REMOVAL_DELAY)), "BackOff");
    node.record_mps_view(mps_host_view(DaemonState::Active, 0, &changed.desired));
    assert_eq!(state(&node.reconcile(&mut table, start + REMOVAL_DELAY)), "Active");
}

#[test]
fn a_door_that_fails_is_reported_in_each_state_of_its_daemon() {
    let start = Instant::now();
    let (mut node, mut table, _) = serving_node(start);
    table.allocations.insert(allocation(&["GPU-a::0"]), start);
    let desired = node.reconcile(&mut table, start).desired;
    let mut health_of = |state, device: &str, alive| {
        let mut failed = mps_host_view(state, 0, &desired);
        failed.alive = alive;
        failed.status.door_errors = BTreeMap::from([(device.to_owned(), "no free descriptor".to_owned())]);
        node.record_mps_view(failed);
        node.reconcile(&mut table, start).status.gpus[0].health.clone()
    };
    for state in [DaemonState::Active, DaemonState::Starting, DaemonState::Restarting, DaemonState::Active] {
        let health = health_of(state, "GPU-a", true);
        assert_eq!((health.healthy, health.reason.as_str()), (false, "MpsUnavailable"), "{state:?}");
        assert!(health.message.contains("no free descriptor"), "{}", health.message);
        let other = health_of(state, "GPU-b", true);
        assert!(other.healthy, "{state:?}, a door of another GPU: {}", other.message);
    }
    let stopped = health_of(DaemonState::Active, "GPU-a", false);
    assert!(stopped.healthy, "the status of an MPS host that does not answer is old: {}", stopped.message);
}

#[test]
fn a_new_allocation_that_the_mps_host_has_not_read_leaves_shares_healthy() {
    let start = Instant::now();
    let (mut node, mut table, _) = serving_node(start);
    let given = Allocation {
        mps: Some(MpsLimits { threads: Some(20), memory_mib: Some(1), max_clients: None }),
        ..allocation(&["GPU-a::0"])
    };
    table.allocations.insert(given, start);
    let actions = node.reconcile(&mut table, start);
    assert_eq!((count_healthy(&actions), actions.desired.allocations.len()), (10, 1));
}

#[test]
fn a_whole_gpu_waits_until_its_daemon_has_exited() {
    let start = Instant::now();
    let (mut node, mut table, desired) = serving_node(start);
    node.record_pod_resources(Ok(vec![]), start + ALLOCATION_GRACE, &mut table.allocations);
    node.record_gpu_node(GpuNodeState::Present(4, GpuNodeSpec { plan_id: "w".into(), ..GpuNodeSpec::default() }));
    node.reconcile(&mut table, start);
    let actions = node.reconcile(&mut table, start + REMOVAL_DELAY);
    assert!(actions.desired.daemons.is_empty());
    assert_eq!((actions.lists.values().flatten().count(), count_healthy(&actions)), (1, 0));
    // A dead MPS host leaves the daemon, and the compute mode in which no other process can use the
    // GPU. A new MPS host has restored the mode only when it has read the request to stop the
    // daemon.
    let died = mps::HostView { alive: false, ..mps_host_view(DaemonState::Active, 0, &desired) };
    let mut restarted = mps_host_view(DaemonState::Active, 0, &desired);
    restarted.status.daemons.clear();
    for (what, unconfirmed) in [("the MPS host died", died), ("the MPS host has restarted", restarted)] {
        node.record_mps_view(unconfirmed);
        assert_eq!(count_healthy(&node.reconcile(&mut table, start)), 0, "{what}");
    }
    let mut gone = mps_host_view(DaemonState::Active, 0, &actions.desired);
    gone.status.daemons.clear();
    node.record_mps_view(gone);
    assert_eq!(count_healthy(&node.reconcile(&mut table, start)), 1);
}

#[test]
fn each_exit_of_a_daemon_and_each_recovery_is_reported_once() {
    let start = Instant::now();
    let (mut node, mut table, desired) = serving_node(start);
    let mut reported = |view: mps::HostView| {
        node.record_mps_view(view);
        event_reasons(&node.reconcile(&mut table, start))
    };
    assert!(reported(mps_host_view(DaemonState::Active, 0, &desired)).is_empty());
    assert_eq!(reported(mps_host_view(DaemonState::Restarting, 0, &desired)), ["MpsUnavailable"]);
    assert!(reported(mps_host_view(DaemonState::BackOff, 0, &desired)).is_empty());
    assert!(reported(mps_host_view(DaemonState::Starting, 1, &desired)).is_empty());
    assert_eq!(reported(mps_host_view(DaemonState::Active, 1, &desired)), ["Recovered"]);
    assert_eq!(
        reported(mps_host_view(DaemonState::Active, 2, &desired)),
        ["MpsUnavailable", "Recovered"],
        "both between two updates"
    );
    assert_eq!(
        reported(mps::HostView { alive: false, ..mps_host_view(DaemonState::Active, 2, &desired) }),
        ["MpsUnavailable"]
    );
}

/// Returns the view of an MPS host whose daemon has an unknown handshake.
fn advisory_view(state: DaemonState, desired: &Desired) -> mps::HostView {
    let mut view = mps_host_view(state, 0, desired);
    view.status.daemons.values_mut().for_each(|daemon| daemon.enforcement = Enforcement::Advisory);
    view
}

/// Returns the status and reason of a condition.
fn condition(actions: &Actions, type_: &str) -> Option<(String, String)> {
    let found = actions.status.conditions.iter().find(|condition| condition.type_ == type_)?;
    Some((found.status.clone(), found.reason.clone()))
}

/// Returns the spec of ten shares that are served with advisory limits.
fn advisory_spec() -> GpuNodeState {
    let mut gpu = mps_spec("GPU-a", 10);
    gpu.partition.mps.iter_mut().for_each(|mps| mps.enforcement = MpsEnforcement::Advisory);
    GpuNodeState::Present(4, GpuNodeSpec { plan_id: "advisory".into(), gpus: vec![gpu] })
}

#[test]
fn shares_with_an_unknown_handshake_are_unhealthy_at_once() {
    let start = Instant::now();
    // An MPS host of an earlier version reports such a daemon as Active.
    for state in [DaemonState::Active, DaemonState::Restarting, DaemonState::BackOff] {
        let (mut node, mut table, desired) = serving_node(start);
        let before = node.reconcile(&mut table, start);
        assert_eq!(condition(&before, CONDITION_LIMITS_ENFORCED), Some(("True".into(), "DoorsEnforce".into())));
        node.record_mps_view(advisory_view(state, &desired));
        let actions = node.reconcile(&mut table, start);
        assert_eq!(count_healthy(&actions), 0, "{state:?}");
        let gpu = &actions.status.gpus[0];
        assert!(!gpu.health.healthy && gpu.health.message.contains("mps.enforcement: Advisory"), "{gpu:?}");
        assert_eq!(gpu.mps[0].door, "Unknown");
        let unknown = Some(("False".into(), "UnknownHandshake".into()));
        assert_eq!(condition(&actions, CONDITION_LIMITS_ENFORCED), unknown);
        assert_eq!(condition(&actions, CONDITION_READY), Some(("False".into(), "MpsUnavailable".into())));
        assert_eq!(event_reasons(&actions), ["MpsUnavailable"]);
        let metrics = crate::metrics::Metrics::new();
        metrics.set_node_status(&actions.status);
        let text = metrics.encode().unwrap();
        assert!(text.contains(r#"cleave_agent_mps_door{gpu="0",uuid="GPU-a",door="Unknown"} 1"#), "{text}");
    }
}

#[test]
fn shares_whose_doors_hold_clients_are_unhealthy_until_the_daemons_replies_are_expected() {
    let start = Instant::now();
    for object in [spec_object(10), advisory_spec()] {
        let (mut node, mut table, _) = serving_node(start);
        node.record_gpu_node(object);
        let desired = node.reconcile(&mut table, start).desired;
        let mut view = mps_host_view(DaemonState::Active, 0, &desired);
        view.status.daemons.values_mut().for_each(|daemon| daemon.holds_clients = true);
        node.record_mps_view(view);
        let held = node.reconcile(&mut table, start);
        let gpu = &held.status.gpus[0];
        assert_eq!((count_healthy(&held), gpu.mps[0].door.as_str()), (0, "Unknown"));
        assert!(gpu.health.message.contains("unexpected replies"), "{}", gpu.health.message);
        assert!(!gpu.health.message.contains("Advisory"), "consent changes nothing: {}", gpu.health.message);
        assert_eq!(condition(&held, CONDITION_LIMITS_ENFORCED), Some(("False".into(), "UnknownHandshake".into())));
        let metrics = crate::metrics::Metrics::new();
        metrics.set_node_status(&held.status);
        let text = metrics.encode().unwrap();
        assert!(text.contains(r#"cleave_agent_mps_door{gpu="0",uuid="GPU-a",door="Unknown"} 1"#), "{text}");
        node.record_mps_view(mps_host_view(DaemonState::Active, 0, &desired));
        let served = node.reconcile(&mut table, start);
        assert_eq!((count_healthy(&served), served.status.gpus[0].mps[0].door.as_str()), (10, "Hard"));
        assert_eq!([event_reasons(&held), event_reasons(&served)].concat(), ["MpsUnavailable", "Recovered"]);
    }
}

/// Returns the note of the only Event `Recovered`.
fn recovery_note(actions: &Actions) -> &str {
    assert_eq!(event_reasons(actions), ["Recovered"]);
    &actions.events[0].note
}

#[test]
fn the_event_of_a_recovery_states_only_what_is_known() {
    let start = Instant::now();
    let later = start + 2 * ALLOCATION_GRACE;
    let cases = [
        (spec_object(10), false, Enforcement::Hard, "with all limits"),
        (spec_object(10), true, Enforcement::Hard, "It is unknown whether"),
        (advisory_spec(), false, Enforcement::Advisory, "advisory"),
    ];
    for (object, unproven, enforcement, expected) in cases {
        let (mut node, mut table, _) = serving_node(start);
        node.record_pod_resources(Ok(vec![]), later, &mut table.allocations);
        node.record_gpu_node(object);
        let desired = node.reconcile(&mut table, later).desired;
        let daemon_view = |holds_clients, replies_unproven, enforcement| {
            let mut view = mps_host_view(DaemonState::Active, 0, &desired);
            view.status.daemons.values_mut().for_each(|daemon| {
                *daemon = DaemonStatus { holds_clients, replies_unproven, enforcement, ..daemon.clone() };
            });
            view
        };
        node.record_mps_view(daemon_view(true, false, Enforcement::Hard));
        assert_eq!(event_reasons(&node.reconcile(&mut table, later)), ["MpsUnavailable"]);
        node.record_mps_view(daemon_view(false, unproven, enforcement));
        let actions = node.reconcile(&mut table, later);
        let note = recovery_note(&actions);
        assert!(note.contains(expected), "{note}");
        let is_known = !unproven && enforcement == Enforcement::Hard;
        assert_eq!(note.contains("with all limits"), is_known, "{note}");
    }
}

#[test]
fn consent_to_advisory_limits_applies_while_shares_are_in_use() {
    let start = Instant::now();
    let later = start + 2 * ALLOCATION_GRACE;
    let (mut node, mut table, desired) = serving_node(start);
    table.allocations.insert(allocation(&["GPU-a::1"]), start);
    node.record_pod_resources(Ok(vec![container_devices("p", &["GPU-a::1"])]), later, &mut table.allocations);
    node.record_mps_view(advisory_view(DaemonState::BackOff, &desired));
    assert_eq!(count_healthy(&node.reconcile(&mut table, later)), 0);
    node.record_gpu_node(advisory_spec());
    let desired = node.reconcile(&mut table, later).desired;
    assert!(desired.daemons["GPU-a"].accept_advisory);
    node.record_mps_view(advisory_view(DaemonState::Active, &desired));
    let actions = node.reconcile(&mut table, later);
    assert_eq!((count_healthy(&actions), actions.status.gpus[0].mps[0].door.as_str()), (10, "Advisory"));
    let advisory = Some(("False".into(), "AdvisoryLimits".into()));
    assert_eq!(condition(&actions, CONDITION_LIMITS_ENFORCED), advisory);
    assert_eq!(condition(&actions, CONDITION_READY), Some(("True".into(), "Serving".into())));
    // A spec without consent to advisory limits also takes effect at once, although the pod still
    // uses its share.
    node.record_gpu_node(spec_object(10));
    assert_eq!(count_healthy(&node.reconcile(&mut table, later)), 0);
}

#[test]
fn a_failed_start_causes_an_event_and_a_normal_start_does_not() {
    let start = Instant::now();
    let (mut node, mut table) = start_node(None, None, start);
    node.record_inventory(inventory(), start);
    node.record_gpu_node(spec_object(10));
    let desired = node.reconcile(&mut table, start).desired;
    for state in [DaemonState::Stopping, DaemonState::Starting] {
        node.record_mps_view(mps_host_view(state, 0, &desired));
        assert!(event_reasons(&node.reconcile(&mut table, start)).is_empty());
    }
    node.record_mps_view(mps_host_view(DaemonState::BackOff, 0, &desired));
    assert_eq!(event_reasons(&node.reconcile(&mut table, start)), ["MpsUnavailable"]);
    node.record_mps_view(mps_host_view(DaemonState::Active, 3, &desired));
    assert_eq!(event_reasons(&node.reconcile(&mut table, start)), ["Recovered"]);
}

#[test]
fn a_new_agent_reports_slices_that_may_be_in_use_as_in_use() {
    let start = Instant::now();
    let (mut first, mut table, _) = serving_node(start);
    table.allocations.insert(allocation(&["GPU-a::1"]), start);
    let checkpoint = first.reconcile(&mut table, start).checkpoint;
    for (checkpoint, pending) in [(Some(checkpoint), 1), (None, 10)] {
        let (mut next, mut table) = start_node(checkpoint, None, start);
        next.record_inventory(inventory(), start);
        next.record_gpu_node(spec_object(10));
        let in_use = |actions: Actions| actions.status.gpus[0].slices[0].in_use;
        assert_eq!(in_use(next.reconcile(&mut table, start)), pending);
        next.record_pod_resources(Err("it starts".into()), start, &mut table.allocations);
        assert_eq!(in_use(next.reconcile(&mut table, start)), pending);
        next.record_pod_resources(Ok(vec![container_devices("p", &["GPU-a::1"])]), start, &mut table.allocations);
        assert_eq!(in_use(next.reconcile(&mut table, start)), 1);
    }
}

#[test]
fn slices_in_the_kubelets_checkpoint_are_in_use() {
    let start = Instant::now();
    let (mut node, mut table, _) = serving_node(start);
    let later = start + 2 * ALLOCATION_GRACE;
    table.allocations.insert(allocation(&["GPU-a::1"]), start);
    node.record_pod_resources(Ok(vec![container_devices("p", &["GPU-a::1"])]), later, &mut table.allocations);
    let in_use = |actions: &Actions| actions.status.gpus[0].slices[0].in_use;
    assert_eq!(in_use(&node.reconcile(&mut table, later)), 1);
    node.record_kubelet_checkpoint(Some(Arc::new([(MPS_RESOURCE.to_owned(), "GPU-a::1".to_owned())].into())));
    assert_eq!(node.record_pod_resources(Ok(vec![]), later, &mut table.allocations), 0);
    let actions = node.reconcile(&mut table, later);
    assert_eq!((in_use(&actions), actions.resend), (1, BTreeSet::from([MPS_RESOURCE.to_owned()])));
    assert!(node.reconcile(&mut table, later).resend.is_empty(), "once for each list");
    node.record_kubelet_checkpoint(Some(Arc::default()));
    assert_eq!(node.record_pod_resources(Ok(vec![]), later, &mut table.allocations), 1);
    let actions = node.reconcile(&mut table, later);
    assert_eq!((in_use(&actions), actions.resend), (0, BTreeSet::new()));
}

#[test]
fn allocations_end_if_a_new_kubelet_removed_them_from_its_checkpoint() {
    let start = Instant::now();
    let (mut node, mut table, _) = serving_node(start);
    let later = start + 2 * ALLOCATION_GRACE;
    for id in ["GPU-a::1", "GPU-a::2"] {
        table.allocations.insert(allocation(&[id]), start);
    }
    let both = [container_devices("p", &["GPU-a::1"]), container_devices("q", &["GPU-a::2"])];
    node.record_pod_resources(Ok(both.to_vec()), later, &mut table.allocations);
    node.record_kubelet_start(later);
    let slice = |id: &str| (MPS_RESOURCE.to_owned(), id.to_owned());
    node.record_kubelet_checkpoint(Some(Arc::new([slice("GPU-a::1"), slice("GPU-a::2")].into())));
    assert_eq!(node.record_pod_resources(Ok(vec![]), later, &mut table.allocations), 0);
    let actions = node.reconcile(&mut table, later);
    assert_eq!(actions.status.gpus[0].allocations.len(), 2, "the kubelet does not know its pods yet");
    assert_eq!(actions.resend.len(), 1);
    node.record_kubelet_checkpoint(Some(Arc::new([slice("GPU-a::2")].into())));
    assert_eq!(node.record_pod_resources(Ok(vec![both[1].clone()]), later, &mut table.allocations), 1);
    let gpu = &node.reconcile(&mut table, later).status.gpus[0];
    assert_eq!((gpu.slices[0].in_use, gpu.allocations.len()), (1, 1));
}

#[test]
fn an_allocation_does_not_end_if_the_list_of_a_new_kubelet_lacks_its_pod() {
    let start = Instant::now();
    let (mut node, mut table, _) = serving_node(start);
    let later = start + 2 * ALLOCATION_GRACE;
    node.record_pod_resources(Ok(vec![container_devices("p", &["GPU-a::1"])]), later, &mut table.allocations);
    table.allocations.insert(allocation(&["GPU-a::1"]), start);
    node.record_kubelet_start(later);
    assert_eq!(node.record_pod_resources(Ok(vec![]), later + ALLOCATION_GRACE / 2, &mut table.allocations), 0);
    node.record_gpu_node(spec_object(5));
    let actions = node.reconcile(&mut table, later + ALLOCATION_GRACE / 2);
    assert_eq!(actions.lists.values().flatten().count(), 10, "{:?}", actions.status.steps);
    assert_eq!(actions.list_interval, LIST_INTERVAL_WHILE_IN_USE);
    assert_eq!(node.record_pod_resources(Ok(vec![]), later + ALLOCATION_GRACE, &mut table.allocations), 1);
    node.reconcile(&mut table, later + ALLOCATION_GRACE);
    assert_eq!(
        node.reconcile(&mut table, later + ALLOCATION_GRACE + REMOVAL_DELAY).lists.values().flatten().count(),
        5
    );
}

#[test]
fn slices_are_unhealthy_before_their_removal_and_are_kept_if_allocated_meanwhile() {
    let start = Instant::now();
    let (mut node, mut table, _) = serving_node(start);
    node.record_pod_resources(Ok(vec![]), start + ALLOCATION_GRACE, &mut table.allocations);
    node.record_gpu_node(spec_object(5));
    let withdrawn = node.reconcile(&mut table, start);
    assert_eq!((withdrawn.lists.values().flatten().count(), count_healthy(&withdrawn)), (10, 0));
    assert_eq!(withdrawn.wake_after, Some(REMOVAL_DELAY));
    assert!(withdrawn.status.plan_id.is_empty());
    table.allocations.insert(allocation(&["GPU-a::1"]), start);
    let blocked = node.reconcile(&mut table, start + REMOVAL_DELAY);
    assert_eq!((blocked.lists.values().flatten().count(), count_healthy(&blocked), blocked.wake_after), (10, 10, None));
    assert_eq!(blocked.status.steps[0].result, "Waiting");
    table.allocations = Allocations::default();
    assert_eq!(count_healthy(&node.reconcile(&mut table, start + 2 * REMOVAL_DELAY)), 0, "listed as unhealthy again");
    node.record_gpu_node(spec_object(10));
    let back = node.reconcile(&mut table, start + 3 * REMOVAL_DELAY);
    assert_eq!((count_healthy(&back), back.status.plan_id.as_str()), (10, "p10"));
}

#[test]
fn an_error_of_the_kubelet_ends_no_allocation() {
    let start = Instant::now();
    let (mut node, mut table, _) = serving_node(start);
    table.allocations.insert(allocation(&["GPU-a::1"]), start);
    let later = start + 2 * ALLOCATION_GRACE;
    assert_eq!(node.record_pod_resources(Err("no".into()), later, &mut table.allocations), 0);
    node.record_gpu_node(spec_object(5));
    let actions = node.reconcile(&mut table, later);
    assert_eq!(actions.lists.values().flatten().count(), 10);
    assert!(actions.status.conditions.iter().any(|condition| condition.message.contains("no")));
    assert!(!actions.sweep_directories);
}

#[test]
fn slices_of_the_checkpoint_are_served_before_other_inputs_answer() {
    let start = Instant::now();
    let (mut first, mut table, desired) = serving_node(start);
    table.allocations.insert(allocation(&["GPU-a::1"]), start);
    let left = first.reconcile(&mut table, start).checkpoint;
    let (mut second, mut table) = start_node(Some(left.clone()), None, start);
    second.record_mps_view(mps_host_view(DaemonState::Active, 0, &desired));
    let actions = second.reconcile(&mut table, start);
    assert_eq!(count_healthy(&actions), 10);
    assert_eq!(actions.checkpoint, left);
    assert_eq!(actions.not_ready.as_deref(), Some("NVML has not answered yet"));
    assert!(actions.status.plan_id.is_empty(), "not before NVML has answered");
}

#[test]
fn without_a_checkpoint_earlier_daemons_and_allocations_are_kept_while_in_use() {
    let start = Instant::now();
    let (mut first, mut table, _) = serving_node(start);
    let limits = MpsLimits { threads: Some(20), memory_mib: Some(5), max_clients: None };
    table.allocations.insert(Allocation { mps: Some(limits), ..allocation(&["GPU-a::0", "GPU-a::1"]) }, start);
    let desired = first.reconcile(&mut table, start).desired;

    let (mut second, mut table) = start_node(None, Some(desired.clone()), start);
    assert_eq!(second.reconcile(&mut table, start).desired, desired, "before any input");
    second.record_inventory(inventory(), start);
    second.record_gpu_node(GpuNodeState::Present(9, GpuNodeSpec { plan_id: "other".into(), ..GpuNodeSpec::default() }));
    second.record_pod_resources(
        Ok(vec![container_devices("p", &["GPU-a::1", "GPU-a::0"])]),
        start,
        &mut table.allocations,
    );
    let actions = second.reconcile(&mut table, start);
    assert_eq!(actions.desired, desired, "in use");
    let row = &actions.status.gpus[0].allocations[0];
    assert_eq!((row.sms, row.memory_mib, row.context_mib), (Some(26), Some(5), Some(123)));
    assert_eq!(actions.status.steps[0].message, "in use by ns/p");
    second.record_pod_resources(Ok(vec![]), start + ALLOCATION_GRACE, &mut table.allocations);
    let actions = second.reconcile(&mut table, start + ALLOCATION_GRACE);
    assert!(actions.desired.daemons.is_empty() && actions.desired.allocations.is_empty());
    assert!(actions.sweep_directories);
}

#[test]
fn an_unplanned_spec_counts_as_no_spec_and_a_malformed_spec_does_not_replace_the_last_spec() {
    let start = Instant::now();
    let (mut node, mut table) = start_node(None, None, start);
    node.record_inventory(inventory(), start);
    node.record_gpu_node(GpuNodeState::Present(1, GpuNodeSpec::default()));
    let actions = node.reconcile(&mut table, start);
    assert!(actions.lists.is_empty(), "no whole GPU for a moment");
    assert_eq!(actions.status.observed_generation, 1);
    node.record_gpu_node(spec_object(10));
    node.reconcile(&mut table, start);
    node.record_gpu_node(GpuNodeState::Malformed("units: what?".into()));
    let actions = node.reconcile(&mut table, start);
    assert_eq!(actions.lists.values().flatten().count(), 10);
    let applied = actions.status.conditions.iter().find(|condition| condition.type_ == "Applied").unwrap();
    assert_eq!((applied.reason.as_str(), applied.status.as_str()), ("Malformed", "False"));
    node.record_gpu_node(GpuNodeState::Missing);
    assert_eq!(node.reconcile(&mut table, start).lists.values().flatten().count(), 10);
}

#[test]
fn a_missing_gpu_remains_in_the_status_until_the_spec_forgets_it() {
    let start = Instant::now();
    let two = || {
        let gpus = BTreeMap::from([(0, Ok(gpu("GPU-a", 0))), (1, Ok(gpu("GPU-b", 1)))]);
        Ok(Inventory { driver: "580".into(), gpus, processes: BTreeMap::new() })
    };
    let spec = |generation, forgotten: Option<Time>| {
        let gpus = vec![mps_spec("GPU-a", 10), GpuSpec { forgotten, ..mps_spec("GPU-b", 10) }];
        GpuNodeState::Present(generation, GpuNodeSpec { plan_id: "p".into(), gpus })
    };
    let present = |actions: &Actions| condition(actions, CONDITION_GPUS_PRESENT).unwrap();
    let (mut node, mut table) = start_node(None, None, start);
    node.set_time(start, Timestamp::from_second(1000).unwrap());
    node.record_inventory(two(), start);
    node.record_gpu_node(spec(1, None));
    let actions = node.reconcile(&mut table, start);
    assert_eq!(present(&actions), ("True".into(), "AllPresent".into()));
    assert_eq!(actions.desired.daemons.len(), 2);

    // After the next boot, the node has one GPU fewer.
    let checkpoint = Checkpoint { boot_id: "earlier".into(), ..actions.checkpoint };
    let (mut node, mut table) = start_node(Some(checkpoint), None, start);
    node.set_time(start, Timestamp::from_second(2000).unwrap());
    node.record_inventory(inventory(), start);
    let actions = node.reconcile(&mut table, start);
    assert_eq!(present(&actions), ("False".into(), "GpuMissing".into()));
    assert_eq!(event_reasons(&actions), ["GpuMissing"]);
    let GpuNodeStatus { gpus, expected_gpus, .. } = &actions.status;
    assert_eq!((gpus.len(), *expected_gpus), (2, 2));
    assert_eq!((gpus[1].uuid.as_str(), gpus[1].health.reason.as_str()), ("GPU-b", "GpuMissing"));
    assert_eq!(gpus[1].health.since.as_ref().unwrap().0, Timestamp::from_second(2000).unwrap());
    assert_eq!(actions.desired.daemons.keys().collect::<Vec<_>>(), ["GPU-a"], "no daemon can start on it");
    assert_eq!(actions.lists.values().flatten().count(), 20, "its shares are listed and Unhealthy");

    let forgets = |at| spec(2, Some(Time(Timestamp::from_second(at).unwrap())));
    node.record_gpu_node(forgets(1999));
    assert_eq!(node.reconcile(&mut table, start).status.gpus.len(), 2, "the request is about an earlier absence");
    node.record_gpu_node(forgets(2000));
    let actions = node.reconcile(&mut table, start);
    assert_eq!(event_reasons(&actions), ["GpuForgotten"]);
    assert_eq!((actions.status.gpus.len(), actions.status.expected_gpus), (1, 1));
    assert_eq!(present(&actions), ("True".into(), "AllPresent".into()));
    assert_eq!(actions.lists.values().flatten().count(), 10);
    assert_eq!(actions.checkpoint.gpus.len(), 1);
    node.record_inventory(two(), start);
    assert_eq!(node.reconcile(&mut table, start).status.gpus.len(), 2, "a GPU that returns is served again");
}
