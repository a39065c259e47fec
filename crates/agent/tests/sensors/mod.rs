//! Tests the metrics of GPUs and shares that an agent serves.
use serde_json::Value;

use crate::machine::{MPS_RESOURCE, Machine, container_devices, mps_spec, share_ids};

#[tokio::test]
async fn metrics_report_the_sensors_of_each_gpu_and_the_shares_of_each_container() {
    let machine = Machine::start(&["2xH200"], |gpus| vec![mps_spec(&gpus[0], 10)]);
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    let [first, second] = [0, 1].map(|gpu| format!("node=\"node\",gpu=\"{gpu}\",uuid=\"{}\"", machine.uuids[gpu]));
    machine.simgpu(&["set", "0", "utilization=75", "temperature=61", "throttling=power-cap,hardware-thermal"]);
    let metric = |name: &str, labels: &[&str]| machine.metric(name, labels);
    machine
        .wait_until("the utilization", || metric("cleave_gpu_utilization_ratio", &[&first]).filter(|is| *is > 0.7))
        .await;
    let of_first = |name| metric(name, &[&first]);
    assert_eq!(of_first("cleave_gpu_temperature_celsius"), Some(61.0));
    assert_eq!(of_first("cleave_gpu_sm_clock_hertz"), Some(990e6), "half of the highest clock");
    assert_eq!(of_first("cleave_gpu_power_watts"), Some(543.0));
    let throttled = |reason| metric("cleave_gpu_throttled", &[&first, &format!("reason=\"{reason}\"")]);
    assert_eq!(["power_cap", "hardware_thermal", "sync_boost"].map(throttled), [Some(1.0), Some(1.0), Some(0.0)]);
    assert_eq!(metric("cleave_gpu_throttled", &[&second, "reason=\"power_cap\""]), Some(0.0));

    let ids = share_ids(&machine.uuids[0], 0..3);
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    machine.kubelet.allocate(MPS_RESOURCE, &ids).await.unwrap();
    machine.pods.set_devices(&[container_devices("p", MPS_RESOURCE, &share_ids(&machine.uuids[0], 0..3))]);
    let labels = format!("namespace=\"ns\",pod=\"p\",container=\"c\",gpu=\"0\",uuid=\"{}\"", machine.uuids[0]);
    let seconds = machine.wait_until("share-seconds", || metric("cleave_tenant_share_seconds_total", &[&labels]));
    let seconds = seconds.await;
    assert_eq!(metric("cleave_tenant_shares", &[&labels]), Some(3.0));
    assert_eq!(metric("cleave_tenant_sm_limit", &[&labels]), Some(38.0));
    assert_eq!(of_first("cleave_gpu_sms_allocated"), Some(38.0));
    machine
        .wait_until("more share-seconds", || {
            metric("cleave_tenant_share_seconds_total", &[&labels]).filter(|more| *more > seconds)
        })
        .await;
    machine.pods.set_devices(&[]);
    machine
        .wait_until("the end of the pod's series", || {
            metric("cleave_tenant_shares", &[&labels]).is_none().then_some(())
        })
        .await;
    assert_eq!(metric("cleave_tenant_share_seconds_total", &[&labels]), None);
    let of_namespace = metric("cleave_agent_namespace_share_seconds_total", &["namespace=\"ns\""]);
    assert!(of_namespace.is_some_and(|all| all > seconds), "{of_namespace:?}");
}

#[tokio::test]
async fn a_gpu_whose_sensors_hang_keeps_serving_and_does_not_hide_the_metrics_of_other_gpus() {
    let machine = Machine::start(&["2xH200"], |gpus| vec![mps_spec(&gpus[0], 10), mps_spec(&gpus[1], 10)]);
    machine.wait_for_healthy(MPS_RESOURCE, 20).await;
    machine.simgpu(&["hang", "nvmlDeviceGetPowerUsage", "--gpu", "1"]);
    let up = |gpu: usize| machine.metric("cleave_gpu_up", &[&format!("uuid=\"{}\"", machine.uuids[gpu])]);
    machine.wait_until("a GPU that does not answer", || (up(1) == Some(0.0)).then_some(())).await;
    assert_eq!(up(0), Some(1.0));
    assert_eq!(machine.metric("cleave_gpu_power_watts", &["gpu=\"1\""]), None);
    assert!(machine.metric("cleave_gpu_power_watts", &["gpu=\"0\""]).is_some());
    // A separate thread reads the sensors, so the hang does not delay the poll that follows this
    // XID, and all shares remain Healthy.
    machine.simgpu(&["xid", "0", "13"]);
    machine.wait_for_healthy(MPS_RESOURCE, 20).await;
    machine.simgpu(&["clear"]);
    machine.wait_until("an answer", || (up(1) == Some(1.0)).then_some(())).await;
}

#[tokio::test]
async fn an_agent_does_not_query_sensors_without_scrapes() {
    let machine = Machine::start(&["H200"], |gpus| vec![mps_spec(&gpus[0], 10)]);
    machine.simgpu(&["fail", "nvmlDeviceGetPowerUsage", "--count", "1000"]);
    let remaining = || {
        let shown: Value = serde_json::from_str(&machine.simgpu(&["show", "--output", "json"])).unwrap();
        shown["faults"][0]["remaining"].as_u64().unwrap()
    };
    machine.wait_for_healthy(MPS_RESOURCE, 10).await;
    // An XID makes the agent poll the GPU's health, but not its sensors.
    machine.simgpu(&["xid", "0", "79"]);
    machine.wait_for_healthy(MPS_RESOURCE, 0).await;
    assert_eq!(remaining(), 1000);
    assert!(machine.metric("cleave_gpu_up", &["gpu=\"0\""]).is_some());
    machine.wait_until("a query", || (remaining() == 999).then_some(())).await;
}
