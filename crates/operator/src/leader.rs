//! Leader election: only the process that holds a lease writes to the cluster.
//!
//! [`evaluate`] makes the decisions and is pure. [`Elector::run`] reads the lease, decides and
//! writes. The holder's [`LeaseGuard`] expires before another process may acquire the lease. So a
//! holder that cannot reach the API server stops its writes before another process starts to write.
//! Processes never compare each other's clocks: a process measures the age of a renewal from its
//! own read of the changed lease.
//!
//! [`start`] runs the elector on a separate thread. A long pass or many TLS handshakes can keep the
//! main thread busy, but must not delay a renewal.
use std::time::Duration;

use anyhow::Context as _;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long a lease is valid after a renewal. Kubernetes' own controllers use the same value by
/// default.
pub const LEASE_TIME: Duration = Duration::from_secs(15);
/// How long a [`LeaseGuard`] is valid after a successful renewal began. A write that starts while
/// the guard is valid completes or times out before the lease expires.
pub const GUARD_TIME: Duration = Duration::from_secs(10);
/// Maximum duration of a write that starts while a [`LeaseGuard`] is valid.
const WRITE_TIME: Duration = LEASE_TIME.saturating_sub(GUARD_TIME);
/// Interval between renewals by the holder. A guard remains valid if one renewal fails and the next
/// renewal succeeds, even if both requests of the failed renewal time out.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);
/// Maximum interval between reads of the lease by processes that do not hold it.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Delay before a failed request is retried.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// Time after which a process that gave up the lease may acquire it again, if no other process has
/// acquired it. Another process needs at most the [`LEASE_TIME`] and one [`POLL_INTERVAL`] to
/// acquire it.
pub(crate) const GIVE_UP_TIME: Duration = Duration::from_secs(20);
/// Time limit of a request to the API server. A renewal is two requests.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// A lease as this process last read it.
#[derive(Debug, Clone, PartialEq)]
pub struct ObservedLease {
    /// Spec of the lease.
    pub spec: LeaseSpec,
    /// When this process first read this spec, on its own clock.
    pub since: Duration,
}

impl ObservedLease {
    /// Returns the lease after `spec` was read at `now`. `before` is the result of the previous
    /// read.
    pub fn after_read(before: Option<Self>, spec: LeaseSpec, now: Duration) -> Self {
        before.filter(|before| before.spec == spec).unwrap_or(Self { spec, since: now })
    }
}

/// The next action of an elector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// The lease does not exist: create it.
    Create,
    /// The lease is free or has expired: acquire it.
    Acquire,
    /// This process holds the lease: renew it.
    Renew,
    /// Another process holds the lease. Contains the minimum remaining time.
    Wait(Duration),
}

/// Returns the next action, given the lease that was last read.
pub fn evaluate(last: Option<&ObservedLease>, me: &str, now: Duration) -> Decision {
    let Some(ObservedLease { spec, since }) = last else { return Decision::Create };
    match spec.holder_identity.as_deref() {
        None | Some("") => Decision::Acquire,
        // After a container restart, the identity is unchanged, and the previous process has
        // exited.
        Some(holder) if holder == me => Decision::Renew,
        Some(_) => {
            let length = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
            let length = length.map_or(LEASE_TIME, Duration::from_secs);
            match length.checked_sub(now.saturating_sub(*since)) {
                None | Some(Duration::ZERO) => Decision::Acquire,
                Some(left) => Decision::Wait(left),
            }
        }
    }
}

/// Returns the spec of a lease that `me` acquires at `now`.
fn acquired_lease(old: Option<&LeaseSpec>, me: &str, now: Timestamp) -> LeaseSpec {
    let kept = old.filter(|old| old.holder_identity.as_deref() == Some(me));
    let transitions = old.and_then(|old| old.lease_transitions).unwrap_or(0);
    LeaseSpec {
        holder_identity: Some(me.to_owned()),
        lease_duration_seconds: i32::try_from(LEASE_TIME.as_secs()).ok(),
        acquire_time: kept.and_then(|kept| kept.acquire_time.clone()).or(Some(MicroTime(now))),
        renew_time: Some(MicroTime(now)),
        lease_transitions: Some(if kept.is_some() || old.is_none() {
            transitions
        } else {
            transitions.saturating_add(1)
        }),
        ..LeaseSpec::default()
    }
}

