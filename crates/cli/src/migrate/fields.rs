//! Reads mappings of the input key by key, so that `cleave migrate` ignores no key with a value
//! silently. Pure.
use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value};

use super::report::{Notes, Outcome, SettingPlace};

/// Maximum number of characters of a value in the report.
const MAX_VALUE_CHARS: usize = 60;

/// A mapping of the input. Readers remove the keys that they know. [`Section::finish`] reports the
/// remaining keys as unknown.
#[derive(Debug, Clone)]
pub(super) struct Section {
    source: String,
    path: String,
    keys: Map<String, Value>,
}

impl Section {
    /// Returns the section for the root mapping of a source.
    ///
    /// # Errors
    /// Returns an error if the value is not a mapping.
    pub(super) fn root(source: &str, value: Value) -> Result<Self> {
        Self::nested(source, String::new(), value)
    }

    fn nested(source: &str, path: String, value: Value) -> Result<Self> {
        let Value::Object(keys) = value else {
            let at = if path.is_empty() { source.to_owned() } else { format!("{source}: {path}") };
            bail!("{at} must be a mapping");
        };
        Ok(Self { source: source.to_owned(), path, keys })
    }

    /// Returns the object or file that contains the section.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// Returns whether the section has a key with a value.
    pub(super) fn has_value(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(|value| !value.is_null())
    }

    /// Returns a value without removing it, or `None` if the key is missing.
    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        self.keys.get(key)
    }

    fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn place_of(&self, key: &str, value: &Value) -> SettingPlace {
        SettingPlace { source: self.source.clone(), setting: self.path_of(key), value: shorten(value) }
    }

    /// Removes a value of any type, and returns it with its place. Returns `None` for a null.
    pub(super) fn take_value(&mut self, key: &str) -> Option<(SettingPlace, Value)> {
        let value = self.keys.remove(key).filter(|value| !value.is_null())?;
        Some((self.place_of(key, &value), value))
    }

    /// Removes and returns a string. Accepts numbers and booleans, because YAML reads `1` as a
    /// number.
    ///
    /// # Errors
    /// Returns an error if the value is a list or a mapping.
    pub(super) fn take_string(&mut self, key: &str) -> Result<Option<(SettingPlace, String)>> {
        let Some((place, value)) = self.take_value(key) else { return Ok(None) };
        let text = match value {
            Value::String(text) => text,
            Value::Number(number) => number.to_string(),
            Value::Bool(flag) => flag.to_string(),
            _ => bail!("{}: {} must be a string", self.source, place.setting),
        };
        Ok(Some((place, text)))
    }

    /// Removes and returns a boolean. Accepts the strings `true` and `false` too.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub(super) fn take_bool(&mut self, key: &str) -> Result<Option<(SettingPlace, bool)>> {
        let Some((place, value)) = self.take_value(key) else { return Ok(None) };
        let flag = value.as_bool().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
        let flag = flag.with_context(|| format!("{}: {} must be true or false", self.source, place.setting))?;
        Ok(Some((place, flag)))
    }

    /// Removes and returns a whole number from `minimum` to `u32::MAX`.
    ///
    /// # Errors
    /// Returns an error if the value has another type or is out of range.
    pub(super) fn take_number(&mut self, key: &str, minimum: u32) -> Result<Option<(SettingPlace, u32)>> {
        let Some((place, value)) = self.take_value(key) else { return Ok(None) };
        let number = value.as_u64().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
        let number = number.and_then(|number| u32::try_from(number).ok()).filter(|number| *number >= minimum);
        let number = number.with_context(|| {
            format!(
                "{}: {} is {value}; it must be a whole number from {minimum} to {}",
                self.source,
                place.setting,
                u32::MAX
            )
        })?;
        Ok(Some((place, number)))
    }

    /// Removes and returns a mapping.
    ///
    /// # Errors
    /// Returns an error if the value is not a mapping.
    pub(super) fn take_section(&mut self, key: &str) -> Result<Option<Self>> {
        let Some((place, value)) = self.take_value(key) else { return Ok(None) };
        Self::nested(&self.source, place.setting, value).map(Some)
    }

    /// Removes and returns a list of mappings.
    ///
    /// # Errors
    /// Returns an error if the value is not a list of mappings.
    pub(super) fn take_sections(&mut self, key: &str) -> Result<Option<Vec<Self>>> {
        let Some((place, value)) = self.take_value(key) else { return Ok(None) };
        let Value::Array(items) = value else { bail!("{}: {} must be a list", self.source, place.setting) };
        let items = items.into_iter().enumerate();
        let sections = items.map(|(at, item)| Self::nested(&self.source, format!("{}[{at}]", place.setting), item));
        sections.collect::<Result<_>>().map(Some)
    }

    /// Removes and returns a string or a list of strings.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub(super) fn take_strings(&mut self, key: &str) -> Result<Option<(SettingPlace, Vec<String>)>> {
        let Some((place, value)) = self.take_value(key) else { return Ok(None) };
        let items = match value {
            Value::Array(items) => items,
            single => vec![single],
        };
        let texts: Option<Vec<String>> = items.iter().map(|item| item.as_str().map(str::to_owned)).collect();
        let texts = texts
            .with_context(|| format!("{}: {} must be a string or a list of strings", self.source, place.setting))?;
        Ok(Some((place, texts)))
    }

    /// Returns the keys that no reader has removed, in order.
    pub(super) fn keys(&self) -> Vec<String> {
        self.keys.keys().cloned().collect()
    }

    /// Removes the known keys, and reports them as dropped: these settings need no decision.
    pub(super) fn drop_keys(&mut self, known: &[(&str, &str)], notes: &mut Notes) {
        self.take_keys(Outcome::Dropped, known, notes);
    }

    /// Removes the known keys, and reports all of them with the same outcome. `known` contains each
    /// key and the text of its report line.
    pub(super) fn take_keys(&mut self, outcome: Outcome, known: &[(&str, &str)], notes: &mut Notes) {
        for (key, reason) in known {
            if let Some((place, _)) = self.take_value(key) {
                notes.add(place, outcome, *reason);
            }
        }
    }

    /// Reports the remaining keys as unknown.
    pub(super) fn finish(self, notes: &mut Notes) {
        for (key, value) in &self.keys {
            if !value.is_null() {
                notes.add(self.place_of(key, value), Outcome::Unknown, "`cleave migrate` does not know this setting.");
            }
        }
    }
}

/// Formats a value for the report, with at most [`MAX_VALUE_CHARS`] characters.
fn shorten(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= MAX_VALUE_CHARS {
        return line;
    }
    let start: String = line.chars().take(MAX_VALUE_CHARS - 1).collect();
    format!("{start}…")
}
