//! Metrics of quotas. When a quota is deleted, its series are removed.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::quotas::usage::QuotaUsage;

/// A gauge with a fractional value.
type Fraction = Gauge<f64, AtomicU64>;

/// The metrics of quotas. Amounts are GPUs, or GiB of GPU memory for quotas of memory. Clones share
/// their values.
#[derive(Debug, Clone, Default)]
pub(crate) struct QuotaMetrics {
    min: Family<QuotaLabel, Gauge<f64, AtomicU64>>,
    max: Family<QuotaLabel, Gauge<f64, AtomicU64>>,
    used: Family<QuotaLabel, Gauge<f64, AtomicU64>>,
    held: Family<QuotaLabel, Gauge<f64, AtomicU64>>,
    borrowed: Family<QuotaLabel, Gauge<f64, AtomicU64>>,
    lent: Family<QuotaLabel, Gauge<f64, AtomicU64>>,
    waiting: Family<QuotaLabel, Gauge<f64, AtomicU64>>,
    unmet: Family<QuotaLabel, Gauge<f64, AtomicU64>>,
    share: Family<QuotaLabel, Gauge<f64, AtomicU64>>,
    pods: Family<PodClassLabels, Gauge>,
    waiting_pods: Family<WaitReasonLabels, Gauge>,
    evictions: Family<EvictionLabels, Counter>,
    /// Labels of the existing series of `evictions`, so that the series of deleted quotas can be
    /// removed.
    counted: Arc<Mutex<CountedEvictions>>,
}

/// Labels of evictions: from, to, and kind.
type CountedEvictions = BTreeSet<(String, String, &'static str)>;

/// Label: a quota.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct QuotaLabel {
    quota: String,
}

/// Labels: a quota, and a class of its pods.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PodClassLabels {
    quota: String,
    class: &'static str,
}

/// Labels: a quota, and why its pods wait.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WaitReasonLabels {
    quota: String,
    reason: String,
}

/// Labels: the quota of the evicted pod, the quota of the preemptor, and the kind of the eviction.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EvictionLabels {
    from: String,
    to: String,
    kind: &'static str,
}

/// Value of the label for pods without a quota.
pub(crate) const NO_QUOTA: &str = "-";

impl QuotaMetrics {
    /// Registers all metrics of quotas.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("min_gpus", "Guaranteed amount", self.min.clone());
        registry.register("max_gpus", "Maximum amount; no series without a maximum", self.max.clone());
        registry.register("used_gpus", "Amount that pods use, without pods that are being deleted", self.used.clone());
        registry.register("held_gpus", "Amount that pods use, with pods that are being deleted", self.held.clone());
        registry.register("borrowed_gpus", "Amount that pods use beyond the guarantee", self.borrowed.clone());
        registry.register("lent_gpus", "Unused part of the guarantee that others may use", self.lent.clone());
        registry.register("waiting_gpus", "Amount that pods at the placement gate request", self.waiting.clone());
        registry.register(
            "guarantee_unmet_gpus",
            "Amount that waiting pods request within the guarantee of their quota",
            self.unmet.clone(),
        );
        registry.register("share", "Borrowed amount for each unit of the quota's weight", self.share.clone());
        registry.register("pods", "Released pods, by class: in-quota or over-quota", self.pods.clone());
        registry.register("waiting_pods", "Pods at the placement gate, by reason", self.waiting_pods.clone());
        registry.register(
            "evictions",
            "Pods evicted by the rules of quotas, by the quota of the pod, the quota of the preemptor, and kind",
            self.evictions.clone(),
        );
    }

    /// Sets the gauges. Quotas that are not in `usages` have no series afterwards.
    pub(crate) fn set_gauges(&self, usages: &BTreeMap<String, QuotaUsage>) {
        self.clear_gauges();
        for (name, usage) in usages {
            let quota = QuotaLabel { quota: name.clone() };
            let amount = |amount: u64| fraction(amount) / fraction(usage.one);
            let set = |family: &Family<QuotaLabel, Fraction>, value: f64| {
                family.get_or_create(&quota).set(value);
            };
            let of = &usage.usage;
            set(&self.min, amount(usage.limits.min));
            usage.limits.max.into_iter().for_each(|max| set(&self.max, amount(max)));
            set(&self.used, amount(of.used.0));
            set(&self.held, amount(of.held.0));
            set(&self.borrowed, amount(of.excess.0));
            set(&self.lent, amount(of.lent.0));
            set(&self.waiting, amount(usage.waiting_amount));
            set(&self.unmet, amount(usage.unmet_amount));
            set(&self.share, amount(of.excess.0) / f64::from(of.weight.max(1)));
            for (class, pods) in [("in-quota", of.pods_within), ("over-quota", of.pods_over)] {
                self.pods.get_or_create(&PodClassLabels { quota: name.clone(), class }).set(pods.into());
            }
            for (reason, pods) in &usage.waiting {
                let label = WaitReasonLabels { quota: name.clone(), reason: reason.clone() };
                self.waiting_pods.get_or_create(&label).set((*pods).into());
            }
        }
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let exists = |name: &String| name == NO_QUOTA || usages.contains_key(name);
        counted.retain(|(from, to, kind)| {
            let keeps = exists(from) && exists(to);
            if !keeps {
                self.evictions.remove(&EvictionLabels { from: from.clone(), to: to.clone(), kind });
            }
            keeps
        });
    }

    /// Counts an eviction.
    pub(crate) fn count_eviction(&self, from: &str, to: &str, kind: &'static str) {
        let exchange = EvictionLabels { from: from.to_owned(), to: to.to_owned(), kind };
        self.evictions.get_or_create(&exchange).inc();
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        counted.insert((exchange.from, exchange.to, kind));
    }

    /// Clears the gauges. A process that does not lead reports no gauges.
    pub(crate) fn clear_gauges(&self) {
        for family in [
            &self.min,
            &self.max,
            &self.used,
            &self.held,
            &self.borrowed,
            &self.lent,
            &self.waiting,
            &self.unmet,
            &self.share,
        ] {
            family.clear();
        }
        self.pods.clear();
        self.waiting_pods.clear();
    }
}