/// Returns the lease's spec after its release.
fn released_lease(old: &LeaseSpec, now: Timestamp) -> LeaseSpec {
    LeaseSpec { holder_identity: None, renew_time: Some(MicroTime(now)), ..old.clone() }
}

/// Permission to write to the cluster. Check [`LeaseGuard::is_current`] before each write.
#[derive(Debug, Clone)]
pub struct LeaseGuard {
    terms: watch::Receiver<Term>,
    /// The last term for which this process is ready to write. `None` if the guard requires only
    /// the lease.
    ready: Option<watch::Receiver<u64>>,
    /// The last term that this process gave up.
    given_up: watch::Sender<u64>,
}

/// The state that the elector reports to the guards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Term {
    /// Whether this process has read or written the lease at least once.
    known: bool,
    /// Number of times that this process began to lead. A new term begins when the process acquires
    /// the lease, and when the process renews the lease after the guard has expired.
    number: u64,
    /// When the guard expires. `None` before this process acquires the lease, after it gives the
    /// lease up, and while another process holds the lease.
    until: Option<Instant>,
}

impl Term {
    /// Returns the number of the current term. Returns `None` if this process does not lead.
    fn current_number(self) -> Option<u64> {
        self.until.is_some_and(|until| Instant::now() < until).then_some(self.number)
    }
}

impl LeaseGuard {
    /// Returns whether this process is ready to write, and the lease remains valid long enough to
    /// complete a write.
    pub fn is_current(&self) -> bool {
        let term = self.term();
        term.is_some_and(|term| self.ready.as_ref().is_none_or(|ready| *ready.borrow() >= term))
    }

    /// Returns the number of the current term, even if this process is not ready to write. Returns
    /// `None` if this process does not lead.
    pub(crate) fn term(&self) -> Option<u64> {
        self.terms.borrow().current_number()
    }

