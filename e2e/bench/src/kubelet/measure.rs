//! Measures one device plugin: start and stop, memory, latency, splits and registration.
use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cleave_kubelet::proto::v1beta1 as wire;
use cleave_kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use tonic::Status;
use tonic::transport::Channel;

use super::occupancy::{PodChurn, count_gpus, fits_on_one_gpu, gpu_of_id, random_free_shares};
use super::process::{Launcher, PLUGIN_REACTION_TIMEOUT, Plugin, read_load, read_memory};
use super::report::{BenchmarkReport, Figure, SortedDurations};

/// Number of calls before the measured calls. These calls fill caches and adapt the connection's
/// flow control.
const WARM_UP_CALLS: usize = 50;

/// Number of empty calls after each start. These calls measure the speed of the machine at that
/// time.
const EMPTY_CALLS_PER_START: usize = 100;

/// Median of `GetDevicePluginOptions` in the published measurement, in milliseconds.
const PUBLISHED_EMPTY_CALL_MEDIAN_MILLISECONDS: f64 = 0.058;

/// Median from exec to Register in the published measurement, in milliseconds.
const PUBLISHED_REGISTER_MEDIAN_MILLISECONDS: f64 = 8.9;

/// Maximum of the 99th percentile of `Allocate` for five units, as a multiple of the 99th
/// percentile of an empty call.
const MAX_ALLOCATE_TO_EMPTY_CALL_RATIO: f64 = 3.0;

/// Maximum processor time of a plugin without requests, in milliseconds per minute.
const MAX_IDLE_MILLISECONDS_PER_MINUTE: f64 = 30.0;

/// Converts a duration to milliseconds.
pub(super) fn to_milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Converts a count to a floating-point figure.
#[expect(clippy::cast_precision_loss, reason = "counts and KiB of a few million")]
pub(super) fn count_to_f64(value: impl TryInto<u64>) -> f64 {
    value.try_into().map_or(f64::NAN, |value: u64| value as f64)
}

/// Measures the time from the start of the process to its registration and first list, and from
/// SIGTERM to its exit.
pub(super) async fn measure_starts_and_stops(
    launcher: &Launcher,
    times: usize,
    report: &mut BenchmarkReport,
) -> Result<()> {
    const CASE_NAME: &str = "start and stop";
    let (mut registers, mut lists, mut exits) = (Vec::new(), Vec::new(), Vec::new());
    let mut floors = Vec::new();
    for _ in 0..times {
        let plugin = launcher.start().await?;
        let seen = plugin.kubelet.state().borrow().clone();
        let registered = seen.registrations.iter().find(|r| r.request.resource_name == plugin.resource);
        registers.push(registered.context("no registration")?.at.duration_since(plugin.started));
        let listed = plugin.endpoint().listed.context("no list")?;
        lists.push(listed.duration_since(plugin.started));
        let client = plugin.kubelet.client(&plugin.resource).context("no connection")?;
        floors.push(measure_empty_call(&client, EMPTY_CALLS_PER_START).await?.quantile(0.5));
        exits.push(plugin.stop().await?);
    }
    // A busy machine slows both the start and the empty call, so scale the goal by the empty call's
    // time. A fast empty call does not make the goal stricter.
    floors.sort_by(f64::total_cmp);
    let floor = floors.get(floors.len() / 2).copied().unwrap_or(PUBLISHED_EMPTY_CALL_MEDIAN_MILLISECONDS);
    let slowdown = (floor / PUBLISHED_EMPTY_CALL_MEDIAN_MILLISECONDS).max(1.0);
    for (what, durations, published, goal) in [
        (
            "exec → Register",
            registers,
            (PUBLISHED_REGISTER_MEDIAN_MILLISECONDS, 9.9),
            Some(PUBLISHED_REGISTER_MEDIAN_MILLISECONDS * slowdown),
        ),
        ("exec → first ListAndWatch", lists, (10.4, 11.4), None),
        ("SIGTERM → exit", exits, (8.3, 18.0), None),
    ] {
        let sorted = SortedDurations::new(durations);
        report.add(
            Figure::new(CASE_NAME, format!("{what}, p50"), sorted.quantile(0.5), "ms")
                .with_published(published.0)
                .with_goal(goal),
        );
        report.add(
            Figure::new(CASE_NAME, format!("{what}, max"), sorted.quantile(1.0), "ms").with_published(published.1),
        );
    }
    Ok(())
}

