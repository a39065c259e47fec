//! The status of quotas.
use std::collections::BTreeMap;

use cleave_api::GpuQuota;
use cleave_api::gpuquota::{GpuQuotaStatus, QuotaMode, QuotaPods, QuotaUnnamed, QuotaWaiting};
use cleave_api::names::REASON_ALSO_KUEUE;
use cleave_plan::quota::{Amount, Book, GPU, Owner, Place, Pod, Unit, Usage, World};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::validate::Problem;
use crate::policies::demand::{Reason, WaitingPod};

/// A pool at the end of the last reconcile.
pub struct PoolView<'a> {
    /// The pods and GPUs.
    pub world: &'a World,
    /// The accounts.
    pub book: Book<'a>,
    /// What the quotas count.
    pub unit: Unit,
}

/// The waiting pods of a quota: numbers, amounts and reasons.
#[derive(Default)]
pub(crate) struct WaitingPods {
    pods: u32,
    /// Amount that the pods request.
    pub(crate) amount: Amount,
    /// Number of pods by reason.
    pub(crate) reasons: BTreeMap<String, u32>,
    /// Number and requested amount of the waiting pods within the guarantee, by reason.
    within: BTreeMap<&'static str, (u32, Amount)>,
}

impl WaitingPods {
    /// Returns the amount that waiting pods within the guarantee request.
    pub(crate) fn unmet(&self) -> Amount {
        self.within.values().map(|(_, amount)| *amount).sum()
    }
}

/// Returns the status of a quota, and its waiting pods. `absent` contains the namespaces of the
/// quota that do not exist. `pool` is `None` if the quota is in no pool, because it is not valid.
/// `waits` contains each pod's reason to wait at the gate. `kueue` are the quota's pods that Kueue
/// admitted. With `shows_unnamed`, the status shows what pods without a quota use of the pool.
pub(crate) fn status(
    quota: &GpuQuota,
    (pool, problem): (Option<&PoolView<'_>>, Option<&Problem>),
    (absent, kueue): (&[&str], Option<&KueuePods>),
    (waits, shows_unnamed): (&BTreeMap<String, WaitingPod>, bool),
    now: Timestamp,
) -> (GpuQuotaStatus, WaitingPods) {
    let name = quota.metadata.name.as_deref().unwrap_or_default();
    let generation = quota.metadata.generation.unwrap_or_default();
    let known = pool.and_then(|pool| Some((pool, pool.book.usage(name)?)));
    let unit = pool.map_or(Unit::Gpus, |pool| pool.unit);
    let (usage, waiting, leaving) = match known {
        Some((pool, usage)) => (usage, waiting_pods(pool, name, waits), count_terminating_pods(pool.world, name)),
        None => (Usage::default(), WaitingPods::default(), 0),
    };
    let write = |amount: Amount| format_amount(amount, unit);
    let is_valid = known.is_some();
    let ready = match problem {
        None => (true, "Valid", valid_message(pool, absent)),
        Some(problem) => (false, problem.reason(), problem.to_string()),
    };
    let is_enforced = is_valid && quota.spec.mode == QuotaMode::Enforce;
    let enforced = match (is_enforced, is_valid) {
        (true, _) if kueue.is_some() => (true, REASON_ALSO_KUEUE, kueue.map(KueuePods::message).unwrap_or_default()),
        (true, _) => (
            true,
            "Enforced",
            "Pods beyond the maximum wait, and borrowers are evicted for pods within a guarantee".to_owned(),
        ),
        (_, true) => (false, "Counting", "The mode is Count: the quota neither delays nor evicts pods".to_owned()),
        _ => (false, "NotReady", "The quota is not valid, so its pods have no guarantee".to_owned()),
    };
    let guaranteed = match known {
        Some((pool, _)) => guaranteed_condition(pool, &waiting),
        None => (false, "NotReady", "The quota is not valid, so its pods have no guarantee".to_owned()),
    };
    let before = quota.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let conditions = [("Ready", ready), ("Guaranteed", guaranteed), ("Enforced", enforced)];
    let condition = |(type_, (holds, reason, message)): (&str, (bool, &str, String))| {
        let status = if holds { "True" } else { "False" };
        let same = before.iter().find(|before| before.type_ == type_ && before.status == status);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            observed_generation: Some(generation),
            last_transition_time: same.map_or(Time(now), |before| before.last_transition_time.clone()),
        }
    };
    let status = GpuQuotaStatus {
        observed_generation: generation,
        used: write(usage.used),
        held: write(usage.held),
        in_quota: write(usage.within),
        borrowed: write(usage.excess),
        lent: write(usage.lent),
        share: format_share(&usage, unit),
        cells: usage.cells.map(|cells| u32::try_from(cells).unwrap_or(u32::MAX)),
        pods: QuotaPods { within: usage.pods_within, over: usage.pods_over, leaving },
        unnamed: pool.filter(|_| shows_unnamed).map(unnamed),
        waiting: QuotaWaiting { pods: waiting.pods, gpus: write(waiting.amount), reasons: waiting.reasons.clone() },
        conditions: conditions.map(condition).into(),
    };
    (status, waiting)
}

/// Pods of a quota that Kueue admitted.
#[derive(Debug, Default)]
pub(crate) struct KueuePods {
    /// Number of the pods.
    pub(crate) count: usize,
    /// The first of them by name, as `namespace/name`.
    pub(crate) first: String,
}

impl KueuePods {
    fn message(&self) -> String {
        format!(
            "Kueue admits pods of this quota too: {}, such as {}. Each of the two queues can delay pods that the other admitted. Set mode: Count, or exclude the namespaces from Kueue",
            self.count, self.first
        )
    }
}