    /// Returns the number of the first term after `last` in which this process leads. Cancel-safe.
    pub(crate) async fn term_after(&mut self, last: u64) -> u64 {
        loop {
            if let Some(term) = self.term().filter(|term| *term > last) {
                return term;
            }
            if self.terms.changed().await.is_err() {
                // The elector has exited. `crate::run` handles its exit.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Returns a guard of the same lease that is current only in terms up to the number in `ready`.
    pub(crate) fn with_readiness(&self, ready: watch::Receiver<u64>) -> Self {
        Self { ready: Some(ready), ..self.clone() }
    }

    /// Ends a term in which this process cannot write, so that another process can lead. If no
    /// other process acquires the lease, this process acquires it again [`GIVE_UP_TIME`] after the
    /// lease's release.
    pub(crate) fn give_up(&self, term: u64) {
        self.given_up.send_replace(term);
    }

    /// Returns a guard that is current for an hour.
    #[cfg(test)]
    pub(crate) fn of_leader() -> Self {
        let (Channels { term: terms, .. }, guard) = new_guard();
        let until = Instant::now() + Duration::from_secs(3600);
        terms.send_replace(Term { known: true, number: 1, until: Some(until) });
        guard
    }

    /// Returns a guard of a process that does not lead.
    #[cfg(test)]
    pub(crate) fn of_standby() -> Self {
        new_guard().1
    }

    /// Returns whether this process has read or written the lease, so that it either leads or
    /// stands by.
    pub fn is_known(&self) -> bool {
        self.terms.borrow().known
    }

    /// Completes when this process gains or loses the permission to write. Cancel-safe, like
    /// `watch::Receiver::changed`.
    pub async fn changed(&mut self) {
        let led = self.is_current();
        loop {
            let Self { terms, ready, .. } = self;
            let ready_changed = async {
                let changed = match ready {
                    Some(ready) => ready.changed().await.is_ok(),
                    None => false,
                };
                if !changed {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                changed = terms.changed() => if changed.is_err() { break },
                () = ready_changed => {}
            }
            if self.is_current() != led {
                return;
            }
        }
        // The elector has exited. `crate::run` handles its exit.
        std::future::pending::<()>().await;
    }
}

/// Starts an elector on a separate thread. Returns the guard, and a future that resolves when the
/// elector has ended; see [`Elector::run`] for `stop` and `released`.
///
/// `connect` runs on the elector's thread, because a client's tasks belong to the runtime that
/// creates the client.
///
/// # Errors
/// Returns an error if the thread cannot be started. The future fails if the client cannot be
/// created, or the elector panics.
pub(crate) fn start(
    connect: impl FnOnce() -> anyhow::Result<Client> + Send + 'static,
    (namespace, name, me): (String, String, String),
    (stop, released): (CancellationToken, CancellationToken),
) -> anyhow::Result<(LeaseGuard, impl Future<Output = anyhow::Result<()>>)> {
    let (channels, guard) = new_guard();
    let (report, ended) = oneshot::channel();
    let elect = move || -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("failed to start the runtime")?.block_on(async {
            let api = Api::namespaced(connect()?, &namespace);
            Elector::with_channels(api, name, me, channels).run(stop, released).await;
            Ok(())
        })
    };
    let thread = std::thread::Builder::new().name("lease".to_owned());
    // The process ends when the future resolves, so no code joins the thread.
    thread.spawn(move || drop(report.send(elect()))).context("failed to start the lease thread")?;
    Ok((guard, async { ended.await.context("the lease thread panicked")? }))
}

/// State that an elector shares with its guards.
struct Channels {
    term: watch::Sender<Term>,
    given_up: watch::Receiver<u64>,
}

/// Returns a guard, and the channels through which an elector updates the guard.
fn new_guard() -> (Channels, LeaseGuard) {
    let (term, terms) = watch::channel(Term::default());
    let (sender, given_up) = watch::channel(0);
    (Channels { term, given_up }, LeaseGuard { terms, ready: None, given_up: sender })
}

/// The lease could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request failed.
    #[error("failed to read or write the lease")]
    Api(#[source] kube::Error),
    /// The API server did not answer in time.
    #[error("the API server did not answer a request for the lease within {} s", REQUEST_TIMEOUT.as_secs())]
    Timeout,
}

/// Acquires the lease and renews it.
pub struct Elector {
    api: Api<Lease>,
    name: String,
    me: String,
    started: Instant,
    last: Option<ObservedLease>,
    /// Whether a read since the last renewal showed that this process does not hold the lease, or
    /// that the process may not acquire the lease yet.
    interrupted: bool,
    /// The process does not acquire the lease before this time, because it gave up the lease.
    declines_until: Option<Instant>,
    channels: Channels,
}

impl Elector {
    /// Creates an elector and the guard that it renews.
    pub fn new(api: Api<Lease>, name: String, me: String) -> (Self, LeaseGuard) {
        let (channels, guard) = new_guard();
        (Self::with_channels(api, name, me, channels), guard)
    }

    fn with_channels(api: Api<Lease>, name: String, me: String, channels: Channels) -> Self {
        let (started, declines_until) = (Instant::now(), None);
        Self { api, name, me, started, last: None, interrupted: true, declines_until, channels }
    }

    /// Acquires and renews the lease until `stop` is cancelled. Then waits for `released`, which is
    /// cancelled once all writers have stopped, and releases the lease.
    pub async fn run(mut self, stop: CancellationToken, released: CancellationToken) {
        loop {
            let delay = match self.poll().await {
                Ok(delay) => delay,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "failed to renew the lease");
                    RETRY_DELAY
                }
            };
            // All branches are cancel-safe: they wait for a timer, a token and a value.
            let given_up = async {
                if self.channels.given_up.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(delay) => continue,
                () = given_up => {}
            }
            if self.end_term() {
                // Writes that started while the guard was valid complete or time out first.
                tokio::select! {
                    () = stop.cancelled() => break,
                    () = tokio::time::sleep(WRITE_TIME) => self.release().await,
                }
            }
        }
        // No other process may lead until all writers of this process have stopped.
        released.cancelled().await;
        self.release().await;
    }

    /// Ends the current term if this process gave it up. Returns whether the term ended.
    fn end_term(&mut self) -> bool {
        let given_up = *self.channels.given_up.borrow_and_update();
        let ends = self.channels.term.borrow().current_number() == Some(given_up);
        if ends {
            self.declines_until = Some(Instant::now() + WRITE_TIME + GIVE_UP_TIME);
            self.set_term(None);
        }
        ends
    }

    /// Returns the time until this process may acquire the lease. Returns `None` if the process may
    /// acquire the lease now.
    fn time_until_may_acquire(&self) -> Option<Duration> {
        let left = self.declines_until?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Reads the lease and executes the next step. Returns the delay before the next read.
    async fn poll(&mut self) -> Result<Duration, Error> {
        let sent = Instant::now();
        let lease = with_timeout(self.api.get_opt(&self.name)).await?;
        let now = sent - self.started;
        self.last = lease
            .as_ref()
            .map(|lease| ObservedLease::after_read(self.last.take(), lease.spec.clone().unwrap_or_default(), now));
        let decision =
            self.time_until_may_acquire().map_or_else(|| evaluate(self.last.as_ref(), &self.me, now), Decision::Wait);
        self.interrupted |= decision != Decision::Renew;
        let written = match decision {
            Decision::Wait(left) => {
                self.set_term(None);
                return Ok(left.min(POLL_INTERVAL));
            }
            Decision::Create => {
                let spec = acquired_lease(None, &self.me, Timestamp::now());
                let lease = Lease {
                    metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                    spec: Some(spec),
                };
                with_timeout(self.api.create(&PostParams::default(), &lease)).await
            }
            Decision::Acquire | Decision::Renew => {
                let mut lease = lease.unwrap_or_default();
                lease.spec = Some(acquired_lease(lease.spec.as_ref(), &self.me, Timestamp::now()));
                // The request includes the `resourceVersion` that was read. If two processes try to
                // acquire the lease at the same time, one of them receives a conflict.
                with_timeout(self.api.replace(&self.name, &PostParams::default(), &lease)).await
            }
        };
        match written {
            Ok(_) => {
                self.set_term(Some(sent + GUARD_TIME));
                Ok(RENEW_INTERVAL)
            }
            // Another process wrote first. Read the lease again after 100 ms.
            Err(Error::Api(kube::Error::Api(status))) if status.code == 409 => Ok(Duration::from_millis(100)),
            Err(error) => Err(error),
        }
    }

    fn set_term(&mut self, until: Option<Instant>) {
        let before = *self.channels.term.borrow();
        if before.current_number().is_some() != until.is_some() {
            tracing::info!(lease = self.name, identity = self.me, leader = until.is_some(), "leadership changed");
        }
        let interrupted = until.is_some() && std::mem::take(&mut self.interrupted);
        self.channels.term.send_modify(|term| {
            // Writers may have seen that the guard expired, and dropped their state.
            let begins = interrupted || until.is_some() && term.current_number().is_none();
            *term = Term { known: true, number: term.number + u64::from(begins), until };
        });
    }

    /// Releases the lease, so that the next leader does not wait for the lease to expire.
    async fn release(&mut self) {
        self.set_term(None);
        let released_lease = async {
            let Some(mut lease) = with_timeout(self.api.get_opt(&self.name)).await? else { return Ok(()) };
            let Some(spec) = lease.spec.take().filter(|spec| spec.holder_identity.as_deref() == Some(&self.me)) else {
                return Ok(());
            };
            lease.spec = Some(released_lease(&spec, Timestamp::now()));
            with_timeout(self.api.replace(&self.name, &PostParams::default(), &lease)).await.map(drop)
        };
        if let Err(error) = released_lease.await {
            tracing::warn!(error = &error as &dyn std::error::Error, "failed to release the lease");
        }
    }
}

async fn with_timeout<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
    tokio::time::timeout(REQUEST_TIMEOUT, request).await.map_err(|_| Error::Timeout)?.map_err(Error::Api)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn lease(holder: &str, seconds: Option<i32>) -> LeaseSpec {
        LeaseSpec {
            holder_identity: (!holder.is_empty()).then(|| holder.to_owned()),
            lease_duration_seconds: seconds,
            lease_transitions: Some(3),
            ..LeaseSpec::default()
        }
    }

    fn observed(holder: &str, since: u64) -> ObservedLease {
        ObservedLease { spec: lease(holder, Some(15)), since: Duration::from_secs(since) }
    }

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    #[test]
    fn an_absent_lease_is_created_and_a_free_lease_is_acquired() {
        assert_eq!(evaluate(None, "a", at(0)), Decision::Create);
        assert_eq!(evaluate(Some(&observed("", 0)), "a", at(0)), Decision::Acquire);
        let empty = ObservedLease { spec: lease("", None), since: at(0) };
        assert_eq!(
            evaluate(
                Some(&ObservedLease {
                    spec: LeaseSpec { holder_identity: Some(String::new()), ..empty.spec },
                    ..empty
                }),
                "a",
                at(0)
            ),
            Decision::Acquire
        );
    }

    #[test]
    fn a_lease_of_this_identity_is_renewed_even_after_a_restart() {
        assert_eq!(evaluate(Some(&observed("a", 0)), "a", at(0)), Decision::Renew);
        assert_eq!(evaluate(Some(&observed("a", 0)), "a", at(1000)), Decision::Renew);
    }

    #[test]
    fn a_lease_of_another_process_is_acquired_only_after_it_expires() {
        assert_eq!(evaluate(Some(&observed("b", 100)), "a", at(100)), Decision::Wait(15 * SECOND));
        assert_eq!(evaluate(Some(&observed("b", 100)), "a", at(114)), Decision::Wait(SECOND));
        assert_eq!(evaluate(Some(&observed("b", 100)), "a", at(115)), Decision::Acquire);
        // The default replaces a missing or negative duration.
        for seconds in [None, Some(-1)] {
            let malformed = ObservedLease { spec: lease("b", seconds), since: at(0) };
            assert_eq!(evaluate(Some(&malformed), "a", at(14)), Decision::Wait(SECOND));
        }
    }

    #[test]
    fn a_renewal_restarts_the_wait_regardless_of_its_timestamp() {
        let first = ObservedLease::after_read(None, lease("b", Some(15)), at(0));
        let unchanged = ObservedLease::after_read(Some(first.clone()), lease("b", Some(15)), at(14));
        assert_eq!(unchanged, first);
        let changed = LeaseSpec { renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)), ..lease("b", Some(15)) };
        let renewed = ObservedLease::after_read(Some(unchanged), changed, at(14));
        assert_eq!(evaluate(Some(&renewed), "a", at(16)), Decision::Wait(13 * SECOND));
    }

    #[test]
    fn a_guard_expires_before_another_process_may_acquire_the_lease() {
        assert!(GUARD_TIME + REQUEST_TIMEOUT < LEASE_TIME);
        let failed = REQUEST_TIMEOUT + REQUEST_TIMEOUT;
        assert!(RENEW_INTERVAL + failed + RETRY_DELAY < GUARD_TIME, "a guard outlives one failed renewal");
    }

    /// Returns an API server that stores one lease. After each write, the server sends the number
    /// of writes.
    fn lease_server(writes: std::sync::mpsc::Sender<u64>) -> Client {
        let state = std::sync::Arc::new(std::sync::Mutex::new((json!({"metadata": {"name": "l"}}), 0_u64)));
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (state, writes) = (std::sync::Arc::clone(&state), writes.clone());
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut state = state.lock().unwrap();
                if !body.is_empty() {
                    *state = (serde_json::from_slice(&body).unwrap(), state.1 + 1);
                    let _ = writes.send(state.1);
                }
                Ok::<_, std::convert::Infallible>(http::Response::new(kube::client::Body::from(
                    state.0.to_string().into_bytes(),
                )))
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn a_blocked_main_thread_does_not_delay_renewals() {
        let (written, writes) = std::sync::mpsc::channel();
        let (stop, released) = (CancellationToken::new(), CancellationToken::new());
        let names = ("default".to_owned(), "l".to_owned(), "me".to_owned());
        let connect = move || Ok(lease_server(written));
        let (guard, ended) = start(connect, names, (stop.clone(), released.clone())).unwrap();
        let began = std::time::Instant::now();
        // Blocks this thread, and therefore the runtime of the test.
        while began.elapsed() <= LEASE_TIME {
            writes.recv_timeout(LEASE_TIME).unwrap();
        }
        assert!(guard.is_current(), "the elector renewed the lease");
        stop.cancel();
        released.cancel();
        ended.await.unwrap();
        assert!(!guard.is_current(), "the lease was released");
    }

    #[tokio::test(start_paused = true)]
    async fn a_guard_with_readiness_is_current_only_in_ready_terms() {
        let (written, _writes) = std::sync::mpsc::channel();
        let api = Api::namespaced(lease_server(written), "default");
        let (mut elector, lease) = Elector::new(api, "l".to_owned(), "me".to_owned());
        let (ready, caught_up) = watch::channel(0);
        let mut guard = lease.with_readiness(caught_up);
        assert_eq!((lease.term(), guard.is_current()), (None, false));
        elector.poll().await.unwrap();
        assert_eq!((lease.term(), lease.is_current(), guard.is_current()), (Some(1), true, false));
        ready.send_replace(1);
        assert!(guard.is_current());
        elector.poll().await.unwrap();
        assert_eq!((lease.term(), guard.is_current()), (Some(1), true), "a renewal continues the term");
        tokio::join!(guard.changed(), elector.release());
        assert!(!guard.is_current());
        elector.poll().await.unwrap();
        assert_eq!((lease.term(), guard.is_current()), (Some(2), false), "another process may have led");
        ready.send_replace(2);
        assert!(guard.is_current());
        tokio::time::sleep(GUARD_TIME).await;
        assert_eq!((lease.term(), guard.is_current()), (None, false), "the guard has expired");
        elector.poll().await.unwrap();
        assert_eq!((lease.term(), guard.is_current()), (Some(3), false), "the expiry made writers drop their state");
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_gives_up_the_lease_acquires_it_again_only_if_no_other_process_does() {
        for other_leads in [false, true] {
            let (written, writes) = std::sync::mpsc::channel();
            let client = lease_server(written);
            let api = || Api::<Lease>::namespaced(client.clone(), "default");
            let (elector, mut guard) = Elector::new(api(), "l".to_owned(), "me".to_owned());
            let (mut other, other_guard) = Elector::new(api(), "l".to_owned(), "other".to_owned());
            let stop = CancellationToken::new();
            let test = async {
                assert_eq!(guard.term_after(0).await, 1);
                guard.give_up(0);
                tokio::time::sleep(LEASE_TIME).await;
                assert_eq!(guard.term(), Some(1), "that term is over");
                guard.give_up(1);
                let began = Instant::now();
                guard.changed().await;
                assert_eq!((guard.term(), began.elapsed()), (None, Duration::ZERO));
                let holder = async || api().get("l").await.unwrap().spec.unwrap().holder_identity;
                assert_eq!(holder().await.as_deref(), Some("me"), "writes may be in flight");
                tokio::time::sleep(WRITE_TIME + SECOND).await;
                assert_eq!(holder().await, None, "the lease is free");
                if other_leads {
                    for _ in 0..2 * GIVE_UP_TIME.as_secs() {
                        other.poll().await.unwrap();
                        assert_eq!((guard.term(), other_guard.is_current()), (None, true));
                        tokio::time::sleep(SECOND).await;
                    }
                } else {
                    assert_eq!(guard.term_after(1).await, 2);
                    let elapsed = began.elapsed();
                    assert!(elapsed >= GIVE_UP_TIME && elapsed < 2 * GIVE_UP_TIME, "{elapsed:?}");
                }
                stop.cancel();
            };
            tokio::join!(test, elector.run(stop.clone(), stop.clone()));
            drop(writes);
        }
    }

    #[test]
    fn acquiring_the_lease_counts_a_transition_and_renewing_it_does_not() {
        let now = Timestamp::UNIX_EPOCH;
        let taken = acquired_lease(Some(&lease("b", Some(15))), "a", now);
        assert_eq!(taken.lease_transitions, Some(4));
        assert_eq!(taken.acquire_time, Some(MicroTime(now)));
        let later = now + jiff::SignedDuration::from_secs(5);
        let renewed = acquired_lease(Some(&taken), "a", later);
        assert_eq!((renewed.lease_transitions, renewed.acquire_time.as_ref()), (Some(4), Some(&MicroTime(now))));
        assert_eq!(renewed.renew_time, Some(MicroTime(later)));
        assert_eq!(acquired_lease(None, "a", now).lease_transitions, Some(0));
        assert_eq!(released_lease(&renewed, later).holder_identity, None);
    }
}