/// Measures the memory of the plugin.
pub(super) fn measure_memory(
    plugin: &Plugin,
    when: &str,
    published: Option<(f64, f64, f64)>,
    report: &mut BenchmarkReport,
) -> Result<()> {
    const CASE_NAME: &str = "memory and idle work";
    let memory = read_memory(plugin.pid()?)?;
    let (rss, pss, anonymous) = published.map_or((None, None, None), |(r, p, a)| (Some(r), Some(p), Some(a)));
    let goal = f64::from(12 << 10);
    report.add(
        Figure::new(CASE_NAME, format!("resident {when}"), count_to_f64(memory.resident), "KiB")
            .with_published(rss)
            .with_goal(goal),
    );
    report.add(
        Figure::new(CASE_NAME, format!("proportional {when}"), count_to_f64(memory.proportional), "KiB")
            .with_published(pss),
    );
    report.add(
        Figure::new(CASE_NAME, format!("anonymous {when}"), count_to_f64(memory.anonymous), "KiB")
            .with_published(anonymous)
            .with_goal(anonymous),
    );
    if let Some(relay) = plugin.relay_pid() {
        let resident = count_to_f64(read_memory(relay)?.resident);
        report.add(Figure::new(CASE_NAME, format!("relay: resident {when}"), resident, "KiB"));
    }
    Ok(())
}

/// Measures memory and processor time without requests.
pub(super) async fn measure_idle_plugin(plugin: &Plugin, over: Duration, report: &mut BenchmarkReport) -> Result<()> {
    const CASE_NAME: &str = "memory and idle work";
    // The plugin still frees memory of its start after the first list, so wait before measuring.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = read_load(plugin.pid()?)?;
    tokio::time::sleep(over).await;
    let after = read_load(plugin.pid()?)?;
    measure_memory(plugin, "idle", Some((20_708.0, 19_440.0, 3_168.0)), report)?;
    let per_minute = 60.0 / over.as_secs_f64();
    let time = to_milliseconds(after.time.saturating_sub(before.time)) * per_minute;
    let nvml_time = to_milliseconds(after.nvml_time.saturating_sub(before.nvml_time)) * per_minute;
    let switches = count_to_f64(after.switches.saturating_sub(before.switches)) * per_minute;
    report.add(
        Figure::new(CASE_NAME, "processor time per idle minute", time, "ms")
            .with_published(1.1)
            .with_goal(MAX_IDLE_MILLISECONDS_PER_MINUTE),
    );
    report.add(Figure::new(CASE_NAME, "part of it in threads that call NVML", nvml_time, "ms"));
    report.add(Figure::new(CASE_NAME, "context switches per idle minute", switches, "").with_published(38.0));
    report.add(Figure::new(CASE_NAME, "threads", count_to_f64(after.threads), "").with_published(8.0));
    Ok(())
}

/// Measures the duration of sequential calls. `check` verifies each answer.
async fn measure_calls<T, F: Future<Output = Result<T, Status>>>(
    times: usize,
    mut call: impl FnMut(usize) -> F,
    mut check: impl FnMut(usize, T) -> Result<()>,
) -> Result<SortedDurations> {
    // Keep this thread awake, so that the latency excludes the thread's own wake-up. The kubelet's
    // Go runtime also spins before it sleeps.
    let awake = tokio::spawn(async {
        loop {
            tokio::task::yield_now().await;
        }
    });
    let _awake = tokio_util::task::AbortOnDropHandle::new(awake);
    let mut durations = Vec::with_capacity(times);
    for number in 0..times + WARM_UP_CALLS {
        let future = call(number);
        let start = Instant::now();
        let answer = future.await?;
        let took = start.elapsed();
        check(number, answer)?;
        if number >= WARM_UP_CALLS {
            durations.push(took);
        }
    }
    Ok(SortedDurations::new(durations))
}

