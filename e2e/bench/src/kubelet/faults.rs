//! Measures how a failing GPU appears to the kubelet, with the simulated NVML.
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_kubelet::fake::Endpoint;
use sim_machine::{EventKind, Fault, FaultEffect, Machine};

use super::measure::{allocate_request, count_to_f64, request_preferred, to_milliseconds};
use super::occupancy::gpu_of_id;
use super::process::{Launcher, Plugin, read_load};
use super::report::{BenchmarkReport, Figure};

const CASE_NAME: &str = "faults";

/// `NVML_ERROR_GPU_IS_LOST`.
const NVML_ERROR_GPU_IS_LOST: i32 = 15;

/// Returns the simulated machine of a plugin. Fails if the plugin uses no simulated machine.
fn simulated_machine(plugin: &Plugin) -> Result<&Machine> {
    plugin.machine.as_ref().context("no simulated machine")
}

/// Returns the UUID of the GPU that fails: one in the middle of the list.
fn uuid_of_gpu_to_fail(plugin: &Plugin) -> Result<String> {
    let state = simulated_machine(plugin)?.snapshot()?;
    let found = state.gpus.get(state.gpus.len() / 2).map(|gpu| gpu.uuid.clone());
    found.context("no GPU")
}

/// Returns the number of unhealthy devices of this GPU, and of the other GPUs.
fn count_unhealthy(endpoint: &Endpoint, uuid: &str) -> (usize, usize) {
    let unhealthy = endpoint.devices.iter().filter(|device| !endpoint.connected || device.health != "Healthy");
    let (here, there): (Vec<_>, Vec<_>) = unhealthy.partition(|device| gpu_of_id(&device.id) == uuid);
    (here.len(), there.len())
}

/// Waits until all devices of a GPU are unhealthy. Returns the time since `since`, and the
/// endpoint.
async fn wait_until_unhealthy(plugin: &mut Plugin, uuid: &str, since: Instant) -> Result<(Duration, Endpoint)> {
    let units = plugin.endpoint().devices.iter().filter(|device| gpu_of_id(&device.id) == uuid).count();
    ensure!(units > 0, "no devices of {uuid}");
    let all = |endpoint: &Endpoint| count_unhealthy(endpoint, uuid).0 == units;
    let endpoint = plugin.wait_for_endpoint("the unhealthy GPU", all).await?;
    Ok((since.elapsed(), endpoint))
}

/// Waits until all devices are healthy. Returns the time since `since`, in milliseconds.
async fn wait_until_healthy(plugin: &mut Plugin, since: Instant) -> Result<f64> {
    plugin.wait_until_served().await?;
    Ok(to_milliseconds(since.elapsed()))
}

/// Measures the effect of XID 79 while NVML still answers for the GPU.
pub(super) async fn measure_xid(launcher: &Launcher, report: &mut BenchmarkReport) -> Result<()> {
    let mut plugin = launcher.start().await?;
    let uuid = uuid_of_gpu_to_fail(&plugin)?;
    let since = Instant::now();
    simulated_machine(&plugin)?.change(|state| state.push_event(&uuid, EventKind::Xid, 79, None))?;
    let (took, endpoint) = wait_until_unhealthy(&mut plugin, &uuid, since).await?;
    let (here, there) = count_unhealthy(&endpoint, &uuid);
    report.add(Figure::new(CASE_NAME, "XID 79: its devices unhealthy", count_to_f64(here), "").with_published(1.0));
    report.add(
        Figure::new(CASE_NAME, "XID 79: other devices unhealthy", count_to_f64(there), "")
            .with_published(0.0)
            .with_goal(0.0),
    );
    report.add(Figure::new(CASE_NAME, "XID 79 → unhealthy", to_milliseconds(took), "ms").with_published(4.0));
    plugin.stop().await?;
    Ok(())
}

