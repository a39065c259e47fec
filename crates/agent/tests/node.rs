//! Tests the agent's process with a fake kubelet, the real MPS host, simulated GPUs and simulated
//! MPS.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails with a panic")]
mod bad_gpu;
mod exhaustion;
mod faults;
mod hand_over;
mod health;
mod machine;
mod mig;
mod quiesce;
mod sensors;
mod tenants;
mod termination;

use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use machine::{
    MPS_RESOURCE, Machine, TEST_TIMEOUT, TIMESLICE_RESOURCE, WHOLE_GPU_RESOURCE, container_devices, kill_pid, mps_spec,
    pod, share_ids, signal_pid, timeslice_spec,
};

#[tokio::test]
async fn a_node_serves_whole_gpus_shares_and_replicas_and_enforces_the_limits_of_shares() {
    let machine = Machine::start(&["3xH200"], |gpus| vec![mps_spec(&gpus[0], 10), timeslice_spec(&gpus[1], 4)]);
    let [first, second, third] = [0, 1, 2].map(|gpu| machine.uuids[gpu].clone());
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 1).await;

    let chosen = machine
        .kubelet
        .preferred_allocation(
            MPS_RESOURCE,
            &share_ids(&first, 0..10).iter().map(String::as_str).collect::<Vec<_>>(),
            &[],
            3,
        )
        .await
        .unwrap();
    assert_eq!(chosen, share_ids(&first, 0..3));
    let given =
        machine.kubelet.allocate(MPS_RESOURCE, &chosen.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &chosen.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
    let seen = machine.run_client(&given, &[]);
    assert_eq!(
        (seen["viaMps"].as_bool(), seen["sms"].as_u64(), seen["limitMiB"].as_u64()),
        (Some(true), Some(38), Some(3000)),
        "{seen}"
    );
    assert_eq!(seen["uuid"], first);

    let replica = machine.kubelet.allocate(TIMESLICE_RESOURCE, &[&format!("{second}::1")]).await.unwrap();
    assert_eq!(replica.envs.get("NVIDIA_VISIBLE_DEVICES"), Some(&second));
    assert!(replica.mounts.is_empty() && !replica.envs.contains_key("CUDA_MPS_PIPE_DIRECTORY"));
    let whole = machine.kubelet.allocate(WHOLE_GPU_RESOURCE, &[&format!("{third}::0")]).await.unwrap();
    assert_eq!(machine.run_client(&whole, &[])["sms"].as_u64(), Some(132));

    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, &chosen)]);
    let status =
        machine.wait_for_status("the pod", |status| status.gpus.iter().any(|gpu| !gpu.allocations.is_empty())).await;
    let gpu = &status.gpus[0];
    assert_eq!(
        (gpu.allocations[0].pod.as_str(), gpu.allocations[0].sms, gpu.allocations[0].memory_mib),
        ("ns/p", Some(38), Some(3000))
    );
    assert_eq!(gpu.slices[0].total, 10);
    assert_eq!(status.gpus.iter().map(|gpu| gpu.mode.as_str()).collect::<Vec<_>>(), ["Mps", "TimeSlicing", "Whole"]);
}

