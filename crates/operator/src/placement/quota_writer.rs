//! Writes the statuses of quotas and the capacity label of pods.
//!
//! A separate task writes them. So neither a slow API server nor many quotas delay the release of
//! pods. [`PendingWrites`] decides which writes are due and is pure. [`run`] writes.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_api::GpuQuotaStatus;
use cleave_api::names::{CAPACITY_LABEL, OPERATOR_FIELD_MANAGER};
use futures::StreamExt as _;
use kube::Client;
use tokio::sync::watch;

use super::quota_reports::CapacityLabel;
use crate::pod_metadata::patch_metadata;
use crate::task::Context;
use crate::write::{MAX_IN_FLIGHT, with_timeout};

/// Minimum time between two rounds of writes.
const ROUND_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of statuses written in one round.
const MAX_STATUSES: usize = 50;
/// Maximum number of labels written in one round.
const MAX_LABELS: usize = 20;
/// Minimum time between two different statuses of one quota.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum time between two writes of the label of one pod, and between two writes of the same
/// status.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum time between two writes of the same status of a malformed quota. The operator cannot
/// read the present status of such a quota, so it does not know whether a write is needed.
const UNREADABLE_REPEAT_INTERVAL: Duration = Duration::from_secs(3600);
/// Delay before the first retry of a failed write. Each further failure doubles the delay.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay before a retry.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);

/// The statuses and labels that differ from those in the cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct QuotaChanges {
    /// Statuses by the name of the quota.
    pub(crate) statuses: Vec<(String, GpuQuotaStatus)>,
    pub(crate) labels: Vec<CapacityLabel>,
    /// Names of the quotas that cannot be read. Their statuses may already be in the cluster.
    pub(crate) malformed: BTreeSet<String>,
}

/// What a write changes: a quota, by name, or a pod, by UID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Quota(String),
    Pod(String),
}

#[derive(Debug, Clone, PartialEq)]
enum Write {
    Status { quota: String, status: Box<GpuQuotaStatus>, is_readable: bool },
    Label(CapacityLabel),
}

impl Write {
    fn target(&self) -> Target {
        match self {
            Self::Status { quota, .. } => Target::Quota(quota.clone()),
            Self::Label(label) => Target::Pod(label.uid.clone()),
        }
    }
}

/// The last attempt to write to a target.
#[derive(Debug)]
struct Attempt {
    write: Write,
    at: Duration,
    /// Number of consecutive failures.
    failures: u32,
}

impl Attempt {
    /// Returns the earliest time of `next`, a write to the same target.
    fn earliest(&self, next: &Write) -> Duration {
        let delay = match self.failures {
            0 if matches!(next, Write::Status { .. }) && *next != self.write => STATUS_INTERVAL,
            0 if matches!(next, Write::Status { is_readable: false, .. }) => UNREADABLE_REPEAT_INTERVAL,
            0 => REPEAT_INTERVAL,
            failures => {
                let doubled = 2_u32.saturating_pow(failures.saturating_sub(1));
                FIRST_RETRY_DELAY.saturating_mul(doubled).min(MAX_RETRY_DELAY)
            }
        };
        self.at.saturating_add(delay)
    }
}

/// Writes that are due now or later. Times are durations since the task started.
#[derive(Debug, Default)]
struct PendingWrites {
    writes: BTreeMap<Target, Write>,
    attempts: BTreeMap<Target, Attempt>,
    /// Earliest time of the next round.
    next_round: Duration,
}

impl PendingWrites {
    /// Replaces all pending writes.
    fn replace(&mut self, changes: QuotaChanges, now: Duration) {
        let statuses = changes.statuses.into_iter();
        let statuses = statuses.map(|(quota, status)| {
            let is_readable = !changes.malformed.contains(&quota);
            Write::Status { quota, status: Box::new(status), is_readable }
        });
        let writes = statuses.chain(changes.labels.into_iter().map(Write::Label));
        self.writes = writes.map(|write| (write.target(), write)).collect();
        let writes = &self.writes;
        self.attempts
            .retain(|target, attempt| writes.contains_key(target) || now < attempt.at.saturating_add(REPEAT_INTERVAL));
    }