/// Adds the median and the 99th percentile of a latency to the report.
fn add_latency(
    case: &'static str,
    what: &str,
    sorted: &SortedDurations,
    published: (f64, f64),
    goals: (Option<f64>, Option<f64>),
    report: &mut BenchmarkReport,
) {
    let microseconds = |quantile| sorted.quantile(quantile) * 1e3;
    report.add(
        Figure::new(case, format!("{what}, p50"), microseconds(0.5), "µs")
            .with_published(published.0)
            .with_goal(goals.0),
    );
    report.add(
        Figure::new(case, format!("{what}, p99"), microseconds(0.99), "µs")
            .with_published(published.1)
            .with_goal(goals.1),
    );
}

/// Returns a request to allocate these devices to one container.
pub(super) fn allocate_request(ids: &[&str]) -> wire::AllocateRequest {
    let devices_ids = ids.iter().map(ToString::to_string).collect();
    wire::AllocateRequest { container_requests: vec![wire::ContainerAllocateRequest { devices_ids }] }
}

/// Returns a request for `size` preferred devices.
fn new_preferred_request(available: &[&str], size: usize) -> Result<wire::PreferredAllocationRequest> {
    Ok(wire::PreferredAllocationRequest {
        container_requests: vec![wire::ContainerPreferredAllocationRequest {
            available_device_i_ds: available.iter().map(ToString::to_string).collect(),
            must_include_device_i_ds: Vec::new(),
            allocation_size: i32::try_from(size)?,
        }],
    })
}

/// Returns the devices of the only container in a response.
fn devices_of_only_container(response: wire::PreferredAllocationResponse) -> Result<Vec<String>> {
    let mut containers = response.container_responses;
    ensure!(containers.len() == 1, "{} answers for one container", containers.len());
    Ok(containers.swap_remove(0).device_i_ds)
}

/// Heading of the figures of [`measure_call_latencies`].
const CALL_LATENCIES_CASE_NAME: &str = "calls, one after the other on one connection";

/// Measures the latency of the calls that the kubelet sends for each pod, and of an empty call.
pub(super) async fn measure_call_latencies(
    plugin: &Plugin,
    times: usize,
    seed: u64,
    report: &mut BenchmarkReport,
) -> Result<()> {
    let endpoint = plugin.endpoint();
    let all = endpoint.healthy_ids();
    let mut rng = fastrand::Rng::with_seed(seed);
    let client = plugin.kubelet.client(&plugin.resource).context("no connection")?;

    let floor = measure_empty_call(&client, times).await?;
    add_latency(CALL_LATENCIES_CASE_NAME, "floor: GetDevicePluginOptions", &floor, (58.0, 155.0), (None, None), report);
    let goal = floor.quantile(0.99) * MAX_ALLOCATE_TO_EMPTY_CALL_RATIO * 1e3;
    measure_allocate_calls(&client, &all, times, &mut rng, goal, report).await?;
    measure_preferred_calls(&client, &all, times, &mut rng, report).await
}

/// Measures the latency of an empty call.
async fn measure_empty_call(client: &DevicePluginClient<Channel>, times: usize) -> Result<SortedDurations> {
    let call = |_| {
        let mut client = client.clone();
        async move { client.get_device_plugin_options(wire::Empty {}).await }
    };
    measure_calls(times, call, |_, _| Ok(())).await
}

/// Measures the latency of `Allocate`. `tail_goal` is the maximum of the 99th percentile for five
/// units, in microseconds. Each request is for a random GPU and random shares.
async fn measure_allocate_calls(
    client: &DevicePluginClient<Channel>,
    all: &[&str],
    times: usize,
    rng: &mut fastrand::Rng,
    tail_goal: f64,
    report: &mut BenchmarkReport,
) -> Result<()> {
    for (units, published, goals) in
        [(1, (72.0, 198.0), (Some(72.0), Some(198.0))), (5, (70.0, 238.0), (None, Some(tail_goal)))]
    {
        let requests: Vec<_> = (0..times + WARM_UP_CALLS)
            .map(|_| {
                let of = gpu_of_id(all[rng.usize(..all.len())]);
                let mut ids: Vec<&str> = all.iter().copied().filter(|id| gpu_of_id(id) == of).collect();
                rng.shuffle(&mut ids);
                ids.truncate(units);
                allocate_request(&ids)
            })
            .collect();
        let sorted = measure_calls(
            times,
            |number| {
                let (mut client, request) = (client.clone(), requests[number].clone());
                async move { client.allocate(request).await }
            },
            |_, answer| {
                let answers = answer.into_inner().container_responses.len();
                ensure!(answers == 1, "{answers} answers for one container");
                Ok(())
            },
        )
        .await?;
        let what =
            if units == 1 { "Allocate, 1 unit".to_owned() } else { format!("Allocate, {units} units of one GPU") };
        add_latency(CALL_LATENCIES_CASE_NAME, &what, &sorted, published, goals, report);
    }
    Ok(())
}