/// Returns what pods of namespaces without a quota use of a pool.
fn unnamed(pool: &PoolView<'_>) -> QuotaUnnamed {
    let usage = pool.book.unnamed_usage();
    let waits = |pod: &&Pod| pod.owner == Owner::Unnamed && matches!(pod.place, Place::Waiting { .. });
    QuotaUnnamed {
        used: format_amount(usage.used, pool.unit),
        share: format_share(&usage, pool.unit),
        pods: usage.pods_within.saturating_add(usage.pods_over),
        waiting: u32::try_from(pool.world.pods.iter().filter(waits).count()).unwrap_or(u32::MAX),
    }
}

/// Describes a valid quota, and the parts of the quota that have no effect yet.
fn valid_message(pool: Option<&PoolView<'_>>, absent: &[&str]) -> String {
    let mut message = "The quota counts all of its namespaces".to_owned();
    if pool.is_none_or(|pool| pool.world.gpus.is_empty()) {
        message.push_str(". No node has such GPUs");
    }
    if !absent.is_empty() {
        message.push_str(". These namespaces do not exist: ");
        message.push_str(&absent.join(", "));
    }
    message
}

/// Formats an amount as in the spec: a number of GPUs, or a quantity of memory.
fn format_amount(amount: Amount, unit: Unit) -> String {
    match unit {
        Unit::Gpus => amount.to_string(),
        Unit::Memory if amount.0.is_multiple_of(1024) => format!("{}Gi", amount.0 / 1024),
        Unit::Memory => format!("{}Mi", amount.0),
    }
}

/// Formats the share with two decimals, in GPUs or GiB.
fn format_share(usage: &Usage, unit: Unit) -> String {
    let one = match unit {
        Unit::Gpus => GPU.0,
        Unit::Memory => 1024,
    };
    let hundredths = u128::from(usage.excess.0) * 100 / u128::from(one.saturating_mul(u64::from(usage.weight.max(1))));
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

fn waiting_pods(pool: &PoolView<'_>, name: &str, waits: &BTreeMap<String, WaitingPod>) -> WaitingPods {
    let mut waiting = WaitingPods::default();
    for (at, pod) in pool.world.pods.iter().enumerate() {
        let Place::Waiting { nominated } = pod.place else { continue };
        if !matches!(&pod.owner, Owner::Quota(owner) if owner == name) {
            continue;
        }
        let reason = waits.get(&pod.name).map(|wait| wait.reason);
        let word = match (nominated, reason) {
            (Some(_), _) => "Nominated",
            (_, Some(Reason::OverMax)) => "OverMax",
            (_, Some(Reason::WaitsForGuarantee)) => "WaitsForGuarantee",
            (_, Some(Reason::Protected)) => "Protected",
            (_, Some(Reason::GangIncomplete)) => "GangIncomplete",
            (_, Some(Reason::GangTooLarge)) => "GangTooLarge",
            _ => "NoRoom",
        };
        waiting.pods += 1;
        waiting.amount = waiting.amount.plus(pod.charge);
        *waiting.reasons.entry(word.to_owned()).or_default() += 1;
        let id = cleave_plan::quota::PodId(at);
        if pool.book.is_guaranteed(id) {
            let awaits_leaving = word == "NoRoom" && pool.book.awaits_leaving(id) > Amount::ZERO;
            let word = if awaits_leaving { "Leaving" } else { word };
            let (pods, amount) = waiting.within.entry(word).or_default();
            *pods += 1;
            *amount = amount.plus(pod.charge);
        }
    }
    waiting
}

fn count_terminating_pods(world: &World, name: &str) -> u32 {
    let is_of = |owner: &Owner| matches!(owner, Owner::Quota(quota) if quota == name);
    let leaving = world.pods.iter().filter(|pod| matches!(pod.place, Place::Leaving { .. }) && is_of(&pod.owner));
    u32::try_from(leaving.count()).unwrap_or(u32::MAX)
}

/// Returns whether the guarantee holds, and the reason and message of the condition `Guaranteed`.
fn guaranteed_condition(pool: &PoolView<'_>, waiting: &WaitingPods) -> (bool, &'static str, String) {
    let write = |amount: Amount| match pool.unit {
        Unit::Gpus => format!("{amount} GPUs"),
        Unit::Memory => format!("{} of GPU memory", format_amount(amount, Unit::Memory)),
    };
    let (sum, healthy) =
        (pool.world.quotas.values().map(cleave_plan::quota::Quota::min).sum::<Amount>(), pool.book.healthy());
    if sum > healthy {
        let message = format!(
            "The quotas of these GPUs guarantee {}, and {} are healthy. Lower min, or add GPUs",
            write(sum),
            write(healthy)
        );
        return (false, "Overcommitted", message);
    }
    for (word, reason, what) in [
        ("Nominated", "Reclaiming", "wait until evicted borrowers have ended"),
        ("Protected", "Protected", "wait for borrowers that disruption budgets protect"),
        ("Leaving", "Reclaiming", "wait until terminating pods of their own quota have ended"),
        (
            "NoRoom",
            "Fragmented",
            "wait, because no single GPU can be freed for them. Set guarantee: Cells to prevent such waits",
        ),
    ] {
        if let Some((pods, amount)) = waiting.within.get(word) {
            return (
                false,
                reason,
                format!("{pods} pods within the guarantee, which request {}, {what}", write(*amount)),
            );
        }
    }
    (true, "Kept", "No pod within the guarantee waits".to_owned())
}