/// Measures the effect of a GPU that fell off the bus, so that NVML calls about it fail.
pub(super) async fn measure_lost_gpu(launcher: &Launcher, report: &mut BenchmarkReport) -> Result<()> {
    let mut plugin = launcher.start().await?;
    let uuid = uuid_of_gpu_to_fail(&plugin)?;
    let lists = plugin.endpoint().lists;
    let since = Instant::now();
    simulated_machine(&plugin)?.change(|state| {
        if let Ok(gpu) = state.gpu_mut(&uuid) {
            gpu.lost = true;
        }
        state.push_event(&uuid, EventKind::Xid, 79, None);
    })?;
    let (took, endpoint) = wait_until_unhealthy(&mut plugin, &uuid, since).await?;
    let total = endpoint.devices.len();
    let (here, there) = count_unhealthy(&endpoint, &uuid);
    report.add(Figure::new(CASE_NAME, "GPU lost: its devices unhealthy", count_to_f64(here), "").with_published(10.0));
    report.add(
        Figure::new(CASE_NAME, "GPU lost: other devices unhealthy", count_to_f64(there), "")
            .with_published(70.0)
            .with_goal(0.0),
    );
    report.add(Figure::new(CASE_NAME, "GPU lost → unhealthy", to_milliseconds(took), "ms").with_published(3.0));
    let messages = count_to_f64(endpoint.lists - lists);
    report.add(Figure::new(CASE_NAME, "GPU lost: lists sent", messages, "").with_published(80.0).with_goal(8.0));

    let mut client = plugin.kubelet.client(&plugin.resource).context("no connection")?;
    let ids = request_preferred(&mut client, &endpoint.healthy_ids(), 5).await?;
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    client.allocate(allocate_request(&ids)).await.context("Allocate on a healthy GPU")?;

    // The published figure is 0: NVIDIA's plugin exits, so the 7 healthy GPUs cannot be allocated.
    let good = total - here;
    plugin.kubelet.stop();
    plugin.kubelet.start().context("kubelet.sock")?;
    let rest = |endpoint: &Endpoint| endpoint.devices.len() == total && endpoint.healthy_ids().len() == good;
    let endpoint = plugin.wait_for_endpoint("the other GPUs after a restart of the kubelet", rest).await?;
    let label = "healthy devices, the kubelet having restarted";
    report.add(
        Figure::new(CASE_NAME, format!("GPU lost: {label}"), count_to_f64(endpoint.healthy_ids().len()), "")
            .with_published(0.0),
    );
    let before = plugin.kubelet.state().borrow().registrations.len();
    plugin.restart().await?;
    let resource = plugin.resource.clone();
    plugin
        .wait_for_kubelet("the other GPUs after a plugin restart", |seen| {
            let again = seen.registrations[before..].iter().any(|r| r.request.resource_name == resource);
            again && seen.endpoints.get(&resource).is_some_and(rest)
        })
        .await?;
    let label = "healthy devices, the plugin having restarted";
    let healthy = count_to_f64(plugin.endpoint().healthy_ids().len());
    report.add(Figure::new(CASE_NAME, format!("GPU lost: {label}"), healthy, "").with_published(0.0));

    let since = Instant::now();
    simulated_machine(&plugin)?.change(|state| {
        if let Ok(gpu) = state.gpu_mut(&uuid) {
            gpu.lost = false;
        }
    })?;
    let took = wait_until_healthy(&mut plugin, since).await?;
    report.add(Figure::new(CASE_NAME, "GPU back → all healthy", took, "ms").with_published(f64::INFINITY));
    plugin.stop().await?;
    Ok(())
}

/// Measures the effect of NVML event waits that always fail.
pub(super) async fn measure_event_wait(
    launcher: &Launcher,
    over: Duration,
    report: &mut BenchmarkReport,
) -> Result<()> {
    let plugin = launcher.start().await?;
    let fault = |id| Fault {
        id,
        call: "nvmlEventSetWait".to_owned(),
        gpu: None,
        effect: FaultEffect::Code(NVML_ERROR_GPU_IS_LOST),
        remaining: None,
    };
    simulated_machine(&plugin)?.change(|state| {
        let id = state.next_id();
        state.faults.push(fault(id));
    })?;
    let (lists, lines, before) = (plugin.endpoint().lists, plugin.count_log_lines(), read_load(plugin.pid()?)?);
    tokio::time::sleep(over).await;
    let (endpoint, after) = (plugin.endpoint(), read_load(plugin.pid()?)?);
    let seconds = over.as_secs_f64();
    let what = "event wait fails with GPU_IS_LOST";
    let rate = count_to_f64(endpoint.lists - lists) / seconds;
    report.add(Figure::new(CASE_NAME, format!("{what}: lists"), rate, "/s").with_published(15_000.0).with_goal(1.0));
    let rate = count_to_f64(plugin.count_log_lines() - lines) / seconds;
    report
        .add(Figure::new(CASE_NAME, format!("{what}: log lines"), rate, "/s").with_published(9_451.0).with_goal(10.0));
    let part = 100.0 * after.time.saturating_sub(before.time).as_secs_f64() / seconds;
    report.add(Figure::new(CASE_NAME, format!("{what}: of a core"), part, "%").with_published(27.0).with_goal(1.0));
    let (_, others) = count_unhealthy(&endpoint, "");
    report.add(Figure::new(CASE_NAME, format!("{what}: unhealthy devices"), count_to_f64(others), "").with_goal(0.0));
    plugin.stop().await?;
    Ok(())
}
