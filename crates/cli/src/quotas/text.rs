//! Quotas as text.
use std::fmt::Write as _;

use cleave_api::gpuquota::{QuotaMode, QuotaUnit};
use cleave_api::names::{CONDITION_ENFORCED, CONDITION_GUARANTEED, CONDITION_READY, REASON_ALSO_KUEUE};

use super::report::{Pool, Quota, QuotasReport};
use crate::condition::ConditionValue;
use crate::table::Table;

/// The text for a cluster without quotas.
const NO_QUOTAS: &str = "No GpuQuotas. No namespace has a guarantee or a maximum.\n";

/// Name of the row of pods without a quota.
const NO_QUOTA: &str = "(none)";

/// Renders the quotas as a table, with a line for each pool and each problem. `wide` adds columns.
pub fn render(report: &QuotasReport, wide: bool) -> String {
    if report.quotas.is_empty() {
        return NO_QUOTAS.to_owned();
    }
    let headings = ["QUOTA", "POOL", "MIN", "USED", "IN", "OVER", "SHARE", "MAX", "LEND", "WAITING", "GUARANTEED"];
    let mut table = Table::new(&headings)
        .with_wide_columns(wide, &["MODE", "WEIGHT", "HELD", "LENT", "PODS IN/OVER/LEAVING", "READY", "NAMESPACES"]);
    for quota in &report.quotas {
        add_row(&mut table, quota, wide);
    }
    report.pools.iter().for_each(|pool| add_unnamed_row(&mut table, pool));
    let mut text = table.render();
    text.push('\n');
    for pool in &report.pools {
        text.push_str(&pool_line(pool));
    }
    for line in problem_lines(report) {
        let _ = writeln!(text, "{line}");
    }
    text
}

fn add_row(table: &mut Table, quota: &Quota, wide: bool) {
    let optional = |text: &Option<String>| text.clone().unwrap_or_default();
    let (pool, max, lend) = (quota.models.join(","), optional(&quota.max), optional(&quota.lend));
    let (waiting, weight, mode) =
        (quota.waiting.pods.to_string(), quota.weight.to_string(), format!("{:?}", quota.mode));
    let pods = format!("{}/{}/{}", quota.pods.within, quota.pods.over, quota.pods.leaving);
    // In a wide table, more columns follow: a long message would move them far to the right.
    let guaranteed = if wide { guaranteed_word(quota) } else { guaranteed_text(quota) };
    table.add_wide_row(
        &[
            &quota.name,
            &pool,
            &quota.min,
            &quota.used,
            &quota.in_quota,
            &quota.borrowed,
            &quota.share,
            &max,
            &lend,
            &waiting,
            &guaranteed,
        ],
        &[&mode, &weight, &quota.held, &quota.lent, &pods, &quota.ready.status, &namespaces_text(quota)],
    );
}

/// Adds a row for the pods of namespaces without a quota, if they use or request GPUs of a pool.
fn add_unnamed_row(table: &mut Table, pool: &Pool) {
    let Some(unnamed) = pool.unnamed.as_ref().filter(|unnamed| unnamed.pods > 0 || unnamed.waiting > 0) else { return };
    let (models, waiting) = (pool.models.join(","), unnamed.waiting.to_string());
    let pods = format!("0/{}/", unnamed.pods);
    table.add_wide_row(
        &[NO_QUOTA, &models, "0", &unnamed.used, "0", &unnamed.used, &unnamed.share, "", "", &waiting, ""],
        &["", "1", "", "", &pods, "", ""],
    );
}

/// Returns whether the guarantee holds, and the reason in one word if it does not.
fn guaranteed_word(quota: &Quota) -> String {
    match &quota.guaranteed {
        None => "Unknown".to_owned(),
        Some(ConditionValue { status, reason, .. }) if status == "False" => format!("False: {reason}"),
        Some(condition) => condition.status.clone(),
    }
}

/// Returns whether the guarantee holds, and the message if it does not.
fn guaranteed_text(quota: &Quota) -> String {
    match &quota.guaranteed {
        Some(ConditionValue { status, message, .. }) if status != "True" && !message.is_empty() => {
            format!("{status}: {}", message.trim_end_matches('.'))
        }
        _ => guaranteed_word(quota),
    }
}

fn pool_line(pool: &Pool) -> String {
    let name = if pool.models.is_empty() { "Other GPUs".to_owned() } else { pool.models.join(", ") };
    let unit = match pool.unit {
        QuotaUnit::Gpus if pool.guaranteed == "1" => " GPU",
        QuotaUnit::Gpus => " GPUs",
        QuotaUnit::Memory => " of memory",
    };
    format!(
        "{name}: {}{unit} guaranteed; quotas use {}, borrow {} and lend {}; {} wait\n",
        pool.guaranteed,
        pool.used,
        pool.borrowed,
        pool.lent,
        pods_text(pool.waiting)
    )
}

