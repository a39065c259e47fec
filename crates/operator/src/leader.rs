//! Who writes: the holder of a lease.
//!
//! [`evaluate`] decides, purely; [`Elector::run`] reads, decides and writes. The holder has a
//! [`Claim`] that ends by itself some time before the others may take the lease, so a holder that
//! cannot reach the API server stops writing before another starts. Nobody's clock is compared with
//! anybody else's: that a lease was not renewed is measured from when this process saw it last
//! change.
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Api;
use kube::api::PostParams;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long others leave a lease alone that is not renewed. As in Kubernetes' own controllers.
pub const LEASE: Duration = Duration::from_secs(15);
/// How long a claim lasts after the request that renewed it was sent: by then the writes that it
/// allowed are done or given up.
pub const CLAIM: Duration = Duration::from_secs(10);
/// How often it is renewed: a claim outlives one failed renewal.
const RENEW: Duration = Duration::from_secs(4);
/// How often the others look, and how soon a failed request is repeated.
const LOOK: Duration = Duration::from_secs(2);
/// How long a request may take.
const REQUEST: Duration = Duration::from_secs(4);

/// A lease as this process saw it.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// What it says.
    pub spec: LeaseSpec,
    /// When it first said so, by this process's own clock.
    pub since: Duration,
}

impl Seen {
    /// What is seen when `spec` is read after `before` was.
    pub fn next(before: Option<Self>, spec: LeaseSpec, now: Duration) -> Self {
        before.filter(|before| before.spec == spec).unwrap_or(Self { spec, since: now })
    }
}

/// What to do about the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// There is none: make it.
    Create,
    /// It is free, or its holder is gone: take it.
    Take,
    /// It is ours: renew it.
    Renew,
    /// It is another's for at least this long.
    Wait(Duration),
}

/// Decides what to do about the lease as it was last seen.
pub fn evaluate(seen: Option<&Seen>, me: &str, now: Duration) -> Decision {
    let Some(Seen { spec, since }) = seen else { return Decision::Create };
    match spec.holder_identity.as_deref() {
        None | Some("") => Decision::Take,
        // After a restart in place the name is the same, and the former process is gone.
        Some(holder) if holder == me => Decision::Renew,
        Some(_) => {
            let length = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
            let length = length.map_or(LEASE, Duration::from_secs);
            match length.checked_sub(now.saturating_sub(*since)) {
                None | Some(Duration::ZERO) => Decision::Take,
                Some(left) => Decision::Wait(left),
            }
        }
    }
}

