//! Starts the operator's tasks and stops them together.
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use kube::Client;
use kube::runtime::events::{Recorder, Reporter};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::admission::certificate::{self, CertificateManager, CertificateReceiver};
use crate::admission::webhook::{self, Namespaces, Reviewer};
use crate::args::{Label, OperatorArgs};
use crate::catch_up::{self, Versions};
use crate::http::{Health, serve};
use crate::leader::{self, LeaseGuard};
use crate::metrics::Metrics;
use crate::passes::{self, GpuController};
use crate::placement::quota_writer::{self, QuotaChanges};
use crate::placement::{self, PlacementController};
use crate::task::{self, Context};
use crate::tenants::TenantController;
use crate::watches::{WATCH_TIMEOUT_SECONDS, Wakers, Watches};

/// The operator's tasks. Each task returns its name and its result.
type Tasks = JoinSet<(&'static str, Result<()>)>;

/// Maximum time without data from the API server after a request. Without this limit, a watch
/// request on a dead connection hangs until the kernel closes the connection after about 15
/// minutes. The limit is longer than the lifetime of a watch, [`WATCH_TIMEOUT_SECONDS`].
const READ_TIMEOUT: Duration = Duration::from_secs(WATCH_TIMEOUT_SECONDS as u64 + 15);

/// Returns the configuration of a client that does not retry requests. Each task retries within its
/// own deadline. By default, a client retries HTTP 429 for minutes, but the API server also returns
/// 429 when a disruption budget protects a pod.
async fn find_api_server() -> Result<kube::Config> {
    let mut config = kube::Config::infer().await.context("failed to find the API server")?;
    config.default_retry = false;
    Ok(with_read_timeout(config))
}

/// Applies [`READ_TIMEOUT`] to connections.
fn with_read_timeout(mut config: kube::Config) -> kube::Config {
    config.read_timeout = Some(READ_TIMEOUT);
    // Without this setting, the limit includes the connection's idle time before the request.
    config.reset_reader_on_write = true;
    config
}

/// Runs the operator until SIGTERM or SIGINT, or until one of its tasks ends unexpectedly.
///
/// # Errors
/// Returns an error if the operator cannot start, or if a task fails.
pub async fn run(args: OperatorArgs) -> Result<()> {
    let quotas = args.quotas.settings();
    let OperatorArgs { namespace, agent_selector, lease, identity, metrics_addr, webhook, webhook_addr, .. } = args;
    cleave_serve::descriptors::raise_limit();
    // The build may link two crypto providers. Ignore the error, because one of them may already be
    // installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = listen(metrics_addr)?;
    let webhook = webhook.map(|name| anyhow::Ok((name, listen(webhook_addr)?))).transpose()?;
    let config = find_api_server().await?;
    let client = Client::try_from(config.clone()).context("failed to create the Kubernetes client")?;
    let (stop, released) = (CancellationToken::new(), CancellationToken::new());
    let metrics = Metrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry);

    let mut tasks = Tasks::new();
    let wakes = Wakers::default();
    let (versions, stored) = watch::channel(Versions::default());
    let mut watches = Watches::new(&mut tasks, (&wakes, &metrics), &versions, &stop);
    let stores = watches.start_stores(&client, &namespace, &agent_selector);
    let hosts = args.replace_mps_hosts.map(|selector| watches.start_host_stores(&client, &namespace, &selector));
    let namespaces = webhook.is_some().then(|| watches.exempt_namespaces(&client));

    let names = (namespace.clone(), lease, identity.clone());
    let tokens = (stop.clone(), released.clone());
    let (lease, claim) = spawn_lease(&mut tasks, config, (&client, &metrics), names, stored, tokens)?;
    let certified = match webhook.zip(namespaces) {
        None => None,
        Some(((name, listener), exempt)) => {
            let (manager, served) = CertificateManager::new(&client, &namespace, name, lease.clone());
            let reviewer = Reviewer::new(exempt.clone(), args.tolerate_gpu_taint);
            spawn_webhook(&mut tasks, (listener, manager, &served), (reviewer, exempt), &stop)?;
            Some(served)
        }
    };
    let listed = Arc::new(AtomicBool::new(false));
    let (registry, all) = (Arc::new(registry), Arc::clone(&listed));
    let health = Health { listed: all, claim: lease, metrics: metrics.clone(), registry, certified };
    let until = stop.clone();
    tasks.spawn(async move {
        serve(listener, health, until).await;
        ("http", Ok(()))
    });
    let recorder =
        Recorder::new(client.clone(), Reporter { controller: "cleave-operator".to_owned(), instance: Some(identity) });
    let ((demand, gated), (unplanned, held)) = (watch::channel(Arc::default()), watch::channel(Arc::default()));
    let (quota_changes, changed_quotas) = watch::channel(QuotaChanges::default());
    let context = Context { client, stores, claim, metrics, recorder, listed, stop: stop.clone() };
    let (passes_wake, placement_wake, tenants_wake) =
        (Arc::clone(&wakes.passes), Arc::clone(&wakes.placement), Arc::clone(&wakes.tenants));
    let placement = PlacementController::new(placement::ControllerInputs {
        context: context.clone(),
        wakes: wakes.clone(),
        demand: gated,
        unplanned,
        hosts,
        unschedulable_after: Duration::from_secs(args.unschedulable_after_seconds),
        agent_labels: args.node_selector.into_iter().map(|Label { key, value }| (key, value)).collect(),
        report_unschedulable: args.report_unschedulable,
        taint_fragmented: args.taint_fragmented,
        quotas,
        quota_changes,
    });
    let (tenants, taint) = (TenantController::new(context.clone(), wakes.clone()), args.taint_unhealthy);
    let inputs = passes::ControllerInputs { context: context.clone(), wakes, demand, unplanned: held, taint };
    let passes = GpuController::new(inputs);
    tasks.spawn(async move {
        let (passes, placement, tenants, ()) = tokio::join!(
            task::run(passes, context.clone(), passes_wake),
            task::run(placement, context.clone(), placement_wake),
            task::run(tenants, context.clone(), tenants_wake),
            quota_writer::run(context, changed_quotas),
        );
        // All writers have stopped, so the lease may be released.
        released.cancel();
        ("passes", passes.and(placement).and(tenants))
    });
    wait_until_stopped(tasks, stop).await
}

