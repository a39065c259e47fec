//! Formats measured figures together with published figures and goals, as a table or as JSON.
use std::fmt;

use serde::Serialize;

/// Source of the published figures.
pub(super) const PUBLISHED_SOURCE: &str = "NVIDIA k8s-device-plugin v0.20.0, measured 2026-11-21";

/// All figures of a run.
#[derive(Debug, Serialize)]
pub(super) struct BenchmarkReport {
    plugin: String,
    published_source: &'static str,
    figures: Vec<Figure>,
}

/// One measured figure.
#[derive(Debug, Serialize)]
pub(super) struct Figure {
    case: &'static str,
    what: String,
    unit: &'static str,
    measured: f64,
    /// The figure that [`PUBLISHED_SOURCE`] publishes, if any.
    published: Option<f64>,
    /// The maximum that the measured figure should not exceed.
    goal: Option<f64>,
    met: Option<bool>,
}

impl Figure {
    pub(super) fn new(case: &'static str, what: impl Into<String>, measured: f64, unit: &'static str) -> Self {
        Self { case, what: what.into(), unit, measured, published: None, goal: None, met: None }
    }

    pub(super) fn with_published(mut self, published: impl Into<Option<f64>>) -> Self {
        self.published = published.into();
        self
    }

    pub(super) fn with_goal(mut self, goal: impl Into<Option<f64>>) -> Self {
        self.goal = goal.into();
        self.met = self.goal.map(|goal| self.measured <= goal);
        self
    }
}

impl BenchmarkReport {
    pub(super) fn new(plugin: String) -> Self {
        Self { plugin, published_source: PUBLISHED_SOURCE, figures: Vec::new() }
    }

    pub(super) fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
    }
}

/// Formats a figure. Larger values have fewer decimal places.
fn format_number(value: f64) -> String {
    if value.is_infinite() {
        "never".to_owned()
    } else if value.fract() == 0.0 || value.abs() >= 1000.0 {
        format!("{value:.0}")
    } else if value.abs() >= 100.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

impl fmt::Display for BenchmarkReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "plugin: {}\npublished: {}\n", self.plugin, self.published_source)?;
        let width = self.figures.iter().map(|figure| figure.what.chars().count()).max().unwrap_or(0);
        writeln!(f, "{:width$}  {:>10} {:>10} {:>10}  unit", "", "measured", "published", "goal")?;
        let mut case = "";
        for figure in &self.figures {
            if figure.case != case {
                case = figure.case;
                writeln!(f, "{case}")?;
            }
            let or_dash = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), format_number);
            let missed = if figure.met == Some(false) { "  missed" } else { "" };
            let goal = figure.goal.map_or_else(|| "-".to_owned(), |goal| format!("≤ {}", format_number(goal)));
            writeln!(
                f,
                "{:width$}  {:>10} {:>10} {:>10}  {}{missed}",
                figure.what,
                format_number(figure.measured),
                or_dash(figure.published),
                goal,
                figure.unit
            )?;
        }
        Ok(())
    }
}

/// Sorted durations, for quantiles.
pub(super) struct SortedDurations(Vec<f64>);

impl SortedDurations {
    /// Sorts durations, in milliseconds.
    pub(super) fn new(durations: impl IntoIterator<Item = std::time::Duration>) -> Self {
        let mut values: Vec<f64> = durations.into_iter().map(|duration| duration.as_secs_f64() * 1e3).collect();
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// Returns the quantile in milliseconds: at least the fraction `part` of the values is less
    /// than or equal to it. Returns 0 if there are no values.
    pub(super) fn quantile(&self, part: f64) -> f64 {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank among a few thousand"
        )]
        let rank = ((self.0.len() as f64 * part).ceil() as usize).clamp(1, self.0.len().max(1));
        self.0.get(rank - 1).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_smallest_value_with_its_rank() {
        let sorted = SortedDurations::new([3, 1, 2, 4].map(std::time::Duration::from_millis));
        let shown = [0.0, 0.25, 0.5, 0.99, 1.0].map(|part| format_number(sorted.quantile(part)));
        assert_eq!(shown, ["1", "1", "2", "4", "4"]);
        assert_eq!(format_number(SortedDurations::new([]).quantile(0.5)), "0");
    }

    #[test]
    fn a_missed_goal_is_marked_in_table_and_json() {
        let mut report = BenchmarkReport::new("p".to_owned());
        report.add(Figure::new("c", "slow", 3.0, "ms").with_published(2.0).with_goal(2.5));
        report.add(Figure::new("c", "quick", 1.0, "ms").with_goal(2.5));
        let text = report.to_string();
        assert_eq!(text.lines().filter(|line| line.ends_with("missed")).count(), 1);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (json["figures"][0]["met"].as_bool(), json["figures"][1]["met"].as_bool()),
            (Some(false), Some(true))
        );
        assert_eq!(json["figures"][0]["published"], 2.0);
    }
}