/// The lease's spec when `me` holds it from now on.
fn held(old: Option<&LeaseSpec>, me: &str, now: Timestamp) -> LeaseSpec {
    let kept = old.filter(|old| old.holder_identity.as_deref() == Some(me));
    let transitions = old.and_then(|old| old.lease_transitions).unwrap_or(0);
    LeaseSpec {
        holder_identity: Some(me.to_owned()),
        lease_duration_seconds: i32::try_from(LEASE.as_secs()).ok(),
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

/// The lease's spec when nobody holds it any more.
fn vacated(old: &LeaseSpec, now: Timestamp) -> LeaseSpec {
    LeaseSpec { holder_identity: None, renew_time: Some(MicroTime(now)), ..old.clone() }
}

/// Whether this process may write, to be asked before each write.
#[derive(Debug, Clone)]
pub struct Claim(watch::Receiver<Term>);

/// What the elector knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Term {
    /// The lease was read or written at least once: this process leads or stands by.
    known: bool,
    /// When the claim ends; none while another leads.
    until: Option<Instant>,
}

impl Claim {
    /// Whether this process holds the lease, and for long enough still.
    pub fn is_current(&self) -> bool {
        self.0.borrow().until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether it is known who leads.
    pub fn is_known(&self) -> bool {
        self.0.borrow().known
    }

    /// Returns when this process became the leader or ceased to be. Cancel-safe, as
    /// `watch::Receiver::changed` is.
    pub async fn turned(&mut self) {
        let led = self.is_current();
        while self.0.changed().await.is_ok() {
            if self.is_current() != led {
                return;
            }
        }
        // The elector is gone; its end is noticed elsewhere.
        std::future::pending::<()>().await;
    }
}

/// The lease could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server, or the way there.
    #[error("the lease could not be read or written")]
    Api(#[source] kube::Error),
    /// No answer.
    #[error("the API server did not answer about the lease within {} s", REQUEST.as_secs())]
    Timeout,
}

/// Holds the lease, or waits for it.
pub struct Elector {
    api: Api<Lease>,
    name: String,
    me: String,
    started: Instant,
    seen: Option<Seen>,
    term: watch::Sender<Term>,
}

impl Elector {
    /// An elector and the claim that it keeps.
    pub fn new(api: Api<Lease>, name: String, me: String) -> (Self, Claim) {
        let (term, claim) = watch::channel(Term::default());
        (Self { api, name, me, started: Instant::now(), seen: None, term }, Claim(claim))
    }

    /// Holds the lease until `stop`, then gives it away; `released` says when nothing is written
    /// any more.
    pub async fn run(mut self, stop: CancellationToken, released: CancellationToken) {
        loop {
            let pause = match self.turn().await {
                Ok(pause) => pause,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "the lease is not renewed");
                    LOOK
                }
            };
            // Both are cancel-safe: nothing is lost by dropping a timer or a wait for a token.
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(pause) => {}
            }
        }
        // Last of all: until the writers are done, nobody else may start.
        released.cancelled().await;
        self.vacate().await;
    }

    /// One look at the lease; returns when to look again.
    async fn turn(&mut self) -> Result<Duration, Error> {
        let sent = Instant::now();
        let lease = within(self.api.get_opt(&self.name)).await?;
        let now = sent - self.started;
        self.seen =
            lease.as_ref().map(|lease| Seen::next(self.seen.take(), lease.spec.clone().unwrap_or_default(), now));
        let written = match evaluate(self.seen.as_ref(), &self.me, now) {
            Decision::Wait(left) => {
                self.tell(None);
                return Ok(left.min(LOOK));
            }
            Decision::Create => {
                let spec = held(None, &self.me, Timestamp::now());
                let lease = Lease {
                    metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                    spec: Some(spec),
                };
                within(self.api.create(&PostParams::default(), &lease)).await
            }
            Decision::Take | Decision::Renew => {
                let mut lease = lease.unwrap_or_default();
                lease.spec = Some(held(lease.spec.as_ref(), &self.me, Timestamp::now()));
                // The resource version that was read goes with it: of two that take it at once, one
                // gets a conflict.
                within(self.api.replace(&self.name, &PostParams::default(), &lease)).await
            }
        };
        match written {
            Ok(_) => {
                self.tell(Some(sent + CLAIM));
                Ok(RENEW)
            }
            // Another was faster; look again at once to see who.
            Err(Error::Api(kube::Error::Api(status))) if status.code == 409 => Ok(Duration::from_millis(100)),
            Err(error) => Err(error),
        }
    }

    fn tell(&self, until: Option<Instant>) {
        let led = self.term.borrow().until.is_some_and(|until| Instant::now() < until);
        if led != until.is_some() {
            tracing::info!(lease = self.name, identity = self.me, leader = until.is_some(), "leadership turned");
        }
        self.term.send_replace(Term { known: true, until });
    }

    /// Gives the lease away, so that the next need not wait for its end.
    async fn vacate(&mut self) {
        self.term.send_replace(Term { known: true, until: None });
        let given = async {
            let Some(mut lease) = within(self.api.get_opt(&self.name)).await? else { return Ok(()) };
            let Some(spec) = lease.spec.take().filter(|spec| spec.holder_identity.as_deref() == Some(&self.me)) else {
                return Ok(());
            };
            lease.spec = Some(vacated(&spec, Timestamp::now()));
            within(self.api.replace(&self.name, &PostParams::default(), &lease)).await.map(drop)
        };
        if let Err(error) = given.await {
            tracing::warn!(error = &error as &dyn std::error::Error, "the lease could not be given away");
        }
    }
}

