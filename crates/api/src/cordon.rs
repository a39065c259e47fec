//! What an administrator says of single GPUs, as annotations of their `GpuNode`: written by the
//! command line, read by the operator.
//!
//! A GPU is named by its UUID, so that an entry stays true when GPUs are counted anew. What makes
//! no sense is passed over: an annotation can be written by hand, and one bad entry must not hide
//! the others.
use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// Longest reason, in bytes.
const REASON: usize = 200;

/// Cordoned GPUs by UUID, with the reason that was given, or an empty one: `<uuid>[=reason],…`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cordons(pub BTreeMap<String, String>);

/// GPUs by UUID, with the time up to which what was found wrong with them is over: `<uuid>=<RFC
/// 3339>,…`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleared(pub BTreeMap<String, Time>);

/// A reason that cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadReason {
    /// It would end the entry.
    #[error("a reason has no commas and no line breaks")]
    Separator,
    /// It is a story.
    #[error("a reason has at most {REASON} bytes")]
    Long,
}

/// Whether a reason can be written.
///
/// # Errors
/// It has a comma or a control character, or is too long.
pub fn check_reason(reason: &str) -> Result<(), BadReason> {
    if reason.contains(|character: char| character == ',' || character.is_control()) {
        return Err(BadReason::Separator);
    }
    if reason.len() > REASON { Err(BadReason::Long) } else { Ok(()) }
}

/// Pairs of an annotation; the value is none where there is no `=`.
fn entries(annotation: Option<&String>) -> impl Iterator<Item = (&str, Option<&str>)> {
    let parts = annotation.map_or("", String::as_str).split(',').map(str::trim);
    parts.filter(|part| !part.is_empty()).map(|part| match part.split_once('=') {
        Some((uuid, value)) => (uuid.trim(), Some(value.trim())),
        None => (part, None),
    })
}

impl Cordons {
    /// Reads an annotation; none is none.
    pub fn read(annotation: Option<&String>) -> Self {
        let named = entries(annotation).filter(|(uuid, _)| !uuid.is_empty());
        Self(named.map(|(uuid, reason)| (uuid.to_owned(), reason.unwrap_or_default().to_owned())).collect())
    }
}

impl Cleared {
    /// Reads an annotation; none is none.
    pub fn read(annotation: Option<&String>) -> Self {
        let timed = |(uuid, time): (&str, Option<&str>)| {
            let time: Timestamp = time?.parse().ok()?;
            (!uuid.is_empty()).then(|| (uuid.to_owned(), whole_seconds(time)))
        };
        Self(entries(annotation).filter_map(timed).collect())
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

impl fmt::Display for Cleared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (uuid, time)) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(formatter, "{comma}{uuid}={}", time.0)?;
        }
        Ok(())
    }
}

/// A time as the API server gives it back, which keeps no parts of seconds.
pub fn whole_seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cordons(text: &str) -> Vec<(String, String)> {
        Cordons::read(Some(&text.to_owned())).0.into_iter().collect()
    }

    #[test]
    fn entries_are_read_and_nonsense_hides_no_other() {
        let pair = |uuid: &str, reason: &str| (uuid.to_owned(), reason.to_owned());
        assert_eq!(cordons("GPU-a, GPU-b=new fan=yes ,,=x,"), [pair("GPU-a", ""), pair("GPU-b", "new fan=yes")]);
        assert!(cordons("").is_empty() && Cordons::read(None).0.is_empty());
        let cleared =
            Cleared::read(Some(&"GPU-a=2026-11-21T20:00:00.7Z,GPU-b=soon,GPU-c,=2026-11-21T20:00:00Z".into()));
        assert_eq!(cleared.to_string(), "GPU-a=2026-11-21T20:00:00Z");
    }

    #[test]
    fn a_reason_that_would_be_read_otherwise_is_refused() {
        assert_eq!(check_reason("fan: 3 of 4 = bad"), Ok(()));
        for bad in ["a,GPU-b", "a\nb"] {
            assert_eq!(check_reason(bad), Err(BadReason::Separator), "{bad:?}");
        }
        assert_eq!(check_reason(&"x".repeat(201)), Err(BadReason::Long));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(all in proptest::collection::btree_map("GPU-[0-9a-f]{1,8}", "[ -+\\--~]{0,20}", 0..5)) {
            let all: BTreeMap<String, String> = all.into_iter().map(|(uuid, reason)| (uuid, reason.trim().to_owned())).collect();
            prop_assume!(all.values().all(|reason| check_reason(reason).is_ok()));
            let written = Cordons(all);
            prop_assert_eq!(Cordons::read(Some(&written.to_string())), written);
        }

        #[test]
        fn no_annotation_makes_reading_fail(text in ".{0,60}") {
            Cordons::read(Some(&text));
            Cleared::read(Some(&text));
        }
    }
}
