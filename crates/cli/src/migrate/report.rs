//! The report, with the outcome for each setting of the input. Pure.
use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value};

/// The outcome for a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) enum Outcome {
    /// A policy, a chart value or a default of Cleave has the same effect.
    Translated,
    /// The setting belongs to software that can remain installed, and does not change.
    Kept,
    /// The setting has no counterpart in Cleave and needs no decision.
    Dropped,
    /// The administrator must decide: Cleave cannot keep the effect, or the input does not
    /// determine it.
    Decide,
    /// `cleave migrate` does not know the setting.
    Unknown,
}

impl Outcome {
    /// All outcomes, in the order of the summary.
    pub(super) const ALL: [Self; 5] = [Self::Translated, Self::Kept, Self::Dropped, Self::Decide, Self::Unknown];

    /// Returns the outcome's name in the report.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Translated => "translated",
            Self::Kept => "kept",
            Self::Dropped => "dropped",
            Self::Decide => "decide",
            Self::Unknown => "unknown",
        }
    }
}

/// The report's line about one setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct ReportLine {
    /// The object or file that contains the setting.
    pub(super) source: String,
    /// Path of the setting in the source. Empty if the line describes the whole source.
    pub(super) setting: String,
    /// Value of the setting, as one line of text. Empty if the value does not matter.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) value: String,
    /// The outcome for the setting.
    pub(super) outcome: Outcome,
    /// The reason, in sentences.
    pub(super) text: String,
}

/// The location of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SettingPlace {
    /// The object or file that contains the setting.
    pub(super) source: String,
    /// Path of the setting in the source.
    pub(super) setting: String,
    /// Value of the setting, as one line of text.
    pub(super) value: String,
}

impl SettingPlace {
    /// Returns the place of a whole source.
    pub(super) fn of_whole_source(source: &str) -> Self {
        Self { source: source.to_owned(), setting: String::new(), value: String::new() }
    }
}

/// The report's lines, and the chart values that the translation sets.
#[derive(Debug, Clone, Default)]
pub(super) struct Notes {
    /// The report's lines.
    pub(super) lines: Vec<ReportLine>,
    /// Values of Cleave's chart, by path.
    pub(super) values: BTreeMap<String, Value>,
    /// Values files in the chart's directory that the user must pass to Helm, without duplicates.
    pub(super) values_files: Vec<&'static str>,
}

impl Notes {
    /// Adds a line.
    pub(super) fn add(&mut self, place: SettingPlace, outcome: Outcome, text: impl Into<String>) {
        let SettingPlace { source, setting, value } = place;
        self.lines.push(ReportLine { source, setting, value, outcome, text: text.into() });
    }

    /// Adds a line about a setting with the same effect in Cleave.
    pub(super) fn translated(&mut self, place: SettingPlace, text: impl Into<String>) {
        self.add(place, Outcome::Translated, text);
    }

    /// Adds a line about a setting without a counterpart.
    pub(super) fn dropped(&mut self, place: SettingPlace, text: impl Into<String>) {
        self.add(place, Outcome::Dropped, text);
    }

    /// Adds a line about a setting that needs a decision.
    pub(super) fn decide(&mut self, place: SettingPlace, text: impl Into<String>) {
        self.add(place, Outcome::Decide, text);
    }

    /// Sets a chart value. If an earlier setting set another value, keeps the earlier value and
    /// reports that the administrator must decide.
    pub(super) fn set_chart_value(&mut self, place: SettingPlace, path: &str, value: Value) {
        match self.values.get(path) {
            Some(first) if *first != value => {
                let text = format!("The chart's value {path} is already {first}, from another setting.");
                self.decide(place, text);
            }
            _ => {
                let text = format!("Chart value {path}: {value}.");
                self.values.insert(path.to_owned(), value);
                self.translated(place, text);
            }
        }
    }

    /// Adds a values file of the chart.
    pub(super) fn use_values_file(&mut self, name: &'static str) {
        if !self.values_files.contains(&name) {
            self.values_files.push(name);
        }
    }

    /// Returns the values as nested objects, as in a values file.
    pub(super) fn nested_values(&self) -> Value {
        let mut root = Map::new();
        for (path, value) in &self.values {
            insert_value_at_path(&mut root, path, value);
        }
        Value::Object(root)
    }
}

/// Sets the value at a path of names, separated by dots. Omits the value if a shorter path has a
/// value.
fn insert_value_at_path(object: &mut Map<String, Value>, path: &str, value: &Value) {
    let Some((first, rest)) = path.split_once('.') else {
        object.insert(path.to_owned(), value.clone());
        return;
    };
    let below = object.entry(first).or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(below) = below {
        insert_value_at_path(below, rest, value);
    }
}