/// Starts the thread that renews the lease, and the task that waits until the stores are as new as
/// the lease. `names` are the namespace, the name of the lease and this process's identity. Returns
/// a guard that requires only the lease, and a guard that also requires current stores.
fn spawn_lease(
    tasks: &mut Tasks,
    config: kube::Config,
    (client, metrics): (&Client, &Metrics),
    names: (String, String, String),
    stored: watch::Receiver<Versions>,
    (stop, released): (CancellationToken, CancellationToken),
) -> Result<(LeaseGuard, LeaseGuard)> {
    let pod = (names.0.clone(), names.2.clone());
    let connect = || Client::try_from(config).context("failed to create the Kubernetes client");
    let (lease, elector) = leader::start(connect, names, (stop.clone(), released))?;
    tasks.spawn(async move { ("lease", elector.await) });
    let (ready, caught_up) = watch::channel(0);
    let (client, held, late) = (client.clone(), lease.clone(), metrics.catch_ups_late.clone());
    tasks.spawn(async move {
        catch_up::run((client, late), pod, held, (stored, ready), stop).await;
        ("catch-up", Ok(()))
    });
    let claim = lease.with_readiness(caught_up);
    Ok((lease, claim))
}

/// Starts the webhook and the task that manages its certificate. `exempt` stores the exempt
/// namespaces.
fn spawn_webhook(
    tasks: &mut Tasks,
    (listener, manager, served): (TcpListener, CertificateManager, &CertificateReceiver),
    (reviewer, exempt): (Reviewer, Namespaces),
    stop: &CancellationToken,
) -> Result<()> {
    let tls = certificate::tls_config(served.clone()).context("failed to set up TLS")?;
    let until = stop.clone();
    tasks.spawn(async move {
        ("webhook", webhook::serve(listener, tls, reviewer, until, webhook::DRAIN_TIME).await.map_err(Into::into))
    });
    let stop = stop.clone();
    tasks.spawn(async move {
        // Publish the certificate only after the exempt namespaces are known. API servers send no
        // reviews to this replica before it serves a certificate, because the replica is not ready.
        tokio::select! {
            () = stop.cancelled() => {}
            listed = exempt.wait_until_ready() => match listed {
                Ok(()) => manager.run(stop.clone()).await,
                Err(error) => return ("certificate", Err(error.into())),
            }
        }
        ("certificate", Ok(()))
    });
    Ok(())
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    cleave_serve::tcp::listen(address).with_context(|| format!("failed to listen on {address}"))
}

/// Waits for a signal or the end of a task, then stops all tasks and waits for them.
async fn wait_until_stopped(mut tasks: Tasks, stop: CancellationToken) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("failed to listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to listen for SIGINT")?;
    let mut outcome = Ok(());
    loop {
        // All branches are cancel-safe: signals are streams, and `join_next` loses no task when it
        // is dropped.
        tokio::select! {
            _ = terminate.recv(), if !stop.is_cancelled() => tracing::info!("received SIGTERM; shutting down"),
            _ = interrupt.recv(), if !stop.is_cancelled() => tracing::info!("received SIGINT; shutting down"),
            ended = tasks.join_next() => match ended {
                None => return outcome,
                Some(ended) => {
                    let unexpected = !stop.is_cancelled();
                    match ended {
                        Err(panicked) => outcome = Err(anyhow!(panicked).context("a task panicked")),
                        Ok((task, Err(error))) => outcome = Err(error.context(format!("task {task} failed"))),
                        Ok((task, Ok(()))) if unexpected => outcome = Err(anyhow!("task {task} ended unexpectedly")),
                        Ok(_) => {}
                    }
                }
            },
        }
        stop.cancel();
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use kube::Api;
    use kube::api::WatchParams;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_watch_request_on_a_dead_connection_fails() {
        let silent = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let url = format!("http://{}", silent.local_addr().unwrap()).parse().unwrap();
        let client = Client::try_from(with_read_timeout(kube::Config::new(url))).unwrap();
        let pods = Api::<Pod>::all(client);
        let began = tokio::time::Instant::now();
        let params = WatchParams::default();
        let watched = tokio::time::timeout(Duration::from_secs(900), pods.watch(&params, "0")).await;
        assert!(watched.expect("the request ends").is_err());
        assert!(began.elapsed() > Duration::from_secs(u64::from(WATCH_TIMEOUT_SECONDS) + 5), "no watch is cut short");
    }
}