/// Measures `GetPreferredAllocation`. Counts the distinct answers after the first, although only
/// the order of the available devices differs. Also counts the answers that split a request over
/// several GPUs.
async fn measure_preferred_calls(
    client: &DevicePluginClient<Channel>,
    all: &[&str],
    times: usize,
    rng: &mut fastrand::Rng,
    report: &mut BenchmarkReport,
) -> Result<()> {
    for (units, published, goal) in
        [(1, (128.0, 568.0), None), (2, (167.0, 757.0), None), (5, (205.0, 754.0), Some(205.0 / 2.0))]
    {
        let mut shuffled = all.to_vec();
        let requests = (0..times + WARM_UP_CALLS).map(|_| {
            rng.shuffle(&mut shuffled);
            new_preferred_request(&shuffled, units)
        });
        let requests = requests.collect::<Result<Vec<_>>>()?;
        let mut answers = std::collections::BTreeSet::new();
        let mut split = 0;
        let sorted = measure_calls(
            times,
            |number| {
                let (mut client, request) = (client.clone(), requests[number].clone());
                async move { client.get_preferred_allocation(request).await }
            },
            |_, answer| {
                let ids = devices_of_only_container(answer.into_inner())?;
                ensure!(ids.len() == units, "{} devices preferred for {units}", ids.len());
                split += usize::from(count_gpus(ids.iter().map(String::as_str)) > 1);
                answers.insert(ids);
                Ok(())
            },
        )
        .await?;
        let what = format!("GetPreferredAllocation, {units} of {}", all.len());
        add_latency(CALL_LATENCIES_CASE_NAME, &what, &sorted, published, (goal, None), report);
        let different = count_to_f64(answers.len().saturating_sub(1));
        report.add(
            Figure::new(CALL_LATENCIES_CASE_NAME, format!("{what}, answers that differ"), different, "").with_goal(0.0),
        );
        // The published figure is for NVIDIA's policy `packed`. The policy `distributed` splits
        // each request for several units.
        report.add(
            Figure::new(CALL_LATENCIES_CASE_NAME, format!("{what}, split"), count_to_f64(split), "")
                .with_published(0.0)
                .with_goal(0.0),
        );
    }
    Ok(())
}

/// Returns the number of GPUs of a plugin, and a label with the numbers of GPUs and shares.
fn describe_plugin(all: &[&str]) -> (usize, String) {
    let gpus = count_gpus(all.iter().copied());
    (gpus, format!("{gpus} GPUs × {}", all.len() / gpus.max(1)))
}

/// Returns the published figure for this number of GPUs, if one exists.
fn published_figure(gpus: usize, four: f64, eight: f64) -> Option<f64> {
    match gpus {
        4 => Some(four),
        8 => Some(eight),
        _ => None,
    }
}

/// Requests the preferred devices among the free ones.
pub(super) async fn request_preferred(
    client: &mut DevicePluginClient<Channel>,
    free: &[&str],
    units: usize,
) -> Result<Vec<String>> {
    let ids = devices_of_only_container(
        client.get_preferred_allocation(new_preferred_request(free, units)?).await?.into_inner(),
    )?;
    ensure!(ids.len() == units, "{} devices preferred for {units}", ids.len());
    Ok(ids)
}