#[tokio::test]
async fn an_invalid_allocation_is_refused_with_a_reason_and_does_not_block_a_valid_one() {
    let machine = Machine::start(&["2xH200"], |gpus| vec![mps_spec(&gpus[0], 4), mps_spec(&gpus[1], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
    let [a, b] = [0, 1].map(|gpu| format!("{}::0", machine.uuids[gpu]));
    for (ids, expected) in [
        (vec![a.as_str(), b.as_str()], "cannot come from 2 GPUs"),
        (vec![a.as_str(), a.as_str()], "is requested twice"),
        (vec!["GPU-none::0"], "is not a device of"),
        (vec![], "at least one"),
    ] {
        let refusal = machine.kubelet.allocate(MPS_RESOURCE, &ids).await.unwrap_err();
        assert!(refusal.message().contains(expected), "{refusal:?}");
    }
    machine.kubelet.allocate(MPS_RESOURCE, &[&a]).await.unwrap();
    machine.wait_until("the Event is published", || (machine.events() == ["SharesSplit"]).then_some(())).await;
}

#[tokio::test]
async fn whole_gpus_are_chosen_by_the_nvlinks_that_nvml_reports() {
    let mut machine = Machine::new(&["8xH100-80"]);
    machine.simgpu(&["init", "--gpus", "8xH100-80", "--topology", "hybrid-cube-mesh"]);
    machine.set_spec("first", Vec::new());
    machine.start_mps_host();
    machine.start_agent(&[]);
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 8).await;
    let id = |gpu: usize| format!("{}::0", machine.uuids[gpu]);
    // Two NVLinks connect each expected pair. A choice in the order of UUIDs would return different
    // pairs in some of these cases.
    for (available, expected) in [([0, 1, 4], [0, 4]), ([0, 1, 3], [0, 3]), ([5, 6, 7], [6, 7]), ([1, 5, 7], [1, 5])] {
        let available = available.map(id);
        let available = available.each_ref().map(String::as_str);
        let deadline = Instant::now() + TEST_TIMEOUT;
        // The agent serves the GPUs before it has read their links, so the first answers may ignore
        // the links.
        loop {
            let chosen = machine.kubelet.preferred_allocation(WHOLE_GPU_RESOURCE, &available, &[], 2).await.unwrap();
            if chosen == expected.map(id) {
                break;
            }
            assert!(Instant::now() < deadline, "{chosen:?} of {available:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn the_preferred_allocation_is_on_the_reserved_gpu_even_if_the_agent_sees_the_pod_late() {
    let mut machine = Machine::new(&["2xH200"]);
    let [first, second] = [0, 1].map(|gpu| machine.uuids[gpu].clone());
    machine.set_spec("first", vec![mps_spec(&first, 10), mps_spec(&second, 10)]);
    machine.set_pods(&[]);
    machine.start_mps_host();
    machine.start_agent(&[]);
    machine.wait_for_healthy(MPS_RESOURCE, 20).await;
    let all = [share_ids(&first, 0..10), share_ids(&second, 0..10)].concat();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let (preferred, ()) = tokio::join!(machine.kubelet.preferred_allocation(MPS_RESOURCE, &all, &[], 3), async {
        machine.set_pods(&[pod("a", 3, &second), pod("b", 4, &first), pod("c", 3, &first)]);
    });
    let preferred = preferred.unwrap();
    let device = |ids: &[String]| ids[0].split("::").next().unwrap().to_owned();
    machine.kubelet.allocate(MPS_RESOURCE, &preferred.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
    let free: Vec<&str> = all.iter().copied().filter(|id| !preferred.iter().any(|taken| taken == id)).collect();
    let other = machine.kubelet.preferred_allocation(MPS_RESOURCE, &free, &[], 3).await.unwrap();
    assert_eq!(
        [device(&preferred), device(&other)].into_iter().collect::<std::collections::BTreeSet<_>>(),
        [first.clone(), second.clone()].into(),
        "each of the two requests for three shares is preferred on a different one of the two reserved GPUs"
    );
    let four = machine.kubelet.preferred_allocation(MPS_RESOURCE, &free, &[], 4).await.unwrap();
    assert_eq!(device(&four), first);
    // No pod requests nine shares, but the kubelet must receive an answer to this call too.
    let nine = machine.kubelet.preferred_allocation(MPS_RESOURCE, &all, &[], 9).await.unwrap();
    assert_eq!(nine.len(), 9);
}

#[tokio::test]
async fn an_idle_gpu_is_repartitioned_without_a_new_registration_and_one_in_use_waits_for_its_pod() {
    let machine = Machine::start(&["2xH200"], |gpus| vec![mps_spec(&gpus[0], 10), mps_spec(&gpus[1], 10)]);
    let before = machine.wait_for_healthy(MPS_RESOURCE, 20).await;
    let used = share_ids(&machine.uuids[0], [7]);
    machine.kubelet.allocate(MPS_RESOURCE, &[&used[0]]).await.unwrap();
    machine.pods.set_devices(&[container_devices("train", MPS_RESOURCE, &used)]);
    machine.set_spec("second", vec![mps_spec(&machine.uuids[0], 5), mps_spec(&machine.uuids[1], 5)]);
    machine.wait_for_healthy(MPS_RESOURCE, 15).await;
    let status = machine
        .wait_for_status("a step waits for the pod", |status| {
            status.steps.iter().any(|step| step.message.contains("ns/train"))
        })
        .await;
    assert_eq!(status.plan_id, "", "the plan is not applied");
    assert_eq!(status.steps.iter().find(|step| step.gpu == machine.uuids[0]).unwrap().result, "Waiting");
    machine.pods.set_devices(&[]);
    let after = machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    machine.wait_for_status("applied", |status| status.plan_id == "second").await;
    assert_eq!(after.registrations.len(), before.registrations.len(), "the agent did not register the resource again");
    // The new plan has only whole GPUs. The stream of the removed resource ends, and the stream of
    // the new resource starts.
    machine.set_spec("third", vec![]);
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 2).await;
    machine
        .wait_for_view("the shares disappear", |seen| {
            seen.endpoints.get(MPS_RESOURCE).is_none_or(|endpoint| !endpoint.connected)
        })
        .await;
    machine.wait_until("the daemons exit", || machine.mps_host_status()?.daemons.is_empty().then_some(())).await;
    let show = machine.simgpu(&["show"]);
    assert!(!show.contains("Exclusive"), "the compute mode was restored: {show}");
}

#[tokio::test]
async fn a_restarted_agent_keeps_ids_allocations_and_daemons() {
    let mut machine = Machine::start(&["H200"], |gpus| vec![mps_spec(&gpus[0], 10)]);
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    let uuid = machine.uuids[0].clone();
    let used = share_ids(&uuid, [2, 3]);
    let wanted: Vec<&str> = used.iter().map(String::as_str).collect();
    machine.kubelet.allocate(MPS_RESOURCE, &wanted).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &wanted).await.unwrap();
    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, &used)]);
    let daemon = machine.mps_host_status().unwrap().daemons[&uuid].pid;
    let desired = machine.read_desired_file().unwrap();
    machine
        .wait_until("the checkpoint is written", || {
            fs::read_to_string(machine.path("state/agent.json")).ok()?.contains(&used[0]).then_some(())
        })
        .await;

    for checkpoint_state in ["intact", "damaged", "of a newer version", "missing"] {
        machine.kill_agent();
        machine.wait_for_view("the stream ends", |seen| !seen.endpoints[MPS_RESOURCE].connected).await;
        let checkpoint = machine.path("state/agent.json");
        match checkpoint_state {
            "damaged" => fs::write(&checkpoint, "{\"version\":1,").unwrap(),
            "of a newer version" => fs::write(&checkpoint, "{\"version\":99}").unwrap(),
            "missing" => fs::remove_file(&checkpoint).unwrap(),
            _ => {}
        }
        // Simulate an API server that does not answer at first: the agent starts without a spec,
        // which arrives later.
        fs::rename(machine.path("spec/spec.json"), machine.path("spec/kept.json")).unwrap();
        machine.start_agent(&[]);
        if checkpoint_state == "intact" {
            let seen = machine
                .wait_for_view(checkpoint_state, |seen| {
                    seen.endpoints[MPS_RESOURCE].connected && !seen.endpoints[MPS_RESOURCE].devices.is_empty()
                })
                .await;
            assert_eq!(seen.endpoints[MPS_RESOURCE].healthy_ids().len(), 10, "all shares stay healthy");
        }
        fs::rename(machine.path("spec/kept.json"), machine.path("spec/spec.json")).unwrap();
        machine.wait_for_view(checkpoint_state, |seen| seen.endpoints[MPS_RESOURCE].connected).await;
        machine.wait_for_healthy(MPS_RESOURCE, 10).await;
        machine
            .wait_for_status(checkpoint_state, |status| {
                status.gpus[0].allocations.first().is_some_and(|row| row.memory_mib == Some(2000))
            })
            .await;
        assert_eq!(machine.read_desired_file().unwrap(), desired, "{checkpoint_state}");
        assert_eq!(
            machine.mps_host_status().unwrap().daemons[&uuid].pid,
            daemon,
            "{checkpoint_state}: the daemon was not restarted"
        );
    }
}

#[tokio::test]
async fn after_a_reboot_without_an_api_server_the_last_spec_is_served_and_doors_are_opened_again() {
    let mut machine = Machine::start(&["2xH200"], |gpus| vec![mps_spec(&gpus[0], 10), mps_spec(&gpus[1], 10)]);
    machine.wait_for_healthy(MPS_RESOURCE, 20).await;
    let used = share_ids(&machine.uuids[0], [2, 3]);
    let wanted: Vec<&str> = used.iter().map(String::as_str).collect();
    let given = machine.kubelet.allocate(MPS_RESOURCE, &wanted).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &wanted).await.unwrap();
    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, &used)]);
    machine.simgpu(&["xid", "1", "119"]);
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    let known = |parts: &[&str]| {
        let text = fs::read_to_string(machine.path("state/agent.json")).ok()?;
        parts.iter().all(|part| text.contains(part)).then_some(())
    };
    machine.wait_until("the checkpoint is written", || known(&[&used[0], "\"xid\":119"])).await;
    let desired = machine.read_desired_file().unwrap();

    machine.reboot();
    machine.wait_for_view("the stream ends", |seen| !seen.endpoints[MPS_RESOURCE].connected).await;
    machine.start_agent_without_api_server();
    let all = |seen: &cleave_kubelet::fake::FakeKubeletState| {
        let endpoint = &seen.endpoints[MPS_RESOURCE];
        endpoint.connected && endpoint.devices.len() == 20
    };
    machine.wait_for_view("all shares are listed", all).await;
    machine.start_mps_host();
    // All shares become Healthy, because a reboot clears the fault of XID 119.
    machine.wait_for_healthy(MPS_RESOURCE, 20).await;
    assert_eq!(machine.read_desired_file().unwrap(), desired, "the daemons and doors are the same");
    // The kubelet restarts a container with the response to `Allocate` from before the reboot, so
    // the kubelet calls only `PreStartContainer`.
    machine.kubelet.pre_start(MPS_RESOURCE, &wanted).await.unwrap();
    let seen = machine.run_client(&given, &[]);
    assert_eq!(
        (seen["viaMps"].as_bool(), seen["sms"].as_u64(), seen["limitMiB"].as_u64()),
        (Some(true), Some(26), Some(2000)),
        "{seen}"
    );
    let text = fs::read_to_string(machine.path("agent.log")).unwrap();
    assert!(
        text.contains("failed to configure a client for the API server"),
        "the agent logged no failure to reach an API server"
    );
}