/// Returns an amount as a floating-point number. Amounts are below 2^52.
#[expect(clippy::cast_precision_loss, reason = "metrics have no more digits")]
const fn fraction(amount: u64) -> f64 {
    amount as f64
}

#[cfg(test)]
pub(super) mod tests {
    use cleave_plan::quota::{Amount, Usage};
    use prometheus_client::encoding::text::encode;

    use super::*;
    use crate::quotas::usage::Limits;

    pub(crate) fn usages(names: &[&str]) -> BTreeMap<String, QuotaUsage> {
        let one = Amount(2_500_000);
        let usage = Usage {
            used: one,
            held: one,
            excess: one,
            lent: one,
            weight: 2,
            pods_within: 1,
            pods_over: 2,
            ..Usage::default()
        };
        let usage = QuotaUsage {
            usage,
            limits: Limits { min: 4_000_000, max: Some(8_000_000) },
            waiting: BTreeMap::from([("NoRoom".to_owned(), 3)]),
            waiting_amount: 1_000_000,
            unmet_amount: 500_000,
            one: 1_000_000,
        };
        names.iter().map(|name| ((*name).to_owned(), usage.clone())).collect()
    }

    #[test]
    fn the_series_of_a_deleted_quota_are_removed() {
        let (metrics, mut registry) = (QuotaMetrics::default(), Registry::default());
        metrics.register(&mut registry);
        let text = || {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        };
        metrics.set_gauges(&usages(&["a", "b"]));
        for (from, to) in [("a", "b"), ("b", "a"), ("-", "a")] {
            metrics.count_eviction(from, to, "Reclaim");
        }
        let both = text();
        for series in [
            "used_gpus{quota=\"b\"} 2.5",
            "max_gpus{quota=\"a\"} 8.0",
            "share{quota=\"a\"} 1.25",
            "pods{quota=\"a\",class=\"over-quota\"} 2",
            "waiting_pods{quota=\"b\",reason=\"NoRoom\"} 3",
            "guarantee_unmet_gpus{quota=\"a\"} 0.5",
            "evictions_total{from=\"b\",to=\"a\",kind=\"Reclaim\"} 1",
        ] {
            assert!(both.lines().any(|line| line == series), "{series} in {both}");
        }
        metrics.set_gauges(&usages(&["a"]));
        let one = text();
        assert!(!one.contains("\"b\"") && one.contains("evictions_total{from=\"-\",to=\"a\""), "{one}");
        metrics.clear_gauges();
        assert!(!text().contains("used_gpus{"));
    }
}