/// Measures how often the plugin splits a request for five units although one GPU has five free
/// units. The occupancies are random.
pub(super) async fn measure_random_occupancy(
    plugin: &Plugin,
    states: usize,
    seed: u64,
    report: &mut BenchmarkReport,
) -> Result<()> {
    const CASE_NAME: &str = "splits";
    const REQUESTED_UNITS: usize = 5;
    let endpoint = plugin.endpoint();
    let all = endpoint.healthy_ids();
    let (gpus, shape) = describe_plugin(&all);
    let mut client = plugin.kubelet.client(&plugin.resource).context("no connection")?;
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut could, mut split) = (0, 0);
    for _ in 0..states {
        let free = random_free_shares(&all, &mut rng);
        if !fits_on_one_gpu(&free, REQUESTED_UNITS) {
            continue;
        }
        could += 1;
        let ids = request_preferred(&mut client, &free, REQUESTED_UNITS).await?;
        split += usize::from(count_gpus(ids.iter().map(String::as_str)) > 1);
    }
    let label = format!("{shape}, random occupancy, {could} states with room on one GPU: 5 units split");
    let percent = 100.0 * count_to_f64(split) / count_to_f64(could).max(1.0);
    report.add(
        Figure::new(CASE_NAME, label, percent, "%").with_published(published_figure(gpus, 79.0, 97.3)).with_goal(0.0),
    );
    Ok(())
}

/// Measures splits while pods arrive and end. As in the published measurement, each pod receives
/// the preferred devices even if no single GPU has enough free units.
pub(super) async fn measure_churn(
    plugin: &Plugin,
    arrivals: usize,
    seed: u64,
    report: &mut BenchmarkReport,
) -> Result<()> {
    const CASE_NAME: &str = "splits";
    let endpoint = plugin.endpoint();
    let all = endpoint.healthy_ids();
    let (gpus, shape) = describe_plugin(&all);
    let mut client = plugin.kubelet.client(&plugin.resource).context("no connection")?;
    let mut churn = PodChurn::new(&all, seed);
    // Counts for pods of 2 and of 5 units: placed, split, split although one GPU had enough free
    // units, and split but accepted by Allocate.
    let mut tally = [[0_usize; 4]; 2];
    for _ in 0..arrivals {
        let (units, Some(free)) = churn.next_pod() else { continue };
        let ids = request_preferred(&mut client, &free, units).await?;
        ensure!(churn.allocate(&ids), "a device was preferred that is not free: {ids:?}");
        let texts: Vec<&str> = ids.iter().map(String::as_str).collect();
        let is_split = count_gpus(texts.iter().copied()) > 1;
        let granted = client.allocate(allocate_request(&texts)).await;
        if !is_split {
            granted.with_context(|| format!("Allocate refused {ids:?}"))?;
        } else if let Some(tally) = tally.get_mut(usize::from(units == 5)) {
            tally[1] += 1;
            tally[2] += usize::from(fits_on_one_gpu(&free, units));
            tally[3] += usize::from(granted.is_ok());
        }
        if units > 1 {
            tally[usize::from(units == 5)][0] += 1;
        }
    }
    let used = 100.0 * churn.utilization();
    let label = format!("{shape}, churn of {arrivals} arrivals");
    report.add(
        Figure::new(CASE_NAME, format!("{label}: used"), used, "%").with_published(published_figure(gpus, 62.0, 69.0)),
    );
    let published = [
        (published_figure(gpus, 40.0, 59.0), None),
        (published_figure(gpus, 100.0 * 786.0 / 931.0, 100.0 * 869.0 / 940.0), published_figure(gpus, 745.0, 827.0)),
    ];
    for ((units, [placed, split, avoidable, granted]), (split_published, avoidable_published)) in
        [2, 5].into_iter().zip(tally).zip(published)
    {
        let label = format!("{label}: {units} units");
        let percent = 100.0 * count_to_f64(split) / count_to_f64(placed).max(1.0);
        report.add(
            Figure::new(CASE_NAME, format!("{label} split, of {placed}"), percent, "%").with_published(split_published),
        );
        report.add(
            Figure::new(CASE_NAME, format!("{label} split though one GPU had room"), count_to_f64(avoidable), "")
                .with_published(avoidable_published)
                .with_goal(0.0),
        );
        report.add(
            Figure::new(CASE_NAME, format!("{label} split across two GPUs"), count_to_f64(granted), "").with_goal(0.0),
        );
    }
    Ok(())
}

/// Measures the size of a device list.
pub(super) fn measure_list_size(plugin: &Plugin, report: &mut BenchmarkReport) {
    let endpoint = plugin.endpoint();
    let published = match endpoint.devices.len() {
        8 => Some(424.0),
        40 => Some(2240.0),
        80 => Some(4480.0),
        384 => Some(21808.0),
        _ => None,
    };
    let what = format!("ListAndWatch of {} devices", endpoint.devices.len());
    report.add(Figure::new("messages", what, count_to_f64(endpoint.message_bytes), "B").with_published(published));
}