    /// Returns the earliest time of a pending write.
    fn due(&self, target: &Target, write: &Write) -> Duration {
        let earliest = self.attempts.get(target).map_or(Duration::ZERO, |attempt| attempt.earliest(write));
        earliest.max(self.next_round)
    }

    /// Returns the delay until the next write is due. Returns `None` if no write is pending.
    fn delay(&self, now: Duration) -> Option<Duration> {
        let next = self.writes.iter().map(|(target, write)| self.due(target, write)).min();
        next.map(|next| next.saturating_sub(now))
    }

    /// Removes and returns the writes of the next round. Targets that were not written for the
    /// longest time are first, so that targets that change often do not delay the others.
    fn take_due(&mut self, now: Duration) -> Vec<Write> {
        let due = self.writes.iter().filter(|(target, write)| self.due(target, write) <= now);
        let mut due: Vec<Target> = due.map(|(target, _)| target.clone()).collect();
        due.sort_by_key(|target| self.attempts.get(target).map(|attempt| attempt.at));
        if !due.is_empty() {
            self.next_round = now.saturating_add(ROUND_INTERVAL);
        }
        let (quotas, pods): (Vec<Target>, Vec<Target>) =
            due.into_iter().partition(|target| matches!(target, Target::Quota(_)));
        let round = quotas.into_iter().take(MAX_STATUSES).chain(pods.into_iter().take(MAX_LABELS));
        round.filter_map(|target| self.writes.remove(&target)).collect()
    }

    /// Records the result of a write. A failed write is pending again.
    fn record(&mut self, write: Write, is_written: bool, now: Duration) {
        let target = write.target();
        let before = self.attempts.get(&target).map_or(0, |attempt| attempt.failures);
        let failures = if is_written { 0 } else { before.saturating_add(1) };
        if !is_written {
            self.writes.insert(target.clone(), write.clone());
        }
        self.attempts.insert(target, Attempt { write, at: now, failures });
    }
}

/// Writes each change until `stop` is cancelled or the sender of `changes` is dropped.
pub(crate) async fn run(context: Context, mut changes: watch::Receiver<QuotaChanges>) {
    let started = Instant::now();
    let mut pending = PendingWrites::default();
    loop {
        let delay = pending.delay(started.elapsed());
        // Cancel-safe: the branches read a watch channel, or wait for a token or a timer.
        tokio::select! {
            () = context.stop.cancelled() => return,
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
                pending.replace(changes.borrow_and_update().clone(), started.elapsed());
            }
            () = tokio::time::sleep(delay.unwrap_or_default()), if delay.is_some() => {}
        }
        if !context.claim.is_current() {
            pending = PendingWrites::default();
            continue;
        }
        let writes = pending.take_due(started.elapsed()).into_iter().map(|write| {
            let context = &context;
            async move {
                let is_written = context.claim.is_current() && carry_out(context, &write).await;
                (write, is_written)
            }
        });
        let results: Vec<(Write, bool)> = futures::stream::iter(writes).buffer_unordered(MAX_IN_FLIGHT).collect().await;
        for (write, is_written) in results {
            pending.record(write, is_written, started.elapsed());
        }
    }
}

/// Carries out a write. Returns whether it succeeded, or its object no longer exists.
async fn carry_out(context: &Context, write: &Write) -> bool {
    match write {
        Write::Status { quota, status, .. } => write_status(&context.client, quota, status).await,
        Write::Label(label) => {
            let metadata = serde_json::json!({"labels": {CAPACITY_LABEL: label.value}});
            patch_metadata(&context.client, (&label.pod, &label.uid), metadata).await
        }
    }
}