#[tokio::test]
async fn the_supervisor_restarts_a_killed_agent() {
    let mut machine = Machine::new(&["H200"]);
    machine.set_spec("first", vec![mps_spec(&machine.uuids[0], 10)]);
    machine.start_mps_host();
    machine.start_supervised_agent();
    for _ in 0..3 {
        let before = machine.wait_for_healthy(MPS_RESOURCE, 10).await.registrations.len();
        let agent = machine.wait_until("the agent's process", || machine.supervised_pid()).await;
        kill_pid(agent);
        let registered = |seen: &cleave_kubelet::fake::FakeKubeletState| {
            seen.registrations.len() > before && seen.endpoints[MPS_RESOURCE].connected
        };
        machine.wait_for_view("the agent registers again", registered).await;
        assert_ne!(machine.supervised_pid(), Some(agent));
    }
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    assert!(machine.stop_agent().success(), "the agent exits without an error on SIGTERM");
}

#[tokio::test]
async fn a_short_absence_of_a_daemon_causes_only_events_and_a_longer_one_makes_shares_unhealthy() {
    let mut machine = Machine::start(&["2xH200"], |gpus| vec![mps_spec(&gpus[0], 4), mps_spec(&gpus[1], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
    let uuid = machine.uuids[0].clone();
    let pid = machine.mps_host_status().unwrap().daemons[&uuid].pid.unwrap();
    let lists = machine.kubelet.state().borrow().endpoints[MPS_RESOURCE].lists;
    // The next daemon needs an additional second to start.
    machine.simgpu(&["hang", "mps:start", "--gpu", &uuid, "--seconds", "1"]);
    kill_pid(pid);
    machine
        .wait_for_status("no daemon runs", |status| status.gpus[0].mps.iter().any(|daemon| daemon.state != "Active"))
        .await;
    let share = share_ids(&uuid, [0]);
    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, &share)]);
    machine.kubelet.allocate(MPS_RESOURCE, &[&share[0]]).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &[&share[0]]).await.unwrap();
    machine
        .wait_until("a new daemon starts", || (machine.mps_host_status()?.daemons[&uuid].pid? != pid).then_some(()))
        .await;
    machine
        .wait_until("the Events are published", || (machine.events() == ["MpsUnavailable", "Recovered"]).then_some(()))
        .await;
    assert_eq!(machine.kubelet.state().borrow().endpoints[MPS_RESOURCE].lists, lists, "the kubelet got no new list");

    machine.kill_mps_host();
    machine.wait_for_healthy(MPS_RESOURCE, 0).await;
    let status = machine.wait_for_status("unhealthy", |status| !status.gpus[0].health.healthy).await;
    assert_eq!(status.gpus[0].health.reason, "MpsUnavailable");
    machine.start_mps_host();
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
}