async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
    tokio::time::timeout(REQUEST, request).await.map_err(|_| Error::Timeout)?.map_err(Error::Api)
}

#[cfg(test)]
mod tests {
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

    fn seen(holder: &str, since: u64) -> Seen {
        Seen { spec: lease(holder, Some(15)), since: Duration::from_secs(since) }
    }

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    #[test]
    fn no_lease_is_made_and_a_free_one_is_taken() {
        assert_eq!(evaluate(None, "a", at(0)), Decision::Create);
        assert_eq!(evaluate(Some(&seen("", 0)), "a", at(0)), Decision::Take);
        let empty = Seen { spec: lease("", None), since: at(0) };
        assert_eq!(
            evaluate(
                Some(&Seen { spec: LeaseSpec { holder_identity: Some(String::new()), ..empty.spec }, ..empty }),
                "a",
                at(0)
            ),
            Decision::Take
        );
    }

    #[test]
    fn ones_own_is_renewed_even_after_a_restart() {
        assert_eq!(evaluate(Some(&seen("a", 0)), "a", at(0)), Decision::Renew);
        assert_eq!(evaluate(Some(&seen("a", 0)), "a", at(1000)), Decision::Renew);
    }

    #[test]
    fn anothers_is_left_alone_until_it_was_not_renewed_for_its_whole_length() {
        assert_eq!(evaluate(Some(&seen("b", 100)), "a", at(100)), Decision::Wait(15 * SECOND));
        assert_eq!(evaluate(Some(&seen("b", 100)), "a", at(114)), Decision::Wait(SECOND));
        assert_eq!(evaluate(Some(&seen("b", 100)), "a", at(115)), Decision::Take);
        // A lease without a length, or with nonsense in it, has ours.
        for seconds in [None, Some(-1)] {
            let strange = Seen { spec: lease("b", seconds), since: at(0) };
            assert_eq!(evaluate(Some(&strange), "a", at(14)), Decision::Wait(SECOND));
        }
    }

    #[test]
    fn a_renewal_starts_the_wait_anew_whatever_its_clock_says() {
        let first = Seen::next(None, lease("b", Some(15)), at(0));
        let unchanged = Seen::next(Some(first.clone()), lease("b", Some(15)), at(14));
        assert_eq!(unchanged, first);
        let anew = LeaseSpec { renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)), ..lease("b", Some(15)) };
        let renewed = Seen::next(Some(unchanged), anew, at(14));
        assert_eq!(evaluate(Some(&renewed), "a", at(16)), Decision::Wait(13 * SECOND));
    }

    #[test]
    fn a_claim_ends_before_others_may_take_the_lease() {
        assert!(CLAIM + REQUEST < LEASE);
        assert!(RENEW + LOOK + REQUEST <= CLAIM, "a claim outlives one failed renewal");
    }

    #[test]
    fn taking_counts_a_transition_and_renewing_does_not() {
        let now = Timestamp::UNIX_EPOCH;
        let taken = held(Some(&lease("b", Some(15))), "a", now);
        assert_eq!(taken.lease_transitions, Some(4));
        assert_eq!(taken.acquire_time, Some(MicroTime(now)));
        let later = now + jiff::SignedDuration::from_secs(5);
        let renewed = held(Some(&taken), "a", later);
        assert_eq!((renewed.lease_transitions, renewed.acquire_time.as_ref()), (Some(4), Some(&MicroTime(now))));
        assert_eq!(renewed.renew_time, Some(MicroTime(later)));
        assert_eq!(held(None, "a", now).lease_transitions, Some(0));
        assert_eq!(vacated(&renewed, later).holder_identity, None);
    }
}