/// Writes a status. The JSON patch replaces the status as a whole. A merge patch would keep the
/// keys that the new status no longer has, such as the reasons of pods that were released, and a
/// server-side apply would keep those that another field manager wrote.
async fn write_status(client: &Client, quota: &str, status: &GpuQuotaStatus) -> bool {
    let patch = serde_json::json!([{"op": "add", "path": "/status", "value": status}]);
    let path = format!("/apis/cleave.dev/v1alpha1/gpuquotas/{quota}/status?fieldManager={OPERATOR_FIELD_MANAGER}");
    let request = http::Request::patch(path)
        .header(http::header::CONTENT_TYPE, "application/json-patch+json")
        .body(patch.to_string().into_bytes());
    let send = async { client.request_text(request.map_err(kube::Error::HttpError)?).await };
    match with_timeout(send).await {
        Some(Ok(_)) => true,
        Some(Err(kube::Error::Api(status))) if status.code == 404 => true,
        Some(Err(error)) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(quota, error, "failed to write the status of a quota");
            false
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn status(message: &str) -> GpuQuotaStatus {
        GpuQuotaStatus { used: message.to_owned(), ..GpuQuotaStatus::default() }
    }

    fn statuses<const N: usize>(changes: [(&str, &str); N]) -> QuotaChanges {
        let statuses = changes.map(|(name, used)| (name.to_owned(), status(used)));
        QuotaChanges { statuses: statuses.into(), ..QuotaChanges::default() }
    }

    fn labels(count: usize) -> QuotaChanges {
        let label = |index| CapacityLabel {
            pod: format!("team/p{index}"),
            uid: format!("u{index:03}"),
            value: Some("over-quota"),
        };
        QuotaChanges { labels: (0..count).map(label).collect(), ..QuotaChanges::default() }
    }

    /// Writes what is due, and returns the number of writes.
    fn write_all(pending: &mut PendingWrites, is_written: bool, now: Duration) -> usize {
        let due = pending.take_due(now);
        let count = due.len();
        due.into_iter().for_each(|write| pending.record(write, is_written, now));
        count
    }

    #[test]
    fn a_status_is_written_once_although_the_watch_reports_it_late() {
        let mut pending = PendingWrites::default();
        pending.replace(statuses([("a", "1")]), SECOND);
        assert_eq!(write_all(&mut pending, true, SECOND), 1);
        // The store does not have the written status yet, so the next report contains it again.
        pending.replace(statuses([("a", "1")]), SECOND * 2);
        assert_eq!(write_all(&mut pending, true, SECOND * 2), 0);
        pending.replace(statuses([("a", "2")]), SECOND * 3);
        assert_eq!(write_all(&mut pending, true, SECOND * 3), 1, "another status is written");
        pending.replace(statuses([]), SECOND * 4);
        assert_eq!(pending.delay(SECOND * 4), None, "nothing wakes the task");
    }

    #[test]
    fn a_status_that_always_changes_is_written_once_a_second() {
        let mut pending = PendingWrites::default();
        let mut written = 0;
        for tick in 0..100_u32 {
            let (now, used) = (SECOND / 10 * tick, tick.to_string());
            pending.replace(statuses([("a", used.as_str())]), now);
            written += write_all(&mut pending, true, now);
        }
        assert_eq!(written, 10);
    }

    #[test]
    fn quotas_that_always_change_do_not_delay_the_others() {
        let mut pending = PendingWrites::default();
        let mut written = BTreeMap::new();
        for tick in 0..20_u32 {
            let now = ROUND_INTERVAL * tick;
            let changed = (0..200).map(|quota| (format!("q{quota:03}"), status(&tick.to_string())));
            pending.replace(QuotaChanges { statuses: changed.collect(), ..QuotaChanges::default() }, now);
            let due = pending.take_due(now);
            assert!(due.len() <= MAX_STATUSES, "{}", due.len());
            for write in due {
                *written.entry(write.target()).or_insert(0) += 1;
                pending.record(write, true, now);
            }
        }
        // 20 rounds of 50 writes for 200 quotas.
        assert_eq!((written.len(), written.values().min(), written.values().max()), (200, Some(&5), Some(&5)));
    }

    #[test]
    fn a_failed_status_is_retried_with_longer_delays_and_others_are_not_delayed() {
        let mut pending = PendingWrites::default();
        pending.replace(statuses([("a", "1")]), SECOND);
        let mut now = SECOND;
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(write_all(&mut pending, false, now), 1);
            assert_eq!(pending.delay(now), Some(Duration::from_secs(seconds)));
            now += Duration::from_secs(seconds);
        }
        assert_eq!(write_all(&mut pending, false, now), 1);
        now += SECOND;
        pending.replace(statuses([("a", "2"), ("b", "1")]), now);
        let due = pending.take_due(now);
        assert_eq!(due.iter().map(Write::target).collect::<Vec<_>>(), [Target::Quota("b".to_owned())]);
    }

    #[test]
    fn labels_are_written_in_small_rounds() {
        let mut pending = PendingWrites::default();
        pending.replace(labels(50), SECOND);
        let mut now = SECOND;
        for expected in [20, 20, 10] {
            assert_eq!(write_all(&mut pending, true, now), expected);
            assert_eq!(write_all(&mut pending, true, now), 0, "the next round has to wait");
            now += ROUND_INTERVAL;
        }
        assert_eq!(pending.delay(now), None);
    }

    #[test]
    fn a_label_that_someone_else_keeps_changing_is_written_at_most_every_ten_seconds() {
        let mut pending = PendingWrites::default();
        pending.replace(labels(1), SECOND);
        assert_eq!(write_all(&mut pending, true, SECOND), 1);
        pending.replace(labels(1), SECOND * 2);
        assert_eq!((write_all(&mut pending, true, SECOND * 2), pending.delay(SECOND * 2)), (0, Some(SECOND * 9)));
    }

    #[test]
    fn the_same_status_of_a_malformed_quota_is_written_once_an_hour() {
        let malformed =
            |used: &str| QuotaChanges { malformed: BTreeSet::from(["a".to_owned()]), ..statuses([("a", used)]) };
        let (mut pending, mut written) = (PendingWrites::default(), Vec::new());
        for second in 1..4000 {
            let now = SECOND * second;
            pending.replace(malformed(if second < 100 { "1" } else { "2" }), now);
            written.extend((write_all(&mut pending, true, now) > 0).then_some(second));
        }
        assert_eq!(written, [1, 100, 3700]);
        pending.replace(statuses([("a", "2")]), SECOND * 4000);
        assert_eq!(write_all(&mut pending, true, SECOND * 4000), 1, "the quota can be read again");
    }

    #[tokio::test]
    async fn a_status_replaces_the_earlier_one_whoever_wrote_it() {
        let (service, mut server) = tower_test::mock::pair::<http::Request<Body>, http::Response<Body>>();
        let client = Client::new(service, "default");
        let answer = async {
            let (request, reply) = server.next_request().await.unwrap();
            reply.send_response(http::Response::new(Body::from(b"{}".to_vec())));
            let line = format!("{} {}", request.method(), request.uri());
            let kind = request.headers()[http::header::CONTENT_TYPE].to_str().unwrap().to_owned();
            (line, kind, request.into_body().collect_bytes().await.unwrap())
        };
        let new = status("1");
        let (is_written, (line, kind, body)) = tokio::join!(write_status(&client, "team-a", &new), answer);
        assert!(is_written);
        assert_eq!(line, "PATCH /apis/cleave.dev/v1alpha1/gpuquotas/team-a/status?fieldManager=cleave-operator");
        assert_eq!(kind, "application/json-patch+json");
        let patch: json_patch::Patch = serde_json::from_slice(&body).unwrap();
        for before in [json!({}), json!({"status": {"used": "2", "waiting": {"reasons": {"OverMax": 3}}}})] {
            let mut object: Value = before;
            json_patch::patch(&mut object, &patch).unwrap();
            assert_eq!(object["status"], serde_json::to_value(&new).unwrap());
        }
    }
}
