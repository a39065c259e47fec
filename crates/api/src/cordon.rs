//! Annotations of a `GpuNode` that cordon or quiesce individual GPUs, clear their faults, and
//! forget GPUs that were removed. The `cleave` command line writes these annotations for an
//! administrator, and the operator reads them.
//!
//! The annotations name GPUs by UUID, because indices can change. The parsers ignore invalid
//! entries: administrators can write annotations by hand, and one invalid entry must not hide the
//! others.
use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// Maximum length of a reason in bytes.
const MAX_REASON_BYTES: usize = 200;

/// Cordoned or quiesced GPUs by UUID, each with its reason, which can be empty. Format:
/// `<uuid>[=reason],…`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cordons(pub BTreeMap<String, String>);

/// GPUs by UUID, each with a time. One annotation clears the faults that were found up to this
/// time. Another annotation forgets a GPU that has been missing since this time or earlier. Format:
/// `<uuid>=<RFC 3339>,…`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuTimes(pub BTreeMap<String, Time>);

/// Why the reason for a cordon or a quiesce is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCordonReason {
    /// The reason contains a comma, which would end the entry, or a control character.
    #[error("a reason must not contain commas, line breaks or other control characters")]
    Separator,
    /// The reason is longer than `MAX_REASON_BYTES`.
    #[error("a reason must have at most {MAX_REASON_BYTES} bytes")]
    Long,
}

/// Checks whether a reason can be written into the annotation.
///
/// # Errors
/// Returns an error if the reason has a comma or a control character, or is too long.
pub fn check_reason(reason: &str) -> Result<(), InvalidCordonReason> {
    if reason.contains(|character: char| character == ',' || character.is_control()) {
        return Err(InvalidCordonReason::Separator);
    }
    if reason.len() > MAX_REASON_BYTES { Err(InvalidCordonReason::Long) } else { Ok(()) }
}

/// Splits an annotation into its entries. The value is `None` for an entry without `=`.
fn annotation_entries(annotation: Option<&String>) -> impl Iterator<Item = (&str, Option<&str>)> {
    let parts = annotation.map_or("", String::as_str).split(',').map(str::trim);
    parts.filter(|part| !part.is_empty()).map(|part| match part.split_once('=') {
        Some((uuid, value)) => (uuid.trim(), Some(value.trim())),
        None => (part, None),
    })
}

impl Cordons {
    /// Reads an annotation. A missing annotation has no entries.
    pub fn read(annotation: Option<&String>) -> Self {
        let named = annotation_entries(annotation).filter(|(uuid, _)| !uuid.is_empty());
        Self(named.map(|(uuid, reason)| (uuid.to_owned(), reason.unwrap_or_default().to_owned())).collect())
    }
}

impl GpuTimes {
    /// Reads an annotation. A missing annotation has no entries.
    pub fn read(annotation: Option<&String>) -> Self {
        let timed = |(uuid, time): (&str, Option<&str>)| {
            let time: Timestamp = time?.parse().ok()?;
            (!uuid.is_empty()).then(|| (uuid.to_owned(), whole_seconds(time)))
        };
        Self(annotation_entries(annotation).filter_map(timed).collect())
    }
}

impl fmt::Display for Cordons {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (uuid, reason)) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            let equals = if reason.is_empty() { "" } else { "=" };
            write!(formatter, "{comma}{uuid}{equals}{reason}")?;
        }
        Ok(())
    }
}

impl fmt::Display for GpuTimes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (uuid, time)) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(formatter, "{comma}{uuid}={}", time.0)?;
        }
        Ok(())
    }
}

/// Truncates a time to whole seconds, because the API server does not store fractions.
pub fn whole_seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse_cordons(text: &str) -> Vec<(String, String)> {
        Cordons::read(Some(&text.to_owned())).0.into_iter().collect()
    }

    #[test]
    fn invalid_entries_do_not_hide_valid_ones() {
        let pair = |uuid: &str, reason: &str| (uuid.to_owned(), reason.to_owned());
        assert_eq!(parse_cordons("GPU-a, GPU-b=new fan=yes ,,=x,"), [pair("GPU-a", ""), pair("GPU-b", "new fan=yes")]);
        assert!(parse_cordons("").is_empty() && Cordons::read(None).0.is_empty());
        let cleared =
            GpuTimes::read(Some(&"GPU-a=2026-11-21T20:00:00.7Z,GPU-b=soon,GPU-c,=2026-11-21T20:00:00Z".into()));
        assert_eq!(cleared.to_string(), "GPU-a=2026-11-21T20:00:00Z");
    }

    #[test]
    fn a_reason_that_cannot_be_read_back_is_refused() {
        assert_eq!(check_reason("fan: 3 of 4 = bad"), Ok(()));
        for bad in ["a,GPU-b", "a\nb"] {
            assert_eq!(check_reason(bad), Err(InvalidCordonReason::Separator), "{bad:?}");
        }
        assert_eq!(check_reason(&"x".repeat(201)), Err(InvalidCordonReason::Long));
    }

    proptest! {
        #[test]
        fn written_cordons_can_be_read_back(all in proptest::collection::btree_map("GPU-[0-9a-f]{1,8}", "[ -+\\--~]{0,20}", 0..5)) {
            let all: BTreeMap<String, String> = all.into_iter().map(|(uuid, reason)| (uuid, reason.trim().to_owned())).collect();
            prop_assume!(all.values().all(|reason| check_reason(reason).is_ok()));
            let written = Cordons(all);
            prop_assert_eq!(Cordons::read(Some(&written.to_string())), written);
        }

        #[test]
        fn reading_any_annotation_succeeds(text in ".{0,60}") {
            Cordons::read(Some(&text));
            GpuTimes::read(Some(&text));
        }
    }
}
