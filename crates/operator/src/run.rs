//! Wires the operator's tasks together, and ends them together.
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use kube::runtime::events::{Recorder, Reporter};
use kube::{Api, Client};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::admission::certificate::{self, Keeper};
use crate::admission::webhook;
use crate::args::OperatorArgs;
use crate::http::{Health, serve};
use crate::leader::Elector;
use crate::metrics::Metrics;
use crate::passes::{self, Passes};
use crate::placement::{self, Gate};
use crate::task::{self, Context};
use crate::tenants::Tenants;
use crate::watches::{Wakes, Watches};

/// The API server. Every task repeats what failed by itself, within a deadline of its own. A client
/// that repeats what was answered by 429, as the default one does for minutes, would keep from the
/// gate that a disruption budget protects a pod: evictions are refused by that status.
async fn connect() -> Result<Client> {
    let mut config = kube::Config::infer().await?;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

/// Runs the operator until SIGTERM or SIGINT, or until one of its tasks ends by itself.
pub async fn run(args: OperatorArgs) -> Result<()> {
    let OperatorArgs { namespace, agent_selector, lease, identity, metrics_addr, webhook, webhook_addr, .. } = args;
    // Two providers may be linked; an error says that one is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = listen(metrics_addr).await?;
    let webhook = match webhook {
        None => None,
        Some(name) => Some((name, listen(webhook_addr).await?)),
    };
    let client = connect().await.context("finding the API server")?;
    let (stop, released) = (CancellationToken::new(), CancellationToken::new());
    let metrics = Metrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry);

    let mut tasks: JoinSet<(&'static str, Result<()>)> = JoinSet::new();
    let wakes = Wakes::default();
    let mut watches = Watches { tasks: &mut tasks, wakes: &wakes, metrics: &metrics, stop: &stop };
    let stores = watches.stores(&client, &namespace, &agent_selector);
    let hosts = args.replace_mps_hosts.map(|selector| watches.hosts(&client, &namespace, &selector));
    let namespaces = webhook.is_some().then(|| watches.exceptions(&client));

    let (elector, claim) = Elector::new(Api::namespaced(client.clone(), &namespace), lease, identity.clone());
    {
        let (stop, released) = (stop.clone(), released.clone());
        tasks.spawn(async move {
            elector.run(stop, released).await;
            ("lease", Ok(()))
        });
    }
    let mut certified = None;
    if let Some(((name, listener), namespaces)) = webhook.zip(namespaces) {
        let (keeper, served) = Keeper::new(&client, &namespace, name, claim.clone());
        let tls = certificate::tls(served.clone()).context("setting up TLS")?;
        certified = Some(served);
        let (known, until) = (namespaces.clone(), stop.clone());
        tasks.spawn(async move {
            ("webhook", webhook::serve(listener, tls, known, until, webhook::LINGER).await.map_err(Into::into))
        });
        let stop = stop.clone();
        tasks.spawn(async move {
            // Nothing is answered, and nobody asks, before it is known where there are exceptions.
            tokio::select! {
                () = stop.cancelled() => {}
                listed = namespaces.wait_until_ready() => match listed {
                    Ok(()) => keeper.run(stop.clone()).await,
                    Err(error) => return ("certificate", Err(error.into())),
                }
            }
            ("certificate", Ok(()))
        });
    }
    let listed = Arc::new(AtomicBool::new(false));
    let (registry, all) = (Arc::new(registry), Arc::clone(&listed));
    let health = Health { listed: all, claim: claim.clone(), metrics: metrics.clone(), registry, certified };
    {
        let stop = stop.clone();
        tasks.spawn(async move { ("http", serve(listener, health, stop).await.map_err(Into::into)) });
    }
    let recorder =
        Recorder::new(client.clone(), Reporter { controller: "cleave-operator".to_owned(), instance: Some(identity) });
    let (demand, gated) = watch::channel(Arc::default());
    let context = Context { client, stores, claim, metrics, recorder, listed, stop: stop.clone() };
    let (passes_wake, gate_wake, tenants_wake) =
        (Arc::clone(&wakes.passes), Arc::clone(&wakes.gate), Arc::clone(&wakes.tenants));
    let gate = Gate::new(placement::Parts {
        context: context.clone(),
        wake: Arc::clone(&wakes.gate),
        demand: gated,
        hosts,
        unschedulable_after: Duration::from_secs(args.unschedulable_after_seconds),
    });
    let tenants = Tenants::new(context.clone());
    let passes = Passes::new(passes::Parts { context: context.clone(), wakes, demand, taint: args.taint_unhealthy });
    tasks.spawn(async move {
        let (passes, gate, tenants) = tokio::join!(
            task::run(passes, context.clone(), passes_wake),
            task::run(gate, context.clone(), gate_wake),
            task::run(tenants, context, tenants_wake),
        );
        // Nothing is written from here on: the lease may go.
        released.cancel();
        ("passes", passes.and(gate).and(tenants))
    });
    finish(tasks, stop).await
}

async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("listening on {address}"))
}

/// Waits for a signal or the end of a task, and then for all of them.
async fn finish(mut tasks: JoinSet<(&'static str, Result<()>)>, stop: CancellationToken) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    let mut outcome = Ok(());
    loop {
        // All cancel-safe: signals are streams, and `join_next` loses no task when it is dropped.
        tokio::select! {
            _ = terminate.recv(), if !stop.is_cancelled() => tracing::info!("SIGTERM: shutting down"),
            _ = interrupt.recv(), if !stop.is_cancelled() => tracing::info!("SIGINT: shutting down"),
            ended = tasks.join_next() => match ended {
                None => return outcome,
                Some(ended) => {
                    let unasked = !stop.is_cancelled();
                    match ended {
                        Err(panicked) => outcome = Err(anyhow!(panicked).context("a task panicked")),
                        Ok((task, Err(error))) => outcome = Err(error.context(format!("task {task}"))),
                        Ok((task, Ok(()))) if unasked => outcome = Err(anyhow!("task {task} ended by itself")),
                        Ok(_) => {}
                    }
                }
            },
        }
        stop.cancel();
    }
}