/// Measures the time from the creation of kubelet.sock to the registration, when the kubelet
/// restarts.
pub(super) async fn measure_kubelet_restarts(
    plugin: &mut Plugin,
    times: usize,
    report: &mut BenchmarkReport,
) -> Result<()> {
    const CASE_NAME: &str = "the kubelet restarts, refuses, and loses a socket";
    let mut durations = Vec::new();
    for _ in 0..times {
        let before = plugin.kubelet.state().borrow().registrations.len();
        plugin.kubelet.stop();
        let created = plugin.kubelet.start().context("kubelet.sock")?;
        plugin.wait_until_served().await?;
        let resource = plugin.resource.clone();
        let seen = plugin.kubelet.state().borrow().clone();
        let registered = seen.registrations[before..].iter().find(|r| r.request.resource_name == resource);
        durations.push(registered.context("no registration")?.at.duration_since(created));
    }
    let slow = durations.iter().filter(|duration| **duration >= Duration::from_millis(50)).count();
    let sorted = SortedDurations::new(durations);
    let label = format!("kubelet.sock replaced {times} times → Register");
    report.add(Figure::new(CASE_NAME, format!("{label}, p50"), sorted.quantile(0.5), "ms").with_published(4.0));
    report.add(
        Figure::new(CASE_NAME, format!("{label}, max"), sorted.quantile(1.0), "ms")
            .with_published(1000.0)
            .with_goal(50.0),
    );
    // Published figures: 6 of 20 on an idle machine and 16 of 20 on a busy one, so 22 of 40.
    report.add(
        Figure::new(CASE_NAME, format!("{label}, not within 50 ms"), count_to_f64(slow), "")
            .with_published(22.0)
            .with_goal(0.0),
    );
    Ok(())
}

/// Measures the time from a refused registration to the next registration.
pub(super) async fn measure_refused_registration(plugin: &mut Plugin, report: &mut BenchmarkReport) -> Result<()> {
    const CASE_NAME: &str = "the kubelet restarts, refuses, and loses a socket";
    let before = plugin.kubelet.state().borrow().registrations.len();
    plugin.kubelet.stop();
    plugin.kubelet.refuse_registrations(1);
    plugin.kubelet.start().context("kubelet.sock")?;
    plugin.wait_until_served().await?;
    let seen = plugin.kubelet.state().borrow().clone();
    let of_resource = seen.registrations[before..].iter().filter(|r| r.request.resource_name == plugin.resource);
    let at: Vec<Instant> = of_resource.map(|r| r.at).collect();
    ensure!(at.len() == 2, "{} registrations after a refused one, expected 2", at.len());
    let waited = at[1].duration_since(at[0]);
    report.add(
        Figure::new(CASE_NAME, "Register refused → Register", to_milliseconds(waited), "ms")
            .with_published(30_100.0)
            .with_goal(2000.0),
    );
    Ok(())
}

/// Measures the time from the deletion of the plugin's socket until the registered socket accepts
/// connections.
pub(super) async fn measure_deleted_socket(plugin: &Plugin, report: &mut BenchmarkReport) -> Result<()> {
    const CASE_NAME: &str = "the kubelet restarts, refuses, and loses a socket";
    let socket = plugin.kubelet.directory().join(plugin.endpoint().socket);
    std::fs::remove_file(&socket).context("the plugin's socket")?;
    let deleted = Instant::now();
    let answered = async {
        loop {
            let socket = plugin.kubelet.directory().join(plugin.endpoint().socket);
            if tokio::net::UnixStream::connect(socket).await.is_ok() {
                return deleted.elapsed();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let took = tokio::time::timeout(PLUGIN_REACTION_TIMEOUT, answered)
        .await
        .context("the plugin did not notice the deleted socket")?;
    // The published plugin did not answer within 20 s.
    report.add(
        Figure::new(CASE_NAME, "own socket deleted → answers again", to_milliseconds(took), "ms")
            .with_published(f64::INFINITY),
    );
    Ok(())
}