#[tokio::test]
async fn a_hanging_process_of_the_mps_host_makes_only_the_shares_of_its_gpu_unhealthy() {
    let machine = Machine::start(&["2xH200"], |gpus| vec![mps_spec(&gpus[0], 4), mps_spec(&gpus[1], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
    let pids = |machine: &Machine| {
        let daemons = machine.mps_host_status().unwrap().daemons;
        [&machine.uuids[0], &machine.uuids[1]].map(|uuid| daemons[uuid].pid)
    };
    let before = pids(&machine);
    let process = machine.device_process(&machine.uuids[0]);
    signal_pid(process, rustix::process::Signal::STOP);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    let status = machine.wait_for_status("unhealthy", |status| !status.gpus[0].health.healthy).await;
    let health = &status.gpus[0].health;
    assert_eq!(health.reason, "MpsUnavailable");
    assert!(health.message.contains(&format!("process {process} of the MPS host")), "{}", health.message);
    assert!(status.gpus[1].health.healthy, "{:?}", status.gpus[1].health);
    // The other GPU serves new pods.
    let share = share_ids(&machine.uuids[1], [0]);
    let given = machine.kubelet.allocate(MPS_RESOURCE, &[&share[0]]).await.unwrap();
    machine.kubelet.pre_start(MPS_RESOURCE, &[&share[0]]).await.unwrap();
    assert_eq!(machine.run_client(&given, &[])["uuid"].as_str(), Some(machine.uuids[1].as_str()));
    signal_pid(process, rustix::process::Signal::CONT);
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
    // A killed process affects only the programs of its GPU.
    signal_pid(machine.device_process(&machine.uuids[1]), rustix::process::Signal::KILL);
    machine
        .wait_until("a new daemon starts", || {
            let daemon = machine.mps_host_status()?.daemons.remove(&machine.uuids[1])?;
            (daemon.state == cleave_gpu::mps::wire::DaemonState::Active && daemon.restarts == 1).then_some(())
        })
        .await;
    machine.wait_for_healthy(MPS_RESOURCE, 8).await;
    let after = pids(&machine);
    assert_eq!(after[0], before[0]);
    assert_ne!(after[1], before[1]);
}

#[tokio::test]
async fn a_container_starts_only_after_its_door_is_open() {
    let mut machine = Machine::start(&["H200"], |gpus| vec![mps_spec(&gpus[0], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    machine.kill_mps_host();
    let id = format!("{}::0", machine.uuids[0]);
    machine.kubelet.allocate(MPS_RESOURCE, &[&id]).await.unwrap();
    let allocation = machine
        .wait_until("the allocation is recorded", || machine.read_desired_file()?.allocations.keys().next().cloned())
        .await;
    let ids = [id.as_str()];
    let mut start = Box::pin(machine.kubelet.pre_start(MPS_RESOURCE, &ids));
    let door = machine.path("run/alloc").join(&allocation).join("control");
    tokio::select! {
        early = &mut start => panic!("PreStartContainer returned without an MPS host: {early:?}"),
        () = machine.wait_until("the directory exists", || door.parent()?.is_dir().then_some(())) => {}
    }
    drop(start);
    machine.start_mps_host();
    machine.kubelet.pre_start(MPS_RESOURCE, &[&id]).await.unwrap();
    assert!(door.exists());
}

#[tokio::test]
async fn an_allocation_without_a_pod_is_removed_with_its_directory() {
    let machine = Machine::start(&["H200"], |gpus| vec![mps_spec(&gpus[0], 4)]);
    machine.wait_for_healthy(MPS_RESOURCE, 4).await;
    let [kept, removed] = [0, 1].map(|n| format!("{}::{n}", machine.uuids[0]));
    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, std::slice::from_ref(&kept))]);
    for id in [&kept, &removed] {
        machine.kubelet.allocate(MPS_RESOURCE, &[id]).await.unwrap();
        machine.kubelet.pre_start(MPS_RESOURCE, &[id]).await.unwrap();
    }
    let directories = || Some(fs::read_dir(machine.path("run/alloc")).ok()?.count());
    assert_eq!(directories(), Some(2));
    machine.wait_until("exactly one directory exists", || (directories()? == 1).then_some(())).await;
    assert_eq!(machine.read_desired_file().unwrap().allocations.len(), 1);
    machine.kubelet.pre_start(MPS_RESOURCE, &[&kept]).await.unwrap();
}

#[tokio::test]
async fn a_lost_gpu_does_not_affect_other_gpus_and_recovers() {
    let machine = Machine::start(&["3xH200"], |gpus| vec![timeslice_spec(&gpus[1], 4)]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 2).await;
    machine.simgpu(&["lose", "1"]);
    machine.simgpu(&["xid", "1", "79"]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 0).await;
    let status = machine.wait_for_status("lost", |status| !status.gpus[1].health.healthy).await;
    assert!(status.gpus[0].health.healthy && status.gpus[2].health.healthy);
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 2).await;
    machine.kubelet.allocate(WHOLE_GPU_RESOURCE, &[&format!("{}::0", machine.uuids[2])]).await.unwrap();
    machine.simgpu(&["restore", "1"]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    machine
        .wait_until("the Events are published", || (machine.events() == ["GpuUnhealthy", "Recovered"]).then_some(()))
        .await;
}

#[tokio::test]
async fn an_xid_caused_by_a_program_is_ignored_and_one_caused_by_the_gpu_makes_all_its_slices_unhealthy() {
    let machine = Machine::start(&["2xH200"], |gpus| vec![timeslice_spec(&gpus[0], 4), timeslice_spec(&gpus[1], 4)]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 8).await;
    machine.simgpu(&["xid", "0", "13"]);
    machine.simgpu(&["xid", "1", "48"]);
    let seen = machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    assert!(
        seen.endpoints[TIMESLICE_RESOURCE].healthy_ids().iter().all(|id| id.starts_with(machine.uuids[0].as_str()))
    );
    let status = machine.wait_for_status("the XID", |status| status.gpus[1].health.reason == "ResetRequired").await;
    assert!(status.gpus[1].health.message.contains("XID 48"));
}

#[tokio::test]
async fn a_hanging_driver_does_not_block_allocations() {
    let machine = Machine::start(&["H200"], |gpus| vec![timeslice_spec(&gpus[0], 4)]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
    machine.simgpu(&["hang", "nvmlDeviceGetCount", "--seconds", "3600"]);
    machine.simgpu(&["xid", "0", "13"]);
    let id = format!("{}::0", machine.uuids[0]);
    machine.kubelet.allocate(TIMESLICE_RESOURCE, &[&id]).await.unwrap();
    machine.kubelet.pre_start(TIMESLICE_RESOURCE, &[&id]).await.unwrap();
    let status = machine.wait_for_status("the driver hangs", |status| !status.gpus[0].health.healthy).await;
    assert_eq!(status.gpus[0].health.reason, "DriverUnavailable");
    assert!(
        status
            .conditions
            .iter()
            .any(|condition| condition.reason == "NoDriver" && condition.message.contains("NVML did not answer"))
    );
    machine.simgpu(&["clear"]);
    machine.wait_for_healthy(TIMESLICE_RESOURCE, 4).await;
}

#[tokio::test]
async fn without_a_driver_the_agent_waits_until_one_is_installed() {
    let mut machine = Machine::new(&["H200"]);
    machine.set_spec("first", vec![]);
    let later = machine.path("libnvidia-ml.so.1");
    let library = machine.replace_library(later.clone());
    machine.start_agent(&[]);
    let ready = |status: &cleave_api::GpuNodeStatus| {
        status.conditions.iter().find(|c| c.type_ == "Ready").unwrap().reason.clone()
    };
    let status = machine.wait_for_status("no driver", |status| ready(status) == "NoDriver").await;
    assert!(status.conditions[0].message.contains(later.to_str().unwrap()));
    symlink(library, later).unwrap();
    machine.wait_for_healthy(WHOLE_GPU_RESOURCE, 1).await;
    machine.wait_for_status("serving", |status| ready(status) == "Serving").await;
    assert!(machine.agent_is_running());
}

#[tokio::test]
async fn on_sigterm_the_agent_exits_without_an_error() {
    let mut machine = Machine::start(&["1xH200"], |gpus| vec![mps_spec(&gpus[0], 10)]);
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    let status = machine.stop_agent();
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn a_driver_that_finds_no_gpu_is_reported_in_a_condition() {
    let mut machine = Machine::new(&[]);
    machine.set_spec("first", vec![]);
    machine.start_agent(&[]);
    machine
        .wait_for_status("no GPU", |status| status.conditions.iter().any(|condition| condition.reason == "NoGpu"))
        .await;
    assert!(machine.agent_is_running());
}