/// Returns the problems, one line each.
fn problem_lines(report: &QuotasReport) -> Vec<String> {
    let mut lines = Vec::new();
    for quota in &report.quotas {
        let enforced = quota.enforced.iter().filter(|_| quota.mode == QuotaMode::Enforce);
        for condition in [&quota.ready].into_iter().chain(enforced) {
            let is_problem = condition.status != "True" || condition.reason == REASON_ALSO_KUEUE;
            if is_problem && !condition.message.is_empty() {
                lines.push(format!("quota {}: {}: {}", quota.name, condition.reason, condition.message));
            }
        }
        if quota.outdated {
            lines.push(format!("quota {}: the status describes an older version of the quota", quota.name));
        }
    }
    lines
}

fn namespaces_text(quota: &Quota) -> String {
    if quota.namespaces.is_empty() {
        quota.namespace_labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
    } else {
        quota.namespaces.join(",")
    }
}

/// Renders one quota with all details and its conditions.
pub fn render_one(quota: &Quota) -> String {
    let mut text = String::new();
    let mut line = |heading: &str, value: &str| {
        let value = if value.is_empty() { "-" } else { value };
        let _ = writeln!(text, "{:<14}{value}", format!("{heading}:"));
    };
    line("Quota", &quota.name);
    line("Namespaces", &namespaces_text(quota).replace(',', ", "));
    line(
        "Pool",
        &if quota.models.is_empty() { "GPUs that no other quota names".to_owned() } else { quota.models.join(", ") },
    );
    line("Counts", if quota.unit == QuotaUnit::Gpus { "GPUs" } else { "GPU memory" });
    line("Guarantee", &format!("{} ({:?})", quota.min, quota.guarantee));
    line("Maximum", quota.max.as_deref().unwrap_or("none"));
    line("Lends", quota.lend.as_deref().unwrap_or("all of the guarantee"));
    line("Weight", &quota.weight.to_string());
    line("Mode", &format!("{:?}", quota.mode));
    line("Used", &quota.used);
    line("Within", &format!("{} ({})", or_dash(&quota.in_quota), pods_text(quota.pods.within)));
    line("Borrowed", &format!("{} ({})", or_dash(&quota.borrowed), pods_text(quota.pods.over)));
    line("Held", &format!("{} (being deleted: {})", or_dash(&quota.held), pods_text(quota.pods.leaving)));
    line("Lent", &quota.lent);
    line("Share", &quota.share);
    if let Some(cells) = quota.cells {
        line("Cells", &cells.to_string());
    }
    let requested =
        if quota.waiting.gpus.is_empty() { String::new() } else { format!(", which request {}", quota.waiting.gpus) };
    line("Waiting", &format!("{}{requested}", pods_text(quota.waiting.pods)));
    for (reason, pods) in &quota.waiting.reasons {
        line(&format!("  {reason}"), &pods.to_string());
    }
    let conditions = [
        (CONDITION_READY, Some(&quota.ready)),
        (CONDITION_GUARANTEED, quota.guaranteed.as_ref()),
        (CONDITION_ENFORCED, quota.enforced.as_ref()),
    ];
    let mut table = Table::new(&["CONDITION", "STATUS", "REASON", "MESSAGE"]);
    for (name, condition) in conditions {
        let Some(ConditionValue { status, reason, message }) = condition else { continue };
        table.add_row(&[name, status, reason, message]);
    }
    text.push('\n');
    text.push_str(&table.render());
    if quota.outdated {
        text.push_str("\nThe status describes an older version of the quota.\n");
    }
    text
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

fn pods_text(pods: u32) -> String {
    if pods == 1 { "1 pod".to_owned() } else { format!("{pods} pods") }
}

/// Renders the quotas as a short table, without pools and problems.
pub(crate) fn render_short(quotas: &[Quota]) -> String {
    let mut table = Table::new(&["QUOTA", "POOL", "MIN", "USED", "BORROWED", "WAITING", "GUARANTEED"]);
    for quota in quotas {
        let (pool, waiting) = (quota.models.join(","), quota.waiting.pods.to_string());
        table.add_row(&[
            &quota.name,
            &pool,
            &quota.min,
            &quota.used,
            &quota.borrowed,
            &waiting,
            &guaranteed_word(quota),
        ]);
    }
    table.render()
}
