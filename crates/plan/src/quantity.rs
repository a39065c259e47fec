//! Parses Kubernetes quantities, in thousandths.
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An amount of a resource as Kubernetes writes it: `64`, `500m`, `40960Mi`, `1e3`.
///
/// A text that is not a quantity has no value and causes no error, because one invalid object must
/// not make a whole snapshot unreadable.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    text: String,
    milli: Option<u64>,
}

/// Maximum length of a quantity in bytes. No Kubernetes object has a longer quantity.
const MAX_QUANTITY_BYTES: usize = 40;

impl Quantity {
    /// Parses a quantity. An invalid text has no value.
    pub fn new(text: &str) -> Self {
        Self { text: text.to_owned(), milli: parse_milli(text) }
    }

    /// Creates a quantity from a whole number.
    pub fn whole(count: u64) -> Self {
        Self { text: count.to_string(), milli: Some(count.saturating_mul(1000)) }
    }

    /// Creates an amount of memory in MiB.
    pub fn mebibytes(mebibytes: u64) -> Self {
        Self::new(&format!("{mebibytes}Mi"))
    }

    /// Returns the value in thousandths, rounded up. An amount that exceeds 64 bits is `u64::MAX`.
    /// Returns `None` if the text is not a quantity, is negative or has too many digits.
    pub const fn milli(&self) -> Option<u64> {
        self.milli
    }

    /// Returns the value as a whole number. Returns `None` if the value is not a whole number.
    pub fn count(&self) -> Option<u64> {
        self.milli.filter(|milli| milli % 1000 == 0).map(|milli| milli / 1000)
    }

    /// Returns the value in MiB (2^20 bytes), rounded down. Returns `None` if the quantity is
    /// malformed.
    pub fn as_mebibytes(&self) -> Option<u64> {
        self.milli.map(|milli| milli / 1000 / (1 << 20))
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Default for Quantity {
    fn default() -> Self {
        Self::whole(0)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum WrittenQuantity {
            Text(String),
            Whole(u64),
            Number(f64),
        }
        Ok(match WrittenQuantity::deserialize(deserializer)? {
            WrittenQuantity::Text(text) => Self::new(&text),
            WrittenQuantity::Whole(count) => Self::whole(count),
            WrittenQuantity::Number(number) => Self::new(&number.to_string()),
        })
    }
}

/// Parses a text such as `1.5Gi` to thousandths, rounded up. Returns `None` if the text is
/// malformed.
fn parse_milli(text: &str) -> Option<u64> {
    if text.len() > MAX_QUANTITY_BYTES {
        return None;
    }
    let text = text.strip_prefix('+').unwrap_or(text);
    let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits_end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || whole.len() > 20 || fraction.len() > 9 {
        return None;
    }
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let (multiplier, divisor) = suffix_factor(suffix)?;
    let divisor = divisor.checked_mul(10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?)?;
    let milli = digits.saturating_mul(multiplier).saturating_mul(1000).div_ceil(divisor);
    Some(u64::try_from(milli).unwrap_or(u64::MAX))
}

/// Returns the multiplier and divisor of a suffix. Returns `None` if the suffix is unknown.
fn suffix_factor(suffix: &str) -> Option<(u128, u128)> {
    Some(match suffix {
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1000),
        "" => (1, 1),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            let size = 10_u128.checked_pow(power.unsigned_abs()).filter(|_| power.abs() <= 18)?;
            if power < 0 { (1, size) } else { (size, 1) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_parsed_as_kubernetes_writes_them() {
        for (text, milli) in [
            ("64000m", 64_000),
            ("64", 64_000),
            ("0.5", 500),
            (".5", 500),
            ("1.5Ki", 1_536_000),
            ("1e3", 1_000_000),
            ("1E3", 1_000_000),
            ("5e-1", 500),
            ("1n", 1),
            ("1001u", 2),
            ("+2", 2000),
            ("16Ei", u64::MAX),
        ] {
            assert_eq!(Quantity::new(text).milli(), Some(milli), "{text}");
        }
        assert_eq!(Quantity::new("512Gi").as_mebibytes(), Some(512 * 1024));
        assert_eq!(Quantity::new("40960Mi").as_mebibytes(), Some(40_960));
    }

    #[test]
    fn an_invalid_quantity_has_no_value() {
        for text in [
            "",
            "-1",
            "1.2.3",
            "Gi",
            "1 Gi",
            "1ki",
            "abc",
            "1e99",
            "1e",
            ".",
            "999999999999999999999999",
            "0.0000000001",
            "1e-2147483648",
        ] {
            assert_eq!(Quantity::new(text).milli(), None, "{text}");
        }
        assert_eq!(Quantity::new("1500m").count(), None);
    }

    #[test]
    fn numbers_and_texts_are_both_accepted() {
        let read = |json: &str| serde_json::from_str::<Quantity>(json).map(|quantity| quantity.milli()).ok();
        assert_eq!(read("2"), Some(Some(2000)));
        assert_eq!(read("0.25"), Some(Some(250)));
        assert_eq!(read("-1"), Some(None));
        assert_eq!(read("\"2Gi\""), Some(Some((2 << 30) * 1000)));
    }
}
